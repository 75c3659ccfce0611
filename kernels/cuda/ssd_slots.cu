// Dataflows for comparison with ssd.cu, with float sums: MaxK-GNN's coupled dataflow (section 4.1), and the
// slots of the decoupled SSD paper (section IV). SsdSlotsArgs switches the techniques of the latter off one
// by one for the ablation. A warp is divided into slots of kWarp / slots lanes. A slot sums one edge group
// (consecutive edges of one row) in its buffer in shared memory, one source after another; then the warp
// updates the rows of all its groups with all lanes.
#include "fastsparse/cuda_common.cuh"
#include "fastsparse/launchers.h"

namespace fastsparse::cuda {
namespace ssd_slots_detail {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

template <typename T, typename Id>
__global__ void __launch_bounds__(kThreads) ssd_slots_kernel(const SsdSlotsArgs args) {
  extern __shared__ float buffers[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int lanes = kWarp / args.slots, slot = lane / lanes;
  const auto width = static_cast<int>(args.width);
  float* warp_buffers = buffers + static_cast<std::int64_t>(warp) * args.slots * width;
  const std::int64_t group0 = (static_cast<std::int64_t>(blockIdx.x) * kWarps + warp) * args.slots;
  const RowSlice slice = load_slice(args.groups, group0 + slot);
  const unsigned slot_mask = (lanes == kWarp ? kFullWarp : (1u << lanes) - 1) << (slot * lanes);

  for (int i = lane; i < args.slots * width; i += kWarp) warp_buffers[i] = 0;
  __syncwarp();
  float* buffer = warp_buffers + slot * width;
  for (std::int64_t entry = slice.begin; entry < slice.begin + slice.length; ++entry) {
    const std::int64_t source = __ldg(args.a.col + entry);
    float weight = 1;
    if (args.value.data != nullptr) {
      weight = load_value<T>(args.value, args.value.dtype == args.dtype, edge_position(args.a, entry));
    }
    if (args.scale_src != nullptr) weight *= static_cast<const float*>(args.scale_src)[source];
    for (std::int64_t c = lane % lanes; c < args.k; c += lanes) {
      const auto id = static_cast<const Id*>(args.ids)[source * args.k + c];
      buffer[id] += weight * widen(static_cast<const T*>(args.values)[source * args.k + c]);
    }
    __syncwarp(slot_mask);
  }
  if (args.coupled) {
    __syncthreads();
  } else {
    __syncwarp();
  }

  for (int other = 0; other < args.slots; ++other) {
    if (group0 + other >= args.groups.num_slices) break;
    const RowSlice group = load_slice(args.groups, group0 + other);
    float* row = args.sum + row_of(args.groups, group) * width;
    const bool shared_row = group.target < 0 || !args.update_mode;
    for (int i = lane; i < width; i += kWarp) {
      const float sum = warp_buffers[other * width + i];
      if (shared_row) {
        atomicAdd(row + i, sum);
      } else {
        row[i] = sum;
      }
    }
  }
}

template <typename T, typename Id>
void launch(const SsdSlotsArgs& args, cudaStream_t stream) {
  const auto bytes = static_cast<std::size_t>(kWarps * args.slots * args.width) * sizeof(float);
  cudaFuncSetAttribute(ssd_slots_kernel<T, Id>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(bytes));
  ssd_slots_kernel<T, Id>
      <<<ceil_div(args.groups.num_slices, kWarps * args.slots), kThreads, bytes, stream>>>(args);
}

}  // namespace ssd_slots_detail

int ssd_slots(const SsdSlotsArgs& args, void* stream) {
  using namespace ssd_slots_detail;
  const auto queue = static_cast<cudaStream_t>(stream);
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) <= 4) {
      args.width <= 256 ? launch<T, std::uint8_t>(args, queue) : launch<T, std::uint16_t>(args, queue);
    }
  });
  return cudaGetLastError();
}

}  // namespace fastsparse::cuda
