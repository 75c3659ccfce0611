"""Sums of messages that depend on edge features: GINE and gated layers."""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.log import warn_once
from fastsparse_core.ops import _edge_messages_fused as formulas
from fastsparse_core.ops._checks import check_edge_map, check_features, check_structure, is_partitioned
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import PLAIN, is_plain_eager
from fastsparse_core.ops._edge_messages_launch import MOST_FEATURES
from fastsparse_core.ops._operands import written_out
from fastsparse_core.structure.adjacency import Adjacency


def gine_aggregate(
    adj: Adjacency,
    x: Tensor,
    edge_attr: Tensor,
    *,
    edge_weight: Tensor | None = None,
    edge_bias: Tensor | None = None,
    eps: Tensor | None = None,
) -> Tensor:
    r"""Sums the messages of GINE (Hu et al., `Strategies for Pre-training Graph Neural Networks`, 2020).

    .. math::
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)} \operatorname{relu}(\mathbf{x}_j + \mathbf{e}_{ij})
        \quad \text{with} \quad \mathbf{e}_{ij} = \mathbf{W} \mathbf{a}_{ij} + \mathbf{b}
        \text{ if } \mathbf{W} \text{ is given}

    With up to 32 raw features :math:`\mathbf{a}` per edge, neither pass creates a tensor (num_edges, F): only
    one bit per number is stored for the backward pass. With more raw features, :math:`\mathbf{e}` is computed
    and stored first.

    Args:
        adj: structure (num_dst, num_src).
        x: (num_src, F), float64, float32, float16 or bfloat16.
        edge_attr: :math:`\mathbf{e}`, (num_values, F), or :math:`\mathbf{a}`, (num_values, A), in the
            caller's edge order and the dtype of ``x``.
        edge_weight: :math:`\mathbf{W}`, (F, A), in the dtype of ``x``; None: ``edge_attr`` has the width of
            ``x``.
        edge_bias: :math:`\mathbf{b}`, (F,), in the dtype of ``x``, with ``edge_weight``; None: 0.
        eps: :math:`\epsilon`, one number in the dtype of ``x`` that requires no gradient: adds :math:`(1 +
            \epsilon) \mathbf{x}_i`, for square structures. None: adds nothing.

    Returns:
        (num_dst, F); without ``eps``, 0 in rows without edges. The result is accumulated in float32 or wider,
        is deterministic, and is differentiable twice in all tensors except ``eps``.

    Raises:
        TypeError: dtypes are not supported or differ.
        ValueError: a size or device does not fit, or ``eps`` requires a gradient.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, gine_aggregate
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), (2, 2))
        >>> gine_aggregate(adj, torch.tensor([[1.0], [2.0]]), torch.tensor([[-3.0], [1.0]]))
        tensor([[3.],
                [0.]])
    """
    check_structure(adj)
    if is_partitioned(adj):
        (x,) = adj.sources(x)
        adj = adj.rows
    x = _node(adj, "x", x, adj.num_src, "num_src")
    edge_attr = _edge(adj, "edge_attr", edge_attr, x, x.size(1) if edge_weight is None else None)
    edge_weight = _map("edge_weight", edge_weight, edge_attr, x)
    if edge_bias is not None:
        if edge_weight is None:
            raise ValueError("edge_bias: expected None without edge_weight; add it to edge_attr")
        _check_tensor("edge_bias", edge_bias, x)
        if edge_bias.shape != (x.size(1),):
            raise ValueError(f"edge_bias: expected shape ({x.size(1)},), got {tuple(edge_bias.shape)}")
    if eps is not None:
        _check_tensor("eps", eps, x)
        if eps.numel() != 1 or eps.dtype != x.dtype or adj.num_dst != adj.num_src:
            raise ValueError(
                f"eps: expected one number of dtype {x.dtype} and a square structure, got shape "
                f"{tuple(eps.shape)}, dtype {eps.dtype} and a structure of shape {adj.shape}"
            )
        if eps.requires_grad:
            raise ValueError(
                "eps: expected a constant, got a tensor that requires a gradient; pass eps=None, and add "
                "(1 + eps) * x to the result"
            )
    if edge_weight is not None and edge_attr.size(1) > MOST_FEATURES:
        bias = None if edge_bias is None else edge_bias.to(x.dtype)
        edge_attr, edge_weight, edge_bias = F.linear(edge_attr, edge_weight.to(x.dtype), bias), None, None
    tensors = (x, edge_attr, edge_weight, edge_bias, eps)
    if _has_no_kernel(adj):
        return formulas.unfused_gine(adj, *tensors)
    return formulas.gine_op(*tensors, adj.num_dst, adj, False)[0]


