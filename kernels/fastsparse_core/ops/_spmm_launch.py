"""Launches of spmm: which kernel serves a product, and what it is given."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import device_index, queue
from fastsparse_core.formats.bsb import HEIGHT
from fastsparse_core.ops._common import (
    DTYPE_CODE,
    accumulation_dtype,
    address,
    allows_tf32,
    edges_from_dense,
    is_dense,
    num_heads,
    unit_stride,
)
from fastsparse_core.structure.adjacency import Adjacency


def launch_spmm(
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    bias: Tensor | None,
    algorithm: str,
    relu: bool = False,
) -> Tensor:
    """The sum that `spmm` computes, nothing being checked or recorded.

    Args:
        adj: structure (num_dst, num_src).
        x: features (num_src, width).
        value: values of edges or of dense vectors, in a dtype that kernels take beside ``x``; None: 1.
        scale_dst: (num_dst,) in the accumulation dtype; None: 1.
        scale_src: (num_src,) in the accumulation dtype; None: 1.
        bias: (width,); None: 0.
        algorithm: as the caller asked.
        relu: whether negative results become 0.

    Returns:
        (num_dst, width) in the dtype of ``x``.
    """
    row_stride, column_stride = x.stride()
    if column_stride != 1:
        x = unit_stride(x)
        row_stride = x.stride(0)
    dtype, width, item_size = x.dtype, x.size(1), x.element_size()
    out = x.new_empty(adj.num_dst, width)
    if bias is not None and not (bias.dtype == dtype and bias.is_contiguous()):
        bias = bias.to(dtype).contiguous()
    stride_bytes = row_stride * item_size
    aligned = width * item_size % 16 == x.data_ptr() % 16 == stride_bytes % 16 == 0 and stride_bytes < 1 << 32
    key = (dtype, width, algorithm, scale_src is None)
    if value is None and aligned:
        # Most calls repeat one: a step of a small model takes as long as the host needs to launch it.
        blocks = adj.spmm_blocks.get(key)
        if blocks is not None:
            _launch_bsb(blocks, adj, x, None, scale_dst, scale_src, bias, relu, out)
            return out
    if out.numel() == 0:
        return out
    if value is not None:
        value = value.contiguous()
    dense, heads = is_dense(value), num_heads(value)
    weighted = value is not None or scale_src is not None
    chosen = policy.spmm_algorithm(adj, algorithm, dtype, width, heads, aligned, dense, weighted=weighted)
    if chosen == "flashsparse":
        blocks = _blocks(adj, dtype, width, valued=value is not None and not dense)
        if value is None:
            adj.spmm_blocks[key] = blocks  # what chose them, of a structure that has them, chooses them again
        _launch_bsb(blocks, adj, x, value, scale_dst, scale_src, bias, relu, out)
        return out
    if is_dense(value):
        value = edges_from_dense(adj, value)
    operands = _Operands(adj, x, value, scale_dst, scale_src, bias, relu, out, weighted)
    if policy.spmm_resident(adj, chosen, dtype, width, heads, aligned):
        _launch_resident(operands, tensor_cores=chosen == "tca")
    else:
        _LAUNCH[chosen](operands)
    return out


class SpmmBlocks(NamedTuple):
    """What spmm on the tensor cores takes of a structure, for features of one dtype and width.

    Attributes:
        structure: the binary sparse blocks, as the compiled kernel takes them.
        num_partial: rows of partial results.
        features_per_lane: see `policy.features_per_lane`.
        blocks_per_step: see `policy.blocks_per_step`.
    """

    structure: Any
    num_partial: int
    features_per_lane: int
    blocks_per_step: int


def _blocks(adj: Adjacency, dtype: torch.dtype, width: int, *, valued: bool) -> SpmmBlocks:
    bsb = adj.bsb
    return SpmmBlocks(
        adj.bsb_structure(valued=valued),
        adj.bsb_split.num_slots * HEIGHT,
        policy.features_per_lane(width, dtype.itemsize),
        policy.blocks_per_step(bsb.num_blocks, bsb.num_windows),
    )


def _launch_bsb(
    blocks: SpmmBlocks,
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    bias: Tensor | None,
    relu: bool,
    out: Tensor,
) -> None:
    structure, num_partial, features_per_lane, blocks_per_step = blocks
    dtype, width = x.dtype, x.size(1)
    vector_scale = None  # a name until after the launch: while a CUDA graph is captured nothing else keeps it
    if scale_src is not None and value is None and dtype != torch.float32:
        vector_scale = adj.vector_scale(scale_src)
    elif scale_src is not None:
        # In float32 a weight costs a third product on the tensor cores: more than scaling the features once.
        x = (x * scale_src[:, None]).to(dtype)
    if bias is not None and bias.data_ptr() % 16:
        bias = bias.clone()  # read in 16-byte pieces
    partial = x.new_empty(num_partial, width, dtype=torch.float32) if num_partial else None
    index = x.get_device()
    _C.spmm_bsb(
        structure,
        DTYPE_CODE[dtype],
        width,
        x.data_ptr(),
        x.stride(0),
        0 if value is None else value.data_ptr(),
        0 if value is None else DTYPE_CODE[value.dtype],
        1 if value is None else num_heads(value),
        adj.quad_vector().data_ptr() if is_dense(value) else 0,
        0 if vector_scale is None else vector_scale.data_ptr(),
        0 if scale_dst is None else scale_dst.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        relu,
        out.data_ptr(),
        0 if partial is None else partial.data_ptr(),
        features_per_lane,
        blocks_per_step,
        dtype == torch.float32 and allows_tf32(),
        index,
        queue(index),
    )


class _Operands(NamedTuple):
    """What a launch reads and writes, under the names of `spmm`; ``weighted``: edges or sources have factors.

    All is contiguous but ``x``, whose rows may lie apart.
    """

    adj: Adjacency
    x: Tensor
    value: Tensor | None
    scale_dst: Tensor | None
    scale_src: Tensor | None
    bias: Tensor | None
    relu: bool
    out: Tensor
    weighted: bool

    def factors_and_result(self) -> tuple[int, int, int, bool, int]:
        """What most bindings take after the features and values, in their order."""
        return (
            address(self.scale_dst),
            address(self.scale_src),
            address(self.bias),
            self.relu,
            self.out.data_ptr(),
        )


def _features_and_values(x: Tensor, value: Tensor | None) -> tuple[int, int, int, int, int, int]:
    """What every binding takes after the structure, in its order."""
    return (
        DTYPE_CODE[x.dtype],
        x.size(1),
        x.data_ptr(),
        x.stride(0),
        address(value),
        0 if value is None else DTYPE_CODE[value.dtype],
    )


def _launch_csr(operands: _Operands) -> None:
    adj, x, value = operands.adj, operands.x, operands.value
    index = device_index(x.device)
    partial = None
    if index >= 0 and adj.row_split.num_slots:
        partial = x.new_empty(adj.row_split.num_slots, x.size(1), dtype=accumulation_dtype(x.dtype))
    _C.spmm_csr(
        adj.csr_structure,
        *_features_and_values(x, value),
        num_heads(value),
        *operands.factors_and_result(),
        address(partial),
        policy.csr_tile(adj, x.element_size(), weighted=operands.weighted),
        index,
        queue(index),
    )


def _launch_tca(operands: _Operands) -> None:
    index = device_index(operands.x.device)
    _C.spmm_tca(
        operands.adj.plain_structure,
        *_features_and_values(operands.x, operands.value),
        *operands.factors_and_result(),
        index,
        queue(index),
    )


def _launch_resident(operands: _Operands, *, tensor_cores: bool) -> None:
    index = device_index(operands.x.device)
    _C.spmm_resident(
        operands.adj.plain_structure,
        *_features_and_values(operands.x, operands.value),
        *operands.factors_and_result(),
        tensor_cores,
        index,
        queue(index),
    )


def _launch_hr(operands: _Operands) -> None:
    x, adj = operands.x, operands.adj
    # The structure first: where a CUDA graph is captured it says what is missing, before a number is read.
    structure, rows = adj.hybrid_structure, adj.hybrid_rows
    index = device_index(x.device)
    partial = x.new_empty(rows.num_slots, x.size(1), dtype=torch.float32) if rows.num_slots else None
    _C.spmm_hr(
        structure,
        rows.num_long,
        *_features_and_values(x, operands.value),
        *operands.factors_and_result(),
        address(partial),
        index,
        queue(index),
    )


_LAUNCH = {"csr": _launch_csr, "tca": _launch_tca, "hr": _launch_hr}


def add_transposed(
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    total: Tensor,
    num_given: int = 0,
) -> Tensor:
    """Adds the transposed product to ``total``, contiguous float32 (num_src, width), without a transpose.

    On CUDA by atomics, in any order. The arguments are those of the product itself, ``x`` is (num_dst,
    width), and of ``total`` only the first ``num_given`` rows hold something yet. Where this may be called,
    `policy.scatters` says.

    Returns:
        ``total``; or where there is nothing in it yet, `policy.counts_sources` and ``x`` has 16 bits, the
        result in the dtype of ``x``, and ``total`` served the sums.
    """
    x = unit_stride(x)
    if value is not None:
        value = value.contiguous()
    index = device_index(x.device)
    count = out = None
    is_float = x.dtype == torch.float32
    if (is_float or num_given == 0) and policy.counts_sources(adj, x.size(1)):
        count = torch.empty(adj.num_src, dtype=torch.int32, device=x.device)
        out = None if is_float else torch.empty_like(total, dtype=x.dtype)
    _C.spmm_csr_transposed(
        adj.csr_structure,
        *_features_and_values(x, value),
        address(scale_dst),
        address(scale_src),
        total.data_ptr(),
        num_given,
        address(count),
        address(out),
        index,
        queue(index),
    )
    return total if out is None else out


def grad_of_features(
    adj: Adjacency,
    grad: Tensor,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    algorithm: str,
) -> Tensor:
    """The transposed product: what reaches the features of a product with ``adj``, nothing being recorded.

    The arguments are those of the product itself, and ``grad`` is the gradient of its result.
    """
    if policy.scatters(adj, algorithm, grad.dtype, value):
        total = grad.new_empty(adj.num_src, grad.size(1), dtype=torch.float32)
        return add_transposed(adj, grad, value, scale_dst, scale_src, total).to(grad.dtype)
    if is_dense(value):
        value = edges_from_dense(adj, value)
    return launch_spmm(adj.t(), grad, value, scale_src, scale_dst, None, algorithm)
