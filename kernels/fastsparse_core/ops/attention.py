"""Attention over the neighbours of every row: dot-product, additive (GAT) and GATv2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.ops import _attention as fused
from fastsparse_core.ops import _attention_unfused as unfused
from fastsparse_core.ops._attention_checks import (
    check_additive,
    check_dot_product,
    check_edges,
    check_gatv2,
    check_width,
    draw_seed,
)
from fastsparse_core.ops._attention_launch import ADDITIVE, DOT_PRODUCT, GATV2, Call, default_scale
from fastsparse_core.ops._autocast import autocast
from fastsparse_core.ops._checks import check_features, is_partitioned
from fastsparse_core.ops._eager import PLAIN
from fastsparse_core.ops._operands import num_heads
from fastsparse_core.ops.edge_softmax import edge_softmax
from fastsparse_core.structure.adjacency import Adjacency

_is_compiling = torch.compiler.is_compiling


def attention(
    adj: Adjacency,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    heads: int | None = None,
    algorithm: str = "auto",
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Tensor:
    r"""Dot-product attention of every row over its neighbours.

    .. math::
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)}
        \operatorname{softmax}_j(s \langle \mathbf{q}_i, \mathbf{k}_j \rangle + b_{ij}) \, \mathbf{v}_j
        \quad \text{for every head}

    With edge features :math:`\mathbf{a}_{ij}`, :math:`\mathbf{W} \mathbf{a}_{ij}` is added to
    :math:`\mathbf{k}_j` and :math:`\mathbf{v}_j` without being stored (on CUDA, for up to 512 features per
    edge).

    Args:
        adj: structure (num_dst, num_src).
        q: queries (num_dst, H, D), float64, float32, float16 or bfloat16.
        k: keys (num_src, H, D), in the dtype of ``q``.
        v: values (num_src, H, Dv), in the dtype of ``q``. ``q``, ``k`` and ``v`` may also be matrices (n, H *
            D) with the heads side by side.
        scale: :math:`s`; None: :math:`1 / \sqrt{D}`.
        bias: :math:`b`, (num_values,) for all heads or (num_values, H), in the caller's edge order; in the
            dtype of ``q`` or float32.
        dropout_p: probability with which a weight is dropped; the others are scaled by 1 / (1 - dropout_p).
            The mask follows ``torch.manual_seed``.
        heads: :math:`H` if ``q``, ``k`` and ``v`` are matrices; None: 1.
        algorithm: ``"fused3s"``: one pass over binary sparse blocks, to which the structure is converted. It
            stores nothing per edge, and its backward pass recomputes the scores (Fused3S, section 3;
            FlashAttention-2). ``"csr"``: one pass over the CSR rows; the backward pass stores two numbers per
            edge and head. ``"unfused"``: sddmm, edge_softmax, dropout and spmm, one after the other.
            ``"auto"``: on CUDA, csr until the structure was used often, and fused3s from then on, or from
            the start for more than 4 million edges; unfused if neither supports the call. On the CPU, and
            with edge features, there is only one fused kernel, which every name except ``"unfused"`` runs.
        edge_attr: :math:`\mathbf{a}`, (num_values, A) in the caller's edge order, or (num_values,) if A is 1;
            a floating tensor, cast to the dtype of ``q``.
        edge_weight: :math:`\mathbf{W}`, (H * D, A), in the dtype of ``q``, the weight of a linear layer. It
            is required with ``edge_attr``, and then Dv must be D.

    Returns:
        (num_dst, H, Dv), or (num_dst, H * Dv) if the arguments are matrices; 0 in rows without edges. The
        result is accumulated in float32 or wider, is deterministic, and is differentiable twice in all
        tensors. Gradients are deterministic too, with the first exception of :func:`spmm`.

    Raises:
        TypeError: dtypes are not supported or differ.
        ValueError: a size, device or option does not fit.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, attention
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), (2, 2))
        >>> q = k = v = torch.randn(2, 4, 8)  # 4 heads of width 8
        >>> attention(adj, q, k, v).shape
        torch.Size([2, 4, 8])
    """
    if algorithm == "auto" and not _is_compiling():
        algorithm = policy.eager_requests().get("attention", "auto")
    else:
        algorithm = policy.requested("attention", algorithm)
    of_edges: tuple[Tensor, ...] = ()
    if edge_attr is not None and edge_weight is not None:
        of_edges = (edge_attr, edge_weight)
    if (
        bias is None
        and (of_edges or edge_attr is edge_weight)
        and type(heads) is int
        and fused.is_plain_call(adj, dropout_p, *of_edges, q, k, v)
        and q.shape == (adj.num_dst, k.shape[1])
        and k.shape[0] == v.shape[0] == adj.num_src
        and q.dtype == k.dtype == v.dtype
        and (scale is None or type(scale) is float)
        and (not of_edges or _fit_features(adj, of_edges, v, q))
        # All other checks are the same for every call with this key, and an earlier call passed them.
        and _kind_of(q, v, heads, algorithm, *of_edges[:1]) in adj.plans
    ):
        factor = default_scale(q.shape[1] // heads) if scale is None else scale
        if math.isfinite(factor):
            call = Call(q, k, v, None, edge_attr, edge_weight, None, factor, 0.0, None, DOT_PRODUCT, heads)
            return fused.plain(adj, call if not of_edges else call._replace(algorithm="auto"))
    if is_partitioned(adj):
        k, v = adj.sources(k, v)
        adj = adj.rows
    q, k, v, heads, scale, bias = check_dot_product(adj, q, k, v, heads, scale, bias)
    edges = check_edges(adj, edge_attr, edge_weight, q)
    dropout_p, seed = draw_seed(dropout_p)
    features = (q.flatten(1), k.flatten(1), v.flatten(1))
    if edges is not None and features[0].size(1) != features[2].size(1):
        raise ValueError(
            "v: expected the same width as q and k, because edge features are added to keys and values, "
            f"got shape {tuple(v.shape)}"
        )
    edge, weight = edges or (None, None)
    given = (None, edge, weight, bias, scale, dropout_p, seed, DOT_PRODUCT, heads, algorithm)
    key = _kind_of(features[0], features[2], heads, algorithm, *(() if edge is None else (edge,)))
    out = fused.run(adj, Call(features[0], features[1], features[2], *given), key)
    return out if v.dim() == 2 else out.reshape(adj.num_dst, *v.shape[1:])


def _kind_of(q: Tensor, v: Tensor, heads: int, algorithm: str, *edges: Tensor) -> tuple[object, ...]:
    """Key of calls of :func:`attention` for which the same checks hold and the same kernel runs."""
    return "attention", v.dtype, q.shape[1], v.shape[1], heads, algorithm, *[x.shape[1] for x in edges]


def _fit_features(adj: Adjacency, of_edges: tuple[Tensor, ...], v: Tensor, q: Tensor) -> bool:
    """Returns whether edge features and their map have the dtype and sizes that the kernels read."""
    edge, weight = of_edges
    return (
        edge.dtype == weight.dtype == v.dtype
        and edge.shape[0] == adj.num_values
        and weight.shape == (v.shape[1], edge.shape[1])
        and q.shape[1] == v.shape[1]
    )


def additive_attention(
    adj: Adjacency,
    score_dst: Tensor,
    score_src: Tensor,
    v: Tensor,
    negative_slope: float = 0.2,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    algorithm: str = "auto",
) -> Tensor:
    r"""Attention of GAT (Veličković et al., 2018): an edge's score is the sum of a score of each of its ends.

    .. math::
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)}
        \operatorname{softmax}_j(\operatorname{leaky\_relu}(a_i + c_j + b_{ij})) \, \mathbf{v}_j
        \quad \text{for every head}

    Args:
        adj: structure (num_dst, num_src).
        score_dst: :math:`a`, (num_dst, H), in the dtype of ``v`` or float32.
        score_src: :math:`c`, (num_src, H), like ``score_dst``.
        v: values (num_src, H, Dv), float64, float32, float16 or bfloat16, or (num_src, H * Dv) with the heads
            side by side. If the scores have shape (n,), there is one head.
        negative_slope: negative slope of the leaky ReLU.
        bias: :math:`b`, a number per edge that is added to the score, (num_values,) for all heads or
            (num_values, H), in the caller's edge order; in the dtype of ``v`` or float32.
        dropout_p: probability with which a weight is dropped; the others are scaled by 1 / (1 - dropout_p).
            The mask follows ``torch.manual_seed``.
        algorithm: ``"unfused"``: edge_softmax, dropout and spmm, one after the other. All other names of
            :func:`attention` run the fused kernel for these scores, or unfused if it does not support the
            call.

    Returns:
        (num_dst, H, Dv), or (num_dst, H * Dv) if ``v`` is a matrix; 0 in rows without edges. The result is
        accumulated in float32 or wider, is deterministic, and is differentiable twice in all tensors.

    Raises:
        TypeError: dtypes are not supported or differ.
        ValueError: a size, device or option does not fit.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, additive_attention
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), (2, 2))
        >>> score = torch.zeros(2, 1)  # equal scores: the mean of the neighbours
        >>> additive_attention(adj, score, score, torch.tensor([[[1.0]], [[3.0]]])).flatten()
        tensor([2., 1.])
    """
    algorithm = policy.requested("attention", algorithm)
    if (
        bias is None
        and fused.is_plain_call(adj, dropout_p, score_dst, score_src, v)
        and v.shape[0] == adj.num_src
        and score_src.shape == (adj.num_src, score_dst.shape[1])
        and score_dst.shape[0] == adj.num_dst
        and score_src.dtype == score_dst.dtype
        and type(negative_slope) is float
        and math.isfinite(negative_slope)
        and ("GAT", v.dtype, v.shape[1], score_dst.shape[1], score_dst.dtype, algorithm) in adj.plans
    ):
        none, heads = None, score_dst.shape[1]
        of = (score_dst, score_src, v, none, none, none, none, negative_slope, 0.0, none, ADDITIVE, heads)
        return fused.plain(adj, Call(*of))
    if is_partitioned(adj):
        (v,), (score_src,) = adj.sources(v), adj.sources(score_src, exact=True)
        adj = adj.rows
    check_features("v", v, adj.num_src, "num_src", adj)
    if v.dim() not in (2, 3):
        raise ValueError(f"v: expected (num_src, heads, D) or (num_src, D), got shape {tuple(v.shape)}")
    (v,) = autocast(v)  # type: ignore[assignment]
    heads = v.size(1)
    if v.dim() == 2:
        heads = num_heads(score_src) if isinstance(score_src, Tensor) else 1
    score_dst, score_src, bias = check_additive(
        adj, score_dst, score_src, heads, v.dtype, negative_slope, bias
    )
    check_width("v", v, heads)
    dropout_p, seed = draw_seed(dropout_p)
    features = v.flatten(1)
    given = (None, None, None, bias, negative_slope, dropout_p, seed, ADDITIVE, heads, algorithm)
    key = ("GAT", v.dtype, features.size(1), heads, score_dst.dtype, algorithm)
    out = fused.run(adj, Call(score_dst, score_src, features, *given), key)
    return out if v.dim() == 2 else out.reshape(adj.num_dst, *v.shape[1:])


def gatv2_attention(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    negative_slope: float = 0.2,
    dropout_p: float = 0.0,
    *,
    algorithm: str = "auto",
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Tensor:
    r"""Attention of GATv2 (Brody, Alon and Yahav, 2022).

    .. math::
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)}
        \operatorname{softmax}_j(s_{ij}) \, \mathbf{z}_j \quad \text{with} \quad
        s_{ij} = \langle \mathbf{a}, \operatorname{leaky\_relu}(\mathbf{x}_i + \mathbf{z}_j) \rangle
        \quad \text{for every head}

    Args:
        adj: structure (num_dst, num_src).
        x_dst: :math:`\mathbf{x}`, (num_dst, H, D), float64, float32, float16 or bfloat16.
        x_src: :math:`\mathbf{z}`, (num_src, H, D), in the dtype of ``x_dst``; also the values.
        att: :math:`\mathbf{a}`, (H, D), in the dtype of ``x_dst`` or float32; (D,) for one head. ``x_dst``
            and ``x_src`` may also be matrices (n, H * D) with the heads side by side.
        negative_slope: negative slope of the leaky ReLU.
        dropout_p: probability with which a weight is dropped; the others are scaled by 1 / (1 - dropout_p).
            The mask follows ``torch.manual_seed``.
        algorithm: as for :func:`additive_attention`.
        edge_attr: features :math:`\mathbf{e}_{ij}` of the edges, as for :func:`attention`. The argument of
            the leaky ReLU becomes :math:`\mathbf{x}_i + \mathbf{z}_j + \mathbf{W} \mathbf{e}_{ij}`. On CUDA,
            the fused kernel supports up to 32 features per edge.
        edge_weight: :math:`\mathbf{W}`, (H * D, A), in the dtype of ``x_dst``, with ``edge_attr``.

    Returns:
        (num_dst, H, D), or (num_dst, H * D) if the arguments are matrices; 0 in rows without edges. The
        result is accumulated in float32 or wider, is deterministic, and is differentiable twice in all
        tensors.

    Raises:
        TypeError: dtypes are not supported or differ.
        ValueError: a size, device or option does not fit.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, gatv2_attention
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), (2, 2))
        >>> x = torch.randn(2, 4, 8)  # 4 heads of width 8
        >>> gatv2_attention(adj, x, x, att=torch.randn(4, 8)).shape
        torch.Size([2, 4, 8])
    """
    algorithm = policy.requested("attention", algorithm)
    if (
        edge_attr is None
        and edge_weight is None
        and type(att) in PLAIN
        and att.dim() == 2
        and fused.is_plain_call(adj, dropout_p, x_dst, x_src, att)
        and x_dst.shape[0] == adj.num_dst
        and x_src.shape[0] == adj.num_src
        and x_dst.shape[1] == x_src.shape[1] == att.numel()
        and x_dst.dtype == x_src.dtype
        and type(negative_slope) is float
        and ("GATv2", x_src.dtype, att.shape, att.dtype, negative_slope, algorithm) in adj.plans
    ):
        none, heads = None, att.shape[0]
        of = (x_dst, x_src, none, att, none, none, none, negative_slope, 0.0, none, GATV2, heads)
        return fused.plain(adj, Call(*of))
    if is_partitioned(adj):
        (x_src,) = adj.sources(x_src)
        adj = adj.rows
    x_dst, x_src, att = check_gatv2(adj, x_dst, x_src, att, negative_slope)
    edges = check_edges(adj, edge_attr, edge_weight, x_dst)
    heads = att.size(0)
    dropout_p, seed = draw_seed(dropout_p)
    ends = (x_dst.flatten(1), x_src.flatten(1))
    edge, weight = edges or (None, None)
    given = (None, att, edge, weight, None, negative_slope, dropout_p, seed, GATV2, heads, algorithm)
    key = ("GATv2", x_src.dtype, att.shape, att.dtype, negative_slope, algorithm)
    out = fused.run(adj, Call(ends[0], ends[1], *given), key)
    return out if x_src.dim() == 2 else out.reshape(adj.num_dst, *x_src.shape[1:])


# ---------------------------------------------------------------- the weights themselves


def attention_weights(
    adj: Adjacency,
    q: Tensor,
    k: Tensor,
    scale: float | None = None,
    bias: Tensor | None = None,
    *,
    heads: int | None = None,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Tensor:
    r"""The weights of :func:`attention` before dropout, for every edge.

    .. math::
        \alpha_{ij} = \operatorname{softmax}_j(s \langle \mathbf{q}_i, \mathbf{k}_j \rangle + b_{ij}) \quad
        \text{for every head}

    From Fused3S, section 3. Arguments and errors are those of :func:`attention`.

    Returns:
        (num_values, H) in the caller's edge order; float64 for float64, else float32. Differentiable.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, attention_weights
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), (2, 2))
        >>> q = k = torch.ones(2, 1, 8)
        >>> attention_weights(adj, q, k).flatten()
        tensor([0.5000, 0.5000, 1.0000])
    """
    if is_partitioned(adj):
        (k,) = adj.sources(k)
        adj = adj.rows
    q, k, _, heads, scale, bias = check_dot_product(adj, q, k, k, heads, scale, bias)
    edges = check_edges(adj, edge_attr, edge_weight, q)
    return edge_softmax(adj, unfused.dot_product_scores(adj, q, k, scale, bias, heads, edges))


def additive_attention_weights(
    adj: Adjacency,
    score_dst: Tensor,
    score_src: Tensor,
    negative_slope: float = 0.2,
    bias: Tensor | None = None,
) -> Tensor:
    r"""The weights of :func:`additive_attention` before dropout, for every edge.

    .. math::
        \alpha_{ij} = \operatorname{softmax}_j(\operatorname{leaky\_relu}(a_i + c_j + b_{ij})) \quad \text{for
        every head}

    From Veličković et al. (2018). Arguments and errors are those of :func:`additive_attention`.

    Returns:
        (num_values, H) in the caller's edge order; float64 for float64, else float32. Differentiable.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, additive_attention_weights
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), (2, 2))
        >>> score = torch.zeros(2, 1)
        >>> additive_attention_weights(adj, score, score).flatten()
        tensor([0.5000, 0.5000, 1.0000])
    """
    if is_partitioned(adj):
        (score_src,) = adj.sources(score_src, exact=True)
        adj = adj.rows
    check_features("score_src", score_src, adj.num_src, "num_src", adj)
    heads = num_heads(score_src)
    score_dst, score_src, bias = check_additive(
        adj, score_dst, score_src, heads, score_src.dtype, negative_slope, bias
    )
    return edge_softmax(adj, unfused.additive_scores(adj, score_dst, score_src, negative_slope, bias))


def gatv2_attention_weights(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    negative_slope: float = 0.2,
    *,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Tensor:
    r"""The weights of :func:`gatv2_attention` before dropout, for every edge.

    .. math::
        \alpha_{ij} = \operatorname{softmax}_j(\langle \mathbf{a}, \operatorname{leaky\_relu}(\mathbf{x}_i +
        \mathbf{z}_j) \rangle) \quad \text{for every head}

    From Brody et al. (2022). Arguments and errors are those of :func:`gatv2_attention`.

    Returns:
        (num_values, H) in the caller's edge order; float64 for float64, else float32. Differentiable.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, gatv2_attention_weights
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), (2, 2))
        >>> x = torch.ones(2, 1, 8)
        >>> gatv2_attention_weights(adj, x, x, torch.ones(1, 8)).flatten()
        tensor([0.5000, 0.5000, 1.0000])
    """
    if is_partitioned(adj):
        (x_src,) = adj.sources(x_src)
        adj = adj.rows
    x_dst, x_src, att = check_gatv2(adj, x_dst, x_src, att, negative_slope)
    edges = check_edges(adj, edge_attr, edge_weight, x_dst)
    return edge_softmax(adj, unfused.gatv2_scores(adj, x_dst, x_src, att, negative_slope, edges))
