"""Row grouping: windows of similar instead of consecutive rows, so that fewer vectors cover the edges.

Which rows share a window decides the number of 8x1 vectors (FlashSparse, section 2.3 and table 2), and only
the format knows the window: features, results and edge order stay the caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fastsparse_core.formats.bsb import HEIGHT, place_of_row, sort_vectors

if TYPE_CHECKING:
    from fastsparse_core.adjacency import Adjacency

#: Hashes of a row's signature.
_HASHES = 16
#: Equal hashes from which on two rows count as similar (so an estimated Jaccard similarity of 3/16).
_AGREEMENT = 3
#: Rounds of pointer doubling: rows up to 2^5 links from their cluster's root find it, more are rare.
_DOUBLINGS = 5
#: Rows closer than this in natural order are neighbours in it.
_NEAR = 64
#: Pairs of rows compared at a time, which bounds the scratch memory (about 70 bytes a pair).
_PAIRS = 2**24
#: Share of the vectors that a grouping has to save to be worth its indirection.
_LEAST_SAVING = 0.05
#: Windows that are counted to estimate a saving.
_SAMPLE = 4096


def group_rows(adj: Adjacency, method: Literal["minhash", "none"] = "minhash") -> Tensor | None:
    """Rows of every window such that rows with many common columns share one.

    Min-wise hashing: the share of equal entries in the signatures of two rows, the minima of 16 hashes over
    their columns, estimates the Jaccard similarity of their column sets. Rows sorted by one hash have their
    most similar rows nearby, so every row is compared with its neighbours in several sorted orders and linked
    to the most similar. Trees of links are clusters. Clusters follow each other by the least hashes of their
    members; by their first rows where the links show that similar rows lie near each other already.

    Takes one pass over the edges (a minimum of 16 features) and sorts of at most ``num_edges`` keys.
    Deterministic, and the same on every device.

    Args:
        adj: the structure; it may be rectangular and hold duplicates.
        method: ``"none"`` keeps the natural order.

    Returns:
        int32 (num_windows, 8), a permutation of the rows, rows without edges last, padded with -1; None for
        the natural order.

    Raises:
        ValueError: an unknown method.
    """
    if method not in ("minhash", "none"):
        raise ValueError(f"method: expected 'minhash' or 'none', got {method!r}")
    if method == "none":
        return None
    with torch.no_grad():
        order = _similar_order(adj)
    num_windows = -(-adj.num_dst // HEIGHT)
    window_row = torch.full((num_windows * HEIGHT,), -1, dtype=torch.int32, device=adj.device)
    window_row[: adj.num_dst] = order
    return window_row.view(num_windows, HEIGHT)


def choose_grouping(adj: Adjacency) -> Tensor | None:
    """The grouping by min-hash where it saves at least 5 % of the vectors, else None: the natural order.

    Large structures are judged by a sample of about 4096 windows.
    """
    if adj.num_edges == 0:
        return None
    window_row = group_rows(adj, "minhash")
    stride = max(1, adj.num_dst // HEIGHT // _SAMPLE)
    shares = []
    for grouping in (None, window_row):
        place, col, num_places = _sample(adj, grouping, stride)
        _, _, head_entry = sort_vectors(place, col, (num_places, adj.num_src), HEIGHT)
        shares.append((head_entry.numel() - 1) / max(col.numel(), 1))
    return window_row if shares[1] <= (1 - _LEAST_SAVING) * shares[0] else None


def count_vectors(adj: Adjacency, window_row: Tensor | None = None, *, height: int = HEIGHT) -> int:
    """Number of non-zero vectors, without building blocks; a repeated edge needs a vector of its own.

    Args:
        adj: the structure.
        window_row: a grouping as of :func:`group_rows`; None: consecutive rows.
        height: rows of a window; 16 joins pairs of a grouping's windows.
    """
    return int(vectors_per_window(adj, window_row, height=height).sum())


def vectors_per_window(adj: Adjacency, window_row: Tensor | None = None, *, height: int = HEIGHT) -> Tensor:
    """Number of non-zero vectors of every window, int64 (num_windows,); see :func:`count_vectors`."""
    row = adj.row()
    place = row if window_row is None else place_of_row(window_row, adj.num_dst).index_select(0, row)
    window_entry, _, head_entry = sort_vectors(place, adj.col, adj.shape, height)
    return torch.searchsorted(head_entry, window_entry).diff()


def _sample(adj: Adjacency, window_row: Tensor | None, stride: int) -> tuple[Tensor, Tensor, int]:
    """Place and column of every entry in each ``stride``-th window, and the number of places."""
    if window_row is None:
        if stride == 1:
            return adj.row(), adj.col, adj.num_dst
        window_row = torch.arange(adj.num_dst // HEIGHT * HEIGHT, dtype=torch.int32, device=adj.device)
    if stride == 1:
        return place_of_row(window_row, adj.num_dst).index_select(0, adj.row()), adj.col, adj.num_dst
    rows = window_row.reshape(-1, HEIGHT)[::stride].flatten()
    # Only the last places can be absent.
    rows = rows[rows >= 0]
    length = adj.in_degree()[rows]
    end = length.cumsum(0)
    num_entries = int(end[-1])
    places = torch.arange(rows.numel(), dtype=torch.int32, device=adj.device)
    place = torch.repeat_interleave(places, length, output_size=num_entries)
    position = torch.arange(num_entries, device=adj.device) + (adj.rowptr[rows] - (end - length))[place]
    return place, adj.col[position], rows.numel()


def _similar_order(adj: Adjacency) -> Tensor:
    """The rows by cluster, int64 (num_dst,)."""
    from fastsparse_core.ops.spmm import spmm  # the operators import the formats

    num_rows, device = adj.num_dst, adj.device
    hashes, bits = _column_hashes(adj.num_src, device)
    signature = spmm(adj, hashes, reduce="min").to(torch.int32)
    del hashes
    empty = adj.in_degree() == 0
    signature.masked_fill_(empty[:, None], (1 << bits) - 1)
    # A row of few entries has as few different minima; so the sorts stay within the order of the edges.
    bands = min(max(adj.num_edges // max(num_rows, 1), 3), _HASHES)
    link, agreement, by_hash = _most_similar(signature, bits, bands)

    row = torch.arange(num_rows, device=device)
    link = torch.where((agreement >= _AGREEMENT) & ~empty, link, row)
    near = ((link - row).abs() <= _NEAR) & (link != row)
    in_order = 2 * near.sum() > (link != row).sum()

    # Links lead to ever better pairs, equal ones to higher rows: a tree ends in a pair, whose lower row is
    # made the root.
    root = torch.where((link[link] == row) & (row < link), row, link)
    for _ in range(_DOUBLINGS):
        root = root[root]
    prefix = _pack(signature, row.new_zeros(1), bits, 32).flatten()
    by_least_hash = _least(prefix, root) << 31 | root
    key = torch.where(in_order, _least(row, root), by_least_hash)
    key.masked_fill_(empty, torch.iinfo(torch.int64).max)
    # Inside a cluster: by hash too, or in natural order.
    before = torch.where(in_order, row, by_hash)
    return before[torch.sort(key[before], stable=True).indices]


def _column_hashes(num_src: int, device: torch.device) -> tuple[Tensor, int]:
    """Seeded hashes of the columns, float32 (num_src, 16), and their number of bits.

    Each is a permutation of [0, 2^bits) with 2^bits >= num_src, made of multiplications by odd numbers and
    shifts; float32 holds 24 bits exactly, and of more the upper 24 are kept.
    """
    bits = max((num_src - 1).bit_length(), 1)
    generator = torch.Generator().manual_seed(0)
    factors = 2 * torch.randint(2**20, 2**23, (3, _HASHES), generator=generator).to(device) + 1
    value = torch.arange(num_src, device=device)[:, None].repeat(1, _HASHES)
    for factor in factors:
        value.mul_(factor).bitwise_and_((1 << bits) - 1)
        value ^= value >> (bits + 1) // 2
    return (value >> max(bits - 24, 0)).float(), min(bits, 24)


def _pack(signature: Tensor, first: Tensor, bits: int, width: int) -> Tensor:
    """Keys of ``width`` bits, int64 (num_rows, len(first)): hash ``first``, then the next ones."""
    key = torch.zeros(signature.size(0), first.numel(), dtype=torch.int64, device=signature.device)
    used = nth = 0
    while used < width and nth < _HASHES:
        taken = min(bits, width - used)
        key = key << taken | signature[:, (first + nth) % _HASHES] >> (bits - taken)
        used, nth = used + taken, nth + 1
    return key


def _most_similar(signature: Tensor, bits: int, bands: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a row's neighbours, when rows are sorted by each of the first hashes, the most similar one.

    Returns:
        The row, its number of equal hashes (negative: there is no neighbour), and the rows sorted by the
        first hash; int64 (num_rows,) each.
    """
    num_rows, device = signature.size(0), signature.device
    # Eight bits of each hash: unequal hashes pass for equal once in 256 times.
    short = (signature & 255).to(torch.uint8)
    best = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    by_first_hash = best
    for band in torch.arange(bands, device=device).split(max(_PAIRS // max(num_rows, 1), 1)):
        key = _pack(signature, band, bits, 31).int().t().contiguous()
        order = torch.sort(key, dim=1, stable=True).indices
        if by_first_hash is best:
            by_first_hash = order[0]
        sorted_short = short[order]
        agreement = (sorted_short[:, 1:] == sorted_short[:, :-1]).sum(2) << 32
        score = torch.full_like(order, -1)
        score[:, :-1] = agreement | order[:, 1:]
        score[:, 1:] = torch.maximum(score[:, 1:], agreement | order[:, :-1])
        best.scatter_reduce_(0, order.flatten(), score.flatten(), "amax")
    return best & (2**32 - 1), best >> 32, by_first_hash


def _least(key: Tensor, root: Tensor) -> Tensor:
    """The least key among the rows with the same root, for every row."""
    return torch.full_like(key, torch.iinfo(torch.int64).max).scatter_reduce_(0, root, key, "amin")[root]
