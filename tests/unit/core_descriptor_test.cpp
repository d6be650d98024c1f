// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "src/core/descriptor.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/random_config.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using core::TensorLocation;
using test::small;

namespace {

/// A slot and one arena, as the two sides of an exchange see them.
struct Exchange {
  std::vector<std::byte> slot;
  std::vector<std::byte> arena;

  /// Every tensor whose number is a multiple of `nth` is in the arena; 0: none.
  std::vector<std::byte> send(const Config& config, unsigned nth = 0) {
    core::SlotLayout layout;
    unsigned tensors = 0;
    return core::encode_descriptor(config, [&](const Tensor& tensor) -> std::optional<TensorLocation> {
      const bool is_in_arena = nth != 0 && ++tensors % nth == 0;
      std::vector<std::byte>& memory = is_in_arena ? arena : slot;
      const std::uint64_t offset = is_in_arena ? arena.size() : layout.place(tensor.nbytes());
      memory.resize(std::max<std::size_t>(memory.size(), offset + tensor.nbytes()));
      copy_contiguous(tensor, memory.data() + offset);
      return is_in_arena ? std::optional(TensorLocation{7, offset}) : std::nullopt;
    });
  }

  Config receive(std::span<const std::byte> bytes) const {
    return core::decode_descriptor(
        bytes, [&](DType dtype, const Shape& shape, std::uint64_t nbytes, TensorLocation place) -> Tensor {
          const std::vector<std::byte>& memory = place.segment == 0 ? slot : arena;
          if ((place.segment != 0 && place.segment != 7) || place.offset > memory.size() ||
              nbytes > memory.size() - place.offset)
            throw Error(ErrorKind::corrupt, "a tensor outside its memory");
          return Tensor::borrow(TensorView(dtype, shape, memory.data() + place.offset));
        });
  }
};

bool goes_through(const Config& config, unsigned nth = 0) {
  Exchange exchange;
  const std::vector<std::byte> bytes = exchange.send(config, nth);
  return exchange.receive(bytes) == config;
}

std::vector<std::byte> bytes_of(std::initializer_list<int> numbers) {
  std::vector<std::byte> bytes = {std::byte{0x4d}, std::byte{1}};
  for (const int number : numbers) bytes.push_back(static_cast<std::byte>(number));
  return bytes;
}

ErrorKind refusal(std::span<const std::byte> bytes) {
  Exchange exchange;
  exchange.slot.resize(1024);
  exchange.arena.resize(1024);
  try {
    exchange.receive(bytes);
  } catch (const Error& error) {
    return error.kind();
  }
  return ErrorKind::cancelled;
}

}  // namespace

TEST_CASE("random trees are restored from a descriptor, with tensors in the slot or in an arena") {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    CAPTURE(seed);
    REQUIRE(goes_through(test::RandomConfig(seed).tree(5), static_cast<unsigned>(seed % 4)));
  }
}

TEST_CASE("every dtype is restored from a descriptor") {
  for (const DType dtype : all_dtypes()) {
    CAPTURE(to_string(dtype));
    CHECK(goes_through(test::pattern(dtype, {}, 1)));
    CHECK(goes_through(test::pattern(dtype, {3, 5, 7}, 2), 1));
    CHECK(goes_through(Config::array({test::pattern(dtype, {0, 4}, 3), test::pattern(dtype, {1}, 4)})));
  }
}

TEST_CASE("a config with no tensor, a string that equals a tensor's key") {
  CHECK(goes_through({}));
  CHECK(goes_through(Config::object({{"a", 1}, {"b", Config::array()}})));
  CHECK(goes_through(Config::object({{"w", small()}, {"name", "w"}, {"ref", Config::object({{"$tensor", "w"}})}})));
}

TEST_CASE("a config of 40 and more small tensors takes a few bytes per tensor") {
  Config config;
  for (int i = 0; i < 1000; ++i)
    config["w" + std::to_string(i)] = test::pattern(DType::f32, {4, 4}, static_cast<unsigned>(i));
  CHECK(goes_through(config));
  Exchange exchange;
  CHECK(exchange.send(config).size() < 1000 * 8);
  CHECK(exchange.slot.size() == 1000 * 64);
}

TEST_CASE("a slice of a larger storage takes space for its own elements only") {
  const Tensor storage = test::pattern(DType::f32, {100, 100}, 1);
  const Tensor slice(storage.view().slice(1, 2, 4), storage.owner());
  CHECK(goes_through(Config::object({{"w", slice}})));
  Exchange exchange;
  exchange.send(slice);
  CHECK(exchange.slot.size() == 800);
}

TEST_CASE("more kinds of tensors than the encoder remembers") {
  ConfigArray tensors;
  for (int round = 0; round < 2; ++round)
    for (std::int64_t i = 0; i < 300; ++i) tensors.push_back(test::pattern(DType::u8, {i}, static_cast<unsigned>(i)));
  CHECK(goes_through(tensors));
}

TEST_CASE("a slot is laid out with each tensor aligned") {
  core::SlotLayout layout;
  CHECK(layout.place(1) == 0);
  CHECK(layout.place(64) == 64);
  CHECK(layout.place(0) == 128);
  CHECK(layout.place(1) == 128);
  CHECK(layout.size() == 129);
  CHECK_THROWS_AS(layout.place(INT64_MAX), Error);
  CHECK_THROWS_AS(layout.place(UINT64_MAX), Error);
  CHECK(layout.size() == 129);
}

