// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/link_name.hpp"

#include <fmt/core.h>

namespace muster::statefile {

std::string link_name(std::string_view name) {
  const bool is_dots = name == "." || name == "..";
  std::string link;
  link.reserve(name.size());
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (is_dots || c == '/' || c == '%' || byte < 0x20 || byte == 0x7f) {
      fmt::format_to(std::back_inserter(link), "%{:02X}", byte);
    } else {
      link.push_back(c);
    }
  }
  return link;
}

}  // namespace muster::statefile
