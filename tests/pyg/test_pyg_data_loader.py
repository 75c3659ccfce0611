"""`DataLoader` of stored graphs: every field of every batch against `Batch.from_data_list`."""

from __future__ import annotations

import gc
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler, Subset, WeightedRandomSampler
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.loader import DataLoader as PygDataLoader
from torch_geometric.nn import global_mean_pool
from torch_geometric.typing import SparseTensor

import fastsparse_pyg
from fastsparse_core import graph_store, log
from fastsparse_core.log import SlowPathWarning
from fastsparse_pyg import DataLoader, FastGATConv, FastGCNConv, FastGINConv, FastSAGEConv, capture
from fastsparse_pyg.loader import stored_graphs

#: Smallest number of batches in which random datasets are compared, in all tests together: 10,000 before a
#: release.
NUM_BATCHES = int(os.environ.get("FASTSPARSE_LOADER_BATCHES", "200"))


# ---------------------------------------------------------------- comparison


def assert_same(got, expected, where="") -> None:
    """Both are the same to the last bit: types, order, shapes, dtypes, values."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), where
        assert got.dtype == expected.dtype, where
        assert got.shape == expected.shape, where
        assert got.layout == expected.layout, where
        if expected.layout is torch.strided:
            assert torch.equal(got.cpu().nan_to_num(7.0), expected.cpu().nan_to_num(7.0)), where
        else:
            assert torch.equal(got.to_dense().cpu(), expected.to_dense().cpu()), where
    elif isinstance(expected, SparseTensor):
        assert torch.equal(got.to_dense().cpu(), expected.to_dense().cpu()), where
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(got, expected), where
    elif isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key in expected:
            assert_same(got[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected), where
        assert len(got) == len(expected), where
        for nth, (one, two) in enumerate(zip(got, expected, strict=True)):
            assert_same(one, two, f"{where}[{nth}]")
    else:
        assert type(got) is type(expected), where
        assert got == expected, where


def assert_same_data(got, expected) -> None:
    assert type(got) is type(expected)
    assert [store._key for store in got.stores] == [store._key for store in expected.stores]
    for mine, original in zip(got.stores, expected.stores, strict=True):
        assert mine._parent() is got
        assert_same(dict(mine._mapping), dict(original._mapping), str(original._key))
        private = [
            {
                name: item
                for name, item in store.__dict__.items()
                if name not in ("_mapping", "_parent", "_cached_attr")
            }
            for store in (mine, original)
        ]
        for store in private:
            for name in ("_slice_dict", "_inc_dict"):
                if name in store:
                    store[name] = dict(sorted(store[name].items(), key=str))
        assert_same(dict(sorted(private[0].items())), dict(sorted(private[1].items())), "private")


def assert_same_batch(got, expected) -> None:
    assert_same_data(got, expected)
    assert got.num_graphs == expected.num_graphs == len(got)
    assert got.num_nodes == expected.num_nodes
    try:
        graphs = expected.to_data_list()
    except Exception as error:  # PyG cannot take apart some of its batches
        with pytest.raises(type(error)):
            got.to_data_list()
    else:
        for mine, original in zip(got.to_data_list(), graphs, strict=True):
            assert_same_data(mine, original)
        assert_same_data(got[len(got) - 1], graphs[-1])
    assert_same_data(pickle.loads(pickle.dumps(got)), expected)


def both(dataset, device="cpu", **options):
    """Batches of our loader and of PyG's from the same seed."""
    loaders = [
        kind(dataset, generator=torch.Generator().manual_seed(3), **options, **more)
        for kind, more in ((DataLoader, {"device": device}), (PygDataLoader, {}))
    ]
    assert len(loaders[0]) == len(loaders[1])
    return loaders


def check(dataset, device="cpu", epochs=1, **options) -> None:
    ours, original = both(dataset, device, **options)
    for _ in range(epochs):
        batches = list(ours)
        assert len(batches) == len(ours)
        for got, expected in zip(batches, original, strict=True):
            on_device = expected if device == "cpu" else expected.to(device)
            assert_same_batch(got, on_device)


# ---------------------------------------------------------------- random datasets


def _floats(generator, shape):
    return torch.randn(shape, generator=generator)


def _of_dtype(generator, shape, dtype):
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    return (torch.randn(shape, generator=generator) * 20).to(dtype)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


class PairData(Data):
    """Two graphs in one, as in PyG's documentation."""

    def __inc__(self, key, value, *args, **kwargs):
        if key == "edge_index_s":
            return self.x_s.size(0)
        if key == "ends_index":
            return torch.tensor([[self.x_s.size(0)], [self.num_nodes]])
        return super().__inc__(key, value, *args, **kwargs)

    def __cat_dim__(self, key, value, *args, **kwargs):
        if key == "stacked":
            return None
        if key == "wide":
            return 1
        return super().__cat_dim__(key, value, *args, **kwargs)


