// SPDX-License-Identifier: Apache-2.0

#include "muster/compat/roles.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <numeric>
#include <utility>
#include "muster/log.hpp"
#include "src/base/escaped.hpp"
#include "src/base/message.hpp"
#include "src/collectives/engine.hpp"
#include "src/compat/dist.hpp"
#include "src/compat/roles.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/group.hpp"
#include "src/os/process.hpp"
#define XXH_INLINE_ALL
#include <xxhash.h>
#include <cstddef>
#include <cstring>
#include "src/collectives/arguments.hpp"
#include "src/merge/reduce.hpp"

namespace muster::roles {
namespace {

std::size_t index(int number) {
  return static_cast<std::size_t>(number);
}

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::invalid_argument, "RoleSizes: " + words);
}

/// Splits `total` into `parts` sizes that differ by at most 1, the larger ones first.
std::vector<int> evenly(int total, int parts) {
  std::vector<int> sizes(index(parts), total / parts);
  for (int i = 0; i < total % parts; ++i) ++sizes[index(i)];
  return sizes;
}

/// Returns the number of training ranks.
int training_ranks_of(int world_size, const RoleSizes& sizes) {
  if (sizes.num_remote_buffers < 0 || sizes.num_agent_groups < 1)
    refuse(fmt::format("{} remote buffers and {} agent groups: at least 0 buffers and 1 group are needed",
                       sizes.num_remote_buffers, sizes.num_agent_groups));
  // Before the subtraction, which could overflow.
  const int others = world_size - (sizes.use_coordinator ? 1 : 0);
  const int training = sizes.num_remote_buffers < others ? others - sizes.num_remote_buffers : 0;
  const auto all = [&] {
    return fmt::format("{} ranks with {} remote buffers and {} coordinator", world_size, sizes.num_remote_buffers,
                       sizes.use_coordinator ? "a" : "no");
  };
  if (training <= 0) refuse(all() + " leave no training rank. Start more ranks");
  if (training < sizes.num_remote_buffers)
    refuse(fmt::format("{} leave {} training ranks: each buffer needs at least one", all(), training));
  if (training % sizes.num_agent_groups != 0)
    refuse(fmt::format("{} leave {} training ranks, which is not a multiple of {} agent groups", all(), training,
                       sizes.num_agent_groups));
  return training;
}

/// `chunks`: for each manager, the ranks that it serves, followed by the manager itself. Without buffers, only training
/// ranks.
RankLayout layout_of(int world_size, const RoleSizes& sizes, std::vector<std::vector<int>> chunks) {
  RankLayout layout;
  layout.world_size = world_size;
  if (sizes.use_coordinator) layout.coordinator_rank = world_size - 1;
  for (std::vector<int>& chunk : chunks) {
    if (sizes.num_remote_buffers > 0) {
      layout.buffer_ranks.push_back(chunk.back());
      chunk.pop_back();
    }
    layout.training_ranks.insert(layout.training_ranks.end(), chunk.begin(), chunk.end());
  }
  if (sizes.num_remote_buffers > 0) layout.clients_of = std::move(chunks);
  const auto size = static_cast<std::ptrdiff_t>(layout.training_ranks.size()) / sizes.num_agent_groups;
  for (auto begin = layout.training_ranks.begin(); begin != layout.training_ranks.end(); begin += size)
    layout.agent_groups.emplace_back(begin, begin + size);
  return layout;
}

}  // namespace

RankLayout RankLayout::contiguous(int world_size, const RoleSizes& sizes) {
  const int training = training_ranks_of(world_size, sizes);
  const int managers = sizes.num_remote_buffers > 0 ? 1 : 0;  // per chunk
  std::vector<std::vector<int>> chunks;
  int next = 0;
  for (const int agents : evenly(training, std::max(sizes.num_remote_buffers, 1))) {
    chunks.emplace_back(index(agents + managers));
    std::iota(chunks.back().begin(), chunks.back().end(), next);
    next += agents + managers;
  }
  return layout_of(world_size, sizes, std::move(chunks));
}

