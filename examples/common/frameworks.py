"""One interface to the layers and graphs of both frameworks.

`layer` looks up the framework's own layer (``reference``) or its drop-in (``fast``). `make_graph` converts a
dataset to the graph that the layers take. `Framework.call` calls a layer with its arguments in the
framework's order. Models that use only these three run unchanged in PyG and in DGL.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .errors import ExampleError
from .framework_data import import_dgl
from .graph_data import GraphBatch

#: (framework, operator) -> (the framework's own layer, its drop-in, constructor options of both layers).
LAYERS: dict[tuple[str, str], tuple[str, str, dict[str, Any]]] = {
    # With cached=True, PyG normalises the graph only once in full-batch training, as in PyG's GCN example.
    ("pyg", "gcn"): ("torch_geometric.nn.GCNConv", "fastsparse_pyg.FastGCNConv", {"cached": True}),
    ("dgl", "gcn"): ("dgl.nn.GraphConv", "fastsparse_dgl.FastGraphConv", {}),
    ("pyg", "sage"): ("torch_geometric.nn.SAGEConv", "fastsparse_pyg.FastSAGEConv", {}),
    ("dgl", "sage"): ("dgl.nn.SAGEConv", "fastsparse_dgl.FastSAGEConv", {"aggregator_type": "mean"}),
    # On MaxK's dense features, the reference layer gives the same result as the MaxK layer.
    ("pyg", "maxk-gcn"): ("torch_geometric.nn.GCNConv", "fastsparse_pyg.FastMaxKGCNConv", {"cached": True}),
    ("dgl", "maxk-gcn"): ("dgl.nn.GraphConv", "fastsparse_dgl.FastMaxKGraphConv", {}),
    ("pyg", "maxk-sage"): ("torch_geometric.nn.SAGEConv", "fastsparse_pyg.FastMaxKSAGEConv", {}),
    ("dgl", "maxk-sage"): (
        "dgl.nn.SAGEConv",
        "fastsparse_dgl.FastMaxKSAGEConv",
        {"aggregator_type": "mean"},
    ),
    ("pyg", "gin"): ("torch_geometric.nn.GINConv", "fastsparse_pyg.FastGINConv", {"train_eps": True}),
    ("dgl", "gin"): ("dgl.nn.GINConv", "fastsparse_dgl.FastGINConv", {"learn_eps": True}),
    ("pyg", "gat"): ("torch_geometric.nn.GATConv", "fastsparse_pyg.FastGATConv", {}),
    ("dgl", "gat"): ("dgl.nn.GATConv", "fastsparse_dgl.FastGATConv", {}),
    ("pyg", "gatv2"): ("torch_geometric.nn.GATv2Conv", "fastsparse_pyg.FastGATv2Conv", {}),
    ("dgl", "gatv2"): ("dgl.nn.GATv2Conv", "fastsparse_dgl.FastGATv2Conv", {}),
    ("pyg", "agnn"): ("torch_geometric.nn.AGNNConv", "fastsparse_pyg.FastAGNNConv", {}),
    ("dgl", "agnn"): ("dgl.nn.AGNNConv", "fastsparse_dgl.FastAGNNConv", {}),
    ("pyg", "gine"): ("torch_geometric.nn.GINEConv", "fastsparse_pyg.FastGINEConv", {"train_eps": True}),
    ("dgl", "gine"): ("dgl.nn.GINEConv", "fastsparse_dgl.FastGINEConv", {"learn_eps": True}),
    ("pyg", "pna"): ("torch_geometric.nn.PNAConv", "fastsparse_pyg.FastPNAConv", {}),
    ("dgl", "pna"): ("dgl.nn.PNAConv", "fastsparse_dgl.FastPNAConv", {}),
    # Attention that reads features of edges.
    ("pyg", "edge_attention"): (
        "torch_geometric.nn.TransformerConv",
        "fastsparse_pyg.FastTransformerConv",
        {},
    ),
    ("dgl", "edge_attention"): (
        "dgl.nn.EdgeGATConv",
        "fastsparse_dgl.FastEdgeGATConv",
        {"allow_zero_in_degree": True},
    ),
    # Neither framework has this layer for sparse graphs: the reference is its own message passing.
    ("pyg", "graph_transformer"): (
        "common.reference_transformer.PygGraphTransformerLayer",
        "fastsparse_pyg.GraphTransformerLayer",
        {},
    ),
    ("dgl", "graph_transformer"): (
        "common.reference_transformer.DglGraphTransformerLayer",
        "fastsparse_dgl.GraphTransformerLayer",
        {},
    ),
}

#: The layers that `--conv both` trains, in this order.
CONVS = ("reference", "fast")


class Nodes(Protocol):
    """The attributes of a dataset that `make_graph` reads."""

    @property
    def edge_index(self) -> Tensor: ...

    @property
    def num_nodes(self) -> int: ...


@dataclass(frozen=True)
class Framework:
    """A framework, and how its layers are called.

    Attributes:
        name: ``pyg`` or ``dgl``.
        call: Function ``call(layer, graph, x)``, which calls the layer in the framework's argument order.
    """

    name: str
    call: Callable[[nn.Module, Any, Tensor], Tensor]


FRAMEWORKS = {
    "pyg": Framework("pyg", lambda layer, graph, x: layer(x, graph)),
    "dgl": Framework("dgl", lambda layer, graph, x: layer(graph, x)),
}


def layer(framework: str, operator: str, conv: str) -> tuple[str, Callable[..., nn.Module]]:
    """Finds a layer class.

    Args:
        framework: ``pyg`` or ``dgl``.
        operator: the second part of a key of `LAYERS`.
        conv: ``reference`` or ``fast``.

    Returns:
        The class's name, and its constructor with the options of `LAYERS` set.

    Raises:
        ExampleError: The layer's package cannot be imported.
    """
    reference, fast, options = LAYERS[framework, operator]
    path = fast if conv == "fast" else reference
    module, _, name = path.rpartition(".")
    try:
        if framework == "dgl":
            import_dgl()
        cls = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ExampleError(
            f"{path} could not be imported: {error}. Install with pip install 'fastsparse-gnn[{framework}]';"
            " python -m fastsparse_core.doctor says what is wrong."
        ) from error
    return name, lambda *args, **kwargs: cls(*args, **{**options, **kwargs})


def attention_layer(
    framework: str,
    constructor: Callable[..., nn.Module],
    dropout: float,
    in_channels: int,
    out_channels: int,
    heads: int,
    concat: bool,
) -> nn.Module:
    """Makes a layer; converts the arguments to the framework's names."""
    if framework == "pyg":
        return constructor(in_channels, out_channels, heads=heads, concat=concat, dropout=dropout)
    return constructor(in_channels, out_channels, heads, attn_drop=dropout)


