// Messages that meet their edges' features on the CPU, forward and backward: rows over threads, one entry at
// a time, sums in the accumulation type. Formulas and passes are those of the CUDA kernels (edge_messages.cu
// and edge_messages_backward.cu); features are bits f % 8 of bytes f / 8 of the signs.
#include "fastsparse/edge_messages.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include "fastsparse/cpu_attention.h"

namespace fastsparse::cpu {
namespace {

std::int64_t work(const CsrView& a, const EdgeMessageInput& input) {
  return a.num_edges * input.width * (1 + input.edge_width);
}

template <typename T>
FASTSPARSE_INLINE const T* row_of(const DenseView& x, std::int64_t row) {
  return static_cast<const T*>(x.data) + row * x.stride;
}

template <typename T>
FASTSPARSE_INLINE void widen_row(const T* from, std::vector<Acc<T>>& to) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = widen(from[i]);
}

template <typename T>
FASTSPARSE_INLINE void add_row(const T* from, std::vector<Acc<T>>& to) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += widen(from[i]);
}

template <typename T>
FASTSPARSE_INLINE void add_scaled(Acc<T> by, const T* from, std::vector<Acc<T>>& to) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += by * widen(from[i]);
}

// 1 + eps, rounded to T as PyTorch's sum is.
template <typename T>
Acc<T> one_plus(const void* eps) {
  T rounded;
  narrow(Acc<T>{1} + widen(*static_cast<const T*>(eps)), &rounded);
  return widen(rounded);
}

template <typename T>
FASTSPARSE_INLINE void narrow_row(const std::vector<Acc<T>>& from, void* to, std::int64_t row) {
  T* at = static_cast<T*>(to) + row * static_cast<std::int64_t>(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) narrow(from[i], at + i);
}

template <typename A>
FASTSPARSE_INLINE A sigmoid(A z) {
  const A e = exponential(z < A{0} ? z : -z);
  return (z < A{0} ? e : A{1}) / (A{1} + e);
}

// All bits or none, for each bit of a byte: masks for eight numbers at once.
constexpr auto kMasks = [] {
  std::array<std::array<std::int32_t, 8>, 256> masks{};
  for (int byte = 0; byte < 256; ++byte) {
    for (int bit = 0; bit < 8; ++bit) masks[byte][bit] = byte >> bit & 1 ? -1 : 0;
  }
  return masks;
}();

template <typename A>
FASTSPARSE_INLINE void keep_signs(const std::vector<A>& z, std::uint8_t* positive, std::int64_t bytes) {
  const auto width = static_cast<std::int64_t>(z.size());
  for (std::int64_t byte = 0; byte < bytes; ++byte) {
    const int count = static_cast<int>(std::clamp<std::int64_t>(width - 8 * byte, 0, 8));
    unsigned bits = 0;
    for (int i = 0; i < count; ++i) bits |= (z[8 * byte + i] <= A{0} ? 0u : 1u) << i;  // of NaN, too
    positive[byte] = static_cast<std::uint8_t>(bits);
  }
}

