// Dot products with activations rounded to int8: few rows of activations share a weight row, many a panel of them.
#pragma once

#include "kernels/blocks.h"

namespace perilune::PERILUNE_ISA {

template <bool nibbles, int T>
void dot_blocks_few(const Matrix& w, int64_t first, int64_t last, const BlockRow<nibbles>* x, float* y,
                    int64_t y_stride) {
  for (int64_t row = first; row < last; ++row) blocks_few<nibbles, T>(w, row, x, y + row - first, y_stride);
}

template <bool nibbles>
void dot_blocks(const Matrix& w, int64_t first, int64_t last, const BlockRow<nibbles>* x, int64_t count, float* y,
                int64_t y_stride) {
  if (count == 1)
    dot_blocks_few<nibbles, 1>(w, first, last, x, y, y_stride);
  else if (count <= kFewBlockTokens)
    count == 2 ? dot_blocks_few<nibbles, kFewBlockTokens < 2 ? 1 : 2>(w, first, last, x, y, y_stride)
               : dot_blocks_few<nibbles, kFewBlockTokens < 3 ? 1 : 3>(w, first, last, x, y, y_stride);
  else
    blocks_many<nibbles>(w, first, last, x, count, y, y_stride);
  if (nibbles) return;
  const auto* scales = static_cast<const float*>(w.scales);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t row = first; row < last; ++row) y[i * y_stride + row - first] *= scales[row];
}

}  // namespace perilune::PERILUNE_ISA
