// Datasets that preprocess only this process's rows of each batch.
//
// A divided dataset has two inputs. The first one yields the batches of unprocessed elements. It
// contains all stages that determine the order of the elements, such as shuffles. The second input
// contains the stages that process elements:
//
//   ElementBatches                    the unprocessed elements of each batch, on all workers alike
//         |
//   DividedDataset . . . OwnElements  the elements of this process's rows, one by one
//         |                   |
//         |                the user's maps
//         |                   |
//         |                Collate    the rows of one batch, stacked
//         |                   |
//         |                the user's maps of batches
//         |                   |
//         + < - - - - - - - - +
//         |
//   the rows of each replica
//
// All stages between OwnElements and DividedDataset yield one result per element, in order, so both
// ends can tell by counting to which batch an element belongs. If the group changes, or if a batch
// is requested again, DividedDataset creates a new iterator over these stages. It begins with the
// elements of the requested batch, which are kept until the batch has been used.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "control/replay.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/variant_encode_decode.h"
#include "tensorflow/core/framework/variant_op_registry.h"
#include "tensorflow/core/framework/variant_tensor_data.h"
#include "tensorflow/core/util/batch_util.h"
#include "tf/collective_op.h"
#include "tf/shares_dataset.h"

namespace tfdist::tf::divided {
namespace {

using tensorflow::AttrValue;
using tensorflow::DataTypeVector;
using tensorflow::Node;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::data::DatasetBase;
using tensorflow::data::DatasetContext;
using tensorflow::data::DatasetIterator;
using tensorflow::data::IteratorBase;
using tensorflow::data::IteratorContext;
using tensorflow::data::IteratorStateReader;
using tensorflow::data::IteratorStateWriter;
using tensorflow::data::SerializationContext;
using Batch = std::vector<Tensor>;
using Elements = std::vector<std::vector<Tensor>>;

// The unprocessed elements of one batch, as the only component of a dataset's element.
class ElementBatch {
 public:
  ElementBatch() = default;
  explicit ElementBatch(Elements elements)
      : elements_(std::make_shared<const Elements>(std::move(elements))) {}

  const Elements& elements() const { return *elements_; }

  std::string TypeName() const { return "tfdist::ElementBatch"; }
  std::string DebugString() const { return "ElementBatch"; }
  void Encode(tensorflow::VariantTensorData* data) const {
    data->set_type_name(TypeName());
    data->set_metadata(static_cast<int64_t>(elements_->size()));
    for (const auto& element : *elements_) {
      for (const Tensor& component : element) *data->add_tensors() = component;
    }
  }
  bool Decode(tensorflow::VariantTensorData data) {
    int64_t count = 0;
    if (!data.get_metadata(&count) || count <= 0 || data.tensors_size() % count != 0) return false;
    const int64_t components = data.tensors_size() / count;
    Elements elements(count);
    for (int64_t i = 0; i < data.tensors_size(); ++i) {
      elements[i / components].push_back(data.tensors(i));
    }
    elements_ = std::make_shared<const Elements>(std::move(elements));
    return true;
  }

 private:
  std::shared_ptr<const Elements> elements_ = std::make_shared<const Elements>();
};

REGISTER_UNARY_VARIANT_DECODE_FUNCTION(ElementBatch, "tfdist::ElementBatch");

Tensor ToTensor(ElementBatch batch) {
  Tensor tensor(tensorflow::DT_VARIANT, TensorShape({}));
  tensor.scalar<tensorflow::Variant>()() = std::move(batch);
  return tensor;
}

absl::Status FromTensor(const Tensor& tensor, ElementBatch* batch) {
  const ElementBatch* found = tensor.scalar<tensorflow::Variant>()().get<ElementBatch>();
  if (found == nullptr) return absl::InternalError("An element is not a batch of elements.");
  *batch = *found;
  return absl::OkStatus();
}

// The state of a divided dataset that Python reads. All iterators over the dataset share it.
struct Division {
  std::atomic<bool> processes_whole{false};  // whether to process all rows of each batch
  std::atomic<int64_t> rows{0};              // the rows of the batches that iterators returned
  std::atomic<int64_t> processed{0};         // the elements that this process has processed
  // The first component that depends on which rows are processed; -1 if there is none.
  std::atomic<int64_t> differing{-1};
  std::mutex mutex;
  Batch first_batch;  // all rows of the first batch of an iterator, until Python takes them
};

// Returns the division with this number. Creates it if it does not exist.
std::shared_ptr<Division> FindDivision(int64_t number) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const all = new std::map<int64_t, std::weak_ptr<Division>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  for (auto it = all->begin(); it != all->end();) {
    it = it->second.expired() ? all->erase(it) : std::next(it);
  }
  std::weak_ptr<Division>& known = (*all)[number];
  std::shared_ptr<Division> division = known.lock();
  if (!division) known = division = std::make_shared<Division>();
  return division;
}

// The rows and the processed elements of all divisions of this process so far.
Division& AllDivisions() {
  static auto* const all = new std::shared_ptr<Division>(FindDivision(0));
  return **all;
}

struct Place {
  int64_t worker = 0, workers = 1;
  bool operator==(const Place& other) const {
    return worker == other.worker && workers == other.workers;
  }
};

// The rows of a batch that pass through the stages.
struct Part {
  int64_t batch = -1;  // the index of the batch
  int64_t rows = 0;    // the number of rows of the whole batch
  int64_t start = 0, stop = 0;
  bool is_whole = false;
  // Whether this process's rows of the same batch follow.
  bool is_lead = false;
  // This process has no rows of the batch. One row is processed nevertheless, so that the types and
  // shapes of the components are known.
  bool is_filler = false;

  int64_t size() const { return is_filler ? 1 : stop - start; }
};

// The unprocessed batches of one iterator. Batches are kept until they are released.
class BatchesRead {
 public:
  void SetInput(std::unique_ptr<IteratorBase> input) { input_ = std::move(input); }

