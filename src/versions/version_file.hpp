// SPDX-License-Identifier: Apache-2.0
#pragma once
// The files of a version while they are written. Tensors are appended one after the other, because the sizes of deltas
// are not known in advance. The header is written last, into space that was reserved at the beginning of the file. If
// it is much shorter than that, because few tensors have changed, the file is copied without the rest of the space.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/safetensors.hpp"
#include "src/os/file.hpp"
#include "src/versions/delta_codec.hpp"
#include "src/versions/old_version.hpp"
#include "src/versions/version_index.hpp"

namespace muster::versions {

/// A safetensors file whose tensors are appended. Not thread-safe.
class AppendedFile {
 public:
  /// Creates the file; it must not exist. `tensors` are those that may be appended, which decides how much space the
  /// header gets. Throws Error(io | out_of_space).
  AppendedFile(const std::string& path, std::span<const TensorEntry> tensors);
  /// Appends bytes of the tensor that end_tensor() will complete.
  void append(std::span<const std::byte> bytes);
  /// Completes a tensor. Its bytes are all bytes that were appended since the last one. `checksum` is written to the
  /// metadata under its name, unless it is empty.
  void end_tensor(const std::string& name, const TensorSpec& spec, const std::string& checksum);
  /// Writes the header, syncs and closes the file, and digests it. Throws Error(io | out_of_space).
  /// `check` is called after every piece, and may throw.
  FileFacts finish(const std::function<void()>& check);
  [[nodiscard]] bool empty() const noexcept { return tensors_.empty(); }
  /// Returns the number of bytes that the current tensor has so far.
  [[nodiscard]] std::uint64_t tensor_bytes() const noexcept { return end_ - begin_; }
  [[nodiscard]] const std::string& path() const noexcept { return file_.name(); }

 private:
  void flush();
  /// Copies the file to one with a shorter space for the header.
  void shorten(std::uint64_t header_bytes, const std::function<void()>& check);

  os::WritableFile file_;
  std::uint64_t header_bytes_;
  std::uint64_t begin_;    // of the current tensor
  std::uint64_t end_;      // of all appended bytes
  std::uint64_t written_;  // of these, the bytes that were written
  std::vector<std::byte> buffer_;
  std::vector<TensorEntry> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// A tensor of a new version.
struct NewTensor {
  std::string name;
  TensorSpec spec;
  Digest digest;
  std::optional<Digest> old_digest = {};  ///< of its old bytes, if it was requested
  bool is_changed = true;                 ///< it is in the version
  std::uint64_t changed_elements = 0;
};

/// Writes tensor after tensor to a file of a version, from pieces of their new bytes. Not thread-safe.
class VersionWriter {
 public:
  /// `old` has the old bytes, for a delta. `digests_old`: NewTensor::old_digest is requested.
  VersionWriter(const std::string& path, std::span<const TensorEntry> tensors, VersionKind kind, DeltaEncoding encoding,
                const OldVersion* old, bool digests_old);
  VersionWriter& operator=(VersionWriter&&) = delete;
  ~VersionWriter();
  void begin(const TensorEntry& tensor);
  /// Adds the next bytes of the tensor. Throws Error(io | out_of_space), and as FoldedReader.
  void add(std::span<const std::byte> new_bytes);
  void end();
  /// Completes the file. Returns nullopt, and deletes the file, if it has no tensors.
  /// `check` as for AppendedFile.
  std::optional<FileFacts> finish(const std::function<void()>& check);
  [[nodiscard]] const std::string& path() const noexcept { return file_.path(); }
  [[nodiscard]] const std::vector<NewTensor>& tensors() const noexcept { return tensors_; }

 private:
  AppendedFile file_;
  VersionKind kind_;
  const OldVersion* old_;
  bool digests_old_;
  DeltaEncoder encoder_;
  std::vector<std::byte> piece_;
  std::vector<NewTensor> tensors_;
  // The current tensor.
  std::unique_ptr<FoldedReader> reader_;
  Digesting digesting_;
};

}  // namespace muster::versions
