// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors that are read when they are wanted: a model, the shards of ranks, or what a merge gives, without the whole
// ever being in memory. Export, shard, diff and everything that looks at tensors read through this.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/model_dir.hpp"
#include "muster/safetensors.hpp"
#include "src/merge/layout.hpp"
#include "src/merge/rows.hpp"

namespace muster {

/// What a source knows of a tensor beside its name, dtype, shape and bytes.
struct TensorDetail {
  std::string_view file = {};      ///< that it is in, as long as the source; empty: several, or not known
  std::uint64_t stored_bytes = 0;  ///< in the file
  bool is_compressed = false;
  std::optional<std::uint64_t> checksum = {};  ///< XXH3-64 of its elements, as the file says
};

/// Immutable; thread-safe.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  /// Name, dtype, shape and bytes of each.
  [[nodiscard]] virtual const std::vector<TensorEntry>& tensors() const noexcept = 0;
  /// Fills `target` with a tensor's bytes from `offset` on, which are there. Files are read, not mapped: a mapping
  /// would end the process (SIGBUS) if somebody shortens the file. Throws Error(io), and Error(corrupt) if a file has
  /// become shorter.
  virtual void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const = 0;
  [[nodiscard]] virtual TensorDetail detail(std::size_t tensor) const {
    return {.stored_bytes = tensors()[tensor].bytes};
  }
  /// The same bytes in `memory`, which grows where it is too short. Valid until it changes.
  std::span<const std::byte> read_piece(std::size_t tensor, std::uint64_t offset, std::uint64_t length,
                                        std::vector<std::byte>& memory) const;
};

/// A model's tensors.
class ModelTensors : public TensorSource {
 public:
  explicit ModelTensors(ModelDir model) : model_(std::move(model)) {}
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return model_.tensors(); }
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override {
    model_.read(tensor, offset, target);
  }
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override {
    return {.file = model_.file_of(tensor).path(), .stored_bytes = model_.tensors()[tensor].bytes};
  }

 private:
  ModelDir model_;
};

/// Reads rows of a tensor, of which they are counted from the byte `begin` on, to their places in `target`. Throws
/// Error(corrupt) if they are outside of either, and as the source.
void read_rows(const TensorSource& source, std::size_t tensor, std::uint64_t begin, const merge::Rectangle& rows,
               std::span<std::byte> target);

/// A part of a tensor of a source.
struct TensorPart {
  int rank = 0;  ///< whose it is, for messages
  std::size_t tensor = 0;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
};

/// A tensor that is put together from others.
struct MergedTensor {
  std::string name;
  merge::Layout layout;
  std::vector<TensorPart> parts;                              ///< those that the layout speaks of
  std::vector<std::pair<TensorPart, TensorPart>> equal = {};  ///< must be bit for bit equal
};

/// Merges what is read, when it is read: memory is that of the pieces. Bytes that no part has are zero. What is read
/// begins and ends with elements.
class MergedTensors : public TensorSource {
 public:
  /// Throws Error(unsupported | argument) if a layout has no bytes (merge/rows.hpp).
  MergedTensors(std::shared_ptr<const TensorSource> source, std::vector<MergedTensor> tensors);
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  /// Throws also Error(rank_mismatch) if ranks that must have the same values do not.
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;

 private:
  void compare(std::size_t tensor, std::uint64_t offset, std::uint64_t length) const;

  std::shared_ptr<const TensorSource> source_;
  std::vector<MergedTensor> tensors_;
  std::vector<merge::Rows> rows_;
  std::vector<TensorEntry> entries_;
};

}  // namespace muster
