"""`tiled`: full-graph training of PyG's models in tiles of rows."""

from __future__ import annotations

from torch.nn import Module
from torch_geometric.nn.conv import MessagePassing

from fastsparse_core.tiling import TiledModel


def tiled(model: Module, *, tile_rows: int | None = None, offload: bool = False) -> TiledModel:
    """Prepares full-graph training of a graph whose activations do not fit on the GPU.

    The result is called as ``net(x, edge_index)``, and its gradients are those of ``model(x, edge_index)`` up
    to rounding. Everything except the sums over neighbours is computed for one tile of nodes at a time, and
    computed again in the backward pass with the same random numbers. Only the input of each layer is stored.
    With ``offload``, the sums are stored instead, in page-locked host memory. The call
    ``net(x, edge_index, rows=train)`` computes the last layer only for the nodes ``train``.

    The model must be a chain of :class:`FastGCNConv`, :class:`FastSAGEConv`, :class:`FastGraphConv` or
    :class:`FastGINConv` layers with sums or means. Functions between the layers must treat every node
    separately, such as activations, dropout, linear layers and ``LayerNorm``. Batch normalisation in training
    mode and connections that skip a layer raise an error.

    With a :class:`~fastsparse_core.distributed.PartitionedAdjacency` in place of ``edge_index``, features,
    ``rows`` and results are those of the process's own nodes, and all processes must make the same calls.

    All tiles are computed on the device of the edges. The features (N, F) may be in host memory, preferably
    page-locked: with ``offload``, they take GPU memory during the first layer only. To save memory, make the
    edges an :class:`~fastsparse_core.Adjacency` with ``from_csr(copy=False)``. Parameters may change between
    calls, but the list of layers may not.

    Args:
        model: a module, called as ``model(x, edge_index)``.
        tile_rows: number of rows per tile; None: rows of 256 MiB at the model's widest layer.
        offload: whether to copy the sums to host memory in the forward pass and back in the backward pass,
            instead of computing them again.

    Returns:
        A function ``net(x, edge_index, rows=None)``: features (N, F) to results (N, C) of all nodes, or
        (num_rows, C) of the nodes ``rows``, int64 (num_rows,).

    Raises:
        TypeError: ``model`` is not a module, or has a graph layer that cannot run in tiles.
        ValueError: ``tile_rows`` is below 1, or the model has no graph layers.

    Example:
        >>> import torch
        >>> from torch_geometric.nn.models import GCN
        >>> from fastsparse_pyg import accelerate, tiled
        >>> model = GCN(8, 16, num_layers=2, out_channels=3, dropout=0.5)
        >>> _ = accelerate(model, show=False)
        >>> net = tiled(model, tile_rows=2)
        >>> x, edge_index = torch.randn(5, 8), torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
        >>> net(x, edge_index, rows=torch.tensor([0, 4])).sum().backward()
    """
    if not isinstance(model, Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    layers = [module for module in model.modules() if isinstance(module, MessagePassing)]
    for layer in layers:
        if not hasattr(layer, "_after_sum"):
            raise TypeError(
                "model: tiled() supports FastGCNConv, FastSAGEConv, FastGraphConv and FastGINConv, got a "
                f"{type(layer).__name__}; call fastsparse_pyg.accelerate(model) first if it is PyG's"
            )
    if not layers:
        raise ValueError("model: expected a model with graph layers, got none")
    return TiledModel(model, layers, tile_rows=tile_rows, offload=offload)
