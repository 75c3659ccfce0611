"""maxk, with sparse and dense results, against the float64 reference and torch.topk, its gradients, extremes
and errors."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES, LAYOUTS, features
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastsparse_core import CBSR, maxk, reference
from fastsparse_core.ops.maxk import maxk_dense

#: On both sides of every chunk, panel and id type of the kernel.
WIDTHS = [
    1,
    2,
    3,
    5,
    31,
    32,
    33,
    64,
    100,
    127,
    128,
    129,
    255,
    256,
    257,
    384,
    512,
    513,
    1000,
    1024,
    1025,
    2000,
]


def bits(kept: torch.Tensor, width: int) -> torch.Tensor:
    """Words as a boolean for each column; bits beyond the width are 0."""
    columns = torch.arange(32 * kept.size(1), device=kept.device)
    kept = (kept[:, columns // 32] >> (columns % 32) & 1).bool()
    assert not kept[:, width:].any()
    return kept[:, :width]


def check(x: torch.Tensor, k: int) -> CBSR:
    """Exactly the reference's columns, and in them the very numbers of ``x``, as sparse and as dense rows."""
    kept = maxk(x, k)
    values, ids = reference.maxk(x, k)
    assert kept.dtype == x.dtype
    assert kept.values.shape == (x.size(0), k)
    assert torch.equal(kept.ids.long(), ids)
    assert torch.equal(kept.values.double().nan_to_num(1e300), values.detach().nan_to_num(1e300))
    kept.check()
    dense, words = torch.ops.fastsparse.maxk_dense.default(x, k)
    assert torch.equal(dense.double().nan_to_num(1e300), kept.to_dense().double().nan_to_num(1e300))
    columns = bits(words, x.size(1))
    assert torch.equal(columns, torch.zeros_like(columns).scatter(1, ids, value=True))
    masked = torch.ops.fastsparse.mask_rows.default(x, words)
    assert torch.equal(masked.double().nan_to_num(1e300), dense.double().nan_to_num(1e300))
    return kept


@given(
    num_rows=st.sampled_from([0, 1, 2, 9, 70, 300]),
    width=st.sampled_from(WIDTHS),
    part=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    kind=st.sampled_from(["normal", "relu", "levels", "constant", "heavy", "scaled"]),
)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_reference(device, poisoned_memory, num_rows, width, part, dtype, layout, kind):
    x = features(num_rows, width, dtype, layout, device, seed=width)
    if kind == "relu":
        x = x.relu()
    elif kind == "levels":
        x = x.round()  # many ties
    elif kind == "constant":
        x = torch.zeros_like(x)
    elif kind == "heavy":
        x = (x.double() ** 9).to(dtype)  # spread over many binades
    elif kind == "scaled":  # every row has another scale and level
        row = torch.arange(num_rows, device=device, dtype=x.dtype)[:, None]
        x = x * row + row * 3
    check(x, max(1, round(part * width)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 32, 255, 256])
def test_same_values_as_topk(device, dtype, k):
    x = features(500, 256, dtype, "contiguous", device)
    kept = maxk(x, k)
    assert torch.equal(kept.values.sort(1, descending=True).values, x.topk(k, dim=1).values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 256, 1024, 3000])
