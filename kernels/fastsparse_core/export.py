"""Converts exported programs, so that they run without FastSparse, in ONNX, or in C++ without Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fastsparse_core import reference
from fastsparse_core.ops._attention import unsupported_reason
from fastsparse_core.ops._attention_launch import ADDITIVE, GATV2
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._edge_messages_fused import unfused_gated, unfused_gine
from fastsparse_core.ops._multi_aggregate_fused import unfused as unfused_aggregates
from fastsparse_core.structure.edge_values import EdgeValues

#: Operations of an exported graph whose body is a separate module.
_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def decompose(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replaces FastSparse's operators in an exported program by PyTorch's operators, for inference.

    The result runs without FastSparse and can be passed to ``torch.onnx.export``. Each operator becomes a
    gather, a formula and a scatter, with a row of features per edge, so the result is slower and needs more
    memory.

    Args:
        program: result of ``torch.export.export`` for a model in evaluation mode.

    Returns:
        A program with the same inputs and the same dynamic sizes.

    Raises:
        ValueError: the program has no example inputs, was exported with an `Adjacency`, or contains attention
            dropout because it was exported in training mode.
        NotImplementedError: the program has an operator of training, such as a gradient.

    Example:
        >>> program = torch.export.export(model.eval(), (x, edge_index))  # doctest: +SKIP
        >>> torch.onnx.export(decompose(program), f="model.onnx")  # doctest: +SKIP
    """
    return _rewritten(program, FORMULAS)


