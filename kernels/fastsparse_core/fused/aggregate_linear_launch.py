"""Launches of the kernels that aggregate neighbours and transform them at once."""

from __future__ import annotations

from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import device_index, queue
from fastsparse_core.ops._facts import facts_of
from fastsparse_core.ops._spmm_plan import launch_spmm
from fastsparse_core.structure.adjacency import Adjacency

#: Number of features or outputs per block.
_TILE = 128
#: Smallest number of rows of a slab, and largest number of slabs: each slab has two thread blocks per tile of
#: a weight, and together they fill an H200.
_SLAB_ROWS = 128
_MOST_SLABS = 66
#: bfloat16 terms that keep all digits of a float32 number; two if PyTorch allows fewer digits.
_ALL_TERMS = 3


def is_laid_out(x: Tensor, *contiguous: Tensor) -> bool:
    """Whether rows of ``x``, and matrices without gaps, all float32, can be read 16 bytes at a time."""
    row_stride, column_stride = x.stride()
    if column_stride != 1 or row_stride % 4 or x.data_ptr() % 16:
        return False
    for matrix in contiguous:  # noqa: SIM110 (a generator takes the host longer)
        if matrix.data_ptr() % 16 or not matrix.is_contiguous():
            return False
    return True


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
    """The result of `aggregate_linear` where the launch supports it.

    That is where `policy.transforms_on_tensor_cores` and `is_laid_out` say so, of plain tensors.

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
    key = ("aggregate_linear", algorithm)
    known = adj.plans.get(key)
    if known is None:
        # No work list: none is needed, and asking for one counts as a use of it.
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
    """Gradients of what `aggregate_and_transform` takes as parameters, where that could be called.

    Args:
        grad: of its result.
        sums: of the neighbours, laid out without gaps.
        own: features of the destinations, laid out as those of the sources.
        needs_bias: whether the gradient of the bias is wanted.

    Returns:
        Gradients of ``weight``, ``bias`` or None, and ``root_weight``.
    """
    if not grad.is_contiguous():
        grad = grad.contiguous()
    if grad.data_ptr() % 16:
        grad = grad.clone()  # read in 16-byte pieces
    num_rows, out_width = grad.shape
    width = own.shape[1]
    grad_weight, grad_root = grad.new_empty(out_width, width), grad.new_empty(out_width, width)
    grad_bias = grad.new_empty(out_width) if needs_bias else None
    # Gradients of both weights, slab by slab, followed by those of the bias.
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
