"""Row grouping: windows of similar instead of consecutive rows, so that fewer vectors cover the edges.

Which rows share a window decides the number of 8x1 vectors (FlashSparse, section 2.3 and table 2), and only
the format knows the window: features, results and edge order stay the caller's.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from fastsparse_core.formats.bsb import HEIGHT, place_of_row, sort_vectors
from fastsparse_core.formats.compress import compress

if TYPE_CHECKING:
    from fastsparse_core.kernel_formats import KernelFormats

#: How the rows of a window are chosen.
Method = Literal["auto", "none", "minhash"]
#: Hashes of a row's signature.
_HASHES = 16
#: Sorted orders in which a row meets its neighbours.
_BANDS = 8
#: Bits of the keys that rows are sorted by; with those of the order, at most 32.
_KEY_BITS = 28
_random = random.Random(0)
#: Odd factors of every hash: two multiplications make one.
_FACTORS = [[2 * _random.randrange(2**20, 2**23) + 1 for _ in range(_HASHES)] for _ in range(2)]
#: Equal hashes from which on two rows count as similar (so an estimated Jaccard similarity of 3/16).
_AGREEMENT = 3
#: Rounds of pointer doubling: rows up to 2^5 links from their cluster's root find it, more are rare.
_DOUBLINGS = 5
#: Rows closer than this in natural order are neighbours in it.
_NEAR = 64
#: Pairs of rows compared at a time, which bounds the scratch memory (about 90 bytes a pair).
_PAIRS = 2**24
#: Share of the vectors that a grouping has to save: it costs locality, and gathers heavy rows into windows
#: that take long. Measured on an H200 over 27 graphs, products became faster from here on.
_LEAST_SAVING = 0.1
#: Entries per row below which products became slower whatever was saved.
_LEAST_ENTRIES = 8
#: Windows that are counted to estimate a saving.
_SAMPLE = 4096
_BYTE_ONES = 0x0101_0101_0101_0101
_INT32_MAX = 2**31 - 1


def check_method(method: str) -> None:
    """Rejects unknown names.

    Raises:
        ValueError: ``method`` is none of ``"auto"``, ``"none"``, ``"minhash"``.
    """
    if method not in get_args(Method):
        raise ValueError(f"group_rows: expected 'auto', 'none' or 'minhash', got {method!r}")


def group_rows(adj: KernelFormats, method: Method = "minhash") -> Tensor | None:
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
        method: ``"none"`` keeps the natural order, ``"auto"`` keeps it unless grouping pays
            (:func:`choose_grouping`).

    Returns:
        int32 (num_windows, 8), a permutation of the rows, rows without edges last, padded with -1; None for
        the natural order.

    Raises:
        ValueError: an unknown method.
    """
    check_method(method)
    if method == "none":
        return None
    if method == "auto":
        return choose_grouping(adj)
    if adj.num_edges:
        with torch.no_grad():
            order = _similar_order(adj)
    else:
        order = torch.arange(adj.num_dst, dtype=torch.int32, device=adj.device)
    num_windows = -(-adj.num_dst // HEIGHT)
    window_row = torch.full((num_windows * HEIGHT,), -1, dtype=torch.int32, device=adj.device)
    window_row[: adj.num_dst] = order
    return window_row.view(num_windows, HEIGHT)


def choose_grouping(adj: KernelFormats) -> Tensor | None:
    """The grouping by min-hash where products are faster with it, else None: the natural order.

    That is where rows have 8 entries or more and grouping saves at least 10 % of the vectors. Large
    structures are judged by a sample of about 4096 windows.
    """
    if adj.num_edges < _LEAST_ENTRIES * max(adj.num_dst, 1):
        return None
    window_row = group_rows(adj, "minhash")
    stride = max(1, adj.num_dst // HEIGHT // _SAMPLE)
    place, col, num_places = _sample(adj, None, stride)
    grouped_place, grouped_col, num_grouped_places = _sample(adj, window_row, stride)
    # One sort for both: the grouped windows follow the natural ones.
    first = -(-num_places // HEIGHT) * HEIGHT
    place, col = torch.cat([place, grouped_place + first]), torch.cat([col, grouped_col])
    _, _, head_entry = sort_vectors(place, col, (first + num_grouped_places, adj.num_src), HEIGHT)
    num_grouped = grouped_col.numel()
    num_natural = col.numel() - num_grouped
    vectors = int((head_entry < num_natural).sum())
    share = vectors / max(num_natural, 1)
    grouped_share = (head_entry.numel() - 1 - vectors) / max(num_grouped, 1)
    return window_row if grouped_share <= (1 - _LEAST_SAVING) * share else None


def count_vectors(adj: KernelFormats, window_row: Tensor | None = None, *, height: int = HEIGHT) -> int:
    """Number of non-zero vectors, without building blocks; a repeated edge needs a vector of its own.

    Args:
        adj: the structure.
        window_row: a grouping as of :func:`group_rows`; None: consecutive rows.
        height: rows of a window; 16 joins pairs of a grouping's windows.
    """
    return int(vectors_per_window(adj, window_row, height=height).sum())


def vectors_per_window(
    adj: KernelFormats, window_row: Tensor | None = None, *, height: int = HEIGHT
) -> Tensor:
    """Number of non-zero vectors of every window, int64 (num_windows,); see :func:`count_vectors`."""
    row = adj.row()
    place = row if window_row is None else place_of_row(window_row, adj.num_dst).index_select(0, row)
    window_entry, _, head_entry = sort_vectors(place, adj.col, adj.shape, height)
    return torch.searchsorted(head_entry, window_entry).diff()


def _sample(adj: KernelFormats, window_row: Tensor | None, stride: int) -> tuple[Tensor, Tensor, int]:
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


def _similar_order(adj: KernelFormats) -> Tensor:
    """The rows by cluster, int32 or int64 (num_dst,)."""
    from fastsparse_core.ops._spmm_extremum import spmm_extremum  # the operators import the formats

    num_rows, device = adj.num_dst, adj.device
    hashes, bits = _column_hashes(adj.num_src, device)
    # Not spmm itself: autocast would round the hashes.
    signature = spmm_extremum(hashes, None, num_rows, adj.handle, False, True)[0].int()
    del hashes
    empty = adj.in_degree() == 0
    signature.masked_fill_(empty[:, None], (1 << bits) - 1)
    # A row of few entries has as few different minima; so the sorts stay within the order of the edges.
    bands = min(max(adj.num_edges // max(num_rows, 1), 3), _BANDS)
    keys = _keys(signature[:, : bands + 1], bits)
    best = _most_similar(signature, keys)

    row = torch.arange(num_rows, device=device)
    is_linked = (best >= _AGREEMENT << 32) & ~empty
    link = torch.where(is_linked, best & (2**32 - 1), row)
    near = ((link - row).abs() <= _NEAR) & is_linked
    in_order = 2 * near.sum() > is_linked.sum()

    # Links lead to ever better pairs, equal ones to higher rows: a tree ends in a pair, whose lower row is
    # made the root.
    root = torch.where((link[link] == row) & (row < link), row, link)
    for _ in range(_DOUBLINGS):
        root = root[root]
    # Rows by cluster, inside a cluster by hash, or in natural order.
    key = torch.where(in_order, row, keys[:, 0]).int()
    cluster_ptr, key, order = compress(root.int(), key, num_rows, _INT32_MAX, sort_minor=True)
    # Clusters by the least of these; empty rows behind all others.
    least = key[cluster_ptr[root[order]]].masked_fill_(empty[order], _INT32_MAX)
    return order[torch.sort(least, stable=True).indices]


def _column_hashes(num_src: int, device: torch.device) -> tuple[Tensor, int]:
    """Seeded hashes of the columns, float32 (num_src, 16), and their number of bits.

    Each is a permutation of [0, 2^bits) with 2^bits >= num_src, made of multiplications by odd numbers and
    shifts; float32 holds 24 bits exactly, and of more the upper 24 are kept.
    """
    bits = max((num_src - 1).bit_length(), 1)
    value = torch.arange(num_src, dtype=torch.int32, device=device)[:, None].repeat(1, _HASHES)
    for factor in torch.tensor(_FACTORS, dtype=torch.int32, device=device):
        # Products may wrap: only their lower bits are kept.
        value.mul_(factor).bitwise_and_((1 << bits) - 1)
        value ^= value >> (bits + 1) // 2
    return (value >> max(bits - 24, 0)).float(), min(bits, 24)


def _keys(signature: Tensor, bits: int) -> Tensor:
    """All hashes but the last, each followed by bits of the next: int32, 28 bits, (num_rows, hashes - 1)."""
    free = _KEY_BITS - bits
    return signature[:, :-1] << free | signature[:, 1:] & ((1 << free) - 1)


def _most_similar(signature: Tensor, keys: Tensor) -> Tensor:
    """Of a row's neighbours, when rows are sorted by each column of ``keys``, the most similar one.

    Returns:
        int64 (num_rows,): its number of equal hashes in the upper, its row in the lower 32 bits; negative
        where there is no neighbour.
    """
    num_rows, device = signature.size(0), signature.device
    # Eight bits of each hash, eight hashes to a word: unequal hashes pass for equal once in 256 times.
    words = signature.to(torch.uint8).view(torch.int64)
    best = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    for some in keys.split(max(_PAIRS // max(num_rows, 1), 1), 1):
        count = some.size(1)
        band = torch.arange(count, dtype=torch.int32, device=device).repeat_interleave(num_rows)
        key = some.t().reshape(-1)
        order = compress(band, key, count, 1 << _KEY_BITS, sort_minor=True)[2]
        row = (
            order.view(count, num_rows) - torch.arange(0, count * num_rows, num_rows, device=device)[:, None]
        )
        word = words[row]
        unequal = _unequal_bytes(word[:, 1:] ^ word[:, :-1])
        agreement = (_HASHES - unequal) << 32
        score = torch.full_like(row, -1)
        torch.bitwise_or(agreement, row[:, 1:], out=score[:, :-1])
        score[:, 1:] = torch.maximum(score[:, 1:], agreement | row[:, :-1])
        best.scatter_reduce_(0, row.flatten(), score.flatten(), "amax")
    return best


def _unequal_bytes(difference: Tensor) -> Tensor:
    """Number of bytes that are not 0 in each row's words, int64 (..., words) -> (...,); overwrites these."""
    # Adding 127 carries into the highest bit of a byte unless the byte's other bits are all 0.
    carried = (difference & 0x7F7F_7F7F_7F7F_7F7F).add_(0x7F7F_7F7F_7F7F_7F7F)
    ones = difference.bitwise_or_(carried).bitwise_right_shift_(7).bitwise_and_(_BYTE_ONES)
    # The product's highest byte is the sum of all bytes.
    return ones.sum(-1).mul_(_BYTE_ONES).bitwise_right_shift_(56)
