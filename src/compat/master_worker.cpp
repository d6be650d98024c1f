// SPDX-License-Identifier: Apache-2.0
// The protocol between a master and its workers.
//
//  1. The master sends a request: an array of the operation, the number of the tensor (chosen by the master), and the
//     arguments.
//  2. The worker executes it. It keeps the first error since its last answer.
//  3. It answers the requests fetch, wait and stop with the error, or with the fetched tensor.
// For a copy between two workers both receive a request. All workers receive their requests in the same order, so two
// copies in opposite directions cannot deadlock: one of them was requested first, and both workers execute it first.

#include "muster/compat/master_worker.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "src/base/fork_mutex.hpp"
#include "src/base/message.hpp"
#include "src/group/error_propagation.hpp"
#include "src/merge/reduce.hpp"
#include "src/os/shared_memory.hpp"

namespace muster {
namespace {

enum class WorkerRequest : std::uint8_t {
  make,     // dtype, shape
  fill,     // a tensor with one element
  set,      // a tensor
  copy,     // the number of another tensor
  add,      // the number of another tensor
  send,     // the destination rank
  receive,  // the source rank
  drop,
  fetch,
  wait,
  stop,
};

constexpr int master_rank = 0;
constexpr int request_tag = 0;
constexpr int answer_tag = 1;
constexpr int tensor_tag = 2;  // between workers

/// Returns an answer with the kind and the message of an error.
Config failure_answer(const Error& error) {
  return Config::array({static_cast<int>(error.kind()), error.what()});
}

/// Throws the error in the answer of a worker, or returns its content.
Config checked_answer(const Config& answer, const RankInfo& worker) {
  if (answer.size() == 1) return answer.at(0);
  const Error error(static_cast<ErrorKind>(answer.at(0).as_int()), answer.at(1).as_string());
  throw group::in_name_of(worker, error);
}

class WorkerLoop {
 public:
  WorkerLoop(ProcessGroup& group, const CollectiveOptions& options) : group_(group), options_(options) {}

  /// Handles requests until the master sends stop.
  void serve() {
    for (;;) {
      const Config message = group_.recv_config(master_rank, request_tag, options_);
      if (!message.is_array() || message.size() < 2)
        throw Error(ErrorKind::corrupt, "malformed message: the master sent a message that is not a request");
      const auto request = static_cast<WorkerRequest>(message.at(0).as_int());
      const std::int64_t number = message.at(1).as_int();
      // Errors that fail the group are thrown.
      const auto error = group::attempt(group_.group(), [&] { carry_out(request, number, message); });
      if (error && !failed_) failed_ = error;
      if (request == WorkerRequest::stop) tensors_.clear();
      if (request == WorkerRequest::fetch || request == WorkerRequest::wait || request == WorkerRequest::stop)
        answer(request, number);
      if (request == WorkerRequest::stop) return;
    }
  }

 private:
  void carry_out(WorkerRequest request, std::int64_t number, const Config& message) {
    switch (request) {
      case WorkerRequest::make: {
        Shape shape;
        for (const Config& extent : message.at(3).as_array()) shape.push_back(extent.as_int());
        return make(number, static_cast<DType>(message.at(2).as_int()), shape);
      }
      case WorkerRequest::fill: {
        const Tensor& tensor = at(number);
        if (tensor.nbytes() == 0) return;
        std::byte* const data = tensor.mutable_data();
        const TensorView element = message.at(2).as_tensor().view();
        check_fits({tensor.dtype(), {1}}, {element.dtype(), {element.element_count()}});
        copy_contiguous(element, data);
        // Each copy doubles the filled part.
        for (std::size_t done = element.nbytes(); done < tensor.nbytes(); done *= 2)
          std::memcpy(data + done, data, std::min(done, tensor.nbytes() - done));
        return;
      }
      case WorkerRequest::set:
        return copy(message.at(2).as_tensor(), at(number));
      case WorkerRequest::copy:
        return copy(at(message.at(2).as_int()), at(number));
      case WorkerRequest::add: {
        const Tensor& to = at(number);
        const Tensor& from = at(message.at(2).as_int());
        check_fits({to.dtype(), to.shape()}, {from.dtype(), from.shape()});
        const std::array<const std::byte*, 2> both{to.data(), from.data()};
        merge::check_reducible(merge::Combine::sum, to.dtype());
        if (to.nbytes() != 0)
          merge::reduce(merge::Combine::sum, to.dtype(), std::span(to.mutable_data(), to.nbytes()), both);
        return;
      }
      case WorkerRequest::send:
        return send(number, message.at(2).as<int>());
      case WorkerRequest::receive:
        return receive(number, message.at(2).as<int>());
      case WorkerRequest::drop:
        tensors_.erase(number);
        return;
      case WorkerRequest::fetch:
        (void)at(number);
        return;
      case WorkerRequest::wait:
      case WorkerRequest::stop:
        return;
    }
    throw Error(ErrorKind::corrupt, "malformed message: the master sent an unknown request");
  }

