"""Negative samples: exact, uniform, in a fixed number."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsparse_core import Adjacency
from fastsparse_core.sampling import negative_edges


def graph(num_dst, num_src, num_edges, device="cpu"):
    row, col = torch.randint(num_dst, (num_edges,)), torch.randint(num_src, (num_edges,))
    return Adjacency.from_coo(row.to(device), col.to(device), (num_dst, num_src))


def absent(adj, self_loops):
    """All pairs (source, destination) without an edge."""
    allowed = torch.ones(adj.shape, dtype=torch.bool)
    allowed[adj.row().cpu().long(), adj.col.cpu().long()] = False
    if not self_loops:
        allowed.fill_diagonal_(False)
    return {(col, row) for row, col in allowed.nonzero().tolist()}


@settings(deadline=None, max_examples=60)
@given(
    num_dst=st.integers(1, 9),
    num_src=st.integers(1, 9),
    num_edges=st.integers(0, 60),
    self_loops=st.sampled_from([True, False]),
)
def test_all_pairs_without_an_edge_and_no_others(num_dst, num_src, num_edges, self_loops):
    adj = graph(num_dst, num_src, num_edges)
    expected = absent(adj, self_loops)
    if not expected:
        with pytest.raises(ValueError, match="adj: every pair of nodes has an edge"):
            negative_edges(adj, 5, self_loops=self_loops)
        return
    found = negative_edges(adj, 60 * len(expected), self_loops=self_loops)
    assert found.shape == (2, 60 * len(expected))
    assert set(map(tuple, found.t().tolist())) == expected


def test_draws_are_uniform(device):
    """Each pair within six standard deviations of its expected number."""
    adj = graph(20, 20, 100, device)
    expected = absent(adj, False)
    count = 200 * len(expected)
    for pairs in (
        negative_edges(adj, count),
        negative_edges(adj, dst=torch.arange(20, device=device).repeat(count // 20)),
    ):
        numbers = torch.bincount((pairs[1] * 20 + pairs[0]).cpu(), minlength=400).view(20, 20)
        mean = numbers.sum(1, keepdim=True) / (numbers > 0).sum(1, keepdim=True)
        off = (numbers - mean).abs() / mean.sqrt()
        assert off[numbers > 0].max() < 6
        assert {(col, row) for row, col in numbers.nonzero().tolist()} == expected


def test_one_for_each_destination(device):
    adj = graph(50, 7, 120, device)
    pairs = absent(adj, True)
    open_rows = torch.tensor(sorted({row for _, row in pairs}))
    if len(open_rows) < 50:
        with pytest.raises(ValueError, match="some node of adj has an edge from every source"):
            negative_edges(adj, dst=torch.zeros(3, dtype=torch.int64, device=device))
        adj = graph(50, 7, 60, device)
        pairs = absent(adj, True)
    dst = torch.randint(50, (1000,), device=device)
    found = negative_edges(adj, dst=dst)
    assert torch.equal(found[1], dst)
    assert set(map(tuple, found.t().tolist())) <= pairs


def test_no_loops_in_a_square_graph_by_default(device):
    adj = graph(6, 6, 10, device)
    found = negative_edges(adj, 2000)
    assert bool((found[0] != found[1]).all())
    looped = negative_edges(adj, 2000, self_loops=True)
    assert bool((looped[0] == looped[1]).any())


def test_a_generator_repeats_draws(device):
    adj = graph(30, 30, 100, device)
    one, other = (negative_edges(adj, 40, generator=torch.Generator(device).manual_seed(3)) for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "either count or dst"),
        ({"count": 1, "dst": torch.tensor([0])}, TypeError, "either count or dst"),
        ({"count": -1}, ValueError, "count: expected a number of at least 0, got -1"),
        ({"dst": [0]}, TypeError, "dst: expected an int64 tensor"),
        ({"dst": torch.tensor([0.0])}, TypeError, "dst: expected an int64 tensor"),
        ({"dst": torch.tensor([0, 6])}, ValueError, "dst: expected numbers from 0 to 5, got 0 to 6"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        negative_edges(graph(6, 6, 5), **arguments)


def test_no_pairs_of_no_edges():
    assert negative_edges(graph(4, 4, 0), 0).shape == (2, 0)
    assert negative_edges(graph(4, 4, 3), dst=torch.tensor([], dtype=torch.int64)).shape == (2, 0)


@pytest.mark.gpu
def test_in_a_captured_step():
    """New pairs in every replay, without a wait for the device."""
    adj = graph(200, 200, 2000, "cuda")
    negative_edges(adj, 1)
    stream, taken = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(taken, stream=stream):
        pairs = negative_edges(adj, 500)
    draws = []
    for _ in range(3):
        taken.replay()
        draws.append(pairs.clone())
    expected = absent(adj, False)
    assert all(set(map(tuple, draw.t().tolist())) <= expected for draw in draws)
    assert not torch.equal(draws[0], draws[1])
