// SPDX-License-Identifier: Apache-2.0
#pragma once
// MasterWorker: rank 0, the master, makes tensors on the other ranks, the workers, and works with them by handle.
// Semantics: the master-worker mode of torch.distributed 0.3 (init_master_worker), with errors that arrive.

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "muster/process_group.hpp"
#include "muster/sync_group.hpp"
#include "muster/tensor.hpp"

namespace muster {

/// A tensor on a worker. Copies are the same tensor; the worker drops it after the last of them has gone, with the next
/// call that it gets. By default: none.
class RemoteTensor {
 public:
  RemoteTensor() = default;
  /// Its rank. Throw Error(argument) if this is none.
  [[nodiscard]] int worker() const { return place().worker; }
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

/// - The master's calls but wait(), fetch() and shutdown() do not wait for what they ask for: each worker does what it
///   is asked for in that order. (Of a large tensor the bytes are taken when the worker comes to it.)
/// - What cannot be done on a worker (no memory, a sum that the dtype does not have) is the Error of the next call that
///   waits for that worker, in the worker's words; the first one if there are several. The worker goes on with what it
///   was asked for next.
/// - What is wrong with a call as it is (tensors that do not fit, another worker's tensor, or another master's) is
///   Error(argument) at once.
/// - A worker that dies is named by the next call that waits for it, and then by all ranks: the group has failed.
///   serve() throws Error(peer_lost) if the master dies or leaves.
/// - One thread at a time. Messages are of a group of their own. Tensors are in host memory.
class MasterWorker {
 public:
  /// Collective over `group`. Throws as SyncGroup::duplicate().
  explicit MasterWorker(SyncGroup& group, const CollectiveOptions& options = {});
  MasterWorker(MasterWorker&&) noexcept;
  MasterWorker& operator=(MasterWorker&&) noexcept;
  ~MasterWorker();
  [[nodiscard]] bool is_master() const noexcept;
  /// Of the own group, for deadlines: a worker waits for its master for as long as timeout() says. A master that does
  /// something else for longer calls progress() now and then.
  [[nodiscard]] SyncGroup& group() const noexcept;

  // A worker's.

  /// Does what the master asks for until its shutdown(); may be called again then. Throws Error(argument) on the
  /// master, and as ProcessGroup::recv().
  void serve(const CollectiveOptions& options = {});

  // The master's: else Error(argument).

  /// Zeros. `worker`: 1, 2, ...
  [[nodiscard]] RemoteTensor make(int worker, DType dtype, const Shape& shape, const CollectiveOptions& options = {});
  /// All elements become that of `element`, which has one, of the tensor's dtype. Throws Error(unsupported) on packed
  /// types.
  void fill(const RemoteTensor& tensor, const TensorView& element, const CollectiveOptions& options = {});
  template <class T>
  requires requires { DTypeOf<T>::value; }
  void fill(const RemoteTensor& tensor, T value, const CollectiveOptions& options = {}) {
    fill(tensor, view_of(std::span<const T>(&value, 1)), options);
  }
  /// From the master's memory, or another tensor, which may be another worker's: then it goes from worker to worker.
  void copy(const RemoteTensor& to, const TensorView& from, const CollectiveOptions& options = {});
  void copy(const RemoteTensor& to, const RemoteTensor& from, const CollectiveOptions& options = {});
  /// To each element of `to` that of `what`, of the same worker, dtype and shape; rounded as by all_reduce.
  void add(const RemoteTensor& to, const RemoteTensor& what, const CollectiveOptions& options = {});
  [[nodiscard]] Tensor fetch(const RemoteTensor& tensor, const CollectiveOptions& options = {});
  /// Until a worker, or each of them, has done what it was asked for.
  void wait(int worker, const CollectiveOptions& options = {});
  void wait(const CollectiveOptions& options = {});
  /// All tensors are dropped, and serve() returns on all workers; throws like wait() after that.
  void shutdown(const CollectiveOptions& options = {});

 private:
  struct Master;
  [[nodiscard]] Master& master() const;
  std::unique_ptr<ProcessGroup> group_;
  std::shared_ptr<Master> master_;  // null on workers
};

}  // namespace muster
