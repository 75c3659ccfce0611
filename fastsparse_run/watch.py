"""Calls functions when packages are imported, and provides modules for packages that are missing."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Environment variable ``package=module:function;...``: the function is called after the package's import.
VARIABLE = "FASTSPARSE_RUN"
#: Environment variable with the id of the process that `fastsparse run` started as the script.
MAIN_PROCESS = "FASTSPARSE_RUN_PID"
#: Environment variable: "1" prints a report; "time" also measures times.
REPORT = "FASTSPARSE_REPORT"
REPORT_FILE = "FASTSPARSE_REPORT_JSON"
_NO_CALL = (
    "No call of a function that FastSparse replaces finished. If a module gathers and scatters by hand, "
    "call fastsparse_pyg.accelerate(model)."
)


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds a package by the other finders, and calls the registered functions after its import."""

    def __init__(self) -> None:
        self.after: dict[str, list[Callable[[], Any]]] = {}
        self.instead: dict[str, Callable[[], Any]] = {}
        self._running: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not (name in self.after or name in self.instead) or name in self._running:
            return None
        is_nested = bool(self._running)
        self._running.append(name)
        try:
            spec = importlib.util.find_spec(name)
            if spec is None and is_nested:
                return None  # a package that checks which other packages exist
            if spec is None:
                _call(name, self.after.pop(name, ()))
                if name in self.instead:
                    return ModuleSpec(name, _StandIn(self.instead[name], self._running))
                return None
        finally:
            self._running.remove(name)
        if spec.loader is not None and name in self.after:
            spec.loader = _Then(spec.loader, self.after.pop(name), self._running)
        return spec


class _Then(importlib.abc.Loader):
    """A loader that calls functions after the module has been executed."""

    def __init__(self, loader: Any, actions: list[Callable[[], Any]], running: list[str]) -> None:
        self._loader, self._actions, self._running = loader, actions, running

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._running.append(module.__name__)
        try:
            self._loader.exec_module(module)
        finally:
            self._running.remove(module.__name__)
        _call(module.__name__, self._actions)


class _StandIn(importlib.abc.Loader):
    """A loader for a missing module. It calls a function that puts another module into ``sys.modules``."""

    def __init__(self, action: Callable[[], Any], running: list[str]) -> None:
        self._action, self._running = action, running

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        del sys.modules[module.__name__]
        self._running.append(module.__name__)
        try:
            self._action()
        finally:
            self._running.remove(module.__name__)


_watcher = _Watcher()


def after_import(package: str, action: Callable[[], Any]) -> None:
    """Calls a function once after a package is imported; immediately if it was imported already.

    If an import finds that the package is not installed, the function is called too, before the import fails.
    If the function raises an error, a line on stderr says so, and the import continues.

    Args:
        package: name of the package.
        action: the function, without arguments.

    Example:
        >>> from fastsparse_run.watch import after_import
        >>> after_import("json", lambda: print("json is there"))
        json is there
    """
    if package in sys.modules:
        _call(package, [action])
    else:
        _watcher.after.setdefault(package, []).append(action)
        _watch()


def in_place_of(package: str, action: Callable[[], Any]) -> None:
    """Calls a function when a missing package is imported.

    Args:
        package: name of the package.
        action: the function, without arguments. It must put a module of this name into ``sys.modules``.

    Example:
        >>> import sys, types
        >>> from fastsparse_run.watch import forget, in_place_of
        >>> def stand_in():
        ...     sys.modules["not_installed"] = types.ModuleType("not_installed")
        >>> in_place_of("not_installed", stand_in)
        >>> import not_installed
        >>> forget("not_installed")
    """
    _watcher.instead[package] = action
    _watch()


def forget(package: str) -> None:
    """Undoes :func:`in_place_of`.

    Args:
        package: name of the package.

    Example:
        >>> from fastsparse_run.watch import forget, in_place_of
        >>> in_place_of("not_installed", lambda: None)
        >>> forget("not_installed")
    """
    _watcher.instead.pop(package, None)
    if not (_watcher.after or _watcher.instead) and _watcher in sys.meta_path:
        sys.meta_path.remove(_watcher)


def is_installed(package: str) -> bool:
    """True if the package can be imported and :func:`in_place_of` does not provide it.

    Args:
        package: name of the package.

    Example:
        >>> from fastsparse_run.watch import forget, in_place_of, is_installed
        >>> in_place_of("not_installed", lambda: None)
        >>> is_installed("not_installed"), is_installed("json")
        (False, True)
        >>> forget("not_installed")
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and not isinstance(spec.loader, _StandIn)


def start(actions: str) -> None:
    """Registers the functions that a value of :data:`VARIABLE` lists, and the report if it was requested."""
    for each in filter(None, actions.split(";")):
        package, _, place = each.partition("=")
        action = _Named(place)
        after_import(package, action)
        if action.root != package:
            after_import(action.root, action.call_if_due)
    if os.environ.get(REPORT) or os.environ.get(REPORT_FILE):
        start = "start_timing" if os.environ.get(REPORT) == "time" else "start_recording"
        after_import("fastsparse_core", _Named(f"fastsparse_core.call_report:{start}").call)
        atexit.register(_report)


def _watch() -> None:
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)


class _Named:
    """A registered function, which is imported when it is called."""

    def __init__(self, place: str) -> None:
        self._module, _, self._name = place.partition(":")
        self.root = self._module.partition(".")[0]
        self._is_due = False

    def __call__(self) -> None:
        spec = getattr(sys.modules.get(self.root), "__spec__", None)
        # The script imports the plugin, which imports the package.
        if getattr(spec, "_initializing", False):
            self._is_due = True
        else:
            self.call()

    def call_if_due(self) -> None:
        """Calls the function if the package was imported while the plugin was still being imported."""
        if self._is_due:
            self._is_due = False
            self.call()

    def call(self) -> None:
        """Imports the function and calls it."""
        getattr(importlib.import_module(self._module), self._name)()


def _call(package: str, actions: Sequence[Callable[[], Any]]) -> None:
    for action in actions:
        try:
            action()
        except Exception as error:
            print(f"fastsparse: {package} runs unchanged: {type(error).__name__}: {error}", file=sys.stderr)


def _report() -> None:
    """Prints the report in the process of `fastsparse run`, and in the process of rank 0 that it started."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return
    if os.environ.get(MAIN_PROCESS) != str(os.getpid()) and os.environ.get("RANK") != "0":
        return
    core = sys.modules.get("fastsparse_core")
    if core is None:
        print(
            "fastsparse: no report, because FastSparse was not loaded. Usual cause: the script does not "
            "import PyTorch",
            file=sys.stderr,
        )
        return
    found = core.report()
    if os.environ.get(REPORT):
        print(found if found.rows else _NO_CALL, file=sys.stderr)
    if path := os.environ.get(REPORT_FILE):
        with open(path, "w", encoding="utf-8") as file:
            file.write(found.to_json())
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        # Python exits as after Ctrl-C (130 in a shell) if the code that it ran last from a string was
        # interrupted. Printing the table has run other code from strings.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
