"""The way between a value per edge and a dense matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.adjacency import Adjacency, from_handle
from fastsparse_core.device import device_index, queue
from fastsparse_core.ops._common import (
    DTYPE_CODE,
    accumulation_dtype,
    below_autograd,
    is_plain_eager,
    keep_alive,
    library,
    register_autograd,
)

library.define("csr_to_dense(Tensor value, SymInt num_dst, SymInt num_src, SymInt adjacency) -> Tensor")
library.define("csr_gather(Tensor dense, SymInt num_values, SymInt adjacency) -> Tensor")


def csr_to_dense(adj: Adjacency, value: Tensor) -> Tensor:
    r"""The matrix of a structure and its values, with its zeros.

    Args:
        adj: structure (num_dst, num_src) without inserted loops.
        value: (num_edges,) in the caller's edge order; float64, float32, float16 or bfloat16. Entries that
            occur twice add up.

    Returns:
        (num_dst, num_src) in the dtype of ``value``; differentiable in it, twice.
    """
    if not torch.compiler.is_compiling() and not is_plain_eager(value):
        # Function transforms know PyTorch's own operators only.
        flat = value.new_zeros(adj.num_dst * adj.num_src)
        return flat.index_add(0, _places(adj), value).view(adj.shape)
    return torch.ops.fastsparse.csr_to_dense.default(value, adj.num_dst, adj.num_src, adj.handle)


def _places(adj: Adjacency) -> Tensor:
    """Place of every edge in the dense matrix, row by row: int64 (num_edges,) in the caller's edge order."""

    def build() -> Tensor:
        place = adj.row().long() * adj.num_src + adj.col
        return (
            place
            if adj.edge_id is None
            else torch.empty_like(place).index_copy_(0, adj.edge_id.long(), place)
        )

    return adj.memo("fastsparse_core.csr_to_dense", build)


def _csr_to_dense_cpu(value: Tensor, num_dst: int, num_src: int, adjacency: int) -> Tensor:
    dtype = accumulation_dtype(value.dtype)
    flat = value.new_zeros(num_dst * num_src, dtype=dtype)
    flat.index_add_(0, _places(from_handle(adjacency)), value.to(dtype))
    return flat.to(value.dtype).view(num_dst, num_src)


def _csr_to_dense_cuda(value: Tensor, num_dst: int, num_src: int, adjacency: int) -> Tensor:
    if torch.are_deterministic_algorithms_enabled():  # the kernel adds repeated entries by atomics
        return _csr_to_dense_cpu(value, num_dst, num_src, adjacency)
    value = value.contiguous()
    out = value.new_empty(num_dst, num_src)
    if out.numel():
        index = device_index(value.device)
        _C.csr_to_dense(
            from_handle(adjacency).plain_structure,
            DTYPE_CODE[value.dtype],
            value.data_ptr(),
            out.data_ptr(),
            index,
            queue(index),
        )
    return out


def _csr_gather(dense: Tensor, num_values: int, adjacency: int) -> Tensor:
    return dense.reshape(-1).index_select(0, _places(from_handle(adjacency)))


class _CsrToDense(torch.autograd.Function):
    """dv = the entries of the matrix's gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, num_dst: int, num_src: int, adjacency: int) -> Tensor:
        ctx.num_values, ctx.adjacency, ctx.keep_alive = value.size(0), adjacency, keep_alive(adjacency)
        with below_autograd():
            return torch.ops.fastsparse.csr_to_dense.default(value, num_dst, num_src, adjacency)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.fastsparse.csr_gather.default(grad, ctx.num_values, ctx.adjacency), None, None, None


class _CsrGather(torch.autograd.Function):
    """The adjoint of writing values to their places."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, num_values: int, adjacency: int) -> Tensor:
        ctx.shape, ctx.adjacency, ctx.keep_alive = dense.shape, adjacency, keep_alive(adjacency)
        with below_autograd():
            return torch.ops.fastsparse.csr_gather.default(dense, num_values, adjacency)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.fastsparse.csr_to_dense.default(grad, *ctx.shape, ctx.adjacency), None, None


def _csr_to_dense_fake(value: Tensor, num_dst: int, num_src: int, adjacency: int) -> Tensor:
    return value.new_empty(num_dst, num_src)


def _csr_gather_fake(dense: Tensor, num_values: int, adjacency: int) -> Tensor:
    return dense.new_empty(num_values)


library.impl("csr_to_dense", _csr_to_dense_cpu, "CPU")
library.impl("csr_to_dense", _csr_to_dense_cuda, "CUDA")
for _key in ("CPU", "CUDA"):
    library.impl("csr_gather", _csr_gather, _key)
torch.library.register_fake("fastsparse::csr_to_dense", _csr_to_dense_fake, lib=library)
torch.library.register_fake("fastsparse::csr_gather", _csr_gather_fake, lib=library)
register_autograd("csr_to_dense", _CsrToDense)
register_autograd("csr_gather", _CsrGather)
