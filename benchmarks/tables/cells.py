"""Building blocks of all tables: the table itself, formats of numbers, search for cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table as RichTable

from ..goals import SPEED_UPS, verdict
from ..roofline import peers
from ..runner import geometric_mean

Cell = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows of text under column titles; columns of numbers are right-aligned."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [
            f"**{self.title}**",
            "",
            _line(self.columns),
            _line(["---:" if self._has_numbers(place) else "---" for place in range(len(self.columns))]),
        ]
        return "\n".join(lines + [_line(row) for row in self.rows]) + "\n"

    def print(self, console: Console) -> None:
        table = RichTable(title=self.title, title_justify="left")
        for place, column in enumerate(self.columns):
            right = self._has_numbers(place)
            table.add_column(column, justify="right" if right else "left", no_wrap=not place)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def _has_numbers(self, place: int) -> bool:
        """Whether a column, other than the first, has a number anywhere, or nothing."""
        texts = [row[place] for row in self.rows if row[place] not in ("", "-")]
        return place > 0 and (not texts or any(text[0].isdigit() for text in texts))


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits or so; "-" for nothing."""
    if value is None or not math.isfinite(value):
        return "-"
    if value and abs(value) < 10 ** (1 - digits):
        return f"{value:.1e}"
    return f"{value:.{max(digits - 1 - max(math.floor(math.log10(abs(value))), 0), 0)}f}" if value else "0"


def ratio(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}x"


def time_of(cell: Cell | None, field: str = "median_ms") -> float | None:
    """The time of a cell that was measured, else None."""
    return cell[field] if cell is not None and cell["status"] == "ok" else None


def shown(cell: Cell | None, field: str = "median_ms") -> str:
    if cell is None:
        return "-"
    return number(cell[field]) if cell["status"] == "ok" else cell["status"].split(":")[0]


def quotient(slow: float | None, fast: float | None) -> float | None:
    return slow / fast if slow is not None and fast else None


