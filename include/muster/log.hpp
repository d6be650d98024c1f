// SPDX-License-Identifier: Apache-2.0
#pragma once
// The log hook: where the library's rare words go (a slow wait, the route of a gather, a retry).

#include <cstdint>
#include <functional>
#include <string_view>

namespace muster {

enum class LogLevel : std::uint8_t { debug, info, warning, error };

std::string_view to_string(LogLevel level) noexcept;

/// Called from any thread, never two at a time. Must not throw and must not call the library.
using LogHook = std::function<void(LogLevel, std::string_view message)>;

/// Replaces the hook of this process and the lowest level that reaches it. An empty hook restores the default, which
/// writes warnings and errors to standard error (from MUSTER_LOG=debug|info|warning|error on, if that is set).
void set_log_hook(LogHook hook, LogLevel lowest = LogLevel::info);

/// Hands one message to the hook. For the library's own use and for programs that want one log.
void log(LogLevel level, std::string_view message) noexcept;

/// Whether a message of this level would reach the hook: asks before words are put together.
bool log_enabled(LogLevel level) noexcept;

}  // namespace muster
