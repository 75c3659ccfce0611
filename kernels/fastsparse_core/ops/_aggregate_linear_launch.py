"""Launches of the kernels that aggregate neighbours and transform them at once."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import device_index, queue
from fastsparse_core.ops._common import PLAIN, address, allows_tf32
from fastsparse_core.ops._facts import facts_of
from fastsparse_core.ops._spmm_plan import launch_spmm
from fastsparse_core.structure.adjacency import Adjacency

#: Rows of a slab at least, and slabs at most: each is two blocks of threads, which fill an H200 together.
_SLAB_ROWS = 128
_MOST_SLABS = 66


def is_laid_out(x: Tensor, *contiguous: Tensor) -> bool:
    """Whether rows of ``x``, and matrices without gaps, all float32, can be read 16 bytes at a time."""
    return (
        x.stride(1) == 1
        and x.stride(0) % 4 == x.data_ptr() % 16 == 0
        and all(matrix.is_contiguous() and matrix.data_ptr() % 16 == 0 for matrix in contiguous)
    )


def are_plain(x: Tensor, weight: Tensor, bias: Tensor | None, root_weight: Tensor) -> bool:
    """Whether parameters lie in memory as they say, beside ``x``: an address is all that a kernel gets.

    Others are PyTorch's to multiply, or to refuse.
    """
    device = x.device
    return (
        type(weight) in PLAIN
        and type(root_weight) in PLAIN
        and weight.device == device
        and root_weight.device == device
        and weight.layout == root_weight.layout == torch.strided
        and (
            bias is None or (type(bias) in PLAIN and bias.device == device and bias.shape == weight.shape[:1])
        )
    )


def gathers_neighbours(adj: Adjacency, algorithm: str) -> bool:
    """Whether the kernel sums the neighbours too (`policy.gathers_and_transforms`)."""
    return policy.gathers_and_transforms(facts_of(adj), algorithm, adj.gpu) and adj.has_short_rows


def aggregate_and_transform(
    adj: Adjacency,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    root_weight: Tensor,
    scale_dst: Tensor | None,
    algorithm: str,
    keeps_sums: bool,
) -> tuple[Tensor, Tensor | None]:
    """The result of `aggregate_linear` where the launch can serve it.

    That is where `policy.transforms_on_tensor_cores`, `is_laid_out` and `are_plain` say so.

    Args:
        adj: structure.
        x: float32 features of the sources.
        weight: of the neighbours' sums.
        bias: contiguous, or None.
        root_weight: of the destinations.
        scale_dst: float32 (num_dst,), factors of the sums; None: 1.
        algorithm: of the sum, as the caller asked.
        keeps_sums: whether the neighbours' sums are wanted too.

    Returns:
        (num_dst, out width), and the sums or None.
    """
    out = x.new_empty(adj.num_dst, weight.size(0))
    gathered = gathers_neighbours(adj, algorithm)
    sums = None
    if not gathered:
        sums = launch_spmm(adj, x, None, scale_dst, None, None, algorithm)
    elif keeps_sums:
        sums = x.new_empty(adj.num_dst, x.size(1))
    index = device_index(x.device)
    _C.aggregate_linear(
        adj.plain_structure,  # no work list: none is needed, and asking for one counts as a use of it
        not gathered,
        address(scale_dst),
        x.size(1),
        x.data_ptr(),
        x.stride(0),
        weight.size(0),
        weight.data_ptr(),
        root_weight.data_ptr(),
        address(bias),
        address(sums),
        out.data_ptr(),
        _num_terms(),
        index,
        queue(index),
    )
    return out, sums if keeps_sums else None


def gradients_of_parameters(
    grad: Tensor, sums: Tensor, own: Tensor, needs_bias: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of what `aggregate_and_transform` takes as parameters, where that could be called.

    Args:
        grad: of its result.
        sums: of the neighbours, laid out without gaps.
        own: features of the destinations, laid out as those of the sources.
        needs_bias: whether the gradient of the bias is wanted.

    Returns:
        Gradients of ``weight``, ``bias`` or None, and ``root_weight``.
    """
    grad = grad.contiguous()
    if grad.data_ptr() % 16:
        grad = grad.clone()  # read in 16-byte pieces
    num_rows, out_width = grad.shape
    width = own.size(1)
    num_slabs = min(-(-num_rows // _SLAB_ROWS), _MOST_SLABS)
    weights = grad.new_empty(num_slabs, 2, out_width, width)
    bias = grad.new_empty(num_slabs, out_width) if needs_bias else None
    index = device_index(grad.device)
    _C.aggregate_linear_backward(
        num_rows,
        grad.data_ptr(),
        out_width,
        sums.data_ptr(),
        own.data_ptr(),
        own.stride(0),
        width,
        num_slabs,
        weights.data_ptr(),
        address(bias),
        _num_terms(),
        index,
        queue(index),
    )
    # As no views: those of a backward pass may not be written in place while autograd watches.
    grad_weight, grad_root = (part.data for part in weights.sum(0))
    return grad_weight, None if bias is None else bias.sum(0), grad_root


def _num_terms() -> int:
    """Terms of a float32 number: all of its digits, or the first 16 where PyTorch may use fewer."""
    return 2 if allows_tf32() else 3
