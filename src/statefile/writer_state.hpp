// SPDX-License-Identifier: Apache-2.0
#pragma once
// A state file that is being written. state_file_writer.cpp (tensors) and commit.cpp (all other parts of the file)
// share it.
//
// 1. The file is created under its temporary name; the offsets of uncompressed tensors are known.
// 2. Their bytes are written to these offsets. Compressed chunks are appended after them, one after the other.
// 3. Checksums are updated with bytes that arrive in order. For other bytes the file is read back.
// 4. commit() writes the config, the catalogue and HDF5's structures after the data, and the superblock before it.
// 5. fdatasync. Until then the first 4096 bytes are a hole, so no reader accepts the file as a state.
// 6. The commit mark is written there; fsync, checked close, rename, fsync of the directory (os::OutputFile).

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "muster/state_file.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/core/checksum.hpp"
#include "src/os/publish.hpp"
#include "src/statefile/chunk_codec.hpp"
#include "src/statefile/format.hpp"

namespace muster {
namespace statefile {

/// Writes end at multiples of this offset. The page cache can then use one large block, which makes writing several
/// times cheaper, and a mapping takes one page fault per block.
inline constexpr std::uint64_t write_block = std::uint64_t{2} << 20;

/// The progress of one tensor: the number of bytes that have arrived, and the checksum of those that arrived in order.
/// The other bytes are read back in commit().
class TensorTarget {
 public:
  /// Counts bytes that are in the file now. Any thread may call it.
  void count(std::uint64_t bytes) noexcept { written_.fetch_add(bytes, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t written() const noexcept { return written_.load(std::memory_order_relaxed); }

  /// Adds bytes to the checksum if they are the next ones of `total`. If `stay` is set, the bytes remain in memory
  /// until the file is finished, and are added when their turn comes. Any thread may call it.
  void add_to_checksum(std::uint64_t offset, std::span<const std::byte> bytes, std::uint64_t total, bool stay = false);
  /// Sets the checksum of all bytes, computed elsewhere.
  void set_checksum(std::uint64_t checksum, std::uint64_t total);
  /// The number of bytes, from the first on, that the checksum covers.
  [[nodiscard]] std::uint64_t summed() const noexcept { return summed_; }
  /// The checksum of the first summed() bytes.
  [[nodiscard]] std::uint64_t checksum() const;

  /// Compressed tensors only: the start of a chunk whose rest has not arrived yet. Guarded by mutex().
  struct PartialChunk {
    std::uint64_t chunk = 0;
    std::vector<std::byte> bytes = {};
  };
  [[nodiscard]] ForkMutex& mutex() noexcept { return mutex_; }
  [[nodiscard]] std::optional<PartialChunk>& pending() noexcept { return pending_; }

 private:
  void sum(std::span<const std::byte> bytes, std::uint64_t total);

  std::atomic<std::uint64_t> written_{0};
  ForkMutex mutex_;
  std::uint64_t summed_ = 0;
  std::map<std::uint64_t, std::span<const std::byte>> later_;  // bytes that stay in memory, by their offset
  bool is_summing_ = false;                                    // a thread is adding bytes of later_
  std::optional<std::uint64_t> whole_;                         // the checksum of all bytes if they arrived in one call
  std::unique_ptr<TensorChecksum> sum_;                        // used if they did not
  std::optional<PartialChunk> pending_;
};

// libmuster-hdf5 is loaded when the first state file is written, because libhdf5 and its dependencies take longer to
// load than most commands run.

/// Loads the library if it is not loaded: the one of this version next to libmuster, or else the one on the system's
/// search path. Throws Error(unsupported).
void require_hdf5();

/// Makes the plan's structures. Throws as require_hdf5, and Error(io) with libhdf5's error message.
hdf5::Metadata make_metadata(const hdf5::MetadataPlan& plan);

/// Returns a tensor's name as a link of an HDF5 group. Characters that HDF5 or a terminal would misread are
/// percent-encoded: "/", "%", control characters, and the names "." and "..". Different names give different links.
std::string link_name(std::string_view name);

struct WriterState {
  WriterState(const std::string& path, const Config& config, std::vector<StateFileWriter::Entry> entries,
              const StateFileOptions& options);

  [[noreturn]] void refuse(const StateTensor& tensor, const std::string& words) const;
  /// Throws Error(invalid_argument) once the file is finished or a change of it has failed.
  void require_writing() const;
  /// Runs a function that changes the file. After a failure the contents are unknown, so all later changes are refused.
  /// Wrong arguments are refused before anything has changed.
  template <class Work>
  void change(Work&& work) {
    try {
      work();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::invalid_argument) has_failed = true;
      throw;
    } catch (...) {
      has_failed = true;
      throw;
    }
  }
  /// Throws Error(invalid_argument) if the tensor does not exist or writing has ended.
  const StateTensor& announced(std::size_t index) const;
  void check_announced(std::size_t index, const TensorView& tensor) const;
  [[nodiscard]] ChunkGrid grid(std::size_t index) const;

  /// Writes and counts bytes of an uncompressed tensor; the caller updates the checksum.
  void write_plain(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes);
  /// Writes bytes of any tensor, and updates its checksum if they are the next ones or `stay` in memory. The range is
  /// already checked.
  void write_bytes(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes, bool stay);
  /// Checks a caller's range and bytes, then writes them like write_bytes().
  void write_piece(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes);
  /// Compresses a chunk's elements and appends them after all other chunks. Counts them; the caller updates the
  /// checksum.
  void write_chunk(std::size_t index, const ChunkGrid& grid, std::uint64_t chunk, std::span<const std::byte> elements,
                   ChunkEncoder& encoder);
  void write_compressed(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes, bool stay);

  void commit();

  /// Writes elements to the file, one thread at a time. The kernel serialises writes to one file, and waiting writers
  /// spin, which costs more than the writing. Other threads compress and compute checksums meanwhile.
  void put(std::uint64_t offset, std::span<const std::byte> bytes);

  /// An unused encoder from the pool, made if the pool is empty.
  class BorrowedEncoder {
   public:
    explicit BorrowedEncoder(WriterState& state);
    BorrowedEncoder& operator=(BorrowedEncoder&&) = delete;
    ~BorrowedEncoder();
    [[nodiscard]] ChunkEncoder& operator*() const noexcept { return *encoder_; }

   private:
    WriterState& state_;
    std::unique_ptr<ChunkEncoder> encoder_;
  };

  StateFileOptions options;
  std::string config_text;
  Catalogue catalogue;
  std::unique_ptr<TensorTarget[]> targets;  // one per tensor; they cannot move
  std::atomic<std::uint64_t> data_end;
  os::PublishedFile file;
  ForkMutex file_mutex;  // guards put()
  std::string temporary;
  bool is_committed = false;
  std::atomic<bool> has_failed{false};
  ForkMutex encoders_mutex;
  std::vector<std::unique_ptr<ChunkEncoder>> encoders;
};

}  // namespace statefile

struct StateFileWriter::State : statefile::WriterState {
  using statefile::WriterState::WriterState;
};

}  // namespace muster
