// Usage: device_codecs_test [small]
//
// Encoding, summing and decoding on a GPU, bit-identical to the processor, for every encoding and
// any division of values into tensors. With FAKE_CUDA, the kernels run on the processor.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "collective/coder.h"
#include "cpp/device_calls.h"
#include "device/compressed_path.h"
#include "device/kernel_launch.h"

namespace tfdist::testing {
namespace {

constexpr size_t kFloat = sizeof(float);
constexpr int kMembers = 3, kMe = 1;

// All codecs that have kernels.
std::vector<Codec> Codecs() {
  std::vector<Codec> all;
  for (int encoding = 0; encoding < kEncodings; ++encoding) {
    Codec codec;
    codec.encoding = static_cast<Encoding>(encoding);
    if (codec.encoding != Encoding::kLevels) {
      all.push_back(codec);
      continue;
    }
    for (const uint8_t bits : {uint8_t{2}, uint8_t{4}, uint8_t{8}}) {
      for (const bool stochastic : {false, true}) {
        for (const bool euclidean : {false, true}) {
          for (const float clip : {0.0f, 1.5f}) {
            codec.bits = bits;
            codec.stochastic = stochastic;
            codec.euclidean = euclidean;
            codec.clip = clip;
            all.push_back(codec);
          }
        }
      }
    }
  }
  Codec votes;
  votes.encoding = Encoding::kSigns;
  votes.unit = true;
  all.push_back(votes);
  return all;
}

std::string NameOf(const Codec& c) {
  char text[128];
  std::snprintf(text, sizeof(text),
                "encoding %d, %d bits, stochastic %d, euclidean %d, unit %d, clip %g, block %u",
                static_cast<int>(c.encoding), c.bits, c.stochastic, c.euclidean, c.unit, c.clip,
                c.block);
  return text;
}

// Values of all magnitudes: zeros, denormal numbers, the largest numbers; and blocks that are not
// finite.
std::vector<float> Values(size_t count, uint32_t block, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (size_t begin = 0; begin < count; begin += block) {
    const unsigned kind = random() % 8;
    constexpr float kScales[] = {1, 1, 1, 1, 0, 1e-40f, 1e38f, 1e-6f};
    const float scale = kScales[kind];
    const size_t end = std::min(count, begin + block);
    for (size_t i = begin; i < end; ++i) values[i] = normal(random) * scale;
    float& any = values[begin + random() % (end - begin)];
    if (kind == 3) any = std::numeric_limits<float>::infinity();
    if (kind == 2) any = -0.0f;
    if (kind == 1) values[begin] = std::numeric_limits<float>::max();
  }
  return values;
}

// The data of one side: the processor or the GPU.
struct Side {
  std::vector<BasicBuffer<char>> in, out, error;
  Transfer transfer;
  Compression compression;
  Coder* coder = nullptr;
  uint8_t* encoded = nullptr;
};

// Divides values into tensors: some empty, some smaller than a block, some larger.
std::vector<size_t> Cut(size_t count, bool once, std::mt19937& random) {
  std::vector<size_t> tensors;
  for (size_t rest = count; rest > 0;) {
    const size_t size = random() % 2 ? random() % 7 : random() % 700;
    tensors.push_back(once ? rest : std::min(rest, size));
    rest -= tensors.back();
  }
  return tensors;
}

class Comparison {
 public:
  Comparison(const Codec& codec, size_t count, bool feeds_back, bool one_tensor, unsigned seed)
      : random_(seed), codec_(codec), count_(count) {
    members_.ranks = {4, 7, 9};
    members_.me = kMe;
    in_ = Values(count, codec.block, random_);
    error_ = Values(count, codec.block, random_);
    out_.assign(count, 42);
    for (float& left : error_) left *= 0.1f;
    tensors_ = Cut(count, one_tensor, random_);
    feeds_back_ = feeds_back;
  }

