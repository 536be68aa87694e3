// Dot products of activation rows with the rows of a weight as it lies in memory: pack once per step, then any range of
// weight rows with any choice of packed rows, single-threaded, from inside a chunk.
#pragma once

#include <cmath>

#include "perilune.h"
#include "simd/math.h"

namespace perilune::PERILUNE_ISA {

// How activations lie for one kind of weight.
enum class Packing : int { floats, blocks };

inline Packing packing_for(Type weight, Type activations, bool int8_activations) {
  (void)activations;
  return int8_activations && (weight == Type::i8 || weight == Type::mxfp4) ? Packing::blocks : Packing::floats;
}

// Rows of activations, `stride` bytes apart. What a row holds is the business of pack_row and dot.
struct PackedRows {
  char* data;
  int64_t rows, columns, stride;
  Packing packing;
};

inline PackedRows reserve_rows(Scratch& scratch, Packing packing, int64_t rows, int64_t columns) {
  const int64_t stride = (columns * 4 + 63) / 64 * 64;
  return {static_cast<char*>(scratch.take_bytes(rows * stride)), rows, columns, stride, packing};
}

// Packs one row of `columns` elements; rows may be packed by different threads.
template <typename E>
void pack_row(const PackedRows& packed, int64_t row, const E* x) {
  auto* to = reinterpret_cast<float*>(packed.data + row * packed.stride);
  for (int64_t i = 0; i < packed.columns; ++i) to[i] = widen(x[i]);
  if (packed.packing == Packing::floats) return;
  for (int64_t first = 0; first < packed.columns; first += 32) {
    const int64_t last = first + 32 < packed.columns ? first + 32 : packed.columns;
    float largest = 0.0f;
    for (int64_t i = first; i < last; ++i) largest = std::fabs(to[i]) > largest ? std::fabs(to[i]) : largest;
    const float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int64_t i = first; i < last; ++i) to[i] = std::nearbyintf(to[i] * inverse) * scale;
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

// One weight row as floats, without the scale of its row.
inline void decode_row(const Matrix& w, int64_t row, float* to) {
  static const float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  const char* data = static_cast<const char*>(w.data) + type_bytes(w.type, row * w.columns);
  if (w.type == Type::mxfp4) {
    const auto* scales = static_cast<const uint8_t*>(w.scales) + row * (w.columns / 32);
    for (int64_t i = 0; i < w.columns; ++i) {
      const int byte = static_cast<uint8_t>(data[i / 2]);
      to[i] = std::ldexp(kValues[i % 2 == 0 ? byte & 15 : byte >> 4], scales[i / 32] - 127);
    }
    return;
  }
  for (int64_t i = 0; i < w.columns; i += 8) {
    float eight[kLanes];
    for (int64_t j = 0; j < 8; ++j) {
      if (w.type == Type::f32) eight[j] = reinterpret_cast<const float*>(data)[i + j];
      if (w.type == Type::bf16) eight[j] = widen(reinterpret_cast<const bf16*>(data)[i + j]);
      if (w.type == Type::i8) eight[j] = static_cast<float>(reinterpret_cast<const int8_t*>(data)[i + j]);
    }
    if (w.type == Type::f8) {
      uint8_t bytes[kLanes] = {};
      std::memcpy(bytes, data + i, 8);
      store(eight, load_f8(bytes));
    }
    std::memcpy(to + i, eight, 32);
  }
}

// y[i * y_stride + o - first] = weight row o times packed row which[i] (row i where `which` is null), for i < count and
// o in [first, last). Accumulated in float32 in an order that depends on the number of columns alone.
inline void dot(const Matrix& w, int64_t first, int64_t last, const PackedRows& x, const int32_t* which, int64_t count,
                float* y, int64_t y_stride) {
  Scratch scratch;
  auto* weight = scratch.take<float>(w.columns);
  for (int64_t row = first; row < last; ++row) {
    decode_row(w, row, weight);
    const bool has_row_scale = w.type == Type::i8 || w.type == Type::f8;
    const float scale = has_row_scale ? static_cast<const float*>(w.scales)[row] : 1.0f;
    for (int64_t i = 0; i < count; ++i) {
      const auto* token = reinterpret_cast<const float*>(x.data + (which == nullptr ? i : which[i]) * x.stride);
      F total = zero();
      for (int64_t k = 0; k < w.columns; k += kLanes) total = fma(load(weight + k), load(token + k), total);
      y[i * y_stride + row - first] = sum(total) * scale;
    }
  }
}

}  // namespace perilune::PERILUNE_ISA
