"""Weighted sums and the linear maps of GraphConv in one node of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import TOLERANCE, relative_error
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core.fused.aggregate_transform import weighted_linear

N, E, WIDE, NARROW = 20, 90, 9, 4
NAMES = ("x", "value", "weight", "bias", "root_weight")


def draw(
    dtype: torch.dtype, device: str, inside: int, outside: int
) -> tuple[Adjacency, Tensor, list[Tensor]]:
    """A structure, its edges, and what is multiplied."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(N - 3, (2, E), generator=generator).to(device)  # some nodes have none
    shapes = ((N, inside), (E,), (outside, inside), (outside,), (outside, inside))
    given = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes
    ]
    return Adjacency.from_coo(*edges, (N, N)), edges, [each.requires_grad_() for each in given]


def dense(edges: Tensor, given: list[Tensor], reduce: str) -> Tensor:
    x, value, weight, bias, root_weight = given
    matrix = x.new_zeros(N, N).index_put(tuple(edges), value, accumulate=True)
    sums = matrix @ x
    if reduce == "mean":
        sums = sums / torch.bincount(edges[0], minlength=N).clamp(min=1)[:, None]
    return sums @ weight.t() + bias + x @ root_weight.t()


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize(("inside", "outside"), [(NARROW, WIDE), (WIDE, NARROW)], ids=["widens", "narrows"])
def test_results_and_gradients(reduce: str, inside: int, outside: int, device: str) -> None:
    adj, edges, given = draw(torch.float64, device, inside, outside)

    def layer(*given: Tensor) -> Tensor:
        out = weighted_linear(adj, *given, reduce, transform_first=inside > outside)
        assert out is not None
        return out

    out, want = layer(*given), dense(edges, given, reduce)
    torch.testing.assert_close(out, want)
    with torch.no_grad():
        assert torch.equal(layer(*given), out)
    upstream = torch.randn_like(want)
    wanted = torch.autograd.grad(want, given, upstream)
    for got, right in zip(torch.autograd.grad(out, given, upstream), wanted, strict=True):
        torch.testing.assert_close(got, right)
    for name, tensor, right in zip(NAMES, given, wanted, strict=True):  # each alone
        alone = [each if each is tensor else each.detach() for each in given]
        (got,) = torch.autograd.grad(layer(*alone), tensor, upstream)
        torch.testing.assert_close(got, right, msg=name)
    assert torch.autograd.gradgradcheck(layer, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_of_its_dtype(dtype: torch.dtype, device: str) -> None:
    adj, edges, given = draw(dtype, device, NARROW, WIDE)
    out = weighted_linear(adj, *given, "sum")
    assert out is not None
    assert out.dtype == dtype
    want = dense(edges, [each.double() for each in given], "sum")
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize(("inside", "outside"), [(NARROW, WIDE), (WIDE, NARROW)], ids=["widens", "narrows"])
def test_under_autocast(reduce: str, inside: int, outside: int, dtype: torch.dtype, device: str) -> None:
    """Features and values of either dtype, with parameters in float32."""
    adj, edges, given = draw(torch.float32, device, inside, outside)
    given[:2] = [each.detach().to(dtype).requires_grad_() for each in given[:2]]
    exact = [each.detach().double().requires_grad_() for each in given]
    want = dense(edges, exact, reduce)
    upstream = torch.randn_like(want).bfloat16()
    wanted = torch.autograd.grad(want, exact, upstream.double())

    def results(needed: list[Tensor], **options: bool) -> tuple[Tensor, ...]:
        own = [each if any(each is it for it in needed) else each.detach() for each in given]
        with torch.autocast(device, dtype=torch.bfloat16):
            out = weighted_linear(adj, *own, reduce, transform_first=inside > outside)
        assert out is not None
        assert out.dtype == torch.bfloat16
        return out, *torch.autograd.grad(out, needed, upstream, **options)

    for options in ({}, {"create_graph": True}):
        out, *found = results(given, **options)
        assert relative_error(out, want) <= TOLERANCE[torch.bfloat16]
        for name, each, got, right in zip(NAMES, given, found, wanted, strict=True):
            assert got.dtype == each.dtype, name
            assert relative_error(got, right) <= 2 * TOLERANCE[torch.bfloat16], name
            _, alone = results([each], **options)
            assert relative_error(alone, got) <= TOLERANCE[torch.bfloat16], name


def test_double_backward_under_autocast(device: str) -> None:
    """The gradient of a gradient reaches everything through the casts."""
    adj, edges, given = draw(torch.float32, device, NARROW, WIDE)

    def second(layer: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(layer().double().square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(each.double().square().sum() for each in first), given[:3])

    def layer() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            out = weighted_linear(adj, *given, "sum")
        assert out is not None
        return out

    expected = second(lambda: dense(edges, given, "sum"))
    for got, right in zip(second(layer), expected, strict=True):
        assert got.dtype == right.dtype
        assert relative_error(got, right) <= 4 * TOLERANCE[torch.bfloat16]


def test_what_it_leaves_to_others(device: str) -> None:
    adj, _, given = draw(torch.float32, device, NARROW, WIDE)
    x, value, weight, bias, root_weight = (each.detach() for each in given)

    def serves(**other: Any) -> bool:
        given = {"x": x, "value": value, "weight": weight, "bias": bias, "root_weight": root_weight} | other
        return weighted_linear(adj, reduce="sum", **given) is not None

    assert serves()
    assert serves(bias=None)
    for other in (
        {"x": x.double()},
        {"x": x[:-1]},
        {"x": x[:, 1:]},
        {"value": value[:-1]},
        {"value": value[:, None]},
        {"value": value.double()},
        {"value": torch.complex(value, value).conj().imag},  # a lazy negation: its sign is not in memory
        {"root_weight": root_weight[:, 1:]},
        {"bias": bias.double()},
    ):
        assert not serves(**other), other
    with torch.autocast(device, dtype=torch.bfloat16):
        assert serves()
        assert not serves(x=x.bfloat16())  # x and the values have different dtypes
        assert not serves(x=x.half(), value=value.half())
    out = weighted_linear(adj, *given, "sum")
    assert out is not None
    with torch.no_grad():
        given[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
