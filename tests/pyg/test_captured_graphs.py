"""Captured steps on PyG's graphs and batches: padding changes nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from captured_steps import compare
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import Batch, Data
from torch_geometric.utils import to_dense_batch, trim_to_layer

from fastsparse_core import SlowPathWarning, capture
from fastsparse_core.sampling import FeatureTable
from fastsparse_pyg import (
    DataLoader,
    FastGATConv,
    FastGATv2Conv,
    FastGCNConv,
    FastGINConv,
    FastSAGEConv,
    FastTransformerConv,
    NeighborLoader,
)

#: Tests of whole trainings; tests/core/test_capture.py has the tests for a quick run.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_on")]
WIDTH = 8


def molecule(generator, least=3, most=12, loops=True):
    nodes = int(torch.randint(least, most, (), generator=generator))
    edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
    if not loops:
        edges = edges[:, edges[0] != edges[1]]
    return Data(
        x=torch.randn(nodes, WIDTH, generator=generator),
        edge_index=edges,
        edge_attr=torch.randn(edges.size(1), 3, generator=generator),
        y=torch.randn(1, 1, generator=generator),
        target=torch.randint(WIDTH, (nodes,), generator=generator),
    )


def draw(sizes, **options):
    generator = torch.Generator().manual_seed(0)
    return [Batch.from_data_list([molecule(generator, **options) for _ in range(size)]) for size in sizes]


def gin():
    return FastGINConv(
        nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, WIDTH))
    )


class Dense(nn.Module):
    """Attention over each graph by a dense batch, as people write it."""

    takes_batch = True
    kept = (to_dense_batch,)  # a reference that is not in a module, so it cannot be replaced there

    def __init__(self, keeps=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.keeps = keeps

    def forward(self, x, edge_index, batch):
        call = self.kept[0] if self.keeps else to_dense_batch
        rows, is_node = call(x, batch, fill_value=0.5)
        out, _ = self.attention(rows, rows, rows, key_padding_mask=~is_node, need_weights=False)
        return x + out[is_node]


def gps():
    layer = pyg.GPSConv(WIDTH, FastGINConv(nn.Linear(WIDTH, WIDTH)), heads=2)
    layer.takes_batch = True
    return layer


CONVS = {
    "gcn": lambda: FastGCNConv(WIDTH, WIDTH),
    "sage": lambda: FastSAGEConv(WIDTH, WIDTH),
    "gin": gin,
    "gat": lambda: FastGATConv(WIDTH, 4, heads=2),
    "gat-edges": lambda: FastGATConv(WIDTH, 4, heads=2, edge_dim=3),
    "gatv2": lambda: FastGATv2Conv(WIDTH, 4, heads=2),
    "gatv2-edges": lambda: FastGATv2Conv(WIDTH, 4, heads=2, edge_dim=3, add_self_loops=False),
    "transformer": lambda: FastTransformerConv(WIDTH, 4, heads=2),
    "transformer-edges": lambda: FastTransformerConv(WIDTH, 4, heads=2, edge_dim=3),
    "gps": gps,
    "dense": Dense,
    "dense-kept": lambda: Dense(keeps=True),
    "pyg-gin": lambda: pyg.GINConv(nn.Linear(WIDTH, WIDTH)),
    "pyg-gine": lambda: pyg.GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=3),
}
NORMS = {
    "batch": lambda: pyg.BatchNorm(WIDTH),
    "layer": lambda: pyg.LayerNorm(WIDTH, mode="node"),
    "layer-graph": lambda: pyg.LayerNorm(WIDTH, mode="graph"),
    "graph": lambda: pyg.GraphNorm(WIDTH),
    "instance": lambda: pyg.InstanceNorm(WIDTH),
    "size": lambda: pyg.GraphSizeNorm(),
}
READOUTS = {
    "add": lambda: pyg.global_add_pool,
    "mean": lambda: pyg.global_mean_pool,
    "max": lambda: pyg.global_max_pool,
    "aggr-mean": lambda: pyg.MeanAggregation(),
    "aggr-std": lambda: pyg.StdAggregation(),
    "aggr-softmax": lambda: pyg.SoftmaxAggregation(learn=True),
    "aggr-attention": lambda: pyg.AttentionalAggregation(nn.Linear(WIDTH, 1)),
    "aggr-multi": lambda: pyg.MultiAggregation(["mean", "max"], mode="sum"),
}


class Net(nn.Module):
    def __init__(self, conv="gin", norm="batch", readout="mean"):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([CONVS[conv](), CONVS[conv]()])
        self.norms = nn.ModuleList([NORMS[norm](), NORMS[norm]()])
        self.readout = READOUTS[readout]()
        self.out = nn.Linear(WIDTH, 1)
        self.has_edges = "edges" in conv or "gine" in conv
        self.norm_takes_batch = norm not in ("batch",)

    def nodes(self, batch):
        x = batch.x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            more = [batch.edge_attr] if self.has_edges else []
            if getattr(conv, "takes_batch", False):
                more = [batch.batch]
            x = conv(x, batch.edge_index, *more)
            x = (norm(x, batch.batch) if self.norm_takes_batch else norm(x)).relu()
        return x

    def forward(self, batch):
        return self.out(self.readout(self.nodes(batch), batch.batch))


def on_graphs(net, batch):
    return F.mse_loss(net(batch), batch.y)


def on_nodes(net, batch):
    return F.cross_entropy(net.nodes(batch), batch.target)


ADAM = partial(torch.optim.Adam, lr=0.01)


def check(device, batches, loss=on_graphs, captures_model=False, optimizer=ADAM, **options):
    """50 and more losses of a captured step agree with those of the step."""
    make = partial(Net, **options)
    found, models = compare(device, make, loss, lambda: batches, optimizer, captures_model=captures_model)
    # Running means depend on biases that the normalisation removes, and whose gradients are only rounding.
    variances = [
        {name: item for name, item in model.state_dict().items() if "running_var" in name} for model in models
    ]
    torch.testing.assert_close(*variances, rtol=1e-3, atol=1e-4)
    return found.records


def on(device, batches):
    return [batch.to(device) for batch in batches]


@pytest.mark.parametrize("conv", CONVS)
def test_layers(device, conv):
    options = {"optimizer": torch.optim.SGD} if conv == "gps" else {}
    assert len(check(device, on(device, draw([9] * 52)), conv=conv, **options)) == 1


@pytest.mark.parametrize("norm", [name for name in NORMS if name != "batch"])
def test_normalisation(device, norm):
    # With Adam, gradients that are only rounding would cause whole steps: those of biases that the
    # normalisation removes. A difference of 1e-7 in the weights would be 7e-2 in the losses, captured or not.
    assert check(device, on(device, draw([9] * 20)), norm=norm, optimizer=torch.optim.SGD)


@pytest.mark.parametrize("readout", [name for name in READOUTS if name != "mean"])
def test_readouts(device, readout):
    assert check(device, on(device, draw([9] * 20)), readout=readout)


def test_losses_of_nodes(device):
    assert check(device, on(device, draw([9] * 20)), on_nodes)


def by_hand(net, batch):
    """Sums and means over all nodes, of losses and of what people print."""
    out = net.nodes(batch)
    each = F.cross_entropy(out, batch.target, reduction="none")
    right = out.argmax(-1) == batch.target
    more = torch.sum(out.square(), (0, 1)), torch.mean(out, 0), out.sum(1).mean(), right.sum()
    spread = (out - out.mean(dim=0, keepdim=True)).square().mean()
    return each.mean() + 1e-3 * more[0] + spread, right.float().mean(), *more


def test_reductions_of_nodes(device):
    assert check(device, on(device, draw([9] * 20)), by_hand, norm="layer")


def test_captured_models(device):
    assert check(device, on(device, draw([9] * 40)), captures_model=True, conv="gcn")


def test_larger_batches_and_a_second_epoch(device):
    batches = draw([9] * 14) + draw([9] * 4, least=12, most=30) + draw([9] * 3)
    assert len(check(device, on(device, batches) * 2)) == 2


@pytest.mark.parametrize("conv", ["dense", "dense-kept"])
def test_dense_batches_of_larger_graphs(device, conv):
    """Capacity for the largest graph is 12, then 32."""
    batches = draw([9] * 14) + draw([9] * 4, least=17, most=30) + draw([9] * 3)
    assert len(check(device, on(device, batches) * 2, conv=conv)) == 2
    rows, is_node = to_dense_batch(torch.arange(4.0), torch.tensor([0, 0, 0, 1]))
    assert rows.tolist() == [[0, 1, 2], [3, 0, 0]]
    assert is_node.sum() == 4


def test_dense_batches_of_unknown_graphs(device):
    """Without the loader's notes, the sizes of the graphs are unknown."""
    batches = on(device, draw([9] * 12))
    for batch in batches:
        del batch._slice_dict
    step = capture(torch.no_grad()(partial(on_graphs, Net(conv="dense").to(device))))
    with pytest.warns(SlowPathWarning, match=r"calls to_dense_batch\(\).*batch_size and max"):
        list(map(step, batches))


