"""Tables of layers with edge features."""

from __future__ import annotations

from typing import Any

from ..common import geometric_mean
from .cells import Table, first, number, ordered, quotient, ratio, shown, time_of


def edges(result: dict[str, Any]) -> list[Table]:
    """One table for whole attention layers, one for the operators alone, one for GINE and gated layers."""
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
    return [*tables, *_messages([cell for cell in result["cells"] if cell["part"] == "messages"])]


def _messages(cells: list[dict[str, Any]]) -> list[Table]:
    """GINE and gated layers, with the geometric mean of the speed-ups on every graph, if there are cells."""
    rows, speeds = [], dict[str, list[float]]()
    for key in ordered((cell["graph"], cell["layer"], cell["features"], cell["dtype"]) for cell in cells):
        wanted = dict(zip(("graph", "layer", "features", "dtype"), key, strict=True))
        pyg, ours = (first(cells, implementation=name, **wanted) for name in ("pyg", "fastsparse"))
        speed = quotient(time_of(pyg), time_of(ours))
        if speed is not None:
            speeds.setdefault(key[0], []).append(speed)
        peaks = ((cell or {}).get("peak_bytes") for cell in (pyg, ours))
        memory = [number(peak / 1e9) if peak else "-" for peak in peaks]
        rows.append([" ".join(map(str, key)), shown(pyg), shown(ours), ratio(speed), *memory])
    rows += [
        [f"{graph}, geometric mean", "", "", ratio(geometric_mean(of)), "", ""]
        for graph, of in speeds.items()
    ]
    columns = [
        "graph, layer, features of an edge, dtype",
        "PyG ms",
        "ours ms",
        "PyG/ours",
        "PyG GB",
        "our GB",
    ]
    return [Table("GINE and gated layers 128 wide, forward and backward", columns, rows)] if rows else []
