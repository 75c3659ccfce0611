"""Loaders: fields of batches, against the data that they come from, on both devices."""

from __future__ import annotations

import copy

import pytest
import torch
from pyg_cases import torch_geometric
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.utils import filter_data
from torch_geometric.nn import SAGEConv
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from fastsparse_core import Adjacency
from fastsparse_core.sampling import features
from fastsparse_core.structure import construction
from fastsparse_pyg import DataLoader, FastGCNConv, FastSAGEConv, LinkNeighborLoader, NeighborLoader
from fastsparse_pyg import graph as pyg_graph

NUM_NODES, NUM_EDGES = 90, 700


def homogeneous(device: str = "cpu", seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    data = Data(
        x=torch.randn(NUM_NODES, 6, generator=generator),
        y=torch.arange(NUM_NODES),
        edge_index=torch.randint(NUM_NODES - 5, (2, NUM_EDGES), generator=generator),
        edge_attr=torch.rand(NUM_EDGES, 2, generator=generator),
        edge_weight=torch.rand(NUM_EDGES, generator=generator),
        train_mask=torch.rand(NUM_NODES, generator=generator) < 0.6,
        note="kept",
        scale=torch.tensor(3.0),
    )
    return data.to(device)


def hetero(device: str = "cpu") -> HeteroData:
    generator = torch.Generator().manual_seed(1)
    data = HeteroData()
    sizes = {"author": 30, "paper": 60, "venue": 4}
    for name, size in sizes.items():
        data[name].x = torch.randn(size, 5, generator=generator)
        data[name].number = torch.arange(size)
    for name in (("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "of", "author")):
        ends = [torch.randint(sizes[name[at]], (150,), generator=generator) for at in (0, 2)]
        data[name].edge_index = torch.stack(ends)
        data[name].weight = torch.rand(150, generator=generator)
    return data.to(device)


def check_batch(batch, data) -> None:
    """Nodes and edges are the data's, with the data's features."""
    n_id, e_id = batch.n_id.cpu(), batch.e_id.cpu()
    assert batch.num_nodes == n_id.numel() == sum(batch.num_sampled_nodes)
    for name in ("x", "y", "train_mask"):
        assert torch.equal(batch[name].cpu(), data[name].cpu()[n_id])
    for name in ("edge_attr", "edge_weight"):
        assert torch.equal(batch[name].cpu(), data[name].cpu()[e_id])
    assert torch.equal(data.edge_index.cpu()[:, e_id], n_id[batch.edge_index.cpu()])
    assert batch.note == "kept"
    assert batch.scale == 3.0


@pytest.fixture
def messages(reasons: pytest.LogCaptureFixture):
    """The plugin's messages; earlier tests do not suppress messages that are logged once."""
    return lambda: [record.message for record in reasons.records]


@pytest.mark.parametrize("data_device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fields_of_batches(device, data_device):
    if device == "cpu" and data_device == "cuda":
        pytest.skip("data on the GPU is sampled there")
    data = homogeneous(data_device)
    loader = NeighborLoader(data, [4, 3], data.train_mask, batch_size=16, shuffle=True, device=device)
    assert isinstance(loader, torch_geometric.loader.NeighborLoader)
    seeds = data.train_mask.cpu().nonzero().flatten()
    for _ in range(2):
        seen = []
        for batch in loader:
            check_batch(batch, data)
            assert batch.x.device.type == batch.edge_index.device.type == device
            assert torch.equal(batch.input_id, batch.n_id[: batch.batch_size])  # a mask's positions are ids
            assert len(batch.num_sampled_edges) == 2
            assert sum(batch.num_sampled_edges) == batch.edge_index.size(1)
            assert (batch.edge_index[1].diff() >= 0).all()
            seen.append(batch.n_id[: batch.batch_size].cpu())
        assert [len(ids) for ids in seen[:-1]] == [16] * (len(loader) - 1)
        assert torch.equal(torch.cat(seen).sort().values, seeds)


@pytest.mark.parametrize("has_types", [False, True])
def test_a_structure_in_place_of_edge_index(has_types, device):
    data = hetero() if has_types else homogeneous()
    edge_type = ("paper", "cites", "paper")
    edges, nodes = (data[edge_type], data["paper"]) if has_types else (data._store, data)
    seeds = ("paper", torch.arange(60)) if has_types else torch.arange(80)
    (source, destination), count = edges.edge_index, nodes.x.size(0)

    def batches():
        torch.manual_seed(0)
        return list(NeighborLoader(data, [4, 3], seeds, batch_size=16, device=device))

    given = batches()
    edges.edge_index = Adjacency.from_coo(destination, source, (count, count))
    for one, other in zip(given, batches(), strict=True):
        assert torch.equal(one["paper"].x if has_types else one.x, other["paper"].x if has_types else other.x)
        one, other = (one[edge_type], other[edge_type]) if has_types else (one, other)
        assert torch.equal(one.e_id, other.e_id)
        assert torch.equal(one.edge_index, other.edge_index)
        if not has_types:  # the typed graph has no `edge_attr`
            assert torch.equal(one.edge_attr, other.edge_attr)
    edges.edge_index = Adjacency.from_coo(source[:0], source[:0], (3, 3))
    with pytest.raises(ValueError, match="expected an Adjacency of shape"):
        NeighborLoader(data, [4], seeds, device=device)


@pytest.mark.parametrize("shuffle", [False, True])
def test_order_is_that_of_pytorch(device, shuffle):
    data = homogeneous()
    seeds = torch.arange(40, 80)
    loader = NeighborLoader(data, [2], seeds, batch_size=7, shuffle=shuffle, drop_last=True, device=device)
    plain = torch.utils.data.DataLoader(seeds, batch_size=7, shuffle=shuffle, drop_last=True)
    torch.manual_seed(5)
    expected = list(plain)
    torch.manual_seed(5)
    batches = list(loader)
    if not shuffle:
        assert torch.equal(torch.cat([batch.input_id for batch in batches]).cpu(), torch.arange(35))
        assert torch.equal(torch.stack([batch.n_id[:7] for batch in batches]).cpu(), torch.stack(expected))
    torch.manual_seed(5)
    for batch, again in zip(batches, loader, strict=True):
        assert torch.equal(batch.n_id, again.n_id)
        assert torch.equal(batch.edge_index, again.edge_index)


def test_order_of_other_samplers(device):
    data = homogeneous()
    order = torch.utils.data.SubsetRandomSampler([3, 5, 8])
    loader = NeighborLoader(data, [2], batch_size=2, sampler=order, device=device)
    assert sorted(int(node) for batch in loader for node in batch.n_id[: batch.batch_size]) == [3, 5, 8]
    loader = NeighborLoader(data, [2], batch_sampler=[[4, 2], [1, 1, 7]], device=device)
    seeds = [batch.n_id[: batch.batch_size].tolist() for batch in loader]
    assert seeds == [[4, 2], [1, 1, 7]]


@pytest.mark.parametrize("kind", ["induced", "bidirectional"])
def test_subgraph_types(kind, device):
    data = homogeneous()
    loader = NeighborLoader(data, [3], batch_size=20, subgraph_type=kind, device=device)
    for batch in loader:
        n_id = batch.n_id.cpu()
        assert torch.equal(batch.x.cpu(), data.x[n_id])
        assert "num_sampled_edges" not in batch
        ends = n_id[batch.edge_index.cpu()]
        if kind == "induced":
            inside = torch.isin(data.edge_index, n_id).all(0)
            assert torch.equal(batch.e_id.cpu().sort().values, inside.nonzero().flatten())
        else:
            pairs = set(map(tuple, ends.t().tolist()))
            assert pairs == {(b, a) for a, b in pairs}


def test_disjoint_weighted_and_transformed(device):
    data = homogeneous()
    data.edge_weight[::2] = 0
    loader = NeighborLoader(
        data,
        [5, 5],
        torch.tensor([7, 7, 3]),
        batch_size=3,
        disjoint=True,
        weight_attr="edge_weight",
        transform=lambda batch: batch.update({"extra": batch.num_nodes}),
        device=device,
    )
    (batch,) = loader
    assert batch.extra == batch.num_nodes
    assert batch.batch[:3].tolist() == [0, 1, 2]
    assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
    assert (batch.e_id % 2 == 1).all()


@pytest.mark.parametrize("data_device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_heterogeneous_batches(device, data_device):
    if device == "cpu" and data_device == "cuda":
        pytest.skip("data on the GPU is sampled there")
    data = hetero(data_device)
    fanouts = {name: [3, 2] for name in data.edge_types}
    seeds = ("paper", torch.tensor([5, 50, 5, 9, 2]))
    for batch in NeighborLoader(data, fanouts, seeds, batch_size=2, device=device):
        assert batch["paper"].batch_size == batch["paper"].input_id.numel()
        assert batch["venue"].num_nodes == 0
        for name in data.node_types:
            assert torch.equal(batch[name].number.cpu(), batch[name].n_id.cpu())
            assert torch.equal(batch[name].x.cpu(), data[name].x.cpu()[batch[name].n_id.cpu()])
            assert sum(batch[name].num_sampled_nodes) == batch[name].n_id.numel()
        for name in data.edge_types:
            e_id = batch[name].e_id.cpu()
            assert torch.equal(batch[name].weight.cpu(), data[name].weight.cpu()[e_id])
            row, col = batch[name].edge_index.cpu()
            ends = torch.stack([batch[name[0]].n_id.cpu()[row], batch[name[2]].n_id.cpu()[col]])
            assert torch.equal(data[name].edge_index.cpu()[:, e_id], ends)
            assert batch[name].edge_index.device.type == device


@pytest.mark.parametrize("layout", ["coo", "csc"])
def test_stores(layout, device):
    """A (FeatureStore, GraphStore) pair, with and without types."""
    data = homogeneous()
    order = data.edge_index[1].argsort(stable=True)
    source, destination = data.edge_index[:, order]
    edges = (source, destination)
    if layout == "csc":
        edges = (source, torch.searchsorted(destination, torch.arange(NUM_NODES + 1)))
    feature_store, graph_store = MyFeatureStore(), MyGraphStore()
    feature_store.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    graph_store.put_edge_index(
        edges, edge_type=None, layout=layout, size=(NUM_NODES, NUM_NODES), is_sorted=True
    )
    seeds = torch.tensor([1, 2, 3])
    for batch in NeighborLoader((feature_store, graph_store), [3, -1], seeds, batch_size=2, device=device):
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
        assert batch.x.device.type == device
        ends = torch.stack([source, destination])[:, batch.e_id.cpu()]
        assert torch.equal(ends, batch.n_id.cpu()[batch.edge_index.cpu()])

    typed = hetero()
    feature_store, graph_store = MyFeatureStore(), MyGraphStore()
    for name in ("author", "paper"):
        feature_store.put_tensor(typed[name].x, group_name=name, attr_name="x", index=None)
    for name in typed.edge_types:
        size = (typed[name[0]].num_nodes, typed[name[2]].num_nodes)
        graph_store.put_edge_index(typed[name].edge_index, edge_type=name, layout="coo", size=size)
    loader = NeighborLoader(
        (feature_store, graph_store), [2, 2], ("paper", torch.arange(10)), batch_size=5, device=device
    )
    for batch in loader:
        for name in ("author", "paper"):
            assert torch.equal(batch[name].x.cpu(), typed[name].x[batch[name].n_id.cpu()])
        for name in typed.edge_types:
            row, col = batch[name].edge_index.cpu()
            ends = torch.stack([batch[name[0]].n_id.cpu()[row], batch[name[2]].n_id.cpu()[col]])
            assert torch.equal(typed[name].edge_index[:, batch[name].e_id.cpu()], ends)


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
def test_links(negatives, disjoint, device):
    data = homogeneous()
    links = data.edge_index[:, 100:130]
    loader = LinkNeighborLoader(
        data, [3, 2], links, batch_size=8, disjoint=disjoint, neg_sampling=negatives, device=device
    )
    assert isinstance(loader, torch_geometric.loader.LinkNeighborLoader)
    for number, batch in enumerate(loader):
        check_batch(batch, data)
        wanted = links[:, 8 * number : 8 * number + 8]
        count = wanted.size(1)
        n_id = batch.n_id.cpu()
        assert torch.equal(batch.input_id.cpu(), torch.arange(8 * number, 8 * number + count))
        if negatives == "triplet":
            assert torch.equal(n_id[batch.src_index.cpu()], wanted[0])
            assert torch.equal(n_id[batch.dst_pos_index.cpu()], wanted[1])
            assert batch.dst_neg_index.shape == (count,)
            assert "edge_label_index" not in batch
            continue
        assert torch.equal(n_id[batch.edge_label_index.cpu()][:, :count], wanted)
        assert batch.edge_label_index.device.type == device
        if negatives == "binary":
            assert batch.edge_label.tolist() == [1.0] * count + [0.0] * count


def test_links_of_one_edge_type(device):
    data = hetero()
    name = ("author", "writes", "paper")
    loader = LinkNeighborLoader(data, [2], (name, data[name].edge_index[:, :10]), batch_size=4, device=device)
    for number, batch in enumerate(loader):
        wanted = data[name].edge_index[:, 4 * number : 4 * number + 4][:, :10]
        source, destination = batch[name].edge_label_index.cpu()
        count = source.numel()
        assert torch.equal(batch["author"].n_id.cpu()[source], wanted[0][:count])
        assert torch.equal(batch["paper"].n_id.cpu()[destination], wanted[1][:count])


# ---------------------------------------------------------------- layers


def test_layers_take_the_samplers_structure(device, monkeypatch):
    """No sort and no inspection for layers without self loops; the numbers are PyG's."""
    data = homogeneous()
    fast, original = FastSAGEConv(6, 4).to(device), SAGEConv(6, 4).to(device)
    original.load_state_dict(fast.state_dict())
    looped = FastGCNConv(6, 4).to(device)
    loader = NeighborLoader(data, [4, 3], batch_size=30, device=device)

    def refuse(*args, **kwargs):
        raise AssertionError("the batch's edges were looked at again")

    for batch in loader:
        with monkeypatch.context() as patch:
            patch.setattr(construction, "inspect_edges", refuse)
            patch.setattr(construction, "inspect_indices", refuse)
            out = fast(batch.x, batch.edge_index)
        torch.testing.assert_close(out, original(batch.x, batch.edge_index), rtol=1e-5, atol=1e-5)
        reference = torch_geometric.nn.GCNConv(6, 4).to(device)
        reference.load_state_dict(looped.state_dict())
        expected = reference(batch.x, batch.edge_index)
        torch.testing.assert_close(looped(batch.x, batch.edge_index), expected, rtol=1e-5, atol=1e-5)


def test_a_written_edge_index_is_looked_at_again(device):
    data = homogeneous()
    batch = next(iter(NeighborLoader(data, [4], batch_size=30, device=device)))
    fast, original = FastSAGEConv(6, 4).to(device), SAGEConv(6, 4).to(device)
    original.load_state_dict(fast.state_dict())
    batch.edge_index[0] = batch.edge_index[0].flip(0)
    expected = original(batch.x, batch.edge_index)
    torch.testing.assert_close(fast(batch.x, batch.edge_index), expected, rtol=1e-5, atol=1e-5)
    assert pyg_graph.known_edges(batch.edge_index) is None


# ---------------------------------------------------------------- worker processes, logs, memory


@pytest.mark.parametrize("filter_per_worker", [None, False])
def test_worker_processes(filter_per_worker):
    data = homogeneous()
    loader = NeighborLoader(
        data,
        [4, 3],
        batch_size=20,
        shuffle=True,
        num_workers=2,
        filter_per_worker=filter_per_worker,
        device="cpu",
    )
    for _ in range(2):
        seen = []
        for batch in loader:
            check_batch(batch, data)
            seen.append(batch.n_id[: batch.batch_size])
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(NUM_NODES))


def test_spawned_workers_beside_a_loader_of_the_same_data():
    data = homogeneous()
    validation = NeighborLoader(data, [4, 3], batch_size=20, device="cpu")
    training = NeighborLoader(
        data, [4, 3], batch_size=20, num_workers=1, multiprocessing_context="spawn", device="cpu"
    )
    for loader in (validation, training, validation):
        for batch in loader:
            check_batch(batch, data)


@pytest.mark.gpu
def test_what_a_gpu_ignores_is_logged_once(messages):
    data = homogeneous()
    for _ in range(2):
        loader = NeighborLoader(
            data, [2], batch_size=9, num_workers=3, persistent_workers=True, filter_per_worker=True
        )
        assert loader.num_workers == 0
        check_batch(next(iter(loader)), data)
    told = [message for message in messages() if "ignored" in message]
    assert len(told) == 1
    assert told[0].startswith("num_workers, persistent_workers, filter_per_worker: ignored")


@pytest.mark.gpu
@pytest.mark.parametrize(("gpu_cache", "told"), [(0, "reads over PCIe"), (7, "except 7 rows")])
def test_features_that_stay_with_the_host(gpu_cache, told, messages, monkeypatch):
    monkeypatch.setattr(features, "_SHARE_OF_FREE", -1.0)
    data = homogeneous()
    for batch in NeighborLoader(data, [3, 2], batch_size=30, device="cuda", gpu_cache=gpu_cache):
        check_batch(batch, data)
    assert any(told in message for message in messages())


def test_a_cache_of_no_size_is_an_error():
    for wrong in (-1, 2.5, "x", None):
        with pytest.raises(ValueError, match=f"gpu_cache: expected a number of nodes, got {wrong!r}"):
            NeighborLoader(homogeneous(), [2], gpu_cache=wrong)
    assert next(iter(NeighborLoader(homogeneous(), [2], gpu_cache=9, device="cpu"))).x.device.type == "cpu"


def test_an_interrupted_epoch(device):
    data = homogeneous()
    loader = NeighborLoader(data, [4], batch_size=10, shuffle=True, device=device)
    for number, _ in enumerate(loader):
        if number == 2:
            break
    assert torch.equal(
        torch.cat([batch.n_id[: batch.batch_size] for batch in loader]).sort().values.cpu(),
        torch.arange(NUM_NODES),
    )
    first, second = iter(loader), iter(loader)  # two at a time
    next(first)
    next(second)
    for batch in first:
        check_batch(batch, data)


def test_memory_stays_flat(device):
    data = homogeneous()
    layer = FastSAGEConv(6, 4).to(device)
    loader = NeighborLoader(data, [4, 3], batch_size=10, shuffle=True, device=device)

    def memory() -> int:
        if device == "cuda":
            return torch.cuda.memory_allocated()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    after = []
    for _ in range(4):
        for _ in range(6):
            for batch in loader:
                layer(batch.x, batch.edge_index).sum().backward()
        after.append(memory())
    assert after[-1] <= after[1] + 2**20


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"time_attr": "time"}, "not support `time_attr`"),
        ({"adj_t": True}, "the graph is stored as `adj_t`"),
    ],
)
def test_what_is_left_to_pyg(options, reason, messages, monkeypatch):
    data = homogeneous()
    data.time = torch.arange(NUM_NODES)
    if options.pop("adj_t", False):
        data.adj_t = data.edge_index.new_ones(1)
        del data.edge_index
    made = []
    monkeypatch.setattr(
        torch_geometric.loader.neighbor_loader,
        "NeighborSampler",
        lambda *args, **kwargs: made.append(kwargs) or object(),
    )
    NeighborLoader(data, [2], torch.arange(4), device="cpu", **options)
    assert len(made) == 1
    assert any(
        message.startswith("the loader falls back to PyG's sampler, which needs pyg-lib")
        and reason in message
        for message in messages()
    )


