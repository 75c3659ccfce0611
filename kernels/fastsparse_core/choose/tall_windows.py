"""How tall windows are laid out for ssd's backward: their height, blocks of sources, strips and slices."""

from __future__ import annotations

from fastsparse_core.choose import bounds
from fastsparse_core.choose.slices import power_of_two
from fastsparse_core.formats.tall_windows import HEIGHT, TallLayout

#: Windows below which they are half as tall: an H200 keeps 132 x 3 blocks of threads resident.
_FEW_WINDOWS = 4 * 132 * 3
#: Groups of lanes of such a block, 384 threads, at 16 kept columns: 4 lanes each.
_WINDOW_GROUPS = 96
#: Bytes of results that stay in an H200's L2 (60 MB) while the gradient streams through it, about.
_KEPT_RESULT_BYTES = 32e6
#: Bytes a millisecond that the gradient is read at, about its bandwidth.
_GRADIENT_RATE = 4.0e9
#: Bytes a millisecond that reductions lose where they miss the L2: 14 million of 64 bytes take 0.37 ms into
#: 46 MB, which stay there, and 0.85 ms into 157 MB.
_MISS_RATE = 1.3e9


def tall_layout(shape: tuple[int, int], num_edges: int, row_bytes: int, k: int) -> TallLayout:
    """How tall windows are laid out for ssd's backward.

    Args:
        shape: (num_dst, num_src).
        num_edges: entries of the structure.
        row_bytes: of the gradient of one destination.
        k: kept columns of a source.
    """
    longest = tall_slice_length(num_edges)
    height = tall_height(shape[0], num_edges, longest)
    num_blocks = tall_blocks(shape, num_edges, row_bytes, k)
    strip = tall_strip(num_edges, num_blocks * -(-shape[0] // height))
    return TallLayout(height, num_blocks, strip, longest)


def tall_height(num_dst: int, num_edges: int, longest: int) -> int:
    """Rows of a tall window: 64, or 32 where windows are few and too short to be cut into slices.

    Taller ones share more additions, but ppi has 890 windows of 64 rows for 396 places: 0.068 ms with k = 16
    on an H200, with 32 rows 0.058.
    """
    num_windows = -(-num_dst // HEIGHT)
    few = num_windows < _FEW_WINDOWS and num_edges < longest * num_windows
    return HEIGHT // 2 if few else HEIGHT


def tall_blocks(shape: tuple[int, int], num_edges: int, row_bytes: int, k: int) -> int:
    """Blocks of sources that ssd's backward works on one after the other: a power of two up to 16.

    Of results beyond what the L2 keeps, an addition misses it and takes longer; but every window copies its
    rows of the gradient once more for every further block. It counts an addition per edge, of k floats. That
    is too many where rows of a window share sources; there a window meets few of the blocks, or has so many
    entries that copies hardly count.

    A driver saved 0.22 ms on igb-small, 0.11 on yelp and 1.9 on ogbn-products (k = 16, float16, H200); the
    costs here differ by 0.20, 0.12 and 2.8.
    """
    added, results = 4.0 * k * num_edges, 4.0 * k * shape[1]
    if results <= _KEPT_RESULT_BYTES:
        return 1

    def cost(num_blocks: int) -> float:
        missed = max(1 - num_blocks * _KEPT_RESULT_BYTES / results, 0)
        return added * missed / _MISS_RATE + num_blocks * row_bytes * shape[0] / _GRADIENT_RATE

    return min((1, 2, 4, 8, 16), key=cost)


def tall_strip(num_edges: int, num_segments: int) -> int:
    """Entries of a window and block of sources that one group of lanes sums together: 4, 8 or 16.

    Longer strips put more of a source's entries into one sum, but leave lanes idle even where a window has
    30,000 entries (reddit on an H200, k = 16, slices of 8192: 2.00 ms with 64, 1.93 with 32, 1.81 with 8).
    Where all entries of a segment fit into strips of 4, one to each group of lanes, shorter strips end sooner
    (a driver: dd, yeast and peptides-batch, of 2 to 5 entries per row).
    """
    entries = num_edges // max(num_segments, 1)
    return 4 if entries <= 4 * _WINDOW_GROUPS else power_of_two(entries // 64, 8, 16)


def tall_slice_length(num_edges: int) -> int:
    """Longest slice of a tall window, in entries: a power of two from 2048 to 32768.

    Every slice reads its window's features again, so they are as long as a full GPU allows (k = 16 on an
    H200: ogbn-arxiv 0.112 ms with 1024, 0.102 with 2048; reddit 1.81 with strips of 8 and slices of 8192,
    1.69 with 16 and 32768).
    """
    return power_of_two(num_edges // (bounds.RESIDENT_WARPS // 2), 2048, 32768)
