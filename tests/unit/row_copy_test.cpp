// SPDX-License-Identifier: Apache-2.0
// Cutting and joining give the same bytes back, whatever the shape, the dimension and the number of ranks.

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "src/checkpoint/row_copy.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <string>

#include "muster/error.hpp"

using namespace muster;

namespace {

using Bytes = std::vector<std::byte>;

std::size_t size_of(const TensorSpec& spec) {
  std::int64_t elements = 1;
  for (const std::int64_t extent : spec.shape) elements *= extent;
  return (static_cast<std::size_t>(elements) * static_cast<std::size_t>(bits(spec.dtype)) + 7) / 8;
}

Bytes random_bytes(std::size_t count) {
  static std::mt19937_64 random(7);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() | 1U);  // never zero: padding shows
  return bytes;
}

// All that copy_rows gives, checked to be in order and complete.
Bytes collect(const RowCopy& copy, std::size_t size, std::size_t buffer_bytes) {
  Bytes out;
  Bytes buffer(buffer_bytes);
  copy_rows(copy, buffer, [&](std::uint64_t offset, std::span<const std::byte> bytes) {
    REQUIRE(offset == out.size());
    out.insert(out.end(), bytes.begin(), bytes.end());
  });
  CHECK(out.size() == size);
  return out;
}

void round_trip(const MergePlan& plan, const TensorSpec& whole, int ranks, std::size_t buffer_bytes) {
  CAPTURE(ranks);
  CAPTURE(buffer_bytes);
  const Bytes original = random_bytes(size_of(whole));
  const SplitTensor split = split_layout(plan, {"t", whole}, ranks);
  std::vector<Bytes> shards;
  std::vector<std::vector<NamedSpec>> listings;
  for (int rank = 0; rank < ranks; ++rank) {
    shards.push_back(collect(split_rows(split, whole, original.data(), rank), size_of(split.shard), buffer_bytes));
    listings.push_back({{"t", split.shard}});
  }
  PaddedSizes padded;
  if (split.padded) padded["t"] = {split.dim, whole.shape[split.dim]};
  const MergedTensor merged = merge_layout(plan, listings, padded).at(0);
  CHECK(merged.whole.shape == whole.shape);
  std::vector<const std::byte*> sources;
  std::vector<const Shape*> shapes;
  for (const Bytes& shard : shards) {
    sources.push_back(shard.data());
    shapes.push_back(&split.shard.shape);
  }
  CHECK(collect(merge_rows(merged, sources, shapes), original.size(), buffer_bytes) == original);
}

MergePlan concat_plan(int dim) {
  return MergePlan::parse(
      R"({"muster_plan": 1, "rules": [{"match": "*", "action": "concat", "dim": )" + std::to_string(dim) + "}]}", "p");
}

}  // namespace

TEST_CASE("cut and joined again, a tensor has the same bytes") {
  const std::vector<Shape> shapes = {{1},          {5},    {101, 8}, {4, 30},   {3, 5, 7},
                                     {2, 3, 4, 5}, {0, 4}, {4, 0},   {1, 4096}, {300, 7}};
  for (const Shape& shape : shapes) {
    CAPTURE(to_string(shape));
    for (int dim = 0; dim < static_cast<int>(shape.size()); ++dim) {
      CAPTURE(dim);
      for (const int ranks : {1, 2, 3, 4, 7, 12}) {
        for (const DType dtype : {DType::u8, DType::bf16, DType::f32, DType::f64}) {
          round_trip(concat_plan(dim), {dtype, shape}, ranks, 64);
          round_trip(concat_plan(dim - static_cast<int>(shape.size())), {dtype, shape}, ranks, row_buffer_bytes);
        }
      }
    }
  }
}

TEST_CASE("a tensor that every rank has goes both ways, scalars and empty ones too") {
  const MergePlan plan = MergePlan::parse(R"({"muster_plan": 1, "rules": [{"match": "*", "action": "same"}]})", "p");
  for (const Shape& shape : {Shape{}, Shape{0}, Shape{7}, Shape{3, 5}}) {
    for (const int ranks : {1, 4}) round_trip(plan, {DType::f16, shape}, ranks, 64);
  }
}

TEST_CASE("packed tensors are cut between bytes, an odd last element included") {
  for (const int ranks : {1, 2, 3, 4}) {
    round_trip(concat_plan(0), {DType::u4, {6}}, ranks, 64);
    round_trip(concat_plan(0), {DType::u4, {5}}, ranks, 64);
    round_trip(concat_plan(0), {DType::u4, {5, 4}}, ranks, 64);
    round_trip(concat_plan(1), {DType::i4, {5, 6}}, ranks, 64);
  }
  const SplitTensor split = split_layout(concat_plan(1), {"t", {DType::u4, {2, 5}}}, 2);
  const Bytes bytes(5);
  CHECK_THROWS_AS(split_rows(split, {DType::u4, {2, 5}}, bytes.data(), 0), Error);
}

TEST_CASE("long runs are written from where they lie, without a copy") {
  const Bytes source(std::size_t{4} << 20);
  const RowCopy copy{
      2, 2 << 20, {{source.data(), 1 << 20, 1 << 20, 0}, {source.data() + (2 << 20), 1 << 20, 1 << 20, 1 << 20}}};
  Bytes buffer(row_buffer_bytes);
  copy_rows(copy, buffer, [&](std::uint64_t, std::span<const std::byte> bytes) {
    CHECK(bytes.data() >= source.data());
    CHECK(bytes.data() < source.data() + source.size());
  });
}
