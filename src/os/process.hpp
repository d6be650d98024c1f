// SPDX-License-Identifier: Apache-2.0
#pragma once
// Processes: the identity of this process, whether the process that left a file behind still lives, and random bytes
// for nonces.

#include <signal.h>
#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "muster/error.hpp"
#include "src/os/clock.hpp"
#include "src/os/fd.hpp"

namespace muster::os {
std::int64_t process_id() noexcept;
std::uint32_t user_id() noexcept;
/// Returns the kernel's ID of the calling thread.
std::uint32_t thread_id() noexcept;
std::string host_name();

enum class ProcessState : std::uint8_t { running, stopped, dead, unknown };
/// Returns the state of a process from /proc, for messages.
ProcessState process_state(std::int64_t pid) noexcept;
/// Returns whether `ancestor` started the process, or a parent of it that still runs. Both are IDs in this namespace.
bool descends_from(std::int64_t pid, std::int64_t ancestor) noexcept;

/// The boot ID if the kernel does not provide one.
inline constexpr std::string_view unknown_boot = "0000000000000000";

/// Identifies a process. It differs from every process with the same ID that runs later, before a reboot or in another
/// container.
struct ProcessIdentity {
  std::string host;                 ///< host name; '_' replaces every character except letters, digits, '.' and '-'
  std::string boot;                 ///< 16 digits of the kernel's boot ID, or unknown_boot
  std::int64_t pid = 0;             ///< as the process itself sees it
  std::uint64_t start = 0;          ///< clock ticks since boot
  std::uint64_t pid_namespace = 0;  ///< 0: unknown
  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

/// Returns the identity of this process; a forked child has its own.
ProcessIdentity own_identity();

/// Convert an identity to a part of a file name (HOST,BOOT,PID,START,SPACE) and back. Only the exact spelling is
/// accepted.
std::string identity_text(const ProcessIdentity& identity);
std::optional<ProcessIdentity> parse_identity(std::string_view text);

enum class Life : std::uint8_t {
  alive,
  dead,     ///< proved: this host, boot and process namespace has no such process
  unknown,  ///< of another host, boot or process namespace
};
/// Returns what can be proved about a process from here. Local, never waits.
Life life_of(const ProcessIdentity& identity) noexcept;

void random_bytes(std::span<std::byte> target);
/// Returns two hexadecimal digits per byte.
std::string hex_text(std::span<const std::byte> bytes);
/// Returns the text of that many random bytes, for unique names.
std::string random_hex(std::size_t bytes);

/// Returns how many minor page faults the calling thread has had.
std::uint64_t thread_page_faults() noexcept;

/// Returns the number of cores that this process may use.
int usable_cores() noexcept;

/// Allows this process `count` open files: raises the soft limit if it is lower, at most to the hard limit.
void allow_open_files(std::uint64_t count) noexcept;
/// The same for `count` files in addition to those that are open now.
void allow_more_open_files(std::uint64_t count) noexcept;
/// Returns how many more files this process could have open with its hard limit.
std::uint64_t open_files_left() noexcept;
/// Returns Error(io): `what` needs `needed` more open files, and open_files_left() is only `left`.
Error open_files_error(const std::string& what, std::uint64_t needed, std::uint64_t left);

/// An environment variable that had another name before version 0.2.
struct RenamedVariable {
  const char* before;
  std::string_view now;
};
/// Returns all of them.
std::span<const RenamedVariable> renamed_variables() noexcept;

/// Returns an environment variable; nullopt if it is unset or empty. Throws Error(argument) that names the new variable
/// if the variable was renamed and the old one was set at the first call of this function.
std::optional<std::string> environment(const char* name);

// Process descriptors: a signal that is sent through one never reaches a later process with the same ID.

/// Returns a descriptor of this process. A process that receives it cannot confuse this process with a later one that
/// has the same ID. Throws Error(unsupported) on kernels before 5.3 and in sandboxes that forbid it.
Fd own_pidfd();
/// Returns whether the process of a pidfd has ended. A zombie counts as ended.
bool has_exited(const Fd& pidfd) noexcept;
/// Returns an empty descriptor if the process does not exist (errno has the reason).
Fd open_pidfd(pid_t pid) noexcept;
/// Returns false if the process has ended.
bool send_signal(const Fd& process, int signal) noexcept;
/// Waits until the process has ended, at the latest until `end`. Returns whether it has ended.
bool wait_for_exit(const Fd& process, Clock::time_point end) noexcept;

/// Saves this process's action for a signal while a library call may change it.
class SignalAction {
 public:
  /// Saves the current action.
  explicit SignalAction(int signal) noexcept;
  /// Installs `handler` if the saved action would end the process.
  void handle_where_default(void (*handler)(int)) const noexcept;
  /// Restores the saved action.
  void restore() const noexcept;
  /// Restores the saved action, but ignores the signal if that action would end the process.
  void restore_or_ignore() const noexcept;

 private:
  [[nodiscard]] bool is_default() const noexcept;

  int signal_;
  struct sigaction action_ {};
};

}  // namespace muster::os
