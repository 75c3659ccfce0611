"""Plans of spmm. A plan stores what calls of one kind share, so that a call is a single launch."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import current_stream, device_index, place_of
from fastsparse_core.formats.bsb import HEIGHT
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._facts import count_csr_use, facts_of, follow, scatters, used_csr
from fastsparse_core.ops._operands import edges_from_dense, is_dense, num_heads, unit_stride
from fastsparse_core.structure.adjacency import Adjacency

#: SpmmKernel in kernels/binding.cpp. Kernels named "resident" gather from shared memory.
_KERNEL_CODE = {"csr": 0, "tca": 1, "resident_csr": 2, "resident_tca": 3, "hr": 4}


def launch_spmm(
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    bias: Tensor | None,
    algorithm: str,
    relu: bool = False,
    loop: Tensor | None = None,
) -> Tensor:
    """Computes the sum of `spmm`, without checks and without autograd.

    Args:
        adj: structure (num_dst, num_src).
        x: features (num_src, width).
        value: values of edges or of dense vectors, in a dtype that kernels support together with ``x``; None:
            1.
        scale_dst: (num_dst,) in the accumulation dtype; None: 1.
        scale_src: (num_src,) in the accumulation dtype; None: 1.
        bias: (width,); None: 0.
        algorithm: the caller's choice.
        relu: whether negative results become 0.
        loop: one number in the accumulation dtype, the value of an additional entry (i, i) in every row; only
            for square structures without ``value``. None: no additional entries.

    Returns:
        (num_dst, width) in the dtype of ``x``.
    """
    row_stride, column_stride = x.stride()
    if column_stride != 1 and x.shape[1] > 1:
        x = x.contiguous()
        row_stride = x.stride(0)
    dtype, width = x.dtype, x.shape[1]
    if bias is not None and not (bias.dtype is dtype and bias.is_contiguous()):
        bias = bias.to(dtype).contiguous()
    aligned = False  # CPU kernels do not need it
    if x.is_cuda:
        item = dtype.itemsize
        pieces = not (x.data_ptr() | row_stride * item | width * item) & 15
        aligned = pieces and row_stride * item < 1 << 32
    # Most calls repeat an earlier one, whose plan is cached.
    key: tuple[Any, ...]
    if value is None:
        key = ("spmm", dtype, width, algorithm, aligned, scale_src is None)
    else:
        value = value.contiguous()
        key = ("spmm", dtype, width, algorithm, aligned, value.dtype, value.shape[1:])
    plan: SpmmPlan | None = adj.plans.get(key)
    if plan is None:
        if adj.num_dst == 0 or width == 0:
            return x.new_empty(adj.num_dst, width)
        plan = _plan(adj, x, value, scale_src is not None, algorithm, aligned, key)
    return plan.run(adj, x, value, scale_dst, scale_src, bias, relu, loop)


def _plan(
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None,
    scales_src: bool,
    algorithm: str,
    aligned: bool,
    key: tuple[Any, ...],
) -> SpmmPlan:
    """Makes and caches the plan for calls with the properties in ``key``."""
    dtype, width, heads, dense = x.dtype, x.shape[1], num_heads(value), is_dense(value)
    weighted = value is not None or scales_src
    call = (algorithm, dtype, width, heads, aligned, dense)
    rule = policy.spmm_algorithm
    profile = adj.gpu
    choice, facts = follow(adj, lambda facts: rule(facts, profile, *call))
    chosen = choice.algorithm
    plan: SpmmPlan
    if chosen == "flashsparse":
        plan = _BsbPlan(adj, dtype, width, value)
    else:
        resident = policy.spmm_resident(facts, profile, chosen, dtype, width, heads, aligned)
        tile = width
        if not resident and chosen == "csr":
            tile = policy.csr_tile(facts, dtype.itemsize, profile, weighted=weighted)
        plan = _CsrPlan(adj, dtype, width, value, chosen, tile, resident=resident)
    if dense and chosen != "flashsparse":
        plan = _DensePlan(plan)
    adj.plans[key] = plan if choice.is_final else _CountedPlan(plan, algorithm, aligned, key)
    return plan


class _CsrPlan:
    """The plan of a kernel that reads CSR.

    - ``"csr"``: rows cut into slices (spmm_csr.cu); whole rows on the CPU
    - ``"tca"``: tensor cores from CSR as it is (spmm_tca.cu)
    - either of them with all sources in shared memory (spmm_resident.cu)
    - ``"hr"``: tensor cores for long pieces of rows, CUDA cores for the rest (spmm_hr.cu)
    """

    def __init__(
        self,
        adj: Adjacency,
        dtype: torch.dtype,
        width: int,
        value: Tensor | None,
        algorithm: str,
        tile: int,
        *,
        resident: bool,
    ) -> None:
        valued = value is not None
        self.num_dst, self.width = adj.num_dst, width
        self.num_slots, self.partial_dtype = 0, accumulation_dtype(dtype)
        self.device = device_index(adj.device)
        self.is_counted = False
        num_long = 0
        if resident or algorithm == "tca":
            structure = adj.structure_for(valued=valued, work_list="plain")
        elif algorithm == "hr":
            # The structure is built first, because during a capture its error names what is missing. Reading
            # `num_long` would copy it from the GPU, which a capture does not allow.
            structure = adj.structure_for(valued=valued, work_list="hybrid")
            num_long, self.num_slots = adj.hybrid_rows.num_long, adj.hybrid_rows.num_slots
        else:
            structure = adj.structure_for(valued=valued)
            if self.device >= 0:
                self.num_slots = adj.row_split.num_slots
                self.is_counted = not adj.has_sorted_slices
        self.launch = _C.SpmmPlan(
            kernel=_KERNEL_CODE[f"resident_{algorithm}" if resident else algorithm],
            structure=structure,
            dtype=dtype,
            width=width,
            value_dtype=dtype if value is None else value.dtype,
            heads=num_heads(value),
            tile=tile,
            num_long=num_long,
            device=self.device,
        ).run

    def run(
        self,
        adj: Adjacency,
        x: Tensor,
        value: Tensor | None,
        scale_dst: Tensor | None,
        scale_src: Tensor | None,
        bias: Tensor | None,
        relu: bool,
        loop: Tensor | None,
    ) -> Tensor:
        width, device = self.width, self.device
        if self.is_counted:
            count_csr_use(adj)
        out = x.new_empty(self.num_dst, width)
        partial = None
        if self.num_slots:
            partial = x.new_empty(self.num_slots, width, dtype=self.partial_dtype)
        where = torch.get_num_threads() if device < 0 else current_stream(device)
        self.launch(
            x=x,
            value=value,
            scale_dst=scale_dst,
            scale_src=scale_src,
            loop=loop,
            bias=bias,
            relu=relu,
            out=out,
            partial=partial,
            queue=where,
        )
        return out


class _CountedPlan:
    """A provisional plan, until the structure is converted or has been used `policy.REUSE` times.

    It counts uses, so that the rules are not evaluated in every call.
    """

    def __init__(self, plan: SpmmPlan, algorithm: str, aligned: bool, key: tuple[Any, ...]) -> None:
        self.plan, self.algorithm, self.aligned, self.key = plan, algorithm, aligned, key

    def run(
        self,
        adj: Adjacency,
        x: Tensor,
        value: Tensor | None,
        scale_dst: Tensor | None,
        scale_src: Tensor | None,
        *rest: Any,
    ) -> Tensor:
        plan = self.plan
        if adj.usage.products < policy.REUSE and not adj.has_bsb:
            adj.usage.products += 1
        else:
            adj.plans.pop(self.key, None)
            plan = _plan(adj, x, value, scale_src is not None, self.algorithm, self.aligned, self.key)
        return plan.run(adj, x, value, scale_dst, scale_src, *rest)


class _BsbPlan:
    """The plan of the kernel for binary sparse blocks on tensor cores (spmm_bsb.cu)."""

    def __init__(self, adj: Adjacency, dtype: torch.dtype, width: int, value: Tensor | None) -> None:
        dense = is_dense(value)
        self.structure = adj.bsb_structure(valued=value is not None and not dense)
        self.num_partial = adj.bsb_split.num_slots * HEIGHT
        self.quad_vector = adj.quad_vector() if dense else None
        self.heads = num_heads(value)
        self.is_float32 = dtype == torch.float32
        self.features_per_lane = policy.features_per_lane(width, dtype.itemsize)
        self.blocks_per_step = policy.blocks_per_step(adj.bsb.num_blocks, adj.bsb.num_windows)

    def run(
        self,
        adj: Adjacency,
        x: Tensor,
        value: Tensor | None,
        scale_dst: Tensor | None,
        scale_src: Tensor | None,
        bias: Tensor | None,
        relu: bool,
        loop: Tensor | None,
    ) -> Tensor:
        width = x.shape[1]
        out = x.new_empty(adj.num_dst, width)
        vector_scale = (
            None  # keeps the tensor alive until after the launch; during a capture, nothing else does
        )
        if scale_src is not None and value is None and not self.is_float32:
            vector_scale = adj.vector_scale(scale_src)
        elif scale_src is not None:
            # In float32, scaling in the kernel takes a third product on the tensor cores, which takes longer
            # than scaling the features.
            x = (x * scale_src[:, None]).to(x.dtype)
            scale_src = None
        if bias is not None and bias.data_ptr() % 16:
            bias = bias.clone()  # the kernel uses 16-byte loads
        partial = x.new_empty(self.num_partial, width, dtype=torch.float32) if self.num_partial else None
        index = x.get_device()
        _C.spmm_bsb(
            self.structure,
            x,
            value,
            self.heads,
            self.quad_vector,
            vector_scale,
            scale_dst=scale_dst,
            scale_src=scale_src,
            loop=loop,
            bias=bias,
            relu=relu,
            out=out,
            partial=partial,
            features_per_lane=self.features_per_lane,
            blocks_per_step=self.blocks_per_step,
            tf32=self.is_float32 and policy.allows_tf32(),
            device=index,
            queue=current_stream(index),
        )
        return out


class _DensePlan:
    """A plan for values that are stored as dense vectors.

    It converts them to one value per edge, and runs a plan that reads those.
    """

    def __init__(self, plan: SpmmPlan) -> None:
        self.plan = plan

    def run(self, adj: Adjacency, x: Tensor, value: Tensor | None, *rest: Any) -> Tensor:
        assert value is not None
        return self.plan.run(adj, x, edges_from_dense(adj, value), *rest)


#: A kernel of spmm and what it reads of a structure, for calls of one dtype, width and layout. The structure
#: stores it, so it must not refer to the structure. `run` takes the arguments of `launch_spmm`; ``x`` must
#: have unit column stride.
SpmmPlan: TypeAlias = _CsrPlan | _CountedPlan | _BsbPlan | _DensePlan


def add_transposed(
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    total: Tensor,
    num_given: int = 0,
) -> Tensor:
    """Adds the transposed product to ``total``, contiguous float32 (num_src, width), without a transpose.

    On CUDA, the kernel uses atomics, so the order of the sums varies. Callers must check `policy.scatters`
    first. The arguments are those of the untransposed product, except that ``x`` is (num_dst, width). Only
    the first ``num_given`` rows of ``total`` must be initialized; the other rows count as 0.

    Returns:
        ``total``. Exception: if ``num_given`` is 0, `policy.counts_sources` is true and ``x`` has 16 bits,
        the result is a tensor in the dtype of ``x``, and ``total`` is overwritten.
    """
    x = unit_stride(x)
    if value is not None:
        value = value.contiguous()
    count = out = None
    is_float = x.dtype == torch.float32
    if (is_float or num_given == 0) and policy.counts_sources(facts_of(adj), x.size(1)):
        count = torch.empty(adj.num_src, dtype=torch.int32, device=x.device)
        out = None if is_float else torch.empty_like(total, dtype=x.dtype)
    device, queue = place_of(x.device)
    _C.spmm_csr_transposed(
        structure=used_csr(adj, valued=value is not None),
        x=x,
        value=value,
        scale_dst=scale_dst,
        scale_src=scale_src,
        sum=total,
        num_given=num_given,
        count=count,
        out=out,
        device=device,
        queue=queue,
    )
    return total if out is None else out


def with_loops(
    out: Tensor, x: Tensor, scale_dst: Tensor | None, scale_src: Tensor | None, loop: Tensor
) -> Tensor:
    """Adds the terms of self loops with value ``loop`` to ``out``, a product of ``x``; differentiable."""
    for scale in (scale_dst, scale_src):
        x = x if scale is None else x * scale[:, None]
    return torch.addcmul(out, x, loop.to(x.dtype)).to(out.dtype)


def grad_of_features(
    adj: Adjacency,
    grad: Tensor,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    algorithm: str,
    loop: Tensor | None = None,
) -> Tensor:
    """The gradient of the features in a product with ``adj``, computed without autograd.

    This gradient is the transposed product. ``grad`` is the gradient of the product's result; the other
    arguments are the arguments of the product.
    """
    if value is None and adj.symmetric:  # forward and backward pass share the structure and its plan
        return launch_spmm(adj, grad, None, scale_src, scale_dst, None, algorithm, loop=loop)
    if adj.usage.scattered is not None and scatters(adj, algorithm, grad.dtype, value):
        total = grad.new_empty(adj.num_src, grad.size(1), dtype=torch.float32)
        total = add_transposed(adj, grad, value, scale_dst, scale_src, total).to(grad.dtype)
        return total if loop is None else with_loops(total, grad, scale_dst, scale_src, loop)
    if value is not None and value.dim() == 3:  # `is_dense`, inlined to save a Python call
        value = edges_from_dense(adj, value)
    transposed = adj.t(valued=value is not None)
    return launch_spmm(transposed, grad, value, scale_src, scale_dst, None, algorithm, loop=loop)
