"""The notebooks run, and the tutorials show their outputs. As a script it runs them and stores these."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from test_pages import CHECKOUT, RUN, run
from test_prose import faults

NOTEBOOKS = sorted((CHECKOUT / "docs" / "tutorials").glob("*.ipynb"))
#: It measures, and times of one machine would mislead: it is stored without outputs.
QUICK_START = CHECKOUT / "docs" / "tutorials" / "quick_start.ipynb"
TUTORIALS = [path for path in NOTEBOOKS if path != QUICK_START]


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def sources(path: Path, kind: str) -> str:
    return "\n\n".join("".join(cell["source"]) for cell in cells(path, kind))


@pytest.mark.parametrize("framework", ["dgl", "pyg"])
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_notebooks_run(framework: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel of Jupyter, all side by side: starting one takes longer than most of them."""
    pytest.importorskip(f"fastsparse_{framework}", exc_type=ImportError)
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    if device == "cpu":  # they take a GPU if there is one
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    blocks = [(path.name, sources(path, "code")) for path in NOTEBOOKS]
    chosen = [block for block in blocks if ("import dgl" in block[1]) == (framework == "dgl")]
    assert chosen
    printed = run(RUN, chosen)
    if framework == "pyg":
        assert "2 of 2 graph layers swapped" in printed


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_show_outputs(path: Path) -> None:
    outputs = [output for cell in cells(path, "code") for output in cell["outputs"]]
    assert not [
        output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    assert any("image/png" in output.get("data", {}) for output in outputs), (
        f"run python {Path(__file__).name}"
    )
    assert path.stat().st_size < 250_000  # a plot takes 20 to 150 kB


def test_quick_start_has_no_outputs() -> None:
    assert not any(cell["outputs"] for cell in cells(QUICK_START, "code"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_prose_and_links(path: Path) -> None:
    text = sources(path, "markdown")
    assert faults(text) == []
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []


if __name__ == "__main__":
    import nbclient
    import nbformat

    os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "kernels")])
    for path in [Path(name) for name in sys.argv[1:]] or TUTORIALS:
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(notebook, timeout=600, record_timing=False).execute()
        for cell in notebook.cells:
            if cell["cell_type"] == "code":  # stderr has warnings of this machine's packages
                cell["outputs"] = [one for one in cell["outputs"] if one.get("name") != "stderr"]
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
