"""One graph over several processes gives what one process gives."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import relative_error
from team import Team
from torch import Tensor, nn

from fastsparse_core import (
    Adjacency,
    additive_attention,
    attention,
    edge_softmax,
    gatv2_attention,
    maxk,
    sddmm,
    spmm,
    ssd,
)
from fastsparse_core.distributed import (
    Partition,
    PartitionedAdjacency,
    all_reduce_gradients,
    exchange_group,
    partition,
)
from fastsparse_core.distributed.exchange import HaloExchange, HaloFeatures, Transfer, column_tiles

pytestmark = pytest.mark.slow
NODES, WIDTH = 60, 8


@pytest.fixture(scope="module", params=[2, 3])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Processes on the CPU."""
    members = Team(request.param)
    yield members
    members.close()


@pytest.fixture(scope="module")
def gpu_team() -> Iterator[Team]:
    """Processes with a GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    members = Team(2, "nccl")
    yield members
    members.close()


def random_graph(kind: str = "random") -> tuple[Tensor, Tensor]:
    """(destinations, sources) of a graph of NODES nodes, not symmetric, with loops and duplicates."""
    generator = torch.Generator().manual_seed(3)
    row = torch.randint(NODES, (500,), generator=generator)
    col = torch.randint(NODES, (500,), generator=generator)
    if kind == "no_halo":
        col = row // 20 * 20 + col % 20
    elif kind == "all_halo":
        col = (row // 20 * 20 + 20 + col % 20) % NODES
    return row, col


def owners(kind: str, size: int) -> Partition:
    """A partition in which ranks own what ``kind`` says."""
    node = torch.arange(NODES)
    if kind == "blocks":
        return partition(torch.stack(random_graph()[::-1]), size, "contiguous", num_nodes=NODES)
    if kind == "shuffled":
        return Partition.from_assignment(
            torch.randperm(NODES, generator=torch.Generator().manual_seed(1)) % size, size
        )
    if kind == "empty_rank":
        return Partition.from_assignment(torch.zeros(NODES, dtype=torch.long), size)
    # Communities of 20 nodes; with two ranks, the first rank has two of them.
    return Partition.from_assignment(((node // 20) % size), size)


def features(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


Operation = Callable[..., Tensor]


def _sum(adj: Adjacency, x: Tensor, value: Tensor) -> Tensor:
    return spmm(adj, x)


def _normalised(adj: Adjacency, x: Tensor, value: Tensor) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    scales = {"scale_dst": adj.inv_sqrt_degree(dtype), "scale_src": adj.inv_sqrt_out_degree(dtype)}
    return spmm(adj, x, value, bias=x.new_ones(x.size(1)), relu=True, **scales)


def _mean(adj: Adjacency, x: Tensor, value: Tensor) -> Tensor:
    return spmm(adj, x.view(-1, 2, x.size(1) // 2), value[:, None].expand(-1, 2), "mean").flatten(1)


def _max(adj: Adjacency, x: Tensor, value: Tensor) -> Tensor:
    return spmm(adj, x, value, "max")


def _dot_product(adj: Adjacency, x: Tensor, value: Tensor) -> Tensor:
    return attention(adj, x * 0.5, x.sin(), x, bias=value, heads=2)


def _gat(adj: Adjacency, x: Tensor, value: Tensor) -> Tensor:
    return additive_attention(adj, x[:, :2], x[:, 2:4], x.view(-1, 2, x.size(1) // 2), bias=value).flatten(1)


def _gatv2(adj: Adjacency, x: Tensor, value: Tensor) -> Tensor:
    return gatv2_attention(adj, x.cos(), x, x.new_ones(2, x.size(1) // 2))


def _unfused(adj: Adjacency, x: Tensor, value: Tensor) -> Tensor:
    score = sddmm(adj, x, x.sin(), scale_src=adj.inv_out_degree(x.dtype))
    return spmm(adj, x, edge_softmax(adj, score + value))


OPERATIONS: dict[str, Operation] = {
    "sum": _sum,
    "normalised": _normalised,
    "mean": _mean,
    "max": _max,
    "attention": _dot_product,
    "additive": _gat,
    "gatv2": _gatv2,
    "unfused": _unfused,
}


def compare(
    rank: int,
    size: int,
    device: torch.device,
    graph: str,
    kind: str,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-12,
    in_group: bool = False,
    **options: Any,
) -> PartitionedAdjacency:
    """Results and gradients of all operations against those of one process."""
    row, col = (end.to(device) for end in random_graph(graph))
    parts = owners(kind, size)
    whole = Adjacency.from_coo(row, col, (NODES, NODES))
    group = exchange_group() if in_group else None
    part = PartitionedAdjacency.from_coo(row, col, parts, group=group, **options)
    x = features(NODES, WIDTH, dtype=dtype).to(device)
    value = features(row.numel(), dtype=dtype, seed=1).to(device)
    weight = features(NODES, WIDTH, dtype=dtype, seed=2).to(device)
    mine = parts.owned_edges(row, rank)
    assert torch.equal(part.in_degree(), part.scatter(whole.in_degree()))
    assert torch.equal(part.out_degree(), part.scatter(whole.out_degree()))
    assert part.has_empty_rows() == whole.has_empty_rows()
    for name, operation in OPERATIONS.items():
        expected_x, expected_value = x.clone().requires_grad_(), value.clone().requires_grad_()
        expected = operation(whole, expected_x, expected_value)
        (expected * weight).sum().backward()
        own_x = part.scatter(x).clone().requires_grad_()
        own_value = value[mine].clone().requires_grad_()
        actual = operation(part, own_x, own_value)
        (actual * part.scatter(weight)).sum().backward()
        assert relative_error(part.gather(actual), expected) < tolerance, name
        assert relative_error(part.gather(own_x.grad), expected_x.grad) < tolerance, name
        if expected_value.grad is not None:
            assert relative_error(own_value.grad, expected_value.grad[mine]) < tolerance, name
    return part


def _compare(
    rank: int, size: int, device: torch.device, graph: str, kind: str, options: dict[str, Any]
) -> Any:
    part = compare(rank, size, device, graph, kind, **options)
    return part.statistics, part.num_halo, part.memory_usage(), repr(part)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("kind", "send"), [("blocks", "needed"), ("shuffled", "needed"), ("shuffled", "all")]
)
def test_operators_equal_one_process(team: Team, kind: str, send: str, overlap: bool) -> None:
    results = team.run(_compare, "random", kind, {"overlap": overlap, "send": send})
    facts = results[0][0]
    assert all(result[0] == facts for result in results)
    assert sum(facts.rows) == NODES
    assert sum(facts.edges) == 500
    assert facts.halo_rows == [result[1] for result in results]
    assert min(facts.halo_rows) > 0
    assert send == "needed" or facts.halo_share == 1
    assert 0 < facts.edge_cut < 1
    assert facts.balance >= 1
    assert 0 < facts.halo_share <= 1
    assert ("local.col" in results[0][2]) == overlap
    assert f"rank 1 of {len(results)}" in results[1][3]


ODD = [("random", "empty_rank"), ("no_halo", "communities"), ("all_halo", "communities")]


@pytest.mark.parametrize("send", ["needed", "all"])
@pytest.mark.parametrize(("graph", "kind"), ODD)
def test_odd_divisions(team: Team, graph: str, kind: str, send: str) -> None:
    results = team.run(_compare, graph, kind, {"send": send})
    facts = results[0][0]
    if kind == "empty_rank":
        assert facts.rows[1:] == [0] * (len(results) - 1)
        assert facts.edges[0] == 500
        assert facts.edge_cut == 0
    elif graph == "no_halo":
        assert facts.edge_cut == 0
        assert (facts.halo_rows == [0] * len(results)) == (send == "needed")
    elif len(results) == 3:
        assert facts.edge_cut == 1


WIDTHS = (1, 47, 100, 256)


@pytest.mark.parametrize("send", ["needed", "all"])
def test_tiles_of_columns(team: Team, send: str) -> None:
    for tiles in (1, 2, 3, 4):
        options = {"send": send, "tiles": tiles}
        team.run(_tiles, "shuffled", torch.float64, 1e-12, options)
        team.run(_tiles, "shuffled", torch.float32, 2e-6, options)
        team.run(_tiles, "shuffled", torch.float32, 1e-2, options | {"halo_dtype": torch.bfloat16})
    team.run(_tiles, "empty_rank", torch.float64, 1e-12, {"send": send, "tiles": 4})


def _tiles(
    rank: int, size: int, device: torch.device, kind: str, dtype: torch.dtype, tolerance: float, options: Any
) -> None:
    """Results and gradients of features, values and bias at several widths, in several tiles of columns."""
    row, col = (end.to(device) for end in random_graph())
    part = PartitionedAdjacency.from_coo(row, col, owners(kind, size), **options)
    whole = Adjacency.from_coo(row, col, (NODES, NODES))
    mine = part.partition.owned_edges(row, rank)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    for width in WIDTHS:
        x, weight = (features(NODES, width, dtype=dtype, seed=seed).to(device) for seed in (0, 2))
        value, bias = (features(n, dtype=dtype, seed=n).to(device) for n in (row.numel(), width))
        tensors = [[x, value, bias], [part.scatter(x), value[mine], bias]]
        results = []
        for adj, given in zip((whole, part), tensors, strict=True):
            x_, value_, bias_ = (tensor.clone().requires_grad_() for tensor in given)
            scales = {"scale_dst": adj.inv_sqrt_degree(exact), "scale_src": adj.inv_sqrt_out_degree(exact)}
            plain = spmm(adj, x_, bias=bias_, **scales)
            weighted = spmm(adj, x_, value_, "mean")
            assert plain.dtype == weighted.dtype == dtype
            seed = weight if adj is whole else part.scatter(weight)
            ((plain + weighted) * seed).sum().backward()
            results.append((plain, weighted, x_.grad, value_.grad, bias_.grad))
        expected, actual = results
        for one, other in zip(expected[:3], actual[:3], strict=True):
            assert relative_error(part.gather(other), one) < tolerance, width
        if mine.numel():
            assert relative_error(actual[3], expected[3][mine]) < tolerance, width
        dist.all_reduce(actual[4])
        assert relative_error(actual[4], expected[4]) < tolerance, width


def test_inputs_travel_once(team: Team) -> None:
    for options in ({"send": "needed"}, {"send": "all"}, {"halo_dtype": torch.bfloat16}):
        team.run(_inputs, options)


def _inputs(rank: int, size: int, device: torch.device, options: Any) -> None:
    """Features without gradient are sent again only if they changed, and always where they need one."""
    row, col = (end.to(device) for end in random_graph())
    parts = [
        PartitionedAdjacency.from_coo(row, col, owners("shuffled", size), cache_inputs=cached, **options)
        for cached in (True, False)
    ]
    sent = []
    exchange = parts[0].exchange
    original = exchange.to_halo
    exchange.to_halo = lambda rows: sent.append(rows.shape) or original(rows)  # type: ignore[method-assign]
    x = parts[0].scatter(features(NODES, 20, dtype=torch.float32).to(device)).clone()
    weight = features(20, 3, dtype=torch.float32, seed=1).to(device).requires_grad_()

    def products() -> None:
        ours, theirs = (spmm(part, x, reduce="mean") @ weight for part in parts)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        grads = [torch.autograd.grad(out.square().sum(), weight)[0] for out in (ours, theirs)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)

    for _ in range(3):
        products()
    assert len(sent) == 1
    assert parts[0].memory_usage()["inputs"] == exchange.num_halo * 20 * 4
    x.mul_(2)
    products()
    assert len(sent) == 2
    x = x.clone()
    products()
    assert len(sent) == 3
    with torch.autocast(device.type, torch.bfloat16):
        products()
        products()
    assert len(sent) == 4
    x.requires_grad_()
    products()
    products()
    assert len(sent) == 6
    with torch.inference_mode():  # inference tensors do not show edits
        x, scale = x.detach().clone(), torch.rand(parts[0].num_dst, device=device)
        for _ in range(2):
            ours, theirs = (spmm(part, x, scale_src=scale) for part in parts)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
            wanted = spmm(parts[1], x * scale[:, None])
            assert relative_error(ours, wanted) < 1e-2  # some features are sent in bfloat16
            x.mul_(3)
            scale.mul_(5)


def test_widths_of_tiles() -> None:
    def widths(width: int, count: int) -> list[int]:
        columns = column_tiles(width, count)
        assert [tile.start for tile in columns[1:]] == [tile.stop for tile in columns[:-1]]
        return [tile.stop - tile.start for tile in columns]

    assert widths(256, 4) == [64, 64, 64, 64]
    assert widths(256, 1) == [256]
    assert widths(300, 4) == [128, 128, 44]
    assert widths(100, 2) == [64, 36]
    assert widths(47, 3) == [16, 16, 15]
    assert widths(1, 4) == [1]
    assert widths(0, 2) == [0]


def test_number_of_tiles(team: Team) -> None:
    for counts in team.run(_number_of_tiles):
        assert counts == {
            "given": 3,
            "in turn": 1,
            "small": 1,
            "large": [1, 1, 2, 4, 4],
            "bf16": 2,
            "hidden": 1,
        }


def _number_of_tiles(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    part = PartitionedAdjacency.from_coo(*random_graph(), owners("shuffled", size), tiles=3)
    counts: dict[str, Any] = {"given": part.num_tiles(256, torch.float32)}
    part.overlap = False
    counts["in turn"] = part.num_tiles(256, torch.float32)
    part.overlap, part.tiles = True, None
    counts["small"] = part.num_tiles(256, torch.float32)
    facts = part.statistics
    part.statistics = replace(facts, halo_rows=[0] * (size - 1) + [1 << 20])
    counts["large"] = [part.num_tiles(width, torch.float32) for width in (1, 47, 100, 256, 1024)]
    part.statistics = replace(facts, halo_rows=[1 << 17] * size)
    counts["bf16"] = part.num_tiles(256, torch.bfloat16)
    part.statistics = replace(facts, halo_rows=[1 << 20] * size, edges=[1 << 24] * size)
    counts["hidden"] = part.num_tiles(256, torch.float32)
    return counts


def test_second_derivatives_are_refused(team: Team) -> None:
    team.run(_second_derivative)


def _second_derivative(rank: int, size: int, device: torch.device) -> None:
    part = PartitionedAdjacency.from_coo(*random_graph(), owners("shuffled", size), tiles=2)
    x = part.scatter(features(NODES, 47)).clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="create_graph: expected False, got True"):
        torch.autograd.grad(spmm(part, x).square().sum(), x, create_graph=True)


def test_float32_and_halo_in_16_bits(team: Team) -> None:
    team.run(_compare, "random", "shuffled", {"dtype": torch.float32, "tolerance": 1e-6})
    results = team.run(_halo_error)
    assert all(1e-4 < error < 8e-3 for error in results), results


def _halo_error(rank: int, size: int, device: torch.device) -> float:
    row, col = random_graph()
    parts = owners("shuffled", size)
    part = PartitionedAdjacency.from_coo(row, col, parts, halo_dtype=torch.bfloat16)
    x = features(NODES, WIDTH, dtype=torch.float32)
    own = part.scatter(x).clone().requires_grad_()
    out = spmm(part, own)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert (
        relative_error(
            part.gather(own.grad),
            Adjacency.from_coo(row, col, (NODES, NODES)).out_degree()[:, None].expand_as(x),
        )
        < 8e-3
    )
    return relative_error(part.gather(out), spmm(Adjacency.from_coo(row, col, (NODES, NODES)), x))


def test_autocast_sends_16_bits(team: Team) -> None:
    team.run(_autocast)


def _autocast(rank: int, size: int, device: torch.device) -> None:
    row, col = random_graph()
    part = PartitionedAdjacency.from_coo(row, col, owners("shuffled", size))
    whole = Adjacency.from_coo(row, col, (NODES, NODES))
    x = features(NODES, WIDTH, dtype=torch.float32)
    value = torch.ones(500)
    mine = part.partition.owned_edges(row, rank)
    for name in ("sum", "attention", "gatv2"):
        expected = OPERATIONS[name](whole, x, value)
        own = part.scatter(x).clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = OPERATIONS[name](part, own, value[mine])
        assert out.dtype == torch.bfloat16
        assert relative_error(part.gather(out), expected) < 2e-2, name
        out.float().sum().backward()
        assert own.grad.dtype == torch.float32
        assert own.grad.isfinite().all()


def test_same_bits_every_time_and_no_memory_kept(team: Team) -> None:
    team.run(_repeat)


def _repeat(rank: int, size: int, device: torch.device) -> None:
    part = PartitionedAdjacency.from_coo(*random_graph(), owners("shuffled", size), tiles=3)
    grads = []
    for _ in range(3):
        x = part.scatter(features(NODES, 47, dtype=torch.float32)).clone().requires_grad_()
        spmm(part, x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    row, col = random_graph()
    order = row.argsort(stable=True)  # in one process, these edges may get gradients with atomics
    part = PartitionedAdjacency.from_coo(row[order], col[order], owners("blocks", size))
    assert part.rows.edge_id is None
    assert part.rows.usage.scattered is None
    gc.collect()
    gc.disable()
    try:
        x = part.scatter(features(NODES, 47)).clone().requires_grad_()
        spmm(part, x).square().sum().backward()
        # A cycle through autograd's graph would hold the features until the collector runs.
        assert not any(isinstance(held, HaloFeatures) for held in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.parametrize("send", ["needed", "all"])
def test_a_product_that_fails_leaves_nothing_on_its_way(team: Team, send: str) -> None:
    team.run(_failure, send)


def _failure(rank: int, size: int, device: torch.device, send: Any) -> None:
    part = PartitionedAdjacency.from_coo(*random_graph(), owners("shuffled", size), tiles=3, send=send)
    x = part.scatter(features(NODES, 47))
    expected = spmm(part, x)
    of_others = _on_their_way()  # objects of earlier tests in this process
    for trained in (False, True):
        for _ in range(2):
            with pytest.raises(ValueError, match="bias: expected 47 entries"):
                spmm(part, x.clone().requires_grad_(trained), bias=features(3))
    gc.collect()  # an exception and its frames hold each other
    assert not [each for each in _on_their_way() if not any(each is other for other in of_others)]
    assert torch.equal(spmm(part, x), expected)


def _on_their_way() -> list[Any]:
    """Received features and messages that are still referenced."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) in (HaloFeatures, Transfer)]


