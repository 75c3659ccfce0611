"""Makes the relations of graphs of several edge types, and one structure that contains all relations."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fastsparse_core import Adjacency
from fastsparse_core.locks import ForkSafeLock
from fastsparse_dgl.caching import first_relation

#: Handle of a graph -> device -> all its edge types as one structure.
_joint: Any = WeakIdKeyDictionary()
_lock = ForkSafeLock()


def relations(gidx: Any) -> list[tuple[int, tuple[int, int], Any]]:
    """Returns (number, node types of the ends, cached graph index) for every edge type."""
    meta = gidx.metagraph
    return [
        (number, meta.find_edge(number), relation(gidx, number)) for number in range(gidx.number_of_etypes())
    ]


def relation(gidx: Any, number: int) -> Any:
    """The graph index of one edge type; every call returns the same object."""
    return first_relation(gidx, number, lambda: gidx.get_relation_graph(number))


def joint(gidx: Any, device: torch.device) -> Adjacency:
    """Returns one structure for all edge types; the nodes and the edges of all types are concatenated."""
    with _lock:
        kept = _joint.setdefault(gidx, {})
        if device not in kept:
            kept[device] = _build(gidx, device)
        return kept[device]


def _build(gidx: Any, device: torch.device) -> Adjacency:
    first, total = [], 0
    for number in range(gidx.number_of_ntypes()):
        first.append(total)
        total += gidx.num_nodes(number)
    rows, columns = [], []
    for _, (source, target), part in relations(gidx):
        src, dst, _ = part.edges(0, "eid")
        columns.append(src.to(device, torch.int64) + first[source])
        rows.append(dst.to(device, torch.int64) + first[target])
    return Adjacency.from_coo(torch.cat(rows), torch.cat(columns), (total, total), group_rows="none")
