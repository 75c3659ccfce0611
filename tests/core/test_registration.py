"""Schemas of operators that come from their kernels' signatures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

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


@pytest.mark.parametrize("name", [name for name in registration.KERNELS if name.endswith("_backward")])
def test_a_gradient_has_no_derivative_of_its_own(name):
    with pytest.raises(NotImplementedError, match=name):
        registration.FORMULAS[name].backward(None)
