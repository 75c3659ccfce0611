"""Tables of complete programs and of forms of captured steps."""

from __future__ import annotations

from typing import Any

from ..runner import geometric_mean
from .cells import Cell, Table, by, first, number, ordered, quotient, ratio, shown, time_of

OURS = ("layers swapped", "our loader", "fastsparse run", "captured")


def baseline(cells: list[Cell]) -> Cell | None:
    """The framework's fastest variant on the same device; on a GPU, DGL's on the CPU does not count."""
    others = [cell for cell in cells if cell["implementation"] not in (*OURS, "DGL, on the CPU")]
    return min((cell for cell in others if time_of(cell)), key=lambda cell: cell["median_ms"], default=None)


def of_programs(result: dict[str, Any]) -> dict[str, list[Cell]]:
    """The cells of every program."""
    cells = by(result["cells"], part="programs")
    return {name: by(cells, program=name) for name in ordered(cell["program"] for cell in cells)}


def programs(result: dict[str, Any]) -> list[Table]:
    """Milliseconds of an epoch for every program; what capture did with every form of a step."""
    return _of_programs(result) + _of_forms(by(result["cells"], part="forms"))


def _of_programs(result: dict[str, Any]) -> list[Table]:
    rows, gains, notes = [], [], []
    for name, cells in of_programs(result).items():
        framework = baseline(cells)
        ours = [first(cells, implementation=variant) for variant in OURS]
        best = min((cell for cell in ours if time_of(cell)), key=lambda cell: cell["median_ms"], default=None)
        gain = quotient(time_of(framework), time_of(best))
        gains += [gain] if gain else []
        pairs = [f"{_plain(framework, key)} / {_plain(best, key)}" for key in ("loss", "score")]
        rows.append(
            [
                name,
                framework["implementation"] if framework else "-",
                shown(framework),
                *map(_time, ours),
                ratio(gain),
                ratio(_of_the_gain(cells)),
                pairs[0],
                f"{pairs[1]} {cells[0]['metric']}",
            ]
        )
        for cell in cells:
            reason = cell["status"] if cell["status"] != "ok" else cell.get("capture", "replaying")
            if reason not in ("replaying", "skipped: capture needs a CUDA device"):
                notes.append([name, cell["implementation"], reason])
    if not rows:
        return []
    mean = f", geometric mean {ratio(geometric_mean(gains))}, least {ratio(min(gains))}" if gains else ""
    columns = ["program", "baseline", "its ms", *OURS, "baseline / ours", "by hand / run", "loss", "metric"]
    tables = [Table(f"Epochs of complete programs, ms{mean}", columns, rows)]
    if notes:
        tables.append(
            Table("Variants that did not run, or not captured", ["program", "variant", "why"], notes)
        )
    return tables


def _of_the_gain(cells: list[Cell]) -> float | None:
    """The time with layers and loader swapped by hand over that without changes."""
    by_hand, run = (
        min((time for name in names if (time := time_of(first(cells, implementation=name)))), default=None)
        for names in (("layers swapped", "our loader"), ("fastsparse run",))
    )
    return quotient(by_hand, run)


def _time(cell: Cell | None) -> str:
    text = shown(cell)
    return text if (cell or {}).get("capture", "replaying") == "replaying" else f"{text} (plain)"


def _plain(cell: Cell | None, key: str) -> str:
    return "-" if cell is None else number(cell[key])


def _of_forms(cells: list[Cell]) -> list[Table]:
    if not cells:
        return []
    rows = [
        [
            cell["form"],
            number(cell["plain_ms"]),
            number(cell["captured_ms"]),
            ratio(cell["gain"]),
            cell["capture"],
        ]
        if cell["status"] == "ok"
        else [cell["form"], "-", "-", "-", cell["status"]]
        for cell in cells
    ]
    return [
        Table(
            "Forms of a step, ms per call", ["form", "plain", "captured", "plain / captured", "status"], rows
        )
    ]
