// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads any HDF5 file as tensors: docs/explanation/hdf5-sandbox.md. Crafted files can crash libhdf5, so libhdf5 never
// reads such a file in this process:
//
// 1. The file is opened here. Its descriptor is passed to another program, muster-hdf5-reader, which enters a sandbox
//    and lists the file with libhdf5.
// 2. Its listing is read up to a size limit and until a deadline, and then the program is killed.
// 3. Every number of the listing is checked against the file's length, because the other program is not trusted.
// 4. Elements that are stored contiguously are read here. For others the program is started again, in the same sandbox:
//    it reads the requested elements and sends them.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/dtype.hpp"
#include "muster/tensor.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/checkpoint/model/tensor_source.hpp"
#include "src/checkpoint/thirdparty/hdf5/reader.hpp"
#include "src/os/file.hpp"
#include "src/os/subprocess.hpp"

namespace muster {

struct ForeignHdf5Options {
  /// The limit of CPU time of the other program for a listing or up to 8 MiB of elements, after which it is killed.
  /// Elapsed time may be five times as long, in case the machine is busy or the file is on a slow server. nullopt:
  /// MUSTER_HDF5_TIMEOUT, in seconds, or 2 s.
  std::optional<std::chrono::milliseconds> deadline = {};
  /// The program's path. Empty: MUSTER_HDF5_READER, or the program that was built or installed with this library.
  std::string reader = {};
};

/// The resources that a run of the other program used.
struct ForeignListingCost {
  std::chrono::microseconds wall{};
  std::uint64_t report_bytes = 0;
  /// resident memory as the kernel reports it: never less than that of this process
  std::uint64_t reader_peak_bytes = 0;
  bool seccomp = false;  ///< whether the filter of system calls was in force
};

// Parses a listing of muster-hdf5-reader (src/checkpoint/thirdparty/hdf5/reader.hpp) without trusting it: every number
// is checked against the limits of both sides and against the file's length.

/// One tensor and the location of its elements.
struct ForeignTensor {
  std::string name;
  DType dtype = DType::u8;
  Shape shape;
  std::uint64_t bytes = 0;
  std::uint64_t item_bytes = 1;    ///< of a stored element; 1 if elements are packed
  std::uint64_t address = 0;       ///< the object's address, for requests to the reader
  std::uint64_t stored_bytes = 0;  ///< its size in the file
  std::uint64_t offset = 0;        ///< offset of its contiguous elements in the file; 0: the reader must be asked
};

struct ForeignFatal {
  hdf5::FatalCode code = hdf5::FatalCode::io;
  std::string words;
};

struct ForeignReport {
  std::uint64_t fence = 0;  ///< hdf5::FenceFlag
  std::vector<ForeignTensor> tensors;
  std::map<std::string, std::string> texts;
  /// Names are paths inside the file, without the leading slash; empty: the whole file. UTF-8, in printable lines.
  Omissions omissions;
  std::optional<ForeignFatal> fatal;
  bool is_listed = false;  ///< all tensors were reported
  bool is_whole = false;   ///< all texts were reported, too
};

/// Parses the listing of a file of `file_bytes`. A listing may end anywhere: is_listed and is_whole show how much of it
/// arrived. Tensors are sorted by name. A tensor becomes an omission if it has bytes outside the file or shares bytes
/// with another one. So does a tensor that claims more than 64 MiB and more than 1024 times the file's length. Throws
/// Error(corrupt) on a listing that no reader of this build writes.
ForeignReport parse_foreign_report(std::span<const std::byte> bytes, std::uint64_t file_bytes);

/// The names of tensors are their paths without the leading slash, sorted. Elements are little endian, whatever the
/// file has. Bytes that were never written read as the fill value. Immutable and thread-safe: threads that read at the
/// same time use one process each.
class ForeignHdf5 : public TensorSource {
 public:
  /// Lists a file. Throws Error(not_found | io); Error(invalid_argument) if it is not a regular file; Error(corrupt) if
  /// it is not an HDF5 file, or libhdf5 refuses it, crashes on it, or reports impossible values; Error(timeout) after
  /// the deadline; Error(unsupported) if muster-hdf5-reader is missing; Error(out_of_space) if the listing needs more
  /// memory than is allowed.
  explicit ForeignHdf5(const std::string& path, const ForeignHdf5Options& options = {});
  static std::unique_ptr<ForeignHdf5> open(const std::string& path, const ForeignHdf5Options& options = {}) {
    return std::make_unique<ForeignHdf5>(path, options);
  }

  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  /// Throws also Error(corrupt) if libhdf5 refuses or crashes on the elements, Error(timeout) after the deadline, and
  /// Error(invalid_argument) for a range past the end.
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  /// The stored size is less than the tensor's if it is compressed or was never written.
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;
  /// Attributes that are text or one number, as "path@name" ("@name" for the root), and small datasets of text by their
  /// path; a list of texts is JSON.
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept { return report_.texts; }
  /// Everything that is not shown: links, attributes, and lost datasets.
  [[nodiscard]] const Omissions& omissions() const noexcept override { return report_.omissions; }
  [[nodiscard]] const ForeignListingCost& cost() const noexcept { return cost_; }

 private:
  [[noreturn]] void fail(ErrorKind kind, const std::string& words) const;
  [[nodiscard]] std::vector<std::string> command(const char* wanted) const;
  void list();
  void ask(const ForeignTensor& tensor, std::uint64_t first, std::span<std::byte> target) const;

  os::ReadableFile file_;
  std::string program_;
  std::chrono::milliseconds deadline_;
  ForeignReport report_;
  std::vector<TensorEntry> entries_;
  ForeignListingCost cost_;
  /// Idle reader processes: as many as the largest number of concurrent reads.
  mutable ForkMutex mutex_;
  mutable std::vector<std::unique_ptr<os::Subprocess>> idle_;
};

/// Whether a file has HDF5's signature at an offset where HDF5 allows it: 0, 512, 1024, ... Throws Error(not_found | io
/// | argument).
bool is_hdf5_file(const std::string& path);

/// Returns the path of the program that lists files, from the environment, or else next to this library. Empty if none
/// exists.
std::string hdf5_reader_program();

}  // namespace muster
