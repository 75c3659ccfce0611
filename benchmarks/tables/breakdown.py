"""Tables of where a training step's time goes."""

from __future__ import annotations

from typing import Any

from .cells import Table, by, number, ordered, shown


def breakdown(result: dict[str, Any]) -> list[Table]:
    """Per model and precision: milliseconds of every kind of work in a step."""
    cells = result["cells"]
    tables = []
    for model, dtype in ordered((c["model"], c["dtype"]) for c in cells):
        group = by(cells, model=model, dtype=dtype)
        kinds = list(next((c["kinds_ms"] for c in group if c["status"] == "ok"), {}))
        rows = [
            [
                cell["graph"],
                shown(cell),
                *(number(cell.get("kinds_ms", {}).get(kind)) for kind in kinds),
                number(cell.get("idle_ms")),
            ]
            for cell in group
        ]
        tables.append(Table(f"{model}, {dtype}, ms", ["graph", "step", *kinds, "device idle"], rows))
    return tables
