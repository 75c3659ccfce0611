"""Structures are remembered per graph, never stale, and freed with the graph."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import pickle

import pytest
import torch
from dgl_cases import DGLError, block, dgl, fastsparse_dgl, features, homogeneous, layer_pair

from fastsparse_core import Adjacency
from fastsparse_core.structure import adjacency as core_adjacency
from fastsparse_core.structure import construction
from fastsparse_dgl.caching import adjacency_of

FastGraphConv = fastsparse_dgl.FastGraphConv


@pytest.fixture(autouse=True)
def _empty_cache():
    fastsparse_dgl.clear_cache()
    yield
    fastsparse_dgl.clear_cache()


@pytest.fixture
def count_builds(monkeypatch):
    """Counts every construction and every sorting of a structure."""
    calls = []
    from_csr = Adjacency.from_csr.__func__

    def count(module, name, what):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: calls.append(what) or function(*a, **k))

    count(construction, "compress", "sort")
    count(core_adjacency, "transpose", "transpose")
    count(core_adjacency, "transpose_pairs", "transpose")
    monkeypatch.setattr(
        Adjacency, "from_csr", classmethod(lambda *a, **k: calls.append("from_csr") or from_csr(*a, **k))
    )
    return calls


def assert_right(graph, seed=0):
    """The layer gives DGL's result for the graph as it is now."""
    fast, reference = layer_pair(FastGraphConv, 4, 3, allow_zero_in_degree=True)
    feat = features(graph, 4, seed=seed)
    torch.testing.assert_close(fast(graph, feat), reference(graph, feat), rtol=1e-5, atol=1e-5)


def test_second_epoch_builds_nothing(count_builds, device):
    graph = homogeneous()
    model = [layer.to(device) for layer in (FastGraphConv(4, 8), FastGraphConv(8, 3))]
    model.append(fastsparse_dgl.FastSAGEConv(3, 3, "gcn").to(device))
    for epoch in range(3):
        hidden = features(graph, 4).to(device).requires_grad_()
        for layer in model:
            hidden = layer(graph, hidden)
        hidden.sum().backward()
        info = fastsparse_dgl.cache_info()
        assert (info.misses, info.hits, info.entries, info.stale) == (1, 3 * epoch + 2, 1, 0)
        if epoch == 0:
            built = list(count_builds)
    assert count_builds == built == ["transpose"]  # few edges are sorted while they are inspected


def test_prepare_builds_everything(count_builds, device):
    graph = homogeneous()
    adjacency = fastsparse_dgl.prepare(graph, device)
    assert adjacency.shape == (30, 30)
    built = list(count_builds)
    FastGraphConv(4, 3).to(device)(graph, features(graph, 4).to(device).requires_grad_()).sum().backward()
    assert count_builds == built
    assert fastsparse_dgl.cache_info().misses == 1
    assert fastsparse_dgl.cache_info().bytes > 120 * 4


def test_prepare_defaults_to_the_device_of_the_graph():
    graph = homogeneous()
    assert fastsparse_dgl.prepare(graph) is fastsparse_dgl.prepare(graph, "cpu")
    assert fastsparse_dgl.prepare(graph, etype="_E") is fastsparse_dgl.prepare(graph)
    assert fastsparse_dgl.cache_info().entries == 1


def test_prepare_an_adjacency():
    adjacency = Adjacency.from_coo(torch.tensor([0]), torch.tensor([1]), (2, 2))
    assert fastsparse_dgl.prepare(adjacency) is adjacency
    assert fastsparse_dgl.prepare(adjacency, "cpu") is adjacency
    assert fastsparse_dgl.cache_info().entries == 0


def test_prepare_edge_types():
    first, second = (torch.tensor([0, 1]), torch.tensor([1, 0])), (torch.tensor([0, 1]), torch.tensor([1, 1]))
    graph = dgl.heterograph({("a", "x", "b"): first, ("b", "y", "a"): second})
    assert fastsparse_dgl.prepare(graph, etype="x").col.tolist() == [1, 0]
    assert fastsparse_dgl.prepare(graph, etype=("b", "y", "a")).col.tolist() == [0, 1]
    assert fastsparse_dgl.prepare(graph, etype="y") is fastsparse_dgl.prepare(graph, etype=("b", "y", "a"))
    assert fastsparse_dgl.cache_info().entries == 2
    with pytest.raises(DGLError, match="Edge type name must be specified"):
        fastsparse_dgl.prepare(graph)
    with pytest.raises(DGLError, match="z"):
        fastsparse_dgl.prepare(graph, etype="z")


@pytest.mark.parametrize("graph", [None, torch.zeros(2, 2), [1, 2]])
def test_prepare_something_else(graph):
    with pytest.raises(DGLError, match="expected a DGLGraph"):
        fastsparse_dgl.prepare(graph)


# ---------------------------------------------------------------- never stale

