"""One layer per edge type of a heterogeneous graph."""

from __future__ import annotations

from typing import Any

from fastsparse_dgl.caching import relation
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import GraphLike


class FastHeteroGraphConv(dgl.nn.pytorch.HeteroGraphConv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.HeteroGraphConv`.

    After Schlichtkrull et al., `Modeling Relational Data with Graph Convolutional Networks
    <https://arxiv.org/abs/1703.06103>`_, section 2.1, with any layer :math:`f_r` per edge type:

    .. math::
        \mathbf{h}_i' = \mathrm{aggregate}_{r} f_r(\mathcal{G}_r, \mathbf{h})_i

    Parameters, defaults, state_dict, repr and results are the same as DGL's. DGL's module creates a new graph
    for each edge type in every forward pass, and drop-in layers would convert each of these graphs. In this
    module, drop-in layers find the converted structure in the cache. Layers that are not drop-ins work too.

    Args:
        mods: layer of each edge type.
        aggregate: ``"sum"``, ``"max"``, ``"min"``, ``"mean"``, ``"stack"`` or a function, over the results
            for one node type.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastHeteroGraphConv, FastSAGEConv
        >>> graph = dgl.heterograph({("user", "rates", "film"): ([0, 1, 1], [0, 0, 1])})
        >>> layer = FastHeteroGraphConv({"rates": FastSAGEConv(8, 4, "mean")})
        >>> layer(graph, {"user": torch.randn(2, 8), "film": torch.randn(2, 8)})["film"].shape
        torch.Size([2, 4])
    """

    def forward(
        self,
        g: GraphLike,
        inputs: Any,
        mod_args: dict[str, tuple[Any, ...]] | None = None,
        mod_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Runs the layer of every edge type, and combines their results for each destination type.

        Args:
            g: DGLGraph or block.
            inputs: features by node type, or a pair of such dicts for sources and destinations.
            mod_args: further positional arguments of the layers, per edge type.
            mod_kwargs: further named arguments of the layers, per edge type.

        Returns:
            New features of the destinations, by node type.
        """
        return super().forward(_Relations(g), inputs, mod_args, mod_kwargs)


class _Relations:
    """A graph whose slices ``graph[edge type]`` always have the same handle, so the cache finds them."""

    def __init__(self, graph: GraphLike) -> None:
        self._whole = graph

    def __getitem__(self, etype: Any) -> GraphLike:
        return relation(self._whole, etype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)
