// SPDX-License-Identifier: Apache-2.0
#pragma once
// A group that counts the bytes that its rank receives, and forwards all calls to another group.

#include <cstdint>
#include <memory>

#include "src/group/group.hpp"

namespace bench {

struct Told {
  std::uint64_t by_rounds = 0;    ///< bytes of records, including those of this rank
  std::uint64_t by_messages = 0;  ///< bytes of messages to this rank
  std::uint64_t rounds = 0;
};

class CountingGroup final : public muster::group::BaseGroup {
 public:
  explicit CountingGroup(std::shared_ptr<muster::Group> inner)
      : BaseGroup(inner->rank(), muster::group::inside(*inner).ranks(), inner->nonce(), inner->timeout()),
        inner_(std::static_pointer_cast<muster::group::BaseGroup>(std::move(inner))) {}

  /// Returns the counts since the last call.
  Told take() { return std::exchange(told_, {}); }

  [[nodiscard]] std::string_view kind() const noexcept override { return inner_->kind(); }
  [[nodiscard]] bool shares_memory(int rank) const override { return inner_->shares_memory(rank); }
  [[nodiscard]] int host_of(int rank) const override { return inner_->host_of(rank); }
  [[nodiscard]] std::shared_ptr<muster::group::Region> region_of(int rank) const override {
    return inner_->region_of(rank);
  }
  [[nodiscard]] std::shared_ptr<const muster::group::PeerLiveness> liveness(int rank) const override {
    return inner_->liveness(rank);
  }
  [[nodiscard]] bool has_failure() const noexcept override { return inner_->has_failure(); }
  void progress() noexcept override { inner_->progress(); }

 protected:
  void do_abort(const muster::Error& cause) noexcept override { inner_->abort(cause); }
  [[nodiscard]] std::optional<muster::Error> do_failure() const override { return inner_->error(); }
  [[nodiscard]] std::uint64_t rounds() const noexcept override { return rounds_; }
  void do_barrier(const muster::WaitOptions& options) override {
    inner_->barrier(options);
    ++rounds_;
  }
  void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all,
                     const muster::WaitOptions& options) override {
    inner_->all_gather(mine, all, options);
    told_.by_rounds += all.size();
    ++told_.rounds;
    ++rounds_;
  }
  void do_wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                     std::span<const int> on, const muster::WaitOptions& options) override {
    inner_->wait_until(done, sleep, on, options);
  }
  bool do_try_send(int to, const muster::group::PacketHead& head, std::span<const std::byte> packet) override {
    return inner_->try_send(to, head, packet);
  }
  bool do_try_receive(int from, const muster::group::PacketPlace& place) override {
    const auto counted = [&](const muster::group::PacketHead& head, std::size_t bytes) {
      told_.by_messages += bytes;
      return place(head, bytes);
    };
    return inner_->try_receive(from, counted);
  }
  void do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                           const muster::WaitOptions& options) override {
    inner_->wait_for_packets(done, on, options);
  }
  std::shared_ptr<muster::group::BaseGroup> make_part(const SplitPart& part, Tie tie,
                                                      const muster::WaitOptions& options) override {
    if (tie == Tie::companion) return inner_->companion(options);
    return std::static_pointer_cast<muster::group::BaseGroup>(inner_->split(part.members, options));
  }

 private:
  std::shared_ptr<muster::group::BaseGroup> inner_;
  Told told_;
  std::uint64_t rounds_ = 0;
};

}  // namespace bench