def test_repeated_and_crossed_backward_passes(team: Team) -> None:
    team.run(_backward_again)


def _backward_again(rank: int, size: int, device: torch.device) -> None:
    """A graph that is kept, and two products whose gradients travel at once."""
    row, col = random_graph()
    part = PartitionedAdjacency.from_coo(row, col, owners("shuffled", size), tiles=3)
    whole = Adjacency.from_coo(row, col, (NODES, NODES))
    x = features(NODES, 47)
    results = []
    for adj, own in ((whole, x), (part, part.scatter(x))):
        own = own.clone().requires_grad_()
        loss = (spmm(adj, own, relu=True) * spmm(adj, own.cos()).sin()).sum()
        first = torch.autograd.grad(loss, own, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(loss, own)[0], first)
        results.append(first)
    assert relative_error(part.gather(results[1]), results[0]) < 1e-12


def test_all_rows_are_sent_where_most_are_needed(team: Team) -> None:
    for sends_all, share in team.run(_sends_all):
        assert sends_all == (share >= 0.8)


def _sends_all(rank: int, size: int, device: torch.device) -> tuple[bool, float]:
    parts = owners("shuffled", size)
    shares = [PartitionedAdjacency.from_coo(*random_graph(), parts, send="needed").statistics.halo_share]
    few = [end[:40] for end in random_graph()]
    few_part = PartitionedAdjacency.from_coo(few[0], few[1], parts, group=exchange_group())
    assert not few_part.exchange.sends_all
    assert 0 < few_part.statistics.halo_share < 0.8
    return PartitionedAdjacency.from_coo(*random_graph(), parts).exchange.sends_all, shares[0]


