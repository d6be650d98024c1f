// SPDX-License-Identifier: Apache-2.0
// Model directories: the selection of the weight files, the distribution of tensors over files, and the extra files
// that are copied.

#include "muster/model_dir.hpp"

#include <doctest/doctest.h>
#include <fmt/core.h>

#include "muster/state.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;

namespace {

namespace fs = std::filesystem;

TensorEntry entry(std::string name, Shape shape, DType dtype = DType::u8) {
  return {.name = std::move(name), .dtype = dtype, .shape = std::move(shape)};
}

// Every byte of the tensors has this value.
void write_file_of(const std::string& path, const std::vector<std::string>& names, int value = 1,
                   const std::map<std::string, std::string>& metadata = {}) {
  std::vector<TensorEntry> specs;
  for (const std::string& name : names) specs.push_back(entry(name, {4}));
  SafetensorsWriter writer(path, specs, metadata);
  const std::vector<std::byte> bytes(4, static_cast<std::byte>(value));
  for (const std::string& name : names) writer.write(name, 0, bytes);
  writer.commit();
}

std::string index_of(const std::map<std::string, std::string>& weights) {
  std::string map;
  for (const auto& [name, file] : weights) map += fmt::format(R"({}"{}":"{}")", map.empty() ? "" : ",", name, file);
  return fmt::format(R"({{"metadata":{{"total_size":1}},"weight_map":{{{}}}}})", map);
}

constexpr const char* one_of_two = "model-00001-of-00002.safetensors";
constexpr const char* two_of_two = "model-00002-of-00002.safetensors";
constexpr const char* index_name = "model.safetensors.index.json";

}  // namespace

TEST_CASE("one file, by its own name or by the name of its directory") {
  const TemporaryDirectory directory;
  write_file_of(directory / "model.safetensors", {"b", "a"}, 7, {{"format", "pt"}});
  write_text(directory / "config.json", "{}");
  for (const std::string& path : {directory.path().string(), directory / "model.safetensors"}) {
    const ModelDir model = ModelDir::open(path);
    REQUIRE(model.tensors().size() == 2);
    CHECK(model.tensors()[0].name == "a");
    CHECK(model.find("b") == 1);
    CHECK_FALSE(model.find("c"));
    CHECK(model.metadata().at("format") == "pt");
    CHECK(model.tensor(1).bytes()[3] == std::byte{7});
    CHECK(model.files().size() == 1);
    words_of(ErrorKind::not_found, [&] { static_cast<void>(model.tensor(2)); });
  }
}

TEST_CASE("files with an index, and without one") {
  const TemporaryDirectory directory;
  write_file_of(directory / one_of_two, {"a", "c"}, 1, {{"format", "pt"}, {"x", "1"}});
  write_file_of(directory / two_of_two, {"b"}, 2, {{"x", "2"}});
  for (const bool has_index : {false, true}) {
    INFO(has_index);
    if (!has_index) {
      CHECK(has(ModelDir::open(directory.path().string()).notes().front(),
                "model.safetensors.index.json does not exist"));
    } else {
      write_text(directory / index_name, index_of({{"a", one_of_two}, {"b", two_of_two}, {"c", one_of_two}}));
      // The index shows that this file is not part of the model.
      write_file_of(directory / "consolidated.safetensors", {"a", "z"}, 3);
    }
    const ModelDir model = ModelDir::open(directory.path().string());
    REQUIRE(model.tensors().size() == 3);
    CHECK(model.tensor(*model.find("a")).bytes()[0] == std::byte{1});
    CHECK(model.tensor(*model.find("b")).bytes()[0] == std::byte{2});
    CHECK(fs::path(model.file_of(*model.find("b")).path()).filename() == two_of_two);
    CHECK(model.metadata().at("x") == "1");
    CHECK(model.omissions().size() == (has_index ? 1 : 0));
  }
}

