// Products of int8 blocks in plain C++.
#pragma once

#include <cmath>

#include "kernels/blocks.h"
#include "simd/baseline.h"

namespace perilune::PERILUNE_ISA {

template <bool nibbles>
struct BlockLayout {
  using Value = int8_t;
  static constexpr bool kDoubled = nibbles;
  static constexpr int kRaise = 0;

  static constexpr int block_of_lane(int lane) { return lane; }
  static constexpr int column(int i) { return i; }
};

template <bool nibbles>
struct BlockWeights {
  int8_t v[kGroupColumns];  // [dword][lane][4]
  float scales[kGroup];

  void decode(const uint8_t* data, const uint8_t* group_scales) {
    for (int lane = 0; lane < kGroup; ++lane)
      for (int i = 0; i < kBlock; ++i) {
        const uint8_t byte = data[nibbles ? lane * 16 + i / 2 : lane * kBlock + i];
        v[i / 4 * 4 * kGroup + lane * 4 + i % 4] =
            nibbles ? static_cast<int8_t>(kRaisedCodes[byte >> (i % 2 * 4) & 15] - 12) : static_cast<int8_t>(byte);
      }
    for (int lane = 0; lane < kGroup; ++lane) scales[lane] = nibbles ? std::ldexp(1.0f, group_scales[lane] - 127) : 1.0f;
  }

  // totals[r] + the blocks' products with weight row r, times their scales
  template <int R>
  static void add_products(const BlockWeights* w, const int8_t* x, const float* x_scales, const int32_t*, F* totals) {
    for (int r = 0; r < R; ++r) {
      int32_t exact[kGroup] = {};
      for (int i = 0; i < kGroupColumns; ++i) exact[i / 4 % kGroup] += w[r].v[i] * x[i];
      F values, scale;
      for (int lane = 0; lane < kGroup; ++lane) {
        values.v[lane] = static_cast<float>(exact[lane]);
        scale.v[lane] = w[r].scales[lane] * x_scales[lane];
      }
      totals[r] = fma(values, scale, totals[r]);
    }
  }
};

// Bytes ahead of a weight row's reads that are asked for: arithmetic binds, not memory.
template <bool nibbles>
constexpr int64_t kBlockAhead = 0;
// Weight rows that share an activation once it is loaded.
constexpr int kBlockTile = 1;

}  // namespace perilune::PERILUNE_ISA
