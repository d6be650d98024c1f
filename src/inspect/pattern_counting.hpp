// SPDX-License-Identifier: Apache-2.0
#pragma once
// Statistics of values of at most 16 bits: they are counted by their bits, and everything else follows from the counts.

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "src/inspect/statistics.hpp"

namespace muster::inspect {

/// Counts of tensors that several threads work on at the moment. A thread keeps the counts of its current tensor to
/// itself until it goes on to the next one, so that no more tables are alive than twice the threads.
class PatternCounting {
 public:
  /// `pieces`: how many each tensor of `out` has that will be counted. `out` is filled where all of a tensor's are.
  PatternCounting(std::vector<TensorStatistics>& out, std::vector<std::size_t> pieces, std::size_t workers,
                  std::size_t bins);
  /// One piece of the tensor at `place`, and how many values are in it. By several threads, each with a number of its
  /// own below `workers`.
  void count(std::size_t place, std::span<const std::byte> bytes, std::uint64_t values, std::size_t worker);
  /// When all pieces are counted.
  void finish();

 private:
  using Table = std::vector<std::uint64_t>;  // by pattern
  struct Own {
    std::size_t place = 0;
    std::size_t pieces = 0;
    Table table;
  };
  void hand_over(Own& own);

  std::vector<TensorStatistics>& out_;
  std::size_t bins_;
  std::mutex mutex_;
  std::vector<std::size_t> left_;
  std::vector<Table> shared_;
  std::vector<Own> workers_;
};

}  // namespace muster::inspect
