"""Checks the arguments of attention, and draws the seed of its dropout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastsparse_core import recorded
from fastsparse_core.ops._attention_launch import default_scale
from fastsparse_core.ops._autocast import autocast
from fastsparse_core.ops._checks import check_edge_map, check_features
from fastsparse_core.ops._dtypes import DTYPE_CODE, accumulation_dtype
from fastsparse_core.ops._operands import written_out
from fastsparse_core.structure.adjacency import Adjacency


def check_dot_product(
    adj: Adjacency,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int | None,
    scale: float | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, int, float, Tensor | None]:
    """Checks the arguments; returns queries, keys and values (cast), number of heads, scale and bias."""
    check_features("q", q, adj.num_dst, "num_dst", adj)
    check_features("k", k, adj.num_src, "num_src", adj)
    check_features("v", v, adj.num_src, "num_src", adj)
    if q.dim() not in (2, 3) or k.dim() != q.dim() or v.dim() != q.dim():
        raise ValueError(
            "q, k and v: expected (n, heads, D) each, or (n, heads * D) each, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    q, k, v = autocast(q, k, v)  # type: ignore[assignment]
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise TypeError(f"q, k and v: expected one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    found = 1 if q.dim() == 2 else q.size(1)
    if q.dim() == 3 and (found != k.size(1) or found != v.size(1)):
        raise ValueError(
            f"q, k and v: expected the same number of heads, got {found}, {k.size(1)} and {v.size(1)}"
        )
    if heads is None:
        heads = found
    elif q.dim() == 3 and heads != found:
        raise ValueError(f"heads: expected {found} for (n, {found}, D), or None, got {heads}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_width(name, x, heads)
    if q.size(-1) != k.size(-1):
        raise ValueError(f"q and k: expected features of one width, got {q.size(-1)} and {k.size(-1)}")
    if scale is None:
        width = q.size(-1) if q.dim() == 3 else q.size(-1) // heads
        scale = default_scale(width)
    return q, k, v, heads, _check_number("scale", scale), _check_bias(adj, bias, heads, q.dtype)


def check_width(name: str, x: Tensor, heads: int) -> None:
    """Raises an error if a matrix of features cannot be divided into heads."""
    if x.dim() == 2 and (heads < 1 or x.size(1) % heads):
        raise ValueError(
            f"{name}: expected (n, {heads} * D) for {heads} heads side by side, got {tuple(x.shape)}"
        )


def check_additive(
    adj: Adjacency,
    score_dst: Tensor,
    score_src: Tensor,
    heads: int,
    dtype: torch.dtype,
    negative_slope: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Checks the arguments; returns scores as (n, heads) in the accumulation dtype, and the bias."""
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
        # Scores are small, so they stay in full precision even if the values have 16 bits.
        precise = accumulation_dtype(dtype)
        score = written_out(score)
        scores.append(score if score.dtype == precise else score.to(precise))
    _check_number("negative_slope", negative_slope)
    return scores[0], scores[1], _check_bias(adj, bias, heads, dtype)


