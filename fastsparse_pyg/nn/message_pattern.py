"""Traces `message()` once to find out what it computes.

The result is a pattern: either a (weighted) copy of the source's features, or any other computation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch_geometric.utils
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch_geometric.nn.conv import MessagePassing

from fastsparse_core.message_plans.trace import Untraceable, holds, trace
from fastsparse_core.replacement import original_of
from fastsparse_pyg.nn.segments import softmax

#: PyG's own functions, also after `enable()`. A trace records a call of each as one step.
SOFTMAX = original_of(torch_geometric.utils.softmax)
SCATTER = original_of(torch_geometric.utils.scatter)
_FUNCTIONS = (SOFTMAX, SCATTER)
_MUL = (operator.mul, torch.mul, "mul")
_DIV = (operator.truediv, torch.div, torch.true_divide, "div")
#: A factor of a message, and True if the message is divided by this factor.
Factor = tuple[Node | float, bool]


@dataclass(frozen=True)
class Pattern:
    """The computation of a traced method.

    Attributes:
        kind: ``"product"``: features of the sources, weighted or not; ``"any"``: another
            computation.
        feature: argument whose rows are copied, "x_j".
        shape: trailing shape to which the method views the feature; None: no view.
        out_shape: trailing shape to which the method views the product; None: no view.
        compute: method of the layer that returns (weights per edge or the whole result, attributes to set);
            None: there are neither weights nor attributes, or the traced method itself has to run.
        names: arguments of ``compute``.
        is_weighted: whether the features are multiplied by weights.
        guards: attributes of the layer that the method reads, with their values in the trace.
        reason: why the kind is ``"any"``.
        graph: the trace.
        assigned: attributes that the method sets, with their nodes in the trace.
        plans: plans, by reduction and kind of arguments.
    """

    kind: Literal["product", "any"] = "any"
    feature: str = ""
    shape: tuple[int, ...] | None = None
    out_shape: tuple[int, ...] | None = None
    compute: Callable[..., tuple[Tensor | None, dict[str, Any]]] | None = None
    names: tuple[str, ...] = ()
    is_weighted: bool = False
    guards: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    graph: Graph | None = None
    assigned: Mapping[str, Node] = field(default_factory=dict)
    plans: dict[Any, list[Any]] = field(default_factory=dict)

    @property
    def is_untraced(self) -> bool:
        """True if the method could not be traced; `reason` says why."""
        return self.graph is None and bool(self.reason)

    def holds_for(self, layer: nn.Module) -> bool:
        """True if the layer's attributes have the same values as in the trace."""
        return holds(self.guards, layer)

    def __str__(self) -> str:
        if self.kind == "any":
            return f"any: {self.reason}" if self.reason else "any"
        return f"w * {self.feature}" if self.is_weighted else self.feature


def find_pattern(
    layer: MessagePassing, original: type[MessagePassing], method: str, absent: Iterable[str]
) -> Pattern:
    """Traces `message`, or another method of the layer's class, for calls in which ``absent`` are None.

    Args:
        layer: the layer.
        original: its class before it was accelerated.
        method: name of the method.
        absent: names of the arguments that are None.
    """
    guards: dict[str, Any] = {}
    try:
        body = getattr(type(layer), method)
        graph, assigned = trace(
            layer, original, body, guards, dict.fromkeys(absent), _FUNCTIONS, vars(MessagePassing)
        )
        found = _recognise(graph, assigned, guards)
        return replace(found, graph=graph, assigned=assigned)
    except Untraceable as reason:
        return Pattern(guards=guards, reason=str(reason))
    except Exception as error:  # symbolic tracing does not support all operations, and may raise any error
        said = str(error).splitlines()
        return Pattern(guards=guards, reason=f"cannot be traced ({(said or [type(error).__name__])[0][:60]})")


def find_joint_pattern(
    layer: MessagePassing, original: type[MessagePassing], absent: Mapping[str, Iterable[str]]
) -> Pattern:
    """Traces `message` and the layer's own `aggregate` as one graph.

    Args:
        layer: the layer.
        original: its class.
        absent: for both methods, the arguments that are None.
    """
    guards: dict[str, Any] = {}
    graph, assigned, copies = Graph(), dict[str, Node](), dict[Any, Any]()
    out: Any = None
    try:
        for method in ("message", "aggregate"):
            body, given = getattr(type(layer), method), dict.fromkeys(absent[method])
            part, sets = trace(layer, original, body, guards, given, _FUNCTIONS, vars(MessagePassing))
            placeholders = [node for node in part.nodes if node.op == "placeholder"]
            messages = placeholders[0] if method == "aggregate" else None
            for node in part.nodes:
                name = (node.op, node.target)
                if node is messages:
                    copies[node] = out
                elif node.op == "output":
                    out = torch.fx.map_arg(node.args[0], copies.__getitem__)
                elif node.op == "placeholder" and name in copies:
                    copies[node] = copies[name]
                elif (
                    node.target is operator.getitem
                    and node.args[0] is messages
                    and isinstance(out, (tuple, list))
                ):
                    copies[node] = out[node.args[1]]
                else:
                    copies[node] = copies[name] = graph.node_copy(node, copies.__getitem__)
            assigned.update({name: copies[node] for name, node in sets.items()})
        graph.output(out)
    except Exception as error:  # operations that symbolic tracing does not support, and `Untraceable`
        return Pattern(guards=guards, reason=str(error))
    ordered = Graph()  # a graph must begin with its placeholders
    nodes = sorted(graph.nodes, key=lambda node: node.op != "placeholder")
    new: dict[Node, Node] = {}
    for node in nodes:
        new[node] = ordered.node_copy(node, new.__getitem__)
    return Pattern(
        guards=guards, graph=ordered, assigned={name: new[node] for name, node in assigned.items()}
    )


