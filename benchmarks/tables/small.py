"""Tables of small steps."""

from __future__ import annotations

import statistics
from typing import Any

from .cells import Table, by, first, ordered, quotient, ratio, shown, time_of


def small(result: dict[str, Any]) -> list[Table]:
    """Milliseconds of a step by layer, for every kind of graph and precision."""
    cells = result["cells"]
    others = [name for name in ordered(cell["implementation"] for cell in cells) if name != "FastSparse"]
    tables = []
    for graph, dtype in ordered((cell["graph"], cell["dtype"]) for cell in cells):
        rows, speedups = [], []
        for layer in ordered(cell["layer"] for cell in cells):
            of_layer = by(cells, graph=graph, dtype=dtype, layer=layer)
            if not of_layer:
                continue
            ours = first(of_layer, implementation="FastSparse")
            rivals = [first(of_layer, implementation=name) for name in others]
            times = [time for rival in rivals if (time := time_of(rival)) is not None]
            speedup = quotient(min(times), time_of(ours)) if times else None
            if speedup is not None:
                speedups.append(speedup)
            rows.append([layer, *map(shown, rivals), shown(ours), ratio(speedup)])
        mean = f", geometric mean {statistics.geometric_mean(speedups):.2f}x" if speedups else ""
        columns = ["layer", *others, "FastSparse", "fastest other / FastSparse"]
        tables.append(Table(f"{graph}, {dtype}: ms per step{mean}", columns, rows))
    return tables
