"""Attention over the neighbours of every row: dot-product, additive (GAT) and GATv2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastsparse_core import choose
from fastsparse_core.adjacency import Adjacency
from fastsparse_core.ops import _additive_attention_csr, _attention_bsb, _gatv2_attention_csr
from fastsparse_core.ops import _attention_fused as fused
from fastsparse_core.ops import _attention_unfused as unfused
from fastsparse_core.ops._common import DTYPE_CODE, accumulation_dtype, autocast, check_features
from fastsparse_core.ops.edge_softmax import edge_softmax


def attention(
    adj: Adjacency,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    algorithm: str = "auto",
) -> Tensor:
    r"""Dot-product attention of every row over its neighbours.

    .. math::
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)}
        \operatorname{softmax}_j(s \langle \mathbf{q}_i, \mathbf{k}_j \rangle + b_{ij}) \, \mathbf{v}_j
        \quad \text{for every head}

    Args:
        adj: structure (num_dst, num_src).
        q: queries (num_dst, H, D), float64, float32, float16 or bfloat16.
        k: keys (num_src, H, D), in the dtype of ``q``.
        v: values (num_src, H, Dv), in the dtype of ``q``. Tensors of two dimensions are one head.
        scale: :math:`s`; None: :math:`1 / \sqrt{D}`.
        bias: :math:`b`, (num_values,) for all heads or (num_values, H), in the caller's edge order; of the
            dtype of ``q`` or float32.
        dropout_p: probability with which a weight is dropped; the others are scaled by 1 / (1 - dropout_p).
            The mask follows ``torch.manual_seed``.
        algorithm: ``"fused3s"``: one pass without anything of the size of the edges in memory (Fused3S,
            section 3; its backward pass recomputes the scores, as FlashAttention-2 does); ``"unfused"``:
            sddmm, edge_softmax, dropout, spmm; or ``"auto"``: fused3s where it can serve the call.

    Returns:
        (num_dst, H, Dv), or (num_dst, Dv) for two dimensions; 0 in rows without edges. Accumulated in float32
        or wider, deterministic. Differentiable in ``q``, ``k``, ``v`` and ``bias``; twice if unfused.

    Raises:
        TypeError: dtypes are not supported or differ.
        ValueError: a size, device or option does not fit.
    """
    algorithm = choose.requested("attention", algorithm)
    q, k, v, scale, bias, flat = _check_dot_product(adj, q, k, v, scale, bias)
    seed = _draw_seed(dropout_p)
    heads, features = q.size(1), (q.flatten(1), k.flatten(1), v.flatten(1))
    obstacle = ""
    if v.device.type == "cuda":
        obstacle = _attention_bsb.obstacle(adj, *features, heads)
        if not obstacle and algorithm != "unfused" and not torch.compiler.is_compiling():
            wants_grad = torch.is_grad_enabled() and any(
                x.requires_grad for x in (q, k, v, bias) if x is not None
            )
            if not _attention_bsb.has_blocks(adj, backward=wants_grad):
                obstacle = "not enough memory for the binary sparse blocks"
    if choose.attention_algorithm(algorithm, obstacle) == "fused3s":
        arguments = (_per_head(bias, heads), scale, dropout_p, seed, heads, adj.handle)
        out = fused.call("attention", v, *features, *arguments)
        return out if flat else out.reshape(adj.num_dst, *v.shape[1:])
    score = unfused.dot_product_scores(adj, q, k, scale, bias)
    out = unfused.aggregate(adj, score, v, dropout_p, seed)
    return out.squeeze(1) if flat else out


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
    r"""Attention of GAT (Veličković et al., 2018): scores that are sums over the two ends of an edge.

    .. math::
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)}
        \operatorname{softmax}_j(\operatorname{leaky\_relu}(a_i + c_j + b_{ij})) \, \mathbf{v}_j
        \quad \text{for every head}

    Args:
        adj: structure (num_dst, num_src).
        score_dst: :math:`a`, (num_dst, H), in the dtype of ``v`` or float32.
        score_src: :math:`c`, (num_src, H), like ``score_dst``.
        v: values (num_src, H, Dv), float64, float32, float16 or bfloat16; (num_src, Dv) is one head, with
            scores (n,) or (n, 1).
        negative_slope: of the leaky ReLU.
        bias: :math:`b`, what the edge itself contributes, (num_values,) for all heads or (num_values, H), in
            the caller's edge order; of the dtype of ``v`` or float32.
        dropout_p: probability with which a weight is dropped; the others are scaled by 1 / (1 - dropout_p).
            The mask follows ``torch.manual_seed``.
        algorithm: as for :func:`attention`.

    Returns:
        (num_dst, H, Dv), or (num_dst, Dv) for two dimensions; 0 in rows without edges. Accumulated in float32
        or wider, deterministic. Differentiable in all tensors; twice if unfused.

    Raises:
        TypeError: dtypes are not supported or differ.
        ValueError: a size, device or option does not fit.
    """
    algorithm = choose.requested("attention", algorithm)
    check_features("v", v, adj.num_src, "num_src", adj)
    if v.dim() not in (2, 3):
        raise ValueError(f"v: expected (num_src, heads, D) or (num_src, D), got shape {tuple(v.shape)}")
    flat = v.dim() == 2
    (v,) = autocast(v)  # type: ignore[assignment]
    v = v[:, None] if flat else v
    score_dst, score_src, bias = _check_additive(
        adj, score_dst, score_src, v.size(1), v.dtype, negative_slope, bias
    )
    seed = _draw_seed(dropout_p)
    features = v.flatten(1)
    obstacle = _additive_attention_csr.obstacle(features, v.size(1)) if v.device.type == "cuda" else ""
    if choose.attention_algorithm(algorithm, obstacle) == "fused3s":
        arguments = (_per_head(bias, v.size(1)), negative_slope, dropout_p, seed, adj.handle)
        out = fused.call("additive_attention", v, score_dst, score_src, features, *arguments)
        return out if flat else out.reshape(adj.num_dst, *v.shape[1:])
    score = unfused.additive_scores(adj, score_dst, score_src, negative_slope, bias)
    out = unfused.aggregate(adj, score, v, dropout_p, seed)
    return out.squeeze(1) if flat else out


def gatv2_attention(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    negative_slope: float = 0.2,
    dropout_p: float = 0.0,
    *,
    algorithm: str = "auto",
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
        att: :math:`\mathbf{a}`, (H, D), in the dtype of ``x_dst`` or float32. Features of two dimensions are
            one head, with (D,) or (1, D).
        negative_slope: of the leaky ReLU.
        dropout_p: probability with which a weight is dropped; the others are scaled by 1 / (1 - dropout_p).
            The mask follows ``torch.manual_seed``.
        algorithm: as for :func:`attention`.

    Returns:
        (num_dst, H, D), or (num_dst, D) for two dimensions; 0 in rows without edges. Accumulated in float32
        or wider, deterministic. Differentiable in all tensors; twice if unfused.

    Raises:
        TypeError: dtypes are not supported or differ.
        ValueError: a size, device or option does not fit.
    """
    algorithm = choose.requested("attention", algorithm)
    x_dst, x_src, att, flat = _check_gatv2(adj, x_dst, x_src, att, negative_slope)
    seed = _draw_seed(dropout_p)
    features = x_src.flatten(1)
    obstacle = ""
    if x_src.device.type == "cuda":
        obstacle = _gatv2_attention_csr.obstacle(features, negative_slope, x_src.size(1))
    if choose.attention_algorithm(algorithm, obstacle) == "fused3s":
        arguments = (att, negative_slope, dropout_p, seed, adj.handle)
        out = fused.call("gatv2_attention", x_src, x_dst.flatten(1), features, *arguments)
        return out if flat else out.reshape(adj.num_dst, *x_src.shape[1:])
    score = unfused.gatv2_scores(adj, x_dst, x_src, att, negative_slope)
    out = unfused.aggregate(adj, score, x_src, dropout_p, seed)
    return out.squeeze(1) if flat else out


