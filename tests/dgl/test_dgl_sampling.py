"""Training on sampled blocks and batched graphs, with and without worker processes."""

from __future__ import annotations

import pytest
import torch
from dgl_cases import dgl, fastsparse_dgl, homogeneous
from padded import WIDTH, check_layer

LAYERS = {
    "graph_conv": (fastsparse_dgl.FastGraphConv, dgl.nn.GraphConv, {"allow_zero_in_degree": True}),
    "sage_mean": (fastsparse_dgl.FastSAGEConv, dgl.nn.SAGEConv, {"aggregator_type": "mean"}),
    "sage_gcn": (fastsparse_dgl.FastSAGEConv, dgl.nn.SAGEConv, {"aggregator_type": "gcn"}),
    "sage_pool": (fastsparse_dgl.FastSAGEConv, dgl.nn.SAGEConv, {"aggregator_type": "pool"}),
    "gat": (fastsparse_dgl.FastGATConv, dgl.nn.GATConv, {"num_heads": 1, "residual": True}),
    "gatv2": (fastsparse_dgl.FastGATv2Conv, dgl.nn.GATv2Conv, {"num_heads": 1}),
    "dotgat": (fastsparse_dgl.FastDotGatConv, dgl.nn.DotGatConv, {"num_heads": 1}),
}

#: Gradients of attention vectors are small differences of large terms: float32 would need a wide tolerance.
DOUBLE = {"gat", "gatv2", "dotgat", "sage_pool"}


def models(name):
    """Two layers of ours and the same two of DGL's."""
    fast_class, reference_class, options = LAYERS[name]
    made = []
    for layer_class in (fast_class, reference_class):
        torch.manual_seed(0)
        sizes = ((6, 8), (8, 3))
        made.append(torch.nn.ModuleList(layer_class(*size, **options) for size in sizes))
    return made


def run(model, blocks, feat):
    for layer, graph in zip(model, blocks, strict=True):
        feat = torch.relu(layer(graph, feat)).flatten(1)  # attention layers give (N, heads, width)
    return feat


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_neighbor_sampler(name, workers, device):
    graph = homogeneous()
    dtype = torch.float64 if name in DOUBLE else torch.float32
    feat = torch.randn(30, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    fast, reference = models(name)
    fast, reference = fast.to(device, dtype), reference.to(dtype)
    loader = dgl.dataloading.DataLoader(
        graph,
        torch.arange(30),
        dgl.dataloading.NeighborSampler([3, 2]),
        batch_size=8,
        shuffle=True,
        num_workers=workers,
    )
    seen = 0
    for epoch in range(2):
        for input_nodes, output_nodes, blocks in loader:
            expected = run(reference, blocks, feat[input_nodes])
            found = run(fast, blocks, feat[input_nodes].to(device))
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
            for model, out in ((fast, found), (reference, expected)):
                model.zero_grad()
                out.square().sum().backward()
            for ours, theirs in zip(fast.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)
            seen += len(output_nodes)
        assert seen == 30 * (epoch + 1)


def test_layers_in_worker_processes():
    """A forked worker inherits the parent's entries and uses its own copies."""
    graphs = [homogeneous(seed=seed) for seed in range(4)]
    fast = fastsparse_dgl.FastGraphConv(6, 3)
    feat = torch.ones(30, 6)
    expected = [fast(graph, feat).detach() for graph in graphs]

    class Forward(torch.utils.data.Dataset):
        def __len__(self):
            return len(graphs)

        def __getitem__(self, index):
            with torch.no_grad():
                return fast(graphs[index], feat)

    loader = torch.utils.data.DataLoader(Forward(), batch_size=None, num_workers=2)
    for found, want in zip(loader, expected, strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("workers", [0, 2])
def test_graph_data_loader(workers, device):
    """Batches of whole graphs, as for graph classification."""
    graphs = [homogeneous(seed=seed) for seed in range(6)]
    fast = fastsparse_dgl.FastGINConv(torch.nn.Linear(6, 3)).to(device)
    reference = dgl.nn.GINConv(torch.nn.Linear(6, 3))
    reference.load_state_dict(fast.state_dict())
    loader = dgl.dataloading.GraphDataLoader(graphs, batch_size=4, num_workers=workers)
    sizes = []
    for batch in loader:
        feat = torch.randn(batch.num_nodes(), 6)
        found = fast(batch, feat.to(device))
        torch.testing.assert_close(found.cpu(), reference(batch, feat), rtol=1e-5, atol=1e-5)
        with batch.local_scope():
            batch.ndata["h"] = found.detach().cpu()
            assert dgl.sum_nodes(batch, "h").shape == (batch.batch_size, 3)
        sizes.append(batch.batch_size)
    assert sizes == [4, 2]


def test_relations_of_a_heterograph(device):
    """HeteroGraphConv hands each layer one relation of a graph with several edge types."""
    generator = torch.Generator().manual_seed(2)
    edges = {
        relation: tuple(torch.randint(9, (40,), generator=generator) for _ in range(2))
        for relation in (("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a"))
    }
    graph = dgl.heterograph(edges, num_nodes_dict={"a": 9, "b": 9})
    feat = {"a": torch.randn(9, 5), "b": torch.randn(9, 5)}
    results = []
    for layer_class in (fastsparse_dgl.FastGraphConv, dgl.nn.GraphConv):
        torch.manual_seed(0)
        layers = {name: layer_class(5, 3, allow_zero_in_degree=True) for name in "xyz"}
        target = device if layer_class is fastsparse_dgl.FastGraphConv else "cpu"
        model = dgl.nn.HeteroGraphConv(layers).to(target)
        results.append(model(graph, {name: item.to(target) for name, item in feat.items()}))
    for name, expected in results[1].items():
        torch.testing.assert_close(results[0][name].cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["graph_conv", "sage_mean", "sage_gcn", "sage_pool"])
def test_layers_on_padded_structures(name, device):
    layer_class, _, options = LAYERS[name]
    layer = layer_class(WIDTH, 5, **options).to(device)
    check_layer(layer, lambda structure, x: layer(structure, (x, x[: structure.num_dst])), device)
