"""Neighbour sampling against brute force, its chances, and that nothing depends on threads or devices."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsparse_core import _C, Adjacency
from fastsparse_core.ops._operands import zero_padded
from fastsparse_core.sampling import (
    Edges,
    FeatureTable,
    NeighborSampler,
    Sample,
    draw,
    features,
    host_rows,
    prefetched,
)

LAYOUTS = {
    "plain": {},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "induced": {"induced": True},
    "blocks": {"blocks": True},
    "disjoint induced": {"disjoint": True, "induced": True},
}
AUTHORS, PAPERS = 30, 80


def random_graph(num_nodes: int, num_edges: int, device: str = "cpu", seed: int = 0, heavy: bool = True):
    """Edges in random order, repeats, a heavy row, isolated nodes: (destinations, sources, structure)."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(max(num_nodes * 3 // 4, 1), (num_edges,), generator=generator)
    col = torch.randint(num_nodes, (num_edges,), generator=generator)
    if heavy:
        row[: num_edges // 4] = min(2, num_nodes - 1)
    return row, col, Adjacency.from_coo(row.to(device), col.to(device), (num_nodes, num_nodes))


def check(
    sample: Sample, row: Tensor, col: Tensor, seeds: Tensor, fanouts: list[int], **layout: bool
) -> None:
    """What must hold of a batch, whatever was drawn, edge by edge."""
    replace, disjoint = layout.get("replace", False), layout.get("disjoint", False)
    induced, blocks = layout.get("induced", False), layout.get("blocks", False)
    nodes, counts = sample.nodes.cpu(), sample.num_nodes
    neighbours: dict[int, list[int]] = {}
    for edge, dst in enumerate(row.tolist()):
        neighbours.setdefault(dst, []).append(edge)
    assert len(counts) == len(fanouts) + 1
    assert sum(counts) == nodes.numel()
    assert torch.equal(nodes[: counts[0]], seeds)
    seed_of = sample.seed_of.tolist() if disjoint else [0] * nodes.numel()
    assert seed_of[: counts[0]] == (list(range(counts[0])) if disjoint else [0] * counts[0])
    names = list(zip(seed_of, nodes.tolist(), strict=True))
    later = names[counts[0] :]
    assert len(set(later)) == len(later)
    assert not set(later) & set(names[: counts[0]])

    def check_hop(edges: Iterable[tuple[int, int, int]], first: int, last: int, fanout: int) -> list[int]:
        """Edges (source, destination, id) of one hop; returns the numbers of the sources."""
        drawn: dict[int, list[int]] = {dst: [] for dst in range(first, last)}
        sources = []
        for source, dst, edge in edges:
            assert row[edge] == nodes[dst]
            assert col[edge] == nodes[source]
            assert seed_of[source] == seed_of[dst]
            drawn[dst].append(edge)
            sources.append(source)
        for dst, ids in drawn.items():
            own = neighbours.get(int(nodes[dst]), [])
            if fanout < 0:
                assert sorted(ids) == own
            elif replace:
                assert len(ids) == (fanout if own else 0)
            else:
                assert len(ids) == min(fanout, len(own))
                assert len(set(ids)) == len(ids)
        return sources

    ends = torch.tensor(counts).cumsum(0).tolist()
    if blocks:
        for hop, block in enumerate(sample.blocks):
            check_edges(block)
            assert block.shape == (ends[hop], ends[hop + 1])
            sources = check_hop(triples(block), 0, ends[hop], fanouts[hop])
            check_order(sources, ends[hop], ends[hop + 1])
        return
    check_edges(sample.edges)
    assert sample.edges.shape == (nodes.numel(), nodes.numel())
    if induced:
        first_number = {name: number for number, name in reversed(list(enumerate(names)))}
        expected = Counter()
        for dst, (owner, node) in enumerate(names):
            for edge in neighbours.get(node, []):
                source = first_number.get((owner, int(col[edge])))
                if source is not None:
                    expected[source, dst, edge] += 1
        assert Counter(triples(sample.edges)) == expected
        return
    edges, begin = triples(sample.edges), 0
    for hop, fanout in enumerate(fanouts):
        end = begin + sample.edges.counts[hop]
        sources = check_hop(edges[begin:end], ends[hop - 1] if hop else 0, ends[hop], fanout)
        check_order(sources, ends[hop], ends[hop + 1])
        begin = end
    assert begin == len(edges)


def check_order(sources: list[int], before: int, after: int) -> None:
    """New nodes are numbered in the order in which the hop's edges name them."""
    new = list(dict.fromkeys(source for source in sources if source >= before))
    assert new == list(range(before, after))


def triples(edges: Edges) -> list[tuple[int, int, int]]:
    source, dst = edges.edge_index.tolist()
    return list(zip(source, dst, edges.edge_id.tolist(), strict=True))


def check_edges(edges: Edges) -> None:
    """The structure is that of the edges."""
    source, dst = edges.edge_index
    assert torch.equal(edges.col, source.int())
    assert (dst.diff() >= 0).all()
    again = Adjacency.from_coo(dst, source, edges.shape)
    made = edges.adjacency
    assert torch.equal(edges.rowptr, again.rowptr)
    assert torch.equal(made.inv_degree(), again.inv_degree())
    if edges.edge_index.is_cuda and made.has_row_split and edges.shape[0]:
        assert torch.equal(made.row_split.slices[:, 0], made.rowptr[:-1])
        assert torch.equal(made.row_split.slices.view(torch.int32)[:, 2].long(), made.in_degree())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fanouts", [[3], [5, 4, 3], [-1, 2], [40, -1], [0, 2], [1, 17, 0]])
def test_every_edge_is_one_of_the_graph(layout, fanouts, device, poisoned_memory):
    row, col, graph = random_graph(200, 2000, device)
    sampler = NeighborSampler(graph, fanouts, **LAYOUTS[layout])
    seeds = torch.tensor([3, 2, 199, 7, 2, 150])  # the heavy row twice, and isolated ones
    for seed in range(3):
        sample = sampler.sample(seeds.to(device), seed=seed)
        check(sample, row, col, seeds, fanouts, **LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_few_seeds_of_a_large_graph(layout, device):
    """Nodes are found by keys: a place for every node would take more than the batch's table."""
    row, col, graph = random_graph(20000, 60000, device)
    seeds = torch.tensor([2, 7000, 2, 19999])
    sampler = NeighborSampler(graph, [3, 2], **LAYOUTS[layout])
    for seed in range(3):
        sample = sampler.sample(seeds.to(device), seed=seed)
        check(sample, row, col, seeds, [3, 2], **LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_beyond_31_bits(layout, device):
    """The last entries of a structure whose other entries are not read, so that they need no memory."""
    _, _, graph = random_graph(300, 3000, device)
    before = 3 * 2**30
    graph = Adjacency.from_csr(graph.rowptr, graph.col, graph.shape)
    seeds = torch.tensor([2, 7, 2, 299], device=device)
    expected = NeighborSampler(graph, [4, -1, 3], **LAYOUTS[layout]).sample(seeds, seed=1)
    late = Adjacency(graph.rowptr + before, graph.col, graph.shape)
    late._built.results["plain_structure"] = _C.CsrStructure(
        rowptr=late.rowptr,
        col=(late.col.data_ptr() - 4 * before) % 2**64,
        edge_id=None,
        edge_id_is_64bit=False,
        num_rows=late.num_dst,
        num_cols=late.num_src,
        num_edges=before + late.num_edges,
    )
    found = NeighborSampler(late, [4, -1, 3], **LAYOUTS[layout]).sample(seeds, seed=1)
    for edges in found.blocks or [found.edges]:
        edges.edge_id.sub_(before)
        assert edges.edge_id.min() >= 0
    assert_same(found, expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_graph(data):
    """On the device that the test runs on: graphs, seeds and fan-outs of any kind."""
    device = "cuda" if torch.cuda.is_available() and _C.build_info()["cuda"] else "cpu"
    num_nodes = data.draw(st.integers(1, 30))
    num_edges = data.draw(st.integers(0, 80))
    layout = LAYOUTS[data.draw(st.sampled_from(list(LAYOUTS)))]
    fanouts = data.draw(st.lists(st.integers(-1, 6), min_size=1, max_size=3))
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, num_nodes - 1), max_size=8)), dtype=torch.int64)
    row, col, graph = random_graph(num_nodes, num_edges, device, seed=data.draw(st.integers(0, 99)))
    sample = NeighborSampler(graph, fanouts, **layout).sample(seeds)
    check(sample, row, col, seeds, fanouts, **layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_draw_the_same(layout, device, monkeypatch):
    """Hops that run in parts of their own, with reads between, give the batch that one part gives."""
    _, _, graph = random_graph(300, 3000, device)
    weight = torch.rand(3000, device=device)
    sampler = NeighborSampler(graph, [4, -1, 3, 50], weight=weight, **LAYOUTS[layout])
    seeds = torch.arange(10, 40, device=device)
    whole = sampler.sample(seeds, seed=5)
    monkeypatch.setattr(draw, "_MOST_SLOTS", 40)
    assert_same(sampler.sample(seeds, seed=5), whole)


def assert_same(found: Sample, expected: Sample) -> None:
    assert torch.equal(found.nodes.cpu(), expected.nodes.cpu())
    assert found.num_nodes == expected.num_nodes
    if expected.seed_of is not None:
        assert torch.equal(found.seed_of.cpu(), expected.seed_of.cpu())
    pairs = zip(found.blocks or [found.edges], expected.blocks or [expected.edges], strict=True)
    for ours, theirs in pairs:
        assert ours.counts == theirs.counts
        assert torch.equal(ours.edge_index.cpu(), theirs.edge_index.cpu())
        assert torch.equal(ours.edge_id.cpu(), theirs.edge_id.cpu())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_seed_gives_one_batch(layout, weighted, device):
    """Again, with more threads, and on the CPU."""
    _, _, graph = random_graph(5000, 60000, device)
    weight = torch.rand(60000, generator=torch.Generator().manual_seed(1)) if weighted else None
    seeds = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:200]

    def sample(on: Adjacency, seed: int) -> Sample:
        of_graph = NeighborSampler(on, [15, 10], weight=weight, **LAYOUTS[layout])
        return of_graph.sample(seeds.to(on.device), seed=seed)

    expected = sample(graph, 1)
    assert_same(sample(graph, 1), expected)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert_same(sample(graph.cpu(), 1), expected)
    finally:
        torch.set_num_threads(before)
    nodes = sample(graph, 2).nodes
    assert nodes.numel() != expected.nodes.numel() or not torch.equal(nodes, expected.nodes)


