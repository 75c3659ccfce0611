"""Tables of neighbour sampling."""

from __future__ import annotations

from typing import Any

from .cells import Table, by, first, number, ordered, quotient, ratio, shown, spread, time_of


def sampling(result: dict[str, Any]) -> list[Table]:
    """Drawing against plain PyTorch, by device; then epochs."""
    tables = []
    draws, epochs = by(result["cells"], part="draw"), by(result["cells"], part="epoch")
    for graph, where in ordered((c["graph"], c["where"]) for c in draws):
        group = by(draws, graph=graph, where=where)
        plain = time_of(first(group, implementation="plain PyTorch, blocks"))
        rows = [
            [
                cell["implementation"],
                f"{cell['edges']:,}",
                shown(cell) + spread(cell),
                f"{cell['edges_per_s'] / 1e6:,.0f}",
                ratio(quotient(plain, time_of(cell))),
            ]
            for cell in group
        ]
        columns = ["implementation", "edges", "ms per batch (20-80 %)", "million edges/s", "speed-up"]
        tables.append(Table(f"{graph}: drawing a batch, {where}", columns, rows))
    for graph in ordered(c["graph"] for c in epochs):
        group = by(epochs, graph=graph)
        rows = [
            [
                cell["implementation"],
                cell["precision"],
                number(cell["epoch_s"]) if cell["status"] == "ok" else cell["status"],
            ]
            for cell in group
        ]
        title = f"{graph}: an epoch of {group[0]['nodes']:,} training nodes, {group[0]['where']}"
        tables.append(Table(title, ["step", "precision", "seconds"], rows))
    return tables
