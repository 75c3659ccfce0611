"""The attention of a layer on CUDA: one call into `_C` each way, two allocations before it, or three."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import queue
from fastsparse_core.fused.attention_kinds import ADDITIVE, DOT_PRODUCT, GATV2, LayerCall, Score
from fastsparse_core.ops._attention_bsb import aligned
from fastsparse_core.ops._common import (
    DTYPE_CODE,
    allows_tf32,
    cast,
    contiguous_floats,
    multiprocessors,
    unit_stride,
)
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._gatv2_attention_csr import att_rows_of
from fastsparse_core.structure.adjacency import Adjacency

if TYPE_CHECKING:
    Plan = _C.CudaAttentionLayer

#: Parts of a sum over nodes for each multiprocessor.
_PARTS = 4


def plan_of(
    adj: Adjacency,
    score: type[Score],
    dtype: torch.dtype,
    widths: tuple[int, ...],
    heads: int,
    scale: float,
    backward: bool,
) -> Plan:
    """What calls on a structure share: all of one pass but the tensors' addresses.

    It is kept once the structure keeps its work lists as they are.
    """
    key = (score, dtype, widths, heads, scale, backward)
    plan: Plan | None = adj.plans.get(key)
    if plan is not None:
        return plan
    transposed = adj.t() if backward else None
    structure = structure_t = blocks = blocks_t = None
    att_rows, is_final = 0, True
    if score is DOT_PRODUCT:
        blocks = adj.bsb_structure(valued=False)
        blocks_t = None if transposed is None else transposed.bsb_structure(valued=False)
        splits = [None if each is None else each.bsb_split for each in (adj, transposed)]
    else:
        if score is GATV2 and backward:
            if not torch.cuda.is_current_stream_capturing():
                adj.sort_slices()  # the gradient of att is summed in their order, which must not change
            att_rows = att_rows_of(adj.row_split.slices.size(0))
        structure, structure_t = used_csr(adj), None if transposed is None else used_csr(transposed)
        splits = [None if each is None else each.row_split for each in (adj, transposed)]
        is_final = adj.has_sorted_slices and (transposed is None or transposed.has_sorted_slices)
    slots, slots_t = (0 if split is None else split.num_slots for split in splits)
    plan = _C.CudaAttentionLayer(
        structure,
        structure_t,
        blocks,
        blocks_t,
        slots,
        slots_t,
        att_rows,
        score.code,
        DTYPE_CODE[dtype],
        adj.num_dst,
        heads,
        widths[0] // heads,
        len(widths),
        scale,
        _PARTS * multiprocessors(adj.col.device),
        backward,
        adj.col.get_device(),
    )
    if is_final:
        adj.plans[key] = plan
    return plan


def attend(
    call: LayerCall, joint: Tensor, vectors: Sequence[Tensor], bias: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The result with the bias, and for the backward pass the state of the nodes and what attention gave."""
    plan, num_nodes, width = call.plan, joint.shape[0], call.widths[0]
    first, second, _alive = _addresses(vectors)
    is_float = False
    if bias is not None:
        is_float = bias.dtype is not call.dtype
        bias = contiguous_floats(bias) if is_float else bias.contiguous()
    out = joint.new_empty(num_nodes, width)
    # Bias and what a fourth map gives are added in place where the backward pass does not read the result.
    in_place = not call.keeps_result or (bias is None and len(call.widths) < 4)
    result = out if in_place else joint.new_empty(num_nodes, width)
    # As in `CudaAttentionLayerArgs`.
    numbers = num_nodes * call.heads * (3 if call.score is ADDITIVE else 1)
    precise = torch.float64 if call.score is DOT_PRODUCT else torch.float32
    state = joint.new_empty(numbers, dtype=precise)
    room = joint.new_empty(plan.scratch, dtype=torch.float32) if plan.scratch else None
    plan.forward(
        joint.data_ptr(),
        first,
        second,
        0 if bias is None else bias.data_ptr(),
        is_float,
        out.data_ptr(),
        result.data_ptr(),
        state.data_ptr(),
        0 if room is None else room.data_ptr(),
        call.dropout_p,
        0 if call.seed is None else int(call.seed),
        call.score is DOT_PRODUCT and allows_tf32(),
        queue(joint.get_device()),
    )
    return result, (state, out if call.keeps_result else None)


def differentiate(
    call: LayerCall,
    grad: Tensor,
    joint: Tensor,
    vectors: Sequence[Tensor],
    kept: Sequence[Tensor | None],
    bias_dtype: torch.dtype | None,
    map_bias_dtype: torch.dtype | None,
) -> tuple[Tensor, list[Tensor], Tensor | None, Tensor | None]:
    """Gradients of the linear maps' results, of the vectors and, where they have a dtype, of the biases."""
    plan = plan_of(call.adj, call.score, call.dtype, call.widths, call.heads, call.scale, True)
    state, out = kept
    assert state is not None
    grad = aligned(grad) if call.score is DOT_PRODUCT else unit_stride(grad)
    first, second, operands = _addresses(vectors)
    found = [torch.empty_like(operand) for operand in operands]
    grad_joint = torch.empty_like(joint)
    grad_bias = None if bias_dtype is None else joint.new_empty(grad.shape[1], dtype=bias_dtype)
    sums = None if map_bias_dtype is None else joint.new_empty(joint.shape[1], dtype=map_bias_dtype)
    room = joint.new_empty(plan.scratch, dtype=torch.float32)
    plan.backward(
        joint.data_ptr(),
        first,
        second,
        0 if out is None else out.data_ptr(),
        state.data_ptr(),
        room.data_ptr(),
        grad.data_ptr(),
        grad.stride(0),
        grad_joint.data_ptr(),
        found[0].data_ptr() if found else 0,
        found[1].data_ptr() if len(found) > 1 else 0,
        0 if grad_bias is None else grad_bias.data_ptr(),
        0 if bias_dtype is None else DTYPE_CODE[bias_dtype],
        0 if sums is None else sums.data_ptr(),
        0 if map_bias_dtype is None else DTYPE_CODE[map_bias_dtype],
        call.dropout_p,
        0 if call.seed is None else int(call.seed),
        call.score is DOT_PRODUCT and allows_tf32(),
        queue(joint.get_device()),
    )
    grads = [cast(each, vector.dtype) for each, vector in zip(found, vectors, strict=True)]
    return grad_joint, grads, grad_bias, sums


def _addresses(vectors: Sequence[Tensor]) -> tuple[int, int, list[Tensor]]:
    """Of both vectors in float32, 0 where there is none, and what has to live until the launch."""
    operands = [contiguous_floats(vector) for vector in vectors]
    first = operands[0].data_ptr() if operands else 0
    return first, operands[1].data_ptr() if len(operands) > 1 else 0, operands
