# Made by tests/stub.py from the lists of arguments in kernels/include/fastsparse and kernels/binding.cpp.
# Device -1 is the CPU and `queue` its number of threads, else `queue` is a CUDA stream. Memory that a call
# reads after it has returned, as structures and launches on a GPU do, is kept alive by the caller.

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

_Memory: TypeAlias = Tensor | int | None  # a tensor's first element, or its address; None: there is none
_Rows: TypeAlias = Tensor | None  # memory with what is known of its shape
_Dtype: TypeAlias = torch.dtype | int

def know_dtypes(
    *,
    dtypes: Sequence[torch.dtype],
) -> None: ...
def build_info() -> dict[str, bool | int | str]: ...
def prefer_huge_pages(
    *,
    out: _Memory,
    bytes: int,
    collapse: bool,
) -> None: ...

class CsrStructure:
    def __init__(
        self,
        *,
        rowptr: _Memory,
        col: _Memory,
        edge_id: _Memory,
        edge_id_is_64bit: bool,
        num_rows: int,
        num_cols: int,
        num_edges: int,
        slices: _Memory = ...,
        num_slices: int = ...,
        split_row: _Memory = ...,
        split_ptr: _Memory = ...,
        num_split_rows: int = ...,
    ) -> None: ...

class BsbStructure:
    def __init__(
        self,
        *,
        quad: _Memory,
        window_ptr: _Memory,
        window_row: _Memory,
        quad_entry: _Memory,
        value_id: _Memory,
        value_id_is_64bit: bool,
        num_rows: int,
        slices: _Memory,
        num_slices: int,
        split_row: _Memory,
        split_ptr: _Memory,
        num_split_rows: int,
        runs: _Memory,
        num_runs: int,
    ) -> None: ...

class RowPanelsStructure:
    def __init__(
        self,
        *,
        entry: _Memory,
        value_id: _Memory,
        value_id_is_64bit: bool,
        other_source: _Memory,
        num_other: int,
        slices: _Memory,
        num_slices: int,
        height: int,
        strip: int,
        num_rows: int,
        num_cols: int,
    ) -> None: ...

class CompressArgs:
    def __init__(
        self,
        *,
        major: _Memory,
        minor: _Memory,
        index_is_64bit: bool,
        num_edges: int,
        num_major: int,
        num_minor: int,
        sort_minor: bool,
        major_ptr: _Memory,
        minor_out: _Memory,
        order: _Memory,
        order_is_64bit: bool,
    ) -> None: ...

def compress_scratch_bytes(
    *,
    args: CompressArgs,
    device: int,
) -> int: ...
def compress(
    *,
    args: CompressArgs,
    scratch: _Memory,
    scratch_bytes: int,
    device: int,
    queue: int,
) -> None: ...
def inspect(
    *,
    row: _Memory,
    col: _Memory,
    edge_id: _Memory,
    index_is_64bit: bool,
    edge_id_is_64bit: bool,
    num_edges: int,
    num_rows: int,
    square: bool,
    rowptr: _Memory,
    col_out: _Memory,
    inv_degree: _Memory,
    slices: _Memory,
    scratch: _Memory,
    device: int,
    queue: int,
) -> tuple[int, ...]: ...
def sort_workspace(
    *,
    num_edges: int,
    num_rows: int,
    longest: int,
) -> tuple[int, int, int]: ...
def sort_edges(
    *,
    row: _Memory,
    col: _Memory,
    index_is_64bit: bool,
    num_edges: int,
    num_rows: int,
    num_cols: int,
    longest: int,
    rowptr: _Memory,
    col_out: _Memory,
    order: _Memory,
    inv_degree: _Memory,
    inv_sqrt_degree: _Memory,
    workspace: _Memory,
    device: int,
    queue: int,
) -> tuple[int, ...]: ...
def transpose_scratch_bytes(
    *,
    num_rows: int,
    num_cols: int,
    num_edges: int,
    keeps_order: bool,
    device: int,
) -> int: ...
def transpose(
    *,
    rowptr: _Memory,
    col: _Memory,
    num_rows: int,
    num_cols: int,
    num_edges: int,
    colptr: _Memory,
    row_out: _Memory,
    order: _Memory,
    scratch: _Memory,
    scratch_bytes: int,
    device: int,
    queue: int,
) -> None: ...

