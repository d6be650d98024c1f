// SPDX-License-Identifier: Apache-2.0
#include "muster/compat/group_coordinator.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "src/base/escaped.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/collectives/engine.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/group.hpp"

namespace muster {
namespace {

std::string numbered(std::string_view name) {
  static ForkMutex mutex;
  static auto* const counts = new std::map<std::string, int, std::less<>>;
  const std::lock_guard lock(mutex);
  return fmt::format("{}:{}", name, (*counts)[std::string(name)]++);
}

/// Returns the list that contains this rank, or an empty list.
std::vector<int> own_list(std::span<const std::vector<int>> lists, int rank) {
  const auto own =
      std::ranges::find_if(lists, [rank](const auto& list) { return std::ranges::find(list, rank) != list.end(); });
  return own == lists.end() ? std::vector<int>{} : *own;
}

Tensor with_shape(const Tensor& tensor, Shape shape) {
  std::byte* const data = tensor.nbytes() == 0 ? nullptr : tensor.mutable_data();
  return {TensorView(tensor.dtype(), std::move(shape), data), tensor.owner(), data};
}

/// Returns whether a stage sends slices of a tensor.
bool is_sliced(const std::string& key, const Tensor& tensor, const GroupCoordinator::TensorDictOptions& options) {
  if (options.all_gather_group == nullptr || options.all_gather_group->world_size() == 1) return false;
  const std::int64_t count = tensor.view().element_count();
  const bool divides = count % options.all_gather_group->world_size() == 0 && !is_packed(tensor.dtype());
  const auto wish = options.all_gather_tensors.find(key);
  if (wish == options.all_gather_tensors.end()) return divides && count != 0;
  if (wish->second && !divides)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("tensor {}: its {} elements cannot be sent in {} slices", in_quotes(key), count,
                            options.all_gather_group->world_size()));
  return wish->second;
}

}  // namespace

GroupCoordinator::GroupCoordinator(std::span<const std::vector<int>> group_ranks, Group& world, std::string_view name,
                                   const GroupCoordinatorOptions& options)
    : ranks_(own_list(group_ranks, world.rank())), unique_name_(numbered(name)) {
  // The ranks agree on all lists, not only on their own.
  Config lists = Config::array();
  for (const std::vector<int>& list : group_ranks) {
    Config numbers = Config::array();
    for (const int rank : list) numbers.push_back(rank);
    lists.push_back(std::move(numbers));
  }
  lists = Config::array({std::move(lists), options.use_message_queue_broadcaster});
  ProcessGroup all(world, options.wait);
  const std::vector<Config> everybodys = all.all_gather_config(lists, options.wait);
  for (std::size_t rank = 0; rank < everybodys.size(); ++rank)
    if (everybodys[rank] != everybodys[0])
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("groups {}: ranks 0 and {} pass different lists or options", in_quotes(name), rank),
                  {.rank = static_cast<int>(rank)});
  std::vector<int> members;
  for (const std::vector<int>& list : group_ranks) members.insert(members.end(), list.begin(), list.end());
  std::ranges::sort(members);
  for (int rank = 0; rank < world.size(); ++rank)
    if (members.size() != static_cast<std::size_t>(world.size()) || members[static_cast<std::size_t>(rank)] != rank)
      throw Error(
          ErrorKind::invalid_argument,
          fmt::format("groups {}: the lists must contain each of the {} ranks once", in_quotes(name), world.size()));
  group_ = all.split(ranks_, options.wait);
  if (options.use_message_queue_broadcaster)
    queue_ = std::make_unique<MessageQueue>(create_mq_broadcaster({.wait = options.wait}));
}

Tensor GroupCoordinator::all_reduce(const TensorView& tensor, const CollectiveOptions& options) {
  return *collectives::engine_of(*group_).all_reduce({"all_reduce", ReduceOp::sum, {}, tensor.dtype(), &tensor.shape()},
                                                     nullptr, tensor, options);
}

