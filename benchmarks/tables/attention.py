"""Tables of attention."""

from __future__ import annotations

from typing import Any

from .cells import (
    Cell,
    Column,
    Row,
    Table,
    by,
    compared_table,
    mean_of,
    number,
    ordered,
    pivot,
    quotient,
    ratio,
    shown,
    speeds,
    spread,
    stored_baselines,
    time_of,
    value,
)

_CASE = ("implementation", "dtype", "case", "direction")


def _baselines(result: dict[str, Any], cell: Cell) -> dict[str, float]:
    return stored_baselines(result, cell["stored"] or "", cell["dtype"], cell["graph"])


def _groups(cells: list[Cell]) -> list[list[Cell]]:
    keys = ordered(tuple(cell[key] for key in _CASE) for cell in cells)
    return [by(cells, **dict(zip(_CASE, key, strict=True))) for key in keys]


def _summary(result: dict[str, Any], name: str, *, asked: bool) -> Table:
    found = {}
    for group in _groups(result["cells"]):
        known = speeds(group, lambda cell: _baselines(result, cell))
        found |= {(name.format_map(group[0]), baseline): times for baseline, times in known.items()}
    return compared_table(found, asked=asked)


def attention(result: dict[str, Any]) -> list[Table]:
    """The baselines' times over ours in short, our times among each other, then every graph."""

    def columns(cells: list[Cell]) -> list[Column]:
        made = [
            value("graph"),
            Column("ms (20-80 %)", lambda row: shown(row.cell) + spread(row.cell)),
            value("error", form=lambda error: number(error, 2)),
            value("extra MB", "extra_bytes", lambda size: number(None if size is None else size / 1e6)),
            Column("of the results", lambda row: ratio(_of_results(row.cell))),
        ]
        for baseline in ordered(baseline for cell in cells for baseline in _baselines(result, cell)):

            def time(row: Row, baseline: str = baseline) -> float | None:
                return _baselines(result, row.cell).get(baseline)

            made += [
                Column(f"{baseline} ms", lambda row, time=time: number(time(row))),
                mean_of("against it", lambda row, time=time: quotient(time(row), time_of(row.cell))),
            ]
        return made

    title = "{case} {direction}, {dtype}, {implementation}"
    details = pivot(result["cells"], title, (), columns, split=_CASE, last="geometric mean")
    return [_summary(result, title, asked=False), *_own_ratios(result["cells"]), *details]


def _own_ratios(cells: list[Cell]) -> list[Table]:
    """Backward over forward, and four heads of 32 over one of 128, a table per feature type."""

    def over(title: str, slow: tuple[str, str], fast: tuple[str, str]) -> Column:
        def text(row: Row) -> str:
            found = {(cell["case"], cell["direction"]): time_of(cell) for cell in row.cells}
            return ratio(quotient(found.get(slow), found.get(fast)))

        return Column(title, text)

    def columns(cells: list[Cell]) -> list[Column]:
        cases = ordered(cell["case"] for cell in cells)
        heads = (("attention 4x32 over 1x128, forward", "forward"), ("backward", "backward"))
        return [
            value("graph"),
            value("edges", form="{:,}".format),
            *(over(case, (case, "backward"), (case, "forward")) for case in cases),
            *(over(title, ("attention@4x32", it), ("attention@1x128", it)) for title, it in heads),
        ]

    title = "Backward time over forward time, and what four heads cost, {dtype}, {implementation}"
    return pivot(cells, title, ("graph",), columns, split=("implementation", "dtype"))


def attention_in_short(result: dict[str, Any]) -> list[Table]:
    """The baselines' times over ours, and the extra memory of a call over its results."""
    name, memory = "{case} {direction}, {dtype}", []
    for group in _groups(result["cells"]):
        most = max((c for c in group if c.get("extra_bytes")), key=_of_results, default=None)
        if most is not None:
            memory.append([name.format_map(most), f"{ratio(_of_results(most))} {most['graph']}"])
    title = "Memory of a call over that of its results, at most"
    return [_summary(result, name, asked=True), Table(title, ["", "graph"], memory)]


def _of_results(cell: Cell) -> float | None:
    return quotient(cell.get("extra_bytes"), cell.get("result_bytes"))
