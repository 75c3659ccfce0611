// Neighbour sampling on the CPU. It gives the same batches as on a GPU (sample_neighbors.h), but its stages
// differ. A thread processes one chunk of rows at a time:
//
//   choose   reads the rows' ranges, chooses entries at random, reads their columns, prefetches the table;
//   number   numbers the sources and appends those that are new to the batch. Chunks do this one after the
//            other, in the order of rows, while other threads choose. So there is one table look-up per edge,
//            the table only has numbers, and results do not depend on the number of threads;
//   write    appends the chunk's edges to those of earlier chunks, with the sources' numbers.
//
// Lower bound per edge: one cache line of columns from memory (64 bytes, only 4 of them used), one line of
// the table from the last-level cache or memory, and 16 + 28 bytes written. The lines of a whole chunk are
// prefetched before they are read. They are prefetched only into the L2 cache, because a core can have more
// of these requests in flight than loads or prefetches into its L1 cache. (On an EPYC 9004, random lines of
// 500 MB in huge pages take 4.4 ns each; with loads 8.6 ns, with prefetches into L1 6.4 ns.)
#include <algorithm>
#include <cstring>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "fastsparse/cpu_simd.h"
#include "fastsparse/launchers.h"
#include "fastsparse/sample_neighbors.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kChunkSlots =
    2048;  // approximate number of edges per chunk; their data fit the L2 cache
constexpr std::int64_t kChunkRows = 1024;

struct Row {
  std::int64_t begin;  // first entry
  std::int64_t end;
  std::uint32_t number;  // number of the row's node among the batch's nodes
  std::uint32_t count;   // number of chosen edges
};

// Memory that a thread reuses for all its chunks; vectors only grow.
struct Scratch {
  std::vector<Row> rows;
  // Rows in which entries are chosen at random, their numbers of entries, and the chosen entries: first the
  // first chosen entry of every row, then the second one of every row, and so on.
  std::vector<std::uint32_t> row, degree, chosen;
  std::vector<std::int64_t> entry;
  std::vector<std::int32_t> node;     // the source of every edge
  std::vector<std::uint32_t> number;  // number of every edge's source among the batch's nodes
  std::vector<std::int32_t> new_node, new_seed;
  std::vector<std::pair<std::uint32_t, std::int64_t>> weighted;  // (random key, entry)
};

template <typename T>
T* resized(std::vector<T>& vector, std::size_t size) {
  if (vector.size() < size) vector.resize(size);
  return vector.data();
}

// Prefetches the cache line at an address to the L2 cache. Functions that only prefetch must be
// force-inlined: GCC assumes that they have no effect and removes the calls.
FASTSPARSE_INLINE void fetch_to_l2(const void* at) { __builtin_prefetch(at, 0, 2); }

#ifdef __x86_64__
__attribute__((target("avx2"))) inline __m256i widen_four(const std::uint32_t* from) {
  return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Sets chosen[k] = below(draw_bits(seed, step, row[k], nth), degree[k] - fewer) for the first elements of
// `chosen`, and returns their number, a multiple of the vector width. The compilers' vector code takes three
// times as long (6.4 ns per number instead of 2.1 ns); the difference is a tenth of the time of a batch.
__attribute__((target("avx2"))) std::size_t choose_with_avx2(std::uint64_t seed, std::uint32_t step,
                                                             std::uint32_t nth, std::uint32_t fewer,
                                                             std::size_t count, const std::uint32_t* row,
                                                             const std::uint32_t* degree,
                                                             std::uint32_t* chosen) {
  // `philox64` with four elements per vector, each in the lower half of 64 bits; products ignore the upper
  // half. Two vectors are processed at a time, because their products do not wait for each other.
  constexpr int kVectors = 2, kLanes = 4;
  std::size_t k = 0;
  for (; k + kVectors * kLanes <= count; k += kVectors * kLanes) {
    __m256i c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      c0[v] = widen_four(row + k + v * kLanes);
      c1[v] = _mm256_set1_epi64x(nth);
      c2[v] = _mm256_set1_epi64x(step);
      c3[v] = _mm256_setzero_si256();
    }
    auto key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      for (int v = 0; v < kVectors; ++v) {
        const __m256i product0 = _mm256_mul_epu32(c0[v], _mm256_set1_epi64x(0xD2511F53));
        const __m256i product1 = _mm256_mul_epu32(c2[v], _mm256_set1_epi64x(0xCD9E8D57));
        const __m256i high0 = _mm256_srli_epi64(product0, 32), high1 = _mm256_srli_epi64(product1, 32);
        c0[v] = _mm256_xor_si256(_mm256_xor_si256(high1, c1[v]), _mm256_set1_epi64x(key0));
        c2[v] = _mm256_xor_si256(_mm256_xor_si256(high0, c3[v]), _mm256_set1_epi64x(key1));
        c1[v] = product1;
        c3[v] = product0;
      }
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    for (int v = 0; v < kVectors; ++v) {
      const __m256i choices =
          _mm256_sub_epi64(widen_four(degree + k + v * kLanes), _mm256_set1_epi64x(fewer));
      // The upper 64 bits of the product of the 64 random bits and `choices`, computed from both halves of
      // the random bits.
      const __m256i low = _mm256_mul_epu32(c0[v], choices), high = _mm256_mul_epu32(c1[v], choices);
      const __m256i sum = _mm256_add_epi64(high, _mm256_srli_epi64(low, 32));
      const __m256i upper = _mm256_permutevar8x32_epi32(sum, _mm256_setr_epi32(1, 3, 5, 7, 1, 3, 5, 7));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(chosen + k + v * kLanes), _mm256_castsi256_si128(upper));
    }
  }
  return k;
}
#endif

