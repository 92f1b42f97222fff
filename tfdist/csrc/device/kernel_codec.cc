#include "device/kernel_codec.h"

#include <algorithm>

#include "device/kernels/form_names.h"

namespace tfdist {
namespace {

// Few, so that the blocks of a batch spread over all multiprocessors.
constexpr unsigned kThreads = 128;
constexpr unsigned kThreadsOfBlock = 16;  // of encoded values
constexpr size_t kMostBlocks = 4096;

std::string NameOf(const Codec& codec) {
  switch (codec.form) {
    case Form::kHalf: return "half";
    case Form::kBfloat16: return "bfloat16";
    case Form::kFloat8: return "float8";
    case Form::kLevels: return "levels" + std::to_string(codec.bits);
    case Form::kPowers: return "powers";
    case Form::kTwoMeans: return "means";
    case Form::kSigns: return "signs";
  }
  return "";
}

device::Room RoomAt(cuda::Address room, size_t count) {
  return {cuda::PointerTo<float>(room), count};
}

}  // namespace

std::vector<const char*> CodecKernelNames() {
#define TFDIST_NAMES(name, F) "tfdist_encode_" #name, "tfdist_decode_" #name, "tfdist_sum_" #name,
  return {TFDIST_FOR_ALL_FORMS(TFDIST_NAMES) "tfdist_sum_votes"};
#undef TFDIST_NAMES
}

template <typename... Arguments>
void KernelCodec::Launch(const std::string& name, size_t count, uint32_t block,
                         Arguments... arguments) const {
  if (count == 0) return;
  const size_t threads = (count + block - 1) / block * kThreadsOfBlock;
  const size_t blocks = std::min((threads + kThreads - 1) / kThreads, kMostBlocks);
  kernels_.Launch(name, static_cast<unsigned>(blocks), kThreads, stream_, arguments...);
}

void KernelCodec::Encode(const device::Batch& batch, const device::Place& in,
                         const device::Place& error, cuda::Address room, cuda::Address to) const {
  Launch("tfdist_encode_" + NameOf(batch.codec), batch.count, batch.codec.block, batch, in, error,
         RoomAt(room, batch.count), cuda::PointerTo<uint8_t>(to));
}

void KernelCodec::Decode(const Codec& codec, size_t count, cuda::Address from,
                         const device::Place& out, cuda::Address room) const {
  const uint8_t* const encoded = cuda::PointerTo<uint8_t>(from);
  Launch("tfdist_decode_" + NameOf(codec), count, codec.block, codec, uint64_t{count}, encoded, out,
         RoomAt(room, count));
}

void KernelCodec::Sum(const device::Batch& batch, const device::Arrived& arrived, bool votes,
                      const device::Place& in, const device::Place& error,
                      const device::Place& out, cuda::Address room, cuda::Address to) const {
  Launch("tfdist_sum_" + (votes ? "votes" : NameOf(arrived.codec)), batch.count, batch.codec.block,
         batch, arrived, in, error, out, RoomAt(room, batch.count), cuda::PointerTo<uint8_t>(to));
}

}  // namespace tfdist
