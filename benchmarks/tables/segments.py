"""Table of scatter against PyTorch's operators."""

from __future__ import annotations

from typing import Any

from .cells import Table, first, ordered, quotient, ratio, shown, time_of

_KEYS = ("graph", "width", "dtype", "reduce")


def segments(result: dict[str, Any]) -> list[Table]:
    """One table without and one with the gradient."""
    tables = []
    for backward, title in ((False, "forward"), (True, "forward and backward")):
        cells = [cell for cell in result["cells"] if cell["backward"] == backward]
        rows = []
        for key in ordered(tuple(cell[name] for name in _KEYS) for cell in cells):
            wanted = dict(zip(_KEYS, key, strict=True))
            found = [
                first(cells, implementation=name, **wanted) for name in ("torch", "new index", "kept index")
            ]
            theirs, *ours = (time_of(cell) for cell in found)
            repeats = all(cell["repeats"] for cell in found[1:] if cell is not None and "repeats" in cell)
            rows.append(
                [
                    " ".join(map(str, key)),
                    *(shown(cell) for cell in found),
                    *(ratio(quotient(theirs, time)) for time in ours),
                    "yes" if repeats else "no",
                ]
            )
        columns = ["graph, width, dtype, reduction", "torch ms", "new index ms", "kept index ms"]
        columns += ["torch/new", "torch/kept", "same bits"]
        tables.append(Table(f"scatter, {title}", columns, rows))
    return tables