// Chooses random numbers for all rows together: chosen[j * rows + k] is the j-th number of row k.
void choose(const SampleStep& step, std::uint64_t seed, std::size_t rows, const std::uint32_t* __restrict row,
            const std::uint32_t* __restrict degree, std::uint32_t* chosen) {
  const auto fanout = static_cast<std::uint32_t>(step.fanout);
  for (std::uint32_t j = 0; j < fanout; ++j) {
    std::uint32_t* __restrict drawn = chosen + j * rows;
    const std::uint32_t fewer = step.replace ? 0 : fanout - j - 1;
    std::size_t k = 0;
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) {
      k = choose_with_avx2(seed, step.number, j, fewer, rows, row, degree, drawn);
    }
#endif
    for (; k < rows; ++k) drawn[k] = below(draw_bits(seed, step, row[k], j), degree[k] - fewer);
    if (step.replace) continue;
    // Floyd's method (Bentley and Floyd, "A sample of brilliance", 1987): a number that was chosen before is
    // replaced by the largest possible number. The comparison gives a mask with all bits set or none.
    for (std::uint32_t i = 0; i < j; ++i) {
      const std::uint32_t* __restrict earlier = chosen + i * rows;
      for (k = 0; k < rows; ++k) drawn[k] |= drawn[k] == earlier[k] ? ~std::uint32_t{0} : 0;
    }
    for (k = 0; k < rows; ++k) drawn[k] = std::min(drawn[k], degree[k] - fewer - 1);
  }
}

std::int64_t most_edges(const SampleStep& step, const Row& row) {
  const std::int64_t degree = row.end - row.begin;
  if (step.fanout < 0 || step.induced) return degree;
  return step.replace ? (degree > 0 ? step.fanout : 0) : std::min(degree, step.fanout);
}

// Chooses entries of all rows, if all entries are equally likely.
void draw_evenly(const SampleStep& step, std::uint64_t seed, Scratch& s, std::int64_t most) {
  std::uint32_t *row = resized(s.row, s.rows.size()), *degree = resized(s.degree, s.rows.size());
  const auto takes_all = [&](const Row& r) { return !step.replace && r.end - r.begin <= step.fanout; };
  std::size_t rows = 0;
  for (const Row& r : s.rows) {
    if (r.count == 0 || takes_all(r)) continue;
    row[rows] = r.number;
    degree[rows++] = static_cast<std::uint32_t>(r.end - r.begin);
  }
  std::uint32_t* chosen = resized(s.chosen, most);
  choose(step, seed, rows, row, degree, chosen);

  std::int64_t* entry = s.entry.data();
  for (const Row& r : s.rows) {
    const bool all = takes_all(r);
    for (std::uint32_t j = 0; j < r.count; ++j) entry[j] = r.begin + (all ? j : chosen[j * rows]);
    chosen += r.count != 0 && !all;
    entry += r.count;
  }
}

