// Sums and exchanges among the processes of one machine, through a file that all of them map.
//
// Every call is made by all ranks in the same order. A rank writes its part into its own slot, counts up, waits until
// the others have counted as far, and reads all slots in the order of the ranks: a sum has the same bits on every rank
// and in every run. Each slot is double: a rank writes the half that nobody can still be reading, because it came past
// a call that each of the others had entered.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "perilune/types.h"

namespace perilune {

// A peer ended, or did not come in time. The group is of no use after that: every later call raises it at once.
struct PeerError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Communicator {
 public:
  // Joins the group whose file is `path` and returns when all ranks have; the file may be new or empty. A rank holds a
  // lock on its byte of the file as long as its process lives, by which others see that it ended. Throws PeerError
  // where a peer does not come within `timeout_s`, and std::system_error for a file that cannot be mapped.
  Communicator(const std::string& path, int rank, int num_ranks, int64_t slot_bytes, double timeout_s);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // values [count] of type f32 or bf16 become the sum over ranks, in float32 from rank 0 upwards, rounded once.
  void all_reduce(void* values, int64_t count, Type type);
  // gathered [num_ranks, num_bytes] takes the `part` [num_bytes] of every rank.
  void all_gather(const void* part, void* gathered, int64_t num_bytes);
  // values [num_bytes] become those of rank `source`.
  void broadcast(void* values, int64_t num_bytes, int source);
  void barrier();

 private:
  struct Line;
  void check();
  void meet();
  void wait_for(int peer);
  [[noreturn]] void fail(int peer, const std::string& reason);
  bool has_ended(int peer) const;
  uint8_t* slot(int rank) const;

  const int rank_, num_ranks_;
  const int64_t slot_bytes_;
  const double timeout_s_;
  int file_ = -1;
  int64_t num_bytes_ = 0;
  uint8_t* memory_ = nullptr;
  Line* lines_ = nullptr;
  uint32_t call_ = 0;
};

}  // namespace perilune