class SpmmPlan:
    def __init__(
        self,
        *,
        kernel: int,
        structure: CsrStructure,
        dtype: _Dtype,
        width: int,
        value_dtype: _Dtype,
        heads: int,
        tile: int,
        num_long: int,
        device: int,
    ) -> None: ...
    def run(
        self,
        *,
        x: _Rows,
        value: _Memory,
        scale_dst: _Memory,
        scale_src: _Memory,
        loop: _Memory,
        bias: _Memory,
        relu: bool,
        out: _Memory,
        partial: _Memory,
        queue: int,
    ) -> None: ...

def segment_reduce(
    *,
    structure: CsrStructure,
    reduction: int,
    x: _Rows,
    out: _Memory,
    extra: _Memory,
    partial: _Memory,
    facts: _Memory,
    device: int,
    queue: int,
) -> None: ...
def aggregate_linear_backward(
    *,
    num_rows: int,
    grad: _Memory,
    out_width: int,
    sums: _Memory,
    x: _Rows,
    width: int,
    num_slabs: int,
    weights: _Memory,
    bias: _Memory,
    grad_weight: _Memory,
    grad_root: _Memory,
    grad_bias: _Memory,
    num_terms: int,
    device: int,
    queue: int,
) -> None: ...

class AdditiveAttentionInput:
    def __init__(
        self,
        heads: int,
        score_dst: _Memory,
        score_src: _Memory,
        v: _Rows,
        bias: _Memory,
        bias_dtype: _Dtype,
        negative_slope: float,
        dropout_p: float,
        seed: int,
    ) -> None: ...

class Gatv2AttentionInput:
    def __init__(
        self,
        heads: int,
        x_dst: _Rows,
        x_src: _Rows,
        att: _Memory,
        negative_slope: float,
        dropout_p: float,
        seed: int,
    ) -> None: ...

class AttentionBsbInput:
    def __init__(
        self,
        heads: int,
        q: _Rows,
        k: _Rows,
        v: _Rows,
        bias: _Memory,
        bias_dtype: _Dtype,
        scale: float,
        dropout_p: float,
        seed: int,
        tf32: bool,
    ) -> None: ...

class EdgeAttentionInput:
    def __init__(
        self,
        gatv2: bool,
        heads: int,
        q: _Rows,
        k: _Rows,
        v: _Rows,
        edge: _Rows,
        att: _Memory,
        weight: _Memory,
        bias: _Memory,
        bias_dtype: _Dtype,
        scale: float,
        dropout_p: float,
        seed: int,
    ) -> None: ...

class AttentionCsrArgs:
    def __init__(
        self,
        structure: CsrStructure,
        kind: int,
        heads: int,
        dst: _Rows,
        src: _Rows,
        v: _Rows,
        att: _Memory,
        bias: _Memory,
        bias_dtype: _Dtype,
        edge: _Rows,
        weight: _Rows,
        scale: float,
        dropout_p: float,
        seed: int,
        out: _Memory,
        lse: _Memory,
    ) -> None: ...

def attention_csr(
    args: AttentionCsrArgs,
    threads: int,
) -> None: ...

class HeadScoresArgs:
    def __init__(
        self,
        *,
        heads: int,
        v: _Rows,
        first_vector: _Memory,
        second_vector: _Memory,
        first_scores: _Memory,
        second_scores: _Memory,
    ) -> None: ...

def head_scores(
    *,
    args: HeadScoresArgs,
    threads: int,
) -> None: ...

