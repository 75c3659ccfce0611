"""Attention operators against float64 references: results, gradients, dropout, extremes, errors, memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from cases import DTYPES, TOLERANCE, EdgeList, edge_lists, features, ragged, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastsparse_core import (
    Adjacency,
    additive_attention,
    additive_attention_weights,
    attention,
    attention_weights,
    gatv2_attention,
    gatv2_attention_weights,
    policy,
    reference,
    spmm,
)
from fastsparse_core.formats.bsb import HEIGHT, MOST_COLUMNS
from fastsparse_core.ops import (
    _additive_attention_csr,
    _attention_bsb,
    _gatv2_attention_csr,
    _kept_results,
)
from fastsparse_core.ops._common import check_heads

ALGORITHMS = ("fused3s", "unfused")
KINDS = ("dot_product", "additive", "gatv2")
#: On both sides of every vector and lane boundary, and the widths that models use.
HEAD_WIDTHS = (1, 3, 8, 16, 20, 32, 40, 47, 64, 130)


@dataclass
class Problem:
    """Arguments of one of the operators, in the order of its gradients."""

    kind: str
    tensors: list[Tensor]  # the differentiable ones; the last is the bias where there is one
    biased: bool = False
    slope: float = 0.2

    def run(self, adj: Adjacency, tensors=None, dropout_p: float = 0.0, **options) -> Tensor:
        return self._call(attention, additive_attention, gatv2_attention, adj, tensors, dropout_p, **options)

    def expected(self, adj: Adjacency, tensors=None, dropout_p: float = 0.0, seed: int = 0) -> Tensor:
        functions = (reference.attention, reference.additive_attention, reference.gatv2_attention)
        return self._call(*functions, adj, tensors, dropout_p, seed=seed)

    def _call(self, dot, additive, gatv2, adj, tensors, dropout_p, **options) -> Tensor:
        tensors = list(self.tensors if tensors is None else tensors)
        bias = tensors.pop() if self.biased else None
        if self.kind == "dot_product":
            return dot(adj, *tensors, None, bias, dropout_p, **options)
        if self.kind == "additive":
            return additive(adj, *tensors, self.slope, bias, dropout_p, **options)
        return gatv2(adj, *tensors, self.slope, dropout_p, **options)

    def terms(self, adj: Adjacency) -> float:
        """Size of what is summed: results that cancel are compared with it."""
        weights = self.weights(adj)
        v = self.tensors[1] if self.kind == "gatv2" else self.tensors[2]
        return reference.spmm(adj, v.abs(), weights).norm().item()

    def weights(self, adj: Adjacency) -> Tensor:
        tensors = [tensor.double() for tensor in self.tensors]
        bias = tensors.pop() if self.biased else None
        if self.kind == "dot_product":
            return attention_weights(adj, *tensors[:2], bias=bias)
        if self.kind == "additive":
            return additive_attention_weights(adj, *tensors[:2], self.slope, bias=bias)
        return gatv2_attention_weights(adj, *tensors, self.slope)

    def doubled(self) -> list[Tensor]:
        return [tensor.detach().double().requires_grad_() for tensor in self.tensors]


def problem(
    kind: str,
    adj: Adjacency,
    heads: int = 2,
    width: int = 16,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    biased: bool = False,
    layout: str = "contiguous",
    spread: float = 1.0,
    requires_grad: bool = False,
) -> Problem:
    """Random arguments whose scores are of the size `spread`."""
    device = str(adj.device)
    precise = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(rows: int, columns: int, seed: int, factor: float = 1.0) -> Tensor:
        matrix = features(rows, heads * columns, dtype, layout, device, seed)
        return (matrix if factor == 1 else matrix * factor).unflatten(1, (heads, columns))

    def scores(rows: int, seed: int) -> Tensor:
        return features(rows, heads, precise, "contiguous", device, seed) * spread

    value_width = width if value_width is None else value_width
    if kind == "dot_product":
        tensors = [
            draw(adj.num_dst, width, 1, spread),
            draw(adj.num_src, width, 2),
            draw(adj.num_src, value_width, 3),
        ]
    elif kind == "additive":
        tensors = [scores(adj.num_dst, 1), scores(adj.num_src, 2), draw(adj.num_src, value_width, 3)]
    else:
        att = features(heads, width, precise, "contiguous", device, 3) * spread * width**-0.5
        tensors = [draw(adj.num_dst, width, 1), draw(adj.num_src, width, 2), att]
    biased = biased and kind != "gatv2"
    if biased:
        tensors.append(features(adj.num_values, heads, precise, "contiguous", device, 4))
    if requires_grad:
        tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    return Problem(kind, tensors, biased)


def random_graph(num_dst: int = 40, num_src: int = 60, num_edges: int = 600) -> EdgeList:
    """Duplicates, a row without edges and one with half of them."""
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (num_edges,), generator=generator) for n in (num_dst, num_src))
    row[: num_edges // 2] = 3 % num_dst
    row[row == 4] = 0
    return EdgeList(row, col, (num_dst, num_src))


def with_loops(device: str) -> Adjacency:
    """Loops replace some of the caller's edges: more values than entries."""
    edges = random_graph(5, 6, 30)
    return Adjacency.from_coo(edges.row.to(device), edges.col.to(device), edges.shape, self_loops="replace")


