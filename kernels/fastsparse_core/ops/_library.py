"""The namespace ``torch.ops.fastsparse``, and the autograd formulas of its operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastsparse_core.ops._eager import below_autograd

#: Namespace of the operators: ``torch.ops.fastsparse``. An operator takes the structure as the integer handle
#: of an Adjacency, so that schemas stay short, derived formats can be built lazily, and torch.compile sees a
#: plain integer.
library = torch.library.Library("fastsparse", "DEF")


def register_autograd(name: str, formula: type[torch.autograd.Function]) -> None:
    """Registers the autograd formula of an operator.

    ``torch.library.register_autograd`` would do the same, at 15 us of host time more per call (measured on a
    CPU build of torch 2.13), which is more than all else around a kernel launch.
    """
    operator = getattr(torch.ops.fastsparse, name).default

    def dispatch(*arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, arguments)
        if torch.is_grad_enabled():
            for argument in arguments:
                if isinstance(argument, Tensor) and argument.requires_grad:
                    found = formula.apply(*arguments)
                    if type(found) is tuple and found[-1] is None:  # operators return tensors
                        return *found[:-1], found[0].new_empty(0)
                    return found
        with below_autograd():
            return operator(*arguments)

    library.impl(name, dispatch, "Autograd")


def _refuse_tangents(name: str, arguments: tuple[Any, ...]) -> None:
    """Raises where forward-mode differentiation would lose what depends on an operator's result."""
    for argument in arguments:
        if isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError(
                f"{name}: expected tensors without tangents, got one of forward-mode differentiation; "
                "gradients come by backward()"
            )