class AttentionLayer:
    def __init__(
        self,
        structure: CsrStructure,
        kind: int,
        dtype: _Dtype,
        heads: int,
        head_width: int,
        num_linears: int,
        scale: float,
    ) -> None: ...
    def forward(
        self,
        joint: _Memory,
        first_vector: _Memory,
        second_vector: _Memory,
        edge: _Rows,
        edge_weight: _Rows,
        edge_scores: _Memory,
        bias: _Memory,
        out: _Memory,
        state: _Memory,
        dropout_p: float,
        seed: int,
        threads: int,
    ) -> None: ...
    def backward(
        self,
        transposed: CsrStructure,
        joint: _Memory,
        first_vector: _Memory,
        second_vector: _Memory,
        edge: _Rows,
        edge_weight: _Rows,
        edge_scores: _Memory,
        state: _Memory,
        grad: _Rows,
        grad_joint: _Memory,
        grad_first: _Memory,
        grad_second: _Memory,
        work: _Memory,
        grad_edge: _Memory,
        grad_edge_weight: _Memory,
        grad_bias: _Memory,
        grad_map_bias: _Memory,
        dropout_p: float,
        seed: int,
        threads: int,
    ) -> None: ...

def stack_maps(
    weights: Sequence[_Memory],
    biases: Sequence[_Memory],
    weight_size: int,
    bias_size: int,
    weight: _Memory,
    bias: _Memory,
    dtype: _Dtype,
    to_dtype: _Dtype,
    device: int,
    queue: int,
) -> None: ...

