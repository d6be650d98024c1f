// SPDX-License-Identifier: Apache-2.0
#pragma once
// Recognises and reads checkpoints of other programs by the contents of their files: docs/reference/exports.md. Nothing
// in them is executed.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "muster/parallel_layout.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/thirdparty/parted_tensors.hpp"

namespace muster::thirdparty {

enum class CheckpointKind : std::uint8_t {
  torch,        ///< one file of torch.save
  torch_model,  ///< a directory with pytorch_model*.bin
  dcp,          ///< torch.distributed.checkpoint, Megatron's torch_dist
  dcp_shards,   ///< shard-*.safetensors of its HuggingFaceStorageWriter
  fsdp,         ///< model_world_size_W_rank_R.pt
  ranks,        ///< files of ranks that a plan merges
  deepspeed,    ///< optimizer states of ZeRO
};
/// Returns "torch", "dcp" ..., the names in the output of --json.
std::string_view kind_name(CheckpointKind kind) noexcept;

/// Selects a part of a checkpoint if the files alone are ambiguous.
struct Choice {
  /// torch.save: the key of the weights. torch.distributed.checkpoint: the prefix of their names.
  std::string key = {};
  /// Files of ranks: their names, with {rank} for the number.
  std::string file_pattern = {};
};

/// A checkpoint that has been recognised, but not opened.
struct FoundCheckpoint {
  CheckpointKind kind = CheckpointKind::torch;
  std::string path = {};                               ///< the file, or the directory of the files
  std::vector<std::string> files = {};                 ///< names in the directory
  std::vector<std::vector<std::string>> by_rank = {};  ///< names in the directory, by rank, if a plan merges the ranks
  int ranks = 0;                              ///< number of ranks that a plan must merge; 0: it is self-describing
  std::optional<ParallelLayout> layout = {};  ///< the layout of the ranks, if file names give it
  std::optional<Config> config = {};          ///< the config.json next to them, if it is not in Hugging Face's format
};
/// Returns nullopt if the path has no such checkpoint. Throws Error(invalid_argument) if a directory has two kinds, and
/// Error(not_found) if a part of one is missing.
std::optional<FoundCheckpoint> find_checkpoint(const std::string& path, const Choice& choice = {});
/// Searches as find_checkpoint, in a directory that has already been listed.
std::optional<FoundCheckpoint> find_in_directory(const std::string& directory, const DirectoryNames& listed,
                                                 const Choice& choice);

/// Opens all tensors of a self-describing checkpoint, or those of one rank. `notes` gets facts for the user. Throws
/// Error(corrupt | unsupported | not_found | io), with the file.
std::shared_ptr<const PartedTensors> open_checkpoint(const FoundCheckpoint& found, int rank, const Choice& choice,
                                                     std::vector<std::string>& notes);

}  // namespace muster::thirdparty
