"""Graphs on a GPU that DGL has no code for: every operation gives what it gives on the CPU, on the device."""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dgl_cases import DGLError, dgl, fastsparse_dgl, homogeneous
from hook_cases import AWAY, enabled_for
from torch import Tensor

fn = dgl.function


@pytest.fixture(params=AWAY)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device whose graphs FastSparse holds, while it is enabled."""
    with enabled_for(request.param):
        yield request.param


def small(seed: int = 0) -> Any:
    """A homogeneous graph with node and edge data."""
    graph = homogeneous(seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    graph.ndata["h"] = torch.randn(graph.num_nodes(), 3, generator=generator)
    graph.ndata["mask"] = torch.rand(graph.num_nodes(), 1, generator=generator)
    graph.ndata["one"] = torch.randn(graph.num_nodes(), generator=generator)
    graph.edata["w"] = torch.rand(graph.num_edges(), 3, generator=generator)
    return graph


def typed() -> Any:
    """Two types of nodes, three of edges, with data."""
    from test_dgl_operators import heterogeneous

    graph = heterogeneous()
    for nth, kind in enumerate(graph.ntypes):
        graph.nodes[kind].data["h"] = torch.randn(
            graph.num_nodes(kind), 3, generator=torch.Generator().manual_seed(nth)
        )
    for nth, kind in enumerate(graph.canonical_etypes):
        graph.edges[kind].data["w"] = torch.rand(
            graph.num_edges(kind), 3, generator=torch.Generator().manual_seed(nth)
        )
    return graph


def found_in(result: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Every tensor, number and name in a result, with where it was."""
    if isinstance(result, Tensor):
        yield place, result
    elif isinstance(result, dgl.DGLGraph):
        yield f"{place}.types", (result.ntypes, result.canonical_etypes, result.is_block)
        for kind in result.ntypes if not result.is_block else ():
            yield f"{place}.{kind}", result.num_nodes(kind)
            yield from found_in(dict(result.nodes[kind].data), f"{place}.{kind}")
            yield from found_in(result.batch_num_nodes(kind), f"{place}.{kind}.batch")
        if result.is_block:
            yield from found_in(dict(result.srcdata), f"{place}.src")
            yield from found_in(dict(result.dstdata), f"{place}.dst")
        for kind in result.canonical_etypes:
            yield from found_in(result.edges(form="all", etype=kind), f"{place}.{kind}")
            yield from found_in(dict(result.edges[kind].data), f"{place}.{kind}")
        yield f"{place}.device", result.device
    elif isinstance(result, dict):
        for key in sorted(result, key=str):
            yield from found_in(result[key], f"{place}[{key}]")
    elif isinstance(result, (list, tuple)):
        for nth, part in enumerate(result):
            yield from found_in(part, f"{place}[{nth}]")
    elif hasattr(result, "items"):
        yield from found_in(dict(result.items()), place)
    else:
        yield place, result


def udf_message(edges: Any) -> dict[str, Tensor]:
    return {"m": edges.src["h"] * edges.data["w"] + edges.dst["h"]}


def udf_reduce(nodes: Any) -> dict[str, Tensor]:
    return {"out": nodes.mailbox["m"].sum(1).tanh() + nodes.data["h"]}


def updated(graph: Any, *args: Any, **kwargs: Any) -> Any:
    graph.update_all(*args, **kwargs)
    return graph


def edited(graph: Any, edit: Callable[[Any], Any]) -> list[Any]:
    """The graph before and after a change in place, and sums over both structures."""
    graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "before"))
    before = graph.ndata.pop("before")
    edit(graph)
    graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "after"))
    return [before, graph]


def ids(graph: Any, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=graph.idtype, device=graph.device)


def in_scope(graph: Any) -> Any:
    with graph.local_scope():
        graph.ndata["h"] = graph.ndata["h"] * 2
        graph.apply_edges(fn.u_add_v("h", "h", "s"))
        inside = graph.edata["s"].sum(), dict(graph.ndata)
    return inside, graph


