// Compressed all-reduces of GPU memory: bit-identical to those of host memory, and their failures.
#include <dlfcn.h>

#include <cmath>
#include <csignal>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpp/gpu_parts.h"
#include "cpp/nccl_threads.h"

namespace tfdist::testing {
namespace {

Codec CodecOf(Encoding encoding, uint32_t block = 64) {
  Codec codec;
  codec.encoding = encoding;
  codec.block = block;
  return codec;
}

std::vector<Codec> Codecs() {
  std::vector<Codec> all;
  for (int encoding = 0; encoding < kEncodings; ++encoding)
    all.push_back(CodecOf(static_cast<Encoding>(encoding)));
  Codec random = CodecOf(Encoding::kLevels);
  random.bits = 4;
  random.stochastic = random.euclidean = true;
  Codec votes = CodecOf(Encoding::kSigns);
  votes.unit = true;
  all.push_back(random);
  all.push_back(votes);
  return all;
}

std::vector<char> Brought(int rank, size_t count, float scale) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = scale * std::sin(static_cast<float>(i) * 0.7f + static_cast<float>(rank));
  }
  if (count > 17 && rank == 1) values[17] = std::numeric_limits<float>::infinity();
  const auto* begin = reinterpret_cast<const char*>(values.data());
  return {begin, begin + count * sizeof(float)};
}

template <typename P>
P Buffers(char* data, const std::vector<size_t>& counts) {
  std::vector<BasicBuffer<std::remove_pointer_t<decltype(P().At(0).data)>>> buffers;
  for (const size_t count : counts) {
    buffers.push_back({data, count * sizeof(float)});
    data += count * sizeof(float);
  }
  return P(buffers);
}

// A sum, in place, of tensors that are consecutive in memory.
Operation Sum(const Codec& codec, const std::vector<size_t>& counts, char* values, char* error,
              bool within_hosts) {
  Operation operation;
  operation.fingerprint.kind = Kind::kAllReduce;
  operation.fingerprint.type = DType::kFloat32;
  operation.fingerprint.SetName("gradients");
  for (const size_t count : counts) {
    operation.fingerprint.AddShape({static_cast<int64_t>(count)});
  }
  operation.in = Buffers<ConstBufferList>(values, counts);
  operation.out = Buffers<BufferList>(values, counts);
  const BufferList left = codec.unit ? BufferList() : Buffers<BufferList>(error, counts);
  operation.compression = Compression{codec, left, 11, within_hosts};
  return operation;
}

// Ignores the payloads of NaNs.
bool AreSame(const std::vector<char>& found, const std::vector<char>& expected) {
  bool same = found.size() == expected.size();
  for (size_t i = 0; same && i < expected.size(); i += sizeof(float)) {
    same = AreEqual(DType::kFloat32, found.data() + i, expected.data() + i);
  }
  return same;
}

void Add(const std::vector<char>& values, std::vector<char>* sums) {
  const auto* const from = reinterpret_cast<const float*>(values.data());
  auto* const to = reinterpret_cast<float*>(sums->data());
  for (size_t i = 0; i < values.size() / sizeof(float); ++i) to[i] += from[i];
}

// A sum on the GPU, and the same sum on the host for comparison.
class Compared {
 public:
  Compared(Communicator& c, Memory& memory, const Codec& codec, const std::vector<size_t>& counts,
           bool within_hosts)
      : c_(c), memory_(memory), codec_(codec), counts_(counts), within_hosts_(within_hosts) {
    size_t count = 0;
    for (const size_t each : counts) count += each;
    values_ = Brought(c.rank(), count, 1);
    error_ = Brought(c.rank() + 1, count, 0.1f);
    values_at_ = memory.Put(values_);
    error_at_ = memory.Put(error_);
  }

  void OnDevice(bool launches = false) {
    Operation operation =
        Sum(codec_, counts_, Pointer(values_at_), Pointer(error_at_), within_hosts_);
    operation.device = memory_.Ready();
    operation.launches = launches;
    c_.Run(std::move(operation));
  }
  void OnHost() {
    c_.Run(Sum(codec_, counts_, values_.data(), error_.data(), within_hosts_));
    Expect(values_at_, values_);
    Expect(error_at_, error_);
  }

 private:
  void Expect(cuda::Address at, const std::vector<char>& expected) {
    EXPECT(AreSame(memory_.Get(at, expected.size()), expected));
  }

