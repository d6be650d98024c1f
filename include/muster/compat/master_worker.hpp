// SPDX-License-Identifier: Apache-2.0
#pragma once
// MasterWorker: rank 0, the master, creates tensors on the other ranks, the workers, and operates on them through
// handles. Semantics: the master-worker mode of torch.distributed 0.3 (init_master_worker). In addition, errors on
// workers are reported to the master.

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "muster/group.hpp"
#include "muster/process_group.hpp"
#include "muster/tensor.hpp"

namespace muster {

/// A handle of a tensor on a worker. Copies refer to the same tensor. After the last copy is destroyed, the worker
/// drops the tensor with the next call that it receives. A default-constructed handle is empty.
class RemoteTensor {
 public:
  RemoteTensor() = default;
  /// Return the rank of the worker, and the dtype and shape. Throw Error(invalid_argument) if the handle is empty.
  [[nodiscard]] int worker() const { return place().worker; }
  /// Returns the dtype and the shape. Throws as worker().
  [[nodiscard]] const TensorSpec& spec() const { return place().spec; }

 private:
  friend class MasterWorker;
  struct Place {
    int worker = 0;
    std::int64_t number = 0;
    TensorSpec spec = {};
    std::weak_ptr<const void> master = {};
  };
  explicit RemoteTensor(std::shared_ptr<const Place> place) : place_(std::move(place)) {}
  [[nodiscard]] const Place& place() const;
  std::shared_ptr<const Place> place_;
};

/// A master that controls tensors on workers. These rules apply to all calls:
/// - The calls of the master are asynchronous, except wait(), fetch() and shutdown(). Each worker executes its requests
///   in order. The bytes of a large tensor are transferred when the worker reaches the request.
/// - If a request fails on a worker (no memory, a sum that the dtype does not support), the next call that waits for
///   that worker throws the error, with the message of the worker. If several requests failed, it is the first error.
///   The worker continues with the next request.
/// - Invalid arguments (tensors that do not match, or a tensor of another worker or another master) throw
///   Error(invalid_argument) at once.
/// - If a worker dies, the next call that waits for it throws an error that names it. The group has then failed on all
///   ranks. serve() throws Error(peer_lost) if the master dies or leaves.
/// - One thread at a time. Messages use a private group. Tensors are in host memory.
class MasterWorker {
 public:
  /// Creates the master on rank 0 and workers on the other ranks. Collective over `group`. Throws as
  /// Group::duplicate().
  explicit MasterWorker(Group& group, const CollectiveOptions& options = {});
  MasterWorker(MasterWorker&&) noexcept;
  MasterWorker& operator=(MasterWorker&&) noexcept;
  ~MasterWorker();
  /// Returns whether this rank is the master. Local.
  [[nodiscard]] bool is_master() const noexcept;
  /// Returns the private group, for deadlines. A worker waits for its master as long as timeout() allows. A master that
  /// does other work for longer calls progress() in between.
  [[nodiscard]] Group& group() const noexcept;

  // Calls of a worker.

  /// Executes the requests of the master until it calls shutdown(). It may then be called again. Throws
  /// Error(invalid_argument) on the master, and as ProcessGroup::recv().
  void serve(const CollectiveOptions& options = {});

  // Calls of the master. On workers they throw Error(invalid_argument).

  /// Creates a tensor of zeros on a worker: 1, 2, ...
  [[nodiscard]] RemoteTensor make(int worker, DType dtype, const Shape& shape, const CollectiveOptions& options = {});
  /// Sets all elements to that of `element`, which has one element of the dtype of the tensor. Throws
  /// Error(unsupported) on packed types.
  void fill(const RemoteTensor& tensor, const TensorView& element, const CollectiveOptions& options = {});
  /// Sets all elements to `value`, whose dtype is that of the tensor. Otherwise as the function above.
  template <class T>
  requires requires { DTypeOf<T>::value; }
  void fill(const RemoteTensor& tensor, T value, const CollectiveOptions& options = {}) {
    fill(tensor, view_of(std::span<const T>(&value, 1)), options);
  }
  /// Copies elements from the memory of the master, or from another remote tensor. If that belongs to another worker,
  /// the data is sent directly from worker to worker.
  void copy(const RemoteTensor& to, const TensorView& from, const CollectiveOptions& options = {});
  /// Copies elements from another remote tensor.
  void copy(const RemoteTensor& to, const RemoteTensor& from, const CollectiveOptions& options = {});
  /// Adds the elements of `what` to those of `to`. Both are on the same worker and have the same dtype and shape.
  /// Rounding is that of all_reduce().
  void add(const RemoteTensor& to, const RemoteTensor& what, const CollectiveOptions& options = {});
  /// Returns a copy of the tensor in memory of the master.
  [[nodiscard]] Tensor fetch(const RemoteTensor& tensor, const CollectiveOptions& options = {});
  /// Waits until a worker, or every worker, has executed its requests.
  void wait(int worker, const CollectiveOptions& options = {});
  /// Waits until every worker has executed its requests.
  void wait(const CollectiveOptions& options = {});
  /// Drops all tensors and makes serve() return on all workers. Afterwards it throws as wait().
  void shutdown(const CollectiveOptions& options = {});

 private:
  struct Master;
  [[nodiscard]] Master& master() const;
  std::unique_ptr<ProcessGroup> group_;
  std::shared_ptr<Master> master_;  // null on workers
};

}  // namespace muster
