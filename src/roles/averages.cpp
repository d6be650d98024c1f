// SPDX-License-Identifier: Apache-2.0
// Averages of a model's tensors:
// 1. Each rank lists the tensors that it has to average, and assigns them to buckets. A large tensor has its own
//    bucket; small tensors of one dtype share buckets.
// 2. One all_gather exchanges a hash of the lists, and the status of each rank.
// 3. Each bucket is one all_reduce: in place, or of a copy that is written back.

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>

#include "muster/roles.hpp"
#include "src/collectives/arguments.hpp"
#include "src/collectives/engine.hpp"
#include "src/merge/reduce.hpp"
#include "src/sync/failing.hpp"
#include "src/sync/group.hpp"

namespace muster::roles {
namespace {

constexpr std::size_t bucket_bytes = 4 << 20;

/// One of the model's parameters, with the tensor that is averaged.
struct Item {
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

void check(const Item& item) {
  try {
    merge::check_reducible(collectives::combine_of(ReduceOp::average), item.tensor->dtype());
    if (!item.tensor->view().is_contiguous()) throw Error(ErrorKind::argument, "it must be contiguous");
    if (item.tensor->nbytes() != 0) (void)item.tensor->mutable_data();
  } catch (const Error& error) {
    throw error.with_context(fmt::format("parameter '{}'", *item.name));
  }
}

std::vector<Bucket> buckets_of(std::span<const Item> items) {
  std::vector<Bucket> buckets;
  std::map<DType, std::size_t> open;  // for each dtype: the bucket that may have room
  for (const Item& item : items) {
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

std::uint64_t hash_of(std::span<const Item> items) {
  std::uint64_t hash = items.size();
  for (const Item& item : items) {
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
[[noreturn]] void disagree(std::span<const Item> items, ProcessGroup& group, const char* noun,
                           const CollectiveOptions& options) {
  Config mine = Config::array();
  for (const Item& item : items) mine.push_back(Config::array({*item.name, item.words(noun)}));
  const std::vector<Config> all = group.all_gather_config(mine, options);
  const auto other = std::ranges::find_if(all, [&](const Config& list) { return list != all[0]; });
  const auto rank = static_cast<int>(other - all.begin());
  const ConfigArray& first = all[0].as_array();
  const ConfigArray& second = other->as_array();
  const auto place = static_cast<std::size_t>(std::ranges::mismatch(first, second).in1 - first.begin());
  const auto words = [&](const ConfigArray& list, int of) {
    const std::string who = sync::name_of(group.group().info(of));
    if (place == list.size()) return fmt::format("{} has only {} parameters", who, place);
    return fmt::format("{} has '{}' with {}", who, list[place].at(0).as_string(), list[place].at(1).as_string());
  };
  const ConfigArray& longer = place < first.size() ? first : second;
  throw sync::error_of(group.group().info(rank), ErrorKind::rank_mismatch,
                       fmt::format("parameter '{}': {}, and {}: all ranks give the same in the same order",
                                   longer[place].at(0).as_string(), words(first, 0), words(second, rank)));
}

void average(std::span<const Item> items, ProcessGroup& group, const char* noun, const CollectiveOptions& options) {
  std::vector<Bucket> buckets;
  Tensor copies;
  const auto trouble = sync::attempt(group.group(), [&] {
    for (const Item& item : items)
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
    if (all[i + 1] != 0) sync::inside(group.group()).agree(trouble, collectives::waits(options, "averaging"));
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
  std::vector<Item> items;
  for (const Parameter& parameter : model)
    items.push_back({&parameter.name, parameter.gradient ? &*parameter.gradient : nullptr});
  average(items, group, "gradient", options);
}

void average_models(std::span<const Parameter> model, ProcessGroup& group, const CollectiveOptions& options) {
  std::vector<Item> items;
  for (const Parameter& parameter : model) items.push_back({&parameter.name, &parameter.value});
  average(items, group, "value", options);
}

}  // namespace muster::roles
