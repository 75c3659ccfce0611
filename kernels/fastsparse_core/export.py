"""Exported programs without our operators, for places where FastSparse is not installed and for ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fastsparse_core import reference
from fastsparse_core.ops._attention_launch import ADDITIVE, GATV2
from fastsparse_core.ops._edge_messages_fused import unfused_gated, unfused_gine
from fastsparse_core.ops._multi_aggregate_fused import unfused as unfused_aggregates
from fastsparse_core.structure.edge_values import EdgeValues

#: Steps of a trace that hold a part of it in a module of its own.
_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def decompose(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same program in PyTorch's operators alone, for inference.

    It runs where FastSparse is not installed, and ``torch.onnx.export`` takes it. Each operator becomes a
    gather, the formula and a scatter, with a row of features for every edge: slower, and with more memory.

    Args:
        program: of ``torch.export.export``, of a model in evaluation.

    Returns:
        A program with the same inputs, whose sizes may change as those of ``program`` do.

    Raises:
        ValueError: the program has no example inputs, or drops attention weights, which only training does.
        NotImplementedError: an operator of the program is none that inference needs.

    Example:
        >>> program = torch.export.export(model.eval(), (x, edge_index))  # doctest: +SKIP
        >>> torch.onnx.export(decompose(program), f="model.onnx")  # doctest: +SKIP
    """
    if program.example_inputs is None:
        raise ValueError(
            "program: expected one with example inputs, got none; take what torch.export.export returned"
        )
    module = program.module()
    for part in list(module.modules()):
        if isinstance(part, GraphModule):
            _replace_operators(part)
    inputs, named = program.example_inputs
    shapes = _free_sizes(program)
    with torch.no_grad():
        found = torch.export.export(_Called(module), inputs, named, dynamic_shapes=shapes, strict=False)
        return found.run_decompositions({})  # without writes in place


