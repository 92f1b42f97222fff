#include "rank.h"

#include <cstdio>
#include <utility>

#include "timing.h"

namespace tfdist::benchmark {
namespace {

char* Pointer(cuda::Address address) { return reinterpret_cast<char*>(address); }

// Returns the text as a JSON string.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c == '\n' ? ' ' : c;
  }
  return quoted + "\"";
}

}  // namespace

Rank::Rank(const Task& task, int number, Communicators communicators)
    : task(task),
      number(number),
      gpu(number),
      memory(gpu, task.largest()),
      other(gpu, task.largest()),
      stream(gpu),
      done_(gpu),
      communicators_(std::move(communicators)) {
  for (const char* const way : kWays) {
    std::string why;
    try {
      AllReduce(way, task.sizes.front());
    } catch (const Error& error) { why = error.what(); }
    if (Slowest({why.empty() ? 0.0 : 1.0})[0] == 0) continue;
    communicators_.erase(way);
    if (why.empty()) why = "another rank has failed";
    Say("{\"missing\": \"" + std::string(way) + "\", \"why\": " + Quoted(why) + "}");
  }
}

void Rank::Meet() {
  Operation operation;
  operation.fingerprint.kind = Kind::kBarrier;
  control().Run(std::move(operation));
}

std::vector<double> Rank::Slowest(std::vector<double> seconds) {
  char* const data = reinterpret_cast<char*>(seconds.data());
  const size_t bytes = seconds.size() * sizeof(double);
  Operation operation;
  operation.fingerprint.kind = Kind::kAllReduce;
  operation.fingerprint.type = DType::kFloat64;
  operation.fingerprint.op = ReduceOp::kMax;
  operation.fingerprint.AddShape({static_cast<int64_t>(seconds.size())});
  operation.in = ConstBufferList(data, bytes);
  operation.out = BufferList(data, bytes);
  control().Run(std::move(operation));
  return seconds;
}

void Rank::GatherBytes(const void* own, void* all, size_t bytes) {
  const auto ranks = static_cast<size_t>(task.ranks);
  Operation operation;
  operation.fingerprint.kind = Kind::kAllGather;
  operation.sent_rows = {bytes};
  operation.received_rows.assign(ranks, bytes);
  operation.in = ConstBufferList(static_cast<const char*>(own), bytes);
  operation.out = BufferList(static_cast<char*>(all), bytes * ranks);
  control().Run(std::move(operation));
}

void Rank::Finish(const std::function<void()>& check) {
  done_.Record(stream.get());
  AwaitExactly(done_, check);
}

std::vector<std::string> Rank::ways() const {
  std::vector<std::string> ways;
  for (const char* const way : kWays) {
    if (communicators_.count(way)) ways.push_back(way);
  }
  return ways;
}

void Rank::AllReduce(const std::string& way, size_t bytes) {
  Operation operation;
  operation.fingerprint.kind = Kind::kAllReduce;
  operation.fingerprint.type = DType::kFloat32;
  operation.fingerprint.AddShape({static_cast<int64_t>(bytes / sizeof(float))});
  operation.device = nullptr;
  operation.in = ConstBufferList(Pointer(memory.address()), bytes);
  operation.out = BufferList(Pointer(memory.address()), bytes);
  communicators_.at(way)->Run(std::move(operation));
}

void Rank::Report(const std::string& members, const std::vector<double>& seconds) {
  std::string list;
  for (const double each : Slowest(seconds)) {
    char number[32];
    std::snprintf(number, sizeof(number), "%s%.9f", list.empty() ? "" : ", ", each);
    list += number;
  }
  Say("{" + members + ", \"seconds\": [" + list + "]}");
}

void Rank::Say(const std::string& line) const {
  if (number == 0) std::printf("%s\n", line.c_str());
}

}  // namespace tfdist::benchmark
