"""Messages as people write them against PyG's code in float64: results, gradients, what computes them."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

from fastsparse_core.message_plans.plan import Plan, Planner
from fastsparse_pyg import accelerate
from fastsparse_pyg.layer_swap import kernel_of
from fastsparse_pyg.nn import any_layer
from fastsparse_pyg.nn.any_layer import AnyLayer
from fastsparse_pyg.nn.message_planner import planned

NODES, EDGES, HEADS, WIDTH, EDGE_WIDTH = 300, 5000, 3, 4, 5
ALL = HEADS * WIDTH
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Layer(MessagePassing):
    """Hands over what `message` asks for."""

    heads, width = HEADS, WIDTH

    def __init__(self, message_aggr: str) -> None:
        super().__init__(aggr=message_aggr, node_dim=0)
        torch.manual_seed(0)
        self.lin, self.other = nn.Linear(ALL, 6), nn.Linear(ALL, 6, bias=False)
        self.square, self.last = nn.Linear(ALL, ALL), nn.Linear(ALL, 2)
        self.of_edge, self.of_edge_biased = nn.Linear(EDGE_WIDTH, ALL, bias=False), nn.Linear(EDGE_WIDTH, ALL)
        self.both = nn.Linear(2 * ALL, 6)
        self.all = nn.Linear(2 * ALL + EDGE_WIDTH, ALL)
        self.mlp = nn.Sequential(nn.Linear(2 * ALL + EDGE_WIDTH, 8), nn.ReLU(), nn.Linear(8, 7))
        self.deep = nn.Sequential(
            nn.Linear(2 * ALL, 8), nn.SiLU(), nn.Linear(8, 8), nn.ELU(), nn.Linear(8, 3)
        )
        self.plain_mlp = nn.Sequential(nn.Linear(ALL, 8), nn.LeakyReLU(0.3), nn.Dropout(0.0), nn.Linear(8, 5))
        self.normed = nn.Sequential(nn.Linear(2 * ALL, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.filter = nn.Sequential(nn.Linear(EDGE_WIDTH, 8), nn.Softplus(), nn.Linear(8, ALL))
        self.in_place = nn.Sequential(nn.ELU(inplace=True), nn.Tanh())
        self.pyg_lin = gnn.Linear(ALL, 6)
        self.kinds = nn.Embedding(4, ALL)
        self.att = nn.Parameter(torch.randn(1, HEADS, WIDTH))
        self.att_both = nn.Parameter(torch.randn(1, HEADS, 2 * WIDTH))
        self.att_wide, self.att_row = nn.Parameter(torch.randn(2 * ALL)), nn.Parameter(torch.randn(1, ALL))
        self.bias, self.scalar = nn.Parameter(torch.randn(ALL)), nn.Parameter(torch.randn(()))
        self.p = 0.0

    def forward(self, edge_index: Tensor, inputs: dict[str, Any]) -> Tensor:
        names = {
            name.removesuffix("_i").removesuffix("_j") for name in inspect.signature(self.message).parameters
        }
        out = self.propagate(edge_index, **{name: inputs[name] for name in sorted(names & set(inputs))})
        return out.flatten(1)


# Attention.


def gat_one_head(self, x_i, x_j, index):
    alpha = F.leaky_relu((torch.cat([x_i, x_j], dim=-1) * self.att_wide).sum(dim=-1), 0.2)
    return softmax(alpha, index).unsqueeze(-1) * x_j


def gat_heads(self, h_i, h_j, index, ptr, size_i):
    alpha = (torch.cat([h_i, h_j], dim=-1) * self.att_both).sum(dim=-1)
    alpha = softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i)
    alpha = F.dropout(alpha, p=self.p, training=self.training)
    return h_j * alpha.view(-1, self.heads, 1)


def gat_two_vectors(self, h_i, h_j, index, size_i):
    alpha = (h_i * self.att).sum(-1) + (h_j * self.att).sum(-1)
    return softmax(F.leaky_relu(alpha), index, num_nodes=size_i)[..., None] * h_j


def gat_scores_of_nodes(self, s_i, s_j, h_j, index):
    return softmax(F.leaky_relu(s_i + s_j, 0.1), index)[:, :, None] * h_j


def gat_scores_of_edges(self, s_i, s_j, wh, h_j, index):
    return softmax(F.leaky_relu(s_i + s_j + wh, 0.1), index).unsqueeze(2) * h_j


def scores_without_leaky_relu(self, s_i, s_j, h_j, index):
    return h_j * softmax(s_i - 2 * s_j, index).unsqueeze(-1)


def scores_of_sources(self, s_j, h_j, index):
    return h_j * softmax(s_j, index).unsqueeze(-1)


def attention_with_edges(self, h_i, q_j, k_j, ea, index, size_i):
    edge = self.of_edge(ea).view(-1, self.heads, self.width)
    key = k_j + edge
    alpha = softmax((h_i * key).sum(dim=-1) / math.sqrt(self.width), index, num_nodes=size_i)
    return (q_j + edge) * alpha.view(-1, self.heads, 1)


def attention_one_head(self, x_i, y_j, z_j, ea, index):
    edge = self.of_edge(ea)
    alpha = softmax((x_i * (y_j + edge)).sum(-1) * 0.3, index)
    return alpha[:, None] * (z_j + edge)


def attention_biased_edges(self, x_i, y_j, z_j, ea, index):
    edge = self.of_edge_biased(ea)
    alpha = softmax((x_i * (y_j + edge)).sum(-1, keepdim=True) * 0.3, index)
    return alpha * (z_j + edge)


def attention_plain(self, x_i, y_j, z_j, index):
    return softmax((x_i * y_j).sum(-1, keepdim=True) / 2.0, index) * z_j


def attention_with_bias(self, h_i, q_j, k_j, wh, index):
    return softmax((h_i * q_j).sum(-1) / 2 + wh, index).unsqueeze(-1) * k_j


def attention_edges_in_keys_only(self, x_i, y_j, z_j, ea, index):
    return softmax((x_i * (y_j + self.of_edge(ea))).sum(-1), index)[:, None] * z_j


def gatv2(self, h_i, h_j, index, size_i):
    alpha = (F.leaky_relu(h_i + h_j, 0.2) * self.att).sum(dim=-1)
    return h_j * softmax(alpha, index, num_nodes=size_i).unsqueeze(-1)


def gatv2_with_edges(self, h_i, h_j, ea, index):
    total = h_i + h_j + self.of_edge(ea).view(-1, self.heads, self.width)
    return h_j * softmax((F.leaky_relu(total, 0.2) * self.att).sum(-1), index).unsqueeze(-1)


def gatv2_other_values(self, h_i, h_j, k_j, index):
    return k_j * softmax((F.leaky_relu(h_i + h_j, 0.2) * self.att).sum(-1), index).unsqueeze(-1)


def cosine(self, x_i, x_j, index):
    alpha = (F.normalize(x_i, dim=-1) * F.normalize(x_j, dim=-1)).sum(-1)
    return softmax(self.scalar * alpha, index).view(-1, 1) * x_j


def softmax_per_feature(self, x_i, y_j, x_j, index):
    return softmax(x_i * y_j, index) * x_j


def softmax_of_features(self, x_i, x_j, ea, index):
    return softmax(x_i * x_j, index) * (x_j + self.of_edge(ea))


# Gates.


def gated(self, x_i, y_j, z_j):
    return torch.sigmoid(x_i + y_j) * z_j


def gated_with_edges(self, x_i, y_j, z_j, ea):
    return torch.sigmoid(x_i + y_j + self.of_edge_biased(ea)) * z_j


def gated_values_with_edges(self, x_i, y_j, z_j, ea):
    return (z_j + self.of_edge(ea)) * (x_i + y_j).sigmoid()


def gated_by_vector(self, x_i, y_j, z_j):
    return (x_i + y_j + self.bias).sigmoid() * z_j


def gated_by_product(self, x_i, x_j, z_j):
    return torch.sigmoid(self.both(torch.cat([x_i, x_j], -1)).sum(-1, keepdim=True)) * z_j


# Maps of edges and both ends.


def edge_mlp(self, x_i, x_j, ea):
    return self.mlp(torch.cat([x_i, x_j, ea], dim=-1))


def edge_mlp_of_difference(self, x_i, x_j):
    return self.deep(torch.cat([x_i, x_j - x_i], dim=-1))


def edge_mlp_normed(self, x_i, x_j):
    return self.normed(torch.cat([x_i, x_j], 1))


def mlp_of_sources(self, x_j):
    return self.plain_mlp(x_j)


def mlp_of_difference(self, x_i, x_j):
    return self.plain_mlp(x_i - x_j)


def mlp_weighted(self, x_j, w):
    return w.view(-1, 1) * self.plain_mlp(x_j)


def map_of_sources(self, x_j):
    return self.lin(x_j)


def map_of_sources_weighted(self, x_j, w):
    return self.lin(x_j) * w[:, None]


def map_of_sources_by_function(self, x_j):
    return F.linear(x_j, self.lin.weight, self.lin.bias)


def map_of_pyg(self, x_i, x_j):
    return F.relu(self.pyg_lin(x_j) + self.other(x_i))


def map_of_both(self, x_i, x_j):
    return torch.tanh(self.both(torch.cat((x_i, x_j), dim=1)))


def map_behind_gate(self, x_i, x_j):
    return self.last(torch.sigmoid(x_i) * x_j)


def maps_twice(self, x_i, x_j, ea):
    both = torch.cat([x_i, x_j, ea], dim=-1)
    return torch.sigmoid(self.all(both)) * F.softplus(self.all(both) + 1)


def map_of_map(self, x_i, x_j):
    return self.last(self.square(x_j) + x_i)


def map_by_heads(self, x_i, x_j):
    return self.square(x_i + x_j).view(-1, self.heads, self.width).relu()


def slices(self, x_i, x_j):
    return x_i[:, :4] - 0.5 * x_j[:, 4:8] + x_j[..., 8:12]


def slices_of_map(self, x_j, w):
    out = self.square(x_j)
    return out[:, :6] * w.unsqueeze(-1) + out[:, 6:]


# Messages that use edge features.


def gine(self, x_j, ea):
    return (x_j + self.of_edge_biased(ea)).relu()


def gine_with_vector(self, x_j, ea):
    return F.relu(x_j + self.of_edge(ea) + self.bias)


def gine_with_both(self, x_i, x_j, ea):
    return F.relu(x_j + self.of_edge(ea) - x_i)


def gine_embedded(self, x_j, kind):
    return F.relu(x_j + self.kinds(kind))


def gen(self, x_j, ea):
    return F.relu(x_j + self.of_edge(ea)) + 1e-7


def filtered(self, x_j, ea):
    return x_j * self.filter(ea)


def filtered_by_distance(self, pos_i, pos_j, x_j):
    distance = (pos_i - pos_j).pow(2).sum(-1, keepdim=True)
    return torch.exp(-distance) * x_j


def coordinates(self, pos_i, pos_j, x_i, x_j):
    return (pos_i - pos_j) * self.last(x_i * x_j)[:, :1]


def embedded_distance(self, x_i, x_j, pos_i, pos_j):
    distance = (pos_i - pos_j).norm(dim=-1, keepdim=True).clamp(min=0.1)
    return F.silu(self.lin(x_i) + self.other(x_j) + distance)


def concatenated_with_norm(self, x_i, x_j, deg, index):
    return self.both(torch.cat([x_i, x_j], dim=-1)) / deg[index].view(-1, 1)


def where(self, x_i, x_j):
    total = self.square(x_j) - x_i
    return torch.where(total > 0, total, 0.1 * total)


def exponential(self, x_i, x_j, t):
    return torch.exp(-self.lin(x_i - x_j).abs() * t)


def keyword_defaults(self, x_j, w=None, scale=2.0):
    return scale * self.lin(x_j) if w is None else w.view(-1, 1) * x_j


def chunks(self, x_i, x_j):
    first, second = self.square(x_i + x_j).chunk(2, dim=-1)
    return first.sigmoid() * second


def rectified_in_place(self, x_i, x_j):
    F.relu(x_j, True)
    return self.square(x_j) + x_i


def rectified_in_place_by_module(self, x_i, x_j):
    y = self.in_place(x_j)
    return self.square(x_j) + y - x_i


def map_rectified_in_place(self, x_i, x_j):
    return F.leaky_relu(self.both(torch.cat([x_i, x_j], -1)), 0.2, inplace=True)


def copies(self, x_j):
    return x_j


def weighted_copies(self, x_j, w):
    return w.view(-1, 1) * x_j


Message = Callable[..., Any]
PER_NODE, BEHIND = "linear maps per node", "a linear map after the sum"
#: message -> gains of its plan on the CPU if messages are summed; empty: there is no plan.
MESSAGES: dict[Message, tuple[str, ...]] = {
    gat_one_head: ("scores per node", "additive_attention"),
    gat_heads: ("scores per node", "additive_attention"),
    gat_two_vectors: ("scores per node", "additive_attention"),
    gat_scores_of_nodes: ("additive_attention",),
    gat_scores_of_edges: ("additive_attention",),
    scores_without_leaky_relu: ("additive_attention",),
    scores_of_sources: ("additive_attention",),
    attention_with_edges: ("attention",),
    attention_one_head: ("attention",),
    attention_biased_edges: ("attention",),
    attention_plain: ("attention",),
    attention_with_bias: ("attention",),
    attention_edges_in_keys_only: (),
    gatv2: ("gatv2_attention",),
    gatv2_with_edges: ("gatv2_attention",),
    gatv2_other_values: (),
    cosine: (),
    softmax_per_feature: (),
    softmax_of_features: (),
    gated: ("gated_aggregate",),
    gated_with_edges: (),
    gated_values_with_edges: (),
    gated_by_vector: ("gated_aggregate",),
    gated_by_product: (PER_NODE, "spmm"),
    edge_mlp: (PER_NODE, BEHIND),
    edge_mlp_of_difference: (PER_NODE, BEHIND),
    edge_mlp_normed: (PER_NODE, BEHIND),
    mlp_of_sources: (PER_NODE, "leaky_relu per node", "sum term by term"),
    mlp_of_difference: (PER_NODE, BEHIND),
    mlp_weighted: (PER_NODE, "leaky_relu per node", "spmm"),
    map_of_sources: (PER_NODE, "sum term by term"),
    map_of_sources_weighted: (PER_NODE, "spmm"),
    map_of_sources_by_function: (PER_NODE, "sum term by term"),
    map_of_pyg: (PER_NODE,),
    map_of_both: (PER_NODE,),
    map_behind_gate: (BEHIND, "gated_aggregate"),
    maps_twice: (PER_NODE,),
    map_of_map: (PER_NODE, "sum term by term"),
    map_by_heads: (PER_NODE,),
    slices: ("sum term by term",),
    slices_of_map: (PER_NODE,),
    gine: ("gine_aggregate",),
    gine_with_vector: ("gine_aggregate",),
    gine_with_both: (),
    gine_embedded: ("gine_aggregate",),
    gen: (),
    filtered: (),
    filtered_by_distance: (),
    coordinates: (),
    embedded_distance: (PER_NODE,),
    concatenated_with_norm: (PER_NODE,),
    where: (PER_NODE,),
    exponential: (PER_NODE,),
    keyword_defaults: (PER_NODE, "sum term by term"),
    chunks: (PER_NODE,),
    rectified_in_place: (),
    rectified_in_place_by_module: (),
    map_rectified_in_place: (PER_NODE,),
    copies: (),
    weighted_copies: (),
}
GENERATED = "one generated kernel"
#: Messages for whose sums a kernel is generated on a GPU.
GENERATING = (
    *(softmax_of_features, edge_mlp, mlp_of_difference, map_of_pyg, map_of_both, slices_of_map),
    *(maps_twice, gine_with_both, gen, filtered, coordinates, embedded_distance, concatenated_with_norm),
    *(chunks, gated_with_edges, gated_values_with_edges, softmax_per_feature),
)
#: Messages whose second derivatives exist everywhere.
SMOOTH = (
    attention_with_edges,
    gated_with_edges,
    maps_twice,
    edge_mlp_of_difference,
    map_of_both,
    map_of_map,
)


def make(message: Message, aggr: str = "sum", device: str = "cpu") -> tuple[Layer, Any]:
    """The layer, and its accelerated copy."""
    body = types.FunctionType(message.__code__, message.__globals__, "message", message.__defaults__)
    layer: Any = type(message.__name__, (Layer,), {"message": body, "__module__": __name__})(aggr)
    layer = layer.to(device, torch.float64)
    fast = nn.ModuleList([copy.deepcopy(layer)])
    accelerate(fast, show=False)
    assert isinstance(fast[0], AnyLayer)
    return layer, fast[0]


def problem(device: str = "cpu", nodes: int = NODES, edges: int = EDGES) -> tuple[Tensor, dict[str, Any]]:
    """Edges, some nodes without any, and the inputs by name."""
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(nodes - nodes // 10, (2, edges), generator=generator)
    edge_index[1] %= nodes - nodes // 6

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(device)

    inputs: dict[str, Any] = {name: draw(nodes, ALL) for name in "xyz"}
    inputs |= {name: draw(nodes, HEADS, WIDTH) for name in "hqk"}
    inputs |= {"s": draw(nodes, HEADS), "pos": draw(nodes, 3), "deg": draw(nodes).abs() + 1}
    inputs |= {"ea": draw(edges, EDGE_WIDTH), "w": draw(edges), "wh": draw(edges, HEADS), "t": 0.5}
    inputs["kind"] = torch.randint(4, (edges,), generator=generator).to(device)
    return edge_index.to(device), inputs


def wanting_gradients(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: item.detach().clone().requires_grad_()
        if isinstance(item, Tensor) and item.is_floating_point()
        else item
        for name, item in inputs.items()
    }


def results(layer: nn.Module, edge_index: Tensor, inputs: dict[str, Any]) -> dict[str, Tensor | None]:
    """Output and gradients of everything, by name."""
    inputs = wanting_gradients(inputs)
    out = layer(edge_index, inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype).to(
        out.device
    )
    wanted = {name: item for name, item in inputs.items() if isinstance(item, Tensor) and item.requires_grad}
    wanted |= dict(layer.named_parameters())
    found = torch.autograd.grad(out, list(wanted.values()), weight, allow_unused=True)
    return {"output": out.detach(), **dict(zip(wanted, found, strict=True))}


def check(layer: nn.Module, fast: nn.Module, edge_index: Tensor, inputs: dict[str, Any]) -> None:
    expected, got = (results(each, edge_index, inputs) for each in (layer, fast))
    for name, want in expected.items():
        have = got[name]
        if want is None or have is None:
            assert not any(each is not None and each.any() for each in (want, have)), name
        else:
            torch.testing.assert_close(
                have, want, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )


def gains_of(fast: Any) -> list[tuple[str, ...]]:
    patterns = [pattern for known in type(fast)._patterns.values() for pattern in known]
    plans = [plan for pattern in patterns for known in pattern.plans.values() for plan in known]
    return [() if isinstance(plan, str) else plan.gains for plan in plans]


def test_reports_name_what_became_of_each_layers_message():
    edge_index, inputs = problem()
    for message, before, after in (
        (gat_heads, "w * h_j: spmm (sum)", "scores per node + additive_attention"),
        (cosine, "w * x_j: spmm (sum)", "w * x_j: spmm (sum)"),
        (
            softmax_per_feature,
            "w * x_j: spmm (sum)",
            "message() per edge, because of weights per feature: segment sum",
        ),
        (where, "message() per edge: segment sum", "linear maps per node; the rest per edge, because of gt"),
        (gen, "message() per edge: segment sum", "message() per edge, because of relu: segment sum"),
    ):
        _, fast = make(message)
        other = copy.deepcopy(fast)
        assert kernel_of(fast) == before
        fast(edge_index, inputs)
        assert kernel_of(fast) == after
        assert kernel_of(other) == before
    _, fast = make(copies)
    assert kernel_of(fast) == "x_j: spmm (sum)"
    fast(edge_index, inputs | {"x": torch.ones(NODES, ALL, dtype=torch.int64)})
    assert kernel_of(fast) == "message() per edge, because of the dtype or shape of the features: segment sum"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_messages(message: Message, aggr: str, device: str):
    layer, fast = make(message, aggr, device)
    if message is keyword_defaults:
        edge_index, inputs = problem(device)
        check(layer, fast, edge_index, inputs | {"w": None, "scale": 2.0})
        return
    edge_index, inputs = problem(device)
    check(layer, fast, edge_index, inputs)
    check(layer, fast, edge_index, inputs)  # again, with the cached plan
    if aggr == "sum" and device == "cpu":
        assert gains_of(fast) in ([MESSAGES[message]], [] if not MESSAGES[message] else None)
    elif aggr == "sum":
        assert (GENERATED in {gain for gains in gains_of(fast) for gain in gains}) == (message in GENERATING)


def transposed(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def in_columns(x: Tensor) -> Tensor:
    return torch.stack([x.cos(), x], -1)[..., 1]


def behind_one_number(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [transposed, in_columns, behind_one_number])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_memory_layouts(message: Message, layout: Callable[[Tensor], Tensor], device: str):
    layer, fast = make(message, "sum", device)

    def in_layout(module: nn.Module) -> Callable[..., Any]:
        own = module.forward
        laid = lambda x: layout(x) if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
        return lambda edges, given: own(edges, {name: laid(each) for name, each in given.items()})

    for each in (layer, fast):
        each.forward = in_layout(each)
    edge_index, inputs = problem(device)
    edge_index[:, :NODES] = torch.arange(NODES)  # rows of nodes without edges would be copied
    if message is keyword_defaults:
        inputs |= {"w": None, "scale": 2.0}
    for _ in range(2):
        check(layer, fast, edge_index, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_narrow_rows_per_edge_by_kernels(message: Message, aggr: str, monkeypatch: pytest.MonkeyPatch):
    """Generated kernels usually compute wide rows only."""
    monkeypatch.setattr("fastsparse_core.message_plans.plan._LEAST_WIDTH", 1)
    layer, fast = make(message, aggr, "cuda")
    edge_index, inputs = problem("cuda")
    check(
        layer, fast, edge_index, inputs | ({"w": None, "scale": 2.0} if message is keyword_defaults else {})
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("message", SMOOTH, ids=lambda message: message.__name__)
def test_second_derivatives(message: Message, device: str):
    _, fast = make(message, "sum", device)
    edge_index, inputs = problem(device, nodes=10, edges=24)
    names = [
        name
        for name in inspect.signature(message).parameters
        if name[:2] in ("x_", "y_", "h_", "q_", "po", "ea")
    ]
    names = sorted({name.removesuffix("_i").removesuffix("_j") for name in names})

    def run(*tensors: Tensor) -> Tensor:
        out: Tensor = fast(edge_index, inputs | dict(zip(names, tensors, strict=True)))
        return out.tanh()

    fast_edges = [wanting_gradients(inputs)[name] for name in names]
    with small_graphs():
        # On CUDA, PyTorch adds gradients in another order in every run.
        noise = 1e-10 if device == "cuda" else 0.0
        assert torch.autograd.gradgradcheck(run, fast_edges, atol=1e-6, nondet_tol=noise)
    assert set(MESSAGES[message]) <= {*gains_of(fast)[0], *(["gated_aggregate"] if device == "cuda" else [])}
    assert (GENERATED in gains_of(fast)[0]) == (device == "cuda" and message in GENERATING)


@contextlib.contextmanager
def small_graphs() -> Iterator[None]:
    """FastSparse also handles few edges on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(any_layer, "FEW_EDGES", 0)
        yield


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_nodes_without_edges_may_hold_nan(message: Message):
    layer, fast = make(message)
    edge_index, inputs = problem()
    with_edges = torch.zeros(NODES, dtype=torch.bool)
    with_edges[edge_index.flatten()] = True
    assert not with_edges.all()
    for name in ("x", "y", "z", "h", "q", "k", "s", "pos"):
        inputs[name][~with_edges] = math.nan
    inputs |= {"w": None, "scale": 2.0} if message is keyword_defaults else {}
    expected, got = (results(each, edge_index, inputs) for each in (layer, fast))
    for name, want in expected.items():
        have = got[name]
        assert have is None or want is None or torch.equal(want.isnan(), have.isnan()), name


