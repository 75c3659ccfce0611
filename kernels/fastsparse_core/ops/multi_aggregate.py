"""Several aggregations of messages at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.log import warn_once
from fastsparse_core.ops import _multi_aggregate_fused as kernels
from fastsparse_core.ops._autocast import autocast
from fastsparse_core.ops._checks import check_edge_map, check_features, check_structure, is_partitioned
from fastsparse_core.ops._dtypes import cast
from fastsparse_core.structure.adjacency import Adjacency

#: The aggregations, in the order in which kernels number them.
AGGREGATIONS = ("sum", "mean", "min", "max", "var", "std")
#: Largest number of edge features that the kernels project. With more features, PyTorch projects them before,
#: and a row per edge is stored.
MOST_EDGE_FEATURES = 32


def multi_aggregate(
    adj: Adjacency,
    x_src: Tensor,
    aggregations: Sequence[str],
    *,
    x_dst: Tensor | None = None,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    groups: int = 1,
    min_variance: float = 1e-5,
) -> Tensor:
    r"""Computes several aggregations of the messages to each destination in one pass over its neighbours.

    .. math::
        \mathbf{m}_{ij} = \mathbf{x}_j + \mathbf{x}_i + \mathbf{W} \mathbf{a}_{ij}, \qquad \mathbf{o}_i =
        \big[ \mathrm{agg}_1 \{\mathbf{m}_{ij}\}_j, \mathrm{agg}_2 \{\mathbf{m}_{ij}\}_j, \dots \big]

    Aggregations are sum, mean, min, max, var (the mean of :math:`(m - \bar{m})^2`) and std, as in PyG's
    ``MultiAggregation``. No message is stored. The kernel computes :math:`\mathbf{W} \mathbf{a}_{ij}` if
    edges have up to 32 features; with more, these projections are stored. The variance is computed from
    deviations from the mean, which avoids cancellation. Entries that share the minimum or maximum share its
    gradient evenly. The aggregations are those of Corso et al., "Principal Neighbourhood Aggregation for
    Graph Nets" (https://arxiv.org/abs/2004.05718).

    Args:
        adj: structure (num_dst, num_src).
        x_src: :math:`\mathbf{x}_j`, (num_src, F), float64, float32, float16 or bfloat16.
        aggregations: one or more names, each at most once; the results have the same order.
        x_dst: :math:`\mathbf{x}_i`, (num_dst, F), in the dtype of ``x_src``; None: 0.
        edge_attr: in the dtype of ``x_src`` and the caller's edge order. Without ``edge_weight``: a row per
            edge, (num_values, F), that is added to the edge's message. With ``edge_weight``:
            :math:`\mathbf{a}_{ij}`, (num_values, A). If A is more than 32, a projected row per edge is
            stored.
        edge_weight: :math:`\mathbf{W}`, (F, A), in the dtype of ``x_src``.
        groups: number of equal groups of features; the results of a group are adjacent.
        min_variance: largest variance for which the standard deviation is 0 and has no gradient.

    Returns:
        (num_dst, len(aggregations) * F) in the dtype of ``x_src``: for every group the aggregations, each of
        width F / groups. Messages are rounded to that dtype; sums are computed in float32 or wider. Rows
        without edges are 0. Differentiable; second derivatives store every message.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: an aggregation is unknown or repeated, shapes or devices do not fit, or ``adj`` is a
            :class:`~fastsparse_core.distributed.PartitionedAdjacency`.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, multi_aggregate
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0, 2]), torch.tensor([1, 2, 0]), (3, 3))
        >>> multi_aggregate(adj, torch.tensor([[1.0], [2.0], [4.0]]), ["sum", "max"])
        tensor([[6., 4.],
                [0., 0.],
                [1., 1.]])
    """
    check_structure(adj)
    if is_partitioned(adj):
        raise ValueError("adj: expected the Adjacency of a whole graph, got a PartitionedAdjacency")
    names = list(aggregations)
    if not names or len(set(names)) < len(names) or not set(names) <= set(AGGREGATIONS):
        raise ValueError(f"aggregations: expected some of {AGGREGATIONS}, each once, got {names}")
    check_features("x_src", x_src, adj.num_src, "num_src", adj)
    if x_src.dim() != 2:
        raise ValueError(f"x_src: expected shape (num_src, F), got {tuple(x_src.shape)}")
    width = x_src.size(1)
    if groups < 1 or width % groups:
        raise ValueError(f"groups: expected a divisor of the width {width}, got {groups}")
    if x_dst is not None:
        check_features("x_dst", x_dst, adj.num_dst, "num_dst", adj)
        if x_dst.shape != (adj.num_dst, width):
            raise ValueError(f"x_dst: expected shape ({adj.num_dst}, {width}), got {tuple(x_dst.shape)}")
    _check_edges(adj, width, edge_attr, edge_weight)
    given = autocast(x_src, x_dst, edge_attr, edge_weight)
    dtype = given[0].dtype  # type: ignore[union-attr]
    x, x_dst, edge, weight = (None if it is None else cast(it, dtype) for it in given)
    assert x is not None
    if weight is not None and edge is not None and weight.size(1) > MOST_EDGE_FEATURES:
        warn_once(
            "multi_aggregate stores a projected row for every edge, which takes time and memory: edges have "
            f"{weight.size(1)} features, and the fused kernel takes up to {MOST_EDGE_FEATURES}. Project them "
            "to fewer first"
        )
        edge, weight = F.linear(edge, weight), None
    slots = slots_of(tuple(names))
    if adj.num_values >= 2**32:
        warn_once(
            "multi_aggregate stores every message, which takes time and memory: the graph has "
            f"{adj.num_values} edges, and the fused kernel takes fewer than 2^32"
        )
        return kernels.unfused(adj, x, x_dst, edge, weight, slots, groups, min_variance)
    options = (slots, groups, float(min_variance), adj.num_dst, adj, False)
    return kernels.aggregate_op(x, x_dst, edge, weight, *options)[0]


@functools.cache
def slots_of(names: tuple[str, ...]) -> list[int]:
    """Position of each of `AGGREGATIONS` in the result, or -1. The list is cached: do not change it."""
    return [names.index(name) if name in names else -1 for name in AGGREGATIONS]


def _check_edges(adj: Adjacency, width: int, edge_attr: Tensor | None, edge_weight: Tensor | None) -> None:
    if edge_attr is None:
        if edge_weight is not None:
            raise ValueError("edge_weight: expected None without edge_attr, got a tensor")
        return
    check_features("edge_attr", edge_attr, adj.num_values, "num_values", adj)
    if edge_attr.dim() != 2 or (edge_weight is None and edge_attr.size(1) != width):
        raise ValueError(
            f"edge_attr: expected shape (num_values, {'A' if edge_weight is not None else width}), "
            f"got {tuple(edge_attr.shape)}"
        )
    if edge_weight is not None:
        check_features("edge_weight", edge_weight, width, "F", adj)
        check_edge_map("edge_weight", edge_weight, width, edge_attr)