@pytest.mark.parametrize("conv", ["gcn", "gin", "gat"])
@pytest.mark.parametrize("ascends", [False, True])
def test_batches_of_our_loader(device, conv, ascends):
    generator = torch.Generator().manual_seed(0)
    graphs = [molecule(generator) for _ in range(90)]
    for data in graphs if ascends else ():
        order = data.edge_index[1].argsort(stable=True)
        data.edge_index, data.edge_attr = data.edge_index[:, order], data.edge_attr[order]
    loader = DataLoader(
        graphs, batch_size=9, shuffle=True, generator=torch.Generator().manual_seed(1), device=device
    )
    batches = [batch for _ in range(4) for batch in loader]
    assert len(check(device, batches, conv=conv)) == 1


def named(count):
    generator = torch.Generator().manual_seed(0)
    graphs = [molecule(generator) for _ in range(count)]
    for nth, data in enumerate(graphs):
        data.smiles = f"C{nth}"
    return DataLoader(graphs, batch_size=9, shuffle=True)


def test_names_of_graphs_do_not_tell_batches_apart(device):
    loader = named(90)
    batches = [batch.to(device) for _ in range(4) for batch in loader]
    assert batches[0].smiles != batches[1].smiles
    assert len(check(device, batches)) == 1
    assert len(batches[0].smiles) == 9


