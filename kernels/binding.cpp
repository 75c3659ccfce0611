// The only file that knows pybind11. Tensors become addresses and strides here; Python has checked them.
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
#include "fastsparse/gather_graphs.h"
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

// Of a tensor's memory, or a stream: a pointer to whatever takes it. Python gives the tensor, None where
// there is none, or a number.
struct Address {
  std::uintptr_t value = 0;

  template <typename T>
  operator T*() const {
    return reinterpret_cast<T*>(value);
  }
  explicit operator bool() const { return value != 0; }
  Address operator+(std::uintptr_t bytes) const { return {value + bytes}; }
};

Address address_of(PyObject* object);

}  // namespace fastsparse

// Addresses within tuples and lists.
template <>
struct pybind11::detail::type_caster<fastsparse::Address> {
  PYBIND11_TYPE_CASTER(fastsparse::Address, const_name("int"));
  bool load(handle source, bool) {
    value = fastsparse::address_of(source.ptr());
    return true;
  }
  static handle cast(fastsparse::Address address, return_value_policy policy, handle parent) {
    return make_caster<std::uintptr_t>::cast(address.value, policy, parent);
  }
};

namespace fastsparse {
namespace {

// A structure as the kernels see it, made once per Adjacency so that calls stay short.
struct CsrStructure {
  CsrView a;
  RowSplitView split;
};

CsrStructure make_structure(Address rowptr, Address col, Address edge_id, bool edge_id_is_64bit,
                            std::int64_t num_rows, std::int64_t num_cols, std::int64_t num_edges,
                            Address slices, std::int64_t num_slices, Address split_row, Address split_ptr,
                            std::int64_t num_split_rows) {
  return {{rowptr, col, edge_id, edge_id_is_64bit, num_rows, num_cols, num_edges},
          {slices, num_slices, split_row, split_ptr, num_split_rows}};
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
#define FASTSPARSE_RUN_CUDA(op, args, device, queue) \
  do {                                               \
    const DeviceGuard guard(device);                 \
    check(cuda::op(args, queue), #op);               \
  } while (false)
#define FASTSPARSE_RUN(op, args, device, queue)     \
  do {                                              \
    if ((device) < 0) {                             \
      py::gil_scoped_release release;               \
      cpu::op(args, static_cast<int>(queue.value)); \
    } else {                                        \
      FASTSPARSE_RUN_CUDA(op, args, device, queue); \
    }                                               \
  } while (false)
#else
#define FASTSPARSE_RUN(op, args, device, queue)                                                        \
  do {                                                                                                 \
    if ((device) >= 0) throw std::runtime_error("fastsparse_core was built without CUDA: see doctor"); \
    py::gil_scoped_release release;                                                                    \
    cpu::op(args, static_cast<int>(queue.value));                                                      \
  } while (false)
#endif

// A matrix whose stride Python gives beside it.
struct AddressAndStride : DenseView {};

// A matrix with what else a tensor says of it.
struct Matrix : DenseView {
  Dtype dtype;
  std::int64_t rows, width;
};

// Values of edges with one head.
struct OneHead : EdgeValueView {};

enum class SpmmKernel { kCsr, kTca, kResident, kResidentTca, kHr };

// A kernel of spmm that reads CSR, and what calls of one dtype and width share, so that they pass little.
class SpmmPlan {
 public:
  SpmmPlan(SpmmKernel kernel, const CsrStructure& structure, Dtype dtype, std::int64_t width,
           Dtype value_dtype, std::int64_t heads, std::int64_t tile, std::int64_t num_long, int device)
      : kernel_(kernel), num_long_(num_long), device_(device) {
    args_.a = structure.a;
    args_.split = structure.split;
    args_.value = {nullptr, value_dtype, heads};
    args_.width = width;
    args_.tile = tile;
    args_.dtype = dtype;
  }

  void run(DenseView x, Address value, Address scale_dst, Address scale_src, Address loop, Address bias,
           bool relu, Address out, Address partial, Address queue) const {
    SpmmArgs args = args_;
    args.value.data = value;
    args.x = x;
    args.scale_dst = scale_dst;
    args.scale_src = scale_src;
    args.loop = loop;
    args.bias = bias;
    args.relu = relu;
    args.out = out;
    args.partial = partial;
    if (kernel_ == SpmmKernel::kCsr) {
      FASTSPARSE_RUN(spmm_csr, args, device_, queue);
      return;
    }
#ifdef FASTSPARSE_WITH_CUDA
    const DeviceGuard guard(device_);
    if (kernel_ == SpmmKernel::kTca) {
      check(cuda::spmm_tca(args, queue), "spmm_tca");
    } else if (kernel_ == SpmmKernel::kHr) {
      check(cuda::spmm_hr(args, num_long_, queue), "spmm_hr");
    } else {
      check(cuda::spmm_resident(args, kernel_ == SpmmKernel::kResidentTca, queue), "spmm_resident");
    }
#endif
  }

 private:
  SpmmArgs args_{};
  SpmmKernel kernel_;
  std::int64_t num_long_;
  int device_;
};

void spmm_csr_transposed(const CsrStructure& structure, Matrix x, OneHead value, Address scale_dst,
                         Address scale_src, Address sum, std::int64_t num_given, Address count, Address out,
                         int device, Address queue) {
  const SpmmTransposedArgs args{structure.a, structure.split, value, x,   scale_dst, scale_src,
                                sum,         num_given,       count, out, x.width,   x.dtype};
  FASTSPARSE_RUN(spmm_csr_transposed, args, device, queue);
}

#ifdef FASTSPARSE_WITH_CUDA
void sum_of_rows(Matrix rows, Address partial, std::int64_t num_parts, Address out, Dtype out_dtype,
                 int device, Address queue) {
  const SumOfRowsArgs args{rows.data, rows.rows, rows.width, rows.stride, partial,
                           num_parts, out,       rows.dtype, out_dtype};
  FASTSPARSE_RUN_CUDA(sum_of_rows, args, device, queue);
}

void weight_gradient(Matrix grad, Matrix x, std::int64_t x_column_stride, std::int64_t num_parts,
                     std::int64_t part_width, DenseView out, std::int64_t out_column_stride, Dtype out_dtype,
                     int device, Address queue) {
  const WeightGradientArgs args{
      grad.data,  grad.stride,       x.data,    x.stride,   x_column_stride,
      x.rows,     x.width,           num_parts, part_width, const_cast<void*>(out.data),
      out.stride, out_column_stride, x.dtype,   out_dtype};
  FASTSPARSE_RUN_CUDA(weight_gradient, args, device, queue);
}

cuda::MaskedRows masked_rows(const Matrix& x, Address mask, Address count, Address partial,
                             std::int64_t num_parts) {
  return {x.data, x.rows, x.width, x.dtype, mask, count, partial, num_parts};
}

void batch_norm(Matrix x, Address mask, Address count, Address partial, std::int64_t num_parts,
                Address weight, Address bias, Address running_mean, Address running_var, float momentum,
                float eps, Address out, Address mean, Address inverse, int device, Address queue) {
  const auto rows = masked_rows(x, mask, count, partial, num_parts);
  const cuda::BatchNormArgs args{rows,     weight, bias, running_mean, running_var,
                                 momentum, eps,    out,  mean,         inverse};
  FASTSPARSE_RUN_CUDA(batch_norm, args, device, queue);
}

void batch_norm_backward(Matrix x, Address mask, Address count, Address partial, std::int64_t num_parts,
                         Address grad, Address weight, Address mean, Address inverse, Address out,
                         Address grad_weight, Address grad_bias, int device, Address queue) {
  const auto rows = masked_rows(x, mask, count, partial, num_parts);
  const cuda::BatchNormBackwardArgs args{rows, grad, weight, mean, inverse, out, grad_weight, grad_bias};
  FASTSPARSE_RUN_CUDA(batch_norm_backward, args, device, queue);
}

void aggregate_linear(const CsrStructure& structure, bool sums_given, Address scale_dst, Matrix x,
                      Matrix weight, Address root_weight, Address bias, Address sums, Address out,
                      int num_terms, int device, Address queue) {
  const AggregateLinearArgs args{
      structure.a, sums_given, scale_dst, x,   static_cast<const float*>(weight.data),
      root_weight, bias,       sums,      out, x.width,
      weight.rows, num_terms};
  FASTSPARSE_RUN_CUDA(aggregate_linear, args, device, queue);
}

void aggregate_linear_backward(std::int64_t num_rows, Address grad, std::int64_t out_width, Address sums,
                               DenseView x, std::int64_t width, std::int64_t num_slabs, Address weights,
                               Address bias, Address grad_weight, Address grad_root, Address grad_bias,
                               int num_terms, int device, Address queue) {
  const AggregateLinearBackwardArgs args{grad,     sums,      x,     weights,   bias,
                                         num_rows, num_slabs, width, out_width, num_terms};
  const SlabSumsArgs sums_args{args.weights, args.bias, grad_weight,       grad_root,
                               grad_bias,    num_slabs, out_width * width, bias ? out_width : 0};
  FASTSPARSE_RUN_CUDA(aggregate_linear_backward, args, device, queue);
  FASTSPARSE_RUN_CUDA(slab_sums, sums_args, device, queue);
}

void head_outer(Matrix x, DenseView y, Address x_edge, Address y_edge, std::int64_t heads,
                std::int64_t edge_width, Address partial, std::int64_t num_parts, int device, Address queue) {
  const HeadOuterArgs args{x.data, x.stride,        y.data,     y.stride, x_edge,    y_edge, x.rows,
                           heads,  x.width / heads, edge_width, partial,  num_parts, x.dtype};
  FASTSPARSE_RUN_CUDA(head_outer, args, device, queue);
}

void hybrid_rows(Address rowptr, std::int64_t num_rows, std::int32_t multiple, std::int32_t longest,
                 Address counts, std::int64_t most_long, Address slices, Address split_row, Address split_ptr,
                 int device, Address queue) {
  const HybridRowsArgs args{rowptr,    num_rows, multiple,  longest,  counts,
                            most_long, slices,   split_row, split_ptr};
  FASTSPARSE_RUN_CUDA(hybrid_rows, args, device, queue);
}

BsbView make_bsb(Address quad, Address window_ptr, Address window_row, Address quad_entry, Address value_id,
                 bool value_id_is_64bit, std::int64_t num_rows, Address slices, std::int64_t num_slices,
                 Address split_row, Address split_ptr, std::int64_t num_split_rows, Address runs,
                 std::int64_t num_runs) {
  return {quad,     window_ptr,        window_row, quad_entry,
          value_id, value_id_is_64bit, num_rows,   {slices, num_slices, split_row, split_ptr, num_split_rows},
          runs,     num_runs};
}

void spmm_bsb(const BsbView& structure, Matrix x, EdgeValueView value, Address quad_vector,
              Address vector_scale, Address scale_dst, Address scale_src, Address loop, Address bias,
              bool relu, Address out, Address partial, int features_per_lane, int blocks_per_step, bool tf32,
              int device, Address queue) {
  const SpmmBsbArgs args{
      structure, value, quad_vector, vector_scale, x,       scale_dst,         scale_src,       loop,
      bias,      relu,  out,         partial,      x.width, features_per_lane, blocks_per_step, tf32,
      x.dtype};
  FASTSPARSE_RUN_CUDA(spmm_bsb, args, device, queue);
}

AttentionBsbInput attention_bsb_input(std::int64_t heads, Matrix q, DenseView k, Matrix v, Address bias,
                                      Dtype bias_dtype, float scale, double dropout_p, std::int64_t seed,
                                      bool tf32) {
  return {q,
          k,
          v,
          {bias, bias_dtype, heads},
          scale,
          make_dropout(dropout_p, seed),
          heads,
          q.width / heads,
          v.width / heads,
          tf32,
          v.dtype};
}

void attention_bsb(const BsbView& structure, const AttentionBsbInput& input, Address out, Address lse,
                   Address partial, Address partial_state, int device, Address queue) {
  const AttentionBsbArgs args{structure, input, out, lse, partial, partial_state};
  FASTSPARSE_RUN_CUDA(attention_bsb, args, device, queue);
}

void attention_bsb_backward(const BsbView& structure, const BsbView& transposed,
                            const AttentionBsbInput& input, Address out, Address lse, DenseView grad,
                            Address grad_q, Address grad_k, Address grad_v, Address grad_bias,
                            Address row_state, Address partial_q, Address partial_k, Address partial_v,
                            int device, Address queue) {
  const AttentionBsbBackwardArgs args{structure, transposed, input,     out,      lse,
                                      grad,      grad_q,     grad_k,    grad_v,   grad_bias,
                                      row_state, partial_q,  partial_k, partial_v};
  FASTSPARSE_RUN_CUDA(attention_bsb_backward, args, device, queue);
}

AdditiveAttentionInput additive_input(std::int64_t heads, Address score_dst, Address score_src, Matrix v,
                                      Address bias, Dtype bias_dtype, float negative_slope, double dropout_p,
                                      std::int64_t seed) {
  return {score_dst,
          score_src,
          v,
          {bias, bias_dtype, heads},
          negative_slope,
          make_dropout(dropout_p, seed),
          heads,
          v.width / heads,
          v.dtype};
}

void additive_attention(const CsrStructure& structure, const AdditiveAttentionInput& input, Address out,
                        Address lse, Address partial, Address partial_state, int device, Address queue) {
  const AdditiveAttentionArgs args{structure.a, structure.split, input, out, lse, partial, partial_state};
  FASTSPARSE_RUN_CUDA(additive_attention, args, device, queue);
}

void additive_attention_backward(const CsrStructure& structure, const CsrStructure& transposed,
                                 const AdditiveAttentionInput& input, DenseView grad, Address lse,
                                 Address grad_score_dst, Address grad_score_src, Address grad_v,
                                 Address grad_bias, Address row_state, Address partial_row, Address partial_v,
                                 Address partial_score, int device, Address queue) {
  const AdditiveAttentionBackwardArgs args{
      structure.a, structure.split, transposed.a,   transposed.split, input,     grad,
      lse,         grad_score_dst,  grad_score_src, grad_v,           grad_bias, row_state,
      partial_row, partial_v,       partial_score};
  FASTSPARSE_RUN_CUDA(additive_attention_backward, args, device, queue);
}

Gatv2AttentionInput gatv2_input(std::int64_t heads, DenseView x_dst, Matrix x_src, Address att,
                                float negative_slope, double dropout_p, std::int64_t seed) {
  return {x_dst,      x_src, att, negative_slope, make_dropout(dropout_p, seed), heads, x_src.width / heads,
          x_src.dtype};
}

void gatv2_attention(const CsrStructure& structure, const Gatv2AttentionInput& input, Address out,
                     Address lse, Address partial, Address partial_state, int device, Address queue) {
  const Gatv2AttentionArgs args{structure.a, structure.split, input, out, lse, partial, partial_state};
  FASTSPARSE_RUN_CUDA(gatv2_attention, args, device, queue);
}

void gatv2_attention_backward(const CsrStructure& structure, const CsrStructure& transposed,
                              const Gatv2AttentionInput& input, DenseView out, DenseView grad, Address lse,
                              Address grad_x_dst, Address grad_x_src, Address grad_att, std::int64_t att_rows,
                              Address row_state, Address partial_dst, Address partial_src, int device,
                              Address queue) {
  const Gatv2AttentionBackwardArgs args{
      structure.a, structure.split, transposed.a, transposed.split, input,     out,         grad,       lse,
      grad_x_dst,  grad_x_src,      grad_att,     att_rows,         row_state, partial_dst, partial_src};
  FASTSPARSE_RUN_CUDA(gatv2_attention_backward, args, device, queue);
}

void sddmm_bsb(const BsbView& structure, Address rowptr, Address slot_window, Address slot_entry,
               Address quad_vector, Address edge_id, bool edge_id_is_64bit, std::int64_t heads, Matrix x_dst,
               DenseView x_src, Address scale_dst, Address scale_src, Address out, Dtype out_dtype, bool tf32,
               int device, Address queue) {
  const SddmmBsbArgs args{
      structure,  rowptr,    slot_window, slot_entry, quad_vector, edge_id, edge_id_is_64bit,    x_dst,
      x_src,      scale_dst, scale_src,   out,        out_dtype,   heads,   x_dst.width / heads, tf32,
      x_dst.dtype};
  FASTSPARSE_RUN_CUDA(sddmm_bsb, args, device, queue);
}
#endif

void spmm_extremum(const CsrStructure& structure, Matrix x, EdgeValueView value, bool minimum, bool adds,
                   Address out, Address arg, Address partial, Address partial_arg, int device,
                   Address queue) {
  const SpmmExtremumArgs args{structure.a, structure.split, value,   x,       out,  arg,
                              partial,     partial_arg,     x.width, minimum, adds, x.dtype};
  FASTSPARSE_RUN(spmm_extremum, args, device, queue);
}

void spmm_extremum_backward(const CsrStructure& transposed, Matrix grad, DenseView x, EdgeValueView value,
                            Address arg, Address source, Address grad_x, Address grad_value, Address partial,
                            int device, Address queue) {
  const SpmmExtremumBackwardArgs args{transposed.a, transposed.split, value,     grad,       x,
                                      arg,          source,           grad_x,    grad_value, partial,
                                      grad.rows,    grad.width,       grad.dtype};
  FASTSPARSE_RUN(spmm_extremum_backward, args, device, queue);
}

void sddmm_csr(const CsrStructure& structure, std::int64_t heads, Matrix x_dst, DenseView x_src,
               Address scale_dst, Address scale_src, Address out, Dtype out_dtype, Address row, int device,
               Address queue) {
  const SddmmArgs args{structure.a, structure.split,     x_dst,       x_src,
                       scale_dst,   scale_src,           out,         out_dtype,
                       heads,       x_dst.width / heads, x_dst.dtype, row};
  FASTSPARSE_RUN(sddmm_csr, args, device, queue);
}

void edge_softmax(const CsrStructure& structure, Matrix input, Address grad, Address out, Address partial,
                  int device, Address queue) {
  const EdgeSoftmaxArgs args{structure.a, structure.split, input.data,  grad,
                             out,         partial,         input.width, input.dtype};
  FASTSPARSE_RUN(edge_softmax, args, device, queue);
}

void segment_reduce(const CsrStructure& structure, Reduction reduction, Matrix x, Address out, Address extra,
                    Address partial, Address facts, int device, Address queue) {
  const SegmentReduceArgs args{structure.a, structure.split, x,         out,    extra,
                               partial,     x.width,         reduction, x.dtype};
#ifdef FASTSPARSE_WITH_CUDA
  if (facts) {
    const DeviceGuard guard(device);
    check(cuda::segment_reduce_unseen(args, facts, queue), "segment_reduce");
    return;
  }
#else
  (void)facts;
#endif
  FASTSPARSE_RUN(segment_reduce, args, device, queue);
}

AttentionCsrArgs attention_csr_args(const CsrStructure& structure, AttentionScore kind, std::int64_t heads,
                                    Matrix dst, DenseView src, Matrix v, Address att, Address bias,
                                    Dtype bias_dtype, Matrix edge, DenseView weight, double scale,
                                    double dropout_p, std::int64_t seed, Address out, Address lse) {
  return {structure.a,
          kind,
          dst,
          src,
          v,
          att,
          {bias, bias_dtype, heads},
          edge,
          weight,
          scale,
          make_dropout(dropout_p, seed),
          1 / (1 - dropout_p),
          heads,
          kind == AttentionScore::kAdditive ? 0 : dst.width / std::max<std::int64_t>(heads, 1),
          v.width / std::max<std::int64_t>(heads, 1),
          edge.width,
          v.dtype,
          out,
          lse};
}

void attention_csr(const AttentionCsrArgs& args, int threads) {
  const py::gil_scoped_release release;
  cpu::attention_csr(args, threads);
}

void attention_csr_backward(const AttentionCsrArgs& forward, const CsrStructure& transposed, DenseView grad,
                            Address grad_dst, Address grad_src, Address grad_v, Address grad_att,
                            Address work, Address grad_edge, Address grad_weight, int threads) {
  const AttentionCsrBackwardArgs args{forward, transposed.a, grad, grad_dst,  grad_src,
                                      grad_v,  grad_att,     work, grad_edge, grad_weight};
  const py::gil_scoped_release release;
  cpu::attention_csr_backward(args, threads);
}

HeadScoresArgs head_scores_args(std::int64_t heads, Matrix v, Address first_vector, Address second_vector,
                                Address first_scores, Address second_scores) {
  return {
      v,      {first_vector, second_vector}, {first_scores, second_scores}, v.rows, heads, v.width / heads,
      v.dtype};
}

void head_scores(const HeadScoresArgs& args, int threads) {
  const py::gil_scoped_release release;
  cpu::head_scores(args, threads);
}

void head_scores_backward(const HeadScoresArgs& forward, Address grad_v, bool adds, Address grad_first,
                          Address grad_second, int threads) {
  const HeadScoresBackwardArgs args{forward, grad_v, adds, {grad_first, grad_second}};
  const py::gil_scoped_release release;
  cpu::head_scores_backward(args, threads);
}

// The attention of a layer on the CPU, with what is the same for all calls on a structure.
class AttentionLayer {
 public:
  AttentionLayer(const CsrStructure& structure, AttentionScore kind, Dtype dtype, std::int64_t heads,
                 std::int64_t head_width, std::int64_t maps, double scale)
      : a_(structure.a),
        kind_(kind),
        dtype_(dtype),
        heads_(heads),
        head_width_(head_width),
        maps_(maps),
        scale_(scale) {}

  void forward(Address joint, Address first_vector, Address second_vector, Matrix edge, DenseView edge_weight,
               Address bias, Address out, Address state, double dropout_p, std::int64_t seed,
               int threads) const {
    AttentionLayerArgs args{};
    args.attention = attention(joint, first_vector, edge, edge_weight, state, dropout_p, seed);
    args.attention.out = out;
    args.scores = scores(joint, first_vector, second_vector, state);
    if (maps_ == 4) args.skip = column(joint, 3);
    args.bias = bias;
    const py::gil_scoped_release release;
    cpu::attention_layer(args, threads);
  }

  void backward(const CsrStructure& transposed, Address joint, Address first_vector, Address second_vector,
                Matrix edge, DenseView edge_weight, Address state, DenseView grad, Address grad_joint,
                Address grad_first, Address grad_second, Address work, Address grad_edge,
                Address grad_edge_weight, Address grad_bias, Address grad_map_bias, double dropout_p,
                std::int64_t seed, int threads) const {
    AttentionLayerBackwardArgs args{};
    args.attention.forward = attention(joint, first_vector, edge, edge_weight, state, dropout_p, seed);
    args.attention.a_t = transposed.a;
    args.attention.grad = grad;
    args.attention.work = work;
    args.attention.grad_edge = grad_edge;
    args.attention.grad_weight = grad_edge_weight;
    args.grad_joint = {grad_joint, maps_ * width()};
    args.joint_width = maps_ * width();
    if (kind_ == AttentionScore::kAdditive) {
      args.scores = scores(joint, first_vector, second_vector, state);
      args.grad_vectors[0] = grad_first;
      args.grad_vectors[1] = grad_second;
      args.attention.grad_v = grad_joint;
    } else if (kind_ == AttentionScore::kGatv2) {
      args.attention.grad_att = grad_first;
      args.attention.grad_src = grad_joint;
      args.attention.grad_dst = const_cast<void*>(column(grad_joint, 1).data);
    } else {
      args.attention.grad_src = grad_joint;
      args.attention.grad_v = const_cast<void*>(column(grad_joint, 1).data);
      args.attention.grad_dst = const_cast<void*>(column(grad_joint, 2).data);
      if (maps_ == 4) args.grad_skip = const_cast<void*>(column(grad_joint, 3).data);
    }
    args.grad_bias = grad_bias;
    args.grad_map_bias = grad_map_bias;
    const py::gil_scoped_release release;
    cpu::attention_layer_backward(args, threads);
  }

 private:
  std::int64_t width() const { return heads_ * head_width_; }

  // What a linear map gave, or the gradient of it.
  DenseView column(Address joint, std::int64_t map) const {
    const std::int64_t bytes = dtype_ == Dtype::kFloat64 ? 8 : dtype_ == Dtype::kFloat32 ? 4 : 2;
    return {joint + map * width() * bytes, maps_ * width()};
  }

  // Arrays (num_rows, heads): additive attention has scores of sources and destinations before the
  // log-sum-exp.
  Address state(Address first, std::int64_t array) const {
    return first + array * a_.num_rows * heads_ * (dtype_ == Dtype::kFloat64 ? 8 : 4);
  }

  AttentionCsrArgs attention(Address joint, Address first_vector, const Matrix& edge,
                             const DenseView& edge_weight, Address first_state, double dropout_p,
                             std::int64_t seed) const {
    AttentionCsrArgs args{};
    args.a = a_;
    args.kind = kind_;
    args.scale = scale_;
    args.dropout = make_dropout(dropout_p, seed);
    args.keep_scale = 1 / (1 - dropout_p);
    args.edge = edge;
    args.weight = edge_weight;
    args.edge_width = edge.width;
    args.heads = heads_;
    args.head_width = kind_ == AttentionScore::kAdditive ? 0 : head_width_;
    args.value_width = head_width_;
    args.dtype = dtype_;
    args.bias.heads = heads_;
    args.lse = state(first_state, kind_ == AttentionScore::kAdditive ? 2 : 0);
    if (kind_ == AttentionScore::kAdditive) {
      args.v = column(joint, 0);
      args.src = {state(first_state, 0), heads_};
      args.dst = {state(first_state, 1), heads_};
    } else if (kind_ == AttentionScore::kGatv2) {
      args.src = args.v = column(joint, 0);
      args.dst = column(joint, 1);
      args.att = first_vector;
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
            {first_vector, second_vector},
            {first_state, state(first_state, 1)},
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
                std::int64_t weight_size, std::int64_t bias_size, Address weight, Address bias, Dtype dtype,
                Dtype to_dtype, int device, Address queue) {
  StackedMapsArgs args{};
  args.maps = static_cast<std::int64_t>(std::min<std::size_t>(weights.size(), kMostMaps));
  for (std::int64_t i = 0; i < args.maps; ++i) {
    args.weights[i] = weights[i];
    if (!biases.empty()) args.biases[i] = biases.at(i);
  }
  args.weight_size = weight_size;
  args.bias_size = biases.empty() ? 0 : bias_size;
  args.weight = weight;
  args.bias = bias;
  args.dtype = dtype;
  args.to_dtype = to_dtype;
  FASTSPARSE_RUN_CUDA(stack_maps, args, device, queue);
}

// The same on CUDA, with the structures of one pass, and those of the transposed graph for the backward pass.
class CudaAttentionLayer {
 public:
  CudaAttentionLayer(const CsrStructure* structure, const CsrStructure* transposed, const BsbView* blocks,
                     const BsbView* transposed_blocks, std::int64_t num_slots, std::int64_t num_slots_t,
                     std::int64_t att_rows, std::int64_t num_values, AttentionScore kind, Dtype dtype,
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
    args_.kind = kind;
    args_.dtype = dtype;
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
    args.bias = bias;
    args.bias_is_float = bias_is_float;
    args.result = result;
    FASTSPARSE_RUN_CUDA(attention_layer, args, device_, queue);
  }

  void backward(Address joint, Address first_vector, Address second_vector, Address out, Address state,
                Address scratch, DenseView grad, Address grad_joint, Address grad_first, Address grad_second,
                Address grad_bias, Dtype grad_bias_dtype, Address grad_map_bias, Dtype grad_map_bias_dtype,
                double dropout_p, std::int64_t seed, bool tf32, Address queue) const {
    CudaAttentionLayerArgs args = call(joint, first_vector, second_vector, out, state, scratch);
    args.dropout = make_dropout(dropout_p, seed);
    args.tf32 = tf32;
    args.grad = grad;
    args.grad_joint = grad_joint;
    args.grad_vectors[0] = grad_first;
    args.grad_vectors[1] = grad_second;
    args.grad_bias = grad_bias;
    args.grad_bias_dtype = grad_bias_dtype;
    args.grad_map_bias = grad_map_bias;
    args.grad_map_bias_dtype = grad_map_bias_dtype;
    FASTSPARSE_RUN_CUDA(attention_layer_backward, args, device_, queue);
  }

 private:
  CudaAttentionLayerArgs call(Address joint, Address first_vector, Address second_vector, Address out,
                              Address state, Address scratch) const {
    CudaAttentionLayerArgs args = args_;
    args.joint = joint;
    args.vectors[0] = first_vector;
    args.vectors[1] = second_vector;
    args.out = out;
    args.state = state;
    args.scratch = scratch;
    return args;
  }

  CudaAttentionLayerArgs args_{};
  std::int64_t scratch_, state_;
  int device_;
};
#endif

#ifdef FASTSPARSE_WITH_CUDA
EdgeAttentionInput edge_attention_input(bool gatv2, std::int64_t heads, DenseView q, Matrix k, DenseView v,
                                        Matrix edge, Address att, Address weight, Address bias,
                                        Dtype bias_dtype, double scale, double dropout_p, std::int64_t seed) {
  return {gatv2,      q,
          k,          v,
          edge.data,  att,
          weight,     {bias, bias_dtype, heads},
          scale,      make_dropout(dropout_p, seed),
          heads,      k.width / std::max<std::int64_t>(heads, 1),
          edge.width, k.dtype};
}

void edge_attention(const CsrStructure& structure, const EdgeAttentionInput& input, Address out,
                    Address out_edge, Address lse, Address partial, Address partial_edge,
                    Address partial_state, int device, Address queue) {
  const EdgeAttentionArgs args{structure.a, structure.split, input,        out,          out_edge,
                               lse,         partial,         partial_edge, partial_state};
  FASTSPARSE_RUN_CUDA(edge_attention, args, device, queue);
}

void edge_attention_backward(const CsrStructure& structure, const CsrStructure& transposed,
                             const EdgeAttentionInput& input, DenseView out, DenseView grad, Address lse,
                             Address work, Address positive, std::int64_t sign_bytes, std::int64_t num_values,
                             Address grad_q, Address grad_k, Address grad_v, Address grad_q_edge,
                             Address grad_features, Address grad_att, Address grad_weight,
                             std::int64_t att_rows, std::int64_t weight_rows, Address partial_q,
                             Address partial_q_edge, Address partial_k, Address partial_v, Address sum_k,
                             Address sum_v, int device, Address queue) {
  const EdgeAttentionBackwardArgs args{structure.a,    structure.split,
                                       transposed.a,   transposed.split,
                                       input,          out,
                                       grad,           lse,
                                       work,           positive,
                                       sign_bytes,     num_values,
                                       grad_q,         grad_k,
                                       grad_v,         grad_q_edge,
                                       grad_features,  grad_att,
                                       grad_weight,    att_rows,
                                       weight_rows,    partial_q,
                                       partial_q_edge, partial_k,
                                       partial_v,      sum_k,
                                       sum_v};
  FASTSPARSE_RUN_CUDA(edge_attention_backward, args, device, queue);
}
#endif

EdgeMessageInput edge_message_input(EdgeMessage message, Dtype dtype, std::int64_t width,
                                    std::int64_t edge_width, AddressAndStride k, AddressAndStride q,
                                    AddressAndStride v, AddressAndStride edge, Address weight,
                                    Address of_value, Address bias) {
  return {message, k, q, v, edge, weight, of_value, bias, width, edge_width, dtype};
}

void lay_out_edge_maps(AddressAndStride weight, AddressAndStride added, AddressAndStride of_value,
                       Address bias, std::int64_t given_width, std::int64_t given_edge_width, Dtype dtype,
                       Address out, std::int64_t width, std::int64_t edge_width, int device, Address queue) {
  const EdgeMapsArgs args{weight,           added, of_value, bias,  given_width,
                          given_edge_width, dtype, out,      width, edge_width};
  FASTSPARSE_RUN(lay_out_edge_maps, args, device, queue);
}

void edge_messages(const CsrStructure& structure, const EdgeMessageInput& input, Address out, Address side,
                   Address state, Address positive, std::int64_t sign_bytes, AddressAndStride root,
                   Address eps, Address scale, Address partial, Address partial_side, int device,
                   Address queue) {
  const EdgeMessageArgs args{structure.a, structure.split, input,       out,  side,
                             state,       positive,        sign_bytes,  root, eps,
                             scale,       partial,         partial_side};
  FASTSPARSE_RUN(edge_messages, args, device, queue);
}

EdgeMapGradients edge_map_gradients(Address weight, Address of_value, Address bias, Address features,
                                    std::int64_t width, std::int64_t edge_width, Dtype dtype) {
  return {weight, of_value, bias, features, width, edge_width, dtype};
}

void edge_messages_backward(const CsrStructure& structure, const CsrStructure& transposed,
                            const EdgeMessageInput& input, AddressAndStride grad, AddressAndStride grad_side,
                            AddressAndStride state, AddressAndStride grad_state, Address positive,
                            std::int64_t sign_bytes, Address scale, std::int64_t num_values, Address grad_q,
                            Address grad_v, Address grad_edge, Address grad_features, Address grad_weight,
                            Address grad_of_value, std::int64_t groups, const EdgeMapGradients& maps,
                            Address partial_q, Address partial_v, int device, Address queue) {
  const EdgeMessageBackwardArgs args{structure.a, structure.split, transposed.a, transposed.split, input,
                                     grad,        grad_side,       state,        grad_state,       positive,
                                     sign_bytes,  scale,           num_values,   grad_q,           grad_v,
                                     grad_edge,   grad_features,   grad_weight,  grad_of_value,    groups,
                                     maps,        partial_q,       partial_v};
  FASTSPARSE_RUN(edge_messages_backward, args, device, queue);
}

MultiAggregateInput multi_aggregate_input(std::int64_t groups, Matrix x_src, DenseView x_dst, Matrix edge,
                                          Address weight, const std::array<int, kNumAggregations>& slots,
                                          int num_slots, double min_variance) {
  MultiAggregateInput input{
      x_src, x_dst,     edge.data,    weight,     edge.width, x_src.width, x_src.width / groups,
      {},    num_slots, min_variance, x_src.dtype};
  std::copy(slots.begin(), slots.end(), input.slot);
  return input;
}

void multi_aggregate(const CsrStructure& structure, const MultiAggregateInput& input, Address out,
                     Address mean, Address ties, Address partial, int device, Address queue) {
  const MultiAggregateArgs args{structure.a, structure.split, input, out, mean, ties, partial};
  FASTSPARSE_RUN(multi_aggregate, args, device, queue);
}

void multi_aggregate_backward(const CsrStructure& structure, const CsrStructure& transposed,
                              const MultiAggregateInput& input, Address out, Address mean, Address ties,
                              Address grad, Address base, Address slope, Address share, Address marks,
                              Address grad_src, Address grad_dst, Address grad_edge, Address grad_weight,
                              std::int64_t weight_parts, std::int64_t num_values, Address partial, int device,
                              Address queue) {
  const MultiAggregateBackwardArgs args{structure.a,  structure.split,
                                        transposed.a, transposed.split,
                                        input,        out,
                                        mean,         ties,
                                        grad,         base,
                                        slope,        share,
                                        marks,        grad_src,
                                        grad_dst,     grad_edge,
                                        grad_weight,  weight_parts,
                                        num_values,   partial};
  FASTSPARSE_RUN(multi_aggregate_backward, args, device, queue);
}

void ssd_backward(const CsrStructure& transposed, Matrix grad, OneHead value, KeptIdsView ids,
                  Address scale_dst, Address scale_src, Address out, Address partial, int device,
                  Address queue) {
  const SsdBackwardArgs args{transposed.a, transposed.split, value, grad,    ids,
                             scale_dst,    scale_src,        out,   partial, grad.dtype};
  FASTSPARSE_RUN(ssd_backward, args, device, queue);
}

void ssd_value_grad(const CsrStructure& structure, Matrix grad, Address kept, KeptIdsView ids,
                    Address scale_dst, Address scale_src, Address out, int device, Address queue) {
  const SsdValueGradArgs args{structure.a, structure.split, grad,      grad.width, kept,
                              ids,         scale_dst,       scale_src, out,        grad.dtype};
  FASTSPARSE_RUN(ssd_value_grad, args, device, queue);
}

#ifdef FASTSPARSE_WITH_CUDA
RowPanelsView make_row_panels(Address entry, Address value_id, bool value_id_is_64bit, Address other_source,
                              std::int64_t num_other, Address slices, std::int64_t num_slices, int height,
                              int strip, std::int64_t num_rows, std::int64_t num_cols) {
  return {entry,  value_id, value_id_is_64bit, other_source, num_other, slices, num_slices,
          height, strip,    num_rows,          num_cols};
}

void ssd_backward_windows(const RowPanelsView& structure, Matrix grad, OneHead value, KeptIdsView ids,
                          Address scale_dst, Address scale_src, Address sum, Address out, int device,
                          Address queue) {
  const SsdBackwardWindowsArgs args{structure, value,     grad, grad.width, ids,
                                    scale_dst, scale_src, sum,  out,        grad.dtype};
  FASTSPARSE_RUN_CUDA(ssd_backward_windows, args, device, queue);
}
#endif

void expand_rows(Address rowptr, std::int64_t num_rows, std::int64_t num_edges, Address row, int device,
                 Address queue) {
  const ExpandRowsArgs args{rowptr, num_rows, num_edges, row};
  FASTSPARSE_RUN(expand_rows, args, device, queue);
}

void reverse_entries(Address rowptr, Address col, Address edge_id, std::int64_t num_rows,
                     std::int64_t num_edges, Address id_out, bool id_is_64bit, int device, Address queue) {
  const ReverseEntriesArgs args{rowptr, col, edge_id, num_rows, num_edges, id_out, id_is_64bit};
  FASTSPARSE_RUN(reverse_entries, args, device, queue);
}

CompressArgs compress_args(Address major, Address minor, bool index_is_64bit, std::int64_t num_edges,
                           std::int64_t num_major, std::int64_t num_minor, bool sort_minor, Address major_ptr,
                           Address minor_out, Address order, bool order_is_64bit) {
  return {major,      minor,     index_is_64bit, num_edges, num_major,     num_minor,
          sort_minor, major_ptr, minor_out,      order,     order_is_64bit};
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
  check(cuda::compress(args, scratch, scratch_bytes, queue), "compress");
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
    const cudaStream_t stream = queue;
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
  const InspectArgs args{row,
                         col,
                         edge_id,
                         index_is_64bit,
                         edge_id_is_64bit,
                         num_edges,
                         num_rows,
                         square,
                         rowptr,
                         col_out,
                         inv_degree,
                         slices,
                         device < 0 ? facts : static_cast<std::int64_t*>(scratch)};
  FASTSPARSE_RUN(inspect, args, device, queue);
  return read_facts<kNumEdgeFacts>(args.facts, device, queue);
}

// Where `sort_edges` finds workspace on CUDA in one allocation: slices come first.
struct SortWorkspace {
  Address split_ptr, sums, facts, split_row, scratch, end;

  SortWorkspace(Address begin, std::int64_t num_edges, std::int64_t num_rows, std::int64_t longest) {
    const std::int64_t most_cut = num_edges / longest;
    split_ptr = begin + (num_rows + most_cut) * sizeof(RowSlice);
    sums = split_ptr + (most_cut + 1) * sizeof(std::int64_t);
    facts = sums + kMostSortBlocks * sizeof(std::uint64_t);
    split_row = facts + kNumSortFacts * sizeof(std::int64_t);
    scratch = split_row + most_cut * sizeof(std::int32_t);
    end = scratch + (num_rows + num_edges) * sizeof(std::int32_t);
  }
};

// Bytes of that workspace, and where split_ptr and split_row lie in it.
std::tuple<Address, Address, Address> sort_workspace(std::int64_t num_edges, std::int64_t num_rows,
                                                     std::int64_t longest) {
  const SortWorkspace workspace({}, num_edges, num_rows, longest);
  return {workspace.end, workspace.split_ptr, workspace.split_row};
}

// The same of few edges, which it sorts.
py::tuple sort_edges(Address row, Address col, bool index_is_64bit, std::int64_t num_edges,
                     std::int64_t num_rows, std::int64_t num_cols, std::int64_t longest, Address rowptr,
                     Address col_out, Address order, Address inv_degree, Address inv_sqrt_degree,
                     Address workspace, int device, Address queue) {
  std::int64_t facts[kNumSortFacts];
  const SortWorkspace places(workspace, num_edges, num_rows, longest);
  const InspectArgs found{row,
                          col,
                          nullptr,
                          index_is_64bit,
                          false,
                          num_edges,
                          num_rows,
                          num_rows == num_cols,
                          rowptr,
                          col_out,
                          inv_degree,
                          workspace,
                          device < 0 ? facts : static_cast<std::int64_t*>(places.facts)};
  const SortEdgesArgs args{found,       num_cols,         longest,
                           order,       inv_sqrt_degree,  places.split_ptr,
                           places.sums, places.split_row, places.scratch};
  FASTSPARSE_RUN(sort_edges, args, device, queue);
  return read_facts<kNumSortFacts>(found.facts, device, queue);
}

std::size_t round_up(std::size_t bytes, std::size_t step) { return (bytes + step - 1) / step * step; }

CompressArgs transposition(std::int64_t num_rows, std::int64_t num_cols, std::int64_t num_edges, Address row,
                           Address col, Address colptr, Address row_out, Address order) {
  return {col,
          row,
          false,
          num_edges,
          num_cols,
          num_rows,
          false,
          colptr,
          row_out,
          order,
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
  const Address any{reinterpret_cast<std::uintptr_t>(&device)};
  return round_up(num_edges * sizeof(std::int32_t), 256) +
         (keeps_order || device < 0 ? 0 : round_up(order_bytes(num_edges), 256)) +
         compress_scratch_bytes(transposition(num_rows, num_cols, num_edges, {}, {}, {}, {}, any), device);
}

// Sorts the entries of compressed rows by column, those of a column by row: colptr, row_out, and in `order`
// (0: nobody keeps it) their places before.
void transpose(Address rowptr, Address col, std::int64_t num_rows, std::int64_t num_cols,
               std::int64_t num_edges, Address colptr, Address row_out, Address order, Address scratch,
               std::size_t scratch_bytes, int device, Address queue) {
  expand_rows(rowptr, num_rows, num_edges, scratch, device, queue);
  std::size_t used = round_up(num_edges * sizeof(std::int32_t), 256);
  if (!order && device >= 0) {  // the radix sort carries it along in any case
    order = scratch + used;
    used += round_up(order_bytes(num_edges), 256);
  }
  compress(transposition(num_rows, num_cols, num_edges, scratch, col, colptr, row_out, order), scratch + used,
           scratch_bytes - used, device, queue);
}

void row_signatures(Address rowptr, Address col, std::int64_t num_rows, int column_bits, int num_bands,
                    Address signature, Address keys, int device, Address queue) {
  const RowSignaturesArgs args{rowptr, col, num_rows, column_bits, num_bands, signature, keys};
  FASTSPARSE_RUN(row_signatures, args, device, queue);
}

void similar_rows(Address signature, Address order, std::int64_t num_rows, std::int64_t num_bands,
                  Address best, int device, Address queue) {
  const SimilarRowsArgs args{signature, order, num_rows, num_bands, best};
  FASTSPARSE_RUN(similar_rows, args, device, queue);
}

void link_rows(Address rowptr, Address best, std::int64_t num_rows, Address root, Address counts, int device,
               Address queue) {
  const LinkRowsArgs args{rowptr, best, num_rows, root, counts};
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
    const cudaStream_t stream = queue;
    cudaStreamCaptureStatus status;
    check(cudaStreamIsCapturing(stream, &status), "sort_segments");
    if (status != cudaStreamCaptureStatusNone) check(cudaErrorStreamCaptureUnsupported, "sort_segments");
    host_ = HostWords::take(device);
    args.host_facts = host_.words;
    check(cuda::sort_segments(args, scratch, scratch_bytes, stream), "sort_segments");
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
  const SortSegmentsArgs args{index, index_is_64bit, num_rows,  num_segments, longest, rowptr,
                              order, slices,         split_row, split_ptr,    facts,   nullptr};
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
  const RowSplitArgs args{rowptr, num_rows, longest, counts, totals, nullptr, nullptr, nullptr};
  FASTSPARSE_RUN_CUDA(row_split_count, args, device, queue);
}

void row_split_fill(Address rowptr, std::int64_t num_rows, std::int64_t longest, Address counts,
                    Address slices, Address split_row, Address split_ptr, int device, Address queue) {
  const RowSplitArgs args{rowptr, num_rows, longest, counts, nullptr, slices, split_row, split_ptr};
  FASTSPARSE_RUN_CUDA(row_split_fill, args, device, queue);
}
#endif

void maxk(Matrix x, std::int64_t k, Address values, Address ids, int device, Address queue) {
  const MaxkArgs args{x, values, ids, nullptr, nullptr, x.rows, x.width, k, x.dtype};
  FASTSPARSE_RUN(maxk, args, device, queue);
}

void maxk_dense(Matrix x, std::int64_t k, Address out, Address kept, int device, Address queue) {
  const MaxkArgs args{x, nullptr, nullptr, out, kept, x.rows, x.width, k, x.dtype};
  FASTSPARSE_RUN(maxk, args, device, queue);
}

void mask_rows(Matrix dense, Address kept, Address out, int device, Address queue) {
  const MaskRowsArgs args{dense, kept, out, dense.rows, dense.width, dense.dtype};
  FASTSPARSE_RUN(mask_rows, args, device, queue);
}

void cbsr_to_dense(std::int64_t width, Matrix values, Address ids, Address out, int device, Address queue) {
  const CbsrToDenseArgs args{values.data, ids, out, values.rows, width, values.width, values.dtype};
  FASTSPARSE_RUN(cbsr_to_dense, args, device, queue);
}

void cbsr_gather(Matrix dense, KeptIdsView ids, Address out, int device, Address queue) {
  const CbsrGatherArgs args{dense, ids.data, out, dense.rows, dense.width, ids.k, dense.dtype};
  FASTSPARSE_RUN(cbsr_gather, args, device, queue);
}

void ssd(const CsrStructure& structure, std::int64_t width, Matrix values, Address ids, OneHead value,
         Address scale_dst, Address scale_src, Address bias, Address out, Address partial, Address packed,
         int longest_group, std::int64_t num_long, bool few_entries, int device, Address queue) {
  const SsdArgs args{structure.a, structure.split, longest_group, num_long, few_entries, value,   values.data,
                     ids,         scale_dst,       scale_src,     bias,     out,         partial, packed,
                     width,       values.width,    values.dtype};
  FASTSPARSE_RUN(ssd, args, device, queue);
}

#ifdef FASTSPARSE_WITH_CUDA
void ssd_slots(const CsrStructure& structure, std::int64_t width, Matrix values, Address ids, OneHead value,
               Address scale_src, Address sum, int slots, bool update_mode, bool coupled, int device,
               Address queue) {
  const SsdSlotsArgs args{structure.a, structure.split, value,   values.data, ids,          scale_src,   sum,
                          slots,       update_mode,     coupled, width,       values.width, values.dtype};
  FASTSPARSE_RUN_CUDA(ssd_slots, args, device, queue);
}
#endif

NodeList make_node_list(Address node, Address seed, std::int64_t num_nodes, std::int64_t first_place,
                        std::int32_t type) {
  return {node, seed, num_nodes, first_place, type};
}

FirstNodes make_first_nodes(const NodeList& list, std::int64_t count, Address count_out) {
  return {list, count, count_out};
}

// The addresses come in the order of SampleStep: sizes, outputs, scratch.
SampleStep make_sample_step(const CsrStructure& structure, Address weight, Address weight_sum,
                            std::int64_t fanout, bool replace, bool induced, std::uint32_t number,
                            const NodeList& dst, const NodeList& src,
                            const std::tuple<Address, Address, Address, Address, Address, Address>& sizes,
                            const std::tuple<Address, Address, Address>& edges, std::int64_t most_rows,
                            std::int64_t most_slots,
                            const std::tuple<Address, Address, Address, Address>& scratch) {
  return {structure.a,
          weight,
          weight_sum,
          fanout,
          replace,
          induced,
          number,
          dst,
          src,
          std::get<0>(sizes),
          std::get<1>(sizes),
          std::get<2>(sizes),
          std::get<3>(sizes),
          std::get<4>(sizes),
          std::get<5>(sizes),
          std::get<0>(edges),
          std::get<1>(edges),
          std::get<2>(edges),
          most_rows,
          most_slots,
          std::get<0>(scratch),
          std::get<1>(scratch),
          std::get<2>(scratch),
          std::get<3>(scratch)};
}

NodeTable make_node_table(Address key, Address value, std::int64_t num_places, int bits) {
  return {key, value, num_places, bits};
}

void sample_neighbors(const NodeTable& table, Address sizes, std::int64_t num_sizes, std::uint64_t seed,
                      const std::vector<FirstNodes>& first_nodes, const std::vector<SampleStep>& steps,
                      int device, Address queue) {
  const SampleArgs args{table,
                        sizes,
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
  const EmitEdgesArgs args{table, place, row, edge_id, num_edges, edge_index, col, edge_id_out};
  FASTSPARSE_RUN(emit_edges, args, device, queue);
}

void emit_rows(Address row, std::int64_t num_edges, std::int64_t num_rows, Address rowptr, Address inv_degree,
               Address slices, int device, Address queue) {
  const EmitRowsArgs args{row, num_edges, num_rows, rowptr, inv_degree, slices};
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
  args.node_mask = marks[0];
  args.edge_mask = marks[1];
  args.node_ends = marks[2];
  args.edge_ends = marks[3];
  args.edge_index = std::get<0>(ends);
  args.edge_index_out = std::get<1>(ends);
  args.padding = std::get<2>(ends);
  args.edge_index_is_64bit = std::get<3>(ends);
  std::size_t done = 0;
  do {
    args.num_tensors = 0;
    for (; done < tensors.size() && args.num_tensors < kMostPlaced; ++done) {
      const auto& [from, to, num_rows, row_bytes, is_of_edges, is_empty] = tensors[done];
      args.tensor[args.num_tensors++] = {from, to, num_rows, row_bytes, is_of_edges, is_empty};
    }
    FASTSPARSE_RUN(place_batch, args, device, queue);
    args.edge_index_out = nullptr;
  } while (done < tensors.size());
}

// The table of a batch (gather_graphs.h), and how many rows it has of every kind.
//
// index: positions of the batch's graphs, from the end where they are negative. graph_at: the graph at every
// one of `num_positions` positions; null: their numbers. pointers: of every kind, on the host.
std::vector<std::int64_t> plan_graphs(const std::vector<std::int64_t>& index, Address graph_at,
                                      std::int64_t num_positions, const std::vector<Address>& pointers,
                                      Address table) {
  const auto num_graphs = static_cast<std::int64_t>(index.size());
  const std::int64_t* graphs = graph_at;
  std::vector<std::int64_t> chosen(index);
  for (std::int64_t& position : chosen) {
    const std::int64_t from_start = position < 0 ? position + num_positions : position;
    if (from_start < 0 || from_start >= num_positions) {
      throw py::index_error("index: expected positions below " + std::to_string(num_positions) + ", got " +
                            std::to_string(position));
    }
    position = graphs == nullptr ? from_start : graphs[from_start];
  }
  std::vector<std::int64_t> totals;
  totals.reserve(pointers.size());
  std::int64_t* first = table;
  for (const std::int64_t* pointer : pointers) {
    std::int64_t* source = first + num_graphs + 1;
    std::int64_t total = 0;
    for (std::int64_t nth = 0; nth < num_graphs; ++nth) {
      const std::int64_t graph = chosen[nth];
      first[nth] = total;
      source[nth] = pointer[graph];
      total += pointer[graph + 1] - pointer[graph];
    }
    first[num_graphs] = total;
    source[num_graphs] = 0;
    totals.push_back(total);
    first = source + num_graphs + 1;
  }
  return totals;
}

// Fields: address in the dataset, outer size, bytes of a row, rows there, pointer, added pointers, kind. The
// table is where the batch is; `totals` is what `plan_graphs` gave.
void gather_graphs(
    const std::vector<std::tuple<Address, std::int64_t, std::int64_t, std::int64_t, int, int, int, int>>&
        fields,
    const std::vector<std::int64_t>& totals, Address table, std::int64_t num_graphs,
    const std::vector<Address>& out, int device, Address queue) {
  GatherGraphsArgs args{};
  args.table = table;
  args.num_graphs = num_graphs;
  for (std::size_t done = 0; done < fields.size();) {
    args.num_fields = 0;
    for (; done < fields.size() && args.num_fields < kMostGathered; ++done) {
      const auto& [from, outer, row_bytes, from_rows, rows, added, added_second, kind] = fields[done];
      args.field[args.num_fields++] = {from,
                                       out.at(done),
                                       outer,
                                       row_bytes,
                                       from_rows,
                                       totals.at(rows),
                                       rows,
                                       {added, added_second},
                                       static_cast<GraphFieldKind>(kind)};
    }
    FASTSPARSE_RUN(gather_graphs, args, device, queue);
  }
}

// Rows that the host's threads gather: into its memory; or, with a device, through page-locked memory for all
// of them, from where every piece is sent as soon as it is full.
void gather_rows_of_host(Address table, Address index, Address staging, Address out, std::int64_t num_rows,
                         std::int64_t row_bytes, int threads, std::int64_t piece, int device, Address queue) {
  const bool sends = device >= 0;
  const GatherRowsArgs args{table, index, sends ? staging : out, num_rows, row_bytes, row_bytes};
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
    const int found = cuda::send(out + begin, staging + begin, (last - first) * row_bytes, queue);
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
  const GatherRowsArgs args{table, index, out, num_rows, row_bytes, out_row_bytes};
  FASTSPARSE_RUN_CUDA(gather_rows, args, device, queue);
}
#endif

void prefer_huge_pages(Address out, std::int64_t bytes, bool collapse) {
  cpu::prefer_huge_pages(out, bytes, collapse);
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

// What PyTorch's tensors are asked for: `_C` knows nothing of them, and asks as Python does.
struct Names {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* element_size = PyUnicode_InternFromString("element_size");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* numel = PyUnicode_InternFromString("numel");
  PyObject* untyped_storage = PyUnicode_InternFromString("untyped_storage");
  PyObject* nbytes = PyUnicode_InternFromString("nbytes");
  PyObject* zero = PyLong_FromLong(0);
};

const Names& names() {
  static const auto& known = *new Names;
  return known;
}

py::object found_in(PyObject* tensor, PyObject* found) {
  if (found == nullptr && PyErr_ExceptionMatches(PyExc_AttributeError) != 0) {
    PyErr_Clear();
    throw_wrong_type(tensor);
  }
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

py::object ask(PyObject* tensor, PyObject* method) {
  return found_in(tensor, PyObject_CallMethodNoArgs(tensor, method));
}

// Allocators give memory above 4 GiB, unless the program is linked to fixed addresses. Offsets in freed
// storages stay below unless the storage was larger.
constexpr auto kLeastAddress = std::uintptr_t{1} << 32;

// Rejects tensors whose storage was resized to nothing, as FSDP does between uses: their shape stays. Inlined
// it would make every call longer.
[[gnu::cold, gnu::noinline]] void check_memory(PyObject* tensor) {
  if (PyLong_AsLongLong(ask(tensor, names().numel).ptr()) == 0) return;
  const auto storage = ask(tensor, names().untyped_storage);
  if (PyLong_AsLongLong(ask(storage.ptr(), names().nbytes).ptr()) != 0) return;
  const py::list sizes = found_in(tensor, PyObject_GetAttr(tensor, names().shape));
  throw std::runtime_error("a tensor of shape " + std::string(py::repr(py::tuple(sizes))) +
                           " has no memory: its storage was resized to 0 bytes, as FSDP does with parameters "
                           "outside their module's forward and backward pass. Give the storage its memory "
                           "back before the call");
}

std::int64_t first_stride(PyObject* tensor) {
  const auto found = found_in(tensor, PyObject_CallMethodOneArg(tensor, names().stride, names().zero));
  return PyLong_AsLongLong(found.ptr());
}

// Rows and columns; less work for the host than two calls of `size`.
std::array<std::int64_t, 2> shape_of(PyObject* matrix) {
  const auto found = found_in(matrix, PyObject_GetAttr(matrix, names().shape));
  if (!PyTuple_Check(found.ptr()) || PyTuple_GET_SIZE(found.ptr()) != 2) throw_wrong_type(matrix);
  return {PyLong_AsLongLong(PyTuple_GET_ITEM(found.ptr(), 0)),
          PyLong_AsLongLong(PyTuple_GET_ITEM(found.ptr(), 1))};
}

// PyTorch's dtypes in the order of their codes.
std::vector<py::object>& known_dtypes() {
  static auto& known = *new std::vector<py::object>;
  return known;
}

void know_dtypes(const std::vector<py::object>& dtypes) { known_dtypes() = dtypes; }

Dtype dtype_of(PyObject* object) {
  const auto& known = known_dtypes();
  for (std::size_t code = 0; code < known.size(); ++code) {
    if (known[code].ptr() == object) return static_cast<Dtype>(code);
  }
  throw_wrong_type(object);
}

template <typename T>
constexpr bool kIsStructure = std::is_base_of_v<py::detail::type_caster_generic, py::detail::make_caster<T>>;

template <typename T>  // a number in Python; SpmmKernel is a class there
constexpr bool kIsCode = std::is_enum_v<T> && !std::is_same_v<T, SpmmKernel>;

template <typename T>
T* structure_in(PyObject* object) {
  py::detail::type_caster_base<T> caster;
  if (!caster.load(object, false)) throw_wrong_type(object);
  return static_cast<T*>(caster);
}

Dtype dtype_in(PyObject* tensor) {
  return dtype_of(found_in(tensor, PyObject_GetAttr(tensor, names().dtype)).ptr());
}

EdgeValueView edge_values(PyObject* tensor, std::int64_t heads) {
  if (tensor == Py_None) return {nullptr, Dtype::kFloat64, heads};
  return {address_of(tensor), dtype_of(found_in(tensor, PyObject_GetAttr(tensor, names().dtype)).ptr()),
          heads};
}

// How many of Python's arguments a parameter of type P takes.
template <typename P>
constexpr std::size_t kTakes = 1;
template <>
constexpr std::size_t kTakes<AddressAndStride> = 2;
template <>
constexpr std::size_t kTakes<EdgeValueView> = 2;

// What a parameter of type P gets: structures by reference, anything else by value.
template <typename P>
decltype(auto) argument(PyObject* const* first) {
  using T = std::remove_cv_t<std::remove_reference_t<P>>;
  using Limits = std::numeric_limits<T>;
  PyObject* object = *first;
  if constexpr (std::is_same_v<T, Address>) {
    return address_of(object);
  } else if constexpr (std::is_same_v<T, DenseView>) {
    if (object == Py_None) return DenseView{nullptr, 0};
    return DenseView{address_of(object), first_stride(object)};
  } else if constexpr (std::is_same_v<T, Matrix>) {
    if (object == Py_None) return Matrix{};
    const auto [rows, width] = shape_of(object);
    return Matrix{argument<DenseView>(first), dtype_in(object), rows, width};
  } else if constexpr (std::is_same_v<T, AddressAndStride>) {
    return T{{argument<Address>(first), argument<std::int64_t>(first + 1)}};
  } else if constexpr (std::is_same_v<T, OneHead>) {
    return T{edge_values(object, 1)};
  } else if constexpr (std::is_same_v<T, EdgeValueView>) {
    return edge_values(object, argument<std::int64_t>(first + 1));
  } else if constexpr (std::is_same_v<T, KeptIdsView>) {
    const bool is_16bit = PyLong_AsLong(ask(object, names().element_size).ptr()) == 2;
    return T{address_of(object), is_16bit, shape_of(object)[1]};
  } else if constexpr (std::is_same_v<T, Dtype>) {
    return PyLong_Check(object) ? static_cast<T>(argument<int>(first)) : dtype_of(object);
  } else if constexpr (kIsCode<T>) {
    return static_cast<T>(argument<int>(first));
  } else if constexpr (std::is_same_v<T, bool>) {
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

// Where the parameters' arguments begin, and behind those of the last one.
template <typename... P>
constexpr auto kPlaces = [] {
  std::array<std::size_t, sizeof...(P) + 1> places{};
  std::size_t nth = 0;
  ((places[nth + 1] = places[nth] + kTakes<P>, ++nth), ...);
  return places;
}();

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
  static R with([[maybe_unused]] PyObject* const* arguments, std::index_sequence<kAt...>) {
    return kFunction(argument<P>(arguments + kPlaces<P...>[kAt])...);
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
    return run_body(body, self, arguments, count, kPlaces<P...>[sizeof...(P)]);
  }

  static R construct(const py::args& arguments) {
    constexpr std::size_t expected = kPlaces<P...>[sizeof...(P)];
    if (arguments.size() != expected) {
      throw py::type_error("expected " + std::to_string(expected) + " arguments, got " +
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
    (self.*kMethod)(argument<P>(arguments + kPlaces<P...>[kAt])...);
  }
  static PyObject* body(PyObject* self, PyObject* const* arguments) {
    with(*structure_in<C>(self), arguments, std::index_sequence_for<P...>{});
    return Py_NewRef(Py_None);
  }
  static PyObject* run(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return run_body(body, self, arguments, count, kPlaces<P...>[sizeof...(P)]);
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

Address address_of(PyObject* object) {
  if (object == Py_None) return {};
  constexpr auto kMost = std::numeric_limits<std::uintptr_t>::max();
  if (PyLong_Check(object)) return {to_unsigned(object, kMost)};
  const std::uintptr_t address = to_unsigned(ask(object, names().data_ptr).ptr(), kMost);
  // A freed storage leaves the offset in it for an address. Asking every tensor for the size of its storage
  // takes 90 ns, 1.6 % of the host's time for a small spmm.
  if (address < kLeastAddress) check_memory(object);
  return {address};
}

}  // namespace fastsparse

PYBIND11_MODULE(_C, m) {
  using namespace fastsparse;
  m.doc() = "Torch-free kernels of FastSparse; fastsparse_core.ops is the checked interface.";
  define<&know_dtypes>(m, "know_dtypes");
  define_structure<&make_structure>(m, "CsrStructure");
  define_structure<&compress_args>(m, "CompressArgs");
  define<&compress_scratch_bytes>(m, "compress_scratch_bytes");
  define<&compress>(m, "compress");
  define<&expand_rows>(m, "expand_rows");
  define<&reverse_entries>(m, "reverse_entries");
  define<&inspect>(m, "inspect");
  define<&sort_edges>(m, "sort_edges");
  define<&sort_workspace>(m, "sort_workspace");
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
  const auto plan =
      define_structure<&make<SpmmPlan, SpmmKernel, const CsrStructure&, Dtype, std::int64_t, Dtype,
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
  define<&weight_gradient>(m, "weight_gradient");
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
            std::int64_t, std::int64_t, std::int64_t, std::int64_t, AttentionScore, Dtype, std::int64_t,
            std::int64_t, std::int64_t, std::int64_t, float, std::int64_t, bool, int>>(m,
                                                                                       "CudaAttentionLayer");
  cuda_layer.def_property_readonly("scratch", &CudaAttentionLayer::scratch)
      .def_property_readonly("state", &CudaAttentionLayer::state)
      .def_property_readonly("on_blocks", &CudaAttentionLayer::on_blocks);
  define_method<&CudaAttentionLayer::forward>(cuda_layer, "forward");
  define_method<&CudaAttentionLayer::backward>(cuda_layer, "backward");
  define_structure<&gatv2_input>(m, "Gatv2AttentionInput");
  define<&gatv2_attention>(m, "gatv2_attention");
  define<&gatv2_attention_backward>(m, "gatv2_attention_backward");
  define_structure<&edge_attention_input>(m, "EdgeAttentionInput");
  define<&edge_attention>(m, "edge_attention");
  define<&edge_attention_backward>(m, "edge_attention_backward");
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
  const auto layer =
      define_structure<&make<AttentionLayer, const CsrStructure&, AttentionScore, Dtype, std::int64_t,
                             std::int64_t, std::int64_t, double>>(m, "AttentionLayer");
  define_method<&AttentionLayer::forward>(layer, "forward");
  define_method<&AttentionLayer::backward>(layer, "backward");
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
  define<&plan_graphs>(m, "plan_graphs");
  define<&gather_graphs>(m, "gather_graphs");
  define<&gather_rows_of_host>(m, "gather_rows_of_host");
#ifdef FASTSPARSE_WITH_CUDA
  define<&gather_rows>(m, "gather_rows");
#endif
  define<&build_info>(m, "build_info");
}
