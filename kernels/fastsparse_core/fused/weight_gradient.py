"""Gradients of the weights of linear maps whose results are then summed over edges."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastsparse_core import _C, recorded
from fastsparse_core.device import place_of
from fastsparse_core.ops._autocast import product_in
from fastsparse_core.ops._operands import unit_stride


def weight_gradient(
    grad: Tensor,
    features: Tensor,
    dtype: torch.dtype,
    once: bool,
    num_parts: int = 1,
    part_width: int | None = None,
    *,
    out_by_in: bool = True,
) -> Tensor:
    r"""The gradient of a weight, without rows whose gradient is 0, even if they have NaN or infinity.

    .. math::
        \mathbf{G}^{\top} \mathbf{X} = \sum_{j : \mathbf{g}_j \ne 0} \mathbf{g}_j \mathbf{x}_j^{\top}

    The original layers sum over edges first, and do not read the features of nodes without outgoing edges.
    Here the linear map comes first. The gradient of such a node's row is 0, and 0 times NaN would be NaN. So
    if the product is not finite, it is computed again without the rows whose gradient is 0. Masking the
    features in every call would read and write all of them; checking the product reads only the product. On
    CUDA, a kernel checks it, so that the host need not wait.

    Args:
        grad: gradient of the linear map's result (N, out width).
        features: input of the linear map (N, in width), in the dtype of ``grad``.
        dtype: dtype of the result.
        once: whether the result itself needs no gradient (`is_first_derivative`).
        num_parts: number of parts of the map's result, its first columns, that are summed over different
            edges. Rows with a gradient of 0 differ from part to part. Later columns are not checked.
        part_width: number of columns of a part; None: all.
        out_by_in: whether the weight is (out width, in width); otherwise, (in width, out width).

    Returns:
        The gradient, in the shape of the weight.
    """
    is_cuda = grad.is_cuda
    # A recorded step cannot read a number on the host.
    if not once or (recorded.entered and not is_cuda and recorded.current() is not None):
        return _differentiable(grad, features, dtype, num_parts, part_width, out_by_in)
    left, right = (grad.t(), features) if out_by_in else (features.t(), grad)
    product = torch.mm(left, right) if left.dtype == dtype else product_in(left, right, dtype)
    if not is_cuda and math.isfinite(product.sum(dtype=None if dtype != torch.float16 else torch.float32)):
        return product  # if it is not finite, it is computed again, even if only the sum has overflowed
    width = grad.shape[1] if part_width is None else part_width
    by_row = product if out_by_in else product.t()
    if is_cuda:
        if product.numel():
            device, queue = place_of(product.device)
            _C.weight_gradient(
                grad=unit_stride(grad),
                x=features,
                x_column_stride=features.stride(1),
                num_parts=num_parts,
                part_width=width,
                out=by_row,
                out_column_stride=by_row.stride(1),
                out_dtype=dtype,
                device=device,
                queue=queue,
            )
        return product
    for nth in range(num_parts):
        first = nth * width
        part = grad[:, first : first + width]
        rows = (part != 0).any(1)
        by_row[first : first + width] = product_in(part[rows].t(), features[rows], dtype)
    return product


def _differentiable(
    grad: Tensor,
    features: Tensor,
    dtype: torch.dtype,
    num_parts: int,
    part_width: int | None,
    out_by_in: bool,
) -> Tensor:
    """The same gradient by differentiable operators; masks rows in every call."""
    width = grad.shape[1] if part_width is None else part_width
    parts = grad.split([width] * num_parts + [grad.shape[1] - num_parts * width], 1)
    products = []
    for at, part in enumerate(parts):
        x = features
        if at < num_parts:
            idle = (part == 0).all(1, keepdim=True)
            x = features.masked_fill(idle & ~features.isfinite(), 0)
        left, right = (part.t(), x) if out_by_in else (x.t(), part)
        products.append(product_in(left, right, dtype, once=False))
    return torch.cat(products, 0 if out_by_in else 1)
