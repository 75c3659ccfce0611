"""Principal neighbourhood aggregation, forward and backward: PyG's PNAConv and the drop-in.

Four aggregators (mean, min, max, std) and three scalers (identity, amplification, attenuation), one tower,
with and without features of edges, all gradients. One large graph whose structure is kept, and batches of 512
molecules of about 25 atoms. Every step gets a new batch, so it also builds the batch's structure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from . import suite
from .runner import DTYPES, Benchmark, Job, Run, option, release
from .timing import step_time

AGGREGATORS = ["mean", "min", "max", "std"]
SCALERS = ["identity", "amplification", "attenuation"]
FEATURES = 8
MOLECULES = 512
CASES = ("ogbn-arxiv", "molecules")
#: Accepted difference from PyG's result, whose variance is a difference of squares.
TOLERANCE = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 0.2}


def draw_edges(name: str, device: torch.device, molecules: int = MOLECULES) -> tuple[int, Tensor]:
    """Number of nodes and edges (2, E) of one of `CASES`."""
    if name != "molecules":
        graph = suite.load(name, device)
        return graph.num_nodes, graph.edge_index()
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(15, 36, (molecules,), generator=generator)
    start = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    atom = torch.arange(int(sizes.sum()))
    place = atom - start
    # A tree whose atoms are bound to one of the three before them, and a ring in every seventh place.
    parent = atom - 1 - (torch.rand(atom.numel(), generator=generator) * place.clamp(max=3)).long()
    child = place > 0
    ring = (place >= 5) & (place % 7 == 0)
    bonds = torch.cat(
        [torch.stack([atom[child], parent[child]]), torch.stack([atom[ring], atom[ring] - 5])], 1
    )
    return atom.numel(), torch.cat([bonds, bonds.flip(0)], 1).to(device)


def cells(run: Run, case: tuple[str, str, int]) -> Iterator[Job]:
    from .pyg_layers import original_and_drop_in

    name, dtype, features = case
    torch.manual_seed(0)
    num_nodes, edge_index = draw_edges(name, run.device)
    degree = torch.bincount(torch.bincount(edge_index[1], minlength=num_nodes)).cpu()
    width, precision = run.options.width, DTYPES[dtype]
    shape = (width, width, AGGREGATORS, SCALERS)
    named = {"deg": degree, "edge_dim": features or None}
    layers = original_and_drop_in("PNAConv", *shape, device=run.device, dtype=precision, **named)
    x = torch.randn(num_nodes, width, device=run.device).to(precision).requires_grad_()
    edges = None
    if features:
        edges = torch.randn(edge_index.size(1), features, device=run.device).to(precision).requires_grad_()
    expected: list[Tensor] = []
    for title, layer in layers.items():

        def step(layer: nn.Module = layer) -> Tensor:
            given = edge_index.clone() if name == "molecules" else edge_index
            result: Tensor = layer(x, given, edges)
            result.sum().backward()
            x.grad = None
            if edges is not None:
                edges.grad = None
            layer.zero_grad()
            return result

        cell = {"graph": name, "nodes": num_nodes, "edges": edge_index.size(1), "width": width}
        cell |= {"features": features, "dtype": dtype, "implementation": title}
        yield cell, run.compared(step, expected, TOLERANCE[dtype], step_time)
        release()


BENCHMARK = Benchmark(
    "pna",
    cells,
    lambda options: itertools.product(options.drawn, options.dtypes, (0, FEATURES)),
    budget_ms=1000.0,
    options={
        "graphs": option(choices=CASES, dest="drawn"),
        "width": option(128, "features in and out"),
        "dtypes": option(["float32"], choices=tuple(TOLERANCE)),
    },
    notes=(
        f"a step is forward and backward of one layer; edges have {FEATURES} features or none",
        f"molecules: {MOLECULES} in a batch, whose structure is new in every step",
    ),
)
