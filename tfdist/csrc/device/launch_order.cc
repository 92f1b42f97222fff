#include "device/launch_order.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

#include "error.h"

namespace tfdist {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::milliseconds(20);

}  // namespace

LaunchOrder& LaunchOrder::Of(int gpu) {
  static std::mutex mutex;
  // Never destroyed: threads may use it at the process's end.
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

// What has only been proposed becomes no smaller; so what is smallest stays so.
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
      throw Error(Code::kUnavailable,
                  "Another communicator has kept its turn to use the GPU for longer than "
                  "TFDIST_COLLECTIVE_TIMEOUT gives.");
    }
    lock.lock();
  }
}

bool LaunchOrder::Turn::IsBefore(const Turn& other) const {
  if (number_ != other.number_) return number_ < other.number_;
  return std::memcmp(&communicator_, &other.communicator_, sizeof(communicator_)) < 0;
}

}  // namespace tfdist
