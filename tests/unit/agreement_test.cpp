// SPDX-License-Identifier: Apache-2.0
// Every command that reads a checkpoint agrees with `muster verify` about it. The test damages directories at random:
// it removes, renames, duplicates, truncates and exchanges files, and changes indexes and names of tensors. Then all
// commands must refuse, or all must yield the same tensors and report the same findings. A command that succeeds must
// lose nothing, and a command that refuses must leave no file behind. MUSTER_AGREEMENT_ROUNDS sets the number of
// rounds, MUSTER_AGREEMENT_SEED the seed.

#include <doctest/doctest.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/group.hpp"
#include "muster/load_shard.hpp"
#include "muster/verify.hpp"
#include "src/inspect/reports.hpp"
#include "src/inspect/show.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;

namespace {

namespace fs = std::filesystem;

constexpr const char* usual_index = "model.safetensors.index.json";

/// A kind of checkpoint, the function that writes it, and its plan.
struct Kind {
  std::string name;
  std::function<void(const std::string& directory)> make;
  bool has_ranks = false;
  std::string plan = {};  ///< merges the ranks; empty: the metadata of the shards has the plan
};

using Tensors = std::map<std::string, Tensor>;

Tensors model_tensors() {
  Tensors tensors;
  std::uint64_t seed = 0;
  for (int layer = 0; layer < 4; ++layer)
    for (const char* part : {"a.weight", "b.weight"})
      tensors.emplace(fmt::format("model.layers.{}.{}", layer, part), pattern(DType::f32, {4, 2}, ++seed));
  tensors.emplace("model.norm.weight", pattern(DType::bf16, {8}, ++seed));
  return tensors;
}

void write_files(const std::string& directory, std::size_t files, bool has_index) {
  fs::create_directories(directory);
  const Tensors all = model_tensors();
  std::vector<std::vector<NamedTensor>> parts(files);
  Config map = ConfigObject();
  std::uint64_t total = 0;
  std::size_t number = 0;
  const auto name_of = [&](std::size_t file) {
    return files == 1 ? std::string("model.safetensors")
                      : fmt::format("model-{:05}-of-{:05}.safetensors", file + 1, files);
  };
  for (const auto& [name, tensor] : all) {
    const std::size_t file = number++ * files / all.size();
    parts[file].emplace_back(name, tensor);
    map[name] = name_of(file);
    total += tensor.nbytes();
  }
  for (std::size_t file = 0; file < files; ++file) write_tensors(directory + "/" + name_of(file), parts[file]);
  if (has_index)
    write_text(directory + "/" + usual_index,
               to_json(Config::object({{"metadata", Config::object({{"total_size", total}})}, {"weight_map", map}})));
  write_text(directory + "/config.json", R"({"num_hidden_layers": 4})");
}

constexpr const char* plan_text = R"({"muster_plan": 1, "rules": [{"match": "*", "action": "same"}]})";

std::vector<Kind> kinds(const std::string& work) {
  write_text(work + "/plan.json", plan_text);
  const auto sample = [](const std::string& name) {
    return [name](const std::string& directory) {
      fs::copy(fs::path(MUSTER_TEST_DATA) / "foreign" / name / "in", directory, fs::copy_options::recursive);
    };
  };
  return {{"three files and an index", [](const std::string& at) { write_files(at, 3, true); }},
          {"two files without an index", [](const std::string& at) { write_files(at, 2, false); }},
          {"one file", [](const std::string& at) { write_files(at, 1, false); }},
          {"shards of ranks",
           [work](const std::string& at) {
             write_files(work + "/whole", 1, false);
             shard_model(work + "/whole", at, ParallelLayout{.tensor = 3}, work + "/plan.json");
             fs::remove_all(work + "/whole");
           },
           true},
          {"states of a workspace",
           [work](const std::string& at) {
             write_files(work + "/whole", 1, false);
             shard_model(work + "/whole", at, ParallelLayout{.tensor = 2}, work + "/plan.json", {.to_workspace = true});
             fs::remove_all(work + "/whole");
           },
           true},
          {"ranks of Megatron",
           [](const std::string& at) {
             const fs::path data = fs::path(MUSTER_TEST_DATA) / "megatron" / "dense";
             fs::copy(data / "ranks" / "iter_0000100", at, fs::copy_options::recursive);
             fs::copy_file(data / "model" / "config.json", at + "/config.json");
           },
           true, "megatron"},
          {"torch files", sample("torch_model")},
          {"torch.distributed.checkpoint", sample("dcp")},
          {"torch.distributed.checkpoint in safetensors files", sample("dcp_safetensors")},
          {"files of FSDP", sample("fsdp")},
          {"DeepSpeed", sample("zero1")}};
}

/// Returns the files below a directory and their bytes.
std::map<std::string, std::string> contents(const std::string& directory) {
  std::map<std::string, std::string> out;
  if (!fs::exists(directory)) return out;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    if (entry.is_regular_file()) out.emplace(entry.path().string().substr(directory.size()), read_text(entry.path()));
  return out;
}

class Damage {
 public:
  Damage(std::string directory, std::mt19937& random) : directory_(std::move(directory)), random_(random) {}

