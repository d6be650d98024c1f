// SPDX-License-Identifier: Apache-2.0
// A ring of bytes in the writer's memory. Positions are counts of bytes since the begin; they never go back.
//
// A piece of a message is a head of 8 bytes (its length, whether more follows) and its bytes, at a place of 64 bytes;
// it never goes around the ring's end. If there is too little room before the end a head says so, and the piece is at
// the ring's begin. The writer tells where it is by one word, each reader by one of its own; the writer looks at those
// only when the ring seems full.

#include "muster/message_queue.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "src/collectives/packed_config.hpp"
#include "src/collectives/shared_blocks.hpp"
#include "src/sync/failing.hpp"
#include "src/sync/group.hpp"

namespace muster {

class MessageQueue::Ring {
 public:
  Ring(SyncGroup& group, const QueueOptions& options)
      : group_(checked(group, options)), writer_(static_cast<std::size_t>(options.writer)), options_(options) {
    const sync::Use use(*group_);
    capacity_ = (options.capacity + line - 1) / line * line;
    const std::uint64_t heads = line * (1 + static_cast<std::uint64_t>(group.size()));
    blocks_ = std::make_unique<collectives::SharedBlocks>(inside(), is_writer() ? heads + capacity_ : 0,
                                                          waits(options.waits, "queue: making it"));
    begin_ = blocks_->of(writer_) + heads;
    turns_ = os::turns_on_core(group.size());
    for (int rank = 0; is_writer() && rank < group.size(); ++rank)
      if (rank != options.writer) readers_.push_back({rank, inside().liveness(rank)});
  }

  void put(std::span<const std::byte> message, const CollectiveOptions& options) {
    const sync::Use use(*group_);
    if (!is_writer()) throw Error(ErrorKind::argument, "a queue is written by its writer alone; this rank reads it");
    do {
      const std::span<const std::byte> piece = message.first(std::min(message.size(), longest_piece()));
      message = message.subspan(piece.size());
      const std::uint64_t bytes = whole_lines(sizeof(Head) + piece.size());
      if (const std::uint64_t left = capacity_ - position_ % capacity_; left < bytes) {
        make_room(left, options);
        head_at(position_) = {0, Head::at_begin};
        position_ += left;
      }
      make_room(bytes, options);
      head_at(position_) = {piece.size(), message.empty() ? Head::whole : Head::more};
      if (!piece.empty()) std::memcpy(&head_at(position_) + 1, piece.data(), piece.size());
      position_ += bytes;
      word(writer_word).publish(lines(position_));
    } while (!message.empty());
  }

  std::vector<std::byte> get(const CollectiveOptions& options) {
    const sync::Use use(*group_);
    if (is_writer()) throw Error(ErrorKind::argument, "a queue is read by all ranks but its writer, which this one is");
    std::vector<std::byte> message;
    for (bool is_whole = false; !is_whole;) {
      await_piece(options);
      const Head head = head_at(position_);
      const std::uint64_t left = capacity_ - position_ % capacity_;
      if (head.bytes > left - sizeof head)
        sync::fail(*group_, Error(ErrorKind::corrupt, "a queue's piece is longer than its ring"));
      if (head.state != Head::at_begin) {
        const auto* const data = reinterpret_cast<const std::byte*>(&head_at(position_) + 1);
        message.insert(message.end(), data, data + head.bytes);
        is_whole = head.state == Head::whole;
      }
      position_ += head.state == Head::at_begin ? left : whole_lines(sizeof head + head.bytes);
      word(1 + static_cast<std::size_t>(group_->rank())).publish(lines(position_));
    }
    return message;
  }

  [[nodiscard]] bool has_message() const noexcept {
    return !is_writer() && word(writer_word).has_reached(lines(position_) + 1);
  }

 private:
  static constexpr std::uint64_t line = collectives::line;
  static constexpr std::size_t writer_word = 0;  // behind it is one of each rank
  struct Head {
    enum State : std::uint8_t { whole, more, at_begin };
    std::uint64_t bytes : 56;
    std::uint64_t state : 8;
  };
  static_assert(sizeof(Head) == 8);
  struct Reader {
    int rank = 0;
    std::shared_ptr<const sync::PeerLiveness> liveness;
    std::uint32_t read = 0;  // in lines, as last seen
  };

