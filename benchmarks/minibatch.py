"""Graphs that are seen once: a GraphSAGE step on sampled blocks, structure, forward and backward.

Every repetition uses new tensors, so that no implementation can use a cache.
"""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

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
from .runner import Benchmark, Cell, Run, attempt, option, relative_error, synchronise
from .timing import summarise

#: The implementation whose rounding error is the reference.
_ORIGINAL = "PyG SAGEConv"


class Precision(NamedTuple):
    """Dtypes and precision of a step.

    Attributes:
        dtype: of features and weights.
        tolerance: the relative distance from float64 that is accepted whatever PyG's own is.
        matmul: ``torch.set_float32_matmul_precision`` of dense products.
        amp: dtype of autocast, in the forward pass alone; None: none.
    """

    dtype: torch.dtype
    tolerance: float
    matmul: str = "highest"
    amp: torch.dtype | None = None

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return nullcontext() if self.amp is None else torch.autocast(device.type, self.amp)


PRECISIONS = {
    "float32": Precision(torch.float32, 1e-5),
    "tf32": Precision(torch.float32, 5e-3, matmul="high"),
    "float16": Precision(torch.float16, 1e-3),
    "bfloat16": Precision(torch.bfloat16, 8e-3),
    "bf16-amp": Precision(torch.float32, 8e-3, amp=torch.bfloat16),
}
#: The reference for all others.
_EXACT = Precision(torch.float64, 0.0)


def cells(run: Run, name: str) -> Iterator[Cell]:
    """All cells of one graph."""
    graph, options = suite.load(name, run.device), run.options
    generator = torch.Generator(device=run.device).manual_seed(0)
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
    default = list(PRECISIONS) if run.device.type == "cuda" else ["float32"]
    for precision in options.precisions or default:
        for implementation, cell in _measure(run, batches, PRECISIONS[precision]).items():
            yield {**shared, "precision": precision, "implementation": implementation, **cell}


def _measure(run: Run, batches: Sequence[Batch], precision: Precision) -> dict[str, Cell]:
    """The cells of one precision, by implementation; the batches are in float32."""
    options, device = run.options, run.device
    batches = [batch.to(precision.dtype, precision.amp or precision.dtype) for batch in batches]
    torch.manual_seed(0)
    models = _models(options.width, len(options.fanouts), device, precision)
    for model in models.values():
        model.share(models[_ORIGINAL])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision.matmul)
    try:
        cells = _checks(models, batches, precision)
        sound = {key: model for key, model in models.items() if cells[key]["status"] == "ok"}
        times = _alternating(sound, batches, options.rounds, device)
        for key, model in sound.items():
            cells[key] |= summarise(times[key], "wall clock, alternating, new structures").as_cell()
            cells[key] |= {"launches": _launches(model, batches[0], device)}
            cells[key] |= _parts(model, batches, device)
        return cells
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

    def to(self, dtype: torch.dtype, result: torch.dtype) -> Batch:
        """The same batch with other features, and with a gradient for results of the dtype ``result``."""
        return Batch(self.blocks, self.x.to(dtype), self.gradient.to(result))