  Communicator& c_;
  Memory& memory_;
  const Codec codec_;
  const std::vector<size_t> counts_;
  const bool within_hosts_;
  std::vector<char> values_, error_;
  cuda::Address values_at_, error_at_;
};

void SumOnDevice(Communicator& c, Memory& memory, const Codec& codec,
                 const std::vector<size_t>& counts, bool within_hosts = true) {
  memory.Clear();
  Compared sum(c, memory, codec, counts, within_hosts);
  sum.OnDevice();
  sum.OnHost();
}

void Await(Communicator& c, Memory& memory) {
  Operation operation;
  operation.fingerprint.kind = Kind::kAllReduce;
  operation.device = memory.Ready();
  operation.awaits = true;
  c.Run(std::move(operation));
}

// Consecutive operations: with more values than before, and with more tensors than fit the lists at
// once.
void Launched(Communicator& c) {
  Memory memory;
  memory.Clear();
  std::vector<std::unique_ptr<Compared>> sums;
  for (const size_t count : {1, 2, 5, 4, 3, 2, 1}) {
    const std::vector<size_t> counts(2000, count);
    sums.push_back(std::make_unique<Compared>(c, memory, CodecOf(Encoding::kLevels), counts, true));
    sums.back()->OnDevice(true);
  }
  Await(c, memory);
  for (const auto& sum : sums) sum->OnHost();
}

void Values(Communicator& c, bool within_hosts) {
  Memory memory;
  for (const Codec& codec : Codecs()) {
    SumOnDevice(c, memory, codec, {1003}, within_hosts);
    SumOnDevice(c, memory, codec, {1, 0, 300, 5, 600}, within_hosts);
  }
  for (const size_t count : {size_t{0}, size_t{1}, size_t{2}}) {
    SumOnDevice(c, memory, CodecOf(Encoding::kLevels), {count}, within_hosts);
  }
}

// Parts that are sent in several batches.
void Large(Communicator& c) {
  Memory memory;
  Codec random = CodecOf(Encoding::kLevels, 4096);
  random.stochastic = true;
  SumOnDevice(c, memory, random, {900'000, 3, 100'000});
}

int Launches() {
  if (FakeDriver().empty()) return 0;
  return reinterpret_cast<int (*)()>(
      dlsym(dlopen(FakeDriver().c_str(), RTLD_NOW), "fake_launches"))();
}
int Sent() { return FakeDriver().empty() ? 0 : Calls("ncclSend"); }

void DoBarrier(Communicator& c) {
  Operation barrier;
  barrier.fingerprint.kind = Kind::kBarrier;
  c.Run(std::move(barrier));
}

// The processor of encoded values, and their transport.
enum class By { kHost, kKernels, kNccl };

// Returns the means of a group's sums while its members run `body`, and before any leaves.
By Taken(const Plan& plan, const std::function<void(Communicator&)>& body) {
  const int launches = Launches(), sent = Sent();
  By taken = By::kHost;
  OnEachRank(plan, [&](Communicator& c) {
    body(c);
    DoBarrier(c);
    if (c.rank() == 0 && Launches() > launches) taken = By::kKernels;
    if (c.rank() == 0 && Sent() > sent) taken = By::kNccl;
    DoBarrier(c);
  });
  return taken;
}

void Check(const Plan& plan, bool within_hosts, By expected) {
  const By taken = Taken(plan, [&](Communicator& c) { Values(c, within_hosts); });
  EXPECT(FakeDriver().empty() || plan.as == As::kProcesses || taken == expected);
}

// One rank has no kernels: its sums and all encoded values pass through the host, with the same
// bits.
void WithoutKernels(const std::string& transport) {
  const Plan plan = PlanFor(transport, 2, 2, As::kThreads);
  Wiring wiring(plan);
  std::vector<Communicator::Setup> setups;
  for (const int rank : {0, 1}) setups.push_back(wiring.Take(rank));
  setups[1].device->gpus[0].kernels = "";
  const int sent = Sent();
  OnEachThread(std::move(setups), [](Communicator& c) { Values(c, false); });
  EXPECT(Sent() == sent);
}

