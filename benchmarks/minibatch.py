"""Graphs that are seen once: a GraphSAGE step on sampled blocks, structure, forward and backward.

Every repetition gives every implementation tensors that it has not seen, so that nothing can be remembered.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch_geometric.nn import SAGEConv

from fastsparse_core import Adjacency
from fastsparse_pyg import FastSAGEConv

from . import suite
from .blocks import Block, sample
from .common import add_common, attempt, progress, recorder, relative_error
from .timing import summarise

#: What the results of the implementations may differ by, in float32.
TOLERANCE = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--graphs", nargs="+", default=["ogbn-products"], help=suite.NAMES)
    parser.add_argument("--seeds", type=int, default=1024, help="seed nodes per batch")
    parser.add_argument("--fanouts", nargs="+", type=int, default=[15, 10, 5], help="neighbours per hop")
    parser.add_argument("--width", type=int, default=128, help="width of features and layers")
    parser.add_argument("--batches", type=int, default=8, help="different batches")
    parser.add_argument("--rounds", type=int, default=5, help="how often each batch is timed")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    device = torch.device(options.device)
    out = recorder("minibatch", options)
    out.note(
        "a step is the structures of all blocks, forward and backward to the weights, in float32, by the"
        " clock from a finished device to a finished device; sampling, gathering features and the optimiser"
        " are not in it; parts are timed one by one with waiting between them, so they add up to more than"
        " the step"
    )
    for name in progress(options.graphs, "minibatch"):
        graph = suite.load(name, device)
        generator = torch.Generator(device=device).manual_seed(0)
        batches = [
            Batch.draw(graph, options.seeds, options.fanouts, options.width, generator)
            for _ in range(options.batches)
        ]
        del graph
        torch.manual_seed(0)
        models = _models(options.width, len(options.fanouts), device)
        reference = models["PyG SAGEConv"]
        for model in models.values():
            model.share(reference)
        shared = {
            "graph": name,
            "edges": round(sum(batch.num_edges for batch in batches) / len(batches)),
            "sources": round(sum(batch.x.size(0) for batch in batches) / len(batches)),
            "width": options.width,
        }
        checks = {
            key: attempt(partial(_check, model, reference, batches[0])) for key, model in models.items()
        }
        sound = {key: model for key, model in models.items() if checks[key]["status"] == "ok"}
        times = _alternating(sound, batches, options.rounds, device)
        for key in models:
            cell: dict[str, Any] = dict(checks[key])
            if key in sound:
                cell |= summarise(times[key], "wall clock, alternating, new structures").as_cell()
                cell |= {"launches": _launches(models[key], batches[0], device)}
                cell |= _parts(models[key], batches, device)
            out.add(**shared, implementation=key, **cell)
    return out.path


class Batch:
    """The blocks of one batch, features of its first sources, and a gradient for its seeds."""

    def __init__(self, blocks: list[Block], x: Tensor, gradient: Tensor) -> None:
        self.blocks = blocks
        self.x = x
        self.gradient = gradient
        self.num_edges = sum(block.edge_index.size(1) for block in blocks)

    @classmethod
    def draw(
        cls,
        graph: suite.Graph,
        num_seeds: int,
        fanouts: Sequence[int],
        width: int,
        generator: torch.Generator,
    ) -> Batch:
        """A batch of seeds drawn evenly."""
        device = graph.col.device
        order = torch.randperm(graph.num_nodes, device=device, generator=generator)
        blocks, nodes = sample(graph, order[:num_seeds], fanouts, generator)
        x = torch.randn(nodes.numel(), width, device=device, generator=generator)
        return cls(blocks, x, torch.randn(blocks[-1].num_dst, width, device=device, generator=generator))


class Model:
    """GraphSAGE on blocks: layers, how they are called, and how they get a structure nobody has seen.

    Args:
        layers: the convolutions.
        fresh: makes what `call` takes of a block; not timed.
        call: ``call(layer, structure, x, num_dst)``.
        structure: makes the structure that the layer makes of ``fresh``, to time that alone; None: the layer
            makes none.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        fresh: Callable[[Block], Any],
        call: Callable[[nn.Module, Any, Tensor, int], Tensor],
        structure: Callable[[Any, Block], Any] | None = None,
    ) -> None:
        self.layers = nn.ModuleList(layers)
        self.fresh, self.call, self.structure = fresh, call, structure

    def share(self, other: Model) -> None:
        """Takes the weights of another model, which may have PyG's names for them."""
        state = other.layers.state_dict()
        if self.layers.state_dict().keys() != state.keys():
            state = {_dgl_name(key): value for key, value in state.items()}
        self.layers.load_state_dict(state)

    def forward(self, structures: Sequence[Any], batch: Batch) -> Tensor:
        x = batch.x
        for place, (layer, structure, block) in enumerate(
            zip(self.layers, structures, batch.blocks, strict=True)
        ):
            x = self.call(layer, structure, F.relu(x) if place else x, block.num_dst)
        return x

    def step(self, structures: Sequence[Any], batch: Batch) -> Tensor:
        """Forward and backward; the result."""
        for parameter in self.layers.parameters():
            parameter.grad = None
        out = self.forward(structures, batch)
        out.backward(batch.gradient)
        return out.detach()

    def gradients(self) -> dict[str, Tensor]:
        """By PyG's names."""
        grads = {name: p.grad.double() for name, p in self.layers.named_parameters() if p.grad is not None}
        return {_pyg_name(name): grad for name, grad in grads.items()}


