// Plain views of the caller's memory. They own no memory and do not depend on torch, CUDA or Python. The same
// structs are passed to the CPU kernels and, by value, to the CUDA kernels.
#pragma once

#include <cstdint>

#include "fastsparse/arguments.h"
#include "fastsparse/philox.h"

namespace fastsparse {

enum class Dtype : int { kFloat64 = 0, kFloat32 = 1, kFloat16 = 2, kBFloat16 = 3 };

// A sparse structure in compressed sparse rows; rows are destinations, columns are sources.
struct CsrView {
  const std::int64_t* rowptr;  // (num_rows + 1)
  const std::int32_t* col;     // (num_edges)
  const void* edge_id;  // (num_edges) position of each entry in the caller's edge order; null: identity
  bool edge_id_is_64bit;
  std::int64_t num_rows;
  std::int64_t num_cols;
  std::int64_t num_edges;
};

// Position of an entry in the caller's edge order.
FASTSPARSE_HOST_DEVICE std::int64_t edge_position(const CsrView& a, std::int64_t entry) {
  if (a.edge_id == nullptr) return entry;
  return a.edge_id_is_64bit ? static_cast<const std::int64_t*>(a.edge_id)[entry]
                            : static_cast<const std::int32_t*>(a.edge_id)[entry];
}

// A slice: consecutive entries of one row. The length of slices is limited. Otherwise, one group of lanes
// would process a long row while others are idle.
struct alignas(16) RowSlice {
  std::int64_t begin;   // first entry
  std::int32_t length;  // number of entries
  std::int32_t
      target;  // >= 0: the only slice of this row; < 0: ~target is its slot among the partial results
};

// All rows cut into slices, with long slices first. Rows with several slices ("split rows") get one partial
// result per slice. Split row s owns the slots split_ptr[s] .. split_ptr[s + 1] - 1, which are summed in this
// order, without atomics.
struct RowSplitView {
  const RowSlice* slices;
  std::int64_t num_slices;
  const std::int32_t* split_row;  // (num_split_rows)
  const std::int64_t* split_ptr;  // (num_split_rows + 1)
  std::int64_t num_split_rows;
};

// A structure as a Python object, made once per Adjacency to save host time in calls.
struct CsrStructure {
  CsrView a;
  RowSplitView split;
};
FASTSPARSE_ARGUMENTS(CsrStructure,
                     IN(a, rowptr, col, edge_id, edge_id_is_64bit, num_rows, num_cols, num_edges),
                     OPTIONAL_IN(split, slices, num_slices, split_row, split_ptr, num_split_rows));

// Consecutive quads of one window, or all quads of several consecutive windows (BsbView).
struct alignas(16) WindowRun {
  std::int32_t begin;        // first quad
  std::int32_t length;       // number of quads
  std::int32_t target;       // >= 0: the first window, which is completely in this run; < 0: ~target is the
                             // slot of a partial result of one window
  std::int32_t num_windows;  // 1 if target < 0
};

// Binary sparse blocks: windows of 8 rows. A window is a list of non-zero 8x1 vectors, four per quad; its
// last quad is padded with empty vectors. Kernels process a block at a time, which is up to four quads of a
// window.
struct BsbView {
  const std::uint32_t* quad;  // (num_quads, 4) words: 4 columns of 3 bytes, then 4 masks of a byte, whose
                              // bit r says that row r of the window has an entry; 0: padding
  const std::int32_t* window_ptr;  // (num_windows + 1): first quad of every window
  const std::int32_t* window_row;  // (num_windows, 8) rows of every window, -1: none; null: consecutive rows
  const std::int64_t* quad_entry;  // (num_quads): number of entries before the quad; null without values
  const void* value_id;  // (num_edges), in the order of quad, vector and row: position of every entry in the
                         // caller's edge order; null without values
  bool value_id_is_64bit;
  std::int64_t num_rows;
  RowSplitView split;  // slices of windows, in quads; only the last slice of a window may end within a block
  const WindowRun* runs;  // the same slices, but short windows are joined to runs
  std::int64_t num_runs;
};
using BsbStructure = BsbView;  // the name of this struct in Python
FASTSPARSE_ARGUMENTS(BsbStructure,
                     FIELDS(quad, window_ptr, window_row, quad_entry, value_id, value_id_is_64bit, num_rows),
                     IN(split, slices, num_slices, split_row, split_ptr, num_split_rows),
                     FIELDS(runs, num_runs));

// Values of the edges, contiguous: (num_values, heads) in the caller's edge order unless a comment says
// otherwise. Null data: every value is 1.
struct EdgeValueView {
  const void* data;
  Dtype dtype;  // the features' dtype or their accumulation type
  std::int64_t heads;
};

// A row-major matrix with unit column stride.
struct DenseView {
  const void* data;
  std::int64_t stride;  // distance between rows, in elements
};

// out_i = scale_dst_i * (sum_j value_ij scale_src_j x_j + loop scale_src_i x_i) + bias. Scales are in the
// accumulation type, null: 1.
struct SpmmArgs {
  CsrView a;
  RowSplitView split;
  EdgeValueView value;
  DenseView x;            // (num_cols, width)
  const void* scale_dst;  // (num_rows)
  const void* scale_src;  // (num_cols)
  const void* loop;  // one number in the accumulation type: value of an additional entry (i, i) in every row;
                     // null: none
  const void* bias;  // (width) in dtype, null: 0
  bool relu;         // out = max(out, 0)
  void* out;         // (num_rows, width) contiguous
  void* partial;     // (num_slots, width) in the accumulation type; CUDA only
  std::int64_t width;
  std::int64_t
      tile;  // approximate minimum of features per pass over the structure (policy.csr_tile); CUDA only
  Dtype dtype;
};
struct SpmmCall;  // arguments that differ between the calls of a plan
FASTSPARSE_ARGUMENTS_AS(SpmmCall, SpmmArgs, FIELDS(x), AS(value, value.data),
                        FIELDS(scale_dst, scale_src, loop, bias, relu, out, partial));

// sum_j += scale_dst_i value_ij scale_src_j x_i over the entries (i, j): the transposed product, computed
// from the untransposed structure. Not for float64.
struct SpmmTransposedArgs {
  CsrView a;
  RowSplitView split;      // CUDA only
  EdgeValueView value;     // one per edge
  DenseView x;             // (num_rows, width)
  const float* scale_dst;  // (num_rows), null: 1
  const float* scale_src;  // (num_cols), null: 1
  float* sum;              // (num_cols, width) contiguous
  std::int64_t num_given;  // number of rows of `sum` that are initialized; the other rows begin as 0
  std::int32_t* count;     // (num_cols) scratch: entries per column; null: not counted; CUDA only
  void* out;  // with counts and 16-bit x: the result, (num_cols, width) contiguous in the dtype of x, and
              // `sum` is scratch; otherwise null
  std::int64_t width;
  Dtype dtype;  // dtype of x
};
FASTSPARSE_ARGUMENTS(SpmmTransposedArgs, AS(structure, a), ALSO(split), FIELDS(x), WIDTH(width), DTYPE(dtype),
                     FIELDS(value, scale_dst, scale_src, sum, num_given, count, out));

// out_i = W sum_i + W_r x_i + bias with sum_i = scale_dst_i * sum_j x_j, in float32 on Hopper's tensor cores.
// The first num_rows sources are the destinations. Widths must be multiples of 4, and rows of x and all
// pointers must be aligned to 16 bytes. CUDA only.
struct AggregateLinearArgs {
  CsrView a;
  bool sums_given;         // whether `sums` is an input; then only the number of rows of `a` is used
  const float* scale_dst;  // (num_rows), null: 1; not used if sums are given
  DenseView x;             // (num_cols, width)
  const float* weight;     // (out_width, width) contiguous
  const float* root_weight;
  const float* bias;  // (out_width), null: 0
  float* sums;        // (num_rows, width) contiguous: input, or output (null: not stored; out_width <= 128)
  float* out;         // (num_rows, out_width) contiguous
  std::int64_t width;
  std::int64_t out_width;
  int num_terms;  // bfloat16 terms per float32 number: 3, or 2 for the upper 16 of its 24 bits
};
FASTSPARSE_ARGUMENTS(AggregateLinearArgs, AS(structure, a), FIELDS(sums_given, scale_dst, x), WIDTH(width),
                     MATRIX(weight), NUM_ROWS(out_width), FIELDS(root_weight, bias, sums, out, num_terms));

// Gradients of the parameters of aggregate_linear, one partial result per slab of rows. Alignments are the
// same as in AggregateLinearArgs.
struct AggregateLinearBackwardArgs {
  const float* grad;  // (num_rows, out_width) contiguous
  const float* sums;  // (num_rows, width) contiguous
  DenseView x;        // (num_rows, width)
  float* weights;     // out (num_slabs, 2, out_width, width): gradients of W, then of W_r
  float* bias;        // out (num_slabs, out_width): gradients of the bias; null: not computed
  std::int64_t num_rows;
  std::int64_t num_slabs;
  std::int64_t width;
  std::int64_t out_width;
  int num_terms;  // the same as in AggregateLinearArgs
};

// The product of SpmmArgs on tensor cores, for float16, bfloat16 and float32.
struct SpmmBsbArgs {
  BsbView a;
  EdgeValueView value;
  const std::int64_t* quad_vector;  // (num_quads): number of vectors with entries before the quad; then
                                    // values are (num_vectors, 8, heads), and values without an entry are not
                                    // read. Null: values are in the caller's edge order
  const float* vector_scale;  // (num_quads, 4): scale_src of every vector's column; null: 1; only for 16-bit
                              // features without values
  DenseView x;
  const void* scale_dst;
  const void* scale_src;  // (num_cols); used only for `loop`
  const void* loop;       // one number in the accumulation type; null: none; see SpmmArgs
  const void* bias;
  bool relu;  // out = max(out, 0)
  void* out;
  void* partial;  // (num_slots, 8, width) float32
  std::int64_t width;
  int features_per_lane;  // an eighth of a tile; the width, x.stride and alignments must allow it
  int blocks_per_step;    // 1 or 2
  bool tf32;              // float32: one TF32 term instead of two
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(SpmmBsbArgs, AS(structure, a), FIELDS(x), WIDTH(width), DTYPE(dtype), FIELDS(value),
                     AS(heads, value.heads),
                     FIELDS(quad_vector, vector_scale, scale_dst, scale_src, loop, bias, relu, out, partial,
                            features_per_lane, blocks_per_step, tf32));

// Sums of the columns of a matrix, out_c = sum_r rows_r,c. CUDA only.
struct SumOfRowsArgs {
  const void* rows;  // (num_rows, width)
  std::int64_t num_rows;
  std::int64_t width;
  std::int64_t row_stride;
  double* partial;  // scratch (num_parts, width): sums over parts of the rows
  std::int64_t num_parts;
  void* out;  // (width)
  Dtype dtype;
  Dtype out_dtype;
};
FASTSPARSE_ARGUMENTS(SumOfRowsArgs, MATRIX(rows), NUM_ROWS(num_rows), WIDTH(width), STRIDE(row_stride),
                     DTYPE(dtype), FIELDS(partial, num_parts, out, out_dtype));

// Recomputes the elements of the gradient of a linear map's weight that are not finite, without the rows
// whose gradient is 0. The columns of the gradient are divided into parts, and each part has its own rows of
// 0. CUDA only.
struct WeightGradientArgs {
  const void* grad;  // (num_rows, num_parts * part_width), or these columns of a wider matrix
  std::int64_t grad_stride;
  const void* x;  // (num_rows, x_width)
  std::int64_t x_stride;
  std::int64_t x_column_stride;
  std::int64_t num_rows;
  std::int64_t x_width;
  std::int64_t num_parts;
  std::int64_t part_width;  // columns of the gradient per part
  void* out;  // (num_parts * part_width, x_width), with strides; in and out: the product grad^T x
  std::int64_t out_row_stride;
  std::int64_t out_column_stride;
  Dtype dtype;
  Dtype out_dtype;
};
FASTSPARSE_ARGUMENTS(WeightGradientArgs, MATRIX(grad), STRIDE(grad_stride), MATRIX(x), STRIDE(x_stride),
                     NUM_ROWS(num_rows), WIDTH(x_width), DTYPE(dtype),
                     FIELDS(x_column_stride, num_parts, part_width), MATRIX(out), STRIDE(out_row_stride),
                     FIELDS(out_column_stride, out_dtype));

// Sums over rows of the outer products of every head's features with the features of its edges. CUDA only.
struct HeadOuterArgs {
  CsrView a;      // rows without entries are omitted, even if x and y are NaN there
  const void* x;  // (num_rows, heads * head_width); rows of head_width elements are multiples of 16 bytes,
                  // and edge_width is a multiple of 4
  std::int64_t x_stride;
  const void* y;  // (num_rows, heads * head_width)
  std::int64_t y_stride;
  const void* x_edge;  // (num_rows, heads, edge_width), multiplied by x
  const void* y_edge;  // (num_rows, heads, edge_width), multiplied by y
  std::int64_t num_rows;
  std::int64_t heads;
  std::int64_t head_width;
  std::int64_t edge_width;
  float* partial;  // (num_parts, heads * head_width, edge_width): sums over parts of the rows
  std::int64_t num_parts;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(HeadOuterArgs, AS(structure, a), MATRIX(x), STRIDE(x_stride), NUM_ROWS(num_rows),
                     WIDTH(head_width), DTYPE(dtype), MATRIX(y), STRIDE(y_stride),
                     FIELDS(x_edge, y_edge, heads), PER(head_width, heads),
                     FIELDS(edge_width, partial, num_parts));

// Numbers of items in the work list of spmm_hr.
struct HybridRowsCounts {
  std::int32_t long_items;
  std::int32_t split_rows;  // rows with several items
  std::int32_t slots;       // items of split rows, which each have a slot
};

// Cuts rows into long items, whose lengths are multiples of `multiple` entries, and short items. The host
// allocates by upper bounds, so that it need not wait until the GPU has counted the items. CUDA only.
struct HybridRowsArgs {
  const std::int64_t* rowptr;  // (num_rows + 1); num_rows > 0
  std::int64_t num_rows;
  std::int32_t multiple;
  std::int32_t longest;  // largest number of entries in an item
  HybridRowsCounts*
      counts;              // (num_hybrid_rows_counts(num_rows)) scratch; out: the totals, in the last element
  std::int64_t most_long;  // upper bound of the number of long items
  RowSlice* slices;  // out (most_long + num_rows): the long items, then one short item per row, whose length
                     // is -1 if the row has none
  std::int32_t* split_row;  // out: row of every split row (RowSplitView)
  std::int64_t* split_ptr;  // out: slots of every split row (RowSplitView)
};
FASTSPARSE_ARGUMENTS(HybridRowsArgs, FIELDS(rowptr, num_rows, multiple, longest, counts, most_long, slices,
                                            split_row, split_ptr));

// out_i = max_j or min_j of value_ij x_j, or of x_j + value_ij. arg: position of the chosen edge in the
// caller's order, -1 for rows without edges.
struct SpmmExtremumArgs {
  CsrView a;
  RowSplitView split;
  EdgeValueView value;
  DenseView x;
  void* out;                  // (num_rows, width)
  std::int32_t* arg;          // (num_rows, width)
  void* partial;              // (num_slots, width) in the accumulation type; CUDA only
  std::int32_t* partial_arg;  // (num_slots, width)
  std::int64_t width;
  bool minimum;
  bool adds;  // whether values are added to features instead of multiplied by them
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(SpmmExtremumArgs, AS(structure, a), ALSO(split), FIELDS(x), WIDTH(width), DTYPE(dtype),
                     FIELDS(value), AS(heads, value.heads),
                     FIELDS(minimum, adds, out, arg, partial, partial_arg));

// out_e,h = scale_dst_i scale_src_j <x_dst_i,h , x_src_j,h> for entry e = (i, j), written to the edge's
// position in the caller's order.
struct SddmmArgs {
  CsrView a;
  RowSplitView split;
  DenseView x_dst;  // (num_rows, heads * head_width)
  DenseView x_src;  // (num_cols, heads * head_width)
  const void* scale_dst;
  const void* scale_src;
  void* out;  // (num_values, heads)
  Dtype out_dtype;
  std::int64_t heads;
  std::int64_t head_width;
  Dtype dtype;
  const std::int32_t* row;  // (num_edges) row of every entry: work is divided by entries; null: work is
                            // divided by rows; CUDA only
};
FASTSPARSE_ARGUMENTS(SddmmArgs, AS(structure, a), ALSO(split), FIELDS(heads, x_dst), WIDTH(head_width),
                     PER(head_width, heads), DTYPE(dtype),
                     FIELDS(x_src, scale_dst, scale_src, out, out_dtype, row));

// The product of SddmmArgs on tensor cores, for float16, bfloat16 and float32. Rows and heads of the features
// must start at multiples of 16 bytes. The value ids of `a` are not used: kernels count mask bits from the
// first entry of a row to find an entry's position in the CSR structure.
struct SddmmBsbArgs {
  BsbView a;
  const std::int64_t* rowptr;       // (num_rows + 1): row pointers of the CSR structure
  const std::int32_t* slot_window;  // (num_slots): window of every slice, for windows with several slices
  const std::int64_t* slot_entry;   // (num_slots, 8): CSR position of every row's first entry in the slice
  const std::int64_t* quad_vector;  // (num_quads): number of vectors with entries before the quad; then
                                    // results are (num_vectors, 8, heads), all of them written. Null: results
                                    // are written to the edges' positions
  const void* edge_id;              // as in CsrView; the entries of every row are sorted by column
  bool edge_id_is_64bit;
  DenseView x_dst;
  DenseView x_src;
  const void* scale_dst;
  const void* scale_src;
  void* out;
  Dtype out_dtype;  // dtype or float32
  std::int64_t heads;
  std::int64_t head_width;
  bool tf32;  // float32: one TF32 term instead of two
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(SddmmBsbArgs, AS(structure, a),
                     FIELDS(rowptr, slot_window, slot_entry, quad_vector, edge_id, edge_id_is_64bit, heads,
                            x_dst),
                     WIDTH(head_width), PER(head_width, heads), DTYPE(dtype),
                     FIELDS(x_src, scale_dst, scale_src, out, out_dtype, tf32));

// GAT: out_i,h = sum_j dropout(p_ij,h) v_j,h with p the softmax over row i of
// leaky_relu(score_dst_i,h + score_src_j,h + bias_ij,h). CUDA only.
struct AdditiveAttentionInput {
  const float* score_dst;  // (num_rows, heads)
  const float* score_src;  // (num_cols, heads)
  DenseView v;             // (num_cols, heads * head_width)
  EdgeValueView bias;      // null data: 0
  float negative_slope;
  Dropout dropout;
  std::int64_t heads;
  std::int64_t head_width;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(AdditiveAttentionInput, FIELDS(heads), ALSO(bias.heads), FIELDS(score_dst, score_src, v),
                     WIDTH(head_width), PER(head_width, heads), DTYPE(dtype), AS(bias, bias.data),
                     AS(bias_dtype, bias.dtype), FIELDS(negative_slope), DROPOUT(dropout));

struct AdditiveAttentionArgs {
  CsrView a;
  RowSplitView split;
  AdditiveAttentionInput input;
  void* out;             // (num_rows, heads * head_width)
  float* lse;            // (num_rows, heads)
  float* partial;        // (num_slots, heads * head_width)
  float* partial_state;  // (num_slots, heads, 2)
};
FASTSPARSE_ARGUMENTS(AdditiveAttentionArgs, AS(structure, a), ALSO(split),
                     FIELDS(input, out, lse, partial, partial_state));

struct AdditiveAttentionBackwardArgs {
  CsrView a;
  RowSplitView split;
  CsrView a_t;  // the transposed structure
  RowSplitView split_t;
  AdditiveAttentionInput input;
  DenseView grad;  // (num_rows, heads * head_width)
  const float* lse;
  float* grad_score_dst;  // (num_rows, heads)
  float* grad_score_src;  // (num_cols, heads)
  void* grad_v;           // (num_cols, heads * head_width)
  void* grad_bias;        // (num_values, heads) in bias.dtype; null: not computed
  float* row_state;       // scratch (num_rows, heads, 4): RowState of additive_attention_backward.cu
  float* partial_row;     // (num_slots, heads, 4): RowSums of additive_attention_backward.cu
  float* partial_v;       // (num_slots of the transposed structure, heads * head_width)
  float* partial_score;   // (num_slots of the transposed structure, heads)
};
FASTSPARSE_ARGUMENTS(AdditiveAttentionBackwardArgs, AS(structure, a), ALSO(split), AS(transposed, a_t),
                     ALSO(split_t),
                     FIELDS(input, grad, lse, grad_score_dst, grad_score_src, grad_v, grad_bias, row_state,
                            partial_row, partial_v, partial_score));

// GATv2: the same as GAT, with the score <att_h, leaky_relu(x_dst_i,h + x_src_j,h)> and v = x_src.
// negative_slope must be from 0 to 1.
struct Gatv2AttentionInput {
  DenseView x_dst;   // (num_rows, heads * head_width)
  DenseView x_src;   // (num_cols, heads * head_width)
  const float* att;  // (heads * head_width)
  float negative_slope;
  Dropout dropout;
  std::int64_t heads;
  std::int64_t head_width;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(Gatv2AttentionInput, FIELDS(heads, x_dst, x_src), WIDTH(head_width),
                     PER(head_width, heads), DTYPE(dtype), FIELDS(att, negative_slope), DROPOUT(dropout));

struct Gatv2AttentionArgs {
  CsrView a;
  RowSplitView split;
  Gatv2AttentionInput input;
  void* out;             // (num_rows, heads * head_width)
  float* lse;            // (num_rows, heads)
  float* partial;        // (num_slots, heads * head_width)
  float* partial_state;  // (num_slots, heads, 2)
};
FASTSPARSE_ARGUMENTS(Gatv2AttentionArgs, AS(structure, a), ALSO(split),
                     FIELDS(input, out, lse, partial, partial_state));

struct Gatv2AttentionBackwardArgs {
  CsrView a;
  RowSplitView split;
  CsrView a_t;
  RowSplitView split_t;
  Gatv2AttentionInput input;
  DenseView out;   // result of the forward pass
  DenseView grad;  // (num_rows, heads * head_width)
  const float* lse;
  void* grad_x_dst;       // (num_rows, heads * head_width)
  void* grad_x_src;       // (num_cols, heads * head_width)
  float* grad_att;        // (att_rows, heads * head_width); the gradient is the sum of these rows
  std::int64_t att_rows;  // number of lane groups of the row pass
  float* row_state;       // (num_rows, heads, 2): lse and delta
  float* partial_dst;     // (num_slots, heads * head_width)
  float* partial_src;     // (num_slots of the transposed structure, heads * head_width)
};
FASTSPARSE_ARGUMENTS(Gatv2AttentionBackwardArgs, AS(structure, a), ALSO(split), AS(transposed, a_t),
                     ALSO(split_t),
                     FIELDS(input, out, grad, lse, grad_x_dst, grad_x_src, grad_att, att_rows, row_state,
                            partial_dst, partial_src));

// Dot-product attention on tensor cores: out_i,h = sum_j dropout(p_ij,h) v_j,h with p the softmax over row i
// of scale <q_i,h , k_j,h> + bias_ij,h. dtype float16, bfloat16 or float32. Heads have at most 256 features.
// Widths of heads, row strides and addresses are multiples of 16 bytes. CUDA only.
struct AttentionBsbInput {
  DenseView q;         // (num_rows, heads * head_width)
  DenseView k;         // (num_cols, heads * head_width)
  DenseView v;         // (num_cols, heads * value_width)
  EdgeValueView bias;  // null data: 0
  float scale;
  Dropout dropout;
  std::int64_t heads;
  std::int64_t head_width;
  std::int64_t value_width;
  bool tf32;  // float32: one TF32 term instead of two
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(AttentionBsbInput, FIELDS(heads), ALSO(bias.heads), FIELDS(q), WIDTH(head_width),
                     PER(head_width, heads), FIELDS(k, v), WIDTH(value_width), PER(value_width, heads),
                     DTYPE(dtype), AS(bias, bias.data), AS(bias_dtype, bias.dtype), FIELDS(scale),
                     DROPOUT(dropout), FIELDS(tf32));

struct AttentionBsbArgs {
  BsbView a;
  AttentionBsbInput input;
  void* out;             // (num_rows, heads * value_width)
  double* lse;           // (num_rows, heads): log2 of the sum of exp(score); -inf in rows without entries
  float* partial;        // (num_slots, 8, heads * value_width), before the division by the sum
  float* partial_state;  // (num_slots, 8, heads, 2): maximum of the scores times log2(e), and the sum
};
FASTSPARSE_ARGUMENTS(AttentionBsbArgs, AS(structure, a), FIELDS(input, out, lse, partial, partial_state));

struct AttentionBsbBackwardArgs {
  BsbView a;
  BsbView a_t;  // the transposed structure
  AttentionBsbInput input;
  const void* out;  // (num_rows, heads * value_width) of the forward pass
  const double* lse;
  DenseView grad;    // (num_rows, heads * value_width)
  void* grad_q;      // (num_rows, heads * head_width)
  void* grad_k;      // (num_cols, heads * head_width)
  void* grad_v;      // (num_cols, heads * value_width)
  void* grad_bias;   // (num_values, heads) in bias.dtype; null: not computed
  float* row_state;  // scratch (num_rows, heads, 2), or for float32 (num_rows, heads, 4): log-sum-exp and
                     // delta (RowState of attention_bsb_backward.cu)
  float* partial_q;  // (num_slots, 8, heads * head_width)
  float* partial_k;  // (num_slots of the transposed structure, 8, heads * head_width)
  float* partial_v;  // (num_slots of the transposed structure, 8, heads * value_width)
};
FASTSPARSE_ARGUMENTS(AttentionBsbBackwardArgs, AS(structure, a), AS(transposed, a_t),
                     FIELDS(input, out, lse, grad, grad_q, grad_k, grad_v, grad_bias, row_state, partial_q,
                            partial_k, partial_v));

// Attention on the CPU: out_i,h = sum_j dropout(p_ij,h) v_j,h with p the softmax over row i of one of these
// scores:
enum class AttentionScore : int {
  kDotProduct = 0,  // scale <dst_i,h , src_j,h> + bias_ij,h
  kAdditive = 1,    // leaky_relu(dst_i,h + src_j,h + bias_ij,h)
  kGatv2 = 2,       // <att_h , leaky_relu(dst_i,h + src_j,h)>
};
// If edges have features a_ij, W_h a_ij is added to src_j,h and, for dot products, to v_j,h. For additive
// attention, it is added to v_j,h only.

struct AttentionCsrArgs {
  CsrView a;
  AttentionScore kind;
  DenseView dst;       // (num_rows, heads * head_width); additive: (num_rows, heads) in the accumulation type
  DenseView src;       // (num_cols, heads * head_width); additive: (num_cols, heads) in the accumulation type
  DenseView v;         // (num_cols, heads * value_width)
  const void* att;     // (heads, head_width) in the accumulation type; GATv2 only
  EdgeValueView bias;  // null data: 0
  DenseView edge;      // (num_values, edge_width) in the caller's edge order
  DenseView weight;    // W, (heads * value_width, edge_width)
  double scale;        // dot products: factor of the scores; otherwise: slope of the leaky ReLU
  Dropout dropout;
  double keep_scale;  // 1 / (1 - dropout probability)
  std::int64_t heads;
  std::int64_t head_width;
  std::int64_t value_width;
  std::int64_t edge_width;  // 0: edges have no features
  Dtype dtype;
  void* out;  // (num_rows, heads * value_width)
  void* lse;  // (num_rows, heads) in the accumulation type: log-sum-exp of the scores, -inf in rows without
              // entries
};
FASTSPARSE_ARGUMENTS(AttentionCsrArgs, AS(structure, a), FIELDS(kind, heads), ALSO(bias.heads), FIELDS(dst),
                     WIDTH(head_width), PER(head_width, heads), FIELDS(src, v), WIDTH(value_width),
                     PER(value_width, heads), DTYPE(dtype), FIELDS(att), AS(bias, bias.data),
                     AS(bias_dtype, bias.dtype), FIELDS(edge), WIDTH(edge_width), FIELDS(weight, scale),
                     DROPOUT(dropout), KEEP_SCALE(keep_scale), FIELDS(out, lse));

// Gradients are contiguous and have the dtype of the tensor that they belong to; results of the forward pass
// are inputs.
struct AttentionCsrBackwardArgs {
  AttentionCsrArgs forward;
  CsrView a_t;     // the transposed structure
  DenseView grad;  // (num_rows, heads * value_width)
  void* grad_dst;
  void* grad_src;  // GATv2: includes the gradient of v
  void* grad_v;    // null for GATv2
  void* grad_att;  // null except for GATv2
  // (num_values, heads, 2) in the accumulation type: dropout(p_ij), and the gradient ds_ij of the bias; null
  // without bias and edge features. If some values have no entry, `work` and grad_edge must be zero before.
  void* work;
  void* grad_edge;    // (num_values, edge_width); null: not computed
  void* grad_weight;  // (heads * value_width, edge_width); null: not computed
};
FASTSPARSE_ARGUMENTS(AttentionCsrBackwardArgs, FIELDS(forward), AS(transposed, a_t),
                     FIELDS(grad, grad_dst, grad_src, grad_v, grad_att, work, grad_edge, grad_weight));

// Attention on CUDA with edge features a_ij, in the caller's edge order. w is the softmax of s over the row,
// after dropout.
//   Dot products: s_ij,h = scale <q_i,h , k_j,h + W_h a_ij> + bias_ij,h, out_edge_i,h = sum_j w a_ij and
//   out_i,h = sum_j w v_j,h + W_h out_edge_i,h.
//   GATv2: s_ij,h = <att_h , leaky_relu(q_i,h + k_j,h + W_h a_ij)>, out_i,h = sum_j w v_j,h with v = k.
// Rows of head_width elements are multiples of 16 bytes, and edge_width is a multiple of 4.
struct EdgeAttentionInput {
  bool gatv2;
  DenseView q;       // (num_rows, heads * head_width)
  DenseView k;       // (num_cols, heads * head_width)
  DenseView v;       // (num_cols, heads * head_width)
  const void* edge;  // (num_values, edge_width) in dtype
  const void* att;   // (heads * head_width) in the accumulation type; GATv2 only
  // W transposed. GATv2: (edge_width, heads * head_width) in the accumulation type. Dot products:
  // (edge_width, chunks, heads, lanes, 16 bytes) in dtype (LaneWeights of edge_attention.cuh).
  const void* weight;
  EdgeValueView bias;  // null data: 0; dot products only
  double scale;        // dot products: factor of the scores; otherwise: slope of the leaky ReLU
  Dropout dropout;
  std::int64_t heads;
  std::int64_t head_width;
  std::int64_t edge_width;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(EdgeAttentionInput, FIELDS(gatv2, heads), ALSO(bias.heads), FIELDS(q, k),
                     WIDTH(head_width), PER(head_width, heads), DTYPE(dtype), FIELDS(v), MATRIX(edge),
                     WIDTH(edge_width), FIELDS(att, weight), AS(bias, bias.data), AS(bias_dtype, bias.dtype),
                     FIELDS(scale), DROPOUT(dropout));

struct EdgeAttentionArgs {
  CsrView a;
  RowSplitView split;
  EdgeAttentionInput input;
  void* out;       // (num_rows, heads * head_width)
  void* out_edge;  // (num_rows, heads, edge_width); dot products only
  void* lse;       // (num_rows, heads) in the accumulation type: log-sum-exp, -inf in rows without entries
  float* partial;  // (num_slots, heads * head_width)
  float* partial_edge;   // (num_slots, heads, edge_width)
  float* partial_state;  // (num_slots, heads, 2)
};
FASTSPARSE_ARGUMENTS(EdgeAttentionArgs, AS(structure, a), ALSO(split),
                     FIELDS(input, out, out_edge, lse, partial, partial_edge, partial_state));

// The row pass stores two numbers per edge and head, work = {w, dS}: the weight and the gradient of the
// score. So the column pass is a weighted sum. For GATv2, the row pass also stores the signs of the leaky
// ReLU's argument, one bit per feature.
struct EdgeAttentionBackwardArgs {
  CsrView a;
  RowSplitView split;
  CsrView a_t;
  RowSplitView split_t;
  EdgeAttentionInput input;
  DenseView out;   // result of the layer; for dot products, including the terms of edge features
  DenseView grad;  // (num_rows, heads * head_width)
  const void* lse;
  void* work;              // (num_values, heads, 2) in the accumulation type
  std::uint8_t* positive;  // (num_values, heads, sign_bytes); GATv2 only
  std::int64_t sign_bytes;
  std::int64_t num_values;
  void* grad_q;
  void* grad_k;
  void* grad_v;         // null for GATv2, where it is part of the gradient of k
  void* grad_q_edge;    // dot products only
  void* grad_features;  // (num_values, edge_width) in dtype if one group of lanes has all heads; otherwise
                        // (groups, num_values, edge_width) in the accumulation type, and the gradient is the
                        // sum over groups of heads; null: not computed
  void* grad_att;       // (att_rows, heads * head_width) in the accumulation type; the gradient is the sum of
                        // these rows
  void* grad_weight;  // (weight_rows, edge_width, heads * head_width) in the accumulation type; the gradient
                      // is the sum over weight_rows; null: not computed
  std::int64_t att_rows;
  std::int64_t weight_rows;
  float* partial_q;
  float* partial_q_edge;
  float* partial_k;
  float* partial_v;
  // Only for dot products without a_t: zeros, (num_cols, heads * head_width) in the accumulation type, to
  // which the gradients of k and v are added entry by entry. Null: a_t is used.
  void* sum_k;
  void* sum_v;
};
FASTSPARSE_ARGUMENTS(EdgeAttentionBackwardArgs, AS(structure, a), ALSO(split), AS(transposed, a_t),
                     ALSO(split_t),
                     FIELDS(input, out, grad, lse, work, positive, sign_bytes, num_values, grad_q, grad_k,
                            grad_v, grad_q_edge, grad_features, grad_att, grad_weight, att_rows, weight_rows,
                            partial_q, partial_q_edge, partial_k, partial_v, sum_k, sum_v));

// Several aggregations at once of the messages m_ij = x_i + x_j + e_ij, each rounded to the features' dtype.
// The aggregations are numbered in this order: sum, mean, min, max, var, std.
constexpr int kNumAggregations = 6;

struct MultiAggregateInput {
  DenseView x_src;          // (num_cols, width)
  DenseView x_dst;          // (num_rows, width), null data: 0
  const void* edge;         // (num_values, edge_width) in dtype, null: 0
  const void* weight;       // (edge_width, width) in the accumulation type: e_ij = W a_ij, with W transposed;
                            // null: `edge` has the rows e_ij, and edge_width = width
  std::int64_t edge_width;  // a multiple of 4 on CUDA if there is a weight
  std::int64_t width;
  std::int64_t group_width;    // features per group; all results of a group are stored next to each other
  int slot[kNumAggregations];  // position of each aggregation in a group's results; -1: not requested
  int num_slots;               // number of requested aggregations
  double min_variance;         // largest variance for which the standard deviation is 0
  Dtype dtype;

