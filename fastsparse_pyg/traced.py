"""Aggregation for `torch.compile`: operators that take the edges and look their structure up when they run.

A trace knows tensors, not what the cache keeps for one of them. So the edges themselves flow through the
graph, and the operator asks the cache as an eager layer does. CUDA graphs, which would replay the structure
that they were recorded with, are kept off these operators.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsparse_core import Adjacency, policy, spmm
from fastsparse_core.fused.aggregate_transform import one
from fastsparse_core.ops._autocast import autocast
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._registration import tell_inspect
from fastsparse_core.ops._spmm_plan import grad_of_features, launch_spmm
from fastsparse_pyg.graph import edges_for_loops, gcn_factors, resolve

#: What the operators compute: sums, means, and GCN's sums divided by the roots of both degrees.
REDUCTIONS = ("sum", "mean", "gcn")

_library = torch.library.Library("fastsparse_pyg", "DEF")
_tag = getattr(torch.Tag, "cudagraph_unsafe", None)  # PyTorch 2.8 and newer
_ARGUMENTS = "Tensor edges, SymInt num_dst, SymInt num_src, str flow, bool loops, str reduce, str algorithm"
for _schema in (f"aggregate(Tensor x, {_ARGUMENTS})", f"aggregate_backward(Tensor grad, {_ARGUMENTS})"):
    _library.define(f"{_schema} -> Tensor", tags=() if _tag is None else (_tag,))


class TracedEdges(NamedTuple):
    """A graph within a trace, in place of its `Adjacency`.

    Attributes:
        edges: (2, num_edges).
        num_dst: destinations.
        num_src: sources.
        flow: as of the layer.
        add_self_loops: whether the loops that are missing are added.
    """

    edges: Tensor
    num_dst: int
    num_src: int
    flow: str
    add_self_loops: bool = False

    def aggregate(self, x: Tensor, reduce: str) -> Tensor:
        """Aggregates features (num_src, width) over the neighbours; ``reduce`` is one of `REDUCTIONS`."""
        (x,) = autocast(x)  # type: ignore[assignment]
        result: Tensor = torch.ops.fastsparse_pyg.aggregate.default(
            x, *self, reduce, policy.requested("spmm", "auto")
        )
        return result


class _Seen(threading.local):
    """What the trace of this thread has found out last."""

    from_outside = False


_seen = _Seen()


def come_from_outside(edges: Tensor) -> bool:
    """Whether edges are an input of the trace that is being made, as they were when it was entered.

    The cache goes by the tensor and its version. Inductor writes other edges into the memory, and the very
    tensor object, of some that compiled code has made and needs no more, and counts no version up.
    """
    from torch._dynamo.comptime import comptime

    comptime(_look)
    return _take()


def _look(trace: Any) -> None:
    """Called by the compiler while it reads :func:`come_from_outside`."""
    try:
        edges = trace.get_local("edges")
        has_source = edges._i_will_not_complain_if_bc_breaks_VariableTracker().source is not None
        _seen.from_outside = has_source and edges.as_fake()._version == 0
    except Exception:  # another PyTorch, whose compiler says it in another way
        _seen.from_outside = False


@torch.compiler.assume_constant_result
def _take() -> bool:
    found, _seen.from_outside = _seen.from_outside, False
    return found


def _structure(
    edges: Tensor, dtype: torch.dtype, reduce: str, num_dst: int, num_src: int, flow: str, loops: bool
) -> tuple[Adjacency, Tensor | None, Tensor | None, Tensor | None]:
    """The structure, the factors of destinations and sources, and the value of loops that the kernel adds.

    Raises:
        RuntimeError: a CUDA graph is captured.
    """
    if edges.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "edge_index: expected an Adjacency where CUDA graphs are captured (mode='reduce-overhead' of "
            "PyTorch before 2.8), whose replays would not see other edges; pass "
            "fastsparse_pyg.prepare(edge_index)"
        )
    if reduce == "gcn" and loops:
        adj = edges_for_loops(edges, num_dst, flow)
    else:
        adj = resolve(edges, num_src, num_dst, edges.device, flow=flow, add_self_loops=loops)
    precise = accumulation_dtype(dtype)
    if reduce == "gcn":
        scale, adds = gcn_factors(adj, dtype, loops)
        return adj, scale, scale, one(edges.device, precise) if adds else None
    return adj, adj.inv_degree(precise) if reduce == "mean" else None, None, None


def _aggregate(x: Tensor, edges: Tensor, *rest: Any) -> Tensor:
    *place, reduce, algorithm = rest
    with torch.no_grad():
        adj, scale_dst, scale_src, loop = _structure(edges, x.dtype, reduce, *place)
        if loop is None:
            return spmm(adj, x, scale_dst=scale_dst, scale_src=scale_src, algorithm=algorithm)
        return launch_spmm(adj, x, None, scale_dst, scale_src, None, algorithm, loop=loop)


def _aggregate_backward(grad: Tensor, edges: Tensor, *rest: Any) -> Tensor:
    *place, reduce, algorithm = rest
    with torch.no_grad():
        adj, scale_dst, scale_src, loop = _structure(edges, grad.dtype, reduce, *place)
        return grad_of_features(adj, grad, None, scale_dst, scale_src, algorithm, loop)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rest = inputs[2:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (edges,) = ctx.saved_tensors
    grad_x = torch.ops.fastsparse_pyg.aggregate_backward.default(grad, edges, *ctx.rest)
    return grad_x, *(None,) * 7


def _fake(x: Tensor, edges: Tensor, num_dst: int, *rest: Any) -> Tensor:
    return x.new_empty(num_dst, x.size(1))


def _backward_fake(grad: Tensor, edges: Tensor, num_dst: int, num_src: int, *rest: Any) -> Tensor:
    return grad.new_empty(num_src, grad.size(1))


for _key in ("CPU", "CUDA"):
    _library.impl("aggregate", _aggregate, _key)
    _library.impl("aggregate_backward", _aggregate_backward, _key)
tell_inspect(__name__)
torch.library.register_fake("fastsparse_pyg::aggregate", _fake, lib=_library)
torch.library.register_fake("fastsparse_pyg::aggregate_backward", _backward_fake, lib=_library)
torch.library.register_autograd(
    "fastsparse_pyg::aggregate", _differentiate, setup_context=_keep, lib=_library
)
