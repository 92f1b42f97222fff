#include "control/flight_log.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "control/activity.h"
#include "control/communicator_state.h"
#include "error.h"

namespace tfdist {
namespace {

template <typename T>
void Set(std::atomic<T>* value, T to) {
  value->store(to, std::memory_order_relaxed);
}

template <typename T>
T Get(const std::atomic<T>& value) {
  return value.load(std::memory_order_relaxed);
}

}  // namespace

void Recorder::Changing::Clear() {
  Set<uint8_t>(&algorithm, 0);
  Set(&last, -1);
  for (auto* time : {&last_arrived, &between_begun, &between_ended, &coding}) Set<int64_t>(time, 0);
}

void Recorder::Changing::CopyTo(Record* record) const {
  record->algorithm = Get(algorithm);
  record->last = Get(last);
  record->last_arrived = Get(last_arrived);
  record->between_begun = Get(between_begun);
  record->between_ended = Get(between_ended);
  record->coding = Get(coding);
}

uint64_t HashOf(const Fingerprint& fingerprint) {
  const size_t length = strnlen(fingerprint.name, sizeof(fingerprint.name));
  return std::hash<std::string_view>()({fingerprint.name, length}) | 1;
}

Recorder::Recorder(const std::vector<int>& host_of)
    : host_of_(host_of),
      hosts_(1 + static_cast<size_t>(*std::max_element(host_of_.begin(), host_of_.end()))),
      records_(kRecords),
      arrivals_(kRecords * hosts_),
      seen_(host_of.size()) {}

void Recorder::Ready(uint64_t name, bool stalls) {
  if (!recording_.load(std::memory_order_relaxed)) return;
  const int64_t now = Nanoseconds();
  const std::lock_guard<std::mutex> lock(mutex_);
  marks_[marked_++ % kMarks] = {name, now};
  if (!stalls) {
    ++overlapping_;
  } else if (!stalled_since_) {
    stalled_since_ = now;
  }
}

void Recorder::Stalls() {
  if (!recording_.load(std::memory_order_relaxed)) return;
  const int64_t now = Nanoseconds();
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool overlaps = open_ && !stalls_;
  if (!overlaps && !overlapping_) return;
  (overlaps ? stalls_ : next_stalls_) = true;
  if (!stalled_since_) stalled_since_ = now;
}

void Recorder::Forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ForgetLocked();
}

void Recorder::ForgetLocked() {
  marked_ = 0;
  overlapping_ = 0;
  next_stalls_ = false;
  // An operation that is still running may stall this rank. The start of this stall is needed until
  // the operation ends.
  if (!open_) stalled_since_ = 0;
}

void Recorder::Begin(const Fingerprint& fingerprint, const Beginning& beginning) {
  if (!recording_.load(std::memory_order_relaxed)) return;
  const int64_t now = Nanoseconds();
  const std::lock_guard<std::mutex> lock(mutex_);
  Record& record = current();
  record = {};
  record.fingerprint = fingerprint;
  record.number = written_ + 1;
  record.bytes = beginning.bytes;
  record.peer = beginning.peer;
  record.enqueued = beginning.enqueued;
  record.begun = looked_ = now;
  if (marked_) {
    const uint64_t name = HashOf(fingerprint);
    for (size_t i = 0; i < std::min(marked_, kMarks); ++i) {
      if (marks_[i].name != name) continue;
      record.enqueued = std::min(record.enqueued, marks_[i].at);
      marks_[i].name = 0;
    }
  }
  changing_.Clear();
  for (size_t host = 0; host < hosts_; ++host) Set(&arrivals()[host], 0u);
  stalls_ = beginning.stalls;
  if (!stalls_ && overlapping_) {
    --overlapping_;
    stalls_ = std::exchange(next_stalls_, false);
  }
  if (stalls_ && !stalled_since_) stalled_since_ = record.enqueued;
  open_ = true;
}

void Recorder::Chose(uint8_t algorithm) { Set(&changing_.algorithm, algorithm); }

void Recorder::BetweenHosts(bool begins) {
  Set(begins ? &changing_.between_begun : &changing_.between_ended, Nanoseconds());
}

void Recorder::Coded(int64_t duration) { Set(&changing_.coding, Get(changing_.coding) + duration); }

void Recorder::Arrived(int rank, bool waited) {
  // Only this thread writes `open_` and `seen_`, so it can read them without a lock.
  if (!open_) return;
  uint64_t& seen = seen_[static_cast<size_t>(rank)];
  if (seen == written_ + 1) return;
  seen = written_ + 1;
  std::atomic<uint32_t>& arrival = arrivals()[host_of_[static_cast<size_t>(rank)]];
  const bool first = Get(arrival) == 0;
  if (waited) looked_ = Nanoseconds();
  if (first) {
    constexpr int64_t kMax = std::numeric_limits<uint32_t>::max();
    const int64_t microseconds = (looked_ - current().begun) / 1000 + 1;
    Set(&arrival, static_cast<uint32_t>(std::min(microseconds, kMax)));
  }
  if (!waited) return;
  Set(&changing_.last, rank);
  Set(&changing_.last_arrived, looked_);
}

