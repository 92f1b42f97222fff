// Says whether the shapes of a step's rows are among those for which clusters are compiled.
#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist::tf {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// XLA compiles for each shape anew, which takes longer than many steps. So the first shapes are
// compiled, and others once they have come often, up to a number that a step can have by mistake.
constexpr int kOften = 16;
constexpr int kMost = 16;
// Shapes whose times are counted at once: rows of ever new lengths must not fill the memory.
constexpr size_t kMostCounted = 1024;

class ShapesFitOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    std::vector<int64_t> shapes;
    bool empty = false;
    for (int i = 1; i < context->num_inputs(); ++i) {
      const auto shape = context->input(i).flat<int64_t>();
      shapes.push_back(shape.size());
      shapes.insert(shapes.end(), shape.data(), shape.data() + shape.size());
      // A replica without rows computes with a row of zeros, and differently.
      empty |= std::count(shape.data(), shape.data() + shape.size(), 0) > 0;
    }
    tensorflow::Tensor* fits = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &fits));
    fits->scalar<bool>()() = !empty && Known(shapes);
  }

 private:
  bool Known(const std::vector<int64_t>& shapes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (compiled_.count(shapes) > 0) return true;
    if (compiled_.size() == kMost) return false;
    // What comes often is soon counted again.
    if (times_.size() == kMostCounted && times_.count(shapes) == 0) times_.clear();
    if (!compiled_.empty() && ++times_[shapes] < kOften) return false;
    compiled_.insert(shapes);
    times_.erase(shapes);
    if (compiled_.size() == kMost) times_.clear();
    return true;
  }

  std::mutex mutex_;
  std::set<std::vector<int64_t>> compiled_;
  std::map<std::vector<int64_t>, int> times_;  // of those that are not compiled
};

REGISTER_KERNEL_BUILDER(Name("TfdistShapesFit").Device(tensorflow::DEVICE_CPU), ShapesFitOp);

}  // namespace
}  // namespace tfdist::tf