def test_bad_arguments_are_named():
    data = homogeneous()
    with pytest.raises(ValueError, match="weight"):
        NeighborLoader(
            Data(edge_index=data.edge_index, w=-torch.ones(NUM_EDGES), num_nodes=NUM_NODES),
            [2],
            weight_attr="w",
        )


def with_edges(edge_index, **others) -> Data:
    return Data(x=torch.ones(NUM_NODES, 2), edge_index=edge_index, **others)


def without_features() -> HeteroData:
    data = hetero()
    data["tag"].note = "no number of nodes"
    return data


FIRST = ("author", "writes", "paper")
ENDS = torch.tensor([[0, 1], [2, 3]])
RANGE = r"expected ids of the graph's 90 nodes, 0 to 89, got "
#: Fault -> (data, num_neighbors, seeds of nodes or links), the exception, its message.
WRONG = {
    "no hops": (homogeneous, [], None, ValueError, r"num_neighbors: expected one hop or more.*got \[\]"),
    "a negative number": (
        homogeneous,
        [-7],
        None,
        ValueError,
        r"num_neighbors: .*-1 for all, got -7 in \[-7\]",
    ),
    "half a neighbour": (homogeneous, [2.5], None, ValueError, "num_neighbors: expected numbers.*got 2.5"),
    "no list": (homogeneous, 5, None, TypeError, r"num_neighbors: expected a list of ints.*\[10, 5\], got 5"),
    "types of none": (homogeneous, {FIRST: [2]}, None, TypeError, "num_neighbors: .*without edge types"),
    "a type left out": (
        hetero,
        {FIRST: [2]},
        "paper",
        ValueError,
        r"num_neighbors: .* got a dict without \('paper', 'cites', 'paper'\), .*use zeros",
    ),
    "an unknown type": (
        hetero,
        {name: [1] for name in (*hetero().edge_types, ("a", "b", "c"))},
        "paper",
        ValueError,
        r"num_neighbors: expected edge types of the graph, .*, got \('a', 'b', 'c'\)",
    ),
    "other hops": (
        hetero,
        {name: [1] * (1 + (name == FIRST)) for name in hetero().edge_types},
        "paper",
        ValueError,
        "num_neighbors: .* same number of hops for every edge type",
    ),
    "too large an id": (
        homogeneous,
        [2],
        torch.tensor([3, 90]),
        ValueError,
        f"input_nodes: {RANGE}values from 3 to 90",
    ),
    "a negative id": (homogeneous, [2], [-1], ValueError, f"input_nodes: {RANGE}-1"),
    "too large a mask": (homogeneous, [2], torch.ones(99) > 0, ValueError, "input_nodes: .*mask of 90.*99"),
    "a type of Data": (homogeneous, [2], "paper", ValueError, "input_nodes: .*no node types, got 'paper'"),
    "floating ids": (homogeneous, [2], torch.ones(3), TypeError, r"input_nodes: .*float32; .*\.long\(\)"),
    "a single id": (homogeneous, [2], 3, ValueError, "input_nodes: expected one dimension"),
    "no type": (
        hetero,
        [2],
        torch.arange(3),
        ValueError,
        r"input_nodes: .*'author', .*such as \('author', ids",
    ),
    "neither": (hetero, [2], None, ValueError, "input_nodes: expected one of the node types .* got None"),
    "a missing type": (hetero, [2], ("town", ENDS[0]), ValueError, "input_nodes: .* got .'town', a tensor"),
    "an id of a type": (
        hetero,
        [2],
        ("venue", [4]),
        ValueError,
        "input_nodes: .*4 nodes, 0 to 3, got .*4",
    ),
    "links of no nodes": (
        homogeneous,
        [2],
        90 * ENDS,
        ValueError,
        rf"edge_label_index\[0\]: {RANGE}values from 0 to 90",
    ),
    "half a link": (homogeneous, [2], ENDS[:1], ValueError, r"edge_label_index: expected .*\(2, num_links\)"),
    "links without type": (
        hetero,
        [2],
        ENDS,
        ValueError,
        r"edge_label_index: .*such as \(edge_type, links\)",
    ),
    "links of no type": (
        hetero,
        [2],
        ("a", "b", "c"),
        ValueError,
        "edge_label_index: .*the graph has .*writes",
    ),
    "no links": (
        lambda: with_edges(None),
        [2],
        None,
        ValueError,
        "edge_label_index: .*data has no edge_index",
    ),
    "edges of no nodes": (
        lambda: with_edges(90 + 0 * ENDS),
        [2],
        None,
        IndexError,
        r"data.edge_index: expected indices from 0 to 89 in row 0",
    ),
    "floating edges": (lambda: with_edges(1.0 * ENDS), [2], None, ValueError, "data.edge_index: .*integers"),
    "NumPy's edges": (
        lambda: with_edges(ENDS.numpy()),
        [2],
        None,
        ValueError,
        "data.edge_index: .*got ndarray",
    ),
    "fewer than no nodes": (
        lambda: Data(edge_index=ENDS, num_nodes=-1),
        [2],
        None,
        ValueError,
        "data.num_nodes: expected a number of nodes of at least 0, got -1",
    ),
    "nodes unknown": (without_features, [2], "paper", ValueError, r"data\['tag'\].num_nodes: .*got None"),
    "no edge types": (lambda: HeteroData(a={"x": ENDS}), [2], "a", ValueError, "data: expected.*edge types"),
    "two Data": (
        lambda: (homogeneous(),) * 2,
        [2],
        ENDS[0],
        ValueError,
        "data: .*one Data in place of the pair",
    ),
}


