"""Captured functions and models: decides when to record a CUDA graph, and which one to replay."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import os.path
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from fastsparse_core import policy, recorded
from fastsparse_core.capturing import graphs
from fastsparse_core.capturing.forms import Call, Form, Record
from fastsparse_core.capturing.gradients import GradientBuffers
from fastsparse_core.capturing.masked_functions import WithoutDropout
from fastsparse_core.capturing.numbers import Number, Tracker
from fastsparse_core.capturing.observe import Observed
from fastsparse_core.capturing.optimizers import RecordedOptimizer
from fastsparse_core.capturing.padding import Capacity, capacity_for
from fastsparse_core.capturing.refused import Refused, reason_of
from fastsparse_core.capturing.rollback import (
    State,
    Trial,
    difference,
    on_trial,
    other_random_numbers,
    set_modes,
    undone_if_it_fails,
)
from fastsparse_core.device import machine_has_gpu
from fastsparse_core.log import info_once, warn_once

logger = logging.getLogger("fastsparse_core")

#: Number of calls without varying batch sizes before recording. By then, structures that do not change have
#: been converted to faster formats.
CALLS = policy.REUSE + 4
#: Number of calls before recording if the sizes of batches vary: the calls show by how much the sizes vary.
#: Also the number of calls before another form of an already recorded step is recorded.
BATCHES = 8
#: Number of runs of a form right before it is recorded. In these runs, libraries make one-time allocations.
_PREPARING = 2
#: Largest number of records with different capacities per form, and largest number of forms of a step.
_MOST_ROOMS = 4
_MOST_FORMS = 32
#: After more refused calls in a row than this, arguments are no longer inspected.
_MOST_REFUSALS = 100
#: Largest number of changes, such as of optimizer settings, after which a step is recorded again.
_MOST_CHANGES = 8
#: Largest relative difference between two forms of a step that rounding may cause, in float32 and in 16 bits.
#: If rounding changes the sign at a ReLU, gradients change by about 1e-3. If padding leaked into the result,
#: they would change much more, because a trial has more rows of padding than of the batch.
_TOLERANCE, _TOLERANCE_16 = 1e-2, 5e-2
#: If two runs of the same form differ too, this multiple of their difference is tolerated, up to a limit.
_NOISE, _MOST_TOLERATED = 4, 0.25
#: Half a unit in the last place of bfloat16, relative.
_ROUNDING_16 = 2.0**-9
#: The only reason for a refusal that applies to all steps.
_NO_GPU = "there is no CUDA device"


class Captured:
    """Runs a function unchanged in its first calls, then replays CUDA graphs of it.

    Before recording, a padded run of the step is compared with an unpadded run. After recording, the first
    replay is compared with a plain run. If results or gradients differ, the step keeps running unchanged.

    Args:
        step: the function.

    Attributes:
        observed: the modules, optimizers and parameters that the function uses.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self._graphs = graphs.CudaGraphs()
        self.observed = Observed(step, self._graphs.supports)
        self._forms: dict[Hashable, Form] = {}
        self._optimizers: list[RecordedOptimizer] = []
        self._gradients = GradientBuffers()
        self._changes = self._refusals = 0
        self._last: Call | None = None  # the last call, if its record reads the arguments in place
        self._latest: Form | str = ""  # form of the last call, or the reason why the call was refused

    def reset(self) -> None:
        """Drops all records and observations, as if the step had never been called."""
        self._forget()
        self.observed = Observed(self.step, self._graphs.supports)
        self._forms.clear()
        self._last, self._latest, self._refusals = None, "", 0

    @property
    def records(self) -> list[Record]:
        """The records of all forms."""
        return [item for form in self._forms.values() for item in form.records]

    @property
    def is_recorded(self) -> bool:
        """True if some calls are replays."""
        return any(item.replay is not None for item in self.records)

    @property
    def forms(self) -> list[Form]:
        """The forms in which the step was called."""
        return list(self._forms.values())

    @property
    def status(self) -> str:
        """State after the last call: "replaying", "watching (3 of 20 calls)", or "refused: " and why."""
        form = self._latest
        if isinstance(form, str):
            return f"refused: {form}" if form else "watching (no call yet)"
        if form.refusal:
            return f"refused: {form.refusal}"
        if any(item.replay is not None for item in form.records):
            return "replaying"
        return f"watching ({min(form.calls, form.patience)} of {form.patience} calls)"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {getattr(self.step, '__qualname__', self.step)}: {self.status}>"

    # ---------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step, or replays it."""
        if self._refusals > _MOST_REFUSALS:
            return self.step(*args, **kwargs)
        try:
            last = self._last
            call = last if last is not None and last.is_repeated(args, kwargs) else Call(args, kwargs)
            form = self._form(call)
        except Exception as error:  # inspecting the user's objects may raise any error
            self._latest = reason_of(error)
            self._say(self._latest)
            return self.step(*args, **kwargs)
        if form is None:
            return self.step(*args, **kwargs)
        self._latest = form
        if form.refusal:
            self._refusals += 1
            return self.step(*args, **kwargs)
        self._refusals = 0
        if self._optimizers and not all(item.is_as_recorded() for item in self._optimizers):
            logger.info("capture: settings of an optimizer have changed; %s is recorded again", self._name)
            self._forget()
            self._changes += 1
        if not self.observed.masks.are_unchanged():
            self._graphs.beside(self.observed.masks.read_again)
            self._forget()
        if not all(item.answers.are_valid() for item in form.records):
            self._forget()
            self._changes += 1
            form.calls = 0  # observe again which tensors do not change
        fitting = (item for item in form.records if item.fits(call))
        chosen = min(fitting, key=operator.attrgetter("size"), default=None)
        if chosen is not None:
            changed = chosen.changed(call)
            if not changed:
                self._last = call if chosen.is_constant else None
                return self._use(form, chosen, call)
            for nth in changed:
                form.varies[nth] = True
            form.records.clear()
        elif form.records:
            logger.info(
                "capture: a batch exceeds all recorded sizes; %s is recorded for its size too", self._name
            )
        form.observe(call)
        if not form.records:
            form.patience = self._patience(call)
            if form.calls <= form.patience:
                return self._watch(form, call)
        try:
            chosen = self._begin(form, call)
        except Refused as refusal:
            self._refuse(form, refusal)
            return self._last_beside(call)
        return self._use(form, chosen, call)

    def _form(self, call: Call) -> Form | None:
        """The form of a call; None if the call runs unchanged without a message."""
        device = call.device or _default_device()
        if torch.compiler.is_compiling() or recorded.current() is not None:
            return None
        if not self._graphs.supports(device):
            raise Refused(self._why_no_gpu(call))
        if call.sizes is not None and torch.are_deterministic_algorithms_enabled():
            raise Refused(
                "sums over padded batches have no fixed order, but torch.use_deterministic_algorithms(True) "
                "requires one. Turn it off, or do not capture the step"
            )
        if self._graphs.is_recording():
            return None
        key = (call.key, *self._mode(device))
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms = {key: form for key, form in self._forms.items() if form.records or form.refusal}
                raise Refused(
                    f"its arguments had more than {_MOST_FORMS} different sizes or values. Pass numbers that "
                    "change as tensors on the GPU"
                )
            form = self._forms[key] = Form(call)
        return form

    def _mode(self, device: torch.device) -> tuple[Hashable, ...]:
        observed, kind = self.observed, device.type
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            tuple([module.training for module in observed.modules]),
            self._gradients_are_there(),
            self._place(),
        )

    def _place(self) -> int:
        """Address of the first parameter. If it changes, ``model.to`` has moved all parameters."""
        parameters = self.observed.parameters
        return 0 if not parameters or is_lazy(parameters[0]) else parameters[0].data_ptr()

    def _gradients_are_there(self) -> tuple[bool, ...]:
        return tuple([item.grad is not None for item in self.observed.parameters])

    def _patience(self, call: Call) -> int:
        return BATCHES if call.sizes is not None or self.records else CALLS

    def _as_it_is(self, call: Call) -> Any:
        return self._graphs.beside(lambda: self.step(*call.args, **call.kwargs))

    def _watch(self, form: Form, call: Call) -> Any:
        """Runs a call unchanged and records what it uses; the last time, also how it uses Python numbers."""
        is_last = form.calls == form.patience
        if form.calls > 2 and not is_last:
            return self._as_it_is(call)
        tracker = Tracker()

        def step() -> Any:
            return self.step(*call.args, **call.kwargs)

        def job() -> Any:
            with self.observed.watching(tracker if is_last else None):
                return tracker.run(step) if is_last else step()

        if not is_last:
            return self._graphs.beside(job)
        state = self._state(call)
        try:
            result = self._graphs.beside(lambda: undone_if_it_fails(job, state))
        except Exception as error:
            self._refuse(form, error)
            return self._last_beside(call)
        if tracker.refusal is None:
            return result
        self._refuse(form, tracker.refusal)
        return self._without_graph(result)

    def _last_beside(self, call: Call) -> Any:
        """Runs a refused call unchanged on the side stream; later calls run on the caller's stream."""
        return self._without_graph(self._as_it_is(call))

    def _without_graph(self, result: Any) -> Any:
        """The result without its autograd graph, as from a replay, if the step calls ``backward()`` itself.

        As long as a result keeps the autograd graph alive, gradients of parameters are accumulated on the
        stream of that run. Every later call on another stream would wait for that stream at every parameter.
        """
        if not (self._defers and self.observed.differentiates):
            return result
        return tree_map(lambda item: item.detach() if isinstance(item, Tensor) else item, result)

    def _why_no_gpu(self, call: Call) -> str:
        if not torch.cuda.is_available():
            return _NO_GPU
        names = _names_of_arguments(self.step, call)
        on_cpu = [
            name
            for name, argument in zip(names, call.arguments, strict=True)
            if any(not self._graphs.supports(tensor.device) for tensor in argument.tensors)
        ]
        return (
            f"argument `{on_cpu[0]}` is on the CPU, and CUDA graphs need tensors on the GPU. Move it with "
            "`.cuda()` before the call"
        )

    def _state(self, call: Call) -> State:
        observed = self.observed
        devices = {*observed.devices, *(item.device for item in observed.parameters), self._device(call)}
        return State(observed.parameters, observed.buffers(), observed.modes(), list(devices))

    def _device(self, call: Call) -> torch.device:
        """Device on which the step computes."""
        found = [item for item in (call.device, *self.observed.devices) if item is not None]
        found += [item.device for item in self.observed.parameters]
        return next((item for item in found if item.type == "cuda"), torch.device("cpu"))

    # ---------------------------------------------------------------- records

    def _begin(self, form: Form, call: Call) -> Record:
        """Allocates the memory of a record, and checks that padding does not change the step's results."""
        if self.observed.schedules:
            raise Refused("it calls a learning rate scheduler. Call `scheduler.step()` after the step")
        if self.observed.communicates:
            raise Refused(
                "it exchanges data with other processes, which may then wait forever, because recording runs "
                "the step several times. Capture forward and backward pass of the model without "
                "DistributedDataParallel, and call `all_reduce_gradients(model)` and `optimizer.step()` "
                "after the captured step"
            )
        if self._changes > _MOST_CHANGES:
            raise Refused(
                "settings of its optimizer, learning rates that PyTorch reads on the CPU, or indices that "
                f"determine sizes changed more than {_MOST_CHANGES} times. Keep these values constant "
                "between calls"
            )
        if len(form.records) >= _MOST_ROOMS:
            raise Refused(
                f"a batch is larger than all {_MOST_ROOMS} recorded sizes. Shuffle the batches, so that the "
                "first ones show how sizes vary"
            )
        names = _names_of_arguments(self.step, call)
        for name, argument, varies in zip(names, call.arguments, form.varies, strict=True):
            if varies and any(tensor.requires_grad for tensor in argument.tensors):
                raise Refused(f"argument `{name}` changes and requires a gradient. Pass a detached tensor")
            if varies and any(tensor.device != call.device for tensor in argument.tensors):
                raise Refused(
                    f"argument `{name}` changes, and is not on the device of the step, {call.device}. "
                    f"Move it with `.to({str(call.device)!r})` before the call"
                )
        prepared = {id(item.optimizer) for item in self._optimizers}
        self._optimizers += [
            RecordedOptimizer(item, self._graphs.supports)
            for item in self.observed.optimizers
            if id(item) not in prepared
        ]
        capacity = None if call.sizes is None else capacity_for(form.seen)
        try:
            if any(form.varies):
                self._compare(form, call, capacity)
            made = Record(call, form.varies, capacity)
            made.write(call)
            self._on_trial(lambda: made.run(self.step, self.observed, self._defers), call)
        except Refused:
            raise
        except Exception as error:  # on copied or padded arguments, the step may raise any error
            raise Refused(reason_of(error)) from error
        form.records.insert(0, made)
        return made

    def _compare(self, form: Form, call: Call, capacity: Capacity | None) -> None:
        """Runs the step on a batch without padding and with much padding, and undoes both runs.

        Raises:
            Refused: the results differ.
        """
        device = self._device(call)
        wide = None if capacity is None else capacity.doubled()
        trial = Record(call, form.varies, wide)
        trial.write(call)

        def plain() -> Trial:
            return self._on_trial(lambda: self.step(*call.args, **call.kwargs), call)

        def compare(rounds: bool) -> None:
            one = plain()
            padded = self._on_trial(
                lambda: trial.trimmed(trial.run(self.step, self.observed, self._defers), call), call
            )
            form.difference, where = difference(one, padded)
            if not form.difference <= _tolerated(form.difference, rounds, one, [plain, plain]):
                raise Refused(
                    f"padding would change {where} (relative difference {form.difference:.1e}). Usual cause: "
                    "something in the step mixes the nodes of different graphs"
                )

        with recorded.without_dropout(), WithoutDropout():
            try:
                with _without_autocast(device):
                    compare(self.observed.rounds)
            except RuntimeError:  # without autocast, 16-bit features do not fit 32-bit weights
                compare(rounds=True)

    def _on_trial(self, job: Callable[[], Any], call: Call, keeps: Sequence[Any] = ()) -> Trial:
        state = self._state(call)
        return self._graphs.beside(lambda: on_trial(lambda: self._probe(job()), state, keeps))

    #: True if reading numbers can be deferred until after a replay. A model's numbers cannot be deferred.
    _defers = True

    def _probe(self, result: Any) -> Any:
        """Processes the result of a trial; subclasses override it."""
        return result

    def _use(self, form: Form, chosen: Record, call: Call) -> Any:
        """Runs a record: prepares it in its first calls, then records it, then replays it."""
        for item in self._optimizers:
            item.write()
        chosen.write(call)
        if chosen.replay is None:
            if chosen.prepared < _PREPARING:
                chosen.prepared += 1
                state = self._state(call)
                try:
                    result = self._graphs.beside(
                        lambda: undone_if_it_fails(lambda: chosen.run(self.step, self.observed), state)
                    )
                except Exception as error:
                    self._refuse(form, error)
                    return self._last_beside(call)
                return self._results(chosen.trimmed(result, call))
            try:
                if chosen.carried.line:
                    raise Refused(
                        f"{chosen.carried.line} uses a tensor that the previous call created. A replay would "
                        "read an outdated tensor. Write into one tensor in every call: `kept.copy_(new)`"
                    )
                chosen.replay = self._checked_replay(chosen, call)
            except Exception as error:
                self._refuse(form, error)
                return self._last_beside(call)
        result = chosen.replay()
        set_modes(chosen.modes)
        return self._results(chosen.trimmed(result, call))

    def _checked_replay(self, chosen: Record, call: Call) -> Callable[[], Any]:
        """Records a run, and checks in a trial that a replay gives the same results as a plain run.

        Raises:
            Refused: the results differ.
        """
        run = self._on_trial(lambda: chosen.run(self.step, self.observed, self._defers), call)
        modes = self.observed.modes()
        try:
            with other_random_numbers():
                replay = self._record(chosen)
            chosen.modes = self.observed.modes() if self.observed.switches else []
        finally:
            set_modes(modes)

        def again(shift: float = 0.0) -> Trial:
            def job() -> Any:
                _shift(self.observed.parameters, shift)
                return replay()

            return self._on_trial(job, call, [*run.written, *self._gradients])

        replayed = again()
        chosen.difference, where = difference(run, replayed)
        rounds = self.observed.rounds or self.observed.autocasts
        shifts = [0.0, _ROUNDING_16, -_ROUNDING_16] if rounds else [0.0]
        others = [functools.partial(again, shift) for shift in shifts]
        if not chosen.difference <= _tolerated(chosen.difference, rounds, replayed, others):
            raise Refused(
                f"the recorded step and the plain step differ in {where} (relative difference "
                f"{chosen.difference:.1e}). Usual causes: Python state that changes between calls, random "
                "numbers drawn with NumPy or on the CPU"
            )
        return replay

    def _record(self, chosen: Record) -> Callable[[], Any]:
        """Records a run; returns a function that replays it."""
        observed = self.observed
        parameters = list(observed.parameters)
        known = {id(item) for item in parameters}
        given = (tensor for held in chosen.held for tensor in held.tensors)
        if observed.differentiates and any(
            x.is_leaf and x.requires_grad and id(x) not in known for x in given
        ):
            raise Refused(
                "an argument requires a gradient, but is no parameter of the step's modules or optimizers. "
                "Pass a detached tensor"
            )
        with self._gradients.held(parameters) as gradients:

            def job() -> Any:
                result = chosen.run(self.step, observed, self._defers)
                gradients.take()
                return result

            try:
                launch, result = self._graphs.record(job)
            finally:
                chosen.execution = None
        if torch.is_grad_enabled() and not observed.differentiates and _wants_grad(result):
            raise Refused(
                "it returns a tensor that requires a gradient, and does not call backward(). Call backward() "
                "in the step, or capture the model"
            )
        result = tree_map(lambda item: item.detach() if isinstance(item, Tensor) else item, result)

        def replay() -> Any:
            gradients.before_replay()
            launch()
            gradients.after_replay()
            return result

        return replay

    def _results(self, result: Any) -> Any:
        """Copies the results, because the next replay overwrites them, and reads deferred numbers."""
        return tree_map(_copy, result)

    def _refuse(self, form: Form, error: Exception) -> None:
        """Runs all later calls of a form unchanged, and reports why."""
        form.records.clear()
        self._last = None
        form.refusal = reason_of(error)
        self._say(form.refusal)
        if not self.records:
            self._forget()

    def _forget(self) -> None:
        self._last = None
        for form in self._forms.values():
            form.records.clear()
        for item in self._optimizers:
            item.restore()
        self._optimizers = []

    @property
    def _name(self) -> str:
        return getattr(self.step, "__qualname__", type(self.step).__name__)

    def _say(self, reason: str) -> None:
        if reason == _NO_GPU:  # reported once for all steps
            message = f"capture: {reason}, so captured steps run unchanged. CUDA graphs need a GPU"
            if machine_has_gpu():
                warn_once(f"{message}: install a PyTorch that is built with CUDA")
            else:  # the machine has no GPU, so there is nothing to warn about
                info_once(logger, message)
            return
        code = getattr(inspect.unwrap(self.step), "__code__", None)
        at = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
        warn_once(f"capture: `{self._name}`{at} is not recorded and runs unchanged: {reason}")


