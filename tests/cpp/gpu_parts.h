// Communicators of processes with several GPUs each, for tests.
#pragma once

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpp/device_calls.h"

namespace tfdist::testing {

inline Plan WithGpus(const std::string& transport, int ranks, int hosts, As as, int gpus) {
  Plan plan = PlanFor(transport, ranks, hosts, as);
  for (int gpu = 1; gpu < gpus; ++gpu) {
    plan.device->gpus.push_back({gpu, plan.device->gpus[0].kernels});
  }
  return plan;
}

// This process's GPUs, each with its memory and its number among all GPUs.
struct Gpus {
  explicit Gpus(Communicator& c) : communicator(c) {
    for (size_t gpu = 0; gpu < c.gpus().size(); ++gpu) {
      memories.push_back(std::make_unique<Memory>(static_cast<int>(gpu)));
    }
  }
  Memory& operator[](size_t gpu) { return *memories[gpu]; }
  size_t size() const { return memories.size(); }
  int Rank(size_t gpu) const {
    return communicator.rank() * static_cast<int>(size()) + static_cast<int>(gpu);
  }
  void Clear() {
    for (auto& memory : memories) memory->Clear();
  }

  Communicator& communicator;
  std::vector<std::unique_ptr<Memory>> memories;
};

// The completion of one GPU's part, set by another thread.
class End {
 public:
  Communicator::Done Done() {
    return [this](const Error* error) {
      // Copies the error, whose text threads would otherwise share without the sanitizer's
      // knowledge.
      if (error) told_.emplace(error->code(), std::string(error->what()).c_str());
      end_.set_value();
    };
  }
  void Wait() { end_.get_future().wait(); }
  void Check() const {
    if (told_) throw Error(told_->first, told_->second);
  }

 private:
  std::promise<void> end_;
  std::optional<std::pair<Code, std::string>> told_;
};

// Each GPU joins with its part, the last GPU first; throws the first error.
inline void RunParts(Communicator& c, std::vector<Operation> parts) {
  std::vector<End> ends(parts.size());
  for (size_t gpu = parts.size(); gpu-- > 0;) {
    c.EnqueuePart(gpu, std::move(parts[gpu]), ends[gpu].Done());
  }
  for (End& end : ends) end.Wait();
  for (const End& end : ends) end.Check();
}

// Only one GPU joins.
inline void RunPart(Communicator& c, size_t gpu, Operation part) {
  End end;
  c.EnqueuePart(gpu, std::move(part), end.Done());
  end.Wait();
  end.Check();
}

}  // namespace tfdist::testing
