"""Every instance of every CUDA kernel once or twice on small structures, for compute-sanitizer.

    PYTHONPATH=. python tests/sanitize.py                       all parts, without a sanitizer
    PYTHONPATH=. python tests/sanitize.py --part maxk-float32   some of them
    PYTHONPATH=. python tests/sanitize.py --kernels             all, and which kernels none of them reached
    python -m benchmarks sanitizer        all, each in a process of its own under compute-sanitizer

The GPU tests compare numbers; this drives the kernels through their paths, because the whole tests take hours
under a sanitizer. What takes its time there is the first launch of every instance of a template. So parts
share next to no kernels, which is why they call operators without autograd, and widths are those that a
launcher tells apart; structures, which decide what a kernel does at run time, alternate.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ssd_slots import slotted_ssd
from fastsparse_core import (
    _C,
    CBSR,
    Adjacency,
    additive_attention,
    attention,
    edge_softmax,
    gated_aggregate,
    gated_edges,
    gatv2_attention,
    gine_aggregate,
    gpu,
    maxk,
    multi_aggregate,
    policy,
    scatter,
    sddmm,
    spmm,
    ssd,
)
from fastsparse_core.capturing.batch_norm import masked_batch_norm
from fastsparse_core.capturing.padding import BatchPlaces, Sizes, capacity_for
from fastsparse_core.formats import bsb, lengths
from fastsparse_core.formats.compress import compress, compress_pairs, sort_rows
from fastsparse_core.formats.grouping import group_rows
from fastsparse_core.formats.hybrid_rows import HybridRows
from fastsparse_core.formats.row_panels import PanelLayout
from fastsparse_core.formats.row_split import split_rows
from fastsparse_core.fused import aggregate_transform
from fastsparse_core.fused.aggregate_linear_launch import aggregate_and_transform, gradients_of_parameters
from fastsparse_core.fused.attention_kinds import ADDITIVE, DOT_PRODUCT, GATV2
from fastsparse_core.fused.attention_layer import attention_layer
from fastsparse_core.fused.weight_gradient import weight_gradient
from fastsparse_core.graph_store import BatchEdges, Field, FieldKind, Fields, GraphStore, StoredEdges
from fastsparse_core.ops._attention_launch import ADDITIVE as _ADDITIVE
from fastsparse_core.ops._attention_launch import DOT_PRODUCT as _DOT_PRODUCT
from fastsparse_core.ops._attention_launch import GATV2 as _GATV2
from fastsparse_core.ops._spmm_extremum import extremum_of_sums
from fastsparse_core.ops._spmm_plan import add_transposed
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.sampling import NeighborSampler
from fastsparse_core.sampling.features import gather_on_cuda

#: Where parts run; the tests, which only want to know that the calls are right, take the CPU.
DEVICE = "cuda"
#: How the line begins that says why a part was not run.
NOT_RUN = "not run: "
#: Last line of a run in which nothing failed.
DONE = "all kernels ran"

#: Values that are set in modules while a part runs. Bounds of `policy` are as small as the structures here:
#: kernels
#: and lists of work for large ones run too. Windows are stored in quads however cheap whole blocks are, so
#: that kernels cut the last.
CHANGED = ((bsb, {"_SHARE_OF_CSR": 0, "_BLOCKS_OVER_QUADS": 0}),)
#: And what is changed of the GPU's profile.
PROFILE = {"few_edges": 0, "resident_warps": 4, "many_sources": 0}

#: Longest edge groups of ssd that a call is made with each.
EDGE_GROUPS = (128, 1024)
#: Layouts of row panels likewise.
TALL_LAYOUTS = (PanelLayout(64, 1, 8, 2048), PanelLayout(32, 3, 4, 256))

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
_ops = torch.ops.fastsparse


class NotHere(Exception):
    """This device has no such kernels."""


@dataclass(frozen=True)
class Part:
    """Kernels that one process runs under a sanitizer.

    Attributes:
        files: the stems of the sources in ``kernels/cuda`` whose kernels it is there for.
        calls: what to call.
    """

    files: tuple[str, ...]
    calls: tuple[Callable[[], None], ...]

    def run(self) -> None:
        """Drives the kernels and waits for them."""
        before = [{name: getattr(module, name) for name in small} for module, small in CHANGED]
        for module, small in CHANGED:
            vars(module).update(small)
        try:
            with torch.no_grad(), gpu.use(gpu.profile_of(torch.device(DEVICE)), **PROFILE):
                for call in self.calls:
                    call()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        finally:
            for (module, _), kept in zip(CHANGED, before, strict=True):
                vars(module).update(kept)


# ---------------------------------------------------------------- operands, drawn on the CPU


def _edges(rows: int, cols: int, count: int, in_row: int = 0, in_col: int = 0) -> tuple[Tensor, Tensor]:
    """Random edges, the first of them in one row, the last in one column."""
    generator = torch.Generator().manual_seed(rows + cols + count)
    row, col = (torch.randint(size, (count,), generator=generator) for size in (rows, cols))
    row[:in_row] = 7
    col[count - in_col :] = 11
    return row, col


def _sorted(row: Tensor, col: Tensor, shape: tuple[int, int]) -> Adjacency:
    """A structure in its own edge order."""
    order = torch.argsort(row * shape[1] + col)
    return Adjacency.from_coo(row[order], col[order], shape).to(DEVICE)


@functools.cache
def heavy() -> Adjacency:
    """A row and a column with most entries, which every work list cuts; edges in another order."""
    return Adjacency.from_coo(*_edges(300, 305, 5000, 2000, 2000), (300, 305)).to(DEVICE)


@functools.cache
def sparse() -> Adjacency:
    """Two or three entries in most rows, in their own order."""
    return _sorted(*_edges(600, 605, 1500, 300, 100), (600, 605))


@functools.cache
def short() -> Adjacency:
    """None to five entries in a row, in their own order."""
    row = torch.arange(300).repeat_interleave(torch.arange(300) % 6)
    return _sorted(row, torch.randperm(605).repeat(2)[: row.numel()], (300, 605))


@functools.cache
def long() -> Adjacency:
    """300 entries in every row, in their own order."""
    return _sorted(*_edges(10, 48, 3000), (10, 48))


@functools.cache
def few_sources() -> Adjacency:
    """So few sources that they fit into shared memory, and more than twice as many rows."""
    return Adjacency.from_coo(*_edges(300, 100, 3000, 2500), (300, 100)).to(DEVICE)


@functools.cache
def grouped() -> Adjacency:
    """Similar rows that are apart and share a window."""
    cluster, col = _edges(300, 20, 3000)
    col = (cluster % 13) * 20 + col
    return Adjacency.from_coo(cluster, col, (300, 300), group_rows="minhash").to(DEVICE)


def draw(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Random numbers."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype).to(DEVICE)


def features(rows: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Random features, of one row infinite: kernels have a path of their own for what is not finite."""
    x = draw(rows, *shape, dtype=dtype)
    x[min(3, rows - 1)] = float("inf")
    return x


