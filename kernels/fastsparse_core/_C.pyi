# Interface of the compiled extension (kernels/binding.cpp). Addresses are those of tensors that the caller
# keeps alive; device -1 is the CPU and `queue` its number of threads, else `queue` is a CUDA stream.

from collections.abc import Sequence

class CsrStructure:
    def __init__(
        self,
        rowptr: int,
        col: int,
        edge_id: int,
        edge_id_is_64bit: bool,
        num_rows: int,
        num_cols: int,
        num_edges: int,
        slices: int,
        num_slices: int,
        split_row: int,
        split_ptr: int,
        num_split_rows: int,
    ) -> None: ...

class BsbStructure:  # only in builds with the CUDA half
    def __init__(
        self,
        quad: int,
        window_ptr: int,
        window_row: int,
        quad_entry: int,
        value_id: int,
        value_id_is_64bit: bool,
        num_rows: int,
        slices: int,
        num_slices: int,
        split_row: int,
        split_ptr: int,
        num_split_rows: int,
        runs: int,
        num_runs: int,
    ) -> None: ...

class AttentionBsbInput:  # this and what takes it: only in builds with the CUDA half
    def __init__(
        self,
        dtype: int,
        heads: int,
        head_width: int,
        value_width: int,
        q: int,
        q_stride: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        bias: int,
        bias_dtype: int,
        scale: float,
        dropout_p: float,
        seed: int,
        tf32: bool,
    ) -> None: ...

class AdditiveAttentionInput:  # this and what takes it: only in builds with the CUDA half
    def __init__(
        self,
        dtype: int,
        heads: int,
        head_width: int,
        score_dst: int,
        score_src: int,
        v: int,
        v_stride: int,
        bias: int,
        bias_dtype: int,
        negative_slope: float,
        dropout_p: float,
        seed: int,
    ) -> None: ...

class Gatv2AttentionInput:  # this and what takes it: only in builds with the CUDA half
    def __init__(
        self,
        dtype: int,
        heads: int,
        head_width: int,
        x_dst: int,
        x_dst_stride: int,
        x_src: int,
        x_src_stride: int,
        att: int,
        negative_slope: float,
        dropout_p: float,
        seed: int,
    ) -> None: ...

class CompressArgs:
    def __init__(
        self,
        major: int,
        minor: int,
        index_is_64bit: bool,
        num_edges: int,
        num_major: int,
        num_minor: int,
        sort_minor: bool,
        major_ptr: int,
        minor_out: int,
        order: int,
        order_is_64bit: bool,
    ) -> None: ...

def compress_scratch_bytes(args: CompressArgs, device: int) -> int: ...
def expand_rows(rowptr: int, num_rows: int, num_edges: int, row: int, device: int, queue: int) -> None: ...
def reverse_entries(
    rowptr: int,
    col: int,
    edge_id: int,
    num_rows: int,
    num_edges: int,
    id_out: int,
    id_is_64bit: bool,
    device: int,
    queue: int,
) -> None: ...
def compress(args: CompressArgs, scratch: int, scratch_bytes: int, device: int, queue: int) -> None: ...
def inspect(
    row: int,
    col: int,
    edge_id: int,
    index_is_64bit: bool,
    edge_id_is_64bit: bool,
    num_edges: int,
    num_rows: int,
    square: bool,
    rowptr: int,
    col_out: int,
    inv_degree: int,
    slices: int,
    scratch: int,
    device: int,
    queue: int,
) -> tuple[int, ...]: ...
def sort_room(num_edges: int, num_rows: int, longest: int) -> tuple[int, int, int]: ...
def sort_edges(
    row: int,
    col: int,
    index_is_64bit: bool,
    num_edges: int,
    num_rows: int,
    num_cols: int,
    longest: int,
    rowptr: int,
    col_out: int,
    order: int,
    inv_degree: int,
    inv_sqrt_degree: int,
    room: int,
    device: int,
    queue: int,
) -> tuple[int, ...]: ...
def transpose_scratch_bytes(
    num_rows: int, num_cols: int, num_edges: int, keeps_order: bool, device: int
) -> int: ...
def transpose(
    rowptr: int,
    col: int,
    num_rows: int,
    num_cols: int,
    num_edges: int,
    colptr: int,
    row_out: int,
    order: int,
    scratch: int,
    scratch_bytes: int,
    device: int,
    queue: int,
) -> None: ...

