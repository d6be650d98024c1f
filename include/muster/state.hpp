// SPDX-License-Identifier: Apache-2.0
#pragma once
// State: a config and named weights, the contents of a state file; and the conversion between it and a config with
// tensors as leaves. Semantics: the split of a layer config into JSON and a state dict in ModelOpt, without its name
// collisions.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/config.hpp"
#include "muster/tensor.hpp"

namespace muster {

/// A tensor and its name.
using NamedTensor = std::pair<std::string, Tensor>;

/// JSON values and the tensors that they refer to. Names are unique.
struct State {
  Config config;                     ///< without tensors; {"$tensor": name} replaces each
  std::vector<NamedTensor> weights;  ///< in tree order
};

/// Replaces the tensors of a tree by references. The name of a weight is its path ("layers.0.weight"). If several paths
/// give the same name, the later ones get the suffix "#2", "#3". A tree that is a single tensor gives the name
/// "tensor". Objects of the user that look like a reference are escaped. Tensors are shared, not copied. Local. Throws
/// Error(invalid_argument) if keys or strings are not UTF-8, or the nesting exceeds max_config_depth.
State split(const Config& config);

/// Inserts the tensors again: join(split(c)) == c. Local. Throws Error(corrupt) if a reference names a missing weight
/// or one that was already used, or if a weight has no reference.
Config join(const State& state);

/// Returns the JSON text (UTF-8) of a tree without tensors. NaN (with its payload) and infinities are written as
/// {"$float": ...}, so that parse_json() restores the same tree. Objects of the user that look like that are escaped. A
/// negative `indent` writes a single line. Local. Throws Error(invalid_argument) if a leaf is a tensor or a string is
/// not UTF-8.
std::string to_json(const Config& config, int indent = -1);

/// Parses a JSON text. Local. Throws Error(corrupt), with line and column, on duplicate keys, trailing text, nesting
/// beyond max_config_depth, invalid UTF-8 and integers beyond 64 bits.
Config parse_json(std::string_view text);

}  // namespace muster