def test_dropout_draws_while_training():
    layer, fast = make(gat_heads)
    layer.p = fast.p = 0.4
    edge_index, inputs = problem()
    assert not torch.equal(fast(edge_index, inputs), fast(edge_index, inputs))
    means = [torch.stack([each(edge_index, inputs) for _ in range(400)]).mean(0) for each in (layer, fast)]
    scale = fast.eval()(edge_index, inputs).norm()
    assert (means[0] - means[1]).norm() < 0.1 * scale
    check(layer.eval(), fast, edge_index, inputs)
    assert gains_of(fast) == 2 * [MESSAGES[gat_heads]]


def test_plans_follow_changed_layers():
    layer, fast = make(mlp_of_sources)
    edge_index, inputs = problem()
    check(layer, fast, edge_index, inputs)
    for each in (layer, fast):
        torch.manual_seed(3)
        each.plain_mlp[1] = nn.LeakyReLU(0.9)
        each.plain_mlp[3] = nn.Linear(8, 2).double()
    check(layer, fast, edge_index, inputs)
    seen: list[int] = []
    for each in (layer, fast):
        each.plain_mlp[0].register_forward_hook(lambda module, args, out: seen.append(out.size(0)) or 2 * out)
    check(layer, fast, edge_index, inputs)
    assert seen == [EDGES, EDGES]
    wide = {name: item.float() if isinstance(item, Tensor) else item for name, item in inputs.items()}
    with pytest.raises(RuntimeError, match="dtype"):
        fast(edge_index, wide)


