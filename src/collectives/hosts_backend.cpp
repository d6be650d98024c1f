// SPDX-License-Identifier: Apache-2.0
// Collectives across several hosts, of which at least one has two or more ranks. Between hosts each byte is sent once
// for all ranks of a host:
//
//  - all_reduce: each host reduces its inputs, one slice per rank. Each slice is reduced across the hosts. Then each
//    host gathers its slices. If some hosts have fewer ranks, only that many ranks of each host have slices.
//
// If all hosts have the same number of ranks:
//
//  - reduce_scatter: each host reduces the data for the ranks of each host. The data for one rank is then reduced
//    across the hosts.
//  - all_gather: each rank gathers from the ranks at its position on the other hosts. Then each host gathers the data
//    of its ranks.
//
// So a sum is the sum of the sums of the hosts, in their order. Its bits are the same on all ranks. Floats narrower
// than 32 bits would be rounded in between, so each rank sends them to each other rank, as all_to_all does.
//
// The ranks of a host have a separate group, and so do the ranks at the same position on all hosts. A failure in one of
// them fails all groups of that rank, and through them all ranks. If a rank is stalled, the ranks that wait for it
// reach their deadlines, and so do the ranks that wait for these. So the first rank to report must be one that waits
// for the stalled rank itself.

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "src/collectives/backend.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/mail.hpp"
#include "src/group/watchdog.hpp"
#include "src/multihost/hosts.hpp"
#include "src/os/clock.hpp"
#include "src/os/process.hpp"

namespace muster::collectives {
namespace {

/// Returns the ranks of each host.
multihost::Hosts hosts_of(const group::BaseGroup& group) {
  std::vector<int> keys;
  keys.reserve(static_cast<std::size_t>(group.size()));
  for (int rank = 0; rank < group.size(); ++rank) keys.push_back(group.host_of(rank));
  return {keys, group.rank()};
}

bool is_narrow(DType dtype) {
  return itemsize(dtype) < 4 && dtype >= DType::f16;
}

class HostsBackend final : public Backend {
 public:
  HostsBackend(group::BaseGroup& group, multihost::Hosts hosts, const WaitOptions& options)
      : group_(group),
        flat_(message_backend(group)),
        ranks_(std::move(hosts.members)),
        host_(static_cast<std::size_t>(hosts.mine)),
        place_(static_cast<std::size_t>(hosts.place_of[static_cast<std::size_t>(group.rank())])),
        cards_(group.all().size()) {
    lanes_ = std::ranges::min(ranks_, {}, &std::vector<int>::size).size();
    is_even_ = std::ranges::all_of(ranks_, [&](const auto& host) { return host.size() == lanes_; });
    std::vector<int> across;
    for (const std::vector<int>& host : ranks_)
      if (has_lane()) across.push_back(host[place_]);
    near_ = group.split(ranks_[host_], options);
    far_ = group.split(across, options);
    inside_ = shared_backend(group::inside(*near_), options);
    if (!inside_) throw Error(ErrorKind::unsupported, "collectives: the ranks of a host share no memory");
    if (has_lane()) across_ = message_backend(group::inside(*far_));
  }

  [[nodiscard]] std::string_view name() const noexcept override { return "shared memory, and messages between hosts"; }

  void all_reduce(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                  Room out, const WaitOptions& options) override {
    // The average of the averages of the hosts is wrong if they have different numbers of ranks.
    if (is_narrow(dtype) || (!is_even_ && combine == merge::Combine::average))
      return flat_->all_reduce(card, opened, combine, dtype, in, out, options);
    open(card, opened, options);
    std::vector<std::uint64_t> bounds = even_slices(in.size(), lanes_);
    bounds.resize(places() + 1, in.size());
    slice_.resize(bounds[place_ + 1] - bounds[place_]);
    stage(*near_, options, [&](const WaitOptions& waits) {
      inside_->reduce_scatter(card_of(in.size(), largest(bounds)), agreed, combine, dtype, in, bounds, slice_, waits);
    });
    const bool host_wants = wants(host_);
    if (has_lane())
      stage(*far_, options, [&](const WaitOptions& waits) {
        CallSummary mine = card_of(slice_.size(), slice_.size());
        mine.wants = host_wants ? 1 : 0;
        across_->all_reduce(mine, agreed, combine, dtype, slice_, host_wants ? Room(slice_) : Room(), waits);
      });
    if (!host_wants) return;
    std::vector<Room> outs(places());
    for (std::size_t place = 0; place < places() && card.wants != 0; ++place)
      outs[place] = out.subspan(bounds[place], bounds[place + 1] - bounds[place]);
    gather_here(slice_, outs, card.wants != 0, options);
  }

