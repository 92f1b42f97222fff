// The ends of connections: a farewell arrives after all other frames, and no forked child keeps a
// connection open.
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "control/watch.h"
#include "cpp/calls.h"
#include "transport/socket.h"

namespace tfdist::testing {
namespace {

// The other end of a connection, which a test reads and writes.
class OtherEnd {
 public:
  OtherEnd() {
    int ends[2];
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    const int small = 4096;
    EXPECT(setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof(small)) == 0);
    // A generous limit for data that must arrive, even on a slow machine.
    const timeval patience{30, 0};
    EXPECT(setsockopt(ends[1], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) == 0);
    given_ = ends[0];
    descriptor_ = ends[1];
  }
  ~OtherEnd() { Close(); }

  int given() const { return given_; }
  ssize_t Read(char* bytes, size_t most) const { return recv(descriptor_, bytes, most, 0); }
  void Write(const Frame& frame) const {
    const std::string bytes = Encode(frame);
    (void)!send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  void Shut() const { shutdown(descriptor_, SHUT_WR); }
  void Close() {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = -1;
  }

 private:
  int given_ = -1;
  int descriptor_ = -1;
};

// The watch of rank 0, with the other end as rank 1.
std::unique_ptr<Watch> WatchOver(const OtherEnd& end, double parting_seconds) {
  Watch::Settings settings;
  settings.names = {"rank 0", "rank 1"};
  settings.silence_warning_seconds = settings.silence_timeout_seconds = 3600;
  settings.parting_seconds = parting_seconds;
  const auto nothing = [](const std::string&) {};
  Watch::Callbacks callbacks{[] { return Doing{}; },
                             [](uint64_t, Fingerprint*) { return false; },
                             [](int, const Fingerprint&) { return false; },
                             [] {},
                             [](const Error&) {},
                             nothing,
                             nothing,
                             nothing,
                             [] {}};
  Streams streams(2);
  streams[1] = std::make_unique<Socket>(end.given());
  auto watch =
      std::make_unique<Watch>(std::move(settings), std::move(streams), std::move(callbacks));
  watch->Start();
  return watch;
}

// More than the connection holds, to a rank that reads late and has sent something meanwhile.
void AFarewellBehindMuch() {
  OtherEnd end;
  const auto watch = WatchOver(end, 3600);
  Frame failure;
  failure.kind = FrameKind::kFailure;
  failure.message = std::string(1000, 'x');
  watch->Tell(std::vector<Frame>(200, failure));
  std::thread stopping([&] { watch->Stop(); });
  FrameReader reader;
  int failures = 0, farewells = 0;
  char bytes[4096];
  ssize_t got;
  while ((got = end.Read(bytes, sizeof(bytes))) > 0) {
    reader.Feed(bytes, static_cast<size_t>(got), [&](const Frame& frame) {
      failures += frame.kind == FrameKind::kFailure;
      farewells += frame.kind == FrameKind::kFarewell;
    });
    end.Write({});
  }
  end.Close();
  stopping.join();
  EXPECT(got == 0);
  EXPECT(failures == 200);
  EXPECT(farewells == 1);
}

void NobodyReadsTheFarewell() {
  const OtherEnd end;
  WatchOver(end, 0.05)->Stop();
}

// A rank that has sent its farewell need not wait until this rank also leaves.
void AFarewellIsAnswered() {
  const OtherEnd end;
  const auto watch = WatchOver(end, 0.05);
  Frame farewell;
  farewell.kind = FrameKind::kFarewell;
  end.Write(farewell);
  end.Shut();
  char bytes[4096];
  ssize_t got;
  while ((got = end.Read(bytes, sizeof(bytes))) > 0) continue;
  EXPECT(got == 0);
}

void AForkedChildKeepsNoneOpen() {
  const OtherEnd end;
  auto socket = std::make_unique<Socket>(end.given());
  const pid_t child = fork();
  EXPECT(child >= 0);
  if (child == 0) {
    for (;;) pause();
  }
  socket = nullptr;
  char byte;
  const ssize_t got = end.Read(&byte, 1);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT(got == 0);
}

// A child must not close a later descriptor with the number of a closed connection.
void AForkedChildKeepsTheRest() {
  const OtherEnd end;
  std::make_unique<Socket>(end.given()).reset();
  EXPECT(open("/dev/null", O_RDONLY | O_CLOEXEC) == end.given());
  const pid_t child = fork();
  EXPECT(child >= 0);
  if (child == 0) _exit(fcntl(end.given(), F_GETFD) >= 0 ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  close(end.given());
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report([] {
    AForkedChildKeepsNoneOpen();
    AForkedChildKeepsTheRest();
    AFarewellBehindMuch();
    NobodyReadsTheFarewell();
    AFarewellIsAnswered();
  });
}
