// SPDX-License-Identifier: Apache-2.0
#pragma once
// What goes to a first rank over a transport. All of it is a stream of parts from each sender (Sender) to the first
// rank (Receiver); an exchange and a merge are streams of one part.
//
//  1. A sender of a stream waits until fewer than `depth` of its parts are with the first rank: it counts those that it
//     has sent, and the credits that came back.
//  2. It takes what it needs for packing, and sends a head: the stream's header, the descriptor, and the bytes
//     themselves if they are few. The head of an exchange says that it is the last, and if the sender cannot send that
//     there is no part.
//  3. The first rank takes heads whenever it may call the transport. If more bytes follow it takes memory, opens
//     receives, and sends a grant: what is sent has a place already, so that nothing piles up on the way. What it
//     cannot take in it refuses, and all parts after that: round 2 says why.
//  4. The sender sends pieces (pieces.hpp), straight from its tensors, and waits until they are sent.
//  5. When the consumer asks for the part, the first rank waits for its pieces. A credit follows when the buffer's last
//     owner lets it go, on any thread; of a part without bytes, when the consumer has it.
//  6. The end of a stream, and every failure that leaves the group well: the sender says bye, the first rank that
//     nothing more will be granted. What was granted is sent all the same, zeros where there is nothing better, and
//     received: then neither side has anything open.
// A wait that fails poisons the group instead; what the transport may still touch is then kept.
//
// The first rank is one state machine: each call of step() does what can be done at once. The thread that uses the
// group calls it in all its waits, and whenever the group lets the transport go on. While a stream's consumer runs,
// another thread does, if the transport allows any (MPI_THREAD_MULTIPLE); else what comes in then depends on
// group.progress(). Both sides poll as long as pieces come or go and nap when they do not: a transport moves bytes only
// inside its calls, and what the kernel buffers meanwhile keeps a slow link busy, but not a fast one.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/base/fork_mutex.hpp"
#include "src/gather/route.hpp"
#include "src/hosts/buffer_pool.hpp"
#include "src/hosts/hosts_group.hpp"
#include "src/hosts/pieces.hpp"
#include "src/os/clock.hpp"
#include "src/os/thread.hpp"

namespace muster::hosts {

/// Whether what a sender has goes to the first rank over the transport: from other hosts, and if the route is forced
/// from its own, too.
bool goes_between_hosts(const gather::Call& call, const HostsGroup& group, int sender);
/// On the first rank, before round 1: what its pool has, and how far it may grow.
void offer_to_receive(const gather::Call& call, BufferPool& pool, gather::Record& record);

/// Adds the route of a transport to those that programs have. Groups over it are of the kind that the route is called.
/// `name`: of the transport; `remedy`: how a group is made over it.
void add_route(Route route, std::string name, std::string remedy);

std::unique_ptr<gather::Transfer> make_hosts_merge(const gather::Call& call, HostsGroup& group);
/// Shared memory that merges keep with the group: of windows for these senders, or for all.
std::uint64_t merge_ring_bytes(SyncGroup& group, const std::vector<int>* senders = nullptr);
/// Gives it back; returns the bytes.
std::uint64_t trim_merge_rings(SyncGroup& group);

/// Behind the group's data_tag(), which pieces have.
inline constexpr int head_tag = 1;
inline constexpr int word_tag = 2;

/// From the first rank to a sender.
struct PartWord {
  std::uint64_t credits = 0;
  std::uint32_t grants = 0;
  std::uint32_t is_last = 0;
};

/// Begins a head.
struct PartHead {
  std::uint64_t exchange = 0;  ///< Call::number: an earlier one, that failed, may have left a head behind
  std::uint64_t header_bytes = 0;
  std::uint64_t descriptor_bytes = 0;
  std::uint64_t descriptor_hash = 0;
  std::uint64_t moving_bytes = 0;  ///< of the layout
  std::uint32_t has_part = 0;
  std::uint32_t has_value = 0;
  std::uint32_t is_inline = 0;  ///< the layout's bytes follow the descriptor
  std::uint32_t is_last = 0;
};

/// Says when to go on polling: as long as something moved a moment ago.
class Eagerness {
 public:
  using Clock = os::Clock;
  /// At the begin of a look that may last.
  void begin() noexcept { entered_ = Clock::now(); }
  /// Something was begun.
  void note() noexcept { moved_ = Clock::now(); }
  /// Whether to look again at once.
  bool again(bool has_moved) noexcept;

 private:
  Clock::time_point moved_ = Clock::now();
  Clock::time_point entered_ = moved_;
};

class Sender final : public gather::PartSender {
 public:
  Sender(const gather::Call& call, HostsGroup& group);

  void wait_for_credit(std::size_t depth, const WaitOptions& options) override;
  void offer(const Config* value, gather::Record& record) override;
  void send(std::span<const std::byte> header, const WaitOptions& options) override;
  void settle(SyncGroup& group, const WaitOptions& options) override;

  /// Of an exchange: what was offered, in pieces of `piece_bytes` if that is given. What fails before the head leaves
  /// the group well.
  void send_only(const WaitOptions& options, std::optional<std::uint64_t> piece_bytes = {});

 private:
  template <class Done>
  void wait(const Done& done, const WaitOptions& options);
  void take_words();
  void prepare(const std::vector<Piece>& pieces);
  void send_head(PartHead head, std::span<const std::byte> header, const WaitOptions& options);
  void send_part(std::span<const std::byte> header, std::vector<Piece> pieces, const WaitOptions& options);
  void send_piece(const Piece& piece, const WaitOptions& options);
  /// `bytes` stay until they have been sent; `keeper` keeps them beyond that, if the transport never lets go.
  void start(std::span<const std::byte> bytes, std::shared_ptr<const void> keeper, const WaitOptions& options,
             int tag = 0);
  /// Until at most so many messages are under way. Throws as SyncGroup::send; The transport may then still read what
  /// was.
  void drain(std::size_t most, const WaitOptions& options);

