"""spmm against the float64 reference, its gradients, and its errors."""

from __future__ import annotations

import itertools
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from cases import (
    ALGORITHMS,
    DTYPES,
    LAYOUTS,
    SETTINGS,
    TOLERANCE,
    WIDTHS,
    each_kernel,
    each_shape,
    edge_lists,
    features,
    polluted_vectors,
    ragged,
    random_graph,
    relative_error,
    rows_of,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastsparse_core import (
    Adjacency,
    additive_attention,
    additive_attention_weights,
    attention,
    attention_weights,
    edge_softmax,
    gatv2_attention,
    gatv2_attention_weights,
    maxk,
    policy,
    reference,
    sddmm,
    spmm,
    ssd,
)
from fastsparse_core.formats.bsb import Bsb
from fastsparse_core.ops._facts import facts_of


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@given(
    edges=edge_lists(),
    width=st.sampled_from(WIDTHS),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    valued=st.sampled_from(["none", "scalar", "heads", "float32", "every feature"]),
    scaled=st.booleans(),
    biased=st.booleans(),
    relu=st.booleans(),
    algorithm=st.sampled_from(ALGORITHMS),
)
@SETTINGS
def test_equals_reference(
    device, poisoned_memory, reduce, edges, width, dtype, layout, valued, scaled, biased, relu, algorithm
):
    adj = edges.adjacency(device)
    x = features(adj.num_src, width, dtype, layout, device)
    value = bias = scale_dst = scale_src = None
    if valued == "scalar":
        value = features(adj.num_values, 1, dtype, "contiguous", device, seed=1)[:, 0]
    elif valued == "float32" and dtype != torch.float64:
        value = features(adj.num_values, 1, torch.float32, "contiguous", device, seed=1)[:, 0]
    elif valued == "heads" and width:
        heads = max(h for h in (1, 2, 4, 5) if width % h == 0)
        value = features(adj.num_values, heads, dtype, "contiguous", device, seed=1)
    elif valued == "every feature" and width:
        value_dtype = torch.float32 if biased and dtype != torch.float64 else dtype
        value = features(adj.num_values, width, value_dtype, "contiguous", device, seed=1)
    if scaled:
        generator = torch.Generator().manual_seed(3)
        scale_dst = torch.rand(adj.num_dst, generator=generator).to(device) + 0.5
        scale_src = torch.rand(adj.num_src, generator=generator).to(device) + 0.5
        if reduce in ("max", "min"):
            scale_src = scale_src.to(dtype)  # the maximum is that of the rounded products
    if biased:
        bias = features(1, width, dtype, "contiguous", device, seed=2)[0]
    scales = {"scale_dst": scale_dst, "scale_src": scale_src}
    out = spmm(adj, x, value, reduce, **scales, bias=bias, relu=relu, algorithm=algorithm)
    expected = reference.spmm(adj, x, value, reduce, **scales, bias=bias, relu=relu)
    assert out.dtype == dtype
    # Sums of such small structures may be almost 0, so the error is relative to the size of the terms.
    terms = reference.spmm(
        adj,
        x.abs(),
        None if value is None else value.abs(),
        "max" if reduce == "min" else reduce,
        scale_dst=scale_dst,
        scale_src=scale_src,
        bias=None if bias is None else bias.abs(),
    )
    assert (out.double() - expected).norm() <= TOLERANCE[dtype] * max(terms.norm().item(), 1e-30)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 47, 64, 100, 128])
@each_kernel(*ALGORITHMS)
def test_relative_error_on_a_random_graph(device, reduce, dtype, width, algorithm):
    adj = random_graph().adjacency(device)
    x = features(60, width, dtype, "contiguous", device)
    value = features(400, 1, dtype, "contiguous", device, seed=1)[:, 0]
    out = spmm(adj, x, value, reduce, algorithm=algorithm)
    assert relative_error(out, reference.spmm(adj, x, value, reduce)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [(60,), (60, 3, 8), (60, 2, 2, 4)])
def test_trailing_shapes(device, shape):
    adj = random_graph().adjacency(device)
    x = torch.randn(shape, device=device)
    assert relative_error(spmm(adj, x), reference.spmm(adj, x)) < 1e-6


