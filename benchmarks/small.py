"""Training steps that the host launches more slowly than the GPU runs them, against the frameworks' layers.

A step is that of a plain loop: `zero_grad`, forward, loss, backward, Adam. Graphs:

- cora, pubmed, coauthor: whole graphs of those sizes (2,708, 19,717 and 18,000 nodes), the training nodes by
  a mask; two layers, 64 wide.
- molecules-64, molecules-512: so many trees with rings in one graph, other ones in every step; five layers,
  128 wide, with batch normalisation, mean over atoms. GIN has perceptrons of two layers.
- blocks: neighbours of 1,024 seeds, 15, 10 and 5 of them, in a graph of 169,343 nodes; three layers, 128
  wide.

Inputs are on the device. In every step on molecules and blocks, the layers get their edges in a new tensor
(DGL: a new graph).

With PyG on a GPU the step with our layers is timed captured too, once it is recorded, and GCN on whole graphs
with only its model captured.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_mean_pool

import fastsparse_pyg
from fastsparse_core import capture
from fastsparse_core.capturing import graphs
from fastsparse_core.capturing.captured import BATCHES, CALLS, Captured

from .runner import Benchmark, Cell, Run, attempt, option, progress
from .timing import in_turn, step_time

GRAPHS = ("cora", "pubmed", "coauthor", "molecules-64", "molecules-512", "blocks")
DEFAULT = [name for name in GRAPHS if name != "coauthor"]
DTYPES = ("float32", "bf16-amp")
#: The names of the layers in their frameworks.
LAYERS = {
    "pyg": {name: f"{name}Conv" for name in ("GCN", "SAGE", "GIN", "GAT", "GATv2", "Transformer")},
    "dgl": {"GCN": "GraphConv", **{name: f"{name}Conv" for name in ("SAGE", "GIN", "GAT", "GATv2")}},
}
#: Nodes, edges, features, classes.
WHOLE = {
    "cora": (2_708, 10_556, 1_433, 7),
    "pubmed": (19_717, 88_648, 500, 3),
    "coauthor": (18_000, 163_788, 128, 15),
}
#: The graph that blocks come from, and its seeds per batch.
BLOCKS, SEEDS = (169_343, 2_315_598, 128, 40), 1_024
_HEADS = 4
#: Number of different inputs, which are used in a cycle.
_BATCHES = 16
#: Number of rounds in which all implementations are timed; the median counts.
_ROUNDS = 9
#: Steps whose losses are compared.
_COMPARED = 50
#: Our layers with weights that differ by rounding; not timed.
_ROUNDING = "rounding"


def _captures(options: argparse.Namespace) -> bool:
    return options.framework == "pyg" and graphs.CudaGraphs.supports(torch.device(options.device))


def cells(run: Run, kind: str) -> Iterator[Cell]:
    """All cells of one kind of graph."""
    options = run.options
    if kind == "blocks" and options.framework == "dgl":
        return
    inputs = draw(kind, run.device)
    layers = [name for name in options.layers or LAYERS["pyg"] if name in LAYERS[options.framework]]
    for layer, dtype in progress(list(itertools.product(layers, options.dtypes)), kind):
        if run.is_late:
            continue
        loops = _loops(options.framework, kind, layer, dtype, inputs, _captures(options))
        extra = _compare(loops, dtype) if _captures(options) else {}
        found = attempt(partial(_in_turn, loops, run.device, options.budget_ms / _ROUNDS))
        cells = found.pop("steps", {})
        for name in loops:
            cell = {"graph": kind, "layer": layer, "dtype": dtype, "implementation": name, **found}
            yield cell | cells.get(name, {}) | extra.get(name, {}) | {"edges": inputs[0].num_edges}
        del loops
    del inputs
    fastsparse_pyg.clear_cache()


def _compare(loops: dict[str, Loop], dtype: str) -> dict[str, dict[str, Any]]:
    """Runs captured steps until they are recorded, and compares losses. Returns entries of the cells."""
    rounding = loops.pop(_ROUNDING)
    losses = {}
    if dtype == "float32":
        losses = {
            name: torch.stack([loop() for _ in range(_COMPARED)])
            for name, loop in {**loops, _ROUNDING: rounding}.items()
            if not name.startswith("PyG")
        }
    found = {}
    for name, loop in loops.items():
        captured = loop.captured
        if captured is None:
            continue
        for _ in range(0 if losses else max(CALLS, BATCHES) + 8):
            loop()
        if not captured.is_recorded:
            reasons = [form.refusal for form in captured.forms if form.refusal]
            found[name] = {"status": f"failed: not recorded: {reasons[0] if reasons else 'too few calls'}"}
            continue
        found[name] = {"padding_difference": max(form.difference for form in captured.forms)}
        if losses:
            found[name]["loss_difference"] = _difference(losses["FastSparse"], losses[name])
            found[name]["perturbed"] = _difference(losses["FastSparse"], losses[_ROUNDING])
    return found


def _difference(expected: Tensor, found: Tensor) -> float:
    return float(((found - expected) / expected).abs().max())


def _in_turn(loops: dict[str, Loop], device: torch.device, budget_ms: float) -> dict[str, dict[str, Any]]:
    calls = {name: partial(step_time, loop, device, budget_ms=budget_ms) for name, loop in loops.items()}
    middle = {
        name: sorted(timings, key=lambda timing: timing.median_ms)[_ROUNDS // 2].as_cell()
        for name, timings in in_turn(calls, _ROUNDS).items()
    }
    return {"steps": middle}


def draw(kind: str, device: torch.device) -> list[Data]:
    """The inputs of the steps, in order."""
    generator = torch.Generator().manual_seed(0)
    if kind in WHOLE:
        return [_whole(*WHOLE[kind], generator).to(device)]
    if kind == "blocks":
        data = _whole(*BLOCKS, generator)
        torch.manual_seed(0)
        loader = fastsparse_pyg.NeighborLoader(
            data, [15, 10, 5], batch_size=SEEDS, shuffle=True, drop_last=True, device=device
        )
        return list(itertools.islice(loader, _BATCHES))
    graphs = [_molecule(generator) for _ in range(1_024)]
    size = int(kind.split("-")[1])
    places = (torch.randint(len(graphs), (size,), generator=generator).tolist() for _ in range(_BATCHES))
    return [Batch.from_data_list([graphs[place] for place in of_batch]).to(device) for of_batch in places]


def _whole(nodes: int, edges: int, features: int, classes: int, generator: torch.Generator) -> Data:
    half = torch.randint(nodes, (2, edges // 2), generator=generator)
    return Data(
        x=torch.randn(nodes, features, generator=generator),
        edge_index=torch.cat([half, half.flip(0)], dim=1),
        y=torch.randint(classes, (nodes,), generator=generator),
        train_mask=torch.rand(nodes, generator=generator) < 0.1,
    )


def _molecule(generator: torch.Generator) -> Data:
    nodes = int(torch.randint(10, 42, (), generator=generator))
    node = torch.arange(1, nodes)
    parent = (node - torch.randint(1, 4, node.shape, generator=generator)).clamp(min=0)
    rings = torch.randint(nodes, (2, nodes // 8), generator=generator)
    bonds = torch.cat([torch.stack([node, parent]), rings[:, rings[0] != rings[1]]], dim=1)
    x = torch.randn(nodes, 64, generator=generator)
    y = torch.randn(1, 1, generator=generator)
    return Data(x=x, edge_index=torch.cat([bonds, bonds.flip(0)], dim=1), y=y)


class Model(nn.Module):
    """Layers of one kind, and what follows them for that kind of input.

    Args:
        sizes: widths before the first layer, and after each.
        outputs: classes, or predicted numbers.
        make: a layer, from its two widths; it is called with features and edges, in the framework's order.
        is_dgl: whether the graph comes before the features.
        is_molecules: batch normalisation, and one prediction per graph.
    """

    def __init__(
        self,
        sizes: list[int],
        outputs: int,
        make: Callable[[int, int], nn.Module],
        *,
        is_dgl: bool,
        is_molecules: bool,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_dgl = is_dgl
        self.convs = nn.ModuleList(make(*pair) for pair in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(size) for size in sizes[1:] if is_molecules)
        self.out = nn.Linear(sizes[-1], outputs)

    def forward(self, data: Data, edges: Any) -> Tensor:
        """Outputs of graphs or of nodes; ``edges`` is an `edge_index` or DGL's graph."""
        x = data.x
        for nth, conv in enumerate(self.convs):
            x = (conv(edges, x) if self.is_dgl else conv(x, edges)).flatten(1)
            x = F.relu(self.norms[nth](x) if self.norms else x)
        if self.norms:
            x = global_mean_pool(x, data.batch, data.num_graphs)
        elif "batch_size" in data:
            x = x[: data.batch_size]
        return self.out(x)


