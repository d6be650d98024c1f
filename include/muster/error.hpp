// SPDX-License-Identifier: Apache-2.0
#pragma once
// The exception class of the library. Every failure that a caller can observe is a muster::Error; assertions are for
// bugs. Exception: std::bad_alloc is thrown if not even the memory for a name or a message is left.

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace muster {

/// The category of a failure, for callers that handle some categories differently.
enum class ErrorKind : std::uint8_t {
  invalid_argument,  ///< the caller passed an invalid argument
  not_found,         ///< a file, name or rank does not exist
  corrupt,           ///< external data contradicts its format
  version,           ///< another version of the library or of a format
  timeout,           ///< a deadline passed; the message names the missing ranks
  peer_lost,         ///< another rank died or left
  out_of_space,      ///< not enough memory or disk space; the message gives the needed and the available bytes
  io,                ///< a system call failed; os_error() returns errno
  unsupported,       ///< this build or this machine does not support the operation
  rank_mismatch,     ///< the ranks disagree (lists, shapes, calls)
  cancelled,         ///< a stop request ended the wait
};

/// Returns the name of the category as messages and the commands print it, such as "peer lost".
std::string_view to_string(ErrorKind kind) noexcept;

/// Facts about a failure, in addition to its message. Unknown ones are empty.
struct ErrorDetails {
  std::optional<int> rank = {};  ///< the rank where the failure began, by its number in the job (RankInfo::rank)
  std::optional<std::int64_t> pid = {};  ///< process ID of that rank
  std::string host = {};                 ///< host of that rank
  std::string path = {};                 ///< the file that the failure is about
  int os_error = 0;                      ///< errno; 0 if no system call failed
};

/// A failure. The message contains the attempted operation, its object, the cause and the remedy. Copyable, so that
/// later calls can throw the same failure again.
class Error : public std::runtime_error {
 public:
  /// Creates a failure. `message` is the complete text of what().
  Error(ErrorKind kind, const std::string& message, ErrorDetails details = {});

  /// Returns the category.
  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }
  /// Returns ErrorDetails::rank.
  [[nodiscard]] std::optional<int> rank() const noexcept { return details_.rank; }
  /// Returns ErrorDetails::pid.
  [[nodiscard]] std::optional<std::int64_t> pid() const noexcept { return details_.pid; }
  /// Returns ErrorDetails::host.
  [[nodiscard]] const std::string& host() const noexcept { return details_.host; }
  /// Returns ErrorDetails::path.
  [[nodiscard]] const std::string& path() const noexcept { return details_.path; }
  /// Returns ErrorDetails::os_error.
  [[nodiscard]] int os_error() const noexcept { return details_.os_error; }
  /// Returns all details.
  [[nodiscard]] const ErrorDetails& details() const noexcept { return details_; }

  /// Returns the same failure with `context` in front of its message ("exporting to out/: ..."), for a caller that
  /// throws it again.
  [[nodiscard]] Error with_context(std::string_view context) const;

 private:
  ErrorKind kind_;
  ErrorDetails details_;
};

}  // namespace muster
