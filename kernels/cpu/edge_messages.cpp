// Messages with edge features on the CPU, forward and backward: rows are divided among threads, entries are
// processed one by one, and sums have the accumulation type. Formulas and passes are the same as in the CUDA
// kernels (edge_messages.cu and edge_messages_backward.cu). The sign of feature f is bit f % 8 of byte f / 8.
#include "fastsparse/edge_messages.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include "fastsparse/cpu_attention.h"
#include "fastsparse/cpu_pages.h"

namespace fastsparse::cpu {
namespace {

// Prefetches a row of a matrix, unless the matrix is null.
template <int kWrite = 0>
FASTSPARSE_INLINE void prefetch_row(const void* matrix, std::int64_t row, std::int64_t stride,
                                    std::int64_t bytes) {
  if (matrix != nullptr) prefetch<kWrite>(static_cast<const char*>(matrix) + row * stride, bytes);
}

std::int64_t work(const CsrView& a, const EdgeMessageInput& input) {
  return a.num_edges * input.width * (1 + input.edge_width);
}

// Each loop over features is a function of its own, because compilers rely on __restrict only for parameters
// of functions.
template <typename A>
FASTSPARSE_INLINE void add_row(const A* from, A* __restrict to, std::int64_t width) {
  for (std::int64_t f = 0; f < width; ++f) to[f] += from[f];
}
template <typename A>
FASTSPARSE_INLINE void add_scaled(A by, const A* from, A* __restrict to, std::int64_t width) {
  for (std::int64_t f = 0; f < width; ++f) to[f] += by * from[f];
}

template <typename A>
FASTSPARSE_INLINE void set_sum(const A* left, const A* right, A* __restrict to, std::int64_t width) {
  for (std::int64_t f = 0; f < width; ++f) to[f] = left[f] + right[f];
}

// Computes <left, right> with vectors. Compilers would not use vectors in a plain loop, because that changes
// the order of the terms.
template <typename A>
FASTSPARSE_INLINE A product(const A* left, const A* right, std::int64_t width) {
  constexpr int kLanes = kVectorWidth<A>;
  Vector<A> sum = {}, l, r;
  std::int64_t f = 0;
  for (; f + kLanes <= width; f += kLanes) {
    load_vector<A>(left + f, l);
    load_vector<A>(right + f, r);
    sum += l * r;
  }
  A total = sum_lanes<A, kLanes>(sum);
  for (; f < width; ++f) total += left[f] * right[f];
  return total;
}

// 1 + eps, rounded like PyTorch's sum.
template <typename A>
A one_plus(const void* eps, Dtype dtype) {
  double number;
  set_number(&number, dtype, 0, A{1} + number_at<A>(eps, dtype, 0));
  return number_at<A>(&number, dtype, 0);
}

template <typename A>
FASTSPARSE_INLINE A sigmoid(A z) {
  const A e = exponential(z < A{0} ? z : -z);
  return (z < A{0} ? e : A{1}) / (A{1} + e);
}

// Adds the terms of a gated entry to the sums of its row.
template <typename A>
FASTSPARSE_INLINE void add_gated(const A* z, const A* value, bool with_state, A* __restrict sum,
                                 A* __restrict side, std::int64_t width) {
  for (std::int64_t f = 0; f < width; ++f) {
    const A gate = sigmoid(z[f]), sent = gate * value[f];
    sum[f] += sent;
    side[f] += with_state ? gate : sent * (A{1} - gate);
  }
}

// Replaces z and v_ij by the gradients of z and v_ij.
template <typename A>
FASTSPARSE_INLINE void differentiate_gated(const A* grad, const A* side, const A* grad_state, A* __restrict z,
                                           A* __restrict value, std::int64_t width) {
  for (std::int64_t f = 0; f < width; ++f) {
    const A gate = sigmoid(z[f]), slope = gate * (A{1} - gate);
    z[f] = slope * (value[f] * grad[f] + side[f]) + grad_state[f];
    value[f] = gate * grad[f];
  }
}

// For every byte, masks for eight numbers: a word with all bits set for each set bit, and 0 for the others.
constexpr auto kMasks = [] {
  std::array<std::array<std::int32_t, 8>, 256> masks{};
  for (int byte = 0; byte < 256; ++byte) {
    for (int bit = 0; bit < 8; ++bit) masks[byte][bit] = byte >> bit & 1 ? -1 : 0;
  }
  return masks;
}();

template <typename A>
FASTSPARSE_INLINE void keep_signs(const A* z, std::int64_t width, std::uint8_t* positive,
                                  std::int64_t bytes) {
  for (std::int64_t byte = 0; byte < bytes; ++byte) {
    const int count = static_cast<int>(std::clamp<std::int64_t>(width - 8 * byte, 0, 8));
    unsigned bits = 0;
    for (int i = 0; i < count; ++i)
      bits |= (z[8 * byte + i] <= A{0} ? 0u : 1u) << i;  // the bit is also set for NaN
    positive[byte] = static_cast<std::uint8_t>(bits);
  }
}

// Copies the numbers whose bits in `positive` are set; the others become 0.
template <typename A>
FASTSPARSE_INLINE void where_positive(const std::uint8_t* positive, const A* from, A* __restrict to,
                                      std::int64_t width) {
  using Bits = std::conditional_t<sizeof(A) == 4, std::int32_t, std::int64_t>;
  for (std::int64_t first = 0; first < width; first += 8) {
    const auto& masks = kMasks[positive[first / 8]];
    const int count = static_cast<int>(std::min<std::int64_t>(width - first, 8));
    const auto choose = [&](int i) {
      Bits bits;
      std::memcpy(&bits, &from[first + i], sizeof bits);
      bits &= Bits{masks[i]};
      std::memcpy(&to[first + i], &bits, sizeof bits);
    };
    if (count == 8) {
      for (int i = 0; i < 8; ++i) choose(i);
    } else {
      for (int i = 0; i < count; ++i) choose(i);
    }
  }
}

// Computes the message of one entry from its row, its source and its edge.
template <typename A>
struct Message {
  const EdgeMessageInput& input;
  const std::int64_t width = input.width;
  const bool gated = input.message != EdgeMessage::kRelu, raw = input.weight != nullptr;
  std::vector<A> memory;  // one allocation for all arrays, because one per array takes as long as all edges
                          // of a small graph
  A *z = memory.data(), *value = z + width, *workspace = value + width, *row_workspace = workspace + width;
  A *features_workspace = row_workspace + width, *rows = features_workspace + (raw ? input.edge_width : 0);
  const A* of_row;  // k, or the bias, or zeros
  const A* features = nullptr;