  /// The master has compared the requested tensors; this compares the existing ones.
  static void check_fits(const TensorSpec& to, const TensorSpec& from) {
    if (to != from)
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("tensor {} does not fit into tensor {}", to_string(from), to_string(to)));
  }
  static void copy(const Tensor& from, const Tensor& to) {
    check_fits({to.dtype(), to.shape()}, {from.dtype(), from.shape()});
    if (to.nbytes() != 0) copy_contiguous(from.view(), to.mutable_data());
  }

  void answer(WorkerRequest request, std::int64_t number) {
    Config answer = Config::array({Config()});
    if (failed_)
      answer = failure_answer(*failed_);
    else if (request == WorkerRequest::fetch)
      answer = Config::array({Config(at(number))});
    failed_.reset();
    group_.send_config(answer, master_rank, answer_tag, options_);
  }

  void make(std::int64_t number, DType dtype, const Shape& shape) {
    // The system may grant more memory than the machine has, and end the process when it writes there.
    constexpr std::size_t large = 64 << 20;
    const std::size_t bytes = byte_size(dtype, shape);
    if (bytes >= large)
      if (const std::uint64_t available = os::memory_headroom(os::Backing::anonymous).bytes; bytes > available)
        throw Error(ErrorKind::out_of_space,
                    fmt::format("tensor {}: needed {}, available {}", to_string(TensorSpec{dtype, shape}),
                                byte_text(bytes), byte_text(available)));
    const Tensor tensor = Tensor::allocate(dtype, shape);
    if (bytes != 0) std::memset(tensor.mutable_data(), 0, bytes);
    tensors_[number] = tensor;
  }

  // The receiver waits for a message, even if the tensor does not exist.

  void send(std::int64_t number, int to) {
    const auto found = tensors_.find(number);
    const Config message = found == tensors_.end() ? Config() : Config(found->second);
    group_.send_config(message, to, tensor_tag, options_);
    (void)at(number);
  }

  void receive(std::int64_t number, int from) {
    const Config message = group_.recv_config(from, tensor_tag, options_);
    Tensor& tensor = at(number);
    if (!message.is_tensor())
      throw Error(ErrorKind::not_found,
                  fmt::format("rank {}: the tensor to copy from does not exist", group_.global_rank(from)));
    const Tensor& received = message.as_tensor();
    check_fits({tensor.dtype(), tensor.shape()}, {received.dtype(), received.shape()});
    tensor = received;
  }

  Tensor& at(std::int64_t number) {
    const auto found = tensors_.find(number);
    if (found == tensors_.end())
      throw Error(
          ErrorKind::not_found,
          fmt::format("tensor {} does not exist: creating it failed, or it was created before shutdown()", number));
    return found->second;
  }

  ProcessGroup& group_;
  CollectiveOptions options_;
  std::map<std::int64_t, Tensor> tensors_;
  std::optional<Error> failed_;
};

}  // namespace

/// The master's side. When handles are destroyed, it asks the worker to drop their tensors before its next request.
struct MasterWorker::Master : std::enable_shared_from_this<Master> {
  explicit Master(ProcessGroup& ranks) : group(ranks), dropped(static_cast<std::size_t>(ranks.size())) {}

