// SPDX-License-Identifier: Apache-2.0
// Collectives that use the rounds and messages of a group, for ranks that share no memory, over any kind of group.

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "src/collectives/backend.hpp"
#include "src/group/mail.hpp"
#include "src/merge/reduce.hpp"

namespace muster::collectives {
namespace {

class MessageBackend final : public Backend {
 public:
  explicit MessageBackend(group::BaseGroup& group)
      : group_(group),
        mail_(group.mail()),
        cards_(static_cast<std::size_t>(group.size())),
        ins_(cards_.size()),
        outs_(cards_.size()) {}

  [[nodiscard]] std::string_view name() const noexcept override { return "messages"; }

  void all_reduce(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                  Room out, const WaitOptions& options) override {
    open(card, opened, options);
    // Each rank reduces one slice of a block. Meanwhile the slices of the next block are in flight.
    const std::uint64_t blocks = (in.size() + block_bytes - 1) / block_bytes;
    for (std::uint64_t at = 0; at <= blocks; ++at) {
      if (at < blocks) {
        ReduceBlock& next = blocks_[at % 2];
        next.begin = at * block_bytes;
        const Bytes whole = in.subspan(next.begin, std::min(block_bytes, in.size() - next.begin));
        next.bounds = even_slices(whole.size(), ranks());
        begin_slices(next, whole);
      }
      if (at == 0) continue;
      ReduceBlock& block = blocks_[(at - 1) % 2];
      finish(block.results, options);
      block.slice.resize(block.bounds[self() + 1] - block.bounds[self()]);
      reduce_slice(block, combine, dtype, block.slice, options);
      for (std::size_t rank = 0; rank < ranks(); ++rank) {
        ins_[rank] = cards_[rank].wants != 0 ? Bytes(block.slice) : Bytes();
        outs_[rank] = {};
        if (card.wants != 0)
          outs_[rank] = out.subspan(block.begin + block.bounds[rank], block.bounds[rank + 1] - block.bounds[rank]);
      }
      begin(block.results);
    }
    for (ReduceBlock& block : blocks_) finish(block.results, options);
    see_off(options);
  }

  void reduce_scatter(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                      std::span<const std::uint64_t> bounds, Room out, const WaitOptions& options) override {
    open(card, opened, options);
    ReduceBlock& block = blocks_[0];
    block.bounds.assign(bounds.begin(), bounds.end());
    begin_slices(block, in);
    reduce_slice(block, combine, dtype, out, options);
    see_off(options);
    if (block.others.size() > block_bytes) block.others = {};
  }

  void all_gather(const CallSummary& card, const Opened& opened, Bytes in, std::span<const Room> outs,
                  const WaitOptions& options) override {
    open(card, opened, options);
    for (std::size_t rank = 0; rank < ranks(); ++rank) ins_[rank] = cards_[rank].wants != 0 ? in : Bytes();
    outs_.assign(outs.begin(), outs.end());
    exchange(options);
  }

  void all_to_all(const CallSummary& card, const Opened& opened, std::span<const Bytes> ins, std::span<const Room> outs,
                  const WaitOptions& options) override {
    open(card, opened, options);
    ins_.assign(ins.begin(), ins.end());
    outs_.assign(outs.begin(), outs.end());
    exchange(options);
  }

 private:
  [[nodiscard]] std::size_t ranks() const noexcept { return cards_.size(); }
  [[nodiscard]] std::size_t self() const noexcept { return static_cast<std::size_t>(group_.rank()); }

  void open(const CallSummary& card, const Opened& opened, const WaitOptions& options) {
    group_.all_gather(std::as_bytes(std::span(&card, 1)), std::as_writable_bytes(std::span(cards_)), options);
    opened(cards_);
  }

