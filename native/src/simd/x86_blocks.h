// Products of int8 blocks on x86, in vectors of eight lanes: AVX2, and the same with VNNI's wider instructions.
#pragma once

#include <immintrin.h>

#include "kernels/blocks.h"

namespace perilune::PERILUNE_ISA {

// Tokens that share a decoded weight row, and tokens and rows of eight of a register tile.
constexpr int kFewBlockTokens = 3;
// Bytes ahead of a weight row's reads; the processor's own look-ahead in one stream is too short (a tenth faster here).
constexpr int kAhead = 1024;
constexpr int kNibbleTile = 4, kByteTile = 3, kByteRows = 2;

inline float lane_sum(__m256 a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
// The same tree over eight vectors.
inline __m256 lane_sum(const __m256* a) {
  return _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(a[0], a[4]), _mm256_add_ps(a[2], a[6])),
                       _mm256_add_ps(_mm256_add_ps(a[1], a[5]), _mm256_add_ps(a[3], a[7])));
}

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i broadcast32(const void* p) {
  int32_t value;
  std::memcpy(&value, p, 4);
  return _mm256_set1_epi32(value);
}

// total + products of int16 pairs
inline __m256i add_pairs(__m256i total, __m256i a, __m256i b) {
#ifdef __AVX512VNNI__
  return _mm256_dpwssd_epi32(total, a, b);
#else
  return _mm256_add_epi32(total, _mm256_madd_epi16(a, b));
#endif
}

// Sums of four products each, over `count` (at most 4) pairs of unsigned bytes up to 24 and signed bytes.
template <typename Weight, typename Value>
__m256i quad_sums(int count, const Weight& weight, const Value& value) {
#ifdef __AVX512VNNI__
  __m256i total = _mm256_setzero_si256();
  for (int i = 0; i < count; ++i) total = _mm256_dpbusd_epi32(total, weight(i), value(i));
  return total;
#else
  // 4 * 2 * 24 * 127 fits 16 bits
  __m256i total = _mm256_maddubs_epi16(weight(0), value(0));
  for (int i = 1; i < count; ++i) total = _mm256_add_epi16(total, _mm256_maddubs_epi16(weight(i), value(i)));
  return _mm256_madd_epi16(total, _mm256_set1_epi16(1));
#endif
}

// 32 bytes hold two blocks: their even columns, and their odd ones.
inline void raise_nibbles(const uint8_t* p, __m256i& even, __m256i& odd) {
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kRaisedCodes)));
  const __m256i both = load256(p), mask = _mm256_set1_epi8(15);
  even = _mm256_shuffle_epi8(table, _mm256_and_si256(both, mask));
  odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), mask));
}

// 2^(s - 127) of a group's eight scale bytes, by lane.
inline __m256 nibble_scales(const uint8_t* scales) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m128i bytes = _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales)), order);
  const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
  return _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(0x00400000)));  // 2^-127 is subnormal
}

// The sums of a group's eight blocks with T rows of activations, by lane, times the scales, added to totals.
template <int T>
void add_group(const WeightGroup<true>& w, int64_t group, const BlockRow<true>* x, __m256 totals[T]) {
  for (int line = 0; line < 2; ++line) prefetch(w.data + kAhead + 64 * line);
  __m256i even[4], odd[4];
  for (int p = 0; p < 4; ++p) raise_nibbles(w.data + 32 * p, even[p], odd[p]);
  const __m256 scales = nibble_scales(w.scales);
  for (int t = 0; t < T; ++t) {
    const int8_t* values = x[t].values + group * kGroupColumns;
    __m256i sums[4];
    for (int p = 0; p < 4; ++p)
      sums[p] = quad_sums(2, [&](int i) { return i == 0 ? even[p] : odd[p]; },
                          [&](int i) { return load256(values + 64 * p + 32 * i); });
    const __m256i lanes = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
    const __m256i exact = _mm256_add_epi32(lanes, load256(x[t].offsets + group * kGroup));
    const __m256 scale = _mm256_mul_ps(scales, _mm256_loadu_ps(x[t].scales + group * kGroup));
    totals[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), scale, totals[t]);
  }
}

