// SPDX-License-Identifier: Apache-2.0
#pragma once
// Mail: the point-to-point messages between the ranks of a group. A message has a tag, a label of a few bytes, and a
// body of any length. All messages of a group use it: those of programs, gathers and collectives.
//
//  - A short message uses the eager protocol: the sender sends it at once, in one packet or several. The receiving rank
//    keeps it until a receive matches it. The sender counts the bytes that the other rank may have to keep, and that
//    rank returns them later as credit (`promised`).
//  - Any other message uses the rendezvous protocol: the sender announces it with one packet. The receiving rank
//    requests the body when a receive matches. The body then arrives in pieces, directly in the memory of that receive.
//
// Messages from one rank to another are matched in the order in which they were sent, and receives in the order in
// which they were posted. Both are looked up by rank and tag, without a linear search.
//
// step() does all of this work. Every wait in the process, for whatever reason, calls step() of every group's mail
// (progress.hpp). So a message that was begun completes while its rank waits in another call, as in MPI.

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
#include "muster/group.hpp"

namespace muster::group {

class BaseGroup;

/// The tags of the library's own messages. Programs use tags from 0 on, and their receives never match these messages.
enum class Subject : std::int64_t {
  collective = -1,  ///< collectives; a rank always receives these messages, so they need no credit
  caller = -2,      ///< Group::send
  exchange = -3,    ///< gathers, merges, streams and exports
};

struct Envelope {
  int from = 0;
  std::int64_t tag = 0;
  std::vector<std::byte> label;
  std::uint64_t bytes = 0;  // length of the body
};

class Mail {
 public:
  /// Wildcards of a receive. They have the values of muster::any_rank and muster::any_tag.
  static constexpr int any_rank = std::numeric_limits<int>::min();
  static constexpr std::int64_t any_tag = std::numeric_limits<int>::min();
  /// A rank keeps at most this many bytes of unreceived messages per sender and pool (PeerQueue::lent), or the group's
  /// longest packet if that is more. Each message counts as at least `least_cost` bytes. Messages of collectives and
  /// rounds do not count.
  static constexpr std::uint64_t promised = 256 << 10;
  static constexpr std::uint64_t least_cost = 256;

  struct Sending {
    int to = 0;
    std::int64_t tag = 0;
    std::vector<std::byte> label = {};
    std::span<const std::byte> body = {};
    std::shared_ptr<const void> keeper = {};  // owner of the body; null: the caller keeps it valid until is_given
    std::uint64_t id = 0;
    std::uint64_t sent = 0;
  };
  /// A message that this rank is sending.
  struct OutgoingMail : Sending {
    explicit OutgoingMail(Sending message) : Sending(std::move(message)) {}
    std::atomic<bool> is_given{false};  // the caller may reuse the body
    std::atomic<bool> is_done{false};   // the message arrives even if this rank no longer calls Muster
  };
  /// Returns the memory for a body. If it throws an Error, the receive fails with it, and the message is dropped.
  using Place = std::function<std::span<std::byte>(const Envelope&)>;
  struct Receiving {
    int from = 0;          // or any_rank
    std::int64_t tag = 0;  // or any_tag
    Place place = {};
  };
  struct IncomingMail : Receiving {
    explicit IncomingMail(Receiving wanted) : Receiving(std::move(wanted)) {}
    std::atomic<bool> is_done{false};
    Envelope envelope = {};
    std::optional<Error> error = {};
    std::span<std::byte> room = {};
    std::uint64_t received = 0;
  };

  explicit Mail(BaseGroup& group);
  ~Mail();
  Mail& operator=(Mail&&) = delete;

  // Called by the thread that holds the group (BaseGroup::Hold):

  /// Begins to send a message, whose label must fit into one packet. Throws as BaseGroup::try_send does.
  std::shared_ptr<OutgoingMail> send(Sending message);
  std::shared_ptr<IncomingMail> receive(Receiving wanted);
  /// Returns the oldest message that such a receive would match, or null if none has arrived.
  [[nodiscard]] const Envelope* find(int from, std::int64_t tag) const;
  /// Sends and receives everything that is possible now. Returns false if nothing was possible.
  bool step();
  /// From now on, all waits of this process call step(), even if this rank has no message in flight.
  void keep_stepping() noexcept;
  /// Waits until done() returns true, which depends on `rank` (any_rank: on all other ranks). Throws as
  /// Group::wait_until does; in that case all messages of this rank have been abandoned.
  void wait(const std::function<bool()>& done, int rank, const WaitOptions& options);
  /// Abandons all messages of this rank because the group has failed. Mail no longer uses their memory.
  void abandon() noexcept;

  // Called by progress.cpp:

