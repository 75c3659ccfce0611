"""The attention of a layer on CUDA: one call into `_C` per pass, and the plans of these calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import queue
from fastsparse_core.fused.attention_kinds import ADDITIVE, DOT_PRODUCT, GATV2, LayerCall, Score
from fastsparse_core.gpu import multiprocessors
from fastsparse_core.ops._attention import choice_on_cuda
from fastsparse_core.ops._attention_launch import aligned, att_rows_of
from fastsparse_core.ops._dtypes import cast
from fastsparse_core.ops._facts import count_csr_use, used_csr
from fastsparse_core.ops._operands import contiguous_floats, unit_stride
from fastsparse_core.structure.adjacency import Adjacency

if TYPE_CHECKING:
    Plan = _C.CudaAttentionLayer

#: A sum over nodes is divided into this number of parts per multiprocessor of the GPU.
_PARTS = 4


class _Provisional(NamedTuple):
    """A plan that a later call may replace, because the structure gets another format, or sorted slices.

    Calls count uses of the plan, so that the rules are not evaluated in every call.
    """

    plan: Plan
    #: True if the slices of the structures were sorted when the plan was made.
    is_sorted: bool
    #: True if the plan reads CSR rows because the structure has not been used often enough for blocks.
    may_convert: bool

    def serves(self, adj: Adjacency, backward: bool) -> bool:
        """Counts a use; returns whether the call can still use the plan."""
        if not self.is_sorted:
            count_csr_use(adj)
            if backward:
                count_csr_use(adj.t())
            if _is_sorted(adj, backward):
                return False
        if self.may_convert:
            if adj.usage.products >= policy.REUSE or adj.has_bsb:
                return False
            adj.usage.products += 1
        return True


def plan_of(
    adj: Adjacency,
    score: type[Score],
    dtype: torch.dtype,
    widths: tuple[int, ...],
    heads: int,
    scale: float,
    algorithm: str,
    *,
    records: bool,
    backward: bool = False,
) -> Plan:
    """The plan that calls on a structure share: everything of one pass except the tensors' addresses.

    Args:
        adj: structure.
        score: the kind of attention; it must have a kernel.
        dtype: dtype of the features.
        widths: widths of the linear maps' results.
        heads: number of heads.
        scale: factor of dot products, or slope of the leaky ReLU.
        algorithm: the caller's choice; for the backward pass of dot products, the kernel of the forward pass.
        records: whether a backward pass follows.
        backward: whether the plan is for the backward pass.
    """
    key = (score, dtype, widths, heads, scale, algorithm, records, backward)
    kept: Plan | _Provisional | None = adj.plans.get(key)
    if kept is not None:
        if not isinstance(kept, _Provisional):
            return kept
        if kept.serves(adj, backward):
            return kept.plan
    on_blocks = may_convert = False
    if score is DOT_PRODUCT:
        if backward:
            on_blocks = algorithm == "fused3s"
        else:
            choice = choice_on_cuda(adj, dtype, widths[0], heads, algorithm, backward=records)
            on_blocks, may_convert = choice.algorithm == "fused3s", not choice.is_final
    if kept is not None and kept.is_sorted and not on_blocks:
        plan = kept.plan  # the rule still chooses the same kernel
    else:
        plan = _plan(adj, score, dtype, widths, heads, scale, backward, on_blocks)
    is_sorted = on_blocks or _is_sorted(adj, backward)
    adj.plans[key] = plan if is_sorted and not may_convert else _Provisional(plan, is_sorted, may_convert)
    return plan


def _is_sorted(adj: Adjacency, backward: bool) -> bool:
    return adj.has_sorted_slices and (not backward or adj.t().has_sorted_slices)


def _plan(
    adj: Adjacency,
    score: type[Score],
    dtype: torch.dtype,
    widths: tuple[int, ...],
    heads: int,
    scale: float,
    backward: bool,
    on_blocks: bool,
) -> Plan:
    # Dot products from CSR store two numbers per edge, in the caller's order. Other kinds store nothing per
    # edge.
    valued = score is DOT_PRODUCT and not on_blocks
    transposed = adj.t(valued=valued) if backward else None
    structure = structure_t = blocks = blocks_t = None
    att_rows = 0
    if on_blocks:
        blocks = adj.bsb_structure(valued=False)
        blocks_t = None if transposed is None else transposed.bsb_structure(valued=False)
        splits = [None if each is None else each.bsb_split for each in (adj, transposed)]
    else:
        if score is GATV2 and backward:
            if not torch.cuda.is_current_stream_capturing():
                # The gradient of att is summed in the order of the slices, which must not change later.
                adj.sort_slices()
            att_rows = att_rows_of(adj.row_split.slices.size(0))
        structure = used_csr(adj, valued=valued)
        structure_t = None if transposed is None else used_csr(transposed, valued=valued)
        splits = [None if each is None else each.row_split for each in (adj, transposed)]
    slots, slots_t = (0 if split is None else split.num_slots for split in splits)
    return _C.CudaAttentionLayer(
        structure,
        structure_t,
        blocks,
        blocks_t,
        slots,
        slots_t,
        att_rows,
        adj.num_values,
        score.code,
        dtype,
        adj.num_dst,
        heads,
        widths[0] // heads,
        len(widths),
        scale,
        _PARTS * multiprocessors(adj.col.device),
        backward,
        adj.col.get_device(),
    )


def stacked(call: LayerCall, maps: Sequence[Tensor]) -> tuple[Tensor, Tensor | None] | None:
    """Joins the weights and biases of several linear maps, in the dtype of the product, with one launch.

    Returns None if dtypes or shapes differ, or a weight is not contiguous; then PyTorch's operators join them
    or raise an error.
    """
    first, count = maps[0], len(call.widths)
    shape = first.shape
    rows, columns = shape
    if first.dtype not in (call.dtype, torch.float32):
        return None
    for nth, tensor in enumerate(maps):
        if tensor.shape != (shape if nth < count else (rows,)) or not tensor.is_contiguous():
            return None
    matrix = first.new_empty(count * rows, columns, dtype=call.dtype)
    bias = first.new_empty(count * rows, dtype=call.dtype) if len(maps) > count else None
    index = first.get_device()
    _C.stack_maps(
        maps[:count],
        maps[count:],
        rows * columns,
        rows,
        matrix,
        bias,
        first.dtype,
        call.dtype,
        index,
        queue(index),
    )
    return matrix, bias


def numbers_of_state(score: type[Score], num_nodes: int, heads: int) -> int:
    """Size of the nodes' state, in float32 numbers: an upper limit, as a trace does not know the kernel."""
    arrays = 3 if score is ADDITIVE else 1 if score is GATV2 else 2
    return -(-arrays * num_nodes * heads // 4) * 4


def state_for_both(call: LayerCall, state: Tensor, num_nodes: int) -> Tensor:
    """Converts the state of dot products from CSR to the form that kernels for blocks use: float64, base 2.

    In a trace, a structure may be converted to blocks between a forward pass and its backward pass.
    """
    if call.score is DOT_PRODUCT and not call.plan.on_blocks:
        count = num_nodes * call.heads
        state[: 2 * count].view(torch.float64).copy_(state[:count].double() / math.log(2))
    return state


def kept_for(
    call: LayerCall, state: Tensor, result: Tensor | None, num_nodes: int
) -> tuple[Tensor, Tensor | None]:
    """State and result as the kernel of the backward pass reads them, from the tensor of `state_for_both`."""
    if call.score is not DOT_PRODUCT or call.plan.on_blocks:
        return state, result
    if result is None:
        behind = state[numbers_of_state(call.score, num_nodes, call.heads) :].view(call.dtype)
        result = behind[: num_nodes * call.widths[0]].view(num_nodes, call.widths[0])
    lse = state[: 2 * num_nodes * call.heads].view(torch.float64) * math.log(2)
    return lse.float(), result


def attend(
    call: LayerCall, joint: Tensor, vectors: Sequence[Tensor], bias: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Returns the result with the bias and, for the backward pass, nodes' state and attention's result."""
    plan, num_nodes, width = call.plan, joint.shape[0], call.widths[0]
    first, second, _ = _operands(vectors)
    is_float = False
    if bias is not None:
        is_float = bias.dtype is not call.dtype
        bias = contiguous_floats(bias) if is_float else bias.contiguous()
    result = joint.new_empty(num_nodes, width)
    # Bias and the result of a fourth map are added in place if the backward pass does not read the result;
    # otherwise the result of attention is stored behind the state.
    in_place = not call.keeps_result or (bias is None and len(call.widths) < 4)
    numbers = behind = numbers_of_state(call.score, num_nodes, call.heads)
    if not in_place:
        numbers += (num_nodes * width * joint.itemsize + 3) // 4
    state = joint.new_empty(numbers, dtype=torch.float32)
    address = state.data_ptr()
    workspace = joint.new_empty(plan.scratch, dtype=torch.float32) if plan.scratch else None
    plan.forward(
        joint,
        first,
        second,
        bias,
        is_float,
        result if in_place else address + 4 * behind,
        result,
        address,
        workspace,
        call.dropout_p,
        0 if call.seed is None else int(call.seed),
        plan.on_blocks and policy.allows_tf32(),
        queue(joint.get_device()),
    )
    return result, (state, result if in_place and call.keeps_result else None)


def differentiate(
    call: LayerCall,
    grad: Tensor,
    joint: Tensor,
    vectors: Sequence[Tensor],
    kept: Sequence[Tensor | None],
    bias_dtype: torch.dtype | None,
    map_bias_dtype: torch.dtype | None,
) -> tuple[Tensor, list[Tensor], Tensor | None, Tensor | None]:
    """Gradients of the linear maps' results, of the vectors, and of the biases if they have a dtype."""
    algorithm = "fused3s" if call.plan.on_blocks else "csr"
    how = (call.score, call.dtype, call.widths, call.heads, call.scale, algorithm)
    plan = plan_of(call.adj, *how, records=True, backward=True)
    state, out = kept
    assert state is not None
    address = state.data_ptr()
    grad = aligned(grad) if call.score is DOT_PRODUCT else unit_stride(grad)
    first, second, operands = _operands(vectors)
    found = [torch.empty_like(operand) for operand in operands]
    grad_joint = torch.empty_like(joint)
    grad_bias = None if bias_dtype is None else joint.new_empty(call.widths[0], dtype=bias_dtype)
    sums = None if map_bias_dtype is None else joint.new_empty(joint.shape[1], dtype=map_bias_dtype)
    workspace = joint.new_empty(plan.scratch, dtype=torch.float32)
    plan.backward(
        joint,
        first,
        second,
        address + 4 * numbers_of_state(call.score, joint.shape[0], call.heads) if out is None else out,
        address,
        workspace,
        grad,
        grad_joint,
        found[0] if found else None,
        found[1] if len(found) > 1 else None,
        grad_bias,
        bias_dtype or torch.float32,
        sums,
        map_bias_dtype or torch.float32,
        call.dropout_p,
        0 if call.seed is None else int(call.seed),
        plan.on_blocks and policy.allows_tf32(),
        queue(joint.get_device()),
    )
    grads = [cast(each, vector.dtype) for each, vector in zip(found, vectors, strict=True)]
    return grad_joint, grads, grad_bias, sums


def _operands(vectors: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
    """Both vectors in float32 (None: there is none), and a list of those that are not None."""
    operands = [contiguous_floats(vector) for vector in vectors]
    first = operands[0] if operands else None
    return first, operands[1] if len(operands) > 1 else None, operands
