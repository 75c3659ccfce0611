"""Which calls ran on FastSparse and which did not, for :func:`report` and ``fastsparse run --report``."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass

from fastsparse_core.log import current_line, table_text

#: Sentences of advice that a report gives at most.
MOST_ADVICE = 3

_counts: Counter[Row] = Counter()
_is_recording = False


@dataclass(frozen=True)
class Row:
    """Calls that were alike.

    Attributes:
        place: the user's line.
        call: the function or the layer's class.
        by: the kernel, or the package whose implementation ran.
        reason: why it was not a kernel; "" if it was.
        cure: what to do about that; "" if nothing, because it is faster so.

    Example:
        >>> from fastsparse_core.call_report import Row
        >>> Row("train.py:12", "scatter", by="segment_reduce").reason
        ''
    """

    place: str
    call: str
    by: str
    reason: str = ""
    cure: str = ""


@dataclass(frozen=True)
class CallReport:
    """What was recorded; ``print`` shows it as a table.

    Attributes:
        rows: kinds of calls and how many there were, the most frequent first.

    Example:
        >>> import fastsparse_core
        >>> fastsparse_core.report().rows  # recording starts with enable(report=True)
        ()
    """

    rows: tuple[tuple[Row, int], ...]

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice on what would make most calls faster, three sentences at most.

        There is none for a call that ran on a kernel most of the time, because every index is new once.
        """
        served: Counter[tuple[str, str]] = Counter()
        for row, count in self.rows:
            if not row.reason:
                served[row.place, row.call] += count
        return tuple(
            f"{row.call} at {row.place} ran {count} times without a kernel: {row.reason}. {row.cure}."
            for row, count in self.rows
            if row.cure and count > served[row.place, row.call]
        )[:MOST_ADVICE]

    def to_json(self) -> str:
        """The report as JSON: ``rows``, with the fields of :class:`Row` and ``calls``; ``advice``."""
        rows = [{**asdict(row), "calls": count} for row, count in self.rows]
        return json.dumps({"rows": rows, "advice": self.advice}, indent=2) + "\n"

    def __str__(self) -> str:
        from rich.table import Table
        from rich.text import Text

        if not self.rows:
            return (
                "FastSparse recorded no calls. Recording starts with fastsparse_pyg.enable(report=True) or "
                "`fastsparse run --report`"
            )
        served = sum(count for row, count in self.rows if not row.reason)
        total = sum(count for _, count in self.rows)
        table = Table(title=f"FastSparse computed {served} of {total} calls")
        for title in ("line", "call", "computed by", "because"):
            table.add_column(title, overflow="fold")
        table.add_column("calls", justify="right")
        for row, count in self.rows:
            cells = (row.place, row.call, row.by, row.reason, str(count))
            table.add_row(*(Text(cell) for cell in cells))
        return "\n".join([table_text(table), *self.advice])


def report() -> CallReport:
    """Returns what ran on FastSparse since recording started.

    Returns:
        The calls by line, function and kernel; ``print`` shows them as a table.

    Example:
        >>> import fastsparse_core
        >>> isinstance(str(fastsparse_core.report()), str)
        True
    """
    return CallReport(tuple(_counts.most_common()))


def start_recording() -> None:
    """Forgets what was recorded, and records from here on; a call then takes some microseconds more."""
    global _is_recording
    _counts.clear()
    _is_recording = True


def stop_recording() -> None:
    """Stops recording; :func:`report` still returns what was recorded."""
    global _is_recording
    _is_recording = False


def is_recording() -> bool:
    """Whether calls are recorded."""
    return _is_recording


def record(call: str, by: str, reason: str = "", cure: str = "") -> None:
    """Counts a call if calls are recorded; the arguments are those of :class:`Row`."""
    if _is_recording:
        _counts[Row(current_line(), call, by, reason, cure)] += 1
