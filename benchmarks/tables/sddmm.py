"""Tables of dot products per edge."""

from __future__ import annotations

from typing import Any

from ..common import geometric_mean
from .cells import (
    COMPARED,
    Table,
    by,
    compared,
    first,
    number,
    ordered,
    quotient,
    ratio,
    shown,
    stored_rivals,
    time_of,
)


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


def sddmm_in_short(result: dict[str, Any]) -> list[Table]:
    """Our algorithms, and what `auto` ran, against the fastest stored rival."""
    rows = []
    for dtype, width, name in ordered((c["dtype"], c["width"], c["implementation"]) for c in result["cells"]):
        speeds = {}
        for cell in by(result["cells"], dtype=dtype, width=width, implementation=name):
            stored = stored_rivals(result, f"sddmm@{width}", dtype, cell["graph"])
            if speed := quotient(min(stored.values(), default=None), time_of(cell)):
                speeds[cell["graph"]] = speed
        if speeds:
            rows.append(compared(f"{name.split()[-1]}, {dtype}, F = {width}", "the fastest stored", speeds))
    return [Table("Rival's time over ours", COMPARED, rows)]