  /// Messages in flight.
  struct Exchange {
    std::vector<std::shared_ptr<group::Mail::IncomingMail>> coming;
    std::vector<std::shared_ptr<group::Mail::OutgoingMail>> going;
  };
  /// The unit of a reduction.
  struct ReduceBlock {
    std::uint64_t begin = 0;
    std::vector<std::uint64_t> bounds;  // bounds of the slices of all ranks
    std::vector<std::byte> others;      // this rank's slice, from all ranks
    std::vector<const std::byte*> sources;
    std::vector<std::byte> slice;  // the reduced slice
    Exchange slices;
    Exchange results;
  };

  /// Sends the slices of `in` to their ranks.
  void begin_slices(ReduceBlock& block, Bytes in) {
    const std::uint64_t mine = block.bounds[self() + 1] - block.bounds[self()];
    block.others.resize(mine * ranks());
    block.sources.resize(ranks());
    for (std::size_t rank = 0; rank < ranks(); ++rank) {
      ins_[rank] = in.subspan(block.bounds[rank], block.bounds[rank + 1] - block.bounds[rank]);
      outs_[rank] = Room(block.others).subspan(rank * mine, mine);
      block.sources[rank] = outs_[rank].data();
    }
    // This rank's own slice is not copied.
    block.sources[self()] = ins_[self()].data();
    ins_[self()] = {};
    begin(block.slices);
  }
  void reduce_slice(ReduceBlock& block, merge::Combine combine, DType dtype, Room slice, const WaitOptions& options) {
    finish(block.slices, options);
    merge::reduce(combine, dtype, slice, block.sources);
  }

  void exchange(const WaitOptions& options) {
    Exchange all;
    begin(all);
    finish(all, options);
    see_off(options);
  }

  /// Sends ins_ to all ranks and receives outs_ from all ranks at the same time.
  void begin(Exchange& exchange) {
    if (const Bytes own = ins_[self()]; !own.empty() && own.data() != outs_[self()].data() && !outs_[self()].empty())
      std::memcpy(outs_[self()].data(), own.data(), own.size());
    for (std::size_t apart = 1; apart < ranks(); ++apart) {
      const std::size_t from = (self() + ranks() - apart) % ranks();
      const Room room = outs_[from];
      if (!room.empty())
        exchange.coming.push_back(mail_.receive(
            {.from = static_cast<int>(from), .tag = own_tag, .place = [room](const auto&) { return room; }}));
    }
    for (std::size_t apart = 1; apart < ranks(); ++apart) {
      const std::size_t to = (self() + apart) % ranks();
      if (!ins_[to].empty())
        exchange.going.push_back(mail_.send({.to = static_cast<int>(to), .tag = own_tag, .body = ins_[to]}));
    }
  }
  void finish(Exchange& exchange, const WaitOptions& options) {
    for (const auto& each : exchange.coming) mail_.wait([&] { return each->is_done.load(); }, each->from, options);
    for (const auto& each : exchange.going) mail_.wait([&] { return each->is_given.load(); }, each->to, options);
    leaving_.insert(leaving_.end(), exchange.going.begin(), exchange.going.end());
    exchange.coming.clear();
    exchange.going.clear();
  }
  /// Waits until the other ranks no longer need this rank.
  void see_off(const WaitOptions& options) {
    for (const auto& each : leaving_) mail_.wait([&] { return each->is_done.load(); }, each->to, options);
    leaving_.clear();
  }

  static constexpr auto own_tag = static_cast<std::int64_t>(group::Subject::collective);
  static constexpr std::uint64_t block_bytes = 8 << 20;

  group::BaseGroup& group_;
  group::Mail& mail_;
  // The state of the current call.
  std::vector<CallSummary> cards_;
  std::vector<Bytes> ins_;
  std::vector<Room> outs_;
  std::array<ReduceBlock, 2> blocks_;
  std::vector<std::shared_ptr<group::Mail::OutgoingMail>> leaving_;
};

}  // namespace

std::unique_ptr<Backend> message_backend(group::BaseGroup& group) {
  return std::make_unique<MessageBackend>(group);
}

}  // namespace muster::collectives
