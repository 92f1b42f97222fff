// A GPU, and what belongs to it: memory, streams, events, kernels. Each frees what it has made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "device/cuda.h"
#include "error.h"

namespace tfdist {

class Gpu {
 public:
  // Args: its number among those that this process sees. The context is the one that TensorFlow uses.
  explicit Gpu(int number);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Has this thread's calls of the driver go to this GPU.
  void Use() const;
  // The same for what frees, which can do nothing about an error.
  void UseIfPossible() const noexcept;
  const std::string& name() const { return name_; }
  // What its kernels are compiled for, such as "sm_90".
  const std::string& architecture() const { return architecture_; }
  // Its own among all GPUs.
  const cuda::Uuid& uuid() const { return uuid_; }
  // Whether its streams can wait for words in memory.
  bool has_stream_waits() const { return has_stream_waits_; }
  // Lets what runs on this GPU use the memory of another one of this process. Throws Error where it
  // cannot.
  void ReachInto(int number) const;
  // Where it is in its host; parts of a GPU have one place.
  const std::string& place() const { return place_; }

 private:
  cuda::Device device_ = 0;
  cuda::Context* context_ = nullptr;
  std::string name_;
  std::string architecture_;
  std::string place_;
  cuda::Uuid uuid_{};
  bool has_stream_waits_ = false;
};

// What is thrown where a GPU has too little memory left.
// Args: what the bytes are for, and the setting that makes do with fewer; what the driver has said.
Error NoRoom(const Gpu& gpu, size_t bytes, const std::string& purpose, const std::string& setting,
             const Error& error);

// On the GPU; all zero.
class DeviceMemory {
 public:
  DeviceMemory(const Gpu& gpu, size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  cuda::Address address() const { return address_; }
  // What another process of the host opens it by.
  cuda::IpcHandle Share() const;

 private:
  const Gpu& gpu_;
  cuda::Address address_ = 0;
};

// That of another process, of a GPU of this host.
class PeerMemory {
 public:
  PeerMemory(const Gpu& gpu, const cuda::IpcHandle& handle);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  cuda::Address address() const { return address_; }

 private:
  const Gpu& gpu_;
  cuda::Address address_ = 0;
};

// In the host's memory, for both; all zero.
class MappedMemory {
 public:
  MappedMemory(const Gpu& gpu, size_t bytes);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  void* data() const { return data_; }
  cuda::Address address() const { return address_; }  // as the GPU sees it

 private:
  const Gpu& gpu_;
  void* data_ = nullptr;
  cuda::Address address_ = 0;
};

// In memory of the host that somebody else has, for a GPU, too.
class RegisteredMemory {
 public:
  RegisteredMemory(const Gpu& gpu, void* data, size_t bytes);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  cuda::Address address() const { return address_; }  // as the GPU sees it

 private:
  const Gpu& gpu_;
  void* registered_ = nullptr;  // by this
  cuda::Address address_ = 0;
};

// What it is given runs in order, beside what other streams run, and before them where a GPU can.
class DeviceStream {
 public:
  explicit DeviceStream(const Gpu& gpu);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  cuda::Stream* get() const { return stream_; }
  // Copies to or from a GPU, or within one; the host's memory has to be `MappedMemory` to come or go
  // beside other work.
  void Copy(cuda::Address to, cuda::Address from, size_t bytes) const;
  // Waits for all that it was given.
  void Synchronize() const;

 private:
  const Gpu& gpu_;
  cuda::Stream* stream_ = nullptr;
};

// Whether a point in a stream has passed; the thread uses its GPU.
bool HasPassed(cuda::Event* event);

// A point in a stream.
class DeviceEvent {
 public:
  explicit DeviceEvent(const Gpu& gpu);
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  void Record(cuda::Stream* stream);
  // What the stream is given from now on runs after this point.
  void HoldBack(cuda::Stream* stream) const;
  bool HasPassed() const;
  cuda::Event* get() const { return event_; }

 private:
  const Gpu& gpu_;
  cuda::Event* event_ = nullptr;
};

// Compiled kernels, all of them loaded at once: to load one while others wait for it would wait for
// them.
class KernelModule {
 public:
  // Args: a binary for the GPU's architecture, and the names of its kernels.
  KernelModule(const Gpu& gpu, const void* binary, const char* const* names, size_t count);
  ~KernelModule();
  KernelModule(const KernelModule&) = delete;
  KernelModule& operator=(const KernelModule&) = delete;

  // Runs a kernel in a stream, with arguments as it declares them.
  template <typename... Arguments>
  void Launch(const std::string& name, unsigned blocks, unsigned threads, cuda::Stream* stream,
              Arguments... arguments) const {
    void* all[] = {&arguments...};
    LaunchWith(name, blocks, threads, stream, all);
  }

 private:
  void LaunchWith(const std::string& name, unsigned blocks, unsigned threads,
                  cuda::Stream* stream, void** arguments) const;

  const Gpu& gpu_;
  cuda::Module* module_ = nullptr;
  std::unordered_map<std::string, cuda::Function*> functions_;
};

}  // namespace tfdist
