"""Runs any subclass of MessagePassing on the kernels: keeps its methods, but replaces `propagate`."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv import MessagePassing

from fastsparse_core import Adjacency
from fastsparse_core.fallback import Reason
from fastsparse_core.log import info_once
from fastsparse_core.message_plans.ends import EdgeEnd
from fastsparse_core.message_plans.plan import OWN, PER_EDGE, Plan
from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_core.ops._eager import has_plain_call, is_plain_eager, why_watched
from fastsparse_pyg import fallback
from fastsparse_pyg.caching import is_new, logger, lookup
from fastsparse_pyg.fallback import FEW_EDGES, FEW_EDGES_ON_GPU
from fastsparse_pyg.graph import edges_made_anew, for_pyg, is_sparse_matrix, to_edge_index
from fastsparse_pyg.nn.base import FastConv, are_few_on_gpu, has_message_hook, known
from fastsparse_pyg.nn.joint_maps import JointMaps, passed_names
from fastsparse_pyg.nn.layer_arguments import EMPTY, Arguments, Signature, pointer
from fastsparse_pyg.nn.message_kernels import (
    NO_COPIES,
    Copies,
    GatheredMessages,
    evaluate,
    kernel_of,
    reduce_by_kernel,
)
from fastsparse_pyg.nn.message_pattern import Pattern, find_joint_pattern, find_pattern
from fastsparse_pyg.nn.message_planner import (
    FEW,
    OTHER_FORM,
    PER_FEATURE,
    PlannedCall,
    planned,
    reduce_by_plan,
)
from fastsparse_pyg.nn.segments import aggregate, reduction_of

#: Largest number of patterns per class and method. Without a limit, a layer whose attributes change in every
#: call would be traced in every call.
_MOST_PATTERNS = 8
#: Up to this multiple of `FEW_EDGES_ON_GPU` (131,072 edges), launch overhead decides PyG's time. For so few
#: edges, a plan is used only if it needs less time on the host than PyG's code (`Plan.is_short`). Layers that
#: copy features need a single kernel and always use it. Measured with a plan that is not short, forward and
#: backward, on an H100 with a busy host: an edge MLP in bfloat16 on 10,556 edges took 1.06 ms with PyG and
#: 2.17 ms with the plan. Five such layers on batches of 26,000 new edges took 5.7 ms and 13.2 ms.
_TIMES_FEW = 4
_FEW_ON_GPU = Reason(f"at most {_TIMES_FEW * FEW_EDGES_ON_GPU:,} edges on a GPU", "", "PyG")
_NEW_ON_GPU = Reason(f"at most {_TIMES_FEW * FEW_EDGES_ON_GPU:,} edges on a GPU, in a new tensor", "", "PyG")
FEW_ON_CPU = Reason(f"fewer than {FEW_EDGES:,} edges on the CPU", "", "PyG")
#: PyG documents that, with this flow, the second tensor of a pair belongs to the sources. PyG's generated
#: code reads the first one.
_TURNED_PAIR = Reason(
    "a pair of features with flow='target_to_source', which PyG's code and documentation order differently",
    fallback.USUAL_FLOW,
)
_POSITIONAL = Reason("propagate() with positional arguments", "Pass its arguments by name")
_SIZE = "Pass `size=(num_src, num_dst)` to propagate()"
_16_BITS = (torch.float16, torch.bfloat16)
_ANY = Pattern(reason="its attributes change")
_UNKNOWN: Any = object()
_is_tracing = torch._C._is_tracing
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling

_classes: dict[type, type[AnyLayer]] = {}


class AnyLayer(MessagePassing):
    """First base of the classes ``(AnyLayer, TheLayer)`` that :func:`accelerated_class` makes.

    `forward`, `message`, `aggregate` and `update` are the layer's own. `propagate` and `edge_updater` are
    replaced: they gather features per edge and reduce messages per node without atomics. If `message` is a
    (weighted) copy of the source's features, one :func:`fastsparse_core.spmm` replaces all messages.
    """

    _original: ClassVar[type[MessagePassing]]
    _patterns: ClassVar[dict[Any, list[Pattern]]]
    _signature: ClassVar[Signature | None]
    #: Kind of a call (aggregation, names and dtypes of arguments) -> the fast path for such calls; False if
    #: there is no fast path.
    _served: ClassVar[dict[Any, Copies | list[PlannedCall] | Literal[False]]]
    #: Aggregation and names of arguments -> the steps for few edges; None: PyG's `propagate` runs.
    _gathered: ClassVar[dict[Any, GatheredMessages | None]]
    #: `forward`, its number of arguments by position, names of the others -> linear maps to join, or None.
    _joint: ClassVar[dict[Any, JointMaps | None]]
    #: Aggregation -> whether PyG's code handles few edges on a GPU, because it takes less time on the host
    #: than the plan. None: no single kernel computes the layer, and its plan is not known yet.
    _left: ClassVar[dict[type, bool | None]]

    flow: str
    node_dim: int

    def propagate(self, edge_index: Any, *args: Any, size: Any = None, **kwargs: Any) -> Any:
        """Replaces PyG's `propagate`; takes the same arguments."""
        kind = count = None
        if not (args or _is_dynamo_compiling() or _is_tracing()):
            # This block makes as few checks as possible, because host time per call decides the time of a
            # training step on small graphs.
            aggregation = self.__dict__["_modules"].get("aggr_module").__class__
            count = _few_edges(edge_index, kwargs)
            if count is not None:
                is_first = aggregation not in self._left
                if is_first:
                    self._left[aggregation] = None if self._takes_more_kernels() else False
                new = bool(count) and is_new(edge_index)
                if not count or new or self._left[aggregation]:
                    if is_first:
                        fallback.tell(type(self).__name__, _NEW_ON_GPU if count else FEW_ON_CPU)
                    steps = self._gathered.get((aggregation, *kwargs), _UNKNOWN)
                    if steps is _UNKNOWN:
                        steps = self._few_steps(aggregation, kwargs)
                    if steps is not None and size is None:
                        out = steps.reduce(self, edge_index, kwargs, bool(count) and not new)
                        if out is not None:
                            return out
                    edge_index = edge_index if edge_index.dtype is torch.int64 else for_pyg(edge_index)
                    return super().propagate(edge_index, size=size, **kwargs)
            # Inlined: a function call per argument would take as long as the rest of this block.
            kind = (
                aggregation,
                *kwargs,
                *[item.dtype if type(item) is Tensor else _kind_of(item) for item in kwargs.values()],
            )
            served = self._served.get(kind)
            if served and size is None:
                if isinstance(served, list):
                    for each in served:
                        out = each.reduce(self, edge_index, kwargs, count is not None)
                        if out is not None:
                            return out
                else:
                    out = served.reduce(self, edge_index, kwargs)
                    if out is NO_COPIES:
                        self._served[kind] = False
                    elif out is not None:
                        return out
        reason = _POSITIONAL if args else self._reason(edge_index)
        if reason is None:
            found = self._collect_lazily(
                edge_index, size, kwargs, self._names().lifted, self._has_own_aggregate()
            )
            if isinstance(found, Arguments):
                how, pattern = self._kernel_reduce(), self._pattern("message", found)
                copies = Copies.of(self, pattern, how, self._names(), kwargs)
                if copies is not None:
                    self._served.setdefault(kind, copies)
                out, plan = self._propagate_lazily(found, pattern, how, count is not None)
                if out is not FEW:
                    if kind is not None and size is None and plan is not None:
                        self._serve(kind, pattern, plan, how, found, count is not None)
                    return out
                reason = _FEW_ON_GPU
            else:
                reason = found
                if count is not None and self._left.get(aggregation) is None:
                    self._left[aggregation] = True
        call, edge_index = super().propagate, for_pyg(edge_index)
        return fallback.run(type(self).__name__, reason, call, edge_index, *args, size=size, **kwargs)

    def edge_updater(self, edge_index: Any, *args: Any, size: Any = None, **kwargs: Any) -> Any:
        """Replaces PyG's `edge_updater`; takes the same arguments."""
        if args or _is_dynamo_compiling() or _is_tracing():
            return super().edge_updater(for_pyg(edge_index), *args, size=size, **kwargs)
        if _few_edges(edge_index, kwargs) is None and self._reason(edge_index) is None:
            names = self._names()
            found = self._collect_lazily(edge_index, size, kwargs, names.edge_lifted, True)
            if isinstance(found, Arguments):
                return self._computed("edge_update", names.edge_update, found)
        return super().edge_updater(for_pyg(edge_index), size=size, **kwargs)

    # ---------------------------------------------------------------- when PyG's code runs

    def _reason(self, edge_index: Any) -> Reason | None:
        """Returns why PyG's own code has to run; None if the kernels support the call."""
        state = self.__dict__
        if torch.compiler.is_compiling():
            return fallback.COMPILED
        if state["_explain"]:
            return fallback.EXPLAIN_MODE
        if state["_decomposed_layers"] > 1:
            return fallback.DECOMPOSED
        if has_message_hook(state):
            return fallback.MESSAGE_HOOK
        if is_sparse_matrix(edge_index):
            return fallback.SPARSE_MATRIX
        if torch.jit.is_tracing():
            return fallback.TRACED_BY_JIT
        if isinstance(edge_index, EdgeIndex):
            edge_index = edge_index._data
        if not isinstance(edge_index, Tensor):
            return Reason(f"edges as {type(edge_index).__name__}", fallback.PLAIN_EDGES)
        dim, dtype = edge_index.dim(), edge_index.dtype
        if dim != 2 or dtype not in (torch.int64, torch.int32):
            return Reason(f"edges of dtype {dtype} and {dim} dimensions", fallback.PLAIN_EDGES)
        if not is_plain_eager(edge_index):
            return fallback.watched(why_watched(edge_index)) or Reason(
                "a subclass of Tensor", fallback.PLAIN_EDGES
            )
        return None

    # ---------------------------------------------------------------- arguments

    def _names(self) -> Signature:
        names = type(self)._signature
        if names is None:
            names = type(self)._signature = Signature.of(self)
        return names

    def _collect_lazily(
        self,
        edge_index: Any,
        size: Any,
        kwargs: dict[str, Any],
        lifted: tuple[tuple[str, str, bool], ...],
        sizes_itself: bool,
    ) -> Arguments | Reason:
        """Returns the arguments of the layer's methods, gathered at first use; or why PyG's code has to run.

        Args:
            edge_index: argument of `propagate`.
            size: argument of `propagate`.
            kwargs: keyword arguments of `propagate`.
            lifted: the methods' arguments that are gathered per edge, such as `x_j`.
            sizes_itself: whether the layer's own code, not the number of destinations, decides how many rows
                the result has.
        """
        if (
            type(edge_index) is Tensor and edge_index.shape[0] == 2
        ):  # the most frequent case, for which `_check_input` checks nothing else
            sizes = [None, None] if size is None else list(size)
        else:
            sizes = self._check_input(edge_index, size)
        i, j = (1, 0) if self.flow == "source_to_target" else (0, 1)
        nodes: dict[str, tuple[Any, bool]] = {}
        for name, base, at_dst in lifted:
            dim = i if at_dst else j
            data = kwargs.get(base, EMPTY)
            if isinstance(data, (tuple, list)):
                assert len(data) == 2
                if i == 0 and data[0] is not data[1]:
                    return _TURNED_PAIR
                if isinstance(data[1 - dim], Tensor):
                    self._set_size(sizes, 1 - dim, data[1 - dim])
                data = data[dim]
            if isinstance(data, Tensor):
                self._set_size(sizes, dim, data)
            nodes[name] = (data, at_dst)
        num_dst = sizes[i] if sizes[i] is not None else sizes[j]
        num_src = sizes[j] if sizes[j] is not None else sizes[i]
        if num_dst is None or num_src is None:
            return Reason("the number of nodes is not known before the messages are computed", _SIZE)
        edges = edge_index._data if isinstance(edge_index, EdgeIndex) else edge_index
        options = (num_dst, num_src, self.flow, False)
        adj = known(edge_index, options)
        if adj is None:
            try:
                adj = lookup(edge_index, (edge_index,), options, lambda: edges_made_anew(edges, options))
            except IndexError:
                # Some indices exceed the rows of the features. PyG's code can still handle the call if it
                # reads no features at that end of the edges, and `size` was not given.
                if sizes[j] is not None and (sizes[i] is not None or not sizes_itself):
                    raise
                return Reason("the edges have more nodes at an end than the features have rows", _SIZE)
        return Arguments(
            self.node_dim,
            nodes,
            kwargs,
            self._names().defaults,
            EdgeEnd(adj, edges, i, True),
            EdgeEnd(adj, edges, j, False),
            {
                "adj": adj,
                "edge_index": edge_index,
                "adj_t": None,
                "size": sizes,
                "size_i": num_dst,
                "size_j": num_src,
                "dim_size": num_dst,
                "ptr": pointer(edge_index, i),
            },
        )

    # ---------------------------------------------------------------- messages

    def _propagate_lazily(
        self, found: Arguments, pattern: Pattern, how: str, are_few: bool = False
    ) -> tuple[Any, Plan | None]:
        """Returns the result, and the plan that computed it; (`FEW`, None) if PyG's code has to run."""
        out = plan = None
        if not how and self._has_own_aggregate():
            both = self._joint_pattern(found)
            out, plan = reduce_by_plan(self, both, found, OWN, are_few)
        if out is None:
            out, plan = reduce_by_plan(self, pattern, found, how, are_few)
        if are_few:
            aggregation = type(self._modules.get("aggr_module"))
            if out is FEW or (out is None and self._left.get(aggregation) is None):
                self._left[aggregation] = True
                return FEW, None
            self._left[aggregation] = False
        if out is None and kernel_of(pattern, how):
            out = reduce_by_kernel(self, pattern, found, how)
            if out is None:
                planned.set(self, OTHER_FORM)
        names = self._names()
        if out is None:
            messages = self._computed("message", names.message, found, has_plan=not how)
            out = self._reduced(messages, found, how)
        return self.update(out, **{name: found[name] for name in names.update}), plan

    def _computed(self, method: str, names: tuple[str, ...], found: Arguments, has_plan: bool = True) -> Any:
        """Computes a method's result per edge: by a plan, by its traced computation, or by the method."""
        pattern = self._pattern(method, found)
        out = reduce_by_plan(self, pattern, found, PER_EDGE)[0] if has_plan else None
        if out is not None:
            return out
        if pattern.kind == "any" and pattern.compute is not None:
            return evaluate(self, pattern, found)
        found.lift(names)
        return getattr(self, method)(**{name: found[name] for name in names})

    def _kernel_reduce(self) -> str:
        """The kernel's name for the layer's aggregation; "" if there is no kernel for it."""
        return "" if self._has_own_aggregate() else reduction_of(self._modules.get("aggr_module"))

    def _why_no_reduction(self) -> Reason | None:
        """Returns why PyG's code always reduces the messages; None if a kernel or the layer's code does."""
        if self._kernel_reduce() or self._has_own_aggregate():
            return None
        module = self._modules["aggr_module"]
        if module is not None and not has_plain_call(module):
            return fallback.HOOKED_AGGREGATION
        return Reason(f"aggr={self.aggr!r} has no kernel", "Use aggr='sum' or 'mean' or 'max' or 'min'")

    def _has_own_aggregate(self) -> bool:
        return type(self).aggregate is not MessagePassing.aggregate or "aggregate" in self.__dict__

    def _pattern(self, method: str, found: Arguments) -> Pattern:
        if method in self.__dict__:
            return _ANY
        return self._pattern_without(
            method, tuple([name for name in self._names().traced[method] if found.is_none(name)])
        )

    def _pattern_without(self, method: str, absent: tuple[str, ...]) -> Pattern:
        """Returns the pattern of a method for calls in which these arguments are None."""
        cls = type(self)
        key = (getattr(cls, method), absent)
        found = self._known_pattern(key, lambda: find_pattern(self, cls._original, method, absent))
        if found.is_untraced:
            info_once(logger, f"{cls.__name__}: {method}() runs per edge, because it {found.reason}")
        return found

    def _joint_pattern(self, found: Arguments) -> Pattern:
        """Returns the joint pattern of `message` and of the layer's own `aggregate`."""
        if "message" in self.__dict__ or "aggregate" in self.__dict__:
            return _ANY
        cls, traced = type(self), self._names().traced
        methods = ("message", "aggregate")
        absent = {method: tuple(name for name in traced[method] if found.is_none(name)) for method in methods}
        key = (*[getattr(cls, method) for method in methods], *absent.values())
        return self._known_pattern(key, lambda: find_joint_pattern(self, cls._original, absent))

    def _known_pattern(self, key: Hashable, find: Callable[[], Pattern]) -> Pattern:
        """Returns the stored pattern for a key that holds for this layer; traces and stores it if missing."""
        known = self._patterns.setdefault(key, [])
        for pattern in known:
            if pattern.holds_for(self):
                return pattern
        if len(known) == _MOST_PATTERNS:
            return _ANY
        known.append(find())
        return known[-1]

    def _serve(
        self, kind: Any, pattern: Pattern, plan: Plan, how: str, found: Arguments, are_few: bool
    ) -> None:
        """Stores the fast path for calls like the one that has just been computed, if there is one."""
        served = self._served.get(kind) or []
        if type(served) is not list or len(served) == _MOST_PATTERNS:
            return
        call = PlannedCall.of(self, pattern, plan, how, self._names(), found, are_few)
        if call is not None and not any(each[1:] == call[1:] for each in served):
            self._served[kind] = [*served, call]

    def _few_steps(self, aggregation: type, given: dict[str, Any]) -> GatheredMessages | None:
        """Returns the steps for calls with few edges and these arguments; None if PyG's `propagate` runs."""
        pattern = self._pattern_without("message", ()) if "message" not in self.__dict__ else _ANY
        steps = GatheredMessages.of(self, pattern, self._kernel_reduce(), self._names(), given)
        self._gathered[(aggregation, *given)] = steps
        return steps

    def _takes_more_kernels(self) -> bool:
        """True if the layer needs more than one kernel.

        One kernel suffices if it gathers the features, reads given edge values, and reduces the messages.
        """
        pattern = self._pattern_without("message", ()) if "message" not in self.__dict__ else _ANY
        read = {name for name, _, _ in self._names().lifted}
        return not kernel_of(pattern, self._kernel_reduce()) or not read.isdisjoint(pattern.names)

    def _reduced(self, messages: Any, found: Arguments, how: str) -> Any:
        dim = self.node_dim
        if (
            how
            and type(messages) is Tensor
            and messages.is_floating_point()
            and -messages.dim() <= dim < messages.dim()
            and messages.size(dim) == found.dst.num_edges
        ):
            out = aggregate(messages, found.dst, how, self._modules["aggr_module"], dim)
            if out is not None:
                return out
        if reason := self._why_no_reduction():
            fallback.tell(type(self).__name__, reason)
        return self.aggregate(messages, **{name: found[name] for name in self._names().aggregate})

    # ---------------------------------------------------------------- the accelerated and the original class

    @classmethod
    def forget_reasons(cls) -> None:
        """Makes the next call report the reason for small graphs again; it is reported once per process."""
        cls._left.clear()

    def _shown(self) -> str:
        """Returns the text for reports: the plan of the messages, or what computes them without a plan."""
        plan = planned.get(self, "")
        if plan and not isinstance(plan, str):
            return str(plan)
        how = self._kernel_reduce()
        pattern = self._pattern_without("message", ()) if "message" not in self.__dict__ else _ANY
        kernel = kernel_of(pattern, how)
        if kernel and plan not in (PER_FEATURE, OTHER_FORM):
            return f"{pattern}: {kernel} ({how})"
        cause = f"it {pattern.reason}" if pattern.is_untraced else f"of {plan}" if plan else ""
        where = "message() per edge" + (f", because {cause}" if cause else "")
        if how:
            return f"{where}: segment {how}"
        reason = self._why_no_reduction()
        return f"{where}: " + (
            f"PyG reduces, {reason.message}"
            if reason
            else f"{self._original.__name__}'s aggregate(), with segment reductions"
        )

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        # The templates belong to the original class, from which this class inherits.
        accelerated = type(self)
        self.__class__ = accelerated._original
        try:
            self._set_jittable_templates(raise_on_error)
        finally:
            self.__class__ = accelerated

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the original class; loading makes the accelerated class again."""
        how, what, *rest = super().__reduce_ex__(protocol)
        if how is copyreg.__newobj__ and what[0] is type(self):  # type: ignore[attr-defined]
            return _new, (self._original, *what[1:]), *rest
        return how, what, *rest

    __prepare_scriptable__ = FastConv.__prepare_scriptable__


def _kind_of(argument: Any) -> Any:
    """Returns the dtype of a tensor, or of the first tensor of a pair; for other objects, their type."""
    if type(argument) is tuple and argument and type(argument[0]) is Tensor:
        return argument[0].dtype
    return argument.dtype if isinstance(argument, Tensor) else type(argument)


def _few_edges(edge_index: Any, given: dict[str, Any]) -> int | None:
    """Returns the number of edges if it is so small that PyG's code may be faster; None otherwise.

    On the CPU, PyG's code is faster for few edges, and the result is 0. The result is also None for 16-bit
    features, which PyTorch does not sum in float32, and under autocast on the CPU, so the kernels compute
    these calls. For few edges in other dtypes, PyTorch's sums on the CPU are reproducible, because one thread
    adds in order.
    """
    if type(edge_index) is not Tensor:
        return None
    count, is_mixed = edge_index.numel() // 2, is_any_autocast_enabled()
    if edge_index.is_cpu and count < FEW_EDGES and not is_mixed:
        count = 0
    elif not are_few_on_gpu(edge_index, _TIMES_FEW):
        return None
    for value in given.values():
        item = value[0] if isinstance(value, (tuple, list)) and value else value
        if isinstance(item, Tensor):
            return None if item.dtype in _16_BITS and not is_mixed else count
    return count


# ---------------------------------------------------------------- classes


def accelerated_class(original: type[MessagePassing]) -> type[AnyLayer]:
    """The class that replaces a layer's class."""
    found = _classes.get(original)
    if found is None:
        namespace: dict[str, Any] = {
            "__module__": original.__module__,
            "__doc__": original.__doc__,
            "_original": original,
            "_patterns": {},
            "_signature": None,
            "_served": {},
            "_gathered": {},
            "_left": {},
            "_joint": {},
            # After explain mode, PyG assigns this attribute to `propagate`.
            "_jinja_propagate": AnyLayer.propagate,
            "forward": _with_edge_list(original),
        }
        metaclass: Any = type(original)
        made = metaclass(f"Accelerated{original.__name__}", (AnyLayer, original), namespace)
        found = _classes[original] = made
    return found


