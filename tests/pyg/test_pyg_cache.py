"""The structure cache: hits, staleness, lifetime; `prepare`; graphs inside Data, batches and workers."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from pyg_cases import as_kind, close, random_graph, simple_graph
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, SAGEConv

import fastsparse_pyg
from fastsparse_core import Adjacency
from fastsparse_pyg import FastGCNConv, FastGINConv, FastSAGEConv, cache_info, clear_cache, prepare


def counts() -> tuple[int, int, int]:
    info = cache_info()
    return info.misses, info.hits, info.stale


def fresh_sage(x: torch.Tensor, edge_index: torch.Tensor, layer: FastSAGEConv) -> torch.Tensor:
    """What the layer must give, from PyG."""
    reference = SAGEConv(layer.in_channels, layer.out_channels).to(x.device)
    reference.load_state_dict(layer.state_dict())
    return reference(x, edge_index)


# ---------------------------------------------------------------- hits


def test_second_epoch_builds_nothing(device):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 4, device=device)
    layers = [FastGCNConv(4, 4), FastGCNConv(4, 4), FastSAGEConv(4, 4), FastGINConv(torch.nn.Linear(4, 4))]
    model = torch.nn.ModuleList(layers).to(device)
    for epoch in range(3):
        for layer in model:
            layer(x, edge_index).sum().backward()
        # One structure with loops for the GCN layers, one without for the others.
        assert counts()[0] == 2
        assert counts()[1] == 2 + 4 * epoch
    assert cache_info().entries == 2
    assert cache_info().bytes > 0


@pytest.mark.parametrize("kind", ["edge_index", "EdgeIndex", "csr", "coo", "csc", "SparseTensor"])
def test_every_kind_is_remembered(device, kind):
    graph = as_kind(kind, simple_graph(device=device), 40, 40)
    layer = FastSAGEConv(4, 4).to(device)
    for _ in range(3):
        layer(torch.randn(40, 4, device=device), graph)
    assert counts() == (1, 2, 0)
    del graph
    gc.collect()
    assert cache_info().entries == 0


def test_options_have_their_own_entries():
    edge_index = random_graph(20, num_edges=50)
    x = torch.randn(20, 4)
    FastGCNConv(4, 4)(x, edge_index)
    FastGCNConv(4, 4, add_self_loops=False)(x, edge_index)
    FastGCNConv(4, 4, flow="target_to_source")(x, edge_index)
    FastGCNConv(4, 4)(torch.randn(23, 4), edge_index)
    assert counts() == (4, 0, 0)
    FastSAGEConv(4, 4)(x, edge_index)
    assert counts() == (4, 1, 0)


# ---------------------------------------------------------------- staleness


@pytest.mark.parametrize("write", ["index", "view", "fill", "copy", "out", "row"])
def test_edges_edited_in_place_are_seen(device, write):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 4, device=device)
    layer = FastSAGEConv(4, 4).to(device)
    before = layer(x, edge_index)
    other = random_graph(seed=9, device=device)
    if write == "index":
        edge_index[0, :20] = 7
    elif write == "view":
        edge_index.view(-1)[5:30].fill_(2)
    elif write == "fill":
        edge_index.fill_(3)
    elif write == "copy":
        edge_index.copy_(other)
    elif write == "out":
        torch.add(other, 0, out=edge_index)
    else:
        row, _ = edge_index
        row[3:9] = 1
    after = layer(x, edge_index)
    assert not torch.allclose(before, after)
    close(after, fresh_sage(x, edge_index, layer))
    assert counts() == (2, 0, 1)


def test_replaced_storage_is_seen():
    edge_index = random_graph()
    x = torch.randn(40, 4)
    layer = FastSAGEConv(4, 4)
    layer(x, edge_index)
    edge_index.data = random_graph(seed=9)
    close(layer(x, edge_index), fresh_sage(x, edge_index, layer))
    edge_index.set_(random_graph(seed=10))
    close(layer(x, edge_index), fresh_sage(x, edge_index, layer))
    edge_index.resize_(2, 100)
    close(layer(x, edge_index), fresh_sage(x, edge_index, layer))


def test_edge_index_class_edited_in_place_is_seen():
    edge_index = EdgeIndex(random_graph(), sparse_size=(40, 40))
    x = torch.randn(40, 4)
    layer = FastSAGEConv(4, 4)
    for write in (
        lambda: edge_index.as_tensor().__setitem__((0, 3), 5),
        lambda: edge_index[0].fill_(2),
        lambda: edge_index.fill_(1),
    ):
        layer(x, edge_index)
        write()
        close(layer(x, edge_index), fresh_sage(x, edge_index.as_tensor().clone(), layer))


@pytest.mark.parametrize("kind", ["csr", "coo", "csc"])
def test_matrix_edited_in_place_is_seen(kind):
    matrix = as_kind(kind, simple_graph(), 40, 40)
    x = torch.randn(40, 4)
    layer = FastSAGEConv(4, 4)
    before = layer(x, matrix)
    index = {
        "csr": lambda: matrix.col_indices(),
        "coo": lambda: matrix.indices()[1],
        "csc": lambda: matrix.row_indices(),
    }
    index[kind]().sub_(1).clamp_(min=0)
    after = layer(x, matrix)
    assert not torch.allclose(before, after)
    assert counts() == (2, 0, 1)


def test_edited_out_of_range_after_caching_raises():
    edge_index = random_graph()
    x = torch.randn(40, 4)
    layer = FastSAGEConv(4, 4)
    layer(x, edge_index)
    edge_index[1, 4] = 40
    with pytest.raises(IndexError, match="40"):
        layer(x, edge_index)


# ---------------------------------------------------------------- lifetime


def test_entries_die_with_their_graph():
    layer = FastGCNConv(4, 4)
    x = torch.randn(40, 4)
    structures = []
    for seed in range(5):
        edge_index = random_graph(seed=seed)
        structures.append(weakref.ref(prepare(edge_index, 40, add_self_loops=True)))
        layer(x, edge_index)
        assert cache_info().entries == 1
    del edge_index
    gc.collect()
    assert cache_info().entries == 0
    assert all(structure() is None for structure in structures)


def test_clear_cache():
    edge_index = random_graph()
    FastGCNConv(4, 4)(torch.randn(40, 4), edge_index)
    clear_cache()
    assert counts() == (0, 0, 0)
    assert cache_info().entries == 0


def test_backward_after_the_graph_and_the_cache_are_gone():
    edge_index = random_graph()
    layer = FastGCNConv(4, 6)
    x = torch.randn(40, 4, requires_grad=True)
    out = layer(x, edge_index)
    del edge_index
    clear_cache()
    gc.collect()
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_inference_tensors_are_not_remembered():
    with torch.inference_mode():
        edge_index = random_graph()
        x = torch.randn(40, 4)
        layer = FastGCNConv(4, 4)
        first = layer(x, edge_index)
        edge_index[0, :20] = 7
        assert not torch.allclose(layer(x, edge_index), first)
    assert counts() == (2, 0, 0)


def loaded(kind):
    with torch.inference_mode(False):
        graph = Data(x=torch.randn(40, 4), edge_index=random_graph())
    if kind == "DataLoader":
        return fastsparse_pyg.DataLoader([graph] * 6, 3, device="cpu")
    if kind == "NeighborLoader":
        return fastsparse_pyg.NeighborLoader(graph, [3, 3], batch_size=20, device="cpu")
    edges = graph.edge_index[:, :20]
    return fastsparse_pyg.LinkNeighborLoader(
        graph, [3, 3], edge_label_index=edges, batch_size=10, device="cpu"
    )


@pytest.mark.parametrize("kind", ["DataLoader", "NeighborLoader", "LinkNeighborLoader"])
@pytest.mark.parametrize("makes_loader_inside", [False, True])
def test_batches_of_loaders_are_converted_once_in_inference_mode(kind, makes_loader_inside, recwarn):
    loader = None if makes_loader_inside else loaded(kind)
    layer = FastGCNConv(4, 4)
    with torch.inference_mode():
        batches = list(loader or loaded(kind))
        clear_cache()  # drops structures that the loaders made
        for batch in batches:
            first = layer(batch.x, batch.edge_index)
            assert first.is_inference()
            assert torch.equal(layer(batch.x, batch.edge_index), first)
        assert counts() == (2, 2, 0)
        batch.edge_index[:, : batch.edge_index.size(1) // 2] = 0
        assert not torch.allclose(layer(batch.x, batch.edge_index), first)
    assert counts() == (3, 2, 1)
    layer(batch.x, batch.edge_index).sum().backward()
    assert not recwarn.list


@pytest.mark.parametrize("kind", ["edge_index", "csr", "Adjacency"])
def test_training_after_evaluation_in_inference_mode(device, kind):
    """A structure first used under inference_mode still handles autograd."""
    graph = as_kind(kind, simple_graph(device=device), 40, 40)
    x = torch.randn(40, 4, device=device, requires_grad=True)
    for layer in (FastGCNConv(4, 6).to(device), FastSAGEConv(4, 6).to(device)):
        with torch.inference_mode():
            layer(x, graph)
        layer(x, graph).sum().backward()
        assert x.grad.isfinite().all()


def test_threads_build_once():
    edge_index = random_graph(2000, num_edges=20000)
    layer = FastGCNConv(4, 4)
    x = torch.randn(2000, 4)
    expected = layer(x, edge_index)
    clear_cache()
    results: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(layer(x, edge_index))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache_info().misses == 1
    assert all(torch.equal(result, expected) for result in results)


# ---------------------------------------------------------------- copies, Data, batches, workers


def test_copies_do_not_share_entries_wrongly():
    edge_index = random_graph()
    x = torch.randn(40, 4)
    layer = FastSAGEConv(4, 4)
    layer(x, edge_index)
    for other in (
        edge_index.clone(),
        copy.deepcopy(edge_index),
        pickle.loads(pickle.dumps(edge_index)),
        edge_index[:, 20:],
    ):
        other[0, :10] = 11
        close(layer(x, other), fresh_sage(x, other, layer))
    close(layer(x, edge_index), fresh_sage(x, edge_index, layer))


def test_data_and_layers_travel():
    """Pickling and copying data and layers after use."""
    data = Data(x=torch.randn(40, 4), edge_index=random_graph())
    layer = FastGCNConv(4, 4)
    expected = layer(data.x, data.edge_index)
    for one in (
        data.clone(),
        copy.copy(data),
        copy.deepcopy(data),
        pickle.loads(pickle.dumps(data)),
        data.to("cpu"),
    ):
        close(layer(one.x, one.edge_index), expected)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        close(other(data.x, data.edge_index), expected)


def test_prepare_fills_the_cache_the_layers_use(device):
    edge_index = random_graph(device=device)
    adj = prepare(edge_index, 40, add_self_loops=True)
    assert isinstance(adj, Adjacency)
    FastGCNConv(4, 4).to(device)(torch.randn(40, 4, device=device), edge_index)
    assert counts() == (1, 1, 0)


def test_prepare_data(device):
    data = Data(x=torch.randn(40, 4), edge_index=random_graph()).to(device)
    adj = prepare(data)
    assert data.adjacency is adj
    assert adj.shape == (40, 40)
    assert data.num_nodes == 40
    reference, layer = SAGEConv(4, 6).to(device), FastSAGEConv(4, 6).to(device)
    layer.load_state_dict(reference.state_dict())
    expected = reference(data.x, data.edge_index)
    for one in (data, data.clone(), pickle.loads(pickle.dumps(data)), data.to("cpu").to(device)):
        close(layer(one.x, one.adjacency.to(device)), expected)
    data.edge_index = random_graph(seed=3, device=device)
    assert prepare(data) is data.adjacency is not adj
    close(layer(data.x, data.adjacency), reference(data.x, data.edge_index))


def test_prepare_sizes():
    edge_index = torch.tensor([[0, 4], [2, 1]])
    assert prepare(edge_index).shape == (5, 5)
    assert prepare(edge_index, 9).shape == (9, 9)
    assert prepare(edge_index, (5, 3)).shape == (3, 5)
    assert prepare(edge_index, torch.tensor(9)).shape == (9, 9)
    assert prepare(edge_index, (3, 5), flow="target_to_source").shape == (5, 3)
    assert prepare(EdgeIndex(edge_index, sparse_size=(6, 3))).shape == (3, 6)
    assert prepare(EdgeIndex(edge_index)).shape == (5, 5)
    assert prepare(as_kind("csr", edge_index, 6, 3)).shape == (3, 6)
    assert prepare(torch.empty(2, 0, dtype=torch.long)).shape == (0, 0)
    assert prepare(prepare(edge_index)).shape == (5, 5)
    data = Data(adj_t=as_kind("csr", edge_index, 6, 6))
    assert prepare(data).shape == (6, 6)


@pytest.mark.parametrize("num_nodes", [-1, 2.5, "5", (5,), (5, -1), (5, 5, 5)], ids=str)
def test_prepare_rejects_numbers_of_nodes(num_nodes):
    message = r"num_nodes: expected a number of nodes of at least 0, or .*, got \S+"
    with pytest.raises(ValueError, match=message):
        prepare(torch.tensor([[0, 4], [2, 1]]), num_nodes)


def test_prepare_rejects():
    with pytest.raises(TypeError, match="HeteroData"):
        prepare(HeteroData())
    with pytest.raises(ValueError, match="edge_index or adj_t"):
        prepare(Data(x=torch.randn(3, 4)))
    with pytest.raises(ValueError, match="adjacency"):
        prepare(Data(x=torch.randn(3, 4), edge_index=torch.tensor([[0], [1]]), adjacency=3))
    with pytest.raises(ValueError, match="flow"):
        prepare(torch.tensor([[0], [1]]), flow="sideways")
    with pytest.raises(ValueError, match="edge_index"):
        prepare([[0], [1]])
    with pytest.raises(IndexError, match="num|nodes"):
        prepare(torch.tensor([[0], [7]]), 3)


def test_batches(device):
    graphs = [
        Data(x=torch.randn(12, 4), edge_index=random_graph(12, num_edges=30, seed=seed)) for seed in range(6)
    ]
    reference, layer = GCNConv(4, 6).to(device), FastGCNConv(4, 6).to(device)
    layer.load_state_dict(reference.state_dict())
    batch = Batch.from_data_list(graphs).to(device)
    for _ in range(2):
        close(layer(batch.x, batch.edge_index), reference(batch.x, batch.edge_index))
    assert counts() == (1, 1, 0)
    prepare(batch)
    close(layer(batch.x, batch.adjacency), reference(batch.x, batch.edge_index))
    for one in batch[:3]:
        close(layer(one.x, one.edge_index), reference(one.x, one.edge_index))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_loader(num_workers):
    graphs = [
        Data(x=torch.randn(12, 4), edge_index=random_graph(12, num_edges=30, seed=seed)) for seed in range(6)
    ]
    reference, layer = GCNConv(4, 6), FastGCNConv(4, 6)
    layer.load_state_dict(reference.state_dict())
    batches = 0
    for _ in range(2):
        for batch in DataLoader(graphs, batch_size=2, shuffle=True, num_workers=num_workers):
            close(layer(batch.x, batch.edge_index), reference(batch.x, batch.edge_index))
            batches += 1
    del batch
    gc.collect()
    assert cache_info().misses == batches
    assert cache_info().entries == 0


def test_prepared_data_through_workers():
    """A structure is pickled with its data; every item keeps its own."""
    graphs = [
        Data(x=torch.randn(12, 4), edge_index=random_graph(12, num_edges=30, seed=seed)) for seed in range(4)
    ]
    for graph in graphs:
        prepare(graph)
    layer = FastSAGEConv(4, 6)
    for batch in DataLoader(graphs, batch_size=2, num_workers=2):
        for one, adjacency in zip(batch.to_data_list(), batch.adjacency, strict=True):
            close(layer(one.x, adjacency), fresh_sage(one.x, one.edge_index, layer))


def test_subgraphs_and_slices():
    data = Data(x=torch.randn(40, 4), edge_index=random_graph())
    layer = FastSAGEConv(4, 6)
    layer(data.x, data.edge_index)
    part = data.subgraph(torch.arange(20))
    close(layer(part.x, part.edge_index), fresh_sage(part.x, part.edge_index, layer))
    half = data.edge_index[:, ::2]
    close(layer(data.x, half), fresh_sage(data.x, half, layer))
