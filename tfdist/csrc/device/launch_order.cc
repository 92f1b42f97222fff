#include "device/launch_order.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "error.h"

namespace tfdist {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::milliseconds(20);

}  // namespace

LaunchOrder& LaunchOrder::Of(int gpu) {
  static std::mutex mutex;
  // This map is never destroyed, because threads may still use it while the process exits.
  static auto& all = *new std::map<int, LaunchOrder>;
  const std::lock_guard<std::mutex> lock(mutex);
  return all[gpu];
}

LaunchOrder::Turn::Turn(LaunchOrder& order, const cuda::Uuid& communicator)
    : order_(order), communicator_(communicator) {
  const std::lock_guard<std::mutex> lock(order_.mutex_);
  number_ = ++order_.last_;
  order_.waiting_.push_back(this);
}

LaunchOrder::Turn::~Turn() {
  const std::lock_guard<std::mutex> lock(order_.mutex_);
  auto& waiting = order_.waiting_;
  waiting.erase(std::find(waiting.begin(), waiting.end(), this));
  order_.changed_.notify_all();
}

void LaunchOrder::Turn::Settle(size_t largest) {
  const std::lock_guard<std::mutex> lock(order_.mutex_);
  number_ = largest;
  order_.last_ = std::max(order_.last_, largest);
  order_.changed_.notify_all();
}

// It is enough to check that no other turn has a smaller number now. The number of a turn can only
// increase, when it is settled, and new turns get larger numbers. Therefore no turn can overtake
// this one later.
void LaunchOrder::Turn::Await(Guard& guard, double seconds) {
  const auto begin = Clock::now();
  std::unique_lock<std::mutex> lock(order_.mutex_);
  const auto has_come = [this] {
    const auto& waiting = order_.waiting_;
    return std::none_of(waiting.begin(), waiting.end(),
                        [this](const Turn* other) { return other->IsBefore(*this); });
  };
  while (!order_.changed_.wait_for(lock, kLook, has_come)) {
    lock.unlock();
    guard.Check();
    if (Clock::now() - begin > std::chrono::duration<double>(seconds)) {
      throw Error(
          Code::kUnavailable,
          "Another communicator has used the GPU for longer than TFDIST_COLLECTIVE_TIMEOUT.");
    }
    lock.lock();
  }
}

bool LaunchOrder::Turn::IsBefore(const Turn& other) const {
  if (number_ != other.number_) return number_ < other.number_;
  return std::memcmp(&communicator_, &other.communicator_, sizeof(communicator_)) < 0;
}

namespace {

using Clock = std::chrono::steady_clock;

std::string Named(size_t gpu) { return "GPU " + std::to_string(gpu); }

}  // namespace

void Assembly::Add(size_t gpu, Operation part, Done done) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (ended_) {
    const Error late =
        error_ ? *error_ : Error(Code::kInternal, "The operation has ended without this GPU.");
    lock.unlock();
    return done(&late);
  }
  parts_[gpu] = {std::move(part), std::move(done)};
  --missing_;
  changed_.notify_all();
}

std::vector<Operation> Assembly::Await(double seconds, const std::function<bool()>& ends) {
  const auto begin = Clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (missing_ > 0) {
    changed_.wait_for(lock, kLook);
    if (missing_ == 0) break;
    if (ends()) return {};
    if (Clock::now() - begin < std::chrono::duration<double>(seconds)) continue;
    const auto is_missing = [](const Part& part) { return !part.operation; };
    const auto missing = std::find_if(parts_.begin(), parts_.end(), is_missing);
    const auto come = std::find_if_not(parts_.begin(), parts_.end(), is_missing);
    char waited[32];
    std::snprintf(waited, sizeof(waited), "%g s.", seconds);
    throw Error(Code::kUnavailable, Named(static_cast<size_t>(missing - parts_.begin())) +
                                        " of this process has not joined " +
                                        Describe(come->operation->fingerprint) + ", where " +
                                        Named(static_cast<size_t>(come - parts_.begin())) +
                                        " has waited for " + waited);
  }
  CheckAlike();
  std::vector<Operation> parts;
  for (Part& part : parts_) parts.push_back(std::move(*part.operation));
  return parts;
}

void Assembly::CheckAlike() const {
  const Fingerprint& first = parts_[0].operation->fingerprint;
  for (size_t gpu = 1; gpu < parts_.size(); ++gpu) {
    const Fingerprint& other = parts_[gpu].operation->fingerprint;
    if (!Agree(first, other)) throw Disagreement(Named(0), first, Named(gpu), other);
  }
}

void Assembly::End(const Error* error) {
  std::vector<Done> waiting;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    if (error) error_ = *error;
    for (Part& part : parts_) {
      if (part.done) waiting.push_back(std::move(part.done));
    }
  }
  for (const Done& done : waiting) done(error);
}

std::shared_ptr<Assembly> Assemblies::Next(size_t gpu, bool* is_first) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto next =
      std::find_if(open_.begin(), open_.end(), [gpu](const Open& open) { return !open.come[gpu]; });
  *is_first = next == open_.end();
  if (*is_first) {
    next = open_.insert(next, {std::make_shared<Assembly>(gpus_), std::vector<bool>(gpus_)});
  }
  next->come[gpu] = true;
  const std::shared_ptr<Assembly> found = next->assembly;
  if (std::all_of(next->come.begin(), next->come.end(), [](bool come) { return come; })) {
    open_.erase(next);
  }
  return found;
}

void Assemblies::Drop(const Assembly* ended) {
  const std::lock_guard<std::mutex> lock(mutex_);
  open_.remove_if([ended](const Open& open) { return open.assembly.get() == ended; });
}

}  // namespace tfdist
