// SPDX-License-Identifier: Apache-2.0
#pragma once
// Mail: messages of any length between the ranks of a group, by tag, that nobody has to wait for. Each has a label, a
// few bytes that come with its announcement, and a body.
//
//  - What fits into one packet is sent as one, and is with its receiver then, wanted or not.
//  - More is announced by a packet. The receiver asks for it once a receive wants it, and it comes in pieces, which say
//    where they belong, straight into its place. So only short messages pile up.
// Messages from one rank to another are matched in the order that they were sent in; receives in the order that they
// were made in. All of it moves in step(), which every wait calls.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "muster/process_group.hpp"
#include "src/collectives/backend.hpp"
#include "src/sync/group.hpp"

namespace muster::collectives {

/// The tag of the collectives' own messages: programs have no negative ones.
inline constexpr std::int64_t own_tag = -1;

struct Envelope {
  int from = 0;
  std::int64_t tag = 0;
  std::vector<std::byte> label;
  std::uint64_t bytes = 0;  // of the body
};

class Mail {
 public:
  struct Sending {
    int to = 0;
    std::int64_t tag = 0;
    std::vector<std::byte> label = {};
    Bytes body = {};
    std::shared_ptr<const void> keeper = {};  // of the body; null: the caller, until it is done
    bool is_given = false;                    // the body is the caller's again
    bool is_done = false;                     // the message needs this rank no more
    std::uint64_t id = 0;
    std::uint64_t sent = 0;
  };
  /// Room for a body. What it throws is the receive's failure, and the message is dropped.
  using Place = std::function<Room(const Envelope&)>;
  struct Receiving {
    int from = 0;          // or any_rank
    std::int64_t tag = 0;  // or any_tag
    Place place = {};
    bool is_done = false;
    Envelope envelope = {};
    std::optional<Error> error = {};
    Room room = {};
    std::uint64_t received = 0;
  };

  explicit Mail(sync::Group& group);

  /// `label` fits into a packet. Throws as sync::Group::try_send.
  std::shared_ptr<Sending> send(Sending message);
  std::shared_ptr<Receiving> receive(Receiving wanted);
  /// The oldest message that such a receive would get, if there is one.
  [[nodiscard]] const Envelope* find(int from, std::int64_t tag) const;
  /// Called whenever something has moved.
  void on_moved(std::function<void()> call) { on_moved_ = std::move(call); }
  /// Moves what can be moved now; false if nothing could.
  bool step();
  /// Until done(), which depends on `rank` (any_rank: on all others). Throws as SyncGroup::wait_until.
  void wait(const std::function<bool()>& done, int rank, const WaitOptions& options);

 private:
  struct Head;
  struct Unexpected {
    Envelope envelope;
    std::vector<std::byte> body;  // of one that came whole
    std::uint64_t id = 0;         // 0: it did
  };
  /// To one rank.
  struct Lane {
    std::deque<std::shared_ptr<Sending>> queue;                   // not announced yet
    std::map<std::uint64_t, std::shared_ptr<Sending>> announced;  // until they are asked for
    std::deque<std::shared_ptr<Sending>> wanted;
    std::vector<std::shared_ptr<Sending>> leaving;               // all of it is given to the group
    std::deque<std::pair<std::uint64_t, bool>> answers;          // what this rank wants of it, or refuses
    std::map<std::uint64_t, std::shared_ptr<Receiving>> coming;  // from it
  };

  bool take(int from);
  bool push(int to);
  bool post_all(int to);
  bool post(int to, const Head& head, Bytes packet);
  /// What the group has sent of it is done.
  bool see_off(int to);
  /// Takes the first receive that gets this message.
  std::shared_ptr<Receiving> take_receive(int from, std::int64_t tag);
  /// Asks a receive for room. False if it has none: it has failed.
  static bool open(Receiving& receive, Envelope envelope);
  void answer(const std::shared_ptr<Receiving>& receive, Envelope envelope, std::uint64_t id);
  [[noreturn]] void fail(int from, const char* what);
  [[nodiscard]] Lane& lane(int rank) { return lanes_[static_cast<std::size_t>(rank)]; }

  sync::Group& group_;
  std::vector<Lane> lanes_;
  std::list<std::shared_ptr<Receiving>> receives_;  // that no message has met
  std::list<Unexpected> unexpected_;
  std::uint64_t next_id_ = 1;
  std::function<void()> on_moved_;
};

}  // namespace muster::collectives
