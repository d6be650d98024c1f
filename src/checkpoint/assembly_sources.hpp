// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tensors of one process as an assembly reads them: in large pieces where they are mapped files, whose pages it
// does not keep.

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "src/checkpoint/assembly.hpp"

namespace muster {

/// Thread-safe.
class SourceReader {
 public:
  explicit SourceReader(std::span<const AssemblySource> sources) : sources_(sources) {}

  /// Bytes that are there, and may go when this ends.
  class Use {
   public:
    Use(std::span<const std::byte> bytes, bool is_mapped) : bytes_(bytes), is_mapped_(is_mapped) {}
    explicit Use(std::vector<std::byte> read) : read_(std::move(read)), bytes_(read_) {}
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }

   private:
    std::vector<std::byte> read_;
    std::span<const std::byte> bytes_;
    bool is_mapped_ = false;
  };

  /// All from the first to the last byte of a copy. Throws Error(corrupt) where it is outside its tensor, Error(io)
  /// where the file has become shorter or its disk fails.
  [[nodiscard]] Use use(const CopyStep& copy) const;
  /// Carries a copy out; `target` is the window's begin. Throws as use().
  void copy(const CopyStep& copy, std::span<std::byte> window) const;
  [[nodiscard]] TensorHash hash(std::uint32_t set, const CopyStep& part) const;

 private:
  [[nodiscard]] const AssemblySource& source(std::uint32_t tensor) const;
  [[nodiscard]] Use use(const AssemblySource& source, std::uint64_t begin, std::uint64_t bytes) const;
  std::span<const AssemblySource> sources_;
};

}  // namespace muster
