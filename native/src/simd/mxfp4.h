// MXFP4 elements as bf16: every code under every scale is one of 4096 numbers, so a scaled weight is a look-up.
#pragma once

#include <array>
#include <cstdint>

namespace perilune {

// Bits of code * 2^(scale - 127) as bf16, exact: subnormal below 2^-126, infinite above float32's range, 255 is NaN.
constexpr uint16_t mxfp4_bits(int scale, int code) {
  const int magnitude = code & 7;
  const uint16_t sign = static_cast<uint16_t>((code & 8) << 12);
  if (scale == 255) return sign | 0x7fc0;
  if (magnitude == 0) return sign;
  // 0.5, 1, 1.5, 2, 3, 4, 6: powers of two, and from 1 on their one and a half
  const int exponent = (magnitude >> 1) - 1 + scale, half = magnitude == 1 ? 0 : (magnitude & 1) << 6;
  if (exponent >= 255) return sign | 0x7f80;
  if (exponent >= 1) return static_cast<uint16_t>(sign | exponent << 7 | half);
  return static_cast<uint16_t>(sign | (0x80 | half) >> (1 - exponent));
}

// [scale][code]
constexpr std::array<uint16_t, 4096> make_mxfp4_words() {
  std::array<uint16_t, 4096> words{};
  for (int i = 0; i < 4096; ++i) words[i] = mxfp4_bits(i >> 4, i & 15);
  return words;
}

// [scale][0]: the upper bytes of the sixteen codes, [scale][1]: the lower ones
constexpr std::array<uint8_t, 8192> make_mxfp4_bytes() {
  std::array<uint8_t, 8192> bytes{};
  for (int i = 0; i < 4096; ++i) {
    const uint16_t bits = mxfp4_bits(i >> 4, i & 15);
    bytes[(i >> 4) * 32 + (i & 15)] = static_cast<uint8_t>(bits >> 8);
    bytes[(i >> 4) * 32 + 16 + (i & 15)] = static_cast<uint8_t>(bits & 255);
  }
  return bytes;
}

}  // namespace perilune
