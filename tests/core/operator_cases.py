"""The table of operators: calls, arguments, references, tolerances, and arguments that are rejected."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from cases import TOLERANCE, assert_equal_but_for_rounding, draw
from torch import Tensor

from fastsparse_core import (
    CBSR,
    Adjacency,
    additive_attention,
    attention,
    edge_softmax,
    gated_aggregate,
    gated_edges,
    gather_csr,
    gatv2_attention,
    gine_aggregate,
    maxk,
    multi_aggregate,
    reference,
    scatter,
    scatter_softmax,
    sddmm,
    spmm,
    ssd,
)
from fastsparse_core.ops.maxk import maxk_dense

Shape = tuple[int, ...]
Tensors = dict[str, Tensor]
#: Reductions of `multi_aggregate`.
ALL = ("sum", "mean", "min", "max", "var", "std")


@dataclass(frozen=True)
class Digits:
    """Tolerances of results, as factors of `cases.TOLERANCE`; for gradients, times `gradients`."""

    dtypes: float = 2
    shapes: float = 2
    layouts: float = 2
    structures: float = 2
    gradients: float = 4


@dataclass(frozen=True)
class Operator:
    """An operator.

    Attributes:
        name: Name of the operator, and of the way it is called.
        call: Computes one or several results from a structure and `make`'s tensors by name.
        make: Makes differentiable tensors by name, for a structure, a shape and a dtype.
        small: A shape for numerical derivatives.
        expected: Computes the same by the definition; None if other tests compare the results.
        shape: A usual shape.
        shapes: Shapes on both sides of every size at which kernels change.
        digits: Tolerances against `expected`.
        num_edges: Number of edges of the structure for `shapes`.
        lean: A shape for which nothing of the size of edges times width may be allocated.
    """

    name: str
    call: Callable[..., Any]
    make: Callable[[Adjacency, Shape, torch.dtype], Tensors]
    small: Shape
    expected: Callable[..., Any] | None = None
    shape: Shape = ()
    shapes: Sequence[Shape] = ()
    digits: Digits = field(default_factory=Digits)
    num_edges: int = 600
    lean: Shape | None = None

    def results(self, call: Callable[..., Any], adj: Adjacency, tensors: Tensors, **options: Any) -> tuple:
        """As a tuple."""
        out = call(adj, **tensors, **options)
        return out if isinstance(out, tuple) else (out,)

    def everything(
        self, call: Callable[..., Any], adj: Adjacency, tensors: Tensors, **options: Any
    ) -> list[Tensor]:
        """Results and the gradients of all tensors."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        out = self.results(call, adj, leaves, **options)
        how = {"dtype": torch.float64, "device": str(adj.device)}
        upstream = [draw(*x.shape, seed=9 + n, **how).to(x) for n, x in enumerate(out)]
        return [*(x.detach() for x in out), *torch.autograd.grad(out, list(leaves.values()), upstream)]

    def compare(self, adj: Adjacency, tensors: Tensors, factor: float, **options: Any) -> None:
        """Results and every gradient with the reference, which draws the same numbers for dropout."""
        assert self.expected is not None
        dtype = next(iter(tensors.values())).dtype
        drawn = {key: value for key, value in options.items() if key != "algorithm"}
        if options.get("dropout_p"):
            torch.manual_seed(0)
            drawn["seed"] = int(torch.randint(2**63 - 1, ()))
            torch.manual_seed(0)
        if self.call is multi_aggregate_all:
            drawn["message_dtype"] = dtype
        found = self.everything(self.call, adj, tensors, **options)
        exact = {name: tensor.double() for name, tensor in tensors.items()}
        wanted = self.everything(self.expected, adj, exact, **drawn)
        count = len(found) - len(tensors)
        dtypes = [dtype] * count + [tensor.dtype for tensor in tensors.values()]
        for at, (got, want) in enumerate(zip(found, wanted, strict=True)):
            assert got.dtype == dtypes[at]
            tolerance = factor * TOLERANCE[dtype] * (1 if at < count else self.digits.gradients)
            assert_equal_but_for_rounding(got, want, tolerance)


