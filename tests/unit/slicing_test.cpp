// SPDX-License-Identifier: Apache-2.0
// Layers cut into parts: every part is within its size, and all parts together are the same layer.

#include "src/gather/slicing.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <set>

#include "muster/error.hpp"
#include "src/gather/policy.hpp"
#include "src/gather/stream.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/random_config.hpp"
#include "tests/support/reassembly.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;
using gather::LayerParts;

namespace {

constexpr std::uint64_t small_part = 4096;

bool everything(const TensorView&) {
  return true;
}

std::uint64_t slot_bytes(const Config& tree) {
  core::SlotLayout layout;
  core::encode_descriptor(tree, [&](const Tensor& tensor) {
    layout.place(tensor.nbytes());
    return std::nullopt;
  });
  return layout.size();
}

/// Part 0 lists all tensors of its layer.
void check_tensors(const LayerPart& part, const Config& layer) {
  std::vector<TensorSpec> expected;
  for_each_leaf(layer, [&](const Config& leaf) {
    if (leaf.is_tensor()) expected.push_back({leaf.as_tensor().dtype(), leaf.as_tensor().shape()});
  });
  std::vector<TensorSpec> listed;
  std::set<std::string> paths;
  for (const LayerTensor& tensor : part.tensors) {
    listed.push_back(tensor.whole);
    paths.insert(tensor.path);
  }
  CHECK(listed == expected);
  CHECK(paths.size() == expected.size());
}

/// Cuts a layer, checks the sizes, joins the parts and compares. Returns the number of parts.
std::uint32_t cut_and_join(const Config& layer, std::uint64_t part_bytes) {
  const LayerParts parts(layer, part_bytes, everything);
  Reassembly whole;
  for (std::uint32_t i = 0; i < parts.count(); ++i) {
    LayerPart part;
    part.part = i;
    part.num_parts = parts.count();
    part.ranks = {0};
    part.configs = {parts.make(i, &part.slices)};
    CHECK(slot_bytes(*part.configs.front()) <= part_bytes);
    if (i == 0) {
      gather::list_tensors(part);
      check_tensors(part, layer);
    } else {
      CHECK(std::ranges::none_of(part.slices, [](const TensorSlice& slice) { return slice.elements == 0; }));
    }
    whole.add(part);
  }
  CHECK(whole.layer(0) == layer);
  return parts.count();
}

}  // namespace

TEST_CASE("a layer that fits is one part, which is the layer itself") {
  const Config layer = Config::object({{"a", 1}, {"w", pattern(DType::f32, {10, 10}, 1)}});
  const LayerParts parts(layer, small_part, everything);
  CHECK(parts.count() == 1);
  std::vector<TensorSlice> slices;
  CHECK(parts.make(0, &slices).at("w").as_tensor().data() == layer.at("w").as_tensor().data());
  CHECK(slices.empty());
}

TEST_CASE("all dtypes, by rows and flat, odd rows of packed types") {
  for (const DType dtype : all_dtypes()) {
    CAPTURE(to_string(dtype));
    for (const Shape& shape : {Shape{33, 101}, Shape{7, 3, 1001}, Shape{3, 100001}, Shape{90001}, Shape{1, 30003},
                               Shape{2, 5, 20001}, Shape{40000, 1}}) {
      const Config layer = Config::object({{"before", pattern(DType::u8, {100}, 1)},
                                           {"w", pattern(dtype, shape, 2)},
                                           {"after", pattern(dtype, {3}, 3)}});
      const std::uint32_t parts = cut_and_join(layer, small_part);
      CHECK(parts >= byte_size(dtype, shape) / small_part);
    }
  }
}

TEST_CASE("rows keep their shape, runs are flat") {
  const Config rows = pattern(DType::f32, {64, 100}, 1);
  const LayerParts by_rows(rows, small_part, everything);
  std::vector<TensorSlice> slices;
  CHECK(by_rows.make(0, &slices).as_tensor().shape() == Shape{10, 100});
  CHECK(by_rows.make(1, &slices).as_tensor().data() == rows.as_tensor().data() + 4000);
  REQUIRE(slices.size() == 2);
  CHECK(slices[1].path == "");
  CHECK(slices[1].offset == 1000);
  CHECK(slices[1].elements == 1000);
  CHECK(slices[1].tensor == TensorSpec{DType::f32, {64, 100}});
  const Config wide = pattern(DType::f32, {4, 2000}, 1);
  const LayerParts flat(wide, small_part, everything);
  CHECK(flat.count() == 8);
  CHECK(flat.make(1, nullptr).as_tensor().shape() == Shape{1024});
}

