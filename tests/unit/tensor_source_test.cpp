// SPDX-License-Identifier: Apache-2.0
// Tensors that are merged while they are read: any window of any merge equals that part of the whole tensor.

#include "src/checkpoint/source.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "src/checkpoint/assembly/recent_pieces.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/strided_read.hpp"
#include "src/checkpoint/plan/placement.hpp"
#include "src/core/thread_pool.hpp"
#include "src/inspect/reports.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/memory_source.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::inspect;
using test::has;
using test::words_of;

namespace {

/// Adds a tensor. Returns a reference to all of it.
SourceRef add(test::MemorySource& memory, int rank, const Tensor& tensor) {
  memory.add("", tensor.dtype(), tensor.shape(), {tensor.data(), tensor.data() + tensor.nbytes()});
  return {rank, static_cast<std::uint32_t>(memory.tensors().size() - 1)};
}

/// Adds a copy with one changed byte.
SourceRef add_changed(test::MemorySource& memory, int rank, const SourceRef& ref, std::uint64_t at) {
  const Tensor tensor = Tensor::allocate(DType::u8, {static_cast<std::int64_t>(memory.tensors()[ref.index].bytes)});
  memory.read(ref.index, 0, {tensor.mutable_data(), tensor.nbytes()});
  tensor.mutable_data()[at] ^= std::byte{1};
  return add(memory, rank, tensor);
}

// Eight ranks with their tensors in one list.
const std::vector<RankSources> in_one_list(8);

// The parts of a tensor on `parts` ranks.
MergedTensor cut_up(test::MemorySource& memory, const std::string& name, const Merge& merge, const Tensor& whole,
                    int parts) {
  const merge::Cut cut = merge::cut(merge, {whole.dtype(), whole.shape()}, parts);
  MergedTensor merged{name, {}, {}};
  std::vector<TensorSpec> specs;
  for (int part = 0; part < parts; ++part) {
    Tensor shard = Tensor::allocate(cut.part.dtype, cut.part.shape);
    std::memset(shard.mutable_data(), 0, shard.nbytes());
    const merge::Rows rows = merge::rows_of(merge::part_of(cut, part));
    for (const merge::Rectangle& r : merge::rectangles(rows, 0, rows.bytes()))
      for (std::uint64_t row = 0; row < r.rows; ++row)
        std::memcpy(shard.mutable_data() + r.to + row * r.to_stride, whole.data() + r.from + row * r.from_stride,
                    r.bytes);
    merged.sources.push_back(add(memory, part, shard));
    specs.push_back(cut.part);
  }
  std::optional<std::int64_t> true_size;
  if (cut.padded_dim) true_size = whole.shape()[*cut.padded_dim];
  merged.layout = merge::join(merge, specs, true_size);
  return merged;
}

std::vector<std::byte> piece_of(const MergedTensors& source, std::size_t tensor, std::uint64_t at,
                                std::uint64_t length) {
  std::vector<std::byte> bytes;
  (void)source.read_piece(tensor, at, length, bytes);
  return bytes;
}

}  // namespace

TEST_CASE("any window of a merged tensor equals that part of the whole") {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const auto extent = [&] { return static_cast<std::int64_t>(1 + random() % 12); };
    const Tensor whole = test::pattern(DType::bf16, {extent(), 2 * extent(), extent()}, random());
    const std::vector<Merge> merges = {merge::concat(0), merge::concat(1), merge::concat(-1),
                                       merge::concat_blocks(1, {3, 3}), merge::same()};
    const Merge& merge = merges[random() % merges.size()];
    const int parts = static_cast<int>(1 + random() % 5);
    const auto memory = std::make_shared<test::MemorySource>();
    const MergedTensors source(memory, in_one_list, {cut_up(*memory, "t", merge, whole, parts)}, {});
    REQUIRE(source.tensors()[0].shape == whole.shape());
    for (int i = 0; i < 20; ++i) {
      const std::uint64_t begin = random() % (whole.nbytes() / 2) * 2;
      const std::uint64_t length = random() % ((whole.nbytes() - begin) / 2 + 1) * 2;
      const std::vector<std::byte> piece = piece_of(source, 0, begin, length);
      REQUIRE(piece.size() == length);
      CHECK((length == 0 || std::memcmp(piece.data(), whole.data() + begin, length) == 0));
    }
  }
}