  /// Makes one change, which may rename tensors, and describes it.
  std::string operator()() {
    const std::vector<std::string> files = weights();
    if (files.empty()) return "nothing is left";
    const std::string& file = files[random_() % files.size()];
    switch (random_() % 9) {
      case 0:
        fs::remove(path(file));
        return "removed " + file;
      case 1: {
        const std::string name = other_name(file);
        fs::rename(path(file), path(name));
        return fmt::format("renamed {} to {}", file, name);
      }
      case 2: {
        const std::string name = other_name(file);
        if (name != file) fs::copy_file(path(file), path(name), fs::copy_options::overwrite_existing);
        return fmt::format("copied {} to {}", file, name);
      }
      case 3: {
        const std::uint64_t bytes = fs::file_size(path(file));
        fs::resize_file(path(file), bytes == 0 ? 0 : random_() % bytes);
        return "cut " + file;
      }
      case 4: {
        const std::string& other = files[random_() % files.size()];
        const std::string bytes = read_text(path(file));
        write_text(path(file), read_text(path(other)));
        write_text(path(other), bytes);
        return fmt::format("exchanged {} and {}", file, other);
      }
      case 5:
        return change_index();
      case 6:
        return change_tensors(file, true);
      case 7:
        return change_tensors(file, false);
      default:
        write_text(path(file), "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n");
        return file + " became a pointer";
    }
  }

 private:
  [[nodiscard]] std::string path(const std::string& name) const { return directory_ + "/" + name; }

  [[nodiscard]] std::vector<std::string> weights() const {
    std::vector<std::string> files;
    for (const auto& [name, bytes] : contents(directory_))
      if (!name.ends_with(".json")) files.push_back(name.substr(1));
    return files;
  }

  std::string other_name(const std::string& file) {
    const std::vector<std::string> names = {"model.safetensors",
                                            "consolidated.safetensors",
                                            "adapter_model.safetensors",
                                            "model.fp16.safetensors",
                                            "model-00001-of-00003.safetensors",
                                            "model-00003-of-00003.safetensors",
                                            "model-00004-of-00003.safetensors",
                                            "model-00001-of-00002.safetensors",
                                            "model-00000-of-00003.safetensors",
                                            "rank-00000-of-00003.safetensors",
                                            "rank-00002-of-00003.safetensors",
                                            "rank-00001-of-00004.safetensors",
                                            "other.safetensors",
                                            "pytorch_model-00001-of-00002.bin",
                                            "pytorch_model.bin",
                                            "folder/model.safetensors",
                                            fs::path(file).filename().string() + ".old"};
    const std::string name = names[random_() % names.size()];
    fs::create_directories(fs::path(path(name)).parent_path());
    return name;
  }

  std::string change_index() {
    std::string name;
    for (const auto& [file, bytes] : contents(directory_))
      if (file.ends_with(".index.json")) name = file.substr(1);
    if (name.empty()) return "no index to change";
    Config index;
    try {
      index = parse_json(read_text(path(name)));
    } catch (const Error&) {
      return "no index to change";
    }
    ConfigObject& map = index["weight_map"].as_object();
    std::vector<std::string> tensors;
    for (const auto& [tensor, file] : map) tensors.push_back(tensor);
    const std::string tensor = tensors.empty() ? "x" : tensors[random_() % tensors.size()];
    switch (random_() % 6) {
      case 0:
        fs::remove(path(name));
        return "removed the index";
      case 1:
        map.erase(tensor);
        break;
      case 2:
        index["weight_map"] = ConfigObject();
        break;
      case 3:
        index["weight_map"][tensor] = "model-00002-of-00003.safetensors";
        break;
      case 4: {
        // Remove all tensors of a file from the index.
        const std::string file = tensors.empty() ? "" : map.find(tensor)->as_string();
        for (const std::string& one : tensors)
          if (map.find(one)->as_string() == file) map.erase(one);
        break;
      }
      default:
        write_text(path(name), read_text(path(name)).substr(0, random_() % 100));
        return "cut the index";
    }
    write_text(path(name), to_json(index));
    return "changed the index at " + tensor;
  }