def kept(rows: int, width: int, k: int, dtype: torch.dtype) -> CBSR:
    """Random entries in k columns of every row."""
    generator = torch.Generator().manual_seed(width + k)
    ids = torch.rand(rows, width, generator=generator).argsort(1)[:, :k].sort(1).values
    return CBSR.from_parts(features(rows, k, dtype=dtype), ids.to(DEVICE), width)


def elements(bytes_: int, dtype: torch.dtype) -> int:
    return bytes_ // dtype.itemsize


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether float32 is one TF32 term on the tensor cores, not two."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    yield
    torch.set_float32_matmul_precision(before)


# ---------------------------------------------------------------- products


def spmm_rows(dtype: torch.dtype) -> None:
    """From CSR by rows: loads of 16 and 4 bytes and of one element, few lanes and many, kinds of values."""
    vectors = {F64: (8, 16), F32: (16, 32, 64)}.get(dtype, (32, 64, 4, 20))
    adj = heavy()
    one = draw(adj.num_edges)
    for width, heads in (*((width, 2) for width in vectors), (3, 3), (9, 3)):
        x = features(adj.num_src, width, dtype=dtype)
        spmm(adj, x, bias=draw(width, dtype=dtype), relu=True, algorithm="csr")
        spmm(adj, x, one.to(dtype), "mean", scale_src=draw(adj.num_src), algorithm="csr")
        spmm(adj, x, draw(adj.num_edges, heads, dtype=dtype), algorithm="csr")
    spmm(sparse(), features(605, 64, dtype=dtype), algorithm="csr")
    for width in (8, 33):
        x = features(adj.num_src, width, dtype=dtype)
        spmm(adj, x, None, "max")
        spmm(adj, x, one.to(dtype), "min")
        value = draw(adj.num_edges, dtype=dtype).requires_grad_()
        with torch.enable_grad():
            spmm(adj, x.detach().requires_grad_(), value, "max").sum().backward()
            extremum_of_sums(adj, x.detach().requires_grad_(), value[:, None], False).sum().backward()
    if dtype == F64:
        return
    for width in (32, 64, 3):
        y = features(adj.num_dst, width, dtype=dtype)
        for value in (None, one):
            total = torch.zeros(adj.num_src, width, device=DEVICE)
            add_transposed(adj, y, value, None, None, total, num_given=5)
            with mock.patch.object(policy, "counts_sources", return_value=True):
                for given in (5, 0):
                    add_transposed(adj, y, value, None, None, total, num_given=given)


def spmm_resident(dtype: torch.dtype) -> None:
    """A tile of all sources in shared memory; the last of two tiles is not full; one half full."""
    adj = few_sources()
    for row_bytes in (288, 128):
        x = features(adj.num_src, elements(row_bytes, dtype), dtype=dtype)
        bias = draw(x.size(1), dtype=dtype)
        for algorithm in ("csr", "tca") if dtype != F32 else ("csr",):
            spmm(adj, x, algorithm=algorithm)
            spmm(adj, x, draw(adj.num_edges), "mean", bias=bias, algorithm=algorithm)


