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

from fastsparse_core import Adjacency, CapturedBatches
from fastsparse_pyg import FastSAGEConv

from . import suite
from .blocks import Block, sample
from .common import add_common, attempt, progress, recorder, relative_error
from .timing import summarise

#: What the results of the implementations may differ by, in float32; "tf32": with dense products in TF32.
TOLERANCE = {"float32": 1e-5, "tf32": 5e-3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--graphs", nargs="+", default=["ogbn-products"], help=suite.NAMES)
    parser.add_argument("--seeds", type=int, default=1024, help="seed nodes per batch")
    parser.add_argument("--fanouts", nargs="+", type=int, default=[15, 10, 5], help="neighbours per hop")
    parser.add_argument("--width", type=int, default=128, help="width of features and layers")
    parser.add_argument("--batches", type=int, default=8, help="different batches")
    parser.add_argument("--rounds", type=int, default=5, help="how often each batch is timed")
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=list(TOLERANCE),
        help="by default all on the GPU, float32 on the CPU",
    )


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    device = torch.device(options.device)
    out = recorder("minibatch", options)
    out.note(
        "a step is the structures of all blocks, forward and backward to the weights, by the"
        " clock from a finished device to a finished device; sampling, gathering features and the optimiser"
        " are not in it; parts are timed one by one with waiting between them, so they add up to more than"
        " the step"
    )
    if device.type == "cuda":
        out.note(
            "with CapturedBatches a step compresses and checks the edges in memory set aside, then replays"
            " one CUDA graph of forward and backward"
        )
    for name in progress(options.graphs, "minibatch"):
        graph = suite.load(name, device)
        generator = torch.Generator(device=device).manual_seed(0)
        batches = [
            Batch.draw(graph, options.seeds, options.fanouts, options.width, generator)
            for _ in range(options.batches)
        ]
        del graph
        shared = {
            "graph": name,
            "edges": round(sum(batch.num_edges for batch in batches) / len(batches)),
            "sources": round(sum(batch.x.size(0) for batch in batches) / len(batches)),
            "width": options.width,
        }
        default = list(TOLERANCE) if device.type == "cuda" else ["float32"]
        for precision in options.precisions or default:
            _measure(out, shared, batches, precision, options, device)
    return out.path


def _measure(
    out: Any,
    shared: dict[str, Any],
    batches: Sequence[Batch],
    precision: str,
    options: argparse.Namespace,
    device: torch.device,
) -> None:
    """Adds the cells of one precision."""
    torch.manual_seed(0)
    models = _models(options.width, len(options.fanouts), device)
    reference = models["PyG SAGEConv"]
    for model in models.values():
        model.share(reference)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        checks = {
            key: attempt(partial(_check, model, reference, batches, TOLERANCE[precision]))
            for key, model in models.items()
        }
        sound = {key: model for key, model in models.items() if checks[key]["status"] == "ok"}
        times = _alternating(sound, batches, options.rounds, device)
        for key, model in models.items():
            cell: dict[str, Any] = dict(checks[key])
            if key in sound:
                cell |= summarise(times[key], "wall clock, alternating, new structures").as_cell()
                cell |= {"launches": _launches(model, batches[0], device)}
                cell |= _parts(model, batches, device)
            out.add(**shared, precision=precision, implementation=key, **cell)
    finally:
        torch.set_float32_matmul_precision(before)


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

    def warm(self, batches: Sequence[Batch]) -> None:
        """What has to happen once before steps are timed."""

    def place(self, batch: Batch) -> Tensor:
        """The batch's features, where the step wants them."""
        return batch.x

    def share(self, other: Model) -> None:
        """Takes the weights of another model, which may have PyG's names for them."""
        state = other.layers.state_dict()
        if self.layers.state_dict().keys() != state.keys():
            state = {_dgl_name(key): value for key, value in state.items()}
        self.layers.load_state_dict(state)

    def forward(self, structures: Sequence[Any], sizes: Sequence[int], x: Tensor) -> Tensor:
        """The layers' result.

        Args:
            structures: of every level.
            sizes: numbers of their destinations.
            x: features.
        """
        for place, (layer, structure, num_dst) in enumerate(zip(self.layers, structures, sizes, strict=True)):
            x = self.call(layer, structure, F.relu(x) if place else x, num_dst)
        return x

    def step(self, structures: Sequence[Any], batch: Batch, x: Tensor) -> Tensor:
        """Forward and backward; the result."""
        return self._train(structures, [block.num_dst for block in batch.blocks], x, batch.gradient)

    def _train(self, structures: Sequence[Any], sizes: Sequence[int], x: Tensor, gradient: Tensor) -> Tensor:
        for parameter in self.layers.parameters():
            parameter.grad = None
        out = self.forward(structures, sizes, x)
        out.backward(gradient)
        return out.detach()

    def gradients(self) -> dict[str, Tensor]:
        """By PyG's names."""
        grads = {name: p.grad.double() for name, p in self.layers.named_parameters() if p.grad is not None}
        return {_pyg_name(name): grad for name, grad in grads.items()}


