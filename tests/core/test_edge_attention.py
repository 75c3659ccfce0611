"""Attention with edge features: what `test_operators.py` does not test."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, ragged, relative_error, special_scores
from operator_cases import ATTENTION, BY_NAME, each_operator

from fastsparse_core import Adjacency, algorithms, attention, attention_weights
from fastsparse_core.ops import _attention_launch

DOT = BY_NAME["dot product"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", DOT.shapes, ids=str)
def test_neither_bias_nor_dropout(shape, dtype, device):
    adj = ragged(4000, device)
    tensors = DOT.make(adj, shape, dtype)
    del tensors["bias"]
    DOT.compare(adj, tensors, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "width", "edge_width"), [(1, 128, 16), (4, 32, 3), (3, 20, 5), (2, 8, 40)])
def test_layout_of_the_edges_weight(heads, width, edge_width, dtype):
    """Chunk n (16 bytes) of a head's features belongs to lane n modulo the number of lanes; the rest is 0."""
    weight = torch.randn(heads * width, edge_width).to(dtype)
    lanes = 1
    while lanes * 8 < width or lanes * 16 < edge_width:
        lanes *= 2
    chunk = 16 // dtype.itemsize
    expected = torch.zeros(edge_width, 8 // chunk, heads, lanes, chunk, dtype=dtype)
    for head in range(heads):
        for feature in range(width):
            at = feature // (lanes * chunk), head, feature // chunk % lanes, feature % chunk
            expected[(slice(None), *at)] = weight[head * width + feature]
    padded = _attention_launch._padded_weight(weight, heads, heads * width, edge_width)
    assert torch.equal(_attention_launch._weight_of_dot_products(padded, heads), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 32, 4), (3, 20, 0), (1, 256, 8)], ids=str)
def test_first_gradients_of_sorted_edges_need_no_transpose(dtype, shape):
    edges = torch.randint(0, 300, (2, 3000), generator=torch.Generator().manual_seed(0))
    edges[0, :700] = 7  # a row of several slices
    row, order = edges[0].sort()
    adj = Adjacency.from_coo(row.cuda(), edges[1, order].cuda(), (310, 305))
    tensors = DOT.make(adj, shape, dtype)
    DOT.compare(adj, tensors, 4, dropout_p=0.3)
    assert not adj.has_transpose
    with algorithms(attention="csr"):  # a named algorithm gives the same bits every time
        DOT.compare(adj, tensors, 4)
    assert adj.has_transpose


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 16, 8), (1, 256, 8), (2, 64, 40)], ids=str)
@each_operator(ATTENTION)
def test_special_scores(op, shape, dtype, device, poisoned_memory):
    """NaN and infinity make results and gradients of their row and head NaN, and minus infinity weighs 0."""
    edges, special = special_scores()
    adj = edges.adjacency(device)
    tensors = op.make(adj, shape, dtype)
    if op is DOT:
        tensors["bias"][:, ::2] += special[:, None].to(device, dtype)
    else:
        tensors["att"][0, 0] = 0.5
        for row, number in ((2, "nan"), (4, "inf"), (6, "-inf"), (14, "nan"), (16, "inf"), (20, "-inf")):
            tensors["x_dst"][row, 0, 0] = float(number)
        tensors["x_src"][[900, 930], 0, 0] = -torch.inf
        tensors["x_src"][960, 0, 0] = torch.inf
    op.compare(adj, tensors, 4)


@each_operator(ATTENTION)
def test_unfused_gives_the_same(op, device):
    adj = ragged(4000, device)
    op.compare(adj, op.make(adj, (2, 8, 40), torch.float32), 4, algorithm="unfused", dropout_p=0.2)


def test_weights_of_edges_match_the_reference(device):
    adj = ragged(4000, device)
    tensors = DOT.make(adj, (2, 8, 4), torch.float64)
    ones = torch.ones_like(tensors["v"])
    zero = {"edge_weight": tensors["edge_weight"] * 0}
    tensors.pop("v")
    weight = attention_weights(adj, **tensors)
    row = adj.row().long()
    position = torch.arange(adj.num_edges) if adj.edge_id is None else adj.edge_id.long().cpu()
    total = torch.zeros(adj.num_dst, 2, dtype=torch.float64).index_add(0, row.cpu(), weight.cpu()[position])
    degree = adj.in_degree().cpu()
    assert torch.allclose(total[degree > 0], torch.ones_like(total[degree > 0]))
    plain = attention_weights(adj, **(tensors | zero))
    without = {name: t for name, t in tensors.items() if not name.startswith("edge")}
    assert torch.allclose(plain, attention_weights(adj, **without))
    assert not torch.allclose(plain, weight)
    assert torch.isfinite(attention(adj, v=ones, **tensors)).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "heads", "width", "edge_width"), [(500, 3, 4, 4), (1, 1, 8, 12), (20_000, 16, 16, 8)]
)
def test_weight_gradient_is_that_of_every_head(num_rows, heads, width, edge_width):
    """Rows without entries add nothing: with edge features of 0, NaN in their features would be NaN."""
    has_entries = torch.arange(num_rows) % 5 != 3
    rows = has_entries.nonzero()[:, 0]
    adj = Adjacency.from_coo(rows, rows, (num_rows, num_rows)).to("cuda")
    x, y = (torch.randn(num_rows, heads * width, device="cuda") for _ in range(2))
    e, f = (torch.randn(num_rows, heads, edge_width, device="cuda") for _ in range(2))
    expected = sum(
        torch.einsum("nhd,nha->hda", left.view(num_rows, heads, width).double()[rows], right.double()[rows])
        for left, right in ((x, e), (y, f))
    )
    x[~has_entries], y[~has_entries], e[~has_entries], f[~has_entries] = torch.nan, torch.inf, 0, 0
    found = _attention_launch._weight_gradient(adj, x, e, y, f, heads)
    assert relative_error(found, expected.reshape(heads * width, edge_width)) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", [False, True])
def test_a_constant_weight_costs_no_gradient(monkeypatch, wanted):
    adj = ragged(400, "cuda")
    tensors = DOT.make(adj, (2, 8, 4), torch.float32)
    tensors["edge_attr"].requires_grad_()
    tensors["edge_weight"].requires_grad_(wanted)
    calls = []
    original = _attention_launch._weight_gradient
    monkeypatch.setattr(
        _attention_launch, "_weight_gradient", lambda *given: calls.append(1) or original(*given)
    )
    attention(adj, **tensors).sum().backward()
    assert len(calls) == wanted
    assert tensors["edge_attr"].grad is not None
