// Operators for inference in PyTorch's dispatcher, for C++ programs without Python: the AOTInductor packages
// of `fastsparse_core.export.for_cpp` call them. This file wraps the launchers with PyTorch's stable ABI, so
// one build supports PyTorch 2.10 and newer. A structure is the four tensors that `compress` returns.
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "fastsparse/launchers.h"
#include "fastsparse/on_device.h"
#include "fastsparse/spmm_extremum.h"

#ifdef FASTSPARSE_WITH_CUDA
#include <dlfcn.h>
#endif

namespace fastsparse {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// ---------------------------------------------------------------- tensors as launchers take them

Tensor empty(const Tensor& like, std::initializer_list<std::int64_t> sizes, std::int32_t dtype) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t k = sizes.size() - 1; k-- > 0;) strides[k] = strides[k + 1] * sizes.begin()[k + 1];
  std::int32_t device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.begin(), strides.data(), dtype, device,
                                                  like.get_device_index(), &made));
  return Tensor(made);
}

std::int32_t type_of(const Tensor& tensor) {
  std::int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return Dtype::kFloat64;
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    default:
      STD_TORCH_CHECK(false, "fastsparse: expected float64, float32, float16 or bfloat16");
  }
}

// PyTorch's code of the accumulation type of `dtype`.
std::int32_t sum_type(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}

DenseView rows_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2 && (x.stride(1) == 1 || x.size(1) <= 1),
                  "fastsparse: expected features (num_nodes, width) whose rows are contiguous");
  return {x.data_ptr(), x.stride(0)};
}

DenseView rows_of(const MaybeTensor& x) { return x ? rows_of(*x) : DenseView{}; }

const void* data_of(const MaybeTensor& tensor) {
  if (!tensor) return nullptr;
  STD_TORCH_CHECK(tensor->is_contiguous(), "fastsparse: expected contiguous tensors");
  return tensor->data_ptr();
}

EdgeValueView values_of(const MaybeTensor& value, Dtype otherwise) {
  if (!value) return {nullptr, otherwise, 1};
  return {data_of(value), dtype_of(*value), value->dim() > 1 ? value->size(1) : 1};
}

// A structure, as `compress` returns it, and its number of columns. `rowptr` has an additional row for the
// edges that `compress` leaves out.
struct Rows {
  const Tensor& rowptr;
  const Tensor& col;
  const Tensor& order;
  const Tensor& slices;
  std::int64_t num_cols;

  std::int64_t num_rows() const { return rowptr.size(0) - 2; }

  CsrView view() const {
    const auto* pointers = static_cast<const std::int64_t*>(rowptr.data_ptr());
    const std::int64_t num_edges = rowptr.is_cuda() ? col.size(0) : pointers[num_rows()];
    return {pointers,         static_cast<const std::int32_t*>(col.data_ptr()),
            order.data_ptr(), false,
            num_rows(),       num_cols,
            num_edges};
  }

  RowSplitView split() const {
    return {static_cast<const RowSlice*>(slices.data_ptr()), slices.size(0), nullptr, nullptr, 0};
  }
};

#ifdef FASTSPARSE_WITH_CUDA
// Returns PyTorch's current stream. Only PyTorch with CUDA has the function that returns it. That function is
// looked up at run time, so that this library is not linked to libtorch_cuda and also loads without it.
// Python does not load PyTorch's libraries with global symbols, so the library is opened by name.
void* current_stream(int device) {
  using Function = AOTITorchError (*)(std::int32_t device, void** stream);
  static const auto ask = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* found = dlsym(library != nullptr ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Function>(found);
  }();
  STD_TORCH_CHECK(ask != nullptr, "fastsparse: expected a PyTorch with CUDA");
  void* stream;
  TORCH_ERROR_CODE_CHECK(ask(device, &stream));
  return stream;
}

