// Neighbour sampling, what both devices share: arguments, the table of the batch's nodes, random numbers.
//
// A batch is drawn in steps, one for every hop and edge type. A step has a slot for every edge that it may
// draw: a row's neighbours are in the order in which they were drawn, rows in the order of the batch's nodes.
//
//   sample   fills slots: draws entries of the row, finds or makes the place of each source in the table, and
//            leaves there the first slot of the step that met it, by an atomic minimum: the same whichever
//            thread comes first;
//   count    adds up, over tiles of slots, those that hold an edge and those that are the first of a node
//   that
//            the batch does not have yet;
//   write    numbers both in the order of slots: edges are compacted, new nodes appended to the batch's.
//
// So nothing that is returned depends on the order of threads, nor on places in the table. Sizes stay on the
// device; the host knows bounds and reads the sizes when all steps are done. Then `emit_edges` writes the
// edges with numbers of nodes in place of places, and `emit_rows` what else a structure consists of.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>

#include "fastsparse/views.h"

namespace fastsparse {

constexpr std::uint64_t kNoKey = ~std::uint64_t{0};
constexpr std::uint32_t kNoPlace = ~std::uint32_t{0};
// Set in values of the table that are slots; without it they are numbers of nodes, which are thereby less.
constexpr std::uint32_t kIsSlot = std::uint32_t{1} << 31;
// Tiles that slots are divided into: few, so that every block adds up those before its own.
constexpr int kMostTiles = 1024;

// Nodes of the batch. All bytes are 0xff where it is empty. Graphs that have no more nodes than a table needs
// space for give every node a place of its own; others, and disjoint subgraphs, find places by open
// addressing with linear probing.
struct NodeTable {
  std::uint64_t* key;    // (num_places), a power of two; null: every node has its place
  std::uint32_t* value;  // (num_places)
  std::int64_t num_places;
  int bits;  // of places, where there are keys
};
FASTSPARSE_ARGUMENTS(NodeTable, FIELDS(key, value, num_places, bits));

// The batch's nodes of one type, in the order of their numbers.
struct NodeList {
  std::int64_t* node;        // ids in the graph
  std::int32_t* seed;        // number of the seed whose subgraph it belongs to; null: all share one
  std::int64_t num_nodes;    // in the graph
  std::int64_t first_place;  // of the type's nodes, where every node has its place
  std::int32_t type;         // below 2^8
};
FASTSPARSE_ARGUMENTS(NodeList, FIELDS(node, seed, num_nodes, first_place, type));

// The nodes that a list begins with.
struct FirstNodes {
  NodeList list;
  std::int64_t count;
  std::int64_t* count_out;  // where the device keeps the number
};
FASTSPARSE_ARGUMENTS(FirstNodes, FIELDS(list, count, count_out));

struct SampleStep {
  CsrView a;
  const float* weight;       // of every entry; null: all alike
  const double* weight_sum;  // (num_edges + 1) sums of the weights before every entry; with replacement
  std::int64_t fanout;       // < 0: all
  bool replace;
  bool induced;          // all entries whose source is in the batch; makes no new nodes
  std::uint32_t number;  // of the step, which its random numbers depend on
  NodeList dst;
  NodeList src;
  const std::int64_t* first_row;     // rows of the step: numbers of destinations, from here
  const std::int64_t* end_row;       // up to here
  const std::int64_t* nodes_before;  // number of sources in the batch
  std::int64_t* nodes_after;
  const std::int64_t* edges_before;  // number of edges that the following three hold
  std::int64_t* edges_after;
  std::uint32_t* place;   // of every edge's source in the table; CPU: its number
  std::int32_t* row;      // its destination
  std::int64_t* edge_id;  // its position in the caller's order
  std::int64_t most_rows;
  std::int64_t most_slots;
  // CUDA only:
  std::int64_t* slot_ptr;      // (most_rows + 1) first slot of every row; null: each has `fanout`
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
  std::int64_t* sizes;  // the first is 1 where a node is none of the graph; all begin with 0
  std::int64_t num_sizes;
  std::uint64_t seed;
  const FirstNodes* first_nodes;
  int num_lists;
  const SampleStep* steps;
  int num_steps;
};

struct EmitEdgesArgs {
  NodeTable table;
  const std::uint32_t* place;  // (num_edges), on the CPU numbers
  const std::int32_t* row;
  const std::int64_t* edge_id;
  std::int64_t num_edges;
  std::int64_t* edge_index;  // (2, num_edges) sources, destinations
  // CUDA only; on the CPU `place` and `edge_id` are what the caller gets:
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
  float* inv_degree;     // (num_rows) as `Adjacency.inv_degree`
  RowSlice* slices;      // (num_rows) work list of uncut rows; null: none
};
FASTSPARSE_ARGUMENTS(EmitRowsArgs, FIELDS(row, num_edges, num_rows, rowptr, inv_degree, slices));

struct GatherRowsArgs {
  const void* table;  // memory that the device can read, its own or the host's; of a divided table: one part
  const std::int64_t* index;
  void* out;
  std::int64_t num_rows;
  std::int64_t row_bytes;
  // On CUDA only:
  std::int64_t out_row_bytes;  // at least row_bytes, zeros behind them
  // A table whose row i is row i / num_parts of part i % num_parts, on as many devices:
  const std::int64_t* parts;  // (num_parts) addresses; null: the table is whole
  std::int64_t num_parts;
  const void* kept;           // some rows on this device, too; null: none
  const std::int32_t* place;  // (rows of the table) a row's number among those, or -1
};
FASTSPARSE_ARGUMENTS(GatherRowsArgs, FIELDS(table, index, out, num_rows, row_bytes, out_row_bytes),
                     OPTIONAL(parts, num_parts, kept, place));

// ---------------------------------------------------------------- table

FASTSPARSE_HOST_DEVICE std::uint64_t node_key(const NodeList& list, std::int64_t node, std::int32_t seed) {
  return static_cast<std::uint64_t>(list.type) << 56 | static_cast<std::uint64_t>(seed) << 32 |
         static_cast<std::uint64_t>(node);
}

// What is at an address before `wanted` takes the place of `expected` there.
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

// The node of a list that has a place.
FASTSPARSE_HOST_DEVICE std::int64_t node_at(const NodeTable& table, const NodeList& list,
                                            std::uint32_t place) {
  return table.key == nullptr ? static_cast<std::int64_t>(place) - list.first_place
                              : static_cast<std::int64_t>(table.key[place] & 0xffffffffu);
}

FASTSPARSE_HOST_DEVICE std::int32_t seed_at(const NodeTable& table, std::uint32_t place) {
  return static_cast<std::int32_t>(table.key[place] >> 32 & 0xffffffu);
}

// Where the search for a node begins (Fibonacci hashing; Knuth, vol. 3, section 6.4).
FASTSPARSE_HOST_DEVICE std::uint32_t home(const NodeTable& table, const NodeList& list, std::int64_t node,
                                          std::int32_t seed) {
  if (table.key == nullptr) return static_cast<std::uint32_t>(list.first_place + node);
  std::uint64_t key = node_key(list, node, seed);
  key ^= key >> 32;
  return static_cast<std::uint32_t>(key * 0x9E3779B97F4A7C15ull >> (64 - table.bits));
}

// The place of a node, kNoPlace where the batch does not have it.
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

// The place of a node, which gets one where it has none. The table is never full: it has half as many places
// again as there are nodes in a batch.
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

// 64 random bits of one draw: a row of the batch, a number within it, and the step are the counter.
FASTSPARSE_HOST_DEVICE std::uint64_t draw_bits(std::uint64_t seed, const SampleStep& step, std::int64_t row,
                                               std::int64_t draw) {
  return philox64(static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                  static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(draw), step.number);
}

// A number below `count`, all of them equally likely up to count / 2^64.
FASTSPARSE_HOST_DEVICE std::uint32_t below(std::uint64_t bits, std::uint32_t count) {
#ifdef __CUDA_ARCH__
  return static_cast<std::uint32_t>(__umul64hi(bits, count));
#else
  return static_cast<std::uint32_t>(static_cast<unsigned __int128>(bits) * count >> 64);
#endif
}

// In [0, 1).
FASTSPARSE_HOST_DEVICE double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// The bits of an exponentially distributed key, which order as the keys do: of any number of entries those
// with the smallest keys are a sample by weight without replacement (Efraimidis and Spirakis, "Weighted
// random sampling with a reservoir", 2006).
FASTSPARSE_HOST_DEVICE std::uint32_t weighted_key(std::uint64_t bits, float weight) {
  // Rounded to float32 from float64, so that devices whose logarithms differ in a last bit agree.
  const auto key = static_cast<float>(-std::log(1.0 - unit(bits)) / static_cast<double>(weight));
  std::uint32_t word;
#ifdef __CUDA_ARCH__
  word = __float_as_uint(key);
#else
  __builtin_memcpy(&word, &key, sizeof word);
#endif
  return word;
}

// The entry of a row that a number in [0, 1) falls on, entries being as wide as their weights. The row has a
// positive weight.
FASTSPARSE_HOST_DEVICE std::int64_t entry_at(const double* weight_sum, std::int64_t begin, std::int64_t end,
                                             double number) {
  const double target = weight_sum[begin] + number * (weight_sum[end] - weight_sum[begin]);
  std::int64_t low = begin, high = end - 1;  // the last entry that begins at or before the target
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (weight_sum[middle] <= target) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  while (weight_sum[low + 1] <= weight_sum[low]) --low;  // rounding may lead behind the last that has a width
  return low;
}

// ---------------------------------------------------------------- launchers

namespace cpu {
// Threads fill pieces of so many rows, and call `filled` with a piece's first row and the one behind its
// last. Past caches: for memory that no core reads next.
void gather_rows(const GatherRowsArgs& args, int threads, std::int64_t piece, bool past_caches,
                 const std::function<void(std::int64_t, std::int64_t)>& filled);
}  // namespace cpu

namespace cuda {
// From page-locked memory to the device.
int send(void* to, const void* from, std::int64_t bytes, void* stream);
}  // namespace cuda

}  // namespace fastsparse
