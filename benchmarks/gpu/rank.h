// A rank of the benchmark of several GPUs: a process that uses one GPU. Communicators of the core
// connect the ranks, like the workers of a job.
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
  std::vector<size_t> sizes;  // The sizes to reduce in bytes, in ascending order.

  size_t largest() const { return sizes.back(); }
};

// The ways to run an all-reduce that are measured: values of TFDIST_DEVICE_ALGORITHM.
constexpr const char* kWays[] = {"p2p", "nccl", "host"};

class Rank {
 public:
  using Communicators = std::map<std::string, std::unique_ptr<Communicator>>;

  // Args:
  //   number: the rank of this process, and the number of its GPU.
  //   communicators: a communicator for each way in `kWays`, and with the key "" a communicator for
  //     tensors in the host's memory. The constructor tries an all-reduce in each way. If a way
  //     fails on any rank, it is not measured, and rank 0 prints the reason.
  Rank(const Task& task, int number, Communicators communicators);
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // A barrier: waits until all ranks have called this method.
  void Meet();
  // For each element, returns the maximum over all ranks.
  std::vector<double> Slowest(std::vector<double> seconds);
  // Returns the values of all ranks, ordered by rank.
  template <typename T>
  std::vector<T> Gather(const T& own) {
    std::vector<T> all(static_cast<size_t>(task.ranks));
    GatherBytes(&own, all.data(), sizeof(T));
    return all;
  }
  // Waits until the stream has completed all its operations. Calls `check` repeatedly until then.
  void Finish(const std::function<void()>& check = {});

  // Returns the ways that did not fail.
  std::vector<std::string> ways() const;
  // Reduces the first `bytes` bytes of `memory`, as float32 values and in place.
  void AllReduce(const std::string& way, size_t bytes);

  // Prints a figure as a line of JSON, on rank 0. All ranks must call this method.
  //
  // Args:
  //   members: the members of the JSON object, except for `seconds`.
  //   seconds: this rank's time in each round. The line contains the times of the slowest rank.
  void Report(const std::string& members, const std::vector<double>& seconds);
  // Prints a line, on rank 0.
  void Say(const std::string& line) const;

  const Task task;
  const int number;
  const Gpu gpu;
  const DeviceMemory memory, other;  // Each has `task.largest()` bytes.
  const DeviceStream stream;

 private:
  void GatherBytes(const void* own, void* all, size_t bytes);
  Communicator& control() { return *communicators_.at(""); }

  DeviceEvent done_;
  Communicators communicators_;
};

// The measurements. All ranks must call these functions in the same order.
void MeasureCopies(Rank& rank);
void MeasureAllReduces(Rank& rank);
void MeasureNccl(Rank& rank);
void MeasureProducts(Rank& rank);

}  // namespace tfdist::benchmark