@each_kernel(*ALGORITHMS)
def test_heavy_row_is_split_and_summed_in_float32(device, algorithm):
    num_edges = 200_000
    row = torch.zeros(num_edges, dtype=torch.int64, device=device)
    row[-3:] = torch.tensor([1, 2, 4], device=device)
    col = torch.randint(0, 1000, (num_edges,), device=device)
    adj = Adjacency.from_coo(row, col, (5, 1000))
    for dtype in (torch.float32, torch.float16):
        for width in (65, 72):
            x = torch.rand(1000, width, device=device).to(dtype)
            for reduce in ("mean", "max"):
                out = spmm(adj, x, reduce=reduce, algorithm=algorithm)
                assert relative_error(out, reference.spmm(adj, x, reduce=reduce)) < TOLERANCE[dtype]
    if device == "cuda":
        assert (adj.bsb_split if algorithm == "flashsparse" else adj.row_split).num_slots > 1
        assert adj.hybrid_rows.num_slots > 1


#: Lengths around the sizes of the kernels: products of 8 entries, matrices of 64, items of 256, batches, long
#: rows.
ROW_LENGTHS = (0, 1, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128, 255, 256, 257, 5000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_has_one_kernel_for_all_algorithms(dtype):
    """So the other tests need to run the first of them there alone."""
    adj = rows_of([7, 0, 300, 1, 64], 50, "cpu")
    x = features(50, 40, dtype, "contiguous", "cpu")
    value = features(adj.num_values, 1, dtype, "contiguous", "cpu", seed=1)[:, 0]
    vectors = polluted_vectors(adj, value)
    for weights, layout in ((None, "edges"), (value, "edges"), (vectors, "me_bcrs")):
        expected, *others = [
            spmm(adj, x, weights, value_layout=layout, algorithm=algorithm)
            for algorithm in ("auto", *ALGORITHMS)
        ]
        assert all(torch.equal(other, expected) for other in others)
    assert torch.equal(sddmm(adj, x[:5], x, algorithm="flashsparse"), sddmm(adj, x[:5], x))


@each_kernel(*ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", ROW_LENGTHS)
def test_row_lengths(device, poisoned_memory, algorithm, dtype, length):
    """Alone, where several warps share a row, and among others, where rows share a warp."""
    for lengths in ([length], [length, 3, 0, length, 1, 5]):
        adj = rows_of(lengths, 500, device)
        value = features(adj.num_values, 1, dtype, "contiguous", device, seed=1)[:, 0]
        for width in (8, 16, 32, 40, 64, 136):
            x = features(500, width, dtype, "contiguous", device)
            for weights in (None, value):
                out = spmm(adj, x, weights, algorithm=algorithm)
                expected = reference.spmm(adj, x, weights)
                assert (out[adj.in_degree() == 0] == 0).all()
                assert relative_error(out, expected) <= TOLERANCE[dtype]


@each_kernel(*ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 16, 32, 64, 200])
def test_mixed_row_lengths(device, poisoned_memory, algorithm, dtype, width):
    """Rows of all lengths side by side, few and many of them: packed rows, shared rows, long ones between."""
    for repeats, lengths in ((1, ROW_LENGTHS), (40, ROW_LENGTHS[:4]), (30, (5, 0, 2, 63, 1, 8, 9, 70, 300))):
        adj = rows_of([*lengths, 1, 4] * repeats, 700, device)
        x = features(700, width, dtype, "contiguous", device)
        scale_src = torch.rand(700, device=device) + 0.5
        out = spmm(adj, x, reduce="mean", scale_src=scale_src, algorithm=algorithm)
        expected = reference.spmm(adj, x, reduce="mean", scale_src=scale_src)
        assert relative_error(out, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 16, 32, 64])
@each_kernel("csr", "tca", "hr")
def test_entries_beyond_a_row_are_not_multiplied(device, algorithm, dtype, width):
    """Source 0 is not finite: what pads a product must not read it, and rows in one warp must not meet."""
    lengths = [7, 1, 0, 65, 9, 3, 300, 2] * 6
    adj = rows_of(lengths, 400, device)
    adj = Adjacency.from_csr(adj.rowptr, adj.col.clamp(min=1), adj.shape)
    x = features(400, width, dtype, "contiguous", device)
    expected = spmm(adj, x, algorithm=algorithm)
    for poison in (float("inf"), float("nan")):
        x[0] = poison
        assert torch.equal(spmm(adj, x, algorithm=algorithm), expected)
        col = adj.col.clone()
        col[adj.rowptr[3]] = 0
        touched = spmm(Adjacency.from_csr(adj.rowptr, col, adj.shape), x, algorithm=algorithm)
        assert not touched[3].isfinite().any()
        assert torch.equal(touched[:3], expected[:3])
        assert torch.equal(touched[4:], expected[4:])


