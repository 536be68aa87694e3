#include "experts.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

namespace perilune {
namespace {

// After so many passes over its layer a use counts half.
constexpr float kHalfLife = 16.0f;
// Larger reads are cut, so that several readers share an expert whose pieces lie side by side.
constexpr int64_t kLargestRead = int64_t{8} << 20;
// Experts with equal reuse: the one whose layer comes last goes first. Less than any difference of reuse that counts.
constexpr float kWaitWeight = 1e-3f;

int64_t down(int64_t bytes) { return bytes / ExpertCache::kAlignment * ExpertCache::kAlignment; }
int64_t up(int64_t bytes) { return down(bytes + ExpertCache::kAlignment - 1); }

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

ExpertCache::ExpertCache(std::vector<std::string> files, std::vector<Place> places, int64_t layers, int64_t slot_bytes,
                         int64_t num_slots, int num_readers, ReadAt read_at)
    : files_(std::move(files)),
      places_(std::move(places)),
      layers_(layers),
      slot_bytes_(up(slot_bytes)),
      read_at_(read_at) {
  const int64_t count = static_cast<int64_t>(places_.size()) / kPieces;
  if (layers < 1 || count < layers || count % layers != 0 || num_slots < 1 || num_readers < 1)
    throw std::invalid_argument("ExpertCache: at least one layer, expert, slot and reader");
  for (const Place& place : places_)
    if (place.file < 0 || place.file >= static_cast<int64_t>(files_.size()) || place.offset < 0 || place.bytes < 1)
      throw std::invalid_argument("ExpertCache: a piece outside the files");
  entries_.resize(count);
  owners_.assign(std::min(num_slots, count), -1);
  passes_.assign(layers, 0);
  for (int64_t entry = 0; entry < count; ++entry)
    if (layout(entry).bytes > slot_bytes_) throw std::invalid_argument("ExpertCache: an expert exceeds its slot");
  open_files();
  const size_t bytes = owners_.size() * static_cast<size_t>(slot_bytes_);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    close_files();
    throw std::bad_alloc();
  }
  madvise(memory, bytes, MADV_HUGEPAGE);  // a kernel without large pages does as well
  memory_ = static_cast<char*>(memory);
  for (int i = 0; i < num_readers; ++i) readers_.emplace_back([this] { serve(); });
}

ExpertCache::~ExpertCache() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& reader : readers_) reader.join();
  close_files();
  munmap(memory_, owners_.size() * static_cast<size_t>(slot_bytes_));
}

void ExpertCache::open_files() {
  for (const std::string& file : files_) {
    int descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (descriptor < 0 && errno == EINVAL) {  // a file system in memory
      is_direct_ = false;
      descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC);
    }
    if (descriptor < 0) {
      const std::string reason = std::strerror(errno);
      close_files();
      throw std::runtime_error(file + " cannot be opened: " + reason);
    }
    descriptors_.push_back(descriptor);
  }
}

void ExpertCache::close_files() {
  for (int descriptor : descriptors_) close(descriptor);
  descriptors_.clear();
}

// Pieces whose aligned covers touch are read together.
ExpertCache::Layout ExpertCache::layout(int64_t entry) const {
  const Place* places = places_.data() + entry * kPieces;
  int order[kPieces] = {0, 1, 2, 3, 4, 5};
  std::sort(order, order + kPieces, [&](int a, int b) {
    return std::make_pair(places[a].file, places[a].offset) < std::make_pair(places[b].file, places[b].offset);
  });
  Layout found{};
  for (int at = 0; at < kPieces;) {
    const int64_t file = places[order[at]].file, begin = down(places[order[at]].offset);
    int64_t needed = begin;
    for (; at < kPieces && places[order[at]].file == file && down(places[order[at]].offset) <= up(needed); ++at) {
      found.pieces[order[at]] = found.bytes + places[order[at]].offset - begin;
      needed = std::max(needed, places[order[at]].offset + places[order[at]].bytes);
    }
    const int64_t cover = up(needed) - begin, parts = (cover + kLargestRead - 1) / kLargestRead;
    const int64_t step = up((cover + parts - 1) / parts);
    for (int64_t from = 0; from < cover; from += step) {
      const int64_t bytes = std::min(step, cover - from);
      found.reads.push_back(
          {entry, file, begin + from, bytes, std::min(bytes, needed - begin - from), found.bytes + from});
    }
    found.bytes += cover;
  }
  return found;
}

