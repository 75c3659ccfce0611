"""What the packaging tests share: setup.py as a module, and a copy of the checkout to build in."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_py():
    """A fresh module from setup.py, so that a test may change its ROOT."""
    spec = importlib.util.spec_from_file_location("fastsparse_setup", CHECKOUT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="session")
def checkout_copy(tmp_path_factory):
    """A copy of what a build needs, with the checkout's cache of objects so that little is compiled twice."""
    copy = tmp_path_factory.mktemp("copy") / "fastsparse"
    copy.mkdir()
    unwanted = shutil.ignore_patterns("*.so", "__pycache__")
    packages = ("kernels", "fastsparse_pyg", "fastsparse_dgl", "fastsparse_run")
    for name in (*packages, "examples", "benchmarks", "tests", "docs"):
        if (CHECKOUT / name).is_dir():
            shutil.copytree(CHECKOUT / name, copy / name, ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, copy)
    if (CHECKOUT / "build" / "objects").is_dir():
        shutil.copytree(CHECKOUT / "build" / "objects", copy / "build" / "objects")
    return copy


@pytest.fixture(scope="session")
def run_build():
    """Runs a Python command that builds the CPU half (unless `archs` says more); returns what it printed."""

    def run(*arguments, cwd, archs="none"):
        # What is built here only has to load: without optimisation the files compile in a fifth of the time.
        env = {**os.environ, "FASTSPARSE_CUDA_ARCHS": archs, "CXXFLAGS": "-O0"}
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run
