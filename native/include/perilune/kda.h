// Arguments of a KDA layer: convolution, decay, the gated delta rule, and verifying.
#pragma once

#include "perilune/types.h"

namespace perilune {

// y_t = SiLU(sum_j weight[:, j] x_{t-K+1+j}); x rows are `stride` apart, y is contiguous.
// state [slots, taps - 1, channels] of `state_type` is read and replaced, or null.
struct ConvArgs {
  const void* x;
  Type type;
  int64_t channels, taps, stride;
  const float* weight;  // [channels, taps]
  void* state;
  Type state_type;
  Sequences sequences;
  void* y;
};

// g = lower_bound * sigmoid(exp(a_log[h]) (z + dt_bias)); z [tokens, heads, width] -> g float32.
struct DecayArgs {
  const void* z;
  Type type;
  int64_t tokens, heads, width;
  const float* a_log;
  const float* dt_bias;  // [heads, width]
  float lower_bound;
  float* g;
};

// The gated delta rule. q, k, v [tokens, heads, width] with their own strides from token to token; g float32 of the
// same shape, beta float32 [tokens, heads], both contiguous. state float32 [slots, heads, width(key), width(value)] is
// read and replaced, or null for a zero state that is not kept. o [tokens, heads, width] of `type`.
struct KdaArgs {
  const void* q;
  const void* k;
  const void* v;
  Type type;
  int64_t heads, width;
  int64_t q_stride, k_stride, v_stride;
  const float* g;
  const float* beta;
  float l2_eps;
  float* state;
  Sequences sequences;
  void* o;
};

// Everything of a KDA layer between its projections: convolution and SiLU of q, k, v; L2 norm; decay; beta; the gated
// delta rule (token by token for sequences of one token, in chunks else); gated norm.
struct KdaMixArgs {
  const void* q;  // [tokens, heads * width], before the convolution
  const void* k;
  const void* v;
  const void* z;     // decay logits [tokens, heads * width]
  const void* beta;  // beta logits [tokens, heads]
  const void* gate;  // [tokens, heads * width]
  Type type;
  int64_t heads, width, taps;
  const float* q_conv;  // [heads * width, taps]
  const float* k_conv;
  const float* v_conv;
  const float* a_log;    // [heads]
  const float* dt_bias;  // [heads, width]
  const float* norm_weight;  // [width]
  float lower_bound, l2_eps, norm_eps;
  float* state;       // [slots, heads, width, width] or null
  void* conv_state;   // [slots, taps - 1, 3 * heads * width] of conv_type, streams q, k, v side by side; or null
  Type conv_type;
  Sequences sequences;
  void* o;  // [tokens, heads * width]
};

// What a verifying pass leaves of each of its tokens for the commit of those that stay, one layer after the other:
// `rows` rows a layer, of which the tokens of the pass are the first ones.
struct KdaRecords {
  void* inputs;  // [layers, rows, 3 * heads * width] of the activations' type: q, k, v before the convolution
  void* keys;    // [layers, rows, heads, width] of the same type, normalised
  float* decays;       // [layers, rows, heads, width]
  float* corrections;  // [layers, rows, heads, width]: beta (v - S^T k)
};

// KdaMixArgs whose states are read and left as they are; every sequence takes the recurrence, token by token.
struct KdaVerifyArgs {
  KdaMixArgs mix;
  KdaRecords records;  // those of the layer
};

// The states of all layers after the first counts[n] tokens of each sequence of a verifying pass, from its records.
struct KdaCommitArgs {
  Type type;
  int64_t layers, heads, width, taps, rows, num_slots;
  KdaRecords records;
  float* state;      // [layers, slots, heads, width, width]
  void* conv_state;  // [layers, slots, taps - 1, 3 * heads * width] of conv_type
  Type conv_type;
  Sequences sequences;
  const int64_t* counts;
};

}  // namespace perilune
