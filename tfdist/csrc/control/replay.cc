#include "control/replay.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>

#include "error.h"

namespace tfdist {
namespace {

struct Replays {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Replay>> all;
  int64_t last = 0;
};

// Returns all replays of this process. They are never destroyed, because TensorFlow's threads may
// still read datasets while the process exits.
Replays& Instance() {
  static Replays* const replays = new Replays;
  return *replays;
}

}  // namespace

void Replay::KeepRows(int64_t workers, int64_t batch) {
  workers_ = workers;
  batch_ = batch;
}

void Replay::SetBatch(int64_t rows) {
  int64_t unknown = 0;
  batch_.compare_exchange_strong(unknown, rows);
}

int64_t Replay::RowsFor(int64_t workers) const {
  const int64_t before = workers_, batch = batch_;
  if (before == 0 || before == workers) return 0;
  return std::max<int64_t>(1, (2 * batch * workers + before) / (2 * before));
}

void Replay::Publish(const RowCounts& now, const RowCounts& before_last) {
  const std::lock_guard<std::mutex> lock(mutex_);
  now_ = now;
  before_last_ = before_last;
}

RowCounts Replay::Counts(bool before_last) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return before_last ? before_last_ : now_;
}

int64_t RegisterReplay() {
  Replays& replays = Instance();
  const std::lock_guard<std::mutex> lock(replays.mutex);
  replays.all[++replays.last] = std::make_shared<Replay>();
  return replays.last;
}

std::shared_ptr<Replay> FindReplay(int64_t number) {
  Replays& replays = Instance();
  const std::lock_guard<std::mutex> lock(replays.mutex);
  const auto found = replays.all.find(number);
  if (found == replays.all.end()) {
    throw Error(Code::kClosed, "Replay " + std::to_string(number) +
                                   " does not exist in this process, or has been closed.");
  }
  return found->second;
}

void RemoveReplay(int64_t number) {
  Replays& replays = Instance();
  const std::lock_guard<std::mutex> lock(replays.mutex);
  replays.all.erase(number);
}

}  // namespace tfdist
