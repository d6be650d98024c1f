// SPDX-License-Identifier: Apache-2.0

#include "src/group/group.hpp"
#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>
#include "src/base/fixed_string.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/progress.hpp"
#include "src/group/region.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/clock.hpp"
#include "src/os/process.hpp"
#include "src/trace/span.hpp"

namespace muster {

std::span<const int> RankList::in(const SyncGroup& group) const noexcept {
  return is_all_ ? group::inside(group).all() : ranks_;
}

}  // namespace muster

namespace muster::group {

std::string name_of(const RankInfo& rank) {
  return fmt::format("rank {} (host {}, pid {})", rank.rank, rank.host, rank.pid);
}

Error error_of(const RankInfo& rank, ErrorKind kind, const std::string& words) {
  return Error(kind, words, {.rank = rank.rank, .pid = rank.pid, .host = rank.host});
}

Error in_name_of(const RankInfo& rank, const Error& cause) {
  ErrorDetails details = cause.details();
  details.rank = rank.rank;
  details.pid = rank.pid;
  details.host = rank.host;
  return {cause.kind(), name_of(rank) + ": " + cause.what(), details};
}

Error in_own_name(const SyncGroup& group, const Error& cause) {
  return cause.rank() ? cause : in_name_of(group.info(group.rank()), cause);
}

void fail_on_message(SyncGroup& group, int from, std::uint64_t bytes, std::uint64_t most) {
  const int rank = group.info(from).rank;
  fail(group, Error(ErrorKind::corrupt,
                    fmt::format("rank {} announces a message of {} bytes where at most {} can be", rank, bytes, most),
                    {.rank = rank}));
}

Error different_calls(const RankInfo& one, const RankInfo& other) {
  return {ErrorKind::rank_mismatch,
          fmt::format("{} and {} are in different calls: all ranks of a group make the same collective calls in the "
                      "same order",
                      name_of(one), name_of(other)),
          {.rank = other.rank}};
}

namespace {

/// A cancelled rank fails the group before it enters a round, because its arrival may be all that the other ranks need.
void throw_if_stopped(Group& group, const WaitOptions& options) {
  if (!options.stop.stop_requested()) return;
  const RankInfo& self = group.info(group.rank());
  fail(group, error_of(self, ErrorKind::cancelled, fmt::format("{} cancelled '{}'", name_of(self), options.phase)));
}

}  // namespace

Group::Group(int rank, std::vector<RankInfo> ranks, Nonce nonce, std::chrono::milliseconds timeout,
             std::shared_ptr<const Peers> peers)
    : rank_(rank),
      ranks_(std::move(ranks)),
      peers_(std::move(peers)),
      all_(ranks_.size()),
      nonce_(nonce),
      timeout_(bounded(timeout)),
      owner_pid_(os::process_id()),
      mail_(*this),
      statuses_(ranks_.size()) {
  std::iota(all_.begin(), all_.end(), 0);
  std::memcpy(&operations_.group, nonce_.data(), sizeof operations_.group);
  trace::join(nonce_, ranks_[static_cast<std::size_t>(rank)].rank, size());
  if (size() > 1) Region::show_own();
}

const RankInfo& Group::info(int rank) const {
  if (rank < 0 || rank >= size())
    throw Error(ErrorKind::argument,
                "rank " + std::to_string(rank) + " is not in the group of " + std::to_string(size()) + " ranks");
  return ranks_[static_cast<std::size_t>(rank)];
}

bool PeerLiveness::is_dead() const noexcept {
  try {
    return peers_ && peers_->end_of(rank_).has_value();
  } catch (const std::exception&) {
    return false;
  }
}

std::shared_ptr<const PeerLiveness> Group::liveness(int rank) const {
  (void)info(rank);
  return std::make_shared<const PeerLiveness>(peers_, rank);
}

bool Group::is_owner_process() const noexcept {
  return os::process_id() == owner_pid_;
}

void Group::set_timeout(std::chrono::milliseconds timeout) {
  if (timeout <= std::chrono::milliseconds::zero())
    throw Error(ErrorKind::argument, "a group's timeout must be longer than nothing");
  timeout_ = bounded(timeout);
}

std::shared_ptr<void> Group::extension(const void* key, const std::function<std::shared_ptr<void>()>& make) {
  const std::lock_guard lock(extensions_mutex_);
  std::shared_ptr<void>& slot = extensions_[key];
  if (!slot) slot = make();
  return slot;
}

bool Group::hold(Hold::Kind kind) noexcept {
  static thread_local char here;
  const auto me = reinterpret_cast<std::uintptr_t>(&here) * 2;
  const std::uintptr_t mine = kind == Hold::Kind::progress ? me + 1 : me;
  for (std::uintptr_t seen = 0; !user_.compare_exchange_weak(seen, mine, std::memory_order_acquire); seen = 0) {
    if (seen == me || seen == me + 1) break;
    if (seen == 0) continue;
    if (seen % 2 == 0 || kind == Hold::Kind::progress) return false;
    std::this_thread::yield();
  }
  ++depth_;
  return true;
}

void Group::let_go() noexcept {
  if (--depth_ == 0) user_.store(0, std::memory_order_release);
}

void Group::begin_progress() {
  if (size() > 1) Progress::add(*this);
}

void Group::end_progress() noexcept {
  if (!is_owner_process()) return;
  std::exchange(extensions_, {}).clear();
  if (size() == 1) return;
  Progress::remove(*this);
  mail_.abandon();
}

Error Group::forked() const {
  return {ErrorKind::unsupported,
          "this process was forked from rank " + std::to_string(rank_) +
              ", which owns the group: a forked child cannot take part; start it as a rank of its own"};
}

void Group::poison(const Error& cause) noexcept {
  if (is_owner_process()) do_poison(cause);
}

std::optional<Error> Group::failure() const {
  return is_owner_process() ? do_failure() : forked();
}

Use::Use(SyncGroup& group) : group_(inside(group)) {
  if (!group_.is_owner_process()) throw group_.forked();
  if (!group_.hold(Group::Hold::Kind::use))
    throw Error(ErrorKind::argument,
                "two threads use one group at the same time: give each its own by SyncGroup::duplicate()",
                {.rank = group_.rank()});
  if (auto cause = group_.failure()) {
    group_.let_go();
    throw *cause;
  }
}

Use::~Use() {
  group_.let_go();
}

void Group::barrier(const WaitOptions& options) {
  const Use use(*this);
  throw_if_stopped(*this, options);
  const trace::Span span(trace::Span::Outermost{}, trace::Kind::collective, "barrier", operations_);
  unless_out_of_memory(*this, [&] { do_barrier(options); });
}

void Group::all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) {
  const Use use(*this);
  if (mine.size() > max_record)
    throw Error(ErrorKind::argument, "an all-gather record of " + std::to_string(mine.size()) + " bytes: at most " +
                                         std::to_string(max_record) + " fit");
  if (all.size() != mine.size() * ranks_.size())
    throw Error(ErrorKind::argument, "all_gather: the result must have room for one record a rank");
  throw_if_stopped(*this, options);
  trace::Span span(trace::Span::Outermost{}, trace::Kind::collective, "all_gather", operations_);
  span.add_bytes(mine.size());
  unless_out_of_memory(*this, [&] { do_all_gather(mine, all, options); });
}