  // `count`: number of additional rows, initialised to 0, that the caller gets from row().
  Message(const EdgeMessageInput& of, std::int64_t count)
      : input(of), memory((4 + count) * width + (raw ? of.edge_width : 0)) {
    of_row = !gated && of.bias != nullptr ? static_cast<const A*>(of.bias) : row_workspace;
  }

  A* row(std::int64_t nth) const { return rows + nth * width; }

  FASTSPARSE_INLINE const A* read(const DenseView& matrix, std::int64_t row) {
    return read_row(matrix, input.dtype, row, width, workspace);
  }

  FASTSPARSE_INLINE void set_row(std::int64_t row) {
    if (gated) of_row = read_row(input.k, input.dtype, row, width, row_workspace);
  }

  FASTSPARSE_INLINE void add_projected(const void* weight, A* to) const {
    const A* map = static_cast<const A*>(weight);
    constexpr int kLanes = kVectorWidth<A>;
    std::int64_t f = 0;
    for (; f + kLanes <= width; f += kLanes) {  // sums stay in registers for all edge features
      Vector<A> sum, row;
      load_vector<A>(to + f, sum);
      for (std::int64_t a = 0; a < input.edge_width; ++a) {
        load_vector<A>(map + a * width + f, row);
        sum += features[a] * row;
      }
      store_vector<A>(sum, to + f);
    }
    for (; f < width; ++f) {
      for (std::int64_t a = 0; a < input.edge_width; ++a) to[f] += features[a] * map[a * width + f];
    }
  }

  FASTSPARSE_INLINE void prefetch_row(const DenseView& matrix, std::int64_t row, std::int64_t count) const {
    const std::int64_t item = size_of(input.dtype);
    cpu::prefetch_row(matrix.data, row, matrix.stride * item, count * item);
  }

  FASTSPARSE_INLINE void set_features(std::int64_t position) {
    if (raw) features = read_row(input.edge, input.dtype, position, input.edge_width, features_workspace);
  }

