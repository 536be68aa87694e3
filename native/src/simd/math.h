// exp, sigmoid, tanh on vectors, and loops over rows whose length need not be a multiple of the vector.
#pragma once

#include <cstdint>
#include <type_traits>

// Included after simd/<isa>.h.

namespace perilune::PERILUNE_ISA {

// e^x to about 1e-7 relative: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. Below -87.3 the result is 0 to float32's
// smallest normal number, above 88.3 it stays finite; NaN stays NaN.
inline F exp(F x) {
  // the operand order of max and min lets a NaN through
  const F clamped = max(set(-87.33654f), min(set(88.37626f), x));
  const F n = nearest(mul(clamped, set(1.44269504088896341f)));
  F r = fma(n, set(-0.693359375f), clamped);
  r = fma(n, set(2.12194440e-4f), r);
  F p = set(1.9875691500e-4f);
  p = fma(p, r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  p = add(fma(mul(p, r), r, r), set(1.0f));
  return mul(p, power_of_two(n));
}

inline F sigmoid(F x) { return div(set(1.0f), add(set(1.0f), exp(sub(zero(), x)))); }

// A polynomial near zero, where 1 - e^-2x would cancel.
inline F tanh(F x) {
  const F z = mul(x, x);
  F p = set(-5.70498872745e-3f);
  p = fma(p, z, set(2.06390887954e-2f));
  p = fma(p, z, set(-5.37397155531e-2f));
  p = fma(p, z, set(1.33314422036e-1f));
  p = fma(p, z, set(-3.33332819422e-1f));
  const F near = fma(mul(p, z), x, x);
  const F e = exp(mul(set(-2.0f), abs(x)));
  const F magnitude = div(sub(set(1.0f), e), add(set(1.0f), e));
  const F far = select_less(x, zero(), sub(zero(), magnitude), magnitude);
  return select_less(abs(x), set(0.625f), near, far);
}

// beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta) (Kimi K3's SiTU)
inline F situ(F gate, F up, F beta, F linear_beta) {
  const F bounded = mul(beta, tanh(div(gate, beta)));
  return mul(mul(bounded, sigmoid(gate)), mul(linear_beta, tanh(div(up, linear_beta))));
}

inline F silu(F x) { return div(x, add(set(1.0f), exp(sub(zero(), x)))); }

// x as it reads back after being stored as E.
template <typename E>
F rounded_as(F x) {
  if constexpr (std::is_same_v<E, bf16>)
    return rounded_bf16(x);
  else
    return x;
}

// The vector starting at p when only `count` < kLanes elements are there; the rest is zero.
template <typename E>
F load_some(const E* p, int64_t count) {
  E padded[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
  return load(padded);
}
template <typename E>
void store_some(E* p, F a, int64_t count) {
  E padded[kLanes];
  store(padded, a);
  for (int64_t i = 0; i < count; ++i) p[i] = padded[i];
}

// Calls body(load, store, i) over [0, count) in vectors; the last may be partial: `load(p)` and `store(p, v)` know it.
template <typename Body>
void for_vectors(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    body([](const auto* p) { return load(p); }, [](auto* p, F a) { store(p, a); }, i);
  if (i == count) return;
  const int64_t rest = count - i;
  body([rest](const auto* p) { return load_some(p, rest); }, [rest](auto* p, F a) { store_some(p, a, rest); }, i);
}

// Calls body with a typed null pointer of the element type, so that one template serves both.
template <typename Body>
void with_element(Type type, const Body& body) {
  if (type == Type::f32)
    body(static_cast<const float*>(nullptr));
  else
    body(static_cast<const bf16*>(nullptr));
}

// y[i] = sum(v[i])
inline void sum_all(const F* v, int64_t count, float* y) {
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) store(y + i, sum_each(v + i));
  for (int64_t i = whole; i < count; ++i) y[i] = sum(v[i]);
}

}  // namespace perilune::PERILUNE_ISA
