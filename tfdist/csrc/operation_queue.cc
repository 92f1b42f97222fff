#include "operation_queue.h"

#include <pthread.h>

#include <exception>
#include <future>
#include <optional>
#include <utility>

#include "control/flight_log.h"

namespace tfdist {
namespace {

// The queue to which this thread belongs, if it is a queue's own thread; otherwise null.
thread_local const OperationQueue* employer = nullptr;

}  // namespace

OperationQueue::OperationQueue(std::string name, std::function<void(Operation&)> execute)
    : name_(std::move(name)), execute_(std::move(execute)) {}

void OperationQueue::Start() {
  thread_ = std::thread([this] { Work(); });
}

void OperationQueue::Run(Operation operation) {
  RefuseOwnThread();
  operation.enqueued = Nanoseconds();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closing_) throw Closed();
    if (busy_ || !tasks_.empty()) {
      std::promise<void> finished;
      tasks_.push_back({std::move(operation), [&finished](const Error* error) {
                          if (error) {
                            finished.set_exception(std::make_exception_ptr(*error));
                          } else {
                            finished.set_value();
                          }
                        }});
      lock.unlock();
      changed_.notify_all();
      return finished.get_future().get();
    }
    busy_ = true;
  }
  try {
    execute_(operation);
  } catch (...) {
    Release();
    throw;
  }
  Release();
}

void OperationQueue::Enqueue(Operation operation, Done done) {
  operation.enqueued = Nanoseconds();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!closing_) {
      tasks_.push_back({std::move(operation), std::move(done)});
      done = nullptr;
    }
  }
  if (done) {
    const Error error = Closed();
    return done(&error);
  }
  changed_.notify_all();
}

void OperationQueue::Work() {
  pthread_setname_np(pthread_self(), "tfdist-collect");
  employer = this;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !busy_ && (!tasks_.empty() || closing_); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    std::optional<Error> failure;
    try {
      execute_(task.operation);
    } catch (const Error& error) {
      failure = error;
    } catch (const std::exception& error) {  // for example std::bad_alloc
      failure = Error(Code::kInternal, "An operation of the communicator '" + name_ +
                                           "' has failed: " + error.what() + ".");
    }
    task.done(failure ? &*failure : nullptr);
    task = {};
    lock.lock();
    busy_ = false;
  }
}

void OperationQueue::Release() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
    if (tasks_.empty() && !closing_) return;
  }
  changed_.notify_all();
}

bool OperationQueue::Close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return false;
    RefuseOwnThread();
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !busy_; });
  return true;
}

std::vector<std::string> OperationQueue::Waiting() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> waiting;
  for (const Task& task : tasks_) waiting.push_back(Describe(task.operation.fingerprint));
  return waiting;
}

void OperationQueue::RefuseOwnThread() const {
  if (employer != this) return;
  throw Error(Code::kInvalidArgument, "A callback of the communicator '" + name_ +
                                          "' must not wait for it. Enqueue the operation instead.");
}

Error OperationQueue::Closed() const {
  return Error(Code::kClosed, "The communicator '" + name_ + "' has been closed.");
}

}  // namespace tfdist
