"""Plans a traced `message()` and its reduction, with less work per edge, and with kernels where possible.

A linear map of a concatenation is split into one product per node for each end. A final linear map is applied
after a sum or mean instead of before. Attention, gated and GINE messages use the core's kernels. The rest is
computed per edge by the operators of the trace. Plans depend on shapes, so there is one plan for every set of
shapes.

Rows of nodes without edges do not affect the results of `message()`. So if a plan computes an operator per
node, a NaN in such a row must not reach a gradient. Therefore only linear maps, scores, sums, scalings and
rectifiers are computed per node.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node

from fastsparse_core.fused.linear_before_sum import linear_before_sum
from fastsparse_core.message_plans import terms
from fastsparse_core.message_plans.terms import Edges
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import has_plain_call, is_plain_linear
from fastsparse_core.ops._edge_kernels import OPERATORS
from fastsparse_core.ops.edge_expression import HOW, can_generate

#: Number of edges in the meta tensors from which shapes are inferred. Every dimension of this size counts as
#: the dimension of the edges, so the number is one that other dimensions are unlikely to have.
_EDGES = 1_000_003
#: Largest number of edge features that the kernels project themselves.
_MOST_FEATURES = 32
#: Host time of a FastSparse operator, of a softmax and of a reduction, in units of one call of a PyTorch
#: operator. FastSparse's operators and their gradients take longer, because they are called from Python.
_CALL, _SOFTMAX, _REDUCTION = 5, 8, 3
_VIEWS = ("getitem", "view", "reshape", "expand", "unsqueeze", "squeeze", "flatten", "chunk", "split")
#: Smallest number of features for which a generated kernel computes rows per edge, or several rows per node:
#: with fewer features, lanes of a warp would be idle, because a warp processes one edge at a time.
_LEAST_WIDTH = 32
#: Largest number of rows per node that one kernel computes.
_MOST_ROWS = 8
#: Largest number of plans that are stored per trace.
_MOST_PLANS = 16
#: Reductions that a sparse product supports.
PRODUCTS = ("sum", "mean", "max", "min")
#: Value in place of a reduction: the messages are not reduced.
PER_EDGE = "per edge"
#: Value in place of a reduction: the method reduces its messages itself.
OWN = "its own"
INDICES = ("index", "edge_index_i", "edge_index_j")


class Plan(NamedTuple):
    """Computes and reduces messages, for one kind of arguments.

    Attributes:
        run: function of (layer, layer, found arguments, *arguments) that returns the reduced messages and the
            attributes to set.
        names: names of the arguments.
        modules: paths of the used modules and parameters, each with the properties that the plan depends on.
        gains: what the plan saves compared with the original message, for reports.
        stopped_by: the first operator that is still computed per edge; "" if there is none.
        dtypes: dtypes of the results under autocast, in the same tuples and dicts; None: no casts.
        is_short: whether the plan takes less time on the host than computing the message per edge.
    """

    run: Callable[..., tuple[Any, dict[str, Any]]]
    names: tuple[str, ...]
    modules: tuple[tuple[str, tuple[Any, ...]], ...]
    gains: tuple[str, ...]
    stopped_by: str = ""
    dtypes: Any = None
    is_short: bool = False

    def __str__(self) -> str:
        rest = f"; the rest per edge, because of {self.stopped_by}" if self.stopped_by else ""
        return f"{' + '.join(self.gains)}{rest}"

    def reduce(self, layer: Any, found: Edges, given: Sequence[Any] | None = None) -> Any:
        """Runs the plan and sets the layer's attributes; None if a module or parameter has changed.

        Args:
            layer: the layer.
            found: the edges and arguments of the call.
            given: values of the arguments `names`; None: they are taken from ``found``.
        """
        if not self._fits(layer):
            return None
        if given is None:
            given = [found.placed(name)[0] for name in self.names]
        made = self.run(layer, layer, found, *given)
        result, assigned = made if self.dtypes is None else _in_dtypes(made, self.dtypes)
        for name, item in assigned.items():
            setattr(layer, name, item)
        return result

    def _fits(self, layer: Any) -> bool:
        """True if the layer's modules and parameters have the properties that the plan depends on."""
        try:
            for path, known in self.modules:
                module = _part(layer, path)
                if _likeness(module) != known or not _is_plain(module):
                    return False
        except (AttributeError, KeyError, TypeError):  # the layer has no such part, or it is no module
            return False
        return True


def by_plan(
    plans: dict[Any, list[Plan | str]], key: Any, layer: Any, found: Edges, make: Callable[[], Plan | str]
) -> tuple[Any, Plan | str]:
    """Runs a plan; returns (result, plan), or (None, the reason why there is no plan).

    Args:
        plans: plans of one trace, by key. Layers of one class may need several plans for one key.
        key: properties of the arguments that a plan depends on.
        layer: the layer.
        found: the edges and arguments of the call.
        make: function that makes a plan for this layer, or returns the reason why there is none.
    """
    known = plans.setdefault(key, [])
    for plan in known:
        result = plan.reduce(layer, found) if isinstance(plan, Plan) else None
        if result is not None or not isinstance(plan, Plan):
            return result, plan
    if max(len(known), len(plans)) > _MOST_PLANS:
        return None, ""
    made = make()
    known.append(made)
    result = made.reduce(layer, found) if isinstance(made, Plan) else None
    return result, "" if result is None and isinstance(made, Plan) else made


def _in_dtypes(found: Any, dtypes: Any) -> Any:
    if isinstance(dtypes, dict):
        return {name: _in_dtypes(found[name], each) for name, each in dtypes.items()}
    if isinstance(dtypes, tuple):
        return tuple(itertools.starmap(_in_dtypes, zip(found, dtypes, strict=True)))
    return found.to(dtypes)


class NoPlan(Exception):
    """Raised if a plan would gain nothing, or an operator is not supported; may name the operator."""


# ---------------------------------------------------------------- values of a trace


@dataclass(eq=False)
class _Value:
    """The planner's representation of a node of the trace.

    Attributes:
        meta: a meta tensor with the dtype and shape of the value, edges first; or the value itself if it is
            not a tensor.
        made: the node of the plan's graph with the value per edge; None until this node is made.
    """

    meta: Any
    made: Any = None

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of the value of one edge."""
        return tuple(self.meta.shape[1:])


@dataclass(eq=False)
class _Whole(_Value):
    """A value that is not per edge: a parameter, an argument of the caller, or one that PyG provides."""

    node: Any = None
    special: str = ""


class _Mapping(NamedTuple):
    """The linear map that computed the edges' term of a sum, and its input."""

    features: Node
    weight: Node
    width: int


@dataclass(eq=False)
class _Sum(_Value):
    """A sum of terms, each with rows of the shape ``row``."""

    dst: Node | None = None
    src: Node | None = None
    edge: Node | None = None
    mapping: _Mapping | None = None
    #: A constant that has not been added to one of the terms yet.
    bias: _Whole | None = None

    @property
    def terms(self) -> dict[str, Any]:
        each = {"dst": self.dst, "src": self.src, "edge": self.edge}
        return {name: node for name, node in each.items() if node is not None}


@dataclass(eq=False)
class _Of(_Value):
    """The result of an operator on other values.

    The kinds are:

    - joined (values): concatenated along the last dimension.
    - stacked (values): concatenated along the second dimension, which is not the last.
    - product, plus, quotient (two values; one may be a number).
    - dot (two values; scale, bias): the product of both values summed over the last dimension, times a
      number, plus a bias.
    - mapped (a value; function, its options): an elementwise function.
    - linear (a value; weight, bias): a linear map.
    - softmax (scores): softmax over the edges of a destination.
    - dropped (a value; p): dropout.
    - shaped (a value): another shape, edges first.

    Attributes:
        is_shared: whether other values read this value more than once.
    """

    kind: str = ""
    parts: Sequence[Any] = ()
    options: tuple[Any, ...] = ()
    is_shared: bool = False


