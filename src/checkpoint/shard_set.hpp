// SPDX-License-Identifier: Apache-2.0
#pragma once
// What stands in the metadata of shards.
//
// The metadata of a safetensors file, which is texts by name, also becomes the config of a state file, which is a tree,
// and comes back. Both ways are one rule, so that either comes back as it was (JSON text in its shortest form):
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
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/assembly.hpp"
#include "src/checkpoint/checksums.hpp"
#include "src/checkpoint/foreign/checkpoint.hpp"
#include "src/checkpoint/request.hpp"
#include "src/checkpoint/tensor_source.hpp"
#include "src/workspace/survey.hpp"

namespace muster {

/// The metadata of a safetensors file.
using Metadata = std::map<std::string, std::string>;

/// The key of a shard's facts: JSON text, {"version": 1, "rank": 2, "ranks": 4, "layout": "tp=2,pp=2,ep=1", "plan":
/// {"name": NAME, "text": JSON}, "padded": {NAME: [DIM, SIZE]}, "heads": {NAME: [COUNT, ...]}, "blocked": {NAME: [DIM,
/// BEGIN, BLOCK]}}. With "heads" or "blocked" the version is 2, which muster 0.1.0 refuses; that wrote neither, and no
/// "plan".
inline constexpr std::string_view shard_metadata_key = "muster.shard";

/// A plan as a shard keeps it; empty: it does not say.
struct PlanText {
  std::string name;
  std::string text;
  friend bool operator==(const PlanText&, const PlanText&) = default;
};

/// The plan of what is whole already.
inline constexpr std::string_view as_it_is = "as it is";

struct ShardFacts {
  int rank = 0;
  int ranks = 0;
  PaddedSizes padded;
  std::optional<ParallelLayout> layout = {};  ///< none: it does not say
  PlanText plan = {};
  HeadCounts heads = {};
  BlockedParts blocked = {};

  /// It is no shard, but a whole model.
  [[nodiscard]] bool is_whole() const noexcept { return plan.name == as_it_is; }
};
std::string shard_facts_text(const ShardFacts& facts);
/// Empty if the metadata has none (a shard that other hands made). Throws Error(corrupt | version).
std::optional<ShardFacts> parse_shard_facts(const Metadata& metadata);

inline constexpr std::string_view config_metadata_key = "muster.config";

/// Pure. Text under "muster.config" that is no JSON is a text like others.
Config config_from_metadata(const Metadata& metadata);

/// metadata_from_config(config_from_metadata(m)) == m, up to the white space of a config's text, and
/// config_from_metadata(metadata_from_config(c)) == c. Throws Error(argument) if a leaf is a tensor.
Metadata metadata_from_config(const Config& config);

/// The same for a file that other programs load: with {"format": "pt"}, unless the config is another file's metadata.
Metadata metadata_for_conversion(const Config& config);
/// Back again: the config that was written by metadata_for_conversion, else config_from_metadata.
Config config_from_converted(Metadata metadata);

// The shards of ranks as files: which process of a job reads which, and what they say of themselves.

/// What a shard is without its elements: as it travels to the first process.
struct ShardListing {
  int rank = 0;
  std::vector<NamedSpec> tensors = {};
  std::optional<ShardFacts> facts = {};       ///< that it says of itself
  std::string identity = {};                  ///< tells the file from others and from itself before a change
  std::string set = {};                       ///< of a workspace: the job and the generation, the same for all ranks
  std::optional<ParallelLayout> layout = {};  ///< that names of files say, where the shard does not
};
RankTensors to_rank_tensors(ShardListing listing);

Config to_config(const ShardListing& listing);
/// Throws Error(corrupt) if it is no listing.
ShardListing listing_from_config(const Config& config);

/// Of all ranks' shards: `given`, else what they say of themselves, else tensor parallelism alone. Throws
/// Error(argument) if the given one has another number of ranks, Error(rank_mismatch) if they do not say the
/// same.
ParallelLayout layout_of(const std::vector<ShardListing>& listings, const std::optional<ParallelLayout>& given);

/// The plan that they are merged by: `given` (as MergePlan::load takes it), else the one that they were cut by. A note
/// says so if both are there and differ. Throws Error(rank_mismatch) if they were not cut by one plan, Error(argument)
/// if there is neither, and as MergePlan::load.
MergePlan plan_of(const std::vector<ShardListing>& listings, const std::string& given, const Config* model_config,
                  std::vector<std::string>& notes);

/// The tensors of files, one file after the other: a model's, states', or shards'. Immutable once all are added;
/// thread-safe.
class FileTensors : public TensorSource {
 public:
  /// A shard that says its checksums is held against them as it is read.
  void add(const SafetensorsFile& file, const PieceChecksums& sums = {});
  /// Names get `prefix`.
  void add(const StateFile& file, const std::string& prefix = {});
  /// Of a foreign checkpoint, or what a rank has of one.
  void add(std::shared_ptr<const TensorSource> source);
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return tensors_; }
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;
  [[nodiscard]] const Omissions& omissions() const noexcept override { return omissions_; }
  /// Adds those that are not in the list yet: the files of several ranks leave out the same.
  void add_omissions(const Omissions& more);

