// Arguments of products with weights: linear maps, router, experts.
#pragma once

#include "perilune/types.h"

namespace perilune {

// y[i] [tokens, weights[i].rows] = x [tokens, columns] weights[i]^T for `count` matrices that read the same x.
// x and y are f32 or bf16, both `type`. With `int8_activations` x is quantised per 32 columns first
// (scale = absmax / 127, rounded to nearest even), for i8 and mxfp4 weights; other weights ignore it.
struct LinearArgs {
  const void* x;
  Type type;
  int64_t tokens;
  const Matrix* weights;
  void* const* y;
  int64_t count;
  bool int8_activations;
};

// values [rows, columns] of `to` (i8 or f8) and scales [rows] with x ~ values * scales, per row: scale = m / L and value =
// x * (L / m) to the nearest even, m the row's largest magnitude (at least 1e-30), L the largest number of `to` (127 or
// 448). A row with a number that is not finite gets the scale NaN.
struct QuantizeArgs {
  const void* x;
  Type type;
  int64_t rows, columns;
  Type to;
  void* values;
  float* scales;
};

// Sigmoid router, wholly in float32: ids [tokens, chosen] and weights [tokens, chosen] of the largest scores + bias,
// in descending order, ties to the lower id; weight = score (/ sum over the chosen + 1e-20) * scaling.
struct RouteArgs {
  const void* x;  // [tokens, columns]
  Type type;
  int64_t tokens;
  Matrix weight;  // [experts, columns], f32 or bf16
  const float* bias;
  int64_t chosen;
  bool renormalize;
  float scaling;
  int64_t* ids;
  float* weights;
};

// Where a pass over one layer gets experts that do not all lie in memory; see experts.h. One pass at a time.
class ExpertSource {
 public:
  virtual ~ExpertSource() = default;
  // The pass will take `experts` [count], each once.
  virtual void begin(int64_t layer, const int32_t* experts, int64_t count) = 0;
  // Waits until one of them is there, and gives all that are: how many, their numbers, and their rows of `addresses`
  // [experts, 6] as in ExpertsArgs, which hold until they are given back. The address 0 is that of an expert that cannot
  // be read. None are given once all were.
  virtual int64_t take(int32_t* taken, int64_t* addresses) = 0;
  virtual void give_back(const int32_t* experts, int64_t count) = 0;
  // The results of `tokens` [count], counted from `first`, are void, because the expert cannot be read.
  virtual void spoil(int32_t expert, const int32_t* tokens, int64_t count, int64_t first) = 0;
};

// y [tokens, latent] = sum over the chosen experts of weight * w2 situ(w1 x, w3 x). w1, w3 [inner, latent],
// w2 [latent, inner]; each product and situ's result are rounded to `type`, the weighted sum is float32 in the order of
// `ids`.
struct ExpertsArgs {
  const void* x;
  Type type;
  int64_t tokens;
  const int64_t* ids;    // [tokens, chosen]
  const float* weights;  // [tokens, chosen]
  int64_t chosen;
  const int64_t* addresses;  // [experts, 6]: data and scales of w1, w3, w2 (scales 0 where the type has none)
  int64_t num_experts, latent, inner;
  Type weight_type;  // f32, bf16 or mxfp4
  float beta, linear_beta;
  void* y;
  bool int8_activations;
  int64_t scratch_bytes;  // about what the call may take, more only where one token or one expert needs more
  ExpertSource* source = nullptr;  // where there is one, `addresses` is null, and void tokens get NaN
  int64_t layer = 0;               // of the source
};

}  // namespace perilune
