#include "cpp/calls.h"

#include <cstdio>
#include <iterator>

namespace tfdist::testing {

Call::Call(Communicator& c, Kind kind, size_t count, const std::string& name, DType type) {
  const auto ranks = static_cast<size_t>(c.size());
  memory.assign(2 * count * ranks * SizeOf(type) + 1, 0);
  const size_t bytes = count * SizeOf(type);
  operation.fingerprint.kind = kind;
  operation.fingerprint.type = type;
  operation.fingerprint.SetName(name);
  size_t in = bytes, out = bytes;
  if (kind == Kind::kReduceScatter || kind == Kind::kAllToAll) in *= ranks;
  if (kind == Kind::kAllGather || kind == Kind::kAllToAll) out *= ranks;
  if (kind == Kind::kBarrier) in = out = 0;
  if (kind != Kind::kAllGather && kind != Kind::kAllToAll && kind != Kind::kBarrier) {
    operation.fingerprint.AddShape({static_cast<int64_t>(count)});
  }
  operation.sent_rows.assign(ranks, bytes);
  operation.received_rows.assign(ranks, bytes);
  operation.in = ConstBufferList(memory.data(), in);
  operation.out = BufferList(memory.data() + memory.size() / 2, out);
}

void Do(Communicator& c, Kind kind, size_t count, const std::string& name, DType type) {
  Call call(c, kind, count, name, type);
  c.Run(std::move(call.operation));
}

void DoMessage(Communicator& c, size_t count, const std::string& name, DType type) {
  if (c.rank() > 1) return;
  Call call(c, c.rank() == 1 ? Kind::kSend : Kind::kReceive, count, name, type);
  call.operation.peer = 1 - c.rank();
  c.Run(std::move(call.operation));
}

void ExpectError(const std::function<void()>& what, Code code,
                 const std::vector<std::string>& words) {
  try {
    what();
  } catch (const Error& error) {
    for (const auto& word : words) {
      if (std::string(error.what()).find(word) == std::string::npos) {
        throw Failure("The message lacks '" + word + "': " + error.what());
      }
    }
    if (error.code() != code) {
      throw Failure("Code " + std::to_string(static_cast<int>(error.code())) + ": " + error.what());
    }
    return;
  }
  std::string expected;
  for (const auto& word : words) expected += " '" + word + "'";
  throw Failure("No error was raised; expected:" + expected);
}

Plan Arranged(int ranks, int hosts, As as) {
  Plan plan;
  plan.ranks = ranks;
  plan.hosts = hosts;
  plan.as = as;
  return plan;
}

std::vector<std::pair<int, int>> Arrangements(int argc, char** argv) {
  const std::string last = argv[argc - 1];
  if (last == "quick") return {{2, 1}, {4, 2}};
  if (last == "one") return {{2, 2}};
  return {std::begin(kArrangements), std::end(kArrangements)};
}

int Report(const std::function<void()>& tests) {
  try {
    tests();
    std::printf("ok\n");
    return 0;
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}

}  // namespace tfdist::testing
