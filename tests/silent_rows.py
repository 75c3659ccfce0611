"""Graphs with nodes that send no edge, NaN and infinities in their features, and where those may go."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NUM_NODES = 40
#: Nodes without an edge; those that only receive; those that only send.
ISOLATED, SILENT, DEAF = range(4), range(4, 10), range(10, 14)
#: Which nodes have such features.
WHERE = {"isolated": ISOLATED, "silent": range(SILENT.stop)}
#: What they have, and where.
SPECIAL = [(math.nan, "isolated"), (math.nan, "silent"), (-math.inf, "isolated")]


def edges_of_some(num_edges: int = 150, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sources and destinations; no pair comes twice, and there is no self loop."""
    flat = torch.randperm(NUM_NODES**2, generator=torch.Generator().manual_seed(seed))
    src, dst = flat // NUM_NODES, flat % NUM_NODES
    kept = (src >= SILENT.stop) & (dst >= ISOLATED.stop) & (src != dst)
    kept &= (dst < DEAF.start) | (dst >= DEAF.stop)
    return src[kept][:num_edges], dst[kept][:num_edges]


def features_with(special: float, width: int, where: str = "silent", seed: int = 1) -> Tensor:
    """Random features (NUM_NODES, width); some in rows that no edge reads are another value, one row all."""
    x = torch.randn(NUM_NODES, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = torch.tensor([*WHERE[where]])
    x[rows, rows % width] = special
    x[rows[0]] = special
    return x


def goes_no_further(name: str, got: Tensor | None, expected: Tensor | None, special: float) -> None:
    """Results are equal if the original's is finite, and NaN if the original's is NaN.

    Gradients may be finite where the original multiplies a gradient of 0 by NaN, and the softmax of a row
    whose scores are all -inf is 0 where the original's is NaN.
    """
    if got is None or expected is None:
        assert got is expected, name
        return
    assert got.shape == expected.shape, name
    finite = expected.isfinite()
    spread = ~got.isfinite() & finite
    assert not spread.any(), f"{name}: {int(spread.sum())} of {spread.numel()} are NaN or infinite"
    # PyG computes some degrees in float32 for float64 features.
    largest = float(expected[finite].abs().max()) if finite.any() else 0.0
    torch.testing.assert_close(got[finite], expected[finite], rtol=0, atol=1e-6 * max(largest, 1e-3))
    if name == "out" and math.isnan(special):
        assert not (got.isfinite() & ~finite).any(), f"{name}: finite where the original is not"
