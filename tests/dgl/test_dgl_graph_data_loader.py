"""`GraphDataLoader` of stored graphs: batches and labels against DGL's loader."""

from __future__ import annotations

import gc
import os
import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from dgl_cases import dgl, fastsparse_dgl
from hook_cases import enabled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Subset

from fastsparse_core.log import SlowPathWarning
from fastsparse_dgl import FastGraphConv, FastSAGEConv, GraphDataLoader

OriginalLoader = dgl.dataloading.GraphDataLoader
#: Approximate number of batches in which random datasets are compared: 10,000 before a release.
NUM_BATCHES = int(os.environ.get("FASTSPARSE_LOADER_BATCHES", "200"))
pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
Pair = namedtuple("Pair", "graph label")


def assert_same_tensor(got, expected) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got.cpu().nan_to_num(7.0), expected.cpu().nan_to_num(7.0))


def assert_same_graph(got, expected, unbatches=True) -> None:
    assert got.idtype == expected.idtype
    assert got.ntypes == expected.ntypes
    assert got.canonical_etypes == expected.canonical_etypes
    assert got.batch_size == expected.batch_size
    for name in expected.ntypes:
        assert got.num_nodes(name) == expected.num_nodes(name)
        assert_same_tensor(got.batch_num_nodes(name), expected.batch_num_nodes(name))
        assert_same_data(got.nodes[name].data, expected.nodes[name].data)
    for name in expected.canonical_etypes:
        assert_same_tensor(got.batch_num_edges(name), expected.batch_num_edges(name))
        assert_same_data(got.edges[name].data, expected.edges[name].data)
        for one, two in zip(
            *(graph.edges(etype=name, order="eid") for graph in (got, expected)), strict=True
        ):
            assert_same_tensor(one, two)
        assert_same_tensor(got.in_degrees(etype=name), expected.in_degrees(etype=name))
    if unbatches:
        for one, two in zip(dgl.unbatch(got), dgl.unbatch(expected), strict=True):
            assert_same_graph(one, two, False)


def assert_same_data(got, expected) -> None:
    assert list(got) == list(expected)
    for name in expected:
        assert_same_tensor(got[name], expected[name])


