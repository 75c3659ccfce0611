"""Imports go downwards only, and the kernels know neither PyTorch nor, except for the binding, Python."""

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
ABOVE = {
    "kernels/fastsparse_core": {"fastsparse_pyg", "fastsparse_dgl", "torch_geometric", "dgl", "examples"},
    "fastsparse_pyg": {"fastsparse_dgl", "dgl", "examples"},
    "fastsparse_dgl": {"fastsparse_pyg", "torch_geometric", "examples"},
}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", ABOVE)
def test_imports_go_downwards(package):
    modules = sorted((CHECKOUT / package).rglob("*.py"))
    assert modules
    found = {(path.name, name) for path in modules for name in imports_of(path) if name in ABOVE[package]}
    assert found == set()


def test_kernels_include_neither_torch_nor_python():
    """But for the library of operators for C++ programs, which is no part of the extension."""
    sources = [
        path
        for path in (CHECKOUT / "kernels").rglob("*")
        if path.suffix in {".h", ".cuh", ".cpp", ".cu"} and path.name != "torch_operators.cpp"
    ]
    assert sources
    includes = {
        (path.name, name.split("/")[0])
        for path in sources
        for name in re.findall(r'#include\s+[<"]([^>"]+)[>"]', path.read_text())
    }
    assert not [pair for pair in includes if pair[1] in {"torch", "ATen", "c10"}]
    assert not [pair for pair in includes if pair[1] == "Python.h"]
    assert {file for file, name in includes if name == "pybind11"} == {"binding.cpp", "packing.h"}