class Model:
    """GraphSAGE on blocks: layers, how they are called, and how they get a new structure.

    Args:
        layers: the convolutions.
        fresh: makes what `call` takes of a block; not timed.
        call: ``call(layer, structure, x, num_dst)``.
        precision: of the step; its dtype becomes that of the layers.
        structure: makes the structure that the layer makes of ``fresh``, to time that alone; None: the layer
            makes none.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        fresh: Callable[[Block], Any],
        call: Callable[[nn.Module, Any, Tensor, int], Tensor],
        precision: Precision,
        structure: Callable[[Any, Block], Any] | None = None,
    ) -> None:
        self.layers = nn.ModuleList(layers).to(precision.dtype)
        self.fresh, self.call = fresh, call
        self.precision, self.structure = precision, structure
        self.activation: Callable[[Tensor], Tensor] = F.relu

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
        levels = zip(self.layers, structures, sizes, strict=True)
        with self.precision.autocast(x.device):
            for place, (layer, structure, num_dst) in enumerate(levels):
                x = self.call(layer, structure, self.activation(x) if place else x, num_dst)
        return x

    def step(self, structures: Sequence[Any], batch: Batch, x: Tensor) -> Tensor:
        """Forward and backward; the result."""
        for parameter in self.layers.parameters():
            parameter.grad = None
        out = self.forward(structures, [block.num_dst for block in batch.blocks], x)
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


def _models(width: int, depth: int, device: torch.device, precision: Precision) -> dict[str, Model]:
    shape = width, depth, device, precision
    models = {
        "FastSAGEConv (PyG)": _pyg_model(FastSAGEConv, *shape, _adjacency),
        _ORIGINAL: _pyg_model(SAGEConv, *shape),
    }
    if device.type == "cpu":  # DGL's wheel is built without CUDA
        try:
            dgl_nn = importlib.import_module("fastsparse_dgl.compat").dgl.nn
            fast = importlib.import_module("fastsparse_dgl")
        except ImportError:
            return models
        for key, cls in (("FastSAGEConv (DGL)", fast.FastSAGEConv), ("DGL SAGEConv", dgl_nn.SAGEConv)):
            layers = [cls(width, width, "mean") for _ in range(depth)]
            models[key] = Model(layers, _dgl_block, _call_dgl, precision)
    return models


def _pyg_model(
    cls: type[nn.Module],
    width: int,
    depth: int,
    device: torch.device,
    precision: Precision,
    structure: Callable[[Any, Block], Any] | None = None,
) -> Model:
    layers = [cls(width, width).to(device) for _ in range(depth)]
    return Model(layers, lambda block: block.edge_index.clone(), _call_pyg, precision, structure)


def _call_pyg(layer: nn.Module, structure: Any, x: Tensor, num_dst: int) -> Tensor:
    return layer((x, x[:num_dst]), structure)


def _call_dgl(layer: nn.Module, graph: Any, x: Tensor, _: int) -> Tensor:
    try:
        return layer(graph, x)
    except importlib.import_module("fastsparse_dgl.compat").dgl.DGLError as error:
        raise TypeError(str(error)) from error  # `attempt` does not handle DGL's errors


def _adjacency(edge_index: Tensor, block: Block) -> Adjacency:
    return Adjacency.from_coo(edge_index[1], edge_index[0], (block.num_dst, block.num_src))


def _dgl_block(block: Block) -> Any:
    dgl = importlib.import_module("fastsparse_dgl.compat").dgl
    return dgl.create_block(tuple(block.edge_index), num_src_nodes=block.num_src, num_dst_nodes=block.num_dst)


def _checks(
    models: dict[str, Model], batches: Sequence[Batch], precision: Precision
) -> dict[str, dict[str, Any]]:
    """Status and error of every implementation, judged as the record's note says.

    With SiLU for ReLU: where rounding turns the sign of one number, ReLU lets its whole gradient through, or
    none of it, and a single one outweighs the rounding of all others.
    """
    batch = batches[0]
    for model in models.values():
        model.activation = F.silu
    exact = _pyg_model(SAGEConv, batch.x.size(1), len(batch.blocks), batch.x.device, _EXACT)
    exact.share(models[_ORIGINAL])
    exact.activation = F.silu
    expected = _results(exact, batch.to(_EXACT.dtype, _EXACT.dtype))

    def error(model: Model) -> dict[str, Any]:
        return {"error": max(map(relative_error, _results(model, batch), expected))}

    checks = {key: attempt(partial(error, model)) for key, model in models.items()}
    twice = 2 * checks[_ORIGINAL].get("error", 0.0)
    allowed = max(precision.tolerance, twice if math.isfinite(twice) else 0.0)
    for check in checks.values():
        if check.get("error", 0.0) > allowed:
            check["status"] = f"wrong: relative error {check['error']:.1e}, accepted {allowed:.1e}"
            check["error"] = min(check["error"], 1e300)
    for model in models.values():
        model.activation = F.relu
    return checks


def _results(model: Model, batch: Batch) -> list[Tensor]:
    """The result of a step and the gradients of all weights, by PyG's names in order."""
    out = model.step([model.fresh(block) for block in batch.blocks], batch, batch.x).double()
    return [out, *(grad for _, grad in sorted(model.gradients().items()))]


def _alternating(
    models: dict[str, Model], batches: Sequence[Batch], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of every step, all models on every batch, alternating, after one round to warm up."""
    times: dict[str, list[float]] = {key: [] for key in models}
    for turn in range(rounds + 1):
        for batch in batches:
            for key, model in models.items():
                structures, x = [model.fresh(block) for block in batch.blocks], batch.x
                synchronise(device)
                begin = time.perf_counter()
                model.step(structures, batch, x)
                synchronise(device)
                if turn:
                    times[key].append((time.perf_counter() - begin) * 1e3)
    return times


def _launches(model: Model, batch: Batch, device: torch.device) -> int | None:
    """Kernels, copies and fills that one step gives the device; None without a device."""
    if device.type != "cuda":
        return None
    structures, x = [model.fresh(block) for block in batch.blocks], batch.x
    synchronise(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        model.step(structures, batch, x)
        synchronise(device)
    return sum(
        event.count
        for event in trace.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )


def _parts(model: Model, batches: Sequence[Batch], device: torch.device) -> dict[str, float]:
    """Medians of structure (where the layer makes one), forward and backward, each waited for."""
    parts: dict[str, list[float]] = {"structure_ms": [], "forward_ms": [], "backward_ms": []}

    def timed(part: str, job: Callable[[], Any]) -> Any:
        synchronise(device)
        begin = time.perf_counter()
        result = job()
        synchronise(device)
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


BENCHMARK = Benchmark(
    "minibatch",
    cells,
    graphs=["ogbn-products"],
    options={
        "seeds": option(1024, "seed nodes per batch"),
        "fanouts": option([15, 10, 5], "neighbours per hop"),
        "width": option(128, "width of features and layers"),
        "batches": option(8, "different batches"),
        "rounds": option(5, "how often each batch is timed"),
        "precisions": {
            "choices": list(PRECISIONS),
            "nargs": "+",
            "help": "by default all on the GPU, float32 on the CPU",
        },
    },
    notes=(
        "a step is the structures of all blocks, forward and backward to the weights, by the"
        " clock from a finished device to a finished device; sampling, gathering features and the optimiser"
        " are not in it; parts are timed one by one with waiting between them, so they add up to more than"
        " the step",
        "error is the greatest relative distance (Frobenius) of the result and of the weights' gradients from"
        " PyG's layers in float64 on the first batch, with the precision's features and weights and SiLU in"
        " place of ReLU, which rounding may switch; it is accepted up to a tolerance ("
        + ", ".join(f"{name} {precision.tolerance:g}" for name, precision in PRECISIONS.items())
        + ") or up to twice that of PyG's layers in the same precision, whichever is greater",
    ),
)
