"""ssd against the float64 reference, its gradients, numbers out of range, and its errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import DTYPES, TOLERANCE, each_shape, edge_lists, features, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsparse_core import CBSR, Adjacency, algorithms, gpu, maxk, policy, reference, spmm, ssd
from fastsparse_core.formats import lengths
from fastsparse_core.formats.row_split import LONG, LONGEST, shared_group_share
from fastsparse_core.ops._facts import facts_of

ALGORITHMS = ("decoupled", "densify")
#: On both sides of the limits of id types, of four features per lane, of buffers, and of tiles of wide rows.
WIDTHS = (1, 2, 5, 47, 64, 128, 255, 256, 257, 300, 1000, 1024, 1025, 2500)
LOOSE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_cbsr(rows: int, k: int, width: int, dtype: torch.dtype, device: str, seed: int = 0) -> CBSR:
    """Random columns, in another layout than maxk's where k allows it: values with a row stride."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, width, generator=generator).argsort(1)[:, :k].sort(1).values
    values = features(rows, k, dtype, "row_stride" if k % 2 else "contiguous", device, seed)
    return CBSR.from_parts(values, ids.to(device), width)


def heavy(device: str) -> Adjacency:
    """Rows of up to 2700 entries, repeated edges, empty rows."""
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (5000,), generator=generator) for n in (60, 90))
    row[:2700] = 7
    row[2700:3000] = 50
    row[row % 5 == 3] = 0
    col[3000:3100] = col[3100:3200]
    return Adjacency.from_coo(row.to(device), col.to(device), (60, 90))


@pytest.fixture(autouse=True, scope="module")
def groups_share_warps():
    """Small structures would take one launch: the kernels for groups of few entries are to be tested too."""
    with gpu.use(few_edges=0, many_sources=0):
        yield


#: The CPU has one variant.
WAYS = (
    "as stored",
    *(pytest.param(way, marks=pytest.mark.gpu) for way in ("packed", "in pieces", "packed, in pieces")),
)


@pytest.fixture(params=WAYS)
def gathered(request):
    """How CUDA gathers entries, of sources with few neighbours and with many, and how it sums long groups."""
    with gpu.use(
        gathered_often=0 if "packed" in request.param else 2**31,
        long_group_edges=0 if "in pieces" in request.param else 2**31,
        long_group_rows=0,
    ):
        yield


@pytest.fixture
def often_packed():
    with gpu.use(gathered_often=0):
        yield


def packs(adj: Adjacency, *call: Any) -> bool:
    return policy.packs_ssd_rows(facts_of(adj), adj.gpu, *call)


def expected_of(adj: Adjacency, cbsr: CBSR, *arguments: Any, **options: Any) -> Tensor:
    return reference.ssd(adj, cbsr.values, cbsr.ids, cbsr.width, *arguments, **options)


