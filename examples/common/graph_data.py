"""Graph-classification data: many small graphs in one ``.npz`` file, and batches of them.

The file contains the disjoint union of all graphs. ``graph_ptr`` (graphs + 1,) has the first node of every
graph, and ``graph_y`` (graphs,) the class of every graph. ``edge_index``, or ``rowptr`` and ``col``, are the
edges. ``x`` or ``node_label`` are integer features of nodes. The optional ``graph_split`` (graphs,) is 0, 1
or 2 for training, validation and test.
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
        edge_ptr: int64 (graphs + 1,), position of the first edge of every graph.
        node_ptr: int64 (graphs + 1,), number of the first node of every graph.
        codes: int64 (num_nodes, columns), categorical features of the nodes.
        y: int64 (graphs,), class of every graph.
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
        """Returns the split of the data, or a random split into 80, 10 and 10 % with this seed."""
        return self.given_split or random_split(self.y, (0.8, 0.1), seed)

    def pyg_graphs(self, graphs: Tensor) -> list[Any]:
        """Converts some of the graphs to PyG's `Data`."""
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
        """Joins some graphs to one graph, in the order of `graphs`, with new node numbers."""
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
    """Several small graphs, joined to one graph.

    Attributes:
        edge_index: int64 (2, E).
        codes: int64 (num_nodes, columns), categorical features of the nodes.
        graph_of_node: int64 (num_nodes,), position of every node's graph in the batch.
        size: int64 (graphs,), nodes per graph.
        y: int64 (graphs,), class of every graph.
        edge_codes: int64 (E, columns), categorical features of the edges, or None.
        is_pyg: Whether the tensors belong to a batch of PyG.
    """

    edge_index: Tensor
    codes: Tensor
    graph_of_node: Tensor
    size: Tensor
    y: Tensor
    edge_codes: Tensor | None = None
    is_pyg: bool = False

    def mean(self, x: Tensor) -> Tensor:
        """Computes the means (graphs, width) of rows (num_nodes, width) over each graph's nodes."""
        if self.is_pyg:  # in captured steps, PyG's readouts leave padding out
            pool = importlib.import_module("torch_geometric.nn").global_mean_pool
            return pool(x, self.graph_of_node, self.size.numel())
        total = x.new_zeros(self.size.numel(), x.size(1)).index_add(0, self.graph_of_node, x)
        return total / self.size[:, None].to(x.dtype)

    def as_pyg(self) -> Any:
        """Converts the graphs to PyG's `Batch`."""
        ptr = torch.cat([self.size.new_zeros(1), self.size.cumsum(0)])
        names = {"edge_attr": self.edge_codes} if self.edge_codes is not None else {}
        make = importlib.import_module("torch_geometric.data").Batch
        return make(
            x=self.codes, edge_index=self.edge_index, y=self.y, batch=self.graph_of_node, ptr=ptr, **names
        )

    @classmethod
    def of_pyg(cls, batch: Any) -> GraphBatch:
        """Converts PyG's `Batch`, from `as_pyg` or from a loader of `GraphDataset.pyg_graphs`."""
        size = batch.ptr[: batch.y.numel() + 1].diff()
        return cls(batch.edge_index, batch.x, batch.batch, size, batch.y, batch.get("edge_attr"), is_pyg=True)

    def to(self, device: torch.device) -> GraphBatch:
        parts = (self.edge_index, self.codes, self.graph_of_node, self.size, self.y)
        edge_codes = None if self.edge_codes is None else self.edge_codes.to(device)
        return GraphBatch(*(part.to(device) for part in parts), edge_codes)


def ranges(ptr: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns all positions in the chosen ranges of `ptr`, and the index into `chosen` for each position."""
    start, length = ptr[chosen], ptr[chosen + 1] - ptr[chosen]
    place = torch.repeat_interleave(length)
    inside = torch.arange(place.numel()) - (length.cumsum(0) - length)[place]
    return start[place] + inside, place


def batches(
    dataset: GraphDataset, graphs: Tensor, size: int, *, generator: torch.Generator | None = None
) -> Iterator[GraphBatch]:
    """Yields batches of up to `size` graphs, which are shuffled if a generator is given."""
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
    """Makes a loader of PyG's batches of up to `size` graphs; with a generator, each epoch is shuffled."""
    make = importlib.import_module("fastsparse_pyg").DataLoader
    data = dataset.pyg_graphs(graphs)
    return make(data, batch_size=size, shuffle=generator is not None, generator=generator, device=device)


def find_graphs(name: str, root: Path) -> GraphDataset | None:
    """Loads the dataset with this name or path if its file contains many graphs; otherwise returns None.

    Raises:
        ExampleError: The graphs of the file have no classes or no features.
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
        raise ExampleError(f"{path} has no graph_y, the classes of the graphs, which this example trains on.")

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
    """Makes the dataset from edges (2, E) of the disjoint union, in any order; adds the other direction."""
    edge_index = undirected(edges, codes.size(0))
    edge_ptr = torch.searchsorted(edge_index[1].contiguous(), node_ptr)
    return GraphDataset(name, edge_index, edge_ptr, node_ptr, codes, y, given_split)


def _codes(content: dict[str, np.ndarray], edges: Tensor, num_nodes: int) -> Tensor:
    """Returns the integer features of nodes; node degrees (at most 31) if the file has no features."""
    for key in ("x", "node_label"):
        if key in content and np.issubdtype(content[key].dtype, np.integer):
            return torch.from_numpy(content[key].astype(np.int64)).reshape(num_nodes, -1)
    return torch.bincount(undirected(edges, num_nodes)[1], minlength=num_nodes).clamp(max=31)[:, None]


def _given_split(content: dict[str, np.ndarray]) -> Split | None:
    if "graph_split" not in content:
        return None
    part = torch.from_numpy(content["graph_split"].astype(np.int64))
    return Split(part == 0, part == 1, part == 2)
