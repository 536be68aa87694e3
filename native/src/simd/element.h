// Elements in memory: float and bf16, and how a float becomes one.
#pragma once

#include <cstdint>
#include <cstring>

namespace perilune {

struct bf16 {
  uint16_t bits;
};

// E4M3
struct f8 {
  uint8_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest even; a NaN stays one.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

template <typename E>
E narrow(float x);
template <>
inline float narrow<float>(float x) {
  return x;
}
template <>
inline bf16 narrow<bf16>(float x) {
  return to_bf16(x);
}

// x as it reads back after being stored as E.
template <typename E>
float rounded(float x) {
  return widen(narrow<E>(x));
}

}  // namespace perilune
