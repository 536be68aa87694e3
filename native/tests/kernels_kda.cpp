// The gated delta rule: convolution and decay before it, token by token, in chunks, and a layer's whole of it.
#include <cmath>
#include <cstring>

#include "reference.h"

using namespace perilune;
using namespace perilune::tests;

static constexpr int64_t kSlots = 4;
static constexpr float kL2Eps = 1e-6f, kNormEps = 1e-5f, kLowerBound = -5.0f;
static const Tokens kTokens{{1, 16, 37}};
static const std::vector<int64_t> kSeats = {2, 0, 3};

// Sums of float32 along a sequence, in another form; and of rounded q, k and v.
static double kda_tolerance(Type type) { return type == Type::f32 ? 1e-4 : 3e-2; }

// x / sqrt(sum x^2 + eps), rounded.
static Numbers normalised(Type type, Numbers x) {
  double total = kL2Eps;
  for (double each : x) total += each * each;
  for (double& each : x) each = rounded_to(type, each / std::sqrt(total));
  return x;
}

// state [key, value] after one token, and o [value] of it.
static Numbers delta_step(double* state, const Numbers& q, const Numbers& k, const Numbers& v, const Numbers& g,
                          double beta) {
  const size_t width = q.size();
  Numbers o(width, 0.0);
  for (size_t c = 0; c < width; ++c) {
    double seen = 0.0;
    for (size_t d = 0; d < width; ++d) seen += (state[d * width + c] *= std::exp(g[d])) * k[d];
    for (size_t d = 0; d < width; ++d) {
      state[d * width + c] += beta * (v[c] - seen) * k[d];
      o[c] += state[d * width + c] * q[d] / std::sqrt(static_cast<double>(width));
    }
  }
  return o;
}

static Numbers slice(const Numbers& numbers, int64_t first, int64_t count) {
  return Numbers(numbers.begin() + first, numbers.begin() + first + count);
}

// The states of a run of sequences, one after the other; that of the seat which none has must be as it was.
static Output states_of(const Array& now, const Array& before, int64_t first, int64_t count) {
  const int64_t bytes = now.bytes() / kSlots, free = 1;
  CHECK(std::memcmp(now.as<char>() + free * bytes, before.as<char>() + free * bytes, bytes) == 0);
  Array own(now.type(), count * bytes / type_bytes(now.type(), 1));
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(own.as<char>() + i * bytes, now.as<char>() + kSeats[first + i] * bytes, bytes);
  return output(own);
}
static Numbers states_of(const Numbers& state) {
  Numbers own;
  const int64_t each = static_cast<int64_t>(state.size()) / kSlots;
  for (int64_t seat : kSeats) own.insert(own.end(), state.begin() + seat * each, state.begin() + (seat + 1) * each);
  return own;
}

// ---- convolution and decay ------------------------------------------------------------------------------------------

// y [tokens, channels] and the state [slots, taps - 1, channels] that is left; `state` may be empty.
static Numbers convolved(Type type, const Numbers& x, int64_t channels, const Numbers& weight, int64_t taps,
                         Numbers& state) {
  Numbers y;
  for (size_t n = 0; n < kSeats.size(); ++n) {
    const int64_t first = kTokens.before(static_cast<int64_t>(n)), count = kTokens.counts[n], history = taps - 1;
    const auto input = [&](int64_t t, int64_t c) {  // t counts from the call's first token of the sequence
      if (t >= 0) return x[(first + t) * channels + c];
      return state.empty() ? 0.0 : rounded_to(type, state[(kSeats[n] * history + history + t) * channels + c]);
    };
    for (int64_t t = 0; t < count; ++t)
      for (int64_t c = 0; c < channels; ++c) {
        double total = 0.0;
        for (int64_t tap = 0; tap < taps; ++tap) total += weight[c * taps + tap] * input(t - history + tap, c);
        y.push_back(rounded_to(type, silu(total)));
      }
    Numbers left;
    for (int64_t t = count - history; t < count; ++t)
      for (int64_t c = 0; c < channels; ++c) left.push_back(input(t, c));
    if (!state.empty()) std::copy(left.begin(), left.end(), state.begin() + kSeats[n] * history * channels);
  }
  return y;
}

