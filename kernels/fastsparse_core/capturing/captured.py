"""Functions and models that become CUDA graphs by themselves: when to record, and what to replay."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from fastsparse_core import policy, recorded
from fastsparse_core.capturing import graphs
from fastsparse_core.capturing.forms import Call, Form, Record, Refused
from fastsparse_core.capturing.gradients import GradientBuffers
from fastsparse_core.capturing.journal import Trial, difference, on_trial
from fastsparse_core.capturing.observe import Observed
from fastsparse_core.capturing.optimizers import RecordedOptimizer
from fastsparse_core.capturing.padding import Room, room_for
from fastsparse_core.capturing.twins import WithoutDropout
from fastsparse_core.log import info_once

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
#: How often settings of optimisers may change.
_MOST_CHANGES = 8
#: Relative difference of the padded form that rounding explains, in float32 and in 16 bits. A ReLU that
#: rounding switches changes gradients by 1e-3; rows of padding, more than the batch has on trial, change much
#: more.
_TOLERANCE, _TOLERANCE_16 = 1e-2, 5e-2


class Captured:
    """Runs a function as it is until it knows what to record, then replays CUDA graphs of it.

    Before a form is recorded, its run is compared with that of the step as it is where the two differ, in
    padding; and its first replay with its run. Where they give other numbers, the step stays as it is.

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
        self._gradients = GradientBuffers()
        self._graphs = graphs.CudaGraphs()
        self._changes = 0
        self._last: Call | None = None  # of a record that reads its arguments in place

    def reset(self) -> None:
        """Forgets all records: as if the step had not been called."""
        self._forget()
        self.observed = Observed()
        self._forms.clear()
        self._last = None

    @property
    def records(self) -> list[Record]:
        """All there are."""
        return [item for form in self._forms.values() for item in form.records]

    @property
    def is_recorded(self) -> bool:
        """Whether some calls are replays."""
        return any(item.replay is not None for item in self.records)

    @property
    def forms(self) -> list[Form]:
        """What it was called in."""
        return list(self._forms.values())

    # ---------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step, or replays it."""
        try:
            last = self._last
            call = last if last is not None and last.is_repeated(args, kwargs) else Call(args, kwargs)
            form = self._form(call)
        except (Refused, TypeError) as refusal:
            self._say(str(refusal))
            return self.step(*args, **kwargs)
        if form is None or form.refusal:
            return self.step(*args, **kwargs)
        if self._optimizers and not all(item.is_as_recorded() for item in self._optimizers):
            logger.info("capture: an optimiser has changed; %s is recorded anew", self._name)
            self._forget()
            self._changes += 1
        if not self.observed.masks.are_unchanged():
            self._graphs.beside(self.observed.masks.read_again)
            self._forget()
        chosen = next((item for item in form.records if item.fits(call)), None)
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
                "capture: a batch is larger than all before; %s is recorded for its size too", self._name
            )
        form.observe(call)
        if form.calls <= self._patience(call) and not form.records:
            return self._as_it_is(call, watch=form.calls <= 2 or form.calls == self._patience(call))
        try:
            chosen = self._begin(form, call)
        except Refused as refusal:
            return self._refuse(form, call, refusal)
        return self._use(form, chosen, call)

    def _form(self, call: Call) -> Form | None:
        """The form of a call; None: it runs as it is and says nothing."""
        device = call.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if torch.compiler.is_compiling() or recorded.current() is not None:
            return None
        if not self._graphs.supports(device):
            raise Refused("there is no GPU, or its arguments are not there; move them before the call")
        if call.sizes is not None and torch.are_deterministic_algorithms_enabled():
            raise Refused(
                "sums over padded batches are in no fixed order, and algorithms shall be deterministic"
            )
        if self._graphs.is_recording():
            return None
        key = (call.key, *self._mode(device))
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms = {key: form for key, form in self._forms.items() if form.records or form.refusal}
                raise Refused(f"it was called in more than {_MOST_FORMS} forms (sizes or numbers that vary)")
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
        """Where the first parameter lies: all move with it (``model.to``)."""
        parameters = self.observed.parameters
        return 0 if not parameters or is_lazy(parameters[0]) else parameters[0].data_ptr()

    def _gradients_are_there(self) -> tuple[bool, ...]:
        return tuple([item.grad is not None for item in self.observed.parameters])

    def _patience(self, call: Call) -> int:
        return BATCHES if call.sizes is not None or self.records else CALLS

    def _as_it_is(self, call: Call, watch: bool = False) -> Any:
        with self.observed.watching() if watch else nullcontext():
            return self._graphs.beside(lambda: self.step(*call.args, **call.kwargs))

    # ---------------------------------------------------------------- records

    def _begin(self, form: Form, call: Call) -> Record:
        """Memory for a record, and whether its form does what the step does."""
        if self.observed.schedules:
            raise Refused("a scheduler of learning rates steps in it; call scheduler.step() after it")
        if self._changes > _MOST_CHANGES:
            raise Refused(
                "settings of an optimiser, or learning rates that it reads on the host, change often"
            )
        if len(form.records) >= _MOST_ROOMS:
            raise Refused(f"its batches had more than {_MOST_ROOMS} sizes, each larger than those before")
        for argument, varies in zip(call.arguments, form.varies, strict=True):
            if varies and any(tensor.requires_grad for tensor in argument.tensors):
                raise Refused("an argument that changes requires a gradient")
            if varies and any(tensor.device != call.device for tensor in argument.tensors):
                raise Refused("an argument that changes is on the CPU")
        prepared = {id(item.optimizer) for item in self._optimizers}
        self._optimizers += [
            RecordedOptimizer(item, self._graphs.supports)
            for item in self.observed.optimizers
            if id(item) not in prepared
        ]
        room = None if call.sizes is None else room_for(form.seen)
        try:
            if any(form.varies):
                self._compare(form, call, room)
            made = Record(call, form.varies, room)
        except torch.OutOfMemoryError:
            raise Refused("there is not enough memory to record it") from None
        form.records.insert(0, made)
        return made

    def _compare(self, form: Form, call: Call, room: Room | None) -> None:
        """Runs the step on a batch as it is and with much padding; undoes both.

        Raises:
            Refused: they differ.
        """
        device = call.device or torch.device("cpu")
        wide = None if room is None else room.doubled()
        trial = Record(call, form.varies, wide)
        trial.write(call)
        rounds = self.observed.rounds

        def compare() -> tuple[Trial, Trial]:
            plain = self._on_trial(lambda: self.step(*call.args, **call.kwargs), device)
            try:
                return plain, self._on_trial(
                    lambda: trial.trimmed(trial.run(self.step, self.observed), call), device
                )
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever the step says of the other form
                raise Refused(f"{type(error).__name__}: {error}") from error

        with recorded.without_dropout(), WithoutDropout():
            try:
                with _without_autocast(device):
                    plain, padded = compare()
            except RuntimeError:  # features in 16 bits, which meet weights in 32 bits without it
                rounds = True
                plain, padded = compare()
        found, where = difference(plain, padded)
        form.difference = found
        if not found <= (_TOLERANCE_16 if rounds else _TOLERANCE):
            raise Refused(
                f"padding would change {where} (relative difference {found:.1e}): something in it mixes "
                "nodes of different graphs"
            )

    def _on_trial(self, job: Callable[[], Any], device: torch.device, keeps: Sequence[Any] = ()) -> Trial:
        observed = self.observed
        return self._graphs.beside(
            lambda: on_trial(
                lambda: self._probe(job()), observed.parameters, observed.buffers(), device, keeps
            )
        )

    def _probe(self, result: Any) -> Any:
        """What a trial does with a result besides."""
        return result

    def _use(self, form: Form, chosen: Record, call: Call) -> Any:
        """A run of a record, which is made where it is due."""
        for item in self._optimizers:
            item.write()
        chosen.write(call)
        if chosen.replay is None:
            if chosen.prepared < _PREPARING:
                chosen.prepared += 1
                result = self._graphs.beside(lambda: chosen.run(self.step, self.observed))
                return self._results(chosen.trimmed(result, call))
            try:
                chosen.replay = self._checked_replay(chosen, call)
            except Exception as error:
                return self._refuse(form, call, error)
        return self._results(chosen.trimmed(chosen.replay(), call))

    def _checked_replay(self, chosen: Record, call: Call) -> Callable[[], Any]:
        """Records a run, and replays it on trial: it has to give what a run gives on trial.

        Raises:
            Refused: it does not.
        """
        device = call.device or torch.device("cpu")
        run = self._on_trial(lambda: chosen.run(self.step, self.observed), device)
        replay = self._record(chosen)
        replayed = self._on_trial(replay, device, [*run.written, *self._gradients])
        chosen.difference, where = difference(run, replayed)
        rounds = self.observed.rounds or torch.is_autocast_enabled(device.type)
        if not chosen.difference <= (_TOLERANCE_16 if rounds else _TOLERANCE):
            raise Refused(
                f"its replay would change {where} (relative difference {chosen.difference:.1e}): something "
                "in it is kept by the host from call to call, or drawn there"
            )
        return replay

    def _record(self, chosen: Record) -> Callable[[], Any]:
        """Records a run; returns what replays it."""
        observed = self.observed
        parameters = list(observed.parameters)
        known = {id(item) for item in parameters}
        given = (tensor for held in chosen.held for tensor in held.tensors)
        if observed.differentiates and any(
            x.is_leaf and x.requires_grad and id(x) not in known for x in given
        ):
            raise Refused("an argument requires a gradient, and no module or optimiser in it has that tensor")
        with self._gradients.held(parameters) as gradients:

            def job() -> Any:
                result = chosen.run(self.step, observed)
                gradients.take()
                return result

            try:
                launch, result = self._graphs.record(job)
            finally:
                chosen.execution = None
        if torch.is_grad_enabled() and not observed.differentiates and _wants_grad(result):
            raise Refused(
                "it returns what backward() is called on outside of it: call backward() in the step, or "
                "capture the model"
            )
        result = tree_map(lambda item: item.detach() if isinstance(item, Tensor) else item, result)

        def replay() -> Any:
            gradients.before_replay()
            launch()
            gradients.after_replay()
            return result

        return replay

    def _results(self, result: Any) -> Any:
        """Copies: the next replay writes there."""
        return tree_map(lambda item: item.detach().clone() if isinstance(item, Tensor) else item, result)

    def _refuse(self, form: Form, call: Call, error: Exception) -> Any:
        """Runs a call as it is, as all later ones of its form."""
        form.records.clear()
        self._last = None
        form.refusal = _reason(error)
        self._say(form.refusal)
        if not self.records:
            self._forget()
        return self._as_it_is(call)

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
    if isinstance(error, Refused):
        return str(error)
    text = str(error).split("\n")[0]
    return (
        f"it cannot be recorded ({type(error).__name__}: {text}); a step must not read numbers on the host, "
        "as loss.item() does, nor depend on them (bool(mask.any()), sizes that are found on the device)"
    )