  /// Prefixes all names in a safetensors file, or changes a shape.
  std::string change_tensors(const std::string& file, bool names) {
    std::vector<NamedTensor> tensors;
    std::map<std::string, std::string> metadata;
    try {
      const SafetensorsFile opened = SafetensorsFile::open(path(file));
      metadata = opened.metadata();
      for (std::size_t i = 0; i < opened.tensors().size(); ++i)
        tensors.emplace_back((names ? "module." : "") + opened.tensors()[i].name, Tensor::copy_of(opened.tensor(i)));
    } catch (const Error&) {
      return "nothing to change in " + file;
    }
    if (tensors.empty()) return "nothing to change in " + file;
    if (!names) tensors[random_() % tensors.size()].second = pattern(DType::f32, {3, 5}, 7);
    // The checksums belong to the unchanged tensors.
    metadata.erase("muster.checksums");
    write_tensors(path(file), tensors, metadata);
    return (names ? "prefixed the names in " : "changed a shape in ") + file;
  }

  std::string directory_;
  std::mt19937& random_;
};

/// The result of a command.
struct Outcome {
  std::string error = {};              ///< empty: the command succeeded
  std::set<std::string> tensors = {};  ///< names of the tensors in its result
  std::string notes = {};              ///< everything that it reported
};

template <class Work>
Outcome outcome_of(const Work& work) {
  Outcome outcome;
  try {
    work(outcome);
  } catch (const Error& error) {
    outcome.error = error.what();
    if (outcome.error.empty()) outcome.error = "an error without words";
  }
  return outcome;
}

std::string joined(const std::vector<std::string>& notes) {
  std::string all;
  for (const std::string& note : notes) all += note + "\n";
  return all;
}

/// Removes each prefix that a note names from those names that have it.
std::set<std::string> without_prefixes(std::set<std::string> names, const std::vector<std::string>& notes) {
  for (const std::string& note : notes) {
    const std::size_t end = note.find("\" is removed from the names of tensors");
    if (end == std::string::npos) continue;
    const std::size_t begin = note.find('"') + 1;
    const std::string prefix = note.substr(begin, end - begin);
    std::set<std::string> shorter;
    for (const std::string& name : names) shorter.insert(name.starts_with(prefix) ? name.substr(prefix.size()) : name);
    names = std::move(shorter);
  }
  return names;
}

/// `may_not_fit`: the files of ranks may not be in the order that the plan needs; verify cannot detect that.
void check_agreement(const std::string& work, const Kind& kind, bool may_not_fit) {
  const bool has_ranks = kind.has_ranks;
  const std::string in = work + "/in";
  const std::string plan = work + "/plan.json";
  const SourceOptions options{.plan = !has_ranks ? "" : kind.plan.empty() ? plan : kind.plan};
  const auto before = contents(in);
  std::vector<std::pair<std::string, std::string>> found;  // the text to search for, and the whole message
  const Outcome verified = outcome_of([&](Outcome& outcome) {
    const VerifyReport report = verify(in);
    for (const VerifyProblem& problem : report.problems) found.emplace_back(problem.message, problem.message);
    for (const Omission& left : report.left_out) found.emplace_back(left.name, left.reason);
    outcome.notes = inspect::verify_text(report);
    if (!report.is_good()) outcome.notes = "bad\n" + outcome.notes;
  });
  const auto checked = [&](const char* command, const std::string& out, const auto& run) {
    const Outcome outcome = outcome_of(run);
    CAPTURE(command);
    CAPTURE(outcome.error);
    if (!outcome.error.empty()) CHECK_FALSE(fs::exists(out));
    CHECK(contents(in) == before);
    return outcome;
  };
  std::map<std::string, Outcome> outcomes;
  std::vector<std::string> notes;
  outcomes["export"] = checked("export", work + "/exported", [&](Outcome& outcome) {
    const ExportReport report = export_model(in, work + "/exported", kind.plan, *single_group());
    for (const auto& [name, tensor] : tensors_of(work + "/exported")) outcome.tensors.insert(name);
    notes = report.manifest.notes;
    outcome.notes = joined(notes);
    for (const Omission& left : report.skipped) outcome.notes += left.name + ": " + left.reason + "\n";
  });
  if (!has_ranks)
    outcomes["shard"] = checked("shard", work + "/cut", [&](Outcome& outcome) {
      const ShardReport report = shard_model(in, work + "/cut", ParallelLayout{.tensor = 2}, plan);
      const SafetensorsFile first = SafetensorsFile::open(work + "/cut/rank-00000-of-00002.safetensors");
      for (const TensorEntry& entry : first.tensors()) outcome.tensors.insert(entry.name);
      outcome.notes = joined(report.notes);
      for (const Omission& left : report.skipped) outcome.notes += left.name + ": " + left.reason + "\n";
    });
  outcomes["load_shard"] = checked("load_shard", work + "/none", [&](Outcome& outcome) {
    for (const auto& [name, tensor] : load_shard(in, ParallelLayout{.tensor = 1}, 0, has_ranks ? kind.plan : plan))
      outcome.tensors.insert(name);
  });
  const Outcome shown = checked("show", work + "/none", [&](Outcome& outcome) {
    const Source source = open_source(in, options);
    for (const TensorEntry& entry : source.entries()) outcome.tensors.insert(entry.name);
    outcome.notes = inspect::issues_text(inspect::find_issues(source), {});
  });
  const Outcome compared = checked("diff", work + "/none", [&](Outcome& outcome) {
    const Config report = inspect::diff_models(in, work + "/sound", options);
    outcome.notes = inspect::diff_text(report);
    if (report.at("same").as_bool()) outcome.tensors = shown.tensors;
  });

  const Outcome& exported = outcomes.at("export");
  CAPTURE(verified.error);
  CAPTURE(verified.notes);
  CAPTURE(exported.error);
  CAPTURE(shown.error);
  for (const auto& [command, outcome] : outcomes) {
    CAPTURE(command);
    CAPTURE(outcome.error);
    CHECK(outcome.error.empty() == exported.error.empty());
    if (outcome.error.empty() && exported.error.empty()) CHECK(outcome.tensors == exported.tensors);
  }
  // For verify, a workspace that has lost all states is a valid empty workspace.
  const bool is_empty = verified.notes.starts_with("good: 0 tensors");
  if (!exported.error.empty()) {
    // verify must report a problem if another command fails, because it reads all bytes.
    CHECK((may_not_fit || is_empty || !verified.error.empty() || verified.notes.starts_with("bad")));
  } else {
    CHECK(verified.error.empty());
    CHECK(shown.error.empty());
    CHECK(without_prefixes(shown.tensors, notes) == exported.tensors);
    for (const auto& [word, whole] : found) {
      CAPTURE(whole);
      CHECK(exported.notes.find(word) != std::string::npos);
      CHECK(shown.notes.find(word) != std::string::npos);
      if (outcomes.contains("shard")) CHECK(outcomes.at("shard").notes.find(word) != std::string::npos);
    }
  }
  if (!compared.tensors.empty()) CHECK(exported.error.empty());
  for (const char* out : {"/exported", "/cut"}) fs::remove_all(work + out);
}

int number_from(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

}  // namespace

TEST_CASE("all commands agree about a damaged checkpoint, and lose nothing") {
  const int rounds = number_from("MUSTER_AGREEMENT_ROUNDS", 30);
  const auto seed = static_cast<unsigned>(number_from("MUSTER_AGREEMENT_SEED", 1));
  std::mt19937 random(seed);
  const TemporaryDirectory base(Medium::memory);
  int refused = 0;
  int round = 0;
  for (const Kind& kind : kinds(base.path().string())) {
    CAPTURE(kind.name);
    const std::string sound = base / "sound";
    kind.make(sound);
    std::set<std::string> whole;
    const std::string merged_by = !kind.has_ranks ? "" : kind.plan.empty() ? base / "plan.json" : kind.plan;
    const Source source = open_source(sound, {.plan = merged_by});
    for (const TensorEntry& entry : source.entries()) whole.insert(entry.name);
    for (int i = 0; i < rounds; ++i, ++round) {
      const std::string in = base / "in";
      fs::copy(sound, in, fs::copy_options::recursive);
      Damage damage(in, random);
      std::string changes;
      const int count = i == 0 ? 0 : 1 + static_cast<int>(random() % 2);
      for (int change = 0; change < count; ++change) changes += (change == 0 ? "" : ", ") + damage();
      CAPTURE(changes);
      check_agreement(base.path().string(), kind, !kind.plan.empty() && changes.find("exchanged") != std::string::npos);
      const Outcome exported = outcome_of([&](Outcome& outcome) {
        const ExportManifest account = plan_export(in, kind.plan);
        for (const TensorMapping& tensor : account.tensors) outcome.tensors.insert(tensor.name);
      });
      if (i == 0) CHECK(exported.error.empty());
      refused += exported.error.empty() ? 0 : 1;
      // A single change that does not rename tensors cannot hide that tensors are missing.
      if (count == 1 && exported.error.empty() && changes.find("prefixed") == std::string::npos)
        CHECK(exported.tensors == whole);
      fs::remove_all(in);
    }
    fs::remove_all(sound);
  }
  CHECK(refused > round / 3);
  CHECK(refused < round);
}
