# Interface of the compiled extension (kernels/binding.cpp). Addresses are those of tensors that the caller
# keeps alive; device -1 is the CPU and `queue` its number of threads, else `queue` is a CUDA stream.

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
        block: int,
        window_ptr: int,
        window_row: int,
        block_entry: int,
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
def compress(args: CompressArgs, scratch: int, scratch_bytes: int, device: int, queue: int) -> None: ...
def spmm_csr(
    structure: CsrStructure,
    dtype: int,
    width: int,
    x: int,
    x_stride: int,
    value: int,
    value_dtype: int,
    heads: int,
    scale_dst: int,
    scale_src: int,
    bias: int,
    relu: bool,
    out: int,
    partial: int,
    tile: int,
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
    vector_scale: int,
    scale_dst: int,
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
    out: int,
    arg: int,
    partial: int,
    partial_arg: int,
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
    device: int,
    queue: int,
) -> None: ...
def build_info() -> dict[str, bool | str]: ...
