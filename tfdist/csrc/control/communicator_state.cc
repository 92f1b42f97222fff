#include "control/communicator_state.h"

#include <cstdio>
#include <cstring>

#include "collective/collectives.h"

namespace tfdist {
namespace {

std::string Hexadecimal(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof(text), "%llx", static_cast<unsigned long long>(value));
  return text;
}

std::string NameOf(const Fingerprint& fingerprint) {
  return std::string(fingerprint.name, strnlen(fingerprint.name, sizeof(fingerprint.name)));
}

void WriteFingerprint(const Fingerprint& fingerprint, JsonWriter* json) {
  json->Member("sequence", static_cast<int64_t>(fingerprint.sequence));
  json->Member("kind", std::string(NameOf(fingerprint.kind)));
  json->Member("what", Describe(fingerprint));
  json->Member("name", NameOf(fingerprint));
  json->Member("type", std::string(NameOf(fingerprint.type)));
  json->Key("shape");
  if (fingerprint.tensors > 0 && fingerprint.dimensions <= 4) {
    json->Open('[');
    for (int i = 0; i < fingerprint.dimensions; ++i) json->Value(fingerprint.dims[i]);
    json->Close(']');
  } else {
    json->Null();
  }
  json->Member("tensors", int64_t{fingerprint.tensors});
  json->Member("elements", static_cast<int64_t>(fingerprint.count));
  json->Member("op", std::string(NameOf(fingerprint.op)));
  json->Member("root", int64_t{fingerprint.root});
  json->Member("shapes", Hexadecimal(fingerprint.shapes));
  json->Member("codec", Hexadecimal(fingerprint.codec));
  json->Member("forced_algorithm",
               std::string(NameOf(static_cast<Algorithm>(fingerprint.algorithm))));
  json->Member("failures", int64_t{fingerprint.failures});
}

void WriteRecord(const Record& record, const std::vector<int64_t>& arrivals, JsonWriter* json) {
  const bool reduced = record.fingerprint.kind == Kind::kAllReduce;
  const auto algorithm = static_cast<Algorithm>(record.algorithm);
  json->Open('{').Member("number", static_cast<int64_t>(record.number));
  WriteFingerprint(record.fingerprint, json);
  json->Member("peer", int64_t{record.peer});
  json->Member("bytes", static_cast<int64_t>(record.bytes));
  json->Member("algorithm",
               std::string(reduced && algorithm != Algorithm::kAuto ? NameOf(algorithm) : ""));
  json->Member("enqueued_ns", record.enqueued);
  json->Member("begun_ns", record.begun);
  json->Member("last_arrived_ns", record.last_arrived);
  json->Member("ended_ns", record.ended);
  json->Member("between_begun_ns", record.between_begun);
  json->Member("between_ended_ns", record.between_ended);
  json->Member("coding_ns", record.coding);
  json->Member("last", int64_t{record.last});
  json->Key("arrivals_ns").Open('[');
  for (const int64_t arrival : arrivals) {
    json->Value(arrival < 0 ? 0 : record.begun + 1000 * arrival);
  }
  json->Close(']').Member("failed", record.failed).Close('}');
}

void WriteOther(const Watch::Known& other, bool same_clock, int64_t now, JsonWriter* json) {
  json->Open('{').Member("rank", int64_t{other.rank});
  json->Member("heard_ns", other.heard);
  json->Member("sequence", static_cast<int64_t>(other.status.sequence));
  json->Key("in");
  if (other.status.active) {
    json->Value(Describe(other.status.fingerprint));
  } else {
    json->Null();
  }
  json->Member("left", other.left).Member("lost", other.lost);
  if (same_clock || other.clock.measured()) {
    json->Member("clock_offset_ns", same_clock ? 0 : other.clock.offset());
    json->Member("clock_uncertainty_ns", same_clock ? 0 : other.clock.uncertainty(now));
  } else {
    json->Key("clock_offset_ns").Null().Key("clock_uncertainty_ns").Null();
  }
  json->Member("frames", other.delay.frames());
  json->Member("delay_us", other.delay.nanoseconds() / 1000).Close('}');
}

void WriteLink(int rank, const TcpStatistics& link, JsonWriter* json) {
  json->Open('{').Member("rank", int64_t{rank});
  json->Member("acknowledged_bytes", static_cast<int64_t>(link.acknowledged_bytes));
  json->Member("busy_us", static_cast<int64_t>(link.busy_us));
  json->Member("pending_bytes", static_cast<int64_t>(link.pending_bytes));
  json->Member("bytes_per_second", static_cast<int64_t>(link.bytes_per_second));
  json->Member("round_trip_us", int64_t{link.round_trip_us});
  json->Member("retransmits", int64_t{link.retransmits});
  json->Member("silent_ms", int64_t{link.silent_ms}).Close('}');
}

}  // namespace

void Write(const AbortState& state, JsonWriter* json) {
  const Error& cause = state.cause;
  json->Open('{').Member("message", std::string(cause.what()));
  json->Member("code", static_cast<int64_t>(cause.code()));
  json->Member("event", std::string(NameOf(cause.event()))).Member("worker", cause.worker());
  json->Member("at_ns", state.at).Key("detected");
  if (state.detected) {
    const AbortState::Detected& detected = *state.detected;
    json->Open('{').Member("operation", detected.operation).Member("rank", int64_t{detected.rank});
    json->Member("sequence", static_cast<int64_t>(detected.sequence));
    json->Member("begun_ns", detected.begun).Member("ended_ns", detected.ended).Close('}');
  } else {
    json->Null();
  }
  json->Close('}');
}

void Write(const CommunicatorState& state, JsonWriter* json) {
  const Topology& topology = *state.topology;
  const int64_t now = Nanoseconds();
  json->Open('{').Member("name", state.name);
  json->Member("rank", int64_t{topology.rank}).Member("size", int64_t{topology.size});
  json->Key("ranks").Open('[');
  for (const std::string& name : topology.names) json->Value(name);
  json->Close(']').Key("hosts").Open('[');
  for (const int host : topology.host_of) json->Value(int64_t{host});
  json->Close(']').Key("aborted");
  if (state.aborted) {
    Write(*state.aborted, json);
  } else {
    json->Null();
  }
  json->Key("queued").Open('[');
  for (const std::string& waiting : state.waiting) json->Value(waiting);
  json->Close(']').Key("peers").Open('[');
  const int here = topology.host_of[static_cast<size_t>(topology.rank)];
  for (const Watch::Known& other : state.others) {
    const bool same_clock = topology.host_of[static_cast<size_t>(other.rank)] == here;
    WriteOther(other, same_clock, now, json);
  }
  json->Close(']').Key("links").Open('[');
  for (size_t rank = 0; rank < state.links.size(); ++rank) {
    const TcpStatistics& link = state.links[rank];
    // Skips the ranks of this host, to which there is no TCP connection.
    const bool used = link.acknowledged_bytes > 0 || link.pending_bytes > 0;
    if (used) WriteLink(static_cast<int>(rank), link, json);
  }
  json->Close(']').Key("records").Open('[');
  for (size_t i = 0; i < state.log.records.size(); ++i) {
    WriteRecord(state.log.records[i], state.log.arrivals[i], json);
  }
  json->Close(']').Close('}');
}

}  // namespace tfdist
