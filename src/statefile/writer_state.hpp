// SPDX-License-Identifier: Apache-2.0
#pragma once
// A state file in the making, shared by the writer's files: state_file_writer.cpp (tensors), commit.cpp (everything
// else of the file).
//
// 1. The file is created under its temporary name; the places of uncompressed tensors are known.
// 2. Their bytes are written where they belong. Compressed chunks are put one after the other behind them.
// 3. Checksums grow with the bytes that come in order; for others the file is read back.
// 4. commit(): config, catalogue and HDF5's structures are written behind the data, the superblock before it.
// 5. fdatasync. Until here the first 4096 bytes are a hole: no reader takes the file for a state.
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

/// Writes end where these begin in the file: the page cache takes such a block in one piece then, which makes writing
/// several times cheaper, and touching a mapping of it a page fault a block.
inline constexpr std::uint64_t write_block = std::uint64_t{2} << 20;

/// What a writer knows of one tensor whose bytes are coming in: how many are there, and the checksum of those that came
/// in their order. The others are read back in the end.
class TensorTarget {
 public:
  /// Bytes that are in the file now. Any thread.
  void count(std::uint64_t bytes) noexcept { written_.fetch_add(bytes, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t written() const noexcept { return written_.load(std::memory_order_relaxed); }

  /// Takes them in if they are the next ones of `total`; those that `stay` where they are until the file is finished,
  /// when their turn comes. Any thread.
  void add_to_checksum(std::uint64_t offset, std::span<const std::byte> bytes, std::uint64_t total, bool stay = false);
  /// The checksum of all bytes, known from elsewhere.
  void set_checksum(std::uint64_t checksum, std::uint64_t total);
  /// How many bytes, from the first on, the checksum has.
  [[nodiscard]] std::uint64_t summed() const noexcept { return summed_; }
  /// Of the summed() bytes.
  [[nodiscard]] std::uint64_t checksum() const;

  /// Of a compressed tensor: the beginning of a chunk whose rest has not come yet. Used under mutex().
  struct Pending {
    std::uint64_t chunk = 0;
    std::vector<std::byte> bytes = {};
  };
  [[nodiscard]] ForkMutex& mutex() noexcept { return mutex_; }
  [[nodiscard]] std::optional<Pending>& pending() noexcept { return pending_; }

 private:
  void sum(std::span<const std::byte> bytes, std::uint64_t total);

  std::atomic<std::uint64_t> written_{0};
  ForkMutex mutex_;
  std::uint64_t summed_ = 0;
  std::map<std::uint64_t, std::span<const std::byte>> later_;  // that stay, by their offset
  bool is_summing_ = false;                                    // a thread is, those of later_
  std::optional<std::uint64_t> whole_;                         // the checksum of all bytes if they came at once
  std::unique_ptr<TensorChecksum> sum_;                        // else
  std::optional<Pending> pending_;
};

// libmuster-hdf5, loaded when a state file is first written: libhdf5 and what it needs take longer to load than most
// commands run.

/// Loads the library unless it is there: the one of this version beside libmuster, else where the system looks. Throws
/// Error(unsupported).
void require_hdf5();

/// The plan's structures. Throws as require_hdf5, and Error(io) with libhdf5's words.
hdf5::Metadata make_metadata(const hdf5::MetadataPlan& plan);

/// A tensor's name as a link of an HDF5 group: the name itself, but for what HDF5 or a terminal would misread: "/",
/// "%", control characters, and the names "." and
/// ".." are percent-encoded. Different names give different links.
std::string link_name(std::string_view name);

struct WriterState {
  WriterState(const std::string& path, const Config& config, std::vector<StateFileWriter::Entry> entries,
              const StateFileOptions& options);

  [[noreturn]] void refuse(const StateTensor& tensor, const std::string& words) const;
  /// Throws Error(argument) once the file is finished or a change of it has failed.
  void require_writing() const;
  /// Runs what changes the file. After a failure half-way nobody knows what is in it, so nothing more is taken; wrong
  /// arguments are refused before anything has changed.
  template <class Work>
  void change(Work&& work) {
    try {
      work();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::argument) has_failed = true;
      throw;
    } catch (...) {
      has_failed = true;
      throw;
    }
  }
  /// Throws Error(argument) if there is no such tensor, or no writing any more.
  const StateTensor& announced(std::size_t index) const;
  void check_announced(std::size_t index, const TensorView& tensor) const;
  [[nodiscard]] ChunkGrid grid(std::size_t index) const;

  /// Bytes of an uncompressed tensor into the file, counted; the checksum is the caller's.
  void write_plain(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes);
  /// Likewise any bytes of a tensor, and its checksum as far as they are the next ones or `stay` in memory. They are
  /// known to be inside.
  void write_bytes(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes, bool stay);
  /// The same of a caller's, checked.
  void write_piece(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes);
  /// A chunk: its elements compressed and put behind all others. Counted; the checksum is the caller's.
  void write_chunk(std::size_t index, const ChunkGrid& grid, std::uint64_t chunk, std::span<const std::byte> elements,
                   ChunkEncoder& encoder);
  void write_compressed(std::size_t index, std::uint64_t offset, std::span<const std::byte> bytes, bool stay);

  void commit();

  /// Elements into the file. One thread at a time: the kernel lets writes of one file wait for each other, and they
  /// wait spinning, which costs more than the writing. Others compress and sum meanwhile.
  void put(std::uint64_t offset, std::span<const std::byte> bytes);

  /// An encoder that nobody uses, made if there is none.
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
  std::unique_ptr<TensorTarget[]> targets;  // one a tensor; they cannot move
  std::atomic<std::uint64_t> data_end;
  os::OutputFile file;
  ForkMutex file_mutex;  // of put()
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
