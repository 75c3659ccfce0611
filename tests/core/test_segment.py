"""scatter and segment_reduce against the float64 reference, their gradients, ties, caching and errors."""

from __future__ import annotations

import gc

import pytest
import torch
from cases import (
    DTYPES,
    TOLERANCE,
    assert_equal_but_for_rounding,
    features,
    relative_error,
    special_scores,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fastsparse_core import (
    gather_csr,
    reference,
    scatter,
    scatter_softmax,
    segment_reduce,
    segment_softmax,
)
from fastsparse_core.ops._segment import _cache
from fastsparse_core.structure.segments import Segments

REDUCTIONS = ("sum", "mean", "max", "min", "mul", "var", "std")


@st.composite
def indices(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Odd groupings: no rows, no segments, one heavy segment, empty ones, ascending ones."""
    num_segments = draw(st.sampled_from([0, 1, 2, 9, 300]))
    num_rows = draw(st.sampled_from([0, 1, 5, 64, 3000])) if num_segments else 0
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    index = torch.randint(0, max(num_segments, 1), (num_rows,), generator=generator)
    kind = draw(st.sampled_from(["uniform", "heavy", "few", "sorted"]))
    if kind == "heavy":
        index[: num_rows * 9 // 10] = num_segments // 2
    elif kind == "few":
        index = index // 4 * 4
    elif kind == "sorted":
        index = index.sort().values
    return (index.int() if draw(st.booleans()) else index), num_segments


@given(
    index=indices(),
    width=st.sampled_from([None, 0, 1, 2, 3, 4, 8, 17, 32, 65, 128, 130, 300]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["contiguous", "row_stride", "misaligned", "transposed", "expanded"]),
    reduce=st.sampled_from(REDUCTIONS),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_scatter_equals_reference(device, poisoned_memory, index, width, dtype, layout, reduce):
    assume(layout != "expanded" or reduce not in ("var", "std"))  # rounding errors of 0 have no bound
    index, size = index[0].to(device), index[1]
    src = features(index.numel(), 1 if width is None else width, dtype, layout, device)
    if reduce == "mul":  # a product of 3,000 normally distributed numbers would be 0
        src = 1 + src / 1000
    src = (src[:, 0] if width is None else src).detach().requires_grad_()
    out = scatter(src, index, size, reduce)
    assert out.dtype == dtype
    exact = src.detach().double().requires_grad_()
    expected = reference.scatter(exact, index, size, reduce)
    # The variance of equal rows, or of a single one, is a difference of equal numbers.
    slack = 10.0 if reduce in ("var", "std", "mul") else 1.0
    if reduce == "mul" and index.numel():  # every factor is rounded once, equal ones in the same direction
        longest = int(index.bincount().max())
        slack = max(slack, longest * torch.finfo(torch.float32).eps / TOLERANCE[dtype])
    # Rounding errors are relative to the terms, not to sums that cancel.
    scale = max(float(expected.norm()), 1e-3 * float(exact.norm()))
    assert (out.double() - expected).norm() <= slack * TOLERANCE[dtype] * scale
    weight = torch.randn_like(expected)
    (grad,) = torch.autograd.grad(out, src, weight.to(dtype))
    (wanted,) = torch.autograd.grad(expected, exact, weight)
    scale = float(weight.norm()) if reduce in ("var", "std") else float(wanted.norm())
    assert (grad.double() - wanted).norm() <= slack * TOLERANCE[dtype] * max(scale, 1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_one_heavy_segment(device, dtype, reduce):
    index = torch.ones(200_000, dtype=torch.int64, device=device)
    index[[3, 77, 199_999]] = torch.tensor([0, 4, 0], device=device)
    src = features(index.numel(), 5, dtype, "contiguous", device) + 3
    if reduce == "mul":
        src = 1 + (src - 3) / 2**10
    out = scatter(src, index, 6, reduce)
    factor = 100 if reduce == "mul" else 10  # every factor of a product may add a rounding error
    assert relative_error(out, reference.scatter(src, index, 6, reduce)) <= factor * TOLERANCE[dtype]
    assert all(torch.equal(out, scatter(src, index.clone(), 6, reduce)) for _ in range(2))


@given(index=indices(), width=st.sampled_from([None, 1, 3, 7, 16, 40, 130]), dtype=st.sampled_from(DTYPES))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_softmax_equals_reference(device, poisoned_memory, index, width, dtype):
    index, size = index[0].to(device), index[1]
    src = features(index.numel(), 1 if width is None else width, dtype, "row_stride", device)
    src = (src[:, 0] if width is None else src).detach().requires_grad_()
    out = scatter_softmax(src, index, size)
    exact = src.detach().double().requires_grad_()
    expected = reference.scatter_softmax(exact, index, size)
    assert out.dtype == dtype
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    weight = torch.randn_like(expected)
    (grad,) = torch.autograd.grad(out, src, weight.to(dtype))
    (wanted,) = torch.autograd.grad(expected, exact, weight)
    # A gradient is a difference of two terms, each about as large as weight times gradient.
    size_of_terms = float((expected.detach() * weight).norm())
    assert (grad.double() - wanted).norm() <= 2 * TOLERANCE[dtype] * max(size_of_terms, 1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 4, 8, 33])
def test_softmax_of_special_values(device, poisoned_memory, dtype, width):
    """NaN and infinity make their segment and feature NaN, minus infinity gets 0."""
    edges, special = special_scores()
    order = edges.row.argsort(stable=True)
    index = edges.row[order].to(device)
    rowptr = torch.searchsorted(index, torch.arange(edges.shape[0] + 1, device=device))
    src = features(index.numel(), width, dtype, "contiguous", device)
    src[:, ::2] += special[order, None].to(device, dtype)
    src.requires_grad_()
    exact = src.detach().double().requires_grad_()
    out, expected = scatter_softmax(src, index), reference.scatter_softmax(exact, index, edges.shape[0])
    assert_equal_but_for_rounding(out, expected, 4 * TOLERANCE[dtype])
    assert_equal_but_for_rounding(segment_softmax(src, rowptr), expected, 4 * TOLERANCE[dtype])
    weight = features(index.numel(), width, dtype, "contiguous", device, 1)
    (grad,) = torch.autograd.grad(out, src, weight)
    (wanted,) = torch.autograd.grad(expected, exact, weight.double())
    assert_equal_but_for_rounding(grad, wanted, 4 * TOLERANCE[dtype])


def test_consecutive_segments(device, poisoned_memory):
    rowptr = torch.tensor([0, 2, 2, 5, 9], dtype=torch.int32, device=device)
    src = torch.randn(9, 3, 2, device=device, requires_grad=True)
    index = torch.tensor([0, 0, 2, 2, 2, 3, 3, 3, 3], device=device)
    for reduce in REDUCTIONS:
        assert torch.equal(segment_reduce(src, rowptr, reduce), scatter(src, index, 4, reduce))
    assert torch.equal(segment_softmax(src, rowptr), scatter_softmax(src, index, 4))
    rows = torch.randn(4, 3, 2, device=device, requires_grad=True)
    out = gather_csr(rows, rowptr)
    assert torch.equal(out, rows[index])
    (grad,) = torch.autograd.grad(out, rows, src.detach())
    assert torch.equal(grad, segment_reduce(src, rowptr))
    assert gather_csr(torch.arange(4, device=device), rowptr, 9).tolist() == index.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_ties_go_to_the_first_row(device, dtype, reduce):
    index = torch.tensor([2, 0, 2, 2, 0, 3], device=device)
    src = torch.tensor([[1, 5], [4, 2], [1, 5], [1, 5], [4, 2], [7, 7]], device=device).to(dtype)
    out, arg = scatter(src, index, 5, reduce, return_arg=True)
    assert out.tolist() == [[4, 2], [0, 0], [1, 5], [7, 7], [0, 0]]
    assert arg.tolist() == [[1, 1], [6, 6], [0, 0], [5, 5], [6, 6]]
    if dtype == torch.float32:
        src.requires_grad_()
        scatter(src, index, 5, reduce).sum().backward()
        assert src.grad.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0], [0, 0], [1, 1]]


def test_nan_and_infinity(device):
    nan, inf = float("nan"), float("inf")
    src = torch.tensor([1.0, nan, 2.0, -inf, -inf, inf, 3.0], device=device)
    index = torch.tensor([0, 0, 0, 1, 1, 2, 2], device=device)
    out, arg = scatter(src, index, 3, "max", return_arg=True)
    assert out[0].isnan()
    assert out[1:].tolist() == [-inf, inf]
    assert arg.tolist() == [1, 3, 5]
    out = scatter(src, index, 3)
    assert out[0].isnan()
    assert out[1:].tolist() == [-inf, inf]


def test_product_with_zeros(device):
    src = torch.tensor([2.0, 0, 3, 0, 0, 5, 4], device=device, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 0, 0, 1, 1, 1, 2], device=device)
    out = scatter(src, index, 4, "mul")
    assert out.tolist() == [0, 0, 4, 1]
    (grad,) = torch.autograd.grad(out.sum(), src)
    assert grad.tolist() == [0, 6, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "mul"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers(device, reduce, dtype):
    index = torch.tensor([1, 0, 3, 1, 1], device=device)
    src = torch.tensor([[5, 2], [1, 7], [9, 9], [2, 2], [3, 1]], device=device, dtype=dtype)
    expected = {
        "sum": [[1, 7], [10, 5], [0, 0], [9, 9]],
        "mean": [[1, 7], [3, 1], [0, 0], [9, 9]],
        "max": [[1, 7], [5, 2], [0, 0], [9, 9]],
        "min": [[1, 7], [2, 1], [0, 0], [9, 9]],
        "mul": [[1, 7], [30, 4], [1, 1], [9, 9]],
    }[reduce]
    out = scatter(src, index, 4, reduce)
    assert out.dtype == dtype
    assert out.tolist() == expected
    order = index.argsort(stable=True)
    rowptr = torch.tensor([0, 1, 4, 4, 5], device=device)
    assert torch.equal(segment_reduce(src[order], rowptr, reduce), out)


def test_opcheck_and_compile(device):
    index = torch.tensor([3, 0, 3, 0, 1], device=device)
    src = torch.randn(5, 2, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.fastsparse.segment_reduce.default, (src, index, None, 5, "max"))
    torch.library.opcheck(torch.ops.fastsparse.segment_softmax.default, (src, index, None, 5))
    torch._dynamo.reset()

    def model(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return scatter(scatter_softmax(x, index, 5) * x, index, 5, "std")

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out, expected = compiled(src, index), model(src, index)
    assert torch.equal(out, expected)
    grads = [torch.autograd.grad(result.sum(), src)[0] for result in (out, expected)]
    assert torch.equal(*grads)


@pytest.mark.slow
def test_an_index_that_compiled_code_makes(device):
    """Inductor writes the second one into the very tensor of the first, without counting its version up."""

    def model(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        first = scatter(x, (index * 3 + 1) % 50, 50)
        second = scatter(x, (index * (7 + (first.sum() > 1e9).long()) + 5) % 50, 50)
        return first + second

    x, index = torch.randn(200, 4, device=device), torch.arange(200, device=device)
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(model, fullgraph=True)(x, index), model(x, index), atol=1e-5)


def test_new_indices_of_one_size(device):
    # After an index that does not ascend, the next ones are sorted without a check first, also if they ascend
    # or have wrong values.
    src = torch.randn(3000, 4, dtype=torch.float64, device=device)
    for nth, size in enumerate([100, 100, 128, 128, 1, 1]):
        index = torch.randint(0, size, (3000,), device=device)
        for each in (index, index.sort().values, index.int()):
            expected = torch.zeros(size, 4, dtype=torch.float64, device=device).index_add_(0, each, src)
            torch.testing.assert_close(scatter(src, each, size), expected)
        for wrong in (size, -1, size + 2**20, -(2**31)):
            for dtype in (torch.int64, torch.int32):
                bad = index.to(dtype)
                bad[nth * 500] = wrong
                with pytest.raises(ValueError, match=f"from 0 to dim_size - 1 = {size - 1}"):
                    scatter(src, bad, size)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_new_index_is_reduced_before_it_is_known(device, poisoned_memory, reduce):
    # On a GPU: slices and cut segments; the host only knows how many there can be.
    for num_rows, heavy in ((3000, 0), (2100, 1000), (4000, 3999), (2048, 2048)):
        index = torch.randint(0, 300, (num_rows,), device=device)
        index[:heavy] = 7
        for width in (1, 16, 130):
            src = torch.randn(num_rows, width, device=device)
            if reduce == "mul":
                src = 1 + src / 1000
            new = index.clone()
            out = scatter(src, new, 300, reduce)
            assert torch.equal(out, scatter(src, new, 300, reduce))
            expected = reference.scatter(src.double(), index, 300, reduce)
            torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_one_call_before_a_capture_is_enough(reduce):
    src, index = torch.randn(5000, 16, device="cuda"), torch.randint(0, 300, (5000,), device="cuda")
    scatter(src, index.clone(), 300, reduce)  # from here on, an index of these sizes is sorted unchecked
    scatter(src, index, 300, reduce)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scatter(src, index, 300, reduce)
    src.normal_()
    graph.replay()
    assert torch.equal(out, scatter(src, index, 300, reduce))


def test_an_index_that_ascends_keeps_no_order(device):
    index = torch.randint(0, 50, (700,), device=device)
    for each, has_order in ((index, True), (index.sort().values, False), (index.flip(0), True)):
        segments = Segments.from_index(each, 50)
        assert (segments.order is not None) == has_order
        assert torch.equal(segments.rowptr.diff(), each.bincount(minlength=50))
        split = segments.row_split
        assert split.slices.size(0) == 50 - split.split_row.numel() + split.num_slots


def test_an_index_is_sorted_once_and_forgotten_with_it(device, monkeypatch):
    calls = []
    build = Segments.from_index.__func__
    monkeypatch.setattr(
        Segments, "from_index", classmethod(lambda cls, *args: calls.append(1) or build(cls, *args))
    )
    index = torch.tensor([1, 0, 1], device=device)
    src = torch.ones(3, 2, device=device, requires_grad=True)
    for _ in range(3):
        scatter(src, index, 2).sum().backward()
    assert len(calls) == 1
    with torch.inference_mode():
        scatter(src, index, 2)
    assert len(calls) == 1
    assert scatter(src, index, 2).tolist() == [[1, 1], [2, 2]]
    index[0] = 0
    assert scatter(src, index, 2).tolist() == [[2, 2], [1, 1]]
    scatter(src, index, 4)
    assert len(calls) == 3
    before = _cache.info().entries
    del index
    gc.collect()
    assert _cache.info().entries == before - 2


ROWS, INDEX = torch.ones(3, 2), torch.tensor([0, 1, 0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: scatter([1.0], INDEX), TypeError, "src: expected a tensor, got list"),
        (lambda: scatter(torch.tensor(1.0), INDEX), ValueError, "src: expected at least one dimension"),
        (
            lambda: scatter(ROWS, INDEX.float()),
            TypeError,
            "index: expected int32 or int64, got torch.float32",
        ),
        (lambda: scatter(ROWS, INDEX[:2]), ValueError, r"index: expected shape \(3,\), got shape \(2,\)"),
        (lambda: scatter(ROWS, INDEX, 1), ValueError, "dim_size - 1 = 0, got values from 0 to 1"),
        (lambda: scatter(ROWS, INDEX - 1, 2), ValueError, "got values from -1 to 0"),
        (lambda: scatter(ROWS, INDEX, -1), ValueError, "dim_size: expected 0 or more"),
        (lambda: scatter(ROWS, INDEX, 2, "median"), ValueError, "reduce: expected one of 'sum'"),
        (lambda: scatter(ROWS, INDEX, 2, return_arg=True), ValueError, "return_arg: expected False"),
        (
            lambda: scatter(ROWS.to("meta"), INDEX),
            ValueError,
            "index: expected device meta like src, got cpu",
        ),
        (lambda: scatter(ROWS.bool(), INDEX), TypeError, "src: expected float64"),
        (lambda: scatter(ROWS.int(), INDEX, 2, "std"), TypeError, "src: expected a floating tensor"),
        (lambda: segment_reduce(ROWS, INDEX), ValueError, "rowptr: expected ascending values from 0 to 3"),
        (lambda: segment_reduce(ROWS, INDEX[:0]), ValueError, r"rowptr: expected num_segments \+ 1 entries"),
        (lambda: segment_softmax(ROWS.int(), INDEX), TypeError, "src: expected float64"),
        (lambda: gather_csr(ROWS, INDEX), ValueError, r"rowptr: expected shape \(4,\)"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_rows_of_an_edge_index_are_sorted_once_each():
    edge_index = torch.randint(50, (2, 400))
    src = torch.randn(400, 3)
    _cache.clear()
    for _ in range(3):
        for row in (0, 1):
            scatter(src, edge_index[row], 50)
    assert _cache.info().misses == 2
    edge_index[1].fill_(7)
    torch.testing.assert_close(scatter(src, edge_index[1], 50)[7], src.sum(0))
    assert scatter(src, edge_index[1], 50)[:7].count_nonzero() == 0
    _cache.clear()
