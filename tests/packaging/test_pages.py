"""What the README and the pages show: every Python block runs, every command is understood."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import fastsparse_core

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "bash", "cpp", "{eval-rst}", "{include}", "{toctree}"}
#: Before a block that cannot run here: <!-- not run: why -->
BLOCK = re.compile(r"^(?:<!-- not run: (.+?) -->\n)?```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [(page, *found) for page in PAGES for found in BLOCK.findall(page.read_text())]
#: A process for every block, forked from one that has imported PyTorch alone, as that takes longest.
RUN = """
import json, os, sys, tempfile, traceback, types
import torch

def run(name, code):
    os.chdir(tempfile.mkdtemp())
    block = sys.modules["block"] = types.ModuleType("block")  # PyG looks up the module of a user's layer
    try:
        exec(compile(code, name, "exec"), vars(block))
        return 0
    except BaseException:
        print(name, traceback.format_exc(), sep="\\n", file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()

blocks, running, failed = json.load(sys.stdin), 0, False
while blocks or running:
    if blocks and running < os.cpu_count():
        block = blocks.pop()
        if not os.fork():
            os._exit(run(*block))
        running += 1
    else:
        failed |= os.wait()[1] != 0
        running -= 1
sys.exit(failed)
"""
PARSE = """
import argparse, json, os, runpy, sys

class Parsed(BaseException):
    pass

understand = argparse.ArgumentParser.parse_args

def parse_args(self, *args, **options):
    understand(self, *args, **options)
    raise Parsed

argparse.ArgumentParser.parse_args = parse_args
for command in json.load(sys.stdin):
    print(command)
    sys.argv = command
    by_path = command[0].endswith(".py")
    sys.path.insert(0, os.path.dirname(command[0]))  # as Python does
    try:
        (runpy.run_path if by_path else runpy.run_module)(command[0], run_name="__main__")
    except Parsed:
        continue
    sys.exit("no options were read")
"""


def run(program, what):
    """Runs a program that reads JSON, in a process of its own, and returns what it printed."""
    path = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(what),
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        capture_output=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("framework", ["dgl", "others"])
def test_python_blocks(framework):
    """Each alone, as a reader runs it."""
    if framework == "dgl":
        pytest.importorskip("fastsparse_dgl", exc_type=ImportError)
    chosen = [
        (f"{page.name}, block {number}", code)
        for number, (page, excuse, language, code) in enumerate(BLOCKS)
        if language == "python" and not excuse and ("dgl" in code) == (framework == "dgl")
    ]
    assert chosen
    for blocks in [[block] for block in chosen] if framework == "dgl" else [chosen]:
        run(RUN, blocks)


def test_accelerate_prints_what_its_page_shows():
    pytest.importorskip("torch_geometric")
    shown = re.compile(
        r"^```python\n(.*?)^```\n\nIt prints what it did:\n\n```\n(.*?)^```", re.MULTILINE | re.DOTALL
    )
    ((code, report),) = shown.findall((CHECKOUT / "docs" / "accelerate.md").read_text())
    assert [line.rstrip() for line in run(RUN, [("accelerate.md", code)]).splitlines()] == report.splitlines()


def test_no_code_hides_from_these_tests():
    """In blocks of another language, indented, or excused: for several GPUs, cugraph-pyg, C++ programs."""
    for page in PAGES:
        text = page.read_text()
        assert set(re.findall(r"^ *```(\S+)", text, re.MULTILINE)) <= LANGUAGES, page
        rest = re.sub(r"^```(?:python|bash)\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        code = r"^ *(>>> |import |from \S+ import |python |make |pip |torchrun )|^    +\w+ = \w+\(.*\)$"
        assert not re.search(code, rest, re.MULTILINE), page
    assert len([excuse for _, excuse, _, _ in BLOCKS if excuse]) == 5


def test_commands():
    """What the pages tell to run is understood up to the last option; test_readme.py runs some to the end."""
    chosen = []
    for page, _, language, code in BLOCKS:
        if language != "bash":
            continue
        for command in code.splitlines():
            match shlex.split(command, comments=True):
                case ["make", *targets]:
                    known = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
                    assert set(targets) <= known, (page, command)
                case ["pip", "install", target]:
                    (extras,) = re.fullmatch(r"(?:\.|fastsparse-gnn)\[([\w,]+)\]", target).groups()
                    for extra in extras.split(","):
                        assert f"\n{extra} = [" in (CHECKOUT / "pyproject.toml").read_text(), (page, command)
                case ["FASTSPARSE_CPP=1", "pip", "install", "--no-build-isolation", ".[pyg]"]:
                    pass  # .ci/run builds so
                case ["FASTSPARSE_CUDA_ARCHS=none", "python", "setup.py", "build_ext", "--inplace"]:
                    pass  # test_setup.py builds
                case ["source", ".venv/bin/activate"]:
                    assert "make setup" in code, (page, command)  # which makes it
                case ["python", "-m", "fastsparse_core.doctor"]:
                    pass  # tests/core/test_doctor.py runs it
                case ["fastsparse", "run", *options]:  # test_run.py runs it
                    names = {option.split("=")[0] for option in options[: options.index("train.py")]}
                    own = {name for name in names if name[:2] == "--"}
                    assert own <= {"--report", "--report-json"}, (page, command)
                case ["python", "-m", "benchmarks", *options]:
                    chosen.append(["benchmarks", *options])
                case ["torchrun", "--nproc-per-node", _, script, *options] | ["python", script, *options]:
                    chosen.append([str(CHECKOUT / script), *options])
                case _:
                    pytest.fail(f"{page}: teach this test what {command!r} is")
    assert len(chosen) >= 10
    run(PARSE, chosen)


def test_one_version():
    (declared,) = re.findall(r'^version = "(.+)"', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE)
    assert fastsparse_core.__version__ == declared
    for name in ("fastsparse_pyg", "fastsparse_dgl"):
        assert pytest.importorskip(name, exc_type=ImportError).__version__ == declared
