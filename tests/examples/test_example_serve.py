"""A C++ program without Python gives the numbers of the Python model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from example_runs import need

import fastsparse_core
from fastsparse_core.export import cpp_library

pytestmark = pytest.mark.slow


@pytest.fixture
def serve():
    need("pyg")
    for program in ("cmake", "c++"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    try:
        cpp_library()
    except FileNotFoundError:
        pytest.skip("built without FASTSPARSE_CPP=1")
    from serve import serve

    return serve


def test_a_cpp_program_answers_as_the_model(serve, tmp_path, capfd, monkeypatch):
    """Edges of the request, and edges that are a part of the package; `serve.py` compares the numbers."""
    monkeypatch.setenv("PYTHONPATH", str(Path(fastsparse_core.__file__).parents[1]))  # for cmake's question
    with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        serve.main(
            [
                "--folder",
                str(tmp_path),
                "--device",
                "cpu",
                "--repeats",
                "1",
                "--models",
                "gat",
                "sage-one-graph",
            ]
        )
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()[-2:]] == ["gat", "sage-one-graph"]


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    import fastsparse_core.export as export

    monkeypatch.setattr(export, "__file__", str(tmp_path / "export.py"))
    with pytest.raises(FileNotFoundError, match="FASTSPARSE_CPP=1"):
        export.cpp_library()
