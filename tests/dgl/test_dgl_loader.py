"""DGL's sampler and loader on the core's sampler: blocks against the graph, layers on them, both devices."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from dgl_cases import DGLError, dgl, fastsparse_dgl, homogeneous, random_edges
from hook_cases import enabled
from torch import Tensor

from fastsparse_core import SlowPathWarning, log
from fastsparse_core.sampling import features
from fastsparse_core.structure import construction
from fastsparse_dgl import dgl_blocks
from fastsparse_dgl.dataloading import dataloader, neighbor_sampler

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")

NID, EID = dgl.NID, dgl.EID


def with_data(idtype: torch.dtype = torch.int64):
    graph = homogeneous(idtype)
    graph.ndata["feat"] = torch.randn(30, 6)
    graph.ndata["label"] = torch.arange(30)
    graph.edata["weight"] = torch.rand(120)
    graph.edata["mask"] = torch.arange(120) % 3 > 0
    return graph


def hetero():
    edges = {
        ("author", "writes", "paper"): random_edges(9, 12, 50),
        ("paper", "of", "author"): random_edges(12, 9, 40, 1),
        ("paper", "cites", "paper"): random_edges(12, 12, 40, 2),
    }
    graph = dgl.heterograph(edges, num_nodes_dict={"author": 9, "paper": 12})
    for name in graph.ntypes:
        graph.nodes[name].data["feat"] = torch.randn(graph.num_nodes(name), 5)
    return graph


@pytest.fixture
def without_dgls_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes FastSparse assume that this DGL supports blocks on no device."""
    monkeypatch.setattr(neighbor_sampler, "dgl_can_hold", lambda device: False)


def loader(graph, sampler, device: str, indices=None, **options):
    indices = torch.arange(30, dtype=graph.idtype) if indices is None else indices
    options = {"batch_size": 8, "shuffle": True, **options}
    return fastsparse_dgl.DataLoader(graph, indices, sampler, device=device, **options)


def check_blocks(graph, inputs: Tensor, outputs: Tensor, blocks: list, fanouts: list[int]) -> None:
    """Edges are the graph's, nodes of a block are the next one's sources, every node has its neighbours."""
    source_of, destination_of = (ends.cpu() for ends in graph.edges())
    degree = graph.in_degrees()
    assert len(blocks) == len(fanouts)
    for number, (block, fanout) in enumerate(zip(blocks, fanouts, strict=True)):
        sources, destinations = block.srcdata[NID].cpu(), block.dstdata[NID].cpu()
        assert torch.equal(sources[: destinations.numel()], destinations)
        assert block.num_src_nodes() == sources.numel()
        assert block.num_dst_nodes() == destinations.numel()
        assert torch.equal(sources, inputs.cpu() if number == 0 else blocks[number - 1].dstdata[NID].cpu())
        source, destination = (ends.cpu().long() for ends in block.edges())
        ids = block.edata[EID].cpu().long()
        assert block.num_edges() == ids.numel() == ids.unique().numel()
        assert torch.equal(source_of[ids], sources[source])
        assert torch.equal(destination_of[ids], destinations[destination])
        own = degree[destinations.long()]
        wanted = own if fanout < 0 else own.clamp(max=fanout)
        assert torch.equal(torch.bincount(destination, minlength=destinations.numel()), wanted)
    assert torch.equal(outputs.cpu(), blocks[-1].dstdata[NID].cpu())


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("workers", [0, 2])
def test_blocks(idtype, workers, device):
    graph = with_data(idtype)
    sampler = fastsparse_dgl.NeighborSampler(
        [3, -1], prefetch_node_feats=["feat"], prefetch_labels=["label"], prefetch_edge_feats=["weight"]
    )
    assert isinstance(sampler, dgl.dataloading.NeighborSampler)
    batches = loader(graph, sampler, device, num_workers=workers)
    for _ in range(2):
        seen = []
        for inputs, outputs, blocks in batches:
            check_blocks(graph, inputs, outputs, blocks, [3, -1])
            assert inputs.dtype == outputs.dtype == idtype
            assert blocks[0].device.type == inputs.device.type == device
            assert torch.equal(blocks[0].srcdata["feat"].cpu(), graph.ndata["feat"][inputs.cpu().long()])
            assert torch.equal(blocks[-1].dstdata["label"].cpu(), outputs.cpu().long())
            for block in blocks:
                weight = graph.edata["weight"][block.edata[EID].cpu().long()]
                assert torch.equal(block.edata["weight"].cpu(), weight)
            seen.append(outputs.cpu().long())
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(30))