  const RemoteTensor::Place& place_of(const RemoteTensor& tensor) const {
    if (tensor.place().master.lock().get() != this)
      throw Error(ErrorKind::invalid_argument,
                  "RemoteTensor: it belongs to another MasterWorker, or its MasterWorker has been destroyed");
    return tensor.place();
  }
  void check_worker(int worker) const {
    if (worker < 1 || worker >= group.size())
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("worker: rank {} is out of range (valid: 1 to {})", worker, group.size() - 1));
  }

  void ask(int worker, WorkerRequest request, std::int64_t number, ConfigArray words,
           const CollectiveOptions& options) {
    for (const std::int64_t gone : take_dropped(worker)) send(worker, WorkerRequest::drop, gone, {}, options);
    send(worker, request, number, std::move(words), options);
  }

  Config answer_of(int worker, const CollectiveOptions& options) {
    return checked_answer(group.recv_config(worker, answer_tag, options), group.group().info(worker));
  }

  /// Asks all workers. Each of them has answered before the error of the first one is thrown.
  void ask_all(WorkerRequest request, const CollectiveOptions& options) {
    for (int worker = 1; worker < group.size(); ++worker) ask(worker, request, 0, {}, options);
    std::optional<Error> first;
    for (int worker = 1; worker < group.size(); ++worker) {
      const auto error = group::attempt(group.group(), [&] { (void)answer_of(worker, options); });
      if (error && !first) first = error;
    }
    if (first) throw Error(*first);
  }

  void send(int worker, WorkerRequest request, std::int64_t number, ConfigArray words,
            const CollectiveOptions& options) {
    words.insert(words.begin(), {Config(static_cast<int>(request)), Config(number)});
    group.send_config(Config(std::move(words)), worker, request_tag, options);
  }

  void drop(const RemoteTensor::Place& place) noexcept {
    try {
      const std::lock_guard lock(mutex);
      dropped[static_cast<std::size_t>(place.worker)].push_back(place.number);
    } catch (const std::exception&) {
      // The tensor is dropped at shutdown(). A forked child has nothing to drop.
    }
  }
  std::vector<std::int64_t> take_dropped(int worker) {
    const std::lock_guard lock(mutex);
    return std::exchange(dropped[static_cast<std::size_t>(worker)], {});
  }

  ProcessGroup& group;
  std::int64_t made = 0;
  ForkMutex mutex;                                 // handles may be destroyed on any thread
  std::vector<std::vector<std::int64_t>> dropped;  // by worker
};

const RemoteTensor::Place& RemoteTensor::place() const {
  if (!place_)
    throw Error(ErrorKind::invalid_argument,
                "RemoteTensor: it is empty. Use a tensor that MasterWorker::make() returned");
  return *place_;
}

namespace {

void check_same(const TensorSpec& to, const TensorSpec& from, const char* verb) {
  if (to != from)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("tensor {} cannot be {} tensor {}", to_string(from), verb, to_string(to)));
}

}  // namespace

MasterWorker::MasterWorker(Group& group, const CollectiveOptions& options)
    : group_(std::make_unique<ProcessGroup>(group, options)) {
  if (group_->rank() == master_rank) master_ = std::make_shared<Master>(*group_);
}
MasterWorker::MasterWorker(MasterWorker&&) noexcept = default;
MasterWorker& MasterWorker::operator=(MasterWorker&&) noexcept = default;
MasterWorker::~MasterWorker() = default;

bool MasterWorker::is_master() const noexcept {
  return master_ != nullptr;
}
Group& MasterWorker::group() const noexcept {
  return group_->group();
}

void MasterWorker::serve(const CollectiveOptions& options) {
  if (is_master()) throw Error(ErrorKind::invalid_argument, "serve: rank 0 is the master, which cannot serve");
  WorkerLoop(*group_, options).serve();
}

MasterWorker::Master& MasterWorker::master() const {
  if (!is_master())
    throw Error(ErrorKind::invalid_argument, fmt::format("rank {} is a worker. Call serve() on it", group_->rank()));
  return *master_;
}

