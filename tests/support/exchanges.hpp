// SPDX-License-Identifier: Apache-2.0
#pragma once
// Gathers, merges and streams that check every byte.

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "muster/gather.hpp"
#include "muster/merge_gather.hpp"
#include "src/os/fault.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/merge_model.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/reassembly.hpp"

namespace muster::test {

/// The group sizes of the conformance suite.
inline constexpr int group_sizes[] = {1, 2, 4, 7};

/// Gathers a tensor of each rank, which differs between rounds, and checks it.
inline void gather_and_check(Group& group, const std::vector<int>& ranks, DType dtype, const Shape& shape,
                             std::uint64_t round, const GatherOptions& options = {}) {
  const Tensor mine = pattern(dtype, shape, seed_of(group.rank(), round));
  const GatheredTensors all = get_tensors_parallel(mine, ranks, group, options);
  RANK_CHECK(all.size() == (group.rank() == ranks.front() ? ranks.size() : 0));
  RANK_CHECK(all.present().size() == all.size());
  if (!all.empty()) RANK_CHECK(all.ranks() == ranks);
  for (const auto& [rank, tensor] : all.present()) RANK_CHECK(is_pattern(tensor, dtype, shape, seed_of(rank, round)));
}
inline void gather_and_check(Group& group, const std::vector<int>& ranks, std::int64_t bytes, std::uint64_t round,
                             const GatherOptions& options = {}) {
  gather_and_check(group, ranks, DType::u8, {bytes}, round, options);
}
/// Gathers from all ranks to the last one.
inline void gather_and_check(Group& group) {
  gather_and_check(group, ranks_from(group.size() - 1, group.size()), 4000, 0);
}

/// Checks that the call fails on every rank of the group with the same message, and that the group remains usable. The
/// message must contain all of `parts`.
inline void fails_alike(Group& group, ErrorKind kind, const std::vector<std::string>& parts,
                        const std::function<void()>& call) {
  const std::string words = error_of(kind, parts, call).what();
  std::array<char, Group::max_record> mine{};
  std::ranges::copy_n(words.begin(), static_cast<std::ptrdiff_t>(std::min(words.size(), mine.size())), mine.begin());
  std::vector<std::array<char, Group::max_record>> all(static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (const auto& other : all)
    if (other != mine) throw RankFailure("other words on another rank: " + std::string(other.data()));
  gather_and_check(group, ranks_from(0, group.size()), 999, 0);
}

/// Flips one bit of one of the descriptors that this rank sends while the object exists.
class DamagedDescriptor {
 public:
  /// `number` counts the descriptors from 0, and `byte` is taken modulo the length.
  DamagedDescriptor(int number, std::size_t byte) {
    number_ = number;
    byte_ = byte;
    seen_ = 0;
    os::set_damage_hook([](std::span<std::byte> descriptor) {
      if (seen_++ == number_) descriptor[byte_ % descriptor.size()] ^= std::byte{1};
    });
  }
  DamagedDescriptor& operator=(DamagedDescriptor&&) = delete;
  ~DamagedDescriptor() { os::set_damage_hook(nullptr); }
  [[nodiscard]] bool was_sent() const noexcept { return seen_ > number_; }

 private:
  static inline int number_ = 0;
  static inline std::size_t byte_ = 0;
  static inline int seen_ = 0;
};

using Make = std::function<Tensor(int rank)>;

inline Make patterns(DType dtype, const Shape& shape, std::uint64_t round) {
  return [=](int rank) { return pattern(dtype, shape, seed_of(rank, round)); };
}

/// Merges, and compares the result on the root. `make` returns the tensor of any rank.
inline ExchangeReport merge_and_check(Group& group, const std::vector<int>& ranks, const Merge& merge, const Make& make,
                                      const GatherOptions& options = {}) {
  const Tensor mine = make(group.rank());
  const MergeResult merged = merge_tensor_parallel(mine, merge, ranks, group, options);
  RANK_CHECK(merged.ranks() == ranks);
  RANK_CHECK(merged.wait_released(std::chrono::milliseconds(0)));
  RANK_CHECK(merged.tensor().has_value() == (group.rank() == ranks.front()));
  if (!merged.tensor()) return merged.report();
  std::vector<Tensor> sources;
  for (const int rank : ranks) sources.push_back(make(rank));
  const Tensor expected = merge_model(merge, sources);
  RANK_CHECK(merged.tensor()->dtype() == expected.dtype());
  RANK_CHECK(merged.tensor()->shape() == expected.shape());
  RANK_CHECK(bitwise_equal(*merged.tensor(), expected));
  return merged.report();
}

/// Returns the config of a rank in a layer, which is the same on every rank. A null config means that the rank has
/// none.
using Model = std::function<Config(int rank, std::uint64_t layer)>;

/// Checks that part 0 lists the tensors of all parts of the layer.
inline void check_tensors(const LayerPart& part, const std::function<Config(int rank)>& layer_of_rank) {
  auto listed = part.tensors.begin();
  for (const int rank : part.ranks)
    for_each_leaf(layer_of_rank(rank), [&](const Config& leaf) {
      if (!leaf.is_tensor()) return;
      RANK_CHECK(listed != part.tensors.end());
      RANK_CHECK(listed->rank == rank);
      RANK_CHECK((listed->whole == TensorSpec{leaf.as_tensor().dtype(), leaf.as_tensor().shape()}));
      ++listed;
    });
  RANK_CHECK(listed == part.tensors.end());
}

/// Streams `layers` layers of a model. The root assembles each of them and compares it with the model. `lies`, if
/// given, returns the configs that the ranks send; their tensors may be stored differently from those of the model.
inline StreamReport stream_and_check(Group& group, const std::vector<int>& ranks, std::uint64_t layers,
                                     const Model& model, const StreamOptions& options = {}, const Model& lies = {}) {
  std::uint64_t given = 0;
  const auto source = [&]() -> std::optional<Config> {
    if (given == layers) return std::nullopt;
    return (lies ? lies : model)(group.rank(), given++);
  };
  std::uint64_t taken = 0;
  std::uint64_t bytes = 0;
  Reassembly whole;
  const auto consume = [&](LayerPart& part) {
    RANK_CHECK(part.layer == taken);
    RANK_CHECK(part.ranks == ranks);
    RANK_CHECK(part.configs.size() == ranks.size());
    if (part.part == 0)
      check_tensors(part, [&](int rank) { return model(rank, taken); });
    else
      RANK_CHECK(part.tensors.empty());
    whole.add(part);
    if (!part.is_last()) return;
    for (const int rank : ranks) {
      const Config expected = model(rank, taken);
      const std::optional<Config> got = whole.layer(rank);
      RANK_CHECK(got.has_value() == !expected.is_null());
      if (got) RANK_CHECK(*got == expected);
      for_each_leaf(expected, [&](const Config& leaf) { bytes += leaf.is_tensor() ? leaf.as_tensor().nbytes() : 0; });
    }
    whole = Reassembly();
    ++taken;
  };
  StreamReport report = gather_each(source, ranks, group, consume, options);
  const bool is_member = std::ranges::find(ranks, group.rank()) != ranks.end();
  RANK_CHECK(given == (is_member ? layers : 0));
  RANK_CHECK(taken == (!ranks.empty() && group.rank() == ranks.front() ? layers : 0));
  RANK_CHECK(report.layers == given);
  if (taken != 0) RANK_CHECK(report.bytes == bytes);
  return report;
}

}  // namespace muster::test
