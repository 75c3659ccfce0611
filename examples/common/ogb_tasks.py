"""Converts OGB's node and graph property prediction to the form that the examples train on.

Loaders and Evaluators are OGB's own (see ``ogb_data``). The data are prepared as in OGB's example scripts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import Split, undirected
from .errors import ExampleError
from .graph_data import GraphDataset, from_union
from .ogb_data import dataset_info, import_ogb, open_dataset, split_ids, split_masks

#: OGB's name of a metric -> ours
METRICS = {"acc": "accuracy", "rocauc": "roc_auc"}


@dataclass(frozen=True)
class OgbNodes:
    """A graph of OGB's node property prediction.

    Attributes:
        name: OGB's name.
        edge_index: int64 (2, E), row 0 sources and row 1 destinations, no self loops.
        x: float32 (num_nodes, features).
        y: int64 (num_nodes, tasks): classes, or 0 and 1 per task; -1 for nodes without a label.
        num_outputs: Width that a model's logits must have.
        split: Node ids of ``train``, ``val`` and ``test``.
        metric: ``accuracy`` or ``roc_auc``.
        evaluator: OGB's Evaluator.
        notes: Changes to the data, for the report.
    """

    name: str
    edge_index: Tensor
    x: Tensor
    y: Tensor
    num_outputs: int
    split: Mapping[str, Tensor]
    metric: str
    evaluator: Any
    notes: tuple[str, ...]

    @property
    def num_nodes(self) -> int:
        return self.y.size(0)

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Computes the cross entropy, or the mean of the tasks' binary cross entropies, as OGB's examples do.

        Args:
            logits: Logits of n nodes, (n, num_outputs).
            y: The rows of `self.y` for the same nodes, on the same device.
        """
        if self.metric == "accuracy":
            return F.cross_entropy(logits.float(), y[:, 0])
        return F.binary_cross_entropy_with_logits(logits.float(), y.float())

    def score(self, logits: Tensor, nodes: Tensor) -> float:
        """Returns the score of OGB's Evaluator for the logits of some nodes."""
        y_pred = logits.argmax(-1, keepdim=True) if self.metric == "accuracy" else logits.float()
        return _evaluate(self.evaluator, self.y[nodes], y_pred)


@dataclass(frozen=True)
class OgbGraphs:
    """Graphs of OGB's graph property prediction with one binary task.

    Attributes:
        dataset: The graphs, their atoms' features as categories.
        code_sizes: Number of categories of each feature, as OGB's AtomEncoder has them.
        metric: ``roc_auc``.
        evaluator: OGB's Evaluator.
        notes: Changes to the data, for the report.
    """

    dataset: GraphDataset
    code_sizes: tuple[int, ...]
    metric: str
    evaluator: Any
    notes: tuple[str, ...]

    def score(self, logits: Tensor, graphs: Tensor) -> float:
        """Returns the score of OGB's Evaluator for the logits (graphs, 2) of some graphs."""
        y_pred = (logits[:, 1] - logits[:, 0])[:, None].float()
        return _evaluate(self.evaluator, self.dataset.y[graphs][:, None], y_pred)


def _evaluate(evaluator: Any, y_true: Tensor, y_pred: Tensor) -> float:
    return float(evaluator.eval({"y_true": y_true.cpu(), "y_pred": y_pred.cpu()})[evaluator.eval_metric])


def load_nodes(name: str, root: Path, framework: str, *, download: bool) -> OgbNodes:
    """Loads an ``ogbn-*`` graph with OGB's loader for the framework.

    The data are prepared as in OGB's examples: edges of arXiv and papers100M are made undirected, and nodes
    of proteins get the mean of their edges' features. In papers100M, two papers that cite each other have two
    edges in each direction.

    Args:
        name: For instance ``ogbn-arxiv``.
        root: Folder that holds OGB's folders.
        framework: ``pyg`` or ``dgl``.
        download: Whether the loader may fetch missing files.

    Raises:
        ExampleError: Files or packages are missing.
    """
    dataset = open_dataset(name, root, framework, download=download)
    if framework == "pyg":
        graph = dataset[0]
        edge_index, x, edge_feat, y = graph.edge_index, graph.x, graph.edge_attr, graph.y
    else:
        graph, y = dataset[0]
        edge_index = torch.stack(graph.edges())
        x, edge_feat = graph.ndata.get("feat"), graph.edata.get("feat")
    y = torch.where(y.isnan(), torch.full_like(y, -1), y).long()
    notes = [f"loaded by {type(dataset).__module__}.{type(dataset).__name__}"]
    if x is None:
        x = mean_of_edges(edge_index[1], edge_feat, y.size(0))
        notes.append("features of a node are the mean of its incoming edges'")
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    if name == "ogbn-arxiv":
        edge_index = undirected(edge_index, y.size(0))
        notes.append("edges made undirected")
    elif name == "ogbn-papers100M":
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        notes.append("edges made undirected")
    info = dataset_info(name)
    metric = METRICS[info["eval metric"]]
    return OgbNodes(
        name,
        edge_index,
        x.float(),
        y,
        int(info["num classes"] if metric == "accuracy" else info["num tasks"]),
        split_ids(dataset),
        metric,
        import_ogb("ogb.nodeproppred").Evaluator(name),
        tuple(notes),
    )


def mean_of_edges(target: Tensor, edge_feat: Tensor, num_nodes: int) -> Tensor:
    """Averages features (E, width) of each node's incoming edges, (num_nodes, width); 0 without edges."""
    total = torch.zeros(num_nodes, edge_feat.size(1)).index_add_(0, target, edge_feat.float())
    return total / torch.bincount(target, minlength=num_nodes).clamp(min=1)[:, None]


def load_graphs(name: str, root: Path, framework: str, *, download: bool) -> OgbGraphs:
    """Loads an ``ogbg-mol*`` dataset with OGB's loader for the framework; arguments as in `load_nodes`.

    Features of atoms are loaded. Features of bonds are left out, because the layers take no edge features.
    """
    dataset = open_dataset(name, root, framework, download=download)
    info = dataset_info(name)
    if (info["task type"], info["num tasks"]) != ("binary classification", "1"):
        raise ExampleError(
            f"--dataset {name}: expected one binary task, it has {info['num tasks']} of {info['task type']}."
        )
    if framework == "pyg":
        items = [dataset[i] for i in range(len(dataset))]
        sizes, codes = [item.num_nodes for item in items], [item.x for item in items]
        edges = [item.edge_index for item in items]
        y = torch.cat([item.y for item in items])
    else:
        sizes = [graph.num_nodes() for graph in dataset.graphs]
        codes = [graph.ndata["feat"] for graph in dataset.graphs]
        edges = [torch.stack(graph.edges()) for graph in dataset.graphs]
        y = dataset.labels
    node_ptr = torch.tensor([0, *sizes]).cumsum(0)
    union = torch.cat([edge + start for edge, start in zip(edges, node_ptr.tolist(), strict=False)], dim=1)
    split = Split(*split_masks(dataset, len(sizes)))
    graphs = from_union(name, union, node_ptr, torch.cat(codes).long(), y.flatten().long(), split)
    features = import_ogb("ogb.utils.features")
    return OgbGraphs(
        graphs,
        tuple(features.get_atom_feature_dims()),
        METRICS[info["eval metric"]],
        import_ogb("ogb.graphproppred").Evaluator(name),
        (f"loaded by {type(dataset).__module__}.{type(dataset).__name__}", "features of bonds left out"),
    )
