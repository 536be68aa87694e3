// The cache of experts on disk: what it hands out, under too few slots, on suspicion, from broken files.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>

#include "check.h"
#include "experts.h"

using namespace perilune;
using namespace perilune::tests;

namespace {

constexpr int64_t kLatent = 64, kInner = 96, kNumExperts = 7, kNumLayers = 3, kPieces = ExpertCache::kPieces;

// Data and scales of w1, w3 [inner, latent] and w2 [latent, inner] in MXFP4.
constexpr int64_t piece_bytes(int64_t piece) { return piece % 2 == 0 ? kInner * kLatent / 2 : kInner * kLatent / 32; }

// Two files of experts whose pieces lie at any byte, some side by side, one of them the last bytes of a file.
class ExpertFiles {
 public:
  ExpertFiles()
      : directory_(std::filesystem::temp_directory_path() / ("perilune_experts_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(directory_);
    std::mt19937 random(51);
    std::string contents[2];
    for (int64_t piece = 0; piece < kNumLayers * kNumExperts * kPieces; ++piece) {
      const int64_t file = piece % 4 == 1 ? 1 : 0;
      contents[file].append(random() % 3 == 0 ? random() % 9000 : 0, '?');
      places.push_back({file, static_cast<int64_t>(contents[file].size()), piece_bytes(piece % kPieces)});
      pieces.emplace_back();
      for (int64_t i = 0; i < places.back().bytes; ++i)
        pieces.back() += static_cast<char>(piece % 2 == 0 ? random() : 117 + random() % 5);
      contents[file] += pieces.back();
    }
    for (int i = 0; i < 2; ++i) {
      names.push_back(directory_ / ("part" + std::to_string(i)));
      std::ofstream(names.back(), std::ios::binary) << contents[i];
    }
  }
  ~ExpertFiles() { std::filesystem::remove_all(directory_); }

  void cut(int64_t file, int64_t bytes) const { std::filesystem::resize_file(names[file], bytes); }

  std::vector<std::string> names;
  std::vector<ExpertCache::Place> places;
  std::vector<std::string> pieces;

 private:
  std::filesystem::path directory_;
};

constexpr int64_t kSlotBytes = 64 << 10;

bool is_whole(const ExpertFiles& files, int64_t layer, int32_t expert, const int64_t* addresses) {
  for (int64_t piece = 0; piece < kPieces; ++piece) {
    const std::string& expected = files.pieces[(layer * kNumExperts + expert) * kPieces + piece];
    const auto* found = reinterpret_cast<const char*>(addresses[expert * kPieces + piece]);
    if (found == nullptr || std::memcmp(found, expected.data(), expected.size()) != 0) return false;
  }
  return true;
}

// A pass over a layer that gives experts back one by one; how many it was given whole, each once.
int64_t pass(ExpertCache& cache, const ExpertFiles& files, int64_t layer, const std::vector<int32_t>& experts) {
  std::set<int32_t> seen;
  int64_t whole = 0;
  std::vector<int64_t> addresses(kNumExperts * kPieces, -1);
  std::vector<int32_t> taken(experts.size());
  cache.begin(layer, experts.data(), static_cast<int64_t>(experts.size()));
  while (const int64_t count = cache.take(taken.data(), addresses.data()))
    for (int64_t i = 0; i < count; ++i) {
      CHECK(seen.insert(taken[i]).second);
      whole += is_whole(files, layer, taken[i], addresses.data());
      cache.give_back(&taken[i], 1);
    }
  CHECK(seen == std::set<int32_t>(experts.begin(), experts.end()));
  return whole;
}

std::vector<int32_t> some_experts(std::mt19937& random, int64_t count) {
  std::vector<int32_t> all;
  for (int32_t expert = 0; expert < kNumExperts; ++expert) all.push_back(expert);
  std::shuffle(all.begin(), all.end(), random);
  all.resize(static_cast<size_t>(count));
  return all;
}

template <typename Error, typename Body>
bool throws(const Body& body) {
  try {
    body();
  } catch (const Error&) {
    return true;
  }
  return false;
}

}  // namespace

TEST(expert_cache_gives_each_expert_whole) {
  const ExpertFiles files;
  std::mt19937 random(52);
  for (int64_t slots : {1, 3, 100})
    for (int readers : {1, 4}) {
      ExpertCache cache(files.names, files.places, kNumLayers, kSlotBytes, slots, readers);
      CHECK(cache.num_slots() == std::min(slots, kNumLayers * kNumExperts));
      int64_t uses = 0;
      for (int64_t step = 0; step < 40; ++step)
        for (int64_t layer = 0; layer < kNumLayers; ++layer) {
          const std::vector<int32_t> experts = some_experts(random, 1 + static_cast<int64_t>(random() % kNumExperts));
          const std::vector<int64_t> wanted(experts.begin(),
                                            experts.end() - (random() % 2));  // one may come unannounced
          const std::vector<int32_t> guess = some_experts(random, 3);
          const std::vector<int64_t> guessed(guess.begin(), guess.end());
          if (random() % 3 > 0) cache.want(layer, wanted.data(), static_cast<int64_t>(wanted.size()));
          if (random() % 3 > 0) cache.expect((layer + 1) % kNumLayers, guessed.data(), 3);
          CHECK(pass(cache, files, layer, experts) == static_cast<int64_t>(experts.size()));
          uses += static_cast<int64_t>(experts.size());
        }
      const ExpertStats stats = cache.stats();
      CHECK(stats.passes == 40 * kNumLayers);
      CHECK(stats.uses == uses);
      CHECK(stats.hits + stats.early <= uses);
      CHECK(cache.take_faults().empty());
    }
}

TEST(expert_cache_keeps_what_fits) {
  const ExpertFiles files;
  ExpertCache cache(files.names, files.places, kNumLayers, kSlotBytes, kNumLayers * kNumExperts, 2);
  const std::vector<int32_t> experts = {0, 3, 6};
  for (int64_t layer = 0; layer < kNumLayers; ++layer) pass(cache, files, layer, experts);
  const int64_t read = cache.stats().read_bytes;
  for (int64_t layer = 0; layer < kNumLayers; ++layer) CHECK(pass(cache, files, layer, experts) == 3);
  CHECK(cache.stats().read_bytes == read);
  CHECK(cache.stats().hits == 3 * kNumLayers);
}

// Of two experts in one slot each, that which was used more often stays.
TEST(expert_cache_evicts_what_is_used_less) {
  const ExpertFiles files;
  ExpertCache cache(files.names, files.places, kNumLayers, kSlotBytes, 2, 1);
  for (int i = 0; i < 4; ++i) pass(cache, files, 0, {1});
  for (int32_t expert : {2, 3, 4}) pass(cache, files, 0, {expert});
  const int64_t hits = cache.stats().hits;
  pass(cache, files, 0, {1});
  CHECK(cache.stats().hits == hits + 1);
}

TEST(expert_cache_may_end_while_it_reads) {
  const ExpertFiles files;
  const std::vector<int64_t> experts = {0, 1, 2, 3, 4, 5, 6};
  for (int i = 0; i < 20; ++i) {
    ExpertCache cache(files.names, files.places, kNumLayers, kSlotBytes, 9, 3);
    cache.expect(1, experts.data(), 7);
    cache.want(0, experts.data(), 7);
  }
}

// A pass that is given up, as after an error in between, leaves no slot taken.
TEST(expert_cache_forgets_a_pass_that_was_given_up) {
  const ExpertFiles files;
  ExpertCache cache(files.names, files.places, kNumLayers, kSlotBytes, 2, 2);
  const std::vector<int32_t> experts = {0, 1, 2};
  std::vector<int32_t> taken(3);
  std::vector<int64_t> addresses(kNumExperts * kPieces);
  cache.begin(0, experts.data(), 3);
  CHECK(cache.take(taken.data(), addresses.data()) > 0);
  for (int64_t layer : {1, 2, 0}) CHECK(pass(cache, files, layer, {4, 5, 6}) == 3);
}

TEST(expert_cache_refuses_what_cannot_be) {
  const ExpertFiles files;
  const auto make = [&](std::vector<std::string> names, std::vector<ExpertCache::Place> places, int64_t slot_bytes) {
    ExpertCache(std::move(names), std::move(places), kNumLayers, slot_bytes, 4, 1);
  };
  CHECK(throws<std::invalid_argument>([&] { make(files.names, files.places, 4096); }));
  CHECK(throws<std::invalid_argument>([&] { make({files.names[0]}, files.places, kSlotBytes); }));
  CHECK(throws<std::invalid_argument>([&] { make(files.names, {}, kSlotBytes); }));
  CHECK(throws<std::runtime_error>([&] { make({files.names[0], files.names[1] + "x"}, files.places, kSlotBytes); }));
  ExpertCache cache(files.names, files.places, kNumLayers, kSlotBytes, 4, 1);
  const int64_t ids[] = {kNumExperts};
  CHECK(throws<std::out_of_range>([&] { cache.want(0, ids, 1); }));
  CHECK(throws<std::out_of_range>([&] { cache.expect(0, ids, 1); }));
  CHECK(throws<std::out_of_range>([&] { cache.want(kNumLayers, ids, 0); }));
}

// What a disk may answer instead of all that was asked for.
enum class Mood { whole, interrupted, in_pieces, broken };
std::atomic<Mood> mood{Mood::whole};
std::atomic<int> num_answers{0};

ssize_t moody_read(int descriptor, void* to, size_t bytes, off_t offset) {
  const bool is_odd = num_answers++ % 2 == 1;
  if (mood == Mood::broken) return errno = EIO, -1;
  if (mood == Mood::interrupted && is_odd) return errno = EINTR, -1;
  if (mood == Mood::in_pieces && bytes > 4096) bytes = 4096 + (is_odd ? 512 : 0);
  return pread(descriptor, to, bytes, offset);
}

TEST(expert_cache_reads_on_where_a_read_ends_early) {
  const ExpertFiles files;
  for (Mood each : {Mood::interrupted, Mood::in_pieces}) {
    mood = each;
    ExpertCache cache(files.names, files.places, kNumLayers, kSlotBytes, 3, 2, moody_read);
    for (int64_t layer = 0; layer < kNumLayers; ++layer) CHECK(pass(cache, files, layer, {0, 1, 2, 3, 4, 5, 6}) == 7);
    CHECK(cache.take_faults().empty());
  }
}

// While a disk fails every expert that has to be read is lost, those in memory are not; then all is as before.
TEST(expert_cache_outlives_a_disk_that_fails) {
  const ExpertFiles files;
  mood = Mood::whole;
  ExpertCache cache(files.names, files.places, kNumLayers, kSlotBytes, 6, 2, moody_read);
  CHECK(pass(cache, files, 0, {0, 1, 2}) == 3);
  mood = Mood::broken;
  const int64_t guess[] = {3, 4};
  for (int i = 0; i < 3; ++i) {
    cache.expect(0, guess, 2);
    CHECK(pass(cache, files, 0, {0, 1, 2, 3, 4}) == 3);
  }
  mood = Mood::whole;
  CHECK(pass(cache, files, 0, {0, 1, 2, 3, 4}) == 5);
}

// ---- the kernel that takes experts from it
// ------------------------------------------------------------------------------

static void run_experts(const Kernels& kernels, const Array& x, const std::vector<int64_t>& ids, const Array& weights,
                        int64_t layer, const ExpertFiles& files, ExpertSource* source, const Array& y) {
  const int64_t tokens = static_cast<int64_t>(ids.size()) / 2;
  std::vector<int64_t> addresses;
  for (int64_t piece = layer * kNumExperts * kPieces; piece < (layer + 1) * kNumExperts * kPieces; ++piece)
    addresses.push_back(reinterpret_cast<int64_t>(files.pieces[piece].data()));
  kernels.moe_experts({x.data(), x.type(), tokens, ids.data(), weights.as<float>(), 2,
                       source == nullptr ? addresses.data() : nullptr, kNumExperts, kLatent, kInner, Type::mxfp4, 4.0f,
                       25.0f, y.data(), false, int64_t{1} << 20, source, layer});
}

TEST(streamed_experts_are_resident_experts) {
  const ExpertFiles files;
  std::mt19937 random(53);
  const int64_t tokens = 9;
  for (const Kernels* each : tables())
    for (Type type : kActivations)
      for (int64_t slots : {1, 4}) {
        ExpertCache cache(files.names, files.places, kNumLayers, kSlotBytes, slots, 2);
        for (int64_t layer = 0; layer < kNumLayers; ++layer) {
          const Array x = random_array(type, tokens * kLatent, random),
                      weights = random_array(Type::f32, tokens * 2, random);
          std::vector<int64_t> ids;
          for (int64_t token = 0; token < tokens; ++token) ids.push_back(token % 5), ids.push_back(5 + token % 2);
          const Array expected(type, tokens * kLatent), found(type, tokens * kLatent);
          run_experts(*each, x, ids, weights, layer, files, nullptr, expected);
          run_experts(*each, x, ids, weights, layer, files, &cache, found);
          CHECK(output(expected).bytes == output(found).bytes);
        }
      }
}

// The last expert of the files cannot be read: its tokens are void, the others are as ever, and the fault names the
// file.
TEST(experts_that_cannot_be_read_spoil_their_tokens) {
  const ExpertFiles files;
  std::mt19937 random(54);
  const int64_t layer = kNumLayers - 1, last = kNumExperts - 1, tokens = 4;
  const ExpertCache::Place& place = files.places.back();
  files.cut(place.file, place.offset + place.bytes - 1);
  ExpertCache cache(files.names, files.places, kNumLayers, kSlotBytes, 3, 2);
  const Array x = random_array(Type::f32, tokens * kLatent, random),
              weights = random_array(Type::f32, tokens * 2, random);
  const std::vector<int64_t> ids = {0, 1, 2, last, 3, 0, last, 5};
  for (int i = 0; i < 2; ++i) {  // it fails again, and no slot is lost
    const Array expected(Type::f32, tokens * kLatent), found(Type::f32, tokens * kLatent);
    run_experts(kernels(), x, ids, weights, layer, files, nullptr, expected);
    run_experts(kernels(), x, ids, weights, layer, files, &cache, found);
    for (int64_t token : {0, 2})
      CHECK(std::memcmp(expected.at(token * kLatent), found.at(token * kLatent), 4 * kLatent) == 0);
    for (int64_t token : {1, 3})
      for (int64_t c = 0; c < kLatent; ++c) CHECK(std::isnan(found.as<float>()[token * kLatent + c]));
    std::set<int64_t> spoiled;
    for (const auto& [token, reason] : cache.take_faults()) {
      spoiled.insert(token);
      CHECK(reason.find(files.names[place.file]) != std::string::npos);
    }
    CHECK((spoiled == std::set<int64_t>{1, 3}));
  }
}
