// SPDX-License-Identifier: Apache-2.0
#pragma once
// The protocol by which senders send tensors to the root over a transport. Each sender (Sender) sends a stream of parts
// to the root (Receiver). An exchange and a merge are streams of one part. In an exchange of many ranks, a sender also
// sends parts of other ranks of its host (carriers.hpp).
//
//  1. A sender of a stream waits until the root holds fewer than `depth` of its parts. It counts the parts that it has
//     sent and the credits that it has received.
//  2. The sender allocates buffers for packing and sends a header message: the header of the stream, the descriptor,
//     and the bytes themselves if they are few. In an exchange this message says that it is the last one. If the sender
//     cannot send, the message contains no part.
//  3. The root receives header messages whenever it may call the transport. If more bytes follow, it allocates memory,
//     posts receives, and sends a grant. So all data has a destination before it is sent, and no data queues in the
//     transport. If the root cannot receive a part, it refuses this part and all later ones; round 2 gives the reason.
//  4. The sender sends pieces (pieces.hpp), directly from its tensors, and waits until they have been sent.
//  5. When the consumer asks for the part, the root waits for its pieces. The credit follows when the last owner of the
//     buffer releases it, on any thread. For a part without bytes it follows when the consumer has the part.
//  6. At the end of a stream, and after every failure that leaves the group usable, the sender sends a goodbye. The
//     root sends a last word: it grants nothing more. Granted data is still sent, as zeros if the tensors are not
//     available, and received. Then neither side has open operations.
// A wait that fails also fails the group. The memory that the transport may still access is then kept.
//
// The root is one state machine: each call of step() does everything that is possible without waiting. The thread that
// uses the group calls it in all its waits and whenever the group advances the transport. While the consumer of a
// stream runs, another thread calls it, if the transport allows any thread (MPI_THREAD_MULTIPLE). Otherwise the root
// then receives only during group.progress(). Both sides poll while pieces are in flight, and nap otherwise: a
// transport moves bytes only inside its calls. The buffers of the kernel keep a slow link busy during a nap, but not a
// fast one.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/base/fork_mutex.hpp"
#include "src/gather/route.hpp"
#include "src/multihost/buffer_pool.hpp"
#include "src/multihost/group.hpp"
#include "src/multihost/pieces.hpp"
#include "src/os/clock.hpp"
#include "src/os/thread.hpp"

namespace muster::multihost {

/// Returns whether the root receives the tensors of `sender` over the transport. This holds for ranks of other hosts.
/// If the route is forced, it also holds for ranks of the root's host.
bool goes_between_hosts(const gather::GatherCall& call, const HostsGroup& group, int sender);
/// Announces, on the root before round 1, the size of its pool and how far it may grow.
void offer_to_receive(const gather::GatherCall& call, BufferPool& pool, gather::ExchangeRecord& record);

/// Registers the route of a transport. The route has the same name as the kind of its groups. `name` is the name of the
/// transport; `remedy` describes how to make a group over it.
void add_route(Route route, std::string name, std::string remedy);

std::unique_ptr<gather::Transfer> make_hosts_merge(const gather::GatherCall& call, HostsGroup& group);
/// Returns the bytes of shared memory that merges keep with the group, of the windows for `senders` or for all senders.
std::uint64_t merge_ring_bytes(Group& group, const std::vector<int>* senders = nullptr);
/// Frees that memory and returns its size in bytes.
std::uint64_t trim_merge_rings(Group& group);

/// Added to the data_tag() of the group, which is itself the tag of pieces.
inline constexpr int head_tag = 1;
inline constexpr int word_tag = 2;

/// A message from the root to a sender.
struct PartWord {
  std::uint64_t credits = 0;
  std::uint32_t grants = 0;
  std::uint32_t is_last = 0;
};

/// The beginning of a header message.
struct PartHead {
  std::uint64_t exchange = 0;  ///< Call::number; an earlier exchange that failed may have left a header message
  std::uint64_t header_bytes = 0;
  std::uint64_t descriptor_bytes = 0;
  std::uint64_t descriptor_hash = 0;
  std::uint64_t moving_bytes = 0;  ///< of the layout
  std::uint32_t has_part = 0;
  std::uint32_t has_value = 0;
  std::uint32_t is_inline = 0;  ///< the bytes of the layout follow the descriptor
  std::uint32_t is_last = 0;
  std::int32_t origin = 0;  ///< the rank whose part it is, or `nothing_to_carry`
  std::uint32_t zero = 0;
};
/// The origin in a message to a carrier that needs not be sent on (carriers.hpp).
inline constexpr std::int32_t nothing_to_carry = -1;

/// Decides how long to keep polling: as long as data moved a moment ago.
class Eagerness {
 public:
  using Clock = os::Clock;
  /// Called at the beginning of a sequence of polls.
  void begin() noexcept { entered_ = Clock::now(); }
  /// Called when an operation has begun.
  void note() noexcept { moved_ = Clock::now(); }
  /// Returns whether to poll again at once.
  bool again(bool has_moved) noexcept;

