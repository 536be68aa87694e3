// What this machine can do at most: memory reads. The dot rates live with the instruction sets.
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "perilune.h"

namespace perilune {

double read_bandwidth(int64_t bytes, int repeats) {
  const int64_t threads = num_threads(), share = bytes / threads / 256 * 256;
  auto* memory = static_cast<char*>(std::aligned_alloc(4096, share * threads));
  if (memory == nullptr) return 0.0;
  parallel(threads, [&](int64_t index) { std::memset(memory + index * share, 1, share); });
  double best = 0.0;
  uint64_t checks[256] = {};
  for (int turn = 0; turn < repeats; ++turn) {
    const auto start = std::chrono::steady_clock::now();
    parallel(threads, [&](int64_t index) {
      // Eight words a line are added up, or the compiler would skip the reads.
      const auto* words = reinterpret_cast<const uint64_t*>(memory + index * share);
      uint64_t total[32] = {};
      for (int64_t at = 0; at < share / 8; at += 32)
        for (int lane = 0; lane < 32; ++lane) total[lane] += words[at + lane];
      for (uint64_t lane : total) checks[index % 256] += lane;
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const double rate = static_cast<double>(share * threads) / seconds;
    if (rate > best) best = rate;
  }
  std::free(memory);
  return checks[0] == 0 ? 0.0 : best;  // uses the sums
}

}  // namespace perilune
