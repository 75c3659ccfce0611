"""Launches of ssd's kernels, below PyTorch's dispatcher: arguments have been checked."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import device_index, queue
from fastsparse_core.formats import lengths
from fastsparse_core.ops._common import DTYPE_CODE, accumulation_dtype, address, below_autograd, structure
from fastsparse_core.ops._facts import facts_of
from fastsparse_core.structure.adjacency import Adjacency


def launch_ssd(
    values: Tensor,
    ids: Tensor,
    width: int,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    bias: Tensor | None,
    num_dst: int,
    adjacency: int,
    transpose: bool,
    algorithm: str,
) -> Tensor:
    """The kernels of ``ssd``; arguments as those of the operator, checked."""
    adj = structure(adjacency, transpose)
    values, ids = values.contiguous(), ids.contiguous()
    out = values.new_empty(num_dst, width)
    if out.numel() == 0:
        return out
    if value is not None:
        value = value.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    chosen = policy.ssd_algorithm(
        algorithm,
        values.device,
        values.dtype,
        values.size(1),
        width,
        torch.are_deterministic_algorithms_enabled(),
    )
    if chosen == "densify":
        with below_autograd():
            dense = torch.ops.fastsparse.cbsr_to_dense.default(values, ids, width)
            return torch.ops.fastsparse.spmm.default(
                dense, value, scale_dst, scale_src, bias, num_dst, adjacency, transpose, "auto", False
            )
    if chosen == "maxk":
        total = slotted_ssd(
            adj, values, ids, width, value, scale_src, slots=1, update_mode=False, coupled=True
        )
        total = total if scale_dst is None else total * scale_dst[:, None]
        return (total if bias is None else total + bias).to(values.dtype)
    index = device_index(values.device)
    longest = lengths.edge_group_length(adj.num_edges, adj.num_dst, adj.gpu)
    groups = adj.edge_groups(longest) if index >= 0 else None
    partial = None
    if groups is not None and groups.num_slots:
        partial = values.new_empty(groups.num_slots, width, dtype=accumulation_dtype(values.dtype))
    packed = None
    if index >= 0 and policy.packs_ssd_rows(facts_of(adj), adj.gpu, values.dtype, values.size(1), width):
        packed = ids.new_empty(ids.shape, dtype=torch.int32)
    _C.ssd(
        adj.edge_group_structure(longest),
        DTYPE_CODE[values.dtype],
        width,
        values.size(1),
        values.data_ptr(),
        ids.data_ptr(),
        address(value),
        0 if value is None else DTYPE_CODE[value.dtype],
        address(scale_dst),
        address(scale_src),
        address(bias),
        out.data_ptr(),
        address(partial),
        address(packed),
        0 if groups is None else groups.longest,
        *(
            (0, False)
            if groups is None
            else policy.long_edge_groups(groups, adj.num_edges, values.size(1), adj.gpu)
        ),
        index,
        queue(index),
    )
    return out


def slotted_ssd(
    adj: Adjacency,
    values: Tensor,
    ids: Tensor,
    width: int,
    value: Tensor | None = None,
    scale_src: Tensor | None = None,
    *,
    slots: int = 2,
    update_mode: bool = True,
    coupled: bool = False,
) -> Tensor:
    """The papers' own dataflows with float sums, on CUDA: what ``"decoupled"`` is measured against.

    Args:
        adj: structure (num_dst, num_src).
        values: (num_src, k) float32, float16 or bfloat16, contiguous.
        ids: (num_src, k) their columns, contiguous.
        width: number of columns, at most 1024.
        value: (num_values,) contiguous or None.
        scale_src: (num_src,) float32 or None.
        slots: edge groups that a warp sums at once, a buffer in shared memory for each: a power of two up to
            32 ("Decoupled SSD", section IV-B).
        update_mode: rows that one group has are stored, without atomics (section IV-C).
        coupled: blocks wait for all their groups before they update, as MaxK-GNN's do.

    Returns:
        float32 (num_dst, width).
    """
    total = torch.zeros(adj.num_dst, width, device=values.device)
    index = device_index(values.device)
    _C.ssd_slots(
        adj.edge_group_structure(lengths.SHORT_EDGE_GROUP),
        DTYPE_CODE[values.dtype],
        width,
        values.size(1),
        values.data_ptr(),
        ids.data_ptr(),
        address(value),
        0 if value is None else DTYPE_CODE[value.dtype],
        address(scale_src),
        total.data_ptr(),
        slots,
        update_mode,
        coupled,
        index,
        queue(index),
    )
    return total