def propagated(graph: Any) -> Any:
    graph.prop_nodes([ids(graph, 0, 1), ids(graph, 2)], fn.copy_u("h", "m"), fn.sum("m", "h"))
    graph.prop_edges([ids(graph, 3, 4)], fn.copy_u("h", "m"), fn.sum("m", "h"))
    return graph


def traversed(graph: Any) -> Any:
    functions = {"message_func": fn.copy_u("h", "m"), "reduce_func": fn.sum("m", "h")}
    dgl.prop_nodes_bfs(graph, ids(graph, 0), **functions)
    dgl.prop_edges_dfs(graph, ids(graph, 0), **functions)
    src, dst = graph.edges()
    acyclic = dgl.edge_subgraph(graph, src < dst, relabel_nodes=False)
    dgl.prop_nodes_topo(acyclic, **functions)
    return [graph, acyclic]


def rebatched(graph: Any) -> Any:
    graph.set_batch_num_nodes(ids(graph, 10, 20))
    graph.set_batch_num_edges(ids(graph, 20, graph.num_edges() - 20))
    return [graph, dgl.sum_nodes(graph, "h"), dgl.softmax_edges(graph, "w")]


def grown(graph: Any) -> None:
    """Nodes and edges with data of their own."""
    graph.add_edges(ids(graph, 0, 1), ids(graph, 2, 3), {"w": torch.ones(2, 3, device=graph.device)})
    graph.add_nodes(2, {"h": torch.ones(2, 3, device=graph.device)})