  const gather::Call& call_;
  int first_;
  HostsGroup& group_;
  HostsGroup* waits_;  // whose waits they are; messages are always group_'s
  std::vector<std::shared_ptr<std::byte>> buffers_;
  std::size_t next_buffer_ = 0;
  std::deque<Pending> under_way_;
  Eagerness eagerness_;
  std::shared_ptr<PartWord> word_ = std::make_shared<PartWord>();
  Pending words_;  // open from the first wait to the last word
  bool has_last_ = false;
  std::uint64_t sent_ = 0;  // parts
  std::uint64_t credits_ = 0;
  std::uint64_t asked_ = 0;  // parts whose bytes need a grant
  std::uint64_t granted_ = 0;
  // Of the part that is offered.
  OutgoingTree tree_;
  bool has_value_ = false;
  // Of the last part whose head was sent.
  std::vector<Piece> pieces_;
  std::size_t next_piece_ = 0;
};

class Receiver final : public gather::PartReceiver {
 public:
  /// A part as it comes.
  struct Part {
    std::vector<std::byte> header;
    std::optional<Config> config;
    std::size_t pieces = 0;
    /// Memory of exactly a piece's bytes; empty: not yet.
    std::function<std::span<std::byte>(std::size_t piece)> place;
    /// What keeps that memory until the transport has let go of it.
    std::shared_ptr<const void> keeper;
    std::function<void(std::size_t piece)> arrived = {};
    bool is_counted = false;  // its buffer gives the credit
    // The receives: in the order of the pieces, those between `whole` and `whole + open.size()`.
    std::size_t whole = 0;
    std::deque<Pending> open = {};
  };
  /// What sends, and the most that a part of it has.
  struct Source {
    int rank = 0;
    std::uint64_t most = 0;
  };
  /// Where the part of a source goes that is no tree; its bytes never come with the head.
  using Open = std::function<Part(std::size_t source)>;

  Receiver(const gather::Call& call, HostsGroup& group, const std::vector<Source>& sources, Open open = {});
  ~Receiver() override;
  Receiver& operator=(Receiver&&) = delete;

  [[nodiscard]] bool brings(int sender) const override;
  std::vector<std::byte> take_header(int sender, const WaitOptions& options) override;
  std::optional<Config> take_part(int sender, const WaitOptions& options) override;
  void set_unattended(bool unattended) override;
  void settle(SyncGroup& group, const WaitOptions& options) override;
  [[nodiscard]] std::uint64_t peak_bytes() const override { return pool_->peak(); }

  // Of an exchange. What these waits fail with is the failure of the group.
  /// Until all sources have said what they have; false if one of them cannot send, or what it sends cannot be taken in.
  bool take_heads(const WaitOptions& options);
  /// Until so many pieces of each source have come, or all it has.
  void take_pieces(std::size_t least, const WaitOptions& options);
  /// Until all has come. Then throws what a part could not be taken in for.
  void take_all(const WaitOptions& options);
  /// Then: the value of a source, perhaps none.
  std::optional<Config> take_only(int sender) { return std::move(lane(sender).parts.front().config); }
  /// What can be done at once, between pieces of this rank's own work.
  void look();

 private:
  struct Lane {
    int rank = 0;
    std::uint64_t most = 0;
    Pending head = {};  // being received
    std::shared_ptr<std::vector<std::byte>> head_bytes = {};
    std::deque<Part> parts = {};  // the one that is taken next in front
    std::size_t headers_taken = 0;
    Credits released = std::make_shared<std::atomic<std::uint64_t>>(0);
    std::uint64_t told = 0;  // credits
    bool has_said_bye = false;
    bool has_told_last = false;
  };

  Lane& lane(int rank);
  template <class Done>
  void wait(HostsGroup& group, std::span<const int> on, const Done& done, const WaitOptions& options);
  template <class Enough>
  void take_until(const Enough& enough, const WaitOptions& options);
  /// Returns whether anything has moved.
  bool step();
  /// Keeps what it throws for the next call that waits.
  bool try_step() noexcept;
  bool step_lane(Lane& lane);
  void open_pieces(const Lane& lane, Part& part);
  bool take_head(Lane& lane);
  void open_part(Lane& lane, std::span<const std::byte> message);
  Part part_of(Lane& lane, const PartHead& head, std::span<const std::byte> body);
  void tell(Lane& lane, const PartWord& word);
  void attend(const std::stop_token& stop, std::condition_variable_any& changed);

  const gather::Call& call_;
  HostsGroup& group_;
  Context::UnderWay under_way_;
  std::shared_ptr<BufferPool> pool_;
  Open open_;
  std::vector<Lane> lanes_;

  // All above is the state machine's, and under this while another thread may step it.
  ForkMutex mutex_;
  // Shared with the thread: in a forked child, where the thread is missing, it must not be destroyed.
  std::shared_ptr<std::condition_variable_any> changed_ = std::make_shared<std::condition_variable_any>();
  bool is_unattended_ = false;
  bool is_settling_ = false;
  bool has_moved_ = false;      // something, since a wait has looked: whoever made the step
  bool is_without_ = false;     // a source of an exchange cannot send
  std::exception_ptr trouble_;  // of a part that could not be taken in
  std::exception_ptr failure_;  // of a step that nobody waited for
  os::Thread attendant_;
};

}  // namespace muster::hosts
