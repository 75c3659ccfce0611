"""Principal neighbourhood aggregation, forward and backward: PyG's PNAConv and the drop-in.

Four aggregators (mean, min, max, std) and three scalers (identity, amplification, attenuation), one tower,
with and without features of edges, all gradients. One large graph whose structure is kept, and batches of 512
molecules of about 25 atoms, of which every step sees a new one: its structure is built in the step.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from . import suite
from .common import DTYPES, add_common, attempt, progress, recorder, release
from .record import Recorder
from .steps import measure
from .timing import step_time

AGGREGATORS = ["mean", "min", "max", "std"]
SCALERS = ["identity", "amplification", "attenuation"]
FEATURES = 8
MOLECULES = 512
CASES = ("ogbn-arxiv", "molecules")
#: A result may differ from the original's by this much: its variance is a difference of squares.
TOLERANCE = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 0.2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, budget_ms=1000.0)
    # Not `graphs`, which are the suite's.
    parser.add_argument("--graphs", dest="drawn", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--width", type=int, default=128, help="features in and out")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(TOLERANCE), default=["float32"])


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("pna", options)
    out.note(f"a step is forward and backward of one layer; edges have {FEATURES} features or none")
    out.note(f"molecules: {MOLECULES} in a batch, whose structure is new in every step")
    device = torch.device(options.device)
    cases = itertools.product(options.drawn, options.dtypes, (0, FEATURES))
    for name, dtype, features in progress(list(cases), "pna"):
        _run_case(name, dtype, features, options, device, out)
        release()
    return out.path


def draw_edges(name: str, device: torch.device, molecules: int = MOLECULES) -> tuple[int, Tensor]:
    """Number of nodes and edges (2, E) of one of `CASES`."""
    if name != "molecules":
        graph = suite.load(name, device)
        return graph.num_nodes, torch.stack([graph.col.long(), graph.row().long()])
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


def _run_case(
    name: str, dtype: str, features: int, options: argparse.Namespace, device: torch.device, out: Recorder
) -> None:
    from torch_geometric.nn import PNAConv

    from fastsparse_pyg import FastPNAConv

    torch.manual_seed(0)
    num_nodes, edge_index = draw_edges(name, device)
    degree = torch.bincount(torch.bincount(edge_index[1], minlength=num_nodes)).cpu()
    width, precision = options.width, DTYPES[dtype]
    layers: dict[str, nn.Module] = {
        title: kind(width, width, AGGREGATORS, SCALERS, deg=degree, edge_dim=features or None).to(
            device, precision
        )
        for title, kind in (("pyg", PNAConv), ("fastsparse", FastPNAConv))
    }
    layers["fastsparse"].load_state_dict(layers["pyg"].state_dict())
    x = torch.randn(num_nodes, width, device=device).to(precision).requires_grad_()
    edges = None
    if features:
        edges = torch.randn(edge_index.size(1), features, device=device).to(precision).requires_grad_()
    expected = None
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

        cell = attempt(
            partial(measure, step, expected, TOLERANCE[dtype], device, options.budget_ms, step_time)
        )
        result = cell.pop("result", None)
        expected = result if expected is None else expected
        out.add(
            graph=name,
            nodes=num_nodes,
            edges=edge_index.size(1),
            width=width,
            features=features,
            dtype=dtype,
            implementation=title,
            **cell,
        )
        release()