# ---------------------------------------------------------------- the weights themselves


def attention_weights(
    adj: Adjacency, q: Tensor, k: Tensor, scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """The weights of :func:`attention` before dropout, for inspection: (num_values, H) in the caller's order.

    Arguments and errors are those of :func:`attention`. Float32, or float64 for float64; differentiable.
    """
    q, k, _, scale, bias, _ = _check_dot_product(adj, q, k, k, scale, bias)
    return edge_softmax(adj, unfused.dot_product_scores(adj, q, k, scale, bias))


def additive_attention_weights(
    adj: Adjacency,
    score_dst: Tensor,
    score_src: Tensor,
    negative_slope: float = 0.2,
    bias: Tensor | None = None,
) -> Tensor:
    """The weights of :func:`additive_attention` before dropout: (num_values, H) in the caller's order.

    Arguments and errors are those of :func:`additive_attention`. Float32, or float64 for float64;
    differentiable.
    """
    check_features("score_src", score_src, adj.num_src, "num_src", adj)
    heads = 1 if score_src.dim() == 1 else score_src.size(1)
    score_dst, score_src, bias = _check_additive(
        adj, score_dst, score_src, heads, score_src.dtype, negative_slope, bias
    )
    return edge_softmax(adj, unfused.additive_scores(adj, score_dst, score_src, negative_slope, bias))


def gatv2_attention_weights(
    adj: Adjacency, x_dst: Tensor, x_src: Tensor, att: Tensor, negative_slope: float = 0.2
) -> Tensor:
    """The weights of :func:`gatv2_attention` before dropout: (num_values, H) in the caller's order.

    Arguments and errors are those of :func:`gatv2_attention`. Float32, or float64 for float64;
    differentiable.
    """
    x_dst, x_src, att, _ = _check_gatv2(adj, x_dst, x_src, att, negative_slope)
    return edge_softmax(adj, unfused.gatv2_scores(adj, x_dst, x_src, att, negative_slope))


# ---------------------------------------------------------------- checks


def _check_dot_product(
    adj: Adjacency, q: Tensor, k: Tensor, v: Tensor, scale: float | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, float, Tensor | None, bool]:
    """Queries, keys and values with heads, the scale, the bias, and whether the heads were added."""
    check_features("q", q, adj.num_dst, "num_dst", adj)
    check_features("k", k, adj.num_src, "num_src", adj)
    check_features("v", v, adj.num_src, "num_src", adj)
    if q.dim() not in (2, 3) or k.dim() != q.dim() or v.dim() != q.dim():
        raise ValueError(
            "q, k and v: expected (n, heads, D) each, or (n, D) each, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    q, k, v = autocast(q, k, v)  # type: ignore[assignment]
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise TypeError(f"q, k and v: expected one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    flat = q.dim() == 2
    if flat:
        q, k, v = q[:, None], k[:, None], v[:, None]
    if q.size(1) != k.size(1) or q.size(1) != v.size(1):
        raise ValueError(
            f"q, k and v: expected as many heads each, got {q.size(1)}, {k.size(1)} and {v.size(1)}"
        )
    if q.size(2) != k.size(2):
        raise ValueError(f"q and k: expected features of one width, got {q.size(2)} and {k.size(2)}")
    if scale is None:
        scale = q.size(2) ** -0.5 if q.size(2) else 1.0
    return q, k, v, _check_number("scale", scale), _check_bias(adj, bias, q.size(1), q.dtype), flat


def _check_additive(
    adj: Adjacency,
    score_dst: Tensor,
    score_src: Tensor,
    heads: int,
    dtype: torch.dtype,
    negative_slope: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores as (n, heads) in the accumulation dtype, and the bias."""
    scores = []
    for name, score, rows, rows_name in (
        ("score_dst", score_dst, adj.num_dst, "num_dst"),
        ("score_src", score_src, adj.num_src, "num_src"),
    ):
        check_features(name, score, rows, rows_name, adj)
        if score.dim() == 1:
            score = score[:, None]
        if score.dim() != 2 or score.size(1) != heads:
            raise ValueError(
                f"{name}: expected shape ({rows}, {heads}), one score per head, got {tuple(score.shape)}"
            )
        # They are small, so they are kept in full precision even where the values are not.
        scores.append(score.to(accumulation_dtype(dtype)))
    _check_number("negative_slope", negative_slope)
    return scores[0], scores[1], _check_bias(adj, bias, heads, dtype)


def _check_gatv2(
    adj: Adjacency, x_dst: Tensor, x_src: Tensor, att: Tensor, negative_slope: float
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Features with heads, the attention vectors in the accumulation dtype, whether the heads were added."""
    check_features("x_dst", x_dst, adj.num_dst, "num_dst", adj)
    check_features("x_src", x_src, adj.num_src, "num_src", adj)
    if x_dst.dim() not in (2, 3) or x_dst.shape[1:] != x_src.shape[1:]:
        raise ValueError(
            "x_dst and x_src: expected (n, heads, D) or (n, D) with equal heads and D, "
            f"got {tuple(x_dst.shape)} and {tuple(x_src.shape)}"
        )
    x_dst, x_src = autocast(x_dst, x_src)  # type: ignore[assignment]
    if x_dst.dtype != x_src.dtype:
        raise TypeError(f"x_dst and x_src: expected one dtype, got {x_dst.dtype} and {x_src.dtype}")
    flat = x_dst.dim() == 2
    if flat:
        x_dst, x_src = x_dst[:, None], x_src[:, None]
    if not isinstance(att, Tensor) or not att.is_floating_point():
        kind = att.dtype if isinstance(att, Tensor) else type(att).__name__
        raise TypeError(f"att: expected a floating tensor, got {kind}")
    if flat and att.dim() == 1:
        att = att[None]
    if att.shape != x_dst.shape[1:]:
        raise ValueError(f"att: expected shape {tuple(x_dst.shape[1:])}, (heads, D), got {tuple(att.shape)}")
    if att.device != x_dst.device:
        raise ValueError(f"att: expected device {x_dst.device} like the features, got {att.device}")
    _check_number("negative_slope", negative_slope)
    return x_dst, x_src, att.to(accumulation_dtype(x_dst.dtype)), flat


def _check_bias(adj: Adjacency, bias: Tensor | None, heads: int, dtype: torch.dtype) -> Tensor | None:
    """The bias as (num_values, 1 or heads), in the features' dtype or their accumulation dtype."""
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or bias.dtype not in DTYPE_CODE:
        kind = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(f"bias: expected a floating tensor, got {kind}")
    if bias.shape not in ((adj.num_values,), (adj.num_values, 1), (adj.num_values, heads)):
        raise ValueError(
            f"bias: expected shape ({adj.num_values},) or ({adj.num_values}, {heads}), "
            f"got {tuple(bias.shape)}"
        )
    if bias.device != adj.device:
        raise ValueError(f"bias: expected device {adj.device} like the features, got {bias.device}")
    if bias.dtype not in (dtype, accumulation_dtype(dtype)):
        bias = bias.to(accumulation_dtype(dtype))
    return bias[:, None] if bias.dim() == 1 else bias


def _per_head(bias: Tensor | None, heads: int) -> Tensor | None:
    return None if bias is None else bias.expand(bias.size(0), heads)


def _check_number(name: str, number: float) -> float:
    if isinstance(number, Tensor) or not isinstance(number, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(number).__name__}")
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {number}")
    return float(number)


def _draw_seed(dropout_p: float) -> Tensor | None:
    """A seed from PyTorch's generator; a tensor, so that a compiled model draws a new one each call."""
    if isinstance(dropout_p, Tensor) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p: expected a number, got {type(dropout_p).__name__}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: expected a probability from 0 to below 1, got {dropout_p}")
    return torch.randint(2**63 - 1, ()) if dropout_p > 0 else None
