#include "c_api.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "control/activity.h"
#include "control/communicator_state.h"
#include "control/flight_log.h"
#include "control/replay.h"
#include "device/gpu.h"
#include "registry.h"
#include "vector_unit.h"

namespace {

using tfdist::Code;
using tfdist::Codec;
using tfdist::Communicator;
using tfdist::DevicePath;
using tfdist::DType;
using tfdist::Error;
using tfdist::Event;
using tfdist::Kind;
using tfdist::Operation;
using tfdist::ReduceOp;

thread_local std::string last_error;

Codec Checked(const tfd_codec& given) {
  return tfdist::MakeCodec(given.form, given.bits, given.stochastic, given.euclidean, given.unit,
                           given.clip, given.block);
}

template <typename Do>
int Guarded(Do what) {
  try {
    what();
    return 0;
  } catch (const Error& error) {
    last_error = error.what();
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    last_error = error.what();
    return static_cast<int>(Code::kInternal);
  }
}

// Writes `message` to stderr as one line, or drops the message if stderr does not become writable
// within 0.2 s. The thread that watches the other ranks also calls this function, so the function
// must not block for long. The line has at most PIPE_BUF bytes, so a pipe that is ready for writing
// takes the whole line without blocking.
void Warn(const std::string& message) {
  const std::string line = ("tfdist: " + message).substr(0, PIPE_BUF - 1) + "\n";
  pollfd ready{STDERR_FILENO, POLLOUT, 0};
  if (poll(&ready, 1, 200) > 0 && (ready.revents & POLLOUT) != 0) {
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
  }
}

Operation Make(Kind kind, const char* name, int dtype) {
  if (dtype < 0 || dtype >= tfdist::kDTypes) {
    throw Error(Code::kInvalidArgument,
                "The type must be a number from 0 to 8. Received: " + std::to_string(dtype) + ".");
  }
  Operation operation;
  operation.fingerprint.kind = kind;
  operation.fingerprint.type = static_cast<DType>(dtype);
  operation.fingerprint.SetName(name ? name : "");
  return operation;
}

void SetOp(Operation& operation, int op) {
  if (op < 0 || op >= tfdist::kReduceOps) {
    throw Error(Code::kInvalidArgument, "The reduction must be a number from 0 to 4. Received: " +
                                            std::to_string(op) + ".");
  }
  operation.fingerprint.op = static_cast<ReduceOp>(op);
}

void SetIn(Operation& operation, const void* in, size_t count) {
  operation.in = tfdist::ConstBufferList(static_cast<const char*>(in),
                                         count * SizeOf(operation.fingerprint.type));
}

void SetOut(Operation& operation, void* out, size_t count) {
  operation.out =
      tfdist::BufferList(static_cast<char*>(out), count * SizeOf(operation.fingerprint.type));
}

void Shape(Operation& operation, size_t count) {
  operation.fingerprint.AddShape({static_cast<int64_t>(count)});
}

// Returns the number of rows for each rank. In the C interface, each element is a row.
std::vector<size_t> Rows(const size_t* counts, int ranks) { return {counts, counts + ranks}; }

size_t Sum(const size_t* counts, int ranks) {
  return std::accumulate(counts, counts + ranks, size_t{0});
}

tfdist::TlsFiles Files(const char* certificate, const char* key, const char* ca) {
  return {certificate ? certificate : "", key ? key : "", ca ? ca : ""};
}

Error Cause(const char* event, const char* worker, const char* message) {
  for (int i = 0; i < tfdist::kEvents; ++i) {
    const auto known = static_cast<Event>(i);
    if (std::string(event) == NameOf(known)) {
      return Error(Code::kUnavailable, message, known, worker);
    }
  }
  throw Error(Code::kInvalidArgument, std::string("The event must be other, lost, silent, left or "
                                                  "failed. Received: ") +
                                          event + ".");
}

Communicator::Setup Convert(const tfd_setup& setup) {
  Communicator::Setup converted;
  converted.name = setup.name;
  converted.rank = setup.rank;
  converted.names.assign(setup.ranks, setup.ranks + setup.size);
  converted.hosts.assign(setup.hosts, setup.hosts + setup.size);
  converted.control.assign(setup.control, setup.control + setup.size);
  converted.data.assign(setup.data, setup.data + setup.size);
  converted.silence_warning_seconds = setup.silence_warning_seconds;
  converted.silence_timeout_seconds = setup.silence_timeout_seconds;
  converted.start_seconds = setup.start_seconds;
  converted.stall_seconds = setup.stall_seconds;
  converted.timeout_seconds = setup.timeout_seconds;
  converted.algorithm = setup.algorithm;
  converted.tls = Files(setup.tls_certificate, setup.tls_key, setup.tls_ca);
  converted.tls.secret = setup.tls_secret ? setup.tls_secret : "";
  converted.news = setup.news;
  converted.warn = Warn;
  if (setup.gpus > 0) {
    const auto text = [](const char* given) { return given ? given : ""; };
    DevicePath::Setup device;
    for (int i = 0; i < setup.gpus; ++i) {
      device.gpus.push_back({setup.gpu_numbers[i], text(setup.gpu_kernels[i])});
    }
    device.cuda = text(setup.cuda_library);
    device.nccl = text(setup.nccl_library);
    device.tls = !converted.tls.certificate.empty();
    device.transport = text(setup.device_algorithm);
    if (setup.device_buffer_bytes) device.buffer_bytes = setup.device_buffer_bytes;
    converted.device = std::move(device);
  }
  return converted;
}

// Throws Error if the rank is out of range, if a required descriptor is missing, or if there is a
// descriptor that is not needed. If a connection were missing, an operation could wait for it
// forever.
void CheckSetup(const tfd_setup& setup) {
  if (setup.rank < 0 || setup.rank >= setup.size) {
    throw Error(Code::kInvalidArgument, "The rank must be one of the group's " +
                                            std::to_string(setup.size) +
                                            ". Received: " + std::to_string(setup.rank) + ".");
  }
  for (int rank = 0; rank < setup.size; ++rank) {
    const bool other = rank != setup.rank;
    const bool away = setup.hosts[rank] != setup.hosts[setup.rank];
    if ((setup.control[rank] >= 0) != other || (setup.data[rank] >= 0) != away) {
      throw Error(Code::kInvalidArgument,
                  "Every other rank needs a control connection, and those of other hosts a data "
                  "connection. Received: " +
                      std::to_string(setup.control[rank]) + " and " +
                      std::to_string(setup.data[rank]) + " for rank " + std::to_string(rank) + ".");
    }
  }
}

std::string States(size_t records, int64_t since) {
  tfdist::JsonWriter json;
  json.Open('[');
  for (const auto& communicator : tfdist::All()) Write(communicator->State(records, since), &json);
  return json.Close(']').text();
}

void CloseAll(const tfd_setup& setup) {
  for (int rank = 0; rank < setup.size; ++rank) {
    if (setup.control[rank] >= 0) close(setup.control[rank]);
    if (setup.data[rank] >= 0) close(setup.data[rank]);
  }
}

}  // namespace

