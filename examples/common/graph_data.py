"""Graph-classification data: many small graphs in one ``.npz`` file, and batches of them.

The file holds the disjoint union of all graphs: ``graph_ptr`` (graphs + 1) says which nodes are whose,
``graph_y`` (graphs) is the class of each, ``edge_index`` or ``rowptr`` and ``col`` the edges, ``x`` or
``node_label`` integer features of nodes, ``graph_split`` (optional) 0, 1, 2 for training, validation, test.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .data import Split, random_split, undirected
from .errors import ExampleError


@dataclass(frozen=True)
class GraphDataset:
    """Small graphs to be classified, as one disjoint union.

    Attributes:
        name: The dataset's name, as the user gave it.
        edge_index: int64 (2, E), both directions of every edge, sorted by destination.
        edge_ptr: int64 (graphs + 1,), the edges of every graph.
        node_ptr: int64 (graphs + 1,), the nodes of every graph.
        codes: int64 (num_nodes, columns), categorical features.
        y: int64 (graphs,).
        given_split: The split that comes with the data, or None.
        edge_codes: int64 (E, columns), categorical features of the edges, or None.
    """

    name: str
    edge_index: Tensor
    edge_ptr: Tensor
    node_ptr: Tensor
    codes: Tensor
    y: Tensor
    given_split: Split | None = None
    edge_codes: Tensor | None = None

    @property
    def num_graphs(self) -> int:
        return self.y.numel()

    @property
    def num_classes(self) -> int:
        return int(self.y.max()) + 1

    def code_sizes(self) -> list[int]:
        """Number of categories of each feature."""
        return (self.codes.amax(0) + 1).tolist()

    def split(self, seed: int) -> Split:
        """The given split, else 80/10/10 % drawn from `seed`."""
        return self.given_split or random_split(self.y, (0.8, 0.1), seed)

    def pyg_graphs(self, graphs: Tensor) -> list[Any]:
        """Some graphs as PyG's `Data`."""
        make = importlib.import_module("torch_geometric.data").Data
        found = []
        for graph in graphs.tolist():
            nodes = slice(self.node_ptr[graph], self.node_ptr[graph + 1])
            edges = slice(self.edge_ptr[graph], self.edge_ptr[graph + 1])
            names = {"edge_attr": self.edge_codes[edges]} if self.edge_codes is not None else {}
            edge_index = self.edge_index[:, edges] - nodes.start
            found.append(make(x=self.codes[nodes], edge_index=edge_index, y=self.y[graph], **names))
        return found

    def batch(self, graphs: Tensor) -> GraphBatch:
        """Some graphs as one: nodes and edges renumbered, in the order of `graphs`."""
        nodes, graph_of_node = ranges(self.node_ptr, graphs)
        edges, graph_of_edge = ranges(self.edge_ptr, graphs)
        size = self.node_ptr[graphs + 1] - self.node_ptr[graphs]
        shift = size.cumsum(0) - size - self.node_ptr[graphs]
        return GraphBatch(
            self.edge_index[:, edges] + shift[graph_of_edge],
            self.codes[nodes],
            graph_of_node,
            size,
            self.y[graphs],
            None if self.edge_codes is None else self.edge_codes[edges],
        )


@dataclass(frozen=True)
class GraphBatch:
    """Several graphs as one.

    Attributes:
        edge_index: int64 (2, E).
        codes: int64 (num_nodes, columns).
        graph_of_node: int64 (num_nodes,).
        size: int64 (graphs,), nodes per graph.
        y: int64 (graphs,).
        edge_codes: int64 (E, columns), or None.
        is_pyg: Whether the tensors are those of one of PyG's batches.
    """

    edge_index: Tensor
    codes: Tensor
    graph_of_node: Tensor
    size: Tensor
    y: Tensor
    edge_codes: Tensor | None = None
    is_pyg: bool = False

    def mean(self, x: Tensor) -> Tensor:
        """The means (graphs, width) of rows (num_nodes, width) over each graph's nodes."""
        if self.is_pyg:  # PyG's readouts know of padding
            pool = importlib.import_module("torch_geometric.nn").global_mean_pool
            return pool(x, self.graph_of_node, self.size.numel())
        total = x.new_zeros(self.size.numel(), x.size(1)).index_add(0, self.graph_of_node, x)
        return total / self.size[:, None].to(x.dtype)

    def as_pyg(self) -> Any:
        """PyG's `Batch` of the same graphs."""
        ptr = torch.cat([self.size.new_zeros(1), self.size.cumsum(0)])
        names = {"edge_attr": self.edge_codes} if self.edge_codes is not None else {}
        make = importlib.import_module("torch_geometric.data").Batch
        return make(
            x=self.codes, edge_index=self.edge_index, y=self.y, batch=self.graph_of_node, ptr=ptr, **names
        )

    @classmethod
    def of_pyg(cls, batch: Any) -> GraphBatch:
        """The graphs of PyG's `Batch` that `as_pyg` made, or a loader of `GraphDataset.pyg_graphs`."""
        size = batch.ptr[: batch.y.numel() + 1].diff()
        return cls(batch.edge_index, batch.x, batch.batch, size, batch.y, batch.get("edge_attr"), is_pyg=True)

    def to(self, device: torch.device) -> GraphBatch:
        parts = (self.edge_index, self.codes, self.graph_of_node, self.size, self.y)
        edge_codes = None if self.edge_codes is None else self.edge_codes.to(device)
        return GraphBatch(*(part.to(device) for part in parts), edge_codes)


