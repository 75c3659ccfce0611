"""The arguments of a layer's methods. An argument is gathered per edge only if a method uses it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv import MessagePassing

from fastsparse_core import Adjacency
from fastsparse_core.message_plans.ends import EdgeEnd, gather
from fastsparse_core.ops._edge_rows import lift
from fastsparse_pyg.nn.segments import NodeIndex

EMPTY: Any = inspect.Parameter.empty


class Signature(NamedTuple):
    """Names of the arguments of a class's methods.

    Attributes:
        lifted: arguments of `message`, `aggregate` and `update` that are gathered per edge: (name, name
            without ``_i`` or ``_j``, True if the suffix is ``_i``).
        message: arguments of `message`.
        traced: for `message`, `edge_update` and `aggregate`, the arguments that the caller passes to
            `propagate`.
        aggregate: arguments of `aggregate`.
        update: arguments of `update`.
        edge_update: arguments of `edge_update`.
        edge_lifted: like ``lifted``, for `edge_update`.
        defaults: default values of all arguments.
    """

    lifted: tuple[tuple[str, str, bool], ...]
    message: tuple[str, ...]
    traced: dict[str, tuple[str, ...]]
    aggregate: tuple[str, ...]
    update: tuple[str, ...]
    edge_update: tuple[str, ...]
    edge_lifted: tuple[tuple[str, str, bool], ...]
    defaults: dict[str, Any]

    @classmethod
    def of(cls, layer: MessagePassing) -> Signature:
        """The signature of a layer's class."""
        special, inspector = layer.special_args, layer.inspector

        def parameters(method: str) -> dict[str, Any]:
            return inspector.get_param_dict(method) if method in inspector._signature_dict else {}

        def lifted(*methods: str) -> tuple[tuple[str, str, bool], ...]:
            names = dict.fromkeys(name for method in methods for name in parameters(method))
            return tuple(
                (name, name[:-2], name.endswith("_i"))
                for name in names
                if name not in special and name[-2:] in ("_i", "_j")
            )

        methods = ("message", "aggregate", "update", "edge_update")
        each = {method: tuple(parameters(method)) for method in methods}
        defaults = {
            name: parameter.default
            for method in methods
            for name, parameter in parameters(method).items()
            if parameter.default is not EMPTY
        }
        return cls(
            lifted("message", "aggregate", "update"),
            each["message"],
            {
                method: tuple(name for name in each[method] if name not in special)
                for method in ("message", "edge_update", "aggregate")
            },
            each["aggregate"],
            each["update"],
            each["edge_update"],
            lifted("edge_update"),
            defaults,
        )


class Arguments(dict[str, Any]):
    """Arguments by name; an argument is gathered per edge at its first access.

    Attributes:
        node_dim: dimension of the features along which the nodes are.
        nodes: name of a gathered argument, such as ``x_j`` -> (features of the nodes, True if they are
            gathered at the destinations).
        dst: the edges' destinations.
        src: the edges' sources.
        special: arguments that `MessagePassing` itself provides, such as ``size_i``.
    """

    def __init__(
        self,
        node_dim: int,
        nodes: dict[str, tuple[Any, bool]],
        given: dict[str, Any],
        defaults: dict[str, Any],
        dst: EdgeEnd,
        src: EdgeEnd,
        special: dict[str, Any],
    ) -> None:
        super().__init__()
        self.node_dim, self._given, self._defaults = node_dim, given, defaults
        self.nodes, self.dst, self.src, self.special = nodes, dst, src, special

    def is_none(self, name: str) -> bool:
        """True if an argument of the caller is None."""
        return (self.nodes[name][0] if name in self.nodes else self.given(name)) is None

    def is_given(self, name: str) -> bool:
        """True if the caller passed an argument of this name to `propagate`."""
        return name in self._given

    def given(self, name: str) -> Any:
        """Returns an argument of the caller that is not gathered per edge, or its default value."""
        return self._given.get(name, self._defaults.get(name, EMPTY))

    def placed(self, name: str) -> tuple[Any, str]:
        """Returns an argument before the gather, and the kind of its rows: "dst", "src", "edge" or ""."""
        if name in self.nodes:
            value, at_dst = self.nodes[name]
            return value, "dst" if at_dst else "src"
        value = self.given(name)
        is_of_edges = isinstance(value, Tensor) and value.shape[:1] == (self.dst.num_edges,)
        return value, "edge" if is_of_edges else ""

    def lift(self, names: Iterable[str]) -> None:
        """Gathers the named arguments that require gradients, with one autograd node for all of them."""
        if not torch.is_grad_enabled():
            return
        wanted = [name for name in names if name in self.nodes and name not in self]
        if len(wanted) < 2:
            return
        found: list[tuple[str, Tensor, EdgeEnd]] = []
        for name in wanted:
            value, at_dst = self.nodes[name]
            if isinstance(value, Tensor) and value.requires_grad and self.node_dim in (0, -value.dim()):
                found.append((name, value, self.dst if at_dst else self.src))
        if len(found) > 1:
            names, values, ends = zip(*found, strict=True)
            self.update(zip(names, lift(values, ends), strict=True))

    def __missing__(self, name: str) -> Any:
        if name in self.nodes:
            value, at_dst = self.nodes[name]
            if isinstance(value, Tensor):
                value = gather(value, self.dst if at_dst else self.src, self.node_dim)
        elif name in ("index", "edge_index_i"):
            value = NodeIndex.of(self.dst)
        elif name == "edge_index_j":
            value = NodeIndex.of(self.src)
        elif name in self.special:
            value = self.special[name]
        else:
            value = self._given.get(name, EMPTY)
        if value is EMPTY:
            if name not in self._defaults:
                raise TypeError(f"Required parameter '{name}' is empty.")
            value = self._defaults[name]
        self[name] = value
        return value


class KnownCall:
    """The edges and arguments of a call whose plan is known.

    Most plans read only the structure, so the other arguments are collected when they are first read.

    Attributes:
        special: like the attribute of :class:`Arguments`, but only with the structure.
    """

    __slots__ = ("_all", "_collect", "special")

    def __init__(self, adj: Adjacency, collect: Callable[[], Arguments]) -> None:
        self.special: dict[str, Any] = {"adj": adj}
        self._collect = collect
        self._all: Arguments | None = None

    def _arguments(self) -> Arguments:
        if self._all is None:
            self._all = self._collect()
        return self._all

    @property
    def dst(self) -> EdgeEnd:
        """The edges' destinations."""
        return self._arguments().dst

    @property
    def src(self) -> EdgeEnd:
        """The edges' sources."""
        return self._arguments().src

    def placed(self, name: str) -> tuple[Any, str]:
        """Returns :meth:`Arguments.placed`."""
        return self._arguments().placed(name)

    def __getitem__(self, name: str) -> Any:
        return self._arguments()[name]


def pointer(edge_index: Any, i: int) -> Tensor | None:
    """Returns PyG's argument `ptr`: the pointers of an EdgeIndex sorted by destination; otherwise None."""
    if isinstance(edge_index, EdgeIndex):
        if i == 0 and edge_index.is_sorted_by_row:
            return edge_index.get_csr()[0][0]
        if i == 1 and edge_index.is_sorted_by_col:
            return edge_index.get_csc()[0][0]
    return None
