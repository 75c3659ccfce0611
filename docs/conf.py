"""Sphinx's settings: `make docs` builds the site into build/site, with warnings as errors."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "kernels")]

project = "FastSparse"
html_title = project
html_theme = "furo"
html_show_copyright = False
html_static_path: list[str] = []
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]

# GitHub's Markdown, as far as it is used here. Headings are link targets.
myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough"]
# Drawn in a lexer's colours where a language is named, plainly elsewhere.
highlight_language = "text"

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shapes", "Source"]

# A reference to a name of ours must exist. Other projects' inventories would have to be fetched.
nitpicky = True
_INTERNAL = r"fastsparse_core\.(\w+\._T|formats\..*|distributed\.exchange\.HaloExchange)"
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


def setup(app: Any) -> None:
    """Hooks `between_pages` into the reading of pages and of what they include."""

    def on_page(app: Any, page: str, text: list[str]) -> None:
        text[0] = between_pages(text[0], f"docs/{page}.md")

    def on_include(app: Any, path: Path, page: str, text: list[str]) -> None:
        text[0] = between_pages(
            text[0], (CHECKOUT / "docs" / path).resolve().relative_to(CHECKOUT).as_posix()
        )

    def on_bases(app: Any, name: str, obj: Any, options: Any, bases: list[type]) -> None:
        # A reader wants to know what a layer can stand in for, not from which mixins it is made.
        bases[:] = [base for base in obj.__mro__[1:] if not base.__module__.startswith("fastsparse_")][:1]

    app.connect("autodoc-process-bases", on_bases)
    app.connect("source-read", on_page)
    app.connect("include-read", on_include)
