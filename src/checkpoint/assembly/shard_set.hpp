// SPDX-License-Identifier: Apache-2.0
#pragma once
// The metadata of shards.
//
// The metadata of a safetensors file maps names to texts. The config of a state file is a tree. One rule defines the
// conversion in both directions, so that a round trip preserves either (JSON text in its shortest form):
//
//   no metadata                        null
//   {"muster.config": TEXT} alone      the tree of TEXT, if that tree would be written like this
//   any other                          {"metadata": {NAME: TEXT, ...}}

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "muster/config.hpp"
#include "muster/safetensors.hpp"
#include "muster/state_file.hpp"
#include "src/checkpoint/assembly/assembly.hpp"
#include "src/checkpoint/assembly/checksums.hpp"
#include "src/checkpoint/assembly/export_source.hpp"
#include "src/checkpoint/assembly/request.hpp"
#include "src/checkpoint/model/tensor_source.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/shard_metadata.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"
#include "src/workspace/survey.hpp"

namespace muster {

// The shards of ranks as files: the assignment of shards to the processes of a job, and their recorded facts.

/// The tensors of a model's files, states or shards, file by file. Immutable once all files are added; thread-safe.
class FileTensors : public TensorSource {
 public:
  FileTensors() = default;
  explicit FileTensors(std::span<const SafetensorsFile> files) {
    for (const SafetensorsFile& file : files) add(file);
  }
  /// Adds a file. If a shard has checksums, its pieces are verified while they are read.
  void add(const SafetensorsFile& file, const PieceChecksums& sums = {});
  /// Adds a state file; its names get `prefix`.
  void add(const StateFile& file, const std::string& prefix = {});
  /// Adds a third-party checkpoint, or one rank's part of it.
  void add(std::shared_ptr<const TensorSource> source);
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return tensors_; }
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;
  [[nodiscard]] const Omissions& omissions() const noexcept override { return omissions_; }
  /// Adds omissions that are not yet in the list, because the files of several ranks may leave out the same data.
  void add_omissions(const Omissions& more);

 private:
  struct OpenedFile {
    std::size_t first = 0;  // index of its first tensor in the list
    std::variant<SafetensorsFile, StateFile, std::shared_ptr<const TensorSource>> file;
    std::vector<std::shared_ptr<const CheckedTensor>> checked = {};  // by tensor; null: it has no checksums
  };
  [[nodiscard]] std::pair<const OpenedFile*, std::size_t> place_of(std::size_t tensor) const;

  std::vector<OpenedFile> files_;
  std::vector<TensorEntry> tensors_;
  Omissions omissions_;
};

/// The contents of a path, recognised by names, and by the first bytes of a third-party file.
struct PathContents {
  enum class Kind : std::uint8_t {
    other,      ///< none of the others; also a single file of a rank
    workspace,  ///< takes precedence over the other kinds
    foreign,
    shards,  ///< a directory with files of ranks
    model,   ///< a safetensors file, or a directory with such files or an index
  };
  Kind kind = Kind::other;
  std::optional<thirdparty::FoundCheckpoint> foreign = {};

  /// Whether the contents must be merged by a plan.
  [[nodiscard]] bool has_ranks() const noexcept {
    return kind == Kind::workspace || kind == Kind::shards || (foreign && foreign->ranks != 0);
  }
};
/// Throws as thirdparty::find_checkpoint, and Error(io).
PathContents contents_of(const std::string& path, const thirdparty::Choice& choice = {});

/// Returns the number of ranks of a directory of kind shards. Throws as count_shards.
int count_shard_files(const std::string& directory);

/// The processes that read a whole model in Hugging Face's layout.
enum class ModelReaders : std::uint8_t {
  first,  ///< process 0; the others need no access to it
  all,    ///< all: each reads what it writes
};

/// The shards that one process reads: rank, rank + processes, ... There are three sources. Safetensors files of a
/// directory are verified against their checksums while they are read. States of a workspace are those that all ranks
/// have (workspace::choose_common_states). The third source is a third-party checkpoint. A whole model or whole
/// third-party checkpoint counts as the shard of one rank; every process reads a whole third-party checkpoint.
class ShardSet : public FileTensors, public ExportSource {
 public:
  /// Opens the shards. `choice` is for a workspace. Throws Error(not_found | corrupt | io | invalid_argument) that
  /// names the file, and Error(unsupported) if a reader has lost data.
  ShardSet(const std::string& directory, int process, int processes, const workspace::StateChoice& choice = {},
           const thirdparty::Choice& foreign = {}, ModelReaders readers = ModelReaders::first);

  [[nodiscard]] const TensorSource& elements() const noexcept override { return *this; }
  [[nodiscard]] const std::vector<ShardListing>& listings() const noexcept override { return listings_; }
  /// The metadata of the first shard, without the facts of shards.
  [[nodiscard]] const Metadata& metadata() const noexcept override { return metadata_; }
  /// extra_files_of() of the directory. For a third-party checkpoint these are only configs and tokenizers, unless
  /// `carry` names others; if it is one file, the list is empty.
  [[nodiscard]] ExtraFiles carried(const std::string& carry) const override;
  /// Returns the config.json for the request's plans: that of its base, or the one next to the tensors. If that is not
  /// in Hugging Face's format, returns the sizes that a checkpoint of another program has saved, under Hugging Face's
  /// names; a note names their source. Throws as config_of.
  [[nodiscard]] ModelFacts facts(const Request& request, std::vector<std::string>& notes) const override;
  [[nodiscard]] const std::string& whole() const noexcept override { return whole_; }
  /// Verifies the stored bytes of a third-party checkpoint against its own checksums. If all processes have the whole
  /// checkpoint, each verifies a share. Throws Error(corrupt).
  void check_stored() const override;
  /// Among them the omissions that are not lost data.
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept override { return notes_; }
  [[nodiscard]] bool is_lasting() const noexcept override { return true; }

 private:
  void open_foreign(const thirdparty::FoundCheckpoint& found, int process, int processes,
                    const thirdparty::Choice& choice);
  void open_model(const std::string& directory, int process, ModelReaders readers);
  void open_files(const std::string& directory, int process, int processes);
  void open_states(const std::string& workspace, int process, int processes, const workspace::StateChoice& choice);
  template <class Opened>
  void list(const Opened& file, const Metadata& metadata, int rank, std::string set);

  int count_ = 0;  // number of shards of all processes
  std::vector<ShardListing> listings_;
  Metadata metadata_;
  std::vector<std::string> notes_;
  std::string path_;
  std::string whole_;
  // if all processes have everything: this process's number, and the number of processes
  std::pair<int, int> share_ = {0, 1};
  std::optional<thirdparty::FoundCheckpoint> foreign_;
  std::vector<std::shared_ptr<const thirdparty::PartedTensors>> parted_;  // the tensors of a third-party checkpoint
};

}  // namespace muster
