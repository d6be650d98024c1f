// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rank 0's files of an export: merged tensors go straight from the gathered pieces into them.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "muster/gather.hpp"
#include "muster/model_dir.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/export_layout.hpp"
#include "src/checkpoint/shard_files.hpp"

namespace muster {

class ExportWriter {
 public:
  /// `metadata` is that of rank 0's shard. `group` is told about progress: others wait for this rank while it writes.
  ExportWriter(const ExportLayout& layout, const std::string& shards_dir, const std::string& directory,
               std::uint64_t max_shard_size, Metadata metadata, SyncGroup& group);

  /// Checks and writes the merged tensors of one batch, on several threads; batches in their order, one at a time. A
  /// file is closed and synced with its last tensor. Throws Error(rank_mismatch) where tensors that must be the same
  /// are not.
  void write(std::size_t batch, const GatheredConfigs& gathered);
  /// Writes the index and copies the files that are no weights.
  void finish();

  [[nodiscard]] std::uint64_t bytes_in() const noexcept { return bytes_in_; }
  [[nodiscard]] std::uint64_t bytes_out() const noexcept { return bytes_out_; }
  [[nodiscard]] std::uint64_t files() const noexcept { return files_.size(); }

 private:
  /// One file of the output and the tensors [begin, end) of the layout that it has.
  struct File {
    std::string name;
    std::size_t begin = 0;
    std::size_t end = 0;
    std::unique_ptr<SafetensorsWriter> writer = {};
  };
  void open_files(std::size_t end);
  void close_files(std::size_t end);
  [[nodiscard]] TensorEntry entry(std::size_t index) const;
  void write_tensor(const MergedTensor& merged, std::span<const Tensor* const> sources, SafetensorsWriter& writer,
                    std::span<std::byte> buffer);

  const ExportLayout& layout_;
  std::string shards_dir_;
  std::string directory_;
  Metadata metadata_;
  SyncGroup& group_;
  std::vector<File> files_;
  std::string index_;       // empty where one file has all
  std::size_t opened_ = 0;  // files_[closed_, opened_) are being written
  std::size_t closed_ = 0;
  std::vector<std::vector<std::byte>> buffers_;  // one a thread
  std::uint64_t bytes_in_ = 0;
  std::uint64_t bytes_out_ = 0;
};

}  // namespace muster
