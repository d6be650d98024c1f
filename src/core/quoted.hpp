// SPDX-License-Identifier: Apache-2.0
#pragma once
// Names from files in messages: one line, whatever the name is.

#include <string>
#include <string_view>

#include "muster/error.hpp"

namespace muster {

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
