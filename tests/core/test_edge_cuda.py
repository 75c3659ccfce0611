"""Generated CUDA C++ of edge expressions, compiled for the CPU with a loop over its threads."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from test_edge_expression import (
    CASES,
    HOW,
    NUM_DST,
    NUM_SRC,
    derivatives,
    graph,
    leaves_of,
    of_several,
    tensors_of,
)

from fastsparse_core.ops import _edge_cuda, edge_expression
from fastsparse_core.ops._edge_kernels import Root

SHIM = """
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __fdividef(a, b) ((a) / (b))
#define __fsub_rn(a, b) ((a) - (b))
// A lane after the other adds what it holds.
#define PUT_SUM
template <typename T> void put(T*, float);
template <typename T> void put_sum(T* p, float v, int lane) { *p = lane ? *p + v : v; }
struct Place { int x, y; };
static Place threadIdx, blockIdx, blockDim, gridDim;
template <typename A, typename B> static A bits_as(B b) { A a; std::memcpy(&a, &b, sizeof a); return a; }
#define __uint_as_float bits_as<float, unsigned>
#define __float_as_uint bits_as<unsigned, float>
#define __int_as_float bits_as<float, int>
"""


class Compiled:
    """A kernel that is launched as PyTorch launches those that NVRTC has compiled."""

    def __init__(self, source: str, folder: Path) -> None:
        (signature,) = re.findall(r"void __launch_bounds__\(128\) kernel\((.*)\) \{", source)
        kinds = [item.rsplit(" ", 1)[0] for item in signature.split(", ")]
        given = ", ".join(
            f"({kind})a[{n}]" if kind.endswith("*") else f"*(int*)a[{n}]" for n, kind in enumerate(kinds)
        )
        driver = f"""
extern "C" void run(int grid_x, int grid_y, int block, void** a) {{
  gridDim = {{grid_x, grid_y}}; blockDim = {{block, 1}};
  for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x)
      for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) kernel({given});
}}
"""
        path = folder / f"k{abs(hash(source))}.cpp"
        path.write_text(SHIM + source + driver)
        library = path.with_suffix(".so")
        command = ["g++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", str(path), "-o", str(library)]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(library))

    def __call__(self, grid: Any, block: Any, args: list[Any]) -> None:
        numbers = [ctypes.c_int(arg) for arg in args if isinstance(arg, int)]
        rest = iter(numbers)
        values = [
            arg.data_ptr() if isinstance(arg, torch.Tensor) else ctypes.addressof(next(rest)) for arg in args
        ]
        self.library.run(grid[0], grid[1], block[0], (ctypes.c_void_p * len(values))(*values))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    known: dict[str, Compiled] = {}

    def compiled(source: str, device: int) -> Compiled:
        return (
            known.setdefault(source, None)
            or known.update({source: Compiled(source, tmp_path)})
            or known[source]
        )  # type: ignore[func-returns-value, arg-type]

    monkeypatch.setattr(_edge_cuda, "kernel_of", compiled)
    monkeypatch.setattr(edge_expression, "_are_on_gpu", lambda _: True)
    monkeypatch.setattr(edge_expression, "_num_warps", lambda *_: 8)


def check(name: str, how: str, width: int, dtype: torch.dtype, tolerance: float) -> None:
    expression, places = CASES[name]
    adj = graph("cpu")
    tensors = tensors_of(places, adj, width, dtype)
    for x, place in zip(tensors, places, strict=True):  # other kernels compute the other gradients
        x.requires_grad_(not (place == "mapped" or place.endswith("one")))
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
    kinds = tuple(place.split()[0] for place in places)
    out = edge_expression.edge_expression(adj, expression, kinds, tensors, how)
    want = edge_expression.unfused(adj, [Root(how, expression)], leaves_of(places, tensors, width), exact)[0]
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    wanted = [n for n, x in enumerate(tensors) if x.requires_grad]
    found = [out, *torch.autograd.grad(out, [tensors[n] for n in wanted], grad)]
    expected = [want, *torch.autograd.grad(want, [exact[n] for n in wanted], grad.double())]
    for got, best in zip(found, expected, strict=True):
        assert got.dtype == dtype
        assert (got.double() - best).norm() <= tolerance * best.norm().clamp(min=1)


@pytest.mark.parametrize("name", CASES)
def test_sources_compute_what_operators_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rows that are cut, some of a width that no lane fills."""
    monkeypatch.setattr("fastsparse_core.formats.lengths.slice_length", lambda *_: 4)
    for how in HOW if name in ("mlp", "crystal") else ("sum", "max", "none"):
        check(name, how, 70, torch.float32, 2e-5)


@pytest.mark.parametrize(
    ("width", "dtype", "tolerance"),
    [
        (1, torch.float32, 2e-5),
        (40, torch.float32, 2e-5),
        (132, torch.float32, 2e-5),
        (68, torch.bfloat16, 3e-2),
    ],
)
def test_widths_and_dtypes(width: int, dtype: torch.dtype, tolerance: float) -> None:
    check("mlp", "sum", width, dtype, tolerance)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["scalars", "mlp"])
