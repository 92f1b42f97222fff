// A kernel that runs concurrently with all-reduces; see product.cu.
#pragma once

#include <functional>
#include <string>

#include "device/gpu.h"

namespace tfdist::benchmark {

class Product {
 public:
  // Loads the compiled kernel from the file that the environment variable PRODUCT_KERNEL names.
  explicit Product(const Gpu& gpu);
  ~Product();
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  // Launches the kernel, calls `meanwhile`, and returns the seconds that the kernel takes.
  double Time(const std::function<void()>& meanwhile = [] {});

 private:
  const Gpu& gpu_;
  const std::string binary_;
  const KernelModule kernel_;
  const DeviceMemory out_;
  DeviceEvent done_;
  cuda::Stream* stream_ = nullptr;  // Has the default priority, like the streams of a program.
};

}  // namespace tfdist::benchmark
