"""Plans of messages of several rows per edge, as PaiNN's: by kernels on CUDA, else by PyTorch's operators."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_pyg_message_plan import Painn, SchNet, check_forces
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter

from fastsparse_core.message_plans import terms
from fastsparse_core.message_plans.plan import Planner
from fastsparse_core.ops import edge_expression
from fastsparse_core.ops._edge_kernels import Leaf, Root
from fastsparse_pyg import accelerate
from fastsparse_pyg.nn import any_layer
from fastsparse_pyg.nn.message_planner import planned

NODES, EDGES, WIDTH, BASIS = 12, 40, 33, 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as on a GPU for few edges, too."""
    monkeypatch.setattr(any_layer, "FEW_EDGES", 0)
    monkeypatch.setattr(any_layer, "are_few_on_gpu", lambda *_: False)
    monkeypatch.setattr(any_layer, "is_new", lambda *_: False)
    if request.node.get_closest_marker("gpu") is not None:
        return
    begin = Planner.__init__

    def generating(planner: Any, *args: Any, **options: Any) -> None:
        begin(planner, *args, **options)
        planner.generates = True

    def unfused(adj: Any, roots: Any, places: Any, tensors: Any) -> tuple[Tensor, ...]:
        leaves = [Leaf(place) for place in places]
        return edge_expression.unfused(adj, [Root(*root) for root in roots], leaves, tensors)

    monkeypatch.setattr(Planner, "__init__", generating)
    monkeypatch.setattr(terms, "edge_expressions", unfused)


class Layer(MessagePassing):
    """Hands over what `message` asks for."""

    width = WIDTH

    def __init__(self, aggr: str) -> None:
        super().__init__(aggr=aggr, node_dim=0)
        torch.manual_seed(0)
        self.filter, self.narrow = nn.Linear(BASIS, 3 * WIDTH), nn.Linear(BASIS, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(BASIS, 6), nn.SiLU(), nn.Linear(6, 3 * WIDTH))
        self.scale, self.bias = nn.Parameter(torch.randn(3, 1)), nn.Parameter(torch.randn(1, 3, WIDTH))
        self.row = nn.Parameter(torch.randn(WIDTH))

    def forward(self, edge_index: Tensor, inputs: dict[str, Any]) -> Tensor:
        names = {
            name.removesuffix("_i").removesuffix("_j") for name in inspect.signature(self.message).parameters
        }
        return self.propagate(edge_index, **{name: inputs[name] for name in sorted(names)})


def painn(self, phi_j, v_j, basis, direction):
    first, second, third = (phi_j * self.filter(basis)).split(self.width, -1)
    vectors = v_j * second.unsqueeze(1) + third.unsqueeze(1) * direction.unsqueeze(-1)
    return torch.cat([first.unsqueeze(1), vectors], 1)


def painn_side_by_side(self, phi_j, v_j, basis, direction):
    first, second, third = torch.split(phi_j * self.filter(basis), self.width, dim=-1)
    vectors = v_j * second[:, None] + third[:, None, :] * direction[..., None]
    return torch.cat([first, vectors.reshape(-1, 3 * self.width)], dim=-1)


def painn_by_chunks_of_an_mlp(self, phi_j, v_j, basis, direction):
    first, second, third = (phi_j * self.mlp(basis)).chunk(3, dim=-1)
    return torch.cat([(first[:, None] + v_j) * second[:, None], (third[:, None] * direction[:, :, None])], 1)


def vectors_alone(self, v_j, basis, direction):
    return v_j * self.narrow(basis).unsqueeze(1) + direction.unsqueeze(-1)


def filters_by_slices(self, v_j, phi_j, basis):
    weights = torch.tanh(self.filter(basis))
    return v_j * weights[:, : self.width].unsqueeze(1) + phi_j[..., self.width : 2 * self.width].unsqueeze(1)


def gates_of_both_ends(self, v_i, v_j, x_i, x_j):
    return (v_i - v_j) ** 2 * torch.sigmoid(x_i + x_j).unsqueeze(1)


def filters_in_shape(self, v_j, basis):
    return v_j * F.silu(self.filter(basis).view(-1, 3, self.width))


def constants_of_each_kind(self, v_j, x_i):
    return (v_j * self.scale + self.bias) * x_i.unsqueeze(1) * 0.5 - self.row


def stacked(self, x_i, x_j, basis):
    filters = self.narrow(basis)
    return torch.stack([x_j * filters, x_i * filters, torch.exp(-filters) + x_j], dim=1)