def for_cpp(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Converts an exported program for AOTInductor, whose packages C++ programs load without Python.

    Sums, maxima and attention call operators of the library at :func:`cpp_library`. Other operators become
    PyTorch's operators, as in :func:`decompose`. On CUDA, attention with edge features, with dot products, in
    float64, or with heads wider than 256 also becomes PyTorch's operators. The program builds the structure
    of its edges once per call. If the edges are a buffer of the model and the number of nodes is not dynamic,
    the structure becomes a constant of the program.

    Args:
        program: result of ``torch.export.export`` for a model in evaluation mode.

    Returns:
        A program with the same inputs, for ``torch._inductor.aoti_compile_and_package``.

    Raises:
        FileNotFoundError: the library was not built.
        ValueError: as in :func:`decompose`.
        NotImplementedError: as in :func:`decompose`.

    Example:
        >>> program = torch.export.export(model.eval(), (x, edge_index))  # doctest: +SKIP
        >>> torch._inductor.aoti_compile_and_package(  # doctest: +SKIP
        ...     for_cpp(program), package_path="model.pt2"
        ... )
    """
    _load_operators()
    return _rewritten(program, FORMULAS | {each.__name__.removeprefix("cpp_"): each for each in _OF_LIBRARY})


def cpp_library() -> Path:
    """Returns the path of the library that C++ programs load before a package of :func:`for_cpp`.

    Returns:
        The path.

    Raises:
        FileNotFoundError: the library was not built.

    Example:
        >>> torch.ops.load_library(cpp_library())  # doctest: +SKIP
    """
    path = Path(__file__).with_name("libfastsparse_cpp.so")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: expected the library for C++ programs, but it was not built; install FastSparse from "
            "its sources with FASTSPARSE_CPP=1 and pip install --no-build-isolation"
        )
    return path


def _rewritten(
    program: torch.export.ExportedProgram, formulas: dict[str, Callable[..., Any]]
) -> torch.export.ExportedProgram:
    """Replaces FastSparse's operators by functions of ``formulas``, and exports the program again."""
    if program.example_inputs is None:
        raise ValueError(
            "program: expected example inputs, got none; pass the program that torch.export.export returned"
        )
    module = program.module()
    for part in list(module.modules()):
        if isinstance(part, GraphModule):
            _replace_operators(part, formulas)
    inputs, named = program.example_inputs
    shapes = _free_sizes(program)
    with torch.no_grad():
        found = torch.export.export(_Called(module), inputs, named, dynamic_shapes=shapes, strict=False)
        return found.run_decompositions({})  # this removes in-place operations


class _Called(nn.Module):
    """Calls a module with any arguments, so that `torch.export` accepts dynamic sizes for them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)


def _free_sizes(program: torch.export.ExportedProgram) -> Any:
    """The dynamic dimensions of a program's inputs, in the form that `torch.export.export` expects."""
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


def _replace_operators(module: GraphModule, formulas: dict[str, Callable[..., Any]]) -> None:
    """Replaces operators by formulas, and regions of autocast or gradient mode by their subgraphs."""
    structures: dict[Any, torch.fx.Node] = {}
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if name in _REGIONS and node.op == "call_function":
            # In inference, calling the body directly changes no result: no gradient is computed, and regions
            # that turn autocast off run without autocast anyway.
            at = 1 if name == "wrap_with_set_grad_enabled" else 4
            node.target, node.args = _called, node.args[at:]
        elif isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "fastsparse":
            operator = node.target._schema.name.removeprefix("fastsparse::")
            if operator == "structure":  # layers share the structure of a graph
                known = structures.setdefault(node.args, node)
                if known is not node:
                    node.replace_all_uses_with(known)
                elif formulas[operator] is cpp_structure and _is_constant(node):
                    _keep_rows(module, node)
            if operator not in formulas:
                raise NotImplementedError(
                    f"program: expected operators of inference, got fastsparse::{operator}; export the "
                    "model in evaluation mode and without gradients"
                )
            for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
                if argument.name == "adjacency" and not isinstance(given, torch.fx.Node):
                    raise ValueError(
                        "program: expected edges as a tensor, got an Adjacency, which cannot be exported; "
                        "export the model with edge_index, as an input or a buffer"
                    )
            node.target = formulas[operator]
    module.recompile()


def _is_constant(structure: torch.fx.Node) -> bool:
    """Returns True if the edges and the numbers of nodes are constants of the program."""
    edges, *place = structure.args
    is_part = isinstance(edges, torch.fx.Node) and edges.op == "get_attr"
    return is_part and not any(isinstance(each, torch.fx.Node) for each in place)


def _keep_rows(module: GraphModule, structure: torch.fx.Node) -> None:
    """Stores the compressed rows of constant edges as constants of the program."""
    edges, *place = structure.args
    assert isinstance(edges, torch.fx.Node)
    given = module
    for name in str(edges.target).split("."):
        given = getattr(given, name)
    kept = []
    with module.graph.inserting_before(structure):
        for number, tensor in enumerate(Rows(cast("Any", given), *cast("Any", place)).tensors):
            name = f"{structure.name}_rows_{number}"
            module.register_buffer(name, tensor)
            kept.append(module.graph.get_attr(name))
    structure.args = (*structure.args, tuple(kept))


def _called(part: Callable[..., Any], *arguments: Any) -> Any:
    return part(*arguments)


class Entries(EdgeValues):
    """The entries of a structure in the order of the edges; replaces an `Adjacency` in formulas."""

    def __init__(
        self, edges: Tensor, num_dst: int, num_src: int, reverse: bool, self_loops: str, site: str
    ) -> None:
        self.src, self.dst = edges.flip(0) if reverse else edges
        self.num_dst, self.num_src, self.device = num_dst, num_src, edges.device
        self.num_given, self.num_loops, self.self_loops = edges.size(1), min(num_dst, num_src), self_loops
        self.inserts = self_loops in ("replace", "append")
        self.num_values = self.num_given + (self.num_loops if self.inserts else 0)

    @cached_property
    def loop_edge(self) -> Tensor:
        """Position of every node's last self loop among the edges, int64 (num_loops,); -1: none."""
        # Edges that are not loops write to an additional element, which is cut off.
        last = self.dst.new_full((self.num_dst + 1,), -1, dtype=torch.int64)
        if self.self_loops == "replace":
            node = torch.where(self.dst == self.src, self.dst.long(), self.num_dst)
            last = last.scatter_reduce(0, node, torch.arange(self.num_given, device=self.device), "amax")
        return last[: self.num_loops]

    @cached_property
    def _entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Destination, source, and position in the caller's edge order of every entry, int64 each."""
        src, dst = self.src.long(), self.dst.long()
        position = torch.arange(self.num_given, device=self.device)
        if self.self_loops in ("replace", "remove"):
            position = (dst != src).nonzero().flatten()
            src, dst = src[position], dst[position]
        if self.inserts:
            loops = torch.arange(self.num_loops, device=self.device)
            src, dst = torch.cat([src, loops]), torch.cat([dst, loops])
            position = torch.cat([position, loops + self.num_given])
        return dst, src, position

    @property
    def col(self) -> Tensor:
        """Source of every entry, int64 (num_edges,)."""
        return self._entries[1]

    @property
    def edge_id(self) -> Tensor:
        """Position of every entry in the caller's edge order, int64 (num_edges,)."""
        return self._entries[2]

    @property
    def num_edges(self) -> int:
        """Number of entries."""
        return self._entries[0].size(0)

    def row(self) -> Tensor:
        """Destination of every entry, int64 (num_edges,)."""
        return self._entries[0]

    def in_degree(self) -> Tensor:
        """Number of entries per row."""
        return self._counts(self.row(), self.num_dst)

    def out_degree(self) -> Tensor:
        """Number of entries per column."""
        return self._counts(self.col, self.num_src)

    def _counts(self, node: Tensor, size: int) -> Tensor:
        return node.new_zeros(size).index_add(0, node, torch.ones_like(node))


class Rows(Entries):
    """`Entries` with the compressed rows that operators of the C++ library take."""

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Row pointers, columns, positions and slices, as ``fastsparse_cpp::compress`` returns them."""
        row, col = self.dst, self.src
        removes_loops, on_cuda = self.self_loops in ("replace", "remove"), self.device.type == "cuda"
        if removes_loops or on_cuda:
            is_inside = (row >= 0) & (row < self.num_dst) & (col >= 0) & (col < self.num_src)
            if on_cuda:  # invalid indices are left out: a check would have to wait for the GPU
                left_out = ~is_inside | (row == col) if removes_loops else ~is_inside
            else:  # `compress` raises an error for invalid indices
                left_out = is_inside & (row == col)
            row = torch.where(left_out, self.num_dst, row)
            col = torch.where(left_out, 0 if on_cuda else -1, col)
        if self.inserts:
            loops = torch.arange(self.num_loops, device=self.device, dtype=row.dtype)
            row, col = torch.cat([row, loops]), torch.cat([col, loops])
        found: tuple[Tensor, ...] = torch.ops.fastsparse_cpp.compress(
            row.contiguous(), col.contiguous(), self.num_dst, self.num_src
        )
        return found

    def in_degree(self) -> Tensor:
        """Number of entries per row."""
        return self.tensors[0][:-1].diff()


# ---------------------------------------------------------------- operators as their formulas


def structure(edges: Tensor, *place: Any) -> Entries:
    """Computes ``fastsparse::structure``."""
    return Entries(edges, *place)


def structure_num_edges(edges: Tensor, adj: Entries) -> int:
    """Computes ``fastsparse::structure_num_edges``."""
    return adj.num_edges


def structure_part(edges: Tensor, adj: Entries, name: str, size: int, dtype: torch.dtype) -> Tensor:
    """Computes ``fastsparse::structure_part``."""
    if name.startswith("inv_"):
        degree = adj.out_degree() if "out" in name else adj.in_degree()
        power = degree.to(dtype).clamp(min=1).pow(-0.5 if "sqrt" in name else -1.0)
        return torch.where(degree > 0, power, torch.zeros_like(power))
    if name == "rowptr":
        return torch.cat([edges.new_zeros(1, dtype=dtype), adj.in_degree().cumsum(0).to(dtype)])
    found = getattr(adj, name)
    return (found if isinstance(found, Tensor) else found()).to(dtype)


def _in(dtype: torch.dtype) -> Any:
    """Context in which formulas compute in the dtype in which kernels accumulate."""
    return reference.computing_in(accumulation_dtype(dtype))


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
    """Computes ``fastsparse::spmm``."""
    with _in(x.dtype):
        scales: dict[str, Any] = {"scale_dst": scale_dst, "scale_src": scale_src}
        return reference.spmm(adj, x, value, bias=bias, relu=relu, **scales).to(x.dtype)


def spmm_extremum(
    x: Tensor, value: Tensor | None, num_dst: int, adj: Any, transpose: bool, minimum: bool, adds: bool
) -> tuple[Tensor, Tensor]:
    """Computes ``fastsparse::spmm_extremum``."""
    if adds:
        raise NotImplementedError("program: expected edge values as factors, got ones that are added")
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
    """Computes ``fastsparse::sddmm``."""
    with _in(x_dst.dtype):
        split = [x.unflatten(1, (heads, -1)) for x in (x_dst, x_src)]
        return reference.sddmm(adj, *split, scale_dst=scale_dst, scale_src=scale_src).to(dtype)


def edge_softmax(score: Tensor, adj: Any) -> Tensor:
    """Computes ``fastsparse::edge_softmax``."""
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
    """Computes ``fastsparse::attention``."""
    if dropout_p:
        raise ValueError(
            f"program: expected a model in evaluation mode, got dropout={dropout_p}; call model.eval()"
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
    """Makes a replacement for an operator from a formula for the operator's first result.

    The replacement returns the first result in place of the other results, which only gradients read.

    Args:
        formula: computes the first result from the structure and the operator's first arguments.
        count: number of these first arguments.
        results: number of results of the operator.
    """
    return lambda *given: (formula(given[-2], *given[:count]),) * results


def maxk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Computes ``fastsparse::maxk``."""
    with _in(x.dtype):
        values, ids = reference.maxk(x, k)
    return values.to(x.dtype), ids


def maxk_dense(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Computes ``fastsparse::maxk_dense``; the second result differs, but only gradients read it."""
    values, ids = maxk(x, k)
    return cbsr_to_dense(values, ids, x.size(-1)), ids


def cbsr_to_dense(values: Tensor, ids: Tensor, width: int) -> Tensor:
    """Computes ``fastsparse::cbsr_to_dense``."""
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
    """Computes ``fastsparse::ssd``."""
    scales: dict[str, Any] = {"scale_dst": scale_dst, "scale_src": scale_src}
    with _in(values.dtype):
        return reference.ssd(adj, values, ids, width, value, bias=bias, **scales).to(values.dtype)


#: Name of an operator -> function that replaces the operator.
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
        maxk_dense,
        cbsr_to_dense,
        ssd,
    )
}
FORMULAS["gine_aggregate"] = _unfused(unfused_gine, 5, 2)
FORMULAS["gated_aggregate"] = _unfused(unfused_gated, 6, 2)
FORMULAS["multi_aggregate"] = _unfused(unfused_aggregates, 7, 3)


# ---------------------------------------------------------------- operators as those of the library


def cpp_structure(
    edges: Tensor,
    num_dst: int,
    num_src: int,
    reverse: bool,
    self_loops: str,
    site: str,
    kept: tuple[Tensor, ...] | None = None,
) -> Rows:
    """Computes ``fastsparse::structure``. ``kept``: compressed rows of constant edges, or None."""
    rows = Rows(edges, num_dst, num_src, reverse, self_loops, site)
    if kept is not None:
        rows.tensors = kept
    return rows


def cpp_spmm(
    x: Tensor,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    bias: Tensor | None,
    num_dst: int,
    adj: Rows,
    transpose: bool,
    algorithm: str,
    relu: bool,
) -> Tensor:
    """Computes ``fastsparse::spmm``."""
    operands = map(_contiguous, (x, value, scale_dst, scale_src, None if bias is None else bias.to(x.dtype)))
    found: Tensor = torch.ops.fastsparse_cpp.spmm(*operands, *adj.tensors, relu)
    return found


def cpp_spmm_extremum(
    x: Tensor, value: Tensor | None, num_dst: int, adj: Rows, transpose: bool, minimum: bool, adds: bool
) -> tuple[Tensor, Tensor]:
    """Computes ``fastsparse::spmm_extremum``."""
    operands = map(_contiguous, (x, value))
    found = torch.ops.fastsparse_cpp.spmm_extremum(*operands, *adj.tensors, minimum, adds)
    return found, found


def cpp_attention(
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
    adj: Rows,
) -> tuple[Tensor, ...]:
    """Computes ``fastsparse::attention``."""
    tensors = (dst, src, v, att, edge, edge_weight, bias)
    values = src if v is None else v
    needs_formula = bool(dropout_p)
    if src.is_cuda:
        has_kernel = kind in (ADDITIVE, GATV2) and edge is None
        # A program that was exported on the CPU and moved to a GPU may have calls that no kernel supports.
        no_kernel = unsupported_reason(cast("Any", adj), kind, values.dtype, values.size(1), heads, scale)
        needs_formula = needs_formula or not has_kernel or bool(no_kernel)
    if needs_formula:
        return attention(*tensors, scale, dropout_p, seed, kind, heads, algorithm, adj)
    sums = accumulation_dtype(src.dtype)
    if kind == ADDITIVE:
        dst, src = dst.to(sums), src.to(sums)
    att = None if att is None else att.to(sums)
    operands = map(_contiguous, (dst, src, v, att, edge, edge_weight, bias))
    found = torch.ops.fastsparse_cpp.attention(*operands, scale, kind, heads, *adj.tensors)
    return found, found, found


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


_OF_LIBRARY = (cpp_structure, cpp_spmm, cpp_spmm_extremum, cpp_attention)


@cache
def _load_operators() -> None:
    """Loads the library and registers the shapes of its operators' results for tracing."""
    torch.ops.load_library(cpp_library())

    def compressed(row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> tuple[Tensor, ...]:
        ids = (row.new_empty(row.size(0), dtype=torch.int32) for _ in range(2))
        slices = row.new_empty(num_rows if row.is_cuda else 0, 2, dtype=torch.int64)
        return row.new_empty(num_rows + 2, dtype=torch.int64), *ids, slices

    def summed(x: Tensor, *arguments: Any) -> Tensor:
        rowptr = next(each for each in arguments if isinstance(each, Tensor) and each.dtype == torch.int64)
        return x.new_empty(rowptr.size(0) - 2, x.size(1))

    def attended(dst: Tensor, src: Tensor, v: Tensor | None, *arguments: Any) -> Tensor:
        return summed(src if v is None else v, *arguments)

    fakes: dict[str, Callable[..., Any]] = {
        "compress": compressed,
        "spmm": summed,
        "spmm_extremum": summed,
        "attention": attended,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"fastsparse_cpp::{name}", fake)
