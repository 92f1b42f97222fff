// Ops that return the graph of a dataset, and that create a dataset from a graph.
//
// As in TensorFlow's own rewrites of datasets, tensors from outside the graph become placeholders.
// So the new dataset shares the original's variables, tables, memory caches and random states.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/common_runtime/graph_constructor.h"
#include "tensorflow/core/common_runtime/graph_runner.h"
#include "tensorflow/core/common_runtime/process_function_library_runtime.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/variant_encode_decode.h"
#include "tensorflow/core/framework/variant_op_registry.h"
#include "tensorflow/core/framework/variant_tensor_data.h"
#include "tensorflow/core/graph/graph_def_builder.h"

namespace tfdist::tf::dataset_graph {
namespace {

using tensorflow::Node;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::data::DatasetBase;
using tensorflow::data::SerializationContext;

class GraphInputs {
 public:
  using List = std::vector<std::pair<std::string, Tensor>>;

  GraphInputs() = default;
  explicit GraphInputs(List list) : list_(std::make_shared<const List>(std::move(list))) {}

  const List& list() const { return *list_; }
  std::string TypeName() const { return "tfdist::GraphInputs"; }
  std::string DebugString() const { return "GraphInputs"; }
  void Encode(tensorflow::VariantTensorData* data) const { data->set_type_name(TypeName()); }
  bool Decode(tensorflow::VariantTensorData) { return false; }

 private:
  std::shared_ptr<const List> list_ = std::make_shared<const List>();
};

// A graph that is larger is copied too slowly. Protocol buffers are limited to 2 GiB.
constexpr size_t kMaxGraphBytes = size_t{1} << 28;

class DatasetGraphOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    DatasetBase* dataset = nullptr;
    OP_REQUIRES_OK(context,
                   tensorflow::data::GetDatasetFromVariantTensor(context->input(0), &dataset));
    GraphInputs::List inputs;
    SerializationContext::Params params(context);
    params.input_list = &inputs;
    params.external_state_policy = tensorflow::data::ExternalStatePolicy::POLICY_IGNORE;
    params.is_graph_rewrite = true;
    SerializationContext serialization(params);
    tensorflow::GraphDefBuilder graph;
    DatasetBase::DatasetGraphDefBuilder builder(&graph);
    Node* node = nullptr;
    OP_REQUIRES_OK(context, builder.AddInputDataset(&serialization, dataset, &node));
    tensorflow::GraphDef definition;
    OP_REQUIRES_OK(context, graph.ToGraphDef(&definition));
    OP_REQUIRES(context, definition.ByteSizeLong() < kMaxGraphBytes,
                absl::ResourceExhaustedError("The graph of a dataset is too large."));
    Tensor text(tensorflow::DT_STRING, TensorShape({})),
        name(tensorflow::DT_STRING, TensorShape({}));
    text.scalar<tensorflow::tstring>()() = definition.SerializeAsString();
    name.scalar<tensorflow::tstring>()() = node->name();
    Tensor list(tensorflow::DT_VARIANT, TensorShape({}));
    list.scalar<tensorflow::Variant>()() = GraphInputs(std::move(inputs));
    context->set_output(0, text);
    context->set_output(1, name);
    context->set_output(2, list);
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistDatasetGraph").Device(tensorflow::DEVICE_CPU), DatasetGraphOp);

class DatasetFromGraphOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const GraphInputs* inputs =
        context->input(2).scalar<tensorflow::Variant>()().get<GraphInputs>();
    tensorflow::GraphDef definition;
    OP_REQUIRES(context,
                inputs != nullptr && definition.ParseFromString(std::string(
                                         context->input(0).scalar<tensorflow::tstring>()())),
                absl::InvalidArgumentError("The graph of a dataset cannot be read."));
    const std::string name(context->input(1).scalar<tensorflow::tstring>()());
    std::unique_ptr<tensorflow::FunctionLibraryDefinition> library;
    std::unique_ptr<tensorflow::ProcessFunctionLibraryRuntime> process;
    tensorflow::FunctionLibraryRuntime* runtime = nullptr;
    OP_REQUIRES_OK(context, context->function_library()->Clone(&library, &process, &runtime, true));
    OP_REQUIRES_OK(context, AddFunctions(definition.library(), library.get()));
    tensorflow::Graph graph(tensorflow::OpRegistry::Global());
    OP_REQUIRES_OK(context, tensorflow::ImportGraphDef({}, definition, &graph, nullptr));
    tensorflow::GraphRunner runner(runtime->device());
    std::vector<Tensor> outputs;
    OP_REQUIRES_OK(context, runner.Run(&graph, runtime, inputs->list(), {name + ":0"}, &outputs));
    context->set_output(0, outputs[0]);
  }

 private:
  // Adds functions to a library. A function with the name of another one replaces it.
  static absl::Status AddFunctions(const tensorflow::FunctionDefLibrary& from,
                                   tensorflow::FunctionLibraryDefinition* to) {
    for (const tensorflow::FunctionDef& function : from.function()) {
      if (to->Contains(function.signature().name())) {
        TF_RETURN_IF_ERROR(to->ReplaceFunction(function.signature().name(), function));
      } else {
        TF_RETURN_IF_ERROR(to->AddFunctionDef(function));
      }
    }
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistDatasetFromGraph").Device(tensorflow::DEVICE_CPU),
                        DatasetFromGraphOp);

}  // namespace
}  // namespace tfdist::tf::dataset_graph
