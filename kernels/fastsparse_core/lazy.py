"""Modules that are imported when a script first uses them.

``fastsparse run`` imports FastSparse into every script. If that import also loaded the modules that few
scripts use, they would take a third of its time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

#: Module of the core -> modules of plugins that it imports at its end.
_extensions: dict[str, list[str]] = {}


def lazy_name(package: str, modules: Mapping[str, str], name: str) -> Any:
    """Imports the value of a name, for a package's ``__getattr__``, and stores it in the package.

    Args:
        package: name of the package.
        modules: name -> the module that defines the name. If the module's own name ends with the name, the
            value is the module.
        name: a key of ``modules``.

    Returns:
        The value.
    """
    module = importlib.import_module(modules[name])
    value = module if modules[name].endswith(f".{name}") else getattr(module, name)
    setattr(sys.modules[package], name, value)
    return value


def extend(module: str, extension: str) -> None:
    """Imports a plugin's module as soon as a module of the core is imported; now if it is imported already.

    Args:
        module: name of the core's module, which must call :func:`import_extensions` at its end.
        extension: name of the plugin's module.
    """
    _extensions.setdefault(module, []).append(extension)
    if module in sys.modules:
        importlib.import_module(extension)


def import_extensions(module: str) -> None:
    """Imports the modules that calls of :func:`extend` registered for a module of the core."""
    for extension in tuple(_extensions.get(module, ())):
        importlib.import_module(extension)