template <int T>
void add_group(const WeightGroup<false>& w, int64_t group, const BlockRow<false>* x, __m256 totals[T]) {
  for (int line = 0; line < 4; ++line) prefetch(w.data + kAhead + 64 * line);
  __m256i sums[T][kGroup];
  for (int block = 0; block < kGroup; ++block) {
    const auto* p = reinterpret_cast<const __m128i*>(w.data + block * kBlock);
    const __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(p)), second = _mm256_cvtepi8_epi16(_mm_loadu_si128(p + 1));
    for (int t = 0; t < T; ++t) {
      const int16_t* values = x[t].values + group * kGroupColumns + block * kBlock;
      sums[t][block] = add_pairs(_mm256_madd_epi16(first, load256(values)), second, load256(values + 16));
    }
  }
  for (int t = 0; t < T; ++t) {
    const __m256i* s = sums[t];
    const __m256i low = _mm256_hadd_epi32(_mm256_hadd_epi32(s[0], s[1]), _mm256_hadd_epi32(s[2], s[3]));
    const __m256i high = _mm256_hadd_epi32(_mm256_hadd_epi32(s[4], s[5]), _mm256_hadd_epi32(s[6], s[7]));
    const __m256i exact = _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                                           _mm256_permute2x128_si256(low, high, 0x31));
    totals[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), _mm256_loadu_ps(x[t].scales + group * kGroup), totals[t]);
  }
}

// T rows of activations times one weight row, which is read once, in one stream.
template <bool nibbles, int T>
void blocks_few(const Matrix& w, int64_t row, const BlockRow<nibbles>* x, float* y, int64_t y_stride) {
  alignas(32) uint8_t padded[WeightGroup<nibbles>::kPadded];
  __m256 totals[T];
  for (int t = 0; t < T; ++t) totals[t] = _mm256_setzero_ps();
  for (int64_t group = 0; group < BlockRow<nibbles>::groups(w.columns); ++group)
    add_group<T>(WeightGroup<nibbles>(w, row, group, padded), group, x, totals);
  for (int t = 0; t < T; ++t) y[t * y_stride] = lane_sum(totals[t]);
}

// rows[r] dword c -> rows[c] dword r
inline void transpose(__m256i rows[8]) {
  __m256i pairs[8], quads[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      quads[i + 2 * j] = _mm256_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
      quads[i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2x128_si256(quads[i], quads[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2x128_si256(quads[i], quads[i + 4], 0x31);
  }
}

// Eight weight rows side by side: for each lane, for each group, the block's columns in dwords of 4 (nibbles) or 2
// (int16), one dword of every row a vector; and for nibbles the rows' scales.
template <bool nibbles>
struct Panel {
  static constexpr int kVectors = nibbles ? 8 : 16;

  __m256i* weights;  // [lane][group][kVectors]
  __m256* scales;    // [lane][group]

  static int64_t vectors(int64_t columns) {
    return BlockRow<nibbles>::groups(columns) * kGroup * (kVectors + (nibbles ? 1 : 0));
  }
  Panel(__m256i* memory, int64_t columns)
      : weights(memory),
        scales(reinterpret_cast<__m256*>(memory + BlockRow<nibbles>::groups(columns) * kGroup * kVectors)) {}
};

// Rows [first, first + 8) of w; beyond `last` the last one is repeated.
inline void fill(const Panel<true>& panel, const Matrix& w, int64_t first, int64_t last) {
  const int64_t groups = BlockRow<true>::groups(w.columns);
  alignas(32) uint8_t padded[8][WeightGroup<true>::kPadded];
  for (int64_t group = 0; group < groups; ++group) {
    __m256i scales[8];
    const uint8_t* data[8];
    for (int r = 0; r < 8; ++r) {
      const WeightGroup<true> own(w, first + r < last ? first + r : last - 1, group, padded[r]);
      data[r] = own.data;
      scales[r] = _mm256_castps_si256(nibble_scales(own.scales));
    }
    transpose(scales);
    for (int lane = 0; lane < kGroup; ++lane) panel.scales[lane * groups + group] = _mm256_castsi256_ps(scales[lane]);
    for (int p = 0; p < 4; ++p) {
      __m256i even[8], odd[8];
      for (int r = 0; r < 8; ++r) raise_nibbles(data[r] + 32 * p, even[r], odd[r]);
      transpose(even);
      transpose(odd);
      for (int i = 0; i < 8; ++i) {  // the first four dwords are of block 2p, in lane p, the others of the next
        __m256i* to = panel.weights + ((p + i / 4 * 4) * groups + group) * 8 + i % 4;
        to[0] = even[i];
        to[4] = odd[i];
      }
    }
  }
}

inline void fill(const Panel<false>& panel, const Matrix& w, int64_t first, int64_t last) {
  const int64_t groups = BlockRow<false>::groups(w.columns);
  alignas(32) uint8_t padded[8][WeightGroup<false>::kPadded];
  for (int64_t group = 0; group < groups; ++group) {
    const uint8_t* data[8];
    for (int r = 0; r < 8; ++r)
      data[r] = WeightGroup<false>(w, first + r < last ? first + r : last - 1, group, padded[r]).data;
    for (int half = 0; half < 2 * kGroup; ++half) {
      __m256i words[8];
      for (int r = 0; r < 8; ++r)
        words[r] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data[r] + 16 * half)));
      transpose(words);
      __m256i* to = panel.weights + (half / 2 * groups + group) * 16 + half % 2 * 8;
      for (int i = 0; i < 8; ++i) to[i] = words[i];
    }
  }
}

