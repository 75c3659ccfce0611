"""Data of sampled blocks: rows of the graph's features, which are gathered at the first read as in DGL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from fastsparse_core.sampling import FeatureTable
from fastsparse_dgl.compat import dgl

#: DGL's storage of features by name, and one feature in it.
Frame: Any = dgl.frame.Frame
Column: Any = dgl.frame.Column
#: ``"src"``, ``"dst"`` or ``"edge"``, and the node or edge type.
Space = tuple[str, Any]
Frames = dict[Space, Any]


class GraphColumn(Column):
    """Column of a block on a GPU, whose rows are gathered from a feature on the CPU at the first read.

    DGL's own column gathers the rows on the host and then copies them to the GPU. This column reads the rows
    through a `FeatureTable`, like prefetched features, so it uses the copy on the GPU if there is one.

    Args:
        table: the feature of all nodes or edges, on the CPU.
        index: ids of the rows, on the block's device.
        reads: keys of the columns that were read so far, shared by all batches of a sampler.
        key: key of this column in ``reads``.
    """

    storage: Any
    index: Any
    device: Any

    def __init__(self, table: Tensor, index: Tensor, reads: set[Any], key: Any) -> None:
        super().__init__(table, None, index, (index.device, {}))
        self.reads, self.key = reads, key

    @property
    def data(self) -> Tensor:
        """The rows, on the block's device."""
        if self.index is not None:
            self.reads.add(self.key)
            self.storage = _rows(self.storage, self.index.long(), torch.device(self.device[0]))
            self.index = self.device = None
        rows: Tensor = Column.data.fget(self)
        return rows

    @data.setter
    def data(self, value: Tensor) -> None:
        Column.data.fset(self, value)

    def clone(self) -> Any:
        """Returns a copy, which shares the gathered rows, or gathers rows itself if none were read yet."""
        if self.index is None:
            return super().clone()
        return self._with(self.index)

    def subcolumn(self, rowids: Tensor) -> Any:
        """Returns a column with the rows at the positions ``rowids``."""
        if self.index is None:
            return super().subcolumn(rowids)
        return self._with(self.index[rowids.to(self.index.device).long()])

    def _with(self, index: Tensor) -> GraphColumn:
        made = GraphColumn(self.storage, index, self.reads, self.key)
        made.device, made.deferred_dtype = self.device, self.deferred_dtype
        return made

    def __reduce__(self) -> Any:
        return Column, (self.data, self.scheme)


def _rows(table: Tensor, index: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu" or table.requires_grad:  # reading through a FeatureTable has no gradient
        return table.index_select(0, index.to(table.device)).to(device)
    return FeatureTable(table, device)[index.to(device)]


def gathered(frame: Any, ids: Tensor, id_name: str, reads: set[Any], key: Any) -> Any:
    """Returns the frame of some nodes or edges of a graph. Features are gathered at the first read.

    Args:
        frame: the frame of all nodes or edges of a type.
        ids: ids of the nodes or edges, on the block's device.
        id_name: name under which the new frame stores the ids.
        reads: see `GraphColumn`.
        key: first part of the keys of the frame's columns in ``reads``.
    """
    made = frame.subframe(ids) if ids.device.type == "cpu" else unread(frame, ids, reads, key)
    made[id_name] = ids
    return made


def unread(frame: Any, ids: Tensor, reads: set[Any], key: Any) -> Any:
    """Returns a frame as :func:`gathered` does, for a block on a GPU. Its columns are `GraphColumn`s."""
    columns = {name: GraphColumn(frame[name], ids, reads, (key, name)) for name in frame}
    made = Frame(columns, len(ids))
    made._initializers, made._default_initializer = frame._initializers, frame._default_initializer
    return made


def read_before(frame: Any) -> dict[str, Tensor]:
    """Returns a frame's data. Columns that no batch of the sampler has read are left out, to save gathers."""
    return {
        name: frame[name]
        for name, column in frame._columns.items()
        if not isinstance(column, GraphColumn) or column.index is None or column.key in column.reads
    }


class BlockData(MutableMapping[str, Any]):
    """Tensors of the nodes or edges of one type, by name.

    Args:
        frames: the frames of a block.
        space: nodes or edges to which the tensors belong: ``("src", type)``, ``("dst", type)`` or
            ``("edge", type)``.
    """

    def __init__(self, frames: Frames, space: Space) -> None:
        self._frames, self._space = frames, space

    def __getitem__(self, name: str) -> Any:
        return self._frames[self._space][name]

    def __setitem__(self, name: str, tensor: Any) -> None:
        self._frames[self._space][name] = tensor

    def __delitem__(self, name: str) -> None:
        del self._frames[self._space][name]

    def __contains__(self, name: object) -> bool:
        return name in self._frames[self._space]

    def __iter__(self) -> Iterator[str]:
        return iter(self._frames[self._space])

    def __len__(self) -> int:
        return len(self._frames[self._space])

    def __repr__(self) -> str:
        return repr(dict(self))


class DataView:
    """The result of ``block.srcnodes[type]``: its attribute ``data`` holds the tensors by name.

    Args:
        frames: the frames of a block.
        space: as in `BlockData`.
    """

    def __init__(self, frames: Frames, space: Space) -> None:
        self._frames, self._space = frames, space

    @property
    def data(self) -> BlockData:
        """Tensors of the nodes, by name."""
        return BlockData(self._frames, self._space)


def frames_of(block: Any) -> Frames:
    """Returns the frames of DGL's block for the sources, destinations and edges of every type."""
    nodes, edges = block._node_frames, block._edge_frames
    return {
        **{("src", name): nodes[block.get_ntype_id_from_src(name)] for name in block.srctypes},
        **{("dst", name): nodes[block.get_ntype_id_from_dst(name)] for name in block.dsttypes},
        **{("edge", name): edges[block.get_etype_id(name)] for name in block.canonical_etypes},
    }


def set_frames(block: Any, frames: Mapping[Space, Any]) -> None:
    """Replaces the frames of DGL's block."""
    for name in block.srctypes:
        block._node_frames[block.get_ntype_id_from_src(name)] = frames["src", name]
    for name in block.dsttypes:
        block._node_frames[block.get_ntype_id_from_dst(name)] = frames["dst", name]
    for name in block.canonical_etypes:
        block._edge_frames[block.get_etype_id(name)] = frames["edge", name]
