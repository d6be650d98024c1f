// SPDX-License-Identifier: Apache-2.0
#include "src/core/quoted.hpp"

#include <fmt/format.h>

namespace muster {
namespace {

constexpr std::size_t longest = 200;

void append_escaped(std::string& out, std::string_view text) {
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", byte);
    } else {
      if (c == '"' || c == '\\') out.push_back('\\');
      out.push_back(c);
    }
  }
}

}  // namespace

std::string in_quotes(std::string_view text) {
  std::string out = "\"";
  if (text.size() <= longest) {
    append_escaped(out, text);
  } else {
    append_escaped(out, text.substr(0, longest / 2));
    out += "...";
    append_escaped(out, text.substr(text.size() - longest / 2));
  }
  out.push_back('"');
  return out;
}

}  // namespace muster