def gated_aggregate(
    adj: Adjacency,
    k: Tensor,
    q: Tensor,
    v: Tensor,
    *,
    edge_attr: Tensor | None = None,
    gate_weight: Tensor | None = None,
    value_weight: Tensor | None = None,
) -> Tensor:
    r"""Sums the gated messages of Bresson and Laurent, `Residual Gated Graph ConvNets` (2017).

    .. math::
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)} \sigma(\mathbf{k}_i + \mathbf{q}_j + \mathbf{G}
        \mathbf{a}_{ij}) \odot (\mathbf{v}_j + \mathbf{U} \mathbf{a}_{ij})

    With up to 32 features per edge, no tensor (num_edges, F) is stored. With more, the unfused operators run,
    which store a row per edge and warn once.

    Args:
        adj: structure (num_dst, num_src).
        k: (num_dst, F), float64, float32, float16 or bfloat16.
        q: (num_src, F), in the dtype of ``k``.
        v: (num_src, F), in the dtype of ``k``.
        edge_attr: :math:`\mathbf{a}`, (num_values, A), in the caller's edge order and the dtype of ``k``;
            None: no edge terms.
        gate_weight: :math:`\mathbf{G}`, (F, A), in the dtype of ``k``, with ``edge_attr``.
        value_weight: :math:`\mathbf{U}`, (F, A), in the dtype of ``k``, with ``edge_attr``.

    Returns:
        (num_dst, F); 0 in rows without edges. The result is accumulated in float32 or wider, is
        deterministic, and is differentiable twice in all tensors.

    Raises:
        TypeError: dtypes are not supported or differ.
        ValueError: a size or device does not fit.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, gated_aggregate
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), (2, 2))
        >>> zero = torch.zeros(2, 1)  # gates of 1/2
        >>> gated_aggregate(adj, zero, zero, v=torch.tensor([[1.0], [2.0]]))
        tensor([[1.5000],
                [0.0000]])
    """
    is_whole = (edge_attr is None) == (gate_weight is None) == (value_weight is None)
    if is_whole and _are_plain(adj, k, q, v, edge_attr, gate_weight, value_weight):
        return formulas.gated_op(k, q, v, edge_attr, gate_weight, value_weight, adj, False)[0]
    check_structure(adj)
    if is_partitioned(adj):
        q, v = adj.sources(q, v)
        adj = adj.rows
    k, q, v = _check_gates(adj, k, q, v)
    given = [edge_attr is not None, gate_weight is not None, value_weight is not None]
    if any(given) != all(given):
        names = ("edge_attr", "gate_weight", "value_weight")
        got = " and ".join(compress(names, given))
        raise ValueError(f"edge_attr, gate_weight and value_weight: expected all of them or none, got {got}")
    features = 0
    if edge_attr is not None:
        edge_attr = _edge(adj, "edge_attr", edge_attr, q, None)
        gate_weight = _map("gate_weight", gate_weight, edge_attr, q)
        value_weight = _map("value_weight", value_weight, edge_attr, q)
        features = edge_attr.size(1)
    tensors = (k, q, v, edge_attr, gate_weight, value_weight)
    if _has_no_kernel(adj, features):
        return formulas.unfused_gated(adj, *tensors)
    return formulas.gated_op(*tensors, adj, False)[0]


