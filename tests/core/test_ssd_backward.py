"""The backward kernels of ssd and the row panels that one of them reads, against float64 references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DTYPES, TOLERANCE, EdgeList, edge_lists, features, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsparse_core import Adjacency, gpu, policy, reference
from fastsparse_core.formats.row_panels import HEIGHT, MOST_SOURCES, PanelLayout, RowPanels
from fastsparse_core.ops import _ssd_backward as ssd_backward
from fastsparse_core.ops._facts import facts_of
from fastsparse_core.ops._ssd_backward import ssd_backward_op, ssd_value_grad_op

#: (width of a row, kept columns): one lane, lanes without work, several rounds, vectors of 4 ids and none.
SHAPES = ((1, 1), (7, 3), (47, 47), (64, 8), (64, 16), (100, 24), (256, 32), (300, 33), (300, 64), (512, 200))
ALGORITHMS = ("windows", "csr")
H200 = gpu.read(gpu.MEASURED / "nvidia_h200.json")
KERNELS = [("cpu", "csr"), *(pytest.param("cuda", each, marks=pytest.mark.gpu) for each in ALGORITHMS)]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets whether algorithms must be deterministic, which poisoned memory would set to True."""

    def use(algorithm: str) -> None:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: algorithm == "csr")

    return use


def kept_ids(rows: int, width: int, k: int, device: str, *, wide: bool = False) -> Tensor:
    """Random columns, ascending in every row; uint16 if 8 bits are too few, or if ``wide``."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(rows, width, generator=generator).argsort(1)[:, :k].sort(1).values
    return ids.to(torch.uint16 if wide or width > 256 else torch.uint8).to(device)


def weights(adj: Adjacency, dtype: torch.dtype, kind: str) -> dict[str, Tensor]:
    """Edge values, scales or both, in the accumulation dtype; values also in that of the features."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(4)

    def draw(count: int, dtype: torch.dtype) -> Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64).to(dtype).to(adj.device)

    drawn = {}
    if kind in ("value", "all"):
        drawn["value"] = draw(adj.num_values, dtype if kind == "value" else wide)
    if kind in ("scales", "all"):
        drawn["scale_src"] = draw(adj.num_src, wide)
    if kind in ("dst", "scales", "all"):
        drawn["scale_dst"] = draw(adj.num_dst, wide)
    return drawn


def backward(adj: Adjacency, grad: Tensor, ids: Tensor, **given: Tensor) -> Tensor:
    names = ("value", "scale_dst", "scale_src")
    return ssd_backward_op(grad, ids, *(given.get(name) for name in names), adj.handle, False)


def error_in_terms(out: Tensor, adj: Adjacency, grad: Tensor, ids: Tensor, **given: Tensor) -> float:
    """Frobenius error relative to the size of the terms: of a sum that cancels, little is left."""
    terms = reference.ssd_backward(adj, grad.double().abs(), ids, **given)
    difference = (out.double() - reference.ssd_backward(adj, grad, ids, **given)).norm()
    return float(difference / max(terms.norm().item(), 1e-30))


