"""Sphinx's settings: `make docs` builds the site into build/site, with warnings as errors."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.ext.napoleon import GoogleDocstring

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "kernels")]

project = "FastSparse"
(release,) = re.findall(r'^version = "(.+)"$', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE)
html_title = f"{project} {release}"
html_theme = "furo"
# Links to the repository and to each page's source, where the workflow that builds the site names them.
if repository := os.environ.get("GITHUB_REPOSITORY"):
    html_theme_options = {
        "source_repository": f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}",
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_favicon = "favicon.svg"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
# Nothing is fetched when a page is read: formulas are MathML, which browsers draw themselves.
html_math_renderer = "mathml"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

source_suffix = {".md": "markdown", ".ipynb": "notebook"}
# GitHub's Markdown, as far as it is used here. Headings are link targets.
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath", "strikethrough"]
# Drawn in a lexer's colours where a language is named, plainly elsewhere.
highlight_language = "text"
pygments_dark_style = "github-dark"  # furo's own underlines imports

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shapes", "Source"]

# A reference to a name of ours must exist. References to other projects follow the rules of their sites:
# intersphinx would have to fetch inventories, and the site could not be built without a network.
_PYG, _DGL = "https://pytorch-geometric.readthedocs.io/en/latest", "https://www.dgl.ai/dgl_docs/generated"
_TORCH = "https://docs.pytorch.org/docs/stable"
_ELSEWHERE = (
    (r"torch_geometric\.nn\.(?:conv|models)\.\w+", rf"{_PYG}/generated/\g<0>.html"),
    (r"torch_geometric\.loader\.\w+", rf"{_PYG}/modules/loader.html#\g<0>"),
    (
        r"dgl\.nn\.pytorch\.(?:conv\.)?(?:\w+\.)?(\w+Conv)(?<!HeteroGraphConv)",
        rf"{_DGL}/dgl.nn.pytorch.conv.\1.html",
    ),
    (r"dgl\.nn\.pytorch\.(?:\w+\.)?HeteroGraphConv", rf"{_DGL}/dgl.nn.pytorch.HeteroGraphConv.html"),
    (r"dgl\.dataloading\.(?:\w+\.)?(\w+)", rf"{_DGL}/dgl.dataloading.\1.html"),
    (r"torch\.Tensor", rf"{_TORCH}/tensors.html"),
    (r"torch\.(?:device|dtype)", rf"{_TORCH}/tensor_attributes.html#\g<0>"),
    (r"torch\.(?:topk|Tensor\.to|nn\.Module)", rf"{_TORCH}/generated/\g<0>.html"),
)
nitpicky = True
_INTERNAL = (
    r"fastsparse_core\.([\w.]+\._\w+|formats\..*|gpu\.GpuProfile|sampling\.(relations\.Graph|part\.Layout)"
    r"|distributed\.exchange\.(HaloExchange|ColumnExchange)|call_report\.Times|tiling\.(NeighbourSum|TiledModel))"
)
nitpick_ignore_regex = [(r"py:.*", rf"(?!fastsparse_).*|{_INTERNAL}")]

#: Files of the repository that pages of the site include -> those pages.
INCLUDED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(\]\()([^)#\s]+)")


def between_pages(text: str, source: str) -> str:
    """Makes links of a file in the repository links between pages of the site.

    Args:
        text: The file's Markdown.
        source: Its path in the repository.
    """

    def moved(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", match[2]):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        page = f"docs/{INCLUDED[path]}" if path in INCLUDED else path
        folder = "docs" if source in INCLUDED else posixpath.dirname(source)
        return match[1] + posixpath.relpath(page, folder)

    return _LINK.sub(moved, text)


#: Addresses that docstrings give as they are -> what the site shows as the link's title.
_PAPERS = ((r"https://arxiv\.org/abs/(.+)", r"arXiv:\1"), (r"https://openreview\.net/.+", "OpenReview"))


def title_links(app: Any, doctree: nodes.document) -> None:
    """Gives links to papers a title in place of their address."""
    for link in doctree.findall(nodes.reference):
        for address, title in _PAPERS:
            if link.astext() == link.get("refuri") and re.fullmatch(address, link.astext()):
                link.children = [nodes.Text(re.sub(address, title, link.astext()))]


def link_elsewhere(app: Any, env: Any, node: nodes.Element, content: nodes.Node) -> nodes.reference | None:
    """A link to the page of another project that describes a name."""
    for name, address in _ELSEWHERE:
        if match := re.fullmatch(name, node.get("reftarget", "")):
            return nodes.reference("", "", content, internal=False, refuri=match.expand(address))
    return None


def add_arguments(app: Any, what: str, name: str, layer: Any, options: Any, lines: list[str]) -> None:
    """Shows the constructor's arguments of a drop-in as the docstring of its original describes them."""
    if what != "class" or ":param" in "\n".join(lines):
        return
    for original in layer.__mro__[1:]:
        text = inspect.cleandoc(original.__doc__ or "")
        if original.__module__.startswith("torch_geometric.nn.") and (
            found := re.search(r"^Args:\n.*?(?=^\w|\Z)", text, re.MULTILINE | re.DOTALL)
        ):
            described = GoogleDocstring(found[0], app.config)
            place = next((at for at, line in enumerate(lines) if line.startswith(".. rubric::")), len(lines))
            lines[place:place] = ["", *described.lines(), ""]
            return


