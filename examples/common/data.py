"""Node-classification data: the embedded planted partition, ``.npz`` files, and the frameworks' own loaders.

All sources are converted to a `NodeDataset`: an undirected graph without self loops or duplicate edges
(layers add self loops themselves), labels, optional features, and the splits of the nodes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import framework_data
from .errors import ExampleError

ROOT_VARIABLE = "FASTSPARSE_DATA"


@dataclass(frozen=True)
class Split:
    """Boolean masks of shape (num_nodes,) for training, validation and test."""

    train: Tensor
    val: Tensor
    test: Tensor

    def to(self, device: torch.device) -> Split:
        return Split(self.train.to(device), self.val.to(device), self.test.to(device))


@dataclass(frozen=True)
class NodeDataset:
    """A graph whose nodes are to be classified.

    Attributes:
        name: The dataset's name, as the user gave it.
        edge_index: int64 (2, E), row 0 sources and row 1 destinations, both directions of every edge.
        y: Labels, int64 (num_nodes,); -1 for nodes without a label.
        num_classes: Number of classes.
        x: float32 (num_nodes, features), or None when the source has no features.
        given_splits: The splits of the data source; empty if it has none.
        random_shares: Shares of training and validation nodes, for random splits.
        notes: Changes to the data, for the report.
    """

    name: str
    edge_index: Tensor
    y: Tensor
    num_classes: int
    x: Tensor | None = None
    given_splits: tuple[Split, ...] = ()
    random_shares: tuple[float, float] = (0.6, 0.2)
    notes: tuple[str, ...] = field(default=())

    @property
    def num_nodes(self) -> int:
        return self.y.numel()

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    def split(self, run: int, seed: int) -> Split:
        """Returns the split of a run: given splits in order, or a random split with seed ``seed + run``."""
        if self.given_splits:
            return self.given_splits[run % len(self.given_splits)]
        return random_split(self.y, self.random_shares, seed + run)

    def split_description(self, seed: int) -> str:
        """Describes the split in a phrase for the report."""
        if len(self.given_splits) == 1:
            only = self.given_splits[0]
            sizes = "/".join(str(int(mask.sum())) for mask in (only.train, only.val, only.test))
            return f"public split, {sizes} nodes"
        if self.given_splits:
            return f"{len(self.given_splits)} given splits, run r on split r mod {len(self.given_splits)}"
        train, val = self.random_shares
        shares = f"{train:.0%}/{val:.0%}/{1 - train - val:.0%}"
        return f"random split {shares}, another for every run, from seed {seed} + run"

    def to(self, device: torch.device) -> NodeDataset:
        return replace(
            self,
            edge_index=self.edge_index.to(device),
            y=self.y.to(device),
            x=None if self.x is None else self.x.to(device),
            given_splits=tuple(split.to(device) for split in self.given_splits),
        )


def random_split(y: Tensor, shares: tuple[float, float], seed: int) -> Split:
    """Splits the labelled nodes at random; the same seed gives the same split on every device."""
    labelled = (y.cpu() >= 0).nonzero().flatten()
    order = labelled[torch.randperm(labelled.numel(), generator=torch.Generator().manual_seed(seed))]
    first = round(shares[0] * order.numel())
    second = first + round(shares[1] * order.numel())
    masks = []
    for nodes in (order[:first], order[first:second], order[second:]):
        mask = torch.zeros(y.numel(), dtype=torch.bool)
        mask[nodes] = True
        masks.append(mask.to(y.device))
    return Split(*masks)


def undirected(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Returns both directions of every edge once, without self loops, sorted by destination, then source."""
    source, target = edge_index.long()
    keep = source != target
    source, target = source[keep], target[keep]
    key = torch.unique(torch.cat([target * num_nodes + source, source * num_nodes + target]))
    return torch.stack([key % num_nodes, key // num_nodes])


def planted_partition(
    seed: int = 0,
    num_nodes: int = 20_000,
    num_edges: int = 400_000,
    num_classes: int = 10,
    num_features: int = 64,
    inside: float = 0.30,
    noise: float = 3.5,
) -> NodeDataset:
    """Draws a random graph with planted communities and noisy features; nothing is downloaded.

    Every node belongs to one of `num_classes` equally large communities. A share `inside` of the edges joins
    two nodes of one community; the other edges join two nodes of the whole graph. A node's features are the
    random direction of its community plus Gaussian noise of standard deviation `noise`. With this noise, the
    features of one node do not show its community, but the mean over its neighbours does.

    Args:
        seed: Seed of all random numbers.
        num_nodes: Number of nodes.
        num_edges: Approximate number of directed edges. Duplicates are dropped, so there are slightly fewer.
        num_classes: Number of communities.
        num_features: Width of the features.
        inside: Share of the edges that join nodes of one community by construction.
        noise: Standard deviation of the feature noise, the communities' directions having entries of size
            one.

    Returns:
        The dataset, with random splits of 10 % training, 10 % validation and 80 % test nodes.
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.randperm(num_nodes, generator=generator) % num_classes
    # Nodes sorted by community, so that a random node of a community is a random element of one slice.
    members = torch.argsort(y, stable=True)
    size = torch.bincount(y, minlength=num_classes)
    start = torch.cumsum(size, 0) - size

    links = num_edges // 2
    u = torch.randint(num_nodes, (links,), generator=generator)
    v = torch.randint(num_nodes, (links,), generator=generator)
    local = torch.rand(links, generator=generator) < inside
    drawn = torch.rand(links, generator=generator)
    partner = members[start[y[u]] + (drawn * size[y[u]]).long()]
    edge_index = undirected(torch.stack([u, torch.where(local, partner, v)]), num_nodes)

    centre = torch.randn(num_classes, num_features, generator=generator)
    x = centre[y] + noise * torch.randn(num_nodes, num_features, generator=generator)
    notes = (f"planted partition drawn from seed {seed}; nothing was downloaded",)
    return NodeDataset("planted", edge_index, y, num_classes, x, random_shares=(0.1, 0.1), notes=notes)


def load_npz(path: Path) -> NodeDataset:
    """Reads one graph file of the project's ``.npz`` schema.

    Keys: ``edge_index`` (2, E), or ``rowptr`` and ``col``; ``num_nodes``; ``y`` (num_nodes,) with -1 for
    "none"; optionally ``storage`` ("once", "both" or "directed"), features as ``x`` or as CSR in
    ``x_indptr``, ``x_indices``, ``x_data`` and ``x_shape``, and ``train_mask``, ``val_mask``, ``test_mask``
    of shape (num_nodes,) or (num_nodes, splits).
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            content = {key: archive[key] for key in archive.files}
    except (OSError, ValueError) as error:
        raise ExampleError(f"{path} could not be read as an .npz file without pickles: {error}") from error
    missing = [key for key in ("num_nodes", "y") if key not in content]
    if "edge_index" not in content and not {"rowptr", "col"} <= content.keys():
        missing.append("edge_index (or rowptr and col)")
    if missing:
        hint = "this example trains on node labels" if missing == ["y"] else "see load_npz for the schema"
        raise ExampleError(
            f"{path} has no {', '.join(missing)}: {hint}. It holds {', '.join(sorted(content))}."
        )

    num_nodes = int(content["num_nodes"])
    if "edge_index" in content:
        edge_index = torch.from_numpy(content["edge_index"].astype(np.int64))
    else:
        row = np.repeat(np.arange(num_nodes), np.diff(content["rowptr"]))
        edge_index = torch.from_numpy(np.stack([row, content["col"].astype(np.int64)]))
    masks = {part: content.get(f"{part}_mask") for part in ("train", "val", "test")}
    return from_parts(
        path.stem,
        edge_index,
        torch.from_numpy(content["y"].astype(np.int64)),
        x=_npz_features(content),
        masks=None
        if any(mask is None for mask in masks.values())
        else tuple(map(torch.from_numpy, masks.values())),
        directed=str(content.get("storage", "both")) == "directed",
        notes=(f"read from {path.name}",),
    )


def _npz_features(content: dict[str, np.ndarray]) -> Tensor | None:
    if "x" in content:
        return torch.from_numpy(content["x"].astype(np.float32))
    if "x_indptr" not in content:
        return None
    rows, width = (int(size) for size in content["x_shape"])
    row = np.repeat(np.arange(rows), np.diff(content["x_indptr"]))
    dense = torch.zeros(rows, width)
    dense[torch.from_numpy(row), torch.from_numpy(content["x_indices"].astype(np.int64))] = torch.from_numpy(
        content["x_data"].astype(np.float32)
    )
    return dense


def from_parts(
    name: str,
    edge_index: Tensor,
    y: Tensor,
    *,
    x: Tensor | None = None,
    masks: tuple[Tensor, ...] | None = None,
    directed: bool = False,
    notes: tuple[str, ...] = (),
) -> NodeDataset:
    """Checks the data of a source, and converts it to the form that the examples use."""
    num_nodes = y.numel()
    if y.dim() != 1:
        raise ExampleError(
            f"{name} has labels of shape {tuple(y.shape)}: expected one class per node, shape (num_nodes,)."
        )
    if edge_index.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < num_nodes:
        raise ExampleError(
            f"{name} has edges between nodes {int(edge_index.min())} to {int(edge_index.max())},"
            f" but only {num_nodes} nodes."
        )
    if x is not None and x.size(0) != num_nodes:
        raise ExampleError(f"{name} has {x.size(0)} rows of features for {num_nodes} nodes.")
    if directed:
        notes += ("source is directed: edges made undirected, as is usual for this benchmark",)
    splits: tuple[Split, ...] = ()
    if masks is not None:
        columns = [mask.bool().reshape(num_nodes, -1) for mask in masks]
        # Unlabelled nodes (-1) can be neither trained on nor scored, whatever the masks say.
        splits = tuple(
            Split(*(column[:, i] & (y >= 0) for column in columns)) for i in range(columns[0].size(1))
        )
    num_classes = int(y.max()) + 1 if num_nodes else 0
    if num_classes < 2:
        raise ExampleError(f"{name} has {num_classes} classes: a classifier needs two or more.")
    return NodeDataset(
        name, undirected(edge_index, num_nodes), y, num_classes, x, given_splits=splits, notes=notes
    )


def default_root() -> Path:
    """Returns the folder in the variable FASTSPARSE_DATA, or ``data`` in the current directory."""
    return Path(os.environ.get(ROOT_VARIABLE) or "data")


def load_dataset(
    name: str, root: Path, framework: str, *, seed: int = 0, download: bool = False
) -> NodeDataset:
    """Finds a dataset by name or path. Nothing is downloaded unless `download` is set.

    Args:
        name: ``planted``, the path of an ``.npz`` file, or a dataset's name. For a name, ``root/<name>.npz``
            is read if it exists; otherwise the framework's own loader reads its files under `root`.
        root: Folder that holds datasets.
        framework: ``pyg`` or ``dgl``: the framework whose loader is used.
        seed: Seed of the planted graph.
        download: Whether the framework's loader may fetch missing files.

    Returns:
        The dataset.

    Raises:
        ExampleError: There is no such dataset, or its files are missing.
    """
    if name == "planted":
        return planted_partition(seed)
    if name.endswith(".npz"):
        path = Path(name)
        if not path.is_file():
            raise ExampleError(f"--dataset {name}: there is no such file.")
        return load_npz(path)
    for stem in dict.fromkeys((name, name.replace("-", "_"))):
        if (path := root / f"{stem}.npz").is_file():
            return load_npz(path)
    parts = framework_data.load(name, root, framework, download=download)
    return from_parts(name, **parts)


def node_features(dataset: NodeDataset, kind: str, *, normalise: bool) -> tuple[Tensor | None, str]:
    """Chooses the input features, and describes them for the report.

    Args:
        dataset: The data.
        kind: ``given``, ``degree``, ``learned``, or ``auto``: given features if the data have some, else
            learned features.
        normalise: Whether to scale each row of given features to sum to one (bag-of-words data).

    Returns:
        (num_nodes, features) in float32, or None for features to be learned, and a phrase for the report.
    """
    if kind == "auto":
        kind = "learned" if dataset.x is None else "given"
    if kind == "learned":
        return None, "features learned per node" + ("" if dataset.x is not None else " (the data have none)")
    if kind == "degree":
        return degree_features(dataset), "features made from node degrees"
    if dataset.x is None:
        raise ExampleError(f"{dataset.name} has no features: use --features learned or --features degree.")
    x = dataset.x.float()
    if normalise:
        x = x / x.sum(dim=1, keepdim=True).clamp(min=1)
    return x, f"{x.size(1)} given features" + (", rows scaled to sum 1" if normalise else "")


def degree_features(dataset: NodeDataset, width: int = 32) -> Tensor:
    """Makes features (num_nodes, width) from hat functions of the degree's logarithm; rows sum to one."""
    degree = torch.bincount(dataset.edge_index[1], minlength=dataset.num_nodes).float()
    level = torch.log1p(degree)
    position = level / level.max().clamp(min=1e-6) * (width - 1)
    return (1 - (position[:, None] - torch.arange(width, device=position.device)).abs()).clamp(min=0)
