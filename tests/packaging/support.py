"""The support table: pyproject.toml's rows as the pages show them. As a script it writes the pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/installation.md")
_BLOCK = re.compile(r"(?<=<!-- support table -->\n\n).*?(?=\n\n)", re.DOTALL)


def pyproject() -> dict[str, Any]:
    """All of pyproject.toml."""
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text())


def rows() -> list[dict[str, str]]:
    """Versions that are checked together, a row for each Python."""
    return pyproject()["tool"]["fastsparse"]["support"]


def table() -> str:
    """The rows as a Markdown table, a column for each Python."""
    lines = []
    for title, key in (("Python", "python"), ("PyTorch", "torch"), ("PyG", "pyg"), ("DGL", "dgl")):
        lines.append(f"| {' | '.join([title, *(row.get(key, '-') for row in rows())])} |")
    lines.insert(1, f"|{'---|' * (len(rows()) + 1)}")
    return "\n".join(lines)


def shown(page: str) -> str:
    """The table that a page shows."""
    (found,) = _BLOCK.findall((CHECKOUT / page).read_text())
    return found


if __name__ == "__main__":
    for path in (CHECKOUT / name for name in PAGES):
        path.write_text(_BLOCK.sub(lambda _: table(), path.read_text()))
