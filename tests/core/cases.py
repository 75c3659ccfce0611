"""Random structures, features and comparisons for the operator tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastsparse_core import Adjacency

#: For random tests, whose examples share the fixtures of a function.
SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
#: Relative Frobenius error that an operator may have against the float64 reference.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)
#: Widths on both sides of every vector, tile and lane boundary of the kernels.
WIDTHS = (0, 1, 2, 3, 4, 5, 8, 16, 17, 31, 32, 40, 47, 64, 65, 100, 128, 130, 256, 1025)
LAYOUTS = ("contiguous", "row_stride", "misaligned", "transposed", "expanded")
#: Algorithms of spmm. The CPU has one kernel, and runs csr for all of them.
ALGORITHMS = ["csr", "flashsparse", "tca", "hr"]


def each_kernel(*algorithms: str) -> pytest.MarkDecorator:
    """Every algorithm on CUDA; on the CPU, which has one kernel for all of them, the first."""
    on_cuda = [pytest.param("cuda", algorithm, marks=pytest.mark.gpu) for algorithm in algorithms]
    return pytest.mark.parametrize(("device", "algorithm"), [("cpu", algorithms[0]), *on_cuda])


def each_shape(names: str, on_cuda: Sequence[Any], *, on_cpu: Sequence[Any]) -> pytest.MarkDecorator:
    """Every shape that the CUDA kernels tell apart; on the CPU, whose kernel is one loop, some of them."""
    cases = [("cpu", shape) for shape in on_cpu]
    cases += [pytest.param("cuda", shape, marks=pytest.mark.gpu) for shape in on_cuda]
    return pytest.mark.parametrize(("device", names), cases)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; infinite where something is not finite."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.shape == expected.shape
    difference = (actual - expected).norm()
    if not difference.isfinite():
        return float("inf")
    return float(difference / expected.norm()) if expected.norm() > 0 else float(difference)


@dataclass(frozen=True)
class EdgeList:
    """Edges in the caller's order."""

    row: Tensor
    col: Tensor
    shape: tuple[int, int]

    def adjacency(self, device: str) -> Adjacency:
        return Adjacency.from_coo(self.row.to(device), self.col.to(device), self.shape)


@st.composite
def edge_lists(draw: st.DrawFn) -> EdgeList:
    """Odd structures: no rows, no edges, one column, duplicates, empty rows, very heavy rows."""
    sizes = st.sampled_from([0, 1, 2, 7, 8, 9, 33, 300])
    num_dst, num_src = draw(sizes), draw(sizes)
    num_edges = draw(st.sampled_from([0, 1, 5, 64, 1000, 3000])) if num_dst and num_src else 0
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    row = torch.randint(0, max(num_dst, 1), (num_edges,), generator=generator)
    col = torch.randint(0, max(num_src, 1), (num_edges,), generator=generator)
    kind = draw(st.sampled_from(["uniform", "heavy", "few_rows", "sorted"]))
    if kind == "heavy" and num_edges:
        row[: num_edges * 9 // 10] = num_dst // 2  # one row of up to 2700 entries: several slices
    elif kind == "few_rows":
        row = row // 4 * 4
    elif kind == "sorted":
        order = torch.argsort(row * max(num_src, 1) + col)
        row, col = row[order], col[order]
    if draw(st.booleans()):
        row, col = row.int(), col.int()
    return EdgeList(row, col, (num_dst, num_src))


#: Sizes and groupings of `ragged` in the tests.
RAGGED = ((600, "none"), (4000, "minhash"))


def ragged(num_edges: int, device: str, group_rows: str = "none") -> Adjacency:
    """Windows of any number of quads, cut ones, empty ones; node 0 has no edges, node 9 most of them."""
    nodes = 605
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(1, nodes, (num_edges,), generator=generator) for _ in range(2))
    many = torch.randperm(nodes - 1, generator=generator)[:600] + 1
    hub = torch.full_like(many, 9)
    row, col = torch.cat([row, hub, many]), torch.cat([col, many, hub])
    kept = ((row < 80) | (row >= 120)) & ((col < 80) | (col >= 120))
    return Adjacency.from_coo(
        row[kept].to(device), col[kept].to(device), (nodes, nodes), group_rows=group_rows
    )


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def random_graph(num_dst: int = 40, num_src: int = 60, num_edges: int = 400) -> EdgeList:
    generator = torch.Generator().manual_seed(1)
    return EdgeList(
        torch.randint(0, num_dst, (num_edges,), generator=generator),
        torch.randint(0, num_src, (num_edges,), generator=generator),
        (num_dst, num_src),
    )


