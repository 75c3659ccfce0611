"""Records calls of DGL's operators for reports; operators are wrapped only while calls are recorded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from fastsparse_core.call_report import is_recording, record, timed
from fastsparse_core.replacement import Hook
from fastsparse_dgl.hooks import degrees, operators

#: A recorded call: (name in `dgl.ops`, kernel, reason why no kernel ran).
_Row = tuple[str, str, str]
_NARROW = (
    f"an operand per edge, or fewer than {operators._WIDE_EDGE} columns, on the CPU: DGL is faster there"
)


def _of_gspmm(gidx: Any, op: str, reduce_op: str, *_: Any) -> _Row:
    message = {"copy_lhs": "copy_u", "copy_rhs": "copy_e"}.get(op, f"u_{op}_e")
    return f"{message}_{reduce_op}", "segments" if op == "copy_rhs" else "spmm", ""


def _of_mean(original: Any, g: Any, op: str, reduce_op: str, *_: Any) -> _Row | None:
    is_served = reduce_op == "mean" and g._graph.number_of_etypes() == 1
    return _of_gspmm(g, op, reduce_op) if is_served else None


def _of_gsddmm(gidx: Any, op: str, lhs: Any, rhs: Any, lhs_target: str = "u", rhs_target: str = "v") -> _Row:
    x_at, y_at = operators._TARGETS[lhs_target], operators._TARGETS[rhs_target]
    name = {"copy_lhs": f"copy_{x_at}", "copy_rhs": f"copy_{y_at}"}.get(op, f"{x_at}_{op}_{y_at}")
    if operators._dgl_combines_faster(op, lhs, rhs, (x_at, y_at)):
        return name, "DGL", _NARROW
    return name, "sddmm", ""


def _of_gsddmm_hetero(
    g: Any, op: str, lhs_len: int, lhs_at: str = "u", rhs_at: str = "v", *data: Any
) -> _Row:
    lhs, rhs = ([it for it in each if it is not None] for each in (data[:lhs_len], data[lhs_len:]))
    return _of_gsddmm(g, op, lhs[0] if lhs else None, rhs[0] if rhs else None, lhs_at, rhs_at)


_ROWS: dict[Callable[..., Any], Callable[..., _Row | None]] = {
    operators.gspmm: _of_gspmm,
    operators.gspmm_hetero: _of_gspmm,
    degrees.gspmm: _of_mean,
    operators.gsddmm: _of_gsddmm,
    operators.gsddmm_hetero: _of_gsddmm_hetero,
    operators.edge_softmax: lambda *_, **__: ("edge_softmax", "edge_softmax", ""),
    operators.edge_softmax_hetero: lambda *_, **__: ("edge_softmax", "edge_softmax", ""),
    operators.segment_reduce: lambda *_: ("segment_reduce", "segments", ""),
    operators.scatter_add: lambda *_: ("scatter_add", "segments", ""),
    operators.segment_mm: lambda *_: ("segment_mm", "grouped product", ""),
    operators.gather_mm: lambda *_, **__: ("gather_mm", "grouped product", ""),
}


def recorded(hook: Hook) -> Hook:
    """While calls are recorded, wraps the hook's function so that its calls are recorded (and measured)."""
    function = hook.function
    if not is_recording() or not isinstance(function, FunctionType):
        return hook
    row = _ROWS.get(function)
    return dataclasses.replace(hook, function=timed(function if row is None else _recording(function, row)))


def _recording(function: Callable[..., Any], row: Callable[..., _Row | None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        if found := row(*args, **kwargs):
            record(*found)
        return out

    return called
