// A KDA layer between its projections: convolutions, norms, decay, beta, the delta rule and the gated norm, head by head,
// so that nothing but the projections and the states is read and nothing but the result is written.
#pragma once

#include "kernels/conv.h"
#include "kernels/kda_chunk.h"
#include "kernels/norm.h"

namespace perilune::PERILUNE_ISA {

// One head of one sequence of a call.
template <typename E, int64_t W, int V>
class HeadMix {
 public:
  HeadMix(const KdaMixArgs& args, int64_t n, int64_t head)
      : args_(args),
        width_(args.width),
        stride_(row_stride(args.width)),
        hidden_(args.heads * args.width),
        at_(head * args.width),
        head_(head),
        slot_(args.state == nullptr && args.conv_state == nullptr ? 0 : args.sequences.slots[n]),
        slope_(std::exp(args.a_log[head])),
        buffers_(scratch_, args.width) {
    for (ConvWindow<E>& window : windows_) window = ConvWindow<E>(scratch_, width_, args.taps);
  }

  // `has_next`: the caller goes on with the head after this one.
  void run(int64_t first, int64_t end, bool has_next) {
    float* state = args_.state == nullptr ? nullptr : args_.state + (slot_ * args_.heads + head_) * width_ * width_;
    for (int stream = 0; stream < 3; ++stream) windows_[stream].begin(conv_state(stream));
    if (end - first == 1)
      run_token(first, state, has_next && state != nullptr ? state + width_ * width_ : nullptr);
    else
      run_chunks(first, end, state);
    for (int stream = 0; stream < 3; ++stream) windows_[stream].end(conv_state(stream));
  }

  // Token by token from the states, which stay as they are; records [tokens, ...] get a row per token.
  void verify(int64_t first, int64_t end, const KdaRecords& records) {
    const ChunkBuffers& b = buffers_;
    float* state = b.panels;
    std::memcpy(state, args_.state + (slot_ * args_.heads + head_) * width_ * width_, sizeof(float) * width_ * width_);
    for (int stream = 0; stream < 3; ++stream) windows_[stream].begin(conv_state(stream));
    for (int64_t t = first; t < end; ++t) {
      load_rows(t, 1);
      delta_step<W>(state, b.q, b.k, b.v, b.decay, b.beta[0], width_, b.inward, b.o);
      record(t, records, b.inward + 3 * width_);
      store_rows(t, 1);
    }
  }

 private:
  void record(int64_t t, const KdaRecords& records, const float* correction) const {
    const void* const inputs[3] = {args_.q, args_.k, args_.v};
    for (int64_t stream = 0; stream < 3; ++stream)
      std::memcpy(static_cast<E*>(records.inputs) + (3 * t + stream) * hidden_ + at_, row(inputs[stream], t),
                  sizeof(E) * width_);
    const int64_t to = t * hidden_ + at_;
    for (int64_t c = 0; c < width_; c += kLanes) store(static_cast<E*>(records.keys) + to + c, load(buffers_.k + c));
    std::memcpy(records.decays + to, buffers_.decay, sizeof(float) * width_);
    std::memcpy(records.corrections + to, correction, sizeof(float) * width_);
  }

  void run_token(int64_t t, float* state, const float* next_state) {
    if (state == nullptr) {
      state = buffers_.panels;
      std::memset(state, 0, sizeof(float) * width_ * width_);
    }
    const ChunkBuffers& b = buffers_;
    load_rows(t, 1);
    delta_step<W>(state, b.q, b.k, b.v, b.decay, b.beta[0], width_, b.inward, b.o, next_state);
    store_rows(t, 1);
  }

  void run_chunks(int64_t first, int64_t end, float* state) {
    load_panels(state, width_, buffers_.panels);
    for (int64_t t = first; t < end; t += kChunkRows) {
      const int64_t rows = end - t < kChunkRows ? end - t : kChunkRows;
      load_rows(t, rows);
      prefetch_rows(t + rows, end - t - rows < kChunkRows ? end - t - rows : kChunkRows);
      delta_chunk<W, V>(buffers_, rows, width_);
      store_rows(t, rows);
    }
    store_panels(buffers_.panels, width_, state);
  }

  ConvState conv_state(int64_t stream) const {
    const int64_t channels = 3 * hidden_;
    return {args_.conv_state, args_.conv_type, slot_ * (args_.taps - 1) * channels + stream * hidden_ + at_, channels};
  }

