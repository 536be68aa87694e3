// Experts that stay on disk: a bounded cache of whole experts in memory, filled by a pool of reading threads.
//
// Reads go past the page cache (O_DIRECT) where the file system allows it: what is cached twice is memory lost, and
// what the system caches it also evicts as it likes. One thread passes through the layers; readers work beside it.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "perilune.h"

namespace perilune {

// Counted since the cache was made. A use is an expert that one pass over a layer chose.
struct ExpertStats {
  int64_t passes = 0, uses = 0;
  int64_t hits = 0;         // uses of an expert that lay in memory
  int64_t early = 0;        // uses of one whose reading had begun ahead of its layer; neither hit nor miss
  int64_t expected = 0;     // reads begun ahead
  int64_t read_bytes = 0;
  double busy_s = 0.0;      // with at least one read in progress
  double waited_s = 0.0;    // in which a pass had nothing to compute
  int64_t waited_bytes = 0;  // read meanwhile
};

class ExpertCache final : public ExpertSource {
 public:
  static constexpr int64_t kPieces = 6;       // data and scales of w1, w3, w2
  static constexpr int64_t kAlignment = 4096;  // of what O_DIRECT reads, in file and memory

  struct Place {
    int64_t file, offset, bytes;
  };
  // Reads as `pread` does; tests put what fails in its place.
  using ReadAt = ssize_t (*)(int descriptor, void* to, size_t bytes, off_t offset);

  // `places` [layers, experts, 6]. Each of `num_slots` slots of `slot_bytes` holds one expert. Throws
  // std::invalid_argument where an expert does not fit its slot, std::runtime_error where a file cannot be opened.
  ExpertCache(std::vector<std::string> files, std::vector<Place> places, int64_t layers, int64_t slot_bytes,
              int64_t num_slots, int num_readers, ReadAt read_at = ::pread);
  ~ExpertCache() override;

  // Begins to read what a pass over the layer will need: `ids` [count], with repetitions. Returns at once.
  void want(int64_t layer, const int64_t* ids, int64_t count);
  // The same on suspicion: read while nothing else is, into memory that nobody waits for.
  void expect(int64_t layer, const int64_t* ids, int64_t count);

  void begin(int64_t layer, const int32_t* experts, int64_t count) override;
  int64_t take(int32_t* taken, int64_t* addresses) override;
  void give_back(const int32_t* experts, int64_t count) override;
  void spoil(int32_t expert, const int32_t* tokens, int64_t count, int64_t first) override;

  // Tokens of passes since the last call whose results are void, and why.
  std::vector<std::pair<int64_t, std::string>> take_faults();
  ExpertStats stats();
  bool is_direct() const { return is_direct_; }
  int64_t num_slots() const { return static_cast<int64_t>(owners_.size()); }
  int64_t slot_bytes() const { return slot_bytes_; }

 private:
  enum class State : uint8_t { absent, queued, reading, ready, failed };
  struct Entry {
    State state = State::absent;
    bool is_wanted = false, is_expected = false;
    int32_t slot = -1;
    int32_t reads_left = 0;
    float rank = -1e30f;  // logarithm of its decayed uses, see `use`
  };
  struct Read {
    int64_t entry;
    int64_t file, offset, bytes, needed;  // at least `needed` bytes must come
    int64_t place;                        // in the slot
  };
  // What is read for one expert, and where its pieces then lie in the slot.
  struct Layout {
    std::vector<Read> reads;
    int64_t pieces[kPieces];
    int64_t bytes;
  };

  Layout layout(int64_t entry) const;
  void open_files();
  void close_files();
  void serve();
  bool start_one();
  bool start(int64_t entry, bool is_demand);
  int32_t free_slot(bool is_demand);
  void finish(const Read& read, const std::string& error);
  std::string read_piece(const Read& read, int32_t slot) const;
  void open_pass(int64_t layer);
  void demand(int64_t entry);
  void release_others(int64_t layer, const int32_t* experts, int64_t count);
  void use(int64_t entry);
  void forget_expectations(int64_t layer);
  void count_busy(int change);
  int64_t num_experts() const { return static_cast<int64_t>(entries_.size()) / layers_; }

  const std::vector<std::string> files_;
  const std::vector<Place> places_;
  const int64_t layers_, slot_bytes_;
  const ReadAt read_at_;
  std::vector<int> descriptors_;
  bool is_direct_ = true;
  char* memory_ = nullptr;

  std::mutex mutex_;
  std::condition_variable work_, arrival_;
  std::vector<Entry> entries_;     // [layers, experts]
  std::vector<int64_t> owners_;    // [slots], the entry in it or -1
  std::vector<int64_t> passes_;    // [layers]
  std::deque<int64_t> wanted_, expected_;  // entries to be read, in this order
  std::deque<Read> urgent_, early_;        // reads of entries that have their slot
  std::vector<int64_t> pending_;           // of the pass, not yet taken
  std::vector<int64_t> held_;              // wanted entries
  std::map<int64_t, std::string> errors_;
  std::vector<std::pair<int64_t, std::string>> faults_;
  int64_t layer_ = 0, announced_ = -1;
  int64_t num_expected_ = 0;  // entries with `is_expected` and a slot
  int num_reading_ = 0;
  int64_t busy_since_ns_ = 0;
  ExpertStats stats_;
  bool is_stopping_ = false;
  std::vector<std::thread> readers_;
};

}  // namespace perilune