def notebook_text(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: its texts, code, and what the cells printed and plotted."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = "".join(output.get("text") or data.get("text/plain", "")).rstrip()
            if "image/png" in data:
                parts.append(f"![Plot](data:image/png;base64,{data['image/png'].strip()})")
            elif text:
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts)


class NotebookParser(MystParser):
    """Reads a notebook as the Markdown that it is made of."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Adds the notebook's content to a document."""
        super().parse(notebook_text(json.loads(inputstring)), document)


def math_text(formula: str) -> str:
    r"""Formulas of several lines, `a &= b \\ c &= d`, as the environment that the converter draws."""
    return rf"\begin{{split}}{formula}\end{{split}}" if "&" in formula else formula


def write_formula(writer: Any, node: nodes.math | nodes.math_block) -> None:
    """Writes a formula, inline or displayed, as MathML."""
    is_block = isinstance(node, nodes.math_block)
    mathml = convert(math_text(node.astext()), display="block" if is_block else "inline")
    writer.body.append(f'<div class="math">{mathml}</div>' if is_block else mathml)
    raise nodes.SkipNode


def with_layers(text: str) -> str:
    """A page with an entry for every layer of the plugin that a comment in it names."""

    def entries(found: re.Match[str]) -> str:
        names = importlib.import_module(f"{found[1]}.nn").__all__
        blocks = (f"```{{eval-rst}}\n.. autoclass:: {found[1]}.{name}\n```\n" for name in names)
        return "\n".join(blocks)

    return re.sub(r"<!-- layers of (\w+) -->", entries, text)


def with_links_to_layers(text: str) -> str:
    """A page whose tables of a plugin's layers link each layer to its entry in the reference."""

    def linked(found: re.Match[str]) -> str:
        return re.sub(
            r"^\| `(\w+)`", rf"| {{py:class}}`~fastsparse_{found[1].lower()}.\1`", found[0], flags=re.M
        )

    return re.sub(r"<!-- (PyG|DGL) layers: .*?\n\n.*?\n\n", linked, text, flags=re.S)


def setup(app: Any) -> None:
    """Registers the writer of formulas; hooks the functions above into reading."""

    def on_page(app: Any, page: str, text: list[str]) -> None:
        text[0] = with_links_to_layers(with_layers(between_pages(text[0], f"docs/{page}.md")))

    def on_include(app: Any, path: Path, page: str, text: list[str]) -> None:
        text[0] = between_pages(
            text[0], (CHECKOUT / "docs" / path).resolve().relative_to(CHECKOUT).as_posix()
        )

    def on_bases(app: Any, name: str, obj: Any, options: Any, bases: list[type]) -> None:
        # A reader wants to know what a layer can stand in for, not from which mixins it is made.
        bases[:] = [base for base in obj.__mro__[1:] if not base.__module__.startswith("fastsparse_")][:1]

    app.add_source_parser(NotebookParser)
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.connect("autodoc-process-bases", on_bases)
    app.connect("autodoc-process-docstring", add_arguments, priority=900)  # after napoleon
    app.connect("missing-reference", link_elsewhere)
    app.connect("doctree-read", title_links)
    app.connect("source-read", on_page)
    app.connect("include-read", on_include)
