"""Tables of training steps."""

from __future__ import annotations

from typing import Any

from ..roofline import peers
from .cells import Cell, Table, by, number, ordered, quotient, ratio, shown, time_of


def train(result: dict[str, Any]) -> list[Table]:
    cells = result["cells"]
    tables = []
    columns = ["graph", "implementation", "step ms", "time against ours", "inference ms", "peak GB", "memory"]
    for model, dtype in ordered((c["model"], c["dtype"]) for c in cells):
        rows = []
        group = by(cells, model=model, dtype=dtype)
        for graph in ordered(c["graph"] for c in group):
            measured = by(group, graph=graph)
            ours = next((c for c in measured if c["implementation"].startswith("Fast")), None)
            for cell in measured:
                peak = cell.get("peak_gb")
                rows.append(
                    [
                        graph,
                        cell["implementation"],
                        shown(cell),
                        ratio(quotient(time_of(cell), time_of(ours))),
                        shown(cell, "infer_median_ms") if cell["status"] == "ok" else "",
                        number(peak),
                        ratio(quotient(peak, ours.get("peak_gb") if ours else None)),
                    ]
                )
            rows += _stored_training(result, measured, ours)
        tables.append(Table(f"{model}, {dtype}", columns, rows))
    return tables


def _stored_training(result: dict[str, Any], measured: list[Cell], ours: Cell | None) -> list[list[str]]:
    """Rows of what was not run beside the measured cells but is stored from the same GPU model."""
    if result["machine"].get("gpu") != peers()["gpu"]:
        return []
    graph, model, dtype = (measured[0][key] for key in ("graph", "model", "dtype"))
    here = {cell["implementation"] for cell in measured}
    return [
        [
            graph,
            f"{rival['implementation']} (stored)",
            number(rival["train_ms"]),
            ratio(quotient(rival["train_ms"], time_of(ours))),
            number(rival["infer_ms"]),
            number(rival["peak_gb"]),
            ratio(quotient(rival["peak_gb"], ours.get("peak_gb") if ours else None)),
        ]
        for rival in by(peers()["training"], graph=graph, model=model, dtype=dtype)
        if rival["implementation"] not in here and "train_ms" in rival
    ]
