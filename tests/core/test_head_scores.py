"""Scores of nodes against their formula."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, TOLERANCE, relative_error

from fastsparse_core.fused.head_scores import head_scores


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 3, 5), (1, 1, 1), (0, 2, 4), (6, 4, 3, 5), (4, 2, 3, 2, 7)])
@pytest.mark.parametrize("count", [1, 2])
def test_scores_and_gradients(count, shape, dtype, autocast, device):
    """16-bit features give float32 scores, exact to float32; autocast changes nothing."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    feat = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    vectors = [
        torch.randn(1, *shape[-2:], generator=generator).to(device, wide).requires_grad_()
        for _ in range(count)
    ]
    upstream = [torch.randn(shape[:-1], generator=generator).to(device, wide) for _ in range(count)]
    leaves = [feat, *vectors]
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        found = head_scores(feat.flatten(-2), *vectors)
    gradients = torch.autograd.grad(found, leaves, upstream)

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = [(exact[0] * vector).sum(-1) for vector in exact[1:]]
    expected_gradients = torch.autograd.grad(expected, exact, [item.double() for item in upstream])
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == wide
        assert relative_error(got, want) < TOLERANCE[wide]
    for got, want, leaf in zip(gradients, expected_gradients, leaves, strict=True):
        assert got.dtype == leaf.dtype
        assert relative_error(got, want) < TOLERANCE[leaf.dtype]


def test_second_derivatives(device):
    feat = torch.randn(5, 6, dtype=torch.float64, device=device, requires_grad=True)
    vector = torch.randn(1, 2, 3, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda *args: head_scores(*args)[0], (feat, vector))
