"""Operators as PyTorch knows them: a kernel's signature is the schema, and one call registers all parts.

In plain eager mode an operator's kernel, or the formula of its gradients, is called by itself: PyTorch's
dispatcher would cost more host time than all else around a kernel launch. Whatever watches operators (traces,
modes, function transforms, subclasses) gets the registered one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastsparse_core.ops._eager import below_autograd, direct, is_first_derivative, is_plain_eager, is_wrapped
from fastsparse_core.ops._handles import built_outside_of_graphs, in_backward
from fastsparse_core.structure.adjacency import from_handle

#: Namespace of the operators: ``torch.ops.fastsparse``. An operator takes the structure as the integer handle
#: of an Adjacency, so that schemas stay short, derived formats can be built lazily, and torch.compile sees a
#: plain integer.
library = torch.library.Library("fastsparse", "DEF")
#: What was registered, by name.
OPERATORS: dict[str, Operator] = {}

#: A schema's types by the annotations of a kernel; sizes and handles may be symbols of a trace.
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "SymInt",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "torch.dtype": "ScalarType",
    "Sequence[int]": "int[]",
    "Sequence[bool]": "bool[]",
}


def schema_of(kernel: Callable[..., Any]) -> str:
    """The schema of a kernel, whose parameters with defaults are no part of it.

    Raises:
        KeyError: an annotation is none that operators have; the module needs
            ``from __future__ import annotations``.
    """
    signature = inspect.signature(kernel)
    parameters = [
        f"{_TYPES[parameter.annotation]} {name}"
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
    ]
    result: str = signature.return_annotation
    result = result.removeprefix("tuple[").removesuffix("]") if result.startswith("tuple[") else result
    results = [_TYPES[each.strip().removesuffix(" | None")] for each in result.split(",")]
    return f"({', '.join(parameters)}) -> ({', '.join(results)})"


def on_handle(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel from a function whose first argument is the structure, whose handle the kernel takes.

    The handle comes after the other arguments, and what the function takes by name alone after that.
    """
    signature = inspect.signature(function)
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    _, *positional = [each for each in signature.parameters.values() if each.kind == kinds[0]]
    named = [each for each in signature.parameters.values() if each.kind == kinds[1]]
    count, names = len(positional), [each.name for each in named]

    def kernel(*arguments: Any) -> Any:
        options = dict(zip(names, arguments[count + 1 :], strict=True)) if names else {}
        return function(from_handle(arguments[count]), *arguments[:count], **options)

    handle = inspect.Parameter("adjacency", kinds[0], annotation="int")
    required = [each.replace(kind=kinds[0], default=inspect.Parameter.empty) for each in named]
    kernel.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*positional, handle, *required]
    )
    return kernel