def each_operator(operators: Iterable[Operator]) -> pytest.MarkDecorator:
    """A test's parameter `op`."""
    return pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in operators])


def _of(adj: Adjacency, dtype: torch.dtype) -> Callable[..., Tensor]:
    def of(*shape: int, seed: int) -> Tensor:
        return draw(*shape, dtype=dtype, device=str(adj.device), seed=seed)

    return of


# ---------------------------------------------------------------- messages with edge features


def _gine(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    of = _of(adj, dtype)
    return {"x": of(adj.num_src, shape[0], seed=0), "edge_attr": of(adj.num_values, shape[0], seed=3)}


def _gine_raw(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    (width, edge_width), of = shape, _of(adj, dtype)
    maps = {"edge_weight": of(width, edge_width, seed=4) / edge_width, "edge_bias": of(1, width, seed=5)[0]}
    return {"x": of(adj.num_src, width, seed=0), "edge_attr": of(adj.num_values, edge_width, seed=3), **maps}


def _gated(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    of, rows = _of(adj, dtype), {"k": adj.num_dst, "q": adj.num_src, "v": adj.num_src}
    return {name: of(count, shape[0], seed=seed) for seed, (name, count) in enumerate(rows.items())}


def _gated_raw(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    (width, edge_width), of = shape, _of(adj, dtype)
    weights = {name: of(width, edge_width, seed=seed) / edge_width for name, seed in _GATES.items()}
    return {**_gated(adj, shape, dtype), "edge_attr": of(adj.num_values, edge_width, seed=3), **weights}


def _gated_edges(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    return {**_gated(adj, shape, dtype), "edge": _of(adj, dtype)(adj.num_values, shape[0], seed=3)}


_GATES = {"gate_weight": 4, "value_weight": 5}
_HOW: dict[str, Any] = {
    "small": (3, 2),
    "shape": (32, 8),
    # Lanes of a group from 1 to 8, several tiles, padding of both.
    "shapes": ((1, 1), (8, 4), (20, 3), (33, 8), (64, 32), (130, 5)),
    # Rounding may move a message across 0, so that ReLU drops it or keeps it.
    "digits": Digits(dtypes=4, shapes=4, layouts=10, gradients=1),
}


MESSAGES = [
    Operator(name, call, make, expected=getattr(reference, call.__name__), lean=lean, **_HOW)
    for name, call, make, lean in (
        ("gine", gine_aggregate, _gine, None),
        ("gine raw", gine_aggregate, _gine_raw, (128, 32)),
        ("gated", gated_aggregate, _gated, (128, 32)),
        ("gated raw", gated_aggregate, _gated_raw, (128, 32)),
        ("gated edges", gated_edges, _gated_edges, None),
    )
]

# ---------------------------------------------------------------- several reductions at once


def multi_aggregate_all(adj: Adjacency, x_src: Tensor, **more: Any) -> Tensor:
    return multi_aggregate(adj, x_src, **{"aggregations": ALL, **more})


def _expected_of_all(adj: Adjacency, x_src: Tensor, **more: Any) -> Tensor:
    return reference.multi_aggregate(adj, x_src, **{"aggregations": ALL, **more})


def _ends(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    of = _of(adj, dtype)
    return {"x_src": of(adj.num_src, shape[0], seed=0), "x_dst": of(adj.num_dst, shape[0], seed=1)}


def _ends_and_features(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    (width, edge_width), of = shape, _of(adj, dtype)
    weight = of(width, edge_width, seed=3) / max(edge_width, 1) ** 0.5
    return {
        **_ends(adj, shape, dtype),
        "edge_attr": of(adj.num_values, edge_width, seed=2),
        "edge_weight": weight,
    }


def _ends_and_rows(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    return {**_ends(adj, shape, dtype), "edge_attr": _of(adj, dtype)(adj.num_values, shape[0], seed=2)}


MULTI = [
    Operator(
        f"multi {edges}",
        multi_aggregate_all,
        make,
        small=(3, 2),
        expected=_expected_of_all,
        shape=(24, 5),
        shapes=tuple((width, 1 + width % 32) for width in (1, 3, 4, 17, 64, 130, 260)),
        digits=Digits(shapes=4, layouts=4, structures=4),
    )
    for edges, make in (("none", _ends), ("features", _ends_and_features), ("rows", _ends_and_rows))
]

# ---------------------------------------------------------------- attention with edge features


def _edges_of_heads(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    (heads, width, edge_width), of = shape, _of(adj, dtype)
    weight = of(heads * width, edge_width, seed=4) / edge_width
    return {"edge_attr": of(adj.num_values, edge_width, seed=3), "edge_weight": weight}


def _dot_product_with_edges(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    (heads, width, _), of = shape, _of(adj, dtype)
    rows = {"q": adj.num_dst, "k": adj.num_src, "v": adj.num_src}
    tensors = {name: of(count, heads, width, seed=seed) for seed, (name, count) in enumerate(rows.items())}
    return {**_edges_of_heads(adj, shape, dtype), **tensors, "bias": of(adj.num_values, heads, seed=5)}


def _gatv2_with_edges(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    (heads, width, _), of = shape, _of(adj, dtype)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    att = _of(adj, precise)(heads, width, seed=2) / width**0.5
    ends = {"x_dst": of(adj.num_dst, heads, width, seed=0), "x_src": of(adj.num_src, heads, width, seed=1)}
    return {**ends, "att": att, **_edges_of_heads(adj, shape, dtype)}


_HEADS: dict[str, Any] = {
    "small": (2, 3, 2),
    "shape": (4, 16, 8),
    # Lanes per head from 1 to 32, several groups of heads, padding of heads, of edges, edge features beyond
    # the first four of a lane, and beyond a block's 64 on the CPU.
    "shapes": (
        *((16, 16, 8), (4, 64, 8), (1, 8, 32), (3, 20, 3), (6, 64, 5)),
        *((5, 7, 1), (2, 130, 12), (3, 20, 0), (1, 256, 8), (2, 12, 70)),
    ),
    "num_edges": 4000,
    "lean": (4, 32, 32),
}
ATTENTION = [
    Operator("dot product", attention, _dot_product_with_edges, expected=reference.attention, **_HEADS),
    Operator("gatv2", gatv2_attention, _gatv2_with_edges, expected=reference.gatv2_attention, **_HEADS),
]

#: Operators that `test_operators.py` compares with their references.
COMPARED = [*MESSAGES, *MULTI, *ATTENTION]
BY_NAME = {op.name: op for op in COMPARED}

# ---------------------------------------------------------------- others, for their derivatives


def _scales(adj: Adjacency) -> Tensors:
    how = {"dtype": torch.float64, "device": adj.device}
    return {
        "scale_dst": torch.linspace(0.5, 1.5, adj.num_dst, **how),
        "scale_src": torch.linspace(1.5, 0.5, adj.num_src, **how),
    }


def _product(heads: int) -> Callable[..., Tensors]:
    def make(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
        of = _of(adj, dtype)
        value = of(adj.num_values, max(heads, 1), seed=1)
        bias = of(1, shape[0], seed=2)[0]
        return {"x": of(adj.num_src, *shape, seed=0), "value": value if heads else value[:, 0], "bias": bias}

    return make


def _rows_of(**rows: str) -> Callable[..., Tensors]:
    """Matrices with a row for every destination, source, value or edge."""

    def make(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
        counts = {"dst": adj.num_dst, "src": adj.num_src, "values": adj.num_values, "edges": adj.num_edges}
        of = _of(adj, dtype)
        return {name: of(counts[kind], *shape, seed=seed) for seed, (name, kind) in enumerate(rows.items())}

    return make


def _vectors(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    of = _of(adj, dtype)
    return {"x": of(adj.num_src, *shape, seed=0), "vectors": of(adj.bsb.num_vectors, 8, 2, seed=1)}


def _kept(adj: Adjacency) -> Tensor:
    """Three columns of five for every row."""
    first = torch.arange(adj.num_src, device=adj.device)[:, None] % 3
    return (first + torch.arange(3, device=adj.device)).to(torch.uint8)


def _sparse_rows(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    of = _of(adj, dtype)
    value, bias = of(adj.num_values, seed=1), of(5, seed=2)
    return {"values": of(adj.num_src, 3, seed=0), "value": value, "bias": bias}


def _ssd(adj: Adjacency, values: Tensor, value: Tensor, bias: Tensor, **how: str) -> Tensor:
    return ssd(adj, CBSR(values, _kept(adj), 5), value, bias=bias, **how, **_scales(adj))


def _queries(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    (heads, width, _), of = shape, _of(adj, dtype)
    rows = {"q": of(adj.num_dst, heads, width, seed=0), "k": of(adj.num_src, heads, width, seed=1)}
    return {**rows, "v": of(adj.num_src, heads, width, seed=2), "bias": of(adj.num_values, heads, seed=3)}


def _scores(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    (heads, *_), tensors = shape, _queries(adj, shape, dtype)
    scores = _rows_of(score_dst="dst", score_src="src")(adj, (heads,), dtype)
    return {**scores, "v": tensors["v"], "bias": tensors["bias"]}


def _vector(adj: Adjacency, shape: Shape, dtype: torch.dtype) -> Tensors:
    tensors = _gatv2_with_edges(adj, shape, dtype)
    return {name: tensors[name] for name in ("x_dst", "x_src", "att")}


def _spmm(adj: Adjacency, **tensors: Any) -> Tensor:
    return spmm(adj, **tensors, **_scales(adj))


def _spmm_of_vectors(adj: Adjacency, x: Tensor, vectors: Tensor, algorithm: str) -> Tensor:
    return spmm(adj, x, vectors, "mean", algorithm=algorithm, value_layout="me_bcrs")


def _sddmm(adj: Adjacency, a: Tensor, b: Tensor, **how: str) -> Tensor:
    return sddmm(adj, a, b, **how, **_scales(adj))


def _scatter(adj: Adjacency, x: Tensor, reduce: str) -> Tensor:
    return scatter(x, adj.row().long() // 2, 4, reduce)


def _gather(adj: Adjacency, x: Tensor) -> Tensor:
    return torch.ops.fastsparse.cbsr_gather.default(x, _kept(adj))


def _others() -> Iterator[Operator]:
    for heads, algorithm in ((0, "csr"), (1, "csr"), (2, "csr"), (0, "flashsparse"), (1, "flashsparse")):
        call = partial(_spmm, algorithm=algorithm)
        yield Operator(f"spmm {heads} {algorithm}", call, _product(heads), (4,))
    for reduce in ("max", "min"):
        yield Operator(f"spmm {reduce}", partial(spmm, reduce=reduce), _product(1), (4,))
    for call, make in ((attention, _queries), (additive_attention, _scores), (gatv2_attention, _vector)):
        for algorithm in ("fused3s", "unfused", *(("csr",) if call is attention else ())):
            name, call_of = f"{call.__name__} {algorithm}", partial(call, algorithm=algorithm)
            yield Operator(name, call_of, make, (2, 2, 2))
    for algorithm in ("csr", "flashsparse", "tca", "hr"):
        call = partial(_spmm_of_vectors, algorithm=algorithm)
        yield Operator(f"spmm of vectors {algorithm}", call, _vectors, (4,))
    ends, of_sources, of_edges = _rows_of(a="dst", b="src"), _rows_of(x="src"), _rows_of(x="edges")
    for algorithm, layout in itertools.product(("csr", "flashsparse"), ("edges", "me_bcrs")):
        call = partial(_sddmm, algorithm=algorithm, layout=layout)
        yield Operator(f"sddmm {algorithm} {layout}", call, ends, (2, 3) if layout == "edges" else (2,))
    for shape in ((), (2,)):
        yield Operator(f"softmax {shape}", edge_softmax, _rows_of(score="values"), shape)
    for algorithm, reduce in itertools.product(("decoupled", "densify"), ("sum", "mean")):
        call = partial(_ssd, algorithm=algorithm, reduce=reduce)
        yield Operator(f"ssd {algorithm} {reduce}", call, _sparse_rows, ())
    yield Operator("maxk", lambda adj, x: maxk(x, 3).to_dense(), of_sources, (9,))
    yield Operator("maxk values", lambda adj, x: maxk(x, 3).values, of_sources, (9,))
    yield Operator("maxk dense", lambda adj, x: maxk_dense(x, 3), of_sources, (9,))
    yield Operator("cbsr", lambda adj, x: CBSR(x, _kept(adj), 9).to_dense(), of_sources, (3,))
    yield Operator("cbsr gather", _gather, of_sources, (9,))
    for reduce in (*ALL, "mul"):
        yield Operator(f"scatter {reduce}", partial(_scatter, reduce=reduce), of_edges, (2,))
    yield Operator("scatter softmax", lambda adj, x: scatter_softmax(x, adj.row().long(), 6), of_edges, (2,))
    yield Operator("gather csr", lambda adj, x: gather_csr(x, adj.rowptr), _rows_of(x="dst"), (2,))


DIFFERENTIABLE = [*COMPARED, *_others()]

# ---------------------------------------------------------------- rejected arguments

_one = torch.ones
_raw = {"edge_attr": _one(400, 4)}
_gates = {"k": _one(40, 16), "q": _one(60, 16), "v": _one(60, 16)}
_heads = {"q": _one(40, 2, 8), "k": _one(60, 2, 8), "v": _one(60, 2, 8)}
#: Arguments that are right for the structure of `cases.random_graph`: 40 rows, 60 columns, 400 edges.
RIGHT: dict[Callable[..., Any], dict[str, Any]] = {
    spmm: {"x": _one(60, 8)},
    sddmm: {"x_dst": _one(40, 2), "x_src": _one(60, 2)},
    edge_softmax: {"score": _one(400)},
    gine_aggregate: {"x": _one(60, 16), **_raw, "edge_weight": _one(16, 4), "edge_bias": _one(16)},
    gated_aggregate: {**_gates, **_raw, "gate_weight": _one(16, 4), "value_weight": _one(16, 4)},
    gated_edges: {**_gates, "edge": _one(400, 16)},
    multi_aggregate: {"x_src": _one(60, 8), "aggregations": ("max",)},
    attention: {**_heads, **_raw, "edge_weight": _one(16, 4)},
}
#: Operator -> changes of its arguments, each with the error and its message.
BAD: dict[Callable[..., Any], list[tuple[dict[str, Any], type[Exception], str]]] = {
    spmm: [
        ({"x": _one(59, 8)}, ValueError, r"x: expected num_src = 60 rows, got shape \(59, 8\)"),
        ({"x": _one(60, 8).long()}, TypeError, "x: expected float64, .* or bfloat16, got torch.int64"),
        ({"x": [[1.0]]}, TypeError, "x: expected a tensor, got list"),
        ({"x": _one(60, 8, device="meta")}, ValueError, "x: expected device"),
        ({"value": _one(399)}, ValueError, r"value: expected shape \(400,\) or \(400, heads\), got \(399,\)"),
        ({"value": _one(400, 3)}, ValueError,
         "value: expected a number of heads that divides the 8 features"),
        ({"value": _one(400).long()}, TypeError, "value: expected a floating tensor"),
        ({"bias": _one(7)}, ValueError, "bias: expected 8 entries"),
        ({"scale_dst": _one(41)}, ValueError, r"scale_dst: expected shape \(40,\), got \(41,\)"),
        ({"scale_src": _one(60, requires_grad=True)}, ValueError, "scale_src: expected a constant"),
        ({"reduce": "prod"}, ValueError, "reduce: expected 'sum', 'mean', 'max' or 'min', got 'prod'"),
        ({"algorithm": "magic"}, ValueError, "algorithm: expected"),
        ({"value_layout": "dense"}, ValueError,
         "value_layout: expected one of 'edges', 'me_bcrs', got 'dense'"),
        ({"value_layout": "me_bcrs", "value": _one(400)}, ValueError,
         r"value: expected shape \(\d+, 8\) or \(\d+, 8, heads\), got \(400,\)"),
        ({"value_layout": "me_bcrs", "reduce": "max"}, ValueError,
         "value_layout: expected 'edges' for reduce='max', which uses CSR, got 'me_bcrs'"),
    ],
    sddmm: [
        ({"x_dst": _one(41, 2)}, ValueError, "x_dst: expected num_dst = 40 rows"),
        ({"x_src": _one(60, 3)}, ValueError, "x_dst and x_src: expected"),
        ({"x_dst": _one(40), "x_src": _one(60)}, ValueError, "x_dst and x_src: expected"),
        ({"x_src": _one(60, 2).double()}, TypeError, "x_dst and x_src: expected one dtype"),
        ({"x_dst": _one(40, 2).int(), "x_src": _one(60, 2).int()}, TypeError, "x_dst: expected float64"),
        ({"algorithm": "dense"}, ValueError, "algorithm: expected one of .*got 'dense'"),
        ({"layout": "dense"}, ValueError, "layout: expected one of .*got 'dense'"),
    ],
    edge_softmax: [
        ({"score": _one(3)}, ValueError, r"score: expected shape \(400,\) or \(400, heads\), got \(3,\)"),
        ({"score": _one(400, 1, 1)}, ValueError, "score: expected shape"),
        ({"score": _one(400).int()}, TypeError, "score: expected a floating tensor, got torch.int32"),
        ({"score": [1.0, 2.0]}, TypeError, "score: expected a floating tensor, got list"),
        ({"score": _one(400, device="meta")}, ValueError,
         "score: expected device cpu like the Adjacency, got meta"),
    ],
    gine_aggregate: [
        ({"x": _one(59, 16)}, ValueError, "x: expected num_src"),
        ({"x": _one(60, 16, 1)}, ValueError, "x: expected .num_src, F"),
        ({"edge_attr": _one(399, 4)}, ValueError, "edge_attr: expected shape"),
        ({"edge_attr": _one(400, 4).double()}, TypeError, "edge_attr: expected the dtype"),
        ({"edge_attr": _one(400, 4).int()}, TypeError, "edge_attr: expected a floating tensor"),
        ({"edge_weight": None}, ValueError, "edge_attr: expected shape"),
        ({"edge_weight": _one(16, 3)}, ValueError, "edge_weight: expected shape"),
        ({"edge_bias": _one(15)}, ValueError, "edge_bias: expected shape"),
        ({"edge_attr": _one(400, 16), "edge_weight": None}, ValueError, "edge_bias: expected None"),
    ],
    gated_aggregate: [
        ({"v": _one(60, 15)}, ValueError, "v: expected the width of q"),
        ({"k": _one(40, 16).double()}, TypeError, "k: expected the dtype of q"),
        ({"value_weight": None}, ValueError, "expected all of them or none"),
    ],
    gated_edges: [
        ({"edge": _one(400, 15)}, ValueError, "edge: expected shape"),
    ],
    multi_aggregate: [
        ({"aggregations": ("median",)}, ValueError, "aggregations"),
        ({"aggregations": ("max", "max")}, ValueError, "each once"),
        ({"aggregations": ()}, ValueError, "aggregations"),
        ({"groups": 3}, ValueError, "groups"),
        ({"x_src": _one(3, 8)}, ValueError, "x_src"),
        ({"x_src": _one(60, 8).long()}, TypeError, "x_src"),
        ({"x_dst": _one(40, 7)}, ValueError, "x_dst"),
        ({"edge_attr": _one(5, 8)}, ValueError, "edge_attr"),
        ({"edge_weight": _one(8, 2)}, ValueError, "edge_weight"),
        ({"edge_attr": _one(400, 2), "edge_weight": _one(8, 3)}, ValueError, "edge_weight"),
    ],
    attention: [
        ({"edge_weight": None}, ValueError, "edge_attr and edge_weight: expected both"),
        ({"edge_attr": _one(399, 4)}, ValueError, "edge_attr: expected shape"),
        ({"edge_weight": _one(16, 3)}, ValueError, "edge_weight: expected shape"),
        ({"v": _one(60, 2, 7)}, ValueError, "v: expected the same width as q and k"),
        ({"edge_attr": _one(400, 4).int()}, TypeError, "edge_attr: expected a floating tensor"),
    ],
}  # fmt: skip
