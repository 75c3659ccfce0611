"""Attention operators against float64 references: results, extremes, dropout."""

from __future__ import annotations

import math

import pytest
import torch
from attention_problems import (
    ALGORITHMS,
    HEAD_WIDTHS,
    KINDS,
    Problem,
    each_algorithm,
    next_seed,
    problem,
    random_graph,
)
from cases import (
    DTYPES,
    TOLERANCE,
    EdgeList,
    assert_equal_but_for_rounding,
    edge_lists,
    features,
    relative_error,
    special_scores,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsparse_core import (
    Adjacency,
    additive_attention_weights,
    attention,
    attention_weights,
    gatv2_attention_weights,
    reference,
    spmm,
)


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
@each_algorithm((4, 32), (1, 40), (1, 64), (8, 8), (2, 128))
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


@pytest.mark.parametrize("scale", [None, 1.0])
def test_queries_without_a_width_weigh_neighbours_alike(scale):
    adj = Adjacency.from_coo(torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0]), (3, 3))
    q, v = torch.ones(3, 2, 0), torch.randn(3, 2, 4)
    for _ in range(2):
        torch.testing.assert_close(attention(adj, q, q, v, scale), spmm(adj, v, reduce="mean"))


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
    # Only the rounding error of one weight remains, times scores a thousand times larger than usual.
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
    case.tensors[1 if kind == "gatv2" else 2].data.abs_()  # otherwise the result is only a rounding error
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
    # If one weight is 1 and the others are 0, gradients vanish. So their errors are relative to gradients of
    # ordinary scores, which grow with the factor of the other operand.
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
    for operand in range(operands + 1):  # the last one is the gradient of the result
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dot_product", "additive"])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "csr"])
@pytest.mark.parametrize(("heads", "width"), [(4, 32), (8, 8), (2, 128)])
def test_special_scores(device, poisoned_memory, kind, dtype, algorithm, heads, width):
    """NaN and infinity make results and gradients of their row and head NaN, and minus infinity weighs 0."""
    if algorithm == "csr" and (kind == "additive" or (device == "cuda" and dtype == torch.float64)):
        pytest.skip("no such kernel")
    edges, special = special_scores()
    adj = edges.adjacency(device)
    case = problem(kind, adj, heads, width, None, dtype, biased=True, requires_grad=True)
    with torch.no_grad():
        case.tensors[-1][:, ::2] += special[:, None].to(device, case.tensors[-1].dtype)
    _assert_equals_reference(case, adj, 4 * TOLERANCE[dtype], algorithm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("heads", "width"), [(4, 32), (1, 64), (2, 128)])
def test_special_scores_of_gatv2(device, poisoned_memory, dtype, algorithm, heads, width):
    """Its scores come from features, which are the values too."""
    adj = special_scores()[0].adjacency(device)
    case = problem("gatv2", adj, heads, width, None, dtype, requires_grad=True)
    with torch.no_grad():
        x_dst, x_src, att = case.tensors
        att[0, 0] = 0.5
        for row, number in ((2, "nan"), (4, "inf"), (6, "-inf"), (14, "nan"), (16, "inf"), (20, "-inf")):
            x_dst[row, 0, 0] = float(number)
        x_src[[900, 930], 0, 0] = -torch.inf
    _assert_equals_reference(case, adj, 4 * TOLERANCE[dtype], algorithm)


def _assert_equals_reference(case: Problem, adj: Adjacency, tolerance: float, algorithm: str) -> None:
    """Result and gradients, NaN and infinities at the same places."""
    doubled = case.doubled()
    out, expected = case.run(adj, algorithm=algorithm), case.expected(adj, doubled)
    assert_equal_but_for_rounding(out, expected, tolerance)
    weight = features(adj.num_dst, out[0].numel(), out.dtype, "contiguous", str(out.device), 7)
    weight = weight.view(out.shape)
    found = torch.autograd.grad(out, case.tensors, weight)
    wanted = torch.autograd.grad(expected, doubled, weight.double())
    for grad, right in zip(found, wanted, strict=True):
        assert_equal_but_for_rounding(grad, right, 8 * tolerance)


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
    adj = Adjacency.from_coo(row, col, (200, 100))  # without duplicates, because duplicates share a mask
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


def test_later_calls_repeat_the_first_to_the_bit():
    """Also with a width whose root has two roundings, as `1 / math.sqrt(w)` and `w**-0.5` give them."""
    width = next(w for w in range(2, 100) if w**-0.5 != 1 / math.sqrt(w))
    generator = torch.Generator().manual_seed(0)
    adj = random_graph().adjacency("cpu")
    q, k, v = (
        torch.randn(rows, 8 * width, dtype=torch.float64, generator=generator)
        for rows in (adj.num_dst, adj.num_src, adj.num_src)
    )
    first, second = attention(adj, q, k, v, heads=8), attention(adj, q, k, v, heads=8)
    assert torch.equal(first, second)
    q, k, v = (x.unflatten(1, (8, width)) for x in (q, k, v))
    assert torch.equal(attention(adj, q, k, v).flatten(1), first)
    assert torch.equal(attention(adj, q, k, v, scale=1 / math.sqrt(width)).flatten(1), first)
