// SPDX-License-Identifier: Apache-2.0
#include "src/core/quoted.hpp"

#include "src/base/escaped.hpp"

namespace muster {
namespace {

constexpr std::size_t longest = 200;

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr std::string_view also = "\"\\";
  const std::string inside = text.size() <= longest ? escaped(text, also)
                                                    : escaped(text.substr(0, longest / 2), also) + "..." +
                                                          escaped(text.substr(text.size() - longest / 2), also);
  return "\"" + inside + "\"";
}

Error file_error(ErrorKind kind, std::string_view doing, const std::string& path, std::string_view words,
                 int os_error) {
  return {kind,
          std::string(doing) + " " + in_quotes(path) + ": " + std::string(words),
          {.path = path, .os_error = os_error}};
}

}  // namespace muster
