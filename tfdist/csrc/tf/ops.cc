// The signatures of the TensorFlow ops, and the functions that infer the shapes of their results.
//
// The input `token` is a resource that orders the operations of one communicator: TensorFlow runs
// ops with the same resource in program order. This order must be the same on all ranks, because
// the operations of different ranks are matched by their order.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;
using Result = decltype(tensorflow::shape_inference::UnknownShape(nullptr));

#define TFDIST_TYPES "{bool, uint8, int8, int32, int64, half, bfloat16, float, double}"
#define TFDIST_REDUCTIONS "{'sum', 'mean', 'min', 'max', 'product'} = 'sum'"

// Gives each output the shape of its input. Input 0 is the token, so the input of output i is input
// i + 1.
Result SameShapes(InferenceContext* context) {
  for (int i = 0; i < context->num_outputs(); ++i) {
    context->set_output(i, context->input(i + 1));
  }
  return Result();
}

Result UnknownRows(InferenceContext* context, ShapeHandle shape) {
  if (!context->RankKnown(shape) || context->Rank(shape) == 0) {
    context->set_output(0, context->UnknownShape());
    return Result();
  }
  ShapeHandle result;
  TF_RETURN_IF_ERROR(context->ReplaceDim(shape, 0, context->UnknownDim(), &result));
  context->set_output(0, result);
  return Result();
}

}  // namespace

REGISTER_OP("TfdistAllReduce")
    .Input("token: resource")
    .Input("tensors: N * T")
    .Output("reduced: N * T")
    .Attr("N: int >= 1")
    .Attr("T: " TFDIST_TYPES)
    .Attr("op: " TFDIST_REDUCTIONS)
    .Attr("communicator: string")
    .Attr("key: string = ''")
    .Attr("gpu: int >= 0 = 0")
    .Attr("overlaps: bool = false")
    .Attr("awaited: bool = false")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(SameShapes);

REGISTER_OP("TfdistAwait")
    .Input("token: resource")
    .Input("tensors: T")
    .Output("awaited: T")
    .Attr("T: list({half, bfloat16, float, double}) >= 1")
    .Attr("communicator: string")
    .Attr("key: string = ''")
    .Attr("gpu: int >= 0 = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(SameShapes);

REGISTER_OP("TfdistCompressedAllReduce")
    .Input("token: resource")
    .Input("tensors: N * float")
    .Input("errors: M * resource")
    .Input("seed: int64")
    .Output("reduced: N * float")
    .Attr("N: int >= 1")
    .Attr("M: int >= 0")
    .Attr("form: int")
    .Attr("bits: int = 8")
    .Attr("stochastic: bool = false")
    .Attr("euclidean: bool = false")
    .Attr("unit: bool = false")
    .Attr("clip: float = 0.0")
    .Attr("block: int = 256")
    .Attr("within_hosts: bool = false")
    .Attr("communicator: string")
    .Attr("key: string = ''")
    .Attr("gpu: int >= 0 = 0")
    .Attr("overlaps: bool = false")
    .Attr("awaited: bool = false")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(SameShapes);

REGISTER_OP("TfdistSelect")
    .Input("tensors: N * float")
    .Input("errors: E * resource")
    .Input("momenta: M * resource")
    .Input("counts: int64")
    .Input("scales: float")
    .Output("rows: float")
    .Attr("N: int >= 1")
    .Attr("E: int >= 0")
    .Attr("M: int >= 0")
    .Attr("threshold: float = 0.0")
    .Attr("factor: float = 0.0")
    .Attr("communicator: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      context->set_output(0, context->Matrix(context->UnknownDim(), 2));
      return Result();
    });

REGISTER_OP("TfdistScatter")
    .Input("rows: float")
    .Output("tensors: N * float")
    .Attr("N: int >= 1")
    .Attr("shapes: list(shape)")
    .Attr("communicator: string = ''")
    .SetShapeFn([](InferenceContext* context) {
      std::vector<tensorflow::PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes));
      for (int i = 0; i < context->num_outputs() && i < static_cast<int>(shapes.size()); ++i) {
        ShapeHandle shape;
        TF_RETURN_IF_ERROR(context->MakeShapeFromPartialTensorShape(shapes[i], &shape));
        context->set_output(i, shape);
      }
      return Result();
    });

