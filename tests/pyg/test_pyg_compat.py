"""fastsparse_pyg.compat: torch_scatter and torch_sparse, against plain torch and dense matrices."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from fastsparse_pyg import compat
from fastsparse_pyg.compat import operators, torch_scatter, torch_sparse
from fastsparse_pyg.compat.torch_sparse import SparseTensor

# PyTorch's warning about compressed rows, once per process, when it first makes them.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

# ---------------------------------------------------------------- torch_scatter


def test_documented_examples_of_torch_scatter(device):
    src = torch.tensor([[2, 0, 1, 4, 3], [0, 2, 1, 3, 4]], device=device)
    index = torch.tensor([[4, 5, 4, 2, 3], [0, 0, 2, 2, 1]], device=device)
    for values in (src, src.float()):
        out, arg = torch_scatter.scatter_max(values, index, dim=-1)
        assert out.tolist() == [[0, 0, 4, 3, 2, 0], [2, 4, 3, 0, 0, 0]]
        assert arg.tolist() == [[5, 5, 3, 4, 0, 1], [1, 4, 3, 5, 5, 5]]
    src = torch.randn(10, 6, 64, device=device)
    index = torch.tensor([0, 1, 0, 1, 2, 1], device=device)
    out = torch_scatter.scatter(src, index, dim=1, reduce="sum")
    assert out.shape == (10, 3, 64)
    torch.testing.assert_close(out, torch.zeros_like(out).index_add(1, index, src))
    pointers = torch.tensor([0, 2, 5, 6], device=device).view(1, -1)  # broadcast over the first dimension
    out = torch_scatter.segment_csr(src, pointers, reduce="sum")
    torch.testing.assert_close(out, torch.stack([src[:, :2].sum(1), src[:, 2:5].sum(1), src[:, 5]], 1))
    index = torch.tensor([0, 0, 1, 1, 1, 2], device=device).view(1, -1)
    assert torch.equal(torch_scatter.segment_coo(src, index, reduce="sum"), out)
    src = torch.tensor([1, 2, 3, 4], device=device)
    out = torch_scatter.gather_csr(src, torch.tensor([0, 2, 5, 5, 6], device=device))
    assert out.tolist() == [1, 1, 2, 2, 2, 4]
    index = torch.tensor([0, 0, 1, 1, 1, 3], device=device)
    assert torch_scatter.gather_coo(src, index).tolist() == [1, 1, 2, 2, 2, 4]


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("broadcast", ["one", "shared", "each"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "mul"])
def test_scatter_along_any_dimension(device, dim, broadcast, reduce):
    src = torch.randn(4, 5, 3, dtype=torch.float64, device=device, requires_grad=True)
    length = src.size(dim)
    shape = [1, 1, 1]
    shape[dim] = length
    index = torch.randint(0, 4, (length,), device=device)
    index[0] = 3
    wide = index.view(shape).expand(src.shape)
    if broadcast == "each":
        index = wide = torch.randint(0, 4, src.shape, device=device)
    elif broadcast == "shared":
        index = wide
    out = torch_scatter.scatter(src, index, dim, dim_size=6, reduce=reduce)
    size = list(src.shape)
    size[dim] = 6
    start = src.new_ones(size) if reduce == "mul" else src.new_zeros(size)
    name = {"max": "amax", "min": "amin", "mul": "prod"}.get(reduce, reduce)
    expected = start.scatter_reduce(dim, wide, src, name, include_self=reduce == "mul")
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    grads = [torch.autograd.grad(result, src, weight)[0] for result in (out, expected)]
    torch.testing.assert_close(*grads)
    if reduce in ("max", "min"):
        call = getattr(torch_scatter, f"scatter_{reduce}")
        _, arg = call(src, index, dim, dim_size=6)
        found = arg < length
        chosen = src.gather(dim, arg.clamp(max=length - 1))
        assert torch.equal(chosen[found], out[found])
        assert (out[~found] == 0).all()


def test_scatter_into_given_memory(device):
    src = torch.tensor([1.0, 9, 3, 4], device=device)
    index = torch.tensor([0, 1, 2, 0], device=device)

    def given():
        return torch.full((4,), 2.0, device=device)

    out = given()
    assert torch_scatter.scatter_sum(src, index, out=out) is out
    assert out.tolist() == [7, 11, 5, 2]
    assert torch_scatter.scatter_mean(src, index, out=given()).tolist() == [3.5, 11, 5, 2]
    assert torch_scatter.scatter_mul(src, index, out=given()).tolist() == [8, 18, 6, 2]
    value, arg = torch_scatter.scatter_min(src, index, out=given())
    assert value.tolist() == [1, 2, 2, 2]
    assert arg.tolist() == [0, 4, 4, 4]


def test_products_into_given_memory_have_gradients(device):
    src = torch.tensor([1.0, 9, 3, 4], dtype=torch.float64, device=device, requires_grad=True)
    start = torch.tensor([2.0, 3, 5], dtype=torch.float64, device=device, requires_grad=True)
    index = torch.tensor([0, 1, 0, 0], device=device)
    out = torch_scatter.scatter_mul(src, index, out=start.clone())
    assert out.tolist() == [24, 27, 5]
    grads = torch.autograd.grad(out, (src, start), torch.ones_like(out))
    assert [grad.tolist() for grad in grads] == [[24, 3, 8, 6], [12, 9, 1]]


def test_deviations_add_squares_onto_given_memory(device):
    """As torch_scatter: the memory holds the sums, the result is a tensor of its own."""
    src = torch.tensor([1.0, 3, 5, 5], device=device)
    out = torch.tensor([7.0, 2.0], device=device)
    result = torch_scatter.scatter_std(src, torch.tensor([0, 0, 1, 1], device=device), out=out)
    assert out.tolist() == [9, 2]
    torch.testing.assert_close(result, torch.tensor([3.0, 2.0**0.5], device=device))


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_an_index_of_one_entry_is_that_of_all_rows(device, shape):
    src = torch.randn(5, 3, dtype=torch.float64, device=device)
    one = torch.ones(shape, dtype=torch.int64, device=device)
    every = torch.ones(5, dtype=torch.int64, device=device)
    for reduce in ("sum", "mul", "mean", "max", "min"):
        out = torch_scatter.scatter(src, one, 0, reduce=reduce)
        assert torch.equal(out, torch_scatter.scatter(src, every, 0, reduce=reduce))
        out = torch_scatter.scatter(src, one, 0, torch.ones(2, 3, device=device).double(), reduce=reduce)
        expected = torch_scatter.scatter(
            src, every, 0, torch.ones(2, 3, device=device).double(), reduce=reduce
        )
        assert torch.equal(out, expected)
    for name in ("scatter_softmax", "scatter_log_softmax", "scatter_logsumexp", "scatter_std"):
        call = getattr(torch_scatter, name)
        torch.testing.assert_close(call(src, one, 0), call(src, every, 0))
    assert torch.equal(torch_scatter.segment_coo(src, one.view(1)), torch_scatter.segment_coo(src, every))


def test_segments_that_leave_elements_out(device):
    src = torch.arange(12.0, device=device).view(2, 6)
    each = torch.tensor([[0, 2, 5, 6], [1, 1, 3, 5]], device=device)
    assert torch_scatter.segment_csr(src, each).tolist() == [[1, 9, 5], [0, 15, 19]]
    value, arg = torch_scatter.segment_max_csr(src, each)
    assert value.tolist() == [[1, 4, 5], [0, 8, 10]]
    assert arg.tolist() == [[1, 4, 5], [6, 2, 4]]
    value, arg = torch_scatter.segment_max_csr(src[1], each[1])
    assert value.tolist() == [0, 8, 10]
    assert arg.tolist() == [6, 2, 4]
    assert torch_scatter.segment_mean_coo(
        src[0], torch.tensor([0, 0, 0, 2, 2, 2], device=device)
    ).tolist() == [
        1,
        0,
        4,
    ]
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]], device=device)
    pointers = torch.tensor([[0, 2, 5, 6], [0, 1, 3, 6]], device=device)
    assert torch_scatter.gather_csr(rows, pointers).tolist() == [[1, 1, 2, 2, 2, 3], [4, 5, 5, 6, 6, 6]]


def test_no_pointers_are_no_segments(device):
    src, none = torch.randn(0, 3, device=device), torch.empty(0, dtype=torch.int64, device=device)
    for reduce in ("sum", "max"):
        assert torch_scatter.segment_csr(src, none, reduce=reduce).shape == (0, 3)
    assert torch_scatter.gather_csr(src, none).shape == (0, 3)


def test_composites(device):
    src = torch.randn(3, 8, dtype=torch.float64, device=device, requires_grad=True)
    index = torch.tensor([0, 0, 1, 1, 1, 3, 3, 3], device=device)
    groups = {0: slice(0, 2), 1: slice(2, 5), 3: slice(5, 8)}
    out = torch_scatter.composite.scatter_logsumexp(src, index, dim=1)
    assert (out[:, 2] == 0).all()
    for group, part in groups.items():
        torch.testing.assert_close(out[:, group], src[:, part].logsumexp(1))
    deviation = torch_scatter.scatter_std(src, index)
    softmax = torch_scatter.scatter_softmax(src, index)
    logarithm = torch_scatter.scatter_log_softmax(src, index)
    for group, part in groups.items():
        torch.testing.assert_close(deviation[:, group], src[:, part].std(1), rtol=1e-5, atol=0)
        torch.testing.assert_close(softmax[:, part], src[:, part].softmax(1))
        torch.testing.assert_close(logarithm[:, part], src[:, part].log_softmax(1))
    assert torch.autograd.gradcheck(lambda x: torch_scatter.scatter_log_softmax(x, index), (src,))
    with pytest.raises(ValueError, match="src: expected a floating tensor"):
        torch_scatter.scatter_softmax(index, index)


def test_as_the_real_torch_scatter(device):
    real = pytest.importorskip("torch_scatter", reason="torch-scatter is not installed")
    src, index = torch.randn(50, 7, device=device), torch.randint(0, 9, (50,), device=device)
    for reduce in ("sum", "mean", "max", "min", "mul"):
        expected = real.scatter(src, index, 0, reduce=reduce)
        torch.testing.assert_close(torch_scatter.scatter(src, index, 0, reduce=reduce), expected)


# ---------------------------------------------------------------- torch_sparse


def test_documented_examples_of_torch_sparse(device):
    def tensor(values):
        return torch.tensor(values, device=device)

    index = tensor([[1, 0, 1, 0, 2, 1], [0, 1, 1, 1, 0, 0]])
    value = tensor([[1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7]])
    merged, sums = torch_sparse.coalesce(index, value, m=3, n=2)
    assert merged.tolist() == [[0, 1, 1, 2], [1, 0, 1, 0]]
    assert sums.tolist() == [[6, 8], [7, 9], [3, 4], [5, 6]]
    turned, sums = torch_sparse.transpose(index, value, 3, 2)
    assert turned.tolist() == [[0, 0, 1, 1], [1, 2, 0, 1]]
    assert sums.tolist() == [[7, 9], [5, 6], [6, 8], [3, 4]]
    index, value = tensor([[0, 0, 1, 2, 2], [0, 2, 1, 0, 1]]), tensor([1, 2, 4, 1, 3])
    matrix = tensor([[1, 4], [2, 5], [3, 6]])
    for dtype in (torch.int64, torch.float32):
        out = torch_sparse.spmm(index, value.to(dtype), 3, 3, matrix.to(dtype))
        assert out.tolist() == [[7, 16], [8, 20], [7, 19]]
    left, left_value = tensor([[0, 0, 1, 2, 2], [1, 2, 0, 0, 1]]), tensor([1.0, 2, 3, 4, 5])
    right, right_value = tensor([[0, 2], [1, 0]]), tensor([2.0, 4])
    places, value = torch_sparse.spspmm(left, left_value, right, right_value, 3, 3, 2)
    assert places.tolist() == [[0, 1, 2], [0, 1, 1]]
    assert value.tolist() == [8, 6, 8]


def example(device, value=True):
    """(5, 4), with an empty row and column; entries in another order than stored."""
    row, col = torch.tensor([[3, 0, 4, 0, 1, 3, 4], [2, 1, 0, 0, 1, 0, 2]], device=device)
    values = torch.arange(1.0, 8, dtype=torch.float64, device=device) if value else None
    return SparseTensor(row=row, col=col, value=values, sparse_sizes=(5, 4))


DENSE = [[4, 2, 0, 0], [0, 5, 0, 0], [0, 0, 0, 0], [6, 0, 1, 0], [3, 0, 7, 0]]


def test_equality_is_that_of_entries(device):
    matrix, pattern = example(device), example(device, value=False)
    assert matrix == example(device)
    assert pattern == example(device, value=False)
    assert matrix not in (pattern, matrix.t(), matrix + matrix, matrix.sparse_resize((6, 4)), None)
    assert len({matrix, example(device)}) == 2


def test_formats(device):
    matrix = example(device)
    dense = torch.tensor(DENSE, dtype=torch.float64, device=device)
    assert torch.equal(matrix.to_dense(), dense)
    assert matrix.sizes() == [5, 4]
    assert (matrix.nnz(), matrix.dim(), matrix.size(-1), matrix.density()) == (7, 2, 4, 0.35)
    assert torch.equal(matrix.t().to_dense(), dense.t())
    assert torch.equal(matrix.t().t().to_dense(), dense)
    back = [
        SparseTensor.from_dense(dense),
        SparseTensor.from_torch_sparse_coo_tensor(matrix.to_torch_sparse_coo_tensor()),
        SparseTensor.from_torch_sparse_csr_tensor(matrix.to_torch_sparse_csr_tensor()),
        SparseTensor.from_edge_index(torch.stack(matrix.coo()[:2]), matrix.storage.value(), (5, 4)),
        SparseTensor(
            rowptr=matrix.storage.rowptr(), col=matrix.storage.col(), value=matrix.storage.value()
        ).sparse_resize((5, 4)),
        copy.deepcopy(matrix),
        pickle.loads(pickle.dumps(matrix)),
    ]
    if device == "cpu":
        scipy = pytest.importorskip("scipy.sparse", reason="scipy is not installed")
        back.append(SparseTensor.from_scipy(scipy.csc_matrix(matrix.to_scipy(layout="csr"))))
    assert all(torch.equal(it.to_dense(), dense) for it in back)
    assert torch.equal(matrix.to_torch_sparse_csc_tensor().to_dense(), dense)
    colptr, row, value = matrix.csc()
    assert colptr.tolist() == [0, 3, 5, 7, 7]
    assert row.tolist() == [0, 3, 4, 0, 1, 3, 4]
    assert torch.equal(matrix.set_value(value, layout="csc").to_dense(), dense)
    assert matrix.storage.colcount().tolist() == [3, 2, 2, 0]
    assert matrix.storage.rowcount().tolist() == [2, 1, 0, 2, 2]
    assert matrix.float().dtype() == torch.float32
    assert matrix.to(device, torch.float16).dtype() == torch.float16
    assert SparseTensor.eye(3, 2).to_dense().tolist() == [[1, 0], [0, 1], [0, 0]]


def test_changes(device):
    matrix = example(device)
    dense = matrix.to_dense()
    for k in (0, 1, -2):
        expected = dense.clone()
        torch.diagonal(expected, k).fill_(9)
        assert torch.equal(matrix.fill_diag(9.0, k).to_dense(), expected)
        torch.diagonal(expected, k).fill_(0)
        assert torch.equal(matrix.remove_diag(k).to_dense(), expected)
        torch.diagonal(expected, k).copy_(torch.arange(torch.diagonal(expected, k).numel()))
        values = torch.arange(torch.diagonal(expected, k).numel(), device=device)
        assert torch.equal(torch_sparse.set_diag(matrix, values, k).to_dense(), expected)
    assert torch.equal(matrix.get_diag(), dense.diagonal())
    assert matrix.set_value(None).set_diag().nnz() == 9
    square = matrix.sparse_resize((5, 5))
    symmetric = square.to_symmetric()
    assert symmetric.is_symmetric()
    assert not square.is_symmetric()
    full = square.to_dense()
    assert torch.equal(symmetric.to_dense(), full + full.t())
    twice = torch_sparse.add(matrix, matrix.t().sparse_resize((5, 5)))
    assert torch.equal(twice.to_dense(), full + full.t())
    assert torch.equal(torch_sparse.mul(square, symmetric).to_dense(), full * (full + full.t()))
    per_row, per_col = (
        torch.arange(5.0, device=device).view(-1, 1),
        torch.arange(4.0, device=device).view(1, -1),
    )
    assert torch.equal(torch_sparse.mul(matrix, per_row).to_dense(), dense * per_row)
    assert torch.equal((matrix * per_col).to_dense(), dense * per_col)
    assert torch.equal((matrix + per_row).to_dense(), torch.where(dense == 0, 0, dense + per_row))
    repeated = SparseTensor(
        row=torch.tensor([1, 1, 0], device=device),
        col=torch.tensor([0, 0, 1], device=device),
        value=torch.tensor([5.0, 3, 2], device=device),
    )
    assert not repeated.is_coalesced()
    for reduce, value in (("sum", 8), ("mean", 4), ("max", 5), ("min", 3)):
        assert repeated.coalesce(reduce).to_dense().tolist() == [[0, 2], [value, 0]]
    assert repeated.to_dense().tolist() == [[0, 2], [8, 0]]


@pytest.mark.parametrize("per", [(-1, 1), (1, -1)], ids=["row", "column"])
@pytest.mark.parametrize("name", ["mul", "add"])
def test_changes_in_place(device, name, per):
    scale = torch.arange(2.0, 7 if per == (-1, 1) else 6, dtype=torch.float64, device=device).view(per)
    expected = getattr(torch_sparse, name)(example(device), scale)
    value = torch.ones(7, dtype=torch.float64, device=device)
    for call in (
        lambda it: getattr(torch_sparse, f"{name}_")(it, scale),
        lambda it: getattr(it, f"{name}_")(scale),
        lambda it: getattr(it, f"__i{name}__")(scale),
    ):
        matrix = example(device)
        held = matrix.storage.value()
        assert call(matrix) is matrix
        assert matrix.storage.value() is held
        assert matrix == expected
    pattern = example(device, value=False)
    assert getattr(pattern, f"{name}_")(scale) is pattern
    assert pattern == getattr(example(device, value=False), name)(scale)
    for layout in ("coo", "csc"):
        each = torch.arange(1.0, 8, dtype=torch.float64, device=device)
        matrix = example(device)
        assert getattr(matrix, f"{name}_nnz_")(each, layout=layout) is matrix
        assert matrix == getattr(example(device), f"{name}_nnz")(each, layout=layout)
    value.requires_grad_()
    matrix = example(device).set_value(value * 3)
    factor = scale.clone().requires_grad_()
    total = getattr(matrix, f"{name}_")(factor).sum()
    other = getattr(example(device).set_value(value * 3), name)(factor).sum()
    for ours, theirs in zip(
        torch.autograd.grad(total, (value, factor)), torch.autograd.grad(other, (value, factor)), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_matrix_plus_a_matrix_is_another_one(device):
    matrix = held = example(device)
    matrix += example(device)
    assert matrix is not held
    assert matrix == held * 2


def test_other_forms_of_a_matrix(device):
    matrix = example(device)
    for sizes in ((2, 10), (10, -1), (-1, 4)):
        reshaped = matrix.sparse_reshape(*sizes)
        assert torch.equal(reshaped.to_dense(), matrix.to_dense().reshape(sizes))
    with pytest.raises(ValueError, match="must be 20 .now 5 x 4., got 3 x -1"):
        matrix.sparse_reshape(3, -1)
    assert matrix.avg_bandwidth() == pytest.approx(11 / 7)
    assert matrix.bandwidth_proportion(1) == 4 / 7
    value = torch.ones(7, device=device, requires_grad=True) * 2
    matrix = matrix.set_value(value)
    assert matrix.requires_grad()
    assert matrix.detach_() is matrix
    assert not matrix.requires_grad()
    assert not value.requires_grad
    storage = example(device).storage
    assert not storage.has_rowcount()
    assert storage.fill_cache_().cached_keys() == ["rowcount", "colptr", "colcount", "csr2csc", "csc2csr"]
    assert storage.has_rowcount()
    assert storage._rowcount.tolist() == [2, 1, 0, 2, 2]
    square = example(device).sparse_resize((5, 5)).fill_cache_().remove_diag().storage
    assert square.cached_keys() == ["rowcount", "colcount"]
    assert (square.rowcount().tolist(), square.colcount().tolist()) == ([1, 0, 0, 2, 2], [2, 1, 2, 0, 0])
    assert torch_sparse.SparseStorage.empty().sparse_sizes() == (0, 0)


def test_sum_of_two_lists_of_entries(device):
    index, other = torch.tensor([[[0, 1], [1, 0]], [[1, 1], [0, 1]]], device=device)
    value = torch.tensor([1.0, 2], device=device)
    places, sums = torch_sparse.spadd(index, value, other, value * 10, 2, 2)
    assert places.tolist() == [[0, 1, 1], [1, 0, 1]]
    assert sums.tolist() == [1, 12, 20]


def test_reductions(device):
    matrix = example(device)
    dense = matrix.to_dense()
    missing = dense == 0
    for dim in (0, 1):
        assert torch.equal(torch_sparse.sum(matrix, dim=dim), dense.sum(dim))
        mean = dense.sum(dim) / (~missing).sum(dim).clamp(min=1)
        assert torch.equal(matrix.mean(dim), mean)
        assert torch.equal(matrix.max(dim), dense.amax(dim))
        least = dense.masked_fill(missing, float("inf")).amin(dim)
        assert torch.equal(matrix.min(dim), least.masked_fill(least.isinf(), 0))
    assert [float(reduce()) for reduce in (matrix.sum, matrix.mean, matrix.min, matrix.max)] == [28, 4, 1, 7]
    assert matrix.set_value(None).sum(dim=1).tolist() == [2, 1, 0, 2, 2]


def test_reductions_without_values(device):
    """As in torch_sparse, where rows without an entry have a mean, maximum and minimum of 1 too."""
    matrix = example(device).set_value(None)
    assert matrix.sum(dim=1).tolist() == [2, 1, 0, 2, 2]
    assert matrix.sum(dim=0).tolist() == [3, 2, 2, 0]
    assert matrix.sum().tolist() == 7
    for reduce in (matrix.mean, matrix.min, matrix.max):
        assert reduce(dim=1).tolist() == [1] * 5
        assert reduce(dim=0).tolist() == [1] * 4
        assert reduce().tolist() == 1
        assert reduce(dim=-1).dtype == torch.float32
    with pytest.raises(ValueError, match="dim: expected None or a dimension from 0 to 1, got 2"):
        matrix.sum(dim=2)


def test_reductions_within_entries(device):
    value = torch.randn(7, 3, dtype=torch.float64, device=device)
    matrix = example(device).set_value(value)
    for dim in (2, -1):
        assert torch.equal(matrix.sum(dim), value.sum(1))
        assert torch.equal(matrix.mean(dim), value.mean(1))
        assert torch.equal(matrix.max(dim), value.amax(1))
        assert torch.equal(matrix.min(dim), value.amin(1))


def test_coordinates_are_coalesced_and_differentiable(device):
    index = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1]], device=device)
    value = torch.tensor([5.0, 2.0, 3.0, 1.0], device=device, requires_grad=True)
    given = torch.sparse_coo_tensor(index, value, (2, 2))
    for has_value in (True, False):
        matrix = SparseTensor.from_torch_sparse_coo_tensor(given, has_value)
        assert [part.tolist() for part in matrix.coo()[:2]] == [[0, 1, 1], [1, 0, 1]]
        assert matrix.has_value() == has_value
    matrix = SparseTensor.from_torch_sparse_coo_tensor(given)
    assert matrix.storage.value().tolist() == [2, 8, 1]
    (matrix @ torch.tensor([[2.0], [1.0]], device=device)).sum().backward()
    assert value.grad.tolist() == [2, 1, 2, 1]
    matrix = SparseTensor.from_torch_sparse_csr_tensor(given.coalesce().to_sparse_csr())
    assert matrix.requires_grad()


def test_values_that_nobody_gave_have_the_default_dtype(device):
    pattern = example(device).set_value(None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        made = [
            pattern.to_dense(),
            pattern.to_torch_sparse_coo_tensor(),
            pattern.to_torch_sparse_csr_tensor(),
            pattern.to_torch_sparse_csc_tensor(),
            pattern.fill_value(2).storage.value(),
            pattern.get_diag(),
            SparseTensor.eye(3, device=device).storage.value(),
            example(device).float().fill_value(2).storage.value(),
        ]
        assert {each.dtype for each in made} == {torch.float64}
        assert pattern.dtype() == torch.float32  # as torch_sparse says
        assert pattern.to_dense(torch.float16).dtype == torch.float16
    finally:
        torch.set_default_dtype(before)


def test_moves_and_casts_of_the_storage(device):
    matrix = example(device)
    storage = matrix.storage
    halves = storage.type(torch.float16)
    assert isinstance(halves, torch_sparse.SparseStorage)
    assert halves.value().dtype == torch.float16
    assert storage.type_as(halves.value()).value().dtype == torch.float16
    for moved in (
        storage.to_device("cpu"),
        storage.device_as(torch.ones(1)),
        matrix.to_device("cpu").storage,
    ):
        assert moved.device.type == "cpu"
        assert torch.equal(moved.col(), storage.col().cpu())
    shared = example("cpu").storage
    assert not shared.is_shared()
    assert shared.share_memory_() is shared
    assert shared.is_shared()
    assert not shared.is_pinned()


def test_parts(device):
    matrix = example(device)
    dense = matrix.to_dense()
    rows = torch.tensor([4, 0, 0, 2], device=device)
    mask = torch.tensor([True, False, True, True], device=device)
    for index in (
        (slice(1, 4),),
        (slice(None), slice(-3, None)),
        (rows,),
        (slice(None), rows[1:]),
        (..., slice(0, 2)),
        (slice(3, 1),),
        (np.array([1, 3]), ...),
    ):
        assert torch.equal(matrix[index].to_dense(), dense[index])
    assert torch.equal(matrix[3].to_dense(), dense[3:4])
    assert torch.equal(matrix[rows, mask].to_dense(), dense[rows][:, mask])
    assert torch.equal(matrix[:, 0].to_dense(), dense[:, :1])
    assert torch.equal(matrix[:, [0, 2]].to_dense(), dense[:, [0, 2]])
    big = torch_sparse.masked_select_nnz(matrix, matrix.storage.value() > 3, layout="coo")
    assert torch.equal(big.to_dense(), torch.where(dense > 3, dense, 0))
    square = matrix.sparse_resize((5, 5))
    order = torch.tensor([2, 0, 4, 1, 3], device=device)
    assert torch.equal(square.permute(order).to_dense(), square.to_dense()[order][:, order])
    for dim in (0, 1):
        assert torch.equal(torch_sparse.cat([matrix, matrix], dim).to_dense(), torch.cat([dense, dense], dim))
    diagonal = torch_sparse.cat([matrix, matrix], (0, 1))
    assert torch.equal(diagonal.to_dense(), torch.block_diag(dense, dense))


@pytest.mark.parametrize("reduce", ["sum", "add", "mean", "max", "min"])
@pytest.mark.parametrize("with_value", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (4, 4, 3)], ids=["matrix", "matrices"])
def test_products_run_on_spmm(device, reduce, with_value, shape):
    """Of the last dimension but one, where the first one is as long too."""
    matrix = example(device, with_value)
    if with_value:
        matrix.requires_grad_()
    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    out = torch_sparse.matmul(matrix, x, reduce)
    row, col, value = matrix.coo()
    message = x[..., col, :] if value is None else x[..., col, :] * value[:, None]
    expected = torch_scatter.scatter(message, row, -2, dim_size=5, reduce=reduce)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    inputs = [x] if value is None else [x, value]
    for got, wanted in zip(
        torch.autograd.grad(out, inputs, weight), torch.autograd.grad(expected, inputs, weight), strict=True
    ):
        torch.testing.assert_close(got, wanted)
    assert matrix.set_value(None).storage.adjacency() is matrix.storage.adjacency()


def test_sparse_products(device):
    matrix = example(device)
    product = matrix @ matrix.t()
    assert torch.equal(product.to_dense(), matrix.to_dense() @ matrix.to_dense().t())
    assert not matrix.set_value(None).spspmm(matrix.set_value(None).t()).has_value()
    with pytest.raises(NotImplementedError, match="reduce: expected 'sum'"):
        torch_sparse.matmul(matrix, matrix.t(), "max")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SparseTensor(row=torch.tensor([0])), ValueError, "row, rowptr and col"),
        (
            lambda: SparseTensor(row=torch.tensor([0.0]), col=torch.tensor([0])),
            ValueError,
            "row: expected int64",
        ),
        (
            lambda: SparseTensor(row=torch.tensor([0]), col=torch.tensor([5]), sparse_sizes=(1, 5)),
            ValueError,
            "col: expected indices below 5, got 5",
        ),
        (
            lambda: example("cpu").set_value(torch.ones(3)),
            ValueError,
            "value: expected 7 rows, one per entry",
        ),
        (lambda: example("cpu") * torch.ones(5), ValueError, r"other: expected shape \(5, 1"),
        (lambda: example("cpu")[::2], ValueError, "index: expected slices with step 1"),
        (lambda: torch_sparse.sample_adj, ImportError, "does not provide it"),
        (
            lambda: example("cpu").saint_subgraph(torch.arange(2)),
            ImportError,
            "SparseTensor.saint_subgraph: ",
        ),
        (lambda: torch_sparse.no_such_name, AttributeError, "'torch_sparse' has no attribute 'no_such_name'"),
        (lambda: operators._refusal("neighbor_sample")(), ImportError, "install pyg-lib"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---------------------------------------------------------------- in place of the packages


def test_a_package_that_is_there_stays(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch_scatter", types.ModuleType("torch_scatter"))
    with caplog.at_level(logging.INFO, "fastsparse_pyg"):
        assert not compat._install("torch_scatter", torch_scatter)
    assert "torch_scatter is installed, so fastsparse_pyg.compat does not replace it" in caplog.text
    assert sys.modules["torch_scatter"] is not torch_scatter


SCRIPT = """
import torch
import torch.nn.functional as F

