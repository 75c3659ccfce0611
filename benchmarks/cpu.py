"""FastGCNConv on the CPU, forward and backward, against PyG's GCNConv and ``torch.sparse`` CSR."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from fastsparse_pyg import FastGCNConv

from . import suite
from .runner import Benchmark, Cell, Run, attempt, option, relative_error
from .timing import wall_times


def cells(run: Run, name: str) -> Iterator[Cell]:
    """All cells of one graph: the implementations are checked, then timed alternately."""
    options = run.options
    graph = suite.load(name, run.device)
    torch.manual_seed(0)
    x = torch.randn(graph.num_nodes, options.width).requires_grad_()
    gradient = torch.randn(graph.num_nodes, options.width)
    steps = _steps(graph, x, gradient, options.width)
    reference = [tensor.double() for tensor in steps["PyG edge_index"]()]
    checks = {key: attempt(partial(_check, step, reference)) for key, step in steps.items()}
    sound = {key: step for key, step in steps.items() if checks[key]["status"] == "ok"}
    timings = wall_times(sound, run.device, min_calls=options.rounds, max_calls=options.rounds)
    for implementation, check in checks.items():
        timing = timings[implementation].as_cell() if implementation in timings else {}
        facts = {**graph.facts(), "width": options.width, "implementation": implementation}
        yield facts | check | timing


#: One forward and backward: output and the gradients of features and weight.
Step = Callable[[], tuple[Tensor, ...]]


def _steps(graph: suite.Graph, x: Tensor, gradient: Tensor, width: int) -> dict[str, Step]:
    edge_index = graph.edge_index()
    matrix = graph.sparse_csr()
    original = GCNConv(width, width)
    state = original.state_dict()
    weight = original.lin.weight

    def layer_step(layer: GCNConv, structure: Tensor) -> tuple[Tensor, ...]:
        out = layer(x, structure)
        return (out, *torch.autograd.grad(out, (x, layer.lin.weight), gradient))

    def with_layer(cls: type[GCNConv], structure: Tensor, **options: Any) -> Step:
        layer = cls(width, width, **options)
        layer.load_state_dict(state)
        return partial(layer_step, layer, structure)

    normalised_index, value = gcn_norm(edge_index, num_nodes=graph.num_nodes)
    coo = torch.sparse_coo_tensor(normalised_index.flip(0), value, (graph.num_nodes, graph.num_nodes))
    normalised = coo.coalesce().to_sparse_csr()

    def bare_product() -> tuple[Tensor, ...]:
        # The stand-ins are symmetric and so is their normalisation: the transpose is the matrix itself.
        out = normalised @ (x @ weight.t())
        inner = normalised @ gradient
        return out, inner @ weight, inner.t() @ x

    def bare_step() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return bare_product()

    return {
        "FastGCNConv": with_layer(FastGCNConv, edge_index),
        "PyG edge_index": with_layer(GCNConv, edge_index),
        "PyG edge_index, cached": with_layer(GCNConv, edge_index, cached=True),
        "PyG sparse_csr": with_layer(GCNConv, matrix),
        "PyG sparse_csr, cached": with_layer(GCNConv, matrix, cached=True),
        "torch.sparse CSR, normalised before": bare_step,
    }


def _check(step: Step, reference: list[Tensor]) -> Cell:
    error = max(relative_error(ours, theirs) for ours, theirs in zip(step(), reference, strict=True))
    if error > 1e-5:
        return {"status": f"wrong: relative difference {error:.1e}", "error": min(error, 1e300)}
    return {"error": error}


BENCHMARK = Benchmark(
    "cpu",
    cells,
    graphs=["ogbn-arxiv"],
    options={
        "width": option(128, "input and output width"),
        "rounds": option(15, "times that each implementation is timed, in turn"),
    },
    notes=(
        "one layer, forward and backward to features and weights, float32, the graph known from the call"
        " before; 'torch.sparse CSR, normalised before' is the bare product with a matrix normalised once"
        " (and its transpose in hand), without PyG around it",
    ),
    device="cpu",
)
