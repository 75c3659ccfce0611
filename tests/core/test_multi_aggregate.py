"""Several aggregations at once against the float64 reference: results, all gradients, memory, errors."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, TOLERANCE, draw, edge_lists, features, ragged, relative_error
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastsparse_core import Adjacency, multi_aggregate, reference
from fastsparse_core.ops import _multi_aggregate_fused as operator

ALL = ("sum", "mean", "min", "max", "var", "std")
EDGES = ("none", "features", "rows")


def problem(
    adj: Adjacency, width: int, edges: str, dtype: torch.dtype = torch.float32, edge_width: int = 5
) -> dict[str, Tensor]:
    """Differentiable arguments by name."""

    def of(*shape: int, seed: int) -> Tensor:
        return draw(*shape, dtype=dtype, device=str(adj.device), seed=seed)

    tensors = {"x_src": of(adj.num_src, width, seed=0), "x_dst": of(adj.num_dst, width, seed=1)}
    if edges == "features":
        tensors["edge_attr"] = of(adj.num_values, edge_width, seed=2)
        tensors["edge_weight"] = of(width, edge_width, seed=3) / max(edge_width, 1) ** 0.5
    elif edges == "rows":
        tensors["edge_attr"] = of(adj.num_values, width, seed=2)
    return tensors


def compare(
    adj: Adjacency, tensors: dict[str, Tensor], tolerance: float, aggregations=ALL, **options
) -> None:
    """Result and every gradient."""
    dtype = tensors["x_src"].dtype
    wanted = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out = multi_aggregate(adj, aggregations=aggregations, **tensors, **options)
    expected = reference.multi_aggregate(
        adj, aggregations=aggregations, message_dtype=dtype, **wanted, **options
    )
    assert out.dtype == dtype
    assert relative_error(out, expected) < tolerance
    grad = draw(*out.shape, dtype=dtype, device=str(out.device), seed=9)
    found = torch.autograd.grad(out, list(tensors.values()), grad)
    right = torch.autograd.grad(expected, list(wanted.values()), grad.double())
    for name, actual, exact in zip(tensors, found, right, strict=True):
        assert actual.dtype == dtype
        assert relative_error(actual, exact) < 4 * tolerance, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("edges", EDGES)
def test_matches_the_reference_in_every_dtype(edges, dtype, device):
    adj = ragged(4000, device)
    compare(adj, problem(adj, 24, edges, dtype), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("width", [1, 3, 4, 17, 64, 130, 260])
@pytest.mark.parametrize("edges", EDGES)
def test_matches_the_reference_for_every_width(edges, width, device):
    adj = ragged(600, device)
    compare(adj, problem(adj, width, edges, edge_width=1 + width % 32), 4 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("aggregations", [(name,) for name in ALL] + [("std", "max", "mean"), ("min", "sum")])
@pytest.mark.parametrize("edges", EDGES)
def test_any_subset_in_any_order(edges, aggregations, device):
    adj = ragged(600, device)
    tensors = problem(adj, 12, edges)
    if set(aggregations) <= {"var", "std"}:
        del tensors["x_dst"]  # whose gradient is 0 but for rounding
    compare(adj, tensors, 4 * TOLERANCE[torch.float32], aggregations)


@pytest.mark.parametrize("width", [24, 9])
def test_results_of_a_group_lie_side_by_side(width, device):
    adj = ragged(600, device)
    tensors = problem(adj, width, "features")
    compare(adj, tensors, 4 * TOLERANCE[torch.float32], ("max", "mean", "std"), groups=3)
    parts = [
        multi_aggregate(adj, x_src, ("max", "mean"), x_dst=x_dst)
        for x_src, x_dst in zip(tensors["x_src"].chunk(3, 1), tensors["x_dst"].chunk(3, 1), strict=True)
    ]
    whole = multi_aggregate(adj, tensors["x_src"], ("max", "mean"), x_dst=tensors["x_dst"], groups=3)
    assert torch.equal(whole, torch.cat(parts, 1))


@pytest.mark.parametrize("layout", ["row_stride", "misaligned", "transposed", "expanded"])
def test_any_memory_layout(layout, device):
    adj = ragged(600, device)
    tensors = {
        "x_src": features(adj.num_src, 16, torch.float32, layout, device),
        "x_dst": features(adj.num_dst, 16, torch.float32, layout, device, seed=1),
        "edge_attr": features(adj.num_values, 8, torch.float32, layout, device, seed=2),
        "edge_weight": features(16, 8, torch.float32, layout, device, seed=3),
    }
    compare(adj, tensors, 4 * TOLERANCE[torch.float32])


@settings(max_examples=15, deadline=None)
@given(edges=edge_lists())
def test_any_structure(edges):
    adj = edges.adjacency("cpu")
    for kind in EDGES:
        compare(adj, problem(adj, 5, kind, torch.float64), 1e-11)


def test_structures_without_rows_edges_or_in_stored_order(device):
    for row, col, shape in (
        ([], [], (0, 0)),
        ([], [], (3, 2)),
        ([0, 0, 2], [1, 0, 1], (3, 2)),
        ([0, 0, 1, 1], [0, 1, 0, 1], (2, 2)),
    ):
        ends = (torch.tensor(x, dtype=torch.int64, device=device) for x in (row, col))
        adj = Adjacency.from_coo(*ends, shape)
        for kind in EDGES:
            compare(adj, problem(adj, 8, kind), 4e-6)


def test_inserted_loops_replace_edges_that_get_no_gradient(device, poisoned_memory):
    ends = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 1]], device=device)
    adj = Adjacency.from_coo(*ends, (3, 3), self_loops="replace")
    assert adj.num_values > adj.num_edges
    for kind in EDGES:
        compare(adj, problem(adj, 8, kind), 4e-6)


def test_entries_that_share_an_extremum_share_its_gradient(device):
    """Evenly, over the slices of a heavy row too, and where it is 0, as scatter_reduce otherwise does."""
    adj = ragged(4000, device)
    x = draw(adj.num_src, 8, device=device).round().requires_grad_()
    out = multi_aggregate(adj, x, ("max", "min"))
    exact = x.detach().double().requires_grad_()
    expected = reference.multi_aggregate(adj, exact, ("max", "min"))
    assert relative_error(out, expected) < 1e-12
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    (right,) = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    assert relative_error(grad, right) < 1e-6
    shifted = exact.detach().add(10).requires_grad_()
    index = adj.row().long()[:, None].expand(-1, 8)
    torch_max = shifted.new_zeros(adj.num_dst, 8).scatter_reduce(
        0, index, shifted[adj.col.long()], "amax", include_self=False
    )
    (of_torch,) = torch.autograd.grad(torch_max.sum(), shifted)
    (of_ours,) = torch.autograd.grad(multi_aggregate(adj, shifted, ("max",)).sum(), shifted)
    assert relative_error(of_ours, of_torch) < 1e-12


def test_equal_messages_do_not_deviate(device):
    adj = ragged(600, device)
    x = torch.full((adj.num_src, 8), 0.1, device=device, requires_grad=True)
    out = multi_aggregate(adj, x, ("var", "std"), min_variance=0.0)
    assert not out.any()
    (grad,) = torch.autograd.grad(out.sum(), x)
    # The mean may be off by its last bit, which the deviation divides by itself.
    assert grad.abs().max() < 1e-5


def test_variance_survives_a_large_mean(device):
    """The difference of mean squares and squared mean would be off by more than the variance."""
    adj = ragged(4000, device)
    x = draw(adj.num_src, 8, device=device) + 1e4
    out = multi_aggregate(adj, x, ("var",))
    assert relative_error(out, reference.multi_aggregate(adj, x, ("var",))) < 1e-3


def test_nan_is_found_where_it_is(device):
    adj = Adjacency.from_coo(*torch.tensor([[0, 0, 0, 1], [0, 1, 2, 0]], device=device), (2, 3))
    x = torch.tensor([[1.0], [float("nan")], [2.0]], device=device)
    out = multi_aggregate(adj, x, ALL)
    assert out[0].isnan().all()
    assert out[1].tolist() == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("edges", EDGES)
def test_gradcheck_and_second_derivatives(edges, device):
    ends = torch.tensor([[0, 1, 1, 2, 0], [0, 0, 1, 1, 1]], device=device)
    adj = Adjacency.from_coo(*ends, (3, 2))
    names, values = zip(*problem(adj, 3, edges, torch.float64, 2).items(), strict=True)
    values = [value.requires_grad_() for value in values]

    def call(*given: Tensor) -> Tensor:
        return multi_aggregate(adj, aggregations=ALL, **dict(zip(names, given, strict=True)))

    assert torch.autograd.gradcheck(call, values)
    assert torch.autograd.gradgradcheck(call, values)


@pytest.mark.parametrize("edges", EDGES)
def test_same_bits_every_time(edges, device):
    adj = ragged(4000, device)
    tensors = {name: it.requires_grad_() for name, it in problem(adj, 40, edges).items()}

    def run() -> list[Tensor]:
        out = multi_aggregate(adj, aggregations=ALL, **tensors)
        return [out, *torch.autograd.grad(out.square().sum(), list(tensors.values()))]

    assert all(torch.equal(*pair) for pair in zip(run(), run(), strict=True))


@pytest.mark.parametrize("edges", EDGES)
def test_every_result_is_written(edges, device, poisoned_memory):
    adj = ragged(600, device)
    compare(adj, problem(adj, 9, edges), 4 * TOLERANCE[torch.float32])


def test_torch_compile_and_opcheck(device):
    adj = ragged(600, device)
    tensors = {name: it.requires_grad_() for name, it in problem(adj, 8, "features").items()}
    slots = [0, 1, 2, 3, 4, 5]
    arguments = (*tensors.values(), slots, 1, 1e-5, adj.num_dst, adj.handle, False)
    torch.library.opcheck(torch.ops.fastsparse.multi_aggregate.default, arguments)

    def call(x: Tensor) -> Tensor:
        return multi_aggregate(adj, x, ALL) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x = tensors["x_src"]
    assert torch.equal(compiled(x), call(x))
    assert torch.equal(*(torch.autograd.grad(run(x).sum(), x)[0] for run in (compiled, call)))


def test_autocast_takes_its_dtype(device):
    adj = ragged(600, device)
    x = draw(adj.num_src, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert multi_aggregate(adj, x, ("mean",)).dtype == torch.bfloat16


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_message_is_stored(device):
    """The kernels' launches make no tensor of the edges times the width; the mode sees what they allocate."""
    adj = ragged(20_000, device)
    adj.t()
    width, slots = 64, [0, 1, 2, 3, 4, 5]
    tensors = problem(adj, width, "features", edge_width=4)
    with _Largest() as largest:
        given = (*tensors.values(),)
        out, mean, ties = operator.aggregate(adj, *given, slots, 1, 0.0, adj.num_dst, keep=True)
        grad = torch.ones_like(out)
        kept = (out, mean, ties)
        wanted = {f"{name}_wanted": True for name in ("x_src", "x_dst", "edge", "weight")}
        operator.gradients(adj, grad, *given, *kept, slots, 1, 0.0, **wanted)
    assert out.numel() <= largest.elements < adj.num_edges * width


