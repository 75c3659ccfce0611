"""Functions and models that become CUDA graphs by themselves: when to record, and what to replay."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fastsparse_core import policy, recorded
from fastsparse_core.capture.arguments import Constant, Held, argument_of
from fastsparse_core.capture.fresh_adjacency import FreshAdjacency
from fastsparse_core.capture.journal import difference, on_trial
from fastsparse_core.capture.observe import Observed
from fastsparse_core.capture.optimizers import RecordedOptimizer
from fastsparse_core.capture.padding import Sizes, room_for
from fastsparse_core.capture.step import record
from fastsparse_core.capture.twins import Twins, WithoutDropout
from fastsparse_core.log import info_once
from fastsparse_core.streams import on_stream

logger = logging.getLogger("fastsparse_core")

#: Calls after which structures that stay are converted.
CALLS = policy.REUSE + 4
#: Calls that show how sizes of batches vary; also after which another form of a recorded step is recorded.
BATCHES = 8
#: Runs of the form that is recorded before that, so that libraries have what they allocate once.
_PREPARING = 2
#: Sizes of batches that are recorded apart, and forms of a step (arguments, training or not).
_MOST_ROOMS = 4
_MOST_FORMS = 32
#: Relative difference of the padded form that rounding explains, in float32 and in 16 bits. A ReLU that
#: rounding switches changes gradients by 1e-3; rows of padding, more than the batch has on trial, change much more.
_TOLERANCE, _TOLERANCE_16 = 1e-2, 5e-2

#: For tests: without a GPU the form that is recorded runs, step by step.
_pretends = False
#: What plugins put around every run of the form that is recorded: functions of what is held.
surroundings: list[Callable[[list[Held]], Any]] = []


class _Refused(Exception):
    """Why a step stays as it is."""


class Call:
    """Arguments of one call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.arguments = [argument_of(item) for item in (*args, *kwargs.values())]
        self.names = tuple(kwargs)
        padded = [argument.sizes for argument in self.arguments if argument.sizes is not None]
        if len(padded) > 1:
            raise _Refused("it takes several batches")
        self.sizes: Sizes | None = padded[0] if padded else None

    @property
    def key(self) -> Hashable:
        """What is the same for all calls of one form."""
        return (self.names, *(argument.key for argument in self.arguments))

    @property
    def device(self) -> torch.device | None:
        """Of the tensors: the GPU if some are there."""
        devices = [tensor.device for argument in self.arguments for tensor in argument.tensors]
        return next((device for device in devices if device.type == "cuda"), devices[0] if devices else None)


class Form:
    """A step with arguments of one kind, in one mode.

    Attributes:
        calls: how many there were.
        varies: for every argument, whether it was another one in different calls.
        seen: sizes of batches.
        records: the newest first.
        refusal: why it stays as it is; "" if it does not.
        difference: relative, of results and gradients with padding, when that was tried last.
    """

    def __init__(self, call: Call) -> None:
        self.calls = 0
        self.varies = [argument.sizes is not None for argument in call.arguments]
        self.seen: list[Sizes] = []
        self.records: list[Record] = []
        self.refusal = ""
        self.difference = 0.0
        self._last = [
            [] if varies else item.tensors for item, varies in zip(call.arguments, self.varies, strict=True)
        ]

    def observe(self, call: Call) -> None:
        """Counts a call, and compares it with the last one."""
        self.calls += 1
        for nth, (last, argument) in enumerate(zip(self._last, call.arguments, strict=True)):
            if not all(x is y for x, y in zip(last, argument.tensors, strict=False)):
                self.varies[nth] = True
        # What varies is not kept alive.
        self._last = [
            [] if varies else argument.tensors
            for argument, varies in zip(call.arguments, self.varies, strict=True)
        ]
        if call.sizes is not None:
            self.seen = [*self.seen[-63:], call.sizes]


