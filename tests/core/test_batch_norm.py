"""Batch normalisation by masked rows, against PyTorch's of those rows in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastsparse_core.capturing.batch_norm import masked_batch_norm

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
#: Rows and columns: few, more than a block of threads handles, and numbers that are not multiples of 16
#: bytes.
SHAPES = [(9, 1), (37, 5), (700, 8), (1_031, 130), (13_000, 256), (900, 1_100), (64, 2_056)]


def draw(shape, dtype, device, centre=3.0):
    """Features, their gradient, and a mask that names about three of four rows, two at least."""
    generator = torch.Generator().manual_seed(0)
    x = (centre + torch.randn(shape, generator=generator)).to(dtype)
    grad = torch.randn(shape, generator=generator).to(dtype)
    mask = torch.rand(shape[0], generator=generator) < 0.75
    mask[:2] = True
    return x.to(device), grad.to(device), mask.to(device)


def expected_of(x, grad, mask, weight, bias, running, momentum=0.1):
    """Results and gradients of PyTorch's batch normalisation of the rows alone, in float64."""
    leaves = [None if item is None else item.double().requires_grad_() for item in (x[mask], weight, bias)]
    kept = [None if item is None else item.double() for item in running]
    out = F.batch_norm(leaves[0], *kept, *leaves[1:], training=True, momentum=momentum)
    used = [item for item in leaves if item is not None]
    return out.detach(), torch.autograd.grad(out, used, grad[mask].double()), kept


def run(x, grad, mask, weight, bias, running, momentum=0.1):
    """The same of ours: all rows."""
    leaves = [None if item is None else item.clone().requires_grad_() for item in (x, weight, bias)]
    count = mask.sum().float()
    out = masked_batch_norm(leaves[0], mask, count, *leaves[1:], *running, momentum, 1e-5)
    used = [item for item in leaves if item is not None]
    return out.detach(), torch.autograd.grad(out, used, grad)


def check(got, expected, dtype, times=1.0):
    # The rounding of one element, and for float32 statistics the rounding of the additions in a row of a sum.
    tolerance = times * {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)
    assert (got.double() - expected).norm() <= tolerance * expected.norm().clamp(min=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [False, True])
def test_as_pytorch_of_the_rows(device, shape, dtype, affine):
    x, grad, mask = draw(shape, dtype, device)
    of_columns = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = [torch.rand(shape[1], device=device, dtype=of_columns) + 0.5 for _ in range(4)]
    affine_numbers = numbers[:2] if affine else [None, None]
    running = numbers[2:]
    expected, expected_grads, expected_running = expected_of(x, grad, mask, *affine_numbers, running)
    out, grads = run(x, grad, mask, *affine_numbers, running)
    assert out.dtype == grads[0].dtype == dtype
    check(out[mask], expected, dtype)
    check(grads[0][mask], expected_grads[0], dtype, times=4)
    assert not grads[0][~mask].any()
    for got, wanted in zip([*grads[1:], *running], [*expected_grads[1:], *expected_running], strict=True):
        assert got.dtype == of_columns
        check(got, wanted, of_columns, times=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_padding_are_normalised_too(device, dtype):
    x, grad, mask = draw((50, 12), dtype, device)
    out, _ = run(x, grad, mask, None, None, (None, None))
    named = x[mask].double()
    expected = (x.double() - named.mean(0)) / (named.var(0, unbiased=False) + 1e-5).sqrt()
    check(out, expected, dtype, times=2)


def test_a_large_mean_keeps_the_variance(device):
    x, grad, mask = draw((20_000, 32), torch.float32, device, centre=3_000.0)
    expected, expected_grads, _ = expected_of(x, grad, mask, None, None, (None, None))
    out, grads = run(x, grad, mask, None, None, (None, None))
    # The mean is rounded to float32, by at most 1.3e-4 of a standard deviation. The CPU also adds in float32.
    check(out[mask], expected, torch.float32, times=100)
    check(grads[0][mask], expected_grads[0], torch.float32, times=10)


def test_one_row_and_none(device):
    x, grad, mask = draw((6, 4), torch.float32, device)
    for named in (1, 0):
        mask[:] = False
        mask[:named] = True
        running = [torch.zeros(4, device=device), torch.ones(4, device=device)]
        out, grads = run(x, grad, mask, None, None, running)
        assert out.isfinite().all()
        assert not out[mask].any()
        assert not grads[0][~mask].any()
        torch.testing.assert_close(running[1], torch.full_like(running[1], 0.9))


def test_numbers_of_columns_in_other_dtypes(device):
    """A model in bfloat16 has running statistics in bfloat16, too."""
    x, grad, mask = draw((300, 24), torch.bfloat16, device)
    numbers = [torch.rand(24, device=device).bfloat16() for _ in range(4)]
    expected, expected_grads, expected_running = expected_of(x, grad, mask, *numbers[:2], numbers[2:])
    out, grads = run(x, grad, mask, *numbers[:2], numbers[2:])
    check(out[mask], expected, torch.bfloat16)
    for got, wanted in zip(grads[1:], expected_grads[1:], strict=True):
        assert got.dtype == torch.bfloat16
        check(got, wanted, torch.bfloat16)
    for got, wanted in zip(numbers[2:], expected_running, strict=True):
        check(got, wanted, torch.bfloat16, times=2)


def test_memory_that_no_wide_load_may_read(device):
    x, grad, mask = draw((400, 8), torch.float32, device)
    shifted = torch.empty(400 * 8 + 1, device=device)[1:].view(400, 8).copy_(x)
    for columns in (x.t().contiguous().t(), shifted):
        got, got_grads = run(columns, grad, mask, None, None, (None, None))
        out, grads = run(x, grad, mask, None, None, (None, None))
        torch.testing.assert_close(got, out, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got_grads, grads, rtol=1e-5, atol=1e-6)


def test_the_same_bits_in_every_run(device):
    x, grad, mask = draw((5_000, 96), torch.float32, device)
    first, again = (run(x, grad, mask, None, None, (None, None)) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1][0], again[1][0])


@pytest.mark.gpu
def test_three_launches_each_way():
    x, grad, mask = draw((500, 32), torch.float32, "cuda")
    weight, bias, mean, var = torch.rand(4, 32, device="cuda")
    leaf, count = x.requires_grad_(), mask.sum().float()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out = masked_batch_norm(leaf, mask, count, weight, bias, mean, var, 0.1, 1e-5)
        torch.autograd.grad(out, leaf, grad)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "fastsparse" in event.name]
    assert len(names) == 6
