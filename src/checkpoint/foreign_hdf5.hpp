// SPDX-License-Identifier: Apache-2.0
#pragma once
// Any HDF5 file that somebody sent, as tensors: docs/foreign-hdf5.md. libhdf5 crashes on files that were made to crash
// it, so it never sees one in this process:
//
// 1. The file is opened here, and its descriptor given to another program, muster-hdf5-reader, which shuts itself off
//    from everything else and lists the file with libhdf5.
// 2. Its listing is read up to a limit and until a deadline, then the program is killed.
// 3. Every number of the listing is held against the file's length here: the other program is not trusted.
// 4. Elements that lie in the file as they are, are read here. For others the program is started once more, behind the
//    same fence: it reads what it is asked for and sends it.

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
#include "src/checkpoint/tensor_source.hpp"
#include "src/hdf5/foreign_reader.hpp"
#include "src/os/file.hpp"
#include "src/os/subprocess.hpp"

namespace muster {

struct ForeignHdf5Options {
  /// Of the other program for a listing or up to 8 MiB of elements, in CPU time; on the clock it may take five times as
  /// long, if the machine is busy or the file on a slow server. It is killed then. None: MUSTER_HDF5_TIMEOUT, in
  /// seconds, or 2 s.
  std::optional<std::chrono::milliseconds> deadline = {};
  /// The program; empty: that of MUSTER_HDF5_READER, or the one that was built or installed with this library.
  std::string reader = {};
};

/// What the other program's run took.
struct ForeignListingCost {
  std::chrono::microseconds wall{};
  std::uint64_t report_bytes = 0;
  std::uint64_t reader_peak_bytes = 0;  ///< of resident memory, as the kernel tells: never less than this process had
  bool seccomp = false;                 ///< whether the filter was in force
};

// A listing of muster-hdf5-reader (src/hdf5/foreign_reader.hpp), read by somebody who believes none of it: every number
// is held against the limits of both sides and against the file's length.

/// One tensor and where its elements are.
struct ForeignTensor {
  std::string name;
  DType dtype = DType::u8;
  Shape shape;
  std::uint64_t bytes = 0;
  std::uint64_t item_bytes = 1;    ///< of an element as it is stored; 1 if elements are packed
  std::uint64_t address = 0;       ///< what the reader is asked by
  std::uint64_t stored_bytes = 0;  ///< what it takes in the file
  std::uint64_t offset = 0;        ///< of its elements, as they are, in the file; 0: the reader is asked
};

struct ForeignFatal {
  hdf5::FatalCode code = hdf5::FatalCode::io;
  std::string words;
};

struct ForeignReport {
  std::uint64_t fence = 0;  ///< hdf5::FenceFlag
  std::vector<ForeignTensor> tensors;
  std::map<std::string, std::string> texts;
  /// Paths inside the file, without the leading slash; empty: the file as a whole. UTF-8, in printable lines.
  Omissions omissions;
  std::optional<ForeignFatal> fatal;
  bool is_listed = false;  ///< all tensors are told
  bool is_whole = false;   ///< and all texts
};

/// Of a file of `file_bytes`. A listing may end anywhere: is_listed and is_whole say how far it came. Tensors come
/// sorted by name, none with bytes outside the file or with those of another, none of more than 64 MiB that claims more
/// than 1024 times the file's length; such are omissions. Throws Error(corrupt) on a listing that no reader of this
/// build makes.
ForeignReport parse_foreign_report(std::span<const std::byte> bytes, std::uint64_t file_bytes);

/// Names of tensors are their paths without the leading slash, sorted. Elements are little endian, whatever the file
/// has. Bytes that were never written read as the fill value. Immutable; thread-safe: threads that read at once have a
/// process each.
class ForeignHdf5 : public TensorSource {
 public:
  /// Lists a file. Throws Error(not_found | io); Error(argument) if it is no regular file; Error(corrupt) if it
  /// is no HDF5 file, or libhdf5 refuses it, crashes on it, or says what cannot be; Error(timeout) past the deadline;
  /// Error(unsupported) if muster-hdf5-reader is not there; Error(no_space) if the listing needs more memory than is
  /// allowed.
  explicit ForeignHdf5(const std::string& path, const ForeignHdf5Options& options = {});
  static std::unique_ptr<ForeignHdf5> open(const std::string& path, const ForeignHdf5Options& options = {}) {
    return std::make_unique<ForeignHdf5>(path, options);
  }

  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  /// Throws also Error(corrupt) if libhdf5 refuses or does not survive it, Error(timeout) past the deadline,
  /// Error(argument) past the end.
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  /// Less is stored than a tensor has if it is compressed or was never written.
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;
  /// Attributes that are text or one number, as "path@name" ("@name" of the root), and small datasets of text by their
  /// path; a list of texts is JSON.
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept { return report_.texts; }
  /// Everything that is not shown: links, attributes; and datasets, which are lost.
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
  /// Processes that wait for questions: as many as there were threads that asked at once.
  mutable ForkMutex mutex_;
  mutable std::vector<std::unique_ptr<os::Subprocess>> idle_;
};

/// Whether a file has HDF5's signature where HDF5 looks for it: at 0, 512, 1024, ... Throws Error(not_found | io |
/// argument).
bool is_hdf5_file(const std::string& path);

/// The program that lists files: what the environment names, else the one beside this library. Empty if there is
/// none.
std::string hdf5_reader_program();

}  // namespace muster
