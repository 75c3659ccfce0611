"""The PyTorch operator for all kinds of attention scores, and the choice of the kernel for a call.

The forward pass saves no tensor with a row per edge. It saves the log-sum-exp of every row and, if the
backward kernels read it, the result. The backward pass recomputes the scores (FlashAttention-2, section 3).
Second derivatives come from the unfused operators. ``lse`` and ``seed`` get no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.formats.bsb import MOST_COLUMNS
from fastsparse_core.ops import _attention_launch as launch
from fastsparse_core.ops import _attention_unfused as unfused
from fastsparse_core.ops._attention_checks import drawn_by_replays, per_head
from fastsparse_core.ops._attention_launch import (
    ADDITIVE,
    DOT_PRODUCT,
    GATV2,
    LOAD_BYTES,
    Call,
    Gradients,
    Wanted,
)
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._eager import PLAIN, is_plain_eager, is_wrapped
from fastsparse_core.ops._facts import facts_of, follow
from fastsparse_core.ops._registration import FusedOperator
from fastsparse_core.policy import MOST_HEADS
from fastsparse_core.structure.adjacency import Adjacency

#: Largest width of a head. One warp computes a head; in the CSR kernels, each of its 32 lanes has 8 features.
MAX_HEAD_WIDTH = 256
#: Largest number of features of all heads together, with blocks and with CSR: a grid of at most 65,535 thread
#: blocks combines the sums of slices, 128 or 32 features per thread block.
MAX_WIDTH_ON_BLOCKS, MAX_WIDTH = 128 * 65_535, 32 * 65_535
#: Largest number of edge features, for dot products and for GATv2. In dot products, each of the 32 lanes of a
#: head has space for 16 features. If GATv2 has more features, they are projected to a stored row per edge.
MOST_FEATURES, MOST_GATV2_FEATURES = 512, 32


def run(adj: Adjacency, call: Call, plan: tuple[Any, ...]) -> Tensor:
    """Chooses the kernel for a call and runs it.

    Args:
        adj: structure (num_dst, num_src); the call may count as a use.
        call: checked operands, and the caller's choice of the algorithm; its bias is (num_values, 1 or
            heads).
        plan: key in ``adj.plans`` under which to record that later calls of this kind need no checks.
    """
    kernel = _kernel_of(adj, call, drawn_by_replays(call.dropout_p))
    if kernel == "unfused":
        return unfused.attention(adj, *call)
    v, algorithm = call.values, "fused3s"
    if kernel == "csr" or call.edge is not None:
        algorithm = "auto" if call.algorithm == "auto" else "csr"
        if call.edge is not None and algorithm == "auto" and not torch.compiler.is_compiling():
            adj.plans[plan] = True  # for this key, `_kernel_of` always gives the same kernel
    elif not torch.compiler.is_compiling() and (
        call.kind != DOT_PRODUCT
        or (
            call.dst.size(1)
            and (v.device.type == "cpu" or (adj.has_bsb and adj.has_transpose and adj.t().has_bsb))
        )
    ):
        adj.plans[plan] = True
    call = Call(*call[:6], per_head(call.bias, call.heads), *call[7:-1], algorithm)
    return plain(adj, call) if is_plain_eager(v) else _attention_op.dispatched(*call, adj.handle)[0]


def is_plain_call(adj: Adjacency, dropout_p: float, *matrices: Tensor) -> bool:
    """Returns whether a call has plain matrices on the structure's device, no dropout and no autocast."""
    if (
        not is_plain_eager(matrices[-2])
        or type(adj) is not Adjacency
        or type(dropout_p) is not float
        or dropout_p != 0.0
    ):
        return False
    device = adj.col.device
    for matrix in matrices:
        if (
            type(matrix) not in PLAIN
            or matrix.dim() != 2
            or matrix.device != device
            or matrix.is_neg()
            or matrix.layout is not torch.strided
        ):
            return False
    return not torch.is_autocast_enabled("cuda" if matrices[0].is_cuda else "cpu")