#: Name of an attribute -> function that makes its value for a graph of given numbers of nodes and edges.
ATTRIBUTES = {
    "x": lambda g, n, e, dtype: _of_dtype(g, (n, 3), dtype),
    "pos": lambda g, n, e, dtype: _floats(g, (n, 3)),
    "node_kind": lambda g, n, e, dtype: _of_dtype(g, (n,), dtype),
    "edge_index": lambda g, n, e, dtype: torch.randint(max(n, 1), (2, e if n else 0), generator=g),
    "edge_attr": lambda g, n, e, dtype: _of_dtype(g, (e if n else 0, 2), dtype),
    "edge_weight": lambda g, n, e, dtype: _floats(g, (e if n else 0,)),
    "y": lambda g, n, e, dtype: _of_dtype(g, (1,), dtype),
    "target": lambda g, n, e, dtype: _floats(g, (1, 4, 2)),
    "scalar": lambda g, n, e, dtype: _floats(g, ()),
    "empty": lambda g, n, e, dtype: torch.empty(0, 4),
    "number": lambda g, n, e, dtype: n * 3,
    "real": lambda g, n, e, dtype: n / 3,
    "flag": lambda g, n, e, dtype: n % 2 == 0,
    "name": lambda g, n, e, dtype: f"graph of {n}",
    "labels": lambda g, n, e, dtype: list(range(e)),
    "array": lambda g, n, e, dtype: np.arange(n),
    "root_index": lambda g, n, e, dtype: torch.randint(max(n, 1), (2,), generator=g),
    "center_index": lambda g, n, e, dtype: max(n - 1, 0),
    "small_index": lambda g, n, e, dtype: torch.zeros(1, 3, dtype=torch.int32),
    "face": lambda g, n, e, dtype: torch.randint(max(n, 1), (3, 2), generator=g),
    "group_batch": lambda g, n, e, dtype: torch.arange(n + 1),
    "parts": lambda g, n, e, dtype: {
        "a": _floats(g, (n, 2)),
        "b_index": torch.arange(n),
        "c": "text",
        "d": n,
    },
    "levels": lambda g, n, e, dtype: [_floats(g, (n, 2)), torch.arange(e)],
    "num_nodes": lambda g, n, e, dtype: n,
}
#: Attributes that PyG's own code collates.
SLOW_ATTRIBUTES = {
    "adj": lambda g, n, e, dtype: torch.eye(n).to_sparse(),
    "adj_t": lambda g, n, e, dtype: (
        SparseTensor.eye(n) if hasattr(SparseTensor, "eye") else torch.eye(n).to_sparse()
    ),
    "mixed": lambda g, n, e, dtype: torch.zeros(1, dtype=torch.int32 if n % 2 else torch.int64),
    "sometimes": lambda g, n, e, dtype: n if n % 2 else float(n),
    "ragged": lambda g, n, e, dtype: [torch.zeros(1)] * (1 + n % 2),
    "learned": lambda g, n, e, dtype: _floats(g, (n, 1)).requires_grad_(),
    "score_index": lambda g, n, e, dtype: _floats(g, (n,)),
}


@st.composite
def homogeneous(draw, attributes=tuple(ATTRIBUTES)):
    names = draw(st.lists(st.sampled_from(attributes), min_size=1, max_size=7, unique=True))
    if not {"x", "num_nodes"} & set(names):  # otherwise PyG guesses, and warns
        names.append(draw(st.sampled_from(["x", "num_nodes"])))
    seed, dtype = draw(st.integers(0, 2**20)), draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=9))
    kind = draw(st.sampled_from([Data, Data, PairData]))
    generator = torch.Generator().manual_seed(seed)
    makers = {**ATTRIBUTES, **SLOW_ATTRIBUTES}
    graphs = []
    for nodes, edges in sizes:
        data = kind()
        for name in names:
            data[name] = makers[name](generator, nodes, edges, dtype)
        if kind is PairData:
            data.x_s = torch.randn(edges, 2, generator=generator)
            data.edge_index_s = torch.arange(2 * edges).view(2, edges)
            data.ends_index = torch.zeros(2, edges, dtype=torch.int64)
            data.stacked = torch.randn(2, 2, generator=generator)
            data.wide = torch.randn(2, nodes, 3, generator=generator)
        graphs.append(data)
    return graphs


@st.composite
def heterogeneous(draw):
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    has_num_nodes, has_edges, has_global = (draw(st.booleans()) for _ in range(3))
    sizes = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=7))
    graphs = []
    for users, items in sizes:
        data = HeteroData()
        data["user"].x = torch.randn(users, 2, generator=generator)
        data["item"].x = torch.randn(items, 3, generator=generator)
        data["item"].some_index = torch.arange(items)
        if has_num_nodes:
            data["tag"].num_nodes = users + items
        if has_global:
            data.y = torch.randn(1, generator=generator)
            data.title = f"{users}"
        if has_edges:
            count = 3 if users and items else 0
            data["user", "buys", "item"].edge_index = torch.stack(
                [torch.randint(max(users, 1), (count,), generator=generator) for _ in range(1)]
                + [torch.randint(max(items, 1), (count,), generator=generator)]
            )
            data["user", "buys", "item"].edge_attr = torch.randn(count, 2, generator=generator)
            data["user", "knows", "user"].edge_index = torch.randint(
                max(users, 1), (2, 2 if users else 0), generator=generator
            )
        graphs.append(data)
    return graphs


