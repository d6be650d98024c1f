// SPDX-License-Identifier: Apache-2.0
// Collectives by a group's rounds and mail: for ranks that share no memory, over whatever the group runs on.

#include <algorithm>
#include <memory>
#include <vector>

#include "src/collectives/backend.hpp"
#include "src/collectives/mail.hpp"
#include "src/collectives/slices.hpp"
#include "src/merge/reduce.hpp"

namespace muster::collectives {
namespace {

class MessageBackend final : public Backend {
 public:
  MessageBackend(sync::Group& group, Mail& mail)
      : group_(group), mail_(mail), cards_(static_cast<std::size_t>(group.size())) {}

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

  /// To and from all ranks at once.
  void exchange(std::span<const Bytes> ins, std::span<const Room> outs, const WaitOptions& options) {
    if (ins[self()].data() != outs[self()].data()) std::ranges::copy(ins[self()], outs[self()].begin());
    std::vector<std::shared_ptr<Mail::Receiving>> coming;
    std::vector<std::shared_ptr<Mail::Sending>> going;
    for (std::size_t apart = 1; apart < ranks(); ++apart) {
      const std::size_t from = (self() + ranks() - apart) % ranks();
      const Room room = outs[from];
      if (!room.empty())
        coming.push_back(mail_.receive(
            {.from = static_cast<int>(from), .tag = own_tag, .place = [room](const auto&) { return room; }}));
    }
    for (std::size_t apart = 1; apart < ranks(); ++apart) {
      const std::size_t to = (self() + apart) % ranks();
      if (!ins[to].empty()) going.push_back(mail_.send({.to = static_cast<int>(to), .tag = own_tag, .body = ins[to]}));
    }
    for (const auto& each : coming) mail_.wait([&] { return each->is_done; }, each->from, options);
    for (const auto& each : going) mail_.wait([&] { return each->is_done; }, each->to, options);
  }

  sync::Group& group_;
  Mail& mail_;
  std::vector<Card> cards_;  // of the call
};

}  // namespace

std::unique_ptr<Backend> message_backend(sync::Group& group, Mail& mail) {
  return std::make_unique<MessageBackend>(group, mail);
}

}  // namespace muster::collectives