def test_torch_seeds_batches():
    _, _, graph = random_graph(100, 2000)
    sampler = NeighborSampler(graph, [5])
    torch.manual_seed(3)
    first = sampler.sample(torch.arange(10))
    second = sampler.sample(torch.arange(10))
    torch.manual_seed(3)
    assert_same(sampler.sample(torch.arange(10)), first)
    assert not torch.equal(first.edges.edge_id, second.edges.edge_id)


# ---------------------------------------------------------------- probabilities


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """How many standard deviations the statistic is above its mean."""
    used = expected > 0
    assert counts[~used].sum() == 0
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    freedom = int(used.sum()) - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize(("degree", "fanout"), [(6, 3), (7, 1), (5, 4), (9, 6)])
def test_sets_without_replacement_are_equally_likely(degree, fanout, device):
    """One star: all seeds are its centre, and each draws for itself."""
    draws = 40000
    graph = Adjacency.from_coo(
        torch.zeros(degree, dtype=torch.int64, device=device),
        torch.arange(1, degree + 1, device=device),
        (degree + 1, degree + 1),
    )
    sampler = NeighborSampler(graph, [fanout])
    sample = sampler.sample(torch.zeros(draws, dtype=torch.int64, device=device), seed=11)
    sets = (1 << sample.edges.edge_id.view(draws, fanout)).sum(1).cpu()
    counts = torch.bincount(sets, minlength=1 << degree).double()
    of_size = torch.tensor([bin(mask).count("1") == fanout for mask in range(1 << degree)])
    expected = of_size.double() * draws / math.comb(degree, fanout)
    assert abs(chi_square(counts, expected)) < 4


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("degree", [5, 300])
def test_weighted_draws(replace, degree, device):
    """The first of weighted draws, and with replacement every one, is in proportion to the weights."""
    draws, fanout = 30000, 2 if replace else 1
    weight = torch.arange(degree, dtype=torch.float32) % 7  # some are zeros
    graph = Adjacency.from_coo(
        torch.zeros(degree, dtype=torch.int64, device=device),
        torch.arange(degree, device=device),
        (degree, degree),
    )
    sampler = NeighborSampler(graph, [fanout], weight=weight.to(device), replace=replace)
    sample = sampler.sample(torch.zeros(draws, dtype=torch.int64, device=device), seed=2)
    counts = torch.bincount(sample.edges.edge_id.cpu(), minlength=degree).double()
    expected = weight.double() / weight.sum() * draws * fanout
    assert abs(chi_square(counts, expected)) < 4