// Rows of activations lane by lane: a pass over one lane then reads memory in one stream, which the first cache holds.
template <bool nibbles>
struct LaneRows {
  using Value = typename BlockRow<nibbles>::Value;
  static constexpr int64_t kRows = 128;  // at most; their lanes fit the second cache

  Value* values;     // [lane][row][group][32], of nibbles a block's even columns, then the odd ones
  float* scales;     // [lane][row][group]
  int32_t* offsets;  // [lane][row][group]
  int64_t rows, groups;

  LaneRows(Scratch& scratch, const BlockRow<nibbles>* x, int64_t rows, int64_t groups) : rows(rows), groups(groups) {
    const int64_t blocks = rows * groups * kGroup;
    values = scratch.take<Value>(blocks * kBlock);
    scales = scratch.take<float>(blocks);
    offsets = scratch.take<int32_t>(blocks);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t group = 0; group < groups; ++group)
        for (int lane = 0; lane < kGroup; ++lane) copy(x[row], row, group, lane);
  }

  int64_t at(int lane, int64_t row) const { return (lane * rows + row) * groups; }

 private:
  void copy(const BlockRow<nibbles>& x, int64_t row, int64_t group, int lane) const {
    constexpr int64_t kBytes = sizeof(Value) * kBlock / 2;
    const Value* from = x.values + group * kGroupColumns + BlockRow<nibbles>::place(lane, 0);
    Value* to = values + (at(lane, row) + group) * kBlock;
    std::memcpy(to, from, kBytes);
    std::memcpy(to + kBlock / 2, from + (nibbles ? kBlock : kBlock / 2), kBytes);
    scales[at(lane, row) + group] = x.scales[group * kGroup + lane];
    offsets[at(lane, row) + group] = x.offsets[group * kGroup + lane];
  }
};

// One lane of T rows of activations times eight weight rows; totals are `kGroup` vectors apart.
template <int T>
void add_lane(const Panel<true>* panels, int lane, const LaneRows<true>& x, int64_t row, __m256* totals) {
  const int64_t groups = x.groups;
  const int8_t* values[T];
  __m256 sums[T];
  for (int t = 0; t < T; ++t) {
    values[t] = x.values + x.at(lane, row + t) * kBlock;
    sums[t] = _mm256_setzero_ps();
  }
  const float* scales = x.scales + x.at(lane, row);
  const int32_t* offsets = x.offsets + x.at(lane, row);
  for (int64_t group = 0; group < groups; ++group) {
    const __m256i* from = panels->weights + (lane * groups + group) * 8;
    __m256i w[8];
    for (int i = 0; i < 8; ++i) w[i] = from[i];
    const __m256 row_scales = panels->scales[lane * groups + group];
    for (int t = 0; t < T; ++t) {
      const int8_t* own = values[t] + group * kBlock;
      const __m256i first = quad_sums(4, [&](int i) { return w[i]; }, [&](int i) { return broadcast32(own + 4 * i); });
      const __m256i second =
          quad_sums(4, [&](int i) { return w[4 + i]; }, [&](int i) { return broadcast32(own + 16 + 4 * i); });
      const __m256i exact = _mm256_add_epi32(_mm256_add_epi32(first, second), broadcast32(offsets + t * groups + group));
      const __m256 scale = _mm256_mul_ps(row_scales, _mm256_set1_ps(scales[t * groups + group]));
      sums[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), scale, sums[t]);
    }
  }
  for (int t = 0; t < T; ++t) totals[t * kGroup] = sums[t];
}

