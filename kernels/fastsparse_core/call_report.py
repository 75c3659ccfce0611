"""Records which calls ran on FastSparse, for :func:`report` and ``fastsparse run --report``."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import textwrap
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.utils.data
from torch.fx import _symbolic_trace
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastsparse_core.log import current_line, table_text

#: Largest number of sentences of advice in a report.
MOST_ADVICE = 3
#: Largest number of rows of a printed report. Longer reports show one row for all lines with the same call,
#: kernel and reason.
MOST_ROWS = 20
#: If the script waits for batches in more than this share of the time, the report advises to load faster.
_MUCH_LOADING = 0.3
#: If more pairs of CUDA events than this have not been read yet, the pairs that are finished are read.
_MOST_EVENTS = 512

_counts: Counter[Row] = Counter()
_is_recording = False
#: Name of the layer or function whose call is running; "" outside of such calls.
_caller: ContextVar[str] = ContextVar("fastsparse_caller", default="")


@dataclass(frozen=True)
class Row:
    """Calls of one function from one line of the script that ran in the same way.

    Attributes:
        place: file and line of the script.
        call: name of the function or of the layer's class.
        by: the kernel that ran, or the package whose implementation ran.
        reason: why no kernel ran; "" if a kernel ran.
        cure: what the user can change so that a kernel runs; "" if there is no advice, for example because
            PyG's or DGL's code is faster for this call.
        caller: name of the layer or function that made the calls; "" if the script made them itself.

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
    caller: str = ""


