// SPDX-License-Identifier: Apache-2.0
// Published files and directories, checked with a model of a disk that loses each unsynced write. A name must never
// refer to bytes that a power failure would lose. After the call a power failure loses nothing.

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "doctest/doctest.h"
#include "muster/export.hpp"
#include "muster/group.hpp"
#include "muster/live_export.hpp"
#include "muster/publish.hpp"
#include "muster/safetensors.hpp"
#include "muster/state_file.hpp"
#include "muster/workspace.hpp"
#include "src/checkpoint/model/output_directory.hpp"
#include "src/os/fault.hpp"
#include "src/os/publish.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/models.hpp"
#include "tests/support/state_files.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
namespace fs = std::filesystem;

namespace {

/// Records the unsynced writes of this process, as the fault-injection hook reports them. An unfinished file has its
/// final name here; an unfinished directory has the name OUT.partial-...
class Disk {
 public:
  Disk() {
    only_ = this;
    os::set_fault_hook([](std::string_view call, std::string_view path) {
      only_->note(std::string(call), std::string(path));
      return 0;
    });
  }
  ~Disk() { os::set_fault_hook(nullptr); }
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  /// Returns names that were given too early, and the data that a power failure would lose now.
  [[nodiscard]] std::vector<std::string> losses() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> all = wrong_;
    for (const auto& [path, is_dirty] : files_)
      if (is_dirty && !is_growing(path)) all.push_back("at the end: the bytes of " + path);
    for (const std::string& name : unsynced_names_)
      if (!is_growing(parent(name))) all.push_back("at the end: the name " + name);
    return all;
  }
  /// Returns whether a file of this name was synced, in any directory.
  [[nodiscard]] bool has_synced(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    return synced_.contains(name);
  }
  [[nodiscard]] int count(const std::string& call, std::string_view part) const {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(std::ranges::count_if(
        calls_, [&](const auto& each) { return each.first == call && each.second.find(part) != std::string::npos; }));
  }

 private:
  static bool is_growing(const std::string& path) { return path.find(".partial-") != std::string::npos; }
  static std::string parent(const std::string& path) { return fs::path(path).parent_path().string(); }

  void note(const std::string& call, const std::string& path) {
    const std::lock_guard lock(mutex_);
    if (path.find('/') == std::string::npos || call == "stat") return;  // shared memory, and calls that only read
    calls_.emplace_back(call, path);
    if (call == "pwrite" || call == "create" || call == "fallocate" || call == "ftruncate") {
      files_[path] = true;
      if (call == "create") unsynced_names_.insert(path);
    } else if (call == "fsync" || call == "fdatasync") {
      files_[path] = false;
      synced_.insert(fs::path(path).filename());
    } else if (call == "mkdir") {
      if (!fs::exists(path)) unsynced_names_.insert(path);
    } else if (call == "unlink") {
      files_.erase(path);
      unsynced_names_.erase(path);
    } else if (call == "fsync-directory") {
      std::erase_if(unsynced_names_, [&](const std::string& name) { return parent(name) == path; });
    } else if (call == "rename" || call == "plain-rename" || call == "exchange" || call == "link") {
      take_name(path);
    }
  }

  void take_name(const std::string& path) {
    const std::string grown = path + ".partial-";
    for (const auto& [file, is_dirty] : files_)
      if (is_dirty && (file == path || file.starts_with(grown)))
        wrong_.push_back(path + " gets its name before the bytes of " + file + " are on the disk");
    for (const std::string& name : unsynced_names_)
      if (parent(name).starts_with(grown)) wrong_.push_back(path + " gets its name before the name " + name);
    // The hook does not see every change in a directory, so the directory must be synced last.
    const auto& before = calls_.size() < 2 ? calls_.back() : calls_[calls_.size() - 2];
    if (!files_.contains(path) && !is_growing(path) &&
        !(before.first == "fsync-directory" && before.second.starts_with(grown)))
      wrong_.push_back(path + " gets its name after " + before.first + " of " + before.second);
    unsynced_names_.insert(path);
  }

  static inline Disk* only_ = nullptr;
  mutable std::mutex mutex_;
  std::map<std::string, bool> files_;  // true: some bytes are not on the disk
  std::set<std::string> unsynced_names_;
  std::set<std::string> synced_;
  std::vector<std::string> wrong_;
  std::vector<std::pair<std::string, std::string>> calls_;
};

struct Publication {
  const char* name;
  std::function<void(const std::string& directory)> write;
};

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::vector<TensorPart> part_of(const std::string& name, std::uint64_t seed) {
  return {{name, pattern(DType::f32, {100, 100}, seed)}};
}

/// Exports units of one tensor each.
void export_units(const std::vector<std::string>& names, const std::string& out) {
  const PartSource source = [&, next = std::size_t{0}]() mutable -> std::optional<std::vector<TensorPart>> {
    if (next == names.size()) return std::nullopt;
    return part_of(names[next++], 3);
  };
  export_model(source, out, "", *single_group());
}

}  // namespace

