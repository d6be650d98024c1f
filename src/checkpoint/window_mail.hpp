// SPDX-License-Identifier: Apache-2.0
#pragma once
// Parts of windows from processes that share no memory with the writer: as messages of the group, whatever it is.
//
//  1. The writer comes to an item, has a free window for it, and sends a word to every such contributor.
//  2. A contributor comes to the item, waits for that word, and sends its rows, packed, in messages of bounded size;
//     each says where its rows go, and the last one that it is the last.
//  3. The writer puts them into the window.
//  4. A process that does not share memory with process 0 tells it, at points of the order that both know, how many
//     files it has done with (the stage), and how much it has written.
//
// All processes go through items in one order, so that messages between two of them come in the order in which they are
// expected, and nobody waits in a circle: take the earliest item that is not through. Its writer waits for contributors
// that are on their way to it or there, and they for their writer; neither waits for anything later.
//
// The word of step 1 is the credit: nobody sends what the writer has no window for, so that a slow disk holds up
// senders, and fills no memory.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "muster/sync_group.hpp"
#include "src/checkpoint/assembly_plan.hpp"
#include "src/checkpoint/tensor_source.hpp"

namespace muster {

/// One process's. Used by the thread that uses the group.
class WindowMail {
 public:
  /// At most so much of a window is in a message.
  static constexpr std::uint64_t piece_bytes(std::uint64_t window_bytes) noexcept {
    return std::min<std::uint64_t>(window_bytes / 4, 1 << 20);
  }

  WindowMail(SyncGroup& group, const TensorSource& source, std::uint64_t window_bytes);

  /// Step 2. Throws as SyncGroup::send and read_rows.
  void contribute(const Step& step);
  /// Steps 1 and 3. Throws as SyncGroup::receive, and Error(corrupt) on rows that lie outside the window.
  void collect(const Step& step, std::span<std::byte> window);

  /// Step 4.
  struct Stage {
    std::uint32_t files = 0;
    std::uint64_t bytes = 0;
  };
  void tell_stage(const Stage& stage);
  Stage hear_stage(int from);

 private:
  void pack(const merge::Rectangle& copy, std::uint32_t turn, int writer);
  void send_piece(std::uint32_t turn, int writer, bool is_last);
  [[nodiscard]] bool take_piece(int from, std::uint32_t turn, std::span<std::byte> window);

  SyncGroup& group_;
  const TensorSource& source_;
  std::uint64_t piece_bytes_;
  std::vector<std::byte> piece_;  // the message that is being packed
};

}  // namespace muster
