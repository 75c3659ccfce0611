"""Reduced expressions of edges: generated kernels against PyTorch's operators, on CUDA or interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core.ops import _edge_kernels, edge_expression
from fastsparse_core.ops._edge_kernels import Expression, Leaf, Root

NUM_DST, NUM_SRC, EDGES, FEATURES = 17, 13, 60, 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HOW = ("sum", "mean", "max", "min", "softmax", "none")


def leaf(n: int) -> Expression:
    return ("leaf", n)


BOTH_AND_EDGE = ("add", ("add", leaf(0), leaf(1)), leaf(2))
#: Name -> (expression, places of its leaves; places with "one" have one number per row).
CASES: dict[str, tuple[Expression, tuple[str, ...]]] = {
    "mlp": (("relu", BOTH_AND_EDGE), ("dst", "src", "mapped", "weight")),
    "gate": (("mul", ("sigmoid", BOTH_AND_EDGE), leaf(1)), ("dst", "src", "edge")),
    "filter": (("mul", leaf(0), leaf(1)), ("src", "edge")),
    "crystal": (
        (
            "mul",
            ("sigmoid", ("add", leaf(0), leaf(1))),
            ("softplus", ("sub", leaf(2), ("mul", leaf(3), 1.5))),
        ),
        ("dst", "src", "src", "edge"),
    ),
    "two maps": (
        ("mul", ("add", leaf(0), leaf(1)), ("tanh", leaf(3))),
        ("src", "mapped", "weight", "mapped", "weight"),
    ),
    "scalars": (
        ("mul", ("exp", ("neg", BOTH_AND_EDGE)), ("add", leaf(3), leaf(4))),
        ("dst one", "src one", "edge one", "src", "whole"),
    ),
    "scaled": (("add", ("mul", leaf(0), leaf(1)), ("relu", leaf(1))), ("whole one", "src")),
    "quotient": (("div", ("silu", leaf(0)), ("add", ("square", ("tanh", leaf(1))), 0.5)), ("dst", "src")),
    "rectifiers": (("elu", ("leaky_relu", ("sub", leaf(0), leaf(1)), 0.2), 1.0), ("dst", "src")),
}


FILTER, ROWS = ("add", leaf(1), leaf(6)), ("mul", leaf(0), ("mul", ("silu", leaf(1)), leaf(4)))
#: Results of one call, and the places of its leaves. Both mapped leaves have the same features.
SEVERAL: tuple[tuple[Root, ...], tuple[str, ...]] = (
    (
        Root("sum", ("add", ("mul", leaf(0), FILTER), ("mul", leaf(5), leaf(3)))),
        Root("mean", ROWS),
        Root("none", ("mul", ROWS, leaf(5))),
        Root("across", ROWS),
        Root("across", ("mul", leaf(3), leaf(0))),
    ),
    ("src", "mapped", "weight", "edge one", "edge", "dst", "mapped", "weight"),
)


def of_several(device: str, width: int, dtype: torch.dtype) -> tuple[Adjacency, list[Tensor], list[Any]]:
    """Structure and leaves of `SEVERAL`, and what computes its results: kernels and PyTorch's operators."""
    roots, places = SEVERAL
    adj = graph(device)
    tensors = tensors_of(places, adj, width, dtype)
    tensors[6] = tensors[1]
    leaves, kinds = leaves_of(places, tensors, width), [place.split()[0] for place in places]
    return (
        adj,
        [*tensors[:6], tensors[7]],
        [
            lambda given: edge_expression.edge_expressions(
                adj, roots, kinds, [*given[:6], given[1], given[6]]
            ),
            lambda given: edge_expression.unfused(adj, roots, leaves, [*given[:6], given[1], given[6]]),
        ],
    )