  // The head's part of row t of [tokens, heads * width].
  const E* row(const void* x, int64_t t) const { return static_cast<const E*>(x) + t * hidden_ + at_; }

  // Rows t .. t + rows of q, k, v, decay and beta into the buffers.
  void load_rows(int64_t t, int64_t rows) {
    const ChunkBuffers& b = buffers_;
    const void* const inputs[3] = {args_.q, args_.k, args_.v};
    const float* const weights[3] = {args_.q_conv, args_.k_conv, args_.v_conv};
    float* const outputs[3] = {b.q, b.k, b.v};
    for (int stream = 0; stream < 3; ++stream) {
      windows_[stream].take(row(inputs[stream], t), hidden_, rows);
      windows_[stream].convolve(weights[stream] + at_ * args_.taps, rows, outputs[stream], stride_);
      windows_[stream].advance(rows);
    }
    for (int64_t i = 0; i < rows; ++i) {
      l2_normalise<E>(b.q + i * stride_, width_, args_.l2_eps, 1.0f / std::sqrt(static_cast<float>(width_)));
      l2_normalise<E>(b.k + i * stride_, width_, args_.l2_eps, 1.0f);
      // the two exponentials in loops of their own: one after the other they would wait for each other
      const E* z = row(args_.z, t + i);
      float* decay = b.decay + i * stride_;
      for (int64_t c = 0; c < width_; c += kLanes)
        store(decay + c, log_decay(load(z + c), load(args_.dt_bias + at_ + c), slope_, args_.lower_bound));
      for (int64_t c = 0; c < width_; c += kLanes) store(decay + c, exp(load(decay + c)));
      b.beta[i] = 1.0f / (1.0f + std::exp(-widen(static_cast<const E*>(args_.beta)[(t + i) * args_.heads + head_])));
    }
  }

  // A head's rows lie so far apart that the processor does not foresee the next one.
  void prefetch_rows(int64_t t, int64_t rows) const {
    for (int64_t i = 0; i < rows; ++i)
      for (const void* x : {args_.q, args_.k, args_.v, args_.z, args_.gate})
        for (int64_t c = 0; c < width_; c += 64 / static_cast<int64_t>(sizeof(E))) prefetch(row(x, t + i) + c);
  }

  void store_rows(int64_t t, int64_t rows) const {
    for (int64_t i = 0; i < rows; ++i) {
      float* o = buffers_.o + i * stride_;
      for (int64_t c = 0; c < width_; c += kLanes) store(o + c, rounded_as<E>(load(o + c)));
      gated_rms_norm_row(o, row(args_.gate, t + i), args_.norm_weight, width_, args_.norm_eps,
                         static_cast<E*>(args_.o) + (t + i) * hidden_ + at_);
    }
  }

  const KdaMixArgs& args_;
  const int64_t width_, stride_, hidden_, at_, head_, slot_;
  const float slope_;
  Scratch scratch_;
  ChunkBuffers buffers_;
  ConvWindow<E> windows_[3];
};

// Chunks are (sequence, run of heads): one head where sequences are long, and where all have one token enough of them
// to pay for taking a chunk.
inline void kda_mix(const KdaMixArgs& args) {
  const Sequences& sequences = args.sequences;
  const int64_t tokens = sequences.cu_seqlens[sequences.count] - sequences.cu_seqlens[0];
  int64_t run = tokens > sequences.count ? 1 : sequences.count * args.heads / (8 * num_threads());
  run = run < 1 ? 1 : run > 8 ? 8 : run;
  const int64_t runs = (args.heads + run - 1) / run;
  with_element(args.type, [&](auto* e) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(e)>>;
    with_chunk_form(args.width, [&](auto constant, auto vectors) {
      parallel(sequences.count * runs, [&](int64_t chunk) {
        const int64_t n = chunk / runs, first = chunk % runs * run;
        const int64_t last = first + run < args.heads ? first + run : args.heads;
        for (int64_t head = first; head < last; ++head)
          HeadMix<E, decltype(constant)::value, decltype(vectors)::value>(args, n, head)
              .run(sequences.cu_seqlens[n], sequences.cu_seqlens[n + 1], head + 1 < last);
      });
    });
  });
}

}  // namespace perilune::PERILUNE_ISA
