// Arguments of kernels whose rows have nothing to do with each other.
#pragma once

#include "perilune/types.h"

namespace perilune {

// y = beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), `count` elements.
struct SituArgs {
  const void* gate;
  const void* up;
  Type type;
  int64_t count;
  float beta, linear_beta;
  void* y;
};

// y = rms(x) rounded to `type`, times weight; x [rows, columns] with `stride` elements from row to row. `passed` further
// columns of each row follow unchanged: y [rows, columns + passed].
struct RmsNormArgs {
  const void* x;
  Type type;
  int64_t rows, columns, stride;
  const void* weight;
  Type weight_type;
  float eps;
  void* y;
  int64_t passed = 0;
};

// y = rms(x) * weight * sigmoid(gate), float32 inside; x, gate, y [rows, columns] of `type`.
struct GatedRmsNormArgs {
  const void* x;
  const void* gate;
  Type type;
  int64_t rows, columns;
  const float* weight;
  float eps;
  void* y;
};

// y [rows, columns] of `type` = LayerNorm(x) with biased variance; bias may be null.
struct LayerNormArgs {
  const void* x;
  Type type;
  int64_t rows, columns;
  const void* weight;
  const void* bias;
  Type weight_type;
  float eps;
  void* y;
};

// y [tokens, columns] of `type` = rows `ids` [tokens] of weight [num_rows, columns], f32 or bf16.
struct EmbedArgs {
  const void* weight;
  Type weight_type;
  int64_t num_rows, columns;
  const int64_t* ids;
  int64_t tokens;
  void* y;
  Type type;
};

// Row slots[t] of pool [num_rows, columns] becomes row t of x [tokens, columns].
struct StoreArgs {
  const void* x;
  Type type;
  int64_t tokens, columns;
  const int64_t* slots;
  void* pool;
  Type pool_type;
  int64_t num_rows;
};

// The rows of x [tokens, columns] become rows *end and on of pool [num_rows, columns]; *end grows by their number.
struct AppendArgs {
  const void* x;
  Type type;
  int64_t tokens, columns;
  int64_t* end;
  void* pool;
  Type pool_type;
  int64_t num_rows;
};

// Row slots[t] of a pool of packed rows (ops/packed_rows; `to` is f8, i8 or mxfp4) becomes row t of x [tokens, columns],
// its first `scaled` columns quantised.
struct StorePackedArgs {
  const void* x;
  Type type;
  int64_t tokens, columns, scaled;
  const int64_t* slots;
  void* pool;
  Type to;
  int64_t row_bytes, num_rows;
};

// `count` elements of x and z, of the same type as y: x + z; or x times the sigmoid of z, which is rounded first; or
// x times its own sigmoid, rounded, times z.
struct PairArgs {
  const void* x;
  const void* z;
  Type type;
  int64_t count;
  void* y;
};

// y float32 = x * factor, `count` elements.
struct ScaleArgs {
  const void* x;
  Type type;
  int64_t count;
  float factor;
  float* y;
};

// y [tokens, columns] = rms(mix of the candidates) * norm weight, see ops/attn_res. A single candidate is its own mix.
struct AttnResArgs {
  const void* const* candidates;  // count pointers to [tokens, columns]
  int64_t count;
  Type type;
  int64_t tokens, columns;
  const float* query;  // [columns]
  const void* norm_weight;
  Type weight_type;
  float eps;
  void* y;
};

// y = GELU(x) in its tanh form, `count` elements.
struct GeluArgs {
  const void* x;
  Type type;
  int64_t count;
  void* y;
};

}  // namespace perilune
