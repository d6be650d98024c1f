// SPDX-License-Identifier: Apache-2.0
#pragma once
// Functions that return the error of a call that must fail.

#include <doctest/doctest.h>

#include <string>
#include <string_view>

#include "muster/error.hpp"

namespace muster::test {

/// Makes the call, requires an Error of this kind with a message of one line, and returns it.
template <class Call>
Error thrown_by(ErrorKind kind, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string words = error.what();
    INFO(words);
    CHECK(to_string(error.kind()) == to_string(kind));
    CHECK(words.find('\n') == std::string::npos);
    return error;
  }
  FAIL_CHECK("nothing was thrown");
  return {kind, ""};
}

/// Returns the message of that error.
template <class Call>
std::string words_of(ErrorKind kind, Call&& call) {
  return thrown_by(kind, call).what();
}

inline bool has(const std::string& words, std::string_view part) {
  if (words.find(part) != std::string::npos) return true;
  MESSAGE("no \"" << std::string(part) << "\" in: " << words);
  return false;
}

}  // namespace muster::test
