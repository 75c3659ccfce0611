"""Loaders with one worker process each, while graphs are on a device; prints a line for each case.

    python loader_processes.py START DEVICE

A script, because spawned processes import the main module, and because a process that hangs can be ended.
Workers never touch CUDA: what is sent to them is on the CPU, or is a structure alone.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fastsparse_dgl
from fastsparse_dgl.compat import dgl

fn = dgl.function
#: Seconds after which a loader must have its next batch, and after which the script ends itself. They only
#: end processes that hang: on a busy machine, a worker takes minutes to start.
BATCH_LIMIT, LIMIT = 1500, 1700

if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT, exit=True)
if __name__ == "__main__" or "FASTSPARSE_NOT_IN_WORKERS" not in os.environ:
    if sys.argv[2:] == ["meta"]:  # replaces a GPU on machines without one; needs no memory
        dgl.ndarray.DGLContext.STR2MASK.setdefault("meta", 2)
        fastsparse_dgl.enable(_devices=("meta",))
    else:
        fastsparse_dgl.enable()


def graph_of(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    graph = dgl.graph(tuple(torch.randint(30, (2, 120), generator=generator)), num_nodes=30)
    graph.ndata["h"] = torch.randn(30, 4, generator=generator)
    return graph


def neighbours(start: str, device: str) -> Iterator[str]:
    """Blocks on the device, of a graph on the CPU."""
    whole = graph_of(0)
    loader = dgl.dataloading.DataLoader(
        whole,
        torch.arange(30),
        dgl.dataloading.NeighborSampler([-1, -1], prefetch_node_feats=["h"]),
        batch_size=8,
        device=device,
        num_workers=1,
        multiprocessing_context=start,
        timeout=BATCH_LIMIT,
    )
    batches = iter(loader)
    yield "started"
    whole.update_all(fn.copy_u("h", "m"), fn.sum("m", "sum"))
    seen = []
    for _, outputs, blocks in batches:
        blocks[0].update_all(fn.copy_u("h", "m"), fn.sum("m", "sum"))
        wanted = whole.ndata["sum"][blocks[0].dstdata[dgl.NID].cpu()]
        torch.testing.assert_close(blocks[0].dstdata["sum"].cpu(), wanted)
        assert blocks[0].device.type == device
        seen.append(outputs.cpu())
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(30))
    yield "neighbours: right batches"


def graphs(start: str, device: str) -> Iterator[str]:
    """Graphs in batches of two; the first ones are on the CPU, the last ones on the device."""
    host = [graph_of(seed) for seed in range(4)]
    last = [in_use(graph_of(seed), device) for seed in range(2)] if device != "cpu" else []
    wanted = torch.stack([graph.ndata["h"].sum(0) for graph in host])
    loader = dgl.dataloading.GraphDataLoader(
        [*host, *last], batch_size=2, num_workers=1, multiprocessing_context=start, timeout=BATCH_LIMIT
    )
    batches = iter(loader)
    yield "started"
    place = "cpu" if device == "meta" else device
    sums = [dgl.sum_nodes(next(batches).to(place), "h").cpu() for _ in range(2)]
    torch.testing.assert_close(torch.cat(sums), wanted)
    yield "graphs: right batches"
    yield from ("graphs on the device: a batch" for _ in batches)


def in_use(graph: Any, device: str) -> Any:
    """The structure on the device; where there is memory this process has used it."""
    graph.ndata.pop("h")
    if device == "meta":
        graph._graph = fastsparse_dgl.device_graph.place(graph._graph, torch.device(device))
        return graph
    graph = graph.to(device)
    graph.ndata["x"] = torch.ones(30, 4, device=device)
    graph.update_all(fn.copy_u("x", "m"), fn.sum("m", "x"))
    graph.ndata.pop("x")
    return graph


def main(start: str, device: str) -> None:
    cases: list[Callable[[str, str], Iterator[str]]] = [graphs]
    if device != "meta":
        cases.append(neighbours)
    running = [case(start, device) for case in cases]
    for case in running:  # so that the workers start at the same time
        assert next(case) == "started"
    for case in running:
        try:
            for line in case:
                print(line, flush=True)
        except Exception as error:
            traceback.print_exc()
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
