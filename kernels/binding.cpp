// The only file that knows pybind11. Tensors arrive as addresses, sizes and strides; Python has checked them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef FASTSPARSE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#include "fastsparse/attention_layer.h"
#include "fastsparse/batch_norm.h"
#include "fastsparse/cpu_pages.h"
#include "fastsparse/edge_messages.h"
#include "fastsparse/group_rows.h"
#include "fastsparse/head_scores.h"
#include "fastsparse/launchers.h"
#include "fastsparse/place_batch.h"
#include "fastsparse/sample_neighbors.h"
#include "fastsparse/slab_sums.h"
#include "fastsparse/sort_edges.h"
#include "fastsparse/sort_segments.h"
#include "fastsparse/spmm_extremum.h"

namespace py = pybind11;

namespace fastsparse {
namespace {

using Address = std::uintptr_t;

template <typename T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// A structure as the kernels see it, made once per Adjacency so that calls stay short.
struct CsrStructure {
  CsrView a;
  RowSplitView split;
};

CsrStructure make_structure(Address rowptr, Address col, Address edge_id, bool edge_id_is_64bit,
                            std::int64_t num_rows, std::int64_t num_cols, std::int64_t num_edges,
                            Address slices, std::int64_t num_slices, Address split_row, Address split_ptr,
                            std::int64_t num_split_rows) {
  return {{at<std::int64_t>(rowptr), at<std::int32_t>(col), at(edge_id), edge_id_is_64bit, num_rows, num_cols,
           num_edges},
          {at<RowSlice>(slices), num_slices, at<std::int32_t>(split_row), at<std::int64_t>(split_ptr),
           num_split_rows}};
}

#ifdef FASTSPARSE_WITH_CUDA
void check(int code, const char* what) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(what) +
                           " failed: " + cudaGetErrorString(static_cast<cudaError_t>(code)));
}

// Launches go to the tensors' device whatever device is current: with a statically linked runtime a launch
// for another device would otherwise report success and write nothing.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = device != previous_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};
#endif

