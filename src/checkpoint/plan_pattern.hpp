// SPDX-License-Identifier: Apache-2.0
#pragma once
// What patterns of plans are made of: globs without braces, and RE2. Everything here is local.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace re2 {
class RE2;
}

namespace muster {

inline constexpr std::size_t longest_pattern = 1024;

/// Throws Error(argument) beyond longest_pattern characters.
void check_pattern_length(std::string_view what, std::string_view text);

/// The globs that a glob with braces means, at least one. Throws Error(argument) as TensorPattern::glob does.
std::vector<std::string> expand_braces(const std::string& text);

/// Whether a glob (stars, no braces) fits all of `name`. Takes time in proportion to the product of their lengths at
/// most. `stars`, where given, gets what each star stands for as views of `name`: from the left on as little as it can;
/// what it holds is meaningless where the answer is false.
bool glob_matches(std::string_view glob, std::string_view name, std::vector<std::string_view>* stars = nullptr);

/// `bytes`: text and names are bytes and a dot is any of them; otherwise they are UTF-8. Throws Error(argument).
std::shared_ptr<const re2::RE2> compile_regex(const std::string& text, bool bytes);

}  // namespace muster
