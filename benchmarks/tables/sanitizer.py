"""Table of what compute-sanitizer found."""

from __future__ import annotations

from typing import Any

from .cells import Cell, Table, by


def sanitizer(result: dict[str, Any]) -> list[Table]:
    cells = result["cells"]
    tools, parts = (sorted({cell[key] for cell in cells}) for key in ("tool", "part"))
    rows = [
        [
            f"all {len(parts)} parts",
            *(_sum(by(cells, tool=t)) for t in tools),
        ]
    ]
    for part in parts:
        rows.append([part, *(_verdict(by(cells, part=part, tool=tool)) for tool in tools)])
    return [Table("Errors and warnings, and seconds with instrumentation", ["part", *tools], rows)]


def sanitizer_in_short(result: dict[str, Any]) -> list[Table]:
    """The totals, and parts that had errors or did not finish."""
    table = sanitizer(result)[0]
    clean = {
        cell["part"]
        for cell in result["cells"]
        if all(map(_is_clean, by(result["cells"], part=cell["part"])))
    }
    return [Table(table.title, table.columns, [row for row in table.rows if row[0] not in clean])]


def _is_clean(cell: Cell) -> bool:
    return cell["status"] == "ok" and not cell["errors"] and not cell["warnings"]


def _count(errors: int, warnings: int) -> str:
    return f"{errors} errors, {warnings} warnings"


def _verdict(cells: list[Cell]) -> str:
    if not cells:
        return "-"
    (cell,) = cells
    if cell["status"] != "ok":
        return cell["status"].split(":")[0]
    return f"{_count(cell['errors'], cell['warnings'])}, {cell['seconds']:.0f} s"


def _sum(cells: list[Cell]) -> str:
    errors, warnings = (sum(cell.get(key, 0) for cell in cells) for key in ("errors", "warnings"))
    open_ends = sum(cell["status"] != "ok" for cell in cells)
    return _count(errors, warnings) + (f", {open_ends} without an end" if open_ends else "")