// Runs `args` where its tensors live: device < 0 is the CPU and `queue` its number of threads, else `queue`
// is a stream.
#ifdef FASTSPARSE_WITH_CUDA
#define FASTSPARSE_RUN(op, args, device, queue) \
  do {                                          \
    if ((device) < 0) {                         \
      py::gil_scoped_release release;           \
      cpu::op(args, static_cast<int>(queue));   \
    } else {                                    \
      const DeviceGuard guard(device);          \
      check(cuda::op(args, at(queue)), #op);    \
    }                                           \
  } while (false)
#else
#define FASTSPARSE_RUN(op, args, device, queue)                                                        \
  do {                                                                                                 \
    if ((device) >= 0) throw std::runtime_error("fastsparse_core was built without CUDA: see doctor"); \
    py::gil_scoped_release release;                                                                    \
    cpu::op(args, static_cast<int>(queue));                                                            \
  } while (false)
#endif

enum class SpmmKernel { kCsr, kTca, kResident, kResidentTca, kHr };

// A kernel of spmm that reads CSR, and what calls of one dtype and width share, so that they pass little.
class SpmmPlan {
 public:
  SpmmPlan(SpmmKernel kernel, const CsrStructure& structure, int dtype, std::int64_t width, int value_dtype,
           std::int64_t heads, std::int64_t tile, std::int64_t num_long, int device)
      : kernel_(kernel), num_long_(num_long), device_(device) {
    args_.a = structure.a;
    args_.split = structure.split;
    args_.value = {nullptr, static_cast<Dtype>(value_dtype), heads};
    args_.width = width;
    args_.tile = tile;
    args_.dtype = static_cast<Dtype>(dtype);
  }

  void run(Address x, std::int64_t x_stride, Address value, Address scale_dst, Address scale_src,
           Address loop, Address bias, bool relu, Address out, Address partial, Address queue) const {
    SpmmArgs args = args_;
    args.value.data = at(value);
    args.x = {at(x), x_stride};
    args.scale_dst = at(scale_dst);
    args.scale_src = at(scale_src);
    args.loop = at(loop);
    args.bias = at(bias);
    args.relu = relu;
    args.out = at(out);
    args.partial = at(partial);
    if (kernel_ == SpmmKernel::kCsr) {
      FASTSPARSE_RUN(spmm_csr, args, device_, queue);
      return;
    }
#ifdef FASTSPARSE_WITH_CUDA
    const DeviceGuard guard(device_);
    if (kernel_ == SpmmKernel::kTca) {
      check(cuda::spmm_tca(args, at(queue)), "spmm_tca");
    } else if (kernel_ == SpmmKernel::kHr) {
      check(cuda::spmm_hr(args, num_long_, at(queue)), "spmm_hr");
    } else {
      check(cuda::spmm_resident(args, kernel_ == SpmmKernel::kResidentTca, at(queue)), "spmm_resident");
    }
#endif
  }

 private:
  SpmmArgs args_{};
  SpmmKernel kernel_;
  std::int64_t num_long_;
  int device_;
};

void spmm_csr_transposed(const CsrStructure& structure, int dtype, std::int64_t width, Address x,
                         std::int64_t x_stride, Address value, int value_dtype, Address scale_dst,
                         Address scale_src, Address sum, std::int64_t num_given, Address count, Address out,
                         int device, Address queue) {
  const SpmmTransposedArgs args{structure.a,
                                structure.split,
                                {at(value), static_cast<Dtype>(value_dtype), 1},
                                {at(x), x_stride},
                                at<float>(scale_dst),
                                at<float>(scale_src),
                                at<float>(sum),
                                num_given,
                                at<std::int32_t>(count),
                                at(out),
                                width,
                                static_cast<Dtype>(dtype)};
  FASTSPARSE_RUN(spmm_csr_transposed, args, device, queue);
}

#ifdef FASTSPARSE_WITH_CUDA
void sum_of_rows(Address rows, std::int64_t num_rows, std::int64_t width, std::int64_t row_stride, int dtype,
                 Address partial, std::int64_t num_parts, Address out, int out_dtype, int device,
                 Address queue) {
  const SumOfRowsArgs args{at(rows),
                           num_rows,
                           width,
                           row_stride,
                           at<double>(partial),
                           num_parts,
                           at(out),
                           static_cast<Dtype>(dtype),
                           static_cast<Dtype>(out_dtype)};
  const DeviceGuard guard(device);
  check(cuda::sum_of_rows(args, at(queue)), "sum_of_rows");
}

// Rows: x, the mask, how many rows it names, scratch.
cuda::MaskedRows masked_rows(const std::array<Address, 4>& rows, std::int64_t num_rows, std::int64_t width,
                             int dtype, std::int64_t num_parts) {
  return {at(rows[0]),
          num_rows,
          width,
          static_cast<Dtype>(dtype),
          at<const bool>(rows[1]),
          at<const float>(rows[2]),
          at<double>(rows[3]),
          num_parts};
}

void batch_norm(const std::array<Address, 4>& rows, std::int64_t num_rows, std::int64_t width, int dtype,
                std::int64_t num_parts, Address weight, Address bias, Address running_mean,
                Address running_var, float momentum, float eps, Address out, Address mean, Address inverse,
                int device, Address queue) {
  const cuda::BatchNormArgs args{masked_rows(rows, num_rows, width, dtype, num_parts),
                                 at<const float>(weight),
                                 at<const float>(bias),
                                 at<float>(running_mean),
                                 at<float>(running_var),
                                 momentum,
                                 eps,
                                 at(out),
                                 at<float>(mean),
                                 at<float>(inverse)};
  const DeviceGuard guard(device);
  check(cuda::batch_norm(args, at(queue)), "batch_norm");
}

void batch_norm_backward(const std::array<Address, 4>& rows, std::int64_t num_rows, std::int64_t width,
                         int dtype, std::int64_t num_parts, Address grad, Address weight, Address mean,
                         Address inverse, Address out, Address grad_weight, Address grad_bias, int device,
                         Address queue) {
  const cuda::BatchNormBackwardArgs args{masked_rows(rows, num_rows, width, dtype, num_parts),
                                         at(grad),
                                         at<const float>(weight),
                                         at<const float>(mean),
                                         at<const float>(inverse),
                                         at(out),
                                         at<float>(grad_weight),
                                         at<float>(grad_bias)};
  const DeviceGuard guard(device);
  check(cuda::batch_norm_backward(args, at(queue)), "batch_norm_backward");
}

void aggregate_linear(const CsrStructure& structure, bool sums_given, Address scale_dst, std::int64_t width,
                      Address x, std::int64_t x_stride, std::int64_t out_width, Address weight,
                      Address root_weight, Address bias, Address sums, Address out, int num_terms, int device,
                      Address queue) {
  const AggregateLinearArgs args{structure.a,
                                 sums_given,
                                 at<const float>(scale_dst),
                                 {at(x), x_stride},
                                 at<const float>(weight),
                                 at<const float>(root_weight),
                                 at<const float>(bias),
                                 at<float>(sums),
                                 at<float>(out),
                                 width,
                                 out_width,
                                 num_terms};
  const DeviceGuard guard(device);
  check(cuda::aggregate_linear(args, at(queue)), "aggregate_linear");
}

void aggregate_linear_backward(std::int64_t num_rows, Address grad, std::int64_t out_width, Address sums,
                               Address x, std::int64_t x_stride, std::int64_t width, std::int64_t num_slabs,
                               Address weights, Address bias, Address grad_weight, Address grad_root,
                               Address grad_bias, int num_terms, int device, Address queue) {
  const AggregateLinearBackwardArgs args{at<const float>(grad),
                                         at<const float>(sums),
                                         {at(x), x_stride},
                                         at<float>(weights),
                                         at<float>(bias),
                                         num_rows,
                                         num_slabs,
                                         width,
                                         out_width,
                                         num_terms};
  const SlabSumsArgs sums_args{
      args.weights,         args.bias, at<float>(grad_weight), at<float>(grad_root),
      at<float>(grad_bias), num_slabs, out_width * width,      bias == 0 ? 0 : out_width};
  const DeviceGuard guard(device);
  check(cuda::aggregate_linear_backward(args, at(queue)), "aggregate_linear_backward");
  check(cuda::slab_sums(sums_args, at(queue)), "slab_sums");
}

void head_outer(Address x, std::int64_t x_stride, Address y, std::int64_t y_stride, Address x_edge,
                Address y_edge, std::int64_t num_rows, std::int64_t heads, std::int64_t head_width,
                std::int64_t edge_width, Address partial, std::int64_t num_parts, int dtype, int device,
                Address queue) {
  const HeadOuterArgs args{at(x),
                           x_stride,
                           at(y),
                           y_stride,
                           at(x_edge),
                           at(y_edge),
                           num_rows,
                           heads,
                           head_width,
                           edge_width,
                           at<float>(partial),
                           num_parts,
                           static_cast<Dtype>(dtype)};
  const DeviceGuard guard(device);
  check(cuda::head_outer(args, at(queue)), "head_outer");
}

void hybrid_rows(Address rowptr, std::int64_t num_rows, std::int32_t multiple, std::int32_t longest,
                 Address counts, std::int64_t most_long, Address slices, Address split_row, Address split_ptr,
                 int device, Address queue) {
  const HybridRowsArgs args{at<std::int64_t>(rowptr),
                            num_rows,
                            multiple,
                            longest,
                            at<HybridRowsCounts>(counts),
                            most_long,
                            at<RowSlice>(slices),
                            at<std::int32_t>(split_row),
                            at<std::int64_t>(split_ptr)};
  const DeviceGuard guard(device);
  check(cuda::hybrid_rows(args, at(queue)), "hybrid_rows");
}

BsbView make_bsb(Address quad, Address window_ptr, Address window_row, Address quad_entry, Address value_id,
                 bool value_id_is_64bit, std::int64_t num_rows, Address slices, std::int64_t num_slices,
                 Address split_row, Address split_ptr, std::int64_t num_split_rows, Address runs,
                 std::int64_t num_runs) {
  return {at<std::uint32_t>(quad),
          at<std::int32_t>(window_ptr),
          at<std::int32_t>(window_row),
          at<std::int64_t>(quad_entry),
          at(value_id),
          value_id_is_64bit,
          num_rows,
          {at<RowSlice>(slices), num_slices, at<std::int32_t>(split_row), at<std::int64_t>(split_ptr),
           num_split_rows},
          at<WindowRun>(runs),
          num_runs};
}

void spmm_bsb(const BsbView& structure, int dtype, std::int64_t width, Address x, std::int64_t x_stride,
              Address value, int value_dtype, std::int64_t heads, Address quad_vector, Address vector_scale,
              Address scale_dst, Address scale_src, Address loop, Address bias, bool relu, Address out,
              Address partial, int features_per_lane, int blocks_per_step, bool tf32, int device,
              Address queue) {
  const SpmmBsbArgs args{structure,
                         {at(value), static_cast<Dtype>(value_dtype), heads},
                         at<std::int64_t>(quad_vector),
                         at<float>(vector_scale),
                         {at(x), x_stride},
                         at(scale_dst),
                         at(scale_src),
                         at(loop),
                         at(bias),
                         relu,
                         at(out),
                         at(partial),
                         width,
                         features_per_lane,
                         blocks_per_step,
                         tf32,
                         static_cast<Dtype>(dtype)};
  const DeviceGuard guard(device);
  check(cuda::spmm_bsb(args, at(queue)), "spmm_bsb");
}

AttentionBsbInput attention_bsb_input(int dtype, std::int64_t heads, std::int64_t head_width,
                                      std::int64_t value_width, Address q, std::int64_t q_stride, Address k,
                                      std::int64_t k_stride, Address v, std::int64_t v_stride, Address bias,
                                      int bias_dtype, float scale, double dropout_p, std::int64_t seed,
                                      bool tf32) {
  return {{at(q), q_stride},
          {at(k), k_stride},
          {at(v), v_stride},
          {at(bias), static_cast<Dtype>(bias_dtype), heads},
          scale,
          make_dropout(dropout_p, seed),
          heads,
          head_width,
          value_width,
          tf32,
          static_cast<Dtype>(dtype)};
}

void attention_bsb(const BsbView& structure, const AttentionBsbInput& input, Address out, Address lse,
                   Address partial, Address partial_state, int device, Address queue) {
  const AttentionBsbArgs args{
      structure, input, at(out), at<double>(lse), at<float>(partial), at<float>(partial_state)};
  const DeviceGuard guard(device);
  check(cuda::attention_bsb(args, at(queue)), "attention_bsb");
}

void attention_bsb_backward(const BsbView& structure, const BsbView& transposed,
                            const AttentionBsbInput& input, Address out, Address lse, Address grad,
                            std::int64_t grad_stride, Address grad_q, Address grad_k, Address grad_v,
                            Address grad_bias, Address row_state, Address partial_q, Address partial_k,
                            Address partial_v, int device, Address queue) {
  const AttentionBsbBackwardArgs args{structure,
                                      transposed,
                                      input,
                                      at(out),
                                      at<double>(lse),
                                      {at(grad), grad_stride},
                                      at(grad_q),
                                      at(grad_k),
                                      at(grad_v),
                                      at(grad_bias),
                                      at<float>(row_state),
                                      at<float>(partial_q),
                                      at<float>(partial_k),
                                      at<float>(partial_v)};
  const DeviceGuard guard(device);
  check(cuda::attention_bsb_backward(args, at(queue)), "attention_bsb_backward");
}

AdditiveAttentionInput additive_input(int dtype, std::int64_t heads, std::int64_t head_width,
                                      Address score_dst, Address score_src, Address v, std::int64_t v_stride,
                                      Address bias, int bias_dtype, float negative_slope, double dropout_p,
                                      std::int64_t seed) {
  return {at<float>(score_dst),
          at<float>(score_src),
          {at(v), v_stride},
          {at(bias), static_cast<Dtype>(bias_dtype), heads},
          negative_slope,
          make_dropout(dropout_p, seed),
          heads,
          head_width,
          static_cast<Dtype>(dtype)};
}

void additive_attention(const CsrStructure& structure, const AdditiveAttentionInput& input, Address out,
                        Address lse, Address partial, Address partial_state, int device, Address queue) {
  const AdditiveAttentionArgs args{
      structure.a,        structure.split,         input, at(out), at<float>(lse),
      at<float>(partial), at<float>(partial_state)};
  const DeviceGuard guard(device);
  check(cuda::additive_attention(args, at(queue)), "additive_attention");
}

void additive_attention_backward(const CsrStructure& structure, const CsrStructure& transposed,
                                 const AdditiveAttentionInput& input, Address grad, std::int64_t grad_stride,
                                 Address lse, Address grad_score_dst, Address grad_score_src, Address grad_v,
                                 Address grad_bias, Address row_state, Address partial_row, Address partial_v,
                                 Address partial_score, int device, Address queue) {
  const AdditiveAttentionBackwardArgs args{structure.a,
                                           structure.split,
                                           transposed.a,
                                           transposed.split,
                                           input,
                                           {at(grad), grad_stride},
                                           at<float>(lse),
                                           at<float>(grad_score_dst),
                                           at<float>(grad_score_src),
                                           at(grad_v),
                                           at(grad_bias),
                                           at<float>(row_state),
                                           at<float>(partial_row),
                                           at<float>(partial_v),
                                           at<float>(partial_score)};
  const DeviceGuard guard(device);
  check(cuda::additive_attention_backward(args, at(queue)), "additive_attention_backward");
}

Gatv2AttentionInput gatv2_input(int dtype, std::int64_t heads, std::int64_t head_width, Address x_dst,
                                std::int64_t x_dst_stride, Address x_src, std::int64_t x_src_stride,
                                Address att, float negative_slope, double dropout_p, std::int64_t seed) {
  return {{at(x_dst), x_dst_stride},
          {at(x_src), x_src_stride},
          at<float>(att),
          negative_slope,
          make_dropout(dropout_p, seed),
          heads,
          head_width,
          static_cast<Dtype>(dtype)};
}

void gatv2_attention(const CsrStructure& structure, const Gatv2AttentionInput& input, Address out,
                     Address lse, Address partial, Address partial_state, int device, Address queue) {
  const Gatv2AttentionArgs args{structure.a,        structure.split,         input, at(out), at<float>(lse),
                                at<float>(partial), at<float>(partial_state)};
  const DeviceGuard guard(device);
  check(cuda::gatv2_attention(args, at(queue)), "gatv2_attention");
}

void gatv2_attention_backward(const CsrStructure& structure, const CsrStructure& transposed,
                              const Gatv2AttentionInput& input, Address out, std::int64_t out_stride,
                              Address grad, std::int64_t grad_stride, Address lse, Address grad_x_dst,
                              Address grad_x_src, Address grad_att, std::int64_t att_rows, Address row_state,
                              Address partial_dst, Address partial_src, int device, Address queue) {
  const Gatv2AttentionBackwardArgs args{structure.a,
                                        structure.split,
                                        transposed.a,
                                        transposed.split,
                                        input,
                                        {at(out), out_stride},
                                        {at(grad), grad_stride},
                                        at<float>(lse),
                                        at(grad_x_dst),
                                        at(grad_x_src),
                                        at<float>(grad_att),
                                        att_rows,
                                        at<float>(row_state),
                                        at<float>(partial_dst),
                                        at<float>(partial_src)};
  const DeviceGuard guard(device);
  check(cuda::gatv2_attention_backward(args, at(queue)), "gatv2_attention_backward");
}

void sddmm_bsb(const BsbView& structure, Address rowptr, Address slot_window, Address slot_entry,
               Address quad_vector, Address edge_id, bool edge_id_is_64bit, int dtype, std::int64_t heads,
               std::int64_t head_width, Address x_dst, std::int64_t x_dst_stride, Address x_src,
               std::int64_t x_src_stride, Address scale_dst, Address scale_src, Address out, int out_dtype,
               bool tf32, int device, Address queue) {
  const SddmmBsbArgs args{structure,
                          at<std::int64_t>(rowptr),
                          at<std::int32_t>(slot_window),
                          at<std::int64_t>(slot_entry),
                          at<std::int64_t>(quad_vector),
                          at(edge_id),
                          edge_id_is_64bit,
                          {at(x_dst), x_dst_stride},
                          {at(x_src), x_src_stride},
                          at(scale_dst),
                          at(scale_src),
                          at(out),
                          static_cast<Dtype>(out_dtype),
                          heads,
                          head_width,
                          tf32,
                          static_cast<Dtype>(dtype)};
  const DeviceGuard guard(device);
  check(cuda::sddmm_bsb(args, at(queue)), "sddmm_bsb");
}
#endif

void spmm_extremum(const CsrStructure& structure, int dtype, std::int64_t width, Address x,
                   std::int64_t x_stride, Address value, int value_dtype, std::int64_t heads, bool minimum,
                   bool adds, Address out, Address arg, Address partial, Address partial_arg, int device,
                   Address queue) {
  const SpmmExtremumArgs args{structure.a,
                              structure.split,
                              {at(value), static_cast<Dtype>(value_dtype), heads},
                              {at(x), x_stride},
                              at(out),
                              at<std::int32_t>(arg),
                              at(partial),
                              at<std::int32_t>(partial_arg),
                              width,
                              minimum,
                              adds,
                              static_cast<Dtype>(dtype)};
  FASTSPARSE_RUN(spmm_extremum, args, device, queue);
}

void spmm_extremum_backward(const CsrStructure& transposed, int dtype, std::int64_t num_rows,
                            std::int64_t width, Address grad, std::int64_t grad_stride, Address x,
                            std::int64_t x_stride, Address value, int value_dtype, std::int64_t heads,
                            Address arg, Address source, Address grad_x, Address grad_value, Address partial,
                            int device, Address queue) {
  const SpmmExtremumBackwardArgs args{transposed.a,
                                      transposed.split,
                                      {at(value), static_cast<Dtype>(value_dtype), heads},
                                      {at(grad), grad_stride},
                                      {at(x), x_stride},
                                      at<std::int32_t>(arg),
                                      at<std::int32_t>(source),
                                      at(grad_x),
                                      at(grad_value),
                                      at(partial),
                                      num_rows,
                                      width,
                                      static_cast<Dtype>(dtype)};
  FASTSPARSE_RUN(spmm_extremum_backward, args, device, queue);
}

void sddmm_csr(const CsrStructure& structure, int dtype, std::int64_t heads, std::int64_t head_width,
               Address x_dst, std::int64_t x_dst_stride, Address x_src, std::int64_t x_src_stride,
               Address scale_dst, Address scale_src, Address out, int out_dtype, Address row, int device,
               Address queue) {
  const SddmmArgs args{structure.a,
                       structure.split,
                       {at(x_dst), x_dst_stride},
                       {at(x_src), x_src_stride},
                       at(scale_dst),
                       at(scale_src),
                       at(out),
                       static_cast<Dtype>(out_dtype),
                       heads,
                       head_width,
                       static_cast<Dtype>(dtype),
                       at<std::int32_t>(row)};
  FASTSPARSE_RUN(sddmm_csr, args, device, queue);
}

void edge_softmax(const CsrStructure& structure, int dtype, std::int64_t heads, Address input, Address grad,
                  Address out, Address partial, int device, Address queue) {
  const EdgeSoftmaxArgs args{structure.a, structure.split, at(input), at(grad),
                             at(out),     at(partial),     heads,     static_cast<Dtype>(dtype)};
  FASTSPARSE_RUN(edge_softmax, args, device, queue);
}

void segment_reduce(const CsrStructure& structure, int dtype, int reduction, std::int64_t width, Address x,
                    std::int64_t x_stride, Address out, Address extra, Address partial, Address facts,
                    int device, Address queue) {
  const SegmentReduceArgs args{structure.a,
                               structure.split,
                               {at(x), x_stride},
                               at(out),
                               at(extra),
                               at(partial),
                               width,
                               static_cast<Reduction>(reduction),
                               static_cast<Dtype>(dtype)};
#ifdef FASTSPARSE_WITH_CUDA
  if (facts != 0) {
    const DeviceGuard guard(device);
    check(cuda::segment_reduce_unseen(args, at<const std::int64_t>(facts), at(queue)), "segment_reduce");
    return;
  }
#else
  (void)facts;
#endif
  FASTSPARSE_RUN(segment_reduce, args, device, queue);
}

AttentionCsrArgs attention_csr_args(const CsrStructure& structure, int kind, int dtype, std::int64_t heads,
                                    std::int64_t head_width, std::int64_t value_width, Address dst,
                                    std::int64_t dst_stride, Address src, std::int64_t src_stride, Address v,
                                    std::int64_t v_stride, Address att, Address bias, int bias_dtype,
                                    double scale, double dropout_p, std::int64_t seed, Address out,
                                    Address lse) {
  return {structure.a,
          static_cast<AttentionScore>(kind),
          {at(dst), dst_stride},
          {at(src), src_stride},
          {at(v), v_stride},
          at(att),
          {at(bias), static_cast<Dtype>(bias_dtype), heads},
          scale,
          make_dropout(dropout_p, seed),
          1 / (1 - dropout_p),
          heads,
          head_width,
          value_width,
          static_cast<Dtype>(dtype),
          at(out),
          at(lse)};
}

void attention_csr(const AttentionCsrArgs& args, int threads) {
  const py::gil_scoped_release release;
  cpu::attention_csr(args, threads);
}

void attention_csr_backward(const AttentionCsrArgs& forward, const CsrStructure& transposed, Address grad,
                            std::int64_t grad_stride, Address grad_dst, Address grad_src, Address grad_v,
                            Address grad_att, Address grad_bias, int threads) {
  const AttentionCsrBackwardArgs args{forward,      transposed.a, {at(grad), grad_stride},
                                      at(grad_dst), at(grad_src), at(grad_v),
                                      at(grad_att), at(grad_bias)};
  const py::gil_scoped_release release;
  cpu::attention_csr_backward(args, threads);
}

HeadScoresArgs head_scores_args(int dtype, std::int64_t num_rows, std::int64_t heads, std::int64_t head_width,
                                Address v, std::int64_t v_stride, Address first_vector, Address second_vector,
                                Address first_scores, Address second_scores) {
  return {{at(v), v_stride},
          {at(first_vector), at(second_vector)},
          {at(first_scores), at(second_scores)},
          num_rows,
          heads,
          head_width,
          static_cast<Dtype>(dtype)};
}

void head_scores(const HeadScoresArgs& args, int threads) {
  const py::gil_scoped_release release;
  cpu::head_scores(args, threads);
}

void head_scores_backward(const HeadScoresArgs& forward, Address grad_v, bool adds, Address grad_first,
                          Address grad_second, int threads) {
  const HeadScoresBackwardArgs args{forward, at(grad_v), adds, {at(grad_first), at(grad_second)}};
  const py::gil_scoped_release release;
  cpu::head_scores_backward(args, threads);
}

// The attention of a layer on the CPU, with what is the same for all calls on a structure.
class AttentionLayer {
 public:
  AttentionLayer(const CsrStructure& structure, int kind, int dtype, std::int64_t heads,
                 std::int64_t head_width, std::int64_t maps, double scale)
      : a_(structure.a),
        kind_(static_cast<AttentionScore>(kind)),
        dtype_(static_cast<Dtype>(dtype)),
        heads_(heads),
        head_width_(head_width),
        maps_(maps),
        scale_(scale) {}

  void forward(Address joint, Address first_vector, Address second_vector, Address bias, Address out,
               Address state, double dropout_p, std::int64_t seed, int threads) const {
    AttentionLayerArgs args{};
    args.attention = attention(joint, first_vector, state, dropout_p, seed);
    args.attention.out = at(out);
    args.scores = scores(joint, first_vector, second_vector, state);
    if (maps_ == 4) args.skip = column(joint, 3);
    args.bias = at(bias);
    const py::gil_scoped_release release;
    cpu::attention_layer(args, threads);
  }

  void backward(const CsrStructure& transposed, Address joint, Address first_vector, Address second_vector,
                Address state, Address grad, std::int64_t grad_stride, Address grad_joint, Address grad_first,
                Address grad_second, Address grad_bias, Address grad_map_bias, double dropout_p,
                std::int64_t seed, int threads) const {
    AttentionLayerBackwardArgs args{};
    args.attention.forward = attention(joint, first_vector, state, dropout_p, seed);
    args.attention.a_t = transposed.a;
    args.attention.grad = {at(grad), grad_stride};
    args.grad_joint = {at(grad_joint), maps_ * width()};
    args.joint_width = maps_ * width();
    if (kind_ == AttentionScore::kAdditive) {
      args.scores = scores(joint, first_vector, second_vector, state);
      args.grad_vectors[0] = at(grad_first);
      args.grad_vectors[1] = at(grad_second);
      args.attention.grad_v = at(grad_joint);
    } else if (kind_ == AttentionScore::kGatv2) {
      args.attention.grad_att = at(grad_first);
      args.attention.grad_src = at(grad_joint);
      args.attention.grad_dst = const_cast<void*>(column(grad_joint, 1).data);
    } else {
      args.attention.grad_src = at(grad_joint);
      args.attention.grad_v = const_cast<void*>(column(grad_joint, 1).data);
      args.attention.grad_dst = const_cast<void*>(column(grad_joint, 2).data);
      if (maps_ == 4) args.grad_skip = const_cast<void*>(column(grad_joint, 3).data);
    }
    args.grad_bias = at(grad_bias);
    args.grad_map_bias = at(grad_map_bias);
    const py::gil_scoped_release release;
    cpu::attention_layer_backward(args, threads);
  }

 private:
  std::int64_t width() const { return heads_ * head_width_; }

  // What a linear map gave, or the gradient of it.
  DenseView column(Address joint, std::int64_t map) const {
    const std::int64_t bytes = dtype_ == Dtype::kFloat64 ? 8 : dtype_ == Dtype::kFloat32 ? 4 : 2;
    return {at(joint + map * width() * bytes), maps_ * width()};
  }

  // Arrays (num_rows, heads): additive attention has scores of sources and destinations before the
  // log-sum-exp.
  Address state(Address first, std::int64_t array) const {
    return first + array * a_.num_rows * heads_ * (dtype_ == Dtype::kFloat64 ? 8 : 4);
  }

  AttentionCsrArgs attention(Address joint, Address first_vector, Address first_state, double dropout_p,
                             std::int64_t seed) const {
    AttentionCsrArgs args{};
    args.a = a_;
    args.kind = kind_;
    args.scale = scale_;
    args.dropout = make_dropout(dropout_p, seed);
    args.keep_scale = 1 / (1 - dropout_p);
    args.heads = heads_;
    args.head_width = kind_ == AttentionScore::kAdditive ? 0 : head_width_;
    args.value_width = head_width_;
    args.dtype = dtype_;
    args.bias.heads = heads_;
    args.lse = at(state(first_state, kind_ == AttentionScore::kAdditive ? 2 : 0));
    if (kind_ == AttentionScore::kAdditive) {
      args.v = column(joint, 0);
      args.src = {at(state(first_state, 0)), heads_};
      args.dst = {at(state(first_state, 1)), heads_};
    } else if (kind_ == AttentionScore::kGatv2) {
      args.src = args.v = column(joint, 0);
      args.dst = column(joint, 1);
      args.att = at(first_vector);
    } else {
      args.src = column(joint, 0);
      args.v = column(joint, 1);
      args.dst = column(joint, 2);
    }
    return args;
  }

  HeadScoresArgs scores(Address joint, Address first_vector, Address second_vector,
                        Address first_state) const {
    return {column(joint, 0),
            {at(first_vector), at(second_vector)},
            {at(first_state), at(state(first_state, 1))},
            a_.num_rows,
            heads_,
            head_width_,
            dtype_};
  }

  CsrView a_;
  AttentionScore kind_;
  Dtype dtype_;
  std::int64_t heads_, head_width_, maps_;
  double scale_;
};

#ifdef FASTSPARSE_WITH_CUDA
void stack_maps(const std::vector<Address>& weights, const std::vector<Address>& biases,
                std::int64_t weight_size, std::int64_t bias_size, Address weight, Address bias, int dtype,
                int to_dtype, int device, Address queue) {
  StackedMapsArgs args{};
  args.maps = static_cast<std::int64_t>(std::min<std::size_t>(weights.size(), kMostMaps));
  for (std::int64_t i = 0; i < args.maps; ++i) {
    args.weights[i] = at(weights[i]);
    if (!biases.empty()) args.biases[i] = at(biases.at(i));
  }
  args.weight_size = weight_size;
  args.bias_size = biases.empty() ? 0 : bias_size;
  args.weight = at(weight);
  args.bias = at(bias);
  args.dtype = static_cast<Dtype>(dtype);
  args.to_dtype = static_cast<Dtype>(to_dtype);
  const DeviceGuard guard(device);
  check(cuda::stack_maps(args, at(queue)), "stack_maps");
}

// The same on CUDA, with the structures of one pass, and those of the transposed graph for the backward pass.
class CudaAttentionLayer {
 public:
  CudaAttentionLayer(const CsrStructure* structure, const CsrStructure* transposed, const BsbView* blocks,
                     const BsbView* transposed_blocks, std::int64_t num_slots, std::int64_t num_slots_t,
                     std::int64_t att_rows, std::int64_t num_values, int kind, int dtype,
                     std::int64_t num_nodes, std::int64_t heads, std::int64_t head_width, std::int64_t maps,
                     float scale, std::int64_t num_parts, bool backward, int device)
      : device_(device) {
    if (structure != nullptr) args_.a = structure->a, args_.split = structure->split;
    if (transposed != nullptr) args_.a_t = transposed->a, args_.split_t = transposed->split;
    if (blocks != nullptr) args_.blocks = *blocks;
    if (transposed_blocks != nullptr) args_.blocks_t = *transposed_blocks;
    args_.num_slots = num_slots;
    args_.num_slots_t = num_slots_t;
    args_.on_blocks = blocks != nullptr;
    args_.att_rows = att_rows;
    args_.num_values = num_values;
    args_.kind = static_cast<AttentionScore>(kind);
    args_.dtype = static_cast<Dtype>(dtype);
    args_.num_nodes = num_nodes;
    args_.heads = heads;
    args_.head_width = head_width;
    args_.maps = maps;
    args_.scale = scale;
    args_.num_parts = num_parts;
    scratch_ = cuda::attention_layer_scratch(args_, backward);
    state_ = cuda::attention_layer_state(args_);
  }

  std::int64_t scratch() const { return scratch_; }
  std::int64_t state() const { return state_; }
  bool on_blocks() const { return args_.on_blocks; }

  void forward(Address joint, Address first_vector, Address second_vector, Address bias, bool bias_is_float,
               Address out, Address result, Address state, Address scratch, double dropout_p,
               std::int64_t seed, bool tf32, Address queue) const {
    CudaAttentionLayerArgs args = call(joint, first_vector, second_vector, out, state, scratch);
    args.dropout = make_dropout(dropout_p, seed);
    args.tf32 = tf32;
    args.bias = at(bias);
    args.bias_is_float = bias_is_float;
    args.result = at(result);
    const DeviceGuard guard(device_);
    check(cuda::attention_layer(args, at(queue)), "attention_layer");
  }

  void backward(Address joint, Address first_vector, Address second_vector, Address out, Address state,
                Address scratch, Address grad, std::int64_t grad_stride, Address grad_joint,
                Address grad_first, Address grad_second, Address grad_bias, int grad_bias_dtype,
                Address grad_map_bias, int grad_map_bias_dtype, double dropout_p, std::int64_t seed,
                bool tf32, Address queue) const {
    CudaAttentionLayerArgs args = call(joint, first_vector, second_vector, out, state, scratch);
    args.dropout = make_dropout(dropout_p, seed);
    args.tf32 = tf32;
    args.grad = {at(grad), grad_stride};
    args.grad_joint = at(grad_joint);
    args.grad_vectors[0] = at<float>(grad_first);
    args.grad_vectors[1] = at<float>(grad_second);
    args.grad_bias = at(grad_bias);
    args.grad_bias_dtype = static_cast<Dtype>(grad_bias_dtype);
    args.grad_map_bias = at(grad_map_bias);
    args.grad_map_bias_dtype = static_cast<Dtype>(grad_map_bias_dtype);
    const DeviceGuard guard(device_);
    check(cuda::attention_layer_backward(args, at(queue)), "attention_layer_backward");
  }

 private:
  CudaAttentionLayerArgs call(Address joint, Address first_vector, Address second_vector, Address out,
                              Address state, Address scratch) const {
    CudaAttentionLayerArgs args = args_;
    args.joint = at(joint);
    args.vectors[0] = at<float>(first_vector);
    args.vectors[1] = at<float>(second_vector);
    args.out = at(out);
    args.state = at(state);
    args.scratch = at<float>(scratch);
    return args;
  }

  CudaAttentionLayerArgs args_{};
  std::int64_t scratch_, state_;
  int device_;
};
#endif

EdgeAttentionInput edge_attention_input(bool gatv2, int dtype, std::int64_t heads, std::int64_t head_width,
                                        std::int64_t edge_width, Address q, std::int64_t q_stride, Address k,
                                        std::int64_t k_stride, Address v, std::int64_t v_stride,
                                        Address q_edge, Address edge, Address att, Address weight,
                                        Address bias, int bias_dtype, double scale, double dropout_p,
                                        std::int64_t seed) {
  return {gatv2,
          {at(q), q_stride},
          {at(k), k_stride},
          {at(v), v_stride},
          at(q_edge),
          at(edge),
          at(att),
          at(weight),
          {at(bias), static_cast<Dtype>(bias_dtype), heads},
          scale,
          make_dropout(dropout_p, seed),
          1 / (1 - dropout_p),
          heads,
          head_width,
          edge_width,
          static_cast<Dtype>(dtype)};
}

void edge_attention(const CsrStructure& structure, const EdgeAttentionInput& input, Address out,
                    Address out_edge, Address lse, Address partial, Address partial_edge,
                    Address partial_state, int device, Address queue) {
  const EdgeAttentionArgs args{structure.a,
                               structure.split,
                               input,
                               at(out),
                               at(out_edge),
                               at(lse),
                               at<float>(partial),
                               at<float>(partial_edge),
                               at<float>(partial_state)};
  FASTSPARSE_RUN(edge_attention, args, device, queue);
}

void edge_attention_backward(const CsrStructure& structure, const CsrStructure& transposed,
                             const EdgeAttentionInput& input, Address out, std::int64_t out_stride,
                             Address grad, std::int64_t grad_stride, Address grad_edge, Address lse,
                             Address work, Address positive, std::int64_t sign_bytes, std::int64_t num_values,
                             Address grad_q, Address grad_k, Address grad_v, Address grad_q_edge,
                             Address grad_features, Address grad_att, Address grad_weight,
                             std::int64_t att_rows, std::int64_t weight_rows, Address partial_q,
                             Address partial_q_edge, Address partial_k, Address partial_v, Address sum_k,
                             Address sum_v, int device, Address queue) {
  const EdgeAttentionBackwardArgs args{structure.a,
                                       structure.split,
                                       transposed.a,
                                       transposed.split,
                                       input,
                                       {at(out), out_stride},
                                       {at(grad), grad_stride},
                                       at(grad_edge),
                                       at(lse),
                                       at(work),
                                       at<std::uint8_t>(positive),
                                       sign_bytes,
                                       num_values,
                                       at(grad_q),
                                       at(grad_k),
                                       at(grad_v),
                                       at(grad_q_edge),
                                       at(grad_features),
                                       at(grad_att),
                                       at(grad_weight),
                                       att_rows,
                                       weight_rows,
                                       at<float>(partial_q),
                                       at<float>(partial_q_edge),
                                       at<float>(partial_k),
                                       at<float>(partial_v),
                                       at(sum_k),
                                       at(sum_v)};
  FASTSPARSE_RUN(edge_attention_backward, args, device, queue);
}

EdgeMessageInput edge_message_input(int message, int dtype, std::int64_t width, std::int64_t edge_width,
                                    Address k, std::int64_t k_stride, Address q, std::int64_t q_stride,
                                    Address v, std::int64_t v_stride, Address edge, std::int64_t edge_stride,
                                    Address weight, Address of_value, Address bias) {
  return {static_cast<EdgeMessage>(message),
          {at(k), k_stride},
          {at(q), q_stride},
          {at(v), v_stride},
          {at(edge), edge_stride},
          at(weight),
          at(of_value),
          at(bias),
          width,
          edge_width,
          static_cast<Dtype>(dtype)};
}

void lay_out_edge_maps(Address weight, std::int64_t weight_stride, Address added, std::int64_t added_stride,
                       Address of_value, std::int64_t of_value_stride, Address bias, std::int64_t given_width,
                       std::int64_t given_edge_width, int dtype, Address out, std::int64_t width,
                       std::int64_t edge_width, int device, Address queue) {
  const EdgeMapsArgs args{{at(weight), weight_stride},
                          {at(added), added_stride},
                          {at(of_value), of_value_stride},
                          at(bias),
                          given_width,
                          given_edge_width,
                          static_cast<Dtype>(dtype),
                          at(out),
                          width,
                          edge_width};
  FASTSPARSE_RUN(lay_out_edge_maps, args, device, queue);
}

void edge_messages(const CsrStructure& structure, const EdgeMessageInput& input, Address out, Address side,
                   Address state, Address positive, std::int64_t sign_bytes, Address root,
                   std::int64_t root_stride, Address eps, Address scale, Address partial,
                   Address partial_side, int device, Address queue) {
  const EdgeMessageArgs args{structure.a,
                             structure.split,
                             input,
                             at(out),
                             at(side),
                             at(state),
                             at<std::uint8_t>(positive),
                             sign_bytes,
                             {at(root), root_stride},
                             at(eps),
                             at(scale),
                             at(partial),
                             at(partial_side)};
  FASTSPARSE_RUN(edge_messages, args, device, queue);
}

EdgeMapGradients edge_map_gradients(Address weight, Address of_value, Address bias, Address features,
                                    std::int64_t width, std::int64_t edge_width, int dtype) {
  return {at(weight), at(of_value), at(bias), at(features), width, edge_width, static_cast<Dtype>(dtype)};
}

void edge_messages_backward(const CsrStructure& structure, const CsrStructure& transposed,
                            const EdgeMessageInput& input, Address grad, std::int64_t grad_stride,
                            Address grad_side, std::int64_t grad_side_stride, Address state,
                            std::int64_t state_stride, Address grad_state, std::int64_t grad_state_stride,
                            Address positive, std::int64_t sign_bytes, Address scale, std::int64_t num_values,
                            Address grad_q, Address grad_v, Address grad_edge, Address grad_features,
                            Address grad_weight, Address grad_of_value, std::int64_t groups,
                            const EdgeMapGradients& maps, Address partial_q, Address partial_v, int device,
                            Address queue) {
  const EdgeMessageBackwardArgs args{structure.a,
                                     structure.split,
                                     transposed.a,
                                     transposed.split,
                                     input,
                                     {at(grad), grad_stride},
                                     {at(grad_side), grad_side_stride},
                                     {at(state), state_stride},
                                     {at(grad_state), grad_state_stride},
                                     at<std::uint8_t>(positive),
                                     sign_bytes,
                                     at(scale),
                                     num_values,
                                     at(grad_q),
                                     at(grad_v),
                                     at(grad_edge),
                                     at(grad_features),
                                     at(grad_weight),
                                     at(grad_of_value),
                                     groups,
                                     maps,
                                     at(partial_q),
                                     at(partial_v)};
  FASTSPARSE_RUN(edge_messages_backward, args, device, queue);
}

MultiAggregateInput multi_aggregate_input(int dtype, std::int64_t width, std::int64_t group_width,
                                          Address x_src, std::int64_t x_src_stride, Address x_dst,
                                          std::int64_t x_dst_stride, Address edge, Address weight,
                                          std::int64_t edge_width,
                                          const std::array<int, kNumAggregations>& slots, int num_slots,
                                          double min_variance) {
  MultiAggregateInput input{{at(x_src), x_src_stride},
                            {at(x_dst), x_dst_stride},
                            at(edge),
                            at(weight),
                            edge_width,
                            width,
                            group_width,
                            {},
                            num_slots,
                            min_variance,
                            static_cast<Dtype>(dtype)};
  std::copy(slots.begin(), slots.end(), input.slot);
  return input;
}

void multi_aggregate(const CsrStructure& structure, const MultiAggregateInput& input, Address out,
                     Address mean, Address ties, Address partial, int device, Address queue) {
  const MultiAggregateArgs args{structure.a, structure.split, input,      at(out),
                                at(mean),    at(ties),        at(partial)};
  FASTSPARSE_RUN(multi_aggregate, args, device, queue);
}

void multi_aggregate_backward(const CsrStructure& structure, const CsrStructure& transposed,
                              const MultiAggregateInput& input, Address out, Address mean, Address ties,
                              Address grad, Address base, Address slope, Address share, Address marks,
                              Address grad_src, Address grad_dst, Address grad_edge, Address grad_weight,
                              std::int64_t weight_parts, std::int64_t num_values, Address partial, int device,
                              Address queue) {
  const MultiAggregateBackwardArgs args{structure.a,
                                        structure.split,
                                        transposed.a,
                                        transposed.split,
                                        input,
                                        at(out),
                                        at(mean),
                                        at(ties),
                                        at(grad),
                                        at(base),
                                        at(slope),
                                        at(share),
                                        at<std::uint8_t>(marks),
                                        at(grad_src),
                                        at(grad_dst),
                                        at(grad_edge),
                                        at(grad_weight),
                                        weight_parts,
                                        num_values,
                                        at(partial)};
  FASTSPARSE_RUN(multi_aggregate_backward, args, device, queue);
}

void ssd_backward(const CsrStructure& transposed, int dtype, Address grad, std::int64_t grad_stride,
                  Address value, int value_dtype, Address ids, bool ids_are_16bit, std::int64_t k,
                  Address scale_dst, Address scale_src, Address out, Address partial, int device,
                  Address queue) {
  const SsdBackwardArgs args{transposed.a,
                             transposed.split,
                             {at(value), static_cast<Dtype>(value_dtype), 1},
                             {at(grad), grad_stride},
                             {at(ids), ids_are_16bit, k},
                             at(scale_dst),
                             at(scale_src),
                             at(out),
                             at(partial),
                             static_cast<Dtype>(dtype)};
  FASTSPARSE_RUN(ssd_backward, args, device, queue);
}

void ssd_value_grad(const CsrStructure& structure, int dtype, Address grad, std::int64_t grad_stride,
                    std::int64_t width, Address kept, Address ids, bool ids_are_16bit, std::int64_t k,
                    Address scale_dst, Address scale_src, Address out, int device, Address queue) {
  const SsdValueGradArgs args{structure.a,
                              structure.split,
                              {at(grad), grad_stride},
                              width,
                              at(kept),
                              {at(ids), ids_are_16bit, k},
                              at(scale_dst),
                              at(scale_src),
                              at(out),
                              static_cast<Dtype>(dtype)};
  FASTSPARSE_RUN(ssd_value_grad, args, device, queue);
}

#ifdef FASTSPARSE_WITH_CUDA
RowPanelsView make_row_panels(Address entry, Address value_id, bool value_id_is_64bit, Address other_source,
                              std::int64_t num_other, Address slices, std::int64_t num_slices, int height,
                              int strip, std::int64_t num_rows, std::int64_t num_cols) {
  return {at<std::uint32_t>(entry),
          at(value_id),
          value_id_is_64bit,
          at<std::int32_t>(other_source),
          num_other,
          at<RowSlice>(slices),
          num_slices,
          height,
          strip,
          num_rows,
          num_cols};
}

void ssd_backward_windows(const RowPanelsView& structure, int dtype, Address grad, std::int64_t grad_stride,
                          std::int64_t width, Address value, int value_dtype, Address ids, bool ids_are_16bit,
                          std::int64_t k, Address scale_dst, Address scale_src, Address sum, Address out,
                          int device, Address queue) {
  const SsdBackwardWindowsArgs args{structure,
                                    {at(value), static_cast<Dtype>(value_dtype), 1},
                                    {at(grad), grad_stride},
                                    width,
                                    {at(ids), ids_are_16bit, k},
                                    at<float>(scale_dst),
                                    at<float>(scale_src),
                                    at<float>(sum),
                                    at(out),
                                    static_cast<Dtype>(dtype)};
  const DeviceGuard guard(device);
  check(cuda::ssd_backward_windows(args, at(queue)), "ssd_backward_windows");
}
#endif

void expand_rows(Address rowptr, std::int64_t num_rows, std::int64_t num_edges, Address row, int device,
                 Address queue) {
  const ExpandRowsArgs args{at<const std::int64_t>(rowptr), num_rows, num_edges, at<std::int32_t>(row)};
  FASTSPARSE_RUN(expand_rows, args, device, queue);
}

void reverse_entries(Address rowptr, Address col, Address edge_id, std::int64_t num_rows,
                     std::int64_t num_edges, Address id_out, bool id_is_64bit, int device, Address queue) {
  const ReverseEntriesArgs args{at<const std::int64_t>(rowptr),
                                at<const std::int32_t>(col),
                                at(edge_id),
                                num_rows,
                                num_edges,
                                at(id_out),
                                id_is_64bit};
  FASTSPARSE_RUN(reverse_entries, args, device, queue);
}

CompressArgs compress_args(Address major, Address minor, bool index_is_64bit, std::int64_t num_edges,
                           std::int64_t num_major, std::int64_t num_minor, bool sort_minor, Address major_ptr,
                           Address minor_out, Address order, bool order_is_64bit) {
  return {at(major),
          at(minor),
          index_is_64bit,
          num_edges,
          num_major,
          num_minor,
          sort_minor,
          at<std::int64_t>(major_ptr),
          at<std::int32_t>(minor_out),
          at(order),
          order_is_64bit};
}

std::size_t compress_scratch_bytes(const CompressArgs& args, int device) {
#ifdef FASTSPARSE_WITH_CUDA
  if (device >= 0) {
    const DeviceGuard guard(device);
    return cuda::compress_scratch_bytes(args);
  }
#endif
  (void)device;
  (void)args;
  return 0;
}

void compress(const CompressArgs& args, Address scratch, std::size_t scratch_bytes, int device,
              Address queue) {
  if (device < 0) {
    py::gil_scoped_release release;
    cpu::compress(args);
    return;
  }
#ifdef FASTSPARSE_WITH_CUDA
  const DeviceGuard guard(device);
  check(cuda::compress(args, at(scratch), scratch_bytes, at(queue)), "compress");
#else
  (void)scratch;
  (void)scratch_bytes;
  (void)queue;
  throw std::runtime_error("fastsparse_core was built without CUDA: see doctor");
#endif
}

// Facts that `inspect` or `sort_edges` wrote, which on CUDA waits for the device.
template <int kCount>
py::tuple read_facts(const std::int64_t* written, int device, Address queue) {
  std::int64_t facts[kCount];
  if (device < 0) std::copy_n(written, kCount, facts);
#ifdef FASTSPARSE_WITH_CUDA
  if (device >= 0) {
    const py::gil_scoped_release release;
    const DeviceGuard guard(device);
    auto* stream = static_cast<cudaStream_t>(at(queue));
    check(cudaMemcpyAsync(facts, written, sizeof facts, cudaMemcpyDeviceToHost, stream), "inspect");
    check(cudaStreamSynchronize(stream), "inspect");
  }
#else
  (void)queue;
#endif
  py::tuple result(static_cast<std::size_t>(kCount));
  for (int fact = 0; fact < kCount; ++fact) result[fact] = facts[fact];
  return result;
}

// Returns the facts; `scratch` is room for them in the device's memory.
py::tuple inspect(Address row, Address col, Address edge_id, bool index_is_64bit, bool edge_id_is_64bit,
                  std::int64_t num_edges, std::int64_t num_rows, bool square, Address rowptr, Address col_out,
                  Address inv_degree, Address slices, Address scratch, int device, Address queue) {
  std::int64_t facts[kNumEdgeFacts];
  const InspectArgs args{at(row),
                         at(col),
                         at(edge_id),
                         index_is_64bit,
                         edge_id_is_64bit,
                         num_edges,
                         num_rows,
                         square,
                         at<std::int64_t>(rowptr),
                         at<std::int32_t>(col_out),
                         at<float>(inv_degree),
                         at<RowSlice>(slices),
                         device < 0 ? facts : at<std::int64_t>(scratch)};
  FASTSPARSE_RUN(inspect, args, device, queue);
  return read_facts<kNumEdgeFacts>(args.facts, device, queue);
}

// Where `sort_edges` finds room on CUDA in one allocation: slices come first.
struct SortRoom {
  Address split_ptr, sums, facts, split_row, scratch, end;

  SortRoom(Address begin, std::int64_t num_edges, std::int64_t num_rows, std::int64_t longest) {
    const std::int64_t most_cut = num_edges / longest;
    split_ptr = begin + (num_rows + most_cut) * sizeof(RowSlice);
    sums = split_ptr + (most_cut + 1) * sizeof(std::int64_t);
    facts = sums + kMostSortBlocks * sizeof(std::uint64_t);
    split_row = facts + kNumSortFacts * sizeof(std::int64_t);
    scratch = split_row + most_cut * sizeof(std::int32_t);
    end = scratch + (num_rows + num_edges) * sizeof(std::int32_t);
  }
};

// Bytes of that room, and where split_ptr and split_row lie in it.
std::tuple<Address, Address, Address> sort_room(std::int64_t num_edges, std::int64_t num_rows,
                                                std::int64_t longest) {
  const SortRoom room(0, num_edges, num_rows, longest);
  return {room.end, room.split_ptr, room.split_row};
}

// The same of few edges, which it sorts.
py::tuple sort_edges(Address row, Address col, bool index_is_64bit, std::int64_t num_edges,
                     std::int64_t num_rows, std::int64_t num_cols, std::int64_t longest, Address rowptr,
                     Address col_out, Address order, Address inv_degree, Address inv_sqrt_degree,
                     Address room, int device, Address queue) {
  std::int64_t facts[kNumSortFacts];
  const SortRoom places(room, num_edges, num_rows, longest);
  const InspectArgs found{at(row),
                          at(col),
                          nullptr,
                          index_is_64bit,
                          false,
                          num_edges,
                          num_rows,
                          num_rows == num_cols,
                          at<std::int64_t>(rowptr),
                          at<std::int32_t>(col_out),
                          at<float>(inv_degree),
                          at<RowSlice>(room),
                          device < 0 ? facts : at<std::int64_t>(places.facts)};
  const SortEdgesArgs args{found,
                           num_cols,
                           longest,
                           at<std::int32_t>(order),
                           at<float>(inv_sqrt_degree),
                           at<std::int64_t>(places.split_ptr),
                           at<std::uint64_t>(places.sums),
                           at<std::int32_t>(places.split_row),
                           at<std::int32_t>(places.scratch)};
  FASTSPARSE_RUN(sort_edges, args, device, queue);
  return read_facts<kNumSortFacts>(found.facts, device, queue);
}

std::size_t round_up(std::size_t bytes, std::size_t step) { return (bytes + step - 1) / step * step; }

CompressArgs transposition(std::int64_t num_rows, std::int64_t num_cols, std::int64_t num_edges, Address row,
                           Address col, Address colptr, Address row_out, Address order) {
  return {at(col),
          at(row),
          false,
          num_edges,
          num_cols,
          num_rows,
          false,
          at<std::int64_t>(colptr),
          at<std::int32_t>(row_out),
          at(order),
          num_edges > std::numeric_limits<std::int32_t>::max()};
}

// Bytes of the positions of a structure's entries, as `transposition` writes them.
std::size_t order_bytes(std::int64_t num_edges) {
  const bool is_64bit = num_edges > std::numeric_limits<std::int32_t>::max();
  return num_edges * (is_64bit ? sizeof(std::int64_t) : sizeof(std::int32_t));
}

// Scratch of `transpose`: the row of every entry, the order where nobody keeps it, and the sort's.
std::size_t transpose_scratch_bytes(std::int64_t num_rows, std::int64_t num_cols, std::int64_t num_edges,
                                    bool keeps_order, int device) {
  const Address any = reinterpret_cast<Address>(&device);
  return round_up(num_edges * sizeof(std::int32_t), 256) +
         (keeps_order || device < 0 ? 0 : round_up(order_bytes(num_edges), 256)) +
         compress_scratch_bytes(transposition(num_rows, num_cols, num_edges, 0, 0, 0, 0, any), device);
}

// Sorts the entries of compressed rows by column, those of a column by row: colptr, row_out, and in `order`
// (0: nobody keeps it) their places before.
void transpose(Address rowptr, Address col, std::int64_t num_rows, std::int64_t num_cols,
               std::int64_t num_edges, Address colptr, Address row_out, Address order, Address scratch,
               std::size_t scratch_bytes, int device, Address queue) {
  expand_rows(rowptr, num_rows, num_edges, scratch, device, queue);
  std::size_t used = round_up(num_edges * sizeof(std::int32_t), 256);
  if (order == 0 && device >= 0) {  // the radix sort carries it along in any case
    order = scratch + used;
    used += round_up(order_bytes(num_edges), 256);
  }
  compress(transposition(num_rows, num_cols, num_edges, scratch, col, colptr, row_out, order), scratch + used,
           scratch_bytes - used, device, queue);
}

void row_signatures(Address rowptr, Address col, std::int64_t num_rows, int column_bits, int num_bands,
                    Address signature, Address keys, int device, Address queue) {
  const RowSignaturesArgs args{
      at<std::int64_t>(rowptr),    at<std::int32_t>(col), num_rows, column_bits, num_bands,
      at<std::uint8_t>(signature), at<std::int32_t>(keys)};
  FASTSPARSE_RUN(row_signatures, args, device, queue);
}

void similar_rows(Address signature, Address order, std::int64_t num_rows, std::int64_t num_bands,
                  Address best, int device, Address queue) {
  const SimilarRowsArgs args{at<std::uint8_t>(signature), at<std::int32_t>(order), num_rows, num_bands,
                             at<std::int64_t>(best)};
  FASTSPARSE_RUN(similar_rows, args, device, queue);
}

void link_rows(Address rowptr, Address best, std::int64_t num_rows, Address root, Address counts, int device,
               Address queue) {
  const LinkRowsArgs args{at<std::int64_t>(rowptr), at<std::int64_t>(best), num_rows, at<std::int32_t>(root),
                          at<std::int64_t>(counts)};
  FASTSPARSE_RUN(link_rows, args, device, queue);
}

#ifdef FASTSPARSE_WITH_CUDA
// A few words of the host's memory that a device can write, and an event of that device. The driver takes
// longer to make them than to sort an index, so they are kept.
struct HostWords {
  std::int64_t* words = nullptr;
  cudaEvent_t event = nullptr;

  static HostWords take(int device) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      auto& kept = of_device(device);
      if (!kept.empty()) {
        const HostWords last = kept.back();
        kept.pop_back();
        return last;
      }
    }
    HostWords made;
    check(cudaHostAlloc(reinterpret_cast<void**>(&made.words), kNumSegmentFacts * sizeof *made.words,
                        cudaHostAllocMapped),
          "cudaHostAlloc");
    check(cudaEventCreateWithFlags(&made.event, cudaEventDisableTiming), "cudaEventCreate");
    return made;
  }
  void keep(int device) const {
    const std::lock_guard<std::mutex> lock(mutex());
    of_device(device).push_back(*this);
  }

 private:
  static std::mutex& mutex() {
    static auto& mutex = *new std::mutex;  // never destroyed: a driver that is gone could not free the memory
    return mutex;
  }
  static std::vector<HostWords>& of_device(int device) {
    static auto& all = *new std::map<int, std::vector<HostWords>>;
    return all[device];
  }
};

