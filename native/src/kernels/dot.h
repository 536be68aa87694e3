// Dot products of activation rows with the rows of a weight as it lies in memory: pack once per step, then any range of
// weight rows with any choice of packed rows, single-threaded, from inside a chunk.
#pragma once

#include <new>

#include "kernels/dot_blocks.h"
#include "kernels/dot_float.h"

namespace perilune::PERILUNE_ISA {

// How activations lie for one kind of weight.
enum class Packing : int { floats, float_nibbles, pairs, pair_nibbles, blocks, nibble_blocks };
constexpr int kPackings = 6;

inline Packing packing_for(Type weight, Type activations, bool int8_activations) {
  const bool is_packed = weight == Type::mxfp4;
  if (int8_activations && (is_packed || weight == Type::i8)) return is_packed ? Packing::nibble_blocks : Packing::blocks;
#ifdef PERILUNE_PAIRS
  if (activations == Type::bf16 && weight != Type::f32) return is_packed ? Packing::pair_nibbles : Packing::pairs;
#endif
  (void)activations;
  return is_packed ? Packing::float_nibbles : Packing::floats;
}

// Rows of activations, `stride` bytes apart. What a row holds is the business of pack_row and dot.
struct PackedRows {
  char* data;
  int64_t rows, columns, stride;
  Packing packing;

