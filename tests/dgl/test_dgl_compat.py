"""The placeholder of dgl.graphbolt: when it is installed, and in which order things may be imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from fastsparse_core import dgl_import

pytestmark = pytest.mark.slow

NEEDS_STUB = dgl_import.graphbolt_problem() is not None
needs_stub = pytest.mark.skipif(not NEEDS_STUB, reason="this DGL imports without the placeholder")
needs_none = pytest.mark.skipif(NEEDS_STUB, reason="this DGL does not import without the placeholder")


def python(code: str) -> str:
    """Runs code in a fresh interpreter and returns what it printed."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_makes_dgl_usable():
    code = """
import fastsparse_dgl, dgl, torch
from dgl.nn import GraphConv
graph = dgl.add_self_loop(dgl.rand_graph(5, 9))
for layer in (GraphConv, fastsparse_dgl.FastGraphConv):
    print(layer(3, 2)(graph, torch.ones(5, 3)).shape)
"""
    assert python(code).split("\n") == ["torch.Size([5, 2])"] * 2


@pytest.mark.parametrize("first", ["fastsparse_core", "fastsparse_pyg", "fastsparse_core.doctor"])
def test_any_import_makes_dgl_usable(first):
    if first == "fastsparse_pyg":
        pytest.importorskip("torch_geometric")
    code = f"""
import sys, {first}
assert "dgl" not in sys.modules
import dgl
import dgl.nn, dgl.dataloading, fastsparse_dgl
print(dgl.rand_graph(3, 4).num_edges(), fastsparse_dgl.compat.dgl is dgl)
"""
    assert python(code) == "4 True"


@needs_stub
@pytest.mark.parametrize("then", ["fastsparse_core", "fastsparse_dgl"])
def test_after_a_failed_import(then):
    code = f"""
try:
    import dgl
except Exception as error:
    print(type(error).__name__)
import {then}, dgl
print(type(dgl.graphbolt).__name__, dgl.rand_graph(3, 4).num_edges())
"""
    printed = python(code)
    assert "Error" in printed
    assert printed.split("\n")[-1] == "GraphboltStub 4"


@needs_stub
def test_stub_says_what_is_missing():
    code = """
import fastsparse_dgl
import dgl.graphbolt
from dgl import graphbolt
assert graphbolt is dgl.graphbolt
assert not hasattr(graphbolt, "ItemSet") and not hasattr(graphbolt, "__file__")
try:
    graphbolt.ItemSet
except AttributeError as error:
    print(error)
try:
    from dgl.graphbolt import ItemSet
except ImportError as error:
    print("ImportError")
try:
    import dgl.graphbolt.base
except ModuleNotFoundError as error:
    print("ModuleNotFoundError")
"""
    lines = python(code).split("\n")
    assert lines[0].startswith("dgl.graphbolt.ItemSet is not available: DGL 2.")
    assert "install the torch and torchdata versions" in lines[0]
    assert lines[1:] == ["ImportError", "ModuleNotFoundError"]


@needs_stub
@pytest.mark.parametrize("before", ["", "import dgl"])
def test_another_stub_is_left_alone(before):
    code = f"""
import sys, types
theirs = types.ModuleType("dgl.graphbolt")
theirs.__path__ = []
sys.modules["dgl.graphbolt"] = theirs
{before}
import fastsparse_dgl
print(sys.modules["dgl.graphbolt"] is theirs, fastsparse_dgl.compat.dgl is sys.modules["dgl"])
"""
    assert python(code) == "True True"


@needs_none
@pytest.mark.parametrize("order", ["import dgl, fastsparse_dgl", "import fastsparse_dgl, dgl"])
def test_no_stub_where_dgl_works(order):
    code = f"""
import sys
{order}
print(type(sys.modules.get("dgl.graphbolt")).__name__)
"""
    assert python(code) in ("NoneType", "module")


@pytest.mark.parametrize("version", [(3, 11), (3, 13)])
def test_dgl_missing(version):
    code = f"""
import importlib.abc, importlib.metadata, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dgl":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

import torch, fastsparse_core
sys.meta_path.insert(0, Hide())
importlib.metadata.version = missing
sys.version_info = {version} + (0, "final", 0)
try:
    import fastsparse_dgl
except ImportError as error:
    print(error)
"""
    message = python(code)
    assert message.startswith("fastsparse_dgl needs DGL, which is not installed")
    assert "pip install" in message
    assert ("no wheel for Python 3.13" in message) == (version >= (3, 13))


class TestGraphboltProblem:
    """Every condition, with DGL and torchdata as fake folders."""

    @pytest.fixture(autouse=True)
    def _fake(self, monkeypatch, tmp_path):
        self.dgl_version: str | None = "2.1.0"
        self.packages = {"dgl": tmp_path / "dgl", "torchdata": tmp_path / "torchdata"}
        (tmp_path / "dgl" / "graphbolt").mkdir(parents=True)
        (tmp_path / "torchdata" / "datapipes").mkdir(parents=True)
        (tmp_path / "torchdata" / "datapipes" / "__init__.py").touch()
        self.library = tmp_path / "dgl" / "graphbolt" / "libgraphbolt_pytorch_9.8.7.so"
        self.library.touch()
        monkeypatch.setattr(dgl_import.torch, "__version__", "9.8.7+cpu")
        monkeypatch.setattr(importlib.metadata, "version", self._version)
        monkeypatch.setattr(importlib.util, "find_spec", self._find_spec)

    def _version(self, name):
        if self.dgl_version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.dgl_version

    def _find_spec(self, name):
        folder = self.packages.get(name)
        if folder is None:
            return None
        spec = ModuleSpec(name, loader=None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    def test_everything_there(self):
        assert dgl_import.graphbolt_problem() is None

    def test_library_for_another_torch(self):
        self.library.rename(self.library.with_name("libgraphbolt_pytorch_2.2.1.so"))
        assert dgl_import.graphbolt_problem() == "DGL 2.1.0 has no GraphBolt library for torch 9.8.7"

    def test_torchdata_without_datapipes(self):
        (self.packages["torchdata"] / "datapipes" / "__init__.py").unlink()
        assert "torchdata.datapipes" in dgl_import.graphbolt_problem()

    def test_no_torchdata(self):
        del self.packages["torchdata"]
        assert "torchdata.datapipes" in dgl_import.graphbolt_problem()

    @pytest.mark.parametrize("version", ["1.1.3", "0.9.1", None])
    def test_versions_without_graphbolt(self, version):
        self.dgl_version = version
        self.library.unlink()
        assert dgl_import.graphbolt_problem() is None

    def test_dgl_without_folder(self):
        del self.packages["dgl"]
        assert dgl_import.graphbolt_problem() is None