Tensor GroupCoordinator::all_gather(const TensorView& tensor, int dim, const CollectiveOptions& options) {
  return group_->all_gather(tensor, dim, options);
}

Tensor GroupCoordinator::all_gatherv(const TensorView& tensor, int dim, std::span<const std::int64_t> sizes,
                                     const CollectiveOptions& options) {
  return group_->all_gatherv(tensor, dim, sizes, options);
}

std::vector<Tensor> GroupCoordinator::all_gatherv(std::span<const TensorView> tensors, int dim,
                                                  std::span<const std::int64_t> sizes,
                                                  const CollectiveOptions& options) {
  std::vector<Tensor> all;
  for (const TensorView& tensor : tensors) all.push_back(group_->all_gatherv(tensor, dim, sizes, options));
  return all;
}

Tensor GroupCoordinator::reduce_scatter(const TensorView& tensor, int dim, const CollectiveOptions& options) {
  return group_->reduce_scatter(tensor, dim, ReduceOp::sum, options);
}

Tensor GroupCoordinator::reduce_scatterv(const TensorView& tensor, std::span<const std::int64_t> sizes, int dim,
                                         const CollectiveOptions& options) {
  return group_->reduce_scatterv(tensor, sizes, dim, ReduceOp::sum, options);
}

std::optional<Tensor> GroupCoordinator::gather(const TensorView& tensor, int dst, int dim,
                                               const CollectiveOptions& options) {
  return group_->gather(tensor, dst, dim, options);
}

void GroupCoordinator::broadcast(const Tensor& tensor, int src, const CollectiveOptions& options) {
  group_->broadcast(tensor, src, options);
}

Config GroupCoordinator::broadcast_object(const Config& object, int src, const CollectiveOptions& options) {
  if (queue_ && src == 0) {
    if (!is_first_rank()) return queue_->get_config(options);
    queue_->put_config(object, options);
    return object;
  }
  return group_->broadcast_config(object, src, options);
}

ConfigObject GroupCoordinator::broadcast_tensor_dict(const ConfigObject& dict, int src,
                                                     const CollectiveOptions& options) {
  const Config received = group_->broadcast_config(src == rank_in_group() ? Config(dict) : Config(), src, options);
  return received.as_object();
}

MessageQueue GroupCoordinator::create_mq_broadcaster(QueueOptions options) {
  options.external_writer = group_->broadcast_config(options.external_writer, options.writer, options.wait).as_string();
  return MessageQueue(group_->group(), options);
}

GroupCoordinator::SingleReaderQueues GroupCoordinator::create_single_reader_mq_broadcasters(int reader_rank,
                                                                                            QueueOptions options) {
  SingleReaderQueues queues;
  options.reader = reader_rank;
  options.external_writer.clear();
  for (options.writer = 0; options.writer < world_size(); ++options.writer) {
    auto queue = std::make_shared<MessageQueue>(group_->group(), options);
    if (options.writer == rank_in_group()) queues.own = queue;
    if (reader_rank == rank_in_group()) queues.by_writer.push_back(std::move(queue));
  }
  return queues;
}

void GroupCoordinator::prepare_communication_buffer_for_model(std::span<const TensorSpec> tensors,
                                                              const CollectiveOptions& options) {
  // Shared results use memory that is reused. Two results of the maximum size allocate it: a rank may begin the next
  // call before another one has released its last result.
  Tensor largest;
  group::inside(group_->group())
      .together({.timeout = options.timeout, .stop = options.stop, .phase = "preparing buffers"}, [&] {
        std::size_t bytes = 0;
        for (const TensorSpec& spec : tensors) bytes = std::max(bytes, byte_size(spec.dtype, spec.shape));
        largest = Tensor::take(std::vector<std::uint8_t>(bytes));
      });
  if (group_->backend() != "shared memory") return;
  Tensor first = group_->all_gather_shared(largest, options);
  (void)group_->all_gather_shared(largest, options);
  first = {};
  group_->barrier(options);
}

