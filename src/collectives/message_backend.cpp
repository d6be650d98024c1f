// SPDX-License-Identifier: Apache-2.0
// Collectives by a group's rounds and messages: for ranks that share no memory, over whatever the group runs on.

#include <algorithm>
#include <vector>

#include "src/collectives/backend.hpp"
#include "src/collectives/slices.hpp"
#include "src/merge/reduce.hpp"

namespace muster::collectives {
namespace {

// Half of what may be under way from one rank to another: a rank sends its next piece while the one before is read.
constexpr std::size_t piece_bytes = 128 << 10;

class MessageBackend final : public Backend {
 public:
  explicit MessageBackend(sync::Group& group) : group_(group), cards_(static_cast<std::size_t>(group.size())) {}

  [[nodiscard]] std::string_view name() const noexcept override { return "messages"; }

  void all_reduce(const Card& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in, Room out,
                  const WaitOptions& options) override {
    open(card, opened, options);
    const std::vector<std::uint64_t> bounds = even_slices(in.size(), ranks());
    std::vector<std::byte> slice(bounds[self() + 1] - bounds[self()]);
    reduce_slice(combine, dtype, in, bounds, slice, options);
    std::vector<Bytes> ins(ranks());
    std::vector<Room> outs(ranks());
    for (std::size_t rank = 0; rank < ranks(); ++rank) {
      if (cards_[rank].wants != 0) ins[rank] = slice;
      if (card.wants != 0) outs[rank] = out.subspan(bounds[rank], bounds[rank + 1] - bounds[rank]);
    }
    exchange(ins, outs, options);
  }

  void reduce_scatter(const Card& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                      std::span<const std::uint64_t> bounds, Room out, const WaitOptions& options) override {
    open(card, opened, options);
    reduce_slice(combine, dtype, in, bounds, out, options);
  }

  void all_gather(const Card& card, const Opened& opened, Bytes in, std::span<const Room> outs,
                  const WaitOptions& options) override {
    open(card, opened, options);
    std::vector<Bytes> ins(ranks());
    for (std::size_t rank = 0; rank < ranks(); ++rank)
      if (cards_[rank].wants != 0) ins[rank] = in;
    exchange(ins, outs, options);
  }

  void all_to_all(const Card& card, const Opened& opened, std::span<const Bytes> ins, std::span<const Room> outs,
                  const WaitOptions& options) override {
    open(card, opened, options);
    exchange(ins, outs, options);
  }

 private:
  [[nodiscard]] std::size_t ranks() const noexcept { return cards_.size(); }
  [[nodiscard]] std::size_t self() const noexcept { return static_cast<std::size_t>(group_.rank()); }

  void open(const Card& card, const Opened& opened, const WaitOptions& options) {
    group_.all_gather(std::as_bytes(std::span(&card, 1)), std::as_writable_bytes(std::span(cards_)), options);
    opened(cards_);
  }

  /// `slice`: the part of the result that is this rank's.
  void reduce_slice(merge::Combine combine, DType dtype, Bytes in, std::span<const std::uint64_t> bounds, Room slice,
                    const WaitOptions& options) {
    std::vector<Bytes> ins(ranks());
    std::vector<Room> outs(ranks());
    std::vector<std::byte> others(slice.size() * ranks());
    std::vector<const std::byte*> sources(ranks());
    for (std::size_t rank = 0; rank < ranks(); ++rank) {
      ins[rank] = in.subspan(bounds[rank], bounds[rank + 1] - bounds[rank]);
      outs[rank] = Room(others).subspan(rank * slice.size(), slice.size());
      sources[rank] = outs[rank].data();
    }
    exchange(ins, outs, options);
    merge::reduce(combine, dtype, slice, sources);
  }

  /// Every rank sends to the next one and receives from the one before, then two apart, and so on. In each step all
  /// send a piece before they receive one, and two pieces may be under way to a rank: nobody waits in a circle.
  void exchange(std::span<const Bytes> ins, std::span<const Room> outs, const WaitOptions& options) {
    if (ins[self()].data() != outs[self()].data()) std::ranges::copy(ins[self()], outs[self()].begin());
    for (std::size_t apart = 1; apart < ranks(); ++apart) {
      const std::size_t to = (self() + apart) % ranks();
      const std::size_t from = (self() + ranks() - apart) % ranks();
      Bytes out = ins[to];
      Room in = outs[from];
      while (!out.empty() || !in.empty()) {
        if (!out.empty()) {
          const Bytes piece = out.first(std::min(out.size(), piece_bytes));
          group_.send(static_cast<int>(to), piece, options, sync::Subject::exchange);
          out = out.subspan(piece.size());
        }
        if (!in.empty()) {
          const std::vector<std::byte> piece = group_.receive(static_cast<int>(from), std::min(in.size(), piece_bytes),
                                                              options, sync::Subject::exchange);
          std::ranges::copy(piece, in.begin());
          in = in.subspan(piece.size());
        }
      }
    }
  }

  sync::Group& group_;
  std::vector<Card> cards_;  // of the call
};

}  // namespace

std::unique_ptr<Backend> message_backend(sync::Group& group) {
  return std::make_unique<MessageBackend>(group);
}

}  // namespace muster::collectives
