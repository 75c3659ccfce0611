"""FastGATv2Conv against GATv2Conv: outputs, all gradients, every option and input kind of its own."""

from __future__ import annotations

import logging

import pytest
import torch
from pyg_cases import close, random_graph, same
from torch_geometric.nn import GATv2Conv

from fastsparse_core import log
from fastsparse_pyg import FastGATv2Conv, prepare

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}

OPTIONS = [
    {},
    {"heads": 3},
    {"heads": 3, "concat": False},
    {"heads": 2, "share_weights": True},
    {"heads": 2, "negative_slope": 0.0, "bias": False},
    {"heads": 2, "negative_slope": 1.5},
    {"add_self_loops": False},
    {"residual": True, "heads": 2},
    {"flow": "target_to_source", "heads": 2},
]


def pair(
    *args: object, device: str, dtype: torch.dtype = torch.float32, **options: object
) -> tuple[GATv2Conv, FastGATv2Conv]:
    reference, layer = (conv(*args, **options).to(device, dtype) for conv in (GATv2Conv, FastGATv2Conv))
    if reference.bias is not None:
        torch.nn.init.normal_(reference.bias)
        torch.nn.init.normal_(reference.lin_l.bias)
    return reference, layer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.usefixtures("kernels_only")
def test_matches_the_original(device, options, dtype):
    edge_index = random_graph(device=device)
    reference, layer = pair(6, 5, device=device, dtype=dtype, **options)
    for requires_grad in (True, False):
        x = torch.randn(40, 6, device=device, dtype=dtype, requires_grad=requires_grad)
        same(
            reference, layer, lambda conv, x=x: conv(x, edge_index), [x], tolerance=TOLERANCE[dtype], floor=1
        )


@pytest.mark.parametrize("fill_value", ["mean", "add", 0.5, "tensor"])
@pytest.mark.parametrize(
    "options",
    [{"heads": 3}, {"add_self_loops": False}, {"flow": "target_to_source", "residual": True}],
    ids=str,
)
@pytest.mark.usefixtures("kernels_only")
def test_edge_features(device, options, fill_value):
    edge_index = random_graph(device=device)
    fill = torch.randn(3, device=device) if fill_value == "tensor" else fill_value
    reference, layer = pair(6, 5, edge_dim=3, fill_value=fill, device=device, **options)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    edge_attr = torch.randn(edge_index.size(1), 3, device=device, requires_grad=True)
    inputs = [x, edge_attr]
    same(reference, layer, lambda conv: conv(x, edge_index, edge_attr), inputs, tolerance=2e-5, floor=1)
    for add_self_loops in {False, layer.add_self_loops}:
        graph = prepare(edge_index, 40, flow=layer.flow, add_self_loops=add_self_loops)
        same(
            reference,
            layer,
            lambda conv: conv(x, edge_index, edge_attr),
            inputs,
            fast_call=lambda conv, graph=graph: conv(x, graph, edge_attr),
            tolerance=2e-5,
            floor=1,
        )


def test_other_fills_run_the_original(device):
    edge_index = random_graph(device=device)
    reference, layer = pair(6, 5, edge_dim=3, fill_value="max", device=device)
    x = torch.randn(40, 6, device=device)
    edge_attr = torch.randn(edge_index.size(1), 3, device=device)
    same(reference, layer, lambda conv: conv(x, edge_index, edge_attr), [], floor=1)


def test_edge_features_run_fused_but_for_hooks_on_their_map(monkeypatch, caplog):
    monkeypatch.setattr(log, "_seen", set())
    caplog.set_level(logging.INFO)
    edge_index = random_graph()
    x, edge_attr = torch.randn(40, 6), torch.randn(edge_index.size(1), 3)
    layer = FastGATv2Conv(6, 5, heads=2, edge_dim=3)
    expected = layer(x, edge_index, edge_attr)
    assert "unfused" not in caplog.text
    layer.lin_edge.register_forward_hook(lambda module, inputs, out: out)
    for _ in range(2):
        close(layer(x, edge_index, edge_attr), expected)
    assert caplog.text.count("unfused") == 1


@pytest.mark.parametrize("in_channels", [6, (6, 4)], ids=str)
@pytest.mark.parametrize("add_self_loops", [True, False])
@pytest.mark.parametrize(("num_src", "num_dst"), [(40, 25), (25, 40)])
@pytest.mark.usefixtures("kernels_only")
def test_bipartite(device, in_channels, add_self_loops, num_src, num_dst):
    edge_index = random_graph(num_src, num_dst, device=device)
    options = {"heads": 2, "add_self_loops": add_self_loops, "residual": True, "edge_dim": 3}
    reference, layer = pair(in_channels, 5, fill_value=0.5, device=device, **options)
    width = in_channels if isinstance(in_channels, int) else in_channels[1]
    x = (
        torch.randn(num_src, 6, device=device, requires_grad=True),
        torch.randn(num_dst, width, device=device, requires_grad=True),
    )
    edge_attr = torch.randn(edge_index.size(1), 3, device=device)
    graph = prepare(edge_index, (num_src, num_dst))
    for features in (None, edge_attr):
        for given in (edge_index, graph):
            same(
                reference,
                layer,
                lambda conv, features=features: conv(x, edge_index, features),
                list(x),
                fast_call=lambda conv, features=features, given=given: conv(x, given, features),
                tolerance=2e-5,
                floor=1,
            )


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("options", [{"heads": 3}, {"add_self_loops": False, "concat": False}], ids=str)
@pytest.mark.usefixtures("kernels_only")
def test_attention_weights(device, options, edge_dim):
    edge_index = random_graph(device=device)
    reference, layer = pair(6, 5, edge_dim=edge_dim, device=device, **options)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(40, 6, device=device, requires_grad=True)
    edge_attr = None if edge_dim is None else torch.randn(edge_index.size(1), edge_dim, device=device)
    expected, (expected_edges, expected_alpha) = reference(x, edge_index, edge_attr, True)
    for graph in (edge_index, prepare(edge_index, 40)):
        got, (edges, alpha) = layer(x, graph, edge_attr, True)
        close(got, expected)
        assert torch.equal(edges, expected_edges)
        close(alpha, expected_alpha)
    same(reference, layer, lambda conv: conv(x, edge_index, edge_attr, True)[1][1], [x], floor=1)
    assert torch.is_tensor(layer(x, edge_index, edge_attr, return_attention_weights=False))


def test_what_the_original_asserts(device):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device)
    edge_attr = torch.randn(edge_index.size(1), 3, device=device)
    for args in (((x, None), edge_index), (x[None], edge_index), (x, edge_index, edge_attr)):
        for conv in pair(6, 5, device=device):
            with pytest.raises(AssertionError):
                conv(*args)