IN_PLACE = {
    "add_edges": lambda g: g.add_edges([3, 4], [5, 5]),
    "add_edge": lambda g: g.add_edges(0, 1),
    "remove_edges": lambda g: g.remove_edges([0, 5, 7]),
    "add_nodes": lambda g: g.add_nodes(2),
    "remove_nodes": lambda g: g.remove_nodes([1, 2]),
    "remove_and_add": lambda g: (g.remove_edges([2]), g.add_edges(7, 8)),
    "remove_self_loops": lambda g: g.remove_edges(
        torch.nonzero(g.edges()[0] == g.edges()[1]).flatten().to(g.idtype)
    ),
}

DERIVED = {
    "add_self_loop": dgl.add_self_loop,
    "method_add_self_loop": lambda g: g.add_self_loop() or g,
    "remove_self_loop": dgl.remove_self_loop,
    "reverse": lambda g: dgl.reverse(g, copy_ndata=True, copy_edata=True),
    "bidirected": dgl.to_bidirected,
    "batch": lambda g: dgl.batch([g, g]),
    "unbatch": lambda g: dgl.unbatch(dgl.batch([homogeneous(seed=4), g]))[1],
    "node_subgraph": lambda g: dgl.node_subgraph(g, torch.arange(20)),
    "edge_subgraph": lambda g: dgl.edge_subgraph(g, torch.arange(50), relabel_nodes=False),
    "slice_batch": lambda g: dgl.slice_batch(dgl.batch([g, homogeneous(seed=5)]), 1),
    "clone": lambda g: g.clone(),
    "to": lambda g: g.to("cpu"),
    "int": lambda g: g.int(),
    "local_var": lambda g: g.local_var(),
    "formats": lambda g: g.formats(["coo", "csc"]),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "relation": lambda g: g["_E"],
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_changed_in_place(name):
    graph = homogeneous()
    assert_right(graph)
    IN_PLACE[name](graph)
    assert_right(graph)
    IN_PLACE[name](graph)
    assert_right(graph)


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("change", IN_PLACE)
def test_derived_then_changed(name, change):
    """The cache never confuses a graph with a graph derived from it, before or after a change."""
    graph = homogeneous()
    assert_right(graph)
    derived = DERIVED[name](graph)
    if "nodes" in change and name in ("copy", "relation", "int", "formats"):
        pytest.skip("DGL shares the node frames of such copies and breaks the other when nodes are added")
    assert_right(derived)
    assert_right(graph)
    if derived is not graph:
        IN_PLACE[change](derived)
    assert_right(derived)
    assert_right(graph)
    IN_PLACE[change](graph)
    assert_right(graph)
    assert_right(derived)


def test_attributes_copied_by_dgl_carry_nothing():
    """DGL keeps a wrapper's attributes through in-place changes, so the wrapper must hold none of ours."""
    graph = homogeneous()
    before = set(vars(graph))
    assert_right(graph)
    assert set(vars(graph)) == before


def test_wrappers_of_one_structure_share_an_entry():
    graph = homogeneous()
    assert_right(graph)
    assert_right(graph.local_var())
    with graph.local_scope():
        assert_right(graph)
    graph.create_formats_()
    graph.ndata["x"] = torch.ones(30)
    graph.edata["w"] = torch.ones(120)
    assert_right(graph)
    assert fastsparse_dgl.cache_info().misses == 1


def test_queries_do_not_disturb_the_entry():
    """DGL may sort what it holds to answer these; the remembered structure stays right."""
    graph = homogeneous()
    assert_right(graph)
    graph.has_edges_between(torch.arange(30), torch.arange(30))
    graph.edge_ids(*graph.edges())
    graph.in_degrees()
    graph.adj_tensors("csr")
    dgl.sort_csc_by_tag(graph, torch.arange(30) % 2)
    assert_right(graph)
    assert fastsparse_dgl.cache_info().misses == 1


def test_entries_die_with_their_graph():
    graph = homogeneous()
    adjacency = fastsparse_dgl.prepare(graph)
    other = graph.local_var()
    assert fastsparse_dgl.cache_info().entries == 1
    del graph
    gc.collect()
    assert fastsparse_dgl.cache_info().entries == 1
    del other
    gc.collect()
    assert fastsparse_dgl.cache_info().entries == 0
    assert adjacency.num_edges == 120


def test_the_old_entry_dies_when_the_graph_changes():
    graph = homogeneous()
    assert_right(graph)
    graph.add_edges(0, 1)
    gc.collect()
    assert fastsparse_dgl.cache_info().entries == 0


def test_many_short_lived_graphs():
    """Addresses of freed graphs are used again; their entries must not be."""
    fast, reference = layer_pair(FastGraphConv, 4, 3, allow_zero_in_degree=True)
    for seed in range(60):
        graph = homogeneous(seed=seed)
        feat = features(graph, 4)
        torch.testing.assert_close(fast(graph, feat), reference(graph, feat), rtol=1e-5, atol=1e-5)
    gc.collect()
    assert fastsparse_dgl.cache_info().misses == 60
    assert fastsparse_dgl.cache_info().entries <= 1


def test_zero_in_degree_is_checked_again_after_a_change():
    graph = homogeneous()
    fast = FastGraphConv(4, 3)
    fast(graph, features(graph, 4))
    graph.add_nodes(1)
    with pytest.raises(DGLError, match="zero in-degree"):
        fast(graph, features(graph, 4))
    graph.add_edges(0, 30)
    assert fast(graph, features(graph, 4)).shape == (31, 3)


def test_edge_weights_of_the_old_graph_are_refused():
    graph = homogeneous()
    fast = FastGraphConv(4, 3)
    weight = torch.ones(120)
    fast(graph, features(graph, 4), edge_weight=weight)
    graph.add_edges(0, 1)
    with pytest.raises(DGLError, match=r"edge_weight: expected one row per edge \(121 rows"):
        fast(graph, features(graph, 4), edge_weight=weight)


def test_clear_cache():
    graph = homogeneous()
    first = fastsparse_dgl.prepare(graph)
    fastsparse_dgl.clear_cache()
    info = fastsparse_dgl.cache_info()
    assert (info.hits, info.misses, info.entries, info.bytes) == (0, 0, 0, 0)
    assert fastsparse_dgl.prepare(graph) is not first


def test_threads_build_once():
    graph = homogeneous()
    fast = FastGraphConv(4, 3)
    feat = features(graph, 4)
    expected = fast(graph, feat).detach()
    fastsparse_dgl.clear_cache()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: fast(graph, feat).detach(), range(64)))
    assert all(torch.equal(result, expected) for result in results)
    assert fastsparse_dgl.cache_info().misses == 1


