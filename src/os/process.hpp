// SPDX-License-Identifier: Apache-2.0
#pragma once
// Processes: who we are, whether another one still lives, and random bytes for nonces.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace muster::os {

std::int64_t process_id() noexcept;
std::uint32_t user_id() noexcept;
std::string host_name();

enum class ProcessState : std::uint8_t { running, stopped, dead, unknown };
/// What /proc says of a live process: for messages.
ProcessState process_state(std::int64_t pid) noexcept;

void random_bytes(std::span<std::byte> target);
/// `bytes` random bytes as hexadecimal digits: for names that nobody else has.
std::string random_hex(std::size_t bytes);

/// Minor page faults of the calling thread since it began.
std::uint64_t thread_page_faults() noexcept;

/// Cores this process may run on.
int usable_cores() noexcept;

/// Lets this process have `count` open files: raises the soft limit where it is below that, at most to the hard one.
void allow_open_files(std::uint64_t count) noexcept;

/// An environment variable that is set and not empty.
std::optional<std::string> environment(const char* name);

}  // namespace muster::os
