"""Memory of a structure: its tensors by name, pickling, and copies to other devices."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from fastsparse_core.formats.bsb import Bsb
from fastsparse_core.formats.hybrid_rows import HybridRows
from fastsparse_core.formats.row_split import RowSplit
from fastsparse_core.structure.block_formats import BlockFormats
from fastsparse_core.structure.edge_values import EdgeValues
from fastsparse_core.structure.row_formats import TransposedOrder


class Storage(BlockFormats, EdgeValues):
    """The part of :class:`fastsparse_core.Adjacency` that lists, pickles and moves its tensors."""

    def _start(self) -> None:
        """Sets the attributes of a structure without derived data; `Adjacency` implements it."""
        raise NotImplementedError

    def _own_tensors(self) -> dict[str, Tensor]:
        tensors = {"rowptr": self.rowptr, "col": self.col}
        if isinstance(self._edge_id, Tensor):
            tensors["edge_id"] = self._edge_id
        elif isinstance(self._edge_id, TransposedOrder):
            tensors["transposed_rowptr"], tensors["transposed_col"] = self._edge_id[:2]
        if isinstance(self._loop_edge, Tensor):
            tensors["loop_edge"] = self._loop_edge
        if self._merge is not None:
            tensors["merge_source"], tensors["merge_target"] = self._merge
        return tensors

    def memory_usage(self) -> dict[str, int]:
        """Bytes of this structure and its derived data, by name; memory that tensors share counts once."""
        sizes: dict[str, int] = {}
        seen: set[int] = set()
        for name, tensor in self._tensors(set()):
            if tensor.data_ptr() not in seen or not tensor.numel():
                sizes[name] = tensor.nbytes
            seen.add(tensor.data_ptr())
        return sizes

    def _tensors(self, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name, including those of derived structures; adds the handles to ``visited``."""
        visited.add(self.handle)
        yield from self._own_tensors().items()
        results = self._of_rows.results | self._of_pattern.results | self._built.results
        for key, result in results.items():
            name = "_".join(map(str, key)) if isinstance(key, tuple) else key
            yield from self._tensors_of(name, result, visited)

    def _tensors_of(self, name: str, result: Any, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one cached result."""
        if isinstance(result, Tensor):
            yield name, result
        elif isinstance(result, (RowSplit, HybridRows, Bsb)):
            yield from ((f"{name}.{item}", tensor) for item, tensor in result.tensors().items())
        elif isinstance(result, Storage) and result.handle not in visited:
            yield from ((f"{name}.{item}", tensor) for item, tensor in result._tensors(visited))
        elif isinstance(result, (tuple, dict)):
            parts = result.values() if isinstance(result, dict) else result
            for nth, part in enumerate(parts):
                yield from self._tensors_of(name if len(parts) == 1 else f"{name}.{nth}", part, visited)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "rowptr": self.rowptr,
            "col": self.col,
            "shape": self.shape,
            "edge_id": self.edge_id,
            "num_values": self.num_values,
            "_num_given": self._num_given,
            "_loop_edge": self._loop_edge,
            "_merge": self._merge,
            "group_rows": self.group_rows,
        }


def move(item: Any, device: torch.device, non_blocking: bool) -> Any:
    """Moves a tensor, or all tensors of a tuple, to another device; returns other objects unchanged."""
    if isinstance(item, Tensor):
        return item.to(device, non_blocking=non_blocking)
    if isinstance(item, tuple):
        return tuple(move(part, device, non_blocking) for part in item)
    return item


def send_copies(cls: type[Any]) -> None:
    """Makes objects of a class send copies of their tensors to other processes.

    When PyTorch sends a CPU tensor, it moves the tensor to shared memory and frees the previous memory. A
    structure that compiled kernels use may still have the previous address. The object stores the copies: a
    process that is still starting opens them by their file descriptors, and the next process gets the same
    copies. Saving to a file copies nothing.

    Args:
        cls: class whose objects have tensors as attributes, and a `BuiltOnce` named ``_built``.
    """
    ForkingPickler.register(cls, _reduce_with_copies)


def _reduce_with_copies(structure: Any) -> tuple[Any, ...]:
    make, arguments, state, *_ = structure.__reduce_ex__(2)

    def copies() -> dict[str, Any]:
        return {name: _copy_unless_shared(item) for name, item in state.items()}

    return make, arguments, structure._built.get("sent", copies)


def _copy_unless_shared(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item if item.is_shared() else item.clone()  # on a GPU, is_shared() is always true
    return tuple(map(_copy_unless_shared, item)) if isinstance(item, tuple) else item
