"""DGL's sparse operators on FastSparse, with the signatures of ``dgl.backend``.

Structures are built from DGL's graph index and cached with it. Results for ties and empty rows, shapes and
errors are the same as DGL's.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Literal

import torch
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core import edge_softmax as core_edge_softmax
from fastsparse_core import spmm as core_spmm
from fastsparse_core.ops._dtypes import DTYPE_CODE, accumulation_dtype
from fastsparse_core.ops.spmm import Reduce
from fastsparse_core.policy import MOST_HEADS
from fastsparse_core.segment import scatter
from fastsparse_core.segment import segment_reduce as core_segment_reduce
from fastsparse_dgl.caching import adjacency_of_index
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.device_graph import DeviceIndex
from fastsparse_dgl.graph import DGLError
from fastsparse_dgl.hooks import messages, products
from fastsparse_dgl.hooks.joint import joint, relations

ALL = dgl.base.ALL
#: The module with DGL's own operators. FastSparse replaces no names in this module, so it can call them.
_dgl = importlib.import_module("dgl.backend.pytorch.sparse")
_TARGETS = {"u": "u", "src": "u", "v": "v", "dst": "v", "e": "e", "edge": "e"}


def structure(gidx: Any, *features: Tensor | None) -> Adjacency:
    """Returns the Adjacency of a graph index with one edge type, on the device of the features.

    Raises:
        DGLError: features are not floating tensors of one dtype, or not on the device of the graph.
    """
    first = next(it for it in features if it is not None)
    for feature in features:
        if feature is None:
            continue
        if feature.dtype not in DTYPE_CODE:
            raise DGLError(f"Expected float64, float32, float16 or bfloat16 features, got {feature.dtype}")
        if feature.dtype != first.dtype:
            raise DGLError(
                f"Expected features of one data type, got {first.dtype} and {feature.dtype}, "
                "please convert them to the same type."
            )
    on_device = type(gidx) is DeviceIndex
    place = gidx.device if on_device else dgl.backend.to_backend_ctx(gidx.ctx)
    for feature in features:
        if feature is not None and feature.device != place:
            raise DGLError(
                f"Expected features on {place} like the graph, got {feature.device}; "
                f"move one of them: graph.to({str(feature.device)!r}) or features.to({str(place)!r})"
            )
    return adjacency_of_index(gidx.host if on_device else gidx, place)


def _is_one_relation(gidx: Any, name: str) -> None:
    if gidx.number_of_etypes() != 1:
        raise DGLError(f"We only support {name} on graph with one edge type")


def _are_cpu_floats(*operands: Any) -> bool:
    """True if all operands are on the CPU and have one dtype that all versions of DGL support on the CPU."""
    given = [it for it in operands if it is not None]
    return given[0].dtype in (torch.float32, torch.float64) and all(
        it.device.type == "cpu" and it.dtype == given[0].dtype for it in given
    )


#: Width from which DGL's CPU kernels take longer than FastSparse's for results per edge.
_WIDE_EDGE = 32


def _dgl_combines_faster(op: str, x: Any, y: Any, targets: tuple[str, str]) -> bool:
    """True if DGL's CPU kernel is faster for a result per edge: with edge features, or with narrow operands.

    Extrema always use FastSparse's kernels. DGL's CPU kernels choose the last edge of several equal ones and
    ignore NaN, so results would depend on the width.
    """
    if op in ("dot", "copy_lhs", "copy_rhs") or not _are_cpu_floats(x, y):
        return False
    return "e" in targets or max(x[:1].numel(), y[:1].numel()) < _WIDE_EDGE


def _cast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Casts operands to autocast's dtype on CUDA. On the CPU nothing is cast, as in DGL."""
    first = next((it for it in tensors if it is not None), None)
    if first is None or not first.is_cuda or not torch.is_autocast_enabled("cuda"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cuda")
    return [
        it.to(dtype) if it is not None and it.is_floating_point() and it.dtype != torch.float64 else it
        for it in tensors
    ]


def _plain(*tensors: Tensor | None) -> Any:
    first = next((it for it in tensors if it is not None), None)
    return contextlib.nullcontext() if first is None else messages.without_autocast(first)


def _without_minus(op: str, rhs: Tensor) -> tuple[str, Tensor]:
    """Converts a difference to a sum and a quotient to a product, as DGL does."""
    if op == "sub":
        return "add", -rhs
    if op == "div":
        return "mul", 1.0 / rhs
    return op, rhs


def gspmm(gidx: Any, op: str, reduce_op: Reduce, lhs_data: Any, rhs_data: Any) -> Tensor:
    """Reduces the messages ``u op e`` by destination. Unlike in DGL, ``reduce_op`` may be ``"mean"``."""
    _is_one_relation(gidx, "gspmm")
    x, e = _cast(None if op == "copy_rhs" else lhs_data, None if op == "copy_lhs" else rhs_data)
    with _plain(x, e):
        return _gspmm(structure(gidx, x, e), op, reduce_op, x, e)


def _gspmm(adj: Adjacency, op: str, reduce: Reduce, x: Any, e: Any) -> Tensor:
    return messages.with_initial_values(adj, _reduced_messages(adj, op, reduce, x, e), reduce)


def _reduced_messages(adj: Adjacency, op: str, reduce: Reduce, x: Any, e: Any) -> Tensor:
    if op == "copy_rhs":
        _check_rows("edge features", e, adj.num_values)
        if reduce in ("max", "min"):
            return messages.extremum_edges(adj, e, "max" if reduce == "max" else "min")
        total = messages.sum_edges(adj, e, "v")
        return _mean_of(adj, total) if reduce == "mean" else total
    if reduce in ("max", "min"):
        adj = messages.in_edge_order(adj)
    if op == "copy_lhs":
        _check_rows("source features", x, adj.num_src)
        return core_spmm(adj, x, reduce=reduce)
    op, e = _without_minus(op, e)
    _check_rows("source features", x, adj.num_src)
    _check_rows("edge features", e, adj.num_values)
    scalar = x.dim() == e.dim() == 1
    try:
        x, e, _ = messages.aligned(x, e)
    except ValueError as error:
        raise DGLError(str(error)) from None
    if op == "mul":
        out = messages.weighted(adj, x, e, reduce)
    elif op != "add":
        raise DGLError(f"Unsupported binary operator {op!r}")
    elif reduce in ("max", "min"):
        out = messages.extremum_of_sums(adj, x, e, reduce == "min")
    else:
        out = core_spmm(adj, x) + messages.sum_edges(adj, e, "v")
        out = _mean_of(adj, out) if reduce == "mean" else out
    return out.squeeze(-1) if scalar else out


def _mean_of(adj: Adjacency, total: Tensor) -> Tensor:
    scale = adj.inv_degree(accumulation_dtype(total.dtype))
    return (total * scale.reshape(-1, *[1] * (total.dim() - 1))).to(total.dtype)


def _check_rows(name: str, x: Tensor, rows: int) -> None:
    if x.size(0) != rows:
        raise DGLError(f"Expected {rows} rows of {name}, got {x.size(0)}")


def gsddmm(
    gidx: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Tensor:
    """Computes ``lhs op rhs`` for every edge."""
    _is_one_relation(gidx, "gsddmm")
    targets = _TARGETS[lhs_target], _TARGETS[rhs_target]
    if _dgl_combines_faster(op, lhs_data, rhs_data, targets):
        return _dgl.gsddmm(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)
    x, y = _cast(None if op == "copy_rhs" else lhs_data, None if op == "copy_lhs" else rhs_data)
    with _plain(x, y):
        return _gsddmm(structure(gidx, x, y), op, x, y, *targets)


def _gsddmm(adj: Adjacency, op: str, x: Any, y: Any, x_at: str, y_at: str) -> Tensor:
    rows = {"u": adj.num_src, "v": adj.num_dst, "e": adj.num_values}
    for name, operand, target in (("left operand", x, x_at), ("right operand", y, y_at)):
        if operand is not None:
            _check_rows(name, operand, rows[target])
    if op in ("copy_lhs", "copy_rhs"):
        operand, target = (x, x_at) if op == "copy_lhs" else (y, y_at)
        return operand if target == "e" else messages.to_edges(adj, operand, target)
    op, y = _without_minus(op, y)
    scalar = x.dim() == y.dim() == 1
    if op == "dot" and x.size(-1) != y.size(-1) and not scalar:
        raise DGLError(
            "Dot operator is only available for arrays with the same size on last dimension, "
            f"but got {tuple(x.shape[1:])} and {tuple(y.shape[1:])}."
        )
    try:
        x, y, _ = messages.aligned(x, y)
    except ValueError as error:
        raise DGLError(str(error)) from None
    if op == "dot":
        out = messages.dot(adj, x, y, x_at, y_at)
    elif op in ("add", "mul"):
        out = messages.combine(adj, op, x, y, x_at, y_at)
    else:
        raise DGLError(f"Unsupported binary operator {op!r}")
    return out.squeeze(-1) if scalar else out


def edge_softmax(gidx: Any, logits: Tensor, eids: Any = ALL, norm_by: str = "dst") -> Tensor:
    """Computes the softmax over the edges that have the same destination (or the same source)."""
    (score,) = _cast(logits)
    assert score is not None
    if not dgl.base.is_all(eids):
        gidx = gidx.edge_subgraph([eids], True).graph
    with _plain(score):
        adj = structure(gidx, score)
        _check_rows("logits", score, adj.num_values)
        return _softmax(adj if norm_by == "dst" else adj.t(), score)


def _softmax(adj: Adjacency, score: Tensor) -> Tensor:
    matrix = score.flatten(1) if score.dim() > 1 else score[:, None]
    if matrix.size(1) == 0:
        return score
    if matrix.size(1) <= MOST_HEADS:  # even a split into one part would copy in the backward pass
        return core_edge_softmax(adj, matrix).reshape(score.shape)
    parts = [core_edge_softmax(adj, part) for part in matrix.split(MOST_HEADS, 1)]
    return torch.cat(parts, 1).reshape(score.shape)


def gspmm_hetero(g: Any, op: str, reduce_op: Reduce, lhs_len: int, *lhs_and_rhs: Any) -> tuple[Any, ...]:
    """Runs :func:`gspmm` for all edge types; reduces by destination type. None for types without edges."""
    lhs, rhs = lhs_and_rhs[:lhs_len], lhs_and_rhs[lhs_len:]
    out: list[Any] = [None] * g.number_of_ntypes()
    for number, (source, target), relation in relations(g):
        x = None if op == "copy_rhs" else lhs[source]
        e = None if op == "copy_lhs" else rhs[number]
        x, e = _cast(x, e)
        with _plain(x, e):
            part = _gspmm(structure(relation, x, e), op, reduce_op, x, e)
        best = out[target]
        if best is None:
            out[target] = part
        elif reduce_op == "sum":
            out[target] = best + part
        else:
            # As within one edge type: NaN takes precedence. If values are equal, the first one counts.
            loses = (part <= best if reduce_op == "max" else part >= best) | best.isnan()
            out[target] = torch.where(loses, best, part)
    return tuple(out)


def gsddmm_hetero(
    g: Any, op: str, lhs_len: int, lhs_target: str = "u", rhs_target: str = "v", *lhs_and_rhs: Any
) -> tuple[Tensor, ...]:
    """Runs :func:`gsddmm` for every edge type."""
    lhs, rhs = lhs_and_rhs[:lhs_len], lhs_and_rhs[lhs_len:]
    x_at, y_at = _TARGETS[lhs_target], _TARGETS[rhs_target]
    out = []
    for number, (source, target), relation in relations(g):
        place = {"u": source, "v": target, "e": number}
        x = None if op == "copy_rhs" else lhs[place[x_at]]
        y = None if op == "copy_lhs" else rhs[place[y_at]]
        out.append(gsddmm(relation, op, x, y, x_at, y_at))
    return tuple(out)


def edge_softmax_hetero(gidx: Any, eids: Any = ALL, norm_by: str = "dst", *logits: Any) -> tuple[Tensor, ...]:
    """Computes the softmax over edges of all types that have the same destination (or source)."""
    if not dgl.base.is_all(eids):
        gidx = gidx.edge_subgraph([eids], True).graph
    scores = _cast(*logits)
    given = [score for score in scores if score is not None]
    if len(given) != len(scores):
        raise DGLError("logits: expected a tensor for every edge type, got None for some of them")
    shape = given[0].shape[1:]
    with _plain(*given):
        for (_, _, relation), score in zip(relations(gidx), given, strict=True):
            adj = structure(relation, score)
            _check_rows("logits", score, adj.num_values)
            if score.shape[1:] != shape:
                raise DGLError(
                    f"Expected logits of one shape, got {tuple(shape)} and {tuple(score.shape[1:])}"
                )
        whole = joint(gidx, given[0].device)
        weight = _softmax(whole if norm_by == "dst" else whole.t(), torch.cat(given))
        return weight.split([len(score) for score in given])


def segment_reduce(op: Literal["sum", "max", "min"], x: Tensor, offsets: Tensor) -> Tensor:
    """Reduces consecutive rows of every segment: their sum, maximum or minimum."""
    (x,) = _cast(x)  # type: ignore[assignment]
    if offsets.dtype not in (torch.int32, torch.int64):
        raise DGLError(f"seglen: expected int32 or int64 lengths of segments, got {offsets.dtype}")
    with _plain(x):
        try:
            return core_segment_reduce(x, offsets.to(x.device), op)
        except ValueError as error:
            lengths = offsets.diff()
            if len(lengths) and int(lengths.min()) >= 0 and int(offsets[-1]) == len(x):
                raise
            raise DGLError(
                f"seglen: expected lengths of segments, none negative, that add up to the {len(x)} rows of "
                f"value, got {lengths.tolist() if len(lengths) < 10 else len(lengths)} adding up to "
                f"{int(offsets[-1])}"
            ) from error


def scatter_add(x: Tensor, idx: Tensor, m: int) -> Tensor:
    """Sums the rows that have the same index."""
    (x,) = _cast(x)  # type: ignore[assignment]
    with _plain(x):
        return scatter(x, idx, m)


def segment_mm(A: Tensor, B: Tensor, seglen_A: Tensor) -> Tensor:
    """Multiplies every segment of rows with its own matrix."""
    if B.dim() != 3:
        raise DGLError(f"segment_mm expects B to be a 3D tensor, got {tuple(B.shape)}.")
    a, b = _cast(A, B)
    assert a is not None
    assert b is not None
    lengths = seglen_A.tolist()
    if len(lengths) != b.size(0) or sum(lengths) != a.size(0) or min(lengths, default=0) < 0:
        raise DGLError(
            f"segment_mm expects {b.size(0)} segment lengths, one per matrix of B, that add up to the "
            f"{a.size(0)} rows of A, got {len(lengths)} that add up to {sum(lengths)}"
        )
    with _plain(a):
        return products.segment_matmul(a, b, lengths)


def gather_mm(A: Tensor, B: Tensor, idx_A: Tensor | None = None, idx_B: Tensor | None = None) -> Tensor:
    """Multiplies every row with the matrix that its index selects."""
    if B.dim() != 3:
        raise DGLError(f"Expected dimension of B is 3. Got {B.dim()}")
    a, b = _cast(A, B)
    assert a is not None
    assert b is not None
    if idx_A is not None:
        a = a.index_select(0, idx_A)
    if idx_B is not None and len(idx_B) != len(a):
        raise DGLError(f"gather_mm expects an index of B for each of the {len(a)} rows, got {len(idx_B)}")
    if idx_B is None:
        with _plain(a):
            return torch.bmm(a.unsqueeze(1), b).squeeze(1)
    order = torch.argsort(idx_B, stable=True)
    lengths = torch.bincount(idx_B, minlength=b.size(0)).tolist()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    with _plain(a):
        product = products.segment_matmul(products.permuted(a, order, inverse), b, lengths)
        return products.permuted(product, inverse, order)
