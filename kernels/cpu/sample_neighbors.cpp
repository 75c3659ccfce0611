// Neighbour sampling on the CPU: see sample_neighbors.h for the steps. Threads share out rows, then slots;
// the table is shared, by atomics whose outcome does not depend on their order. What a batch costs is memory
// that is not in the cache: row pointers, columns and places are asked for before the first of a group is
// waited for.
#include <algorithm>
#include <vector>

#include "fastsparse/launchers.h"
#include "fastsparse/sample_neighbors.h"

namespace fastsparse::cpu {
namespace {

constexpr std::int64_t kGroupSlots = 128;  // about as many are filled at a time
constexpr std::int64_t kGroupRows = 64;

struct Row {
  std::int64_t number;  // in the batch
  std::int64_t begin;   // first entry
  std::int64_t end;
  std::int32_t seed;
};

Row load_row(const SampleStep& step, std::int64_t number) {
  const std::int64_t node = step.dst.node[number];
  // A node that is none of the graph's, which the caller will hear of, has no neighbours.
  const bool is_valid = node >= 0 && node < step.a.num_rows;
  return {number, is_valid ? step.a.rowptr[node] : 0, is_valid ? step.a.rowptr[node + 1] : 0,
          step.dst.seed == nullptr ? 0 : step.dst.seed[number]};
}

// What a thread keeps from row to row.
struct Scratch {
  std::vector<std::int64_t> entry;  // drawn for the slots of a group of rows; -1: none
  std::vector<std::int32_t> seed;   // of the slot's row
  std::vector<std::int32_t> node;   // the slot's source
  std::vector<std::pair<std::uint32_t, std::int64_t>> weighted;  // key and entry
};

// Draws a row's entries, as many as it has slots.
void draw_row(const SampleStep& step, std::uint64_t seed, const Row& row, std::int64_t slots,
              std::int64_t* entry, Scratch& scratch) {
  const auto degree = static_cast<std::uint32_t>(row.end - row.begin);
  const auto fanout = static_cast<std::uint32_t>(slots);
  const auto is_drawable = [&](std::int64_t at) { return step.weight[at] > 0.0f; };
  if (step.slot_ptr != nullptr) {
    for (std::uint32_t j = 0; j < degree; ++j) {
      const std::int64_t at = row.begin + j;
      entry[j] = step.weight == nullptr || step.induced || is_drawable(at) ? at : -1;
    }
  } else if (step.replace) {
    const bool can_draw =
        step.weight_sum == nullptr ? degree > 0 : step.weight_sum[row.begin] < step.weight_sum[row.end];
    for (std::uint32_t j = 0; j < fanout; ++j) {
      const std::uint64_t bits = draw_bits(seed, step, row.number, j);
      entry[j] = !can_draw                    ? -1
                 : step.weight_sum == nullptr ? row.begin + below(bits, degree)
                                              : entry_at(step.weight_sum, row.begin, row.end, unit(bits));
    }
  } else if (step.weight != nullptr) {
    auto& keys = scratch.weighted;
    keys.clear();
    for (std::uint32_t i = 0; i < degree; ++i) {
      const std::int64_t at = row.begin + i;
      if (is_drawable(at)) {
        keys.emplace_back(weighted_key(draw_bits(seed, step, row.number, i), step.weight[at]), at);
      }
    }
    if (keys.size() > fanout) {
      std::nth_element(keys.begin(), keys.begin() + fanout, keys.end());
      keys.resize(fanout);
      std::sort(keys.begin(), keys.end(), [](auto& a, auto& b) { return a.second < b.second; });
    }
    for (std::uint32_t j = 0; j < fanout; ++j) entry[j] = j < keys.size() ? keys[j].second : -1;
  } else if (degree <= fanout) {
    for (std::uint32_t j = 0; j < fanout; ++j) entry[j] = j < degree ? row.begin + j : -1;
  } else {
    // Floyd's method (Bentley and Floyd, "A sample of brilliance", 1987).
    for (std::uint32_t j = 0; j < fanout; ++j) {
      const std::uint32_t last = degree - fanout + j;
      const std::int64_t number = row.begin + below(draw_bits(seed, step, row.number, j), last + 1);
      bool taken = false;
      for (std::uint32_t i = 0; i < j; ++i) taken |= entry[i] == number;
      entry[j] = taken ? row.begin + last : number;
    }
  }
}

// Rows first .. last - 1 of the step.
void sample_group(const SampleStep& step, const SampleArgs& args, std::int64_t first, std::int64_t last,
                  Scratch& scratch) {
  const std::int64_t first_row = *step.first_row;
  const auto slot_of = [&](std::int64_t r) {
    return step.slot_ptr == nullptr ? r * step.fanout : step.slot_ptr[r];
  };
  for (std::int64_t r = first; r < last; ++r) {
    const std::int64_t node = step.dst.node[first_row + r];
    if (node >= 0 && node < step.a.num_rows) __builtin_prefetch(step.a.rowptr + node);
  }
  const std::int64_t first_slot = slot_of(first), num_slots = slot_of(last) - first_slot;
  scratch.entry.resize(num_slots);
  scratch.seed.resize(num_slots);
  scratch.node.resize(num_slots);
  for (std::int64_t r = first; r < last; ++r) {
    const Row row = load_row(step, first_row + r);
    const std::int64_t begin = slot_of(r) - first_slot, slots = slot_of(r + 1) - first_slot - begin;
    draw_row(step, args.seed, row, slots, scratch.entry.data() + begin, scratch);
    std::fill_n(scratch.seed.begin() + begin, slots, row.seed);
    for (std::int64_t k = begin; k < begin + slots; ++k) {
      const std::int64_t entry = scratch.entry[k];
      if (entry >= 0) __builtin_prefetch(step.a.col + entry);
      if (entry >= 0 && step.a.edge_id != nullptr) {
        __builtin_prefetch(static_cast<const char*>(step.a.edge_id) +
                           entry * (step.a.edge_id_is_64bit ? 8 : 4));
      }
    }
  }
  for (std::int64_t k = 0; k < num_slots; ++k) {
    const std::int64_t entry = scratch.entry[k];
    if (entry < 0) continue;
    scratch.node[k] = step.a.col[entry];
    const std::uint32_t place = home(args.table, step.src, scratch.node[k], scratch.seed[k]);
    if (args.table.key != nullptr) __builtin_prefetch(args.table.key + place, 1);
    __builtin_prefetch(args.table.value + place, 1);
  }
  for (std::int64_t k = 0; k < num_slots; ++k) {
    const std::int64_t entry = scratch.entry[k], slot = first_slot + k;
    if (entry < 0) {
      step.slot_place[slot] = kNoPlace;
      continue;
    }
    std::uint32_t place;
    if (step.induced) {
      place = find(args.table, step.src, scratch.node[k], scratch.seed[k]);
    } else {
      place = find_or_insert(args.table, step.src, scratch.node[k], scratch.seed[k]);
      lower_to(args.table.value + place, kIsSlot | static_cast<std::uint32_t>(slot));
    }
    step.slot_place[slot] = place;
    step.slot_edge[slot] = edge_position(step.a, entry);
  }
}

struct Counts {
  std::int64_t edges;
  std::int64_t nodes;
};

bool is_first(const SampleStep& step, const NodeTable& table, std::int64_t slot) {
  return read_shared(table.value + step.slot_place[slot]) == (kIsSlot | static_cast<std::uint32_t>(slot));
}

// Row of the step that a slot belongs to; of slots behind all, any.
std::int64_t row_of_slot(const SampleStep& step, std::int64_t rows, std::int64_t slot) {
  if (step.slot_ptr == nullptr) return slot / step.fanout;
  return std::upper_bound(step.slot_ptr, step.slot_ptr + rows + 1, slot) - step.slot_ptr - 1;
}

// Compacts edges and appends new nodes of slots begin .. end - 1, the first of row r.
void write_part(const SampleStep& step, const NodeTable& table, std::int64_t begin, std::int64_t end,
                std::int64_t r, Counts at) {
  const std::int64_t first_row = *step.first_row;
  for (std::int64_t slot = begin; slot < end; ++slot) {
    while (slot >= (step.slot_ptr == nullptr ? (r + 1) * step.fanout : step.slot_ptr[r + 1])) ++r;
    const std::uint32_t place = step.slot_place[slot];
    if (place == kNoPlace) continue;
    step.place[at.edges] = place;
    step.row[at.edges] = static_cast<std::int32_t>(first_row + r);
    step.edge_id[at.edges] = step.slot_edge[slot];
    ++at.edges;
    if (!is_first(step, table, slot)) continue;
    step.src.node[at.nodes] = node_at(table, step.src, place);
    if (step.src.seed != nullptr) step.src.seed[at.nodes] = seed_at(table, place);
    // Others that ask whether they are the first see a slot that is not theirs, or this number.
    __atomic_store_n(table.value + place, static_cast<std::uint32_t>(at.nodes), __ATOMIC_RELAXED);
    ++at.nodes;
  }
}

void run_step(const SampleStep& step, const SampleArgs& args, int threads) {
  const std::int64_t first_row = *step.first_row, rows = *step.end_row - first_row;
  if (step.slot_ptr != nullptr) {
    step.slot_ptr[0] = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      const Row row = load_row(step, first_row + r);
      step.slot_ptr[r + 1] = step.slot_ptr[r] + (row.end - row.begin);
    }
  }
  const std::int64_t slots = step.slot_ptr == nullptr ? rows * step.fanout : step.slot_ptr[rows];
  const std::int64_t mean = rows > 0 ? slots / rows : 0;
  const std::int64_t group =
      std::clamp(kGroupSlots / std::max<std::int64_t>(mean, 1), std::int64_t{1}, kGroupRows);
  const std::int64_t groups = (rows + group - 1) / group;
  const NodeTable& table = args.table;
  const bool is_large = slots > 2 * kGroupSlots;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (is_large)
  for (std::int64_t k = 0; k < groups; ++k) {
    static thread_local Scratch scratch;
    sample_group(step, args, k * group, std::min((k + 1) * group, rows), scratch);
  }