std::shared_ptr<Region> Group::region_of(int) const {
  return nullptr;
}

void Group::send(int to, std::span<const std::byte> message, const WaitOptions& options) {
  send(to, message, options, Subject::caller);
}

void Group::send(int to, std::span<const std::byte> message, const WaitOptions& options, Subject subject) {
  const Use use(*this);
  (void)info(to);
  if (to == rank_) throw Error(ErrorKind::argument, "a rank cannot send a message to itself");
  trace::Span span(trace::Span::Outermost{}, trace::Kind::message, "send", some_operation(), info(to).rank);
  span.add_bytes(message.size());
  unless_out_of_memory(*this, [&] {
    const auto sent = mail_.send({.to = to, .tag = static_cast<std::int64_t>(subject), .body = message});
    mail_.wait([&] { return sent->is_done.load(); }, to, options);
  });
}

std::vector<std::byte> Group::receive(int from, std::uint64_t most, const WaitOptions& options) {
  return receive(from, most, options, Subject::caller);
}

std::vector<std::byte> Group::receive(int from, std::uint64_t most, const WaitOptions& options, Subject subject) {
  const Use use(*this);
  (void)info(from);
  if (from == rank_) throw Error(ErrorKind::argument, "a rank cannot receive a message from itself");
  trace::Span span(trace::Span::Outermost{}, trace::Kind::message, "receive", some_operation(), info(from).rank);
  std::vector<std::byte> message;
  const auto place = [&](const Envelope& envelope) {
    // A message of an impossible length is not received.
    if (envelope.bytes <= most) message.resize(envelope.bytes);
    return std::span(message);
  };
  unless_out_of_memory(*this, [&] {
    const auto received = mail_.receive({.from = from, .tag = static_cast<std::int64_t>(subject), .place = place});
    mail_.wait([&] { return received->is_done.load(); }, from, options);
    if (received->error) fail_on_message(*this, from, received->envelope.bytes, most);
  });
  span.add_bytes(message.size());
  return message;
}

