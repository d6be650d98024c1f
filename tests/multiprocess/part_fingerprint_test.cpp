// SPDX-License-Identifier: Apache-2.0
// The fingerprint of tensors that ranks have in memory is that of the whole tensors, and every rank gets it.

#include <doctest/doctest.h>

#include <random>
#include <string>
#include <vector>

#include "muster/fingerprint.hpp"
#include "src/core/crc64.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;

namespace {

constexpr int ranks = 4;

/// Random numbers that are the same on all ranks.
struct Dice {
  std::mt19937_64 random;
  std::int64_t below(std::int64_t end) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end)); }
};

TensorPart part_of(const std::string& name, const Tensor& whole, const Shape& begin, const Shape& extents) {
  TensorView view = whole;
  for (std::size_t dim = 0; dim < begin.size(); ++dim) view = view.slice(dim, begin[dim], begin[dim] + extents[dim]);
  return {name, Tensor(view, whole.owner()), whole.shape(), begin};
}

/// Cuts a box at random. Every part gets one to all ranks; `mine` receives those of this rank.
void share(Dice& dice, const std::string& name, const Tensor& whole, Shape begin, Shape extents, int depth, int rank,
           std::vector<TensorPart>& mine) {
  if (depth != 0 && !begin.empty()) {
    const auto dim = static_cast<std::size_t>(dice.below(static_cast<std::int64_t>(begin.size())));
    const std::int64_t at = dice.below(extents[dim] + 1);
    Shape first = extents;
    first[dim] = at;
    share(dice, name, whole, begin, first, depth - 1, rank, mine);
    begin[dim] += at;
    extents[dim] -= at;
    return share(dice, name, whole, begin, extents, depth - 1, rank, mine);
  }
  const std::int64_t owners = dice.below((1 << ranks) - 1) + 1;
  if ((owners >> rank & 1) == 0) return;
  TensorPart& part = mine.emplace_back(part_of(name, whole, begin, extents));
  if (mine.size() % 2 == 0) part.tensor = Tensor::copy_of(part.tensor);
}

/// Adds a part that overlaps the others, on one rank.
void overlap(Dice& dice, const std::string& name, const Tensor& whole, int rank, std::vector<TensorPart>& mine) {
  Shape begin;
  Shape extents;
  for (const std::int64_t extent : whole.shape()) {
    begin.push_back(dice.below(extent + 1));
    extents.push_back(dice.below(extent - begin.back() + 1));
  }
  if (dice.below(ranks) == rank) mine.push_back(part_of(name, whole, begin, extents));
}

TensorPart row(const std::string& name, std::int64_t begin, std::int64_t count, std::uint64_t seed = 1,
               std::int64_t rows = 4, DType dtype = DType::bf16) {
  return part_of(name, test::pattern(dtype, {rows, 3}, seed), {begin, 0}, {count, 3});
}

}  // namespace

TEST_CASE("random parts, replicas and overlaps have the fingerprint of the whole tensors") {
  test::run_ranks(ranks, [&](Group& group) {
    for (std::uint64_t round = 0; round < 40; ++round) {
      Fingerprint expected;
      std::vector<TensorPart> mine;
      for (int i = 0; i < 12; ++i) {
        Dice dice{std::mt19937_64(round * 100 + static_cast<std::uint64_t>(i))};
        Shape shape(static_cast<std::size_t>(dice.below(4)));
        for (std::int64_t& extent : shape) extent = dice.below(12);
        const DType dtype = i % 3 == 0 ? DType::u8 : i % 3 == 1 ? DType::bf16 : DType::f32;
        const Tensor whole = test::pattern(dtype, shape, dice.random());
        const std::string name = "tensor" + std::to_string(i + 10);
        expected.tensors.push_back({name, {dtype, shape}, crc64(whole.bytes())});
        const int depth = static_cast<int>(dice.below(4));
        if (dice.below(2) == 0) overlap(dice, name, whole, group.rank(), mine);
        share(dice, name, whole, Shape(shape.size(), 0), shape, depth, group.rank(), mine);
      }
      RANK_CHECK(fingerprint(mine, group) == expected);
      const Fingerprint one = fingerprint(mine, group, {.select = "tensor1*", .exclude = "tensor10"});
      RANK_CHECK(one.tensors.size() == 9 && one.tensors.front() == expected.tensors[1]);
    }
  });
}