  /// Returns whether this rank has a message in flight that needs its steps.
  [[nodiscard]] bool is_pending() const noexcept { return is_pending_.load(std::memory_order_relaxed); }
  /// Returns whether a wait elsewhere must call step(): this mail has had a message, and no wait() of its own calls
  /// step().
  [[nodiscard]] bool needs_steps() const noexcept { return is_used_ && !is_waited_for_ && !is_abandoned_; }
  /// Returns the messages that have ended, so that the caller drops them without holding a lock: dropping one may run
  /// any code of its owner.
  [[nodiscard]] std::vector<std::shared_ptr<const void>> take_ended() noexcept { return std::exchange(ended_, {}); }

 private:
  struct MailHeader;
  struct Unexpected {
    Envelope envelope;
    std::vector<std::byte> body;  // body of a message that arrived completely
    std::uint64_t id = 0;         // ID of an announced message; 0: it arrived completely
  };
  /// A rank and a tag. Each may be a wildcard.
  using Key = std::pair<int, std::int64_t>;
  /// Entries in order of arrival, with an index by key.
  template <class Entry>
  struct Ordered {
    std::map<std::uint64_t, Entry> entries;
    std::set<std::tuple<int, std::int64_t, std::uint64_t>> index;
    std::uint64_t next = 0;

    void add(std::span<const Key> keys, Entry entry);
    /// Returns the number of the oldest entry that has one of these keys.
    [[nodiscard]] std::optional<std::uint64_t> oldest(std::span<const Key> keys) const;
    Entry take(std::uint64_t number, std::span<const Key> keys);
  };
  /// The messages between this rank and one other rank.
  struct PeerQueue {
    std::deque<std::shared_ptr<OutgoingMail>> queue;                   // neither sent completely nor announced yet
    std::map<std::uint64_t, std::shared_ptr<OutgoingMail>> announced;  // not requested yet
    std::deque<std::shared_ptr<OutgoingMail>> wanted;                  // requested; their pieces are being sent
    std::vector<std::shared_ptr<OutgoingMail>> leaving;                // the group has accepted all of their packets
    std::deque<MailHeader> answers;  // answers to announcements of the other rank, and credit
    std::map<std::uint64_t, std::shared_ptr<IncomingMail>> coming;  // requested; their pieces are arriving
    std::vector<std::byte> parts;                                   // received packets of a message that has several
    // Two pools of credit: one for Group::send, whose messages wait for credit, and one for all other messages,
    // which must not delay them.
    std::array<std::uint64_t, 2> lent{};  // bytes that the other rank may keep for this one
    // Bytes that this rank no longer keeps, and has not returned as credit yet.
    std::array<std::uint64_t, 2> owed{};
  };

  /// Receives the packets that have arrived from all ranks, a limited number from each.
  bool take_packets();
  bool take(int from);
  bool push(int to);
  bool post_all(int to);
  bool post(int to, const MailHeader& head, std::span<const std::byte> packet);
  /// Returns whether the credit suffices for the whole message.
  [[nodiscard]] bool has_credit(const PeerQueue& lane, const OutgoingMail& message) const noexcept;
  [[nodiscard]] std::uint64_t eager() const noexcept;
  enum class Posted : std::uint8_t { nothing, part, whole, announcement };
  /// Posts the next packet of a message if the group accepts one now. Returns `whole` for its last packet.
  Posted post_next(int to, OutgoingMail& message);
  /// Ends the messages in PeerQueue::leaving once the group no longer needs this rank to deliver them.
  bool see_off(int to);
  /// Removes and returns the first receive that matches this message, or null if there is none.
  std::shared_ptr<IncomingMail> take_receive(int from, std::int64_t tag);
  /// Gets the memory of a receive (Place). Returns false if the receive has failed.
  bool open(IncomingMail& receive, Envelope envelope);
  void answer(const std::shared_ptr<IncomingMail>& receive, Envelope envelope, std::uint64_t id);
  void deliver(const std::shared_ptr<IncomingMail>& receive, Envelope envelope, std::span<const std::byte> body);
  /// Called when a receive has taken a message: this rank no longer keeps it, and returns its credit.
  void give_credit(const Envelope& envelope);
  template <class Message>
  void end(std::shared_ptr<Message> message);
  /// Called after each change: reports to Progress whether this mail has messages in flight.
  void tell_pending() noexcept;
  [[noreturn]] void fail(int from, const char* what);
  [[nodiscard]] PeerQueue& lane(int rank);

  BaseGroup& group_;
  std::map<int, std::shared_ptr<PeerQueue>> lanes_;  // by the other rank; created with its first message
  std::vector<int> senders_;                         // the ranks that a step asks for packets
  Ordered<std::shared_ptr<IncomingMail>> receives_;  // receives without a matching message
  Ordered<Unexpected> unexpected_;
  std::uint64_t next_id_ = 1;
  std::size_t under_way_ = 0;  // messages, receives and answers that are in flight
  std::vector<std::shared_ptr<const void>> ended_;
  std::atomic<bool> is_pending_{false};
  bool has_forwarded_ = false;  // in the last step
  bool is_used_ = false;
  bool is_waited_for_ = false;
  bool is_abandoned_ = false;
};

}  // namespace muster::group