def test_weighted_sets_without_replacement(device):
    """Pairs of three, with the chances that drawing one after the other gives."""
    draws = 40000
    weight = torch.tensor([1.0, 2.0, 5.0])
    graph = Adjacency.from_coo(
        torch.zeros(3, dtype=torch.int64, device=device), torch.arange(3, device=device), (3, 3)
    )
    sampler = NeighborSampler(graph, [2], weight=weight.to(device))
    sample = sampler.sample(torch.zeros(draws, dtype=torch.int64, device=device), seed=9)
    left_out = 3 - sample.edges.edge_id.view(draws, 2).sum(1).cpu()
    chance = weight.double() / weight.sum()
    expected = torch.zeros(3, dtype=torch.float64)
    for a in range(3):
        for b in set(range(3)) - {a}:
            expected[3 - a - b] += chance[a] * chance[b] / (1 - chance[a])
    assert abs(chi_square(torch.bincount(left_out, minlength=3).double(), expected * draws)) < 4


@pytest.mark.parametrize("fanout", [2, 40, -1])
def test_no_weight_is_never_drawn(fanout, device):
    row, _, graph = random_graph(50, 2000, device)
    weight = (torch.arange(2000) % 3 == 0).float()
    weight[row == 5] = 0
    sampler = NeighborSampler(graph, [fanout], weight=weight.to(device))
    sample = sampler.sample(torch.arange(50, device=device))
    drawn = sample.edges.edge_id.cpu()
    assert (weight[drawn] > 0).all()
    per_row = torch.bincount(row[weight > 0], minlength=50)
    expected = per_row if fanout < 0 else per_row.clamp(max=fanout)
    assert torch.equal(torch.bincount(row[drawn], minlength=50), expected)