#: PyG's names of SAGEConv's parameters -> DGL's
_NAMES = {"lin_l.weight": "fc_neigh.weight", "lin_l.bias": "fc_self.bias", "lin_r.weight": "fc_self.weight"}


def _dgl_name(name: str) -> str:
    place, _, rest = name.partition(".")
    return f"{place}.{_NAMES[rest]}"


def _pyg_name(name: str) -> str:
    place, _, rest = name.partition(".")
    back = {dgl: pyg for pyg, dgl in _NAMES.items()}
    return f"{place}.{back.get(rest, rest)}"


def _models(width: int, depth: int, device: torch.device) -> dict[str, Model]:
    def pyg(cls: type[nn.Module], structure: Any = None) -> Model:
        layers = [cls(width, width).to(device) for _ in range(depth)]
        return Model(layers, lambda block: block.edge_index.clone(), _call_pyg, structure)

    models = {"FastSAGEConv (PyG)": pyg(FastSAGEConv, _adjacency), "PyG SAGEConv": pyg(SAGEConv)}
    if device.type == "cpu":  # the wheel of DGL knows no CUDA
        try:
            dgl_nn = importlib.import_module("fastsparse_dgl.compat").dgl.nn
            fast = importlib.import_module("fastsparse_dgl")
        except ImportError:
            return models
        for key, cls in (("FastSAGEConv (DGL)", fast.FastSAGEConv), ("DGL SAGEConv", dgl_nn.SAGEConv)):
            layers = [cls(width, width, "mean") for _ in range(depth)]
            models[key] = Model(layers, _dgl_block, lambda layer, graph, x, _: layer(graph, x))
    return models


def _call_pyg(layer: nn.Module, structure: Any, x: Tensor, num_dst: int) -> Tensor:
    return layer((x, x[:num_dst]), structure)


def _adjacency(edge_index: Tensor, block: Block) -> Adjacency:
    return Adjacency.from_coo(edge_index[1], edge_index[0], (block.num_dst, block.num_src))


def _dgl_block(block: Block) -> Any:
    dgl = importlib.import_module("fastsparse_dgl.compat").dgl
    return dgl.create_block(tuple(block.edge_index), num_src_nodes=block.num_src, num_dst_nodes=block.num_dst)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check(model: Model, reference: Model, batch: Batch) -> dict[str, Any]:
    def results(of: Model) -> list[Tensor]:
        out = of.step([of.fresh(block) for block in batch.blocks], batch).double()
        return [out, *(grad for _, grad in sorted(of.gradients().items()))]

    error = max(map(relative_error, results(model), results(reference)))
    if error > TOLERANCE:
        return {"status": f"wrong: relative difference {error:.1e}", "error": min(error, 1e300)}
    return {"error": error}


def _alternating(
    models: dict[str, Model], batches: Sequence[Batch], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of every step, all models in turn on every batch; one round more, first, to warm up."""
    times: dict[str, list[float]] = {key: [] for key in models}
    for turn in range(rounds + 1):
        for batch in batches:
            for key, model in models.items():
                structures = [model.fresh(block) for block in batch.blocks]
                _wait(device)
                begin = time.perf_counter()
                model.step(structures, batch)
                _wait(device)
                if turn:
                    times[key].append((time.perf_counter() - begin) * 1e3)
    return times


def _launches(model: Model, batch: Batch, device: torch.device) -> int | None:
    """Kernels, copies and fills that one step gives the device; None without a device."""
    if device.type != "cuda":
        return None
    structures = [model.fresh(block) for block in batch.blocks]
    _wait(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        model.step(structures, batch)
        _wait(device)
    return sum(
        event.count
        for event in trace.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )


def _parts(model: Model, batches: Sequence[Batch], device: torch.device) -> dict[str, float]:
    """Medians of structure (where the layer makes one), forward and backward, each waited for."""
    parts: dict[str, list[float]] = {"structure_ms": [], "forward_ms": [], "backward_ms": []}

    def timed(part: str, job: Callable[[], Any]) -> Any:
        _wait(device)
        begin = time.perf_counter()
        result = job()
        _wait(device)
        parts[part].append((time.perf_counter() - begin) * 1e3)
        return result

    for batch in batches:
        fresh = [model.fresh(block) for block in batch.blocks]
        if model.structure is not None:
            make = model.structure
            pairs = list(zip(fresh, batch.blocks, strict=True))
            fresh = timed("structure_ms", lambda make=make, pairs=pairs: [make(*pair) for pair in pairs])
        out = timed("forward_ms", partial(model.forward, fresh, batch))
        timed("backward_ms", partial(out.backward, batch.gradient))
    return {part: round(statistics.median(values), 4) for part, values in parts.items() if values}