  // Every thread has a part of the slots: counted first, then written behind those of the parts before.
  const int parts = is_large ? threads : 1;
  std::vector<Counts> before(parts + 1);
  before[0] = {*step.edges_before, *step.nodes_before};
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (is_large)
  for (int part = 0; part < parts; ++part) {
    Counts counts{0, 0};
    for (std::int64_t slot = slots * part / parts; slot < slots * (part + 1) / parts; ++slot) {
      if (step.slot_place[slot] == kNoPlace) continue;
      ++counts.edges;
      counts.nodes += is_first(step, table, slot);
    }
    before[part + 1] = counts;
  }
  for (int part = 0; part < parts; ++part) {
    before[part + 1].edges += before[part].edges;
    before[part + 1].nodes += before[part].nodes;
  }
  *step.edges_after = before[parts].edges;
  *step.nodes_after = before[parts].nodes;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (is_large)
  for (int part = 0; part < parts; ++part) {
    const std::int64_t begin = slots * part / parts, end = slots * (part + 1) / parts;
    write_part(step, table, begin, end, row_of_slot(step, rows, begin), before[part]);
  }
}

}  // namespace

void sample_neighbors(const SampleArgs& args, int threads) {
  if (args.table.key != nullptr) std::fill_n(args.table.key, args.table.num_places, kNoKey);
  std::fill_n(args.table.value, args.table.num_places, kNoPlace);
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
    const std::uint32_t source = args.table.value[args.place[edge]];
    args.edge_index[edge] = source;
    args.edge_index[args.num_edges + edge] = args.row[edge];
    args.col[edge] = static_cast<std::int32_t>(source);
    args.edge_id_out[edge] = args.edge_id[edge];
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

}  // namespace fastsparse::cpu
