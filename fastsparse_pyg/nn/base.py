"""Base class of the layers: decides when PyG's own code has to run, and aggregates neighbours otherwise."""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data.data import BaseData
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear

from fastsparse_core import Adjacency, recorded, spmm
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.aggregate_transform import aggregate_linear
from fastsparse_core.fused.bias import linear
from fastsparse_core.fused.joint_linear import add_linear, joint_linear
from fastsparse_core.fused.linear_before_sum import linear_before_sum
from fastsparse_core.layer_swap import restore
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._eager import CHANGES_OF_CALL, is_plain_eager, may_be_one_node, why_watched
from fastsparse_core.ops._eager import is_plain_linear as is_plain_linear_of
from fastsparse_core.ops.spmm import Reduce
from fastsparse_core.tiling import NeighbourSum
from fastsparse_core.traced import TracedAdjacency, site_of
from fastsparse_pyg import fallback
from fastsparse_pyg.caching import layer_cache, stamp_attributes
from fastsparse_pyg.fallback import FEW_EDGES_ON_GPU
from fastsparse_pyg.graph import SELF_LOOPS, for_pyg, is_sparse_matrix, resolve, to_edge_index

REDUCE: dict[type, Reduce] = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MaxAggregation: "max",
    MinAggregation: "min",
}
#: Aggregations of layers whose kernels support all of them.
ANY_REDUCTION = tuple(REDUCE)
#: Advice if the user overrides a method of message passing.
OWN_MESSAGES = "Override it in a subclass of PyG's layer and call `fastsparse_pyg.accelerate(model)`"
#: PyG's layers -> their drop-ins; `fastsparse_pyg.nn` fills it.
DROP_INS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}
MESSAGE_METHODS = (
    "propagate",
    "message",
    "aggregate",
    "update",
    "message_and_aggregate",
    "edge_updater",
    "edge_update",
)
FEW_ON_GPU = Reason(f"at most {FEW_EDGES_ON_GPU:,} edges on a GPU", "", "PyG")
#: The hooks on the steps of message passing.
_MESSAGE_HOOKS = tuple(
    f"_{step}_forward_{kind}"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for kind in ("pre_hooks", "hooks")
)
_is_compiling = torch.compiler.is_compiling
_is_tracing = torch._C._is_tracing
_is_deterministic = torch._C._get_deterministic_algorithms
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# The original method. When a class is first instantiated, PyG replaces it by a specialised copy.
_plain_propagate = MessagePassing.__dict__.get("_orig_propagate", MessagePassing.__dict__["propagate"])


