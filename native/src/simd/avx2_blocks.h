// Products of int8 blocks with AVX2: eight blocks a group.
#pragma once

#include "kernels/blocks.h"
#include "simd/avx2.h"

namespace perilune::PERILUNE_ISA {

// int8 weights are widened to 16 bits, and so are their activations; those of MXFP4 are unsigned bytes up to 24.
template <bool nibbles>
struct BlockLayout {
  using Value = std::conditional_t<nibbles, int8_t, int16_t>;
  static constexpr bool kDoubled = nibbles;
  static constexpr int kRaise = nibbles ? 12 : 0;

  static constexpr int block_of_lane(int lane) { return nibbles ? lane % 4 * 2 + lane / 4 : lane; }
  static constexpr int column(int i) {
    return nibbles ? i / 8 * 8 + i % 4 * 2 + i % 8 / 4 : i / 4 * 4 + i % 2 * 2 + i % 4 / 2;
  }
};

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Within each half: v[i] dword j -> v[j] dword i.
inline void transpose4(__m256i v[4]) {
  const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
  const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm256_unpacklo_epi64(a, c);
  v[1] = _mm256_unpackhi_epi64(a, c);
  v[2] = _mm256_unpacklo_epi64(b, d);
  v[3] = _mm256_unpackhi_epi64(b, d);
}

template <bool nibbles>
struct BlockWeights;

template <>
struct BlockWeights<true> {
  __m256i v[8];
  __m256 scales;  // by lane

  void decode(const uint8_t* data, const uint8_t* group_scales) {
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kRaisedCodes)));
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i both[4];
    for (int p = 0; p < 4; ++p) both[p] = load256(data + 32 * p);
    transpose4(both);
    for (int p = 0; p < 4; ++p) {
      v[2 * p] = _mm256_shuffle_epi8(table, _mm256_and_si256(both[p], mask));
      v[2 * p + 1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both[p], 4), mask));
    }
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i bytes = _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(group_scales)), order);
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
    scales = _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(0x00400000)));  // 2^-127 is subnormal
  }

  // totals[r] + the blocks' products with weight row r, times their scales
  template <int R>
  static void add_products(const BlockWeights* w, const int8_t* x, const float* x_scales, const int32_t* offsets,
                           F* totals) {
    for (int r = 0; r < R; ++r) {
      __m256i exact = load256(offsets);
      for (int half = 0; half < 2; ++half) {
        const auto part = [&](int j) { return _mm256_maddubs_epi16(w[r].v[4 * half + j], load256(x + 128 * half + 32 * j)); };
        // 4 * 2 * 24 * 127 fits 16 bits
        const __m256i pairs = _mm256_add_epi16(_mm256_add_epi16(part(0), part(1)), _mm256_add_epi16(part(2), part(3)));
        exact = _mm256_add_epi32(exact, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
      }
      totals[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), _mm256_mul_ps(w[r].scales, _mm256_loadu_ps(x_scales)),
                                  totals[r]);
    }
  }
};

template <>
struct BlockWeights<false> {
  __m256i v[16];

  void decode(const uint8_t* data, const uint8_t*) {
    __m256i rows[8];
    for (int b = 0; b < 8; ++b) rows[b] = load256(data + 32 * b);
    transpose4(rows);
    transpose4(rows + 4);
    for (int j = 0; j < 4; ++j)  // a half has the first or the last four dwords of four blocks
      for (int half = 0; half < 2; ++half) {
        const __m256i bytes = half == 0 ? _mm256_permute2x128_si256(rows[j], rows[4 + j], 0x20)
                                        : _mm256_permute2x128_si256(rows[j], rows[4 + j], 0x31);
        v[8 * half + 2 * j] = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
        v[8 * half + 2 * j + 1] = _mm256_srai_epi16(bytes, 8);
      }
  }

  template <int R>
  static void add_products(const BlockWeights* w, const int16_t* x, const float* x_scales, const int32_t*, F* totals) {
    for (int r = 0; r < R; ++r) {
      __m256i exact = _mm256_madd_epi16(w[r].v[0], load256(x));
      for (int j = 1; j < 16; ++j) exact = _mm256_add_epi32(exact, _mm256_madd_epi16(w[r].v[j], load256(x + 16 * j)));
      totals[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), _mm256_loadu_ps(x_scales), totals[r]);
    }
  }
};

// Bytes ahead of a weight row's reads that are asked for: a tenth faster on Zen 3.
template <bool nibbles>
constexpr int64_t kBlockAhead = 1024;
// Weight rows that share an activation once it is loaded.
constexpr int kBlockTile = 1;

}  // namespace perilune::PERILUNE_ISA