def derivatives(outs: tuple[Tensor, ...], tensors: list[Tensor]) -> list[Tensor]:
    """Results, gradients and second derivatives of a loss that leaves out one of the results."""
    loss = sum((n + 1) * out.square().sum() for n, out in enumerate(outs) if n != 1)
    first = torch.autograd.grad(loss, tensors, create_graph=True)
    return [*outs, *first, *torch.autograd.grad(sum(each.square().sum() for each in first), tensors)]


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated again; Triton's interpreter runs them on the CPU."""
    device = getattr(request.node, "callspec", None) and request.node.callspec.params.get("device")
    if device is not None:
        monkeypatch.setenv("TRITON_INTERPRET", "1" if device == "cpu" else "0")
        pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _edge_kernels.kernel_of.cache_clear()


def graph(device: str, edges: int = EDGES) -> Adjacency:
    """Rows without edges at both ends, edges in random order."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(NUM_DST - 2, (edges,), generator=generator)
    row[: edges // 4] = 3  # a long row
    col = torch.randint(NUM_SRC - 1, (edges,), generator=generator)
    return Adjacency.from_coo(row.to(device), col.to(device), (NUM_DST, NUM_SRC))


def tensors_of(places: tuple[str, ...], adj: Adjacency, width: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = {"dst": NUM_DST, "src": NUM_SRC, "edge": adj.num_edges, "mapped": adj.num_edges}
    found = []
    for place in places:
        shape: tuple[int, ...] = (width,)
        if place == "weight":
            shape = (width, FEATURES)
        elif place == "whole one":
            shape = (1,)
        elif place != "whole":
            kind = place.split()
            shape = (rows[kind[0]], FEATURES if place == "mapped" else 1 if len(kind) > 1 else width)
        found.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(adj.device, dtype))
    return [x.requires_grad_() for x in found]


def leaves_of(places: tuple[str, ...], tensors: list[Tensor], width: int) -> tuple[Leaf, ...]:
    return tuple(
        Leaf(
            place.split()[0],
            place.endswith("one"),
            x.shape[-1] if place in ("mapped", "weight") else 0,
        )
        for place, x in zip(places, tensors, strict=True)
    )


def check(name: str, how: str, adj: Adjacency, width: int, dtype: torch.dtype, tolerance: float) -> None:
    expression, places = CASES[name]
    tensors = tensors_of(places, adj, width, dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    kinds = tuple(place.split()[0] for place in places)
    out = edge_expression.edge_expression(adj, expression, kinds, tensors, how)
    want = edge_expression.unfused(adj, [Root(how, expression)], leaves_of(places, tensors, width), exact)[0]
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grad = grad.to(adj.device, dtype)
    found = [out, *torch.autograd.grad(out, tensors, grad)]
    expected = [want, *torch.autograd.grad(want, exact, grad.double())]
    for got, best in zip(found, expected, strict=True):
        assert got.dtype == dtype
        assert (got.double() - best).norm() <= tolerance * best.norm().clamp(min=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_what_operators_do(name: str, how: str, device: str):
    check(name, how, graph(device), 6, torch.float64, 1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOW)
def test_rows_cut_into_slices(how: str, device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fastsparse_core.formats.lengths.slice_length", lambda *_: 4)
    adj = graph(device)
    assert adj.first_row_split.num_slots
    for name in ("mlp", "scalars"):
        check(name, how, adj, 5, torch.float64, 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["sum", "max"])
@pytest.mark.parametrize("width", [7, 200])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_dtypes_and_widths(dtype: torch.dtype, tolerance: float, width: int, how: str):
    adj = graph("cuda", 3000)
    for name in ("mlp", "two maps"):
        if how not in ("max", "min") or dtype == torch.float32:  # rounding changes which edges are chosen
            check(name, how, adj, width, dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_float32_on_a_gpu(name: str):
    adj = graph("cuda", 3000)
    for how in HOW:
        check(name, how, adj, 128, torch.float32, 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOW)
def test_same_bits_every_time(how: str):
    adj = graph("cuda", 50_000)
    expression, places = CASES["mlp"]
    tensors = tensors_of(places, adj, 128, torch.float32)
    found = []
    for _ in range(2):
        out = edge_expression.edge_expression(adj, expression, places, tensors, how)
        found.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["max", "min"])
def test_nan_is_the_extremum(how: str, device: str):
    adj = graph(device)
    expression, places = CASES["filter"]
    tensors = tensors_of(places, adj, 4, torch.float64)
    with torch.no_grad():
        tensors[0][2, 1] = float("nan")
    out = edge_expression.edge_expression(adj, expression, places, tensors, how)
    leaves = leaves_of(places, tensors, 4)
    want = edge_expression.unfused(adj, [Root(how, expression)], leaves, tensors)[0]
    assert want.isnan().any()
    torch.testing.assert_close(out, want, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "how"),
    [("crystal", how) for how in ("sum", "mean", "softmax", "none")]
    + [(name, "sum") for name in ("mlp", "two maps", "scalars", "scaled", "quotient", "rectifiers")],
)
def test_second_derivatives(name: str, how: str, device: str):
    expression, places = CASES[name]
    adj = graph(device)
    tensors = tensors_of(places, adj, 3, torch.float64)
    found = []
    kinds = [place.split()[0] for place in places]
    for run in (
        edge_expression.edge_expression(adj, expression, kinds, tensors, how),
        edge_expression.unfused(adj, [Root(how, expression)], leaves_of(places, tensors, 3), tensors)[0],
    ):
        grads = torch.autograd.grad(run.square().sum(), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(grad.tanh().sum() for grad in grads), tensors))
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 1e-11 * want.norm().clamp(min=1)


@pytest.mark.parametrize("device", DEVICES)
def test_either_setting_of_tf32(device: str):
    """PyTorch raises an error if the older setting is read after the newer one was written."""
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        check("filter", "sum", graph(device), 6, torch.float64, 1e-12)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("device", DEVICES)
def test_several_results_of_a_kernel(device: str):
    _, tensors, (fused, unfused) = of_several(device, 5, torch.float64)
    for got, want in zip(
        derivatives(fused(tensors), tensors), derivatives(unfused(tensors), tensors), strict=True
    ):
        assert (got - want).norm() <= 1e-11 * want.norm().clamp(min=1)
    first = [
        torch.autograd.grad(run(tensors)[:2], tensors, [torch.ones(NUM_DST, 5).to(tensors[0])] * 2)
        for run in (fused, unfused)
    ]
    for got, want in zip(*first, strict=True):
        assert (got - want).norm() <= 1e-11 * want.norm().clamp(min=1)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [7, 40, 70, 128, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 5e-2)])
def test_several_results_on_a_gpu(width: int, dtype: torch.dtype, tolerance: float):
    _, tensors, (fused, unfused) = of_several("cuda", width, dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    count = len(SEVERAL[0]) + len(tensors) if dtype == torch.bfloat16 else None
    got, want = derivatives(fused(tensors), tensors)[:count], derivatives(unfused(exact), exact)[:count]
    for each, best in zip(got, want, strict=True):
        assert each.dtype == dtype
        assert (each.double() - best).norm() <= tolerance * best.norm().clamp(min=1)


@pytest.mark.parametrize("part", ["forward", "rows", "columns"])
def test_source_holds_what_is_wanted_only(part: str):
    expression, places = CASES["mlp"]
    leaves = tuple(Leaf(place, False, FEATURES if place in ("mapped", "weight") else 0) for place in places)
    wanted = {"forward": (), "rows": (0, 3), "columns": (1,)}[part]
    source = _edge_kernels.source_of(part, (Root("sum", expression),), leaves, wanted)
    compile(source, part, "exec")
    assert source == _edge_kernels.source_of(part, (Root("sum", expression),), leaves, wanted)
    stored = {n for n in range(4) if f"tl.store(d{n} " in source}
    assert stored == set(wanted)
    assert ("tl.store(out0" in source) == (part == "forward")