def _is(value: Any, kind: str) -> TypeGuard[_Of]:
    return isinstance(value, _Of) and value.kind == kind


def _unshaped(value: Any) -> Any:
    return value.parts[0] if _is(value, "shaped") else value


def _is_per_edge(value: Any) -> bool:
    return isinstance(value, (_Sum, _Of)) or (isinstance(value, _Whole) and value.special in INDICES)


def _meta(x: Tensor, rows: int | None = None) -> Tensor:
    size = x.shape if rows is None else (rows, *x.shape[1:])
    return torch.empty(size, dtype=x.dtype, device="meta")


def _meta_of(value: Any) -> Any:
    return value.meta if isinstance(value, _Value) else value


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to all leaves of a tree of tuples, lists, slices and dicts."""
    if isinstance(tree, (tuple, list)):
        return type(tree)([_mapped(item, function) for item in tree])
    if isinstance(tree, dict):
        return {key: _mapped(item, function) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*[_mapped(item, function) for item in (tree.start, tree.stop, tree.step)])
    return function(tree)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(tree, found.append)
    return found


# ---------------------------------------------------------------- operators and modules

#: Elementwise functions: name -> (function, defaults of the arguments after the tensor).
_ELEMENTWISE: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "relu": (F.relu, {}),
    "leaky_relu": (F.leaky_relu, {"negative_slope": 0.01}),
    "sigmoid": (torch.sigmoid, {}),
    "tanh": (torch.tanh, {}),
    "silu": (F.silu, {}),
    "elu": (F.elu, {"alpha": 1.0}),
    "gelu": (F.gelu, {"approximate": "none"}),
    "softplus": (F.softplus, {"beta": 1.0, "threshold": 20.0}),
    "exp": (torch.exp, {}),
    "square": (torch.square, {}),
}
#: Kinds of values with two operands: the function, and its name in generated kernels.
_PAIRS = {
    "product": (operator.mul, "mul"),
    "plus": (operator.add, "add"),
    "quotient": (operator.truediv, "div"),
}
#: Functions that pass on a gradient of 0 as 0, even if their argument is NaN. They may be computed per node.
_PER_NODE = ("relu", "leaky_relu")
_ACTIVATIONS: dict[type, str] = {
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.SiLU: "silu",
    nn.ELU: "elu",
    nn.GELU: "gelu",
    nn.Softplus: "softplus",
}
#: Operators that have a method of the planner.
_KNOWN = (
    *("add", "sub", "neg", "mul", "div", "pow", "sum", "cat", "stack", "linear", "dropout"),
    *("chunk", "split", "getitem", "view", "reshape", "unsqueeze", "squeeze", "flatten"),
)
_SYNONYMS = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "concat": "cat",
    "negative": "neg",
}


def _name_of(node: Node) -> str:
    """The name of an operator: the same for calls as a function, as a method and as a Python operator."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return _SYNONYMS.get(name, name)


@contextlib.contextmanager
def naming(node: Node) -> Iterator[None]:
    """Context in which errors become a `NoPlan` that names the operator, except a `NoPlan` with a reason."""
    try:
        yield
    except Exception as error:  # operators run on tensors without content, and may raise any error
        if isinstance(error, NoPlan) and str(error):
            raise
        is_attribute = _name_of(node) == "getattr" and len(node.args) > 1
        raise NoPlan(str(node.args[1]) if is_attribute else _name_of(node) or str(node.target)) from error


def _part(layer: Any, path: str) -> Any:
    """A module or parameter of a layer; `nn.Module.__getattr__` would take three times as long."""
    part = layer
    for name in path.split("."):
        modules = part.__dict__["_modules"]
        part = modules[name] if name in modules else getattr(part, name)
    return part


def _likeness(module: Any) -> tuple[Any, ...]:
    """The properties of a module or parameter that a plan depends on."""
    if isinstance(module, Tensor):
        return type(module), module.shape, module.dtype
    state = vars(module)
    if isinstance(module, nn.Sequential):
        return type(module), *state["_modules"]
    parameters = state["_parameters"]
    weight = parameters.get("weight")
    if weight is not None:
        # Reading the attribute takes 1 us more. Modules without it differ from those without a bias.
        bias = parameters["bias"] if "bias" in parameters else getattr(module, "bias", ...)
        return type(module), weight.shape, weight.dtype, bias is None
    names = (*getattr(module, "__constants__", ()), "p", "training")
    return type(module), *[state[name] for name in names if name in state]


def _is_plain(module: Any) -> bool:
    """True if calling a module has no other effect than its formula: no hooks, no replaced `forward`."""
    if isinstance(module, Tensor):
        return True
    if isinstance(module, nn.Linear) or "weight" in module._parameters:
        return is_plain_linear(module, type(module))
    return has_plain_call(module)


# ---------------------------------------------------------------- from the trace to the plan


