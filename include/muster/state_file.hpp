// SPDX-License-Identifier: Apache-2.0
#pragma once
// State files: one rank's config and weights in an ordinary HDF5 file that this library lists and maps without libhdf5.
// StateFile reads one, StateFileWriter makes one from pieces, write_state_file does it in one call.
// Format: docs/state-file.md. A file is a state only when its commit mark, the first 4096 bytes, says so and is right.
//
// Making a file uses libhdf5 for a moment (never for the tensors' bytes). libhdf5 is not thread-safe as distributions
// build it: here one process-wide lock guards it; a program that uses libhdf5 itself must not do so at the same time in
// another thread. Reading never uses it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "muster/progress.hpp"
#include "muster/state.hpp"
#include "muster/sync_group.hpp"
#include "muster/tensor.hpp"

namespace muster {

/// Whose state it is.
struct StateFileInfo {
  SyncGroup::Nonce job{};        ///< the group's nonce: tells one job's files from another's; zeros: of no job
  std::uint64_t generation = 0;  ///< grows with a rank's states of one job: the user's step, or a count
  int rank = 0;
  int world_size = 1;
};

/// What the catalogue says of one tensor.
struct StateTensor {
  std::string name;
  DType dtype = DType::u8;
  Shape shape = {};
  std::uint64_t bytes = 0;         ///< of its elements, uncompressed
  std::uint64_t stored_bytes = 0;  ///< in the file; other than `bytes` where it is compressed
  std::uint64_t offset = 0;        ///< of its first byte in the file; 0 if it is compressed or has no elements
  bool compressed = false;         ///< in chunks: byte shuffle and zstd
  std::uint64_t checksum = 0;      ///< XXH3-64, seed 0, of its elements as they are in memory
};

/// How the bytes of a file are brought in.
enum class FileAccess : std::uint8_t {
  automatic,  ///< mapped on local file systems, read on network ones, where a mapping may end in SIGBUS
  map,
  read,
};

/// What is wrong with a state file.
struct StateProblem {
  std::string tensor = {};  ///< empty: the file as a whole
  std::string words = {};
};

/// A complete state file. Copies share it; tensors outlive it. Thread-safe.
class StateFile {
 public:
  /// Two reads: the commit mark and the catalogue; both are checked against their checksums and the file's length.
  /// Throws Error(not_found | io); Error(argument) if it is no regular file; Error(corrupt) if it is no state
  /// file, is not complete or contradicts itself (nothing is allocated that the file's own length does not justify);
  /// Error(version) if a newer Muster wrote it. os_error() is ENODATA if the file is shorter than its mark says
  /// or has none (yet), and ESTALE if a server says so: on network file systems either may pass.
  static StateFile open(const std::string& path, FileAccess access = FileAccess::automatic);
  /// Whether a file begins with the magic of a commit mark: complete or not. Throws Error(not_found | io).
  static bool is_state_file(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept;
  [[nodiscard]] const StateFileInfo& info() const noexcept;
  [[nodiscard]] std::uint64_t file_bytes() const noexcept;
  [[nodiscard]] std::uint32_t format_version() const noexcept;
  /// In the order in which they were written.
  [[nodiscard]] const std::vector<StateTensor>& tensors() const noexcept;
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept;

  /// The JSON text as it is in the file. Throws Error(corrupt | io).
  [[nodiscard]] std::string config_text() const;
  /// The tree, with {"$tensor": name} where split() took a tensor out. Throws Error(corrupt | io).
  [[nodiscard]] Config config() const;

  /// A tensor: of the mapping, or of fresh memory where the file is read or the tensor is compressed (then several
  /// threads work). Elements are not compared with the checksum: check() does. Throws Error(not_found) past the end,
  /// Error(corrupt) on chunks that are not what was written, Error(io), Error(no_space).
  [[nodiscard]] Tensor tensor(std::size_t index) const;
  [[nodiscard]] Tensor tensor(std::string_view name) const;
  /// Bytes [offset, offset + target.size()) of a tensor's elements, whatever it is stored as. Throws Error(argument)
  /// if that is not inside, else as tensor().
  void read(std::size_t index, std::uint64_t offset, std::span<std::byte> target) const;
  /// Config and all tensors.
  [[nodiscard]] State load() const;

  /// Everything that is wrong: metadata against its checksum, every tensor (and every stored chunk) against its
  /// checksum, by several threads, in pieces whose pages are given back. Empty: the file is what was written.
  [[nodiscard]] std::vector<StateProblem> check(const ProgressCallback& progress = {}) const;

 private:
  struct Contents;
  explicit StateFile(std::shared_ptr<const Contents> contents) noexcept;
  std::shared_ptr<const Contents> contents_;
};

struct StateFileOptions {
  StateFileInfo info = {};
  /// zstd's level (1 is right for weights); none: not compressed.
  std::optional<int> zstd_level = {};
  /// Of a compressed chunk before compression, rounded to whole rows; at most 64 MiB.
  std::uint64_t chunk_bytes = 1 << 20;
  /// False: whole for every reader when it has its name, but not safe from a power cut.
  bool durable = true;
  /// The name it grows under, in the directory of the file; empty: one that nobody else uses.
  std::string temporary = {};
};

/// Names, dtypes and shapes are known first; bytes come in any order, in pieces, from several threads. The file grows
/// beside `path` and takes its name with commit(); a file that was there before stays whole until then. A writer that
/// has thrown anything but Error(argument) takes nothing more: every later call is Error(argument).
class StateFileWriter {
 public:
  struct Entry {
    std::string name;  ///< UTF-8, no NUL, not empty, unique
    DType dtype = DType::u8;
    Shape shape = {};
  };
  /// `config` has no tensors. Throws Error(argument) on names, shapes (at most 32 dimensions) or levels that cannot be;
  /// Error(no_space | io | not_found); Error(unsupported) if libmuster-hdf5 cannot be loaded.
  StateFileWriter(const std::string& path, const Config& config, std::vector<Entry> tensors,
                  const StateFileOptions& options = {});
  StateFileWriter(StateFileWriter&&) noexcept;
  StateFileWriter& operator=(StateFileWriter&&) noexcept;
  /// Without commit() nothing is left.
  ~StateFileWriter();

