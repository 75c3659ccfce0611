"""Attention with edge features against float64 references: results, all gradients, memory, errors."""

from __future__ import annotations

import pytest
import torch
from cases import (
    DTYPES,
    TOLERANCE,
    LargestTensor,
    assert_equal_but_for_rounding,
    draw,
    ragged,
    relative_error,
    special_scores,
)
from torch import Tensor

from fastsparse_core import Adjacency, algorithms, attention, attention_weights, gatv2_attention, reference
from fastsparse_core.ops import _attention_launch

KINDS = ("dot_product", "gatv2")
#: Heads, their width, features of an edge: lanes per head from 1 to 32, several groups of heads, padding of
#: heads, of edges, edge features beyond the first four of a lane, and beyond a block's 64 on the CPU.
SHAPES = (
    (16, 16, 8),
    (4, 64, 8),
    (1, 8, 32),
    (3, 20, 3),
    (6, 64, 5),
    (5, 7, 1),
    (2, 130, 12),
    (3, 20, 0),
    (1, 256, 8),
    (2, 12, 70),
)


def graph(device: str) -> Adjacency:
    """Rows of no, few and 600 entries, in an order of edges that is not the stored one."""
    return ragged(4000, device)


def problem(kind: str, adj: Adjacency, shape: tuple[int, int, int], dtype: torch.dtype, biased: bool = True):
    """Differentiable arguments by name."""
    heads, width, edge_width = shape
    device = str(adj.device)

    def node(rows: int, seed: int) -> Tensor:
        return draw(rows, heads, width, dtype=dtype, device=device, seed=seed)

    tensors = {
        "edge_attr": draw(adj.num_values, edge_width, dtype=dtype, device=device, seed=3),
        "edge_weight": draw(heads * width, edge_width, dtype=dtype, device=device, seed=4) / edge_width,
    }
    if kind == "gatv2":
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        att = draw(heads, width, dtype=precise, device=device, seed=2) / width**0.5
        return {"x_dst": node(adj.num_dst, 0), "x_src": node(adj.num_src, 1), "att": att} | tensors
    tensors |= {"q": node(adj.num_dst, 0), "k": node(adj.num_src, 1), "v": node(adj.num_src, 2)}
    if biased:
        tensors["bias"] = draw(adj.num_values, heads, dtype=dtype, device=device, seed=5)
    return tensors


def run(kind: str, adj: Adjacency, tensors: dict[str, Tensor], functions, **options) -> Tensor:
    return functions[KINDS.index(kind)](adj, **tensors, **options)


FAST = (attention, gatv2_attention)
EXPECTED = (reference.attention, reference.gatv2_attention)