 private:
  struct File {
    std::size_t first = 0;  // of its tensors, among all
    std::variant<SafetensorsFile, StateFile, std::shared_ptr<const TensorSource>> file;
    std::vector<std::shared_ptr<const CheckedTensor>> checked = {};  // by tensor; null: it has no checksums
  };
  [[nodiscard]] std::pair<const File*, std::size_t> place_of(std::size_t tensor) const;

  std::vector<File> files_;
  std::vector<TensorEntry> tensors_;
  Omissions omissions_;
};

/// What is at a path: told by names, and by the first bytes of a foreign file.
struct Contents {
  enum class Kind : std::uint8_t {
    other,      ///< none of these; one file of a rank, too
    workspace,  ///< whatever else is in it
    foreign,
    shards,  ///< a directory with files of ranks
    model,   ///< a safetensors file, or a directory that has some or an index
  };
  Kind kind = Kind::other;
  std::optional<foreign::Found> foreign = {};

  /// Whether a plan has to merge what is there.
  [[nodiscard]] bool has_ranks() const noexcept {
    return kind == Kind::workspace || kind == Kind::shards || (foreign && foreign->ranks != 0);
  }
};
/// Throws as foreign::find_checkpoint, and Error(io).
Contents contents_of(const std::string& path, const foreign::Choice& choice = {});

/// The config.json of the request's base, or, without one, of its path. Throws Error(not_found) if the base has none.
std::optional<Config> config_of(const Request& request);

/// The ranks of a directory of kind shards. Throws as count_shards.
int count_shard_files(const std::string& directory);

/// What is known of a model beside its tensors.
struct ModelFacts {
  std::optional<Config> config = {};  ///< for plans; none: nothing is known
  bool is_own = false;                ///< it is a config.json that programs load with the model
};

/// The shards that one process reads: rank, rank + processes, ... They are safetensors files of a directory, which are
/// held against their checksums as they are read, the states of a workspace that all ranks have
/// (workspace::choose_common_states), or those of a foreign checkpoint. If that, or a model, is whole it is the shard
/// of one rank, and every process reads of a foreign one.
class ShardSet : public FileTensors {
 public:
  /// Opens them. `choice`: of a workspace. Throws Error(not_found | corrupt | io | argument) that names the file, and
  /// Error(unsupported) if a reader has lost data.
  ShardSet(const std::string& directory, int process, int processes, const workspace::StateChoice& choice = {},
           const foreign::Choice& foreign = {});

  [[nodiscard]] const std::vector<ShardListing>& listings() const noexcept { return listings_; }
  /// Of the first of them; without what says that it is a shard.
  [[nodiscard]] const Metadata& metadata() const noexcept { return metadata_; }
  /// Files beside the weights that go along: carried_files() of the directory; of a foreign checkpoint configs and
  /// tokenizers alone, unless `carry` names others, and none if it is one file.
  [[nodiscard]] CarriedFiles carried(const std::string& carry) const;
  /// The config.json that counts for the request's plans: that of its base, or the one beside the tensors. If that is
  /// none of HuggingFace's, the sizes that a checkpoint of another program has saved, under its names; a note names
  /// their source. Throws as config_of.
  [[nodiscard]] ModelFacts facts(const Request& request, std::vector<std::string>& notes) const;
  /// Not empty: all processes have all tensors, and have to have the same of this.
  [[nodiscard]] const std::string& whole() const noexcept { return whole_; }
  /// Holds what a foreign checkpoint stores against its own checksums; where all processes have all of it, a share
  /// each. Throws Error(corrupt).
  void check_stored() const;
  /// Facts that the user of the result should know, among them the omissions that are no loss.
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept { return notes_; }

 private:
  void open_foreign(const foreign::Found& found, int process, int processes, const foreign::Choice& choice);
  void open_model(const std::string& directory);
  void open_files(const std::string& directory, int process, int processes);
  void open_states(const std::string& workspace, int process, int processes, const workspace::StateChoice& choice);
  template <class Opened>
  void list(const Opened& file, const Metadata& metadata, int rank, std::string set);

  int count_ = 0;  // of all processes' shards
  std::vector<ShardListing> listings_;
  Metadata metadata_;
  std::vector<std::string> notes_;
  std::string path_;
  std::string whole_;
  std::pair<int, int> share_ = {0, 1};  // of what all processes have: this one's number, and how many there are
  std::optional<foreign::Found> foreign_;
  std::vector<std::shared_ptr<const foreign::PartedTensors>> parted_;  // of it
};

}  // namespace muster
