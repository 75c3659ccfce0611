"""Pruned linear layers against the dense layer with zeros."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, TOLERANCE, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fastsparse_core import Adjacency, SparseLinear, choose

SIZES = st.sampled_from([1, 2, 3, 8, 17, 64, 130])


def random_mask(out_features: int, in_features: int, density: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(out_features, in_features, generator=generator) < density
    mask[out_features // 2] = False  # an output without inputs
    return mask


@given(
    out_features=SIZES,
    in_features=SIZES,
    batch=st.sampled_from([(), (0,), (1,), (7,), (3, 5), (64,)]),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    bias=st.booleans(),
    algorithm=st.sampled_from(["sparse", "dense", "auto"]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_forward_and_backward(device, out_features, in_features, batch, dtype, density, bias, algorithm):
    torch.manual_seed(0)
    mask = random_mask(out_features, in_features, density).to(device)
    layer = SparseLinear(in_features, out_features, mask, bias, algorithm=algorithm, dtype=dtype)
    x = torch.randn(*batch, in_features, dtype=torch.float64).to(device, dtype).requires_grad_()
    gradient = torch.randn(*batch, out_features, dtype=torch.float64).to(device, dtype)
    out = layer(x)
    out.backward(gradient)

    weight = layer.to_dense().detach().double().requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    exact_bias = layer.bias.detach().double().requires_grad_() if bias else None
    expected = F.linear(exact_x, weight, exact_bias)
    expected.backward(gradient.double())
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert relative_error(x.grad, exact_x.grad) < TOLERANCE[dtype]
    assert relative_error(layer.values.grad, weight.grad[mask]) < TOLERANCE[dtype]
    if bias:
        assert relative_error(layer.bias.grad, exact_bias.grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("algorithm", ["sparse", "dense"])
def test_gradcheck(device, algorithm):
    torch.manual_seed(0)
    layer = SparseLinear(6, 5, random_mask(5, 6, 0.4).to(device), algorithm=algorithm, dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64, device=device, requires_grad=True)

    def call(x, values, bias):
        return torch.func.functional_call(layer, {"values": values, "bias": bias}, (x,))

    inputs = (x, layer.values.detach().requires_grad_(), layer.bias.detach().requires_grad_())
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_masks_of_all_kinds_give_the_same_layer(device):
    mask = random_mask(9, 12, 0.3).to(device)
    weight = torch.randn(9, 12, device=device) * mask
    matrix = weight.to_sparse_csr()
    row, col = mask.nonzero().t()
    adjacency = Adjacency.from_coo(row.flip(0), col.flip(0), (9, 12))
    given_values = SparseLinear(12, 9, matrix, bias=False)
    assert torch.equal(given_values.to_dense(), weight)
    for structure in (mask, adjacency):
        layer = SparseLinear(12, 9, structure, bias=False)
        layer.load_state_dict(given_values.state_dict())
        assert torch.equal(layer.to_dense(), weight)


def test_from_linear_keeps_the_greatest_weights(device):
    linear = nn.Linear(20, 10, device=device)
    layer = SparseLinear.from_linear(linear, sparsity=0.85)
    assert layer.values.numel() == 30
    threshold = linear.weight.abs().flatten().sort(descending=True).values[29]
    expected = torch.where(linear.weight.abs() >= threshold, linear.weight, 0.0)
    assert torch.equal(layer.to_dense(), expected)
    assert torch.equal(layer.bias, linear.bias)
    x = torch.randn(4, 20, device=device)
    assert relative_error(layer(x), F.linear(x, expected, linear.bias)) < 1e-6
    masked = SparseLinear.from_linear(nn.Linear(20, 10, bias=False, device=device), expected != 0)
    assert masked.bias is None
    assert masked.values.numel() == 30
    assert SparseLinear.from_linear(linear, sparsity=1).values.numel() == 0


def test_state_dict_holds_the_structure(device):
    first, second = (
        SparseLinear(8, 6, mask.to(device))
        for mask in (torch.eye(6, 8).bool(), torch.eye(6, 8).bool().flip(1))
    )
    second(torch.ones(1, 8, device=device))  # builds a structure that loading must replace
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.to_dense(), first.to_dense())
    x = torch.randn(12, 8, device=device)
    assert relative_error(second(x), first(x)) < 1e-6
    file = io.BytesIO()
    torch.save(first, file)
    file.seek(0)
    for twin in (copy.deepcopy(first), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), first(x))


def test_follows_the_module_to_another_dtype():
    layer = SparseLinear(8, 4, torch.ones(4, 8).bool(), algorithm="sparse").double()
    x = torch.randn(3, 8, dtype=torch.float64)
    assert relative_error(layer(x), F.linear(x, layer.to_dense(), layer.bias)) < 1e-12
    assert layer.col.dtype == torch.int32


@pytest.mark.parametrize("algorithm", ["sparse", "dense"])
def test_autocast(device, algorithm):
    layer = SparseLinear(32, 16, random_mask(16, 32, 0.3).to(device), algorithm=algorithm)
    x = torch.randn(24, 32, device=device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        out = layer(x)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert relative_error(out, F.linear(x, layer.to_dense(), layer.bias)) < 2e-2
    assert layer.values.grad.dtype == torch.float32


def test_layers_in_a_row_keep_the_batch_last(device):
    layers = [SparseLinear(16, 16, random_mask(16, 16, 0.3).to(device), algorithm="sparse") for _ in range(2)]
    hidden = layers[0](torch.randn(40, 16, device=device)).relu()
    assert hidden.t().is_contiguous()
    assert layers[1](hidden.reshape(5, 8, 16)).shape == (5, 8, 16)


def test_auto_takes_the_side_of_the_crossover():
    shape, cuda, cpu = (512, 2048), torch.device("cuda"), torch.device("cpu")

    def picks(device, dtype, density, batch=256, shape=shape):
        count = round(density * shape[0] * shape[1])
        return choose.sparse_linear_algorithm("auto", device, dtype, shape, count, batch)

    assert picks(cuda, torch.float16, 0.02) == "dense"
    assert picks(cuda, torch.float16, 0.001) == "sparse"
    assert picks(cuda, torch.float32, 0.02) == "sparse"
    assert picks(cuda, torch.float32, 0.2) == "sparse"
    assert picks(cuda, torch.float32, 0.5) == "dense"
    assert picks(cuda, torch.float32, 0.2, shape=(4096, 4096)) == "dense"
    assert picks(cpu, torch.float32, 0.02) == "sparse"
    assert picks(cpu, torch.float32, 0.9) == "dense"
    assert picks(cuda, torch.float16, 0.5, batch=1) == "sparse"
    assert picks(cuda, torch.float16, 0.5, shape=(2**15, 2**15)) == "sparse"
    for asked in ("sparse", "dense"):
        assert choose.sparse_linear_algorithm(asked, cuda, torch.float16, shape, 10, 1) == asked


def test_repr():
    layer = SparseLinear(10, 4, torch.eye(4, 10).bool(), bias=False, algorithm="dense")
    expected = "in_features=10, out_features=4, bias=False, sparsity=0.900, algorithm='dense'"
    assert repr(layer) == f"SparseLinear({expected})"


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: SparseLinear(3, 2, torch.ones(3, 2).bool()), ValueError, r"mask: expected shape .*\(2, 3\)"),
        (lambda: SparseLinear(3, 2, torch.ones(2, 3)), TypeError, "mask: expected a bool tensor.*float32"),
        (lambda: SparseLinear(3, 2, [[True]]), TypeError, "mask: .*got list"),
        (
            lambda: SparseLinear(3, 2, torch.ones(2, 3).bool(), algorithm="fast"),
            ValueError,
            "algorithm: expected one of 'auto', 'sparse', 'dense', got 'fast'",
        ),
        (lambda: SparseLinear.from_linear(nn.Linear(2, 2), sparsity=1.5), ValueError, "sparsity: .*1.5"),
        (
            lambda: SparseLinear(3, 2, torch.ones(2, 3).bool())(torch.ones(4, 2)),
            ValueError,
            r"x: expected in_features = 3 .*\(4, 2\)",
        ),
        (
            lambda: SparseLinear(3, 2, torch.ones(2, 3).bool())(torch.ones(4, 3).double()),
            ValueError,
            "x: expected torch.float32 like the weights",
        ),
        (
            lambda: SparseLinear(3, 2, torch.ones(2, 3).bool())(torch.ones(4, 3).int()),
            TypeError,
            "x: expected",
        ),
        (
            lambda: SparseLinear(3, 2, torch.ones(2, 3).bool())(torch.ones(4, 3, device="meta")),
            ValueError,
            "x: expected device cpu",
        ),
    ],
)
def test_bad_input(build, error, message):
    with pytest.raises(error, match=message):
        build()
