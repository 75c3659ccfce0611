"""Finds message plans for PyG's layers, and runs them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.dense import Linear as PygLinear

from fastsparse_core.message_plans.plan import INDICES, OWN, PER_EDGE, NoPlan, Plan, Planner, by_plan
from fastsparse_core.ops._autocast import autocast_dtype, is_any_autocast_enabled
from fastsparse_pyg.nn.layer_arguments import Arguments
from fastsparse_pyg.nn.message_pattern import SCATTER, SOFTMAX, Pattern
from fastsparse_pyg.nn.segments import is_softmax_of_messages

#: Layer -> the plan that computed its messages in the last call, or the reason why there is none.
planned: Any = WeakIdKeyDictionary()


#: Returned in place of a plan if, for few edges, the plan takes more time on the host than PyG's code.
FEW = "few edges"
#: Reasons in `planned` why messages that look like weighted copies of features are computed per edge.
PER_FEATURE = "weights per feature"
OTHER_FORM = "the dtype or shape of the features"


def reduce_by_plan(layer: Any, pattern: Pattern, found: Arguments, how: str, are_few: bool = False) -> Any:
    """Reduces the messages of a pattern by its plan; returns None if it has no plan, or `FEW`.

    Args:
        layer: the layer.
        pattern: pattern of its `message` or `edge_update`.
        found: arguments of its methods.
        how: the reduction; "" if the layer's own code reduces; `PER_EDGE` to return the messages unreduced;
            `OWN` if the pattern contains the reduction.
        are_few: whether there are so few edges that launch overhead decides the time.
    """
    is_copy = pattern.kind == "product" and pattern.compute is None
    is_left = bool(pattern.assigned) and pattern.kind != "any"
    if pattern.graph is None or not how or is_copy or is_left:
        return None
    if how == "softmax" and not is_softmax_of_messages(layer._modules["aggr_module"]):
        return None
    kind = _kind_of(found, pattern)
    if kind is None:
        return None
    mixed = autocast_dtype(found.dst.index) if is_any_autocast_enabled() else None

    def make() -> Plan | str:
        plan = _find_plan(layer, pattern, found, how, mixed, are_few)
        is_same = pattern.kind == "product" and isinstance(plan, Plan) and plan.gains == ("spmm",)
        if are_few and isinstance(plan, Plan) and not is_same and not plan.is_short:
            return FEW
        return "" if is_same else plan

    out, plan = by_plan(pattern.plans, (how, kind, mixed, are_few), layer, found, make)
    if plan is FEW:
        return FEW
    if how != PER_EDGE:
        planned[layer] = plan
    return out


def _kind_of(found: Arguments, pattern: Pattern) -> tuple[Any, ...] | None:
    """Returns a key of the arguments' properties on which a plan depends; None if no plan supports them."""
    dst, src = found.dst, found.src
    if not dst.is_current() or dst.num_edges < max(dst.num_nodes, src.num_nodes):
        return None
    kind: list[Any] = []
    assert pattern.graph is not None
    for node in pattern.graph.nodes:
        name = node.target
        if node.op != "placeholder":
            break
        if name in found.special or name in INDICES:
            continue
        value, place = found.placed(name)
        if type(value) is Tensor or type(value) is nn.Parameter:
            if name in found.nodes and (
                value.dim() < 2 or found.node_dim % value.dim() or not value.is_floating_point()
            ):
                return None
            kind.append((value.dtype, place != "", value.shape[1:] if place else value.shape))
        elif value is None or isinstance(value, (bool, int, float, str)):
            kind.append(value)
        else:
            return None
    return tuple(kind)


def _find_plan(
    layer: nn.Module, pattern: Pattern, found: Arguments, how: str, mixed: torch.dtype | None, are_few: bool
) -> Plan | str:
    """Returns the plan of a traced message; or the reason why no plan is faster than the message itself."""
    graph, assigned = pattern.graph, pattern.assigned
    assert graph is not None
    try:
        planner = _Planner(layer, found, mixed)
        if are_few:  # generated kernels compile for a second, and launch more slowly than PyG's operators
            planner.generates = False
        plan = planner.plan(graph, how, assigned)
        if mixed is None:
            return plan
        if how == OWN:
            raise NoPlan
        values = planner.without_edges(graph)
        own = {name: values[node].dtype for name, node in (assigned or {}).items()}
        return plan._replace(dtypes=(values[list(graph.nodes)[-1].args[0]].dtype, own))
    except NoPlan as reason:
        return str(reason)
    except Exception:  # the operators run on tensors without content, and may raise any error
        return ""


class _Planner(Planner):
    linears: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, PygLinear)

    @staticmethod
    def reduce(layer: Any, found: Any, messages: Tensor, how: str) -> Any:
        """Lets the layer reduce the messages, because it may have its own aggregation."""
        return layer._reduced(messages, found, how)

    def _value(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        if node.target is SOFTMAX:
            return self._softmax(*args, **kwargs)
        if node.target is SCATTER:
            return self.scattered(*args, **kwargs)
        return super()._value(node, args, kwargs)

    def _softmax(
        self, src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None, dim: Any = 0
    ) -> Any:
        index, ptr, num_nodes = (getattr(item, "special", "") or item for item in (index, ptr, num_nodes))
        fits = index == "index" and ptr in (None, "ptr") and num_nodes in (None, "size_i", "dim_size")
        if not fits or dim != 0:
            raise NoPlan
        return self.softmax(src)