  void operator()(DeviceCoder& device, Memory& memory) {
    memory.Clear();
    Side host, gpu;
    std::vector<float> in = in_, out = out_, error = error_;
    host.in = Buffers(in.data());
    host.out = Buffers(out.data());
    host.error = Buffers(error.data());
    gpu.in = OnGpu(memory, in_);
    gpu.out = OnGpu(memory, out_);
    gpu.error = OnGpu(memory, error_);
    Prepare(host);
    Prepare(gpu);
    Scratch scratch;
    HostCoder processor(scratch);
    host.coder = &processor;
    gpu.coder = &device;
    Operation operation;
    operation.device = memory.Ready();
    operation.compression = gpu.compression;
    device.Run(operation, [&](Operation& running) {
      EXPECT(running.compression->coder == &device);
      Run(host, gpu);
    });
    ExpectSame(memory, gpu.out, out);
    ExpectSame(memory, gpu.error, error);
  }

 private:
  std::vector<BasicBuffer<char>> Buffers(float* values) const {
    std::vector<BasicBuffer<char>> buffers;
    for (const size_t count : tensors_) {
      buffers.push_back({reinterpret_cast<char*>(values), count * kFloat});
      values += count;
    }
    return buffers;
  }

  // Every second tensor is not aligned to 16 bytes.
  std::vector<BasicBuffer<char>> OnGpu(Memory& memory, const std::vector<float>& values) const {
    std::vector<BasicBuffer<char>> buffers;
    const auto* from = reinterpret_cast<const char*>(values.data());
    for (const size_t count : tensors_) {
      const size_t shift = buffers.size() % 2 * kFloat;
      std::vector<char> bytes(shift + count * kFloat);
      if (count > 0) std::memcpy(bytes.data() + shift, from, count * kFloat);
      from += count * kFloat;
      buffers.push_back({Pointer(memory.Put(bytes)) + shift, count * kFloat});
    }
    return buffers;
  }

  void Prepare(Side& side) const {
    side.transfer.scatter = side.transfer.gather = true;
    side.transfer.type = DType::kFloat32;
    side.transfer.in = BufferList(side.in).Const();
    side.transfer.out = BufferList(side.out);
    side.transfer.part_bytes = CutEvenly(count_ * kFloat, kFloat, kMembers, kMembers);
    side.compression.codec = codec_;
    side.compression.seed = 5;
    if (feeds_back_) side.compression.error = BufferList(side.error);
  }

  // Runs the same transfer on both sides, including the data from other ranks, and compares the
  // sent data.
  void Run(Side& host, Side& gpu) {
    const CodedTransfer on_host(host.transfer, members_, host.compression, 0);
    const CodedTransfer on_gpu(gpu.transfer, members_, gpu.compression, 0);
    const Codec &codec = on_host.codec(), &sums_codec = on_host.sums_codec();
    const size_t own = on_host.Count(kMe), stride = EncodedBytes(codec, own);
    size_t bytes = kMembers * stride;  // as laid out by a collective
    std::vector<size_t> sent, sums;
    for (int j = 0; j < kMembers; ++j) {
      sent.push_back(bytes);
      sums.push_back(sent.back() + EncodedBytes(codec, on_host.Count(j)));
      bytes = sums.back() + EncodedBytes(sums_codec, on_host.Count(j));
    }
    EXPECT(bytes == on_host.BufferBytes());
    host.encoded = host.coder->Begin(on_host);
    gpu.encoded = gpu.coder->Begin(on_gpu);
    const auto same = [&](size_t begin, size_t some) {
      return std::memcmp(host.encoded + begin, gpu.encoded + begin, some) == 0;
    };
    const auto for_batches = [&](Side& side, const Codec& with, size_t at, size_t count, auto use) {
      const size_t batch = side.coder->ChunksAtOnce() * on_host.chunk();
      for (size_t begin = 0; begin < count; begin += batch) {
        const size_t some = std::min(batch, count - begin);
        use(Coder::Batch{begin, some, side.encoded + at + EncodedBytes(with, begin),
                         EncodedBytes(with, some)});
      }
    };
    for (const int j : {2, 0}) {
      const auto at = static_cast<size_t>(j);
      for (Side* side : {&host, &gpu}) {
        for_batches(*side, codec, sent[at], on_host.Count(j), [&](const Coder::Batch& batch) {
          side->coder->Foresee(j, batch);
          side->coder->EncodeBatch(j, batch);
        });
      }
      EXPECT(same(sent[at], EncodedBytes(codec, on_host.Count(j))));
    }
    for (const int j : {0, 2}) Send(codec, own, static_cast<size_t>(j) * stride, host, gpu);
    for (Side* side : {&host, &gpu}) {
      for_batches(*side, sums_codec, sums[kMe], own, [&](const Coder::Batch& batch) {
        side->coder->AddUp(batch, {side->encoded, stride});
        side->coder->Complete(batch);
      });
    }
    EXPECT(same(sums[kMe], EncodedBytes(sums_codec, own)));
    for (const int j : {0, 2}) {
      const auto at = static_cast<size_t>(j);
      Send(sums_codec, on_host.Count(j), sums[at], host, gpu);
      for (Side* side : {&host, &gpu}) {
        for_batches(*side, sums_codec, sums[at], on_host.Count(j),
                    [&](const Coder::Batch& batch) { side->coder->DecodeBatch(j, batch); });
      }
    }
  }

