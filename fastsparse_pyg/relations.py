"""Converts edges with types, as PyG's relational layers accept them, to structures over relations."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor

from fastsparse_core import Adjacency, recorded
from fastsparse_core.fallback import Reason
from fastsparse_core.log import range_text
from fastsparse_core.relations import Relations
from fastsparse_pyg import fallback
from fastsparse_pyg.caching import lookup
from fastsparse_pyg.graph import caller_edges, cure_of_ids, is_sparse_matrix, raise_graph


def reason_against_relations(edge_index: object, edge_type: object) -> Reason | None:
    """Returns why edges with types cannot be converted to structures; None if they can."""
    if not isinstance(edge_index, (Tensor, SparseTensor, Adjacency)):
        raise_graph(edge_index)
    if isinstance(edge_index, SparseTensor):
        edge_type = edge_index.storage.value()
    elif (type(edge_index) is not Tensor or edge_index.layout is not torch.strided) and is_sparse_matrix(
        edge_index
    ):
        return fallback.SPARSE_MATRIX
    elif not isinstance(edge_index, Adjacency) and not (
        isinstance(edge_index, Tensor) and edge_index.dim() == 2 and edge_index.size(0) == 2
    ):
        return Reason("edges that are not of shape (2, num_edges)", fallback.PLAIN_EDGES)
    if not isinstance(edge_type, Tensor) or edge_type.is_floating_point():
        got = edge_type.dtype if isinstance(edge_type, Tensor) else type(edge_type).__name__
        cure = "; convert it with .long()" if isinstance(edge_type, Tensor) else ""
        raise ValueError(
            f"edge_type: expected one integer per edge, int64 of shape (num_edges,), got {got}{cure}"
        )
    if edge_type.dim() != 1:
        return Reason("edge types that are not a vector", "Pass `edge_type` of shape (num_edges,)")
    return fallback.COMPILED if torch.compiler.is_compiling() else None


def relations_of(
    edge_index: Any,
    edge_type: Tensor | None,
    shape: tuple[int, int],
    num_relations: int,
    flow: str,
    index: tuple[Tensor, int] | None = None,
    *,
    drops_unknown: bool = False,
) -> Relations:
    """Returns the structure of edges with types. Builds the structure if it is not in the cache.

    Args:
        edge_index: (2, E) tensor, SparseTensor (its values are the types), or Adjacency.
        edge_type: type of every edge, int64 (E,), in the order of the edges.
        shape: (number of destinations, number of sources).
        num_relations: number of types.
        flow: ``"source_to_target"`` or ``"target_to_source"``, for edge lists.
        index: for sources that are indices of features: the indices, and the number of features. The features
            become the sources.
        drops_unknown: whether edges of other types are left out, instead of an error. A captured step, which
            reads nothing from the device, always leaves them out.

    Raises:
        ValueError: lengths or devices differ.
        IndexError: an index refers to a node that does not exist, or a type is unknown and ``drops_unknown``
            is false.
    """
    key = edge_index
    parts: tuple[Tensor, ...]
    if isinstance(edge_index, SparseTensor):
        key = edge_index.storage
        row, col, edge_type = edge_index.coo()
        assert edge_type is not None
        parts = (row, col, edge_type)
    else:
        assert edge_type is not None
        parts = (edge_type,) if isinstance(edge_index, Adjacency) else (edge_index, edge_type)

    def build() -> Relations:
        assert edge_type is not None
        if isinstance(edge_index, SparseTensor):
            dst, src = row, col
        elif isinstance(edge_index, Adjacency):
            dst, src = caller_edges(edge_index)
        else:
            edges = edge_index._data if isinstance(edge_index, EdgeIndex) else edge_index
            dst, src = (edges[1], edges[0]) if flow == "source_to_target" else edges
        if edge_type.size(0) != dst.size(0) or edge_type.device != dst.device:
            raise ValueError(
                f"edge_type: expected one type for each of {dst.size(0)} edges on {dst.device}, got shape "
                f"{tuple(edge_type.shape)} on {edge_type.device}"
            )
        kind = edge_type
        known = (kind >= 0) & (kind < num_relations)
        run = recorded.current()
        if run is not None:
            dst, src, kind = _in_recorded_step(run, dst, src, kind, known, shape)
            return made(dst, src, kind)
        for name, nodes, size in (("destinations", dst, shape[0]), ("sources", src, shape[1])):
            if nodes.numel():
                low, high = (int(end) for end in torch.aminmax(nodes))
                if low < 0 or high >= size:
                    raise IndexError(
                        f"edge_index: expected {name} from 0 to {size - 1}, {range_text(low, high)}; "
                        f"{cure_of_ids(low)}"
                    )
        if not bool(known.all()):
            if not drops_unknown:
                low, high = (int(end) for end in torch.aminmax(kind))
                raise IndexError(
                    f"edge_type: expected types from 0 to {num_relations - 1}, {range_text(low, high)}; "
                    "raise num_relations, or leave out edges of other types"
                )
            dst, src, kind = dst[known], src[known], kind[known]
        return made(dst, src, kind)

    def made(dst: Tensor, src: Tensor, kind: Tensor) -> Relations:
        if index is not None:
            return Relations(dst, index[0][src], kind, (shape[0], index[1]), num_relations)
        return Relations(dst, src, kind, shape, num_relations)

    if index is not None:
        parts = (*parts, index[0])
    options = options_of(shape, num_relations, flow, None if index is None else index[1], drops_unknown)
    return cast("Relations", lookup(key, parts, options, cast("Any", build)))


def options_of(shape: tuple[int, int], num_relations: int, flow: str, *rest: Any) -> tuple[Any, ...]:
    """Returns the options on which the structure depends: the part of the cache key without tensors."""
    return shape, num_relations, flow, *(rest or (None, False)), "relations"


def _in_recorded_step(
    run: recorded.StepRun, dst: Tensor, src: Tensor, kind: Tensor, known: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Turns edges of unknown types into padding, for captured steps, which cannot read from the device."""
    if not run.has_padding:
        raise RuntimeError(
            "a captured step can leave out edges of unknown types only if it pads the edges, but these are "
            "not padded; pass the batch itself (PyG's Data), which `capture` pads"
        )
    run.check_capacity(dst, shape[0])
    run.check_capacity(src, shape[1])
    unknown = known.logical_not()
    return (
        dst.masked_fill(unknown, shape[0] - 1),
        src.masked_fill(unknown, shape[1] - 1),
        kind.masked_fill(unknown, 0),
    )