def test_without_the_private_handle(monkeypatch, reasons):
    """A DGL without DGLGraph._graph gets right results, no caching, and one warning."""
    monkeypatch.setattr(fastsparse_dgl.caching, "_HANDLE", "_absent")
    graph = homogeneous()
    assert_right(graph)
    assert_right(graph)
    assert fastsparse_dgl.cache_info().misses == 0
    (record,) = reasons.records
    assert record.message.startswith("graphs are converted in every forward pass, which is slow: DGL ")


def test_pickled_layer_and_graph():
    graph = homogeneous()
    fast = FastGraphConv(4, 3)
    expected = fast(graph, features(graph, 4))
    graph_again, layer_again = pickle.loads(pickle.dumps((graph, fast)))
    assert torch.equal(layer_again(graph_again, features(graph, 4)), expected)
    assert torch.equal(copy.deepcopy(fast)(graph, features(graph, 4)), expected)


def test_the_backward_pass_survives_the_graph(device):
    graph = homogeneous()
    feat = features(graph, 4).to(device).requires_grad_()
    out = FastGraphConv(4, 3).to(device)(graph, feat)
    del graph
    fastsparse_dgl.clear_cache()
    gc.collect()
    out.sum().backward()
    assert feat.grad.abs().sum() > 0


def test_structure_follows_edge_ids():
    """Edge values are in the order of DGL's edge ids, whatever order the structure is stored in."""
    for graph in (homogeneous(), homogeneous(torch.int32), block()):
        adjacency = fastsparse_dgl.prepare(graph)
        src, dst = graph.edges()
        position = (
            torch.arange(adjacency.num_edges) if adjacency.edge_id is None else adjacency.edge_id.long()
        )
        assert torch.equal(adjacency.col.long(), src.long()[position])
        assert torch.equal(adjacency.row().long(), dst.long()[position])


def test_every_device_has_its_own_structure(monkeypatch):
    monkeypatch.setattr(
        "fastsparse_dgl.caching.adjacency_from_graph",
        lambda graph, device: Adjacency(*torch.zeros(2, 1, dtype=torch.int64, device=device), (0, 0)),
    )
    graph = homogeneous()
    for device in map(torch.device, ("cpu", "meta", "cpu")):
        assert adjacency_of(graph, device).device == device
    assert fastsparse_dgl.cache_info().misses == 2


@pytest.mark.gpu
def test_one_entry_per_device():
    graph = homogeneous()
    fast, reference = layer_pair(FastGraphConv, 4, 3)
    feat = features(graph, 4)
    expected = reference(graph, feat)
    for epoch in range(2):
        torch.testing.assert_close(fast.cpu()(graph, feat), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fast.cuda()(graph, feat.cuda()).cpu(), expected, rtol=1e-5, atol=1e-5)
        info = fastsparse_dgl.cache_info()
        assert (info.misses, info.entries, info.hits) == (2, 2, 2 * epoch)
    assert fastsparse_dgl.prepare(graph, "cuda") is fastsparse_dgl.prepare(graph, 0)
    assert fastsparse_dgl.cache_info().misses == 2