def error_in_terms(out: Tensor, adj: Adjacency, cbsr: CBSR, value: Tensor | None = None, **options) -> float:
    """Frobenius error relative to the size of the terms: of a sum that cancels, little is left."""
    magnitudes = {name: part if isinstance(part, str) else part.abs() for name, part in options.items()}
    terms = expected_of(
        adj,
        cbsr.with_values(cbsr.values.detach().abs()),
        None if value is None else value.detach().abs(),
        **magnitudes,
    )
    difference = (out.double() - expected_of(adj, cbsr, value, **options)).norm()
    return float(difference / max(terms.norm().item(), 1e-300))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(
    edges=edge_lists(),
    width=st.sampled_from(WIDTHS),
    part=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    valued=st.sampled_from(["no", "same", "wide"]),
    scaled=st.booleans(),
    biased=st.booleans(),
    reduce=st.sampled_from(["sum", "mean"]),
)
@LOOSE
def test_equals_reference(
    device, poisoned_memory, algorithm, edges, width, part, dtype, valued, scaled, biased, reduce
):
    adj = edges.adjacency(device)
    k = max(1, round(part**2 * width))
    cbsr = random_cbsr(adj.num_src, k, width, dtype, device)
    value = None
    if valued != "no":
        accumulation = torch.float64 if dtype == torch.float64 else torch.float32
        kind = dtype if valued == "same" else accumulation
        value = features(1, adj.num_values, kind, "contiguous", device, seed=1)[0]
    options: dict[str, Any] = {"reduce": reduce}
    if scaled:
        options["scale_dst"] = torch.rand(adj.num_dst, device=device)
        options["scale_src"] = torch.rand(adj.num_src, device=device)
    if biased:
        options["bias"] = features(1, width, dtype, "contiguous", device, seed=2)[0]
    out = ssd(adj, cbsr, value, algorithm=algorithm, **options)
    assert out.dtype == dtype
    assert out.shape == (adj.num_dst, width)
    assert error_in_terms(out, adj, cbsr, value, **options) <= TOLERANCE[dtype]


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("dtype", DTYPES)
@each_shape(
    "width_k",
    [
        *((64, 2), (64, 64), (512, 32), (512, 200), (1000, 17), (1024, 512), (1024, 1024), (3000, 40)),
        *((200, 28), *((256, k) for k in (1, 3, 8, 16, 20, 30, 32, 64, 128, 256))),
    ],
    on_cpu=[(64, 2), (64, 64), (1000, 17), (256, 1), (256, 32)],
)
def test_every_shape_of_the_kernel(device, dtype, width_k):
    width, k = width_k
    adj = heavy(device)
    cbsr = random_cbsr(90, k, width, dtype, device)
    value = torch.randn(5000, device=device, dtype=torch.float64).to(dtype)
    for weights in (None, value):
        out = ssd(adj, cbsr, weights, algorithm="decoupled")
        assert error_in_terms(out, adj, cbsr, weights) <= TOLERANCE[dtype]
        assert relative_error(out, expected_of(adj, cbsr, weights)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("width", [200, 255])
@pytest.mark.parametrize("offset", [1, 2])
def test_misaligned_parts(device, width, offset):
    adj = heavy(device)
    cbsr = random_cbsr(90, 8, width, torch.float16, device)
    values, ids = (
        torch.cat([part.new_zeros(offset), part.flatten()])[offset:].view(90, 8)
        for part in (cbsr.values, cbsr.ids)
    )
    shifted = CBSR(values, ids, width)
    bias = torch.zeros(width + offset, device=device, dtype=torch.float16)[offset:]
    out = ssd(adj, shifted, bias=bias, algorithm="decoupled")
    assert torch.equal(out, ssd(adj, cbsr, algorithm="decoupled"))


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("valued", [False, True])
def test_orders_of_magnitude(device, valued):
    """Every row of the result is right by itself, though rows next to it are 1e60 times as large."""
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, 40, (600,), generator=generator) for _ in range(2))
    col = col // 4 * 4 + row % 4  # rows of one size only meet sources of one size
    adj = Adjacency.from_coo(row.to(device), col.to(device), (40, 40))
    size = torch.tensor([1e-30, 1e-12, 1.0, 1e30]).repeat(10).to(device)
    cbsr = random_cbsr(40, 16, 64, torch.float32, device)
    cbsr = cbsr.with_values(cbsr.values * size[:, None])
    value = torch.rand(600, generator=generator).to(device) if valued else None
    out = ssd(adj, cbsr, value, algorithm="decoupled")
    expected = expected_of(adj, cbsr, value)
    for rows in (size == each for each in size[:4]):
        assert relative_error(out[rows].double() * 1e6, expected[rows] * 1e6) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("least", [1e-37, 1e-40, 1e-44])
