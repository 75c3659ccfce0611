"""sddmm against the float64 reference, its gradients, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    DTYPES,
    LAYOUTS,
    RAGGED,
    TOLERANCE,
    WIDTHS,
    as_vectors,
    each_kernel,
    each_shape,
    edge_lists,
    features,
    ragged,
    random_graph,
    relative_error,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsparse_core import Adjacency, policy, reference, sddmm, spmm
from fastsparse_core.formats.bsb import QUAD

ALGORITHMS = ("csr", "flashsparse")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The algorithm that every call came to."""
    seen: list[str] = []
    original = policy.sddmm_algorithm

    def record(*arguments: Any) -> policy.Choice:
        choice = original(*arguments)
        seen.append(choice.algorithm)
        return choice

    monkeypatch.setattr(policy, "sddmm_algorithm", record)
    return seen


def error_in_terms(out: Tensor, adj: Adjacency, x_dst: Tensor, x_src: Tensor, **scales: Tensor) -> float:
    """Frobenius error relative to the size of the terms: of a dot product that cancels, little is left."""
    terms = reference.sddmm(adj, x_dst.double().abs(), x_src.double().abs(), **scales)
    difference = (out.double() - reference.sddmm(adj, x_dst, x_src, **scales)).norm()
    return float(difference / max(terms.norm().item(), 1e-30))


def random_scales(adj: Adjacency) -> dict[str, Tensor]:
    return {
        "scale_dst": torch.rand(adj.num_dst, device=adj.device),
        "scale_src": torch.rand(adj.num_src, device=adj.device),
    }


@each_kernel(*ALGORITHMS)
@given(
    edges=edge_lists(),
    width=st.sampled_from(WIDTHS),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    scaled=st.booleans(),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_reference(device, poisoned_memory, algorithm, edges, width, dtype, layout, scaled):
    adj = edges.adjacency(device)
    x_dst = features(adj.num_dst, width, dtype, layout, device)
    x_src = features(adj.num_src, width, dtype, "contiguous", device, seed=1)
    scales = random_scales(adj) if scaled else {}
    out = sddmm(adj, x_dst, x_src, algorithm=algorithm, **scales)
    assert out.dtype == dtype
    assert error_in_terms(out, adj, x_dst, x_src, **scales) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 32, 67])
