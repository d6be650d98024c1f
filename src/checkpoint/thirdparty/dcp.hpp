// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checkpoints of torch.distributed.checkpoint, including Megatron's torch_dist.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>
#include "muster/dtype.hpp"
#include "muster/tensor.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"
#include "src/formats/pickle.hpp"

namespace muster::thirdparty {

/// Returns the names of the metadata files: .metadata, or one per rank; empty if `names` has none.
std::vector<std::string> dcp_metadata_files(const std::vector<std::string>& names);
/// `found.files` are the metadata files. Throws Error(unsupported) if stored data is transformed, and as
/// open_checkpoint.
std::shared_ptr<const PartedTensors> open_dcp(const FoundCheckpoint& found, const Choice& choice,
                                              std::vector<std::string>& notes);
/// Opens shard-*.safetensors files of HuggingFaceStorageWriter, which have no .metadata. Throws as open_checkpoint.
std::shared_ptr<const PartedTensors> open_dcp_shards(const FoundCheckpoint& found);

// The .metadata of torch.distributed.checkpoint, read as nodes of a pickle.

/// A part of a tensor, and its range of a file.
struct DcpChunk {
  Shape begin;
  Shape extents;
  std::uint32_t file = 0;  ///< index among the metadata's files
  std::uint64_t at = 0;
  std::uint64_t bytes = 0;
  bool is_zstd = false;        ///< the range is a zstd stream
  std::uint32_t metadata = 0;  ///< index of the metadata file that names it
};
struct DcpTensor {
  std::string name;
  bool is_flattened = false;  ///< Megatron's flattened_range: its shape differs from that of the tensor that was cut
  DType dtype = DType::u8;
  Shape shape;
  std::vector<DcpChunk> chunks;  ///< without those that have no elements
};

/// The combined metadata of one save.
class DcpMetadata {
 public:
  /// Adds one metadata file. Throws Error(corrupt | unsupported).
  void add(std::span<const std::byte> bytes);
  /// Locates every chunk. Throws Error(corrupt) if one is not stored.
  void finish();
  [[nodiscard]] const std::vector<DcpTensor>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] const std::vector<std::string>& files() const noexcept { return files_; }

 private:
  void add_tensor(const formats::Pickle& pickle, std::string_view name, formats::Pickle::Ref node);
  void add_place(const formats::Pickle& pickle, formats::Pickle::Ref key, formats::Pickle::Ref value);

  std::vector<DcpTensor> tensors_;
  std::unordered_map<std::string, std::size_t> numbers_;  // tensors' indices by name
  std::vector<std::vector<DcpChunk>> places_;             // by tensor; without extents
  std::vector<std::string> files_;
  std::unordered_map<std::string, std::uint32_t> file_numbers_;
  std::uint32_t added_ = 0;  // number of metadata files
};

}  // namespace muster::thirdparty