@st.composite
def options_of(draw, names):
    options = {"batch_size": draw(st.integers(1, 5)), "shuffle": draw(st.booleans())}
    options["drop_last"] = draw(st.booleans())
    if names:
        options["follow_batch"] = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
        options["exclude_keys"] = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    return options


def check_or_same_error(graphs, options, device="cpu", all_stored=True) -> None:
    """The same batches, or the same kind of error where PyG cannot collate."""
    try:
        expected = list(both(graphs, "cpu", **options)[1])
    except Exception as error:
        with pytest.raises(type(error)):
            list(both(graphs, device, **options)[0])
        return
    ours = both(graphs, device, **options)[0]
    if all_stored:
        collators = [one for store in ours._graphs._stores for _, one, _ in store.collators]
        assert not any(isinstance(one, stored_graphs._ByPyG) for one in collators)
    for got, original in zip(ours, expected, strict=True):
        if not any(isinstance(item, Tensor) and item.requires_grad for item in original.to_dict().values()):
            assert_same_batch(got, original)


@pytest.mark.parametrize(
    ("attributes", "share"),
    [(tuple(ATTRIBUTES), 2), ((*ATTRIBUTES, *SLOW_ATTRIBUTES), 8)],
    ids=["stored", "by PyG"],
)
@pytest.mark.filterwarnings("ignore::fastsparse_core.log.SlowPathWarning")
def test_random_graphs(attributes, share):
    @settings(max_examples=max(NUM_BATCHES // share, 10), deadline=None, database=None)
    @given(st.data())
    def run(data):
        graphs = data.draw(homogeneous(attributes))
        options = data.draw(options_of(sorted(graphs[0].keys())))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            check_or_same_error(graphs, options, all_stored=share == 2)

    run()


def test_random_heterogeneous_graphs():
    @settings(max_examples=max(NUM_BATCHES // 8, 10), deadline=None, database=None)
    @given(st.data())
    def run(data):
        graphs = data.draw(heterogeneous())
        options = data.draw(options_of(["x", "y", "edge_index", "edge_attr", "title"]))
        check_or_same_error(graphs, options)

    run()


# ---------------------------------------------------------------- kinds of datasets


def molecule(nth, generator, loops=False):
    nodes = 3 + nth % 5
    ends = torch.randint(nodes, (2, 2 * nodes), generator=generator)
    if not loops:
        ends = ends[:, ends[0] != ends[1]]
    edge_index = torch.cat([ends, ends.flip(0)], dim=1)
    return Data(
        x=torch.randn(nodes, 4, generator=generator),
        edge_index=edge_index[:, torch.randperm(edge_index.size(1), generator=generator)],
        edge_attr=torch.randn(edge_index.size(1), 3, generator=generator),
        y=float(nth),
        smiles=f"C{nth}",
    )


def molecules(count=23, **options):
    generator = torch.Generator().manual_seed(0)
    return [molecule(nth, generator, **options) for nth in range(count)]


class Stored(InMemoryDataset):
    """A dataset in PyG's storage."""

    def __init__(self, graphs, transform=None):
        super().__init__(None, transform)
        self.data, self.slices = self.collate(graphs)


class Changed(Stored):
    def get(self, idx):
        data = super().get(idx)
        data.x = data.x + 1
        return data


def hetero_graphs(count=9):
    generator = torch.Generator().manual_seed(1)
    graphs = []
    for nth in range(count):
        data = HeteroData()
        data["a"].x, data["b"].x = torch.randn(2 + nth % 3, 4), torch.randn(1 + nth % 4, 5)
        sizes = {"a": 2 + nth % 3, "b": 1 + nth % 4}
        for name in (("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a")):
            data[name].edge_index = torch.stack(
                [torch.randint(sizes[end], (6,), generator=generator) for end in (name[0], name[2])]
            )
        data.y = torch.tensor([nth])
        graphs.append(data)
    return graphs


def only_nodes(count=6):
    return [Data(num_nodes=nth, edge_index=torch.zeros(2, 0, dtype=torch.int64)) for nth in range(count)]


DATASETS = {
    "list": molecules,
    "tuple": lambda: tuple(molecules()),
    "in memory": lambda: Stored(molecules()),
    "in memory, indexed": lambda: Stored(molecules())[torch.tensor([4, 2, 2, 20, 7])],
    "in memory, sliced": lambda: Stored(molecules())[5:15],
    "in memory, hetero": lambda: Stored(hetero_graphs()),
    "in memory, num_nodes": lambda: Stored(only_nodes()),
    "in memory, one graph": lambda: Stored(molecules(1)),
    "in memory, pairs": lambda: Stored(pairs()),
    "subset": lambda: Subset(Stored(molecules()), [3, 1, 22, 3]),
    "subset of indexed": lambda: Subset(Stored(molecules())[3:], [0, 5, -1]),
    "subset of a list": lambda: Subset(molecules(), [9, -2, 9]),
    "subset of a subset": lambda: Subset(Subset(Stored(molecules()), list(range(2, 20))), [0, 5, 17]),
    "concatenated": lambda: ConcatDataset([Stored(molecules())[3:6], Subset(Stored(molecules(4)), [1, 0])]),
    "subset of concatenated": lambda: Subset(ConcatDataset([molecules(), molecules(4)]), [25, 0, 3]),
    "hetero": hetero_graphs,
    "num_nodes": only_nodes,
}


def pairs():
    graphs = []
    for nth in range(7):
        data = PairData(x=torch.randn(2 + nth % 3, 2), x_s=torch.randn(nth, 2), stacked=torch.randn(2, 2))
        data.edge_index_s = torch.randint(max(nth, 1), (2, nth))
        data.ends_index = torch.zeros(2, 3, dtype=torch.int64)
        data.wide = torch.randn(2, 2 + nth % 3)
        graphs.append(data)
    return graphs


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_datasets(device, name, shuffle):
    dataset = DATASETS[name]()
    check(dataset, device, epochs=2, batch_size=3, shuffle=shuffle, drop_last=shuffle)
    assert DataLoader(dataset, device=device)._graphs is not None


def test_storage_of_in_memory_datasets_is_read_in_place(monkeypatch):
    dataset = Stored(molecules())
    monkeypatch.setattr(Stored, "get", property(lambda self: pytest.fail("a graph was made")))
    monkeypatch.setattr(InMemoryDataset, "get", Stored.get)
    loader = DataLoader(dataset, batch_size=4, device="cpu")
    addresses = {field.tensor.data_ptr() for field in loader._graphs._fields if field.tensor is not None}
    assert {dataset._data.x.data_ptr(), dataset._data.edge_index.data_ptr()} <= addresses
    assert len(list(loader)) == 6


def test_graphs_that_an_in_memory_dataset_keeps():
    dataset = Stored(molecules())
    dataset[3]  # the dataset keeps the graph as a view
    check(dataset, batch_size=5)
    dataset._data_list[3].x = torch.zeros_like(dataset._data_list[3].x)
    check(dataset, batch_size=5)
    dataset._data_list = molecules(23, loops=True)
    check(dataset, batch_size=5)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * 23, 9, generator=torch.Generator().manual_seed(1))}, 9),
        (
            {"batch_sampler": BatchSampler(RandomSampler(range(10), generator=torch.Generator()), 4, False)},
            10,
        ),
        ({"batch_sampler": [[0, 1], [-1, 22], torch.tensor([3, 3]), np.array([5])]}, 7),
        ({"sampler": [np.int64(3), torch.tensor(2), 1], "batch_size": 2}, 3),
    ],
)
def test_samplers(options, count):
    state = {name: pickle.dumps(item) for name, item in options.items()}
    loaders = [
        kind(molecules(), **{name: pickle.loads(item) for name, item in state.items()}, **more)
        for kind, more in ((DataLoader, {"device": "cpu"}), (PygDataLoader, {}))
    ]
    total = 0
    for got, expected in zip(*loaders, strict=True):
        assert_same_batch(got, expected)
        total += len(got)
    assert total == count