HASHES: int
FEW_EDGES: int
KEY_BITS: int

def row_signatures(
    rowptr: int,
    col: int,
    num_rows: int,
    column_bits: int,
    num_bands: int,
    signature: int,
    keys: int,
    device: int,
    queue: int,
) -> None: ...
def similar_rows(
    signature: int, order: int, num_rows: int, num_bands: int, best: int, device: int, queue: int
) -> None: ...
def link_rows(
    rowptr: int, best: int, num_rows: int, root: int, counts: int, device: int, queue: int
) -> None: ...
def num_row_split_counts(num_rows: int) -> int: ...  # only in builds with the CUDA half
def row_split_count(
    rowptr: int, num_rows: int, longest: int, counts: int, totals: int, device: int, queue: int
) -> None: ...  # only in builds with the CUDA half
def num_segment_sort_bytes(
    num_rows: int, num_segments: int, device: int
) -> int: ...  # only in builds with the CUDA half

class SegmentSort:  # only in builds with the CUDA half
    def __init__(
        self,
        index: int,
        index_is_64bit: bool,
        num_rows: int,
        num_segments: int,
        longest: int,
        rowptr: int,
        order: int,
        slices: int,
        split_row: int,
        split_ptr: int,
        facts: int,
        scratch: int,
        scratch_bytes: int,
        device: int,
        queue: int,
    ) -> None: ...
    def facts(self) -> tuple[int, int, bool, int]: ...

NUM_SEGMENT_FACTS: int  # only in builds with the CUDA half

def row_split_fill(
    rowptr: int,
    num_rows: int,
    longest: int,
    counts: int,
    slices: int,
    split_row: int,
    split_ptr: int,
    device: int,
    queue: int,
) -> None: ...  # only in builds with the CUDA half

class SpmmKernel:
    csr: SpmmKernel
    tca: SpmmKernel
    resident: SpmmKernel
    resident_tca: SpmmKernel
    hr: SpmmKernel

class SpmmPlan:
    def __init__(
        self,
        kernel: SpmmKernel,
        structure: CsrStructure,
        dtype: int,
        width: int,
        value_dtype: int,
        heads: int,
        tile: int,
        num_long: int,
        device: int,
    ) -> None: ...
    def run(
        self,
        x: int,
        x_stride: int,
        value: int,
        scale_dst: int,
        scale_src: int,
        loop: int,
        bias: int,
        relu: bool,
        out: int,
        partial: int,
        queue: int,
    ) -> None: ...