def test_local_products_run_while_features_travel(team: Team) -> None:
    for forward, backward in team.run(_order):
        assert forward == ["start", "start", "local", "wait", "halo", "wait", "halo"]
        assert backward == ["halo", "start", "halo", "start", "local", "wait", "wait"]


def _order(rank: int, size: int, device: torch.device) -> tuple[list[str], list[str]]:
    """What happens in which order in a product's forward and backward pass."""
    modules = [sys.modules[f"fastsparse_core.ops.{name}"] for name in ("spmm", "_spmm_plan")]
    part = PartitionedAdjacency.from_coo(*random_graph(), owners("shuffled", size), send="all", tiles=2)
    structures = {"local": part.local, "halo": part.halo}
    names = {adj.handle: name for name, both in structures.items() for adj in (both, both.t())}
    events: list[str] = []

    def logged(original: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            events.append(name(*arguments))
            return original(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(
                module, "launch_spmm", logged(module.launch_spmm, lambda adj, *_: names[adj.handle])
            )
        patch.setattr(HaloExchange, "_blocks", logged(HaloExchange._blocks, lambda *_: "start"))
        patch.setattr(Transfer, "wait", logged(Transfer.wait, lambda *_: "wait"))
        out = spmm(part, part.scatter(features(NODES, 32)).clone().requires_grad_())
        forward = events.copy()
        out.sum().backward()
    return forward, events[len(forward) :]


def test_construction_from_own_edges_and_from_csr(team: Team) -> None:
    team.run(_construct)


def _construct(rank: int, size: int, device: torch.device) -> None:
    row, col = random_graph()
    whole = Adjacency.from_coo(row, col, (NODES, NODES))
    x = features(NODES, WIDTH)
    for kind in ("blocks", "shuffled", "empty_rank"):
        parts = owners(kind, size)
        mine = parts.owned_edges(row, rank)
        for part in (
            PartitionedAdjacency.from_coo(row[mine].int(), col[mine].int(), parts),
            PartitionedAdjacency.from_csr(whole.rowptr, whole.col, parts, device="cpu"),
        ):
            assert part.prepare().num_edges == mine.numel()
            assert relative_error(part.gather(spmm(part, part.scatter(x))), spmm(whole, x)) < 1e-12


def test_self_loops(team: Team) -> None:
    team.run(_loops)


def _loops(rank: int, size: int, device: torch.device) -> None:
    row, col = random_graph()
    parts = owners("shuffled", size)
    mine = parts.owned_edges(row, rank)
    x, value = features(NODES, WIDTH), features(500, seed=4)
    for kind in ("append", "replace"):
        whole = Adjacency.from_coo(row, col, (NODES, NODES), self_loops=kind)
        expected = spmm(whole, x, whole.extend_value(value, 2.0))
        without = PartitionedAdjacency.from_coo(row, col, parts)
        for part in (
            PartitionedAdjacency.from_coo(row, col, parts, self_loops=kind),
            without.with_self_loops(kind),
        ):
            own = part.extend_value(value[mine], 2.0)
            assert relative_error(part.gather(spmm(part, part.scatter(x), own)), expected) < 1e-12


def test_all_reduce_gradients(team: Team) -> None:
    team.run(_reduce)


def _reduce(rank: int, size: int, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).to(torch.bfloat16))
    model[0].weight.grad = torch.full((3, 2), rank + 1.0)
    model[0].bias.grad = torch.arange(3.0)
    model[1].weight.grad = torch.ones(1, 3, dtype=torch.bfloat16)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    partial = nn.Parameter(torch.ones(2, 2))  # like a parameter of an edge type that other ranks do not have
    if rank == 1:
        partial.grad = torch.full((2, 2), 3.0)
    all_reduce_gradients([*model.parameters(), frozen, partial])
    assert partial.grad is not None
    assert partial.grad.eq(3).all()
    assert frozen.grad is None
    assert model[0].weight.grad.eq(size * (size + 1) / 2).all()
    assert model[0].bias.grad.tolist() == [0, size, 2 * size]
    assert model[1].weight.grad.tolist() == [[size] * 3]
    assert model[1].bias.grad is None


def test_all_reduce_gradients_of_any_form(team: Team) -> None:
    team.run(_forms)


def _forms(rank: int, size: int, device: torch.device) -> None:
    own, total = rank + 1.0, size * (size + 1) / 2
    shared = torch.full((2, 3), own)
    negative = torch.full((2, 3), complex(0, -own)).conj().imag
    assert negative.is_neg()
    conjugate = torch.full((2, 3), complex(own, 0)).conj()
    grads = [
        torch.full((3, 2), own).t(),
        torch.full((1,), own).expand(2, 3),
        shared,
        shared,
        negative,
        conjugate,
    ]
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    if rank == 0:  # a gradient in another form than those of the other ranks
        parameters[4].grad = negative.resolve_neg()
    embedding = nn.Embedding(size + 1, 2, sparse=True)
    if rank > 0:
        embedding(torch.tensor([rank, size])).sum().backward()
    all_reduce_gradients([*parameters, *embedding.parameters(), parameters[0]])
    for parameter in parameters:
        assert parameter.grad is not None
        assert parameter.grad.eq(total).all()
    assert parameters[0].grad is grads[0]
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.to_dense().tolist() == [
        [count, count] for count in (0, *[1] * (size - 1), size - 1)
    ]


def test_all_reduce_gradients_of_other_parameters(team: Team) -> None:
    team.run(_other_parameters)


def _other_parameters(rank: int, size: int, device: torch.device) -> None:
    last = rank == size - 1
    with pytest.raises(ValueError, match=rf"number of parameters: .* all ranks, .*\[{size - 1}\] differ"):
        all_reduce_gradients([nn.Parameter(torch.ones(2)) for _ in range(1 + last)])
    other = nn.Parameter(torch.ones(3) if last else torch.ones(2))
    with pytest.raises(ValueError, match=r"parameter 1: expected the same on all ranks, got '\([23],\) of"):
        all_reduce_gradients([nn.Parameter(torch.ones(2)), other])


def test_errors(team: Team) -> None:
    team.run(_errors)


def _errors(rank: int, size: int, device: torch.device) -> None:
    row, col = random_graph()
    parts = owners("blocks", size)
    with pytest.raises(ValueError, match=f"expected {size} parts, one per process, got {size + 1}"):
        PartitionedAdjacency.from_coo(row, col, owners("blocks", size + 1))
    with pytest.raises(ValueError, match=f"row: expected nodes from 0 to {NODES - 1}"):
        PartitionedAdjacency.from_coo(row + 1, col, parts)
    with pytest.raises(TypeError, match="col: expected an int32 or int64 tensor, got torch.float32"):
        PartitionedAdjacency.from_coo(row, col.float(), parts)
    with pytest.raises(ValueError, match="halo_dtype: expected a floating dtype or None, got torch.int8"):
        PartitionedAdjacency.from_coo(row, col, parts, halo_dtype=torch.int8)
    with pytest.raises(ValueError, match="send: expected 'auto', 'needed' or 'all', got 'some'"):
        PartitionedAdjacency.from_coo(row, col, parts, send="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tiles: expected at least 1 or None, got 0"):
        PartitionedAdjacency.from_coo(row, col, parts, tiles=0)
    with pytest.raises(ValueError, match=f"rowptr: expected num_nodes \\+ 1 = {NODES + 1} entries, got 3"):
        PartitionedAdjacency.from_csr(torch.zeros(3, dtype=torch.long), col, parts)
    last = size - 1
    for name, usual, other in (
        ("tiles", None, 2),
        ("halo_dtype", torch.float16, torch.bfloat16),
        ("send", "all", "needed"),
        ("cache_inputs", False, True),
    ):
        mine = other if rank == last else usual
        with pytest.raises(ValueError, match=rf"{name}: expected the same on all ranks, .*\[{last}\] differ"):
            PartitionedAdjacency.from_coo(row, col, parts, **{name: mine})
    unlike = owners("blocks", size) if rank else owners("empty_rank", size)
    with pytest.raises(ValueError, match=r"partition.starts: expected the same on all ranks"):
        PartitionedAdjacency.from_coo(row, col, unlike)
    part = PartitionedAdjacency.from_coo(row, col, parts)
    x = part.scatter(features(NODES, WIDTH))
    with pytest.raises(ValueError, match=f"x: expected num_src = {part.num_dst} rows"):
        spmm(part, features(NODES, WIDTH))
    with pytest.raises(ValueError, match="value_layout: expected 'edges' for a PartitionedAdjacency"):
        spmm(part, x, value_layout="me_bcrs")
    with pytest.raises(ValueError, match=f"x: expected {NODES} rows, one per node"):
        part.scatter(x)
    with pytest.raises(ValueError, match=f"x: expected {part.num_dst} rows, one per node of this rank"):
        part.gather(features(NODES, WIDTH))
    for refused in (part.t, part.row, lambda: part.col, lambda: part.to("meta"), lambda: copy.deepcopy(part)):
        with pytest.raises(NotImplementedError, match="a PartitionedAdjacency does not support"):
            refused()
    kept = maxk(x.float(), 2)
    with pytest.raises(NotImplementedError, match="ssd"):
        ssd(part, kept)


# ---------------------------------------------------------------- layers


def train(
    rank: int,
    size: int,
    device: torch.device,
    make: Callable[[], nn.Module],
    call: Any,
    whole: Any,
    part: PartitionedAdjacency,
) -> None:
    """Two layers of a kind: results, gradients of features and parameters, after a step of training too."""
    torch.manual_seed(0)
    model = make().to(device).double()
    ours = copy.deepcopy(model)
    x, target = features(NODES, WIDTH).to(device), features(NODES, WIDTH, seed=5).to(device)
    models = (model, ours)
    optimisers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    for _ in range(2):
        for optimiser in optimisers:
            optimiser.zero_grad()
        whole_x, own_x = x.clone().requires_grad_(), part.scatter(x).clone().requires_grad_()
        expected = call(model, whole_x, whole)
        (expected - target).square().mean().backward()
        actual = call(ours, own_x, part)
        ((actual - part.scatter(target)).square().sum() / target.numel()).backward()
        all_reduce_gradients(ours)
        assert relative_error(part.gather(actual), expected) < 1e-12
        assert relative_error(part.gather(own_x.grad), whole_x.grad) < 1e-12
        for (name, one), other in zip(model.named_parameters(), ours.parameters(), strict=True):
            # The gradient of a bias of keys is only rounding, because softmax ignores it.
            difference = (other.grad - one.grad).norm()
            assert difference < 1e-12 * max(one.grad.norm(), expected.norm() / target.numel()), name
        for optimiser in optimisers:
            optimiser.step()


class _Two(nn.Module):
    """Two layers with a ReLU between them."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second


def _pyg_call(model: Any, x: Tensor, graph: Any) -> Tensor:
    return model.second(model.first(x, graph).relu(), graph)


def _pyg_layers(rank: int, size: int, device: torch.device) -> None:
    import fastsparse_pyg as pyg

    row, col = (end.to(device) for end in random_graph())
    whole = torch.stack([col, row])
    part = PartitionedAdjacency.from_coo(row, col, owners("shuffled", size))
    makers: dict[str, Callable[[], nn.Module]] = {
        "gcn": lambda: _Two(pyg.FastGCNConv(WIDTH, 16), pyg.FastGCNConv(16, WIDTH, cached=True)),
        "sage": lambda: _Two(pyg.FastSAGEConv(WIDTH, 16), pyg.FastSAGEConv(16, WIDTH, aggr="max")),
        "gin": lambda: _Two(
            pyg.FastGINConv(nn.Linear(WIDTH, 4), train_eps=True), pyg.FastGINConv(nn.Linear(4, WIDTH))
        ),
        "gat": lambda: _Two(
            pyg.FastGATConv(WIDTH, 4, heads=2), pyg.FastGATConv(8, WIDTH, heads=2, concat=False)
        ),
        "gatv2": lambda: _Two(pyg.FastGATv2Conv(WIDTH, 4, heads=2), pyg.FastGATv2Conv(8, WIDTH)),
        "transformer": lambda: _Two(
            pyg.FastTransformerConv(WIDTH, 4, heads=2), pyg.FastTransformerConv(8, WIDTH, beta=True)
        ),
        "agnn": lambda: _Two(pyg.FastAGNNConv(), pyg.FastAGNNConv()),
    }
    for make in makers.values():
        train(rank, size, device, make, _pyg_call, whole, part)
    weight = features(row.numel(), seed=6).abs().to(device)
    mine = part.partition.owned_edges(row, rank)
    torch.manual_seed(0)
    conv = pyg.FastGCNConv(WIDTH, 4).to(device).double()
    x = features(NODES, WIDTH).to(device)
    for trained in (False, True):  # trained weights make degrees differentiable
        all_weights = weight.clone().requires_grad_(trained)
        own_weights = weight[mine].clone().requires_grad_(trained)
        expected, actual = conv(x, whole, all_weights), conv(part.scatter(x), part, own_weights)
        assert relative_error(part.gather(actual), expected) < 1e-12
        if trained:
            expected.square().sum().backward()
            actual.square().sum().backward()
            assert relative_error(own_weights.grad, all_weights.grad[mine]) < 1e-12
    with pytest.raises(NotImplementedError, match="PyG's and DGL's own code"):
        pyg.FastSAGEConv(WIDTH, 4, aggr="median").double()(
            part.scatter(features(NODES, WIDTH)).to(device), part
        )


def test_pyg_layers(team: Team) -> None:
    pytest.importorskip("torch_geometric")
    if team.size == 2:
        pytest.skip("three processes cover it")
    team.run(_pyg_layers)


def _dgl_call(model: Any, x: Tensor, graph: Any) -> Tensor:
    return model.second(graph, model.first(graph, x).flatten(1).relu()).flatten(1)


def _dgl_layers(rank: int, size: int, device: torch.device) -> None:
    import fastsparse_dgl as fdgl
    from fastsparse_dgl.compat import dgl

    row, col = random_graph()
    node = torch.arange(NODES)
    row, col = torch.cat([row, node]), torch.cat([col, node])
    whole = dgl.graph((col, row), num_nodes=NODES)
    part = PartitionedAdjacency.from_coo(row.to(device), col.to(device), owners("shuffled", size))
    makers: dict[str, Callable[[], nn.Module]] = {
        "gcn": lambda: _Two(fdgl.FastGraphConv(WIDTH, 16), fdgl.FastGraphConv(16, WIDTH, norm="left")),
        "sage": lambda: _Two(fdgl.FastSAGEConv(WIDTH, 16, "mean"), fdgl.FastSAGEConv(16, WIDTH, "gcn")),
        "gat": lambda: _Two(fdgl.FastGATConv(WIDTH, 4, 2), fdgl.FastGATConv(8, WIDTH, 1)),
        "dotgat": lambda: _Two(fdgl.FastDotGatConv(WIDTH, 4, 2), fdgl.FastDotGatConv(8, WIDTH, 1)),
    }
    for make in makers.values():
        train(rank, size, device, make, _dgl_call, whole, part)


def test_dgl_layers(team: Team) -> None:
    if team.size == 3:
        pytest.skip("two processes cover it")
    try:
        import fastsparse_dgl  # noqa: F401
    except ImportError as error:
        pytest.skip(f"needs DGL: {error}")
    team.run(_dgl_layers)


@pytest.mark.gpu
def test_two_gpus(gpu_team: Team) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        for overlap in (True, False):
            options = {"dtype": dtype, "tolerance": tolerance, "overlap": overlap}
            gpu_team.run(_compare, "random", "shuffled", options)
    for send in ("needed", "all"):
        gpu_team.run(_compare, "random", "empty_rank", {"send": send})
        gpu_team.run(_compare, "no_halo", "communities", {"send": send})
        gpu_team.run(_compare, "random", "shuffled", {"send": send, "in_group": True})
        for tiles in (1, 3, 4):
            options = {"send": send, "tiles": tiles}
            gpu_team.run(_tiles, "shuffled", torch.float32, 2e-6, options)
            gpu_team.run(_tiles, "shuffled", torch.float32, 1e-2, options | {"halo_dtype": torch.bfloat16})
    gpu_team.run(_pyg_layers)


# ---------------------------------------------------------------- partitions


def test_blocks_have_about_as_many_edges() -> None:
    degree = torch.randint(0, 50, (1000,), generator=torch.Generator().manual_seed(0))
    degree[:100] = 500
    row = torch.repeat_interleave(torch.arange(1000), degree)
    for graph, nodes in ((torch.stack([row, row]), 1000), (Adjacency.from_coo(row, row, (1000, 1000)), None)):
        parts = partition(graph, 4, "contiguous", num_nodes=nodes)
        assert parts.num_parts == 4
        assert parts.num_nodes == 1000
        assert parts.order is None
        costs = [float((degree[a:b] + 16).sum()) for a, b in pairwise(parts.starts)]
        assert max(costs) / min(costs) < 1.05
    empty = partition(torch.empty(2, 0, dtype=torch.long), 3, num_nodes=0)
    assert empty.starts == (0, 0, 0, 0)
    few = partition(torch.tensor([[0], [0]]), 3, "contiguous", num_nodes=1)
    assert few.num_nodes == 1
    assert sum(few.size(rank) for rank in range(3)) == 1


def test_partition_of_an_assignment() -> None:
    owner = torch.tensor([2, 0, 2, 0, 1])
    parts = Partition.from_assignment(owner, 4)
    assert parts.starts == (0, 2, 3, 5, 5)
    assert [parts.nodes(rank).tolist() for rank in range(4)] == [[1, 3], [4], [0, 2], []]
    x = torch.arange(5.0)
    assert torch.equal(
        torch.cat([parts.scatter(x, rank) for rank in range(4)])[parts.position(torch.arange(5))], x
    )
    assert parts.owned_edges(torch.tensor([4, 0, 3, 2]), 2).tolist() == [1, 3]


def test_metis_cuts_few_edges() -> None:
    pytest.importorskip("pymetis")
    # Two cliques and one edge between them, nodes in mixed order.
    ends = torch.combinations(torch.arange(20)).t()
    edges = torch.cat([2 * ends, 2 * ends + 1, torch.tensor([[0], [1]])], dim=1)
    parts = partition(edges, 2, "metis", num_nodes=40)
    assert {tuple((parts.nodes(rank) % 2).unique().tolist()) for rank in range(2)} == {(0,), (1,)}


def test_partition_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    with pytest.raises(ValueError, match="num_parts: expected at least 1, got 0"):
        partition(edges, 0, num_nodes=2)
    with pytest.raises(ValueError, match="method: expected 'auto', 'metis' or 'contiguous', got 'random'"):
        partition(edges, 2, "random", num_nodes=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_nodes: expected the number of nodes"):
        partition(edges, 2)
    with pytest.raises(ValueError, match=r"as many destinations as sources, got shape \(2, 3\)"):
        partition(Adjacency.from_coo(*edges, (2, 3)), 2)
    with pytest.raises(ValueError, match="owner: expected ranks from 0 to 1, got 0 to 2"):
        Partition.from_assignment(torch.tensor([0, 2]), 2)
    with pytest.raises(ValueError, match="owner: expected integers"):
        Partition.from_assignment(torch.tensor([0.0, 1.0]), 2)
    monkeypatch.setattr("fastsparse_core.distributed.partitions._metis", lambda: None)
    with pytest.raises(ImportError, match="needs pymetis, pyg-lib or torch-sparse"):
        partition(edges, 2, "metis", num_nodes=2)
    assert partition(edges, 2, num_nodes=2).method == "contiguous"


def test_operators_check_the_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        PartitionedAdjacency.from_coo(torch.tensor([0]), torch.tensor([0]), Partition((0, 1)))
