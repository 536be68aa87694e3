// What this machine can do at most: memory reads, and products in registers.
#include <sys/mman.h>

#include <chrono>
#include <cstring>

#include "perilune.h"

namespace perilune {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Chunks a thread gets of a measurement: one that lost its processor holds up no more than its own.
constexpr int64_t kChunksPerThread = 8;

// A pass over registers long enough that starting the threads does not count.
constexpr double kPassSeconds = 0.005;

constexpr int64_t kHugePage = int64_t{2} << 20;
// Bytes that a stream moves on before the next stream's turn.
constexpr int64_t kTurn = 256;
// Parts start so many bytes off a round distance, or the streams would meet in the same banks and cache sets.
constexpr int64_t kSkew = 3 * 4096 + kTurn;

using Words [[gnu::vector_size(32)]] = uint64_t;

int64_t part_bytes(int64_t bytes, int64_t streams) { return (bytes / streams - kSkew) / 4096 * 4096; }

// Reads [data, data + bytes) as `streams` sequential streams in turns; returns the sum of what was read.
uint64_t read_all(const char* data, int64_t bytes, int64_t streams) {
  constexpr int64_t kWords = kTurn / static_cast<int64_t>(sizeof(Words));
  const int64_t part = part_bytes(bytes, streams);
  Words sums[kWords] = {};
  for (int64_t at = 0; at < part; at += kTurn)
    for (int64_t stream = 0; stream < streams; ++stream) {
      const auto* words = reinterpret_cast<const Words*>(data + stream * (part + kSkew) + at);
      for (int64_t i = 0; i < kWords; ++i) sums[i] += words[i];
    }
  Words total = {};
  for (const Words& sum : sums) total += sum;
  return total[0] + total[1] + total[2] + total[3];
}

}  // namespace

bool read_rates(int64_t bytes, int streams, double* rates, int passes) {
  const int64_t chunks = num_threads() * kChunksPerThread, share = bytes / chunks / kHugePage * kHugePage;
  const int64_t mapped = (chunks * share) + kHugePage;
  if (share == 0) return false;
  void* mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return false;
  char* memory = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(mapping) + kHugePage - 1) / kHugePage * kHugePage);
  madvise(memory, chunks * share, MADV_HUGEPAGE);
  parallel(chunks, [&](int64_t chunk) { std::memset(memory + chunk * share, 1, share); });
  uint64_t sums[256] = {};
  const double pass_bytes = static_cast<double>(chunks * streams * part_bytes(share, streams));
  for (int pass = 0; pass < passes; ++pass) {
    const auto start = Clock::now();
    parallel(chunks, [&](int64_t chunk) { sums[chunk % 256] += read_all(memory + chunk * share, share, streams); });
    rates[pass] = pass_bytes / seconds_since(start);
  }
  munmap(mapping, mapped);
  return sums[0] != 0;  // or the compiler would leave the reads out
}

double dot_rate(Type type, double seconds) {
  const int64_t chunks = num_threads() * kChunksPerThread;
  int64_t rounds = 1024;
  const int64_t operations_per_round = kernels().dots(type, rounds) / rounds;
  if (operations_per_round == 0) return 0.0;
  double best = 0.0;
  for (const auto start = Clock::now(); seconds_since(start) < seconds;) {
    const auto pass = Clock::now();
    parallel(chunks, [&](int64_t) { kernels().dots(type, rounds); });
    const double took = seconds_since(pass), rate = static_cast<double>(chunks * rounds * operations_per_round) / took;
    if (rate > best) best = rate;
    if (took < kPassSeconds) rounds *= 2;
  }
  return best;
}

}  // namespace perilune
