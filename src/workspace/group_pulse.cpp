// SPDX-License-Identifier: Apache-2.0
#include "src/workspace/group_pulse.hpp"

#include <algorithm>
#include <string_view>

#include "muster/state.hpp"

namespace muster::workspace {
namespace {

constexpr std::chrono::milliseconds fresh_enough{20};
constexpr std::uint64_t longest_failure = 64 << 10;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

// The kind as a number: an error keeps it across versions because the list only grows at its end.
std::string failure_text(const Error& cause) {
  Config text = Config::object({{"kind", static_cast<int>(cause.kind())},
                                {"words", std::string(cause.what())},
                                {"host", cause.host()},
                                {"path", cause.path()},
                                {"errno", cause.os_error()}});
  if (cause.rank()) text["rank"] = *cause.rank();
  if (cause.pid()) text["pid"] = *cause.pid();
  try {
    return to_json(text);
  } catch (const Error&) {
    // A path need not be UTF-8, and the words may have it.
    return to_json(Config::object({{"kind", static_cast<int>(cause.kind())},
                                   {"words", "a rank failed, with words that are not UTF-8"},
                                   {"host", ""},
                                   {"path", ""},
                                   {"errno", cause.os_error()}}));
  }
}

Error failure_of(std::string_view text) {
  const Config facts = parse_json(text);
  const std::int64_t kind = facts.at("kind").as_int();
  if (kind < 0 || kind > static_cast<std::int64_t>(ErrorKind::cancelled))
    throw Error(ErrorKind::corrupt, "a group's failure is of no known kind");
  ErrorDetails details;
  details.host = facts.at("host").as_string();
  details.path = facts.at("path").as_string();
  details.os_error = static_cast<int>(facts.at("errno").as_int());
  if (const Config* rank = facts.as_object().find("rank")) details.rank = static_cast<int>(rank->as_int());
  if (const Config* pid = facts.as_object().find("pid")) details.pid = pid->as_int();
  return Error(static_cast<ErrorKind>(kind), facts.at("words").as_string(), details);
}

}  // namespace

GroupPulse::GroupPulse(std::shared_ptr<GroupDirectory> directory, int group, int self)
    : directory_(std::move(directory)), group_(group), self_(self) {}

std::shared_ptr<GroupPulse> GroupPulse::create(std::shared_ptr<GroupDirectory> directory, int group, int self) {
  std::shared_ptr<GroupPulse> pulse(new GroupPulse(std::move(directory), group, self));
  pulse->directory_->watch(pulse);
  return pulse;
}

void GroupPulse::notice(const Snapshot& snapshot, bool is_heartbeat) {
  if (!has_failure() && snapshot.has(failed_name(group_))) load_failure();
  if (!is_heartbeat) return;
  publish_own();
  std::optional<Error> untold;
  {
    const std::lock_guard lock(failure_mutex_);
    if (is_untold_) untold = failure_;
  }
  if (untold) publish_failure(*untold);
}

void GroupPulse::publish_own() {
  const std::lock_guard lock(own_mutex_);
  PulseName now;
  now.progress = progress_.load(std::memory_order_relaxed);
  now.awaited = awaited_.load(std::memory_order_relaxed);
  now.phase = phase_.load(std::memory_order_relaxed);
  now.number = published_ ? published_->number + 1 : 0;
  if (published_ && published_->progress == now.progress && published_->awaited == now.awaited &&
      published_->phase == now.phase)
    return;
  const std::string name = pulse_name(group_, self_, now);
  directory_->renew(published_ ? pulse_name(group_, self_, *published_) : name, name);
  published_ = now;
}

PulseName GroupPulse::pulse_of(int rank) const {
  const std::string prefix = pulse_prefix(group_, rank);
  PulseName newest;
  // While a rename is under way a listing may show both names, or none.
  const auto all = directory_->recent(fresh_enough);
  for (const std::string& name : all->with_prefix(prefix))
    if (auto pulse = pulse_behind(name, prefix); pulse && pulse->number >= newest.number) newest = std::move(*pulse);
  return newest;
}

bool GroupPulse::has_left(int rank) const {
  return directory_->recent(fresh_enough)->has(left_name(group_, rank));
}

std::uint64_t GroupPulse::progress_of(int rank) const {
  if (rank == self_) return progress_.load(std::memory_order_relaxed);
  const PulseName pulse = pulse_of(rank);
  return pulse.progress;
}

std::uint32_t GroupPulse::awaited_by(int rank) const {
  return rank == self_ ? awaited_.load(std::memory_order_relaxed) : pulse_of(rank).awaited;
}

void GroupPulse::tell_awaited(int self, std::uint32_t awaited) noexcept {
  if (self == self_) awaited_.store(awaited, std::memory_order_relaxed);
}

std::string GroupPulse::phase(int rank) const {
  if (rank == self_) return phase_.load(std::memory_order_relaxed);
  std::string phase = pulse_of(rank).phase;
  return phase.empty() ? "its own work" : phase;
}

void GroupPulse::set_failure(const Error& cause) noexcept {
  const std::lock_guard lock(failure_mutex_);
  if (failure_) return;
  failure_ = cause;
  has_failure_.store(true, std::memory_order_release);
}

void GroupPulse::load_failure() {
  std::optional<Error> loaded;
  try {
    directory_->read(failed_name(group_), longest_failure, std::chrono::seconds(2), [&](auto bytes) {
      loaded = failure_of({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    });
  } catch (const std::exception& error) {
    loaded = Error(ErrorKind::peer_lost, std::string("a rank has failed; why cannot be read: ") + error.what());
  }
  set_failure(*loaded);
}

void GroupPulse::publish_failure(const Error& cause) {
  // Where another rank was first, its cause is everybody's.
  if (!directory_->publish_first(failed_name(group_), bytes_of(failure_text(cause))))
    load_failure();
  else
    set_failure(cause);
  const std::lock_guard lock(failure_mutex_);
  is_untold_ = false;
}

void GroupPulse::poison(const Error& cause) noexcept {
  if (has_failure()) return;
  try {
    publish_failure(cause);
  } catch (const std::exception&) {
    set_failure(cause);
    const std::lock_guard lock(failure_mutex_);
    is_untold_ = true;
  }
}

std::optional<Error> GroupPulse::failure() const {
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

}  // namespace muster::workspace