@pytest.mark.filterwarnings("ignore:Unable to accurately infer 'num_nodes'")
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what):
    make, num_neighbors, seeds, error, message = WRONG[what]
    loader = LinkNeighborLoader if "edge_label_index" in message else NeighborLoader
    with pytest.raises(error, match=message):
        loader(make(), num_neighbors, seeds, device="cpu")


def test_labels_are_as_many_as_links():
    with pytest.raises(
        ValueError, match=r"edge_label: expected a label for each of 2 links, got shape \(3,\)"
    ):
        LinkNeighborLoader(homogeneous(), [2], ENDS, edge_label=torch.ones(3), device="cpu")


# ---------------------------------------------------------------- data in other forms


@pytest.mark.parametrize("options", [{}, {"sort_order": "col"}, {"sort_order": "row"}], ids=str)
def test_edge_index_objects(options, device):
    """EdgeIndex in place of a tensor, for the graph and for links; batches have a tensor, as PyG's."""
    data = homogeneous()
    if options:
        data = data.sort(sort_by_row=options["sort_order"] == "row")
    plain = copy.copy(data)
    data.edge_index = EdgeIndex(data.edge_index, sparse_size=(NUM_NODES, NUM_NODES), **options)
    for batch in NeighborLoader(data, [3, -1], batch_size=40, device=device):
        assert type(batch.edge_index) is torch.Tensor
        check_batch(batch, plain)
    for links in (None, data.edge_index):
        batch = next(iter(LinkNeighborLoader(data, [3], links, batch_size=40, device=device)))
        check_batch(batch, plain)
        ends = batch.n_id[batch.edge_label_index].cpu()
        assert torch.equal(ends, plain.edge_index[:, batch.input_id.cpu()])
    typed = hetero()
    for name in typed.edge_types:
        typed[name].edge_index = EdgeIndex(typed[name].edge_index)
    batch = next(iter(NeighborLoader(typed, [2, 2], "paper", batch_size=9, device=device)))
    links = next(iter(LinkNeighborLoader(typed, [2], FIRST, batch_size=9, device=device)))
    for name in typed.edge_types:
        assert type(batch[name].edge_index) is torch.Tensor
        e_id = batch[name].e_id.cpu()
        row, col = batch[name].edge_index.cpu()
        ends = torch.stack([batch[name[0]].n_id.cpu()[row], batch[name[2]].n_id.cpu()[col]])
        assert torch.equal(typed[name].edge_index._data[:, e_id], ends)
    row, col = links[FIRST].edge_label_index.cpu()
    ends = torch.stack([links["author"].n_id.cpu()[row], links["paper"].n_id.cpu()[col]])
    assert torch.equal(ends, typed[FIRST].edge_index._data[:, links[FIRST].input_id.cpu()])