// An index that a device sorts: what it finds can be waited for later.
class SegmentSort {
 public:
  SegmentSort(SortSegmentsArgs args, Address scratch, std::size_t scratch_bytes, int device, Address queue)
      : device_(device) {
    const DeviceGuard guard(device);
    auto* stream = static_cast<cudaStream_t>(at(queue));
    cudaStreamCaptureStatus status;
    check(cudaStreamIsCapturing(stream, &status), "sort_segments");
    if (status != cudaStreamCaptureStatusNone) check(cudaErrorStreamCaptureUnsupported, "sort_segments");
    host_ = HostWords::take(device);
    args.host_facts = host_.words;
    check(cuda::sort_segments(args, at(scratch), scratch_bytes, stream), "sort_segments");
    check(cudaEventRecord(host_.event, stream), "sort_segments");
  }
  SegmentSort(SegmentSort&& other) noexcept
      : device_(other.device_), host_(std::exchange(other.host_, HostWords{})) {}
  SegmentSort(const SegmentSort&) = delete;
  ~SegmentSort() {
    // Others must not get words that are yet to be written.
    if (host_.words != nullptr && cudaEventSynchronize(host_.event) == cudaSuccess) host_.keep(device_);
  }

  // Waits for the device.
  py::tuple facts() const {
    {
      const py::gil_scoped_release release;
      check(cudaEventSynchronize(host_.event), "sort_segments");
    }
    return py::make_tuple(host_.words[kCutSegments], host_.words[kSegmentSlots],
                          host_.words[kIndexDescends] != 0, host_.words[kEntriesInRange]);
  }