def spmm_direct(dtype: torch.dtype) -> None:
    """Tensor cores straight from CSR: five widths of tiles, long rows and packed short ones."""
    for width in (8, 16, 32, 64, 136):
        for adj in (sparse(), heavy()):
            x = features(adj.num_src, width, dtype=dtype)
            spmm(adj, x, algorithm="tca")
            spmm(adj, x, draw(adj.num_edges), "mean", algorithm="tca")
        spmm(adj, x, algorithm="hr")
        spmm(adj, x, draw(adj.num_edges), "mean", algorithm="hr")


def spmm_blocks(dtype: torch.dtype) -> None:
    """Binary sparse blocks: features per lane, one block or two at a time, kinds of values, TF32 terms."""
    widths = (40, 8) if dtype == F32 else (72, 24, 8)
    for one_term in (False, True) if dtype == F32 else (False,):
        for width, adj in ((width, adj) for width in widths for adj in (heavy(), sparse())):
            x = features(adj.num_src, width, dtype=dtype)
            with tf32(one_term):
                spmm(adj, x, bias=draw(width, dtype=dtype), relu=True, algorithm="flashsparse")
                spmm(adj, x, scale_src=draw(adj.num_src), algorithm="flashsparse")
                spmm(adj, x, draw(adj.num_edges), "mean", algorithm="flashsparse")
    adj = grouped()
    x = features(adj.num_src, widths[0], dtype=dtype)
    spmm(adj, x, algorithm="flashsparse")
    spmm(adj, x, draw(adj.bsb.num_vectors, 8), value_layout="me_bcrs", algorithm="flashsparse")
    x = features(adj.num_src, elements(256, dtype), dtype=dtype)
    spmm(adj, x, draw(adj.num_edges, 2), algorithm="flashsparse")


def sddmm_rows(dtype: torch.dtype) -> None:
    """By entry: lanes, long and short rows, plain results and others. By row: loads of 4 bytes and less."""
    for adj in (long(), sparse()):
        for bytes_ in (64, 128, 256, 512, 1024):
            width = elements(bytes_, dtype)
            y, x = (features(rows, width, dtype=dtype) for rows in adj.shape)
            sddmm(adj, y, x, algorithm="csr")
            y, x = (features(rows, 2, width, dtype=dtype) for rows in adj.shape)
            sddmm(adj, y, x, algorithm="csr")
    adj = heavy()
    dst, src = draw(adj.num_dst), draw(adj.num_src)
    for width in (3, 10 if dtype.itemsize == 2 else 9, elements(48, dtype)):
        y, x = (features(rows, width, dtype=dtype) for rows in adj.shape)
        sddmm(adj, y, x, scale_dst=dst, scale_src=src, algorithm="csr")


def sddmm_blocks(dtype: torch.dtype) -> None:
    """Binary sparse blocks: steps that hold a head, plain results and others, TF32 terms."""
    for one_term in (False, True) if dtype == F32 else (False,):
        with tf32(one_term):
            adj = heavy()
            for bytes_ in (64, 128, 256, 512):
                y, x = (features(rows, elements(bytes_, dtype), dtype=dtype) for rows in adj.shape)
                sddmm(adj, y, x, algorithm="flashsparse")
            sddmm(adj, y, x, layout="me_bcrs", algorithm="flashsparse")
            adj = grouped()
            for bytes_ in (48, 112, 240, 496, 528):
                y, x = (features(rows, 2, elements(bytes_, dtype), dtype=dtype) for rows in adj.shape)
                sddmm(adj, y, x, algorithm="flashsparse")
            dst, src = draw(adj.num_dst), draw(adj.num_src)
            sddmm(adj, y, x, scale_dst=dst, scale_src=src, algorithm="flashsparse")


def layers_in_one() -> None:
    """GraphSAGE's layer: panels and tiles of features, full ones and others, two terms and three.

    Neighbours that the kernel gathers, and sums that it is given; sums that are kept, and none.
    """
    if not aggregate_transform._has_kernels(torch.device(DEVICE)):
        raise NotHere("needs a GPU of architecture 9.0 and a build for it")
    for fewer_digits, width, out_width in itertools.product(
        (False, True), (20, 64, 100, 196), (20, 128, 132)
    ):
        x = features(605, width, dtype=F32)
        weight, root_weight = (draw(out_width, width, dtype=F32) for _ in range(2))
        bias = draw(out_width)
        with tf32(fewer_digits):
            for adj, scaled in ((short(), True), (short(), False), (sparse(), True)):
                operands = (x, weight, bias if scaled else None, root_weight)
                scale = adj.inv_degree() if scaled else None
                aggregate_and_transform(adj, *operands, scale, "auto", keeps_sums=False)
                _, sums = aggregate_and_transform(adj, *operands, scale, "auto", keeps_sums=True)
                assert sums is not None
                grad = features(adj.num_dst, out_width, dtype=F32)
                gradients_of_parameters(grad, sums, x[: adj.num_dst], needs_bias=scaled)


# ---------------------------------------------------------------- attention


def _shapes(dtype: torch.dtype) -> Iterable[tuple[int, int]]:
    """Heads and widths for every shape of a tile, some of them not full."""
    if dtype == F32:
        return (3, 20), (1, 32), (1, 48), (1, 128), (1, 200)
    return (5, 16), (3, 24), (1, 32), (3, 40), (1, 64), (1, 104), (1, 256)


