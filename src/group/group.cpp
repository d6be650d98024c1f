// SPDX-License-Identifier: Apache-2.0

#include "src/group/group.hpp"
#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#include <algorithm>
#include <cstring>
#include <map>
#include <thread>
#include <unordered_map>
#include <utility>
#include "src/base/escaped.hpp"
#include "src/base/fixed_string.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/base/message.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/progress.hpp"
#include "src/group/region.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/clock.hpp"
#include "src/os/process.hpp"
#include "src/trace/span.hpp"

namespace muster {

std::span<const int> RankList::in(const Group& group) const noexcept {
  return is_all_ ? group::inside(group).all() : ranks_;
}

}  // namespace muster

namespace muster::group {

std::string name_of(const RankInfo& rank) {
  return fmt::format("rank {} (host {}, pid {})", rank.global_rank, rank.host, rank.pid);
}

Error error_of(const RankInfo& rank, ErrorKind kind, const std::string& words) {
  return Error(kind, words, {.rank = rank.global_rank, .pid = rank.pid, .host = rank.host});
}

Error in_name_of(const RankInfo& rank, const Error& cause) {
  ErrorDetails details = cause.details();
  details.rank = rank.global_rank;
  details.pid = rank.pid;
  details.host = rank.host;
  return {cause.kind(), name_of(rank) + ": " + cause.what(), details};
}

Error in_own_name(const Group& group, const Error& cause) {
  return cause.rank() ? cause : in_name_of(group.info(group.rank()), cause);
}

void fail_on_message(Group& group, int from, std::uint64_t bytes, std::uint64_t most) {
  const int rank = group.info(from).global_rank;
  fail(group, Error(ErrorKind::corrupt,
                    fmt::format("rank {} announces a message of {} bytes, but at most {} bytes are allowed", rank,
                                bytes, most),
                    {.rank = rank}));
}

int first_of_host(const Group& group) {
  const int host = group.host_of(group.rank());
  int rank = 0;
  while (group.host_of(rank) != host) ++rank;
  return rank;
}

Error malformed_round(const std::string& words) {
  return {ErrorKind::corrupt,
          fmt::format("malformed message of a round: {}. Use one build of Muster on all ranks", words)};
}

Error different_calls(const RankInfo& one, const RankInfo& other) {
  return {ErrorKind::rank_mismatch,
          fmt::format("{} and {} are in different calls. Make the same collective calls in the same order on all ranks",
                      name_of(one), name_of(other)),
          {.rank = other.global_rank}};
}

namespace {

/// A cancelled rank fails the group before it enters a round, because its arrival may be all that the other ranks need.
void throw_if_stopped(BaseGroup& group, const WaitOptions& options) {
  if (!options.stop.stop_requested()) return;
  const RankInfo& self = group.info(group.rank());
  fail(group,
       error_of(self, ErrorKind::cancelled, fmt::format("{} cancelled {}", name_of(self), in_quotes(options.phase))));
}

}  // namespace

BaseGroup::BaseGroup(int rank, std::shared_ptr<const RankTable> ranks, Nonce nonce, std::chrono::milliseconds timeout,
                     std::shared_ptr<const Peers> peers)
    : rank_(rank),
      ranks_(std::move(ranks)),
      peers_(std::move(peers)),
      nonce_(nonce),
      timeout_(bounded(timeout)),
      owner_pid_(os::process_id()),
      mail_(*this),
      statuses_(ranks_->size()) {
  std::memcpy(&operations_.group, nonce_.data(), sizeof operations_.group);
  trace::join(nonce_, (*ranks_)[rank].global_rank, size());
  if (size() > 1) Region::show_own();
}

const RankInfo& BaseGroup::info(int rank) const {
  if (rank < 0 || rank >= size())
    throw Error(ErrorKind::invalid_argument, out_of_range_text("group: rank", rank, size()));
  return (*ranks_)[rank];
}

bool PeerLiveness::is_dead() const noexcept {
  try {
    return peers_ && peers_->end_of(rank_).has_value();
  } catch (const std::exception&) {
    return false;
  }
}

std::shared_ptr<const PeerLiveness> BaseGroup::liveness(int rank) const {
  (void)info(rank);
  return std::make_shared<const PeerLiveness>(peers_, rank);
}

bool BaseGroup::is_owner_process() const noexcept {
  return os::process_id() == owner_pid_;
}

void BaseGroup::set_timeout(std::chrono::milliseconds timeout) {
  if (timeout <= std::chrono::milliseconds::zero())
    throw Error(ErrorKind::invalid_argument, "group: the timeout must be longer than 0");
  timeout_ = bounded(timeout);
}

std::shared_ptr<void> BaseGroup::extension(const void* key, const std::function<std::shared_ptr<void>()>& make) {
  const std::lock_guard lock(extensions_mutex_);
  std::shared_ptr<void>& slot = extensions_[key];
  if (!slot) slot = make();
  return slot;
}

bool BaseGroup::hold(Hold::Kind kind) noexcept {
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

void BaseGroup::let_go() noexcept {
  if (--depth_ == 0) user_.store(0, std::memory_order_release);
}

void BaseGroup::begin_progress() {
  if (size() > 1) RankProgress::add(*this);
}

void BaseGroup::end_progress() noexcept {
  if (!is_owner_process()) return;
  std::exchange(extensions_, {}).clear();
  if (size() == 1) return;
  RankProgress::remove(*this);
  mail_.abandon();
}

Error BaseGroup::forked() const {
  return {ErrorKind::unsupported, "group: using it in a forked process: it belongs to the parent, rank " +
                                      std::to_string(info(rank_).global_rank) +
                                      ". Start the process as a separate rank"};
}

void BaseGroup::abort(const Error& cause) noexcept {
  if (is_owner_process()) do_abort(cause);
}

std::optional<Error> BaseGroup::error() const {
  return is_owner_process() ? do_failure() : forked();
}

int ranks_of_host(const Group& group) {
  int ranks = 0;
  for (int rank = 0; rank < group.size(); ++rank)
    if (group.host_of(rank) == group.host_of(group.rank())) ++ranks;
  return ranks;
}

GroupLock::GroupLock(Group& group) : group_(inside(group)) {
  if (!group_.is_owner_process()) throw group_.forked();
  if (!group_.hold(BaseGroup::Hold::Kind::use))
    throw Error(ErrorKind::invalid_argument,
                "group: two threads use it at the same time. Give each thread its own group (Group::duplicate)",
                {.rank = group_.rank()});
  if (auto cause = group_.error()) {
    group_.let_go();
    throw *cause;
  }
}

GroupLock::~GroupLock() {
  group_.let_go();
}

void BaseGroup::barrier(const WaitOptions& options) {
  const GroupLock use(*this);
  throw_if_stopped(*this, options);
  const trace::Span span(trace::Span::Outermost{}, trace::SpanKind::collective, "barrier", operations_);
  unless_out_of_memory(*this, [&] { do_barrier(options); });
}

void BaseGroup::all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) {
  const GroupLock use(*this);
  if (mine.size() > max_record)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("all_gather: the record has {} bytes, at most {} are allowed", mine.size(), max_record));
  if (all.size() != mine.size() * ranks_->size())
    throw Error(ErrorKind::invalid_argument, "all_gather: the result must have room for one record per rank");
  throw_if_stopped(*this, options);
  trace::Span span(trace::Span::Outermost{}, trace::SpanKind::collective, "all_gather", operations_);
  span.add_bytes(mine.size());
  unless_out_of_memory(*this, [&] { do_all_gather(mine, all, options); });
}

