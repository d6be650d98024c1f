// SPDX-License-Identifier: Apache-2.0
#pragma once
// Names from files in messages: one line, whatever the name is.

#include <string>
#include <string_view>

namespace muster {

/// `text` in double quotes; control characters and quotes escaped, the middle of a very long one left out.
std::string in_quotes(std::string_view text);

}  // namespace muster
