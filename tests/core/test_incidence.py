"""`incidence()`: a structure of edges by destination, which shares a graph's rows but not its columns."""

from __future__ import annotations

import pytest
import torch
from cases import relative_error

from fastsparse_core import Adjacency, reference, scatter, sddmm, spmm
from fastsparse_core.ops import _segment
from fastsparse_core.structure.incidence import edge_segments
from fastsparse_core.structure.segments import Segments


@pytest.fixture
def graph(device):
    """40 destinations, 30 sources, 200 edges in any order."""
    generator = torch.Generator().manual_seed(0)
    dst, src = torch.randint(40, (200,), generator=generator), torch.randint(30, (200,), generator=generator)
    return dst.to(device), src.to(device), Adjacency.from_coo(dst.to(device), src.to(device), (40, 30))


@pytest.mark.parametrize("converted", [False, True], ids=["", "converted"])
def test_sums_and_scores(graph, device, converted):
    dst, _, adj = graph
    if converted:  # the blocks of the graph are not those of its incidence
        assert adj.try_bsb()
    edges = adj.incidence()
    assert edges.rowptr is adj.rowptr
    assert edges.row_split is adj.row_split
    assert not edges.has_bsb
    e = torch.randn(200, 16, device=device)
    x = torch.randn(40, 16, device=device)
    assert relative_error(spmm(edges, e), reference.scatter(e, dst, 40, "sum")) < 1e-5
    assert relative_error(sddmm(edges, x, e), (x[dst] * e).sum(-1)) < 1e-5


def test_segments_of_a_graph(graph, device, monkeypatch):
    dst, _, adj = graph
    src = torch.randn(200, 5, device=device, requires_grad=True)
    expected = scatter(src, dst.clone(), 40, "std")
    monkeypatch.setattr(Segments, "from_index", None)  # nothing is sorted
    out, _ = _segment.reduce_op(src, dst.clone(), None, 40, "std", find=lambda *_: edge_segments(adj))
    assert relative_error(out, expected) < 1e-5
    out.sum().backward()