def test_layers_of_one_class_and_several_shapes():
    edge_index, inputs = problem()
    layers = [make(attribute_reshaped) for _ in range(2)]
    kind = type(layers[0][1])
    for width, (layer, fast) in zip((5, 7), layers, strict=True):
        for each in (layer, fast):
            torch.manual_seed(3)
            each.both = nn.Linear(2 * ALL, width).double()
            each.bias = nn.Parameter(torch.randn(width, 2).double())
        fast.__class__ = kind  # like two layers of a model
        check(layer, fast, edge_index, inputs)
    for layer, fast in layers:
        check(layer, fast, edge_index, inputs)
        for each in (layer, fast):
            each.bias = nn.Parameter(each.bias.data[:, :1])
        check(layer, fast, edge_index, inputs)
    assert gains_of(layers[0][1]) == 4 * [(PER_NODE,)]


def one_map(layer: Any) -> None:
    layer.mlp = nn.Linear(2 * ALL + EDGE_WIDTH, 7).double()


def other_names(layer: Any) -> None:
    layer.mlp = nn.Sequential(OrderedDict(zip(("first", "middle", "last"), layer.mlp, strict=True)))


def other_order(layer: Any) -> None:
    layer.mlp = nn.Sequential(OrderedDict({name: layer.mlp[int(name)] for name in "021"}))