class _Called(nn.Module):
    """A module's call, with sizes that `torch.export` may choose."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)


def _free_sizes(program: torch.export.ExportedProgram) -> Any:
    """The dimensions that may change, as `torch.export.export` takes them for a module of any arguments."""
    names = program.graph_signature.user_inputs
    values = [
        node.meta.get("val")
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names
    ]
    free = [
        {place: torch.export.Dim.AUTO for place, size in enumerate(value.shape) if not isinstance(size, int)}
        if isinstance(value, Tensor)
        else None
        for value in values
    ]
    assert program.call_spec.in_spec is not None
    inputs, named = torch.utils._pytree.tree_unflatten(free, program.call_spec.in_spec)
    return {"inputs": inputs, "named": named} if named else {"inputs": inputs}


def _replace_operators(module: GraphModule) -> None:
    """Puts formulas in the place of operators, and the parts of regions in that of the regions."""
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if name in _REGIONS and node.op == "call_function":
            # In inference neither changes a result: no gradient is kept, and parts without autocast stay so.
            at = 1 if name == "wrap_with_set_grad_enabled" else 4
            node.target, node.args = _called, node.args[at:]
        elif isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "fastsparse":
            operator = node.target._schema.name.removeprefix("fastsparse::")
            if operator not in FORMULAS:
                raise NotImplementedError(
                    f"program: expected operators of inference, got fastsparse::{operator}; export the "
                    "model in evaluation, without gradients"
                )
            node.target = FORMULAS[operator]
    module.recompile()


def _called(part: Callable[..., Any], *arguments: Any) -> Any:
    return part(*arguments)


class Entries(EdgeValues):
    """The entries of a structure in the order of the edges, in the place of an `Adjacency`."""

    def __init__(
        self, edges: Tensor, num_dst: int, num_src: int, reverse: bool, self_loops: str, site: str
    ) -> None:
        src, dst = edges.long().flip(0) if reverse else edges.long()
        count, self.num_given = min(num_dst, num_src), edges.size(1)
        self.num_dst, self.num_src, self.device = num_dst, num_src, edges.device
        self.num_values = self.num_given
        position = torch.arange(self.num_given, device=edges.device)
        self.loop_edge = edges.new_full((count,), -1, dtype=torch.int64)
        if self_loops in ("replace", "remove"):
            is_loop = dst == src
            if self_loops == "replace":
                # The last of several; the others go to a row that is cut off.
                node = torch.where(is_loop, dst, num_dst)
                last = edges.new_full((num_dst + 1,), -1, dtype=torch.int64)
                self.loop_edge = last.scatter_reduce(0, node, position, "amax")[:count]
            kept = (~is_loop).nonzero().flatten()
            src, dst, position = src[kept], dst[kept], kept
        if self_loops in ("replace", "append"):
            loops = torch.arange(count, device=edges.device)
            src, dst = torch.cat([src, loops]), torch.cat([dst, loops])
            position = torch.cat([position, loops + self.num_given])
            self.num_values = self.num_given + count
        self.dst, self.col, self.edge_id = dst, src, position

    @property
    def num_edges(self) -> int:
        """Number of entries."""
        return self.dst.size(0)

    def row(self) -> Tensor:
        """Destination of every entry."""
        return self.dst

    def in_degree(self) -> Tensor:
        """Number of entries per row."""
        return self._counts(self.dst, self.num_dst)

    def out_degree(self) -> Tensor:
        """Number of entries per column."""
        return self._counts(self.col, self.num_src)

    def _counts(self, node: Tensor, size: int) -> Tensor:
        return node.new_zeros(size).index_add(0, node, torch.ones_like(node))


# ---------------------------------------------------------------- operators as their formulas


def structure(edges: Tensor, *place: Any) -> Entries:
    """``fastsparse::structure``."""
    return Entries(edges, *place)


def structure_num_edges(edges: Tensor, adj: Entries) -> int:
    """``fastsparse::structure_num_edges``."""
    return adj.num_edges


def structure_part(edges: Tensor, adj: Entries, name: str, size: int, dtype: torch.dtype) -> Tensor:
    """``fastsparse::structure_part``."""
    if name.startswith("inv_"):
        degree = adj.out_degree() if "out" in name else adj.in_degree()
        power = degree.to(dtype).clamp(min=1).pow(-0.5 if "sqrt" in name else -1.0)
        return torch.where(degree > 0, power, torch.zeros_like(power))
    if name == "rowptr":
        return torch.cat([edges.new_zeros(1, dtype=dtype), adj.in_degree().cumsum(0).to(dtype)])
    found = getattr(adj, name)
    return (found if isinstance(found, Tensor) else found()).to(dtype)


def _in(dtype: torch.dtype) -> Any:
    """Formulas in the dtype in which kernels add."""
    return reference.computing_in(torch.float64 if dtype == torch.float64 else torch.float32)


def spmm(
    x: Tensor,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    bias: Tensor | None,
    num_dst: int,
    adj: Any,
    transpose: bool,
    algorithm: str,
    relu: bool,
) -> Tensor:
    """``fastsparse::spmm``."""
    with _in(x.dtype):
        scales: dict[str, Any] = {"scale_dst": scale_dst, "scale_src": scale_src}
        return reference.spmm(adj, x, value, bias=bias, relu=relu, **scales).to(x.dtype)


def spmm_extremum(
    x: Tensor, value: Tensor | None, num_dst: int, adj: Any, transpose: bool, minimum: bool, adds: bool
) -> tuple[Tensor, Tensor]:
    """``fastsparse::spmm_extremum``."""
    if adds:
        raise NotImplementedError("program: expected messages that multiply, got ones that add edge values")
    with _in(x.dtype):
        out = reference.spmm(adj, x, value, "min" if minimum else "max").to(x.dtype)
    return out, out


def sddmm(
    x_dst: Tensor,
    x_src: Tensor,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    length: int,
    heads: int,
    dtype: torch.dtype,
    adj: Any,
    algorithm: str,
    dense: bool,
) -> Tensor:
    """``fastsparse::sddmm``."""
    with _in(x_dst.dtype):
        split = [x.unflatten(1, (heads, -1)) for x in (x_dst, x_src)]
        return reference.sddmm(adj, *split, scale_dst=scale_dst, scale_src=scale_src).to(dtype)


def edge_softmax(score: Tensor, adj: Any) -> Tensor:
    """``fastsparse::edge_softmax``."""
    with _in(score.dtype):
        return reference.edge_softmax(adj, score).to(score.dtype)


def attention(
    dst: Tensor,
    src: Tensor,
    v: Tensor | None,
    att: Tensor | None,
    edge: Tensor | None,
    edge_weight: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    kind: int,
    heads: int,
    algorithm: str,
    adj: Any,
) -> tuple[Tensor, ...]:
    """``fastsparse::attention``."""
    if dropout_p:
        raise ValueError(
            f"program: expected one of a model in evaluation, got dropout={dropout_p}; call model.eval()"
        )
    values = src if v is None else v
    q, k, by_head = (x.unflatten(1, (heads, -1)) for x in (dst, src, values))
    of_edges: dict[str, Any] = {"edge_attr": edge, "edge_weight": edge_weight}
    with _in(values.dtype):
        if kind == ADDITIVE:
            out = reference.additive_attention(adj, dst, src, by_head, scale, bias)
        elif kind == GATV2:
            assert att is not None
            out = reference.gatv2_attention(adj, q, k, att.view(heads, -1), scale, **of_edges)
        else:
            out = reference.attention(adj, q, k, by_head, scale, bias, **of_edges)
    return out.flatten(1).to(values.dtype), out, out


def _unfused(formula: Callable[..., Tensor], count: int, results: int) -> Callable[..., tuple[Tensor, ...]]:
    """An operator's unfused version in its place; of the results programs of inference read the first.

    Args:
        formula: from the structure and the operator's first arguments.
        count: how many of these.
        results: of the operator.
    """
    return lambda *given: (formula(given[-2], *given[:count]),) * results


def maxk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``fastsparse::maxk``."""
    with _in(x.dtype):
        values, ids = reference.maxk(x, k)
    return values.to(x.dtype), ids


def cbsr_to_dense(values: Tensor, ids: Tensor, width: int) -> Tensor:
    """``fastsparse::cbsr_to_dense``."""
    with _in(values.dtype):
        return reference.cbsr_to_dense(values, ids, width).to(values.dtype)


def ssd(
    values: Tensor,
    ids: Tensor,
    width: int,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    bias: Tensor | None,
    num_dst: int,
    adj: Any,
    transpose: bool,
    algorithm: str,
) -> Tensor:
    """``fastsparse::ssd``."""
    scales: dict[str, Any] = {"scale_dst": scale_dst, "scale_src": scale_src}
    with _in(values.dtype):
        return reference.ssd(adj, values, ids, width, value, bias=bias, **scales).to(values.dtype)


#: Operator -> what stands in its place.
FORMULAS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        structure,
        structure_num_edges,
        structure_part,
        spmm,
        spmm_extremum,
        sddmm,
        edge_softmax,
        attention,
        maxk,
        cbsr_to_dense,
        ssd,
    )
}
FORMULAS["gine_aggregate"] = _unfused(unfused_gine, 4, 2)
FORMULAS["gated_aggregate"] = _unfused(unfused_gated, 6, 2)
FORMULAS["multi_aggregate"] = _unfused(unfused_aggregates, 7, 3)
