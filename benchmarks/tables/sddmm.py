"""Tables of dot products per edge."""

from __future__ import annotations

from typing import Any

from ..common import geometric_mean
from .cells import Table, by, first, number, ordered, quotient, ratio, shown, stored_rivals, time_of


def sddmm(result: dict[str, Any]) -> list[Table]:
    cells = result["cells"]
    tables = []
    for dtype, width in ordered((c["dtype"], c["width"]) for c in cells):
        group = by(cells, dtype=dtype, width=width)
        names = ordered(c["implementation"] for c in group)
        rows, ratios = [], []
        for graph in ordered(c["graph"] for c in group):
            times = {name: time_of(first(group, graph=graph, implementation=name)) for name in names}
            picked = times.get("fastsparse auto")
            stored = stored_rivals(result, f"sddmm@{width}", dtype, graph)
            best = min(stored, key=stored.__getitem__, default=None)
            ratios.append(quotient(stored.get(best) if best else None, picked))
            rows.append(
                [
                    graph,
                    *(shown(first(group, graph=graph, implementation=name)) for name in names),
                    f"{best} {number(stored[best])}" if best else "-",
                    ratio(ratios[-1]),
                ]
            )
        mean = ratio(geometric_mean(r for r in ratios if r))
        rows.append(["geometric mean", *("" for _ in names), "", mean])
        columns = ["graph", *(f"{name} ms" for name in names), "best stored rival ms", "auto against it"]
        tables.append(Table(f"sddmm, {dtype}, F = {width}", columns, rows))
    return tables
