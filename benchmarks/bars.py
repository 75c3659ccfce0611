"""Bar charts of result tables, as SVG that is readable on light and on dark pages."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from .tables.cells import Table

#: Text of medium brightness on a transparent background; baseline first, then FastSparse.
INK, COLOURS = "#7d8590", ("#9aa0a6", "#4c9be0", "#e89a3c")
WIDTH, LABELS, BAR, GAP = 760, 290, 14, 8


@dataclass(frozen=True)
class Chart:
    """The numbers of a table that a chart shows.

    Attributes:
        record: Folder and name of the record.
        table: The beginning of the table's title.
        labels: Columns that together name a group of bars.
        values: Columns of numbers; a bar of each group.
        title: The quantity and its unit.
        longest: Bars of larger numbers are cut.
    """

    record: str
    table: str
    labels: tuple[str, ...]
    values: tuple[str, ...]
    title: str
    longest: float = float("inf")

    def draw(self, tables: list[Table]) -> str:
        """The chart of the first of these tables that fits."""
        table = next(table for table in tables if table.title.startswith(self.table))
        at = {column: place for place, column in enumerate(table.columns)}
        groups = []
        for row in table.rows:
            found = [re.match(r"[\d.]+", row[at[value]]) for value in self.values]
            if any(found):
                label = ", ".join(row[at[column]] for column in self.labels)
                groups.append((label, [float(number[0]) if number else None for number in found]))
        return _svg(self.title, groups, self.values if len(self.values) > 1 else (), self.longest)


def _svg(
    title: str, groups: list[tuple[str, list[float | None]]], names: tuple[str, ...], longest: float
) -> str:
    scale = (WIDTH - LABELS - 90) / min(max(v for _, values in groups for v in values if v), longest)
    parts, y = [_text(0, 16, title, bold=True)], 30.0
    for place, name in enumerate(names):
        x = LABELS + 150 * place
        parts += [_bar(x, y, 12, place), _text(x + 18, y + 11, name)]
    y += 24 if names else 0
    for label, values in groups:
        parts.append(_text(LABELS - 8, y + BAR * len(values) / 2 + 4, label, "end"))
        for place, value in enumerate(values):
            if value is not None:
                wide = scale * min(value, longest)
                parts += [
                    _bar(LABELS, y, wide, place if names else 1),
                    _text(LABELS + wide + 5, y + 11, f"{value:g}" + (" (cut)" if value > longest else "")),
                ]
            y += BAR
        y += GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" width="{WIDTH}"'
    style = (
        f'font-family="sans-serif" font-size="12" fill="{INK}" role="img" aria-label="{html.escape(title)}"'
    )
    return "\n".join([f"{head} {style}>", *parts, "</svg>\n"])


def _bar(x: float, y: float, wide: float, place: int) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:.1f}" height="{BAR - 2}" fill="{COLOURS[place]}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:g}" text-anchor="{anchor}"{weight}>{html.escape(text)}</text>'
