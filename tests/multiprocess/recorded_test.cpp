// SPDX-License-Identifier: Apache-2.0
// Files of an earlier Muster version are read with every value: tests/data/recorded-VERSION. The case "record" created
// these files with the library and the program of that version:
//   MUSTER_RECORD=FOLDER MUSTER_PROGRAM=... LD_LIBRARY_PATH=... multiprocess_tests -ns -tc=record

#include <cstdlib>
#include <filesystem>

#include "doctest/doctest.h"
#include "muster/workspace.hpp"
#include "src/inspect/demo_model.hpp"
#include "src/workspace/survey.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/state_files.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
namespace fs = std::filesystem;

namespace {

const std::string recorded = MUSTER_TEST_DATA "/recorded-0.1.0/";

/// Tensors of every dtype of version 0.1.0, with a scalar and an empty tensor.
std::vector<NamedTensor> tensors() {
  std::vector<NamedTensor> all;
  for (const DType dtype : all_dtypes().first(20))
    all.emplace_back("odd/" + std::string(to_string(dtype)), pattern(dtype, {3, 5}, all.size()));
  for (const DType dtype : {DType::f32, DType::u4}) {
    all.emplace_back("scalar." + std::string(to_string(dtype)), pattern(dtype, {}, all.size()));
    all.emplace_back("empty." + std::string(to_string(dtype)), pattern(dtype, {3, 0, 7}, all.size()));
  }
  return all;
}

/// Tensors of several chunks each.
std::vector<NamedTensor> large_tensors() {
  std::vector<NamedTensor> all = {{"zeros", zeros({1000})}};
  for (const DType dtype : {DType::u8, DType::bf16, DType::f32, DType::u4})
    all.emplace_back(to_string(dtype), pattern(dtype, {2, 20, 55}, all.size()));
  return all;
}

Config recorded_state(int rank, int step) {
  const auto seed = static_cast<std::uint64_t>(10 * rank + step);
  return Config::object(
      {{"rank", rank}, {"text", "Gewicht é"}, {"weight", pattern(DType::bf16, {7, 9}, seed)}, {"none", nullptr}});
}

constexpr inspect::LlamaSizes model_sizes{
    .hidden = 16, .intermediate = 24, .layers = 1, .heads = 4, .key_value_heads = 2, .vocabulary = 11};

/// Runs "MUSTER_PROGRAM arguments", which must exit with status 0.
void run(const std::string& arguments) {
  const std::string command = std::string(std::getenv("MUSTER_PROGRAM")) + " " + arguments + " > /dev/null";
  CHECK_MESSAGE(std::system(command.c_str()) == 0, command);  // NOLINT(bugprone-command-processor)
}

}  // namespace

TEST_CASE("record" * doctest::skip()) {
  const std::string folder = std::string(std::getenv("MUSTER_RECORD")) + "/";
  fs::create_directories(folder);
  write_state_file(folder + "plain.h5", some_config(), tensors(), {.info = {.step = 7, .rank = 3, .world_size = 5}});
  write_state_file(folder + "compressed.h5", some_config(), large_tensors(), {.zstd_level = 1, .chunk_bytes = 1000});
  run_ranks(2, [&](Group& group) {
    Workspace workspace(folder + "workspace", group.shared_from_this());
    for (const int step : {1, 2}) workspace.write_configs_and_weights(recorded_state(group.rank(), step));
  });
  inspect::write_demo_model(inspect::llama_model(model_sizes), folder + "model", 1 << 20);
  run("shard " + folder + "model --to 2 --plan llama --out " + folder + "shards");
  run("shard " + folder + "model --to 2 --plan llama --workspace --out " + folder + "shards-workspace");
  run("export " + folder + "shards --plan llama --checksums --out " + folder + "exported");
}

TEST_CASE("state files of 0.1.0 are read") {
  for (const FileAccess access : {FileAccess::map, FileAccess::read}) {
    const StateFile plain = StateFile::open(recorded + "plain.h5", access);
    CHECK(plain.info().step == 7);
    CHECK(plain.info().rank == 3);
    CHECK(plain.info().world_size == 5);
    CHECK(holds(plain, tensors()));
    const StateFile compressed = StateFile::open(recorded + "compressed.h5", access);
    CHECK(holds(compressed, large_tensors()));
    for (const StateFile& file : {plain, compressed}) {
      CHECK(file.config() == some_config());
      CHECK(file.check().empty());
    }
  }
  run("verify " + recorded + "plain.h5 " + recorded + "compressed.h5");
}

TEST_CASE("a workspace of 0.1.0 is read") {
  const workspace::Survey survey = workspace::survey(recorded + "workspace");
  REQUIRE(survey.jobs.size() == 1);
  CHECK(survey.foreign.empty());
  const workspace::SurveyJob& job = survey.jobs.front();
  CHECK(job.common_step == 2);
  REQUIRE(job.states.size() == 4);
  for (const workspace::SurveyState& state : job.states) {
    const StateFile file = StateFile::open(recorded + "workspace/" + state.entry.file);
    CHECK(join(file.load()) == recorded_state(state.rank, static_cast<int>(state.step)));
  }
  run("verify " + recorded + "workspace " + recorded + "shards-workspace");
}

TEST_CASE("shards and checkpoints of 0.1.0 are read, and their checksums match") {
  const inspect::DemoModel model = inspect::llama_model(model_sizes);
  const auto exported = tensors_of(recorded + "exported");
  REQUIRE(exported.size() == model.tensors.size());
  for (const TensorEntry& part : model.tensors) {
    Tensor expected = Tensor::allocate(part.dtype, part.shape);
    inspect::fill_demo_tensor(part, {expected.mutable_data(), expected.nbytes()});
    CHECK(bitwise_equal(exported.at(part.name), expected));
  }
  run("verify " + recorded + "exported " + recorded + "shards");
  const TemporaryDirectory work;
  for (const std::string shards : {"shards", "shards-workspace"}) {
    run("export " + recorded + shards + " --plan llama --out " + (work / shards));
    check_equal(work / shards, recorded + "model");
  }
}