TEST(short_conv) {
  std::mt19937 random(41);
  const int64_t tokens = kTokens.before(3);
  for (Type type : kActivations)
    for (Type state_type : kActivations)
      for (auto [channels, taps] : {std::pair<int64_t, int64_t>{16, 4}, {48, 2}, {144, 4}, {272, 8}})
        for (bool has_state : {false, true}) {
          const int64_t stride = channels + 16;
          const Array x = random_array(type, tokens * stride - 16, random, 2),
                      weight = random_array(Type::f32, channels * taps, random);
          const Array state = random_array(state_type, has_state ? kSlots * (taps - 1) * channels : 0, random);
          Numbers inputs, left = numbers_of(state);
          for (int64_t token = 0; token < tokens; ++token)
            for (double each : numbers_of(type, x.at(token * stride), channels)) inputs.push_back(each);
          const Numbers y = convolved(type, inputs, channels, numbers_of(weight), taps, left);
          if (state_type == Type::bf16)
            for (double& each : left) each = rounded_to(Type::bf16, each);
          check_laws("short_conv " + shown(type) + " " + shown(state_type), 3, tolerance_of(type),
                     [&](const Kernels& kernels, int64_t first, int64_t count) {
                       const Array own = state.copy();
                       const std::vector<int64_t> bounds = kTokens.bounds(first, count);
                       Array y(type, bounds.back() * channels);
                       kernels.short_conv({x.at(kTokens.before(first) * stride),
                                           type,
                                           channels,
                                           taps,
                                           stride,
                                           weight.as<float>(),
                                           has_state ? own.data() : nullptr,
                                           state_type,
                                           {bounds.data(), kSeats.data() + first, count},
                                           y.data()});
                       return std::vector<Output>{output(y), states_of(own, state, first, count)};
                     },
                     {y, states_of(left)});
        }
}

static Numbers decays(const Numbers& z, int64_t heads, int64_t width, const Numbers& a_log, const Numbers& bias) {
  Numbers g;
  for (size_t i = 0; i < z.size(); ++i) {
    const int64_t column = static_cast<int64_t>(i) % (heads * width);
    g.push_back(kLowerBound * sigmoid(std::exp(a_log[column / width]) * (z[i] + bias[column])));
  }
  return g;
}

TEST(kda_decay) {
  std::mt19937 random(42);
  for (Type type : kActivations)
    for (auto [heads, width] : {std::pair<int64_t, int64_t>{1, 16}, {3, 7}, {5, 48}})
      for (int64_t tokens : {0, 1, 23}) {
        const int64_t columns = heads * width;
        const Array z = random_array(type, tokens * columns, random, 20),
                    a_log = random_array(Type::f32, heads, random);
        const Array bias = random_array(Type::f32, columns, random);
        check_laws("kda_decay " + shown(type), tokens, kFloat32,
                   [&](const Kernels& kernels, int64_t first, int64_t count) {
                     Array g(Type::f32, count * columns);
                     kernels.kda_decay({z.at(first * columns), type, count, heads, width, a_log.as<float>(),
                                        bias.as<float>(), kLowerBound, g.as<float>()});
                     return std::vector<Output>{output(g)};
                   },
                   {decays(numbers_of(z), heads, width, numbers_of(a_log), numbers_of(bias))});
      }
}

// ---- the rule -------------------------------------------------------------------------------------------------------

// o [tokens, heads, width] and the states; q, k, v of the same shape, before they are normalised.
static Numbers delta_rule(Type type, int64_t heads, int64_t width, const Numbers& q, const Numbers& k, const Numbers& v,
                          const Numbers& g, const Numbers& beta, Numbers& state) {
  Numbers o(q.size());
  for (size_t n = 0; n < kSeats.size(); ++n)
    for (int64_t head = 0; head < heads; ++head) {
      Numbers own(static_cast<size_t>(width * width), 0.0);
      const int64_t seat = (kSeats[n] * heads + head) * width * width, first = kTokens.before(static_cast<int64_t>(n));
      if (!state.empty()) own = slice(state, seat, width * width);
      for (int64_t token = first; token < first + kTokens.counts[n]; ++token) {
        const int64_t at = (token * heads + head) * width;
        const Numbers row =
            delta_step(own.data(), normalised(type, slice(q, at, width)), normalised(type, slice(k, at, width)),
                       slice(v, at, width), slice(g, at, width), beta[token * heads + head]);
        std::copy(row.begin(), row.end(), o.begin() + at);
      }
      if (!state.empty()) std::copy(own.begin(), own.end(), state.begin() + seat);
    }
  return o;
}

// q, k and v as a projection leaves them: side by side in a token's row.
static Numbers stream(const Array& rows, int64_t tokens, int64_t hidden, int64_t which) {
  Numbers numbers;
  for (int64_t token = 0; token < tokens; ++token)
    for (double each : numbers_of(rows.type(), rows.at((token * 3 + which) * hidden), hidden)) numbers.push_back(each);
  return numbers;
}

