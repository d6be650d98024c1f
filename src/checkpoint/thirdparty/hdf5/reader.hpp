// SPDX-License-Identifier: Apache-2.0
#pragma once
// The protocol between muster-hdf5-reader and its parent process. Both come from one build: the magic number detects
// other builds.
//
// A listing is the magic and then records: a tag byte and its fields. "n" is an unsigned LEB128 number of at most 64
// bits, "t" n bytes of text after n.
//
//   fence    n flags (FenceFlag)
//   tensor   t path, n dtype, n rank, rank times n extent, n address of the object, n bytes that it takes in the file,
//            n offset of its elements if they are contiguous and little endian (0: they must be requested)
//   listed   nothing: all tensors are reported; what follows is text and may be lost
//   shape    n tensor (counted from 0), n rank, extents: the value of its attribute "shape" (for packed elements, the
//            logical shape)
//   text     t path, t attribute (empty: the dataset itself), t value
//   issue    t path, t message, n 1 if data of a dataset or a group is not listed, 0 otherwise
//   fatal    n FatalCode, t message; then the end
//   end      nothing
//
// An ElementsQuestion requests elements. The answer is the length of an error message (8 bytes) and the message. If the
// length is 0, the elements follow, little endian.
//
// The parent checks every value, because a crafted file may control the reader.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace muster::hdf5 {

inline constexpr std::string_view foreign_report_magic = "MUSTER-HDF5-3\n";

enum class ForeignRecord : std::uint8_t { fence = 1, tensor, listed, shape, text, issue, fatal, end };

/// Elements [first, first + count) of the dataset at an address, row-major.
struct ElementsQuestion {
  std::uint64_t address = 0;
  std::uint64_t item_bytes = 0;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

enum FenceFlag : std::uint8_t {
  fence_seccomp = 1,
  fence_address_space = 2,
  fence_no_new_descriptors = 4,
};

enum class FatalCode : std::uint8_t {
  not_opened = 1,  ///< libhdf5 refuses the file
  no_memory,
  too_large,  ///< the report is too long
  io,
};

// Limits of both sides.
inline constexpr std::uint64_t most_report_bytes = std::uint64_t{12} << 20;
inline constexpr std::uint64_t most_objects = 200'000;
inline constexpr int most_depth = 32;
inline constexpr std::uint64_t most_path_bytes = 4096;
inline constexpr std::uint64_t most_text_bytes = std::uint64_t{64} << 10;  ///< of one attribute or dataset of text
inline constexpr std::uint64_t most_texts_bytes = std::uint64_t{2} << 20;  ///< of all of them
inline constexpr int most_rank = 32;
inline constexpr std::uint64_t longest_words = 1000;  ///< of the message of an issue or a refusal
inline constexpr std::uint64_t most_question_bytes = std::uint64_t{8} << 20;  ///< of the elements of one answer

// Writes the records above to a descriptor.

/// Returns false if the other end is closed.
bool write_all(int descriptor, std::span<const std::byte> bytes) noexcept;

/// The report has reached its limit, or the other end is closed.
struct ReportFull {};

/// The bytes of one record.
class RecordBytes {
 public:
  RecordBytes() = default;
  explicit RecordBytes(ForeignRecord tag) { bytes_.push_back(static_cast<char>(tag)); }
  RecordBytes& number(std::uint64_t value);
  RecordBytes& text(std::string_view value);
  [[nodiscard]] const std::string& bytes() const noexcept { return bytes_; }

 private:
  std::string bytes_;
};

/// Throws ReportFull. Records written before are still delivered.
class ReportWriter {
 public:
  explicit ReportWriter(int descriptor);
  void record(const RecordBytes& record);
  /// Reports an attribute, a text or a second name that is not shown. `words` may contain text from the file, which is
  /// escaped when it is printed.
  void issue(std::string_view path, std::string_view words) { issue(path, words, false); }
  /// Reports a dataset that is not listed, or a group whose datasets are not.
  void loss(std::string_view path, std::string_view words) { issue(path, words, true); }
  /// Sends all buffered records and then the last one, even beyond the limit.
  void finish(const RecordBytes& last) noexcept;
  void flush();

 private:
  void issue(std::string_view path, std::string_view words, bool is_lost);
  void write_out() noexcept;
  int descriptor_;
  std::uint64_t written_ = 0;
  std::string held_;
  bool is_broken_ = false;
};

// The sandbox of the reader of third-party files. A process that a crafted file has taken over can read that file and
// write any report, but it can do nothing else.

struct FenceOptions {
  std::uint64_t cpu_seconds = 3;
  std::uint64_t address_bytes = std::uint64_t{48}
                                << 20;  ///< in addition to the program's present size: 64 MiB in total
  int input = 3;                        ///< the only file that may be read, at offsets
  int socket = 4;                       ///< to the parent process
};

/// Closes all descriptors except these two and the standard ones. Irreversible.
void drop_inheritance(const FenceOptions& options) noexcept;

/// Enters the sandbox:
/// 1. Disables core dumps, new descriptors, file writes and new processes. Limits CPU time and, without sanitizers
///    (which need terabytes), the address space.
/// 2. Renounces new privileges, and prevents other processes of this user from inspecting this one.
/// 3. Installs a filter of system calls that allows memory, time, pread of the input, the socket and exit. Calls that
///    libhdf5 might make legitimately fail with EPERM. Calls that only an attacker needs (exec, fork, ptrace, sockets)
///    terminate the process.
/// Returns the FenceFlags that are in force.
std::uint8_t raise_fence(const FenceOptions& options) noexcept;

}  // namespace muster::hdf5