class Planner:
    """Builds the graph of a plan in one pass over a trace."""

    #: Classes of linear layers that consist of a weight and a bias.
    linears: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    def __init__(self, layer: Any, found: Edges, mixed: torch.dtype | None = None) -> None:
        """Starts a plan.

        Args:
            layer: the layer whose method is planned.
            found: the edges and arguments of the call.
            mixed: dtype of autocast; None if autocast is off.
        """
        self.layer, self.found, self.mixed = layer, found, mixed
        self.graph = Graph()
        self.call, self.method = self.graph.call_function, self.graph.call_method
        self.layer_node, self.found_node = map(self.graph.placeholder, ("layer", "found"))
        self.arguments: dict[str, Node] = {}
        self.modules: dict[str, tuple[Any, ...]] = {}
        self.gains: dict[str, None] = {}
        self.dtype: torch.dtype | None = None
        self.how = ""
        self.generates = found.special["adj"].device.type == "cuda" and can_generate()

    def plan(self, trace: Graph, how: str, assigned: Mapping[str, Node] | None = None) -> Plan:
        """The plan of a traced body.

        Args:
            trace: trace of the method.
            how: the reduction; :data:`PER_EDGE` for no reduction, :data:`OWN` if the method reduces.
            assigned: attributes that the method sets, with their nodes in the trace.

        Raises:
            NoPlan: a plan would gain nothing, or an operator is not supported.
            Exception: an operator may raise any error on meta tensors.
        """
        self.how = how
        values, out = self._walk(trace)
        if how == OWN:
            if not all(isinstance(each, _Whole) and each.node is not None for each in _leaves(out)):
                raise NoPlan
        elif not isinstance(out, (_Sum, _Of)):
            raise NoPlan
        # The values per edge are computed before the reduction, so that the reduction can use them.
        kept = {name: self._at_edges(values[node]) for name, node in (assigned or {}).items()}
        as_is = how in (PER_EDGE, OWN)
        plan = self._finished((_mapped(out, self._at_edges) if as_is else self._reduced(out, how), kept))
        gathers = sum(name.endswith(("_i", "_j")) for name in self.arguments)
        of_message = gathers + self._launches(trace) + _REDUCTION
        return plan._replace(is_short=self._launches(self.graph) < of_message)

    def _launches(self, graph: Graph) -> int:
        """Estimated time of a graph on the host, in launches of PyTorch operators."""
        total = 0
        for node in graph.nodes:
            name = _name_of(node)
            if node.op == "call_module":
                module = operator.attrgetter(str(node.target))(self.layer)
                total += sum(not each._modules for each in module.modules())
            elif node.op not in ("call_function", "call_method") or name in _VIEWS:
                continue
            elif getattr(node.target, "__module__", "").startswith("fastsparse_core."):
                total += _CALL
            else:
                total += _SOFTMAX if name == "softmax" else 1
        return total

    def _walk(self, trace: Graph) -> tuple[dict[Node, Any], Any]:
        """The value of every node of a trace, and the value of its output."""
        values: dict[Node, Any] = {}
        out = None
        for node in trace.nodes:
            if node.op == "placeholder":
                values[node] = self._argument(str(node.target))
            elif node.op == "output":
                out = torch.fx.map_arg(node.args[0], values.__getitem__)
            else:
                args = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                with naming(node):
                    value = values[node] = self._value(node, *args)
                if isinstance(value, _Of):
                    value.is_shared = self._num_uses(node) > 1
        return values, out

    def _num_uses(self, node: Node) -> int:
        return len(node.users)

    def _finished(self, result: Any) -> Plan:
        """Compiles the plan's graph with this result."""
        if not self.gains:
            raise NoPlan(self._stopped_by())
        self.graph.output(result)
        for node in reversed(list(self.graph.nodes)):
            is_ours = node.op == "output" or node in (self.layer_node, self.found_node)
            if not node.users and not is_ours:
                self.graph.erase_node(node)
        code = self.graph.python_code("self")
        namespace = dict(code.globals)
        exec(code.src, namespace)
        kept = set(self.graph.nodes)
        names = tuple(name for name, node in self.arguments.items() if node in kept)
        return Plan(
            namespace["forward"], names, tuple(self.modules.items()), tuple(self.gains), self._stopped_by()
        )

    def _stopped_by(self) -> str:
        """The first operator on features of nodes per edge; "" if there is none."""
        for node in self.graph.nodes:
            if node.target is terms.per_edge:
                user = next(iter(node.users))
                return str(user.target) if isinstance(user.target, str) else user.target.__name__
        return ""

    # ---- leaves

    def _argument(self, name: str) -> _Value:
        found = self.found
        if name in INDICES:
            return _Whole(torch.empty(_EDGES, dtype=torch.int64, device="meta"), special=name)
        if name in found.special:
            value = found.special[name]
            return _Whole(self._meta(value) if isinstance(value, Tensor) else value, special=name)
        value, place = found.placed(name)
        if not isinstance(value, Tensor):
            return _Whole(value, node=value)
        self._check_dtype(value)
        node = self.arguments[name] = self.graph.placeholder(f"given_{len(self.arguments)}")
        if not place:
            return _Whole(self._meta(value), node=node)
        own: dict[str, Any] = {place: node}
        return _Sum(self._meta(value, _EDGES), **own)

    def _parameter(self, path: str) -> _Whole:
        value = operator.attrgetter(path)(self.layer)
        if not isinstance(value, Tensor):
            raise NoPlan
        self._check_dtype(value)
        return _Whole(self._meta(value), node=self.graph.create_node("get_attr", path))

    def _meta(self, x: Tensor, rows: int | None = None) -> Tensor:
        """A meta tensor like an argument; under autocast it is float32, because only the shape matters."""
        meta = _meta(x, rows)
        return meta.float() if self.mixed is not None and x.is_floating_point() else meta

    def without_edges(self, graph: Graph, mail: Mapping[str, Tensor] | None = None) -> dict[Node, Any]:
        """Runs a trace on tensors without edges, to find the dtypes of all nodes under autocast.

        Autocast's rules depend on the operator and the device, so the trace is really run. Only modules that
        are known to have no state are called.

        Args:
            graph: the trace.
            mail: the arguments ``mail.NAME``, by name.

        Raises:
            NoPlan: the trace calls a module that may have state.
        """
        given, found = [], self.found
        stateless = (nn.Identity, nn.Dropout, nn.LayerNorm, nn.Embedding, nn.Sequential)
        for node in graph.nodes:
            name = str(node.target)
            if node.op == "call_module":
                for each in operator.attrgetter(name)(self.layer).modules():
                    if type(each) not in (*stateless, *self.linears, *_ACTIVATIONS) or not _is_plain(each):
                        raise NoPlan(type(each).__name__)
            if node.op == "placeholder":
                value, has_rows = found.special.get(name), name in INDICES
                if name == "ptr" and isinstance(value, Tensor):
                    value = torch.zeros_like(value)
                elif has_rows:
                    value = found[name]
                elif name.startswith("mail."):
                    value = (mail or {})[name[5:]]
                elif name not in found.special:
                    value, place = found.placed(name)
                    has_rows = bool(place)
                given.append(value[:0] if has_rows and isinstance(value, Tensor) else value)
        module: Any = nn.Module() if self.layer is None else self.layer
        interpreter = Interpreter(module, garbage_collect_values=False, graph=graph)
        with torch.no_grad():
            interpreter.run(*given)
        return interpreter.env

    def _check_dtype(self, x: Tensor) -> None:
        """Requires one dtype for all floating tensors, so that the order of operators changes no dtype."""
        if not x.is_floating_point() or (self.mixed is not None and x.dtype in (torch.float32, self.mixed)):
            return
        if self.mixed is not None or self.dtype not in (None, x.dtype):
            raise NoPlan
        self.dtype = x.dtype

    # ---- operators

    def _value(self, node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if node.op == "get_attr":
            found = self._parameter(str(node.target))
            self.modules[str(node.target)] = _likeness(operator.attrgetter(str(node.target))(self.layer))
            return found
        if node.op == "call_module":
            path = str(node.target)
            if kwargs or len(args) != 1 or not isinstance(args[0], _Value):
                raise NoPlan
            return self._module(path, operator.attrgetter(path)(self.layer), args[0], is_first=True)
        name, value = _name_of(node), None
        reads_special = any(isinstance(item, _Whole) and item.special for item in _leaves((args, kwargs)))
        if name in _KNOWN and not reads_special:
            known = getattr(self, f"_{name}")
            with contextlib.suppress(TypeError):  # raised by `bind` for unsupported arguments
                inspect.signature(known).bind(*args, **kwargs)
                value = known(*args, **kwargs)
        elif name in _ELEMENTWISE and args and isinstance(args[0], (_Sum, _Of)):
            value = self._elementwise(name, args[0], args[1:], kwargs)
        return self._as_written(node, args, kwargs) if value is None else value

    def _as_written(self, node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> _Value:
        """An operator of the trace, unchanged, on values per edge."""
        metas, options = _mapped((args, kwargs), _meta_of)
        if node.target is torch._assert and metas[0] is not True:  # the assertion reads values, or fails
            raise NoPlan
        if node.op == "call_method":
            meta = getattr(metas[0], str(node.target))(*metas[1:], **options)
        else:
            meta = node.target(*metas, **options)  # type: ignore[operator]
        given, named = _mapped((args, kwargs), self._at_edges)
        made = self.graph.create_node(node.op, node.target, tuple(given), dict(named))
        is_per_edge = any(map(_is_per_edge, _leaves((args, kwargs))))
        if is_per_edge and isinstance(meta, Tensor) and meta.shape[:1] == (_EDGES,):
            return _Sum(meta, edge=made)
        return _Whole(meta, node=made)

    def _module(self, path: str, module: nn.Module, x: _Value, is_first: bool) -> _Value:
        kind, value = type(module), None
        if not _is_plain(module):
            pass
        elif kind is nn.Sequential:
            for nth, (name, each) in enumerate(module._modules.items()):
                assert each is not None
                x = self._module(f"{path}.{name}", each, x, is_first and nth == 0)
            value = x
        elif kind in self.linears:
            bias = None if module.bias is None else self._parameter(f"{path}.bias")
            value = self._linear(x, self._parameter(f"{path}.weight"), bias)
        elif kind is nn.Identity:
            value = x
        elif kind is nn.Dropout:
            value = self._dropout(x, module.p, module.training)
        elif kind in _ACTIVATIONS and not (is_first and getattr(module, "inplace", False)):
            name = _ACTIVATIONS[kind]
            value = self._elementwise(
                name, x, (), {key: getattr(module, key) for key in _ELEMENTWISE[name][1]}
            )
        if value is not None:
            self.modules[path] = _likeness(module)
            return value
        if any(
            not (type(each).__module__.startswith(("torch.", "torch_geometric.")) and _is_plain(each))
            for each in module.modules()
        ):
            raise NoPlan  # finding the shape would run the module's own code or hooks one more time
        with torch.no_grad():
            meta = copy.deepcopy(module).to("meta")(x.meta)
        self.modules[path] = _likeness(module)
        made = self.graph.create_node("call_module", path, (self._at_edges(x),))
        return _Sum(meta, edge=made) if _is_per_edge(x) else _Whole(meta, node=made)

    def _linear(self, x: Any, weight: Any, bias: Any = None) -> _Value | None:
        if not isinstance(x, (_Sum, _Of)) or not isinstance(weight, _Whole) or len(x.row) < 1:
            return None
        if weight.meta.dim() != 2 or not isinstance(bias, (_Whole, type(None))):
            return None
        meta = F.linear(x.meta, weight.meta)
        if _is(x, "joined"):
            total: _Sum | None = None
            parts = self._as_sums(x.parts)
            for part, matrix in zip(parts, self._divided(weight.node, parts), strict=True):
                each = self._mapped_terms(part, meta, matrix)
                total = each if total is None else self._added(total, each, meta)
            assert total is not None
            return self._plus(total, bias, meta)
        if not isinstance(x, _Sum):
            return _Of(
                meta, kind="linear", parts=(x,), options=(weight.node, None if bias is None else bias.node)
            )
        return self._plus(self._mapped_terms(x, meta, weight.node), bias, meta)

    def _divided(self, weight: Node, parts: Sequence[_Sum]) -> list[Node]:
        """The columns of a weight for each of the concatenated parts; their gradient is one `cat`."""
        each = self.method("split", (weight, [part.row[-1] for part in parts], -1))
        return [self.call(operator.getitem, (each, n)) for n in range(len(parts))]

    def _mapped_terms(self, x: _Sum, meta: Tensor, weight: Node) -> _Sum:
        """Applies a linear map without bias to every term; terms of nodes are mapped once per node."""
        x = self._settled(x) if x.bias is not None and x.bias.meta.shape != x.row[-1:] else x
        made: dict[str, Any] = {}
        for name, term in x.terms.items():
            made[name] = self.call(F.linear if name == "edge" else linear_before_sum, (term, weight))
            if name != "edge":
                self.gains["linear maps per node"] = None
        if x.edge is not None and len(x.row) == 1:
            made["mapping"] = _Mapping(x.edge, weight, x.row[0])
        if x.bias is not None:
            made["bias"] = _Whole(meta[0], node=self.call(F.linear, (x.bias.node, weight)))
        return _Sum(meta, **made)

    def _added(self, left: _Sum, right: _Sum, meta: Tensor) -> _Sum:
        made: dict[str, Any] = {}
        for name in ("dst", "src", "edge"):
            nodes = [self._expanded(x, x.terms[name], meta) for x in (left, right) if name in x.terms]
            made[name] = self.call(operator.add, tuple(nodes)) if len(nodes) == 2 else next(iter(nodes), None)
        with_edge = [x for x in (left, right) if x.edge is not None]
        if len(with_edge) == 1 and with_edge[0].row == tuple(meta.shape[1:]):
            made["mapping"] = with_edge[0].mapping
        total = _Sum(meta, **made, bias=left.bias)
        return total if right.bias is None else self._plus(total, right.bias, meta)

    def _expanded(self, x: _Sum, node: Node, meta: Tensor) -> Node:
        row = tuple(meta.shape[1:])
        return node if x.row == row else self.method("expand", (node, -1, *row))

    def _plus(self, x: _Sum, added: _Whole | None, meta: Tensor) -> _Sum:
        """Adds a constant to a sum; it stays separate until it is added to a term or passed to a kernel."""
        if added is None:
            return x
        made: dict[str, Any] = {name: self._expanded(x, term, meta) for name, term in x.terms.items()}
        mapping = x.mapping if x.row == tuple(meta.shape[1:]) else None
        if x.bias is not None:
            both = self.call(operator.add, (x.bias.node, added.node))
            added = _Whole(torch.add(x.bias.meta, added.meta), node=both)
        return _Sum(meta, **made, mapping=mapping, bias=added)

    def _settled(self, x: _Sum) -> _Sum:
        """The sum with its constant added to one of its terms: to a term of nodes, if there is one."""
        if x.bias is None:
            return x
        made = x.terms
        name = next(iter(made))
        made[name] = self.call(operator.add, (made[name], x.bias.node))
        return _Sum(x.meta, **made, mapping=x.mapping if name != "edge" else None)

    def _each_term(self, x: _Sum, meta: Tensor, function: Callable[..., Any], *args: Any) -> _Sum:
        """Applies a function to every term. This is valid if the function is linear or there is one term."""
        made = self._settled(x).terms
        for name, term in made.items():
            made[name] = self.call(function, (term, *args))
        return _Sum(meta, **made)

    def _add(self, left: Any, right: Any) -> _Value | None:
        if not isinstance(left, (_Sum, _Of)):
            left, right = right, left
        if not isinstance(left, (_Sum, _Of)):
            return None
        meta = torch.add(left.meta, _meta_of(right))
        if _is(left, "dot") or _is(right, "dot"):
            dot, term = (left, right) if _is(left, "dot") else (right, left)
            if not isinstance(term, _Sum) or list(term.terms) != ["edge"] or dot.options[1] is not None:
                return None
            edge = self._settled(term).edge if term.meta.shape == dot.meta.shape == meta.shape else None
            return (
                None
                if edge is None
                else _Of(meta, kind="dot", parts=dot.parts, options=(dot.options[0], edge))
            )
        if _is(left, "joined") or _is(right, "joined"):
            return None
        if isinstance(left, _Of) or isinstance(right, _Of):
            return self._pair("plus", left, right, meta)
        if left.meta.dim() != meta.dim():
            return None
        if isinstance(right, _Sum):
            return self._added(left, right, meta) if right.meta.dim() == meta.dim() else None
        if not isinstance(right, _Value):
            right = _Whole(torch.tensor(right, device="meta"), node=right)
        if not isinstance(right, _Whole) or not isinstance(right.meta, Tensor):
            return None
        size = right.meta.shape
        spans_rows = len(size) == meta.dim() and size[0] != 1
        return None if spans_rows else self._plus(left, right, meta)

    def _sub(self, left: Any, right: Any) -> _Value | None:
        negative = -right if isinstance(right, (int, float)) else self._neg(right)
        return None if negative is None else self._add(left, negative)

    def _neg(self, x: Any) -> _Value | None:
        if isinstance(x, _Whole) and isinstance(x.meta, Tensor) and not x.special:
            return _Whole(-x.meta, node=self.call(operator.neg, (x.node,)))
        return self._mul(x, -1.0)

    def _div(self, left: Any, right: Any) -> _Value | None:
        if isinstance(right, (int, float)):
            return self._mul(left, 1 / right) if right else None
        if not (isinstance(left, (_Sum, _Of)) or isinstance(right, (_Sum, _Of))):
            return None
        return self._pair("quotient", left, right, torch.div(_meta_of(left), _meta_of(right)))

    def _pow(self, x: Any, exponent: Any) -> _Value | None:
        is_square = isinstance(x, (_Sum, _Of)) and isinstance(exponent, (int, float)) and exponent == 2
        return self._elementwise("square", x, (), {}) if is_square else None

    def _pair(self, kind: str, left: Any, right: Any, meta: Tensor) -> _Value | None:
        """A binary operator, which only a generated kernel can combine with others."""
        parts = [
            item.meta if isinstance(item, _Whole) and not isinstance(item.meta, Tensor) else item
            for item in (left, right)
        ]
        is_known = all(isinstance(item, (_Value, int, float)) for item in parts)
        return _Of(meta, kind=kind, parts=parts) if is_known and meta.shape[:1] == (_EDGES,) else None

    def _mul(self, left: Any, right: Any) -> _Value | None:
        if not isinstance(left, (_Sum, _Of)):
            left, right = right, left
        if not isinstance(left, (_Sum, _Of)):
            return None
        right = right.meta if isinstance(right, _Whole) and not isinstance(right.meta, Tensor) else right
        if isinstance(right, (int, float)):
            return self._scaled(left, right)
        meta = torch.mul(left.meta, _meta_of(right))
        is_known = isinstance(right, _Value) and meta.shape[:1] == (_EDGES,)
        return _Of(meta, kind="product", parts=(left, right)) if is_known else None

    def _scaled(self, x: Any, factor: float) -> _Value | None:
        if _is(x, "dot") and x.options[1] is None:
            return _Of(x.meta, kind="dot", parts=x.parts, options=(x.options[0] * factor, None))
        if _is(x, "shaped"):
            inner = self._scaled(x.parts[0], factor)
            return inner and _Of(x.meta, kind="shaped", parts=(inner,))
        if not isinstance(x, _Sum):
            return None if _is(x, "joined") else self._pair("product", x, factor, x.meta * factor)
        return self._each_term(x, x.meta * factor, operator.mul, factor)

    def _sum(self, x: Any, dim: Any = None, keepdim: bool = False) -> _Value | None:
        if not isinstance(x, (_Sum, _Of)) or x.meta.dim() < 2:
            return None
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        if dim not in (-1, x.meta.dim() - 1):
            return None
        meta, value = x.meta.sum(-1), None
        if _is(x, "product"):
            value = self._scores(x, meta) or _Of(meta, kind="dot", parts=x.parts, options=(1.0, None))
        elif isinstance(x, _Sum):
            value = self._each_term(x, meta, torch.sum, -1)
        return self._shaped(value, meta.unsqueeze(-1)) if keepdim and value is not None else value

    def _scores(self, x: _Of, meta: Tensor) -> _Value | None:
        """Dot products of rows with a constant vector, computed once per node; None for other products."""
        rows, vector = x.parts
        if not isinstance(vector, _Whole) or not (isinstance(rows, _Sum) or _is(rows, "joined")):
            return None
        size = list(vector.meta.shape)
        if len(size) > 1 and len(size) >= rows.meta.dim() and set(size[: len(size) - len(rows.row)]) == {1}:
            size = size[-len(rows.row) :]
        if tuple(size) not in (rows.row, rows.row[-1:]) or len(size) > 2:
            return None
        if rows.row and len(rows.row) > 2:
            return None
        total: _Sum | None = None
        parts = self._as_sums(rows.parts) if isinstance(rows, _Of) else [rows]
        vectors = self._divided(vector.node, parts) if isinstance(rows, _Of) else [vector.node]
        for part, node in zip(parts, vectors, strict=True):
            each = self._each_term(part, meta, terms.scores, node)
            total = each if total is None else self._added(total, each, meta)
        assert total is not None
        if set(total.terms) != {"edge"}:
            self.gains["scores per node"] = None
        return total

    def _cat(self, tensors: Any, dim: Any = 0) -> _Value | None:
        if not isinstance(tensors, (list, tuple)) or not all(isinstance(x, (_Sum, _Of)) for x in tensors):
            return None
        each = [part for x in tensors for part in (x.parts if _is(x, "joined") else [x])]
        num_dims = each[0].meta.dim()
        if dim in (1, 1 - num_dims) and num_dims > 2:
            return _Of(torch.cat([x.meta for x in tensors], 1), kind="stacked", parts=tensors)
        if dim not in (-1, num_dims - 1) or dim == 0:
            return None
        return _Of(torch.cat([x.meta for x in each], -1), kind="joined", parts=each)

    def _stack(self, tensors: Any, dim: Any = 0) -> _Value | None:
        if not isinstance(tensors, (list, tuple)) or not all(isinstance(x, (_Sum, _Of)) for x in tensors):
            return None
        if tensors[0].meta.dim() < 2 or dim not in (1, -tensors[0].meta.dim()):
            return None
        return self._cat([self._shaped(x, x.meta.unsqueeze(1)) for x in tensors], 1)

    def _as_sums(self, parts: Sequence[Any]) -> list[_Sum]:
        return [x if isinstance(x, _Sum) else _Sum(x.meta, edge=self._at_edges(x)) for x in parts]

    def _elementwise(self, name: str, x: Any, args: Any, kwargs: Any) -> _Value | None:
        function, defaults = _ELEMENTWISE[name]
        kwargs = dict(kwargs)
        if kwargs.pop("inplace", False) or len(args) > len(defaults) or not set(kwargs) <= set(defaults):
            return None
        options = [
            _meta_of(each)
            for each in {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}.values()
        ]
        if not all(isinstance(each, (bool, int, float, str)) for each in options):
            return None
        if isinstance(x, _Sum) and len(x.terms) == 1 and name in _PER_NODE and x.edge is None:
            self.gains[f"{name} per node"] = None
            return self._each_term(x, x.meta, function, *options)
        return _Of(x.meta, kind="mapped", parts=(x,), options=(name, *options))

    def _dropout(self, x: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> _Value | None:
        training, p = _meta_of(training), _meta_of(p)
        if inplace or not isinstance(x, (_Sum, _Of)) or not isinstance(p, (int, float)):
            return None
        if training is False or p == 0:
            return x
        return (
            _Of(x.meta, kind="dropped", parts=(x,), options=(float(p),))
            if training is True and p < 1
            else None
        )

    def softmax(self, scores: Any) -> _Value:
        """Softmax over the edges of a destination."""
        if not isinstance(scores, (_Sum, _Of)):
            raise NoPlan
        return _Of(scores.meta, kind="softmax", parts=(scores,))

    # ---- shapes

    def _shaped(self, x: Any, meta: Tensor) -> _Value | None:
        if meta.shape[:1] != (_EDGES,):
            return None
        row = tuple(meta.shape[1:])
        if not isinstance(x, _Sum):
            return _Of(meta, kind="shaped", parts=(_unshaped(x),))
        bias = x.bias
        if bias is not None and bias.meta.numel() == math.prod(x.row):
            bias = _Whole(bias.meta.reshape(row), node=self.method("reshape", (bias.node, row)))
        elif bias is not None:
            x, bias = self._settled(x), None
        made: dict[str, Any] = {
            name: self.method("reshape", (term, (-1, *row))) for name, term in x.terms.items()
        }
        return _Sum(meta, **made, mapping=x.mapping, bias=bias)

    def _view(self, x: Any, *sizes: Any) -> _Value | None:
        if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
            sizes = tuple(sizes[0])
        sizes = tuple(map(_meta_of, sizes))
        fits = isinstance(x, (_Sum, _Of)) and all(isinstance(each, int) for each in sizes)
        return self._shaped(x, x.meta.reshape(sizes)) if fits else None

    _reshape = _view

    def _getitem(self, x: Any, index: Any) -> Any:
        if isinstance(x, tuple):  # a result of `_parted`
            return x[index]
        if not isinstance(x, (_Sum, _Of)):
            return None
        items = index if isinstance(index, tuple) else (index,)
        if all(item is None or item is Ellipsis or item == slice(None) for item in items):
            return self._shaped(x, x.meta[index])
        is_of_rows = (
            isinstance(x, _Sum) and len(items) > 1 and (items[0] is Ellipsis or items[0] == slice(None))
        )
        if not is_of_rows or not all(isinstance(i, (int, slice, type(None), type(...))) for i in items):
            return None
        meta = x.meta[index]
        if meta.shape[:1] != (_EDGES,) or (items[0] is Ellipsis and len(items) >= x.meta.dim()):
            return None
        assert isinstance(x, _Sum)
        return self._each_term(x, meta, operator.getitem, index)

    def _chunk(self, x: Any, chunks: Any, dim: Any = 0) -> Any:
        return self._parted(x, dim, lambda meta: meta.chunk(chunks, -1))

    def _split(self, x: Any, sizes: Any, dim: Any = 0) -> Any:
        return self._parted(x, dim, lambda meta: meta.split(sizes, -1))

    def _parted(self, x: Any, dim: Any, parts: Callable[[Tensor], Sequence[Tensor]]) -> Any:
        if not isinstance(x, (_Sum, _Of)) or dim not in (-1, x.meta.dim() - 1) or dim == 0:
            return None
        each = _columns([_Sum(meta) for meta in parts(x.meta)])
        return tuple(self._sliced(x, first, last) for _, first, last in each)

    def _sliced(self, x: Any, first: int, last: int) -> Any:
        """Columns ``first`` to ``last`` of a value; a value with one column is broadcast, and stays."""
        if not isinstance(x, _Value) or not isinstance(x.meta, Tensor):
            return x
        at: Any = (..., slice(first, last))
        if not x.meta.dim() or x.meta.size(-1) == 1 or (first, last) == (0, x.meta.size(-1)):
            return x
        meta = x.meta[at]
        if isinstance(x, _Whole):
            if x.special:
                raise NoPlan
            return _Whole(meta, node=self._once(operator.getitem, self._at_edges(x), at))
        if isinstance(x, _Sum):
            made: dict[str, Any] = {}
            for name, term in x.terms.items():
                if name == "edge" and x.mapping is not None:
                    weight = self.call(operator.getitem, (x.mapping.weight, slice(first, last)))
                    made["mapping"] = x.mapping._replace(weight=weight)
                    made[name] = self.call(F.linear, (x.mapping.features, weight))
                else:
                    made[name] = self.call(operator.getitem, (term, at))
            return _Sum(meta, **made, bias=self._sliced(x.bias, first, last))
        if isinstance(x, _Of) and x.made is None and not x.is_shared:
            if x.kind in ("mapped", *_PAIRS):
                parts = [self._sliced(part, first, last) for part in x.parts]
                return _Of(meta, kind=x.kind, parts=parts, options=x.options)
            if x.kind == "linear":
                rows = [
                    node and self.call(operator.getitem, (node, slice(first, last))) for node in x.options
                ]
                return _Of(meta, kind=x.kind, parts=x.parts, options=tuple(rows))
        return _Sum(meta, edge=self.call(operator.getitem, (self._at_edges(x), at)))

    def _rows_of(self, x: Any) -> list[Any]:
        """The rows that a value has per edge, as values of one row each.

        Raises:
            NoPlan: the value cannot be split into rows.
        """
        if _is(x, "joined") or _is(x, "stacked"):
            return [row for part in x.parts for row in self._rows_of(part)]
        if _is(x, "shaped") and (len(x.row) == 1 or len(x.parts[0].row) > 1):
            return self._rows_of(x.parts[0])
        if len(x.row) == 1:
            return [x]
        return [row for n in range(x.row[0]) for row in self._rows_of(self._nth(x, n, x.meta.dim()))]

    def _nth(self, x: Any, n: int, num_dims: int) -> Any:
        """Entry ``n`` of a value's second dimension, which may be broadcast.

        Raises:
            NoPlan: the value cannot be split into entries.
        """
        if not isinstance(x, _Value) or not isinstance(x.meta, Tensor):
            return x
        if isinstance(x, _Whole):
            left_out = num_dims - x.meta.dim()
            if x.special or (left_out == 0 and x.meta.size(0) != 1):
                raise NoPlan
            if left_out > 1:
                return x
            at = (0,) * (1 - left_out) + (n if x.meta.size(1 - left_out) > 1 else 0,)
            return _Whole(x.meta[at], node=self._once(operator.getitem, x.node, at))
        if x.meta.dim() != num_dims:
            raise NoPlan
        n = n if x.row[0] > 1 else 0
        meta = x.meta[:, n]
        if isinstance(x, _Sum):
            size, made = math.prod(meta.shape[1:]), dict[str, Any]()
            for name, term in x.terms.items():
                if name == "edge" and x.mapping is not None:
                    weight = self.call(operator.getitem, (x.mapping.weight, slice(n * size, (n + 1) * size)))
                    made["mapping"] = x.mapping._replace(weight=weight)
                    rows = self.call(F.linear, (x.mapping.features, weight))
                    made[name] = self.method("reshape", (rows, (-1, *meta.shape[1:])))
                else:
                    each = self._once(torch.unbind, term, 1)
                    made[name] = self._once(operator.getitem, each, n)
            bias = None if x.bias is None else self._nth(x.bias, n, num_dims)
            return _Sum(meta, **made, bias=bias)
        if isinstance(x, _Of) and x.made is None and x.kind in ("mapped", *_PAIRS):
            parts = [self._nth(part, n, num_dims) for part in x.parts]
            return _Of(meta, kind=x.kind, parts=parts, options=x.options)
        if _is(x, "shaped") and num_dims == 3 and len(x.parts[0].row) == 1:
            width = x.row[1]
            return self._sliced(x.parts[0], n * width, (n + 1) * width)
        if _is(x, "stacked"):
            for part in x.parts:
                if n < part.row[0]:
                    return self._nth(part, n, num_dims)
                n -= part.row[0]
        raise NoPlan

    def _once(self, target: Any, *args: Any) -> Node:
        """Adds a call of a function, or of a method given by name. Equal calls share one node."""
        known = (node for node in self.graph.nodes if node.target == target and node.args == args)
        return next(known, None) or (self.method if isinstance(target, str) else self.call)(target, args)

    def scattered(
        self, src: Any, index: Any, dim: Any = 0, dim_size: Any = None, reduce: Any = "sum"
    ) -> _Value:
        """A reduction over the destinations in the method itself, with the arguments of PyG's `scatter`.

        Raises:
            NoPlan: the input is not per edge, or the reduction is not over destinations.
        """
        index, size = (getattr(item, "special", "") for item in (index, dim_size))
        dim, how = (item.meta if isinstance(item, _Whole) else item for item in (dim, reduce))
        how = "sum" if how == "add" else how
        is_known = self.how == OWN and isinstance(src, (_Sum, _Of)) and how in PRODUCTS
        if not is_known or index != "index" or size not in ("dim_size", "size_i"):
            raise NoPlan
        if not isinstance(dim, int) or dim not in (0, -src.meta.dim()):
            raise NoPlan
        return _Whole(_meta(src.meta, self.found.dst.num_nodes), node=self._reduced(src, how))

    def _unsqueeze(self, x: Any, dim: Any) -> _Value | None:
        return self._shaped(x, x.meta.unsqueeze(dim)) if isinstance(x, (_Sum, _Of)) else None

    def _squeeze(self, x: Any, *dim: Any) -> _Value | None:
        return self._shaped(x, x.meta.squeeze(*dim)) if isinstance(x, (_Sum, _Of)) else None

    def _flatten(self, x: Any, *dims: Any) -> _Value | None:
        return self._shaped(x, x.meta.flatten(*dims)) if isinstance(x, (_Sum, _Of)) else None

    # ---- per edge

    def _at_edges(self, value: Any) -> Any:
        """The plan's node with a value per edge; values that are not per edge are returned unchanged."""
        if isinstance(value, _Value) and value.made is None:
            value.made = self._made_at_edges(value)
        return value.made if isinstance(value, _Value) else value

    def _made_at_edges(self, value: Any) -> Any:
        if isinstance(value, _Whole):
            is_special = bool(value.special)
            return self.call(operator.getitem, (self.found_node, value.special)) if is_special else value.node
        if isinstance(value, _Sum):
            x = self._settled(value)
            if x.dst is None and x.src is None:
                return x.edge
            return self.call(terms.per_edge, (self.found_node, x.dst, x.src, x.edge))
        is_wide = len(value.row) == 1 and value.row[0] >= _LEAST_WIDTH
        if self.generates and value.kind in ("mapped", *_PAIRS) and is_wide:
            made = self._generated(value, "none")
            if made is not None:
                return made
        parts, options = [self._at_edges(part) for part in value.parts], value.options
        if value.kind in ("joined", "stacked"):
            return self.call(torch.cat, (parts, -1 if value.kind == "joined" else 1))
        if value.kind in _PAIRS:
            return self.call(_PAIRS[value.kind][0], tuple(parts))
        if value.kind == "dot":
            total = self.method("sum", (self.call(operator.mul, tuple(parts)), -1))
            total = total if options[0] == 1 else self.call(operator.mul, (total, options[0]))
            return total if options[1] is None else self.call(operator.add, (total, options[1]))
        if value.kind == "mapped":
            return self.call(_ELEMENTWISE[options[0]][0], (*parts, *options[1:]))
        if value.kind == "linear":
            return self.call(F.linear, (*parts, *options))
        if value.kind == "softmax":
            return self.call(terms.softmax, (self.found_node, *parts))
        if value.kind == "dropped":
            return self.call(F.dropout, (*parts, options[0], True))
        return self.method("reshape", (*parts, (-1, *value.row)))

    # ---- reduced

    def _reduced(self, value: Any, how: str) -> Node:
        """The plan's node with the reduced messages."""
        if _is(value, "shaped"):
            return self.method("reshape", (self._reduced(value.parts[0], how), (-1, *value.row)))
        if _is(value, "linear") and how in ("sum", "mean") and len(value.parts[0].row) == 1:
            self.gains[f"a linear map after the {how}"] = None
            inner = self._reduced(value.parts[0], how)
            return self.call(terms.linear_of_reduced, (self.found_node, inner, *value.options, how))
        if _is(value, "linear") and how in ("max", "min") and value.options[1] and value.made is None:
            # Adding the bias after the reduction makes its gradient a sum over nodes, not over edges.
            self.gains[f"a bias after the {how}"] = None
            map_ = _Of(value.meta, kind="linear", parts=value.parts, options=(value.options[0], None))
            inner = self._reduced(map_, how)
            return self.call(terms.plus_bias_of_reduced, (self.found_node, inner, value.options[1], how))
        made = None
        if how == "sum" and value.meta.dtype in DTYPE_CODE:
            made = self._by_kernel(value)
        if made is None and _is(value, "product") and how in PRODUCTS:
            made = self._weighted(value, how)
        if made is None and isinstance(value, _Sum) and how in PRODUCTS:
            made = self._reduced_terms(value, how)
        if made is None and self.generates and how in HOW:
            is_one_row = len(value.row) == 1 and not _is(value, "joined")
            made = (self._generated if is_one_row else self._generated_rows)(value, how)
        # A method that reduces its messages itself replaces the layer's reduction.
        reduce = Planner.reduce if self.how == OWN else self.reduce
        return made or self.call(reduce, (self.layer_node, self.found_node, self._at_edges(value), how))

    @staticmethod
    def reduce(layer: Any, found: Edges, messages: Tensor, how: str) -> Any:
        """Reduces stored messages."""
        return terms.reduce(messages, found.dst, how)

    def _generated(self, value: Any, how: str) -> Node | None:
        """One generated kernel for an elementwise expression; None if it does not fit."""
        if value.made is not None:
            return None
        leaves = _Leaves(value.row[0])
        try:
            expression = self._expression(value, leaves)
        except NoPlan:
            return None
        reads = {"dst", "src", "mapped"} if how == "none" else {"dst", "src"}
        if expression[0] == "leaf" or not reads & set(leaves.places):
            return None
        self.gains["one generated kernel" if how != "none" else "rows per edge by a generated kernel"] = None
        operands = (self.found_node, expression, tuple(leaves.places), how, *leaves.nodes)
        return self.call(terms.by_expression, operands)

    def _generated_rows(self, value: Any, how: str) -> Node | None:
        """One generated kernel that computes several rows per node; None if no kernel fits."""
        if value.made is not None or how not in ("sum", "mean"):
            return None
        try:
            rows = self._rows_of(value)
            leaves = _Leaves(rows[0].row[0])
            if len(rows) > _MOST_ROWS or leaves.width < _LEAST_WIDTH or len({row.row for row in rows}) > 1:
                return None
            roots = tuple((how, self._expression(row, leaves)) for row in rows)
        except NoPlan:
            return None
        if not {"dst", "src"} & set(leaves.places):
            return None
        self.gains["one generated kernel"] = None
        operands = (self.found_node, roots, tuple(leaves.places), *leaves.nodes)
        return self.method("reshape", (self.call(terms.by_expressions, operands), (-1, *value.row)))

    def _expression(self, value: Any, leaves: _Leaves) -> Any:
        """The expression of a value for a generated kernel; values that it cannot compute become leaves.

        Raises:
            NoPlan: a constant is neither a number nor a row.
        """
        if isinstance(value, (int, float)):
            return value
        if isinstance(value, _Whole):
            size = tuple(value.meta.shape) if isinstance(value.meta, Tensor) else (0,)
            if value.special or math.prod(size) not in (1, leaves.width) or math.prod(size[:-1]) != 1:
                raise NoPlan
            return leaves.add("whole", self._once("reshape", value.node, (-1,)))
        if _is(value, "mapped") and _has_kernel(*value.options):
            name, *options = value.options
            options = [] if name == "softplus" else options
            return (name, self._expression(value.parts[0], leaves), *options)
        if isinstance(value, _Of) and value.kind in _PAIRS:
            return (_PAIRS[value.kind][1], *[self._expression(part, leaves) for part in value.parts])
        if _is(value, "linear") and value.options[1] and value.row == (leaves.width,) and value.made is None:
            weight, bias = value.options  # the kernel adds the bias, so that it also sums the bias's gradient
            map_ = self.call(F.linear, (self._at_edges(value.parts[0]), weight))
            return ("add", leaves.add("edge", map_), leaves.add("whole", bias))
        if not isinstance(value, _Sum) or value.row not in ((leaves.width,), (1,)):
            return leaves.add("edge", self._at_edges(value))
        found: list[Any] = [leaves.add(place, node) for place, node in value.terms.items() if place != "edge"]
        mapping = value.mapping
        if mapping is not None and mapping.width <= _MOST_FEATURES and value.row != (1,):
            found.append(leaves.add_mapped(mapping.features, mapping.weight))
        elif value.edge is not None:
            found.append(leaves.add("edge", value.edge))
        if value.bias is not None:
            found.append(self._expression(value.bias, leaves))
        return functools.reduce(lambda left, right: ("add", left, right), found)

    def _reduced_terms(self, value: _Sum, how: str) -> Node | None:
        x = self._settled(value)
        if x.src is None or (x.edge is not None and how in ("max", "min")):
            return None
        self.gains[f"{how} term by term"] = None
        return self.call(terms.reduce_terms, (self.found_node, x.dst, x.src, x.edge, how))

    def _weighted(self, value: _Of, how: str) -> Node | None:
        """A sparse product: rows of the sources, weighted by a number per edge, or per edge and head."""
        for weights, rows in (value.parts, value.parts[::-1]):
            if not isinstance(rows, _Sum) or list(rows.terms) != ["src"] or not _is_per_edge(weights):
                continue
            if value.meta.shape == rows.meta.shape and weights.row in (
                (1,) * len(rows.row),
                (*rows.row[:-1], 1),
            ):
                self.gains["spmm"] = None
                operands = (self._at_edges(weights), self._settled(rows).src, math.prod(weights.row), how)
                return self.call(terms.weighted, (self.found_node, *operands))
        return None

    def _by_kernel(self, value: Any) -> Node | None:
        if _is(value, "mapped") and value.options[0] == "relu" and len(value.row) == 1:
            return self._gine(value.parts[0])
        if not _is(value, "product"):
            return None
        for weights, rows in (value.parts, value.parts[::-1]):
            if isinstance(rows, _Sum) and rows.src is not None and rows.dst is None and value.row == rows.row:
                made = self._gated(weights, rows) or self._attention(weights, rows)
                if made is not None:
                    return made
        return None

    def _kernel(self, name: str, function: Callable[..., Tensor], *operands: Any) -> Node:
        self.gains[name] = None
        return self.call(function, (self.found_node, *operands))

    def _gine(self, x: Any) -> Node | None:
        if not isinstance(x, _Sum) or x.dst is not None or x.src is None or x.edge is None:
            return None
        mapping = x.mapping
        if mapping is not None and mapping.width <= _MOST_FEATURES:
            bias = x.bias if x.bias is not None and x.bias.meta.shape == x.row else None
            x = x if bias is not None else self._settled(x)
            added = None if bias is None else bias.node
            operands: tuple[Any, ...] = (x.src, mapping.features, mapping.weight, added)
        else:
            x = self._settled(x)
            operands = (x.src, x.edge, None, None)
        return self._kernel("gine_aggregate", terms.by_gine_aggregate, *operands)

    def _gated(self, gates: Any, rows: _Sum) -> Node | None:
        if (
            not _is(gates, "mapped")
            or gates.options[0] != "sigmoid"
            or gates.row != rows.row
            or len(rows.row) != 1
        ):
            return None
        inner = gates.parts[0]
        if not isinstance(inner, _Sum) or (inner.dst is None and inner.src is None):
            return None
        both = [self._settled(inner), self._settled(rows)]
        mappings = [x.mapping for x in both if x.edge is not None]
        if not _share_features(mappings):
            return None
        if not self.found.dst.index.is_cuda and (mappings or gates.is_shared):
            # Gates that other values read are stored anyway. For mapped edge features, the CPU kernel is
            # slower.
            return None
        if self.generates and mappings:
            return None  # on ogbn-arxiv (H100), gated_aggregate takes 11 ms and a generated kernel 8 ms
        weights = [x.mapping.weight if x.mapping is not None else None for x in both]
        edge = (mappings[0].features, *weights) if mappings else (None, None, None)  # type: ignore[union-attr]
        operands = (both[0].dst, both[0].src, both[1].src, *edge)
        return self._kernel("gated_aggregate", terms.by_gated_aggregate, *operands)

    def _attention(self, weights: Any, rows: _Sum) -> Node | None:
        weights, p = _unshaped(weights), 0.0
        if _is(weights, "dropped"):
            (p,), weights = weights.options, _unshaped(weights.parts[0])
        if not _is(weights, "softmax") or weights.made is not None:
            return None
        heads = math.prod(weights.row)
        if heads != 1 and (len(rows.row) != 2 or rows.row[0] != heads):
            return None
        scores = _unshaped(weights.parts[0])
        if _is(scores, "dot"):
            return self._gatv2(scores, rows, p, heads) or self._dot_product(scores, rows, p, heads)
        slope = 1.0
        if _is(scores, "mapped") and scores.options[0] == "leaky_relu":
            slope, scores = float(scores.options[1]), _unshaped(scores.parts[0])
        if not isinstance(scores, _Sum) or rows.edge is not None:
            return None
        scores, v = self._settled(scores), self._settled(rows).src
        ends = [end for end in (scores.dst, scores.src) if end is not None and end.target is terms.scores]
        if scores.edge is None and len(ends) == 2:
            operands = (*[part for end in ends for part in end.args], v, slope, p, heads)
            return self._kernel("additive_attention", terms.by_attention_layer, *operands)
        operands = (scores.dst, scores.src, scores.edge, v, slope, p, heads)
        return self._kernel("additive_attention", terms.by_additive_attention, *operands)

    def _dot_product(self, scores: _Of, rows: _Sum, p: float, heads: int) -> Node | None:
        scale, bias = scores.options
        for q, k in (scores.parts, scores.parts[::-1]):
            if not isinstance(q, _Sum) or list(q.terms) != ["dst"] or not isinstance(k, _Sum):
                continue
            if k.src is None or k.dst is not None or q.row != k.row:
                continue
            k, v = self._settled(k), self._settled(rows)
            edge: tuple[Any, ...] = (None, None)
            if k.edge is not None or v.edge is not None:
                if (
                    k.mapping is None
                    or k.mapping != v.mapping
                    or k.row != v.row
                    or not _share_features([k.mapping])
                ):
                    return None
                edge = k.mapping[:2]
            operands = (self._settled(q).dst, k.src, v.src, *edge, scale, bias, p, heads)
            return self._kernel("attention", terms.by_attention, *operands)
        return None

    def _gatv2(self, scores: _Of, rows: _Sum, p: float, heads: int) -> Node | None:
        for mapped, att in (scores.parts, scores.parts[::-1]):
            if not _is(mapped, "mapped") or mapped.options[0] != "leaky_relu" or not isinstance(att, _Whole):
                continue
            inner = mapped.parts[0]
            if (
                not isinstance(inner, _Sum)
                or inner.dst is None
                or inner.src is not rows.src
                or rows.edge is not None
            ):
                continue
            x = self._settled(inner)
            is_whole = inner.row == rows.row and att.meta.numel() == math.prod(inner.row)
            if (
                not is_whole
                or rows.bias is not None
                or x.src is not rows.src
                or scores.options != (1.0, None)
            ):
                continue
            if x.edge is not None and not _share_features([x.mapping]):
                continue
            edge = x.mapping[:2] if x.mapping is not None else (None, None)
            operands = (x.dst, x.src, *edge, att.node, mapped.options[1], p, heads)
            return self._kernel("gatv2_attention", terms.by_gatv2_attention, *operands)
        return None


class _Leaves:
    """The tensors that a generated kernel reads; each tensor is listed once."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.places: list[str] = []
        self.nodes: list[Any] = []

    def add(self, place: str, node: Any) -> tuple[str, int]:
        """Returns the leaf for a node of the plan's graph; adds a new leaf if the node has none yet."""
        for n, known in enumerate(zip(self.places, self.nodes, strict=True)):
            if known == (place, node):
                return ("leaf", n)
        self.places.append(place)
        self.nodes.append(node)
        return ("leaf", len(self.nodes) - 1)

    def add_mapped(self, features: Any, weight: Any) -> tuple[str, int]:
        """Adds the leaf of mapped features, followed by the leaf of their weight."""
        for n, place in enumerate(self.places):
            if place == "mapped" and self.nodes[n : n + 2] == [features, weight]:
                return ("leaf", n)
        self.places += ["mapped", "weight"]
        self.nodes += [features, weight]
        return ("leaf", len(self.nodes) - 2)


def _has_kernel(name: str, *options: Any) -> bool:
    """Returns whether generated kernels support an elementwise function with the given options."""
    return name in OPERATORS and (name != "softplus" or options == (1.0, 20.0))


def _share_features(mappings: Sequence[_Mapping | None]) -> bool:
    """True if a kernel can project the edge features: there are few, and all maps have the same input."""
    known = [mapping for mapping in mappings if mapping is not None and mapping.width <= _MOST_FEATURES]
    return len(known) == len(mappings) and len({mapping.features for mapping in known}) <= 1


def _columns(parts: Sequence[_Sum]) -> list[tuple[_Sum, int, int]]:
    """Concatenated sums, each with its first column and the column after its last."""
    found, first = [], 0
    for part in parts:
        found.append((part, first, first + part.row[-1]))
        first += part.row[-1]
    return found
