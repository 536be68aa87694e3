#include "communicator.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <system_error>

namespace perilune {
namespace {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "processes and the system share the integer itself");

// Longer than a small sum takes where every rank has a processor; after it the processor goes to who needs it.
constexpr auto kSpin = std::chrono::microseconds(50);
// A sleeping rank looks this often whether the peer it waits for still lives.
constexpr long kGlanceNs = 20'000'000;
constexpr int kRelaxes = 32;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

[[noreturn]] void refuse(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

float widen(uint16_t value) {
  const uint32_t bits = uint32_t(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40u);  // a NaN stays one
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// A part of the sums at a time, so that they stay in the nearest cache.
constexpr int64_t kBlock = 1024;

}  // namespace

// What a rank tells the others. Each line is written by its own rank, but for `num_sleepers`.
struct alignas(128) Communicator::Line {
  Word arrived;       // calls that the rank has entered
  Word num_sleepers;  // ranks that sleep until it enters the next
  Word has_joined;
  Word failed;  // 1 + the rank that was missed
};

Communicator::Communicator(const std::string& path, int rank, int num_ranks, int64_t slot_bytes, double timeout_s)
    : rank_(rank), num_ranks_(num_ranks), slot_bytes_((slot_bytes + 127) / 128 * 128), timeout_s_(timeout_s) {
  file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file_ < 0) refuse(path);
  const int64_t first = int64_t(sizeof(Line)) * num_ranks;
  num_bytes_ = first + 2 * slot_bytes_ * num_ranks;
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  // posix_fallocate, not a hole: room that is missing later would be a SIGBUS in the middle of a sum.
  if (fcntl(file_, F_OFD_SETLK, &lock) != 0 || (errno = posix_fallocate(file_, 0, num_bytes_)) != 0) {
    const int reason = errno;
    close(file_);
    errno = reason;
    refuse(path + ": rank " + std::to_string(rank) + " cannot join");
  }
  void* memory = mmap(nullptr, size_t(num_bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) {
    close(file_);
    refuse(path);
  }
  memory_ = static_cast<uint8_t*>(memory);
  lines_ = reinterpret_cast<Line*>(memory_);
  lines_[rank_].has_joined = 1;
  try {
    barrier();
  } catch (...) {
    munmap(memory_, size_t(num_bytes_));
    close(file_);
    throw;
  }
}

Communicator::~Communicator() {
  munmap(memory_, size_t(num_bytes_));
  close(file_);
}

uint8_t* Communicator::slot(int rank) const {
  return memory_ + sizeof(Line) * size_t(num_ranks_) + size_t(2 * rank + int(call_ & 1u)) * size_t(slot_bytes_);
}

bool Communicator::has_ended(int peer) const {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = peer;
  lock.l_len = 1;
  return lines_[peer].has_joined && fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

void Communicator::check() {
  const uint32_t missed = lines_[rank_].failed;
  if (missed) fail(int(missed) - 1, "was missed before: the group has ended");
}

void Communicator::fail(int peer, const std::string& reason) {
  lines_[rank_].failed = uint32_t(peer + 1);
  throw PeerError("rank " + std::to_string(peer) + " " + reason);
}

void Communicator::wait_for(int peer) {
  Line& line = lines_[peer];
  const auto is_here = [&] { return int32_t(line.arrived.load() - call_) >= 0; };
  for (const auto until = Clock::now() + kSpin; Clock::now() < until;) {
    for (int i = 0; i < kRelaxes; ++i, relax()) {
      if (is_here()) return;
    }
  }
  const auto until = Clock::now() + std::chrono::duration<double>(timeout_s_);
  ++line.num_sleepers;
  while (!is_here()) {
    const timespec glance = {0, kGlanceNs};
    const uint32_t seen = line.arrived.load();
    if (int32_t(seen - call_) < 0) syscall(SYS_futex, &line.arrived, FUTEX_WAIT, seen, &glance, nullptr, 0);
    if (is_here()) break;
    const char* reason = nullptr;
    // what it wrote before it ended is there: it may have come and gone between the two looks
    if (has_ended(peer) && !is_here()) reason = "ended";
    for (int other = 0; other < num_ranks_ && !reason; ++other) {
      if (other != rank_ && lines_[other].failed) {
        const int missed = int(lines_[other].failed.load()) - 1;
        --line.num_sleepers;
        fail(missed, "was missed by rank " + std::to_string(other));
      }
    }
    if (!reason && Clock::now() >= until) reason = "did not come in time";
    if (reason) {
      --line.num_sleepers;
      fail(peer, reason);
    }
  }
  --line.num_sleepers;
}

// Tells the others that this rank's slot is written, and waits until theirs are.
void Communicator::meet() {
  Line& own = lines_[rank_];
  own.arrived = call_;
  if (own.num_sleepers) syscall(SYS_futex, &own.arrived, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer != rank_) wait_for(peer);
  }
}

void Communicator::barrier() {
  check();
  ++call_;
  meet();
}

void Communicator::all_reduce(void* values, int64_t count, Type type) {
  if (type != Type::f32 && type != Type::bf16) throw std::invalid_argument("sums are of float32 or bfloat16");
  check();
  const int64_t size = type == Type::f32 ? 4 : 2, most = slot_bytes_ / size;
  float sums[kBlock];
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t number = std::min(most, count - begin);
    uint8_t* own = static_cast<uint8_t*>(values) + begin * size;
    ++call_;
    std::memcpy(slot(rank_), own, size_t(number * size));
    meet();
    for (int64_t from = 0; from < number; from += kBlock) {
      const int64_t width = std::min(kBlock, number - from);
      for (int rank = 0; rank < num_ranks_; ++rank) {
        const uint8_t* part = slot(rank) + from * size;
        if (type == Type::f32) {
          const float* given = reinterpret_cast<const float*>(part);
          for (int64_t i = 0; i < width; ++i) sums[i] = rank ? sums[i] + given[i] : given[i];
        } else {
          const uint16_t* given = reinterpret_cast<const uint16_t*>(part);
          for (int64_t i = 0; i < width; ++i) sums[i] = rank ? sums[i] + widen(given[i]) : widen(given[i]);
        }
      }
      if (type == Type::f32) {
        std::memcpy(own + from * size, sums, size_t(width * size));
      } else {
        uint16_t* out = reinterpret_cast<uint16_t*>(own) + from;
        for (int64_t i = 0; i < width; ++i) out[i] = narrow(sums[i]);
      }
    }
  }
}

void Communicator::all_gather(const void* part, void* gathered, int64_t num_bytes) {
  check();
  for (int64_t begin = 0; begin < num_bytes; begin += slot_bytes_) {
    const int64_t number = std::min(slot_bytes_, num_bytes - begin);
    ++call_;
    std::memcpy(slot(rank_), static_cast<const uint8_t*>(part) + begin, size_t(number));
    meet();
    for (int rank = 0; rank < num_ranks_; ++rank) {
      std::memcpy(static_cast<uint8_t*>(gathered) + rank * num_bytes + begin, slot(rank), size_t(number));
    }
  }
}

void Communicator::broadcast(void* values, int64_t num_bytes, int source) {
  check();
  for (int64_t begin = 0; begin < num_bytes; begin += slot_bytes_) {
    const int64_t number = std::min(slot_bytes_, num_bytes - begin);
    uint8_t* own = static_cast<uint8_t*>(values) + begin;
    ++call_;
    if (rank_ == source) std::memcpy(slot(rank_), own, size_t(number));
    meet();
    if (rank_ != source) std::memcpy(own, slot(source), size_t(number));
  }
}

}  // namespace perilune