def matrices(self, t_j, x_j):
    return t_j * x_j[:, None, None, :]


def direction_made_here(self, pos_i, pos_j, v_j, x_j):
    difference = pos_i - pos_j
    unit = difference / (difference.square().sum(-1, keepdim=True) + 1).sqrt()
    return v_j + unit.unsqueeze(-1) * x_j.unsqueeze(1)


def whole_filter_read_twice(self, phi_j, basis):
    weights = phi_j * self.filter(basis)
    return weights.view(-1, 3, self.width) * weights[:, : self.width].unsqueeze(1)


BODIES = (
    *(painn, painn_side_by_side, painn_by_chunks_of_an_mlp, vectors_alone, filters_by_slices),
    *(gates_of_both_ends, filters_in_shape, constants_of_each_kind, stacked, matrices),
    *(direction_made_here, whole_filter_read_twice),
)
#: Messages whose rows are made per edge; they are reduced without a generated kernel.
PER_EDGE = (whole_filter_read_twice,)


def problem(
    device: str, edges: int = EDGES, nodes: int = NODES, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, dict[str, Any]]:
    """Random edges, none at the last nodes, and features that want gradients."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(max(nodes - 2, 1), (2, edges), generator=generator)
    sizes = {
        "x": (nodes, WIDTH),
        "phi": (nodes, 3 * WIDTH),
        "v": (nodes, 3, WIDTH),
        "t": (nodes, 2, 2, WIDTH),
        "pos": (nodes, 3),
        "basis": (edges, BASIS),
        "direction": (edges, 3),
    }
    return edge_index.to(device), {
        name: torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for name, size in sizes.items()
    }


def make(body: Callable[..., Tensor], aggr: str, device: str) -> tuple[Layer, Any]:
    message = types.FunctionType(body.__code__, body.__globals__, "message", body.__defaults__)
    layer: Any = type(body.__name__, (Layer,), {"message": message, "__module__": __name__})(aggr)
    layer = layer.to(device, torch.float64)
    fast = nn.ModuleList([copy.deepcopy(layer)])
    accelerate(fast, show=False)
    return layer, fast[0]


def derivatives(layer: nn.Module, edge_index: Tensor, inputs: dict[str, Tensor]) -> list[Tensor | None]:
    """The result, its gradients, and those of a loss of the result and some of the gradients."""
    out = layer(edge_index, inputs)
    given = [*inputs.values(), *layer.parameters()]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    loss = (out.tanh() * weights).sum()
    first = torch.autograd.grad(loss, given, create_graph=True, allow_unused=True)
    of_edges = ("pos", "basis", "direction")
    forces = [
        each for name, each in zip(inputs, first, strict=False) if name in of_edges and each is not None
    ]
    (forces,) = (forces or [each for each in first if each is not None],)
    penalty = loss + sum(each.square().sum() for each in forces)
    return [out, *first, *torch.autograd.grad(penalty, given, allow_unused=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("body", BODIES)
def test_rows_of_vectors(body: Callable[..., Tensor], device: str):
    """On nodes without edges, and of a width that is no power of two."""
    layer, fast = make(body, "sum", device)
    edge_index, inputs = problem(device)
    for got, want in zip(
        derivatives(fast, edge_index, inputs), derivatives(layer, edge_index, inputs), strict=True
    ):
        assert (got is None) == (want is None)
        if want is not None:
            assert got.shape == want.shape
            assert (got - want).norm() <= 1e-11 * want.norm().clamp(min=1)
    plan = planned.get(fast)
    assert ("one generated kernel" in getattr(plan, "gains", ())) == (body not in PER_EDGE), plan


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_other_reductions_of_vectors(aggr: str):
    for body in (painn, stacked):
        layer, fast = make(body, aggr, "cpu")
        edge_index, inputs = problem("cpu")
        for got, want in zip(
            derivatives(fast, edge_index, inputs), derivatives(layer, edge_index, inputs), strict=True
        ):
            assert want is None or (got - want).norm() <= 1e-11 * want.norm().clamp(min=1)
        assert ("one generated kernel" in getattr(planned.get(fast), "gains", ())) == (aggr == "mean")


def test_random_sizes_and_no_edges():
    layer, fast = make(painn, "sum", "cpu")
    for nodes, edges in ((1, 1), (3, 30), (5, 6), (4, 0)):
        edge_index, inputs = problem("cpu", edges, nodes)
        out = fast(edge_index, inputs)
        torch.testing.assert_close(out, layer(edge_index, inputs))
        out.sum().backward()
        assert inputs["basis"].grad.shape == (edges, BASIS)


def test_gradients_by_finite_differences():
    _, fast = make(painn, "sum", "cpu")
    edge_index, inputs = problem("cpu", 6, 5)
    fast.filter.requires_grad_(False)
    names = ("basis", "direction")

    def run(*given: Tensor) -> Tensor:
        return fast(edge_index, {**inputs, **dict(zip(names, given, strict=True))})[:, :, :2]

    given = tuple(inputs[name] for name in names)
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vectors_of_narrow_dtypes(dtype: torch.dtype):
    layer, fast = make(painn, "sum", "cuda")
    edge_index, inputs = problem("cuda", 3000, 100, dtype)
    got = derivatives(fast.to(dtype), edge_index, inputs)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    want = derivatives(layer.to(dtype).double(), edge_index, exact)
    limit = 1e-5 if dtype == torch.float32 else 5e-2
    for each, best in zip(got[:8], want[:8], strict=True):  # second derivatives add further rounding
        assert best is None or (each.double() - best).norm() <= limit * best.norm().clamp(min=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [SchNet, Painn])
def test_energies_and_forces_by_plans(
    block: type[MessagePassing], device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("test_pyg_message_plan.ALL", 32)
    monkeypatch.setattr(Painn, "width", 32)
    torch.manual_seed(0)
    layer = nn.ModuleList([block(), block()]).double().to(device)
    fast = copy.deepcopy(layer)
    accelerate(fast, show=False)
    pos = torch.randn(20, 3, dtype=torch.float64, device=device)
    x = torch.randn(20, 32, dtype=torch.float64, device=device)
    edge_index = torch.randint(18, (2, 70), device=device)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]

    check_forces(layer, fast, pos, x, edge_index)
    assert all("one generated kernel" in planned.get(each).gains for each in fast)


class OwnReductions(Layer):
    """As TorchMD-Net writes it: two messages, which the layer's own `aggregate` sums."""

    def forward(self, edge_index: Tensor, inputs: dict[str, Any]) -> Tensor:
        names = ("phi", "v", "basis", "direction")
        x, vectors = self.propagate(edge_index, **{name: inputs[name] for name in names})
        return torch.cat([x.unsqueeze(1), vectors], 1)

    def message(self, phi_j, v_j, basis, direction):
        first, second, third = (phi_j * self.filter(basis)).split(self.width, -1)
        return first, v_j * second.unsqueeze(1) + third.unsqueeze(1) * direction.unsqueeze(2)

    def aggregate(self, features, index, ptr, dim_size):
        x, vectors = features
        x = scatter(x, index, dim=self.node_dim, dim_size=dim_size)
        return x * 2, scatter(vectors, index, dim=self.node_dim, dim_size=dim_size, reduce=self.aggr)

    def update(self, inputs):
        return inputs


