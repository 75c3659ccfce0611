"""Tables of attention."""

from __future__ import annotations

from typing import Any

from ..common import geometric_mean
from .cells import (
    COMPARED,
    Cell,
    Table,
    by,
    compared,
    number,
    ordered,
    quotient,
    ratio,
    shown,
    speeds,
    spread,
    stored_rivals,
    time_of,
)


def attention(result: dict[str, Any]) -> list[Table]:
    """The rivals' times over ours in short, our times among each other, then every graph."""
    cells = result["cells"]
    summary, details = [], []
    for name, dtype, case, direction in ordered(
        (c["implementation"], c["dtype"], c["case"], c["direction"]) for c in cells
    ):
        group = by(cells, implementation=name, dtype=dtype, case=case, direction=direction)
        known = {c["graph"]: stored_rivals(result, c["stored"] or "", dtype, c["graph"]) for c in group}
        rivals = ordered(rival for times in known.values() for rival in times)
        ratios = speeds(group, lambda cell, known=known: known[cell["graph"]])
        what = f"{case} {direction}, {dtype}, {name}"
        summary += [compared(what, *each)[:-1] for each in ratios.items()]
        rows = [
            [
                cell["graph"],
                shown(cell) + spread(cell),
                number(cell.get("error"), 2),
                number(cell["extra_bytes"] / 1e6 if cell.get("extra_bytes") is not None else None),
                ratio(quotient(cell.get("extra_bytes"), cell.get("result_bytes"))),
                *(
                    text
                    for rival in rivals
                    for text in (
                        number(known[cell["graph"]].get(rival)),
                        ratio(ratios.get(rival, {}).get(cell["graph"])),
                    )
                ),
            ]
            for cell in group
        ]
        means = (text for of in rivals for text in ("", ratio(geometric_mean(ratios.get(of, {}).values()))))
        rows.append(["geometric mean", "", "", "", "", *means])
        columns = ["graph", "ms (20-80 %)", "error", "extra MB", "of the results"]
        columns += [text for rival in rivals for text in (f"{rival} ms", "against it")]
        details.append(Table(f"{case} {direction}, {dtype}, {name}", columns, rows))
    return [Table("Rival's time over ours", COMPARED[:-1], summary), *_own_ratios(cells), *details]


def _own_ratios(cells: list[Cell]) -> list[Table]:
    """Backward over forward, and four heads of 32 over one of 128, a table per feature type."""
    tables = []
    for name, dtype in ordered((c["implementation"], c["dtype"]) for c in cells):
        group = by(cells, implementation=name, dtype=dtype)
        cases = ordered(c["case"] for c in group)
        rows = []
        for graph in ordered(c["graph"] for c in group):
            shared = by(group, graph=graph)
            times = {(c["case"], c["direction"]): time_of(c) for c in shared}
            rows.append(
                [
                    graph,
                    f"{shared[0]['edges']:,}",
                    *(
                        ratio(quotient(times.get((case, "backward")), times.get((case, "forward"))))
                        for case in cases
                    ),
                    *(
                        ratio(
                            quotient(
                                times.get(("attention@4x32", direction)),
                                times.get(("attention@1x128", direction)),
                            )
                        )
                        for direction in ("forward", "backward")
                    ),
                ]
            )
        columns = ["graph", "edges", *cases, "attention 4x32 over 1x128, forward", "backward"]
        title = f"Backward time over forward time, and what four heads cost, {dtype}, {name}"
        tables.append(Table(title, columns, rows))
    return tables


def attention_in_short(result: dict[str, Any]) -> list[Table]:
    """The rivals' times over ours, and the extra memory of a call over its results."""
    cells = result["cells"]
    rows, memory = [], []
    for name, dtype, case, direction in ordered(
        (c["implementation"], c["dtype"], c["case"], c["direction"]) for c in cells
    ):
        group = by(cells, implementation=name, dtype=dtype, case=case, direction=direction)
        what = f"{case} {direction}, {dtype}"
        found = speeds(group, lambda c: stored_rivals(result, c["stored"] or "", c["dtype"], c["graph"]))
        rows += [compared(what, *each) for each in found.items()]
        most = max((c for c in group if c.get("extra_bytes")), key=_of_results, default=None)
        if most is not None:
            memory.append([what, f"{ratio(_of_results(most))} {most['graph']}"])
    return [
        Table("Rival's time over ours", COMPARED, rows),
        Table("Memory of a call over that of its results, at most", ["", "graph"], memory),
    ]


def _of_results(cell: Cell) -> float:
    return cell["extra_bytes"] / cell["result_bytes"]
