#include "control/replay.h"

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

// Never destroyed: TensorFlow's threads may read datasets while the process ends.
Replays& Instance() {
  static Replays* const replays = new Replays;
  return *replays;
}

}  // namespace

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
