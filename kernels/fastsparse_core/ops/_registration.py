"""Operators as PyTorch knows them: a kernel's signature is the schema, and one object has all parts.

In plain eager mode an operator's kernel, or the formula of its gradients, is called by itself: PyTorch's
dispatcher would cost more host time than all else around a kernel launch. Whatever watches operators (traces,
modes, function transforms, subclasses) gets the registered one.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastsparse_core.ops._eager import below_autograd, direct, is_batched, is_plain_eager, is_wrapped
from fastsparse_core.ops._handles import built_outside_of_graphs, in_backward
from fastsparse_core.ops._kept_results import alias_of, unfused_gradients, was_written
from fastsparse_core.structure.adjacency import Adjacency, from_handle

#: Namespace of the operators: ``torch.ops.fastsparse``. An operator takes the structure as the integer handle
#: of an Adjacency, so that schemas stay short, derived formats can be built lazily, and torch.compile sees a
#: plain integer. Kernels and formulas take the Adjacency itself, too, which eager calls hand over.
library = torch.library.Library("fastsparse", "DEF")
Structure: TypeAlias = Adjacency | int
#: Registered operators by name, for formulas that need an operator of a module that imports their own module.
OPERATORS: dict[str, Operator] = {}

#: A schema's types by the annotations of a kernel; sizes and handles may be symbols of a trace.
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "SymInt",
    "Structure": "SymInt",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "torch.dtype": "ScalarType",
    "Sequence[int]": "int[]",
    "Sequence[bool]": "bool[]",
}


def tell_inspect(module: str) -> None:
    """Tells `inspect` which file a module is from.

    PyTorch asks that of each module that registers what a trace needs. `inspect` would look through all
    modules that are loaded, which takes 0.1 s.
    """
    file = os.path.normcase(os.path.abspath(sys.modules[module].__file__ or ""))
    getattr(inspect, "modulesbyfile", {})[file] = module


tell_inspect(__name__)


def structure_of(adjacency: Structure, transpose: bool = False) -> Adjacency:
    """The structure that a kernel was given, or its transpose."""
    adj = adjacency if isinstance(adjacency, Adjacency) else from_handle(adjacency)
    return adj.t() if transpose else adj


def keep_alive(adjacency: Structure) -> Adjacency | None:
    """The structure, for an autograd context that outlives the caller's reference.

    None for the symbolic handle of a trace, which stands for no object.
    """
    if isinstance(adjacency, Adjacency):
        return adjacency
    return from_handle(adjacency) if isinstance(adjacency, int) else None


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


def _fields(function: Callable[..., Any], annotation: str) -> dict[str, str]:
    """Annotations of the fields of a NamedTuple, by their names; of no other type are there any."""
    kind: Any = function.__globals__.get(annotation)
    if not hasattr(kind, "_fields"):
        return {}
    annotations: dict[str, Any] = inspect.get_annotations(kind)
    return {name: getattr(of, "__forward_arg__", of) for name, of in annotations.items()}


def on_handle(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel from a function whose first argument is the structure, which the kernel takes later.

    It comes after the other arguments, and what the function takes by name alone after that. In place of a
    NamedTuple the kernel takes its fields; those of one that is called ``wanted`` are ``x_wanted`` there.
    """
    signature = inspect.signature(function)
    _, *given = signature.parameters.values()
    taken: list[inspect.Parameter] = []

    def place(parameter: inspect.Parameter) -> tuple[int | slice, Callable[[Any], Any] | None]:
        """Position of the function's argument among the kernel's, and how several become one."""
        at, fields = len(taken), _fields(function, parameter.annotation)
        suffix = "_wanted" if parameter.name == "wanted" else ""
        names = {name + suffix: of for name, of in fields.items()} or {parameter.name: parameter.annotation}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        taken.extend(inspect.Parameter(name, kind, annotation=of) for name, of in names.items())
        if not fields:
            return at, None
        return slice(at, len(taken)), functools.partial(
            tuple.__new__, function.__globals__[parameter.annotation]
        )

    by_name = inspect.Parameter.KEYWORD_ONLY
    positional = [place(each) for each in given if each.kind != by_name]
    are_same = len(positional) == len(taken)
    count = len(taken)
    taken.append(inspect.Parameter("adjacency", taken[0].kind, annotation="Structure"))
    named = [(each.name, *place(each)) for each in given if each.kind == by_name]

    def kernel(*arguments: Any) -> Any:
        adj = arguments[count]
        if not isinstance(adj, Adjacency):
            adj = from_handle(adj)
        values, options = arguments[:count], {}
        if not are_same:
            values = ()
            for at, make in positional:
                values += (arguments[at] if make is None else make(arguments[at]),)
        for name, at, make in named:
            options[name] = arguments[at] if make is None else make(arguments[at])
        return function(adj, *values, **options)

    results = ", ".join(_fields(function, signature.return_annotation).values())
    result = f"tuple[{results}]" if results else signature.return_annotation
    kernel.__signature__ = inspect.Signature(taken, return_annotation=result)  # type: ignore[attr-defined]
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
        formula: of the gradients.
        apply: the formula's, for tensors that `is_plain_eager` and are not `is_wrapped`.
        apply_wrapped: the formula's, for all tensors.
        dispatched: the operator as PyTorch's dispatcher runs it; takes the handle of a structure.
    """

    def __init__(
        self,
        kernel: Callable[..., Any],
        fake: Callable[[Any], Any],
        formula: Any = None,
        name: str = "",
        **options: Any,
    ) -> None:
        """Registers the operator.

        Args:
            kernel: the operator below autograd; takes tensors on either device.
            fake: results without content, from an object whose attributes are the kernel's arguments.
            formula: of the gradients, an ``autograd.Function`` whose ``forward`` takes what the kernel takes;
                or a function of PyTorch's operators with the kernel's arguments and results. None: the
                operator is a gradient itself, and says that it has no derivative.
            name: "": the kernel's, without a leading underscore.
            options: what PyTorch's dispatcher calls the kernel with for parameters that have defaults.
        """
        self.name = name = name or kernel.__name__.removeprefix("_")
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
        # Positions of these arguments: checking every argument would take the host longer.
        others = [each for each in names[1:] if parameters[each].annotation.startswith("Tensor")]
        self._other_tensors = _picker(names[1:], others)
        self._structure_at = names.index("adjacency") if "adjacency" in names else None
        self.dispatched = getattr(torch.ops.fastsparse, name).default
        self.formula = formula = self._without_derivative() if formula is None else formula
        is_function = isinstance(formula, FunctionType)
        self.apply = formula if is_function else direct(formula)
        self.apply_wrapped = formula if is_function else formula.apply
        # `torch.library.register_autograd` would do the same, at 15 us of host time more per call (measured
        # on a CPU build of torch 2.13), which is more than all else around a kernel launch.
        library.impl(name, self._differentiably, "Autograd")
        OPERATORS[name] = self

    def __call__(self, first: Tensor, *arguments: Any, **eager: Any) -> Any:
        """The results; in plain eager mode, which its tensors tell, without the dispatcher.

        Args:
            first: the first argument.
            arguments: the others; the structure itself, or its handle.
            eager: what kernel and formula take besides, at the end, in plain eager mode.
        """
        if not is_plain_eager(first):
            return self.dispatched(first, *[_handle_of(each) for each in arguments])
        others = self._other_tensors(arguments)
        for each in others:
            if each is not None and is_batched(each):  # as gradients may be where no operand is
                return self.dispatched(first, *[_handle_of(each) for each in arguments])
        if torch.is_grad_enabled():
            needs_grad, apply = first.requires_grad, self.apply_wrapped if is_wrapped(first) else self.apply
            for each in others:
                if each is not None:
                    needs_grad = needs_grad or each.requires_grad
                    apply = self.apply_wrapped if is_wrapped(each) else apply
            if needs_grad:
                return apply(first, *arguments, *eager.values())
        return self.kernel(first, *arguments, **eager)

    def below(self, *arguments: Any, **eager: Any) -> Any:
        """The results below autograd, for the operator's own formula, with what that was given."""
        at = self._structure_at
        if is_plain_eager(arguments[0]) if at is None else isinstance(arguments[at], Adjacency):
            return self.kernel(*arguments, **eager)
        with below_autograd():
            return self.dispatched(*arguments)

    def _differentiably(self, *arguments: Any) -> Any:
        """What PyTorch's dispatcher runs where a tensor may want a gradient."""
        if forward_ad._current_level >= 0:
            _refuse_tangents(self.name, arguments)
        if torch.SymInt in map(type, arguments):
            arguments = in_backward(arguments)
        if torch.is_grad_enabled():
            for argument in arguments:
                if isinstance(argument, Tensor) and argument.requires_grad:
                    found = self.apply_wrapped(*arguments)
                    if type(found) is tuple and found[-1] is None:  # operators return tensors
                        return *found[:-1], found[0].new_empty(0)
                    return found
        with below_autograd():
            return self.dispatched(*arguments)

    def _without_derivative(self) -> type[torch.autograd.Function]:
        """The formula of a gradient, which has no derivative, and says so where one is asked for."""
        dispatched, name = self.dispatched, self.name

        class Formula(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
                with below_autograd():
                    return dispatched(*[_handle_of(each) for each in arguments])

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
                raise NotImplementedError(
                    f"{name}: has no derivative when it is called by itself; differentiate the operator "
                    "that it belongs to, whose gradients have gradients"
                )

        return Formula


def _handle_of(argument: Any) -> Any:
    return argument.handle if isinstance(argument, Adjacency) else argument


def _refuse_tangents(name: str, arguments: tuple[Any, ...]) -> None:
    """Raises where forward-mode differentiation would lose what depends on an operator's result."""
    for argument in arguments:
        if isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError(
                f"{name}: expected tensors without tangents, got one of forward-mode differentiation; "
                "gradients come by backward()"
            )


# ---------------------------------------------------------------- kernels with gradients of their own


class FusedOperator(Operator):
    """An operator whose first result is differentiable twice, and that of its gradients.

    The parameters' names say what a function is given. The first ones of the kernel are the tensors that have
    gradients; its argument ``keep``, if there is one, is true where a backward pass may follow.
    """

    def __init__(
        self,
        name: str,
        kernel: Callable[..., Any],
        gradients: Callable[..., Any],
        unfused: Callable[..., Tensor],
        fake: Callable[[Any], Any],
        results: Sequence[str] = ("out",),
        *,
        reads_out: Callable[..., bool] | None = None,
    ) -> None:
        """Registers both.

        Args:
            name: of the operator; that of its gradients is ``name_backward``.
            kernel: results from the structure and the arguments of a call.
            gradients: those of the first tensors, None where not wanted, from the structure, ``grad``, all of
                these tensors, other arguments and results of the kernel, and ``x_wanted``: whether ``x``
                needs its own.
            unfused: the first result, by operators that have gradients again, from the structure, the tensors
                and other arguments of the kernel.
            fake: of the kernel's results, as `Operator` takes it.
            results: names of the kernel's results.
            reads_out: whether the gradients of a call need its result ``out``, from the kernel's arguments;
                None: they always do.
        """
        of_results, of_gradients = on_handle(kernel), on_handle(gradients)
        names, read = _parameters(of_results), _parameters(of_gradients)[1:]
        parameters = inspect.signature(of_results).parameters
        tensors = [each for each in names if parameters[each].annotation.startswith("Tensor")]
        inputs = [each for each in tensors if each != "seed"]
        others = [each for each in names if each not in tensors]
        kept = [each for each in results if each in read]
        asked = [each for each in _parameters(unfused)[1:] if each not in inputs]
        rest = (None,) * (len(names) - len(inputs))
        count, keeps, place = len(inputs), names[-1] == "keep", others.index("adjacency")
        # Positions of these arguments: building a dictionary in every call would take the host longer.
        in_forward = [*names, *results]
        saved_of, others_of = _picker(in_forward, [*tensors, *kept]), _picker(in_forward, others)
        in_backward = [*tensors, *kept, *others, *(f"{each}_wanted" for each in inputs)]
        arguments_of, read_of = _picker(in_backward, names), _picker(in_backward, read)
        inputs_of, asked_of = _picker(in_backward, inputs), _picker(in_backward, asked)
        out_at = in_backward.index("out") if "out" in kept else None
        below = self.below

        class Formula(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
                if keeps:
                    arguments = (*arguments[:-1], True)
                found = below(*arguments)
                others = found[1:] if found[-1] is not None else found[1:-1]
                ctx.mark_non_differentiable(*others)
                ctx.set_materialize_grads(
                    False
                )  # otherwise the backward pass would fill zeros for the other results
                ctx.written = None
                out = found[0]
                if out_at is not None:
                    out = alias_of(ctx, out) if reads_out is None or reads_out(*arguments) else None
                given = (*arguments, out, *found[1:])
                ctx.save_for_backward(*saved_of(given))
                ctx.others = others_of(given)
                ctx.keep_alive = keep_alive(ctx.others[place])
                return found

            @staticmethod
            def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
                if grad is None:
                    return (None,) * len(names)
                needed = ctx.needs_input_grad[:count]
                given = [*ctx.saved_tensors, *ctx.others, *needed]
                if torch.is_grad_enabled():
                    options = asked_of(given)

                    def compute(*operands: Tensor | None) -> Tensor:
                        return unfused(ctx.keep_alive, *operands, *options)

                    return *unfused_gradients(compute, grad, inputs_of(given), needed), *rest
                if out_at is not None and ctx.written is not None and was_written(ctx):
                    given[out_at] = below(*arguments_of(given))[0]
                found = (of_inputs.kernel if is_plain_eager(grad) else of_inputs)(grad, *read_of(given))
                return *[each if needs else None for each, needs in zip(found, needed, strict=True)], *rest

        def gradients_fake(of: Any) -> tuple[Tensor, ...]:
            wanted = [(getattr(of, each), getattr(of, f"{each}_wanted", True)) for each in inputs]
            return tuple(
                of.grad.new_empty(0) if x is None or not needs else x.new_empty(x.shape)
                for x, needs in wanted
            )

        of_inputs = Operator(of_gradients, gradients_fake, name=f"{name}_backward")
        super().__init__(of_results, fake, Formula, name)


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _picker(names: Sequence[str], wanted: Sequence[str]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the values of some names out of those of all."""
    places: list[Any] = [names.index(each) for each in wanted]
    if len(places) < 2:  # slices: of one place alone `itemgetter` gives no sequence
        return operator.itemgetter(slice(places[0], places[0] + 1) if places else slice(0))
    return operator.itemgetter(*places)
