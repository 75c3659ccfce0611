"""Numbers that a step reads from the GPU: numbers that it only returns are read after the replay.

A replay runs no Python, so ``return loss.item()`` can be recorded only if the step does not use the number.
To find out, an ordinary call of the step gets :class:`TrackedFloat` and :class:`TrackedInt`, which record
their uses. In later runs, each number is a :class:`Number`, which has no value yet. Python's ``float(loss)``
cannot return one of these classes, so functions that call ``float`` and ``int`` call `_float` and `_int`
during these runs.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import inspect
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, NoReturn, Protocol

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastsparse_core.capturing.refused import Refused
from fastsparse_core.log import current_line, is_of_user
from fastsparse_core.ops._autocast import version_of

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_UNARY = ("neg", "pos", "abs")
#: Methods that turn a number into a Python value that the step may branch on.
_USES = (
    *("lt", "le", "gt", "ge", "eq", "ne", "bool", "hash", "format", "str", "repr", "int", "float", "index"),
    *("trunc", "floor", "ceil", "divmod", "rdivmod", "and", "or", "xor", "lshift", "rshift", "invert"),
)
#: Names of `_float` and `_int` in the globals of functions that call ``float`` and ``int``.
_NAMES = {"float": "__captured_float__", "int": "__captured_int__"}


class Reader(Protocol):
    """Decides what ``float(x)`` and ``int(x)`` return for a tensor."""

    def read(self, tensor: Tensor) -> Any:
        """Returns the number in a tensor, or an object that takes the place of the number."""


_readers = threading.local()


@contextlib.contextmanager
def reading(reader: Reader) -> Iterator[None]:
    """Context in which ``float`` and ``int`` of patched functions call a reader, in this thread."""
    before = getattr(_readers, "current", None)
    _readers.current = reader
    try:
        yield
    finally:
        _readers.current = before


def _refusal(line: str) -> Refused:
    return Refused(
        f"the step uses the number that it reads at {line}. Return the number and use it after the step, or "
        "compute with the tensor"
    )


# ---------------------------------------------------------------- an ordinary call


class Tracker:
    """Finds out whether a call uses the numbers that it reads.

    Attributes:
        refusal: why the step cannot be recorded; None: no number was used.
    """

    def __init__(self) -> None:
        self.refusal: Refused | None = None
        self.is_over = False
        self._tokens: list[tuple[weakref.ref[_Token], str]] = []

    def track(self, value: Any, line: str) -> Any:
        """Makes a number that records its uses. A bool or another value counts as used at once."""
        kind = {float: TrackedFloat, int: TrackedInt}.get(type(value))
        if kind is None:
            self.note(line)
            return value
        made: Any = kind(value)
        made.tracker, made.line, made.token = self, line, _Token()
        self._tokens.append((weakref.ref(made.token), line))
        return made

    def look(self, args: Any, kwargs: Any) -> None:
        """Records the use of numbers among the arguments of a PyTorch function."""
        for item in (*args, *kwargs.values()):
            if isinstance(item, _TRACKED):
                self.note(item.line)
            elif isinstance(item, (list, tuple)):
                self.look(item, {})

    def note(self, line: str) -> None:
        """Records that the number which was read at a line is used."""
        if not self.is_over and self.refusal is None:
            self.refusal = _refusal(line)

    def run(self, step: Callable[[], Any]) -> Any:
        """Runs the step; returns its result with plain numbers."""
        try:
            result = step()
            flat, spec = tree_flatten(result)
            returned = {id(item.token) for item in flat if isinstance(item, _TRACKED)}
            alive = [
                line for token, line in self._tokens if token() is not None and id(token()) not in returned
            ]
            # If a number in the result has more references than a new number in the same place would have,
            # the step also stored it elsewhere.
            copies = {id(item): _copy(item) for item in flat}
            flat_copies = [copies[id(item)] for item in flat]
            copied = tree_unflatten(flat_copies, spec)
            del copies
            counts, expected = _references(flat), _references(flat_copies)
            alive += [
                item.line
                for item, count, usual in zip(flat, counts, expected, strict=True)
                if isinstance(item, _TRACKED) and count != usual
            ]
            del copied
            if alive:
                self.note(alive[0])
            if not returned:
                return result
            return tree_unflatten([plain(item) for item in flat], spec)
        finally:
            self.is_over = True


class _Token:
    """Lives as long as its number, as a target of weak references, which Python's integers do not support."""