def test_data_without_edges_gives_the_fields_of_pyg(device):
    """Without the key there is none in batches; an empty one stays."""
    data = homogeneous()
    del data.edge_index, data.edge_attr, data.edge_weight
    empty = torch.empty(2, 0, dtype=torch.int64)
    for given in (data, copy.copy(data).update({"edge_index": empty})):
        batch = next(iter(NeighborLoader(given, [2, 2], batch_size=7, device=device)))
        none = torch.empty(0, dtype=torch.int64)
        expected = filter_data(given, torch.arange(7), none, none, none)
        assert ("edge_index" in batch) == ("edge_index" in expected) == ("edge_index" in given)
        assert torch.equal(batch.x.cpu(), expected.x)
        if "edge_index" in given:
            assert batch.edge_index.shape == (2, 0)


def test_pairs_of_data_as_stores(device):
    """PyG reads features of types only, so HeteroData, or Data for the edges alone."""
    typed = hetero()
    for seeds in ("paper", ("paper", torch.arange(9)), ["paper", list(range(9))]):
        batch = next(iter(NeighborLoader((typed, typed), [2, 2], seeds, batch_size=9, device=device)))
        assert torch.equal(batch["author"].x.cpu(), typed["author"].x[batch["author"].n_id.cpu()])
    data, features = homogeneous(), MyFeatureStore()
    features.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    data.put_edge_index(data.edge_index, layout="coo", size=(NUM_NODES, NUM_NODES))
    batch = next(iter(NeighborLoader((features, data), [2], torch.arange(9), batch_size=9, device=device)))
    assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device")
def test_a_device_that_is_not_there():
    data = Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    for make in (lambda: NeighborLoader(data, [2], device="cuda"), lambda: DataLoader([data], device="cuda")):
        with pytest.raises(ValueError, match="device: expected a device that PyTorch can use here, got"):
            make()


def test_weights_that_are_not_there():
    data = Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(KeyError, match="weight_attr: expected an attribute of the edges, got 'nope'"):
        NeighborLoader(data, [2], weight_attr="nope")


def test_one_graph_is_no_dataset():
    data = Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(TypeError, match=r"dataset: expected a dataset or a list of graphs.*Pass \[data\]"):
        DataLoader(data, batch_size=2)
