// Products with weights: linear maps, router, experts.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "reference.h"

using namespace perilune;
using namespace perilune::tests;

static constexpr Type kWeights[] = {Type::f32, Type::bf16, Type::i8, Type::f8, Type::mxfp4};

// x as a kernel takes it: with `int8_activations`, in 8 bits per 32 columns for the weights that allow it.
static Numbers taken(Numbers x, int64_t columns, Type weight_type, bool int8_activations) {
  if (!int8_activations || (weight_type != Type::i8 && weight_type != Type::mxfp4)) return x;
  for (size_t row = 0; row < x.size(); row += columns)
    for (int64_t first = 0; first < columns; first += 32) {
      const auto begin = x.begin() + row + first, end = begin + std::min<int64_t>(32, columns - first);
      double most = 0.0;
      for (auto each = begin; each != end; ++each) most = std::max(most, std::fabs(*each));
      for (auto each = begin; most > 0 && each != end; ++each) *each = std::nearbyint(*each * 127 / most) * most / 127;
    }
  return x;
}

// y [tokens, rows] = x [tokens, columns] w^T
static Numbers product(const Numbers& x, const Matrix& w) {
  Numbers weights, y;
  for (int64_t row = 0; row < w.rows; ++row)
    for (int64_t column = 0; column < w.columns; ++column) weights.push_back(weight_at(w, row, column));
  for (auto own = x.begin(); own != x.end(); own += w.columns)
    for (int64_t row = 0; row < w.rows; ++row)
      y.push_back(std::inner_product(own, own + w.columns, weights.begin() + row * w.columns, 0.0));
  return y;
}

static void check_linear(Type type, Type weight_type, bool int8_activations, int64_t columns, int64_t tokens) {
  std::mt19937 random(7);
  const Array x = random_array(type, tokens * columns, random);
  std::vector<RandomMatrix> weights;
  for (int64_t rows : {1, 48, 131}) weights.push_back(random_matrix(weight_type, rows, columns, random));
  std::vector<Numbers> expected;
  for (const RandomMatrix& weight : weights)
    expected.push_back(product(taken(numbers_of(x), columns, weight_type, int8_activations), weight.matrix));
  // one int8 step of an activation, where a rounding falls on the other side
  const double tolerance = int8_activations ? kBfloat16 : tolerance_of(type);
  check_laws(
      "linear " + shown(type) + " by " + shown(weight_type) + (int8_activations ? ", int8" : "") + " " +
          std::to_string(columns),
      tokens, tolerance,
      [&](const Kernels& kernels, int64_t first, int64_t count) {
        std::vector<Matrix> matrices;
        std::vector<Array> results;
        std::vector<void*> pointers;
        for (const RandomMatrix& weight : weights) {
          matrices.push_back(weight.matrix);
          results.emplace_back(type, count * weight.matrix.rows);
        }
        for (const Array& result : results) pointers.push_back(result.data());
        kernels.linear({x.at(first * columns), type, count, matrices.data(), pointers.data(),
                        static_cast<int64_t>(matrices.size()), int8_activations});
        std::vector<Output> outputs;
        for (const Array& result : results) outputs.push_back(output(result));
        return outputs;
      },
      expected);
}

TEST(linear) {
  for (Type type : kActivations)
    for (Type weight_type : kWeights)
      for (bool int8_activations : {false, true}) {
        for (int64_t columns : {32, 96, 416})
          for (int64_t tokens : {0, 1, 19}) check_linear(type, weight_type, int8_activations, columns, tokens);
        check_linear(type, weight_type, int8_activations, 7168, 3);
      }
}

TEST(linear_of_few_columns) {
  for (Type type : kActivations)
    for (Type weight_type : {Type::f32, Type::bf16, Type::i8, Type::f8})
      for (int64_t columns : {16, 48})
        for (int64_t tokens : {1, 9}) check_linear(type, weight_type, false, columns, tokens);
}

