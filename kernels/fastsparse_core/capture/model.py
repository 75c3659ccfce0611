"""Models whose forward and backward pass are a CUDA graph each, in a loop that stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastsparse_core.capture.captured import Captured, Record
from fastsparse_core.capture.step import record

_M = TypeVar("_M", bound=torch.nn.Module)


def capture_model(model: _M) -> _M:
    """Puts a :class:`CapturedModel` in the place of a model's forward method."""
    if isinstance(vars(model).get("forward"), CapturedModel):
        return model
    model.forward = CapturedModel(model)
    return model


class CapturedModel(Captured):
    """A model's forward method; its backward pass is recorded beside it.

    Args:
        model: whose ``forward`` it calls.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.forward)
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model, or replays it."""
        if not self.observed.modules:
            for module in self._model.modules():
                self.observed.add_module(module)
            self.observed.differentiates = True  # the loop does
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedModel:
        return CapturedModel(memo.get(id(self._model), self._model))

    def _gradients_are_there(self) -> tuple[bool, ...]:
        return ()  # they are not the record's

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    def _results(self, result: Any) -> Any:
        return result

    def _record(self, chosen: Record) -> Callable[[], Any]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        assert self._stream is not None
        options = {"pool": self._pool, "capture_error_mode": "thread_local"}
        forward, result = record(lambda: chosen.run(self.step, self.observed), self._stream, **options)
        flat, spec = tree_flatten(result)
        differentiable = [item for item in flat if isinstance(item, Tensor) and item.requires_grad]
        inputs = [
            tensor for held in chosen.held for tensor in held.tensors if tensor.requires_grad
        ] + self.observed.parameters
        if not (differentiable and torch.is_grad_enabled()):

            def replay() -> Any:
                forward.replay()
                return tree_unflatten([_copy(item) for item in flat], spec)

            return replay
        incoming = [torch.zeros_like(item) for item in differentiable]
        backward, gradients = record(
            lambda: torch.autograd.grad(differentiable, inputs, incoming, allow_unused=True),
            self._stream,
            **options,
        )
        chosen.execution = None  # until now, for the backward pass reads structures
        passes = _Passes(forward, backward, differentiable, incoming, inputs, gradients)
        plain = [item.detach() if isinstance(item, Tensor) else item for item in flat]

        def replay_both() -> Any:
            outputs = iter(_Replay.apply(passes, *inputs))
            items = [
                next(outputs) if isinstance(item, Tensor) and item.requires_grad else _copy(known)
                for item, known in zip(flat, plain, strict=True)
            ]
            return tree_unflatten(items, spec)

        return replay_both


def _copy(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) else item


class _Passes:
    """The two graphs of a record and what they read and write."""

    def __init__(
        self,
        forward: torch.cuda.CUDAGraph,
        backward: torch.cuda.CUDAGraph,
        outputs: Sequence[Tensor],
        incoming: Sequence[Tensor],
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        self.forward, self.backward = forward, backward
        self.outputs = [item.detach() for item in outputs]
        self.incoming = list(incoming)
        self.inputs = list(inputs)
        self.gradients = list(gradients)
        self.calls = 0


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: _Passes, *inputs: Tensor) -> tuple[Tensor, ...]:
        passes.forward.replay()
        passes.calls += 1
        ctx.passes, ctx.call = passes, passes.calls
        return tuple(item.clone() for item in passes.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        passes = ctx.passes
        if ctx.call != passes.calls:
            raise RuntimeError(
                "a captured model was called again before the backward pass of this call, and keeps what one "
                "call needs; call backward() before the next call, or do not capture this model"
            )
        for held, item in zip(passes.incoming, incoming, strict=True):
            held.copy_(item)
        for item, gradient in zip(passes.inputs, passes.gradients, strict=True):
            kept = item.grad
            if kept is not None and gradient is not None and kept.data_ptr() == gradient.data_ptr():
                item.grad = kept.clone()  # autograd took the record's memory for it; the replay writes there
        passes.backward.replay()
        return (None, *(None if item is None else item.detach() for item in passes.gradients))
