"""Fused operators: a kernel, its gradients, and the steps that give gradients of gradients."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastsparse_core.ops._handles import keep_alive
from fastsparse_core.ops._kept_results import alias_of, unfused_gradients, was_written
from fastsparse_core.ops._registration import differentiate, on_handle, register, run


def register_fused(
    name: str,
    kernel: Callable[..., Any],
    gradients: Callable[..., Any],
    unfused: Callable[..., Tensor],
    fake: Callable[[Any], Any],
    results: Sequence[str] = ("out",),
    *,
    reads_out: Callable[..., bool] | None = None,
) -> type[torch.autograd.Function]:
    """Registers an operator whose first result is differentiable twice, and its gradients' operator.

    The parameters' names say what a function is given. The first ones of the kernel are the tensors that have
    gradients; its argument ``keep``, if there is one, is true where a backward pass may follow.

    Args:
        name: of the operator; that of its gradients is ``name_backward``.
        kernel: results from the structure and the arguments of a call.
        gradients: those of the first tensors, None where not wanted, from the structure, ``grad``, all of
            these tensors, other arguments and results of the kernel, and ``x_wanted``: whether ``x`` needs
            its own.
        unfused: the first result, by operators that have gradients again, from the structure, the tensors
            and other arguments of the kernel.
        fake: of the kernel's results, as `register` takes it.
        results: names of the kernel's results.
        reads_out: whether the gradients of a call need its result ``out``, from the kernel's arguments;
            None: they always do.

    Returns:
        The formula of the gradients.
    """
    names, read = _parameters(on_handle(kernel)), _parameters(on_handle(gradients))[1:]
    annotations = inspect.get_annotations(kernel)
    tensors = [each for each in names if annotations.get(each, "int").startswith("Tensor")]
    inputs = [each for each in tensors if each != "seed"]
    others = [each for each in names if each not in tensors]
    kept = [each for each in results if each in read]
    asked = [each for each in _parameters(unfused)[1:] if each not in inputs]
    rest = (None,) * (len(names) - len(inputs))
    count, keeps, place = len(inputs), names[-1] == "keep", others.index("adjacency")
    # Where things stand: a dictionary in every call would take the host longer.
    in_forward = [*names, *results]
    saved_of, others_of = _picker(in_forward, [*tensors, *kept]), _picker(in_forward, others)
    in_backward = [*tensors, *kept, *others, *(f"{each}_wanted" for each in inputs)]
    arguments_of, read_of = _picker(in_backward, names), _picker(in_backward, read)
    inputs_of, asked_of = _picker(in_backward, inputs), _picker(in_backward, asked)
    out_at = in_backward.index("out") if "out" in kept else None

    class Formula(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
            if keeps:
                arguments = (*arguments[:-1], True)
            found = run(name, arguments[0], *arguments)
            others = found[1:] if found[-1] is not None else found[1:-1]
            ctx.mark_non_differentiable(*others)
            ctx.set_materialize_grads(False)  # else the backward pass fills zeros for the other results
            ctx.written = None
            given = (*arguments, *found)
            if out_at is not None:
                is_read = reads_out is None or reads_out(*arguments)
                given = (*arguments, alias_of(ctx, found[0]) if is_read else None, *found[1:])
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
            if out_at is not None and was_written(ctx):
                given[out_at] = run(name, grad, *arguments_of(given))[0]
            found = differentiate(f"{name}_backward", grad, *read_of(given))
            return *[each if needs else None for each, needs in zip(found, needed, strict=True)], *rest

    def gradients_fake(of: Any) -> tuple[Tensor, ...]:
        of_inputs = [(getattr(of, each), getattr(of, f"{each}_wanted", True)) for each in inputs]
        return tuple(
            of.grad.new_empty(0) if x is None or not wanted else x.new_empty(x.shape)
            for x, wanted in of_inputs
        )

    register(on_handle(kernel), fake, Formula, name)
    register(on_handle(gradients), gradients_fake, name=f"{name}_backward")
    return Formula


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _picker(names: Sequence[str], wanted: Sequence[str]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the values of some names out of those of all."""
    places = [names.index(each) for each in wanted]
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: [values[each] for each in places]
