// SPDX-License-Identifier: Apache-2.0
// How Muster classifies a directory: files of ranks by their names, and every reason to refuse it as a checkpoint.

#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "muster/model_dir.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"
#include "src/inspect/source.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"
#include "tests/support/torch_files.hpp"

using namespace muster;
using namespace muster::test;

namespace {

namespace fs = std::filesystem;

/// Returns a file of torch.save with "w", which has two rows of four floats, all of one character.
std::string torch_file(char value) {
  using namespace pickled;
  const std::string pickle = whole(dict({{"model", dict({{"w", tensor("0", "FloatStorage", 8, 0, {2, 4}, {4, 1})}})}}));
  return make_zip(torch_parts(pickle, {{"0", std::string(32, value)}}));
}

struct KindCase {
  std::string name;
  std::vector<std::string> files;
  thirdparty::Choice choice = {};
  int ranks = 0;
  std::string layout = {};
  std::string words = {};        ///< part of the error message, if an error is expected
  std::string pointer = "10\n";  ///< part of the error message if a file names a folder
};

std::vector<KindCase> kind_cases() {
  return {
      {"Meta", {"consolidated.00.pth", "consolidated.01.pth"}, {}, 2},
      {"Meta, one missing", {"consolidated.00.pth", "consolidated.02.pth"}, {}, 0, "", "rank 1 of 3 does not exist"},
      {"Meta, one twice", {"consolidated.0.pth", "consolidated.00.pth"}, {}, 0, "", "both belong to rank 0"},
      {"Meta, beside a directory that others name latest", {"consolidated.00.pth", "latest/a.txt"}, {}, 1},
      {"sharded_state",
       {"model-rank-0-part-0.safetensors", "model-rank-0-part-1.safetensors", "model-rank-1-part-0.safetensors"},
       {},
       2},
      {"sharded_state, a part missing",
       {"model-rank-0-part-1.safetensors"},
       {},
       0,
       "",
       "part 0 of rank 0 does not exist"},
      {"Megatron-LM", {"mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"}, {}, 2, "2"},
      {"Megatron-LM with stages",
       {"iter_0000010/mp_rank_00_000/model_optim_rng.pt", "iter_0000010/mp_rank_00_001/model_optim_rng.pt",
        "latest_checkpointed_iteration.txt"},
       {},
       2,
       "tp=1,pp=2,ep=1"},
      {"Megatron-LM, one missing",
       {"mp_rank_00_000/model_optim_rng.pt", "mp_rank_01_001/model_optim_rng.pt"},
       {},
       0,
       "",
       "does not exist (2 of 4 ranks are present)"},
      {"Megatron-LM's release",
       {"release/mp_rank_00/model_optim_rng.pt", "latest_checkpointed_iteration.txt"},
       {},
       1,
       "1",
       "",
       "release\n"},
      {"an iteration that is gone", {"latest_checkpointed_iteration.txt"}, {}, 0, "", "does not exist"},
      {"a pattern", {"part0.pt", "part1.pt", "part2.pt"}, {.key = {}, .file_pattern = "part{rank}.pt"}, 3},
      {"a pattern that fits nothing",
       {"a.pt"},
       {.key = {}, .file_pattern = "b{rank}.pt"},
       0,
       "",
       "no file matches the pattern"},
      {"a pattern without a rank", {"a.pt"}, {.key = {}, .file_pattern = "a.pt"}, 0, "", "{rank} is missing"},
      {"FSDP, one missing",
       {"model_world_size_2_rank_0.pt"},
       {},
       0,
       "",
       "model_world_size_2_rank_1.pt does not exist (1 of 2"},
      {"FSDP of two jobs",
       {"model_world_size_1_rank_0.pt", "model_world_size_2_rank_0.pt"},
       {},
       0,
       "",
       "the directory has files of two jobs, of 1 and 2 ranks"},
      {"DeepSpeed, one missing",
       {"zero_pp_rank_1_mp_rank_00_optim_states.pt"},
       {},
       0,
       "",
       "the optimizer file of rank 0 does not exist"},
      {"DeepSpeed, model-parallel",
       {"zero_pp_rank_0_mp_rank_01_optim_states.pt"},
       {},
       0,
       "",
       "a second model-parallel rank"},
      {"a save that did not end", {"__0_0.distcp"}, {}, 0, "", ".metadata does not exist"},
      {"two kinds", {"consolidated.00.pth", ".metadata"}, {}, 0, "", "the directory has two checkpoints"},
      {"beside pytorch_model.bin", {".metadata", "pytorch_model.bin"}, {}, 0, "", "a model in files of torch.save"},
      {"beside pytorch_model.bin and its index",
       {".metadata", "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"},
       {},
       0,
       "",
       "a checkpoint of torch.distributed.checkpoint and a model in files of torch.save. Move one away"},
      {"DeepSpeed, beside the Trainer's model",
       {"model.safetensors", "latest", "global_step500/zero_pp_rank_0_mp_rank_00_optim_states.pt"},
       {},
       0,
       "",
       "/global_step500\" to read that one, or move one away",
       "global_step500"},
      {"beside a model", {"consolidated.00.pth", "model.safetensors"}, {}, 0, "", "a model in safetensors files"},
      // Not refused here: the missing file is found when the checkpoint is opened.
      {"numbered files and no index", {"pytorch_model-00001-of-00002.bin"}, {}, 0, "", ""},
  };
}

}  // namespace