TEST_CASE("a power failure loses nothing of a file or directory that a durable call has published") {
  const TemporaryDirectory models(Medium::memory);
  inspect::write_demo_model(llama(), models / "model", 1 << 30);
  // These extra files are copied.
  write_text(models / "model/tokenizer.json", "{}");
  write_text(models / "model/modules.json", R"([{"path": "1_Pooling"}])");
  fs::create_directory(models / "model/1_Pooling");
  write_text(models / "model/1_Pooling/pooling.json", "{}");
  shard_model(models / "model", models / "shards", {.tensor = 2}, "llama");
  REQUIRE(fs::exists(models / "shards/1_Pooling/pooling.json"));
  export_model(part_of("weight", 3), models / "base", "", *single_group(), {.files = {{"config.json", "{}"}}});
  const auto exports = [&](const std::string& directory, bool force) {
    export_model(models / "shards", directory + "/exported", "llama", *single_group(),
                 {.force = force, .max_shard_size = 90'000});
  };
  const Publication publications[] = {
      {"an output file",
       [](const std::string& directory) {
         os::PublishedFile file(directory + "/file");
         file.write_at(4, bytes_of("words"));
         file.write_at(0, bytes_of("some"));
         file.commit();
       }},
      {"a small file",
       [](const std::string& directory) {
         os::publish(directory + "/file", bytes_of("words"), {}, os::Durability::synced);
       }},
      {"the first of its name",
       [](const std::string& directory) {
         CHECK(os::publish_first(directory + "/file", bytes_of("words"), {}, os::Durability::synced));
       }},
      {"a state file",
       [](const std::string& directory) { write_state_file(directory + "/state", some_config(), one()); }},
      {"a compressed state file, over another",
       [](const std::string& directory) {
         write_state_file(directory + "/state", some_config(), one());
         write_state_file(directory + "/state", some_config(), one(), {.zstd_level = 1, .chunk_bytes = 1000});
       }},
      {"a safetensors file", [](const std::string& directory) { write_tensors(directory + "/file", one()); }},
      {"a new workspace",
       [](const std::string& directory) { const Workspace workspace(directory + "/new/deep", single_group()); }},
      {"states of a workspace",
       [](const std::string& directory) {
         const auto group = single_group();
         Workspace workspace(directory + "/workspace", group, {.steps_kept = 5});
         for (int i = 0; i < 2; ++i) workspace.write_configs_and_weights(one()[0].second);
       }},
      {"a directory whose files the seam does not see",
       [](const std::string& directory) {
         OutputDirectory output(directory + "/out");
         write_text(output.partial() + "/model.safetensors", "words");
         fs::create_directory(output.partial() + "/folder");
         write_text(output.partial() + "/folder/file.json", "words");
         output.commit();
       }},
      {"shards",
       [&](const std::string& directory) {
         shard_model(models / "model", directory + "/shards", {.tensor = 2}, "llama");
       }},
      {"an export", [&](const std::string& directory) { exports(directory, false); }},
      {"an export over another",
       [&](const std::string& directory) {
         exports(directory, false);
         exports(directory, true);
       }},
      {"a live export",
       [](const std::string& directory) {
         export_model(part_of("weight", 3), directory + "/exported", "", *single_group());
       }},
      {"a live export unit by unit",
       [](const std::string& directory) {
         export_units({"a", "b"}, directory + "/exported");
       }},
      {"a version with changes, and a full version",
       [&](const std::string& directory) {
         const auto group = single_group();
         Publisher publisher(directory + "/source", {.base = models / "base"}, *group);
         for (const bool is_full : {false, true}) publisher.publish(part_of("weight", 4), {.full = is_full});
       }},
  };
  for (const Publication& publication : publications) {
    CAPTURE(std::string(publication.name));
    const TemporaryDirectory work(Medium::memory);
    const Disk disk;
    publication.write(work.path());
    for (const std::string& loss : disk.losses()) FAIL_CHECK(loss);
    std::size_t files = 0;
    for (const auto& entry : fs::recursive_directory_iterator(work.path())) {
      if (!entry.is_regular_file()) continue;
      ++files;
      // The model knows only the files that the hook has reported.
      CHECK_MESSAGE(disk.has_synced(entry.path().filename()), entry.path().string());
    }
    for (const auto& entry : fs::recursive_directory_iterator(work.path()))
      if (entry.is_directory())
        CHECK_MESSAGE(disk.count("fsync-directory", entry.path().filename().string()) > 0, entry.path().string());
    CHECK(files > 0);
    CHECK(disk.count("fsync-directory", work.path().string()) > 0);
  }
}

TEST_CASE("space for each large file is reserved before its first byte is written") {
  const TemporaryDirectory work(Medium::memory);
  inspect::write_demo_model(llama(), work / "model", 1 << 30);
  const auto has_reserved = [](const Disk& disk, std::string_view file) {
    CHECK(disk.count("fallocate", file) == 1);
    CHECK(disk.count("pwrite", file) >= 1);
  };
  {
    const Disk disk;
    shard_model(work / "model", work / "shards", {.tensor = 2}, "llama");
    for (const char* shard : {"rank-00000-of-00002", "rank-00001-of-00002"}) has_reserved(disk, shard);
  }
  {
    const Disk disk;
    export_model(work / "shards", work / "exported", "llama", *single_group());
    has_reserved(disk, "model.safetensors");
  }
  {
    const Disk disk;
    export_units({"weight"}, work / "units");
    has_reserved(disk, "part-00001");
  }
  const Disk disk;
  write_state_file(work / "state", some_config(), one());
  has_reserved(disk, "/state");
  write_tensors(work / "tensors", one());
  has_reserved(disk, "/tensors");
}