 private:
  Clock::time_point moved_ = Clock::now();
  Clock::time_point entered_ = moved_;
};

class Sender final : public gather::PartSender {
 public:
  Sender(const gather::GatherCall& call, HostsGroup& group);

  void wait_for_credit(std::size_t depth, const WaitOptions& options) override;
  void offer(const Config* value, gather::ExchangeRecord& record) override;
  void send(std::span<const std::byte> header, const WaitOptions& options) override;
  void settle(Group& group, const WaitOptions& options) override;

  /// Sends the offered value of an exchange, in pieces of `piece_bytes` if given. A failure before the header message
  /// leaves the group usable.
  void send_only(const WaitOptions& options, std::optional<std::uint64_t> piece_bytes = {});
  /// Sends the offered value of an exchange through `carrier`, or tells the carrier that there is nothing to carry.
  void pass_to(int carrier, bool has_part, const WaitOptions& options);
  /// On a carrier: sends the parts of the riders.
  void carry(std::span<const int> riders, const WaitOptions& options);
  /// Called if carriers are used: parts of at most `most_inline` bytes are sent with their header message, and the root
  /// is asked late.
  void be_one_of_many(std::uint64_t most_inline) noexcept {
    most_inline_ = most_inline;
    asking_ = HostsGroup::Asking::late;
  }

 private:
  template <class Done>
  void wait(const Done& done, const WaitOptions& options);
  void take_words();
  void prepare(const std::vector<MessagePiece>& pieces);
  /// Calls the stage of the exchange, if there is one, and offers its value.
  void stage();
  [[nodiscard]] std::vector<std::byte> head_message(PartHead head, std::span<const std::byte> header) const;
  [[nodiscard]] PartHead head_of_part(bool is_inline) const noexcept;
  void send_head(PartHead head, std::span<const std::byte> header, const WaitOptions& options);
  void send_part(std::span<const std::byte> header, std::vector<MessagePiece> pieces, const WaitOptions& options);
  void send_piece(const MessagePiece& piece, const WaitOptions& options);
  /// `bytes` stay valid until they have been sent. `keeper` keeps them longer if the transport never releases them.
  void start(std::span<const std::byte> bytes, std::shared_ptr<const void> keeper, const WaitOptions& options,
             int tag = 0);
  /// Waits until at most `most` messages are in flight. Throws as Group::send; the transport may then still read
  /// the bytes of these messages.
  void drain(std::size_t most, const WaitOptions& options);

  const gather::GatherCall& call_;
  int first_;
  HostsGroup& group_;
  HostsGroup* waits_;  // the group whose waits are used; messages always use group_
  std::vector<std::shared_ptr<std::byte>> buffers_;
  std::size_t next_buffer_ = 0;
  std::deque<PendingTransfer> under_way_;
  Eagerness eagerness_;
  std::shared_ptr<PartWord> word_ = std::make_shared<PartWord>();
  PendingTransfer words_;  // open from the first wait to the last word
  bool has_last_ = false;
  std::uint64_t sent_ = 0;  // parts
  std::uint64_t credits_ = 0;
  std::uint64_t asked_ = 0;  // parts whose bytes need a grant
  std::uint64_t granted_ = 0;
  std::uint64_t most_inline_ = rides_along;
  HostsGroup::Asking asking_ = HostsGroup::Asking::soon;
  // The part that is offered.
  OutgoingTree tree_;
  bool has_value_ = false;
  // The last part whose header message was sent.
  std::vector<MessagePiece> pieces_;
  std::size_t next_piece_ = 0;
};

class Receiver final : public gather::PartReceiver {
 public:
  /// A part that is being received.
  struct IncomingPart {
    std::vector<std::byte> header;
    std::optional<Config> config;
    std::size_t pieces = 0;
    /// Returns memory for exactly the bytes of a piece, or an empty span if there is none yet.
    std::function<std::span<std::byte>(std::size_t piece)> place;
    /// Keeps that memory until the transport has released it.
    std::shared_ptr<const void> keeper;
    std::function<void(std::size_t piece)> arrived = {};
    bool is_counted = false;  // the release of its buffer adds the credit
    // The receives of pieces `whole` to `whole + open.size()`, in order.
    std::size_t whole = 0;
    std::deque<PendingTransfer> open = {};
  };
  /// A sender, and the maximum number of bytes per part.
  struct SenderLimit {
    int rank = 0;
    std::uint64_t most = 0;
    int carrier = rank;  ///< the rank that sends its part (carriers.hpp)
  };
  /// Returns the destination of a source whose part is not a tree. Its bytes never arrive in the header message.
  using Open = std::function<IncomingPart(std::size_t source)>;