TEST(moe_route) {
  std::mt19937 random(8);
  for (Type type : kActivations)
    for (int64_t tokens : {0, 1, 21}) {
      const int64_t columns = 48, experts = 40, chosen = 6;
      const Array x = random_array(type, tokens * columns, random), bias = random_array(Type::f32, experts, random);
      const RandomMatrix weight = random_matrix(Type::f32, experts, columns, random);
      Numbers expected_ids, expected_weights;
      const Numbers logits = product(numbers_of(x), weight.matrix);
      for (int64_t token = 0; token < tokens; ++token) {
        Numbers scores;
        for (int64_t i = 0; i < experts; ++i) scores.push_back(sigmoid(logits[token * experts + i]));
        std::vector<int64_t> order(static_cast<size_t>(experts));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
          return scores[a] + bias.as<float>()[a] > scores[b] + bias.as<float>()[b];
        });
        double total = 1e-20;
        for (int64_t i = 0; i < chosen; ++i) total += scores[order[i]];
        for (int64_t i = 0; i < chosen; ++i) {
          expected_ids.push_back(static_cast<double>(order[i]));
          expected_weights.push_back(scores[order[i]] / total * 2.5);
        }
      }
      check_laws("moe_route " + shown(type), tokens, kFloat32,
                 [&](const Kernels& kernels, int64_t first, int64_t count) {
                   std::vector<int64_t> ids(count * chosen);
                   Array weights(Type::f32, count * chosen);
                   kernels.moe_route({x.at(first * columns), type, count, weight.matrix, bias.as<float>(), chosen, true,
                                      2.5f, ids.data(), weights.as<float>()});
                   return std::vector<Output>{output(ids), output(weights)};
                 },
                 {expected_ids, expected_weights});
    }
}

// beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)
static double situ(double gate, double up, double beta, double linear_beta) {
  return beta * std::tanh(gate / beta) * sigmoid(gate) * linear_beta * std::tanh(up / linear_beta);
}

// One expert's answer to one token.
static Numbers answer(Type type, const Numbers& x, const RandomMatrix* expert, bool int8_activations) {
  const Type weight_type = expert->matrix.type;
  const Numbers own = taken(x, static_cast<int64_t>(x.size()), weight_type, int8_activations);
  Numbers inner = product(own, expert[0].matrix);
  const Numbers up = product(own, expert[1].matrix);
  for (size_t i = 0; i < inner.size(); ++i)
    inner[i] = rounded_to(type, situ(rounded_to(type, inner[i]), rounded_to(type, up[i]), 4.0, 25.0));
  Numbers y =
      product(taken(inner, static_cast<int64_t>(inner.size()), weight_type, int8_activations), expert[2].matrix);
  for (double& each : y) each = rounded_to(type, each);
  return y;
}

static void check_experts(Type type, Type weight_type, bool int8_activations, int64_t tokens, int64_t scratch_bytes) {
  std::mt19937 random(9);
  const int64_t latent = 96, inner = 64, experts = 7, chosen = 3;
  std::vector<RandomMatrix> matrices;
  std::vector<int64_t> addresses;
  for (int64_t expert = 0; expert < experts; ++expert)
    for (int64_t i = 0; i < 3; ++i) {
      matrices.push_back(random_matrix(weight_type, i == 2 ? latent : inner, i == 2 ? inner : latent, random));
      addresses.push_back(reinterpret_cast<int64_t>(matrices.back().matrix.data));
      addresses.push_back(reinterpret_cast<int64_t>(matrices.back().matrix.scales));
    }
  const Array x = random_array(type, tokens * latent, random, 4),
              weights = random_array(Type::f32, tokens * chosen, random);
  std::vector<int64_t> ids;
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t i = 0; i < chosen; ++i) ids.push_back((token * token + 2 * i) % experts);  // none has expert 3 often
  Numbers expected;
  for (int64_t token = 0; token < tokens; ++token) {
    Numbers sum(static_cast<size_t>(latent), 0.0);
    for (int64_t i = token * chosen; i < (token + 1) * chosen; ++i) {
      const Numbers own =
          answer(type, numbers_of(type, x.at(token * latent), latent), &matrices[3 * ids[i]], int8_activations);
      for (int64_t c = 0; c < latent; ++c) sum[c] += weights.as<float>()[i] * own[c];
    }
    expected.insert(expected.end(), sum.begin(), sum.end());
  }
  check_laws("moe_experts " + shown(type) + " by " + shown(weight_type) + (int8_activations ? ", int8" : ""), tokens,
             int8_activations ? kBfloat16 : tolerance_of(type),
             [&](const Kernels& kernels, int64_t first, int64_t count) {
               Array y(type, count * latent);
               kernels.moe_experts({x.at(first * latent), type, count, ids.data() + first * chosen,
                                    weights.as<float>() + first * chosen, chosen, addresses.data(), experts, latent,
                                    inner, weight_type, 4.0f, 25.0f, y.data(), int8_activations, scratch_bytes});
               return std::vector<Output>{output(y)};
             },
             {expected});
}

TEST(moe_experts) {
  for (Type type : kActivations)
    for (Type weight_type : {Type::f32, Type::bf16, Type::mxfp4})
      for (int64_t tokens : {0, 1, 33})
        for (int64_t scratch_bytes : {int64_t{1}, int64_t{1} << 24}) {
          check_experts(type, weight_type, false, tokens, scratch_bytes);
          if (weight_type == Type::mxfp4) check_experts(type, weight_type, true, tokens, scratch_bytes);
        }
}
