"""GraphSAGE's aggregation and linear maps in one, and gradients of new structures without a transpose."""

from __future__ import annotations

from itertools import product as combinations

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, LAYOUTS, TOLERANCE, WIDTHS, edge_lists, features, relative_error
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fastsparse_core import Adjacency, choose, reference, spmm
from fastsparse_core.aggregate_linear import aggregate_linear, can_aggregate_linear, starts_with
from fastsparse_core.ops import _common
from fastsparse_core.ops._common import sum_of_rows
from fastsparse_core.ops._spmm_launch import add_transposed

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NUM_DST, NUM_SRC, FANOUT = 300, 900, 7


def block(device: str, num_dst: int = NUM_DST, num_src: int = NUM_SRC, fanout: int = FANOUT) -> Adjacency:
    """A structure as samplers give it: sorted by destination, columns of a row in any order."""
    generator = torch.Generator().manual_seed(0)
    row = torch.arange(num_dst).repeat_interleave(fanout)
    col = torch.randint(0, num_src, row.shape, generator=generator)
    return Adjacency.from_coo(row.to(device), col.to(device), (num_dst, num_src))


# ---------------------------------------------------------------- the transposed product


@given(
    edges=edge_lists(),
    width=st.sampled_from(WIDTHS),
    dtype=st.sampled_from([dtype for dtype in DTYPES if dtype != torch.float64]),
    layout=st.sampled_from(LAYOUTS),
    valued=st.sampled_from(["none", "features", "float32"]),
    scaled=st.booleans(),
    given_rows=st.sampled_from([0, 1, 7]),
    counted=st.booleans(),
)
@SETTINGS
def test_add_transposed_equals_reference(
    device, poisoned_memory, monkeypatch, edges, width, dtype, layout, valued, scaled, given_rows, counted
):
    adj = edges.adjacency(device)
    assume(adj.num_edges <= choose.MOST_PER_SUM * adj.num_src)  # longer sums lose digits one by one
    x = features(adj.num_dst, width, dtype, layout, device)
    value = scale_dst = scale_src = None
    if valued != "none":
        of = dtype if valued == "features" else torch.float32
        value = features(adj.num_values, 1, of, "contiguous", device, seed=1)[:, 0]
    if scaled:
        generator = torch.Generator().manual_seed(3)
        scale_dst = torch.rand(adj.num_dst, generator=generator).to(device) + 0.5
        scale_src = torch.rand(adj.num_src, generator=generator).to(device) + 0.5
    given_rows = min(given_rows, adj.num_src)
    total = torch.empty(adj.num_src, width, device=device)
    before = torch.randn(given_rows, width, device=device)
    total[:given_rows] = before
    # The CPU has no use for counts.
    monkeypatch.setattr(choose, "counts_sources", lambda *_: counted and device == "cuda")
    out = add_transposed(adj, x, value, scale_dst, scale_src, total, given_rows)
    is_converted = counted and device == "cuda" and dtype != torch.float32 and given_rows == 0
    assert (out is total) != is_converted
    assert out.dtype == (dtype if is_converted else torch.float32)
    swapped = {"scale_dst": scale_src, "scale_src": scale_dst}
    expected = reference.spmm(adj.t(), x, value, **swapped)
    expected[:given_rows] += before.double()
    terms = reference.spmm(adj.t(), x.abs(), None if value is None else value.abs(), **swapped)
    tolerance = TOLERANCE[out.dtype]
    assert (out.double() - expected).norm() <= tolerance * max((terms.norm() + before.norm()).item(), 1e-30)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float64])
