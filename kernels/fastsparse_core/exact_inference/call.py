"""Runs `inference` of both plugins: checks the arguments, splits the model into stages, computes them."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from fastsparse_core.device import usable_device
from fastsparse_core.exact_inference.model import Framework, evaluating, small_graph, split
from fastsparse_core.exact_inference.tiles import Placement, run
from fastsparse_core.log import range_text
from fastsparse_core.structure.adjacency import Adjacency


def infer(
    model: Any,
    framework: Framework,
    adj: Adjacency,
    x: Any,
    name: str,
    *,
    device: torch.device | str | None,
    rows: Tensor | None,
    out: Any,
    memory: int | None,
    tile: int | None,
    group: Any,
) -> Any:
    """Implements the function ``inference`` of both plugins, and takes its arguments.

    Args:
        model: module, or list of layers and functions.
        framework: functions of the plugin.
        adj: structure of the graph.
        x: (num_nodes, ...).
        name: name of the features' argument, for messages.
        device: device that computes the layers; None: the model's device.
        rows: nodes whose results are wanted, ids or a mask; None: all.
        out: tensor or array for the results; None: a new tensor.
        memory: limit of used device memory in bytes, including memory in use already; None: no limit.
        tile: largest number of destinations per tile; None: as many as fit.
        group: processes that divide the destinations; None: only this process.

    Returns:
        A tensor, or ``out``.
    """
    if not isinstance(model, (Module, list, tuple)):
        raise TypeError(f"model: expected a torch.nn.Module or a list of layers, got {type(model).__name__}")
    if adj.num_dst != adj.num_src:
        raise ValueError(f"graph: expected as many destinations as sources, got shape {adj.shape}")
    if adj.is_partitioned:
        raise ValueError(
            "graph: expected a whole graph, got a PartitionedAdjacency; pass the whole graph and "
            "group=torch.distributed.group.WORLD in every process"
        )
    features = _as_tensor(x, name)
    if not features.is_floating_point() or features.dim() < 2 or features.size(0) != adj.num_dst:
        raise ValueError(
            f"{name}: expected floating features with a row for each of {adj.num_dst} nodes, got "
            f"{features.dtype} of shape {tuple(features.shape)}"
        )
    place = _device_of(model, device)
    for what, tensor in ((name, features), ("graph", adj.col)):
        if tensor.device not in (place, torch.device("cpu")):
            raise ValueError(f"{what}: expected device {place} or cpu, got {tensor.device}")
    for what, number in (("memory", memory), ("tile", tile)):
        if number is not None and operator.index(number) < 1:
            raise ValueError(f"{what}: expected a positive number or None, got {number}")
    if group is not None and not dist.is_initialized():
        raise ValueError(
            "group: expected None, because torch.distributed is not initialized; initialize it first"
        )
    rows = _checked_rows(rows, adj.num_dst)
    target = None if out is None else _checked_out(out)
    edges, num_nodes = small_graph()
    small = Adjacency.from_coo(edges[1].to(place), edges[0].to(place), (num_nodes, num_nodes))
    with evaluating(model):
        stages = split(model, framework, features, place, small)
        result = run(adj, features, stages, Placement(place, memory, tile, group), rows=rows, out=target)
    return result if out is None else out


def _as_tensor(x: Any, name: str) -> Tensor:
    """Returns the features as a tensor; the tensor shares memory with a NumPy array."""
    if isinstance(x, np.ndarray):
        with warnings.catch_warnings():
            # PyTorch warns of read-only arrays, such as files mapped for reading. Features are never written.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(x)
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name}: expected a tensor or a NumPy array with a row per node, got {type(x).__name__}"
        )
    return x.detach()


def _checked_out(out: Any) -> Tensor:
    """Checks ``out``, and returns it as a tensor.

    Raises:
        TypeError: ``out`` is neither a tensor nor an array, or is not floating-point.
        ValueError: the array is read-only. PyTorch would write to it anyway, and a write to a file that is
            mapped read-only ends the process.
    """
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError(
            "out: expected a writable array, got a read-only one; open a memory-mapped file with "
            "mmap_mode='r+' or 'w+'"
        )
    target = _as_tensor(out, "out")
    if not target.is_floating_point():
        raise TypeError(f"out: expected a floating-point dtype, got {target.dtype}")
    return target


def _device_of(model: Any, device: torch.device | str | None) -> torch.device:
    """The requested device, or the device of the model if None; the model must be on the result."""
    roots = [model] if isinstance(model, Module) else [item for item in model if isinstance(item, Module)]
    found = {tensor.device for root in roots for tensor in (*root.parameters(), *root.buffers())}
    if device is None:
        return next(iter(found), torch.device("cpu"))
    place = usable_device(device)
    if found - {place}:
        others = ", ".join(sorted(map(str, found - {place})))
        raise ValueError(
            f"model: expected parameters on {place}, got some on {others}; move it with .to({str(place)!r})"
        )
    return place


def _checked_rows(rows: Any, num_nodes: int) -> Tensor | None:
    if rows is None:
        return None
    if (
        not isinstance(rows, Tensor)
        or rows.dim() != 1
        or rows.dtype not in (torch.int64, torch.int32, torch.bool)
    ):
        got = (
            f"{rows.dtype} of shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        )
        raise TypeError(f"rows: expected node ids, int64 (num_rows,), or a bool mask (num_nodes,), got {got}")
    if rows.dtype == torch.bool:
        if rows.numel() != num_nodes:
            raise ValueError(f"rows: expected a mask of {num_nodes} nodes, got {rows.numel()}")
        return rows.nonzero().flatten()
    if rows.numel():
        low, high = (int(end) for end in torch.aminmax(rows))
        if low < 0 or high >= num_nodes:
            raise ValueError(f"rows: expected nodes from 0 to {num_nodes - 1}, {range_text(low, high)}")
    return rows.long()
