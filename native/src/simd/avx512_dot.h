// Operands of dot products with AVX-512.
#pragma once

#include "simd/avx512.h"
#include "simd/mxfp4.h"

namespace perilune::PERILUNE_ISA {

// Register tile of the float dot products: weight rows by tokens. 24 sums, 4 weights and 1 activation of 32 registers.
constexpr int kRowTile = 4, kTokenTile = 6;
// Up to so many tokens a weight row is decoded in registers, beside 4 sums of each token.
constexpr int kFewTokens = 3;

// Column of each of 32 places in the order in which decode_nibbles yields them, as floats and as pairs.
constexpr int kFloatNibbleOrder[32] = {0, 8,  16, 24, 1, 9,  17, 25, 2, 10, 18, 26, 3, 11, 19, 27,
                                       4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31};
constexpr int kPairNibbleOrder[32] = {0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
                                      2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};

alignas(64) inline constexpr auto kMxfp4Words = make_mxfp4_words();

// bf16 vectors, multiplied in pairs and added in float32.
#define PERILUNE_PAIRS
struct Pairs {
  using Element = bf16;
  using Vector = __m512bh;
  static constexpr int kStep = 32;  // columns of a vector
  static constexpr const int* kNibbleOrder = kPairNibbleOrder;
  static Vector load(const bf16* p) { return reinterpret_cast<Vector>(_mm512_loadu_si512(p)); }
  static void store(bf16* p, Vector v) { _mm512_storeu_si512(p, reinterpret_cast<__m512i>(v)); }
  static bf16 element(float x) { return to_bf16(x); }
  static bf16 element(bf16 x) { return x; }
  static F step(Vector w, Vector x, F total) { return _mm512_dpbf16_ps(total, w, x); }
};

inline void load_weights(const float* p, F& v) { v = load(p); }
inline void load_weights(const bf16* p, F& v) { v = load(p); }
inline void load_weights(const int8_t* p, F& v) { v = load_i8(p); }
// Exponent and mantissa of E4M3 at float's place are 2^120 too small, subnormals included.
inline void load_weights(const f8* p, F& v) {
  const __m512i bits = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i placed = _mm512_and_si512(_mm512_slli_epi32(bits, 20), _mm512_set1_epi32(static_cast<int>(0x87f00000)));
  v = _mm512_mul_ps(_mm512_castsi512_ps(placed), _mm512_set1_ps(0x1p120f));
}
inline void load_weights(const bf16* p, Pairs::Vector& v) { v = Pairs::load(p); }
// Every int8 and E4M3 number is one of bf16.
template <typename E>
void load_weights(const E* p, Pairs::Vector& v) {
  F first, second;
  load_weights(p, first);
  load_weights(p + 16, second);
  v = _mm512_cvtne2ps_pbh(second, first);
}

// 32 weights of one scale, columns in kPairNibbleOrder.
inline void decode_nibbles(const uint8_t* nibbles, const uint8_t* scale, Pairs::Vector v[1]) {
  const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(nibbles)));
  const __m512i shifts = _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008, 0x0008000800080008,
                                          0x0004000400040004, 0x0004000400040004, 0, 0);
  const auto* table = reinterpret_cast<const __m256i*>(kMxfp4Words.data() + 16 * *scale);
  // The index is five bits of a word; the table stands there twice, so that the fifth does not count.
  const __m512i words = _mm512_permutexvar_epi16(_mm512_srlv_epi16(all, shifts),
                                                 _mm512_broadcast_i64x4(_mm256_load_si256(table)));
  v[0] = reinterpret_cast<Pairs::Vector>(words);
}
// The same as floats, columns in kFloatNibbleOrder.
inline void decode_nibbles(const uint8_t* nibbles, const uint8_t* scale, F v[2]) {
  Pairs::Vector pairs;
  decode_nibbles(nibbles, scale, &pairs);
  const auto words = reinterpret_cast<__m512i>(pairs);
  v[0] = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  v[1] = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

}  // namespace perilune::PERILUNE_ISA