def spmm_csr_transposed(
    structure: CsrStructure,
    dtype: int,
    width: int,
    x: int,
    x_stride: int,
    value: int,
    value_dtype: int,
    scale_dst: int,
    scale_src: int,
    sum: int,
    num_given: int,
    count: int,
    out: int,
    device: int,
    queue: int,
) -> None: ...
def aggregate_linear(  # only in builds with the CUDA half
    structure: CsrStructure,
    sums_given: bool,
    scale_dst: int,
    width: int,
    x: int,
    x_stride: int,
    out_width: int,
    weight: int,
    root_weight: int,
    bias: int,
    sums: int,
    out: int,
    num_terms: int,
    device: int,
    queue: int,
) -> None: ...
def aggregate_linear_backward(  # only in builds with the CUDA half
    num_rows: int,
    grad: int,
    out_width: int,
    sums: int,
    x: int,
    x_stride: int,
    width: int,
    num_slabs: int,
    weights: int,
    bias: int,
    grad_weight: int,
    grad_root: int,
    grad_bias: int,
    num_terms: int,
    device: int,
    queue: int,
) -> None: ...
def sum_of_rows(  # only in builds with the CUDA half
    rows: int,
    num_rows: int,
    width: int,
    row_stride: int,
    dtype: int,
    partial: int,
    num_parts: int,
    out: int,
    out_dtype: int,
    device: int,
    queue: int,
) -> None: ...
def batch_norm(  # only in builds with the CUDA half
    rows: tuple[int, int, int, int],
    num_rows: int,
    width: int,
    dtype: int,
    num_parts: int,
    weight: int,
    bias: int,
    running_mean: int,
    running_var: int,
    momentum: float,
    eps: float,
    out: int,
    mean: int,
    inverse: int,
    device: int,
    queue: int,
) -> None: ...
def batch_norm_backward(  # only in builds with the CUDA half
    rows: tuple[int, int, int, int],
    num_rows: int,
    width: int,
    dtype: int,
    num_parts: int,
    grad: int,
    weight: int,
    mean: int,
    inverse: int,
    out: int,
    grad_weight: int,
    grad_bias: int,
    device: int,
    queue: int,
) -> None: ...
def head_outer(  # only in builds with the CUDA half
    x: int,
    x_stride: int,
    y: int,
    y_stride: int,
    x_edge: int,
    y_edge: int,
    num_rows: int,
    heads: int,
    head_width: int,
    edge_width: int,
    partial: int,
    num_parts: int,
    dtype: int,
    device: int,
    queue: int,
) -> None: ...
def num_hybrid_rows_counts(num_rows: int) -> int: ...  # only in builds with the CUDA half
def hybrid_rows(  # only in builds with the CUDA half
    rowptr: int,
    num_rows: int,
    multiple: int,
    longest: int,
    counts: int,
    most_long: int,
    slices: int,
    split_row: int,
    split_ptr: int,
    device: int,
    queue: int,
) -> None: ...
def spmm_bsb(  # only in builds with the CUDA half
    structure: BsbStructure,
    dtype: int,
    width: int,
    x: int,
    x_stride: int,
    value: int,
    value_dtype: int,
    heads: int,
    quad_vector: int,
    vector_scale: int,
    scale_dst: int,
    scale_src: int,
    loop: int,
    bias: int,
    relu: bool,
    out: int,
    partial: int,
    features_per_lane: int,
    blocks_per_step: int,
    tf32: bool,
    device: int,
    queue: int,
) -> None: ...
def spmm_extremum(
    structure: CsrStructure,
    dtype: int,
    width: int,
    x: int,
    x_stride: int,
    value: int,
    value_dtype: int,
    heads: int,
    minimum: bool,
    adds: bool,
    out: int,
    arg: int,
    partial: int,
    partial_arg: int,
    device: int,
    queue: int,
) -> None: ...
def spmm_extremum_backward(
    transposed: CsrStructure,
    dtype: int,
    num_rows: int,
    width: int,
    grad: int,
    grad_stride: int,
    x: int,
    x_stride: int,
    value: int,
    value_dtype: int,
    heads: int,
    arg: int,
    source: int,
    grad_x: int,
    grad_value: int,
    partial: int,
    device: int,
    queue: int,
) -> None: ...
def sddmm_csr(
    structure: CsrStructure,
    dtype: int,
    heads: int,
    head_width: int,
    x_dst: int,
    x_dst_stride: int,
    x_src: int,
    x_src_stride: int,
    scale_dst: int,
    scale_src: int,
    out: int,
    out_dtype: int,
    row: int,
    device: int,
    queue: int,
) -> None: ...
def attention_bsb(
    structure: BsbStructure,
    input: AttentionBsbInput,
    out: int,
    lse: int,
    partial: int,
    partial_state: int,
    device: int,
    queue: int,
) -> None: ...
def attention_bsb_backward(
    structure: BsbStructure,
    transposed: BsbStructure,
    input: AttentionBsbInput,
    out: int,
    lse: int,
    grad: int,
    grad_stride: int,
    grad_q: int,
    grad_k: int,
    grad_v: int,
    grad_bias: int,
    row_state: int,
    partial_q: int,
    partial_k: int,
    partial_v: int,
    device: int,
    queue: int,
) -> None: ...
def additive_attention(
    structure: CsrStructure,
    input: AdditiveAttentionInput,
    out: int,
    lse: int,
    partial: int,
    partial_state: int,
    device: int,
    queue: int,
) -> None: ...
def additive_attention_backward(
    structure: CsrStructure,
    transposed: CsrStructure,
    input: AdditiveAttentionInput,
    grad: int,
    grad_stride: int,
    lse: int,
    grad_score_dst: int,
    grad_score_src: int,
    grad_v: int,
    grad_bias: int,
    row_state: int,
    partial_row: int,
    partial_v: int,
    partial_score: int,
    device: int,
    queue: int,
) -> None: ...
def gatv2_attention(
    structure: CsrStructure,
    input: Gatv2AttentionInput,
    out: int,
    lse: int,
    partial: int,
    partial_state: int,
    device: int,
    queue: int,
) -> None: ...
def gatv2_attention_backward(
    structure: CsrStructure,
    transposed: CsrStructure,
    input: Gatv2AttentionInput,
    out: int,
    out_stride: int,
    grad: int,
    grad_stride: int,
    lse: int,
    grad_x_dst: int,
    grad_x_src: int,
    grad_att: int,
    att_rows: int,
    row_state: int,
    partial_dst: int,
    partial_src: int,
    device: int,
    queue: int,
) -> None: ...
def prefer_huge_pages(out: int, bytes: int, collapse: bool, /) -> None: ...
def segment_reduce(
    structure: CsrStructure,
    dtype: int,
    reduction: int,
    width: int,
    x: int,
    x_stride: int,
    out: int,
    extra: int,
    partial: int,
    facts: int,
    device: int,
    queue: int,
    /,
) -> None: ...
def edge_softmax(
    structure: CsrStructure,
    dtype: int,
    heads: int,
    input: int,
    grad: int,
    out: int,
    partial: int,
    device: int,
    queue: int,
) -> None: ...