  // Finds the batch with an index. Batches that have been released cannot be found.
  absl::Status Find(IteratorContext* context, int64_t index, ElementBatch* batch, bool* ended) {
    const tensorflow::mutex_lock lock(mutex_);
    *ended = false;
    if (index < first_) return absl::InternalError("A batch was needed after its release.");
    while (index >= first_ + static_cast<int64_t>(kept_.size())) {
      *ended = ended_;
      if (ended_) return absl::OkStatus();
      std::vector<Tensor> element;
      TF_RETURN_IF_ERROR(input_->GetNext(context, &element, &ended_));
      if (!ended_) TF_RETURN_IF_ERROR(FromTensor(element[0], &kept_.emplace_back()));
    }
    *batch = kept_[index - first_];
    return absl::OkStatus();
  }

  // Releases all batches before an index.
  void Release(int64_t index) {
    const tensorflow::mutex_lock lock(mutex_);
    for (; first_ < index && !kept_.empty(); ++first_) kept_.pop_front();
  }

  absl::Status Save(const std::string& prefix, IteratorStateWriter* writer,
                    const std::function<absl::Status(const std::unique_ptr<IteratorBase>&)>& save) {
    const tensorflow::mutex_lock lock(mutex_);
    TF_RETURN_IF_ERROR(save(input_));
    TF_RETURN_IF_ERROR(writer->WriteScalar(prefix, "first", first_));
    TF_RETURN_IF_ERROR(writer->WriteScalar(prefix, "kept", static_cast<int64_t>(kept_.size())));
    TF_RETURN_IF_ERROR(writer->WriteScalar(prefix, "input_ended", int64_t{ended_}));
    for (size_t i = 0; i < kept_.size(); ++i) {
      TF_RETURN_IF_ERROR(
          writer->WriteTensor(prefix, "kept_" + std::to_string(i), ToTensor(kept_[i])));
    }
    return absl::OkStatus();
  }

  absl::Status Restore(IteratorContext* context, const std::string& prefix,
                       IteratorStateReader* reader,
                       const std::function<absl::Status(std::unique_ptr<IteratorBase>&)>& restore) {
    const tensorflow::mutex_lock lock(mutex_);
    TF_RETURN_IF_ERROR(restore(input_));
    int64_t kept = 0, ended = 0;
    TF_RETURN_IF_ERROR(reader->ReadScalar(prefix, "first", &first_));
    TF_RETURN_IF_ERROR(reader->ReadScalar(prefix, "kept", &kept));
    TF_RETURN_IF_ERROR(reader->ReadScalar(prefix, "input_ended", &ended));
    ended_ = ended != 0;
    kept_.clear();
    for (int64_t i = 0; i < kept; ++i) {
      Tensor tensor;
      TF_RETURN_IF_ERROR(
          reader->ReadTensor(context->flr(), prefix, "kept_" + std::to_string(i), &tensor));
      TF_RETURN_IF_ERROR(FromTensor(tensor, &kept_.emplace_back()));
    }
    return absl::OkStatus();
  }

 private:
  tensorflow::mutex mutex_;
  std::unique_ptr<IteratorBase> input_ TF_GUARDED_BY(mutex_);
  std::deque<ElementBatch> kept_ TF_GUARDED_BY(mutex_);
  int64_t first_ TF_GUARDED_BY(mutex_) = 0;  // the index of the first kept batch
  bool ended_ TF_GUARDED_BY(mutex_) = false;
};

// Whether the first batch passes through the stages as a whole, before this process's rows do.
enum class Lead { kNone, kOnly, kBeforeOwnRows };

// The parts that one iterator over the stages processes. Both ends of the stages learn from it
// which elements belong to which batch.
class Parts {
 public:
  Parts(Place place, int64_t replicas, int64_t first, bool whole, Lead lead)
      : place_(place), replicas_(replicas), whole_(whole), next_(first), lead_(lead) {}

  const Place& place() const { return place_; }
  bool is_whole() const { return whole_; }
  // The index of the batch to which the next part belongs.
  int64_t next_batch() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return next_;
  }

  // Returns the next part, whose batch has `rows` rows, and announces it to `TakeForCollate` and
  // `TakeForDivided`.
  Part Begin(int64_t rows) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Part part{next_, rows, 0, rows, true, lead_ == Lead::kBeforeOwnRows, false};
    if (!whole_ && lead_ == Lead::kNone) {
      part.start = ShareOfRows(rows, place_.worker * replicas_, place_.workers * replicas_).start;
      part.stop =
          ShareOfRows(rows, place_.worker * replicas_ + replicas_ - 1, place_.workers * replicas_)
              .stop;
      part.is_whole = false;
      part.is_filler = part.start == part.stop;
      if (part.is_filler) part.start = part.stop = 0;
    }
    if (!part.is_lead) ++next_;
    lead_ = Lead::kNone;
    to_collate_.push_back(part);
    to_divided_.push_back(part);
    return part;
  }

  bool TakeForCollate(Part* part) { return Take(&to_collate_, part); }
  bool TakeForDivided(Part* part) { return Take(&to_divided_, part); }

 private:
  bool Take(std::deque<Part>* parts, Part* part) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (parts->empty()) return false;
    *part = parts->front();
    parts->pop_front();
    return true;
  }

  const Place place_;
  const int64_t replicas_;
  const bool whole_;
  mutable std::mutex mutex_;
  int64_t next_;
  Lead lead_;
  std::deque<Part> to_collate_, to_divided_;
};

// Connects the iterators of OwnElements and Collate with the DividedDataset that creates them.
struct Connection {
  std::shared_ptr<BatchesRead> batches;
  std::shared_ptr<Parts> parts;
  std::shared_ptr<Division> division;
};

// The connection for iterators that this thread is creating.
thread_local const Connection* current_connection = nullptr;

