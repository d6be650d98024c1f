// SPDX-License-Identifier: Apache-2.0
#pragma once
// State files: the config and weights of one rank in an ordinary HDF5 file, which Muster lists and maps without
// libhdf5. StateFile reads a file. StateFileWriter writes one in pieces, and write_state_file() in one call. Format:
// docs/reference/state-file.md. A file is a state only if the commit mark in its first 4096 bytes is valid.
//
// Creating a file uses libhdf5 briefly, but never for the bytes of tensors. Distributions build libhdf5 without thread
// safety. Muster therefore guards it with a process-wide lock. A program that uses libhdf5 itself must not do so in
// another thread at the same time. Reading does not use libhdf5.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "muster/group.hpp"
#include "muster/progress.hpp"
#include "muster/state.hpp"
#include "muster/tensor.hpp"

namespace muster {

/// Identifies the writer of a state.
struct StateFileInfo {
  Group::Nonce job{};      ///< nonce of the group; distinguishes jobs; zeros: no job
  std::uint64_t step = 0;  ///< increases with the states of a rank in a job: the step of the user, or a count
  /// The rank of the writer.
  int rank = 0;
  /// Number of ranks of the job.
  int world_size = 1;
};

/// The description of a tensor in the catalogue.
struct StateTensor {
  /// The name of the tensor.
  std::string name;
  /// The dtype of the tensor.
  DType dtype = DType::u8;
  /// The shape of the tensor.
  Shape shape = {};
  std::uint64_t bytes = 0;         ///< size of its elements, uncompressed
  std::uint64_t stored_bytes = 0;  ///< size in the file; differs from `bytes` if compressed
  std::uint64_t offset = 0;        ///< offset of its first byte in the file; 0 if it is compressed or has no elements
  bool compressed = false;         ///< stored in chunks: byte shuffle and zstd
  std::uint64_t checksum = 0;      ///< XXH3-64, seed 0, of its elements as they are in memory
};

/// How the bytes of a file are accessed.
enum class FileAccess : std::uint8_t {
  automatic,  ///< mapped on local file systems; read on network file systems, where a mapping may cause SIGBUS
  map,
  read,
};

/// A defect of a state file.
struct StateProblem {
  std::string tensor = {};  ///< empty: the file as a whole
  /// The complete message.
  std::string words = {};
};

/// A complete state file. Copies share it, and tensors may outlive it. Thread-safe.
class StateFile {
 public:
  /// Opens a file with two reads: the commit mark and the catalogue. Both are checked against their checksums and the
  /// length of the file. Throws Error(not_found | io). Throws Error(invalid_argument) if the path is not a regular
  /// file. Throws Error(corrupt) if the file is not a state file, is incomplete or contradicts itself; allocations
  /// never exceed the amount that the length of the file justifies. Throws Error(version) if a newer Muster wrote it.
  /// os_error() is ENODATA if the file is shorter than its commit mark states, or has no mark. It is ESTALE if a server
  /// reports that. On network file systems both may be temporary.
  static StateFile open(const std::string& path, FileAccess access = FileAccess::automatic);
  /// Returns whether a file begins with the magic of a commit mark; it may be incomplete. Throws Error(not_found | io).
  static bool is_state_file(const std::string& path);

  /// Returns the path that was opened.
  [[nodiscard]] const std::string& path() const noexcept;
  /// Returns the identity of the writer.
  [[nodiscard]] const StateFileInfo& info() const noexcept;
  /// Returns the size of the file in bytes.
  [[nodiscard]] std::uint64_t file_bytes() const noexcept;
  /// Returns the version of the format that the file has.
  [[nodiscard]] std::uint32_t format_version() const noexcept;
  /// Returns the tensors in the order in which they were written.
  [[nodiscard]] const std::vector<StateTensor>& tensors() const noexcept;
  /// Returns the index of a name in tensors(); nullopt if it is missing.
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept;

  /// Returns the JSON text of the file. Throws Error(corrupt | io).
  [[nodiscard]] std::string config_text() const;
  /// Returns the config, with {"$tensor": name} in place of each tensor that split() replaced. Throws Error(corrupt |
  /// io).
  [[nodiscard]] Config config() const;

  /// Returns a tensor as a view of the mapping. If the file is read, or the tensor is compressed (several threads
  /// decompress it), it is in new memory. Elements are not checked against the checksum; use check(). Throws
  /// Error(not_found) if `index` is not less than tensors().size(), Error(corrupt) if a chunk is damaged, Error(io),
  /// Error(out_of_space).
  [[nodiscard]] Tensor tensor(std::size_t index) const;
  /// Returns the tensor with a name. Throws Error(not_found) if it is missing, and as above.
  [[nodiscard]] Tensor tensor(std::string_view name) const;
  /// Reads bytes [offset, offset + target.size()) of the elements of a tensor, compressed or not. Throws
  /// Error(invalid_argument) if the range exceeds the tensor, otherwise as tensor().
  void read(std::size_t index, std::uint64_t offset, std::span<std::byte> target) const;
  /// Returns the config and all tensors. Throws as config() and tensor().
  [[nodiscard]] State load() const;

