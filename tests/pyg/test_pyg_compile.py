"""torch.compile: one graph and no recompilation with an Adjacency; PyG's own code otherwise."""

from __future__ import annotations

import pytest
import torch
from pyg_cases import close, gradients, random_graph
from pyg_layer_cases import ATTENTION, each_case, first
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch_geometric import nn as pyg

from fastsparse_pyg import (
    FastGCNConv,
    FastGINConv,
    FastGINEConv,
    FastResGatedGraphConv,
    FastSAGEConv,
    cache_info,
    clear_cache,
    prepare,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]
SAGE = first(pyg.SAGEConv, widths=(6, 4))
LAYERS = {
    "gcn_narrowing": first(pyg.GCNConv, widths=(6, 4)),
    "gcn_widening": first(pyg.GCNConv, widths=(6, 9)),
    "sage": SAGE,
    "sage_max": SAGE._replace(options={"aggr": "max"}),
    "gin": first(pyg.GINConv),
    "gated": first(pyg.ResGatedGraphConv),
    **{case.name: case for case in ATTENTION},
}
FEATURED = [first(original, 3) for original in (pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv)]


@each_case([*LAYERS.values(), *FEATURED])
def test_adjacency_compiles_to_one_graph_once(device, case):
    layer, edge_index = case.make(case.fast, device), random_graph(device=device)
    adj = prepare(edge_index, 40, add_self_loops=getattr(layer, "add_self_loops", False))
    rest, frames = [each.detach() for each in case.rest(edge_index)], []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        frames.append(module)
        return module.forward

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(3):
        x = torch.randn(40, 6, device=device, requires_grad=True)
        got, expected = compiled(x, adj, *rest), layer(x, adj, *rest)
        close(got, expected, 2e-5 if rest else 1e-5)
        parameters = [x, *layer.parameters()]
        for one, other in zip(gradients(got, parameters), gradients(expected, parameters), strict=True):
            close(one, other, floor=case.floor)
    assert len(frames) == 1


