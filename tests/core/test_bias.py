"""Biases whose gradients are summed by `sum_of_rows`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE, relative_error

from fastsparse_core.fused import bias as biases
from fastsparse_core.fused.bias import add_bias, linear
from fastsparse_core.ops._sum_of_rows import sum_of_rows

ROWS = 50


@pytest.fixture(params=["by itself", "by PyTorch"])
def how(request, monkeypatch):
    monkeypatch.setattr(biases, "_sums_by_itself", lambda *_: request.param == "by itself")
    return request.param


def draw(*shape, device, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias_dtype", ["same", torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(6,), (3, 4)])
def test_add_bias(device, how, dtype, bias_dtype, shape):
    out = draw(ROWS, *shape, device=device, dtype=dtype)
    bias = draw(*shape, device=device, dtype=dtype if bias_dtype == "same" else bias_dtype)
    result = add_bias(out, bias)
    assert result.dtype == dtype
    assert relative_error(result, out.double() + bias.double()) <= TOLERANCE[dtype]
    upstream = torch.randn_like(result)
    gradients = torch.autograd.grad(result, [out, bias], upstream)
    assert [gradient.dtype for gradient in gradients] == [dtype, bias.dtype]
    assert torch.equal(gradients[0], upstream)
    tolerance = max(TOLERANCE[dtype], TOLERANCE[bias.dtype])
    assert relative_error(gradients[1], upstream.double().sum(0)) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=str)
def test_linear(device, how, dtype, amp):
    if amp is not None and dtype != torch.float32:
        pytest.skip("autocast is for float32")
    x, weight, bias = (draw(*shape, device=device, dtype=dtype) for shape in [(ROWS, 5), (7, 5), (7,)])
    leaves = [x, weight, bias]
    with torch.autocast(torch.device(device).type, amp, enabled=amp is not None):
        result = linear(*leaves)
        expected = F.linear(*leaves)
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)
    upstream = torch.randn_like(result)
    found = torch.autograd.grad(result, leaves, upstream)
    for got, want in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=True):
        assert got.dtype == want.dtype
        assert relative_error(got, want) <= TOLERANCE[result.dtype]


def test_second_derivatives(device, how):
    out, bias = draw(ROWS, 3, device=device), draw(3, device=device)
    assert torch.autograd.gradgradcheck(lambda *given: add_bias(*given).square(), (out, bias))
    x, weight = draw(4, 3, device=device), draw(3, 3, device=device)
    assert torch.autograd.gradgradcheck(lambda *given: linear(*given).square(), (x, weight, bias))
    (batched,) = torch.autograd.grad(
        add_bias(out, bias),
        bias,
        torch.ones(2, ROWS, 3, device=device, dtype=bias.dtype),
        is_grads_batched=True,
    )
    assert torch.equal(batched, torch.full_like(batched, ROWS))


def test_a_constant_bias_gets_no_gradient(device, how):
    out, bias = draw(ROWS, 3, device=device), draw(3, device=device).detach()
    add_bias(out, bias).sum().backward()
    assert bias.grad is None
    assert torch.equal(out.grad, torch.ones_like(out))


def test_a_bias_of_another_shape_is_broadcast(device, how):
    out, bias = draw(ROWS, 2, 3, device=device), draw(3, device=device)
    add_bias(out, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, 2 * ROWS))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [biases._TALL - 1, biases._TALL])
@pytest.mark.parametrize("given", ["add_bias", "linear"])
def test_tall_results_sum_by_themselves(monkeypatch, rows, given):
    calls = []
    monkeypatch.setattr(biases, "sum_of_rows", lambda *args: calls.append(1) or sum_of_rows(*args))
    x, bias = draw(rows, 8, device="cuda", dtype=torch.float32), draw(8, device="cuda", dtype=torch.float32)
    out = add_bias(x, bias) if given == "add_bias" else linear(x, torch.eye(8, device="cuda"), bias)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    assert len(calls) == (rows >= biases._TALL)
    with torch.no_grad():
        assert not add_bias(x, bias).requires_grad
    assert not biases._sums_by_itself(x, bias.detach())
    assert len(calls) == (rows >= biases._TALL)
    assert relative_error(bias.grad, upstream.double().sum(0)) <= TOLERANCE[torch.float32]


def test_no_gradient_is_none(how):
    """If a later function returns no gradient, the bias gets None: an optimizer must not see zeros."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    out, bias = draw(ROWS, 3, device="cpu"), draw(3, device="cpu")
    Stop.apply(add_bias(out, bias)).sum().backward()
    assert out.grad is None
    assert bias.grad is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6,), (3, 64)])
def test_one_row_for_all_is_not_written_out(shape):
    out = draw(200_000, *shape, device="cuda", dtype=torch.float32)
    bias = draw(*shape, device="cuda", dtype=torch.float32)
    result = add_bias(out, bias)
    upstream = torch.randn(shape, device="cuda").expand(result.shape)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (gradient,) = torch.autograd.grad(result, bias, upstream)
    assert torch.cuda.max_memory_allocated() - before < out.nbytes / 4
    assert relative_error(gradient, upstream.double().sum(0)) <= TOLERANCE[torch.float32]