def test_many_edge_features_are_projected_once(device, reasons):
    adj = ragged(600, device)
    tensors = problem(adj, 8, "features", edge_width=40)
    compare(adj, tensors, 4 * TOLERANCE[torch.float32])
    assert reasons.text.count("edges have 40 features, and the fused kernel takes up to 32") == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"aggregations": ("median",)}, ValueError, "aggregations"),
        ({"aggregations": ("max", "max")}, ValueError, "each once"),
        ({"aggregations": ()}, ValueError, "aggregations"),
        ({"groups": 3}, ValueError, "groups"),
        ({"x_src": torch.ones(3, 8)}, ValueError, "x_src"),
        ({"x_src": torch.ones(605, 8, dtype=torch.int64)}, TypeError, "x_src"),
        ({"x_dst": torch.ones(605, 7)}, ValueError, "x_dst"),
        ({"edge_attr": torch.ones(5, 8)}, ValueError, "edge_attr"),
        ({"edge_weight": torch.ones(8, 2)}, ValueError, "edge_weight"),
    ],
    ids=str,
)
def test_bad_input_is_named(change, error, message):
    adj = ragged(600, "cpu")
    arguments = {"x_src": torch.ones(605, 8), "aggregations": ("max",)} | change
    with pytest.raises(error, match=message):
        multi_aggregate(adj, **arguments)
    attr = torch.ones(adj.num_values, 2)
    with pytest.raises(ValueError, match="edge_weight"):
        multi_aggregate(adj, torch.ones(605, 8), ("max",), edge_attr=attr, edge_weight=torch.ones(8, 3))
