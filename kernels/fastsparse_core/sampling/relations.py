"""The sampler's form of a graph: edge types with fan-outs and weights, and numbered node types."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.structure.adjacency import Adjacency

#: (source node type, name, destination node type)
EdgeType = tuple[str, str, str]
#: Names of the node type and the edge type in a graph without types.
ONLY_NODES = ""
ONLY_EDGES: EdgeType = ("", "", "")

#: Fan-out that stands for all neighbours.
ALL = -1
_MOST_TYPES = 256


@dataclass(frozen=True, eq=False)
class Relation:
    """One edge type.

    Attributes:
        name: name of the edge type.
        adjacency: the edges of this type; rows are destinations.
        src: number of the sources' node type.
        dst: number of the destinations' node type.
        fanouts: number of neighbours per hop, -1 for all.
        weight: weights in the order of the entries, float32 (num_edges,); None: all weights are equal.
        weight_sum: for sampling with replacement by weight, prefix sums of the weights, starting with 0. Each
            weight is first divided by the largest weight of its row. float64 (num_edges + 1,), or None.
        most_entries: largest number of entries in a row.
    """

    name: EdgeType
    adjacency: Adjacency
    src: int
    dst: int
    fanouts: tuple[int, ...]
    weight: Tensor | None
    weight_sum: Tensor | None
    most_entries: int

    def most_slots(self, hop: int) -> int:
        """Largest number of edges that a destination can get in a hop."""
        fanout = self.fanouts[hop]
        return self.most_entries if fanout == ALL else fanout


@dataclass(frozen=True)
class Graph:
    """A graph as the sampler uses it.

    Attributes:
        relations: edge types, in the order of sampling.
        node_types: names of the node types, by number.
        num_nodes: number of nodes of every type.
        is_hetero: True if the caller passed a dict of edge types.
        num_hops: number of hops per batch.
        device: device of the graph.
    """

    relations: list[Relation]
    node_types: list[str]
    num_nodes: list[int]
    is_hetero: bool
    num_hops: int
    device: torch.device


def make_graph(
    graph: Adjacency | Mapping[EdgeType, Adjacency],
    fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]],
    weight: Tensor | Mapping[EdgeType, Tensor] | None,
    num_nodes: Mapping[str, int] | None,
    *,
    replace: bool,
) -> Graph:
    """Checks the arguments of `NeighborSampler` and converts them to a Graph.

    Raises:
        TypeError: an argument has another type.
        ValueError: fan-outs, weights or sizes do not fit the graph.
    """
    is_hetero = not isinstance(graph, Adjacency)
    edge_types = _by_type("graph", graph, Adjacency)
    if not is_hetero and num_nodes is not None:
        raise ValueError("num_nodes: expected None for an Adjacency, because its shape is known")
    sizes: dict[str, int] = dict(num_nodes or {})
    for name, adjacency in edge_types.items():
        for node_type, size in ((name[2], adjacency.num_dst), (name[0], adjacency.num_src)):
            if sizes.setdefault(node_type, size) != size:
                raise ValueError(
                    f"graph: expected {sizes[node_type]} nodes of type {node_type!r} in every edge type, got "
                    f"an Adjacency of shape {adjacency.shape} for {name}"
                )
    devices = {adjacency.device for adjacency in edge_types.values()}
    if len(devices) != 1:
        raise ValueError(f"graph: expected edge types on one device, got {sorted(map(str, devices))}")
    if len(sizes) > _MOST_TYPES:
        raise ValueError(f"graph: expected at most {_MOST_TYPES} node types, got {len(sizes)}")
    numbers = {name: number for number, name in enumerate(sizes)}
    checked = checked_fanouts(fanouts, list(edge_types))
    weights = {} if weight is None else _by_type("weight", weight, Tensor)
    for name in weights:
        if name not in edge_types:
            raise ValueError(f"weight: expected edge types of the graph, got {name}")
    relations = []
    for name, adjacency in edge_types.items():
        in_huge_pages(adjacency.rowptr, adjacency.col, adjacency.edge_id)
        entry_weight = weight_sum = None
        if name in weights:
            entry_weight = _entry_weight(weights[name], adjacency)
            if replace:
                weight_sum = _weight_sum(entry_weight, adjacency)
        most_entries = int(adjacency.rowptr.diff().max()) if adjacency.num_dst else 0
        relations.append(
            Relation(
                name,
                adjacency,
                numbers[name[0]],
                numbers[name[2]],
                checked[name],
                entry_weight,
                weight_sum,
                most_entries,
            )
        )
    num_hops = len(next(iter(checked.values())))
    return Graph(relations, list(sizes), list(sizes.values()), is_hetero, num_hops, devices.pop())


def in_huge_pages(*tensors: Tensor | None) -> None:
    """Moves tensors that the CPU reads at random into huge pages; their addresses do not change.

    For columns of 500 MB, moving takes one thread 0.9 s. Afterwards, batches of a million edges take 20 %
    less time.
    """
    for tensor in tensors:
        if tensor is not None and tensor.device.type == "cpu":
            _C.prefer_huge_pages(out=tensor, bytes=tensor.nbytes, collapse=True)


def _by_type(argument: str, given: Any, expected: type) -> dict[EdgeType, Any]:
    if isinstance(given, expected):
        return {ONLY_EDGES: given}
    if not isinstance(given, Mapping) or not given:
        kind = type(given).__name__ if not isinstance(given, Mapping) else "an empty dict"
        raise TypeError(
            f"{argument}: expected {expected.__name__} or a dict from edge types to {expected.__name__}, "
            f"got {kind}"
        )
    for name, item in given.items():
        if not (isinstance(name, tuple) and len(name) == 3):
            raise TypeError(f"{argument}: expected keys (source, name, destination), got {name!r}")
        if not isinstance(item, expected):
            raise TypeError(f"{argument}[{name}]: expected {expected.__name__}, got {type(item).__name__}")
    return dict(given)


def checked_fanouts(
    fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]],
    edge_types: list[EdgeType],
    argument: str = "fanouts",
) -> dict[EdgeType, tuple[int, ...]]:
    """Checks fan-outs, and returns the fan-outs per hop of every edge type; 0 for types that a dict omits.

    Args:
        fanouts: number of neighbours per hop, or a dict of such lists by edge type.
        edge_types: edge types of the graph.
        argument: name of the caller's argument, for error messages.

    Raises:
        TypeError: the fan-outs are not a list or a dict of lists.
        ValueError: a fan-out is not a number of neighbours, or edge types have different numbers of hops.
    """
    if not isinstance(fanouts, Mapping):
        fanouts = dict.fromkeys(edge_types, fanouts)
    elif edge_types == [ONLY_EDGES]:
        raise TypeError(
            f"{argument}: expected a list of ints, one per hop, such as [10, 5], for a graph without edge "
            f"types, got a dict of {list(fanouts)}"
        )
    checked: dict[EdgeType, tuple[int, ...]] = {}
    for name, of_type in fanouts.items():
        if name not in edge_types:
            known = ", ".join(map(str, edge_types))
            raise ValueError(f"{argument}: expected edge types of the graph, {known}, got {name!r}")
        if isinstance(of_type, (str, bytes)) or not isinstance(of_type, Sequence):
            raise TypeError(
                f"{argument}: expected a list of ints, one per hop, such as [10, 5], got {of_type!r}"
            )
        for fanout in of_type:
            is_index = hasattr(fanout, "__index__") and not isinstance(fanout, bool)
            if not is_index or not ALL <= fanout < 2**31:
                raise ValueError(
                    f"{argument}: expected numbers of neighbours, or -1 for all, got {fanout!r} in "
                    f"{of_type!r}"
                )
        checked[name] = tuple(operator.index(fanout) for fanout in of_type)
        if not of_type:
            raise ValueError(f"{argument}: expected one hop or more, such as [10, 5], got {of_type!r}")
    lengths = {len(of_type) for of_type in checked.values()}
    if len(lengths) != 1:
        raise ValueError(
            f"{argument}: expected the same number of hops for every edge type, got {dict(fanouts)}"
        )
    none = (0,) * lengths.pop()
    return {name: checked.get(name, none) for name in edge_types}


def _entry_weight(weight: Tensor, adjacency: Adjacency) -> Tensor:
    """Checks weights (num_values,), and returns them in the order of the entries, float32 (num_edges,)."""
    if weight.dim() != 1 or weight.numel() != adjacency.num_values:
        raise ValueError(
            f"weight: expected one number per edge, shape ({adjacency.num_values},), "
            f"got {tuple(weight.shape)}"
        )
    if weight.is_complex():
        raise TypeError(f"weight: expected real numbers, got {weight.dtype}")
    weight = weight.detach().to(adjacency.device, torch.float32)
    if not bool(((weight >= 0) & weight.isfinite()).all()):
        raise ValueError("weight: expected finite numbers that are not negative")
    return weight.contiguous() if adjacency.edge_id is None else weight[adjacency.edge_id.long()]


def _weight_sum(weight: Tensor, adjacency: Adjacency) -> Tensor:
    """Prefix sums of the weights, float64 (num_edges + 1,).

    They are computed on the CPU, so that all devices sample the same batches. Each weight is first divided by
    the largest weight of its row, so that rows of tiny weights are sampled as precisely as others.
    """
    row, weight = adjacency.row().long().cpu(), weight.double().cpu()
    greatest = torch.zeros(adjacency.num_dst, dtype=torch.float64).scatter_reduce_(0, row, weight, "amax")
    sums = torch.zeros(weight.numel() + 1, dtype=torch.float64)
    torch.cumsum(weight / greatest.clamp(min=1e-300)[row], 0, out=sums[1:])
    return sums.to(adjacency.device)