def saved(graph: Any) -> Any:
    """What a file keeps, which is on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        dgl.save_graphs(f"{folder}/graphs", [graph], {"label": graph.ndata["one"]})
        (loaded,), labels = dgl.load_graphs(f"{folder}/graphs")
    return [str(loaded.device), loaded.to(graph.device), labels["label"].to(graph.device)]


#: Operations on a homogeneous graph.
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "edges": lambda g: [g.edges(), g.edges(form="all", order="srcdst"), g.all_edges(form="eid"), g.nodes()],
    "degrees": lambda g: [g.in_degrees(), g.out_degrees(), g.in_degrees(ids(g, 1, 4)), g.out_degrees(3)],
    "find_edges": lambda g: [g.find_edges(ids(g, 5, 2)), g.edge_ids(*g.find_edges(ids(g, 5, 2)))],
    "neighbours": lambda g: [
        g.predecessors(3),
        g.successors(3),
        g.in_edges(ids(g, 3, 4)),
        g.out_edges(3, form="all"),
    ],
    "has": lambda g: [g.has_nodes(ids(g, 3, 99)), g.has_edges_between(ids(g, 0), ids(g, 1)), g.is_multigraph],
    "adj_tensors": lambda g: [g.adj_tensors(kind) for kind in ("coo", "csr", "csc")],
    "update_all": lambda g: updated(g, fn.copy_u("h", "m"), fn.mean("m", "out")),
    "update_all, weights": lambda g: updated(g, fn.u_mul_e("h", "w", "m"), fn.max("m", "out")),
    "update_all, functions": lambda g: updated(g, udf_message, udf_reduce),
    "update_all, message": lambda g: updated(g, udf_message, fn.sum("m", "out")),
    "update_all, reduce": lambda g: updated(
        g, fn.copy_u("h", "m"), udf_reduce, lambda v: {"h": v.data["out"] + 1}
    ),
    "apply_edges": lambda g: [g.apply_edges(udf_message), g.apply_edges(fn.u_sub_v("h", "h", "d")), g][2],
    "apply_edges, some": lambda g: [g.apply_edges(udf_message, edges=ids(g, 4, 7)), g][1],
    "apply_nodes": lambda g: [g.apply_nodes(lambda v: {"h": v.data["h"] * 2}, v=ids(g, 1, 2)), g][1],
    "pull": lambda g: [g.pull(ids(g, 1, 2), fn.copy_u("h", "m"), fn.sum("m", "h")), g][1],
    "push": lambda g: [g.push(ids(g, 1, 2), fn.copy_u("h", "m"), fn.sum("m", "h")), g][1],
    "send_and_recv": lambda g: [g.send_and_recv(ids(g, 0, 5), fn.copy_u("h", "m"), fn.sum("m", "h")), g][1],
    "prop": propagated,
    "prop, traversals": traversed,
    "group_apply_edges": lambda g: [
        g.filter_nodes(lambda v: v.data["one"] > 0),
        g.filter_edges(lambda e: e.data["w"][:, 0] > 0.5),
    ],
    "local_scope": in_scope,
    "add_edges": lambda g: edited(g, lambda g: g.add_edges(ids(g, 0, 1), ids(g, 5, 6))),
    "add data": lambda g: edited(g, grown),
    "add_nodes": lambda g: edited(g, lambda g: g.add_nodes(3)),
    "remove_edges": lambda g: edited(g, lambda g: g.remove_edges(ids(g, 0, 17))),
    "remove_nodes": lambda g: edited(g, lambda g: g.remove_nodes(ids(g, 0, 17))),
    "clone": lambda g: [g.clone(), copy.copy(g), copy.deepcopy(g), g.local_var()],
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "shared memory": lambda g: [
        shared := g.shared_memory(f"fastsparse_{os.getpid()}_{g.device.type}"),
        shared.device.type,
        shared.to(g.device),
    ][1:],
    "save": saved,
    "reverse": lambda g: dgl.reverse(g, copy_edata=True),
    "self loops": lambda g: dgl.remove_self_loop(dgl.add_self_loop(dgl.add_self_loop(g), fill_data="mean")),
    "batch": lambda g: dgl.batch([g, dgl.add_self_loop(g), g]),
    "unbatch": lambda g: dgl.unbatch(dgl.batch([g, dgl.reverse(g, copy_edata=True)])),
    "rebatched": rebatched,
    "merge": lambda g: dgl.merge([g, dgl.reverse(g, copy_edata=True)]),
    "slice_batch": lambda g: dgl.slice_batch(dgl.batch([g, g]), 1),
    "to_block": lambda g: dgl.to_block(dgl.in_subgraph(g, ids(g, 1, 2, 3)), ids(g, 1, 2, 3)),
    "subgraphs": lambda g: [
        dgl.node_subgraph(g, ids(g, 3, 1, 2, 9, 8)),
        g.subgraph(ids(g, 0, 5)),
        dgl.edge_subgraph(g, ids(g, 4, 2)),
    ],
    "in and out": lambda g: [
        dgl.in_subgraph(g, ids(g, 3)),
        dgl.out_subgraph(g, ids(g, 3, 4), relabel_nodes=True),
    ],
    "khop": lambda g: [
        dgl.khop_in_subgraph(g, ids(g, 3), 2),
        dgl.khop_out_subgraph(g, 3, 1),
        dgl.khop_graph(g, 2),
    ],
    "to_simple": lambda g: dgl.to_simple(g, return_counts="count", writeback_mapping=True),
    "to_simple, data": lambda g: dgl.to_simple(g, copy_edata=True, aggregator="mean"),
    "to_bidirected": lambda g: [
        dgl.to_bidirected(g, copy_ndata=True),
        dgl.add_reverse_edges(g, copy_edata=True),
    ],
    "line_graph": lambda g: dgl.line_graph(g),
    "compact": lambda g: dgl.compact_graphs(dgl.in_subgraph(g, ids(g, 3))),
    "reorder": lambda g: dgl.sort_csr_by_tag(g, (g.ndata["one"] > 0).to(g.idtype)),
    "readouts": lambda g: (
        [f(b := dgl.batch([g, g]), "h") for f in (dgl.sum_nodes, dgl.mean_nodes, dgl.max_nodes)]
        + [dgl.sum_edges(b, "w"), dgl.softmax_nodes(b, "h")]
    ),
    "readouts, weighted": lambda g: [
        dgl.mean_nodes(g, "h", "mask"),
        dgl.topk_nodes(g, "h", 3, sortby=0),
        dgl.broadcast_nodes(g, torch.ones(1, 2, device=g.device)),
    ],
    "traversals": lambda g: [part.to(g.device) for part in dgl.bfs_nodes_generator(g, ids(g, 0))],
    "formats": lambda g: [g.formats("csr").formats(), g.int().idtype, g.int().edges(), g.long()],
    "transforms": lambda g: dgl.GCNNorm()(dgl.AddSelfLoop()(g)),
    "adj product": lambda g: dgl.adj_product_graph(weighted_graph(g), weighted_graph(g), "w"),
    "adj sum": lambda g: dgl.adj_sum_graph([weighted_graph(g), weighted_graph(g)], "w"),
    "made there": lambda g: [
        dgl.graph(g.edges(), num_nodes=30),
        dgl.graph(("csc", g.adj_tensors("csc"))),
        dgl.rand_graph(5, 9).to(g.device).num_edges(),
    ],
    "made there, block": lambda g: dgl.create_block(g.edges(), 30, 30),
    "ends": lambda g: [g.srcdata, g.dstdata, g.num_src_nodes(), g.srcnodes(), g.dstnodes()],
    "khop_adj": lambda g: dgl.khop_adj(dgl.to_simple(g), 2).to(g.device),
    "knn": lambda g: dgl.knn_graph(g.ndata["h"], 3),
    "radius": lambda g: dgl.radius_graph(g.ndata["h"], 1.0),
}


def weighted_graph(graph: Any) -> Any:
    graph = dgl.to_simple(graph)
    graph.edata["w"] = torch.arange(graph.num_edges(), device=graph.device) / 10
    return graph


#: Operations on a graph of several types.
TYPED: dict[str, Callable[[Any], Any]] = {
    "slices": lambda g: [
        g["follows"],
        g["rates"].edges(),
        g["user", :, "item"],
        g[:, :, "user"],
        dgl.edge_type_subgraph(g, ["rates"]),
    ],
    "multi_update_all": lambda g: [
        g.multi_update_all({kind: (fn.copy_u("h", "m"), fn.sum("m", "o")) for kind in g.etypes}, "max"),
        g,
    ][1],
    "update_all": lambda g: updated(g, fn.copy_u("h", "m"), fn.max("m", "out")),
    "update_all, type": lambda g: updated(g, fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"), etype="near"),
    "functions": lambda g: updated(g, udf_message, udf_reduce, etype="rates"),
    "apply_edges": lambda g: [g.apply_edges(fn.u_dot_v("h", "h", "d"), etype="rates"), g][1],
    "degrees": lambda g: [g.in_degrees(etype="near"), g.out_degrees(etype="rates"), g.num_edges("near")],
    "to_homogeneous": lambda g: dgl.to_homogeneous(g, ndata=["h"]),
    "to_heterogeneous": lambda g: dgl.to_heterogeneous(
        dgl.to_homogeneous(g, ndata=["h"]), g.ntypes, g.etypes
    ),
    "to_block": lambda g: dgl.to_block(g, {"user": g.nodes("user")[:6], "item": g.nodes("item")}),
    "subgraph": lambda g: dgl.node_subgraph(g, {"user": ids(g, 3, 1), "item": ids(g, 2)}),
    "metapath": lambda g: dgl.metapath_reachable_graph(g, ["rates", "near"]),
    "batch": lambda g: dgl.unbatch(dgl.batch([g, g])),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "remove_edges": lambda g: [g.remove_edges(ids(g, 1), etype="near"), g][1],
    "made there": lambda g: dgl.heterograph({kind: g.edges(etype=kind) for kind in g.canonical_etypes}),
}


def check_operation(operation: Callable[[Any], Any], graph: Any, device: str) -> None:
    """Same results, and every tensor and graph of them on the device."""
    moved = graph.to(device)
    expected = list(found_in(operation(graph.clone()), "result"))
    found = list(found_in(operation(moved), "result"))
    assert [place for place, _ in found] == [place for place, _ in expected]
    for (place, got), (_, want) in zip(found, expected, strict=True):
        if isinstance(want, Tensor):
            assert str(got.device) == device, place
            assert got.dtype == want.dtype, place
            torch.testing.assert_close(got.cpu(), want, msg=place)
        elif place.endswith(".device"):
            assert str(got) == device, place
        else:
            assert got == want, place


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str, device: str) -> None:
    check_operation(OPERATIONS[name], small(), device)


@pytest.mark.parametrize("name", TYPED)
def test_operations_with_types(name: str, device: str) -> None:
    check_operation(TYPED[name], typed(), device)


def test_back_on_the_cpu(device: str) -> None:
    graph = small()
    back = graph.to(device).cpu()
    assert back.device.type == "cpu"
    assert back._graph is graph._graph
    assert torch.equal(back.ndata["h"], graph.ndata["h"])


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64], ids=str)
def test_excluded_edges(idtype: torch.dtype, device: str) -> None:
    graph = small().to(device)
    graph = graph.int() if idtype == torch.int32 else graph
    excluded = graph.in_edges(2, form="eid")
    kept = dgl.sampling.sample_neighbors(graph, ids(graph, 1, 2, 3), -1, exclude_edges=excluded)
    expected = torch.cat([graph.in_edges(node, form="eid") for node in (1, 3)])
    assert torch.equal(kept.edata[dgl.EID].cpu().sort().values, expected.cpu().sort().values)


def test_farthest_points(device: str) -> None:
    """Indices that the library writes into a tensor that it was given to read."""
    points = torch.rand(2, 20, 3, generator=torch.Generator().manual_seed(0))
    expected = dgl.geometry.farthest_point_sampler(points, 5, start_idx=0)
    found = dgl.geometry.farthest_point_sampler(points.to(device), 5, start_idx=0)
    assert str(found.device) == device
    assert torch.equal(found.cpu(), expected)
    assert expected.unique().numel() > 5


def test_structures_are_shared_and_freed(device: str) -> None:
    fastsparse_dgl.clear_cache()
    graph = small()
    for _ in range(3):
        moved = graph.to(device)
        moved.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
        moved.in_degrees()
    assert fastsparse_dgl.cache_info().entries == 1
    del graph, moved
    assert fastsparse_dgl.cache_info().entries == 0


def test_features_on_the_wrong_device(device: str) -> None:
    graph = small().to(device)
    with pytest.raises(DGLError, match="device"):
        graph.ndata["x"] = torch.ones(30, 2)
    with pytest.raises(DGLError, match=r"graph.to\('cpu'\)"):
        dgl.ops.copy_u_sum(graph, torch.ones(30, 2))
    with pytest.raises(DGLError, match="device"):
        graph.in_degrees(torch.tensor([1]))


def test_disabled_with_graphs_on_the_device(device: str) -> None:
    graph = small().to(device)
    feature = graph.ndata["h"]
    fastsparse_dgl.disable()
    for use in (
        lambda: graph.device,
        lambda: graph.edges(),
        lambda: graph.num_nodes(),
        lambda: dgl.ops.copy_u_sum(graph, feature),
        lambda: graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "h")),
        lambda: graph.cpu(),
        lambda: pickle.loads(pickle.dumps(graph)),
    ):
        with pytest.raises(DGLError, match=r"enable\(\)"):
            use()
    fastsparse_dgl.enable(_devices=(device.split(":")[0],))
    graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
    assert str(graph.device) == device