// The numbers whose bits are set, else 0.
template <typename A>
FASTSPARSE_INLINE void where_positive(const std::uint8_t* positive, const std::vector<A>& from,
                                      std::vector<A>& to) {
  using Bits = std::conditional_t<sizeof(A) == 4, std::int32_t, std::int64_t>;
  const auto width = static_cast<std::int64_t>(to.size());
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

// What one entry sends, made from its row's, its source's and its edge's numbers.
template <typename T>
struct Message {
  using A = Acc<T>;
  const EdgeMessageInput& input;
  const bool gated = input.message != EdgeMessage::kRelu;
  std::vector<A> features, z, value, of_row;

  explicit Message(const EdgeMessageInput& of)
      : input(of),
        features(of.weight != nullptr ? of.edge_width : 0),
        z(of.width),
        value(of.width),
        of_row(of.width) {}

  FASTSPARSE_INLINE void set_row(std::int64_t row) {
    if (gated) widen_row(row_of<T>(input.k, row), of_row);
    if (!gated && input.bias != nullptr) {
      std::copy_n(static_cast<const A*>(input.bias), of_row.size(), of_row.begin());
    }
  }

  FASTSPARSE_INLINE void add_projected(const void* weight, std::vector<A>& to) const {
    for (std::size_t a = 0; a < features.size(); ++a) {
      const A* row = static_cast<const A*>(weight) + a * to.size();
      for (std::size_t f = 0; f < to.size(); ++f) to[f] += row[f] * features[a];
    }
  }

  FASTSPARSE_INLINE void set_features(std::int64_t position) {
    if (!features.empty()) widen_row(row_of<T>(input.edge, position), features);
  }

  // z and v_ij of row `row`, whose k is set, or of the row whose k is given.
  FASTSPARSE_INLINE void set_entry(std::int64_t col, std::int64_t position) {
    for (std::size_t f = 0; f < z.size(); ++f) z[f] = of_row[f] + widen(row_of<T>(input.q, col)[f]);
    if (gated) widen_row(row_of<T>(input.v, col), value);
    set_features(position);
    if (input.weight != nullptr) {
      add_projected(input.weight, z);
      if (gated) add_projected(input.of_value, value);
    } else if (input.edge.data != nullptr) {
      add_row(row_of<T>(input.edge, position), z);
    }
  }
};

template <typename T>
FASTSPARSE_INLINE void send(const EdgeMessageArgs& args, std::int64_t row_begin, std::int64_t row_end) {
  using A = Acc<T>;
  const EdgeMessageInput& input = args.input;
  const std::int64_t width = input.width;
  const bool with_state = input.message == EdgeMessage::kGateAndState;
  Message<T> message(input);
  std::vector<A> sum(width), side(width);
  const A scale = args.eps == nullptr ? A{1} : one_plus<T>(args.eps);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    std::fill(sum.begin(), sum.end(), A{0});
    std::fill(side.begin(), side.end(), A{0});
    message.set_row(row);
    for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
      const std::int64_t position = edge_position(args.a, entry);
      message.set_entry(args.a.col[entry], position);
      if (message.gated) {
        for (std::int64_t f = 0; f < width; ++f) {
          const A gate = sigmoid(message.z[f]), sent = gate * message.value[f];
          sum[f] += sent;
          side[f] += with_state ? gate : sent * (A{1} - gate);
        }
        if (with_state) narrow_row<T>(message.z, args.state, position);
        continue;
      }
      for (std::int64_t f = 0; f < width; ++f) sum[f] += rectify(message.z[f]);
      if (args.positive == nullptr) continue;
      keep_signs(message.z, args.positive + position * args.sign_bytes, args.sign_bytes);
    }
    if (args.root.data != nullptr) add_scaled<T>(scale, row_of<T>(args.root, row), sum);
    narrow_row<T>(sum, args.out, row);
    if (args.side != nullptr) narrow_row<T>(side, args.side, row);
  }
}

// Columns of A: gradients of their rows and of their entries' edges.
template <typename T>
FASTSPARSE_INLINE void differentiate_columns(const EdgeMessageBackwardArgs& args, std::int64_t begin,
                                             std::int64_t end) {
  using A = Acc<T>;
  const EdgeMessageInput& input = args.input;
  const std::int64_t width = input.width, edge_width = input.edge_width;
  const bool with_state = input.message == EdgeMessage::kGateAndState;
  Message<T> message(input);
  std::vector<A>&z = message.z, &value = message.value;
  std::vector<A> grad(width), side(width), grad_state(width), grad_q(width), grad_v(width), q(width),
      v(width);
  const A scale = args.scale == nullptr ? A{0} : widen(*static_cast<const T*>(args.scale));
  for (std::int64_t source = begin; source < end; ++source) {
    std::fill(grad_q.begin(), grad_q.end(), A{0});
    std::fill(grad_v.begin(), grad_v.end(), A{0});
    if (message.gated) widen_row(row_of<T>(input.v, source), v);
    if (message.gated && !with_state) widen_row(row_of<T>(input.q, source), q);
    for (std::int64_t entry = args.a_t.rowptr[source]; entry < args.a_t.rowptr[source + 1]; ++entry) {
      const std::int64_t row = args.a_t.col[entry], position = edge_position(args.a_t, entry);
      widen_row(row_of<T>(args.grad, row), grad);
      if (message.gated) {
        value = v;
        if (with_state) {
          widen_row(row_of<T>(args.state, position), z);
          widen_row(row_of<T>(args.grad_side, row), side);
          if (args.grad_state.data != nullptr) widen_row(row_of<T>(args.grad_state, position), grad_state);
        } else {
          z = q;
          add_row(row_of<T>(input.k, row), z);
          message.set_features(position);
          message.add_projected(input.weight, z);
          message.add_projected(input.of_value, value);
        }
        for (std::int64_t f = 0; f < width; ++f) {
          const A gate = sigmoid(z[f]), slope = gate * (A{1} - gate);
          z[f] = slope * (value[f] * grad[f] + side[f]) + grad_state[f];
          value[f] = gate * grad[f];
          grad_v[f] += value[f];
        }
      } else {
        where_positive(args.positive + position * args.sign_bytes, grad, z);
      }
      for (std::int64_t f = 0; f < width; ++f) grad_q[f] += z[f];
      if (args.grad_edge != nullptr) narrow_row<T>(z, args.grad_edge, position);
      if (args.grad_features == nullptr) continue;
      for (std::int64_t a = 0; a < edge_width; ++a) {
        const A* weight = static_cast<const A*>(input.weight) + a * width;
        A total = 0;
        for (std::int64_t f = 0; f < width; ++f) total += weight[f] * z[f];
        if (message.gated) {
          const A* of_value = static_cast<const A*>(input.of_value) + a * width;
          for (std::int64_t f = 0; f < width; ++f) total += of_value[f] * value[f];
        }
        static_cast<A*>(args.grad_features)[position * edge_width + a] = total;
      }
    }
    if (args.scale != nullptr) add_scaled<T>(scale, row_of<T>(args.grad, source), grad_q);
    narrow_row<T>(grad_q, args.grad_q, source);
    if (message.gated) narrow_row<T>(grad_v, args.grad_v, source);
  }
}

