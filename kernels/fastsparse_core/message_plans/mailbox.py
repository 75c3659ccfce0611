"""Plans for DGL's message and reduce functions, which are traced on symbols and planned together.

DGL calls a reduce function once per degree, with the messages of all nodes of that degree, (nodes, messages,
...). A plan has one row per edge instead. A reduction over the second dimension becomes a reduction over the
edges of every node, and later operators run once for all nodes that have edges.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Proxy

from fastsparse_core.message_plans import terms
from fastsparse_core.message_plans.plan import (
    _ACTIVATIONS,
    _EDGES,
    NoPlan,
    Plan,
    Planner,
    _is_per_edge,
    _is_plain,
    _leaves,
    _likeness,
    _mapped,
    _meta_of,
    _name_of,
    _Of,
    _Sum,
    _Whole,
    naming,
)
from fastsparse_core.message_plans.terms import Edges
from fastsparse_core.message_plans.trace import Untraceable

#: Number of nodes in the meta tensors from which shapes are inferred. Every dimension of this size counts as
#: the dimension of the nodes, so the number is one that other dimensions are unlikely to have.
_NODES = 999_983


# ---------------------------------------------------------------- symbolic arguments of functions


class Fields:
    """Symbols for the features of a batch, made when read first; ``is_writable`` allows assignments."""

    __slots__ = ("_is_writable", "_known", "_place", "_tracer", "written")

    def __init__(self, tracer: torch.fx.Tracer, place: str, is_writable: bool = False) -> None:
        set_ = object.__setattr__
        set_(self, "_tracer", tracer)
        set_(self, "_place", place)
        set_(self, "_is_writable", is_writable)
        set_(self, "_known", {})
        set_(self, "written", {})

    def __getitem__(self, name: Any) -> Proxy:
        if type(name) is not str:
            raise Untraceable(f"names a feature by {name!r}, which is not a string")
        known: dict[str, Proxy] = self._known
        if name not in known:
            known[name] = self._tracer.create_proxy("placeholder", f"{self._place}.{name}", (), {})
        return known[name]

    def __setitem__(self, name: Any, value: Any) -> None:
        if not self._is_writable or type(name) is not str or not isinstance(value, Proxy):
            raise Untraceable(f"writes into {self._place}")
        self._known[name] = self.written[name] = value

    def __contains__(self, name: Any) -> bool:
        raise Untraceable(f"checks whether there is a feature {name!r}")

    def __iter__(self) -> Any:
        raise Untraceable("lists the features")

    def __getattr__(self, name: str) -> Any:
        raise Untraceable(f"reads .{name} of features")

    def __setattr__(self, name: str, value: Any) -> None:
        raise Untraceable(f"writes .{name}")


class Batch:
    """Symbolic EdgeBatch or NodeBatch of DGL, which only has features."""

    __slots__ = ("data", "dst", "mailbox", "src")

    def __init__(self, **fields: Fields) -> None:
        for name, each in fields.items():
            object.__setattr__(self, name, each)

    def __getattr__(self, name: str) -> Any:
        raise Untraceable(f"reads .{name} of edges or nodes")

    def __setattr__(self, name: str, value: Any) -> None:
        raise Untraceable(f"writes .{name}")


def edge_batch(tracer: torch.fx.Tracer) -> Batch:
    """The symbolic argument of a message function."""
    return Batch(src=Fields(tracer, "src"), dst=Fields(tracer, "dst"), data=Fields(tracer, "edge", True))


def node_batch(tracer: torch.fx.Tracer) -> Batch:
    """The symbolic argument of a reduce function."""
    return Batch(data=Fields(tracer, "node"), mailbox=Fields(tracer, "mail"))


def results_of(graph: Graph) -> dict[str, Node]:
    """The named results of a traced function.

    Raises:
        Untraceable: the function does not return a dict of tensors.
    """
    found = list(graph.nodes)[-1].args[0]
    is_named = isinstance(found, Mapping) and all(
        isinstance(name, str) and isinstance(node, Node) for name, node in found.items()
    )
    if not is_named:
        raise Untraceable("does not return a dict of tensors")
    return dict(found)


# ---------------------------------------------------------------- plans


@dataclass(eq=False)
class _Mail:
    """Messages, (nodes, messages, ...), represented by a value per edge."""

    value: Any

    @property
    def dims(self) -> int:
        return len(self.value.row) + 2


@dataclass(eq=False)
class _Rows:
    """One row per destination.

    Attributes:
        meta: meta tensor with the dtype and shape of the rows.
        node: node of the plan's graph that computes the rows.
        of: "all": all destinations; "zero": all, with 0 for destinations without edges; "some": only
            destinations with edges.
    """

    meta: Tensor
    node: Any
    of: str


@dataclass(eq=False)
class _Extremum:
    """Result of `max` or `min` over messages: a pair of values and positions; only values are supported."""

    rows: _Rows


@dataclass(eq=False)
class _Shape:
    """Shape of messages, as the traced function reads it."""

    mail: _Mail


@dataclass(eq=False)
class _Degree:
    """Number of messages of every node, as the traced function reads it."""


#: Elementwise functions of one tensor and numbers.
_UNARY = (
    *("abs", "neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "pow", "sin"),
    *("cos", "tanh", "sigmoid", "relu", "elu", "gelu", "silu", "softplus", "leaky_relu", "logsigmoid"),
    *("clamp", "clamp_min", "clamp_max"),
)
#: Elementwise functions of two operands.
_BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum")
_REDUCTIONS = ("sum", "mean", "max", "min")


class MailboxPlanner(Planner):
    """Plans a message function, together with the reduce function that follows it."""

    def __init__(self, layer: Any, found: Edges, mixed: torch.dtype | None = None) -> None:
        super().__init__(layer, found, mixed)
        self.gains["no atomics"] = None
        self._read: frozenset[str] | None = None  # results of the message function that a reduction reads

    def plan_edges(self, trace: Graph, written: Mapping[str, Node]) -> Plan:
        """The plan whose result is (results, written features) of a message function."""
        values, out = self._walk(trace)
        self._check(out)
        kept = {name: self._at_edges(values[node]) for name, node in written.items()}
        plan = self._finished((({name: self._at_edges(x) for name, x in out.items()}, kept), {}))
        return self._with_dtypes(plan, trace, written, _dtypes)

    def plan_reduction(self, trace: Graph, written: Mapping[str, Node], field: str, how: str) -> Plan:
        """The plan of a message function whose result ``field`` is reduced."""
        self._read = frozenset((field,))
        values, out = self._walk(trace)
        self._check(out)
        kept = {name: self._at_edges(values[node]) for name, node in written.items()}
        plan = self._finished(((self._reduced(out[field], how), kept), {}))
        is_cast = self.found.special["adj"].device.type == "cuda"  # DGL's own sums are also cast on CUDA
        return self._with_dtypes(
            plan, trace, written, lambda messages: self.mixed if is_cast else messages[field].dtype
        )

    def plan_mailbox(self, trace: Graph, written: Mapping[str, Node], reduce_trace: Graph) -> Plan:
        """The plan of a message function and a reduce function; its result is (rows by name, written)."""
        targets = [str(node.target).partition(".") for node in reduce_trace.nodes if node.op == "placeholder"]
        self._read = frozenset(name for place, _, name in targets if place == "mail")
        values, out = self._walk(trace)
        self._check(out)
        kept = {name: self._at_edges(values[node]) for name, node in written.items()}
        self.gains["no groups by degree"] = None
        rows = {name: self._complete(x) for name, x in self._walk_mailbox(reduce_trace, out).items()}
        plan = self._finished(((rows, kept), {}))

        def of_rows(messages: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
            mail = {name: x.unsqueeze(1) for name, x in messages.items()}
            values = self.without_edges(reduce_trace, mail)
            return _dtypes({name: values[node] for name, node in results_of(reduce_trace).items()})

        return self._with_dtypes(plan, trace, written, of_rows)

    def _with_dtypes(
        self,
        plan: Plan,
        trace: Graph,
        written: Mapping[str, Node],
        of_messages: Callable[[Mapping[str, Tensor]], Any],
    ) -> Plan:
        """Adds the dtypes of the results under autocast to a plan."""
        if self.mixed is None:
            return plan
        values = self.without_edges(trace)
        found = of_messages({name: values[node] for name, node in results_of(trace).items()})
        kept = _dtypes({name: values[node] for name, node in written.items()})
        return plan._replace(dtypes=((found, kept), {}))

    def _num_uses(self, node: Node) -> int:
        uses = [user for user in node.users if user.op != "output"]
        for user in node.users.keys() - uses:
            names = [name for name, each in user.args[0].items() if each is node]  # type: ignore[union-attr]
            uses += [user] if self._read is None or not self._read.isdisjoint(names) else []
        return len(uses)

    def _reduced(self, value: Any, how: str) -> Node:
        if how in ("sum", "mean"):
            return super()._reduced(value, how)
        # If messages are equal, the first one gets the gradient. Kernels that store no messages do not know
        # which message is the first.
        return self.call(self.reduce, (self.layer_node, self.found_node, self._at_edges(value), how))

    @staticmethod
    def _check(out: Any) -> None:
        if not all(_is_per_edge(value) for value in out.values()):
            raise NoPlan("messages that do not have a row per edge")

    def _walk_mailbox(self, trace: Graph, messages: Mapping[str, Any]) -> Any:
        values: dict[Node, Any] = {}
        for node in trace.nodes:
            if node.op == "placeholder":
                place, _, name = str(node.target).partition(".")
                if place == "mail":
                    values[node] = _Mail(messages[name])
                elif place == "node":
                    values[node] = self._rows_given(str(node.target))
                else:
                    values[node] = self._argument(str(node.target))
            elif node.op == "output":
                return torch.fx.map_arg(node.args[0], values.__getitem__)
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                with naming(node):
                    value = values[node] = self._of_mailbox(node, list(args), dict(kwargs))
                if isinstance(value, _Mail) and isinstance(value.value, _Of):
                    value.value.is_shared = len(node.users) > 1
        raise NoPlan

    def _rows_given(self, name: str) -> _Rows:
        value, _ = self.found.placed(name)
        self._check_dtype(value)
        node = self.arguments.get(name)
        if node is None:
            node = self.arguments[name] = self.graph.placeholder(f"given_{len(self.arguments)}")
        return _Rows(self._meta(value, _NODES), node, "all")

    # ---- operators

    def _of_mailbox(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        each = _leaves((args, kwargs))
        if any(isinstance(item, (_Extremum, _Shape, _Degree)) for item in each):
            return self._of_part(node, args)
        if any(isinstance(item, _Mail) for item in each):
            return self._of_mail(node, args, kwargs)
        if any(isinstance(item, _Rows) for item in each):
            return self._of_rows(node, args, kwargs)
        return self._value(node, args, kwargs)

    def _of_part(self, node: Node, args: list[Any]) -> Any:
        name, first, other = _name_of(node), args[0], args[-1]
        if isinstance(first, _Extremum) and name in ("getitem", "getattr") and other in (0, "values"):
            return first.rows
        if isinstance(first, _Shape) and name == "getitem" and other == 1:
            return _Degree()
        if (
            isinstance(first, _Rows)
            and isinstance(other, _Degree)
            and name in ("mul", "div")
            and len(args) == 2
        ):
            degree = self.call(terms.degree, (self.found_node, self._present(first)))
            made = self.call(
                getattr(operator, {"div": "truediv"}.get(name, name)), (self._present(first), degree)
            )
            return _Rows(first.meta, made, "some")
        raise NoPlan

    def _of_mail(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if node.op == "call_module":
            module = self._module_of_rows(node, args, kwargs)
            return _Mail(self._module(str(node.target), module, args[0].value, is_first=True))
        name, first = _name_of(node), args[0] if args else None
        if name in _BINARY and len(args) == 2 and not kwargs:
            dims = max(item.dims for item in args if isinstance(item, _Mail))
            return _Mail(self._value(node, [self._aligned(item, dims) for item in args], {}))
        if name in _UNARY and isinstance(first, _Mail) and not any(map(_is_tensor, args[1:])):
            return _Mail(self._value(node, [first.value, *args[1:]], kwargs))
        if (
            name == "cat"
            and isinstance(first, (list, tuple))
            and all(isinstance(item, _Mail) for item in first)
        ):
            dim = self._edge_dim(args[1] if len(args) > 1 else kwargs.get("dim", 0), first[0].dims)
            return _Mail(self._value(node, [[item.value for item in first], dim], {}))
        if not isinstance(first, _Mail):
            raise NoPlan
        if name == "size" or (name == "getattr" and args[1:] == ["shape"]):
            shape = _Shape(first)
            return shape if len(args) == 1 or name == "getattr" else self._of_size(args[1:])
        options = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | kwargs
        options.pop("_stacklevel", None)  # an argument of torch.nn.functional.softmax
        if options.get("dtype", 0) is None:
            del options["dtype"]
        if "dim" not in options or not set(options) <= {"dim", "keepdim"} or len(args) > 3:
            raise NoPlan
        dim, keepdim = options["dim"], options.get("keepdim", False)
        if isinstance(dim, int) and dim % first.dims == 1 and not _is_bad(dim, first.dims):
            if name == "softmax" and len(options) == 1:
                return _Mail(self.softmax(first.value))
            if name in _REDUCTIONS:
                return self._over_messages(name, first, bool(keepdim))
            raise NoPlan
        if name in ("sum", "mean", "softmax", "unsqueeze", "squeeze"):
            dims = first.dims + (name == "unsqueeze")
            given = [first.value, self._edge_dim(dim, dims)]
            return _Mail(self._value(node, given, {"keepdim": True} if keepdim else {}))
        raise NoPlan

    @staticmethod
    def _of_size(args: list[Any]) -> _Degree:
        if args != [1]:
            raise NoPlan
        return _Degree()

    def _over_messages(self, how: str, mail: _Mail, keepdim: bool) -> Any:
        rows = self._reduced(mail.value, how)
        meta = mail.value.meta.new_empty((_NODES, *mail.value.row))
        found = _Rows(meta, rows, "zero")
        if keepdim:
            found = self._inserted(found)
        return _Extremum(found) if how in ("max", "min") else found

    def _inserted(self, x: _Rows) -> _Rows:
        return _Rows(x.meta.unsqueeze(1), self.method("unsqueeze", (x.node, 1)), x.of)

    @staticmethod
    def _edge_dim(dim: Any, dims: int) -> int:
        """Converts a dimension of messages to one of rows per edge."""
        if not isinstance(dim, int) or _is_bad(dim, dims) or dim % dims < 2:
            raise NoPlan
        return dim if dim < 0 else dim - 1

    def _aligned(self, item: Any, dims: int) -> Any:
        """An operand as a value per edge, to be combined with messages of ``dims`` dimensions."""
        if isinstance(item, _Mail) and item.dims == dims:
            return item.value
        if isinstance(item, _Rows) and item.meta.dim() == dims and item.meta.size(1) == 1:
            rows = item.node if item.of != "some" else self.call(terms.restored, (self.found_node, item.node))
            row = item.meta.shape[2:]
            return _Sum(item.meta.new_empty((_EDGES, *row)), dst=self.method("squeeze", (rows, 1)))
        if isinstance(item, (int, float)):
            return item
        if isinstance(item, _Whole) and isinstance(item.meta, Tensor) and item.meta.dim() <= dims - 2:
            return item
        raise NoPlan

    # ---- rows of destinations

    def _present(self, x: _Rows) -> Any:
        return x.node if x.of == "some" else self.call(terms.present, (self.found_node, x.node))

    def _complete(self, x: Any) -> Any:
        if not isinstance(x, _Rows):
            raise NoPlan("results without a row per node")
        return x.node if x.of == "zero" else self.call(terms.restored, (self.found_node, self._present(x)))

    def _of_rows(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> _Rows:
        """An operator that computes every row independently."""
        first = args[0] if args else None
        given, named = _mapped((args, kwargs), lambda x: self._present(x) if isinstance(x, _Rows) else x)
        if node.op == "call_module":
            module = self._module_of_rows(node, args, kwargs)
            with torch.no_grad():
                meta = copy.deepcopy(module).to("meta")(args[0].meta)
            return _Rows(meta, self.graph.create_node(node.op, node.target, tuple(given)), "some")
        name = _name_of(node)
        if name == "unsqueeze" and isinstance(first, _Rows) and (args[1:] or list(kwargs.values())) == [1]:
            return self._inserted(first)
        metas, options = _mapped((args, kwargs), lambda x: x.meta if isinstance(x, _Rows) else _meta_of(x))
        if not self._is_row_wise(name, metas, options):
            raise NoPlan
        if node.op == "call_method":
            meta = getattr(metas[0], str(node.target))(*metas[1:], **options)
        else:
            meta = node.target(*metas, **options)  # type: ignore[operator]
        if not isinstance(meta, Tensor) or meta.shape[:1] != (_NODES,):
            raise NoPlan
        given, named = _mapped((given, named), lambda x: x.node if isinstance(x, _Whole) else x)
        return _Rows(meta, self.graph.create_node(node.op, node.target, tuple(given), dict(named)), "some")

    @staticmethod
    def _is_row_wise(name: str, args: list[Any], kwargs: dict[str, Any]) -> bool:
        first, rest = args[0], args[1:]
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        dims = max(x.dim() for x in tensors)
        of_rows = [x for x in tensors if x.shape[:1] == (_NODES,)]
        if any(x.dim() != dims for x in of_rows) or any(
            x.dim() >= dims for x in tensors if x.shape[:1] != (_NODES,)
        ):
            return name == "linear" and len(of_rows) == 1 and of_rows[0] is first and dims == 2
        if name in _UNARY and len(tensors) == 1:
            return True
        if name in _BINARY and len(args) == 2 and not kwargs:
            return True
        if name == "cat":
            dim = rest[0] if rest else kwargs.get("dim", 0)
            return dim == -1 or (dim == dims - 1 and dims > 1)
        if name in ("sum", "mean"):
            dim = rest[0] if rest else kwargs.get("dim")
            return dims > 1 and dim in (-1, dims - 1)
        if name in ("view", "reshape", "flatten", "squeeze", "unsqueeze"):
            return dims > 1
        return name == "linear" and len(of_rows) == 1 and of_rows[0] is first

    def _module_of_rows(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> nn.Module:
        """A module that computes every row independently, so that one call replaces DGL's call per degree."""
        path = str(node.target)
        module: nn.Module = operator.attrgetter(path)(self.layer)
        kinds = (nn.Sequential, *self.linears, *_ACTIVATIONS, nn.Identity, nn.Dropout)
        for name, each in module.named_modules(prefix=path):
            is_norm = type(each) is nn.LayerNorm and len(each.normalized_shape) == 1
            if kwargs or len(args) != 1 or not (is_norm or type(each) in kinds) or not _is_plain(each):
                raise NoPlan
            self.modules[name] = _likeness(each)
        return module


def _dtypes(tensors: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: x.dtype for name, x in tensors.items()}


def _is_tensor(item: Any) -> bool:
    return isinstance(item, (_Mail, _Rows, Tensor)) or (
        isinstance(item, _Whole) and isinstance(item.meta, Tensor)
    )


def _is_bad(dim: int, dims: int) -> bool:
    return not -dims <= dim < dims
