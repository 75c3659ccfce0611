"""Tables of what auto's picks cost, for structures seen once and often."""

from __future__ import annotations

from typing import Any

from .cells import Cell, Table, by, first, ordered, ratio
from .choice import REGRET_SEEN

#: What a pick may cost against the best.
ACCEPTED_REGRET = 1.10


def regret(result: dict[str, Any]) -> list[Table]:
    """What auto picks and what that costs, by number of uses and dtype."""
    tables = []
    cells = [cell for cell in result["cells"] if "seen" in cell]
    for seen, dtype in ordered((cell["seen"], cell["dtype"]) for cell in cells):
        group = by(cells, seen=seen, dtype=dtype)
        widths = ordered(cell["width"] for cell in group)
        rows = []
        for structure in ordered(cell["structure"] for cell in group):
            shown = [_picked(first(group, structure=structure, width=width)) for width in widths]
            edges = next(cell["edges"] for cell in by(group, structure=structure))
            rows.append([structure, f"{edges:,}", *shown])
        regrets = [cell["regret"] for cell in group if cell["status"] == "ok"]
        within = sum(value <= ACCEPTED_REGRET for value in regrets)
        worst = f"worst {ratio(max(regrets, default=None))}"
        rows.append([f"within 10 %: {within} of {len(regrets)}", *[""] * len(widths), worst])
        title = f"spmm, {dtype}, {'first use' if seen == 'first' else 'prepared'}: pick and its regret"
        tables.append(Table(title, ["structure", "edges", *(f"F = {width}" for width in widths)], rows))
    return tables


def _picked(cell: Cell | None) -> str:
    if cell is None or cell["status"] != "ok":
        return "-" if cell is None else cell["status"].split(":")[0]
    better = f" ({cell['best']})" if cell["regret"] > REGRET_SEEN else ""
    return f"{cell['pick']} {ratio(cell['regret'])}{better}"
