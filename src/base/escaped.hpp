// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text from outside on a terminal, in a log or in an error: nothing in it may move the cursor, colour the screen, hide
// other text or break a line.

#include <cstddef>
#include <string>
#include <string_view>

#include "muster/error.hpp"

namespace muster {

struct Character {
  char32_t code = 0;
  std::size_t bytes = 1;
  bool is_valid = false;  ///< else `code` is one byte that is no UTF-8
};
/// The one at the front of a text that is not empty.
Character first_character(std::string_view text) noexcept;

/// Well-formed UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
bool is_utf8(std::string_view text) noexcept;

/// Control characters (C0, DEL, C1), and what reorders or hides text (bidirectional marks, zero width).
bool is_dangerous(char32_t code) noexcept;

/// These and bytes that are no UTF-8 as \n, \t, \x1b or \u202e, the characters of `also` with a backslash before them,
/// everything else as it is. Without `also`, text that was escaped before stays the same.
std::string escaped(std::string_view text, std::string_view also = {});

/// `text` in double quotes; control characters and quotes escaped, the middle of a very long one left out.
std::string in_quotes(std::string_view text);

/// What went wrong with a file: "doing "PATH": words", with the path among the details.
Error file_error(ErrorKind kind, std::string_view doing, const std::string& path, std::string_view words,
                 int os_error = 0);

/// Runs work with what is in a file. What it throws without a path is thrown as a file_error.
template <class Work>
auto with_file(std::string_view doing, const std::string& path, const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const Error& error) {
    if (!error.path().empty()) throw;
    throw file_error(error.kind(), doing, path, error.what(), error.os_error());
  }
}

}  // namespace muster