class OwnReductionsOfOne(OwnReductions):
    """One message, reduced twice; features of destinations join the result."""

    def message(self, v_j, basis, phi_j):
        return v_j * self.narrow(basis).unsqueeze(1) * phi_j[:, None, : self.width]

    def aggregate(self, inputs, index, dim_size, v_i=None):
        total = scatter(inputs, index, 0, dim_size, "add")
        return total[:, 0], total / (1 + scatter(inputs, index, 0, dim_size, "mean").square())


class SizedItself(OwnReductions):
    """The number of rows is that of the indices: there is no plan."""

    def aggregate(self, features, index):
        rows = [scatter(each, index, dim=0) for each in features]
        return [F.pad(each, [0, 0] * (each.dim() - 1) + [0, NODES - each.size(0)]) for each in rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [OwnReductions, OwnReductionsOfOne, SizedItself])
def test_messages_that_a_layer_reduces_itself(kind: type[Layer], device: str):
    layer = kind("mean").to(device, torch.float64)
    fast = copy.deepcopy(layer)
    accelerate(fast, show=False)
    edge_index, inputs = problem(device)
    for got, want in zip(
        derivatives(fast, edge_index, inputs), derivatives(layer, edge_index, inputs), strict=True
    ):
        assert (got is None) == (want is None)
        assert want is None or (got - want).norm() <= 1e-11 * want.norm().clamp(min=1)
    assert ("one generated kernel" in getattr(planned.get(fast), "gains", ())) == (kind is not SizedItself)