RankLayout RankLayout::by_hosts(std::span<const int> hosts, const RoleSizes& sizes) {
  const auto world_size = static_cast<int>(hosts.size());
  (void)training_ranks_of(world_size, sizes);
  // The hosts in the order of their first ranks. A host with only the coordinator counts, too.
  std::map<int, std::size_t> places;
  std::vector<std::vector<int>> ranks_of_host;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::size_t place = places.try_emplace(hosts[index(rank)], places.size()).first->second;
    ranks_of_host.resize(places.size());
    ranks_of_host[place].push_back(rank);
  }
  const auto host_count = static_cast<int>(ranks_of_host.size());
  if (sizes.num_remote_buffers % host_count != 0 || sizes.num_remote_buffers == 0) {
    RankLayout layout = contiguous(world_size, sizes);
    layout.host_agnostic = sizes.num_remote_buffers != 0;
    return layout;
  }
  const int managers = sizes.num_remote_buffers / host_count;
  std::vector<std::vector<int>> chunks;
  for (std::vector<int>& ranks : ranks_of_host) {
    const int first = ranks.front();
    if (sizes.use_coordinator && ranks.back() == world_size - 1) ranks.pop_back();
    if (static_cast<int>(ranks.size()) < 2 * managers)
      refuse(fmt::format(
          "{} remote buffers on {} hosts are {} per host, which need at least {} ranks there in addition to the "
          "coordinator, but the host of rank {} has {}. Start more ranks on it, or choose another number of buffers",
          sizes.num_remote_buffers, host_count, managers, 2 * managers, first, ranks.size()));
    auto begin = ranks.begin();
    for (const int size : evenly(static_cast<int>(ranks.size()), managers)) {
      chunks.emplace_back(begin, begin + size);
      begin += size;
    }
  }
  return layout_of(world_size, sizes, std::move(chunks));
}

Role RankLayout::role(int rank) const {
  if (rank < 0 || rank >= world_size)
    throw Error(ErrorKind::invalid_argument, out_of_range_text("RankLayout: rank", rank, world_size));
  if (rank == coordinator_rank) return Role::coordinator;
  return std::ranges::find(buffer_ranks, rank) == buffer_ranks.end() ? Role::training : Role::buffer;
}

std::optional<int> RankLayout::assigned_buffer(int rank) const {
  if (role(rank) != Role::training) return std::nullopt;
  for (std::size_t buffer = 0; buffer < clients_of.size(); ++buffer)
    if (std::ranges::find(clients_of[buffer], rank) != clients_of[buffer].end()) return buffer_ranks[buffer];
  return std::nullopt;
}

std::vector<int> RankLayout::assigned_training_ranks(int rank) const {
  if (role(rank) != Role::buffer) return {};
  return clients_of[index(static_cast<int>(std::ranges::find(buffer_ranks, rank) - buffer_ranks.begin()))];
}

int RankLayout::agent_group_id(int rank) const {
  switch (role(rank)) {
    case Role::training:
      return static_cast<int>(std::ranges::find(training_ranks, rank) - training_ranks.begin()) / agent_group_size();
    case Role::buffer:
      return agent_group_id(assigned_training_ranks(rank).front());
    case Role::coordinator:
      return 0;
  }
  return 0;
}

namespace {

const char* name_of(Role role) {
  constexpr std::array<const char*, 3> names = {"a training rank", "a buffer manager", "the coordinator"};
  return names.at(static_cast<std::size_t>(role));
}

/// Returns the same elements as bytes, without a copy unless they are strided.
Tensor bytes_of(const Tensor& tensor) {
  if (!tensor.view().is_contiguous()) return bytes_of(Tensor::copy_of(tensor));
  const TensorView view(DType::u8, {static_cast<std::int64_t>(tensor.nbytes())}, tensor.data(), {}, tensor.device());
  return tensor.is_writable() ? Tensor(view, tensor.owner(), tensor.mutable_data()) : Tensor(view, tensor.owner());
}

}  // namespace

RankLayout agreed_layout(Group& group, const RoleSizes& sizes, const CollectiveOptions& options) {
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
    throw group::error_of(info, ErrorKind::rank_mismatch,
                          fmt::format("{} has {}, {} has {}. Pass the same sizes on all ranks", group::name_of(info),
                                      words(*other), group::name_of(group.info(0)), words(all[0])));
  }
  RankLayout layout;
  group::inside(group).together(waits, [&] {
    std::vector<int> hosts(all.size());
    for (int rank = 0; rank < group.size(); ++rank) hosts[static_cast<std::size_t>(rank)] = group.host_of(rank);
    layout = RankLayout::by_hosts(hosts, sizes);
  });
  if (layout.host_agnostic && group.rank() == 0)
    log(LogLevel::warning, fmt::format("the number of hosts does not divide the {} remote buffers, so managers may be "
                                       "on other hosts than their training ranks",
                                       sizes.num_remote_buffers));
  return layout;
}

