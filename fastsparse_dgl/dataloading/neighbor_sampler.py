"""NeighborSampler: blocks of sampled neighbours."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastsparse_core.log import info_once, warn_once
from fastsparse_core.ops._autocast import version_of
from fastsparse_core.sampling import Draw, Edges, Sample
from fastsparse_core.sampling import NeighborSampler as CoreSampler
from fastsparse_dgl import device_graph
from fastsparse_dgl.block_data import gathered
from fastsparse_dgl.caching import adjacency_of, relation
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.dgl_blocks import dgl_block, dgl_can_hold
from fastsparse_dgl.graph import GraphLike
from fastsparse_dgl.sampled_block import SampledBlock

_logger = logging.getLogger("fastsparse_dgl")
_INSTEAD_OF_OUT = (
    "Pass dgl.reverse(graph, copy_edata=True) to a sampler with edge_dir='in', or take the sampled edges "
    "themselves from dgl.sampling.sample_neighbors(graph, ids, fanout, edge_dir='out')"
)
#: Reason for falling back to DGL's sampler for graphs on a GPU. It is logged without a warning, because DGL's
#: sampler is as fast on a GPU.
ON_GPU = "the graph is on a GPU, where DGL can sample"


def is_held_on_gpu(g: GraphLike) -> bool:
    """True if the graph is on a GPU that DGL can use only after `enable()`."""
    return g.device.type == "cuda" and device_graph.serves(g.device)


def tell_fallback(message: str, reason: str) -> None:
    """Reports once that DGL's code samples: as a warning, or as a log record if DGL is as fast."""
    if reason == ON_GPU:
        info_once(_logger, f"{message}: {reason}")
    else:
        where = ", which runs on the CPU" if torch.cuda.is_available() else ""
        warn_once(f"{message}{where}: {reason}")


