"""The MaxK module."""

from __future__ import annotations

import pytest
import torch
from cases import saved_bytes
from torch import nn

from fastsparse_core import CBSR, MaxK, reference


@pytest.mark.parametrize("shape", [(7, 20), (20,), (3, 4, 20), (0, 20)])
def test_keeps_the_shape(device, shape):
    x = torch.randn(shape, device=device, requires_grad=True)
    out = MaxK(6)(x)
    values, ids = reference.maxk(x.reshape(-1, 20), 6)
    expected = reference.cbsr_to_dense(values, ids, 20).reshape(shape)
    assert torch.equal(out.double(), expected)
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, x, weight)
    assert torch.equal(grad, weight * (out != 0))


def test_compress_is_the_same_without_zeros(device):
    x = torch.randn(9, 300, device=device)
    activation = MaxK(5)
    kept = activation.compress(x)
    assert isinstance(kept, CBSR)
    assert torch.equal(kept.to_dense(), activation(x))


def test_stores_a_bit_for_each_column():
    x = torch.randn(50, 256, requires_grad=True)
    assert saved_bytes(lambda: MaxK(64)(x))[1] == 50 * 256 / 8
    assert saved_bytes(lambda: MaxK(64).compress(x).values)[1] == 50 * 64  # a byte for each kept entry
    assert saved_bytes(lambda: torch.relu(x))[1] == 50 * 256 * 4


def test_takes_the_place_of_relu_in_a_model():
    model = nn.Sequential(nn.Linear(8, 16), MaxK(4), nn.Linear(16, 2))
    assert "MaxK(k=4)" in repr(model)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    model(torch.randn(5, 8)).sum().backward()
    assert model[0].weight.grad.norm() > 0


def test_compiles():
    torch._dynamo.reset()
    activation = MaxK(4)
    compiled = torch.compile(activation, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 16)
    assert torch.equal(compiled(x), activation(x))


def test_bad_input():
    with pytest.raises(ValueError, match="k: expected at least 1 kept entry in each row, got 0"):
        MaxK(0)
    with pytest.raises(TypeError, match="k: expected an int, got float"):
        MaxK(3.0)
    with pytest.raises(ValueError, match="k: expected at most 4, the width of x, got 5"):
        MaxK(5)(torch.ones(2, 4))
    with pytest.raises(ValueError, match="x: expected at least one dimension"):
        MaxK(1)(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"got torch.int64"):
        MaxK(1)(torch.ones(2, 4, dtype=torch.int64))
