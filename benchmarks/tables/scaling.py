"""Tables of several GPUs."""

from __future__ import annotations

from typing import Any

from .cells import Table, by, first, number, ordered, percent, quotient, ratio, shown, time_of


def scaling(result: dict[str, Any]) -> list[Table]:
    """Time and speed-up by number of GPUs, of divided graphs and of mini-batches."""
    tables = []
    columns = ["variant", "GPUs", "step ms", "speed-up", "exchange ms", "halo MB", "cut", "halo", "balance"]
    columns += ["peak GB", "build ms", "error"]
    full = by(result["cells"], kind="full")
    for graph, dtype in ordered((c["graph"], c["dtype"]) for c in full):
        rows = []
        for cell in by(full, graph=graph, dtype=dtype):
            one = first(full, graph=graph, dtype=dtype, gpus=1)
            shares = [percent(cell[key]) if key in cell else "-" for key in ("edge_cut", "halo_share")]
            times = [shown(cell), ratio(quotient(time_of(one), time_of(cell)))]
            exchange = [number(cell.get("exchange_ms")), number(cell.get("halo_mb"))]
            facts = [number(cell.get(key)) for key in ("balance", "peak_gb", "build_ms")]
            error = f"{cell['error']:.1e}" if cell["gpus"] > 1 else "-"
            rows.append([cell["variant"], str(cell["gpus"]), *times, *exchange, *shares, *facts, error])
        tables.append(Table(f"full graph, gcn3-256, {graph}, {dtype}", columns, rows))
    batches = by(result["cells"], kind="ddp")
    for batch, dtype in ordered((c["batch"], c["dtype"]) for c in batches):
        rows = []
        for cell in by(batches, batch=batch, dtype=dtype):
            one = first(batches, batch=batch, dtype=dtype, gpus=1)
            row = [str(cell["gpus"])]
            for field in ("seeds_per_s", "seeds_per_s_without_sampling"):
                row += [number(cell[field]), ratio(quotient(cell[field], one[field] if one else None))]
            rows.append(row)
        names = ["GPUs", "nodes/s", "speed-up", "nodes/s without sampling", "speed-up"]
        title = f"mini-batches of {batch}, sage3-256, {batches[0]['graph']}, {dtype}"
        tables.append(Table(title, names, rows))
    return tables