class CapturedModel(Model):
    """The same layers in a step that `CapturedBatches` records."""

    def __init__(self, model: Model) -> None:
        super().__init__(list(model.layers), model.fresh, model.call)
        self.batches = CapturedBatches(self._padded_step, fill={"x": 0.0})

    def _padded_step(self, structures: Sequence[Adjacency], x: Tensor, gradient: Tensor) -> Tensor:
        return self._train(structures, [structure.num_dst for structure in structures], x, gradient)

    def warm(self, batches: Sequence[Batch]) -> None:
        for _ in range(3):
            for batch in batches:
                self.step([self.fresh(block) for block in batch.blocks], batch, self.place(batch))
        if batches[0].x.is_cuda and not self.batches.is_recorded:
            raise RuntimeError("the step was not recorded: expected more batches")

    def place(self, batch: Batch) -> Tensor:
        return self.batches.gather("x", batch.x, torch.arange(batch.x.size(0), device=batch.x.device))

    def step(self, structures: Sequence[Any], batch: Batch, x: Tensor) -> Tensor:
        edges = [
            (row, col, (block.num_dst, block.num_src))
            for (col, row), block in zip(map(Tensor.unbind, structures), batch.blocks, strict=True)
        ]
        return self.batches(edges, x=x, gradient=batch.gradient)


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
    if device.type == "cuda":
        models["FastSAGEConv (PyG), CapturedBatches"] = CapturedModel(pyg(FastSAGEConv))
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


def _check(model: Model, reference: Model, batches: Sequence[Batch], tolerance: float) -> dict[str, Any]:
    def results(of: Model) -> list[Tensor]:
        batch = batches[0]
        out = of.step([of.fresh(block) for block in batch.blocks], batch, of.place(batch)).double()
        return [out, *(grad for _, grad in sorted(of.gradients().items()))]

    model.warm(batches)
    error = max(map(relative_error, results(model), results(reference)))
    if error > tolerance:
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
                structures, x = [model.fresh(block) for block in batch.blocks], model.place(batch)
                _wait(device)
                begin = time.perf_counter()
                model.step(structures, batch, x)
                _wait(device)
                if turn:
                    times[key].append((time.perf_counter() - begin) * 1e3)
    return times


def _launches(model: Model, batch: Batch, device: torch.device) -> int | None:
    """Kernels, copies and fills that one step gives the device; None without a device."""
    if device.type != "cuda":
        return None
    structures, x = [model.fresh(block) for block in batch.blocks], model.place(batch)
    _wait(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        model.step(structures, batch, x)
        _wait(device)
    return sum(
        event.count
        for event in trace.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )


def _parts(model: Model, batches: Sequence[Batch], device: torch.device) -> dict[str, float]:
    """Medians of structure (where the layer makes one), forward and backward, each waited for."""
    if isinstance(model, CapturedModel):
        return {}  # one graph
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
        sizes = [block.num_dst for block in batch.blocks]
        out = timed("forward_ms", partial(model.forward, fresh, sizes, batch.x))
        timed("backward_ms", partial(out.backward, batch.gradient))
    return {part: round(statistics.median(values), 4) for part, values in parts.items() if values}