template <typename Run>
void in_cuda(const Tensor& like, const Run& run) {
  const int device = like.get_device_index();
  void* stream = current_stream(device);
  try {
    on_device(device, [&] { return run(stream); });
  } catch (const CudaError& error) {
    STD_TORCH_CHECK(false, "fastsparse: ", text_of(error));
  }
}
#else
template <typename Run>
void in_cuda(const Tensor&, const Run&) {
  STD_TORCH_CHECK(false, "fastsparse: this library was built without CUDA");
}
#endif

template <typename Args>
void launch(const Tensor& like, const Args& args, void (*cpu)(const Args&, int),
            int (*cuda)(const Args&, void*)) {
  if (like.is_cuda()) return in_cuda(like, [&](void* stream) { return cuda(args, stream); });
  cpu(args, static_cast<int>(torch::stable::get_num_threads()));
}

// ---------------------------------------------------------------- operators

// Checks the indices of all edges except (num_rows, -1), which compress leaves out. Row num_rows with another
// col is an error: the row could be an index that is one too large.
template <typename Index>
void check_edges(const Tensor& row, const Tensor& col, std::int64_t num_rows, std::int64_t num_cols) {
  const auto* rows = static_cast<const Index*>(row.data_ptr());
  const auto* cols = static_cast<const Index*>(col.data_ptr());
  for (std::int64_t k = 0; k < row.size(0); ++k) {
    const std::int64_t of_row = rows[k], of_col = cols[k];
    if (of_row == num_rows && of_col == -1) continue;
    STD_TORCH_CHECK(of_row >= 0 && of_row < num_rows, "edge_index: expected destinations from 0 to ",
                    num_rows - 1, ", got ", of_row);
    STD_TORCH_CHECK(of_col >= 0 && of_col < num_cols, "edge_index: expected sources from 0 to ", num_cols - 1,
                    ", got ", of_col);
  }
}

// On CUDA, rows are not cut: each row has one slice, so that the host need not read sizes from the device.
void slice_rows(const Tensor& rowptr, const Tensor& slices, std::int64_t num_rows) {
#ifdef FASTSPARSE_WITH_CUDA
  constexpr std::int64_t kUncut = std::int64_t{1} << 31;
  const std::int64_t num_counts = cuda::num_row_split_counts(num_rows);
  const Tensor counts = empty(rowptr, {num_counts + 3}, aoti_torch_dtype_int64());
  auto* begin = static_cast<std::int64_t*>(counts.data_ptr());
  const RowSplitArgs args{static_cast<const std::int64_t*>(rowptr.data_ptr()),
                          num_rows,
                          kUncut,
                          begin,
                          begin + num_counts,
                          static_cast<RowSlice*>(slices.data_ptr()),
                          nullptr,
                          begin + num_counts + 2};
  in_cuda(rowptr, [&](void* stream) {
    const int error = cuda::row_split_count(args, stream);
    return error != cudaSuccess ? error : cuda::row_split_fill(args, stream);
  });
#else
  (void)rowptr, (void)slices, (void)num_rows;
#endif
}

