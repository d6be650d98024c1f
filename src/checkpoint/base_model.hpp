// SPDX-License-Identifier: Apache-2.0
#pragma once
// The config of an export's result: it is checked against the tensors and updated.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/base_tensors.hpp"

namespace muster {

/// Checks the config.json that will be written next to `model`. Throws Error(argument) if it states that the head is
/// not tied to the embeddings, and the model has no head.
void check_base(const Config& config, std::span<const NamedSpec> model);

/// Leaves out a tied head. Applies only if the result has both a head and embeddings. Either the config must tie them,
/// or the config lacks the key and the base has no head. The head must then be bit-identical to the embeddings, as with
/// the action "tie". A head that cannot be compared, because it is cut for ranks in another way, is kept, with a note.
/// Throws Error(argument) if shapes or dtypes differ.
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