// Rows that a group has for dW, and for dbias beside it, which relu's terms give.
std::int64_t rows_of_group(const EdgeMessageInput& input) {
  return input.edge_width + (input.message == EdgeMessage::kRelu ? 1 : 0);
}

// dW and dU of a group of rows.
template <typename T>
FASTSPARSE_INLINE void differentiate_weights(const EdgeMessageBackwardArgs& args, std::int64_t group,
                                             std::int64_t row_begin, std::int64_t row_end) {
  using A = Acc<T>;
  const EdgeMessageInput& input = args.input;
  const std::int64_t width = input.width, edge_width = input.edge_width;
  Message<T> message(input);
  const std::int64_t size = rows_of_group(input) * width;
  A* grad_weight = static_cast<A*>(args.grad_weight) + group * size;
  A* grad_of_value = message.gated ? static_cast<A*>(args.grad_of_value) + group * size : nullptr;
  std::fill(grad_weight, grad_weight + size, A{0});
  if (message.gated) std::fill(grad_of_value, grad_of_value + size, A{0});
  std::vector<A>&z = message.z, &value = message.value, grad(width);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    widen_row(row_of<T>(args.grad, row), grad);
    message.set_row(row);
    for (std::int64_t entry = args.a.rowptr[row]; entry < args.a.rowptr[row + 1]; ++entry) {
      const std::int64_t position = edge_position(args.a, entry);
      if (message.gated) {
        message.set_entry(args.a.col[entry], position);
        for (std::int64_t f = 0; f < width; ++f) {
          const A gate = sigmoid(z[f]);
          z[f] = gate * (A{1} - gate) * value[f] * grad[f];
          value[f] = gate * grad[f];
        }
      } else {
        message.set_features(position);
        where_positive(args.positive + position * args.sign_bytes, grad, z);
        A* of_bias = grad_weight + edge_width * width;
        for (std::int64_t f = 0; f < width; ++f) of_bias[f] += z[f];
      }
      for (std::int64_t a = 0; a < edge_width; ++a) {
        const A feature = message.features[a];
        for (std::int64_t f = 0; f < width; ++f) grad_weight[a * width + f] += feature * z[f];
        if (!message.gated) continue;
        for (std::int64_t f = 0; f < width; ++f) grad_of_value[a * width + f] += feature * value[f];
      }
    }
  }
}