def gated_edges(
    adj: Adjacency, k: Tensor, q: Tensor, v: Tensor, edge: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Computes sums and edge state of GatedGCN (Dwivedi et al., `Benchmarking Graph Neural Networks`, 2020).

    .. math::
        \mathbf{z}_{ij} = \mathbf{k}_i + \mathbf{q}_j + \mathbf{e}_{ij}, \qquad
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)} \sigma(\mathbf{z}_{ij}) \odot \mathbf{v}_j, \qquad
        \mathbf{n}_i = \sum_{j \in \mathcal{N}(i)} \sigma(\mathbf{z}_{ij})

    The edge state :math:`\mathbf{z}` is a result and is stored. Gates and messages are not stored.

    Args:
        adj: structure (num_dst, num_src).
        k: (num_dst, F), float64, float32, float16 or bfloat16.
        q: (num_src, F), in the dtype of ``k``.
        v: (num_src, F), in the dtype of ``k``.
        edge: :math:`\mathbf{e}`, (num_values, F), in the caller's edge order and the dtype of ``k``.

    Returns:
        :math:`\mathbf{y}` and :math:`\mathbf{n}`, (num_dst, F), and :math:`\mathbf{z}`, (num_values, F), 0
        for edges (i, i) that were replaced when ``adj`` was built with self loops. The results are
        accumulated in float32 or wider, are deterministic, and are differentiable twice in all tensors.

    Raises:
        TypeError: dtypes are not supported or differ.
        ValueError: a size or device does not fit.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, gated_edges
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), (2, 2))
        >>> x = torch.randn(2, 8)
        >>> sums, norms, state = gated_edges(adj, x, x, x, edge=torch.randn(2, 8))
        >>> state.shape
        torch.Size([2, 8])
    """
    if not _are_plain(adj, k, q, v, edge):
        check_structure(adj)
        if is_partitioned(adj):
            q, v = adj.sources(q, v)
            adj = adj.rows
        k, q, v = _check_gates(adj, k, q, v)
        edge = _edge(adj, "edge", edge, q, q.size(1))
        if _has_no_kernel(adj):
            return formulas.unfused_gated_edges(adj, k, q, v, edge)
    total, gates, state = formulas.gated_edges_op(k, q, v, edge, adj)
    return total, gates, state


# ---------------------------------------------------------------- checks


def _are_plain(
    adj: Adjacency,
    k: Tensor,
    q: Tensor,
    v: Tensor,
    edge: Tensor | None,
    gate_weight: Tensor | None = None,
    value_weight: Tensor | None = None,
) -> bool:
    """True if the kernels can use the tensors of a call as they are, so that no other check is needed.

    Args:
        adj: structure.
        k: rows of the destinations.
        q: rows of the sources.
        v: values of the sources.
        edge: rows of the edges; with weights, raw features.
        gate_weight: map of raw features.
        value_weight: map of raw features to the values.
    """
    if not (is_plain_eager(q) and type(adj) is Adjacency and q.dim() == 2):
        return False
    width, dtype, device = q.shape[1], q.dtype, q.device
    expected: Any = ((k, adj.num_dst, width), (q, adj.num_src, width), (v, adj.num_src, width))
    if edge is not None:
        if type(edge) not in PLAIN or edge.dim() != 2:
            return False
        features = edge.shape[1] if gate_weight is not None else width
        expected += ((edge, adj.num_values, features),)
        if gate_weight is not None:
            if features > MOST_FEATURES:
                return False
            expected += ((gate_weight, width, features), (value_weight, width, features))
    for each, num_rows, columns in expected:
        if (
            type(each) not in PLAIN
            or each.shape != (num_rows, columns)
            or each.dtype is not dtype
            or each.device != device
            or each.layout is not torch.strided
            or each.is_neg()
        ):
            return False
    return dtype in DTYPE_CODE and device == adj.col.device and adj.num_values < 2**32


def _has_no_kernel(adj: Adjacency, features: int = 0) -> bool:
    """Returns whether the unfused operators have to run; if so, warns once."""
    why = cure = ""
    if features > MOST_FEATURES:
        why = f"edges have {features} features, and the fused kernel takes up to {MOST_FEATURES}"
        cure = ". Project them to fewer first"
    elif adj.device.type == "cuda" and adj.num_values >= 2**32:
        why = f"the graph has {adj.num_values} edges, and the fused kernel takes fewer than 2^32"
    if why:
        warn_once(f"messages are stored for every edge, which takes time and memory: {why}{cure}")
    return bool(why)


def _node(adj: Adjacency, name: str, x: Tensor, count: int, count_name: str) -> Tensor:
    check_features(name, x, count, count_name, adj)
    if x.dim() != 2:
        raise ValueError(f"{name}: expected ({count_name}, F), got shape {tuple(x.shape)}")
    return written_out(x)


def _check_gates(adj: Adjacency, k: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k = _node(adj, "k", k, adj.num_dst, "num_dst")
    q = _node(adj, "q", q, adj.num_src, "num_src")
    v = _node(adj, "v", v, adj.num_src, "num_src")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q, {q.dtype}, got {x.dtype}")
        if x.size(1) != q.size(1):
            raise ValueError(f"{name}: expected the width of q, {q.size(1)}, got {x.size(1)}")
    return k, q, v


def _check_tensor(name: str, x: Any, like: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype not in DTYPE_CODE:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: expected a floating tensor, got {kind}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device} like the features, got {x.device}")


def _edge(adj: Adjacency, name: str, edge: Tensor, like: Tensor, width: int | None) -> Tensor:
    """Checks edge features of shape (num_values, width); ``width=None`` allows any width."""
    _check_tensor(name, edge, like)
    fits = edge.dim() == 2 and edge.size(0) == adj.num_values and width in (None, edge.size(1))
    if not fits:
        expected = f"({adj.num_values}, {'A' if width is None else width})"
        raise ValueError(f"{name}: expected shape {expected}, one row per edge, got {tuple(edge.shape)}")
    if edge.dtype != like.dtype:
        raise TypeError(f"{name}: expected the dtype of the features, {like.dtype}, got {edge.dtype}")
    return written_out(edge)


def _map(name: str, weight: Tensor | None, edge: Tensor, like: Tensor) -> Tensor | None:
    """Checks the weight of a linear map of edge features, (F, A), in any floating dtype."""
    if weight is None:
        return None
    _check_tensor(name, weight, like)
    check_edge_map(name, weight, like.size(1), edge)
    return written_out(weight)