# ---------------------------------------------------------------- edge types


def hetero(device: str = "cpu"):
    generator = torch.Generator().manual_seed(0)
    edges = {
        ("author", "writes", "paper"): (PAPERS, AUTHORS, 400),
        ("paper", "cites", "paper"): (PAPERS, PAPERS, 600),
        ("paper", "of", "author"): (AUTHORS, PAPERS, 300),
    }
    lists, graph = {}, {}
    for name, (num_dst, num_src, count) in edges.items():
        row = torch.randint(num_dst, (count,), generator=generator)
        col = torch.randint(num_src, (count,), generator=generator)
        lists[name] = (row, col)
        graph[name] = Adjacency.from_coo(row.to(device), col.to(device), (num_dst, num_src))
    return lists, graph


@pytest.mark.parametrize("disjoint", [False, True])
def test_edge_types(disjoint, device):
    lists, graph = hetero(device)
    fanouts = {("author", "writes", "paper"): [2, 3], ("paper", "of", "author"): [4, -1]}
    sampler = NeighborSampler(graph, fanouts, disjoint=disjoint)
    seeds = {"paper": torch.tensor([5, 70, 5]), "author": torch.tensor([1])}
    sample = sampler.sample({name: ids.to(device) for name, ids in seeds.items()}, seed=4)
    assert sample.edges[("paper", "cites", "paper")].counts == [0, 0]
    for name, edges in sample.edges.items():
        check_edges(edges)
        row, col = lists[name]
        source, dst = edges.edge_index.cpu()
        ids = edges.edge_id.cpu()
        assert torch.equal(row[ids], sample.nodes[name[2]].cpu()[dst])
        assert torch.equal(col[ids], sample.nodes[name[0]].cpu()[source])
        assert edges.shape == tuple(sample.nodes[name[at]].numel() for at in (2, 0))
        # Nodes of a hop sample in the next hop; their number of edges follows from their degree.
        counts = sample.num_nodes[name[2]]
        hop_of = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        degree = torch.bincount(
            row, minlength=sampler.graph.num_nodes[sampler.graph.node_types.index(name[2])]
        )
        own = degree[sample.nodes[name[2]].cpu()]
        of_type = fanouts.get(name, [0, 0])
        wanted = torch.zeros_like(own)
        for hop, fanout in enumerate(of_type):
            wanted = torch.where(hop_of == hop, own if fanout < 0 else own.clamp(max=fanout), wanted)
        assert torch.equal(torch.bincount(dst, minlength=own.numel()), wanted)
        assert sum(edges.counts) == ids.numel()
        if disjoint:
            assert torch.equal(sample.seed_of[name[0]].cpu()[source], sample.seed_of[name[2]].cpu()[dst])
    for name, ids in sample.nodes.items():
        given = seeds[name].numel()
        assert torch.equal(ids[:given].cpu(), seeds[name])
        assert sum(sample.num_nodes[name]) == ids.numel()
        if not disjoint:
            assert ids[given:].unique().numel() == ids.numel() - given


