// SPDX-License-Identifier: Apache-2.0
#pragma once
// Processes: who we are, which one it was that left something behind and whether it still lives, and random bytes for
// nonces.

#include <signal.h>
#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "src/os/clock.hpp"
#include "src/os/fd.hpp"

namespace muster::os {
std::int64_t process_id() noexcept;
std::uint32_t user_id() noexcept;
/// The kernel's number of the calling thread.
std::uint32_t thread_id() noexcept;
std::string host_name();

enum class ProcessState : std::uint8_t { running, stopped, dead, unknown };
/// What /proc says of a live process: for messages.
ProcessState process_state(std::int64_t pid) noexcept;

/// Where the kernel does not tell.
inline constexpr std::string_view unknown_boot = "0000000000000000";

/// A process, told from every other one that has its number later on, before a reboot or in another container.
struct ProcessIdentity {
  std::string host;                 ///< host name; what is no letter, digit, '.' or '-' in it is '_'
  std::string boot;                 ///< the kernel's boot id, 16 digits of it; unknown_boot
  std::int64_t pid = 0;             ///< as the process itself sees it
  std::uint64_t start = 0;          ///< clock ticks since boot
  std::uint64_t pid_namespace = 0;  ///< 0: not known
  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

/// This process. In a forked child its own, too.
ProcessIdentity own_identity();

/// As a part of a name: HOST,BOOT,PID,START,SPACE; and back, where it is spelt exactly like that.
std::string identity_text(const ProcessIdentity& identity);
std::optional<ProcessIdentity> parse_identity(std::string_view text);

enum class Life : std::uint8_t {
  alive,
  dead,     ///< proved: on this host, in this boot and in this process namespace there is no such process
  unknown,  ///< of another host, boot or process namespace
};
/// What can be proved of a process from here. Local, never waits.
Life life_of(const ProcessIdentity& identity) noexcept;

void random_bytes(std::span<std::byte> target);
/// Two hexadecimal digits a byte.
std::string hex_text(std::span<const std::byte> bytes);
/// Of so many random ones: for names that nobody else has.
std::string random_hex(std::size_t bytes);

/// Minor page faults of the calling thread since it began.
std::uint64_t thread_page_faults() noexcept;

/// Cores this process may run on.
int usable_cores() noexcept;

/// Lets this process have `count` open files: raises the soft limit where it is below that, at most to the hard one.
void allow_open_files(std::uint64_t count) noexcept;
/// Likewise for `count` beside those that are open now.
void allow_more_open_files(std::uint64_t count) noexcept;

/// An environment variable that is set and not empty.
std::optional<std::string> environment(const char* name);

// Process descriptors: a signal sent through one never hits a later process with the same number.

/// A descriptor that stands for this very process: whoever it is passed to cannot mistake a later process with the same
/// number for it. Throws Error(unsupported) on kernels before 5.3 and in sandboxes that forbid it.
Fd own_pidfd();
/// Whether the process of a pidfd has ended (a zombie has).
bool has_exited(const Fd& pidfd) noexcept;
/// Empty if there is no such process (errno says why).
Fd open_pidfd(pid_t pid) noexcept;
/// False if it has ended.
bool send_signal(const Fd& process, int signal) noexcept;
/// Whether it ended within `longest`.
bool wait_for_exit(const Fd& process, Clock::time_point end) noexcept;

/// What this process does on a signal, kept while a library that was called changes it.
class SignalAction {
 public:
  /// What is done now.
  explicit SignalAction(int signal) noexcept;
  /// If that is to end the process, `handler` is called instead.
  void handle_where_default(void (*handler)(int)) const noexcept;
  /// From now on the same again.
  void restore() const noexcept;
  /// Likewise, but where that was to end the process, the signal is ignored.
  void restore_or_ignore() const noexcept;

 private:
  [[nodiscard]] bool is_default() const noexcept;

  int signal_;
  struct sigaction action_ {};
};

}  // namespace muster::os
