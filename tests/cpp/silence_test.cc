// A rank that is silent while its connection is open is named in a warning, and not immediately
// lost.
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <string>

#include "control/watch.h"
#include "cpp/calls.h"
#include "transport/socket.h"

namespace tfdist::testing {
namespace {

// The messages of a watch.
class Heard {
 public:
  void Add(const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    last_ = message;
    changed_.notify_all();
  }
  // Waits for a message that contains these words.
  void Await(const std::string& words) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return last_.find(words) != std::string::npos; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string last_;
};

void SilentForAWhile(double timeout_seconds) {
  int ends[2];
  EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  Heard warnings, reasons;
  Watch::Settings settings;
  settings.names = {"rank 0", "rank 1"};
  settings.silence_warning_seconds = 0.2;
  settings.silence_timeout_seconds = timeout_seconds;
  Watch::Callbacks callbacks{[] { return Doing{}; },
                             [](uint64_t, Fingerprint*) { return false; },
                             [](int, const Fingerprint&) { return false; },
                             [] {},
                             [&](const Error& cause) { reasons.Add(cause.what()); },
                             [&](const std::string& message) { warnings.Add(message); },
                             [](const std::string&) {},
                             [](const std::string&) {},
                             [] {}};
  Streams streams(2);
  streams[1] = std::make_unique<Socket>(ends[0]);
  Watch watch(std::move(settings), std::move(streams), std::move(callbacks));
  watch.Start();
  warnings.Await("No sign of life from rank 1 for ");
  const std::string status = Encode(Frame{});
  EXPECT(write(ends[1], status.data(), status.size()) == static_cast<ssize_t>(status.size()));
  warnings.Await("rank 1 responds again, after ");
  if (timeout_seconds < 10) reasons.Await("rank 1 is lost: no sign of life for ");
  watch.Stop();
  close(ends[1]);
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report([] {
    SilentForAWhile(3600);
    SilentForAWhile(2);
  });
}
