// A rank of the benchmark of several GPUs: a process with one of them, connected with the others by
// the communicators of the core, as the workers of a job are.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "communicator.h"
#include "device/gpu.h"

namespace tfdist::benchmark {

struct Task {
  int ranks;
  int rounds;
  std::vector<size_t> sizes;  // in bytes, from small to large

  size_t largest() const { return sizes.back(); }
};

// How all-reduces go, as TFDIST_DEVICE_ALGORITHM says it.
constexpr const char* kWays[] = {"p2p", "nccl", "host"};

class Rank {
 public:
  using Communicators = std::map<std::string, std::unique_ptr<Communicator>>;

  // Args: one for each way, and one for the host's memory, "". Rank 0 prints which ones fail.
  Rank(const Task& task, int number, Communicators communicators);
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // Waits for all ranks.
  void Meet();
  // The largest of what all ranks bring, one by one.
  std::vector<double> Slowest(std::vector<double> seconds);
  // What all ranks bring, in their order.
  template <typename T>
  std::vector<T> Gather(const T& own) {
    std::vector<T> all(static_cast<size_t>(task.ranks));
    GatherBytes(&own, all.data(), sizeof(T));
    return all;
  }
  // Waits until the stream has passed.
  void Finish(const std::function<void()>& check = {});

  // The ways that can be gone.
  std::vector<std::string> ways() const;
  // Reduces so many bytes of `memory`, float32, in place.
  void AllReduce(const std::string& way, size_t bytes);

  // Has rank 0 print the slowest rank's seconds of each round, as a line of JSON. Args: its other
  // members.
  void Report(const std::string& members, const std::vector<double>& seconds);
  void Say(const std::string& line) const;

  const Task task;
  const int number;
  const Gpu gpu;
  const DeviceMemory memory, other;  // of the largest size
  const DeviceStream stream;

 private:
  void GatherBytes(const void* own, void* all, size_t bytes);
  Communicator& control() { return *communicators_.at(""); }

  DeviceEvent done_;
  Communicators communicators_;
};

// What is measured; all ranks call these together.
void MeasureCopies(Rank& rank);
void MeasureAllReduces(Rank& rank);
void MeasureNccl(Rank& rank);
void MeasureProducts(Rank& rank);

}  // namespace tfdist::benchmark
