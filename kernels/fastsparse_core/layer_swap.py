"""Replaces the layers of an existing model by drop-ins, in place and reversibly, for both plugins.

A drop-in is a subclass of the original layer without additional state, so only the class of the layer object
changes. Parameters, buffers, hooks, attributes and references to the object stay the same.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.fx import Proxy
from torch.nn import Module

from fastsparse_core import log
from fastsparse_core.call_report import inside, is_recording, record
from fastsparse_core.fallback import Reason, listening

_is_compiling = torch.compiler.is_compiling
_is_tracing = torch._C._is_tracing

#: Original class -> drop-in class.
DropIns = Mapping[type[Module], type[Module]]

#: Names that a class body may define without changing the behaviour of a constructed layer.
_WITHOUT_EFFECT = frozenset(
    {
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__conditional_annotations__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__init__",
        "__module__",
        "__qualname__",
        "__static_attributes__",
        "__weakref__",
    }
)

#: Classes that `any_layer` makes store the class that they replace in an attribute with this name.
REPLACED = "_original"

#: A layer whose class was a subclass of the original stores this subclass in an attribute with this name.
_SUBCLASS = "_replaced_class"


@dataclass(frozen=True)
class Row:
    """The result of :func:`accelerate` for one layer.

    Attributes:
        paths: names of the layer in the model, several if the layer is shared; "" is the model itself.
        original: name of the layer's class before the call.
        drop_in: name of the layer's class after the call if this is a drop-in, else "".
        reason: why the layer was not changed; "" if it was changed.
        kernel: name of the kernel or plan that computes the layer now, if the plugin reports it.

    Example:
        >>> from fastsparse_core.layer_swap import Row
        >>> Row(("conv1",), "GCNConv", "FastGCNConv", reason="").paths
        ('conv1',)
    """

    paths: tuple[str, ...]
    original: str
    drop_in: str
    reason: str
    kernel: str = ""


@dataclass(frozen=True)
class Report:
    """The result of :func:`accelerate`; ``print`` shows it as a table.

    Attributes:
        rows: one row per graph layer, in the order of the model.

    Example:
        >>> from fastsparse_core.layer_swap import Report, Row
        >>> Report((Row(("conv1",), "GCNConv", "FastGCNConv", reason=""),))
        Report(1 of 1 graph layers swapped)
    """

    rows: tuple[Row, ...]

    @property
    def swapped(self) -> tuple[Row, ...]:
        """The layers that were changed."""
        return tuple(row for row in self.rows if not row.reason)

    @property
    def left(self) -> tuple[Row, ...]:
        """The layers that were not changed, including layers that were drop-ins before."""
        return tuple(row for row in self.rows if row.reason)

    def __str__(self) -> str:
        from rich.table import Table
        from rich.text import Text

        if not self.rows:
            return "no graph layers found"
        table = Table(caption=f"{len(self.swapped)} of {len(self.rows)} graph layers swapped")
        with_kernel = any(row.kernel for row in self.rows)
        for title in ("layer", "class", "now", *(("by",) if with_kernel else ())):
            table.add_column(title, overflow="fold")
        for row in self.rows:
            now = row.drop_in if not row.reason else f"unchanged: {row.reason}"
            paths = ", ".join(path or "(the model)" for path in row.paths)
            cells = (paths, row.original, now, *((row.kernel,) if with_kernel else ()))
            table.add_row(*(Text(cell) for cell in cells))
        return log.table_text(table)

    def __repr__(self) -> str:
        return f"Report({len(self.swapped)} of {len(self.rows)} graph layers swapped)"


def accelerate(
    model: Module,
    drop_ins: DropIns,
    *,
    is_graph_layer: Callable[[Module], bool],
    why_not: Callable[[Module, type[Module]], str],
    is_generated: Callable[[type, str], bool] = lambda klass, name: False,
    any_layer: Callable[[Module], type[Module] | str] | None = None,
    kernel: Callable[[Module], str] = lambda module: "",
) -> Report:
    """Replaces every layer of ``model`` by its drop-in; a second call changes nothing.

    A layer is replaced if its class is an original, or a subclass that defines only a constructor. Subclasses
    with other methods are not replaced, because the drop-in might not call these methods.

    Args:
        model: any module, also a single layer.
        drop_ins: original class -> drop-in class.
        is_graph_layer: function that returns True for a layer that the report lists even without a drop-in.
        why_not: function that tells why a drop-in would run the original's code for all inputs; "" if it
            would not.
        is_generated: function of a class and a name; True if the framework added the name at run time.
        any_layer: function for a graph layer that no drop-in replaces: returns a subclass of the layer's
            class that replaces it, or the reason why there is none.
        kernel: function that names the kernel that computes a replaced layer, for the report.

    Raises:
        TypeError: ``model`` is not a module.
    """
    rows: list[Row] = []
    for paths, module in _layers(model):
        original = _original(type(module), drop_ins)
        name = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            name = module.original_name
            if name in {klass.__name__ for klass in drop_ins}:
                rows.append(Row(paths, name, "", "torch.jit compiled it; call accelerate before torch.jit"))
            continue
        if original is None and not is_graph_layer(module):
            continue
        if _replaced_by(type(module)) or (original is not None and isinstance(module, drop_ins[original])):
            rows.append(Row(paths, name, name, "is a drop-in already", kernel(module)))
            continue
        reason = swap(module, drop_ins, why_not=why_not, is_generated=is_generated, any_layer=any_layer)
        now = "" if reason else type(module).__name__
        rows.append(Row(paths, name, now, reason, "" if reason else kernel(module)))
    if not rows:
        log.warn_once(
            f"model: expected a model with graph layers, but found none in {type(model).__name__}. "
            f"{log.NOT_FOUND}"
        )
    return Report(tuple(rows))


def swap(
    module: Module,
    drop_ins: DropIns,
    *,
    why_not: Callable[[Module, type[Module]], str],
    is_generated: Callable[[type, str], bool],
    any_layer: Callable[[Module], type[Module] | str] | None,
) -> str:
    """Replaces one graph layer by its drop-in; returns the reason if it was not replaced, else "".

    The arguments are those of :func:`accelerate`.
    """
    original = _original(type(module), drop_ins)
    reason = "has no drop-in"
    if original is not None:
        drop_in = drop_ins[original]
        reason = _why_left(module, original, is_generated) or why_not(module, drop_in)
        if not reason:
            _change_class(module, original, drop_in, to_drop_in=True)
    if reason and any_layer is not None:
        found = any_layer(module)
        if isinstance(found, str):
            return found
        module.__class__ = found
        return ""
    return reason


class FirstCalls:
    """Layers that become drop-ins when they are first called, for `enable()` of both plugins.

    The drop-ins are imported at the first call of any layer, because importing them takes as long as
    importing all other modules of a plugin.

    Args:
        framework: name of the framework in reports.
        module: name of the module that calls :meth:`define` when it is imported.

    Attributes:
        call: function that replaces the layers' `__call__`.
    """

    def __init__(self, framework: str, module: str) -> None:
        self._framework, self._module = framework, module
        self._drop_ins: DropIns = {}
        self._originals: dict[type[Module], type[Module]] = {}
        self._ours: tuple[type, ...] = ()
        self._containers: tuple[type, ...] = ()
        self._swapped: WeakSet[Module] = WeakSet()
        #: Layer that is not replaced -> the reason.
        self._left: WeakKeyDictionary[Module, str] = WeakKeyDictionary()

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            reason = ""
            if not isinstance(layer, self._ours) and not (_is_compiling() or _is_tracing()):
                reason = self.swap(layer)
            if is_recording() and not (_is_compiling() or _is_tracing()):
                return self._recorded(layer, reason, args, kwargs)
            return Module.__call__(layer, *args, **kwargs)

        self.call = call

    def define(
        self,
        drop_ins: DropIns,
        ours: tuple[type, ...],
        kernel: Callable[[Any], str],
        rules: Mapping[str, Any],
        containers: tuple[type, ...] = (),
    ) -> None:
        """Sets the drop-ins and the rules by which layers are replaced.

        Args:
            drop_ins: original class -> drop-in class.
            ours: classes of layers that are not replaced, because FastSparse defines them.
            kernel: function that names the kernel that computes a drop-in, for reports.
            rules: the other arguments of :func:`swap`.
            containers: classes of layers whose inner layers compute everything. Reports count these inner
                layers, so ``kernel`` returns "" for a container.
        """
        self._drop_ins, self._kernel, self._rules = drop_ins, kernel, rules
        self._originals = {drop_in: original for original, drop_in in drop_ins.items()}
        self._ours, self._containers = ours, containers

    def swap(self, layer: Module) -> str:
        """Replaces a layer like :func:`accelerate`; returns the reason if it was not replaced, else ""."""
        if not self._ours:
            importlib.import_module(self._module)
            if isinstance(layer, self._ours):
                return ""
        reason = self._left.get(layer)
        if reason is None:
            reason = swap(layer, self._drop_ins, **self._rules)
            if reason:
                self._left[layer] = reason
            else:
                self._swapped.add(layer)
        return reason

    def _recorded(self, layer: Any, reason: str, args: Any, kwargs: Any) -> Any:
        """Calls a layer, and records in the report which implementation computed it."""
        reasons = [Reason(reason, "")] if reason else []
        if hasattr(type(layer), "forget_reasons"):
            type(layer).forget_reasons()
        name = self.original_class(layer).__name__
        is_container = isinstance(layer, self._containers)
        with listening(reasons.append), contextlib.nullcontext() if is_container else inside(name):
            out = Module.__call__(layer, *args, **kwargs)
        if isinstance(out, Proxy):  # a symbolic trace, such as PyG's `to_hetero`, computed nothing
            return out
        if reasons:
            record(name, self._framework, reasons[0].cause, reasons[0].cure)
        elif kernel := self._kernel(layer):
            record(name, kernel)
        return out

    def reduce_ex(self, original: Callable[..., Any], layer: Any, protocol: Any) -> Any:
        """Replaces the layers' `__reduce_ex__`: pickles and copies have the original class."""
        if layer not in self._swapped:
            return original(layer, protocol)
        second = self.as_original(layer)
        reduced: Any = second.__reduce_ex__(protocol)
        how, what, *rest = reduced
        if how is copyreg.__newobj__ and what == (type(second),):  # type: ignore[attr-defined]
            # pickle refuses `__newobj__` for an object of another class.
            return copyreg._reconstructor, (type(second), object, None), *rest  # type: ignore[attr-defined]
        return how, what, *rest

    def as_original(self, layer: Module) -> Module:
        """A second object of the original's class that shares the layer's parameters and buffers."""
        second = second_object(layer)
        restore_layer(second, self._originals)
        return second

    def original_class(self, layer: Module) -> type[Module]:
        """The class that a layer had before it became a drop-in."""
        klass = type(layer)
        return self._originals.get(klass) or _replaced_by(klass) or klass

    def forget(self, layer: Module, *, left: str = "") -> None:
        """Stops managing a layer, because :func:`accelerate` or :func:`restore` was called on it.

        Args:
            layer: the layer.
            left: reason why the layer's next call does not replace it; "": the next call may replace it.
        """
        self._swapped.discard(layer)
        self._left.pop(layer, None)
        if left:
            self._left[layer] = left

    def restore(self) -> None:
        """Restores the class of every layer that a call replaced."""
        for layer in list(self._swapped):
            restore_layer(layer, self._originals)
        self._swapped.clear()
        self._left.clear()


