// A simulated GPU for a TensorFlow that was built without CUDA. Its memory is the host's memory.
// Its only stream is the stream of the simulated CUDA driver. The environment variable FAKE_CUDA
// contains the path of this driver. If an operation has no kernel for this GPU, it runs on the CPU.
// Each copy is delayed a little, so that tests fail if code does not wait for the copy.
#include "tensorflow/c/experimental/stream_executor/stream_executor.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

struct SP_Stream_st {};
struct SP_Event_st {
  void* event;
};
struct SP_Timer_st {};

namespace {

using Device = const SP_Device*;
using Memory = SP_DeviceMemoryBase;
constexpr auto kHeldUp = std::chrono::microseconds(300);
constexpr auto kLater = std::chrono::milliseconds(20);
constexpr size_t kAlignment = 256, kBytes = size_t{1} << 28;

// Calls a function of the driver.
template <typename... Parameters>
int Call(const char* name, Parameters... arguments) {
  static void* const driver = dlopen(std::getenv("FAKE_CUDA"), RTLD_NOW);
  return reinterpret_cast<int (*)(Parameters...)>(dlsym(driver, name))(arguments...);
}

// Adds a task to the stream, which runs its tasks in order.
void Enqueue(std::function<void()> task) {
  void (*const run)(void*) = [](void* data) {
    const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(data));
    (*owned)();
  };
  void* const stream = nullptr;
  Call("cuLaunchHostFunc", stream, run, static_cast<void*>(new std::function<void()>(task)));
}

void Synchronize() {
  void* const stream = nullptr;
  Call("cuStreamSynchronize", stream);
}

void Copy(void* to, const void* from, size_t bytes) {
  Enqueue([=] {
    std::this_thread::sleep_for(kHeldUp);
    std::memcpy(to, from, bytes);
  });
}

void Succeed(TF_Status* status) { TF_SetStatus(status, TF_OK, ""); }

void* Allocate(size_t bytes) {
  return std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
}

SE_EventStatus StatusOf(Device, SP_Event event) {
  return Call("cuEventQuery", event->event) == 0 ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
}

void FillMemory(SP_StreamExecutor* it) {
  it->allocate = [](Device, uint64_t bytes, int64_t, Memory* memory) {
    *memory = {SP_DEVICE_MEMORY_BASE_STRUCT_SIZE, nullptr, Allocate(bytes), bytes, 0};
  };
  it->deallocate = [](Device, Memory* memory) { std::free(memory->opaque); };
  it->host_memory_allocate = [](Device, uint64_t bytes) { return Allocate(bytes); };
  it->host_memory_deallocate = [](Device, void* memory) { std::free(memory); };
  it->get_allocator_stats = [](Device, SP_AllocatorStats*) -> TF_Bool { return false; };
  it->device_memory_usage = [](Device, int64_t* free, int64_t* total) -> TF_Bool {
    *free = *total = kBytes;
    return true;
  };
}

void FillStreams(SP_StreamExecutor* it) {
  it->create_stream = [](Device, SP_Stream* stream, TF_Status* status) {
    *stream = new SP_Stream_st();
    Succeed(status);
  };
  it->destroy_stream = [](Device, SP_Stream stream) { delete stream; };
  it->create_stream_dependency = [](Device, SP_Stream, SP_Stream, TF_Status* status) {
    Succeed(status);
  };
  it->get_stream_status = [](Device, SP_Stream, TF_Status* status) { Succeed(status); };
  it->block_host_until_done = [](Device, SP_Stream, TF_Status* status) {
    Synchronize();
    Succeed(status);
  };
  it->synchronize_all_activity = [](Device, TF_Status* status) {
    Synchronize();
    Succeed(status);
  };
  it->host_callback = [](Device, SP_Stream, SE_StatusCallbackFn function,
                         void* argument) -> TF_Bool {
    Enqueue([=] {
      TF_Status* const status = TF_NewStatus();
      function(argument, status);
      TF_DeleteStatus(status);
    });
    return true;
  };
}

void FillEvents(SP_StreamExecutor* it) {
  it->create_event = [](Device, SP_Event* event, TF_Status* status) {
    *event = new SP_Event_st();
    Call("cuEventCreate", &(*event)->event, 0u);
    Succeed(status);
  };
  it->destroy_event = [](Device, SP_Event event) {
    Call("cuEventDestroy_v2", event->event);
    delete event;
  };
  it->get_event_status = StatusOf;
  it->record_event = [](Device, SP_Stream, SP_Event event, TF_Status* status) {
    void* const stream = nullptr;
    Call("cuEventRecord", event->event, stream);
    Succeed(status);
  };
  it->wait_for_event = [](Device, SP_Stream, SP_Event, TF_Status* status) { Succeed(status); };
  it->block_host_for_event = [](Device device, SP_Event event, TF_Status* status) {
    while (StatusOf(device, event) != SE_EVENT_COMPLETE) std::this_thread::yield();
    Succeed(status);
  };
  it->create_timer = [](Device, SP_Timer* timer, TF_Status* status) {
    *timer = new SP_Timer_st();
    Succeed(status);
  };
  it->destroy_timer = [](Device, SP_Timer timer) { delete timer; };
  it->start_timer =
      it->stop_timer = [](Device, SP_Stream, SP_Timer, TF_Status* status) { Succeed(status); };
}

