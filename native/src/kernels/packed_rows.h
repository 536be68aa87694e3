// Cached rows of 8 or 4 bits a value, see ops/packed_rows: how they are written, and read into blocks of floats.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/attention_rows.h"
#include "kernels/quantize.h"
#include "kernels/rows.h"

namespace perilune::PERILUNE_ISA {

constexpr int64_t kScaleGroup = 128;  // values of 8 bits that share a scale
constexpr int64_t kPairGroup = 32;    // values of 4 bits that do

inline float of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float load_float(const uint8_t* p) {
  float x;
  std::memcpy(&x, p, 4);
  return x;
}
inline float of_e8m0(uint8_t exponent) {
  if (exponent == 255) return of_bits(0x7fc00000u);
  return of_bits(exponent == 0 ? 0x00400000u : static_cast<uint32_t>(exponent) << 23);
}

template <typename E>
float largest_magnitude(const E* x, int64_t count, bool& is_finite) {
  float most = 0.0f;
  is_finite = true;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(widen(x[i]));
    is_finite &= bits_of(magnitude) < 0x7f800000u;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

// Values of 8 bits, each divided by the group's power of two and rounded once.
template <typename E>
void pack_bytes(const E* x, int64_t count, Type to, uint8_t* values, uint8_t* scales) {
  for (int64_t first = 0; first < count; first += kScaleGroup, scales += 4) {
    const int64_t size = std::min(kScaleGroup, count - first);
    bool is_finite;
    const float most = largest_magnitude(x + first, size, is_finite);
    const float reach = (most > 1e-30f ? most : 1e-30f) / (to == Type::i8 ? 127.0f : 448.0f);
    const float power = of_bits((bits_of(reach) + 0x7fffffu) & 0xff800000u);
    const float factor = is_finite ? 1.0f / power : 0.0f, scale = is_finite ? power : of_bits(0x7fc00000u);
    for (int64_t i = first; i < first + size; ++i) {
      const float value = is_finite ? widen(x[i]) * factor : 0.0f;
      values[i] = to == Type::i8 ? to_i8(value) : to_f8(value);
    }
    std::memcpy(scales, &scale, 4);
  }
}

// The nearest E2M1 number, halves towards zero.
inline uint8_t to_e2m1(float x) {
  const float m = std::fabs(x);
  const int code = (m > 0.25f) + (m > 0.75f) + (m > 1.25f) + (m > 1.75f) + (m > 2.5f) + (m > 3.5f) + (m > 5.0f);
  return static_cast<uint8_t>(code | (x < 0.0f) << 3);
}

template <typename E>
void pack_pairs(const E* x, int64_t count, uint8_t* pairs, uint8_t* scales) {
  for (int64_t first = 0; first < count; first += kPairGroup, ++scales, pairs += kPairGroup / 2) {
    bool is_finite;
    int exponent;
    const float mantissa = std::frexp(largest_magnitude(x + first, kPairGroup, is_finite), &exponent);
    const int biased = std::clamp(exponent - 3 + (mantissa >= 0.875f) + 127, 0, 254);
    const float factor = is_finite ? std::ldexp(1.0f, 127 - biased) : 0.0f;
    *scales = is_finite ? static_cast<uint8_t>(biased) : 255;
    for (int64_t i = 0; i < kPairGroup; i += 2) {
      const E* at = x + first + i;
      const uint8_t low = is_finite ? to_e2m1(widen(at[0]) * factor) : 0;
      const uint8_t high = is_finite ? to_e2m1(widen(at[1]) * factor) : 0;
      pairs[i / 2] = static_cast<uint8_t>(low | high << 4);
    }
  }
}

inline int64_t scale_bytes(int64_t scaled) { return (scaled + kScaleGroup - 1) / kScaleGroup * 4; }

template <typename E>
void pack_row(const E* x, int64_t scaled, int64_t columns, Type to, uint8_t* out) {
  if (to == Type::mxfp4) return pack_pairs(x, scaled, out, out + scaled / 2);
  pack_bytes(x, scaled, to, out, out + scaled);
  uint8_t* further = out + scaled + scale_bytes(scaled);
  for (int64_t i = scaled; i < columns; ++i, further += 2) {
    const bf16 value = to_bf16(widen(x[i]));
    std::memcpy(further, &value, 2);
  }
}

inline void store_packed_rows(const StorePackedArgs& args) {
  check_rows(args.slots, args.tokens, args.num_rows, "store_packed_rows: a slot is not a row of the pool");
  // in order, so that of equal slots the last row stays
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    for (int64_t token = 0; token < args.tokens; ++token)
      pack_row(static_cast<const E*>(args.x) + token * args.columns, args.scaled, args.columns, args.to,
               static_cast<uint8_t*>(args.pool) + args.slots[token] * args.row_bytes);
  });
}

// What a row of a pool is: numbers of a type, or packed with the first `scaled` of `width` columns quantised.
struct RowFormat {
  Type type;
  int64_t scaled, width;
};

// The quantised columns of a packed row, each of which is a bf16 number, into strips.
template <typename V>
void read_scaled(const uint8_t* row, const RowFormat& format, V* block, int64_t block_rows) {
  const int64_t group = format.type == Type::mxfp4 ? kPairGroup : kScaleGroup;
  const uint8_t* scales = row + type_bytes(format.type, format.scaled);
  for (int64_t first = 0; first < format.scaled; first += group) {
    const bool is_pairs = format.type == Type::mxfp4;
    const F scale = set(is_pairs ? of_e8m0(scales[first / group]) : load_float(scales + first / group * 4));
    const int64_t end = std::min(first + group, format.scaled);
    for (int64_t c = first; c < end; c += kLanes) {
      F value;
      if (is_pairs)
        value = load_e2m1(row + c / 2);
      else if (format.type == Type::f8)
        value = load_f8(row + c);
      else
        value = load_i8(reinterpret_cast<const int8_t*>(row + c));
      store(block + column_at<V>(block_rows, c), mul(value, scale));
    }
  }
}

// Rows into strips of `block_rows` rows.
template <typename V>
void read_rows(const RowFormat& format, const void* const* rows, int64_t count, V* block, int64_t block_rows) {
  if (format.type == Type::f32) return read_rows<float>(rows, count, format.width, block, block_rows);
  if (format.type == Type::bf16) return read_rows<bf16>(rows, count, format.width, block, block_rows);
  for (int64_t i = 0; i < count; ++i) {
    const auto* row = static_cast<const uint8_t*>(rows[i]);
    V* to = block + i * kStripValues<V>;
    read_scaled(row, format, to, block_rows);
    const auto* further = reinterpret_cast<const bf16*>(row + format.scaled + scale_bytes(format.scaled));
    for (int64_t c = format.scaled; c < format.width; c += kLanes, further += kLanes)
      store(to + column_at<V>(block_rows, c), load(further));
    fill_strip(format.width, to, block_rows);
  }
}

}  // namespace perilune::PERILUNE_ISA
