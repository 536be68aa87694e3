// Stands before the compiler's own header where the AVX-512 kernels are built for processors without AVX-512: SIMDe
// computes their intrinsics with what there is, and what SIMDe 0.7.4 lacks is here, from two AVX2 halves.
#pragma once

#include_next <immintrin.h>

#include <cstdint>
#include <cstring>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

namespace emulated {

inline __m512i join(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
inline __m512 join(__m256 low, __m256 high) {
  return _mm512_castsi512_ps(join(_mm256_castps_si256(low), _mm256_castps_si256(high)));
}
inline __m256 half(__m512 a, int index) { return _mm256_loadu_ps(reinterpret_cast<const float*>(&a) + 8 * index); }
inline __m256i half(__m512i a, int index) {
  return _mm256_castps_si256(half(_mm512_castsi512_ps(a), index));
}

inline __m512i cvtepu16_epi32(__m256i a) {
  return join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)));
}
inline __m512i cvtepi8_epi32(__m128i a) {
  return join(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
}
inline __m512 cvtepi32_ps(__m512i a) { return join(_mm256_cvtepi32_ps(half(a, 0)), _mm256_cvtepi32_ps(half(a, 1))); }
inline __m512i cvtps_epi32(__m512 a) { return join(_mm256_cvtps_epi32(half(a, 0)), _mm256_cvtps_epi32(half(a, 1))); }
inline __m512 cvtph_ps(__m256i a) {
  return join(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
inline __m256i cvtepi32_epi16(__m512i a) {
  alignas(64) int32_t wide[16];
  alignas(32) int16_t narrow[16];
  _mm512_store_si512(wide, a);
  for (int i = 0; i < 16; ++i) narrow[i] = static_cast<int16_t>(wide[i]);
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(narrow));
}
inline float reduce_max_ps(__m512 a) {
  float most = reinterpret_cast<const float*>(&a)[0];
  for (int i = 1; i < 16; ++i) most = reinterpret_cast<const float*>(&a)[i] > most ? reinterpret_cast<const float*>(&a)[i] : most;
  return most;
}
// Nearest even; subnormal numbers count as zero, as the processor takes them.
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7f800000u) == 0) return static_cast<uint16_t>(bits >> 16 & 0x8000);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline __m512bh cvtne2ps_pbh(__m512 high, __m512 low) {
  uint16_t words[32];
  for (int i = 0; i < 16; ++i) {
    words[i] = to_bf16(reinterpret_cast<const float*>(&low)[i]);
    words[16 + i] = to_bf16(reinterpret_cast<const float*>(&high)[i]);
  }
  __m512bh joined;
  std::memcpy(&joined, words, 64);
  return joined;
}

}  // namespace emulated

#define _mm512_cvtepu16_epi32(a) emulated::cvtepu16_epi32(a)
#define _mm512_cvtepi8_epi32(a) emulated::cvtepi8_epi32(a)
#define _mm512_cvtepi32_ps(a) emulated::cvtepi32_ps(a)
#define _mm512_cvtps_epi32(a) emulated::cvtps_epi32(a)
#define _mm512_cvtph_ps(a) emulated::cvtph_ps(a)
#define _mm512_cvtepi32_epi16(a) emulated::cvtepi32_epi16(a)
#define _mm512_extractf32x8_ps(a, index) emulated::half(a, index)
#define _mm512_reduce_max_ps(a) emulated::reduce_max_ps(a)
#define _mm512_cvtne2ps_pbh(high, low) emulated::cvtne2ps_pbh(high, low)