// ---- what is read next ----------------------------------------------------------------------------------------------

void ExpertCache::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_stopping_) {
    std::deque<Read>* queue = !urgent_.empty() ? &urgent_ : wanted_.empty() && !early_.empty() ? &early_ : nullptr;
    if (queue == nullptr) {
      if (start_one()) continue;
      queue = early_.empty() ? nullptr : &early_;
    }
    if (queue == nullptr) {
      work_.wait(lock);
      continue;
    }
    const Read read = queue->front();
    queue->pop_front();
    const int32_t slot = entries_[read.entry].slot;
    count_busy(1);
    lock.unlock();
    const std::string error = read_piece(read, slot);
    lock.lock();
    count_busy(-1);
    finish(read, error);
  }
}

bool ExpertCache::start_one() {
  const bool is_demand = !wanted_.empty();
  auto& queue = is_demand ? wanted_ : expected_;
  if (queue.empty() || !start(queue.front(), is_demand)) return false;
  queue.pop_front();
  return true;
}

bool ExpertCache::start(int64_t entry, bool is_demand) {
  const int32_t slot = free_slot(is_demand);
  if (slot < 0) return false;
  owners_[slot] = entry;
  errors_.erase(entry);
  Entry& started = entries_[entry];
  const Layout found = layout(entry);
  started.state = State::reading;
  started.slot = slot;
  started.reads_left = static_cast<int32_t>(found.reads.size());
  auto& queue = is_demand ? urgent_ : early_;
  queue.insert(queue.end(), found.reads.begin(), found.reads.end());
  if (!is_demand) {
    ++num_expected_;
    ++stats_.expected;
  }
  work_.notify_all();
  return true;
}

// An empty slot, or that of the expert that is least likely to be chosen when its layer comes next. What nobody waits
// for evicts nothing that was itself read on suspicion, and leaves a pass half of the slots.
int32_t ExpertCache::free_slot(bool is_demand) {
  if (!is_demand && 2 * num_expected_ >= num_slots()) return -1;
  int32_t found = -1;
  float least = 0.0f;
  for (int32_t slot = 0; slot < num_slots(); ++slot) {
    if (owners_[slot] < 0) return slot;
    const Entry& entry = entries_[owners_[slot]];
    if (entry.state != State::ready || entry.is_wanted || (entry.is_expected && !is_demand)) continue;
    const int64_t layer = owners_[slot] / num_experts();
    const int64_t wait = (layer - layer_ + layers_ - 1) % layers_;  // layers until it is passed again
    const float reuse = entry.rank - static_cast<float>(passes_[layer]) / kHalfLife + (entry.is_expected ? 64.0f : 0.0f) -
                        kWaitWeight * static_cast<float>(wait) / static_cast<float>(layers_);
    if (found < 0 || reuse < least) {
      found = slot;
      least = reuse;
    }
  }
  if (found >= 0) {
    Entry& evicted = entries_[owners_[found]];
    if (evicted.is_expected) --num_expected_;
    evicted.is_expected = false;
    evicted.state = State::absent;
    evicted.slot = -1;
    owners_[found] = -1;
  }
  return found;
}

