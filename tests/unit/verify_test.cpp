// SPDX-License-Identifier: Apache-2.0
// Verification: a complete checkpoint is good, and every defect is reported, all of them at once.

#include "muster/verify.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/assembly/checksums.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/reports.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using test::has;
using test::words_of;

namespace {

namespace fs = std::filesystem;

constexpr const char* file_1 = "model-00001-of-00003.safetensors";
constexpr const char* file_2 = "model-00002-of-00003.safetensors";
constexpr const char* file_3 = "model-00003-of-00003.safetensors";
constexpr const char* index_file = "model.safetensors.index.json";

// Three files with five tensors. Each has 8 bytes, except e, which is longer than one piece.
void write_checkpoint(const test::TemporaryDirectory& at) {
  const auto small = [](std::uint64_t seed) { return test::pattern(DType::f32, {2}, seed); };
  test::write_tensors(at / file_1, {{"a", small(1)}, {"b", small(2)}});
  test::write_tensors(at / file_2, {{"c", small(3)}, {"d", small(4)}});
  test::write_tensors(at / file_3, {{"e", test::pattern(DType::bf16, {1 << 20, 5}, 5)}});
  Config map = ConfigObject();
  for (const char* name : {"a", "b"}) map[name] = file_1;
  for (const char* name : {"c", "d"}) map[name] = file_2;
  map["e"] = file_3;
  test::write_text(at / index_file,
                   to_json(Config::object({{"metadata", Config::object({{"total_size", 32 + (10 << 20)}})},
                                           {"weight_map", std::move(map)}})));
  test::write_text(at / "config.json", "{}");
}

// Changes the text of the index.
void edit_index(const test::TemporaryDirectory& at, const std::string& from, const std::string& to) {
  std::string text = test::read_text(at / index_file);
  const std::size_t place = text.find(from);
  REQUIRE(place != std::string::npos);
  test::write_text(at / index_file, text.replace(place, from.size(), to));
}

// Returns the problems as "defect file tensor".
std::vector<std::string> found(const std::string& path, const VerifyOptions& options = {}) {
  std::vector<std::string> list;
  for (const VerifyProblem& problem : verify(path, options).problems) {
    list.push_back(std::string(to_string(problem.defect)) + " " + problem.file + " " + problem.tensor);
    CHECK_FALSE(problem.message.empty());
  }
  return list;
}

using List = std::vector<std::string>;

}  // namespace

TEST_CASE("a complete checkpoint is good, with and without checksums") {
  const test::TemporaryDirectory work;
  write_checkpoint(work);
  VerifyReport report = verify(work.path());
  CHECK(report.is_good());
  CHECK(report.kind == VerifiedKind::checkpoint);
  CHECK(report.files == 3);
  CHECK(report.tensors == 5);
  CHECK(report.bytes == 32 + (10 << 20));
  CHECK_FALSE(report.has_checksums);
  CHECK(report.checked == 0);
  CHECK(inspect::verify_text(report) == "good: 5 tensors of 3 files, 10.5 MB; no checksums\n");

  CHECK(write_checksums(work.path()) == 5);
  muster::Progress last;
  report = verify(work.path(), {.progress = [&](const muster::Progress& progress) {
                    CHECK(progress.bytes >= last.bytes);
                    last = progress;
                  }});
  CHECK(report.is_good());
  CHECK(report.checked == 5);
  CHECK(last.bytes == report.bytes);
  CHECK(last.total_bytes == report.bytes);
  CHECK(inspect::verify_text(report) == "good: 5 tensors of 3 files, 10.5 MB; 5 checksums checked\n");
  CHECK(verify(work.path(), {.checksums = false}).checked == 0);
  CHECK(verify(work.path(), {.checksums = false}).is_good());
  const Config json = inspect::verify_tree(report);
  CHECK(json.at("good").as_bool());
  CHECK(json.at("kind").as_string() == "checkpoint");
  CHECK(json.at("problems").size() == 0);
}

TEST_CASE("one file alone, and a directory with one") {
  const test::TemporaryDirectory work;
  test::write_tensors(work / "model.safetensors", {{"a", test::pattern(DType::u4, {3}, 1)}});
  CHECK(verify(work / "model.safetensors").is_good());
  CHECK(verify(work / "model.safetensors").kind == VerifiedKind::file);
  CHECK(verify(work.path()).is_good());
  CHECK(write_checksums(work.path()) == 1);
  CHECK(verify(work.path()).checked == 1);
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { write_checksums(work / "model.safetensors"); }),
            "not the directory of a checkpoint"));
  fs::resize_file(work / "model.safetensors", fs::file_size(work / "model.safetensors") - 1);
  CHECK(found(work / "model.safetensors") == List{"file model.safetensors "});
  CHECK(found(work.path()).front() == "file model.safetensors ");
}