// Chooses entries of one row and returns their number. In an induced step, it chooses all entries; with a
// negative fanout, all entries except those with weight 0; otherwise, it chooses at random, by weight.
std::uint32_t draw_row(const SampleStep& step, std::uint64_t seed, const Row& row, std::int64_t* entry,
                       Scratch& s) {
  const auto fanout = static_cast<std::uint32_t>(step.fanout);
  const auto is_drawable = [&](std::int64_t at) { return step.weight[at] > 0.0f; };
  std::uint32_t count = 0;
  if (step.fanout < 0 || step.induced) {
    for (std::int64_t at = row.begin; at < row.end; ++at) {
      entry[count] = at;
      count += step.weight == nullptr || step.induced || is_drawable(at);
    }
  } else if (step.replace) {
    if (step.weight_sum[row.begin] < step.weight_sum[row.end]) {
      for (; count < fanout; ++count) {
        const double number = unit(draw_bits(seed, step, row.number, count));
        entry[count] = entry_at(step.weight_sum, row.begin, row.end, number);
      }
    }
  } else {
    auto& keys = s.weighted;
    keys.clear();
    for (std::int64_t at = row.begin; at < row.end; ++at) {
      if (!is_drawable(at)) continue;
      keys.emplace_back(weighted_key(draw_bits(seed, step, row.number, at - row.begin), step.weight[at]), at);
    }
    if (keys.size() > fanout) {
      std::nth_element(keys.begin(), keys.begin() + fanout, keys.end());
      keys.resize(fanout);
      std::sort(keys.begin(), keys.end(), [](auto& a, auto& b) { return a.second < b.second; });
    }
    for (const auto& [key, at] : keys) entry[count++] = at;
  }
  return count;
}

// Calls f(number, source, seed) for every edge of a chunk.
template <typename F>
FASTSPARSE_INLINE void for_each_source(const SampleStep& step, const Scratch& s, std::int64_t count,
                                       const F& f) {
  const std::int32_t* node = s.node.data();
  if (step.dst.seed == nullptr) {
    for (std::int64_t k = 0; k < count; ++k) f(k, node[k], 0);
    return;
  }
  std::int64_t k = 0;
  for (const Row& row : s.rows) {
    const std::int32_t seed = step.dst.seed[row.number];
    for (const std::int64_t end = k + row.count; k < end; ++k) f(k, node[k], seed);
  }
}

// Chooses entries for rows first .. last - 1 of the batch, and writes the entries and their sources to the
// scratch. Returns the number of edges.
std::int64_t draw_chunk(const SampleStep& step, const SampleArgs& args, std::int64_t first, std::int64_t last,
                        Scratch& s) {
  const auto is_valid = [&](std::int64_t node) { return node >= 0 && node < step.a.num_rows; };
  s.rows.resize(last - first);
  for (std::int64_t number = first; number < last; ++number) {
    if (is_valid(step.dst.node[number])) fetch_to_l2(step.a.rowptr + step.dst.node[number]);
  }
  for (std::int64_t number = first; number < last; ++number) {
    const std::int64_t node = step.dst.node[number];
    // A node that is not in the graph gets no neighbours here; the caller reports the error.
    const std::int64_t* range = step.a.rowptr + (is_valid(node) ? node : 0);
    s.rows[number - first] = {range[0], is_valid(node) ? range[1] : range[0], 0, 0};
  }
  std::int64_t most = 0;
  for (std::int64_t number = first; number < last; ++number) {
    Row& row = s.rows[number - first];
    row.number = static_cast<std::uint32_t>(number);
    row.count = static_cast<std::uint32_t>(most_edges(step, row));
    most += row.count;
  }
  std::int64_t* entry = resized(s.entry, most);
  std::int64_t count = 0;
  if (step.fanout >= 0 && !step.induced && step.weight == nullptr) {
    draw_evenly(step, args.seed, s, most);
    count = most;
  } else {
    for (Row& row : s.rows) {
      row.count = draw_row(step, args.seed, row, entry + count, s);
      count += row.count;
    }
  }

  const std::int64_t id_bytes = step.a.edge_id == nullptr ? 0 : step.a.edge_id_is_64bit ? 8 : 4;
  for (std::int64_t k = 0; k < count; ++k) fetch_to_l2(step.a.col + entry[k]);
  if (id_bytes != 0) {
    const auto* id = static_cast<const char*>(step.a.edge_id);
    for (std::int64_t k = 0; k < count; ++k) fetch_to_l2(id + entry[k] * id_bytes);
  }
  std::int32_t* source = resized(s.node, count);
  for (std::int64_t k = 0; k < count; ++k) source[k] = step.a.col[entry[k]];
  const NodeTable& table = args.table;
  for_each_source(step, s, count, [&](std::int64_t, std::int32_t node, std::int32_t seed) FASTSPARSE_INLINED {
    const std::uint32_t place = home(table, step.src, node, seed);
    fetch_to_l2(table.value + place);
    if (table.key != nullptr) fetch_to_l2(table.key + place);
  });
  return count;
}