 private:
  int device_;
  HostWords host_;
};

SegmentSort sort_segments(Address index, bool index_is_64bit, std::int64_t num_rows,
                          std::int64_t num_segments, std::int64_t longest, Address rowptr, Address order,
                          Address slices, Address split_row, Address split_ptr, Address facts,
                          Address scratch, std::size_t scratch_bytes, int device, Address queue) {
  const SortSegmentsArgs args{at(index),
                              index_is_64bit,
                              num_rows,
                              num_segments,
                              longest,
                              at<std::int64_t>(rowptr),
                              at<std::int32_t>(order),
                              at<RowSlice>(slices),
                              at<std::int32_t>(split_row),
                              at<std::int64_t>(split_ptr),
                              at<std::int64_t>(facts),
                              nullptr};
  return SegmentSort(args, scratch, scratch_bytes, device, queue);
}

std::size_t num_segment_sort_bytes(std::int64_t num_rows, std::int64_t num_segments, int device) {
  SortSegmentsArgs args{};
  args.num_rows = num_rows;
  args.num_segments = num_segments;
  const DeviceGuard guard(device);
  return cuda::sort_segments_scratch_bytes(args);
}
#endif

#ifdef FASTSPARSE_WITH_CUDA
void row_split_count(Address rowptr, std::int64_t num_rows, std::int64_t longest, Address counts,
                     Address totals, int device, Address queue) {
  const RowSplitArgs args{at<std::int64_t>(rowptr), num_rows, longest, at<std::int64_t>(counts),
                          at<std::int64_t>(totals), nullptr,  nullptr, nullptr};
  const DeviceGuard guard(device);
  check(cuda::row_split_count(args, at(queue)), "row_split_count");
}

