"""Calls of a captured function, groups of calls with the same form, and the records of a form."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fastsparse_core import recorded
from fastsparse_core.capturing.arguments import Constant, Held, argument_of
from fastsparse_core.capturing.constants import Answers, Carried
from fastsparse_core.capturing.device_reads import DeviceReads
from fastsparse_core.capturing.fresh_adjacency import FreshAdjacency
from fastsparse_core.capturing.masked_functions import MaskedFunctions
from fastsparse_core.capturing.numbers import reading
from fastsparse_core.capturing.observe import Observed
from fastsparse_core.capturing.padding import Capacity, Sizes
from fastsparse_core.capturing.refused import Refused

#: Functions of plugins that take the held arguments and return a context. The contexts surround every run on
#: the memory of a record.
surroundings: list[Callable[[list[Held]], Any]] = []


class Call:
    """Arguments of one call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.arguments = [argument_of(item) for item in (*args, *kwargs.values())]
        self.names = tuple(kwargs)
        padded = [argument.sizes for argument in self.arguments if argument.sizes is not None]
        if len(padded) > 1:
            raise Refused(
                "it takes several batches, but capture supports only one. Combine them into one batch"
            )
        self.sizes: Sizes | None = padded[0] if padded else None
        #: The part that is the same for all calls of one form.
        self.key: Hashable = (self.names, *(argument.key for argument in self.arguments))
        devices = [tensor.device for argument in self.arguments for tensor in argument.tensors]
        #: Device of the tensors: the GPU if at least one tensor is on a GPU.
        self.device: torch.device | None = next(
            (device for device in devices if device.type == "cuda"), devices[0] if devices else None
        )

    def is_repeated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether these arguments are the same objects as in this call, and unchanged since."""
        if len(args) != len(self.args) or kwargs.keys() != self.kwargs.keys():
            return False
        for item, known in zip(args, self.args, strict=True):
            if item is not known:
                return False
        for name, known in self.kwargs.items():
            if kwargs[name] is not known:
                return False
        # The order of arguments is the order of their names in the call.
        return (not kwargs or tuple(kwargs) == self.names) and all(
            argument.is_as_given() for argument in self.arguments
        )


class Form:
    """Calls of a step that can share records: equal shapes, dtypes, numbers and mode (such as training).

    Attributes:
        calls: number of calls so far.
        varies: for every argument, whether the argument differed between calls.
        seen: sizes of the last batches.
        records: the records, the newest first.
        refusal: why the step is not recorded; "" if it may be.
        patience: number of calls before recording.
        difference: relative difference that padding made to results and gradients in the last trial.
    """

    def __init__(self, call: Call) -> None:
        self.calls = 0
        self.varies = [argument.sizes is not None for argument in call.arguments]
        self.seen: list[Sizes] = []
        self.records: list[Record] = []
        self.refusal = ""
        self.patience = 0
        self.difference = 0.0
        self._last = [
            [] if varies else item.tensors for item, varies in zip(call.arguments, self.varies, strict=True)
        ]

    def observe(self, call: Call) -> None:
        """Counts a call, and compares its arguments with those of the previous call."""
        self.calls += 1
        for nth, (last, argument) in enumerate(zip(self._last, call.arguments, strict=True)):
            if not all(x is y for x, y in zip(last, argument.tensors, strict=False)):
                self.varies[nth] = True
        # Arguments that vary are not kept alive.
        self._last = [
            [] if varies else argument.tensors
            for argument, varies in zip(call.arguments, self.varies, strict=True)
        ]
        if call.sizes is not None:
            self.seen = [*self.seen[-63:], call.sizes]


class Record:
    """A recorded CUDA graph of a form, and the memory that the graph reads.

    Args:
        call: a call of the form.
        varies: for every argument, whether the argument differs between calls.
        capacity: numbers of nodes and edges that a padded batch has; None: nothing is padded.

    Attributes:
        prepared: number of runs before the recording.
        answers: values that the runs read from tensors that never change.
        carried: tensors that one run creates and the next run uses.
        modes: training mode of every module after a run, if the step changes modes.
        replay: launches the graph and returns the result, which the next launch overwrites; None: not
            recorded yet.
        difference: relative difference of the first replay from a plain run.
    """

    def __init__(self, call: Call, varies: list[bool], capacity: Capacity | None) -> None:
        self.capacity = capacity
        #: Used to choose the cheapest graph that fits.
        self.size = (0, 0) if capacity is None else (capacity.largest, sum(map(sum, capacity.kinds)))
        self.held = [
            argument.hold(capacity) if changes else Constant(argument)
            for argument, changes in zip(call.arguments, varies, strict=True)
        ]
        self._names = call.names
        #: True if the graph reads all arguments in place, so that a call copies no argument.
        self.is_constant = all(isinstance(held, Constant) for held in self.held)
        self.prepared = 0
        self.difference = 0.0
        self.execution: recorded.StepRun | None = None
        self.answers = Answers()
        self.carried = Carried()
        self.modes: list[tuple[torch.nn.Module, bool]] = []
        self.replay: Callable[[], Any] | None = None

    @property
    def given(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments that the step gets."""
        values = [held.value for held in self.held]
        count = len(values) - len(self._names)
        return values[:count], dict(zip(self._names, values[count:], strict=True))

    def changed(self, call: Call) -> list[int]:
        """Positions of arguments that were recorded as constants but have changed."""
        return [
            nth
            for nth, (held, argument) in enumerate(zip(self.held, call.arguments, strict=True))
            if isinstance(held, Constant) and not held.is_as_recorded(argument)
        ]

    def fits(self, call: Call) -> bool:
        """Returns whether the call's batch fits into the capacity."""
        capacity, sizes = self.capacity, call.sizes
        if capacity is None or sizes is None:
            return True
        if any(held.needs_largest for held in self.held) and not 0 < sizes.largest_graph <= capacity.largest:
            return False
        return capacity.holds(sizes)

    def write(self, call: Call) -> None:
        """Copies the call's arguments into the memory that the graph reads."""
        for held, argument in zip(self.held, call.arguments, strict=True):
            if not isinstance(held, Constant):
                held.write(argument)

    def trimmed(self, result: Any, call: Call) -> Any:
        """A result without the rows of the padding."""
        capacity, sizes = self.capacity, call.sizes
        if capacity is None or sizes is None:
            return result
        return tree_map(lambda item: capacity.cut(item, sizes) if isinstance(item, Tensor) else item, result)

    def run(self, step: Callable[..., Any], observed: Observed, defers: bool = False) -> Any:
        """Runs the step on the record's memory, in the way in which it is recorded.

        Args:
            step: the function.
            observed: what the step uses.
            defers: whether numbers that the step reads are read only after the run.
        """
        args, kwargs = self.given
        greatest = {place: value for held in self.held for place, value in held.greatest.items()}
        rows = [of_kind for held in self.held for of_kind in held.rows]
        reads = DeviceReads(observed.origins(), self.answers, observed.supports, defers)
        self.carried.begin_run()
        mode = MaskedFunctions(rows, greatest, observed.masks, reads, self.carried)
        with ExitStack() as stack:
            self.execution = recorded.StepRun(
                has_padding=self.capacity is not None,
                of_edges=FreshAdjacency.of_edges,
                sorted_rows={place for held in self.held for place in held.sorted},
                greatest_of=mode.greatest_of,
            )
            stack.enter_context(recorded.running(self.execution))
            for surrounding in surroundings:
                stack.enter_context(surrounding(self.held))
            if defers:
                stack.enter_context(observed.callers.patched())
                stack.enter_context(reading(reads))
            stack.enter_context(mode)
            return step(*args, **kwargs)