void Mismatches(const Plan& plan) {
  OnEachRank(plan, [](Communicator& c) {
    Memory memory;
    SumOnDevice(c, memory, CodecOf(Encoding::kLevels), {5000});
    const Codec other = CodecOf(Encoding::kLevels, c.rank() == 1 ? 512 : 256);
    ExpectError([&] { SumOnDevice(c, memory, other, {5000}); }, Code::kMismatch,
                {"The compression differs."});
  });
  OnEachRank(plan, [](Communicator& c) {
    Memory memory;
    std::vector<char> values(4000), error(4000);
    const auto sum = [&] {
      if (c.rank() == 1) {
        return c.Run(Sum(CodecOf(Encoding::kLevels), {1000}, values.data(), error.data(), true));
      }
      SumOnDevice(c, memory, CodecOf(Encoding::kLevels), {1000});
    };
    ExpectError(sum, Code::kMismatch, {"Only one of them uses a GPU."});
  });
}

// The next operation is valid.
void Refusals(const Plan& plan) {
  OnEachRank(plan, [](Communicator& c) {
    Memory memory;
    const cuda::Address at = memory.Take(400);
    const auto refuse = [&](const std::string& words, auto change) {
      Operation wrong = Sum(CodecOf(Encoding::kLevels), {100}, Pointer(at), Pointer(at), true);
      wrong.device = memory.Ready();
      change(wrong);
      ExpectError([&] { c.Run(std::move(wrong)); }, Code::kInvalidArgument, {words});
    };
    refuse("max of float32", [](Operation& o) { o.fingerprint.op = ReduceOp::kMax; });
    refuse("2, 4 or 8", [](Operation& o) { o.compression->codec.bits = 5; });
    refuse("as large as", [&](Operation& o) { o.compression->error = BufferList(Pointer(at), 8); });
    SumOnDevice(c, memory, CodecOf(Encoding::kLevels), {100});
  });
}

void Lost(const Plan& plan) {
  OnEachProcess(plan, 1, [](Communicator& c) {
    Memory memory;
    const auto steps = [&] {
      for (int round = 0;; ++round) {
        if (c.rank() == 1 && round == 3) raise(SIGKILL);
        SumOnDevice(c, memory, CodecOf(Encoding::kLevels), {5000, 3});
      }
    };
    ExpectError(steps, Code::kUnavailable, {"rank 1"});
  });
}

// The same while the other ranks have pending launches.
void LostBesides(const Plan& plan) {
  OnEachProcess(plan, 1, [](Communicator& c) {
    Memory memory;
    const auto steps = [&] {
      for (int round = 0;; ++round) {
        memory.Clear();
        Compared first(c, memory, CodecOf(Encoding::kLevels), {5000, 3}, true);
        Compared second(c, memory, CodecOf(Encoding::kLevels), {4000}, true);
        first.OnDevice(true);
        if (c.rank() == 1 && round == 3) raise(SIGKILL);
        second.OnDevice(true);
        Await(c, memory);
      }
    };
    ExpectError(steps, Code::kUnavailable, {"rank 1"});
    ExpectError([&] { Await(c, memory); }, Code::kUnavailable, {"rank 1"});
  });
}

// A rank can no longer launch, while the other ranks wait for its data.
void Broken(const Plan& plan) {
  OnEachProcess(plan, -1, [](Communicator& c) {
    Memory memory;
    SumOnDevice(c, memory, CodecOf(Encoding::kLevels), {5000});
    if (c.rank() == 1) FailDriver("cuLaunchKernel", 2);
    ExpectError([&] { SumOnDevice(c, memory, CodecOf(Encoding::kLevels), {5000}); },
                Code::kInternal, {"cuLaunchKernel of the GPU's driver has failed: out of memory"});
  });
}

// A GPU has no memory left: its rank uses the host, and all encoded values pass through the host.
void WithoutRoom(const std::string& transport) {
  const bool by_nccl = transport == "nccl";
  OnEachProcess(PlanFor(transport, 2, 2, As::kProcesses), -1, [by_nccl](Communicator& c) {
    Memory memory;
    if (c.rank() == 1) FailDriver("cuMemAlloc_v2", 2);
    SumOnDevice(c, memory, CodecOf(Encoding::kHalf), {5000});
    EXPECT((Launches() > 0) == (c.rank() == 0) && Sent() == 0);
    FailDriver("cuMemAlloc_v2", 0);
    // The same amount of memory is not requested again.
    SumOnDevice(c, memory, CodecOf(Encoding::kHalf), {5000});
    EXPECT(Sent() == 0);
    SumOnDevice(c, memory, CodecOf(Encoding::kHalf), {4000});
    EXPECT((Sent() > 0) == by_nccl);
  });
}

