"""Structures that every replay of a CUDA graph builds again, without reading anything from the device."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.formats.hybrid_rows import HybridRows
from fastsparse_core.formats.row_split import RowSplit, unsplit_rows
from fastsparse_core.recorded import StepRun
from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.build_once import BuiltInRun
from fastsparse_core.structure.construction import insert_loops


class FreshAdjacency(Adjacency):
    """An edge list of a fixed size, sorted by destination on the device.

    Long rows are not cut into slices, because the number of slices would have to be read. Products, additive
    attention and dot-product attention support this structure. Tensor-core formats, and work lists whose
    length depends on the edges, are not available.

    Args:
        row: destinations, int32 or int64 (E,), within ``shape``.
        col: sources, like ``row``.
        shape: (num_dst, num_src).
        edge_id: position of every entry's value, int (E,); None: values have the order of the entries.
        is_sorted: whether destinations ascend.
    """

    is_padded = True

    def __init__(
        self,
        row: Tensor,
        col: Tensor,
        shape: tuple[int, int],
        *,
        edge_id: Tensor | None = None,
        num_given: int | None = None,
        loop_edge: Tensor | tuple[()] | None = None,
        is_sorted: bool = False,
    ) -> None:
        num_dst, device = shape[0], row.device
        if not is_sorted:
            row, order = torch.sort(row.int(), stable=True)
            col, edge_id = col[order], order.int() if edge_id is None else edge_id[order]
        rowptr = torch.empty(num_dst + 1, dtype=torch.int64, device=device)
        inv_degree = torch.empty(num_dst, device=device)
        slices = torch.empty(num_dst, 2, dtype=torch.int64, device=device)
        ends, index = row.long(), device_index(device)
        _C.emit_rows(
            row=ends,
            num_edges=ends.numel(),
            num_rows=num_dst,
            rowptr=rowptr,
            inv_degree=inv_degree,
            slices=slices,
            device=index,
            queue=queue(index),
        )
        if device.type == "cpu":  # the CPU kernel does not write the slices
            words = slices.view(torch.int32)
            slices[:, 0] = rowptr[:-1]
            words[:, 2] = rowptr.diff().int()
            words[:, 3] = torch.arange(num_dst, dtype=torch.int32)
        super().__init__(
            rowptr,
            col.int(),
            shape,
            edge_id=edge_id,
            num_given=num_given,
            loop_edge=loop_edge,
            group_rows="none",
        )
        self._built, self._of_rows = BuiltInRun(), BuiltInRun()
        self._bsb_refused = True
        self.symmetric = False
        self.usage.scattered = 0
        self._of_rows.results["row"] = row.int()
        self._of_rows.results["inv_degree", torch.float32] = inv_degree
        self._of_rows.results["row_split"] = unsplit_rows(slices)
        self._of_rows.results["has_empty_rows"] = (True,)  # not known, so callers must expect empty rows
        self.csr_structure  # noqa: B018

    @classmethod
    def of_edges(
        cls, run: StepRun, row: Tensor, col: Tensor, shape: tuple[int, int], duplicates: str, self_loops: str
    ) -> Adjacency:
        """Does what :meth:`Adjacency.from_coo` does, with checked options; indices are not checked.

        Loops that are to be dropped become entries of the last row, which is padding.

        Raises:
            RuntimeError: the number of entries would have to be read from the device, or there is no row of
                padding.
        """
        if duplicates != "keep":
            raise RuntimeError(
                f"a recorded step cannot merge edges (duplicates={duplicates!r}); merge them before the step"
            )
        run.check_capacity(row, shape[0])
        run.check_capacity(col, shape[1])
        num_given = row.numel()
        loop_edge: Tensor | tuple[()] | None = None
        if self_loops != "keep":
            count = min(shape)
            if self_loops != "append":
                if not run.has_padding:
                    raise RuntimeError(
                        "a recorded step cannot replace self loops of edges that change and are not padded; "
                        "pass a batch of PyG or DGL, or edges without loops and add_self_loops=False"
                    )
                is_loop = row == col
                # Padded edges are spread over rows: if all wrote to one address, they would wait for each
                # other.
                position = torch.arange(num_given, device=row.device).masked_fill(row != col, -1)
                own = torch.full((shape[0],), -1, dtype=torch.int64, device=row.device)
                loop_edge = own.scatter_reduce_(0, row.long(), position, "amax")[:count]
                row, col = row.masked_fill(is_loop, shape[0] - 1), col.masked_fill(is_loop, shape[1] - 1)
            row, col, _, appended = insert_loops(row, col, count, False)
            loop_edge = appended if loop_edge is None else loop_edge
        is_sorted = self_loops == "keep" and run.is_sorted(row)
        return cls(row, col, shape, num_given=num_given, loop_edge=loop_edge, is_sorted=is_sorted)

    def out_degree(self) -> Tensor:
        """Number of entries per column, int64 (num_src,)."""
        zeros = torch.zeros(self.num_src, dtype=torch.int64, device=self.device)
        return zeros.scatter_add_(0, self.col.long(), torch.ones_like(self.col, dtype=torch.int64))

    def _transpose(self, valued: bool = True) -> Adjacency:
        transposed = FreshAdjacency(
            self.col,
            self.row(),
            (self.num_src, self.num_dst),
            edge_id=self.edge_id,
            num_given=self._num_given,
            loop_edge=self._loop_edge,
        )
        transposed._parent = weakref.ref(self)
        return transposed

    def _with_columns(self, col: Tensor, num_src: int) -> Adjacency:
        return FreshAdjacency(self.row(), col, (self.num_dst, num_src), edge_id=self.edge_id, is_sorted=True)

    @property
    def hybrid_rows(self) -> HybridRows:
        """Raises an error, because the host would have to read the lengths of the work lists."""
        self._refuse("the algorithm 'hr'")

    def edge_groups(self, longest: int) -> RowSplit:
        """Raises an error, because the host would have to read the number of groups."""
        self._refuse("edge groups")

    def _bsb(self) -> Any:
        self._refuse("tensor-core blocks")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"{what}: not available in a recorded step for edges that change with every call")