int tfd_use_vector_unit(const char* name) {
  return Guarded([&] { tfdist::ChooseVectorUnit(name ? name : ""); });
}

const char* tfd_vector_unit(void) { return NameOf(tfdist::FindVectorUnit()); }

size_t tfd_segment_bytes(int ranks) { return tfdist::Segment::BytesFor(std::max(ranks, 1)); }

int tfd_check_tls(const char* certificate, const char* key, const char* ca) {
  return Guarded([&] { tfdist::TlsContext(Files(certificate, key, ca)); });
}

int tfd_check_gpu(int number, const char* cuda_library) {
  return Guarded([&] {
    tfdist::cuda::Load(cuda_library);
    tfdist::Gpu{number};
  });
}

int tfd_create(const tfd_setup* setup, int64_t* number) {
  return Guarded([&] {
    Communicator::Setup converted;
    int segment = setup->segment;
    try {
      CheckSetup(*setup);
      converted = Convert(*setup);
      tfdist::AlgorithmNamed(setup->algorithm);
      int local = 0;
      for (int rank = 0; rank < setup->size; ++rank) {
        if (setup->hosts[rank] == setup->hosts[setup->rank]) ++local;
      }
      if (segment >= 0) {
        const int taken = std::exchange(segment, -1);
        converted.segment = std::make_unique<tfdist::Segment>(taken, setup->segment_bytes, local);
      } else if (local > 1) {
        throw Error(Code::kInvalidArgument, "Ranks of one host need shared memory.");
      }
    } catch (...) {
      CloseAll(*setup);
      if (segment >= 0) close(segment);
      throw;
    }
    *number = tfdist::Register(std::make_shared<Communicator>(std::move(converted)));
  });
}

