"""Calls of ``update_all`` and ``apply_edges`` with message and reduce functions that the user wrote.

The first such call with enough edges imports `user_functions`, which plans these functions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastsparse_core.call_report import inside, record
from fastsparse_core.fallback import Reason
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.fallback import tell

ALL = dgl.base.ALL
#: Number of edges, by kind of device, below which DGL's own code takes less time than finding a plan. Reduce
#: functions of the user are always planned, because DGL calls them once per degree.
FEW_EDGES = {"cpu": 4096, "cuda": 32_768}
FEW = Reason("few edges and a built-in reduce function", "", "DGL")


def message_passing(original: Any, g: Any, mfunc: Any, rfunc: Any, afunc: Any) -> Any:
    """Replaces ``dgl.core.message_passing``, which ``update_all`` and similar functions call."""
    core = dgl.core
    if core.is_builtin(mfunc) and core.is_builtin(rfunc):
        return original(g, mfunc, rfunc, afunc)
    ndata = _planned("update_all", g, mfunc, rfunc)
    if ndata is None:
        with inside("update_all"):
            return original(g, mfunc, rfunc, afunc)
    if afunc is None:
        return ndata
    ndata = {**g.dstdata, **ndata}
    return core.invoke_node_udf(
        g, ALL, g.dsttypes[0], afunc, ndata=ndata, orig_nid=g.dstdata.get(dgl.NID, None)
    )


def invoke_edge_udf(
    original: Any, graph: Any, eid: Any, etype: Any, func: Any, *, orig_eid: Any = None
) -> Any:
    """Replaces ``dgl.core.invoke_edge_udf``, which ``apply_edges`` calls."""
    result = _planned("apply_edges", graph, func, None) if dgl.base.is_all(eid) else None
    return original(graph, eid, etype, func, orig_eid=orig_eid) if result is None else result


def _planned(call: str, g: Any, mfunc: Any, rfunc: Any) -> dict[str, Tensor] | None:
    """Computes the results of a call by a plan; None if DGL's code has to run."""
    is_passing, core = call == "update_all", dgl.core
    num_edges = g._graph.number_of_edges(0)
    has_own_reduction = is_passing and not core.is_builtin(rfunc)
    if not has_own_reduction and num_edges < FEW_EDGES.get(g.device.type, 1):
        tell(call, FEW)
        record(call, "DGL", FEW.cause)
        return None
    if not num_edges or g._graph.number_of_etypes() != 1:
        record(call, "DGL", "several edge types" if num_edges else "no edges")
        return None
    from fastsparse_dgl.hooks import user_functions  # imported here, because it imports the planner

    try:
        result = user_functions.results_by_plan(g, mfunc, rfunc, is_passing)
    except user_functions.Untraceable as error:
        names = [getattr(each, "__qualname__", "") for each in (mfunc, rfunc) if not core.is_builtin(each)]
        tell(", ".join(filter(None, names)) or call, Reason(str(error), ""))
        record(call, "DGL", str(error))
        return None
    record(call, ", ".join(result[1]))
    return result[0]
