"""Tables of the product with sparse activations, and of MaxK."""

from __future__ import annotations

from typing import Any

from ..goals import MAXK_OF_COPY, MAXK_OVER_TOPK, verdict
from .cells import (
    COMPARED,
    Cell,
    Table,
    by,
    compared,
    first,
    number,
    ordered,
    percent,
    quotient,
    ratio,
    shown,
    speeds,
    spread,
    stored_rivals,
    time_of,
)


def ssd(result: dict[str, Any]) -> list[Table]:
    """The products against stored rivals, in short and by graph; the papers' tables and figures; maxk."""
    cells = result["cells"]
    summary, details = [], []
    for part, operator in (("forward", "ssd"), ("backward", "ssd_bwd")):
        group = by(cells, part=part)
        for dtype, k in ordered((c["dtype"], c["k"]) for c in group):
            shown, marks = _ssd_products(result, by(group, dtype=dtype, k=k), operator)
            details.append(shown)
            summary += [[f"{part}, {dtype}, k = {k}", *mark] for mark in marks]
    tables = [Table("Rival's time over ours", COMPARED[:-1], summary)]
    return [
        table
        for table in (*tables, *details, *_ssd_papers(cells), _maxk(by(cells, part="maxk")))
        if table.rows
    ]


def _ssd_products(result: dict[str, Any], cells: list[Cell], operator: str) -> tuple[Table, list[list[str]]]:
    """One direction, type and k: a row per graph, and the means over the graphs by rival."""
    part, dtype, k, width = (cells[0][key] for key in ("part", "dtype", "k", "width"))
    name = f"{operator}@{k}" if width == 256 else ""
    rows = []
    ratios: dict[str, dict[str, float]] = {}
    known = {c["graph"]: stored_rivals(result, name, dtype, c["graph"]) for c in cells}
    rivals = ordered(rival for times in known.values() for rival in times)
    for graph in ordered(c["graph"] for c in cells):
        ours, *others = by(cells, graph=graph)
        dense = others[0] if others else None
        times = {"densify": time_of(dense), **known[graph]} if part == "forward" else known[graph]
        for rival, time in times.items():
            if speed := quotient(time, time_of(ours)):
                ratios.setdefault(rival, {})[graph] = speed
        row = [graph, shown(ours) + spread(ours), number(ours.get("error"), 2)]
        for rival in (["densify"] if part == "forward" else []) + rivals:
            row += [number(times.get(rival)), ratio(ratios.get(rival, {}).get(graph))]
        rows.append(row)
    columns = ["graph", "ms (20-80 %)", "error"]
    for rival in (["densify"] if part == "forward" else []) + rivals:
        columns += [f"{rival} ms", "against it"]
    marks = [compared("", *each)[1:-1] for each in ratios.items()]
    return Table(f"ssd {part}, {dtype}, F = {width}, k = {k}", columns, rows), marks


def _ssd_papers(cells: list[Cell]) -> list[Table]:
    """Table I and figures 11 to 14 and 16 of the decoupled SSD paper."""
    shares = [
        [c["graph"], f"{c['edges']:,}", *(percent(c[key]) for key in c if key.startswith("share_"))]
        for c in by(cells, part="groups")
    ]
    lengths = [key.removeprefix("share_") for c in by(cells, part="groups")[:1] for key in c if "_" in key]
    tables = [
        Table(
            "Edge groups that share their row (table I), by the length of groups",
            ["graph", "edges", *lengths],
            shares,
        )
    ]
    for part, key, base, title in (
        (
            "ablation",
            "implementation",
            "maxk",
            "Time over that of MaxK's dataflow (figures 11 to 13), k = 16",
        ),
        ("slots", "slots", 1, "Time with one buffer per warp over that with several (figure 16), k = 8"),
    ):
        group = by(cells, part=part)
        names = ordered(c[key] for c in group)
        rows = []
        for graph, width in ordered((c["graph"], c["width"]) for c in group):
            own = {name: time_of(first(group, graph=graph, width=width, **{key: name})) for name in names}
            texts = (f"{number(own[name])} {ratio(quotient(own.get(base), own[name]))}" for name in names)
            rows.append([f"{graph}, F = {width}", *texts])
        tables.append(Table(title, ["graph", *map(str, names)], rows))
    group = by(cells, part="scaling")
    names = [name for name in ordered(c["implementation"] for c in group) if "dense" not in name]
    rows = []
    for graph, k in ordered((c["graph"], c["k"]) for c in group):
        dense = time_of(first(group, graph=graph, implementation="cuSPARSE, dense rows"))
        cell = [first(group, graph=graph, k=k, implementation=name) for name in names]
        if not any(cell):
            continue
        texts = (f"{shown(c)} {ratio(quotient(dense, time_of(c)))}" for c in cell)
        rows.append([f"{graph}, k = {k}", *texts])
    title = "Time, and speed-up over cuSPARSE on dense rows, by kept entries (figure 14)"
    return [*tables, Table(title, ["graph", *names], rows)]


def _maxk(cells: list[Cell]) -> Table:
    """The selection against torch.topk, and its share of the rate of a copy."""
    rows = []
    for dtype in ordered(c["dtype"] for c in cells):
        ours, topk, copy = (time_of(cell) for cell in by(cells, dtype=dtype))
        rows.append(
            [
                dtype,
                number(ours),
                number(topk),
                ratio(quotient(topk, ours)),
                number(copy),
                percent(quotient(copy, ours)),
            ]
        )
    shape = f"({cells[0]['rows']:,}, {cells[0]['width']}), k = {cells[0]['k']}" if cells else ""
    columns = ["", "maxk ms", "torch.topk ms", "speed-up", "copy ms", "of its bandwidth"]
    return Table(f"maxk, {shape}", columns, rows)


def ssd_in_short(result: dict[str, Any]) -> list[Table]:
    """The rivals' times over ours, and the selection of the k largest."""
    rows = []
    for part, operator in (("forward", "ssd"), ("backward", "ssd_bwd")):
        group = by(result["cells"], part=part)
        for dtype, k in ordered((c["dtype"], c["k"]) for c in group):
            of_case = by(group, dtype=dtype, k=k)
            ours = [by(of_case, graph=graph)[0] for graph in ordered(c["graph"] for c in of_case)]
            found = speeds(
                [c for c in ours if c["width"] == 256],
                lambda c, of=f"{operator}@{k}": stored_rivals(result, of, c["dtype"], c["graph"]),
            )
            rows += [compared(f"{part}, {dtype}, k = {k}", *each) for each in found.items()]
    cells = by(result["cells"], part="maxk")
    selection = _maxk(cells)
    asked = []
    for dtype in ordered(c["dtype"] for c in cells):
        ours, topk, copy = (time_of(cell) for cell in by(cells, dtype=dtype))
        speed, share = quotient(topk, ours) or 0, quotient(copy, ours) or 0
        reached = speed >= MAXK_OVER_TOPK and share >= MAXK_OF_COPY
        asked.append(verdict(reached, f"{ratio(MAXK_OVER_TOPK)}, {MAXK_OF_COPY:.0%}"))
    with_goals = [[*row, goal] for row, goal in zip(selection.rows, asked, strict=True)]
    return [
        Table("Rival's time over ours", COMPARED, rows),
        Table(selection.title, [*selection.columns, "asked"], with_goals),
    ]
