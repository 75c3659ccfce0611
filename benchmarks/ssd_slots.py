"""Launches of `kernels/cuda/ssd_slots.cu`: MaxK-GNN's and the decoupled SSD paper's dataflows, on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import _C, Adjacency
from fastsparse_core.device import place_of
from fastsparse_core.formats import lengths


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
    """The papers' own dataflows with float sums: what ``"decoupled"`` is measured against.

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
    device, queue = place_of(values.device)
    _C.ssd_slots(
        structure=adj.edge_group_structure(lengths.SHORT_EDGE_GROUP),
        width=width,
        values=values,
        ids=ids,
        value=value,
        scale_src=scale_src,
        sum=total,
        slots=slots,
        update_mode=update_mode,
        coupled=coupled,
        device=device,
        queue=queue,
    )
    return total
