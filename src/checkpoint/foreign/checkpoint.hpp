// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checkpoints that others' programs wrote, told by what is in their files: docs/checkpoints.md. Nothing of them is run.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "muster/parallel_layout.hpp"
#include "src/checkpoint/foreign/parted_tensors.hpp"
#include "src/checkpoint/model_files.hpp"

namespace muster::foreign {

enum class Kind : std::uint8_t {
  torch,        ///< one file of torch.save
  torch_model,  ///< a directory with pytorch_model*.bin
  dcp,          ///< torch.distributed.checkpoint, Megatron's torch_dist
  dcp_shards,   ///< its HuggingFaceStorageWriter's shard-*.safetensors
  fsdp,         ///< model_world_size_W_rank_R.pt
  ranks,        ///< files of ranks that a plan merges
  deepspeed,    ///< ZeRO's optimizer states
};
/// "torch", "dcp" ...: what --json says.
std::string_view kind_name(Kind kind) noexcept;

/// What of a checkpoint is meant, where it cannot be told.
struct Choice {
  /// Of torch.save: the key that has the weights; of torch.distributed.checkpoint the first words of their names.
  std::string at = {};
  /// Of files of ranks: their names, with {rank} for the number.
  std::string shards = {};
};

/// A checkpoint that has been recognised, not opened.
struct Found {
  Kind kind = Kind::torch;
  std::string path = {};                               ///< the file, or the directory that has the files
  std::vector<std::string> files = {};                 ///< names in it
  std::vector<std::vector<std::string>> by_rank = {};  ///< likewise, of ranks whose tensors a plan merges
  int ranks = 0;                                       ///< whose tensors a plan has to merge; 0: it is whole
  std::optional<ParallelLayout> layout = {};           ///< of the ranks, where their names say it
  std::optional<Config> config = {};                   ///< the config.json beside them, if it is no HuggingFace one
};
/// None if the path has no such checkpoint. Throws Error(argument) if a directory has two kinds, and what is missing
/// of one: Error(not_found).
std::optional<Found> find_checkpoint(const std::string& path, const Choice& choice = {});
/// Likewise, of a directory that has been listed.
std::optional<Found> find_in_directory(const std::string& directory, const DirectoryNames& listed,
                                       const Choice& choice);

/// All tensors of a whole checkpoint, or those of a rank. What people should know goes to `notes`. Throws
/// Error(corrupt | unsupported | not_found | io), with the file.
std::shared_ptr<const PartedTensors> open_checkpoint(const Found& found, int rank, const Choice& choice,
                                                     std::vector<std::string>& notes);

}  // namespace muster::foreign