class FastConv(MessagePassing):
    """Base of the layers, before PyG's layer: ``class FastGCNConv(FastConv, GCNConv)``.

    A layer runs the kernels for calls that they support. For other calls it runs PyG's code on the same
    parameters, with :meth:`_original_forward`.
    """

    flow: str
    node_dim: int
    out_channels: int

    #: Name of the kernel, for the reports of `accelerate` and `why`.
    _kernel: ClassVar[str] = "spmm"

    #: True if sources and destinations may differ.
    _bipartite: ClassVar[bool] = True

    #: True if PyG's layer has a fused path for sparse matrices, which its attribute `fuse` can switch off.
    _fusible: ClassVar[bool] = True

    #: Supported features: tensors of any shape ("any"), tensors with the nodes in the second to last
    #: dimension ("rows"), or tensors of two dimensions ("matrix").
    _features: ClassVar[Literal["any", "rows", "matrix"]] = "any"

    #: True if edges may be a sparse matrix.
    _takes_matrices: ClassVar[bool] = True

    #: True if features may be a sparse matrix.
    _takes_sparse_features: ClassVar[bool] = False

    #: How the layer adds loops to a torch.sparse matrix: `matrix_loops` of :func:`resolve`.
    _matrix_loops: ClassVar[str] = "replace"

    #: Aggregations that the layer's kernels support.
    _aggregations: ClassVar[tuple[type[Module], ...]] = (SumAggregation,)

    #: Name of the message passing method that a user's subclass overrides; "" if it overrides none. If it
    #: overrides one, PyG's code runs, because the kernels would not call the method.
    _overridden: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for klass in cls.__mro__[: cls.__mro__.index(FastConv)]:
            if klass is not cls and issubclass(klass, FastConv):
                # The class's namespace is not searched: PyG may have added a generated `propagate` to it.
                found = klass._overridden
            else:
                found = next((name for name in MESSAGE_METHODS if name in klass.__dict__), "")
            if found:
                cls._overridden = found
                return

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        super()._set_jittable_templates(raise_on_error)
        # PyG assumes that the `propagate` that a class inherits is the original method. If the base class was
        # used before, the class inherits a specialised copy without explain mode instead, and PyG 2.8.1
        # silently ignores explanations.
        if self._overridden != "propagate":
            type(self)._orig_propagate = _plain_propagate

    def __prepare_scriptable__(self) -> MessagePassing:
        """PyG's layer with the same parameters, which ``torch.jit.script`` compiles in place of a drop-in.

        Raises:
            NotImplementedError: PyG has no layer that computes the same.
        """
        layer: MessagePassing = copy.copy(self)
        restore(layer, DROP_INS)
        if type(layer) is type(self):
            raise NotImplementedError(
                f"torch.jit.script: {type(self).__name__} has no original that TorchScript could compile; "
                "use torch.compile"
            )
        layer._set_jittable_templates()  # PyG's class may never have been instantiated, so it may lack them
        fallback.tell(type(self).__name__, Reason("torch.jit.script compiles PyG's layer", ""))
        return layer

    # ---------------------------------------------------------------- from a call to a structure

    def _structure(
        self, x: Any, edge_index: Any, size: Any = None, loops: bool | str = False, *of_call: Any
    ) -> Adjacency | Reason:
        """Returns the structure for a call, or why PyG's own code has to run.

        Args:
            x: node features, or a pair (sources, destinations or None). A layer that supports no pairs passes
                the features twice.
            edge_index: argument of the layer.
            size: argument of the layer.
            loops: whether to add self loops as PyG's layer does; `BY_KERNEL` in traced code.
            *of_call: further arguments of this layer's :meth:`_reason`.
        """
        if isinstance(x, Tensor):
            x_src = x_dst = x
        else:
            x_src, x_dst = x if type(x) is tuple and len(x) == 2 else checked_pair(x)
        reason = self._reason(x_src, x_dst, edge_index, *of_call)
        if reason is not None:
            return reason
        state = self.__dict__
        dim, flow = state["node_dim"], state["flow"]
        num_src = x_src.size(dim)
        num_dst = None if x_dst is None else num_src if x_dst is x_src else x_dst.size(dim)
        if type(edge_index) is Tensor or (_is_compiling() and fallback.is_edge_list(edge_index)):
            if size is not None:
                for name, expected, got in (("source", size[0], num_src), ("destination", size[1], num_dst)):
                    if expected is not None and got is not None and expected != got:
                        raise ValueError(
                            f"x: expected {expected} {name} rows as size={tuple(size)} says, got {got}"
                        )
                num_dst = size[1] if num_dst is None else num_dst
            if edge_index.layout is torch.strided and edge_index.device == x_src.device:
                if _is_compiling():
                    place = (num_src if num_dst is None else num_dst, num_src)
                    reverse = flow == "target_to_source"
                    site = site_of(edge_index)
                    return TracedAdjacency(edge_index, *place, reverse, SELF_LOOPS[loops], site)
                adj = known(edge_index, (num_src if num_dst is None else num_dst, num_src, flow, loops))
                if adj is not None:
                    return adj
        return resolve(
            edge_index,
            num_src,
            num_dst,
            x_src.device,
            flow=flow,
            add_self_loops=bool(loops),
            matrix_loops=self._matrix_loops,
        )

    def _reason(self, x_src: Any, x_dst: Any, edge_index: Any, *of_call: Any) -> Reason | None:
        """Returns why PyG's own code has to run; None if the kernels support the call.

        Layers with more conditions override this method.

        Args:
            x_src: features of the sources.
            x_dst: features of the destinations, or None.
            edge_index: argument of the layer.
            *of_call: further arguments for a layer's own conditions.
        """
        if not isinstance(x_src, Tensor):
            raise_features(x_src)
        state = self.__dict__
        if state["_explain"]:
            return fallback.EXPLAIN_MODE
        if any(map(state.__getitem__, _MESSAGE_HOOKS)):
            return fallback.MESSAGE_HOOK
        if self._overridden:
            return Reason(f"{self._overridden}() is overridden", OWN_MESSAGES)
        if (
            "message" in state
            or "aggregate" in state
            or "update" in state
            or "message_and_aggregate" in state
            or "edge_update" in state
        ):
            return Reason("a message passing method is replaced on the instance", OWN_MESSAGES)
        aggregation = state["_modules"].get("aggr_module")
        if type(aggregation) not in self._aggregations:
            names = " or ".join(repr(REDUCE[each]) for each in self._aggregations)
            return Reason(f"aggr={self.aggr!r} has no kernel", f"Use aggr={names}")
        if any(map(aggregation.__dict__.get, CHANGES_OF_CALL)):
            return fallback.HOOKED_AGGREGATION
        if state["_decomposed_layers"] > 1:
            return fallback.DECOMPOSED
        if x_src.dtype not in _FLOAT_DTYPES:
            cure = "Convert them to a floating-point dtype, for instance with `x.float()`"
            return Reason(f"features of dtype {x_src.dtype}", cure)
        dim, shape = x_src.dim(), self._features
        if shape == "matrix" and dim != 2:
            return fallback.NOT_MATRICES
        if dim < 2 or (shape != "any" and state["node_dim"] % dim != dim - 2):
            return fallback.wrong_dimensions(dim, state["node_dim"])
        if x_src.layout is not torch.strided and not self._takes_sparse_features:
            return Reason("features that are not dense", "Convert them, for instance with `x.to_dense()`")
        is_list = type(edge_index) is Tensor and edge_index.layout is torch.strided
        if not is_list and not self._takes_matrices and is_sparse_matrix(edge_index):
            return fallback.SPARSE_MATRIX
        if not is_list and self._fusible and not state["fuse"] and is_sparse_matrix(edge_index):
            return Reason("a sparse matrix with fuse=False", fallback.PLAIN_EDGES)
        is_turned = x_dst is not x_src and state["flow"] == "target_to_source"
        if is_turned and not isinstance(edge_index, Adjacency):
            return fallback.TURNED_BIPARTITE
        if is_plain_eager(x_src):
            return fallback.TRACED_BY_JIT if _is_tracing() else None
        if _is_compiling():
            return None if isinstance(edge_index, Adjacency) else fallback.of_traced_edges(edge_index)
        return fallback.TRACED_BY_JIT if _is_tracing() else fallback.watched(why_watched(x_src))

    def _own_parameters(self, *names: str) -> list[Any]:
        """Returns parameters, or attributes if pruning, a parametrisation or a replica replaced them."""
        parameters, found = self.__dict__["_parameters"], []
        for name in names:  # a comprehension would be a function call in Python 3.11
            found.append(parameters[name] if name in parameters else getattr(self, name))
        return found

    def _reduce(self) -> Reduce:
        """The kernel's name for the layer's aggregation."""
        # `self.aggr_module` would call nn.Module.__getattr__, which takes half a microsecond.
        return REDUCE[type(self._modules["aggr_module"])]

    def _original_forward(self, reason: Reason, x: Any, edge_index: Any, *args: Any) -> Tensor:
        """Runs PyG's `forward`. An Adjacency is converted to an edge list first."""
        edges = self._written_back(edge_index) if isinstance(edge_index, Adjacency) else edge_index
        forward = super().forward
        try:
            out: Tensor = fallback.run(type(self).__name__, reason, forward, x, for_pyg(edges), *args)
        except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            self._name_argument(error, x, edges, *args)
            raise
        return out

    def _name_argument(self, error: Exception, x: Any, edge_index: Any, *args: Any) -> None:
        """Raises PyG's error again with a message that names the wrong argument, if it can be determined.

        Args:
            error: PyG's error.
            x: argument of the layer.
            edge_index: argument of the layer.
            *args: further arguments of the layer, which some layers check in an override.
        """
        if not isinstance(x, Tensor):
            return
        message, shape = "", tuple(x.shape)
        is_edges = shape[:1] == (2,) and not x.is_floating_point()
        if is_edges and isinstance(edge_index, Tensor) and edge_index.is_floating_point():
            message = (
                f"x: expected floating-point features, got {x.dtype} of shape {shape}, and edge_index has "
                f"{edge_index.dtype}; the arguments are swapped: call layer(x, edge_index)"
            )
        elif x.dim() < 2:
            message = (
                f"x: expected shape (num_nodes, num_features), got {shape}; for one feature per node pass "
                "x.unsqueeze(-1)"
            )
        elif not x.is_floating_point() and not x.is_complex():
            message = f"x: expected a floating-point dtype, got {x.dtype}; convert it with x.float()"
        if message:
            raise type(error)(message) from error

    def _written_back(self, adj: Adjacency) -> Tensor:
        if self.explain and adj.has_inserted_loops:
            raise ValueError(
                "edge_index: expected the edges that the explanation's mask belongs to, got an Adjacency "
                "with self loops inserted; pass edge_index, or prepare it with add_self_loops=False"
            )
        if adj.num_src != adj.num_dst and (self.flow == "target_to_source" or not self._bipartite):
            raise ValueError(
                f"edge_index: expected a square Adjacency, because this call falls back to PyG's code with "
                f"flow={self.flow!r}, got shape {adj.shape}; pass the edges instead"
            )
        return to_edge_index(adj, self.flow)

    # ---------------------------------------------------------------- the kernels

    def _aggregate_neighbours(
        self,
        adj: Adjacency,
        x: Tensor,
        value: Tensor | None,
        *,
        scales: Sequence[Tensor | None] = (None, None),
        bias: Tensor | None = None,
    ) -> Tensor:
        """Reduces the neighbours' features by the layer's aggregation, along `node_dim`, for any shape."""
        if value is not None and not value.is_floating_point():
            value = value.to(x.dtype)
        reduce, dim = REDUCE[type(self._modules["aggr_module"])], self.__dict__["node_dim"]
        if x.dim() == 2 and (dim == -2 or dim == 0):
            return spmm(adj, x, value, reduce, scale_dst=scales[0], scale_src=scales[1], bias=bias)
        by_node = x.movedim(dim, 0)
        shape = by_node.shape[1:]
        out = spmm(adj, by_node.flatten(1), value, reduce, scale_dst=scales[0], scale_src=scales[1])
        out = out.unflatten(1, shape).movedim(0, dim).contiguous()
        return out if bias is None else out + bias

    def _plain_sum(self, x: Tensor, edges: Any) -> NeighbourSum:
        """Computes the unweighted sum or mean over neighbours, for `TiledLayer._neighbour_sum`."""
        adj = self._structure(x, edges)
        reason = adj.message if isinstance(adj, Reason) else ""
        if not reason and self._reduce() not in ("sum", "mean"):
            reason = f"aggr={self._reduce()!r}"
        if not reason and is_sparse_matrix(edges):
            reason = "a sparse matrix with values"
        if reason:
            raise_untiled(self, reason)
        assert isinstance(adj, Adjacency)
        scale = adj.inv_degree(accumulation_dtype(x.dtype)) if self._reduce() == "mean" else None
        return NeighbourSum(adj, scale)

    def _neighbours_and_root(
        self,
        adj: Adjacency,
        x_src: Tensor,
        x_dst: Tensor | None,
        value: Tensor | None,
        lin: Any,
        lin_root: Any,
    ) -> Tensor:
        """Returns ``lin(aggregated neighbours) + lin_root(features of the destinations)``.

        Args:
            adj: structure.
            x_src: features of the sources.
            x_dst: features of the destinations; None: the second term is 0.
            value: values of the edges; None: all 1.
            lin: linear layer for the aggregated neighbours.
            lin_root: linear layer for the destinations, or None.
        """
        reduce = REDUCE[type(self._modules["aggr_module"])]
        # A sum is linear, so `lin` may come before or after it: gather the narrower features. Destinations
        # without edges get only the bias.
        narrower_after = x_src.size(-1) > self.out_channels and reduce in ("sum", "mean")
        if (
            lin_root is not None
            and x_dst is not None
            and value is None
            and (reduce == "sum" or reduce == "mean")
            and self.__dict__["node_dim"] in (-2, 0)
            and is_plain_linear(lin)
            and is_plain_linear(lin_root)
            and lin_root._parameters["bias"] is None
            and may_be_one_node(x_src)
        ):
            parameters = (lin._parameters["weight"], lin._parameters["bias"], lin_root._parameters["weight"])
            whole = aggregate_linear(
                adj, x_src, *parameters, reduce, root=x_dst, transform_first=narrower_after
            )
            if whole is not None:
                return whole
        if narrower_after and is_plain_linear(lin) and self.node_dim % x_src.dim() != x_src.dim() - 1:
            out = self._aggregate_neighbours(adj, linear_before_sum(x_src, lin.weight), value, bias=lin.bias)
            if lin_root is None or x_dst is None:
                return out
            return add_linear(out, (x_dst,), (lin_root,), Linear)
        return sum_and_root(self._aggregate_neighbours(adj, x_src, value), x_dst, lin, lin_root)