def dot_product(dtype: torch.dtype) -> None:
    """Fused attention: shapes of tiles, TF32 terms, with a bias and dropout and without."""
    for one_term in (False, True) if dtype == F32 else (False,):
        for heads, width in _shapes(dtype):
            for adj, biased in ((heavy(), False), (grouped(), True)):
                rows, cols = adj.shape
                q, k, v = (features(size, heads, width, dtype=dtype) for size in (rows, cols, cols))
                bias = draw(adj.num_edges, heads) if biased else None
                with tf32(one_term):
                    attention(adj, q, k, v, None, bias, 0.3 if biased else 0.0, algorithm="fused3s")


def dot_product_backward(dtype: torch.dtype, one_term: bool = False) -> None:
    """Its gradients, of made-up results: the kernels of the forward pass have parts of their own."""
    with tf32(one_term):
        for heads, width in _shapes(dtype):
            for adj, biased in ((heavy(), False), (grouped(), True)):
                rows, cols = adj.shape
                q, out, grad = (features(rows, heads * width, dtype=dtype) for _ in range(3))
                k, v = (features(cols, heads * width, dtype=dtype) for _ in range(2))
                lse = draw(rows, heads, dtype=F64 if DEVICE == "cuda" else F32)
                bias, seed = (draw(adj.num_edges, heads), torch.tensor(1)) if biased else (None, None)
                options = (0.1, 0.3 if biased else 0.0, seed, _DOT_PRODUCT, heads, "fused3s")
                call = (q, k, v, None, None, None, bias, *options)
                _ops.attention_backward(grad, *call, out, lse, None, adj.handle, False, False, biased)


#: Widths of heads that 4, 8, 16 and 32 lanes hold, and one that they read by single elements.
LANE_WIDTHS = (24, 64, 104, 200, 5)


def additive(dtype: torch.dtype) -> None:
    """GAT's attention, forward and backward."""
    adj = heavy()
    for width in LANE_WIDTHS:
        v, grad = (features(n, 2 * width, dtype=dtype) for n in (adj.num_src, adj.num_dst))
        dst, src, bias = draw(adj.num_dst, 2), draw(adj.num_src, 2), draw(adj.num_edges, 2)
        additive_attention(adj, dst, src, v, 0.2, bias, 0.3, algorithm="fused3s")
        additive_attention(adj, dst, src, v, algorithm="fused3s")
        for given, dropout_p, seed in ((bias, 0.3, torch.tensor(1)), (None, 0.0, None)):
            options = (0.2, dropout_p, seed, _ADDITIVE, 2, "fused3s")
            call = (dst, src, v, None, None, None, given, *options)
            rest = (None, draw(adj.num_dst, 2), None, adj.handle, False, False, given is not None)
            _ops.attention_backward(grad, *call, *rest)


def gatv2(dtype: torch.dtype) -> None:
    """GATv2's attention, forward and backward."""
    adj = heavy()
    for width in LANE_WIDTHS:
        dst, out, grad = (features(adj.num_dst, 2 * width, dtype=dtype) for _ in range(3))
        src, att = features(adj.num_src, 2 * width, dtype=dtype), draw(2, width)
        gatv2_attention(adj, dst, src, att, 0.2, 0.3, algorithm="fused3s")
        lse = draw(adj.num_dst, 2)
        call = (dst, src, None, att, None, None, None, 0.2, 0.3, torch.tensor(1), _GATV2, 2, "fused3s")
        _ops.attention_backward(grad, *call, out, lse, None, adj.handle, False, False, False)


def with_edge_features(dtype: torch.dtype) -> None:
    """Attention and GATv2 with edge features, forward and backward: many lanes, one, slices, many heads."""
    for heads, width, edge_width in ((2, 16, 8), (3, 64, 3), (1, 5, 32), (16, 24, 8)):
        for adj in (heavy(), sparse()):
            q, k, v = (
                features(rows, heads * width, dtype=dtype).requires_grad_()
                for rows in (adj.num_dst, adj.num_src, adj.num_src)
            )
            att = draw(heads, width).requires_grad_()
            edges = {
                "edge_attr": draw(adj.num_edges, edge_width, dtype=dtype).requires_grad_(),
                "edge_weight": draw(heads * width, edge_width, dtype=dtype).requires_grad_(),
            }
            bias = draw(adj.num_edges, heads).requires_grad_()
            with torch.enable_grad():
                attention(adj, q, k, v, 0.5, bias, 0.3, heads=heads, **edges).sum().backward()
                attention(adj, q, k, v, 50.0, heads=heads, **edges).sum().backward()
                gatv2_attention(adj, q, k, att, 0.2, 0.3, **edges).sum().backward()


def several_aggregations(dtype: torch.dtype) -> None:
    """multi_aggregate and its gradient: one lane, many, two tiles, aligned or not; every kind of edge."""
    names = ("sum", "mean", "min", "max", "var", "std")
    for width, edge_width in ((3, 1), (24, 8), (130, 5), (260, 32)):
        for adj in (heavy(), sparse()):
            x_dst, x_src = (
                features(rows, width, dtype=dtype).requires_grad_() for rows in (adj.num_dst, adj.num_src)
            )
            attr = draw(adj.num_edges, edge_width, dtype=dtype).requires_grad_()
            weight = draw(width, edge_width, dtype=dtype).requires_grad_()
            rows = draw(adj.num_edges, width, dtype=dtype).requires_grad_()
            for edges in ({}, {"edge_attr": attr, "edge_weight": weight}, {"edge_attr": rows}):
                with torch.enable_grad():
                    multi_aggregate(adj, x_src, names, x_dst=x_dst, **edges).sum().backward()


