// Dot products with activations rounded to int8. A group of a weight row is decoded into registers and multiplied by the
// same group of several rows of activations; for many of them decoded rows are kept in a panel.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/ahead.h"
#include "kernels/blocks.h"

namespace perilune::PERILUNE_ISA {

// Up to so many rows of activations share a decoded group in registers; more take a panel, in tiles.
constexpr int64_t kFewBlockTokens = 4, kBlockTokens = 8;
// Groups that a pass over a panel takes: with them a tile of activations stays in the first cache.
constexpr int64_t kPanelGroups = 2048 / kGroupColumns;
constexpr int64_t kDecodedRows = 16;

template <int R, bool nibbles>
inline void add_products(const BlockWeights<nibbles>* w, const BlockRow<nibbles>& x, int64_t group, F* totals) {
  BlockWeights<nibbles>::template add_products<R>(w, x.values + group * kGroupColumns, x.scales + group * kGroup,
                                                  x.offsets + group * kGroup, totals);
}

// T rows of activations times one weight row, which is read once, in one stream.
template <bool nibbles, int T>
void blocks_row(const Matrix& w, int64_t row, const BlockRow<nibbles>* x, float* y, int64_t y_stride) {
  alignas(64) uint8_t padded[WeightGroup<nibbles>::kPadded];
  F totals[T];
  for (int t = 0; t < T; ++t) totals[t] = zero();
  for (int64_t group = 0; group < BlockRow<nibbles>::groups(w.columns); ++group) {
    const WeightGroup<nibbles> from(w, row, group, padded);
    if constexpr (kBlockAhead<nibbles> > 0)
      for (int64_t line = 0; line < WeightGroup<nibbles>::kBytes; line += 64)
        prefetch_far(from.data + kBlockAhead<nibbles> + line);
    BlockWeights<nibbles> weights;
    weights.decode(from.data, from.scales);
    for (int t = 0; t < T; ++t) add_products<1>(&weights, x[t], group, totals + t);
  }
  for (int t = 0; t < T; ++t) y[t * y_stride] = sum(totals[t]);
}

template <bool nibbles>
using BlocksRow = void (*)(const Matrix&, int64_t, const BlockRow<nibbles>*, float*, int64_t);

template <bool nibbles, size_t... I>
constexpr std::array<BlocksRow<nibbles>, sizeof...(I)> make_blocks_rows(std::index_sequence<I...>) {
  return {blocks_row<nibbles, I + 1>...};
}

// Decoded rows of a weight: [tile][group][row of the tile].
template <bool nibbles>
struct BlockPanel {
  BlockWeights<nibbles>* weights;
  int64_t tiles, groups;

  // Rows from `first` on; beyond `last` the last one is repeated.
  void fill(const Matrix& w, int64_t first, int64_t last) const {
    alignas(64) uint8_t padded[WeightGroup<nibbles>::kPadded];
    for (int64_t row = 0; row < tiles * kBlockTile; ++row)
      for (int64_t group = 0; group < groups; ++group) {
        const WeightGroup<nibbles> from(w, first + row < last ? first + row : last - 1, group, padded);
        at(row / kBlockTile, group)[row % kBlockTile].decode(from.data, from.scales);
      }
  }
  // Up to kBlockTokens rows of activations times all rows; totals [tile][token][row of the tile].
  void multiply(const BlockRow<nibbles>* x, int64_t tokens, F* totals, Ahead& next) const {
    std::fill_n(totals, kDecodedRows * kBlockTokens, zero());
    for (int64_t first = 0; first < groups; first += kPanelGroups)
      for (int64_t tile = 0; tile < tiles; ++tile)
        for (int64_t group = first; group < groups && group < first + kPanelGroups; ++group) {
          BlockWeights<nibbles> own[kBlockTile];
          for (int r = 0; r < kBlockTile; ++r) own[r] = at(tile, group)[r];
          next.ask(kBlockTile * WeightGroup<nibbles>::kBytes);
          F* to = totals + tile * kBlockTokens * kBlockTile;
          for (int64_t t = 0; t < tokens; ++t) add_products<kBlockTile>(own, x[t], group, to + t * kBlockTile);
        }
  }

 private:
  BlockWeights<nibbles>* at(int64_t tile, int64_t group) const { return weights + (tile * groups + group) * kBlockTile; }
};

template <bool nibbles>
void blocks_many(const Matrix& w, int64_t first, int64_t last, const BlockRow<nibbles>* x, int64_t count, float* y,
                 int64_t y_stride) {
  Scratch scratch;
  const int64_t groups = BlockRow<nibbles>::groups(w.columns);
  auto* memory = scratch.take<BlockWeights<nibbles>>(kDecodedRows * groups);
  auto* totals = scratch.take<F>(kDecodedRows * kBlockTokens);
  auto* sums = scratch.take<float>(kDecodedRows * kBlockTokens);
  for (int64_t row = first; row < last; row += kDecodedRows) {
    const int64_t rows = last - row < kDecodedRows ? last - row : kDecodedRows;
    const BlockPanel<nibbles> panel{memory, (rows + kBlockTile - 1) / kBlockTile, groups};
    panel.fill(w, row, last);
    Ahead next(w, row + rows, row + rows + kDecodedRows < last ? row + rows + kDecodedRows : last);
    for (int64_t token = 0; token < count; token += kBlockTokens) {
      const int64_t tokens = count - token < kBlockTokens ? count - token : kBlockTokens;
      panel.multiply(x + token, tokens, totals, next);
      sum_all(totals, kDecodedRows * kBlockTokens, sums);
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t r = 0; r < rows; ++r)
          y[(token + t) * y_stride + row - first + r] =
              sums[(r / kBlockTile * kBlockTokens + t) * kBlockTile + r % kBlockTile];
    }
  }
}

// `count` rows of activations times weight rows [first, last).
template <bool nibbles>
void dot_blocks(const Matrix& w, int64_t first, int64_t last, const BlockRow<nibbles>* x, int64_t count, float* y,
                int64_t y_stride) {
  static constexpr auto kRows = make_blocks_rows<nibbles>(std::make_index_sequence<kFewBlockTokens>{});
  if (count > kFewBlockTokens)
    blocks_many<nibbles>(w, first, last, x, count, y, y_stride);
  else
    for (int64_t row = first; row < last; ++row) kRows[count - 1](w, row, x, y + row - first, y_stride);
  if (nibbles) return;
  const auto* scales = static_cast<const float*>(w.scales);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t row = first; row < last; ++row) y[i * y_stride + row - first] *= scales[row];
}

}  // namespace perilune::PERILUNE_ISA