def plain(adj: Adjacency, call: Call) -> Tensor:
    """Runs the kernel in plain eager mode; the call's algorithm and bias must be in the kernel's form."""
    if torch.is_grad_enabled():
        needs_grad, apply = False, _attention_op.apply
        for each in call[:7]:
            if each is not None:
                needs_grad = needs_grad or each.requires_grad
                apply = _attention_op.apply_wrapped if is_wrapped(each) else apply
        if needs_grad:
            return apply(*call, adj)[0]
    return launch.forward(adj, call)[0]


# ---------------------------------------------------------------- which kernel handles a call


def unsupported_reason(
    adj: Adjacency,
    kind: int,
    dtype: torch.dtype,
    width: int,
    heads: int,
    scale: float = 0.0,
    edge_width: int | None = None,
) -> str:
    """Returns why CUDA's CSR kernels do not support a call or its backward pass; "" if they do.

    Args:
        adj: structure (num_dst, num_src).
        kind: kind of the scores.
        dtype: dtype of the values.
        width: width of the values, all heads together.
        heads: number of heads.
        scale: slope of the leaky ReLU, which GATv2's kernels compute as the maximum of z and ``scale * z``.
        edge_width: number of features per edge; None: there are no edge features.
    """
    if edge_width is not None:
        most = MOST_GATV2_FEATURES if kind == GATV2 else MOST_FEATURES
        if edge_width > most:
            return f"{edge_width} features of an edge, more than {most}"
    if kind == GATV2 and not 0 <= scale <= 1:
        return f"negative_slope={scale}, not from 0 to 1, on CUDA"
    if (kind == DOT_PRODUCT or edge_width is not None) and adj.num_values >= 2**32:
        return f"{adj.num_values} edges, 2^32 or more"
    if dtype == torch.float64:
        return "float64 on CUDA"
    if heads == 0 or not 0 < width // heads <= MAX_HEAD_WIDTH:
        return f"heads of width {width // max(heads, 1)}, not 1 to {MAX_HEAD_WIDTH}"
    if heads > MOST_HEADS:
        return f"{heads} heads, more than {MOST_HEADS}"
    if width > MAX_WIDTH:
        return f"{width} features of all heads, more than {MAX_WIDTH}"
    return ""


def blocks_unsupported_reason(adj: Adjacency, dtype: torch.dtype, widths: Iterable[int], heads: int) -> str:
    """Returns why dot-product kernels on blocks do not support a call or its backward pass; "" if they do.

    Args:
        adj: structure (num_dst, num_src).
        dtype: dtype of the features.
        widths: widths of queries, keys and values, all heads together; or one width for all three.
        heads: number of heads.
    """
    if dtype == torch.float64:
        return "float64 on CUDA"
    if heads == 0:
        return "no heads"
    if heads > MOST_HEADS:
        return f"{heads} heads, more than {MOST_HEADS}"
    # The backward pass reads the transposed structure.
    if max(adj.shape) > MOST_COLUMNS:
        return f"more than {MOST_COLUMNS} nodes"
    for of_all in widths:
        width = of_all // heads
        if not 0 < width <= MAX_HEAD_WIDTH:
            return f"heads of width {width}, not 1 to {MAX_HEAD_WIDTH}"
        if width * dtype.itemsize % LOAD_BYTES:
            return f"heads of {width * dtype.itemsize} bytes, not a multiple of {LOAD_BYTES}"
        if of_all > MAX_WIDTH_ON_BLOCKS:
            return f"{of_all} features of all heads, more than {MAX_WIDTH_ON_BLOCKS}"
    return ""


def has_blocks(adj: Adjacency, *, backward: bool) -> bool:
    """Builds the blocks for a call and its backward pass; returns whether there was enough memory.

    Args:
        adj: structure of the call.
        backward: whether gradients are wanted; they need the blocks of the transposed structure.
    """
    return adj.try_bsb() and (not backward or adj.t().try_bsb())


