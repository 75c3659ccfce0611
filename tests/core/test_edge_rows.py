"""Rows of nodes per edge and sums of edges per node, against PyTorch's index_select and the reference."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, TOLERANCE, features, relative_error

from fastsparse_core import reference
from fastsparse_core.ops._edge_rows import lift, softmax_sum, sum_edges
from fastsparse_core.ops._segment import gather_op
from fastsparse_core.structure.segments import Segments


class End:
    """One end of random edges."""

    def __init__(self, num_nodes: int, num_edges: int, device: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.index = torch.randint(num_nodes, (num_edges,), generator=generator).to(device)
        self.num_nodes = num_nodes
        self.segments = Segments.from_index(self.index, num_nodes)

    def find(self, *_: object) -> Segments:
        return self.segments


@pytest.fixture
def ends(device: str) -> list[End]:
    return [End(9, 50, device, 0), End(7, 50, device, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (16,), (2, 3)])
def test_lift(device, ends, dtype, shape):
    """One matrix at both ends, and another one; an unused result has no gradient."""
    x = torch.randn(9, *shape, device=device, dtype=dtype, requires_grad=True)
    y = torch.randn(7, *shape, device=device, dtype=dtype, requires_grad=True)
    unused = torch.randn(7, device=device, dtype=dtype, requires_grad=True)
    chosen = [ends[0], ends[1], ends[0], ends[1]]
    rows = lift([x, y, x, unused], chosen)
    for got, matrix, end in zip(rows, (x, y, x, unused), chosen, strict=True):
        assert torch.equal(got, matrix.index_select(0, end.index))
    weights = [torch.randn_like(row) for row in rows[:3]]
    total = sum((row * weight).sum() for row, weight in zip(rows[:3], weights, strict=True))
    grads = torch.autograd.grad(total, (x, y, unused), allow_unused=True)
    assert grads[2] is None
    first, second = (weights[k].double() for k in (0, 2))
    wanted = reference.scatter(first + second, ends[0].index, 9, "sum")
    assert relative_error(grads[0], wanted) <= 2 * TOLERANCE[dtype]
    assert (
        relative_error(grads[1], reference.scatter(weights[1].double(), ends[1].index, 7, "sum"))
        <= (TOLERANCE[dtype])
    )
    with torch.no_grad():
        assert torch.equal(lift([x], [ends[0]])[0], rows[0])


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (16,), (2, 3)])
def test_sum_edges(device, ends, dtype, shape, mean):
    rows = torch.randn(50, *shape, device=device, dtype=dtype, requires_grad=True)
    how = "mean" if mean else "sum"
    out = sum_edges(rows, ends[0], 9, mean=mean)
    exact = rows.detach().double().requires_grad_()
    expected = reference.scatter(exact, ends[0].index, 9, how)
    assert out.dtype == dtype
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    weight = torch.randn_like(expected)
    (grad,) = torch.autograd.grad(out, rows, weight.to(dtype))
    (wanted,) = torch.autograd.grad(expected, exact, weight)
    assert relative_error(grad, wanted) <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 16])
def test_softmax_sum(device, ends, dtype, width):
    """Also a node without edges, and a message that is edited before the backward pass."""
    rows = (3 * torch.randn(50, width, device=device)).to(dtype).requires_grad_()
    end = ends[0]
    end.index[end.index == 4] = 3
    end.segments = Segments.from_index(end.index, 9)
    out = softmax_sum(rows, end, 9)
    exact = rows.detach().double().requires_grad_()
    index = end.index[:, None].expand(50, width)
    weights = (exact - exact.detach().max()).exp()
    total = weights.new_zeros(9, width).scatter_add(0, index, weights)
    expected = reference.scatter(exact * weights / total.gather(0, index), end.index, 9, "sum")
    assert out.dtype == dtype
    assert not out[4].any()
    assert relative_error(out, expected) <= 3 * TOLERANCE[dtype]
    weight = torch.randn_like(expected)
    (grad,) = torch.autograd.grad(out, rows, weight.to(dtype), retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, exact, weight)
    assert relative_error(grad, wanted) <= 5 * TOLERANCE[dtype]
    with torch.no_grad():
        assert torch.equal(softmax_sum(rows, end, 9), out)
        rows.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(weight.to(dtype))


def test_second_derivatives(device, ends):
    x = torch.randn(9, 3, device=device, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(50, 3, device=device, dtype=torch.float64, requires_grad=True)

    def lifted(x):
        first, second = lift([x, x], [ends[0], ends[0]])
        return first * second

    assert torch.autograd.gradgradcheck(lifted, (x,))
    assert torch.autograd.gradgradcheck(lambda rows: sum_edges(rows, ends[0], 9, mean=True) ** 2, (rows,))
    assert torch.autograd.gradgradcheck(lambda rows: softmax_sum(rows, ends[0], 9), (rows,))


def test_parameters_go_through_the_dispatcher(device, ends):
    """Like everything that is not a plain tensor."""
    x = torch.nn.Parameter(torch.randn(9, 3, device=device))
    count = torch.bincount(ends[0].index, minlength=9)
    lift([x], [ends[0]])[0].sum().backward()
    torch.testing.assert_close(
        x.grad, torch.bincount(ends[0].index, minlength=9)[:, None].expand(9, 3).float()
    )
    rows = torch.nn.Parameter(torch.randn(50, 3, device=device))
    sum_edges(rows, ends[0], 9, mean=True).sum().backward()
    torch.testing.assert_close(rows.grad, (1 / count[ends[0].index])[:, None].expand(50, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("width", [0, 1, 2, 3, 4, 8, 16, 33, 128, 300])
def test_gathered_rows(device, poisoned_memory, dtype, width):
    """Rows of any dtype and alignment, by 32- and 64-bit indices."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(100, (20, width + 1), generator=generator).to(device, dtype)
    index = torch.randint(20, (700,), generator=generator).to(device)
    for matrix in (table, table[:, 1:], table.flatten()[1 : 19 * width + 1].view(19, width)):
        for each in (index % len(matrix), (index % len(matrix)).int()):
            out = gather_op(matrix, each, None, 700)
            assert torch.equal(out, matrix.index_select(0, each))
    assert gather_op(table, index[:0], None, 0).shape == (0, width + 1)


@pytest.mark.parametrize("layout", ["row_stride", "transposed", "expanded"])
def test_gradients_of_any_layout(device, ends, layout):
    """Such as that of a sum, which is expanded."""
    rows = torch.randn(50, 8, device=device, requires_grad=True)
    grad = features(9, 8, torch.float32, layout, device)
    (got,) = torch.autograd.grad(sum_edges(rows, ends[0], 9), rows, grad)
    assert torch.equal(got, grad.index_select(0, ends[0].index))
    x = torch.randn(9, 8, device=device, requires_grad=True)
    grad = features(50, 8, torch.float32, layout, device)
    (got,) = torch.autograd.grad(lift([x], [ends[0]])[0], x, grad)
    assert relative_error(got, reference.scatter(grad.double(), ends[0].index, 9, "sum")) < 1e-5
