"""Linear maps of many rows by Triton: on CUDA, or interpreted on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fastsparse_core.ops import edge_products

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def kernels(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Used for few rows, too; Triton's interpreter runs them on the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1" if request.node.callspec.params["device"] == "cpu" else "0")
    pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(edge_products, "_fits", lambda *_: True)
    edge_products._kernels.cache_clear()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "columns", "width"), [(200, 64, 128), (70, 33, 20), (1, 16, 5), (0, 8, 8)])
def test_products_and_second_derivatives(rows: int, columns: int, width: int, device: str):
    torch.manual_seed(0)
    found = []
    for function, dtype in ((edge_products.linear_of_rows, torch.float32), (F.linear, torch.float64)):
        torch.manual_seed(0)
        x = torch.randn(rows, columns, device=device).to(dtype).requires_grad_()
        weight = torch.randn(width, columns, device=device).to(dtype).requires_grad_()
        out = function(x, weight)
        first = torch.autograd.grad(out.square().sum(), (x, weight), create_graph=True)
        loss = sum(each.square().sum() for each in first)
        found.append([out, *first, *torch.autograd.grad(loss, (x, weight))])
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape
        assert (got - want).norm() <= 2e-6 * want.norm().clamp(min=1)


@pytest.mark.gpu
def test_many_rows_have_the_same_bits_every_time():
    x = torch.randn(100_000, 128, device="cuda", requires_grad=True)
    weight = torch.randn(128, 128, device="cuda", requires_grad=True)
    assert edge_products._fits(x, weight)
    found = []
    for _ in range(2):
        out = edge_products.linear_of_rows(x, weight)
        found.append([out, *torch.autograd.grad(out.square().sum(), (x, weight))])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    exact = x.double() @ weight.double().t()
    assert (found[0][0] - exact).norm() <= 2e-6 * exact.norm()


def test_what_is_left_to_pytorch():
    rows = torch.randn(100_000, 128)
    assert not edge_products._fits(rows, torch.randn(128, 128))  # on the CPU
    torch.testing.assert_close(
        edge_products.linear_of_rows(rows[:9], torch.eye(128)), rows[:9], rtol=0, atol=0
    )
