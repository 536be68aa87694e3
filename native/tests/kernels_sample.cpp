// Moving rows, and choosing tokens.
#include <algorithm>
#include <cmath>

#include "reference.h"

using namespace perilune;
using namespace perilune::tests;

static std::vector<int64_t> random_ids(int64_t count, int64_t below, std::mt19937& random) {
  std::vector<int64_t> ids(static_cast<size_t>(count));
  for (int64_t& id : ids) id = static_cast<int64_t>(random() % static_cast<uint64_t>(below));
  return ids;
}

TEST(rows_embedded_stored_and_appended) {
  std::mt19937 random(11);
  for (Type from : kActivations)
    for (Type to : kActivations)
      for (int64_t columns : {1, 16, 37, 7168})
        for (int64_t tokens : {0, 1, 17}) {
          const int64_t num_rows = 29;
          const Array weight = random_array(from, num_rows * columns, random);
          const std::vector<int64_t> ids = random_ids(tokens, num_rows, random);
          Numbers rows, left;
          for (int64_t id : ids)
            for (int64_t c = 0; c < columns; ++c)
              rows.push_back(rounded_to(to, number_of(from, weight.data(), id * columns + c)));
          check_laws(
              "embed_rows " + shown(from) + " " + shown(to), tokens, 0.0,
              [&](const Kernels& kernels, int64_t first, int64_t count) {
                Array y(to, count * columns);
                kernels.embed_rows({weight.data(), from, num_rows, columns, ids.data() + first, count, y.data(), to});
                return std::vector<Output>{output(y)};
              },
              {rows});
          const Array x = random_array(from, tokens * columns, random),
                      pool = random_array(to, num_rows * columns, random);
          left = numbers_of(pool);
          for (int64_t i = 0; i < tokens * columns; ++i)
            left[ids[i / columns] * columns + i % columns] = rounded_to(to, number_of(from, x.data(), i));
          check_laws("store_rows " + shown(from) + " " + shown(to), 1, 0.0,
                     [&](const Kernels& kernels, int64_t, int64_t) {
                       const Array own = pool.copy();
                       kernels.store_rows({x.data(), from, tokens, columns, ids.data(), own.data(), to, num_rows});
                       return std::vector<Output>{output(own)};
                     },
                     {left});
          left = numbers_of(pool);
          for (int64_t i = 0; i < tokens * columns; ++i)
            left[5 * columns + i] = rounded_to(to, number_of(from, x.data(), i));
          check_laws("append_rows " + shown(from) + " " + shown(to), 1, 0.0,
                     [&](const Kernels& kernels, int64_t, int64_t) {
                       const Array own = pool.copy();
                       int64_t end = 5;
                       kernels.append_rows({x.data(), from, tokens, columns, &end, own.data(), to, num_rows});
                       return std::vector<Output>{output(own), output(std::vector<int64_t>{end})};
                     },
                     {left, {static_cast<double>(5 + tokens)}});
        }
}

TEST(pairs_and_scale) {
  std::mt19937 random(12);
  for (Type type : kActivations)
    for (int64_t count : {0, 1, 15, 40001}) {
      const Array x = random_array(type, count, random), z = random_array(type, count, random, 20);
      for (auto kernel : {&Kernels::add_rows, &Kernels::gate_rows, &Kernels::swiglu}) {
        Numbers expected;
        for (int64_t i = 0; i < count; ++i) {
          const double a = number_of(type, x.data(), i), b = number_of(type, z.data(), i);
          expected.push_back(kernel == &Kernels::add_rows    ? a + b
                             : kernel == &Kernels::gate_rows ? a * rounded_to(type, sigmoid(b))
                                                             : rounded_to(type, silu(a)) * b);
        }
        check_laws("pair " + shown(type), 1, tolerance_of(type),
                   [&](const Kernels& kernels, int64_t, int64_t) {
                     Array y(type, count);
                     (kernels.*kernel)({x.data(), z.data(), type, count, y.data()});
                     return std::vector<Output>{output(y)};
                   },
                   {expected});
      }
      Numbers scaled = numbers_of(x);
      for (double& each : scaled) each = static_cast<float>(each) * 0.3f;
      check_laws("scale_rows " + shown(type), 1, 0.0,
                 [&](const Kernels& kernels, int64_t, int64_t) {
                   Array y(Type::f32, count);
                   kernels.scale_rows({x.data(), type, count, 0.3f, y.as<float>()});
                   return std::vector<Output>{output(y)};
                 },
                 {scaled});
    }
}

TEST(sample_tokens) {
  std::mt19937 random(13);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (Type type : kActivations)
    for (int64_t columns : {1, 31, 37, 5003})
      for (bool is_masked : {false, true}) {
        const int64_t rows = 24, words = (columns + 31) / 32;
        const Array logits = random_array(type, rows * columns, random, 5);
        std::vector<int32_t> mask(static_cast<size_t>(rows * words));
        for (int32_t& word : mask) word = static_cast<int32_t>(random());
        std::vector<double> settings;
        for (int64_t row = 0; row < rows; ++row)
          for (double setting :
               {row % 4 * 0.5, row % 3 * 9.0, row % 2 == 0 ? 1.0 : 0.8, row % 5 == 0 ? 0.1 : 0.0, uniform(random)})
            settings.push_back(setting);
        check_laws(
            "sample_tokens " + shown(type), rows, 0.0, [&](const Kernels& kernels, int64_t first, int64_t count) {
              std::vector<int64_t> ids(static_cast<size_t>(count)), masses(static_cast<size_t>(count * columns));
              Array best(Type::f32, count);
              kernels.sample_tokens(
                  {logits.at(first * columns), type, count, columns, is_masked ? mask.data() + first * words : nullptr,
                   settings.data() + first * kSampleSettings, ids.data(), best.as<float>(), masses.data()});
              return std::vector<Output>{output(ids), output(best), output(masses)};
            });
      }
}

TEST(penalize) {
  std::mt19937 random(14);
  const int64_t columns = 101;
  const Array logits = random_array(Type::f32, columns, random, 4);
  for (int64_t num_prompt : {0, 7, 90}) {
    const std::vector<int64_t> ids = random_ids(90, columns, random);
    Numbers expected = numbers_of(logits);
    for (int64_t id = 0; id < columns; ++id) {
      const auto counted = [&](int64_t from) { return std::count(ids.begin() + from, ids.end(), id); };
      if (counted(0) == 0) continue;
      expected[id] = expected[id] > 0 ? expected[id] / 1.3 : expected[id] * 1.3;
      if (counted(num_prompt) > 0) expected[id] -= 0.2 * static_cast<double>(counted(num_prompt)) + 0.5;
    }
    check_laws("penalize", 1, 1e-6,
               [&](const Kernels& kernels, int64_t, int64_t) {
                 const Array own = logits.copy();
                 kernels.penalize({own.as<float>(), columns, ids.data(), 90, num_prompt, 1.3f, 0.2f, 0.5f});
                 return std::vector<Output>{output(own)};
               },
               {expected});
  }
}