  // The position of a result.
  FASTSPARSE_HOST_DEVICE std::int64_t place(std::int64_t row, int of_slot, std::int64_t feature) const {
    const std::int64_t group = feature / group_width;
    return row * num_slots * width + (group * (num_slots - 1) + of_slot) * group_width + feature;
  }
};
FASTSPARSE_ARGUMENTS(MultiAggregateInput, FIELDS(x_src), WIDTH(width), DTYPE(dtype),
                     FIELDS(group_width, x_dst), MATRIX(edge), WIDTH(edge_width), FIELDS(weight),
                     AS(slots, slot), FIELDS(num_slots, min_variance));

struct MultiAggregateArgs {
  CsrView a;
  RowSplitView split;
  MultiAggregateInput input;
  void* out;   // (num_rows, num_slots * width)
  void* mean;  // (num_rows, width) in the accumulation type, null: not stored
  void* ties;  // (num_rows, 2, width) in the accumulation type: number of entries that equal the maximum, and
               // the minimum; null: not stored
  void* partial;  // in the accumulation type, for n slots of `split`: (n, 6, width), the states of slices,
                  // then (n), their numbers of entries; CUDA only
};
FASTSPARSE_ARGUMENTS(MultiAggregateArgs, AS(structure, a), ALSO(split),
                     FIELDS(input, out, mean, ties, partial));

// dm_ij = A_i + B_i (m_ij - mean_i) + [m_ij = max_i] C_i + [m_ij = min_i] D_i. For the column pass, the row
// pass writes A_i - B_i (mean_i - x_i), B_i, C_i and D_i, and marks the entries that have the row's maximum
// or minimum.
struct MultiAggregateBackwardArgs {
  CsrView a;
  RowSplitView split;
  CsrView a_t;
  RowSplitView split_t;
  MultiAggregateInput input;
  const void* out;
  const void* mean;
  const void* ties;
  const void* grad;     // (num_rows, num_slots * width)
  void* base;           // (num_rows, width); `base`, `slope` and `share` have the accumulation type
  void* slope;          // (num_rows, width), null without var and std
  void* share;          // (num_rows, 2, width), null without max and min
  std::uint8_t* marks;  // (num_values, ceil(width / 4)): for 4 features, 4 bits that mark maxima, then 4 that
                        // mark minima; CUDA only. Null without max and min, or with `edge` but no `weight`
  void* grad_src;       // (num_cols, width), null: not computed
  void* grad_dst;       // (num_rows, width), null: not computed
  void* grad_edge;    // with `weight`: (parts, num_values, edge_width) in the accumulation type, one part per
                      // 128 features, and the gradient is the sum of the parts; otherwise (num_values, width)
                      // in dtype; null: not computed
  void* grad_weight;  // (weight_parts, edge_width, width) in the accumulation type; the gradient is the sum
                      // of its parts; null: not computed
  std::int64_t weight_parts;
  std::int64_t num_values;
  void* partial;  // (number of slots of `split_t`, width) in the accumulation type; CUDA only
};
FASTSPARSE_ARGUMENTS(MultiAggregateBackwardArgs, AS(structure, a), ALSO(split), AS(transposed, a_t),
                     ALSO(split_t),
                     FIELDS(input, out, mean, ties, grad, base, slope, share, marks, grad_src, grad_dst,
                            grad_edge, grad_weight, weight_parts, num_values, partial));

// Softmax of edge values over the entries of every row. With `grad`: the gradient of the softmax, where
// `input` is its result.
struct EdgeSoftmaxArgs {
  CsrView a;
  RowSplitView split;
  const void* input;  // (num_values, heads)
  const void* grad;   // (num_values, heads); null: forward
  void* out;          // (num_values, heads)
  void* partial;      // (num_slots, heads, 2) in the accumulation type; CUDA only
  std::int64_t heads;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(EdgeSoftmaxArgs, AS(structure, a), ALSO(split), MATRIX(input), WIDTH(heads),
                     DTYPE(dtype), FIELDS(grad, out, partial));

enum class Reduction : int {
  kSum = 0,
  kMean = 1,
  kMax = 2,
  kMin = 3,
  kProduct = 4,
  kVariance = 5,
  kDeviation = 6
};

// out_s = the reduction of rows of x over segment s. Rows are read at the entries' positions in the caller's
// edge order; the columns of `a` are not used. The result of an empty segment is 0, and 1 for products.
struct SegmentReduceArgs {
  CsrView a;
  RowSplitView split;
  DenseView x;  // (num_edges, width)
  void* out;    // (num_rows, width) contiguous
  void* extra;  // (num_rows, width). Maximum and minimum: int64 position of the chosen row, num_edges if the
                // segment is empty; variance and deviation: the mean in the accumulation type; otherwise null
  void* partial;  // (num_slots, width) states of up to 24 bytes; CUDA only
  std::int64_t width;
  Reduction reduction;
  Dtype dtype;
};

// Row panels: windows of `height` rows, at most 64. Sources are divided into blocks of consecutive sources.
// The entries of a window and a block are sorted by source, then by row. An entry is 64 * source + (row
// within the window). Its highest bit is set if all entries of the source are in one strip, which is the part
// of a slice that one group of lanes sums. Slices are sorted by block.
struct RowPanelsView {
  const std::uint32_t* entry;  // (num_edges)
  const void* value_id;        // (num_edges) position in the caller's edge order; null without values
  bool value_id_is_64bit;
  const std::int32_t* other_source;  // (num_other) sources without entries, or whose entries lack that bit
  std::int64_t num_other;
  const RowSlice* slices;  // entries of one window and block for one thread block; the target is the window
  std::int64_t num_slices;
  std::int32_t height;
  std::int32_t strip;  // number of entries that one lane group sums; slices are cut between strips
  std::int64_t num_rows;
  std::int64_t num_cols;
};
using RowPanelsStructure = RowPanelsView;  // the name of this struct in Python
FASTSPARSE_ARGUMENTS(RowPanelsStructure, FIELDS(entry, value_id, value_id_is_64bit, other_source, num_other,
                                                slices, num_slices, height, strip, num_rows, num_cols));

// The columns that the rows of a sparse feature matrix keep: (rows, k) contiguous, 8 or 16 bits each.
struct KeptIdsView {
  const void* data;
  bool is_16bit;
  std::int64_t k;
};

// out_j,c = scale_src_j sum_i scale_dst_i value_ij grad_i,ids(j,c), row by row of the transposed structure.
// Scales are in the accumulation type, null: 1.
struct SsdBackwardArgs {
  CsrView a_t;
  RowSplitView split_t;
  EdgeValueView value;
  DenseView grad;  // (num_dst, width)
  KeptIdsView ids;
  const void* scale_dst;
  const void* scale_src;
  void* out;      // (num_src, k)
  void* partial;  // (num_slots, k) in the accumulation type; CUDA only
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(SsdBackwardArgs, AS(transposed, a_t), ALSO(split_t), FIELDS(grad), DTYPE(dtype),
                     FIELDS(value, ids, scale_dst, scale_src, out, partial));

// The result of SsdBackwardArgs, computed from row panels. Not for float64; CUDA only.
struct SsdBackwardWindowsArgs {
  RowPanelsView a;
  EdgeValueView value;
  DenseView grad;      // (num_dst, width)
  std::int64_t width;  // height * width elements and height floats fit in the shared memory of a block
  KeptIdsView ids;
  const float* scale_dst;
  const float* scale_src;
  float* sum;  // (num_src, k), 16-byte aligned; for float32, it is `out`
  void* out;   // (num_src, k), 16-byte aligned
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(SsdBackwardWindowsArgs, AS(structure, a), FIELDS(grad), WIDTH(width), DTYPE(dtype),
                     FIELDS(value, ids, scale_dst, scale_src, sum, out));

// out_e = scale_dst_i scale_src_j sum_c grad_i,ids(j,c) kept_j,c for entry e = (i, j), written to the edge's
// position in the caller's order.
struct SsdValueGradArgs {
  CsrView a;
  RowSplitView split;
  DenseView grad;  // (num_dst, width)
  std::int64_t width;
  const void* kept;  // (num_src, k) contiguous
  KeptIdsView ids;
  const void* scale_dst;
  const void* scale_src;
  void* out;  // (num_values) in the accumulation type
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(SsdValueGradArgs, AS(structure, a), ALSO(split), FIELDS(grad), WIDTH(width),
                     DTYPE(dtype), FIELDS(kept, ids, scale_dst, scale_src, out));

struct ExpandRowsArgs {
  const std::int64_t* rowptr;  // (num_rows + 1)
  std::int64_t num_rows;
  std::int64_t num_edges;
  std::int32_t* row;  // (num_edges)
};
FASTSPARSE_ARGUMENTS(ExpandRowsArgs, FIELDS(rowptr, num_rows, num_edges, row));

// id_out_e = the caller's position of the reverse of entry e = (i, j), for structures that equal their
// transpose and whose columns ascend in every row. If an edge occurs several times, its n-th entry belongs to
// the n-th entry of the reverse edge.
struct ReverseEntriesArgs {
  const std::int64_t* rowptr;  // (num_rows + 1)
  const std::int32_t* col;     // (num_edges)
  const void* edge_id;         // (num_edges), null: the identity
  std::int64_t num_rows;
  std::int64_t num_edges;
  void* id_out;  // (num_edges) in the type of edge_id
  bool id_is_64bit;
};
FASTSPARSE_ARGUMENTS(ReverseEntriesArgs,
                     FIELDS(rowptr, col, edge_id, num_rows, num_edges, id_out, id_is_64bit));

// Sorts edges by (major, minor), or stably by major alone, into compressed rows.
struct CompressArgs {
  const void* major;  // (num_edges) the index to be compressed
  const void* minor;  // (num_edges); null: sort by major only
  bool index_is_64bit;
  std::int64_t num_edges;
  std::int64_t num_major;
  std::int64_t num_minor;
  bool sort_minor;
  std::int64_t* major_ptr;  // out (num_major + 1)
  std::int32_t* minor_out;  // out (num_edges)
  void* order;              // out (num_edges) position of each sorted entry in the input
  bool order_is_64bit;
};
FASTSPARSE_ARGUMENTS(CompressArgs, FIELDS(major, minor, index_is_64bit, num_edges, num_major, num_minor,
                                          sort_minor, major_ptr, minor_out, order, order_is_64bit));

// Facts about edges, for the host, before it builds a structure. Maxima treat indices as unsigned, so a
// negative index gives a maximum that is larger than any valid index.
enum EdgeFact : int {
  kMostRow,      // greatest row
  kMostCol,      // greatest column
  kMostEdgeId,   // greatest edge id
  kRowsDescend,  // not 0: rows do not ascend; for compressed rows, row pointers descend
  kColsDescend,  // not 0: the columns of some row do not ascend
  kChecksum,     // 0 if the structure equals its transpose, otherwise almost certainly not 0
  kEmptyRows,    // not 0: some row has no entry
  kFirstEntry,   // rowptr[0]
  kLastEntry,    // rowptr[num_rows]
  kMostEntries,  // length of the longest row
  kLoops,        // not 0: some edge is a self loop; only for square structures given as edges
  kNumEdgeFacts,
};

// One pass over edges (row and col) or compressed rows (rowptr and col). Indices are not checked before this
// pass, so it does not use them as addresses.
struct InspectArgs {
  const void* row;      // (num_edges); null: rowptr is given
  const void* col;      // (num_edges)
  const void* edge_id;  // (num_edges); null: entries have no ids
  bool index_is_64bit;  // whether row and col are 64-bit
  bool edge_id_is_64bit;
  std::int64_t num_edges;
  std::int64_t num_rows;
  bool square;            // whether to compute kChecksum
  std::int64_t* rowptr;   // (num_rows + 1); written if `row` is given, valid if rows ascend
  std::int32_t* col_out;  // (num_edges); null: not computed
  float* inv_degree;      // (num_rows), 0 for rows without entries
  RowSlice* slices;       // (num_rows) every row in one slice, in row order; CUDA only
  std::int64_t* facts;    // (kNumEdgeFacts) in the device's memory
};
FASTSPARSE_ARGUMENTS(InspectArgs,
                     FIELDS(row, col, edge_id, index_is_64bit, edge_id_is_64bit, num_edges, num_rows, square,
                            rowptr, col_out, inv_degree, slices),
                     AS(scratch, facts));

// Min-wise hashes of every row's columns (group_rows.h).
struct RowSignaturesArgs {
  const std::int64_t* rowptr;  // (num_rows + 1)
  const std::int32_t* col;     // (num_edges)
  std::int64_t num_rows;
  int column_bits;          // number of bits of a column's number, at most 31
  int num_bands;            // number of orders in which rows are sorted, less than the number of hashes
  std::uint8_t* signature;  // (num_rows, 16) eight bits of every hash
  std::int32_t* keys;       // (num_bands, num_rows) sort keys of every order
};
FASTSPARSE_ARGUMENTS(RowSignaturesArgs,
                     FIELDS(rowptr, col, num_rows, column_bits, num_bands, signature, keys));

// Compares rows with their neighbours in several orders (group_rows.h).
struct SimilarRowsArgs {
  const std::uint8_t* signature;  // (num_rows, 16)
  const std::int32_t* order;      // (num_bands, num_rows): band * num_rows + row, by the keys of the band
  std::int64_t num_rows;
  std::int64_t num_bands;
  std::int64_t* best;  // (num_rows) in and out: similarity() to the most similar row so far
};
FASTSPARSE_ARGUMENTS(SimilarRowsArgs, FIELDS(signature, order, num_rows, num_bands, best));

// Follows the links from rows to their most similar rows (group_rows.h).
struct LinkRowsArgs {
  const std::int64_t* rowptr;  // (num_rows + 1)
  const std::int64_t* best;    // (num_rows)
  std::int64_t num_rows;
  std::int32_t* root;    // (num_rows): root of the row's cluster
  std::int64_t* counts;  // (2) in: 0; out: number of linked rows, and number of rows linked to a near row
};
FASTSPARSE_ARGUMENTS(LinkRowsArgs, FIELDS(rowptr, best, num_rows, root, counts));

// Cuts rows into slices, long slices first (RowSplitView). The caller runs count, allocates the results, and
// then runs fill.
struct RowSplitArgs {
  const std::int64_t* rowptr;  // (num_rows + 1)
  std::int64_t num_rows;
  std::int64_t longest;     // largest number of entries in a slice, a power of two
  std::int64_t* counts;     // (num_row_split_counts(num_rows)): scratch that count writes and fill reads
  std::int64_t* totals;     // (2) out of count: number of split rows and number of slots
  RowSlice* slices;         // out of fill, (num_rows - number of split rows + number of slots)
  std::int32_t* split_row;  // out of fill, (number of split rows)
  std::int64_t* split_ptr;  // out of fill, (number of split rows + 1)
};
FASTSPARSE_ARGUMENTS(RowSplitArgs, FIELDS(rowptr, num_rows, longest, counts),
                     OPTIONAL(totals, slices, split_row, split_ptr));

// The k largest entries of every row. Among equal entries, those in lower columns are kept; NaN counts as
// largest. Results are either values and ids in ascending column order, or dense rows and bits (`out`,
// `kept`).
struct MaxkArgs {
  DenseView x;   // (num_rows, width)
  void* values;  // (num_rows, k)
  void* ids;     // (num_rows, k): uint8 if width <= 256, else uint16
  void* out;     // (num_rows, width), 0 except for the kept entries; null: the results are values and ids
  std::uint32_t* kept;  // (num_rows, ceil(width / 32)): bit c % 32 of word c / 32 is set if column c is kept
  std::int64_t num_rows;
  std::int64_t width;
  std::int64_t k;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(MaxkArgs, FIELDS(x), NUM_ROWS(num_rows), WIDTH(width), DTYPE(dtype), FIELDS(k),
                     OPTIONAL(values, ids, out, kept));

// Copies the entries of dense rows whose bits are set; the other entries become 0.
struct MaskRowsArgs {
  DenseView dense;            // (num_rows, width)
  const std::uint32_t* kept;  // (num_rows, ceil(width / 32)) words of bits, see MaxkArgs
  void* out;                  // (num_rows, width)
  std::int64_t num_rows;
  std::int64_t width;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(MaskRowsArgs, FIELDS(dense), NUM_ROWS(num_rows), WIDTH(width), DTYPE(dtype),
                     FIELDS(kept, out));

// Dense rows from CBSR: the values at their column ids, and 0 in the other columns. Ids that are not below
// the width are ignored.
struct CbsrToDenseArgs {
  const void* values;  // (num_rows, k)
  const void* ids;     // (num_rows, k): uint8 if width <= 256, else uint16
  void* out;           // (num_rows, width)
  std::int64_t num_rows;
  std::int64_t width;
  std::int64_t k;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(CbsrToDenseArgs, FIELDS(width), MATRIX(values), NUM_ROWS(num_rows), WIDTH(k),
                     DTYPE(dtype), FIELDS(ids, out));

// The entries of dense rows at the column ids of a CBSR matrix; 0 for ids that are not below the width.
struct CbsrGatherArgs {
  DenseView dense;  // (num_rows, width)
  const void* ids;  // (num_rows, k): uint8 if width <= 256, else uint16
  void* out;        // (num_rows, k)
  std::int64_t num_rows;
  std::int64_t width;
  std::int64_t k;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(CbsrGatherArgs, FIELDS(dense), NUM_ROWS(num_rows), WIDTH(width), DTYPE(dtype),
                     MATRIX(ids), WIDTH(k), FIELDS(out));

// If SsdArgs.few_entries is set, groups that share a warp have at most this many entries.
constexpr int kShortGroupEntries = 7;

// The product of SpmmArgs with x in CBSR: k kept entries in every row of `width` features.
struct SsdArgs {
  CsrView a;
  RowSplitView groups;    // edge groups; CUDA only
  int longest_group;      // largest number of entries in a group
  std::int64_t num_long;  // number of groups that get a warp each, at the beginning of the list; the other
                          // groups share warps
  bool few_entries;       // whether the other groups have at most kShortGroupEntries entries
  EdgeValueView value;    // one per edge
  const void* values;     // (num_cols, k) in dtype
  const void* ids;        // (num_cols, k): uint8 if width <= 256, else uint16; ascending
  const void* scale_dst;
  const void* scale_src;
  const void* bias;
  void* out;      // (num_rows, width)
  void* partial;  // (num_slots, width) in the accumulation type; CUDA only
  void* packed;   // (num_cols of a, k) scratch for packed entries of 4 bytes, k <= 32; null: not packed; CUDA
                  // only
  std::int64_t width;
  std::int64_t k;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(SsdArgs, AS(structure, a), ALSO(groups), FIELDS(width), MATRIX(values), WIDTH(k),
                     DTYPE(dtype),
                     FIELDS(ids, value, scale_dst, scale_src, bias, out, partial, packed, longest_group,
                            num_long, few_entries));

// The dataflow of MaxK and of the decoupled SSD paper, for comparison. Sums are float32; values are 16-bit or
// float32.
struct SsdSlotsArgs {
  CsrView a;
  RowSplitView groups;
  EdgeValueView value;
  const void* values;
  const void* ids;
  const void* scale_src;
  float* sum;          // (num_rows, width), zeros before the call
  int slots;           // number of edge groups, and of buffers, per warp: a power of two up to 32
  bool update_mode;    // rows with one group are stored; otherwise every group adds with atomics
  bool coupled;        // a block waits for all its groups before it updates `sum`, as MaxK does
  std::int64_t width;  // at most 1024
  std::int64_t k;
  Dtype dtype;
};
FASTSPARSE_ARGUMENTS(SsdSlotsArgs, AS(structure, a), ALSO(groups), FIELDS(width), MATRIX(values), WIDTH(k),
                     DTYPE(dtype), FIELDS(ids, value, scale_src, sum, slots, update_mode, coupled));

}  // namespace fastsparse