TEST_CASE("the largest value and the sum are computed window by window") {
  const auto make = [](std::vector<float> values) {
    Tensor tensor = Tensor::allocate(DType::f32, {static_cast<std::int64_t>(values.size())});
    std::memcpy(tensor.mutable_data(), values.data(), tensor.nbytes());
    return tensor;
  };
  for (const bool is_max : {true, false}) {
    const auto memory = std::make_shared<test::MemorySource>();
    MergedTensor merged{"t", {}, {add(*memory, 0, make({1, 5, -3})), add(*memory, 1, make({2, 4, -8}))}};
    merged.layout = merge::join(is_max ? merge::max() : merge::sum(), std::vector<TensorSpec>(2, {DType::f32, {3}}));
    const MergedTensors source(memory, in_one_list, {merged}, {});
    const std::vector<std::byte> piece = piece_of(source, 0, 4, 8);
    std::vector<float> values(2);
    std::memcpy(values.data(), piece.data(), 8);
    CHECK(values == (is_max ? std::vector<float>{5, -3} : std::vector<float>{9, -11}));
  }
}

TEST_CASE("ranks that must be equal and differ are reported when the bytes are read") {
  const Tensor whole = test::pattern(DType::f32, {64}, 1);
  const auto memory = std::make_shared<test::MemorySource>();
  MergedTensor merged = cut_up(*memory, "t", merge::same(), whole, 3);
  merged.sources[2] = add_changed(*memory, 2, merged.sources[2], 100);
  merged.equal = {0};
  MergedTensor parts = cut_up(*memory, "p", merge::concat(0), whole, 2);
  parts.equal = {1};
  const MergedTensors source(memory, in_one_list, {merged, parts},
                             {merged.sources, {parts.sources[1], add_changed(*memory, 3, parts.sources[1], 127)}});
  CHECK_NOTHROW((void)piece_of(source, 0, 0, 100));
  CHECK(has(words_of(ErrorKind::rank_mismatch, [&] { (void)piece_of(source, 0, 100, 8); }), "ranks 0 and 2"));
  CHECK_NOTHROW((void)piece_of(source, 1, 0, 200));
  CHECK(has(words_of(ErrorKind::rank_mismatch, [&] { (void)piece_of(source, 1, 200, 56); }), "ranks 1 and 3"));
}