TEST_CASE("strided tensors, rows and runs that begin and end anywhere") {
  const Tensor base = pattern(DType::f32, {30, 40, 50}, 5);
  for (const TensorView& view :
       {base.view().transposed(), base.view().slice(1, 3, 37), base.view().slice(2, 1, 49).transposed(),
        TensorView(DType::f32, {9, 700, 50}, base.data(), {0, 50, 1}),
        TensorView(DType::f32, {3, 1999}, base.data() + 59996, {2000, -1})}) {
    cut_and_join(Config::object({{"w", Tensor::borrow(view)}}), small_part);
    for (const std::int64_t first : {0, 1, 49, 50, 51, 1999, 2000, 3001})
      for (const std::int64_t elements : {0, 1, 7, 50, 1500, 2500}) {
        if (first + elements > view.element_count()) continue;
        const Tensor run = gather::flat_run(Tensor::borrow(view), first, elements);
        const Tensor all = Tensor::copy_of(view);
        CHECK(bitwise_equal(run, gather::flat_run(all, first, elements)));
      }
  }
}

TEST_CASE("random trees, and keys in the form of a JSON pointer") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Config layer = Config::object({{"a/b~c", Config::array({nullptr, pattern(DType::bf16, {5000, 3}, seed)})},
                                   {"", pattern(DType::u4, {3333, 3}, seed + 1)}});
    layer["tree"] = RandomConfig(seed).tree(5);
    cut_and_join(layer, small_part);
  }
}

TEST_CASE("slices arrive as they were sent, and malformed ones are errors") {
  const std::vector<TensorSlice> sent = {{7, "/a~1b/0", {DType::f32, {10, 3}}, 24, 6},
                                         {7, "/c", {DType::u4, {}}, 0, 0}};
  const std::vector<std::byte> good = gather::encode_slices(sent);
  const std::vector<TensorSlice> received = gather::decode_slices(good, 7);
  CHECK(gather::encode_slices(received) == good);
  CHECK(received.back().rank == 7);
  CHECK(gather::decode_slices({}, 7).empty());
  const auto refused = [](std::span<const std::byte> bytes) {
    CHECK(has(words_of(ErrorKind::corrupt, [&] { gather::decode_slices(bytes, 7); }), "slices of rank 7: "));
  };
  for (std::size_t length = 1; length < good.size(); ++length) refused(std::span(good).first(length));
  const auto number = [](DType dtype) { return static_cast<int>(dtype); };
  const ConfigArray shape = {10, 3};
  const std::int64_t large = std::int64_t{1} << 32;
  const ConfigArray bad_slices = {ConfigArray{"/a", 255, shape, 0, 30},
                                  ConfigArray{"/a", 256 + number(DType::f32), shape, 0, 30},
                                  ConfigArray{"/a", number(DType::f32), shape, -1, 30},
                                  ConfigArray{"/a", number(DType::f32), shape, 0, -1},
                                  ConfigArray{"/a", number(DType::f32), shape, 0, 31},
                                  ConfigArray{"/a", number(DType::f32), shape, 24, 7},
                                  ConfigArray{"/a", number(DType::f32), shape, 31, 0},
                                  ConfigArray{"/a", number(DType::f32), ConfigArray{-10, -3}, 0, 30},
                                  ConfigArray{"/a", number(DType::f32), ConfigArray{large, large, 0}, 0, 0},
                                  ConfigArray{"/a", number(DType::f32), 10, 0, 1},
                                  ConfigArray{"/a", number(DType::f32), shape, 0},
                                  ConfigArray{1, number(DType::f32), shape, 0, 30},
                                  Config(pattern(DType::u8, {3}, 1)),
                                  Config("/a")};
  const auto encoded = [](const Config& tree) {
    return core::encode_descriptor(tree, [](const Tensor&) { return std::nullopt; });
  };
  for (const Config& bad : bad_slices) refused(encoded(ConfigArray{bad}));
  refused(encoded(Config("no array")));
}

TEST_CASE("the message in front of a part must be that of the part") {
  gather::PartHeader header{.layer = 4, .part = 2, .parts = 3, .record = {}};
  const auto received = [&](std::uint64_t layer, std::uint32_t part, std::uint32_t parts) {
    return gather::received_part(std::as_bytes(std::span(&header, 1)), 7, layer, part, parts).header.parts;
  };
  CHECK(received(4, 2, 3) == 3);
  for (const auto& [layer, part, parts] : {std::array<std::uint32_t, 3>{3, 2, 3}, {4, 0, 0}, {4, 1, 3}, {4, 2, 4}})
    CHECK(has(words_of(ErrorKind::corrupt, [&] { received(layer, part, parts); }), "but rank 7 sent part 2 of 3"));
  header.parts = 2;
  CHECK(has(words_of(ErrorKind::corrupt, [&] { received(4, 2, 2); }), "but rank 7 sent part 2 of 2"));
  const auto cut = std::as_bytes(std::span(&header, 1)).first(sizeof header - 1);
  CHECK(has(words_of(ErrorKind::corrupt, [&] { gather::received_part(cut, 7, 4, 2, 3); }), "rank 7 is too short"));
}