  void reduce_scatter(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                      std::span<const std::uint64_t> bounds, Room out, const WaitOptions& options) override {
    if (is_narrow(dtype) || !is_even_ || !has_rows_of_ranks())
      return flat_->reduce_scatter(card, opened, combine, dtype, in, bounds, out, options);
    open(card, opened, options);
    // The data for the ranks at this position.
    std::vector<std::uint64_t> parts(ranks_.size() + 1);
    for (std::size_t host = 0; host < ranks_.size(); ++host)
      parts[host + 1] = parts[host] + bytes_of(bounds, host, place_);
    slice_.resize(parts.back());
    for (std::size_t host = 0; host < ranks_.size(); ++host) {
      const auto first = static_cast<std::size_t>(ranks_[host].front());
      std::vector<std::uint64_t> theirs(places() + 1);
      for (std::size_t place = 0; place < places(); ++place)
        theirs[place + 1] = theirs[place] + bytes_of(bounds, host, place);
      stage(*near_, options, [&](const WaitOptions& waits) {
        inside_->reduce_scatter(card_of(theirs.back(), largest(theirs)), agreed, combine, dtype,
                                in.subspan(bounds[first], theirs.back()), theirs,
                                Room(slice_).subspan(parts[host], parts[host + 1] - parts[host]), waits);
      });
    }
    stage(*far_, options, [&](const WaitOptions& waits) {
      across_->reduce_scatter(card_of(slice_.size(), largest(parts)), agreed, combine, dtype, slice_, parts, out,
                              waits);
    });
  }

  void all_gather(const CallSummary& card, const Opened& opened, Bytes in, std::span<const Room> outs,
                  const WaitOptions& options) override {
    if (!is_even_) return flat_->all_gather(card, opened, in, outs, options);
    open(card, opened, options);
    const bool host_wants = wants(host_);
    // The data is received at its final position if this rank wants the result.
    std::vector<Room> come(ranks_.size());
    std::uint64_t all = 0;
    for (std::size_t host = 0; host < ranks_.size(); ++host) all += card_at(host, place_).bytes;
    if (card.wants == 0 && host_wants) slice_.resize(all);
    std::uint64_t at = 0;
    for (std::size_t host = 0; host < ranks_.size() && host_wants; ++host) {
      const std::uint64_t bytes = card_at(host, place_).bytes;
      come[host] = card.wants != 0 ? outs[rank_at(host, place_)] : Room(slice_).subspan(at, bytes);
      at += bytes;
    }
    stage(*far_, options, [&](const WaitOptions& waits) {
      CallSummary mine = card_of(in.size(), in.size());
      mine.wants = host_wants ? 1 : 0;
      across_->all_gather(mine, agreed, in, come, waits);
    });
    if (!host_wants) return;
    for (std::size_t host = 0; host < ranks_.size(); ++host) {
      std::vector<Room> theirs(places());
      for (std::size_t place = 0; place < places() && card.wants != 0; ++place)
        theirs[place] = outs[rank_at(host, place)];
      gather_here(come[host], theirs, card.wants != 0, options);
    }
  }

  void all_to_all(const CallSummary& card, const Opened& opened, std::span<const Bytes> ins, std::span<const Room> outs,
                  const WaitOptions& options) override {
    flat_->all_to_all(card, opened, ins, outs, options);
  }

