// Paged rows of a sequence, brought into blocks of floats.
#pragma once

#include <cstring>

#include "kernels/attention_tile.h"

namespace perilune::PERILUNE_ISA {

// Zeros behind the last column of a row.
template <typename V>
void fill_strip(int64_t width, V* row, int64_t block_rows) {
  for (int64_t c = width; c % kStripValues<V> != 0; ++c) row[column_at<V>(block_rows, c)] = V{};
}

// A query of the call and the rows it attends to: `count` of sequence `sequence`, at `positions` (ascending), or the
// first `count` where `positions` is null.
struct Query {
  int64_t token, sequence, count;
  const int64_t* positions;
};

inline const void* row_at(const Pages& pages, int64_t sequence, int64_t position) {
  const int64_t block = pages.table[sequence * pages.table_width + position / pages.block_size];
  return static_cast<const char*>(pages.pool) +
         (block * pages.block_size + position % pages.block_size) * pages.row_bytes;
}

// Addresses of the rows from `first` to `end` of a query's list, at most `most` of them; returns how many.
inline int64_t find_rows(const Pages& pages, int64_t sequence, const int64_t* positions, int64_t first, int64_t end,
                         int64_t most, const void** rows) {
  int64_t count = 0;
  for (; count < most && first + count < end; ++count)
    rows[count] = row_at(pages, sequence, positions == nullptr ? first + count : positions[first + count]);
  return count;
}

// One row, its last strip filled with zeros, into strips of `block_rows` rows.
template <typename V, typename E>
void put_row(const E* row, int64_t width, V* to, int64_t block_rows) {
  for (int64_t c = 0; c < width; c += 16) {
    if constexpr (std::is_same_v<V, E>)
      std::memcpy(to + column_at<V>(block_rows, c), row + c, 16 * sizeof(E));
    else
      for (int64_t v = 0; v < 16; v += kLanes) store(to + column_at<V>(block_rows, c) + v, load(row + c + v));
  }
  fill_strip(width, to, block_rows);
}

template <typename E, typename V>
void read_rows(const void* const* rows, int64_t count, int64_t width, V* block, int64_t block_rows) {
  for (int64_t i = 0; i < count; ++i)
    put_row(static_cast<const E*>(rows[i]), width, block + i * kStripValues<V>, block_rows);
}

// The same rows for sums that run over rows: a cell holds one column of as many rows as it has values. Strips have
// cells of 16 columns for `block_cells` rows; what a last cell lacks is zero.
template <typename V>
void pair_rows(const V* block, int64_t block_rows, int64_t count, int64_t width, V* out, int64_t block_cells) {
  static_assert(kIsPaired<V>);
  const V none[16] = {};
  for (int64_t c = 0; c < width; c += 16) {
    const V* column = block + column_at<V>(block_rows, c);
    Cell<V>* to = cells(out) + c * block_cells;
    for (int64_t i = 0; i < count; i += 2, to += kStrip)
      store(to, column + i * kStripValues<V>, i + 1 < count ? column + (i + 1) * kStripValues<V> : none);
  }
}

// Tiles of a block's products are enough to fetch the next block's rows, so many lines each.
constexpr int64_t kTileFetch = 8;

// Fetches rows that will be read next, a few lines whenever there is computing to hide them behind.
struct Fetch {
  const void* const* rows;
  int64_t count, row_bytes;
  int64_t row = 0, byte = 0;

  void lines(int64_t wanted) {
    for (; wanted > 0 && row < count; --wanted) {
      prefetch(static_cast<const char*>(rows[row]) + byte);
      byte += 64;
      if (byte >= row_bytes) byte = 0, ++row;
    }
  }
};

// How many rows of its sequence token i of sequence n sees.
inline int64_t visible_rows(const Pages& pages, const Sequences& sequences, int64_t n, int64_t token) {
  return pages.seq_lens[n] - sequences.cu_seqlens[n + 1] + token + 1;
}

}  // namespace perilune::PERILUNE_ISA
