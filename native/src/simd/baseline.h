// Vectors of eight floats in plain C++, for processors without a translation unit of their own (aarch64 among them).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd/element.h"

namespace perilune::PERILUNE_ISA {

constexpr const char* kIsa = "baseline";
constexpr int kLanes = 8;

struct F {
  float v[kLanes];
};

#define PERILUNE_EACH for (int i = 0; i < kLanes; ++i)

inline F set(float x) {
  F r;
  PERILUNE_EACH r.v[i] = x;
  return r;
}
inline F zero() { return set(0.0f); }
inline F load(const float* p) {
  F r;
  PERILUNE_EACH r.v[i] = p[i];
  return r;
}
inline F load(const bf16* p) {
  F r;
  PERILUNE_EACH r.v[i] = widen(p[i]);
  return r;
}
inline F load_i8(const int8_t* p) {
  F r;
  PERILUNE_EACH r.v[i] = static_cast<float>(p[i]);
  return r;
}
// E4M3: sign, four exponent bits of bias 7, three mantissa bits; 0x7f and 0xff are NaN.
inline F load_f8(const uint8_t* p) {
  F r;
  PERILUNE_EACH {
    const int exponent = p[i] >> 3 & 15, mantissa = p[i] & 7;
    float x = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                            : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    if ((p[i] & 0x7f) == 0x7f) x = NAN;
    r.v[i] = p[i] & 0x80 ? -x : x;
  }
  return r;
}
// E2M1 pairs, low nibble first.
inline F load_e2m1(const uint8_t* p) {
  constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  F r;
  PERILUNE_EACH {
    const int code = p[i / 2] >> (i % 2 * 4) & 15;
    r.v[i] = code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
  }
  return r;
}
inline void store(float* p, F a) { PERILUNE_EACH p[i] = a.v[i]; }
inline void store(bf16* p, F a) { PERILUNE_EACH p[i] = to_bf16(a.v[i]); }

inline F add(F a, F b) {
  PERILUNE_EACH a.v[i] += b.v[i];
  return a;
}
inline F sub(F a, F b) {
  PERILUNE_EACH a.v[i] -= b.v[i];
  return a;
}
inline F mul(F a, F b) {
  PERILUNE_EACH a.v[i] *= b.v[i];
  return a;
}
inline F div(F a, F b) {
  PERILUNE_EACH a.v[i] /= b.v[i];
  return a;
}
inline F max(F a, F b) {
  PERILUNE_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F min(F a, F b) {
  PERILUNE_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F abs(F a) {
  PERILUNE_EACH a.v[i] = std::fabs(a.v[i]);
  return a;
}
// a * b + c, fused where the processor does it.
inline F fma(F a, F b, F c) {
#ifdef __FP_FAST_FMAF
  PERILUNE_EACH c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
#else
  PERILUNE_EACH c.v[i] += a.v[i] * b.v[i];
#endif
  return c;
}
// Nearest integer, halves to even.
inline F nearest(F a) {
  PERILUNE_EACH a.v[i] = std::nearbyintf(a.v[i]);
  return a;
}
// 2^n for integral n in [-126, 127].
inline F power_of_two(F n) {
  PERILUNE_EACH {
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
    std::memcpy(&n.v[i], &bits, 4);
  }
  return n;
}
// where a < b take x, else y
inline F select_less(F a, F b, F x, F y) {
  PERILUNE_EACH x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
  return x;
}
inline float sum(F a) { return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7])); }
// Lane i is sum(v[i]).
inline F sum_each(const F v[kLanes]) {
  F r;
  PERILUNE_EACH r.v[i] = sum(v[i]);
  return r;
}
inline float largest(F a) {
  float r = a.v[0];
  PERILUNE_EACH r = a.v[i] > r ? a.v[i] : r;
  return r;
}
// a as it reads back after being stored as bf16
inline F rounded_bf16(F a) {
  PERILUNE_EACH a.v[i] = widen(to_bf16(a.v[i]));
  return a;
}
// columns[j][i] = p[4 i + j]
inline void load_columns4(const float* p, F* columns) {
  for (int j = 0; j < 4; ++j) PERILUNE_EACH columns[j].v[i] = p[4 * i + j];
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

#undef PERILUNE_EACH

}  // namespace perilune::PERILUNE_ISA
