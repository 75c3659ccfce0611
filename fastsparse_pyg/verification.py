"""Compares the first call of a layer with PyG's own code: outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from fastsparse_core.fallback import Reason, listening
from fastsparse_pyg.caching import SIGHTS, logger
from fastsparse_pyg.nn.any_layer import AnyLayer

#: Largest allowed difference, relative to the largest absolute value of the tensor. The limit for float64 is
#: high, because PyG counts degrees in float32 even if features are float64.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_HOOK = "_verification"


class VerificationError(RuntimeError):
    """The kernels of a layer and PyG's code gave different results; the layer runs PyG's code from now on.

    Example:
        >>> from torch_geometric.nn import GCNConv
        >>> from fastsparse_pyg import VerificationError, accelerate
        >>> layer = GCNConv(8, 4)
        >>> report = accelerate(layer, show=False, verify=True)  # the first call may raise it
        >>> issubclass(VerificationError, RuntimeError)
        True
    """


def verify_first_calls(
    model: Module, is_accelerated: Callable[[Module], bool], restore: Callable[[Module], None]
) -> None:
    """Makes every accelerated layer of a model compare the next call that a kernel computes.

    Args:
        model: any module.
        is_accelerated: function that returns whether FastSparse replaced a layer.
        restore: function that turns a layer back into PyG's.
    """
    for name, module in model.named_modules():
        if is_accelerated(module) and _HOOK not in vars(module):
            hook = _FirstCall(name, restore)
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            vars(module)[_HOOK] = handle


def forget_verification(layer: Module) -> None:
    """Removes the comparison of a layer, if there is one."""
    handle = vars(layer).pop(_HOOK, None)
    if handle is not None:
        handle.remove()


class _FirstCall:
    """Forward hook that compares the first call that a kernel computes, and then removes itself."""

    def __init__(self, name: str, restore: Callable[[Module], None]) -> None:
        self.name = name
        self.restore = restore
        self.has_told = False

    def __call__(self, layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.jit.is_tracing() or torch.compiler.is_compiling():  # a later call is compared
            return
        ours, pygs = _alone(layer), _alone(layer)
        for _ in range(SIGHTS + 1):  # the kernels run few edges on a GPU only when the edges are not new
            reasons: list[Reason] = []
            if isinstance(layer, AnyLayer):
                type(layer).forget_reasons()
            with listening(reasons.append):
                got = _results(ours, args, kwargs)
        if reasons:
            if not self.has_told:
                self.has_told = True
                logger.warning(
                    f"verify: nothing was compared yet in layer {self.name or '(the model)'!r}, because "
                    f"PyG's code ran: {reasons[0]}. The first call that a kernel computes is compared"
                )
            return
        forget_verification(layer)
        self.restore(pygs)
        expected = _results(pygs, args, kwargs)
        for what, want in expected.items():
            difference = _difference(got.get(what), want)
            if difference:
                kinds = f"{type(layer).__name__}, differs from PyG's {type(pygs).__name__}"
                self.restore(layer)
                raise VerificationError(
                    f"verify: layer {self.name or '(the model)'!r}, {kinds}: {what}: {difference}. The layer "
                    "runs PyG's code from now on: call the model again, and please report the layer"
                )


def _alone(layer: Module) -> Module:
    """Copies a layer without dropout, and without the user's hooks, which must not run in the comparison."""
    hooks = {name: value for name, value in vars(layer).items() if name.endswith("_hooks") and value}
    memo: dict[int, Any] = {id(value): type(value)() for value in hooks.values()}
    for module in layer.modules():
        for value in vars(module).values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                # copy.deepcopy cannot copy such tensors, which a layer may store during its last call.
                if isinstance(item, Tensor) and (not item.is_leaf or item.layout is not torch.strided):
                    memo[id(item)] = item.detach()
    alone = copy.deepcopy(layer, memo)
    for module in alone.modules():
        # Kernels use other random numbers than PyG, so results with dropout never agree.
        for name in ("dropout", "p"):
            if isinstance(getattr(module, name, None), float) and (
                name == "dropout" or isinstance(module, _DropoutNd)
            ):
                setattr(module, name, 0.0)
    return alone


def _results(layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor | None]:
    """Returns outputs and gradients by name; every call uses the same random numbers."""
    inputs: list[Tensor] = []

    def own(item: Any) -> Any:
        if type(item) is not Tensor or not item.is_floating_point() or item.layout is not torch.strided:
            return item
        inputs.append(item.detach().clone().requires_grad_())
        return inputs[-1]

    args, kwargs = pytree.tree_map(own, (args, kwargs))
    devices = {item.device for item in inputs if item.is_cuda}
    with torch.random.fork_rng([device.index for device in devices]), torch.enable_grad():
        torch.manual_seed(0)
        outputs = [
            item
            for item in pytree.tree_leaves(layer(*args, **kwargs))
            if isinstance(item, Tensor) and item.layout is torch.strided
        ]
        results: dict[str, Tensor | None] = {
            f"output {nth}": item.detach() for nth, item in enumerate(outputs)
        }
        differentiable = [item for item in outputs if item.requires_grad]
        if differentiable:
            parameters = [
                (name, one)
                for name, one in layer.named_parameters()
                if one.requires_grad and not isinstance(one, UninitializedParameter)
            ]
            targets = [(f"gradient of input {nth}", one) for nth, one in enumerate(inputs)]
            targets += [(f"gradient of {name}", one) for name, one in parameters]
            generator = torch.Generator().manual_seed(0)
            cotangents = [torch.randn(item.shape, generator=generator).to(item) for item in differentiable]
            gradients = torch.autograd.grad(
                differentiable, [one for _, one in targets], cotangents, allow_unused=True
            )
            results.update({name: each for (name, _), each in zip(targets, gradients, strict=True)})
    return results


def _difference(got: Tensor | None, want: Tensor | None) -> str:
    """Describes how two tensors differ; returns "" if they are close."""
    if got is None or want is None:
        other = want if got is None else got
        return "" if other is None or not other.any() else "only one of the two layers computed it"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"expected {want.dtype} {tuple(want.shape)}, got {got.dtype} {tuple(got.shape)}"
    if not want.is_floating_point() or not want.numel():
        return "" if torch.equal(got, want) else "other values"
    if not torch.equal(got.isnan(), want.isnan()):
        return "NaN in other places"
    got, want = got.nan_to_num(0.0), want.nan_to_num(0.0)
    scale = max(want.abs().max().item(), 1e-1)
    worst = (got - want).abs().max().item() / scale
    return "" if worst <= _TOLERANCE.get(want.dtype, 0.0) else f"off by {worst:.1e} of the largest value"