absl::Status Connect(Connection* connection) {
  if (current_connection == nullptr) {
    return absl::FailedPreconditionError(
        "The stages of a divided dataset can only be read through the divided dataset.");
  }
  *connection = *current_connection;
  return absl::OkStatus();
}

// The base class of the datasets in this file: the types of the elements, and the other methods
// that are the same for all of them.
class Dataset : public DatasetBase {
 public:
  Dataset(OpKernelContext* context, std::vector<const DatasetBase*> inputs, DataTypeVector types,
          std::vector<PartialTensorShape> shapes)
      : DatasetBase(DatasetContext(context)),
        inputs_(std::move(inputs)),
        types_(std::move(types)),
        shapes_(std::move(shapes)) {
    for (const DatasetBase* input : inputs_) input->Ref();
  }
  ~Dataset() override {
    for (const DatasetBase* input : inputs_) input->Unref();
  }

  const DataTypeVector& output_dtypes() const override { return types_; }
  const std::vector<PartialTensorShape>& output_shapes() const override { return shapes_; }
  std::string DebugString() const override { return type_string(); }
  absl::Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    *inputs = inputs_;
    return absl::OkStatus();
  }
  absl::Status CheckExternalState() const override {
    for (const DatasetBase* input : inputs_) TF_RETURN_IF_ERROR(input->CheckExternalState());
    return absl::OkStatus();
  }
  int64_t CardinalityInternal(tensorflow::data::CardinalityOptions options) const override {
    return inputs_.empty() ? tensorflow::data::kUnknownCardinality
                           : inputs_[0]->Cardinality(options);
  }

  const DatasetBase* input(int i) const { return inputs_[i]; }

 protected:
  using Attributes = std::vector<std::pair<std::string, AttrValue>>;

  // Returns the attributes of the op that creates this dataset, except the types and shapes.
  virtual Attributes OpAttributes(DatasetGraphDefBuilder* builder) const = 0;

  absl::Status AsGraphDefInternal(SerializationContext* context, DatasetGraphDefBuilder* builder,
                                  Node** output) const override {
    std::vector<Node*> nodes;
    for (const DatasetBase* input : inputs_) {
      TF_RETURN_IF_ERROR(builder->AddInputDataset(context, input, &nodes.emplace_back()));
    }
    const Attributes owned = OpAttributes(builder);
    std::vector<std::pair<absl::string_view, AttrValue>> attributes(owned.begin(), owned.end());
    return builder->AddDataset(this, nodes, attributes, output);
  }

  template <typename T>
  static std::pair<std::string, AttrValue> Attribute(DatasetGraphDefBuilder* builder,
                                                     const std::string& name, const T& value) {
    AttrValue attribute;
    builder->BuildAttrValue(value, &attribute);
    return {name, attribute};
  }

 private:
  const std::vector<const DatasetBase*> inputs_;
  const DataTypeVector types_;
  const std::vector<PartialTensorShape> shapes_;
};

// The base class of the ops that create these datasets.
class DatasetOp : public tensorflow::data::DatasetOpKernel {
 public:
  explicit DatasetOp(OpKernelConstruction* construction) : DatasetOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("output_types", &types_));
    OP_REQUIRES_OK(construction, construction->GetAttr("output_shapes", &shapes_));
  }

 protected:
  absl::Status Inputs(OpKernelContext* context, std::vector<const DatasetBase*>* inputs) const {
    for (int i = 0; i < context->num_inputs(); ++i) {
      DatasetBase* input = nullptr;
      TF_RETURN_IF_ERROR(tensorflow::data::GetDatasetFromVariantTensor(context->input(i), &input));
      inputs->push_back(input);
    }
    return absl::OkStatus();
  }

  DataTypeVector types_;
  std::vector<PartialTensorShape> shapes_;
};

// Batches of unprocessed elements, which need not have the same shape.

class ElementBatches : public Dataset {
 public:
  ElementBatches(OpKernelContext* context, std::vector<const DatasetBase*> inputs,
                 DataTypeVector types, std::vector<PartialTensorShape> shapes, int64_t size,
                 bool drops_rest)
      : Dataset(context, std::move(inputs), std::move(types), std::move(shapes)),
        size_(size),
        drops_rest_(drops_rest) {}

  std::unique_ptr<IteratorBase> MakeIteratorInternal(const std::string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::TfdistElementBatches"});
  }

  int64_t CardinalityInternal(tensorflow::data::CardinalityOptions options) const override {
    const int64_t elements = input(0)->Cardinality(options);
    return elements < 0 ? elements : (elements + (drops_rest_ ? 0 : size_ - 1)) / size_;
  }

 protected:
  Attributes OpAttributes(DatasetGraphDefBuilder* builder) const override {
    return {Attribute(builder, "batch_size", size_),
            Attribute(builder, "drop_remainder", drops_rest_)};
  }

 private:
  class Iterator : public DatasetIterator<ElementBatches> {
   public:
    explicit Iterator(const Params& params) : DatasetIterator<ElementBatches>(params) {}

    absl::Status Initialize(IteratorContext* context) override {
      return dataset()->input(0)->MakeIterator(context, this, prefix(), &input_);
    }

    absl::Status GetNextInternal(IteratorContext* context, std::vector<Tensor>* element,
                                 bool* ended) override {
      const tensorflow::mutex_lock lock(mutex_);
      *ended = input_ == nullptr;
      if (*ended) return absl::OkStatus();
      Elements elements;
      while (static_cast<int64_t>(elements.size()) < dataset()->size_) {
        bool input_ended = false;
        std::vector<Tensor> next;
        TF_RETURN_IF_ERROR(input_->GetNext(context, &next, &input_ended));
        if (input_ended) {
          input_.reset();
          break;
        }
        elements.push_back(std::move(next));
      }
      const bool is_full = static_cast<int64_t>(elements.size()) == dataset()->size_;
      *ended = elements.empty() || (dataset()->drops_rest_ && !is_full);
      if (!*ended) element->push_back(ToTensor(ElementBatch(std::move(elements))));
      return absl::OkStatus();
    }

