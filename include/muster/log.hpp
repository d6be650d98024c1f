// SPDX-License-Identifier: Apache-2.0
#pragma once
// The log hook, which receives the rare messages of the library (a slow wait, the route of a gather, a retry).

#include <cstdint>
#include <functional>
#include <string_view>

namespace muster {

/// Levels of log messages, from the lowest to the highest.
enum class LogLevel : std::uint8_t { debug, info, warning, error };

/// Returns the name of a level.
std::string_view to_string(LogLevel level) noexcept;

/// Receives a message. It may be called from any thread, but never concurrently. It must not throw and must not call
/// the library.
using LogHook = std::function<void(LogLevel, std::string_view message)>;

/// Sets the hook of this process and the lowest level that reaches it. An empty hook restores the default, which writes
/// warnings and errors to standard error. MUSTER_LOG=debug|info|warning|error, if set, changes the lowest level of the
/// default.
void set_log_hook(LogHook hook, LogLevel lowest = LogLevel::info);

/// Passes a message to the hook, for the library and for programs that want a common log.
void log(LogLevel level, std::string_view message) noexcept;

/// Returns whether a message of this level would reach the hook. Check it before composing an expensive message.
bool log_enabled(LogLevel level) noexcept;

}  // namespace muster
