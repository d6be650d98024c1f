// SPDX-License-Identifier: Apache-2.0
// Boxes of a tensor: random cuts are put together bit by bit, overlaps are found and cut, holes are counted.

#include "src/merge/boxes.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::merge;

namespace {

using Random = std::mt19937;

std::int64_t less_than(Random& random, std::int64_t count) {
  return static_cast<std::int64_t>(random() % static_cast<unsigned>(count));
}

/// Returns boxes that cover the region, each element once. Some have no elements.
std::vector<OwnedBox> cut_at_random(Random& random, OwnedBox region, int depth) {
  if (depth == 0 || region.begin.empty() || random() % 6 == 0) return {region};
  const std::size_t dim = random() % region.begin.size();
  const std::int64_t at = less_than(random, region.extents[dim] + 1);
  OwnedBox left = region;
  OwnedBox right = std::move(region);
  left.extents[dim] = at;
  right.begin[dim] += at;
  right.extents[dim] -= at;
  std::vector<OwnedBox> boxes = cut_at_random(random, std::move(left), depth - 1);
  for (OwnedBox& box : cut_at_random(random, std::move(right), depth - 1)) boxes.push_back(std::move(box));
  std::ranges::shuffle(boxes, random);
  return boxes;
}

/// Returns the values of a box if element i of the whole is the number i, in row-major order.
std::vector<std::uint32_t> values_in(const OwnedBox& box, const Shape& whole) {
  std::vector<std::uint32_t> values;
  const Strides strides = row_major_strides(whole);
  for (std::uint64_t i = 0; i < volume(box.extents); ++i) {
    std::uint64_t rest = i;
    std::int64_t at = 0;
    for (std::size_t dim = whole.size(); dim-- > 0;) {
      const auto extent = static_cast<std::uint64_t>(box.extents[dim]);
      at += (box.begin[dim] + static_cast<std::int64_t>(rest % extent)) * strides[dim];
      rest /= extent;
    }
    values.push_back(static_cast<std::uint32_t>(at));
  }
  return values;
}

std::vector<BoxView> views_of(const std::vector<OwnedBox>& boxes) {
  std::vector<BoxView> views;
  for (const OwnedBox& box : boxes) views.push_back(box.view());
  return views;
}

/// Copies the bytes that the bands describe.
std::vector<std::uint32_t> joined_boxes(const Shape& whole, const std::vector<Band>& bands,
                                        const std::vector<std::vector<std::uint32_t>>& sources) {
  std::vector<std::uint32_t> target(volume(whole), 0xffffffff);
  std::uint64_t next = 0;
  for (const Band& band : bands) {
    CHECK(band.at == next);
    next += band.rows.bytes();
    for (const Rectangle& part : rectangles(band.rows, 0, band.rows.bytes()))
      for (std::uint64_t row = 0; row < part.rows; ++row)
        std::memcpy(reinterpret_cast<std::byte*>(target.data()) + band.at + part.to + row * part.to_stride,
                    reinterpret_cast<const std::byte*>(sources[static_cast<std::size_t>(part.source)].data()) +
                        part.from + row * part.from_stride,
                    part.bytes);
  }
  CHECK(next == target.size() * 4);
  return target;
}

std::vector<std::uint32_t> numbers_to(std::uint64_t count) {
  std::vector<std::uint32_t> numbers(count);
  for (std::size_t i = 0; i < count; ++i) numbers[i] = static_cast<std::uint32_t>(i);
  return numbers;
}

Shape shape_to_cut(Random& random) {
  Shape whole;
  for (auto dims = random() % 6; whole.size() < dims;) whole.push_back(less_than(random, dims < 3 ? 40 : 9));
  return whole;
}

}  // namespace

TEST_CASE("random boxes are put together bit by bit") {
  Random random(1);
  for (int round = 0; round < 3000; ++round) {
    const Shape whole = shape_to_cut(random);
    const std::vector<OwnedBox> boxes =
        cut_at_random(random, {Shape(whole.size(), 0), whole}, static_cast<int>(random() % 5));
    std::vector<SourceBox> sources;
    std::vector<std::vector<std::uint32_t>> values;
    for (const OwnedBox& box : boxes) {
      sources.push_back({static_cast<int>(sources.size()), box, box});
      values.push_back(values_in(box, whole));
    }
    const Cover cover = cover_of(views_of(boxes), SIZE_MAX);
    CHECK(cover.elements == volume(whole));
    CHECK(cover.overlaps.empty());
    CHECK(joined_boxes(whole, bands_of({DType::u32, whole}, sources), values) == numbers_to(volume(whole)));
  }
}

