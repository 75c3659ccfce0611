"""Tables of the product with sparse activations, and of MaxK."""

from __future__ import annotations

from typing import Any

from ..goals import MAXK_OF_COPY, MAXK_OVER_TOPK, verdict
from .cells import (
    Cell,
    Column,
    Row,
    Table,
    by,
    compared_table,
    first,
    number,
    ordered,
    percent,
    pivot,
    quotient,
    ratio,
    shown,
    spread,
    stored_baselines,
    time_of,
    value,
)

#: Part -> the operator, as the baselines' times are named.
_OPERATORS = {"forward": "ssd", "backward": "ssd_bwd"}
#: Part -> (field whose values are the columns, value that the others are compared with, title).
_PAPERS = {
    "ablation": ("implementation", "maxk", "Time over that of MaxK's dataflow (figures 11 to 13), k = 16"),
    "slots": ("slots", 1, "Time with one buffer per warp over that with several (figure 16), k = 8"),
}


def _baselines(result: dict[str, Any], cells: list[Cell]) -> dict[str, float | None]:
    """The times to compare with our first cell of a graph: the dense product, forward, and what is stored."""
    ours, *others = cells
    name = f"{_OPERATORS[ours['part']]}@{ours['k']}" if ours["width"] == 256 else ""
    dense = {"densify": time_of(others[0] if others else None)} if ours["part"] == "forward" else {}
    return {**dense, **stored_baselines(result, name, ours["dtype"], ours["graph"])}


def _summary(result: dict[str, Any], *, asked: bool) -> Table:
    found: dict[tuple[str, str], dict[str, float]] = {}
    for part in _OPERATORS:
        for cell in by(result["cells"], part=part):
            shared = {key: cell[key] for key in ("part", "dtype", "k", "graph")}
            alike = by(result["cells"], **shared)
            if cell is not alike[0]:
                continue
            for baseline, time in _baselines(result, alike).items():
                if asked and baseline == "densify":
                    continue
                if speed := quotient(time, time_of(cell)):
                    what = f"{part}, {cell['dtype']}, k = {cell['k']}"
                    found.setdefault((what, baseline), {})[cell["graph"]] = speed
    return compared_table(found, asked=asked)


def ssd(result: dict[str, Any]) -> list[Table]:
    """The products against stored baselines, in short and by graph; the papers' tables and figures; maxk."""

    def columns(cells: list[Cell]) -> list[Column]:
        made = [
            value("graph"),
            Column("ms (20-80 %)", lambda row: shown(row.cell) + spread(row.cell)),
            value("error", form=lambda error: number(error, 2)),
        ]
        graphs = ordered(cell["graph"] for cell in cells)
        for baseline in ordered(name for it in graphs for name in _baselines(result, by(cells, graph=it))):

            def time(row: Row, baseline: str = baseline) -> float | None:
                return _baselines(result, row.cells).get(baseline)

            made.append(Column(f"{baseline} ms", lambda row, time=time: number(time(row))))
            made.append(
                Column("against it", lambda row, time=time: ratio(quotient(time(row), time_of(row.cell))))
            )
        return made

    tables = [_summary(result, asked=False)]
    for part in _OPERATORS:
        title = f"ssd {part}, {{dtype}}, F = {{width}}, k = {{k}}"
        cells = by(result["cells"], part=part)
        tables += pivot(cells, title, ("graph",), columns, split=("dtype", "k"))
    return [table for table in (*tables, *_papers(result["cells"]), *_maxk(result)) if table.rows]


def _papers(cells: list[Cell]) -> list[Table]:
    """Table I and figures 11 to 14 and 16 of the decoupled SSD paper."""
    groups = by(cells, part="groups")
    lengths = [key.removeprefix("share_") for cell in groups[:1] for key in cell if "_" in key]
    columns = [value("graph"), value("edges", form="{:,}".format)]
    columns += [value(length, f"share_{length}", percent) for length in lengths]
    tables = pivot(groups, "Edge groups that share their row (table I), by the length of groups", (), columns)
    for part, (key, base, title) in _PAPERS.items():
        group = by(cells, part=part)

        def over(name: Any, base: Any = base) -> Column:
            def text(row: Row) -> str:
                own = time_of(row[name])
                return f"{number(own)} {ratio(quotient(time_of(row[base]), own))}"

            return Column(str(name), text)

        columns = [Column("graph", lambda row: f"{row.key['graph']}, F = {row.key['width']}")]
        columns += map(over, ordered(cell[key] for cell in group))
        tables += pivot(group, title, ("graph", "width"), columns, by=key)

    def over_dense(row: Row, name: str) -> str:
        dense = first(row.table, graph=row.key["graph"], implementation="cuSPARSE, dense rows")
        return f"{shown(row[name])} {ratio(quotient(time_of(dense), time_of(row[name])))}"

    group = by(cells, part="scaling")
    names = [name for name in ordered(cell["implementation"] for cell in group) if "dense" not in name]
    columns = [Column("graph", lambda row: f"{row.key['graph']}, k = {row.key['k']}")]
    columns += [Column(name, lambda row, name=name: over_dense(row, name)) for name in names]
    title = "Time, and speed-up over cuSPARSE on dense rows, by kept entries (figure 14)"
    for table in pivot(group, title, ("graph", "k"), columns):
        rows = [row for row in table.rows if any(text != "- -" for text in row[1:])]
        tables.append(Table(title, table.columns, rows))
    return tables


def _maxk(result: dict[str, Any], *, asked: bool = False) -> list[Table]:
    """The selection against torch.topk, and its share of the rate of a copy."""

    def quotients(row: Row) -> tuple[float | None, float | None]:
        ours, topk, copy = map(time_of, row.cells)
        return quotient(topk, ours), quotient(copy, ours)

    def goal(row: Row) -> str:
        speed, share = (found or 0 for found in quotients(row))
        reached = speed >= MAXK_OVER_TOPK and share >= MAXK_OF_COPY
        return verdict(reached, f"{ratio(MAXK_OVER_TOPK)}, {MAXK_OF_COPY:.0%}")

    columns = [
        value("", "dtype"),
        Column("maxk ms", lambda row: number(time_of(row.cells[0]))),
        Column("torch.topk ms", lambda row: number(time_of(row.cells[1]))),
        Column("speed-up", lambda row: ratio(quotients(row)[0])),
        Column("copy ms", lambda row: number(time_of(row.cells[2]))),
        Column("of its bandwidth", lambda row: percent(quotients(row)[1])),
        *([Column("asked", goal)] if asked else []),
    ]
    title = "maxk, ({rows:,}, {width}), k = {k}"
    return pivot(by(result["cells"], part="maxk"), title, ("dtype",), columns, split=("part",))


def ssd_in_short(result: dict[str, Any]) -> list[Table]:
    """The baselines' times over ours, and the selection of the k largest."""
    return [_summary(result, asked=True), *_maxk(result, asked=True)]
