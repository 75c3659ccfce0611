"""Tables of small steps."""

from __future__ import annotations

from typing import Any

from .cells import Table, by, first, ordered, quotient, ratio, shown, time_of


def small(result: dict[str, Any]) -> list[Table]:
    """Milliseconds of a step by layer, for every kind of graph and precision."""
    tables = []
    cells = result["cells"]
    columns = [
        "layer",
        "PyG",
        "FastSparse",
        "captured",
        "PyG / captured",
        "difference",
        "losses",
        "perturbed",
    ]
    for graph, dtype in ordered((cell["graph"], cell["dtype"]) for cell in cells):
        rows = []
        for layer in ordered(cell["layer"] for cell in cells):
            of_layer = by(cells, graph=graph, dtype=dtype, layer=layer)
            plain, ours, captured = (
                first(of_layer, implementation=name) for name in ("PyG", "FastSparse", "captured")
            )
            if captured is None:
                continue
            speedup = ratio(quotient(time_of(plain), time_of(captured)))
            rows.append(
                [
                    layer,
                    shown(plain),
                    shown(ours),
                    shown(captured) + ("" if captured.get("records") else " (not recorded)"),
                    speedup,
                    *(_small(captured.get(name)) for name in ("difference", "loss_difference", "perturbed")),
                ]
            )
        tables.append(Table(f"{graph}, {dtype}: ms per step", columns, rows))
    return tables


def _small(number: float | None) -> str:
    return "-" if number is None else f"{number:.0e}"
