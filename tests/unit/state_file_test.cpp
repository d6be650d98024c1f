// SPDX-License-Identifier: Apache-2.0
#include "muster/state_file.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include "src/core/checksum.hpp"
#include "tests/support/state_files.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;
namespace fs = std::filesystem;

namespace {

/// Samples of all dtypes and shapes, with sizes around the limits where the file layout changes.
std::vector<NamedTensor> gallery() {
  std::vector<NamedTensor> all;
  std::uint64_t seed = 1;
  for (const DType dtype : all_dtypes()) {
    const std::string name(to_string(dtype));
    all.emplace_back("scalar." + name, pattern(dtype, {}, ++seed));
    all.emplace_back("none." + name, pattern(dtype, {0}, ++seed));
    all.emplace_back("empty." + name, pattern(dtype, {3, 0, 7}, ++seed));
    all.emplace_back("odd." + name, pattern(dtype, {3, 5, 7}, ++seed));
    all.emplace_back("rows." + name, pattern(dtype, {37, 64}, ++seed));
    all.emplace_back("large." + name, pattern(dtype, {300, 1024}, ++seed));
  }
  all.emplace_back("weights", normal_weights({256, 512}, 7));
  all.emplace_back("zeros", zeros({400, 100}));
  all.emplace_back("thirty-two dimensions", pattern(DType::u8, Shape(32, 1), ++seed));
  return all;
}

}  // namespace

TEST_CASE("a written state is read back") {
  const TemporaryDirectory work;
  const std::vector<NamedTensor> all = gallery();
  for (const bool compressed : {false, true}) {
    CAPTURE(compressed);
    const std::string path = work / (compressed ? "compressed.h5" : "plain.h5");
    StateFileOptions options{.info = {.step = 7, .rank = 3, .world_size = 5}};
    options.info.job[0] = std::byte{42};
    if (compressed) options.zstd_level = 1;
    if (compressed) options.chunk_bytes = 10'000;
    write_state_file(path, some_config(), all, options);
    CHECK(StateFile::is_state_file(path));
    for (const FileAccess access : {FileAccess::map, FileAccess::read, FileAccess::automatic}) {
      const StateFile file = StateFile::open(path, access);
      CHECK(file.path() == path);
      CHECK(file.info().step == 7);
      CHECK(file.info().rank == 3);
      CHECK(file.info().world_size == 5);
      CHECK(file.info().job == options.info.job);
      CHECK(file.file_bytes() == fs::file_size(path));
      CHECK(file.format_version() == 1);
      CHECK(file.config() == some_config());
      CHECK(holds(file, all));
      for (std::size_t i = 0; i < all.size(); ++i) {
        CAPTURE(all[i].first);
        const StateTensor& entry = file.tensors()[i];
        CHECK(file.find(all[i].first) == i);
        CHECK(entry.dtype == all[i].second.dtype());
        CHECK(entry.shape == all[i].second.shape());
        CHECK(entry.bytes == all[i].second.nbytes());
        CHECK(entry.checksum == tensor_checksum(all[i].second.bytes()));
        CHECK(entry.offset % 64 == 0);
        if (!entry.compressed && entry.bytes >= 65536) CHECK(entry.offset % 4096 == 0);
      }
      CHECK_FALSE(file.find("not there").has_value());
      CHECK(file.check().empty());
      const State state = file.load();
      CHECK(state.config == some_config());
      CHECK(state.weights.size() == all.size());
      const StateTensor& weights = file.tensors()[file.find("weights").value()];
      CHECK(weights.compressed == compressed);
      if (compressed) CHECK(weights.stored_bytes < weights.bytes * 95 / 100);
    }
  }
  CHECK(work.count() == 2);
}

TEST_CASE("a state without tensors, without config, of one byte") {
  const TemporaryDirectory work;
  write_state_file(work / "none", {}, {});
  CHECK(StateFile::open(work / "none").tensors().empty());
  CHECK(StateFile::open(work / "none").config().is_null());
  CHECK(StateFile::open(work / "none").check().empty());
  const std::vector<NamedTensor> byte = {{"b", pattern(DType::u8, {1}, 9)}};
  write_state_file(work / "byte", true, byte, {.zstd_level = 3});
  CHECK(holds(StateFile::open(work / "byte"), byte));
  CHECK_FALSE(StateFile::open(work / "byte").tensors()[0].compressed);
}