def test_blocks_without_dgls(without_dgls_blocks):
    """SampledBlock, which replaces DGL's block on a GPU, on the CPU."""
    graph = with_data()
    sampler = fastsparse_dgl.NeighborSampler([3, 2])
    inputs, outputs, blocks = sampler.sample_blocks(graph, torch.tensor([4, 9, 17]))
    assert all(isinstance(block, fastsparse_dgl.SampledBlock) for block in blocks)
    check_blocks(graph, inputs, outputs, blocks, [3, 2])
    assert "num_edges=" in repr(blocks[0])
    with pytest.raises(KeyError, match="etype"):
        blocks[0]["other"]
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        blocks[0].other  # noqa: B018


LAYERS = {
    "sage": lambda package, prefix: getattr(package, f"{prefix}SAGEConv")(6, 4, "mean"),
    "graph_conv": lambda package, prefix: getattr(package, f"{prefix}GraphConv")(
        6, 4, allow_zero_in_degree=True
    ),
    "gat": lambda package, prefix: getattr(package, f"{prefix}GATConv")(6, 4, 1, allow_zero_in_degree=True),
    "gin": lambda package, prefix: getattr(package, f"{prefix}GINConv")(torch.nn.Linear(6, 4)),
}


@pytest.mark.parametrize("stand_in", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, stand_in, device, monkeypatch):
    if stand_in:
        monkeypatch.setattr(neighbor_sampler, "dgl_can_hold", lambda device: False)
    graph = with_data()
    torch.manual_seed(0)
    fast = LAYERS[name](fastsparse_dgl, "Fast").to(device)
    original = LAYERS[name](dgl.nn, "")
    original.load_state_dict({key: value.cpu() for key, value in fast.state_dict().items()})
    sampler = fastsparse_dgl.NeighborSampler([3], prefetch_node_feats=["feat"])
    for inputs, outputs, (block,) in (
        loader(graph, sampler, device) if device == "cuda" else blocks_of(graph, sampler)
    ):
        feat = graph.ndata["feat"][inputs.cpu()]
        with monkeypatch.context() as patch:
            patch.setattr(construction, "inspect_rows", refuse)
            found = fast(block, feat.to(device))
        source, destination = (ends.cpu() for ends in block.edges())
        dgls = dgl.create_block(
            (source, destination), num_src_nodes=inputs.numel(), num_dst_nodes=outputs.numel()
        )
        torch.testing.assert_close(found.cpu(), original(dgls, feat), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_dgls_own_layers(name):
    """DGL's sums of edges ask a block for the numbers of its edges."""
    graph = with_data()
    torch.manual_seed(0)
    layer = LAYERS[name](dgl.nn, "")
    (block,) = fastsparse_dgl.NeighborSampler([3]).sample_blocks(graph, torch.arange(12))[2]
    again = dgl.create_block(block.edges(), block.num_src_nodes(), block.num_dst_nodes())
    found, expected = (
        torch.autograd.grad(layer(on, graph.ndata["feat"][block.srcdata[NID]]).sum(), [*layer.parameters()])
        for on in (block, again)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def refuse(*args, **kwargs):
    raise AssertionError("the block was looked at again")


def blocks_of(graph, sampler):
    for seeds in torch.randperm(30).split(8):
        yield sampler.sample_blocks(graph, seeds)


@pytest.mark.parametrize("stand_in", [False, True])
def test_edge_types(stand_in, device, monkeypatch):
    if stand_in:
        monkeypatch.setattr(neighbor_sampler, "dgl_can_hold", lambda device: False)
    graph = hetero()
    fanouts = [dict.fromkeys(graph.canonical_etypes, 2), {"writes": 3, "of": 1, "cites": -1}]
    sampler = fastsparse_dgl.NeighborSampler(fanouts)
    seeds = {"paper": torch.tensor([3, 8, 1])}
    if device == "cuda":
        batches = list(loader(graph, sampler, device, indices=seeds, batch_size=2))
    else:
        batches = [sampler.sample(graph, seeds)]
    layer = fastsparse_dgl.FastHeteroGraphConv(
        {name: fastsparse_dgl.FastSAGEConv(5, 4, "mean") for name in graph.etypes}
    ).to(device)
    for inputs, outputs, blocks in batches:
        assert set(outputs) == {"paper"}
        for name in graph.ntypes:
            assert torch.equal(blocks[0].srcnodes[name].data[NID], inputs[name])
        feat = {name: graph.nodes[name].data["feat"].to(device)[ids] for name, ids in inputs.items()}
        out = layer(blocks[0], feat)
        for name in graph.canonical_etypes:
            for block in blocks:
                ids = block.edges[name].data[EID].cpu()
                source, destination = (ends.cpu() for ends in block.edges(etype=name))
                sources, destinations = (
                    block.srcnodes[name[0]].data[NID].cpu(),
                    block.dstnodes[name[2]].data[NID].cpu(),
                )
                ends = graph.find_edges(ids, etype=name) if ids.numel() else (ids, ids)
                assert torch.equal(ends[0], sources[source])
                assert torch.equal(ends[1], destinations[destination])
                assert block.num_edges(name) == ids.numel()
        assert out["paper"].shape == (blocks[0].num_dst_nodes("paper"), 4)


def test_weights_and_masks(device):
    graph = with_data()
    graph.edata["weight"][::2] = 0
    for options, allowed in (
        ({"prob": "weight"}, graph.edata["weight"] > 0),
        ({"mask": "mask"}, graph.edata["mask"]),
    ):
        sampler = fastsparse_dgl.NeighborSampler([-1], **options)
        for _, outputs, (block,) in loader(graph, sampler, device):
            ids = block.edata[EID].cpu()
            wanted = (torch.isin(graph.edges()[1], outputs.cpu()) & allowed).nonzero().flatten()
            assert torch.equal(ids.sort().values, wanted)


def test_changed_weights_and_fanouts():
    """Weights that take the place of others, in their memory too, and options that are set later."""
    graph, nodes = with_data(), torch.arange(30)
    sampler = fastsparse_dgl.NeighborSampler([-1], prob="weight")
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        graph.edata["weight"] = (torch.rand(graph.num_edges(), generator=generator) < 0.3).float()
        block = sampler.sample_blocks(graph, nodes)[2][0]
        wanted = graph.edata["weight"].nonzero().flatten()
        assert torch.equal(block.edata[EID].sort().values, wanted)
        del graph.edata["weight"], block
    graph.edata["weight"] = torch.ones(graph.num_edges())
    sampler.fanouts = [1]
    assert sampler.sample_blocks(graph, nodes)[2][0].in_degrees().max() == 1


def test_weights_made_in_inference_mode():
    graph, nodes = with_data(), torch.arange(30)
    with torch.inference_mode():
        graph.edata["weight"] = (torch.arange(graph.num_edges()) % 3 == 0).float()
    sampler = fastsparse_dgl.NeighborSampler([-1], prob="weight")
    block = sampler.sample_blocks(graph, nodes)[2][0]
    assert torch.equal(block.edata[EID].sort().values, graph.edata["weight"].nonzero().flatten())


def test_what_can_hold_graphs_follows_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    """DGL without FastSparse, with it, and without it again."""

    def refuse(*arguments: object, **options: object) -> None:
        raise DGLError("Device API cuda is not enabled")

    monkeypatch.setattr(dgl_blocks, "_can_hold", {})
    monkeypatch.setattr(dgl_blocks.dgl, "graph", refuse)
    place = torch.device("cuda", 0)
    assert not dgl_blocks.dgl_can_hold(place)
    with enabled(_devices=("cuda",)):
        assert dgl_blocks.dgl_can_hold(place)
    assert not dgl_blocks.dgl_can_hold(place)


def test_torch_seeds_blocks(device):
    graph = with_data()
    batches = loader(graph, fastsparse_dgl.NeighborSampler([2, 2]), device, shuffle=False)
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append([inputs.tolist() for inputs, _, _ in batches])
    assert runs[0] == runs[1]


def test_what_is_left_to_dgl(reasons):
    graph = with_data()
    sampler = fastsparse_dgl.NeighborSampler([2], edge_dir="out")
    sampler.sample_blocks(graph, torch.arange(30))
    fastsparse_dgl.NeighborSampler([2], fused=False).sample_blocks(
        graph, torch.tensor([1, 2]), exclude_eids=torch.tensor([0])
    )
    told = [record.message for record in reasons.records]
    assert any("edge_dir='out' is not supported" in message for message in told)
    (excluded,) = (message for message in told if "excluded edges are not supported" in message)
    assert "Leave out `exclude` only" in excluded
    assert ("runs on the CPU" in excluded) is torch.cuda.is_available()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("typed", [False, True])
def test_invalid_blocks_of_outgoing_edges(typed, num_threads, monkeypatch):
    # DGL takes its fused sampler if it has several threads. Both samplers make blocks whose edges end at
    # nodes that the block does not have, and DGL's layers write to these nodes.
    monkeypatch.setattr(
        dgl.dataloading.neighbor_sampler, "get_num_threads", lambda: num_threads, raising=False
    )  # DGL 1.1.3 has no fused sampler
    graph = hetero() if typed else with_data()
    seeds = {"author": torch.tensor([3]), "paper": torch.tensor([1])} if typed else torch.tensor([3])
    sampler = fastsparse_dgl.NeighborSampler([-1], edge_dir="out")
    with pytest.raises(ValueError, match=r"^edge_dir='out': DGL's sampler made a block .*dgl\.reverse"):
        sampler.sample_blocks(graph, seeds)
    for workers in (0, 1):
        with pytest.raises(ValueError, match=r"edge_dir='out': DGL's sampler made a block"):
            list(fastsparse_dgl.DataLoader(graph, seeds, sampler, batch_size=2, num_workers=workers))


@pytest.mark.parametrize("make", [fastsparse_dgl.FastGraphConv, fastsparse_dgl.FastGATConv])
def test_layers_refuse_edges_to_missing_nodes(make):
    block = dgl.to_block(dgl.graph(([0, 1], [1, 2])), torch.tensor([0, 1]))
    layer = make(6, 4, **({"num_heads": 1} if make is fastsparse_dgl.FastGATConv else {}))
    with pytest.raises(ValueError, match=r"^graph: expected edges between its 2 sources.* from -1 to 1\)"):
        layer(block, torch.randn(2, 6))


@pytest.mark.gpu
@pytest.mark.parametrize(("cache", "where"), [({}, "reads over PCIe"), ({"feat": 7}, "except 7 rows")])
def test_features_that_stay_with_the_host(cache, where, caplog, monkeypatch):
    monkeypatch.setattr(log, "seen", set())
    monkeypatch.setattr(features, "_SHARE_OF_FREE", -1.0)
    caplog.set_level(logging.INFO)
    graph = with_data()
    sampler = fastsparse_dgl.NeighborSampler([2], prefetch_node_feats=["feat"])
    options = {"num_workers": 2, "use_uva": True, "gpu_cache": {"node": cache, "edge": {}}}
    for inputs, _, (block,) in loader(graph, sampler, "cuda", **options):
        assert torch.equal(block.srcdata["feat"].cpu(), graph.ndata["feat"][inputs.cpu()])
    told = [record.message for record in caplog.records]
    assert any(where in message for message in told)
    assert any(message.startswith("num_workers, use_uva, gpu_cache of edges: ignored") for message in told)


@pytest.mark.parametrize("wrong", [5, {"node": 5}, {"node": {"feat": "x"}}, {"node": {"feat": 2.5}}], ids=str)
def test_features_to_keep_that_are_none(wrong):
    with pytest.raises(ValueError, match="gpu_cache: expected numbers of nodes"):
        dataloader._rows_to_keep(wrong)
    assert dataloader._rows_to_keep({"node": {"feat": 7}, "edge": {}}) == {"feat": 7}


def test_an_interrupted_epoch(device):
    graph = with_data()
    batches = loader(graph, fastsparse_dgl.NeighborSampler([2, 2]), device)
    next(iter(batches))
    outputs = torch.cat([outputs for _, outputs, _ in batches])
    assert torch.equal(outputs.cpu().sort().values, torch.arange(30))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ([], {}), r"fanouts: expected a list with a number .* got \[\]"),
        (lambda: (5, {}), "fanouts: expected a list .* got 5"),
        (lambda: ([2, None], {}), r"fanouts\[1\]: expected a number .* got None"),
        (lambda: ([-2], {}), "fanouts: .* got -2"),
        (lambda: ([{"writes": 2}], {}), r"fanouts\[0\]: .* got none for .*cites"),
        (lambda: ([2], {"prob": "nowhere"}), r"prob or mask: .* one of \['wide'\], got 'nowhere'"),
        (lambda: ([2], {"prob": "wide"}), r"prob or mask: .* got shape \(40, 2\)"),
    ],
)
def test_bad_options(make, message):
    graph = hetero()
    graph.edges["cites"].data["wide"] = torch.rand(40, 2)
    fanouts, options = make()
    sampler = fastsparse_dgl.NeighborSampler(fanouts, **options)
    with pytest.raises(ValueError, match=message):
        sampler.sample_blocks(graph, {"paper": torch.tensor([3])})


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (torch.tensor([3]), r"seed_nodes: expected a dict by node type, such as \{'author': ids\}"),
        ({"paper": torch.tensor([12])}, "seed_nodes .*indices.* from 0 to 11 of type 'paper', got 12"),
        ({"paper": torch.tensor([-1])}, "seed_nodes .*indices.*, got -1"),
        ({"papers": torch.tensor([1])}, "seed_nodes .*indices.* among .*'paper'.*, got 'papers'"),
    ],
)
def test_bad_seeds(seeds, message, device):
    with pytest.raises(ValueError, match=message):
        next(iter(loader(hetero(), fastsparse_dgl.NeighborSampler([2]), device, indices=seeds)))


