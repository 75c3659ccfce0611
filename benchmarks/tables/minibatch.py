"""Tables of mini-batches."""

from __future__ import annotations

from typing import Any

from .cells import Table, by, first, number, ordered, quotient, ratio, shown, spread, time_of


def minibatch(result: dict[str, Any]) -> list[Table]:
    """Steps on new structures and their parts, compared with our layer, captured where it was."""
    tables = []
    groups = ordered((c["graph"], c.get("precision", "float32")) for c in result["cells"])
    for graph, precision in groups:
        group = [c for c in by(result["cells"], graph=graph) if c.get("precision", "float32") == precision]
        rows = []
        for cell in group:
            framework = "DGL" if "DGL" in cell["implementation"] else "PyG"
            ours = time_of(
                first(group, implementation=f"FastSAGEConv ({framework}), CapturedBatches")
                or first(group, implementation=f"FastSAGEConv ({framework})")
            )
            rows.append(
                [
                    cell["implementation"],
                    shown(cell) + spread(cell),
                    ratio(quotient(time_of(cell), ours)),
                    *(number(cell.get(f"{part}_ms")) for part in ("structure", "forward", "backward")),
                    "-" if cell.get("launches") is None else str(cell["launches"]),
                ]
            )
        columns = [
            "implementation",
            "ms per step (20-80 %)",
            "time against ours",
            "structure ms",
            "forward ms",
            "backward ms",
            "launches",
        ]
        edges, width = group[0]["edges"], group[0]["width"]
        title = f"{graph}: GraphSAGE on blocks of {edges:,} edges seen once, {width} wide, {precision}"
        tables.append(Table(title, columns, rows))
    return tables