// The same for two panels; the totals of the second lie LaneRows::kRows * kGroup vectors further.
template <int T>
void add_lane(const Panel<false>* panels, int lane, const LaneRows<false>& x, int64_t row, __m256* totals) {
  constexpr int R = kByteRows;
  const int64_t groups = x.groups;
  const int16_t* values = x.values + x.at(lane, row) * kBlock;
  const float* scales = x.scales + x.at(lane, row);
  __m256 sums[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) sums[r][t] = _mm256_setzero_ps();
  for (int64_t group = 0; group < groups; ++group) {
    const __m256i *first = panels[0].weights + (lane * groups + group) * 16,
                  *second = panels[1].weights + (lane * groups + group) * 16;
    __m256i exact[R][T];
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) exact[r][t] = _mm256_setzero_si256();
    for (int i = 0; i < 16; ++i)
      for (int t = 0; t < T; ++t) {
        const __m256i pair = broadcast32(values + (t * groups + group) * kBlock + 2 * i);
        exact[0][t] = add_pairs(exact[0][t], first[i], pair);
        exact[1][t] = add_pairs(exact[1][t], second[i], pair);
      }
    for (int t = 0; t < T; ++t) {
      const __m256 scale = _mm256_set1_ps(scales[t * groups + group]);
      for (int r = 0; r < R; ++r) sums[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact[r][t]), scale, sums[r][t]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) totals[(r * LaneRows<false>::kRows + t) * kGroup] = sums[r][t];
}

inline void store_rows(__m256 values, int64_t rows, float* y) {
  if (rows >= 8) return _mm256_storeu_ps(y, values);
  alignas(32) float some[8];
  _mm256_store_ps(some, values);
  for (int64_t r = 0; r < rows; ++r) y[r] = some[r];
}

// All rows of x times the weight rows of the panels, of which `last` are wanted.
template <bool nibbles>
void blocks_panel(const Panel<nibbles>* panels, const LaneRows<nibbles>& x, __m256* totals, int64_t last, float* y,
                  int64_t y_stride) {
  constexpr int kTile = nibbles ? kNibbleTile : kByteTile, kPanels = nibbles ? 1 : kByteRows;
  for (int lane = 0; lane < kGroup; ++lane)
    for (int64_t row = 0; row < x.rows; row += kTile) {
      __m256* to = totals + row * kGroup + lane;
      switch (x.rows - row) {
        case 1: add_lane<1>(panels, lane, x, row, to); break;
        case 2: add_lane<2>(panels, lane, x, row, to); break;
        case 3: add_lane<3>(panels, lane, x, row, to); break;
        default: add_lane<kTile>(panels, lane, x, row, to);
      }
    }
  for (int64_t row = 0; row < x.rows; ++row)
    for (int p = 0; p < kPanels && 8 * p < last; ++p)
      store_rows(lane_sum(totals + (p * LaneRows<nibbles>::kRows + row) * kGroup), last - 8 * p,
                 y + row * y_stride + 8 * p);
}

// `count` rows of activations times weight rows [first, last).
template <bool nibbles>
void blocks_many(const Matrix& w, int64_t first, int64_t last, const BlockRow<nibbles>* x, int64_t count, float* y,
                 int64_t y_stride) {
  constexpr int kPanels = nibbles ? 1 : kByteRows;
  constexpr int64_t kRows = LaneRows<nibbles>::kRows;
  const int64_t groups = BlockRow<nibbles>::groups(w.columns), vectors = Panel<nibbles>::vectors(w.columns);
  for (int64_t token = 0; token < count; token += kRows) {
    Scratch scratch;
    const LaneRows<nibbles> lanes(scratch, x + token, count - token < kRows ? count - token : kRows, groups);
    auto* memory = scratch.take<__m256i>(kPanels * vectors);
    auto* totals = scratch.take<__m256>(kPanels * kRows * kGroup);
    const Panel<nibbles> panels[2] = {{memory, w.columns}, {memory + (kPanels - 1) * vectors, w.columns}};
    for (int64_t row = first; row < last; row += 8 * kPanels) {
      for (int p = 0; p < kPanels; ++p) fill(panels[p], w, row + 8 * p, last);
      blocks_panel<nibbles>(panels, lanes, totals, last - row, y + token * y_stride + row - first, y_stride);
    }
  }
}

}  // namespace perilune::PERILUNE_ISA
