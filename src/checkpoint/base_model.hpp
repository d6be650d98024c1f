// SPDX-License-Identifier: Apache-2.0
#pragma once
// What stands around the tensors of an export: the config that goes with them, held against them and brought up to
// date.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/base_tensors.hpp"

namespace muster {

/// `config` is the config.json that will lie beside `model`. Throws Error(argument) if it says that the head is not
/// tied to the embeddings and there is none.
void check_base(const Config& config, std::span<const NamedSpec> model);

/// If the config ties the head to the embeddings, or does not have the key and the base has no head, and both are
/// there: the head is left out, and has to be bit for bit the embeddings, as with the action "tie". What cannot be
/// compared, because ranks were cut for it in another way, stays and is noted. Throws Error(argument) if they have
/// other shapes or dtypes.
void leave_out_tied_head(const Config& config, const BaseTensors& base, Arrangement& arrangement,
                         std::vector<std::string>& notes);

/// Models are loaded as one of these: F16, BF16, F32, F64.
bool is_wide_float(DType dtype);
/// That most elements have; none if there is no such tensor.
std::optional<DType> most_used_float(std::span<const NamedSpec> model);

/// What becomes of a tensor that is left out of an arrangement.
DroppedTensor to_dropped(ArrangedTensor tensor, std::string reason);

/// Returns the text of config.json for these tensors: with the dtype that most of their elements have, and without
/// "quantization_config" if no tensor is quantised. Every other byte stays. None if `text` is right as it is. `notes`
/// gets the changes.
std::optional<std::string> updated_config(const std::string& text, std::span<const NamedSpec> model,
                                          std::vector<std::string>& notes);

}  // namespace muster
