// SPDX-License-Identifier: Apache-2.0
#pragma once
// A group whose ranks exchange nothing, for tests of code that only asks a group about its ranks.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "muster/error.hpp"
#include "src/group/group.hpp"

namespace muster::test {

class IdleGroup : public group::BaseGroup {
 public:
  IdleGroup(int rank, std::shared_ptr<const group::RankTable> ranks)
      : group::BaseGroup(rank, std::move(ranks), {}, std::chrono::seconds(1)) {}
  [[nodiscard]] std::string_view kind() const noexcept override { return "idle"; }
  [[nodiscard]] bool has_failure() const noexcept override { return false; }
  void progress() noexcept override {}

 protected:
  [[nodiscard]] std::uint64_t rounds() const noexcept override { return 0; }
  void do_abort(const Error&) noexcept override {}
  [[nodiscard]] std::optional<Error> do_failure() const override { return std::nullopt; }
  void do_barrier(const WaitOptions&) override {}
  void do_all_gather(std::span<const std::byte>, std::span<std::byte>, const WaitOptions&) override {}
  void do_wait_until(const std::function<bool()>&, const std::function<void(std::chrono::nanoseconds)>&,
                     std::span<const int>, const WaitOptions&) override {}
  bool do_try_send(int, const group::PacketHead&, std::span<const std::byte>) override { return false; }
  bool do_try_receive(int, const group::PacketPlace&) override { return false; }
  void do_wait_for_packets(const std::function<bool()>&, std::span<const int>, const WaitOptions&) override {}
  std::shared_ptr<group::BaseGroup> make_part(const SplitPart&, Tie, const WaitOptions&) override { return nullptr; }
};

}  // namespace muster::test
