// SPDX-License-Identifier: Apache-2.0
// A ring of bytes in the memory of the writer. Positions count bytes since the beginning; they never decrease.
//
// A piece of a message has a header of 8 bytes (its length, and whether more pieces follow) and its bytes. It begins at
// a multiple of 64 bytes, and never wraps around the end of the ring. If there is too little space before the end, a
// header marks that, and the piece is at the beginning of the ring. The writer and each reader
// publish their positions in one counter each. The writer reads the counters of the readers only when the ring seems to
// be full.
//
// A large Config is in memory that the writer lends to the readers, and a header in the ring gives its position. It
// uses as much of the ring as if it were stored there, at most the whole ring. So the memory that waits for readers is
// bounded.

#include "muster/message_queue.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/base/escaped.hpp"
#include "src/base/message.hpp"
#include "src/collectives/packed_config.hpp"
#include "src/collectives/shared_buffers.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/group.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/process.hpp"
#include "src/shm/segment.hpp"
#include "src/trace/span.hpp"

namespace muster {
namespace {

constexpr std::string_view handle_begin = "muster-queue:";
constexpr std::size_t key_bytes = 16;
constexpr int outside_number = -1;  // the number of the writer in error messages
constexpr int most_ranks = static_cast<int>(shm::lease_words) - 1;

struct Handle {
  int ranks = 0;
  std::string key;
};

// The members of a queue: the ranks of a group, or these ranks and one more process, which writes.
//
//  1. All ranks of the group agree on the options.
//  2. Without an outside writer, the group of the queue is a duplicate.
//  3. With an outside writer, the ranks and the writer form a local group by the key in the handle: first the ranks in
//     their order, then the writer. All of them agree on the options.
// So the death, a hang or a rejection of an outside writer is handled like that of a rank.
struct QueueRanks {
  std::shared_ptr<Group> group;
  int writer = 0;
};

std::string handle_text(const Handle& handle) {
  return fmt::format("{}{},{}", handle_begin, handle.ranks, handle.key);
}

Handle parsed(const std::string& text) {
  Handle handle;
  if (text.starts_with(handle_begin)) {
    const std::string_view fields = std::string_view(text).substr(handle_begin.size());
    const std::size_t comma = std::min(fields.find(','), fields.size());
    std::from_chars(fields.data(), fields.data() + comma, handle.ranks);
    handle.key = fields.substr(std::min(comma + 1, fields.size()));
  }
  const bool is_key =
      handle.key.size() == 2 * key_bytes && handle.key.find_first_not_of("0123456789abcdef") == std::string::npos;
  // Every handle has exactly one spelling.
  if (handle.ranks < 1 || handle.ranks > most_ranks || !is_key || handle_text(handle) != text)
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format("queue handle {}: malformed. Use the text that make_queue_handle() returned", in_quotes(text)));
  return handle;
}

/// Collective. Throws on all ranks if their options differ.
void agree(Group& group, const QueueOptions& options, bool has_outside, const WaitOptions& waits) {
  using CallSummary = std::array<std::uint64_t, 5>;
  const CallSummary mine{has_outside ? 0 : static_cast<std::uint64_t>(options.writer),
                         options.reader ? static_cast<std::uint64_t>(*options.reader) : std::uint64_t{1} << 40,
                         options.capacity, static_cast<std::uint64_t>(options.dead_reader),
                         XXH3_64bits(options.external_writer.data(), options.external_writer.size())};
  std::vector<CallSummary> all(static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), waits);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const RankInfo& info = group.info(static_cast<int>(rank));
    if (info.global_rank == outside_number)
      throw Error(ErrorKind::rank_mismatch, "queue: the external writer creates it with other options than the ranks");
    throw group::error_of(info, ErrorKind::rank_mismatch,
                          fmt::format("queue: ranks 0 and {} create it with different options", rank));
  }
}