def no_module(layer: Any) -> None:
    del layer.mlp
    layer.mlp = torch.cos


def other_widths(layer: Any) -> None:
    layer.kinds, layer.others = layer.others, layer.kinds


def kinds_and_others(self, x_j, kind):
    return self.both(torch.cat([self.kinds(kind), self.others(kind), x_j], -1))


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("change", [one_map, other_names, other_order, no_module, other_widths])
def test_layers_of_one_class_with_other_modules(change: Callable[[Any], None], is_first: bool):
    pairs = [make(kinds_and_others if change is other_widths else edge_mlp) for _ in range(2)]
    pairs[1][1].__class__ = type(pairs[0][1])
    for pair in pairs:
        for each in pair:
            torch.manual_seed(3)
            each.kinds, each.others = nn.Embedding(4, 5).double(), nn.Embedding(4, ALL - 5).double()
    for each in pairs[is_first]:
        torch.manual_seed(4)
        change(each)
    edge_index, inputs = problem()
    for _ in range(3):
        for pair in pairs:
            check(*pair, edge_index, inputs)
    for each in pairs[not is_first]:
        torch.manual_seed(4)
        change(each)
    check(*pairs[not is_first], edge_index, inputs)


def test_parameters_of_another_dtype():
    layer, fast = make(gat_one_head)
    edge_index, inputs = problem()
    inputs = {name: item.float() if isinstance(item, Tensor) else item for name, item in inputs.items()}
    for dtype in (torch.float32, torch.float64):
        for each in (layer, fast):
            each.att_wide = nn.Parameter(each.att_wide.detach().to(dtype))
        for _ in range(2):
            torch.testing.assert_close(fast(edge_index, inputs), layer(edge_index, inputs))


