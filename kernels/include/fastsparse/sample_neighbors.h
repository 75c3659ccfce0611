// Neighbour sampling: arguments, the table of the batch's nodes and random numbers, for both devices.
//
// A batch is sampled in steps, one per hop and edge type. A step has a slot for every edge that it may
// choose. Slots are in the order of the batch's rows and, within a row, in the order in which neighbours were
// chosen. A step has three stages:
//
//   sample   fills slots: chooses entries of the row at random, and finds or inserts their sources in the
//            table. The table gets the first slot of the step that has the source, by an atomic minimum, so
//            it does not depend on the order of threads;
//   count    counts, for tiles of slots, the slots that have an edge, and those that are the first slot of a
//            node that is new to the batch;
//   write    numbers both in the order of slots: edges are compacted, new nodes are appended to the batch.
//
// So results depend neither on the order of threads nor on places in the table. Sizes stay on the device: the
// host knows upper bounds, and reads the sizes after all steps. Then `emit_edges` writes the edges, with the
// numbers of nodes instead of their places, and `emit_rows` writes the other arrays of a structure.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>

#include "fastsparse/views.h"

namespace fastsparse {

constexpr std::uint64_t kNoKey = ~std::uint64_t{0};
constexpr std::uint32_t kNoPlace = ~std::uint32_t{0};
// A value of the table with this bit is a slot. Other values are numbers of nodes, which are smaller.
constexpr std::uint32_t kIsSlot = std::uint32_t{1} << 31;
// Number of tiles into which slots are divided. It is small, so that every thread block can add the counts of
// all tiles before its own tile.
constexpr int kMostTiles = 1024;

// The table of the batch's nodes. All bytes of empty places are 0xff. If a hash table would have at least as
// many places as the graph has nodes, there is no hash table: every node has its own place. Otherwise, and
// for disjoint subgraphs, places are found by open addressing with linear probing.
struct NodeTable {
  std::uint64_t* key;  // (num_places), where num_places is a power of two; null: every node has its own place
  std::uint32_t* value;  // (num_places)
  std::int64_t num_places;
  int bits;  // log2 of num_places, if there are keys
};
FASTSPARSE_ARGUMENTS(NodeTable, FIELDS(key, value, num_places, bits));

// The batch's nodes of one type, in the order of their numbers.
struct NodeList {
  std::int64_t* node;        // ids in the graph
  std::int32_t* seed;        // number of the seed to whose subgraph the node belongs; null: one subgraph
  std::int64_t num_nodes;    // number of nodes in the graph
  std::int64_t first_place;  // place of the type's first node, if every node has its own place
  std::int32_t type;         // below 2^8
};
FASTSPARSE_ARGUMENTS(NodeList, FIELDS(node, seed, num_nodes, first_place, type));

// Nodes with which a list begins before the first step.
struct FirstNodes {
  NodeList list;
  std::int64_t count;
  std::int64_t* count_out;  // result: the number of nodes, in device memory
};
FASTSPARSE_ARGUMENTS(FirstNodes, FIELDS(list, count, count_out));

struct SampleStep {
  CsrView a;
  const float* weight;       // (num_edges) weight of every entry; null: all entries are equally likely
  const double* weight_sum;  // (num_edges + 1): sum of the weights before every entry; only with replacement
  std::int64_t fanout;       // number of entries chosen per row; negative: all entries
  bool replace;
  bool induced;          // chooses all entries whose source is in the batch; adds no nodes
  std::uint32_t number;  // number of the step; its random numbers depend on it
  NodeList dst;
  NodeList src;
  const std::int64_t* first_row;     // first row of the step, as the number of a destination
  const std::int64_t* end_row;       // one past the last row of the step
  const std::int64_t* nodes_before;  // number of sources in the batch before the step
  std::int64_t* nodes_after;
  const std::int64_t* edges_before;  // number of edges in `place`, `row` and `edge_id` before the step
  std::int64_t* edges_after;
  std::uint32_t* place;   // place in the table of every edge's source; CPU: number of the source
  std::int32_t* row;      // destination of every edge
  std::int64_t* edge_id;  // position of every edge in the caller's order
  std::int64_t most_rows;
  std::int64_t most_slots;
  // CUDA only:
  std::int64_t* slot_ptr;      // (most_rows + 1) first slot of every row; null: each row has `fanout` slots
  std::uint32_t* slot_place;   // scratch (most_slots)
  std::int64_t* slot_edge;     // scratch (most_slots)
  std::uint64_t* tile_counts;  // scratch (kMostTiles)
};
FASTSPARSE_ARGUMENTS(SampleStep, AS(structure, a),
                     FIELDS(weight, weight_sum, fanout, replace, induced, number, dst, src, first_row,
                            end_row, nodes_before, nodes_after, edges_before, edges_after, place, row,
                            edge_id, most_rows, most_slots, slot_ptr, slot_place, slot_edge, tile_counts));

struct SampleArgs {
  NodeTable table;
  std::int64_t* sizes;  // 0 before the first step; sizes[0] becomes 1 if a node is not in the graph
  std::int64_t num_sizes;
  std::uint64_t seed;
  const FirstNodes* first_nodes;
  int num_lists;
  const SampleStep* steps;
  int num_steps;
};

struct EmitEdgesArgs {
  NodeTable table;
  const std::uint32_t* place;  // (num_edges); on the CPU: numbers of sources
  const std::int32_t* row;
  const std::int64_t* edge_id;
  std::int64_t num_edges;
  std::int64_t* edge_index;  // (2, num_edges) sources, destinations
  // Written on CUDA only. On the CPU, the caller uses `place` and `edge_id` as these results:
  std::int32_t* col;  // (num_edges) sources
  std::int64_t* edge_id_out;
};
FASTSPARSE_ARGUMENTS(EmitEdgesArgs,
                     FIELDS(table, place, row, edge_id, num_edges, edge_index, col, edge_id_out));

struct EmitRowsArgs {
  const std::int64_t* row;  // (num_edges) ascending
  std::int64_t num_edges;
  std::int64_t num_rows;
  std::int64_t* rowptr;  // (num_rows + 1)
  float* inv_degree;     // (num_rows), see `Adjacency.inv_degree`
  RowSlice* slices;      // (num_rows) work list of uncut rows; null: none
};
FASTSPARSE_ARGUMENTS(EmitRowsArgs, FIELDS(row, num_edges, num_rows, rowptr, inv_degree, slices));

struct GatherRowsArgs {
  const void* table;  // in memory that the device can read; if the table is divided: one of its parts
  const std::int64_t* index;
  void* out;
  std::int64_t num_rows;
  std::int64_t row_bytes;
  // On CUDA only:
  std::int64_t out_row_bytes;  // at least row_bytes; the rest of a row is filled with zeros
  // If the table is divided among devices, row i is row i / num_parts of part i % num_parts.
  const std::int64_t* parts;  // (num_parts) addresses; null: the table is whole
  std::int64_t num_parts;
  const void* kept;           // copies of some rows on this device; null: none
  const std::int32_t* place;  // (number of rows of the table): number of a row's copy in `kept`, or -1
};
FASTSPARSE_ARGUMENTS(GatherRowsArgs, FIELDS(table, index, out, num_rows, row_bytes, out_row_bytes),
                     OPTIONAL(parts, num_parts, kept, place));

// ---------------------------------------------------------------- table

FASTSPARSE_HOST_DEVICE std::uint64_t node_key(const NodeList& list, std::int64_t node, std::int32_t seed) {
  return static_cast<std::uint64_t>(list.type) << 56 | static_cast<std::uint64_t>(seed) << 32 |
         static_cast<std::uint64_t>(node);
}

// Replaces the number at an address by `wanted` if it equals `expected`. Returns the number before the call.
FASTSPARSE_HOST_DEVICE std::uint64_t compare_and_swap(std::uint64_t* at, std::uint64_t expected,
                                                      std::uint64_t wanted) {
#ifdef __CUDA_ARCH__
  return atomicCAS(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(expected),
                   static_cast<unsigned long long>(wanted));
#else
  __atomic_compare_exchange_n(at, &expected, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
#endif
}

template <typename T>
FASTSPARSE_HOST_DEVICE T read_shared(const T* at) {
#ifdef __CUDA_ARCH__
  return *static_cast<const volatile T*>(at);
#else
  return __atomic_load_n(at, __ATOMIC_RELAXED);
#endif
}

FASTSPARSE_HOST_DEVICE void lower_to(std::uint32_t* at, std::uint32_t value) {
#ifdef __CUDA_ARCH__
  if (read_shared(at) > value) atomicMin(at, value);
#else
  std::uint32_t present = read_shared(at);
  while (present > value &&
         !__atomic_compare_exchange_n(at, &present, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

// The node of a list that has this place in the table.
FASTSPARSE_HOST_DEVICE std::int64_t node_at(const NodeTable& table, const NodeList& list,
                                            std::uint32_t place) {
  return table.key == nullptr ? static_cast<std::int64_t>(place) - list.first_place
                              : static_cast<std::int64_t>(table.key[place] & 0xffffffffu);
}

FASTSPARSE_HOST_DEVICE std::int32_t seed_at(const NodeTable& table, std::uint32_t place) {
  return static_cast<std::int32_t>(table.key[place] >> 32 & 0xffffffu);
}

// The place where the search for a node begins (Fibonacci hashing; Knuth, vol. 3, section 6.4).
FASTSPARSE_HOST_DEVICE std::uint32_t home(const NodeTable& table, const NodeList& list, std::int64_t node,
                                          std::int32_t seed) {
  if (table.key == nullptr) return static_cast<std::uint32_t>(list.first_place + node);
  std::uint64_t key = node_key(list, node, seed);
  key ^= key >> 32;
  return static_cast<std::uint32_t>(key * 0x9E3779B97F4A7C15ull >> (64 - table.bits));
}

// The place of a node, or kNoPlace if the node is not in the batch.
FASTSPARSE_HOST_DEVICE std::uint32_t find(const NodeTable& table, const NodeList& list, std::int64_t node,
                                          std::int32_t seed) {
  std::uint32_t place = home(table, list, node, seed);
  if (table.key == nullptr) return read_shared(table.value + place) == kNoPlace ? kNoPlace : place;
  const std::uint64_t key = node_key(list, node, seed);
  const auto last = static_cast<std::uint32_t>(table.num_places - 1);
  for (;; place = (place + 1) & last) {
    const std::uint64_t there = read_shared(table.key + place);
    if (there == key) return place;
    if (there == kNoKey) return kNoPlace;
  }
}

// The place of a node. If the node is not in the table, the function inserts it. The table is never full: it
// has at least 1.5 times as many places as the batch has nodes.
FASTSPARSE_HOST_DEVICE std::uint32_t find_or_insert(const NodeTable& table, const NodeList& list,
                                                    std::int64_t node, std::int32_t seed) {
  std::uint32_t place = home(table, list, node, seed);
  if (table.key == nullptr) return place;
  const std::uint64_t key = node_key(list, node, seed);
  const auto last = static_cast<std::uint32_t>(table.num_places - 1);
  for (;; place = (place + 1) & last) {
    std::uint64_t there = read_shared(table.key + place);
    if (there == kNoKey) there = compare_and_swap(table.key + place, kNoKey, key);
    if (there == kNoKey || there == key) return place;
  }
}

// ---------------------------------------------------------------- random numbers

// 64 random bits. The counter consists of a row of the batch, the number of the draw within that row, and the
// number of the step.
FASTSPARSE_HOST_DEVICE std::uint64_t draw_bits(std::uint64_t seed, const SampleStep& step, std::int64_t row,
                                               std::int64_t draw) {
  return philox64(static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                  static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(draw), step.number);
}

// A random number below `count`, computed from 64 random bits. The probabilities are equal up to count /
// 2^64.
FASTSPARSE_HOST_DEVICE std::uint32_t below(std::uint64_t bits, std::uint32_t count) {
#ifdef __CUDA_ARCH__
  return static_cast<std::uint32_t>(__umul64hi(bits, count));
#else
  return static_cast<std::uint32_t>(static_cast<unsigned __int128>(bits) * count >> 64);
#endif
}

// A random number in [0, 1), computed from 64 random bits.
FASTSPARSE_HOST_DEVICE double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// The bits of an exponentially distributed key, which sort like the key. The entries with the smallest keys
// are a weighted sample without replacement (Efraimidis and Spirakis, "Weighted random sampling with a
// reservoir", 2006).
FASTSPARSE_HOST_DEVICE std::uint32_t weighted_key(std::uint64_t bits, float weight) {
  // The key is computed in float64 and rounded to float32, so that devices agree although their logarithms
  // may differ in the last bit.
  const auto key = static_cast<float>(-std::log(1.0 - unit(bits)) / static_cast<double>(weight));
  std::uint32_t word;
#ifdef __CUDA_ARCH__
  word = __float_as_uint(key);
#else
  __builtin_memcpy(&word, &key, sizeof word);
#endif
  return word;
}

// The entry of a row for a random number in [0, 1). Its probability is proportional to its weight. At least
// one weight of the row must be positive.
FASTSPARSE_HOST_DEVICE std::int64_t entry_at(const double* weight_sum, std::int64_t begin, std::int64_t end,
                                             double number) {
  const double target = weight_sum[begin] + number * (weight_sum[end] - weight_sum[begin]);
  std::int64_t low = begin, high = end - 1;  // finds the last entry whose sum is at most the target
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (weight_sum[middle] <= target) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  while (weight_sum[low + 1] <= weight_sum[low]) --low;  // rounding may end at an entry with weight 0
  return low;
}

// ---------------------------------------------------------------- launchers

namespace cpu {
// Threads fill pieces of `piece` rows. After each piece, `filled` is called with the piece's first row and
// the row after its last row. past_caches: stores bypass the caches, for memory that the CPU does not read
// afterwards.
void gather_rows(const GatherRowsArgs& args, int threads, std::int64_t piece, bool past_caches,
                 const std::function<void(std::int64_t, std::int64_t)>& filled);
}  // namespace cpu

namespace cuda {
// Copies page-locked host memory to the device.
int send(void* to, const void* from, std::int64_t bytes, void* stream);
}  // namespace cuda

}  // namespace fastsparse