std::string ExpertCache::read_piece(const Read& read, int32_t slot) const {
  char* to = memory_ + slot * slot_bytes_ + read.place;
  int64_t done = 0;
  while (done < read.needed) {
    done = down(done);  // a direct read that stopped short goes on at an aligned place
    const ssize_t count = read_at_(descriptors_[read.file], to + done, read.bytes - done, read.offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      return files_[read.file] + ": reading bytes " + std::to_string(read.offset) + " to " +
             std::to_string(read.offset + read.needed) + " failed: " + std::strerror(errno);
    if (done + count >= read.needed) break;
    if (count == 0 || down(count) == 0)
      return files_[read.file] + " ends at byte " + std::to_string(lseek(descriptors_[read.file], 0, SEEK_END)) +
             ", but an expert lies " +
             "up to byte " + std::to_string(read.offset + read.needed) + ": it was cut off, download it again";
    done += count;
  }
  return {};
}

void ExpertCache::finish(const Read& read, const std::string& error) {
  Entry& entry = entries_[read.entry];
  stats_.read_bytes += read.bytes;
  if (!error.empty()) errors_.emplace(read.entry, error);
  if (--entry.reads_left > 0) return;
  if (errors_.count(read.entry) == 0) {
    entry.state = State::ready;
  } else {
    owners_[entry.slot] = -1;
    entry.slot = -1;
    if (entry.is_expected) --num_expected_;
    entry.is_expected = false;
    // What was read on suspicion fails where it is wanted, if it still does.
    entry.state = entry.is_wanted ? State::failed : State::absent;
    if (!entry.is_wanted) errors_.erase(read.entry);
  }
  arrival_.notify_all();
  work_.notify_all();
}

void ExpertCache::count_busy(int change) {
  if (num_reading_ == 0) busy_since_ns_ = now_ns();
  num_reading_ += change;
  if (num_reading_ == 0) stats_.busy_s += static_cast<double>(now_ns() - busy_since_ns_) * 1e-9;
}

// ---- passes -----------------------------------------------------------------------------------------------------------

void ExpertCache::want(int64_t layer, const int64_t* ids, int64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  open_pass(layer);
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= num_experts()) throw std::out_of_range("want: an id that is no expert's");
    demand(layer * num_experts() + ids[i]);
  }
  forget_expectations(layer);
  announced_ = layer;
  work_.notify_all();
}

void ExpertCache::open_pass(int64_t layer) {
  if (layer < 0 || layer >= layers_) throw std::out_of_range("an expert layer that there is none of");
  for (int64_t entry : held_) entries_[entry].is_wanted = false;  // of a pass that was given up
  held_.clear();
  pending_.clear();
  for (int64_t entry : wanted_)
    if (entries_[entry].state == State::queued) entries_[entry].state = State::absent;
  wanted_.clear();
  layer_ = layer;
  ++passes_[layer];
  ++stats_.passes;
}

void ExpertCache::demand(int64_t index) {
  Entry& entry = entries_[index];
  if (entry.is_wanted) return;
  entry.is_wanted = true;
  held_.push_back(index);
  use(index);
  if (entry.state == State::ready) {
    ++stats_.hits;
  } else if (entry.state == State::reading) {
    ++stats_.early;
    const auto is_own = [index](const Read& read) { return read.entry == index; };
    std::copy_if(early_.begin(), early_.end(), std::back_inserter(urgent_), is_own);
    early_.erase(std::remove_if(early_.begin(), early_.end(), is_own), early_.end());
  } else {
    entry.state = State::queued;
    wanted_.push_back(index);
  }
  if (entry.is_expected) {
    entry.is_expected = false;
    if (entry.slot >= 0) --num_expected_;
  }
}

// Least Recently/Frequently Used (Lee et al., 2001): the sum over uses of 2^(-age / half-life), age in passes over the
// layer. Kept as log2(sum of 2^(pass / half-life)), which stands still while nothing is used.
void ExpertCache::use(int64_t index) {
  ++stats_.uses;
  float& rank = entries_[index].rank;
  const float now = static_cast<float>(passes_[index / num_experts()]) / kHalfLife;
  rank = now + std::log2(1.0f + std::exp2(rank - now));
}

// The layer is here: what was only suspected of it may go.
void ExpertCache::forget_expectations(int64_t layer) {
  const int64_t first = layer * num_experts(), last = first + num_experts();
  const auto is_here = [&](int64_t entry) { return entry >= first && entry < last; };
  for (int64_t entry : expected_)
    if (is_here(entry) && entries_[entry].state == State::queued && !entries_[entry].is_wanted)
      entries_[entry].state = State::absent;
  expected_.erase(std::remove_if(expected_.begin(), expected_.end(), is_here), expected_.end());
  for (int64_t entry = first; entry < last; ++entry) {
    Entry& at = entries_[entry];
    if (at.is_expected && at.slot >= 0) --num_expected_;
    at.is_expected = false;
  }
  // Reads of an expert that are all still to be made are not made.
  for (int64_t entry = first; entry < last; ++entry) {
    Entry& at = entries_[entry];
    if (at.is_wanted || at.state != State::reading) continue;
    const auto is_own = [entry](const Read& read) { return read.entry == entry; };
    if (std::count_if(early_.begin(), early_.end(), is_own) != at.reads_left) continue;
    early_.erase(std::remove_if(early_.begin(), early_.end(), is_own), early_.end());
    owners_[at.slot] = -1;
    at.slot = -1;
    at.state = State::absent;
  }
}