TEST_CASE("a missing checkpoint is an error, not a verdict") {
  const test::TemporaryDirectory work;
  CHECK(has(words_of(ErrorKind::not_found, [&] { verify(work / "no"); }), "does not exist"));
  CHECK(has(words_of(ErrorKind::not_found, [&] { verify(work.path()); }), "no *.safetensors"));
}

TEST_CASE("every defect of a checkpoint is reported") {
  const test::TemporaryDirectory work;
  write_checkpoint(work);
  const std::string path = work.path();
  SUBCASE("a file is missing") {
    fs::remove(work / file_2);
    CHECK(found(path) == List{"missing " + std::string(file_2) + " "});
  }
  SUBCASE("a file is truncated") {
    fs::resize_file(work / file_3, 1000);
    CHECK(found(path).front() == "file " + std::string(file_3) + " ");
  }
  SUBCASE("the index lacks a tensor") {
    edit_index(work, ",\"d\":\"model-00002-of-00003.safetensors\"", "");
    CHECK(found(path) == List{"unindexed " + std::string(file_2) + " d"});
  }
  SUBCASE("the index has a tensor that no file has") {
    edit_index(work, "\"d\":", "\"x\":\"model-00002-of-00003.safetensors\",\"d\":");
    CHECK(found(path) == List{"index " + std::string(file_2) + " x"});
    CHECK(has(inspect::verify_text(verify(path)), "no other file has it"));
  }
  SUBCASE("the index has a tensor in the wrong file") {
    edit_index(work, "\"d\":\"model-00002", "\"d\":\"model-00001");
    CHECK(found(path) == List{"index " + std::string(file_1) + " d"});
    CHECK(has(inspect::verify_text(verify(path)), "\"model-00002-of-00003.safetensors\" has it"));
  }
  SUBCASE("one name is in two files") {
    test::write_tensors(work / file_2, {{"c", test::pattern(DType::f32, {2}, 3)},
                                        {"d", test::pattern(DType::f32, {2}, 4)},
                                        {"a", test::pattern(DType::f32, {2}, 4)}});
    CHECK(found(path) == List{"twice " + std::string(file_2) + " a"});
  }
  SUBCASE("total_size is wrong") {
    edit_index(work, "\"total_size\":1", "\"total_size\":2");
    CHECK(found(path) == List{"index " + std::string(index_file) + " "});
    edit_index(work, "\"total_size\":2", "\"total_size\":\"\",\"x\":1");
    CHECK(has(inspect::verify_text(verify(path)), "not a number"));
    edit_index(work, "\"total_size\"", "\"size\"");
    CHECK(found(path).empty());
    edit_index(work, "\"size\":\"\"", "\"total_size\":10485792.0");
    CHECK(found(path).empty());
  }
  SUBCASE("a file that the index does not name") {
    test::write_tensors(work / "adapter.safetensors", {{"z", test::pattern(DType::f32, {2}, 3)}});
    const VerifyReport report = verify(path);
    CHECK(report.is_good());
    REQUIRE(report.left_out.size() == 1);
    CHECK(report.left_out.front().name == "adapter.safetensors");
    CHECK(has(inspect::verify_text(report), "left out: adapter.safetensors: weights without an entry in "));
  }
  SUBCASE("the index names a file outside the directory") {
    for (const char* name : {"../x.safetensors", "/etc/passwd", "", "..", "a\\u0000b"}) {
      write_checkpoint(work);
      edit_index(work, "\"e\":\"model-00003-of-00003.safetensors\"", "\"e\":\"" + std::string(name) + "\"");
      const List problems = found(path);
      CHECK(std::count(problems.begin(), problems.end(), "index " + std::string(index_file) + " e") == 1);
    }
    write_checkpoint(work);
    edit_index(work, "\"model-00003-of-00003.safetensors\"", "7");
    CHECK(found(path).front() == "index " + std::string(index_file) + " e");
  }
  SUBCASE("the index is malformed") {
    for (const char* text : {"", "{", "[]", "{}", R"({"weight_map": 3})", "\xff"}) {
      test::write_text(work / index_file, text);
      CHECK(found(path) == List{"index " + std::string(index_file) + " "});
    }
    fs::remove(work / index_file);
    CHECK(found(path) == List{"missing " + std::string(index_file) + " "});
  }
  SUBCASE("two indexes") {
    test::write_text(work / "other.safetensors.index.json", "{}");
    CHECK(verify(path).left_out.front().name == "other.safetensors.index.json");
    CHECK(verify(path).is_good());
  }
  SUBCASE("file numbers with gaps, and beyond the count") {
    fs::rename(work / file_1, work / "model-00007-of-00003.safetensors");
    const List problems = found(path);
    CHECK(std::count(problems.begin(), problems.end(), "numbering model-00007-of-00003.safetensors ") == 1);
    CHECK(std::count(problems.begin(), problems.end(), "missing " + std::string(file_1) + " ") == 1);
    CHECK(std::count(problems.begin(), problems.end(), "unindexed model-00007-of-00003.safetensors ") == 1);
    test::write_tensors(work / "model-00001-of-99999.safetensors", {{"z", test::pattern(DType::f32, {2}, 3)}});
    CHECK(has(inspect::verify_text(verify(path)), "the files up to number 99999"));
    CHECK(has(inspect::verify_text(verify(path)), "sets of different sizes"));
  }
  SUBCASE("several defects, all of them") {
    fs::resize_file(work / file_3, 1000);
    edit_index(work, "\"d\":\"model-00002", "\"d\":\"model-00001");
    test::write_tensors(work / "z.safetensors", {{"a", test::pattern(DType::f32, {2}, 3)}});
    const List problems = found(path);
    CHECK(problems.size() == 2);
    const Config json = inspect::verify_tree(verify(path));
    CHECK_FALSE(json.at("good").as_bool());
    CHECK(json.at("problems").size() == 2);
    CHECK(json.at("left_out").size() == 1);
    CHECK(has(words_of(ErrorKind::invalid_argument, [&] { write_checksums(path); }), "the checkpoint is not complete"));
  }
}

