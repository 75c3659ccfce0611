"""DGL's graphs as arguments of captured steps: one that stays is read where it is."""

from __future__ import annotations

from typing import Any

from fastsparse_core.capturing.arguments import Argument, register, same
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.sampled_block import SampledBlock


def _graph(graph: Any) -> Argument:
    if graph.is_block or len(graph.ntypes) != 1 or graph.batch_size != 1:
        raise TypeError("DGL's blocks, batches and heterogeneous graphs are not padded")
    items = [frame[name] for frame in (graph.ndata, graph.edata) for name in sorted(frame)]
    return Argument(graph, (type(graph), same(graph)), items)


def _block(block: Any) -> Argument:
    raise TypeError("sampled blocks of DGL are not padded")


register(dgl.DGLGraph, _graph)
register(SampledBlock, _block)
