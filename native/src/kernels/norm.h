// RMSNorm, its gated form and LayerNorm over rows.
#pragma once

#include <cmath>
#include <cstring>

#include "perilune.h"
#include "simd/math.h"

namespace perilune::PERILUNE_ISA {

// Rows of a chunk: enough work (a few microseconds) to pay for taking it.
inline int64_t rows_per_chunk(int64_t columns) { return columns >= 16384 ? 1 : 16384 / columns; }

template <typename E>
float mean_of_squares(const E* x, int64_t columns) {
  F total = zero();
  for_vectors(columns, [&](auto load, auto, int64_t i) {
    const F v = load(x + i);
    total = fma(v, v, total);
  });
  return sum(total) / static_cast<float>(columns);
}

// y = (x / sqrt(mean(x^2) + eps), rounded to E) * weight
template <typename E, typename W>
void rms_norm_row(const E* x, const W* weight, int64_t columns, float eps, E* y) {
  const F scale = set(1.0f / std::sqrt(mean_of_squares(x, columns) + eps));
  for_vectors(columns, [&](auto load, auto store, int64_t i) {
    E normed[kLanes];
    perilune::PERILUNE_ISA::store(normed, mul(load(x + i), scale));
    store(y + i, mul(perilune::PERILUNE_ISA::load(normed), load(weight + i)));
  });
}

inline void rms_norm(const RmsNormArgs& args) {
  const int64_t step = rows_per_chunk(args.columns);
  with_element(args.type, [&](auto* e) {
    with_element(args.weight_type, [&](auto* w) {
      using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
      using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
      parallel((args.rows + step - 1) / step, [&](int64_t chunk) {
        for (int64_t row = chunk * step; row < args.rows && row < (chunk + 1) * step; ++row) {
          const E* x = static_cast<const E*>(args.x) + row * args.stride;
          E* y = static_cast<E*>(args.y) + row * (args.columns + args.passed);
          rms_norm_row(x, static_cast<const W*>(args.weight), args.columns, args.eps, y);
          std::memcpy(y + args.columns, x + args.columns, static_cast<size_t>(args.passed) * sizeof(E));
        }
      });
    });
  });
}

// y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate), rounded to E once
template <typename X, typename E>
void gated_rms_norm_row(const X* x, const E* gate, const float* weight, int64_t columns, float eps, E* y) {
  const F scale = set(1.0f / std::sqrt(mean_of_squares(x, columns) + eps));
  for_vectors(columns, [&](auto load, auto store, int64_t i) {
    store(y + i, mul(mul(mul(load(x + i), scale), load(weight + i)), sigmoid(load(gate + i))));
  });
}

inline void gated_rms_norm(const GatedRmsNormArgs& args) {
  const int64_t step = rows_per_chunk(args.columns);
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    parallel((args.rows + step - 1) / step, [&](int64_t chunk) {
      for (int64_t row = chunk * step; row < args.rows && row < (chunk + 1) * step; ++row) {
        const int64_t at = row * args.columns;
        gated_rms_norm_row(static_cast<const E*>(args.x) + at, static_cast<const E*>(args.gate) + at, args.weight,
                           args.columns, args.eps, static_cast<E*>(args.y) + at);
      }
    });
  });
}

// y = (x - mean) / sqrt(variance + eps) * weight + bias, bias may be null
template <typename E, typename W>
void layer_norm_row(const E* x, const W* weight, const W* bias, int64_t columns, float eps, E* y) {
  F total = zero();
  for_vectors(columns, [&](auto load, auto, int64_t i) { total = add(total, load(x + i)); });
  float means[kLanes];
  store(means, set(sum(total) / static_cast<float>(columns)));
  F squares = zero();
  for_vectors(columns, [&](auto load, auto, int64_t i) {
    const F centred = sub(load(x + i), load(means));  // beyond a partial vector's end both are zero
    squares = fma(centred, centred, squares);
  });
  const F scale = set(1.0f / std::sqrt(sum(squares) / static_cast<float>(columns) + eps));
  for_vectors(columns, [&](auto load, auto store, int64_t i) {
    const F normed = mul(sub(load(x + i), load(means)), scale);
    store(y + i, fma(normed, load(weight + i), bias == nullptr ? zero() : load(bias + i)));
  });
}

inline void layer_norm(const LayerNormArgs& args) {
  const int64_t step = rows_per_chunk(args.columns);
  with_element(args.type, [&](auto* e) {
    with_element(args.weight_type, [&](auto* w) {
      using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
      using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
      parallel((args.rows + step - 1) / step, [&](int64_t chunk) {
        for (int64_t row = chunk * step; row < args.rows && row < (chunk + 1) * step; ++row)
          layer_norm_row(static_cast<const E*>(args.x) + row * args.columns, static_cast<const W*>(args.weight),
                         static_cast<const W*>(args.bias), args.columns, args.eps,
                         static_cast<E*>(args.y) + row * args.columns);
      });
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