// Numbers the sources of `count` edges, and appends the new sources to the `nodes` nodes of the batch.
// Returns the number of new nodes.
std::int64_t number_chunk(const SampleStep& step, const NodeTable& table, std::int64_t nodes,
                          std::int64_t count, Scratch& s) {
  std::uint32_t* number = resized(s.number, count);
  std::int32_t *new_node = resized(s.new_node, count + 1), *new_seed = resized(s.new_seed, count + 1);
  std::int64_t added = 0;
  for_each_source(step, s, count,
                  [&](std::int64_t k, std::int32_t node, std::int32_t seed) FASTSPARSE_INLINED {
                    std::uint32_t& value = table.value[find_or_insert(table, step.src, node, seed)];
                    // Branch prediction fails for new nodes, so the code below has no branch. Compilers may
                    // generate one for a conditional expression (4.5 instead of 3.3 ns per edge). For new
                    // nodes, all bits of `value` are set.
                    const std::uint32_t is_new = value == kNoPlace;
                    value &= static_cast<std::uint32_t>(nodes + added) | (is_new - 1);
                    number[k] = value;
                    new_node[added] = node;
                    new_seed[added] = seed;
                    added += is_new;
                  });
  return added;
}

// Numbers the sources in an induced step: keeps only edges whose source is in the batch, and returns the
// number of these edges.
std::int64_t keep_known(const SampleStep& step, const NodeTable& table, std::int64_t count, Scratch& s) {
  std::uint32_t* number = resized(s.number, count);
  std::int64_t kept = 0, k = 0;
  for (Row& row : s.rows) {
    const std::int32_t seed = step.dst.seed == nullptr ? 0 : step.dst.seed[row.number];
    const std::int64_t before = kept;
    for (const std::int64_t end = k + row.count; k < end; ++k) {
      const std::uint32_t place = find(table, step.src, s.node[k], seed);
      if (place == kNoPlace) continue;
      number[kept] = table.value[place];
      s.entry[kept++] = s.entry[k];
    }
    row.count = static_cast<std::uint32_t>(kept - before);
  }
  return kept;
}

void write_chunk(const SampleStep& step, std::int64_t edges, std::int64_t count, std::int64_t nodes,
                 std::int64_t added, const Scratch& s) {
  std::copy_n(s.number.begin(), count, step.place + edges);
  std::int32_t* row = step.row + edges;
  for (const Row& r : s.rows) row = std::fill_n(row, r.count, static_cast<std::int32_t>(r.number));
  if (step.a.edge_id == nullptr) {
    std::copy_n(s.entry.begin(), count, step.edge_id + edges);
  } else {
    for (std::int64_t k = 0; k < count; ++k) step.edge_id[edges + k] = edge_position(step.a, s.entry[k]);
  }
  for (std::int64_t i = 0; i < added; ++i) step.src.node[nodes + i] = s.new_node[i];
  if (step.src.seed != nullptr) std::copy_n(s.new_seed.begin(), added, step.src.seed + nodes);
}

void run_step(const SampleStep& step, const SampleArgs& args, int threads) {
  const std::int64_t first_row = *step.first_row, end_row = *step.end_row;
  const std::int64_t mean = step.fanout < 0 || step.induced
                                ? step.a.num_edges / std::max<std::int64_t>(step.a.num_rows, 1)
                                : step.fanout;
  const std::int64_t rows =
      std::clamp(kChunkSlots / std::max<std::int64_t>(mean, 1), std::int64_t{1}, kChunkRows);
  const std::int64_t chunks = (end_row - first_row + rows - 1) / rows;
  std::int64_t edges = *step.edges_before, nodes = *step.nodes_before;
#pragma omp parallel for ordered schedule(dynamic, 1) num_threads(threads) if (chunks > 1)
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    static thread_local Scratch s;
    const std::int64_t first = first_row + chunk * rows, last = std::min(first + rows, end_row);
    std::int64_t count = draw_chunk(step, args, first, last, s);
    if (step.induced) count = keep_known(step, args.table, count, s);
    std::int64_t edges_before, nodes_before, added = 0;
#pragma omp ordered
    {
      edges_before = edges;
      nodes_before = nodes;
      if (!step.induced) added = number_chunk(step, args.table, nodes, count, s);
      edges += count;
      nodes += added;
    }
    write_chunk(step, edges_before, count, nodes_before, added, s);
  }
  *step.edges_after = edges;
  *step.nodes_after = nodes;
}

