// Runs an all-reduce of GPU memory in a communicator created by member.py. Returns the error, or
// "".
#include <cstdint>
#include <string>
#include <utility>

#include "device/gpu.h"
#include "registry.h"

using namespace tfdist;

extern "C" const char* all_reduce_on_gpu(int64_t number, const char* name, size_t count,
                                         int* code) {
  static const Gpu gpu(0);
  static const size_t bytes = count * sizeof(float);
  static const DeviceMemory memory(gpu, bytes);
  static const DeviceStream stream(gpu);
  static DeviceEvent ready(gpu);
  static std::string said;
  char* const data = cuda::PointerTo<char>(memory.address());
  ready.Record(stream.get());
  Operation operation;
  operation.fingerprint.kind = Kind::kAllReduce;
  operation.fingerprint.type = DType::kFloat32;
  operation.fingerprint.op = ReduceOp::kSum;
  operation.fingerprint.SetName(name);
  operation.fingerprint.AddShape({static_cast<int64_t>(count)});
  operation.device = ready.get();
  operation.in = ConstBufferList(data, bytes);
  operation.out = BufferList(data, bytes);
  said.clear();
  *code = 0;
  try {
    Find(number)->Run(std::move(operation));
  } catch (const Error& error) {
    *code = static_cast<int>(error.code());
    said = error.what();
  }
  return said.c_str();
}
