"""Aggregation of MaxK's sparse rows with what follows it: results, gradients, and what autograd stores."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, TOLERANCE, edge_lists, features, relative_error, saved_bytes
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fastsparse_core import CBSR, Adjacency, MaxK, maxk, spmm, ssd
from fastsparse_core.fused.maxk_linear import (
    aggregate_cbsr,
    can_maxk_linear,
    maxk_linear,
)
from fastsparse_core.ops.ssd import ssd_op

RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
SETTINGS = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("valued", [False, True])
def test_aggregate_sparse_equals_dense_aggregation(device, reduce, valued):
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (200,), generator=generator).to(device) for n in (20, 30))
    adj = Adjacency.from_coo(row, col, (20, 30))
    x = features(30, 256, torch.float32, "contiguous", device).requires_grad_()
    weight = features(256, 8, torch.float32, "contiguous", device, 1).requires_grad_()
    value = torch.rand(200, device=device, requires_grad=True) if valued else None
    scale = torch.rand(30, device=device)
    out, stored = saved_bytes(
        lambda: aggregate_cbsr(
            adj, MaxK(32).compress(x), lambda out, _: out @ weight, weight, value, reduce, scale_src=scale
        ),
        weight,
        *([value] if valued else []),
    )
    if device == "cpu":  # 4 bytes per value and 1 per column
        assert stored == 30 * 32 * 5
    expected = spmm(adj, MaxK(32)(x), value, reduce, scale_src=scale) @ weight
    assert relative_error(out, expected) <= TOLERANCE[torch.float32]
    upstream = torch.randn_like(out)
    inputs = [x, weight, *([value] if valued else [])]
    for got, wanted in zip(
        torch.autograd.grad(out, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        assert relative_error(got, wanted) <= TOLERANCE[torch.float32]


def test_a_weight_written_before_the_sums_are_repeated_is_an_error():
    """Only if the weight is needed: if x needs no gradient, it may be written, as with a linear layer."""
    adj = Adjacency.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), (2, 2))
    weight = torch.randn(6, 3, requires_grad=True)
    for needed in (True, False):
        x = torch.randn(2, 6, requires_grad=needed)
        out = aggregate_cbsr(adj, maxk(x, 2), lambda out, _: out @ weight, weight)
        expected = ssd(adj, maxk(x, 2)).t().sum(1, keepdim=True).expand(6, 3)
        with torch.no_grad():
            weight.mul_(3)
        if needed:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            torch.testing.assert_close(torch.autograd.grad(out.sum(), weight)[0], expected)


class Operands:
    """A structure, features and weights, and the same product of dense float64 rows."""

    def __init__(self, adj, device, dtype, width, k, out, *, biased, rooted, valued, scaled, out_by_in):
        self.adj, self.k, self.out_by_in = adj, k, out_by_in
        shape = (out, width) if out_by_in else (width, out)

        def draw(*size, seed):
            if len(size) == 2:
                return features(*size, dtype, "contiguous", device, seed).requires_grad_()
            generator = torch.Generator().manual_seed(seed)
            return torch.rand(size, generator=generator).to(device, dtype).requires_grad_()

        self.x = draw(adj.num_src, width, seed=0)
        self.weight = draw(*shape, seed=1)
        self.bias = draw(out, seed=2) if biased else None
        self.root_weight = draw(*shape, seed=3) if rooted else None
        self.value = draw(adj.num_values, seed=4) if valued else None
        generator = torch.Generator().manual_seed(5)
        of = torch.float64 if dtype == torch.float64 else torch.float32
        self.scale = (torch.rand(adj.num_dst, generator=generator) + 0.5).to(device, of) if scaled else None
        self.inputs = [
            tensor
            for tensor in (self.x, self.weight, self.bias, self.root_weight, self.value)
            if tensor is not None
        ]

    def result(self, reduce, recompute=False):
        kept = maxk(self.x, self.k)
        weights = (self.weight, self.bias, self.root_weight)
        assert can_maxk_linear(self.adj, kept, *weights, out_by_in=self.out_by_in)
        options = {"out_by_in": self.out_by_in, "recompute": recompute, "scale_dst": self.scale}
        return maxk_linear(self.adj, kept, *weights, self.value, reduce, **options)

    def expected(self, reduce, *, sizes=False):
        """In float64, by dense rows of the same kept columns; of the operands or of their absolute values."""
        given = [
            (tensor.abs() if sizes else tensor).detach().double().requires_grad_() for tensor in self.inputs
        ]
        rest = iter(given)
        x, weight = next(rest), next(rest)
        bias = next(rest) if self.bias is not None else None
        root_weight = next(rest) if self.root_weight is not None else None
        value = next(rest) if self.value is not None else None
        kept = maxk(self.x.detach(), self.k)
        mask = torch.zeros_like(x).scatter_(1, kept.ids.long(), 1.0)
        dense = x * mask
        row, col = self.adj.row().long(), self.adj.col.long()
        factor = torch.ones(row.numel(), dtype=torch.float64, device=x.device)
        if value is not None:
            factor = value if self.adj.edge_id is None else value[self.adj.edge_id.long()]
        sums = torch.zeros(self.adj.num_dst, x.size(1), dtype=torch.float64, device=x.device)
        sums = sums.index_add(0, row, dense[col] * factor[:, None])
        if reduce == "mean":
            sums = sums * self.adj.inv_degree(torch.float64)[:, None]
        if self.scale is not None:
            sums = sums * self.scale.double()[:, None]
        by_in = weight.t() if self.out_by_in else weight
        out = sums @ by_in
        if bias is not None:
            out = out + bias
        if root_weight is not None:
            out = out + dense[: self.adj.num_dst] @ (root_weight.t() if self.out_by_in else root_weight)
        return out, given


def check(operands, reduce, result, upstream, dtype):
    """Result and gradients are within twice the tolerance, for two products, of the sizes of their terms."""
    expected, exact_inputs = operands.expected(reduce)
    sizes, size_inputs = operands.expected(reduce, sizes=True)
    found = [result, *torch.autograd.grad(result, operands.inputs, upstream)]
    exact = [expected, *torch.autograd.grad(expected, exact_inputs, upstream.double())]
    terms = [sizes, *torch.autograd.grad(sizes, size_inputs, upstream.double().abs())]
    for actual, wanted, size in zip(found, exact, terms, strict=True):
        assert actual.shape == wanted.shape
        assert (actual.double() - wanted).norm() <= 2 * TOLERANCE[dtype] * size.norm().clamp(min=1e-30)
    for actual, of in zip(found[1:], operands.inputs, strict=True):
        assert actual.dtype == of.dtype


@given(
    edges=edge_lists(),
    dtype=st.sampled_from(DTYPES),
    width=st.sampled_from([1, 16, 47, 300]),
    out=st.sampled_from([1, 8]),
    biased=st.booleans(),
    rooted=st.booleans(),
    valued=st.booleans(),
    scaled=st.booleans(),
    out_by_in=st.booleans(),
    reduce=st.sampled_from(["sum", "mean"]),
    recompute=st.booleans(),
)
@SETTINGS
def test_equals_dense_products(
    device,
    poisoned_memory,
    edges,
    dtype,
    width,
    out,
    biased,
    rooted,
    valued,
    scaled,
    out_by_in,
    reduce,
    recompute,
):
    adj = edges.adjacency(device)
    assume(not rooted or adj.num_dst <= adj.num_src)
    operands = Operands(
        adj,
        device,
        dtype,
        width,
        max(width // 4, 1),
        out,
        biased=biased,
        rooted=rooted,
        valued=valued,
        scaled=scaled,
        out_by_in=out_by_in,
    )
    result = operands.result(reduce, recompute)
    assert result.dtype == dtype
    check(operands, reduce, result, features(adj.num_dst, out, dtype, "contiguous", device, 7), dtype)


def square(device):
    generator = torch.Generator().manual_seed(0)
    row, col = torch.randint(0, 30, (2, 200), generator=generator).to(device)
    return Adjacency.from_coo(row, col, (30, 30))


def operands_on(device, dtype=torch.float32, **changes):
    options = {"biased": True, "rooted": True, "valued": False, "scaled": False, "out_by_in": True}
    return Operands(square(device), device, dtype, 256, 32, 8, **(options | changes))


@RECOMPUTE
def test_gradcheck(device, recompute):
    options = {"biased": True, "rooted": True, "valued": True, "scaled": True, "out_by_in": False}
    generator = torch.Generator().manual_seed(0)
    row, col = torch.randint(0, 5, (2, 12), generator=generator).to(device)
    adj = Adjacency.from_coo(row, col, (5, 5))
    operands = Operands(adj, device, torch.float64, 6, 3, 2, **options)
    ids = maxk(operands.x, 3).ids
    values = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)

    def run(values, weight, bias, root_weight, value):
        return maxk_linear(
            adj,
            CBSR(values, ids, 6),
            weight,
            bias,
            root_weight,
            value,
            "mean",
            out_by_in=False,
            recompute=recompute,
            scale_dst=operands.scale,
        )

    assert torch.autograd.gradcheck(run, (values, *operands.inputs[1:]), fast_mode=device == "cuda")


@RECOMPUTE
@pytest.mark.parametrize("autocast", [False, True])
def test_stores_sparse_rows_and_their_sums_unless_they_are_recomputed(autocast, recompute):
    operands, size = operands_on("cpu"), 2 if autocast else 4

    def stored():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, stored = saved_bytes(
                lambda: operands.result("mean", recompute), operands.weight, operands.root_weight
            )
        assert out.requires_grad
        return stored

    sparse = 30 * 32 * (size + 1)  # a value and its column
    assert stored() == sparse + (0 if recompute else 30 * 256 * size)
    operands.weight.requires_grad_(False)  # only the weight's gradient needs the sums
    assert stored() == sparse


@RECOMPUTE
def test_sums_are_computed_once_or_twice(device, monkeypatch, recompute):
    operands, launched = operands_on(device), []
    launch = ssd_op.kernel
    monkeypatch.setattr(ssd_op, "kernel", lambda *x: launched.append(1) or launch(*x))
    torch.autograd.grad(operands.result("mean", recompute).sum(), operands.inputs)
    assert len(launched) == 1 + recompute
    operands.weight.requires_grad_(False)
    torch.autograd.grad(operands.result("mean", recompute).sum(), operands.x)
    assert len(launched) == 2 + recompute


def test_gradients_are_the_same_bits_either_way(device):
    """Stored rows are those that would be computed again."""
    operands = operands_on(device, valued=True)
    upstream = torch.randn(30, 8, device=device)
    kept, again = (
        torch.autograd.grad(operands.result("sum", recompute), operands.weight, upstream)[0]
        for recompute in (False, True)
    )
    assert torch.equal(kept, again)


@RECOMPUTE
def test_what_needs_no_gradient_gets_none(device, recompute):
    operands = operands_on(device, valued=True)
    expected = torch.autograd.grad(operands.result("sum", recompute).sum(), operands.inputs)
    for nth, tensor in enumerate(operands.inputs):
        for other in operands.inputs:
            other.requires_grad_(other is tensor)
        (alone,) = torch.autograd.grad(operands.result("sum", recompute).sum(), [tensor])
        assert relative_error(alone, expected[nth].double()) <= 1e-6
    for tensor in operands.inputs:
        tensor.requires_grad_(False)
    assert not operands.result("sum").requires_grad


@RECOMPUTE
def test_weights_without_gradient_may_change_before_the_backward_pass(device, recompute):
    """If x needs no gradient, the weight is not kept."""
    operands = operands_on(device)
    expected = torch.autograd.grad(operands.result("sum", recompute).sum(), operands.weight)
    operands.x.requires_grad_(False)
    out = operands.result("sum", recompute)
    with torch.no_grad():
        operands.weight.zero_()
    assert torch.equal(torch.autograd.grad(out.sum(), operands.weight)[0], expected[0])


@RECOMPUTE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast(device, dtype, recompute):
    if device == "cpu" and dtype == torch.float16:
        pytest.skip("matrix products of float16 are not for the CPU's autocast in every version")
    operands = operands_on(device)
    with torch.autocast(device, dtype=dtype):
        result = operands.result("mean", recompute)
    assert result.dtype == dtype
    check(operands, "mean", result, torch.randn_like(result), dtype)


def subsets(operands):
    """Every choice of inputs that require a gradient, one after the other."""
    for chosen in range(1, 2 ** len(operands.inputs)):
        some = [nth for nth in range(len(operands.inputs)) if chosen >> nth & 1]
        for nth, tensor in enumerate(operands.inputs):
            tensor.requires_grad_(nth in some)
        yield some


@RECOMPUTE
def test_second_derivatives_are_those_of_dense_products(device, recompute):
    """For every subset of the inputs, whose gradients `autograd.grad` computes alone."""
    operands = operands_on(device, torch.float64, valued=True)

    def products(out, inputs):
        gradients = torch.autograd.grad(out.pow(3).sum(), inputs, create_graph=True)
        norm = sum(gradient.square().sum() for gradient in gradients)
        return torch.autograd.grad(norm, inputs)

    for some in subsets(operands):
        expected, exact = operands.expected("mean")
        wanted = products(expected, [exact[nth] for nth in some])
        found = products(operands.result("mean", recompute), [operands.inputs[nth] for nth in some])
        for actual, right in zip(found, wanted, strict=True):
            assert relative_error(actual, right) <= 1e-9


@RECOMPUTE
def test_second_derivatives_through_two_layers(device, recompute):
    generator = torch.Generator().manual_seed(0)
    row, col = torch.randint(0, 8, (2, 30), generator=generator).to(device)
    adj = Adjacency.from_coo(row, col, (8, 8))
    x, first, second = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()
        for shape in ((8, 6), (6, 6), (3, 6))
    )

    def layer(x, weight):
        options = {"root_weight": weight, "out_by_in": True, "recompute": recompute}
        return maxk_linear(adj, maxk(x, 3), weight, **options)

    def run(first, second):
        return layer(layer(x, first).tanh(), second)

    assert torch.autograd.gradgradcheck(run, (first, second), fast_mode=device == "cuda")


def plain(operands, reduce):
    """ssd and linear maps, one after the other."""
    kept = maxk(operands.x, operands.k)
    sums = ssd(operands.adj, kept, operands.value, reduce, scale_dst=operands.scale)
    out = F.linear(sums, operands.weight, operands.bias)
    return out + F.linear(kept.to_dense(), operands.root_weight)


@RECOMPUTE
def test_gradients_in_batches(device, recompute):
    operands = operands_on(device, torch.float64, valued=True)
    upstream = torch.randn(3, 30, 8, device=device, dtype=torch.float64)
    for some in subsets(operands):
        inputs = [operands.inputs[nth] for nth in some]
        batches = [
            torch.autograd.grad(out, inputs, upstream, is_grads_batched=True)
            for out in (operands.result("sum", recompute), plain(operands, "sum"))
        ]
        for actual, wanted in zip(*batches, strict=True):
            assert relative_error(actual, wanted) <= 1e-12


@RECOMPUTE
def test_watched_gradients_run_hooks_once(device, recompute):
    operands = operands_on(device, valued=True)
    seen = []
    for tensor in operands.inputs:
        tensor.register_hook(lambda grad: seen.append(grad.shape))
    torch.autograd.grad(operands.result("sum", recompute).sum(), operands.inputs, create_graph=True)
    assert sorted(seen) == sorted(tensor.shape for tensor in operands.inputs)


@RECOMPUTE
def test_a_weight_written_before_the_backward_pass_is_an_error(device, recompute):
    operands = operands_on(device)
    out = operands.result("sum", recompute)
    with torch.no_grad():
        operands.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_it_cannot_serve(device):
    operands = operands_on(device)
    adj, weight, bias, root = operands.adj, operands.weight, operands.bias, operands.root_weight
    kept = maxk(operands.x, 32)

    def serves(adj=adj, kept=kept, weight=weight, bias=bias, root=root):
        return can_maxk_linear(adj, kept, weight, bias, root, out_by_in=True)

    assert serves()
    assert serves(bias=None, root=None)
    assert not serves(weight=weight.double())
    assert not serves(weight=weight[:, :-1])
    assert not serves(bias=bias[:-1])
    assert not serves(bias=bias.double())
    assert not serves(root=root[:-1])
    assert not serves(root=root.double())
    tall = Adjacency.from_coo(*torch.tensor([[31], [2]], device=device), (32, 30))
    assert not serves(adj=tall)
    assert serves(adj=tall, root=None)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert serves()
        assert not serves(kept=maxk(operands.x.double(), 32))
    assert not serves(kept=kept.with_values(torch.nn.Parameter(kept.values.detach())))
