// SPDX-License-Identifier: Apache-2.0
// A sender's side of a stream by MPI; the numbers are those of part_stream.hpp.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "src/mpi/part_stream.hpp"

namespace muster::mpi {

MpiOutlet::MpiOutlet(const gather::Call& call, MpiGroup& group) : first_(call.first()), group_(group) {
  open_words();
}

template <class Done>
void MpiOutlet::wait(MpiGroup& group, const Done& done, const WaitOptions& options) {
  const std::array<int, 1> on{first_};
  group.wait_for(
      [&] {
        take_words();
        return done();
      },
      on, options);
}

Pending MpiOutlet::start(int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> keeper) {
  return group_.towards(first_, [&] { return start_send(group_.comm(), first_, tag, bytes, std::move(keeper)); });
}

bool MpiOutlet::has_ended(Pending& message) {
  return group_.towards(first_, [&] { return message.test(); });
}

void MpiOutlet::open_words() {
  word_ = std::make_shared<PartWord>();
  words_ = start_receive(group_.comm(), first_, group_.data_tag() + 2,
                         std::as_writable_bytes(std::span(word_.get(), 1)), word_);
}

void MpiOutlet::take_words() {
  while (!has_last_ && has_ended(words_)) {
    const PartWord word = *word_;
    switch (word.kind) {
      case PartWord::Kind::grant:
        ++granted_;
        break;
      case PartWord::Kind::credits:
        credits_ += word.count;
        break;
      case PartWord::Kind::last:
        has_last_ = true;
        return;
    }
    open_words();
  }
}

// Step 1.
void MpiOutlet::wait_for_credit(std::size_t depth, const WaitOptions& options) {
  take_words();
  if (sent_ - credits_ < depth) return;
  wait(
      group_, [&] { return sent_ - credits_ < depth; }, options);
}

void MpiOutlet::offer(const Config* value, gather::Record& record) {
  has_value_ = value != nullptr;
  record.has_value = has_value_;
  tree_ = value == nullptr ? OutgoingTree() : OutgoingTree(*value, record);
}

void MpiOutlet::send(std::span<const std::byte> header, const WaitOptions& options) {
  const PartHead head{.header_bytes = header.size(),
                      .descriptor_bytes = tree_.descriptor().size(),
                      .moving_bytes = tree_.bytes(),
                      .has_value = has_value_ ? 1U : 0U,
                      .is_inline = tree_.bytes() != 0 && tree_.bytes() <= rides_along ? 1U : 0U};
  ++sent_;
  send_head(head, header);
  if (tree_.bytes() != 0 && head.is_inline == 0) {
    pieces_ = cut(tree_.places());
    next_piece_ = 0;
    ++asked_;
    wait(
        group_, [&] { return granted_ == asked_; }, options);
    send_pieces(options);
  }
  drain(1, options);
  group_.progress();
}

// Step 2.
void MpiOutlet::send_head(const PartHead& head, std::span<const std::byte> header) {
  const auto message = std::make_shared<std::vector<std::byte>>();
  const std::uint64_t behind = head.is_inline != 0 ? head.moving_bytes : 0;
  const std::uint64_t length = sizeof head + header.size() + head.descriptor_bytes + behind;
  if (length > largest_piece)
    throw Error(ErrorKind::argument,
                fmt::format("a layer's values beside its tensors take {} bytes: at most {} can be sent", length,
                            largest_piece));
  message->reserve(length);
  const auto add = [&](std::span<const std::byte> bytes) {
    message->insert(message->end(), bytes.begin(), bytes.end());
  };
  add(std::as_bytes(std::span(&head, 1)));
  add(header);
  if (head.descriptor_bytes != 0) add(tree_.descriptor());
  const std::size_t begin = message->size();
  message->resize(begin + behind);
  if (behind != 0) tree_.copy(message->data() + begin);
  under_way_.push_back(start(group_.data_tag() + 1, *message, message));
}

// Step 4.
void MpiOutlet::send_pieces(const WaitOptions& options) {
  while (next_piece_ < pieces_.size()) {
    under_way_.push_back(send_piece(pieces_[next_piece_]));
    ++next_piece_;
    drain(pieces_under_way, options);
  }
}

// Until fewer than so many messages are under way.
void MpiOutlet::drain(std::size_t fewer_than, const WaitOptions& options) {
  if (under_way_.size() < fewer_than) return;
  Eagerness eagerness;
  wait(
      group_,
      [&] {
        eagerness.begin();
        for (;;) {
          bool has_moved = false;
          while (!under_way_.empty() && has_ended(under_way_.front())) {
            under_way_.pop_front();
            group_.progress();
            has_moved = true;
          }
          if (under_way_.size() < fewer_than) return true;
          if (!eagerness.again(has_moved)) return false;
        }
      },
      options);
}

Pending MpiOutlet::send_piece(const Piece& piece) {
  const int tag = group_.data_tag();
  if (!tree_.is_packed(piece)) return start(tag, tree_.bytes_of(piece), tree_.owner_of(piece));
  const auto packed = std::make_shared<std::vector<std::byte>>(piece.bytes);
  tree_.pack(piece, packed->data());
  return start(tag, *packed, packed);
}

// Step 6.
void MpiOutlet::settle(SyncGroup& group, const WaitOptions& options) {
  auto& waits = dynamic_cast<MpiGroup&>(group);
  const PartHead bye{.is_bye = 1};
  const auto message = std::make_shared<PartHead>(bye);
  under_way_.push_back(start(group_.data_tag() + 1, std::as_bytes(std::span(message.get(), 1)), message));
  wait(
      waits, [&] { return has_last_; }, options);
  if (granted_ == asked_ && next_piece_ < pieces_.size()) {
    std::uint64_t longest = 0;
    for (const Piece& piece : pieces_) longest = std::max(longest, piece.bytes);
    const auto zeros = std::make_shared<std::vector<std::byte>>(longest);
    for (; next_piece_ < pieces_.size(); ++next_piece_)
      under_way_.push_back(start(group_.data_tag(), std::span(*zeros).first(pieces_[next_piece_].bytes), zeros));
  }
  wait(
      waits,
      [&] {
        std::erase_if(under_way_, [&](Pending& send) { return has_ended(send); });
        return under_way_.empty();
      },
      options);
}

}  // namespace muster::mpi
