"""Tables of building a structure."""

from __future__ import annotations

from typing import Any

from ..roofline import LARGE_EDGES
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


def adjacency_in_short(result: dict[str, Any]) -> list[Table]:
    """Large graphs only."""
    large = [cell for cell in result["cells"] if cell["edges"] > LARGE_EDGES]
    return adjacency({**result, "cells": large or result["cells"]})
