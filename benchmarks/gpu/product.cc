#include "product.h"

#include <cstdlib>
#include <fstream>
#include <future>
#include <iterator>

#include "timing.h"

namespace tfdist::benchmark {
namespace {

// There are many more blocks than the GPU can run at the same time, so that the incomplete last
// wave of blocks matters little. At the peak speed of an H100, the kernel takes 10 ms.
constexpr unsigned kBlocks = 32768, kThreads = 256;
constexpr int kMultiplications = 5000;
constexpr const char* kName = "benchmark_product";

std::string Contents() {
  const char* const path = std::getenv("PRODUCT_KERNEL");
  std::ifstream file(path ? path : "", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

Product::Product(const Gpu& gpu)
    : gpu_(gpu),
      binary_(Contents()),
      kernel_(gpu, binary_.data(), &kName, 1),
      out_(gpu, sizeof(float)),
      done_(gpu) {
  gpu.Use();
  const auto create = cuda::Load().cuStreamCreateWithPriority;
  cuda::Check(create(&stream_, cuda::kNonBlocking, 0), "cuStreamCreateWithPriority");
}

Product::~Product() {
  gpu_.UseIfPossible();
  cuda::Load().cuStreamDestroy_v2(stream_);
}

double Product::Time(const std::function<void()>& meanwhile) {
  const double start = Now();
  kernel_.Launch(kName, kBlocks, kThreads, stream_, out_.address(), kMultiplications, 0.999f, 1.0f);
  done_.Record(stream_);
  auto end = std::async(std::launch::async, [this] {
    AwaitExactly(done_);
    return Now();
  });
  meanwhile();
  return end.get() - start;
}

}  // namespace tfdist::benchmark
