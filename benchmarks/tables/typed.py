"""Table of the layers of typed edges."""

from __future__ import annotations

from typing import Any

from .cells import Table, first, number, ordered, quotient, ratio, shown, time_of

_KEYS = ("layer", "options", "graph", "edges")


def typed(result: dict[str, Any]) -> list[Table]:
    """Times and peaks of PyG's layers and ours."""
    cells, rows = result["cells"], []
    for key in ordered(tuple(cell[name] for name in _KEYS) for cell in cells):
        wanted = dict(zip(_KEYS, key, strict=True))
        pair = [first(cells, implementation=name, **wanted) for name in ("pyg", "fastsparse")]
        peaks = [cell.get("peak_bytes") if cell is not None else None for cell in pair]
        layer, options, graph, edges = key
        rows.append(
            [
                " ".join(filter(None, (layer, options))),
                f"{graph}, {edges / 1e6:.2g} M edges",
                *(shown(cell) for cell in pair),
                ratio(quotient(*(time_of(cell) for cell in pair))),
                *(number(peak / 1e9) if peak else "-" for peak in peaks),
                ratio(quotient(*peaks)),
            ]
        )
    columns = ["layer", "graph", "PyG ms", "ours ms", "PyG/ours", "PyG GB", "ours GB", "PyG/ours memory"]
    return [Table("Layers of typed edges, forward and backward", columns, rows)]
