// SPDX-License-Identifier: Apache-2.0
#include "muster/master_worker.hpp"

#include <fmt/core.h>

#include <mutex>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "src/collectives/worker.hpp"
#include "src/sync/failing.hpp"

namespace muster {

using collectives::Request;

/// The master's side. What handles that have gone leave behind is told to the worker before its next request.
struct MasterWorker::Master : std::enable_shared_from_this<Master> {
  explicit Master(ProcessGroup& ranks) : group(ranks), dropped(static_cast<std::size_t>(ranks.size())) {}

  const RemoteTensor::Place& place_of(const RemoteTensor& tensor) const {
    if (tensor.place().master.lock().get() != this)
      throw Error(ErrorKind::argument, "a tensor of another MasterWorker, or of none that is still there");
    return tensor.place();
  }
  void check_worker(int worker) const {
    if (worker < 1 || worker >= group.size())
      throw Error(ErrorKind::argument, fmt::format("rank {} is no worker: 1 to {}", worker, group.size() - 1));
  }

  void ask(int worker, Request request, std::int64_t number, ConfigArray words, const CollectiveOptions& options) {
    for (const std::int64_t gone : take_dropped(worker)) send(worker, Request::drop, gone, {}, options);
    send(worker, request, number, std::move(words), options);
  }

  Config answer_of(int worker, const CollectiveOptions& options) {
    return collectives::checked_answer(group.recv_config(worker, collectives::answer_tag, options),
                                       group.group().info(worker));
  }

  /// Of all workers: each has answered before the first one's failure is thrown.
  void ask_all(Request request, const CollectiveOptions& options) {
    for (int worker = 1; worker < group.size(); ++worker) ask(worker, request, 0, {}, options);
    std::optional<Error> first;
    for (int worker = 1; worker < group.size(); ++worker) {
      const auto error = sync::attempt(group.group(), [&] { (void)answer_of(worker, options); });
      if (error && !first) first = error;
    }
    if (first) throw Error(*first);
  }

  void send(int worker, Request request, std::int64_t number, ConfigArray words, const CollectiveOptions& options) {
    words.insert(words.begin(), {Config(static_cast<int>(request)), Config(number)});
    group.send_config(Config(std::move(words)), worker, collectives::request_tag, options);
  }

  void drop(const RemoteTensor::Place& place) noexcept {
    try {
      const std::lock_guard lock(mutex);
      dropped[static_cast<std::size_t>(place.worker)].push_back(place.number);
    } catch (const std::bad_alloc&) {
      // It goes at shutdown().
    }
  }
  std::vector<std::int64_t> take_dropped(int worker) {
    const std::lock_guard lock(mutex);
    return std::exchange(dropped[static_cast<std::size_t>(worker)], {});
  }