def without_none(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel among whose results None becomes an empty tensor, for operators return tensors."""

    def filled(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        results = kernel(*arguments, **options)
        return tuple([arguments[0].new_empty(0) if each is None else each for each in results])

    return filled if "None" in inspect.signature(kernel).return_annotation else kernel


class Operator:
    """An operator on both devices: its kernel, what traces get for it, and its gradients.

    Attributes:
        kernel: the operator below autograd.
        formula: of the gradients; None: no tensor that it reads has any.
        dispatched: the operator as PyTorch's dispatcher runs it.
    """

    def __init__(
        self,
        kernel: Callable[..., Any],
        fake: Callable[[Any], Any],
        formula: type[torch.autograd.Function] | None = None,
        name: str = "",
        **options: Any,
    ) -> None:
        """Registers the operator.

        Args:
            kernel: the operator below autograd; takes tensors on either device.
            fake: results without content, from an object whose attributes are the kernel's arguments.
            formula: of the gradients; its ``forward`` takes what the kernel takes.
            name: "": the kernel's, without a leading underscore.
            options: what PyTorch's dispatcher calls the kernel with for parameters that have defaults.
        """
        name = name or kernel.__name__.removeprefix("_")
        parameters = inspect.signature(kernel).parameters
        names = [each for each, parameter in parameters.items() if parameter.default is parameter.empty]

        def fake_of(*arguments: Any, **named: Any) -> Any:
            return fake(SimpleNamespace(**dict(zip(names, arguments, strict=False)), **named))

        library.define(name + schema_of(kernel))
        for device in ("CPU", "CUDA"):
            dispatched = without_none(kernel)
            dispatched = functools.partial(dispatched, **options) if options else dispatched
            if device == "CUDA" and "adjacency" in names:
                dispatched = built_outside_of_graphs(dispatched, names.index("adjacency"))
            library.impl(name, dispatched, device)
        torch.library.register_fake(f"fastsparse::{name}", fake_of, lib=library)
        self.kernel = kernel
        self.formula: Any = formula
        self.dispatched = getattr(torch.ops.fastsparse, name).default
        if formula is not None:
            register_autograd(name, formula)
            self._apply = direct(formula)
        OPERATORS[name] = self

    def __call__(self, first: Tensor, *arguments: Any, **eager: Any) -> Any:
        """The results; in plain eager mode, which the first argument tells, without the dispatcher.

        Args:
            first: the first argument.
            arguments: the others.
            eager: what kernel and formula take besides, at the end, in plain eager mode.
        """
        if not is_plain_eager(first):
            return self.dispatched(first, *arguments)
        if self.formula is not None and torch.is_grad_enabled():
            for each in (first, *arguments):
                if isinstance(each, Tensor) and each.requires_grad:
                    apply = self.formula.apply if is_wrapped(first) else self._apply
                    return apply(first, *arguments, *eager.values())
        return self.kernel(first, *arguments, **eager)

    def below(self, watched: Tensor, *arguments: Any, **eager: Any) -> Any:
        """The results inside of the operator's own formula; ``watched`` is one of the arguments."""
        if is_plain_eager(watched):
            return self.kernel(*arguments, **eager)
        with below_autograd():
            return self.dispatched(*arguments)


def register(
    kernel: Callable[..., Any],
    fake: Callable[[Any], Any],
    formula: type[torch.autograd.Function] | None = None,
    name: str = "",
) -> Any:
    """Registers an operator with its gradients, and returns what PyTorch's dispatcher runs.

    The arguments are those of `Operator`, but that an operator without a formula is a gradient itself, and
    says that it has no derivative.
    """
    name = name or kernel.__name__.removeprefix("_")
    return Operator(kernel, fake, once(name) if formula is None else formula, name).dispatched


def register_autograd(name: str, formula: type[torch.autograd.Function]) -> None:
    """Registers the autograd formula of an operator.

    ``torch.library.register_autograd`` would do the same, at 15 us of host time more per call (measured on a
    CPU build of torch 2.13), which is more than all else around a kernel launch.
    """
    operator = getattr(torch.ops.fastsparse, name).default

    def dispatch(*arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, arguments)
        if torch.SymInt in map(type, arguments):
            arguments = in_backward(arguments)
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


def once(name: str) -> type[torch.autograd.Function]:
    """Formula of the backward operator ``name``: it has no derivative, and says so where one is asked for."""

    class Formula(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
            with below_autograd():
                return OPERATORS[name].dispatched(*arguments)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            raise NotImplementedError(
                f"{name}: has no derivative when it is called by itself; differentiate the operator "
                "that it belongs to, whose gradients have gradients"
            )

    return Formula


# ---------------------------------------------------------------- calls


def call(name: str, v: Tensor, *arguments: Any) -> Tensor:
    """First result of the operator ``name``."""
    return results(name, v, *arguments)[0]


def results(name: str, v: Tensor, *arguments: Any) -> Any:
    """Results of the operator ``name``; in plain eager mode, which ``v`` tells, without the dispatcher."""
    if not is_plain_eager(v):
        return OPERATORS[name].dispatched(*arguments)
    if torch.is_grad_enabled() and any(
        isinstance(argument, Tensor) and argument.requires_grad for argument in arguments
    ):
        return OPERATORS[name].formula.apply(*arguments)
    return OPERATORS[name].kernel(*arguments)


def run(name: str, watched: Tensor, *arguments: Any) -> Any:
    """The operator below autograd, for the ``forward`` of its formula."""
    if is_plain_eager(watched):
        return OPERATORS[name].kernel(*arguments)
    with below_autograd():
        return OPERATORS[name].dispatched(*arguments)


def differentiate(name: str, grad: Tensor, *arguments: Any) -> Any:
    """The backward operator, for the ``backward`` of a formula."""
    if is_first_derivative(grad):
        return OPERATORS[name].kernel(grad, *arguments)
    return OPERATORS[name].dispatched(grad, *arguments)
