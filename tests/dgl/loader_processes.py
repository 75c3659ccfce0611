"""Loaders with two worker processes beside a graph on a device; prints `right batches` or the error.

    python loader_processes.py CASE START DEVICE

A script, because spawned processes import the main module, and because a process that hangs can be ended.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch

import fastsparse_dgl
from fastsparse_dgl.compat import dgl

fn = dgl.function

if __name__ == "__main__" or "FASTSPARSE_NOT_IN_WORKERS" not in os.environ:
    fastsparse_dgl.enable()


def graph_of(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    graph = dgl.graph(tuple(torch.randint(30, (2, 120), generator=generator)), num_nodes=30)
    graph.ndata["h"] = torch.randn(30, 4, generator=generator)
    return graph


def neighbours(graph: Any, nodes: Any, start: str, device: str) -> None:
    """Blocks on the device, from a graph wherever it lies."""
    loader = dgl.dataloading.DataLoader(
        graph,
        nodes,
        dgl.dataloading.NeighborSampler([-1, -1], prefetch_node_feats=["h"]),
        batch_size=8,
        device=device,
        num_workers=2,
        multiprocessing_context=start,
    )
    whole = graph.cpu()
    whole.update_all(fn.copy_u("h", "m"), fn.sum("m", "sum"))
    seen = []
    for _, outputs, blocks in loader:
        blocks[0].update_all(fn.copy_u("h", "m"), fn.sum("m", "sum"))
        wanted = whole.ndata["sum"][blocks[0].dstdata[dgl.NID].cpu()]
        torch.testing.assert_close(blocks[0].dstdata["sum"].cpu(), wanted)
        assert blocks[0].device.type == device
        seen.append(outputs.cpu())
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(30))


def batches(graphs: list[Any], start: str, device: str) -> None:
    """Graphs in batches, moved to the device if they were not there."""
    wanted = torch.stack([graph.ndata["h"].sum(0).cpu() for graph in graphs])
    loader = dgl.dataloading.GraphDataLoader(
        graphs, batch_size=2, num_workers=2, multiprocessing_context=start
    )
    sums = [dgl.sum_nodes(batch.to(device), "h").cpu() for batch in loader]
    torch.testing.assert_close(torch.cat(sums), wanted)


def main(case: str, start: str, device: str) -> None:
    graphs = [graph_of(seed) for seed in range(4)]
    moved = [graph.to(device) for graph in graphs]
    for graph in moved:  # the parent has used the device
        graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "sum"))
        del graph.ndata["sum"]
    if case == "neighbours":
        neighbours(graphs[0], torch.arange(30), start, device)
    elif case == "neighbours of a graph on the device":
        neighbours(moved[0], torch.arange(30, device=device), start, device)
    else:
        batches(graphs if case == "graphs" else moved, start, device)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}")
    else:
        print("right batches")
