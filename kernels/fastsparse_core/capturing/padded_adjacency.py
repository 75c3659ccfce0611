"""Structures that are written again and again in place, for CUDA graphs over sampled batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastsparse_core import gpu
from fastsparse_core.formats import lengths
from fastsparse_core.formats.hybrid_rows import HybridRows
from fastsparse_core.formats.inspection import EdgeRoom, Facts, are_compressed, inspect_levels
from fastsparse_core.formats.row_split import RowSplit, unsplit_rows
from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.build_once import Unkept


class PaddedAdjacency(Adjacency):
    """A structure with room for a number of edges, whose content :func:`write` replaces.

    Rows beyond those written are empty, and entries beyond those written belong to no row. Products and the
    gradients of their features work on it (:func:`fastsparse_core.spmm` with sum or mean), and so do layers
    made of them; what reads entries one by one, or needs another format, is refused. Nothing that is derived
    from the content is kept.

    Args:
        shape: (num_dst, num_src) at most.
        num_edges: entries at most.
        device: where it lies.

    Attributes:
        room: where the content lies.
    """

    is_padded = True

    def __init__(self, shape: tuple[int, int], num_edges: int, device: torch.device) -> None:
        num_dst = shape[0]
        room = EdgeRoom(
            rowptr=torch.zeros(num_dst + 1, dtype=torch.int64, device=device),
            col=torch.zeros(num_edges, dtype=torch.int32, device=device),
            inv_degree=torch.zeros(num_dst, device=device),
            slices=torch.zeros(num_dst, 2, dtype=torch.int64, device=device),
        )
        super().__init__(room.rowptr, room.col, shape, group_rows="none")
        self.room = room
        self._longest = lengths.slice_length(num_edges, gpu.profile_of(device))
        self._bsb_refused = True
        self.usage.scattered = 0  # all gradients come by atomics, for there is no transpose
        self._built, self._of_rows, self._of_pattern = Unkept(), Unkept(), Unkept()
        self._of_rows.results["row_split"] = unsplit_rows(room.slices)
        self._of_rows.results["inv_degree", torch.float32] = room.inv_degree
        self._built.results["csr_structure"] = self._csr_structure()

    def holds(self, facts: list[int], shape: tuple[int, int]) -> bool:
        """Whether what `write` left may be used: sorted edges within ``shape``, and no very long row.

        Args:
            facts: what `write` found in it, on the host.
            shape: (num_dst, num_src) of the edges that were written.
        """
        return are_compressed(facts, shape, self._longest)

    def out_degree(self) -> Tensor:
        """Number of entries per column, int64 (num_src,)."""
        written = torch.arange(self.num_edges, device=self.device) < self.rowptr[-1]
        zeros = torch.zeros(self.num_src, dtype=torch.int64, device=self.device)
        return zeros.scatter_add_(0, self.col.long(), written.long())

    def row(self) -> Tensor:
        """Refused: entries that were not written have no row."""
        self._refuse("entry by entry")

    @property
    def hybrid_rows(self) -> HybridRows:
        """Refused, as all work lists that the host takes numbers of."""
        self._refuse("by the algorithm 'hr'")

    def edge_groups(self, longest: int) -> RowSplit:
        """Refused, as all work lists that the host takes numbers of."""
        self._refuse("in edge groups")

    def row_once(self) -> Tensor:
        """Refused likewise."""
        self._refuse("entry by entry")

    def _transpose(self, valued: bool) -> Adjacency:
        self._refuse(
            "by its transpose, as gradients need of GAT and GATv2, of 64-bit features, of columns much "
            "longer than rows and under deterministic algorithms"
        )

    def _bsb(self) -> Any:
        self._refuse("in blocks for the tensor cores")

    def _refuse(self, how: str) -> NoReturn:
        raise RuntimeError(
            f"a padded structure cannot be read {how}: it serves spmm with sum or mean and layers made of "
            "it, such as GraphSAGE; run the step without CapturedBatches, or only these layers in it"
        )


def write(
    structures: Sequence[PaddedAdjacency], edges: Sequence[tuple[Tensor, Tensor]], facts: Facts
) -> None:
    """Replaces the content of structures by edges sorted by row, without waiting for the device.

    Args:
        structures: on one device.
        edges: destinations and sources for every structure, int32 or int64, contiguous, not empty, at most as
            many as there is room for.
        facts: about the edges, for :meth:`PaddedAdjacency.holds`.
    """
    inspect_levels(edges, [structure.room for structure in structures], facts)