def hooked(fast: Any) -> None:
    fast.register_message_forward_hook(lambda module, args, out: 2 * out)


def replaced(fast: Any) -> None:
    fast.message = lambda x_i, x_j, index: x_j - x_i


def hooked_backward(fast: Any) -> None:
    fast.aggr_module.register_full_backward_pre_hook(lambda module, grads: (2 * grads[0],))


def reduced_otherwise(fast: Any) -> None:
    own = fast.aggr_module.forward
    fast.aggr_module.forward = lambda *args, **kwargs: own(*args, **kwargs).cos()


def of_mean(fast: Any) -> None:
    fast.aggr_module = gnn.MeanAggregation()


def turned(fast: Any) -> None:
    fast.flow = "target_to_source"


@pytest.mark.parametrize(
    "change",
    [None, hooked, hooked_backward, reduced_otherwise, replaced, of_mean, turned],
    ids=lambda each: getattr(each, "__name__", "none"),
)
def test_known_calls_skip_the_search_until_something_changes(
    change: Callable[[Any], None] | None, monkeypatch: pytest.MonkeyPatch
):
    layer, fast = make(gat_one_head)
    edge_index, inputs = problem()
    check(layer, fast, edge_index, inputs)
    for each in (layer, fast) if change else ():
        change(each)
    searched = []
    search = AnyLayer._collect_lazily
    monkeypatch.setattr(AnyLayer, "_collect_lazily", lambda *args: searched.append(1) or search(*args))
    check(layer, fast, edge_index, inputs)
    # With a message hook, PyG's code runs.
    assert bool(searched) == (change in (hooked_backward, reduced_otherwise, replaced, of_mean))
    edge_index[0, :9] = edge_index[0, 9:18]  # edited in place, and a tensor that was not seen before
    check(layer, fast, edge_index, inputs)
    check(layer, fast, edge_index.flip(0), inputs)
    fewer = {name: item[: NODES - 20] if name == "x" else item for name, item in inputs.items()}
    check(layer, fast, edge_index % (NODES - 20), fewer)
    narrow = {name: item[:, :4] if name == "x" else item for name, item in inputs.items()}
    if change is not replaced:
        for each in (layer, fast):
            with pytest.raises(RuntimeError, match="size of tensor"):
                each(edge_index, narrow)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "aggregations",
    [
        (lambda: gnn.aggr.VarAggregation(), lambda: gnn.aggr.VarAggregation(semi_grad=True)),
        (lambda: gnn.aggr.SoftmaxAggregation(), lambda: gnn.aggr.SoftmaxAggregation(t=0.5)),
    ],
    ids=["var", "softmax"],
)
def test_known_calls_heed_the_options_of_an_aggregation(aggregations: Any, first: int):
    """What one layer of a class may do does not hold for the next one."""
    layers = [make(map_of_both) for _ in range(2)]
    layers[1][1].__class__ = type(layers[0][1])
    edge_index, inputs = problem()
    for pair, which in zip(layers, (first, 1 - first), strict=True):
        for each in pair:
            each.aggr_module = aggregations[which]()
        for _ in range(2):
            check(*pair, edge_index, inputs)


class AnyNodeDim(MessagePassing):
    """Nodes are in the second to last dimension."""

    def __init__(self) -> None:
        super().__init__(aggr="sum", node_dim=-2)
        self.lin = nn.Linear(2 * ALL, 6)

    def forward(self, x: Tensor, edge_index: Tensor, w: Tensor | None = None) -> Tensor:
        return self.propagate(edge_index, x=x, w=w)

    def message(self, x_i: Tensor, x_j: Tensor, w: Tensor | None) -> Tensor:
        out = self.lin(torch.cat([x_i, x_j], -1)).relu()
        return out if w is None else out * w.unsqueeze(-1)