def messages(dtype: torch.dtype) -> None:
    """GINE and gated layers, forward and backward: raw features and rows of edges, one lane and tiles."""
    for width, edge_width in ((128, 8), (20, 3), (3, 32)):
        for adj in (heavy(), sparse()):
            rows = (adj.num_src, adj.num_dst, adj.num_src, adj.num_edges, adj.num_edges)
            widths = (width, width, width, width, edge_width)
            q, k, v, edge, raw = (
                features(count, columns, dtype=dtype).requires_grad_()
                for count, columns in zip(rows, widths, strict=True)
            )
            maps = [draw(width, edge_width, dtype=dtype).requires_grad_() for _ in range(2)]
            bias = draw(width, dtype=dtype).requires_grad_()
            gates = {"edge_attr": raw, "gate_weight": maps[0], "value_weight": maps[1]}
            with torch.enable_grad():
                gine_aggregate(adj, q, edge).sum().backward()
                gine_aggregate(adj, q, raw, edge_weight=maps[0], edge_bias=bias).sum().backward()
                gated_aggregate(adj, k, q, v).sum().backward()
                gated_aggregate(adj, k, q, v, **gates).sum().backward()
                sum(each.sum() for each in gated_edges(adj, k, q, v, edge)).backward()


@contextmanager
def products_in_float32() -> Iterator[None]:
    """PyTorch's products of 16-bit matrices by way of float32.

    Its own end a process under racecheck with an illegal access, `nn.Linear` alone, without a kernel of ours.
    """
    linear, mm = F.linear, torch.mm

    def as_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    def as_mm(left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return mm(left.float(), right.float()).to(out_dtype or left.dtype)

    with mock.patch.object(F, "linear", as_linear), mock.patch.object(torch, "mm", as_mm):
        yield


@products_in_float32()
def layers_of_attention(dtype: torch.dtype) -> None:
    """GAT, GATv2 and the graph transformer as one call each way: what is around their attention."""
    adj = Adjacency.from_coo(*_edges(300, 300, 4000, in_row=900, in_col=50), (300, 300)).to(DEVICE)
    for width in LANE_WIDTHS:
        x = features(300, 24, dtype=dtype).requires_grad_()
        vectors = [draw(1, 2, width, dtype=dtype).requires_grad_() for _ in range(2)]
        for score, num_maps, given in ((ADDITIVE, 1, vectors), (GATV2, 2, vectors[:1]), (DOT_PRODUCT, 4, ())):
            maps = [nn.Linear(24, 2 * width, device=DEVICE, dtype=dtype) for _ in range(num_maps)]
            bias = None if score is DOT_PRODUCT else draw(2 * width, dtype=dtype).requires_grad_()
            for algorithm in ("csr", "fused3s") if score is DOT_PRODUCT else ("auto",):
                with torch.enable_grad(), policy.algorithms(attention=algorithm):
                    out = attention_layer(score, adj, x, maps, given, bias, heads=2, scale=0.2, dropout_p=0.3)
                    if out is not None:
                        out.sum().backward()


def softmax_of_edges(dtype: torch.dtype) -> None:
    """edge_softmax and its gradient, of 1, 4, 8 and 32 heads side by side."""
    adj = heavy()
    for heads in (2, 4, 7, 40):
        weight = edge_softmax(adj, draw(adj.num_edges, heads, dtype=dtype))
        _ops.edge_softmax_backward(weight, draw(adj.num_edges, heads, dtype=dtype), adj.handle)


def rows_by_index(dtype: torch.dtype) -> None:
    """Rows gathered in words of every size."""
    index = (torch.arange(900) * 37 % 300).to(DEVICE)
    for width in (1, 2, 3, 7, 33, 64):
        _ops.segment_gather(draw(300, width, dtype=dtype), index, None, index.numel())


def segments(dtype: torch.dtype) -> None:
    """Every reduction with 1, 4, 8 and 32 lanes, in wide and single loads, of cut and sorted segments."""
    index = torch.cat([torch.full((3000,), 7), torch.arange(1500) * 37 % 300]).to(DEVICE)
    index[0] = 8  # else it would ascend in the cut segment, where any order is right
    lanes = 16 // dtype.itemsize
    for reduce in ("sum", "mean", "max", "min", "mul", "var", "std"):
        for width in (1, 3, 7, 33, lanes, 3 * lanes, 7 * lanes, 31 * lanes):
            scatter(draw(index.numel(), width, dtype=dtype), index, 301, reduce)
        scatter(draw(index.numel(), 3, dtype=dtype), index.sort().values, 301, reduce)


# ---------------------------------------------------------------- sparse activations


def largest_entries(dtype: torch.dtype) -> None:
    """MaxK: rows in registers and streamed ones, aligned or not, with ties, and its gradient; CBSR."""
    widths = (64, 300) if dtype == F64 else (128, 63, 256, 255, 512, 511, 1024, 1023, 1028)
    for width in widths:
        x = features(70, width, dtype=dtype)
        x[::2] = x[::2].round()
        for k in (8, 3):
            maxk(x, k)
            _, words = _ops.maxk_dense(x, k)
            _ops.mask_rows(x, words)
    for width in (64, 65, 512, 513):
        cbsr = kept(70, width, 8, dtype)
        cbsr.to_dense()
        _ops.cbsr_gather(features(70, width, dtype=dtype), cbsr.ids)
        odd = kept(70, width, 3, dtype)
        odd.to_dense()
        _ops.cbsr_gather(features(70, width, dtype=dtype), odd.ids)


def sparse_products(dtype: torch.dtype) -> None:
    """ssd: a warp, a part of one or a share of one to an edge group; packed entries; ids of 8 and 16 bits.

    Edge groups are summed at once or in pieces.
    """
    cases = [
        *((heavy, width, k) for width in (64, 512) for k in (8, 20, 3)),
        *((sparse, 64, k) for k in (8, 20, 40)),
        *((sparse, 512, k) for k in (8, 40)),
        (long, 64, 20),
        (heavy, 1100, 8),
    ]
    if dtype == F64:
        cases = [(heavy, 64, 8), (heavy, 512, 8)]
    for (structure, width, k), longest in itertools.product(cases, EDGE_GROUPS):
        adj = structure()
        cbsr = kept(adj.num_src, width, k, dtype)
        with mock.patch.object(lengths, "edge_group_length", return_value=longest):
            ssd(adj, cbsr, bias=draw(width, dtype=dtype), algorithm="decoupled")
            ssd(adj, cbsr, draw(adj.num_edges, dtype=dtype), "mean", algorithm="decoupled")
    if dtype == F64 or DEVICE != "cuda":
        return
    for width in (64, 512):
        adj = heavy()
        cbsr = kept(adj.num_src, width, 8, dtype)
        operands = (adj, cbsr.values, cbsr.ids, width)
        slotted_ssd(*operands)
        slotted_ssd(*operands, draw(adj.num_edges), slots=1, update_mode=False, coupled=True)


def sparse_gradients(dtype: torch.dtype) -> None:
    """ssd's gradients: windows in blocks of few and many threads, row by row, and those of edge values.

    Windows of 64 wide rows need many threads. Sums of 16-bit results are cast.
    """
    adj, wide = heavy(), {F32: 600, F64: 2000}.get(dtype, 1200)
    for width, k, layout in itertools.product((64, 300, wide), (8, 3), TALL_LAYOUTS):
        cbsr = kept(adj.num_src, width, k, dtype)
        grad, value = features(adj.num_dst, width, dtype=dtype), draw(adj.num_edges, dtype=dtype)
        place = (adj.handle, False)
        scales = (None, None) if dtype == F64 else (draw(adj.num_dst), draw(adj.num_src))
        with mock.patch.object(policy, "panel_layout", return_value=layout):
            _ops.ssd_backward(grad, cbsr.ids, None, None, None, *place)
            _ops.ssd_backward(grad, cbsr.ids, value, *scales, *place)
        _ops.ssd_value_grad(grad, cbsr.values, cbsr.ids, *scales, adj.num_edges, *place)
    adj = sparse()
    for width, k in ((64, 4), (512, 8)):
        cbsr, grad = kept(adj.num_src, width, k, dtype), features(adj.num_dst, width, dtype=dtype)
        _ops.ssd_backward(grad, cbsr.ids, None, None, None, adj.handle, False)
        _ops.ssd_backward(grad, cbsr.ids, draw(adj.num_edges, dtype=dtype), None, None, adj.handle, False)


# ---------------------------------------------------------------- structures


def structures() -> None:
    """Checks, sorts and work lists of edges with indices of both sizes, and keys of both sizes."""
    for dtype in (torch.int32, torch.int64):
        row, col = (index.to(DEVICE, dtype) for index in _edges(300, 305, 3000, 2500))
        for size in (305, 1 << 17):
            compress(row, col, size, size)
            compress_pairs(row, col, size, size)
        sort_rows(row, 300)
        if row.is_cuda:
            sort_rows(row - 7, 200)  # indices that are none, before and behind
        adj = Adjacency.from_coo(row, col, (300, 305))
        Adjacency.from_coo(row, col % 300, (300, 300), self_loops="replace")
        ends = torch.stack([row, col % 300])
        Adjacency.from_coo(*torch.cat([ends, ends.flip(0)], 1), (300, 300)).t()
        Adjacency.from_csr(adj.rowptr.to(dtype), adj.col.to(dtype), adj.shape, edge_id=adj.edge_id)
    split_rows(adj.rowptr, 32)
    HybridRows.from_rowptr(adj.rowptr, adj.num_edges)
    adj.prepare()
    group_rows(heavy())
    grouped().prepare()


def batches() -> None:
    """Sampled batches: every way to draw, tables with and without keys, rows of the host, padding."""
    adj = heavy()
    size = max(adj.shape)
    square = Adjacency.from_coo(adj.row(), adj.col, (size, size))
    weight = torch.rand(square.num_edges, device=DEVICE)
    seeds = torch.arange(40, device=DEVICE)
    ways: tuple[dict[str, bool], ...] = ({}, {"replace": True}, {"disjoint": True}, {"induced": True})
    for way in ways:
        for fanouts in ([3, 7], [15, 30], [-1, 50]):
            for of_way in ({}, {"weight": weight}):
                sample = NeighborSampler(square, fanouts, **way, **of_way).sample(seeds)
                sample.edges.adjacency.in_degree()
    if DEVICE == "cuda":
        index = torch.randint(50, (70,), device=DEVICE)
        for dtype, width in ((F32, 8), (F32, 7), (torch.uint8, 3)):
            gather_on_cuda(torch.ones(50, width, dtype=dtype).pin_memory(), index)
    sizes = Sizes(((9, 30),), ((40,),))
    places = BatchPlaces(capacity_for([sizes]), torch.device(DEVICE))
    for dtype, width in ((F32, 8), (F32, 7), (torch.uint8, 3)):
        rows = [
            (torch.empty(of.starts[-1], width, dtype=dtype, device=DEVICE), given, of)
            for of, count in ((places.nodes[0], 39), (places.edges[0], 40))
            for given in (torch.ones(count, width, dtype=dtype, device=DEVICE),)
        ]
        edges = torch.randint(9, (2, 40), device=DEVICE)
        places.write(sizes, [(edges.new_empty(2, places.edges[0].starts[-1]), edges)], rows)


def batches_of_graphs() -> None:
    """Whole graphs, some without rows: words of all sizes, increments of both, structures of both ways."""
    sizes, counts = torch.tensor([3, 0, 70, 1, 9]), torch.tensor([5, 0, 300, 0, 20])
    store = GraphStore(sizes.numel(), torch.device(DEVICE))
    nodes, edges = store.add_counts(sizes), store.add_counts(counts)
    ends = torch.cat(
        [torch.randint(max(int(n), 1), (2, int(m))) for n, m in zip(sizes, counts, strict=True)], 1
    )
    fields = [
        Field(torch.ones(83, width, dtype=dtype, device=DEVICE), nodes)
        for dtype, width in ((F32, 8), (F32, 6), (F32, 7), (torch.uint8, 2), (torch.uint8, 3))
    ]
    fields += [Field(None, nodes, FieldKind.GRAPH), Field(None, nodes, FieldKind.FIRST)]
    fields.append(Field(ends.int().to(DEVICE), edges, FieldKind.ADD_INT32, (nodes, nodes), dim=1))
    fields.append(Field(ends.to(DEVICE), edges, FieldKind.ADD_INT64, (nodes, nodes), dim=1))
    for chosen in ([0, 1, 2, 3, 4], [4, 4, 0], [1]):
        batch = store.choose(chosen)
        Fields(fields, store.device).of(batch)
        BatchEdges(StoredEdges(store, fields[-1], nodes, nodes), batch).adjacency.t().in_degree()


def column_sums(dtype: torch.dtype) -> None:
    """Rows in vectors and by elements, few columns and many, parts that end early and empty ones."""
    for num_rows, width in ((20_500, 8), (20_100, 1), (20_099, 47), (20_001, 2100)):
        rows = draw(num_rows, width + 1, dtype=dtype)
        with torch.no_grad():
            sum_of_rows(rows[:, :width], dtype)
            sum_of_rows(rows[:, :width].contiguous(), torch.float32)


def products_with_nan(dtype: torch.dtype) -> None:
    """Finite products and others, parts of few columns and of more than a block's, columns behind them."""
    for num_parts, width, in_width in ((1, 3, 9), (2, 131, 4), (3, 16, 33)):
        grad, x = draw(300, num_parts * width + 2, dtype=dtype), draw(300, in_width, dtype=dtype)
        grad[::3] = 0
        with torch.no_grad():
            weight_gradient(grad, x, dtype, True, num_parts, width)
            x[0] = float("nan")
            weight_gradient(grad, x, dtype, True, num_parts, width)
            weight_gradient(grad, x.t().contiguous().t(), dtype, True, num_parts, width, out_by_in=False)


def normalised_batches(dtype: torch.dtype) -> None:
    """Rows in vectors and by elements, few columns and more than a block has, parts without a row."""
    for num_rows, width in ((2_100, 64), (70, 9), (1_000, 2_060)):
        x = draw(num_rows, width, dtype=dtype).requires_grad_()
        numbers = torch.rand(4, width, device=DEVICE)
        mask = torch.arange(num_rows, device=DEVICE) % 3 > 0
        with torch.enable_grad():
            out = masked_batch_norm(x, mask, mask.sum().float(), *numbers, 0.1, 1e-5)
            torch.autograd.grad(out, x, torch.ones_like(out))


# ---------------------------------------------------------------- parts


def _by_dtype(
    name: str,
    files: str,
    groups: Mapping[str, tuple[torch.dtype, ...]],
    *calls: Callable[[torch.dtype], None],
) -> dict[str, Part]:
    """A part for every group of dtypes."""
    return {
        f"{name}-{group}": Part(
            tuple(files.split()),
            tuple(functools.partial(call, dtype) for call in calls for dtype in dtypes),
        )
        for group, dtypes in groups.items()
    }


_EACH = {"float32": (F32,), "float16": (F16,), "bfloat16": (BF16,)}
_HALVES = {"float16": (F16,), "bfloat16": (BF16,)}
_ALL = {"float32": (F32, F64), **_HALVES}
_TWO = {"float32": (F32, F64), "16bit": (F16, BF16)}
_TWO_ON_TENSOR_CORES = {"float32": (F32,), "16bit": (F16, BF16)}

#: name -> what one process drives
PARTS: dict[str, Part] = {
    **_by_dtype("spmm", "spmm_csr spmm_csr_transposed spmm_extremum spmm_extremum_backward", _ALL, spmm_rows),
    **_by_dtype("spmm-direct", "spmm_tca spmm_hr", _HALVES, spmm_direct),
    **_by_dtype("spmm-resident", "spmm_resident", {"all": (F32, F16, BF16)}, spmm_resident),
    **_by_dtype("spmm-blocks", "spmm_bsb", _EACH, spmm_blocks),
    "aggregate-linear": Part(("aggregate_linear", "aggregate_linear_backward"), (layers_in_one,)),
    **_by_dtype("segments", "segment_reduce", _TWO, segments),
    **_by_dtype("sddmm", "sddmm_csr", _TWO, sddmm_rows),
    **_by_dtype("sddmm-blocks", "sddmm_bsb", _TWO_ON_TENSOR_CORES, sddmm_blocks),
    **_by_dtype("attention", "attention_bsb", _TWO_ON_TENSOR_CORES, dot_product),
    **_by_dtype("attention-backward", "attention_bsb_backward", _EACH, dot_product_backward),
    **_by_dtype(
        "attention-backward",
        "attention_bsb_backward",
        {"tf32": (F32,)},
        functools.partial(dot_product_backward, one_term=True),
    ),
    **_by_dtype(
        "attention-additive",
        "additive_attention additive_attention_backward gatv2_attention gatv2_attention_backward",
        _EACH,
        additive,
        gatv2,
    ),
    **_by_dtype(
        "attention-edges", "edge_attention edge_attention_backward head_outer", _EACH, with_edge_features
    ),
    **_by_dtype(
        "several-aggregations", "multi_aggregate multi_aggregate_backward", _TWO, several_aggregations
    ),
    **_by_dtype("messages", "edge_messages edge_messages_backward", _TWO, messages),
    **_by_dtype("attention-layer", "attention_layer attention_layer_parts", _EACH, layers_of_attention),
    **_by_dtype("maxk", "maxk maxk_16_bits mask_rows cbsr", _TWO, largest_entries),
    **_by_dtype("ssd", "ssd ssd_slots", _ALL, sparse_products),
    **_by_dtype("ssd-backward", "ssd_backward", _TWO, sparse_gradients),
    "structures": Part(
        (
            *("inspect", "compress", "row_split", "hybrid_rows", "group_rows", "edge_softmax"),
            *("sum_of_rows", "weight_gradient", "batch_norm", "sample_neighbors", "place_batch"),
            "gather_graphs",
        ),
        (
            structures,
            batches,
            batches_of_graphs,
            *(
                functools.partial(call, d)
                for call in (softmax_of_edges, column_sums, products_with_nan, rows_by_index)
                for d in (F64, F32, F16, BF16)
            ),
            *(functools.partial(normalised_batches, d) for d in (F32, F16, BF16)),
        ),
    ),
}


# ---------------------------------------------------------------- what was reached


def _launched(run: Callable[[], None]) -> set[str]:
    """Names of our kernels that a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    return {_plain(event.key) for event in profile.key_averages() if "fastsparse::cuda" in event.key}


def _compiled() -> set[str]:
    """Names of our kernels in the extension; none where there is no cuobjdump to tell them."""
    if shutil.which("cuobjdump") is None or shutil.which("c++filt") is None:
        return set()
    listed = subprocess.run(
        ["cuobjdump", "-symbols", _C.__file__], capture_output=True, text=True, check=True
    )
    mangled = set(re.findall(r"STO_ENTRY\s+(_ZN10fastsparse4cuda\w+)", listed.stdout))
    names = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    return {_plain(name) for name in names.stdout.splitlines()}


def _plain(name: str) -> str:
    """A kernel's name with its template arguments, without its result and parameters."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.sub(r"(?<=>)\([^<>]*\)$|^([\w:]+)\(.*", r"\1", name)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="only print the names of the parts")
    parser.add_argument("--kernels", action="store_true", help="print what was launched and what was not")
    options = parser.parse_args()
    if options.list:
        print("\n".join(PARTS))
        return
    seen: set[str] = set()
    for name in options.part:
        start = time.perf_counter()
        try:
            if options.kernels:
                seen |= _launched(PARTS[name].run)
            else:
                PARTS[name].run()
        except NotHere as reason:
            print(f"{NOT_RUN}{name}: {reason}", flush=True)
            continue
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    if options.kernels:
        print("\n".join(["launched:", *sorted(seen), "not launched:", *sorted(_compiled() - seen)]))
    print(DONE)


if __name__ == "__main__":
    main()
