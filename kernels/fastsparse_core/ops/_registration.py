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

from fastsparse_core.ops._eager import below_autograd, is_first_derivative, is_plain_eager
from fastsparse_core.ops._library import library, register_autograd
from fastsparse_core.structure.adjacency import from_handle

#: Of the operators that were registered, by name.
KERNELS: dict[str, Callable[..., Any]] = {}
FORMULAS: dict[str, type[torch.autograd.Function]] = {}

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


def define(kernel: Callable[..., Any], fake: Callable[[Any], Any], name: str = "", **options: Any) -> Any:
    """Registers an operator on both devices, but for its gradients, and returns it.

    Args:
        kernel: the operator below autograd; takes tensors on either device.
        fake: results without content, from an object whose attributes are the kernel's arguments.
        name: "": the kernel's, without a leading underscore.
        options: what PyTorch's dispatcher calls the kernel with for parameters that have defaults.
    """
    name = name or kernel.__name__.removeprefix("_")
    names = [
        name for name, each in inspect.signature(kernel).parameters.items() if each.default is each.empty
    ]

    def fake_of(*arguments: Any, **named: Any) -> Any:
        return fake(SimpleNamespace(**dict(zip(names, arguments, strict=False)), **named))

    library.define(name + schema_of(kernel))
    for device in ("CPU", "CUDA"):
        dispatched = without_none(kernel)
        library.impl(name, functools.partial(dispatched, **options) if options else dispatched, device)
    torch.library.register_fake(f"fastsparse::{name}", fake_of, lib=library)
    KERNELS[name] = kernel
    return getattr(torch.ops.fastsparse, name).default


def register(
    kernel: Callable[..., Any],
    fake: Callable[[Any], Any],
    formula: type[torch.autograd.Function] | None = None,
    name: str = "",
    **options: Any,
) -> Any:
    """Registers an operator on both devices with its gradients, and returns it; see :func:`define`.

    Args:
        kernel: as :func:`define` takes it.
        fake: as :func:`define` takes it.
        formula: of the gradients; its ``forward`` takes what the kernel takes. None: the operator is a
            gradient itself, and says that it has no derivative.
        name: as :func:`define` takes it.
        options: as :func:`define` takes them.
    """
    operator = define(kernel, fake, name, **options)
    name = name or kernel.__name__.removeprefix("_")
    FORMULAS[name] = once(name) if formula is None else formula
    register_autograd(name, FORMULAS[name])
    return operator


def once(name: str) -> type[torch.autograd.Function]:
    """Formula of the backward operator ``name``: it has no derivative, and says so where one is asked for."""

    class Formula(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
            with below_autograd():
                return getattr(torch.ops.fastsparse, name).default(*arguments)

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
        return getattr(torch.ops.fastsparse, name).default(*arguments)
    if torch.is_grad_enabled() and any(
        isinstance(argument, Tensor) and argument.requires_grad for argument in arguments
    ):
        return FORMULAS[name].apply(*arguments)
    return KERNELS[name](*arguments)


def run(name: str, watched: Tensor, *arguments: Any) -> Any:
    """The operator below autograd, for the ``forward`` of its formula."""
    if is_plain_eager(watched):
        return KERNELS[name](*arguments)
    with below_autograd():
        return getattr(torch.ops.fastsparse, name).default(*arguments)


def differentiate(name: str, grad: Tensor, *arguments: Any) -> Any:
    """The backward operator, for the ``backward`` of a formula."""
    if is_first_derivative(grad):
        return KERNELS[name](grad, *arguments)
    return getattr(torch.ops.fastsparse, name).default(grad, *arguments)
