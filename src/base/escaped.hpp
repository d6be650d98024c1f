// SPDX-License-Identifier: Apache-2.0
#pragma once
// Escapes text from outside for a terminal, a log or an error message. Such text must not be able to move the cursor,
// colour the screen, hide other text or break a line.

#include <cstddef>
#include <string>
#include <string_view>

#include "muster/error.hpp"

namespace muster {

struct Character {
  char32_t code = 0;
  std::size_t bytes = 1;
  bool is_valid = false;  ///< false: `code` is one byte that is not UTF-8
};
/// Returns the first character of a text, which must not be empty.
Character first_character(std::string_view text) noexcept;

/// Returns whether the text is well-formed UTF-8: no overlong forms, no surrogates, no code points above U+10FFFF.
bool is_utf8(std::string_view text) noexcept;

/// Returns whether a character is a control character (C0, DEL, C1), or reorders or hides text (bidirectional marks,
/// zero-width characters).
bool is_dangerous(char32_t code) noexcept;

/// Writes dangerous characters and bytes that are not UTF-8 as \n, \t, \x1b or \u202e, and puts a backslash before the
/// characters of `also`. All other text is unchanged. Without `also`, text that was already escaped is unchanged.
std::string escaped(std::string_view text, std::string_view also = {});

/// Returns `text` in double quotes, with control characters and quotes escaped. The middle of a very long text is left
/// out.
std::string in_quotes(std::string_view text);

/// Returns an error about a file, of the form `"PATH": doing: message`, with the path in its details. If `doing` is
/// empty, the form is `"PATH": message`.
Error file_error(ErrorKind kind, std::string_view doing, const std::string& path, std::string_view message,
                 int os_error = 0);

/// Runs work on the contents of a file. An error without a path is rethrown as a file_error.
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