  // Computes z and v_ij for an entry of the current row.
  FASTSPARSE_INLINE void set_entry(std::int64_t col, std::int64_t position) {
    set_sum(of_row, read(input.q, col), z, width);
    if (gated) std::copy_n(read(input.v, col), width, value);
    set_features(position);
    if (raw) {
      add_projected(input.weight, z);
      if (gated) add_projected(input.of_value, value);
    } else if (input.edge.data != nullptr) {
      add_row(read(input.edge, position), z, width);
    }
  }
};

template <typename A>
FASTSPARSE_INLINE void send(const EdgeMessageArgs& args, std::int64_t row_begin, std::int64_t row_end) {
  const EdgeMessageInput& input = args.input;
  const std::int64_t width = input.width;
  const bool with_state = input.message == EdgeMessage::kGateAndState;
  Message<A> message(input, 2);
  A *sum = message.row(0), *side = message.row(1);
  const A *z = message.z, *value = message.value;
  const A scale = args.eps == nullptr ? A{1} : one_plus<A>(args.eps, input.dtype);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    std::fill_n(sum, width, A{0});
    std::fill_n(side, width, A{0});
    message.set_row(row);
    for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
      const std::int64_t position = edge_position(args.a, entry);
      if (entry + kPrefetchEntries < args.a.num_edges) {  // also prefetches for later rows
        const std::int64_t next = edge_position(args.a, entry + kPrefetchEntries);
        message.prefetch_row(input.edge, next, message.raw ? input.edge_width : width);
        message.prefetch_row(input.q, args.a.col[entry + kPrefetchEntries], width);
        prefetch_row<1>(args.positive, next, args.sign_bytes, args.sign_bytes);
      }
      message.set_entry(args.a.col[entry], position);
      if (message.gated) {
        add_gated(z, value, with_state, sum, side, width);
        if (with_state) write_row(z, width, args.state, input.dtype, position * width);
        continue;
      }
      for (std::int64_t f = 0; f < width; ++f) sum[f] += rectify(z[f]);
      if (args.positive == nullptr) continue;
      keep_signs(z, width, args.positive + position * args.sign_bytes, args.sign_bytes);
    }
    if (args.root.data != nullptr) add_scaled(scale, message.read(args.root, row), sum, width);
    write_row(sum, width, args.out, input.dtype, row * width);
    if (args.side != nullptr) write_row(side, width, args.side, input.dtype, row * width);
  }
}

// Adds an entry's terms to dW, and to dbias, which is stored after dW. `message.z` has the gradient of the
// entry.
template <typename A>
FASTSPARSE_INLINE void add_to_maps(Message<A>& message, std::int64_t position, A* grad_weight) {
  const std::int64_t width = message.width, edge_width = message.input.edge_width;
  message.set_features(position);
  for (std::int64_t a = 0; a < edge_width; ++a) {
    add_scaled<A>(message.features[a], message.z, grad_weight + a * width, width);
  }
  add_row<A>(message.z, grad_weight + edge_width * width, width);
}

// Computes the gradients of columns begin .. end - 1 (sources) and of the edges of their entries. For relu,
// also the gradients of the maps if `grad_weight` is not null.
template <typename A>
FASTSPARSE_INLINE void differentiate_columns(const EdgeMessageBackwardArgs& args, std::int64_t begin,
                                             std::int64_t end, A* grad_weight) {
  const EdgeMessageInput& input = args.input;
  const Dtype dtype = input.dtype;
  const std::int64_t width = input.width, edge_width = input.edge_width, item = size_of(dtype);
  const bool with_state = input.message == EdgeMessage::kGateAndState;
  Message<A> message(input, 7);
  A *z = message.z, *value = message.value, *grad_q = message.row(0), *grad_v = message.row(1);
  const A *side = message.row(2), *grad_state = message.row(3);
  const A scale = args.scale == nullptr ? A{0} : number_at<A>(args.scale, dtype, 0);
  for (std::int64_t source = begin; source < end; ++source) {
    std::fill_n(grad_q, width, A{0});
    std::fill_n(grad_v, width, A{0});
    const A* v = message.gated ? read_row(input.v, dtype, source, width, message.row(4)) : nullptr;
    const A* q =
        message.gated && !with_state ? read_row(input.q, dtype, source, width, message.row(5)) : nullptr;
    for (std::int64_t entry = args.a_t.rowptr[source]; entry < args.a_t.rowptr[source + 1]; ++entry) {
      const std::int64_t row = args.a_t.col[entry], position = edge_position(args.a_t, entry);
      if (entry + kPrefetchEntries < args.a_t.num_edges) {  // also prefetches for later columns
        const std::int64_t next = edge_position(args.a_t, entry + kPrefetchEntries);
        message.prefetch_row(args.grad, args.a_t.col[entry + kPrefetchEntries], width);
        prefetch_row(args.positive, next, args.sign_bytes, args.sign_bytes);
        prefetch_row<1>(args.grad_edge, next, width * item, width * item);
      }
      const A* grad = read_row(args.grad, dtype, row, width, message.row(6));
      if (message.gated) {
        std::copy_n(v, width, value);
        if (with_state) {
          std::copy_n(message.read(args.state, position), width, z);
          side = read_row(args.grad_side, dtype, row, width, message.row(2));
          if (args.grad_state.data != nullptr) {
            grad_state = read_row(args.grad_state, dtype, position, width, message.row(3));
          }
        } else {
          set_sum(q, message.read(input.k, row), z, width);
          message.set_features(position);
          message.add_projected(input.weight, z);
          message.add_projected(input.of_value, value);
        }
        differentiate_gated(grad, side, grad_state, z, value, width);
        add_row<A>(value, grad_v, width);
      } else {
        where_positive(args.positive + position * args.sign_bytes, grad, z, width);
      }
      add_row<A>(z, grad_q, width);
      if (grad_weight != nullptr) add_to_maps(message, position, grad_weight);
      if (args.grad_edge != nullptr) write_row<A>(z, width, args.grad_edge, dtype, position * width);
      if (args.grad_features == nullptr) continue;
      for (std::int64_t a = 0; a < edge_width; ++a) {
        A total = product(static_cast<const A*>(input.weight) + a * width, z, width);
        if (message.gated)
          total += product<A>(static_cast<const A*>(input.of_value) + a * width, value, width);
        static_cast<A*>(args.grad_features)[position * edge_width + a] = total;
      }
    }
    if (args.scale != nullptr) add_scaled(scale, message.read(args.grad, source), grad_q, width);
    write_row<A>(grad_q, width, args.grad_q, dtype, source * width);
    if (message.gated) write_row<A>(grad_v, width, args.grad_v, dtype, source * width);
  }
}