def check_gatv2(
    adj: Adjacency, x_dst: Tensor, x_src: Tensor, att: Tensor, negative_slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the arguments; returns features, and attention vectors (heads, D) in the accumulation dtype."""
    check_features("x_dst", x_dst, adj.num_dst, "num_dst", adj)
    check_features("x_src", x_src, adj.num_src, "num_src", adj)
    if x_dst.dim() not in (2, 3) or x_dst.shape[1:] != x_src.shape[1:]:
        raise ValueError(
            "x_dst and x_src: expected (n, heads, D) or (n, heads * D) with equal heads and D, "
            f"got {tuple(x_dst.shape)} and {tuple(x_src.shape)}"
        )
    x_dst, x_src = autocast(x_dst, x_src)  # type: ignore[assignment]
    if x_dst.dtype != x_src.dtype:
        raise TypeError(f"x_dst and x_src: expected one dtype, got {x_dst.dtype} and {x_src.dtype}")
    if not isinstance(att, Tensor) or not att.is_floating_point():
        kind = att.dtype if isinstance(att, Tensor) else type(att).__name__
        raise TypeError(f"att: expected a floating tensor, got {kind}")
    if x_dst.dim() == 3:
        expected, fits = f"= {tuple(x_dst.shape[1:])}", att.shape == x_dst.shape[1:]
    else:
        att = att[None] if att.dim() == 1 else att
        expected = f"with heads * D = {x_dst.size(1)}"
        fits = att.dim() == 2 and att.numel() == x_dst.size(1)
    if not fits:
        raise ValueError(f"att: expected shape (heads, D) {expected}, got {tuple(att.shape)}")
    if att.device != x_dst.device:
        raise ValueError(f"att: expected device {x_dst.device} like the features, got {att.device}")
    _check_number("negative_slope", negative_slope)
    return x_dst, x_src, written_out(att.to(accumulation_dtype(x_dst.dtype)))


def check_edges(
    adj: Adjacency, edge_attr: Tensor | None, edge_weight: Tensor | None, x: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Checks and returns edge features (num_values, A) and their linear map, in the dtype of ``x``."""
    if edge_attr is None and edge_weight is None:
        return None
    if edge_attr is None or edge_weight is None:
        name = "edge_weight" if edge_attr is None else "edge_attr"
        raise ValueError(f"edge_attr and edge_weight: expected both or neither, got only {name}")
    for name, tensor in (("edge_attr", edge_attr), ("edge_weight", edge_weight)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPE_CODE:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: expected a floating tensor, got {kind}")
        if tensor.device != adj.device:
            raise ValueError(f"{name}: expected device {adj.device} like the features, got {tensor.device}")
    edge_attr = edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr
    if edge_attr.dim() != 2 or edge_attr.size(0) != adj.num_values:
        raise ValueError(f"edge_attr: expected shape ({adj.num_values}, A), got {tuple(edge_attr.shape)}")
    width = x[0].numel() if x.size(0) else x.flatten(1).size(1)  # heads * D
    check_edge_map("edge_weight", edge_weight, width, edge_attr)
    return edge_attr.to(x.dtype), edge_weight.to(x.dtype)


def _check_bias(adj: Adjacency, bias: Tensor | None, heads: int, dtype: torch.dtype) -> Tensor | None:
    """The bias as (num_values, 1 or heads), in the features' dtype or their accumulation dtype."""
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or bias.dtype not in DTYPE_CODE:
        kind = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(f"bias: expected a floating tensor, got {kind}")
    # Not `shape in (...)`, which torch.compile evaluates wrongly for symbolic sizes.
    if bias.dim() not in (1, 2) or bias.size(0) != adj.num_values or bias.shape[1:].numel() not in (1, heads):
        raise ValueError(
            f"bias: expected shape ({adj.num_values},) or ({adj.num_values}, {heads}), "
            f"got {tuple(bias.shape)}"
        )
    if bias.device != adj.device:
        raise ValueError(f"bias: expected device {adj.device} like the features, got {bias.device}")
    if bias.dtype not in (dtype, accumulation_dtype(dtype)):
        bias = bias.to(accumulation_dtype(dtype))
    bias = written_out(bias)
    return bias[:, None] if bias.dim() == 1 else bias


def per_head(bias: Tensor | None, heads: int) -> Tensor | None:
    return None if bias is None else bias.expand(bias.size(0), heads)


def _check_number(name: str, number: float) -> float:
    if isinstance(number, Tensor) or not isinstance(number, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(number).__name__}")
    if not -math.inf < number < math.inf:  # `math.isfinite` does not accept symbolic numbers
        raise ValueError(f"{name}: expected a finite number, got {number}")
    return float(number)


def drawn_by_replays(dropout_p: float) -> str:
    """Returns why kernels cannot drop weights, or "": in recorded steps, the host's seed is constant."""
    return "dropout in a recorded step" if dropout_p and recorded.current() is not None else ""


def draw_seed(dropout_p: float) -> tuple[float, Tensor | None]:
    """Checks the probability; returns it and a seed, a tensor, so that compiled calls get new seeds."""
    if isinstance(dropout_p, Tensor) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p: expected a number, got {type(dropout_p).__name__}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: expected a probability from 0 to below 1, got {dropout_p}")
    if dropout_p == 0 or not recorded.drops():
        return 0.0, None
    if recorded.current() is not None:
        return dropout_p, None
    traced = torch.compiler.is_compiling()
    if not traced and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"dropout_p: expected 0 while a CUDA graph is captured, got {dropout_p}: the host draws the "
            "seed of the mask, so every replay would drop the same weights"
        )
    return dropout_p, torch.randint(2**63 - 1, ())