bool Group::try_send(int to, const PacketHead& head, std::span<const std::byte> packet) {
  return or_fail(*this, [&] { return do_try_send(to, head, packet); });
}

void Group::collect_packets(std::vector<int>& from) {
  or_fail(*this, [&] { do_collect_packets(from); });
}

void Group::do_collect_packets(std::vector<int>& from) {
  for (int other = 0; other < size(); ++other)
    if (other != rank()) from.push_back(other);
}

bool Group::try_receive(int from, const PacketPlace& place) {
  return or_fail(*this, [&] { return do_try_receive(from, place); });
}

void Group::wait_for_packets(const std::function<bool()>& done, std::span<const int> on, const WaitOptions& options) {
  do_wait_for_packets(done, on, options);
}

void Group::wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                       std::span<const int> on, const WaitOptions& options) {
  for (const int rank : on) (void)info(rank);
  if (!is_owner_process()) throw forked();
  do_wait_until(done, sleep, on, options);
}

void Group::agree(const std::optional<Error>& trouble, const WaitOptions& options) {
  // 0: success; otherwise the kind of the error + 1.
  const std::uint32_t mine = trouble ? static_cast<std::uint32_t>(trouble->kind()) + 1 : 0;
  do_all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(statuses_)), options);
  const auto first = std::ranges::find_if(statuses_, [](std::uint32_t status) { return status != 0; });
  if (first == statuses_.end()) return;
  using Words = WrittenError<640>;
  static_assert(sizeof(Words) <= max_record);
  Words words;
  if (trouble) words.put(*trouble);
  std::vector<Words> all(ranks_.size());
  do_all_gather(std::as_bytes(std::span(&words, 1)), std::as_writable_bytes(std::span(all)), options);
  const auto at = static_cast<std::size_t>(first - statuses_.begin());
  throw in_name_of(ranks_[at], all[at].get()).with_context(options.phase);
}

void Group::refuse(const Error& failure, const WaitOptions& options) {
  const Use use(*this);
  agree(failure, options);
  throw Error(failure);
}

