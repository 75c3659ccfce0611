"""Models whose forward and backward pass are one CUDA graph each; the training loop does not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from fastsparse_core.capturing.captured import Captured
from fastsparse_core.capturing.forms import Record
from fastsparse_core.ops._eager import direct

_M = TypeVar("_M", bound=torch.nn.Module)


def capture_model(model: _M) -> _M:
    """Replaces a model's forward method by a :class:`CapturedModel`; returns the model."""
    if isinstance(vars(model).get("forward"), CapturedModel):
        return model
    model.forward = CapturedModel(model)
    return model


class CapturedModel(Captured):
    """Replays the forward pass of a model as a CUDA graph, and the backward pass as another one.

    Args:
        model: the model.
    """

    _defers = False

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.forward)
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model, or replays it."""
        if not self.observed.modules:
            for module in self._model.modules():
                self.observed.add_module(module)
            self.observed.differentiates = True  # the training loop calls backward()
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedModel:
        return CapturedModel(memo.get(id(self._model), self._model))

    def _gradients_are_there(self) -> tuple[bool, ...]:
        return ()  # gradients do not belong to the recorded graph

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    def _results(self, result: Any) -> Any:
        return result

    def _probe(self, result: Any) -> Any:
        """Runs the backward pass with arbitrary output gradients, because a trial has no training loop."""
        wanted = [item for item in tree_leaves(result) if isinstance(item, Tensor) and item.requires_grad]
        if wanted:
            gradients = [torch.linspace(0.5, 1.5, item.numel()).to(item).view(item.shape) for item in wanted]
            torch.autograd.backward(wanted, gradients)
        return result

    def _record(self, chosen: Record) -> Callable[[], Any]:
        # Only the two passes of one call share memory: another call may run between them.
        self._graphs.forget_memory()
        launch, result = self._graphs.record(lambda: chosen.run(self.step, self.observed))
        flat, spec = tree_flatten(result)
        outputs = [item for item in flat if isinstance(item, Tensor) and item.requires_grad]
        if not outputs or not torch.is_grad_enabled():
            return lambda: (launch(), tree_unflatten([_copy(item) for item in flat], spec))[1]
        given = [tensor for held in chosen.held for tensor in held.tensors if tensor.requires_grad]
        inputs = given + self.observed.parameters
        incoming = [torch.zeros_like(item) for item in outputs]
        backward, gradients = self._graphs.record(
            lambda: _Gradients(torch.autograd.grad(outputs, inputs, incoming, allow_unused=True))
        )
        # Freed only now, because the recording of the backward pass reads the structures of the execution.
        chosen.execution = None
        passes = _Passes(launch, backward, outputs, incoming, gradients)
        return _replay_of(passes, inputs, flat, spec)


def _replay_of(
    passes: _Passes, inputs: Sequence[Tensor], flat: Sequence[Any], spec: TreeSpec
) -> Callable[[], Any]:
    """The function that replays the forward pass, and the backward pass when autograd reaches it.

    Args:
        passes: the graphs of both passes.
        inputs: tensors that get gradients.
        flat: leaves of the recorded result.
        spec: structure of the recorded result.
    """
    are_outputs = [isinstance(item, Tensor) and item.requires_grad for item in flat]
    others = [None if is_output else item for item, is_output in zip(flat, are_outputs, strict=True)]

    def replay() -> Any:
        apply = _Replay.apply if torch._C._are_functorch_transforms_active() else _apply
        outputs = iter(apply(passes, *inputs))
        items = [
            next(outputs) if is_output else _copy(item)
            for item, is_output in zip(others, are_outputs, strict=True)
        ]
        return tree_unflatten(items, spec)

    return replay


def _copy(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) else item


class _Gradients:
    """The gradients of a record, concatenated by dtype, so that one launch copies all of a dtype.

    Args:
        gradients: gradients that were computed in the recording; None: no gradient.
    """

    def __init__(self, gradients: Sequence[Tensor | None]) -> None:
        self._number = len(gradients)
        self._alone: list[tuple[int, Tensor]] = []
        of_dtypes: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        for nth, item in enumerate(gradients):
            if item is not None:
                is_joined = item.layout is torch.strided and item.numel()
                (of_dtypes.setdefault(item.dtype, []) if is_joined else self._alone).append((nth, item))
        #: Joined gradients, tensors of their shapes, and their parameters.
        self._joined: list[tuple[Tensor, list[Tensor], list[int]]] = []
        for pairs in of_dtypes.values():
            # Tensors of a multiple of 16 bytes come first, so that kernels can read as many as possible in
            # such pieces.
            pairs.sort(key=lambda pair: pair[1].nbytes % 16 != 0)
            flat = torch.cat([item.reshape(-1) for _, item in pairs])
            shapes = [torch.empty(()).expand(item.shape) for _, item in pairs]  # one element each
            self._joined.append((flat, shapes, [nth for nth, _ in pairs]))

    def copies(self) -> list[Tensor | None]:
        """Copies of all gradients, because the next replay overwrites the originals."""
        found: list[Tensor | None] = [None] * self._number
        for nth, item in self._alone:
            found[nth] = item.clone()
        for flat, shapes, places in self._joined:
            parts = torch._C._nn.unflatten_dense_tensors(flat.clone(), shapes)
            for nth, part in zip(places, parts, strict=True):
                found[nth] = part
        return found


class _Passes:
    """The two graphs of a record, and the tensors that they read and write."""

    def __init__(
        self,
        forward: Callable[[], None],
        backward: Callable[[], None],
        outputs: Sequence[Tensor],
        incoming: Sequence[Tensor],
        gradients: _Gradients,
    ) -> None:
        self.forward, self.backward = forward, backward
        self.outputs = [item.detach() for item in outputs]
        self.incoming = list(incoming)
        self.gradients = gradients
        self.calls = 0


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: _Passes, *inputs: Tensor) -> tuple[Tensor, ...]:
        passes.forward()
        passes.calls += 1
        ctx.passes, ctx.call = passes, passes.calls
        return tuple(item.clone() for item in passes.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        passes = ctx.passes
        if ctx.call != passes.calls:
            raise RuntimeError(
                "a captured model was called again before the backward pass of this call, but it keeps the "
                "tensors of one call; call backward() before the next call, or do not capture this model"
            )
        for held, item in zip(passes.incoming, incoming, strict=True):
            held.copy_(item)
        passes.backward()
        # Copies, because autograd may use the tensors themselves as gradients, and the next replay overwrites
        # them.
        return (None, *passes.gradients.copies())


_apply = direct(_Replay)
