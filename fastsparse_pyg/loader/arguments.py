"""Checks the loaders' arguments, because errors of PyG and of the core do not name the user's argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler.base import NumNeighbors

from fastsparse_core.log import range_text
from fastsparse_core.sampling.relations import ONLY_EDGES, EdgeType, checked_fanouts
from fastsparse_pyg.graph import plain_edges

#: Number of nodes, or one number per node type.
NumNodes = int | Mapping[str, int]


def checked_num_nodes(count: Any, name: str) -> int:
    """Checks the number of nodes of the data.

    Args:
        count: the number of nodes.
        name: the user's expression for the number, such as ``data.num_nodes``, for error messages.

    Raises:
        ValueError: the number is unknown or negative.
    """
    if not isinstance(count, int) or count < 0:
        raise ValueError(
            f"{name}: expected a number of nodes of at least 0, got {count}; set {name}, or give the nodes "
            "features"
        )
    return count


def checked_num_neighbors(given: Any, edge_types: list[EdgeType] | None) -> Any:
    """Converts fan-outs to the core's form: a list, or a dict by edge type if the graph has types.

    Args:
        given: the user's `num_neighbors`.
        edge_types: edge types of the graph; None: the graph has no types.

    Raises:
        TypeError: `given` is not a list of ints or a dict of lists.
        ValueError: the fan-outs are empty, contain an edge type that is not in the graph, or lack an edge
            type of the graph.
    """
    default = None
    values = given
    if isinstance(given, NumNeighbors):
        values, default = given.values, given.default
    if edge_types is None:
        return list(checked_fanouts(values, [ONLY_EDGES], "num_neighbors")[ONLY_EDGES])
    if not isinstance(values, Mapping):
        return checked_fanouts(values, edge_types, "num_neighbors")
    # PyG also accepts "source__name__destination".
    values = {
        tuple(name.split("__")) if isinstance(name, str) else name: item for name, item in values.items()
    }
    missing = [name for name in edge_types if name not in values]
    if missing and default is not None:
        values |= dict.fromkeys(missing, default)
    elif missing:
        raise ValueError(
            f"num_neighbors: expected every edge type of the graph, got a dict without "
            f"{', '.join(map(str, missing))}; use zeros, such as [0, 0], for types that are not sampled"
        )
    return checked_fanouts(values, edge_types, "num_neighbors")


def checked_input_nodes(given: Any, num_nodes: NumNodes, is_data: bool) -> Any:
    """Converts seeds to PyG's form: a tensor of ids or a mask, with the node type if the graph has types.

    Args:
        given: the user's `input_nodes`.
        num_nodes: number of nodes of the graph.
        is_data: whether the graph is a data object; only then None means all nodes.

    Raises:
        TypeError: the ids are not integers or a mask.
        ValueError: the node type is missing or not in the graph, or an id is out of range.
    """
    if not isinstance(num_nodes, Mapping):
        if given is None and is_data:
            return None
        if given is None or isinstance(given, str) or _is_typed(given):
            raise ValueError(
                "input_nodes: expected ids or a mask of the nodes, because the graph has no node types, got "
                f"{_shown(given)}"
            )
        return _checked_ids("input_nodes", given, num_nodes)
    name, ids = (given, None) if isinstance(given, str) else given if _is_typed(given) else ("", given)
    if name not in num_nodes:
        types = ", ".join(map(repr, num_nodes))
        first = next(iter(num_nodes), "type")
        raise ValueError(
            f"input_nodes: expected one of the node types {types}, alone or with ids or a mask, such as "
            f"({first!r}, ids), got {_shown(given)}"
        )
    return name if ids is None else (name, _checked_ids("input_nodes", ids, num_nodes[name]))


def checked_links(given: Any, data: Any, num_nodes: NumNodes) -> Any:
    """Converts links to PyG's form: a tensor (2, num_links), with the edge type if the graph has types.

    Args:
        given: the user's `edge_label_index`.
        data: Data, HeteroData or a pair of stores.
        num_nodes: number of nodes of the graph.

    Raises:
        TypeError: the links are not integers.
        ValueError: the edge type is missing or not in the graph, there are no links, their shape is not
            (2, num_links), or an id is out of range.
    """
    name = "edge_label_index"
    if not isinstance(num_nodes, Mapping):
        if given is None and isinstance(data, Data):
            given = data.edge_index
        if isinstance(given, tuple) and len(given) == 2 and given[0] is None:  # PyG's form for stores
            pairs = given[1]
            return given if pairs is None else (None, _checked_pairs(name, pairs, num_nodes, num_nodes))
        pairs = _checked_pairs(name, given, num_nodes, num_nodes)
        return pairs if isinstance(data, Data) else (None, pairs)
    edge_type, pairs = given, None
    if isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], (tuple, list)):
        edge_type, pairs = given
    is_type = isinstance(edge_type, (tuple, list)) and all(isinstance(part, str) for part in edge_type)
    known: Iterable[Any] = ()
    if isinstance(data, HeteroData):
        known = data.edge_types
        if is_type and len(edge_type) == 2:
            between = [each for each in known if (each[0], each[2]) == tuple(edge_type)]
            edge_type = between[0] if len(between) == 1 else edge_type
    elif is_type:
        known = {attribute.edge_type for attribute in data[1].get_all_edge_attrs()}
    if not is_type or tuple(edge_type) not in known:
        raise ValueError(
            f"{name}: expected an edge type of the graph, alone or with links, such as (edge_type, links), "
            f"got {_shown(given)}; the graph has {', '.join(map(str, known)) or 'edge types'}"
        )
    edge_type = tuple(edge_type)
    if pairs is None and isinstance(data, HeteroData):
        pairs = data[edge_type].get("edge_index")
    elif pairs is None:
        return edge_type, None
    return edge_type, _checked_pairs(name, pairs, num_nodes[edge_type[0]], num_nodes[edge_type[2]])


def _is_typed(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], str)


def _shown(given: Any) -> str:
    if isinstance(given, (tuple, list)):
        return f"({', '.join(map(_shown, given))})" if len(given) < 5 else f"{len(given)} items"
    return f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)


def _as_tensor(name: str, given: Any, expected: str) -> Tensor:
    try:
        ids = plain_edges(given) if isinstance(given, Tensor) else torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected {expected}, got {_shown(given)}") from error
    if not ids.numel() and not isinstance(given, Tensor):
        ids = ids.long()
    if ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"{name}: expected {expected}, got {ids.dtype}; convert it with .long()")
    return ids


def _checked_ids(name: str, given: Any, num_nodes: int) -> Tensor:
    ids = _as_tensor(name, given, "integer ids or a mask of nodes")
    if ids.dim() != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {tuple(ids.shape)}")
    if ids.dtype == torch.bool:
        if bool(ids[num_nodes:].any()):
            raise ValueError(f"{name}: expected a mask of {num_nodes} nodes, got one of {ids.numel()}")
    else:
        _check_range(name, ids, num_nodes)
    return ids


def _checked_pairs(name: str, given: Any, num_src: int, num_dst: int) -> Tensor:
    expected = "an integer tensor of shape (2, num_links)"
    if given is None:
        raise ValueError(f"{name}: expected {expected}, got None, and the data has no edge_index")
    pairs = _as_tensor(name, given, expected)
    if pairs.dim() != 2 or pairs.size(0) != 2 or pairs.dtype == torch.bool:
        raise ValueError(f"{name}: expected {expected}, got {pairs.dtype} of shape {tuple(pairs.shape)}")
    for row, size in enumerate((num_src, num_dst)):
        _check_range(f"{name}[{row}]", pairs[row], size)
    return pairs


def _check_range(name: str, ids: Tensor, num_nodes: int) -> None:
    if not ids.numel():
        return
    low, high = (int(end) for end in torch.aminmax(ids))
    if low < 0 or high >= num_nodes:
        raise ValueError(
            f"{name}: expected ids of the graph's {num_nodes} nodes, 0 to {num_nodes - 1}, "
            f"{range_text(low, high)}"
        )
