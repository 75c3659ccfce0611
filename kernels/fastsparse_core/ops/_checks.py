"""Checks of arguments that several operators share."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from fastsparse_core.ops._dtypes import DTYPE_CODE, accumulation_dtype
from fastsparse_core.ops._operands import written_out
from fastsparse_core.policy import MOST_HEADS
from fastsparse_core.structure.adjacency import Adjacency


def check_structure(adj: Adjacency) -> None:
    """Raises an error unless ``adj`` is a structure. Operators check this first.

    Raises:
        TypeError: ``adj`` is not a structure; the message says how to make one.
    """
    if not hasattr(adj, "is_partitioned"):
        raise TypeError(
            f"adj: expected an Adjacency, got {type(adj).__name__}; make one with "
            "Adjacency.from_coo(row, col, (num_dst, num_src)), where row has the destinations, or with "
            "prepare(graph) of fastsparse_pyg or fastsparse_dgl"
        )


def is_partitioned(adj: Adjacency) -> TypeGuard[Any]:
    """Returns whether a structure is one rank's part of a graph; raises the error of `check_structure`."""
    try:
        return adj.is_partitioned
    except AttributeError:
        check_structure(adj)
        raise


def check_features(name: str, x: Tensor, rows: int, rows_name: str, adj: Adjacency) -> None:
    """Raises an error unless ``x`` is a floating tensor of ``rows`` rows on the structure's device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.dtype not in DTYPE_CODE:
        raise TypeError(f"{name}: expected float64, float32, float16 or bfloat16, got {x.dtype}")
    if x.dim() < 1 or x.size(0) != rows:
        raise ValueError(f"{name}: expected {rows_name} = {rows} rows, got shape {tuple(x.shape)}")
    if x.device != adj.device:
        raise ValueError(
            f"{name}: expected device {adj.device} like the Adjacency, got {x.device}; move one with .to()"
        )


def check_edge_map(name: str, weight: Tensor, width: int, edge_attr: Tensor) -> None:
    """Raises an error unless ``weight`` maps edge features, (E, A), to ``width`` features."""
    expected = (width, edge_attr.size(1))
    if tuple(weight.shape) != expected:
        raise ValueError(
            f"{name}: expected shape {expected}, because edge_attr has {expected[1]} columns, got "
            f"{tuple(weight.shape)}; in a layer, edge_dim must be the number of columns"
        )


def check_heads(heads: int, device: torch.device) -> None:
    """Raises an error if there are more heads than the grid of a CUDA kernel allows."""
    if device.type == "cuda" and heads > MOST_HEADS:
        raise ValueError(
            f"expected at most {MOST_HEADS} heads on CUDA, got {heads}; pass them in several calls"
        )


def check_value(value: Tensor, x: Tensor, name: str) -> None:
    """Raises an error unless edge values are floating and on the device of ``x``, named `name`."""
    if not isinstance(value, Tensor) or value.dtype not in DTYPE_CODE:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"value: expected a floating tensor, got {kind}")
    if value.device != x.device:
        raise ValueError(f"value: expected device {x.device} like {name}, got {value.device}")


def widened_value(value: Tensor, x: Tensor) -> Tensor:
    """The edge values in a dtype that kernels support together with features ``x``."""
    accumulation = accumulation_dtype(x.dtype)
    value = written_out(value)
    return value if value.dtype in (x.dtype, accumulation) else value.to(accumulation)


def check_bias(bias: Tensor, x: Tensor, width: int, name: str) -> Tensor:
    """Checks a bias; returns one number per feature, on the device of the features ``x``, named `name`."""
    if bias.numel() != width:
        raise ValueError(f"bias: expected {width} entries, one per feature, got {bias.numel()}")
    if bias.device != x.device:
        raise ValueError(f"bias: expected device {x.device} like {name}, got {bias.device}")
    bias = written_out(bias)
    return bias if bias.dim() == 1 else bias.reshape(-1)


def check_scale(name: str, scale: Tensor | None, rows: int, x: Tensor) -> Tensor | None:
    """Checks a constant factor per row; returns it in the accumulation dtype."""
    if scale is None:
        return None
    if scale.shape != (rows,):
        raise ValueError(f"{name}: expected shape ({rows},), got {tuple(scale.shape)}")
    if scale.device != x.device:
        raise ValueError(f"{name}: expected device {x.device}, got {scale.device}")
    if scale.requires_grad:
        raise ValueError(
            f"{name}: expected a constant without gradient, got a tensor with requires_grad=True; "
            "multiply the features (scale_src) or the result (scale_dst) by it instead"
        )
    dtype = accumulation_dtype(x.dtype)
    scale = written_out(scale)
    return scale if scale.dtype == dtype and scale.is_contiguous() else scale.to(dtype).contiguous()