// Sorts edges stably by row. Edges with row num_rows are left out of the rows, and are stored last. Their col
// is -1 on the CPU, and 0 on CUDA, where indices are not checked.
std::tuple<Tensor, Tensor, Tensor, Tensor> compress(Tensor row, Tensor col, std::int64_t num_rows,
                                                    std::int64_t num_cols) {
  const std::int64_t num_edges = row.size(0);
  const bool is_long = row.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(row.is_contiguous() && col.is_contiguous() && row.scalar_type() == col.scalar_type() &&
                      (is_long || row.scalar_type() == ScalarType::Int) && col.size(0) == num_edges,
                  "edge_index: expected contiguous int64 or int32 rows of equal length");
  STD_TORCH_CHECK(num_edges <= std::numeric_limits<std::int32_t>::max(),
                  "edge_index: expected at most 2^31 - 1 edges, got ", num_edges);
  const Tensor rowptr = empty(row, {num_rows + 2}, aoti_torch_dtype_int64());
  const Tensor col_out = empty(row, {num_edges}, aoti_torch_dtype_int32());
  const Tensor order = empty(row, {num_edges}, aoti_torch_dtype_int32());
  const Tensor slices = empty(row, {row.is_cuda() ? num_rows : 0, 2}, aoti_torch_dtype_int64());
  const CompressArgs args{row.data_ptr(),
                          col.data_ptr(),
                          is_long,
                          num_edges,
                          num_rows + 1,
                          num_cols,
                          false,
                          static_cast<std::int64_t*>(rowptr.data_ptr()),
                          static_cast<std::int32_t*>(col_out.data_ptr()),
                          order.data_ptr(),
                          false};
  if (!row.is_cuda()) {
    is_long ? check_edges<std::int64_t>(row, col, num_rows, num_cols)
            : check_edges<std::int32_t>(row, col, num_rows, num_cols);
    cpu::compress(args);
    return {rowptr, col_out, order, slices};
  }
#ifdef FASTSPARSE_WITH_CUDA
  if (num_edges == 0) {
    in_cuda(row, [&](void* stream) {
      return cudaMemsetAsync(args.major_ptr, 0, (num_rows + 2) * sizeof(std::int64_t),
                             static_cast<cudaStream_t>(stream));
    });
  } else {
    const auto size = cuda::compress_scratch_bytes(args);
    const Tensor scratch = empty(row, {static_cast<std::int64_t>(size)}, aoti_torch_dtype_uint8());
    in_cuda(row, [&](void* stream) { return cuda::compress(args, scratch.data_ptr(), size, stream); });
  }
#endif
  slice_rows(rowptr, slices, num_rows);
  return {rowptr, col_out, order, slices};
}

Tensor spmm(Tensor x, MaybeTensor value, MaybeTensor scale_dst, MaybeTensor scale_src, MaybeTensor bias,
            Tensor rowptr, Tensor col, Tensor order, Tensor slices, bool relu) {
  const Rows rows{rowptr, col, order, slices, x.size(0)};
  const Tensor out = empty(x, {rows.num_rows(), x.size(1)}, type_of(x));
  if (rows.num_rows() == 0 || x.size(1) == 0) return out;
  SpmmArgs args{};
  args.a = rows.view();
  args.split = rows.split();
  args.dtype = dtype_of(x);
  args.value = values_of(value, args.dtype);
  args.x = rows_of(x);
  args.scale_dst = data_of(scale_dst);
  args.scale_src = data_of(scale_src);
  args.bias = data_of(bias);
  args.relu = relu;
  args.out = out.data_ptr();
  args.width = x.size(1);
  const bool is_weighted = value || scale_src;  // the same choice as policy.csr_tile
  args.tile = args.dtype == Dtype::kFloat32   ? (is_weighted ? 64 : 32)
              : args.dtype == Dtype::kFloat64 ? 16
                                              : 64;
  launch<SpmmArgs>(x, args, &cpu::spmm_csr, FASTSPARSE_OF_CUDA(spmm_csr));
  return out;
}

Tensor spmm_extremum(Tensor x, MaybeTensor value, Tensor rowptr, Tensor col, Tensor order, Tensor slices,
                     bool minimum, bool adds) {
  const Rows rows{rowptr, col, order, slices, x.size(0)};
  const Tensor out = empty(x, {rows.num_rows(), x.size(1)}, type_of(x));
  if (rows.num_rows() == 0 || x.size(1) == 0) return out;
  const Tensor arg = empty(x, {rows.num_rows(), x.size(1)}, aoti_torch_dtype_int32());
  SpmmExtremumArgs args{};
  args.a = rows.view();
  args.split = rows.split();
  args.dtype = dtype_of(x);
  args.value = values_of(value, args.dtype);
  args.x = rows_of(x);
  args.out = out.data_ptr();
  args.arg = static_cast<std::int32_t*>(arg.data_ptr());
  args.width = x.size(1);
  args.minimum = minimum;
  args.adds = adds;
  launch<SpmmExtremumArgs>(x, args, &cpu::spmm_extremum, FASTSPARSE_OF_CUDA(spmm_extremum));
  return out;
}

