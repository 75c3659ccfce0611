"""A graph as the sampler draws from it: edge types with fan-outs and weights, node types by number."""

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
#: Names in a graph of one type.
ONLY_NODES = ""
ONLY_EDGES: EdgeType = ("", "", "")

#: Fan-out that stands for all neighbours.
ALL = -1
_MOST_TYPES = 256


@dataclass(frozen=True, eq=False)
class Relation:
    """One edge type.

    Attributes:
        name: of the edge type.
        adjacency: its edges, rows are destinations.
        src: number of the sources' type.
        dst: number of the destinations' type.
        fanouts: neighbours per hop, -1 for all.
        weight: float32 (num_edges,) in the order of the entries; None: all alike.
        weight_sum: float64 (num_edges + 1,), of sampling with replacement: sums of the weights, each divided
            by the greatest of its row, before every entry.
        most_entries: of a row.
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
        """How many edges a destination may have in a hop."""
        fanout = self.fanouts[hop]
        return self.most_entries if fanout == ALL else fanout


@dataclass(frozen=True)
class Graph:
    """All edge types.

    Attributes:
        relations: in the order in which they are drawn from.
        node_types: names, by number.
        num_nodes: of every type.
        is_hetero: whether the caller gave types.
        num_hops: number of fan-outs.
        device: where the graph is.
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
    """Checks what the sampler is given; see `NeighborSampler`."""
    is_hetero = not isinstance(graph, Adjacency)
    edge_types = _by_type("graph", graph, Adjacency)
    if not is_hetero and num_nodes is not None:
        raise ValueError("num_nodes: expected None for an Adjacency, whose shape says it")
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
    """Moves what the CPU reads at random into huge pages, where it stays at its address.

    Columns of 500 MB take a thread 0.9 s, once, and their batches of a million edges 20 % less time.
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
            f"{argument}: expected {expected.__name__} or a dict of them by edge type, got {kind}"
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
    """Fan-outs of every edge type; those that a dict does not name have none.

    Args:
        fanouts: of every hop; by edge type too.
        edge_types: of the graph.
        argument: the caller's name of the fan-outs.

    Raises:
        TypeError: not a list, or a dict of lists.
        ValueError: no numbers of neighbours, or not as many for every edge type.
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
            f"{argument}: expected a dict with as many hops for every edge type, got {dict(fanouts)}"
        )
    none = (0,) * lengths.pop()
    return {name: checked.get(name, none) for name in edge_types}


def _entry_weight(weight: Tensor, adjacency: Adjacency) -> Tensor:
    """Weights in the order of the entries."""
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
    """Summed on the CPU, so that devices draw alike. Rows of tiny weights are as precise as others."""
    row, weight = adjacency.row().long().cpu(), weight.double().cpu()
    greatest = torch.zeros(adjacency.num_dst, dtype=torch.float64).scatter_reduce_(0, row, weight, "amax")
    sums = torch.zeros(weight.numel() + 1, dtype=torch.float64)
    torch.cumsum(weight / greatest.clamp(min=1e-300)[row], 0, out=sums[1:])
    return sums.to(adjacency.device)
