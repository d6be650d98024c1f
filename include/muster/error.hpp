// SPDX-License-Identifier: Apache-2.0
#pragma once
// The one exception of the library. Every failure that a caller can meet is a muster::Error; assertions are for bugs.
// Only where not even the memory for a name or a message is left, std::bad_alloc comes as it is.

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace muster {

/// What kind of failure it was: what a caller can branch on.
enum class ErrorKind : std::uint8_t {
  argument,       ///< the caller passed something that cannot be
  not_found,      ///< a file, name or rank is not there
  corrupt,        ///< bytes from outside contradict their format
  version,        ///< another version of the library or of a format
  timeout,        ///< a deadline passed; the message names who is missing
  peer_lost,      ///< another rank died or left
  no_space,       ///< memory or disk is too small; the message says needed and available
  io,             ///< a system call failed; `os_error()` has errno
  unsupported,    ///< this build or this machine cannot do it
  rank_mismatch,  ///< the ranks disagree (lists, shapes, calls)
  cancelled,      ///< a stop token ended the wait
};

/// The category's name as the messages and the CLI print it, such as "peer lost".
std::string_view to_string(ErrorKind kind) noexcept;

/// Facts of a failure beside its words. Unknown ones stay empty.
struct ErrorDetails {
  std::optional<int> rank = {};          ///< the rank where it began, as the job numbers it (RankInfo::rank)
  std::optional<std::int64_t> pid = {};  ///< that rank's process
  std::string host = {};                 ///< that rank's host
  std::string path = {};                 ///< the file it is about
  int os_error = 0;                      ///< errno, 0 if no system call failed
};

/// Says what was attempted, on what, what came back and what to do. Copyable, so that one failure can be thrown on each
/// later call.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, ErrorDetails details = {});

  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }
  [[nodiscard]] std::optional<int> rank() const noexcept { return details_.rank; }
  [[nodiscard]] std::optional<std::int64_t> pid() const noexcept { return details_.pid; }
  [[nodiscard]] const std::string& host() const noexcept { return details_.host; }
  [[nodiscard]] const std::string& path() const noexcept { return details_.path; }
  [[nodiscard]] int os_error() const noexcept { return details_.os_error; }
  [[nodiscard]] const ErrorDetails& details() const noexcept { return details_; }

  /// The same failure with `context` put before its words ("exporting to out/: ..."): for rethrowing on the way up.
  [[nodiscard]] Error with_context(std::string_view context) const;

 private:
  ErrorKind kind_;
  ErrorDetails details_;
};

}  // namespace muster
