// SPDX-License-Identifier: Apache-2.0

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <utility>

#include "muster/log.hpp"
#include "muster/roles.hpp"
#include "src/collectives/engine.hpp"
#include "src/collectives/init_group.hpp"
#include "src/os/process.hpp"
#include "src/sync/failing.hpp"
#include "src/sync/group.hpp"

namespace muster::roles {
namespace {

const char* name_of(Role role) {
  switch (role) {
    case Role::training:
      return "a training rank";
    case Role::buffer:
      return "a buffer manager";
    case Role::coordinator:
      return "the coordinator";
  }
  return "";
}

/// The layout, if it can be and is the same on all ranks.
RankLayout agreed_layout(SyncGroup& group, const RoleSizes& sizes, const CollectiveOptions& options) {
  const WaitOptions waits = collectives::waits(options, "roles");
  using Card = std::array<std::int32_t, 3>;
  const Card mine{sizes.num_remote_buffers, sizes.num_agent_groups, sizes.use_coordinator ? 1 : 0};
  std::vector<Card> all(static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), waits);
  const auto other = std::ranges::find_if(all, [&](const Card& card) { return card != all[0]; });
  if (other != all.end()) {
    const auto words = [](const Card& card) {
      return fmt::format("{} remote buffers, {} agent groups and {} coordinators", card[0], card[1], card[2]);
    };
    const RankInfo& info = group.info(static_cast<int>(other - all.begin()));
    throw sync::error_of(info, ErrorKind::rank_mismatch,
                         fmt::format("{} wants {}, and {} {}: all ranks give the same", sync::name_of(info),
                                     words(*other), sync::name_of(group.info(0)), words(all[0])));
  }
  RankLayout layout;
  sync::inside(group).together(waits, [&] {
    std::vector<int> hosts(all.size());
    for (int rank = 0; rank < group.size(); ++rank) hosts[static_cast<std::size_t>(rank)] = group.host_of(rank);
    layout = RankLayout::by_hosts(hosts, sizes);
  });
  return layout;
}

/// The same elements as bytes, without a copy unless they are strided.
Tensor bytes_of(const Tensor& tensor) {
  if (!tensor.view().is_contiguous()) return bytes_of(Tensor::copy_of(tensor));
  const TensorView view(DType::u8, {static_cast<std::int64_t>(tensor.nbytes())}, tensor.data(), {}, tensor.device());
  return tensor.is_writable() ? Tensor(view, tensor.owner(), tensor.mutable_data()) : Tensor(view, tensor.owner());
}

}  // namespace

DistributedContext initialize_distributed_compute(SyncGroup& group, const RoleSizes& sizes,
                                                  const CollectiveOptions& options) {
  RankLayout layout = agreed_layout(group, sizes, options);
  if (layout.ignores_hosts && group.rank() == 0)
    log(LogLevel::warning,
        fmt::format("{} remote buffers are no multiple of the hosts, so that managers may be on other hosts than the "
                    "training ranks that they serve",
                    sizes.num_remote_buffers));
  return {group, std::move(layout), options};
}

DistributedContext initialize_distributed_compute(std::string_view backend, const RoleSizes& sizes,
                                                  const dist::InitOptions& options) {
  return initialize_distributed_compute(*collectives::init_group(backend, options), sizes);
}

DistributedContext::DistributedContext(SyncGroup& group, RankLayout layout, const CollectiveOptions& options)
    : layout_(std::move(layout)), my_rank_(group.rank()), world_(std::make_unique<ProcessGroup>(group, options)) {
  // One split makes the train group and the buffer group, which have no rank in common.
  if (is_coordinator_rank()) {
    peers_ = world_->split(std::vector<int>{}, options);
    return;
  }
  peers_ = world_->split(is_training_rank() ? layout_.training_ranks : layout_.buffer_ranks, options);
  if (!is_training_rank() || layout_.agent_groups.size() == 1) return;
  std::vector<int> mine(static_cast<std::size_t>(agent_group_size()));
  std::iota(mine.begin(), mine.end(), agent_group_id() * agent_group_size());
  agents_ = peers_->split(mine, options);
}

ProcessGroup& DistributedContext::world() const {
  if (!world_) throw Error(ErrorKind::argument, "this context has no groups any more: cleanup() was called");
  return *world_;
}

ProcessGroup& DistributedContext::peers(Role role) const {
  (void)world();
  const Role own = layout_.role(my_rank_);
  if (own != role)
    throw Error(ErrorKind::argument,
                fmt::format("rank {} is {}, and has no group as {}", my_rank_, name_of(own), name_of(role)));
  return *peers_;
}

ProcessGroup& DistributedContext::train_group() const {
  return peers(Role::training);
}
ProcessGroup& DistributedContext::buffer_group() const {
  return peers(Role::buffer);
}
ProcessGroup& DistributedContext::agent_group() const {
  ProcessGroup& all = train_group();
  return agents_ ? *agents_ : all;
}

void DistributedContext::cleanup() noexcept {
  agents_.reset();
  peers_.reset();
  world_.reset();
}

void DistributedContext::send(const TensorView& data, int dst_rank, int tag, const CollectiveOptions& options) {
  world().send(bytes_of(Tensor::borrow(data)), dst_rank, tag, options);
}

AsyncSendHandle DistributedContext::isend(const Tensor& data, int dst_rank, int tag, const CollectiveOptions& options) {
  return AsyncSendHandle(world().isend(bytes_of(data), dst_rank, tag, options));
}

ReceivedBytes DistributedContext::recv(std::optional<int> src_rank, int tag, const CollectiveOptions& options) {
  const ReceivedConfig message = world().recv_message(src_rank.value_or(any_rank), tag, options);
  if (!message.config.is_tensor())
    throw Error(
        ErrorKind::rank_mismatch,
        fmt::format("rank {} has sent a Config with tag {} where bytes were to be received", message.from, message.tag),
        {.rank = message.from});
  return {message.from, message.tag, bytes_of(message.config.as_tensor())};
}

std::optional<Tensor> gather_distributed_data(const TensorView& local, ProcessGroup& group,
                                              const CollectiveOptions& options) {
  return group.gatherv(local, 0, 0, options);
}

std::optional<std::string> first_env(std::initializer_list<const char*> names,
                                     std::optional<std::string> default_value) {
  for (const char* name : names)
    if (auto value = os::environment(name)) return value;
  return default_value;
}

}  // namespace muster::roles
