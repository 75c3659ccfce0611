"""Groups similar rows into windows, in place of consecutive rows, so that fewer vectors cover the edges.

The number of 8x1 vectors depends on which rows share a window (FlashSparse, section 2.3 and table 2).
Grouping changes only the format: features, results and edges keep the caller's order.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.formats.bsb import HEIGHT, place_of_row, sort_vectors
from fastsparse_core.formats.compress import compress

#: Method that chooses the rows of a window (:func:`group_rows`).
Method = Literal["auto", "none", "minhash"]
_METHODS = get_args(Method)
#: Largest number of sorted orders in which rows are compared with their neighbours; fewer than the number of
#: hashes. A number of an order and a key together must fit into 32 bits.
_BANDS = 8
#: Number of pairs of rows that are compared at a time, which limits the scratch memory (about 30 bytes per
#: pair).
_PAIRS = 2**25
#: Smallest share of the vectors that a grouping must save, because grouping costs locality and puts long rows
#: into the same windows. On an H200 and 27 graphs, products were faster if the grouping saved this share.
_LEAST_SAVING = 0.1
#: With fewer entries per row on average, grouping made products slower, even if it saved many vectors.
_LEAST_ENTRIES = 8
#: Approximate number of windows whose vectors are counted to estimate the share that a grouping saves.
_SAMPLE = 4096
_INT32_MAX = 2**31 - 1


class Rows(Protocol):
    """The part of `Adjacency` that this module uses: compressed rows."""

    rowptr: Tensor
    col: Tensor
    shape: tuple[int, int]
    num_dst: int
    num_src: int

    def row_once(self) -> Tensor: ...  # noqa: D102
    @property
    def num_edges(self) -> int: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102
    def in_degree(self) -> Tensor: ...  # noqa: D102


def check_method(method: str) -> None:
    """Raises an error for an unknown method.

    Raises:
        ValueError: ``method`` is not ``"auto"``, ``"none"`` or ``"minhash"``.
    """
    if method not in _METHODS:
        raise ValueError(f"group_rows: expected 'auto', 'none' or 'minhash', got {method!r}")


def group_rows(adj: Rows, method: Method = "minhash") -> Tensor | None:
    """Groups rows with many common columns into windows.

    The method is min-wise hashing. The signature of a row consists of the minima of 16 hashes over its
    columns. The share of equal entries in two signatures estimates the Jaccard similarity of the rows'
    columns. If rows are sorted by one hash, similar rows are often near each other. So every row is compared
    with its neighbours in several sorted orders, and linked to the most similar neighbour. The connected rows
    form clusters. Clusters are sorted by the smallest hashes of their members, or by their first rows if the
    links show that similar rows are near each other already.

    Grouping takes one pass over the edges (as a minimum over 16 features would) and sorts of at most
    ``num_edges`` keys. The result is deterministic and the same on every device.

    Args:
        adj: the structure; it may be rectangular and have repeated edges.
        method: ``"minhash"`` groups rows. ``"none"`` keeps the natural order. ``"auto"`` groups rows if
            :func:`choose_grouping` expects faster products.

    Returns:
        Rows of every window, int32 (num_windows, 8): a permutation of the rows, with rows without edges last,
        padded with -1. None: the natural order.

    Raises:
        ValueError: ``method`` is unknown.
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


