// Messages with edge features: arguments of kernels/c*/edge_messages.c*.
#pragma once

#include "fastsparse/views.h"

namespace fastsparse {

// The message of an entry: relu(z) for GINE with z = q_j + e_ij, or sigmoid(z) v_ij for gated layers with
// z = k_i + q_j + e_ij and v_ij = v_j + u_ij; e and u depend on the edge's features.
enum class EdgeMessage : int { kRelu = 0, kGate = 1, kGateAndState = 2 };

// The caller's maps of raw features, which are copied to `out` in the kernels' layout: transposed, padded
// with zeros, in the accumulation type.
struct EdgeMapsArgs {
  DenseView weight;    // W, (given_width, given_edge_width) of `dtype`; null data: `out` already has the maps
  DenseView added;     // (given_width, given_edge_width) of `dtype`: added to W; null data: nothing is added
  DenseView of_value;  // U, (given_width, given_edge_width) of `dtype`; null data: none
  const void* bias;    // (given_width); null: none
  std::int64_t given_width;
  std::int64_t given_edge_width;
  Dtype dtype;  // dtype of all maps and the bias
  void* out;  // rows of `width` elements: edge_width rows of W, edge_width rows of U and one row of the bias,
              // if given
  std::int64_t width;
  std::int64_t edge_width;
};

// Edges have raw features a (then e = W a + bias and u = U a), or their features are e, or they have no
// features.
struct EdgeMessageInput {
  EdgeMessage message;   // kGateAndState needs e in `edge`; z and sums of gates are also results
  DenseView k;           // (num_rows, width); gates only
  DenseView q;           // (num_cols, width)
  DenseView v;           // (num_cols, width); gates only
  DenseView edge;        // (num_values, edge_width) if raw, otherwise (num_values, width); null data: none
  EdgeMapsArgs maps;     // null `out`: not raw
  const void* weight;    // in `maps.out`: (edge_width, width), W transposed; null: not raw
  const void* of_value;  // in `maps.out`: (edge_width, width), U transposed; gates with raw features only
  const void* bias;      // (width), null: 0; relu with raw features only
  std::int64_t width;
  std::int64_t edge_width;
  Dtype dtype;
};

// Sets the widths in `maps` and the pointers into `maps.out`. Launchers call this function first.
inline void find_maps(EdgeMessageInput& input) {
  EdgeMapsArgs& maps = input.maps;
  if (maps.out == nullptr) {
    input.edge_width = 0;
    return;
  }
  maps.width = input.width;
  maps.edge_width = input.edge_width;
  const std::int64_t size = input.dtype == Dtype::kFloat64 ? 8 : 4;
  const void* after = static_cast<char*>(maps.out) + input.edge_width * input.width * size;
  input.weight = maps.out;
  if (input.message != EdgeMessage::kRelu) {
    input.of_value = after;
  } else if (maps.bias != nullptr) {
    input.bias = after;
  }
}

struct EdgeMessageArgs {
  CsrView a;
  RowSplitView split;
  EdgeMessageInput input;
  void* out;    // (num_rows, width): sums of the messages
  void* side;   // (num_rows, width). kGate: sum_j sigmoid'(z) v_ij, null: not computed. kGateAndState: sum_j
                // sigmoid(z)
  void* state;  // (num_values, width): z; kGateAndState only
  std::uint8_t* positive;  // (num_values, sign_bytes): bits, set if z > 0; null: not computed; relu only
  std::int64_t sign_bytes;
  DenseView root;      // (num_rows, width): out_i += root_i, for relu (1 + eps) root_i; null data: nothing
  const void* eps;     // one number in dtype; relu with root only
  void* scale;         // 1 + eps in dtype, null: not computed
  void* partial;       // (num_slots, width) in the accumulation type; partial results are for CUDA only
  void* partial_side;  // (num_slots, width)
};
FASTSPARSE_ARGUMENTS(EdgeMessageArgs, AS(structure, a), ALSO(split), IN(input, message, k, q),
                     WIDTH(input.width), DTYPE(input.dtype), IN(input, v, edge), WIDTH(input.edge_width),
                     MATRIX_AS(maps, input.maps.out), IN(input.maps, weight),
                     NUM_ROWS(input.maps.given_width), WIDTH(input.maps.given_edge_width),
                     DTYPE(input.maps.dtype), IN(input.maps, added, of_value, bias),
                     FIELDS(out, side, state, positive, sign_bytes, root, eps, scale, partial, partial_side));

// Gradients of maps and raw features for the caller, without padding; null: not computed.
struct EdgeMapGradients {
  void* weight;    // (width, edge_width) of `dtype`
  void* of_value;  // (width, edge_width) of `dtype`; gates only
  void* bias;      // (width) of `dtype`, with `weight`; relu only
  void* features;  // (num_values, edge_width) in the features' type
  std::int64_t width;
  std::int64_t edge_width;
  Dtype dtype;
};

struct EdgeMessageBackwardArgs {
  CsrView a;
  RowSplitView split;
  CsrView a_t;
  RowSplitView split_t;
  EdgeMessageInput input;
  DenseView grad;        // gradient of out, (num_rows, width)
  DenseView grad_side;   // gradient of side, (num_rows, width); kGateAndState only
  DenseView state;       // (num_values, width); kGateAndState only
  DenseView grad_state;  // gradient of state, (num_values, width); null data: 0
  const std::uint8_t* positive;
  std::int64_t sign_bytes;
  const void* scale;  // 1 + eps of the forward pass: grad_q_i += scale grad_i; null: no root; relu only
  std::int64_t num_values;
  void* grad_q;         // (num_cols, width)
  void* grad_v;         // (num_cols, width); gates only
  void* grad_edge;      // (num_values, width), gradient of e; null: not computed
  void* grad_features;  // scratch (tiles, num_values, edge_width) in the accumulation type: gradient of the
                        // raw features per tile of the width; their sum is maps.features; null: not computed
  void* grad_weight;    // scratch (groups, edge_width, width) in the accumulation type; for relu (groups,
                        // edge_width + 1, width), with the bias: gradients per group of lanes, which are
                        // summed; null: not computed; CUDA only
  void* grad_of_value;  // scratch (groups, edge_width, width), the same as grad_weight for U; gates only
  std::int64_t groups;
  EdgeMapGradients maps;
  void* partial_q;
  void* partial_v;
};
FASTSPARSE_ARGUMENTS(EdgeMessageBackwardArgs, AS(structure, a), ALSO(split), AS(transposed, a_t),
                     ALSO(split_t), IN(input, message, k, q), WIDTH(input.width), DTYPE(input.dtype),
                     IN(input, v, edge), WIDTH(input.edge_width), MATRIX_AS(maps, input.maps.out),
                     IN(input.maps, weight), NUM_ROWS(input.maps.given_width),
                     WIDTH(input.maps.given_edge_width), DTYPE(input.maps.dtype),
                     IN(input.maps, added, of_value),
                     FIELDS(grad, grad_side, state, grad_state, positive, sign_bytes, scale, num_values,
                            grad_q, grad_v, grad_edge),
                     AS(feature_parts, grad_features), AS(weight_parts, grad_weight),
                     AS(of_value_parts, grad_of_value), FIELDS(groups),
                     MATRIX_AS(grad_features, maps.features), WIDTH(maps.edge_width),
                     MATRIX_AS(grad_weight, maps.weight), NUM_ROWS(maps.width), WIDTH(maps.edge_width),
                     DTYPE(maps.dtype), AS(grad_of_value, maps.of_value), AS(grad_bias, maps.bias),
                     FIELDS(partial_q, partial_v));

namespace cuda {
int lay_out_edge_maps(const EdgeMapsArgs& args, void* stream);
}  // namespace cuda

}  // namespace fastsparse