def _loss(out: Tensor, data: Data) -> Tensor:
    if out.size(1) == 1:
        return F.mse_loss(out, data.y)
    if "batch_size" in data:
        return F.cross_entropy(out, data.y[: data.batch_size])
    return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])


def _loops(
    framework: str, kind: str, layer: str, dtype: str, inputs: list[Data], captures: bool
) -> dict[str, Loop]:
    """A loop for each implementation. If steps are captured, another loop measures the effect of rounding."""
    first = inputs[0]
    models = _models(framework, kind, layer, first, captures)
    if captures:
        models[_ROUNDING] = _models(framework, kind, layer, first, captures)["FastSparse"]
        for parameter in models[_ROUNDING].parameters():
            parameter.data.mul_(1 + 1e-7 * torch.randn_like(parameter))
    return {
        name: Loop(
            model.to(first.x.device), inputs, dtype, framework, is_new=kind not in WHOLE, captures=name
        )
        for name, model in models.items()
    }


def _models(framework: str, kind: str, layer: str, first: Data, captures: bool) -> dict[str, Model]:
    """The framework's own layers and ours; PyG's GCN of a whole graph also with its normalisation kept."""
    is_molecules = kind.startswith("molecules")
    depth, width = (2, 64) if kind in WHOLE else (5 if is_molecules else 3, 128)
    outputs = 1 if is_molecules else int(first.y.max()) + 1
    if framework == "dgl":
        import fastsparse_dgl as ours  # before DGL, whose import it makes work

        # isort: split
        import dgl.nn.pytorch as own

        title = "DGL"
    else:
        import torch_geometric.nn as own

        import fastsparse_pyg as ours

        title = "PyG"
    name = LAYERS[framework][layer]
    kinds = {title: (own, name, {}), "FastSparse": (ours, f"Fast{name}", {})}
    if (framework, layer) == ("pyg", "GCN") and kind in WHOLE:
        kinds["PyG, cached"] = (own, name, {"cached": True})
        kinds |= {"captured model": kinds["FastSparse"]} if captures else {}
    kinds |= {"captured": kinds["FastSparse"]} if captures else {}
    return {
        implementation: Model(
            [first.x.size(1)] + [width] * depth,
            outputs,
            partial(_layer, getattr(module, of_layer), layer, framework, options),
            is_dgl=framework == "dgl",
            is_molecules=is_molecules,
        )
        for implementation, (module, of_layer, options) in kinds.items()
    }