  /// Bytes of a tensor from `offset` (of its own) on; each byte is written once. Pieces of a compressed tensor begin
  /// and end at its chunks' borders or come in ascending order. Thread-safe. Throws Error(argument) past the tensor's
  /// end; Error(no_space | io).
  void write(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes);
  /// A whole tensor, strided ones too. Throws also Error(argument) if dtype or shape are not the announced ones.
  void write(std::size_t index, const TensorView& tensor);
  /// Several whole tensors, one a place of the list that was announced, by all cores. Throws as write.
  void write_all(std::span<const TensorView> tensors, const ProgressCallback& progress = {});

  /// Where a tensor's bytes belong in temporary_path(), for processes that write them by themselves; none if it is
  /// compressed. Their bytes are read back for the checksum by commit(), once written_elsewhere() has said
  /// that they are there.
  [[nodiscard]] std::optional<std::uint64_t> place(std::size_t index) const;
  [[nodiscard]] const std::string& temporary_path() const noexcept;
  /// All bytes of this tensor have been written by others.
  void written_elsewhere(std::size_t index);

  /// Durable when it returns (StateFileOptions::durable): data, catalogue, commit mark, name. Once. Throws
  /// Error(argument) if bytes are missing; Error(no_space | io), after which an earlier file is untouched, unless
  /// syncing the directory was what failed: then the new one is there, but a power cut may undo it.
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The whole in one call: weights are written by all cores. Throws as StateFileWriter, and what `progress` throws: then
/// an earlier file is untouched.
void write_state_file(const std::string& path, const Config& config, std::span<const NamedTensor> weights,
                      const StateFileOptions& options = {}, const ProgressCallback& progress = {});

}  // namespace muster