  template <typename T>
  T* row(int64_t index) const {
    return reinterpret_cast<T*>(data + index * stride);
  }
};

inline PackedRows reserve_rows(Scratch& scratch, Packing packing, int64_t rows, int64_t columns) {
  int64_t bytes = padded_elements<Floats>(columns) * static_cast<int64_t>(sizeof(float));
  if (packing == Packing::blocks) bytes = BlockRow<false>::bytes(columns);
  if (packing == Packing::nibble_blocks) bytes = BlockRow<true>::bytes(columns);
  // an odd number of lines, so that the same column of neighbouring rows falls into different cache sets
  const int64_t stride = ((bytes + 63) / 64 | 1) * 64;
  return {static_cast<char*>(scratch.take_bytes(rows * stride)), rows, columns, stride, packing};
}

// Packs one row of `columns` elements; rows may be packed by different threads.
template <typename E>
void pack_row(const PackedRows& packed, int64_t row, const E* x) {
  switch (packed.packing) {
    case Packing::floats: return pack_floats<Floats>(x, packed.columns, false, packed.row<float>(row));
    case Packing::float_nibbles: return pack_floats<Floats>(x, packed.columns, true, packed.row<float>(row));
#ifdef PERILUNE_PAIRS
    case Packing::pairs: return pack_floats<Pairs>(x, packed.columns, false, packed.row<bf16>(row));
    case Packing::pair_nibbles: return pack_floats<Pairs>(x, packed.columns, true, packed.row<bf16>(row));
#endif
    case Packing::blocks: return pack_blocks<false>(x, packed.columns, {packed.row<char>(row), packed.columns});
    case Packing::nibble_blocks: return pack_blocks<true>(x, packed.columns, {packed.row<char>(row), packed.columns});
    default: return;
  }
}

inline void pack_row(const PackedRows& packed, int64_t row, const void* x, Type type) {
  if (type == Type::f32)
    pack_row(packed, row, static_cast<const float*>(x));
  else
    pack_row(packed, row, static_cast<const bf16*>(x));
}

// Packs x [rows, columns], f32 or bf16, in a parallel region where there is enough of it.
inline PackedRows pack(Scratch& scratch, Packing packing, const void* x, Type type, int64_t rows, int64_t columns) {
  const PackedRows packed = reserve_rows(scratch, packing, rows, columns);
  const int64_t step = columns >= 16384 ? 1 : (16384 + columns - 1) / columns;
  parallel((rows + step - 1) / step, [&](int64_t chunk) {
    for (int64_t row = chunk * step; row < rows && row < (chunk + 1) * step; ++row)
      pack_row(packed, row, static_cast<const char*>(x) + type_bytes(type, row * columns), type);
  });
  return packed;
}

template <typename O>
void dot_floats(const Matrix& w, int64_t first, int64_t last, const PackedRows& packed, const int32_t* which,
                int64_t count, float* y, int64_t y_stride) {
  Scratch scratch;
  auto** x = scratch.take<const typename O::Element*>(count);
  for (int64_t i = 0; i < count; ++i) x[i] = packed.row<typename O::Element>(which == nullptr ? i : which[i]);
  switch (w.type) {
    case Type::f32:
      if constexpr (std::is_same_v<O, Floats>) dot_float<O, ElementRow<float>>(w, first, last, x, count, y, y_stride);
      return;
    case Type::bf16: return dot_float<O, ElementRow<bf16>>(w, first, last, x, count, y, y_stride);
    case Type::i8: return dot_float<O, ElementRow<int8_t>>(w, first, last, x, count, y, y_stride);
    case Type::f8: return dot_float<O, ElementRow<f8>>(w, first, last, x, count, y, y_stride);
    case Type::mxfp4: return dot_float<O, NibbleRow>(w, first, last, x, count, y, y_stride);
  }
}

template <bool nibbles>
void dot_int8(const Matrix& w, int64_t first, int64_t last, const PackedRows& packed, const int32_t* which,
              int64_t count, float* y, int64_t y_stride) {
  Scratch scratch;
  auto* x = static_cast<BlockRow<nibbles>*>(scratch.take_bytes(count * sizeof(BlockRow<nibbles>)));
  for (int64_t i = 0; i < count; ++i)
    new (x + i) BlockRow<nibbles>(packed.row<char>(which == nullptr ? i : which[i]), packed.columns);
  dot_blocks<nibbles>(w, first, last, x, count, y, y_stride);
}

// Nanoseconds that a chunk should take: long enough to pay for taking it, short enough that nobody waits for the last.
constexpr double kChunkTime = 30e3;
// Rows of activations from which on weights are decoded for all of them, several rows at a time.
constexpr int64_t kMany = 4;

// Weight rows that are decoded together for `count` rows of activations.
inline int64_t rows_together(Packing packing, int64_t columns, int64_t count) {
  if (packing == Packing::blocks || packing == Packing::nibble_blocks) return kDecodedRows;
#ifdef PERILUNE_PAIRS
  if (packing == Packing::pairs || packing == Packing::pair_nibbles) return panel_rows<Pairs>(columns, count);
#endif
  return panel_rows<Floats>(columns, count);
}

// Nanoseconds of one weight row times `count` rows of activations, on one thread: memory or arithmetic.
inline double row_time(Type type, int64_t columns, int64_t count) {
  const double reading = static_cast<double>(type_bytes(type, columns)) / 10.0;
  const double computing = 20.0 + static_cast<double>(columns * count) / 50.0;
  return reading > computing ? reading : computing;
}

// The fewest weight rows that a call of dot should get: where reading them takes a part of the time, so many that most
// are read while others are computed with.
inline int64_t least_rows(Packing packing, int64_t columns, int64_t count) {
  return count < kMany ? 16 : rows_together(packing, columns, count) * (count < kPanelTokens ? 4 : 2);
}

// Weight rows of a chunk of a product.
inline int64_t chunk_rows(Packing packing, const Matrix& w, int64_t count) {
  const int64_t least = least_rows(packing, w.columns, count);
  const auto wanted = static_cast<int64_t>(kChunkTime / row_time(w.type, w.columns, count));
  return wanted < least ? least : wanted / least * least;
}

// y[i * y_stride + o - first] = weight row o times packed row which[i] (row i where `which` is null), for i < count and
// o in [first, last). The order of a product's sum depends on the number of columns alone.
inline void dot(const Matrix& w, int64_t first, int64_t last, const PackedRows& x, const int32_t* which, int64_t count,
                float* y, int64_t y_stride) {
  if (count == 0) return;
#ifdef PERILUNE_PAIRS
  if (x.packing == Packing::pairs || x.packing == Packing::pair_nibbles)
    return dot_floats<Pairs>(w, first, last, x, which, count, y, y_stride);
#endif
  if (x.packing == Packing::blocks) return dot_int8<false>(w, first, last, x, which, count, y, y_stride);
  if (x.packing == Packing::nibble_blocks) return dot_int8<true>(w, first, last, x, which, count, y, y_stride);
  dot_floats<Floats>(w, first, last, x, which, count, y, y_stride);
}

}  // namespace perilune::PERILUNE_ISA