// The warning is given once.
void WithoutRoomIsTold() {
  const Plan plan = PlanFor("", 2, 2, As::kThreads);
  Wiring wiring(plan);
  std::vector<Communicator::Setup> setups;
  std::string told[2];
  for (const int rank : {0, 1}) {
    setups.push_back(wiring.Take(rank));
    setups.back().warn = [&told, rank](const std::string& message) {
      told[rank] += message + "\n";
    };
  }
  OnEachThread(std::move(setups), [](Communicator& c) {
    Memory memory;
    SumOnDevice(c, memory, CodecOf(Encoding::kHalf), {10});
    FailDriver("cuMemAlloc_v2", 2);
    for (const size_t count : {5000u, 6000u}) {
      SumOnDevice(c, memory, CodecOf(Encoding::kHalf), {count});
    }
  });
  FailDriver("cuMemAlloc_v2", 0);
  for (const std::string& text : told) {
    const char* const begin = "Compressed gradients go through the host's memory, since ";
    EXPECT(text.find(begin) != std::string::npos && text.find(begin) == text.rfind(begin));
    EXPECT(text.find("lower `bytes_per_pack`, or set TF_FORCE_GPU_ALLOW_GROWTH=true: ") !=
           std::string::npos);
  }
}

// A rank's results.
struct Result {
  std::vector<char> values, error;
};

// Runs in host memory, with one rank per GPU, on the host of its process.
std::vector<Result> OnHosts(int processes, int gpus, const Codec& codec, size_t count) {
  Plan plan;
  plan.ranks = processes * gpus;
  plan.hosts = processes;
  std::vector<Result> results(static_cast<size_t>(plan.ranks));
  OnEachRank(plan, [&](Communicator& c) {
    Result& result = results[static_cast<size_t>(c.rank())];
    result = {Brought(c.rank(), count, 1), Brought(c.rank() + 1, count, 0.1f)};
    c.Run(Sum(codec, {count}, result.values.data(), result.error.data(), false));
  });
  return results;
}

// GPUs of a process sum exactly first, like ranks of a host. `number` is a GPU's rank.
void OfSeveralGpus(const Plan& plan, const Codec& codec, size_t count, bool within_hosts) {
  const auto gpus_each = static_cast<int>(plan.device->gpus.size());
  const std::vector<Result> expected = OnHosts(plan.ranks, gpus_each, codec, count);
  const By taken = Taken(plan, [&](Communicator& c) {
    Gpus gpus(c);
    std::vector<Operation> parts;
    std::vector<cuda::Address> values, errors;
    const auto number = [&](size_t gpu) { return static_cast<int>(gpu) * c.size() + c.rank(); };
    for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
      values.push_back(gpus[gpu].Put(Brought(number(gpu), count, 1)));
      errors.push_back(gpus[gpu].Put(Brought(number(gpu) + 1, count, 0.1f)));
      parts.push_back(
          Sum(codec, {count}, Pointer(values[gpu]), Pointer(errors[gpu]), within_hosts));
      parts.back().device = gpus[gpu].Ready();
    }
    RunParts(c, std::move(parts));
    for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
      const Result& result = expected[static_cast<size_t>(number(gpu))];
      EXPECT(AreSame(gpus[gpu].Get(values[gpu], count * sizeof(float)), result.values));
      if (codec.unit) continue;
      EXPECT(AreSame(gpus[gpu].Get(errors[gpu], count * sizeof(float)), result.error));
    }
  });
  EXPECT(plan.as == As::kProcesses || taken == By::kNccl);
}

// Without NCCL, a process sums in host memory and is one rank of the compression. Its first GPU
// keeps the error.
void OfSeveralGpusThroughTheHost(const Plan& plan) {
  constexpr size_t kCount = 1003;
  const Codec codec = CodecOf(Encoding::kLevels);
  OnEachRank(plan, [&](Communicator& c) {
    Gpus gpus(c);
    std::vector<char> sums(kCount * sizeof(float)), error = Brought(c.rank(), kCount, 0.1f);
    std::vector<Operation> parts;
    std::vector<cuda::Address> values, errors;
    for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
      const std::vector<char> brought = Brought(gpus.Rank(gpu), kCount, 1);
      Add(brought, &sums);
      values.push_back(gpus[gpu].Put(brought));
      errors.push_back(gpus[gpu].Put(error));
      parts.push_back(Sum(codec, {kCount}, Pointer(values[gpu]), Pointer(errors[gpu]), true));
      parts.back().device = gpus[gpu].Ready();
    }
    RunParts(c, std::move(parts));
    c.Run(Sum(codec, {kCount}, sums.data(), error.data(), true));
    for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
      EXPECT(AreSame(gpus[gpu].Get(values[gpu], sums.size()), sums));
    }
    EXPECT(AreSame(gpus[0].Get(errors[0], error.size()), error));
  });
}