def test_a_step_that_reads_names_runs_as_it_is(device):
    loader = named(90)
    seen = []

    def loss(net, batch):
        seen.append(batch.smiles)
        return on_graphs(net, batch)

    batches = [batch.to(device) for _ in range(4) for batch in loader]
    with pytest.warns(SlowPathWarning, match="smiles"):
        assert not check(device, batches, loss)
    assert seen[-1] == batches[-1].smiles


def test_last_batches_are_recorded_apart(device):
    epoch = on(device, draw([9] * 4 + [5]))
    assert len(check(device, epoch * 12)) == 2


@pytest.mark.parametrize("empty", ["edges", "graph"])
def test_batches_with_nothing_in_them(device, empty):
    batches = draw([9] * 20)
    for nth in (3, 14, 17):
        parts = batches[nth].to_data_list()
        for part in parts if empty == "edges" else parts[:1]:
            part.edge_index, part.edge_attr = part.edge_index[:, :0], part.edge_attr[:0]
        if empty == "graph":
            parts[0].x, parts[0].target = parts[0].x[:0], parts[0].target[:0]
        batches[nth] = Batch.from_data_list(parts)
    assert check(device, on(device, batches))


def test_norms_over_all_nodes(device):
    def loss(net, batch):
        x = pyg.PairNorm()(net.nodes(batch))
        return F.mse_loss(net.out(net.readout(x, batch.batch)), batch.y)

    assert check(device, on(device, draw([9] * 16)), loss)


@pytest.mark.parametrize("mixing", ["deviation", "index"])
def test_what_mixes_graphs_runs_as_it_is(device, mixing):
    def loss(net, batch):
        x = net.nodes(batch)
        if mixing == "deviation":
            return (x - x.std(0)).square().sum() / 100
        per_graph = torch.ones(batch.num_graphs, 1, device=x.device)
        return F.mse_loss(net.out(net.readout(x * per_graph[batch.batch], batch.batch)), batch.y)

    with pytest.warns(SlowPathWarning, match="runs unchanged") as warned:
        assert not check(device, on(device, draw([9] * 16)), loss)
    assert sum(item.category is SlowPathWarning for item in warned) == 1


def test_an_exception_in_a_step(device):
    net, batches = Net().to(device), on(device, draw([9] * 20))
    step = capture(lambda batch: on_graphs(net, batch))
    with torch.no_grad():
        for nth, batch in enumerate(batches):
            if nth in (2, 12):
                wrong = batch.clone()
                wrong.x = wrong.x[:, :3]
                with pytest.raises(RuntimeError):
                    step(wrong)
            step(batch)
    assert len(step.captured.records) == 1