REGISTER_OP("TfdistReduceScatter")
    .Input("token: resource")
    .Input("tensor: T")
    .Output("part: T")
    .Attr("T: " TFDIST_TYPES)
    .Attr("op: " TFDIST_REDUCTIONS)
    .Attr("communicator: string")
    .Attr("key: string = ''")
    .Attr("gpu: int >= 0 = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* context) { return UnknownRows(context, context->input(1)); });

REGISTER_OP("TfdistAllGather")
    .Input("token: resource")
    .Input("tensor: T")
    .Output("gathered: T")
    .Attr("T: " TFDIST_TYPES)
    .Attr("communicator: string")
    .Attr("key: string = ''")
    .Attr("gpu: int >= 0 = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* context) { return UnknownRows(context, context->input(1)); });

REGISTER_OP("TfdistBroadcast")
    .Input("token: resource")
    .Input("tensor: T")
    .Output("value: T")
    .Attr("T: " TFDIST_TYPES)
    .Attr("root: int")
    .Attr("communicator: string")
    .Attr("key: string = ''")
    .Attr("gpu: int >= 0 = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(SameShapes);

REGISTER_OP("TfdistAllToAll")
    .Input("token: resource")
    .Input("tensor: T")
    .Input("rows: int64")
    .Output("received: T")
    .Output("received_rows: int64")
    .Attr("T: " TFDIST_TYPES)
    .Attr("communicator: string")
    .Attr("key: string = ''")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* context) {
      context->set_output(1, context->input(2));
      return UnknownRows(context, context->input(1));
    });

REGISTER_OP("TfdistSend")
    .Input("token: resource")
    .Input("tensor: T")
    .Attr("T: " TFDIST_TYPES)
    .Attr("rank: int")
    .Attr("communicator: string")
    .Attr("key: string = ''")
    .Attr("gpu: int >= 0 = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("TfdistReceive")
    .Input("token: resource")
    .Input("shape: int64")
    .Output("tensor: T")
    .Attr("T: " TFDIST_TYPES)
    .Attr("rank: int")
    .Attr("communicator: string")
    .Attr("key: string = ''")
    .Attr("gpu: int >= 0 = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* context) {
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(context->MakeShapeFromShapeTensor(1, &shape));
      context->set_output(0, shape);
      return Result();
    });

REGISTER_OP("TfdistBarrier")
    .Input("token: resource")
    .Attr("communicator: string")
    .Attr("key: string = ''")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Returns this process's rank and the number of ranks. The op looks them up whenever the graph
// runs, because the group may change after the graph has been traced. The op is registered as one
// that only reads the resource `order`, so no other op waits for it.
REGISTER_OP("TfdistGroupShape")
    .Input("order: resource")
    .Output("rank: int32")
    .Output("size: int32")
    .Attr("communicator: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      context->set_output(0, context->Scalar());
      context->set_output(1, context->Scalar());
      return Result();
    });

// A dataset that divides the rows of every batch of its input among the replicas of all processes.
// From each batch, it yields one element for each of this process's `replicas`. If the rows cannot
// be divided evenly, each of the first replicas gets one more row.
//
// If `communicator` is given, the rows that this process gets depend on its rank in this
// communicator. The rank is looked up for every batch, because the group may change. Otherwise, the
// process is number `worker` of `workers` processes. If `splits` is false, the rows are not
// divided: an element consists of the whole batch and the index of the replica in this process.
// `replay` is the number of a Replay (control/replay.h), which can request that the last batch be
// returned again, or 0 if there is none.
REGISTER_OP("TfdistSharesDataset")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .Attr("communicator: string = ''")
    .Attr("worker: int = 0")
    .Attr("workers: int = 1")
    .Attr("replicas: int >= 1 = 1")
    .Attr("splits: bool = true")
    .Attr("replay: int = 0")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// The following datasets preprocess only this process's rows of each batch (see
// divided_dataset.cc). Datasets and ops with the same number `division` share their state.

// Yields the unprocessed elements of each batch as one variant.
REGISTER_OP("TfdistElementBatches")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .Attr("batch_size: int >= 1")
    .Attr("drop_remainder: bool")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// Yields the elements of this process's rows, one by one.
REGISTER_OP("TfdistOwnElements")
    .Output("handle: variant")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// Stacks the processed elements of each batch. The stacks follow two numbers: the number of rows of