  // Provides another rank's encoded values.
  void Send(const Codec& codec, size_t count, size_t at, const Side& host, const Side& gpu) {
    const std::vector<float> values = Values(count, codec.block, random_);
    Encode(codec, {values.data(), nullptr, count, host.encoded + at, 3});
    std::memcpy(gpu.encoded + at, host.encoded + at, EncodedBytes(codec, count));
  }

  // Expects the same bits, or NaN on both sides.
  static void ExpectSame(Memory& memory, const std::vector<BasicBuffer<char>>& found,
                         const std::vector<float>& expected) {
    const auto* next = reinterpret_cast<const char*>(expected.data());
    for (const BasicBuffer<char>& buffer : found) {
      const auto address = reinterpret_cast<uintptr_t>(buffer.data);
      const std::vector<char> values = memory.Get(address, buffer.bytes);
      for (size_t at = 0; at < buffer.bytes; at += kFloat, next += kFloat) {
        EXPECT(AreEqual(DType::kFloat32, values.data() + at, next));
      }
    }
  }

  std::mt19937 random_;
  const Codec codec_;
  const size_t count_;
  bool feeds_back_;
  Members members_;
  std::vector<size_t> tensors_;
  std::vector<float> in_, out_, error_;
};

void Everything(bool small) {
  struct Never : Guard {
    void Check() override {}
  } guard;
  cuda::Load(FakeDriver());
  const Gpu gpu(0);
  const KernelModule kernels(gpu, KernelBinary().data(), KernelNames().data(),
                             KernelNames().size());
  DeviceCoder device(gpu, kernels, guard);
  Memory memory;
  unsigned seed = 0;
  const auto compare = [&](Codec codec, uint32_t block, size_t count, bool one_tensor) {
    codec.block = block;
    for (const bool feeds_back : {false, true}) {
      if (feeds_back && codec.unit) continue;
      try {
        Comparison(codec, count, feeds_back, one_tensor, ++seed)(device, memory);
      } catch (const Failure& failure) {
        throw Failure(NameOf(codec) + ", " + std::to_string(count) + " values, " +
                      (one_tensor ? "one tensor, " : "") + (feeds_back ? "with error: " : "") +
                      failure.what());
      }
    }
  };
  for (const Codec& codec : Codecs()) {
    compare(codec, 256, 3 * 1003, false);
    // Aligned values in whole blocks: threads handle several at once.
    compare(codec, 256, 3 * 1024, true);
    compare(codec, 8, 3 * 45 + 1, true);
    compare(codec, 1000, 3 * 2500, true);
    for (const size_t count : {0u, 1u, 5u}) compare(codec, 64, count, false);
  }
  if (small) return;
  // Several chunks, each with its own seed, and more than one batch.
  Codec random, powers;
  random.stochastic = true;
  powers.encoding = Encoding::kPowers;
  for (const Codec& codec : {random, powers}) compare(codec, 4096, 3 * 350'000, true);
  compare(random, 4096, 3 * 150'000, false);
}

}  // namespace
}  // namespace tfdist::testing

int main(int argc, char** argv) {
  using namespace tfdist::testing;
  return Report([&] { Everything(argc > 1 && std::string(argv[1]) == "small"); });
}
