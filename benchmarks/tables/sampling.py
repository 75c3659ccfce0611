"""Tables of neighbour sampling."""

from __future__ import annotations

from typing import Any

from .cells import Table, by, first, number, ordered, quotient, ratio, shown, spread, time_of


def sampling(result: dict[str, Any]) -> list[Table]:
    """Drawing against plain PyTorch, by device; then epochs, of a graph of billions of entries too."""
    tables = []
    draws, epochs, papers = (by(result["cells"], part=part) for part in ("draw", "epoch", "papers"))
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
    for graph in ordered(c["graph"] for c in papers):
        group = by(papers, graph=graph)
        rows = [
            [
                f"the {cell['features_on']}" + (f", {cell['cached']:,} cached" if cell.get("cached") else ""),
                cell["implementation"],
                cell["precision"],
                shown(cell, "ms_per_batch"),
                f"{cell['batches']:,}" if cell["status"] == "ok" else "-",
                number(cell.get("epoch_s")),
            ]
            for cell in group
        ]
        title = (
            f"{graph}: {group[0]['num_nodes']:,} nodes, {group[0]['entries']:,} entries,"
            f" {group[0]['nodes']:,} training nodes, {group[0]['where']}"
        )
        columns = ["features on", "step", "precision", "ms per batch", "batches timed", "seconds per epoch"]
        tables.append(Table(title, columns, rows))
    return tables
