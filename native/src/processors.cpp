#include "processors.h"

#include <cstdio>
#include <fstream>
#include <sstream>
#include <thread>

namespace perilune {
namespace {

// False where the machine has more processors than the set has bits.
bool read_allowed(cpu_set_t& allowed) {
  CPU_ZERO(&allowed);
  return sched_getaffinity(0, sizeof(allowed), &allowed) == 0;
}

std::vector<int> read_list_file(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return read_list(line);
}

// Which of its core's usable processors this one is; 0 where nothing is known.
int rank_in_core(int processor, const cpu_set_t& allowed, const std::string& system) {
  int rank = 0;
  for (int other : read_list_file(system + "/cpu/cpu" + std::to_string(processor) + "/topology/thread_siblings_list"))
    if (other < processor && CPU_ISSET(other, &allowed)) ++rank;
  return rank;
}

std::vector<int> usable_of(const std::vector<int>& listed, const cpu_set_t& allowed, const std::string& system) {
  std::vector<int> ordered;
  size_t num_usable = 0;
  for (int processor : listed) num_usable += CPU_ISSET(processor, &allowed) ? 1 : 0;
  for (int rank = 0; ordered.size() < num_usable; ++rank)
    for (int processor : listed)
      if (CPU_ISSET(processor, &allowed) && rank_in_core(processor, allowed, system) == rank)
        ordered.push_back(processor);
  return ordered;
}

}  // namespace

int num_usable_processors() {
  cpu_set_t allowed;
  if (read_allowed(allowed)) return CPU_COUNT(&allowed);
  const unsigned all = std::thread::hardware_concurrency();
  return all == 0 ? 1 : static_cast<int>(all);
}

cpu_set_t only(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  return set;
}

std::vector<int> read_list(const std::string& text) {
  std::vector<int> numbers;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    int first, last;
    const int found = std::sscanf(range.c_str(), "%d-%d", &first, &last);
    if (found < 1) continue;
    if (found == 1) last = first;
    for (int number = first; number <= last && number < CPU_SETSIZE; ++number) numbers.push_back(number);
  }
  return numbers;
}

std::vector<std::vector<int>> usable_nodes(const cpu_set_t& allowed, const std::string& system) {
  std::vector<std::vector<int>> nodes;
  for (int node : read_list_file(system + "/node/online")) {
    const std::string list = system + "/node/node" + std::to_string(node) + "/cpulist";
    std::vector<int> usable = usable_of(read_list_file(list), allowed, system);
    if (!usable.empty()) nodes.push_back(usable);
  }
  if (!nodes.empty()) return nodes;
  std::vector<int> all;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor)
    if (CPU_ISSET(processor, &allowed)) all.push_back(processor);
  return {usable_of(all, allowed, system)};
}

std::vector<Place> places_of_threads(int count, const std::vector<std::vector<int>>& nodes) {
  std::vector<size_t> node_of_processor;
  for (size_t node = 0; node < nodes.size(); ++node)
    node_of_processor.insert(node_of_processor.end(), nodes[node].size(), node);
  std::vector<size_t> num_placed(nodes.size());
  std::vector<Place> places;
  for (int thread = 0; thread < count; ++thread) {
    const size_t node = node_of_processor[thread * node_of_processor.size() / count];
    Place place;
    CPU_ZERO(&place.node);
    for (int processor : nodes[node]) CPU_SET(processor, &place.node);
    place.processor = nodes[node][num_placed[node]++ % nodes[node].size()];
    places.push_back(place);
  }
  return places;
}

std::vector<Place> places_of_threads(int count) {
  cpu_set_t allowed;
  if (!read_allowed(allowed))
    for (int processor = 0; processor < CPU_SETSIZE; ++processor) CPU_SET(processor, &allowed);
  return places_of_threads(count, usable_nodes(allowed, kSystem));
}

}  // namespace perilune