TEST_CASE("tensors that are not sent use no space and are never cut") {
  const Config layer = Config::object({{"a", pattern(DType::u8, {100000}, 1)}, {"b", pattern(DType::u8, {4000}, 2)}});
  const LayerParts parts(layer, small_part, [](const TensorView& tensor) { return tensor.nbytes() < 5000; });
  CHECK(parts.count() == 1);
}

TEST_CASE("nesting that no route supports is refused") {
  Config deep = 1;
  for (int i = 0; i <= max_config_depth; ++i) deep = Config::array({deep});
  words_of(ErrorKind::invalid_argument, [&] { LayerParts(deep, small_part, everything); });
}

TEST_CASE("shares: equal, in whole pages, all slots together within the budget") {
  for (const std::uint32_t length : {1U, 2U, 4U, 7U})
    for (const std::uint32_t depth : {1U, 2U, 5U})
      for (const std::uint64_t budget : {512_KiB, 1_MiB, 256_MiB, 64_GiB}) {
        const gather::StreamShare share = gather::share_of(budget, length, depth);
        const std::uint64_t senders = std::max(length, 2U) - 1;
        CHECK(share.part_bytes >= 4096);
        CHECK((share.part_bytes + 4096) * depth * senders <= budget);
      }
  CHECK(has(words_of(ErrorKind::invalid_argument, [] { (void)gather::share_of(40000, 4, 2); }), "at least 49152"));
}

TEST_CASE("budgets beyond the available memory are cut in proportion, and refused if nothing is left") {
  const auto one_host = [](int) { return 0; };
  std::vector<gather::ExchangeRecord> records(6);
  for (std::uint32_t rank = 0; rank < 6; ++rank) {
    gather::ExchangeRecord& record = records[rank];
    record.list_hash = rank < 3 ? 1 : 2;
    record.list_length = 3;
    record.position = rank % 3;
    record.budget = rank < 3 ? 100_MiB : 300_MiB;
    record.depth = 2;
    record.available_bytes = 1_GiB;
  }
  CHECK(gather::agree_on_share(records[0], records, one_host).budget == 50_MiB);
  CHECK(gather::agree_on_share(records[4], records, one_host).budget == 150_MiB);
  CHECK_FALSE(gather::agree_on_share(records[4], records, one_host).is_cut);
  records[5].available_bytes = 200_MiB;
  CHECK(gather::agree_on_share(records[0], records, one_host).budget == 25_MiB);
  CHECK(gather::agree_on_share(records[4], records, one_host).budget == 75_MiB);
  CHECK(gather::agree_on_share(records[4], records, one_host).is_cut);
  // Memory that the senders already have need not be available again.
  records[4].pooled = 150_MiB;
  records[5].pooled = 150_MiB;
  CHECK(gather::agree_on_share(records[4], records, one_host).budget == 150_MiB);
  records[5].available_bytes = 10000;
  CHECK(has(words_of(ErrorKind::out_of_space, [&] { (void)gather::agree_on_share(records[4], records, one_host); }),
            "10000"));
}

TEST_CASE("the available memory is that of the host of a list's root") {
  // List 1 has ranks 0 (root) and 3; list 2 has rank 2 (root) and 1. Ranks 0 and 1 share a host, 2 and 3 another one.
  std::vector<gather::ExchangeRecord> records(4);
  const auto set = [&](std::size_t rank, std::uint64_t list, std::uint32_t position) {
    records[rank].list_hash = list;
    records[rank].list_length = 2;
    records[rank].position = position;
    records[rank].budget = 100_MiB;
    records[rank].depth = 2;
    records[rank].available_bytes = rank < 2 ? 1_GiB : 60_MiB;
  };
  set(0, 1, 0);
  set(3, 1, 1);
  set(2, 2, 0);
  set(1, 2, 1);
  const auto share = [&](std::size_t rank) {
    return gather::agree_on_share(records[rank], records, [](int at) { return at / 2; });
  };
  CHECK(share(0).budget == 100_MiB);
  CHECK(share(3).budget == 100_MiB);
  CHECK(share(1).budget == 60_MiB);
  CHECK(share(1).is_cut);
  // Both roots on one host share its memory.
  records[2].available_bytes = records[3].available_bytes = 1_GiB;
  records[0].available_bytes = 60_MiB;
  const auto together = gather::agree_on_share(records[0], records, [](int) { return 0; });
  CHECK(together.budget == 30_MiB);
}