def joined(x: Tensor, concat: bool) -> Tensor:
    """Concatenates or averages the heads of DGL's results (N, heads, C); PyG's layers do this themselves."""
    if x.dim() == 2:
        return x
    return x.flatten(1) if concat else x.mean(1)


def make_graph(
    framework: str, dataset: Nodes, conv: str, device: torch.device, *, self_loops: bool = True
) -> Any:
    """Makes the graph in the form that the framework's layers take.

    For PyG, it is the edge_index on `device`. For DGL, it is a DGLGraph; self loops are added if requested,
    because DGL's layers add none. DGL's wheels on PyPI are built without CUDA, so for ``fast`` the graph may
    stay on the CPU (the layer copies the structure once), but ``reference`` needs the graph on `device`.

    Raises:
        ExampleError: DGL's own layer cannot run on `device`, because the installed DGL does not support it.
    """
    if framework == "pyg":
        return dataset.edge_index.to(device)
    dgl = import_dgl()
    source, target = dataset.edge_index.cpu()
    graph = dgl.graph((source, target), num_nodes=dataset.num_nodes)
    return move_graph(dgl.add_self_loop(graph) if self_loops else graph, conv, device)


def make_batch_graph(framework: str, batch: GraphBatch, conv: str, *, self_loops: bool = False) -> Any:
    """Makes one graph of a batch of small graphs, on the batch's device if possible (see `make_graph`).

    Self loops are added only for DGL, and only for layers that add them by themselves in PyG.
    """
    if framework == "pyg":
        return batch.edge_index
    source, target = batch.edge_index.cpu()
    dgl = import_dgl()
    graph = dgl.graph((source, target), num_nodes=batch.graph_of_node.numel())
    return move_graph(dgl.add_self_loop(graph) if self_loops else graph, conv, batch.edge_index.device)


def move_graph(graph: Any, conv: str, device: torch.device) -> Any:
    """Moves a graph to the device. For ``fast``, a DGLGraph stays on the CPU if DGL is built without CUDA."""
    if device.type == "cpu" or isinstance(graph, Tensor):
        return graph.to(device)
    try:
        return graph.to(device)
    except import_dgl().DGLError as error:
        if conv == "fast":
            return graph
        raise ExampleError(
            f"DGL's own layer cannot run on {device} with the installed DGL"
            f" ({str(error).strip().splitlines()[-1]}). Use --conv fast, which supports"
            " this device, or --device cpu."
        ) from error