void row_split_fill(Address rowptr, std::int64_t num_rows, std::int64_t longest, Address counts,
                    Address slices, Address split_row, Address split_ptr, int device, Address queue) {
  const RowSplitArgs args{at<std::int64_t>(rowptr),
                          num_rows,
                          longest,
                          at<std::int64_t>(counts),
                          nullptr,
                          at<RowSlice>(slices),
                          at<std::int32_t>(split_row),
                          at<std::int64_t>(split_ptr)};
  const DeviceGuard guard(device);
  check(cuda::row_split_fill(args, at(queue)), "row_split_fill");
}
#endif

void maxk(int dtype, std::int64_t num_rows, std::int64_t width, std::int64_t k, Address x,
          std::int64_t x_stride, Address values, Address ids, int device, Address queue) {
  const MaxkArgs args{{at(x), x_stride},        at(values), at(ids), nullptr, nullptr, num_rows, width, k,
                      static_cast<Dtype>(dtype)};
  FASTSPARSE_RUN(maxk, args, device, queue);
}

void maxk_dense(int dtype, std::int64_t num_rows, std::int64_t width, std::int64_t k, Address x,
                std::int64_t x_stride, Address out, Address kept, int device, Address queue) {
  const MaxkArgs args{{at(x), x_stride},        nullptr,  nullptr, at(out),
                      at<std::uint32_t>(kept),  num_rows, width,   k,
                      static_cast<Dtype>(dtype)};
  FASTSPARSE_RUN(maxk, args, device, queue);
}