  Receiver(const gather::GatherCall& call, HostsGroup& group, const std::vector<SenderLimit>& sources, Open open = {});
  ~Receiver() override;
  Receiver& operator=(Receiver&&) = delete;

  [[nodiscard]] bool brings(int sender) const override;
  std::vector<std::byte> take_header(int sender, const WaitOptions& options) override;
  std::optional<Config> take_part(int sender, const WaitOptions& options) override;
  void set_unattended(bool unattended) override;
  void settle(Group& group, const WaitOptions& options) override;
  [[nodiscard]] std::uint64_t peak_bytes() const override { return pool_->peak(); }

  // For exchanges. If one of these waits fails, the group fails.
  /// Waits until all sources have announced their parts. Returns false if a source cannot send, or if its part cannot
  /// be received.
  bool take_heads(const WaitOptions& options);
  /// Waits until `least` pieces of each source have arrived, or all pieces of sources that have fewer.
  void take_pieces(std::size_t least, const WaitOptions& options);
  /// Waits until all pieces have arrived. Then throws the error of a part that could not be received.
  void take_all(const WaitOptions& options);
  /// Returns the value of a source, or nullopt. Called after take_all().
  std::optional<Config> take_only(int sender) { return std::move(lane(sender).parts.front().config); }
  /// Does everything that is possible without waiting. Called between pieces of this rank's own work.
  void look();

 private:
  struct SenderLane {
    int rank = 0;
    std::uint64_t most = 0;
    int carrier = rank;
    std::size_t riders_left = 0;  // ranks whose header messages have not arrived from this carrier yet
    PendingTransfer head = {};    // being received
    std::shared_ptr<std::vector<std::byte>> head_bytes = {};
    std::deque<IncomingPart> parts = {};  // the next one to take is at the front
    std::size_t headers_taken = 0;
    Credits released = std::make_shared<std::atomic<std::uint64_t>>(0);
    std::uint64_t told = 0;  // credits
    bool has_said_bye = false;
    bool has_told_last = false;
  };

  SenderLane& lane(int rank) { return lanes_[lane_of_.at(rank)]; }
  void add_lane(SenderLane lane);
  template <class Done>
  void wait(HostsGroup& group, std::span<const int> on, const Done& done, const WaitOptions& options);
  template <class Enough>
  void take_until(const Enough& enough, const WaitOptions& options);
  /// Returns whether any data has moved.
  bool step();
  /// Keeps an error for the next call that waits.
  bool try_step() noexcept;
  bool step_lane(SenderLane& lane);
  void open_pieces(const SenderLane& lane, IncomingPart& part);
  bool take_head(SenderLane& lane);
  /// `carrier` is the lane over which the message has arrived.
  void open_part(SenderLane& carrier, std::span<const std::byte> message);
  IncomingPart part_of(SenderLane& lane, const PartHead& head, std::span<const std::byte> body);
  void tell(SenderLane& lane, const PartWord& word);
  void attend(const std::stop_token& stop, std::condition_variable_any& changed);

  const gather::GatherCall& call_;
  HostsGroup& group_;
  Context::UnderWay under_way_;
  std::shared_ptr<BufferPool> pool_;
  Open open_;
  std::vector<SenderLane> lanes_;
  std::map<int, std::size_t> lane_of_;  // by rank

  // The mutex guards the state above while another thread may call step().
  ForkMutex mutex_;
  // Shared with the thread: in a forked child the thread does not exist, and the condition variable must not be
  // destroyed.
  std::shared_ptr<std::condition_variable_any> changed_ = std::make_shared<std::condition_variable_any>();
  bool is_unattended_ = false;
  bool is_settling_ = false;
  bool has_moved_ = false;      // since the last check of a wait, in a step of any thread
  bool is_without_ = false;     // a source of an exchange cannot send
  std::exception_ptr trouble_;  // error of a part that could not be received
  std::exception_ptr failure_;  // error of a step for which no caller waited
  os::Thread attendant_;
};

}  // namespace muster::multihost