def tolerance(adj: Adjacency, grad: Tensor, k: int, algorithm: str) -> float:
    """Windows add a source's strips in float32 one after the other: equal ones are off by 2^-25 each."""
    if algorithm != "windows" or adj.num_edges == 0:
        return TOLERANCE[grad.dtype]
    most = int(torch.bincount(adj.col.long()).max())
    row_bytes = grad.size(1) * grad.dtype.itemsize
    strips = -(-most // policy.panel_layout(adj.shape, adj.num_edges, row_bytes, k, adj.gpu).strip)
    return max(TOLERANCE[grad.dtype], strips * 2.0**-25)


@pytest.mark.parametrize(("device", "algorithm"), KERNELS)
@given(
    edges=edge_lists(),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["contiguous", "row_stride", "misaligned", "transposed", "expanded"]),
    kind=st.sampled_from(["none", "value", "dst", "scales", "all"]),
    wide=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_reference(device, algorithm, poisoned_memory, use, edges, shape, dtype, layout, kind, wide):
    use(algorithm)
    adj = edges.adjacency(device)
    width, k = shape
    grad = features(adj.num_dst, width, dtype, layout, device)
    ids = kept_ids(adj.num_src, width, k, device, wide=wide)
    given = weights(adj, dtype, kind)
    out = backward(adj, grad, ids, **given)
    assert out.dtype == dtype
    assert error_in_terms(out, adj, grad, ids, **given) <= tolerance(adj, grad, ids.size(1), algorithm)


@given(
    edges=edge_lists(),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["contiguous", "row_stride", "misaligned", "transposed", "expanded"]),
    scaled=st.booleans(),
    wide=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_edge_values_equal_reference(device, poisoned_memory, edges, shape, dtype, layout, scaled, wide):
    adj = edges.adjacency(device)
    width, k = shape
    grad = features(adj.num_dst, width, dtype, layout, device)
    values = features(adj.num_src, k, dtype, "contiguous", device, seed=1)
    ids = kept_ids(adj.num_src, width, k, device, wide=wide)
    scales = weights(adj, dtype, "scales") if scaled else {}
    scale_dst, scale_src = scales.get("scale_dst"), scales.get("scale_src")
    out = ssd_value_grad_op(grad, values, ids, scale_dst, scale_src, adj.num_values, adj.handle, False)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = reference.ssd_value_grad(adj, grad, values, ids, **scales)
    terms = reference.ssd_value_grad(adj, grad.double().abs(), values.double().abs(), ids, **scales)
    error = float((out.double() - expected).norm() / max(terms.norm().item(), 1e-30))
    assert error <= TOLERANCE[out.dtype]


def many_kinds(index: torch.dtype = torch.int64) -> EdgeList:
    """Windows of one slice and of several, sources with entries in one strip, in one window and in many."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(0, 400, (20_000,), generator=generator)
    row[:6000] = 150
    col = torch.randint(0, 3000, (20_000,), generator=generator)
    col[6000:7000] = 7
    inside = torch.arange(400)
    row, col = torch.cat([row, inside]), torch.cat([col, 3000 + inside // 5])
    row[(row >= 192) & (row < 256)] = 0
    return EdgeList(row.to(index), col.to(index), (400, 3100))


@pytest.mark.parametrize(("device", "algorithm"), KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 16), (256, 32), (40, 5), (640, 64)])
def test_every_kind_of_source(device, algorithm, use, dtype, shape):
    use(algorithm)
    width, k = shape
    adj = many_kinds(torch.int32 if width == 256 else torch.int64).adjacency(device)
    grad = features(adj.num_dst, width, dtype, "contiguous", device)
    ids = kept_ids(adj.num_src, width, k, device)
    for kind in ("none", "all"):
        given = weights(adj, dtype, kind)
        out = backward(adj, grad, ids, **given)
        assert error_in_terms(out, adj, grad, ids, **given) <= TOLERANCE[dtype]
    assert any("row_panels" in name for name in adj.memory_usage()) == (algorithm == "windows")


@pytest.mark.parametrize(("device", "algorithm"), KERNELS)
def test_transpose_and_replaced_loops(device, algorithm, use):
    use(algorithm)
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, 90, (900,), generator=generator).to(device) for _ in range(2))
    adj = Adjacency.from_coo(row, col, (90, 90), self_loops="replace")
    assert adj.num_values > adj.num_edges
    grad = features(90, 64, torch.float32, "contiguous", device)
    values = features(90, 8, torch.float32, "contiguous", device, seed=1)
    ids = kept_ids(90, 64, 8, device)
    given = weights(adj, torch.float32, "all")
    out = ssd_backward_op(
        grad, ids, *(given[n] for n in ("value", "scale_dst", "scale_src")), adj.handle, True
    )
    assert error_in_terms(out, adj.t(), grad, ids, **given) <= 1e-6
    scales = {name: given[name] for name in ("scale_dst", "scale_src")}
    out = ssd_value_grad_op(grad, values, ids, *scales.values(), adj.num_values, adj.handle, True)
    assert relative_error(out, reference.ssd_value_grad(adj.t(), grad, values, ids, **scales)) <= 1e-6


def test_gradients_of_the_dense_product(device):
    """What autograd gives for the product of the dense rows, at the kept columns."""
    adj = many_kinds().adjacency(device)
    values = features(adj.num_src, 8, torch.float64, "contiguous", device).requires_grad_()
    value = torch.rand(adj.num_values, dtype=torch.float64, device=device, requires_grad=True)
    ids = kept_ids(adj.num_src, 64, 8, device)
    dense = torch.zeros(adj.num_src, 64, dtype=torch.float64, device=device).scatter(1, ids.long(), values)
    scale = torch.rand(adj.num_dst, dtype=torch.float64, device=device)
    grad = features(adj.num_dst, 64, torch.float64, "contiguous", device, seed=2)
    reference.spmm(adj, dense, value, scale_dst=scale).backward(grad)
    out = ssd_backward_op(grad, ids, value.detach(), scale, None, adj.handle, False)
    assert relative_error(out, values.grad) <= 1e-12
    out = ssd_value_grad_op(grad, values.detach(), ids, scale, None, adj.num_values, adj.handle, False)
    assert relative_error(out, value.grad) <= 1e-12


def test_deterministic_algorithms_give_the_same_bits(device, poisoned_memory):
    adj = many_kinds().adjacency(device)
    grad = features(adj.num_dst, 256, torch.float32, "contiguous", device)
    ids = kept_ids(adj.num_src, 256, 32, device)
    first = backward(adj, grad, ids)
    assert all(torch.equal(backward(adj, grad, ids), first) for _ in range(5))
    assert not any("row_panels" in name for name in adj.memory_usage())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "dtype", "algorithm"),
    [
        (256, torch.float32, "windows"),
        (256, torch.float16, "windows"),
        (256, torch.float64, "csr"),
        (4096, torch.float32, "csr"),
    ],
)
def test_choice(width, dtype, algorithm):
    adj = many_kinds().adjacency("cuda")
    assert policy.ssd_backward_algorithm(facts_of(adj), adj.gpu, dtype, width, 8) == algorithm
    grad = features(adj.num_dst, width, dtype, "contiguous", "cuda")
    ids = kept_ids(adj.num_src, width, 8, "cuda")
    assert error_in_terms(backward(adj, grad, ids), adj, grad, ids) <= TOLERANCE[dtype]
    assert any("row_panels" in name for name in adj.memory_usage()) == (algorithm == "windows")


@pytest.mark.gpu
def test_without_memory_for_the_windows(monkeypatch, caplog):
    def refuse(*arguments: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(RowPanels, "from_csr", refuse)
    adj = many_kinds().adjacency("cuda")
    grad = features(adj.num_dst, 64, torch.float32, "contiguous", "cuda")
    ids = kept_ids(adj.num_src, 64, 8, "cuda")
    for _ in range(2):
        assert error_in_terms(backward(adj, grad, ids), adj, grad, ids) <= 1e-6
    assert len([each for each in caplog.records if "not enough memory" in each.message]) == 1


@pytest.mark.parametrize(("device", "algorithm"), KERNELS)
@pytest.mark.parametrize("valued", [False, True])
def test_opcheck(device, algorithm, use, valued):
    use(algorithm)
    adj = EdgeList(torch.tensor([0, 0, 2, 1]), torch.tensor([3, 1, 1, 0]), (3, 4)).adjacency(device)
    grad, values = torch.randn(3, 16, device=device), torch.randn(4, 8, device=device)
    ids = kept_ids(4, 16, 8, device)
    given = weights(adj, torch.float32, "all") if valued else {}
    scales = given.get("scale_dst"), given.get("scale_src")
    place = (adj.handle, False)
    torch.library.opcheck(ssd_backward_op.dispatched, (grad, ids, given.get("value"), *scales, *place))
    arguments = (grad, values, ids, *scales, adj.num_values, *place)
    torch.library.opcheck(ssd_value_grad_op.dispatched, arguments)


# ---------------------------------------------------------------- row panels


LAYOUTS = st.builds(
    PanelLayout,
    height=st.sampled_from([32, HEIGHT]),
    num_blocks=st.sampled_from([1, 2, 5]),
    strip=st.sampled_from([4, 8, 64]),
    longest=st.sampled_from([64, 1024]),
)


def one_source() -> EdgeList:
    """Rows of up to three entries, all of one source."""
    row = torch.arange(300).repeat_interleave(torch.arange(300) % 4)
    return EdgeList(row, torch.zeros_like(row), (300, 1))


def blocks_without_entries() -> EdgeList:
    """Sources from 40 to 60 of 103 alone: of 5 blocks of 21 sources the first and the last two have none."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(0, 200, (1500,), generator=generator)
    return EdgeList(row, torch.randint(40, 61, (1500,), generator=generator), (200, 103))


def segments(adj: Adjacency, layout: PanelLayout) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The entries (source, row of the window) of every window and block of sources that has any, in order."""
    size = -(-adj.num_src // layout.num_blocks)
    edges = sorted(
        zip(adj.row().tolist(), adj.col.tolist(), strict=True),
        key=lambda edge: (edge[0] // layout.height, edge[1], edge[0]),
    )
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, source in edges:
        window, within = divmod(row, layout.height)
        found.setdefault((window, source // size), []).append((source, within))
    return found


def check_windows(adj: Adjacency, layout: PanelLayout) -> None:
    """Compares the conversion with lists of segments, strips and slices."""
    windows = RowPanels.from_csr(adj.row(), adj.col, adj.shape, layout)
    expected = segments(adj, layout)
    entries = [entry for segment in expected.values() for entry in segment]
    strips: dict[int, set[tuple[int, int]]] = {}
    slices, begin = [], 0
    for nth, ((window, block), segment) in enumerate(expected.items()):
        for at, (source, _) in enumerate(segment):
            strips.setdefault(source, set()).add((nth, at // layout.strip))
        for at in range(0, len(segment), layout.longest):
            slices.append((block, begin + at, min(len(segment) - at, layout.longest), window))
        begin += len(segment)
    sole = {source for source, places in strips.items() if len(places) == 1}

    words = [source * HEIGHT + within for source, within in entries]
    assert (windows.entry.long() & 0x7FFFFFFF).tolist() == words
    assert (windows.entry < 0).tolist() == [source in sole for source, _ in entries]
    assert windows.other_source.tolist() == [each for each in range(adj.num_src) if each not in sole]
    # Block by block; long slices of a block first, by powers of two.
    slices.sort(key=lambda each: (each[0], -each[2].bit_length(), each[1]))
    begins, rest = windows.slices[:, 0], windows.slices.view(torch.int32)
    found = zip(begins.tolist(), rest[:, 2].tolist(), rest[:, 3].tolist(), strict=True)
    assert list(found) == [each[1:] for each in slices]

    order = RowPanels.entry_order(adj.row(), adj.col, adj.shape, layout.height).long()
    assert torch.equal(order.sort().values, torch.arange(adj.num_edges, device=adj.device))
    row, source = adj.row().long()[order], adj.col.long()[order]
    assert (source * HEIGHT + row % layout.height).tolist() == words


@given(edges=edge_lists(), layout=LAYOUTS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tall_windows(device, edges, layout):
    check_windows(edges.adjacency(device), layout)


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize("edges", [many_kinds, one_source, blocks_without_entries])
def test_blocks_of_sources(device, edges, num_blocks):
    check_windows(edges().adjacency(device), PanelLayout(HEIGHT, num_blocks, 8, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("strip", [4, 16])
@pytest.mark.parametrize("height", [32, HEIGHT])
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize("edges", [many_kinds, one_source, blocks_without_entries])
def test_layouts(monkeypatch, poisoned_memory, edges, num_blocks, height, strip, dtype):
    layout = PanelLayout(height, num_blocks, strip, 1024)
    monkeypatch.setattr(policy, "panel_layout", lambda *statistics: layout)
    monkeypatch.setattr(policy, "ssd_backward_algorithm", lambda *call: "windows")
    adj = edges().adjacency("cuda")
    for width, k in ((256, 16), (47, 7), (640, 200)):
        grad = features(adj.num_dst, width, dtype, "contiguous", "cuda")
        ids = kept_ids(adj.num_src, width, k, "cuda")
        for kind in ("none", "dst", "all"):
            given = weights(adj, dtype, kind)
            out = backward(adj, grad, ids, **given)
            assert error_in_terms(out, adj, grad, ids, **given) <= TOLERANCE[dtype]


@pytest.mark.gpu
def test_a_capture_takes_a_layout_that_is_there(monkeypatch):
    """A capture cannot build a layout, so it uses that of a warm-up with another number of kept columns."""
    monkeypatch.setattr(policy, "ssd_backward_algorithm", lambda *call: "windows")
    monkeypatch.setattr(policy, "panel_layout", lambda *rest: PanelLayout(HEIGHT, 1 + rest[3] // 16, 8, 1024))
    adj = many_kinds().adjacency("cuda")
    grad = features(adj.num_dst, 256, torch.float32, "contiguous", "cuda")
    backward(adj, grad, kept_ids(adj.num_src, 256, 16, "cuda"))
    ids = kept_ids(adj.num_src, 256, 32, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backward(adj, grad, ids)
    graph.replay()
    assert error_in_terms(out, adj, grad, ids) <= TOLERANCE[torch.float32]
    assert len(adj.derived("row_panels", dict)) == 1
    backward(adj, grad, ids)
    assert len(adj.derived("row_panels", dict)) == 2


def test_too_little_memory_for_another_layout(monkeypatch, caplog):
    adj = many_kinds().adjacency("cpu")
    first, second = PanelLayout(HEIGHT, 1, 8, 64), PanelLayout(HEIGHT, 2, 8, 64)
    windows = ssd_backward._windows(adj, first)
    assert windows is not None
    assert ssd_backward._windows(adj, first) is windows

    def refuse(*_: object) -> RowPanels:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(RowPanels, "from_csr", refuse)
    assert all(ssd_backward._windows(adj, second) is windows for _ in range(2))
    assert len(caplog.records) == 1
    assert "uses an earlier conversion instead" in caplog.text
    other = many_kinds().adjacency("cpu")
    assert ssd_backward._windows(other, first) is None
    assert "uses csr instead" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_launches_that_overlap(dtype):
    """Calls right behind the kernels that write their gradient, in memory that the calls before have used."""
    adj = many_kinds().adjacency("cuda")
    grad = features(adj.num_dst, 256, dtype, "contiguous", "cuda")
    ids = kept_ids(adj.num_src, 256, 16, "cuda")
    backward(adj, grad, ids)
    outs = [backward(adj, grad * factor, ids).float() / factor for factor in (1, 2, 4, 8) * 10]
    assert all(error_in_terms(out, adj, grad, ids) <= TOLERANCE[dtype] for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "algorithm"), [(16, "csr"), (17, "windows")])
def test_choice_for_rows_of_few_entries(k, algorithm):
    """Rows of two entries: few of many features are read row by row, more of them from windows."""
    row = torch.arange(500).repeat(2)
    adj = Adjacency.from_coo(row, torch.cat([row[:500].flip(0), row[:500].roll(1)]), (500, 500)).to("cuda")
    assert policy.ssd_backward_algorithm(facts_of(adj), adj.gpu, torch.float32, 256, k) == algorithm
    grad = features(500, 256, torch.float32, "contiguous", "cuda")
    ids = kept_ids(500, 256, k, "cuda")
    assert error_in_terms(backward(adj, grad, ids), adj, grad, ids) <= TOLERANCE[torch.float32]


def test_strips_and_slices_fit_together():
    for num_edges in (0, 1, 10_000, 10**7, 10**9):
        for num_nodes in (0, 1, 20_000, 10**7):
            layout = policy.panel_layout((num_nodes, num_nodes), num_edges, 512, 16, H200)
            assert layout.longest % layout.strip == 0


@pytest.mark.parametrize(
    ("nodes", "edges", "row_bytes", "height", "several", "strip"),
    [
        (56_944, 1_600_000, 512, 32, False, 8),  # ppi
        (169_343, 1_170_000, 512, 64, False, 8),  # ogbn-arxiv
        (232_965, 115_000_000, 512, 64, False, 16),  # reddit
        (335_000, 1_700_000, 512, 64, False, 4),  # dd
        (19_717, 90_892, 512, 64, False, 4),  # pubmed
        (1_000_000, 13_500_000, 512, 64, True, 8),  # igb-small
        (1_000_000, 13_500_000, 1024, 64, False, 8),  # in float32
        (1_000_000, 13_500_000, 8192, 64, False, 8),  # rows so wide that they cost more than additions
        (2_449_029, 124_000_000, 1024, 64, True, 8),  # ogbn-products
    ],
)
def test_layout_at_16_kept_columns(nodes, edges, row_bytes, height, several, strip):
    layout = policy.panel_layout((nodes, nodes), edges, row_bytes, 16, H200)
    assert (layout.height, layout.num_blocks > 1, layout.strip) == (height, several, strip)


def test_too_many_sources():
    edge = torch.tensor([0]).int()
    with pytest.raises(ValueError, match="num_src: expected at most 33554431 for row panels"):
        RowPanels.from_csr(edge, edge, (1, MOST_SOURCES + 1), PanelLayout(64, 1, 8, 1024))
