"""Graphs of the benchmark suite: drawn from their seeds, simple and symmetric; real graphs from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import suite

SMALL = {"nodes": 3_000, "edges": 24_000, "max_degree": 200}

#: Edges and a checksum of small stand-ins, drawn by the code that the stored baseline times were taken with.
EXPECTED = {
    "pubmed": (24408, 118711370),
    "yelp": (24526, 121983195),
    "igb-small": (24584, 122659311),
    "peptides-batch": (14142, 68881604),
}


def pairs(graph: suite.Graph) -> set[tuple[int, int]]:
    return set(zip(graph.row().tolist(), graph.col.tolist(), strict=True))


@pytest.mark.parametrize("name", suite.SUITE)
def test_stand_ins_are_symmetric_simple_and_sorted(name: str) -> None:
    graph = suite.load(name, "cpu", **SMALL)
    edges = pairs(graph)
    assert graph.num_nodes == 3_000
    assert graph.rowptr.dtype == graph.col.dtype == torch.int32
    assert len(edges) == graph.num_edges == int(graph.rowptr[-1])
    assert all((b, a) in edges and a != b for a, b in edges)
    key = graph.row().long() * graph.num_nodes + graph.col
    assert torch.equal(key, key.sort().values)


@pytest.mark.parametrize("name", ["reddit", "dd"])
def test_the_seed_decides_the_graph(name: str) -> None:
    first, again = suite.load(name, "cpu", **SMALL), suite.load(name, "cpu", **SMALL)
    other = suite.load(name, "cpu", **SMALL, seed=99)
    assert torch.equal(first.col, again.col)
    assert torch.equal(first.rowptr, again.rowptr)
    assert pairs(first) != pairs(other)


def test_order_of_random_calls_is_the_one_that_baseline_times_rest_on() -> None:
    """Sums over graphs drawn on the CPU; another order of draws on any device would change them."""
    found = {}
    for name in ("pubmed", "yelp", "igb-small", "peptides-batch"):
        graph = suite.load(name, "cpu", **SMALL)
        found[name] = (graph.num_edges, int((graph.row().long() * 31 + graph.col).remainder(9973).sum()))
    assert found == EXPECTED


def test_sizes_are_near_the_published_ones() -> None:
    graph = suite.load("pubmed", "cpu")
    assert graph.num_nodes == 19_717
    assert graph.num_edges == pytest.approx(88_648, rel=0.03)
    graph = suite.load("peptides-batch", "cpu")
    assert graph.num_edges == pytest.approx(313_000, rel=0.25)
    assert int((graph.rowptr[1:] - graph.rowptr[:-1]).max()) < 20


def test_peer_graphs_are_those_of_the_stored_times() -> None:
    from benchmarks.roofline import peers

    assert set(suite.PEER_GRAPHS) == set(peers()["kernels"]["spmm@64"]["RoDe fp32"])
    assert set(suite.PEER_GRAPHS) <= set(suite.SUITE)


def test_forms_of_a_graph_agree() -> None:
    graph = suite.load("ppi", "cpu", **SMALL)
    dense = graph.sparse_csr().to_dense()
    source, target = graph.edge_index()
    assert dense.sum() == graph.num_edges
    assert (dense[target, source] == 1).all()


def test_unknown_names_are_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match="graph 'redit' is not in the suite: expected one of pubmed"):
        suite.check(["reddit", "redit"])


def test_real_graphs_come_from_the_folder_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTSPARSE_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="FASTSPARSE_DATA"):
        suite.check(["real:tiny"])
    monkeypatch.setenv("FASTSPARSE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"tiny\.npz"):
        suite.load("real:tiny", "cpu")
    np.savez(tmp_path / "tiny.npz", num_nodes=4, edge_index=np.array([[0, 1, 1, 3, 0], [1, 2, 2, 3, 1]]))
    graph = suite.load("real:tiny", "cpu")
    assert pairs(graph) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    np.savez(tmp_path / "rows.npz", num_nodes=4, rowptr=np.array([0, 1, 3, 3, 4]), col=np.array([1, 2, 2, 3]))
    assert torch.equal(suite.load("real:rows", "cpu").col, graph.col)


def test_real_graph_sizes(data_folder: Path) -> None:
    graph = suite.load("real:github", "cpu")
    assert (graph.num_nodes, graph.num_edges) == (37_700, 578_006)
