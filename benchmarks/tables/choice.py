"""Tables of what `auto` picks and what the pick costs."""

from __future__ import annotations

from typing import Any

from ..common import geometric_mean
from .cells import Cell, Table, by, first, number, ordered, quotient, ratio

#: A pick this much slower than the best is marked: less is within the spread of the timings.
REGRET_SEEN = 1.03


def choice(result: dict[str, Any]) -> list[Table]:
    """The time of csr over that of flashsparse, and what auto's picks cost."""
    tables = []
    for dtype in ordered(c["dtype"] for c in result["cells"] if "dtype" in c):
        group = by(result["cells"], dtype=dtype)
        widths = ordered(c["width"] for c in group)
        rows = []
        for graph in ordered(c["graph"] for c in group):
            cells = [first(group, graph=graph, width=width) for width in widths]
            regrets = [cell["regret"] for cell in cells if cell and cell["status"] == "ok"]
            shared = next(cell for cell in cells if cell)
            vectors = shared["vectors"]
            rows.append(
                [
                    graph,
                    number(None if vectors is None else vectors / max(shared["edges"], 1), 2),
                    number(shared["edges"] / max(shared["nodes"], 1)),
                    *map(_crossover, cells),
                    ratio(max(regrets, default=None)),
                ]
            )
        regrets = [cell["regret"] for cell in group if cell["status"] == "ok"]
        by_width = (
            geometric_mean(speed for c in by(group, width=width) if (speed := csr_over_flashsparse(c)))
            for width in widths
        )
        mean = f"mean {ratio(geometric_mean(regrets))}"
        rows.append(["geometric mean", "", "", *map(ratio, by_width), mean])
        columns = [
            "graph",
            "vectors/edge",
            "edges/row",
            *(f"F = {width}" for width in widths),
            "worst regret",
        ]
        title = f"csr time over flashsparse time, {dtype}; picked: c csr, f flashsparse, ! the slower one"
        tables.append(Table(title, columns, rows))
    return tables


def csr_over_flashsparse(cell: Cell) -> float | None:
    """Above 1 where the tensor cores win; None where one of the two has no time."""
    return quotient(cell.get("csr_median_ms"), cell.get("flashsparse_median_ms"))


def _crossover(cell: Cell | None) -> str:
    if cell is None or cell["status"] != "ok":
        return "-" if cell is None else cell["status"].split(":")[0]
    # Two timings of one call differ by a few per cent.
    mark = cell["pick"][0] + ("!" if cell["regret"] > REGRET_SEEN else "")
    speed = csr_over_flashsparse(cell)
    return f"{ratio(speed)} {mark}" if speed else mark


def choice_in_short(result: dict[str, Any]) -> list[Table]:
    """What the picks of `auto` cost: the time of each over that of the better algorithm."""
    rows = []
    for dtype in ordered(c["dtype"] for c in result["cells"] if "dtype" in c):
        regrets = {
            f"{c['graph']}, F = {c['width']}": c["regret"]
            for c in by(result["cells"], dtype=dtype, status="ok")
        }
        if not regrets:
            continue
        worst = max(regrets, key=regrets.__getitem__)
        seen = sum(regret > REGRET_SEEN for regret in regrets.values())
        mean = ratio(geometric_mean(regrets.values()))
        rows.append([dtype, mean, f"{ratio(regrets[worst])} {worst}", f"{seen} of {len(regrets)}"])
    columns = ["", "geometric mean", "maximum regret", f"over {REGRET_SEEN:.2f}x"]
    return [Table("Time of what auto picks over the better of csr and flashsparse", columns, rows)]
