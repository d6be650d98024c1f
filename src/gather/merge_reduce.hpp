// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reducing in shared memory: all ranks of a list work on one chunk of the tensor after the other, each on its share.
//
//  1. Each rank writes its own elements of the chunk into its place of the scratch area, and says so ("written").
//  2. When all have written a chunk, each rank reduces its share of it from all places into the target, and says so
//     ("reduced").
//  3. There are two scratch areas: a rank writes chunk k + 1 before it reduces its share of chunk k, and it writes
//     chunk k + 2 when all have reduced chunk k.
// Words carry the number of the exchange, so that what an earlier one left in them means nothing. A rank that cannot go
// on sets "given up": the others leave and hear why in round 2. A rank that dies is found by the group's watchdog.

#include <cstddef>
#include <cstdint>
#include <span>

#include "muster/tensor.hpp"
#include "src/gather/merge_record.hpp"
#include "src/gather/route.hpp"
#include "src/merge/layout.hpp"

namespace muster::gather {

/// The ranks' words at the beginning of a merge's segment, as one rank sees them.
class MergeWords {
 public:
  MergeWords(const Call& call, std::byte* data) : call_(call), data_(data) {}

  /// First rank: all have what they need, or one has not. Others: waits for that word; false where one has not.
  void start(bool is_well) noexcept;
  bool wait_for_start();

  void give_up() noexcept;
  [[nodiscard]] bool has_given_up() const noexcept;
  enum class Kind { written, reduced };
  void say(Kind kind, std::uint32_t chunks) noexcept;
  /// Until all ranks of the list have written (reduced) so many chunks; false where one has given up.
  bool wait(Kind kind, std::uint32_t chunks);

 private:
  struct Line;
  [[nodiscard]] Line& line(std::size_t index) const noexcept;
  [[nodiscard]] std::uint64_t tagged(std::uint32_t value) const noexcept;
  [[nodiscard]] bool is_there(const Line& line, Kind kind, std::uint32_t chunks) const noexcept;
  static void ring(Line& line) noexcept;

  const Call& call_;
  std::byte* data_;
};

/// Steps 1 to 3 on one rank. `data` is the segment's; `source` this rank's tensor. Returns early where a rank has given
/// up. Throws as SyncGroup::wait_until.
void reduce_in_chunks(const Call& call, merge::Combine combine, const TensorView& source, const MergeArea& area,
                      std::byte* data);

}  // namespace muster::gather
