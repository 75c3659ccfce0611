"""GraphSAGE's aggregation and linear maps in one, and gradients of new structures without a transpose."""

from __future__ import annotations

import functools
from itertools import product as combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import (
    DTYPES,
    LAYOUTS,
    TOLERANCE,
    WIDTHS,
    EdgeList,
    Operations,
    edge_lists,
    features,
    relative_error,
)
from hopper import Hopper, prepare
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from padded import WIDTH, check_layer
from torch.utils.checkpoint import checkpoint

from fastsparse_core import _C, Adjacency, algorithms, gpu, policy, reference, spmm
from fastsparse_core.fused import aggregate_transform as module
from fastsparse_core.fused.aggregate_linear_launch import (
    aggregate_and_transform,
    gathers_neighbours,
    gradients_of_parameters,
    is_laid_out,
)
from fastsparse_core.fused.aggregate_transform import aggregate_linear, starts_with
from fastsparse_core.ops import _spmm_plan
from fastsparse_core.ops._facts import facts_of
from fastsparse_core.ops._operands import with_zeros_behind
from fastsparse_core.ops._spmm_plan import add_transposed
from fastsparse_core.policy import allows_tf32

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
    assume(adj.num_edges <= policy.MOST_PER_SUM * adj.num_src)  # longer sums are less accurate
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
    # The CPU kernel does not use counts.
    monkeypatch.setattr(policy, "counts_sources", lambda *_: counted and device == "cuda")
    out = add_transposed(adj, x, value, scale_dst, scale_src, total, given_rows)
    convert_if_reused = counted and device == "cuda" and dtype != torch.float32 and given_rows == 0
    assert (out is total) != convert_if_reused
    assert out.dtype == (dtype if convert_if_reused else torch.float32)
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
    assert policy.counts_sources(facts_of(adj), 128)
    assert not policy.counts_sources(facts_of(adj), 8)  # too few bytes to save
    assert not policy.counts_sources(facts_of(block("cuda", 8000, 20_000)), 1024)  # several edges to a source
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
    for nth in range(policy.SCATTERS + 1):
        (got,) = torch.autograd.grad(spmm(adj, x, value, reduce), x, grad)
        assert got.dtype == dtype
        assert relative_error(got, expected) <= TOLERANCE[dtype]
        # In float64, results must have the same bits every time, so there are no atomics.
        assert adj.has_transpose == (nth == policy.SCATTERS or dtype == torch.float64)


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
    assert has_transpose(Adjacency.from_coo(row, col, new.shape))  # unsorted edges are sorted anyway


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
            torch.autograd.grad(spmm(adj, x, bias=bias), [x, bias], grad) for _ in range(policy.SCATTERS + 2)
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
@pytest.mark.parametrize("order", ["sorted", "random"])
def test_slices_are_sorted_where_a_structure_is_used_on(order, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    length = torch.randint(0, 20, (5000,), generator=generator)
    row = torch.arange(5000).repeat_interleave(length).cuda()
    col = torch.randint(0, 5000, row.shape, generator=generator).cuda()
    if order == "random":
        row = row[torch.randperm(row.numel(), generator=generator).cuda()]
    adj = Adjacency.from_coo(row, col, (5000, 5000))
    x = torch.randn(5000, 64, device="cuda")
    expected = reference.spmm(adj, x)
    plan, made = _spmm_plan._plan, []
    monkeypatch.setattr(_spmm_plan, "_plan", lambda *args: made.append(0) or plan(*args))
    first = spmm(adj, x, algorithm="csr")
    inverse = 1 / adj.in_degree().clamp(min=1) * (adj.in_degree() > 0)
    torch.testing.assert_close(adj.inv_degree(), inverse.float())
    assert adj.row_split.slices[:, 0].tolist() == adj.rowptr[:-1].tolist()
    for _ in range(policy.UNSORTED_USES_OF_FEW + 1):
        assert torch.equal(spmm(adj, x, algorithm="csr"), first)
    assert len(made) == 2  # one for the unsorted slices, one for the sorted ones
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


@pytest.fixture(params=[False, True], ids=["sums first", "map first"])
def ordered(request):
    return functools.partial(aggregate_linear, transform_first=request.param)


def by_hand(adj: Adjacency, x, weight, bias, root_weight, reduce):
    aggregated = spmm(adj, x, reduce=reduce, algorithm="csr")
    out = aggregated @ weight.t() + x[: adj.num_dst] @ root_weight.t()
    return out if bias is None else out + bias


def results(layer, adj, leaves, grad, reduce, **options):
    """A layer's result and the gradients of what needs one."""
    out = layer(adj, *leaves, reduce, **options)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return [out, *(torch.autograd.grad(out, wanted, grad) if wanted else ())]


def exactly(adj, leaves, grad, reduce, change=torch.Tensor.double):
    """The same in float64."""
    exact = [
        None if leaf is None else change(leaf.detach().double()).requires_grad_(leaf.requires_grad)
        for leaf in leaves
    ]
    return results(by_hand, adj, exact, change(grad.double()), reduce)


def agree(found, expected, tolerance: float = TOLERANCE[torch.float32]) -> None:
    """Checks every tensor."""
    for got, want in zip(found, expected, strict=True):
        assert relative_error(got, want) <= tolerance


def dtypes_of(tensors) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("square", [True, False])
def test_results_and_gradients(device, ordered, poisoned_memory, dtype, reduce, bias, square):
    torch.use_deterministic_algorithms(False)
    adj = block(device, NUM_SRC if square else NUM_DST)
    x = features(NUM_SRC, 24, dtype, "contiguous", device).requires_grad_()
    leaves = [x, *parameters(dtype, device, bias=bias)]
    grad = features(adj.num_dst, 40, dtype, "contiguous", device, seed=7)
    expected = exactly(block(device, adj.num_dst), leaves, grad, reduce)
    for _ in range(policy.SCATTERS + 1):
        found = results(ordered, adj, leaves, grad, reduce, root=x[: adj.num_dst])
        assert dtypes_of(found) == [dtype] * len(expected)
        agree(found, expected, TOLERANCE[dtype])
    assert adj.has_transpose


@pytest.mark.parametrize("frozen", range(4))
def test_gradients_that_nobody_wants(device, ordered, frozen):
    adj = block(device)
    leaves = [torch.randn(NUM_SRC, 24, device=device).requires_grad_(), *parameters(torch.float32, device)]
    leaves[frozen] = leaves[frozen].detach()
    ordered(adj, *leaves, "mean").sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [nth == frozen for nth in range(4)]


def test_double_backward(device, ordered):
    adj = block(device, 5, 9, 3)
    x = torch.randn(9, 4, dtype=torch.float64, device=device, requires_grad=True)
    leaves = [x, *parameters(torch.float64, device, 4, 3)]

    def function(*inputs):
        return ordered(adj, *inputs, "mean")

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("tied", [False, True])
def test_double_backward_of_a_layer_that_is_applied_twice(device, ordered, tied):
    """The gradient of one input must not contain terms that reach it through another input."""
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

    torch.testing.assert_close(gradients(ordered), gradients(by_hand))


def test_backward_under_another_autocast(device):
    adj = block(device, 9, 9, 3)
    x = torch.randn(9, 4, device=device, requires_grad=True)
    leaves = parameters(torch.float32, device, 4, 4)
    expected = torch.autograd.grad(aggregate_linear(adj, x, *leaves, "mean").sum(), [x, *leaves])
    with torch.autocast(device, torch.bfloat16):
        for _ in range(policy.SCATTERS + 1):
            with torch.autocast(device, enabled=False):
                out = aggregate_linear(adj, x, *leaves, "mean")
            torch.testing.assert_close(torch.autograd.grad(out.sum(), [x, *leaves]), expected)


def test_what_is_kept_is_taken_once(device, ordered):
    """A checkpoint with use_reentrant=False unpacks each saved tensor only once."""
    adj = block(device, 9, 9, 3)
    leaves = [torch.randn(9, 4, device=device, requires_grad=True), *parameters(torch.float32, device, 4, 4)]
    found = [
        torch.autograd.grad(run(adj, *leaves, "mean").sum(), leaves)
        for run in (ordered, lambda *inputs: checkpoint(ordered, *inputs, use_reentrant=False))
    ]
    torch.testing.assert_close(*found)


def test_what_no_gradient_needs_may_be_written(device, ordered):
    adj = block(device, 9, 9, 3)
    x = torch.randn(9, 4, device=device)
    leaves = parameters(torch.float32, device, 4, 4)
    out = ordered(adj, x, *leaves, "sum")
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(2)
    out.sum().backward()  # the features are constant
    frozen = [leaf.detach() for leaf in leaves]
    x.requires_grad_()
    out = ordered(adj, x * 1, *frozen, "sum")
    out.sum().backward()


def test_features_that_were_cast_may_be_written(device, ordered):
    """The cast copy is kept, as in linear layers. Second derivatives need the unchanged features."""
    adj = block(device, 9, 9, 3)
    leaves = [torch.randn(9, 4, device=device, requires_grad=True), *parameters(torch.float32, device, 4, 4)]
    found = []
    for writes in (False, True):
        x = leaves[0] * 1
        with torch.autocast(device, torch.bfloat16):
            out = ordered(adj, x, *leaves[1:], "sum")
        if writes:
            x.zero_()
        found.append(torch.autograd.grad(out.sum(), leaves, retain_graph=True))
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="features: modified by an inplace operation"):
        torch.autograd.grad(out.sum(), leaves, create_graph=True)


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

    class Wrapped(torch.Tensor):
        pass

    def serves(x, *weights):
        return aggregate_linear(adj, x, *weights, "mean", root=x[:NUM_DST]) is not None

    assert serves(x, *weights)
    assert not serves(x[:, :20], *weights)
    assert not serves(x[1:], *weights)
    assert not serves(x.half(), *weights)
    assert not serves(x, *(weight.half() for weight in weights))
    assert not serves(x.int(), *(weight.int() for weight in weights))
    weight, bias, root_weight = (weight.detach() for weight in weights)
    assert serves(x, torch.nn.Parameter(weight), None, root_weight)
    for wrong in (weight.as_subclass(Wrapped), weight.to("meta"), weight.to_sparse()):
        assert not serves(x, wrong, bias, root_weight)
        assert not serves(x, weight, bias, wrong)
    for wrong in (bias.as_subclass(Wrapped), bias.to("meta"), bias[:1], bias[None]):
        assert not serves(x, weight, wrong, root_weight)
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
        assert policy.casts_first(*adj.shape, adj.num_edges) == first
    assert not policy.casts_first(160_000, 721_000, 800_000)  # a sampled batch
    assert policy.casts_first(169_000, 169_000, 2_300_000)  # a whole graph