  ProcessGroup& group;
  std::int64_t made = 0;
  std::mutex mutex;                                // handles may go on any thread
  std::vector<std::vector<std::int64_t>> dropped;  // by worker
};

const RemoteTensor::Place& RemoteTensor::place() const {
  if (!place_) throw Error(ErrorKind::argument, "this RemoteTensor is none: take what MasterWorker::make() gave");
  return *place_;
}

namespace {

void check_same(const TensorSpec& to, const TensorSpec& from, const char* verb) {
  if (to != from)
    throw Error(ErrorKind::argument,
                fmt::format("a tensor {} cannot be {} one {}", to_string(from), verb, to_string(to)));
}

}  // namespace

MasterWorker::MasterWorker(SyncGroup& group, const CollectiveOptions& options)
    : group_(std::make_unique<ProcessGroup>(group, options)) {
  if (group_->rank() == collectives::master_rank) master_ = std::make_shared<Master>(*group_);
}
MasterWorker::MasterWorker(MasterWorker&&) noexcept = default;
MasterWorker& MasterWorker::operator=(MasterWorker&&) noexcept = default;
MasterWorker::~MasterWorker() = default;

bool MasterWorker::is_master() const noexcept {
  return master_ != nullptr;
}
SyncGroup& MasterWorker::group() const noexcept {
  return group_->group();
}

void MasterWorker::serve(const CollectiveOptions& options) {
  if (is_master()) throw Error(ErrorKind::argument, "rank 0 is the master, which does not serve");
  collectives::Worker(*group_, options).serve();
}

MasterWorker::Master& MasterWorker::master() const {
  if (!is_master()) throw Error(ErrorKind::argument, fmt::format("rank {} is a worker: it serves", group_->rank()));
  return *master_;
}

RemoteTensor MasterWorker::make(int worker, DType dtype, const Shape& shape, const CollectiveOptions& options) {
  Master& master = this->master();
  master.check_worker(worker);
  (void)byte_size(dtype, shape);
  // The last handle may go after the master.
  const auto drop = [owner = master.weak_from_this()](const RemoteTensor::Place* gone) {
    if (const auto alive = owner.lock()) alive->drop(*gone);
    delete gone;
  };
  RemoteTensor tensor({new RemoteTensor::Place{worker, ++master.made, {dtype, shape}, master.weak_from_this()}, drop});
  Config extents = Config::array();
  for (const std::int64_t extent : shape) extents.push_back(extent);
  master.ask(worker, Request::make, master.made, {static_cast<int>(dtype), std::move(extents)}, options);
  return tensor;
}

void MasterWorker::fill(const RemoteTensor& tensor, const TensorView& element, const CollectiveOptions& options) {
  const RemoteTensor::Place& place = master().place_of(tensor);
  if (is_packed(place.spec.dtype))
    throw Error(ErrorKind::unsupported, fmt::format("a tensor {} cannot be filled: copy one", to_string(place.spec)));
  if (element.elements() != 1 || element.dtype() != place.spec.dtype)
    throw Error(ErrorKind::argument,
                fmt::format("a tensor {} is filled with one element of that dtype, not {}", to_string(place.spec),
                            to_string(TensorSpec{element.dtype(), element.shape()})));
  master().ask(place.worker, Request::fill, place.number, {Tensor::borrow(element)}, options);
}

void MasterWorker::copy(const RemoteTensor& to, const TensorView& from, const CollectiveOptions& options) {
  const RemoteTensor::Place& place = master().place_of(to);
  check_same(place.spec, {from.dtype(), from.shape()}, "copied to");
  master().ask(place.worker, Request::set, place.number, {Tensor::borrow(from)}, options);
}

void MasterWorker::copy(const RemoteTensor& to, const RemoteTensor& from, const CollectiveOptions& options) {
  const RemoteTensor::Place& target = master().place_of(to);
  const RemoteTensor::Place& source = master().place_of(from);
  check_same(target.spec, source.spec, "copied to");
  if (target.number == source.number) return;
  if (target.worker == source.worker)
    return master().ask(target.worker, Request::copy, target.number, {source.number}, options);
  master().ask(source.worker, Request::send, source.number, {target.worker}, options);
  master().ask(target.worker, Request::receive, target.number, {source.worker}, options);
}

void MasterWorker::add(const RemoteTensor& to, const RemoteTensor& what, const CollectiveOptions& options) {
  const RemoteTensor::Place& target = master().place_of(to);
  const RemoteTensor::Place& source = master().place_of(what);
  check_same(target.spec, source.spec, "added to");
  if (target.worker != source.worker)
    throw Error(ErrorKind::argument, fmt::format("a tensor of rank {} cannot be added to one of rank {}: copy it there",
                                                 source.worker, target.worker));
  master().ask(target.worker, Request::add, target.number, {source.number}, options);
}

Tensor MasterWorker::fetch(const RemoteTensor& tensor, const CollectiveOptions& options) {
  Master& master = this->master();
  const RemoteTensor::Place& place = master.place_of(tensor);
  master.ask(place.worker, Request::fetch, place.number, {}, options);
  return master.answer_of(place.worker, options).as_tensor();
}

void MasterWorker::wait(int worker, const CollectiveOptions& options) {
  Master& master = this->master();
  master.check_worker(worker);
  master.ask(worker, Request::wait, 0, {}, options);
  (void)master.answer_of(worker, options);
}

void MasterWorker::wait(const CollectiveOptions& options) {
  master().ask_all(Request::wait, options);
}

void MasterWorker::shutdown(const CollectiveOptions& options) {
  master().ask_all(Request::stop, options);
}

}  // namespace muster