def test_calls_without_a_plan_after_one_with_a_plan():
    layer = AnyNodeDim().double()
    fast = copy.deepcopy(layer)
    accelerate(fast, show=False)
    edge_index, inputs = problem(nodes=40)
    for x in (inputs["x"], torch.randn(50, 40, ALL).double(), torch.randn(40, 40, ALL).double()):
        for _ in range(3):
            torch.testing.assert_close(fast(x, edge_index), layer(x, edge_index))
    for w in (inputs["w"], torch.tensor(2.0).double()):
        for _ in range(3):
            torch.testing.assert_close(fast(inputs["x"], edge_index, w), layer(inputs["x"], edge_index, w))


@pytest.mark.parametrize("first", [1.0, 0.5])
def test_softmax_aggregations_after_sums(first: float):
    layer, fast = make(map_of_both)
    edge_index, inputs = problem()
    check(layer, fast, edge_index, inputs)
    for t in (first, 1.5 - first):
        for each in (layer, fast):
            each.aggr_module = gnn.aggr.SoftmaxAggregation(t=t)
        for _ in range(2):
            check(layer, fast, edge_index, inputs)


def squared(self, x_j):
    return x_j * x_j


@pytest.mark.parametrize("is_original", [False, True])
@pytest.mark.parametrize("edges", [100, EDGES])
@pytest.mark.parametrize("method", ["message", "aggregate", "update", "forward"])
@pytest.mark.parametrize("message", [copies, squared, map_of_sources])
def test_known_calls_heed_methods_that_a_class_gets(
    message: Message, method: str, edges: int, is_original: bool, monkeypatch: pytest.MonkeyPatch
):
    layer, fast = make(message)
    edge_index, inputs = problem(edges=edges)
    for _ in range(3):
        check(layer, fast, edge_index, inputs)
    once = layer(edge_index, inputs)
    changed = type(layer) if is_original else type(fast)
    own = getattr(changed, method)

    def twice(self, x_j):
        return 2 * x_j

    def double(self, *args, **kwargs):
        return 2 * own(self, *args, **kwargs)

    # PyG's code is generated when a layer is made, and calls the method by name.
    monkeypatch.setattr(changed, method, twice if method == "message" else double)
    if method == "message":
        once = make(copies)[0](edge_index, inputs)
    for _ in range(3):
        torch.testing.assert_close(fast(edge_index, inputs), 2 * once)


def attribute_reshaped(self, x_i, x_j):
    return torch.tanh(self.both(torch.cat([x_i, x_j], -1)).unsqueeze(-1) + self.bias).flatten(1)


def test_more_nodes_than_edges_run_the_message_itself():
    layer, fast = make(map_of_both)
    edge_index, inputs = problem(nodes=EDGES + 1, edges=EDGES)
    check(layer, fast, edge_index, inputs)
    assert gains_of(fast) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_autocast(message: Message, device: str):
    layer, fast = make(message, "sum", device)
    edge_index, inputs = problem(device)
    inputs |= {"w": None, "scale": 2.0} if message is keyword_defaults else {}
    exact = results(layer, edge_index, inputs)
    layer, fast = layer.float(), fast.float()
    inputs = {
        name: item.float() if isinstance(item, Tensor) and item.is_floating_point() else item
        for name, item in inputs.items()
    }
    with torch.autocast(device, torch.bfloat16):
        expected, got = (results(each, edge_index, inputs) for each in (layer, fast))
    for name, want in expected.items():
        have, best = got[name], exact[name]
        if want is None or have is None or best is None:
            assert not any(each is not None and each.any() for each in (want, have)), name
            continue
        assert have.dtype == want.dtype, name
        errors = [(each.double() - best).norm() / best.norm().clamp(min=1e-2) for each in (want, have)]
        assert errors[1] <= 0.03 + 2 * errors[0], (name, errors)
    if message in (gat_heads, attention_with_edges, gatv2_with_edges, gated_with_edges, gine, edge_mlp):
        gains = gains_of(fast)
        assert gains
        assert set(MESSAGES[message]) <= set(gains[0])


#: In a string, because pytest rewrites the assertions of this file, and traces do not support the result.
exec("""
def with_assertions(self, x_i, x_j, ea):
    if hasattr(self, "missing"):
        x_j = self.missing(x_j)
    assert x_i.size(-1) == x_j.size(-1)
    return self.all(torch.cat([x_i, x_j, ea], -1)).relu()


def with_assertion_of_data(self, x_i, x_j, ea):
    assert x_j.max() < 100
    return self.all(torch.cat([x_i, x_j, ea], -1)).relu()
""")


def test_assertions_of_shapes_have_plans_and_others_are_made():
    edge_index, inputs = problem()
    layer, fast = make(globals()["with_assertions"])
    check(layer, fast, edge_index, inputs)
    assert gains_of(fast) == [(PER_NODE,)]
    for each in (layer, fast):
        each.missing = nn.Tanh()
    check(layer, fast, edge_index, inputs)
    layer, fast = make(globals()["with_assertion_of_data"])
    check(layer, fast, edge_index, inputs)
    assert gains_of(fast) in ([], [()])
    with pytest.raises(AssertionError):
        fast(edge_index, inputs | {"x": inputs["x"] + 1000})


# ---------------------------------------------------------------- layers of molecules and atoms


class Egnn(MessagePassing):
    """E(n) equivariant layer (Satorras et al., 2021, equations 3 to 6), features only."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.edge = nn.Sequential(nn.Linear(2 * ALL + 1, ALL), nn.SiLU(), nn.Linear(ALL, ALL), nn.SiLU())
        self.node = nn.Sequential(nn.Linear(2 * ALL, ALL), nn.SiLU(), nn.Linear(ALL, ALL))

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        return x + self.node(torch.cat([x, self.propagate(edge_index, x=x, pos=pos)], -1))

    def message(self, x_i: Tensor, x_j: Tensor, pos_i: Tensor, pos_j: Tensor) -> Tensor:
        distance = (pos_i - pos_j).pow(2).sum(-1, keepdim=True)
        return self.edge(torch.cat([x_i, x_j, distance], -1))


class SchNet(MessagePassing):
    """Continuous-filter convolution (Schütt et al., 2017)."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.first, self.last = nn.Linear(ALL, ALL, bias=False), nn.Linear(ALL, ALL)
        self.filter = nn.Sequential(nn.Linear(6, ALL), nn.Softplus(), nn.Linear(ALL, ALL))
        self.register_buffer("centres", torch.linspace(0, 3, 6))

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        distance = (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1)
        basis = torch.exp(-((distance[:, None] - self.centres) ** 2))
        return x + self.last(self.propagate(edge_index, x=self.first(x), basis=basis))

    def message(self, x_j: Tensor, basis: Tensor) -> Tensor:
        return x_j * self.filter(basis)