// The groups' parts of dW, dbias and dU added up, in float64 as on CUDA, and transposed.
template <typename U, typename A>
void sum_groups(const EdgeMessageBackwardArgs& args) {
  const std::int64_t width = args.input.width, size = rows_of_group(args.input) * width;
  const EdgeMapGradients& to = args.maps;
  std::vector<double> sums(size);
  const auto add = [&](const void* parts) {
    std::fill(sums.begin(), sums.end(), 0.0);
    for (std::int64_t group = 0; group < args.groups; ++group) {
      const A* part = static_cast<const A*>(parts) + group * size;
      for (std::int64_t i = 0; i < size; ++i) sums[i] += part[i];
    }
  };
  const auto store = [&](void* map) {
    for (std::int64_t f = 0; map != nullptr && f < to.width; ++f) {
      for (std::int64_t a = 0; a < to.edge_width; ++a) {
        narrow(static_cast<Acc<U>>(sums[a * width + f]), static_cast<U*>(map) + f * to.edge_width + a);
      }
    }
  };
  add(args.grad_weight);
  store(to.weight);
  for (std::int64_t f = 0; to.bias != nullptr && f < to.width; ++f) {
    narrow(static_cast<Acc<U>>(sums[args.input.edge_width * width + f]), static_cast<U*>(to.bias) + f);
  }
  if (args.grad_of_value == nullptr) return;
  add(args.grad_of_value);
  store(to.of_value);
}

template <typename T>
void lay_out_maps(const EdgeMapsArgs& args) {
  Acc<T>* out = static_cast<Acc<T>*>(args.out);
  const auto transpose = [&](const DenseView& map, const DenseView& added) {
    for (std::int64_t f = 0; f < args.given_width; ++f) {
      const T* from = row_of<T>(map, f);
      const T* more = added.data == nullptr ? nullptr : row_of<T>(added, f);
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

// Plain functions per type: the compiler multi-versions functions, not templates.
#define FASTSPARSE_MESSAGES(T)                                                                              \
  FASTSPARSE_MULTIVERSION void rows(T, const EdgeMessageArgs& args, std::int64_t begin, std::int64_t end) { \
    send<T>(args, begin, end);                                                                              \
  }                                                                                                         \
  FASTSPARSE_MULTIVERSION void columns(T, const EdgeMessageBackwardArgs& args, std::int64_t begin,          \
                                       std::int64_t end) {                                                  \
    differentiate_columns<T>(args, begin, end);                                                             \
  }                                                                                                         \
  FASTSPARSE_MULTIVERSION void weights(T, const EdgeMessageBackwardArgs& args, std::int64_t group,          \
                                       std::int64_t begin, std::int64_t end) {                              \
    differentiate_weights<T>(args, group, begin, end);                                                      \
  }
FASTSPARSE_MESSAGES(double)
FASTSPARSE_MESSAGES(float)
FASTSPARSE_MESSAGES(Half)
FASTSPARSE_MESSAGES(BFloat16)

}  // namespace

void lay_out_edge_maps(const EdgeMapsArgs& args, int /*threads*/) {
  with_type(args.dtype, [&](auto type) { lay_out_maps<decltype(type)>(args); });
}

void edge_messages(const EdgeMessageArgs& args, int threads) {
  with_type(args.input.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.scale != nullptr) narrow(one_plus<T>(args.eps), static_cast<T*>(args.scale));
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (work(args.a, args.input) > kSerialWork)
    for (std::int64_t row = 0; row < args.a.num_rows; row += kRowsPerTask) {
      rows(type, args, row, std::min(row + kRowsPerTask, args.a.num_rows));
    }
  });
}

void edge_messages_backward(const EdgeMessageBackwardArgs& args, int threads) {
  const std::int64_t count = args.a.num_rows, groups = args.grad_weight == nullptr ? 0 : args.groups;
  with_type(args.input.dtype, [&](auto type) {
#pragma omp parallel num_threads(threads) if (work(args.a, args.input) > kSerialWork)
    {
#pragma omp for schedule(dynamic)
      for (std::int64_t source = 0; source < args.a_t.num_rows; source += kRowsPerTask) {
        columns(type, args, source, std::min(source + kRowsPerTask, args.a_t.num_rows));
      }
#pragma omp for schedule(dynamic)
      for (std::int64_t group = 0; group < groups; ++group) {
        weights(type, args, group, count * group / groups, count * (group + 1) / groups);
      }
    }
    using A = Acc<decltype(type)>;
    if (args.grad_features != nullptr && args.grad_features != args.maps.features) {
      const A* from = static_cast<const A*>(args.grad_features);
      auto* to = static_cast<decltype(type)*>(args.maps.features);
      for (std::int64_t i = 0; i < args.num_values * args.maps.edge_width; ++i) narrow(from[i], to + i);
    }
    if (groups == 0) return;
    with_type(args.maps.dtype, [&](auto of_map) { sum_groups<decltype(of_map), A>(args); });
  });
}

}  // namespace fastsparse::cpu
