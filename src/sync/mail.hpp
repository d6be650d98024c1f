// SPDX-License-Identifier: Apache-2.0
#pragma once
// Mail: the messages between the ranks of a group. A message has a tag, a label of a few bytes, and a body of any
// length. Every message of a group is mail: those of programs, of gathers, of collectives and of rounds.
//
//  - A short message is sent at once, in one packet or in several, and its receiver keeps it until it is received.
//    The sender counts the bytes that the receiver has to keep, and the receiver returns them as credit (`promised`).
//  - A longer message, or one for which the credit does not suffice, is announced by a packet. The receiver asks for it
//    once a receive matches it. Its pieces then go straight to their place.
// Messages from one rank to another are matched in the order in which they were sent, and receives in the order in
// which they were made. Both are found by rank and tag, not by a search.
//
// All of it moves in step(). Every wait of the process calls step() of every mail (progress.hpp), whatever it waits
// for: as with MPI, a message that has begun completes while its rank is in another call.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/sync_group.hpp"

namespace muster::sync {

class Group;

/// The library's own messages, by their tags. Programs have tags from 0 on, which never meet these.
enum class Subject : std::int64_t {
  collective = -1,  ///< of collectives: always received, so they need no credit
  caller = -2,      ///< of SyncGroup::send
  exchange = -3,    ///< of gathers, merges, streams and exports
  round = -4,       ///< of the groups' own rounds
};

struct Envelope {
  int from = 0;
  std::int64_t tag = 0;
  std::vector<std::byte> label;
  std::uint64_t bytes = 0;  // of the body
};

class Mail {
 public:
  /// The patterns of receives; the values of muster::any_rank and muster::any_tag.
  static constexpr int any_rank = std::numeric_limits<int>::min();
  static constexpr std::int64_t any_tag = std::numeric_limits<int>::min();
  /// A receiver keeps at most so many bytes for each sender; more if a packet of the group is longer than that. A
  /// message counts as `least_cost` at least. The library's own collectives and rounds do not count.
  static constexpr std::uint64_t promised = 256 << 10;
  static constexpr std::uint64_t least_cost = 256;

  struct Sending {
    int to = 0;
    std::int64_t tag = 0;
    std::vector<std::byte> label = {};
    std::span<const std::byte> body = {};
    std::shared_ptr<const void> keeper = {};  // of the body; null: the caller keeps it until the message is done
    std::uint64_t id = 0;
    std::uint64_t sent = 0;
  };
  /// A message that this rank sends.
  struct Outgoing : Sending {
    explicit Outgoing(Sending message) : Sending(std::move(message)) {}
    std::atomic<bool> is_given{false};  // the body is the caller's again
    std::atomic<bool> is_done{false};   // the message needs this rank no more
  };
  /// Returns room for a body. An Error that it throws is the failure of the receive, and the message is dropped.
  using Place = std::function<std::span<std::byte>(const Envelope&)>;
  struct Receiving {
    int from = 0;          // or any_rank
    std::int64_t tag = 0;  // or any_tag
    Place place = {};
  };
  struct Incoming : Receiving {
    explicit Incoming(Receiving wanted) : Receiving(std::move(wanted)) {}
    std::atomic<bool> is_done{false};
    Envelope envelope = {};
    std::optional<Error> error = {};
    std::span<std::byte> room = {};
    std::uint64_t received = 0;
  };

  explicit Mail(Group& group);
  ~Mail();
  Mail& operator=(Mail&&) = delete;

  // By the thread that uses the group (Group::Hold).

  /// `label` fits into a packet. Throws as Group::try_send.
  std::shared_ptr<Outgoing> send(Sending message);
  std::shared_ptr<Incoming> receive(Receiving wanted);
  /// The oldest message that such a receive would get, if one has come.
  [[nodiscard]] const Envelope* find(int from, std::int64_t tag) const;
  /// Moves everything that can be moved now; false if nothing could.
  bool step();
  /// Waits until done(), which depends on `rank` (any_rank: on all others). Throws as SyncGroup::wait_until; the
  /// messages of this rank have ended then.
  void wait(const std::function<bool()>& done, int rank, const WaitOptions& options);
  /// Ends all messages of this rank, whose memory is not touched any more: the group has failed.
  void abandon() noexcept;

  // For progress.hpp.