void check(const QueueOptions& options, int size, bool has_outside) {
  const auto check_rank = [size](int rank, const char* what) {
    if (rank < 0 || rank >= size)
      throw Error(ErrorKind::invalid_argument, out_of_range_text(fmt::format("queue: {}", what), rank, size));
  };
  if (!has_outside) check_rank(options.writer, "writer");
  if (options.reader) check_rank(*options.reader, "reader");
  if (options.capacity < (64U << 10) || options.capacity > (std::uint64_t{1} << 36))
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format("queue: the capacity of {} bytes is out of range (valid: 64 KiB to 64 GiB)", options.capacity));
}

/// Forms the group of the ranks and the outside writer. Collective over all of them.
QueueRanks meet(const Handle& handle, int rank, std::vector<int> numbers, std::chrono::milliseconds usual,
                const QueueOptions& options, const WaitOptions& waits) {
  numbers.push_back(outside_number);
  QueueRanks met{nullptr, handle.ranks};
  try {
    met.group = local_group({.key = "queue " + handle.key,
                             .rank = rank,
                             .size = handle.ranks + 1,
                             .timeout = group::timeout_of(options.wait.timeout, usual),
                             .global_ranks = std::move(numbers)});
  } catch (const Error& error) {
    throw error.with_context(
        fmt::format("queue: waiting for its external writer, which is rank {} here", handle.ranks));
  }
  met.group->set_timeout(usual);
  agree(*met.group, options, true, waits);
  return met;
}

/// Makes the members of a queue without an outside writer, or the ranks of one with it. Collective. Throws as
/// MessageQueue's constructor.
QueueRanks queue_ranks(Group& group, const QueueOptions& options) {
  const WaitOptions waits = {.timeout = options.wait.timeout, .stop = options.wait.stop, .phase = "queue: making it"};
  const bool has_outside = !options.external_writer.empty();
  const group::GroupLock use(group);
  Handle handle;
  group::inside(group).together(waits, [&] {
    check(options, group.size(), has_outside);
    if (!collectives::SharedBlocks::can_be(group::inside(group)))
      throw Error(ErrorKind::unsupported, "queue: the ranks must share memory on one host");
    if (!has_outside) return;
    handle = parsed(options.external_writer);
    if (handle.ranks != group.size())
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("queue: its handle is for {} ranks, but the group has {}", handle.ranks, group.size()));
  });
  agree(group, options, has_outside, waits);
  if (!has_outside) return {group.duplicate(waits), options.writer};
  std::vector<int> numbers(static_cast<std::size_t>(group.size()));
  for (std::size_t rank = 0; rank < numbers.size(); ++rank)
    numbers[rank] = group.info(static_cast<int>(rank)).global_rank;
  QueueRanks met;
  // Rank 0 waits for the whole timeout, and then sends the other ranks the reason why it gives up.
  WaitOptions longer = waits;
  longer.timeout = group::timeout_of(waits, group) + std::chrono::seconds(10);
  group::inside(group).together(
      longer, [&] { met = meet(handle, group.rank(), std::move(numbers), group.timeout(), options, waits); });
  return met;
}

/// The counterpart of queue_ranks for the outside writer.
QueueRanks queue_ranks_from_outside(const QueueOptions& options) {
  const Handle handle = parsed(options.external_writer);
  check(options, handle.ranks, true);
  std::vector<int> numbers(static_cast<std::size_t>(handle.ranks));
  std::iota(numbers.begin(), numbers.end(), 0);
  return meet(handle, handle.ranks, std::move(numbers), group::default_timeout(), options,
              {.timeout = options.wait.timeout, .stop = options.wait.stop, .phase = "queue: making it"});
}

}  // namespace

std::string make_queue_handle(int ranks) {
  if (ranks < 1 || ranks > most_ranks)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("queue handle: {} ranks are out of range (valid: 1 to {})", ranks, most_ranks));
  return handle_text({ranks, os::random_hex(key_bytes)});
}

