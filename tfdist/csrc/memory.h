// Buffers: aligned memory, scratch space, and lists of memory regions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace tfdist {

// Copies into memory that another core will read.
//
// If another core read a cache line last, an ordinary store first fetches the line from that core.
// Which copy is fastest depends on the caches that the cores share. Measured on one machine between
// two cores, in GB/s of a 1 MiB all-reduce: with a shared cache, ordinary stores 6, CopyNear 19,
// CopyFar 7; without, ordinary stores 1.2, CopyNear 2, CopyFar 8.

// Copies with the processor's string copy, which leaves the data in the caches.
void CopyNear(void* to, const void* from, size_t bytes);

// Copies past the caches, directly into memory.
void CopyFar(void* to, const void* from, size_t bytes);

// Returns the time to read a word written by another core, in clock ticks; zero without such a
// clock. From kFarTicks on, the other core counts as far.
unsigned long TicksToRead(const void* word);
constexpr unsigned long kFarTicks = 250;

// A list of buffers viewed as one contiguous byte range, so that tensors need not be packed.
template <typename Byte>
struct BasicBuffer {
  Byte* data;
  size_t bytes;
};

template <typename Byte>
class BasicBufferList {
 public:
  BasicBufferList() = default;
  explicit BasicBufferList(const std::vector<BasicBuffer<Byte>>& buffers) {
    buffers_.reserve(buffers.size());
    for (const auto& buffer : buffers) Add(buffer);
  }
  BasicBufferList(Byte* data, size_t bytes) { Add({data, bytes}); }

  size_t bytes() const { return bytes_; }

  // The same buffers, read-only.
  BasicBufferList<const Byte> Const() const {
    std::vector<BasicBuffer<const Byte>> buffers;
    for (const auto& [buffer, begin] : buffers_) buffers.push_back({buffer.data, buffer.bytes});
    return BasicBufferList<const Byte>(buffers);
  }

  // Calls `use(data, bytes)` for each stretch of [begin, begin + bytes), in order.
  template <typename Use>
  void ForEach(size_t begin, size_t bytes, Use use) const {
    if (bytes == 0) return;
    for (auto next = Find(begin); bytes > 0; ++next) {
      const size_t skipped = begin - next->begin;
      const size_t length = std::min(bytes, next->buffer.bytes - skipped);
      if (length > 0) use(next->buffer.data + skipped, length);
      begin += length;
      bytes -= length;
    }
  }

  // The contiguous bytes that begin at `begin`: their address and maximum length.
  BasicBuffer<Byte> At(size_t begin) const {
    const auto found = Find(begin);
    const size_t skipped = begin - found->begin;
    return {found->buffer.data + skipped, found->buffer.bytes - skipped};
  }

 private:
  struct Placed {
    BasicBuffer<Byte> buffer;
    size_t begin;
  };

  void Add(const BasicBuffer<Byte>& buffer) {
    buffers_.push_back({buffer, bytes_});
    bytes_ += buffer.bytes;
  }

  // The last buffer that begins at or before `begin`.
  typename std::vector<Placed>::const_iterator Find(size_t begin) const {
    const auto after =
        std::upper_bound(buffers_.begin(), buffers_.end(), begin,
                         [](size_t at, const Placed& placed) { return at < placed.begin; });
    return after - 1;
  }

  std::vector<Placed> buffers_;
  size_t bytes_ = 0;
};

using BufferList = BasicBufferList<char>;
using ConstBufferList = BasicBufferList<const char>;

// Memory kept between collectives, since fresh pages are slow.
class Scratch {
 public:
  // At least `bytes` uninitialized bytes, valid until the next call.
  char* Take(size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset(new char[bytes]);
      bytes_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<char[]> memory_;
  size_t bytes_ = 0;
};

}  // namespace tfdist
