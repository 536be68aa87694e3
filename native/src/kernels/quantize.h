// Weights made into 8 bits with one scale per row.
#pragma once

#include <cmath>

#include "perilune.h"
#include "simd/math.h"

namespace perilune::PERILUNE_ISA {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// The nearest integer to x in [-128, 127], halves to even: next to 1.5 * 2^23 floats are one apart.
inline uint8_t to_i8(float x) { return static_cast<uint8_t>(bits_of(x + 12582912.0f)); }

// The nearest E4M3 number to x in [-464, 464), halves to even. From 2^-6 on a float's bits are rounded to three of
// mantissa and the exponent's bias changed; below, next to 2^14, floats are 2^-9 apart as E4M3's are.
inline uint8_t to_f8(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1) - (120u << 23)) >> 20;
  const uint32_t small = bits_of(std::fabs(x) + 16384.0f) - bits_of(16384.0f);
  const uint32_t is_small = 0u - static_cast<uint32_t>(magnitude < 121u << 23);  // a mask, not a branch: it vectorises
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | (small & is_small) | (normal & ~is_small));
}

template <typename E>
void quantize_row(const E* __restrict x, int64_t columns, Type to, uint8_t* __restrict values, float* scale) {
  F most = zero(), broken = zero();
  for_vectors(columns, [&](auto load, auto, int64_t i) {
    const F v = load(x + i);
    most = max(most, abs(v));
    broken = fma(v, zero(), broken);  // NaN once v is not finite
  });
  const float limit = to == Type::i8 ? 127.0f : 448.0f;
  const float found = largest(most), reach = found > 1e-30f ? found : 1e-30f;
  const float factor = limit / reach;
  *scale = reach / limit + sum(broken);
  if (to == Type::i8)
    for (int64_t i = 0; i < columns; ++i) values[i] = to_i8(widen(x[i]) * factor);
  else
    for (int64_t i = 0; i < columns; ++i) values[i] = to_f8(widen(x[i]) * factor);
}

inline void quantize_rows(const QuantizeArgs& args) {
  const int64_t step = args.columns >= 65536 ? 1 : 65536 / args.columns;
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    parallel((args.rows + step - 1) / step, [&](int64_t chunk) {
      for (int64_t row = chunk * step; row < args.rows && row < (chunk + 1) * step; ++row)
        quantize_row(static_cast<const E*>(args.x) + row * args.columns, args.columns, args.to,
                     static_cast<uint8_t*>(args.values) + row * args.columns, args.scales + row);
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