def no_such_name(package: str, name: str, layers: ModuleType, served_by: str) -> AttributeError:
    """Makes the error for a name that a plugin does not have.

    Args:
        package: name of the plugin.
        name: the name that the plugin does not have.
        layers: the framework's module of layers.
        served_by: beginning of a sentence that says how FastSparse speeds up a layer without a drop-in.
    """
    message = f"module {package!r} has no attribute {name!r}"
    layer = name.removeprefix("Fast")
    if layer != name and layer in vars(layers):
        message += f". {layer} has no drop-in; {served_by} {layer}"
    return AttributeError(message)


def second_object(layer: Module) -> Module:
    """A second object of a layer's class that shares the layer's parameters and buffers."""
    second = object.__new__(type(layer))
    second.__dict__ = {
        name: copy.copy(value) if type(value) is dict else value for name, value in vars(layer).items()
    }
    return second


def restore(model: Module, drop_ins: DropIns) -> None:
    """Replaces every drop-in of ``model`` by its original, also layers that were created as drop-ins.

    Args:
        model: any module, also a single layer.
        drop_ins: original class -> drop-in class.

    Raises:
        TypeError: ``model`` is not a module.
    """
    originals = {drop_in: original for original, drop_in in drop_ins.items()}
    for _, module in _layers(model):
        restore_layer(module, originals)


