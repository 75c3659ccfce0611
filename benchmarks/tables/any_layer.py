"""Table of all layers of PyG."""

from __future__ import annotations

from typing import Any

from ..common import geometric_mean
from .cells import Table, first, number, ordered, quotient, ratio, shown, time_of


def any_layer(result: dict[str, Any]) -> list[Table]:
    """One table per graph; the last line of each is the geometric mean."""
    tables = []
    for graph in ordered(cell["graph"] for cell in result["cells"]):
        cells = [cell for cell in result["cells"] if cell["graph"] == graph]
        rows, quotients = [], []
        for name in ordered(cell["layer"] for cell in cells):
            pyg = first(cells, layer=name, implementation="pyg")
            ours = first(cells, layer=name, implementation="fastsparse")
            factor = quotient(time_of(pyg), time_of(ours))
            quotients += [factor] if factor else []
            peaks = [(cell or {}).get("peak_bytes") for cell in (pyg, ours)]
            rows.append(
                [
                    name,
                    (ours or {}).get("by", ""),
                    shown(pyg),
                    shown(ours),
                    ratio(factor),
                    *(number(peak / 1e6) if peak else "-" for peak in peaks),
                ]
            )
        rows.append(["geometric mean", "", "", "", ratio(geometric_mean(quotients)), "", ""])
        columns = ["layer", "computed by", "PyG ms", "ours ms", "PyG/ours", "PyG MB", "our MB"]
        tables.append(Table(f"Layers of PyG, forward and backward, {graph}", columns, rows))
    return tables