DistributedContext initialize_distributed_compute(Group& group, const RoleSizes& sizes,
                                                  const CollectiveOptions& options) {
  return {group, agreed_layout(group, sizes, options), options};
}

DistributedContext initialize_distributed_compute(std::string_view backend, const RoleSizes& sizes,
                                                  const dist::InitOptions& options) {
  return initialize_distributed_compute(*collectives::init_group(backend, options), sizes);
}

DistributedContext::DistributedContext(Group& group, RankLayout layout, const CollectiveOptions& options)
    : layout_(std::move(layout)), my_rank_(group.rank()), world_(std::make_unique<ProcessGroup>(group, options)) {
  // One split creates the train group and the buffer group, which have no rank in common.
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
  if (!world_) throw Error(ErrorKind::invalid_argument, "DistributedContext: its groups were destroyed by cleanup()");
  return *world_;
}

ProcessGroup& DistributedContext::peers(Role role) const {
  (void)world();
  const Role own = layout_.role(my_rank_);
  if (own != role)
    throw Error(ErrorKind::invalid_argument,
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

void AsyncSendHandle::wait() {
  if (failure_) throw Error(*failure_);
  if (!work_.is_pending()) return;
  try {
    work_.get();
  } catch (const Error& error) {
    // A call that was only refused can be repeated.
    if (!work_.is_pending()) failure_ = error;
    throw;
  }
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
        fmt::format("message of rank {} with tag {}: expected bytes, received a Config", message.from, message.tag),
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

// Averages of a model's tensors:
// 1. Each rank lists the tensors that it has to average, and assigns them to buckets. A large tensor has its own
//    bucket; small tensors of one dtype share buckets.
// 2. One all_gather exchanges a hash of the lists, and the status of each rank.
// 3. Each bucket is one all_reduce: in place, or of a copy that is written back.
namespace {

constexpr std::size_t bucket_bytes = 4 << 20;

/// One of the model's parameters, with the tensor that is averaged.
struct AveragedTensor {
  const std::string* name;
  const Tensor* tensor;  // null: the parameter has no gradient

  /// Returns a text such as "a gradient of F32 [4]".
  [[nodiscard]] std::string words(const char* noun) const {
    if (tensor == nullptr) return fmt::format("no {}", noun);
    return fmt::format("a {} of {}{}", noun, to_string(TensorSpec{tensor->dtype(), tensor->shape()}),
                       tensor->device().is_host() ? "" : " on a device");
  }
};

struct Bucket {
  std::vector<const Tensor*> tensors;
  std::size_t bytes = 0;
};

void check(const AveragedTensor& item) {
  try {
    merge::check_reducible(collectives::combine_of(ReduceOp::average), item.tensor->dtype());
    if (!item.tensor->view().is_contiguous()) throw Error(ErrorKind::invalid_argument, "its tensor must be contiguous");
    if (item.tensor->nbytes() != 0) (void)item.tensor->mutable_data();
  } catch (const Error& error) {
    throw error.with_context(fmt::format("parameter {}", in_quotes(*item.name)));
  }
}

std::vector<Bucket> buckets_of(std::span<const AveragedTensor> items) {
  std::vector<Bucket> buckets;
  std::map<DType, std::size_t> open;  // for each dtype: the bucket that may have room
  for (const AveragedTensor& item : items) {
    if (item.tensor == nullptr || item.tensor->nbytes() == 0) continue;
    const std::size_t bytes = item.tensor->nbytes();
    const auto found = open.find(item.tensor->dtype());
    if (!item.tensor->device().is_host() || bytes > bucket_bytes) {
      buckets.push_back({{item.tensor}, bytes});
    } else if (found != open.end() && buckets[found->second].bytes + bytes <= bucket_bytes) {
      buckets[found->second].tensors.push_back(item.tensor);
      buckets[found->second].bytes += bytes;
    } else {
      open[item.tensor->dtype()] = buckets.size();
      buckets.push_back({{item.tensor}, bytes});
    }
  }
  return buckets;
}

std::uint64_t hash_of(std::span<const AveragedTensor> items) {
  std::uint64_t hash = items.size();
  for (const AveragedTensor& item : items) {
    hash = XXH3_64bits_withSeed(item.name->data(), item.name->size(), hash);
    if (item.tensor == nullptr) continue;
    const Shape& shape = item.tensor->shape();
    hash = XXH3_64bits_withSeed(shape.data(), shape.size() * sizeof shape[0], hash);
    const std::uint64_t facts[] = {shape.size() + 1, static_cast<std::uint64_t>(item.tensor->dtype()),
                                   item.tensor->device().is_host() ? 1U : 0U};
    hash = XXH3_64bits_withSeed(facts, sizeof facts, hash);
  }
  return hash;
}

/// Throws an error on all ranks that names the first difference between the lists.
[[noreturn]] void disagree(std::span<const AveragedTensor> items, ProcessGroup& group, const char* noun,
                           const CollectiveOptions& options) {
  Config mine = Config::array();
  for (const AveragedTensor& item : items) mine.push_back(Config::array({*item.name, item.words(noun)}));
  const std::vector<Config> all = group.all_gather_config(mine, options);
  const auto other = std::ranges::find_if(all, [&](const Config& list) { return list != all[0]; });
  const auto rank = static_cast<int>(other - all.begin());
  const ConfigArray& first = all[0].as_array();
  const ConfigArray& second = other->as_array();
  const auto place = static_cast<std::size_t>(std::ranges::mismatch(first, second).in1 - first.begin());
  const auto words = [&](const ConfigArray& list, int of) {
    const std::string who = group::name_of(group.group().info(of));
    if (place == list.size()) return fmt::format("{} has only {} parameters", who, place);
    return fmt::format("{} has {} with {}", who, in_quotes(list[place].at(0).as_string()),
                       list[place].at(1).as_string());
  };
  const ConfigArray& longer = place < first.size() ? first : second;
  throw group::error_of(group.group().info(rank), ErrorKind::rank_mismatch,
                        fmt::format("parameter {}: {}, and {}. Pass the same parameters in the same order on all ranks",
                                    in_quotes(longer[place].at(0).as_string()), words(first, 0), words(second, rank)));
}

void average(std::span<const AveragedTensor> items, ProcessGroup& group, const char* noun,
             const CollectiveOptions& options) {
  std::vector<Bucket> buckets;
  Tensor copies;
  const auto trouble = group::attempt(group.group(), [&] {
    for (const AveragedTensor& item : items)
      if (item.tensor != nullptr) check(item);
    buckets = buckets_of(items);
    std::size_t most = 0;
    for (const Bucket& bucket : buckets)
      if (bucket.tensors.size() > 1) most = std::max(most, bucket.bytes);
    copies = Tensor::allocate(DType::u8, {static_cast<std::int64_t>(most)});
  });

  const std::vector<std::uint64_t> mine{hash_of(items), trouble ? 1U : 0U};
  const Tensor gathered = group.all_gather(view_of(mine), 0, options);
  const std::span<const std::uint64_t> all = gathered.values<std::uint64_t>();
  for (std::size_t i = 0; i < all.size(); i += 2)
    if (all[i + 1] != 0) group::inside(group.group()).agree(trouble, collectives::waits(options, "averaging"));
  for (std::size_t i = 0; i < all.size(); i += 2)
    if (all[i] != all[0]) disagree(items, group, noun, options);

  for (const Bucket& bucket : buckets) {
    if (bucket.tensors.size() == 1) {
      group.all_reduce(*bucket.tensors[0], ReduceOp::average, options);
      continue;
    }
    const DType dtype = bucket.tensors[0]->dtype();
    std::byte* at = copies.mutable_data();
    const Tensor joined(TensorView(dtype, {static_cast<std::int64_t>(bucket.bytes / itemsize(dtype))}, at),
                        copies.owner(), at);
    for (const Tensor* tensor : bucket.tensors) {
      std::memcpy(at, tensor->data(), tensor->nbytes());
      at += tensor->nbytes();
    }
    group.all_reduce(joined, ReduceOp::average, options);
    at = joined.mutable_data();
    for (const Tensor* tensor : bucket.tensors) {
      std::memcpy(tensor->mutable_data(), at, tensor->nbytes());
      at += tensor->nbytes();
    }
  }
}

}  // namespace

void average_gradients(std::span<const Parameter> model, ProcessGroup& group, const CollectiveOptions& options) {
  std::vector<AveragedTensor> items;
  for (const Parameter& parameter : model)
    items.push_back({&parameter.name, parameter.gradient ? &*parameter.gradient : nullptr});
  average(items, group, "gradient", options);
}

void average_models(std::span<const Parameter> model, ProcessGroup& group, const CollectiveOptions& options) {
  std::vector<AveragedTensor> items;
  for (const Parameter& parameter : model) items.push_back({&parameter.name, &parameter.value});
  average(items, group, "value", options);
}

}  // namespace muster::roles
