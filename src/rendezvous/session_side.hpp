// SPDX-License-Identifier: Apache-2.0
#pragma once
// Code that the two sides of the state machine (session.hpp) share.

#include <fmt/core.h>

#include <chrono>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/base/fixed_string.hpp"
#include "src/group/progress.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/fd.hpp"
#include "src/rendezvous/session.hpp"

namespace muster::rendezvous {

// How long a rank waits after a failure: rank 0 until all ranks have received the cause, another rank until it has
// received rank 0's cause. The time is short if the user has interrupted the program.
inline constexpr milliseconds last_words{1000};
inline constexpr milliseconds interrupted_words{50};

inline milliseconds time_for_words(const Error& cause) {
  return cause.kind() == ErrorKind::cancelled ? interrupted_words : last_words;
}

/// Returns the time since `begin` for messages: "3.0 s".
inline std::string since(Clock::time_point begin) {
  return fmt::format("{:.1f} s", std::chrono::duration<double>(Clock::now() - begin).count());
}

inline std::string process_text(const Hello& hello) {
  return fmt::format("host {}, pid {}", get_text(hello.host), hello.pid);
}

class Session::Side {
 public:
  Side(Terms terms, std::unique_ptr<Connector> transport)
      : terms_(std::move(terms)), transport_(std::move(transport)) {}
  virtual ~Side() = default;
  Side& operator=(Side&&) = delete;
  virtual std::vector<Member> round(const Prepare& prepare, Clock::time_point deadline) = 0;
  virtual void watch() = 0;
  virtual Error settle(const Error& own) noexcept = 0;

 protected:
  [[nodiscard]] Error error(ErrorKind kind, const std::string& words, ErrorDetails details = {}) const {
    return Error(kind, terms_.call + ": " + words, std::move(details));
  }
  /// Names the rank and the process that sent this Hello.
  [[nodiscard]] std::string name_of(const Hello& hello) const {
    return fmt::format("rank {} ({})", number_of(hello), process_text(hello));
  }
  [[nodiscard]] ErrorDetails details_of(const Hello& hello) const {
    return {.rank = number_of(hello), .pid = hello.pid, .host = get_text(hello.host)};
  }
  [[nodiscard]] int number_of(const Hello& hello) const {
    return hello.rank >= 0 && hello.rank < terms_.size ? terms_.number(hello.rank) : hello.rank;
  }
  /// Returns the cause to send. An error that names another rank, or the process of any rank, is returned unchanged;
  /// any other error becomes a failure of this rank.
  [[nodiscard]] Error own_failure(const Error& cause) const {
    if (cause.rank() && (*cause.rank() != number_of(own_) || cause.pid())) return cause;
    ErrorDetails details = details_of(own_);
    details.path = cause.path();
    details.os_error = cause.os_error();
    return error(cause.kind(), fmt::format("{} cannot join: {}", name_of(own_), cause.what()), std::move(details));
  }
  /// Returns the ranks whose parts that rank receives.
  [[nodiscard]] std::vector<int> ranks_for(int rank, bool is_first_round) const {
    if (terms_.needed && !is_first_round) return {0};
    if (terms_.needed) return terms_.needed(rank);
    std::vector<int> all(static_cast<std::size_t>(terms_.size));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  /// Throws if `watch` throws, or if the user has interrupted the program.
  void check_others() const {
    if (terms_.watch) terms_.watch();
    if (group::is_interrupted())
      throw error(ErrorKind::cancelled, fmt::format("{} was interrupted during the rendezvous", name_of(own_)),
                  details_of(own_));
  }

  /// Waits for one of the lines, at most that long. The messages of all groups of this process move meanwhile.
  void wait_for(std::span<Line* const> lines, milliseconds longest = group::between_questions) {
    transport_->wait(lines, std::chrono::ceil<milliseconds>(progress_.step(longest)));
  }

  const Terms terms_;
  const std::unique_ptr<Connector> transport_;
  group::RankProgress progress_;
  const Hello own_ = own_hello(terms_.rank, terms_.size);
};

/// Returns the side of rank 0.
std::unique_ptr<Session::Side> make_root(Terms terms, std::unique_ptr<Connector> transport);

}  // namespace muster::rendezvous