@pytest.mark.parametrize(
    "make",
    [lambda: FastGINEConv(nn.Linear(6, 4), edge_dim=3), lambda: FastResGatedGraphConv(6, 4, edge_dim=3)],
    ids=["gine", "gated"],
)
def test_edge_features_compile_with_an_adjacency(device, make):
    layer, edge_index = make().to(device), random_graph(device=device)
    adj, edge_attr = prepare(edge_index, 40), torch.randn(edge_index.size(1), 3, device=device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    got, expected = compiled(x, adj, edge_attr), layer(x, adj, edge_attr)
    close(got, expected)
    parameters = [x, *layer.parameters()]
    for one, other in zip(gradients(got, parameters), gradients(expected, parameters), strict=True):
        if other is not None:
            close(one, other)


def test_sage_compiles_under_autocast(device):
    """A trace sees the operators themselves, not what serves eager calls in one step."""
    layer = FastSAGEConv(6, 9).to(device)
    adj = prepare(random_graph(device=device), 40)
    x = torch.randn(40, 6, device=device)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.autocast(device, torch.bfloat16):
        got, expected = compiled(x, adj), layer(x, adj)
    assert got.dtype == expected.dtype == torch.bfloat16
    close(got.float(), expected.float(), 2e-2)


@pytest.mark.slow
def test_inductor_trains(device):
    adj = prepare(random_graph(device=device), 40, add_self_loops=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = FastGCNConv(6, 16), FastGCNConv(16, 3)

        def forward(self, x: torch.Tensor, graph: object) -> torch.Tensor:
            return self.second(self.first(x, graph).relu(), graph)

    model = Model().to(device)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(40, 6, device=device)
    got, expected = compiled(x, adj), model(x, adj)
    close(got, expected)
    parameters = list(model.parameters())
    for one, other in zip(gradients(got, parameters), gradients(expected, parameters), strict=True):
        close(one, other)


@pytest.mark.parametrize("name", ["gcn_narrowing", "gcn_widening", "sage", "sage_wide", "gin"])
def test_edge_index_compiles_to_one_graph_of_our_kernels(device, name):
    """A step on a second graph of another size, too; the structure is that of eager layers."""
    clear_cache()
    case = {**LAYERS, "sage_wide": SAGE._replace(widths=(6, 9))}[name]
    layer = case.make(case.fast, device)
    frames = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        frames.append([str(node.target) for node in module.graph.nodes])
        return aot_eager(module, inputs)

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for nodes in (40, 60):
        edge_index = (
            random_graph(device=device) if nodes == 40 else torch.randint(0, 60, (2, 300), device=device)
        )
        for _step in range(2):
            x = torch.randn(nodes, 6, device=device, requires_grad=True)
            got, expected = compiled(x, edge_index), layer(x, edge_index)
            close(got, expected)
            parameters = [x, *layer.parameters()]
            for one, other in zip(gradients(got, parameters), gradients(expected, parameters), strict=True):
                close(one, other)
    assert all("fastsparse_pyg.aggregate.default" in frame for frame in frames)
    assert cache_info().misses == 2  # one for each graph, shared with eager calls, backward passes included
    edge_index[:, 0] = 7  # seen, as by eager layers
    close(compiled(x, edge_index), layer(x, edge_index))
    assert cache_info().misses == 3


def test_a_model_of_edges_trains_by_inductor(device):
    edge_index = random_graph(device=device)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (
                FastGCNConv(6, 16),
                FastSAGEConv(16, 3),
                FastSAGEConv((3, 3), 2),
            )

        def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
            hidden = self.second(self.first(x, graph).relu(), graph)
            return self.third((hidden, hidden), graph)

    model = Model().to(device)
    x = torch.randn(40, 6, device=device)
    for mode in ("default", "reduce-overhead") if device == "cuda" else ("default",):
        compiled = torch.compile(model, fullgraph=True, mode=mode)
        for step in range(4):
            if step == 3:  # a record of the steps before would not see it
                edge_index = edge_index.flip(0).contiguous()
            got, expected = compiled(x, edge_index), model(x, edge_index)
            close(got, expected)
            parameters = list(model.parameters())
            for one, other in zip(gradients(got, parameters), gradients(expected, parameters), strict=True):
                close(one, other)


def test_edges_that_compiled_code_makes(device):
    """Inductor writes the second ones into the very tensor of the first, without counting its version up."""
    layer = FastGINConv(nn.Identity()).to(device)

    def model(x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        hidden = layer(x, (edge_index * 3 + 1) % 40)
        return layer(hidden, (edge_index * (7 + (hidden.sum() > 1e9).long()) + 5) % 40)

    x, edge_index = torch.randn(40, 6, device=device), random_graph(device=device)
    with torch.no_grad():
        close(torch.compile(model, fullgraph=True)(x, edge_index), model(x, edge_index))


def test_edges_that_compiled_code_writes(device):
    layer = FastSAGEConv(6, 6).to(device)

    def model(x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        hidden = layer(x, edge_index)
        edge_index.add_(1).remainder_(40)
        return layer(hidden, edge_index)

    x, ours, theirs = (
        torch.randn(40, 6, device=device),
        random_graph(device=device),
        random_graph(device=device),
    )
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for _step in range(2):
            close(compiled(x, ours), model(x, theirs))
    assert torch.equal(ours, theirs)


def test_edge_index_under_autocast(device):
    x, edge_index = torch.randn(40, 6, device=device), random_graph(device=device)
    for layer in (FastGCNConv(6, 9).to(device), FastSAGEConv(6, 4).to(device)):
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        with torch.autocast(device, torch.bfloat16):
            got, expected = compiled(x, edge_index), layer(x, edge_index)
        assert got.dtype == expected.dtype == torch.bfloat16
        close(got.float(), expected.float(), 2e-2)


def test_edge_index_compiles_through_pyg(device):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device)
    for case in LAYERS.values():
        layer = case.make(case.fast, device)
        close(torch.compile(layer, backend="eager")(x, edge_index), layer(x, edge_index), 2e-5)


def test_adjacency_without_loops_is_refused_under_compile(device):
    adj = prepare(random_graph(device=device), 40)
    with pytest.raises(Exception, match="add_self_loops=True"):
        torch.compile(FastGCNConv(6, 4).to(device), backend="eager", fullgraph=True)(
            torch.randn(40, 6, device=device), adj
        )


def test_a_layer_that_compiles_pygs_code_warns(reasons):
    layer = FastResGatedGraphConv(6, 4)
    for _ in range(2):
        torch.compile(layer, backend="eager", fullgraph=True)(torch.randn(40, 6), random_graph())
    (record,) = reasons.records
    assert record.message == (
        "FastResGatedGraphConv falls back to PyG's implementation, which is slower: torch.compile without an "
        "Adjacency. Pass `fastsparse_pyg.prepare(edge_index)` as `edge_index`"
    )
    torch.compile(layer, backend="eager", fullgraph=True)(torch.randn(40, 6), prepare(random_graph(), 40))
    assert len(reasons.records) == 1
