"""What the README and the pages show: every Python block runs, every command is one that exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastsparse_core

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
#: Before a block that cannot run here: <!-- not run: why -->
BLOCK = re.compile(r"^(?:<!-- not run: (.+?) -->\n)?```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [(page, *found) for page in PAGES for found in BLOCK.findall(page.read_text())]
RUN = """
import json, os, sys, tempfile, traceback, warnings
warnings.filterwarnings("ignore")
failed = []
for name, code in json.load(sys.stdin):
    os.chdir(tempfile.mkdtemp())
    try:
        exec(compile(code, name, "exec"), {"__name__": "block"})
    except Exception:
        failed.append(f"{name}\\n{traceback.format_exc()}")
print("\\n".join(failed), file=sys.stderr)
sys.exit(bool(failed))
"""


@pytest.mark.parametrize("framework", ["dgl", "others"])
def test_python_blocks(framework):
    """All of them in one process for each framework, as importing takes longest."""
    import json

    if framework == "dgl":
        pytest.importorskip("fastsparse_dgl", exc_type=ImportError)
    chosen = [
        (f"{page.name}, block {number}", code)
        for number, (page, excuse, language, code) in enumerate(BLOCKS)
        if language == "python" and not excuse and ("dgl" in code) == (framework == "dgl")
    ]
    assert chosen
    path = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(chosen),
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_lies_in_blocks_that_are_run():
    """Code by indentation would be run by nobody."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"^ {4}(import|from \w+ import) ", text, re.MULTILINE), page


def test_commands_name_files_and_modules_that_exist():
    for page, _, language, code in BLOCKS:
        if language != "bash":
            continue
        for command in code.splitlines():
            for script in re.findall(
                r"(?<!\S)(?:python|torchrun)\b.*?\s((?:examples|tests)/\S+\.py)", command
            ):
                assert (CHECKOUT / script).is_file(), (page, command)
            for module in re.findall(r"python -m (fastsparse_\w+\.\w+|benchmarks)\b", command):
                top, _, name = module.partition(".")
                folder = CHECKOUT / ("kernels" if top == "fastsparse_core" else "") / top
                assert (folder / f"{name or '__main__'}.py").is_file(), (page, command)


def test_one_version():
    (declared,) = re.findall(r'^version = "(.+)"', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE)
    assert fastsparse_core.__version__ == declared
    for name in ("fastsparse_pyg", "fastsparse_dgl"):
        assert pytest.importorskip(name, exc_type=ImportError).__version__ == declared
