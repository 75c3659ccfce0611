"""The block that stands in for DGL's on a GPU: what user code, the layers and DGL itself ask of a block."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dgl_cases import DGLError, dgl, fastsparse_dgl
from hook_cases import AWAY, enabled, enabled_for
from test_dgl_loader import hetero, with_data
from torch import Tensor

from fastsparse_dgl import device_graph, sampled_block
from fastsparse_dgl.block_data import set_frames
from fastsparse_dgl.dataloading import neighbor_sampler

fn = dgl.function
SEEDS = {"one type": torch.tensor([4, 9, 17, 2]), "types": {"paper": torch.tensor([3, 8, 1])}}


def stand_in(kind: str, device: str, idtype: torch.dtype = torch.int64) -> Any:
    """A SampledBlock on a device, with data of the nodes and edges."""
    graph = with_data() if kind == "one type" else hetero()
    graph = graph.int() if idtype == torch.int32 else graph
    sampler = fastsparse_dgl.NeighborSampler([3])
    target = torch.empty(0, device=device).device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbor_sampler, "dgl_can_hold", lambda device: False)
        _, _, (block,) = sampler.finish(graph, sampler.start(graph, SEEDS[kind], target), SEEDS[kind])
    assert isinstance(block, fastsparse_dgl.SampledBlock)
    for nth, name in enumerate(block.srctypes):
        block.srcnodes[name].data["h"] = torch.randn(
            block.num_src_nodes(name), 4, generator=torch.Generator().manual_seed(nth)
        ).to(device)
    for name in block.canonical_etypes:
        block.edges[name].data["w"] = torch.rand(
            block.num_edges(name), 1, generator=torch.Generator().manual_seed(7)
        ).to(device)
    return block


def of_dgls(block: Any) -> Any:
    """DGL's block with the same edges and data, on the CPU."""
    edges = {name: tuple(end.cpu() for end in block.edges(etype=name)) for name in block.canonical_etypes}
    made = dgl.create_block(
        edges,
        {name: block.num_src_nodes(name) for name in block.srctypes},
        {name: block.num_dst_nodes(name) for name in block.dsttypes},
        idtype=block.idtype,
    )
    set_frames(made, {space: frame.to("cpu") for space, frame in block.frames.items()})
    return made


def in_scope(block: Any) -> Any:
    with block.local_scope():
        del block.srcdata["h"]
        block.srcdata["new"] = block.srcdata[dgl.NID] + 1
        inside = sorted(block.srcdata), block.srcdata["new"]
    return inside, sorted(block.srcdata), block.srcdata["h"]


def with_labels(block: Any) -> Any:
    block.dstdata["y"] = torch.ones(block.num_dst_nodes(), dtype=torch.int64, device=block.device)
    block.edata["z"] = block.edata["w"] * 2
    return block.dstdata.pop("y"), block.edata["z"], sorted(block.edata), dict(block.srcdata)


def of_types(block: Any) -> Any:
    """Data of several types by name."""
    block.srcdata["twice"] = {name: 2 * tensor for name, tensor in block.srcdata["h"].items()}
    found = block.srcnodes["paper"].data["twice"], block.edata["w"], sorted(block.srcdata)
    del block.srcdata["twice"]
    return found, sorted(block.srcdata), "twice" in block.srcnodes["paper"].data


def of_one(block: Any) -> Any:
    part = block["cites"]
    return part.etypes, part.num_src_nodes(), part.num_dst_nodes(), part.in_degrees(), part.srcdata["h"]


def updated(block: Any) -> Any:
    block.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"))
    block.apply_edges(fn.copy_u("h", "of_source"))
    return block.dstdata["out"], block.edata["of_source"]


def one_updated(block: Any) -> Any:
    """A slice of a block shares its data, whether the block or the slice is read first."""
    block["cites"].update_all(fn.copy_u("h", "m"), fn.mean("m", "out"))
    block.update_all(fn.copy_u("h", "m"), fn.mean("m", "again"), etype="cites")
    return block.dstnodes["paper"].data["out"], block["cites"].dstdata["again"]


BOTH: dict[str, Callable[[Any], Any]] = {
    "kind": lambda b: [b.is_block, b.is_unibipartite, b.idtype, b.ntypes, b.srctypes, b.dsttypes],
    "types": lambda b: [b.etypes, b.canonical_etypes],
    "counts": lambda b: [b.num_src_nodes(), b.number_of_dst_nodes(), b.num_edges()],
    "pickle": lambda b: [pickle.loads(pickle.dumps(b)).num_edges(), b.num_edges()],
}
#: Operations on a block of one type; those that need DGL's own block come second.
ALONE: dict[str, Callable[[Any], Any]] = BOTH | {
    "data": with_labels,
    "local_scope": in_scope,
    "to": lambda b: [b.to(b.device).srcdata["h"], b.cpu().edata["w"].to(b.device)],
    "ids": lambda b: [b.int().edges(), b.int().idtype, b.int().long().in_degrees(), b.int().srcdata["h"]],
    "nodes": lambda b: [b.srcnodes(), b.dstnodes()],
    "degrees": lambda b: [b.in_degrees(), b.out_degrees(), b.in_degrees(b.dstnodes()[1:3])],
    "edges": lambda b: [b.edges(), b.edges(form="all", order="srcdst"), b.edges("eid")],
}
NEED_DGLS: dict[str, Callable[[Any], Any]] = {
    "message passing": updated,
    "queries": lambda b: [
        b.num_nodes(),
        b.to_canonical_etype("_E"),
        b.all_edges(),
        b.find_edges(b.dstnodes()[:2]),
        b.has_edges_between(0, 0),
    ],
    "edge_softmax": lambda b: dgl.nn.functional.edge_softmax(b, b.edata["w"]),
}
TYPES: dict[str, Callable[[Any], Any]] = BOTH | {
    "data": of_types,
    "slice": of_one,
    "nodes": lambda b: [b.srcnodes("author"), b.dstnodes("paper"), b.num_src_nodes("paper")],
    "edges": lambda b: [b.edges(etype="writes"), b.in_degrees(etype="cites"), b.num_edges("of")],
    "slice, message passing": one_updated,
}


