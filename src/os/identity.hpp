// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which process it was: exact enough that another process on the same host can prove, much later, that it is gone.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace muster::os {

/// A process, told from every other one that has its number later on, before a reboot or in another container.
struct ProcessIdentity {
  std::string host;                 ///< host name; what is no letter, digit, '.' or '-' in it is '_'
  std::string boot;                 ///< the kernel's boot id, 16 digits of it
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

}  // namespace muster::os