int tfd_abort(int64_t number, const char* event, const char* worker, const char* message) {
  return Guarded([&] { tfdist::Find(number)->Abort(Cause(event, worker, message)); });
}

int tfd_step_failed(int64_t number, const char* event, const char* worker, const char* message) {
  return Guarded([&] { tfdist::Find(number)->StepFailed(Cause(event, worker, message)); });
}

const char* tfd_cause(int64_t number) {
  thread_local std::string text;
  text = "null";
  Guarded([&] {
    const auto state = tfdist::Find(number)->Aborted();
    if (!state) return;
    tfdist::JsonWriter json;
    Write(*state, &json);
    text = json.text();
  });
  return text.c_str();
}

int tfd_close(int64_t number) {
  return Guarded([&] {
    if (const auto communicator = tfdist::Remove(number)) communicator->Close();
  });
}

int tfd_close_all(void) {
  return Guarded([] {
    // All communicators are closed concurrently. The destructors of the futures at the end of this
    // scope wait until all calls of `Close` have returned.
    std::vector<std::future<void>> closing;
    for (const auto& communicator : tfdist::RemoveAll()) {
      closing.push_back(std::async(std::launch::async, [communicator] { communicator->Close(); }));
    }
  });
}

const char* tfd_error(void) { return last_error.c_str(); }

int tfd_get_statistics(int64_t number, tfd_statistics* statistics) {
  return Guarded([&] {
    const auto current = tfdist::Find(number)->statistics();
    *statistics = {current.collectives, current.shared_bytes, current.sent_bytes,
                   current.received_bytes, current.device_bytes};
  });
}

void tfd_get_activity(tfd_activity* activity) {
  const auto totals = tfdist::Activity::Instance().Read();
  const auto ended = [&totals](Kind kind) { return totals.operations[static_cast<size_t>(kind)]; };
  *activity = {totals.steps,
               totals.input,
               totals.input_since,
               totals.waiting,
               totals.moving,
               ended(Kind::kAllReduce),
               ended(Kind::kReduceScatter),
               ended(Kind::kAllGather),
               ended(Kind::kBroadcast),
               ended(Kind::kAllToAll),
               ended(Kind::kBarrier),
               ended(Kind::kSend),
               ended(Kind::kReceive),
               totals.bus_bytes,
               totals.bus_moving};
}

int tfd_get_links(int64_t number, tfd_link* links) {
  return Guarded([&] {
    for (const auto& link : tfdist::Find(number)->links()) {
      *links++ = {link.acknowledged_bytes, link.busy_us,       link.pending_bytes,
                  link.bytes_per_second,   link.round_trip_us, link.retransmits,
                  link.silent_ms};
    }
  });
}

void tfd_record(int on) { tfdist::Recorder::SetRecording(on != 0); }

void tfd_record_spans(int on) { tfdist::Spans::Instance().Record(on != 0); }

void tfd_add_span(const char* lane, const char* name, int64_t begin_ns, int64_t end_ns) {
  tfdist::Spans::Instance().Add(lane, name, begin_ns, end_ns);
}

