// RMSNorm over rows.
#pragma once

#include <cmath>

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
        for (int64_t row = chunk * step; row < args.rows && row < (chunk + 1) * step; ++row)
          rms_norm_row(static_cast<const E*>(args.x) + row * args.stride, static_cast<const W*>(args.weight),
                       args.columns, args.eps, static_cast<E*>(args.y) + row * args.columns);
      });
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