class Record:
    """One recorded form: memory that it reads, and the graph.

    Args:
        call: one that fits.
        varies: see `Form`.
        room: for a batch.
    """

    def __init__(self, call: Call, varies: list[bool], room: Sizes | None) -> None:
        self.room = room
        self.held = [
            argument.hold(room) if changes else Constant(argument)
            for argument, changes in zip(call.arguments, varies, strict=True)
        ]
        self._names = call.names
        self.prepared = 0
        self.execution: recorded.StepRun | None = None
        self.replay: Callable[[], Any] | None = None

    @property
    def given(self) -> tuple[list[Any], dict[str, Any]]:
        """What the step is called with."""
        values = [held.value for held in self.held]
        count = len(values) - len(self._names)
        return values[:count], dict(zip(self._names, values[count:], strict=True))

    def changed(self, call: Call) -> list[int]:
        """Places of arguments that are others than when it was recorded, and were taken to stay."""
        return [
            nth
            for nth, (held, argument) in enumerate(zip(self.held, call.arguments, strict=True))
            if isinstance(held, Constant) and not held.is_as_recorded(argument)
        ]

    def fits(self, call: Call) -> bool:
        """Whether there is room for the call's batch."""
        return self.room is None or call.sizes is None or self.room.hold(call.sizes)

    def write(self, call: Call) -> None:
        """Copies the call's arguments to where the step reads them."""
        for held, argument in zip(self.held, call.arguments, strict=True):
            if not isinstance(held, Constant):
                held.write(argument)

    def trimmed(self, result: Any, call: Call) -> Any:
        """A result without rows of padding."""
        room, sizes = self.room, call.sizes
        if room is None or sizes is None:
            return result
        rows = {room.nodes: sizes.nodes, room.edges: sizes.edges}

        def trim(item: Any) -> Any:
            padded = isinstance(item, Tensor) and item.dim() and item.size(0) in rows
            return item[: rows[item.size(0)]] if padded else item

        return tree_map(trim, result)

    def run(self, step: Callable[..., Any], observed: Observed) -> Any:
        """Runs a step on what is held, in the form that is recorded."""
        args, kwargs = self.given
        greatest = {address: value for held in self.held for address, value in held.greatest.items()}
        rows = [of_kind for held in self.held for of_kind in held.rows]
        with ExitStack() as stack:
            self.execution = recorded.StepRun(
                has_padding=self.room is not None, of_edges=FreshAdjacency.of_edges
            )
            stack.enter_context(recorded.running(self.execution))
            for surrounding in surroundings:
                stack.enter_context(surrounding(self.held))
            stack.enter_context(Twins(rows, greatest, observed.masks))
            return step(*args, **kwargs)


