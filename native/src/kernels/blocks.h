// Activations rounded to int8 in blocks of 32 columns, and how they lie for the products with int8 and MXFP4 weights.
//
// The order of one product's sum: the sum of a block is an exact integer. Block b belongs to lane b mod kGroup; a lane
// adds its blocks' sums, each times the scales, by multiply-adds over ascending b, from zero. The lanes are added up in
// the order of `sum`, and an int8 weight's row scale is applied last.
#pragma once

#include <cstring>

#include "perilune.h"
#include "simd/math.h"

namespace perilune::PERILUNE_ISA {

constexpr int kBlock = 32;
constexpr int kGroup = kLanes;  // blocks of a group: one of each lane
constexpr int kGroupColumns = kBlock * kGroup;

// How a group lies: vector j has one dword of every block, each in its lane, so that products add up in place.
//   Value                    an activation
//   kRaise                   what is added to a weight to make it unsigned
//   kDoubled                 whether weights are stored doubled
//   block_of_lane(lane)      the block that is in a lane
//   column(i)                the column that is value i of a block, counted over its dwords
template <bool nibbles>
struct BlockLayout;

// One row of activations, in groups that are padded with zeros.
template <bool nibbles>
struct BlockRow {
  using Layout = BlockLayout<nibbles>;
  using Value = typename Layout::Value;

  Value* values;     // [groups * kGroupColumns]
  float* scales;     // [groups * kGroup], by lane; halved where weights are doubled
  int32_t* offsets;  // [groups * kGroup], by lane: -kRaise times the sum of the block's values

  static int64_t groups(int64_t columns) { return (columns + kGroupColumns - 1) / kGroupColumns; }
  static int64_t bytes(int64_t columns) { return groups(columns) * (kGroupColumns * sizeof(Value) + kGroup * 8); }

  BlockRow(char* data, int64_t columns)
      : values(reinterpret_cast<Value*>(data)),
        scales(reinterpret_cast<float*>(values + groups(columns) * kGroupColumns)),
        offsets(reinterpret_cast<int32_t*>(scales + groups(columns) * kGroup)) {}
};

// Rounds 32 columns to round(x * (127 / m)), m their largest magnitude, ties to even; the scale is m / 127.
template <typename Layout>
struct RoundedBlock {
  typename Layout::Value values[kBlock];  // in the order of Layout::column
  float scale;
  int32_t total;

  explicit RoundedBlock(const float* x) : total(0) {
    F most = zero();
    for (int i = 0; i < kBlock; i += kLanes) most = max(most, abs(load(x + i)));
    const float reach = largest(most), inverse = reach > 0.0f ? 127.0f / reach : 0.0f;
    int32_t rounded[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      const float nearest = x[i] * inverse + 12582912.0f;  // next to 1.5 * 2^23 floats are one apart
      std::memcpy(rounded + i, &nearest, 4);
      rounded[i] -= 0x4b400000;
    }
    for (int i = 0; i < kBlock; ++i) total += rounded[i];
    for (int i = 0; i < kBlock; ++i) values[i] = static_cast<typename Layout::Value>(rounded[Layout::column(i)]);
    scale = reach / 127.0f;
  }
};

template <bool nibbles, typename E>
void pack_blocks(const E* x, int64_t columns, const BlockRow<nibbles>& to) {
  using Layout = BlockLayout<nibbles>;
  constexpr int kDword = 4 / sizeof(typename Layout::Value);
  for (int64_t group = 0; group < BlockRow<nibbles>::groups(columns); ++group)
    for (int lane = 0; lane < kGroup; ++lane) {
      const int64_t first = group * kGroupColumns + Layout::block_of_lane(lane) * kBlock, left = columns - first;
      float own[kBlock] = {};
      for (int i = 0; i < (left < kBlock ? left : kBlock); ++i) own[i] = widen(x[first + i]);
      const RoundedBlock<Layout> block(own);
      auto* values = to.values + group * kGroupColumns + lane * kDword;
      for (int i = 0; i < kBlock; i += kDword) std::memcpy(values + i * kGroup, block.values + i, 4);
      to.scales[group * kGroup + lane] = block.scale * (Layout::kDoubled ? 0.5f : 1.0f);
      to.offsets[group * kGroup + lane] = -Layout::kRaise * block.total;
    }
}

// E2M1 doubled and raised by 12, so that it is unsigned.
constexpr uint8_t kRaisedCodes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The weights of one group of a row. Where a last group is not full, those behind it are multiplied by activations of
// zero: whatever follows in the matrix. With scales, which may be anything there, and at the matrix' end it is copied and
// padded with zeros.
template <bool nibbles>
struct WeightGroup {
  const uint8_t* data;
  const uint8_t* scales;

  static constexpr int64_t kBytes = nibbles ? kGroupColumns / 2 : kGroupColumns;
  static constexpr int kPadded = kBytes + kGroup;

  WeightGroup(const Matrix& w, int64_t row, int64_t group, uint8_t* padded) {
    const int64_t row_bytes = type_bytes(w.type, w.columns), at = group * kBytes;
    data = static_cast<const uint8_t*>(w.data) + row * row_bytes + at;
    scales = nibbles ? static_cast<const uint8_t*>(w.scales) + row * (w.columns / kBlock) + group * kGroup : nullptr;
    if (__builtin_expect(at + kBytes <= row_bytes, 1)) return;
    if (!nibbles && row * row_bytes + at + kBytes <= w.rows * row_bytes) return;
    std::memset(padded, 0, kPadded);
    std::memcpy(padded, data, row_bytes - at);
    data = padded;
    if (!nibbles) return;
    std::memcpy(padded + kBytes, scales, w.columns / kBlock - group * kGroup);
    scales = padded + kBytes;
  }
};

}  // namespace perilune::PERILUNE_ISA