def test_special_values(device, dtype, width):
    generator = torch.Generator().manual_seed(width)
    special = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0]
    special += [torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny]
    special += [torch.finfo(dtype).smallest_normal / 4, -torch.finfo(dtype).smallest_normal / 4]
    pick = torch.randint(0, len(special), (60, width), generator=generator)
    x = torch.tensor(special, dtype=dtype)[pick].to(device)
    x[:10] = torch.randn(10, width, generator=generator).to(x)
    x[0, ::3] = math.nan
    x[1] = math.nan
    x[2] = -math.inf
    x[3] = math.inf
    x[4, width // 2] = math.nan
    x[5, : width // 2] = -0.0
    x[5, width // 2 :] = 0.0
    x[6, 1:] = -math.inf
    x[7, ::2] = math.inf
    for k in (1, 2, width // 3, width // 2, width - 1, width):
        check(x, k)


def test_nan_counts_as_largest(device):
    x = torch.tensor([[1.0, math.nan, math.inf, 3.0, math.nan]], device=device)
    assert maxk(x, 1).ids.tolist() == [[1]]
    assert maxk(x, 2).ids.tolist() == [[1, 4]]
    assert maxk(x, 3).ids.tolist() == [[1, 2, 4]]


def test_ties_go_to_the_lower_column(device):
    x = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0], [-0.0, 0.0, -0.0, 0.0, -1.0]], device=device)
    assert maxk(x, 3).ids.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("width", [17, 300, 1500])
def test_adversarial_for_an_interpolating_search(device, width):
    """One huge entry, or values that grow geometrically: the distance to the threshold says nothing."""
    geometric = torch.logspace(-30, 30, width, device=device)
    row = torch.full((width,), 1e-30, device=device)
    row[3] = 3e38
    row[7:12] = torch.tensor([1.0, 1.0000001, 1.0000002, 1.0, 2.0], device=device)
    steps = torch.arange(width, device=device, dtype=torch.float32) * 1e-45 + 1.0
    denormal = torch.arange(width, device=device, dtype=torch.float32) * 1.4e-45
    x = torch.stack([geometric, -geometric, row, -row, steps, denormal, geometric.flip(0)])
    for k in (1, 2, 4, 8, width // 2, width - 1):
        check(x, k)


def test_wide_rows(device):
    x = features(3, 65_536, torch.float32, "contiguous", device)
    kept = check(x, 1000)
    assert kept.ids.dtype == torch.uint16
    assert kept.ids.long().max() > 2**15


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_goes_to_the_kept_entries(device, poisoned_memory, dtype):
    x = features(40, 100, dtype, "row_stride", device).requires_grad_()
    kept = maxk(x, 9)
    weight = torch.randn_like(kept.values)
    (grad,) = torch.autograd.grad(kept.values, x, weight)
    assert torch.equal(grad.double(), reference.cbsr_to_dense(weight, kept.ids, 100))
    ones = torch.ones_like(weight)
    for dense in (maxk(x, 9).to_dense(), maxk_dense(x, 9)):
        (dense_grad,) = torch.autograd.grad(dense.sum(), x)
        assert torch.equal(dense_grad.double(), reference.cbsr_to_dense(ones, kept.ids, 100))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [1, 33, 64, 300, 1030])
def test_masked_rows(device, poisoned_memory, width, layout, dtype):
    rows = features(45, width, dtype, layout, device)
    keeps = torch.rand(45, width, device=device) < 0.5
    words = torch.zeros(45, (width + 31) // 32, dtype=torch.int64, device=device)
    words.index_add_(
        1, torch.arange(width, device=device) // 32, keeps << torch.arange(width, device=device) % 32
    )
    out = torch.ops.fastsparse.mask_rows.default(rows, words.to(torch.int32))
    assert torch.equal(out, rows * keeps)


def test_what_is_not_kept_is_zero_whatever_it_was(device):
    x = torch.full((3, 70), -math.inf, device=device)
    x[:, 3] = math.nan
    dense, kept = torch.ops.fastsparse.maxk_dense.default(x, 1)
    assert dense.isnan().nonzero()[:, 1].tolist() == [3, 3, 3]
    assert (dense.nan_to_num(0) == 0).all()
    assert (torch.ops.fastsparse.mask_rows.default(x - math.inf, kept).nan_to_num(0) == 0).all()


@pytest.mark.gpu
def test_captured_in_a_cuda_graph():
    x = torch.randn(300, 256, device="cuda")
    maxk(x, 32).to_dense(), maxk_dense(x, 32)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        written, dense = maxk(x, 32).to_dense(), maxk_dense(x, 32)
    x.copy_(torch.randn(300, 256, device="cuda"))
    captured.replay()
    torch.cuda.synchronize()
    assert torch.equal(written, maxk(x, 32).to_dense())
    assert torch.equal(dense, written)


@pytest.mark.parametrize(
    ("x", "k", "error", "message"),
    [
        (torch.ones(3, 4), 0, ValueError, "k: expected at least 1 kept entry in each row, got 0"),
        (torch.ones(3, 4), -2, ValueError, "k: expected at least 1"),
        (torch.ones(3, 4), 5, ValueError, "k: expected at most 4, the width of x, got 5"),
        (torch.ones(3, 0), 1, ValueError, "k: expected at most 0, the width of x, got 1"),
        (torch.ones(3, 4), 2.0, TypeError, "k: expected an int, got float"),
        (torch.ones(3, 4), True, TypeError, "k: expected an int, got bool"),
        (torch.ones(3, 4).int(), 2, TypeError, "x: expected float64, .* got torch.int32"),
        ([[1.0]], 1, TypeError, "x: expected a tensor, got list"),
        (torch.ones(3), 1, ValueError, r"x: expected a matrix \(n, D\), got shape \(3,\)"),
        (torch.ones(1, 65_537), 1, ValueError, "width: expected at most 65536 columns"),
    ],
)
def test_bad_input(x, k, error, message):
    for function in (maxk, maxk_dense):
        with pytest.raises(error, match=message):
            function(x, k)
