"""Registers operators with PyTorch. The signature of an operator's kernel gives its schema.

In plain eager mode, an operator's kernel or autograd formula is called directly, because PyTorch's dispatcher
takes more host time than everything else around a kernel launch. Traces, modes, function transforms and
subclasses call the registered operator.
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

from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import below_autograd, direct, is_batched, is_plain_eager, is_wrapped
from fastsparse_core.ops._handles import built_outside_of_graphs, in_backward
from fastsparse_core.ops._kept_results import alias_of, unfused_gradients, was_written
from fastsparse_core.structure.adjacency import Adjacency, from_handle

#: Namespace of the operators: ``torch.ops.fastsparse``. An operator takes the structure as the integer handle
#: of an Adjacency, so that schemas stay short, derived formats can be built lazily, and torch.compile sees a
#: plain integer. Kernels and formulas also accept the Adjacency itself, which eager calls pass.
library = torch.library.Library("fastsparse", "DEF")
Structure: TypeAlias = Adjacency | int
#: Registered operators by name. A formula looks up an operator here if importing it would be circular.
OPERATORS: dict[str, Operator] = {}

#: Annotation in a kernel's signature -> type in the schema. Sizes and handles may be symbols of a trace.
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

    PyTorch calls `inspect` to find the file when a module registers a fake kernel. `inspect` would search all
    loaded modules, which takes 0.1 s.
    """
    file = os.path.normcase(os.path.abspath(sys.modules[module].__file__ or ""))
    getattr(inspect, "modulesbyfile", {})[file] = module


tell_inspect(__name__)


def structure_of(adjacency: Structure, transpose: bool = False) -> Adjacency:
    """The Adjacency that a kernel's argument is or is the handle of; with ``transpose``, its transpose."""
    adj = adjacency if isinstance(adjacency, Adjacency) else from_handle(adjacency)
    return adj.t() if transpose else adj


def keep_alive(adjacency: Structure) -> Adjacency | None:
    """The structure, for an autograd context that must keep it alive.

    None for the symbolic handle of a trace, which does not refer to an object.
    """
    if isinstance(adjacency, Adjacency):
        return adjacency
    return from_handle(adjacency) if isinstance(adjacency, int) else None


