"""Schemas of operators that come from their kernels' signatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core.ops import _registration as registration


def test_the_schema_is_the_signature():
    def kernel(
        x: Tensor,
        bias: Tensor | None,
        slots: Sequence[int],
        wanted: Sequence[bool],
        scale: float,
        algorithm: str,
        keep: bool,
        adjacency: int,
        hint: bool = True,
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    assert registration.schema_of(kernel) == (
        "(Tensor x, Tensor? bias, int[] slots, bool[] wanted, float scale, str algorithm, bool keep, "
        "SymInt adjacency) -> (Tensor, Tensor)"
    )


def test_what_operators_do_not_have_is_an_error():
    def kernel(x: list[Tensor]) -> Tensor:
        raise NotImplementedError

    with pytest.raises(KeyError, match="list"):
        registration.schema_of(kernel)


def test_a_function_of_a_structure_becomes_a_kernel_of_its_handle():
    def gradients(
        adj: Adjacency, grad: Tensor, scale: float, *, wanted: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return grad * scale * adj.num_edges, grad if wanted else None

    kernel = registration.on_handle(gradients)
    assert registration.schema_of(kernel) == (
        "(Tensor grad, float scale, SymInt adjacency, bool wanted) -> (Tensor, Tensor)"
    )
    adj = Adjacency.from_coo(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), (2, 2))
    for wanted in (False, True):
        first, second = registration.without_none(kernel)(torch.ones(2), 2.0, adj.handle, wanted)
        assert first.tolist() == [6.0, 6.0]
        assert second.tolist() == [1.0] * (2 * wanted)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor | None = None


def test_a_named_tuple_stands_for_its_fields():
    def gradients(adj: Adjacency, grad: Tensor, pair: Pair, *, wanted: Pair) -> Pair:
        assert wanted == (True, False)
        return Pair(grad * adj.num_edges, pair.x)

    kernel = registration.on_handle(gradients)
    assert registration.schema_of(kernel) == (
        "(Tensor grad, Tensor x, Tensor? y, SymInt adjacency, Tensor x_wanted, Tensor? y_wanted)"
        " -> (Tensor, Tensor)"
    )
    adj = Adjacency.from_coo(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), (2, 2))
    for structure in (adj, adj.handle):
        first, second = kernel(torch.ones(2), torch.zeros(1), None, structure, True, False)
        assert first.tolist() == [3.0, 3.0]
        assert second.tolist() == [0.0]


WITHOUT_DERIVATIVE = [
    name
    for name, operator in registration.OPERATORS.items()
    if "_without_derivative" in operator.formula.__qualname__
]


@pytest.mark.parametrize("name", WITHOUT_DERIVATIVE)
def test_a_gradient_has_no_derivative_of_its_own(name):
    with pytest.raises(NotImplementedError, match=name):
        registration.OPERATORS[name].formula.backward(None)
