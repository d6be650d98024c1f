// SPDX-License-Identifier: Apache-2.0
#pragma once
// safetensors files: SafetensorsFile maps one and lists its tensors, SafetensorsWriter makes one from pieces.
// Format: 8 bytes header length (little endian), a JSON header {NAME: {dtype, shape, data_offsets}}, then the tensors'
// bytes without holes (huggingface/safetensors).
//
// U4 and I4 are not in that format, nor is an odd number of F4 elements: such tensors are written as flat U8, and
// `__metadata__` says what they are: "muster.dtype.NAME": "U4 [3, 5]". Readers here see the tensor that was written.

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

/// Headers beyond this are refused, by readers and writers everywhere.
inline constexpr std::uint64_t max_safetensors_header = 100'000'000;

/// What a file says of one tensor.
struct TensorEntry {
  std::string name;
  DType dtype = DType::u8;
  Shape shape = {};
  std::uint64_t offset = 0;  ///< of its first byte in the file; writers place it themselves
  std::uint64_t bytes = 0;   ///< likewise
};

/// A file that is open for reading. Copies share it. On local file systems it is also mapped, and its tensors are views
/// of the mapping, which they keep: whoever shortens the file then ends the process that looks at them (SIGBUS).
/// Thread-safe.
class SafetensorsFile {
 public:
  /// Reads the header only. Throws Error(corrupt) that names file, tensor and defect; Error(not_found | io).
  static SafetensorsFile open(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept;
  /// In the order of their bytes in the file.
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept;
  /// `__metadata__`, without the keys "muster.dtype.*".
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept;
  /// The place of a name in tensors().
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept;

  /// Whether tensors are views of a mapping.
  [[nodiscard]] bool is_mapped() const noexcept;
  /// A view of the mapping, not aligned if the file's writer did not align; of a file on a network file system, or on
  /// one that is not known, its bytes. Throws Error(not_found) past the end, Error(io | corrupt) from reading.
  [[nodiscard]] Tensor tensor(std::size_t index) const;
  /// Throws Error(not_found).
  [[nodiscard]] Tensor tensor(std::string_view name) const;
  /// Fills `target` with a tensor's bytes from `offset` on, read from the file. Throws Error(argument) past the
  /// tensor's end; Error(io), and Error(corrupt) if the file has become shorter.
  void read(std::size_t index, std::uint64_t offset, std::span<std::byte> target) const;

 private:
  struct Contents;
  explicit SafetensorsFile(std::shared_ptr<const Contents> contents) noexcept;
  std::shared_ptr<const Contents> contents_;
};

/// Writes a file whose tensors' names, dtypes and shapes are known first; their bytes then come in any order, in
/// pieces, from several threads. It grows beside `path` under another name and takes its name with commit(); a file
/// that was there before stays whole until then.
class SafetensorsWriter {
 public:
  /// Reserves the whole file. The order in the file is the reference writer's: descending alignment, then by name.
  /// Keys "muster.dtype.*" in `metadata` are dropped. Throws Error(argument) on a name twice, "__metadata__" as a name,
  /// text that is not UTF-8, a header that is too long, a `path` that is a device, a pipe or a link; Error(no_space |
  /// io | not_found).
  SafetensorsWriter(const std::string& path, std::vector<TensorEntry> tensors,
                    std::map<std::string, std::string> metadata = {});
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  /// Without commit() nothing is left.
  ~SafetensorsWriter();

  /// As they lie in the file, with offsets and sizes.
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept;

  /// Bytes of a tensor from `offset` (of its own) on; each byte is written once. Thread-safe. Throws Error(not_found)
  /// on a name that was not announced, Error(argument) past the tensor's end; Error(no_space | io).
  void write(std::string_view name, std::uint64_t offset, std::span<const std::byte> bytes);
  /// A whole tensor, strided ones too. Throws also Error(argument) if dtype or shape are not the announced ones.
  void write(std::string_view name, const TensorView& tensor);

  /// Durable when it returns: contents, then name. Once, after all write() have returned. Throws Error(argument) if
  /// bytes are missing; Error(no_space | io), after which the earlier file is untouched, unless syncing the directory
  /// was what failed: then the new one is there, but a power cut may undo it.
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace muster