// Number of elements of a group's results: the rows of dW, and then dbias (relu) or the rows of dU (gates).
std::int64_t size_of_group(const EdgeMessageInput& input) {
  return (input.edge_width + (input.message == EdgeMessage::kRelu ? 1 : input.edge_width)) * input.width;
}

// Number of row groups for dW and dU. It depends only on the graph, so that results do not depend on the
// number of threads.
std::int64_t groups_of(const EdgeMessageBackwardArgs& args) {
  const EdgeMapGradients& maps = args.maps;
  if (maps.weight == nullptr && maps.of_value == nullptr && maps.bias == nullptr) return 0;
  return std::clamp<std::int64_t>(args.a.num_rows / 32, 1, 64);
}

// Adds the terms of a group of rows to dW, and to the results that are stored after dW.
template <typename A>
FASTSPARSE_INLINE void differentiate_weights(const EdgeMessageBackwardArgs& args, A* grad_weight,
                                             std::int64_t row_begin, std::int64_t row_end) {
  const EdgeMessageInput& input = args.input;
  const std::int64_t width = input.width, edge_width = input.edge_width;
  Message<A> message(input, 2);
  A* behind = grad_weight + edge_width * width;
  A *z = message.z, *value = message.value;
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const A* grad = read_row(args.grad, input.dtype, row, width, message.row(0));
    message.set_row(row);
    for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
      const std::int64_t position = edge_position(args.a, entry);
      if (message.gated) {
        message.set_entry(args.a.col[entry], position);
        differentiate_gated<A>(grad, message.row(1), message.row(1), z, value, width);
        for (std::int64_t a = 0; a < edge_width; ++a) {
          add_scaled<A>(message.features[a], z, grad_weight + a * width, width);
          add_scaled<A>(message.features[a], value, behind + a * width, width);
        }
      } else {
        where_positive(args.positive + position * args.sign_bytes, grad, z, width);
        add_to_maps(message, position, grad_weight);
      }
    }
  }
}

// Adds the groups' parts of dW, dbias and dU in float64, as on CUDA, and transposes them.
template <typename A>
void sum_groups(const EdgeMessageBackwardArgs& args, const std::vector<A>& parts) {
  const EdgeMapGradients& to = args.maps;
  const std::int64_t width = args.input.width, size = size_of_group(args.input);
  std::vector<double> sums(size);
  const double* behind = sums.data() + args.input.edge_width * width;
  for (std::size_t i = 0; i < parts.size(); i += size) {
    for (std::int64_t k = 0; k < size; ++k) sums[k] += parts[i + k];
  }
  const auto store = [&](void* map, std::int64_t columns, const double* rows) {
    for (std::int64_t f = 0; map != nullptr && f < to.width; ++f) {
      for (std::int64_t a = 0; a < columns; ++a) {
        const double sum = rows[a * width + f];
        to.dtype == Dtype::kFloat64 ? set_number(map, to.dtype, f * columns + a, sum)
                                    : set_number(map, to.dtype, f * columns + a, static_cast<float>(sum));
      }
    }
  };
  store(to.weight, to.edge_width, sums.data());
  store(to.bias, 1, behind);
  store(to.of_value, to.edge_width, behind);
}

