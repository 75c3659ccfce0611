"""Products whose rows have a loop besides what is stored, for layers that add one to every node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DTYPES, TOLERANCE, features, relative_error
from torch import Tensor

from fastsparse_core import Adjacency, reference
from fastsparse_core.fused.aggregate_transform import graph_convolution
from fastsparse_core.ops._spmm_plan import grad_of_features, launch_spmm
from fastsparse_core.structure import construction

ALGORITHMS = ("auto", "csr", "flashsparse", "tca", "hr")


def structure(device: str, *, nodes: int = 90, edges: int = 700, long_row: int = 0) -> Adjacency:
    """No loops, rows without edges, and perhaps one that has to be cut."""
    generator = torch.Generator().manual_seed(0)
    row, col = torch.randint(nodes - 5, (2, edges), generator=generator)
    row, col = row[row != col], col[row != col]
    extra = torch.arange(1, long_row + 1) % (nodes - 1) + 1
    row, col = torch.cat([row, torch.zeros_like(extra)]), torch.cat([col, extra])
    return Adjacency.from_coo(row.to(device), col.to(device), (nodes, nodes))


def with_loops(adj: Adjacency, x: Tensor, loop: float, scale_dst: Any, scale_src: Any) -> Tensor:
    """In float64."""
    x = x.double()
    own = loop * x if scale_src is None else loop * scale_src.double()[:, None] * x
    out = reference.spmm(adj, x, scale_src=scale_src) + own
    return out if scale_dst is None else out * scale_dst.double()[:, None]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 33, 64, 160])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("long_row", [0, 3000])
def test_products(device, poisoned_memory, algorithm, dtype, width, scaled, long_row):
    if device == "cpu" and algorithm not in ("auto", "csr"):
        pytest.skip("on the CPU all of them are csr")
    adj = structure(device, long_row=long_row)
    x = features(adj.num_src, width, dtype, "contiguous", device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales: list[Any] = [None, None]
    if scaled:
        scales = [torch.rand(adj.num_src, device=device, dtype=wide) + 0.5 for _ in range(2)]
    loop = torch.tensor(-1.75, device=device, dtype=wide)
    bias = features(1, width, dtype, "contiguous", device, seed=3)[0]
    out = launch_spmm(adj, x, None, *scales, bias, algorithm, relu=True, loop=loop)
    expected = (with_loops(adj, x, -1.75, *scales) + bias.double()).relu()
    assert out.dtype == dtype
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    back = grad_of_features(adj, x, None, *scales, algorithm, loop)
    assert relative_error(back, with_loops(adj.t(), x, -1.75, *reversed(scales))) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("aggregate_first", [False, True])
def test_graph_convolution(device, poisoned_memory, dtype, aggregate_first):
    adj = structure(device)
    x = features(90, 24, dtype, "contiguous", device).requires_grad_(not aggregate_first)
    weight = features(16, 24, dtype, "contiguous", device, seed=1).requires_grad_()
    scale = adj.inv_sqrt_degree(torch.float64 if dtype == torch.float64 else torch.float32, loops=1)
    out = graph_convolution(adj, x, weight, None, True, aggregate_first, scale, scale, add_loops=True)
    exact = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in (x, weight)]
    dense = with_loops(adj, torch.eye(90, device=device), 1.0, scale, scale)
    expected = dense @ exact[0] @ exact[1].t()
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    upstream = torch.randn_like(out)
    leaves = [leaf for leaf in (x, weight) if leaf.requires_grad]
    exact = [leaf for leaf in exact if leaf.requires_grad]
    got = torch.autograd.grad(out, leaves, upstream)
    for one, wanted in zip(got, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        assert relative_error(one, wanted) <= TOLERANCE[dtype]


def test_graph_convolution_twice(device):
    adj = structure(device, nodes=12, edges=30)
    x = torch.randn(12, 3, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(2, 3, dtype=torch.float64, device=device, requires_grad=True)
    scale = adj.inv_sqrt_degree(torch.float64, loops=1)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        out = graph_convolution(adj, x, weight, None, True, False, scale, scale, add_loops=True)
        assert out is not None
        return out.square()

    assert torch.autograd.gradcheck(run, (x, weight))
    assert torch.autograd.gradgradcheck(run, (x, weight))


@pytest.mark.parametrize("order", ["sorted", "any"])
def test_loops_of_edges_are_noticed(device, order):
    generator = torch.Generator().manual_seed(1)
    row, col = torch.randint(50, (2, 40_000), generator=generator).to(device)
    kept = row != col
    row, col = row[kept], col[kept]
    if order == "sorted":
        index = (row * 50 + col).sort().indices
        row, col = row[index], col[index]
    assert Adjacency.from_coo(row, col, (50, 50)).has_loops is False
    for place in (0, row.numel() // 2, row.numel() - 1):
        changed = col.clone()
        changed[place] = row[place]
        assert Adjacency.from_coo(row, changed, (50, 50)).has_loops is True
    assert Adjacency.from_coo(row, col, (50, 60)).has_loops is None


@pytest.mark.parametrize("order", ["sorted", "any"])
def test_loops_are_replaced_where_there_are_some(device, order, monkeypatch):
    row, col = torch.randint(50, (2, 400), generator=torch.Generator().manual_seed(2)).to(device)
    if order == "sorted":
        index = (row * 50 + col).sort().indices
        row, col = row[index], col[index]
    sorts = []
    right = construction.compress
    monkeypatch.setattr(
        construction, "compress", lambda *it, **ways: (sorts.append(1), right(*it, **ways))[1]
    )
    for rows, columns in ((row, col), (row[row != col], col[row != col])):
        some = bool((rows == columns).any())
        expected = Adjacency.from_coo(rows, columns, (50, 50), self_loops="replace" if some else "keep")
        sorts.clear()
        adj = Adjacency.from_coo(rows, columns, (50, 50), self_loops="replace_if_some")
        assert len(sorts) == some  # few edges are sorted while they are inspected
        assert adj.has_inserted_loops == expected.has_inserted_loops == some
        assert adj.has_loops is expected.has_loops
        assert torch.equal(adj.rowptr, expected.rowptr)
        assert torch.equal(adj.col, expected.col)
        assert adj.num_values == expected.num_values
        assert (adj.edge_id is None) == (expected.edge_id is None)
        assert adj.edge_id is None or torch.equal(adj.edge_id, expected.edge_id)
    with pytest.raises(ValueError, match="row: expected indices from 0 to num_dst - 1 = 9"):
        Adjacency.from_coo(row, col, (10, 10), self_loops="replace_if_some")
    assert Adjacency.from_coo(row, col, (50, 60), self_loops="replace_if_some").has_inserted_loops