class MessageQueue::QueueRing {
 public:
  QueueRing(QueueRanks ranks, const QueueOptions& options)
      : group_(std::move(ranks.group)),
        self_(group_->rank()),
        writer_(static_cast<std::size_t>(ranks.writer)),
        options_(options),
        lent_(inside(), ranks.writer, os::Access::read_only) {
    const group::GroupLock use(*group_);
    const int size = group_->size();
    capacity_ = (options.capacity + line - 1) / line * line;
    const std::uint64_t heads = line * (1 + static_cast<std::uint64_t>(size));
    blocks_ = std::make_unique<collectives::SharedBlocks>(inside(), is_writer() ? heads + capacity_ : 0,
                                                          waits(options.wait, "queue: making it"));
    begin_ = blocks_->of(writer_) + heads;
    for (int rank = 0; rank < size; ++rank)
      if (reads(rank)) all_readers_.push_back(rank);
    if (is_writer())
      for (const int rank : all_readers_) readers_.push_back({rank, inside().liveness(rank)});
  }

  void put(std::span<const std::byte> message, const CollectiveOptions& options) {
    const group::GroupLock use(*group_);
    if (!is_writer())
      throw Error(ErrorKind::invalid_argument,
                  "queue: only its writer can write to it, and this rank is not the writer");
    check_room(most_taken(message.size()));
    do {
      const std::span<const std::byte> piece = message.first(std::min(message.size(), longest_piece()));
      message = message.subspan(piece.size());
      const std::uint64_t bytes = whole_lines(sizeof(PacketHead) + piece.size());
      if (const std::uint64_t left = capacity_ - written_ % capacity_; left < bytes) {
        make_room(left, options);
        head_at(written_) = {0, PacketHead::at_begin};
        written_ += left;
      }
      make_room(bytes, options);
      head_at(written_) = {piece.size(), message.empty() ? PacketHead::whole : PacketHead::more};
      if (!piece.empty()) std::memcpy(&head_at(written_) + 1, piece.data(), piece.size());
      written_ += bytes;
      word(writer_word).publish(lines(written_));
    } while (!message.empty());
  }

  void put_config(const Config& config, const CollectiveOptions& options) {
    const collectives::ConfigPlan plan(config);
    const std::uint64_t bytes = plan.whole_bytes();
    if (bytes < least_lent || !is_writer()) {
      const Tensor whole = collectives::packed_whole(plan);
      return put(whole.bytes(), options);
    }
    const group::GroupLock use(*group_);
    const std::uint64_t counted = std::min(whole_lines(bytes), capacity_);
    check_room(counted);
    make_room(counted, options);
    const collectives::Loan loan = lent_.lend(bytes, all_readers_);
    plan.copy_whole_to(loan.segment->data());
    head_at(written_) = {bytes, PacketHead::lent};
    offer_at(written_) = loan.offer;
    written_ += counted;
    word(writer_word).publish(lines(written_));
  }

  /// A message, copied out of the ring or lent.
  struct QueueMessage {
    std::vector<std::byte> copied;
    std::span<const std::byte> bytes;
    std::shared_ptr<const void> lease;
  };
  QueueMessage get(const CollectiveOptions& options) {
    std::optional<group::GroupLock> use;
    hold(use);
    if (!reads(self_))
      throw Error(ErrorKind::invalid_argument,
                  is_writer() ? "queue: its writer cannot read it" : "queue: only its one reader can read it");
    QueueMessage message;
    for (bool is_whole = false; !is_whole;) {
      await_piece(options);
      const PacketHead head = head_at(read_);
      const std::uint64_t left = capacity_ - read_ % capacity_;
      std::uint64_t counted = left;
      if (head.state == PacketHead::lent) {
        take_lent(head, message);
        counted = std::min(whole_lines(head.bytes), capacity_);
        is_whole = true;
      } else if (head.state != PacketHead::at_begin) {
        if (head.bytes > left - sizeof head)
          group::fail(*group_,
                      Error(ErrorKind::corrupt, "malformed message: a chunk of a queue is longer than its ring"));
        const auto* const data = reinterpret_cast<const std::byte*>(&head_at(read_) + 1);
        message.copied.insert(message.copied.end(), data, data + head.bytes);
        counted = whole_lines(sizeof head + head.bytes);
        is_whole = head.state == PacketHead::whole;
      }
      read_ += counted;
      word(1 + static_cast<std::size_t>(self_)).publish(lines(read_));
    }
    if (!message.lease) message.bytes = message.copied;
    return message;
  }