class CudaAttentionLayer:
    def __init__(
        self,
        structure: CsrStructure | None,
        transposed: CsrStructure | None,
        blocks: BsbStructure | None,
        transposed_blocks: BsbStructure | None,
        num_slots: int,
        num_slots_t: int,
        att_rows: int,
        num_values: int,
        kind: int,
        dtype: _Dtype,
        num_nodes: int,
        heads: int,
        head_width: int,
        num_linears: int,
        scale: float,
        num_parts: int,
        backward: bool,
        device: int,
    ) -> None: ...
    def forward(
        self,
        joint: _Memory,
        first_vector: _Memory,
        second_vector: _Memory,
        bias: _Memory,
        bias_is_float: bool,
        out: _Memory,
        result: _Memory,
        state: _Memory,
        scratch: _Memory,
        dropout_p: float,
        seed: int,
        tf32: bool,
        queue: int,
    ) -> None: ...
    def backward(
        self,
        joint: _Memory,
        first_vector: _Memory,
        second_vector: _Memory,
        out: _Memory,
        state: _Memory,
        scratch: _Memory,
        grad: _Rows,
        grad_joint: _Memory,
        grad_first: _Memory,
        grad_second: _Memory,
        grad_bias: _Memory,
        grad_bias_dtype: _Dtype,
        grad_map_bias: _Memory,
        grad_map_bias_dtype: _Dtype,
        dropout_p: float,
        seed: int,
        tf32: bool,
        queue: int,
    ) -> None: ...
    @property
    def scratch(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def on_blocks(self) -> bool: ...

class EdgeMessageInput:
    def __init__(
        self,
        *,
        message: int,
        k: _Rows,
        q: _Rows,
        v: _Rows,
        edge: _Rows,
        edge_width: int,
        weight: _Memory,
        of_value: _Memory,
        bias: _Memory,
    ) -> None: ...

class EdgeMapGradients:
    def __init__(
        self,
        *,
        weight: _Memory,
        of_value: _Memory,
        bias: _Memory,
        features: _Memory,
        width: int,
        edge_width: int,
        dtype: _Dtype,
    ) -> None: ...

class MultiAggregateInput:
    def __init__(
        self,
        *,
        x_src: _Rows,
        group_width: int,
        x_dst: _Rows,
        edge: _Rows,
        weight: _Memory,
        slots: Sequence[int],
        num_slots: int,
        min_variance: float,
    ) -> None: ...

class NodeTable:
    def __init__(
        self,
        *,
        key: _Memory,
        value: _Memory,
        num_places: int,
        bits: int,
    ) -> None: ...

class NodeList:
    def __init__(
        self,
        *,
        node: _Memory,
        seed: _Memory,
        num_nodes: int,
        first_place: int,
        type: int,
    ) -> None: ...

class FirstNodes:
    def __init__(
        self,
        *,
        list: NodeList,
        count: int,
        count_out: _Memory,
    ) -> None: ...

class SampleStep:
    def __init__(
        self,
        structure: CsrStructure,
        weight: _Memory,
        weight_sum: _Memory,
        fanout: int,
        replace: bool,
        induced: bool,
        number: int,
        dst: NodeList,
        src: NodeList,
        first_row: _Memory,
        end_row: _Memory,
        nodes_before: _Memory,
        nodes_after: _Memory,
        edges_before: _Memory,
        edges_after: _Memory,
        place: _Memory,
        row: _Memory,
        edge_id: _Memory,
        *,
        most_rows: int,
        most_slots: int,
        slot_ptr: _Memory,
        slot_place: _Memory,
        slot_edge: _Memory,
        tile_counts: _Memory,
    ) -> None: ...

def sample_neighbors(
    *,
    table: NodeTable,
    sizes: _Memory,
    num_sizes: int,
    seed: int,
    first_nodes: Sequence[FirstNodes],
    steps: Sequence[SampleStep],
    device: int,
    queue: int,
) -> None: ...
def place_batch(
    *,
    nodes: tuple[Sequence[int], Sequence[int]],
    edges: tuple[Sequence[int], Sequence[int]],
    sources: tuple[Sequence[int], Sequence[int]],
    targets: tuple[Sequence[int], Sequence[int]],
    node_mask: _Memory,
    edge_mask: _Memory,
    node_ends: _Memory,
    edge_ends: _Memory,
    edge_index: _Memory,
    edge_index_out: _Memory,
    padding: _Memory,
    edge_index_is_64bit: bool,
    tensors: Sequence[tuple[Tensor, Tensor, int, int, bool, bool]],
    device: int,
    queue: int,
) -> None: ...
def plan_graphs(
    *,
    index: Sequence[int] | None,
    positions: _Memory,
    num_graphs: int,
    graph_at: _Memory,
    num_positions: int,
    pointers: Sequence[Tensor],
    table: _Memory,
) -> tuple[int, ...]: ...
def gather_graphs(
    *,
    fields: Sequence[tuple[_Memory, int, int, int, int, int, int, int]],
    totals: Sequence[int],
    table: _Memory,
    num_graphs: int,
    out: Sequence[Tensor],
    device: int,
    queue: int,
) -> None: ...
def hold_same(
    *,
    containers: Sequence[dict[Any, Any] | list[Any]],
    values: list[Any],
) -> bool: ...
def gather_rows_of_host(
    *,
    table: _Memory,
    index: _Memory,
    staging: _Memory,
    out: _Memory,
    num_rows: int,
    row_bytes: int,
    threads: int,
    piece: int,
    device: int,
    queue: int,
) -> None: ...
def cbsr_gather(
    *,
    dense: _Rows,
    ids: _Rows,
    out: _Memory,
    device: int,
    queue: int,
) -> None: ...
def cbsr_to_dense(
    *,
    width: int,
    values: _Rows,
    ids: _Memory,
    out: _Memory,
    device: int,
    queue: int,
) -> None: ...
def edge_messages(
    *,
    structure: CsrStructure,
    input: EdgeMessageInput,
    out: _Memory,
    side: _Memory,
    state: _Memory,
    positive: _Memory,
    sign_bytes: int,
    root: _Rows,
    eps: _Memory,
    scale: _Memory,
    partial: _Memory,
    partial_side: _Memory,
    device: int,
    queue: int,
) -> None: ...
def edge_messages_backward(
    structure: CsrStructure,
    transposed: CsrStructure,
    input: EdgeMessageInput,
    grad: _Rows,
    grad_side: _Rows,
    state: _Rows,
    grad_state: _Rows,
    positive: _Memory,
    sign_bytes: int,
    scale: _Memory,
    num_values: int,
    grad_q: _Memory,
    grad_v: _Memory,
    grad_edge: _Memory,
    grad_features: _Memory,
    grad_weight: _Memory,
    *,
    grad_of_value: _Memory,
    groups: int,
    maps: EdgeMapGradients,
    partial_q: _Memory,
    partial_v: _Memory,
    device: int,
    queue: int,
) -> None: ...
def edge_softmax(
    *,
    structure: CsrStructure,
    input: _Rows,
    grad: _Memory,
    out: _Memory,
    partial: _Memory,
    device: int,
    queue: int,
) -> None: ...
def emit_edges(
    *,
    table: NodeTable,
    place: _Memory,
    row: _Memory,
    edge_id: _Memory,
    num_edges: int,
    edge_index: _Memory,
    col: _Memory,
    edge_id_out: _Memory,
    device: int,
    queue: int,
) -> None: ...
def emit_rows(
    *,
    row: _Memory,
    num_edges: int,
    num_rows: int,
    rowptr: _Memory,
    inv_degree: _Memory,
    slices: _Memory,
    device: int,
    queue: int,
) -> None: ...
def expand_rows(
    *,
    rowptr: _Memory,
    num_rows: int,
    num_edges: int,
    row: _Memory,
    device: int,
    queue: int,
) -> None: ...
def lay_out_edge_maps(
    *,
    weight: _Rows,
    added: _Rows,
    of_value: _Rows,
    bias: _Memory,
    given_width: int,
    out: _Rows,
    edge_width: int,
    device: int,
    queue: int,
) -> None: ...
def link_rows(
    *,
    rowptr: _Memory,
    best: _Memory,
    num_rows: int,
    root: _Memory,
    counts: _Memory,
    device: int,
    queue: int,
) -> None: ...
def mask_rows(
    *,
    dense: _Rows,
    kept: _Memory,
    out: _Memory,
    device: int,
    queue: int,
) -> None: ...
def maxk(
    *,
    x: _Rows,
    k: int,
    values: _Memory = ...,
    ids: _Memory = ...,
    out: _Memory = ...,
    kept: _Memory = ...,
    device: int,
    queue: int,
) -> None: ...
def multi_aggregate(
    *,
    structure: CsrStructure,
    input: MultiAggregateInput,
    out: _Memory,
    mean: _Memory,
    ties: _Memory,
    partial: _Memory,
    device: int,
    queue: int,
) -> None: ...
def multi_aggregate_backward(
    structure: CsrStructure,
    transposed: CsrStructure,
    input: MultiAggregateInput,
    out: _Memory,
    mean: _Memory,
    ties: _Memory,
    grad: _Memory,
    base: _Memory,
    slope: _Memory,
    share: _Memory,
    *,
    marks: _Memory,
    grad_src: _Memory,
    grad_dst: _Memory,
    grad_edge: _Memory,
    grad_weight: _Memory,
    weight_parts: int,
    num_values: int,
    partial: _Memory,
    device: int,
    queue: int,
) -> None: ...
def reverse_entries(
    *,
    rowptr: _Memory,
    col: _Memory,
    edge_id: _Memory,
    num_rows: int,
    num_edges: int,
    id_out: _Memory,
    id_is_64bit: bool,
    device: int,
    queue: int,
) -> None: ...
def row_signatures(
    *,
    rowptr: _Memory,
    col: _Memory,
    num_rows: int,
    column_bits: int,
    num_bands: int,
    signature: _Memory,
    keys: _Memory,
    device: int,
    queue: int,
) -> None: ...
def sddmm_csr(
    *,
    structure: CsrStructure,
    heads: int,
    x_dst: _Rows,
    x_src: _Rows,
    scale_dst: _Memory,
    scale_src: _Memory,
    out: _Memory,
    out_dtype: _Dtype,
    row: _Memory,
    device: int,
    queue: int,
) -> None: ...
def similar_rows(
    *,
    signature: _Memory,
    order: _Memory,
    num_rows: int,
    num_bands: int,
    best: _Memory,
    device: int,
    queue: int,
) -> None: ...
def spmm_csr_transposed(
    *,
    structure: CsrStructure,
    x: _Rows,
    value: _Rows,
    scale_dst: _Memory,
    scale_src: _Memory,
    sum: _Memory,
    num_given: int,
    count: _Memory,
    out: _Memory,
    device: int,
    queue: int,
) -> None: ...
def spmm_extremum(
    *,
    structure: CsrStructure,
    x: _Rows,
    value: _Rows,
    heads: int,
    minimum: bool,
    adds: bool,
    out: _Memory,
    arg: _Memory,
    partial: _Memory,
    partial_arg: _Memory,
    device: int,
    queue: int,
) -> None: ...
def spmm_extremum_backward(
    *,
    transposed: CsrStructure,
    grad: _Rows,
    x: _Rows,
    value: _Rows,
    heads: int,
    arg: _Memory,
    source: _Memory,
    grad_x: _Memory,
    grad_value: _Memory,
    partial: _Memory,
    device: int,
    queue: int,
) -> None: ...
def ssd(
    structure: CsrStructure,
    width: int,
    *,
    values: _Rows,
    ids: _Memory,
    value: _Rows,
    scale_dst: _Memory,
    scale_src: _Memory,
    bias: _Memory,
    out: _Memory,
    partial: _Memory,
    packed: _Memory,
    longest_group: int,
    num_long: int,
    few_entries: bool,
    device: int,
    queue: int,
) -> None: ...
def ssd_backward(
    *,
    transposed: CsrStructure,
    grad: _Rows,
    value: _Rows,
    ids: Tensor,
    scale_dst: _Memory,
    scale_src: _Memory,
    out: _Memory,
    partial: _Memory,
    device: int,
    queue: int,
) -> None: ...
def ssd_value_grad(
    *,
    structure: CsrStructure,
    grad: _Rows,
    kept: _Memory,
    ids: Tensor,
    scale_dst: _Memory,
    scale_src: _Memory,
    out: _Memory,
    device: int,
    queue: int,
) -> None: ...
def attention_csr_backward(
    forward: AttentionCsrArgs,
    transposed: CsrStructure,
    grad: _Rows,
    grad_dst: _Memory,
    grad_src: _Memory,
    grad_v: _Memory,
    grad_att: _Memory,
    work: _Memory,
    grad_edge: _Memory,
    grad_weight: _Memory,
    threads: int,
) -> None: ...
def head_scores_backward(
    *,
    forward: HeadScoresArgs,
    grad_v: _Memory,
    adds: bool,
    grad_first: _Memory,
    grad_second: _Memory,
    threads: int,
) -> None: ...
def additive_attention(
    structure: CsrStructure,
    input: AdditiveAttentionInput,
    out: _Memory,
    lse: _Memory,
    partial: _Memory,
    partial_state: _Memory,
    device: int,
    queue: int,
) -> None: ...
def additive_attention_backward(
    structure: CsrStructure,
    transposed: CsrStructure,
    input: AdditiveAttentionInput,
    grad: _Rows,
    lse: _Memory,
    grad_score_dst: _Memory,
    grad_score_src: _Memory,
    grad_v: _Memory,
    grad_bias: _Memory,
    row_state: _Memory,
    partial_row: _Memory,
    partial_v: _Memory,
    partial_score: _Memory,
    device: int,
    queue: int,
) -> None: ...
def aggregate_linear(
    *,
    structure: CsrStructure,
    sums_given: bool,
    scale_dst: _Memory,
    x: _Rows,
    weight: _Rows,
    root_weight: _Memory,
    bias: _Memory,
    sums: _Memory,
    out: _Memory,
    num_terms: int,
    device: int,
    queue: int,
) -> None: ...
def attention_bsb(
    structure: BsbStructure,
    input: AttentionBsbInput,
    out: _Memory,
    lse: _Memory,
    partial: _Memory,
    partial_state: _Memory,
    device: int,
    queue: int,
) -> None: ...
def attention_bsb_backward(
    structure: BsbStructure,
    transposed: BsbStructure,
    input: AttentionBsbInput,
    out: _Memory,
    lse: _Memory,
    grad: _Rows,
    grad_q: _Memory,
    grad_k: _Memory,
    grad_v: _Memory,
    grad_bias: _Memory,
    row_state: _Memory,
    partial_q: _Memory,
    partial_k: _Memory,
    partial_v: _Memory,
    device: int,
    queue: int,
) -> None: ...
def batch_norm(
    x: _Rows,
    mask: _Memory,
    *,
    count: _Memory,
    partial: _Memory,
    num_parts: int,
    weight: _Memory,
    bias: _Memory,
    running_mean: _Memory,
    running_var: _Memory,
    momentum: float,
    eps: float,
    out: _Memory,
    mean: _Memory,
    inverse: _Memory,
    device: int,
    queue: int,
) -> None: ...
def batch_norm_backward(
    *,
    x: _Rows,
    mask: _Memory,
    count: _Memory,
    partial: _Memory,
    num_parts: int,
    grad: _Memory,
    weight: _Memory,
    mean: _Memory,
    inverse: _Memory,
    out: _Memory,
    grad_weight: _Memory,
    grad_bias: _Memory,
    device: int,
    queue: int,
) -> None: ...
def edge_attention(
    structure: CsrStructure,
    input: EdgeAttentionInput,
    out: _Memory,
    out_edge: _Memory,
    lse: _Memory,
    partial: _Memory,
    partial_edge: _Memory,
    partial_state: _Memory,
    device: int,
    queue: int,
) -> None: ...
def edge_attention_backward(
    structure: CsrStructure,
    transposed: CsrStructure,
    input: EdgeAttentionInput,
    out: _Rows,
    grad: _Rows,
    lse: _Memory,
    work: _Memory,
    positive: _Memory,
    sign_bytes: int,
    num_values: int,
    grad_q: _Memory,
    grad_k: _Memory,
    grad_v: _Memory,
    grad_q_edge: _Memory,
    grad_features: _Memory,
    grad_att: _Memory,
    grad_weight: _Memory,
    att_rows: int,
    weight_rows: int,
    partial_q: _Memory,
    partial_q_edge: _Memory,
    partial_k: _Memory,
    partial_v: _Memory,
    sum_k: _Memory,
    sum_v: _Memory,
    device: int,
    queue: int,
) -> None: ...
def gather_rows(
    *,
    table: _Memory,
    index: _Memory,
    out: _Memory,
    num_rows: int,
    row_bytes: int,
    out_row_bytes: int,
    parts: _Memory = ...,
    num_parts: int = ...,
    kept: _Memory = ...,
    place: _Memory = ...,
    device: int,
    queue: int,
) -> None: ...
def gatv2_attention(
    structure: CsrStructure,
    input: Gatv2AttentionInput,
    out: _Memory,
    lse: _Memory,
    partial: _Memory,
    partial_state: _Memory,
    device: int,
    queue: int,
) -> None: ...
def gatv2_attention_backward(
    structure: CsrStructure,
    transposed: CsrStructure,
    input: Gatv2AttentionInput,
    out: _Rows,
    grad: _Rows,
    lse: _Memory,
    grad_x_dst: _Memory,
    grad_x_src: _Memory,
    grad_att: _Memory,
    att_rows: int,
    row_state: _Memory,
    partial_dst: _Memory,
    partial_src: _Memory,
    device: int,
    queue: int,
) -> None: ...
def head_outer(
    structure: CsrStructure,
    x: _Rows,
    y: _Rows,
    x_edge: _Memory,
    y_edge: _Memory,
    heads: int,
    edge_width: int,
    partial: _Memory,
    num_parts: int,
    device: int,
    queue: int,
) -> None: ...
def hybrid_rows(
    *,
    rowptr: _Memory,
    num_rows: int,
    multiple: int,
    longest: int,
    counts: _Memory,
    most_long: int,
    slices: _Memory,
    split_row: _Memory,
    split_ptr: _Memory,
    device: int,
    queue: int,
) -> None: ...
def row_split_count(
    *,
    rowptr: _Memory,
    num_rows: int,
    longest: int,
    counts: _Memory,
    totals: _Memory = ...,
    slices: _Memory = ...,
    split_row: _Memory = ...,
    split_ptr: _Memory = ...,
    device: int,
    queue: int,
) -> None: ...
def row_split_fill(
    *,
    rowptr: _Memory,
    num_rows: int,
    longest: int,
    counts: _Memory,
    totals: _Memory = ...,
    slices: _Memory = ...,
    split_row: _Memory = ...,
    split_ptr: _Memory = ...,
    device: int,
    queue: int,
) -> None: ...
def sddmm_bsb(
    structure: BsbStructure,
    rowptr: _Memory,
    slot_window: _Memory,
    slot_entry: _Memory,
    *,
    quad_vector: _Memory,
    edge_id: _Memory,
    edge_id_is_64bit: bool,
    heads: int,
    x_dst: _Rows,
    x_src: _Rows,
    scale_dst: _Memory,
    scale_src: _Memory,
    out: _Memory,
    out_dtype: _Dtype,
    tf32: bool,
    device: int,
    queue: int,
) -> None: ...
def spmm_bsb(
    structure: BsbStructure,
    x: _Rows,
    value: _Rows,
    heads: int,
    quad_vector: _Memory,
    vector_scale: _Memory,
    *,
    scale_dst: _Memory,
    scale_src: _Memory,
    loop: _Memory,
    bias: _Memory,
    relu: bool,
    out: _Memory,
    partial: _Memory,
    features_per_lane: int,
    blocks_per_step: int,
    tf32: bool,
    device: int,
    queue: int,
) -> None: ...
def ssd_backward_windows(
    *,
    structure: RowPanelsStructure,
    grad: _Rows,
    value: _Rows,
    ids: Tensor,
    scale_dst: _Memory,
    scale_src: _Memory,
    sum: _Memory,
    out: _Memory,
    device: int,
    queue: int,
) -> None: ...
def ssd_slots(
    *,
    structure: CsrStructure,
    width: int,
    values: _Rows,
    ids: _Memory,
    value: _Rows,
    scale_src: _Memory,
    sum: _Memory,
    slots: int,
    update_mode: bool,
    coupled: bool,
    device: int,
    queue: int,
) -> None: ...
def sum_of_rows(
    *,
    rows: _Rows,
    partial: _Memory,
    num_parts: int,
    out: _Memory,
    out_dtype: _Dtype,
    device: int,
    queue: int,
) -> None: ...
def weight_gradient(
    *,
    grad: _Rows,
    x: _Rows,
    x_column_stride: int,
    num_parts: int,
    part_width: int,
    out: _Rows,
    out_column_stride: int,
    out_dtype: _Dtype,
    device: int,
    queue: int,
) -> None: ...
def num_segment_sort_bytes(
    *,
    num_rows: int,
    num_segments: int,
    device: int,
) -> int: ...
def num_row_split_counts(
    *,
    num_rows: int,
) -> int: ...
def num_hybrid_rows_counts(
    *,
    num_rows: int,
) -> int: ...

class SegmentSort:
    def __init__(
        self,
        *,
        index: _Memory,
        index_is_64bit: bool,
        num_rows: int,
        num_segments: int,
        longest: int,
        rowptr: _Memory,
        order: _Memory,
        slices: _Memory,
        split_row: _Memory,
        split_ptr: _Memory,
        facts: _Memory,
        scratch: _Memory,
        scratch_bytes: int,
        device: int,
        queue: int,
    ) -> None: ...
    def facts(
        self,
    ) -> tuple[int, int, bool, int]: ...

FEW_EDGES: int
HASHES: int
KEY_BITS: int
NUM_SEGMENT_FACTS: int
