// Operands of dot products with AVX2.
#pragma once

#include "simd/avx2.h"
#include "simd/mxfp4.h"

namespace perilune::PERILUNE_ISA {

// Register tile of the float dot products: weight rows by tokens. 12 sums, 3 weights and 1 activation fill 16 registers.
constexpr int kRowTile = 3, kTokenTile = 4;
// Up to so many tokens a weight row is decoded in registers, beside 4 sums of each token.
constexpr int kFewTokens = 3;
// Whether such weight rows are read several at a time; the registers hold the sums of one.
constexpr bool kReadsTogether = false;

// Column of each of 32 places in the order in which decode_nibbles yields them.
constexpr int kFloatNibbleOrder[32] = {0,  4,  8,  12, 1,  5,  9,  13, 2,  6,  10, 14, 3,  7,  11, 15,
                                  16, 20, 24, 28, 17, 21, 25, 29, 18, 22, 26, 30, 19, 23, 27, 31};

alignas(64) inline constexpr auto kMxfp4Bytes = make_mxfp4_bytes();

inline void load_weights(const float* p, F& v) { v = load(p); }
inline void load_weights(const bf16* p, F& v) { v = load(p); }
inline void load_weights(const int8_t* p, F& v) { v = load_i8(p); }
// Exponent and mantissa of E4M3 at float's place are 2^120 too small, subnormals included.
inline void load_weights(const f8* p, F& v) {
  const __m256i bits = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i placed = _mm256_and_si256(_mm256_slli_epi32(bits, 20), _mm256_set1_epi32(static_cast<int>(0x87f00000)));
  v = _mm256_mul_ps(_mm256_castsi256_ps(placed), _mm256_set1_ps(0x1p120f));
}

// 32 weights of one scale, columns in kFloatNibbleOrder.
inline void decode_nibbles(const uint8_t* nibbles, const uint8_t* scale, F v[4]) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(nibbles)));
  const __m256i codes = _mm256_and_si256(_mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4)),
                                         _mm256_set1_epi8(15));
  const auto* table = reinterpret_cast<const __m128i*>(kMxfp4Bytes.data() + 32 * *scale);
  const __m256i upper = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(table)), codes);
  const __m256i lower = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(table + 1)), codes);
  const __m256i first = _mm256_unpacklo_epi8(lower, upper), second = _mm256_unpackhi_epi8(lower, upper);
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  v[0] = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));
  v[1] = _mm256_castsi256_ps(_mm256_and_si256(first, odd));
  v[2] = _mm256_castsi256_ps(_mm256_slli_epi32(second, 16));
  v[3] = _mm256_castsi256_ps(_mm256_and_si256(second, odd));
}

}  // namespace perilune::PERILUNE_ISA
