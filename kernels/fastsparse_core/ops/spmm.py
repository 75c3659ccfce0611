"""Sparse-dense product: aggregation of the features of neighbours."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.formats.bsb import HEIGHT
from fastsparse_core.ops._autocast import autocast
from fastsparse_core.ops._checks import (
    check_bias,
    check_features,
    check_scale,
    check_value,
    is_partitioned,
    widened_value,
)
from fastsparse_core.ops._dtypes import ACCUMULATION_DTYPE, DTYPE_CODE, accumulation_dtype
from fastsparse_core.ops._eager import PLAIN, is_first_derivative, is_plain_eager, is_wrapped
from fastsparse_core.ops._kept_results import with_cure
from fastsparse_core.ops._operands import edges_from_dense, is_dense
from fastsparse_core.ops._registration import Operator, Structure, keep_alive, structure_of
from fastsparse_core.ops._spmm_extremum import extremum
from fastsparse_core.ops._spmm_plan import grad_of_features, launch_spmm
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.ops.sddmm import sddmm_op
from fastsparse_core.structure.adjacency import Adjacency

Reduce = Literal["sum", "mean", "max", "min"]
_is_compiling = torch.compiler.is_compiling


def spmm(
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None = None,
    reduce: Reduce = "sum",
    *,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
    algorithm: str = "auto",
    value_layout: str = "edges",
) -> Tensor:
    r"""Aggregates the features of each row's neighbours.

    .. math::
        \mathbf{y}_i = s_i \bigoplus_{j \in \mathcal{N}(i)} v_{ij} \, t_j \, \mathbf{x}_j + \mathbf{b}

    with :math:`\bigoplus` a sum, mean, maximum or minimum. Rows without edges give 0 (plus the bias). Sums
    are accumulated in float32 (float64 for float64 features) in a fixed order, so results have the same bits
    in every run. Gradients have the same bits too, with two exceptions on CUDA. If the edges were given in
    sorted order, the first two gradients of ``x`` use atomics, because building the transpose would take
    longer (`policy.scatters`). They do not for float64, several values per edge, or more than 4 million
    edges. Second derivatives of maximum and minimum also use atomics.
    ``torch.use_deterministic_algorithms(True)`` turns atomics off.

    Args:
        adj: structure (num_dst, num_src).
        x: features (num_src, ...), float64, float32, float16 or bfloat16, any row stride. Under autocast they
            are cast as for a matrix product.
        value: :math:`v`, (num_values,) or (num_values, H) in the caller's edge order, in the dtype of ``x``
            or in its accumulation dtype. With H columns, the flattened features are split into H equal
            blocks, and each block has a value of its own. None: 1.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``. If several entries share the maximum or
            minimum, the first one in the row gets the gradient.
        scale_dst: constant :math:`s`, floating (num_dst,).
        scale_src: constant :math:`t`, floating (num_src,).
        bias: :math:`\mathbf{b}`, floating (F,) with F features per node.
        relu: whether to apply ReLU to the result in the same pass.
        algorithm: which kernel runs. If it does not support the call, ``"csr"`` runs, with a warning:

            - ``"csr"``: rows, cut into slices of bounded length, on CUDA cores (HR-SpMM 4.1, RoDe) or on the
              CPU. If all sources fit into shared memory, they are gathered from there.
            - ``"flashsparse"``: 8x1 vectors on tensor cores (FlashSparse 3.2-3.4), for float32, float16 and
              bfloat16 on CUDA, and for widths that allow 16-byte accesses. Float32 uses two TF32 terms, or
              one if ``torch.set_float32_matmul_precision`` allows TF32.
            - ``"tca"``: matricised dot products on tensor cores, read from CSR (TCA-SpMM 4.1-4.2), for
              float16 and bfloat16 on CUDA, with at most one value per edge. Values are rounded to the dtype
              of ``x``.
            - ``"hr"``: like ``"tca"`` for the part of each row that is a multiple of 64 entries, and CUDA
              cores for the rest (HR-SpMM 4.1-4.3).
            - ``"auto"``: flashsparse if the structure was prepared, or was used so often that the conversion
              pays off. In float32, also only if rows of ``x`` are narrow, or neighbouring rows share many
              sources. Otherwise csr, also if there are few sources or few rows.
        value_layout: ``"edges"``, or ``"me_bcrs"``: ``value`` and its gradient are (num_vectors, 8) or
            (num_vectors, 8, H), like the result of ``sddmm(layout="me_bcrs")`` (FlashSparse, figure 9).
            Values at positions without an entry are ignored, and their gradient is 0. With this layout,
            ``"auto"`` uses flashsparse if that supports the call. Csr and the gradient of ``x`` copy the
            values to edge order first. It is supported for sums and means.

    Returns:
        (num_dst, ...) in the dtype of ``x``; differentiable in ``x``, ``value`` and ``bias``, twice for sum
        and mean.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a size, device or option does not fit.

    Examples:
        >>> import torch
        >>> from fastsparse_core import Adjacency, spmm
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0, 2]), torch.tensor([1, 2, 0]), (3, 3))
        >>> spmm(adj, torch.eye(3)).tolist()
        [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    """
    if algorithm == "auto" and not _is_compiling():
        algorithm = policy.eager_requests().get("spmm", "auto")
    else:
        algorithm = policy.requested("spmm", algorithm)
    if (
        value_layout == "edges"
        and is_plain_eager(x)
        and not torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
    ):
        plain = plain_spmm(adj, x, value, reduce, scale_dst, scale_src, algorithm, relu, bias)
        if plain is not None:
            return plain
    policy.check_algorithm(value_layout, ("edges", "me_bcrs"), "value_layout")
    if value_layout == "me_bcrs" and reduce in ("max", "min"):
        raise ValueError(
            f"value_layout: expected 'edges' for reduce={reduce!r}, which uses CSR, got 'me_bcrs'"
        )
    if is_partitioned(adj):
        if value_layout != "edges":
            raise ValueError("value_layout: expected 'edges' for a PartitionedAdjacency, got 'me_bcrs'")
        scales = {"scale_dst": scale_dst, "scale_src": scale_src}
        return adj.spmm(x, value, reduce, bias=bias, relu=relu, algorithm=algorithm, **scales)
    check_features("x", x, adj.num_src, "num_src", adj)
    (x,) = autocast(x)  # type: ignore[assignment]
    trailing = x.shape[1:]
    features = x if x.dim() == 2 else x.reshape(x.size(0), trailing.numel())
    if value is not None:
        value = _check_value(value, features, adj, value_layout)
    scale_dst = check_scale("scale_dst", scale_dst, adj.num_dst, x)
    scale_src = check_scale("scale_src", scale_src, adj.num_src, x)
    if bias is not None:
        bias = check_bias(bias, features, features.size(1), "x")
    if reduce == "mean":
        mean = adj.inv_degree(accumulation_dtype(x.dtype))
        scale_dst = mean if scale_dst is None else scale_dst * mean
    elif reduce in ("max", "min"):
        out: Tensor = extremum(adj, features, value, reduce == "min", scale_dst, scale_src, bias)
        if relu:
            out = out.relu()
        return out if x.dim() == 2 else out.reshape(adj.num_dst, *trailing)
    elif reduce != "sum":
        raise ValueError(f"reduce: expected 'sum', 'mean', 'max' or 'min', got {reduce!r}")
    operands = (features, value, scale_dst, scale_src, bias)
    out = _spmm_op(*operands, adj.num_dst, adj, False, algorithm, relu)
    return out if x.dim() == 2 else out.reshape(adj.num_dst, *trailing)


def plain_spmm(
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None,
    reduce: str,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    algorithm: str,
    relu: bool = False,
    bias: Tensor | None = None,
) -> Tensor | None:
    """:func:`spmm` for calls that need neither a cast nor a reshape, such as most calls of layers.

    The arguments are those of `spmm`. `is_plain_eager` must be true for ``x``, and autocast must be off. The
    result is None for other kinds of calls, and for invalid arguments.
    """
    if not (
        (reduce in ("sum", "max", "min") or (reduce == "mean" and scale_dst is None))
        and type(adj) is Adjacency
        and x.dim() == 2
        and x.shape[0] == adj.num_src
        and x.dtype in DTYPE_CODE
        and x.device == adj.col.device
        and (value is None or _is_plain_value(value, x, adj))
        and (scale_dst is None or _is_plain_scale(scale_dst, adj.num_dst, x))
        and (scale_src is None or _is_plain_scale(scale_src, adj.num_src, x))
    ):
        return None
    if bias is not None and not (
        type(bias) in PLAIN
        and bias.shape == x.shape[1:]
        and bias.dtype == x.dtype
        and bias.device == x.device
        and not bias.is_neg()
    ):
        return None
    if reduce in ("max", "min"):
        found: Tensor = extremum(adj, x, value, reduce == "min", scale_dst, scale_src, bias)
        return found.relu() if relu else found
    scale = scale_dst if reduce == "sum" else adj.inv_degree(accumulation_dtype(x.dtype))
    needs_grad = x.requires_grad or (value is not None and value.requires_grad)
    needs_grad = needs_grad or (bias is not None and bias.requires_grad)
    if not (needs_grad and torch.is_grad_enabled()):
        return launch_spmm(adj, x, value, scale, scale_src, bias, algorithm, relu)
    wrapped = is_wrapped(x) or (value is not None and is_wrapped(value))
    apply = _spmm_op.apply_wrapped if wrapped else _spmm_op.apply
    out: Tensor = apply(x, value, scale, scale_src, bias, adj.num_dst, adj, False, algorithm, relu)
    return out


def spmm_of_values(adj: Adjacency, x: Tensor, value: Tensor) -> Tensor:
    """`plain_spmm` with a gradient of ``x`` but no checks, for repeated calls whose first one was checked."""
    out: Tensor = _spmm_op.apply(x, value, None, None, None, adj.num_dst, adj, False, "auto", False)
    return out


def _is_plain_value(value: Any, x: Tensor, adj: Adjacency) -> bool:
    """Returns whether the kernels can use the values as they are: one per edge, or per edge and head."""
    if not is_plain_eager(value) or value.dtype != x.dtype or value.device != x.device:
        return False
    shape = value.shape
    if not shape or shape[0] != adj.num_values:
        return False
    return len(shape) == 1 or (len(shape) == 2 and shape[1] > 0 and x.shape[1] % shape[1] == 0)


def _is_plain_scale(scale: Any, rows: int, x: Tensor) -> bool:
    """Returns whether `check_scale` would return the scale unchanged."""
    return (
        type(scale) is Tensor
        and scale.shape == (rows,)
        and scale.dtype is ACCUMULATION_DTYPE.get(x.dtype)
        and scale.device == x.device
        and scale.is_contiguous()
        and not (scale.requires_grad or scale.is_neg())
    )


def _check_value(value: Tensor, features: Tensor, adj: Adjacency, layout: str) -> Tensor:
    check_value(value, features, "x")
    size = (adj.bsb.num_vectors, HEIGHT) if layout == "me_bcrs" else (adj.num_values,)
    has_heads = value.dim() == len(size) + 1
    if value.shape[: len(size)] != size or not (has_heads or value.dim() == len(size)):
        with_heads = f"({', '.join(map(str, size))}, heads)"
        raise ValueError(f"value: expected shape {size} or {with_heads}, got {tuple(value.shape)}")
    if has_heads and (value.size(-1) == 0 or features.size(1) % value.size(-1)):
        raise ValueError(
            f"value: expected a number of heads that divides the {features.size(1)} features, "
            f"got {value.size(-1)}"
        )
    value = widened_value(value, features)
    return value if layout == "edges" or has_heads else value.unsqueeze(-1)


def _spmm(
    x: Tensor,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    bias: Tensor | None,
    num_dst: int,
    adjacency: Structure,
    transpose: bool,
    algorithm: str,
    relu: bool,
) -> Tensor:
    """The operator's kernel.

    Values of three dimensions are dense vectors, (num_vectors, 8, heads), of the untransposed structure.
    """
    adj = structure_of(adjacency)
    if transpose:
        value = edges_from_dense(adj, value) if is_dense(value) else value
        adj = adj.t(valued=value is not None)
    return launch_spmm(adj, x, value, scale_dst, scale_src, bias, algorithm, relu)


class _Spmm(torch.autograd.Function):
    """dX = A^T dY with the scales swapped, dv = sddmm(dY, X), db = sum of dY; all are differentiable."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, value, scale_dst, scale_src, bias, _, adjacency, transpose, algorithm, relu = arguments
        ctx.adjacency = adjacency
        ctx.set_materialize_grads(False)
        if isinstance(adjacency, Adjacency) and not transpose:  # saves Python calls in the usual case
            ctx.keep_alive = adjacency
            out = launch_spmm(adjacency, x, value, scale_dst, scale_src, bias, algorithm, relu)
        else:
            ctx.keep_alive = keep_alive(adjacency)
            out = _spmm_op.below(*arguments)
        ctx.num_src, ctx.transpose, ctx.algorithm = x.shape[0], transpose, algorithm
        ctx.bias_dtype = None if bias is None else bias.dtype
        # If no gradient reads x, autograd does not store x, so that callers may write to x.
        kept = x if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, value, scale_dst, scale_src, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 10
        try:
            x, value, scale_dst, scale_src, rectified = ctx.saved_tensors
        except RuntimeError as error:
            raise with_cure(error, "spmm with a value that requires a gradient") from None
        grad_x = grad_value = grad_bias = None
        if rectified is not None:
            grad = grad.masked_fill(rectified <= 0, 0)
        plain = is_first_derivative(grad)
        if plain and grad.stride(1) != 1:
            grad = grad.contiguous()  # done once here; the gradient of a sum, for example, is expanded
        if ctx.needs_input_grad[0]:
            if plain and not ctx.transpose:
                grad_x = grad_of_features(ctx.keep_alive, grad, value, scale_dst, scale_src, ctx.algorithm)
            else:
                place = (ctx.num_src, ctx.adjacency, not ctx.transpose, ctx.algorithm, False)
                grad_x = _spmm_op(grad, value, scale_src, scale_dst, None, *place)
        if ctx.needs_input_grad[1]:
            dst, src = (x, grad) if ctx.transpose else (grad, x)
            scales = (scale_src, scale_dst) if ctx.transpose else (scale_dst, scale_src)
            algorithm = ctx.algorithm if ctx.algorithm in policy.SDDMM_ALGORITHMS else "csr"
            dim = value.dim()  # `num_heads` and `is_dense`, inlined
            of_values = (value.shape[0], value.shape[-1] if dim > 1 else 1, value.dtype)
            operator = sddmm_op.kernel if plain else sddmm_op
            grad_value = operator(dst, src, *scales, *of_values, ctx.adjacency, algorithm, dim == 3)
            if grad_value.shape != value.shape:
                grad_value = grad_value.reshape(value.shape)
        if ctx.needs_input_grad[4]:
            grad_bias = sum_of_rows(grad, ctx.bias_dtype)
        return grad_x, grad_value, None, None, grad_bias, None, None, None, None, None


# The operator's argument `num_dst` repeats the structure's size, because traces have no structure.
_spmm_op = Operator(_spmm, lambda of: of.x.new_empty(of.num_dst, of.x.size(1)), _Spmm)