  /// Returns all defects; empty if the file is intact. Several threads compare the metadata, every tensor and every
  /// stored chunk with their checksums. They work in pieces and release the pages of each piece. If `selects` is set,
  /// only tensors for whose name it returns true are read.
  [[nodiscard]] std::vector<StateProblem> check(const ProgressCallback& progress = {},
                                                const std::function<bool(std::string_view)>& selects = {}) const;

 private:
  struct Contents;
  explicit StateFile(std::shared_ptr<const Contents> contents) noexcept;
  std::shared_ptr<const Contents> contents_;
};

/// Options of writing a state file.
struct StateFileOptions {
  /// The identity of the writer.
  StateFileInfo info = {};
  /// The zstd compression level (1 is suitable for weights). Unset: no compression.
  std::optional<int> zstd_level = {};
  /// Bytes of a compressed chunk before compression, rounded to whole rows; at most 64 MiB.
  std::uint64_t chunk_bytes = 1 << 20;
  /// False: readers still see only complete files, but a power failure may lose the file.
  bool durable = true;
  /// The temporary name of the file in its directory. Empty: a unique name.
  std::string temporary = {};
};

/// Writes a state file. Names, dtypes and shapes are given first. Then the bytes are written in pieces, in any order,
/// from several threads. The file grows next to `path`, and commit() renames it. An existing file is not changed until
/// then. After any exception except Error(invalid_argument), the writer cannot be used: every later call throws
/// Error(invalid_argument).
class StateFileWriter {
 public:
  /// The name, dtype and shape of a tensor to be written.
  struct Entry {
    std::string name;  ///< UTF-8, without NUL, not empty, unique
    /// The dtype of the tensor.
    DType dtype = DType::u8;
    /// The shape of the tensor.
    Shape shape = {};
  };
  /// Creates the temporary file. `config` must not contain tensors. Throws Error(invalid_argument) if a name, a shape
  /// (at most 32 dimensions) or the compression level is invalid. Throws Error(out_of_space | io | not_found), and
  /// Error(unsupported) if libmuster-hdf5 cannot be loaded.
  StateFileWriter(const std::string& path, const Config& config, std::vector<Entry> tensors,
                  const StateFileOptions& options = {});
  StateFileWriter(StateFileWriter&&) noexcept;
  StateFileWriter& operator=(StateFileWriter&&) noexcept;
  /// Deletes the temporary file, unless commit() has succeeded.
  ~StateFileWriter();

  /// Writes bytes of a tensor, starting at byte `offset` of the tensor. Write each byte once. Pieces of a compressed
  /// tensor start and end at chunk boundaries, or are written in ascending order. Thread-safe. Throws
  /// Error(invalid_argument) if the range exceeds the tensor; Error(out_of_space | io).
  void write(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes);
  /// Writes a whole tensor, which may be strided. Throws also Error(invalid_argument) if its dtype or shape is not the
  /// announced one.
  void write(std::size_t index, const TensorView& tensor);
  /// Writes all tensors, in the announced order, on all cores. Throws as write().
  void write_all(std::span<const TensorView> tensors, const ProgressCallback& progress = {});

  /// Returns the offset of a tensor in temporary_path(), for processes that write its bytes themselves; nullopt if it
  /// is compressed. Call mark_written() when the bytes are written. commit() then reads them to compute the
  /// checksum.
  [[nodiscard]] std::optional<std::uint64_t> file_offset(std::size_t index) const;
  /// Returns the path of the temporary file.
  [[nodiscard]] const std::string& temporary_path() const noexcept;
  /// Declares that other processes have written all bytes of this tensor.
  void mark_written(std::size_t index);

  /// Completes the file, makes it durable (StateFileOptions::durable), and renames it. The order is: data, catalogue,
  /// commit mark, name. Call it once. Throws Error(invalid_argument) if bytes are missing. Throws Error(out_of_space |
  /// io); an existing file is then unchanged. Exception: if only syncing the directory failed, the new file is in
  /// place, but a power failure may undo that.
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Writes a state file in one call, on all cores. Local. Throws as StateFileWriter. An exception of `progress` is
/// passed on, and an existing file is then unchanged.
void write_state_file(const std::string& path, const Config& config, std::span<const NamedTensor> weights,
                      const StateFileOptions& options = {}, const ProgressCallback& progress = {});

}  // namespace muster
