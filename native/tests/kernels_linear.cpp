// Products with weights: linear maps, router, experts.
#include "check.h"

using namespace perilune;
using namespace perilune::tests;

static constexpr Type kWeights[] = {Type::f32, Type::bf16, Type::i8, Type::f8, Type::mxfp4};

static void check_linear(Type type, Type weight_type, bool int8_activations, int64_t columns, int64_t tokens) {
  std::mt19937 random(7);
  const Array x = random_array(type, tokens * columns, random);
  std::vector<RandomMatrix> weights;
  for (int64_t rows : {1, 48, 131}) weights.push_back(random_matrix(weight_type, rows, columns, random));
  // one int8 step of an activation, where a rounding falls on the other side
  const double tolerance = int8_activations ? kBfloat16 : tolerance_of(type);
  check_laws("linear " + shown(type) + " by " + shown(weight_type) + (int8_activations ? ", int8" : "") + " " +
                 std::to_string(columns),
             tokens, tolerance, [&](const Kernels& kernels, int64_t first, int64_t count) {
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
             });
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
      check_laws("moe_route " + shown(type), tokens, kFloat32,
                 [&](const Kernels& kernels, int64_t first, int64_t count) {
                   std::vector<int64_t> ids(count * chosen);
                   Array weights(Type::f32, count * chosen);
                   kernels.moe_route({x.at(first * columns), type, count, weight.matrix, bias.as<float>(), chosen, true,
                                      2.5f, ids.data(), weights.as<float>()});
                   return std::vector<Output>{output(ids), output(weights)};
                 });
    }
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
  const Array x = random_array(type, tokens * latent, random, 4), weights = random_array(Type::f32, tokens * chosen, random);
  std::vector<int64_t> ids;
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t i = 0; i < chosen; ++i) ids.push_back((token * token + 2 * i) % experts);  // none has expert 3 often
  check_laws("moe_experts " + shown(type) + " by " + shown(weight_type) + (int8_activations ? ", int8" : ""), tokens,
             int8_activations ? kBfloat16 : tolerance_of(type),
             [&](const Kernels& kernels, int64_t first, int64_t count) {
               Array y(type, count * latent);
               kernels.moe_experts({x.at(first * latent), type, count, ids.data() + first * chosen,
                                    weights.as<float>() + first * chosen, chosen, addresses.data(), experts, latent,
                                    inner, weight_type, 4.0f, 25.0f, y.data(), int8_activations, scratch_bytes});
               return std::vector<Output>{output(y)};
             });
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
