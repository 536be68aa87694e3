// The thread pool and the scratch arenas.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "perilune.h"

namespace perilune {
namespace {

using Clock = std::chrono::steady_clock;

// A worker that waits this long has outlived the gap between two ops of a step, and sleeps.
constexpr auto kSpin = std::chrono::microseconds(50);
// Chunks left are in the low half of the ticket, the region's number in the high half.
constexpr uint64_t kLeft = 0xffffffffu;

thread_local bool is_inside_region = false;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Processors of each NUMA node that this process may use; one list of all of them where there is a single node.
std::vector<cpu_set_t> usable_nodes() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  std::vector<cpu_set_t> nodes;
  for (int node = 0;; ++node) {
    std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
    if (!file) break;
    cpu_set_t set;
    CPU_ZERO(&set);
    int first, last;
    for (std::string range; std::getline(file, range, ',');) {
      const int found = std::sscanf(range.c_str(), "%d-%d", &first, &last);
      if (found < 1) continue;
      for (int cpu = first; cpu <= (found == 2 ? last : first) && cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &set);
    }
    if (CPU_COUNT(&set) > 0) nodes.push_back(set);
  }
  if (nodes.empty()) nodes.push_back(allowed);
  return nodes;
}

class Pool {
 public:
  ~Pool() { stop(); }

  int size() {
    if (size_ == 0) {
      cpu_set_t allowed;
      CPU_ZERO(&allowed);
      size_ = sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
    }
    return size_;
  }

  void resize(int count) {
    std::lock_guard<std::mutex> turn(turn_);
    stop();
    size_ = count;
  }

  void run(int64_t num_chunks, ChunkFunction function, void* context) {
    if (num_chunks <= 0) return;
    if (is_inside_region || num_chunks == 1 || size() == 1) {
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) function(context, chunk);
      return;
    }
    std::lock_guard<std::mutex> turn(turn_);
    start();
    function_ = function;
    context_ = context;
    total_ = num_chunks;
    unfinished_.store(num_chunks, std::memory_order_relaxed);
    const uint64_t region = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(region << 32 | static_cast<uint64_t>(num_chunks));
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    is_inside_region = true;
    work();
    is_inside_region = false;
    wait_for_others();
  }

  // In the child of a fork there are no workers, and the locks may have been held by a thread that is gone.
  void forget_workers() {
    new (&workers_) std::vector<std::thread>();
    new (&turn_) std::mutex();
    new (&sleep_) std::mutex();
    new (&wake_) std::condition_variable();
    sleepers_ = 0;
    ticket_ = 0;
    is_inside_region = false;
  }

 private:
  void start() {
    if (static_cast<int>(workers_.size()) == size_ - 1) return;
    const std::vector<cpu_set_t> nodes = usable_nodes();
    for (int index = 1; index < size_; ++index) {
      workers_.emplace_back([this] { serve(); });
      // Threads stay on one node, spread evenly; within it the system moves them away from busy processors.
      if (nodes.size() > 1)
        pthread_setaffinity_np(workers_.back().native_handle(), sizeof(cpu_set_t), &nodes[index * nodes.size() / size_]);
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      is_stopping_ = true;
      wake_.notify_all();
    }
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    is_stopping_ = false;
  }

  void serve() {
    is_inside_region = true;  // what a chunk calls runs in place
    while (true) {
      const auto asleep_at = Clock::now() + kSpin;
      while ((ticket_.load(std::memory_order_relaxed) & kLeft) == 0 && !is_stopping_) {
        for (int turn = 0; turn < 32; ++turn) relax();
        if (Clock::now() < asleep_at) continue;
        std::unique_lock<std::mutex> lock(sleep_);
        ++sleepers_;
        wake_.wait(lock, [this] { return (ticket_.load() & kLeft) != 0 || is_stopping_; });
        --sleepers_;
      }
      if (is_stopping_) return;
      work();
    }
  }

  // Takes chunks until none is left. Holding a chunk keeps the region open, so its fields are only read then.
  void work() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while ((ticket & kLeft) != 0) {
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
      function_(context_, total_ - static_cast<int64_t>(ticket & kLeft));
      unfinished_.fetch_sub(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void wait_for_others() {
    const auto yield_at = Clock::now() + kSpin;
    while (unfinished_.load(std::memory_order_acquire) != 0) {
      for (int turn = 0; turn < 16; ++turn) relax();
      if (Clock::now() > yield_at) sched_yield();  // the one we wait for may want this processor
    }
  }

  int size_ = 0;
  std::vector<std::thread> workers_;
  std::mutex turn_;  // one region at a time
  ChunkFunction function_ = nullptr;
  void* context_ = nullptr;
  int64_t total_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> is_stopping_{false};
  std::mutex sleep_;
  std::condition_variable wake_;
};

Pool& pool() {
  // Never destroyed: a worker may still wait when the process ends.
  static Pool* one = [] {
    pthread_atfork(nullptr, nullptr, [] { pool().forget_workers(); });
    return new Pool;
  }();
  return *one;
}

constexpr size_t kAlignment = 64;
constexpr size_t kSmallestBlock = size_t{1} << 20;

// Blocks never move while something in them is in use; when nothing is, several are exchanged for one.
struct Arena {
  struct Block {
    char* data;
    size_t size;
  };
  std::vector<Block> blocks;
  size_t block = 0, used = 0;

  ~Arena() { drop(); }

  void drop() {
    for (Block& each : blocks) std::free(each.data);
    blocks.clear();
  }

  void add(size_t size) {
    void* data = std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
    if (data == nullptr) throw std::bad_alloc();
    blocks.push_back({static_cast<char*>(data), size});
  }

  void* take(size_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    while (block < blocks.size() && used + bytes > blocks[block].size) {
      ++block;
      used = 0;
    }
    if (block == blocks.size()) add(bytes > kSmallestBlock ? bytes : kSmallestBlock);
    void* taken = blocks[block].data + used;
    used += bytes;
    return taken;
  }

  void release(size_t to_block, size_t to_used) {
    block = to_block;
    used = to_used;
    if (block != 0 || used != 0 || blocks.size() < 2) return;
    size_t total = 0;
    for (const Block& each : blocks) total += each.size;
    drop();
    add(total);
  }
};

thread_local Arena arena;

}  // namespace

void set_num_threads(int count) { pool().resize(count); }
int num_threads() { return pool().size(); }
void run_chunks(int64_t num_chunks, ChunkFunction function, void* context) {
  pool().run(num_chunks, function, context);
}

Scratch::Scratch() : block_(arena.block), used_(arena.used) {}
Scratch::~Scratch() { arena.release(block_, used_); }
void* Scratch::take_bytes(int64_t bytes) { return arena.take(static_cast<size_t>(bytes)); }

}  // namespace perilune