def test_products_of_single_features(device, dtype, width):
    """As many heads as features."""
    adj = random_graph().adjacency(device)
    x_dst = features(adj.num_dst, width, dtype, "contiguous", device)[..., None]
    x_src = features(adj.num_src, width, dtype, "contiguous", device, seed=1)[..., None]
    scales = random_scales(adj)
    out = sddmm(adj, x_dst, x_src, **scales)
    assert out.shape == (adj.num_values, width)
    assert relative_error(out, reference.sddmm(adj, x_dst, x_src, **scales)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("group_rows", ["none", "minhash"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@each_shape(
    "shape",
    [(1, 8), (1, 32), (3, 16), (2, 40), (1, 64), (4, 32), (2, 128), (1, 256), (1, 264), (1, 1024)],
    on_cpu=[(2, 40), (1, 264)],
)
def test_tensor_cores(device, kernels, group_rows, dtype, shape):
    """Every shape of the kernel; slices of one window, runs of several, windows and rows without entries."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(0, 300, (6000,), generator=generator) // 3 * 3
    row[:3000] = 150
    row[(row >= 80) & (row < 120)] = 0
    col = torch.randint(0, 2000, (6000,), generator=generator)
    adj = Adjacency.from_coo(row.to(device), col.to(device), (303, 2000), group_rows=group_rows)
    x_dst = torch.randn(303, *shape, generator=generator).to(device, dtype)
    x_src = torch.randn(2000, *shape, generator=generator).to(device, dtype)
    for scales in ({}, random_scales(adj)):
        out = sddmm(adj, x_dst, x_src, algorithm="flashsparse", **scales)
        assert out.shape == (6000, shape[0])
        assert error_in_terms(out, adj, x_dst, x_src, **scales) <= TOLERANCE[dtype]
        vectors = sddmm(adj, x_dst, x_src, algorithm="flashsparse", layout="me_bcrs", **scales)
        assert torch.equal(vectors, as_vectors(adj, out))
    assert set(kernels) == {"flashsparse" if device == "cuda" else "csr"}


@pytest.mark.parametrize("first", [1.0, float("nan")])
@pytest.mark.parametrize(("num_edges", "group_rows"), RAGGED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@each_shape("shape", [(1, 8), (3, 16), (1, 64), (2, 128), (1, 256), (1, 520)], on_cpu=[(3, 16)])
def test_blocks_that_are_cut(
    device, poisoned_memory, stored_in_quads, kernels, shape, dtype, num_edges, group_rows, first
):
    """The padding of a last block reads source 0, which has no edges. Its features change no result."""
    adj = ragged(num_edges, device, group_rows)
    generator = torch.Generator().manual_seed(0)
    x_dst, known = (torch.randn(n, *shape, generator=generator).to(device, dtype) for n in adj.shape)
    for known_scales in ({}, random_scales(adj)):
        x_src, scales = known.clone(), {name: scale.clone() for name, scale in known_scales.items()}
        for each in (x_src, *scales.values()):
            each[0] = first
        out = sddmm(adj, x_dst, x_src, algorithm="flashsparse", **scales)
        assert error_in_terms(out, adj, x_dst, known, **known_scales) <= TOLERANCE[dtype]
        vectors = sddmm(adj, x_dst, x_src, algorithm="flashsparse", layout="me_bcrs", **scales)
        assert torch.equal(vectors, as_vectors(adj, out))
    assert set(kernels) == {"flashsparse" if device == "cuda" else "csr"}


def test_tf32_where_pytorch_allows_it(device):
    node = torch.arange(64, device=device)
    adj = Adjacency.from_coo(node, node.flip(0), (64, 64))
    x = torch.randn(64, 64, device=device)
    exact = sddmm(adj, x, x, algorithm="flashsparse")
    torch.set_float32_matmul_precision("high")
    try:
        rounded = sddmm(adj, x, x, algorithm="flashsparse")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert error_in_terms(exact, adj, x, x) <= TOLERANCE[torch.float32]
    assert error_in_terms(rounded, adj, x, x) <= TOLERANCE[torch.float16]
    assert torch.equal(exact, rounded) == (device == "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_rows", [40, 3000])
@each_shape(
    "shape",
    [(1, 8), (1, 32), (3, 16), (2, 40), (2, 64), (1, 128), (1, 264), (1, 520)],
    on_cpu=[(1, 8), (2, 40), (1, 264)],
)
def test_entry_by_entry(device, dtype, num_rows, shape):
    """Long rows and short ones, gaps between them, edges in any order, a last tile that is not full."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(0, num_rows, (6001,), generator=generator)
    row[(row >= 10) & (row < 20)] = 7
    row[: num_rows // 2] = 30
    col = torch.randint(0, 500, (6001,), generator=generator)
    x_dst = torch.randn(num_rows, *shape, generator=generator).to(device, dtype)
    x_src = torch.randn(500, *shape, generator=generator).to(device, dtype)
    for rows in (row, row.sort().values):
        adj = Adjacency.from_coo(rows.to(device), col.to(device), (num_rows, 500))
        for scales in ({}, {name: each.to(x_dst) for name, each in random_scales(adj).items()}):
            out = sddmm(adj, x_dst, x_src, algorithm="csr", **scales)
            assert error_in_terms(out, adj, x_dst, x_src, **scales) <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("width", [32, 128])
def test_several_rounds_of_a_block(poisoned_memory, dtype, width):
    """So many entries that blocks go on to the next ones."""
    num_rows, length = 100_001, 511
    col = torch.randint(0, 100_000, (num_rows * length,), device="cuda", dtype=torch.int32)
    rowptr = torch.arange(num_rows + 1, device="cuda") * length
    adj = Adjacency.from_csr(rowptr, col, (num_rows, 100_000))
    x_dst, x_src = (torch.randn(n, width, device="cuda", dtype=dtype) for n in (num_rows, 100_000))
    out = sddmm(adj, x_dst, x_src, algorithm="csr")
    assert out.isfinite().all()
    sample = torch.randint(0, num_rows * length, (100_000,), device="cuda")
    sample[:1000] = torch.arange(1000, device="cuda") - 1000 + num_rows * length
    expected = (x_dst[sample // length].double() * x_src[col[sample]].double()).sum(1)
    assert relative_error(out[sample], expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@each_kernel(*ALGORITHMS)
@pytest.mark.parametrize("width", [16, 32, 64, 512])
def test_infinities_stay_on_their_edges(device, dtype, width, algorithm):
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (400,), generator=generator).to(device) for n in (30, 50))
    adj = Adjacency.from_coo(row, col, (30, 50))
    x_dst = torch.rand(30, width, generator=generator).to(device, dtype) + 1
    x_src = torch.rand(50, width, generator=generator).to(device, dtype) + 1
    x_src[3, 5] = float("inf")
    x_dst[7, 1] = torch.finfo(dtype).max
    x_src[9, 1] = 2
    out = sddmm(adj, x_dst, x_src, algorithm=algorithm)
    infinite = (col == 3) | (row == 7) & (x_src[col, 1] * x_dst[7, 1]).isinf()
    fine = (col != 3) & (row != 7)
    assert out[infinite].isinf().all()
    assert out[fine].isfinite().all()
    assert not out.isnan().any()


@each_kernel(*ALGORITHMS)
@pytest.mark.parametrize("heads", [None, 2])
@given(edges=edge_lists())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_dense_vectors(device, poisoned_memory, algorithm, heads, edges):
    adj = edges.adjacency(device)
    trailing = (16,) if heads is None else (heads, 16)
    x_dst = torch.randn(adj.num_dst, *trailing, device=device)
    x_src = torch.randn(adj.num_src, *trailing, device=device)
    out = sddmm(adj, x_dst, x_src, algorithm=algorithm, layout="me_bcrs")
    assert out.shape == (adj.bsb.num_vectors, 8, *trailing[:-1])
    assert torch.equal(out, as_vectors(adj, sddmm(adj, x_dst, x_src, algorithm=algorithm)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [1, 2])
def test_gradient_of_dense_vectors_is_that_of_the_edges(device, dtype, heads):
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (500,), generator=generator).to(device) for n in (30, 50))
    adj = Adjacency.from_coo(row, col, (30, 50))
    x_dst, x_src = (torch.randn(n, heads, 64, generator=generator).to(device, dtype) for n in (30, 50))
    weight = torch.randn(500, heads, generator=generator).to(device, dtype)
    exact = [x.double().requires_grad_() for x in (x_dst, x_src)]
    reference.sddmm(adj, *exact).backward(weight.double())
    ours = [x.requires_grad_() for x in (x_dst, x_src)]
    out = sddmm(adj, *ours, algorithm="flashsparse", layout="me_bcrs")
    out.backward(as_vectors(adj, weight))
    for actual, expected in zip(ours, exact, strict=True):
        assert relative_error(actual.grad, expected.grad) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_of_spmm_get_their_gradient(device, dtype):
    """Its backward is sddmm with the dtype of the values, over the structure of either direction."""
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (500,), generator=generator).to(device) for n in (30, 50))
    adj = Adjacency.from_coo(row, col, (30, 50))
    x = torch.randn(50, 2 * 64, generator=generator).to(device, dtype)
    grad = torch.randn(30, 2 * 64, generator=generator).to(device, dtype)
    value = torch.rand(500, 2, generator=generator).to(device).requires_grad_()
    spmm(adj, x, value, algorithm="flashsparse").backward(grad)
    error = error_in_terms(value.grad, adj, grad.view(30, 2, 64), x.view(50, 2, 64))
    assert error <= TOLERANCE[torch.float32]


@each_kernel(*ALGORITHMS)
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("head_width", [1, 8, 20, 47])
def test_heads(device, algorithm, heads, head_width):
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (500,), generator=generator).to(device) for n in (30, 50))
    adj = Adjacency.from_coo(row, col, (30, 50))
    x_dst = torch.randn(30, heads, head_width, device=device)
    x_src = torch.randn(50, heads, head_width, device=device)
    out = sddmm(adj, x_dst, x_src, algorithm=algorithm)
    assert out.shape == (500, heads)
    assert relative_error(out, reference.sddmm(adj, x_dst, x_src)) < 1e-6