def test_smallest_numbers(device, least):
    """Down to subnormal numbers: exact among themselves, and up to rounding together with ordinary ones."""
    adj = Adjacency.from_coo(
        torch.tensor([0, 0, 1, 1, 2], device=device), torch.tensor([0, 1, 0, 2, 3], device=device), (3, 4)
    )
    values = torch.tensor([[1.0, 2.0], [3.0, -1.0], [1.0, 1.0], [0.0, 0.0]], device=device)
    values[:2] *= least
    cbsr = CBSR.from_parts(values, torch.tensor([[0, 2], [1, 2], [0, 1], [0, 1]], device=device), 3)
    out = ssd(adj, cbsr, algorithm="decoupled")
    assert torch.equal(out[0], expected_of(adj, cbsr)[0].float())
    assert relative_error(out[1], expected_of(adj, cbsr)[1]) <= TOLERANCE[torch.float32]
    assert torch.equal(out[2], torch.zeros(3, device=device))


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 2000])
def test_infinities_and_nan_stay_in_their_rows(device, dtype, width):
    adj = heavy(device)
    cbsr = random_cbsr(90, 16, width, dtype, device)
    values = cbsr.values.abs() + 1
    values[3, 2] = float("inf")
    values[11, 0] = float("nan")
    values[20, 5] = float("-inf")
    cbsr = cbsr.with_values(values)
    expected = expected_of(adj, cbsr).cpu()
    out = ssd(adj, cbsr, algorithm="decoupled").cpu()
    reached = torch.zeros(adj.num_dst, 90, dtype=torch.bool)
    reached[adj.row().cpu().long(), adj.col.cpu().long()] = True
    assert torch.equal(out.isfinite().all(1), ~reached[:, [3, 11, 20]].any(1))
    for source, column, test in ((3, 2, "isposinf"), (20, 5, "isneginf")):
        others = reached[:, [each for each in (3, 11, 20) if each != source]].any(1)
        rows = reached[:, source] & ~others
        hit = out[rows][:, int(cbsr.ids[source, column])]
        assert getattr(hit, test)().all()
    fine = ~reached[:, [3, 11, 20]].any(1)
    assert relative_error(out[fine], expected[fine]) <= TOLERANCE[dtype]


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("weight", [float("inf"), float("nan"), 0.0])
@pytest.mark.parametrize("k", [32, 64])
def test_weights_that_are_not_finite(device, dtype, weight, k):
    adj = heavy(device)
    cbsr = random_cbsr(90, k, k, dtype, device)
    cbsr.values[5, :3] = float("inf")
    cbsr.values[6] = 0
    value = torch.ones(5000, device=device)
    value[::500] = weight
    out = ssd(adj, cbsr, value, algorithm="decoupled")
    expected = expected_of(adj, cbsr, value)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isposinf(), expected.isposinf())
    assert torch.equal(out.isneginf(), expected.isneginf())
    finite = expected.isfinite()
    assert relative_error(out[finite], expected[finite]) <= TOLERANCE[dtype]