   protected:
    std::shared_ptr<tensorflow::data::model::Node> CreateNode(
        IteratorContext*, tensorflow::data::model::Node::Args args) const override {
      return tensorflow::data::model::MakeKnownRatioNode(std::move(args),
                                                         static_cast<double>(dataset()->size_));
    }

    absl::Status SaveInternal(SerializationContext* context, IteratorStateWriter* writer) override {
      const tensorflow::mutex_lock lock(mutex_);
      TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), "ended", int64_t{input_ == nullptr}));
      return input_ == nullptr ? absl::OkStatus() : SaveInput(context, writer, input_);
    }

    absl::Status RestoreInternal(IteratorContext* context, IteratorStateReader* reader) override {
      const tensorflow::mutex_lock lock(mutex_);
      int64_t ended = 0;
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "ended", &ended));
      if (ended == 0) return RestoreInput(context, reader, input_);
      input_.reset();
      return absl::OkStatus();
    }

   private:
    tensorflow::mutex mutex_;
    std::unique_ptr<IteratorBase> input_ TF_GUARDED_BY(mutex_);
  };

  const int64_t size_;
  const bool drops_rest_;
};

class ElementBatchesOp : public DatasetOp {
 public:
  explicit ElementBatchesOp(OpKernelConstruction* construction) : DatasetOp(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("batch_size", &size_));
    OP_REQUIRES_OK(construction, construction->GetAttr("drop_remainder", &drops_rest_));
  }

 protected:
  void MakeDataset(OpKernelContext* context, DatasetBase** output) override {
    std::vector<const DatasetBase*> inputs;
    OP_REQUIRES_OK(context, Inputs(context, &inputs));
    *output = new ElementBatches(context, std::move(inputs), types_, shapes_, size_, drops_rest_);
  }

 private:
  int64_t size_ = 1;
  bool drops_rest_ = false;
};

REGISTER_KERNEL_BUILDER(Name("TfdistElementBatches").Device(tensorflow::DEVICE_CPU),
                        ElementBatchesOp);

// The unprocessed elements of this process's rows.

class OwnElements : public Dataset {
 public:
  using Dataset::Dataset;

  std::unique_ptr<IteratorBase> MakeIteratorInternal(const std::string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::TfdistOwnElements"});
  }

 protected:
  Attributes OpAttributes(DatasetGraphDefBuilder*) const override { return {}; }

 private:
  class Iterator : public DatasetIterator<OwnElements> {
   public:
    explicit Iterator(const Params& params) : DatasetIterator<OwnElements>(params) {}

    absl::Status Initialize(IteratorContext*) override { return Connect(&connection_); }

    absl::Status GetNextInternal(IteratorContext* context, std::vector<Tensor>* element,
                                 bool* ended) override {
      const tensorflow::mutex_lock lock(mutex_);
      *ended = false;
      if (given_ == part_.size() || part_.batch < 0) {
        ElementBatch batch;
        TF_RETURN_IF_ERROR(
            connection_.batches->Find(context, connection_.parts->next_batch(), &batch, ended));
        if (*ended) return absl::OkStatus();
        batch_ = std::move(batch);
        part_ = connection_.parts->Begin(static_cast<int64_t>(batch_.elements().size()));
        given_ = 0;
      }
      *element = batch_.elements()[part_.start + given_++];
      ++connection_.division->processed;
      ++AllDivisions().processed;
      return absl::OkStatus();
    }

   protected:
    std::shared_ptr<tensorflow::data::model::Node> CreateNode(
        IteratorContext*, tensorflow::data::model::Node::Args args) const override {
      return tensorflow::data::model::MakeSourceNode(std::move(args));
    }

    // The divided dataset saves the unprocessed batches instead, and processes them again.
    absl::Status SaveInternal(SerializationContext*, IteratorStateWriter*) override {
      return absl::OkStatus();
    }
    absl::Status RestoreInternal(IteratorContext*, IteratorStateReader*) override {
      return absl::OkStatus();
    }

   private:
    Connection connection_;
    tensorflow::mutex mutex_;
    ElementBatch batch_ TF_GUARDED_BY(mutex_);
    Part part_ TF_GUARDED_BY(mutex_);
    int64_t given_ TF_GUARDED_BY(mutex_) = 0;  // the elements of the part returned so far
  };
};

class OwnElementsOp : public DatasetOp {
 public:
  using DatasetOp::DatasetOp;