def test_order_follows_the_global_seed_too():
    graphs = molecules()
    order = []
    for kind, more in ((DataLoader, {"device": "cpu"}), (PygDataLoader, {})):
        torch.manual_seed(5)
        loader = kind(graphs, batch_size=4, shuffle=True, **more)
        order.append([batch.smiles for _ in range(3) for batch in loader] + [torch.rand(1)])
    assert order[0] == order[1]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Stored(molecules(), transform=lambda data: data), "has a transform"),
        (lambda: Subset(Stored(molecules(), transform=lambda data: data), [0, 1]), "has a transform"),
        (lambda: Changed(molecules()), "overrides the method get"),
        (lambda: [torch.zeros(3)] * 5, "of type Tensor"),
        (lambda: [Batch.from_data_list(molecules(3))] * 5, "of type DataBatch"),
        (lambda: [Data(x=torch.ones(2, 1)), Data(x=torch.ones(2, 1), y=1.0)][::-1], "different attributes"),
        (lambda: [Data(x=torch.ones(2, 1)), PairData(x=torch.ones(2, 1))], "several classes"),
        (
            lambda: type("Mine", (torch.utils.data.Dataset,), _OF_MINE)(),
            "cannot tell whether a",
        ),
    ],
)
def test_what_pyg_batches_says_why(monkeypatch, make, reason):
    monkeypatch.setattr("fastsparse_core.log.seen", set())
    dataset = make()
    with pytest.warns(SlowPathWarning, match=reason):
        loader = DataLoader(dataset, batch_size=2, device="cpu")
    original = PygDataLoader(dataset, batch_size=2)
    try:
        expected = list(original)
    except KeyError:
        with pytest.raises(KeyError):
            list(loader)
        return
    for got, other in zip(loader, expected, strict=True):
        if isinstance(other, Tensor):
            assert torch.equal(got, other)
        else:
            assert_same_data(got, other)


