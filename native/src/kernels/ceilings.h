// How much this instruction set multiplies and adds when everything lies in registers.
#pragma once

#include "perilune.h"
#include "simd/math.h"

namespace perilune::PERILUNE_ISA {

// Sums that do not wait for each other: enough to cover the latency of two units, and all fit the registers.
constexpr int kSums = 12;

// Calls step(sum) for every sum, `rounds` times over, and keeps the compiler from leaving any of it out.
template <typename V, typename Step>
void repeat(int64_t rounds, V start, const Step& step) {
  V sums[kSums];
  for (V& sum : sums) sum = start;
  for (int64_t round = 0; round < rounds; ++round)
    for (V& sum : sums) step(sum);
  asm volatile("" : : "g"(sums) : "memory");
}

// Runs `rounds` rounds of products of `type`; returns the multiplications and additions done, 0 where this instruction
// set has no such product. float32: fused where there is FMA. bfloat16: pairs into float32 (vdpbf16ps). int8: unsigned
// times signed into int32 (vpdpbusd; AVX2 takes vpmaddubsw, vpmaddwd and an addition).
inline int64_t dots(Type type, int64_t rounds) {
  constexpr int64_t kOperations = 2 * kSums;
  if (type == Type::f32) {
    // sum = sum / 2 + 1 has no part that is the same in each round
    repeat(rounds, zero(), [](F& sum) { sum = fma(sum, set(0.5f), set(1.0f)); });
    return rounds * kOperations * kLanes;
  }
#if defined(__AVX512BF16__)
  if (type == Type::bf16) {
    const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = (__m512bh)_mm512_set1_epi16(0x3c00);
    repeat(rounds, zero(), [&](F& sum) { sum = _mm512_dpbf16_ps(sum, a, b); });
    return rounds * kOperations * 32;
  }
  if (type == Type::i8) {
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-5);
    repeat(rounds, _mm512_setzero_si512(), [&](__m512i& sum) { sum = _mm512_dpbusd_epi32(sum, a, b); });
    return rounds * kOperations * 64;
  }
#elif defined(__AVX2__)
  if (type == Type::i8) {
    __m256i a = _mm256_set1_epi8(3);
    const __m256i b = _mm256_set1_epi8(-5), ones = _mm256_set1_epi16(1);
    repeat(rounds, _mm256_setzero_si256(), [&](__m256i& sum) {
      asm("" : "+x"(a));  // else the product would be the same in each round
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    });
    return rounds * kOperations * 32;
  }
#endif
  return 0;
}

}  // namespace perilune::PERILUNE_ISA
