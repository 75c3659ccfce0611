"""Arguments of a captured step: tensors, also in containers and in objects of PyG and DGL."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastsparse_core.capturing.padding import Capacity, Rows, Sizes

#: Pairs of a type and a function that makes an `Argument` of an object of this type. Plugins register further
#: functions. If several match, the function that was registered last is called first.
_makers: list[tuple[type, Callable[[Any], Argument | None]]] = []


class Argument:
    """One argument of a step.

    Args:
        value: the object that the caller passed.
        key: properties that must be equal in all calls that share a record.
        tensors: the tensors of the object.

    Attributes:
        sizes: numbers of nodes and edges of a batch that can be padded; None for all other arguments.
    """

    sizes: Sizes | None = None

    def __init__(self, value: Any, key: Hashable, tensors: Sequence[Tensor] = ()) -> None:
        self.value = value
        self.key = key
        self.tensors = list(tensors)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the object with its tensors replaced by ``tensors``."""
        return self.value

    def is_as_given(self) -> bool:
        """Returns whether the object is known to be unchanged since the call; tensors and graphs check it."""
        return False

    def hold(self, capacity: Capacity | None) -> Held:
        """Allocates memory from which a record reads arguments of the same form as this argument.

        Args:
            capacity: numbers of nodes and edges that the memory holds; None: the argument is not padded.
        """
        return Held(self)


class Held:
    """Memory from which a record reads one of its arguments.

    Args:
        like: an argument of the same form.

    Attributes:
        value: the object that is passed to the step.
        rows: which rows are padding; empty without padding.
        greatest: the greatest index in an index tensor, as in `MaskedFunctions`.
        sorted: as ``sorted_rows`` of `StepRun`.
        needs_largest: whether the largest graph of a batch must fit into ``Capacity.largest``, because the
            step makes a dense batch.
    """

    needs_largest = False

    def __init__(self, like: Argument) -> None:
        self.tensors = [tensor.detach().clone() for tensor in like.tensors]
        for held, tensor in zip(self.tensors, like.tensors, strict=True):
            held.requires_grad_(tensor.requires_grad)
        self.value = like.with_tensors(self.tensors)
        self.rows: list[Rows] = []
        self.greatest: dict[tuple[int, int, int], int] = {}
        self.sorted: set[tuple[int, int]] = set()

    def write(self, argument: Argument) -> None:
        """Copies an argument's tensors into this memory."""
        for held, tensor in zip(self.tensors, argument.tensors, strict=True):
            if held is not tensor:
                held.detach().copy_(tensor.detach())


class Constant(Held):
    """An argument that has the same tensors in every call; the record reads them in place."""

    def __init__(self, like: Argument) -> None:
        self.value = like.value
        self.tensors = like.tensors
        self.rows, self.greatest, self.sorted = [], {}, set()
        self._versions = _versions(like.tensors)
        self._marks = [mark_of(tensor) for tensor in like.tensors]

    def is_as_recorded(self, argument: Argument) -> bool:
        """Returns whether the tensors are the recorded ones, at the same addresses.

        Integer tensors must not have been written to either.
        """
        return (
            all(x is y for x, y in zip(self.tensors, argument.tensors, strict=True))
            and [mark_of(tensor) for tensor in self.tensors] == self._marks
            and _versions(self.tensors) == self._versions
        )


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [
        tensor._version for tensor in tensors if not tensor.is_floating_point() and not tensor.is_inference()
    ]


class _FixedArgument(Argument):
    """A number, which is compared by value, or an object that is identified by its address."""

    def is_as_given(self) -> bool:
        return True


class _TensorArgument(Argument):
    def __init__(self, value: Tensor) -> None:
        super().__init__(value, ("tensor", *tensor_key(value)), [value])
        self._mark = mark_of(value)

    def is_as_given(self) -> bool:
        return mark_of(self.value) == self._mark

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        return tensors[0]


class _Container(Argument):
    """A list, tuple, named tuple or dictionary of arguments."""

    def __init__(self, value: Any) -> None:
        items = list(value.values()) if isinstance(value, dict) else list(value)
        self.parts = [argument_of(item) for item in items]
        if any(part.sizes is not None for part in self.parts):
            raise TypeError("a batch is inside a list, tuple or dict. Pass the batch as a separate argument")
        names = tuple(value) if isinstance(value, dict) else ()
        key: tuple[Any, ...] = (type(value), names, *(part.key for part in self.parts))
        super().__init__(value, key, [tensor for part in self.parts for tensor in part.tensors])

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        tensors, items = list(tensors), []
        for part in self.parts:
            count = len(part.tensors)
            items.append(part.with_tensors(tensors[:count]))
            del tensors[:count]
        if isinstance(self.value, dict):
            return type(self.value)(zip(self.value, items, strict=True))
        return type(self.value)(*items) if hasattr(self.value, "_fields") else type(self.value)(items)


def tensor_key(tensor: Tensor) -> tuple[Hashable, ...]:
    """Properties of a tensor that must be equal in all calls that share a record."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.layout


def mark_of(tensor: Tensor) -> tuple[Hashable, ...]:
    """Properties that change if a tensor gets other memory (``x.data = y``) or another shape or dtype."""
    address = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return address, tensor.shape, tensor.dtype, tensor.requires_grad


def register(kind: type, make: Callable[[Any], Argument | None]) -> None:
    """Registers a function that makes arguments of objects of a type, or returns None to try the next one."""
    _makers.insert(0, (kind, make))


def argument_of(value: Any) -> Argument:
    """Wraps an object that was passed to the step."""
    if type(value) in (Tensor, torch.nn.Parameter):
        return _TensorArgument(value)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return _FixedArgument(value, (type(value), value))
    for kind, make in _makers:
        if isinstance(value, kind):
            argument = make(value)
            if argument is not None:
                return argument
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return _TensorArgument(value)
    if isinstance(value, (list, tuple, dict)):
        return _Container(value)
    return _FixedArgument(value, (type(value), same(value)))


def same(value: object) -> Hashable:
    """A key that equals only keys of the same object. It keeps the object alive."""
    return _Same(value)


class _Same:
    """Compares objects by identity. It keeps the object alive, so that no other object gets its id."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