namespace {

/// Whether any record has a byte that is not 0. Records may have any length.
class AnyFold final : public ValueFold<std::uint8_t> {
 public:
  void begin(std::span<const int>, std::span<const std::byte> here) override {
    sum_ = std::ranges::any_of(here, [](std::byte byte) { return byte != std::byte{0}; }) ? 1 : 0;
  }

 protected:
  void add(std::uint8_t& sum, const std::uint8_t& value) override { sum |= value; }
};

/// The report of one rank of a split.
struct ListRecord {
  std::uint64_t hash = 0;
  std::int32_t length = 0;  // 0: this rank is in no list
  std::int32_t position = -1;
};

/// Whether a list of a split is not reported by all of its members. Only the lists whose members are not all below a
/// host are sent up.
class ListsFold final : public HostFold {
 public:
  void begin(std::span<const int>, std::span<const std::byte> here) override {
    each<ListRecord>(here, [this](const ListRecord& record) {
      if (record.length != 0) add({record.hash, record.length, 1});
    });
  }
  void take_below(std::span<const std::byte> message) override {
    each<OpenList>(message, [this](const OpenList& list) { add(list); });
  }
  void up(Bytes& out) override {
    std::erase_if(open_, [](const auto& entry) { return entry.second.reports == entry.second.length; });
    for (const auto& [hash, list] : open_) {
      const auto bytes = std::as_bytes(std::span(&list, 1));
      out.insert(out.end(), bytes.begin(), bytes.end());
    }
    is_wrong_ = !open_.empty();
  }
  void take_above(std::span<const std::byte> message) override { is_wrong_ = AnyFold::read(message) != 0; }
  void down(std::size_t, Bytes& out) const override { out.push_back(is_wrong_ ? std::byte{1} : std::byte{0}); }
  [[nodiscard]] bool tells_all_the_same() const noexcept override { return true; }

