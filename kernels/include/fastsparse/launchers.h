// The operators. Each has a struct of arguments, and a launcher for the CPU, for CUDA, or for both.
// CPU launchers run on `threads` OpenMP threads. CUDA launchers enqueue on `stream` (a cudaStream_t) of the
// current device and return a cudaError_t as int; they never allocate and never synchronise.
#pragma once

#include <cstddef>

#include "fastsparse/views.h"

// Operators that are also functions of `_C`, with the arguments of the struct's FASTSPARSE_ARGUMENTS.
#define FASTSPARSE_OPERATORS(BOTH, CPU, CUDA)                      \
  BOTH(cbsr_gather, CbsrGatherArgs)                                \
  BOTH(cbsr_to_dense, CbsrToDenseArgs)                             \
  BOTH(edge_messages, EdgeMessageArgs)                             \
  BOTH(edge_messages_backward, EdgeMessageBackwardArgs)            \
  BOTH(edge_softmax, EdgeSoftmaxArgs)                              \
  BOTH(emit_edges, EmitEdgesArgs)                                  \
  BOTH(emit_rows, EmitRowsArgs)                                    \
  BOTH(expand_rows, ExpandRowsArgs)                                \
  BOTH(link_rows, LinkRowsArgs)                                    \
  BOTH(mask_rows, MaskRowsArgs)                                    \
  BOTH(maxk, MaxkArgs)                                             \
  BOTH(multi_aggregate, MultiAggregateArgs)                        \
  BOTH(multi_aggregate_backward, MultiAggregateBackwardArgs)       \
  BOTH(reverse_entries, ReverseEntriesArgs)                        \
  BOTH(row_signatures, RowSignaturesArgs)                          \
  BOTH(sddmm_csr, SddmmArgs)                                       \
  BOTH(similar_rows, SimilarRowsArgs)                              \
  BOTH(spmm_csr_transposed, SpmmTransposedArgs)                    \
  BOTH(spmm_extremum, SpmmExtremumArgs)                            \
  BOTH(spmm_extremum_backward, SpmmExtremumBackwardArgs)           \
  BOTH(ssd, SsdArgs)                                               \
  BOTH(ssd_backward, SsdBackwardArgs)                              \
  BOTH(ssd_value_grad, SsdValueGradArgs)                           \
  CPU(attention_csr_backward, AttentionCsrBackwardArgs)            \
  CPU(head_scores_backward, HeadScoresBackwardArgs)                \
  CUDA(additive_attention, AdditiveAttentionArgs)                  \
  CUDA(additive_attention_backward, AdditiveAttentionBackwardArgs) \
  CUDA(aggregate_linear, AggregateLinearArgs)                      \
  CUDA(attention_bsb, AttentionBsbArgs)                            \
  CUDA(attention_bsb_backward, AttentionBsbBackwardArgs)           \
  CUDA(batch_norm, BatchNormArgs)                                  \
  CUDA(batch_norm_backward, BatchNormBackwardArgs)                 \
  CUDA(edge_attention, EdgeAttentionArgs)                          \
  CUDA(edge_attention_backward, EdgeAttentionBackwardArgs)         \
  CUDA(gather_rows, GatherRowsArgs)                                \
  CUDA(gatv2_attention, Gatv2AttentionArgs)                        \
  CUDA(gatv2_attention_backward, Gatv2AttentionBackwardArgs)       \
  CUDA(head_outer, HeadOuterArgs)                                  \
  CUDA(hybrid_rows, HybridRowsArgs)                                \
  CUDA(row_split_count, RowSplitArgs)                              \
  CUDA(row_split_fill, RowSplitArgs)                               \
  CUDA(sddmm_bsb, SddmmBsbArgs)                                    \
  CUDA(spmm_bsb, SpmmBsbArgs)                                      \
  CUDA(ssd_backward_windows, SsdBackwardWindowsArgs)               \
  CUDA(ssd_slots, SsdSlotsArgs)                                    \
  CUDA(sum_of_rows, SumOfRowsArgs)                                 \
  CUDA(weight_gradient, WeightGradientArgs)

// Launchers that binding.cpp calls from functions that do more than fill a struct.
#define FASTSPARSE_LAUNCHERS(BOTH, CPU, CUDA)                  \
  BOTH(gather_graphs, GatherGraphsArgs)                        \
  BOTH(inspect, InspectArgs)                                   \
  BOTH(place_batch, PlaceBatchArgs)                            \
  BOTH(sample_neighbors, SampleArgs)                           \
  BOTH(segment_reduce, SegmentReduceArgs)                      \
  BOTH(sort_edges, SortEdgesArgs)                              \
  BOTH(spmm_csr, SpmmArgs)                                     \
  CPU(attention_csr, AttentionCsrArgs)                         \
  CPU(attention_layer, AttentionLayerForward)                  \
  CPU(attention_layer_backward, AttentionLayerBackward)        \
  CPU(head_scores, HeadScoresArgs)                             \
  CUDA(aggregate_linear_backward, AggregateLinearBackwardArgs) \
  CUDA(attention_layer, CudaAttentionLayerArgs)                \
  CUDA(attention_layer_backward, CudaAttentionLayerArgs)       \
  CUDA(slab_sums, SlabSumsArgs)                                \
  CUDA(spmm_tca, SpmmArgs)                                     \
  CUDA(stack_maps, StackedMapsArgs)

namespace fastsparse {

#define FASTSPARSE_DECLARE_CPU(name, Args)  \
  struct Args;                              \
  namespace cpu {                           \
  void name(const Args& args, int threads); \
  }
#define FASTSPARSE_DECLARE_CUDA(name, Args) \
  struct Args;                              \
  namespace cuda {                          \
  int name(const Args& args, void* stream); \
  }
#define FASTSPARSE_DECLARE_BOTH(name, Args) \
  FASTSPARSE_DECLARE_CPU(name, Args) FASTSPARSE_DECLARE_CUDA(name, Args)
FASTSPARSE_OPERATORS(FASTSPARSE_DECLARE_BOTH, FASTSPARSE_DECLARE_CPU, FASTSPARSE_DECLARE_CUDA)
FASTSPARSE_LAUNCHERS(FASTSPARSE_DECLARE_BOTH, FASTSPARSE_DECLARE_CPU, FASTSPARSE_DECLARE_CUDA)

}  // namespace fastsparse

// Launchers with additional parameters.
namespace fastsparse::cpu {

void compress(const CompressArgs& args);

}  // namespace fastsparse::cpu

namespace fastsparse::cuda {

std::size_t compress_scratch_bytes(const CompressArgs& args);
int compress(const CompressArgs& args, void* scratch, std::size_t scratch_bytes, void* stream);
std::int64_t num_row_split_counts(std::int64_t num_rows);
std::int64_t num_hybrid_rows_counts(std::int64_t num_rows);
int spmm_resident(const SpmmArgs& args, bool tensor_cores, void* stream);
int spmm_hr(const SpmmArgs& args, std::int64_t num_long, void* stream);

}  // namespace fastsparse::cuda
