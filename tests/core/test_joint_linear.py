"""Linear layers on the same features: one product, or one by one where they cannot be joined."""

from __future__ import annotations

import pytest
import torch
from cases import TOLERANCE, relative_error
from torch import nn

from fastsparse_core.fused.joint_linear import joint_linear


def layers(widths, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(7, width, bias=bias, dtype=dtype) for width in widths)


def products(monkeypatch):
    """Counts calls of F.linear."""
    calls = []
    plain = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *args: calls.append(1) or plain(*args))
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(9,), (0,), (3, 5)])
@pytest.mark.parametrize("widths", [(8, 8, 8, 8), (3, 1, 5), (4,)], ids=str)
def test_results_and_gradients(monkeypatch, device, widths, shape, bias, dtype):
    modules = layers(widths, bias, dtype).to(device)
    x = torch.randn(*shape, 7).to(device, dtype).requires_grad_()
    leaves = [x, *modules.parameters()]
    calls = products(monkeypatch)
    found = joint_linear(x, modules)
    assert len(calls) == 1
    upstream = [torch.randn(item.shape).to(item) for item in found]
    gradients = torch.autograd.grad(found, leaves, upstream)

    modules.double()
    exact = x.detach().double().requires_grad_()
    expected = [module(exact) for module in modules]
    leaves = [exact, *modules.parameters()]
    expected_gradients = torch.autograd.grad(expected, leaves, [item.double() for item in upstream])
    for got, want in zip((*found, *gradients), (*expected, *expected_gradients), strict=True):
        assert got.dtype == dtype
        assert got.shape == want.shape
        assert relative_error(got, want) < TOLERANCE[dtype]


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked(modules):
    modules[1].register_forward_hook(lambda module, args, out: 3 * out)


def doubled(modules):
    modules[1] = Doubled(7, 4)


def wrapped(modules):
    modules[1] = nn.Sequential(nn.Linear(7, 4), nn.ReLU())


def without_bias(modules):
    modules[1] = nn.Linear(7, 4, bias=False)


@pytest.mark.parametrize("change", [hooked, doubled, wrapped, without_bias])
def test_layers_that_cannot_be_joined_are_called(monkeypatch, device, change):
    modules = layers((4, 4, 4))
    change(modules)
    modules.to(device)
    x = torch.randn(5, 7, device=device)
    calls = products(monkeypatch)
    found = joint_linear(x, modules)
    assert len(calls) == 3
    for got, module in zip(found, modules, strict=True):
        assert torch.equal(got, module(x))


def test_autocast_keeps_its_dtype(device):
    modules = layers((8, 8)).to(device)
    x = torch.randn(5, 7, device=device)
    with torch.autocast(device, torch.bfloat16):
        found = joint_linear(x, modules)
    for got, module in zip(found, modules, strict=True):
        assert got.dtype == torch.bfloat16
        assert relative_error(got, module(x).double()) < TOLERANCE[torch.bfloat16]
