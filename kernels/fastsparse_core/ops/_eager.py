"""Decides whether kernels and formulas can be called directly, because only autograd observes a call."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.nn.modules import module as nn_module

from fastsparse_core.content import has_content

#: Classes of tensors whose operators are not overridden.
PLAIN = (Parameter, Tensor)
#: Together with the active modes, these attributes decide which code computes with a tensor. Reading them
#: with one function is faster than reading one after the other.
kind_of = attrgetter("__class__", "dtype", "shape", "device", "layout", "requires_grad")
# Functions used in every call, bound here to save attribute lookups.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_functional = torch._is_functional_tensor
_num_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
#: Function that tells whether a tensor stands for a batch of tensors, such as gradients with
#: is_grads_batched=True.
is_batched = torch._C._functorch.is_legacy_batchedtensor
#: Function that tells whether a tensor belongs to a transform of torch.func, even if the transform has ended.
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
# Hooks for all modules. (PyTorch 2.6 has no public function for this check.)
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    nn_module._global_forward_hooks,
    nn_module._global_forward_pre_hooks,
    nn_module._global_backward_hooks,
    nn_module._global_backward_pre_hooks,
)


def direct(formula: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``formula.apply``, for calls whose first tensor `is_plain_eager` and is not `is_wrapped`.

    It skips the checks of PyTorch's ``apply`` for transforms of torch.func, which take 5 us of host time.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, formula).apply  # type: ignore[misc]
    return apply


def below_autograd() -> Any:
    """Context in which operators run their kernels, not their autograd formulas."""
    return torch._C._AutoDispatchBelowAutograd()


def is_plain_eager(x: Tensor) -> bool:
    """True if only autograd observes a call: no trace, no fake or wrapped tensor, no mode, no tangents.

    Then the kernel (or its autograd formula) can be called without PyTorch's dispatcher, which would take
    more host time than everything else around a kernel launch.
    """
    return (
        type(x) is Tensor
        and not _is_compiling()
        and not x.is_meta
        and not _is_functional(x)
        and not (_num_modes() and _modes_watch())
        and _transform() is None
        and not is_batched(x)
        and forward_ad._current_level < 0
        and not x.is_neg()
    )


def may_be_one_node(x: Tensor) -> bool:
    """True if a layer may be one node of autograd's graph, or of a graph that `torch.compile` traces."""
    return torch.compiler.is_dynamo_compiling() or is_plain_eager(x)


def _modes_watch() -> bool:
    """True if an active dispatch mode must see the calls inside of operators; `rollback`'s mode need not."""
    modes = (torch._C._get_dispatch_stack_at(nth) for nth in range(torch._C._len_torch_dispatch_stack()))
    return not all(getattr(mode, "is_harmless", False) for mode in modes)


def why_watched(x: Tensor) -> str:
    """Returns why a call on tensors like ``x`` must run the framework's code; "" if a kernel may run.

    Function transforms, forward-mode differentiation and traces support only PyTorch's own operators. For
    tensors without memory, no structure can be looked up or built. ``torch.compile`` is not a reason, because
    it traces FastSparse's operators with their structure.
    """
    if torch.compiler.is_compiling():
        return ""
    if torch._C._len_torch_dispatch_stack() and _modes_watch():
        return "a dispatch mode, such as FakeTensorMode or make_fx"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a function transform of torch.func"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return "tensors without content" if not has_content(x) else ""


def is_first_derivative(grad: Tensor) -> bool:
    """True if a backward pass can call its kernel without the dispatcher: only autograd sees the gradient.

    With ``create_graph=True``, the operators' own formulas are used instead.
    """
    return not _is_grad_enabled() and is_plain_eager(grad)


def is_read(node: Any) -> bool:
    """True if the current backward pass uses the gradient that it passes to a node of autograd's graph.

    `ctx.needs_input_grad` is also true for parameters that are not inputs of `torch.autograd.grad`.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf of `torch.autograd.grad`
        return True


#: Entries of a module's ``__dict__`` that change what a call of the module runs.
CHANGES_OF_CALL = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    "forward",
)


def has_plain_call(module: nn.Module) -> bool:
    """True if a call of a module only runs `forward` of its class: no hooks, no replaced `forward`.

    Code of warm calls writes the expression itself, which saves a Python call.
    """
    return not any(map(module.__dict__.get, CHANGES_OF_CALL))


def is_plain_linear(module: nn.Module, kind: type[nn.Module] = nn.Linear, weight: str = "weight") -> bool:
    """True if a linear layer computes only ``x W^T + b``, without hooks, so that a kernel may compute it.

    Args:
        module: the layer.
        kind: the framework's class of linear layers.
        weight: name of the layer's weight.
    """
    return (
        type(module) is kind
        and not any(map(module.__dict__.get, CHANGES_OF_CALL))
        and not any(_GLOBAL_HOOKS)
        and weight in module._parameters  # in replicas of DataParallel, the weight is a plain attribute
    )
