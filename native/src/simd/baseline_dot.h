// Operands of dot products in plain C++.
#pragma once

#include "simd/baseline.h"
#include "simd/mxfp4.h"

namespace perilune::PERILUNE_ISA {

// Register tile of the float dot products: weight rows by tokens.
constexpr int kRowTile = 2, kTokenTile = 2;
// Up to so many tokens a weight row is decoded in registers.
constexpr int kFewTokens = 1;
// Whether such weight rows are read several at a time; the registers hold the sums of one.
constexpr bool kReadsTogether = false;

// Column of each of 32 places in the order in which decode_nibbles yields them.
constexpr int kFloatNibbleOrder[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                       1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};

inline constexpr auto kMxfp4Words = make_mxfp4_words();

inline void load_weights(const float* p, F& v) { v = load(p); }
inline void load_weights(const bf16* p, F& v) { v = load(p); }
inline void load_weights(const int8_t* p, F& v) { v = load_i8(p); }
inline void load_weights(const f8* p, F& v) { v = load_f8(&p->bits); }

// 32 weights of one scale, columns in kFloatNibbleOrder.
inline void decode_nibbles(const uint8_t* nibbles, const uint8_t* scale, F v[4]) {
  const uint16_t* words = kMxfp4Words.data() + 16 * *scale;
  for (int i = 0; i < 16; ++i) {
    v[i / 8].v[i % 8] = widen(bf16{words[nibbles[i] & 15]});
    v[2 + i / 8].v[i % 8] = widen(bf16{words[nibbles[i] >> 4]});
  }
}

}  // namespace perilune::PERILUNE_ISA
