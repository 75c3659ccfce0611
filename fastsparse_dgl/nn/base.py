"""Code shared by the layers: inputs, in-degree check, aggregation with DGL's broadcast of edge weights."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fastsparse_core import Adjacency, spmm
from fastsparse_core.ops.spmm import Reduce
from fastsparse_dgl.caching import adjacency_of
from fastsparse_dgl.graph import DGLError, GraphLike

_ZERO_IN_DEGREE = (
    "graph: expected at least one incoming edge for every destination, got nodes of zero in-degree, whose "
    "result would be 0; add self loops with dgl.add_self_loop(graph), or construct the layer with "
    "allow_zero_in_degree=True"
)


def dropout_p(dropout: torch.nn.Dropout) -> float:
    """Returns the current probability of a dropout layer: 0 in evaluation mode."""
    return dropout.p if dropout.training else 0.0


def check_edges(name: str, feat: Any, adjacency: Adjacency, width: int) -> Tensor:
    """Returns features of the edges after checking their type, shape (E, width) and device.

    Raises:
        DGLError: ``feat`` is not a tensor, or has another shape or device.
    """
    if not isinstance(feat, Tensor):
        raise DGLError(f"{name}: expected a tensor, got {type(feat).__name__}")
    if tuple(feat.shape) != (adjacency.num_values, width):
        raise DGLError(
            f"{name}: expected shape ({adjacency.num_values}, {width}), one row per edge, "
            f"got {tuple(feat.shape)}"
        )
    if feat.device != adjacency.col.device:
        raise DGLError(f"{name}: expected device {adjacency.device} like the features, got {feat.device}")
    return feat


class AggregationMixin:
    """Turns a layer's graph into an Adjacency and aggregates over it.

    A mixin before DGL's layer class: it only adds methods, so parameters, state_dict, repr and isinstance
    are the same as for DGL's layer.
    """

    #: Name of the kernel, for the reports of `accelerate` and `why`.
    _kernel: ClassVar[str] = "spmm"

    def _structure(
        self, graph: GraphLike, feat: Any, name: str = "feat"
    ) -> tuple[Adjacency, Tensor, Tensor | None]:
        """Returns structure, source features, and destination features (None if ``feat`` is no pair).

        The structure is on the device of the features and cached per graph.

        Args:
            graph: argument of the layer.
            feat: argument of the layer.
            name: name of the caller's argument with the features.

        Raises:
            DGLError: the features are no tensors, their number of rows does not fit the graph, a node has no
                incoming edge (if the layer has `allow_zero_in_degree`, and that is False), or
                :func:`fastsparse_dgl.caching.adjacency_of` does not accept the graph.
        """
        source, given = feat, None
        if isinstance(feat, tuple):
            if len(feat) != 2:
                raise DGLError(
                    f"{name}: expected a tensor or a pair (source, destination), got a tuple of {len(feat)}"
                )
            source, given = feat
        if not isinstance(source, Tensor) or source.dim() == 0:
            kind = "a tensor without dimensions" if isinstance(source, Tensor) else type(source).__name__
            cure = f"; the graph comes first: layer(graph, {name})" if isinstance(graph, Tensor) else ""
            raise DGLError(
                f"{name}: expected a tensor with one row per node or a pair of such tensors, got {kind}{cure}"
            )
        if isinstance(feat, tuple) and (not isinstance(given, Tensor) or given.dim() == 0):
            raise DGLError(
                f"{name}: expected a pair of tensors (source, destination) with one row per node, "
                f"got {type(given).__name__} as the second"
            )
        adjacency = adjacency_of(graph, source.device)
        if source.shape[0] != adjacency.num_src:
            raise DGLError(
                f"{name}: expected one row per source node ({adjacency.num_src} rows), "
                f"got shape {tuple(source.shape)}"
            )
        if not self.__dict__.get("_allow_zero_in_degree", True):
            self._check_in_degree(adjacency)
        return adjacency, source, given

    def _destination(self, graph: GraphLike, adjacency: Adjacency, source: Tensor, feat: Any) -> Tensor:
        """Returns the destination features: the second of a pair, else the first rows of the source's.

        Args:
            graph: the caller's graph.
            adjacency: structure of the graph.
            source: source features, possibly after dropout.
            feat: destination features if the caller passed a pair, else None.

        Raises:
            DGLError: the number of rows does not fit the graph.
        """
        num_dst, num_src = adjacency.shape
        if feat is None:
            # Only blocks guarantee that the destinations are the first source nodes. An Adjacency with fewer
            # destinations than sources counts as a block. For other bipartite graphs, DGL requires a pair.
            if num_dst < num_src and (graph is adjacency or graph.is_block):
                return source[:num_dst]
            feat = source
        if feat.shape[0] != num_dst:
            raise DGLError(
                f"feat: expected one row per destination node ({num_dst} rows), "
                f"got shape {tuple(feat.shape)}; "
                "pass a pair (source features, destination features) for a bipartite graph"
            )
        return feat

    def _has_one_frame(self, graph: GraphLike) -> bool:
        """True if sources and destinations are the same nodes, so DGL stores their data in the same frame.

        In that case, the features that DGL's layer stores for destinations overwrite the sources' features.
        """
        return not isinstance(graph, Adjacency) and not graph.is_unibipartite

    def _check_in_degree(self, adjacency: Adjacency) -> None:
        """Raises DGL's error for nodes without incoming edges. Reads from the device once per structure.

        A padded graph of a captured step is not checked, because calls before the recording were checked.
        """
        if not adjacency.is_padded and adjacency.has_empty_rows():
            raise DGLError(_ZERO_IN_DEGREE)

    def _aggregate(
        self,
        adjacency: Adjacency,
        feat: Tensor,
        edge_weight: Tensor | None,
        reduce: Reduce = "sum",
        *,
        scale_dst: Tensor | None = None,
        scale_src: Tensor | None = None,
        bias: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor:
        r"""One call of :func:`fastsparse_core.spmm`, with edge weights broadcast as DGL does.

        Args:
            adjacency: structure.
            feat: source features (num_src, ...).
            edge_weight: (E,), (E, 1), or (E, ...) that broadcasts against one node's features; None: all 1.
            reduce: ``"sum"``, ``"mean"`` or ``"max"``.
            scale_dst: constant factor per destination, (num_dst,), or None.
            scale_src: constant factor per source, (num_src,), or None.
            bias: bias that is added along the last dimension, or None.
            relu: whether negative results become 0.

        Returns:
            (num_dst, ...).
        """
        value = None
        if edge_weight is not None:
            feat, value = _broadcast_edge_weight(adjacency, feat, edge_weight)
        # The operator adds a bias to the flattened features. A bias along the last dimension is the same only
        # for 2-D features.
        unfused_bias = None
        if bias is not None and not (feat.dim() == 2 and feat.shape[1] == bias.shape[0]):
            bias, unfused_bias = None, bias
        out = spmm(
            adjacency,
            feat,
            value,
            reduce,
            scale_dst=scale_dst,
            scale_src=scale_src,
            bias=bias,
            relu=relu and unfused_bias is None,
        )
        if unfused_bias is None:
            return out
        out = out + unfused_bias
        return out.relu() if relu else out


def _broadcast_edge_weight(adjacency: Adjacency, feat: Tensor, edge_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns features and edge values whose product by ``spmm`` broadcasts as DGL's ``u_mul_e`` does.

    DGL aligns the trailing dimensions of one node's features and one edge's weight on the right. ``spmm``
    takes one value per edge and head, where heads are equal blocks of the flattened features. So weights that
    vary only along leading dimensions need no copy; all others are expanded.
    """
    if not isinstance(edge_weight, Tensor):
        raise DGLError(f"edge_weight: expected a tensor, got {type(edge_weight).__name__}")
    if edge_weight.dim() == 0 or edge_weight.shape[0] != adjacency.num_values:
        raise DGLError(
            f"edge_weight: expected one row per edge ({adjacency.num_values} rows), "
            f"got shape {tuple(edge_weight.shape)}"
        )
    if edge_weight.device != feat.device:
        raise DGLError(
            f"edge_weight: expected device {feat.device} like the features, got {edge_weight.device}"
        )
    if edge_weight.dim() == 1:
        return feat, edge_weight
    rank = max(feat.dim(), edge_weight.dim())
    node_shape = (1,) * (rank - feat.dim()) + tuple(feat.shape[1:])
    edge_shape = (1,) * (rank - edge_weight.dim()) + tuple(edge_weight.shape[1:])
    try:
        shape = torch.broadcast_shapes(node_shape, edge_shape)
    except RuntimeError as error:
        raise DGLError(
            f"edge_weight: expected (E,), (E, 1) or a shape that broadcasts against features of shape "
            f"{tuple(feat.shape)}, got {tuple(edge_weight.shape)}"
        ) from error
    if shape != tuple(feat.shape[1:]):
        feat = feat.reshape(feat.shape[0], *node_shape).expand(feat.shape[0], *shape)
    varying = max((axis + 1 for axis, size in enumerate(edge_shape) if size != 1), default=0)
    heads = shape[:varying]
    value = edge_weight.reshape(adjacency.num_values, *edge_shape[:varying])
    if varying == 0:
        return feat, value
    return feat, value.expand(adjacency.num_values, *heads).reshape(adjacency.num_values, heads.numel())


def edge_factor(adjacency: Adjacency, like: Tensor, edge_weight: Tensor) -> Tensor:
    """Returns a factor of the attention (E, H): one per edge, (E, 1), or one for all edges, (1, 1).

    Raises:
        DGLError: ``edge_weight`` is not a tensor, is on another device, or has neither one value per edge nor
            one for all edges.
    """
    num_edges = adjacency.num_values
    if not isinstance(edge_weight, Tensor):
        raise DGLError(f"edge_weight: expected a tensor, got {type(edge_weight).__name__}")
    if edge_weight.device != like.device:
        raise DGLError(
            f"edge_weight: expected device {like.device} like the features, got {edge_weight.device}"
        )
    if tuple(edge_weight.shape) not in {(), (1,), (1, 1), (num_edges,), (1, num_edges)}:
        raise DGLError(
            f"edge_weight: expected shape ({num_edges},), one value per edge, or one value for all edges, "
            f"got shape {tuple(edge_weight.shape)}"
        )
    return edge_weight.reshape(-1, 1)