# On both sides of the limit of very long rows. The CPU packs nothing.
@each_shape("rows_k", list(itertools.product([4, 60], [16, 20, 32])), on_cpu=[(60, 20)])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 1.0),
        (torch.float32, 1e35),
        (torch.float32, 1e-28),
        (torch.float32, 1e-40),
        (torch.float16, 1.0),
        (torch.float16, 1e-4),
        (torch.bfloat16, 1.0),
    ],
)
def test_packed_entries(device, often_packed, dtype, size, rows_k):
    """Numbers of every size, down to subnormal ones, some of them NaN or infinite."""
    rows, k = rows_k
    adj = heavy(device)
    adj = Adjacency.from_coo(adj.row() % rows, adj.col, (rows, 90))
    assert packs(adj, dtype, k, 256)
    cbsr = random_cbsr(90, k, 256, dtype, device)
    values = (cbsr.values.double() * size).to(dtype)
    values[::7] = 0
    cbsr = cbsr.with_values(values)
    options = {
        "scale_dst": torch.rand(rows, device=device),
        "bias": torch.zeros(256, device=device).to(dtype),
    }
    value = torch.randn(5000, device=device)
    # Products with subnormal numbers are less accurate than the entries, regardless of the summation.
    for weights, scales in ((None, {}), (value, {}), (value, options))[: 1 if size < 1e-30 else 3]:
        out = ssd(adj, cbsr, weights, algorithm="decoupled", **scales)
        expected = expected_of(adj, cbsr, weights, **scales)
        assert relative_error(out.double() / size, expected / size) <= TOLERANCE[dtype]

    values[5, 3], values[13, 1] = float("inf"), float("nan")
    out = ssd(adj, cbsr.with_values(values), algorithm="decoupled")
    with gpu.use(gathered_often=2**31):
        plain = ssd(adj, cbsr.with_values(values), algorithm="decoupled")
    assert torch.equal(out.isnan(), plain.isnan())
    assert torch.equal(out.isinf(), plain.isinf())


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_every_time(device, dtype):
    adj = heavy(device)
    cbsr = random_cbsr(90, 32, 256, dtype, device)
    value = torch.rand(5000, device=device)
    first = ssd(adj, cbsr, value, algorithm="decoupled")
    for _ in range(10):
        assert torch.equal(ssd(adj, cbsr, value, algorithm="decoupled"), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_in_every_dtype(device, dtype):
    adj = heavy(device)
    cbsr = random_cbsr(90, 16, 64, dtype, device)
    grad = features(60, 64, dtype, "contiguous", device, seed=4)
    results = []
    for wide in (False, True):
        kind = torch.float64 if wide else dtype
        values = cbsr.values.to(kind).detach().requires_grad_()
        value = torch.linspace(0.5, 1, 5000, device=device).to(kind).requires_grad_()
        bias = torch.ones(64, device=device, dtype=kind, requires_grad=True)
        call = expected_of if wide else ssd
        out = call(adj, cbsr.with_values(values), value, bias=bias)
        results.append(torch.autograd.grad(out, (values, value, bias), grad.to(out.dtype)))
    for actual, wanted in zip(*results, strict=True):
        assert actual.dtype == dtype
        assert relative_error(actual, wanted) <= TOLERANCE[dtype]


def test_maxk_and_ssd_train_together(device):
    adj = heavy(device)
    x = torch.randn(90, 64, device=device, requires_grad=True)
    out = ssd(adj, maxk(x, 8), scale_src=adj.inv_sqrt_out_degree())
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    dense = x * torch.zeros_like(x).scatter(1, x.topk(8).indices, 1)
    expected = spmm(adj, dense, scale_src=adj.inv_sqrt_out_degree())
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    assert relative_error(out, expected) < 1e-6
    assert relative_error(grad, expected_grad) < 1e-5


@pytest.mark.gpu
def test_captured_in_a_cuda_graph():
    adj = heavy("cuda").prepare()
    cbsr = random_cbsr(90, 16, 256, torch.float32, "cuda")
    expected = ssd(adj, cbsr, algorithm="decoupled")
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = ssd(adj, cbsr, algorithm="decoupled")
    out.zero_()
    captured.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def two_kinds_of_rows(many: int, few: int, rows: int) -> Adjacency:
    """Three rows of ``many`` entries and ``rows`` of ``few``."""
    generator = torch.Generator().manual_seed(0)
    row = torch.cat([torch.arange(3).repeat(many), torch.arange(3, 3 + rows).repeat(few)])
    col = torch.randint(0, 1000, row.shape, generator=generator)
    return Adjacency.from_coo(row.cuda(), col.cuda(), (3 + rows, 1000))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("many", "few", "rows", "few_entries"), [(30_000, 2, 60_000, True), (300_000, 20, 20_000, False)]
)
@pytest.mark.parametrize("captured", [False, True])
def test_kernels_that_run_side_by_side(poisoned_memory, many, few, rows, few_entries, captured):
    """What follows them waits for the one that takes long: results are read at once, poisoned before."""
    adj = two_kinds_of_rows(many, few, rows).prepare()
    groups = adj.edge_groups(lengths.edge_group_length(adj.num_edges, adj.num_dst, adj.gpu))
    num_long, others_have_few = policy.long_edge_groups(groups, adj.num_edges, 16, adj.gpu)
    assert 0 < num_long < groups.slices.size(0)
    assert others_have_few == few_entries
    cbsr = random_cbsr(1000, 16, 128, torch.float32, "cuda")
    expected = expected_of(adj, cbsr)
    if captured:
        ssd(adj, cbsr, algorithm="decoupled")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [ssd(adj, cbsr, algorithm="decoupled").double() for _ in range(5)]
        graph.replay()
    else:
        outs = [ssd(adj, cbsr, algorithm="decoupled").double() for _ in range(20)]
    for out in outs:
        assert relative_error(out, expected) <= TOLERANCE[torch.float32]
        assert relative_error(out[:3], expected[:3]) <= TOLERANCE[torch.float32]


def test_autocast(device):
    adj = heavy(device)
    cbsr = random_cbsr(90, 16, 64, torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        out = ssd(adj, cbsr)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected_of(adj, cbsr)) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("algorithm", "dtype", "k", "expected"),
    [
        ("auto", torch.float32, 64, "decoupled"),
        ("auto", torch.float32, 65, "densify"),
        ("auto", torch.float16, 32, "decoupled"),
        ("auto", torch.float16, 33, "densify"),
        ("densify", torch.float32, 8, "densify"),
        ("decoupled", torch.float16, 256, "decoupled"),
    ],
)
def test_choice(algorithm, dtype, k, expected):
    device = torch.device("cuda")
    assert policy.ssd_algorithm(algorithm, device, dtype, k, 256) == expected
    assert policy.ssd_algorithm("auto", torch.device("cpu"), dtype, k, 256) == "decoupled"


