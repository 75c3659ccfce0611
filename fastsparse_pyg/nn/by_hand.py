"""Speeds up modules that gather and scatter by hand. Their own code runs, but with another class of index.

With an index of this class, ``x[row]`` and ``scatter_add_`` use the gathers and reductions of `segments`.
Rows are gathered when they are first read, so a linear map of gathered rows, or of their concatenation, runs
once per node.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import inspect
import itertools
import types
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing

from fastsparse_core.fallback import Reason
from fastsparse_core.fused.linear_before_sum import linear_before_sum
from fastsparse_core.message_plans.ends import EdgeEnd, gather, reduce
from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_core.ops._eager import is_plain_eager
from fastsparse_core.ops._edge_rows import lift
from fastsparse_pyg import fallback
from fastsparse_pyg.caching import is_new, lookup
from fastsparse_pyg.fallback import FEW_EDGES
from fastsparse_pyg.graph import edges_made_anew
from fastsparse_pyg.nn.any_layer import FEW_ON_CPU
from fastsparse_pyg.nn.base import FEW_ON_GPU, are_few_on_gpu, known
from fastsparse_pyg.nn.segments import NodeIndex

#: Names that such modules may use for their argument with the edges.
_EDGES = ("edge_index", "edges")
_OTHER_EDGES = Reason(
    "edges in a new tensor, not int64 of shape (2, num_edges), fewer than nodes, or without node features",
    "",
)
_classes: dict[type, type[ByHand]] = {}


def gathers_by_hand(module: nn.Module) -> bool:
    """True if a user's module reads rows of its edges: ``row, col = edge_index``, or ``edge_index[0]``."""
    klass = type(module)
    if klass.__module__.startswith(("torch.", "torch_geometric.")) or isinstance(
        module, torch.jit.ScriptModule
    ):
        return False
    if not isinstance(klass.forward, types.FunctionType) or _edge_parameter(klass) is None:
        return False
    if any(isinstance(each, MessagePassing) for each in module.modules()):
        return False  # message passing layers need the edges in their original form
    bodies = [
        item
        for each in klass.__mro__[: klass.__mro__.index(nn.Module)]
        for item in vars(each).values()
        if isinstance(item, types.FunctionType)
    ]
    return any(map(_takes_apart, bodies))


def _takes_apart(body: types.FunctionType) -> bool:
    for step, after in itertools.pairwise(dis.get_instructions(body)):
        is_index = after.opname.startswith("LOAD_") and after.argval in (0, 1, "unbind")
        is_taken = is_index or after.opname == "UNPACK_SEQUENCE"
        if is_taken and step.opname.startswith("LOAD_FAST") and step.argval in _EDGES:
            return True
    return False


def _edge_parameter(klass: Any) -> tuple[str, int] | None:
    """Returns the name and the position of the edges among the arguments of `forward`."""
    names = list(inspect.signature(klass.forward).parameters)[1:]
    return next(((name, position) for position, name in enumerate(names) if name in _EDGES), None)


# ---------------------------------------------------------------- the module


class ByHand(nn.Module):
    """First base of the classes ``(ByHand, TheModule)`` that :func:`by_hand_class` makes."""

    _original: ClassVar[type[nn.Module]]

    def _shown(self) -> str:
        """Text for reports."""
        return "its own code: gathers and sums on segments, linear maps of gathered rows per node"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the original class; loading makes this class again."""
        reduced: Any = super().__reduce_ex__(protocol)
        how, what, *rest = reduced
        if how is copyreg.__newobj__ and what[0] is type(self):  # type: ignore[attr-defined]
            return _new, (self._original, *what[1:]), *rest
        return how, what, *rest


def by_hand_class(original: type[nn.Module]) -> type[ByHand]:
    """The class that replaces a module's class."""
    found = _classes.get(original)
    if found is None:
        parameter = _edge_parameter(original)
        assert parameter is not None
        namespace = {
            "__module__": original.__module__,
            "__doc__": original.__doc__,
            "_original": original,
            "forward": _with_known_edges(original.forward, *parameter),
        }
        metaclass: Any = type(original)
        made = metaclass(f"Accelerated{original.__name__}", (ByHand, original), namespace)
        found = _classes[original] = made
    return found