def leaves(item: Any, device: str) -> list[Any]:
    """What a result is made of, in order; its tensors lay on the device and are on the CPU."""
    if isinstance(item, Tensor):
        assert item.device.type == device
        return [item.cpu()]
    if isinstance(item, dict):
        return [*item, *leaves(list(item.values()), device)]
    if isinstance(item, (list, tuple)):
        return [leaf for part in item for leaf in leaves(part, device)]
    return [item]


def check(operation: Callable[[Any], Any], block: Any, device: str) -> None:
    expected = leaves(operation(of_dgls(block)), "cpu")
    found = leaves(operation(block), device)
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        if isinstance(want, Tensor):
            torch.testing.assert_close(got, want)
        else:
            assert got == want


@pytest.mark.parametrize(
    ("kind", "name"),
    [("one type", name) for name in [*ALONE, *NEED_DGLS]] + [("types", name) for name in TYPES],
)
def test_like_dgls(kind: str, name: str, device: str) -> None:
    operation = (ALONE | NEED_DGLS if kind == "one type" else TYPES)[name]
    with enabled():
        check(operation, stand_in(kind, device), device)


@pytest.mark.parametrize("name", [*ALONE, *NEED_DGLS])
def test_without_dgls(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where DGL holds no block, the usual things work, and the others say what to do."""
    if name == "to" and device == "cpu":
        pytest.skip("DGL holds blocks on the CPU")
    monkeypatch.setattr(sampled_block, "dgl_can_hold", lambda place: device != "cpu" and place.type == "cpu")
    block = stand_in("one type", device)
    if name in NEED_DGLS:
        with pytest.raises(DGLError, match=r"enable\(\)"):
            NEED_DGLS[name](block)
        assert not hasattr(block, "update_all")
    else:
        check(ALONE[name], block, device)


LAYERS = {
    "GraphConv": lambda: dgl.nn.GraphConv(4, 3, allow_zero_in_degree=True),
    "SAGEConv": lambda: dgl.nn.SAGEConv(4, 3, "pool"),
    "GATConv": lambda: dgl.nn.GATConv(4, 3, 2, allow_zero_in_degree=True),
    "GINConv": lambda: dgl.nn.GINConv(torch.nn.Linear(4, 3), "max"),
}


def test_blocks_are_not_dgls_where_enable_keeps_the_structure_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_graph, "device_types", ("cpu",))
    graph, sampler, seeds = with_data(), fastsparse_dgl.NeighborSampler([3]), SEEDS["one type"]
    _, _, (block,) = sampler.finish(graph, sampler.start(graph, seeds, torch.device("cpu")), seeds)
    assert isinstance(block, fastsparse_dgl.SampledBlock)


@pytest.fixture
def without_dgls_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises an error if DGL's block of the same edges is made, which takes longer than a layer."""

    def make(*_: object) -> None:
        raise AssertionError("DGL's block was made")

    monkeypatch.setattr(sampled_block, "dgl_block", make)


def test_dgls_block_takes_what_no_drop_in_has(device: str) -> None:
    torch.manual_seed(0)
    block, layer = stand_in("one type", device), dgl.nn.SAGEConv(4, 3, "lstm")
    expected = layer(of_dgls(block), block.srcdata["h"].cpu())
    with enabled():
        found = layer.to(device)(block, block.srcdata["h"])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_dgls_layers(name: str, device: str, without_dgls_block: None) -> None:
    """They run on it once FastSparse is enabled."""
    torch.manual_seed(0)
    block, layer = stand_in("one type", device), LAYERS[name]()
    feat = block.srcdata["h"].cpu()
    expected = layer(of_dgls(block), feat)
    with enabled():
        found = layer.to(device)(block, feat.to(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_dgls_layers_of_types(device: str, without_dgls_block: None) -> None:
    torch.manual_seed(0)
    block = stand_in("types", device)
    layer = dgl.nn.HeteroGraphConv({name: dgl.nn.SAGEConv(4, 3, "mean") for name in block.etypes})
    feat = {name: block.srcnodes[name].data["h"].cpu() for name in block.srctypes}
    expected = layer(of_dgls(block), feat)
    with enabled():
        found = layer.to(device)(block, {name: item.to(device) for name, item in feat.items()})
    for name, item in expected.items():
        torch.testing.assert_close(found[name].cpu(), item, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", AWAY)
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64], ids=str)
def test_moved_to_a_device(idtype: torch.dtype, place: str) -> None:
    """DGL's block where `enable()` lets DGL hold it, and its data there."""
    block = stand_in("one type", "cpu", idtype)
    expected = of_dgls(block)
    expected.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"))
    with enabled_for(place):
        moved = block.to(place)
        assert isinstance(moved, dgl.DGLGraph)
        assert str(moved.device) == place
        assert moved.idtype == idtype
        moved.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"))
        torch.testing.assert_close(moved.dstdata["out"].cpu(), expected.dstdata["out"])
        assert sorted(moved.srcdata) == sorted(block.srcdata)
        assert torch.equal(moved.cpu().in_degrees(), expected.in_degrees())
