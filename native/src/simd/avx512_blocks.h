// Products of int8 blocks with AVX-512 VNNI: sixteen blocks a group.
#pragma once

#include "kernels/blocks.h"
#include "simd/avx512.h"

namespace perilune::PERILUNE_ISA {

// Weights of both kinds are made unsigned, as vpdpbusd wants one side to be.
template <bool nibbles>
struct BlockLayout {
  using Value = int8_t;
  static constexpr bool kDoubled = nibbles;
  static constexpr int kRaise = nibbles ? 12 : 128;

  static constexpr int block_of_lane(int lane) {
    return nibbles ? lane % 4 * 4 + lane / 4 : lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
  }
  static constexpr int column(int i) { return nibbles ? i / 8 * 8 + i % 4 * 2 + i % 8 / 4 : i; }
};

// Within each quarter: v[i] dword j -> v[j] dword i.
inline void transpose4(__m512i v[4]) {
  const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
  const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi64(a, c);
  v[1] = _mm512_unpackhi_epi64(a, c);
  v[2] = _mm512_unpacklo_epi64(b, d);
  v[3] = _mm512_unpackhi_epi64(b, d);
}

template <bool nibbles>
struct BlockWeights {
  static constexpr int kVectors = 8;

  __m512i v[kVectors];
  __m512 scales;  // of MXFP4, by lane

  void decode(const uint8_t* data, const uint8_t* group_scales) {
    nibbles ? load_nibbles(data, group_scales) : load_bytes(data);
  }

  // totals[r] + the blocks' products with weight row r, times their scales
  template <int R>
  static void add_products(const BlockWeights* w, const int8_t* x, const float* x_scales, const int32_t* offsets,
                           F* totals) {
    __m512i sums[R];
    for (int r = 0; r < R; ++r) sums[r] = _mm512_loadu_si512(offsets);
    for (int j = 0; j < kVectors; ++j) {
      __m512i values = _mm512_loadu_si512(x + 64 * j);
      if (R > 1) asm("" : "+v"(values));  // loaded once, not by each product: loads would bind
      for (int r = 0; r < R; ++r) sums[r] = _mm512_dpbusd_epi32(sums[r], w[r].v[j], values);
    }
    const __m512 scale = _mm512_loadu_ps(x_scales);
    for (int r = 0; r < R; ++r)
      totals[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r]), nibbles ? _mm512_mul_ps(w[r].scales, scale) : scale,
                                  totals[r]);
  }

 private:
  void load_nibbles(const uint8_t* data, const uint8_t* group_scales) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kRaisedCodes)));
    __m512i both[4];
    for (int p = 0; p < 4; ++p) both[p] = _mm512_loadu_si512(data + 64 * p);
    transpose4(both);
    for (int p = 0; p < 4; ++p) {
      // an index's upper bits do not count: the table stands there four times
      v[2 * p] = _mm512_permutexvar_epi8(both[p], table);
      v[2 * p + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(both[p], 4), table);
    }
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m128i bytes = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group_scales)), order);
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
    scales = _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)));  // 2^-127 is subnormal
  }
  void load_bytes(const uint8_t* data) {
    __m512i rows[8];
    for (int p = 0; p < 8; ++p)
      rows[p] = _mm512_xor_si512(_mm512_loadu_si512(data + 64 * p), _mm512_set1_epi8(static_cast<char>(0x80)));
    transpose4(rows);
    transpose4(rows + 4);
    for (int j = 0; j < 4; ++j) {  // a quarter has the first or the last four dwords of four blocks
      v[j] = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);
      v[4 + j] = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xdd);
    }
  }
};

// Bytes ahead of a weight row's reads that are asked for, into the second cache. Zen 4 by itself reads bytes at the
// memory's speed, but nibbles, which take longer, a tenth faster when asked two pages ahead.
template <bool nibbles>
constexpr int64_t kBlockAhead = nibbles ? 8192 : 0;
// Weight rows that share an activation once it is loaded.
constexpr int kBlockTile = 2;

}  // namespace perilune::PERILUNE_ISA