TEST_CASE("defects of an index") {
  const TemporaryDirectory directory;
  write_file_of(directory / one_of_two, {"a"});
  write_file_of(directory / two_of_two, {"b"});
  const auto refuse = [&](ErrorKind kind, const std::string& text) {
    write_text(directory / index_name, text);
    const std::string words = words_of(kind, [&] { ModelDir::open(directory.path().string()); });
    CHECK(has(words, index_name));
    return words;
  };
  const auto corrupt = [&](const std::map<std::string, std::string>& weights) {
    return refuse(ErrorKind::corrupt, index_of(weights));
  };
  CHECK(has(refuse(ErrorKind::not_found, index_of({{"a", "model-00003-of-00003.safetensors"}})),
            "\"model-00003-of-00003.safetensors\" does not exist"));
  CHECK(has(corrupt({{"a", one_of_two}, {"b", two_of_two}, {"z", one_of_two}}),
            "tensor \"z\" does not exist in \"model-00001"));
  CHECK(has(corrupt({{"a", two_of_two}, {"b", one_of_two}}), "tensor \"a\" does not exist in \"model-00002"));
  write_file_of(directory / two_of_two, {"b", "extra"});
  CHECK(has(corrupt({{"a", one_of_two}, {"b", two_of_two}}), "tensor \"extra\" of \"model-0"));
  write_file_of(directory / two_of_two, {"a", "b"});
  write_text(directory / index_name, index_of({{"a", one_of_two}, {"b", two_of_two}}));
  CHECK(has(words_of(ErrorKind::corrupt, [&] { ModelDir::open(directory.path().string()); }),
            "tensor \"a\" is duplicated"));
  CHECK(has(corrupt({{"a", "../model.safetensors"}}), "which is not the name of a file in the same directory"));
  CHECK(has(corrupt({{"a", "/etc/passwd"}}), "which is not the name of a file in the same directory"));
  CHECK(has(corrupt({{"a", ".."}}), "which is not the name of a file in the same directory"));
  CHECK(has(refuse(ErrorKind::corrupt, "{"), "line 1, column 2"));
  CHECK(has(refuse(ErrorKind::corrupt, "[]"), "the object \"weight_map\" is missing"));
  CHECK(has(refuse(ErrorKind::corrupt, R"({"weight_map":{"a":1}})"), "is not a string"));
  // If keys are equal the last one counts, as in Python.
  CHECK(has(refuse(ErrorKind::not_found, R"({"weight_map":{"a":"x","a":"y.safetensors"}})"), "y.safetensors"));
}

TEST_CASE("ambiguous directories are refused") {
  const TemporaryDirectory directory;
  const auto open = [&] { ModelDir::open(directory.path().string()); };
  CHECK(has(words_of(ErrorKind::not_found, open), "no *.safetensors"));
  words_of(ErrorKind::not_found, [&] { ModelDir::open(directory / "none"); });
  write_file_of(directory / "rank-00000-of-00002.safetensors", {"a"});
  write_file_of(directory / "rank-00001-of-00002.safetensors", {"a"});
  CHECK(has(words_of(ErrorKind::invalid_argument, open), "muster export"));
  write_file_of(directory / "model.safetensors", {"a"});
  CHECK(has(words_of(ErrorKind::invalid_argument, open), "two checkpoints"));
  write_text(directory / index_name, index_of({{"a", "rank-00000-of-00002.safetensors"}}));
  CHECK(has(words_of(ErrorKind::invalid_argument, open), "two models"));
  fs::remove(directory / index_name);
  fs::remove(directory / "model.safetensors");
  write_text(directory / "x.safetensors.index.json", "{}");
  write_text(directory / "y.safetensors.index.json", "{}");
  CHECK(has(words_of(ErrorKind::invalid_argument, open), "both an index"));
}

TEST_CASE("planning files: as few as the limit allows, and as equal as the order allows") {
  const std::vector<TensorEntry> entries = {entry("b", {60}),           entry("a", {40}), entry("d", {1}),
                                            entry("c", {500}),          entry("e", {0}),  entry("f", {99}),
                                            entry("g", {1}, DType::f16)};
  const FileLayout layout = split_into_files(entries, 100);
  REQUIRE(layout.files.size() == 5);
  const std::vector<std::vector<std::size_t>> expected = {{0}, {1, 2}, {3}, {4, 5}, {6}};
  for (std::size_t i = 0; i < 5; ++i) {
    CHECK(layout.files[i].name == fmt::format("model-0000{}-of-00005.safetensors", i + 1));
    CHECK(layout.files[i].tensors == expected[i]);
  }
  const Config index = parse_json(layout.index);
  CHECK(index.at("metadata").at("total_size").as_int() == 702);
  CHECK(index.at("weight_map").size() == 7);
  CHECK(index.at("weight_map").as_object().begin()->first == "a");
  CHECK(index.at("weight_map").at("c").as_string() == "model-00003-of-00005.safetensors");
  CHECK(
      layout.index.starts_with("{\n  \"metadata\": {\n    \"total_size\": 702\n  },\n  \"weight_map\": {\n    \"a\""));

  std::vector<TensorEntry> many;
  for (int i = 0; i < 12; ++i) many.push_back(entry("t" + std::to_string(i), {10}));
  const FileLayout balanced = split_into_files(many, 110);  // files filled up to the limit would have 11 and 1
  REQUIRE(balanced.files.size() == 2);
  CHECK(balanced.files[0].tensors.size() == 6);

  const FileLayout single = split_into_files(entries, 702);
  REQUIRE(single.files.size() == 1);
  CHECK(single.files[0].name == "model.safetensors");
  CHECK(single.index.empty());
  CHECK(split_into_files({}, 1).files.size() == 1);
  const std::vector<TensorEntry> twice = {entry("a", {1}), entry("a", {1})};
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { split_into_files(twice, 10); }),
            "tensor \"a\": the name is duplicated"));
}