def assert_finite_alike(out: torch.Tensor, expected: torch.Tensor) -> None:
    finite = expected.isfinite()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isfinite(), finite)
    assert relative_error(out[finite], expected[finite]) <= TOLERANCE[out.dtype]


@each_kernel("csr", "tca", "hr")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 16, 32, 64, 128, 200])
def test_infinity_stays_in_its_feature(device, algorithm, dtype, width):
    """Features that share a product with one that is not finite keep their sums."""
    adj = rows_of([70, 3, 0, 300, 12, 1, 9, 64], 40, device)
    x = features(40, width, dtype, "contiguous", device)
    value = features(adj.num_values, 1, dtype, "contiguous", device, seed=1)[:, 0]
    x[3, width // 2], x[5, 1], x[9, width - 1] = float("inf"), float("nan"), -float("inf")
    for weights in (None, value):
        assert_finite_alike(spmm(adj, x, weights, algorithm=algorithm), reference.spmm(adj, x, weights))


def few_sources(num_src: int, device: str) -> Adjacency:
    """Shapes of pruned weights: warps share rows of all lengths; rows without entries; duplicates."""
    lengths = [7, 1, 0, 65, 90, 3, 0, 0, 31, 33, num_src, 2, 64, 32]
    return rows_of(lengths * (2 * num_src // len(lengths) + 1), num_src, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_src", [1, 90, 350])
@each_shape(
    "algorithm_width",
    list(itertools.product(["csr", "tca"], [8, 32, 64, 72, 128, 256, 300])),
    on_cpu=[("csr", 72)],
)
def test_few_sources_that_many_rows_gather(device, poisoned_memory, algorithm_width, dtype, num_src):
    """A tile of x, all sources of it, fits into shared memory."""
    algorithm, width = algorithm_width
    adj = few_sources(num_src, device)
    value = features(adj.num_values, 1, dtype, "contiguous", device, seed=1)[:, 0]
    wide_value = value.to(torch.float64 if dtype == torch.float64 else torch.float32) * 1.1
    scales = {
        "scale_dst": torch.rand(adj.num_dst, device=device) + 0.5,
        "scale_src": torch.rand(num_src, device=device) + 0.5,
    }
    bias = features(1, width, dtype, "contiguous", device, seed=2)[0]
    wide = features(num_src, width + 16, dtype, "contiguous", device)
    for x, weights, options in (
        (wide[:, :width].contiguous(), None, {}),
        (wide[:, 8 : width + 8], value, {"bias": bias, "relu": True}),
        (wide[:1, :width].expand(num_src, width), wide_value, {**scales, "bias": bias}),
        (wide[:, :width], None, {"scale_src": scales["scale_src"], "reduce": "mean"}),
    ):
        out = spmm(adj, x, weights, algorithm=algorithm, **options)
        assert relative_error(out, reference.spmm(adj, x, weights, **options)) <= TOLERANCE[dtype]
        assert torch.equal(out, spmm(adj, x, weights, algorithm=algorithm, **options))
    assert device == "cpu" or policy.spmm_resident(
        facts_of(adj), adj.gpu, algorithm, torch.float32, 256, 1, aligned=True
    )


@each_kernel("csr", "tca")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [72, 256])
def test_few_sources_that_are_not_finite(device, algorithm, dtype, width):
    adj = few_sources(90, device)
    x = features(90, width, dtype, "contiguous", device)
    value = features(adj.num_values, 1, dtype, "contiguous", device, seed=1)[:, 0]
    x[3, width // 2], x[5, 1], x[9, width - 1] = float("inf"), float("nan"), -float("inf")
    assert_finite_alike(spmm(adj, x, value, algorithm=algorithm), reference.spmm(adj, x, value))


@pytest.mark.parametrize("width", [2000, pytest.param(40_000, marks=pytest.mark.gpu)])
def test_few_sources_of_many_features(device, width):
    """Many tiles, and more of them than a GPU has multiprocessors."""
    adj = few_sources(40, device)
    x = features(40, width, torch.float32, "contiguous", device)
    out = spmm(adj, x, algorithm="csr")
    assert relative_error(out, reference.spmm(adj, x)) <= TOLERANCE[torch.float32]


def test_duplicates_of_few_sources_are_summed_in_float32(device):
    """Sums of 100,000 positive terms, in one row of 20."""
    num_edges = 100_000
    row = torch.zeros(num_edges, dtype=torch.int64)
    row[:19] = torch.arange(1, 20)
    col = torch.randint(0, 10, (num_edges,), generator=torch.Generator().manual_seed(0))
    adj = Adjacency.from_coo(row.to(device), col.to(device), (20, 10))
    for dtype, algorithm in ((torch.float32, "csr"), (torch.float16, "csr"), (torch.float16, "tca")):
        x = features(10, 128, dtype, "contiguous", device).abs()
        out = spmm(adj, x, reduce="mean", algorithm=algorithm)
        assert relative_error(out, reference.spmm(adj, x, reduce="mean")) <= TOLERANCE[dtype]


@each_kernel("tca", "hr")
def test_direct_algorithms_say_once_where_csr_serves(device, reasons, algorithm):
    adj = random_graph().adjacency(device)
    x = torch.randn(60, 16, device=device)
    for _ in range(2):
        assert torch.equal(spmm(adj, x, algorithm=algorithm), spmm(adj, x, algorithm="csr"))
    assert sum("runs as algorithm='csr'" in record.message for record in reasons.records) == 1


@each_kernel(*ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16])
def test_infinity_in_a_long_row(device, algorithm, dtype, width):
    """Infinity stays infinity, one of either sign gives NaN, wherever they are in a row of many slices."""
    row, col = torch.arange(3).repeat_interleave(1500), torch.arange(1500).repeat(3)
    adj = Adjacency.from_coo(row, col % 700, (3, 700)).to(device)
    x = torch.ones(700, width, dtype=dtype, device=device)
    x[5] = float("inf")
    assert (spmm(adj, x, algorithm=algorithm) == float("inf")).all()
    x[400] = -float("inf")
    assert spmm(adj, x, algorithm=algorithm).isnan().all()


@each_kernel(*ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_infinity_go_along_edges_only(device, algorithm, dtype):
    adj = Adjacency.from_coo(torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 2]), (3, 3)).to(device)
    x = torch.tensor([[float("nan")], [1.0], [float("inf")]], dtype=dtype, device=device).expand(3, 16)
    for value in (None, torch.ones(4, device=device)):
        for reduce in ("sum", "mean", "max", "min"):
            out = spmm(adj, x.contiguous(), value, reduce, algorithm=algorithm)
            assert out[0].isnan().all(), reduce
            assert (out[1] == 1).all()
            assert (out[2] == float("inf")).all()
    vectors = polluted_vectors(adj, torch.ones(4, device=device))
    out = spmm(adj, x.contiguous(), vectors, algorithm=algorithm, value_layout="me_bcrs")
    assert out[0].isnan().all()
    assert (out[1] == 1).all()
    assert (out[2] == float("inf")).all()
    out = spmm(adj, x.contiguous(), scale_src=torch.full((3,), 2.0, device=device), algorithm=algorithm)
    assert (out[1] == 2).all()


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_matmul_precision(device, precision):
    adj = random_graph().adjacency(device)
    x = torch.randn(60, 64, device=device)
    x[7] = float("nan")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        out = spmm(adj, x, algorithm="flashsparse")
    finally:
        torch.set_float32_matmul_precision(before)
    expected = reference.spmm(adj, x)
    assert torch.equal(out.isnan(), expected.isnan())
    assert expected.isnan().any()
    finite = ~expected.isnan().any(1)
    error = relative_error(out[finite], expected[finite])
    assert error < (1e-6 if precision == "highest" or device == "cpu" else 1e-3)


@each_kernel(*ALGORITHMS)
def test_half_overflow_gives_infinity(device, algorithm):
    adj = Adjacency.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), (1, 2)).to(device)
    x = torch.full((2, 8), 60_000.0, dtype=torch.float16, device=device)
    assert (spmm(adj, x, algorithm=algorithm) == float("inf")).all()


