"""Degrees of a structure's nodes, and powers of the degrees, by which layers scale features."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from fastsparse_core.formats.compress import expand_rows, row_pieces
from fastsparse_core.structure.row_formats import RowFormats


class Degrees(RowFormats):
    """The part of :class:`fastsparse_core.Adjacency` with the numbers of entries per row and column."""

    _parent: weakref.ref[Any] | None

    def t(self, *, valued: bool = True) -> Degrees:
        """The transposed structure, see :meth:`fastsparse_core.Adjacency.t`."""
        raise NotImplementedError

    def in_degree(self) -> Tensor:
        """Number of entries per row, int64 (num_dst,)."""
        return self._of_rows.get("in_degree", self.rowptr.diff)

    def out_degree(self) -> Tensor:
        """Number of entries per column, int64 (num_src,); does not build the transpose."""
        if "t" in self._built.results or self._parent is not None:
            return self.t(valued=False).in_degree()
        return self._built.get("out_degree", lambda: torch.bincount(self.col, minlength=self.num_src))

    def has_empty_rows(self) -> bool:
        """Returns True if some destination has no edge. The first call may wait for the device."""
        found: tuple[bool] = self._of_rows.results.get("has_empty_rows") or self._of_rows.get(
            "has_empty_rows", lambda: (bool((self.in_degree() == 0).any()),)
        )
        return found[0]

    def is_empty_row(self) -> Tensor:
        """Mask of the destinations without edges, bool (num_dst,)."""
        return self._of_rows.get("is_empty_row", lambda: self.in_degree() == 0)

    def loop_count(self) -> Tensor:
        """Number of self loops of every row, int64 (num_dst,)."""
        return self._built.get("loop_count", self._loop_count)

    def _loop_count(self) -> Tensor:
        count = torch.zeros(self.num_dst, dtype=torch.int64, device=self.device)
        for first, last, col in row_pieces(self.rowptr, self.col):
            row = expand_rows(self.rowptr[first : last + 1] - self.rowptr[first], col.numel()).add_(first)
            loops = row[row == col].long()
            count.index_add_(0, loops, torch.ones_like(loops))
        return count

    def inv_sqrt_degree(self, dtype: torch.dtype = torch.float32, *, loops: int = 0) -> Tensor:
        r""":math:`d_i^{-1/2}` of the in-degrees, 0 where :math:`d_i = 0`; (num_dst,).

        Args:
            dtype: dtype of the result.
            loops: number of loops that are added to every in-degree.
        """
        key = ("inv_sqrt_degree", dtype, loops)
        return self._of_rows.get(key, lambda: self._inv_sqrt_degree(dtype, loops))

    def _inv_sqrt_degree(self, dtype: torch.dtype, loops: int) -> Tensor:
        if loops:
            return self.rowptr.diff().add_(loops).to(dtype).rsqrt_()
        if dtype == torch.float32 and self._finds_inv_degree():
            return self.inv_degree().sqrt()
        return _power(self.in_degree(), -0.5, dtype)

    def inv_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        r""":math:`d_i^{-1}` of the in-degrees, 0 where :math:`d_i = 0`; (num_dst,).

        Args:
            dtype: dtype of the result.
        """
        found: Tensor | None = self._of_rows.results.get(("inv_degree", dtype))  # faster than `get`
        return (
            self._of_rows.get(("inv_degree", dtype), lambda: self._inv_degree(dtype))
            if found is None
            else found
        )

    def _inv_degree(self, dtype: torch.dtype) -> Tensor:
        if dtype == torch.float32 and self._finds_inv_degree():
            found: Tensor = self._of_rows.results["inv_degree", dtype]
            return found
        return _power(self.in_degree(), -1.0, dtype)

    def _finds_inv_degree(self) -> bool:
        """Returns True if the inverse degrees are cached.

        If the work list of the CSR kernels can be built in one launch, builds it first, because this launch
        also computes the inverse degrees.
        """
        if not self.has_sorted_slices:
            self.row_split  # noqa: B018
        return ("inv_degree", torch.float32) in self._of_rows.results

    def inv_sqrt_out_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        r""":math:`d_j^{-1/2}` of the out-degrees, 0 where :math:`d_j = 0`; (num_src,).

        Args:
            dtype: dtype of the result.
        """
        return self._built.get(("inv_sqrt_out_degree", dtype), lambda: _power(self.out_degree(), -0.5, dtype))

    def inv_out_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        r""":math:`d_j^{-1}` of the out-degrees, 0 where :math:`d_j = 0`; (num_src,).

        Args:
            dtype: dtype of the result.
        """
        return self._built.get(("inv_out_degree", dtype), lambda: _power(self.out_degree(), -1.0, dtype))


def _power(degree: Tensor, exponent: float, dtype: torch.dtype) -> Tensor:
    return degree.to(dtype).pow(exponent).nan_to_num_(posinf=0.0)
