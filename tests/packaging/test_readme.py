"""The commands of README, installation and quick start run; test_pages.py runs their Python."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
BLOCKS = [
    block
    for name in ("README.md", "docs/installation.md", "docs/quick_start.md")
    for block in re.findall(r"^```(\w+)\n(.*?)^```", (CHECKOUT / name).read_text(), re.MULTILINE | re.DOTALL)
]
COMMANDS = list(
    dict.fromkeys(line for language, text in BLOCKS if language == "bash" for line in text.splitlines())
)


def test_the_readme_is_for_users_first():
    """What it gains, how to get it, how to use it, what it cannot do; development last."""
    text = (CHECKOUT / "README.md").read_text()
    assert re.findall("^## (.*)$", text, re.MULTILINE) == [
        "Install",
        "Run a script unchanged",
        "Swap one import",
        "Accelerate an existing model",
        "How much faster?",
        "When it is not faster",
        "How it compares",
        "Documentation",
    ]
    assert len(text.split()) < 900
    assert text.index("](benchmarks/results/") < text.index("## Install")
    assert COMMANDS[0] == 'pip install "fastsparse-gnn[pyg]"'
    assert {"make demo", "make test"} <= set(COMMANDS)
    assert {language for language, _ in BLOCKS} == {"python", "bash"}


def run(*command, cwd):
    path = os.pathsep.join(
        [str(CHECKOUT), str(CHECKOUT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, text=True, capture_output=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, tmp_path):
    words = shlex.split(command, comments=True)
    match words:
        case ["make", _]:
            # Not again from here what started this test; .ci/run executes these two.
            run("make", "--dry-run", *words[1:], cwd=CHECKOUT)
        case ["fastsparse", "run", *_]:
            pass  # test_run.py runs it
        case ["source", ".venv/bin/activate"]:
            pass  # `make setup` makes it; the commands below it run in the tests' environment
        case ["python", "-m", "fastsparse_core.doctor"]:
            pass  # tests/core/test_doctor.py runs it
        case ["python" | ".venv/bin/python", script, *options]:
            if "dgl" in options:
                pytest.importorskip("fastsparse_dgl", exc_type=ImportError)
            else:
                pytest.importorskip("torch_geometric")
            # To the end, on a graph of 34 nodes or 60 molecules; tests/examples has the larger ones.
            data = ("--molecules", "60") if script.endswith("molecules.py") else ("--dataset", "karate")
            small = (*data, "--epochs", "2", "--runs", "1")
            run(sys.executable, CHECKOUT / script, *options, *small, cwd=tmp_path)
        case ["pip", "install", target]:
            # test_build.py builds the wheel; what is left to check is that pip knows the extra.
            (extra,) = re.fullmatch(r"(?:\.|fastsparse-gnn)\[(\w+)\]", target).groups()
            assert re.search(rf"^{extra} = \[", (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE)
        case _:
            pytest.fail(f"teach this test to run {command!r}")
