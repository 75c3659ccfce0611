"""Choice of algorithm and tuning parameters, from structure statistics and crossovers measured on an H200.

The measurements behind the numbers are in docs/choosing.md.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from fastsparse_core.formats import tall_windows
from fastsparse_core.formats.bsb import MOST_COLUMNS
from fastsparse_core.formats.tall_windows import TallLayout
from fastsparse_core.log import info_once

if TYPE_CHECKING:
    from fastsparse_core.adjacency import Adjacency
    from fastsparse_core.formats.row_split import RowSplit

_logger = logging.getLogger("fastsparse_core")
_WHY_CSR = (
    "spmm with algorithm='flashsparse' runs as 'csr' where tensor cores cannot serve it: on the CPU, "
    "in float64, for rows that are not multiples of 16 bytes, for heads that are not multiples of a tile, "
    "for more than 2^24 sources"
)
_WHY_SDDMM_CSR = (
    "sddmm with algorithm='flashsparse' runs as 'csr' where tensor cores cannot serve it: on the CPU, in "
    "float64, for rows or heads that are not multiples of 16 bytes, for more than 65535 heads or 2^24 sources"
)

_WHY_NOT_DIRECT = (
    "spmm with algorithm='tca' or 'hr' runs as 'csr' where tensor cores cannot serve it straight from CSR: "
    "on the CPU, in float64 and float32, for rows that are not multiples of 16 bytes, for several values per "
    "edge"
)

_WHY_DECOUPLED = (
    "ssd with algorithm='maxk' runs as 'decoupled' where its atomics cannot serve it: on the CPU, in "
    "float64, for more than 1024 features, and where PyTorch is told to use deterministic algorithms"
)

SPMM_ALGORITHMS = ("auto", "csr", "flashsparse", "tca", "hr")
SDDMM_ALGORITHMS = ("auto", "csr", "flashsparse")
ATTENTION_ALGORITHMS = ("auto", "fused3s", "unfused")
SSD_ALGORITHMS = ("auto", "decoupled", "maxk", "densify")
SPARSE_LINEAR_ALGORITHMS = ("auto", "sparse", "dense")
#: operator -> the names that its calls, and `algorithms`, take
ALGORITHMS = {
    "spmm": SPMM_ALGORITHMS,
    "sddmm": SDDMM_ALGORITHMS,
    "attention": ATTENTION_ALGORITHMS,
    "ssd": SSD_ALGORITHMS,
}

#: Groups of lanes that an H200 keeps resident in the CSR kernels, about: 132 multiprocessors x 96 groups.
_RESIDENT_GROUPS = 132 * 96
#: Warps that it keeps resident in the tensor-core kernels, about: 132 multiprocessors x 32 warps.
_RESIDENT_WARPS = 132 * 32
#: Edges below which a product takes about as long as its launch, so that what it reads hardly counts.
_FEW_EDGES = 200_000
#: Edges up to which a gradient is scattered: batches have no more, and a full graph is used on.
_MOST_SCATTERED = 4_000_000
#: Edges up to which building csr's work list costs more than tca, which needs none, takes longer.
_SMALL_EDGES = 600_000
#: Rows, times tiles of 64 features, up to which tca beats flashsparse where windows are few.
_FEW_ROW_TILES = 2048
#: Bytes of a node's features in one head up to which a dot product of an edge is short.
_SHORT_PRODUCT_BYTES = 64
#: Entries per row below which sddmm and ssd's backward work from CSR.
_FEW_PER_ROW = 3
#: The part of the features that is kept, up to which ssd's backward does.
_FEW_KEPT = 16
#: Edges per source, on the average, from which ssd packs kept entries.
_GATHERED_OFTEN = 8
#: Sources from which their kept entries outgrow the L2.
_MANY_SOURCES = 500_000
#: Longest edge group of ssd, in entries: its fixed-point sums have room for as many terms. Shorter ones fill
#: small structures better and still lose, to what their partial results cost (github, k = 8: 0.032 ms at 128
#: entries, 0.048 at 32).
EDGE_GROUP_LENGTH = 128
#: Features that a buffer of ssd has room for; wider rows are summed in tiles.
MOST_SSD_FEATURES = 1024
#: Bytes of every source's row that a block of spmm keeps in shared memory where x has few rows, and what else
#: it keeps there: see spmm_resident.cu.
_RESIDENT_TILE_BYTES = 256
_RESIDENT_OTHER_BYTES = 16 * (512 + 16)
#: Edges times features from which flashsparse beats csr's tile in shared memory, in float32, where windows
#: share half of their gathers.
_MUCH_GATHERED = 60_000_000
#: Shortest slice of a window, in entries at most.
_LEAST_SLICE = 32 * 16
#: Blocks of threads that an H200 keeps resident in the kernel that works on tall windows.
_RESIDENT_WINDOWS = 132 * 3
#: Windows below which tall windows are half as tall.
_FEW_WINDOWS = 4 * _RESIDENT_WINDOWS
#: Groups of lanes of such a block, 384 threads, at 16 kept columns: 4 lanes each.
_WINDOW_GROUPS = 96
#: Bytes of results that stay in an H200's L2 (60 MB) while the gradient streams through it, about.
_KEPT_RESULT_BYTES = 32e6
#: Bytes a millisecond that the gradient is read at, about its bandwidth.
_GRADIENT_RATE = 4.0e9
#: Bytes a millisecond that reductions lose where they miss the L2: 14 million of 64 bytes take 0.37 ms into
#: 46 MB, which stay there, and 0.85 ms into 157 MB.
_MISS_RATE = 1.3e9
#: Heads that a grid has room for.
MOST_HEADS = 65_535
#: Products with a structure before `auto` converts it: a conversion costs about as much as 5 to 10 products.
REUSE = 16
#: Products with a structure whose slices lie in row order, as they do at first, before they are sorted.
UNSORTED_USES = 8
#: Gradients of a new structure that are added by atomics before its transpose is built: a structure that is
#: seen once gives one to each layer that uses it.
SCATTERS = 2
#: Edges per source up to which they are: longer sums lose digits one by one, and atomics meet.
MOST_PER_SUM = 32


#: What `algorithms` asks for in this thread or asynchronous task: operator -> algorithm.
_requests: ContextVar[Mapping[str, str] | None] = ContextVar("requests", default=None)
#: The requests of all contexts that are open anywhere, in the order of entry, and the last of them: what
#: traced code reads, because torch.compile guards on a global but cannot read a context variable.
_open: dict[int, Mapping[str, str]] = {}
_last_opened: Mapping[str, str] | None = None
_open_lock = threading.Lock()


def check_algorithm(algorithm: str, known: tuple[str, ...], name: str = "algorithm") -> None:
    """Rejects unknown names.

    Raises:
        ValueError: ``algorithm`` is not among ``known``.
    """
    if algorithm not in known:
        names = ", ".join(repr(it) for it in known)
        raise ValueError(f"{name}: expected one of {names}, got {algorithm!r}")


@contextlib.contextmanager
def algorithms(
    *,
    spmm: str | None = None,
    sddmm: str | None = None,
    attention: str | None = None,
    ssd: str | None = None,
) -> Iterator[None]:
    """Algorithms that stand in for ``"auto"`` in the calls within, of layers too; also a decorator.

    A call keeps its algorithm for its gradients, wherever ``backward()`` is called. An algorithm that a call
    names itself wins. Contexts nest; each applies to its own thread or asynchronous task. Code under
    ``torch.compile`` is compiled again where the context asks for something else; it goes by the context
    entered last in any thread.

    Args:
        spmm: one of `SPMM_ALGORITHMS`; None: as outside.
        sddmm: one of `SDDMM_ALGORITHMS`; None: as outside.
        attention: one of `ATTENTION_ALGORITHMS`; None: as outside.
        ssd: one of `SSD_ALGORITHMS`; None: as outside.

    Raises:
        ValueError: There is no algorithm of that name.

    Examples:
        >>> adj = Adjacency.from_coo(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> with algorithms(spmm="csr"):
        ...     y = spmm(adj, torch.eye(2))
    """
    asked = {"spmm": spmm, "sddmm": sddmm, "attention": attention, "ssd": ssd}
    given = {operator: algorithm for operator, algorithm in asked.items() if algorithm is not None}
    for operator, algorithm in given.items():
        check_algorithm(algorithm, ALGORITHMS[operator], operator)
    requests = {**(_requests.get() or {}), **given}
    token = _requests.set(requests)
    _show_to_traces(id(requests), requests)
    try:
        yield
    finally:
        _requests.reset(token)
        _show_to_traces(id(requests), None)


def _show_to_traces(context: int, requests: Mapping[str, str] | None) -> None:
    """Notes that a context was entered or, without requests, left."""
    global _last_opened
    with _open_lock:
        if requests is None:
            del _open[context]
        else:
            _open[context] = requests
        _last_opened = next(reversed(_open.values()), None)


def requested(operator: str, algorithm: str) -> str:
    """The algorithm that a call asks for, by itself or, where it says ``"auto"``, through `algorithms`.

    Operators call it once, in the forward pass: backward runs in other threads, which know no context.

    Raises:
        ValueError: The operator has no algorithm of that name.
    """
    if algorithm != "auto":
        check_algorithm(algorithm, ALGORITHMS[operator])
        return algorithm
    requests = _last_opened if torch.compiler.is_compiling() else _requests.get()
    return algorithm if requests is None else requests.get(operator, algorithm)


def slice_length(num_edges: int) -> int:
    """Longest slice of a CSR row, in entries: a power of two from 32 to 1024.

    Small graphs need short slices to fill the GPU; beyond a few million edges 512 entries cost next to
    nothing in partial results (two rows written and read per 512 gathered), beyond 50 million 1024 cost less.
    Up to 128 the length is rounded up (github on an H200, F = 128: 0.050 ms with 32, 0.0475 with 64).
    """
    target = num_edges // _RESIDENT_GROUPS
    if target <= 128:
        return _power_of_two(2 * target - 1, 32, 128)
    return _power_of_two(target, 32, 512 if num_edges < 50_000_000 else 1024)


def long_edge_groups(groups: RowSplit, num_edges: int, k: int) -> tuple[int, bool]:
    """Edge groups that each take a warp of ssd, and whether the others, which share warps, have few entries.

    The others have a launch of their own, so they should be many (pubmed lost a third by it). On the H200 at
    k = 8 sharing pays where rows have two or three entries (yeast 0.91 to 0.57 ms, peptides 0.085 to 0.054)
    by one kernel, and by another where most have up to 31 (dd 0.168 to 0.129, 0.162 to 0.096 in float16);
    with many kept entries it does not.
    """
    num_groups = groups.slices.size(0)
    if num_edges < _FEW_EDGES:
        return num_groups, False
    if num_edges < 4 * num_groups:
        return groups.num_long, True
    most_are_middle = 2 * groups.num_longest < num_groups and k <= 32
    return (groups.num_longest if most_are_middle else num_groups), False


def packs_ssd_rows(adj: Adjacency, dtype: torch.dtype, k: int, width: int) -> bool:
    """Whether ssd packs kept entries, four to 16 bytes, before it gathers them.

    The pass moves 9 k bytes per source in float32 and is a launch more, so a source should be gathered often,
    and from far: on the H200 at k = 32 igb-small takes 0.92 ms without it and 0.81 with, yelp 0.80 and 0.72,
    ogbn-products 5.25 and 4.60; ppi, whose rows lie in the L2, 0.079 and 0.086, reddit 3.93 and 4.05.
    """
    often = adj.num_edges >= _GATHERED_OFTEN * adj.num_src and adj.num_src >= _MANY_SOURCES
    return often and dtype != torch.float64 and 16 <= k <= 32 and k % 4 == 0 and width <= 256


def slice_blocks(num_blocks: int) -> int:
    """Longest slice of a window, in blocks of 16 vectors: a power of two from 32 to 256."""
    least = 32 if num_blocks < 90_000 else 64
    return _power_of_two(num_blocks // (2 * _RESIDENT_WARPS), least, 256)


def sddmm_slice_blocks(num_blocks: int) -> int:
    """The same for sddmm, whose slices leave no partial results: 8 to 64, short on small structures."""
    if num_blocks < 50_000:
        return 8
    return 16 if num_blocks < 200_000 else 64


def run_blocks(num_blocks: int) -> int:
    """Blocks of a run of short windows: up to 16, as far as the GPU stays full."""
    return _power_of_two(num_blocks // _RESIDENT_WARPS, 1, 16)


def sddmm_run_blocks(num_blocks: int) -> int:
    """The same for sddmm, where joining saves less: up to 8, as far as every warp has some to take."""
    return _power_of_two(num_blocks // (4 * _RESIDENT_WARPS), 1, 8)


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
    num_windows = -(-num_dst // tall_windows.HEIGHT)
    few = num_windows < _FEW_WINDOWS and num_edges < longest * num_windows
    return tall_windows.HEIGHT // 2 if few else tall_windows.HEIGHT


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
    return 4 if entries <= 4 * _WINDOW_GROUPS else _power_of_two(entries // 64, 8, 16)


def tall_slice_length(num_edges: int) -> int:
    """Longest slice of a tall window, in entries: a power of two from 2048 to 32768.

    Every slice reads its window's features again, so they are as long as a full GPU allows (k = 16 on an
    H200: ogbn-arxiv 0.112 ms with 1024, 0.102 with 2048; reddit 1.81 with strips of 8 and slices of 8192,
    1.69 with 16 and 32768).
    """
    return _power_of_two(num_edges // (_RESIDENT_WARPS // 2), 2048, 32768)


def csr_tile(adj: Adjacency, item_size: int, *, weighted: bool) -> int:
    """Features that the CSR kernel gathers per pass over the structure.

    Eight lanes of 16 bytes, 128 bytes of a row, are the fastest gather. Where a pass costs more than its
    columns, because rows have few entries or entries have weights to look up, float32 takes 256 bytes.
    """
    few_entries = adj.num_edges < 6 * adj.num_dst and adj.num_edges > _FEW_EDGES
    return (256 if item_size == 4 and (weighted or few_entries) else 128) // item_size


def features_per_lane(width: int, item_size: int) -> int:
    """Features per lane and gathered row on the tensor cores: up to 16 bytes, as few as the width needs."""
    most = 16 // item_size
    while most > 2 and (width % most or width <= 4 * most):
        most //= 2
    return most


def blocks_per_step(num_blocks: int, num_windows: int) -> int:
    """Blocks that a warp gathers at once: 2 where windows have several, else 1 and more warps."""
    return 2 if num_blocks >= 2.5 * num_windows else 1


def spmm_algorithm(
    adj: Adjacency,
    algorithm: str,
    dtype: torch.dtype,
    width: int,
    heads: int,
    aligned: bool,
    dense: bool = False,
    *,
    weighted: bool = True,
) -> str:
    """Resolves ``"auto"``, and a request that this call cannot serve, to the name of a kernel.

    Args:
        adj: the structure; counts its uses.
        algorithm: as the caller asked.
        dtype: of the features.
        width: features per node.
        heads: values per edge, 1 without.
        aligned: features and result allow 16-byte accesses to whole rows.
        dense: values are dense vectors, which only ``"flashsparse"`` reads as they are.
        weighted: edges or sources have factors, which ``"tca"`` rounds to the dtype of the features.
    """
    if algorithm == "csr":
        return algorithm
    if algorithm in ("tca", "hr"):
        if adj.device.type == "cuda" and dtype.itemsize == 2 and aligned and width > 0 and heads == 1:
            return algorithm
        info_once(_logger, _WHY_NOT_DIRECT)
        return "csr"
    if not _flashsparse_fits(adj, dtype, width, heads, aligned):
        if algorithm == "flashsparse":
            info_once(_logger, _WHY_CSR)
        return "csr"
    if algorithm == "flashsparse" or dense:
        return "flashsparse"
    takes_tca = dtype != torch.float32 and heads == 1
    if spmm_resident(adj, "csr", dtype, width, heads, aligned) or _has_few_windows(adj, dtype, width):
        if dtype == torch.float32 and not weighted and _gathers_much_once(adj, width):
            return "flashsparse"
        if weighted or not takes_tca:
            return "csr"
        # Tensor cores look up nothing for an edge without a factor, and need warps all the same.
        if adj.num_dst * math.ceil(width / 64) <= _FEW_ROW_TILES:
            return "tca"
    if not _is_converted(adj):
        # As long as nobody needed it, a work list costs more than what it saves on a small structure. When
        # that is depends on the calls before, which must not change the bits of deterministic algorithms.
        small = 4 * adj.num_dst <= adj.num_edges <= _SMALL_EDGES
        spared = takes_tca and not weighted and small and not adj.has_row_split
        return "tca" if spared and not torch.are_deterministic_algorithms_enabled() else "csr"
    if dtype != torch.float32 or (width <= 64 and adj.num_edges < _FEW_EDGES):
        return "flashsparse"
    # In float32 the CSR kernel gathers as fast: tensor cores win by the rows that 8 destinations share, and
    # with rows of up to 64 bytes.
    if adj.num_edges < 4 * adj.num_dst and adj.num_edges < 1_000_000:
        return "csr"
    if width <= 16 and adj.num_edges >= 4 * adj.num_dst:
        return "flashsparse"
    return "flashsparse" if adj.bsb.num_vectors <= 0.85 * adj.num_edges else "csr"


def spmm_resident(
    adj: Adjacency, algorithm: str, dtype: torch.dtype, width: int, heads: int, aligned: bool
) -> bool:
    """Whether csr or tca gathers from a tile of all sources in shared memory (spmm_resident.cu).

    That takes a GPU whose blocks have room for the tile, sources that rows gather several times, and features
    that fill half a tile. On pruned matrices csr gains 1.1 to 1.5 times with as many rows as sources, tca
    nothing, and with four times as many rows both gain (docs/choosing.md).

    Args:
        adj: the structure.
        algorithm: ``"csr"`` or ``"tca"``; the others have no such form.
        dtype: of the features.
        width: features per node.
        heads: values per edge, 1 without.
        aligned: features allow 16-byte accesses to whole rows.
    """
    rows_per_source = {"csr": 1, "tca": 2}.get(algorithm, 0)
    if not 0 < rows_per_source * adj.num_src <= adj.num_dst:
        return False
    if adj.device.type != "cuda" or dtype == torch.float64 or heads > 1 or not aligned:
        return False
    tile_bytes = (adj.num_src + 1) * _RESIDENT_TILE_BYTES
    fits = tile_bytes + _RESIDENT_OTHER_BYTES <= _shared_memory(adj.device)
    return fits and 2 * width * dtype.itemsize > _RESIDENT_TILE_BYTES


def _has_few_windows(adj: Adjacency, dtype: torch.dtype, width: int) -> bool:
    """Whether flashsparse would leave most of an H200 idle, while few warps go through long windows."""
    tiles = math.ceil(width / (8 * features_per_lane(width, dtype.itemsize)))
    most_slices = adj.num_dst / 8 + adj.num_edges / _LEAST_SLICE
    return most_slices * tiles < _RESIDENT_WARPS and adj.num_edges >= 8 * adj.num_dst


def _gathers_much_once(adj: Adjacency, width: int) -> bool:
    """Whether a converted structure saves tensor cores so many gathers that few windows do not matter.

    On a pruned matrix of 2048 rows, half of it kept, an H200 takes 39.8 us with csr in float32 at 256
    features, which come from shared memory, and 26.0 with flashsparse.
    """
    return (
        adj.has_bsb and adj.num_edges * width >= _MUCH_GATHERED and 2 * adj.bsb.num_vectors <= adj.num_edges
    )


def _is_converted(adj: Adjacency) -> bool:
    """Whether `auto` finds the structure in binary sparse blocks; counts a use, and converts after enough."""
    if adj.has_bsb:
        return True
    adj.uses += 1
    reused = adj.uses > REUSE and not torch.are_deterministic_algorithms_enabled()
    return reused and not torch.cuda.is_current_stream_capturing() and adj.try_bsb()


def scatters(adj: Adjacency, algorithm: str, dtype: torch.dtype, value: torch.Tensor | None) -> bool:
    """Whether a gradient comes straight from the rows of a structure, by atomics; counts it if so.

    Only of structures that came sorted and were used little, as samplers give them; the others are worth
    their transpose. Not in float64, which is for checks that ask for the same bits.

    Args:
        adj: the structure of the forward pass.
        algorithm: as the caller of the forward pass asked.
        dtype: of the gradient.
        value: values of edges.
    """
    if (
        adj.scatters_left is None
        or algorithm != "auto"
        or dtype == torch.float64
        or (value is not None and (value.dim() > 2 or value.numel() != adj.num_values))
        or adj.num_edges > MOST_PER_SUM * adj.num_src
        or adj.num_edges > _MOST_SCATTERED
        or adj.has_transpose
        # On the CPU every run gives the same bits, but a transpose, which later gradients take, gives others.
        or torch.are_deterministic_algorithms_enabled()
    ):
        return False
    if adj.scatters_left <= 0:
        # A transpose cannot be built while a CUDA graph is captured.
        return adj.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    adj.scatters_left -= 1
    return True


def attention_algorithm(algorithm: str, obstacle: str) -> str:
    """Resolves ``"auto"``, and a request that this call cannot serve, to ``"fused3s"`` or ``"unfused"``.

    Args:
        algorithm: as the caller asked.
        obstacle: why the fused kernels cannot serve the call, "" if they can.
    """
    if algorithm == "unfused":
        return algorithm
    if obstacle:
        info_once(_logger, f"attention runs as 'unfused', with memory for every edge: {obstacle}")
        return "unfused"
    return "fused3s"


def ssd_algorithm(
    algorithm: str, device: torch.device, dtype: torch.dtype, k: int, width: int, deterministic: bool
) -> str:
    """Resolves ``"auto"``, and a request that this call cannot serve, to the name of a kernel.

    Args:
        algorithm: as the caller asked.
        device: of the values.
        dtype: of the values.
        k: entries in every row.
        width: features per row.
        deterministic: whether atomics on floats are ruled out.
    """
    if algorithm == "maxk":
        obstacle = device.type != "cuda" or dtype == torch.float64 or width > MOST_SSD_FEATURES
        if obstacle or deterministic:
            info_once(_logger, _WHY_DECOUPLED)
            return "decoupled"
    if algorithm != "auto":
        return algorithm
    # Dense rows cost their width in bytes, kept entries their number in additions to shared memory.
    most = width // 8 if dtype.itemsize == 2 else width // 4
    return "decoupled" if k <= most or device.type == "cpu" else "densify"


#: Share of weights from which a pruned layer is faster as a dense product, on CUDA: tensor cores leave little
#: to win in 16 bit. In 32 bit that of matrices whose sources fit into shared memory, and that of larger ones.
_DENSE_FROM_IN_16_BIT = 0.005
_DENSE_FROM_OF_SMALL, _DENSE_FROM_OF_LARGE = 0.4, 0.08
#: Weights, with the zeros, up to which a matrix is small in this sense.
_SMALL_MATRIX = 2**21
#: The same on the CPU, where training decides: inference alone has its crossover beyond one half.
_DENSE_FROM_ON_CPU = 0.3
#: Rows of a batch below which writing the dense matrix costs more than either product.
_FEW_ROWS = 8
#: Bytes of a dense matrix that no speed is worth: autograd keeps one per layer.
_MOST_DENSE_BYTES = 2**30


def sparse_linear_algorithm(
    algorithm: str,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    num_weights: int,
    batch: int,
) -> str:
    """Resolves ``"auto"`` to ``"sparse"`` (spmm) or ``"dense"`` (a product with the zeros written out).

    Args:
        algorithm: as the caller asked.
        device: of the weights.
        dtype: that is computed in.
        shape: of the weight matrix.
        num_weights: that are left of it.
        batch: rows that are multiplied.
    """
    if algorithm != "auto":
        return algorithm
    total = shape[0] * shape[1]
    if batch < _FEW_ROWS or total * dtype.itemsize > _MOST_DENSE_BYTES:
        return "sparse"
    if device.type != "cuda":
        dense_from = _DENSE_FROM_ON_CPU
    elif dtype.itemsize == 2:
        dense_from = _DENSE_FROM_IN_16_BIT
    else:
        dense_from = _DENSE_FROM_OF_SMALL if total <= _SMALL_MATRIX else _DENSE_FROM_OF_LARGE
    return "dense" if num_weights >= dense_from * total else "sparse"


def sddmm_algorithm(
    adj: Adjacency,
    algorithm: str,
    dtype: torch.dtype,
    head_bytes: int,
    heads: int,
    aligned: bool,
    dense: bool = False,
) -> str:
    """Resolves ``"auto"``, and a request that this call cannot serve, to ``"csr"`` or ``"flashsparse"``.

    Args:
        adj: the structure; counts its uses.
        algorithm: as the caller asked.
        dtype: of the features.
        head_bytes: of one node's features in one head.
        heads: dot products per edge.
        aligned: rows of both features, and heads in them, start at multiples of 16 bytes.
        dense: the result is dense vectors, which only ``"flashsparse"`` writes.
    """
    if algorithm == "csr":
        return algorithm
    fits = adj.device.type == "cuda" and dtype != torch.float64 and aligned and head_bytes > 0
    if not fits or heads > MOST_HEADS or adj.num_src > MOST_COLUMNS:
        if algorithm == "flashsparse":
            info_once(_logger, _WHY_SDDMM_CSR)
        return "csr"
    if algorithm == "flashsparse" or dense:
        return "flashsparse"
    # csr gathers a source for every edge, the tensor cores for every vector of 8 rows: it shows where there
    # is much to gather. In float32 they multiply three times. Several heads were not measured: each reads the
    # structure again, and writes every heads-th number.
    if dtype == torch.float32 or head_bytes <= _SHORT_PRODUCT_BYTES or heads > 1:
        return "csr"
    if adj.num_edges < max(_FEW_EDGES, _FEW_PER_ROW * adj.num_dst) or not _is_converted(adj):
        return "csr"
    if not adj.has_sddmm_structure and torch.cuda.is_current_stream_capturing():
        return "csr"  # what spmm converted may lack sddmm's work list, which a capture cannot build
    return "flashsparse"


def sddmm_by_entry(adj: Adjacency, aligned: bool) -> bool:
    """Whether sddmm with ``"csr"`` works entry by entry on CUDA, else row by row.

    It loads 16 bytes a lane, and needs the row of every entry: 4 bytes an entry that stay with the structure.
    """
    return adj.device.type == "cuda" and aligned


def ssd_backward_algorithm(adj: Adjacency, dtype: torch.dtype, width: int, k: int) -> str:
    """``"windows"`` (atomic sums over tall windows) or ``"csr"`` (row by row of the transpose).

    Windows read all features of a row, row by row only those that a neighbour kept: with two or three entries
    per row that is less (measured with k = 16: yeast 0.84, peptides-batch 0.80 of the time; k = 32: more).
    """
    if adj.device.type != "cuda" or dtype == torch.float64 or torch.are_deterministic_algorithms_enabled():
        return "csr"
    if adj.num_edges < _FEW_PER_ROW * adj.num_dst and _FEW_KEPT * k <= width:
        return "csr"
    # A window's features, and a scale for each of its rows.
    window_bytes = tall_windows.HEIGHT * (width * dtype.itemsize + 4)
    fits = window_bytes <= _shared_memory(adj.device) and adj.num_src <= tall_windows.MOST_SOURCES
    return "windows" if fits else "csr"


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads may have, as far as PyTorch says."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024)


def _flashsparse_fits(adj: Adjacency, dtype: torch.dtype, width: int, heads: int, aligned: bool) -> bool:
    if adj.device.type != "cuda" or dtype == torch.float64 or not aligned or width < 8:
        return False
    if adj.num_src > MOST_COLUMNS:
        return False
    if heads > 1:
        tile = 8 * features_per_lane(width, dtype.itemsize)
        return (width // heads) % tile == 0
    return True


def _power_of_two(target: int, least: int, most: int) -> int:
    """Greatest power of two up to ``target``, within bounds that are powers of two."""
    return min(max(1 << max(target, 1).bit_length() - 1, least), most)