void ExpertCache::expect(int64_t layer, const int64_t* ids, int64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (layer < 0 || layer >= layers_) throw std::out_of_range("an expert layer that there is none of");
  forget_expectations(layer);
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= num_experts()) throw std::out_of_range("expect: an id that is no expert's");
    Entry& entry = entries_[layer * num_experts() + ids[i]];
    if (entry.is_wanted || entry.is_expected) continue;
    entry.is_expected = true;
    if (entry.state == State::ready || entry.state == State::reading) {
      ++num_expected_;
    } else {
      entry.state = State::queued;
      expected_.push_back(layer * num_experts() + ids[i]);
    }
  }
  work_.notify_all();
}

void ExpertCache::begin(int64_t layer, const int32_t* experts, int64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (announced_ != layer) open_pass(layer);
  announced_ = -1;
  pending_.clear();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t entry = layer * num_experts() + experts[i];
    demand(entry);
    pending_.push_back(entry);
  }
  release_others(layer, experts, count);
  forget_expectations(layer);
  work_.notify_all();
}

// What was announced and is not of this pass must not hold the slots that it needs.
void ExpertCache::release_others(int64_t layer, const int32_t* experts, int64_t count) {
  for (int64_t entry : held_) entries_[entry].is_wanted = false;
  held_.clear();
  for (int64_t i = 0; i < count; ++i) {
    held_.push_back(layer * num_experts() + experts[i]);
    entries_[held_.back()].is_wanted = true;
  }
  const auto is_left = [&](int64_t entry) { return !entries_[entry].is_wanted; };
  for (int64_t entry : wanted_)
    if (is_left(entry) && entries_[entry].state == State::queued) entries_[entry].state = State::absent;
  wanted_.erase(std::remove_if(wanted_.begin(), wanted_.end(), is_left), wanted_.end());
}

int64_t ExpertCache::take(int32_t* taken, int64_t* addresses) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (pending_.empty()) return 0;
  const auto is_there = [&](int64_t entry) {
    return entries_[entry].state == State::ready || entries_[entry].state == State::failed;
  };
  if (std::none_of(pending_.begin(), pending_.end(), is_there)) {
    const int64_t since = now_ns(), before = stats_.read_bytes;
    arrival_.wait(lock, [&] { return std::any_of(pending_.begin(), pending_.end(), is_there); });
    stats_.waited_s += static_cast<double>(now_ns() - since) * 1e-9;
    stats_.waited_bytes += stats_.read_bytes - before;
  }
  int64_t count = 0;
  for (int64_t entry : pending_) {
    if (!is_there(entry)) continue;
    const int64_t expert = entry % num_experts();
    taken[count++] = static_cast<int32_t>(expert);
    const bool is_ready = entries_[entry].state == State::ready;
    const Layout found = is_ready ? layout(entry) : Layout{};
    for (int64_t piece = 0; piece < kPieces; ++piece)
      addresses[expert * kPieces + piece] =
          is_ready
              ? reinterpret_cast<int64_t>(memory_ + entries_[entry].slot * slot_bytes_ + found.pieces[piece])
              : 0;
  }
  pending_.erase(std::remove_if(pending_.begin(), pending_.end(), is_there), pending_.end());
  return count;
}

void ExpertCache::give_back(const int32_t* experts, int64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t i = 0; i < count; ++i) entries_[layer_ * num_experts() + experts[i]].is_wanted = false;
  held_.erase(std::remove_if(held_.begin(), held_.end(), [&](int64_t entry) { return !entries_[entry].is_wanted; }),
              held_.end());
  work_.notify_all();
}

void ExpertCache::spoil(int32_t expert, const int32_t* tokens, int64_t count, int64_t first) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string& error = errors_.at(layer_ * num_experts() + expert);
  for (int64_t i = 0; i < count; ++i) faults_.emplace_back(first + tokens[i], error);
}

std::vector<std::pair<int64_t, std::string>> ExpertCache::take_faults() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(faults_, {});
}

ExpertStats ExpertCache::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  ExpertStats now = stats_;
  if (num_reading_ > 0) now.busy_s += static_cast<double>(now_ns() - busy_since_ns_) * 1e-9;
  return now;
}

}  // namespace perilune
