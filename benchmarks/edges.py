"""Layers with edge features, forward and backward: PyG, the drop-ins, a Triton kernel for attention.

The Triton column needs ``models/src/anemoi/models/triton/gt.py`` of ecmwf/anemoi-core on the path, as
``anemoi_gt.py``. The graphs are that model's (an icosahedral mesh of 40,962 nodes and an n320 grid of
542,080) and two of the suite, drawn from seeds. Layers are 256 wide with 8 features per edge. All gradients
are computed, those of the edges too. The operator alone starts from projected queries, keys and values and
from raw
features; for the Triton kernel that includes the projection of the edges, without which it cannot start. GINE
and residual gated layers are in `edge_messages`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastsparse_core import Adjacency, attention, gatv2_attention

from . import edge_messages, suite
from .runner import DTYPES, Benchmark, Job, Run, option, release

WIDTH, FEATURES = 256, 8
MESH, GRID = 40_962, 542_080
GRAPHS = ("h_to_h", "era_to_h", "h_to_era", "ogbn-arxiv", "ogbn-proteins")
LAYERS = ("TransformerConv", "GATv2Conv")


@dataclass(frozen=True)
class Bipartite:
    """Edges between two sets of nodes, sorted by destination, then by source."""

    name: str
    num_src: int
    num_dst: int
    edge_index: Tensor

    @classmethod
    def of(cls, name: str, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Bipartite:
        key = torch.unique(dst * num_src + src)
        return cls(name, num_src, num_dst, torch.stack([key % num_src, key // num_src]))

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)


def draw_graph(name: str, device: torch.device) -> Bipartite:
    """One of `GRAPHS`."""
    generator = torch.Generator(device=device).manual_seed(0)

    def near(count: int, reach: int) -> Tensor:
        return torch.randint(-reach, reach, (count,), device=device, generator=generator)

    if name == "h_to_h":  # every node and 8 random ones within 200
        node = torch.arange(MESH, device=device).repeat_interleave(8)
        return Bipartite.of(name, (node + near(node.numel(), 200)) % MESH, node, MESH, MESH)
    if name in ("era_to_h", "h_to_era"):  # every grid point and 3 mesh nodes near the proportional place
        point = torch.arange(GRID, device=device).repeat_interleave(3)
        node = (point * MESH // GRID + near(point.numel(), 60)) % MESH
        if name == "era_to_h":
            return Bipartite.of(name, point, node, GRID, MESH)
        return Bipartite.of(name, node, point, MESH, GRID)
    graph = suite.load(name, device)
    return Bipartite(name, graph.num_nodes, graph.num_nodes, graph.edge_index())


def triton_kernel() -> Callable[..., Tensor] | None:
    """The baseline's operator; None if its module is not on the path."""
    try:
        return importlib.import_module("anemoi_gt").graph_transformer_attention_conv
    except ImportError:
        return None


