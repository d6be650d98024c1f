// SPDX-License-Identifier: Apache-2.0
#include "src/os/fault.hpp"

#include <string.h>

#include <atomic>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>

#include "muster/log.hpp"
#include "src/base/escaped.hpp"
#include "src/os/process.hpp"

namespace muster::os {
namespace {

struct EnvironmentFault {
  std::string call;
  int error = 0;
  std::uint64_t nth = 0;
  std::string path_part;
};

constexpr int highest_errno = 133;

std::optional<int> parse_errno(std::string_view text) {
  if (text == "short") return short_transfer;
  int number = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (status == std::errc() && end == text.data() + text.size() && number > 0) return number;
  for (int candidate = 1; candidate <= highest_errno; ++candidate) {
    const char* name = ::strerrorname_np(candidate);
    if (name != nullptr && text == name) return candidate;
  }
  return std::nullopt;
}

std::optional<EnvironmentFault> parse_fault(std::string_view text) {
  const auto take = [&text] {
    const std::size_t colon = text.find(':');
    const std::string_view field = text.substr(0, colon);
    text.remove_prefix(colon == std::string_view::npos ? text.size() : colon + 1);
    return field;
  };
  EnvironmentFault fault;
  fault.call = take();
  const std::optional<int> error = parse_errno(take());
  const std::string_view nth = take();
  const auto [end, status] = std::from_chars(nth.data(), nth.data() + nth.size(), fault.nth);
  if (fault.call.empty() || !error || status != std::errc() || end != nth.data() + nth.size()) return std::nullopt;
  fault.error = *error;
  fault.path_part = text;
  return fault;
}

const std::optional<EnvironmentFault>& from_environment() {
  static const std::optional<EnvironmentFault> fault = []() -> std::optional<EnvironmentFault> {
    const std::optional<std::string> text = environment("MUSTER_FAULT");
    if (!text) return std::nullopt;
    std::optional<EnvironmentFault> parsed = parse_fault(*text);
    if (!parsed)
      log(LogLevel::warning,
          "MUSTER_FAULT: reading the variable: not CALL:ERRNO:NTH[:PATH-PART], so it has no effect: " +
              in_quotes(*text));
    return parsed;
  }();
  return fault;
}

int environment_hook(std::string_view call, std::string_view path) {
  const std::optional<EnvironmentFault>& wanted = from_environment();
  if (!wanted || call != wanted->call || path.find(wanted->path_part) == std::string_view::npos) return 0;
  static std::atomic<std::uint64_t> calls{0};
  const std::uint64_t count = calls.fetch_add(1) + 1;
  return wanted->nth == 0 || wanted->nth == count ? wanted->error : 0;
}

// The initial hook: reads the environment once, and replaces itself with the requested hook or with none.
int first_hook(std::string_view call, std::string_view path);

std::atomic<FaultHook> current{&first_hook};
std::atomic<DamageHook> current_damage{nullptr};

int first_hook(std::string_view call, std::string_view path) {
  const FaultHook hook = from_environment() ? &environment_hook : nullptr;
  FaultHook expected = &first_hook;
  current.compare_exchange_strong(expected, hook);
  return hook == nullptr ? 0 : hook(call, path);
}

}  // namespace

void set_fault_hook(FaultHook hook) noexcept {
  current.store(hook);
}

void set_damage_hook(DamageHook hook) noexcept {
  current_damage.store(hook);
}

void damage_descriptor(std::span<std::byte> descriptor) noexcept {
  if (const DamageHook hook = current_damage.load(std::memory_order_relaxed); hook != nullptr) hook(descriptor);
}

int fault(std::string_view call, std::string_view path) noexcept {
  const FaultHook hook = current.load(std::memory_order_relaxed);
  return hook == nullptr ? 0 : hook(call, path);
}

}  // namespace muster::os