void mask_rows(int dtype, std::int64_t num_rows, std::int64_t width, Address dense, std::int64_t dense_stride,
               Address kept, Address out, int device, Address queue) {
  const MaskRowsArgs args{{at(dense), dense_stride}, at<std::uint32_t>(kept), at(out), num_rows, width,
                          static_cast<Dtype>(dtype)};
  FASTSPARSE_RUN(mask_rows, args, device, queue);
}

void cbsr_to_dense(int dtype, std::int64_t num_rows, std::int64_t width, std::int64_t k, Address values,
                   Address ids, Address out, int device, Address queue) {
  const CbsrToDenseArgs args{at(values), at(ids), at(out), num_rows, width, k, static_cast<Dtype>(dtype)};
  FASTSPARSE_RUN(cbsr_to_dense, args, device, queue);
}

void cbsr_gather(int dtype, std::int64_t num_rows, std::int64_t width, std::int64_t k, Address dense,
                 std::int64_t dense_stride, Address ids, Address out, int device, Address queue) {
  const CbsrGatherArgs args{{at(dense), dense_stride}, at(ids), at(out), num_rows, width, k,
                            static_cast<Dtype>(dtype)};
  FASTSPARSE_RUN(cbsr_gather, args, device, queue);
}

void ssd(const CsrStructure& structure, int dtype, std::int64_t width, std::int64_t k, Address values,
         Address ids, Address value, int value_dtype, Address scale_dst, Address scale_src, Address bias,
         Address out, Address partial, Address packed, int longest_group, std::int64_t num_long,
         bool few_entries, int device, Address queue) {
  const SsdArgs args{structure.a,
                     structure.split,
                     longest_group,
                     num_long,
                     few_entries,
                     {at(value), static_cast<Dtype>(value_dtype), 1},
                     at(values),
                     at(ids),
                     at(scale_dst),
                     at(scale_src),
                     at(bias),
                     at(out),
                     at(partial),
                     at(packed),
                     width,
                     k,
                     static_cast<Dtype>(dtype)};
  FASTSPARSE_RUN(ssd, args, device, queue);
}

