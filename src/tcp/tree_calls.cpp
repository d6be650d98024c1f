// SPDX-License-Identifier: Apache-2.0
#include "src/tcp/tree_calls.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "src/hosts/hosts.hpp"

namespace muster::tcp {
namespace {

using hosts::Finished;
using hosts::Pending;

// Up and down the tree.
enum class TreeTag : int { barrier = 1, tell = 2 };
static_assert(static_cast<int>(TreeTag::tell) < hosts::first_tag);

/// Ranks in place of hosts.
hosts::HostTree tree_of(const hosts::Transport& transport) {
  return {transport.size()};
}

class TreeBarrier final : public hosts::Operation {
 public:
  explicit TreeBarrier(hosts::Transport& transport)
      : transport_(transport), parent_(tree_of(transport).parent(transport.rank())) {
    for (const int child : tree_of(transport).children(transport.rank()))
      from_children_.push_back(receive(child, TreeTag::barrier));
  }

  bool test() override {
    std::erase_if(from_children_, [](Pending& one) { return one.test(); });
    if (!from_children_.empty()) return false;
    if (parent_ >= 0 && !std::exchange(has_told_, true)) {
      from_parent_ = receive(parent_, TreeTag::barrier);
      send(parent_, TreeTag::barrier);
    }
    if (!from_parent_.test()) return false;
    if (!std::exchange(is_through_, true))
      for (const int child : tree_of(transport_).children(transport_.rank())) send(child, TreeTag::barrier);
    std::erase_if(sends_, [](Pending& one) { return one.test(); });
    return sends_.empty();
  }
  bool cancel() noexcept override { return false; }
  void abandon() noexcept override {}
  [[nodiscard]] bool borrows() const noexcept override { return false; }

 private:
  Pending receive(int from, TreeTag tag) { return transport_.receive(from, static_cast<int>(tag), {}, nullptr); }
  void send(int to, TreeTag tag) {
    sends_.push_back(transport_.send(to, static_cast<int>(tag), {}, nullptr, Finished::sent));
  }

  hosts::Transport& transport_;
  int parent_;
  bool has_told_ = false;
  bool is_through_ = false;
  std::vector<Pending> from_children_;
  Pending from_parent_;
  std::vector<Pending> sends_;
};

}  // namespace

Pending tree_barrier(hosts::Transport& transport) {
  return Pending(std::make_shared<TreeBarrier>(transport));
}

std::vector<std::byte> tell_over_tree(hosts::Transport& transport, std::span<const std::byte> mine,
                                      std::chrono::milliseconds timeout) {
  const hosts::HostTree tree = tree_of(transport);
  const int self = transport.rank();
  const auto begin = std::chrono::steady_clock::now();
  const auto wait = [&](Pending pending, int on) {
    const auto waited = std::chrono::steady_clock::now() - begin;
    // Who is below waits for those above: they name who is missing first.
    const auto grace = std::chrono::milliseconds(400) * (tree.depth(self) + 1);
    pending.wait(
        std::chrono::duration_cast<std::chrono::milliseconds>(std::max(timeout + grace - waited, 0 * waited)),
        fmt::format("TCP: rank {} waited {:.1f} s at the meeting for rank {}: look what it does, and whether its host "
                    "can be reached from this one",
                    self, std::chrono::duration<double>(timeout).count(), on));
  };
  const auto receive = [&](int from, TreeTag tag, std::size_t bytes) {
    auto memory = std::make_shared<std::vector<std::byte>>(bytes);
    wait(transport.receive(from, static_cast<int>(tag), *memory, memory), from);
    return memory;
  };
  const auto send = [&](int to, TreeTag tag, const std::shared_ptr<std::vector<std::byte>>& bytes) {
    wait(transport.send(to, static_cast<int>(tag), *bytes, bytes, Finished::sent), to);
  };
  // What comes from below is in the order of the tree.
  const auto below = std::make_shared<std::vector<std::byte>>(mine.begin(), mine.end());
  for (const int child : tree.children(self)) {
    const auto theirs = receive(child, TreeTag::tell, mine.size() * tree.with_all_below(child).size());
    below->insert(below->end(), theirs->begin(), theirs->end());
  }
  auto all = std::make_shared<std::vector<std::byte>>(mine.size() * static_cast<std::size_t>(transport.size()));
  if (self == 0) {
    const std::byte* next = below->data();
    for (const int rank : tree.with_all_below(0)) {
      std::copy_n(next, mine.size(), all->data() + static_cast<std::size_t>(rank) * mine.size());
      next += mine.size();
    }
  } else {
    send(tree.parent(self), TreeTag::tell, below);
    all = receive(tree.parent(self), TreeTag::tell, all->size());
  }
  std::vector<Pending> sends;
  for (const int child : tree.children(self)) send(child, TreeTag::tell, all);
  return std::move(*all);
}

}  // namespace muster::tcp
