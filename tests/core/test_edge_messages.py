"""Messages that meet their edges' features against float64 references: results, gradients, memory, errors."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, TOLERANCE, LargestTensor, draw, features, ragged, relative_error
from torch import Tensor

from fastsparse_core import Adjacency, gated_aggregate, gated_edges, gine_aggregate, reference

#: Operators, and whether edges' features are raw.
KINDS = ("gine", "gine raw", "gated", "gated raw", "gated edges")
OPERATORS = {"gine": gine_aggregate, "gated": gated_aggregate, "gated edges": gated_edges}
REFERENCES = {
    "gine": reference.gine_aggregate,
    "gated": reference.gated_aggregate,
    "gated edges": reference.gated_edges,
}
#: Width and raw features of an edge: lanes of a group from 1 to 8, several tiles, padding of both.
SHAPES = ((1, 1), (8, 4), (20, 3), (33, 8), (64, 32), (130, 5))


def problem(kind: str, adj: Adjacency, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Arguments by name."""
    width, edge_width = shape
    device = str(adj.device)

    def of(rows: int, columns: int, seed: int) -> Tensor:
        return draw(rows, columns, dtype=dtype, device=device, seed=seed)

    raw = of(adj.num_values, edge_width, 3)
    if kind.startswith("gine"):
        x = {"x": of(adj.num_src, width, 0)}
        if kind == "gine":
            return x | {"edge_attr": of(adj.num_values, width, 3)}
        maps = {"edge_weight": of(width, edge_width, 4) / edge_width, "edge_bias": of(1, width, 5)[0]}
        return x | {"edge_attr": raw} | maps
    ends = {"k": of(adj.num_dst, width, 0), "q": of(adj.num_src, width, 1), "v": of(adj.num_src, width, 2)}
    if kind == "gated edges":
        return ends | {"edge": of(adj.num_values, width, 3)}
    if kind == "gated":
        return ends
    return ends | {
        "edge_attr": raw,
        "gate_weight": of(width, edge_width, 4) / edge_width,
        "value_weight": of(width, edge_width, 5) / edge_width,
    }