def compare(kind: str, adj: Adjacency, tensors: dict[str, Tensor], tolerance: float, **options) -> None:
    """Result and every gradient; gradients of sums that cancel get what rounding their terms may cost."""
    wanted = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    given = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    torch.manual_seed(0)
    seed = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(0)
    algorithm = {name: options.pop(name) for name in ("algorithm",) if name in options}
    dropout = {"seed": seed} if options.get("dropout_p") else {}
    out = run(kind, adj, given, FAST, **options, **algorithm)
    expected = run(kind, adj, wanted, EXPECTED, **options, **dropout)
    assert_equal_but_for_rounding(out, expected, tolerance)
    grad = draw(*out.shape, dtype=out.dtype, device=str(out.device), seed=9)
    found = torch.autograd.grad(out, list(given.values()), grad)
    right = torch.autograd.grad(expected, list(wanted.values()), grad.double())
    for name, actual, reference_grad in zip(given, found, right, strict=True):
        assert actual.dtype == given[name].dtype, name
        assert_equal_but_for_rounding(actual, reference_grad, 4 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_reference_in_every_dtype(kind, dtype, device):
    adj = graph(device)
    compare(kind, adj, problem(kind, adj, (4, 16, 8), dtype), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_reference_for_every_width(kind, shape, device):
    adj = graph(device)
    options = {"dropout_p": 0.3}
    compare(kind, adj, problem(kind, adj, shape, torch.float32), 2 * TOLERANCE[torch.float32], **options)
    if device == "cuda":
        compare(kind, adj, problem(kind, adj, shape, torch.float16), 2 * TOLERANCE[torch.float16], **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neither_bias_nor_dropout(shape, dtype, device):
    adj = graph(device)
    compare("dot_product", adj, problem("dot_product", adj, shape, dtype, biased=False), 2 * TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 32, 4), (3, 20, 0), (1, 256, 8)], ids=str)
def test_first_gradients_of_sorted_edges_need_no_transpose(dtype, shape):
    edges = torch.randint(0, 300, (2, 3000), generator=torch.Generator().manual_seed(0))
    edges[0, :700] = 7  # a row of several slices
    row, order = edges[0].sort()
    adj = Adjacency.from_coo(row.cuda(), edges[1, order].cuda(), (310, 305))
    tensors = problem("dot_product", adj, shape, dtype)
    compare("dot_product", adj, tensors, 4 * TOLERANCE[dtype], dropout_p=0.3)
    assert not adj.has_transpose
    with algorithms(attention="csr"):  # a name asks for the same bits every time
        compare("dot_product", adj, tensors, 4 * TOLERANCE[dtype])
    assert adj.has_transpose


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 16, 8), (1, 256, 8), (2, 64, 40)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_special_scores(kind, shape, dtype, device, poisoned_memory):
    """NaN and infinity make results and gradients of their row and head NaN, and minus infinity weighs 0."""
    edges, special = special_scores()
    adj = edges.adjacency(device)
    tensors = problem(kind, adj, shape, dtype)
    if kind == "dot_product":
        tensors["bias"][:, ::2] += special[:, None].to(device, dtype)
    else:
        tensors["att"][0, 0] = 0.5
        for row, number in ((2, "nan"), (4, "inf"), (6, "-inf"), (14, "nan"), (16, "inf"), (20, "-inf")):
            tensors["x_dst"][row, 0, 0] = float(number)
        tensors["x_src"][[900, 930], 0, 0] = -torch.inf
    compare(kind, adj, tensors, 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_structures_without_rows_edges_or_in_stored_order(kind, device):
    for row, col, shape in (
        ([], [], (0, 0)),
        ([], [], (3, 2)),
        ([0, 0, 2], [1, 0, 1], (3, 2)),
        ([0, 0, 1, 1], [0, 1, 0, 1], (2, 2)),
    ):
        ends = (torch.tensor(x, dtype=torch.int64, device=device) for x in (row, col))
        adj = Adjacency.from_coo(*ends, shape)
        compare(kind, adj, problem(kind, adj, (2, 8, 4), torch.float32), 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_inserted_loops_replace_edges_whose_features_get_no_gradient(kind, device):
    ends = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 1]], device=device)
    adj = Adjacency.from_coo(*ends, (3, 3), self_loops="replace")
    assert adj.num_values > adj.num_edges
    compare(kind, adj, problem(kind, adj, (2, 8, 4), torch.float32), 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_and_second_derivatives(kind, device):
    ends = torch.tensor([[0, 1, 1, 2, 0], [0, 0, 1, 1, 1]], device=device)
    adj = Adjacency.from_coo(*ends, (3, 2))
    tensors = problem(kind, adj, (2, 3, 2), torch.float64)
    names, values = zip(*tensors.items(), strict=True)
    values = [value.requires_grad_() for value in values]

    def call(*given: Tensor) -> Tensor:
        return run(kind, adj, dict(zip(names, given, strict=True)), FAST)

    assert torch.autograd.gradcheck(call, values)
    assert torch.autograd.gradgradcheck(call, values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_may_be_written_to(kind, device):
    adj = graph(device)
    tensors = {k: t.requires_grad_() for k, t in problem(kind, adj, (2, 8, 4), torch.float32).items()}
    expected = torch.autograd.grad(run(kind, adj, tensors, FAST).relu().sum(), list(tensors.values()))
    found = torch.autograd.grad(run(kind, adj, tensors, FAST).relu_().sum(), list(tensors.values()))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_every_time(kind, device):
    adj = graph(device)
    tensors = {k: t.requires_grad_() for k, t in problem(kind, adj, (4, 16, 8), torch.float32).items()}
    results = []
    for _ in range(3):
        torch.manual_seed(0)
        out = run(kind, adj, tensors, FAST, dropout_p=0.2)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(tensors.values()))])
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_unfused_gives_the_same(kind, device):
    adj = graph(device)
    tensors = problem(kind, adj, (2, 8, 40), torch.float32)
    compare(kind, adj, tensors, 4e-6, algorithm="unfused", dropout_p=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_edges_times_width_is_allocated(kind, device):
    """The kernels are called below PyTorch's dispatcher, so the mode sees what they allocate."""
    adj = graph(device)
    heads, width, edge_width = 4, 32, 32
    tensors = {
        name: tensor.requires_grad_()
        for name, tensor in problem(kind, adj, (heads, width, edge_width), torch.float32, False).items()
    }
    adj.t()
    counted = LargestTensor()
    with counted:
        run(kind, adj, tensors, FAST).sum().backward()
    assert adj.num_values * edge_width <= counted.numel < adj.num_values * heads * width


def test_edge_attr_and_edge_weight_are_checked(device):
    adj = graph(device)
    tensors = problem("dot_product", adj, (2, 8, 4), torch.float32, False)
    for change, message in (
        ({"edge_weight": None}, "edge_attr and edge_weight: expected both"),
        ({"edge_attr": tensors["edge_attr"][1:]}, "edge_attr: expected shape"),
        ({"edge_weight": tensors["edge_weight"][:, 1:]}, "edge_weight: expected shape"),
        ({"v": tensors["v"][:, :, 1:]}, "v: expected the width of q and k"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(adj, **(tensors | change))
    with pytest.raises(TypeError, match="edge_attr: expected a floating tensor"):
        attention(adj, **(tensors | {"edge_attr": tensors["edge_attr"].int()}))


def test_weights_of_edges_match_the_reference(device):
    adj = graph(device)
    tensors = problem("dot_product", adj, (2, 8, 4), torch.float64)
    ones = torch.ones_like(tensors["v"])
    zero = {"edge_weight": tensors["edge_weight"] * 0}
    tensors.pop("v")
    weight = attention_weights(adj, **tensors)
    row = adj.row().long()
    position = torch.arange(adj.num_edges) if adj.edge_id is None else adj.edge_id.long().cpu()
    total = torch.zeros(adj.num_dst, 2, dtype=torch.float64).index_add(0, row.cpu(), weight.cpu()[position])
    degree = adj.in_degree().cpu()
    assert torch.allclose(total[degree > 0], torch.ones_like(total[degree > 0]))
    plain = attention_weights(adj, **(tensors | zero))
    without = {name: t for name, t in tensors.items() if not name.startswith("edge")}
    assert torch.allclose(plain, attention_weights(adj, **without))
    assert not torch.allclose(plain, weight)
    assert torch.isfinite(attention(adj, v=ones, **tensors)).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "heads", "width", "edge_width"), [(500, 3, 4, 4), (1, 1, 8, 12), (20_000, 16, 16, 8)]
)
def test_weight_gradient_is_that_of_every_head(num_rows, heads, width, edge_width):
    x, y = (torch.randn(num_rows, heads * width, device="cuda") for _ in range(2))
    e, f = (torch.randn(num_rows, heads, edge_width, device="cuda") for _ in range(2))
    expected = sum(
        torch.einsum("nhd,nha->hda", left.view(num_rows, heads, width).double(), right.double())
        for left, right in ((x, e), (y, f))
    )
    found = _attention_launch._weight_gradient(x, e, y, f, heads)
    assert relative_error(found, expected.reshape(heads * width, edge_width)) < 1e-6