class Painn(MessagePassing):
    """Message block of PaiNN (Schütt et al., 2021, equations 7 and 8): scalars, and vectors of three rows."""

    width = ALL

    def __init__(self) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.phi = nn.Sequential(nn.Linear(ALL, ALL), nn.SiLU(), nn.Linear(ALL, 3 * ALL))
        self.filter = nn.Linear(1, 3 * ALL)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        direction = pos[edge_index[0]] - pos[edge_index[1]]
        distance = direction.norm(dim=-1, keepdim=True)
        vectors = x.unsqueeze(1) * pos.unsqueeze(-1)
        out = self.propagate(
            edge_index, phi=self.phi(x), v=vectors, distance=distance, direction=direction / distance
        )
        return x + out[:, 0] + (out[:, 1:] ** 2).sum(1)

    def message(self, phi_j: Tensor, v_j: Tensor, distance: Tensor, direction: Tensor) -> Tensor:
        first, second, third = (phi_j * self.filter(torch.sin(distance))).split(self.width, -1)
        vectors = v_j * second.unsqueeze(1) + third.unsqueeze(1) * direction.unsqueeze(-1)
        return torch.cat([first.unsqueeze(1), vectors], 1)


def test_few_edges_take_what_launches_less(monkeypatch: pytest.MonkeyPatch):
    """Attention is one node each way; an edge MLP has as many products as before, and more around them."""
    monkeypatch.setattr(any_layer, "are_few_on_gpu", lambda *_: True)
    for message, is_planned in ((gat_one_head, True), (gat_heads, True), (edge_mlp, False)):
        layer, fast = make(message)
        edge_index, inputs = problem()
        for _ in range(5):  # the edges are new at first
            check(layer, fast, edge_index, inputs)
        assert isinstance(planned.get(fast), Plan) == is_planned, message
        assert type(fast)._left[type(fast.aggr_module)] != is_planned, message


def test_few_edges_compile_no_kernel(monkeypatch: pytest.MonkeyPatch):
    begin = Planner.__init__

    def generating(planner, *args):
        begin(planner, *args)
        planner.generates = True

    monkeypatch.setattr(Planner, "__init__", generating)
    monkeypatch.setattr(any_layer, "are_few_on_gpu", lambda *_: True)
    monkeypatch.setattr(any_layer, "is_new", lambda *_: False)
    layer, fast = make(gated_with_edges)
    check(layer, fast, *problem())
    assert GENERATED not in str(planned.get(fast))


class Counting(nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_weights_per_feature_are_computed_once():
    layer = SchNet()
    layer.filter = Counting(6, ALL)
    accelerate(layer, show=False)
    edge_index, _ = problem()
    x, basis = torch.randn(NODES, ALL), torch.randn(EDGES, 6)
    for nth in range(5):
        layer.filter.calls = 0
        layer.propagate(edge_index, x=x, basis=basis)
        assert layer.filter.calls == 1 or nth == 1, nth


@pytest.mark.parametrize("message", [gat_one_head, gat_heads, gat_two_vectors])
def test_attention_of_one_tensor_is_one_node(message: Message):
    edge_index, inputs = problem()
    _, fast = make(message)
    out = fast(edge_index, inputs)
    names, nodes = set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(type(node).__name__)
        nodes += [each for each, _ in node.next_functions if each is not None]
    assert "_AttentionLayerBackward" in names
    assert names.isdisjoint(("_ScoresBackward", "SliceBackward0"))  # halves of a vector are one `split`


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [Egnn, SchNet, Painn])
def test_energies_forces_and_their_gradients(block: type[MessagePassing], device: str):
    torch.manual_seed(0)
    layer = nn.ModuleList([block(), block()]).double().to(device)
    fast = copy.deepcopy(layer)
    accelerate(fast, show=False)
    pos = torch.randn(200, 3, dtype=torch.float64, device=device)
    x = torch.randn(200, ALL, dtype=torch.float64, device=device)
    edge_index = torch.randint(200, (2, 6000), device=device)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]

    check_forces(layer, fast, pos, x, edge_index)


def check_forces(layer: nn.ModuleList, fast: nn.ModuleList, *inputs: Tensor) -> None:
    """Compares energy, forces and the gradients of a loss of both.

    Args:
        layer: blocks, one after the other.
        fast: the same, accelerated.
        inputs: positions, features and edges.
    """
    pos, x, edge_index = inputs

    def training_step(model: nn.ModuleList) -> list[Tensor]:
        place = pos.clone().requires_grad_()
        h = x
        for each in model:
            h = each(h, place, edge_index)
        energy = h.tanh().sum()
        (force,) = torch.autograd.grad(energy, place, create_graph=True)
        loss = energy + (force**2).sum()
        return [energy.detach(), force.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    for want, got in zip(training_step(layer), training_step(fast), strict=True):
        assert (want - got).norm() <= 1e-10 * want.norm().clamp(min=1)


# ---------------------------------------------------------------- edge updates, edge states, several passes


class UserGat(Layer):
    """As PyG's GATConv: `edge_update` gives the attention weights."""

    def forward(self, edge_index: Tensor, inputs: dict[str, Any]) -> Tensor:
        h = inputs["h"]
        scores = ((h * self.att).sum(-1), (h * self.att_both[..., :WIDTH]).sum(-1))
        self.weights = self.edge_updater(edge_index, alpha=scores, ea=inputs["ea"])
        return self.propagate(edge_index, h=h, alpha=self.weights).flatten(1)

    def edge_update(self, alpha_i, alpha_j, ea, index, ptr, size_i):
        alpha = alpha_i + alpha_j + self.last_of(ea)
        return self.activated(softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i))

    def last_of(self, ea):
        return self.of_edge(ea)[:, : self.heads]

    def activated(self, alpha):
        return F.dropout(alpha, p=self.p, training=self.training)

    def message(self, h_j, alpha):
        return alpha.unsqueeze(-1) * h_j