TEST_CASE("names are stored unchanged") {
  const TemporaryDirectory work;
  std::vector<NamedTensor> all;
  for (const char* name : {"a/b", "/", ".", "..", "...", "./x", "%", "%2F", "a%2Fb", "\n", "\x1b[31mred", "\x7f", " ",
                           "\xc3\xa9\xe6\xbc\xa2", "layers.0.weight", "config", "weights/config", "\"quoted\"", "\\"})
    all.emplace_back(name, pattern(DType::u8, {8}, all.size()));
  all.emplace_back(std::string(4096, '/'), pattern(DType::u8, {8}, 100));
  write_state_file(work / "file", {}, all);
  CHECK(holds(StateFile::open(work / "file"), all));
  for (int i = 0; i < 40; ++i) all.emplace_back(fmt::format("{}{}", std::string(4000, '%'), i), all[0].second);
  write_state_file(work / "file", {}, all);
  CHECK(holds(StateFile::open(work / "file"), all));

  const auto refused = [&](const std::string& name) {
    const auto words = words_of(ErrorKind::invalid_argument, [&] {
      write_state_file(work / "refused", {}, std::vector<NamedTensor>{{name, all[0].second}});
    });
    CHECK(has(words, "refused"));
  };
  refused("");
  refused(std::string("a\0b", 3));
  refused("\xff");
  refused(std::string(4097, 'a'));
  const std::vector<NamedTensor> twice = {all[0], all[1], all[0]};
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { write_state_file(work / "refused", {}, twice); }), "\"a/b\""));
  CHECK(work.count() == 1);
}

TEST_CASE("strided tensors are written in logical order") {
  const TemporaryDirectory work;
  const Tensor base = normal_weights({700, 900}, 5);
  const Tensor small = pattern(DType::i16, {20, 30}, 8);
  const std::vector<NamedTensor> all = {
      {"transposed", Tensor(base.view().transposed(), base.owner())},
      {"part", Tensor(base.view().slice(1, 100, 850), base.owner())},
      {"rows", Tensor(base.view().slice(0, 100, 650), base.owner())},
      {"small", Tensor(small.view().transposed(), small.owner())},
      {"backwards", Tensor(TensorView(DType::i16, {600}, small.data() + 2 * 599, {-1}), small.owner())},
      {"broadcast", Tensor(TensorView(DType::f32, {300, 900}, base.data(), {0, 1}), base.owner())},
  };
  for (const bool compressed : {false, true}) {
    StateFileOptions options;
    if (compressed) options.zstd_level = 1;
    if (compressed) options.chunk_bytes = 100'000;
    write_state_file(work / "all", {}, all, options);
    CHECK(holds(StateFile::open(work / "all"), all));
    CHECK(StateFile::open(work / "all").check().empty());
    StateFileWriter writer(work / "each", {}, entries_of(all), options);
    for (std::size_t i = 0; i < all.size(); ++i) writer.write(i, all[i].second);
    writer.commit();
    CHECK(read_text(work / "each").size() == read_text(work / "all").size());
    CHECK(holds(StateFile::open(work / "each"), all));
  }
}

TEST_CASE("uncompressed files of one state are identical") {
  const TemporaryDirectory work;
  const std::vector<NamedTensor> all = gallery();
  write_state_file(work / "a", some_config(), all);
  write_state_file(work / "b", some_config(), all, {.durable = false});
  CHECK(read_text(work / "a") == read_text(work / "b"));
}

TEST_CASE("ranges of a tensor") {
  const TemporaryDirectory work;
  const std::vector<NamedTensor> all = {{"a", normal_weights({50, 7, 33}, 1)}, {"b", pattern(DType::u8, {5000}, 2)}};
  std::mt19937 random(1);
  for (const int level : {0, 1}) {
    StateFileOptions options{.chunk_bytes = 2048};
    if (level != 0) options.zstd_level = level;
    write_state_file(work / "file", {}, all, options);
    for (const FileAccess access : {FileAccess::map, FileAccess::read}) {
      const StateFile file = StateFile::open(work / "file", access);
      for (int i = 0; i < 300; ++i) {
        const std::size_t index = random() % 2;
        const auto bytes = all[index].second.bytes();
        const std::size_t begin = random() % (bytes.size() + 1);
        const std::size_t size = random() % (bytes.size() - begin + 1);
        std::vector<std::byte> part(size);
        file.read(index, begin, part);
        CHECK(std::ranges::equal(part, bytes.subspan(begin, size)));
      }
      std::vector<std::byte> part(10);
      words_of(ErrorKind::invalid_argument, [&] { file.read(1, 4991, part); });
      words_of(ErrorKind::invalid_argument, [&] { file.read(1, ~0ULL, part); });
      words_of(ErrorKind::invalid_argument, [&] { file.read(2, 0, part); });
    }
  }
}