def _new(original: type[nn.Module], *args: Any) -> Any:
    return copyreg.__newobj__(by_hand_class(original), *args)  # type: ignore[attr-defined]


def _with_known_edges(forward: Any, name: str, position: int) -> Any:
    @functools.wraps(forward)
    def with_known_edges(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            given: tuple[Any, ...] = args[position : position + 1]
            edges = kwargs[name] if name in kwargs else given[0] if given else None
            found = _known_edges(edges, (*args, *kwargs.values()))
            if isinstance(found, Reason):
                fallback.tell(type(self).__name__, found)
            elif name in kwargs:
                kwargs[name] = found
            else:
                args = (*args[:position], found, *args[position + 1 :])
        return forward(self, *args, **kwargs)

    return with_known_edges


def _known_edges(edges: Any, arguments: tuple[Any, ...]) -> Any:
    """Converts edges to `_Index` or `_Edges` objects; or returns why the module has to run unchanged."""
    is_pair = isinstance(edges, (list, tuple)) and len(edges) == 2
    parts: tuple[Any, ...] = (*edges,) if is_pair else (edges,)
    for part in parts:
        if type(part) is not Tensor or part.dtype is not torch.int64 or part.dim() != (1 if is_pair else 2):
            return _OTHER_EDGES
    first = parts[0]
    count = first.size(-1)
    if any(part.shape != first.shape for part in parts) or (not is_pair and first.size(0) != 2):
        return _OTHER_EDGES
    if first.is_cpu and count < FEW_EDGES:
        return FEW_ON_CPU
    if are_few_on_gpu(first):
        return FEW_ON_GPU
    if not is_plain_eager(first) or is_new(first):
        return _OTHER_EDGES
    of_nodes = (
        item.size(0)
        for item in arguments
        if isinstance(item, Tensor) and item.is_floating_point() and item.dim() > 1 and item.size(0) != count
    )
    num_nodes = next(of_nodes, None)
    if num_nodes is None or num_nodes > count:
        return _OTHER_EDGES
    options = (num_nodes, num_nodes, "source_to_target", False)
    adj = None if is_pair else known(first, options)
    if adj is None:
        try:
            adj = lookup(first, parts, options, lambda: edges_made_anew(_stacked(parts), options))
        except (IndexError, ValueError):
            return _OTHER_EDGES  # if ids exceed the number of nodes, the module's own code raises the error
    whole = adj.derived("fastsparse_pyg.by_hand", lambda: _stacked(parts)) if is_pair else first
    ends = tuple(_Index.of(EdgeEnd(adj, whole, row, row == 1)) for row in (0, 1))
    if is_pair:
        return ends if isinstance(edges, tuple) else list(ends)
    pair = first.as_subclass(_Edges)
    pair.ends = ends
    return pair


def _stacked(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.stack(parts) if len(parts) == 2 else parts[0]


# ---------------------------------------------------------------- tensors


class _Plain(Tensor):
    """Base of tensor subclasses that handle a few functions, and act as plain tensors in all others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            out = cls._taken_over(func, args, kwargs)
            return func(*args, **kwargs) if out is NotImplemented else out

    @staticmethod
    def _taken_over(func: Any, args: Any, kwargs: Any) -> Any:
        return NotImplemented

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).clone()


class _Edges(_Plain):
    """Edges whose two rows are `_Index` objects."""

    ends: tuple[NodeIndex, ...]

    @staticmethod
    def _taken_over(func: Any, args: Any, kwargs: Any) -> Any:
        edges = args[0]
        if func in (Tensor.unbind, torch.unbind) and args[1:] in ((), (0,)) and not kwargs:
            return edges.ends  # `row, col = edges` calls `unbind` too
        if func is Tensor.__getitem__ and type(args[1]) is int and args[1] in (0, 1, -1, -2):
            return edges.ends[args[1]]
        return NotImplemented


class _Index(NodeIndex):
    """The node ids of one end of the edges. Rows that are indexed with it are gathered when first read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handles `x[index]` and `index_select`."""
        if func is Tensor.__getitem__ and not kwargs:
            x, index = args
        elif func in (torch.index_select, Tensor.index_select) and len(args) == 3 and args[1] == 0:
            x, _, index = args
        else:
            return super().__torch_function__(func, types, args, kwargs)
        if not (type(index) is cls and isinstance(x, Tensor) and type(x) in (Tensor, nn.Parameter)):
            return super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            end = index.end
            if index.dim() != 1 or x.dim() < 1 or x.size(0) != end.num_nodes or not end.is_current():
                return func(*args)
            can_wait = x.dim() == 2 and x.is_floating_point() and not x.is_inference()
            return _unread([(x, end)]) if can_wait else gather(x, end)


class _Rows(Tensor):
    """One row per edge, the concatenation of several parts, which are gathered when they are first read.

    Linear maps and concatenations do not read the rows. Autograd treats this object as the result of the
    gather.

    Attributes:
        parts: pairs (rows of nodes, end of the edges at which they are gathered) or (rows of edges, None).
        made: the gathered rows (E, width), or None before the first read.
        versions: version counters of the parts when this object was made.
    """

    parts: list[tuple[Tensor, EdgeEnd | None]]
    made: Tensor | None
    versions: list[int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Applies linear maps and concatenations to the parts. All other functions get the gathered rows."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        out = NotImplemented
        if func in (torch.cat, torch.concat, torch.concatenate):
            out = _joined(*args, **kwargs)
        elif func is F.linear:
            out = _mapped(*args, **kwargs)
        if out is not NotImplemented:
            return out
        if getattr(func, "__name__", "") in _OF_THE_OBJECT and type(args[0]) is _Rows:
            args[0].parts = [(args[0].rows(), None)]
        args, kwargs = _with_rows(args), _with_rows(kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Gathers rows for code that bypasses `__torch_function__`, such as `torch.autograd.Function`."""
        if func._schema.is_mutable:
            raise RuntimeError(
                f"{func} writes into x[edge_index[0]], which is not gathered yet: use "
                "x[edge_index[0]].clone(), or call fastsparse_pyg.restore(model)"
            )
        read = functools.partial(pytree.tree_map_only, _Rows, lambda x: x.made_anew())
        with torch.no_grad():
            args, kwargs = read(args), read(kwargs or {})
        return func(*args, **kwargs)

    def rows(self) -> Tensor:
        """The gathered rows, kept after the first call."""
        if self.made is None:
            with torch.enable_grad():  # safe under no_grad, because `_unread` then detached the parts
                self.made = self.made_anew()
        return self.made

    def made_anew(self) -> Tensor:
        """Gathers the rows without storing them."""
        each = [part if end is None else gather(part, end) for part, end in self.known_parts()]
        return each[0] if len(each) == 1 else torch.cat(each, 1)

    def known_parts(self) -> list[tuple[Tensor, EdgeEnd | None]]:
        """Returns the parts. If the gathered rows were written in place, they are the only part."""
        if self.made is not None and self.made._version:
            return [(self.made, None)]
        if any(
            part._version != version for (part, _), version in zip(self.parts, self.versions, strict=True)
        ):
            raise RuntimeError(
                "x was written in place after x[edge_index[0]] and before the result was read. Write "
                "`x = x + y` instead of `x += y`, or call fastsparse_pyg.restore(model)"
            )
        return self.parts


#: Attributes that do not depend on the content of the rows, so reading them gathers nothing.
_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
_METADATA = (
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
)
#: Functions that must return the rows object that they were called on.
_OF_THE_OBJECT = ("register_hook", "retain_grad", "requires_grad_")


def _with_rows(tree: Any) -> Any:
    """Replaces all `_Rows` objects in the arguments of a function by their gathered rows."""
    return pytree.tree_map_only(_Rows, _Rows.rows, tree)


class _Unread(torch.autograd.Function):
    """Makes a `_Rows` object. The backward pass is the backward pass of the gather."""

    @staticmethod
    def forward(ctx: Any, ends: list[EdgeEnd | None], num_edges: int, *tensors: Tensor) -> Tensor:
        ctx.ends, ctx.widths = ends, [each.size(1) for each in tensors]
        first = tensors[0]
        size = (num_edges, sum(ctx.widths))
        rows = Tensor._make_wrapper_subclass(_Rows, size, dtype=first.dtype, device=first.device)
        rows.parts, rows.made, rows.versions = [], None, []
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts = grad.split(ctx.widths, 1)
        grads = [
            part if end is None else reduce(part, end, "sum")
            for part, end in zip(parts, ctx.ends, strict=True)
        ]
        return None, None, *grads


def _unread(parts: list[tuple[Tensor, EdgeEnd | None]]) -> Tensor:
    tensors, ends = zip(*parts, strict=True)
    num_edges = next(end.num_edges for end in ends if end is not None)
    rows: Any = _Unread.apply(list(ends), num_edges, *tensors)
    rows.parts = parts if rows.requires_grad else [(part.detach(), end) for part, end in parts]
    rows.versions = [part._version for part, _ in rows.parts]
    found: Tensor = rows
    return found


def _parts_of(x: Any) -> list[tuple[Tensor, EdgeEnd | None]]:
    return x.known_parts() if type(x) is _Rows else [(x, None)]


def _joined(tensors: Any, dim: Any = 0, **kwargs: Any) -> Any:
    is_wide = isinstance(tensors, (list, tuple)) and dim in (1, -1) and not kwargs
    first = tensors[0]
    if not is_wide or any(x.dim() != 2 or x.dtype != first.dtype or len(x) != len(first) for x in tensors):
        return NotImplemented
    parts = [part for x in tensors for part in _parts_of(x)]
    return _unread(parts) if any(end is not None for _, end in parts) else NotImplemented


def _mapped(x: Any, weight: Any, bias: Any = None) -> Any:
    """Applies a linear map to rows. Parts of nodes are multiplied once per node, before the gather."""
    if type(x) is not _Rows or type(weight) is _Rows or is_any_autocast_enabled():
        return NotImplemented
    parts = x.known_parts()
    ends = list(dict.fromkeys(end for _, end in parts if end is not None))
    fits = weight.dim() == 2 and x.size(1) == weight.size(1) and x.dtype == weight.dtype
    if not fits or not ends or not is_plain_eager(parts[0][0]):
        return NotImplemented
    columns = weight.split([part.size(1) for part, _ in parts], 1)
    totals: dict[EdgeEnd, Tensor] = {}
    of_edges = [(part, matrix) for (part, end), matrix in zip(parts, columns, strict=True) if end is None]
    for (part, end), matrix in zip(parts, columns, strict=True):
        if end is not None:
            made = linear_before_sum(part, matrix)
            totals[end] = totals[end] + made if end in totals else made
    if bias is not None:
        totals[ends[0]] = totals[ends[0]] + bias
    of_nodes = [totals[end] for end in ends]
    if len({each.requires_grad for each in of_nodes}) == 1:
        rows = list(lift(of_nodes, ends))
    else:
        rows = [gather(each, end) for each, end in zip(of_nodes, ends, strict=True)]
    total = functools.reduce(torch.add, rows)
    if not of_edges:
        return total
    tensors, matrices = zip(*of_edges, strict=True)
    features, matrix = (each[0] if len(each) == 1 else torch.cat(each, 1) for each in (tensors, matrices))
    return torch.addmm(total, features, matrix.t())