import fastsparse_pyg.compat

assert fastsparse_pyg.compat.install() == {"torch_scatter": True, "torch_sparse": True}
assert fastsparse_pyg.compat.install() == {"torch_scatter": True, "torch_sparse": True}
import torch_geometric.transforms as T
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.typing import SparseTensor as OfPyg
from torch_geometric.utils import scatter, softmax
from torch_scatter.composite import scatter_softmax
from torch_scatter.composite.softmax import scatter_softmax as the_same
from torch_scatter.scatter import scatter_mean
from torch_scatter.utils import broadcast
from torch_sparse import SparseTensor, matmul
from torch_sparse.matmul import matmul as of_submodule, spmm
from torch_sparse.mul import mul_nnz
from torch_sparse.spmm import spmm as of_entries
for name, use in {
    "sample.sample_adj": "install pyg-lib",
    "metis.weight2metis": "install pyg-lib",
    "matmul.spmm_sum": "use torch_sparse.matmul(src, other, reduce='sum')",
    "matmul.spspmm_add": "use torch_sparse.matmul(src, other, reduce='add')",
    "cat.cat_first": "use torch_sparse.cat(tensors, dim=0)",
    "narrow.__narrow_diag__": "use torch_sparse.narrow",
    "storage.get_layout": "pass layout=",
    "tensor.to_scipy": "use the method SparseTensor.to_scipy",
    "utils.index_sort": "use torch_geometric.utils.index_sort",
}.items():
    module, _, function = name.partition(".")
    try:
        exec(f"from torch_sparse.{module} import {function}")
    except ImportError as error:
        assert f"{function}: fastsparse_pyg.compat does not provide it; {use}" in str(error), error
    else:
        raise AssertionError(name)