void Recorder::End(bool failed, uint64_t bytes) {
  const int64_t now = Nanoseconds();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!open_) return;
  Record& record = current();
  changing_.CopyTo(&record);
  record.failed = failed;
  record.bytes = std::max(record.bytes, bytes);
  record.ended = now;
  open_ = false;
  ++written_;
  const int64_t arrived = std::max(record.begun, record.last_arrived);
  if (stalled_since_) {
    Activity::Instance().Stalled(std::max(stalled_since_, record.begun), arrived, now);
  }
  if (failed) return ForgetLocked();
  if (stalls_) stalled_since_ = 0;
  Activity::Instance().Ended(record.fingerprint.kind, record.bytes, participants_, now - arrived);
}

Recorder::Log Recorder::Read(size_t most, int64_t since) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Log log;
  const uint64_t end = written_ + (open_ ? 1 : 0);
  for (uint64_t i = end - std::min<uint64_t>(end, std::min(most, kRecords)); i < end; ++i) {
    const size_t at = i % kRecords;
    const Record& record = records_[at];
    if (record.ended && record.ended < since) continue;
    log.records.push_back(record);
    if (i == written_) changing_.CopyTo(&log.records.back());
    std::vector<int64_t> arrivals;
    arrivals.reserve(hosts_);
    for (size_t host = 0; host < hosts_; ++host) {
      const uint32_t arrival = Get(arrivals_[at * hosts_ + host]);
      arrivals.push_back(static_cast<int64_t>(arrival) - 1);
    }
    log.arrivals.push_back(std::move(arrivals));
  }
  return log;
}

namespace {

// The maximum time that the log waits for the stacks of Python's threads. To provide them, Python
// needs its global interpreter lock, which may be held by a thread that hangs.
constexpr auto kForStacks = std::chrono::seconds(2);
constexpr size_t kMaxReasons = 16;
constexpr int64_t kBetweenWaited = 1'000'000'000;
constexpr int64_t kFormat = 1;

int signal_descriptor = -1;
// The process that has installed the signal handler. A forked child inherits the handler and the
// descriptor, but must not write to the descriptor.
pid_t signal_process = 0;
struct sigaction former_action;

// Requests that the log be written, and then calls the former handler. Apart from that handler,
// only functions that are safe in a signal handler are called.
void OnSignal(int number, siginfo_t* information, void* context) {
  const int saved = errno;
  const uint64_t by_signal = uint64_t{1} << 32;
  if (getpid() == signal_process && write(signal_descriptor, &by_signal, sizeof(by_signal)) < 0) {
    // The write fails only if the eventfd is full. The thread then wakes up anyway, so nothing
    // needs to be done.
  }
  errno = saved;
  if (former_action.sa_flags & SA_SIGINFO) {
    if (former_action.sa_sigaction) former_action.sa_sigaction(number, information, context);
  } else if (former_action.sa_handler != SIG_DFL && former_action.sa_handler != SIG_IGN) {
    former_action.sa_handler(number);
  }
}

int64_t UnixNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Writes the whole text to the file, and syncs the file to disk. Returns 0 on success, and
// otherwise the value of errno.
int WriteAll(int file, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t wrote = write(file, text.data() + done, text.size() - done);
    if (wrote < 0 && errno != EINTR) return errno;
    if (wrote > 0) done += static_cast<size_t>(wrote);
  }
  return fsync(file) ? errno : 0;
}

// Replaces a file atomically: a reader sees either the whole old file or the whole new file.
// Returns 0 on success, and otherwise the value of errno.
int Replace(const std::string& path, const std::string& text) {
  const std::string unfinished = path + ".tmp";
  const int file = open(unfinished.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) return errno;
  int error = WriteAll(file, text);
  if (close(file) && !error) error = errno;
  if (!error && std::rename(unfinished.c_str(), path.c_str())) error = errno;
  if (error) unlink(unfinished.c_str());
  return error;
}

}  // namespace

FlightLog& FlightLog::Instance() {
  static FlightLog* const log = new FlightLog;
  return *log;
}

void FlightLog::Start(Settings settings) {
  if (started_) return;
  settings_ = std::move(settings);
  asked_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  stacks_wanted_ = eventfd(0, EFD_CLOEXEC);
  if (asked_ < 0 || stacks_wanted_ < 0) {
    throw Error(Code::kInternal, std::string("There is no descriptor left (") +
                                     std::strerror(errno) + "). Raise the limit of open files.");
  }
  process_ = getpid();
  thread_ = std::thread([this] { Loop(); });
  started_ = true;
}

