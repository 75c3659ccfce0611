"""FastGINEConv: outputs, all gradients, every option."""

from __future__ import annotations

import copy

import pytest
import torch
from pyg_cases import alike, close, gradients, random_graph, same
from torch import nn
from torch_geometric.nn import GINEConv

from fastsparse_pyg import FastGINEConv, prepare


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def pair(device: str, dtype: torch.dtype = torch.float32, **options: object) -> tuple[GINEConv, FastGINEConv]:
    reference, layer = (conv(network(), **options).to(device, dtype) for conv in (GINEConv, FastGINEConv))
    return reference, layer


def draw(rows: int, width: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    "make_network",
    [
        lambda: nn.Linear(6, 5),
        lambda: nn.Linear(6, 5, bias=False),
        lambda: nn.Sequential(nn.Linear(6, 5)),
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(6, 5)),
        lambda: nn.Sequential(),
    ],
)
@pytest.mark.usefixtures("kernels_only")
def test_networks_that_begin_otherwise(device, make_network):
    edge_index = random_graph(device=device)
    network = make_network()
    layers = [
        conv(copy.deepcopy(network), eps=0.5).to(device, torch.float64) for conv in (GINEConv, FastGINEConv)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    x = draw(40, 6, device, torch.float64)
    edge_attr = draw(edge_index.size(1), 6, device, torch.float64)
    same(*layers, lambda conv: conv(x, edge_index, edge_attr), [x, edge_attr], tolerance=1e-10, floor=1)
    inputs = [x, edge_attr, *layers[1].parameters()]
    firsts = [
        torch.autograd.grad(
            conv(x, edge_index, edge_attr).square().sum(),
            [x, edge_attr, *conv.parameters()],
            create_graph=True,
        )
        for conv in layers
    ]
    seconds = [
        torch.autograd.grad(sum(each.square().sum() for each in first), given)
        for first, given in zip(firsts, ([x, edge_attr, *layers[0].parameters()], inputs), strict=True)
    ]
    for expected, got in zip(*seconds, strict=True):
        close(got, expected)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.usefixtures("kernels_only")
def test_features_may_be_written_after_the_layer(device, edge_dim, autocast):
    """As with the original, whose relu keeps its result; their leaves too, if results have a gradient."""
    edge_index = random_graph(device=device)
    torch.manual_seed(0)
    layer = FastGINEConv(nn.Linear(6, 6), edge_dim=edge_dim).to(device)
    leaves = [draw(40, 6, device), draw(edge_index.size(1), edge_dim or 6, device), *layer.parameters()]
    found = []
    for in_place in (False, True):
        x, edge_attr = 1 * leaves[0], 1 * leaves[1]
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            out = layer(x, edge_index, edge_attr)
        if in_place:
            x += out
            if edge_dim is None:
                edge_attr += 1
        else:
            x = x + out
        once = torch.autograd.grad(x.square().sum(), leaves, create_graph=True)
        twice = torch.autograd.grad(sum(each.square().sum() for each in once), leaves)
        found.append([*once, *twice])
        constant = leaves[0].detach().clone()
        out = layer(constant, edge_index, leaves[1].detach())
        if in_place:
            constant += out
        else:
            constant = constant + out
        found[-1] += torch.autograd.grad(constant.square().sum(), leaves[2:])
    for got, expected in zip(*found, strict=True):
        close(got, expected)


@pytest.mark.parametrize("pair_given", [False, True])
@pytest.mark.usefixtures("kernels_only")
def test_no_features_are_kept(device, pair_given):
    edge_index = random_graph(device=device)
    x, edge_attr, kept = draw(40, 6, device), draw(edge_index.size(1), 6, device), []
    _, layer = pair(device)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda it: it
    ):
        layer((x, None) if pair_given else x, edge_index, edge_attr)
    addresses = {tensor.data_ptr() for tensor in kept}
    assert addresses
    assert addresses.isdisjoint((x.data_ptr(), edge_attr.data_ptr()))


def test_the_original_runs_where_no_kernel_can_and_says_why(reasons):
    edge_index = random_graph()
    x, edge_attr = draw(40, 6, "cpu"), draw(edge_index.size(1), 6, "cpu")
    cases = [
        ({"aggr": "mean"}, x, edge_attr, "aggr='mean'"),
        ({}, x, edge_attr[:, :1].expand(-1, 6).double(), "or weights of different dtypes"),
        ({}, x[None], edge_attr, "features that are not one matrix per side"),
    ]
    for options, given, edges, why in cases:
        reference, layer = pair("cpu", **options)
        if edges.dtype == torch.float64:
            reference, layer = (copy.deepcopy(conv).double() for conv in (reference, layer))
        for _ in range(2):
            same(reference, layer, lambda conv, x=given, e=edges: conv(x, edge_index, e), [], floor=1)
        assert reasons.text.count(why) == 1
    # PyG's code gets the edges of an Adjacency.
    reference, layer = pair("cpu", aggr="max")
    close(layer(x, prepare(edge_index, 40), edge_attr), reference(x, edge_index, edge_attr))