// kBytesAhead: distance, in bytes of the result, between a prefetch and its use. kMostOfRow: number of bytes
// per row that are prefetched; the hardware prefetches the rest of a longer row.
constexpr std::int64_t kBytesAhead = 3072, kMostOfRow = 1024, kLine = 64;

void fetch(const char* row, std::int64_t bytes) {
  for (std::int64_t at = 0; at < std::min(bytes, kMostOfRow); at += kLine) __builtin_prefetch(row + at);
}

// Copies rows first .. last - 1.
void copy_rows(const GatherRowsArgs& args, std::int64_t first, std::int64_t last, bool past_caches) {
  const auto* table = static_cast<const char*>(args.table);
  auto* out = static_cast<char*>(args.out);
  const std::int64_t bytes = args.row_bytes;
  const std::int64_t ahead = std::clamp<std::int64_t>(kBytesAhead / bytes, 1, 64);
  const auto row = [&](std::int64_t place) { return table + args.index[place] * bytes; };
#ifdef __x86_64__
  constexpr std::int64_t kWord = sizeof(__m128i);
  past_caches = past_caches && bytes % kWord == 0 && reinterpret_cast<std::uintptr_t>(out) % kWord == 0;
#else
  past_caches = false;
#endif
  for (std::int64_t place = first; place < std::min(first + ahead, last); ++place) fetch(row(place), bytes);
  for (std::int64_t place = first; place < last; ++place) {
    if (place + ahead < last) fetch(row(place + ahead), bytes);
    const char* from = row(place);
    char* to = out + place * bytes;
    if (!past_caches) {
      std::memcpy(to, from, static_cast<std::size_t>(bytes));
      continue;
    }
#ifdef __x86_64__
    for (std::int64_t at = 0; at < bytes; at += kWord) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
    }
#endif
  }
#ifdef __x86_64__
  if (past_caches) _mm_sfence();
#endif
}

template <typename T>
void fill(T* data, std::int64_t size, T value, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (size > 65536)
  for (std::int64_t i = 0; i < size; ++i) data[i] = value;
}

}  // namespace

void sample_neighbors(const SampleArgs& args, int threads) {
  if (args.table.key != nullptr) fill(args.table.key, args.table.num_places, kNoKey, threads);
  fill(args.table.value, args.table.num_places, kNoPlace, threads);
  std::fill_n(args.sizes, args.num_sizes, 0);
  for (int k = 0; k < args.num_lists; ++k) {
    const FirstNodes& first = args.first_nodes[k];
    *first.count_out = first.count;
    for (std::int64_t nth = 0; nth < first.count; ++nth) {
      const std::int64_t node = first.list.node[nth];
      if (node < 0 || node >= first.list.num_nodes) {
        args.sizes[0] = 1;
        continue;
      }
      const std::int32_t seed = first.list.seed == nullptr ? 0 : first.list.seed[nth];
      lower_to(args.table.value + find_or_insert(args.table, first.list, node, seed),
               static_cast<std::uint32_t>(nth));
    }
  }
  for (int k = 0; k < args.num_steps; ++k) run_step(args.steps[k], args, threads);
}

void emit_edges(const EmitEdgesArgs& args, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (args.num_edges > 4096)
  for (std::int64_t edge = 0; edge < args.num_edges; ++edge) {
    const std::uint32_t source = args.place[edge];
    args.edge_index[edge] = source;
    args.edge_index[args.num_edges + edge] = args.row[edge];
  }
}

void emit_rows(const EmitRowsArgs& args, int) {
  std::int64_t edge = 0;
  for (std::int64_t r = 0; r < args.num_rows; ++r) {
    const std::int64_t begin = edge;
    while (edge < args.num_edges && args.row[edge] == r) ++edge;
    args.rowptr[r] = begin;
    args.inv_degree[r] = edge > begin ? 1.0f / static_cast<float>(edge - begin) : 0.0f;
  }
  args.rowptr[args.num_rows] = edge;
}

void gather_rows(const GatherRowsArgs& args, int threads, std::int64_t piece, bool past_caches,
                 const std::function<void(std::int64_t, std::int64_t)>& filled) {
  if (args.num_rows == 0 || args.row_bytes == 0) return;
  const std::int64_t pieces = (args.num_rows + piece - 1) / piece;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (pieces > 1)
  for (std::int64_t nth = 0; nth < pieces; ++nth) {
    const std::int64_t first = nth * piece, last = std::min(first + piece, args.num_rows);
    copy_rows(args, first, last, past_caches);
    if (filled) filled(first, last);
  }
}

}  // namespace fastsparse::cpu