void FlightLog::Ask(const char* kind, const std::string& communicator, const std::string& message) {
  if (!started_ || getpid() != process_) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Many ranks may report almost simultaneously that they wait for this rank. Only the first of
    // these reports is recorded as a reason.
    if (!reasons_.empty() && reasons_.back().kind == kind && reasons_.back().kind == "waited" &&
        Nanoseconds() - reasons_.back().at < kBetweenWaited) {
      return;
    }
    // If there are already kMaxReasons reasons, the new reason replaces the last one. The first
    // reasons are kept, because they are closest to the cause.
    if (reasons_.size() == kMaxReasons) reasons_.pop_back();
    reasons_.push_back({Nanoseconds(), kind, communicator, message});
    ++requests_;
  }
  changed_.notify_all();
  const uint64_t one = 1;
  // The write fails only if the eventfd is full. The thread then wakes up anyway.
  if (write(asked_, &one, sizeof(one)) < 0) return;
}

void FlightLog::Stalled(const std::string& communicator, const std::string& message) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stalled_ = message;
  }
  Ask("stall", communicator, message);
}

std::string FlightLog::TakeStalled() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(stalled_, std::string());
}

void FlightLog::AskOnSignal(int number) {
  if (!started_ || signal_descriptor >= 0) return;
  signal_descriptor = asked_;
  signal_process = process_;
  struct sigaction action = {};
  action.sa_sigaction = OnSignal;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(number, nullptr, &former_action);
  sigaction(number, &action, nullptr);
}

void FlightLog::Move(const std::string& path, const std::string& header) {
  const std::lock_guard<std::mutex> lock(mutex_);
  settings_.path = path;
  settings_.header = header;
  reasons_.clear();
  session_.clear();
  stacks_.clear();
}

void FlightLog::SetSession(const std::string& session) {
  const std::lock_guard<std::mutex> lock(mutex_);
  session_ = session;
}

void FlightLog::GiveStacks(const std::string& stacks) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stacks_ = stacks;
    stacks_given_ = requests_;
  }
  changed_.notify_all();
}

void FlightLog::Flush(double seconds) {
  if (!started_ || getpid() != process_) return;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                    [this] { return written_ == requests_; });
}

void FlightLog::Loop() {
  pthread_setname_np(pthread_self(), "tfdist-flight");
  // This thread blocks all signals, so that the program's own threads handle them.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  for (;;) {
    pollfd polled{asked_, POLLIN, 0};
    if (poll(&polled, 1, -1) < 0) continue;
    uint64_t count = 0;
    if (read(asked_, &count, sizeof(count)) < 0) continue;
    if (count >> 32) Ask("signal", "", "A signal has asked for it.");
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t requested = requests_;
    if (requested == written_) continue;
    lock.unlock();
    WriteFile();
    const uint64_t one = 1;
    if (write(stacks_wanted_, &one, sizeof(one)) == sizeof(one)) {
      lock.lock();
      // A new request ends this wait for the stacks, because the new request must be written first:
      // the process may soon be killed.
      changed_.wait_for(lock, kForStacks,
                        [&] { return stacks_given_ >= requested || requests_ > requested; });
      const bool given = stacks_given_ >= requested;
      lock.unlock();
      if (given) WriteFile();
    }
    lock.lock();
    written_ = requested;
    lock.unlock();
    changed_.notify_all();
  }
}

std::string FlightLog::Text() {
  const std::string communicators = settings_.communicators();
  JsonWriter json;
  std::string header;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    header = settings_.header;
  }
  json.Open('{').Member("format", kFormat).Raw(header);
  const int64_t steady_now = Nanoseconds(), unix_now = UnixNanoseconds();
  const int64_t milliseconds = unix_now / 1'000'000;
  char seconds[32];
  // Prints the seconds as two integers. A floating-point number could have a decimal comma,
  // depending on the program's locale.
  std::snprintf(seconds, sizeof(seconds), "%lld.%03lld",
                static_cast<long long>(milliseconds / 1000),
                static_cast<long long>(milliseconds % 1000));
  json.Key("written").Raw(seconds);
  json.Key("clock").Open('{').Member("steady_ns", steady_now).Member("unix_ns", unix_now);
  json.Close('}');
  const Activity::Totals activity = Activity::Instance().Read();
  json.Member("steps", static_cast<int64_t>(activity.steps));
  json.Member("input_since_ns", activity.input_since);
  const std::lock_guard<std::mutex> lock(mutex_);
  json.Key("reasons").Open('[');
  for (const Reason& reason : reasons_) {
    json.Open('{').Member("steady_ns", reason.at).Member("kind", reason.kind);
    json.Member("communicator", reason.communicator).Member("message", reason.message);
    json.Close('}');
  }
  json.Close(']').Key("communicators").Raw(communicators);
  if (!session_.empty()) json.Key("session").Raw(session_);
  json.Member("stacks", stacks_).Close('}');
  return json.text() + "\n";
}

void FlightLog::WriteFile() {
  int error = ENOMEM;
  std::string path;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    path = settings_.path;
  }
  try {
    error = Replace(path, Text());
  } catch (const std::exception&) {
    // There is not enough memory for the log. Training continues, and the warning below reports the
    // error as ENOMEM.
  }
  if (error && error != last_error_) {
    settings_.warn("The flight log " + path + " could not be written: " + std::strerror(error) +
                   ". Set TFDIST_FLIGHT_DIR to another directory.");
  }
  last_error_ = error;
}

}  // namespace tfdist
