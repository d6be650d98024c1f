// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tensors of one process as an assembly reads them: straight into the place where they are wanted, or in large
// pieces.

#include <cstdint>
#include <span>

#include "src/checkpoint/assembly.hpp"

namespace muster {

/// `count` rows of `bytes` each, `from_stride` apart in the source and `to_stride` in the target.
struct RowCopy {
  std::uint64_t from = 0;
  std::uint64_t from_stride = 0;
  std::uint64_t to_stride = 0;
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
};
/// Reads rows that lie inside the source to where `target` begins. Any thread. Throws what the source's `read` throws.
void read_rows(const AssemblySource& source, const RowCopy& rows, std::byte* target);

/// Thread-safe.
class SourceReader {
 public:
  explicit SourceReader(std::span<const AssemblySource> sources) : sources_(sources) {}

  /// Carries a copy out; `target` is the window's begin. Throws Error(corrupt) if it is outside its tensor or the
  /// window, or if the file has become shorter; Error(io).
  void copy(const CopyStep& copy, std::span<std::byte> window) const;
  [[nodiscard]] TensorHash hash(std::uint32_t set, const CopyStep& part) const;

 private:
  [[nodiscard]] const AssemblySource& source(std::uint32_t tensor) const;
  std::span<const AssemblySource> sources_;
};

}  // namespace muster