TEST_CASE("the extra files that are copied") {
  const TemporaryDirectory from;
  const TemporaryDirectory to;
  write_file_of(from / "model.safetensors", {"a"});
  write_text(from / index_name, "{}");
  write_text(from / "config.json", "{\"x\": 1}");
  write_text(from / "empty.txt", "");
  write_text(from / "config.json.partial-0123456789abcdef", "half");
  fs::create_directories(from / "1_Pooling/deep");
  fs::create_directories(from / ".git");
  fs::create_directories(from / ".cache/huggingface");
  write_text(from / "1_Pooling/config.json", std::string(3'000'000, 'x'));
  write_text(from / "1_Pooling/deep/model.safetensors", "a module's");
  write_text(from / "modules.json", R"([{"path": ""}, {"path": "1_Pooling"}])");
  write_text(from / ".git/config", "");
  write_text(from / ".cache/huggingface/x", "");
  fs::create_symlink("config.json", from / "linked.json");
  const std::vector<std::string> expected = {"1_Pooling/config.json", "1_Pooling/deep/model.safetensors",
                                             "config.json",           "empty.txt",
                                             "linked.json",           "modules.json"};
  int pieces = 0;
  copy_extra_files(from.path().string(), to.path().string(), extra_files_of(from.path().string()).names,
                   [&] { ++pieces; });
  CHECK(pieces == 5);  // one report per non-empty file: a rank that copies is not considered stuck
  for (const std::string& directory : {from.path().string(), to.path().string()}) {
    CHECK(extra_files_of(directory).names == expected);
    CHECK(extra_files_of(directory).skipped.empty());
  }
  for (const std::string& name : expected) CHECK(read_text(to / name) == read_text(from / name));
  CHECK_FALSE(fs::is_symlink(to / "linked.json"));
  words_of(ErrorKind::not_found, [&] { extra_files_of(from / "none"); });
}

TEST_CASE("links to outside, linked folders and weights of other formats are not copied, unless they are selected") {
  const TemporaryDirectory work;
  fs::create_directories(work / "private/keys");
  write_text(work / "private/keys/id", "secret");
  fs::create_directories(work / "model/onnx");
  write_text(work / "model/config.json", "{}");
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "m.gguf",
                           "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx"})
    write_text(work / "model/" + name, "stale");
  fs::create_directory_symlink("../private", work / "model/folder");
  fs::create_directory_symlink(".", work / "model/loop");
  fs::create_symlink("../private/keys/id", work / "model/id");
  fs::create_symlink("gone", work / "model/dangling");
  fs::create_symlink("pytorch_model.bin", work / "model/same.bin");
  const std::string model = work / "model";
  const ExtraFiles usual = extra_files_of(model);
  CHECK(usual.names == std::vector<std::string>{"config.json"});
  std::map<std::string, std::string> reasons;
  for (const Omission& file : usual.skipped) reasons[file.name] = file.reason;
  CHECK(reasons.size() == 12);
  CHECK(reasons["folder"] == "a link to a folder");
  CHECK(reasons["loop"] == "a link to a folder");
  CHECK(reasons["dangling"] == "a link to a path that does not exist");
  CHECK(has(reasons["id"], "/private/keys/id\", outside the directory"));
  for (const char* name : {"consolidated.00.pth", "onnx/model.onnx", "same.bin"})
    CHECK(reasons[name] == "weights of another format");
  CHECK(extra_files_of(model, "none").names.empty());
  const ExtraFiles all = extra_files_of(model, "all");
  CHECK(all.names.size() == 10);
  CHECK(all.skipped.size() == 3);  // folders and missing files
  CHECK(extra_files_of(model, "*.bin,onnx/*").names ==
        std::vector<std::string>{"onnx/model.onnx", "pytorch_model.bin", "same.bin"});
  // The Hugging Face cache consists of links.
  fs::create_directories(work / "hub/blobs");
  fs::create_directories(work / "hub/snapshots/0123");
  write_text(work / "hub/blobs/abc", "{}");
  fs::create_symlink("../../blobs/abc", work / "hub/snapshots/0123/config.json");
  CHECK(extra_files_of(work / "hub/snapshots/0123").names == std::vector<std::string>{"config.json"});
}