def assert_same(got, expected) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, dgl.DGLGraph):
        assert_same_graph(got, expected)
    elif isinstance(expected, Tensor):
        assert_same_tensor(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, two in zip(got, expected, strict=True):
            assert_same(one, two)
    else:
        assert got == expected


def check(dataset, epochs=1, **options):
    loaders = [
        kind(dataset, generator=torch.Generator().manual_seed(3), **options)
        for kind in (GraphDataLoader, OriginalLoader)
    ]
    assert len(loaders[0]) == len(loaders[1])
    assert loaders[0]._graphs is not None
    for _ in range(epochs):
        for got, expected in zip(*loaders, strict=True):
            assert_same(got, expected)
    return loaders


def molecule(nth, generator, idtype=torch.int64):
    nodes = 1 + nth % 6
    graph = dgl.graph(
        (
            torch.randint(nodes, (2 * nth % 9,), generator=generator),
            torch.randint(nodes, (2 * nth % 9,), generator=generator),
        ),
        num_nodes=nodes,
        idtype=idtype,
    )
    graph.ndata["feat"] = torch.randn(nodes, 4, generator=generator)
    graph.ndata["kind"] = torch.randint(5, (nodes,), generator=generator)
    graph.edata["bond"] = torch.randn(graph.num_edges(), 2, generator=generator)
    return graph


def molecules(count=17, idtype=torch.int64):
    generator = torch.Generator().manual_seed(0)
    return [molecule(nth, generator, idtype) for nth in range(count)]


def hetero(count=9):
    graphs = []
    for nth in range(count):
        sizes = {"a": 1 + nth % 3, "b": 1 + nth % 4}
        graph = dgl.heterograph(
            {
                ("a", "to", "b"): (torch.randint(sizes["a"], (nth,)), torch.randint(sizes["b"], (nth,))),
                ("b", "to", "a"): (torch.randint(sizes["b"], (2,)), torch.randint(sizes["a"], (2,))),
                ("a", "near", "a"): (torch.arange(sizes["a"]), torch.arange(sizes["a"])),
            },
            num_nodes_dict=sizes,
        )
        graph.nodes["a"].data["x"] = torch.randn(sizes["a"], 2)
        graph.edges[("a", "to", "b")].data["w"] = torch.randn(nth, 1)
        graphs.append(graph)
    return graphs


def labelled(*labels):
    return [(graph, *(label(nth) for label in labels)) for nth, graph in enumerate(molecules())]


DATASETS = {
    "graphs": molecules,
    "int32": lambda: molecules(idtype=torch.int32),
    "hetero": hetero,
    "tensor labels": lambda: labelled(lambda nth: torch.tensor([nth, 2])),
    "scalars": lambda: labelled(lambda nth: torch.tensor(nth), float, lambda nth: nth % 2 == 0, int),
    "strings": lambda: labelled(str),
    "arrays": lambda: labelled(lambda nth: np.full(3, nth, np.float32), lambda nth: np.float32(nth)),
    "lists": lambda: [[graph, nth] for nth, graph in enumerate(molecules())],
    "dictionaries": lambda: [
        {"g": graph, "y": nth, "more": (nth, 1.0)} for nth, graph in enumerate(molecules())
    ],
    "named": lambda: [Pair(graph, nth) for nth, graph in enumerate(molecules())],
    "two graphs": lambda: list(zip(molecules(9), hetero(9), strict=True)),
    "subset": lambda: Subset(labelled(float), [3, 1, 16, 3]),
    "dgl's subset": lambda: dgl.data.utils.Subset(labelled(float), torch.tensor([3, 1, 16])),
    "dgl's dataset": lambda: dgl.data.MiniGCDataset(12, 10, 20, seed=1),
}


@pytest.mark.parametrize("name", DATASETS)
def test_datasets(name):
    check(DATASETS[name](), epochs=2, batch_size=4, shuffle=True)
    check(DATASETS[name](), batch_size=3, drop_last=True)


@st.composite
def datasets(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    idtype = draw(st.sampled_from([torch.int64, torch.int32]))
    nodes = draw(
        st.dictionaries(st.sampled_from(["x", "y", "z"]), st.sampled_from([(), (3,), (2, 2)]), max_size=3)
    )
    edges = draw(st.dictionaries(st.sampled_from(["x", "w"]), st.sampled_from([(), (1,)]), max_size=2))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.bool]))
    empties_have_data = draw(st.booleans())
    sizes = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=8))
    label = draw(st.sampled_from([None, float, int, lambda nth: torch.full((2,), float(nth))]))
    items = []
    for nth, (count, num_edges) in enumerate(sizes):
        num_edges = num_edges if count else 0
        ends = torch.randint(max(count, 1), (2, num_edges), generator=generator)
        graph = dgl.graph((ends[0], ends[1]), num_nodes=count, idtype=idtype)
        for data, shapes, rows in ((graph.ndata, nodes, count), (graph.edata, edges, num_edges)):
            for name, shape in shapes.items() if rows or empties_have_data else ():
                data[name] = (torch.randn(rows, *shape, generator=generator) * 9).to(dtype)
        items.append(graph if label is None else (graph, label(nth)))
    return items


