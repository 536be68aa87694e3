// The attention-residual mix and the norm after it.
#pragma once

#include <cmath>

#include "kernels/norm.h"

namespace perilune::PERILUNE_ISA {

// rms(x) . query
template <typename E>
float mixing_score(const E* x, const float* query, int64_t columns, float eps) {
  constexpr int kChains = 4;  // two products each hide the latency of the additions
  F squares[kChains], dots[kChains];
  for (int chain = 0; chain < kChains; ++chain) squares[chain] = dots[chain] = zero();
  int64_t i = 0;
  for (; i + kChains * kLanes <= columns; i += kChains * kLanes)
    for (int chain = 0; chain < kChains; ++chain) {
      const F v = load(x + i + chain * kLanes);
      squares[chain] = fma(v, v, squares[chain]);
      dots[chain] = fma(v, load(query + i + chain * kLanes), dots[chain]);
    }
  F square = add(add(squares[0], squares[1]), add(squares[2], squares[3]));
  F dot = add(add(dots[0], dots[1]), add(dots[2], dots[3]));
  for_vectors(columns - i, [&](auto load, auto, int64_t j) {
    const F v = load(x + i + j);
    square = fma(v, v, square);
    dot = fma(v, load(query + i + j), dot);
  });
  return sum(dot) / std::sqrt(sum(square) / static_cast<float>(columns) + eps);
}

inline void softmax(float* scores, int64_t count) {
  float most = scores[0], total = 0.0f;
  for (int64_t i = 1; i < count; ++i) most = scores[i] > most ? scores[i] : most;
  for (int64_t i = 0; i < count; ++i) total += scores[i] = std::exp(scores[i] - most);
  for (int64_t i = 0; i < count; ++i) scores[i] /= total;
}

// y = sum of weights[n] * rows[n], rounded to E
template <typename E>
void weighted_sum(const E* const* rows, const float* weights, int64_t count, int64_t columns, E* y) {
  constexpr int kStep = 4;  // vectors at once: one turn per row must not cost more than its product
  int64_t i = 0;
  for (; i + kStep * kLanes <= columns; i += kStep * kLanes) {
    F totals[kStep];
    for (int step = 0; step < kStep; ++step) totals[step] = zero();
    for (int64_t n = 0; n < count; ++n)
      for (int step = 0; step < kStep; ++step)
        totals[step] = fma(set(weights[n]), load(rows[n] + i + step * kLanes), totals[step]);
    for (int step = 0; step < kStep; ++step) store(y + i + step * kLanes, totals[step]);
  }
  for_vectors(columns - i, [&](auto load, auto store, int64_t j) {
    F total = zero();
    for (int64_t n = 0; n < count; ++n) total = fma(set(weights[n]), load(rows[n] + i + j), total);
    store(y + i + j, total);
  });
}

template <typename E, typename W>
void attn_res_token(const AttnResArgs& args, int64_t token) {
  E* y = static_cast<E*>(args.y) + token * args.columns;
  const W* norm_weight = static_cast<const W*>(args.norm_weight);
  Scratch scratch;
  const E** rows = scratch.take<const E*>(args.count);
  float* weights = scratch.take<float>(args.count);
  for (int64_t n = 0; n < args.count; ++n) rows[n] = static_cast<const E*>(args.candidates[n]) + token * args.columns;
  if (args.count == 1) return rms_norm_row(rows[0], norm_weight, args.columns, args.eps, y);
  for (int64_t n = 0; n < args.count; ++n) weights[n] = mixing_score(rows[n], args.query, args.columns, args.eps);
  softmax(weights, args.count);
  weighted_sum(rows, weights, args.count, args.columns, y);
  rms_norm_row(y, norm_weight, args.columns, args.eps, y);
}

inline void attn_res_mix(const AttnResArgs& args) {
  const int64_t step = rows_per_chunk(args.columns * args.count);
  with_element(args.type, [&](auto* e) {
    with_element(args.weight_type, [&](auto* w) {
      using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
      using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
      parallel((args.tokens + step - 1) / step, [&](int64_t chunk) {
        for (int64_t token = chunk * step; token < args.tokens && token < (chunk + 1) * step; ++token)
          attn_res_token<E, W>(args, token);
      });
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