def test_half_rounds_to_nearest_everywhere(device):
    """Every float16 value survives, subnormals included; sums of two round as torch rounds."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.float16).to(device)
    x = x[~x.isnan()]
    node = torch.arange(len(x), device=device)
    assert torch.equal(
        spmm(Adjacency.from_coo(node, node, (len(x), len(x))), x[:, None])[:, 0].abs(), x.abs()
    )
    pairs = Adjacency.from_coo(node, node.flip(0), (len(x), len(x)), self_loops="append")
    expected = (x.float() + x.float().flip(0)).half()
    actual = spmm(pairs, x[:, None])[:, 0]
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 64])
def test_calls_that_differ_from_those_before(device, poisoned_memory, dtype, width):
    # The plan of a call with blocks runs later calls of its dtype and width: with another bias, other
    # factors, other addresses of rows, values, the transpose, or another requested kernel.
    adj = ragged(4000, device)
    generator = torch.Generator().manual_seed(5)
    scale = torch.rand(adj.num_dst, generator=generator).to(device) + 0.5
    bias = features(1, width, dtype, "contiguous", device, seed=2)[0]
    value = features(adj.num_values, 1, dtype, "contiguous", device, seed=1)[:, 0]
    calls = [
        {},
        {"relu": True},
        {"bias": bias, "scale_dst": scale},
        {"scale_src": scale},
        {"scale_src": 2 * scale},
        {"scale_src": scale, "bias": features(1, width + 1, dtype, "contiguous", device, seed=3)[0, 1:]},
        {"value": value},
        {"bias": bias.double()},
        {"algorithm": "csr"},
    ]
    for structure in (adj, adj.t(), adj):
        for layout in ("contiguous", "row_stride", "misaligned"):
            x = features(structure.num_src, width, dtype, layout, device)
            for call in calls:
                out = spmm(structure, x, **{"algorithm": "flashsparse", **call})
                terms = {name: term for name, term in call.items() if name != "algorithm"}
                assert relative_error(out, reference.spmm(structure, x, **terms)) <= TOLERANCE[dtype], call
    if device == "cuda":
        assert adj.plans
        assert adj.t().plans


def test_factors_live_until_the_launch(monkeypatch):
    """The structure does not keep them during a capture; scratch memory must not be allocated over them."""
    launch = sys.modules["fastsparse_core.ops._spmm_plan"]
    adj, gathered, alive = ragged(4000, "cpu"), [], []

    def gather(scale: Tensor) -> Tensor:
        factors = scale.float()[adj.bsb.col.long()]
        gathered.append(weakref.ref(factors))
        return factors

    monkeypatch.setattr(adj, "vector_scale", gather, raising=False)
    monkeypatch.setattr(adj, "bsb_structure", lambda valued: None, raising=False)
    monkeypatch.setattr(policy, "spmm_algorithm", lambda *_, **__: policy.Choice("flashsparse"))
    compiled = SimpleNamespace(spmm_bsb=lambda *_, **__: alive.append(gathered[-1]() is not None))
    monkeypatch.setattr(launch, "_C", compiled)
    monkeypatch.setattr(launch, "current_stream", lambda index: 0)
    x = features(adj.num_src, 64, torch.float16, "contiguous", "cpu")
    for _ in range(2):  # the second call uses the cache of the first one
        spmm(adj, x, scale_src=torch.ones(adj.num_src))
    assert alive == [True, True]


def test_factors_follow_edits_in_place(monkeypatch):
    """Inference tensors have no version counter."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    adj = ragged(400, "cpu")
    for inference in (False, True):
        with torch.inference_mode(inference):
            scale = torch.rand(adj.num_src)
            for factor in (1.0, 3.0):
                scale.mul_(factor)
                assert torch.equal(adj.vector_scale(scale), scale[adj.bsb.col.long()])