def sum_and_root(sums: Tensor, x: Tensor | None, lin: Any, lin_root: Any) -> Tensor:
    """``lin(sums) + lin_root(x)``; the second term is 0 if ``x`` or ``lin_root`` is None."""
    is_plain = is_plain_linear(lin)
    out: Tensor = linear(sums, lin.weight, lin.bias) if is_plain else lin(sums)
    if lin_root is None or x is None:
        return out
    # `add_linear` overwrites `out`, which must not happen if hooks of `lin` may have stored `out`.
    return add_linear(out, (x,), (lin_root,), Linear) if is_plain else out + lin_root(x)


def raise_untiled(layer: FastConv, reason: str) -> NoReturn:
    """Raises the error for a layer that cannot run in tiles.

    Args:
        layer: the layer.
        reason: the property of the layer or its edges that tiles do not support.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"tiled() does not support {type(layer).__name__} with {reason}; it needs sums or means over "
        "neighbours without weights"
    )


def checked_pair(x: Any) -> tuple[Any, Any]:
    """Checks a pair of features. Callers skip this call for a single tensor, to save host time."""
    if not (isinstance(x, (tuple, list)) and len(x) == 2):
        raise_features(x)
    return x[0], x[1]


def size_for_pyg(edge_index: object, size: Any) -> Any:
    """Returns `size` for PyG's code, as edges made from an Adjacency do not contain the numbers of nodes."""
    return (edge_index.num_src, edge_index.num_dst) if isinstance(edge_index, Adjacency) else size


