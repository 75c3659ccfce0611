"""The notebook of the quick start runs from its first to its last cell."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CHECKOUT = Path(__file__).resolve().parents[2]


def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("torch_geometric")
    path = [str(CHECKOUT), str(CHECKOUT / "kernels"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    notebook = nbformat.read(CHECKOUT / "examples" / "quick_start.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # times of one machine would mislead
    nbclient.NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs)
    assert "2 of 2 graph layers swapped" in printed
    assert "FastGCNConv" in printed.splitlines()[-1]
