"""Table of principal neighbourhood aggregation."""

from __future__ import annotations

from typing import Any

from .cells import Table, first, number, ordered, quotient, ratio, shown, time_of


def pna(result: dict[str, Any]) -> list[Table]:
    """PyG against the drop-in, a row for every graph, width, number of edge features and dtype."""
    names = ("graph", "width", "features", "dtype")
    rows = []
    for key in ordered(tuple(cell[name] for name in names) for cell in result["cells"]):
        wanted = dict(zip(names, key, strict=True))
        pyg, ours = (first(result["cells"], implementation=name, **wanted) for name in ("pyg", "fastsparse"))
        peaks = [(cell or {}).get("peak_bytes") for cell in (pyg, ours)]
        rows.append(
            [
                *map(str, key),
                shown(pyg),
                shown(ours),
                ratio(quotient(time_of(pyg), time_of(ours))),
                *(number(peak / 1e9) if peak else "-" for peak in peaks),
            ]
        )
    columns = ["graph", "width", "edge features", "dtype", "PyG ms", "ours ms", "PyG/ours"]
    return [Table("PNA, forward and backward", [*columns, "PyG peak GB", "our peak GB"], rows)]