def test_algorithms_stand_in_for_auto(monkeypatch):
    adj = heavy("cpu")
    seen = []
    original = policy.ssd_algorithm

    def record(algorithm: str, *rest: Any, **options: Any) -> str:
        seen.append(algorithm)
        return original(algorithm, *rest, **options)

    monkeypatch.setattr(policy, "ssd_algorithm", record)
    cbsr = random_cbsr(90, 8, 64, torch.float32, "cpu")
    with algorithms(ssd="densify"):
        ssd(adj, cbsr)
        ssd(adj, cbsr, algorithm="decoupled")
    ssd(adj, cbsr)
    assert seen == ["densify", "decoupled", "auto"]


@pytest.mark.parametrize("length", [128, 1024])
def test_edge_groups(device, length):
    adj = heavy(device)
    groups = adj.edge_groups(length)
    words = groups.slices.view(torch.int32)
    assert groups.longest == int(words[:, 2].max()) <= length
    assert int(words[:, 2].sum()) == adj.num_edges
    degree = adj.rowptr.diff()
    several = -(-degree[degree > length] // length)
    assert groups.num_slots == int(several.sum())
    assert bool((words[: groups.num_long, 2] >= LONG).all())
    assert bool((words[groups.num_long :, 2] < LONG).all())
    assert bool((words[: groups.num_longest, 2] >= LONGEST).all())
    assert bool((words[groups.num_longest :, 2] < LONGEST).all())
    groups_in_all = int(several.sum() + ((degree > 0) & (degree <= length)).sum())
    assert shared_group_share(adj.rowptr, length) == pytest.approx(groups.num_slots / groups_in_all)
    assert shared_group_share(adj.rowptr, 10_000) == 0


@pytest.mark.parametrize(
    ("nodes", "edges", "longest"),
    [
        (232_965, 114_551_868, 1024),  # reddit
        (2_449_029, 123_601_200, 1024),  # ogbn-products
        (1_000_000, 13_460_082, 128),  # igb-small: few long rows
        (2_708, 9_999_999, 128),  # long rows, but few of them
        (0, 0, 128),
    ],
)
def test_groups_are_long_where_many_rows_are(nodes, edges, longest):
    assert lengths.edge_group_length(edges, nodes, gpu.profile_of(torch.device("cpu"))) == longest


def test_no_groups():
    assert (
        Adjacency.from_coo(torch.zeros(0).long(), torch.zeros(0).long(), (0, 3)).edge_groups(128).longest == 0
    )


def test_groups_of_few_entries_share_warps_where_most_are_short():
    few = Adjacency.from_coo(torch.arange(30), torch.arange(30), (30, 30)).edge_groups(128)
    here = gpu.profile_of(torch.device("cpu"))
    assert policy.long_edge_groups(few, 30, 8, here) == (0, True)
    row = torch.arange(30).repeat_interleave(5)
    more = Adjacency.from_coo(row, torch.arange(5).repeat(30), (30, 30)).edge_groups(128)
    assert policy.long_edge_groups(more, 150, 8, here) == (0, False)
    assert policy.long_edge_groups(more, 150, 64, here) == (30, False)
    row = torch.arange(30).repeat_interleave(40)
    most = Adjacency.from_coo(row, torch.arange(40).repeat(30), (30, 40)).edge_groups(128)
    assert policy.long_edge_groups(most, 1200, 8, here) == (30, False)


def test_entries_are_packed_where_sources_are_gathered_often():
    row, col = (torch.randint(0, 30, (30 * 8,)) for _ in range(2))
    adj = Adjacency.from_coo(row, col, (30, 30))
    for k, packed in ((8, False), (16, True), (18, False), (20, True), (32, True), (36, False), (64, False)):
        assert packs(adj, torch.float32, k, 256) == packed
    assert not packs(adj, torch.float64, 16, 256)
    assert not packs(adj, torch.float32, 16, 257)
    few = Adjacency.from_coo(row[1:], col[1:], (30, 30))
    assert not packs(few, torch.float32, 16, 256)
    with gpu.use(many_sources=31):
        assert not packs(adj, torch.float32, 16, 256)


def test_small_structures_take_one_launch():
    few = Adjacency.from_coo(torch.arange(30), torch.arange(30), (30, 30)).edge_groups(128)
    with gpu.use(few_edges=1000) as here:
        assert policy.long_edge_groups(few, 30, 8, here) == (30, False)


def test_share_of_shared_groups():
    rowptr = torch.tensor([0, 4, 4, 5, 15])  # rows of 4, 0, 1 and 10 entries
    assert shared_group_share(rowptr, 4) == pytest.approx(3 / 5)
    assert shared_group_share(rowptr, 2) == pytest.approx(7 / 8)
    assert shared_group_share(torch.tensor([0]), 4) == 0


class TestBadInput:
    adj = Adjacency.from_coo(torch.tensor([0, 2]), torch.tensor([3, 1]), (3, 4))
    cbsr = CBSR(torch.ones(4, 2), torch.tensor([[0, 1]] * 4, dtype=torch.uint8), 8)

    @pytest.mark.parametrize(
        ("cbsr", "error", "message"),
        [
            (torch.ones(4, 8), TypeError, r"cbsr: expected a CBSR, as maxk\(\) returns it, got Tensor"),
            (CBSR(torch.ones(3, 2), cbsr.ids[:3], 8), ValueError, "cbsr: expected num_src = 4 rows"),
            (CBSR(torch.ones(4, 2).int(), cbsr.ids, 8), TypeError, "cbsr: expected float64"),
            (CBSR(torch.ones(4, 2), cbsr.ids.long(), 8), TypeError, "cbsr: expected torch.uint8 ids"),
            (CBSR(torch.ones(4, 2), cbsr.ids, 300), TypeError, "cbsr: expected torch.uint16 ids"),
            (
                CBSR(torch.ones(4, 3), cbsr.ids, 8),
                ValueError,
                r"cbsr: expected values and ids of the same shape",
            ),
            (
                CBSR(torch.ones(4, 2), cbsr.ids, 1),
                ValueError,
                "cbsr: expected k from 1 to the width 1, got 2",
            ),
        ],
    )
    def test_cbsr(self, cbsr, error, message):
        with pytest.raises(error, match=message):
            ssd(self.adj, cbsr)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"value": torch.ones(3)}, ValueError, r"value: expected shape \(2,\), got \(3,\)"),
            ({"value": torch.ones(2, 1)}, ValueError, r"value: expected shape \(2,\)"),
            ({"value": torch.ones(2).int()}, TypeError, "value: expected a floating tensor"),
            ({"value": [1.0, 2.0]}, TypeError, "value: expected a floating tensor, got list"),
            ({"bias": torch.ones(7)}, ValueError, "bias: expected 8 entries"),
            ({"scale_dst": torch.ones(4)}, ValueError, r"scale_dst: expected shape \(3,\)"),
            ({"scale_src": torch.ones(3)}, ValueError, r"scale_src: expected shape \(4,\)"),
            ({"reduce": "max"}, ValueError, "reduce: expected 'sum' or 'mean', got 'max'"),
            ({"algorithm": "csr"}, ValueError, "algorithm: expected one of 'auto', 'decoupled'"),
        ],
    )
    def test_options(self, options, error, message):
        with pytest.raises(error, match=message):
            ssd(self.adj, self.cbsr, **options)

    @pytest.mark.gpu
    def test_devices(self):
        with pytest.raises(ValueError, match="cbsr: expected device cpu like the Adjacency"):
            ssd(self.adj, CBSR(self.cbsr.values.cuda(), self.cbsr.ids.cuda(), 8))
        with pytest.raises(ValueError, match="cbsr: expected ids on cpu like the values"):
            ssd(self.adj, CBSR(self.cbsr.values, self.cbsr.ids.cuda(), 8))
        with pytest.raises(ValueError, match="value: expected device cpu like cbsr"):
            ssd(self.adj, self.cbsr, torch.ones(2, device="cuda"))
        with pytest.raises(ValueError, match="bias: expected device cpu like cbsr"):
            ssd(self.adj, self.cbsr, bias=torch.ones(8, device="cuda"))