TEST(kda_recurrent_and_chunk) {
  std::mt19937 random(43);
  const int64_t tokens = kTokens.before(3);
  for (Type type : kActivations)
    for (auto [heads, width] : {std::pair<int64_t, int64_t>{3, 16}, {2, 48}, {1, 128}, {5, 32}})
      for (bool has_state : {false, true}) {
        const int64_t hidden = heads * width;
        const Array rows = random_array(type, tokens * 3 * hidden, random, 2);
        const Array g = random_floats(tokens * hidden, -5.0f, 0.0f, random),
                    beta = random_floats(tokens * heads, 0, 1, random);
        const Array state = random_array(Type::f32, has_state ? kSlots * heads * width * width : 0, random);
        Numbers left = numbers_of(state);
        const Numbers o =
            delta_rule(type, heads, width, stream(rows, tokens, hidden, 0), stream(rows, tokens, hidden, 1),
                       stream(rows, tokens, hidden, 2), numbers_of(g), numbers_of(beta), left);
        for (auto kernel : {&Kernels::kda_recurrent, &Kernels::kda_chunk})
          check_laws((kernel == &Kernels::kda_chunk ? "kda_chunk " : "kda_recurrent ") + shown(type) + " " +
                         std::to_string(width),
                     3, kda_tolerance(type),
                     [&](const Kernels& kernels, int64_t first, int64_t count) {
                       const Array own = state.copy();
                       const std::vector<int64_t> bounds = kTokens.bounds(first, count);
                       const int64_t before = kTokens.before(first), at = before * 3 * hidden;
                       Array o(type, bounds.back() * hidden);
                       (kernels.*kernel)({rows.at(at),
                                          rows.at(at + hidden),
                                          rows.at(at + 2 * hidden),
                                          type,
                                          heads,
                                          width,
                                          3 * hidden,
                                          3 * hidden,
                                          3 * hidden,
                                          g.as<float>() + before * hidden,
                                          beta.as<float>() + before * heads,
                                          kL2Eps,
                                          has_state ? own.as<float>() : nullptr,
                                          {bounds.data(), kSeats.data() + first, count},
                                          o.data()});
                       return std::vector<Output>{output(o), states_of(own, state, first, count)};
                     },
                     {o, states_of(left)});
      }
}

// ---- a layer --------------------------------------------------------------------------------------------------------

struct LayerArrays {
  Type type;
  int64_t heads, width, taps, tokens, hidden;
  std::vector<Array> streams, convs;  // q, k, v, z, gate; those of q, k and v
  Array beta, a_log, bias, norm;

  LayerArrays(Type type, int64_t heads, int64_t width, int64_t taps, std::mt19937& random)
      : type(type),
        heads(heads),
        width(width),
        taps(taps),
        tokens(kTokens.before(3)),
        hidden(heads * width),
        beta(random_array(type, tokens * heads, random, 3)),
        a_log(random_array(Type::f32, heads, random)),
        bias(random_array(Type::f32, hidden, random)),
        norm(random_array(Type::f32, width, random)) {
    for (int i = 0; i < 5; ++i) streams.push_back(random_array(type, tokens * hidden, random, 2));
    for (int i = 0; i < 3; ++i) convs.push_back(random_array(Type::f32, hidden * taps, random));
  }

  // o [tokens, hidden], and what is left of the states, which may be empty.
  Numbers expected(Numbers& state, Numbers& conv_state) const {
    Numbers qkv[3];
    for (int i = 0; i < 3; ++i) {
      Numbers own;  // the stream's columns of the state
      for (int64_t row = 0; !conv_state.empty() && row < kSlots * (taps - 1); ++row)
        for (int64_t c = 0; c < hidden; ++c) own.push_back(conv_state[(row * 3 + i) * hidden + c]);
      qkv[i] = convolved(type, numbers_of(streams[i]), hidden, numbers_of(convs[i]), taps, own);
      for (size_t at = 0; at < own.size(); ++at) conv_state[(at / hidden * 3 + i) * hidden + at % hidden] = own[at];
    }
    Numbers writes = numbers_of(beta);
    for (double& each : writes) each = sigmoid(each);
    Numbers o =
        delta_rule(type, heads, width, qkv[0], qkv[1], qkv[2],
                   decays(numbers_of(streams[3]), heads, width, numbers_of(a_log), numbers_of(bias)), writes, state);
    for (size_t first = 0; first < o.size(); first += width) {
      double total = 0.0;
      for (int64_t c = 0; c < width; ++c)
        o[first + c] = rounded_to(type, o[first + c]), total += o[first + c] * o[first + c];
      for (int64_t c = 0; c < width; ++c)
        o[first + c] *= number_of(Type::f32, norm.data(), c) / std::sqrt(total / width + kNormEps) *
                        sigmoid(number_of(type, streams[4].data(), static_cast<int64_t>(first) + c));
    }
    return o;
  }
};

