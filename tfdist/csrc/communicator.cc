#include "communicator.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <thread>

#include "control/flight_log.h"
#include "transport/fabric.h"
#include "vector_unit.h"

namespace tfdist {
namespace {

// When a link breaks, a rank waits this long for another rank to report the cause over a control
// connection.
constexpr auto kAbortReasonGrace = std::chrono::milliseconds(1500);

// After an operation has been canceled, a rank waits this long for its program to report why the
// step failed.
constexpr auto kStepErrorGrace = std::chrono::milliseconds(1500);

// A rank that closes the communicator waits at most this long for the other ranks, because they may
// still read the memory of this rank's GPUs.
constexpr auto kFarewellGrace = std::chrono::seconds(2);

// A canceled operation fails when the group has made no progress for a certain time. This time is
// at least this number of intervals between status frames, so that a late status frame is not
// mistaken for a lack of progress.
constexpr double kStatusesOfPatience = 4;

std::string Elapsed(Clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(duration).count());
  return text;
}

// Returns the error of a failed operation. Its message consists of the message of the cause, and a
// sentence about the operation that has detected the cause. Only people read this text; programs
// get the same information from `AbortState`.
Error Detected(const Error& cause, const Operation& operation, int rank, Clock::duration after) {
  std::string text = cause.what();
  if (text.empty() || text.back() != '.') text += ".";
  text += " Detected in " + Describe(operation.fingerprint) + " on rank " + std::to_string(rank) +
          ", " + Elapsed(after) + " after it started.";
  return Error(cause.code(), text, cause.event(), cause.worker());
}

// Returns the size of the operation's input or output, whichever is larger. An output that has not
// been allocated yet counts as 0 bytes.
uint64_t Bytes(const Operation& operation) {
  const Operation& first = operation.parts.empty() ? operation : operation.parts[0];
  return std::max(first.in.bytes(), first.out.bytes());
}

uint32_t HashOf(const Compression& compression) {
  return tfdist::HashOf(compression.codec) ^ (compression.within_hosts ? 0x100u : 0u);
}

std::unique_ptr<Host> MakeHost(const Topology& topology, std::unique_ptr<Segment> segment,
                               Guard& guard, Recorder& recorder) {
  std::vector<std::string> names;
  for (const int rank : topology.my_host()) {
    names.push_back(topology.names[static_cast<size_t>(rank)]);
  }
  return std::make_unique<Host>(std::move(segment), topology.my_place(), topology.my_host(),
                                std::move(names), guard, recorder);
}

// While an object of this class exists, `*current` is the cancellation of an operation. The
// destructor sets `*current` back to null.
class Current {
 public:
  Current(const Cancellation** current, const Operation& operation) : current_(current) {
    *current_ = operation.cancellation.get();
  }
  ~Current() { *current_ = nullptr; }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Cancellation** const current_;
};

}  // namespace

Communicator::Communicator(Setup setup)
    : name_(setup.name),
      algorithm_(AlgorithmNamed(setup.algorithm.c_str())),
      recorder_(Topology::From(setup.rank, setup.names, setup.hosts).host_of),
      fabric_{Topology::From(setup.rank, setup.names, setup.hosts), nullptr, {}, *this, recorder_},
      timeout_seconds_(setup.timeout_seconds),
      patience_(std::max(setup.patience_seconds,
                         kStatusesOfPatience * Watch::SlowStatusSeconds(setup.names.size()))),
      queue_(setup.name, [this](Operation& operation) { Execute(operation); }) {
  const Topology& topology = fabric_.topology;
  const auto size = static_cast<size_t>(topology.size);
  Connections connections =
      Connect(setup.rank, setup.names, setup.control, setup.data, setup.tls, setup.start_seconds);
  if (setup.device) {
    DevicePath::Setup device = *setup.device;
    device.timeout_seconds = setup.timeout_seconds;
    device.warn = setup.warn;
    device_ = std::make_unique<DevicePath>(std::move(device), gpu_guard_);
    gpus_ = device_->gpus();
    kernels_ = device_->kernels();
    recorder_.SetParticipants(static_cast<size_t>(participants()));
    if (gpus_.size() > 1) assemblies_ = std::make_unique<Assemblies>(gpus_.size());
  }
  fabric_.host = MakeHost(topology, std::move(setup.segment), *this, recorder_);
  messages_to_.assign(size, 0);
  messages_from_.assign(size, 0);
  for (size_t other = 0; other < size; ++other) {
    std::unique_ptr<Link> link;
    if (auto& stream = connections.data[other]) {
      link = std::make_unique<SocketLink>(std::move(stream), topology.names[other]);
    } else if (static_cast<int>(other) != topology.rank) {
      link = std::make_unique<RingLink>(*fabric_.host, topology.place_of[other]);
    }
    fabric_.links.push_back(std::move(link));
  }
  Watch::Settings settings{topology.rank,
                           topology.names,
                           setup.silence_warning_seconds,
                           setup.silence_timeout_seconds,
                           setup.stall_seconds,
                           setup.timeout_seconds};
  Watch::Callbacks callbacks{
      [this] { return CurrentlyDoing(); },
      [this](uint64_t sequence, Fingerprint* joined) { return Joined(sequence, joined); },
      [this](int peer, const Fingerprint& message) { return HasHandled(peer, message); },
      [this] { progress_.NoteOther(); },
      [this](const Error& cause) { GiveUp(cause, true); },
      setup.warn,
      [this](const std::string& message) { FlightLog::Instance().Stalled(name_, message); },
      [this](const std::string& message) { FlightLog::Instance().Ask("waited", name_, message); },
      [this] { SpreadWhatIsDue(); }};
  if (setup.news > 0) news_ = fcntl(setup.news, F_DUPFD_CLOEXEC, 0);
  watch_ = std::make_unique<Watch>(std::move(settings), std::move(connections.control),
                                   std::move(callbacks));
  watch_->Start();
  try {
    queue_.Start();
  } catch (...) {
    // The watch thread uses members of this object, which are about to be destroyed, so the thread
    // must stop first.
    watch_->Stop();
    if (news_ >= 0) close(news_);
    throw;
  }
}

