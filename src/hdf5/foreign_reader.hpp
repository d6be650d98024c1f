// SPDX-License-Identifier: Apache-2.0
#pragma once
// What muster-hdf5-reader and the process that started it say to each other. Both are of one build: the magic tells
// other builds.
//
// A listing is the magic and then records: a tag byte and its fields. "n" is an unsigned LEB128 number of at most 64
// bits, "t" n bytes of text after n.
//
//   fence    n flags (FenceFlag)
//   tensor   t path, n dtype, n rank, rank times n extent, n address of the object, n bytes that it takes in the file,
//            n offset at which its elements lie as they are, in one piece and little endian (0: they are asked for)
//   listed   nothing: all tensors are told; what follows is text and may be lost
//   shape    n tensor (counted from 0), n rank, extents: what its attribute "shape" has (of packed elements, the
//            logical shape)
//   text     t path, t attribute (empty: the dataset itself), t value
//   issue    t path, t words, n 1 if data of a dataset or a group is not listed, 0 otherwise
//   fatal    n FatalCode, t words; then the end
//   end      nothing
//
// Elements are asked for by an ElementsQuestion. The answer is the length of a refusal (8 bytes) and the refusal; if
// the length is 0, the elements, little endian.
//
// The other side believes none of it.

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
  too_large,  ///< the report
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
inline constexpr std::uint64_t longest_words = 1000;                          ///< of an issue or a refusal
inline constexpr std::uint64_t most_question_bytes = std::uint64_t{8} << 20;  ///< of the elements of one answer

// Writes the records above to a descriptor.

/// False if nobody reads it.
bool write_all(int descriptor, std::span<const std::byte> bytes) noexcept;

/// The report is as long as it may be, or nobody reads it.
struct ReportFull {};

/// One record's bytes.
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

/// Throws ReportFull. What was written before then arrives.
class ReportWriter {
 public:
  explicit ReportWriter(int descriptor);
  void record(const RecordBytes& record);
  /// Reports an attribute, a text or a second name that is not shown. `words` may have the file's own in them: they are
  /// escaped when they are printed.
  void issue(std::string_view path, std::string_view words) { issue(path, words, false); }
  /// Reports a dataset that is not listed, or a group whose datasets are not.
  void loss(std::string_view path, std::string_view words) { issue(path, words, true); }
  /// What is held back goes out; the last word, whatever room is left.
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

// What the reader of foreign files does to itself before it looks at one: a process that is taken over by a file can
// read that file, say what it likes in the report, and nothing else.

struct FenceOptions {
  std::uint64_t cpu_seconds = 3;
  std::uint64_t address_bytes = std::uint64_t{48} << 20;  ///< beyond what the program has by now: 64 MiB with it
  int input = 3;                                          ///< the one file that may be read, at offsets
  int socket = 4;                                         ///< to whoever started this program
};

/// Closes everything but the two descriptors and the standard ones. Not to be undone.
void drop_inheritance(const FenceOptions& options) noexcept;

/// 1. No core dumps, no more descriptors, no file contents, no processes, a limit of CPU time and of address space
///    (not under sanitizers, which need terabytes of it).
/// 2. No new privileges, not to be looked into by other processes of this user.
/// 3. A filter of system calls: memory, time, pread of the input, the socket, the end. What libhdf5 might ask
///    for in good faith is EPERM; what only an attacker wants (exec, fork, ptrace, sockets) is the end of the process.
/// FenceFlags of what is in force.
std::uint8_t raise_fence(const FenceOptions& options) noexcept;

}  // namespace muster::hdf5
