"""How row panels are laid out for ssd's backward: their height, blocks of sources, strips and slices."""

from __future__ import annotations

from fastsparse_core.formats.lengths import power_of_two
from fastsparse_core.formats.row_panels import HEIGHT, PanelLayout
from fastsparse_core.gpu import GpuProfile

#: Threads of a block in ssd's backward.
_WINDOW_THREADS = 384
#: Milliseconds that a panel costs besides what it reads.
_WINDOW_MS = 5e-6


def panel_layout(
    shape: tuple[int, int], num_edges: int, row_bytes: int, k: int, gpu: GpuProfile
) -> PanelLayout:
    """How row panels are laid out for ssd's backward.

    Args:
        shape: (num_dst, num_src).
        num_edges: entries of the structure.
        row_bytes: of the gradient of one destination.
        k: kept columns of a source.
        gpu: where.
    """
    longest = panel_slice_length(num_edges, gpu)
    height = panel_height(shape[0], num_edges, longest, gpu)
    num_blocks = panel_blocks(shape, num_edges, row_bytes, k, gpu)
    strip = panel_strip(num_edges, num_blocks * -(-shape[0] // height), k)
    return PanelLayout(height, num_blocks, strip, longest)


def panel_height(num_dst: int, num_edges: int, longest: int, gpu: GpuProfile) -> int:
    """Rows of a row panel: 64, or 32 where windows are few and too short to be cut into slices.

    Taller ones share more additions, but leave a part of the GPU idle where windows fill it a few times and
    not many: github, of 590 windows of 64 rows, takes 4 to 7 % less with 32 (float16, k = 16, H200: 0.0311
    and 0.0289 ms), ppi, of 890, from 1 % more to 4 % less. Where all of them run at once that does not matter
    (pubmed 0.0154 ms, with 32 rows 0.0161).
    """
    num_windows = -(-num_dst // HEIGHT)
    few = gpu.resident_panels < num_windows < 4 * gpu.resident_panels and num_edges < longest * num_windows
    return HEIGHT // 2 if few else HEIGHT


def panel_blocks(shape: tuple[int, int], num_edges: int, row_bytes: int, k: int, gpu: GpuProfile) -> int:
    """Blocks of sources that ssd's backward works on one after the other, up to 6.

    If results exceed the L2 cache, additions miss it and take longer; but every window copies its rows of the
    gradient once more for every further block. Counted is an addition per edge, of k floats. On the H200, k =
    16 in float16: igb-small 0.85 ms with one block and 0.66 with the 2 chosen here, yelp 0.59 and 0.50 (2),
    ogbn-products 5.79 and 3.97 (4).
    """
    added, results = 4.0 * k * num_edges, 4.0 * k * shape[1]
    if results <= gpu.kept_result_bytes:
        return 1
    block_ms = row_bytes * shape[0] / gpu.gradient_rate + _WINDOW_MS * shape[0] / HEIGHT

    def cost(num_blocks: int) -> float:
        missed = max(1 - num_blocks * gpu.surely_kept_bytes / results, 0) ** 2
        return added * missed / gpu.miss_rate + num_blocks * block_ms

    return min((1, 2, 3, 4, 6), key=cost)


def panel_strip(num_edges: int, num_segments: int, k: int) -> int:
    """Entries of a window and block of sources that one group of lanes sums together: 4, 8 or 16.

    Longer strips put more of a source's entries into one sum, but leave lanes idle even where a window has
    30,000 entries (reddit on an H200, k = 16, slices of 8192: 2.00 ms with 64, 1.93 with 32, 1.81 with 8).
    Where all entries of a segment fit into strips of 4, one to each group of lanes, shorter strips end sooner
    (float16, k = 16: dd 0.102 ms with 4, 0.108 with 8).
    """
    entries = num_edges // max(num_segments, 1)
    # A lane takes four kept columns where their number allows it; lanes of a group are a power of two.
    lanes = 1 << min((k // 4 if k % 4 == 0 else k) - 1, 31).bit_length()
    groups = _WINDOW_THREADS // lanes
    return 4 if entries <= 4 * groups else power_of_two(entries // 64, 8, 16)


def panel_slice_length(num_edges: int, gpu: GpuProfile) -> int:
    """Longest slice of a row panel, in entries: a power of two from 2048 to 32768.

    Every slice reads its window's features again, so they are as long as a full GPU allows (k = 16 on an
    H200: ogbn-arxiv 0.112 ms with 1024, 0.102 with 2048; reddit 1.81 with strips of 8 and slices of 8192,
    1.69 with 16 and 32768).
    """
    return power_of_two(num_edges // (gpu.resident_warps // 2), 2048, 32768)