@dataclass
class Times:
    """Measured times of a report.

    Attributes:
        host_ms: row -> milliseconds that the host spent in the row's calls.
        gpu_ms: row -> milliseconds between the CUDA events before and after the row's calls.
        steps: number of optimizer steps.
        loading: seconds in which the script waited for batches.
        since, until: times of the first and of the last measurement on the host's clock, in seconds.
    """

    host_ms: dict[Row, float] = field(default_factory=lambda: defaultdict(float))
    gpu_ms: dict[Row, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0
    loading: float = 0.0
    since: float = 0.0
    until: float = 0.0


@dataclass(frozen=True)
class CallReport:
    """The recorded calls; ``print`` shows them as a table.

    Attributes:
        rows: pairs of a row and its number of calls, the most frequent first.
        times: measured times, which :meth:`to_json` lists; None unless recording started with
            ``fastsparse run --report=time`` or ``enable(report="time")`` of ``fastsparse_pyg``. The time of a
            layer includes the times of the calls inside of the layer.

    Example:
        >>> import fastsparse_core
        >>> rows = fastsparse_core.report().rows  # recording starts with enable(report=True)
        >>> sum(count for _, count in rows) >= len(rows)
        True
    """

    rows: tuple[tuple[Row, int], ...]
    times: Times | None = None

    @property
    def advice(self) -> tuple[str, ...]:
        """At most three pieces of advice: first about measured times, then about the most frequent calls.

        There is no advice about a call that mostly ran on a kernel, because the first call with a new index
        often runs without a kernel.
        """
        served: Counter[tuple[str, str]] = Counter()
        for row, count in self.rows:
            if not row.reason:
                served[row.place, row.call] += count
        found = [
            f"{row.call} at {row.place} ran {count} times without a kernel: {row.reason}. {row.cure}."
            for row, count in self.rows
            if row.cure and count > served[row.place, row.call]
        ]
        return tuple([*self._advice_of_times(), *found][:MOST_ADVICE])

    def _advice_of_times(self) -> Iterator[str]:
        times = self.times
        if times is None:
            return
        total = times.until - times.since
        if total and times.loading > _MUCH_LOADING * total:
            yield (
                f"The script waits for batches in {times.loading / total:.0%} of the time "
                f"({times.loading:.1f} of {total:.1f} s): use the loaders of FastSparse, or more num_workers."
            )
        host, gpu = (
            sum(time for row, time in found.items() if not row.caller)
            for found in (times.host_ms, times.gpu_ms)
        )
        if times.steps and gpu and host > 0.8 * gpu:
            calls = sum(count for row, count in self.rows if not row.caller)
            yield (
                f"The GPU waits for Python: the {calls / times.steps:.0f} calls of a training step take the "
                f"host {host / times.steps:.2f} ms. Decorate the step with `fastsparse_core.capture`."
            )

    def to_json(self) -> str:
        """Returns the text of a JSON object with ``rows`` and ``advice``.

        Rows have the fields of :class:`Row` and ``calls``. If times were measured, rows also have ``host_ms``
        and ``gpu_ms`` (None without a GPU), and the object has ``steps``, ``loading_s`` and ``total_s``.
        """
        rows: list[dict[str, Any]] = [{**asdict(row), "calls": count} for row, count in self.rows]
        page: dict[str, Any] = {"rows": rows, "advice": self.advice}
        if self.times is not None:
            times = self.times
            for (row, _), entry in zip(self.rows, rows, strict=True):
                entry |= {"host_ms": times.host_ms.get(row), "gpu_ms": times.gpu_ms.get(row)}
            total = times.until - times.since
            page |= {"steps": times.steps, "loading_s": times.loading, "total_s": total}
        return json.dumps(page, indent=2) + "\n"

    def __str__(self) -> str:
        from rich.table import Table
        from rich.text import Text

        if not self.rows:
            if _is_recording:
                return "FastSparse recorded no calls: none has finished since recording started"
            return (
                "FastSparse recorded no calls. Recording starts with `fastsparse run --report`, or with "
                "enable(report=True) of fastsparse_pyg or fastsparse_dgl"
            )
        # Calls inside of a counted call are listed, but not counted again.
        counted = [(row, count) for row, count in self.rows if not row.caller]
        served = sum(count for row, count in counted if not row.reason)
        total = sum(count for _, count in counted)
        table = Table(title=f"FastSparse computed {served} of {total} calls")
        groups = self._groups()
        shown = groups[:MOST_ROWS]
        places = [
            group[0][0].place + (f" and {len(group) - 1} more" if len(group) > 1 else "") for group in shown
        ]
        is_short = max(map(len, places)) <= 40
        for title in ("line", "call", "computed by", "because"):
            # Short places are not wrapped, so that they can be searched for. Long places are wrapped, because
            # they would leave too little width for the other columns.
            table.add_column(title, overflow="fold", no_wrap=title == "line" and is_short)
        table.add_column("calls", justify="right")
        measured: dict[str, dict[Row, float]] = {}
        if self.times is not None:
            measured = {"host ms": self.times.host_ms}
            measured |= {"GPU ms": self.times.gpu_ms} if self.times.gpu_ms else {}
        for title in measured:
            table.add_column(title, justify="right")
        for place, group in zip(places, shown, strict=True):
            row, rows = group[0][0], [each for each, _ in group]
            call = f"{row.call} in {row.caller}" if row.caller else row.call
            cells = [place, call, row.by, row.reason, str(sum(count for _, count in group))]
            for found in measured.values():
                times = [found[each] for each in rows if each in found]
                cells.append(f"{sum(times):.1f}" if times else "-")
            table.add_row(*(Text(cell) for cell in cells))
        notes = list(self.advice)
        if len(self.rows) > MOST_ROWS:
            hidden = [count for group in groups[MOST_ROWS:] for _, count in group]
            also = f" {len(hidden)} lines with {sum(hidden)} calls are not shown." if hidden else ""
            notes.append(
                f"The {len(self.rows)} rows of this report are grouped by call and reason.{also} "
                "All rows: `--report-json FILE`, or `report().to_json()`."
            )
        width = shutil.get_terminal_size((110, 24)).columns
        fill = functools.partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
        return "\n".join([table_text(table), *map(fill, notes)])

    def _groups(self) -> list[list[tuple[Row, int]]]:
        """Groups of rows that the table shows as one row, with numbers of calls; most frequent first."""
        if len(self.rows) <= MOST_ROWS:
            return [[each] for each in self.rows]
        groups: dict[tuple[str, ...], list[tuple[Row, int]]] = defaultdict(list)
        for row, count in self.rows:
            groups[row.caller, row.call, row.by, row.reason].append((row, count))
        return sorted(groups.values(), key=lambda group: -sum(count for _, count in group))


def report() -> CallReport:
    """Returns the calls since recording started, and what computed each of them.

    ``fastsparse run --report`` and ``enable(report=True)`` of both plugins start recording.

    Returns:
        Numbers of calls by line, function and kernel; ``print`` shows them as a table.

    Example:
        >>> import fastsparse_core
        >>> isinstance(str(fastsparse_core.report()), str)
        True
    """
    return CallReport(tuple(_counts.most_common()), _clock.read() if _clock is not None else None)


def start_recording(*, times: bool = False) -> None:
    """Drops earlier records and starts recording, which adds some microseconds to every call.

    Args:
        times: if True, also measures the times of functions that are passed to :func:`timed` later.
    """
    global _is_recording, _clock
    stop_recording()
    _counts.clear()
    _clock = _Clock() if times else None
    _is_recording = True


def start_timing() -> None:
    """Calls :func:`start_recording` with ``times=True``."""
    start_recording(times=True)


def stop_recording() -> None:
    """Stops recording; :func:`report` still returns the recorded calls."""
    global _is_recording
    _is_recording = False
    if _clock is not None:
        _clock.stop()


def is_recording() -> bool:
    """Returns True while calls are recorded."""
    return _is_recording


@contextlib.contextmanager
def inside(call: str) -> Iterator[None]:
    """Context in which calls are recorded as made by the layer or function ``call``.

    The caller must be recorded too, because the report does not count the calls that it makes.
    """
    token = _caller.set(call)
    try:
        yield
    finally:
        _caller.reset(token)


def record(call: str, by: str, reason: str = "", cure: str = "") -> None:
    """Counts a call if calls are recorded; the arguments are those of :class:`Row`.

    Calls during a symbolic trace by `torch.fx` compute nothing, so they do not count.
    """
    if _is_recording and not _symbolic_trace._is_fx_tracing_flag:
        row = Row(current_line(), call, by, reason, cure, _caller.get())
        _counts[row] += 1
        if _clock is not None:
            _clock.note(row)


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that the times of its calls are measured.

    The time of a call is added to the row that the call records last. If no times are measured, the function
    is returned unchanged.
    """
    if _clock is None or not _is_recording:
        return function
    return functools.wraps(function)(_clock.around(function))


class _Clock:
    """Measures the times of calls and of waiting for batches. Only `read` waits for the GPU."""

    def __init__(self) -> None:
        self.times = Times()
        self._open = threading.local()  # stack ``rows``: one for each measured call that is running
        self._events: deque[tuple[Row, Any, Any]] = deque()
        self._is_on = True
        self._steps = register_optimizer_step_post_hook(self._step)
        clock, iterate = self, torch.utils.data.DataLoader.__iter__
        self._iterate = iterate

        def iterated(loader: Any) -> Any:
            return clock._waits(iterate(loader))

        torch.utils.data.DataLoader.__iter__ = iterated  # type: ignore[method-assign]

    def stop(self) -> None:
        """Stops measuring and restores PyTorch's loader."""
        if self._is_on:
            self._is_on = False
            self._steps.remove()
            torch.utils.data.DataLoader.__iter__ = self._iterate  # type: ignore[method-assign]

    def read(self) -> Times:
        """The measured times; waits for the GPU."""
        self._take(wait=True)
        return self.times

    def note(self, row: Row) -> None:
        """Sets the row of the innermost measured call."""
        rows = getattr(self._open, "rows", None)
        if rows:
            rows[-1] = row

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function to measure its time."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on:
                return function(*args, **kwargs)
            rows = self._open.__dict__.setdefault("rows", [])
            rows.append(None)
            begin, event = self._now(), _event()
            try:
                return function(*args, **kwargs)
            finally:
                row = rows.pop()
                if row is not None:
                    self.times.host_ms[row] += (self._now() - begin) * 1e3
                    after = None if event is None else _event()
                    if after is not None:
                        self._events.append((row, event, after))
                        if len(self._events) > _MOST_EVENTS:
                            self._take(wait=False)

        return measured

    def _take(self, *, wait: bool) -> None:
        while self._events and (wait or self._events[0][2].query()):
            row, before, after = self._events.popleft()
            after.synchronize()
            self.times.gpu_ms[row] += before.elapsed_time(after)

    def _waits(self, batches: Any) -> Iterator[Any]:
        while True:
            begin = self._now()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.times.loading += self._now() - begin
            yield batch

    def _step(self, *_: Any) -> None:
        self.times.steps += 1
        self._now()

    def _now(self) -> float:
        now = time.perf_counter()
        self.times.since = self.times.since or now
        self.times.until = now
        return now


_clock: _Clock | None = None


def _event() -> Any:
    """An event on the current stream; None if CUDA is not initialised or a CUDA graph is being captured."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