class AttentionCsrArgs:  # CPU only
    def __init__(
        self,
        structure: CsrStructure,
        kind: int,
        dtype: int,
        heads: int,
        head_width: int,
        value_width: int,
        dst: int,
        dst_stride: int,
        src: int,
        src_stride: int,
        v: int,
        v_stride: int,
        att: int,
        bias: int,
        bias_dtype: int,
        scale: float,
        dropout_p: float,
        seed: int,
        out: int,
        lse: int,
    ) -> None: ...

def attention_csr(args: AttentionCsrArgs, threads: int) -> None: ...
def attention_csr_backward(
    forward: AttentionCsrArgs,
    transposed: CsrStructure,
    grad: int,
    grad_stride: int,
    grad_dst: int,
    grad_src: int,
    grad_v: int,
    grad_att: int,
    grad_bias: int,
    threads: int,
) -> None: ...

class HeadScoresArgs:
    def __init__(
        self,
        dtype: int,
        num_rows: int,
        heads: int,
        head_width: int,
        v: int,
        v_stride: int,
        first_vector: int,
        second_vector: int,
        first_scores: int,
        second_scores: int,
    ) -> None: ...

def head_scores(args: HeadScoresArgs, threads: int) -> None: ...
def head_scores_backward(
    forward: HeadScoresArgs, grad_v: int, adds: bool, grad_first: int, grad_second: int, threads: int
) -> None: ...

class AttentionLayer:
    def __init__(
        self,
        structure: CsrStructure,
        kind: int,
        dtype: int,
        heads: int,
        head_width: int,
        maps: int,
        scale: float,
    ) -> None: ...
    def forward(
        self,
        joint: int,
        first_vector: int,
        second_vector: int,
        bias: int,
        out: int,
        state: int,
        dropout_p: float,
        seed: int,
        threads: int,
    ) -> None: ...
    def backward(
        self,
        transposed: CsrStructure,
        joint: int,
        first_vector: int,
        second_vector: int,
        state: int,
        grad: int,
        grad_stride: int,
        grad_joint: int,
        grad_first: int,
        grad_second: int,
        grad_bias: int,
        grad_map_bias: int,
        dropout_p: float,
        seed: int,
        threads: int,
    ) -> None: ...