def test_sources_of_sampled_blocks_are_counted(dtype):
    adj = block("cuda", 8000, 60_000)
    grad = features(8000, 128, dtype, "contiguous", "cuda")
    assert choose.counts_sources(adj, 128)
    assert not choose.counts_sources(adj, 8)  # too little to gain
    assert not choose.counts_sources(block("cuda", 8000, 20_000), 1024)  # several edges to a source
    x = features(60_000, 128, dtype, "contiguous", "cuda").requires_grad_()
    (got,) = torch.autograd.grad(spmm(adj, x), x, grad)
    assert not adj.has_transpose
    assert relative_error(got, reference.spmm(adj.t(), grad)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("valued", [False, True])
def test_gradient_of_a_new_structure(device, dtype, reduce, valued):
    adj = block(device)
    x = features(NUM_SRC, 48, dtype, "contiguous", device).requires_grad_()
    value = features(adj.num_values, 1, dtype, "contiguous", device, seed=1)[:, 0] if valued else None
    grad = features(NUM_DST, 48, dtype, "contiguous", device, seed=2)
    scale = adj.inv_degree(torch.float64) if reduce == "mean" else None
    expected = reference.spmm(adj.t(), grad, value, scale_src=scale)
    adj = block(device)
    for nth in range(choose.SCATTERS + 1):
        (got,) = torch.autograd.grad(spmm(adj, x, value, reduce), x, grad)
        assert got.dtype == dtype
        assert relative_error(got, expected) <= TOLERANCE[dtype]
        # float64 is for checks that ask for the same bits.
        assert adj.has_transpose == (nth == choose.SCATTERS or dtype == torch.float64)


def test_who_gets_a_transpose(device):
    x = torch.randn(NUM_SRC, 8, device=device, requires_grad=True)

    def has_transpose(adj, algorithm="auto"):
        spmm(adj, x[: adj.num_src], algorithm=algorithm).sum().backward()
        return adj.has_transpose

    assert not has_transpose(block(device))
    assert has_transpose(block(device), "csr")
    assert has_transpose(block(device, num_src=50))  # 42 entries in every sum
    assert has_transpose(block(device).prepare())
    new = block(device)
    row, col = new.row().flip(0), new.col.flip(0)
    assert has_transpose(Adjacency.from_coo(row, col, new.shape))  # is sorted anyway


def test_same_bits_with_any_number_of_threads():
    x = torch.randn(NUM_SRC, 64, requires_grad=True)
    grad = torch.randn(NUM_DST, 64)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            adj = block("cpu")
            found.append(torch.autograd.grad(spmm(adj, x), x, grad)[0])
            assert not adj.has_transpose
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_same_bits_of_every_gradient_where_pytorch_is_told_so(device):
    x = torch.randn(NUM_SRC, 64, device=device, requires_grad=True)
    bias = torch.randn(64, device=device, requires_grad=True)
    grad = torch.randn(NUM_DST, 64, device=device)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        adj = block(device)
        first, *others = (
            torch.autograd.grad(spmm(adj, x, bias=bias), [x, bias], grad) for _ in range(choose.SCATTERS + 2)
        )
    finally:
        torch.use_deterministic_algorithms(before)
    assert adj.has_transpose
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.gpu
@pytest.mark.parametrize("warm_ups", [1, 2, 3])
def test_capture_needs_no_transpose(warm_ups):
    adj = block("cuda")
    x = torch.randn(NUM_SRC, 64, device="cuda", requires_grad=True)
    grad = torch.randn(NUM_DST, 64, device="cuda")

    def gradient():
        return torch.autograd.grad(spmm(adj, x), x, grad)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            expected = gradient()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradient()
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(found, expected) <= TOLERANCE[torch.float32]


@pytest.mark.gpu
def test_slices_are_sorted_where_a_structure_is_used_on():
    generator = torch.Generator().manual_seed(0)
    length = torch.randint(0, 20, (5000,), generator=generator)
    row = torch.arange(5000).repeat_interleave(length).cuda()
    col = torch.randint(0, 5000, row.shape, generator=generator).cuda()
    adj = Adjacency.from_coo(row, col, (5000, 5000))
    x = torch.randn(5000, 64, device="cuda")
    expected = reference.spmm(adj, x)
    first = spmm(adj, x, algorithm="csr")
    assert adj.row_split.slices[:, 0].tolist() == adj.rowptr[:-1].tolist()
    for _ in range(choose.UNSORTED_USES + 1):
        assert torch.equal(spmm(adj, x, algorithm="csr"), first)
    lengths = adj.row_split.slices.view(torch.int32)[:, 2].tolist()
    kinds = [count.bit_length() for count in lengths]
    assert kinds == sorted(kinds, reverse=True)
    assert relative_error(first, expected) <= TOLERANCE[torch.float32]


# ---------------------------------------------------------------- with the linear maps


def parameters(dtype: torch.dtype, device: str, width: int = 24, out: int = 40, bias: bool = True):
    parts = [features(out, width, dtype, "contiguous", device, seed=4), None]
    if bias:
        parts[1] = features(1, out, dtype, "contiguous", device, seed=5)[0]
    parts.append(features(out, width, dtype, "contiguous", device, seed=6))
    return [None if part is None else part.requires_grad_() for part in parts]


def by_hand(adj: Adjacency, x, weight, bias, root_weight, reduce):
    aggregated = spmm(adj, x, reduce=reduce, algorithm="csr")
    out = aggregated @ weight.t() + x[: adj.num_dst] @ root_weight.t()
    return out if bias is None else out + bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("square", [True, False])
def test_results_and_gradients(device, poisoned_memory, dtype, reduce, bias, square):
    torch.use_deterministic_algorithms(False)
    adj = block(device, NUM_SRC if square else NUM_DST)
    x = features(NUM_SRC, 24, dtype, "contiguous", device).requires_grad_()
    leaves = [x, *parameters(dtype, device, bias=bias)]
    grad = features(adj.num_dst, 40, dtype, "contiguous", device, seed=7)
    exact = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    want = by_hand(block(device, adj.num_dst), *exact, reduce)
    given_leaves = [leaf for leaf in exact if leaf is not None]
    expected = [want, *torch.autograd.grad(want, given_leaves, grad.double())]
    for _ in range(choose.SCATTERS + 1):
        assert can_aggregate_linear(adj, x, x[: adj.num_dst], *leaves[1:])
        out = aggregate_linear(adj, *leaves, reduce)
        found = [out, *torch.autograd.grad(out, [leaf for leaf in leaves if leaf is not None], grad)]
        for got, exactly in zip(found, expected, strict=True):
            assert got.dtype == dtype
            assert relative_error(got, exactly) <= TOLERANCE[dtype]
    assert adj.has_transpose


@pytest.mark.parametrize("frozen", range(4))
def test_gradients_that_nobody_wants(device, frozen):
    adj = block(device)
    leaves = [torch.randn(NUM_SRC, 24, device=device).requires_grad_(), *parameters(torch.float32, device)]
    leaves[frozen] = leaves[frozen].detach()
    aggregate_linear(adj, *leaves, "mean").sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [nth == frozen for nth in range(4)]


def test_double_backward(device):
    adj = block(device, 5, 9, 3)
    x = torch.randn(9, 4, dtype=torch.float64, device=device, requires_grad=True)
    leaves = [x, *parameters(torch.float64, device, 4, 3)]

    def function(*inputs):
        return aggregate_linear(adj, *inputs, "mean")

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("tied", [False, True])
def test_double_backward_of_a_layer_that_is_applied_twice(device, tied):
    """One input's gradient must not hold what reaches it through another input."""
    adj = block(device, 9, 9, 3)
    x = torch.randn(9, 4, dtype=torch.float64, device=device, requires_grad=True)
    weight, bias, root_weight = parameters(torch.float64, device, 4, 4)
    root_weight = weight if tied else root_weight

    def gradients(layer):
        out = layer(
            adj, layer(adj, x, weight, bias, root_weight, "mean").tanh(), weight, bias, root_weight, "mean"
        )
        first = torch.autograd.grad(out.square().sum(), [x, weight, bias], create_graph=True)
        return [*first, *torch.autograd.grad(sum(it.square().sum() for it in first), [x, weight, bias])]

    for got, expected in zip(gradients(aggregate_linear), gradients(by_hand), strict=True):
        torch.testing.assert_close(got, expected)


def test_backward_under_another_autocast(device):
    adj = block(device, 9, 9, 3)
    x = torch.randn(9, 4, device=device, requires_grad=True)
    leaves = parameters(torch.float32, device, 4, 4)
    expected = torch.autograd.grad(aggregate_linear(adj, x, *leaves, "mean").sum(), [x, *leaves])
    with torch.autocast(device, torch.bfloat16):
        for _ in range(choose.SCATTERS + 1):
            with torch.autocast(device, enabled=False):
                out = aggregate_linear(adj, x, *leaves, "mean")
            for got, wanted in zip(torch.autograd.grad(out.sum(), [x, *leaves]), expected, strict=True):
                torch.testing.assert_close(got, wanted)


def test_what_no_gradient_needs_may_be_written(device):
    adj = block(device, 9, 9, 3)
    x = torch.randn(9, 4, device=device)
    leaves = parameters(torch.float32, device, 4, 4)
    out = aggregate_linear(adj, x, *leaves, "sum")
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(2)
    out.sum().backward()  # of constant features
    frozen = [leaf.detach() for leaf in leaves]
    x.requires_grad_()
    out = aggregate_linear(adj, x * 1, *frozen, "sum")
    out.sum().backward()


def test_who_starts_with_whom():
    base = torch.randn(9, 4, requires_grad=True)
    x = base * 2
    assert starts_with(x, x)
    assert starts_with(x, x[:3])
    assert starts_with(x[:5], x[:3])
    assert not starts_with(x, x[1:3])
    assert not starts_with(x[:3], x)
    assert not starts_with(x, x[:6:2])
    assert not starts_with(x, x[:3].clone())
    assert not starts_with(x, x[:3].detach())
    with torch.no_grad():
        assert not starts_with(x, x[:3])
    watched = x[:3]
    watched.retain_grad()
    assert not starts_with(x, watched)
    hooked = x[:3]
    hooked.register_hook(lambda grad: grad)
    assert not starts_with(x, hooked)


def test_what_it_does_not_serve(device):
    adj = block(device)
    x = torch.randn(NUM_SRC, 24, device=device)
    weights = parameters(torch.float32, device)

    def serves(x, *weights):
        return can_aggregate_linear(adj, x, x[:NUM_DST], *weights)

    assert serves(x, *weights)
    assert not serves(x[:, :20], *weights)
    assert not serves(x[1:], *weights)
    assert not serves(x.half(), *weights)
    assert not serves(x, *(weight.half() for weight in weights))
    assert not serves(x.int(), *(weight.int() for weight in weights))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert serves(x, *weights)
        assert serves(x.bfloat16(), *weights)
        assert serves(x, weights[0].bfloat16(), *weights[1:])
        assert not serves(x.half(), *weights)
        assert not serves(x.double(), *(weight.double() for weight in weights))
        assert not serves(x, weights[0].half(), *weights[1:])
        assert not serves(x, weights[0], weights[1].double(), weights[2])
        assert not serves(x, *weights[:2], weights[2].double())


# ---------------------------------------------------------------- under autocast

AUTOCAST = [torch.bfloat16, torch.float16]
#: Destinations of blocks whose features are cast before the sum, and after.
NUM_DST_CAST_FIRST, NUM_DST_CAST_AFTER = NUM_DST, 100


def apart(adj: Adjacency, x, weight, bias, root_weight, reduce):
    """What layers do without `aggregate_linear`."""
    return F.linear(spmm(adj, x, reduce=reduce), weight, bias) + F.linear(x[: adj.num_dst], root_weight)


def mixed(device: str, x_dtype: torch.dtype, weight_dtype: torch.dtype, bias: bool = True):
    x = features(NUM_SRC, 24, x_dtype, "contiguous", device).requires_grad_()
    return [x, *parameters(weight_dtype, device, bias=bias)]


def test_both_sides_of_the_byte_rule(device):
    sides = {NUM_DST_CAST_FIRST: True, NUM_DST_CAST_AFTER: False}
    for num_dst, first in sides.items():
        adj = block(device, num_dst)
        assert choose.casts_first(*adj.shape, adj.num_edges) == first
    assert not choose.casts_first(160_000, 721_000, 800_000)  # of a sampled batch
    assert choose.casts_first(169_000, 169_000, 2_300_000)  # a whole graph


@pytest.mark.parametrize("dtype", AUTOCAST)
@pytest.mark.parametrize("casts_x", [True, False])
@pytest.mark.parametrize("casts_weights", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_dst", [NUM_DST_CAST_FIRST, NUM_DST_CAST_AFTER])
def test_autocast(device, poisoned_memory, dtype, casts_x, casts_weights, reduce, bias, num_dst):
    torch.use_deterministic_algorithms(False)
    adj = block(device, num_dst)
    leaves = mixed(
        device, torch.float32 if casts_x else dtype, torch.float32 if casts_weights else dtype, bias
    )
    wanted = [leaf for leaf in leaves if leaf is not None]
    grad = features(num_dst, 40, dtype, "contiguous", device, seed=7)
    exact = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    want = by_hand(block(device, num_dst), *exact, reduce)
    exact = [leaf for leaf in exact if leaf is not None]
    expected = [want, *torch.autograd.grad(want, exact, grad.double())]
    with torch.autocast(device, dtype):
        generic = apart(block(device, num_dst), *leaves, reduce)
    dtypes = [it.dtype for it in (generic, *torch.autograd.grad(generic, wanted, grad))]
    for nth in range(choose.SCATTERS + 1):
        with torch.autocast(device, dtype):
            assert can_aggregate_linear(adj, leaves[0], leaves[0][:num_dst], *leaves[1:])
            out = aggregate_linear(adj, *leaves, reduce)
        with torch.autocast(device, dtype, enabled=nth > 0):
            found = [out, *torch.autograd.grad(out, wanted, grad)]
        assert [it.dtype for it in found] == dtypes
        for got, exactly in zip(found, expected, strict=True):
            assert relative_error(got, exactly) <= TOLERANCE[dtype]
        if bias and casts_weights:
            assert relative_error(found[3], expected[3]) <= TOLERANCE[torch.float32]
    assert adj.has_transpose


@pytest.mark.parametrize("under", [torch.bfloat16, None])
@pytest.mark.parametrize("needed", [it for it in combinations([True, False], repeat=4) if any(it)], ids=str)
def test_every_subset_of_gradients(device, under, needed):
    """Alone or with others, once or twice differentiable, a gradient is the same."""
    adj = block(device)
    leaves = mixed(device, torch.float32, torch.float32)

    def gradients(leaves, **options):
        with torch.autocast(device, under, enabled=under is not None):
            out = aggregate_linear(adj, *leaves, "mean")
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return torch.autograd.grad(out, wanted, torch.ones_like(out), **options)

    expected = gradients(leaves)
    some = [leaf.detach().requires_grad_(needs) for leaf, needs in zip(leaves, needed, strict=True)]
    kept = [gradient for gradient, needs in zip(expected, needed, strict=True) if needs]
    for options in ({}, {"create_graph": True}):
        for got, wanted in zip(gradients(some, **options), kept, strict=True):
            assert got.dtype == wanted.dtype
            assert relative_error(got, wanted) <= (TOLERANCE[under] if under else 1e-6)


@pytest.mark.parametrize("casts_x", [True, False])
@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("num_dst", [NUM_DST_CAST_FIRST, NUM_DST_CAST_AFTER])
def test_double_backward_under_autocast(device, casts_x, needs_x, num_dst):
    """The gradient of a gradient reaches features and weights through the casts."""
    leaves = mixed(device, torch.float32 if casts_x else torch.bfloat16, torch.float32)
    leaves[0].requires_grad_(needs_x)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]

    def second(layer):
        with torch.autocast(device, torch.bfloat16):
            out = layer(block(device, num_dst), *leaves, "mean")
        first = torch.autograd.grad(out.float().square().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(it.float().square().sum() for it in first), wanted)

    for got, expected in zip(second(aggregate_linear), second(apart), strict=True):
        assert got.dtype == expected.dtype
        assert relative_error(got, expected) <= 4 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("under", [torch.bfloat16, None])
def test_gradients_in_batches(device, under):
    adj = block(device)
    leaves = mixed(device, torch.float32, torch.float32)
    with torch.autocast(device, under, enabled=under is not None):
        out = aggregate_linear(adj, *leaves, "mean")
    grads = torch.randn(3, *out.shape, device=device).to(out.dtype)
    together = torch.autograd.grad(out, leaves, grads, retain_graph=True, is_grads_batched=True)
    for nth, grad in enumerate(grads):
        one = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        for got, wanted in zip(together, one, strict=True):
            assert relative_error(got[nth], wanted) <= (TOLERANCE[under] if under else 1e-6)


@pytest.mark.parametrize("fanout", [2, 40])
def test_constant_features_are_not_kept_as_they_came(device, fanout):
    leaves = mixed(device, torch.float32, torch.float32)
    adj = block(device, fanout=fanout)
    assert choose.casts_first(*adj.shape, adj.num_edges) == (fanout == 40)
    with torch.autocast(device, torch.bfloat16):
        out = aggregate_linear(adj, leaves[0].detach(), *leaves[1:], "sum")
    kept = [tensor for tensor in out.grad_fn.saved_tensors if tensor is not None]
    assert [(tensor.shape, tensor.dtype) for tensor in kept] == 2 * [((NUM_DST, 24), torch.bfloat16)]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept)


