"""Gradients of weights: rows without a gradient add nothing, whatever they hold."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES
from torch import Tensor

from fastsparse_core.fused.linear_before_sum import linear_before_sum
from fastsparse_core.fused.weight_gradient import weight_gradient

ROWS = 60


def operands(device: str, dtype: torch.dtype, num_parts: int, width: int, rest: int) -> tuple[Tensor, Tensor]:
    """A gradient whose parts are 0 in every third row, each in others, and features."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(ROWS, num_parts * width + rest, generator=generator)
    for part in range(num_parts):
        grad[part::3, part * width : (part + 1) * width] = 0
    x = torch.randn(ROWS, 9, generator=generator)
    return grad.to(device, dtype), x.to(device, dtype)


def expected(grad: Tensor, x: Tensor, num_parts: int, width: int) -> Tensor:
    """The same in float64, row by row."""
    out = torch.zeros(grad.size(1), x.size(1), dtype=torch.float64)
    for row_grad, row in zip(grad.double().cpu(), x.double().cpu(), strict=True):
        for part in range(num_parts + 1):
            columns = slice(part * width, (part + 1) * width if part < num_parts else None)
            if part == num_parts or row_grad[columns].any():
                out[columns] += torch.outer(row_grad[columns], row)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("parts", [(1, 5, 0), (3, 4, 2), (2, 140, 0), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("out_by_in", [True, False])
def test_rows_without_a_gradient(device, dtype, special, parts, out_by_in):
    """Row 0 has no gradient in the first part only, and one column of row 20 is read by all parts."""
    num_parts, width, _ = parts
    grad, x = operands(device, dtype, *parts)
    x[0, :7] = special
    x[20, 8] = special
    grad[20] = 1
    options = (dtype, True, num_parts, width)
    got = weight_gradient(grad, x, *options, out_by_in=out_by_in)
    strided = weight_gradient(grad, x.t().contiguous().t(), *options, out_by_in=out_by_in)
    want = expected(grad, x, num_parts, width)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.02)
    for each in (got, strided):
        each = (each if out_by_in else each.t()).double().cpu()
        assert torch.equal(each.isfinite(), want.isfinite())
        finite = want.isfinite()
        torch.testing.assert_close(each[finite], want[finite], rtol=tolerance, atol=20 * tolerance)


def test_a_finite_product_keeps_its_bits(device):
    grad, x = operands(device, torch.float32, 1, 5, 0)
    assert torch.equal(weight_gradient(grad, x, torch.float32, True), grad.t() @ x)


@pytest.mark.parametrize("shape", [(0, 3, 4), (5, 0, 4), (5, 3, 0)])
def test_empty(device, shape):
    rows, width, in_width = shape
    got = weight_gradient(
        torch.zeros(rows, width, device=device),
        torch.zeros(rows, in_width, device=device),
        torch.float32,
        True,
    )
    assert got.shape == (width, in_width)
    assert not got.any()


def test_the_weights_of_16_bit_products(device):
    """Under autocast a float32 weight gets a float32 gradient."""
    grad, x = operands(device, torch.bfloat16, 1, 5, 0)
    x[0] = math.nan
    got = weight_gradient(grad, x, torch.float32, True)
    assert got.dtype == torch.float32
    assert got.isfinite().all()


def test_linear_before_sum_has_two_derivatives():
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(*size, dtype=torch.float64, generator=generator, requires_grad=True)
        for size in ((7, 3), (6, 3), (6,))
    )

    def both(*given):
        out = linear_before_sum(*given, 2, 2)
        return out[:, :2].square().sum(1) * out[:, 2:].sum(1).relu()

    assert torch.autograd.gradcheck(both, (x, weight, bias))
    assert torch.autograd.gradgradcheck(both, (x, weight, bias))


@pytest.mark.parametrize("shape", [(7, 4), (2, 7, 4), (0, 4)])
def test_linear_before_sum_takes_batches_of_gradients(shape):
    inputs = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in (shape, (5, 4), (5,))]
    out, expected = linear_before_sum(*inputs), torch.nn.functional.linear(*inputs)
    grads = torch.randn(3, *out.shape, dtype=torch.float64)
    together = torch.autograd.grad(out, inputs, grads, is_grads_batched=True)
    for nth, grad in enumerate(grads):
        wanted = torch.autograd.grad(expected, inputs, grad, retain_graph=True)
        for ours, theirs in zip(together, wanted, strict=True):
            torch.testing.assert_close(ours[nth], theirs)


def test_linear_before_sum_frees_what_no_gradient_needs():
    """As with a linear layer, x may be written where the weight needs no gradient, and the other way."""
    x, weight = torch.ones(4, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    out = linear_before_sum(x.detach(), weight)
    with torch.no_grad():
        weight.add_(1)
    out.sum().backward()
    assert weight.grad.tolist() == [[4.0] * 3] * 2
    assert linear_before_sum(x, weight.detach()).requires_grad