def test_random_datasets():
    @settings(max_examples=max(NUM_BATCHES // 2, 10), deadline=None, database=None)
    @given(datasets(), st.integers(1, 4), st.booleans())
    def run(items, batch_size, shuffle):
        check(items, batch_size=batch_size, shuffle=shuffle)

    run()


class Mine:
    def __len__(self):
        return 5

    def __getitem__(self, nth):
        return molecules(5)[nth]


@pytest.mark.parametrize(
    ("dataset", "options", "reason"),
    [
        (lambda: Mine(), {}, "cannot tell whether a Mine keeps its graphs in memory"),
        (lambda: dgl.data.MiniGCDataset(5, 10, 20, transform=dgl.AddSelfLoop()), {}, "has a transform"),
        (lambda: [torch.zeros(2)] * 4, {}, "no graphs"),
        (lambda: molecules(3) + hetero(1), {}, "differ in node types"),
        (lambda: [dgl.batch(molecules(3))] * 4, {}, "blocks or batches"),
        (lambda: [graph.formats("csr") for graph in molecules(4)], {}, "sparse formats"),
        (lambda: molecules(4), {"collate_fn": list}, "collate_fn"),
        (lambda: labelled(lambda nth: torch.zeros(nth)), {"batch_size": 1}, "labels differ"),
    ],
)
def test_what_dgl_batches_says_why(monkeypatch, dataset, options, reason):
    monkeypatch.setattr("fastsparse_core.log.seen", set())
    dataset = dataset()
    with pytest.warns(SlowPathWarning, match=reason):
        loader = GraphDataLoader(dataset, **options)
    batches = iter(loader)
    for expected in OriginalLoader(dataset, **options):
        got = next(batches)
        if reason == "sparse formats":  # the edges of such graphs cannot be listed by their ids
            assert got.formats() == expected.formats()
        else:
            assert_same(got, expected)


def test_options_of_workers_are_ignored(reasons):
    loader = GraphDataLoader(molecules(), num_workers=3, batch_size=4)
    assert loader.num_workers == 0
    assert "num_workers" in reasons.text
    assert len(list(loader)) == 5


def test_changes_between_epochs_are_seen():
    items = labelled(lambda nth: torch.tensor([float(nth)]))
    ours, original = check(items, batch_size=5)
    changes = [
        lambda: items[1][0].ndata["feat"].zero_(),
        lambda: items[2][0].ndata.update({"feat": torch.ones_like(items[2][0].ndata["feat"])}),
        lambda: items[3][0].add_edges(0, 0, {"bond": torch.ones(1, 2)}),
        lambda: items[4][1].fill_(-1.0),
        lambda: items.__setitem__(0, items[5]),
        lambda: None,
    ]
    for change in changes:
        change()
        for got, expected in zip(ours, original, strict=True):
            assert_same(got, expected)


def test_batches_are_the_callers():
    graphs = molecules()
    loader = GraphDataLoader(graphs, batch_size=17)
    (batch,) = loader
    batch.ndata["feat"].zero_()
    batch.batch_num_nodes().zero_()
    (again,) = loader
    assert_same(again, dgl.batch(graphs))


def test_interrupted_epochs_and_two_at_once():
    dataset = labelled(float)
    loader, other = (GraphDataLoader(dataset, batch_size=4, shuffle=shuffle) for shuffle in (False, True))
    for _ in range(5):
        for _batch in loader:
            break
    with pytest.raises(KeyError, match="of the loop"):  # noqa: PT012
        for _batch in loader:
            raise KeyError("of the loop")
    original = OriginalLoader(dataset, batch_size=4)
    for one, two, mixed, expected in zip(loader, loader, other, original, strict=True):
        assert_same(one, expected)
        assert_same(two, expected)
        assert mixed[0].batch_size == one[0].batch_size


def test_a_sample_that_is_not_there():
    batches = iter(GraphDataLoader(molecules(5), batch_sampler=[[0, 9], [1]]))
    with pytest.raises(IndexError, match="positions below 5"):
        next(batches)
    assert next(batches).batch_size == 1


def test_loaders_can_be_pickled():
    loader = pickle.loads(pickle.dumps(GraphDataLoader(labelled(float), batch_size=4)))
    for got, expected in zip(loader, OriginalLoader(labelled(float), batch_size=4), strict=True):
        assert_same(got, expected)


LAYERS = {
    "gcn": lambda: FastGraphConv(4, 8, allow_zero_in_degree=True),
    "sage": lambda: FastSAGEConv(4, 8, "mean"),
    "gin": lambda: fastsparse_dgl.FastGINConv(nn.Linear(4, 8), "sum"),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_on_batches(layer, monkeypatch):
    torch.manual_seed(0)
    conv = LAYERS[layer]()
    graphs = molecules()
    loader = GraphDataLoader(graphs, batch_size=4)
    first = next(iter(loader))
    conv(first, first.ndata["feat"])  # sorts the edges of all graphs
    for batch, plain in zip(loader, OriginalLoader(graphs, batch_size=4), strict=True):
        results = []
        for graph in (batch, plain):
            with monkeypatch.context() as patch:
                if graph is batch:
                    patch.setattr(
                        "fastsparse_dgl.caching.adjacency_from_graph", lambda *_: pytest.fail("sorted")
                    )
                x = graph.ndata["feat"].requires_grad_()
                out = conv(graph, x)
            conv.zero_grad()
            out.square().sum().backward()
            results.append([out, x.grad, *(weight.grad for weight in conv.parameters())])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_changed_gets_another_structure():
    (batch,) = GraphDataLoader(molecules(), batch_size=17)
    conv = FastGraphConv(4, 4, allow_zero_in_degree=True)
    batch.add_edges([0, 1], [1, 0])
    expected = conv(dgl.graph(batch.edges(), num_nodes=batch.num_nodes()), batch.ndata["feat"])
    torch.testing.assert_close(conv(batch, batch.ndata["feat"]), expected)


def test_memory_stays_flat():
    loader = GraphDataLoader(labelled(float), batch_size=4, shuffle=True)
    conv = FastGraphConv(4, 4, allow_zero_in_degree=True)
    counts = []
    for _ in range(4):
        for _ in range(50):
            for graph, _label in loader:
                conv(graph, graph.ndata["feat"])
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert min(counts[2:]) <= counts[1]  # a leak grows in every round; caches of Python's own may fill in one


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["graphs", "tensor labels", "hetero"])
def test_batches_on_the_gpu(name):
    dataset = DATASETS[name]()
    originals = list(OriginalLoader(dataset, batch_size=4))  # enable() replaces this name
    with enabled():
        loader = GraphDataLoader(dataset, batch_size=4, device="cuda")
        conv = FastGraphConv(4, 4, allow_zero_in_degree=True).cuda()
        for got, expected in zip(loader, originals, strict=True):
            got, labels = got if isinstance(got, list) else (got, None)
            expected, expected_labels = expected if isinstance(expected, list) else (expected, None)
            assert got.device.type == "cuda"
            assert_same_graph(got.cpu(), expected)
            if labels is not None:
                assert labels.is_cuda
                assert torch.equal(labels.cpu(), expected_labels)
            if name != "hetero":
                out = conv(got, got.ndata["feat"])
                torch.testing.assert_close(out, conv(expected.to("cuda"), expected.ndata["feat"].cuda()))


@pytest.mark.gpu
def test_graphs_that_do_not_fit(monkeypatch, reasons):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    with enabled():
        dataset = labelled(float)
        loader = GraphDataLoader(dataset, batch_size=4, device="cuda")
        assert "page-locked" in reasons.text
        for (got, labels), (expected, _) in zip(loader, OriginalLoader(dataset, batch_size=4), strict=True):
            assert labels.is_cuda
            assert_same_graph(got.cpu(), expected)


def num_bytes(item):
    """Bytes of all tensors of an item."""
    if isinstance(item, dgl.DGLGraph):
        views = [item.nodes[name].data for name in item.ntypes]
        views += [item.edges[name].data for name in item.canonical_etypes]
        ends = [item.edges(etype=name) for name in item.canonical_etypes]
        return num_bytes([view[name] for view in views for name in view]) + num_bytes(ends)
    if isinstance(item, (list, tuple)):
        return sum(map(num_bytes, item))
    return item.nbytes if isinstance(item, (Tensor, np.ndarray)) else 0


@pytest.mark.parametrize("name", ["int32", "hetero", "tensor labels", "arrays", "lists"])
def test_datasets_that_memory_does_not_hold_are_not_copied(name, monkeypatch):
    dataset = DATASETS[name]()
    size = num_bytes(dataset)
    monkeypatch.setattr("fastsparse_core.log.seen", set())
    monkeypatch.setattr("fastsparse_core.graph_store.free_host_memory", lambda: 2.0 * size - 1)
    with pytest.warns(SlowPathWarning, match="GiB of free host memory"):
        loader = GraphDataLoader(dataset, batch_size=4)
    for got, expected in zip(loader, OriginalLoader(dataset, batch_size=4), strict=True):
        assert_same(got, expected)
    monkeypatch.setattr("fastsparse_core.graph_store.free_host_memory", lambda: 2.0 * size)
    assert GraphDataLoader(dataset, batch_size=4)._graphs is not None


def test_collate_functions_that_are_assigned(monkeypatch):
    monkeypatch.setattr("fastsparse_core.log.seen", set())
    loader = GraphDataLoader(molecules(4), batch_size=2)
    loader.collate_fn = len
    with pytest.warns(SlowPathWarning, match="collate_fn was assigned"):
        assert list(loader) == [2, 2]


@pytest.mark.gpu
def test_memory_on_the_gpu_stays_flat():
    with enabled():
        loader = GraphDataLoader(labelled(float), batch_size=4, shuffle=True, device="cuda")
        conv = FastGraphConv(4, 4, allow_zero_in_degree=True).cuda()
        used = []
        for _ in range(200):
            for graph, _label in loader:
                conv(graph, graph.ndata["feat"])
            del graph, _label
            gc.collect()
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    assert used[-1] == used[5]