TEST_CASE("diff of a model and its shards, and of shards of different numbers of ranks") {
  const test::TemporaryDirectory work;
  const std::string model = work / "model";
  std::filesystem::create_directory(model);
  const auto tensors = [](std::uint64_t seed) {
    return std::vector<NamedTensor>{
        {"model.embed_tokens.weight", test::pattern(DType::bf16, {101, 64}, 1)},
        {"model.layers.0.self_attn.q_proj.weight", test::pattern(DType::bf16, {64, 64}, 2)},
        {"model.layers.0.mlp.down_proj.weight", test::pattern(DType::bf16, {64, 4097}, seed)},
        {"model.layers.0.mlp.gate_up_proj.weight", test::pattern(DType::f32, {24, 3}, 4)},
        {"model.norm.weight", test::pattern(DType::f32, {64}, 5)}};
  };
  test::write_tensors(model + "/model.safetensors", tensors(3), {{"format", "pt"}});
  test::write_text(model + "/config.json", R"({"model_type": "llama"})");
  for (const int ranks : {1, 3, 4}) {
    const std::string shards = work / ("shards-" + std::to_string(ranks));
    shard_model(model, shards, ParallelLayout{.tensor = ranks}, "auto");
    CHECK(contents_of(shards).kind == PathContents::Kind::shards);
    const Config report = diff_models(model, shards, {.plan = "auto"});
    CHECK(report.at("same").as_bool());
    CHECK(report.at("tensors").as_int() == 5);
    CHECK(report.at("files").as_int() == 1);
    CHECK_FALSE(report.at("metadata_differs").as_bool());
    CHECK(diff_models(shards, work / "shards-1", {.plan = "llama"}).at("same").as_bool());
    CHECK(diff_models(shards, model).at("same").as_bool());  // by the plan that they store
    CHECK(has(words_of(ErrorKind::invalid_argument, [&] { diff_models(shards, model, {.plan = "bert"}); }),
              "no rule matches"));
  }
  CHECK(contents_of(model).kind == PathContents::Kind::model);

  const std::string other = work / "other";
  std::filesystem::create_directory(other);
  test::write_tensors(other + "/model.safetensors", tensors(7), {{"format", "pt"}});
  test::write_text(other + "/config.json", R"({"model_type": "llama"})");
  const Config report = diff_models(other, work / "shards-4", {.plan = "auto"});
  REQUIRE(report.at("tensor_differences").size() == 1);
  const Config& difference = report.at("tensor_differences").at(0);
  CHECK(difference.at("name").as_string() == "model.layers.0.mlp.down_proj.weight");
  CHECK(difference.at("differing").as_int() > 260'000);
  std::filesystem::remove(work / "shards-4/rank-00002-of-00004.safetensors");
  CHECK(has(words_of(ErrorKind::not_found, [&] { diff_models(other, work / "shards-4", {.plan = "auto"}); }),
            "rank-00002"));
}

TEST_CASE("strided data is read in long ranges if the gaps are small, otherwise run by run") {
  struct Case {
    const char* what;
    std::vector<StridedAxis> axes;
    std::size_t item;
    std::uint64_t most_read;  // bytes read from the file
    std::size_t calls;
  };
  constexpr std::uint64_t size = 8 << 20;
  const std::vector<Case> cases = {
      {"one run", {{4, 1 << 10, 1 << 10}, {512, 2, 2}}, 2, 4 << 10, 1},
      {"one element", {}, 4, 4, 1},
      {"none", {{0, 1 << 10, 2}, {5, 2, 2}}, 2, 0, 0},
      {"near runs", {{256, 4 << 10, 2 << 10}, {512, 4, 4}}, 4, 1 << 20, 1},
      {"far runs", {{64, 64 << 10, 2 << 10}, {512, 4, 4}}, 4, 128 << 10, 64},
      {"long runs", {{8, 40 << 10, 32 << 10}, {32 << 10, 1, 1}}, 1, 256 << 10, 8},
      {"far elements", {{100, 32 << 10, 8}}, 8, 800, 100},
      {"a transpose", {{1000, 2, 2000}, {1000, 2000, 2}}, 2, 2'000'000, 2},
      {"a transpose in strips", {{8, 2, 400}, {200, 32 << 10, 2}}, 2, 3200, 200},
      {"one element many times", {{1000, 0, 4}}, 4, 4, 1},
      {"three axes", {{3, 1 << 20, 700}, {5, 28, 140}, {7, 4, 20}, {5, 140, 4}}, 4, 3 << 10, 3},
  };
  std::vector<std::byte> file(size);
  std::mt19937 random(1);
  for (std::byte& byte : file) byte = static_cast<std::byte>(random());
  for (const Case& one : cases) {
    CAPTURE(one.what);
    std::uint64_t bytes = 0;
    std::size_t calls = 0;
    const auto read = [&](std::uint64_t at, std::span<std::byte> target) {
      bytes += target.size();
      ++calls;
      REQUIRE(at + target.size() <= size);
      std::memcpy(target.data(), file.data() + at, target.size());
    };
    std::vector<std::byte> found(4 << 20);
    std::vector<std::byte> wanted(found.size());
    constexpr std::uint64_t begin = 24;
    std::function<void(std::size_t, std::uint64_t, std::uint64_t)> place = [&](std::size_t axis, auto from, auto to) {
      if (axis == one.axes.size()) {
        std::memcpy(wanted.data() + to, file.data() + from, one.item);
        return;
      }
      for (std::uint64_t i = 0; i < one.axes[axis].count; ++i)
        place(axis + 1, from + i * one.axes[axis].from, to + i * one.axes[axis].to);
    };
    place(0, begin, 0);
    read_strided(read, begin, one.axes, one.item, found.data());
    CHECK(found == wanted);
    CHECK(bytes <= one.most_read);
    CHECK(calls == one.calls);
    CHECK(is_within(begin, one.axes, one.item, size));
  }
  const std::vector<StridedAxis> axes = {{3, 10, 2}, {2, 4, 4}};
  CHECK(is_within(6, axes, 2, 32));
  CHECK_FALSE(is_within(7, axes, 2, 32));
  CHECK_FALSE(is_within(0, std::vector<StridedAxis>{{std::uint64_t{1} << 33, std::uint64_t{1} << 33, 2}}, 2, 32));
}

TEST_CASE("any window of tensors with cached pieces equals those bytes, on several threads") {
  auto memory = std::make_shared<test::MemorySource>();
  for (const std::int64_t bytes : {0, 1, 5'000'000, 1 << 20, 3'500'000}) {
    std::vector<std::byte> content(static_cast<std::size_t>(bytes));
    test::fill(content.data(), content.size(), static_cast<std::uint64_t>(bytes));
    memory->add("", DType::u8, {bytes}, std::move(content));
  }
  // Fewer pieces than a thread may use at once, and as many as there are.
  for (const std::size_t count : {1U, 3U, 11U}) {
    CAPTURE(count);
    const RecentPieces pieces(memory, count);
    std::atomic<int> wrong = 0;
    parallel_for(400, 3, [&](std::size_t number, std::size_t) {
      std::mt19937_64 random(number);
      const std::size_t tensor = number % 5;
      const std::uint64_t bytes = memory->tensors()[tensor].bytes;
      const std::uint64_t begin = random() % (bytes + 1);
      std::vector<std::byte> want(random() % (bytes - begin + 1));
      std::vector<std::byte> got(want.size());
      memory->read(tensor, begin, want);
      pieces.read(tensor, begin, got);
      if (got != want) ++wrong;
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("a path is classified by names, also a directory with several kinds of files") {
  using Kind = PathContents::Kind;
  constexpr const char* shard = "rank-00000-of-00001.safetensors";
  struct Case {
    std::vector<std::string> names;
    Kind kind;
    bool has_ranks = false;
  };
  const std::vector<Case> cases = {
      {{}, Kind::other},
      {{"config.json"}, Kind::other},
      {{"weights.safetensors"}, Kind::model},
      {{"model.safetensors.index.json"}, Kind::model},
      {{shard}, Kind::shards, true},
      {{shard, "weights.safetensors"}, Kind::shards, true},
      // The survey of a model refuses the shards beside it.
      {{shard, "model.safetensors"}, Kind::model},
      {{shard, "model.safetensors.index.json"}, Kind::model},
      {{"pytorch_model.bin"}, Kind::foreign},
      {{"consolidated.00.pth"}, Kind::foreign, true},
      {{"muster-workspace.json"}, Kind::workspace, true},
      {{"muster-workspace.json", shard, "model.safetensors"}, Kind::workspace, true},
  };
  for (const Case& one : cases) {
    const std::string last = one.names.empty() ? "nothing" : one.names.back();
    CAPTURE(last);
    const test::TemporaryDirectory folder;
    for (const std::string& name : one.names) test::write_text(folder / name, "");
    const PathContents contents = contents_of(folder.path().string());
    CHECK(contents.kind == one.kind);
    CHECK(contents.has_ranks() == one.has_ranks);
  }
  const test::TemporaryDirectory folder;
  for (const char* name : {"weights.safetensors", shard}) test::write_text(folder / name, "");
  CHECK(contents_of(folder / "weights.safetensors").kind == Kind::model);
  CHECK(contents_of(folder / shard).kind == Kind::model);
  CHECK(contents_of(folder / "missing").kind == Kind::other);
}
