// Arguments of the choice of tokens.
#pragma once

#include "perilune/types.h"

namespace perilune {

// One token per row, see ops/sampling. settings [rows, 5]: temperature (0 takes the best), top-k (0 is off), top-p, min-p,
// and the number in [0, 1) that draws. mask [rows, ceil(columns / 32)]: bit i % 32 of word i / 32 allows token i; or null.
// best [rows]: the largest allowed logit, NaN if one is; where it is not finite the token is -1.
constexpr int64_t kSampleSettings = 5;
struct SampleArgs {
  const void* logits;  // [rows, columns]
  Type type;
  int64_t rows, columns;
  const int32_t* mask;
  const double* settings;
  int64_t* ids;
  float* best;
  int64_t* masses;  // [rows, columns]: of every token that the draw chooses among, else 0; or null
};

// Penalises logits [columns] of the tokens `ids` [count], the prompt's `num_prompt` and then the output's, in place.
struct PenaltyArgs {
  float* logits;
  int64_t columns;
  const int64_t* ids;
  int64_t count, num_prompt;
  float repetition, frequency, presence;
};

}  // namespace perilune