// the whole batch, and the index of this process's first row.
REGISTER_OP("TfdistCollate")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// Yields the rows of each replica of this process. The attributes `communicator`, `worker`,
// `workers`, `replicas` and `replay` have the same meaning as for TfdistSharesDataset. If
// `repeats_first`, the first batch is yielded twice. If `tells_rows`, each element ends with the
// number of rows of its batch. If `checks`, this process's rows of the first batch are compared
// with the same rows of the whole batch.
REGISTER_OP("TfdistDividedDataset")
    .Input("batches: variant")
    .Input("stages: variant")
    .Output("handle: variant")
    .Attr("division: int")
    .Attr("communicator: string = ''")
    .Attr("worker: int = 0")
    .Attr("workers: int = 1")
    .Attr("replicas: int >= 1 = 1")
    .Attr("replay: int = 0")
    .Attr("repeats_first: bool = false")
    .Attr("tells_rows: bool = false")
    .Attr("checks: bool = false")
    .Attr("is_exact: bool = true")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// Returns four numbers: the rows of the batches read so far, the elements that this process has
// processed, the first component that depends on which rows are processed (-1 if there is none),
// and whether all rows of each batch are processed.
REGISTER_OP("TfdistDivisionReport")
    .Output("report: int64")
    .Attr("division: int")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      context->set_output(0, context->Vector(4));
      return Result();
    });

// Makes this process process all rows of each batch from now on.
REGISTER_OP("TfdistProcessWhole")
    .Attr("division: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Returns all rows of the first batch of the last iterator, once.
REGISTER_OP("TfdistTakeFirstBatch")
    .Output("batch: T")
    .Attr("division: int")
    .Attr("T: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape);

// Returns the graph of a dataset, the name of its last node, and the values of its placeholders.
REGISTER_OP("TfdistDatasetGraph")
    .Input("input_dataset: variant")
    .Output("graph: string")
    .Output("node: string")
    .Output("inputs: variant")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape);

// Returns the dataset that a graph creates.
REGISTER_OP("TfdistDatasetFromGraph")
    .Input("graph: string")
    .Input("node: string")
    .Input("inputs: variant")
    .Output("handle: variant")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// The following ops report the progress of a step to the flight recorder. The input `order` is a
// resource, and each kind of op has a separate resource. If these ops had no resource as input,
// TensorFlow would run them in program order with all other stateful ops, which would delay both.

// Reports that the inputs of the collective with this key are available. If the key is empty,
// reports instead that the step has finished all work that overlaps with the running collective.
REGISTER_OP("TfdistReady")
    .Input("order: resource")
    .Attr("communicator: string")
    .Attr("key: string = ''")
    .Attr("stalls: bool = true")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("TfdistInputBegins")
    .Input("order: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("TfdistInputEnds")
    .Input("order: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("TfdistSpanBegins")
    .Input("order: resource")
    .Output("begin: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("TfdistSpanEnds")
    .Input("order: resource")
    .Input("begin: int64")
    .Attr("lane: string")
    .Attr("span: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Returns whether the step uses its clusters (the parts that XLA compiles) for tensors of these
// shapes. See step_ops.cc.
REGISTER_OP("TfdistShapesFit")
    .Input("order: resource")
    .Input("shapes: count * int64")
    .Output("fits: bool")
    .Attr("count: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// The following ops make steps atomic: a step that fails is undone. If such an op takes variables
// as inputs, TensorFlow runs the op after the program's earlier ops on these variables, and before
// the program's later ops on them.

// Begins a step. `complete` says whether TfdistKeep will keep all variables that the step writes.
REGISTER_OP("TfdistStepBegins")
    .Input("order: resource")
    .Attr("complete: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Keeps the current values of variables that the step may write before it is certain that the step
// will succeed. If the step fails, TfdistRollBack restores these values.
REGISTER_OP("TfdistKeep")
    .Input("variables: N * resource")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Records that the step has finished its communication. From now on, the step may also write
// variables that have not been kept.
REGISTER_OP("TfdistUpdateBegins")
    .Input("variables: N * resource")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Runs after this rank has written these worker-local variables. From then on, this rank can redo
// the step if it is rolled back here, but is committed on another rank.
REGISTER_OP("TfdistStepPrepares")
    .Input("variables: N * resource")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("TfdistStepCommits")
    .Input("order: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Undoes the current step if it has not been committed. Returns the number of committed steps, and
// whether the step has been undone completely. If `redoable` is true, TfdistRedo can bring back the
// values that the step had written.
REGISTER_OP("TfdistRollBack")
    .Output("committed: int64")
    .Output("whole: bool")
    .Attr("redoable: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      context->set_output(0, context->Scalar());
      context->set_output(1, context->Scalar());
      return Result();
    });

REGISTER_OP("TfdistRedo").SetIsStateful().SetShapeFn(tensorflow::shape_inference::NoOutputs);
