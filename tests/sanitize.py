"""Every CUDA kernel once or twice on small structures, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py

The GPU tests compare numbers; this drives the kernels through their paths (types, widths, weights, slices
of heavy rows, grouped rows), because the whole tests take hours under a sanitizer.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "core"))

from cases import features
from test_attention import problem

from fastsparse_core import Adjacency, choose, edge_softmax, maxk, sddmm, spmm, ssd
from fastsparse_core.ops.spmm import add_transposed

ROWS, EDGES, HEAVY = 300, 3000, 2500
#: Kernels for structures of many edges run on these small ones too.
choose._FEW_EDGES = 0
choose._MANY_SOURCES = 0

WIDTHS = (8, 16, 32, 47, 64, 128)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def structures() -> list[Adjacency]:
    """One with a heavy row (several slices), one whose rows are grouped and one of few sources."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(ROWS, (count,), generator=generator, device="cuda")

    row, col = draw(EDGES), draw(EDGES)
    row[:HEAVY] = 7
    heavy = Adjacency.from_coo(row, col, (ROWS, ROWS + 5))
    cluster = draw(EDGES)
    grouped = Adjacency.from_coo(
        cluster, (cluster % 13) * 20 + draw(EDGES) % 20, (ROWS, ROWS), group_rows="minhash"
    )
    few_sources = Adjacency.from_coo(row, col // 3, (ROWS, ROWS // 3))
    for adj in (heavy, grouped, few_sources):
        adj.prepare()
    return [heavy, grouped, few_sources]


def products(adj: Adjacency, dtype: torch.dtype, width: int) -> None:
    """spmm and sddmm, all algorithms, forward and backward."""
    x = features(adj.num_src, width, dtype, "contiguous", "cuda").requires_grad_()
    y = features(adj.num_dst, width, dtype, "contiguous", "cuda")
    heads = 2 if width % 2 == 0 else 1
    for algorithm in ("csr", "flashsparse", "tca", "hr"):
        for values in (None, 1, heads):
            value = None
            if values is not None:
                value = torch.rand(adj.num_edges, values, device="cuda").squeeze(1).requires_grad_()
            spmm(adj, x, value, "mean", algorithm=algorithm).sum().backward()
    for value in (None, torch.rand(adj.num_edges, device="cuda")):
        add_transposed(adj, y, value, None, None, torch.empty(adj.num_src, width, device="cuda"))
    for algorithm in ("csr", "flashsparse"):
        sddmm(adj, y, x, algorithm=algorithm)
    vectors = sddmm(adj, y, x, layout="me_bcrs")
    spmm(adj, x, vectors, value_layout="me_bcrs").sum().backward()
    spmm(adj, x, None, "max").sum().backward()


def attentions(adj: Adjacency, dtype: torch.dtype, width: int) -> None:
    """The fused operators and the softmax, forward and backward, with dropout."""
    for kind, biased in (
        ("dot_product", True),
        ("dot_product", False),
        ("additive", False),
        ("gatv2", False),
    ):
        case = problem(kind, adj, 2, width, dtype=dtype, biased=biased, requires_grad=True)
        case.run(adj, dropout_p=0.3, algorithm="fused3s").sum().backward()
    edge_softmax(adj, torch.randn(adj.num_edges, 2, device="cuda", requires_grad=True)).sum().backward()


def sparse_activations(adj: Adjacency, dtype: torch.dtype, width: int) -> None:
    """maxk and ssd, all dataflows, forward and backward, with and without values of the edges."""
    x = features(adj.num_src, width, dtype, "contiguous", "cuda").requires_grad_()
    for k, algorithm in itertools.product((3, 8), ("decoupled", "maxk", "densify")):
        ssd(adj, maxk(x, k), algorithm=algorithm).sum().backward()
        value = torch.rand(adj.num_edges, device="cuda", requires_grad=True)
        ssd(adj, maxk(x, k), value, "mean", algorithm=algorithm).sum().backward()


def main() -> None:
    for adj, dtype, width in itertools.product(structures(), DTYPES, WIDTHS):
        products(adj, dtype, width)
        attentions(adj, dtype, min(width, 64))
        sparse_activations(adj, dtype, width)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
