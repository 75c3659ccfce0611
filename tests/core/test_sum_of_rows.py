"""Sums of rows, as in gradients of biases, against float64 and against PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES

from fastsparse_core.ops._sum_of_rows import sum_of_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (0, 3),
        (3, 0),
        (1, 1),
        (65, 130),
        (4096, 7),
        (30, 4, 70),
        (20_001, 1),
        (25_001, 47),
        (70_000, 128),
        (21_000, 3, 700),
    ],
)
def test_sums(device, dtype, shape):
    if device == "cpu" and math.prod(shape) > 10_000_000:
        pytest.skip("seconds for what PyTorch sums")
    rows = (torch.rand(shape, device=device) / 8).to(dtype)  # so that sums are finite in float16
    for layout in (
        rows,
        rows.transpose(0, -1).contiguous().transpose(0, -1),
        rows[..., ::2],
        rows[:1].expand(shape),
    ):
        expected = layout.double().sum(0)
        for result in {dtype, torch.float64 if dtype == torch.float64 else torch.float32}:
            with torch.no_grad():
                got = sum_of_rows(layout, result)
                assert torch.equal(got, sum_of_rows(layout, result))
            assert got.dtype == result
            tolerance = {torch.float64: 1e-13, torch.float32: 1e-6}.get(result, torch.finfo(result).eps)
            assert (got.double() - expected).norm() <= tolerance * expected.norm().clamp(min=1e-30)


@pytest.mark.parametrize("num_rows", [18_000, 860_000])
@pytest.mark.parametrize("terms", ["ascending", "random"])
def test_as_accurate_as_pytorch_where_terms_cancel(device, num_rows, terms):
    if terms == "ascending":
        rows = torch.linspace(-1, 1, num_rows, device=device)[:, None] + torch.zeros(32, device=device)
    else:
        rows = torch.randn(num_rows, 32, device=device)
    exact = rows.double().sum(0)
    with torch.no_grad():
        ours, theirs = (
            (each.double() - exact).norm() for each in (sum_of_rows(rows, rows.dtype), rows.sum(0))
        )
    assert ours <= theirs * 1.01


@pytest.mark.gpu
def test_tall_sums_are_ours_on_a_gpu(monkeypatch):
    """Also where PyTorch is told to be deterministic: the order of the additions is fixed."""
    rows = torch.randn(30_000, 40, device="cuda")
    monkeypatch.setattr(torch.Tensor, "sum", lambda *_, **__: pytest.fail("summed by PyTorch"))
    with torch.no_grad():
        got = sum_of_rows(rows, torch.float32)
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.equal(got, sum_of_rows(rows, torch.float32))
        finally:
            torch.use_deterministic_algorithms(False)
