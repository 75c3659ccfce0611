"""Memory for gradients that replays of other CUDA graphs do not overwrite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastsparse_core.capturing.refused import Refused

_SPARSE = (
    "a parameter's gradient is sparse. Use dense gradients, for example torch.nn.Embedding(sparse=False)"
)


class GradientBuffers:
    """One tensor for the gradient of every parameter, which all records of a step write to.

    While a graph is recorded, autograd allocates gradients in the memory that all graphs of the step share. A
    replay of another graph would overwrite them. So the last kernel of a record copies the gradients here.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def __iter__(self) -> Iterator[Tensor]:
        return iter([buffer for _, buffer in self._buffers.values()])

    def of(self, parameter: Tensor) -> Tensor:
        """The tensor for the gradient of a parameter."""
        parameter_, buffer = self._buffers.get(id(parameter), (None, None))
        if (
            parameter_ is None
            or buffer is None
            or buffer.shape != parameter.shape
            or buffer.dtype != parameter.dtype
        ):
            with torch.inference_mode(False), torch.no_grad():
                buffer = torch.zeros_like(parameter)
            self._buffers[id(parameter)] = (parameter, buffer)  # the parameter is alive, so its id is unique
        return buffer

    @contextlib.contextmanager
    def held(self, parameters: Sequence[Tensor]) -> Iterator[RecordedGradients]:
        """Context of a recording: present gradients are moved to the buffers and set again afterwards.

        Raises:
            Refused: a gradient is sparse.
        """
        gradients = RecordedGradients(parameters, [self.of(item) for item in parameters])
        gradients.before_replay()
        try:
            yield gradients
        finally:
            gradients.put_back()


class RecordedGradients:
    """The gradients of one record.

    Args:
        parameters: the parameters of the step.
        buffers: for every parameter, the tensor of `GradientBuffers`.
    """

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        self._items = list(zip(parameters, buffers, strict=True))
        self._start = [item.grad is not None for item in parameters]
        self._end = self._start

    def before_replay(self) -> None:
        """Moves present gradients to the buffers, because the record adds to them."""
        for (parameter, buffer), is_there in zip(self._items, self._start, strict=True):
            gradient = parameter.grad
            if is_there and gradient is not None and gradient is not buffer:
                if gradient.layout is not torch.strided:
                    raise Refused(_SPARSE)
                buffer.copy_(gradient)
                parameter.grad = buffer

    def take(self) -> None:
        """Ends a recording: copies the gradients that the recording allocated to the buffers."""
        self._end = [parameter.grad is not None for parameter, _ in self._items]
        made = [
            (buffer, parameter.grad)
            for parameter, buffer in self._items
            if parameter.grad is not None and parameter.grad is not buffer
        ]
        if any(gradient.layout is not torch.strided for _, gradient in made):
            raise Refused(_SPARSE)
        if made:
            with torch.no_grad():
                torch._foreach_copy_([buffer for buffer, _ in made], [gradient for _, gradient in made])

    def after_replay(self) -> None:
        """Sets the parameters' gradients as the step does."""
        self._set(self._end)

    def put_back(self) -> None:
        """Sets the gradients that were present before the recording."""
        self._set(self._start)

    def _set(self, are_there: Sequence[bool]) -> None:
        for (parameter, buffer), is_there in zip(self._items, are_there, strict=True):
            if not is_there:
                parameter.grad = None
            elif parameter.grad is not buffer:
                parameter.grad = buffer
