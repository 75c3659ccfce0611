"""Caches degrees and relations of a graph, because DGL computes them again in every call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastsparse_dgl.caching import adjacency_of_index, first_relation
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.device_graph import DeviceIndex, is_one_relation
from fastsparse_dgl.hooks import operators

ALL = dgl.base.ALL


def gspmm(original: Any, g: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
    """Replaces ``dgl.ops.gspmm`` for means. DGL computes a sum first, and then divides by the degrees."""
    if reduce_op == "mean" and g._graph.number_of_etypes() == 1:
        return operators.gspmm(g._graph, op, "mean", lhs_data, rhs_data)
    return original(g, op, reduce_op, lhs_data, rhs_data)


def get_relation_graph(original: Any, index: Any, etype: int) -> Any:
    """Replaces ``HeteroGraphIndex.get_relation_graph``: every call returns the same object."""
    if is_one_relation(index):
        return index
    return first_relation(index, int(etype), lambda: original(index, etype))


def in_degrees(original: Any, graph: Any, v: Any = ALL, etype: Any = None) -> Any:
    """Replaces ``DGLGraph.in_degrees``: caches the degrees of all nodes of a graph on the GPU."""
    return _degrees(graph, etype, incoming=True) if _are_all(graph, v) else original(graph, v, etype)


def out_degrees(original: Any, graph: Any, u: Any = ALL, etype: Any = None) -> Any:
    """Replaces ``DGLGraph.out_degrees``: caches the degrees of all nodes of a graph on the GPU."""
    return _degrees(graph, etype, incoming=False) if _are_all(graph, u) else original(graph, u, etype)


def _are_all(graph: Any, nodes: Any) -> bool:
    return type(graph._graph) is DeviceIndex and dgl.base.is_all(nodes)


def _degrees(graph: Any, etype: Any, incoming: bool) -> Tensor:
    index = graph._graph.get_relation_graph(graph.get_etype_id(etype))
    adjacency = adjacency_of_index(index.host, index.device)
    degree = adjacency.in_degree() if incoming else adjacency.out_degree()
    return degree.to(graph.idtype, copy=True)
