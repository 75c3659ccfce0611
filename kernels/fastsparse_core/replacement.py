"""Replaces functions and classes of another package, reversibly, for `enable()` of both plugins.

A plugin has a table of hooks (:class:`Hook`). A plugin first checks all hooks with :func:`problems`. If the
package has changed the parameters of one function, the plugin replaces nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from fastsparse_core.log import warn_of_user

#: Owner, name of an attribute, and the attribute's previous value; :data:`ABSENT` if the owner itself did not
#: define the attribute.
Change = tuple[Any, str, Any]
ABSENT = object()
#: Environment variable with the parts of `enable()` that stay off, separated by commas.
DISABLE_VARIABLE = "FASTSPARSE_DISABLE"
#: All parts of `enable()` of both plugins.
PARTS = ("layers", "scatter", "pool", "loaders", "sparse_mm", "shims", "dgl")


@dataclass(frozen=True)
class Hook:
    """One replacement.

    Attributes:
        place: module, or ``module:class``.
        name: name of a function or class in ``place``.
        parameters: names of the function's parameters, separated by commas; None: they are not checked.
        function: the replacement; if ``wraps``, it is called with the original as first argument.
        wraps: True if the replacement needs the original.
        holders: function of a module's name; True if all names of the same object in this module are
            replaced. None: only the name in `place` is replaced.
    """

    place: str
    name: str
    parameters: str | None
    function: Callable[..., Any]
    wraps: bool = False
    holders: Callable[[str], bool] | None = None

    @property
    def title(self) -> str:
        """Full name, for error messages."""
        return f"{self.place.replace(':', '.')}.{self.name}"

    def owner(self) -> Any:
        """The module or class whose attribute is replaced."""
        module, _, owner = self.place.partition(":")
        found = importlib.import_module(module)
        return getattr(found, owner) if owner else found


def problems(hooks: Iterable[Hook]) -> list[str]:
    """Differences between the installed package and the package that the hooks expect, one text each."""
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
    """Applies all hooks; returns the changes, for :func:`remove`."""
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
    """Sets an attribute; returns the change, for :func:`remove`."""
    change = owner, name, vars(owner).get(name, ABSENT)
    setattr(owner, name, new)
    return change


def _references(objects: list[Any]) -> dict[int, list[tuple[ModuleType, str]]]:
    """For the `id` of each object, all loaded modules with a name of the object, and the name."""
    found: dict[int, list[tuple[ModuleType, str]]] = {id(each): [] for each in objects}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, item in list(vars(module).items()):
                if id(item) in found:
                    found[id(item)].append((module, name))
    return found


def _around(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """The function that replaces the original; ``function.bind`` makes it if ``function`` has ``bind``."""
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


def original_of(function: Any) -> Any:
    """The function that ``function`` replaces, or ``function`` itself if it replaces none."""
    return vars(function).get("__original_fn", function) if isinstance(function, FunctionType) else function


def remove(done: list[Change]) -> None:
    """Undoes changes in reverse order, and empties the list."""
    for owner, name, own in reversed(done):
        if own is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
    done.clear()


def enabled_parts(parts: Iterable[str]) -> list[str]:
    """The parts that `DISABLE_VARIABLE` does not turn off; warns about unknown names in the variable."""
    off = {each.strip() for each in os.environ.get(DISABLE_VARIABLE, "").split(",")}
    if unknown := sorted(off.difference(PARTS, {""})):
        names = ", ".join(map(repr, unknown))
        warn_of_user(f"{DISABLE_VARIABLE}: expected some of {', '.join(PARTS)}, got {names}")
    return [part for part in parts if part not in off]