class TritonAttention(nn.Module):
    """The Triton kernel on one graph, with the structures that it reads."""

    def __init__(self, kernel: Callable[..., Tensor], graph: Bipartite) -> None:
        super().__init__()
        self.kernel = kernel
        src, dst = graph.edge_index

        def pointers(ends: Tensor, count: int) -> Tensor:
            return torch.cat([ends.new_zeros(1), torch.bincount(ends, minlength=count).cumsum(0)])

        self.columns = (src, pointers(dst, graph.num_dst))
        self.reverse = (pointers(src, graph.num_src), torch.argsort(src, stable=True), dst)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, edges: Tensor, heads: int) -> Tensor:
        q, k, v, edges = (x.view(-1, heads, WIDTH // heads) for x in (q, k, v, edges))
        return self.kernel(q, k, v, edges, self.columns, self.reverse).flatten(1)


class TritonLayer(nn.Module):
    """PyG's TransformerConv with the Triton kernel as its message passing; on the layer's own parameters."""

    def __init__(self, layer: Any, operator: TritonAttention) -> None:
        super().__init__()
        self.layer, self.operator = layer, operator

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        layer = self.layer
        q, k, v = layer.lin_query(x[1]), layer.lin_key(x[0]), layer.lin_value(x[0])
        out = self.operator(q, k, v, layer.lin_edge(edge_attr), layer.heads)
        return out + layer.lin_skip(x[1])


def cells(run: Run, case: tuple[str, bool]) -> Iterator[Job]:
    """All cells of one graph, those of `edge_messages` or ours."""
    name, is_messages = case
    if is_messages:
        yield from edge_messages.cells(run, name)
        return
    graph, options = draw_graph(name, run.device), run.options
    for layer, heads, dtype in run.grid("layers", "heads", "dtypes"):
        for part, make in (("layer", layer_steps), ("operator", operator_steps)):
            expected: list[Tensor] = []
            for implementation, step in make(graph, layer, heads, DTYPES[dtype], run.device):
                if implementation not in options.implementations:
                    continue
                cell = {
                    "graph": name,
                    "edges": graph.num_edges,
                    "layer": layer,
                    "heads": heads,
                    "dtype": dtype,
                }
                cell |= {"part": part, "implementation": implementation}
                others = expected if part == "layer" else []
                yield cell, run.compared(step, others, edge_messages.TOLERANCE[dtype])
            release()


def layer_steps(
    graph: Bipartite, layer: str, heads: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Forward and backward of one layer by implementation; all have the same parameters and inputs."""
    from .pyg_layers import original_and_drop_in

    torch.manual_seed(0)
    options: dict[str, Any] = {"heads": heads, "edge_dim": FEATURES}
    if layer == "GATv2Conv":
        options["add_self_loops"] = False
    shape = ((WIDTH, WIDTH), WIDTH // heads)
    candidates = original_and_drop_in(layer, *shape, device=device, dtype=dtype, **options)
    x_src = torch.randn(graph.num_src, WIDTH, device=device).to(dtype).requires_grad_()
    x_dst = x_src
    if graph.num_src != graph.num_dst:
        x_dst = torch.randn(graph.num_dst, WIDTH, device=device).to(dtype).requires_grad_()
    edge_attr = torch.randn(graph.num_edges, FEATURES, device=device).to(dtype).requires_grad_()
    kernel = triton_kernel() if layer == "TransformerConv" else None
    if kernel is not None:
        candidates["triton"] = TritonLayer(candidates["pyg"], TritonAttention(kernel, graph))
    for name, module in candidates.items():

        def step(module: nn.Module = module) -> Tensor:
            out: Tensor = module((x_src, x_dst), graph.edge_index, edge_attr)
            out.sum().backward()
            x_src.grad = x_dst.grad = edge_attr.grad = None
            module.zero_grad()
            return out

        yield name, step


def operator_steps(
    graph: Bipartite, layer: str, heads: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Forward and backward of the attention alone by implementation."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    src, dst = graph.edge_index
    adj = Adjacency.from_coo(dst, src, (graph.num_dst, graph.num_src)).prepare()
    edges = (draw(graph.num_edges, FEATURES), draw(WIDTH, FEATURES))
    q, k, v = draw(graph.num_dst, WIDTH), draw(graph.num_src, WIDTH), draw(graph.num_src, WIDTH)
    named = {"edge_attr": edges[0], "edge_weight": edges[1]}
    upstream = torch.randn(graph.num_dst, WIDTH, device=device).to(dtype)
    kernel = triton_kernel()
    if layer == "GATv2Conv":
        att = torch.randn(heads, WIDTH // heads, device=device).requires_grad_()
        leaves = [q, k, att, *edges]

        def gatv2() -> Tensor:
            out = gatv2_attention(adj, q, k, att.view(-1) if heads == 1 else att, **named)
            torch.autograd.grad(out, leaves, upstream)
            return out

        yield "fastsparse", gatv2
        return

    def step(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def both() -> Tensor:
            out = function()
            torch.autograd.grad(out, [q, k, v, *edges], upstream)
            return out

        return both

    yield "fastsparse", step(lambda: attention(adj, q, k, v, heads=heads, **named))
    if kernel is not None:
        baseline = TritonAttention(kernel, graph)
        yield "triton", step(lambda: baseline(q, k, v, nn.functional.linear(*edges), heads))


BENCHMARK = Benchmark(
    "edges",
    cells,
    lambda options: [
        *((name, False) for name in options.drawn),
        *((name, True) for name in options.message_graphs),
    ],
    budget_ms=200.0,
    options={
        "graphs": option(choices=GRAPHS, dest="drawn", nargs="*"),
        "message_graphs": option(choices=edge_messages.GRAPHS, nargs="*"),
        "layers": option(choices=LAYERS),
        "heads": option([4, 16]),
        "dtypes": option(["float32", "float16"], choices=tuple(edge_messages.TOLERANCE)),
        "implementations": option(["pyg", "triton", "fastsparse"]),
    },
    notes=(
        f"layers are {WIDTH} wide with {FEATURES} features per edge; a step is forward and backward",
        "operator starts from projected queries, keys and values; Triton's projects the edges, too",
    ),
)