Group::Part Group::part_of(std::span<const int> ranks, const WaitOptions& options) {
  struct Card {
    std::uint64_t hash = 0;
    std::int32_t length = 0;  // 0: this rank is in no list
    std::int32_t position = -1;
  };
  Part part;
  Card mine;
  std::vector<Card> cards;
  together(options, [&] {
    cards.resize(ranks_.size());
    const auto self = std::ranges::find(ranks, rank_);
    for (auto rank = ranks.begin(); rank != ranks.end(); ++rank) {
      (void)info(*rank);
      if (std::find(ranks.begin(), rank, *rank) != rank)
        throw Error(ErrorKind::argument, "the list to split by has rank " + std::to_string(*rank) + " twice");
    }
    if (self == ranks.end()) return;
    part = {ranks, static_cast<int>(self - ranks.begin())};
    mine = {XXH3_64bits(ranks.data(), ranks.size_bytes()), static_cast<std::int32_t>(ranks.size()), part.position};
  });
  do_all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(cards)), options);
  // Each rank reports the list that it is in. A list of n ranks must be reported by n ranks.
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    const Card& card = cards[rank];
    if (card.length == 0) continue;
    const auto said = std::ranges::count(cards, card.hash, &Card::hash);
    if (said != card.length)
      throw Error(ErrorKind::rank_mismatch,
                  "rank " + std::to_string(ranks_[rank].rank) + " splits the group by a list of " +
                      std::to_string(card.length) + " ranks, which " + std::to_string(said) +
                      " of them pass: all members of a list must pass the same one",
                  {.rank = ranks_[rank].rank});
  }
  return part;
}

std::shared_ptr<SyncGroup> Group::duplicate(const WaitOptions& options) {
  const Use use(*this);
  return unless_out_of_memory(*this, [&] { return make_part({all_, rank_}, Tie::none, options); });
}

std::shared_ptr<Group> Group::companion(const WaitOptions& options) {
  const Use use(*this);
  return unless_out_of_memory(*this, [&] { return make_part({all_, rank_}, Tie::companion, options); });
}

std::shared_ptr<SyncGroup> Group::split(const RankList& ranks, const WaitOptions& options) {
  const Use use(*this);
  return unless_out_of_memory(*this, [&] { return make_part(part_of(ranks.in(*this), options), Tie::none, options); });
}

}  // namespace muster::group

namespace muster {

// A group of one process: every round is complete as soon as it is entered.
namespace {

SyncGroup::Nonce random_nonce() {
  SyncGroup::Nonce nonce{};
  os::random_bytes(nonce);
  return nonce;
}

class SingleGroup final : public group::Group {
 public:
  explicit SingleGroup(std::chrono::milliseconds timeout)
      : group::Group(0, {RankInfo{0, os::host_name(), os::process_id()}}, random_nonce(), timeout) {}
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
  bool do_try_send(int, const group::PacketHead&, std::span<const std::byte>) override { return false; }
  bool do_try_receive(int, const group::PacketPlace&) override { return false; }
  void do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                           const WaitOptions& options) override {
    do_wait_until(
        done, [](std::chrono::nanoseconds longest) { std::this_thread::sleep_for(longest); }, on, options);
  }
  // Only another thread of this process could make done() true.
  void do_wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                     std::span<const int>, const WaitOptions& options) override {
    const auto begin = os::Clock::now();
    group::Progress progress;
    while (!done()) {
      if (const auto cause = failure()) throw *cause;
      check(options);
      sleep(progress.step(std::chrono::milliseconds(20)));
      if (done() || os::Clock::now() - begin < group::timeout_of(options, *this)) continue;
      const Error cause(ErrorKind::timeout, std::string(options.phase) + ": the deadline passed", {.rank = 0});
      poison(cause);
      throw cause;
    }
  }
  std::shared_ptr<group::Group> make_part(const Part& part, Tie, const WaitOptions&) override {
    // A companion needs no link to this group: no other rank could see its progress, and only its own calls fail it.
    return part.members.empty() ? nullptr : std::make_shared<SingleGroup>(timeout());
  }

 private:
  void check(const WaitOptions& options) {
    if (!options.stop.stop_requested() && !group::is_interrupted()) return;
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
  return std::make_shared<SingleGroup>(group::default_timeout());
}

}  // namespace muster