def _layer(
    make: Callable[..., nn.Module],
    layer: str,
    framework: str,
    options: dict[str, Any],
    size_in: int,
    size_out: int,
) -> nn.Module:
    if layer == "GIN":
        wide = nn.Linear(size_in, 2 * size_out)
        return make(
            nn.Sequential(wide, nn.BatchNorm1d(2 * size_out), nn.ReLU(), nn.Linear(2 * size_out, size_out))
        )
    if layer in ("GAT", "GATv2", "Transformer"):
        name = "heads" if framework == "pyg" else "num_heads"
        options = {name: _HEADS}
        size_out //= _HEADS
    if framework == "dgl":
        if layer == "SAGE":
            options = {"aggregator_type": "mean"}
        else:  # random graphs have nodes without edges
            options = {**options, "allow_zero_in_degree": True}
    return make(size_in, size_out, **options)


class Loop:
    """A step on the next input.

    Args:
        model: on the inputs' device.
        inputs: one per step, used again from the start after the last.
        dtype: precision.
        framework: whose graphs the layers take.
        is_new: whether every step gets new edges.
        captures: the implementation's name, which says what is captured.
    """

    def __init__(
        self, model: Model, inputs: list[Data], dtype: str, framework: str, *, is_new: bool, captures: str
    ) -> None:
        self._turns = itertools.cycle(inputs)
        self._framework, self._is_new = framework, is_new
        self._same = self._edges_of(inputs[0])
        self.captured: Captured | None = None
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        device_type = inputs[0].x.device.type

        def step(data: Data, graph: Any = None) -> Tensor:
            optimizer.zero_grad()
            with nullcontext() if dtype == "float32" else torch.autocast(device_type, torch.bfloat16):
                loss = _loss(model(data, data.edge_index if graph is None else graph), data)
            loss.backward()
            optimizer.step()
            return loss

        self._step: Callable[..., Tensor] = step
        if captures == "captured":
            self._step = capture(step)
            self.captured = self._step.captured
        elif captures == "captured model":
            self.captured = capture(model).forward

    def _edges_of(self, data: Data) -> Any:
        if self._framework == "pyg":
            return None
        import dgl

        return dgl.graph(tuple(data.edge_index), num_nodes=data.num_nodes)

    def __call__(self) -> Tensor:
        data = next(self._turns)
        graph = self._same
        if self._is_new:
            data.edge_index = data.edge_index.clone()
            graph = self._edges_of(data)
        return self._step(data, graph).detach()


def _notes(options: argparse.Namespace) -> Iterator[str]:
    yield (
        f"{options.framework}; one step of a plain loop with Adam; the implementations in turn, {_ROUNDS}"
        " times: the median of their medians"
    )
    if _captures(options):
        yield (
            f"loss_difference: the greatest of the first {_COMPARED} losses from those of our layers as they"
            " are, relative, float32; perturbed: the same for weights that were multiplied by 1 + 1e-7 r, r"
            " normal, before the first step: what rounding alone does to these losses; padding_difference:"
            " of results and gradients with padding, before the step is recorded"
        )


BENCHMARK = Benchmark(
    "small",
    cells,
    "kinds",
    budget_ms=60.0,
    options={
        "framework": option("pyg", "whose layers; DGL's need the CPU", choices=LAYERS),
        "kinds": option(DEFAULT, "graphs and batches", choices=GRAPHS),
        "layers": {"choices": LAYERS["pyg"], "nargs": "+", "help": "layers (all)"},
        "dtypes": option(None, "precisions", choices=DTYPES),
        "limit_s": option(600.0, "no cell begins after this time"),
    },
    notes=_notes,
    variant=lambda options: "" if options.framework == "pyg" else options.framework,
)