def results(functions, kind: str, adj: Adjacency, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    out = functions[kind.removesuffix(" raw")](adj, **tensors)
    return out if isinstance(out, tuple) else (out,)


def everything(functions, kind: str, adj: Adjacency, tensors: dict[str, Tensor]) -> list[Tensor]:
    """Results and the gradients of all tensors."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out = results(functions, kind, adj, leaves)
    upstream = [
        draw(*x.shape, dtype=torch.float64, device=str(x.device), seed=9 + n).to(x) for n, x in enumerate(out)
    ]
    return [*(x.detach() for x in out), *torch.autograd.grad(out, list(leaves.values()), upstream)]


def compare(kind: str, adj: Adjacency, tensors: dict[str, Tensor], tolerance: float) -> None:
    dtype = next(iter(tensors.values())).dtype
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    found = everything(OPERATORS, kind, adj, tensors)
    for number, (got, want) in enumerate(zip(found, everything(REFERENCES, kind, adj, exact), strict=True)):
        assert got.dtype == dtype
        assert relative_error(got, want) < tolerance, number


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("poisoned_memory")
def test_matches_the_reference_in_every_dtype(kind, dtype, device):
    adj = ragged(4000, device)
    # Signs of numbers that rounding moves across 0 are those of the rounded ones.
    compare(kind, adj, problem(kind, adj, (32, 8), dtype), 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_reference_for_every_width(kind, shape, device):
    adj = ragged(600, device)
    compare(kind, adj, problem(kind, adj, shape, torch.float32), 4e-6)
    if device == "cuda":
        compare(kind, adj, problem(kind, adj, shape, torch.float16), 4e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["row_stride", "misaligned", "transposed", "expanded"])
def test_any_memory_layout(kind, layout, device):
    adj = ragged(600, device)
    tensors = problem(kind, adj, (16, 4), torch.float32)
    for number, (name, tensor) in enumerate(tensors.items()):
        if tensor.dim() == 2:
            tensors[name] = features(*tensor.shape, torch.float32, layout, device, seed=number)
    compare(kind, adj, tensors, 1e-5)  # equal terms are rounded the same way


@pytest.mark.parametrize("kind", KINDS)
def test_structures_without_rows_edges_or_in_stored_order(kind, device):
    for row, col, shape in (
        ([], [], (0, 0)),
        ([], [], (3, 2)),
        ([0, 0, 2], [1, 0, 1], (3, 2)),
        ([0, 0, 1, 1], [0, 1, 0, 1], (2, 2)),
    ):
        adj = adj_of(row, col, shape, device)
        compare(kind, adj, problem(kind, adj, (8, 4), torch.float32), 2e-6)


def adj_of(row, col, shape, device: str) -> Adjacency:
    ends = (torch.tensor(x, dtype=torch.int64, device=device) for x in (row, col))
    return Adjacency.from_coo(*ends, shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("poisoned_memory")
def test_inserted_loops_replace_edges_whose_features_get_no_gradient(kind, device):
    ends = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 1]], device=device)
    adj = Adjacency.from_coo(*ends, (3, 3), self_loops="replace")
    assert adj.num_values > adj.num_edges
    compare(kind, adj, problem(kind, adj, (8, 4), torch.float32), 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_and_second_derivatives(kind, device):
    adj = adj_of([0, 1, 1, 2, 0], [0, 0, 1, 1, 1], (3, 2), device)
    names, values = zip(*problem(kind, adj, (3, 2), torch.float64).items(), strict=True)
    values = [value.requires_grad_() for value in values]

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        return results(OPERATORS, kind, adj, dict(zip(names, given, strict=True)))

    assert torch.autograd.gradcheck(call, values)
    assert torch.autograd.gradgradcheck(call, values)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_nobody_wants(kind, device):
    """Each tensor alone, of a result alone: what is left out changes nothing."""
    adj = ragged(600, device)
    tensors = problem(kind, adj, (16, 4), torch.float32)
    plain = results(OPERATORS, kind, adj, tensors)
    for number, out in enumerate(plain):
        for name in tensors:
            found = []
            for wanted in ([name], list(tensors)):
                given = {key: tensor.clone().requires_grad_(key in wanted) for key, tensor in tensors.items()}
                chosen = results(OPERATORS, kind, adj, given)[number]
                assert torch.equal(chosen, out)
                if chosen.requires_grad:
                    found += torch.autograd.grad(chosen.square().sum(), given[name], allow_unused=True)
            assert all(x is None or torch.equal(x, found[-1]) for x in found)


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_every_time(kind, device):
    adj = ragged(4000, device)
    tensors = problem(kind, adj, (40, 8), torch.float32)
    first, *others = (everything(OPERATORS, kind, adj, tensors) for _ in range(3))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("kind", ["gine raw", "gated", "gated raw"])
def test_nothing_of_edges_times_width_is_allocated(kind, device):
    """The kernels are called below PyTorch's dispatcher, so the mode sees what they allocate."""
    adj = ragged(4000, device)
    width, edge_width = 128, 32
    tensors = {
        k: t.requires_grad_() for k, t in problem(kind, adj, (width, edge_width), torch.float32).items()
    }
    adj.t()
    counted = LargestTensor()
    with counted:
        results(OPERATORS, kind, adj, tensors)[0].sum().backward()
    assert counted.numel < adj.num_values * width


def test_many_raw_features_are_projected_once_or_run_step_by_step(device, reasons):
    adj = ragged(600, device)
    compare("gine raw", adj, problem("gine raw", adj, (16, 40), torch.float32), 4e-6)
    assert not reasons.text
    for _ in range(2):
        compare("gated raw", adj, problem("gated raw", adj, (16, 40), torch.float32), 4e-6)
    assert reasons.text.count("edges have 40 features, and the fused kernel takes up to 32") == 1


@pytest.mark.parametrize("kind", ["gine", "gated"])
def test_numbers_that_are_not_finite_stay_in_their_rows(kind, device):
    adj = adj_of([0, 0, 1, 2], [0, 1, 1, 2], (3, 3), device)
    tensors = problem(kind, adj, (8, 4), torch.float32)
    tensors["x" if kind == "gine" else "v"][0] = torch.inf
    for name, tensor in tensors.items():
        tensor[-1] = torch.nan if name != "edge_attr" else 0
    found = everything(OPERATORS, kind, adj, tensors)
    want = everything(REFERENCES, kind, adj, {name: tensor.double() for name, tensor in tensors.items()})
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected.float(), equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_operators_are_sound(kind, device):
    """Schema, fake results and gradients as PyTorch wants them, which torch.compile relies on."""
    adj = ragged(600, device)
    t = [x.requires_grad_() for x in problem(kind, adj, (16, 4), torch.float32).values()]
    ops = torch.ops.fastsparse
    name, arguments = {
        "gine": ("gine_aggregate", (*t, None, None, adj.num_dst, adj.handle, False)),
        "gine raw": ("gine_aggregate", (*t, adj.num_dst, adj.handle, False)),
        "gated": ("gated_aggregate", (*t, None, None, None, adj.handle, False)),
        "gated raw": ("gated_aggregate", (*t, adj.handle, False)),
        "gated edges": ("gated_edges", (*t, adj.handle)),
    }[kind]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(getattr(ops, name).default, arguments, test_utils=checks)


def test_bad_input(device):
    adj = ragged(600, device)
    t = problem("gine raw", adj, (16, 4), torch.float32)
    for change, error, message in (
        ({"x": t["x"][1:]}, ValueError, "x: expected num_src"),
        ({"x": t["x"][:, :, None]}, ValueError, "x: expected .num_src, F"),
        ({"edge_attr": t["edge_attr"][1:]}, ValueError, "edge_attr: expected shape"),
        ({"edge_attr": t["edge_attr"].double()}, TypeError, "edge_attr: expected the dtype"),
        ({"edge_attr": t["edge_attr"].int()}, TypeError, "edge_attr: expected a floating tensor"),
        ({"edge_weight": None}, ValueError, "edge_attr: expected shape"),
        ({"edge_weight": t["edge_weight"][:, 1:]}, ValueError, "edge_weight: expected shape"),
        ({"edge_bias": t["edge_bias"][1:]}, ValueError, "edge_bias: expected shape"),
    ):
        with pytest.raises(error, match=message):
            gine_aggregate(adj, **(t | change))
    t = problem("gine", adj, (16, 4), torch.float32)
    with pytest.raises(ValueError, match="edge_bias: expected None"):
        gine_aggregate(adj, **t, edge_bias=t["x"][0])
    t = problem("gated raw", adj, (16, 4), torch.float32)
    for change, error, message in (
        ({"v": t["v"][:, 1:]}, ValueError, "v: expected the width of q"),
        ({"k": t["k"].double()}, TypeError, "k: expected the dtype of q"),
        ({"value_weight": None}, ValueError, "expected all of them or none"),
    ):
        with pytest.raises(error, match=message):
            gated_aggregate(adj, **(t | change))
    t = problem("gated edges", adj, (16, 4), torch.float32)
    with pytest.raises(ValueError, match="edge: expected shape"):
        gated_edges(adj, **(t | {"edge": t["edge"][:, 1:]}))
    with pytest.raises(TypeError, match="adj: expected an Adjacency"):
        gated_edges(None, **t)