@each_kernel(*ALGORITHMS)
def test_caller_order_with_replaced_loops(device, algorithm):
    row = torch.tensor([2, 0, 1, 1], device=device)
    col = torch.tensor([0, 1, 1, 2], device=device)
    adj = Adjacency.from_coo(row, col, (3, 3), self_loops="replace")
    x = torch.zeros(3, 4, device=device)
    x[:, 2] = torch.arange(1.0, 4.0, device=device)
    assert sddmm(adj, x, x, algorithm=algorithm).tolist() == [3.0, 2.0, 0.0, 6.0, 1.0, 4.0, 9.0]


def unsorted_rows(device: str, *, edge_id: bool) -> Adjacency:
    """Rows whose columns come in any order, repeated ones too."""
    generator = torch.Generator().manual_seed(0)
    rowptr = torch.zeros(41, dtype=torch.int64)
    torch.cumsum(torch.randint(0, 30, (40,), generator=generator), 0, out=rowptr[1:])
    num_edges = int(rowptr[-1])
    col = torch.randint(0, 50, (num_edges,), generator=generator)
    order = torch.randperm(num_edges, generator=generator).to(device) if edge_id else None
    return Adjacency.from_csr(rowptr.to(device), col.to(device), (40, 50), edge_id=order)


@pytest.mark.parametrize("edge_id", [False, True])
def test_ids_of_sorted_rows_are_those_of_the_blocks(device, edge_id):
    """The kernel counts a row's entries as the blocks hold them, from the row's first one."""
    adj = unsorted_rows(device, edge_id=edge_id)
    vector, bit = adj.bsb.bits()
    window = torch.searchsorted(adj.bsb.window_ptr.long(), vector // QUAD, right=True) - 1
    row = window * 8 + bit
    if adj.bsb.window_row is not None:
        row = adj.bsb.window_row.flatten()[row].long()
    by_row = torch.sort(row, stable=True).indices
    assert adj.sorted_edge_id is not None
    assert torch.equal(adj.sorted_edge_id, adj.bsb_value_id[by_row])
    order = torch.argsort(adj.row() * adj.num_src + adj.col)
    edges = Adjacency.from_coo(adj.row()[order], adj.col[order], adj.shape)
    assert edges.sorted_edge_id is edges.edge_id


@pytest.mark.parametrize("edge_id", [False, True])
@each_kernel(*ALGORITHMS)
def test_rows_with_unsorted_columns(device, algorithm, edge_id):
    adj = unsorted_rows(device, edge_id=edge_id)
    x_dst, x_src = (features(size, 16, torch.float32, "contiguous", device) for size in adj.shape)
    out = sddmm(adj, x_dst, x_src, algorithm=algorithm)
    assert error_in_terms(out, adj, x_dst, x_src) < 1e-6