@functools.cache
def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _copy(item: Any) -> Any:
    if isinstance(item, Number):
        return item.value()
    return item.detach().clone() if isinstance(item, Tensor) else item


def _names_of_arguments(step: Callable[..., Any], call: Call) -> list[str]:
    """Names of the arguments as the user wrote them."""
    given = len(call.arguments) - len(call.names)
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [item.name for item in parameters if item.kind is not inspect.Parameter.VAR_POSITIONAL]
    return [names[nth] if nth < len(names) else f"number {nth + 1}" for nth in range(given)] + list(
        call.names
    )


def _tolerated(found: float, rounds: bool, one: Trial, others: Sequence[Callable[[], Trial]]) -> float:
    """The largest relative difference that rounding can explain.

    If ``found`` is larger than the tolerance, further trials show by how much equal runs differ.
    Equal runs differ because atomics add in any order, and because libraries choose other kernels for a
    recording. In 16 bits, both effects are large. For a record, the further trials are replays, not plain
    runs: Python state that changes between calls would also change plain runs, and its effect would be
    hidden.

    Args:
        found: relative difference between the two compared runs.
        rounds: whether the step computes in 16 bits.
        one: a trial.
        others: functions that run trials, which differ from ``one`` only by rounding.
    """
    tolerance = _TOLERANCE_16 if rounds else _TOLERANCE
    if found <= tolerance or found > _MOST_TOLERATED:
        return tolerance
    noise = max(difference(one, run())[0] for run in others)
    return max(tolerance, min(_NOISE * noise, _MOST_TOLERATED))


def _shift(parameters: Sequence[Tensor], shift: float) -> None:
    """Changes every parameter by a relative amount of up to ``shift``, which varies between elements."""
    if shift:
        with torch.no_grad():
            for item in parameters:
                wave = torch.arange(item.numel(), device=item.device).sin().view(item.shape)
                item.mul_(1 + shift * wave.to(item.dtype))


@contextlib.contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    """Disables autocast, even if the code enables it, so that rounding cannot hide a difference."""
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
