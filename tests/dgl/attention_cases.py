"""What the tests of the attention layers share."""

from __future__ import annotations

from typing import Any

import torch
from dgl_cases import bipartite, check_parity, dgl, fastsparse_dgl, features, layer_pair, pair
from torch import Tensor, nn

#: Width of the input where a layer has that option.
WIDTH = 7

#: Class, arguments for one width, arguments for a pair of widths (None: the layer has no widths).
LAYERS: dict[str, tuple[type, tuple[Any, ...], tuple[Any, ...] | None]] = {
    "gat": (fastsparse_dgl.FastGATConv, (WIDTH, 4, 3), ((WIDTH, 5), 4, 3)),
    "gatv2": (fastsparse_dgl.FastGATv2Conv, (WIDTH, 4, 3), ((WIDTH, 5), 4, 3)),
    "dotgat": (fastsparse_dgl.FastDotGatConv, (WIDTH, 4, 3), ((WIDTH, 5), 4, 3)),
    "agnn": (fastsparse_dgl.FastAGNNConv, (1.5,), None),
}

#: The layers that can return their attention.
WITH_ATTENTION = ["gat", "gatv2", "dotgat"]


def layers(name: str, *, pair_of_widths: bool = False, **options: Any) -> tuple[Any, Any]:
    """Our layer and DGL's, with equal random parameters: biases that start at 0 would hide mistakes."""
    layer_class, single, double = LAYERS[name]
    arguments = double if pair_of_widths and double is not None else single
    return randomised(*layer_pair(layer_class, *arguments, **options))


def randomised(fast: Any, reference: Any) -> tuple[Any, Any]:
    """Gives both layers the same random parameters."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
    fast.load_state_dict(reference.state_dict())
    return fast, reference


def inputs(name: str, graph: Any, single: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Features of the widths that ``layers`` makes."""
    if single:
        return features(graph, WIDTH)
    return pair(graph, WIDTH, WIDTH if LAYERS[name][2] is None else 5)


def small_bipartite() -> Any:
    """More destinations than sources."""
    return bipartite(17, 23)


def check(
    layers: tuple[Any, Any],
    graph: Any,
    feat: Any,
    device: str,
    *,
    fast_graph: Any = None,
    tolerance: float = 2e-5,
    **options: Any,
) -> None:
    """``check_parity``, with edge ids for DGL's layer: its softmax fails on graphs that leave them out."""
    fast_graph = graph if fast_graph is None else fast_graph
    if graph.is_homogeneous and not graph.adj_tensors("csc")[2].numel():
        graph = dgl.graph(graph.edges(), num_nodes=graph.num_nodes())
    check_parity(layers, graph, feat, device, fast_graph=fast_graph, tolerance=tolerance, **options)


class WithAttention(nn.Module):
    """Output and attention as one vector, so that one comparison covers both and their gradients."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, graph: Any, feat: Any, **options: Any) -> Tensor:
        out, attention = self.layer(graph, feat, get_attention=True, **options)
        return torch.cat([out.flatten(), attention.flatten()])
