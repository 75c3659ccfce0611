"""Table of layers on the CPU."""

from __future__ import annotations

from typing import Any

from .cells import Table, by, first, number, ordered, quotient, ratio, shown, spread, time_of


def cpu(result: dict[str, Any]) -> list[Table]:
    rows = []
    for graph in ordered(c["graph"] for c in result["cells"]):
        group = by(result["cells"], graph=graph)
        ours = time_of(first(group, implementation="FastGCNConv"))
        rows += [
            [
                graph,
                cell["implementation"],
                shown(cell) + spread(cell),
                ratio(quotient(time_of(cell), ours)),
                number(cell.get("error"), 2),
            ]
            for cell in group
        ]
    columns = ["graph", "implementation", "ms (20-80 %)", "time against ours", "difference from PyG"]
    return [Table("One GCN layer on the CPU, forward and backward, float32", columns, rows)]