_OF_MINE = {"__len__": lambda self: 5, "__getitem__": lambda self, nth: molecules(nth + 1)[nth]}


def test_a_transform_that_is_set_later(monkeypatch):
    monkeypatch.setattr("fastsparse_core.log.seen", set())
    dataset = Stored(molecules())
    loader = DataLoader(dataset, batch_size=23, device="cpu")
    dataset.transform = lambda data: Data(x=data.x * 2)
    with pytest.warns(SlowPathWarning, match="transform"):
        (batch,) = loader
    assert torch.equal(batch.x, dataset._data.x * 2)
    dataset.transform = None
    (batch,) = loader
    assert torch.equal(batch.x, dataset._data.x)


def test_an_attribute_that_pyg_collates_says_why(monkeypatch):
    monkeypatch.setattr("fastsparse_core.log.seen", set())
    graphs = [Data(x=torch.ones(2, 1), adj=torch.eye(2).to_sparse()) for _ in range(3)]
    with pytest.warns(SlowPathWarning, match=r"'adj'.*sparse.*exclude_keys=\['adj'\]"):
        DataLoader(graphs, device="cpu")


@pytest.mark.filterwarnings("ignore::fastsparse_core.log.SlowPathWarning")
@pytest.mark.parametrize(
    ("values", "stored"),
    [
        ([{"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(3), "b": torch.ones(2)}], True),
        ([[torch.ones(2), torch.ones(1)], [torch.ones(3), torch.ones(2)]], True),
        ([[torch.ones(2), torch.ones(1)], [torch.ones(3)]], False),
        ([torch.ones(2), torch.ones(3).long()], False),
    ],
    ids=["dict", "list", "lists of different lengths", "different dtypes"],
)
def test_attributes_of_several_tensors(values, stored):
    """The random graphs above have such attributes, too, but rarely."""
    graphs = [Data(x=torch.ones(2, 1), parts=value) for value in values]
    for options in ({}, {"follow_batch": ["parts"]}):
        check_or_same_error(graphs, {"batch_size": 2, "shuffle": False, **options}, all_stored=stored)


def test_collate_functions_that_are_assigned(monkeypatch):
    """PyG's loader drops the argument `collate_fn`, so people assign the attribute."""
    for change in ("collate_fn", "follow_batch"):
        monkeypatch.setattr("fastsparse_core.log.seen", set())
        loader = DataLoader(molecules(4), batch_size=2)
        assert len(next(iter(loader))) == 2
        if change == "collate_fn":
            loader.collate_fn = len
        else:
            loader.collate_fn.follow_batch = ["x"]
        with pytest.warns(SlowPathWarning, match="collate_fn was assigned"):
            batch = next(iter(loader))
        assert batch == 2 if change == "collate_fn" else "x_batch" in batch


def test_options_of_workers_are_ignored(reasons):
    check(molecules(), batch_size=4, shuffle=True)
    loader = DataLoader(molecules(), num_workers=3, persistent_workers=True, prefetch_factor=2, device="cpu")
    assert loader.num_workers == 0
    assert "num_workers" in reasons.text
    assert len(list(loader)) == 23


def test_collate_fn_is_left_to_pyg():
    loader = DataLoader(
        molecules(), collate_fn=lambda items: pytest.fail("called"), batch_size=4, device="cpu"
    )
    assert isinstance(next(iter(loader)), Batch)
    assert isinstance(loader, PygDataLoader)


# ---------------------------------------------------------------- changes to a loader


def test_changes_between_epochs_are_seen():
    graphs = molecules()
    ours, original = both(graphs, batch_size=5)
    changes = [
        lambda: graphs[3].x.zero_(),
        lambda: setattr(graphs[4], "x", graphs[4].x + 1),
        lambda: graphs.__setitem__(0, graphs[7]),
        lambda: [setattr(data, "extra", torch.ones(1)) for data in graphs],
        lambda: None,
    ]
    for change in changes:
        change()
        for got, expected in zip(ours, original, strict=True):
            assert_same_batch(got, expected)


def test_changes_of_in_memory_storage_are_seen():
    dataset = Stored(molecules())
    ours, original = both(dataset, batch_size=5)
    for change in (lambda: dataset._data.x.mul_(2), lambda: dataset[2].x.zero_(), lambda: None):
        change()
        for got, expected in zip(ours, original, strict=True):
            assert_same_batch(got, expected)


def test_batches_are_the_callers(device):
    graphs = molecules()
    loader = DataLoader(graphs, batch_size=23, device=device)
    (batch,) = loader
    for slices in batch._slice_dict.values():
        slices.fill_(1 << 40)
    fastsparse_pyg.prepare(batch.edge_index, batch.num_nodes)
    for value in batch.to_dict().values():
        if isinstance(value, Tensor):
            value.fill_(1)
    (again,) = loader
    assert_same_batch(again, Batch.from_data_list(graphs).to(device))


def test_interrupted_epochs_and_two_at_once():
    graphs = molecules()
    loader = DataLoader(graphs, batch_size=4, device="cpu")
    other = DataLoader(graphs, batch_size=4, device="cpu", shuffle=True)
    for _ in range(5):
        for _batch in loader:
            break
    for one, two, mixed in zip(loader, loader, other, strict=True):
        assert_same_data(one, two)
        assert len(mixed) == len(one)
    original = PygDataLoader(graphs, batch_size=4)
    for got, expected in zip(loader, original, strict=True):
        assert_same_batch(got, expected)


def test_a_sample_that_is_not_there():
    graphs = molecules(5)
    loader = DataLoader(graphs, batch_sampler=[[0, 1], [2, 9], [3, -6]], device="cpu")
    batches = iter(loader)
    next(batches)
    for _ in range(2):
        with pytest.raises(IndexError, match="positions below 5"):
            next(batches)
    assert_same_batch(next(iter(loader)), Batch.from_data_list(graphs[:2]))


def test_an_error_in_the_loop_leaves_the_loader_usable():
    loader = DataLoader(molecules(), batch_size=4, device="cpu")
    with pytest.raises(KeyError, match="of the loop"):  # noqa: PT012
        for _ in loader:
            raise KeyError("of the loop")
    assert len(list(loader)) == 6


def test_loaders_can_be_pickled():
    loader = pickle.loads(pickle.dumps(DataLoader(molecules(), batch_size=4, device="cpu")))
    for got, expected in zip(loader, PygDataLoader(molecules(), batch_size=4), strict=True):
        assert_same_batch(got, expected)


def test_an_empty_dataset():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(DataLoader([], device="cpu")) == []
    graphs = []
    loader = DataLoader(graphs, batch_size=3, device="cpu")
    graphs += molecules(3)
    assert_same_batch(next(iter(loader)), Batch.from_data_list(graphs))


@pytest.mark.parametrize("name", ["list", "in memory", "hetero"])
def test_memory_stays_flat(name):
    loader = DataLoader(DATASETS[name](), batch_size=4, shuffle=True, device="cpu")
    conv = FastGCNConv(4, 4)

    def epoch():
        for batch in loader:
            if name != "hetero":
                conv(batch.x, batch.edge_index)

    counts = []
    for _ in range(4):
        for _ in range(15):
            epoch()
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert min(counts[2:]) <= counts[1]  # a leak grows in every round; caches of Python's own may fill in one


def test_a_change_of_the_default_dtype():
    graphs = molecules()
    loader = DataLoader(graphs, batch_size=23, device="cpu")
    torch.set_default_dtype(torch.float64)
    try:
        (batch,) = loader
        assert_same_batch(batch, Batch.from_data_list(graphs))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["list", "in memory", "in memory, num_nodes"])
def test_another_default_device(name):
    dataset = DATASETS[name]()
    expected = Batch.from_data_list([dataset[nth] for nth in (3, 1, 4)])
    with torch.device("meta"):
        loader = DataLoader(dataset, batch_size=3, device="cpu")
        batch = loader._graphs.batch([3, 1, 4])
        if name == "list":
            conv = FastGCNConv(4, 4).to_empty(device="cpu")
            conv(batch.x, batch.edge_index)
    assert_same_batch(batch, expected)


def test_inference_mode():
    graphs = molecules()
    with torch.inference_mode():
        (batch,) = DataLoader(graphs, batch_size=23, device="cpu")
        assert_same_batch(batch, Batch.from_data_list(graphs))
        assert FastGCNConv(4, 2)(batch.x, batch.edge_index).shape == (batch.num_nodes, 2)


# ---------------------------------------------------------------- structures of batches


LAYERS = {
    "gcn": lambda: FastGCNConv(4, 8),
    "sage": lambda: FastSAGEConv(4, 8),
    "gin": lambda: FastGINConv(nn.Linear(4, 8)),
    "gat": lambda: FastGATConv(4, 4, heads=2),
}


def directed(count=15):
    generator = torch.Generator().manual_seed(2)
    return [
        Data(
            x=torch.randn(nth % 4 + 1, 4, generator=generator),
            edge_index=torch.randint(nth % 4 + 1, (2, nth), generator=generator),
        )
        for nth in range(count)
    ]


def ascending(graphs):
    for data in graphs:
        data.edge_index = data.edge_index[:, data.edge_index[1].argsort(stable=True)]
    return graphs


STRUCTURES = {
    "molecules": molecules,
    "with loops": lambda: molecules(loops=True),
    "directed": directed,
    "ascending": lambda: ascending(directed()),
    "ascending molecules": lambda: ascending(molecules()),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("graphs", STRUCTURES)
def test_layers_on_batches(device, layer, graphs):
    graphs = STRUCTURES[graphs]()
    torch.manual_seed(0)
    conv = LAYERS[layer]().to(device)
    for batch, plain in zip(
        DataLoader(graphs, batch_size=4, device=device), PygDataLoader(graphs, batch_size=4), strict=True
    ):
        plain = plain.to(device)
        results = []
        for item in (batch, plain):
            x = item.x.requires_grad_()
            out = conv(x, item.edge_index)
            conv.zero_grad()
            out.square().sum().backward()
            results.append([out, x.grad, *(weight.grad for weight in conv.parameters())])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("graphs", STRUCTURES)
def test_structures_of_batches(device, graphs, monkeypatch):
    graphs = STRUCTURES[graphs]()
    loader = DataLoader(graphs, batch_size=4, device=device)
    first = next(iter(loader))
    fastsparse_pyg.prepare(first.edge_index, first.num_nodes)  # sorts the edges of all graphs
    for batch in loader:
        num_nodes = batch.num_nodes
        fresh = fastsparse_pyg.prepare(batch.edge_index.clone(), num_nodes)
        with monkeypatch.context() as patch:
            patch.setattr("fastsparse_core.Adjacency.from_coo", lambda *_: pytest.fail("edges were sorted"))
            adj = fastsparse_pyg.prepare(batch.edge_index, num_nodes)
        source, destination = batch.edge_index.cpu()
        for found, ends in ((adj, (destination, source)), (adj.t(), (source, destination))):
            order = torch.arange(found.num_edges) if found.edge_id is None else found.edge_id.cpu().long()
            assert torch.equal(found.row().cpu().long(), ends[0][order])
            assert torch.equal(found.col.cpu().long(), ends[1][order])
            assert torch.equal(order.sort().values, torch.arange(found.num_edges))
        torch.testing.assert_close(adj.inv_degree(), fresh.inv_degree(), rtol=1e-6, atol=0)
        torch.testing.assert_close(
            adj.inv_sqrt_degree(loops=1), fresh.inv_sqrt_degree(loops=1), rtol=1e-6, atol=0
        )
        assert torch.equal(adj.out_degree(), fresh.out_degree())
        assert adj.has_empty_rows() == fresh.has_empty_rows()
        assert adj.has_loops == bool((source == destination).any())
        if adj.symmetric:
            assert fresh.is_symmetric


def test_structure_is_that_of_the_edges_as_they_are():
    loader = DataLoader(molecules(), batch_size=23, device="cpu")
    conv = FastGCNConv(4, 4)
    (batch,) = loader
    batch.edge_index[:, 0] = torch.tensor([0, 1])  # after this edit, the loader's facts do not hold
    expected = conv(batch.x, batch.edge_index.clone())
    assert torch.equal(conv(batch.x, batch.edge_index), expected)


def test_edges_that_leave_their_graph():
    graphs = molecules(6)
    graphs[2].edge_index[0, 0] = 7  # a node of the next graph
    for batch, plain in zip(
        DataLoader(graphs, batch_size=6, device="cpu"), PygDataLoader(graphs, batch_size=6), strict=True
    ):
        conv = FastGCNConv(4, 4)
        assert_same_batch(batch, plain)
        assert torch.equal(conv(batch.x, batch.edge_index), conv(plain.x, plain.edge_index))


def test_bipartite_edges():
    for batch in DataLoader(hetero_graphs(), batch_size=4, device="cpu"):
        conv = FastSAGEConv((4, 5), 3)
        x = batch["a"].x, batch["b"].x
        got = conv(x, batch["a", "to", "b"].edge_index)
        torch.testing.assert_close(got, conv(x, batch["a", "to", "b"].edge_index.clone()))


def test_captured_steps_are_not_told_that_edges_ascend():
    from fastsparse_core.capturing.arguments import argument_of

    for graphs, ascends in ((molecules(), False), (ascending(molecules()), True)):
        (batch,) = DataLoader(graphs, batch_size=23, device="cpu")
        assert argument_of(batch).is_sorted == [ascends]


# ---------------------------------------------------------------- GPUs


@pytest.mark.gpu
def test_batches_are_on_the_gpu_by_default():
    assert next(iter(DataLoader(molecules()))).x.is_cuda


@pytest.mark.gpu
def test_data_on_the_gpu():
    check([data.to("cuda") for data in molecules()], "cuda", batch_size=4, shuffle=True)


@pytest.mark.gpu
def test_graphs_that_do_not_fit(monkeypatch, reasons):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    graphs = molecules()
    loader = DataLoader(graphs, batch_size=4, device="cuda")
    assert "page-locked" in reasons.text
    for got, expected in zip(loader, PygDataLoader(graphs, batch_size=4), strict=True):
        assert_same_batch(got, expected.to("cuda"))


@pytest.mark.gpu
def test_loaders_of_one_dataset_share_the_copies():
    dataset = Stored(molecules())
    one, two = (DataLoader(dataset[part], device="cuda") for part in (slice(0, 9), slice(9, None)))
    addresses = [
        {field.tensor.data_ptr() for field in loader._graphs._fields if field.tensor is not None}
        for loader in (one, two)
    ]
    assert addresses[0] == addresses[1]


@pytest.mark.gpu
def test_random_graphs_on_the_gpu():
    @settings(max_examples=max(NUM_BATCHES // 8, 10), deadline=None, database=None)
    @given(st.data())
    def run(data):
        graphs = data.draw(homogeneous() if data.draw(st.booleans()) else heterogeneous())
        options = data.draw(options_of(sorted(graphs[0].keys())))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                expected = list(both(graphs, "cpu", **options)[1])
            except Exception:
                return
            for got, original in zip(both(graphs, "cuda", **options)[0], expected, strict=True):
                assert_same_batch(got, original.to("cuda"))

    run()


@pytest.mark.gpu
def test_memory_on_the_gpu_stays_flat():
    loader = DataLoader(molecules(), batch_size=4, shuffle=True, device="cuda")
    conv = FastGCNConv(4, 4).cuda()
    used = []
    for _ in range(200):
        for batch in loader:
            conv(batch.x, batch.edge_index)
        del batch
        gc.collect()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] == used[5]


@pytest.mark.gpu
def test_an_epoch_reads_from_the_gpu_only_at_its_end():
    """Loading, captured training and captured validation; PyTorch raises where something else waits."""
    loaders = [DataLoader(molecules(24), batch_size=8, shuffle=True, device="cuda") for _ in range(2)]
    conv = FastGCNConv(4, 1).cuda()
    optimizer = torch.optim.Adam(conv.parameters())

    def out_of(batch):
        return global_mean_pool(conv(batch.x, batch.edge_index), batch.batch, batch.num_graphs)

    @capture
    def train(batch):
        optimizer.zero_grad()
        loss = out_of(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    @capture
    @torch.no_grad()
    def test(batch):
        return out_of(batch)

    def epoch():
        conv.train()
        losses = [train(batch.to("cuda")) for batch in loaders[0]]
        conv.eval()
        return losses, [test(batch.to("cuda")) for batch in loaders[1]]

    for _ in range(30):
        epoch()
    assert all(step.captured.status == "replaying" for step in (train, test))
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses, outs = epoch()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.stack(losses).isfinite().all()
    assert torch.cat(outs).shape == (24, 1)


def test_lists_that_memory_does_not_hold_are_not_copied(monkeypatch):
    graphs = [Data(x=torch.rand(4, 8), edge_index=torch.randint(4, (2, 5))) for _ in range(6)]
    size = sum(graph.x.nbytes + graph.edge_index.nbytes for graph in graphs)
    monkeypatch.setattr(log, "seen", set())
    monkeypatch.setattr(graph_store, "free_host_memory", lambda: 2.0 * size - 1)
    with pytest.warns(SlowPathWarning, match="GiB of free host memory"):
        batches = list(DataLoader(graphs, batch_size=4, device="cpu"))
    for got, expected in zip(batches, PygDataLoader(graphs, batch_size=4), strict=True):
        assert_same(got.to_dict(), expected.to_dict())
    monkeypatch.setattr(graph_store, "free_host_memory", lambda: 2.0 * size)
    loader = DataLoader(graphs, batch_size=4, device="cpu")
    list(loader)
    assert loader._graphs is not None


def test_in_memory_datasets_stay_in_their_mapped_file(tmp_path, monkeypatch):
    graphs = [Data(x=torch.rand(4, 8), edge_index=torch.randint(4, (2, 5))) for _ in range(6)]
    data, slices = InMemoryDataset.collate(graphs)
    torch.save((data.to_dict(), dict(slices)), tmp_path / "graphs.pt")
    content, slices = torch.load(tmp_path / "graphs.pt", mmap=True)
    dataset = InMemoryDataset()
    dataset.data, dataset.slices = Data.from_dict(content), slices
    monkeypatch.setattr(graph_store, "free_host_memory", lambda: 0.0)
    loader = DataLoader(dataset, batch_size=4, device="cpu")
    for got, expected in zip(loader, PygDataLoader(graphs, batch_size=4), strict=True):
        assert_same(got.to_dict(), expected.to_dict())
    stored = [field.tensor.data_ptr() for field in loader._graphs._fields if field.tensor is not None]
    assert {content["x"].data_ptr(), content["edge_index"].data_ptr()} <= set(stored)
