"""Launches the kernels that aggregate the neighbours' features and transform them in one pass."""

from __future__ import annotations

from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import device_index, queue
from fastsparse_core.ops._facts import facts_of
from fastsparse_core.ops._spmm_plan import launch_spmm
from fastsparse_core.structure.adjacency import Adjacency

#: Number of features or outputs per block.
_TILE = 128
#: The sums over rows are divided into slabs of rows. These are the smallest number of rows per slab, and the
#: largest number of slabs times tiles. Each slab has two thread blocks per tile of a weight; all thread
#: blocks together fill an H200.
_SLAB_ROWS = 128
_MOST_SLABS = 66
#: Number of bfloat16 terms that represent a float32 number exactly; two terms are used if PyTorch allows
#: TF32.
_ALL_TERMS = 3


def is_laid_out(x: Tensor, *contiguous: Tensor) -> bool:
    """True if 16-byte loads can read float32 tensors: the rows of ``x``, and the contiguous matrices."""
    row_stride, column_stride = x.stride()
    if column_stride != 1 or row_stride % 4 or x.data_ptr() % 16:
        return False
    for matrix in contiguous:  # noqa: SIM110 (a generator takes more host time)
        if matrix.data_ptr() % 16 or not matrix.is_contiguous():
            return False
    return True


def gathers_neighbours(adj: Adjacency, algorithm: str) -> bool:
    """Returns whether the kernel also sums the neighbours (`policy.gathers_and_transforms`)."""
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
    """Computes `aggregate_linear`, if `policy.transforms_on_tensor_cores` and `is_laid_out` are true.

    Args:
        adj: structure (num_dst, num_src).
        x: float32 (num_src, width), features of the sources; the first rows are the destinations.
        weight: (out width, width), multiplied by the neighbours' sums.
        bias: (out width,), contiguous, or None.
        root_weight: (out width, width), multiplied by the destinations' own features.
        scale_dst: float32 (num_dst,), factors of the sums; None: 1.
        algorithm: the caller's choice for the sum.
        keeps_sums: whether to return the neighbours' sums.

    Returns:
        (num_dst, out width), and the sums or None.
    """
    key = ("aggregate_linear", algorithm)
    known = adj.plans.get(key)
    if known is None:
        # The kernel needs no work list, and requesting a work list would count as a use.
        known = (gathers_neighbours(adj, algorithm), adj.plain_structure, device_index(adj.device))
        adj.plans[key] = known
    gathers, structure, index = known
    out_width, width = weight.shape
    out = x.new_empty(adj.num_dst, out_width)
    sums = None
    if not gathers:
        sums = launch_spmm(adj, x, None, scale_dst, None, None, algorithm)
    elif keeps_sums or out_width > _TILE:
        sums = x.new_empty(adj.num_dst, width)
    _C.aggregate_linear(
        structure=structure,
        sums_given=not gathers,
        scale_dst=scale_dst,
        x=x,
        weight=weight,
        root_weight=root_weight,
        bias=bias,
        sums=sums,
        out=out,
        num_terms=2 if policy.allows_tf32() else _ALL_TERMS,
        device=index,
        queue=queue(index),
    )
    return out, sums if keeps_sums else None


def gradients_of_parameters(
    grad: Tensor, sums: Tensor, own: Tensor, needs_bias: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of the weights and the bias of `aggregate_and_transform`, under the same conditions.

    Args:
        grad: gradient of the result.
        sums: sums of the neighbours' features, contiguous.
        own: features of the destinations; `is_laid_out` must be true for them.
        needs_bias: whether the gradient of the bias is wanted.

    Returns:
        Gradients of ``weight``, ``bias`` or None, and ``root_weight``.
    """
    if not grad.is_contiguous():
        grad = grad.contiguous()
    if grad.data_ptr() % 16:
        grad = grad.clone()  # the kernel uses 16-byte loads
    num_rows, out_width = grad.shape
    width = own.shape[1]
    grad_weight, grad_root = grad.new_empty(out_width, width), grad.new_empty(out_width, width)
    grad_bias = grad.new_empty(out_width) if needs_bias else None
    # Memory for the gradients of both weights, slab by slab, followed by the gradients of the bias.
    tiles = -(-width // _TILE) * -(-out_width // _TILE)
    num_slabs = min(-(-num_rows // _SLAB_ROWS), _MOST_SLABS // tiles)
    of_weights = num_slabs * 2 * out_width * width
    workspace = grad.new_empty(of_weights + num_slabs * out_width if needs_bias else of_weights)
    parts, index = workspace.data_ptr(), device_index(grad.device)
    _C.aggregate_linear_backward(
        num_rows=num_rows,
        grad=grad,
        out_width=out_width,
        sums=sums,
        x=own,
        width=width,
        num_slabs=num_slabs,
        weights=parts,
        bias=parts + 4 * of_weights if needs_bias else 0,
        grad_weight=grad_weight,
        grad_root=grad_root,
        grad_bias=grad_bias,
        num_terms=2 if policy.allows_tf32() else _ALL_TERMS,
        device=index,
        queue=queue(index),
    )
    return grad_weight, grad_bias, grad_root