 private:
  struct OpenList {
    std::uint64_t hash = 0;
    std::int32_t length = 0;
    std::int32_t reports = 0;
  };
  template <class Entry, class Take>
  static void each(std::span<const std::byte> message, const Take& take) {
    if (message.size() % sizeof(Entry) != 0) throw malformed_round(fmt::format("{} bytes of lists", message.size()));
    for (; !message.empty(); message = message.subspan(sizeof(Entry))) {
      Entry entry;
      std::memcpy(&entry, message.data(), sizeof entry);
      take(entry);
    }
  }
  void add(const OpenList& list) {
    const auto [known, is_new] = open_.emplace(list.hash, list);
    if (!is_new) known->second.reports += list.reports;
  }

  std::map<std::uint64_t, OpenList> open_;
  bool is_wrong_ = false;
};

}  // namespace

std::vector<std::byte> BaseGroup::fold(std::span<const std::byte> mine, HostFold& fold, const WaitOptions& options) {
  const GroupLock use(*this);
  if (mine.size() > max_record)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("fold: the record has {} bytes, at most {} are allowed", mine.size(), max_record));
  throw_if_stopped(*this, options);
  trace::Span span(trace::Span::Outermost{}, trace::SpanKind::collective, "fold", operations_);
  span.add_bytes(mine.size());
  return unless_out_of_memory(*this, [&] { return do_fold(mine, fold, options); });
}

std::vector<std::byte> BaseGroup::do_fold(std::span<const std::byte>, HostFold&, const WaitOptions&) {
  throw Error(ErrorKind::unsupported,
              fmt::format("fold: groups of kind {} have one host. Use all_gather()", in_quotes(kind())));
}

bool BaseGroup::any(bool mine, const WaitOptions& options) {
  const std::uint8_t own = mine ? 1 : 0;
  const auto record = std::as_bytes(std::span(&own, 1));
  if (has_folds()) {
    AnyFold any;
    const auto answer = fold(record, any, options);
    return or_blame(*this, first_here, [&] { return AnyFold::read(answer) != 0; });
  }
  std::vector<std::uint8_t> all(ranks_->size());
  all_gather(record, std::as_writable_bytes(std::span(all)), options);
  return std::ranges::find(all, 1) != all.end();
}

std::shared_ptr<Region> BaseGroup::region_of(int) const {
  return nullptr;
}

void BaseGroup::send(int to, std::span<const std::byte> message, const WaitOptions& options) {
  send(to, message, options, Subject::caller);
}

void BaseGroup::send(int to, std::span<const std::byte> message, const WaitOptions& options, Subject subject) {
  const GroupLock use(*this);
  (void)info(to);
  if (to == rank_) throw Error(ErrorKind::invalid_argument, "send: a rank cannot send a message to itself");
  trace::Span span(trace::Span::Outermost{}, trace::SpanKind::message, "send", some_operation(), info(to).global_rank);
  span.add_bytes(message.size());
  unless_out_of_memory(*this, [&] {
    const auto sent = mail_.send({.to = to, .tag = static_cast<std::int64_t>(subject), .body = message});
    mail_.wait([&] { return sent->is_done.load(); }, to, options);
  });
}

