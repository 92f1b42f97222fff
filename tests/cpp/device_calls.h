// Communicators with collectives of GPU memory, for tests. See `gpu_ranks.h` and `nccl_threads.h`
// for the libraries. On a real GPU, all ranks share it.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "cpp/calls.h"
#include "cpp/gpu_ranks.h"
#include "cpp/values.h"
#include "device/gpu.h"

namespace tfdist::testing {

constexpr size_t kDeviceMemory = size_t{32} << 20;

inline std::string Environment(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

inline Plan PlanFor(const std::string& transport, int ranks, int hosts, As as) {
  Plan plan;
  plan.ranks = ranks;
  plan.hosts = hosts;
  plan.as = as;
  plan.device.emplace();
  plan.device->cuda = FakeDriver();
  plan.device->gpus = {{0, FakeDriver().empty() ? Environment("GPU_KERNELS") : "/dev/null"}};
  plan.device->nccl = transport == "nccl" ? Environment("FAKE_NCCL") : "";
  plan.device->transport = transport;
  plan.device->may_share_gpu = true;
  plan.device->buffer_bytes = 16384;
  return plan;
}

// Ranks whose streams wait for each other: processes, since they share a GPU, or threads that act
// like processes.
inline Plan PlanForStreams(int ranks, As as) {
  Plan plan = PlanFor("p2p", ranks, 1, as);
  plan.device->may_share_gpu = plan.device->streams_wait = as == As::kThreads;
  return plan;
}

// A rank's memory on its GPU, allocated at once.
class Memory {
 public:
  explicit Memory(int gpu = 0, size_t bytes = kDeviceMemory) : gpu_(gpu), bytes_(bytes) {}
  cuda::Address Put(const std::vector<char>& values) {
    const cuda::Address at = Take(values.size());
    stream_.Copy(at, reinterpret_cast<uintptr_t>(values.data()), values.size());
    stream_.Synchronize();
    return at;
  }
  cuda::Address Take(size_t bytes) {
    const cuda::Address at = (end_ + 15) / 16 * 16;
    end_ = at + bytes;
    EXPECT(end_ <= memory_.address() + bytes_);
    return at;
  }
  std::vector<char> Get(cuda::Address at, size_t bytes) {
    std::vector<char> found(bytes);
    stream_.Copy(reinterpret_cast<uintptr_t>(found.data()), at, found.size());
    stream_.Synchronize();
    return found;
  }
  bool Has(cuda::Address at, const std::vector<char>& expected) {
    return Get(at, expected.size()) == expected;
  }
  // Only the writes of this memory must pass before it is used.
  cuda::Event* Ready() {
    ready_.Record(stream_.get());
    return ready_.get();
  }
  void Clear() { end_ = memory_.address(); }

 private:
  const Gpu gpu_;
  const size_t bytes_;
  const DeviceMemory memory_{gpu_, bytes_};
  const DeviceStream stream_{gpu_};
  DeviceEvent ready_{gpu_};
  cuda::Address end_ = memory_.address();
};

inline char* Pointer(cuda::Address address) { return reinterpret_cast<char*>(address); }

inline Operation OnDevice(Memory& memory, Kind kind, DType type, ReduceOp op,
                          const std::string& name) {
  Operation operation;
  operation.fingerprint.kind = kind;
  operation.fingerprint.type = type;
  operation.fingerprint.op = op;
  operation.fingerprint.SetName(name);
  operation.device = memory.Ready();
  return operation;
}

inline void AllReduce(Communicator& c, Memory& memory, DType type, ReduceOp op,
                      const std::vector<size_t>& counts) {
  memory.Clear();
  std::vector<BasicBuffer<const char>> in;
  std::vector<BasicBuffer<char>> out;
  std::vector<int64_t> shape{0};
  for (const size_t count : counts) {
    const std::vector<char> values = Fill(type, count, c.rank());
    char* const at = Pointer(memory.Put(values));
    in.push_back({at, values.size()});
    // Every second tensor is reduced in place.
    char* const to = in.size() % 2 ? at : Pointer(memory.Take(values.size()));
    out.push_back({to, values.size()});
    shape[0] += static_cast<int64_t>(count);
  }
  Operation operation = OnDevice(memory, Kind::kAllReduce, type, op, "gradients");
  operation.fingerprint.AddShape(shape);
  operation.in = ConstBufferList(in);
  operation.out = BufferList(out);
  c.Run(std::move(operation));
  for (size_t i = 0; i < counts.size(); ++i) {
    EXPECT(memory.Has(reinterpret_cast<uintptr_t>(out[i].data),
                      Expected(type, op, c.size(), counts[i])));
  }
}

// Only launches an operation, with memory that nothing else uses meanwhile.
inline void Launch(Communicator& c, Memory& memory, size_t count) {
  const std::vector<char> values = Fill(DType::kFloat32, count, c.rank());
  char* const at = Pointer(memory.Put(values));
  Operation operation = OnDevice(memory, Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, "x");
  operation.launches = true;
  operation.in = ConstBufferList(at, values.size());
  operation.out = BufferList(at, values.size());
  c.Run(std::move(operation));
}
// Waits for all launched operations.
inline void AwaitLaunched(Communicator& c, Memory& memory) {
  Operation operation = OnDevice(memory, Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, "x");
  operation.awaits = true;
  c.Run(std::move(operation));
  memory.Clear();
}

// From rank 1 to rank 0.
inline void Message(Communicator& c, Memory& memory, size_t count) {
  if (c.rank() > 1 || c.size() == 1) return;
  const DType type = DType::kFloat32;
  const std::vector<char> values = Fill(type, count, 1);
  memory.Clear();
  const bool sends = c.rank() == 1;
  const cuda::Address at = sends ? memory.Put(values) : memory.Take(values.size());
  Operation message =
      OnDevice(memory, sends ? Kind::kSend : Kind::kReceive, type, ReduceOp::kSum, "message");
  message.peer = 1 - c.rank();
  if (sends) message.in = ConstBufferList(Pointer(at), values.size());
  if (!sends) message.out = BufferList(Pointer(at), values.size());
  c.Run(std::move(message));
  EXPECT(memory.Has(at, values));
}

}  // namespace tfdist::testing
