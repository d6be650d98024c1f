// SPDX-License-Identifier: Apache-2.0
// A group of one process: every round is complete as soon as it is entered.

#include <algorithm>

#include "src/base/fork_mutex.hpp"
#include "src/os/clock.hpp"
#include "src/os/process.hpp"
#include "src/sync/progress.hpp"
#include "src/sync/pulse.hpp"
#include "src/sync/waits.hpp"

namespace muster {
namespace {

SyncGroup::Nonce random_nonce() {
  SyncGroup::Nonce nonce{};
  os::random_bytes(nonce);
  return nonce;
}

class SingleGroup final : public sync::Group {
 public:
  explicit SingleGroup(std::chrono::milliseconds timeout)
      : sync::Group(0, {RankInfo{0, os::host_name(), os::process_id()}}, random_nonce(), timeout) {}
  ~SingleGroup() override { end_progress(); }

  [[nodiscard]] std::string_view kind() const noexcept override { return "single"; }
  [[nodiscard]] bool has_failure() const noexcept override { return failure().has_value(); }
  void progress() noexcept override {}

 protected:
  [[nodiscard]] std::uint64_t rounds() const noexcept override { return round_; }
  void do_poison(const Error& cause) noexcept override {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = cause;
  }
  [[nodiscard]] std::optional<Error> do_failure() const override {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  void do_barrier(const WaitOptions& options) override {
    ++round_;
    check(options);
  }
  void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) override {
    ++round_;
    check(options);
    std::ranges::copy(mine, all.begin());
  }
  // Group rejects messages before these calls, because there is no other rank.
  bool do_try_send(int, const sync::PacketHead&, std::span<const std::byte>) override { return false; }
  bool do_try_receive(int, const sync::PacketPlace&) override { return false; }
  void do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                           const WaitOptions& options) override {
    do_wait_until(
        done, [](std::chrono::nanoseconds longest) { std::this_thread::sleep_for(longest); }, on, options);
  }
  // Only another thread of this process could make done() true.
  void do_wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                     std::span<const int>, const WaitOptions& options) override {
    const auto begin = os::Clock::now();
    sync::Progress progress;
    while (!done()) {
      if (const auto cause = failure()) throw *cause;
      check(options);
      sleep(progress.step(std::chrono::milliseconds(20)));
      if (done() || os::Clock::now() - begin < sync::timeout_of(options, *this)) continue;
      const Error cause(ErrorKind::timeout, std::string(options.phase) + ": the deadline passed", {.rank = 0});
      poison(cause);
      throw cause;
    }
  }
  std::shared_ptr<sync::Group> make_part(const Part& part, Tie, const WaitOptions&) override {
    // A companion needs no link to this group: no other rank could see its progress, and only its own calls fail it.
    return part.members.empty() ? nullptr : std::make_shared<SingleGroup>(timeout());
  }

 private:
  void check(const WaitOptions& options) {
    if (!options.stop.stop_requested() && !sync::is_interrupted()) return;
    const Error cause(ErrorKind::cancelled, std::string(options.phase) + ": cancelled", {.rank = 0});
    poison(cause);
    throw cause;
  }

  std::uint64_t round_ = 0;
  mutable ForkMutex mutex_;
  std::optional<Error> failure_;
};

}  // namespace

std::shared_ptr<SyncGroup> single_group() {
  return std::make_shared<SingleGroup>(sync::default_timeout());
}

}  // namespace muster
