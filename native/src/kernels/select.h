// The k largest of many scores, exactly, ties to the lower position.
#pragma once

#include <cstring>

#include "perilune.h"

namespace perilune::PERILUNE_ISA {

// A float as an integer of the same order; both zeros are one, NaN comes first as in torch's sort.
inline uint32_t ordered(float x) {
  if (x != x) return 0xffffffffu;
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;

// Finds the digit at which the k largest end: those above it all count, `rest` of those that have it.
inline uint32_t find_digit(const uint32_t* keys, int64_t count, int shift, int64_t k, int64_t& rest) {
  uint32_t found[2][kDigits] = {};  // two, since neighbours often share a digit
  int64_t i = 0;
  for (; i + 2 <= count; i += 2)
    ++found[0][keys[i] >> shift & (kDigits - 1)], ++found[1][keys[i + 1] >> shift & (kDigits - 1)];
  if (i < count) ++found[0][keys[i] >> shift & (kDigits - 1)];
  uint32_t digit = kDigits - 1;
  for (rest = k;; --digit) {
    const int64_t here = static_cast<int64_t>(found[0][digit]) + found[1][digit];
    if (here >= rest) return digit;
    rest -= here;
  }
}

// Writes the positions of the k largest of `count` > k keys, ascending.
inline void select_largest(const uint32_t* keys, int64_t count, int64_t k, int64_t* positions) {
  constexpr int kShifts[] = {32 - kDigitBits, 32 - 2 * kDigitBits, 0};
  Scratch scratch;
  auto* candidates = scratch.take<uint32_t>(count);
  const uint32_t* from = keys;
  int64_t left = count, ties = k;
  uint32_t threshold = 0;
  for (int shift : kShifts) {
    const int64_t wanted = ties;
    threshold |= find_digit(from, left, shift, wanted, ties) << shift;
    int64_t kept = 0;
    for (int64_t i = 0; i < left; ++i) {
      candidates[kept] = from[i];
      kept += from[i] >> shift == threshold >> shift;
    }
    from = candidates, left = kept;
  }
  for (int64_t i = 0, filled = 0; filled < k; ++i) {
    const bool is_tie = keys[i] == threshold && ties > 0;
    positions[filled] = i;
    filled += keys[i] > threshold || is_tie;
    ties -= is_tie;
  }
}

}  // namespace perilune::PERILUNE_ISA