def test_hooks_on_the_linear_map_see_rows(reasons):
    edge_index = random_graph()
    x, edge_attr = draw(40, 6, "cpu"), draw(edge_index.size(1), 3, "cpu")
    _, layer = pair("cpu", edge_dim=3)
    expected = layer(x, edge_index, edge_attr)
    assert not reasons.records
    seen = []
    layer.lin.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    close(layer(x, edge_index, edge_attr), expected)
    assert seen == [(edge_index.size(1), 6)]
    assert reasons.text.count("stores a row of projected features for every edge") == 1


def test_edge_features_that_do_not_fit(device):
    edge_index = random_graph(device=device)
    _, layer = pair(device)
    with pytest.raises(ValueError, match="dimensionalities do not match"):
        layer(draw(40, 6, device), edge_index, draw(edge_index.size(1), 3, device))
    with pytest.raises(ValueError, match="edge_attr: expected one row per edge"):
        layer(draw(40, 6, device), edge_index, draw(edge_index.size(1) - 1, 6, device))
    graph = prepare(edge_index, 40, add_self_loops=True)
    with pytest.raises(ValueError, match="add_self_loops=False"):
        layer(draw(40, 6, device), graph, draw(edge_index.size(1), 6, device))


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("options", [{"edge_dim": 3}, {}, {"edge_dim": 3, "eps": 0.5}], ids=str)
def test_under_autocast_results_have_the_original_dtype(device, options, begins, given):
    edge_index = random_graph(device=device)
    reference, layer = pair(device, **options)
    if not begins:
        for conv in (reference, layer):
            conv.nn.insert(0, nn.Identity())
    # Multiples of 1/8: 16 bits represent the messages exactly, so rounding does not change the ReLU.
    for conv in (reference, layer):
        conv.nn = nn.Sequential(*(nn.Tanh() if isinstance(item, nn.ReLU) else item for item in conv.nn))
    if options:
        for parameter in reference.lin.parameters():
            parameter.data = (parameter.data * 8).round() / 8
    x = ((draw(40, 6, device) * 8).round() / 8).to(given)
    edge_attr = draw(edge_index.size(1), options.get("edge_dim", 6), device).sign()
    x, edge_attr = (it.detach().requires_grad_() for it in (x, edge_attr if options else edge_attr.to(given)))
    layer.load_state_dict(reference.state_dict())
    results = []
    for conv in (layer, reference):
        with torch.autocast(device, torch.bfloat16):
            out = conv(x, edge_index, edge_attr)
            if conv is layer:
                with torch.no_grad():
                    assert torch.equal(conv(x, edge_index, edge_attr), out)
        results.append([out, *gradients(out, [x, edge_attr, *conv.parameters()])])
    for found, expected in zip(*results, strict=True):
        alike(found, expected, 5e-2)


@pytest.mark.usefixtures("kernels_only")
def test_edges_may_be_wider_than_nodes_under_autocast(device):
    """In all layers except a model's first, the nodes' features are 16-bit results of the previous layer."""
    edge_index = random_graph(device=device)
    reference, layer = pair(device)
    layer.load_state_dict(reference.state_dict())
    x, edge_attr = (
        draw(40, 6, device).detach().bfloat16().requires_grad_(),
        draw(edge_index.size(1), 6, device),
    )
    results = []
    for conv in (layer, reference):
        conv.nn = conv.nn[:1]
        with torch.autocast(device, torch.bfloat16):
            out = conv(x, edge_index, edge_attr)
        results.append([out, *gradients(out, [x, edge_attr, *conv.parameters()])])
    assert results[0][0].grad_fn.name() == "_GineBackward"
    for found, expected in zip(*results, strict=True):
        alike(found, expected, 1e-2)


@pytest.mark.usefixtures("kernels_only")
def test_one_step_under_autocast(device):
    edge_index = random_graph(device=device)
    reference, layer = pair(device, edge_dim=3)
    layer.load_state_dict(reference.state_dict())
    x, edge_attr = draw(40, 6, device), draw(edge_index.size(1), 3, device)
    outputs = []
    for conv in (layer, reference):
        with torch.autocast(device, torch.bfloat16):
            conv.nn = conv.nn[:1]
            outputs.append(conv(x, edge_index, edge_attr))
    assert outputs[0].grad_fn.name() == "_GineBackward"
    inputs = [[x, edge_attr, *conv.parameters()] for conv in (layer, reference)]
    twice = [
        torch.autograd.grad(
            sum(
                g.float().square().sum()
                for g in torch.autograd.grad(out, given, torch.ones_like(out), create_graph=True)
            ),
            given[:2],
            retain_graph=True,
        )
        for out, given in zip(outputs, inputs, strict=True)
    ]
    for found, expected in zip(*twice, strict=True):
        alike(found, expected, 1e-1)
    with torch.autocast(device, torch.bfloat16):
        out = layer(x, edge_index, edge_attr)
    with torch.no_grad():
        layer.nn[0].weight.mul_(2)  # the backward pass reads the cast copy
    expected, *_ = torch.autograd.grad(outputs[0], [x], torch.ones_like(out))
    found, *_ = torch.autograd.grad(out, [x], torch.ones_like(out), retain_graph=True)
    assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="weight: modified"):
        torch.autograd.grad(out, [x], torch.ones_like(out), create_graph=True)
