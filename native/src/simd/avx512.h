// Vectors of sixteen floats with AVX-512 (F, BW, VL, DQ, VBMI, VNNI, BF16).
#pragma once

#include <immintrin.h>

#include "simd/element.h"

namespace perilune::PERILUNE_ISA {

constexpr const char* kIsa = "avx512";
constexpr int kLanes = 16;

using F = __m512;

inline F set(float x) { return _mm512_set1_ps(x); }
inline F zero() { return _mm512_setzero_ps(); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load(const bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline F load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// E4M3 as a half with the exponent eight too small; its subnormals come out right, its NaN is restored.
inline F load_f8(const uint8_t* p) {
  const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_and_si256(bytes, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0x80)), 8);
  const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
  const __m256i nan = _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign), nan);
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}
// E2M1 pairs, low nibble first.
inline F load_e2m1(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), low = _mm_set1_epi8(15);
  const __m128i codes =
      _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
  const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), values);
}
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
// Not vcvtneps2bf16, which takes subnormal floats for zero.
inline void store(bf16* p, F a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __m512i words = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
}

inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F nearest(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F power_of_two(F n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline F select_less(F a, F b, F x, F y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x); }
inline float sum(F a) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
// Lane i is sum(v[i]), added in the same order.
inline F sum_each(const F v[kLanes]) {
  F quads[4];
  for (int i = 0; i < 4; ++i) {
    F halves[2];
    for (int j = 0; j < 2; ++j) {
      const F a = v[i + 8 * j], b = v[i + 8 * j + 4];
      halves[j] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    quads[i] = _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                             _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
  }
  F pairs[2];
  for (int i = 0; i < 2; ++i) {
    const __m512d a = _mm512_castps_pd(quads[2 * i]), b = _mm512_castps_pd(quads[2 * i + 1]);
    pairs[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  return _mm512_add_ps(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
}
inline float largest(F a) { return _mm512_reduce_max_ps(a); }
// a as it reads back after being stored as bf16
inline F rounded_bf16(F a) {
  const __m512i bits = _mm512_castps_si512(a), high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i chosen = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
  return _mm512_castsi512_ps(_mm512_and_si512(chosen, high));
}
// columns[j][i] = p[4 i + j]
inline void load_columns4(const float* p, F* columns) {
  const __m512 x0 = load(p), x1 = load(p + 16), x2 = load(p + 32), x3 = load(p + 48);
  for (int j = 0; j < 4; ++j) {
    const __m512i index = _mm512_add_epi32(
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28), _mm512_set1_epi32(j));
    const __m512 low = _mm512_permutex2var_ps(x0, index, x1), high = _mm512_permutex2var_ps(x2, index, x3);
    columns[j] = _mm512_insertf32x8(low, _mm512_castps512_ps256(high), 1);
  }
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Into the second cache.
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace perilune::PERILUNE_ISA