def _recognise(graph: Graph, assigned: dict[str, Node], guards: dict[str, Any]) -> Pattern:
    out = list(graph.nodes)[-1].args[0]
    if not isinstance(out, Node):
        raise Untraceable("does not return a tensor")
    if any(node.target is torch._assert for node in graph.nodes):  # only plans can evaluate assertions
        return Pattern(guards=guards, reason="checks its arguments")
    found = _product(graph, out, assigned, guards)
    if found is not None:
        return found
    compute: Callable[..., Any] | None = None
    names: tuple[str, ...] = ()
    if any(node.target is SOFTMAX for node in graph.nodes):
        compute, names = _compile(graph, [(out, False)], assigned)
    why = "is not a weighted copy of the source's features"
    return Pattern(compute=compute, names=names, guards=guards, reason=why)


def _product(graph: Graph, out: Node, assigned: dict[str, Node], guards: dict[str, Any]) -> Pattern | None:
    viewed = _view(out)
    out, out_shape = viewed or (out, None)
    factors: list[Factor] = []
    if not _factors(out, False, factors):
        return None
    features = [
        (node, found)
        for node, inverse in factors
        if isinstance(node, Node) and not inverse and (found := _feature(node))
    ]
    if len(features) != 1:
        return None
    ((taken, (argument, shape)),) = features
    factors = [pair for pair in factors if pair[0] is not taken]
    if not factors and not assigned:
        return Pattern("product", argument, shape, out_shape, guards=guards)
    compute, names = _compile(graph, factors, assigned)
    return Pattern("product", argument, shape, out_shape, compute, names, bool(factors), guards)


def _factors(node: Any, inverse: bool, found: list[Factor]) -> bool:
    """Appends the factors of a product to ``found``; returns False if an argument is not a factor."""
    if isinstance(node, (int, float)):
        found.append((node, inverse))
        return True
    if not isinstance(node, Node):
        return False
    if len(node.args) == 2 and not node.kwargs and node.op in ("call_function", "call_method"):
        if node.target in _MUL:
            return all(_factors(each, inverse, found) for each in node.args)
        if node.target in _DIV:
            first, second = node.args
            return _factors(first, inverse, found) and _factors(second, not inverse, found)
    found.append((node, inverse))
    return True


def _feature(node: Node) -> tuple[str, tuple[int, ...] | None] | None:
    """Returns (argument, trailing shape) for an argument of the sources, or a view of one; else None."""
    if node.op == "placeholder":
        name = str(node.target)
        return (name, None) if name.endswith("_j") and name not in ("edge_index_j", "size_j") else None
    viewed = _view(node)
    found = _feature(viewed[0]) if viewed and viewed[0].op == "placeholder" else None
    return (found[0], viewed[1]) if viewed and found else None


def _view(node: Node) -> tuple[Node, tuple[int, ...]] | None:
    """Returns (viewed node, trailing shape) for ``view(-1, ...)``, which keeps the edges first; else None."""
    if node.op != "call_method" or node.target not in ("view", "reshape"):
        return None
    source, *sizes = node.args
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = list(sizes[0])
    if not isinstance(source, Node) or len(sizes) < 2 or sizes[0] != -1:
        return None
    if not all(isinstance(size, int) and size >= 0 for size in sizes[1:]):
        return None
    return source, tuple(sizes[1:])  # type: ignore[arg-type]


def _reciprocal(divisor: Any) -> Any:
    """Returns the reciprocal of a tensor or of a number; the number may be 0."""
    if isinstance(divisor, Tensor):
        return divisor.reciprocal()
    return 1 / divisor if divisor else math.copysign(math.inf, divisor)


def _compile(
    graph: Graph, factors: list[Factor], assigned: dict[str, Node]
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Compiles the part of a graph that computes weights and assigned attributes to a method of the layer."""
    needed: set[Node] = set()
    pending = [node for node, _ in factors if isinstance(node, Node)] + list(assigned.values())
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    part, copies = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node in needed:
            copies[node] = part.node_copy(node, lambda each: copies[each])
            copies[node].type = None
            if node.target is SOFTMAX:
                copies[node].target = softmax
    weight: Node | float | None = None
    for factor, inverse in factors:
        each = copies[factor] if isinstance(factor, Node) else factor
        if weight is None:
            weight = part.call_function(_reciprocal, (each,)) if inverse else each
        else:
            weight = part.call_function(operator.truediv if inverse else operator.mul, (weight, each))
    part.output((weight, {name: copies[node] for name, node in assigned.items()}))
    code = part.python_code("self")
    namespace = dict(code.globals)
    exec(code.src, namespace)
    names = tuple(str(node.target) for node in part.nodes if node.op == "placeholder")
    return namespace["forward"], names