def test_edge_types_induced(device):
    lists, graph = hetero(device)
    sampler = NeighborSampler(graph, [2], induced=True)
    sample = sampler.sample({"paper": torch.tensor([5, 70], device=device)})
    for name, edges in sample.edges.items():
        row, col = lists[name]
        inside = torch.isin(row, sample.nodes[name[2]].cpu()) & torch.isin(col, sample.nodes[name[0]].cpu())
        assert torch.equal(edges.edge_id.sort().values.cpu(), inside.nonzero().flatten())


# ---------------------------------------------------------------- limits and errors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_to_draw(layout, device):
    empty = torch.empty(0, dtype=torch.int64)
    for row, col, graph in (random_graph(5, 0, device), random_graph(20, 60, device)):
        sampler = NeighborSampler(graph, [3, -1], **LAYOUTS[layout])
        check(sampler.sample(empty.to(device)), row, col, empty, [3, -1], **LAYOUTS[layout])
        isolated = torch.tensor([4, 4])
        check(sampler.sample(isolated.to(device)), row, col, isolated, [3, -1], **LAYOUTS[layout])


def test_bad_arguments_are_named():
    _, _, graph = random_graph(10, 40)
    _, types = hetero()
    name = ("paper", "cites", "paper")
    cases = [
        (ValueError, "fanouts", lambda: NeighborSampler(graph, [-2])),
        (ValueError, "fanouts", lambda: NeighborSampler(graph, [2.5])),
        (ValueError, "fanouts", lambda: NeighborSampler(graph, [])),
        (TypeError, "fanouts", lambda: NeighborSampler(graph, 3)),
        (ValueError, "fanouts", lambda: NeighborSampler(types, {("a", "b", "c"): [1]})),
        (
            ValueError,
            "fanouts",
            lambda: NeighborSampler(types, {name: [1], ("paper", "of", "author"): [1, 2]}),
        ),
        (ValueError, "weight", lambda: NeighborSampler(graph, [2], weight=torch.ones(39))),
        (ValueError, "weight", lambda: NeighborSampler(graph, [2], weight=torch.full((40,), -1.0))),
        (ValueError, "weight", lambda: NeighborSampler(graph, [2], weight=torch.full((40,), torch.nan))),
        (TypeError, "weight", lambda: NeighborSampler(graph, [2], weight=[1.0] * 40)),
        (ValueError, "weight", lambda: NeighborSampler(types, [2], weight={("a", "b", "c"): torch.ones(3)})),
        (TypeError, "graph", lambda: NeighborSampler(torch.ones(2, 2), [2])),
        (TypeError, "graph", lambda: NeighborSampler({}, [2])),
        (TypeError, "graph", lambda: NeighborSampler({"cites": types[name]}, [2])),
        (ValueError, "graph", lambda: NeighborSampler({name: types[("author", "writes", "paper")]}, [2])),
        (ValueError, "blocks", lambda: NeighborSampler(graph, [2], blocks=True, induced=True)),
        (ValueError, "num_nodes", lambda: NeighborSampler(graph, [2], num_nodes={"": 3})),
        (ValueError, "seeds", lambda: NeighborSampler(graph, [2]).sample(torch.tensor([3, 10]))),
        (ValueError, "seeds", lambda: NeighborSampler(graph, [2]).sample(torch.tensor([-1]))),
        (
            ValueError,
            "seeds",
            lambda: NeighborSampler(graph, [2]).sample(torch.zeros(1, 1, dtype=torch.int64)),
        ),
        (TypeError, "seeds", lambda: NeighborSampler(graph, [2]).sample(torch.tensor([1.0]))),
        (TypeError, "seeds", lambda: NeighborSampler(graph, [2]).sample({"paper": torch.tensor([1])})),
        (TypeError, "seeds", lambda: NeighborSampler(types, [2]).sample(torch.tensor([1]))),
        (ValueError, "seeds", lambda: NeighborSampler(types, [2]).sample({"venue": torch.tensor([1])})),
    ]
    for error, argument, make in cases:
        with pytest.raises(error, match=rf"^{argument}"):
            make()


