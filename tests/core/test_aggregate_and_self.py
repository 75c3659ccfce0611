"""GIN's sum in one node of autograd's graph, against its operators one after the other."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, TOLERANCE, relative_error

from fastsparse_core import Adjacency, spmm
from fastsparse_core.fused.aggregate_transform import aggregate_and_self


def structure(device: str, nodes: int = 60, edges: int = 300) -> Adjacency:
    row, col = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0)).to(device)
    return Adjacency.from_coo(row, col, (nodes, nodes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [torch.tensor(0.5), torch.tensor([-1.25])])
def test_results_and_gradients(device, poisoned_memory, dtype, eps):
    adj, eps = structure(device), eps.to(device, dtype)
    x = torch.randn(60, 24, device=device).to(dtype).requires_grad_()
    grad = torch.randn(60, 24, device=device).to(dtype)
    exact = x.detach().double().requires_grad_()
    want = spmm(adj, exact) + (1 + eps.double()) * exact
    found = aggregate_and_self(adj, x, eps)
    assert found.dtype == dtype
    assert relative_error(found, want) <= TOLERANCE[dtype]
    assert torch.equal(aggregate_and_self(adj, x.detach(), eps), found)
    (expected,) = torch.autograd.grad(want, exact, grad.double())
    (got,) = torch.autograd.grad(found, x, grad)
    assert relative_error(got, expected) <= TOLERANCE[dtype]


def test_double_backward(device):
    adj, eps = structure(device, 7, 20), torch.tensor([0.5], dtype=torch.float64, device=device)
    x = torch.randn(7, 3, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: aggregate_and_self(adj, x, eps).square(), x)


def test_eps_may_be_written_before_the_backward_pass(device):
    adj, eps = structure(device), torch.zeros(1, device=device)
    x = torch.randn(60, 8, device=device, requires_grad=True)
    gradients = []
    for value in (0.0, 9.0):
        out = aggregate_and_self(adj, x, eps.zero_())
        eps.fill_(value)
        gradients.append(torch.autograd.grad(out.sum(), x)[0])
    assert torch.equal(*gradients)


def test_what_it_does_not_serve(device):
    adj, x, eps = structure(device), torch.randn(60, 8, device=device), torch.zeros(1, device=device)
    assert aggregate_and_self(adj, x, eps) is not None
    assert aggregate_and_self(adj, x, eps.clone().requires_grad_()) is None
    assert aggregate_and_self(adj, x.double(), eps) is None
    assert aggregate_and_self(adj, x[:-1], eps) is None
    assert aggregate_and_self(adj, x, torch.zeros(8, device=device)) is None
    with torch.autocast(device, torch.bfloat16):
        assert aggregate_and_self(adj, x.double(), eps) is None
        assert aggregate_and_self(adj, x.half(), eps) is None
        assert aggregate_and_self(adj, x, eps.double()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(device, dtype):
    adj, eps = structure(device), torch.tensor([0.5], device=device)
    x = torch.randn(60, 8, device=device).to(dtype).requires_grad_()
    want = spmm(adj, x.double()) + 1.5 * x.double()
    with torch.autocast(device, torch.bfloat16):
        found = aggregate_and_self(adj, x, eps)
        (got,) = torch.autograd.grad(found, x, torch.ones_like(found), create_graph=True)
        with torch.no_grad():
            assert torch.equal(aggregate_and_self(adj, x, eps), found)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, want) <= TOLERANCE[torch.bfloat16]
    (expected,) = torch.autograd.grad(want, x, torch.ones_like(want))
    (once,) = torch.autograd.grad(found, x, torch.ones_like(found))
    for gradient in (got, once):
        assert gradient.dtype == dtype
        assert relative_error(gradient, expected) <= TOLERANCE[torch.bfloat16]
