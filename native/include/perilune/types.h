// Element types, and what arguments of several kernels have in common.
#pragma once

#include <cstdint>

namespace perilune {

// i8 and f8 (E4M3 with NaN, no infinity) carry one float scale per output row; mxfp4 is E2M1 pairs, low nibble first,
// with one E8M0 scale byte per 32 columns.
enum class Type : int { f32 = 0, bf16 = 1, i8 = 2, f8 = 3, mxfp4 = 4 };

// Bytes of `count` elements.
constexpr int64_t type_bytes(Type type, int64_t count) {
  switch (type) {
    case Type::f32: return 4 * count;
    case Type::bf16: return 2 * count;
    case Type::mxfp4: return count / 2;
    default: return count;
  }
}

// A weight [rows, columns] as it lies in the checkpoint, or as online quantisation made it.
// `scales`: null for f32 and bf16; float [rows] for i8 and f8; E8M0 bytes [rows, columns / 32] for mxfp4.
struct Matrix {
  const void* data;
  const void* scales;
  int64_t rows, columns;
  Type type;
};

// Sequences of a call: tokens cu_seqlens[n] .. cu_seqlens[n + 1] belong to sequence n, whose state seat is slots[n].
struct Sequences {
  const int64_t* cu_seqlens;  // [count + 1]
  const int64_t* slots;       // [count]
  int64_t count;
};

// Paged rows of a call's sequences. Row r of sequence n lies in block table[n, r / block_size], at r % block_size.
struct Pages {
  const void* pool;  // [blocks, block_size, row]
  int64_t row_bytes;
  int64_t block_size;
  const int64_t* table;  // [count, table_width]
  int64_t table_width;
  const int64_t* seq_lens;  // [count], rows of each sequence, those of this call included
};

}  // namespace perilune