class EdgeState(Layer):
    """GatedGCN (Bresson and Laurent, 2017): the edges' new state is returned, too."""

    def forward(self, edge_index: Tensor, inputs: dict[str, Any]) -> Tensor:
        x, ea = inputs["x"], inputs["ea"]
        new = self.edge_updater(edge_index, x=x, ea=ea)
        out = self.propagate(edge_index, x=x, gate=new.sigmoid())
        return torch.cat([out.flatten(), new.flatten()])[None]

    def edge_update(self, x_i, x_j, ea):
        return self.all(torch.cat([x_i, x_j, ea], -1)) + self.square(x_j)

    def message(self, x_j, gate):
        return gate * self.square(x_j)


class StateInMessage(Layer):
    """The same as its benchmark code writes it: `message` leaves the state on the layer."""

    def forward(self, edge_index: Tensor, inputs: dict[str, Any]) -> Tensor:
        x = inputs["x"]
        out = self.propagate(edge_index, x=x, ea=inputs["ea"])
        state = self.state
        del self.state
        return torch.cat([out.flatten(), state.flatten()])[None]

    def message(self, x_i, x_j, ea):
        self.state = self.all(torch.cat([x_i, x_j, ea], -1))
        return self.state.sigmoid() * self.square(x_j)


class OwnAggregate(StateInMessage):
    """Its numerator and denominator are sums of its own."""

    def message(self, x_i, x_j, ea):
        self.state = self.all(torch.cat([x_i, x_j, ea], -1))
        return torch.sigmoid(self.state)

    def aggregate(self, inputs, index, x_j, dim_size):
        total = scatter(inputs * x_j, index, 0, dim_size=dim_size, reduce="sum")
        return total / (scatter(inputs, index, 0, dim_size=dim_size, reduce="sum") + 1e-6)


class HelperMethods(Layer):
    """`message` calls other methods of the layer."""

    def message(self, x_i, x_j, ea):
        return self.transformed(self.joined(x_i, x_j), ea)

    def joined(self, x_i, x_j):
        return torch.cat([x_i, x_j], -1)

    def transformed(self, both, ea):
        return torch.tanh(self.all(torch.cat([both, ea], -1)))


class Twice(Layer):
    """Two passes of one message in a call."""

    def forward(self, edge_index: Tensor, inputs: dict[str, Any]) -> Tensor:
        first = self.propagate(edge_index, x=inputs["x"])
        second = self.propagate(edge_index, x=torch.cat([first, inputs["y"][:, 6:]], -1))
        return first + second

    def message(self, x_i, x_j):
        return torch.sigmoid(self.both(torch.cat([x_i, x_j], -1)))


#: layer -> gains of its plans if messages are summed.
PASSES: dict[type[Layer], list[tuple[str, ...]]] = {
    UserGat: [],
    EdgeState: [(PER_NODE,), (PER_NODE,)],
    StateInMessage: [(PER_NODE,)],
    OwnAggregate: [(PER_NODE,)],
    HelperMethods: [(PER_NODE,)],
    Twice: [(PER_NODE,)],
}


def make_passes(kind: type[Layer], aggr: str = "sum", device: str = "cpu") -> tuple[Layer, Any]:
    kind = type(kind.__name__, (kind,), {"__module__": __name__})  # a new class, without cached traces
    layer = kind(aggr).to(device, torch.float64)
    fast = nn.ModuleList([copy.deepcopy(layer)])
    accelerate(fast, show=False)
    return layer, fast[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("kind", PASSES)
def test_edge_updates_states_and_several_passes(kind: type[Layer], aggr: str, device: str):
    layer, fast = make_passes(kind, aggr, device)
    edge_index, inputs = problem(device)
    for _ in range(2):
        check(layer, fast, edge_index, inputs)
    if aggr == "sum" and device == "cpu":
        assert [gains for gains in gains_of(fast) if gains] == PASSES[kind]
    assert vars(layer).keys() == vars(fast).keys()


@pytest.mark.parametrize("kind", [EdgeState, StateInMessage, OwnAggregate, HelperMethods])
def test_second_derivatives_of_edge_states(kind: type[Layer]):
    _, fast = make_passes(kind)
    edge_index, inputs = problem(nodes=5, edges=9)

    def run(x: Tensor, ea: Tensor) -> Tensor:
        out: Tensor = fast(edge_index, inputs | {"x": x, "ea": ea})
        return out.tanh()

    with small_graphs():
        for _ in range(5):  # until the edges have a structure
            fast(edge_index, inputs)
        given = wanting_gradients({"x": inputs["x"][:, :ALL], "ea": inputs["ea"]})
        assert torch.autograd.gradgradcheck(run, tuple(given.values()), atol=1e-6)
    assert [gains for gains in gains_of(fast) if gains] == PASSES[kind]


def test_edge_updates_of_changed_layers():
    layer, fast = make_passes(EdgeState)
    edge_index, inputs = problem()
    check(layer, fast, edge_index, inputs)
    seen: list[int] = []
    for each in (layer, fast):
        each.all.register_forward_hook(lambda module, args, out: seen.append(out.size(0)) or 2 * out)
    check(layer, fast, edge_index, inputs)
    assert seen == [EDGES, EDGES]


# ---------------------------------------------------------------- what bodies read and write


SCALE = 3.0


def scaled_by_global(self, x_i, x_j):
    return torch.tanh(self.both(torch.cat([x_i, x_j], -1)) * SCALE)


def test_global_numbers_that_change(monkeypatch: pytest.MonkeyPatch):
    layer, fast = make(scaled_by_global)
    edge_index, inputs = problem()
    for scale in (SCALE, 5.0, 5, SCALE):
        monkeypatch.setitem(globals(), "SCALE", scale)
        check(layer, fast, edge_index, inputs)
    assert gains_of(fast) == 3 * [(PER_NODE,)]


def test_methods_that_change(monkeypatch: pytest.MonkeyPatch):
    layer, fast = make_passes(HelperMethods)
    edge_index, inputs = problem()
    check(layer, fast, edge_index, inputs)
    monkeypatch.setattr(
        type(layer), "joined", lambda self, x_i, x_j: torch.cat([x_j, x_i - 1], -1), raising=False
    )
    check(layer, fast, edge_index, inputs)


def test_names_of_outer_functions_are_written_in_every_call():
    calls = 0

    class Counting(Layer):
        def message(self, x_j):
            nonlocal calls
            calls = 7
            return self.square(x_j)

    layer, fast = make_passes(Counting)
    edge_index, inputs = problem()
    check(layer, fast, edge_index, inputs)
    for _ in range(2):
        calls = 0
        fast(edge_index, inputs)
        assert calls == 7
    assert gains_of(fast) == []