def ordered(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def by(cells: Iterable[Cell], **wanted: Any) -> list[Cell]:
    return [cell for cell in cells if all(cell.get(key) == value for key, value in wanted.items())]


def first(cells: Iterable[Cell], **wanted: Any) -> Cell | None:
    return next(iter(by(cells, **wanted)), None)


@dataclass(frozen=True)
class Row:
    """The cells of one row of a table.

    Attributes:
        key: The fields that they share.
        cells: They.
        table: All cells of the table.
        by: The field that tells the cells of a row apart.
    """

    key: Cell
    cells: list[Cell]
    table: list[Cell]
    by: str

    def __getitem__(self, name: Any) -> Cell | None:
        return first(self.cells, **{self.by: name})

    @property
    def cell(self) -> Cell:
        """The first cell."""
        return self.cells[0]


class Column(NamedTuple):
    """A column: its title, the text of a row, and that of the last row, if the table has one of means."""

    title: str
    text: Callable[[Row], str]
    last: Callable[[list[Row]], str] = lambda rows: ""


def value(title: str, field: str | None = None, form: Callable[[Any], str] = str) -> Column:
    """A field of the row's first cell, by default the one that the title names."""
    return Column(title, lambda row: form(row.cell.get(field or title)))


def key_column(title: str) -> Column:
    """All fields of the key in one column."""
    return Column(title, lambda row: " ".join(map(str, row.key.values())))


def time_columns(names: Mapping[Any, str]) -> list[Column]:
    """Milliseconds by implementation, from its name and the column's."""
    return [Column(title, lambda row, name=name: shown(row[name])) for name, title in names.items()]


def mean_of(
    title: str, speed: Callable[[Row], float | None], form: Callable[[Any], str] | None = None
) -> Column:
    """A quotient, with its geometric mean in the last row."""
    form = form or ratio
    return Column(
        title,
        lambda row: form(speed(row)),
        lambda rows: form(geometric_mean(found for row in rows if (found := speed(row)))),
    )


def speedup(title: str, slow: Any, fast: Any) -> Column:
    """The time of one implementation over that of a faster one."""
    return mean_of(title, lambda row: quotient(time_of(row[slow]), time_of(row[fast])))


def memory_columns(names: Mapping[str, str], unit: float = 1e9) -> list[Column]:
    """Peak memory by implementation."""

    def text(row: Row, name: str) -> str:
        peak = (row[name] or {}).get("peak_bytes")
        return number(peak / unit) if peak else "-"

    return [Column(title, lambda row, name=name: text(row, name)) for name, title in names.items()]


def pivot(
    cells: Iterable[Cell],
    title: str | Callable[[list[Row]], str],
    rows: Sequence[str],
    columns: Sequence[Column] | Callable[[list[Cell]], Sequence[Column]],
    *,
    split: Sequence[str] = (),
    by: str = "implementation",
    last: str = "",
) -> list[Table]:
    """Tables of cells.

    Args:
        cells: The measurements.
        title: May name fields of the first cell in braces.
        rows: The fields whose values tell rows apart; none: every cell is a row.
        columns: The columns, or what makes them from the cells of a table.
        split: The fields whose values tell tables apart.
        by: The field that tells the cells of a row apart.
        last: The first text of a last row, that of the means; "": no such row.
    """
    cells = list(cells)
    tables = []
    for part in ordered(tuple(cell.get(key) for key in split) for cell in cells):
        group = _equal(cells, split, part)
        keys = ordered(tuple(cell.get(key) for key in rows) for cell in group)
        lines = [Row(dict(zip(rows, key, strict=True)), _equal(group, rows, key), group, by) for key in keys]
        if not rows:
            lines = [Row({}, [cell], group, by) for cell in group]
        made = columns(group) if callable(columns) else columns
        texts = [[column.text(line) for column in made] for line in lines]
        texts += [[last, *(column.last(lines) for column in made[1:])]] if last else []
        name = title(lines) if callable(title) else title.format_map(group[0])
        tables.append(Table(name, [column.title for column in made], texts))
    return tables


def _equal(cells: list[Cell], keys: Sequence[str], values: Sequence[Any]) -> list[Cell]:
    return by(cells, **dict(zip(keys, values, strict=True)))


def stored_baselines(result: dict[str, Any], operator: str, dtype: str, graph: str) -> dict[str, float]:
    """Stored times of baselines on a graph, if they were taken on the same GPU model.

    For float32 only baselines that compute in float32 count; for 16-bit types those of any precision.
    """
    known = peers()
    if result["machine"].get("gpu") != known["gpu"]:
        return {}
    return {
        name: times[graph]
        for name, times in known["kernels"].get(operator, {}).items()
        if graph in times
        and not name.startswith("cuSPARSE")
        and (dtype != "float32" or name.endswith("fp32"))
    }


def spread(cell: Cell) -> str:
    return f" ({number(cell['p20_ms'])}-{number(cell['p80_ms'])})" if cell["status"] == "ok" else ""


def percent(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.0%}"


def has_roofline(result: dict[str, Any]) -> bool:
    return result["machine"].get("gpu") == peers()["gpu"]


def fastest(known: Mapping[str, float]) -> str | None:
    """The name with the shortest time; None if there are no names."""
    return min(known, key=known.__getitem__, default=None)


def fastest_with_time(known: Mapping[str, float], factor: float = 1) -> str:
    """The fastest with its time."""
    best = fastest(known)
    return f"{best} {number(factor * known[best])}" if best else "-"


def by_graph(cells: Iterable[Cell], time: Callable[[Cell], float | None]) -> dict[str, float]:
    """Graph -> a baseline's time over ours, where both have one."""
    return {cell["graph"]: speed for cell in cells if (speed := quotient(time(cell), time_of(cell)))}


def speeds(
    cells: Iterable[Cell], baselines: Callable[[Cell], Mapping[str, float | None]]
) -> dict[str, dict[str, float]]:
    """Baseline -> graph -> its time over ours, where both have one.

    Args:
        cells: Ours.
        baselines: The baselines' times to compare with a cell.
    """
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        for baseline, time in baselines(cell).items():
            if speed := quotient(time, time_of(cell)):
                found.setdefault(baseline, {})[cell["graph"]] = speed
    return found


#: Columns of the rows that `compared` makes.
COMPARED = ("", "baseline", "geometric mean", "least", "graphs", "asked")


def compared(what: str, baseline: str, found: dict[str, float]) -> list[str]:
    """A baseline's times over ours on several graphs in one row, with what was asked.

    Args:
        what: What is compared, as `goals.SPEED_UPS` names it.
        baseline: Its name.
        found: Its time over ours, by graph; at least one.
    """
    mean = geometric_mean(found.values())
    least = min(found, key=found.__getitem__)
    goal = SPEED_UPS.get(what, {}).get(baseline)
    asked = "" if goal is None else verdict(mean >= goal, ratio(goal))
    return [what, baseline, ratio(mean), f"{ratio(found[least])} {least}", str(len(found)), asked]


def compared_table(
    found: Mapping[tuple[str, str], dict[str, float]],
    title: str = "Baseline's time over ours",
    *,
    asked: bool = True,
) -> Table:
    """A row of `compared` for each pair of what is compared and a baseline that has times.

    Args:
        found: Its time over ours, by graph.
        title: Of the table.
        asked: Whether the table has goals.
    """
    end = None if asked else -1
    rows = [compared(*pair, speeds)[:end] for pair, speeds in found.items() if speeds]
    return Table(title, list(COMPARED[:end]), rows)


def best_stored(stored: Callable[[Row], dict[str, float]], ours: str, title: str) -> list[Column]:
    """The fastest stored baseline of a row, and its time over ours."""
    return [
        Column("best stored baseline ms", lambda row: fastest_with_time(stored(row))),
        mean_of(title, lambda row: quotient(min(stored(row).values(), default=None), time_of(row[ours]))),
    ]
