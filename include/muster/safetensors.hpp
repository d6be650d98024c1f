// SPDX-License-Identifier: Apache-2.0
#pragma once
// safetensors files: SafetensorsFile maps a file and lists its tensors. SafetensorsWriter writes a file in pieces.
// Format: 8 bytes header length (little endian), a JSON header {NAME: {dtype, shape, data_offsets}}, then the bytes of
// the tensors without gaps (huggingface/safetensors).
//
// The format does not include U4, I4, and an odd number of F4 elements. Muster writes such tensors as flat U8 and
// records the real type in `__metadata__`: "muster.dtype.NAME": "U4 [3, 5]". Readers of Muster return the original
// tensor.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/tensor.hpp"

namespace muster {

/// The largest header in bytes. Readers and writers reject larger ones.
inline constexpr std::uint64_t max_safetensors_header = 100'000'000;

/// The description of a tensor in a file.
struct TensorEntry {
  /// The name of the tensor.
  std::string name;
  /// The dtype of the tensor.
  DType dtype = DType::u8;
  /// The shape of the tensor.
  Shape shape = {};
  std::uint64_t offset = 0;  ///< offset of the first byte in the file; writers determine it
  std::uint64_t bytes = 0;   ///< size in the file; writers determine it
};

/// A file that is open for reading. Copies share it. On local file systems the file is mapped, and its tensors are
/// views that keep the mapping alive. If another program truncates the file, accessing them terminates the process
/// (SIGBUS). Thread-safe.
class SafetensorsFile {
 public:
  /// Opens a file and reads only the header. Throws Error(corrupt) with the file, the tensor and the defect;
  /// Error(not_found | io).
  static SafetensorsFile open(const std::string& path);

  /// Returns the path that was opened.
  [[nodiscard]] const std::string& path() const noexcept;
  /// Returns the tensors, ordered by offset in the file.
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept;
  /// Returns `__metadata__`, without the keys "muster.dtype.*".
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept;
  /// Returns the index of a name in tensors(); nullopt if it is missing.
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept;

  /// Returns whether tensors are views of a mapping.
  [[nodiscard]] bool is_mapped() const noexcept;
  /// Returns a tensor as a view of the mapping. It is unaligned if the writer of the file did not align it. On a
  /// network file system, or an unknown one, it is a copy. Throws Error(not_found) if `index` is not less than
  /// tensors().size(), and Error(io | corrupt) if reading fails.
  [[nodiscard]] Tensor tensor(std::size_t index) const;
  /// Returns the tensor with a name. Throws Error(not_found) if it is missing, and as above.
  [[nodiscard]] Tensor tensor(std::string_view name) const;
  /// Reads bytes of a tensor from the file into `target`, starting at byte `offset` of the tensor. Throws
  /// Error(invalid_argument) if the range exceeds the tensor, Error(io), and Error(corrupt) if the file has been
  /// truncated.
  void read(std::size_t index, std::uint64_t offset, std::span<std::byte> target) const;

 private:
  struct Contents;
  explicit SafetensorsFile(std::shared_ptr<const Contents> contents) noexcept;
  std::shared_ptr<const Contents> contents_;
};

/// Writes a file. Names, dtypes and shapes of its tensors are given first. Then their bytes are written in pieces, in
/// any order, from several threads. The file grows next to `path` under a temporary name, and commit() renames it. An
/// existing file is not changed until then.
class SafetensorsWriter {
 public:
  /// Allocates the whole file. Its order is that of the reference writer: descending alignment, then name. Keys
  /// "muster.dtype.*" in `metadata` are dropped. Throws Error(invalid_argument) if a name occurs twice or is
  /// "__metadata__", text is not UTF-8, the header is too long, or `path` is a device, a pipe or a link. Throws
  /// Error(out_of_space | io | not_found).
  SafetensorsWriter(const std::string& path, std::vector<TensorEntry> tensors,
                    std::map<std::string, std::string> metadata = {});
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  /// Deletes the temporary file, unless commit() has succeeded.
  ~SafetensorsWriter();

  /// Returns the tensors in the order of the file, with offsets and sizes.
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept;

  /// Writes bytes of a tensor, starting at byte `offset` of the tensor. Write each byte once. Thread-safe. Throws
  /// Error(not_found) if the name was not announced, Error(invalid_argument) if the range exceeds the tensor,
  /// Error(out_of_space | io).
  void write(std::string_view name, std::uint64_t offset, std::span<const std::byte> bytes);
  /// Writes a whole tensor, which may be strided. Throws also Error(invalid_argument) if its dtype or shape is not the
  /// announced one.
  void write(std::string_view name, const TensorView& tensor);

  /// Completes the file, makes it durable, and renames it. Call it once, after all write() calls have returned. Throws
  /// Error(invalid_argument) if bytes are missing. Throws Error(out_of_space | io); an existing file is then unchanged.
  /// Exception: if only syncing the directory failed, the new file is in place, but a power failure may undo that.
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace muster
