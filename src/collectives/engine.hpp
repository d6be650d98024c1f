// SPDX-License-Identifier: Apache-2.0
#pragma once
// Engine: the collectives of a ProcessGroup: what they check, agree about and make of bytes. Backends move them.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "muster/config.hpp"
#include "muster/process_group.hpp"
#include "src/collectives/arguments.hpp"
#include "src/collectives/backend.hpp"
#include "src/collectives/mail.hpp"

namespace muster::collectives {

inline WaitOptions waits(const CollectiveOptions& options, const char* phase) {
  return {.timeout = options.timeout, .stop = options.stop, .phase = phase};
}

class Engine {
 public:
  /// Collective over `group`, which is its own.
  Engine(std::shared_ptr<SyncGroup> group, const CollectiveOptions& options);

  [[nodiscard]] SyncGroup& group() const noexcept { return *group_; }
  [[nodiscard]] const Backend& backend() const noexcept { return *backend_; }
  [[nodiscard]] int rank() const noexcept { return group_->rank(); }
  [[nodiscard]] int size() const noexcept { return group_->size(); }
  /// Messages by tag: the backend's own and the program's.
  [[nodiscard]] Mail& mail() noexcept { return mail_; }

  void barrier(const CollectiveOptions& options);
  void all_reduce(const What& what, const Tensor& out, const TensorView& tensor, const CollectiveOptions& options);
  Tensor all_reduce_shared(const What& what, const TensorView& tensor, const CollectiveOptions& options);
  Tensor all_gather_shared(What what, const TensorView& tensor, const CollectiveOptions& options);
  void broadcast(const What& what, const Tensor& tensor, const CollectiveOptions& options);
  /// The result is of no rank but `what.root`, if that is one. `what.slices`, if given: all ranks' extents.
  /// `into`, if given, has room for it: nothing is returned then.
  std::optional<Tensor> gather(What what, const TensorView& tensor, int dim, const CollectiveOptions& options,
                               const Tensor* into = nullptr);
  /// Likewise, into tensors of their own, one for each rank; on ranks that get nothing there are none.
  void gather_each(What what, std::span<const Tensor> outs, const TensorView& tensor, const CollectiveOptions& options);
  std::optional<Tensor> reduce_scatter(What what, const TensorView& tensor,
                                       std::optional<std::span<const std::int64_t>> sizes, int dim,
                                       const CollectiveOptions& options, const Tensor* into = nullptr);
  void scatter(const What& what, const Tensor& out, std::span<const TensorView> parts,
               const CollectiveOptions& options);
  Tensor all_to_all(const TensorView& tensor, std::optional<std::span<const std::int64_t>> rows,
                    std::vector<std::int64_t>* received, const CollectiveOptions& options,
                    const Tensor* into = nullptr);
  /// Of the ranks that give one: root alone (broadcast), or all, to all or to root.
  std::vector<Config> configs(const What& what, const Config& config, bool only_root_gives, bool only_root_gets,
                              const CollectiveOptions& options);

 private:
  struct Call;
  /// `prepare` checks this rank's arguments and writes its card; `move` calls the backend.
  template <class Prepare, class Move>
  void run(const What& what, const CollectiveOptions& options, const Prepare& prepare, const Move& move);
  [[noreturn]] void disagree(const What& what, std::span<const Card> cards, const WaitOptions& options) const;
  /// Rooms for all ranks' bytes, one behind the other.
  void place(const Tensor& all, std::span<const std::uint64_t> sizes);
  [[nodiscard]] std::size_t self() const noexcept { return static_cast<std::size_t>(rank()); }

  std::shared_ptr<SyncGroup> group_;
  Mail mail_;
  std::unique_ptr<Backend> backend_;
  // Of the call.
  std::vector<Bytes> ins_;
  std::vector<Room> outs_;
  std::vector<std::int64_t> extents_;
  std::vector<std::uint64_t> sizes_;
  std::vector<std::uint64_t> bounds_;
};

}  // namespace muster::collectives