def stack_maps(
    weights: list[int],
    biases: list[int],
    weight_size: int,
    bias_size: int,
    weight: int,
    bias: int,
    dtype: int,
    to_dtype: int,
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
        dtype: int,
        num_nodes: int,
        heads: int,
        head_width: int,
        maps: int,
        scale: float,
        num_parts: int,
        backward: bool,
        device: int,
    ) -> None: ...
    @property
    def scratch(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def on_blocks(self) -> bool: ...
    def forward(
        self,
        joint: int,
        first_vector: int,
        second_vector: int,
        bias: int,
        bias_is_float: bool,
        out: int,
        result: int,
        state: int,
        scratch: int,
        dropout_p: float,
        seed: int,
        tf32: bool,
        queue: int,
    ) -> None: ...
    def backward(
        self,
        joint: int,
        first_vector: int,
        second_vector: int,
        out: int,
        state: int,
        scratch: int,
        grad: int,
        grad_stride: int,
        grad_joint: int,
        grad_first: int,
        grad_second: int,
        grad_bias: int,
        grad_bias_dtype: int,
        grad_map_bias: int,
        grad_map_bias_dtype: int,
        dropout_p: float,
        seed: int,
        tf32: bool,
        queue: int,
    ) -> None: ...

class MultiAggregateInput:
    def __init__(
        self,
        dtype: int,
        width: int,
        group_width: int,
        x_src: int,
        x_src_stride: int,
        x_dst: int,
        x_dst_stride: int,
        edge: int,
        weight: int,
        edge_width: int,
        slots: Sequence[int],
        num_slots: int,
        min_variance: float,
    ) -> None: ...

def multi_aggregate(
    structure: CsrStructure,
    input: MultiAggregateInput,
    out: int,
    mean: int,
    ties: int,
    partial: int,
    device: int,
    queue: int,
) -> None: ...
def multi_aggregate_backward(
    structure: CsrStructure,
    transposed: CsrStructure,
    input: MultiAggregateInput,
    out: int,
    mean: int,
    ties: int,
    grad: int,
    base: int,
    slope: int,
    share: int,
    marks: int,
    grad_src: int,
    grad_dst: int,
    grad_edge: int,
    grad_weight: int,
    weight_parts: int,
    num_values: int,
    partial: int,
    device: int,
    queue: int,
) -> None: ...

class EdgeAttentionInput:
    def __init__(
        self,
        gatv2: bool,
        dtype: int,
        heads: int,
        head_width: int,
        edge_width: int,
        q: int,
        q_stride: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        q_edge: int,
        edge: int,
        att: int,
        weight: int,
        bias: int,
        bias_dtype: int,
        scale: float,
        dropout_p: float,
        seed: int,
    ) -> None: ...

def edge_attention(
    structure: CsrStructure,
    input: EdgeAttentionInput,
    out: int,
    out_edge: int,
    lse: int,
    partial: int,
    partial_edge: int,
    partial_state: int,
    device: int,
    queue: int,
) -> None: ...
def edge_attention_backward(
    structure: CsrStructure,
    transposed: CsrStructure,
    input: EdgeAttentionInput,
    out: int,
    out_stride: int,
    grad: int,
    grad_stride: int,
    grad_edge: int,
    lse: int,
    work: int,
    positive: int,
    sign_bytes: int,
    num_values: int,
    grad_q: int,
    grad_k: int,
    grad_v: int,
    grad_q_edge: int,
    grad_features: int,
    grad_att: int,
    grad_weight: int,
    att_rows: int,
    weight_rows: int,
    partial_q: int,
    partial_q_edge: int,
    partial_k: int,
    partial_v: int,
    sum_k: int,
    sum_v: int,
    device: int,
    queue: int,
) -> None: ...

class EdgeMessageInput:
    def __init__(
        self,
        message: int,
        dtype: int,
        width: int,
        edge_width: int,
        k: int,
        k_stride: int,
        q: int,
        q_stride: int,
        v: int,
        v_stride: int,
        edge: int,
        edge_stride: int,
        weight: int,
        of_value: int,
        bias: int,
    ) -> None: ...

def lay_out_edge_maps(
    weight: int,
    weight_stride: int,
    added: int,
    added_stride: int,
    of_value: int,
    of_value_stride: int,
    bias: int,
    given_width: int,
    given_edge_width: int,
    dtype: int,
    out: int,
    width: int,
    edge_width: int,
    device: int,
    queue: int,
) -> None: ...

class EdgeMapGradients:
    def __init__(
        self, weight: int, of_value: int, bias: int, features: int, width: int, edge_width: int, dtype: int
    ) -> None: ...

def edge_messages(
    structure: CsrStructure,
    input: EdgeMessageInput,
    out: int,
    side: int,
    state: int,
    positive: int,
    sign_bytes: int,
    root: int,
    root_stride: int,
    eps: int,
    scale: int,
    partial: int,
    partial_side: int,
    device: int,
    queue: int,
) -> None: ...
def edge_messages_backward(
    structure: CsrStructure,
    transposed: CsrStructure,
    input: EdgeMessageInput,
    grad: int,
    grad_stride: int,
    grad_side: int,
    grad_side_stride: int,
    state: int,
    state_stride: int,
    grad_state: int,
    grad_state_stride: int,
    positive: int,
    sign_bytes: int,
    scale: int,
    num_values: int,
    grad_q: int,
    grad_v: int,
    grad_edge: int,
    grad_features: int,
    grad_weight: int,
    grad_of_value: int,
    groups: int,
    maps: EdgeMapGradients,
    partial_q: int,
    partial_v: int,
    device: int,
    queue: int,
) -> None: ...
def sddmm_bsb(  # only in builds with the CUDA half
    structure: BsbStructure,
    rowptr: int,
    slot_window: int,
    slot_entry: int,
    quad_vector: int,
    edge_id: int,
    edge_id_is_64bit: bool,
    dtype: int,
    heads: int,
    head_width: int,
    x_dst: int,
    x_dst_stride: int,
    x_src: int,
    x_src_stride: int,
    scale_dst: int,
    scale_src: int,
    out: int,
    out_dtype: int,
    tf32: bool,
    device: int,
    queue: int,
) -> None: ...
def maxk(
    dtype: int,
    num_rows: int,
    width: int,
    k: int,
    x: int,
    x_stride: int,
    values: int,
    ids: int,
    device: int,
    queue: int,
) -> None: ...
def maxk_dense(
    dtype: int,
    num_rows: int,
    width: int,
    k: int,
    x: int,
    x_stride: int,
    out: int,
    kept: int,
    device: int,
    queue: int,
) -> None: ...
def mask_rows(
    dtype: int,
    num_rows: int,
    width: int,
    dense: int,
    dense_stride: int,
    kept: int,
    out: int,
    device: int,
    queue: int,
) -> None: ...
def cbsr_to_dense(
    dtype: int,
    num_rows: int,
    width: int,
    k: int,
    values: int,
    ids: int,
    out: int,
    device: int,
    queue: int,
) -> None: ...
def cbsr_gather(
    dtype: int,
    num_rows: int,
    width: int,
    k: int,
    dense: int,
    dense_stride: int,
    ids: int,
    out: int,
    device: int,
    queue: int,
) -> None: ...
def ssd(
    structure: CsrStructure,
    dtype: int,
    width: int,
    k: int,
    values: int,
    ids: int,
    value: int,
    value_dtype: int,
    scale_dst: int,
    scale_src: int,
    bias: int,
    out: int,
    partial: int,
    packed: int,
    longest_group: int,
    num_long: int,
    few_entries: bool,
    device: int,
    queue: int,
) -> None: ...
def ssd_slots(  # only in builds with the CUDA half
    structure: CsrStructure,
    dtype: int,
    width: int,
    k: int,
    values: int,
    ids: int,
    value: int,
    value_dtype: int,
    scale_src: int,
    sum: int,
    slots: int,
    update_mode: bool,
    coupled: bool,
    device: int,
    queue: int,
) -> None: ...
def ssd_backward(
    transposed: CsrStructure,
    dtype: int,
    grad: int,
    grad_stride: int,
    value: int,
    value_dtype: int,
    ids: int,
    ids_are_16bit: bool,
    k: int,
    scale_dst: int,
    scale_src: int,
    out: int,
    partial: int,
    device: int,
    queue: int,
) -> None: ...
def ssd_value_grad(
    structure: CsrStructure,
    dtype: int,
    grad: int,
    grad_stride: int,
    width: int,
    kept: int,
    ids: int,
    ids_are_16bit: bool,
    k: int,
    scale_dst: int,
    scale_src: int,
    out: int,
    device: int,
    queue: int,
) -> None: ...

class RowPanelsStructure:  # this and what takes it: only in builds with the CUDA half
    def __init__(
        self,
        entry: int,
        value_id: int,
        value_id_is_64bit: bool,
        other_source: int,
        num_other: int,
        slices: int,
        num_slices: int,
        height: int,
        strip: int,
        num_rows: int,
        num_cols: int,
    ) -> None: ...

def ssd_backward_windows(
    structure: RowPanelsStructure,
    dtype: int,
    grad: int,
    grad_stride: int,
    width: int,
    value: int,
    value_dtype: int,
    ids: int,
    ids_are_16bit: bool,
    k: int,
    scale_dst: int,
    scale_src: int,
    sum: int,
    out: int,
    device: int,
    queue: int,
) -> None: ...
def build_info() -> dict[str, bool | str]: ...

class NodeList:
    def __init__(self, node: int, seed: int, num_nodes: int, first_place: int, type: int) -> None: ...

class FirstNodes:
    def __init__(self, list: NodeList, count: int, count_out: int) -> None: ...

class NodeTable:
    def __init__(self, key: int, value: int, num_places: int, bits: int) -> None: ...

class SampleStep:
    def __init__(
        self,
        structure: CsrStructure,
        weight: int,
        weight_sum: int,
        fanout: int,
        replace: bool,
        induced: bool,
        number: int,
        dst: NodeList,
        src: NodeList,
        sizes: tuple[int, int, int, int, int, int],
        edges: tuple[int, int, int],
        most_rows: int,
        most_slots: int,
        scratch: tuple[int, int, int, int],
    ) -> None: ...

def sample_neighbors(
    table: NodeTable,
    sizes: int,
    num_sizes: int,
    seed: int,
    first_nodes: Sequence[FirstNodes],
    steps: Sequence[SampleStep],
    device: int,
    queue: int,
) -> None: ...
def emit_edges(
    table: NodeTable,
    place: int,
    row: int,
    edge_id: int,
    num_edges: int,
    edge_index: int,
    col: int,
    edge_id_out: int,
    device: int,
    queue: int,
) -> None: ...
def emit_rows(
    row: int,
    num_edges: int,
    num_rows: int,
    rowptr: int,
    inv_degree: int,
    slices: int,
    device: int,
    queue: int,
) -> None: ...
def place_batch(
    nodes: tuple[list[int], list[int]],
    edges: tuple[list[int], list[int]],
    sources: tuple[list[int], list[int]],
    targets: tuple[list[int], list[int]],
    ends: tuple[int, int, int, bool],
    marks: tuple[int, int, int, int],
    tensors: list[tuple[int, int, int, int, bool, bool]],
    device: int,
    queue: int,
) -> None: ...
def gather_rows_of_host(
    table: int,
    index: int,
    staging: int,
    out: int,
    num_rows: int,
    row_bytes: int,
    threads: int,
    piece: int,
    device: int,
    queue: int,
) -> None: ...
def gather_rows(
    table: int,
    index: int,
    out: int,
    num_rows: int,
    row_bytes: int,
    out_row_bytes: int,
    device: int,
    queue: int,
) -> None: ...
