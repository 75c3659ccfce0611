"""Captured steps on graphs of several node and edge types: padding changes nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from captured_steps import compare
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import trim_to_layer

from fastsparse_core import SlowPathWarning
from fastsparse_pyg import (
    FastGATConv,
    FastHGTConv,
    FastRGATConv,
    FastRGCNConv,
    FastSAGEConv,
    LinkNeighborLoader,
    NeighborLoader,
)

#: Tests of whole trainings; tests/core/test_capture.py has the tests for a quick run.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_on")]
WIDTH = 8


def typed_graph(num_papers=120, num_authors=90, seed=0, num_labels=None):
    """Papers, authors, and types of edges that have none."""
    generator = torch.Generator().manual_seed(seed)
    data = HeteroData()
    for name, size in (("paper", num_papers), ("author", num_authors), ("venue", 5)):
        data[name].x = torch.randn(size, WIDTH, generator=generator)
    data["paper"].y = torch.randint(
        4, (num_papers if num_labels is None else num_labels,), generator=generator
    )
    for source, name, target, count in (
        ("author", "writes", "paper", 4 * num_papers),
        ("paper", "written", "author", 3 * num_papers),
        ("paper", "cites", "paper", 3 * num_papers),
        ("venue", "prints", "paper", 0),
        ("paper", "printed", "venue", 0),
    ):
        sizes = data[source].num_nodes, data[target].num_nodes
        # The last tenth of the destinations has no neighbours.
        ends = [torch.randint(size * 9 // 10, (count,), generator=generator) for size in sizes]
        data[source, name, target].edge_index = torch.stack(ends)
    return data


class Convs(nn.Module):
    """Two layers of HeteroConv."""

    def __init__(self, data, make):
        super().__init__()
        self.convs = nn.ModuleList(
            [
                pyg.HeteroConv({edge_type: make(edge_type) for edge_type in data.edge_types}, aggr="sum")
                for _ in range(2)
            ]
        )

    def forward(self, x, edges, hops=None):
        for nth, conv in enumerate(self.convs):
            if hops is not None:
                x, edges, _ = trim_to_layer(nth, *hops, x, edges)
            x = {**x, **{name: item.relu() for name, item in conv(x, edges).items()}}
        return x


def hetero_gat(edge_type):
    return FastGATConv((WIDTH, WIDTH), 4, heads=2, add_self_loops=edge_type[0] == edge_type[2])


class Hgt(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.convs = nn.ModuleList([FastHGTConv(WIDTH, WIDTH, data.metadata(), heads=2) for _ in range(2)])

    def forward(self, x, edges):
        for conv in self.convs:
            x = {**x, **conv(x, edges)}
        return x


class Simple(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([FastSAGEConv(WIDTH, WIDTH), FastSAGEConv(WIDTH, WIDTH)])

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


MODELS = {
    "sage": lambda data: Convs(data, lambda edge_type: FastSAGEConv((WIDTH, WIDTH), WIDTH)),
    "gat": lambda data: Convs(data, hetero_gat),
    "pyg": lambda data: Convs(data, lambda edge_type: pyg.SAGEConv((WIDTH, WIDTH), WIDTH)),
    "to_hetero": lambda data: pyg.to_hetero(Simple(), data.metadata()),
    "hgt": Hgt,
}


def losses_of(*given):
    """What captured a step whose losses are those of the step."""
    return compare(*given)[0]


def of_papers(model, batch, count, **options):
    out = model(batch.x_dict, batch.edge_index_dict, **options)["paper"][:count]
    return F.cross_entropy(out, batch["paper"].y[:count])


@pytest.mark.parametrize("model", ["sage", "hgt"])
def test_whole_graphs(device, model):
    data = typed_graph().to(device)
    found = losses_of(
        device,
        lambda: MODELS[model](data),
        lambda net, batch: of_papers(net, batch, 120),
        lambda: [data] * 30,
    )
    assert len(found.records) == 1


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("trims", [False, True])
def test_sampled_neighbours(device, model, trims):
    """Every type is padded hop by hop."""
    if trims and model not in ("sage", "gat"):
        return
    data = typed_graph()
    loader = NeighborLoader(
        data, [4, 3], batch_size=16, input_nodes=("paper", torch.arange(24, 120)), device=device
    )

    def loss(net, batch):
        hops = {"hops": (batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict)} if trims else {}
        return of_papers(net, batch, batch["paper"].batch_size, **hops)

    found = losses_of(
        device, lambda: MODELS[model](data), loss, lambda: [batch for _ in range(3) for batch in loader]
    )
    assert found.records
    assert all(len(record.capacity.nodes[0]) == 3 for record in found.records)
    assert all(len(record.held[0].sorted) == 5 for record in found.records)


def test_larger_batches_are_recorded_for_their_size(device):
    data = typed_graph(400)

    def batches():
        sizes = [(4, 3)] * 12 + [(9, 6)] * 8
        for nth, fanouts in enumerate(sizes):
            seeds = torch.arange(nth * 16, nth * 16 + 16)
            yield from NeighborLoader(
                data, list(fanouts), batch_size=16, input_nodes=("paper", seeds), device=device
            )

    found = losses_of(
        device, lambda: MODELS["sage"](data), lambda net, batch: of_papers(net, batch, 16), batches
    )
    # Every device samples other neighbours, and any type may exceed the capacity.
    assert 2 <= len(found.records) <= 4


def test_batches_of_graphs(device):
    graphs = [typed_graph(10 + nth % 7, 5 + nth % 4, nth, num_labels=1) for nth in range(120)]
    batches = [Batch.from_data_list(graphs[nth : nth + 6]).to(device) for nth in range(0, 120, 6)]

    def loss(net, batch):
        x = net(batch.x_dict, batch.edge_index_dict)
        pooled = pyg.global_mean_pool(x["paper"], batch["paper"].batch)
        pooled = pooled + pyg.global_max_pool(x["author"], batch["author"].batch)
        return F.cross_entropy(pooled, batch["paper"].y)

    found = losses_of(device, lambda: MODELS["sage"](graphs[0]), loss, lambda: batches)
    assert len(found.records) == 1


def test_edges_to_predict(device):
    """Their ends are seeds, of two types, which stay where they are."""
    data = typed_graph()
    kind = ("author", "writes", "paper")
    loader = LinkNeighborLoader(
        data,
        [4, 3],
        batch_size=16,
        edge_label_index=(kind, data[kind].edge_index[:, :96]),
        edge_label=torch.arange(96.0) % 2,
        device=device,
    )

    def loss(net, batch):
        x = net(batch.x_dict, batch.edge_index_dict)
        source, target = batch[kind].edge_label_index
        score = (x["author"][source] * x["paper"][target]).sum(-1)
        return F.binary_cross_entropy_with_logits(score, batch[kind].edge_label)

    found = losses_of(
        device, lambda: MODELS["sage"](data), loss, lambda: [batch for _ in range(4) for batch in loader]
    )
    assert found.records


RELATIONAL = {
    "rgcn": lambda: FastRGCNConv(WIDTH, WIDTH, 3),
    "rgcn-bases": lambda: FastRGCNConv(WIDTH, WIDTH, 3, num_bases=2, aggr="add"),
    "rgcn-blocks": lambda: FastRGCNConv(WIDTH, WIDTH, 3, num_blocks=2, aggr="max"),
    "rgcn-wide": lambda: FastRGCNConv(WIDTH, 2, 3),
    "rgat": lambda: FastRGATConv(WIDTH, WIDTH, 3),
    "rgat-within": lambda: FastRGATConv(
        WIDTH, 4, 3, heads=2, attention_mechanism="within-relation", edge_dim=3
    ),
    "rgat-product": lambda: FastRGATConv(
        WIDTH, WIDTH, 3, attention_mode="multiplicative-self-attention", mod="f-scaled"
    ),
}


@pytest.mark.parametrize("conv", RELATIONAL)
def test_types_of_edges(device, conv):
    """Layers that take a type for every edge; those of blocks leave out edges of other types."""
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(200, WIDTH, generator=generator),
        y=torch.randint(2, (200,), generator=generator),
        edge_index=torch.randint(190, (2, 900), generator=generator),
        edge_type=torch.randint(4 if conv == "rgcn-blocks" else 3, (900,), generator=generator),
        edge_attr=torch.randn(900, 3, generator=generator),
    )
    loader = NeighborLoader(data, [5], batch_size=16, input_nodes=torch.arange(72, 200), device=device)

    def loss(net, batch):
        options = [batch.edge_attr] if conv == "rgat-within" else []
        out = net(batch.x, batch.edge_index, batch.edge_type, *options).flatten(1)
        return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])

    found = losses_of(device, RELATIONAL[conv], loss, lambda: [batch for _ in range(3) for batch in loader])
    assert found.records


def test_what_is_not_recorded_says_why(device):
    """Features that are not in the batch are not padded."""
    data = typed_graph()
    x = {name: data[name].x.to(device) for name in data.node_types}
    loader = NeighborLoader(data, [4], batch_size=16, input_nodes="paper", device=device)

    def loss(net, batch):
        sizes = {name: batch[name].n_id.numel() for name in batch.node_types}
        given = {name: item[: sizes[name]] for name, item in x.items()}
        return net(given, batch.edge_index_dict)["paper"].square().mean()

    with pytest.warns(SlowPathWarning, match="index a tensor of 90 rows") as warned:
        found = losses_of(
            device, lambda: MODELS["sage"](data), loss, lambda: [batch for _ in range(2) for batch in loader]
        )
    assert not found.records
    assert sum(item.category is SlowPathWarning for item in warned) == 1
