"""The tables of DGL's layers that have a drop-in: how each is made and called, and on what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from dgl_cases import (
    TOLERANCE,
    bipartite,
    check_parity,
    dgl,
    fastsparse_dgl,
    features,
    layer_pair,
    pair,
    weights,
)
from torch import Tensor, nn

from fastsparse_dgl.nn import DROP_INS

originals = dgl.nn.pytorch
ZERO = {"allow_zero_in_degree": True}


class Case(NamedTuple):
    """A layer and its call on the CPU, of any two widths.

    Attributes:
        name: DGL's class.
        arguments: Positional arguments of the constructor, from the widths of features and result.
        options: Arguments of the constructor by name.
        edges: Width of the features of edges (-1: the nodes' width), "weight", or "" for neither.
    """

    name: str
    arguments: Callable[[int, int], tuple[Any, ...]] = lambda i, o: (i, o)
    options: Mapping[str, Any] = MappingProxyType({})
    edges: int | str = ""

    @property
    def id(self) -> str:
        given = [each for each in self.arguments(1, 2) if isinstance(each, str)]
        given += [f"{key}={value}" for key, value in self.options.items()]
        return f"{self.name}({','.join(given)})" + (f"-{self.edges}" if self.edges != "" else "")

    def pair(self, i: int, o: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
        """DGL's layer and the drop-in, with the same parameters."""
        original = getattr(originals, self.name, None)
        if original not in DROP_INS:
            pytest.skip("this DGL has no such layer")
        theirs, ours = (
            conv(*self.arguments(i, o), **self.options).to(dtype) for conv in (original, DROP_INS[original])
        )
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    def rest(self, graph: Any, i: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Features or weights of the edges, as a list of none or one."""
        if self.edges == "":
            return []
        generator, count = torch.Generator().manual_seed(2), graph.num_edges()
        if self.edges == "weight":
            return [torch.rand(count, generator=generator).add(0.1).to(dtype).requires_grad_()]
        width = i if self.edges == -1 else int(self.edges)
        return [torch.randn(count, width, generator=generator).to(dtype).requires_grad_()]

    def run(self, layer: Any, graph: Any, feat: Any, *rest: Tensor) -> Any:
        return (
            layer(graph, feat, edge_weight=rest[0]) if self.edges == "weight" else layer(graph, feat, *rest)
        )


def _network(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, outside), nn.ReLU(), nn.Linear(outside, outside))


def _pna(**more: Any) -> dict[str, Any]:
    kinds = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"]}
    return {**kinds, "delta": 2.5, **more}


CASES = [
    Case("AGNNConv", lambda i, o: (), {**ZERO, "learn_beta": True}),
    Case("DotGatConv", lambda i, o: (i, o, 2), ZERO),
    Case("EGATConv", lambda i, o: (i, 3, o, o, 2), edges=3),
    Case("EdgeGATConv", lambda i, o: (i, 3, o, 2), ZERO, edges=3),
    *(Case(name, lambda i, o: (i, o, 2), ZERO) for name in ("GATConv", "GATv2Conv")),
    *(Case(name, lambda i, o: (i, o, 2), ZERO | {"residual": True}) for name in ("GATConv", "GATv2Conv")),
    Case("GINConv", lambda i, o: (_network(i, o), "sum"), {"learn_eps": True}),
    *(Case("GINConv", lambda i, o, kind=kind: (_network(i, o), kind)) for kind in ("sum", "max", "mean")),
    Case("GINEConv", lambda i, o: (_network(i, o),), edges=-1),
    Case("GINEConv", lambda i, o: (_network(i, o),), {"learn_eps": True}, -1),
    Case("GatedGCNConv", lambda i, o: (i, 3, o), {"batch_norm": False, "residual": False}, 3),
    *(Case("GraphConv", options={"norm": norm} | ZERO) for norm in ("both", "none", "right", "left")),
    Case("GraphConv", options=ZERO, edges="weight"),
    Case("PNAConv", options=_pna()),
    Case("PNAConv", options=_pna(edge_feat_size=3), edges=3),
    *(Case("SAGEConv", lambda i, o, kind=kind: (i, o, kind)) for kind in ("mean", "gcn", "pool")),
    *(Case("SAGEConv", lambda i, o, kind=kind: (i, o, kind), edges="weight") for kind in ("mean", "gcn")),
]


#: Drop-ins whose training step no test replays. One contains other layers. The other stores features in the
#: graph, which is on the CPU, because wheels of DGL may have no CUDA support.
NOT_REPLAYED = ("HeteroGraphConv", "PNAConv")


def each_case(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """A test's parameter `case`."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in cases])


#: Widths of the inputs of sources and destinations.
WIDTH, NARROW = 7, 5

_fast = fastsparse_dgl
#: Name -> (FastSparse's class, its arguments for one width, its arguments for a pair of widths or None).
LAYERS: dict[str, tuple[type, tuple[Any, ...], tuple[Any, ...] | None]] = {
    "gat": (_fast.FastGATConv, (WIDTH, 4, 3), ((WIDTH, NARROW), 4, 3)),
    "gatv2": (_fast.FastGATv2Conv, (WIDTH, 4, 3), ((WIDTH, NARROW), 4, 3)),
    "dotgat": (_fast.FastDotGatConv, (WIDTH, 4, 3), ((WIDTH, NARROW), 4, 3)),
    "agnn": (_fast.FastAGNNConv, (1.5,), None),
    "graph narrows": (_fast.FastGraphConv, (WIDTH, 4), None),
    "graph widens": (_fast.FastGraphConv, (WIDTH, 9), None),
    **{f"graph {norm}": (_fast.FastGraphConv, (WIDTH, 4, norm), None) for norm in ("right", "left", "none")},
    **{
        f"sage {kind}": (_fast.FastSAGEConv, (WIDTH, 4, kind), ((WIDTH, NARROW), 4, kind))
        for kind in ("mean", "pool")
    },
    "sage gcn": (_fast.FastSAGEConv, (WIDTH, 4, "gcn"), None),
    **{
        f"gin {kind}": (_fast.FastGINConv, (nn.Linear(WIDTH, 3), kind, 0.25, True), None)
        for kind in ("sum", "max", "mean")
    },
}
ATTENTION = ["gat", "gatv2", "dotgat", "agnn"]
#: The layers that can return their attention.
WITH_ATTENTION = ["gat", "gatv2", "dotgat"]
#: Layers that by default reject nodes with an in-degree of zero.
WANTS_EDGES = [name for name in LAYERS if name in ATTENTION or name.startswith("graph")]


def layers(name: str, *, pair_of_widths: bool = False, **options: Any) -> tuple[Any, Any]:
    """Our layer and DGL's, with equal random parameters: biases that start at 0 would hide mistakes."""
    layer_class, single, double = LAYERS[name]
    arguments = double if pair_of_widths and double is not None else single
    return randomised(*layer_pair(layer_class, *arguments, **options))


def allowing_zero(name: str) -> dict[str, bool]:
    """The option with which a layer takes nodes of zero in-degree."""
    return ZERO if name in WANTS_EDGES else {}


def randomised(fast: Any, reference: Any) -> tuple[Any, Any]:
    """Gives both layers the same random parameters."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
    fast.load_state_dict(reference.state_dict())
    return fast, reference


def inputs(name: str, graph: Any, single: bool = True) -> Tensor | tuple[Tensor, Tensor]:
    """Features of the widths that ``layers`` makes."""
    if single:
        return features(graph, WIDTH)
    return pair(graph, WIDTH, WIDTH if LAYERS[name][2] is None else NARROW)


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


def check_layer(name: str, graph: Any, device: str, fast_graph: Any = None, **options: Any) -> None:
    """Calls ``check`` for a layer that is made with these options."""
    tolerance = 2e-5 if name in ATTENTION else TOLERANCE
    made = layers(name, **options)
    check(made, graph, inputs(name, graph), device, fast_graph=fast_graph, tolerance=tolerance)


class WithAttention(nn.Module):
    """Output and attention as one vector, so that one comparison covers both and their gradients."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, graph: Any, feat: Any, edge_feat: Tensor | None = None, **options: Any) -> Tensor:
        given = [] if edge_feat is None else [edge_feat]
        parts = self.layer(graph, feat, *given, get_attention=True, **options)
        return torch.cat([part.flatten() for part in parts])


class Everything(nn.Module):
    """All results as one vector."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, graph: Any, feat: Any, edge_feat: Tensor, **options: Any) -> Tensor:
        out = self.layer(graph, feat, edge_feat, **options)
        return torch.cat([part.flatten() for part in (out if isinstance(out, tuple) else (out,))])


#: Layers with edge features: the width of these, and the arguments for one width of node features, or a pair.
EDGE_LAYERS: dict[str, tuple[int, Callable[[Any], tuple[Any, ...]]]] = {
    "EdgeGATConv": (3, lambda width: (width, 3, 4, 3)),
    "EGATConv": (3, lambda width: (width, 3, 4, 2, 3)),
    "GINEConv": (WIDTH, lambda width: (nn.Linear(WIDTH, 5),)),
    "GatedGCNConv": (3, lambda width: (width, 3, 5)),
}


def edge_layers(name: str, *arguments: Any, pair_of_widths: bool = False, **options: Any) -> tuple[Any, Any]:
    """Our layer with features of edges and DGL's, with equal random parameters."""
    fast_class = getattr(fastsparse_dgl, f"Fast{name}")
    arguments = arguments or EDGE_LAYERS[name][1]((WIDTH, NARROW) if pair_of_widths else WIDTH)
    if name == "GatedGCNConv" and not hasattr(originals, name):
        with pytest.raises(NotImplementedError, match=r"2\.0 or newer"):
            fast_class(*arguments)
        pytest.skip("DGL has no GatedGCNConv before 2.0")
    made = randomised(*layer_pair(fast_class, *arguments, **options))
    for layer in made if name == "GatedGCNConv" else ():  # their gradients are only rounding
        layer.A.bias.requires_grad_(not layer.batch_norm)
        layer.B.bias.requires_grad_(not layer.batch_norm)
    return made


def check_edges(
    name: str,
    graph: Any,
    device: str,
    made: tuple[Any, Any] | None = None,
    *,
    feat: Any = None,
    attention: bool = False,
    fast_graph: Any = None,
    **options: Any,
) -> None:
    """`check` of such a layer, on features of edges that are 0 on average for GINE."""
    feat = features(graph, WIDTH) if feat is None else feat
    made = edge_layers(name, pair_of_widths=isinstance(feat, tuple)) if made is None else made
    edge_feat = weights(graph, EDGE_LAYERS[name][0]) - (1.0 if name == "GINEConv" else 0.0)
    wrapped = tuple((WithAttention if attention else Everything)(layer) for layer in made)
    tolerance = {"GINEConv": TOLERANCE, "GatedGCNConv": 5e-5}.get(name, 2e-5)
    options = {"edge_feat": edge_feat, **options}
    check(wrapped, graph, feat, device, fast_graph=fast_graph, tolerance=tolerance, **options)