TEST_CASE("files that are not state files") {
  const TemporaryDirectory work;
  const auto refused = [&](ErrorKind kind, const std::string& path) {
    return words_of(kind, [&] { return StateFile::open(path); });
  };
  refused(ErrorKind::not_found, work / "nothing");
  CHECK_THROWS_AS(StateFile::is_state_file(work / "nothing"), Error);
  CHECK(has(refused(ErrorKind::invalid_argument, work.path().string()), "directory"));
  write_text(work / "empty", "");
  refused(ErrorKind::corrupt, work / "empty");
  CHECK_FALSE(StateFile::is_state_file(work / "empty"));
  write_text(work / "text", "some text that is no state");
  CHECK(has(refused(ErrorKind::corrupt, work / "text"), "not a state file"));
  CHECK_FALSE(StateFile::is_state_file(work / "text"));
  write_text(work / "zeros", std::string(10'000, '\0'));
  CHECK(has(refused(ErrorKind::corrupt, work / "zeros"), "not finished"));
  write_state_file(work / "file", {}, one());
  std::string bytes = read_text(work / "file");
  const StateFile file = StateFile::open(work / "file");
  CHECK(has(words_of(ErrorKind::not_found, [&] { return file.tensor("other"); }), "\"other\""));
  CHECK(has(words_of(ErrorKind::not_found, [&] { return file.tensor(1); }), "index 1 is out of range"));
  write_text(work / "longer", bytes + "x");
  CHECK(has(refused(ErrorKind::corrupt, work / "longer"), "h5repack"));
  write_text(work / "shorter", bytes.substr(0, bytes.size() - 1));
  const Error error = thrown_by(ErrorKind::corrupt, [&] { StateFile::open(work / "shorter"); });
  CHECK(error.os_error() == ENODATA);
  CHECK(error.path() == work / "shorter");
}

TEST_CASE("a newer version is reported as such, not as damage") {
  const TemporaryDirectory work;
  write_state_file(work / "file", {}, one());
  std::string bytes = read_text(work / "file");
  bytes[8] = 2;
  const std::uint64_t sum = tensor_checksum(std::as_bytes(std::span(bytes)).first(4088));
  std::memcpy(bytes.data() + 4088, &sum, 8);
  write_text(work / "newer", bytes);
  CHECK(has(words_of(ErrorKind::version, [&] { StateFile::open(work / "newer"); }), "version 2"));
  CHECK(StateFile::is_state_file(work / "newer"));
}

TEST_CASE("check detects changes after the file was opened") {
  const TemporaryDirectory work;
  const std::vector<NamedTensor> all = one();
  std::uint64_t told = 0;
  const ProgressCallback tell = [&](const Progress& progress) {
    told = progress.bytes;
    CHECK(progress.total_bytes == 40'000);
  };
  write_state_file(work / "file", some_config(), all, {}, tell);
  CHECK(told == 40'000);
  const StateFile file = StateFile::open(work / "file");
  const std::string bytes = read_text(work / "file");
  const auto problems_with = [&](std::size_t at) {
    const int fd = ::open((work / "file").c_str(), O_WRONLY | O_CLOEXEC);
    const char changed = static_cast<char>(bytes[at] ^ 1);
    CHECK(::pwrite(fd, &changed, 1, static_cast<off_t>(at)) == 1);
    std::vector<StateProblem> problems = file.check();
    CHECK(::pwrite(fd, &bytes[at], 1, static_cast<off_t>(at)) == 1);
    ::close(fd);
    return problems;
  };
  CHECK(file.check().empty());
  const auto in_tensor = problems_with(file.tensors()[0].offset + 500);
  REQUIRE(in_tensor.size() == 1);
  CHECK(in_tensor[0].tensor == "weight");
  CHECK(problems_with(100).size() == 1);
  const auto in_config = problems_with(bytes.find("Gewicht"));
  REQUIRE(in_config.size() == 1);
  CHECK(has(in_config[0].words, "config"));
  CHECK(problems_with(bytes.size() - 1).size() == 1);
  CHECK(problems_with(5000).size() == 1);
  told = 0;
  CHECK(file.check(tell).empty());
  CHECK(told == 40'000);
}

TEST_CASE("ten thousand small tensors cost little") {
  const TemporaryDirectory work;
  std::vector<NamedTensor> all;
  std::size_t names = 0;
  for (int i = 0; i < 10'000; ++i) {
    all.emplace_back(fmt::format("model.layers.{}.mlp.experts.{}.down_proj.weight", i / 20, i % 20),
                     pattern(DType::bf16, {32}, static_cast<std::uint64_t>(i)));
    names += all.back().first.size();
  }
  write_state_file(work / "file", {}, all, {.durable = false});
  const StateFile file = StateFile::open(work / "file");
  CHECK(holds(file, all));
  const std::size_t catalogue = 64 + 10'000 * (64 + 8) + names;
  const std::size_t overhead = file.file_bytes() - 10'000 * 64 - catalogue;
  CHECK(overhead < 10'000 * 400);
  MESSAGE("bytes of each small tensor beside its elements and its entry: " << overhead / 10'000);
}