std::vector<std::byte> BaseGroup::receive(int from, std::uint64_t most, const WaitOptions& options) {
  return receive(from, most, options, Subject::caller);
}

std::vector<std::byte> BaseGroup::receive(int from, std::uint64_t most, const WaitOptions& options, Subject subject) {
  const GroupLock use(*this);
  (void)info(from);
  if (from == rank_) throw Error(ErrorKind::invalid_argument, "receive: a rank cannot receive a message from itself");
  trace::Span span(trace::Span::Outermost{}, trace::SpanKind::message, "receive", some_operation(),
                   info(from).global_rank);
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

bool BaseGroup::try_send(int to, const PacketHead& head, std::span<const std::byte> packet) {
  return or_fail(*this, [&] { return do_try_send(to, head, packet); });
}

bool BaseGroup::collect_packets(std::vector<int>& from) {
  return or_fail(*this, [&] { return do_collect_packets(from); });
}

bool BaseGroup::do_collect_packets(std::vector<int>& from) {
  for (int other = 0; other < size(); ++other)
    if (other != rank()) from.push_back(other);
  return false;
}

bool BaseGroup::try_receive(int from, const PacketPlace& place) {
  return or_fail(*this, [&] { return do_try_receive(from, place); });
}

void BaseGroup::wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                                 const WaitOptions& options) {
  do_wait_for_packets(done, on, options);
}

void BaseGroup::wait_until(const std::function<bool()>& done,
                           const std::function<void(std::chrono::nanoseconds)>& sleep, std::span<const int> on,
                           const WaitOptions& options) {
  for (const int rank : on) (void)info(rank);
  if (!is_owner_process()) throw forked();
  do_wait_until(done, sleep, on, options);
}

void BaseGroup::agree(const std::optional<Error>& trouble, const WaitOptions& options) {
  // 0: success; otherwise the kind of the error + 1.
  const std::uint32_t mine = trouble ? static_cast<std::uint32_t>(trouble->kind()) + 1 : 0;
  if (has_folds()) {
    AnyFold fold;
    const auto answer = do_fold(std::as_bytes(std::span(&mine, 1)), fold, options);
    if (!or_blame(*this, first_here, [&] { return AnyFold::read(answer) != 0; })) return;
  }
  do_all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(statuses_)), options);
  const auto first = std::ranges::find_if(statuses_, [](std::uint32_t status) { return status != 0; });
  if (first == statuses_.end()) return;
  using Words = WrittenError<640>;
  static_assert(sizeof(Words) <= max_record);
  Words words;
  if (trouble) words.put(*trouble);
  std::vector<Words> all(ranks_->size());
  do_all_gather(std::as_bytes(std::span(&words, 1)), std::as_writable_bytes(std::span(all)), options);
  const auto at = static_cast<int>(first - statuses_.begin());
  const Error cause = all[static_cast<std::size_t>(at)].get();
  // If the ranks of a host agreed before, all of them have failed with the error of one of them, which it names.
  const int named = ranks_->rank_of(cause.rank().value_or(-1));
  if (!cause.host().empty() && named >= 0 && statuses_[static_cast<std::size_t>(named)] != 0) throw Error(cause);
  throw in_name_of((*ranks_)[at], cause).with_context(options.phase);
}

void BaseGroup::refuse(const Error& failure, const WaitOptions& options) {
  const GroupLock use(*this);
  agree(failure, options);
  throw Error(failure);
}