def ranges(ptr: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """All positions in the chosen ranges of `ptr`, and for each the place of its range in `chosen`."""
    start, length = ptr[chosen], ptr[chosen + 1] - ptr[chosen]
    place = torch.repeat_interleave(length)
    inside = torch.arange(place.numel()) - (length.cumsum(0) - length)[place]
    return start[place] + inside, place


def batches(
    dataset: GraphDataset, graphs: Tensor, size: int, *, generator: torch.Generator | None = None
) -> Iterator[GraphBatch]:
    """Batches of up to `size` of the graphs, shuffled where a generator is given."""
    if generator is not None:
        graphs = graphs[torch.randperm(graphs.numel(), generator=generator)]
    return (dataset.batch(part) for part in graphs.split(size))


def pyg_loader(
    dataset: GraphDataset,
    graphs: Tensor,
    size: int,
    *,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Iterable[Any]:
    """PyG's batches of up to `size` of the graphs, shuffled again in every epoch if a generator is given."""
    make = importlib.import_module("fastsparse_pyg").DataLoader
    data = dataset.pyg_graphs(graphs)
    return make(data, batch_size=size, shuffle=generator is not None, generator=generator, device=device)


def find_graphs(name: str, root: Path) -> GraphDataset | None:
    """The dataset of that name or path if its file holds many graphs, else None.

    Raises:
        ExampleError: The file holds graphs without classes or features to learn from.
    """
    path = Path(name) if name.endswith(".npz") else root / f"{name.replace('-', '_')}.npz"
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            if "graph_ptr" not in archive.files:
                return None
            content = {key: archive[key] for key in archive.files}
    except (OSError, ValueError) as error:
        raise ExampleError(f"{path} could not be read as an .npz file without pickles: {error}") from error
    if "graph_y" not in content:
        raise ExampleError(f"{path} has no graph_y: the classes of graphs are what this example trains on.")

    num_nodes = int(content["num_nodes"])
    if "edge_index" in content:
        edges = torch.from_numpy(content["edge_index"].astype(np.int64))
    else:
        row = np.repeat(np.arange(num_nodes), np.diff(content["rowptr"]))
        edges = torch.from_numpy(np.stack([row, content["col"].astype(np.int64)]))
    y = torch.from_numpy(content["graph_y"].astype(np.int64))
    node_ptr = torch.from_numpy(content["graph_ptr"].astype(np.int64))
    return from_union(
        path.stem, edges, node_ptr, _codes(content, edges, num_nodes), y - y.min(), _given_split(content)
    )


def from_union(
    name: str, edges: Tensor, node_ptr: Tensor, codes: Tensor, y: Tensor, given_split: Split | None
) -> GraphDataset:
    """The dataset from edges (2, E) of the disjoint union, in any order; both directions are made."""
    edge_index = undirected(edges, codes.size(0))
    edge_ptr = torch.searchsorted(edge_index[1].contiguous(), node_ptr)
    return GraphDataset(name, edge_index, edge_ptr, node_ptr, codes, y, given_split)


def _codes(content: dict[str, np.ndarray], edges: Tensor, num_nodes: int) -> Tensor:
    """Integer features; node degrees (at most 31) where the file has none."""
    for key in ("x", "node_label"):
        if key in content and np.issubdtype(content[key].dtype, np.integer):
            return torch.from_numpy(content[key].astype(np.int64)).reshape(num_nodes, -1)
    return torch.bincount(undirected(edges, num_nodes)[1], minlength=num_nodes).clamp(max=31)[:, None]


def _given_split(content: dict[str, np.ndarray]) -> Split | None:
    if "graph_split" not in content:
        return None
    part = torch.from_numpy(content["graph_split"].astype(np.int64))
    return Split(part == 0, part == 1, part == 2)