// The GPUs of one process have different codecs.
void UnlikeParts(const Plan& plan) {
  OnEachRank(plan, [](Communicator& c) {
    Gpus gpus(c);
    std::vector<Operation> parts;
    for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
      char* const at = Pointer(gpus[gpu].Take(400));
      const Codec codec = CodecOf(Encoding::kLevels, gpu == 1 ? 512 : 256);
      parts.push_back(Sum(codec, {100}, at, at, true));
      parts.back().device = gpus[gpu].Ready();
    }
    ExpectError([&] { RunParts(c, std::move(parts)); }, Code::kMismatch,
                {"GPU 0", "GPU 1", "The compression differs."});
  });
}

void WithFakes() {
  // Processes come first, since none may have a driver before it forks.
  for (const char* transport : {"", "nccl"}) {
    Lost(PlanFor(transport, 3, 3, As::kProcesses));
    LostBesides(PlanFor(transport, 3, 3, As::kProcesses));
    Broken(PlanFor(transport, 3, 3, As::kProcesses));
    WithoutRoom(transport);
    Check(PlanFor(transport, 2, 2, As::kProcesses), false, By::kKernels);
  }
  Check(PlanFor("nccl", 4, 2, As::kProcesses), false, By::kNccl);
  OfSeveralGpus(WithGpus("nccl", 2, 2, As::kProcesses, 2), CodecOf(Encoding::kLevels), 1003, false);
  Check(PlanFor("p2p", 3, 1, As::kThreads), true, By::kKernels);
  Check(PlanFor("", 3, 3, As::kThreads), false, By::kKernels);
  for (const int ranks : {2, 3, 4}) {
    Check(PlanFor("nccl", ranks, ranks, As::kThreads), false, By::kNccl);
  }
  Check(PlanFor("nccl", 3, 1, As::kThreads), true, By::kNccl);
  Check(PlanFor("nccl", 3, 2, As::kThreads), true, By::kNccl);
  // Ranks of one host sum exactly first, and data without a destination are not encoded.
  Check(PlanFor("", 3, 2, As::kThreads), false, By::kHost);
  Check(PlanFor("nccl", 3, 2, As::kThreads), false, By::kNccl);
  Check(PlanFor("nccl", 5, 2, As::kThreads), false, By::kNccl);
  Check(PlanFor("", 2, 1, As::kThreads), false, By::kKernels);
  Check(PlanFor("", 1, 1, As::kThreads), true, By::kKernels);
  Check(PlanFor("host", 2, 2, As::kThreads), false, By::kHost);
  WithoutRoomIsTold();
  for (const Codec& codec : Codecs()) {
    if (codec.stochastic || codec.encoding == Encoding::kPowers)
      continue;  // The seed depends on the rank's number.
    OfSeveralGpus(WithGpus("nccl", 2, 2, As::kThreads, 2), codec, 1003, false);
    OfSeveralGpus(WithGpus("nccl", 3, 1, As::kThreads, 2), codec, 5, true);
  }
  OfSeveralGpusThroughTheHost(WithGpus("host", 2, 2, As::kThreads, 2));
  UnlikeParts(WithGpus("nccl", 2, 2, As::kThreads, 2));
  for (const char* transport : {"", "nccl"}) {
    EXPECT(Taken(PlanFor(transport, 2, 2, As::kThreads), Large) ==
           (*transport ? By::kNccl : By::kKernels));
    OnEachRank(PlanFor(transport, 3, 3, As::kThreads), Launched);
    WithoutKernels(transport);
    Mismatches(PlanFor(transport, 2, 2, As::kThreads));
    Refusals(PlanFor(transport, 2, 2, As::kThreads));
  }
}

void OnAGpu() {
  Lost(PlanFor("", 3, 3, As::kProcesses));
  Check(PlanFor("", 2, 2, As::kProcesses), false, By::kKernels);
  OnEachRank(PlanFor("", 2, 2, As::kProcesses), Large);
  Check(PlanFor("p2p", 3, 1, As::kThreads), true, By::kKernels);
}

}  // namespace
}  // namespace tfdist::testing

int main() {
  using namespace tfdist::testing;
  return Report(FakeDriver().empty() ? OnAGpu : WithFakes);
}
