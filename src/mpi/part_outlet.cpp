// SPDX-License-Identifier: Apache-2.0
// A sender's side of a stream by MPI; the numbers are those of part_stream.hpp.

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "src/mpi/part_stream.hpp"

namespace muster::mpi {

MpiOutlet::MpiOutlet(const gather::Call& call, MpiGroup& group)
    : first_(call.first()), group_(group), flow_(group, first_) {
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

void MpiOutlet::open_words() {
  word_ = std::make_shared<PartWord>();
  words_ = start_receive(group_.comm(), first_, group_.data_tag() + word_tag,
                         std::as_writable_bytes(std::span(word_.get(), 1)), word_);
}

void MpiOutlet::take_words() {
  while (!has_last_ && group_.towards(first_, [&] { return words_.test(); })) {
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
  const bool rides = tree_.bytes() <= rides_along;
  std::vector<Piece> pieces;
  if (!rides) pieces = cut(tree_.places());
  flow_.prepare(*buffer_pool_of(group_), tree_, pieces, UINT64_MAX);
  ++sent_;
  send_head(header, rides, options);
  if (!rides) {
    // From here on they are granted, or refused by the last word.
    pieces_ = std::move(pieces);
    next_piece_ = 0;
    ++asked_;
    wait(
        group_, [&] { return granted_ == asked_; }, options);
    // Step 4.
    for (; next_piece_ < pieces_.size(); ++next_piece_) flow_.send(tree_, pieces_[next_piece_], options);
  }
  flow_.finish(options);
  group_.progress();
}

// Step 2.
void MpiOutlet::send_head(std::span<const std::byte> header, bool rides, const WaitOptions& options) {
  const PartHead head{.header_bytes = header.size(),
                      .descriptor_bytes = tree_.descriptor().size(),
                      .moving_bytes = tree_.bytes(),
                      .has_value = has_value_ ? 1U : 0U,
                      .is_inline = rides && tree_.bytes() != 0 ? 1U : 0U};
  const auto begin = std::as_bytes(std::span(&head, 1));
  std::vector<std::byte> front(begin.begin(), begin.end());
  front.insert(front.end(), header.begin(), header.end());
  const auto message = std::make_shared<std::vector<std::byte>>(tree_.message(front, rides));
  if (message->size() > largest_piece)
    throw Error(ErrorKind::argument,
                fmt::format("a layer's values beside its tensors take {} bytes: at most {} can be sent",
                            message->size(), largest_piece));
  flow_.send(*message, message, options, head_tag);
}

// Step 6.
void MpiOutlet::settle(SyncGroup& group, const WaitOptions& options) {
  auto& waits = dynamic_cast<MpiGroup&>(group);
  flow_.wait_by(waits);
  const auto bye = std::make_shared<PartHead>(PartHead{.is_bye = 1});
  flow_.send(std::as_bytes(std::span(bye.get(), 1)), bye, options, head_tag);
  wait(
      waits, [&] { return has_last_; }, options);
  if (granted_ == asked_ && next_piece_ < pieces_.size()) {
    std::uint64_t longest = 0;
    for (const Piece& piece : pieces_) longest = std::max(longest, piece.bytes);
    const auto zeros = std::make_shared<std::vector<std::byte>>(longest);
    for (; next_piece_ < pieces_.size(); ++next_piece_)
      flow_.send(std::span(*zeros).first(pieces_[next_piece_].bytes), zeros, options);
  }
  flow_.finish(options);
}

}  // namespace muster::mpi
