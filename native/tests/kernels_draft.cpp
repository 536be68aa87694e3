// Kernels of drafting and verifying: rotary positions, grouped-query attention, KDA that may be taken back.
#include <cmath>
#include <numeric>

#include "reference.h"

using namespace perilune;
using namespace perilune::tests;

// One head: its last columns turned, as wide as `turns` has numbers.
static Numbers turned(Numbers x, const Numbers& turns, bool is_interleaved) {
  const size_t pairs = turns.size() / 2, kept = x.size() - turns.size();
  for (size_t pair = 0; pair < pairs; ++pair) {
    const size_t first = kept + (is_interleaved ? 2 * pair : pair), second = first + (is_interleaved ? 1 : pairs);
    const double a = x[first], b = x[second];
    x[first] = a * turns[pair] - b * turns[pairs + pair];
    x[second] = a * turns[pairs + pair] + b * turns[pair];
  }
  return x;
}

TEST(rotary_turns) {
  const std::vector<double> frequencies = {1.0, 0.3, 1e-4};
  const std::vector<int64_t> seq_lens = {5, 1000003, 1}, bounds = {0, 5, 7, 8};
  Numbers expected;
  for (int64_t position : {0, 1, 2, 3, 4, 1000001, 1000002, 0})
    for (bool is_sine : {false, true})
      for (double frequency : frequencies) {
        const double angle = static_cast<double>(position) * frequency;
        expected.push_back(1.1 * (is_sine ? std::sin(angle) : std::cos(angle)));
      }
  check_laws("rotary_turns", 1, 1e-6,
             [&](const Kernels& kernels, int64_t, int64_t) {
               Array turns(Type::f32, 8 * 6);
               kernels.rotary_turns({frequencies.data(), 3, 1.1, seq_lens.data(), bounds.data(), 3, turns.as<float>()});
               return std::vector<Output>{output(turns)};
             },
             {expected});
}

TEST(rotate) {
  std::mt19937 random(21);
  for (Type type : kActivations)
    for (bool is_interleaved : {false, true})
      for (int64_t heads : {1, 3})
        for (int64_t turned_columns : {2, 16, 48})
          for (int64_t tokens : {0, 1, 37}) {
            const int64_t width = 48;
            const Array x = random_array(type, tokens * heads * width, random);
            const Array turns = random_array(Type::f32, tokens * turned_columns, random);
            Numbers expected;
            for (int64_t row = 0; row < tokens * heads; ++row)
              for (double each : turned(numbers_of(type, x.at(row * width), width),
                                        numbers_of(Type::f32, turns.at(row / heads * turned_columns), turned_columns),
                                        is_interleaved))
                expected.push_back(each);
            check_laws("rotate " + shown(type), tokens, tolerance_of(type),
                       [&](const Kernels& kernels, int64_t first, int64_t count) {
                         Array y(type, count * heads * width);
                         kernels.rotate({x.at(first * heads * width), type, count, heads, width, turned_columns,
                                         turns.as<float>() + first * turned_columns, is_interleaved, y.data()});
                         return std::vector<Output>{output(y)};
                       },
                       {expected});
          }
}

TEST(gqa_rows) {
  std::mt19937 random(22);
  const int64_t groups = 3, width = 32, size = groups * width, tokens = 19;
  for (Type type : kActivations)
    for (Type norm_type : kActivations) {
      const Array k = random_array(type, tokens * size, random), v = random_array(type, tokens * size, random);
      const Array norm = random_array(norm_type, width, random),
                  turns = random_array(Type::f32, tokens * width, random);
      Numbers expected;
      for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t group = 0; group < groups; ++group) {
          Numbers head = numbers_of(type, k.at((token * groups + group) * width), width);
          const double length =
              std::sqrt(std::inner_product(head.begin(), head.end(), head.begin(), 0.0) / width + 1e-5);
          for (int64_t c = 0; c < width; ++c)
            head[c] = rounded_to(type, head[c] / length) * number_of(norm_type, norm.data(), c);
          for (double each : turned(head, numbers_of(Type::f32, turns.at(token * width), width), false))
            expected.push_back(each);
        }
        for (double each : numbers_of(type, v.at(token * size), size)) expected.push_back(each);
      }
      check_laws("gqa_rows " + shown(type), tokens, tolerance_of(type),
                 [&](const Kernels& kernels, int64_t first, int64_t count) {
                   Array rows(type, count * 2 * size);
                   kernels.gqa_rows({k.at(first * size), v.at(first * size), type, count, groups, width, norm.data(),
                                     norm_type, 1e-5f, turns.as<float>() + first * width, false, rows.data()});
                   return std::vector<Output>{output(rows)};
                 },
                 {expected});
    }
}