TEST_CASE("one large tensor in rows of one rank, columns of others, and packed elements") {
  const Tensor whole = test::pattern(DType::bf16, {3000, 2500}, 7);
  const Tensor packed = test::pattern(DType::u4, {8, 6}, 8);
  test::run_ranks(3, [&](Group& group) {
    const std::int64_t left = 1000;
    std::vector<TensorPart> mine;
    if (group.rank() == 0) mine = {part_of("w", whole, {0, 0}, {500, 2500})};
    if (group.rank() == 1) mine = {part_of("w", whole, {500, 0}, {2500, left})};
    if (group.rank() == 1) mine.push_back({"p", Tensor(packed.view().slice(0, 0, 5), packed.owner()), {8, 6}, {0, 0}});
    if (group.rank() == 2) mine = {part_of("w", whole, {500, left}, {2500, 2500 - left})};
    if (group.rank() == 2) mine.push_back({"p", Tensor(packed.view().slice(0, 5, 8), packed.owner()), {8, 6}, {5, 0}});
    const Fingerprint found = fingerprint(mine, group);
    RANK_CHECK(
        (found.tensors == std::vector<TensorFingerprint>{{"p", {DType::u4, {8, 6}}, crc64(packed.bytes())},
                                                         {"w", {DType::bf16, {3000, 2500}}, crc64(whole.bytes())}}));
  });
}

TEST_CASE("parts that do not fit together are one error on all ranks, and the group stays usable") {
  test::run_ranks(3, [&](Group& group) {
    const auto fails = [&](ErrorKind kind, const std::vector<std::string>& words, const std::vector<TensorPart>& parts,
                           const FingerprintOptions& options = {}) {
      test::error_of(kind, words, [&] { fingerprint(parts, group, options); });
    };
    using Parts = std::vector<TensorPart>;
    const bool is_last = group.rank() == 2;
    const Parts good = is_last ? Parts{} : Parts{row("w", group.rank() * 2, 2)};
    fails(ErrorKind::invalid_argument, {"\"w\"", "cover 6 of 12 elements"}, group.rank() == 0 ? good : Parts{});
    fails(ErrorKind::rank_mismatch, {"\"w\"", "BF16 [4, 3] on rank 0", "BF16 [5, 3] on rank 2"},
          is_last ? Parts{row("w", 0, 1, 1, 5)} : good);
    fails(ErrorKind::rank_mismatch, {"\"w\"", "F16 [4, 3] on rank 2"},
          is_last ? Parts{row("w", 0, 1, 1, 4, DType::f16)} : good);
    fails(ErrorKind::rank_mismatch, {"\"w\"", "rank 0 and rank 2 have different values of the elements [0:2, 0:3]"},
          is_last ? Parts{row("w", 0, 2, 2)} : good);
    // A partial overlap.
    fails(ErrorKind::rank_mismatch, {"\"w\"", "rank 2 have different values"},
          is_last ? Parts{row("w", 1, 2, 2)} : good);
    fails(ErrorKind::invalid_argument, {"\"w\"", "out of range for the whole"},
          is_last ? Parts{{"w", test::pattern(DType::bf16, {2, 3}, 1), {4, 3}, {3, 0}}} : good);
    fails(ErrorKind::not_found, {"no tensor has a selected name"}, good, {.select = "nothing"});
    fails(ErrorKind::unsupported, {"job_id", "Leave them out"}, good, {.job_id = "job"});
    fails(ErrorKind::unsupported, {"job_id", "Leave them out"}, good, {.plan = "llama", .job_id = "job"});
    fails(ErrorKind::invalid_argument, {"the plan describes the parts"}, good, {.plan = "llama"});
    const Tensor whole = test::pattern(DType::bf16, {4, 3}, 1);
    RANK_CHECK(fingerprint(good, group).tensors.at(0).crc == crc64(whole.bytes()));
    RANK_CHECK(fingerprint({}, group).tensors.empty());
  });
}