def next_seed(manual_seed: int) -> int:
    """The seed that an operator draws after torch.manual_seed(manual_seed)."""
    torch.manual_seed(manual_seed)
    seed = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(manual_seed)
    return seed


# ---------------------------------------------------------------- results


@given(
    edges=edge_lists(),
    kind=st.sampled_from(KINDS),
    heads=st.sampled_from([1, 2, 3, 8]),
    width=st.sampled_from(HEAD_WIDTHS),
    value_width=st.sampled_from(HEAD_WIDTHS),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["contiguous", "row_stride", "misaligned", "transposed"]),
    biased=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.3]),
    algorithm=st.sampled_from(ALGORITHMS),
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_reference(
    device,
    poisoned_memory,
    edges,
    kind,
    heads,
    width,
    value_width,
    dtype,
    layout,
    biased,
    dropout_p,
    algorithm,
):
    adj = edges.adjacency(device)
    case = problem(kind, adj, heads, width, value_width, dtype, biased=biased, layout=layout)
    seed = next_seed(1)
    out = case.run(adj, dropout_p=dropout_p, algorithm=algorithm)
    expected = case.expected(adj, dropout_p=dropout_p, seed=seed)
    assert out.dtype == dtype
    assert out.shape == expected.shape
    allowed = TOLERANCE[dtype] / (1 - dropout_p) * max(case.terms(adj), 1e-30)
    assert (out.double() - expected).norm() <= allowed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(1, 64), (4, 32), (8, 8), (1, 40), (2, 128)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_relative_error_on_a_random_graph(device, kind, dtype, heads, width, algorithm):
    adj = random_graph().adjacency(device)
    case = problem(kind, adj, heads, width, None, dtype, biased=True)
    out = case.run(adj, algorithm=algorithm)
    assert relative_error(out, case.expected(adj)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_dimensions_are_one_head(device, kind, algorithm):
    adj = random_graph().adjacency(device)
    case = problem(kind, adj, 1, 24)
    flat = [tensor.squeeze(1) for tensor in case.tensors[:2]] + [case.tensors[2].squeeze(1)]
    if kind == "gatv2":
        flat[2] = case.tensors[2].squeeze(0)
    out = case.run(adj, flat, algorithm=algorithm)
    assert torch.equal(out, case.run(adj, algorithm=algorithm).squeeze(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_dimensions_hold_heads_side_by_side(device, kind, algorithm):
    """As columns of a wider tensor too, with gradients."""
    adj = random_graph().adjacency(device)
    case = problem(kind, adj, 3, 16, requires_grad=True)
    expected = case.run(adj, algorithm=algorithm)
    expected_gradients = torch.autograd.grad(expected.square().sum(), case.tensors)
    features = [tensor.dim() == 3 for tensor in case.tensors]
    wide = [
        torch.cat([tensor.flatten(1), torch.full_like(tensor.flatten(1), torch.nan)], 1) if wide else tensor
        for tensor, wide in zip(case.tensors, features, strict=True)
    ]
    flat = [tensor[:, :48] if wide else tensor for tensor, wide in zip(wide, features, strict=True)]
    out = case.run(adj, flat, algorithm=algorithm, **({"heads": 3} if kind == "dot_product" else {}))
    assert out.shape == (adj.num_dst, 48)
    assert relative_error(out, expected.flatten(1)) < TOLERANCE[torch.float32]
    gradients = torch.autograd.grad(out.square().sum(), case.tensors)
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_without_edges_give_zero(device, poisoned_memory, kind, algorithm):
    adj = Adjacency.from_coo(torch.tensor([1, 1]), torch.tensor([0, 2]), (10, 3)).to(device)
    case = problem(kind, adj, requires_grad=True)
    out = case.run(adj, algorithm=algorithm)
    assert (out[[0, *range(2, 10)]] == 0).all()
    for grad in torch.autograd.grad(out.sum(), case.tensors):
        assert grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_neighbour_gives_its_value(device, kind, algorithm):
    """Whatever the score, the weight is 1 and its gradient 0."""
    adj = Adjacency.from_coo(torch.arange(50), torch.arange(50).flip(0), (50, 50)).to(device)
    case = problem(kind, adj, spread=1000.0, requires_grad=True)
    out = case.run(adj, algorithm=algorithm)
    v = case.tensors[1] if kind == "gatv2" else case.tensors[2]
    assert relative_error(out, v.flip(0)) < 1e-6
    grads = torch.autograd.grad(out, case.tensors, torch.randn_like(out))
    # What remains is the rounding of one weight, times scores a thousand times larger than usual.
    assert grads[0].norm() < 1e-3 * out.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hub_row(device, kind, dtype, algorithm):
    num_edges = 100_000
    row = torch.zeros(num_edges, dtype=torch.int64, device=device)
    row[-3:] = torch.tensor([1, 2, 4], device=device)
    generator = torch.Generator().manual_seed(0)
    col = torch.randint(0, 1000, (num_edges,), generator=generator).to(device)
    adj = Adjacency.from_coo(row, col, (5, 1000))
    case = problem(kind, adj, 2, 32, None, dtype, requires_grad=True)
    case.tensors[1 if kind == "gatv2" else 2].data.abs_()  # else the result is what is left of the rounding
    out = case.run(adj, algorithm=algorithm)
    expected = case.expected(adj, case.doubled())
    assert relative_error(out, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scores_of_ten_thousand_are_stable(device, kind, dtype):
    """No worse than twice the unfused computation in the same dtype, results and gradients."""
    adj = random_graph().adjacency(device)
    spread = 1e4
    weight = features(40, 64, dtype, "contiguous", device, 7).unflatten(1, (2, 32))

    def exact(spread: float) -> list[Tensor]:
        case = problem(kind, adj, 2, 32, None, dtype, spread=spread)
        doubled = case.doubled()
        out = case.expected(adj, doubled)
        return [out, *torch.autograd.grad(out, doubled, weight.double())]

    wanted = exact(spread)
    # Where one weight is 1 and the others 0, gradients vanish: their errors are measured against gradients of
    # ordinary scores, which grow with the factor that the other operand carries.
    growth = {"dot_product": (1, 1, spread, 1), "additive": (1, 1, 1, 1), "gatv2": (1, spread, spread, 1)}[
        kind
    ]
    size = [factor * usual.norm() for factor, usual in zip(growth, exact(1.0), strict=True)]
    case = problem(kind, adj, 2, 32, None, dtype, spread=spread, requires_grad=True)
    error = {}
    for algorithm in ALGORITHMS:
        out = case.run(adj, algorithm=algorithm)
        results = [out, *torch.autograd.grad(out, case.tensors, weight)]
        assert all(result.isfinite().all() for result in results)
        error[algorithm] = [(a.double() - b).norm() for a, b in zip(results, wanted, strict=True)]
    for fused, unfused, usual in zip(error["fused3s"], error["unfused"], size, strict=True):
        assert fused <= 2 * unfused + TOLERANCE[dtype] * usual


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(1, 64), (4, 32), (4, 16), (1, 256)])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_nan_and_infinity_travel_along_edges_only(request, device, kind, dtype, heads, width, number):
    """Results and gradients are finite exactly where the unfused operators' are."""
    if device == "cuda" and kind == "dot_product" and dtype == torch.float32 and number == float("inf"):
        reason = "scores of float32 are sums of products of TF32 terms: those of an infinity differ in sign"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    adj = random_graph(40, 60, 300).adjacency(device)
    weight = features(40, heads * width, dtype, "contiguous", device, 7).unflatten(1, (heads, width))
    operands = {"dot_product": 3, "additive": 3, "gatv2": 2}[kind]
    for operand in range(operands + 1):  # the last: the gradient of the result
        case = problem(kind, adj, heads, width, None, dtype, requires_grad=True)
        changed = case.tensors[operand] if operand < operands else weight.clone()
        with torch.no_grad():
            changed[11, 0].view(-1)[-1] = number
            changed[30] = number
        found = []
        for algorithm in ALGORITHMS:
            out = case.run(adj, algorithm=algorithm)
            grads = torch.autograd.grad(out, case.tensors, changed if operand == operands else weight)
            found.append([result.isfinite() for result in (out, *grads)])
        assert not all(result.all() for result in found[1])
        if operand == operands or kind != "gatv2":
            assert any(result.any() for result in found[1])
        for fused, unfused in zip(*found, strict=True):
            assert torch.equal(fused, unfused)


@pytest.mark.parametrize("kind", ["dot_product", "additive"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bias_of_minus_infinity_masks_edges(device, kind, algorithm):
    edges = random_graph()
    adj = edges.adjacency(device)
    masked = torch.rand(600, generator=torch.Generator().manual_seed(1)) < 0.4
    masked[edges.row == 0] = True
    fewer = EdgeList(edges.row[~masked], edges.col[~masked], edges.shape).adjacency(device)
    case = problem(kind, adj, biased=True, requires_grad=True)
    with torch.no_grad():
        case.tensors[-1][masked.to(device)] = -torch.inf
    out = case.run(adj, algorithm=algorithm)
    kept = [*case.tensors[:-1], case.tensors[-1][~masked.to(device)]]
    assert relative_error(out, case.run(fewer, kept, algorithm="unfused")) < 1e-6
    assert (out[0] == 0).all()
    if algorithm == "fused3s":
        for grad in torch.autograd.grad(out.square().sum(), case.tensors):
            assert grad.isfinite().all()


@pytest.mark.parametrize("kind", ["dot_product", "additive"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_bias_for_all_heads(device, kind, algorithm):
    adj = random_graph().adjacency(device)
    case = problem(kind, adj, heads=3, biased=True, requires_grad=True)
    shared = torch.randn(600, device=device, requires_grad=True)
    out = case.run(adj, [*case.tensors[:-1], shared], algorithm=algorithm)
    expected = case.run(adj, [*case.tensors[:-1], shared[:, None].expand(600, 3)], algorithm=algorithm)
    assert torch.equal(out, expected)
    grads = [torch.autograd.grad(result.square().sum(), shared)[0] for result in (out, expected)]
    assert grads[0].shape == (600,)
    assert relative_error(grads[0], grads[1]) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_weights(device, kind):
    adj = random_graph().adjacency(device)
    case = problem(kind, adj, 3, 8)
    tensors = case.tensors
    if kind == "dot_product":
        weights = attention_weights(adj, *tensors[:2])
    elif kind == "additive":
        weights = additive_attention_weights(adj, *tensors[:2])
    else:
        weights = gatv2_attention_weights(adj, *tensors)
    assert weights.shape == (600, 3)
    sums = spmm(adj, torch.ones(60, 3, device=device), weights)
    assert torch.allclose(sums, (adj.in_degree() > 0).float()[:, None].expand(40, 3), atol=1e-5)
    v = tensors[1] if kind == "gatv2" else tensors[2]
    assert relative_error(spmm(adj, v.flatten(1), weights), case.run(adj).flatten(1)) < 1e-6


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_gradients(device, kind, algorithm, biased, dropout_p):
    adj = with_loops(device)
    case = problem(kind, adj, 2, 3, 4, torch.float64, biased=biased, requires_grad=True)

    def function(*tensors):
        torch.manual_seed(5)  # the same mask for every evaluation
        return case.run(adj, tensors, dropout_p, algorithm=algorithm)

    assert torch.autograd.gradcheck(function, case.tensors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(1, 64), (4, 32), (8, 8), (1, 40), (3, 47), (1, 128)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_in_lower_precision(device, kind, dtype, heads, width, dropout_p, algorithm):
    adj = random_graph().adjacency(device)
    case = problem(kind, adj, heads, width, None, dtype, biased=True, requires_grad=True)
    weight = features(40, heads * width, dtype, "contiguous", device, 7).unflatten(1, (heads, width))
    seed = next_seed(2)
    out = case.run(adj, dropout_p=dropout_p, algorithm=algorithm)
    grads = torch.autograd.grad(out, case.tensors, weight)
    doubled = case.doubled()
    expected = case.expected(adj, doubled, dropout_p, seed)
    wanted = torch.autograd.grad(expected, doubled, weight.double())
    for tensor, grad, want in zip(case.tensors, grads, wanted, strict=True):
        assert grad.dtype == tensor.dtype
        assert relative_error(grad, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("first", [1.0, float("nan")])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(5, 16), (3, 32), (1, 64), (1, 256)])
def test_blocks_that_are_cut(device, poisoned_memory, stored_in_quads, heads, width, dtype, extras, first):
    """What a last block lacks reads node 0, which has no edges: whatever it holds, nothing of it shows."""
    adj = ragged(4000, device)
    case = problem("dot_product", adj, heads, width, None, dtype, biased=extras, requires_grad=True)
    weight = features(adj.num_dst, heads * width, dtype, "contiguous", device, 7).unflatten(1, (heads, width))
    doubled, dropout_p, seed = case.doubled(), 0.3 if extras else 0.0, next_seed(2)
    expected = case.expected(adj, doubled, dropout_p, seed)
    wanted = torch.autograd.grad(expected, doubled, weight.double())
    with torch.no_grad():
        for each in (weight, *case.tensors[:3]):
            each[0] = first
    torch.manual_seed(2)
    out = case.run(adj, dropout_p=dropout_p, algorithm="fused3s")
    assert adj.has_bsb == (device == "cuda")
    grads = torch.autograd.grad(out, case.tensors, weight)
    assert adj.t().has_bsb == (device == "cuda")
    bound = TOLERANCE[dtype] / (1 - dropout_p)
    for actual, exact in zip((out, *grads), (expected, *wanted), strict=True):
        assert relative_error(actual, exact) <= bound


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(device, kind, algorithm):
    adj = with_loops(device)
    case = problem(kind, adj, 1, 2, 2, torch.float64, biased=True, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda *tensors: case.run(adj, tensors, algorithm=algorithm), case.tensors
    )


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_see_the_dropout_of_the_forward_pass(device, kind):
    adj = with_loops(device)
    found = []
    for algorithm in ALGORITHMS:
        case = problem(kind, adj, 2, 8, biased=True, requires_grad=True)
        torch.manual_seed(1)
        out = case.run(adj, algorithm=algorithm, dropout_p=0.4)
        first = torch.autograd.grad(out.square().sum(), case.tensors, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), case.tensors)
        found.append((*first, *second))
    for fused, unfused in zip(*found, strict=True):
        assert relative_error(fused, unfused) <= 1e-4


@pytest.mark.parametrize("same", ["k and v", "all"])
def test_second_derivatives_of_one_tensor_given_twice(device, same):
    adj = random_graph(20, 20, 90).adjacency(device)
    q, k = (torch.randn(20, 2, 4, device=device, requires_grad=True) for _ in range(2))
    found = []
    for algorithm in ALGORITHMS:
        out = attention(adj, k if same == "all" else q, k, k, algorithm=algorithm)
        (first,) = torch.autograd.grad(out.square().sum(), k, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), k)))
    for fused, unfused in zip(*found, strict=True):
        assert relative_error(fused, unfused) <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_under_autocast_are_not_rounded(device, kind):
    """The forward pass, without autocast, has decided every dtype, as for the first derivatives."""
    adj = with_loops(device)
    case = problem(kind, adj, 2, 8, biased=True, requires_grad=True)
    found = []
    for enabled in (False, True):
        loss = case.run(adj, algorithm="fused3s").square().sum()
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            first = torch.autograd.grad(loss, case.tensors, create_graph=True)
            found.append((*first, *torch.autograd.grad(sum(each.sum() for each in first), case.tensors)))
    for plain, under_autocast in zip(*found, strict=True):
        assert torch.equal(plain, under_autocast)


@pytest.mark.parametrize("kept", ["by autograd", "by hooks", "by a checkpoint"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_result_that_is_written_to(device, kind, kept):
    """As by ``torch.relu_(conv(x, graph))``, through a view too, once and in the middle of a model."""
    adj = with_loops(device)
    found = []
    for in_place in (False, True):
        case = problem(kind, adj, 2, 8, requires_grad=True)

        def run(*tensors, case=case, in_place=in_place):
            out = case.run(adj, tensors, algorithm="fused3s")
            if not in_place:
                return (2 * out).relu().square()
            out.flatten().mul_(2)
            return out.relu_().square()

        if kept == "by hooks":
            with torch.autograd.graph.save_on_cpu():
                out = run(*case.tensors)
        elif kept == "by a checkpoint":
            out = checkpoint(run, *case.tensors, use_reentrant=False)
        else:
            out = run(*case.tensors)
        found.append(torch.autograd.grad(out.sum(), case.tensors))
    for plain, written in zip(*found, strict=True):
        assert torch.equal(plain, written)


def test_what_is_kept_of_a_result():
    """No memory of its own, and whether it was written to since."""
    ctx, out = SimpleNamespace(), torch.randn(30, 4)
    kept = _kept_results.alias_of(ctx, out)
    assert kept.data_ptr() == out.data_ptr()
    assert ctx.written[0].untyped_storage().nbytes() == 0
    assert not _kept_results.was_written(ctx)
    out.flatten()[0] = 1
    assert _kept_results.was_written(ctx)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_size_of_the_edges_is_kept(device, kind):
    edges = random_graph(40, 60, 50_000)
    adj = edges.adjacency(device)
    case = problem(kind, adj, 1, 16, requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        case.run(adj, algorithm="fused3s")
    assert sizes
    assert max(sizes) <= 60 * 16


@pytest.mark.parametrize("kind", KINDS)
def test_bitwise_reproducible(device, kind):
    adj = random_graph(50, 60, 20_000).adjacency(device)
    case = problem(kind, adj, 4, 16, biased=True, requires_grad=True)
    results = []
    for _ in range(3):
        out = case.run(adj, algorithm="fused3s")
        results.append([out, *torch.autograd.grad(out.square().sum(), case.tensors)])
    for again in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_result_outlives_the_structure(device, kind):
    adj = random_graph().adjacency(device)
    case = problem(kind, adj, requires_grad=True)
    out = case.run(adj, algorithm="fused3s")
    expected = torch.autograd.grad(case.run(adj, algorithm="unfused").sum(), case.tensors)
    del adj
    for grad, want in zip(torch.autograd.grad(out.sum(), case.tensors), expected, strict=True):
        assert (grad - want).norm() <= 1e-5 * (1 + want.norm())


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dropout_follows_the_seed(device, kind, algorithm):
    adj = random_graph().adjacency(device)
    case = problem(kind, adj, requires_grad=True)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = case.run(adj, dropout_p=0.5, algorithm=algorithm)
        results.append([out, *torch.autograd.grad(out.square().sum(), case.tensors)])
    assert all(torch.equal(*pair) for pair in zip(results[0], results[1], strict=True))
    assert not torch.equal(results[0][0], results[2][0])


def test_dropout_mask_is_unbiased(device):
    row, col = torch.ones(200, 100, device=device).nonzero(as_tuple=True)
    adj = Adjacency.from_coo(row, col, (200, 100))  # without duplicates, which share a mask
    for p in (0.1, 0.6, 0.99):
        keep = reference.dropout_keep(adj, 8, p, 123 + (456 << 32)).double()
        deviation = (p * (1 - p) / keep.numel()) ** 0.5
        assert abs(keep.mean().item() - (1 - p)) < 4 * deviation
        # Heads are independent of each other.
        both = (keep[:, 0] * keep[:, 1]).mean().item()
        assert abs(both - (1 - p) ** 2) < 4 * (1 / len(keep)) ** 0.5


def test_dropout_generator_is_philox():
    """The known answer of Random123 for a counter and a key of zeros: 6627e8d5."""
    adj = Adjacency.from_coo(torch.tensor([0]), torch.tensor([0]), (1, 1))
    below, above = 0x6627E8D5 / 2**32, 0x6627E8D6 / 2**32
    assert reference.dropout_keep(adj, 1, below, 0).item()
    assert not reference.dropout_keep(adj, 1, above, 0).item()


# ---------------------------------------------------------------- PyTorch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
def test_opcheck(device, kind, biased):
    adj = random_graph().adjacency(device)
    case = problem(kind, adj, 2, 8, dtype=torch.float32, biased=biased, requires_grad=True)
    tensors = [tensor.detach() for tensor in case.tensors]
    bias = tensors.pop() if case.biased else None
    seed = torch.tensor(3)
    if kind == "gatv2":
        name, flat = "gatv2_attention", [tensors[0].flatten(1), tensors[1].flatten(1), tensors[2]]
        options: tuple[object, ...] = (0.2, 0.3, seed, adj.handle)
    elif kind == "additive":
        name, flat = "additive_attention", [*tensors[:2], tensors[2].flatten(1), bias]
        options = (0.2, 0.3, seed, adj.handle)
    else:
        name, flat = "attention", [*(tensor.flatten(1) for tensor in tensors), bias]
        options = (0.3, 0.3, seed, 2, adj.handle)
    if device == "cuda" and kind == "dot_product":
        adj.prepare()
    operator = getattr(torch.ops.fastsparse, name).default
    leaves = [tensor if tensor is None else tensor.clone().requires_grad_() for tensor in flat]
    torch.library.opcheck(operator, (*leaves, *options))
    out, lse = operator(*flat, *options)
    backward = getattr(torch.ops.fastsparse, f"{name}_backward").default
    result = () if kind == "additive" else (out,)
    arguments = (torch.randn_like(out), *flat, *result, lse, *options)
    torch.library.opcheck(backward, arguments if kind == "gatv2" else (*arguments, biased))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_compiles_without_graph_breaks(device, kind, algorithm):
    adj = random_graph().adjacency(device).prepare()
    case = problem(kind, adj, 2, 16, biased=True, requires_grad=True)

    def model(adj, *tensors):
        return case.run(adj, [tensor * 1.5 for tensor in tensors], 0.3, algorithm=algorithm).tanh()

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        out = compiled(adj, *case.tensors)
        torch.manual_seed(seed)
        expected = model(adj, *case.tensors)
        assert relative_error(out, expected) < 1e-6
        for actual, wanted in zip(
            torch.autograd.grad(out.square().sum(), case.tensors),
            torch.autograd.grad(expected.square().sum(), case.tensors),
            strict=True,
        ):
            assert relative_error(actual, wanted) < 1e-5
        results.append(out)
    assert not torch.equal(*results)  # a new mask each call


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(device, kind):
    adj = random_graph().adjacency(device)
    case = problem(kind, adj, biased=True, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = case.run(adj)
    assert out.dtype == torch.bfloat16
    for grad in torch.autograd.grad(out.float().sum(), case.tensors):
        assert grad.dtype == torch.float32
    assert relative_error(out, case.expected(adj)) < 3e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_captured_in_a_cuda_graph(kind):
    adj = random_graph().adjacency("cuda").prepare()
    case = problem(kind, adj, 2, 32, dtype=torch.float16, requires_grad=True)

    def step():
        out = case.run(adj, algorithm="fused3s")
        return [out, *torch.autograd.grad(out.float().square().sum(), case.tensors)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = step()
    captured.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_memory_does_not_grow_with_the_edges(kind, dtype):
    nodes, heads, width = 20_000, 2, 32
    for num_edges in (200_000, 2_000_000):
        generator = torch.Generator("cuda").manual_seed(0)
        row, col = (
            torch.randint(0, nodes, (num_edges,), generator=generator, device="cuda") for _ in range(2)
        )
        adj = Adjacency.from_coo(row, col, (nodes, nodes))
        case = problem(kind, adj, heads, width, dtype=dtype, requires_grad=True)

        def step(adj=adj, case=case):
            out = case.run(adj, algorithm="fused3s")
            torch.autograd.grad(out.float().sum(), case.tensors)

        step()  # builds formats
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        # What is asked for: the allocator's blocks are larger, by up to 1 MB each.
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        step()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        # Rows of features: the result, its gradient, and the gradients of those operands that have such rows.
        operands = {"dot_product": 3, "additive": 1, "gatv2": 2}[kind]
        rows = nodes * heads * width * dtype.itemsize * (2 + operands)
        numbers = nodes * heads * 8 * 4  # log-sum-exp, row states, gradients of scores
        # Every slice of a long row leaves a row of features for each operand, and its softmax state.
        splits = [a.bsb_split if kind == "dot_product" else a.row_split for a in (adj, adj.t())]
        height = HEIGHT if kind == "dot_product" else 1
        partial = sum(split.num_slots for split in splits) * height * heads * (2 * width + 4) * 4
        # The gradient of `att`: a row for each of so many groups of lanes, and what summing takes.
        groups = _gatv2_attention_csr.att_rows_of(len(adj.row_split.slices)) if kind == "gatv2" else 0
        att = 2 * groups * heads * width * 4
        assert peak <= rows + numbers + partial + att + 4096
        # One score for every edge would not fit.
        assert numbers + partial + att < num_edges * heads * 4 or num_edges < 2_000_000


def test_what_cannot_be_fused_is_said_once_for_each_reason(reasons):
    assert [policy.attention_algorithm("auto", "float64 on CUDA") for _ in range(3)] == ["unfused"] * 3
    assert [record.getMessage() for record in reasons.records] == [
        "attention runs as 'unfused', with memory for every edge: float64 on CUDA"
    ]
    assert policy.attention_algorithm("fused3s", "no heads") == "unfused"
    assert len(reasons.records) == 2
    assert policy.attention_algorithm("auto", "") == "fused3s"
    assert policy.attention_algorithm("unfused", "no heads") == "unfused"
    assert len(reasons.records) == 2


@pytest.mark.parametrize(
    ("dtype", "heads", "width", "value_width", "reason"),
    [
        (torch.float64, 2, 8, 8, "float64 on CUDA"),
        (torch.float32, 0, 8, 8, "no heads"),
        (torch.float32, 2, 0, 8, "heads of width 0, not 1 to 256"),
        (torch.float32, 2, 8, 260, "heads of width 260, not 1 to 256"),
        (torch.float16, 2, 12, 8, "heads of 24 bytes, not a multiple of 16"),
        (torch.float32, 2, 12, 256, ""),
        (torch.bfloat16, 1, 256, 8, ""),
    ],
)
def test_obstacles_of_dot_product_kernels(dtype, heads, width, value_width, reason):
    adj = Adjacency.from_coo(torch.tensor([0, 2]), torch.tensor([3, 1]), (3, 4))
    q, k = (torch.ones(rows, heads * width, dtype=dtype) for rows in adj.shape)
    assert _attention_bsb.obstacle(adj, q, k, k.new_ones(4, heads * value_width), heads) == reason


def test_too_many_sources_are_an_obstacle_of_dot_product_kernels():
    row = torch.tensor([0])
    for shape in ((1, MOST_COLUMNS + 1), (MOST_COLUMNS + 1, 1)):
        adj = Adjacency.from_coo(row, row, shape)
        q, k = (torch.ones(1).expand(rows, 8) for rows in shape)
        assert "more than 16777216 nodes" in _attention_bsb.obstacle(adj, q, k, k, 1)


@pytest.mark.parametrize("backward", [False, True])
def test_blocks_of_both_directions_are_tried_where_a_gradient_is_wanted(monkeypatch, backward):
    adj = Adjacency.from_coo(torch.tensor([0, 2]), torch.tensor([3, 1]), (3, 4))

    def no_memory() -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(adj.t(), "_bsb", no_memory)
    assert _attention_bsb.has_blocks(adj, backward=backward) is not backward


@pytest.mark.parametrize(
    ("dtype", "width", "slope", "reason"),
    [
        (torch.float64, 8, 0.2, "float64 on CUDA"),
        (torch.float32, 257, 0.2, "heads of width 257, not 1 to 256"),
        (torch.float32, 0, 0.2, "heads of width 0, not 1 to 256"),
        (torch.float16, 8, 1.5, "negative_slope=1.5, not from 0 to 1, on CUDA"),
        (torch.float16, 13, 0.2, ""),
    ],
)
def test_obstacles_of_gatv2_kernels(dtype, width, slope, reason):
    features = torch.ones(4, 2 * width, dtype=dtype)
    assert _gatv2_attention_csr.obstacle(features, slope, 2) == reason


def test_too_many_features_are_an_obstacle_of_additive_kernels():
    heads = _additive_attention_csr.MAX_WIDTH // 256 + 1
    features = torch.ones(1).expand(4, heads * 256)
    assert "features of all heads, more than" in _additive_attention_csr.obstacle(features, heads)


def test_too_many_heads_are_refused_before_any_launch():
    heads = policy.MOST_HEADS + 1
    check_heads(heads, torch.device("cpu"))
    check_heads(heads - 1, torch.device("cuda"))
    with pytest.raises(ValueError, match="expected at most 65535 heads on CUDA, got 65536"):
        check_heads(heads, torch.device("cuda"))
    features = torch.ones(1).expand(4, heads * 4)
    message = "65536 heads, more than 65535"
    assert _additive_attention_csr.obstacle(features, heads) == message
    assert _gatv2_attention_csr.obstacle(features, 0.2, heads) == message
    adj = Adjacency.from_coo(torch.tensor([0]), torch.tensor([1]), (4, 4))
    assert _attention_bsb.obstacle(adj, features, features, features, heads) == message
    heads = _attention_bsb.MAX_WIDTH // 256 + 1
    features = torch.ones(1).expand(4, heads * 256)
    message = "features of all heads, more than 8388480"
    assert message in _attention_bsb.obstacle(adj, features, features, features, heads)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_too_many_heads_raise_on_cuda(kind):
    adj = Adjacency.from_coo(torch.tensor([0, 2]), torch.tensor([3, 1]), (3, 4)).to("cuda")
    case = problem(kind, adj, policy.MOST_HEADS + 1, 4)
    for algorithm in ALGORITHMS:
        with pytest.raises(ValueError, match="at most 65535 heads"):
            case.run(adj, algorithm=algorithm)


# ---------------------------------------------------------------- errors


def arguments(kind: str) -> dict[str, object]:
    if kind == "dot_product":
        return {"q": torch.ones(3, 2, 4), "k": torch.ones(4, 2, 4), "v": torch.ones(4, 2, 5)}
    if kind == "additive":
        return {"score_dst": torch.ones(3, 2), "score_src": torch.ones(4, 2), "v": torch.ones(4, 2, 5)}
    return {"x_dst": torch.ones(3, 2, 4), "x_src": torch.ones(4, 2, 4), "att": torch.ones(2, 4)}


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        ("dot_product", {"q": torch.ones(4, 2, 4)}, ValueError, "q: expected num_dst = 3 rows"),
        ("dot_product", {"k": torch.ones(4, 2, 3)}, ValueError, "q and k: expected features of one width"),
        ("dot_product", {"v": torch.ones(4, 3, 5)}, ValueError, "expected as many heads each, got 2, 2"),
        ("dot_product", {"v": torch.ones(4, 5)}, ValueError, "q, k and v: expected"),
        ("dot_product", {"v": torch.ones(4, 2, 5).half()}, TypeError, "q, k and v: expected one dtype"),
        ("dot_product", {"q": torch.ones(3, 2, 4).int()}, TypeError, "q: expected float64"),
        ("dot_product", {"scale": float("nan")}, ValueError, "scale: expected a finite number, got nan"),
        ("dot_product", {"scale": torch.ones(1)}, TypeError, "scale: expected a number, got Tensor"),
        ("dot_product", {"bias": torch.ones(1)}, ValueError, r"bias: expected shape \(2,\) or \(2, 2\)"),
        ("dot_product", {"bias": torch.ones(2, 3)}, ValueError, "bias: expected shape"),
        ("dot_product", {"bias": torch.ones(2).int()}, TypeError, "bias: expected a floating tensor"),
        ("dot_product", {"bias": torch.ones(2, device="meta")}, ValueError, "bias: expected device cpu"),
        ("dot_product", {"dropout_p": 1.0}, ValueError, "dropout_p: expected a probability from 0"),
        ("dot_product", {"dropout_p": -0.1}, ValueError, "dropout_p: expected a probability"),
        ("dot_product", {"dropout_p": float("nan")}, ValueError, "dropout_p: expected a probability"),
        ("dot_product", {"dropout_p": "0.5"}, TypeError, "dropout_p: expected a number, got str"),
        ("dot_product", {"heads": 3}, ValueError, r"heads: expected 2 for \(n, 2, D\)"),
        ("dot_product", {"q": torch.ones(3, 8), "k": torch.ones(4, 8), "v": torch.ones(4, 9), "heads": 2},
         ValueError, r"v: expected \(n, 2 \* D\) for 2 heads side by side, got \(4, 9\)"),
        ("dot_product", {"q": torch.ones(3, 8), "k": torch.ones(4, 8), "v": torch.ones(4, 8), "heads": 0},
         ValueError, r"q: expected \(n, 0 \* D\)"),
        ("additive", {"v": torch.ones(4, 5)}, ValueError, r"v: expected \(n, 2 \* D\) for 2 heads"),
        ("gatv2", {"x_dst": torch.ones(3, 9), "x_src": torch.ones(4, 9)}, ValueError,
         r"att: expected shape of 9 entries, \(heads, D\), got \(2, 4\)"),
        ("additive", {"score_dst": torch.ones(3, 3)}, ValueError, r"score_dst: expected shape \(3, 2\)"),
        ("additive", {"score_src": torch.ones(3, 2)}, ValueError, "score_src: expected num_src = 4 rows"),
        ("additive", {"v": torch.ones(4)}, ValueError, r"v: expected \(num_src, heads, D\)"),
        ("additive", {"negative_slope": float("inf")}, ValueError, "negative_slope: expected a finite"),
        ("additive", {"bias": torch.ones(3)}, ValueError, "bias: expected shape"),
        ("additive", {"dropout_p": 2}, ValueError, "dropout_p: expected a probability"),
        ("gatv2", {"x_src": torch.ones(4, 3, 4)}, ValueError, "x_dst and x_src: expected"),
        ("gatv2", {"x_src": torch.ones(4, 2, 4).double()}, TypeError, "x_dst and x_src: expected one dtype"),
        ("gatv2", {"att": torch.ones(2, 5)}, ValueError, r"att: expected shape \(2, 4\)"),
        ("gatv2", {"att": torch.ones(2, 4).int()}, TypeError, "att: expected a floating tensor"),
        ("gatv2", {"negative_slope": float("nan")}, ValueError, "negative_slope: expected a finite"),
        ("gatv2", {"dropout_p": 1}, ValueError, "dropout_p: expected a probability"),
    ],
)  # fmt: skip
def test_bad_input(kind, change, error, message, algorithm):
    adj = Adjacency.from_coo(torch.tensor([0, 2]), torch.tensor([3, 1]), (3, 4))
    operator = {"dot_product": attention, "additive": additive_attention, "gatv2": gatv2_attention}[kind]
    with pytest.raises(error, match=message):
        operator(adj, **{**arguments(kind), **change}, algorithm=algorithm)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_algorithm(kind):
    adj = Adjacency.from_coo(torch.tensor([0, 2]), torch.tensor([3, 1]), (3, 4))
    operator = {"dot_product": attention, "additive": additive_attention, "gatv2": gatv2_attention}[kind]
    with pytest.raises(
        ValueError, match="algorithm: expected one of 'auto', 'fused3s', 'csr', 'unfused', got 'magic'"
    ):
        operator(adj, **arguments(kind), algorithm="magic")