Communicator::~Communicator() {
  Close();
  if (news_ >= 0) close(news_);
}

void Communicator::Execute(Operation& operation) {
  const FloatMode mode;
  const Current current(&cancellation_, operation);
  AwaitInput(operation);
  try {
    if (operation.awaits) return AwaitLaunched();
    Begin(operation);
    Check();
    const bool launched = Dispatch(operation);
    if (device_) device_bytes_ = device_->moved_bytes();
    End(operation, false, launched);
    collectives_.fetch_add(1, std::memory_order_relaxed);
  } catch (const std::exception& error) {
    // Not only an Error but any exception aborts the group. Otherwise, the other ranks would wait
    // until they time out.
    Fail(operation, AsError(error));
  }
}

Error Communicator::AsError(const std::exception& error) const {
  if (const auto* const known = dynamic_cast<const Error*>(&error)) return *known;
  const std::string& me = fabric_.topology.names[static_cast<size_t>(rank())];
  return Error(Code::kInternal, me + " has failed: " + error.what() + ".", Event::kFailed, me);
}

void Communicator::EnqueuePart(size_t gpu, Operation part, Done done) {
  if (!assemblies_) return Enqueue(std::move(part), std::move(done));
  if (part.compression) part.fingerprint.codec = HashOf(*part.compression);
  bool is_first = false;
  const std::shared_ptr<Assembly> assembly = assemblies_->Next(gpu, &is_first);
  Operation whole;
  whole.fingerprint = part.fingerprint;
  whole.cancellation = part.cancellation;
  whole.overlaps = part.overlaps;
  whole.launches = part.launches;
  whole.awaits = part.awaits;
  whole.peer = part.peer;
  whole.device = nullptr;
  whole.compression = part.compression;
  whole.assembly = assembly;
  assembly->Add(gpu, std::move(part), std::move(done));
  if (!is_first) return;
  Enqueue(std::move(whole), [this, assembly](const Error* error) {
    assemblies_->Drop(assembly.get());
    assembly->End(error);
  });
}

// Waits until this process's GPUs have computed the inputs of an operation. This rank joins the
// operation only after this wait.
//
// If the group is aborted, the wait ends, and the next call of `Check` throws the cause. If only
// the step is canceled, the wait for a GPU continues, because the GPU finishes its queued work
// anyway. But the wait for the parts of an operation ends, because the canceled step may never
// queue a part that is missing.
void Communicator::AwaitInput(Operation& operation) {
  if (!device_) return;
  const Segment* const segment = fabric_.host->has_segment() ? &fabric_.host->segment() : nullptr;
  const auto ends = [&] {
    if (launched_bytes_ && device_->HasPassed()) CloseRecord();
    return aborted_ || (segment && segment->aborted());
  };
  if (operation.assembly) {
    bool given_up = false;
    const auto ends_early = [&] { return ends() || (given_up = IsOverdue()); };
    try {
      operation.parts = operation.assembly->Await(timeout_seconds_, ends_early);
    } catch (const std::exception& thrown) {
      // If a missing part were queued later, it would be mistaken for a part of the next operation.
      // The group is therefore aborted.
      if (device_->HasLaunched()) device_->GiveUp();
      const Error error = AsError(thrown);
      GiveUp(error, true);
      throw error;
    }
    if (given_up) {
      // The operation has not begun, so the group remains usable.
      recorder_.Forget();
      throw StepEnded(Code::kCancelled);
    }
  }
  if (!operation.assembly) return device_->AwaitInput(0, operation, ends);
  for (size_t gpu = 0; gpu < operation.parts.size(); ++gpu) {
    device_->AwaitInput(gpu, operation.parts[gpu], ends);
  }
}