#ifdef FASTSPARSE_WITH_CUDA
void ssd_slots(const CsrStructure& structure, int dtype, std::int64_t width, std::int64_t k, Address values,
               Address ids, Address value, int value_dtype, Address scale_src, Address sum, int slots,
               bool update_mode, bool coupled, int device, Address queue) {
  const SsdSlotsArgs args{structure.a,
                          structure.split,
                          {at(value), static_cast<Dtype>(value_dtype), 1},
                          at(values),
                          at(ids),
                          at(scale_src),
                          at<float>(sum),
                          slots,
                          update_mode,
                          coupled,
                          width,
                          k,
                          static_cast<Dtype>(dtype)};
  const DeviceGuard guard(device);
  check(cuda::ssd_slots(args, at(queue)), "ssd_slots");
}
#endif

NodeList make_node_list(Address node, Address seed, std::int64_t num_nodes, std::int64_t first_place,
                        std::int32_t type) {
  return {at<std::int64_t>(node), at<std::int32_t>(seed), num_nodes, first_place, type};
}

FirstNodes make_first_nodes(const NodeList& list, std::int64_t count, Address count_out) {
  return {list, count, at<std::int64_t>(count_out)};
}

// The addresses come in the order of SampleStep: sizes, outputs, scratch.
SampleStep make_sample_step(const CsrStructure& structure, Address weight, Address weight_sum,
                            std::int64_t fanout, bool replace, bool induced, std::uint32_t number,
                            const NodeList& dst, const NodeList& src,
                            const std::tuple<Address, Address, Address, Address, Address, Address>& sizes,
                            const std::tuple<Address, Address, Address>& edges, std::int64_t most_rows,
                            std::int64_t most_slots,
                            const std::tuple<Address, Address, Address, Address>& scratch) {
  const auto size = [](Address address) { return at<std::int64_t>(address); };
  return {structure.a,
          at<const float>(weight),
          at<const double>(weight_sum),
          fanout,
          replace,
          induced,
          number,
          dst,
          src,
          size(std::get<0>(sizes)),
          size(std::get<1>(sizes)),
          size(std::get<2>(sizes)),
          size(std::get<3>(sizes)),
          size(std::get<4>(sizes)),
          size(std::get<5>(sizes)),
          at<std::uint32_t>(std::get<0>(edges)),
          at<std::int32_t>(std::get<1>(edges)),
          at<std::int64_t>(std::get<2>(edges)),
          most_rows,
          most_slots,
          at<std::int64_t>(std::get<0>(scratch)),
          at<std::uint32_t>(std::get<1>(scratch)),
          at<std::int64_t>(std::get<2>(scratch)),
          at<std::uint64_t>(std::get<3>(scratch))};
}

NodeTable make_node_table(Address key, Address value, std::int64_t num_places, int bits) {
  return {at<std::uint64_t>(key), at<std::uint32_t>(value), num_places, bits};
}

void sample_neighbors(const NodeTable& table, Address sizes, std::int64_t num_sizes, std::uint64_t seed,
                      const std::vector<FirstNodes>& first_nodes, const std::vector<SampleStep>& steps,
                      int device, Address queue) {
  const SampleArgs args{table,
                        at<std::int64_t>(sizes),
                        num_sizes,
                        seed,
                        first_nodes.data(),
                        static_cast<int>(first_nodes.size()),
                        steps.data(),
                        static_cast<int>(steps.size())};
  FASTSPARSE_RUN(sample_neighbors, args, device, queue);
}

void emit_edges(const NodeTable& table, Address place, Address row, Address edge_id, std::int64_t num_edges,
                Address edge_index, Address col, Address edge_id_out, int device, Address queue) {
  const EmitEdgesArgs args{
      table,     at<const std::uint32_t>(place), at<const std::int32_t>(row), at<const std::int64_t>(edge_id),
      num_edges, at<std::int64_t>(edge_index),   at<std::int32_t>(col),       at<std::int64_t>(edge_id_out)};
  FASTSPARSE_RUN(emit_edges, args, device, queue);
}

void emit_rows(Address row, std::int64_t num_edges, std::int64_t num_rows, Address rowptr, Address inv_degree,
               Address slices, int device, Address queue) {
  const EmitRowsArgs args{
      at<const std::int64_t>(row), num_edges,           num_rows, at<std::int64_t>(rowptr),
      at<float>(inv_degree),       at<RowSlice>(slices)};
  FASTSPARSE_RUN(emit_rows, args, device, queue);
}

using Hops = std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>;

HopRows hop_rows(const Hops& hops) {
  const auto& [start, end] = hops;
  if (end.size() > kMostHops || start.size() != end.size() + 1) {
    throw std::invalid_argument("place_batch: expected at most " + std::to_string(kMostHops) + " hops");
  }
  HopRows rows{static_cast<int>(end.size()), {}, {}};
  std::copy(start.begin(), start.end(), rows.start);
  std::copy(end.begin(), end.end(), rows.end);
  return rows;
}

// Hops: where they begin in the memory, where they end in the batch. Ends of edges: edge_index, where it
// comes to lie, edges of padding, whether indices have 64 bits. Marks: masks and ends of nodes, of edges.
// Tensors: address, where it comes to lie, rows there, bytes of a row, whether they are of edges, whether
// there are none.
void place_batch(
    const Hops& nodes, const Hops& edges, const Hops& sources, const Hops& targets,
    const std::tuple<Address, Address, Address, bool>& ends, const std::array<Address, 4>& marks,
    const std::vector<std::tuple<Address, Address, std::int64_t, std::int64_t, bool, bool>>& tensors,
    int device, Address queue) {
  PlaceBatchArgs args{};
  args.nodes = hop_rows(nodes);
  args.edges = hop_rows(edges);
  args.sources = hop_rows(sources);
  args.targets = hop_rows(targets);
  args.node_mask = at<bool>(marks[0]);
  args.edge_mask = at<bool>(marks[1]);
  args.node_ends = at<float>(marks[2]);
  args.edge_ends = at<float>(marks[3]);
  args.edge_index = at(std::get<0>(ends));
  args.edge_index_out = at(std::get<1>(ends));
  args.padding = at<const std::int64_t>(std::get<2>(ends));
  args.edge_index_is_64bit = std::get<3>(ends);
  std::size_t done = 0;
  do {
    args.num_tensors = 0;
    for (; done < tensors.size() && args.num_tensors < kMostPlaced; ++done) {
      const auto& [from, to, num_rows, row_bytes, is_of_edges, is_empty] = tensors[done];
      args.tensor[args.num_tensors++] = {at(from), at(to), num_rows, row_bytes, is_of_edges, is_empty};
    }
    FASTSPARSE_RUN(place_batch, args, device, queue);
    args.edge_index_out = nullptr;
  } while (done < tensors.size());
}

// Rows that the host's threads gather: into its memory; or, with a device, through page-locked memory for all
// of them, from where every piece is sent as soon as it is full.
void gather_rows_of_host(Address table, Address index, Address staging, Address out, std::int64_t num_rows,
                         std::int64_t row_bytes, int threads, std::int64_t piece, int device, Address queue) {
  const bool sends = device >= 0;
  const GatherRowsArgs args{
      at(table), at<const std::int64_t>(index), at(sends ? staging : out), num_rows, row_bytes, row_bytes};
  const py::gil_scoped_release release;
  if (!sends) {
    cpu::gather_rows(args, threads, piece, false, nullptr);
    return;
  }
#ifdef FASTSPARSE_WITH_CUDA
  const DeviceGuard guard(device);
  std::atomic<int> code{0};
  cpu::gather_rows(args, threads, piece, true, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t begin = first * row_bytes;
    const int found =
        cuda::send(at<char>(out) + begin, at<char>(staging) + begin, (last - first) * row_bytes, at(queue));
    if (found != 0) code = found;
  });
  check(code, "gather_rows_of_host");
#else
  (void)queue;
  throw std::runtime_error("gather_rows_of_host: this build has no CUDA half");
#endif
}

#ifdef FASTSPARSE_WITH_CUDA
void gather_rows(Address table, Address index, Address out, std::int64_t num_rows, std::int64_t row_bytes,
                 std::int64_t out_row_bytes, int device, Address queue) {
  const GatherRowsArgs args{at(table),    at<const std::int64_t>(index), at(out), num_rows, row_bytes,
                            out_row_bytes};
  const DeviceGuard guard(device);
  check(cuda::gather_rows(args, at(queue)), "gather_rows");
}
#endif

void prefer_huge_pages(Address out, std::int64_t bytes, bool collapse) {
  cpu::prefer_huge_pages(at(out), bytes, collapse);
}

py::dict build_info() {
  py::dict info;
#ifdef FASTSPARSE_WITH_CUDA
  info["cuda"] = true;
  info["cuda_archs"] = FASTSPARSE_CUDA_ARCHS;
#else
  info["cuda"] = false;
  info["cuda_archs"] = "";
#endif
#ifdef _OPENMP
  info["openmp"] = true;
#else
  info["openmp"] = false;
#endif
#ifdef __VERSION__
  info["compiler"] = __VERSION__;
#else
  info["compiler"] = "unknown";
#endif
  return info;
}

// pybind11's `def` makes a tuple of converters for every signature, which was half of this file's
// compilation, and goes through a dispatcher at every call. Functions whose arguments have no names need
// neither: these are Python's own, and pybind11 converts only structures and containers.

std::int64_t to_signed(PyObject* object, std::int64_t least, std::int64_t most) {
  const long long number = PyLong_AsLongLong(object);
  if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (number < least || number > most) throw py::type_error("a number is too large for its argument");
  return number;
}

std::uint64_t to_unsigned(PyObject* object, std::uint64_t most) {
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(object));
  const unsigned long long value = number ? PyLong_AsUnsignedLongLong(number.ptr()) : 0;
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (value > most) throw py::type_error("a number is too large for its argument");
  return value;
}

double to_double(PyObject* object) {
  const double number = PyFloat_AsDouble(object);
  if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return number;
}

bool to_bool(PyObject* object) {
  const int truth = object == Py_True ? 1 : object == Py_False ? 0 : PyObject_IsTrue(object);
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

[[noreturn]] void throw_wrong_type(PyObject* object) {
  throw py::type_error(std::string("an argument is a ") + Py_TYPE(object)->tp_name +
                       ", not what is expected");
}

template <typename T>
constexpr bool kIsStructure = std::is_base_of_v<py::detail::type_caster_generic, py::detail::make_caster<T>>;

template <typename T>
T* structure_in(PyObject* object) {
  py::detail::type_caster_base<T> caster;
  if (!caster.load(object, false)) throw_wrong_type(object);
  return static_cast<T*>(caster);
}

// What a parameter of type P gets: structures by reference, anything else by value.
template <typename P>
decltype(auto) argument(PyObject* object) {
  using T = std::remove_cv_t<std::remove_reference_t<P>>;
  using Limits = std::numeric_limits<T>;
  if constexpr (std::is_same_v<T, bool>) {
    return to_bool(object);
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(to_double(object));
  } else if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
    return static_cast<T>(to_signed(object, Limits::min(), Limits::max()));
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(to_unsigned(object, Limits::max()));
  } else if constexpr (std::is_pointer_v<T>) {
    using Target = std::remove_cv_t<std::remove_pointer_t<T>>;
    return object == Py_None ? nullptr : structure_in<Target>(object);
  } else if constexpr (kIsStructure<T>) {
    return static_cast<const T&>(*structure_in<T>(object));
  } else {
    try {
      return py::cast<T>(py::handle(object));
    } catch (const py::cast_error&) {
      throw_wrong_type(object);
    }
  }
}