  [[nodiscard]] bool has_message() const noexcept {
    return reads(self_) && word(writer_word).has_reached(lines(read_) + 1);
  }

 private:
  static constexpr std::uint64_t line = collectives::line;
  static constexpr std::size_t writer_word = 0;  // followed by one word per rank
  struct PacketHead {
    enum State : std::uint8_t { whole, more, at_begin, lent };
    std::uint64_t bytes : 56;
    std::uint64_t state : 8;
  };
  static_assert(sizeof(PacketHead) == 8 && sizeof(PacketHead) + sizeof(collectives::ResultOffer) <= line);
  static constexpr std::uint64_t least_lent = 64 << 10;
  struct QueueReader {
    int rank = 0;
    std::shared_ptr<const group::PeerLiveness> liveness;
    std::uint32_t read = 0;  // in lines, when it was last read
  };

  static WaitOptions waits(const CollectiveOptions& options, const char* phase) {
    return {.timeout = options.timeout, .stop = options.stop, .phase = phase};
  }
  static std::uint64_t whole_lines(std::uint64_t bytes) noexcept { return (bytes + line - 1) / line * line; }
  static std::uint32_t lines(std::uint64_t position) noexcept { return static_cast<std::uint32_t>(position / line); }

  [[nodiscard]] group::BaseGroup& inside() const noexcept { return group::inside(*group_); }
  [[nodiscard]] bool is_writer() const noexcept { return self_ == static_cast<int>(writer_); }
  [[nodiscard]] const char* get_phase() const noexcept {
    return options_.external_writer.empty() ? "queue: get" : "queue: get from the external writer, rank -1";
  }
  [[nodiscard]] bool reads(int rank) const noexcept {
    return options_.reader ? rank == *options_.reader : rank != static_cast<int>(writer_);
  }
  [[nodiscard]] std::uint64_t longest_piece() const noexcept { return capacity_ / 4 - sizeof(PacketHead); }
  [[nodiscard]] collectives::Word& word(std::size_t at) const noexcept {
    return reinterpret_cast<collectives::Word*>(blocks_->of(writer_))[at];
  }
  [[nodiscard]] PacketHead& head_at(std::uint64_t position) const noexcept {
    return *reinterpret_cast<PacketHead*>(begin_ + position % capacity_);
  }

  /// Follows the header of a lent message.
  [[nodiscard]] collectives::ResultOffer& offer_at(std::uint64_t position) const noexcept {
    return *reinterpret_cast<collectives::ResultOffer*>(&head_at(position) + 1);
  }

