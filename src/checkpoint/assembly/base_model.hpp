// SPDX-License-Identifier: Apache-2.0
#pragma once
// The config of an export's result: it is checked against the tensors and updated.

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>
#include "muster/config.hpp"
#include "src/checkpoint/assembly/request.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/plan/arrangement.hpp"

namespace muster {

// Compares the names, dtypes and shapes of a result with those of its base model. If a checkpoint lacks tensors, or has
// them under other names, programs load it with random weights in their place.

/// Tensors by name. A tensor has no dtype and shape if its file cannot be read. The map is empty if the directory has
/// no weights.
using BaseTensors = std::map<std::string, std::optional<TensorSpec>, std::less<>>;

/// Reads the tensors of a model's directory. If a file cannot be read (a Git LFS file that was not fetched), returns
/// only the names in the index, and adds a note. Throws Error(not_found | io) if the directory does not exist or cannot
/// be read.
BaseTensors base_tensors(const std::string& directory, std::vector<std::string>& notes);

/// Removes the prefixes that wrappers (DistributedDataParallel, FSDP, torch.compile, PEFT, Lightning) add to names of
/// tensors. Shards that Muster wrote keep their names. If there is a base, a prefix of all names is removed only if
/// more names then match the base. Adds a note for each removed prefix. Throws Error(invalid_argument) if two names
/// become the same.
void remove_wrappers(const MergePlan& plan, std::vector<ShardListing>& listings, const BaseTensors& base,
                     std::vector<std::string>& notes);

/// Compares the result with the base. Throws Error(invalid_argument) in these cases:
///  - A tensor exists on one side only.
///  - A tensor has another shape.
///  - A tensor has another dtype. Exceptions: the request casts tensors; or all floating point tensors of the result
///    have one dtype, and no other tensor differs.
/// Not compared are tied heads, buffers that programs compute, adapters, quantised weights if the other side has plain
/// ones, and tensors that the request does not select. Without the weights of the base, and with a base or a plan, the
/// layers of one kind must have the same names.
void compare_with_base(const Request& request, const Config* config, std::span<const NamedSpec> model,
                       const BaseTensors& base, std::vector<std::string>& notes);

/// Decides which tensors of the result a request selects.
class TensorSelection {
 public:
  explicit TensorSelection(const Request& request)
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

/// Throws Error(invalid_argument): the request selects no tensor.
[[noreturn]] void refuse_selection(const Request& request);

/// Checks the config.json that will be written next to `model`. Throws Error(invalid_argument) if it states that the
/// head is not tied to the embeddings, and the model has no head.
void check_base(const Config& config, std::span<const NamedSpec> model);

/// Leaves out a tied head. Applies only if the result has both a head and embeddings. Either the config must tie them,
/// or the config lacks the key and the base has no head. The head must then be bit-identical to the embeddings, as with
/// the action "tie". A head that cannot be compared, because its layout differs, is kept, with a note.
/// Throws Error(invalid_argument) if shapes or dtypes differ.
void leave_out_tied_head(const Config& config, const BaseTensors& base, Arrangement& arrangement,
                         std::vector<std::string>& notes);

/// Whether the dtype is one in which models are loaded: F16, BF16, F32 or F64.
bool is_wide_float(DType dtype);
/// Returns the floating point dtype that most elements have; nullopt if no tensor has such a dtype.
std::optional<DType> most_used_float(std::span<const NamedSpec> model);

/// Converts a tensor that is left out of an arrangement to its entry in the report.
DroppedTensor to_dropped(ArrangedTensor tensor, std::string reason);

/// Returns the text of config.json for these tensors: with the dtype that most of their elements have, and without
/// "quantization_config" if no tensor is quantised. Every other byte remains unchanged. Returns nullopt if `text` needs
/// no change. Adds the changes to `notes`.
std::optional<std::string> updated_config(const std::string& text, std::span<const NamedSpec> model,
                                          std::vector<std::string>& notes);

}  // namespace muster