RemoteTensor MasterWorker::make(int worker, DType dtype, const Shape& shape, const CollectiveOptions& options) {
  Master& master = this->master();
  master.check_worker(worker);
  (void)byte_size(dtype, shape);
  // The last handle may be destroyed after the master.
  const auto drop = [owner = master.weak_from_this()](const RemoteTensor::Place* gone) {
    if (const auto alive = owner.lock()) alive->drop(*gone);
    delete gone;
  };
  RemoteTensor tensor({new RemoteTensor::Place{worker, ++master.made, {dtype, shape}, master.weak_from_this()}, drop});
  Config extents = Config::array();
  for (const std::int64_t extent : shape) extents.push_back(extent);
  master.ask(worker, WorkerRequest::make, master.made, {static_cast<int>(dtype), std::move(extents)}, options);
  return tensor;
}

void MasterWorker::fill(const RemoteTensor& tensor, const TensorView& element, const CollectiveOptions& options) {
  const RemoteTensor::Place& place = master().place_of(tensor);
  if (is_packed(place.spec.dtype))
    throw Error(ErrorKind::unsupported,
                fmt::format("tensor {}: a packed tensor cannot be filled. Copy a tensor to it", to_string(place.spec)));
  if (element.element_count() != 1 || element.dtype() != place.spec.dtype)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("tensor {}: filling needs one element of its dtype, not {}", to_string(place.spec),
                            to_string(TensorSpec{element.dtype(), element.shape()})));
  master().ask(place.worker, WorkerRequest::fill, place.number, {Tensor::borrow(element)}, options);
}

void MasterWorker::copy(const RemoteTensor& to, const TensorView& from, const CollectiveOptions& options) {
  const RemoteTensor::Place& place = master().place_of(to);
  check_same(place.spec, {from.dtype(), from.shape()}, "copied to");
  master().ask(place.worker, WorkerRequest::set, place.number, {Tensor::borrow(from)}, options);
}

void MasterWorker::copy(const RemoteTensor& to, const RemoteTensor& from, const CollectiveOptions& options) {
  const RemoteTensor::Place& target = master().place_of(to);
  const RemoteTensor::Place& source = master().place_of(from);
  check_same(target.spec, source.spec, "copied to");
  if (target.number == source.number) return;
  if (target.worker == source.worker)
    return master().ask(target.worker, WorkerRequest::copy, target.number, {source.number}, options);
  master().ask(source.worker, WorkerRequest::send, source.number, {target.worker}, options);
  master().ask(target.worker, WorkerRequest::receive, target.number, {source.worker}, options);
}

void MasterWorker::add(const RemoteTensor& to, const RemoteTensor& what, const CollectiveOptions& options) {
  const RemoteTensor::Place& target = master().place_of(to);
  const RemoteTensor::Place& source = master().place_of(what);
  check_same(target.spec, source.spec, "added to");
  if (target.worker != source.worker)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("a tensor of rank {} cannot be added to one of rank {}. Copy it to that rank first",
                            source.worker, target.worker));
  master().ask(target.worker, WorkerRequest::add, target.number, {source.number}, options);
}

Tensor MasterWorker::fetch(const RemoteTensor& tensor, const CollectiveOptions& options) {
  Master& master = this->master();
  const RemoteTensor::Place& place = master.place_of(tensor);
  master.ask(place.worker, WorkerRequest::fetch, place.number, {}, options);
  return master.answer_of(place.worker, options).as_tensor();
}

void MasterWorker::wait(int worker, const CollectiveOptions& options) {
  Master& master = this->master();
  master.check_worker(worker);
  master.ask(worker, WorkerRequest::wait, 0, {}, options);
  (void)master.answer_of(worker, options);
}

void MasterWorker::wait(const CollectiveOptions& options) {
  master().ask_all(WorkerRequest::wait, options);
}

void MasterWorker::shutdown(const CollectiveOptions& options) {
  master().ask_all(WorkerRequest::stop, options);
}

}  // namespace muster