TEST(kda_mix) {
  std::mt19937 random(44);
  for (Type type : kActivations)
    for (auto [heads, width, taps] : {std::tuple<int64_t, int64_t, int64_t>{3, 16, 4}, {2, 48, 3}, {1, 128, 4}})
      for (bool has_state : {false, true})
        for (Type conv_type : kActivations) {
          const LayerArrays layer(type, heads, width, taps, random);
          const Array state = random_array(Type::f32, has_state ? kSlots * heads * width * width : 0, random);
          const Array window = random_array(conv_type, has_state ? kSlots * (taps - 1) * 3 * layer.hidden : 0, random);
          Numbers left = numbers_of(state), window_left = numbers_of(window);
          const Numbers o = layer.expected(left, window_left);
          if (conv_type == Type::bf16)
            for (double& each : window_left) each = rounded_to(Type::bf16, each);
          check_laws("kda_mix " + shown(type) + " " + std::to_string(width), 3, kda_tolerance(type),
                     [&](const Kernels& kernels, int64_t first, int64_t count) {
                       const Array own = state.copy(), own_window = window.copy();
                       const std::vector<int64_t> bounds = kTokens.bounds(first, count);
                       const int64_t before = kTokens.before(first), at = before * layer.hidden;
                       Array o(type, bounds.back() * layer.hidden);
                       const auto& x = layer.streams;
                       kernels.kda_mix({x[0].at(at),
                                        x[1].at(at),
                                        x[2].at(at),
                                        x[3].at(at),
                                        layer.beta.at(before * heads),
                                        x[4].at(at),
                                        type,
                                        heads,
                                        width,
                                        taps,
                                        layer.convs[0].as<float>(),
                                        layer.convs[1].as<float>(),
                                        layer.convs[2].as<float>(),
                                        layer.a_log.as<float>(),
                                        layer.bias.as<float>(),
                                        layer.norm.as<float>(),
                                        kLowerBound,
                                        kL2Eps,
                                        kNormEps,
                                        has_state ? own.as<float>() : nullptr,
                                        has_state ? own_window.data() : nullptr,
                                        conv_type,
                                        {bounds.data(), kSeats.data() + first, count},
                                        o.data()});
                       return std::vector<Output>{output(o), states_of(own, state, first, count),
                                                  states_of(own_window, window, first, count)};
                     },
                     {o, states_of(left), states_of(window_left)});
        }
}

// A verifying pass gives what the layer gives and leaves the states; the commit of all its tokens makes them the
// layer's.
TEST(kda_verify_is_the_layer) {
  std::mt19937 random(45);
  const std::vector<int64_t> bounds = kTokens.bounds(0, 3);
  for (Type type : kActivations)
    for (auto [heads, width, taps] : {std::tuple<int64_t, int64_t, int64_t>{3, 16, 4}, {1, 48, 3}}) {
      const LayerArrays layer(type, heads, width, taps, random);
      const int64_t tokens = layer.tokens, hidden = layer.hidden;
      const Array state = random_array(Type::f32, kSlots * heads * width * width, random);
      const Array window = random_array(type, kSlots * (taps - 1) * 3 * hidden, random);
      Numbers left = numbers_of(state), window_left = numbers_of(window);
      const Numbers o = layer.expected(left, window_left);
      check_laws("kda_verify and kda_commit " + shown(type), 1, kda_tolerance(type),
                 [&](const Kernels& kernels, int64_t, int64_t) {
                   const Array own = state.copy(), own_window = window.copy();
                   Array o(type, tokens * hidden), inputs(type, tokens * 3 * hidden), keys(type, tokens * hidden);
                   Array decays(Type::f32, tokens * hidden), corrections(Type::f32, tokens * hidden);
                   const KdaRecords records{inputs.data(), keys.data(), decays.as<float>(), corrections.as<float>()};
                   const Sequences sequences{bounds.data(), kSeats.data(), 3};
                   const auto& x = layer.streams;
                   kernels.kda_verify({{x[0].data(),
                                        x[1].data(),
                                        x[2].data(),
                                        x[3].data(),
                                        layer.beta.data(),
                                        x[4].data(),
                                        type,
                                        heads,
                                        width,
                                        taps,
                                        layer.convs[0].as<float>(),
                                        layer.convs[1].as<float>(),
                                        layer.convs[2].as<float>(),
                                        layer.a_log.as<float>(),
                                        layer.bias.as<float>(),
                                        layer.norm.as<float>(),
                                        kLowerBound,
                                        kL2Eps,
                                        kNormEps,
                                        own.as<float>(),
                                        own_window.data(),
                                        type,
                                        sequences,
                                        o.data()},
                                       records});
                   kernels.kda_commit({type, 1, heads, width, taps, tokens, kSlots, records, own.as<float>(),
                                       own_window.data(), type, sequences, kTokens.counts.data()});
                   return std::vector<Output>{output(o), states_of(own, state, 0, 3),
                                              states_of(own_window, window, 0, 3)};
                 },
                 {o, states_of(left), states_of(window_left)});
    }
}