void GroupCoordinator::send_object(const Config& object, int dst, const CollectiveOptions& options) {
  group_->send_config(object, dst, 0, options);
}

Config GroupCoordinator::recv_object(int src, const CollectiveOptions& options) {
  return group_->recv_config(src, 0, options);
}

void GroupCoordinator::send(const TensorView& tensor, std::optional<int> dst, const CollectiveOptions& options) {
  group_->send(tensor, dst.value_or(next()), 0, options);
}

Tensor GroupCoordinator::recv(const TensorSpec& spec, std::optional<int> src, const CollectiveOptions& options) {
  Tensor tensor = Tensor::allocate(spec.dtype, spec.shape);
  group_->recv(tensor, src.value_or(prev()), 0, options);
  return tensor;
}

// A dict is sent as an array: the shapes of the tensors that are sent as slices, all values, the index of the sender's
// slice, and the number of slices.

void GroupCoordinator::send_tensor_dict(const ConfigObject& dict, std::optional<int> dst,
                                        const TensorDictOptions& options) {
  Config shapes = Config::object();
  Config values = Config::object();
  const GroupCoordinator* const slices = options.all_gather_group;
  for (const auto& [key, value] : dict) {
    if (!value.is_tensor() || !is_sliced(key, value.as_tensor(), options)) {
      values[key] = value;
      continue;
    }
    const Tensor& tensor = value.as_tensor();
    Config extents = Config::array();
    for (const std::int64_t extent : tensor.shape()) extents.push_back(extent);
    shapes[key] = std::move(extents);
    const TensorView view = tensor.view();
    const Tensor whole = view.is_contiguous() ? tensor : Tensor::copy_of(view);
    const std::int64_t count = view.element_count() / slices->world_size();
    const std::int64_t begin = count * slices->rank_in_group();
    values[key] = Tensor(TensorView(whole.dtype(), {view.element_count()}, whole.data()).slice(0, begin, begin + count),
                         whole.owner());
  }
  Config slice =
      Config::array({slices == nullptr ? 0 : slices->rank_in_group(), slices == nullptr ? 1 : slices->world_size()});
  group_->send_config(Config::array({std::move(shapes), std::move(values), std::move(slice)}), dst.value_or(next()), 0,
                      options.wait);
}

namespace {

/// A received dict, in which some tensors are slices.
struct SlicedDict {
  ConfigObject values;
  std::map<std::string, Shape> shapes;  // shapes of the tensors that were sent as slices
};

Shape shape_of(const Config& extents) {
  Shape shape;
  for (const Config& extent : extents.as_array()) shape.push_back(extent.as_int());
  return shape;
}

/// Throws Error(rank_mismatch) unless the message is a dict, and its slices are those that this rank expects.
SlicedDict dict_of(const ReceivedConfig& message, const RankInfo& sender, const GroupCoordinator* slices) {
  const auto refuse = [&](const std::string& words) {
    throw group::error_of(sender, ErrorKind::rank_mismatch,
                          fmt::format("{} sent {}. Pass the same all_gather_group and options on both sides",
                                      group::name_of(sender), words));
  };
  const Config& all = message.config;
  const auto is_array = [](const Config& config, std::size_t size) {
    return config.is_array() && config.size() == size;
  };
  if (!is_array(all, 3) || !all.at(0).is_object() || !all.at(1).is_object() || !is_array(all.at(2), 2))
    refuse("a message that is not a dict of tensors");
  SlicedDict dict{all.at(1).as_object(), {}};
  const int rank = slices == nullptr ? 0 : slices->rank_in_group();
  const int count = slices == nullptr ? 1 : slices->world_size();
  if (all.at(0).size() != 0 && (all.at(2).at(0).as_int() != rank || all.at(2).at(1).as_int() != count))
    refuse(fmt::format("slice {} of {}, but slice {} of {} was expected", all.at(2).at(0).as_int(),
                       all.at(2).at(1).as_int(), rank, count));
  for (const auto& [key, extents] : all.at(0).as_object()) {
    Shape shape = shape_of(extents);
    const Config* const value = dict.values.find(key);
    if (value == nullptr || !value->is_tensor() ||
        value->as_tensor().nbytes() * static_cast<std::size_t>(count) != byte_size(value->as_tensor().dtype(), shape))
      refuse(fmt::format("a slice of {} that does not fit its shape", in_quotes(key)));
    dict.shapes.emplace(key, std::move(shape));
  }
  return dict;
}

}  // namespace