def _new(original: type[MessagePassing], *args: Any) -> Any:
    return copyreg.__newobj__(accelerated_class(original), *args)  # type: ignore[attr-defined]


def _with_edge_list(original: type[MessagePassing]) -> Callable[..., Any]:
    """Wraps `forward` to replace an Adjacency by its edges, because PyG's layers do not support it.

    For few edges on a GPU, linear maps of one tensor are joined (:class:`JointMaps`).
    """

    @functools.wraps(original.forward)
    def with_edge_list(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward = original.forward  # read in every call, because users replace methods of classes, too
        for item in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(item, Adjacency):
                args = tuple(_edge_list(each, self.flow) for each in args)
                kwargs = {name: _edge_list(each, self.flow) for name, each in kwargs.items()}
                break
        if not (_is_dynamo_compiling() or _is_tracing()):
            maps = self._joint.get((forward, len(args), *kwargs), _UNKNOWN)
            if maps is _UNKNOWN:
                passed = passed_names(forward, len(args), tuple(kwargs))
                maps = JointMaps.of(self, forward, passed, self._names())
                self._joint[(forward, len(args), *kwargs)] = maps
            if maps is not None:
                given = dict(zip(maps.parameters, (*args, *kwargs.values()), strict=True))
                if are_few_on_gpu(given[maps.edge_index], _TIMES_FEW):
                    out = maps.run(self, given)
                    if out is not None:
                        return out
        return forward(self, *args, **kwargs)

    return with_edge_list


def _edge_list(item: Any, flow: str) -> Any:
    if not isinstance(item, Adjacency):
        return item
    if item.is_partitioned or item.is_padded or item.num_values != item.num_edges:
        raise ValueError(
            "edge_index: expected edges or a plain Adjacency for a layer without a drop-in, got "
            f"{item!r}, which is partitioned or padded, or replaces self loops of the edges; pass the edges"
        )
    edges = item.derived(f"fastsparse_pyg.edge_index.{flow}", lambda: to_edge_index(item, flow))
    if not torch.compiler.is_compiling():
        lookup(edges, (edges,), (*item.shape, flow, False), lambda: item)
    return edges
