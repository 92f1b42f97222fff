#include "messages.h"

#include <functional>
#include <future>
#include <memory>
#include <utility>

#include "communicator.h"
#include "cpp/ranks.h"
#include "timing.h"

namespace tfdist::benchmark {
namespace {

testing::Plan Connected(const std::string& kernels) {
  testing::Plan plan;
  plan.device.emplace();
  plan.device->gpus = {{0, kernels}};
  plan.device->transport = "p2p";
  plan.device->may_share_gpu = true;
  plan.timeout_seconds = 60;
  return plan;
}

// Sends a message from rank 0 to rank 1. Both ranks must call this function.
void Pass(Communicator& rank, const DeviceMemory& memory, cuda::Event* ready, size_t bytes) {
  const bool sends = rank.rank() == 0;
  Operation message;
  message.fingerprint.kind = sends ? Kind::kSend : Kind::kReceive;
  message.fingerprint.type = DType::kFloat32;
  message.fingerprint.AddShape({static_cast<int64_t>(bytes / sizeof(float))});
  message.device = ready;
  message.peer = 1 - rank.rank();
  char* const data = cuda::PointerTo<char>(memory.address());
  if (sends) message.in = ConstBufferList(data, bytes);
  else message.out = BufferList(data, bytes);
  rank.Run(std::move(message));
}

}  // namespace

void MeasureMessages(const Extent& extent, const std::string& kernels) {
  testing::Wiring wiring(Connected(kernels));
  std::unique_ptr<Communicator> ranks[2];
  const auto on_each = [](const std::function<void(int)>& body) {
    auto other = std::async(std::launch::async, body, 1);
    body(0);
    other.get();
  };
  on_each([&](int rank) { ranks[rank] = std::make_unique<Communicator>(wiring.Take(rank)); });
  const Gpu gpu(0);
  const DeviceStream stream(gpu);
  const DeviceMemory from(gpu, extent.bytes), to(gpu, extent.bytes);
  DeviceEvent ready(gpu);
  ready.Record(stream.get());
  const auto pass = [&](int times) {
    on_each([&](int rank) {
      gpu.Use();
      for (int n = 0; n < times; ++n) {
        Pass(*ranks[rank], rank == 0 ? from : to, ready.get(), extent.bytes);
      }
    });
  };
  constexpr int kTimes = 5;
  std::vector<double> copies, messages;
  for (int round = -1; round < extent.rounds; ++round) {
    const double start = Now();
    for (int n = 0; n < kTimes; ++n) stream.Copy(to.address(), from.address(), extent.bytes);
    stream.Synchronize();
    const double between = Now();
    pass(kTimes);
    if (round < 0) continue;
    copies.push_back((between - start) / kTimes);
    messages.push_back((Now() - between) / kTimes);
  }
  // Both ranks must close together, because one rank reads the memory of the other rank.
  on_each([&](int rank) { ranks[rank].reset(); });
  Print({"copy beside messages", 2 * extent.bytes}, Median(copies));
  // A message is copied twice: into the receiver's staging buffer, and from there into the tensor.
  Print({"message between two stages", 4 * extent.bytes, "copy beside messages"}, Median(messages));
}

}  // namespace tfdist::benchmark