@pytest.mark.parametrize("dtype", AUTOCAST)
@pytest.mark.parametrize("casts_x", [True, False])
@pytest.mark.parametrize("casts_weights", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_dst", [NUM_DST_CAST_FIRST, NUM_DST_CAST_AFTER])
def test_autocast(device, ordered, poisoned_memory, dtype, casts_x, casts_weights, reduce, bias, num_dst):
    torch.use_deterministic_algorithms(False)
    adj = block(device, num_dst)
    leaves = mixed(
        device, torch.float32 if casts_x else dtype, torch.float32 if casts_weights else dtype, bias
    )
    wanted = [leaf for leaf in leaves if leaf is not None]
    grad = features(num_dst, 40, dtype, "contiguous", device, seed=7)
    expected = exactly(block(device, num_dst), leaves, grad, reduce)
    with torch.autocast(device, dtype):
        generic = apart(block(device, num_dst), *leaves, reduce)
    dtypes = dtypes_of([generic, *torch.autograd.grad(generic, wanted, grad)])
    for nth in range(policy.SCATTERS + 1):
        with torch.autocast(device, dtype):
            out = ordered(adj, *leaves, reduce, root=leaves[0][:num_dst])
        with torch.autocast(device, dtype, enabled=nth > 0):
            found = [out, *torch.autograd.grad(out, wanted, grad)]
        assert dtypes_of(found) == dtypes
        agree(found, expected, TOLERANCE[dtype])
        if bias and casts_weights:
            assert relative_error(found[3], expected[3]) <= TOLERANCE[torch.float32]
    assert adj.has_transpose


@pytest.mark.parametrize("under", [torch.bfloat16, None])
@pytest.mark.parametrize("needed", [it for it in combinations([True, False], repeat=4) if any(it)], ids=str)
def test_every_subset_of_gradients(device, ordered, under, needed):
    """Alone or with others, once or twice differentiable, a gradient is the same."""
    adj = block(device)
    leaves = mixed(device, torch.float32, torch.float32)

    def gradients(leaves, **options):
        with torch.autocast(device, under, enabled=under is not None):
            out = ordered(adj, *leaves, "mean")
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return torch.autograd.grad(out, wanted, torch.ones_like(out), **options)

    expected = gradients(leaves)
    some = [leaf.detach().requires_grad_(needs) for leaf, needs in zip(leaves, needed, strict=True)]
    kept = [gradient for gradient, needs in zip(expected, needed, strict=True) if needs]
    for options in ({}, {"create_graph": True}):
        found = gradients(some, **options)
        assert dtypes_of(found) == dtypes_of(kept)
        agree(found, kept, TOLERANCE[under] if under else 1e-6)


@pytest.mark.parametrize("casts_x", [True, False])
@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("num_dst", [NUM_DST_CAST_FIRST, NUM_DST_CAST_AFTER])
def test_double_backward_under_autocast(device, ordered, casts_x, needs_x, num_dst):
    """The gradient of a gradient reaches features and weights through the casts."""
    leaves = mixed(device, torch.float32 if casts_x else torch.bfloat16, torch.float32)
    leaves[0].requires_grad_(needs_x)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]

    def second(layer):
        with torch.autocast(device, torch.bfloat16):
            out = layer(block(device, num_dst), *leaves, "mean")
        first = torch.autograd.grad(out.float().square().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(it.float().square().sum() for it in first), wanted)

    found, expected = second(ordered), second(apart)
    assert dtypes_of(found) == dtypes_of(expected)
    agree(found, expected, 4 * TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", AUTOCAST)
@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("num_dst", [NUM_DST_CAST_FIRST, NUM_DST_CAST_AFTER])
@pytest.mark.parametrize("root_only", [True, False])
@pytest.mark.parametrize("are_there", [True, False])
def test_zeros_behind_the_features(
    device, monkeypatch, poisoned_memory, dtype, casts, num_dst, root_only, are_there
):
    """Rows of 100 features are padded to 104 for the products; gradients have 100 columns, second ones too.

    Rows that are padded already are summed without a copy.
    """
    given = torch.float32 if casts else dtype
    weight, bias, root_weight = parameters(given, device, width=100)
    weight.requires_grad_(not root_only)
    x = features(NUM_SRC, 100, given, "contiguous", device)
    if are_there:
        x = with_zeros_behind(F.pad(x, (0, 4)), 100)
    grad = features(num_dst, 40, dtype, "contiguous", device, seed=7)
    columns, linear = [], torch.nn.functional.linear
    summed, launch_spmm = [], module.launch_spmm

    def watched_sum(adj, x, *arguments):
        summed.append(x.size(1))
        return launch_spmm(adj, x, *arguments)

    monkeypatch.setattr(module, "launch_spmm", watched_sum)

    def watched(x, *parameters):
        columns.append(x.size(1))
        return linear(x, *parameters)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    monkeypatch.setattr(policy, "columns_of_products", lambda *_args, **_options: 104)
    expected = exactly(block(device, num_dst), [x, weight, bias, root_weight], grad, "mean")
    for options in ({}, {"create_graph": True}):
        with torch.autocast(device, dtype, enabled=casts):
            out = aggregate_linear(block(device, num_dst), x, weight, bias, root_weight, "mean")
        wanted = [leaf for leaf in (weight, bias, root_weight) if leaf.requires_grad]
        found = [out, *torch.autograd.grad(out, wanted, grad, **options)]
        assert [item.shape for item in found] == [item.shape for item in expected]
        agree(found, expected, TOLERANCE[dtype])
    assert columns == [104, 104]
    assert set(summed) == {104 if are_there else 100}
    x.requires_grad_()
    with torch.autocast(device, dtype, enabled=casts):
        out = aggregate_linear(block(device, num_dst), x, weight, bias, root_weight, "mean")
    torch.autograd.grad(out, x, grad)
    assert columns[2:] == [100]


def test_when_products_get_zeros():
    h200 = gpu.profile_of(torch.device("cpu"))
    columns = functools.partial(policy.columns_of_products, gpu=h200, on_gpu=True)
    assert columns(torch.bfloat16, 154_000, 100, 256) == 104
    assert columns(torch.float16, 154_000, 47, 256) == 48
    assert columns(torch.bfloat16, 154_000, 104, 256) == 104
    assert columns(torch.float32, 154_000, 100, 256) == 100
    assert columns(torch.bfloat16, 2_708, 1_433, 16) == 1_433  # cora
    assert columns(torch.bfloat16, 154_000, 100, 256, on_gpu=False) == 100
    sizes = {name: getattr(h200, name) for name in ("name", "shared_memory", "l2_bytes", "bandwidth")}
    small = gpu.scaled(h200, sizes | {"num_sms": h200.num_sms // 12})  # fewer rows keep it busy
    assert columns(torch.bfloat16, 15_000, 100, 256) == 100
    assert columns(torch.bfloat16, 15_000, 100, 256, gpu=small) == 104


@pytest.mark.parametrize("under", [torch.bfloat16, None])
def test_gradients_in_batches(device, ordered, under):
    adj = block(device)
    leaves = mixed(device, torch.float32, torch.float32)
    with torch.autocast(device, under, enabled=under is not None):
        out = ordered(adj, *leaves, "mean")
    grads = torch.randn(3, *out.shape, device=device).to(out.dtype)
    together = torch.autograd.grad(out, leaves, grads, retain_graph=True, is_grads_batched=True)
    for nth, grad in enumerate(grads):
        one = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        agree([each[nth] for each in together], one, TOLERANCE[under] if under else 1e-6)


@pytest.mark.parametrize("fanout", [2, 40])
def test_constant_features_are_not_kept_as_they_came(device, fanout):
    leaves = mixed(device, torch.float32, torch.float32)
    adj = block(device, fanout=fanout)
    assert policy.casts_first(*adj.shape, adj.num_edges) == (fanout == 40)
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
    """The cast copy is kept, as in linear layers. Second derivatives raise an error that names the cause."""
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


# ---------------------------------------------------------------- as one kernel on Hopper's tensor cores

FORWARD, BACKWARD = "aggregate_linear", "aggregate_linear_backward"
#: Widths on both sides of the kernels' groups of 16, panels of 64 and tiles of 128.
SERVED_WIDTHS = (4, 8, 20, 64, 68, 100, 128, 132, 200, 256)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def hopper(request, monkeypatch) -> Hopper:
    """The kernels, which handle any number of rows here; on the CPU, an equally strict implementation is used
    instead."""
    return prepare(request.param, monkeypatch)


@pytest.fixture
def float32_precision():
    """`torch.set_float32_matmul_precision`, which is put back."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def drawn(layer_rows: int, width: int, out_width: int, device: str, bias: bool = True):
    x = features(layer_rows, width, torch.float32, "contiguous", device).requires_grad_()
    return [x, *parameters(torch.float32, device, width, out_width, bias=bias)]


def upstream(num_rows: int, width: int, device: str) -> torch.Tensor:
    """A gradient of a result."""
    return features(num_rows, width, torch.float32, "contiguous", device, seed=7)


def check_kernel(adj: Adjacency, leaves, reduce: str = "mean") -> None:
    """Results and gradients are as accurate as float32 is."""
    grad = upstream(adj.num_dst, leaves[1].size(0), leaves[1].device)
    agree(results(aggregate_linear, adj, leaves, grad, reduce), exactly(adj, leaves, grad, reduce))


@given(
    edges=edge_lists(),
    width=st.sampled_from(SERVED_WIDTHS),
    out_width=st.sampled_from(SERVED_WIDTHS),
    bias=st.booleans(),
    reduce=st.sampled_from(["sum", "mean"]),
    layout=st.sampled_from([*LAYOUTS, "aligned_stride"]),
    algorithm=st.sampled_from(["auto", "csr"]),
)
@SETTINGS
def test_one_kernel_equals_reference(
    hopper, poisoned_memory, edges, width, out_width, bias, reduce, layout, algorithm
):
    num_dst, num_src = edges.shape
    adj = EdgeList(edges.row, edges.col, (num_dst, max(num_dst, num_src))).adjacency(hopper.device)
    leaves = drawn(adj.num_src, width, out_width, hopper.device, bias)
    if layout == "aligned_stride":
        x = features(adj.num_src, width + 4, torch.float32, "contiguous", hopper.device)[:, :width]
    else:
        x = features(adj.num_src, width, torch.float32, layout, hopper.device)
    leaves[0] = x.requires_grad_()
    grad = upstream(num_dst, out_width, hopper.device)
    hopper.launched.clear()
    with algorithms(spmm=algorithm):
        found = results(aggregate_linear, adj, leaves, grad, reduce)
    served = num_dst > 0 and is_laid_out(x)
    assert hopper.launched == ([FORWARD, BACKWARD] if served else [])
    # Sums of few terms may cancel, so errors are relative to the sums of the terms' absolute values.
    expected, terms = (exactly(adj, leaves, grad, reduce, change) for change in (lambda it: it, torch.abs))
    for got, exact, term in zip(found, expected, terms, strict=True):
        error = (got.double() - exact).norm().item()
        assert error <= TOLERANCE[torch.float32] * max(term.norm().item(), 1e-30)


def on_a_gpu(*cases: Any) -> list[Any]:
    """Cases that differ only for the kernels, not for their replacement on the CPU."""
    return [pytest.param(case, marks=pytest.mark.gpu) for case in cases]


@pytest.mark.parametrize("num_dst", [1, 129, 1000, *on_a_gpu(15, 64, 300)])
@pytest.mark.parametrize(
    "widths",
    [
        (20, 64),
        (68, 128),
        (128, 4),
        (256, 48),
        (132, 196),
        *on_a_gpu((4, 8), (8, 4), (64, 68), (100, 100), (128, 128), (100, 256), (256, 256)),
    ],
)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_one_kernel_is_as_accurate_as_float32(
    hopper, poisoned_memory, num_dst, widths, reduce, gathers, bias
):
    width, out_width = widths
    adj = block(hopper.device, num_dst, 2 * num_dst, 5 if gathers else 14)
    assert gathers_neighbours(adj, "auto") == gathers
    check_kernel(adj, drawn(adj.num_src, width, out_width, hopper.device, bias), reduce)
    assert hopper.launched == [FORWARD, BACKWARD]


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("keeps_sums", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("num_dst", [1, 17, 200, 9000])  # the last has more stages than slabs
@pytest.mark.parametrize(("width", "out_width"), [(68, 20), (68, 256), (196, 20), (200, 132)])
def test_launches(hopper, poisoned_memory, gathers, keeps_sums, scaled, num_dst, width, out_width):
    if hopper.device == "cpu" and num_dst > 1000:
        pytest.skip("half a minute for what stands for the kernels on the CPU")
    adj = block(hopper.device, num_dst, num_dst + 50, 3)
    x, weight, bias, root_weight = (
        leaf.detach() for leaf in drawn(adj.num_src, width, out_width, hopper.device)
    )
    scale = adj.inv_degree() if scaled else None
    algorithm = "auto" if gathers else "csr"
    assert gathers_neighbours(adj, algorithm) == gathers
    out, sums = aggregate_and_transform(
        adj, x, weight, bias, root_weight, scale, algorithm, keeps_sums=keeps_sums
    )
    exact = reference.spmm(adj, x, scale_dst=None if scale is None else scale.double())
    own = x[:num_dst]
    expected = exact @ weight.double().t() + own.double() @ root_weight.double().t() + bias.double()
    assert relative_error(out, expected) <= TOLERANCE[torch.float32]
    assert (sums is not None) == keeps_sums
    if sums is None:
        return
    assert relative_error(sums, exact) <= TOLERANCE[torch.float32]
    grad = upstream(num_dst, out_width, hopper.device)
    for needs_bias in (True, False):
        of_weight, of_bias, of_root = gradients_of_parameters(grad, sums, own, needs_bias)
        agree([of_weight, of_root], [grad.double().t() @ factor.double() for factor in (sums, own)])
        assert (of_bias is not None) == needs_bias
        if needs_bias:
            agree([of_bias], [grad.double().sum(0)])


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("gathers", [True, False])
def test_one_kernel_with_few_operations(hopper, monkeypatch, needs_x, gathers):
    """Launch overhead decides the time of layers on small graphs."""
    for kernel in (FORWARD, BACKWARD):
        monkeypatch.setattr(_C, kernel, lambda **_: None)  # its replacement on the CPU runs operations
    adj = block(hopper.device, 100, 100, 3)
    adj.usage.scattered = None  # no step of a kept structure is like the first two
    leaves = drawn(100, 20, 12, hopper.device)
    leaves[0].requires_grad_(needs_x)
    grad = upstream(100, 12, hopper.device)
    with algorithms(spmm="auto" if gathers else "csr"):
        results(aggregate_linear, adj, leaves, grad, "mean")
        with Operations() as seen:
            out = aggregate_linear(adj, *leaves, "mean")
    assert seen.names == 2 * ["new_empty.default"]
    with Operations() as seen:
        torch.autograd.grad(out, leaves if needs_x else leaves[1:], grad)
    products = ["mm.default", "new_empty.default", "addmm_.default"] if needs_x else []
    assert [name for name in seen.names if "detach" not in name] == 4 * ["new_empty.default"] + products


@pytest.mark.parametrize("num_edges", [0, 3])
def test_one_kernel_with_empty_rows(hopper, poisoned_memory, num_edges):
    row, col = torch.tensor([2, 2, 90])[:num_edges], torch.tensor([5, 99, 0])[:num_edges]
    adj = Adjacency.from_coo(row.to(hopper.device), col.to(hopper.device), (100, 100))
    leaves = drawn(100, 8, 12, hopper.device)
    for reduce in ("sum", "mean"):
        check_kernel(adj, leaves, reduce)
    assert hopper.launched == 2 * [FORWARD, BACKWARD]


def test_one_kernel_is_not_for_no_rows(hopper):
    none = torch.zeros(0, dtype=torch.int64, device=hopper.device)
    for num_src in (0, 9):
        leaves = drawn(num_src, 8, 12, hopper.device)
        out = aggregate_linear(Adjacency.from_coo(none, none, (0, num_src)), *leaves, "mean")
        assert out.shape == (0, 12)
        for gradient, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
            assert gradient.shape == leaf.shape
            assert not gradient.any()
    assert hopper.launched == []


def misaligned(like: torch.Tensor) -> torch.Tensor:
    """The same numbers where no 16 bytes begin."""
    return torch.cat([like.new_zeros(1), like.flatten()])[1:].view(like.shape)


@pytest.mark.parametrize("which", ["x", "weight", "root_weight", "bias", "grad"])
@pytest.mark.parametrize("layout", ["misaligned", "transposed", "odd_stride", "aligned_stride", "expanded"])
def test_one_kernel_and_layouts(hopper, which, layout):
    """What the kernels cannot read is copied or left to PyTorch."""
    adj = block(hopper.device)
    given = dict(
        zip(("x", "weight", "bias", "root_weight"), drawn(NUM_SRC, 64, 64, hopper.device), strict=True)
    )
    given["grad"] = upstream(NUM_DST, 64, hopper.device)
    plain = given[which].detach()
    if layout == "misaligned":
        other = misaligned(plain)
    elif layout == "transposed" and plain.dim() > 1:
        other = plain.t().contiguous().t()
    elif layout == "expanded":
        other = plain[:1].expand(plain.shape)
    else:
        gap = 4 if layout == "aligned_stride" else 3
        other = torch.stack([plain] * gap, -1)[..., 0] if plain.dim() == 1 else F.pad(plain, (0, gap))[:, :64]
    given[which] = other.requires_grad_(which != "grad")
    leaves = [given[name] for name in ("x", "weight", "bias", "root_weight")]
    rest = (leaves, given["grad"], "mean")
    agree(results(aggregate_linear, adj, *rest), exactly(adj, *rest))
    reads_x = which == "x" and layout in ("aligned_stride", "expanded")
    assert (FORWARD in hopper.launched) == (reads_x or which in ("bias", "grad"))
    assert (BACKWARD in hopper.launched) == (reads_x or which != "x")


@pytest.mark.parametrize("needed", list(combinations([True, False], repeat=4)), ids=str)
def test_one_kernel_and_every_subset_of_gradients(hopper, needed):
    leaves = [
        leaf.detach().requires_grad_(needs)
        for leaf, needs in zip(drawn(NUM_SRC, 20, 68, hopper.device), needed, strict=True)
    ]
    check_kernel(block(hopper.device), leaves)
    assert hopper.launched == [FORWARD] + [BACKWARD] * (needed[1] and needed[3])


@pytest.mark.parametrize("gathers", [True, False])
def test_one_kernel_and_fewer_digits(hopper, float32_precision, gathers):
    adj = block(hopper.device, fanout=5 if gathers else 14)
    leaves = drawn(NUM_SRC, 128, 128, hopper.device)
    grad = upstream(NUM_DST, 128, hopper.device)
    expected = exactly(adj, leaves, grad, "mean")
    errors = []
    for precision in ("highest", "high"):
        float32_precision(precision)
        found = results(
            aggregate_linear, adj, [leaf.detach().requires_grad_() for leaf in leaves], grad, "mean"
        )
        errors.append(max(map(relative_error, (found[0], *found[2:]), (expected[0], *expected[2:]))))
    assert errors[0] <= TOLERANCE[torch.float32] < errors[1] < 1e-4


def test_who_may_have_fewer_digits(float32_precision):
    for precision in ("high", "medium", "highest"):
        float32_precision(precision)
        assert allows_tf32() == (precision != "highest")
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this PyTorch has one way to say it")
    try:
        for precision in ("tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            assert allows_tf32() == (precision == "tf32")
    finally:
        float32_precision("highest")
    assert not allows_tf32()


@pytest.mark.parametrize("gathers", [True, False])
def test_one_kernel_where_all_errors_have_one_sign(hopper, gathers):
    """Tensor cores truncate sums, so all errors of sums of positive numbers have the same sign."""
    num_dst = 5000
    adj = block(hopper.device, num_dst, 2 * num_dst, 5 if gathers else 14)
    leaves = [leaf.detach().abs().requires_grad_() for leaf in drawn(2 * num_dst, 128, 128, hopper.device)]
    grad = upstream(num_dst, 128, hopper.device).abs()
    found = results(aggregate_linear, adj, leaves, grad, "sum")
    assert hopper.launched == [FORWARD, BACKWARD]
    agree(found, exactly(adj, leaves, grad, "sum"))


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_one_kernel_and_what_is_not_finite(hopper, gathers, strange):
    adj = block(hopper.device, fanout=5 if gathers else 14)
    x, weight, bias, root_weight = (leaf.detach() for leaf in drawn(NUM_SRC, 20, 68, hopper.device))
    source = 7
    x[source, 3] = strange
    out = aggregate_linear(adj, x, weight, bias, root_weight, "mean")
    users = adj.row()[adj.col == source]
    assert len(users) > 0
    reached = torch.zeros(NUM_DST, dtype=torch.bool, device=hopper.device)
    reached[users] = reached[source] = True
    # The second term is infinity minus infinity, which is NaN.
    assert out[reached].isnan().all()
    x[source] = 0
    finite = aggregate_linear(adj, x, weight, bias, root_weight, "mean")
    assert torch.equal(out[~reached], finite[~reached])
    grad = torch.ones(NUM_DST, 68, device=hopper.device)
    leaves = [leaf.requires_grad_() for leaf in (weight, bias, root_weight)]
    grad[9, 5] = strange
    gradients = torch.autograd.grad(aggregate_linear(adj, x, *leaves, "mean"), leaves, grad)
    for gradient in gradients:
        assert (~gradient[5].isfinite()).all()
        gradient[5] = 0
        assert gradient.isfinite().all()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e15])
def test_one_kernel_and_very_small_and_large_numbers(hopper, scale):
    adj = block(hopper.device)
    leaves = drawn(NUM_SRC, 64, 64, hopper.device, bias=False)
    leaves[0] = (leaves[0].detach() * scale).requires_grad_()
    grad = upstream(NUM_DST, 64, hopper.device)
    found = results(aggregate_linear, adj, leaves, grad, "mean")
    expected = exactly(adj, leaves, grad, "mean")
    agree([each.double() / scale for each in found], [each / scale for each in expected])


def test_one_kernel_and_double_backward(hopper):
    adj = block(hopper.device)
    leaves = drawn(NUM_SRC, 20, 12, hopper.device)

    def second(layer, leaves):
        first = torch.autograd.grad(layer(adj, *leaves, "mean").square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(it.square().sum() for it in first), leaves)

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    agree(second(aggregate_linear, leaves), second(by_hand, exact), 4 * TOLERANCE[torch.float32])
    # Other operators computed the first gradients; the kernel's own pass computed the last ones.
    assert hopper.launched == [FORWARD, BACKWARD]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("gathers", [True, False])
def test_one_kernel_gives_the_same_bits_twice(hopper, deterministic, gathers):
    leaves = drawn(2000, 100, 68, hopper.device)
    grad = upstream(1000, 68, hopper.device)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        adj = block(hopper.device, 1000, 2000, 5 if gathers else 14)
        first, *others = (results(aggregate_linear, adj, leaves, grad, "mean") for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(before)
    assert hopper.launched == 4 * [FORWARD, BACKWARD]
    for other in others:
        for place, (got, expected) in enumerate(zip(other, first, strict=True)):
            # Gradients of x use atomics, and from the third one on the transpose.
            assert torch.equal(got, expected) or (place == 1 and not deterministic)


def test_one_kernel_gives_gradients_that_may_be_written(hopper):
    """The gradients of both weights share an array, but writing to one must not change the other."""
    adj = block(hopper.device)
    leaves = drawn(NUM_SRC, 20, 12, hopper.device)
    gradients = torch.autograd.grad(aggregate_linear(adj, *leaves, "mean").sum(), leaves)
    kept = [gradient.clone() for gradient in gradients]
    gradients[1].mul_(leaves[1])  # recorded by autograd
    assert torch.equal(gradients[3], kept[3])
    for _ in range(2):
        aggregate_linear(adj, *leaves, "mean").sum().backward()
    for leaf, gradient in zip(leaves[1:], kept[1:], strict=True):
        assert torch.equal(leaf.grad, 2 * gradient)
    weight = leaves[1]
    tied = torch.autograd.grad(
        aggregate_linear(adj, leaves[0], weight, leaves[2], weight, "mean").sum(), weight
    )
    exact = leaves[1].detach().double().requires_grad_()
    own = [leaf.detach().double() for leaf in (leaves[0], leaves[2])]
    (expected,) = torch.autograd.grad(by_hand(adj, own[0], exact, own[1], exact, "mean").sum(), exact)
    assert relative_error(tied[0], expected) <= TOLERANCE[torch.float32]


def test_one_kernel_is_not_for_autocast_nor_other_dtypes(hopper):
    adj = block(hopper.device)
    leaves = drawn(NUM_SRC, 20, 12, hopper.device)
    with torch.autocast(hopper.device, torch.bfloat16):
        aggregate_linear(adj, *leaves, "mean").float().sum().backward()
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        other = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        aggregate_linear(adj, *other, "mean").sum().backward()
    assert hopper.launched == []
    with torch.autocast(hopper.device, torch.bfloat16), torch.autocast(hopper.device, enabled=False):
        out = aggregate_linear(adj, *leaves, "mean")
    with torch.autocast(hopper.device, torch.bfloat16):
        out.sum().backward()
    assert hopper.launched == [FORWARD, BACKWARD]


def test_one_kernel_asks_for_no_work_list(hopper):
    """A work list is made after some products. Products of this kernel are not counted."""
    adj = block(hopper.device)
    x, *weights = (leaf.detach() for leaf in drawn(NUM_SRC, 20, 12, hopper.device))
    uses = adj.usage.csr
    for _ in range(3):
        aggregate_linear(adj, x, *weights, "mean")
    assert hopper.launched == 3 * [FORWARD]
    assert adj.usage.csr == uses


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_one_kernel_writes_no_sums_that_nobody_wants(hopper, monkeypatch, context):
    written = []

    def launch(**arguments):
        written.append(arguments["sums"] is not None)
        forward(**arguments)

    forward = _C.aggregate_linear
    monkeypatch.setattr(_C, "aggregate_linear", launch)
    adj = block(hopper.device)
    x, *weights = drawn(NUM_SRC, 20, 12, hopper.device)
    aggregate_linear(adj, x, *weights, "mean")
    with context():
        aggregate_linear(adj, x, *weights, "mean")
    assert written == [True, False]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_one_kernel_on_padded_structures(hopper, reduce):
    """Rows behind those of the batch are empty, and so are their gradients."""
    layer = torch.nn.Module()
    for name, parameter in zip(
        ("weight", "bias", "root_weight"), parameters(torch.float32, hopper.device, WIDTH, 12), strict=True
    ):
        layer.register_parameter(name, torch.nn.Parameter(parameter.detach()))

    def call(adj, x):
        assert gathers_neighbours(adj, "auto")
        return aggregate_linear(adj, x, layer.weight, layer.bias, layer.root_weight, reduce)

    check_layer(layer, call, hopper.device)
    assert hopper.launched == 2 * [FORWARD, BACKWARD]


@pytest.mark.gpu
@pytest.mark.parametrize("which", [1, 2, 3])
def test_one_kernel_leaves_other_devices_to_pytorch(monkeypatch, which):
    """An address on the host would end the process's use of the GPU."""
    hopper = prepare("cuda", monkeypatch)
    leaves = [leaf.detach() for leaf in drawn(NUM_SRC, 20, 12, "cuda")]
    leaves[which] = leaves[which].cpu()
    assert aggregate_linear(block("cuda"), *leaves, "mean") is None
    assert hopper.launched == []


@pytest.mark.parametrize(
    ("archs", "capability", "has"),
    [
        ("90", (9, 0), True),
        ("80;90", (9, 0), True),
        ("80;90+PTX", (9, 0), True),
        ("90+PTX", (9, 0), True),
        ("80", (9, 0), False),
        ("80+PTX", (9, 0), False),
        ("", (9, 0), False),
        ("80;90", (8, 0), False),
        ("80;90", (8, 9), False),
        ("90+PTX", (10, 0), False),  # it runs the PTX, which has no Hopper-only instructions
        ("100;120", (12, 0), False),
    ],
)
def test_who_has_products_of_warpgroups(monkeypatch, archs, capability, has):
    monkeypatch.setattr(_C, "build_info", lambda: {"cuda": bool(archs), "cuda_archs": archs})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert gpu.has_wgmma.__wrapped__(torch.device("cuda", 0)) == has


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"dtype": torch.float16}, False),
        ({"dtype": torch.float64}, False),
        ({"num_rows": 4095}, False),
        ({"num_rows": 4096}, True),
        ({"width": 4, "out_width": 128}, True),
        ({"width": 100}, True),
        ({"width": 102}, False),
        ({"out_width": 47}, False),
        ({"width": 256, "out_width": 256}, True),
        ({"width": 260}, False),
        ({"out_width": 260}, False),
        ({"width": 0}, False),
        ({"out_width": 0}, False),
    ],
    ids=str,
)
def test_when_both_linear_maps_are_one_kernel(change, served):
    call = {
        "gpu": gpu.profile_of(torch.device("cpu")),
        "dtype": torch.float32,
        "num_rows": 160_000,
        "width": 128,
        "out_width": 128,
    }
    assert policy.transforms_on_tensor_cores(**(call | change)) == served


def test_when_that_kernel_gathers():
    def structure(fanout: int, more_in_one_row: int = 0) -> Adjacency:
        row = torch.cat([torch.arange(100).repeat_interleave(fanout), torch.full((more_in_one_row,), 3)])
        return Adjacency.from_coo(row, torch.randint(100, row.shape), (100, 100))

    assert gathers_neighbours(structure(0), "auto")
    assert gathers_neighbours(structure(8), "auto")
    assert not gathers_neighbours(structure(9), "auto")
    assert not gathers_neighbours(structure(2, more_in_one_row=500), "auto")
    for algorithm in ("csr", "flashsparse", "tca", "hr"):
        assert not gathers_neighbours(structure(2), algorithm)