 protected:
  void MakeDataset(OpKernelContext* context, DatasetBase** output) override {
    *output = new OwnElements(context, {}, types_, shapes_);
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistOwnElements").Device(tensorflow::DEVICE_CPU), OwnElementsOp);

// The processed rows of one part, stacked. Before the components, a batch has two numbers, which
// the maps of batches use: the number of rows of the whole batch, and the index of the part's first
// row.
constexpr int kNumbers = 2;

class Collate : public Dataset {
 public:
  using Dataset::Dataset;

  std::unique_ptr<IteratorBase> MakeIteratorInternal(const std::string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::TfdistCollate"});
  }

  int64_t CardinalityInternal(tensorflow::data::CardinalityOptions) const override {
    return tensorflow::data::kUnknownCardinality;
  }

 protected:
  Attributes OpAttributes(DatasetGraphDefBuilder*) const override { return {}; }

 private:
  class Iterator : public DatasetIterator<Collate> {
   public:
    explicit Iterator(const Params& params) : DatasetIterator<Collate>(params) {}

    absl::Status Initialize(IteratorContext* context) override {
      TF_RETURN_IF_ERROR(Connect(&connection_));
      return dataset()->input(0)->MakeIterator(context, this, prefix(), &input_);
    }

    absl::Status GetNextInternal(IteratorContext* context, std::vector<Tensor>* batch,
                                 bool* ended) override {
      const tensorflow::mutex_lock lock(mutex_);
      // After the first element has been read, its part has been announced.
      Elements elements(1);
      TF_RETURN_IF_ERROR(input_->GetNext(context, &elements[0], ended));
      if (*ended) return absl::OkStatus();
      Part part;
      if (!connection_.parts->TakeForCollate(&part)) {
        return absl::InternalError("A map has yielded more elements than it has read.");
      }
      while (static_cast<int64_t>(elements.size()) < part.size()) {
        TF_RETURN_IF_ERROR(input_->GetNext(context, &elements.emplace_back(), ended));
        if (*ended)
          return absl::InternalError("A map has yielded fewer elements than it has read.");
      }
      for (const int64_t number : {part.rows, part.start}) {
        Tensor& scalar = batch->emplace_back(tensorflow::DT_INT32, TensorShape({}));
        scalar.scalar<int32_t>()() = static_cast<int32_t>(number);
      }
      return Stack(elements, batch);
    }

   protected:
    std::shared_ptr<tensorflow::data::model::Node> CreateNode(
        IteratorContext*, tensorflow::data::model::Node::Args args) const override {
      return tensorflow::data::model::MakeUnknownRatioNode(std::move(args));
    }

    absl::Status SaveInternal(SerializationContext*, IteratorStateWriter*) override {
      return absl::OkStatus();
    }
    absl::Status RestoreInternal(IteratorContext*, IteratorStateReader*) override {
      return absl::OkStatus();
    }

   private:
    static absl::Status Stack(const Elements& elements, Batch* batch) {
      for (size_t i = 0; i < elements[0].size(); ++i) {
        const Tensor& first = elements[0][i];
        TensorShape shape({static_cast<int64_t>(elements.size())});
        shape.AppendShape(first.shape());
        Tensor& stacked = batch->emplace_back(first.dtype(), shape);
        for (size_t row = 0; row < elements.size(); ++row) {
          const Tensor& own = elements[row][i];
          if (own.shape() != first.shape()) {
            return absl::InvalidArgumentError(
                "Cannot batch tensors with different shapes in component " + std::to_string(i) +
                ". First element had shape " + first.shape().DebugString() + " and element " +
                std::to_string(row) + " had shape " + own.shape().DebugString() + ".");
          }
          TF_RETURN_IF_ERROR(
              tensorflow::batch_util::CopyElementToSlice(own, &stacked, static_cast<int64_t>(row)));
        }
      }
      return absl::OkStatus();
    }

    Connection connection_;
    tensorflow::mutex mutex_;
    std::unique_ptr<IteratorBase> input_ TF_GUARDED_BY(mutex_);
  };
};

class CollateOp : public DatasetOp {
 public:
  using DatasetOp::DatasetOp;

 protected:
  void MakeDataset(OpKernelContext* context, DatasetBase** output) override {
    std::vector<const DatasetBase*> inputs;
    OP_REQUIRES_OK(context, Inputs(context, &inputs));
    *output = new Collate(context, std::move(inputs), types_, shapes_);
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistCollate").Device(tensorflow::DEVICE_CPU), CollateOp);

// The rows of each replica of this process.

struct Settings {
  int64_t division = 0;
  std::string communicator;
  int64_t worker = 0, workers = 1, replicas = 1;
  int64_t replay = 0;
  // Whether the first batch is returned twice, as Python compares it among the workers.
  bool repeats_first = false;
  // Whether each element ends with the number of rows of its batch, as `told_rows` in
  // data/shares.py encodes it.
  bool tells_rows = false;
  // Whether this process's rows of the first batch are compared with the same rows of the whole
  // batch.
  bool checks = false;
  // Whether the compared rows must have the same bits. If not, floating-point values may differ by
  // rounding errors.
  bool is_exact = true;
};

bool HasSameBits(const Tensor& one, const Tensor& other) {
  if (one.dtype() != other.dtype() || one.shape() != other.shape()) return false;
  if (one.dtype() == tensorflow::DT_STRING) {
    const auto ones = one.unaligned_flat<tensorflow::tstring>();
    const auto others = other.unaligned_flat<tensorflow::tstring>();
    for (int64_t i = 0; i < one.NumElements(); ++i) {
      if (ones(i) != others(i)) return false;
    }
    return true;
  }
  const absl::string_view bytes = one.tensor_data(), others = other.tensor_data();
  return bytes == others;
}

template <typename T>
bool IsClose(const Tensor& one, const Tensor& other) {
  const auto ones = one.unaligned_flat<T>(), others = other.unaligned_flat<T>();
  for (int64_t i = 0; i < one.NumElements(); ++i) {
    const double a = static_cast<double>(ones(i)), b = static_cast<double>(others(i));
    const bool is_same = a == b || (std::isnan(a) && std::isnan(b));
    if (!is_same && !(std::abs(a - b) <= 1e-5 + 1e-5 * std::abs(a))) return false;
  }
  return true;
}

// Whether two tensors are equal, apart from rounding errors.
bool IsClose(const Tensor& one, const Tensor& other) {
  if (one.dtype() != other.dtype() || one.shape() != other.shape()) return false;
  if (one.dtype() == tensorflow::DT_FLOAT) return IsClose<float>(one, other);
  if (one.dtype() == tensorflow::DT_DOUBLE) return IsClose<double>(one, other);
  return HasSameBits(one, other);
}

class DividedDataset : public Dataset {
 public:
  DividedDataset(OpKernelContext* context, std::vector<const DatasetBase*> inputs,
                 DataTypeVector types, std::vector<PartialTensorShape> shapes, Settings settings,
                 std::shared_ptr<Replay> replay)
      : Dataset(context, std::move(inputs), std::move(types), std::move(shapes)),
        settings_(std::move(settings)),
        replay_(std::move(replay)),
        division_(FindDivision(settings_.division)) {}

  std::unique_ptr<IteratorBase> MakeIteratorInternal(const std::string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::TfdistDivided"});
  }

  int64_t CardinalityInternal(tensorflow::data::CardinalityOptions options) const override {
    const int64_t batches = input(0)->Cardinality(options);
    return batches < 0 ? batches : batches * settings_.replicas;
  }

 protected:
  Attributes OpAttributes(DatasetGraphDefBuilder* builder) const override {
    return {Attribute(builder, "division", settings_.division),
            Attribute(builder, "communicator", settings_.communicator),
            Attribute(builder, "worker", settings_.worker),
            Attribute(builder, "workers", settings_.workers),
            Attribute(builder, "replicas", settings_.replicas),
            Attribute(builder, "replay", settings_.replay),
            Attribute(builder, "repeats_first", settings_.repeats_first),
            Attribute(builder, "tells_rows", settings_.tells_rows),
            Attribute(builder, "checks", settings_.checks),
            Attribute(builder, "is_exact", settings_.is_exact)};
  }

 private:
  class Iterator : public DatasetIterator<DividedDataset> {
   public:
    explicit Iterator(const Params& params)
        : DatasetIterator<DividedDataset>(params), batches_(std::make_shared<BatchesRead>()) {}

    ~Iterator() override {
      // The threads of the stages read `batches_`.
      stages_.reset();
    }

    absl::Status Initialize(IteratorContext* context) override {
      std::unique_ptr<IteratorBase> input;
      TF_RETURN_IF_ERROR(dataset()->input(0)->MakeIterator(context, this, prefix(), &input));
      batches_->SetInput(std::move(input));
      return absl::OkStatus();
    }

    absl::Status GetNextInternal(IteratorContext* context, std::vector<Tensor>* element,
                                 bool* ended) override {
      const tensorflow::mutex_lock lock(mutex_);
      *ended = false;
      // If a step fails, perhaps only the first replicas have read their shares of the batch. When
      // the batch is repeated, it therefore begins again with the first replica.
      const auto& replay = dataset()->replay_;
      if (replay && replay->is_requested()) next_replica_ = 0;
      if (next_replica_ == 0) {
        const absl::Status status = Next(context, ended);
        if (!status.ok()) {
          stages_.reset();
          batch_.clear();
          lead_.clear();
        }
        if (!status.ok() || *ended) return status;
      } else if (batch_.empty()) {  // after the state was restored between two replicas
        TF_RETURN_IF_ERROR(FindPlace());
        TF_RETURN_IF_ERROR(Fetch(context, last_, WantsWhole(), false, ended));
        if (*ended) return absl::OkStatus();
      }
      TF_RETURN_IF_ERROR(Share(element));
      next_replica_ = (next_replica_ + 1) % dataset()->settings_.replicas;
      if (next_replica_ == 0 && !replay && next_ > part_.batch) {
        batch_.clear();
        batches_->Release(next_);
      }
      return absl::OkStatus();
    }

   protected:
    std::shared_ptr<tensorflow::data::model::Node> CreateNode(
        IteratorContext*, tensorflow::data::model::Node::Args args) const override {
      return tensorflow::data::model::MakeKnownRatioNode(
          std::move(args), 1.0 / static_cast<double>(dataset()->settings_.replicas));
    }

    absl::Status SaveInternal(SerializationContext* context, IteratorStateWriter* writer) override {
      const tensorflow::mutex_lock lock(mutex_);
      const auto save = [&](const auto& input) { return SaveInput(context, writer, input); };
      TF_RETURN_IF_ERROR(batches_->Save(prefix(), writer, save));
      for (const auto& [name, value] : State()) {
        TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), name, *value));
      }
      return absl::OkStatus();
    }

    absl::Status RestoreInternal(IteratorContext* context, IteratorStateReader* reader) override {
      const tensorflow::mutex_lock lock(mutex_);
      stages_.reset();
      batch_.clear();
      lead_.clear();
      part_ = Part();
      const auto restore = [&](auto& input) { return RestoreInput(context, reader, input); };
      TF_RETURN_IF_ERROR(batches_->Restore(context, prefix(), reader, restore));
      for (const auto& [name, value] : State()) {
        TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), name, value));
      }
      if (dataset()->replay_) Publish();
      return FindPlace();
    }

   private:
    std::vector<std::pair<std::string, int64_t*>> State() TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return {{"next", &next_},   {"last", &last_},           {"replica", &next_replica_},
              {"begun", &begun_}, {"rows_read", &rows_read_}, {"rows_of_last", &rows_of_last_}};
    }

    bool WantsWhole() const TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const auto& replay = dataset()->replay_;
      return dataset()->division_->processes_whole || (replay && replay->gives_whole());
    }

    // Sets `batch_` and `part_` to the next batch, or to the last one if it is requested again.
    absl::Status Next(IteratorContext* context, bool* ended) TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const auto& replay = dataset()->replay_;
      TF_RETURN_IF_ERROR(FindPlace());
      const bool again = replay && replay->Take() && last_ >= 0;
      const bool is_copy = begun_ == 0 && dataset()->settings_.repeats_first;
      TF_RETURN_IF_ERROR(Fetch(context, again ? last_ : next_, WantsWhole(), is_copy, ended));
      if (*ended) return absl::OkStatus();
      begun_ = 1;
      if (replay) replay->SetBatch(part_.rows);
      if (is_copy) {
        if (part_.is_whole) SetFirstBatch(batch_);
      } else if (!again) {
        last_ = next_++;
        rows_read_ += part_.rows;
        rows_of_last_ = part_.rows;
        dataset()->division_->rows += part_.rows;
        AllDivisions().rows += part_.rows;
        if (replay) batches_->Release(last_);
      }
      if (!replay) return absl::OkStatus();
      if (!again) replay->Count();
      Publish();
      return absl::OkStatus();
    }

    // Sets `batch_` and `part_` to the rows of a batch: to all of them if `whole`.
    absl::Status Fetch(IteratorContext* context, int64_t index, bool whole, bool is_copy,
                       bool* ended) TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      while (!IsUsable(index, whole)) {
        const bool goes_on = stages_ && parts_->place() == place_ && parts_->is_whole() == whole &&
                             expected_ == index;
        if (!goes_on) TF_RETURN_IF_ERROR(Start(context, index, whole, is_copy));
        batch_.clear();
        TF_RETURN_IF_ERROR(stages_->GetNext(context, &batch_, ended));
        if (*ended) return absl::OkStatus();
        batch_.erase(batch_.begin(), batch_.begin() + kNumbers);
        if (!parts_->TakeForDivided(&part_)) {
          return absl::InternalError("A map has yielded more batches than it has read.");
        }
        expected_ = part_.is_lead ? index : index + 1;
        if (part_.is_lead) {
          lead_ = batch_;
          lead_part_ = part_;
        } else if (!lead_.empty()) {
          TF_RETURN_IF_ERROR(Compare());
        }
      }
      return absl::OkStatus();
    }

    // Whether `batch_` has the rows that are needed.
    bool IsUsable(int64_t index, bool whole) const TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (batch_.empty() || part_.batch != index) return false;
      if (part_.is_whole) return whole || lead_.empty();
      return !whole && parts_->place() == place_;
    }

    // Creates a new iterator over the stages, which begins with the batch `index`.
    absl::Status Start(IteratorContext* context, int64_t index, bool whole, bool is_copy)
        TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const bool is_first = begun_ == 0 && !whole;
      Lead lead = is_first && is_copy ? Lead::kOnly : Lead::kNone;
      if (is_first && dataset()->settings_.checks) lead = Lead::kBeforeOwnRows;
      lead_.clear();
      stages_.reset();
      parts_ = std::make_shared<Parts>(place_, dataset()->settings_.replicas, index, whole, lead);
      expected_ = index;
      const Connection connection{batches_, parts_, dataset()->division_};
      current_connection = &connection;
      const absl::Status status = dataset()->input(1)->MakeIterator(
          context, this, prefix() + "[" + std::to_string(starts_++) + "]", &stages_);
      current_connection = nullptr;
      return status;
    }

    // Compares this process's rows with the same rows of the whole batch. If they differ, the maps
    // depend on which rows they process. All rows must then be processed from now on, on all
    // workers. If the workers do not compare the first batch, they do not learn of the difference,
    // so an error is returned.
    absl::Status Compare() TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      int64_t differing = -1;
      for (size_t i = 0; i < batch_.size() && differing < 0; ++i) {
        const int64_t stop = part_.is_filler ? 1 : part_.stop;
        const bool has_rows = lead_[i].dims() > 0 && lead_[i].dim_size(0) >= stop;
        const bool is_exact = dataset()->settings_.is_exact;
        const Tensor rows = has_rows ? lead_[i].Slice(part_.start, stop) : Tensor();
        if (!(is_exact ? HasSameBits(batch_[i], rows) : IsClose(batch_[i], rows))) {
          differing = static_cast<int64_t>(i);
        }
      }
      const bool repeats_first = dataset()->settings_.repeats_first;
      if (repeats_first) SetFirstBatch(lead_);
      if (differing >= 0) {
        dataset()->division_->differing = differing;
        if (!repeats_first) {
          return absl::InvalidArgumentError(
              "Component " + std::to_string(differing) +
              " of a batch depends on which rows a worker preprocesses, so the preprocessing of "
              "this dataset cannot be divided among the workers. Pass input_division=\"never\" to "
              "the strategy, or set TFDIST_INPUT_DIVISION=never.");
        }
        dataset()->division_->processes_whole = true;
        batch_ = std::move(lead_);
        part_ = lead_part_;
        stages_.reset();
      }
      lead_.clear();
      return absl::OkStatus();
    }

    // Lets Python compare all rows of the first batch among the workers.
    void SetFirstBatch(const Batch& batch) {
      const std::lock_guard<std::mutex> lock(dataset()->division_->mutex);
      dataset()->division_->first_batch = batch;
    }

    absl::Status Share(std::vector<Tensor>* element) TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const Settings& settings = dataset()->settings_;
      const auto& replay = dataset()->replay_;
      const Place place = replay && replay->gives_whole() ? Place{0, 1} : place_;
      const int64_t replica = place.worker * settings.replicas + next_replica_;
      RowRange share = ShareOfRows(part_.rows, replica, place.workers * settings.replicas);
      share = {share.start - part_.start, share.stop - part_.start};
      if (part_.is_filler) share = {0, 0};
      for (const Tensor& component : batch_) {
        TF_RETURN_IF_ERROR(CheckRows(component));
        if (component.dim_size(0) != part_.size()) {
          return absl::InternalError("A map of batches has changed the number of rows.");
        }
        element->push_back(TakeAlignedRows(component, share.start, share.stop));
      }
      if (settings.tells_rows) {
        Tensor& told = element->emplace_back(tensorflow::DT_INT32, TensorShape({4}));
        const int32_t low = static_cast<int32_t>(part_.rows % (1 << 15));
        const int32_t high = static_cast<int32_t>(part_.rows / (1 << 15));
        const int32_t values[] = {low, low * low, high, high * high};
        std::copy(std::begin(values), std::end(values), told.flat<int32_t>().data());
      }
      return absl::OkStatus();
    }

    absl::Status FindPlace() TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const Settings& settings = dataset()->settings_;
      place_ = {settings.worker, settings.workers};
      if (settings.communicator.empty()) return absl::OkStatus();
      try {
        const auto group = FindNamed(settings.communicator);
        place_ = {group->rank(), group->size()};
        return absl::OkStatus();
      } catch (const Error& error) { return ToStatus(error); }
    }

    void Publish() TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const RowCounts now{next_, rows_read_, 0, 0};
      const RowCounts before{next_, rows_read_, rows_of_last_, 1};
      dataset()->replay_->Publish(now, last_ < 0 ? now : before);
    }

    tensorflow::mutex mutex_;
    const std::shared_ptr<BatchesRead> batches_;
    std::shared_ptr<Parts> parts_ TF_GUARDED_BY(mutex_);
    std::unique_ptr<IteratorBase> stages_ TF_GUARDED_BY(mutex_);
    int64_t starts_ TF_GUARDED_BY(mutex_) = 0;    // the number of iterators over the stages
    int64_t expected_ TF_GUARDED_BY(mutex_) = 0;  // the batch that `stages_` yields next
    Batch batch_ TF_GUARDED_BY(mutex_);
    Part part_ TF_GUARDED_BY(mutex_);  // the rows in `batch_`
    // All rows of the first batch, while this process's rows of it have not been compared.
    Batch lead_ TF_GUARDED_BY(mutex_);
    Part lead_part_ TF_GUARDED_BY(mutex_);
    int64_t next_ TF_GUARDED_BY(mutex_) = 0;   // the index of the next batch
    int64_t last_ TF_GUARDED_BY(mutex_) = -1;  // the index of the last batch
    // The index, within this process, of the replica that gets the next element.
    int64_t next_replica_ TF_GUARDED_BY(mutex_) = 0;
    int64_t begun_ TF_GUARDED_BY(mutex_) = 0;  // 1 after the first batch has been read
    int64_t rows_read_ TF_GUARDED_BY(mutex_) = 0, rows_of_last_ TF_GUARDED_BY(mutex_) = 0;
    Place place_ TF_GUARDED_BY(mutex_);
  };

  const Settings settings_;
  const std::shared_ptr<Replay> replay_;
  const std::shared_ptr<Division> division_;
};