const char* tfd_spans(void) {
  thread_local std::string spans;
  tfdist::JsonWriter json;
  json.Open('[');
  for (const auto& span : tfdist::Spans::Instance().Read()) {
    json.Open('[').Value(span.lane).Value(span.name).Value(span.begin).Value(span.end).Close(']');
  }
  spans = json.Close(']').text();
  return spans.c_str();
}

int64_t tfd_clock(void) { return tfdist::Nanoseconds(); }

const char* tfd_state(size_t records, int64_t since_ns) {
  thread_local std::string state;
  state = States(records, since_ns);
  return state.c_str();
}

int tfd_flight_start(const char* path, const char* header, int signal) {
  return Guarded([&] {
    tfdist::FlightLog::Settings settings;
    settings.path = path;
    settings.header = header;
    settings.communicators = [] { return States(tfdist::Recorder::kRecords, 0); };
    settings.warn = Warn;
    tfdist::FlightLog::Instance().Start(std::move(settings));
    if (signal) tfdist::FlightLog::Instance().AskOnSignal(signal);
  });
}

void tfd_flight_move(const char* path, const char* header) {
  tfdist::FlightLog::Instance().Move(path, header);
}

void tfd_flight_ask(const char* kind, const char* communicator, const char* message) {
  tfdist::FlightLog::Instance().Ask(kind, communicator, message);
}

const char* tfd_flight_stalled(void) {
  thread_local std::string message;
  message = tfdist::FlightLog::Instance().TakeStalled();
  return message.c_str();
}

void tfd_flight_set_session(const char* session) {
  tfdist::FlightLog::Instance().SetSession(session);
}

int tfd_flight_stacks_wanted(void) { return tfdist::FlightLog::Instance().stacks_wanted(); }

void tfd_flight_give_stacks(const char* stacks) {
  tfdist::FlightLog::Instance().GiveStacks(stacks);
}

void tfd_flight_flush(double seconds) { tfdist::FlightLog::Instance().Flush(seconds); }

int tfd_all_reduce(int64_t number, const char* name, const void* in, void* out, size_t count,
                   int dtype, int op) {
  return Guarded([&] {
    Operation operation = Make(Kind::kAllReduce, name, dtype);
    SetOp(operation, op);
    SetIn(operation, in, count);
    SetOut(operation, out, count);
    Shape(operation, count);
    tfdist::Find(number)->Run(std::move(operation));
  });
}

int tfd_reduce_scatter(int64_t number, const char* name, const void* in, void* out, size_t count,
                       int dtype, int op) {
  return Guarded([&] {
    const auto communicator = tfdist::Find(number);
    Operation operation = Make(Kind::kReduceScatter, name, dtype);
    SetOp(operation, op);
    SetIn(operation, in, count * static_cast<size_t>(communicator->size()));
    SetOut(operation, out, count);
    Shape(operation, count);
    communicator->Run(std::move(operation));
  });
}

int tfd_all_gather(int64_t number, const char* name, const void* in, void* out,
                   const size_t* counts, int dtype) {
  return Guarded([&] {
    const auto communicator = tfdist::Find(number);
    Operation operation = Make(Kind::kAllGather, name, dtype);
    SetIn(operation, in, counts[communicator->rank()]);
    SetOut(operation, out, Sum(counts, communicator->size()));
    operation.row_bytes = SizeOf(operation.fingerprint.type);
    operation.sent_rows = {counts[communicator->rank()]};
    operation.received_rows = Rows(counts, communicator->size());
    communicator->Run(std::move(operation));
  });
}

int tfd_broadcast(int64_t number, const char* name, void* data, size_t count, int dtype, int root) {
  return Guarded([&] {
    Operation operation = Make(Kind::kBroadcast, name, dtype);
    operation.fingerprint.root = root;
    SetIn(operation, data, count);
    SetOut(operation, data, count);
    Shape(operation, count);
    tfdist::Find(number)->Run(std::move(operation));
  });
}