  /// Returns the maximum space that a message takes in the ring.
  [[nodiscard]] std::uint64_t most_taken(std::uint64_t bytes) const noexcept {
    // The additional piece covers the space that may be skipped before the end.
    return (bytes / longest_piece() + 2) * whole_lines(sizeof(PacketHead) + std::min(bytes, longest_piece()));
  }
  /// A writer that also reads would wait for itself if it had to wait for space.
  void check_room(std::uint64_t needed) const {
    if (const std::uint64_t unread = written_ - read_; reads(self_) && needed > capacity_ - unread)
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("queue: put: too little space in {}: this rank itself is a reader and has not read {}",
                              byte_text(capacity_), byte_text(unread)));
  }

  /// Waits until all readers have read enough to free the space.
  void make_room(std::uint64_t bytes, const CollectiveOptions& options) {
    // Counted in lines, which wrap around: a reader is at most one ring behind.
    const std::uint32_t needed = lines(written_ + bytes - std::min(written_ + bytes, capacity_));
    const auto has_read = [&](QueueReader& reader) {
      if (static_cast<std::int32_t>(reader.read - needed) >= 0) return true;
      reader.read = word(1 + static_cast<std::size_t>(reader.rank)).value.load(std::memory_order_acquire);
      if (static_cast<std::int32_t>(reader.read - needed) >= 0) return true;
      return options_.dead_reader == QueueOptions::DeadReader::drop && reader.liveness->is_dead();
    };
    for (QueueReader& reader : readers_) {
      if (has_read(reader)) continue;
      await(1 + static_cast<std::size_t>(reader.rank), reader.rank, waits(options, "queue: put"),
            [&] { return has_read(reader); });
    }
  }

  void take_lent(const PacketHead& head, QueueMessage& message) {
    const auto at = std::ranges::find(all_readers_, self_) - all_readers_.begin();
    collectives::HeldResult held = lent_.take(offer_at(read_), static_cast<std::size_t>(at), head.bytes);
    message.bytes = {held.data, head.bytes};
    message.lease = std::move(held.keeper);
  }

  /// Enters the group, for a reader. If the group has failed but there are messages to read, the call proceeds without
  /// it.
  void hold(std::optional<group::GroupLock>& use) {
    try {
      use.emplace(*group_);
    } catch (const Error&) {
      if (is_cut_off_ || !has_message() || !group_->error()) throw;
    }
  }
  void await_piece(const CollectiveOptions& options) {
    const auto is_there = [&] { return has_message(); };
    if (is_there()) return;
    is_cut_off_ = true;
    await(writer_word, static_cast<int>(writer_), waits(options, get_phase()), is_there);
    is_cut_off_ = false;
  }

  template <class Done>
  void await(std::size_t which, int rank, const WaitOptions& options, const Done& done) {
    if (rank == self_)
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("{}: the queue is empty, and this rank itself is the writer", options.phase));
    const trace::Span span(trace::SpanKind::message, options.phase, inside().some_operation(),
                           inside().info(rank).global_rank);
    collectives::wait_on(inside(), word(which), std::span(&rank, 1), turns_, options, done);
  }

  std::shared_ptr<Group> group_;
  int self_;
  std::size_t writer_;
  QueueOptions options_;
  std::unique_ptr<collectives::SharedBlocks> blocks_;
  std::byte* begin_ = nullptr;
  std::uint64_t capacity_ = 0;
  std::uint64_t written_ = 0;  // by this rank
  std::uint64_t read_ = 0;
  bool is_cut_off_ = false;  // a wait has failed, possibly in the middle of a message
  int turns_ = os::spin_iterations(group_->size());
  std::vector<int> all_readers_;
  std::vector<QueueReader> readers_;  // used by the writer
  collectives::LentMemory lent_;
};

MessageQueue::MessageQueue(Group& group, const QueueOptions& options)
    : ring_(std::make_unique<QueueRing>(queue_ranks(group, options), options)) {}
MessageQueue::MessageQueue(std::unique_ptr<QueueRing> ring) : ring_(std::move(ring)) {}
MessageQueue MessageQueue::attach_writer(const QueueOptions& options) {
  return MessageQueue(std::make_unique<QueueRing>(queue_ranks_from_outside(options), options));
}
MessageQueue::MessageQueue(MessageQueue&&) noexcept = default;
MessageQueue& MessageQueue::operator=(MessageQueue&&) noexcept = default;
MessageQueue::~MessageQueue() = default;

void MessageQueue::put(std::span<const std::byte> message, const CollectiveOptions& options) {
  ring_->put(message, options);
}

void MessageQueue::put_config(const Config& config, const CollectiveOptions& options) {
  ring_->put_config(config, options);
}

std::vector<std::byte> MessageQueue::get(const CollectiveOptions& options) {
  QueueRing::QueueMessage message = ring_->get(options);
  return message.lease ? std::vector(message.bytes.begin(), message.bytes.end()) : std::move(message.copied);
}

Config MessageQueue::get_config(const CollectiveOptions& options) {
  QueueRing::QueueMessage message = ring_->get(options);
  const auto length = static_cast<std::int64_t>(message.bytes.size());
  if (message.lease)
    return collectives::unpacked_whole(
        Tensor(TensorView(DType::u8, {length}, message.bytes.data()), std::move(message.lease)), 0,
        message.bytes.size());
  const Tensor bytes = Tensor::allocate(DType::u8, {length});
  if (length != 0) std::memcpy(bytes.mutable_data(), message.bytes.data(), message.bytes.size());
  return collectives::unpacked_whole(bytes, 0, bytes.nbytes());
}

bool MessageQueue::has_message() const noexcept {
  return ring_->has_message();
}

}  // namespace muster
