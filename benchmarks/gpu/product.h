// What a GPU computes beside all-reduces: see product.cu.
#pragma once

#include <functional>
#include <string>

#include "device/gpu.h"

namespace tfdist::benchmark {

class Product {
 public:
  // The compiled kernel is in the file PRODUCT_KERNEL.
  explicit Product(const Gpu& gpu);
  ~Product();
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  // How many seconds it takes while something else is done, which begins after it.
  double Time(const std::function<void()>& meanwhile = [] {});

 private:
  const Gpu& gpu_;
  const std::string binary_;
  const KernelModule kernel_;
  const DeviceMemory out_;
  DeviceEvent done_;
  cuda::Stream* stream_ = nullptr;  // of no priority, as the program's
};

}  // namespace tfdist::benchmark
