// Vectors of eight floats with AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "simd/element.h"

namespace perilune::PERILUNE_ISA {

constexpr const char* kIsa = "avx2";
constexpr int kLanes = 8;

using F = __m256;

inline F set(float x) { return _mm256_set1_ps(x); }
inline F zero() { return _mm256_setzero_ps(); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline F load(const bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline F load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
// E4M3 as a half with the exponent eight too small; its subnormals come out right, its NaN is restored.
inline F load_f8(const uint8_t* p) {
  const __m128i bytes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i magnitude = _mm_and_si128(bytes, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(bytes, _mm_set1_epi16(0x80)), 8);
  const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7e00));
  const __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(magnitude, 7), sign), nan);
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}
// E2M1 pairs, low nibble first: bits 0 to 2 pick a magnitude, bit 3 is the sign.
inline F load_e2m1(const uint8_t* p) {
  int word;
  std::memcpy(&word, p, 4);
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
  const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), codes);
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
  return _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign));
}
inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
inline void store(bf16* p, F a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(near, quiet, nan);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F nearest(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F power_of_two(F n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F select_less(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline float sum(F a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
// Lane i is sum(v[i]), added in the same order.
inline F sum_each(const F v[kLanes]) {
  F halves[4], pairs[2];
  for (int i = 0; i < 4; ++i)
    halves[i] = _mm256_add_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20), _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
  for (int i = 0; i < 2; ++i) {
    const __m256d a = _mm256_castps_pd(halves[2 * i]), b = _mm256_castps_pd(halves[2 * i + 1]);
    pairs[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  return _mm256_add_ps(_mm256_shuffle_ps(pairs[0], pairs[1], 0x88), _mm256_shuffle_ps(pairs[0], pairs[1], 0xdd));
}
inline float largest(F a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
// a as it reads back after being stored as bf16
inline F rounded_bf16(F a) {
  const __m256i bits = _mm256_castps_si256(a), high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i near = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_blendv_epi8(near, quiet, nan), high));
}
// columns[j][i] = p[4 i + j]
inline void load_columns4(const float* p, F* columns) {
  const __m256 x01 = load(p), x23 = load(p + 8), x45 = load(p + 16), x67 = load(p + 24);
  const __m256 x04 = _mm256_permute2f128_ps(x01, x45, 0x20), x15 = _mm256_permute2f128_ps(x01, x45, 0x31);
  const __m256 x26 = _mm256_permute2f128_ps(x23, x67, 0x20), x37 = _mm256_permute2f128_ps(x23, x67, 0x31);
  const __m256 low_even = _mm256_unpacklo_ps(x04, x26), low_odd = _mm256_unpacklo_ps(x15, x37);
  const __m256 high_even = _mm256_unpackhi_ps(x04, x26), high_odd = _mm256_unpackhi_ps(x15, x37);
  columns[0] = _mm256_unpacklo_ps(low_even, low_odd);
  columns[1] = _mm256_unpackhi_ps(low_even, low_odd);
  columns[2] = _mm256_unpacklo_ps(high_even, high_odd);
  columns[3] = _mm256_unpackhi_ps(high_even, high_odd);
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Into the second cache.
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace perilune::PERILUNE_ISA