  static std::shared_ptr<SyncGroup> checked(SyncGroup& group, const QueueOptions& options) {
    const WaitOptions waits = {
        .timeout = options.waits.timeout, .stop = options.waits.stop, .phase = "queue: making it"};
    const std::array<std::uint64_t, 3> mine{static_cast<std::uint64_t>(options.writer), options.capacity,
                                            static_cast<std::uint64_t>(options.dead_reader)};
    std::vector<std::array<std::uint64_t, 3>> all(static_cast<std::size_t>(group.size()));
    group.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)), waits);
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      if (all[rank] != all[0])
        throw sync::error_of(group.info(static_cast<int>(rank)), ErrorKind::rank_mismatch,
                             fmt::format("ranks 0 and {} make a queue with other options", rank));
    if (options.writer < 0 || options.writer >= group.size())
      throw Error(ErrorKind::argument,
                  fmt::format("a queue's writer {} is not in the group of {} ranks", options.writer, group.size()));
    if (options.capacity < (64U << 10) || options.capacity > (std::uint64_t{1} << 36))
      throw Error(ErrorKind::argument, fmt::format("a queue of {} bytes: 64 KiB to 64 GiB", options.capacity));
    if (!collectives::SharedBlocks::can_be(sync::inside(group)))
      throw Error(ErrorKind::unsupported, "a queue needs ranks that share memory, on one host");
    return group.duplicate(waits);
  }
  static WaitOptions waits(const CollectiveOptions& options, const char* phase) {
    return {.timeout = options.timeout, .stop = options.stop, .phase = phase};
  }
  static std::uint64_t whole_lines(std::uint64_t bytes) noexcept { return (bytes + line - 1) / line * line; }
  static std::uint32_t lines(std::uint64_t position) noexcept { return static_cast<std::uint32_t>(position / line); }

  [[nodiscard]] sync::Group& inside() const noexcept { return sync::inside(*group_); }
  [[nodiscard]] bool is_writer() const noexcept { return group_->rank() == static_cast<int>(writer_); }
  [[nodiscard]] std::uint64_t longest_piece() const noexcept { return capacity_ / 4 - sizeof(Head); }
  [[nodiscard]] collectives::Word& word(std::size_t at) const noexcept {
    return reinterpret_cast<collectives::Word*>(blocks_->of(writer_))[at];
  }
  [[nodiscard]] Head& head_at(std::uint64_t position) const noexcept {
    return *reinterpret_cast<Head*>(begin_ + position % capacity_);
  }

  /// Waits until all readers are so far that there is room for more.
  void make_room(std::uint64_t bytes, const CollectiveOptions& options) {
    // In lines, which run over: a reader is at most a ring behind.
    const std::uint32_t needed = lines(position_ + bytes - std::min(position_ + bytes, capacity_));
    const auto has_read = [&](Reader& reader) {
      if (static_cast<std::int32_t>(reader.read - needed) >= 0) return true;
      reader.read = word(1 + static_cast<std::size_t>(reader.rank)).value.load(std::memory_order_acquire);
      if (static_cast<std::int32_t>(reader.read - needed) >= 0) return true;
      return options_.dead_reader == QueueOptions::DeadReader::drop && reader.liveness->is_dead();
    };
    for (Reader& reader : readers_) {
      if (has_read(reader)) continue;
      await(1 + static_cast<std::size_t>(reader.rank), reader.rank, waits(options, "queue: put"),
            [&] { return has_read(reader); });
    }
  }

  void await_piece(const CollectiveOptions& options) {
    const std::uint32_t next = lines(position_) + 1;
    const auto is_there = [&] { return word(writer_word).has_reached(next); };
    if (!is_there()) await(writer_word, static_cast<int>(writer_), waits(options, "queue: get"), is_there);
  }

  template <class Done>
  void await(std::size_t which, int rank, const WaitOptions& options, const Done& done) {
    collectives::wait_on(inside(), word(which), std::span(&rank, 1), turns_, options, done);
  }

  std::shared_ptr<SyncGroup> group_;
  std::size_t writer_;
  QueueOptions options_;
  std::unique_ptr<collectives::SharedBlocks> blocks_;
  std::byte* begin_ = nullptr;
  std::uint64_t capacity_ = 0;
  std::uint64_t position_ = 0;  // of this rank
  int turns_ = 0;
  std::vector<Reader> readers_;  // the writer's
};

MessageQueue::MessageQueue(SyncGroup& group, const QueueOptions& options)
    : ring_(std::make_unique<Ring>(group, options)) {}
MessageQueue::MessageQueue(MessageQueue&&) noexcept = default;
MessageQueue& MessageQueue::operator=(MessageQueue&&) noexcept = default;
MessageQueue::~MessageQueue() = default;

void MessageQueue::put(std::span<const std::byte> message, const CollectiveOptions& options) {
  ring_->put(message, options);
}

void MessageQueue::put_config(const Config& config, const CollectiveOptions& options) {
  ring_->put(collectives::packed_whole(config).bytes(), options);
}

std::vector<std::byte> MessageQueue::get(const CollectiveOptions& options) {
  return ring_->get(options);
}

Config MessageQueue::get_config(const CollectiveOptions& options) {
  const std::vector<std::byte> message = ring_->get(options);
  const Tensor bytes = Tensor::allocate(DType::u8, {static_cast<std::int64_t>(message.size())});
  if (!message.empty()) std::memcpy(bytes.mutable_data(), message.data(), message.size());
  return collectives::unpacked_whole(bytes, 0, bytes.nbytes());
}

bool MessageQueue::has_message() const noexcept {
  return ring_->has_message();
}

}  // namespace muster