// Waits until all launched operations have finished. The record of the last of these operations is
// still open, so this wait counts as part of its duration.
void Communicator::AwaitLaunched() {
  const auto note = [this](bool active) {
    const std::lock_guard<std::mutex> lock(doing_mutex_);
    doing_.status.active = active;
    if (active) doing_.since = Clock::now();
  };
  note(true);
  CheckGroup();
  if (device_) device_->AwaitLaunched();
  CloseRecord();
  note(false);
}

// Closes the record of the last launched operation, if the record is still open. A launched
// operation runs concurrently with the work that follows. Its record therefore stays open until
// this rank notices that the operation has finished, or until the next operation begins.
void Communicator::CloseRecord() {
  if (launched_bytes_) recorder_.End(false, *launched_bytes_);
  launched_bytes_.reset();
}

void Communicator::Fail(const Operation& operation, const Error& error) {
  if (error.code() == Code::kInvalidArgument) {
    End(operation, true);
    throw error;
  }
  if (device_ && device_->HasLaunched()) device_->GiveUp();
  const Error cause = Cause(error);
  const Doing doing = CurrentlyDoing();
  End(operation, true);
  const auto now = Clock::now();
  {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    const Fingerprint& fingerprint = operation.fingerprint;
    detected_ = {Describe(fingerprint), rank(), fingerprint.sequence, Nanoseconds(doing.since),
                 Nanoseconds(now)};
  }
  throw Detected(cause, operation, rank(), now - doing.since);
}