class Captured:
    """Runs a function as it is until it knows what to record, then replays CUDA graphs of it.

    Args:
        step: the function.

    Attributes:
        observed: what it uses.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self.observed = Observed()
        self._forms: dict[Hashable, Form] = {}
        self._optimizers: list[RecordedOptimizer] = []
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def reset(self) -> None:
        """Forgets all records: as if the step had not been called."""
        self.observed = Observed()
        self._forms.clear()
        self._optimizers = []

    @property
    def records(self) -> list[Record]:
        """All there are."""
        return [item for form in self._forms.values() for item in form.records]

    @property
    def forms(self) -> list[Form]:
        """What it was called in."""
        return list(self._forms.values())

    # ---------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step, or replays it."""
        try:
            call = Call(args, kwargs)
            form = self._form(call)
        except (_Refused, TypeError) as refusal:
            self._say(str(refusal))
            return self.step(*args, **kwargs)
        if form is None or form.refusal:
            return self.step(*args, **kwargs)
        if self._optimizers and not all(item.is_as_recorded() for item in self._optimizers):
            logger.info("capture: an optimiser has changed; %s is recorded anew", self._name)
            self._forget()
        if not self.observed.masks.are_unchanged():
            self.observed.masks = type(self.observed.masks)()
            self._forget()
        chosen = next((item for item in form.records if item.fits(call)), None)
        if chosen is not None:
            changed = chosen.changed(call)
            if not changed:
                return self._use(form, chosen, call)
            for nth in changed:
                form.varies[nth] = True
            form.records.clear()
        elif form.records:
            logger.info(
                "capture: a batch is larger than all before; %s is recorded for its size too", self._name
            )
        form.observe(call)
        if form.calls <= self._patience(call) and not form.records:
            return self._as_it_is(call, watch=form.calls <= 2 or form.calls == self._patience(call))
        try:
            chosen = self._begin(form, call)
        except _Refused as refusal:
            form.refusal = str(refusal)
            self._say(form.refusal)
            return self._as_it_is(call)
        return self._use(form, chosen, call)

    def _form(self, call: Call) -> Form | None:
        """The form of a call; None: it runs as it is and says nothing."""
        device = call.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if torch.compiler.is_compiling() or recorded.current() is not None:
            return None
        if device.type != "cuda" and not _pretends:
            raise _Refused("there is no GPU, or its arguments are not there; move them before the call")
        if call.sizes is not None and torch.are_deterministic_algorithms_enabled():
            raise _Refused(
                "sums over padded batches are in no fixed order, and algorithms shall be deterministic"
            )
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        key = (call.key, *self._mode(device))
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms = {key: form for key, form in self._forms.items() if form.records or form.refusal}
                raise _Refused(f"it was called in more than {_MOST_FORMS} forms (sizes or numbers that vary)")
            form = self._forms[key] = Form(call)
        return form

    def _mode(self, device: torch.device) -> tuple[Hashable, ...]:
        observed, grad = self.observed, torch.is_grad_enabled()
        kind = device.type
        return (
            grad,
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            tuple([module.training for module in observed.modules]),
            self._gradients_are_there() if grad else (),
        )

    def _gradients_are_there(self) -> tuple[bool, ...]:
        return tuple([item.grad is not None for item in self.observed.parameters])

    def _patience(self, call: Call) -> int:
        return BATCHES if call.sizes is not None or self.records else CALLS

    def _as_it_is(self, call: Call, watch: bool = False) -> Any:
        with self.observed.watching() if watch else nullcontext():
            return self._on_side(lambda: self.step(*call.args, **call.kwargs))

    def _on_side(self, job: Callable[[], Any]) -> Any:
        """Runs a job where records are made: autograd remembers streams."""
        if not torch.cuda.is_available():
            return job()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return on_stream(self._stream, job)

    # ---------------------------------------------------------------- records

    def _begin(self, form: Form, call: Call) -> Record:
        """Memory for a record, and whether its form does what the step does."""
        if self.observed.schedules:
            raise _Refused("a scheduler of learning rates steps in it; call scheduler.step() after it")
        if len(form.records) >= _MOST_ROOMS:
            raise _Refused(f"its batches had more than {_MOST_ROOMS} sizes, each larger than those before")
        prepare = {id(item.optimizer) for item in self._optimizers}
        self._optimizers += [
            RecordedOptimizer(item) for item in self.observed.optimizers if id(item) not in prepare
        ]
        for argument, varies in zip(call.arguments, form.varies, strict=True):
            if varies and any(tensor.requires_grad for tensor in argument.tensors):
                raise _Refused("an argument that changes requires a gradient")
            if varies and any(tensor.device != call.device for tensor in argument.tensors):
                raise _Refused("an argument that changes is on the CPU")
        room = None if call.sizes is None else room_for(form.seen)
        try:
            if any(form.varies):
                self._compare(form, call, room)
            made = Record(call, form.varies, room)
        except torch.OutOfMemoryError:
            raise _Refused("there is not enough memory to record it") from None
        form.records.insert(0, made)
        return made

    def _compare(self, form: Form, call: Call, room: Sizes | None) -> None:
        """Runs the step on a batch as it is and with much padding; undoes both.

        Raises:
            _Refused: they differ.
        """
        device = call.device or torch.device("cpu")
        wide = None if room is None else Sizes(2 * room.nodes + 1, 2 * room.edges + 3)
        trial = Record(call, form.varies, wide)
        trial.write(call)

        def run(job: Callable[[], Any]) -> Any:
            with recorded.without_dropout(), WithoutDropout(), _without_autocast(device):
                return self._on_side(
                    lambda: on_trial(job, self.observed.parameters, self.observed.buffers(), device)
                )

        plain = run(lambda: self.step(*call.args, **call.kwargs))
        try:
            padded = run(lambda: trial.trimmed(trial.run(self.step, self.observed), call))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the step says of the other form
            raise _Refused(f"{type(error).__name__}: {error}") from error
        found, where = difference(plain, padded)
        form.difference = found
        if not found <= (_TOLERANCE_16 if self.observed.rounds else _TOLERANCE):
            raise _Refused(
                f"padding would change {where} (relative difference {found:.1e}): something in it mixes "
                "nodes of different graphs"
            )

    def _use(self, form: Form, chosen: Record, call: Call) -> Any:
        """A run of a record, which is made where it is due."""
        for item in self._optimizers:
            item.write()
        chosen.write(call)
        if chosen.replay is None:
            if chosen.prepared < _PREPARING or _pretends:
                chosen.prepared += 1
                result = self._on_side(lambda: chosen.run(self.step, self.observed))
                return self._results(chosen.trimmed(result, call))
            try:
                chosen.replay = self._record(chosen)
            except Exception as error:
                form.records.clear()
                form.refusal = _reason(error)
                self._say(form.refusal)
                return self._as_it_is(call)
        return self._results(chosen.trimmed(chosen.replay(), call))

    def _record(self, chosen: Record) -> Callable[[], Any]:
        """Records a run; returns what replays it."""
        observed = self.observed
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        assert self._stream is not None
        parameters = list(observed.parameters)
        before = [item.grad for item in parameters]
        try:
            graph, result = record(
                lambda: chosen.run(self.step, observed),
                self._stream,
                pool=self._pool,
                capture_error_mode="thread_local",
            )
            if torch.is_grad_enabled() and not observed.differentiates and _wants_grad(result):
                raise _Refused(
                    "it returns what backward() is called on outside of it: call backward() in the step, or "
                    "capture the model"
                )
            after = [item.grad for item in parameters]
        finally:
            for item, gradient in zip(parameters, before, strict=True):
                item.grad = gradient  # nothing was computed yet
            chosen.execution = None
        kept = [
            (item, start, end)
            for item, start, end in zip(parameters, before, after, strict=True)
            if start is not None or end is not None
        ]
        result = tree_map(lambda item: item.detach() if isinstance(item, Tensor) else item, result)

        def replay() -> Any:
            for item, start, end in kept:
                # Added to where it is: what the gradient is now may lie elsewhere.
                if start is not None and end is start and item.grad is not start and item.grad is not None:
                    start.copy_(item.grad)
            graph.replay()
            for item, _, end in kept:
                if item.grad is not end:
                    item.grad = end
            return result

        return replay

    def _results(self, result: Any) -> Any:
        """Copies: the next replay writes there."""
        return tree_map(lambda item: item.detach().clone() if isinstance(item, Tensor) else item, result)

    def _forget(self) -> None:
        for form in self._forms.values():
            form.records.clear()
        self._optimizers = []

    @property
    def _name(self) -> str:
        return getattr(self.step, "__qualname__", type(self.step).__name__)

    def _say(self, reason: str) -> None:
        info_once(logger, f"capture: {self._name} runs as it is: {reason}")


@contextlib.contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    """Autocast stays off, whoever turns it on: differences that rounding hides are seen."""
    kind: Any = torch.amp.autocast_mode.autocast
    enter, leave = kind.__enter__, kind.__exit__
    with torch.autocast(device.type, enabled=False):
        kind.__enter__, kind.__exit__ = (lambda self: self), (lambda self, *error: None)
        try:
            yield
        finally:
            kind.__enter__, kind.__exit__ = enter, leave


def _wants_grad(result: Any) -> bool:
    return any(isinstance(item, Tensor) and item.requires_grad for item in tree_leaves(result))


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "there is not enough memory to record it"
    if isinstance(error, _Refused):
        return str(error)
    text = str(error).split("\n")[0]
    return (
        f"it cannot be recorded ({type(error).__name__}: {text}); a step must not read numbers on the host, "
        "as loss.item() does, nor depend on them (bool(mask.any()), sizes that are found on the device)"
    )