class NeighborSampler(dgl.dataloading.NeighborSampler):
    r"""Drop-in replacement of :class:`dgl.dataloading.NeighborSampler`, also on GPUs with a CPU build of DGL.

    Hamilton et al., `Inductive Representation Learning on Large Graphs <https://arxiv.org/abs/1706.02216>`_,
    section 3.1. With :class:`fastsparse_dgl.DataLoader` and ``device`` a GPU, it samples on the GPU.
    Otherwise it samples in C++ threads, also in DGL's ``DataLoader`` and its worker processes. As in DGL,
    every hop samples neighbours for all nodes found so far, not only for new ones. Random numbers come from
    PyTorch's generator, so ``torch.manual_seed`` makes batches repeatable.

    DGL's own code runs for ``edge_dir="out"``, for excluded edges, and for graphs on a GPU if DGL was built
    with CUDA. With ``edge_dir="out"``, its blocks can have node ids that are out of range, on which DGL's
    layers write outside of their memory. Such a block is an error here. To sample outgoing edges, pass
    ``dgl.reverse(graph, copy_edata=True)`` to a sampler with ``edge_dir="in"``.

    Args:
        fanouts: number of neighbours per layer, starting with the first layer; -1: all. An item may be a dict
            by edge type.
        prob: name of the edge data with weights; neighbours are sampled in proportion to these weights.
        mask: name of the edge data that marks which edges may be sampled.
        others: as in DGL.

    Raises:
        ValueError: fan-outs or weights do not fit the graph, or a block with ``edge_dir="out"`` has node ids
            that are out of range. The error is raised when sampling begins.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import NeighborSampler
        >>> graph = dgl.graph((torch.arange(6), torch.arange(6).roll(1)))
        >>> inputs, outputs, blocks = NeighborSampler([2, 2]).sample_blocks(graph, torch.tensor([3]))
        >>> inputs
        tensor([3, 4, 5])
    """

    _cores: Any = None
    #: See `block_data.GraphColumn`.
    _reads: Any = None

    def sample_blocks(self, g: GraphLike, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        """Samples blocks on the device of the graph, as DGL's sampler does.

        Args:
            g: the graph to sample from.
            seed_nodes: ids (num_seeds,), or a dict from node types to ids.
            exclude_eids: ids of edges that must not be sampled. If they are given, DGL's own code runs.

        Raises:
            ValueError: as for the class.
        """
        reason = self.why_not(g, exclude_eids)
        if reason:
            tell_fallback("NeighborSampler falls back to DGL's sampler", reason)
            sample = super().sample_blocks(g, seed_nodes, exclude_eids)
            if self.edge_dir != "in":
                for block in sample[2]:
                    _check_outgoing(block)
            return sample
        return self.finish(g, self.start(g, seed_nodes, g.device), seed_nodes)

    def why_not(self, g: GraphLike, exclude_eids: Any = None) -> str:
        """Returns why DGL's own code must sample; "" if FastSparse can.

        Args:
            g: the graph to sample from.
            exclude_eids: as for :meth:`sample_blocks`.
        """
        if not isinstance(g, dgl.DGLGraph):
            return f"the graph is a {type(g).__name__}. Pass a DGLGraph"
        if g.device.type != "cpu" and not is_held_on_gpu(g):
            return ON_GPU
        if self.edge_dir != "in":
            return f"edge_dir={self.edge_dir!r} is not supported. {_INSTEAD_OF_OUT}"
        if exclude_eids is None:
            return ""
        return (
            "excluded edges are not supported, so DGL samples, and layers convert every block. Leave out "
            "`exclude` only if the model may see the edges that it predicts"
        )

    def start(self, g: GraphLike, seed_nodes: Any, device: torch.device) -> Draw:
        """Starts to sample on a device, without waiting.

        Args:
            g: the graph to sample from.
            seed_nodes: ids (num_seeds,), or a dict from node types to ids.
            device: device that samples.

        Raises:
            ValueError: the graph has several node types and ``seed_nodes`` is no dict.
        """
        if not isinstance(seed_nodes, Mapping):
            if len(g.ntypes) != 1:
                raise ValueError(
                    f"seed_nodes: expected a dict by node type, such as {{{g.ntypes[0]!r}: ids}}, for a "
                    f"graph of node types {g.ntypes}, got {type(seed_nodes).__name__}"
                )
            seed_nodes = {g.ntypes[0]: seed_nodes}
        core = self.prepare(g, device)
        with self._names_of_dgl():
            return core.start({name: torch.as_tensor(ids) for name, ids in seed_nodes.items()})

    def finish(self, g: GraphLike, draw: Draw, seed_nodes: Any) -> tuple[Any, Any, list[Any]]:
        """Returns input nodes, output nodes and blocks, on the device where they were sampled.

        Args:
            g: the graph to sample from.
            draw: result of :meth:`start`.
            seed_nodes: as for :meth:`start`.
        """
        with self._names_of_dgl():
            sample = draw.finish()
        nodes = {name: ids.to(g.idtype) for name, ids in sample.nodes.items()}
        blocks = [self._block(g, sample, hop, nodes) for hop in reversed(range(len(sample.blocks)))]
        seeds: Any = {name: nodes[name][: counts[0]] for name, counts in sample.num_nodes.items()}
        is_by_type = isinstance(seed_nodes, Mapping)
        seeds = {name: seeds[name] for name in seed_nodes} if is_by_type else seeds[g.ntypes[0]]
        return (nodes[g.ntypes[0]] if len(g.ntypes) == 1 else nodes), seeds, blocks

    def prepare(self, g: GraphLike, device: torch.device) -> CoreSampler:
        """Returns the sampler of a graph on a device, cached as long as the structure is alive.

        Args:
            g: the graph to sample from.
            device: where to sample.
        """
        if self._cores is None:
            self._cores, self._reads = WeakIdKeyDictionary(), set()
        by_device = self._cores.setdefault(getattr(g, "_graph", g), {})
        weight = self._weights(g)
        drawn = [(name, item.data_ptr(), version_of(item)) for name, item in (weight or {}).items()]
        stamp = (repr(self.fanouts), self.replace, self.prob, drawn)
        entry = by_device.get(device)
        if entry is None or entry[0] != stamp:
            is_single = len(g.canonical_etypes) == 1
            graph = {
                name: adjacency_of(g if is_single else relation(g, name), device)
                for name in g.canonical_etypes
            }
            with self._names_of_dgl():
                core = CoreSampler(
                    graph,
                    self._fanouts(g),
                    replace=self.replace,
                    weight=weight,
                    blocks=True,
                    num_nodes={name: g.num_nodes(name) for name in g.ntypes},
                )
            # The entry references the weights, so they are not freed: another tensor could otherwise get the
            # same address, and therefore the same stamp.
            entry = by_device[device] = (stamp, core, weight)
        return entry[1]

    def _fanouts(self, g: GraphLike) -> dict[Any, list[int]]:
        """Returns the number of neighbours by edge type for every hop, starting at the seeds."""
        layers = list(self.fanouts) if hasattr(self.fanouts, "__iter__") else []
        if not layers:
            raise ValueError(
                "fanouts: expected a list with a number of neighbours per layer, such as [15, 10], got "
                f"{self.fanouts!r}"
            )
        by_type: dict[Any, list[int]] = {name: [] for name in g.canonical_etypes}
        for layer, fanout in reversed(list(enumerate(layers))):
            of_type = dict.fromkeys(by_type, fanout)
            if isinstance(fanout, Mapping):
                of_type = {g.to_canonical_etype(name): item for name, item in fanout.items()}
            missing = [name for name in by_type if name not in of_type]
            if missing:
                raise ValueError(
                    f"fanouts[{layer}]: expected a number of neighbours for every edge type, got none for "
                    f"{missing}; pass 0 to sample none"
                )
            for name, fanouts in by_type.items():
                try:
                    fanouts.append(int(of_type[name]))
                except (TypeError, ValueError):
                    raise ValueError(
                        f"fanouts[{layer}]: expected a number of neighbours, -1 for all, or a dict of such "
                        f"numbers by edge type, got {fanout!r}"
                    ) from None
        return by_type

    def _weights(self, g: GraphLike) -> dict[Any, Tensor] | None:
        if self.prob is None:
            return None
        data = {name: g.edges[name].data for name in g.canonical_etypes}
        weights = {name: of_type[self.prob] for name, of_type in data.items() if self.prob in of_type}
        if not weights:
            known = sorted({name for of_type in data.values() for name in of_type})
            raise ValueError(
                f"prob or mask: expected the name of edge data, one of {known}, got {self.prob!r}; "
                "store the weights with graph.edata[name] = weights"
            )
        for name, weight in weights.items():
            if weight.numel() != g.num_edges(name):
                raise ValueError(
                    f"prob or mask: expected one number per edge in edge data {self.prob!r}, "
                    f"({g.num_edges(name)},), got shape {tuple(weight.shape)}"
                )
        return {name: weight.flatten() for name, weight in weights.items()}

    @contextlib.contextmanager
    def _names_of_dgl(self) -> Iterator[None]:
        """In this context, errors of the core contain the argument names of this class."""
        names = {"weight": f"edge data {self.prob!r}", "seeds": "seed_nodes (a DataLoader's indices)"}
        try:
            yield
        except (TypeError, ValueError) as error:
            argument, _, message = str(error).partition(":")
            if argument not in names:
                raise
            raise type(error)(f"{names[argument]}:{message}") from None

    def _block(self, g: GraphLike, sample: Sample, hop: int, nodes: Mapping[str, Tensor]) -> Any:
        device = next(iter(nodes.values())).device
        edges: dict[Any, Edges] = sample.blocks[hop]
        counts, frames = {}, {}
        for side, num_hops in (("src", hop + 2), ("dst", hop + 1)):
            counts[side] = {name: sum(sample.num_nodes[name][:num_hops]) for name in g.ntypes}
            for name, count in counts[side].items():
                frame, ids = g._node_frames[g.get_ntype_id(name)], nodes[name][:count]
                frames[side, name] = gathered(frame, ids, dgl.NID, self._reads, (hop, side, name))
        for name, of_type in edges.items():
            frame, ids = g._edge_frames[g.get_etype_id(name)], of_type.edge_id.to(g.idtype)
            frames["edge", name] = gathered(frame, ids, dgl.EID, self._reads, (hop, "edge", name))
        # After `enable()`, a DGL block on the GPU has its structure on the host. Copying the sampled edges to
        # the host takes longer than a training step, so a SampledBlock is made instead.
        is_dgls = dgl_can_hold(device) and not device_graph.serves(device)
        make = dgl_block if is_dgls else SampledBlock
        return make(edges, counts["src"], counts["dst"], device, g.idtype, frames)

    def __getstate__(self) -> dict[str, Any]:
        return {name: item for name, item in self.__dict__.items() if name not in ("_cores", "_reads")}


def _check_outgoing(block: Any) -> None:
    """Raises a ValueError if an edge of DGL's block starts or ends outside of the block.

    DGL makes blocks of outgoing edges as if the edges were incoming: the seeds are the destinations, although
    the edges end at neighbours. Neighbours that are not seeds get the id -1. DGL's fused sampler makes
    another error: it exchanges the numbers of sources and destinations.
    """
    for etype in block.canonical_etypes:
        counts = block.num_src_nodes(etype[0]), block.num_dst_nodes(etype[2])
        for side, ids, count in zip(("start", "end"), block.edges(etype=etype), counts, strict=True):
            if ids.numel() and (ids.min() < 0 or ids.max() >= count):
                raise ValueError(
                    f"edge_dir='out': DGL's sampler made a block with edges of type {etype} that {side} at "
                    f"nodes {int(ids.min())} to {int(ids.max())}, but the block has nodes 0 to {count - 1} "
                    f"there. DGL's layers would write outside of their memory. {_INSTEAD_OF_OUT}"
                )


class MultiLayerFullNeighborSampler(NeighborSampler, dgl.dataloading.MultiLayerFullNeighborSampler):
    """Drop-in replacement of :class:`dgl.dataloading.MultiLayerFullNeighborSampler`: takes all neighbours.

    Args:
        num_layers: number of blocks.
        kwargs: as for :class:`NeighborSampler`.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import MultiLayerFullNeighborSampler
        >>> graph = dgl.graph((torch.arange(6), torch.arange(6).roll(1)))
        >>> sampler = MultiLayerFullNeighborSampler(2)
        >>> inputs, outputs, blocks = sampler.sample_blocks(graph, torch.tensor([3]))
        >>> inputs
        tensor([3, 4, 5])
    """

    def __init__(self, num_layers: int, **kwargs: Any) -> None:
        super().__init__(num_layers, **kwargs)