ConfigObject GroupCoordinator::recv_tensor_dict(std::optional<int> src, const TensorDictOptions& options) {
  SlicedDict dict;
  GroupCoordinator* const slices = options.all_gather_group;
  const auto receive = [&] {
    const ReceivedConfig message = group_->recv_message(src.value_or(prev()), 0, options.wait);
    dict = dict_of(message, group_->group().info(message.from), slices);
  };
  if (slices == nullptr || slices->world_size() == 1) {
    receive();
  } else {
    // The ranks that gather wait for each other, so a rank that fails reports it to the others.
    Group& others = slices->process_group().group();
    const group::GroupLock use(others);
    group::inside(others).together(collectives::waits(options.wait, "recv_tensor_dict"), receive);
    slices->check_same_slices(dict.values, dict.shapes, options.wait);
  }
  for (const auto& [key, shape] : dict.shapes) {
    Tensor whole = dict.values[key].as_tensor();
    if (slices != nullptr) whole = slices->all_gather(whole, 0, options.wait);
    dict.values[key] = with_shape(whole, shape);
  }
  return std::move(dict.values);
}

void GroupCoordinator::check_same_slices(const ConfigObject& values, const std::map<std::string, Shape>& shapes,
                                         const CollectiveOptions& options) {
  // In the order of the keys, because the dicts of the senders may have different orders.
  Config mine = Config::array();
  for (const auto& [key, shape] : shapes)
    mine.push_back(
        fmt::format("{} {}", in_quotes(key), to_string(TensorSpec{values.find(key)->as_tensor().dtype(), shape})));
  const std::vector<Config> all = group_->all_gather_config(mine, options);
  const auto other = std::ranges::find_if(all, [&](const Config& theirs) { return theirs != all[0]; });
  if (other == all.end()) return;
  const auto words = [](const Config& list, const Config& without) {
    for (const Config& each : list.as_array())
      if (std::ranges::find(without.as_array(), each) == without.as_array().end()) return each.as_string();
    return std::string("no other tensor");
  };
  const RankInfo& first = group_->group().info(0);
  const RankInfo& info = group_->group().info(static_cast<int>(other - all.begin()));
  throw group::error_of(
      info, ErrorKind::rank_mismatch,
      fmt::format("{} gathers {}, but {} gathers {}. Send the same tensors on all ranks of a stage",
                  group::name_of(first), words(all[0], *other), group::name_of(info), words(*other, all[0])));
}

GroupCoordinator::Dispatched GroupCoordinator::dispatch(std::span<const TensorView> tensors,
                                                        const CollectiveOptions& options) {
  const std::int64_t rows = tensors.empty() || tensors[0].shape().empty() ? 0 : tensors[0].shape()[0];
  const std::vector<std::int64_t> mine{rows};
  const Tensor all = group_->all_gather(view_of(mine), 0, options);
  Dispatched result;
  result.sizes.assign(all.values<std::int64_t>().begin(), all.values<std::int64_t>().end());
  result.tensors = all_gatherv(tensors, 0, result.sizes, options);
  return result;
}

Tensor GroupCoordinator::combine(const TensorView& hidden, std::span<const std::int64_t> sizes,
                                 const CollectiveOptions& options) {
  return group_->reduce_scatterv(hidden, sizes, 0, ReduceOp::sum, options);
}

}  // namespace muster
