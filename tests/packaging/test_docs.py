"""Links and paths in the documents lead somewhere."""

import importlib
import posixpath
import re
import runpy
import sys
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
    if package != "fastsparse_core":
        assert f"\n<!-- layers of {package} -->\n" in page  # which `docs/conf.py` replaces with all of them
        documented += importlib.import_module(f"{package}.nn").__all__
    public = {name for name in module.__all__ if not name.startswith("__")}
    if package != "fastsparse_core":
        public -= set(importlib.import_module("fastsparse_core").__all__)
    assert sorted(set(documented) & public) == sorted(public)
    assert len(documented) == len(set(documented))


@pytest.mark.parametrize("framework", ["PyG", "DGL"])
def test_tables_of_layers_are_current(framework):
    """Made of DROP_INS and of trials; what the page says of other layers names layers that exist."""
    for plugin in ("fastsparse_pyg", "fastsparse_dgl"):
        pytest.importorskip(f"{plugin}.nn", exc_type=ImportError)
    layer_table = importlib.import_module("layer_table")
    assert layer_table.shown(framework) == layer_table.TABLES[framework](), (
        "run python tests/packaging/layer_table.py"
    )
    exported = {name for plugin in ("pyg", "dgl") for name in sys.modules[f"fastsparse_{plugin}.nn"].__all__}
    page = layer_table.PAGE.read_text()
    assert {name for name in exported if f"`{name}`" not in page} == set()


def test_the_table_of_accelerate_names_drop_ins():
    nn = pytest.importorskip("fastsparse_pyg.nn")
    replaced = {original.__name__: drop_in.__name__ for original, drop_in in nn.DROP_INS.items()}
    text = (CHECKOUT / "docs" / "pyg_layers.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ((?:Fast|Accelerated)\w+) \|", text, re.MULTILINE)
    assert len(rows) > 40
    assert [row for row in rows if row[1] != replaced.get(row[0], f"Accelerated{row[0]}")] == []


def test_every_environment_variable_has_a_line():
    page = (CHECKOUT / "docs" / "environment.md").read_text()
    named = set()
    folders = (*PACKAGES, "fastsparse_run", "examples", "benchmarks", "tests")
    files = [path for folder in folders for path in (CHECKOUT / folder).rglob("*.py")]
    files += [CHECKOUT / name for name in ("setup.py", "Makefile", "Dockerfile", "recipe/meta.yaml")]
    files += [*CHECKOUT.glob(".ci/*"), *CHECKOUT.glob(".github/workflows/*")]
    for path in files:
        named |= set(re.findall(r"\bFASTSPARSE_[A-Z0-9_]*[A-Z0-9]\b", path.read_text()))
    # A test's own, which it sets itself, and macros of C++.
    assert {
        name
        for name in named - {"FASTSPARSE_NOT_IN_WORKERS", "FASTSPARSE_ARGUMENTS", "FASTSPARSE_WITH_CUDA"}
        if f"`{name}`" not in page
    } == set()
    rows = re.findall(r"^\| `(\w+)`", page, re.MULTILINE)
    assert sorted(set(rows)) == sorted(rows)


TREES = re.compile(r"```{toctree}\n(.*?)```", re.DOTALL)


def pages_below(page, docs):
    """The pages that a page's trees name, and those below them."""
    found = []
    path = docs / f"{page}.md"
    for tree in TREES.findall(path.read_text() if path.exists() else ""):
        for line in tree.splitlines():
            if line and not line.startswith(":"):
                name = posixpath.normpath(posixpath.join(posixpath.dirname(page), line))
                found += [name, *pages_below(name, docs)]
    return found


def test_the_site_shows_every_page():
    docs = CHECKOUT / "docs"
    paths = [*docs.glob("**/*.md"), *docs.glob("**/*.ipynb")]
    pages = {path.relative_to(docs).with_suffix("").as_posix() for path in paths}
    assert sorted(pages_below("index", docs)) == sorted(pages - {"index"})


def test_developers_pages_are_a_tree_of_their_own():
    """Users see one entry for them."""
    docs = CHECKOUT / "docs"
    first = [line for tree in TREES.findall((docs / "index.md").read_text()) for line in tree.splitlines()]
    assert [line for line in first if line.startswith(("dev/", "notes/", "contributing"))] == ["dev/index"]
    for page in docs.glob("*.md"):
        assert len(page.read_text().splitlines()) < 150, page


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


def test_names_of_other_projects_have_links():
    """The site's rules know every name that docstrings refer to."""
    pytest.importorskip("sphinx")
    pytest.importorskip("latex2mathml")
    rules = runpy.run_path(str(CHECKOUT / "docs" / "conf.py"))["_ELSEWHERE"]
    code = [path.read_text() for package in PACKAGES for path in (CHECKOUT / package).rglob("*.py")]
    names = {name for text in code for name in re.findall(r":\w+:`~?((?:torch|dgl)[\w.]*\.\w+)`", text)}
    assert len(names) > 40
    assert {name for name in names if not any(re.fullmatch(rule, name) for rule, _ in rules)} == set()


def test_drawings_are_what_their_script_draws():
    folder = CHECKOUT / "docs" / "drawings"
    drawings = runpy.run_path(str(folder / "draw.py"))["DRAWINGS"]
    assert {name: draw() for name, draw in drawings.items()} == {
        path.stem: path.read_text() for path in folder.glob("*.svg")
    }
