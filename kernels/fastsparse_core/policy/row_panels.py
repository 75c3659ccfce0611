"""Rules for the row panels of ssd's backward pass: height, blocks of sources, strips and slices."""

from __future__ import annotations

from fastsparse_core.formats.lengths import power_of_two
from fastsparse_core.formats.row_panels import HEIGHT, PanelLayout
from fastsparse_core.gpu import GpuProfile

#: Threads per block of ssd's backward kernel.
_WINDOW_THREADS = 384
#: Time that a panel takes in addition to reading its data, in ms.
_WINDOW_MS = 5e-6


def panel_layout(
    shape: tuple[int, int], num_edges: int, row_bytes: int, k: int, gpu: GpuProfile
) -> PanelLayout:
    """Layout of the row panels of ssd's backward pass.

    Args:
        shape: (num_dst, num_src).
        num_edges: entries of the structure.
        row_bytes: bytes of one destination's gradient.
        k: kept entries per source.
        gpu: profile of the GPU.
    """
    longest = panel_slice_length(num_edges, gpu)
    height = panel_height(shape[0], num_edges, longest, gpu)
    num_blocks = panel_blocks(shape, num_edges, row_bytes, k, gpu)
    strip = panel_strip(num_edges, num_blocks * -(-shape[0] // height), k)
    return PanelLayout(height, num_blocks, strip, longest)


def panel_height(num_dst: int, num_edges: int, longest: int, gpu: GpuProfile) -> int:
    """Rows per panel: 64, or 32 if there are few panels and they are too short to be cut into slices.

    Higher panels share more additions, but the last wave of panels leaves part of the GPU idle, which matters
    if there are only one to four waves. Measured in float16 with k = 16 on an H200: github (590 panels of 64
    rows) takes 0.0311 ms, with 32 rows 0.0289 ms; over all settings, 32 rows take 4 to 7 % less time on
    github, and between 1 % more and 4 % less on ppi (890 panels). If all panels run at once, there is no such
    loss (pubmed: 0.0154 ms, with 32 rows 0.0161 ms).
    """
    num_windows = -(-num_dst // HEIGHT)
    few = gpu.resident_panels < num_windows < 4 * gpu.resident_panels and num_edges < longest * num_windows
    return HEIGHT // 2 if few else HEIGHT


def panel_blocks(shape: tuple[int, int], num_edges: int, row_bytes: int, k: int, gpu: GpuProfile) -> int:
    """Number of blocks of sources that ssd's backward pass processes one after the other, at most 6.

    If the results exceed the L2 cache, additions miss it and take longer. On the other hand, every further
    block makes every panel copy its rows of the gradient once more. The estimate counts one addition of k
    floats per edge. Times on an H200 in float16 with k = 16, with one block and with the number chosen here:
    igb-small 0.85 and 0.66 ms (2 blocks), yelp 0.59 and 0.50 ms (2), ogbn-products 5.79 and 3.97 ms (4).
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
    """Length of a strip, the entries of a panel and block of sources that one lane group sums: 4, 8 or 16.

    Longer strips combine more of a source's entries into one sum, but leave lanes idle even if a panel has
    30,000 entries (reddit on an H200, k = 16, slices of 8192: 2.00 ms with 64, 1.93 ms with 32, 1.81 ms with
    8). If strips of 4 suffice for all entries, with one strip per lane group, they are faster (dd in float16,
    k = 16: 0.102 ms with 4, 0.108 ms with 8).
    """
    entries = num_edges // max(num_segments, 1)
    # A lane handles four kept columns if their number is a multiple of four. A group has a power of two of
    # lanes.
    lanes = 1 << min((k // 4 if k % 4 == 0 else k) - 1, 31).bit_length()
    groups = _WINDOW_THREADS // lanes
    return 4 if entries <= 4 * groups else power_of_two(entries // 64, 8, 16)


def panel_slice_length(num_edges: int, gpu: GpuProfile) -> int:
    """Largest number of entries in a slice of a row panel: a power of two from 2048 to 32768.

    Every slice reads the features of its panel again, so slices are as long as possible while they still fill
    the GPU. Measured with k = 16 on an H200: ogbn-arxiv takes 0.112 ms with slices of 1024 and 0.102 ms with
    2048; reddit takes 1.81 ms with slices of 8192 and strips of 8, and 1.69 ms with 32768 and 16.
    """
    return power_of_two(num_edges // (gpu.resident_warps // 2), 2048, 32768)