def test_softmax_has_kernels_of_one_language(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of numbers come from Triton, whose exp differs in its last bits."""
    expression, places = CASES[name]
    adj = graph("cpu")
    tensors = tensors_of(places, adj, 128, torch.float32)
    languages: list[bool] = []

    def launch(call: Any, part: str, rows: Any, tensors: Any, outs: Any, *rest: Any) -> None:
        wanted = rest[1] if len(rest) > 1 else ()
        languages.append(call._has_cuda_source(wanted, tensors))

    monkeypatch.setattr(edge_expression._Call, "launch", launch)
    kinds = tuple(place.split()[0] for place in places)
    edge_expression.edge_expression(adj, expression, kinds, tensors, how).sum().backward()
    if name == "mlp":
        tensors[2].requires_grad_(False)  # also without a gradient of the mapped features
        languages.clear()
        edge_expression.edge_expression(adj, expression, kinds, tensors, how).sum().backward()
    assert len(languages) == 3
    assert languages[0] == (name == "mlp" or how != "softmax")
    assert how != "softmax" or len(set(languages)) == 1


def test_lanes_have_fewer_features_where_these_have_many_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_edge_cuda, "_MOST_WEIGHTS", 40)
    leaves = leaves_of(
        CASES["two maps"][1], tensors_of(CASES["two maps"][1], graph("cpu"), 132, torch.float32), 132
    )
    assert _edge_cuda.features_per_lane(leaves, (), 132) == 4
    assert _edge_cuda.features_per_lane(leaves, (0, 2, 4), 132) == 2
    check("two maps", "sum", 132, torch.float32, 2e-5)


@pytest.mark.parametrize("name", ["two maps", "mlp"])
def test_second_derivatives_are_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of mapped features, whose gradients are products of rows per edge."""
    expression, places = CASES[name]
    adj = graph("cpu")
    tensors = tensors_of(places, adj, 40, torch.float32)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    leaves, found = leaves_of(places, tensors, 40), []
    want = edge_expression.unfused(adj, [Root("sum", expression)], leaves, exact)[0]
    refused = lambda *_: pytest.fail("ran by PyTorch's operators")  # noqa: E731
    monkeypatch.setattr(edge_expression, "unfused", refused)
    out = edge_expression.edge_expression(adj, expression, places, tensors, "sum")
    for run, given in ((out, tensors), (want, exact)):
        grads = torch.autograd.grad(run.square().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), given)
        found.append([*grads, *second])
    for got, best in zip(*found, strict=True):
        assert (got.double() - best).norm() <= 2e-5 * best.norm().clamp(min=1)


@pytest.mark.parametrize("width", [1, 40, 70, 128])
def test_several_results_of_a_kernel(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers per edge and their gradients, too, which are sums over the lanes."""
    _, tensors, (fused, unfused) = of_several("cpu", width, torch.float32)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want = derivatives(unfused(exact), exact)
    monkeypatch.setattr(edge_expression, "unfused", lambda *_: pytest.fail("ran by PyTorch's operators"))
    monkeypatch.setattr(edge_expression, "kernel_of", lambda *_: pytest.fail("ran by Triton"))
    for got, best in zip(derivatives(fused(tensors), tensors), want, strict=True):
        assert (got.double() - best).norm() <= 2e-5 * best.norm().clamp(min=1)


def test_sums_over_lanes_of_several_warps_are_left_to_triton() -> None:
    leaves = leaves_of(
        ("src", "edge one"), tensors_of(("src", "edge one"), graph("cpu"), 132, torch.float32), 132
    )
    for how, wanted, width, is_supported in (
        ("across", (), 128, True),
        ("across", (), 132, False),
        ("sum", (1,), 128, True),
        ("sum", (1,), 132, False),
        ("sum", (0,), 132, True),
    ):
        roots = [Root(how, ("mul", ("leaf", 0), ("leaf", 1)))]
        assert _edge_cuda.supports(roots, leaves, wanted, width, [torch.float32]) == is_supported


def test_unused_gradients_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forces are gradients with respect to positions only, not to weights."""
    expression, places = CASES["mlp"]
    adj = graph("cpu")
    tensors = tensors_of(places, adj, 40, torch.float32)
    out = edge_expression.edge_expression(adj, expression, places, tensors)
    seen: list[tuple[Any, Any]] = []
    launch = edge_expression._Call.launch

    def launched(call: Any, part: str, *rest: Any) -> Any:
        seen.append((part, rest[4] if len(rest) > 4 else [root.how for root in call.roots]))
        return launch(call, part, *rest)

    monkeypatch.setattr(edge_expression._Call, "launch", launched)
    torch.autograd.grad(out.sum(), tensors[0], retain_graph=True)
    torch.autograd.grad(out.sum(), tensors[1], create_graph=True)
    torch.autograd.grad(out.sum(), tensors[2], create_graph=True)
    assert seen == [("rows", (0,)), ("forward", ["sum"]), ("forward", ["none"])]


@pytest.mark.parametrize("name", ["tanh", "softplus", "elu"])
def test_functions_of_small_numbers(name: str) -> None:
    """Formulas with exp would round their results to 0."""
    adj, options = graph("cpu"), [1.0] if name == "elu" else []
    x = torch.full((NUM_SRC, 33), -17.0 if name == "softplus" else -1e-6)
    y = torch.zeros(NUM_DST, 33)
    expression = (name, ("add", ("leaf", 0), ("leaf", 1)), *options)
    out = edge_expression.edge_expression(adj, expression, ["src", "dst"], [x, y], "none")
    want = getattr(torch.nn.functional, name)(x.double()[:1])
    torch.testing.assert_close(out.double(), want.expand(adj.num_edges, -1), rtol=1e-5, atol=0)
