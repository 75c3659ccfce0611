"""Makes DGL's own blocks of sampled edges, and tests on which devices DGL supports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastsparse_core.sampling import Edges
from fastsparse_dgl import device_graph
from fastsparse_dgl.block_data import Frames, set_frames
from fastsparse_dgl.caching import remember
from fastsparse_dgl.compat import dgl


def dgl_block(
    edges: Mapping[Any, Edges],
    num_src: Mapping[str, int],
    num_dst: Mapping[str, int],
    device: torch.device,
    idtype: torch.dtype,
    frames: Frames,
) -> Any:
    """Makes DGL's block of sampled edges. The structure of a single edge type is cached for the layers.

    Args:
        edges: sampled edges by edge type.
        num_src: number of sources by node type.
        num_dst: number of destinations by node type.
        device: device of the edges.
        idtype: dtype of the block's ids.
        frames: data of nodes and edges.
    """
    # On the CPU, DGL's sums over edges need explicit edge ids, even if the ids are 0, 1, 2, ...
    numbered = device.type == "cpu" or device_graph.serves(device)
    data = {}
    for name, of_type in edges.items():
        source = of_type.edge_index[0].to(idtype)
        numbers: Any = torch.arange(source.numel(), dtype=idtype, device=device) if numbered else []
        data[name] = ("csc", (of_type.rowptr.to(idtype), source, numbers))
    block = dgl.create_block(data, dict(num_src), dict(num_dst), idtype=idtype, device=device)
    set_frames(block, frames)
    if len(edges) == 1:
        remember(block, device, next(iter(edges.values())).adjacency)
    return block


def dgl_can_hold(device: torch.device) -> bool:
    """True if DGL supports graphs on a device. PyPI's DGL needs `enable` for all devices except the CPU."""
    if device.type == "cpu" or device_graph.serves(device):
        return True
    if device not in _can_hold:
        try:
            dgl.graph(([], []), device=device)
            _can_hold[device] = True
        except dgl.DGLError:
            _can_hold[device] = False
    return _can_hold[device]


#: Device -> whether DGL itself supports it; `enable` and `disable` do not change this.
_can_hold: dict[torch.device, bool] = {}