def whole_graph(device):
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(300, WIDTH, generator=generator),
        edge_index=torch.randint(290, (2, 1500), generator=generator),
        y=torch.randint(4, (300,), generator=generator),
        train_mask=torch.rand(300, generator=generator) < 0.3,
    )
    return data.to(device)


@pytest.mark.parametrize("conv", ["gcn", "gat", "transformer"])
def test_whole_graphs(device, conv):
    def loss(net, data):
        return F.cross_entropy(net.train().nodes(data)[data.train_mask], data.y[data.train_mask])

    def batches():
        return [whole_graph(device)] * 50

    rtol = 1e-5 if device == "cpu" else 1e-3
    found, _ = compare(device, partial(Net, conv), loss, batches, ADAM, rtol=rtol)
    assert len(found.records) == 1


def test_a_captured_model_sees_what_changed_in_a_graph(device):
    data = whole_graph(device)
    nets = [Net("sage").to(device).eval() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        net.forward = net.nodes
    capture(nets[1])
    changes = {
        30: lambda: data.x.add_(1),
        32: lambda: setattr(data, "x", data.x * 2),
        50: lambda: setattr(data, "edge_index", data.edge_index.flip(1)),
        70: lambda: setattr(data, "more", torch.ones(300, device=device)),
        90: lambda: setattr(data, "kind", "other"),
    }
    for nth in range(100):
        changes.get(nth, lambda: None)()
        expected, found = (net(data) for net in nets)
        torch.testing.assert_close(found, expected, rtol=1e-5 if device == "cpu" else 1e-3, atol=1e-5)
    assert nets[1].forward.is_recorded, [form.refusal for form in nets[1].forward.forms]


def test_a_step_that_gathers(device):
    """The loader's data has no features; those of its nodes come from a table that is on the device."""
    data = whole_graph("cpu")
    table = FeatureTable(data.x.to(device), torch.empty(0, device=device).device)
    losses = []
    for captures in (False, True):
        given = Data(y=data.y, edge_index=data.edge_index, num_nodes=300) if captures else data
        net = Net("sage").to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        loader = NeighborLoader(given, [5, 3], batch_size=16, input_nodes=torch.arange(96), device=device)

        def step(batch, net=net, optimizer=optimizer):
            optimizer.zero_grad()
            x = table[batch.n_id] if batch.x is None else batch.x
            for layer in net.convs:
                x = layer(x, batch.edge_index).relu()
            loss = F.cross_entropy(x[: batch.batch_size], batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            return loss

        run = capture(step) if captures else step
        torch.manual_seed(1)
        losses.append(torch.stack([run(batch).detach() for _ in range(10) for batch in loader]))
    assert run.captured.is_recorded, [form.refusal for form in run.captured.forms]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-4 if device == "cpu" else 1e-3, atol=1e-6)


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("conv", ["sage", "gcn", "gat", "gatv2", "transformer", "pyg-gin"])
def test_sampled_neighbours(device, conv, trims):
    """Each hop is padded on its own, because later layers may leave out the outer hops."""
    data = whole_graph("cpu")
    loader = NeighborLoader(data, [5, 3], batch_size=16, input_nodes=torch.arange(0, 90), device=device)

    def loss(net, batch):
        x, edges = batch.x, batch.edge_index
        for nth, (layer, norm) in enumerate(zip(net.convs, net.norms, strict=True)):
            if trims:
                sizes = batch.num_sampled_nodes, batch.num_sampled_edges
                x, edges, _ = trim_to_layer(nth, *sizes, x, edges)
            x = norm(layer(x, edges)).relu()
        return F.cross_entropy(x[: batch.batch_size], batch.y[: batch.batch_size]), x

    found, _ = compare(
        device,
        partial(Net, conv),
        loss,
        lambda: (batch for _ in range(10) for batch in loader),
        ADAM,
        rtol=2e-4 if device == "cpu" else 1e-3,
    )
    assert len(found.records) == 2  # seeds of an epoch's last batch are fewer
    assert all(len(record.capacity.nodes[0]) == 3 for record in found.records)
    assert all(record.held[0].sorted for record in found.records)
