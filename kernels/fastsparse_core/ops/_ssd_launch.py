"""Launches of ssd's kernels, below PyTorch's dispatcher: arguments have been checked."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import device_index, queue
from fastsparse_core.formats import lengths
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._eager import below_autograd
from fastsparse_core.ops._facts import facts_of
from fastsparse_core.ops._handles import structure


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
    chosen = policy.ssd_algorithm(algorithm, values.device, values.dtype, values.size(1), width)
    if chosen == "densify":
        with below_autograd():
            dense = torch.ops.fastsparse.cbsr_to_dense.default(values, ids, width)
            return torch.ops.fastsparse.spmm.default(
                dense, value, scale_dst, scale_src, bias, num_dst, adjacency, transpose, "auto", False
            )
    index = device_index(values.device)
    longest = lengths.edge_group_length(adj.num_edges, adj.num_dst, adj.gpu)
    groups = adj.edge_groups(longest) if index >= 0 else None
    partial = None
    if groups is not None and groups.num_slots:
        partial = values.new_empty(groups.num_slots, width, dtype=accumulation_dtype(values.dtype))
    packed = None
    if index >= 0 and policy.packs_ssd_rows(facts_of(adj), adj.gpu, values.dtype, values.size(1), width):
        packed = ids.new_empty(ids.shape, dtype=torch.int32)
    num_long, few_entries = 0, False
    if groups is not None:
        num_long, few_entries = policy.long_edge_groups(groups, adj.num_edges, values.size(1), adj.gpu)
    _C.ssd(
        structure=adj.edge_group_structure(longest),
        width=width,
        values=values,
        ids=ids,
        value=value,
        scale_dst=scale_dst,
        scale_src=scale_src,
        bias=bias,
        out=out,
        partial=partial,
        packed=packed,
        longest_group=0 if groups is None else groups.longest,
        num_long=num_long,
        few_entries=few_entries,
        device=index,
        queue=queue(index),
    )
    return out