TEST_CASE("boxes that overlap are cut, and all that two have is found") {
  Random random(2);
  for (int round = 0; round < 1000; ++round) {
    const Shape whole = shape_to_cut(random);
    std::vector<OwnedBox> boxes =
        cut_at_random(random, {Shape(whole.size(), 0), whole}, static_cast<int>(random() % 4));
    for (auto more = random() % 4; more-- > 0;) {
      OwnedBox box;
      for (const std::int64_t extent : whole) {
        box.begin.push_back(less_than(random, extent + 1));
        box.extents.push_back(less_than(random, extent - box.begin.back() + 1));
      }
      boxes.insert(boxes.begin() + static_cast<std::ptrdiff_t>(random() % (boxes.size() + 1)), box);
    }
    std::vector<SourceBox> sources;
    std::vector<std::vector<std::uint32_t>> values;
    for (const OwnedBox& box : boxes) {
      sources.push_back({static_cast<int>(sources.size()), box, box});
      values.push_back(values_in(box, whole));
    }
    const Cover cover = cover_of(views_of(boxes), SIZE_MAX);
    std::vector<CommonBox> common;
    const std::vector<SourceBox> cut = cut_overlaps(sources, cover.overlaps, common);
    CHECK(joined_boxes(whole, bands_of({DType::u32, whole}, cut), values) == numbers_to(volume(whole)));
    std::uint64_t pairs = 0;
    for (std::size_t i = 0; i < boxes.size(); ++i)
      for (std::size_t j = 0; j < i; ++j) pairs += volume(common_of(boxes[i].view(), boxes[j].view()).extents) != 0;
    CHECK(common.size() == pairs);
    for (const CommonBox& each : common) {
      std::vector<std::uint32_t> seen[2];
      for (const int side : {0, 1}) {
        const auto source = static_cast<std::size_t>(side == 0 ? each.source : each.other);
        for (const Rectangle& rows : rows_in_source({DType::u32, whole}, each.box, boxes[source]))
          for (std::uint64_t row = 0; row < rows.rows; ++row)
            for (std::uint64_t i = 0; i < rows.bytes / 4; ++i)
              seen[side].push_back(values[source].at((rows.from + row * rows.from_stride) / 4 + i));
      }
      CHECK(seen[0] == values_in(each.box, whole));
      CHECK(seen[0] == seen[1]);
    }
  }
}

TEST_CASE("many boxes stay few runs, and packed elements are not cut inside a byte") {
  // Blocks of rows, as FSDP cuts: one row of the target with one run each.
  std::vector<SourceBox> rows;
  for (int i = 0; i < 64; ++i) rows.push_back({i, {{i * 4, 0}, {4, 32}}, {{i * 4, 0}, {4, 32}}});
  CHECK(bands_of({DType::f32, {256, 32}}, rows).size() == 1);
  // A grid under many outer indices: rows with all runs of an index.
  std::vector<SourceBox> grid;
  for (int i = 0; i < 4; ++i) {
    const OwnedBox box{{0, i / 2 * 2, i % 2 * 2}, {1'000'000, 2, 2}};
    grid.push_back({i, box, box});
  }
  const std::vector<Band> bands = bands_of({DType::f32, {1'000'000, 4, 4}}, grid);
  REQUIRE(bands.size() == 1);
  CHECK(bands[0].rows.count == 1'000'000);
  CHECK(bands[0].rows.runs.size() == 8);
  const auto halves = [](DType dtype, std::int64_t at) {
    const std::vector<SourceBox> boxes = {{0, {{0, 0}, {3, at}}, {{0, 0}, {3, at}}},
                                          {1, {{0, at}, {3, 8 - at}}, {{0, at}, {3, 8 - at}}}};
    return bands_of({dtype, {3, 8}}, boxes);
  };
  CHECK(halves(DType::f4_e2m1, 2).at(0).rows.row_bytes == 4);
  CHECK_THROWS_AS(halves(DType::f4_e2m1, 3), Error);
  const std::vector<SourceBox> one = {{0, {{0}, {3}}, {{0}, {3}}}};
  CHECK(bands_of(TensorSpec{DType::f4_e2m1, {3}}, one).at(0).rows.bytes() == 2);
  const std::vector<BoxView> boxes = {rows[0].box.view(), rows[2].box.view()};
  CHECK(cover_of(boxes, 1).elements == 256);
  CHECK(box_text(boxes[1]) == "[8:12, 0:32]");
}