@each_kernel(*ALGORITHMS)
def test_bitwise_reproducible(device, algorithm):
    edges = random_graph(50, 60, 20_000)
    adj = edges.adjacency(device)
    x = torch.randn(60, 64, device=device)
    first = spmm(adj, x, algorithm=algorithm)
    assert all(torch.equal(first, spmm(adj, x, algorithm=algorithm)) for _ in range(5))


def test_auto_converts_what_is_reused(device):
    adj = random_graph(num_edges=200).adjacency(device)
    x = torch.randn(60, 64, device=device).half()
    results = [spmm(adj, x) for _ in range(20)]
    assert adj.has_bsb == (device == "cuda")
    torch.testing.assert_close(results[0], results[-1], rtol=1e-2, atol=1e-2)
    assert ("bsb.quad" in adj.memory_usage()) == (device == "cuda")
    deterministic = random_graph(num_edges=200).adjacency(device)
    torch.use_deterministic_algorithms(True)
    try:
        results = [spmm(deterministic, x) for _ in range(20)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert not deterministic.has_bsb
    assert torch.equal(results[0], results[-1])


def test_no_memory_to_convert_leaves_csr(device, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Bsb, "from_csr", fail)
    adj = random_graph().adjacency(device).prepare()
    x = torch.randn(60, 64, device=device).half()
    assert relative_error(spmm(adj, x), reference.spmm(adj, x)) <= TOLERANCE[torch.float16]
    assert not adj.try_bsb()
    assert sum("not enough memory" in record.message for record in caplog.records) >= 1
    warned = len(caplog.records)
    assert not adj.try_bsb()
    assert len(caplog.records) == warned


def test_autocast_casts_features_as_a_matrix_product_does(device):
    adj = random_graph().adjacency(device)
    x = torch.randn(60, 16, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = spmm(adj, x, bias=torch.zeros(16, device=device))
        assert spmm(adj, x.double()).dtype == torch.float64
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "operator",
    [
        lambda adj, x: spmm(adj, x),
        lambda adj, x: spmm(adj, x, reduce="max"),
        lambda adj, x: sddmm(adj, x, x),
        lambda adj, x: ssd(adj, maxk(x, 2)),
        lambda adj, x: edge_softmax(adj, x[:, 0]),
        lambda adj, x: attention(adj, x, x, x),
        lambda adj, x: attention_weights(adj, x, x),
        lambda adj, x: additive_attention(adj, x[:, :1], x[:, :1], x),
        lambda adj, x: additive_attention_weights(adj, x[:, :1], x[:, :1]),
        lambda adj, x: gatv2_attention(adj, x, x, x[0]),
        lambda adj, x: gatv2_attention_weights(adj, x, x, x[0]),
    ],
)
def test_an_edge_list_is_no_structure(operator):
    with pytest.raises(
        TypeError, match=r"adj: expected an Adjacency, got Tensor; make one with Adjacency\.from_coo"
    ):
        operator(torch.tensor([[0, 1], [1, 0]]), torch.randn(2, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [-100, -113, -120, -124])
def test_subnormal_numbers_on_tensor_cores(exponent):
    """docs/precision_determinism.md: a feature is off by up to 2^-126, and so is a sum when it is stored."""
    adj = ragged(4000, "cuda")
    x = torch.randn(adj.num_src, 64, device="cuda").double() * 2.0**exponent
    x = x.float()
    error = (spmm(adj, x, algorithm="flashsparse").double() - reference.spmm(adj, x)).abs()
    bound = (adj.in_degree()[:, None] + 1) * 2.0**-126
    terms = reference.spmm(adj, x.abs())
    assert (error <= bound + 1e-5 * terms).all()
    assert (spmm(adj, x, algorithm="csr").double() - reference.spmm(adj, x)).norm() <= 1e-6 * terms.norm()


def test_rules_are_asked_once_until_a_structure_is_worth_converting(monkeypatch):
    """The layers of a batch share one choice. After `policy.REUSE` uses, the rule runs for every call."""
    asked = []

    def rule(facts, *_, **options):
        asked.append(facts.uses)
        return policy.Choice("csr", is_final=False, counts=True)

    monkeypatch.setattr(policy, "spmm_algorithm", rule)
    adj = Adjacency.from_coo(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), (3, 3))
    x = torch.randn(3, 4)
    expected = x[[1, 2, 0]]
    for _ in range(policy.REUSE + 2):
        torch.testing.assert_close(spmm(adj, x), expected)
    assert asked == [0, policy.REUSE, policy.REUSE + 1]
    assert adj.usage.products == policy.REUSE + 2