def choose_grouping(adj: Rows) -> Tensor | None:
    """Returns the grouping by min-hash if it should make products faster, otherwise None (natural order).

    Products should be faster if rows have on average 8 entries or more, and grouping saves at least 10 % of
    the vectors. In large structures, vectors are counted in a sample of about 4096 windows.
    """
    if adj.num_edges < _LEAST_ENTRIES * max(adj.num_dst, 1):
        return None
    window_row = group_rows(adj, "minhash")
    stride = max(1, adj.num_dst // HEIGHT // _SAMPLE)
    place, col, num_places = _sample(adj, None, stride)
    grouped_place, grouped_col, num_grouped_places = _sample(adj, window_row, stride)
    # One sort for both: the grouped windows follow the windows in natural order.
    first = -(-num_places // HEIGHT) * HEIGHT
    place, col = torch.cat([place, grouped_place + first]), torch.cat([col, grouped_col])
    _, _, head_entry = sort_vectors(place, col, (first + num_grouped_places, adj.num_src), HEIGHT)
    num_grouped = grouped_col.numel()
    num_natural = col.numel() - num_grouped
    vectors = int((head_entry < num_natural).sum())
    share = vectors / max(num_natural, 1)
    grouped_share = (head_entry.numel() - 1 - vectors) / max(num_grouped, 1)
    return window_row if grouped_share <= (1 - _LEAST_SAVING) * share else None


def vectors_per_window(adj: Rows, window_row: Tensor | None = None, *, height: int = HEIGHT) -> Tensor:
    """Number of non-zero vectors of every window, int64 (num_windows,), without building blocks.

    Every repetition of an edge counts as another vector.

    Args:
        adj: the structure.
        window_row: result of :func:`group_rows`; None: consecutive rows.
        height: number of rows per window. 16 joins two consecutive windows of ``window_row``.
    """
    row = adj.row_once()
    place = row if window_row is None else place_of_row(window_row, adj.num_dst).index_select(0, row)
    window_entry, _, head_entry = sort_vectors(place, adj.col, adj.shape, height)
    return torch.searchsorted(head_entry, window_entry).diff()


def _sample(adj: Rows, window_row: Tensor | None, stride: int) -> tuple[Tensor, Tensor, int]:
    """Selects the entries of every ``stride``-th window.

    Returns:
        Position of every entry's row among the rows of the selected windows, int32; column of every entry,
        int32; number of positions.
    """
    if window_row is None:
        if stride == 1:
            return adj.row_once(), adj.col, adj.num_dst
        window_row = torch.arange(adj.num_dst // HEIGHT * HEIGHT, dtype=torch.int32, device=adj.device)
    if stride == 1:
        return place_of_row(window_row, adj.num_dst).index_select(0, adj.row_once()), adj.col, adj.num_dst
    rows = window_row.reshape(-1, HEIGHT)[::stride].flatten()
    # Only the last window has padding (-1), so removing it does not move the rows of other windows.
    rows = rows[rows >= 0]
    length = adj.in_degree()[rows]
    end = length.cumsum(0)
    num_entries = int(end[-1])
    places = torch.arange(rows.numel(), dtype=torch.int32, device=adj.device)
    place = torch.repeat_interleave(places, length, output_size=num_entries)
    position = torch.arange(num_entries, device=adj.device) + (adj.rowptr[rows] - (end - length))[place]
    return place, adj.col[position], rows.numel()


def _similar_order(adj: Rows) -> Tensor:
    """The rows, sorted so that the rows of a cluster are consecutive, int32 (num_dst,)."""
    num_rows, device = adj.num_dst, adj.device
    index = device_index(device)
    # A row of few entries has few different minima. With fewer bands for short rows, the sorts take time in
    # proportion to the number of edges.
    bands = min(max(adj.num_edges // max(num_rows, 1), 3), _BANDS)
    column_bits = max((adj.num_src - 1).bit_length(), 1)
    signature = torch.empty(num_rows, _C.HASHES, dtype=torch.uint8, device=device)
    keys = torch.empty(bands, num_rows, dtype=torch.int32, device=device)
    _C.row_signatures(
        rowptr=adj.rowptr,
        col=adj.col,
        num_rows=num_rows,
        column_bits=column_bits,
        num_bands=bands,
        signature=signature,
        keys=keys,
        device=index,
        queue=queue(index),
    )
    best = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    for some in keys.split(max(_PAIRS // max(num_rows, 1), 1)):
        band = torch.arange(some.size(0), dtype=torch.int32, device=device).repeat_interleave(num_rows)
        order = compress(band, some.view(-1), some.size(0), 1 << _C.KEY_BITS)[2]
        _C.similar_rows(
            signature=signature,
            order=order,
            num_rows=num_rows,
            num_bands=some.size(0),
            best=best,
            device=index,
            queue=queue(index),
        )
    root = torch.empty(num_rows, dtype=torch.int32, device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    _C.link_rows(
        rowptr=adj.rowptr,
        best=best,
        num_rows=num_rows,
        root=root,
        counts=counts,
        device=index,
        queue=queue(index),
    )
    # Sorts rows by cluster. Within a cluster, rows are sorted by hash, or by number if most linked rows are
    # already near each other.
    num_linked, num_near = counts
    row = torch.arange(num_rows, dtype=torch.int32, device=device)
    key = torch.where(2 * num_near > num_linked, row, keys[0])
    cluster_ptr, key, order = compress(root, key, num_rows, _INT32_MAX)
    # Sorts clusters by their smallest key; empty rows come last.
    least = key[cluster_ptr[root[order]]]
    is_empty = (adj.rowptr[1:] == adj.rowptr[:-1])[order]
    return order[torch.sort(least.masked_fill_(is_empty, _INT32_MAX), stable=True).indices]