class DividedDatasetOp : public DatasetOp {
 public:
  explicit DividedDatasetOp(OpKernelConstruction* construction) : DatasetOp(construction) {
    Settings& own = settings_;
    OP_REQUIRES_OK(construction, construction->GetAttr("division", &own.division));
    OP_REQUIRES_OK(construction, construction->GetAttr("communicator", &own.communicator));
    OP_REQUIRES_OK(construction, construction->GetAttr("worker", &own.worker));
    OP_REQUIRES_OK(construction, construction->GetAttr("workers", &own.workers));
    OP_REQUIRES_OK(construction, construction->GetAttr("replicas", &own.replicas));
    OP_REQUIRES_OK(construction, construction->GetAttr("replay", &own.replay));
    OP_REQUIRES_OK(construction, construction->GetAttr("repeats_first", &own.repeats_first));
    OP_REQUIRES_OK(construction, construction->GetAttr("tells_rows", &own.tells_rows));
    OP_REQUIRES_OK(construction, construction->GetAttr("checks", &own.checks));
    OP_REQUIRES_OK(construction, construction->GetAttr("is_exact", &own.is_exact));
  }

 protected:
  void MakeDataset(OpKernelContext* context, DatasetBase** output) override {
    std::vector<const DatasetBase*> inputs;
    OP_REQUIRES_OK(context, Inputs(context, &inputs));
    std::shared_ptr<Replay> replay;
    try {
      if (settings_.replay != 0) replay = FindReplay(settings_.replay);
    } catch (const Error& error) { OP_REQUIRES_OK(context, ToStatus(error)); }
    *output = new DividedDataset(context, std::move(inputs), types_, shapes_, settings_,
                                 std::move(replay));
  }