TEST_CASE("checksums: one bit in a tensor, one name too many, one too few, a malformed file") {
  const test::TemporaryDirectory work;
  write_checkpoint(work);
  write_checksums(work.path());
  const std::string sums = work / std::string(checksums_file_name);
  const std::string before = test::read_text(sums);
  std::string bytes = test::read_text(work / file_3);
  bytes[bytes.size() - 5'000'000] ^= 4;
  test::write_text(work / file_3, bytes);
  CHECK(found(work.path()) == List{"checksum " + std::string(file_3) + " e"});
  CHECK(found(work.path(), {.checksums = false}).empty());
  bytes[bytes.size() - 5'000'000] ^= 4;
  test::write_text(work / file_3, bytes);
  CHECK(found(work.path()).empty());

  const std::string name(checksums_file_name);
  Checksums checksums = *read_checksums(work.path());
  checksums.erase("b");
  checksums["gone"] = 1;
  write_checksums(work.path(), checksums);
  CHECK(found(work.path()) == List{"checksum " + name + " gone", "checksum " + name + " b"});
  test::write_text(sums, "{");
  CHECK(found(work.path()) == List{"checksum " + name + " "});
  CHECK(write_checksums(work.path()) == 5);
  CHECK(test::read_text(sums) == before);
}

TEST_CASE("shards: all ranks, their facts, the same names and dtypes") {
  const test::TemporaryDirectory work;
  const std::string model = work / "model";
  const std::string shards = work / "shards";
  fs::create_directory(model);
  test::write_tensors(model + "/model.safetensors",
                      {{"a", test::pattern(DType::f32, {7, 2}, 1)}, {"b", test::pattern(DType::f32, {8}, 2)}});
  test::write_text(work / "plan.json",
                   R"({"muster_plan": 1, "rules": [{"match": "*", "action": "concat", "dim": 0}]})");
  shard_model(model, shards, ParallelLayout{.tensor = 4}, work / "plan.json");
  const auto rank = [&](int r, int of = 4) {
    return "rank-0000" + std::to_string(r) + "-of-0000" + std::to_string(of) + ".safetensors";
  };
  const VerifyReport report = verify(shards);
  CHECK(report.is_good());
  CHECK(report.kind == VerifiedKind::shards);
  CHECK(report.files == 4);
  CHECK(inspect::verify_text(report) == "good: 8 tensors of 4 files, 96 B; 8 checksums checked\n");
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { write_checksums(shards); }),
            "not the directory of a checkpoint"));

  SUBCASE("a rank is missing") {
    fs::remove(shards + "/" + rank(0));
    CHECK(found(shards) == List{"missing " + rank(0) + " "});
    fs::remove(shards + "/" + rank(3));
    fs::remove(shards + "/" + rank(2));
    CHECK(found(shards) == List{"missing " + rank(0) + " ", "missing " + rank(2) + " "});
  }
  SUBCASE("a rank under another's name") {
    fs::rename(shards + "/" + rank(1), shards + "/x");
    fs::copy_file(shards + "/" + rank(2), shards + "/" + rank(1));
    CHECK(found(shards) == List{"disagree " + rank(1) + " "});
  }
  SUBCASE("other names, another dtype") {
    test::write_tensors(shards + "/" + rank(2),
                        {{"a", test::pattern(DType::bf16, {2, 2}, 1)}, {"c", test::pattern(DType::f32, {2}, 1)}});
    const List problems = found(shards);
    CHECK(problems == List{"disagree " + rank(2) + " a", "disagree " + rank(2) + " b", "disagree " + rank(2) + " c",
                           "disagree " + rank(2) + " "});
  }
  SUBCASE("invalid metadata") {
    test::write_tensors(shards + "/" + rank(1), {{"a", test::pattern(DType::f32, {2, 2}, 1)}},
                        {{"muster.shard", "{\"version\": 1}"}});
    CHECK(found(shards).front() == "file " + rank(1) + " ");
    test::write_tensors(
        shards + "/" + rank(1), {{"a", test::pattern(DType::f32, {2, 2}, 1)}, {"b", test::pattern(DType::f32, {2}, 1)}},
        {{"muster.shard", R"({"version": 1, "rank": 1, "ranks": 4, "padded": {"a": [9, 7], "z": [0, 1]}})"}});
    const List problems = found(shards);
    CHECK(std::count(problems.begin(), problems.end(), "disagree " + rank(1) + " a") == 1);
    CHECK(std::count(problems.begin(), problems.end(), "disagree " + rank(1) + " z") == 1);
  }
  SUBCASE("shards of two sets, and a file that is not a shard") {
    fs::copy_file(shards + "/" + rank(2), shards + "/" + rank(2, 5));
    test::write_tensors(shards + "/extra.safetensors", {});
    const List problems = found(shards);
    CHECK(std::count(problems.begin(), problems.end(), "numbering extra.safetensors ") == 1);
    CHECK(std::count_if(problems.begin(), problems.end(),
                        [](const std::string& p) { return p.starts_with("numbering"); }) == 2);
  }
}

