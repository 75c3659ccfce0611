"""Converts values of the caller's edges to values of the structure's edges."""

from __future__ import annotations

import torch
from torch import Tensor


class EdgeValues:
    """The part of :class:`fastsparse_core.Adjacency` that converts edge values.

    Attributes:
        shape: (num_dst, num_src).
        num_values: length of an edge-value tensor.
    """

    shape: tuple[int, int]
    num_values: int
    _num_given: int  # number of the caller's edges, before loops are inserted
    #: int64 (min(shape),): the position of the caller's edge that the inserted loop of every node replaced,
    #: -1 if the node had no loop; () if no edge was replaced. None: no loops were inserted.
    _loop_edge: Tensor | tuple[()] | None
    #: For every edge before merging, int64: its position in the caller's order, and the number of its merged
    #: edge. None: no edges were merged.
    _merge: tuple[Tensor, Tensor] | None

    @property
    def has_inserted_loops(self) -> bool:
        """True if self loops were inserted at construction (see ``self_loops`` of `from_coo`)."""
        return self._loop_edge is not None

    def extend_value(
        self, value: Tensor, fill_value: float | Tensor, *, keep_existing: bool = True
    ) -> Tensor:
        """Appends values of the inserted self loops to the caller's edge values; differentiable.

        Args:
            value: floating (E, ...), in the caller's edge order.
            fill_value: value of the loops: a number, or a tensor (min(shape), ...).
            keep_existing: if True, a loop that replaced one of the caller's loops gets the value of the
                caller's loop (of the last one, if the node had several), as in PyG's
                ``add_remaining_self_loops``. If False, all loops get ``fill_value``.

        Returns:
            Values of the caller's edges and of the loops, (num_values, ...).

        Raises:
            ValueError: no self loops were inserted, or the length of ``value`` is not the number of the
                caller's edges.
        """
        count = min(self.shape)
        if self._loop_edge is None:
            raise ValueError(
                "extend_value: expected an Adjacency built with self_loops='append' or 'replace'"
            )
        if value.size(0) != self._num_given:
            raise ValueError(
                f"value: expected {self._num_given} values, one per edge that the Adjacency was made from, "
                f"got {value.size(0)}"
            )
        if isinstance(fill_value, Tensor):
            loops = fill_value.to(value.dtype)
        else:
            loops = value.new_full((count, *value.shape[1:]), fill_value)
        if keep_existing and isinstance(self._loop_edge, Tensor) and value.size(0):
            existing = (self._loop_edge >= 0).reshape(-1, *[1] * (value.dim() - 1))
            loops = torch.where(existing, value[self._loop_edge.clamp(min=0)], loops)
        return torch.cat([value, loops])

    def coalesce_value(self, value: Tensor | None = None) -> Tensor:
        """Sums the caller's edge values per merged edge of ``duplicates="sum"``; differentiable.

        Args:
            value: floating (E, ...), in the caller's edge order, followed by the inserted loops if there are
                any; None: ones, so the result counts the edges that were merged.

        Returns:
            Values of the merged edges, (num_values, ...), sorted by (row, col).

        Raises:
            ValueError: edges were not merged, or ``value`` does not have one value per edge before merging.
        """
        if self._merge is None:
            raise ValueError("coalesce_value: expected an Adjacency built with duplicates='sum'")
        source, target = self._merge
        num_values = self._num_given + (min(self.shape) if self.has_inserted_loops else 0)
        if value is None:
            value = torch.ones(num_values, device=target.device)
        if value.size(0) != num_values:
            raise ValueError(
                f"value: expected {num_values} values, one per edge before merging, got {value.size(0)}"
            )
        out = value.new_zeros(self.num_values, *value.shape[1:])
        return out.index_add(0, target, value[source])
