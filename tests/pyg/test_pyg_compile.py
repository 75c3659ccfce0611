"""torch.compile and torch.export: one graph and no recompilation, with edges and with an Adjacency."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from compiled_layers import (
    ROWS,
    check_compiled,
    check_exported,
    check_for_cpp,
    is_ours,
    moved,
    operators,
    written,
)
from pyg_cases import close, gradients, random_graph
from pyg_layer_cases import ATTENTION, each_case, first
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_geometric import nn as pyg

from fastsparse_core import export
from fastsparse_core.export import cpp_library, decompose, for_cpp
from fastsparse_core.ops._attention_launch import ADDITIVE, GATV2
from fastsparse_core.structure import adjacency
from fastsparse_pyg import (
    FastChebConv,
    FastGATConv,
    FastGatedGraphConv,
    FastGATv2Conv,
    FastGCNConv,
    FastGINConv,
    FastGINEConv,
    FastHypergraphConv,
    FastMFConv,
    FastPNAConv,
    FastResGatedGraphConv,
    FastSAGEConv,
    FastTransformerConv,
    cache_info,
    clear_cache,
    prepare,
)
from fastsparse_pyg.nn import DROP_INS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]
SAGE = first(pyg.SAGEConv, widths=(6, 4))
try:
    HAS_CPP = cpp_library().is_file()
except FileNotFoundError:
    HAS_CPP = False
LAYERS = {
    "gcn_narrowing": first(pyg.GCNConv, widths=(6, 4)),
    "gcn_widening": first(pyg.GCNConv, widths=(6, 9)),
    "sage": SAGE,
    "sage_max": SAGE._replace(options={"aggr": "max"}),
    "gin": first(pyg.GINConv),
    "gated": first(pyg.ResGatedGraphConv),
    "pna": first(pyg.PNAConv),
    "gated_graph": first(pyg.GatedGraphConv),
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


ONE_NODE = {
    "GCN narrowing": (lambda: FastGCNConv(8, 6), "aggregate_transform"),
    "GCN of constant features": (lambda: FastGCNConv(8, 12), "aggregate_transform"),
    "GCN without loops": (lambda: FastGCNConv(8, 6, add_self_loops=False), "aggregate_transform"),
    "GCN of sums": (lambda: FastGCNConv(8, 6, normalize=False, bias=False), "aggregate_transform"),
    "SAGE of means": (lambda: FastSAGEConv(8, 8), "aggregate_transform"),
    "SAGE of sums": (lambda: FastSAGEConv(8, 8, aggr="sum", bias=False), "aggregate_transform"),
    "SAGE narrowing": (lambda: FastSAGEConv(8, 4), "aggregate_transform"),
    "GIN": (lambda: FastGINConv(nn.Linear(8, 6), eps=0.5), "aggregate_transform"),
    "GINE": (lambda: FastGINEConv(nn.Linear(8, 6), edge_dim=3, eps=0.5), "gine_aggregate"),
    "GAT": (lambda: FastGATConv(8, 4, heads=2), "attention_layer"),
    "GAT of means": (lambda: FastGATConv(8, 4, heads=2, concat=False, bias=False), "attention_layer"),
    "GATv2": (lambda: FastGATv2Conv(8, 4, heads=2), "attention_layer"),
    "GATv2 of means": (lambda: FastGATv2Conv(8, 4, heads=2, concat=False), "attention_layer"),
    "Transformer": (lambda: FastTransformerConv(8, 4, heads=2), "attention_layer"),
    "Transformer, plain": (
        lambda: FastTransformerConv(8, 4, root_weight=False, bias=False),
        "attention_layer",
    ),
}


@pytest.mark.parametrize("name", ONE_NODE)
def test_compiled_layers_are_the_nodes_of_eager_ones(device, name):
    """One operator forward and one backward: no sum of neighbours or bias is left to Inductor."""
    make, node = ONE_NODE[name]
    layer, edge_index, found = make().to(device), random_graph(device=device), []
    rest = [torch.randn(edge_index.size(1), 3, device=device)] if name == "GINE" else []

    def record(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        found.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition
    )
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(40, 8, device=device, requires_grad=name != "GCN of constant features")
    got, expected = compiled(x, edge_index, *rest), layer(x, edge_index, *rest)
    close(got, expected)
    parameters = [each for each in (x, *layer.parameters()) if each.requires_grad]
    pairs = list(zip(gradients(got, parameters), gradients(expected, parameters), strict=True))
    scale = max(float(other.abs().max()) for _, other in pairs if other is not None)
    for one, other in pairs:
        assert (one is None) == (other is None)  # a transformer without root_weight has a map that it ignores
        if other is not None:
            close(one, other, floor=scale * 1e-3)  # the gradient of a key's bias is 0
    forward, backward = found
    assert forward.count(f"fastsparse.{node}.default") == 1
    assert backward.count(f"fastsparse.{node}_backward.default") == 1
    own = (
        "aten.permute",
        "aten.view",
        "aten.cat",
        "aten.slice",
        "_operator.getitem",
        "<built-in",
        "aten.alias",
    )
    if name[:3] == "GIN":  # the layer's network
        own += ("aten.addmm", "aten.mm", "aten.sum", "aten.t.")
    for names in found:
        own_operators = [each for each in names if not each.startswith(("fastsparse.", "aten.sym", *own))]
        assert not own_operators
        assert (
            len([each for each in names if each.startswith("fastsparse.") and "structure" not in each]) == 1
        )


@pytest.mark.parametrize("name", [name for name in ONE_NODE if "constant" not in name])
def test_compiled_layers_are_differentiable_twice(device, name):
    """Second derivatives come from separate operators."""
    make, node = ONE_NODE[name]
    layer, edge_index = make().to(device).double(), random_graph(device=device)
    rest = [torch.randn(edge_index.size(1), 3, device=device).double()] if name == "GINE" else []
    taken = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        taken.extend(each for each in module.graph.nodes if node in str(each.target))
        return module.forward

    x = torch.randn(40, 8, device=device, dtype=torch.float64, requires_grad=True)
    results = []
    for call in (torch.compile(layer, backend=backend, fullgraph=True), layer):
        (slope,) = torch.autograd.grad(call(x, edge_index, *rest).pow(2).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(slope.pow(2).sum(), [x, *layer.parameters()], allow_unused=True))
    assert taken or device == "cuda"  # CUDA has no attention in float64
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("root_weight", [True, False])
def test_structures_may_be_converted_before_a_compiled_backward_pass(root_weight):
    """Kernels on rows and on blocks store different states of a row."""
    layer = FastTransformerConv(8, 8, heads=2, root_weight=root_weight).cuda()
    x, edge_index = torch.randn(40, 8, device="cuda", requires_grad=True), random_graph(device="cuda")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got, expected = compiled(x, edge_index), layer(x, edge_index)
    adj = layer._structure(x, edge_index)
    assert not adj.has_bsb
    parameters = [x, layer.lin_query.weight, layer.lin_key.weight, layer.lin_value.weight]
    wanted = gradients(expected, parameters)
    assert adj.try_bsb()
    assert adj.t().try_bsb()
    close(got, expected)
    for one, other in zip(gradients(got, parameters), wanted, strict=True):
        close(one, other, 1e-4)
    for one, other in zip(gradients(compiled(x, edge_index), parameters), wanted, strict=True):
        close(one, other, 1e-2)  # blocks multiply in TF32


def test_sage_compiles_under_autocast(device):
    """A trace sees the operators themselves, not what handles eager calls in one step."""
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


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_every_layer_compiles_with_edges(device, row, reasons):
    """As the table of docs/compile_layers.md says."""
    if row.is_fallback:
        torch.compile(row.run, backend="eager")(row.make().to(device), *moved(row.draw(40), device))
        assert [record for record in reasons.records if "torch.compile" in record.message]
        assert written()[row.name][0].startswith("PyG's code")
        return
    assert all(map(is_ours, check_compiled(row, device)))
    exported = check_exported(row, device)
    assert not reasons.records
    assert written()[row.name][:2] == ("yes", "yes")
    assert written()[row.name][3] == "yes"
    if HAS_CPP:  # `tests/examples/test_example_serve.py` runs AOTInductor
        found = check_for_cpp(exported)
        assert device == "cuda" or written()[row.name][4] == found


@pytest.mark.skipif(not HAS_CPP, reason="built without FASTSPARSE_CPP=1")
def test_edges_that_are_a_buffer_are_converted_once(device):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = FastGATConv(6, 4, heads=2), FastGATConv(8, 3)
            self.register_buffer("edge_index", random_graph())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x, self.edge_index).relu(), self.edge_index)

    model, x = Model().to(device).eval(), torch.randn(40, 6, device=device)
    program = for_cpp(torch.export.export(model, (x,)))
    names = operators(program)
    assert names.count("fastsparse_cpp.attention.default") == 2
    assert "fastsparse_cpp.compress.default" not in names
    close(program.module()(x), model(x))


@pytest.mark.skipif(not HAS_CPP, reason="built without FASTSPARSE_CPP=1")
@pytest.mark.parametrize("layer", [FastGCNConv(6, 4), FastSAGEConv(6, 4), FastGATConv(6, 4)])
def test_programs_for_cpp_check_indices_on_the_cpu(layer):
    """Also an index that equals the number of nodes, which marks removed loops within the program."""
    edge_index, x = random_graph(), torch.randn(40, 6)
    free = torch.export.Dim.DYNAMIC
    shapes = ({0: free}, {1: free})
    program = for_cpp(torch.export.export(layer.eval(), (x, edge_index), dynamic_shapes=shapes)).module()
    close(program(x, edge_index), layer(x, edge_index))
    places = {"destination": 1, "source": 0, "both": [0, 1]}
    for (place, row), index in itertools.product(places.items(), (40, 41, -1)):
        wrong = edge_index.clone()
        wrong[row, 3] = index
        kind = "sources" if place == "source" else "destinations"
        with pytest.raises(RuntimeError, match=f"edge_index: expected {kind} from 0 to 39, got {index}"):
            program(x, wrong)


@pytest.mark.parametrize(
    ("kind", "dtype", "heads", "width", "scale", "is_supported"),
    [
        (ADDITIVE, torch.float32, 2, 256, 0.2, True),
        (GATV2, torch.bfloat16, 65_535, 1, 0.2, True),
        (ADDITIVE, torch.float64, 2, 8, 0.2, False),
        (GATV2, torch.float64, 2, 8, 0.2, False),
        (ADDITIVE, torch.float32, 2, 257, 0.2, False),
        (GATV2, torch.float32, 1, 300, 0.2, False),
        (ADDITIVE, torch.float32, 65_536, 1, 0.2, False),
        (GATV2, torch.float32, 2, 8, 1.5, False),
    ],
)
def test_attention_for_cpp_without_a_kernel_on_cuda(
    monkeypatch, kind, dtype, heads, width, scale, is_supported
):
    """Fake tensors: what the CUDA kernels do not support is written in PyTorch's operators."""
    library = SimpleNamespace(attention=lambda *given: "kernel")
    monkeypatch.setattr(export.torch.ops, "fastsparse_cpp", library, raising=False)
    monkeypatch.setattr(export, "attention", lambda *given: ("formula",))
    with FakeTensorMode():
        values = torch.empty(5, heads * width, dtype=dtype, device="cuda")
        if kind == ADDITIVE:
            scores = torch.empty(5, heads, device="cuda")
            tensors = (scores, scores, values, None, None, None, None)
        else:
            att = torch.empty(heads, width, device="cuda")
            tensors = (values, values, None, att, None, None, None)
        rows = SimpleNamespace(tensors=(), num_values=9)
        found = export.cpp_attention(*tensors, scale, 0.0, None, kind, heads, "csr", rows)
    assert found[0] == ("kernel" if is_supported else "formula")