TEST_CASE("any damaged bytes lead to a verdict") {
  const test::TemporaryDirectory work;
  test::write_tensors(work / "model-00001-of-00002.safetensors", {{"a", test::pattern(DType::f32, {2}, 1)}});
  test::write_tensors(work / "model-00002-of-00002.safetensors", {{"b", test::pattern(DType::f32, {2}, 1)}});
  test::write_text(
      work / index_file,
      R"({"metadata": {"total_size": 16}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})");
  write_checksums(work.path());
  std::mt19937 random(11);
  const List names = {"model-00001-of-00002.safetensors", index_file, std::string(checksums_file_name)};
  int bad = 0;
  for (int i = 0; i < 3'000; ++i) {
    const std::string& name = names[random() % names.size()];
    const std::string whole = test::read_text(work / name);
    std::string broken = whole;
    for (std::size_t count = 1 + random() % 3; count > 0; --count) {
      const std::size_t at = random() % broken.size();
      switch (random() % 3) {
        case 0:
          broken[at] = static_cast<char>(random());
          break;
        case 1:
          broken.erase(at, random() % 20);
          if (broken.empty()) broken = "x";
          break;
        default:
          broken.insert(at, broken.substr(random() % broken.size(), random() % 20));
      }
    }
    test::write_text(work / name, broken);
    const VerifyReport report = verify(work.path());
    if (!report.is_good()) ++bad;
    (void)parse_json(inspect::json_report(inspect::verify_tree(report)));
    test::write_text(work / name, whole);
  }
  CHECK(bad > 2'000);
  CHECK(verify(work.path()).is_good());
}