int tfd_all_to_all(int64_t number, const char* name, const void* in, const size_t* sent, void* out,
                   const size_t* received, int dtype) {
  return Guarded([&] {
    const auto communicator = tfdist::Find(number);
    const int size = communicator->size();
    Operation operation = Make(Kind::kAllToAll, name, dtype);
    SetIn(operation, in, Sum(sent, size));
    SetOut(operation, out, Sum(received, size));
    operation.row_bytes = SizeOf(operation.fingerprint.type);
    operation.sent_rows = Rows(sent, size);
    operation.received_rows = Rows(received, size);
    communicator->Run(std::move(operation));
  });
}

int tfd_send(int64_t number, const char* name, const void* in, size_t count, int dtype, int to) {
  return Guarded([&] {
    Operation operation = Make(Kind::kSend, name, dtype);
    operation.peer = to;
    SetIn(operation, in, count);
    Shape(operation, count);
    tfdist::Find(number)->Run(std::move(operation));
  });
}

int tfd_receive(int64_t number, const char* name, void* out, size_t count, int dtype, int from) {
  return Guarded([&] {
    Operation operation = Make(Kind::kReceive, name, dtype);
    operation.peer = from;
    SetOut(operation, out, count);
    Shape(operation, count);
    tfdist::Find(number)->Run(std::move(operation));
  });
}

int tfd_barrier(int64_t number, const char* name) {
  return Guarded([&] {
    tfdist::Find(number)->Run(Make(Kind::kBarrier, name, static_cast<int>(DType::kUint8)));
  });
}

int tfd_replay_create(int64_t* number) {
  return Guarded([&] { *number = tfdist::RegisterReplay(); });
}

int tfd_replay_request(int64_t number) {
  return Guarded([&] { tfdist::FindReplay(number)->Request(); });
}

int tfd_replay_given(int64_t number, int64_t* given) {
  return Guarded([&] { *given = tfdist::FindReplay(number)->given(); });
}

int tfd_replay_keep_rows(int64_t number, int64_t workers, int64_t batch) {
  return Guarded([&] { tfdist::FindReplay(number)->KeepRows(workers, batch); });
}

int tfd_replay_batch(int64_t number, int64_t workers, int64_t* own, int64_t* rows) {
  return Guarded([&] {
    const auto replay = tfdist::FindReplay(number);
    *own = replay->batch();
    const int64_t other = replay->RowsFor(workers);
    *rows = *own == 0 || other == 0 ? *own : other;
  });
}

int tfd_replay_want(int64_t number, int64_t rows) {
  return Guarded([&] { tfdist::FindReplay(number)->Want(rows); });
}

int tfd_replay_give_whole(int64_t number, int whole) {
  return Guarded([&] { tfdist::FindReplay(number)->GiveWhole(whole != 0); });
}

int tfd_replay_rows(int64_t number, int before_last, int64_t* batches, int64_t* rows,
                    int64_t* pending, int64_t* pending_batches) {
  return Guarded([&] {
    const tfdist::RowCounts counts = tfdist::FindReplay(number)->Counts(before_last != 0);
    *batches = counts.batches;
    *rows = counts.rows;
    *pending = counts.pending;
    *pending_batches = counts.pending_batches;
  });
}

int tfd_replay_close(int64_t number) {
  return Guarded([&] { tfdist::RemoveReplay(number); });
}

int tfd_encoded_bytes(const tfd_codec* codec, size_t count, size_t* bytes) {
  return Guarded([&] { *bytes = EncodedBytes(Checked(*codec), count); });
}

int tfd_encode(const tfd_codec* codec, const float* in, float* error, size_t count, void* out,
               uint32_t seed) {
  return Guarded(
      [&] { Encode(Checked(*codec), {in, error, count, static_cast<uint8_t*>(out), seed}); });
}

int tfd_decode(const tfd_codec* codec, const void* in, size_t count, float* out) {
  return Guarded(
      [&] { Decode(Checked(*codec), {static_cast<const uint8_t*>(in), count, out, false}); });
}
