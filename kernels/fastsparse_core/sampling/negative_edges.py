"""Negative samples: a fixed number of node pairs without an edge, drawn without waiting for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastsparse_core.structure.adjacency import Adjacency


def negative_edges(
    adj: Adjacency,
    count: int | None = None,
    *,
    dst: Tensor | None = None,
    self_loops: bool | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Draws pairs of nodes that no edge of `adj` connects, uniformly and with replacement.

    The pairs are numbered row by row, :math:`p = i n + j` with :math:`n` sources. If the edges are
    :math:`e_0 < e_1 < \dots`, the :math:`k`-th pair without an edge is
    :math:`k + |\{m : e_m - m \le k\}|`, which one binary search finds. So every draw is exact, no sample is
    rejected, and the host does not wait for the device: the call can be part of a captured step. The first
    call for a structure waits for the device: it computes the sorted numbers (8 bytes per edge) and caches
    them with the structure.

    Args:
        adj: the edges to avoid.
        count: number of pairs; not together with `dst`.
        dst: destinations, int64 (count,). Each gets one pair, for example one for each positive pair of a
            BPR loss. On a GPU, the range of the destinations is not checked.
        self_loops: if True, pairs (i, i) may be drawn. None: only if ``adj.num_dst != adj.num_src``, because
            sources and destinations are then different nodes.
        generator: generator of random numbers, on the structure's device.

    Returns:
        int64 (2, count), an ``edge_index``: sources, then destinations.

    Raises:
        TypeError: neither or both of `count` and `dst` are given, or `dst` is not an int64 tensor.
        ValueError: there is no pair to draw, `dst` is given and some destination of `adj` has an edge from
            every source (even if it is not in `dst`), or a number is out of range.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency
        >>> from fastsparse_core.sampling import negative_edges
        >>> adj = Adjacency.from_coo(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), (3, 3))
        >>> sorted(set(map(tuple, negative_edges(adj, 50).t().tolist())))
        [(0, 1), (1, 2), (2, 0)]
    """
    if (count is None) == (dst is None):
        raise TypeError("negative_edges: expected either count or dst, got both or neither")
    if self_loops is None:
        self_loops = adj.num_dst != adj.num_src
    pairs = _pairs_without_edge(adj, self_loops)
    if dst is None:
        assert count is not None
        if count < 0:
            raise ValueError(f"count: expected a number of at least 0, got {count}")
        if count and not pairs.total:
            raise ValueError("adj: every pair of nodes has an edge, so there is no negative sample to draw")
        chosen = torch.randint(max(pairs.total, 1), (count,), device=adj.device, generator=generator)
    else:
        chosen = pairs.of_rows(_checked(adj, dst), generator)
    number = chosen + torch.searchsorted(pairs.skipped, chosen, right=True)
    row = number.div(adj.num_src, rounding_mode="floor")
    return torch.stack([number - row * adj.num_src, row])


def _checked(adj: Adjacency, dst: Tensor) -> Tensor:
    if not isinstance(dst, Tensor) or dst.dtype != torch.int64 or dst.dim() != 1:
        got = f"{dst.dtype} {tuple(dst.shape)}" if isinstance(dst, Tensor) else type(dst).__name__
        raise TypeError(f"dst: expected an int64 tensor of shape (count,), got {got}")
    if dst.device != adj.device:
        raise ValueError(f"dst: expected device {adj.device} like adj, got {dst.device}")
    if not dst.is_cuda and dst.numel() and not 0 <= int(dst.min()) <= int(dst.max()) < adj.num_dst:
        raise ValueError(f"dst: expected numbers from 0 to {adj.num_dst - 1}, got {dst.min()} to {dst.max()}")
    return dst


class _Pairs(NamedTuple):
    """Numbers of node pairs without an edge ("free pairs").

    Attributes:
        skipped: for every edge, the number of free pairs before it, int64 (E,).
        before: for every row, the number of free pairs before it, int64 (num_dst,).
        free: for every row, its number of free pairs, float64 (num_dst,).
        total: number of free pairs.
        some_row_is_full: True if some row has no free pair.
    """

    skipped: Tensor
    before: Tensor
    free: Tensor
    total: int
    some_row_is_full: bool

    def of_rows(self, dst: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draws one free pair of each row in ``dst``, int64 (M,); returns the pairs' numbers, int64 (M,).

        The numbers count the free pairs only.
        """
        if self.some_row_is_full:
            raise ValueError(
                "dst: expected destinations with a pair to draw, but some node of adj has an edge from every "
                "source; pass count instead"
            )
        share = torch.rand(dst.numel(), dtype=torch.float64, device=dst.device, generator=generator)
        return self.before[dst] + (share * self.free[dst]).long()  # a share below 1 never rounds up to `free`


def _pairs_without_edge(adj: Adjacency, self_loops: bool) -> _Pairs:
    """The free pairs of a structure, computed once and cached."""
    key = ("negative_edges", self_loops)
    found: _Pairs | None = adj.plans.get(key)
    if found is None:
        found = adj.plans[key] = _find_pairs(adj, self_loops)
    return found


def _find_pairs(adj: Adjacency, self_loops: bool) -> _Pairs:
    if adj.num_dst * adj.num_src >= 2**63:
        raise ValueError(f"adj: expected a shape of fewer than 2^63 pairs of nodes, got {adj.shape}")
    with torch.inference_mode(False), torch.no_grad():
        number = adj.row().long() * adj.num_src + adj.col
        if not self_loops:
            node = torch.arange(min(adj.shape), device=adj.device)
            number = torch.cat([number, node * adj.num_src + node])
        number = number.unique()
        skipped = number - torch.arange(number.numel(), device=adj.device)
        starts = torch.arange(adj.num_dst + 1, device=adj.device) * adj.num_src
        before = starts - torch.searchsorted(number, starts)
        free = before.diff().double()
        some_row_is_full = bool((free == 0).any())
        return _Pairs(skipped, before[:-1], free, int(before[-1]), some_row_is_full)
