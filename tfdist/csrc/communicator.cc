#include "communicator.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <thread>

#include "control/flight_log.h"
#include "transport/fabric.h"
#include "vector_unit.h"

namespace tfdist {
namespace {

// A broken link is often the first sign of what the control connections are about to explain.
constexpr auto kNews = std::chrono::milliseconds(1500);

// What a program needs at most to say why its step has failed.
constexpr auto kSaying = std::chrono::milliseconds(1500);

// How long a rank waits at its end for others that may still read its GPUs' memory.
constexpr auto kLeaving = std::chrono::seconds(2);

// Of the other ranks, as long as the patience with a canceled operation lasts at least: one that
// comes late must not pass for none.
constexpr double kStatusesOfPatience = 4;

std::string Elapsed(Clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(duration).count());
  return text;
}

// Of what a rank gives or gets, whichever is more; a result may be allocated on the way.
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

// The cancellation of what runs, until that has ended.
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
      [this](Code code, const std::string& message) { GiveUp(code, message, true); },
      setup.warn,
      [this](const std::string& message) { FlightLog::Instance().Stalled(name_, message); },
      [this](const std::string& message) { FlightLog::Instance().Ask("waited", name_, message); },
      [this] { SpreadWhatIsDue(); }};
  watch_ = std::make_unique<Watch>(std::move(settings), std::move(connections.control),
                                   std::move(callbacks));
  watch_->Start();
  try {
    queue_.Start();
  } catch (...) {
    // Its thread calls back into members that are about to go.
    watch_->Stop();
    throw;
  }
}

Communicator::~Communicator() { Close(); }

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
    // The others would wait for this rank in vain.
    Fail(operation, AsError(error));
  }
}

Error Communicator::AsError(const std::exception& error) const {
  if (const auto* const known = dynamic_cast<const Error*>(&error)) return *known;
  return Error(Code::kInternal, fabric_.topology.names[static_cast<size_t>(rank())] +
                                    " has failed: " + error.what() + ".");
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

// Until this process's GPUs have computed what they give, this rank has not come. If that ends
// early, what follows says why. A GPU computes what it was given also where the step has been
// canceled; a part may then never come.
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
      // A part that comes later would be taken for one of the next operation.
      if (device_->HasLaunched()) device_->GiveUp();
      const Error error = AsError(thrown);
      GiveUp(error.code(), error.what(), true);
      throw error;
    }
    if (given_up) {
      // The other ranks have not heard of it so far.
      recorder_.Forget();
      throw Error(Code::kCancelled, StepEnded());
    }
  }
  if (!operation.assembly) return device_->AwaitInput(0, operation, ends);
  for (size_t gpu = 0; gpu < operation.parts.size(); ++gpu) {
    device_->AwaitInput(gpu, operation.parts[gpu], ends);
  }
}

// Its record is that of what was launched last: what this rank waits for.
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

// What is only launched goes on beside what comes next, and is recorded until it is seen to have
// ended, or the next begins.
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
  std::string cause = Cause(error);
  if (!cause.empty() && cause.back() != '.') cause += ".";
  const Doing doing = CurrentlyDoing();
  End(operation, true);
  const char* const stop = cause.empty() || cause.back() != '.' ? "." : "";
  throw Error(abort_code_, cause + stop + " It was noticed in " + Describe(operation.fingerprint) +
                               " of rank " + std::to_string(rank()) + ", " +
                               Elapsed(Clock::now() - doing.since) + " after that began.");
}

// Waits for the news that explains an error, and makes the error the reason if none comes.
std::string Communicator::Cause(const Error& error) {
  if (error.code() == Code::kCancelled) {
    GiveUpHere();
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    return abort_message_;
  }
  if (error.code() == Code::kUnavailable) {
    const auto deadline = Clock::now() + kNews;
    while (!aborted_ && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  GiveUp(error.code(), error.what(), true);
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  return abort_message_;
}

// Whether it was only launched.
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

// How many have been sent to a rank, or received from it.
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
  if (IsOverdue()) throw Error(Code::kCancelled, StepEnded());
}

// Whether nobody waits any longer for the end of what runs, which was canceled.
bool Communicator::IsOverdue() {
  return cancellation_ && cancellation_->asked() &&
         cancellation_->Overdue(Clock::now(), progress_.Last(), patience_);
}

void Communicator::CheckGroup() {
  Segment* segment = fabric_.host->has_segment() ? &fabric_.host->segment() : nullptr;
  if ((!aborted_ || held_back_) && segment && segment->aborted()) {
    const Error error = segment->abort_error();
    GiveUp(error.code(), error.what(), false);
  }
  CheckAborted();
}

void Communicator::CheckAborted() {
  if (!aborted_) return;
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  throw Error(abort_code_, abort_message_);
}

void Communicator::Abort(Code code, const std::string& message) { GiveUp(code, message, true); }

void Communicator::GiveUp(Code code, const std::string& message, bool spread) {
  {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    if (aborted_ && !held_back_) return;
    abort_code_ = code;
    abort_message_ = message.substr(0, kLongestMessage);
    aborted_ = true;
    held_back_ = false;
    if (fabric_.host && fabric_.host->has_segment()) {
      fabric_.host->segment().Abort(Error(code, message));
    }
  }
  Frame frame;
  frame.kind = FrameKind::kAbort;
  frame.code = code;
  frame.message = message;
  if (spread && watch_) watch_->Tell({frame});
  FlightLog::Instance().Ask("error", name_, message);
}

// Fails what follows on this rank, where an operation has been left half-done because the step has
// ended. What called it may say why at once, by `StepFailed`; if it does not, the others hear that
// much.
void Communicator::GiveUpHere() {
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  if (aborted_) return;
  abort_code_ = Code::kUnavailable;
  abort_message_ = StepEnded();
  due_ = Clock::now() + kSaying;
  held_back_ = true;
  aborted_ = true;
}

void Communicator::SpreadWhatIsDue() {
  if (!held_back_) return;
  {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    if (Clock::now() < due_) return;
  }
  GiveUp(Code::kUnavailable, StepEnded(), true);
}

void Communicator::StepFailed(const std::string& message) {
  recorder_.Forget();
  if (held_back_) return GiveUp(Code::kUnavailable, message, true);
  Frame status, failure;
  failure.kind = FrameKind::kFailure;
  failure.message = message;
  {
    const std::lock_guard<std::mutex> lock(doing_mutex_);
    failure.failures = ++failures_;
    status.status = doing_.status;
    status.status.progress = progress_.count();
  }
  watch_->Tell({status, failure});
}

std::string Communicator::StepEnded() const {
  return fabric_.topology.names[static_cast<size_t>(rank())] +
         " has given up its step, of which another operation has failed. Its log says which.";
}

void Communicator::Close() {
  if (!queue_.Close()) return;
  if (held_back_) GiveUp(Code::kUnavailable, StepEnded(), true);
  if (device_ && !aborted_ && device_->Leave()) AwaitFarewells();
  watch_->Stop();
  device_ = nullptr;
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  final_ = Count();
  fabric_.links.clear();
  fabric_.host = nullptr;
}

// Says farewell, and waits, but not for long, until the others do: their GPUs may still read this
// rank's memory.
void Communicator::AwaitFarewells() {
  Frame farewell;
  farewell.kind = FrameKind::kFarewell;
  farewell.status = CurrentlyDoing().status;
  watch_->Tell({farewell});
  const auto deadline = Clock::now() + kLeaving;
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
    if (aborted_) state.aborted = abort_message_;
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