from fastsparse_pyg import FastGCNConv, FastSAGEConv, prepare

assert OfPyg is SparseTensor
assert the_same is scatter_softmax and of_submodule is matmul and spmm is not of_entries
assert broadcast(torch.arange(3), torch.ones(2, 3, 4), 1).shape == (2, 3, 4)
torch.manual_seed(0)
edge_index = torch.randint(0, 60, (2, 400))
data = Data(x=torch.randn(60, 8), y=torch.randint(0, 3, (60,)), edge_index=edge_index)
data = T.ToSparseTensor()(data)  # as ogb's full-batch examples begin
assert isinstance(data.adj_t, SparseTensor)
data.adj_t = data.adj_t.to_symmetric()
row, col, _ = data.adj_t.coo()
both = torch.stack([col, row])
batch = Batch.from_data_list([data, data])
assert batch.adj_t.sizes() == [120, 120]
assert torch.equal(batch[1].adj_t.to_dense(), data.adj_t.to_dense())


class Net(torch.nn.Module):
    def __init__(self, layer, **options):
        super().__init__()
        self.convs = torch.nn.ModuleList([layer(8, 16, **options), layer(16, 3, **options)])

    def forward(self, x, adj_t):
        return F.log_softmax(self.convs[1](F.relu(self.convs[0](x, adj_t)), adj_t), dim=-1)


