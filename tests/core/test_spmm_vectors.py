"""spmm with values as dense vectors, and blocks whose last one is cut, against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from cases import (
    ALGORITHMS,
    DTYPES,
    RAGGED,
    SETTINGS,
    TOLERANCE,
    WIDTHS,
    as_vectors,
    each_kernel,
    each_shape,
    edge_lists,
    features,
    polluted_vectors,
    ragged,
    random_graph,
    relative_error,
)
from hypothesis import given
from hypothesis import strategies as st

from fastsparse_core import Adjacency, policy, reference, sddmm, spmm


@each_kernel("auto", *ALGORITHMS)
@given(
    edges=edge_lists(),
    width=st.sampled_from(WIDTHS),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([None, 1, 2, 4, 5]),
    wide=st.booleans(),
    mean=st.booleans(),
)
@SETTINGS
def test_dense_vectors(device, poisoned_memory, algorithm, edges, width, dtype, heads, wide, mean):
    adj = edges.adjacency(device)
    x = features(adj.num_src, width, dtype, "contiguous", device)
    if width % (heads or 1):
        heads = 1
    value_dtype = torch.float32 if wide and dtype != torch.float64 else dtype
    value = features(adj.num_values, heads or 1, value_dtype, "contiguous", device, seed=1)
    value = value if heads else value[:, 0]
    options = {"reduce": "mean" if mean else "sum", "algorithm": algorithm}
    out = spmm(adj, x, polluted_vectors(adj, value), value_layout="me_bcrs", **options)
    terms = reference.spmm(adj, x.abs(), value.abs(), options["reduce"])
    difference = out.double() - reference.spmm(adj, x, value, options["reduce"])
    assert out.dtype == dtype
    assert difference.norm() <= TOLERANCE[dtype] * max(terms.norm().item(), 1e-30)


@pytest.mark.parametrize("group_rows", ["none", "minhash"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@each_shape("shape", [(16, 1), (32, 1), (40, 1), (64, 1), (128, 2), (256, 4)], on_cpu=[(40, 1), (128, 2)])
def test_dense_vectors_on_tensor_cores(device, monkeypatch, group_rows, dtype, shape):
    """Every shape of the kernel, slices of one window, runs of several; the bits are those of edge values."""
    width, heads = shape
    seen = []
    original = policy.spmm_algorithm
    monkeypatch.setattr(
        policy, "spmm_algorithm", lambda *them, **named: seen.append(original(*them, **named)) or seen[-1]
    )
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(0, 300, (6000,), generator=generator) // 3 * 3
    row[:3000] = 150
    row[(row >= 80) & (row < 120)] = 0
    col = torch.randint(0, 2000, (6000,), generator=generator)
    adj = Adjacency.from_coo(row.to(device), col.to(device), (303, 2000), group_rows=group_rows)
    x = torch.randn(2000, width, generator=generator).to(device, dtype)
    for value_dtype in (dtype, torch.float32):
        value = torch.randn(6000, heads, generator=generator).to(device, value_dtype)
        out = spmm(adj, x, polluted_vectors(adj, value), value_layout="me_bcrs")
        assert relative_error(out, reference.spmm(adj, x, value)) <= TOLERANCE[dtype]
        assert torch.equal(out, spmm(adj, x, value, algorithm="flashsparse"))
    assert {choice.algorithm for choice in seen} == {"flashsparse" if device == "cuda" else "csr"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [None, 2])
def test_gradients_of_dense_vectors(device, dtype, heads):
    adj = random_graph().adjacency(device)
    x = features(60, 128, dtype, "contiguous", device)
    value = features(400, heads or 1, torch.float32, "contiguous", device, seed=1)
    value = value if heads else value[:, 0]
    weight = features(40, 128, dtype, "contiguous", device, seed=3)
    exact = [tensor.double().requires_grad_() for tensor in (x, value)]
    reference.spmm(adj, *exact).backward(weight.double())
    x.requires_grad_()
    vectors = polluted_vectors(adj, value).requires_grad_()
    spmm(adj, x, vectors, value_layout="me_bcrs").backward(weight)
    assert vectors.grad.dtype == torch.float32
    assert relative_error(x.grad, exact[0].grad) <= TOLERANCE[dtype]
    assert relative_error(vectors.grad, as_vectors(adj, exact[1].grad)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("first", [1.0, float("nan")])
@pytest.mark.parametrize(("num_edges", "group_rows"), RAGGED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@each_shape("width", [8, 24, 72, 128], on_cpu=[24])
def test_blocks_that_are_cut(
    device, poisoned_memory, stored_in_quads, width, dtype, num_edges, group_rows, first
):
    """The padding of a last block reads source 0, which has no edges. Its features change no result."""
    adj = ragged(num_edges, device, group_rows)
    known = features(adj.num_src, width, dtype, "contiguous", device)
    known_scale = torch.rand(adj.num_src, device=device) + 0.5
    x, scale_src = known.clone(), known_scale.clone()
    x[0], scale_src[0] = first, first
    value = features(adj.num_values, 2, dtype, "contiguous", device, seed=1)
    out = spmm(adj, x, scale_src=scale_src, algorithm="flashsparse")
    assert adj.has_bsb == (device == "cuda")
    assert relative_error(out, reference.spmm(adj, known, scale_src=known_scale)) <= TOLERANCE[dtype]
    for weights in (None, value[:, 0].contiguous(), value):
        out = spmm(adj, x, weights, algorithm="flashsparse")
        expected = reference.spmm(adj, known, weights)
        assert relative_error(out, expected) <= TOLERANCE[dtype]
        if weights is not None:
            vectors = polluted_vectors(adj, weights)
            assert torch.equal(out, spmm(adj, x, vectors, algorithm="flashsparse", value_layout="me_bcrs"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [1, 2])
def test_sddmm_hands_its_vectors_on(device, dtype, heads):
    """Attention without softmax, in vectors throughout and over the edges: the same bits, and gradients."""
    adj = random_graph().adjacency(device)
    q, k = (torch.randn(n, heads, 32, device=device).to(dtype).requires_grad_() for n in (40, 60))
    v = torch.randn(60, heads * 64, device=device).to(dtype)
    results = []
    for layout in ("me_bcrs", "edges"):
        score = sddmm(adj, q, k, algorithm="flashsparse", layout=layout)
        out = spmm(adj, v, score, algorithm="flashsparse", value_layout=layout)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k))))
    for vectors, edges in zip(*results, strict=True):
        assert torch.equal(vectors, edges)
