"""Table of attention with edge features."""

from __future__ import annotations

from typing import Any

from .cells import Table, first, number, ordered, quotient, ratio, shown, time_of


def edges(result: dict[str, Any]) -> list[Table]:
    """One table for whole layers, one for the operators alone."""
    tables = []
    for part, title in (("layer", "Layers with edge features"), ("operator", "The operators alone")):
        cells = [cell for cell in result["cells"] if cell["part"] == part]
        rows = []
        for key in ordered((cell["graph"], cell["layer"], cell["heads"], cell["dtype"]) for cell in cells):
            wanted = dict(zip(("graph", "layer", "heads", "dtype"), key, strict=True), part=part)
            found = {
                name: first(cells, implementation=name, **wanted) for name in ("pyg", "triton", "fastsparse")
            }
            ours = time_of(found["fastsparse"])
            peak = (found["fastsparse"] or {}).get("peak_bytes")
            rows.append(
                [
                    " ".join(map(str, key)),
                    *(shown(cell) for cell in found.values()),
                    *(ratio(quotient(time_of(found[name]), ours)) for name in ("pyg", "triton")),
                    number(peak / 1e9) if peak else "-",
                ]
            )
        columns = ["graph, layer, heads, dtype", "PyG ms", "Triton ms", "ours ms", "PyG/ours", "Triton/ours"]
        tables.append(Table(f"{title}, forward and backward", [*columns, "our peak GB"], rows))
    return tables