#ifdef FASTSPARSE_WITH_CUDA
float* floats_of(const Tensor& tensor) { return static_cast<float*>(tensor.data_ptr()); }

// Checks the conditions of `unsupported_reason` in ops/_attention.py, without which the launchers write no
// result. For calls that do not meet them, `for_cpp` exports PyTorch's operators.
void check_attention_on_cuda(const AttentionCsrArgs& args, const Tensor& dst, const Tensor& src,
                             bool has_values) {
  constexpr std::int64_t kMostHeads = 65'535, kMostHeadWidth = 256, kMostWidth = 32 * 65'535;
  const bool is_gatv2 = args.kind == AttentionScore::kGatv2;
  STD_TORCH_CHECK(is_gatv2 || args.kind == AttentionScore::kAdditive,
                  "fastsparse: expected attention of GAT or GATv2 on CUDA");
  STD_TORCH_CHECK(args.edge.data == nullptr && args.weight.data == nullptr,
                  "fastsparse: expected attention without edge features on CUDA");
  STD_TORCH_CHECK(args.dtype != Dtype::kFloat64,
                  "fastsparse: expected values in float32, float16 or bfloat16 on CUDA, got float64");
  STD_TORCH_CHECK(args.heads <= kMostHeads, "fastsparse: expected at most ", kMostHeads,
                  " heads on CUDA, got ", args.heads);
  STD_TORCH_CHECK(args.value_width >= 1 && args.value_width <= kMostHeadWidth,
                  "fastsparse: expected heads of 1 to ", kMostHeadWidth, " features on CUDA, got ",
                  args.value_width);
  STD_TORCH_CHECK(args.heads * args.value_width <= kMostWidth, "fastsparse: expected at most ", kMostWidth,
                  " features of all heads on CUDA, got ", args.heads * args.value_width);
  if (is_gatv2) {
    STD_TORCH_CHECK(!has_values && args.bias.data == nullptr && args.att != nullptr,
                    "fastsparse: expected attention of GATv2 with att and without v and bias on CUDA");
    STD_TORCH_CHECK(args.head_width == args.value_width, "fastsparse: expected dst with heads of ",
                    args.value_width, " features, as src, got ", args.head_width);
    STD_TORCH_CHECK(args.scale >= 0 && args.scale <= 1,
                    "fastsparse: expected a slope from 0 to 1 for GATv2 on CUDA, got ", args.scale);
  } else {
    STD_TORCH_CHECK(has_values && args.att == nullptr,
                    "fastsparse: expected attention of GAT with v and without att on CUDA");
    STD_TORCH_CHECK(dst.size(1) == args.heads && src.size(1) == args.heads && dst.is_contiguous() &&
                        src.is_contiguous() && dtype_of(dst) == Dtype::kFloat32 &&
                        dtype_of(src) == Dtype::kFloat32,
                    "fastsparse: expected contiguous float32 scores (num_nodes, heads) of GAT");
  }
}

void attention_on_cuda(const AttentionCsrArgs& args, const Rows& rows, const Tensor& out, const Tensor& lse) {
  const float slope = static_cast<float>(args.scale);
  if (args.kind == AttentionScore::kAdditive) {
    const AdditiveAttentionInput input{static_cast<const float*>(args.dst.data),
                                       static_cast<const float*>(args.src.data),
                                       args.v,
                                       args.bias,
                                       slope,
                                       args.dropout,
                                       args.heads,
                                       args.value_width,
                                       args.dtype};
    const AdditiveAttentionArgs call{args.a,         rows.split(), input,  out.data_ptr(),
                                     floats_of(lse), nullptr,      nullptr};
    return in_cuda(out, [&](void* stream) { return cuda::additive_attention(call, stream); });
  }
  const Gatv2AttentionInput input{args.dst,        args.src,     static_cast<const float*>(args.att),
                                  slope,           args.dropout, args.heads,
                                  args.head_width, args.dtype};
  const Gatv2AttentionArgs call{args.a,         rows.split(), input,  out.data_ptr(),
                                floats_of(lse), nullptr,      nullptr};
  in_cuda(out, [&](void* stream) { return cuda::gatv2_attention(call, stream); });
}
#else
void check_attention_on_cuda(const AttentionCsrArgs&, const Tensor&, const Tensor&, bool) {}