void FillCopies(SP_StreamExecutor* it) {
  it->memcpy_dtoh = [](Device, SP_Stream, void* to, const Memory* from, uint64_t bytes,
                       TF_Status* status) {
    Copy(to, from->opaque, bytes);
    Succeed(status);
  };
  it->memcpy_htod = [](Device, SP_Stream, Memory* to, const void* from, uint64_t bytes,
                       TF_Status* status) {
    Copy(to->opaque, from, bytes);
    Succeed(status);
  };
  it->memcpy_dtod = [](Device, SP_Stream, Memory* to, const Memory* from, uint64_t bytes,
                       TF_Status* status) {
    Copy(to->opaque, from->opaque, bytes);
    Succeed(status);
  };
  it->sync_memcpy_dtoh = [](Device, void* to, const Memory* from, uint64_t bytes,
                            TF_Status* status) {
    Copy(to, from->opaque, bytes);
    Synchronize();
    Succeed(status);
  };
  it->sync_memcpy_htod = [](Device, Memory* to, const void* from, uint64_t bytes,
                            TF_Status* status) {
    Copy(to->opaque, from, bytes);
    Synchronize();
    Succeed(status);
  };
  it->sync_memcpy_dtod = [](Device, Memory* to, const Memory* from, uint64_t bytes,
                            TF_Status* status) {
    Copy(to->opaque, from->opaque, bytes);
    Synchronize();
    Succeed(status);
  };
  it->mem_zero = [](Device, SP_Stream, Memory* to, uint64_t bytes, TF_Status* status) {
    Enqueue([data = to->opaque, bytes] { std::memset(data, 0, bytes); });
    Succeed(status);
  };
  it->memset = [](Device, SP_Stream, Memory* to, uint8_t value, uint64_t bytes, TF_Status* status) {
    Enqueue([data = to->opaque, value, bytes] { std::memset(data, value, bytes); });
    Succeed(status);
  };
  it->memset32 = [](Device, SP_Stream, Memory* to, uint32_t value, uint64_t bytes,
                    TF_Status* status) {
    Enqueue([data = static_cast<uint32_t*>(to->opaque), value, bytes] {
      std::fill_n(data, bytes / sizeof(value), value);
    });
    Succeed(status);
  };
}

void FillPlatform(SP_PlatformFns* it) {
  it->get_device_count = [](const SP_Platform*, int* count, TF_Status* status) {
    const char* const asked = std::getenv("FAKE_GPUS");
    *count = asked ? std::atoi(asked) : 1;
    Succeed(status);
  };
  it->create_device = [](const SP_Platform*, SE_CreateDeviceParams* given, TF_Status* status) {
    given->device->struct_size = SP_DEVICE_STRUCT_SIZE;
    given->device->ordinal = given->ordinal;
    given->device->hardware_name = "A GPU of threads";
    Succeed(status);
  };
  it->destroy_device = [](const SP_Platform*, SP_Device*) {};
  it->create_device_fns = [](const SP_Platform*, SE_CreateDeviceFnsParams* given,
                             TF_Status* status) {
    given->device_fns->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
    Succeed(status);
  };
  it->destroy_device_fns = [](const SP_Platform*, SP_DeviceFns*) {};
  it->create_stream_executor = [](const SP_Platform*, SE_CreateStreamExecutorParams* given,
                                  TF_Status* status) {
    given->stream_executor->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
    FillMemory(given->stream_executor);
    FillStreams(given->stream_executor);
    FillEvents(given->stream_executor);
    FillCopies(given->stream_executor);
    Succeed(status);
  };
  it->destroy_stream_executor = [](const SP_Platform*, SP_StreamExecutor*) {};
  it->create_timer_fns = [](const SP_Platform*, SP_TimerFns* timer, TF_Status* status) {
    timer->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
    timer->nanoseconds = [](SP_Timer) -> uint64_t { return 0; };
    Succeed(status);
  };
  it->destroy_timer_fns = [](const SP_Platform*, SP_TimerFns*) {};
}

// Copies its input to its output, but only some time after TensorFlow considers it complete.
class LaterOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& value = context->input(0);
    tensorflow::Tensor* later = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, value.shape(), &later));
    Enqueue([value, later = *later] {
      std::this_thread::sleep_for(kLater);
      std::memcpy(later.data(), value.data(), value.TotalBytes());
    });
  }
};

REGISTER_OP("TestsLater").Input("value: float").Output("later: float").SetIsStateful();
REGISTER_KERNEL_BUILDER(Name("TestsLater").Device(tensorflow::DEVICE_GPU), LaterOp);

}  // namespace

void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status* status) {
  params->struct_size = SE_PLATFORM_REGISTRATION_PARAMS_STRUCT_SIZE;
  params->major_version = SE_MAJOR;
  params->minor_version = SE_MINOR;
  params->patch_version = SE_PATCH;
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "THREADS";
  params->platform->type = "GPU";
  params->platform->use_bfc_allocator = true;
  params->platform->force_memory_growth = true;
  params->platform_fns->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  FillPlatform(params->platform_fns);
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
  Succeed(status);
}