def schema_of(kernel: Callable[..., Any]) -> str:
    """The schema of a kernel, without the parameters that have defaults.

    Raises:
        KeyError: an annotation is not supported, or the module lacks ``from __future__ import annotations``.
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
    """Name -> annotation of the fields of a NamedTuple; empty for other types."""
    kind: Any = function.__globals__.get(annotation)
    if not hasattr(kind, "_fields"):
        return {}
    annotations: dict[str, Any] = inspect.get_annotations(kind)
    return {name: getattr(of, "__forward_arg__", of) for name, of in annotations.items()}


def on_handle(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a kernel from a function whose first argument is the structure.

    The kernel takes the function's positional arguments, then the structure, then the keyword-only arguments.
    In place of a NamedTuple, it takes the tuple's fields. For a NamedTuple ``wanted``, field ``x`` becomes
    ``x_wanted``.
    """
    signature = inspect.signature(function)
    _, *given = signature.parameters.values()
    taken: list[inspect.Parameter] = []

    def place(parameter: inspect.Parameter) -> tuple[int | slice, Callable[[Any], Any] | None]:
        """The position of an argument among the kernel's, and a function that builds it from its fields."""
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
    """Wraps a kernel so that results of None become empty tensors, because operators must return tensors."""

    def filled(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        results = kernel(*arguments, **options)
        return tuple([arguments[0].new_empty(0) if each is None else each for each in results])

    return filled if "None" in inspect.signature(kernel).return_annotation else kernel


class Operator:
    """An operator for CPU and CUDA: its kernel, its fake kernel for traces, and its gradients.

    Attributes:
        kernel: the operator without autograd.
        formula: the autograd formula.
        apply: calls the formula, for tensors that are `is_plain_eager` and not `is_wrapped`.
        apply_wrapped: calls the formula, for all tensors.
        dispatched: calls the operator through PyTorch's dispatcher; takes the handle of a structure.
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
            kernel: the operator without autograd; takes tensors on either device.
            fake: returns results without content; its argument has the kernel's arguments as attributes.
            formula: an ``autograd.Function`` whose ``forward`` takes the kernel's arguments, or a function of
                PyTorch's operators with the kernel's arguments and results. None: the operator is a gradient,
                and differentiating it raises an error.
            name: name of the operator; "": the kernel's name without a leading underscore.
            options: values of the kernel's parameters with defaults in calls through PyTorch's dispatcher.
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
        # Positions of the tensors, because checking every argument would take more host time.
        others = [each for each in names[1:] if parameters[each].annotation.startswith("Tensor")]
        self._other_tensors = _picker(names[1:], others)
        self._structure_at = names.index("adjacency") if "adjacency" in names else None
        self.dispatched = getattr(torch.ops.fastsparse, name).default
        self.formula = formula = self._without_derivative() if formula is None else formula
        is_function = isinstance(formula, FunctionType)
        self.apply = formula if is_function else direct(formula)
        self.apply_wrapped = formula if is_function else formula.apply
        # `torch.library.register_autograd` would do the same, but takes 15 us more host time per call
        # (measured with a CPU build of torch 2.13). That is more than everything else around a kernel launch.
        library.impl(name, self._differentiably, "Autograd")
        OPERATORS[name] = self

    def __call__(self, first: Tensor, *arguments: Any, **eager: Any) -> Any:
        """Calls the operator; in plain eager mode without the dispatcher.

        Args:
            first: the first argument, a tensor.
            arguments: the other arguments; the structure may be an Adjacency or a handle.
            eager: additional last arguments of kernel and formula, which are used in plain eager mode only.
        """
        if not is_plain_eager(first):
            return self.dispatched(first, *[_handle_of(each) for each in arguments])
        others = self._other_tensors(arguments)
        for each in others:
            if each is not None and is_batched(each):  # gradients may be batched although operands are not
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
        """Calls the operator without autograd, for its own formula, with the formula's arguments."""
        at = self._structure_at
        if is_plain_eager(arguments[0]) if at is None else isinstance(arguments[at], Adjacency):
            return self.kernel(*arguments, **eager)
        with below_autograd():
            return self.dispatched(*arguments)

    def _differentiably(self, *arguments: Any) -> Any:
        """The operator's implementation for PyTorch's dispatch key Autograd."""
        if forward_ad._current_level >= 0:
            _refuse_tangents(self.name, arguments)
        if torch.SymInt in map(type, arguments):
            arguments = in_backward(arguments)
        if torch.is_grad_enabled():
            for argument in arguments:
                if isinstance(argument, Tensor) and argument.requires_grad:
                    found = self.apply_wrapped(*arguments)
                    if type(found) is tuple and found[-1] is None:  # operators must return tensors
                        return *found[:-1], found[0].new_empty(0)
                    return found
        with below_autograd():
            return self.dispatched(*arguments)

    def _without_derivative(self) -> type[torch.autograd.Function]:
        """The formula of an operator that is a gradient: its backward pass raises an error."""
        dispatched, name = self.dispatched, self.name

        class Formula(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
                with below_autograd():
                    return dispatched(*[_handle_of(each) for each in arguments])

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
                raise NotImplementedError(
                    f"{name}: is the gradient of an operator and has no derivative if it is called directly; "
                    "differentiate that operator twice instead"
                )

        return Formula


def _handle_of(argument: Any) -> Any:
    return argument.handle if isinstance(argument, Adjacency) else argument


def _refuse_tangents(name: str, arguments: tuple[Any, ...]) -> None:
    """Raises an error under forward-mode differentiation, which would silently treat results as constants."""
    for argument in arguments:
        if isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError(
                f"{name}: expected tensors without tangents, got one of forward-mode differentiation; "
                "use backward() instead"
            )


def fits_one_operator(x: Tensor, *others: Tensor | None) -> bool:
    """Returns whether `torch.compile` traces a call that a layer's own operator can compute.

    Exported programs have separate operators, for which there are decompositions and C++ kernels. Under
    autocast, casts would be part of the operator.
    """
    # `torch.compiler.is_exporting()` is true in every trace of PyTorch 2.11; 2.6 has no flag.
    is_exporting = getattr(torch.compiler, "_is_exporting_flag", True)
    if is_exporting or not torch.compiler.is_dynamo_compiling() or is_any_autocast_enabled():
        return False
    dtype, device = x.dtype, x.device
    for each in others:
        if each is not None and (each.dtype != dtype or each.device != device):
            return False
    return dtype in DTYPE_CODE


# ---------------------------------------------------------------- kernels whose gradients are kernels, too


class FusedOperator(Operator):
    """An operator whose first result is differentiable twice, and the operator of its gradients.

    Functions get their arguments by the names of their parameters. The kernel's first parameters are the
    tensors that have gradients. If the kernel has a parameter ``keep``, it is true if a backward pass may
    follow.
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
        """Registers both operators.

        Args:
            name: name of the operator; the operator of the gradients is ``name_backward``.
            kernel: computes the results from the structure and the arguments of a call.
            gradients: computes the gradients of the kernel's first tensors; None for those that are not
                wanted. Its arguments: the structure, ``grad``, any of the kernel's arguments and results, and
                ``x_wanted``, whether ``x`` needs a gradient.
            unfused: computes the first result from the structure, the tensors and other arguments of the
                kernel, by differentiable operators.
            fake: for the kernel's results, as in `Operator`.
            results: names of the kernel's results.
            reads_out: takes the kernel's arguments; returns whether the gradients need the result ``out``.
                None: they do if ``gradients`` has a parameter ``out``.
        """
        of_results, of_gradients, by_others = (on_handle(each) for each in (kernel, gradients, unfused))
        names, read = _parameters(of_results), _parameters(of_gradients)[1:]
        parameters = inspect.signature(of_results).parameters
        tensors = [each for each in names if parameters[each].annotation.startswith("Tensor")]
        inputs = [each for each in tensors if each != "seed"]
        others = [each for each in names if each not in tensors]
        kept = [each for each in results if each in read]
        asked = [each for each in _parameters(by_others)[:-1] if each not in inputs]
        rest = (None,) * (len(names) - len(inputs))
        count, keeps, place = len(inputs), names[-1] == "keep", others.index("adjacency")
        # Positions of the arguments, because building a dictionary in every call would take more host time.
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
                )  # otherwise, autograd would allocate zeros as gradients of the other results
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
                        out: Tensor = by_others(*operands, *options, ctx.keep_alive)
                        return out

                    return *unfused_gradients(compute, grad, inputs_of(given), needed), *rest
                if out_at is not None and ctx.written is not None and was_written(ctx):
                    given[out_at] = below(*arguments_of(given))[0]
                found = (of_inputs.kernel if is_plain_eager(grad) else of_inputs)(grad, *read_of(given))
                wanted: tuple[Tensor | None, ...] = ()
                for each, needs in zip(found, needed, strict=True):  # a comprehension is one more call
                    wanted += (each if needs else None,)
                return wanted + rest

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
    """A function that selects the values of ``wanted`` names from the values of all ``names``."""
    places: list[Any] = [names.index(each) for each in wanted]
    if len(places) < 2:  # `itemgetter` of a single position would return the item, not a sequence
        return operator.itemgetter(slice(places[0], places[0] + 1) if places else slice(0))
    return operator.itemgetter(*places)