  /// Whether there is a message that this rank has to move.
  [[nodiscard]] bool is_pending() const noexcept { return is_pending_.load(std::memory_order_relaxed); }
  /// Whether step() has work: there has been a message, and no wait() of this mail calls it.
  [[nodiscard]] bool needs_steps() const noexcept { return is_used_ && !is_waited_for_ && !is_abandoned_; }
  /// What has ended. Its owners may run any code, so it is dropped outside of locks.
  [[nodiscard]] std::vector<std::shared_ptr<const void>> take_ended() noexcept { return std::exchange(ended_, {}); }

 private:
  struct Head;
  struct Unexpected {
    Envelope envelope;
    std::vector<std::byte> body;  // of one that came whole
    std::uint64_t id = 0;         // of one that was announced; 0: it came whole
  };
  /// A rank and a tag, of which each may be a pattern.
  using Key = std::pair<int, std::int64_t>;
  /// Entries in their order, and an index by keys.
  template <class Entry>
  struct Ordered {
    std::map<std::uint64_t, Entry> entries;
    std::set<std::tuple<int, std::int64_t, std::uint64_t>> index;
    std::uint64_t next = 0;

    void add(std::span<const Key> keys, Entry entry);
    /// The number of the oldest entry under one of these keys.
    [[nodiscard]] std::optional<std::uint64_t> oldest(std::span<const Key> keys) const;
    Entry take(std::uint64_t number, std::span<const Key> keys);
  };
  /// Messages to and from one rank.
  struct Lane {
    std::deque<std::shared_ptr<Outgoing>> queue;                   // not announced yet
    std::map<std::uint64_t, std::shared_ptr<Outgoing>> announced;  // until they are asked for
    std::deque<std::shared_ptr<Outgoing>> wanted;
    std::vector<std::shared_ptr<Outgoing>> leaving;             // all of it is given to the group
    std::deque<Head> answers;                                   // to its announcements, and credit
    std::map<std::uint64_t, std::shared_ptr<Incoming>> coming;  // asked for
    std::vector<std::byte> parts;                               // of a message in several packets
    // Of messages of SyncGroup::send, which wait for credit, and of all others, which must not keep those waiting:
    std::array<std::uint64_t, 2> lent{};  // bytes that it keeps for this rank
    std::array<std::uint64_t, 2> owed{};  // bytes that this rank has kept for it, and does not keep any more
  };

  bool take(int from);
  bool push(int to);
  bool post_all(int to);
  bool post(int to, const Head& head, std::span<const std::byte> packet);
  /// Whether the receiver may keep all of it.
  [[nodiscard]] bool has_credit(const Lane& lane, const Outgoing& message) const noexcept;
  [[nodiscard]] std::uint64_t eager() const noexcept;
  enum class Posted : std::uint8_t { nothing, part, whole, announcement };
  /// Posts the next packet of a message, if there is room for it; `whole` is its last one.
  Posted post_next(int to, Outgoing& message);
  /// What the group has sent of it is done.
  bool see_off(int to);
  /// The first receive that gets this message; null if there is none.
  std::shared_ptr<Incoming> take_receive(int from, std::int64_t tag);
  /// Asks a receive for room. False if it has none: it has failed.
  bool open(Incoming& receive, Envelope envelope);
  void answer(const std::shared_ptr<Incoming>& receive, Envelope envelope, std::uint64_t id);
  void deliver(const std::shared_ptr<Incoming>& receive, Envelope envelope, std::span<const std::byte> body);
  /// This message is its receiver's now: this rank does not keep it any more.
  void give_credit(const Envelope& envelope);
  template <class Message>
  void end(std::shared_ptr<Message> message);
  /// After each change.
  void tell_pending() noexcept;
  [[noreturn]] void fail(int from, const char* what);
  [[nodiscard]] Lane& lane(int rank);

  Group& group_;
  std::vector<std::shared_ptr<Lane>> lanes_;
  Ordered<std::shared_ptr<Incoming>> receives_;  // that no message has met
  Ordered<Unexpected> unexpected_;
  std::uint64_t next_id_ = 1;
  std::size_t under_way_ = 0;  // messages and answers that this rank has to move
  std::vector<std::shared_ptr<const void>> ended_;
  std::atomic<bool> is_pending_{false};
  bool is_used_ = false;
  bool is_waited_for_ = false;
  bool is_abandoned_ = false;
};

}  // namespace muster::sync