def restore_layer(module: Module, originals: DropIns) -> None:
    """Replaces one drop-in by its original.

    Args:
        module: any module; nothing happens if it is not a drop-in.
        originals: drop-in class -> original class.
    """
    drop_in = type(module)
    if drop_in in originals:
        _change_class(module, originals[drop_in], drop_in, to_drop_in=False)
    elif replaced := _replaced_by(drop_in):
        module.__class__ = replaced


def _replaced_by(klass: type) -> type[Module] | None:
    """The class that ``klass`` replaces, if `any_layer` made ``klass``; else None."""
    return vars(klass).get(REPLACED)


def _layers(model: Module) -> Iterator[tuple[tuple[str, ...], Module]]:
    """Yields every module of a model once, with all its names in the model."""
    if not isinstance(model, Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    found: dict[int, tuple[list[str], Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), ([], module))[0].append(path)
    for paths, module in found.values():
        yield tuple(paths), module


def _original(klass: type, drop_ins: DropIns) -> type[Module] | None:
    return next((original for original in drop_ins if issubclass(klass, original)), None)


def _why_left(module: Module, original: type[Module], is_generated: Callable[[type, str], bool]) -> str:
    """The reason why a layer cannot be replaced because of its class or attributes; "" if it can be."""
    ancestors = type(module).__mro__
    position = ancestors.index(original)
    own = {
        name: None
        for klass in ancestors[:position]
        for name in vars(klass)
        if name not in _WITHOUT_EFFECT and not is_generated(klass, name)
    }
    if own:
        return f"a subclass of {original.__name__} with its own {', '.join(own)}"
    if ancestors[position:] != original.__mro__:
        return f"a subclass of {original.__name__} with other bases"
    if "forward" in vars(module):
        return "forward is replaced on the instance"
    return ""


def _change_class(module: Module, original: type[Module], drop_in: type[Module], *, to_drop_in: bool) -> None:
    """Changes the class of a layer, and converts attributes that the drop-in stores in another form."""
    moved = [name for name in _stand_ins(drop_in, original) if not to_drop_in or name in vars(module)]
    values = {name: getattr(module, name) for name in moved}
    for name in moved:
        delattr(module, name)
    if to_drop_in:
        if type(module) is not original:
            setattr(module, _SUBCLASS, type(module))
        module.__class__ = drop_in
    else:
        module.__class__ = vars(module).pop(_SUBCLASS, original)
    for name, value in values.items():
        setattr(module, name, value)


def _stand_ins(drop_in: type, original: type) -> list[str]:
    """Names of the original's attributes for which the drop-in has descriptors."""

    def is_stand_in(name: str, item: Any) -> bool:
        # Python itself puts descriptors of __dict__ and __weakref__ into classes.
        return hasattr(item, "__delete__") and not isinstance(item, property) and not name.startswith("__")

    own = drop_in.__mro__[: drop_in.__mro__.index(original)]
    return [name for klass in own for name, item in vars(klass).items() if is_stand_in(name, item)]
