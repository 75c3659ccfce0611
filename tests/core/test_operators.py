"""Every operator of the table: results and gradients against float64, derivatives, same bits, bad input."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, LargestTensor, features, ragged, random_graph, relative_error
from operator_cases import (
    ATTENTION,
    BAD,
    COMPARED,
    DIFFERENTIABLE,
    MESSAGES,
    MULTI,
    RIGHT,
    Operator,
    each_operator,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastsparse_core import Adjacency

#: One case for each of PyTorch's operators.
OPERATORS = [op for op in DIFFERENTIABLE if "scatter" not in op.name and "gather csr" not in op.name]


def adjacency(row: list[int], col: list[int], shape: tuple[int, int], device: str, **how: str) -> Adjacency:
    ends = (torch.tensor(x, dtype=torch.int64, device=device) for x in (row, col))
    return Adjacency.from_coo(*ends, shape, **how)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_operator(COMPARED)
@pytest.mark.usefixtures("poisoned_memory")
def test_matches_the_reference_in_every_dtype(op: Operator, dtype: torch.dtype, device: str) -> None:
    adj = ragged(4000, device)
    op.compare(adj, op.make(adj, op.shape, dtype), op.digits.dtypes)


@pytest.mark.parametrize(
    ("op", "shape"),
    [pytest.param(op, shape, id=f"{op.name}-{shape}") for op in COMPARED for shape in op.shapes],
)
def test_matches_the_reference_for_every_shape(op: Operator, shape: tuple[int, ...], device: str) -> None:
    adj = ragged(op.num_edges, device)
    options = {"dropout_p": 0.3} if op in ATTENTION else {}
    op.compare(adj, op.make(adj, shape, torch.float32), op.digits.shapes, **options)
    if device == "cuda" and op not in MULTI:
        op.compare(adj, op.make(adj, shape, torch.float16), op.digits.shapes, **options)


@pytest.mark.parametrize("layout", ["row_stride", "misaligned", "transposed", "expanded"])
@each_operator([*MESSAGES, *MULTI])
def test_any_memory_layout(op: Operator, layout: str, device: str) -> None:
    adj = ragged(600, device)
    tensors = op.make(adj, (16, 4), torch.float32)
    for number, (name, tensor) in enumerate(tensors.items()):
        if tensor.dim() == 2:
            tensors[name] = features(*tensor.shape, torch.float32, layout, device, seed=number)
    op.compare(adj, tensors, op.digits.layouts)  # equal terms are rounded in the same way


@each_operator(COMPARED)
@pytest.mark.usefixtures("poisoned_memory")
def test_structures_without_rows_edges_or_in_stored_order(op: Operator, device: str) -> None:
    shape = (2, 8, 4) if op in ATTENTION else (8, 4)
    for row, col, size in (
        ([], [], (0, 0)),
        ([], [], (3, 2)),
        ([0, 0, 2], [1, 0, 1], (3, 2)),
        ([0, 0, 1, 1], [0, 1, 0, 1], (2, 2)),
    ):
        adj = adjacency(row, col, size, device)
        op.compare(adj, op.make(adj, shape, torch.float32), op.digits.structures)


@each_operator(COMPARED)
@pytest.mark.usefixtures("poisoned_memory")
def test_inserted_loops_replace_edges_whose_features_get_no_gradient(op: Operator, device: str) -> None:
    adj = adjacency([0, 1, 1, 2], [0, 0, 1, 1], (3, 3), device, self_loops="replace")
    assert adj.num_values > adj.num_edges
    shape = (2, 8, 4) if op in ATTENTION else (8, 4)
    op.compare(adj, op.make(adj, shape, torch.float32), op.digits.structures)


@each_operator(DIFFERENTIABLE)
def test_derivatives(op: Operator, device: str) -> None:
    """First and second ones by differences; repeated edges, an empty row, values that no entry has."""
    row, col = [2, 0, 1, 1, 3, 1, 0, 2], [0, 1, 1, 2, 3, 1, 4, 5]
    adj = adjacency(row, col, (5, 6), device, self_loops="replace")
    names, values = zip(*op.make(adj, op.small, torch.float64).items(), strict=True)
    values = [value.requires_grad_() for value in values]

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        return op.results(op.call, adj, dict(zip(names, given, strict=True)))

    assert torch.autograd.gradcheck(call, values, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, values)


@each_operator(COMPARED)
def test_same_bits_every_time(op: Operator, device: str) -> None:
    adj, runs = ragged(4000, device), []
    tensors = op.make(adj, (4, 16, 8) if op in ATTENTION else (40, 8), torch.float32)
    for _ in range(3):
        torch.manual_seed(0)
        runs.append(op.everything(op.call, adj, tensors, **({"dropout_p": 0.2} if op in ATTENTION else {})))
    for others in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], others, strict=True))


@each_operator([op for op in COMPARED if op.lean])
def test_nothing_of_edges_times_width_is_allocated(op: Operator, device: str) -> None:
    """The kernels are called below PyTorch's dispatcher, so the mode sees what they allocate."""
    adj, shape = ragged(4000, device), op.lean
    assert shape is not None
    tensors = op.make(adj, shape, torch.float32)
    tensors.pop("bias", None)
    tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    adj.t()
    counted = LargestTensor()
    with counted:
        op.results(op.call, adj, tensors)[0].sum().backward()
    width = shape[0] * shape[1] if op in ATTENTION else shape[0]
    assert counted.numel < adj.num_values * width


