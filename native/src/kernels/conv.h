// Short causal depthwise convolution with SiLU.
#pragma once

#include <cstring>

#include "perilune.h"
#include "simd/math.h"

namespace perilune::PERILUNE_ISA {

constexpr int64_t kMaxTaps = 8;

// Where a sequence's last taps - 1 inputs lie: row j starts at element offset + j * stride. Null: none, zeros before it.
struct ConvState {
  void* data;
  Type type;
  int64_t offset, stride;
};

// Inputs of `width` channels (a multiple of 16) of one sequence as floats of E's precision, oldest first: the taps - 1
// rows before the current ones, then the current ones, at most kRows.
template <typename E>
class ConvWindow {
 public:
  static constexpr int64_t kRows = 16;

  ConvWindow() = default;
  ConvWindow(Scratch& scratch, int64_t width, int64_t taps)
      : rows_(scratch.take<float>((taps - 1 + kRows) * (width + 16))), width_(width), stride_(width + 16), taps_(taps) {}

  void begin(const ConvState& state) {
    const int64_t history = taps_ - 1;
    if (state.data == nullptr) {
      std::memset(rows_, 0, sizeof(float) * history * stride_);
      return;
    }
    with_element(state.type, [&](auto* typed) {
      const auto* from = static_cast<decltype(typed)>(state.data) + state.offset;
      for (int64_t row = 0; row < history; ++row)
        for (int64_t c = 0; c < width_; c += kLanes)
          store(rows_ + row * stride_ + c, rounded_as<E>(load(from + row * state.stride + c)));
    });
  }

  void take(const E* x, int64_t stride, int64_t count) {
    float* to = rows_ + (taps_ - 1) * stride_;
    for (int64_t row = 0; row < count; ++row)
      for (int64_t c = 0; c < width_; c += kLanes) store(to + row * stride_ + c, load(x + row * stride + c));
  }

  // y [count, width], rows y_stride apart, of the current rows, rounded to E; weight [width, taps].
  void convolve(const float* weight, int64_t count, float* y, int64_t y_stride) const {
    if (taps_ == 4)
      convolve_taps<4>(weight, count, y, y_stride);
    else
      convolve_taps<0>(weight, count, y, y_stride);
  }

  void advance(int64_t count) { std::memmove(rows_, rows_ + count * stride_, sizeof(float) * (taps_ - 1) * stride_); }

  void end(const ConvState& state) const {
    if (state.data == nullptr) return;
    with_element(state.type, [&](auto* typed) {
      using S = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
      S* to = static_cast<S*>(state.data) + state.offset;
      for (int64_t row = 0; row < taps_ - 1; ++row)
        for (int64_t c = 0; c < width_; c += kLanes) store(to + row * state.stride + c, load(rows_ + row * stride_ + c));
    });
  }

 private:
  template <int64_t Taps>
  void convolve_taps(const float* weight, int64_t count, float* y, int64_t y_stride) const {
    const int64_t taps = Taps > 0 ? Taps : taps_;
    for (int64_t c = 0; c < width_; c += kLanes) {
      F w[Taps > 0 ? Taps : kMaxTaps];
      if constexpr (Taps == 4) {
        load_columns4(weight + 4 * c, w);
      } else {
        for (int64_t tap = 0; tap < kMaxTaps; ++tap) {
          float column[kLanes] = {};
          for (int lane = 0; lane < kLanes && tap < taps; ++lane) column[lane] = weight[(c + lane) * taps + tap];
          w[tap] = load(column);
        }
      }
      for (int64_t row = 0; row < count; ++row) {
        const float* x = rows_ + row * stride_ + c;
        F total = mul(w[0], load(x));
        for (int64_t tap = 1; tap < taps; ++tap) total = fma(w[tap], load(x + tap * stride_), total);
        store(y + row * y_stride + c, rounded_as<E>(silu(total)));
      }
    }
  }

  float* rows_ = nullptr;
  int64_t width_ = 0, stride_ = 0, taps_ = 0;
};

// Chunks are (sequence, block of channels).
inline void short_conv(const ConvArgs& args) {
  constexpr int64_t kBlock = 128;
  const int64_t blocks = (args.channels + kBlock - 1) / kBlock, history = args.taps - 1;
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    parallel(args.sequences.count * blocks, [&](int64_t chunk) {
      const int64_t n = chunk / blocks, channel = chunk % blocks * kBlock;
      const int64_t width = args.channels - channel < kBlock ? args.channels - channel : kBlock;
      const int64_t end = args.sequences.cu_seqlens[n + 1];
      const ConvState state{args.state, args.state_type,
                            args.state == nullptr ? 0 : args.sequences.slots[n] * history * args.channels + channel,
                            args.channels};
      Scratch scratch;
      ConvWindow<E> window(scratch, width, args.taps);
      float* y = scratch.take<float>(window.kRows * width);
      window.begin(state);
      for (int64_t t = args.sequences.cu_seqlens[n]; t < end; t += window.kRows) {
        const int64_t rows = end - t < window.kRows ? end - t : window.kRows;
        window.take(static_cast<const E*>(args.x) + t * args.stride + channel, args.stride, rows);
        window.convolve(args.weight + channel * args.taps, rows, y, width);
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t c = 0; c < width; c += kLanes)
            store(static_cast<E*>(args.y) + (t + row) * args.channels + channel + c, load(y + row * width + c));
        window.advance(rows);
      }
      window.end(state);
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
