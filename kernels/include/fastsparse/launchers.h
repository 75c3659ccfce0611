// The operators as seen by the binding: one name per operator, once for the CPU and once for CUDA.
// CPU launchers run on `threads` OpenMP threads. CUDA launchers enqueue on `stream` (a cudaStream_t) of the
// current device and return a cudaError_t as int; they never allocate and never synchronise.
#pragma once

#include <cstddef>

#include "fastsparse/views.h"

namespace fastsparse::cpu {

void compress(const CompressArgs& args);
void expand_rows(const ExpandRowsArgs& args, int threads);
void reverse_entries(const ReverseEntriesArgs& args, int threads);
void inspect(const InspectArgs& args, int threads);
void row_signatures(const RowSignaturesArgs& args, int threads);
void similar_rows(const SimilarRowsArgs& args, int threads);
void link_rows(const LinkRowsArgs& args, int threads);
void spmm_csr(const SpmmArgs& args, int threads);
void spmm_csr_transposed(const SpmmTransposedArgs& args, int threads);
void spmm_extremum(const SpmmExtremumArgs& args, int threads);
void sddmm_csr(const SddmmArgs& args, int threads);
void edge_softmax(const EdgeSoftmaxArgs& args, int threads);
void segment_reduce(const SegmentReduceArgs& args, int threads);
void attention_csr(const AttentionCsrArgs& args, int threads);
void attention_csr_backward(const AttentionCsrBackwardArgs& args, int threads);
void multi_aggregate(const MultiAggregateArgs& args, int threads);
void multi_aggregate_backward(const MultiAggregateBackwardArgs& args, int threads);
void maxk(const MaxkArgs& args, int threads);
void mask_rows(const MaskRowsArgs& args, int threads);
void cbsr_to_dense(const CbsrToDenseArgs& args, int threads);
void cbsr_gather(const CbsrGatherArgs& args, int threads);
void ssd(const SsdArgs& args, int threads);
void ssd_backward(const SsdBackwardArgs& args, int threads);
void ssd_value_grad(const SsdValueGradArgs& args, int threads);

}  // namespace fastsparse::cpu

namespace fastsparse::cuda {

std::size_t compress_scratch_bytes(const CompressArgs& args);
int expand_rows(const ExpandRowsArgs& args, void* stream);
int reverse_entries(const ReverseEntriesArgs& args, void* stream);
int compress(const CompressArgs& args, void* scratch, std::size_t scratch_bytes, void* stream);
int inspect(const InspectArgs& args, void* stream);
int row_signatures(const RowSignaturesArgs& args, void* stream);
int similar_rows(const SimilarRowsArgs& args, void* stream);
int link_rows(const LinkRowsArgs& args, void* stream);
std::int64_t num_row_split_counts(std::int64_t num_rows);
int row_split_count(const RowSplitArgs& args, void* stream);
int row_split_fill(const RowSplitArgs& args, void* stream);
int aggregate_linear(const AggregateLinearArgs& args, void* stream);
int aggregate_linear_backward(const AggregateLinearBackwardArgs& args, void* stream);
int spmm_csr(const SpmmArgs& args, void* stream);
int spmm_csr_transposed(const SpmmTransposedArgs& args, void* stream);
int spmm_bsb(const SpmmBsbArgs& args, void* stream);
int spmm_tca(const SpmmArgs& args, void* stream);
int spmm_resident(const SpmmArgs& args, bool tensor_cores, void* stream);
int spmm_hr(const SpmmArgs& args, std::int64_t num_long, void* stream);
int sum_of_rows(const SumOfRowsArgs& args, void* stream);
int weight_gradient(const WeightGradientArgs& args, void* stream);
int head_outer(const HeadOuterArgs& args, void* stream);
std::int64_t num_hybrid_rows_counts(std::int64_t num_rows);
int hybrid_rows(const HybridRowsArgs& args, void* stream);
int spmm_extremum(const SpmmExtremumArgs& args, void* stream);
int sddmm_csr(const SddmmArgs& args, void* stream);
int edge_softmax(const EdgeSoftmaxArgs& args, void* stream);
int segment_reduce(const SegmentReduceArgs& args, void* stream);
int attention_bsb(const AttentionBsbArgs& args, void* stream);
int attention_bsb_backward(const AttentionBsbBackwardArgs& args, void* stream);
int additive_attention(const AdditiveAttentionArgs& args, void* stream);
int additive_attention_backward(const AdditiveAttentionBackwardArgs& args, void* stream);
int gatv2_attention(const Gatv2AttentionArgs& args, void* stream);
int gatv2_attention_backward(const Gatv2AttentionBackwardArgs& args, void* stream);
int edge_attention(const EdgeAttentionArgs& args, void* stream);
int edge_attention_backward(const EdgeAttentionBackwardArgs& args, void* stream);
int multi_aggregate(const MultiAggregateArgs& args, void* stream);
int multi_aggregate_backward(const MultiAggregateBackwardArgs& args, void* stream);
int sddmm_bsb(const SddmmBsbArgs& args, void* stream);
int maxk(const MaxkArgs& args, void* stream);
int mask_rows(const MaskRowsArgs& args, void* stream);
int cbsr_to_dense(const CbsrToDenseArgs& args, void* stream);
int cbsr_gather(const CbsrGatherArgs& args, void* stream);
int ssd(const SsdArgs& args, void* stream);
int ssd_slots(const SsdSlotsArgs& args, void* stream);
int ssd_backward(const SsdBackwardArgs& args, void* stream);
int ssd_backward_windows(const SsdBackwardWindowsArgs& args, void* stream);
int ssd_value_grad(const SsdValueGradArgs& args, void* stream);

}  // namespace fastsparse::cuda
