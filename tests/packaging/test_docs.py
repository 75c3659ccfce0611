"""Links and paths in the documents lead somewhere."""

import importlib
import itertools
import re
import runpy
from pathlib import Path
from typing import get_args

import pytest

from fastsparse_core import doctor, doctor_report, policy
from fastsparse_core.formats import lengths

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(CHECKOUT.glob("*.md")), *sorted(CHECKOUT.glob("docs/**/*.md"))]
PACKAGES = ("kernels/fastsparse_core", "fastsparse_pyg", "fastsparse_dgl")
TOP_FOLDERS = r"(?:kernels|fastsparse_pyg|fastsparse_dgl|examples|tests|docs|benchmarks|\.ci)"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(CHECKOUT).as_posix())
def test_document(document):
    text = document.read_text()
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (document.parent / link).exists()] == []
    paths = re.findall(rf"`({TOP_FOLDERS}/[\w./-]*)`", text)
    assert [path for path in paths if not (CHECKOUT / path).exists()] == []
    for module in (policy, lengths):
        names = re.findall(rf"`{module.__name__.split('.')[-1]}\.(?!py`)(\w+)`", text)
        assert [name for name in names if not hasattr(module, name)] == []


def test_code_names_pages_that_exist():
    """In comments, docstrings, help and settings."""
    files = [CHECKOUT / name for name in ("setup.py", "pyproject.toml", "Makefile")]
    for folder in (*PACKAGES, "kernels", "examples", "benchmarks", "tests"):
        kinds = {".py", ".pyi", ".h", ".cuh", ".cu", ".cpp"}
        files += [path for path in (CHECKOUT / folder).rglob("*") if path.suffix in kinds]
    named = [(path, page) for path in files for page in re.findall(r"\bdocs/[\w/.]+\.md\b", path.read_text())]
    assert len(named) > 20
    assert [(path, page) for path, page in named if not (CHECKOUT / page).is_file()] == []


def test_every_problem_that_the_doctor_names_is_explained():
    sections = re.findall(r"^## (.*)$", (CHECKOUT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    keys = get_args(doctor_report.Key)
    assert sorted(sections[:-1]) == sorted(keys)  # the last is on what the doctor cannot see
    code = Path(doctor.__file__).read_text()
    assert [key for key in keys if f'"{key}"' not in code] == []  # where a problem is made


@pytest.mark.parametrize("package", ["fastsparse_core", "fastsparse_pyg", "fastsparse_dgl"])
def test_the_reference_has_every_public_name(package):
    module = pytest.importorskip(package, exc_type=ImportError)
    page = (CHECKOUT / "docs" / "api" / f"{package}.md").read_text()
    documented = re.findall(rf"^\.\. auto(?:class|function):: {package}\.(\w+)$", page, re.MULTILINE)
    public = {name for name in module.__all__ if not name.startswith("__")}
    if package != "fastsparse_core":
        public -= set(importlib.import_module("fastsparse_core").__all__)
    assert sorted(set(documented) & public) == sorted(public)
    assert len(documented) == len(set(documented))


def rows_of(page, heading):
    """The cells of the first table below a heading."""
    lines = (CHECKOUT / page).read_text().partition(heading)[2].splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("|"))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    return [line.strip("|").split("|") for line in table]


@pytest.mark.parametrize(("plugin", "column"), [("fastsparse_pyg", 1), ("fastsparse_dgl", 2)])
def test_tables_of_layers_are_those_of_the_plugin(plugin, column):
    nn = pytest.importorskip(f"{plugin}.nn", exc_type=ImportError)
    replaced = {drop_in.__name__: original.__name__ for original, drop_in in nn.DROP_INS.items()}

    def names(cell, pattern=r"`(\w+)`"):
        return re.findall(pattern, cell)

    shown = {}
    for cells in rows_of("docs/layers.md", "# Layers"):
        layers = names(cells[2 * column - 1], r"`(Fast\w+)`")
        shown |= dict(zip(layers, names(cells[2 * column]), strict=False))
        assert set(layers) <= set(nn.__all__)
    assert replaced.items() <= shown.items()
    rows = rows_of("README.md", "## What is supported")
    named = {name for cells in rows for name in names(cells[column], r"`(Fast\w+)`")}
    assert named <= set(nn.__all__)
    (more,) = (int(found[1]) for cells in rows if (found := re.match(r" (\d+) more: ", cells[0])))
    assert len(replaced.keys() - named) == (more if plugin == "fastsparse_pyg" else 0)


def test_the_table_of_accelerate_names_drop_ins():
    nn = pytest.importorskip("fastsparse_pyg.nn")
    replaced = {original.__name__: drop_in.__name__ for original, drop_in in nn.DROP_INS.items()}
    text = (CHECKOUT / "docs" / "accelerate.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ((?:Fast|Accelerated)\w+) \|", text, re.MULTILINE)
    assert len(rows) > 40
    assert [row for row in rows if row[1] != replaced.get(row[0], f"Accelerated{row[0]}")] == []


def test_the_site_shows_every_page():
    docs = CHECKOUT / "docs"
    pages = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.glob("**/*.md")}
    trees = re.findall(r"```{toctree}\n(.*?)```", (docs / "index.md").read_text(), re.DOTALL)
    shown = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    assert sorted(shown) == sorted(pages - {"index"})


FORMULA = re.compile(
    r"\$\$((?s:.+?))\$\$|(?<![`$])\$([^$`]+)\$|:math:`([^`]+)`|\.\. math::\n\n?((?: +\S.*\n)+)"
)


def test_browsers_draw_the_formulas():
    """A command that the converter to MathML does not know would stay in the text with its backslash."""
    convert = pytest.importorskip("latex2mathml.converter").convert
    pytest.importorskip("sphinx")
    math_text = runpy.run_path(str(CHECKOUT / "docs" / "conf.py"))["math_text"]
    prose = [re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL) for path in DOCUMENTS]
    code = [path.read_text() for package in PACKAGES for path in (CHECKOUT / package).rglob("*.py")]
    formulas = ["".join(found) for text in prose + code for found in FORMULA.findall(text)]
    assert len(formulas) > 150
    drawn = {formula: convert(math_text(formula)) for formula in formulas}
    assert [formula for formula, mathml in drawn.items() if re.search(r"\\|>&<|linebreak", mathml)] == []


def test_drawings_are_what_their_script_draws():
    folder = CHECKOUT / "docs" / "drawings"
    drawings = runpy.run_path(str(folder / "draw.py"))["DRAWINGS"]
    assert {name: draw() for name, draw in drawings.items()} == {
        path.stem: path.read_text() for path in folder.glob("*.svg")
    }
