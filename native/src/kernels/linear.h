// Products of activations with one or several weights.
#pragma once

#include "kernels/dot.h"

namespace perilune::PERILUNE_ISA {

// Rows [first, last) of one matrix.
struct LinearPiece {
  int64_t matrix, first, last;
};

inline void linear(const LinearArgs& args) {
  if (args.tokens == 0) return;
  Scratch scratch;
  PackedRows packed[kPackings];
  bool is_packed[kPackings] = {};
  int64_t num_pieces = 0;
  const auto packing_of = [&](const Matrix& w) { return packing_for(w.type, args.type, args.int8_activations); };
  const auto step_of = [&](const Matrix& w) { return chunk_rows(packing_of(w), w, args.tokens); };
  for (int64_t i = 0; i < args.count; ++i) {
    const Matrix& w = args.weights[i];
    const Packing packing = packing_of(w);
    const int at = static_cast<int>(packing);
    if (!is_packed[at]) packed[at] = pack(scratch, packing, args.x, args.type, args.tokens, w.columns);
    is_packed[at] = true;
    num_pieces += (w.rows + step_of(w) - 1) / step_of(w);
  }
  auto* pieces = scratch.take<LinearPiece>(num_pieces);
  int64_t filled = 0;
  for (int64_t i = 0; i < args.count; ++i) {
    const Matrix& w = args.weights[i];
    for (int64_t row = 0; row < w.rows; row += step_of(w))
      pieces[filled++] = {i, row, row + step_of(w) < w.rows ? row + step_of(w) : w.rows};
  }
  parallel(num_pieces, [&](int64_t chunk) {
    const LinearPiece& piece = pieces[chunk];
    const Matrix& w = args.weights[piece.matrix];
    const int at = static_cast<int>(packing_of(w));
    const int64_t rows = piece.last - piece.first;
    Scratch inner;
    auto* y = inner.take<float>(rows * args.tokens);
    dot(w, piece.first, piece.last, packed[at], nullptr, args.tokens, y, rows);
    with_element(args.type, [&](auto* e) {
      using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
      auto* to = static_cast<E*>(args.y[piece.matrix]);
      for (int64_t token = 0; token < args.tokens; ++token)
        for (int64_t o = 0; o < rows; ++o)
          to[token * w.rows + piece.first + o] = narrow<E>(y[token * rows + o]);
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