// Gives up because of an error, and returns the cause of the abort. If another rank reports a cause
// within a short time, the function returns that cause; otherwise, it returns the error itself.
Error Communicator::Cause(const Error& error) {
  if (error.code() == Code::kCancelled) {
    GiveUpHere();
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    return cause_;
  }
  if (error.code() == Code::kUnavailable) {
    const auto deadline = Clock::now() + kAbortReasonGrace;
    while (!aborted_ && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  // If a rank closes its communicator, it also closes its data connections. This looks as if the
  // rank were lost, so the event of such an error is changed from kLost to kLeft.
  const bool left = error.event() == Event::kLost && HasLeft(error.worker());
  GiveUp(left ? Error(error.code(), error.what(), Event::kLeft, error.worker()) : error, true);
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  return cause_;
}

bool Communicator::HasLeft(const std::string& worker) {
  const auto& names = fabric_.topology.names;
  const std::vector<Watch::Known> others = watch_->Others();
  return std::any_of(others.begin(), others.end(), [&](const Watch::Known& other) {
    return other.left && names[static_cast<size_t>(other.rank)] == worker;
  });
}

// Runs an operation. Returns true if the operation has only been launched, and false if it has
// ended.
bool Communicator::Dispatch(Operation& operation) {
  if (!operation.device) {
    RunOnHost(operation);
    return false;
  }
  if (!device_) {
    throw Error(Code::kInvalidArgument,
                Describe(operation.fingerprint) + " is on a GPU, and the communicator has none.");
  }
  return device_->Run(fabric_, operation, [this](Operation& staged) { RunOnHost(staged); });
}

void Communicator::RunOnHost(Operation& operation) {
  switch (operation.fingerprint.kind) {
    case Kind::kAllReduce:
      return AllReduce(fabric_, operation, algorithm_);
    case Kind::kReduceScatter:
      return ReduceScatter(fabric_, operation);
    case Kind::kAllGather:
      return AllGather(fabric_, operation);
    case Kind::kBroadcast:
      return Broadcast(fabric_, operation);
    case Kind::kAllToAll:
      return AllToAll(fabric_, operation);
    case Kind::kBarrier:
      return Barrier(fabric_, operation);
    case Kind::kSend:
      return SendTo(fabric_, operation);
    case Kind::kReceive:
      return ReceiveFrom(fabric_, operation);
  }
}

void Communicator::Begin(Operation& operation) {
  CloseRecord();
  NoteProgress();
  if (IsMessage(operation.fingerprint.kind)) CheckPeer(operation.peer);
  const std::lock_guard<std::mutex> lock(doing_mutex_);
  doing_.status.active = true;
  doing_.status.peer = operation.peer;
  Fingerprint& fingerprint = operation.fingerprint;
  fingerprint.failures = failures_;
  fingerprint.on_device = operation.device ? 1 : 0;
  if (IsMessage(fingerprint.kind)) {
    fingerprint.sequence = ++Messages(fingerprint.kind, operation.peer);
  } else {
    if (fingerprint.kind == Kind::kAllReduce) {
      fingerprint.algorithm = static_cast<uint8_t>(algorithm_);
      if (operation.compression) fingerprint.codec = HashOf(*operation.compression);
    }
    fingerprint.sequence = ++doing_.status.sequence;
    joined_[doing_.status.sequence % joined_.size()] = fingerprint;
  }
  doing_.status.fingerprint = fingerprint;
  doing_.since = Clock::now();
  recorder_.Begin(fingerprint,
                  {operation.peer, Bytes(operation), operation.enqueued, !operation.overlaps});
}

void Communicator::End(const Operation& operation, bool failed, bool launched) {
  if (launched) {
    launched_bytes_ = Bytes(operation);
  } else {
    launched_bytes_.reset();
    recorder_.End(failed, Bytes(operation));
  }
  const std::lock_guard<std::mutex> lock(doing_mutex_);
  doing_.status.active = false;
}

Doing Communicator::CurrentlyDoing() {
  const std::lock_guard<std::mutex> lock(doing_mutex_);
  Doing doing = doing_;
  doing.status.progress = progress_.count();
  doing.progress = progress_.Last();
  return doing;
}

void Communicator::CheckPeer(int peer) const {
  if (peer >= 0 && peer < size() && peer != rank()) return;
  throw Error(Code::kInvalidArgument,
              "Rank " + std::to_string(rank()) + " of " + std::to_string(size()) +
                  " can exchange messages with other ranks of its group only. Received: rank " +
                  std::to_string(peer) + ".");
}

// Returns the counter of the messages that have been sent to a rank (if `kind` is kSend) or
// received from it (if `kind` is kReceive).
uint64_t& Communicator::Messages(Kind kind, int peer) {
  return (kind == Kind::kSend ? messages_to_ : messages_from_)[static_cast<size_t>(peer)];
}

bool Communicator::HasHandled(int peer, const Fingerprint& message) {
  const std::lock_guard<std::mutex> lock(doing_mutex_);
  const Kind mine = message.kind == Kind::kSend ? Kind::kReceive : Kind::kSend;
  return Messages(mine, peer) >= message.sequence;
}

bool Communicator::Joined(uint64_t sequence, Fingerprint* joined) {
  const std::lock_guard<std::mutex> lock(doing_mutex_);
  *joined = joined_[sequence % joined_.size()];
  return sequence > 0 && joined->sequence == sequence;
}

void Communicator::Check() {
  CheckGroup();
  if (IsOverdue()) throw StepEnded(Code::kCancelled);
}

// Returns whether the running operation has been canceled, and the group has since then made no
// progress for too long.
bool Communicator::IsOverdue() {
  return cancellation_ && cancellation_->asked() &&
         cancellation_->Overdue(Clock::now(), progress_.Last(), patience_);
}

void Communicator::CheckGroup() {
  Segment* segment = fabric_.host->has_segment() ? &fabric_.host->segment() : nullptr;
  if ((!aborted_ || held_back_) && segment && segment->aborted()) {
    GiveUp(segment->abort_error(), false);
  }
  CheckAborted();
}

void Communicator::CheckAborted() {
  if (!aborted_) return;
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  throw cause_;
}

std::optional<AbortState> Communicator::Aborted() {
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  if (!aborted_ || held_back_) return std::nullopt;
  return AbortState{cause_, aborted_at_, detected_};
}

void Communicator::GiveUp(const Error& given, bool spread) {
  const std::string message = std::string(given.what()).substr(0, kMaxMessageBytes);
  const Error cause(given.code(), message, given.event(), given.worker().substr(0, kMaxNameBytes));
  {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    if (aborted_ && !held_back_) return;
    cause_ = cause;
    aborted_at_ = Nanoseconds();
    aborted_ = true;
    held_back_ = false;
    if (fabric_.host && fabric_.host->has_segment()) fabric_.host->segment().Abort(cause);
  }
  Frame frame;
  frame.kind = FrameKind::kAbort;
  frame.code = cause.code();
  frame.event = cause.event();
  frame.worker = cause.worker();
  frame.message = message;
  if (spread && watch_) watch_->Tell({frame});
  // If this call fails, the socket is full or its reader has exited. The failure is ignored,
  // because there is no reader that still has to be woken.
  if (news_ >= 0) (void)!send(news_, "!", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  FlightLog::Instance().Ask("error", name_, message);
}

// Makes all later operations of this rank fail, since the canceled operation is incomplete. The
// other ranks are not informed yet, because the program may soon call `StepFailed` with the cause,
// which they then receive. If it does not, they learn only that this rank has given up its step.
void Communicator::GiveUpHere() {
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  if (aborted_) return;
  cause_ = StepEnded();
  due_ = Clock::now() + kStepErrorGrace;
  held_back_ = true;
  aborted_ = true;
}

void Communicator::SpreadWhatIsDue() {
  if (!held_back_) return;
  {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    if (Clock::now() < due_) return;
  }
  GiveUp(StepEnded(), true);
}

void Communicator::StepFailed(const Error& cause) {
  recorder_.Forget();
  if (held_back_) return GiveUp(cause, true);
  Frame status, failure;
  failure.kind = FrameKind::kFailure;
  failure.event = cause.event();
  failure.worker = cause.worker();
  failure.message = cause.what();
  {
    const std::lock_guard<std::mutex> lock(doing_mutex_);
    failure.failures = ++failures_;
    status.status = doing_.status;
    status.status.progress = progress_.count();
  }
  watch_->Tell({status, failure});
}

Error Communicator::StepEnded(Code code) const {
  const std::string& me = fabric_.topology.names[static_cast<size_t>(rank())];
  return Error(
      code,
      me + " has given up its step, of which another operation has failed. Its log says which.",
      Event::kFailed, me);
}

void Communicator::Close() {
  if (!queue_.Close()) return;
  if (held_back_) GiveUp(StepEnded(), true);
  if (device_ && !aborted_ && device_->Leave()) AwaitFarewells();
  watch_->Stop();
  device_ = nullptr;
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  final_ = Count();
  fabric_.links.clear();
  fabric_.host = nullptr;
}

// Sends farewells to the other ranks, and briefly waits for their farewells. A rank that has not
// sent its farewell may still use its GPUs to read this rank's memory.
void Communicator::AwaitFarewells() {
  Frame farewell;
  farewell.kind = FrameKind::kFarewell;
  farewell.status = CurrentlyDoing().status;
  watch_->Tell({farewell});
  const auto deadline = Clock::now() + kFarewellGrace;
  const auto stay = [this] {
    const std::vector<Watch::Known> others = watch_->Others();
    return std::any_of(others.begin(), others.end(),
                       [](const Watch::Known& other) { return !other.left && !other.lost; });
  };
  while (!aborted_ && stay() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Communicator::Statistics Communicator::statistics() {
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  return fabric_.host ? Count() : final_;
}

std::vector<TcpStatistics> Communicator::links() {
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  std::vector<TcpStatistics> links(static_cast<size_t>(size()));
  for (size_t rank = 0; rank < fabric_.links.size(); ++rank) {
    const Link* const link = fabric_.links[rank].get();
    if (link && link->descriptor() >= 0) links[rank] = ReadTcpStatistics(link->descriptor());
  }
  return links;
}

CommunicatorState Communicator::State(size_t records, int64_t since) {
  CommunicatorState state;
  state.name = name_;
  state.topology = &fabric_.topology;
  {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    if (aborted_) state.aborted = AbortState{cause_, aborted_at_, detected_};
  }
  state.waiting = queue_.Waiting();
  state.others = watch_->Others();
  state.links = links();
  state.log = recorder_.Read(records, since);
  return state;
}

Communicator::Statistics Communicator::Count() const {
  Statistics statistics;
  statistics.collectives = collectives_;
  statistics.shared_bytes = fabric_.host->copied_bytes;
  statistics.device_bytes = device_bytes_;
  for (const auto& link : fabric_.links) {
    if (const auto* socket = dynamic_cast<const SocketLink*>(link.get())) {
      statistics.sent_bytes += socket->sent_bytes;
      statistics.received_bytes += socket->received_bytes;
    }
  }
  return statistics;
}

}  // namespace tfdist
