// Operands of dot products with AVX-512.
#pragma once

#include "simd/avx512.h"
#include "simd/mxfp4.h"

namespace perilune::PERILUNE_ISA {

// Register tile of the float dot products: weight rows by tokens. 24 sums, 4 weights and 1 activation of 32 registers.
constexpr int kRowTile = 4, kTokenTile = 6;
// Up to so many tokens a weight row is decoded in registers, beside 4 sums of each token.
constexpr int kFewTokens = 3;
// Whether such weight rows are read several at a time, from the second cache, and asked for before: Zen 4 reads half as
// fast where a long row of activations leaves the stream of weights no room in the first cache.
constexpr bool kReadsTogether = true;

// Column of each of 32 places in the order in which decode_nibbles yields floats.
constexpr int kFloatNibbleOrder[32] = {0, 8,  16, 24, 1, 9,  17, 25, 2, 10, 18, 26, 3, 11, 19, 27,
                                       4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31};

alignas(64) inline constexpr auto kMxfp4Words = make_mxfp4_words();

// The sixteen codes times 2^120, twice; both zeros are positive.
constexpr std::array<uint16_t, 32> make_raised_words() {
  std::array<uint16_t, 32> words{};
  for (int i = 0; i < 32; ++i) words[i] = (i & 7) == 0 ? 0 : mxfp4_bits(127 + 120, i & 15);
  return words;
}
alignas(64) inline constexpr auto kRaisedWords = make_raised_words();

// bf16 vectors, multiplied in pairs and added in float32.
#define PERILUNE_PAIRS
struct Pairs {
  using Element = bf16;
  using Vector = __m512bh;
  static constexpr int kStep = 32;  // columns of a vector
  // Column of place i of a unit of 128: vector s has nibble s of every word.
  static constexpr int nibble_column(int i) { return i % 32 * 4 + i / 32; }
  static Vector load(const bf16* p) { return reinterpret_cast<Vector>(_mm512_loadu_si512(p)); }
  static void store(bf16* p, Vector v) { _mm512_storeu_si512(p, reinterpret_cast<__m512i>(v)); }
  static bf16 element(float x) { return to_bf16(x); }
  static bf16 element(bf16 x) { return x; }
  static F step(Vector w, Vector x, F total) { return _mm512_dpbf16_ps(total, w, x); }
};

// Two numbers of one lane. Unlike fma with floats, products with subnormal numbers are zero.
struct Pair {
  bf16 first, second;
};
inline Pairs::Vector load(const Pair* p) { return Pairs::load(&p->first); }
inline Pairs::Vector set(Pair pair) {
  return reinterpret_cast<Pairs::Vector>(_mm512_set1_epi32(pair.first.bits | pair.second.bits << 16));
}
inline F fma(Pairs::Vector a, Pairs::Vector b, F c) { return Pairs::step(a, b, c); }
// p[i] = {first[i], second[i]}; subnormal numbers become zero.
inline void store(Pair* p, F first, F second) {
  const __m512i words = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  const __m512i order = _mm512_or_si512(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
      _mm512_setr_epi32(16 << 16, 17 << 16, 18 << 16, 19 << 16, 20 << 16, 21 << 16, 22 << 16, 23 << 16, 24 << 16,
                        25 << 16, 26 << 16, 27 << 16, 28 << 16, 29 << 16, 30 << 16, 31 << 16));
  Pairs::store(&p->first, reinterpret_cast<Pairs::Vector>(_mm512_permutexvar_epi16(order, words)));
}
inline void store(Pair* p, const bf16* first, const bf16* second) {
  const auto words = [](const bf16* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  };
  const __m512i both = _mm512_or_si512(words(first), _mm512_slli_epi32(words(second), 16));
  Pairs::store(&p->first, reinterpret_cast<Pairs::Vector>(both));
}

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

// Upper and lower bytes of the bf16 numbers that the lower seven bits of a weight stand for: a magnitude, or an E4M3.
struct ByteTables {
  alignas(64) uint8_t upper[128], lower[128];
};
constexpr ByteTables make_byte_tables(bool is_f8) {
  ByteTables tables{};
  for (int i = 0; i < 128; ++i) {
    int mantissa = is_f8 ? (i < 8 ? i : 8 | (i & 7)) : i, exponent = is_f8 ? (i < 8 ? 1 : i >> 3) - 10 : 0;
    uint16_t bits = 0;
    if (is_f8 && i == 127) {
      bits = 0x7fc0;
    } else if (mantissa != 0) {
      for (; mantissa < 128; mantissa *= 2) --exponent;
      bits = static_cast<uint16_t>((exponent + 7 + 127) << 7 | (mantissa & 127));
    }
    tables.upper[i] = static_cast<uint8_t>(bits >> 8);
    tables.lower[i] = static_cast<uint8_t>(bits & 255);
  }
  return tables;
}
inline constexpr ByteTables kI8Tables = make_byte_tables(false), kF8Tables = make_byte_tables(true);

// 64 weights in order; int8 from -127 to 127, as every weight made at load is.
template <typename E>
void load_bytes(const E* p, Pairs::Vector v[2]) {
  constexpr bool is_f8 = std::is_same_v<E, f8>;
  const ByteTables& tables = is_f8 ? kF8Tables : kI8Tables;
  const auto lookup = [](const uint8_t* table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  };
  // so that words come out in order below
  const __m512i bytes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), _mm512_loadu_si512(p));
  const __m512i index = is_f8 ? bytes : _mm512_abs_epi8(bytes);
  // upper | (bytes & 0x80)
  const __m512i upper =
      _mm512_ternarylogic_epi64(lookup(tables.upper, index), bytes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
  const __m512i lower = lookup(tables.lower, index);
  v[0] = reinterpret_cast<Pairs::Vector>(_mm512_unpacklo_epi8(lower, upper));
  v[1] = reinterpret_cast<Pairs::Vector>(_mm512_unpackhi_epi8(lower, upper));
}
inline void load_unit(Pairs, const int8_t* p, Pairs::Vector v[4]) {
  load_bytes(p, v);
  load_bytes(p + 64, v + 2);
}
inline void load_unit(Pairs, const f8* p, Pairs::Vector v[4]) {
  load_bytes(p, v);
  load_bytes(p + 64, v + 2);
}