def test_negative_weights_are_named():
    graph = with_data()
    graph.edata["weight"][3] = -1
    with pytest.raises(ValueError, match="edge data 'weight': expected finite numbers that are not negative"):
        fastsparse_dgl.NeighborSampler([2], prob="weight").sample_blocks(graph, torch.tensor([3]))


def test_names_to_prefetch_that_are_none():
    graph = hetero()
    (block,) = fastsparse_dgl.NeighborSampler([2]).sample_blocks(graph, {"paper": torch.tensor([3])})[2]
    read = partial(dataloader._read, "prefetch_labels")
    with pytest.raises(ValueError, match=r"prefetch_labels: expected a dict .*\{'author': \['feat'\]\}"):
        read(["feat"], graph.ntypes, block.dstnodes)
    with pytest.raises(KeyError, match=r"prefetch_labels: .* among \['_ID', 'feat'\], got 'label'"):
        read({"paper": ["label"]}, graph.ntypes, block.dstnodes)


def test_seeds_by_the_only_type():
    """Output nodes are returned by type, as in DGL."""
    seeds = {"_N": torch.tensor([3, 4])}
    for package in (fastsparse_dgl, dgl.dataloading):
        inputs, outputs, _ = package.NeighborSampler([2]).sample_blocks(with_data(), seeds)
        assert isinstance(inputs, Tensor)
        assert torch.equal(outputs["_N"], seeds["_N"])


@pytest.mark.gpu
def test_another_sampler_on_a_gpu_is_a_warning():
    graph = with_data()
    with (
        enabled(),
        pytest.warns(SlowPathWarning, match="FastSparse samples only for fastsparse_dgl.NeighborSampler"),
    ):
        loader(graph, dgl.dataloading.ShaDowKHopSampler([2]), "cuda")
