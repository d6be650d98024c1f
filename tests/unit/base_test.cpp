// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "muster/log.hpp"
#include "src/base/rare_log.hpp"

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

TEST_CASE("each kind of error has its own name") {
  std::vector<std::string> names;
  for (int kind = 0; kind <= static_cast<int>(ErrorKind::cancelled); ++kind) {
    const std::string name(to_string(static_cast<ErrorKind>(kind)));
    CHECK(!name.empty());
    for (const std::string& other : names) CHECK(name != other);
    names.push_back(name);
  }
  CHECK(to_string(ErrorKind::peer_lost) == "peer lost");
}

TEST_CASE("the log hook gets messages up to its level, and the default is restored") {
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

TEST_CASE("messages that other peers cause are logged once per second, and the next one has the number of the others") {
  std::vector<std::string> seen;
  set_log_hook([&](LogLevel, std::string_view message) { seen.emplace_back(message); });
  RareLog rare(LogLevel::warning);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 5000; ++i) rare("a stranger");
  const auto seconds = std::chrono::ceil<std::chrono::seconds>(std::chrono::steady_clock::now() - begin).count();
  CHECK(seen.size() <= static_cast<std::size_t>(seconds) + 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  rare("another one");
  set_log_hook({});
  std::size_t counted = 0;
  for (const std::string& line : seen) {
    const std::size_t left_out = line.find('(');
    counted += 1 + (left_out == std::string::npos ? 0 : std::stoul(line.substr(left_out + 1)));
  }
  CHECK(counted == 5001);
}

TEST_CASE("MUSTER_LOG sets the default level; an unknown level does not") {
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