def _kernel_of(adj: Adjacency, call: Call, drawn: str) -> str:
    """The kernel of a call: ``"csr"``, ``"fused3s"`` or ``"unfused"``. Builds the blocks for ``"fused3s"``.

    Args:
        adj: structure (num_dst, num_src); the call may count as a use.
        call: operands and the caller's choice of the algorithm.
        drawn: why no kernel supports the call's dropout; "" if one does.
    """
    algorithm, v, heads = call.algorithm, call.values, call.heads
    no_csr = drawn
    if v.is_cuda and not drawn:
        edge_width = None if call.edge is None else call.edge.size(1)
        no_csr = unsupported_reason(adj, call.kind, v.dtype, v.size(1), heads, call.scale, edge_width)
    if call.kind != DOT_PRODUCT or call.edge is not None or drawn or not v.is_cuda:
        return policy.attention_algorithm(algorithm, no_csr)
    widths = call.dst.size(1), call.src.size(1), v.size(1)
    if widths[0] != widths[2]:
        no_csr = f"v has {widths[2]} features, q has {widths[0]}"
    if adj.is_padded:  # edges of a padded structure change between replays, and a replay cannot build blocks
        return "unfused" if no_csr else "csr"
    if algorithm == "unfused":
        return algorithm
    no_blocks = blocks_unsupported_reason(adj, v.dtype, widths, heads)
    if torch.compiler.is_compiling():
        # Traced code does not count uses, because torch.compile would compile again for every count. The
        # operator builds the blocks when it runs.
        facts = policy.Facts(True, *adj.shape, adj.num_edges, converted=True)
        return policy.dot_product_algorithm(facts, algorithm, no_blocks, no_csr).algorithm
    operands = (call.dst, call.src, v) if call.bias is None else (call.dst, call.src, v, call.bias)
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    return _choice(adj, algorithm, no_blocks, no_csr, backward=wants_grad).algorithm


def choice_on_cuda(
    adj: Adjacency, dtype: torch.dtype, width: int, heads: int, algorithm: str, *, backward: bool
) -> policy.Choice:
    """The kernel for queries, keys and values of one width on CUDA. Builds the blocks for ``"fused3s"``.

    Args:
        adj: structure; the call may count as a use.
        dtype: dtype of the features.
        width: width of all heads together.
        heads: number of heads.
        algorithm: the caller's choice, except ``"unfused"``.
        backward: whether gradients are wanted.
    """
    no_blocks = blocks_unsupported_reason(adj, dtype, (width,), heads)
    no_csr = unsupported_reason(adj, DOT_PRODUCT, dtype, width, heads)
    return _choice(adj, algorithm, no_blocks, no_csr, backward=backward)


def _choice(adj: Adjacency, algorithm: str, no_blocks: str, no_csr: str, *, backward: bool) -> policy.Choice:
    rule = policy.dot_product_algorithm
    choice, _ = follow(adj, lambda facts: rule(facts, algorithm, no_blocks, no_csr))
    if choice.algorithm == "fused3s" and not has_blocks(adj, backward=backward):
        no_memory = "not enough memory for the binary sparse blocks"
        return rule(facts_of(adj), algorithm, no_memory, no_csr)
    return choice


# ---------------------------------------------------------------- registration


def _gradients(
    adj: Adjacency,
    grad: Tensor,
    call: Call,
    out: Tensor | None,
    lse: Tensor,
    out_edge: Tensor | None,
    *,
    wanted: Wanted,
) -> Gradients:
    return launch.backward(adj, call, grad, out, lse, out_edge, wanted)


def _fake(of: Any) -> tuple[Tensor, Tensor, Tensor]:
    v, num_dst, is_cuda = of.src if of.v is None else of.v, of.dst.size(0), of.src.device.type == "cuda"
    lse = v.new_empty(num_dst, of.heads, dtype=accumulation_dtype(v.dtype))
    out_edge = v.new_empty(0)
    if is_cuda and of.kind == DOT_PRODUCT:
        if of.edge is None and of.algorithm == "fused3s":
            lse = lse.double()
        else:
            edge_width = 0 if of.edge is None else of.edge.size(1)
            out_edge = v.new_empty(num_dst, of.heads, -(-edge_width // 4) * 4)
    return v.new_empty(num_dst, v.size(1)), lse, out_edge


def _reads_out(*arguments: Any) -> bool:
    """True if gradients need the result. The CPU's and GAT's kernels compute <grad, out> from the entries."""
    return arguments[1].is_cuda and arguments[_KIND] != ADDITIVE


_KIND = Call._fields.index("kind")
_attention_op = FusedOperator(
    "attention",
    launch.forward,
    _gradients,
    unfused.attention,
    _fake,
    ("out", "lse", "out_edge"),
    reads_out=_reads_out,
)
