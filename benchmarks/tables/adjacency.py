"""Tables of building a structure."""

from __future__ import annotations

from typing import Any

from .cells import Table, number, shown


def adjacency(result: dict[str, Any]) -> list[Table]:
    rows = [
        [
            cell["graph"],
            f"{cell['edges']:,}",
            cell["structure"],
            shown(cell),
            number(cell.get("kept_gb")),
            number(cell.get("scratch_gb")),
        ]
        for cell in result["cells"]
    ]
    columns = ["graph", "edges", "structure", "build ms", "kept GB", "scratch GB"]
    return [Table("Adjacency and its transpose from unsorted edges", columns, rows)]