@pytest.mark.gpu
def test_seeds_out_of_range_on_the_gpu():
    _, _, graph = random_graph(10, 40, "cuda")
    sampler = NeighborSampler(graph, [2, 2])
    with pytest.raises(ValueError, match="^seeds: expected ids from 0 to 9, got values from 3 to 10"):
        sampler.sample(torch.tensor([3, 10], device="cuda"))
    sampler.sample(torch.tensor([3], device="cuda"))


def test_a_structure_with_loops_is_drawn_from_as_it_is(device):
    row, col, _ = random_graph(40, 200)
    looped = Adjacency.from_coo(row.to(device), col.to(device), (40, 40), self_loops="append")
    sample = NeighborSampler(looped, [-1]).sample(torch.arange(40, device=device))
    assert sample.edges.counts == [240]
    assert sample.edges.edge_id.max() == 239


# ---------------------------------------------------------------- features, prefetching, memory


def test_feature_table(device):
    table = torch.randn(50, 7)
    index = torch.randint(50, (20,), device=device)
    rows = FeatureTable(table, index.device)
    assert torch.equal(rows[index].cpu(), table[index.cpu()])
    table[3:] += 1  # the edit is detected, also for the copy on the GPU
    assert torch.equal(rows[index].cpu(), table[index.cpu()])


def test_a_table_on_the_cpu_beside_its_copy_on_a_gpu(monkeypatch):
    table, index = torch.randn(5, 7), torch.tensor([4, 0])
    monkeypatch.setitem(features._copies, table, {torch.device("cuda", 0): None})
    assert torch.equal(FeatureTable(table, torch.device("cpu"))[index], table[index])


def test_what_is_no_table():
    table = torch.randn(5, 7)
    with pytest.raises(TypeError, match="table: expected a tensor with a row per node, got list"):
        FeatureTable(table.tolist(), table.device)
    with pytest.raises(TypeError, match="device: expected a torch.device, got 'cpu'"):
        FeatureTable(table, "cpu")


def test_a_table_made_in_inference_mode_serves_training(device, monkeypatch):
    if device == "cpu":  # simulates a table in a GPU's memory
        monkeypatch.setattr(features, "_place", lambda table, *_: lambda index, _: table[index])
    with torch.inference_mode():
        table = torch.randn(50, 7)
    index = torch.randint(50, (20,), device=device)
    weight = torch.randn(7, 3, device=device, requires_grad=True)
    taken = features._placed(table, index.device)(index, False)
    for rows in (FeatureTable(table, index.device)[index], taken):
        (rows @ weight).sum().backward()
        assert torch.equal(rows.cpu(), table[index.cpu()])
    with torch.inference_mode():
        FeatureTable(table, index.device)[index]
    (FeatureTable(table, index.device)[index] @ weight).sum().backward()


