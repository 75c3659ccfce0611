"""What all tables are made of: the table itself, how numbers are shown, how cells are found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from ..common import geometric_mean
from ..goals import SPEED_UPS, verdict
from ..roofline import peers

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


def stored_rivals(result: dict[str, Any], operator: str, dtype: str, graph: str) -> dict[str, float]:
    """Stored times of rivals on a graph, if they were taken on the same GPU model.

    For float32 only rivals that compute in float32 count; for 16-bit types those of any precision.
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


def percent(value: float) -> str:
    return f"{value:.0%}" if math.isfinite(value) else "-"


def has_roofline(result: dict[str, Any]) -> bool:
    return result["machine"].get("gpu") == peers()["gpu"]


def speeds(
    cells: Iterable[Cell], rivals: Callable[[Cell], Mapping[str, float | None]]
) -> dict[str, dict[str, float]]:
    """Rival -> graph -> its time over ours, where both have one.

    Args:
        cells: Ours.
        rivals: The rivals' times beside a cell.
    """
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        for rival, time in rivals(cell).items():
            if speed := quotient(time, time_of(cell)):
                found.setdefault(rival, {})[cell["graph"]] = speed
    return found


#: Columns of the rows that `compared` makes.
COMPARED = ("", "rival", "geometric mean", "least", "graphs", "asked")


def compared(what: str, rival: str, found: dict[str, float]) -> list[str]:
    """A rival's times over ours on several graphs in one row, with what was asked.

    Args:
        what: What is compared, as `goals.SPEED_UPS` names it.
        rival: Its name.
        found: Its time over ours, by graph; at least one.
    """
    mean = geometric_mean(found.values())
    least = min(found, key=found.__getitem__)
    goal = SPEED_UPS.get(what, {}).get(rival)
    asked = "" if goal is None else verdict(mean >= goal, ratio(goal))
    return [what, rival, ratio(mean), f"{ratio(found[least])} {least}", str(len(found)), asked]