TEST_CASE("unsupported values are refused") {
  Exchange exchange;
  Config deep = 1;
  for (int i = 0; i < max_config_depth; ++i) deep = Config::array({deep});
  CHECK(goes_through(deep));
  CHECK_THROWS_AS(exchange.send(Config::array({deep})), Error);
  CHECK_THROWS_AS(exchange.send("\xff"), Error);
  CHECK_THROWS_AS(exchange.send(Config::object({{"\xff", 1}})), Error);
  CHECK_THROWS_AS(exchange.send(test::pattern(DType::u8, Shape(65, 1), 1)), Error);
}

TEST_CASE("a truncated descriptor, or one with extra bytes, is corrupt") {
  Exchange exchange;
  const Config config = Config::object({{"a", Config::array({1, -5, 2.5, UINT64_MAX, "text", true, {}})},
                                        {"w", small()},
                                        {"v", test::pattern(DType::f32, {300}, 1)}});
  const std::vector<std::byte> bytes = exchange.send(config, 2);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    CAPTURE(length);
    CHECK(refusal(std::span(bytes).first(length)) == ErrorKind::corrupt);
  }
  std::vector<std::byte> longer = bytes;
  longer.push_back(std::byte{0});
  CHECK(refusal(longer) == ErrorKind::corrupt);
}

TEST_CASE("each defect of a descriptor is refused") {
  CHECK(refusal(std::vector{std::byte{0x4e}, std::byte{1}, std::byte{0}}) == ErrorKind::corrupt);
  CHECK(refusal(std::vector{std::byte{0x4d}, std::byte{2}, std::byte{0}}) == ErrorKind::version);
  for (const auto& bytes : {
           bytes_of({11}),                                                             // unknown tag
           bytes_of({6, 1, 0xff}),                                                     // text that is not UTF-8
           bytes_of({6, 5, 'a'}),                                                      // shorter than its length field
           bytes_of({7, 0xff, 0xff, 0xff, 0xff, 0x0f, 0}),                             // too many items
           bytes_of({7, 3, 7, 2, 0, 0}),                                               // too many nested items
           bytes_of({8, 2, 1, 'a', 0, 1, 'a', 0}),                                     // a duplicate key
           bytes_of({3, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x02}),  // more than 64 bits
           bytes_of({3, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x00}),  // more than 64 bits
           bytes_of({9, 1, 1, 0}),     // a kind that was not declared
           bytes_of({9, 0, 24, 0}),    // unknown dtype
           bytes_of({9, 0, 1, 9, 1}),  // more extents than bytes
           bytes_of(
               {9, 0, 1, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}),  // extent of more than 63 bits
           bytes_of(
               {9, 0, 12, 2, 0xff, 0xff, 0xff, 0xff, 0x0f, 0xff, 0xff, 0xff, 0xff, 0x0f}),  // size of more than 63 bits
           bytes_of({9, 0, 1, 1, 0x81, 0x08}),                                              // larger than the slot
           bytes_of({10, 0, 1, 1, 4, 0, 0}),                                                // arena 0
           bytes_of({10, 0, 1, 1, 4, 0xff, 0xff, 0xff, 0xff, 0x1f, 0}),  // arena number of more than 32 bits
           bytes_of({10, 0, 1, 1, 4, 7, 0xfd, 0x07}),                    // past the arena's end
       }) {
    CAPTURE(bytes.size());
    CHECK(refusal(bytes) == ErrorKind::corrupt);
  }
  CHECK(refusal(bytes_of({9, 0, 1, 1, 0x80, 0x08})) == ErrorKind::cancelled);
  CHECK(refusal(bytes_of({10, 0, 1, 1, 4, 7, 0xfc, 0x07})) == ErrorKind::cancelled);
  std::vector<std::byte> deep = bytes_of({});
  for (int i = 0; i <= max_config_depth; ++i) deep.insert(deep.end(), {std::byte{7}, std::byte{1}});
  deep.push_back(std::byte{0});
  CHECK(refusal(deep) == ErrorKind::corrupt);
  // Nine tensors of almost 2^60 bytes, for a caller that looks at no place.
  std::vector<std::byte> large = bytes_of({7, 9, 9, 0, 1, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f});
  for (int i = 0; i < 8; ++i) large.insert(large.end(), {std::byte{9}, std::byte{0}});
  CHECK(test::has(test::words_of(ErrorKind::corrupt,
                                 [&] { (void)core::decode_descriptor(large, [](auto&&...) { return Tensor(); }); }),
                  "the tensors have more bytes than 63 bits can count"));
}

TEST_CASE("a descriptor with any one bit changed is refused or yields a tree") {
  Exchange exchange;
  // 649 bytes: the work grows with the square of the size, and under sanitizers a larger descriptor takes minutes.
  const std::vector<std::byte> bytes = exchange.send(test::RandomConfig(9).tree(3), 2);
  exchange.slot.resize(exchange.slot.size() + 4096);
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::vector<std::byte> changed = bytes;
    changed[bit / 8] ^= std::byte{1} << (bit % 8);
    try {
      exchange.receive(changed);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::corrupt && error.kind() != ErrorKind::version) FAIL(error.what());
    }
  }
}
