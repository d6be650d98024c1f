// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/outflow.hpp"

#include <algorithm>
#include <array>
#include <thread>

#include "src/mpi/mpi_pieces.hpp"

namespace muster::mpi {
namespace {

// One is filled while others are under way.
constexpr std::size_t most_buffers = 4;
// Long against what is under way to one receiver on most links, and short enough for the dead to be named in a second.
constexpr std::chrono::milliseconds patience_after_failure{250};

}  // namespace

void Outflow::prepare(BufferPool& pool, std::size_t pieces, std::uint64_t bytes, std::uint64_t pool_limit) {
  const std::vector<std::uint64_t> sizes(std::min(pieces, most_buffers), bytes);
  if (!sizes.empty()) buffers_ = pool.take(sizes, pool_limit);
}

std::shared_ptr<std::byte> Outflow::buffer(const WaitOptions& wait) {
  for (;;) {
    // Only this one holds it: no send under way does.
    const auto unused =
        std::ranges::find_if(buffers_, [](const BufferPool::Buffer& each) { return each.data.use_count() == 1; });
    if (unused != buffers_.end()) return unused->data;
    drain(under_way_.size() - 1, wait);
  }
}

void Outflow::send(std::span<const std::byte> bytes, std::shared_ptr<const void> keeper, const WaitOptions& wait) {
  drain(pieces_under_way - 1, wait);
  under_way_.push_back(
      group_.towards(to_, [&] { return start_send(group_.comm(), to_, group_.data_tag(), bytes, std::move(keeper)); }));
}

void Outflow::finish(const WaitOptions& wait) {
  drain(0, wait);
}

void Outflow::drain(std::size_t most, const WaitOptions& wait) {
  if (under_way_.size() <= most) return;
  const std::array<int, 1> on{to_};
  try {
    group_.wait_for(
        [&] {
          eagerness_.begin();
          for (;;) {
            bool has_moved = false;
            while (!under_way_.empty() && group_.towards(to_, [&] { return under_way_.front().test(); })) {
              under_way_.pop_front();
              group_.progress();
              has_moved = true;
            }
            if (under_way_.size() <= most) return true;
            if (!eagerness_.again(has_moved)) break;
          }
          group_.throw_if_dead(to_);
          return false;
        },
        on, wait);
  } catch (const Error& error) {
    // A receiver that lives takes in what it has been promised, if both let MPI go on: then views are the caller's
    // again.
    const auto until = Clock::now() + (error.rank() == to_ ? std::chrono::milliseconds(0) : patience_after_failure);
    for (;;) {
      std::erase_if(under_way_, [](Pending& send) { return send.is_over(); });
      if (std::ranges::none_of(under_way_, &Pending::borrows) || must_rest() || Clock::now() >= until) break;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (std::ranges::none_of(under_way_, &Pending::borrows)) throw;
    throw error.with_context(
        "tensors were being sent, and MPI may still read them: leave them where they are until "
        "the process ends");
  }
}

}  // namespace muster::mpi