BaseGroup::SplitPart BaseGroup::part_of(std::span<const int> ranks, const WaitOptions& options) {
  SplitPart part;
  ListRecord mine;
  together(options, [&] {
    const auto self = std::ranges::find(ranks, rank_);
    std::vector<bool> seen(ranks_->size());
    for (const int rank : ranks) {
      (void)info(rank);
      if (seen[static_cast<std::size_t>(rank)])
        throw Error(ErrorKind::invalid_argument, fmt::format("split: the list has rank {} twice", rank));
      seen[static_cast<std::size_t>(rank)] = true;
    }
    if (self == ranks.end()) return;
    part = {ranks, static_cast<int>(self - ranks.begin())};
    mine = {XXH3_64bits(ranks.data(), ranks.size_bytes()), static_cast<std::int32_t>(ranks.size()), part.position};
  });
  // Each rank reports the list that it is in. A list of n ranks must be reported by n ranks.
  if (has_folds()) {
    ListsFold fold;
    const auto answer = do_fold(std::as_bytes(std::span(&mine, 1)), fold, options);
    if (!or_blame(*this, first_here, [&] { return AnyFold::read(answer) != 0; })) return part;
  }
  // With one host, or to name the ranks of a wrong list.
  std::vector<ListRecord> cards;
  together(options, [&] { cards.resize(ranks_->size()); });
  do_all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(cards)), options);
  std::unordered_map<std::uint64_t, std::int32_t> reports;
  for (const ListRecord& card : cards)
    if (card.length != 0) ++reports[card.hash];
  for (const int rank : all()) {
    const ListRecord& card = cards[static_cast<std::size_t>(rank)];
    if (card.length == 0) continue;
    const std::int32_t said = reports[card.hash];
    if (said != card.length)
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("split: rank {} passed a list of {} ranks, and {} of them passed the same list. Pass the "
                              "same list on all its members",
                              info(rank).global_rank, card.length, said),
                  {.rank = info(rank).global_rank});
  }
  return part;
}

std::shared_ptr<Group> BaseGroup::duplicate(const WaitOptions& options) {
  const GroupLock use(*this);
  return unless_out_of_memory(*this, [&] { return make_part({all(), rank_}, Tie::none, options); });
}

std::shared_ptr<BaseGroup> BaseGroup::companion(const WaitOptions& options) {
  const GroupLock use(*this);
  return unless_out_of_memory(*this, [&] { return make_part({all(), rank_}, Tie::companion, options); });
}

std::shared_ptr<Group> BaseGroup::split(const RankList& ranks, const WaitOptions& options) {
  const GroupLock use(*this);
  return unless_out_of_memory(*this, [&] { return make_part(part_of(ranks.in(*this), options), Tie::none, options); });
}

}  // namespace muster::group

namespace muster {

// A group of one process: every round is complete as soon as it is entered.
namespace {

Group::Nonce random_nonce() {
  Group::Nonce nonce{};
  os::random_bytes(nonce);
  return nonce;
}

class SingleGroup final : public group::BaseGroup {
 public:
  explicit SingleGroup(std::chrono::milliseconds timeout)
      : group::BaseGroup(0, group::RankTable::make({{0, os::host_name(), os::process_id()}}), random_nonce(), timeout) {
  }
  ~SingleGroup() override { end_progress(); }

  [[nodiscard]] std::string_view kind() const noexcept override { return "single"; }
  [[nodiscard]] bool has_failure() const noexcept override { return error().has_value(); }
  void progress() noexcept override {}

 protected:
  [[nodiscard]] std::uint64_t rounds() const noexcept override { return round_; }
  void do_abort(const Error& cause) noexcept override {
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
  // BaseGroup rejects messages before these calls, because there is no other rank.
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
    group::RankProgress progress;
    while (!done()) {
      if (const auto cause = error()) throw *cause;
      check(options);
      sleep(progress.step(std::chrono::milliseconds(20)));
      if (done() || os::Clock::now() - begin < group::timeout_of(options, *this)) continue;
      const Error cause(ErrorKind::timeout, std::string(options.phase) + ": timed out. Raise MUSTER_TIMEOUT (seconds)",
                        {.rank = 0});
      abort(cause);
      throw cause;
    }
  }
  std::shared_ptr<group::BaseGroup> make_part(const SplitPart& part, Tie, const WaitOptions&) override {
    // A companion needs no link to this group: no other rank could see its progress, and only its own calls fail it.
    return part.members.empty() ? nullptr : std::make_shared<SingleGroup>(timeout());
  }

 private:
  void check(const WaitOptions& options) {
    if (!options.stop.stop_requested() && !group::is_interrupted()) return;
    const Error cause(ErrorKind::cancelled, std::string(options.phase) + ": cancelled", {.rank = 0});
    abort(cause);
    throw cause;
  }

  std::uint64_t round_ = 0;
  mutable ForkMutex mutex_;
  std::optional<Error> failure_;
};

}  // namespace

std::shared_ptr<Group> single_group() {
  return std::make_shared<SingleGroup>(group::default_timeout());
}

}  // namespace muster