TEST_CASE("directories are classified by the names in them") {
  for (const KindCase& one : kind_cases()) {
    CAPTURE(one.name);
    const TemporaryDirectory folder(Medium::memory);
    for (const std::string& file : one.files) {
      fs::create_directories(fs::path(folder / file).parent_path());
      write_text(folder / file, file.ends_with(".txt") || file == "latest" ? one.pointer : torch_file('a'));
    }
    std::string words;
    try {
      const auto found = thirdparty::find_checkpoint(folder.path().string(), one.choice);
      REQUIRE(found.has_value());
      CHECK(found->ranks == one.ranks);
      CHECK((found->layout ? to_string(*found->layout) : "") == one.layout);
    } catch (const Error& error) {
      words = error.what();
      CHECK(words.find('\n') == std::string::npos);
    }
    CHECK(words.empty() == one.words.empty());
    CHECK(has(words, one.words));
  }
}

TEST_CASE("safetensors files are preferred to older files of the same model") {
  const TemporaryDirectory folder(Medium::memory);
  write_text(folder / "model.safetensors", "");
  write_text(folder / "pytorch_model.bin", torch_file('a'));
  CHECK_FALSE(thirdparty::find_checkpoint(folder.path().string()).has_value());
}

TEST_CASE("a plan merges the files of ranks") {
  const TemporaryDirectory folder(Medium::memory);
  fs::create_directory(folder / "in");
  for (const char rank : {'0', '1', '2'})
    write_text(folder / ("in/part" + std::string(1, rank) + ".pt"), torch_file(static_cast<char>('a' + rank - '0')));
  write_text(folder / "plan.json", R"({"muster_plan": 1, "rules": [{"match": "w", "action": "concat", "dim": 1}]})");
  const inspect::Source source = inspect::open_source(
      folder / "in",
      {.plan = folder / "plan.json", .states = {}, .thirdparty = {.key = {}, .file_pattern = "part{rank}.pt"}});
  REQUIRE(source.entries().size() == 1);
  CHECK(source.entries()[0].shape == Shape{2, 12});
  std::string bytes(96, ' ');
  source.tensors->read(0, 0, std::as_writable_bytes(std::span(bytes)));
  const std::string row = std::string(16, 'a') + std::string(16, 'b') + std::string(16, 'c');
  CHECK(bytes == row + row);
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [&] { inspect::open_source(folder / "in", {.thirdparty = {.file_pattern = "part{rank}.pt"}}); }),
            "--plan"));
}
