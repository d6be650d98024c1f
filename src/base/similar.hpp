// SPDX-License-Identifier: Apache-2.0
#pragma once
// Names that resemble a name that does not exist, for messages.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace muster {

/// Returns the indices of the candidates that resemble `name` most: a few letters differ, or the candidate contains the
/// name. Looks at the first 20,000 candidates. At most `most` are returned.
std::vector<std::size_t> similar_to(std::string_view name, std::span<const std::string_view> candidates,
                                    std::size_t most = 3);

/// Returns `did you mean "a", "b" or "c"?`; empty if no candidate resembles the name.
std::string did_you_mean(std::string_view name, std::span<const std::string_view> candidates);

}  // namespace muster
