"""Modules that are imported when a script first uses them.

``fastsparse run`` imports FastSparse into every script. Features that few scripts use would take a third of
that time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

#: Module -> modules of plugins that it imports.
_extensions: dict[str, list[str]] = {}


def lazy_name(package: str, modules: Mapping[str, str], name: str) -> Any:
    """Imports the value of a name, for a package's ``__getattr__``, and stores it in the package.

    Args:
        package: name of the package.
        modules: name -> the module that defines it, or the module itself if its name ends with this name.
        name: a key of ``modules``.

    Returns:
        The value.
    """
    module = importlib.import_module(modules[name])
    value = module if modules[name].endswith(f".{name}") else getattr(module, name)
    setattr(sys.modules[package], name, value)
    return value


def extend(module: str, extension: str) -> None:
    """Imports a plugin's module together with a module of the core, or now if the core's is imported.

    Args:
        module: the core's module; it must call :func:`import_extensions` at its end.
        extension: the plugin's module.
    """
    _extensions.setdefault(module, []).append(extension)
    if module in sys.modules:
        importlib.import_module(extension)


def import_extensions(module: str) -> None:
    """Imports the modules that :func:`extend` was given for a module of the core."""
    for extension in tuple(_extensions.get(module, ())):
        importlib.import_module(extension)