using Body = PyObject* (*)(PyObject* self, PyObject* const* arguments);

// Runs `body`, with exceptions as Python's.
PyObject* run_body(Body body, PyObject* self, PyObject* const* arguments, Py_ssize_t count,
                   std::size_t expected) {
  try {
    if (static_cast<std::size_t>(count) == expected) return body(self, arguments);
    PyErr_Format(PyExc_TypeError, "expected %zu arguments, got %zd", expected, count);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// kFunction as Python calls it, and as the constructor of what it returns.
template <auto kFunction>
struct Call;

template <typename R, typename... P, R (*kFunction)(P...)>
struct Call<kFunction> {
  template <std::size_t... kAt>
  static R with(PyObject* const* arguments, std::index_sequence<kAt...>) {
    return kFunction(argument<P>(arguments[kAt])...);
  }
  static R with(PyObject* const* arguments) { return with(arguments, std::index_sequence_for<P...>{}); }

  static PyObject* body(PyObject*, PyObject* const* arguments) {
    if constexpr (std::is_void_v<R>) {
      with(arguments);
      return Py_NewRef(Py_None);
    } else {
      return py::detail::make_caster<R>::cast(with(arguments), py::return_value_policy::move, {}).ptr();
    }
  }
  static PyObject* run(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return run_body(body, self, arguments, count, sizeof...(P));
  }

  static R construct(const py::args& arguments) {
    if (arguments.size() != sizeof...(P)) {
      throw py::type_error("expected " + std::to_string(sizeof...(P)) + " arguments, got " +
                           std::to_string(arguments.size()));
    }
    return with(PySequence_Fast_ITEMS(arguments.ptr()));
  }
};

// A method of C.
template <typename C, typename... P, void (C::*kMethod)(P...) const>
struct Call<kMethod> {
  template <std::size_t... kAt>
  static void with(const C& self, PyObject* const* arguments, std::index_sequence<kAt...>) {
    (self.*kMethod)(argument<P>(arguments[kAt])...);
  }
  static PyObject* body(PyObject* self, PyObject* const* arguments) {
    with(*structure_in<C>(self), arguments, std::index_sequence_for<P...>{});
    return Py_NewRef(Py_None);
  }
  static PyObject* run(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return run_body(body, self, arguments, count, sizeof...(P));
  }
};

// T's constructor as a function.
template <typename T, typename... P>
T make(P... arguments) {
  return T(arguments...);
}

template <auto kFunction>
PyMethodDef described(const char* name) {
  const auto run = reinterpret_cast<void (*)()>(&Call<kFunction>::run);
  return {name, reinterpret_cast<PyCFunction>(run), METH_FASTCALL, nullptr};
}

template <auto kFunction>
void define(py::module_& m, const char* name) {
  static PyMethodDef method = described<kFunction>(name);
  m.attr(name) =
      py::reinterpret_steal<py::object>(PyCFunction_NewEx(&method, nullptr, m.attr("__name__").ptr()));
}

template <auto kMethod>
void define_method(py::handle type, const char* name) {
  static PyMethodDef method = described<kMethod>(name);
  auto* of = reinterpret_cast<PyTypeObject*>(type.ptr());
  py::setattr(type, name, py::reinterpret_steal<py::object>(PyDescr_NewMethod(of, &method)));
}

// The class of what kMake returns.
template <auto kMake>
auto define_structure(py::module_& m, const char* name) {
  using T = decltype(Call<kMake>::construct(std::declval<py::args>()));
  return py::class_<T>(m, name).def(py::init(&Call<kMake>::construct));
}

}  // namespace
}  // namespace fastsparse

PYBIND11_MODULE(_C, m) {
  using namespace fastsparse;
  m.doc() = "Torch-free kernels of FastSparse; fastsparse_core.ops is the checked interface.";
  define_structure<&make_structure>(m, "CsrStructure");
  define_structure<&compress_args>(m, "CompressArgs");
  define<&compress_scratch_bytes>(m, "compress_scratch_bytes");
  define<&compress>(m, "compress");
  define<&expand_rows>(m, "expand_rows");
  define<&reverse_entries>(m, "reverse_entries");
  define<&inspect>(m, "inspect");
  define<&sort_edges>(m, "sort_edges");
  define<&sort_room>(m, "sort_room");
  m.attr("FEW_EDGES") = kFewEdges;
  define<&transpose_scratch_bytes>(m, "transpose_scratch_bytes");
  define<&transpose>(m, "transpose");
  m.attr("HASHES") = kHashes;
  m.attr("KEY_BITS") = kKeyBits;
  define<&row_signatures>(m, "row_signatures");
  define<&similar_rows>(m, "similar_rows");
  define<&link_rows>(m, "link_rows");
  py::enum_<SpmmKernel>(m, "SpmmKernel")
      .value("csr", SpmmKernel::kCsr)
      .value("tca", SpmmKernel::kTca)
      .value("resident", SpmmKernel::kResident)
      .value("resident_tca", SpmmKernel::kResidentTca)
      .value("hr", SpmmKernel::kHr);
  const auto plan = define_structure<&make<SpmmPlan, SpmmKernel, const CsrStructure&, int, std::int64_t, int,
                                           std::int64_t, std::int64_t, std::int64_t, int>>(m, "SpmmPlan");
  define_method<&SpmmPlan::run>(plan, "run");
  define<&spmm_csr_transposed>(m, "spmm_csr_transposed");
#ifdef FASTSPARSE_WITH_CUDA
  define<&cuda::num_row_split_counts>(m, "num_row_split_counts");
  define<&row_split_count>(m, "row_split_count");
  define<&row_split_fill>(m, "row_split_fill");
  define<&num_segment_sort_bytes>(m, "num_segment_sort_bytes");
  define_structure<&sort_segments>(m, "SegmentSort").def("facts", &SegmentSort::facts);
  m.attr("NUM_SEGMENT_FACTS") = static_cast<int>(kNumSegmentFacts);
  define_structure<&make_bsb>(m, "BsbStructure");
  define<&spmm_bsb>(m, "spmm_bsb");
  define<&head_outer>(m, "head_outer");
  define<&sum_of_rows>(m, "sum_of_rows");
  define<&batch_norm>(m, "batch_norm");
  define<&batch_norm_backward>(m, "batch_norm_backward");
  define<&aggregate_linear>(m, "aggregate_linear");
  define<&aggregate_linear_backward>(m, "aggregate_linear_backward");
  define<&cuda::num_hybrid_rows_counts>(m, "num_hybrid_rows_counts");
  define<&hybrid_rows>(m, "hybrid_rows");
  define_structure<&attention_bsb_input>(m, "AttentionBsbInput");
  define<&attention_bsb>(m, "attention_bsb");
  define<&attention_bsb_backward>(m, "attention_bsb_backward");
  define_structure<&additive_input>(m, "AdditiveAttentionInput");
  define<&additive_attention>(m, "additive_attention");
  define<&additive_attention_backward>(m, "additive_attention_backward");
  define<&stack_maps>(m, "stack_maps");
  auto cuda_layer = define_structure<
      &make<CudaAttentionLayer, const CsrStructure*, const CsrStructure*, const BsbView*, const BsbView*,
            std::int64_t, std::int64_t, std::int64_t, std::int64_t, int, int, std::int64_t, std::int64_t,
            std::int64_t, std::int64_t, float, std::int64_t, bool, int>>(m, "CudaAttentionLayer");
  cuda_layer.def_property_readonly("scratch", &CudaAttentionLayer::scratch)
      .def_property_readonly("state", &CudaAttentionLayer::state)
      .def_property_readonly("on_blocks", &CudaAttentionLayer::on_blocks);
  define_method<&CudaAttentionLayer::forward>(cuda_layer, "forward");
  define_method<&CudaAttentionLayer::backward>(cuda_layer, "backward");
  define_structure<&gatv2_input>(m, "Gatv2AttentionInput");
  define<&gatv2_attention>(m, "gatv2_attention");
  define<&gatv2_attention_backward>(m, "gatv2_attention_backward");
  define<&sddmm_bsb>(m, "sddmm_bsb");
#endif
  define<&prefer_huge_pages>(m, "prefer_huge_pages");
  define<&spmm_extremum>(m, "spmm_extremum");
  define<&spmm_extremum_backward>(m, "spmm_extremum_backward");
  define<&sddmm_csr>(m, "sddmm_csr");
  define<&edge_softmax>(m, "edge_softmax");
  define<&segment_reduce>(m, "segment_reduce");
  define_structure<&attention_csr_args>(m, "AttentionCsrArgs");
  define<&attention_csr>(m, "attention_csr");
  define<&attention_csr_backward>(m, "attention_csr_backward");
  define_structure<&head_scores_args>(m, "HeadScoresArgs");
  define<&head_scores>(m, "head_scores");
  define<&head_scores_backward>(m, "head_scores_backward");
  const auto layer = define_structure<
      &make<AttentionLayer, const CsrStructure&, int, int, std::int64_t, std::int64_t, std::int64_t, double>>(
      m, "AttentionLayer");
  define_method<&AttentionLayer::forward>(layer, "forward");
  define_method<&AttentionLayer::backward>(layer, "backward");
  define_structure<&edge_attention_input>(m, "EdgeAttentionInput");
  define<&edge_attention>(m, "edge_attention");
  define<&edge_attention_backward>(m, "edge_attention_backward");
  define_structure<&edge_message_input>(m, "EdgeMessageInput");
  define_structure<&edge_map_gradients>(m, "EdgeMapGradients");
  define<&lay_out_edge_maps>(m, "lay_out_edge_maps");
  define<&edge_messages>(m, "edge_messages");
  define<&edge_messages_backward>(m, "edge_messages_backward");
  define_structure<&multi_aggregate_input>(m, "MultiAggregateInput");
  define<&multi_aggregate>(m, "multi_aggregate");
  define<&multi_aggregate_backward>(m, "multi_aggregate_backward");
  define<&maxk>(m, "maxk");
  define<&maxk_dense>(m, "maxk_dense");
  define<&mask_rows>(m, "mask_rows");
  define<&cbsr_to_dense>(m, "cbsr_to_dense");
  define<&cbsr_gather>(m, "cbsr_gather");
  define<&ssd>(m, "ssd");
  define<&ssd_backward>(m, "ssd_backward");
  define<&ssd_value_grad>(m, "ssd_value_grad");
#ifdef FASTSPARSE_WITH_CUDA
  define<&ssd_slots>(m, "ssd_slots");
  define_structure<&make_row_panels>(m, "RowPanelsStructure");
  define<&ssd_backward_windows>(m, "ssd_backward_windows");
#endif
  define_structure<&make_node_list>(m, "NodeList");
  define_structure<&make_first_nodes>(m, "FirstNodes");
  define_structure<&make_node_table>(m, "NodeTable");
  define_structure<&make_sample_step>(m, "SampleStep");
  define<&sample_neighbors>(m, "sample_neighbors");
  define<&emit_edges>(m, "emit_edges");
  define<&emit_rows>(m, "emit_rows");
  define<&place_batch>(m, "place_batch");
  define<&gather_rows_of_host>(m, "gather_rows_of_host");
#ifdef FASTSPARSE_WITH_CUDA
  define<&gather_rows>(m, "gather_rows");
#endif
  define<&build_info>(m, "build_info");
}
