"""``why``: what computed each layer, without a trace of the run."""

from __future__ import annotations

import warnings

import pytest
import torch
from pyg_cases import random_graph
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, MessagePassing, NNConv, SAGEConv

import fastsparse_core
import fastsparse_pyg
from fastsparse_core import SlowPathWarning, log
from fastsparse_pyg import FastGATConv, FastGCNConv, FastSAGEConv, accelerate, why


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = self.norm(layer(x, edge_index)).relu()
        return x


class Doubled(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return 2 * x_j


def test_each_layer_of_a_model(device):
    model = Model(FastGCNConv(6, 6), FastGCNConv(6, 6, decomposed_layers=2), GCNConv(6, 6), Doubled())
    found = why(model.to(device), torch.randn(40, 6, device=device), random_graph(device=device))
    assert [(item.path, item.by) for item in found] == [
        ("layers.0", "FastSparse"),
        ("layers.1", "PyG"),
        ("layers.2", "PyG"),
        ("layers.3", "PyG"),
    ]
    assert found[0].reason == ""
    assert "decomposed_layers" in found[1].reason
    assert "Use decomposed_layers=1" in found[1].reason
    assert "Use fastsparse_pyg.FastGCNConv" in found[2].reason
    assert "Call fastsparse_pyg.accelerate(model)" in found[3].reason
    shown = str(found)
    assert "computed by" in shown
    assert "layers.3" in shown


def test_a_layer_that_accelerate_leaves():
    class Own(Doubled):
        def propagate(self, edge_index, size=None, **given):
            return super().propagate(edge_index, size=size, **given)

    layer = Own()
    fastsparse_pyg.accelerate(layer, show=False)
    (found,) = why(layer, torch.randn(40, 6), random_graph())
    assert (
        found.reason == "it is PyG's layer. accelerate() leaves it unchanged: a layer with its own propagate"
    )
    assert type(layer) is Own


def test_a_layer_alone_twice():
    """Messages that are logged once per process are found each time."""
    layer = Doubled()
    accelerate(layer, show=False)
    for _ in range(2):
        (found,) = why(layer, torch.randn(40, 6), random_graph())
        assert (found.path, found.by) == ("", "PyG")
        assert found.reason == "fewer than 4,096 edges on the CPU: PyG is faster there"


def test_it_leaves_no_trace(device):
    model = Model(FastGATConv(6, 6, dropout=0.5), FastGCNConv(6, 6, decomposed_layers=2)).to(device)
    x, edge_index = torch.randn(40, 6, device=device, requires_grad=True), random_graph(device=device)
    before = {name: item.clone() for name, item in model.state_dict().items()}
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        why(model, x, edge_index)
    number = torch.rand(1, device=device)
    torch.manual_seed(1)
    assert torch.equal(number, torch.rand(1, device=device))
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())
    assert x.grad is None
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


def test_layers_that_are_not_called_and_errors():
    model = Model(FastGCNConv(6, 6))
    model.unused = GATConv(6, 6)
    found = why(model, torch.randn(40, 6), random_graph())
    assert [item.by for item in found] == ["FastSparse", "not called"]
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got int"):
        why(3)
    with pytest.raises(TypeError, match="x: expected"):
        why(model, None, random_graph())
    assert not model.layers[0]._forward_hooks
    assert str(why(nn.Linear(2, 2), torch.randn(1, 2))).startswith(
        "no graph layers found. Layers in a Python"
    )


def test_a_reason_without_advice():
    layer = FastGCNConv(6, 6)
    layer.register_message_forward_hook(lambda *_: None)
    assert why(layer, torch.randn(40, 6), random_graph())[0].reason == "a hook on message passing"


class ByHand(nn.Module):
    def forward(self, x, edge_index):
        row, col = edge_index
        return torch.zeros_like(x).index_add(0, col, x[row])


def test_it_names_what_computes_a_layer():
    """A drop-in, the user's own message, an edge network, and a module without `MessagePassing`."""
    edges = torch.randint(40, (2, 5000))
    network = NNConv(6, 6, nn.Linear(3, 36))
    own = ByHand()
    for layer in (doubled := Doubled(), network, own):
        accelerate(layer, show=False)
    x, edge_attr = torch.randn(40, 6), torch.randn(5000, 3)
    for _ in range(4):  # the module's own code runs new edges
        own(x, edges)
    (plain,) = why(FastGATConv(6, 6), x, edges)
    (summed,) = why(doubled, x, edges)
    (edgewise,) = why(network, x, edges, edge_attr)
    found = why(own, x, edges)
    kernels = [each.kernel for each in (plain, summed, edgewise, found[0])]
    assert kernels[0] == "fused attention"
    assert kernels[1] == "sum term by term"
    assert "segment mean" in kernels[2] or "segment sum" in kernels[2]
    assert "sums on segments" in kernels[3]
    assert "FastSparse: its own code" in str(found)


class Branching(MessagePassing):
    def __init__(self, limit=0.0):
        super().__init__(aggr="add")
        self.limit = limit

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return x_j if x_j.mean() > self.limit else x_i - x_j


class Printing(Branching):
    def message(self, x_j):
        print(end="")
        return x_j.relu()


@pytest.mark.parametrize(
    ("layer", "reason"), [(Branching, "branches on the values of tensors"), (Printing, "uses print")]
)
def test_messages_that_cannot_be_traced_are_said_with_their_reason(layer, reason, monkeypatch, caplog):
    monkeypatch.setattr(log, "seen", set())
    model = layer()
    with caplog.at_level("INFO"):
        accelerate(model, show=False)
        (found,) = why(model, torch.randn(40, 6), torch.randint(40, (2, 5000)))
    assert (found.by, found.reason) == ("FastSparse", "")
    assert found.kernel == f"message() per edge, because it {reason}: segment sum"
    assert f"message() runs per edge, because it {reason}" in caplog.text


@pytest.mark.parametrize("accelerated", [False, True])
def test_aggregations_without_a_kernel_are_said_to_be_pygs(accelerated, monkeypatch):
    monkeypatch.setattr(log, "seen", set())
    layer = SAGEConv(6, 4, aggr="median") if accelerated else FastSAGEConv(6, 4, aggr="median")
    if accelerated:
        (row,) = accelerate(layer, show=False).rows
        assert row.kernel == "message() per edge: PyG reduces, aggr='median' has no kernel"
    x, edges = torch.randn(40, 6), torch.randint(40, (2, 5000))
    (found,) = why(layer, x, edges)
    assert found.by == "PyG"
    assert found.reason.startswith("aggr='median' has no kernel. Use aggr='sum' or")
    with pytest.warns(SlowPathWarning, match="aggr='median' has no kernel"):
        layer(x, edges)


def test_reports_say_that_pyg_reduces():
    x, edges = torch.randn(40, 6), torch.randint(40, (2, 5000))
    fastsparse_pyg.enable("layers", report=True)
    try:
        SAGEConv(6, 4, aggr="median")(x, edges)
        rows = {(row.call, row.by, row.reason) for row, _ in fastsparse_core.report().rows}
    finally:
        fastsparse_pyg.disable()
    assert rows == {("SAGEConv", "PyG", "aggr='median' has no kernel")}
