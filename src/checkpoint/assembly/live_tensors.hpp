// SPDX-License-Identifier: Apache-2.0
#pragma once
// LiveTensors: the tensors in the memory of a rank, as the source of an export.

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "muster/group.hpp"
#include "muster/live_export.hpp"
#include "src/checkpoint/assembly/export_source.hpp"
#include "src/os/pages.hpp"

namespace muster {

/// Tensors on the host are read in place. Parts of tensors on a GPU are copied when they are read.
class LiveTensors : public TensorSource, public ExportSource {
 public:
  /// The memory of the parts must outlive this object, until keep() is called. Throws Error(invalid_argument) that
  /// names the tensor.
  LiveTensors(std::span<const TensorPart> parts, Group& group);

  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  [[nodiscard]] std::span<const std::byte> memory(std::size_t tensor) const noexcept override;

  [[nodiscard]] const TensorSource& elements() const noexcept override { return *this; }
  [[nodiscard]] const std::vector<ShardListing>& listings() const noexcept override { return listings_; }
  [[nodiscard]] const Metadata& metadata() const noexcept override { return metadata_; }
  [[nodiscard]] ExtraFiles carried(const std::string& carry) const override;
  [[nodiscard]] ModelFacts facts(const Request& request, std::vector<std::string>& notes) const override;
  [[nodiscard]] const std::string& whole() const noexcept override { return metadata_text_; }
  void check_stored() const override {}
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept override { return notes_; }
  [[nodiscard]] bool is_lasting() const noexcept override { return false; }

  /// Returns the bytes that keep() needs for these tensors.
  [[nodiscard]] std::uint64_t bytes_to_keep(std::span<const std::size_t> tensors) const noexcept;
  /// Copies these tensors to `memory`, and forgets the others. After that the parts are not used any more. Throws as
  /// read().
  void keep(std::span<const std::size_t> tensors, std::span<std::byte> memory);

 private:
  /// Waits for the work that is queued on the caller's streams, because other threads, which do not know them, may read
  /// the tensors.
  void wait_for_streams() const;
  /// Copies a tensor from a GPU, after the work that is queued on the stream of this thread. Thread-safe.
  [[nodiscard]] Tensor copied_to_host(const TensorView& view) const;
  void read_from_device(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const;

  Group* group_;
  mutable std::mutex copying_;  // the streams of a group serve one thread at a time
  std::vector<TensorView> views_;
  std::vector<TensorEntry> entries_;
  std::vector<ShardListing> listings_;
  Metadata metadata_;
  std::string metadata_text_;
  std::vector<std::string> notes_;
};

}  // namespace muster
