"""Tables of small steps."""

from __future__ import annotations

import statistics
from typing import Any

from .cells import Table, by, first, ordered, quotient, ratio, shown, time_of

#: The implementations that are ours.
_OURS = ("FastSparse", "captured", "captured model")


def small(result: dict[str, Any]) -> list[Table]:
    """Milliseconds of a step by layer, for every kind of graph and precision."""
    cells = result["cells"]
    others = [name for name in ordered(cell["implementation"] for cell in cells) if name not in _OURS]
    tables = []
    for graph, dtype in ordered((cell["graph"], cell["dtype"]) for cell in cells):
        of_graph = by(cells, graph=graph, dtype=dtype)
        rivals = [name for name in others if by(of_graph, implementation=name)]
        ours = [name for name in _OURS if by(of_graph, implementation=name)]
        rows, speedups = [], [[] for _ in ours]  # type: ignore[var-annotated]
        for layer in ordered(cell["layer"] for cell in of_graph):
            of_layer = by(of_graph, layer=layer)
            times = [first(of_layer, implementation=name) for name in rivals]
            known = [time for cell in times if (time := time_of(cell)) is not None]
            row = [layer, *map(shown, times)]
            ratios = []
            for name, found in zip(ours, speedups, strict=True):
                cell = first(of_layer, implementation=name)
                speedup = quotient(min(known), time_of(cell)) if known else None
                found += [speedup] if speedup is not None else []
                row.append(shown(cell))
                ratios.append(ratio(speedup))
            captured = first(of_layer, implementation="captured") or {}
            errors = [_small(captured.get(key)) for key in ("loss_difference", "perturbed")]
            rows.append([*row, *ratios, *(errors if "captured" in ours else [])])
        means = [
            f"{statistics.geometric_mean(found):.2f}x" + ("" if name == "FastSparse" else f" {name}")
            for name, found in zip(ours, speedups, strict=True)
            if found
        ]
        mean = f", geometric mean {', '.join(means)}" if means else ""
        columns = ["layer", *rivals, *ours, *(f"fastest other / {name}" for name in ours)]
        columns += ["losses differ by", "by rounding"] if "captured" in ours else []
        tables.append(Table(f"{graph}, {dtype}: ms per step{mean}", columns, rows))
    return tables


def _small(number: float | None) -> str:
    return "-" if number is None else f"{number:.0e}"
