// The kernels that an attention layer launches before and after attention, on CUDA:
// cuda/attention_layer_parts.cu.
#pragma once

#include <cuda_runtime.h>

#include "fastsparse/attention_layer.h"

namespace fastsparse::cuda {

struct ScoreGradients {
  HeadScoresArgs scores;  // here, `scores.scores` has the gradients of the scores
  DenseView grad;         // gradient of the layer's result; null data: its sum is not computed
  void* grad_v;           // contiguous; this kernel adds to it
  float* partial;         // (blocks, 3, width)
};

// Results of the sums over rows: ds_ih v_ih for both vectors, and `grad`.
struct ScoreSums {
  void* to[3];  // null: not computed
  Dtype dtype[3];
};

// result = out + skip + bias.
struct Addends {
  const void* out;  // contiguous
  DenseView skip;   // null data: none
  const void* bias;
  bool bias_is_float;
  void* result;
  std::int64_t num_rows;
  std::int64_t width;
};

// Matrices that are copied next to each other into one matrix.
struct Pieces {
  DenseView from[kMostLinears];
  std::int64_t count;
  void* to;  // (num_rows, count * width)
  std::int64_t num_rows;
  std::int64_t width;
};

void launch_scores(const HeadScoresArgs& of, std::int64_t most_blocks, cudaStream_t stream);
void launch_score_gradients(const ScoreGradients& args, const ScoreSums& sums, std::int64_t most_blocks,
                            cudaStream_t stream);
// Launches nothing if there is nothing to add.
void launch_add(Dtype dtype, const Addends& args, cudaStream_t stream);
void launch_join(Dtype dtype, const Pieces& args, cudaStream_t stream);

}  // namespace fastsparse::cuda
