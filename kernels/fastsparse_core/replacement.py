"""Replaces functions and classes of another package, reversibly, for `enable()` of both plugins.

A plugin has a table of :class:`Hook`. Each is checked for its parameters before anything is replaced, so that
a package that changed them is refused as a whole, and none is half replaced.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fastsparse_core.log import warn_of_user

#: Owner, name of its attribute, and previous value; :data:`ABSENT` if it had no attribute of its own.
Change = tuple[Any, str, Any]
ABSENT = object()
#: Parts of `enable()` that stay off, separated by commas.
DISABLE_VARIABLE = "FASTSPARSE_DISABLE"
#: All parts, of both plugins.
PARTS = ("layers", "scatter", "pool", "loaders", "sparse_mm", "shims", "dgl")


@dataclass(frozen=True)
class Hook:
    """One replacement.

    Attributes:
        place: module, or module and class with a colon between.
        name: of a function or class there.
        parameters: names of its parameters; None where they do not matter.
        function: what takes its place; called with the original first if ``wraps``.
        wraps: whether it needs the original.
        holders: given the name of a module, whether names of the same object are replaced there too; None:
            in `place` alone.
    """

    place: str
    name: str
    parameters: str | None
    function: Callable[..., Any]
    wraps: bool = False
    holders: Callable[[str], bool] | None = None

    @property
    def title(self) -> str:
        """As an error calls it."""
        return f"{self.place.replace(':', '.')}.{self.name}"

    def owner(self) -> Any:
        """The module or class that has the name."""
        module, _, owner = self.place.partition(":")
        found = importlib.import_module(module)
        return getattr(found, owner) if owner else found


def problems(hooks: Iterable[Hook]) -> list[str]:
    """What the installed package has otherwise than the hooks expect, one sentence each."""
    return [problem for hook in hooks for problem in _problem(hook)]


def _problem(hook: Hook) -> list[str]:
    try:
        found = getattr(hook.owner(), hook.name)
    except (ImportError, AttributeError):
        return [f"{hook.title} does not exist"]
    if hook.parameters is None:
        return []
    try:
        parameters = ", ".join(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return [f"{hook.title} has no signature"]
    return (
        []
        if parameters == hook.parameters
        else [f"{hook.title} takes ({parameters}), not ({hook.parameters})"]
    )


def install(hooks: Iterable[Hook]) -> list[Change]:
    """Replaces everything; returns what :func:`remove` needs."""
    hooks = list(hooks)
    originals = [getattr(hook.owner(), hook.name) for hook in hooks]
    places = _references([each for each, hook in zip(originals, hooks, strict=True) if hook.holders])
    done: list[Change] = []
    for hook, original in zip(hooks, originals, strict=True):
        new = _around(hook.function, original) if hook.wraps else hook.function
        if hook.holders is None:
            done.append(replace(hook.owner(), hook.name, new))
        else:
            for module, name in places[id(original)]:
                if hook.holders(module.__name__):
                    done.append(replace(module, name, new))
    return done


def replace(owner: Any, name: str, new: Any) -> Change:
    """Sets an attribute; returns what :func:`remove` needs."""
    change = owner, name, vars(owner).get(name, ABSENT)
    setattr(owner, name, new)
    return change


def _references(objects: list[Any]) -> dict[int, list[tuple[ModuleType, str]]]:
    """Every name of each object in the modules that are loaded, by the object's `id`."""
    found: dict[int, list[tuple[ModuleType, str]]] = {id(each): [] for each in objects}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, item in list(vars(module).items()):
                if id(item) in found:
                    found[id(item)].append((module, name))
    return found


def _around(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """What takes the original's place: a function's own `bind` makes it, if it has one."""
    bind = getattr(function, "bind", None)
    if bind is not None:
        replaced = bind(function, original)
    else:

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

    # With these, torch.jit.script compiles the original.
    replaced.__script_if_tracing_wrapper = True
    replaced.__original_fn = original
    return replaced


def remove(done: list[Change]) -> None:
    """Puts everything back that still is what it was replaced by or with."""
    for owner, name, own in reversed(done):
        if own is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
    done.clear()


def enabled_parts(parts: Iterable[str]) -> list[str]:
    """The parts that the environment variable does not switch off; warns of names that do not exist."""
    off = {each.strip() for each in os.environ.get(DISABLE_VARIABLE, "").split(",")}
    if unknown := sorted(off.difference(PARTS, {""})):
        names = ", ".join(map(repr, unknown))
        warn_of_user(f"{DISABLE_VARIABLE}: expected some of {', '.join(PARTS)}, got {names}")
    return [part for part in parts if part not in off]