// A unit of 128 weights under any four scales.
inline void look_up_nibbles(const uint8_t* nibbles, const uint8_t* scales, Pairs::Vector v[4]) {
  alignas(64) uint16_t words[128];
  for (int i = 0; i < 128; ++i) {
    const int column = Pairs::nibble_column(i);
    words[i] = kMxfp4Words[16 * scales[column / 32] + (nibbles[column / 2] >> column % 2 * 4 & 15)];
  }
  for (int s = 0; s < 4; ++s) v[s] = reinterpret_cast<Pairs::Vector>(_mm512_load_si512(words + 32 * s));
}

// 128 weights under four scales, columns as Pairs::nibble_column. A code's bits times 2^120 are looked up, and the
// missing powers of two taken from the exponents, all of a 16-byte block the same; the zeros stay zero by saturation.
inline void decode_nibbles(const uint8_t* nibbles, const uint8_t* scales, Pairs::Vector v[4]) {
  constexpr int kRaised = 120;
  uint32_t four;
  std::memcpy(&four, scales, 4);
  if (__builtin_expect((four & 0xc0c0c0c0u) != 0x40404040u, 0)) return look_up_nibbles(nibbles, scales, v);
  const __m512i order = _mm512_setr_epi64(0x0080008000800080, 0x0080008000800080, 0x0180018001800180,
                                          0x0180018001800180, 0x0280028002800280, 0x0280028002800280,
                                          0x0380038003800380, 0x0380038003800380);
  // a scale's byte in the upper half of each word, shifted to the exponent's place
  const __m512i exponents = _mm512_srli_epi16(_mm512_shuffle_epi8(_mm512_set1_epi32(static_cast<int>(four)), order), 1);
  const __m512i missing = _mm512_sub_epi16(_mm512_set1_epi16((127 + kRaised) << 7), exponents);
  const __m512i table = _mm512_load_si512(kRaisedWords.data());
  const __m512i all = _mm512_loadu_si512(nibbles);
  const auto weights = [&](__m512i words) {  // an index is the lower five bits; the table stands there twice
    return reinterpret_cast<Pairs::Vector>(_mm512_subs_epu16(_mm512_permutexvar_epi16(words, table), missing));
  };
  v[0] = weights(all);
  v[1] = weights(_mm512_srli_epi16(all, 4));
  v[2] = weights(_mm512_srli_epi16(all, 8));
  v[3] = weights(_mm512_srli_epi16(all, 12));
}
// 64 weights under two scales as floats, 32 by 32 in kFloatNibbleOrder.
inline void decode_nibbles(const uint8_t* nibbles, const uint8_t* scales, F v[4]) {
  const __m512i shifts = _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008, 0x0008000800080008,
                                          0x0004000400040004, 0x0004000400040004, 0, 0);
  for (int group = 0; group < 2; ++group) {
    const auto* p = reinterpret_cast<const __m128i*>(nibbles) + group;
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(p));
    const auto* table = reinterpret_cast<const __m256i*>(kMxfp4Words.data() + 16 * scales[group]);
    const __m512i words = _mm512_permutexvar_epi16(_mm512_srlv_epi16(all, shifts),
                                                   _mm512_broadcast_i64x4(_mm256_load_si256(table)));
    v[2 * group] = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    v[2 * group + 1] = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
}

}  // namespace perilune::PERILUNE_ISA
