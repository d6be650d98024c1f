// SPDX-License-Identifier: Apache-2.0
// The copies that merges use: rows by streaming stores, and parts of strided tensors.

#include <algorithm>
#include <vector>

#include "doctest/doctest.h"
#include "src/core/tensor.hpp"
#include "src/shm/stream_copy.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;

TEST_CASE("rows of any length and alignment are copied, and the bytes between them are untouched") {
  for (const std::uint64_t bytes : {1U, 63U, 64U, 255U, 256U, 300U, 4096U, 4100U, 70001U}) {
    for (const std::uint64_t gap : {0U, 1U, 64U, 777U}) {
      for (const std::size_t shift : {0U, 3U}) {
        CAPTURE(bytes);
        CAPTURE(gap);
        const std::uint64_t rows = std::min<std::uint64_t>(5000, 600000 / bytes + 2);
        std::vector<std::byte> source(rows * (bytes + gap) + shift);
        test::fill(source.data(), source.size(), bytes);
        std::vector<std::byte> target(rows * (bytes + 2 * gap) + shift, std::byte{0x5a});
        std::vector<std::byte> expected = target;
        for (std::uint64_t row = 0; row < rows; ++row)
          std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(shift + row * (bytes + gap)), bytes,
                      expected.begin() + static_cast<std::ptrdiff_t>(shift + row * (bytes + 2 * gap)));
        shm::stream_rows(target.data() + shift, bytes + 2 * gap, source.data() + shift, bytes + gap, bytes, rows);
        shm::publish_fence();
        CHECK(target == expected);
      }
    }
  }
}

TEST_CASE("each variant of the copy that this processor supports copies lines, and no byte beyond them") {
  std::vector<std::byte> source(20 * 64 + 1);
  test::fill(source.data(), source.size(), 7);
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  for (const shm::StreamLines copy : shm::stream_variants()) {
    for (const std::size_t shift : {0U, 1U}) {
      for (std::size_t lines = 0; lines <= 19; ++lines) {
        std::vector<Line> target(20);
        std::byte* const begin = target.front().bytes;
        std::fill_n(begin, target.size() * 64, std::byte{0x5a});
        copy(begin, source.data() + shift, lines);
        shm::publish_fence();
        CHECK(std::equal(begin, begin + lines * 64, source.begin() + static_cast<std::ptrdiff_t>(shift)));
        CHECK(std::all_of(begin + lines * 64, begin + target.size() * 64,
                          [](std::byte b) { return b == std::byte{0x5a}; }));
      }
    }
  }
}

TEST_CASE("every range of strided, sliced, transposed and repeated tensors") {
  const Tensor whole = test::pattern(DType::i32, {6, 5, 8}, 3);
  const std::vector<TensorView> views = {
      whole.view(),
      whole.view().transposed(),
      whole.view().slice(1, 1, 4),
      whole.view().slice(2, 2, 3),
      whole.view().slice(0, 1, 2).slice(2, 1, 6).transposed(),
      {DType::i32, {3, 4, 2}, whole.data(), {0, 8, 1}},
      {DType::i32, {4, 3}, whole.data() + 4 * 100, {-8, 2}},
  };
  for (const TensorView& view : views) {
    const Tensor all = Tensor::copy_of(view);
    for (std::int64_t begin = 0; begin <= view.elements(); ++begin) {
      for (std::int64_t end = begin; end <= view.elements(); end += 1 + end % 7) {
        std::vector<std::byte> part(static_cast<std::size_t>(end - begin) * 4 + 4, std::byte{0x77});
        core::copy_elements(view, begin, end, part.data());
        CHECK(std::equal(part.begin(), part.end() - 4, all.data() + begin * 4));
        CHECK(part.back() == std::byte{0x77});
      }
    }
  }
  const Tensor packed = test::pattern(DType::u4, {7, 3}, 1);
  std::vector<std::byte> part(11);
  core::copy_elements(packed, 4, 21, part.data());
  CHECK(std::equal(part.begin(), part.begin() + 9, packed.data() + 2));
}
