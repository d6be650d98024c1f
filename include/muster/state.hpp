// SPDX-License-Identifier: Apache-2.0
#pragma once
// State: a config and named weights, which is what files hold; and the way between it and a config with tensors at its
// leaves. Semantics: ModelOpt's split of a layer config into JSON and a state dict, without its collisions.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/config.hpp"
#include "muster/tensor.hpp"

namespace muster {

using NamedTensor = std::pair<std::string, Tensor>;

/// JSON values and the tensors they refer to. Names are unique.
struct State {
  Config config;                     ///< no tensors: where one was, {"$tensor": name}
  std::vector<NamedTensor> weights;  ///< in the order of the tree
};

/// Takes the tensors out of a tree. A weight's name is its path ("layers.0.weight"); where two paths spell the same
/// name, later ones get "#2", "#3". Objects of the user's own that look like a reference are escaped. Tensors are
/// shared, not copied. A tensor whose path spells nothing (a tree that is one tensor) is "tensor". Local. Throws
/// Error(argument) on keys or strings that are not UTF-8, and on nesting beyond max_config_depth.
State split(const Config& config);

/// Puts the tensors back: join(split(c)) == c. Throws Error(corrupt) on a reference to a name that is not there or used
/// twice, and on a weight without a reference.
Config join(const State& state);

/// JSON text of a tree without tensors: UTF-8; NaN, infinities and NaN payloads as {"$float": ...}, so that parse_json
/// gives the same tree; objects of the user's own that look like that are escaped. `indent` < 0 puts all on one line.
/// Throws Error(argument) if a leaf is a tensor or a string is not UTF-8.
std::string to_json(const Config& config, int indent = -1);

/// The tree of a JSON text. Duplicate keys, trailing text, nesting beyond max_config_depth and invalid UTF-8 are
/// Error(corrupt) with line and column; so are integers beyond 64 bits.
Config parse_json(std::string_view text);

}  // namespace muster