template <typename T>
void lay_out_maps(const EdgeMapsArgs& args) {
  Acc<T>* out = static_cast<Acc<T>*>(args.out);
  const auto transpose = [&](const DenseView& map, const DenseView& added) {
    for (std::int64_t f = 0; f < args.given_width; ++f) {
      const T* from = static_cast<const T*>(map.data) + f * map.stride;
      const T* more = added.data == nullptr ? nullptr : static_cast<const T*>(added.data) + f * added.stride;
      for (std::int64_t a = 0; a < args.given_edge_width; ++a) {
        out[a * args.width + f] = widen(from[a]) + (more == nullptr ? Acc<T>{0} : widen(more[a]));
      }
    }
    out += args.edge_width * args.width;
  };
  transpose(args.weight, args.added);
  if (args.of_value.data != nullptr) transpose(args.of_value, {});
  const T* bias = static_cast<const T*>(args.bias);
  for (std::int64_t f = 0; bias != nullptr && f < args.given_width; ++f) out[f] = widen(bias[f]);
}

void lay_out(EdgeMessageInput& input) {
  find_maps(input);
  if (input.maps.weight.data == nullptr) return;
  with_type(input.maps.dtype, [&](auto type) { lay_out_maps<decltype(type)>(input.maps); });
}

}  // namespace

void edge_messages(const EdgeMessageArgs& given, int threads) {
  EdgeMessageArgs args = given;
  lay_out(args.input);
  with_sum_type(args.input.dtype, [&](auto type) {
    using A = decltype(type);
    const Dtype dtype = args.input.dtype;
    if (args.scale != nullptr) set_number(args.scale, dtype, 0, one_plus<A>(args.eps, dtype));
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (work(args.a, args.input) > kSerialWork)
    for (std::int64_t row = 0; row < args.a.num_rows; row += kRowsPerTask) {
      for_this_machine(
          [&]() FASTSPARSE_INLINED { send<A>(args, row, std::min(row + kRowsPerTask, args.a.num_rows)); });
    }
  });
}

void edge_messages_backward(const EdgeMessageBackwardArgs& given, int threads) {
  EdgeMessageBackwardArgs args = given;
  lay_out(args.input);
  const std::int64_t groups = groups_of(args);
  const std::int64_t size = size_of_group(args.input), columns = args.a_t.num_rows;
  with_sum_type(args.input.dtype, [&](auto type) {
    using A = decltype(type);
    std::vector<A> parts(groups * size);
    // With relu, an entry has the same gradient in both passes, so the pass over columns computes all
    // gradients.
    const bool joined = groups > 0 && columns > 0 && args.input.message == EdgeMessage::kRelu;
    const std::int64_t tasks = joined ? groups : (columns + kRowsPerTask - 1) / kRowsPerTask;
#pragma omp parallel num_threads(threads) if (work(args.a, args.input) > kSerialWork)
    {
#pragma omp for schedule(dynamic)
      for (std::int64_t task = 0; task < tasks; ++task) {
        for_this_machine([&]() FASTSPARSE_INLINED {
          differentiate_columns<A>(args, columns * task / tasks, columns * (task + 1) / tasks,
                                   joined ? parts.data() + task * size : nullptr);
        });
      }
#pragma omp for schedule(dynamic)
      for (std::int64_t group = 0; group < (joined ? 0 : groups); ++group) {
        for_this_machine([&]() FASTSPARSE_INLINED {
          differentiate_weights<A>(args, parts.data() + group * size, args.a.num_rows * group / groups,
                                   args.a.num_rows * (group + 1) / groups);
        });
      }
    }
    if (args.grad_features != nullptr && args.grad_features != args.maps.features) {
      narrow_row(static_cast<const A*>(args.grad_features), A{1}, args.num_values * args.maps.edge_width,
                 args.maps.features, args.input.dtype, 0);
    }
    if (groups > 0) sum_groups<A>(args, parts);
  });
}

}  // namespace fastsparse::cpu
