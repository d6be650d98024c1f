// SPDX-License-Identifier: Apache-2.0
#pragma once
// The names, dtypes and shapes of a base model, and the comparison of a result with them. A checkpoint that lacks a
// tensor, or has all under other names, would be loaded with random weights.

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/request.hpp"
#include "src/checkpoint/shard_set.hpp"

namespace muster {

/// Tensors by name, without dtype and shape if their file is missing. Empty: the directory has no weights.
using BaseTensors = std::map<std::string, std::optional<TensorSpec>, std::less<>>;

/// Reads the names of the weights in a model's directory, or of their index alone. Weights that cannot be read (files
/// of Git LFS that were not fetched) are a note. Throws Error(not_found | io) if there is no such directory.
BaseTensors base_tensors(const std::string& directory, std::vector<std::string>& notes);

/// Takes the prefixes of wrappers (DistributedDataParallel, FSDP, torch.compile, PEFT, Lightning) out of the names of
/// ranks that are not Muster's own shards. With a base a prefix goes only if more names are the base's without it. A
/// note names each prefix. Throws Error(argument) if two names become the same.
void remove_wrappers(const MergePlan& plan, std::vector<ShardListing>& listings, const BaseTensors& base,
                     std::vector<std::string>& notes);

/// Holds the result against the base: a name that only one side has is Error(argument), and so is another shape, and
/// another dtype unless the request casts or all floating point tensors have one dtype. Exceptions are tied heads,
/// buffers that programs compute, adapters, and quantised weights of which the other side has the plain ones. Without
/// the base's weights, layers of one kind must have the same names if there is a base or a plan. Tensors that the
/// request does not select do not count.
void compare_with_base(const Request& request, const Config* config, std::span<const NamedSpec> model,
                       const BaseTensors& base, std::vector<std::string>& notes);

/// Whether a request selects a tensor of the result.
class Selection {
 public:
  explicit Selection(const Request& request)
      : is_all_(request.select.empty() && request.exclude.empty()),
        select_(TensorPattern::glob(request.select.empty() ? "*" : request.select)),
        exclude_(TensorPattern::glob(request.exclude)) {}
  [[nodiscard]] bool is_all() const noexcept { return is_all_; }
  [[nodiscard]] bool has(std::string_view name) const {
    return is_all_ || (select_.matches(name) && !exclude_.matches(name));
  }

 private:
  bool is_all_;
  TensorPattern select_;
  TensorPattern exclude_;
};

}  // namespace muster
