"""Table of DGL's operators on FastSparse."""

from __future__ import annotations

from typing import Any

from .cells import Table, first, ordered, quotient, ratio, shown, time_of

_OTHERS = ("ours", "PyG", "DGL", "DGL, two CPU cores")


def dgl_operators(result: dict[str, Any]) -> list[Table]:
    """A row per graph and operator."""
    cells = result["cells"]
    present = [name for name in _OTHERS if first(cells, implementation=name)]
    rows = []
    for graph, operator in ordered((cell["graph"], cell["operator"]) for cell in cells):
        found = {
            name: first(cells, graph=graph, operator=operator, implementation=name)
            for name in ("enabled", *present)
        }
        time = time_of(found["enabled"])
        rows.append(
            [
                graph,
                operator,
                *(shown(cell) for cell in found.values()),
                *(ratio(quotient(time_of(found[name]), time)) for name in present),
            ]
        )
    columns = ["graph", "operator", "enabled ms", *(f"{name} ms" for name in present)]
    return [
        Table(
            "DGL's operators on FastSparse, forward and backward, float32",
            [*columns, *(f"{name}/enabled" for name in present)],
            rows,
        )
    ]