def rows_of(lengths: Sequence[int], num_src: int, device: str) -> Adjacency:
    """Rows of these lengths with random sources, the caller's edges in random order."""
    generator = torch.Generator().manual_seed(0)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row = row[torch.randperm(len(row), generator=generator)]
    col = torch.randint(0, num_src, (len(row),), generator=generator)
    return Adjacency.from_coo(row.to(device), col.to(device), (len(lengths), num_src))


def special_scores() -> tuple[EdgeList, Tensor]:
    """Rows with NaN and infinite scores; for every edge, what is added to its finite score (0 for most).

    Each pair of rows shares its sources.
    """
    nan, inf = float("nan"), float("inf")
    rows = [
        *([nan], [inf], [-inf], [0.0], [inf, 0.0], [0.0, inf], [nan, 0.0, 0.0], [0.0, 0.0, nan]),
        *([-inf, inf, -inf], [inf, inf, inf], [inf, nan, -inf], [], [-inf, 0.0, -inf], [-inf] * 3),
        # Rows of several blocks and slices.
        *([0.0] * 699 + [x] for x in (nan, inf)),
        *([-inf] * 699 + [x] for x in (nan, inf, 0.0)),
        *([0.0] * 699 + [-inf], [-inf] * 700, [0.0] * 700),
    ]
    edges = torch.tensor([(nth, x) for nth, row in enumerate(rows) for x in row], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    edges = edges[torch.randperm(len(edges), generator=generator)]
    row, special = edges[:, 0].long(), edges[:, 1]
    col = row // 2 * 100 + torch.randint(0, 100, (len(edges),), generator=generator)
    return EdgeList(row, col, (len(rows), len(rows) * 50)), special


def assert_equal_but_for_rounding(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Checks that NaN and infinities are equal, and that the rest has an error of at most `tolerance`."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    finite = expected.isfinite()
    assert torch.equal(actual[~finite].nan_to_num(1e300), expected[~finite].nan_to_num(1e300))
    assert relative_error(actual[finite], expected[finite]) <= tolerance


def features(rows: int, width: int, dtype: torch.dtype, layout: str, device: str, seed: int = 0) -> Tensor:
    """Random features in a memory layout that a user might have."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    if layout == "row_stride":
        return draw(rows, width + 3)[:, :width]
    if layout == "misaligned":
        return draw(rows * width + 1)[1:].view(rows, width)
    if layout == "transposed":
        return draw(width, rows).t()
    if layout == "expanded":
        return draw(1, width).expand(rows, width)
    return draw(rows, width)


def as_vectors(adj: Adjacency, edges: Tensor) -> Tensor:
    """Values of the edges as dense vectors, one entry after the other."""
    bsb, device = adj.bsb, edges.device
    edges = edges.cpu()
    window_row = None if bsb.window_row is None else bsb.window_row.flatten().tolist()
    left: dict[tuple[int, int], list[int]] = {}
    edge_id = range(adj.num_edges) if adj.edge_id is None else adj.edge_id.tolist()
    for row, col, edge in zip(adj.row().tolist(), adj.col.tolist(), edge_id, strict=True):
        left.setdefault((row, col), []).append(edge)
    out = edges.new_zeros(bsb.num_vectors, 8, *edges.shape[1:])
    vector = 0
    for window, (begin, end) in enumerate(pairwise(bsb.window_ptr.tolist())):
        columns, masks = (part[begin:end].flatten().tolist() for part in (bsb.col, bsb.mask))
        for col, mask in zip(columns, masks, strict=True):
            for bit in range(8):
                if mask >> bit & 1:
                    place = window * 8 + bit
                    row = place if window_row is None else window_row[place]
                    out[vector, bit] = edges[left[row, col].pop(0)]
            vector += mask != 0
    assert vector == bsb.num_vectors
    return out.to(device)


def saved_bytes(run, *parameters: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A result and the bytes that autograd stores for it, without those of parameters."""
    held = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    return out, sum(sizes.values())


class Operations(TorchDispatchMode):
    """Records the names of PyTorch's operators; each takes the host about as long as a launch."""

    is_harmless = True  # FastSparse runs its kernels as without this mode

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def polluted_vectors(adj: Adjacency, value: Tensor) -> Tensor:
    """Values of the edges as dense vectors, with NaN where the structure has no entry."""
    vectors = as_vectors(adj, value)
    stored = as_vectors(adj, torch.ones(adj.num_values, dtype=torch.bool, device=adj.device))
    return vectors.masked_fill(~(stored if value.dim() == 1 else stored[..., None]), float("nan"))
