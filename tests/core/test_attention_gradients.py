"""Gradients of the attention operators, first and second, and what is kept for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attention_problems import (
    ALGORITHMS,
    KINDS,
    each_algorithm,
    next_seed,
    problem,
    random_graph,
    with_loops,
)
from cases import TOLERANCE, features, ragged, relative_error
from torch.utils.checkpoint import checkpoint

from fastsparse_core import (
    attention,
)
from fastsparse_core.ops import (
    _kept_results,
)


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
@each_algorithm((4, 32), (3, 47), (1, 64), (8, 8), (1, 40), (1, 128))
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
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
    """The padding of a last block reads node 0, which has no edges. Its features change no result."""
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
    """The forward pass ran without autocast and determines all dtypes, as for first derivatives."""
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
    """An alias without memory of its own, which shows whether the result was written to."""
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