layers = [(GCNConv, {}), (GCNConv, {"cached": True}), (GCNConv, {"normalize": False}), (SAGEConv, {})]
layers += [(SAGEConv, {"aggr": "max"}), (GATConv, {"heads": 1}), (FastGCNConv, {}), (FastSAGEConv, {})]
for layer, options in layers:
    net = Net(layer, **options)
    results = []
    for graph in (data.adj_t, both):
        if "cached" in options:
            for conv in net.convs:
                conv._cached_edge_index = conv._cached_adj_t = None
        net.zero_grad()
        out = net(data.x, graph)
        F.nll_loss(out, data.y).backward()
        results.append([out.detach(), *(p.grad.clone() for p in net.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

# ogb's own normalisation of the matrix
adj_t = data.adj_t.set_diag()
deg = adj_t.sum(dim=1).to(torch.float)
scale = deg.pow(-0.5)
scale[scale == float("inf")] = 0
adj_t = scale.view(-1, 1) * adj_t * scale.view(1, -1)
dense = adj_t.to_dense()
torch.testing.assert_close(matmul(adj_t, data.x), dense @ data.x)
torch.testing.assert_close(adj_t @ data.x, dense @ data.x)
assert prepare(data.adj_t).num_edges == data.adj_t.nnz()
index = torch.randint(0, 5, (40,))
x = torch.randn(40, 2, requires_grad=True)
torch.testing.assert_close(softmax(x, index), scatter_softmax(x, index, dim=0))
for reduce in ("sum", "mean", "max", "min", "mul"):
    scatter(x, index, reduce=reduce).sum().backward()
try:
    torch.ops.torch_sparse.neighbor_sample(None)
except ImportError as error:
    assert "pyg-lib" in str(error)
print("done")
"""


@pytest.mark.slow
def test_pyg_and_the_layers_of_ogb_on_the_shim():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout.strip() == "done", done.stderr[-3000:]