def raise_features(x: object, name: str = "x") -> NoReturn:
    """Raises the error for features of an unsupported type.

    Args:
        x: the unsupported object.
        name: name of the caller's argument.

    Raises:
        TypeError: always.
    """
    cure = "convert it with torch.as_tensor(x)"
    if x is None:
        cure = "data.x is None for graphs without features: make some, such as torch.ones(data.num_nodes, 1)"
    elif isinstance(x, BaseData):
        cure = "pass its x"
    raise TypeError(
        f"{name}: expected a floating tensor of node features, or a pair of them for the sources and "
        f"destinations of a bipartite graph, got {'None' if x is None else type(x).__name__}; {cure}"
    )


def known(edge_index: Tensor, options: Hashable, *others: Tensor) -> Any:
    """Returns the cached structure of a plain edge tensor with these options, if it was used last.

    Otherwise the result is None, and :func:`fastsparse_pyg.caching.lookup` has to search. For a structure
    that is used repeatedly, this function takes less time on the host than `lookup`. The content of
    ``others`` also decides the structure.
    """
    if type(edge_index) is not Tensor:
        return None
    latest = layer_cache.latest.get(options)
    if latest is None or latest[0]() is not edge_index:  # for example if layers alternate between edge lists
        latest = layer_cache.kept(edge_index, options)
        if latest is None:
            return None
    # `stamp_of` of a plain tensor, inlined.
    stamp: tuple[Any, ...] = ((edge_index.data_ptr(), edge_index.stride(), stamp_attributes(edge_index)),)
    for other in others:
        if type(other) is not Tensor or other.is_inference():
            return None
        stamp += ((other.data_ptr(), other.stride(), stamp_attributes(other)),)
    if latest[1] != stamp:
        return None
    layer_cache.hits += 1
    return latest[2]