def test_feature_table_of_strided_and_learned_features(device):
    index = torch.randint(50, (20,), device=device)
    table = torch.randn(50, 14, device=device)
    assert torch.equal(FeatureTable(table[:, ::2], index.device)[index], table[index, ::2])
    rows = FeatureTable(table.requires_grad_(), index.device)[index]
    rows.sum().backward()
    assert torch.equal(table.grad[:, 0], torch.bincount(index, minlength=50).float())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(50, 8), (50, 100), (50, 1), (50,), (50, 2, 3), (0, 4), (50, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_aligned_features(shape, dtype, place):
    table = torch.randn(shape).to(place, dtype)
    index = torch.randint(shape[0], (33,), device="cuda") if shape[0] else torch.empty(0, dtype=torch.int64)
    index = index.cuda()
    expected = table[index.to(place)].cuda()
    rows = FeatureTable(table, torch.device("cuda"), aligned=True)[index]
    assert torch.equal(rows, expected)
    assert torch.equal(FeatureTable(table, torch.device("cuda", 0))[index], expected)
    pads = dtype.itemsize == 2 and len(shape) == 2 and shape[0] and shape[1] % 8
    assert rows.is_contiguous() != bool(pads)
    if pads:
        columns = shape[1] + -shape[1] % 8
        padded = zero_padded(rows, columns)
        assert torch.equal(padded, torch.nn.functional.pad(expected, (0, columns - shape[1])))
        assert zero_padded(rows, columns + 8) is None
        assert zero_padded(rows.clone(), columns) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(50, 8), (50, 7), (50,), (50, 2, 3), (0, 4), (50, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
def test_features_in_host_memory(shape, dtype, monkeypatch):
    monkeypatch.setattr(features, "_SHARE_OF_FREE", -1.0)
    table = torch.randint(100, shape).to(dtype)
    index = torch.randint(shape[0], (33,), device="cuda") if shape[0] else torch.empty(0, dtype=torch.int64)
    rows = FeatureTable(table, torch.device("cuda", 0))[index.cuda()]
    assert rows.is_cuda
    assert torch.equal(rows.cpu(), table[index.cpu()])


@pytest.mark.parametrize(
    "shape", [(50, 8), (50, 7), (50,), (50, 2, 3), (50, 100), (50, 3000), (0, 4), (50, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_rows_gathered_by_threads(shape, dtype):
    table = torch.randint(100, shape).to(dtype)
    row_bytes = table[0].nbytes if shape[0] else 0
    for count, threads, piece in ((0, 1, 4), (1, 2, 4), (33, 3, 4), (400, 2, 1000)):
        index = torch.randint(shape[0], (count,)) if shape[0] else torch.empty(0, dtype=torch.int64)
        out = table.new_full((index.numel(), *shape[1:]), 101)
        _C.gather_rows_of_host(
            table=table,
            index=index,
            staging=None,
            out=out,
            num_rows=index.numel(),
            row_bytes=row_bytes,
            threads=threads,
            piece=piece,
            device=-1,
            queue=0,
        )
        assert torch.equal(out, table[index])


@pytest.mark.gpu
@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("width", [128, 100, 3])
def test_features_that_the_host_gathers(width, is_pinned, monkeypatch):
    monkeypatch.setattr(features, "_SHARE_OF_FREE", -1.0)
    monkeypatch.setattr(features, "_ENOUGH", 0.0)
    monkeypatch.setattr(features, "_rate_on_cuda", lambda *_: 0.0)
    monkeypatch.setattr(host_rows, "_PIECE", 2**12)
    monkeypatch.setattr(features, "gather_on_cuda", None)
    table = torch.randn(70_000, width).half()
    table = table.pin_memory() if is_pinned else table
    rows = FeatureTable(table, torch.device("cuda", 0))
    for count in (20_000, 1, 0, 50_000, 3):
        index = torch.randint(70_000, (count,), device="cuda")
        assert torch.equal(rows[index].cpu(), table[index.cpu()])
    table[3:] += 1
    assert torch.equal(rows[index].cpu(), table[index.cpu()])

    # During a longer and a shorter step, and with batches that are not used.
    items = [torch.randint(70_000, (30_000,), device="cuda") for _ in range(6)]
    for cycles in (0, 20_000_000):
        for most in (6, 2):
            batches = prefetched(
                items,
                lambda item: item,
                lambda item: (item, rows[item]),
                torch.cuda.Stream(),
                reads_rows=False,
            )
            sums = []
            for item, found in itertools.islice(batches, most):
                torch.cuda._sleep(cycles)
                sums.append((found.double().sum(), item))
                del found
            for total, item in sums:
                assert torch.equal(total.cpu(), table[item.cpu()].double().sum())


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 3])
def test_features_of_which_the_gpu_keeps_some(width, monkeypatch):
    monkeypatch.setattr(features, "_SHARE_OF_FREE", -1.0)
    monkeypatch.setattr(features, "_BYTES_AT_ONCE", 2**12)
    table = torch.randn(5000, width).half()
    rows, kept = FeatureTable(table, torch.device("cuda", 0)), torch.randperm(5000)[:2000]
    rows.keep(kept)
    for index in (torch.randperm(5000), kept[:9], kept[:0], torch.tensor([7]), torch.randint(5000, (999,))):
        assert torch.equal(rows[index.cuda()].cpu(), table[index])
    sent = mock.Mock(wraps=_C.gather_rows_of_host)
    monkeypatch.setattr(host_rows._C, "gather_rows_of_host", sent)
    with torch.inference_mode():
        assert torch.equal(rows[torch.arange(5000).cuda()].cpu(), table)
    assert [call.kwargs["num_rows"] for call in sent.call_args_list] == [3000]
    table[kept] += 1
    items = [torch.randint(5000, (300,)) for _ in range(5)]
    batches = prefetched(items, torch.Tensor.cuda, rows.__getitem__, torch.cuda.Stream(), reads_rows=False)
    for item, found in zip(items, batches, strict=True):
        assert torch.equal(found.cpu(), table[item])


def test_most_drawn(device):
    _, _, graph = random_graph(200, 3000, device)
    edges = torch.bincount(graph.col.long(), minlength=200)
    nodes = NeighborSampler(graph, [2]).most_drawn(20)[""]
    assert nodes.unique().numel() == 20
    assert torch.equal(edges[nodes].sort().values, edges.sort().values[-20:])
    sampler = NeighborSampler({("a", "to", "b"): graph, ("b", "to", "b"): graph}, [2], num_nodes={"c": 3})
    nodes = sampler.most_drawn(300)
    assert {name: ids.numel() for name, ids in nodes.items()} == {"a": 200, "b": 200, "c": 3}


def test_prefetched_keeps_order(device):
    stream = torch.cuda.Stream() if device == "cuda" else None
    for count in range(5):
        items = [torch.full((4,), float(number), device=device) for number in range(count)]
        batches = prefetched(items, lambda item: item * 2, lambda item: item + 1, stream)
        assert [float(batch[0]) for batch in batches] == [2.0 * number + 1 for number in range(count)]


def test_memory_stays_flat(device):
    _, _, graph = random_graph(2000, 40000, device)
    sampler = NeighborSampler(graph, [10, 5])
    table = FeatureTable(torch.randn(2000, 16), torch.device(device, 0) if device == "cuda" else graph.device)
    stream = torch.cuda.Stream() if device == "cuda" else None
    seeds = torch.randint(2000, (200, 64), device=device)

    def memory() -> int:
        return torch.cuda.memory_allocated() if device == "cuda" else resident()

    after_some = 0
    batches = prefetched(seeds, sampler.start, lambda draw: table[draw.finish().nodes], stream)
    for number, _ in enumerate(batches):
        if number == 100:
            after_some = memory()
    assert memory() <= after_some + 4 * 2**20


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