def test_programs_with_an_adjacency_stay_in_their_process():
    layer, adj = FastGCNConv(6, 4).eval(), prepare(random_graph(), 40, add_self_loops=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, adj)

    program = torch.export.export(Model(), (torch.randn(40, 6),))
    with pytest.raises(ValueError, match="expected edges as a tensor, got an Adjacency.*with edge_index"):
        decompose(program)


def test_the_page_lists_every_layer_that_compiles():
    assert list(written()) == [row.name for row in ROWS]
    assert {drop_in.__name__ for drop_in in DROP_INS} <= {row.name.split()[0] for row in ROWS}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["GCNConv", "SAGEConv", "GINConv", "GATConv", "GATv2Conv", "TransformerConv"]
)
def test_layers_are_recorded_as_cuda_graphs(name):
    """The kernels are part of the graphs, which other edges do not replay."""
    row = next(row for row in ROWS if row.name == name)
    check_compiled(row, "cuda", "reduce-overhead")


def test_changing_batches_compile_twice(device):
    """Compiled and eager layers share structures; those of a backward pass are the forward pass's."""
    clear_cache()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = FastGATConv(6, 4, heads=2), FastSAGEConv(8, 4)

        def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x, graph).relu(), graph)

    model, frames = Model().to(device), []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        frames.append(module)
        return aot_eager(module, inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for nodes in (40, 60, 70, 80):
        edge_index = torch.randint(0, nodes, (2, 5 * nodes), device=device)
        x = torch.randn(nodes, 6, device=device, requires_grad=True)
        got, expected = compiled(x, edge_index), model(x, edge_index)
        parameters = [x, *model.parameters()]
        close(got, expected)
        for one, other in zip(gradients(got, parameters), gradients(expected, parameters), strict=True):
            close(one, other)
    assert len(frames) == 2
    assert cache_info().misses == 2 * 4  # with the loops that GAT adds, and without
    edge_index[:, 0] = 7  # the edit is detected, as by eager layers
    close(compiled(x, edge_index), model(x, edge_index))
    assert cache_info().misses == 2 * 5


def test_edges_may_go_before_the_backward_pass(device):
    layer = FastSAGEConv(6, 4).to(device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    edge_index = random_graph(device=device)
    got, expected = compiled(x, edge_index), layer(x, edge_index)
    wanted = gradients(expected, [x])
    del edge_index, expected
    gc.collect()
    clear_cache()
    close(gradients(got, [x])[0], wanted[0])


def test_structures_of_other_threads_are_freed():
    """As of autograd's thread on CUDA."""
    layer, edge_index = FastSAGEConv(6, 4), random_graph()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    clear_cache()
    gc.collect()
    before = len(adjacency._registry)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(compiled, torch.randn(40, 6), edge_index).result()
        assert len(adjacency._registry) > before
        clear_cache()
        gc.collect()
        assert len(adjacency._registry) <= before


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
            if step == 3:  # earlier CUDA graphs would not use the new edges
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


def test_gated_graphs_under_autocast(device):
    """A trace takes other operators than the recurrent cell's, whose fused one on CUDA cannot be traced."""
    layer = FastGatedGraphConv(6, 1).to(device)
    x, edge_index = torch.randn(40, 6, device=device), random_graph(device=device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, torch.bfloat16):
        got, expected = compiled(x, edge_index), layer(x, edge_index)
    assert got.dtype == expected.dtype
    close(got.float(), expected.float(), 3e-2)


OPTIONS = {
    "attention weights": (FastGATConv(6, 4, add_self_loops=False), {"return_attention_weights": True}),
    "flow": (FastGCNConv(6, 4, flow="target_to_source"), {}),
    "nodes first": (FastGCNConv(6, 4, node_dim=0), {}),
    "maxima": (FastSAGEConv(6, 4, aggr="max"), {}),
    "no normalisation": (FastChebConv(6, 4, 3, normalization=None), {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_compile_with_edges(device, name, reasons):
    layer, more = OPTIONS[name]
    layer, x, edge_index = layer.to(device), torch.randn(40, 6, device=device), random_graph(device=device)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        got, expected = compiled(x, edge_index, **more), layer(x, edge_index, **more)
    for one, other in zip(
        *((each[0], each[1][1]) if more else (each,) for each in (got, expected)), strict=True
    ):
        close(one, other)
    assert not reasons.records


def test_bipartite_edges_compile(device):
    layer = FastGATConv((6, 5), 4, add_self_loops=False).to(device)
    pair = torch.randn(40, 6, device=device), torch.randn(30, 5, device=device)
    edge_index = random_graph(40, 30, device=device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    close(compiled(pair, edge_index), layer(pair, edge_index))


CALLS = {
    "the attention weights of added self loops": (FastGATConv(6, 4), {"return_attention_weights": True}),
    "cached=True under torch.compile, with an empty cache": (FastGCNConv(6, 4, cached=True), {}),
    "without num_edges": (FastHypergraphConv(6, 4), {}),
    "sizes that depend on the edges": (FastMFConv(6, 4), {}),
    "pre_layers > 1": (
        FastPNAConv(6, 8, ["mean"], ["identity"], torch.tensor([0, 3, 5]), pre_layers=2),
        {},
    ),
}


@pytest.mark.parametrize("message", CALLS)
def test_what_falls_back_says_why(message, reasons):
    layer, more = CALLS[message]
    x, edge_index = torch.randn(40, 6), random_graph()
    got = torch.compile(layer, backend="eager")(x, edge_index, **more)
    assert [record for record in reasons.records if message in record.message]
    expected = layer(x, edge_index, **more)
    close(*(each[0] if more else each for each in (got, expected)), 2e-5)


def test_adjacency_without_loops_is_refused_under_compile(device):
    adj = prepare(random_graph(device=device), 40)
    with pytest.raises(Exception, match="add_self_loops=True"):
        torch.compile(FastGCNConv(6, 4).to(device), backend="eager", fullgraph=True)(
            torch.randn(40, 6, device=device), adj
        )


def test_edges_made_within_a_trace_are_warned_about(reasons):
    layer = FastResGatedGraphConv(6, 4)

    def model(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return layer(x, edges.flip(0))

    for _ in range(2):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(40, 6), random_graph())
    (record,) = reasons.records
    assert record.message == (
        "FastResGatedGraphConv falls back to PyG's implementation, which is slower: torch.compile of a model "
        "that makes or changes its edges. Make the edges outside of the compiled function"
    )


# ---------------------------------------------------------------- exported programs

LOAD = """
import sys, torch, fastsparse_core
program, given, expected = torch.export.load(sys.argv[1]), *torch.load(sys.argv[2])
torch.testing.assert_close(program.module()(*given), expected)
assert "torch_geometric" not in sys.modules
"""


class Exported(nn.Module):
    """Layers whose operators differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = FastGCNConv(6, 8), FastGATConv(8, 4, heads=2)
        self.third = FastTransformerConv(8, 4, heads=2, edge_dim=3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(x, edges).relu(), edges).relu()
        return self.third(hidden, edges, features)


def _exported(device: str) -> tuple[torch.export.ExportedProgram, tuple[torch.Tensor, ...], torch.Tensor]:
    """A program, inputs of other sizes, and their result."""
    model, free = Exported().to(device).eval(), torch.export.Dim.DYNAMIC
    one, other = (
        (
            torch.randn(nodes, 6, device=device),
            torch.randint(0, nodes, (2, 6 * nodes), device=device),
            torch.randn(6 * nodes, 3, device=device),
        )
        for nodes in (40, 60)
    )
    program = torch.export.export(model, one, dynamic_shapes=({0: free}, {1: free}, {0: free}))
    with torch.no_grad():
        return program, other, model(*other)


def test_a_program_runs_in_another_process(device, tmp_path):
    program, inputs, expected = _exported(device)
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save((inputs, expected), tmp_path / "inputs.pt")
    paths = [str(tmp_path / name) for name in ("program.pt2", "inputs.pt")]
    subprocess.run(
        [sys.executable, "-c", LOAD, *paths], check=True, env={**os.environ, "PYTHONPATH": "kernels"}
    )


def test_a_program_in_pytorchs_operators(device):
    program, inputs, expected = _exported(device)
    plain = decompose(program)
    assert "fastsparse" not in str(plain.graph)
    close(plain.module()(*inputs), expected)


#: One case for each operator.
DECOMPOSED = (
    "GCNConv with edge weights",
    "GINConv",
    "GATv2Conv with edge features",
    "GINEConv with edge features",
)
DECOMPOSED += ("ResGatedGraphConv with edge features", "PNAConv with edge features", "AGNNConv", "ChebConv")
DECOMPOSED += ("FastMaxKSAGEConv", "HypergraphConv", "GraphTransformerLayer")


@pytest.mark.parametrize("name", DECOMPOSED)
def test_operators_decompose(name):
    torch.manual_seed(0)
    row = next(row for row in ROWS if row.name == name)
    layer, arguments = row.make().eval(), tuple(each.detach() for each in row.draw(40))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return row.run(self.layer, *given)

    plain = decompose(torch.export.export(Model(), arguments))
    assert "fastsparse" not in str(plain.graph)
    with torch.no_grad():
        close(plain.module()(*arguments), row.run(layer, *arguments), 2e-5)


def test_onnx(tmp_path):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    program, inputs, expected = _exported("cpu")
    torch.onnx.export(decompose(program), f=str(tmp_path / "model.onnx"))
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    names = [each.name for each in session.get_inputs()]
    given = {name: each.numpy() for name, each in zip(names, inputs, strict=True)}
    close(torch.from_numpy(session.run(None, given)[0]), expected)


def test_a_program_that_drops_weights_is_refused():
    layer = FastGATConv(6, 4, dropout=0.5)
    program = torch.export.export(layer, (torch.randn(40, 6), random_graph()))
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        decompose(program)
