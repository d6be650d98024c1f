// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <string>
#include <vector>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "muster/log.hpp"

using namespace muster;

TEST_CASE("an error keeps its facts when context is added") {
  const Error error(ErrorKind::peer_lost, "rank 2 died",
                    {.rank = 2, .pid = 4711, .host = "one", .path = "out/x", .os_error = 5});
  const Error outer = error.with_context("gathering");
  CHECK(outer.kind() == ErrorKind::peer_lost);
  CHECK(std::string(outer.what()) == "gathering: rank 2 died");
  CHECK(outer.rank() == 2);
  CHECK(outer.pid() == 4711);
  CHECK(outer.host() == "one");
  CHECK(outer.path() == "out/x");
  CHECK(outer.os_error() == 5);
}

TEST_CASE("each kind of error has a name of its own") {
  std::vector<std::string> names;
  for (int kind = 0; kind <= static_cast<int>(ErrorKind::cancelled); ++kind) {
    const std::string name(to_string(static_cast<ErrorKind>(kind)));
    CHECK(!name.empty());
    for (const std::string& other : names) CHECK(name != other);
    names.push_back(name);
  }
  CHECK(to_string(ErrorKind::peer_lost) == "peer lost");
}

TEST_CASE("the log hook gets what reaches its level, and the default comes back") {
  std::vector<std::string> seen;
  set_log_hook([&](LogLevel level, std::string_view message) {
    seen.push_back(std::string(to_string(level)) + ":" + std::string(message));
  });
  CHECK(!log_enabled(LogLevel::debug));
  CHECK(log_enabled(LogLevel::info));
  log(LogLevel::debug, "too low");
  log(LogLevel::info, "one");
  log(LogLevel::error, "two");
  set_log_hook({});
  CHECK(seen == std::vector<std::string>{"info:one", "error:two"});
  CHECK(log_enabled(LogLevel::error));
}

TEST_CASE("MUSTER_LOG sets the level of the default; words that are no level do not") {
  ::setenv("MUSTER_LOG", "debug", 1);
  set_log_hook({});
  CHECK(log_enabled(LogLevel::debug));
  ::setenv("MUSTER_LOG", "loud", 1);
  set_log_hook({});
  CHECK(!log_enabled(LogLevel::info));
  CHECK(log_enabled(LogLevel::warning));
  ::unsetenv("MUSTER_LOG");
  set_log_hook({});
}