void attention_on_cuda(const AttentionCsrArgs&, const Rows&, const Tensor& out, const Tensor&) {
  in_cuda(out, [](void*) { return 0; });
}
#endif

Tensor attention(Tensor dst, Tensor src, MaybeTensor v, MaybeTensor att, MaybeTensor edge,
                 MaybeTensor edge_weight, MaybeTensor bias, double scale, std::int64_t kind,
                 std::int64_t heads, Tensor rowptr, Tensor col, Tensor order, Tensor slices) {
  STD_TORCH_CHECK(heads >= 1, "fastsparse: expected at least 1 head, got ", heads);
  const Rows rows{rowptr, col, order, slices, src.size(0)};
  const Tensor& values = v ? *v : src;
  const Tensor out = empty(src, {rows.num_rows(), values.size(1)}, type_of(values));
  if (rows.num_rows() == 0 || values.size(1) == 0) return out;
  AttentionCsrArgs args{};
  args.a = rows.view();
  args.kind = static_cast<AttentionScore>(kind);
  args.dtype = dtype_of(values);
  args.dst = rows_of(dst);
  args.src = rows_of(src);
  args.v = rows_of(values);
  args.att = data_of(att);
  args.bias = values_of(bias, args.dtype);
  args.bias.heads = heads;
  args.edge = rows_of(edge);
  args.weight = rows_of(edge_weight);
  args.scale = scale;
  args.dropout = make_dropout(0, 0);
  args.keep_scale = 1;
  args.heads = heads;
  args.head_width = dst.size(1) / heads;
  args.value_width = values.size(1) / heads;
  args.edge_width = edge ? edge->size(1) : 0;
  args.out = out.data_ptr();
  const Tensor lse = empty(src, {rows.num_rows(), heads}, sum_type(args.dtype));
  args.lse = lse.data_ptr();
  if (src.is_cuda()) {
    check_attention_on_cuda(args, dst, src, v.has_value());
    attention_on_cuda(args, rows, out, lse);
  } else {
    cpu::attention_csr(args, static_cast<int>(torch::stable::get_num_threads()));
  }
  return out;
}

}  // namespace

#define FASTSPARSE_ROWS "Tensor rowptr, Tensor col, Tensor order, Tensor slices"

STABLE_TORCH_LIBRARY(fastsparse_cpp, m) {
  m.def("compress(Tensor row, Tensor col, SymInt num_rows, SymInt num_cols) -> (" FASTSPARSE_ROWS ")");
  m.def("spmm(Tensor x, Tensor? value, Tensor? scale_dst, Tensor? scale_src, Tensor? bias, " FASTSPARSE_ROWS
        ", bool relu) -> Tensor");
  m.def("spmm_extremum(Tensor x, Tensor? value, " FASTSPARSE_ROWS ", bool minimum, bool adds) -> Tensor");
  m.def(
      "attention(Tensor dst, Tensor src, Tensor? v, Tensor? att, Tensor? edge, Tensor? edge_weight, "
      "Tensor? bias, float scale, int kind, int heads, " FASTSPARSE_ROWS ") -> Tensor");
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("compress", TORCH_BOX(&compress));
  m.impl("spmm", TORCH_BOX(&spmm));
  m.impl("spmm_extremum", TORCH_BOX(&spmm_extremum));
  m.impl("attention", TORCH_BOX(&attention));
}

STABLE_TORCH_LIBRARY_IMPL(fastsparse_cpp, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fastsparse_cpp, CUDA, m) { implement(m); }

}  // namespace fastsparse