def test_weights_made_for_inference(device):
    x, *weights = mixed(device, torch.float32, torch.float32)
    with torch.inference_mode():
        frozen = [weight.clone() for weight in weights]
    with torch.autocast(device, torch.bfloat16):
        outs = [aggregate_linear(block(device), x, *given, "sum") for given in (weights, frozen)]
    gradients = [torch.autograd.grad(out.float().sum(), x)[0] for out in outs]
    assert torch.equal(*gradients)


def test_weights_that_were_cast_may_be_written(device):
    """As with linear layers, which keep what autocast cast; second derivatives say what they miss."""
    x, *weights = mixed(device, torch.float32, torch.float32)

    def gradient(changes: bool, **options):
        with torch.autocast(device, torch.bfloat16):
            out = aggregate_linear(block(device), x, *weights, "mean")
        if changes:
            with torch.no_grad():
                for weight in weights:
                    weight.mul_(2)
        return torch.autograd.grad(out.float().sum(), x, **options)[0]

    assert torch.equal(gradient(False), gradient(True))
    with pytest.raises(RuntimeError, match="weight: modified by an inplace operation"):
        gradient(True, create_graph=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (100, 400), (1025, 47), (200_000, 128)])
@pytest.mark.parametrize("in_parts", [False, True])
def test_sum_of_rows(monkeypatch, device, dtype, shape, in_parts):
    monkeypatch.setattr(_common, "_LARGE_SUM", 0 if in_parts else 1 << 40)
    matrix = (torch.rand(shape, device=device) / 8).to(dtype)  # sums are finite in float16
    for layout in (matrix, matrix.t().contiguous().t(), matrix[:, ::2], matrix[:1].expand(shape)):
        expected = layout.double().sum(0)
        for result in {dtype, torch.float32}:
            with torch.no_grad():
                got = sum_of_rows(layout, result)
            assert got.dtype == result
            # A result of 16 bits is rounded once. Tensor cores cut off digits where they add in float32.
            tolerance = torch.finfo(result).eps if result.itemsize == 2 else 1e-6 if dtype == result else 1e-5
            assert (got.double() - expected).norm() <= tolerance * expected.norm().clamp(min=1e-30)