def _references(items: list[Any]) -> list[int]:
    return [sys.getrefcount(item) for item in items]


def _copy(item: Any) -> Any:
    if not isinstance(item, _TRACKED):
        return item
    made: Any = type(item)(plain(item))
    made.tracker, made.line, made.token = item.tracker, item.line, _Token()
    return made


def plain(item: Any) -> Any:
    """Converts a tracked number to Python's float or int."""
    if isinstance(item, TrackedFloat):
        return float.__float__(item)
    return int.__int__(item) if isinstance(item, TrackedInt) else item


def _following(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps arithmetic on a tracked number, so that the result is tracked too."""

    def follow(self: Any, *args: Any) -> Any:
        found = method(self, *args)
        if found is NotImplemented or self.tracker.is_over:
            return found
        return self.tracker.track(found, self.line)

    return follow


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    def note(self: Any, *args: Any) -> Any:
        self.tracker.note(self.line)
        return method(self, *args)

    return note


def _methods(kind: type) -> dict[str, Any]:
    names = [*_BINARY, *(f"r{name}" for name in _BINARY), *_UNARY, "round"]
    following = {f"__{name}__": _following for name in names}
    noting = {f"__{name}__": _noting for name in _USES}
    return {
        name: wrap(getattr(kind, name)) for name, wrap in (following | noting).items() if hasattr(kind, name)
    }


class TrackedFloat(float):
    """A float that was read from the GPU. It records its uses as long as its tracker runs."""

    tracker: Tracker
    line: str
    token: _Token

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (plain(self),)


class TrackedInt(int):
    """An int that was read from the GPU. It records its uses as long as its tracker runs."""

    tracker: Tracker
    line: str
    token: _Token

    def __reduce_ex__(self, protocol: Any) -> Any:
        return int, (plain(self),)


_TRACKED = (TrackedFloat, TrackedInt)
for _kind, _base in ((TrackedFloat, float), (TrackedInt, int)):
    for _name, _method in _methods(_base).items():
        setattr(_kind, _name, _method)


# ---------------------------------------------------------------- runs that are undone or recorded


class Number:
    """A number that is read later: the number in a tensor, or the result of arithmetic on such numbers.

    Args:
        function: computes the value from the values of ``args``.
        args: numbers, each a Python number or a `Number`.
        line: the user's line that reads it.
    """

    __slots__ = ("args", "function", "line")

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], line: str) -> None:
        self.function, self.args, self.line = function, args, line

    def value(self) -> Any:
        """Computes the number from what its tensors contain now."""
        return self.function(*[item.value() if isinstance(item, Number) else item for item in self.args])

    def __round__(self, *digits: Any) -> Number:
        return self._with(round, self, *digits)

    def __getattr__(self, name: str) -> NoReturn:
        raise _refusal(object.__getattribute__(self, "line"))

    def _with(self, function: Callable[..., Any], *args: Any) -> Number:
        if not all(isinstance(item, Number) or type(item) in (int, float, bool) for item in args):
            raise _refusal(self.line)
        return Number(function, args, self.line)


def _deferring(function: Callable[..., Any], is_reversed: bool = False) -> Callable[..., Any]:
    def defer(self: Number, *others: Any) -> Number:
        return self._with(function, *(others if is_reversed else ()), self, *(() if is_reversed else others))

    return defer


def _refusing(self: Number, *args: Any) -> NoReturn:
    raise _refusal(self.line)


for _name in (*_BINARY, *_UNARY):
    setattr(Number, f"__{_name}__", _deferring(getattr(operator, _name)))
for _name in _BINARY:
    setattr(Number, f"__r{_name}__", _deferring(getattr(operator, _name), is_reversed=True))
for _name in (*_USES, "complex", "iter", "len", "getitem", "contains", "reduce_ex"):
    setattr(Number, f"__{_name}__", _refusing)


def number_of(tensor: Tensor) -> Number:
    """Makes a `Number` for a tensor with one element."""
    return _Read(tensor.detach(), current_line())


class _Read(Number):
    """The number in a tensor at the end of a run."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, line: str) -> None:
        super().__init__(tensor.item, (), line)
        self.tensor, self.version = tensor, version_of(tensor)


def check(number: Number) -> None:
    """Checks that the tensor of a number was not written to after the step read it.

    Raises:
        Refused: the tensor was written to.
    """
    if isinstance(number, _Read) and number.version != version_of(number.tensor):
        raise Refused(f"the step writes to the tensor that it reads at {number.line}. Read a copy of it")
    for item in number.args:
        if isinstance(item, Number):
            check(item)


# ---------------------------------------------------------------- float() and int()


def _converted(kind: type, value: Any, *args: Any) -> Any:
    reader: Reader | None = getattr(_readers, "current", None)
    if isinstance(value, Tensor) and reader is not None and not args:
        value = reader.read(value)
    if isinstance(value, Number):
        return value._with(kind, value)
    if isinstance(value, _TRACKED):
        found = kind(plain(value))
        return found if value.tracker.is_over else value.tracker.track(found, value.line)
    return kind(value, *args)


def _float(*args: Any) -> Any:
    return _converted(float, *args) if args else 0.0


def _int(*args: Any, **kwargs: Any) -> Any:
    return _converted(int, *args) if args and not kwargs else int(*args, **kwargs)


_HELPERS = {"__captured_float__": _float, "__captured_int__": _int}


def patched(code: CodeType) -> CodeType:
    """Replaces calls of ``float`` and ``int`` in a code object and in functions within it.

    Before Python 3.11, nothing is replaced: the instruction that reads a global does not show whether it is
    called.
    """
    if sys.version_info < (3, 11):
        return code
    bytes_, names = bytearray(code.co_code), list(code.co_names)
    for item in dis.get_instructions(code):
        if item.opname == "LOAD_GLOBAL" and item.argval in _NAMES and (item.arg or 0) & 1:
            name = _NAMES[item.argval]
            if name not in names:
                names.append(name)
            place = names.index(name) << 1 | 1
            if place > 0xFF or (item.arg or 0) > 0xFF:  # larger arguments would need another instruction
                return code
            bytes_[item.offset + 1] = place
    consts = tuple(patched(item) if isinstance(item, CodeType) else item for item in code.co_consts)
    is_changed = any(new is not old for new, old in zip(consts, code.co_consts, strict=True))
    if not is_changed and len(names) == len(code.co_names):
        return code
    return code.replace(co_code=bytes(bytes_), co_names=tuple(names), co_consts=consts)


class Callers:
    """The user's functions that called ``float`` or ``int`` on a tensor, and the callers of these functions.

    Args:
        step: the step.
    """

    def __init__(self, step: Any) -> None:
        self._step = getattr(step, "__func__", step)
        self._functions: dict[int, FunctionType] = {}
        self._codes: set[CodeType] = set()

    def add(self, frame: FrameType | None) -> None:
        """Adds the user's functions among a frame and its callers."""
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("fastsparse_core.cap"):
            if is_of_user(frame) and frame.f_code not in self._codes:
                self._codes.add(frame.f_code)
                for function in _functions_of(frame, self._step):
                    self._functions[id(function)] = function
            frame = frame.f_back

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Context in which calls of ``float`` and ``int`` in these functions are replaced."""
        changed = []
        try:
            for function in self._functions.values():
                before = function.__code__
                after = patched(before)
                if after is not before and _NAMES.keys().isdisjoint(function.__globals__):
                    changed.append((function, before, after))
                    # The helpers are never removed: another thread may run patched code, or a generator may
                    # continue later.
                    function.__globals__.update(_HELPERS)
                    function.__code__ = after
            yield
        finally:
            for function, before, after in changed:
                if function.__code__ is after:
                    function.__code__ = before


def _functions_of(frame: FrameType, step: Any) -> list[FunctionType]:
    """The functions whose code a frame runs, as far as they can be found."""
    code, around = frame.f_code, frame.f_back
    owner = type(frame.f_locals.get("self"))
    near = [step, frame.f_globals.get(code.co_name), getattr(owner, code.co_name, None)]
    near += around.f_locals.values() if around is not None else ()
    # Looking through all objects takes up to a tenth of a second.
    return _with_code(code, near) or _with_code(code, gc.get_referrers(code))


def _with_code(code: CodeType, candidates: list[Any]) -> list[FunctionType]:
    found = [inspect.unwrap(item) for item in candidates if isinstance(item, FunctionType)]
    return [item for item in found if isinstance(item, FunctionType) and item.__code__ is code]