 private:
  Settings settings_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistDividedDataset").Device(tensorflow::DEVICE_CPU),
                        DividedDatasetOp);

// What Python reads of a division, or of all divisions under the number 0.

class DivisionOp : public tensorflow::OpKernel {
 public:
  explicit DivisionOp(OpKernelConstruction* construction) : OpKernel(construction) {
    int64_t number = 0;
    OP_REQUIRES_OK(construction, construction->GetAttr("division", &number));
    division_ = FindDivision(number);
  }

 protected:
  std::shared_ptr<Division> division_;
};

class DivisionReportOp : public DivisionOp {
 public:
  using DivisionOp::DivisionOp;

  void Compute(OpKernelContext* context) override {
    Tensor* report = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({4}), &report));
    const int64_t values[] = {division_->rows, division_->processed, division_->differing,
                              division_->processes_whole ? 1 : 0};
    std::copy(std::begin(values), std::end(values), report->flat<int64_t>().data());
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistDivisionReport").Device(tensorflow::DEVICE_CPU),
                        DivisionReportOp);

class ProcessWholeOp : public DivisionOp {
 public:
  using DivisionOp::DivisionOp;

  void Compute(OpKernelContext*) override { division_->processes_whole = true; }
};

REGISTER_KERNEL_BUILDER(Name("TfdistProcessWhole").Device(tensorflow::DEVICE_CPU), ProcessWholeOp);

class TakeFirstBatchOp : public DivisionOp {
 public:
  using DivisionOp::DivisionOp;

  void Compute(OpKernelContext* context) override {
    Batch batch;
    {
      const std::lock_guard<std::mutex> lock(division_->mutex);
      batch.swap(division_->first_batch);
    }
    OP_REQUIRES(context, static_cast<int>(batch.size()) == context->num_outputs(),
                absl::FailedPreconditionError("No first batch has been read."));
    for (size_t i = 0; i < batch.size(); ++i) context->set_output(static_cast<int>(i), batch[i]);
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistTakeFirstBatch").Device(tensorflow::DEVICE_CPU),
                        TakeFirstBatchOp);

}  // namespace
}  // namespace tfdist::tf::divided