// Sequences of a few tokens over blocks out of order; a sequence alone gives what it gives among the others.
TEST(gqa_attention) {
  std::mt19937 random(23);
  const int64_t heads = 6, groups = 2, width = 16, block_size = 4, table_width = 3, num_blocks = 9;
  const std::vector<int64_t> lengths = {1, 3, 5}, seq_lens = {9, 3, 12};
  const std::vector<int64_t> table = {8, 0, 3, 5, 5, 5, 1, 7, 2};
  for (Type type : kActivations) {
    const Array q = random_array(type, 9 * heads * width, random, 2);
    const Array pool = random_array(type, num_blocks * block_size * 2 * groups * width, random);
    Numbers expected;
    for (int64_t n = 0; n < 3; ++n)
      for (int64_t i = 0; i < lengths[n]; ++i)
        for (int64_t head = 0; head < heads; ++head) {
          const int64_t token = n == 0 ? 0 : n == 1 ? 1 + i : 4 + i, group = head / (heads / groups);
          const auto row = [&](int64_t position, int64_t part) {
            const int64_t block = table[n * table_width + position / block_size];
            return numbers_of(type,
                              pool.at((block * block_size + position % block_size) * 2 * groups * width +
                                      (part * groups + group) * width),
                              width);
          };
          const Numbers own = numbers_of(type, q.at((token * heads + head) * width), width);
          Numbers scores, context(static_cast<size_t>(width), 0.0);
          for (int64_t position = 0; position <= seq_lens[n] - lengths[n] + i; ++position) {
            const Numbers key = row(position, 0);
            scores.push_back(0.25 * std::inner_product(own.begin(), own.end(), key.begin(), 0.0));
          }
          softmax(scores);
          for (size_t position = 0; position < scores.size(); ++position) {
            const Numbers value = row(static_cast<int64_t>(position), 1);
            for (int64_t c = 0; c < width; ++c) context[c] += scores[position] * value[c];
          }
          expected.insert(expected.end(), context.begin(), context.end());
        }
    check_laws("gqa_attention " + shown(type), 3, tolerance_of(type),
               [&](const Kernels& kernels, int64_t first, int64_t count) {
                 std::vector<int64_t> bounds = {0};
                 int64_t before = 0;
                 for (int64_t n = 0; n < first; ++n) before += lengths[static_cast<size_t>(n)];
                 for (int64_t n = first; n < first + count; ++n)
                   bounds.push_back(bounds.back() + lengths[static_cast<size_t>(n)]);
                 Array o(type, bounds.back() * heads * width);
                 const Pages pages{pool.data(), type_bytes(type, 2 * groups * width),
                                   block_size,  table.data() + first * table_width,
                                   table_width, seq_lens.data() + first};
                 kernels.gqa_attention({q.at(before * heads * width),
                                        type,
                                        pages,
                                        {bounds.data(), nullptr, count},
                                        heads,
                                        groups,
                                        width,
                                        0.25f,
                                        o.data()});
                 return std::vector<Output>{output(o)};
               },
               {expected});
  }
}

// A pass of three sequences and the commit of some of its tokens; records have a row more than there are tokens.
TEST(kda_verify_and_commit) {
  std::mt19937 random(24);
  const int64_t heads = 2, width = 32, taps = 4, hidden = heads * width, tokens = 9, rows = tokens + 1, slots = 4;
  const std::vector<int64_t> bounds = {0, 1, 4, 9}, seats = {2, 0, 3}, counts = {1, 0, 3};
  for (Type type : kActivations)
    for (Type conv_type : kActivations) {
      std::vector<Array> streams;
      for (int i = 0; i < 5; ++i) streams.push_back(random_array(type, tokens * hidden, random));
      const Array beta = random_array(type, tokens * heads, random);
      std::vector<Array> convs;
      for (int i = 0; i < 3; ++i) convs.push_back(random_array(Type::f32, hidden * taps, random));
      const Array a_log = random_array(Type::f32, heads, random), bias = random_array(Type::f32, hidden, random);
      const Array norm = random_array(Type::f32, width, random);
      const Array state = random_array(Type::f32, slots * heads * width * width, random);
      const Array window = random_array(conv_type, slots * (taps - 1) * 3 * hidden, random);
      check_laws("kda_verify " + shown(type), 1, tolerance_of(type), [&](const Kernels& kernels, int64_t, int64_t) {
        const Array own = state.copy(), own_window = window.copy();
        const Array inputs = random_array(type, rows * 3 * hidden, random),
                    keys = random_array(type, rows * hidden, random);
        Array decays(Type::f32, rows * hidden), corrections(Type::f32, rows * hidden), o(type, tokens * hidden);
        const KdaRecords records{inputs.data(), keys.data(), decays.as<float>(), corrections.as<float>()};
        const Sequences sequences{bounds.data(), seats.data(), 3};
        kernels.kda_verify({{streams[0].data(),
                             streams[1].data(),
                             streams[2].data(),
                             streams[3].data(),
                             beta.data(),
                             streams[4].data(),
                             type,
                             heads,
                             width,
                             taps,
                             convs[0].as<float>(),
                             convs[1].as<float>(),
                             convs[2].as<float>(),
                             a_log.as<float>(),
                             bias.as<float>(),
                             norm.as<float>(),
                             -5.0f,
                             1e-6f,
                             1e-5f,
                             own.as<float>(),
                             own_window.data(),
                             conv_type,
                             sequences,
                             o.data()},
                            records});
        CHECK(output(own).bytes == output(state).bytes);
        CHECK(output(own_window).bytes == output(window).bytes);
        kernels.kda_commit({type, 1, heads, width, taps, rows, slots, records, own.as<float>(), own_window.data(),
                            conv_type, sequences, counts.data()});
        return std::vector<Output>{output(o), output(own), output(own_window)};
      });
    }
}