def are_few_on_gpu(edge_index: Any, times: int = 1) -> bool:
    """True if a layer of several kernels takes longer than PyG's code for these edges.

    The result is False if PyTorch's deterministic algorithms are switched on, because PyG's sums use atomics.
    It is also False in a recorded step, because replays take no host time per kernel.

    Args:
        edge_index: edges, int64 (2, E), or another kind of graph.
        times: factor by which the number of few edges is multiplied.
    """
    return (
        type(edge_index) is Tensor
        and edge_index.is_cuda
        and edge_index.numel() <= 2 * times * FEW_EDGES_ON_GPU
        and not _is_deterministic()
        and not recorded.entered
    )


def has_message_hook(state: dict[str, Any]) -> bool:
    """True if a layer has a hook on a step of message passing.

    Args:
        state: the layer's ``__dict__``.
    """
    return any(map(state.__getitem__, _MESSAGE_HOOKS))  # `map` is faster than a generator


def is_plain_call(layer: MessagePassing) -> bool:
    """True if a layer has no hooks or modes, and no `aggregate` or `update` of its own.

    PyG's `propagate` would handle them. Classes are also checked in every call, because users replace methods
    of classes, too. `message` may be the method of the layer's class, but not of the layer.
    """
    state, methods = layer.__dict__, type(layer)
    aggregation = state["_modules"]["aggr_module"]
    return not (
        state["_explain"]
        or state["_decomposed_layers"] > 1
        or "message" in state
        or "aggregate" in state
        or "update" in state
        or methods.aggregate is not MessagePassing.aggregate
        or methods.update is not MessagePassing.update
        or any(map(aggregation.__dict__.get, CHANGES_OF_CALL))
        or has_message_hook(state)
    )


#: True if a PyG Linear only applies weight and bias (no hooks, no subclass), so it can move across a sum.
is_plain_linear = functools.partial(is_plain_linear_of, kind=Linear)


def project(x: Tensor, *modules: torch.nn.Module) -> tuple[Tensor, ...]:
    """Applies several linear layers to the same features; plain layers share one matrix product.

    With a shared product, if only some of the results get a gradient, the other layers get zero gradients.
    """
    return joint_linear(x, modules, Linear)
