// MaxK on the CPU, its gradient, and conversions between CBSR (values and column ids) and dense rows.
#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>

#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kSerialWork = 1 << 15;  // entries below which waking threads costs more than it saves

// An unsigned integer whose order is the order of the values: +0 and -0 are equal, and NaN is the largest.
template <typename A>
FASTSPARSE_INLINE auto order_key(A value) {
  using Key = std::conditional_t<std::is_same_v<A, double>, std::uint64_t, std::uint32_t>;
  constexpr Key kSign = Key{1} << (8 * sizeof(Key) - 1);
  if (value != value) return ~Key{0};
  value += A{0};  // -0 becomes +0
  Key bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

// Calls f with a value of the C++ type of the column ids: std::uint8_t or std::uint16_t, depending on the
// width.
template <typename F>
void with_id_type(std::int64_t width, F&& f) {
  width <= 256 ? f(std::uint8_t{}) : f(std::uint16_t{});
}

// Number of 32-bit words that have a bit for each column.
std::int64_t words_of(std::int64_t width) { return (width + 31) / 32; }

template <typename T, typename Id>
FASTSPARSE_INLINE void select_rows(const MaxkArgs& args, std::int64_t row_begin, std::int64_t row_end) {
  using Key = decltype(order_key(Acc<T>{}));
  std::vector<Key> keys(args.width), ranked(args.width);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(args.x.data) + row * args.x.stride;
    for (std::int64_t c = 0; c < args.width; ++c) keys[c] = order_key(widen(x[c]));
    ranked = keys;
    std::nth_element(ranked.begin(), ranked.begin() + (args.k - 1), ranked.end(), std::greater<Key>());
    const Key least = ranked[args.k - 1];
    std::int64_t ties = args.k;  // number of kept entries that equal the smallest kept entry
    for (std::int64_t c = 0; c < args.width; ++c) ties -= keys[c] > least;
    const auto keeps = [&](std::int64_t c) {
      const bool tie = keys[c] == least && ties > 0;
      ties -= tie;
      return tie || keys[c] > least;
    };
    if (args.out != nullptr) {
      T* out = static_cast<T*>(args.out) + row * args.width;
      std::uint32_t* kept = args.kept + row * words_of(args.width);
      for (std::int64_t c = 0; c < args.width; ++c) {
        if (c % 32 == 0) kept[c / 32] = 0;
        const bool keep = keeps(c);
        kept[c / 32] |= static_cast<std::uint32_t>(keep) << (c % 32);
        out[c] = keep ? x[c] : T{};
      }
      continue;
    }
    T* value = static_cast<T*>(args.values) + row * args.k;
    Id* id = static_cast<Id*>(args.ids) + row * args.k;
    for (std::int64_t c = 0; c < args.width; ++c) {
      if (keeps(c)) {
        *value++ = x[c];
        *id++ = static_cast<Id>(c);
      }
    }
  }
}

}  // namespace

void maxk(const MaxkArgs& args, int threads) {
  with_type(args.dtype, [&](auto type) {
    with_id_type(args.width, [&](auto id) {
#pragma omp parallel for schedule(static) num_threads(threads) if (args.num_rows * args.width > kSerialWork)
      for (std::int64_t row = 0; row < args.num_rows; row += kRowsPerTask) {
        select_rows<decltype(type), decltype(id)>(args, row, std::min(row + kRowsPerTask, args.num_rows));
      }
    });
  });
}

void mask_rows(const MaskRowsArgs& args, int threads) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for schedule(static) num_threads(threads) if (args.num_rows * args.width > kSerialWork)
    for (std::int64_t row = 0; row < args.num_rows; ++row) {
      const T* dense = static_cast<const T*>(args.dense.data) + row * args.dense.stride;
      const std::uint32_t* kept = args.kept + row * words_of(args.width);
      T* out = static_cast<T*>(args.out) + row * args.width;
      for (std::int64_t c = 0; c < args.width; ++c)
        out[c] = (kept[c / 32] >> (c % 32) & 1u) != 0 ? dense[c] : T{};
    }
  });
}

void cbsr_to_dense(const CbsrToDenseArgs& args, int threads) {
  with_type(args.dtype, [&](auto type) {
    with_id_type(args.width, [&](auto id) {
      using T = decltype(type);
      using Id = decltype(id);
#pragma omp parallel for schedule(static) num_threads(threads) if (args.num_rows * args.width > kSerialWork)
      for (std::int64_t row = 0; row < args.num_rows; ++row) {
        const T* values = static_cast<const T*>(args.values) + row * args.k;
        const Id* ids = static_cast<const Id*>(args.ids) + row * args.k;
        T* out = static_cast<T*>(args.out) + row * args.width;
        std::fill(out, out + args.width, T{});
        for (std::int64_t i = 0; i < args.k; ++i) {
          if (ids[i] < args.width) out[ids[i]] = values[i];
        }
      }
    });
  });
}

void cbsr_gather(const CbsrGatherArgs& args, int threads) {
  with_type(args.dtype, [&](auto type) {
    with_id_type(args.width, [&](auto id) {
      using T = decltype(type);
      using Id = decltype(id);
#pragma omp parallel for schedule(static) num_threads(threads) if (args.num_rows * args.k > kSerialWork)
      for (std::int64_t row = 0; row < args.num_rows; ++row) {
        const T* dense = static_cast<const T*>(args.dense.data) + row * args.dense.stride;
        const Id* ids = static_cast<const Id*>(args.ids) + row * args.k;
        T* out = static_cast<T*>(args.out) + row * args.k;
        for (std::int64_t i = 0; i < args.k; ++i) out[i] = ids[i] < args.width ? dense[ids[i]] : T{};
      }
    });
  });
}

}  // namespace fastsparse::cpu