@each_operator(ATTENTION)
def test_a_result_may_be_written_to(op: Operator, device: str) -> None:
    adj = ragged(4000, device)
    tensors = {name: x.requires_grad_() for name, x in op.make(adj, (2, 8, 4), torch.float32).items()}
    found = [
        torch.autograd.grad(relu(op.call(adj, **tensors)).sum(), list(tensors.values()))
        for relu in (torch.relu, torch.relu_)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("operator", "change", "error", "message"),
    [(operator, *row) for operator, rows in BAD.items() for row in rows],
    ids=lambda it: it.__name__ if callable(it) else ",".join(it) if isinstance(it, dict) else "",
)
def test_bad_input(operator, change, error, message) -> None:
    adj = random_graph().adjacency("cpu")
    operator(adj, **RIGHT[operator])
    with pytest.raises(error, match=message):
        operator(adj, **(RIGHT[operator] | change))


@pytest.mark.parametrize("operator", RIGHT, ids=lambda operator: operator.__name__)
def test_an_edge_list_is_no_structure(operator) -> None:
    message = r"adj: expected an Adjacency, got Tensor; make one with Adjacency\.from_coo"
    with pytest.raises(TypeError, match=message):
        operator(torch.tensor([[0, 1], [1, 0]]), **RIGHT[operator])


class Called(TorchDispatchMode):
    """Calls of this package's operators, which pass the dispatcher where a mode watches."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fastsparse":
            assert not kwargs
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


@each_operator(OPERATORS)
@pytest.mark.usefixtures("fresh_compiler")
def test_opcheck(op: Operator, device: str) -> None:
    """Schema, fake results and gradients as PyTorch wants them, of a call and of its backward pass."""
    adj = ragged(600, device).prepare()
    tensors = {name: x.requires_grad_() for name, x in op.make(adj, op.small, torch.float32).items()}
    with Called() as forward:
        out = op.results(op.call, adj, tensors, **({"dropout_p": 0.3} if op in ATTENTION else {}))
    with Called() as backward:
        torch.autograd.grad(sum(x.square().sum() for x in out), list(tensors.values()))
    assert forward.calls
    for function, args in forward.calls + backward.calls:
        is_gradient = (
            "backward" in function.name() or "grad" in function.name()
        )  # some of their outputs are aliases
        given = [it.detach() if isinstance(it, Tensor) else it for it in args]
        for it in given:
            if isinstance(it, Tensor) and it.is_floating_point():
                it.requires_grad_(not is_gradient)
        checks = ["test_schema", *(["test_faketensor", "test_autograd_registration"] * (not is_gradient))]
        torch.library.opcheck(function, tuple(given), test_utils=checks)


@each_operator(OPERATORS)
@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_without_graph_breaks(op: Operator, device: str) -> None:
    adj = ragged(600, device).prepare()
    adj.bsb  # noqa: B018, built on a GPU only
    names, values = zip(*op.make(adj, op.small, torch.float32).items(), strict=True)
    values = [value.requires_grad_() for value in values]

    def model(adj: Adjacency, *given: Tensor) -> Tensor:
        tensors = {name: x * 2 for name, x in zip(names, given, strict=True)}
        return torch.cat([x.tanh().flatten() for x in op.results(op.call, adj, tensors)])

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        out, expected = compiled(adj, *values), model(adj, *values)
        assert relative_error(out, expected) < 1e-6
        found = [torch.autograd.grad(result.square().sum(), values) for result in (out, expected)]
        for got, want in zip(*found, strict=True):
            assert relative_error(got, want) < 1e-5