 private:
  static constexpr auto agreed = [](std::span<const CallSummary>) {
  };  // the ranks have already agreed on the whole call
  static CallSummary card_of(std::uint64_t bytes, std::uint64_t largest) {
    CallSummary card;
    card.bytes = bytes;
    card.largest = largest;
    return card;
  }
  static std::uint64_t largest(std::span<const std::uint64_t> bounds) {
    std::uint64_t most = 0;
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) most = std::max(most, bounds[i + 1] - bounds[i]);
    return most;
  }
  [[nodiscard]] std::size_t places() const noexcept { return ranks_[host_].size(); }
  [[nodiscard]] bool has_lane() const noexcept { return place_ < lanes_; }
  [[nodiscard]] std::size_t rank_at(std::size_t host, std::size_t place) const {
    return static_cast<std::size_t>(ranks_[host][place]);
  }
  [[nodiscard]] const CallSummary& card_at(std::size_t host, std::size_t place) const {
    return cards_[rank_at(host, place)];
  }
  [[nodiscard]] std::uint64_t bytes_of(std::span<const std::uint64_t> bounds, std::size_t host,
                                       std::size_t place) const {
    return bounds[rank_at(host, place) + 1] - bounds[rank_at(host, place)];
  }
  /// Returns whether any rank of that host wants the result.
  [[nodiscard]] bool wants(std::size_t host) const {
    return std::ranges::any_of(ranks_[host],
                               [&](int rank) { return cards_[static_cast<std::size_t>(rank)].wants != 0; });
  }
  /// Returns whether the ranks of each host have consecutive numbers.
  [[nodiscard]] bool has_rows_of_ranks() const {
    return std::ranges::all_of(ranks_, [](const std::vector<int>& host) {
      return host.back() - host.front() + 1 == static_cast<int>(host.size());
    });
  }

  void open(const CallSummary& card, const Opened& opened, const WaitOptions& options) {
    group_.all_gather(std::as_bytes(std::span(&card, 1)), std::as_writable_bytes(std::span(cards_)), options);
    opened(cards_);
  }

  /// Gathers within this host: every rank sends `in`, and the ranks that want it receive everything.
  void gather_here(Bytes in, std::span<const Room> outs, bool wants, const WaitOptions& options) {
    stage(*near_, options, [&](const WaitOptions& waits) {
      CallSummary mine = card_of(in.size(), in.size());
      mine.wants = wants ? 1 : 0;
      inside_->all_gather(mine, agreed, in, outs, waits);
    });
  }

  /// Runs a call of one of the two groups.
  template <class Call>
  void stage(Group& in, const WaitOptions& options, const Call& call) {
    WaitOptions waits = options;
    waits.timeout = group::timeout_of(options, group_);
    try {
      const group::GroupLock use(in);
      call(waits);
    } catch (const Error& error) {
      // Ranks that wait in the other groups also receive the error.
      if (error.kind() == ErrorKind::timeout) let_others_speak(error, in);
      near_->abort(error);
      if (far_) far_->abort(error);
      group::fail(group_, group::in_own_name(group_, error));
    }
    group_.progress();
  }

  /// A late rank may be waiting in its other group, where the ranks that wait with it know the rank to blame. Waits a
  /// moment for that error, and throws it.
  void let_others_speak(const Error& late, const Group& in) {
    const bool is_near = &in == near_.get();
    if (is_near && late.pid() && os::process_state(*late.pid()) == os::ProcessState::stopped) return;
    using Clock = os::Clock;
    constexpr std::chrono::seconds moment{1};
    const auto until = Clock::now() + (is_near ? 2 * moment : moment);
    const auto nap = [](std::chrono::nanoseconds longest) {
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(longest, std::chrono::milliseconds(10)));
    };
    group_.wait_until([&] { return Clock::now() >= until; }, nap, {}, {.phase = "a deadline"});
  }

  group::BaseGroup& group_;
  std::unique_ptr<Backend> flat_;
  std::vector<std::vector<int>> ranks_;  // by host
  std::size_t host_;                     // this rank's host
  std::size_t place_;                    // the position of this rank on its host
  std::size_t lanes_;                    // the number of ranks per host that send to other hosts
  bool is_even_;
  std::shared_ptr<Group> near_;
  std::shared_ptr<Group> far_;  // null without a lane
  std::unique_ptr<Backend> inside_;
  std::unique_ptr<Backend> across_;
  // The state of the current call.
  std::vector<CallSummary> cards_;
  std::vector<std::byte> slice_;
};

}  // namespace

std::unique_ptr<Backend> hosts_backend(group::BaseGroup& group, const WaitOptions& options) {
  multihost::Hosts hosts = hosts_of(group);
  const bool is_flat = std::ranges::all_of(hosts.members, [](const auto& host) { return host.size() == 1; });
  if (hosts.members.size() < 2 || is_flat) return nullptr;
  return std::make_unique<HostsBackend>(group, std::move(hosts), options);
}

}  // namespace muster::collectives
