"""The MaxK module, and aggregation that stores sparse rows alone."""

from __future__ import annotations

import pytest
import torch
from cases import TOLERANCE, features, relative_error
from torch import nn

from fastsparse_core import CBSR, Adjacency, MaxK, reference, spmm
from fastsparse_core.maxk_activation import aggregate_sparse


def saved_bytes(run, *parameters: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A result and the bytes that autograd stores for it, those of parameters aside."""
    held = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    return out, sum(sizes.values())


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


def test_stores_one_byte_for_each_kept_entry():
    x = torch.randn(50, 256, requires_grad=True)
    assert saved_bytes(lambda: MaxK(32)(x))[1] == 50 * 32
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
    with pytest.raises(ValueError, match="k: expected at most the width of x, 4, got 5"):
        MaxK(5)(torch.ones(2, 4))
    with pytest.raises(ValueError, match="x: expected at least one dimension"):
        MaxK(1)(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"got torch.int64"):
        MaxK(1)(torch.ones(2, 4, dtype=torch.int64))


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
        lambda: aggregate_sparse(
            adj, MaxK(32).compress(x), lambda out, _: out @ weight, value, reduce, scale_src=scale
        ),
        weight,
        *([value] if valued else []),
    )
    if device == "cpu":  # 4 bytes of each value and 1 of its column
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
