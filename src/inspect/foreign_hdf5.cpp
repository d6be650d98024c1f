// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/foreign_hdf5.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <csignal>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <utility>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"
#include "src/inspect/chunked_reader.hpp"
#include "src/inspect/foreign_report.hpp"
#include "src/inspect/reader_place.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/os/subprocess.hpp"

namespace muster::inspect {
namespace {

constexpr std::string_view signature("\x89HDF\r\n\x1a\n", 8);
constexpr std::uint64_t first_user_block = 512;
constexpr std::uint64_t cached_bytes = std::uint64_t{16} << 20;
constexpr int slower_by = 5;
constexpr std::string_view program_name = "muster-hdf5-reader";

bool has_signature(const os::ReadableFile& file) {
  std::array<std::byte, signature.size()> begin{};
  // HDF5's own rule: at 0, or after a user block whose length is a power of two.
  for (std::uint64_t at = 0; at <= file.bytes() && begin.size() <= file.bytes() - at;
       at = at == 0 ? first_user_block : at * 2) {
    file.read_at(at, begin);
    if (std::memcmp(begin.data(), signature.data(), begin.size()) == 0) return true;
    if (at > std::numeric_limits<std::uint64_t>::max() / 4) break;
  }
  return false;
}

std::string how_it_ended(const os::SubprocessResult& result) {
  if (result.end == os::SubprocessEnd::signalled) {
    if (result.status == SIGSYS) return "it asked the kernel for what it must not have (SIGSYS)";
    if (result.status == SIGXCPU) return "it took all the CPU time that it may have (SIGXCPU)";
    const char* name = ::sigabbrev_np(result.status);
    return fmt::format("it crashed (SIG{})", name == nullptr ? std::to_string(result.status) : name);
  }
  if (result.end == os::SubprocessEnd::timed_out)
    return fmt::format("it was killed after {} ms", result.wall.count() / 1000);
  if (result.end == os::SubprocessEnd::too_much) return "it said more than it may";
  return fmt::format("it ended early (exit status {})", result.status);
}

std::chrono::milliseconds usual_deadline() {
  constexpr std::chrono::milliseconds usual(2000);
  constexpr double longest = 86'400;
  const std::optional<std::string> text = os::environment("MUSTER_HDF5_TIMEOUT");
  if (!text) return usual;
  double seconds = 0;
  const auto [end, status] = std::from_chars(text->data(), text->data() + text->size(), seconds);
  if (status != std::errc() || end != text->data() + text->size() || !(seconds > 0) || seconds > longest)
    throw Error(ErrorKind::argument,
                fmt::format("MUSTER_HDF5_TIMEOUT is {}: it must be seconds, more than 0", in_quotes(*text)));
  return std::chrono::milliseconds(std::max<std::int64_t>(static_cast<std::int64_t>(seconds * 1000), 1));
}

/// Elements from big to little endian: of the halves, where they are complex.
void swap_bytes(std::span<std::byte> bytes, std::size_t width) {
  const auto swap = [&bytes]<std::size_t Width>() {
    for (std::size_t at = 0; at + Width <= bytes.size(); at += Width)
      std::reverse(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                   bytes.begin() + static_cast<std::ptrdiff_t>(at + Width));
  };
  if (width == 2) swap.operator()<2>();
  if (width == 4) swap.operator()<4>();
  if (width == 8) swap.operator()<8>();
}

}  // namespace

struct ForeignHdf5::Contents {
  explicit Contents(os::ReadableFile opened) : file(std::move(opened)), cache(cached_bytes) {}
  os::ReadableFile file;
  std::vector<ForeignTensor> tensors;
  std::vector<TensorEntry> entries;
  std::unordered_map<std::string_view, std::size_t> index;
  std::map<std::string, std::string> texts;
  std::vector<ForeignIssue> issues;
  ForeignListingCost cost;
  mutable ChunkCache cache;

  void list(const ForeignHdf5Options& options);
  void take(ForeignReport report);
};

void ForeignHdf5::Contents::list(const ForeignHdf5Options& options) {
  const std::string& path = file.path();
  const auto fail = [&path](ErrorKind kind, const std::string& words) {
    throw Error(kind, fmt::format("listing {}: {}", path, words), {.path = path});
  };
  if (!has_signature(file)) fail(ErrorKind::corrupt, "it is no HDF5 file (HDF5's signature is nowhere in it)");
  const std::string program = options.reader.empty() ? hdf5_reader_program() : options.reader;
  if (program.empty())
    fail(ErrorKind::unsupported,
         "the program muster-hdf5-reader, which reads HDF5 files of others, is not there: install it (it comes with "
         "Muster's HDF5 part), or name it by MUSTER_HDF5_READER");
  const std::chrono::milliseconds deadline = options.deadline.value_or(usual_deadline());
  const auto seconds = std::chrono::ceil<std::chrono::seconds>(deadline).count() + 1;
  const os::SubprocessResult result =
      os::run_subprocess({program, std::to_string(seconds), options.insist_on_seccomp ? "insist" : "accept"},
                         file.descriptor(), {deadline, slower_by * deadline, hdf5::most_report_bytes});
  cost = {result.wall, result.output.size(), result.peak_bytes, false};
  ForeignReport report;
  try {
    report = parse_foreign_report(result.output, {file.bytes(), std::max<std::uint64_t>(options.largest_expansion, 1)});
  } catch (const Error& error) {
    fail(error.kind(), error.what());
  }
  cost.seccomp = (report.fence & hdf5::fence_seccomp) != 0;
  if (report.fatal) {
    switch (report.fatal->code) {
      case hdf5::FatalCode::not_opened:
        fail(ErrorKind::corrupt, "libhdf5 cannot open it: " + report.fatal->words);
        break;
      case hdf5::FatalCode::no_fence:
        fail(ErrorKind::unsupported, "this kernel or sandbox has no seccomp filters, and they are insisted on");
        break;
      case hdf5::FatalCode::no_memory:
        fail(ErrorKind::no_space, "its listing needs more memory than muster-hdf5-reader may have");
        break;
      case hdf5::FatalCode::too_large:
        // Texts are what may be missing; tensors may not.
        if (!report.is_listed)
          fail(ErrorKind::no_space, fmt::format("its listing has more than {} bytes", hdf5::most_report_bytes));
        report.issues.push_back({"", "there is more text in it than is shown"});
        break;
      default:
        fail(ErrorKind::io, "muster-hdf5-reader failed: " + report.fatal->words);
    }
  } else if (!report.is_listed) {
    if (result.end == os::SubprocessEnd::timed_out)
      fail(ErrorKind::timeout,
           fmt::format("libhdf5 did not come to an end within {} ms of work and {} on the clock: it is very large, or "
                       "was made to keep its reader busy (MUSTER_HDF5_TIMEOUT=SECONDS gives it more time)",
                       deadline.count(), result.wall.count() / 1000));
    // 127: the program loader could not start it. Nothing said: it never came to the file.
    if (result.end == os::SubprocessEnd::exited && report.fence == 0 && result.output.empty())
      fail(ErrorKind::unsupported,
           fmt::format("{} does not start here ({}): is its libhdf5 installed?", program, how_it_ended(result)));
    fail(ErrorKind::corrupt,
         fmt::format("libhdf5 does not survive it: {}. It is damaged, or was made to do that", how_it_ended(result)));
  } else if (!report.is_whole) {
    report.issues.push_back(
        {"", fmt::format("its texts are not all shown: libhdf5 did not survive them, {}", how_it_ended(result))});
  }
  if (!cost.seccomp)
    report.issues.push_back({"",
                             "listed without a seccomp filter, which this kernel or sandbox does not offer: limits "
                             "alone kept libhdf5 from the rest of the machine"});
  take(std::move(report));
}

void ForeignHdf5::Contents::take(ForeignReport report) {
  tensors = std::move(report.tensors);
  texts = std::move(report.texts);
  issues = std::move(report.issues);
  entries.reserve(tensors.size());
  for (const ForeignTensor& tensor : tensors)
    entries.push_back({.name = tensor.name,
                       .dtype = tensor.dtype,
                       .shape = tensor.shape,
                       .offset = tensor.offset,
                       .bytes = tensor.bytes});
  index.reserve(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) index.emplace(entries[i].name, i);
}

ForeignHdf5::ForeignHdf5(std::unique_ptr<Contents> contents) noexcept : contents_(std::move(contents)) {}
ForeignHdf5::~ForeignHdf5() = default;

std::unique_ptr<ForeignHdf5> ForeignHdf5::open(const std::string& path, const ForeignHdf5Options& options) {
  auto contents = std::make_unique<Contents>(os::ReadableFile::open(path));
  contents->list(options);
  return std::unique_ptr<ForeignHdf5>(new ForeignHdf5(std::move(contents)));
}

const std::vector<TensorEntry>& ForeignHdf5::tensors() const noexcept {
  return contents_->entries;
}

std::optional<std::size_t> ForeignHdf5::find(std::string_view name) const noexcept {
  const auto found = contents_->index.find(name);
  if (found == contents_->index.end()) return std::nullopt;
  return found->second;
}

std::unique_ptr<PieceBytes> ForeignHdf5::read(std::size_t tensor, std::uint64_t offset, std::uint64_t length) const {
  const ForeignTensor& from = contents_->tensors.at(tensor);
  if (offset > from.bytes || length > from.bytes - offset)
    throw Error(ErrorKind::argument, fmt::format("reading {} bytes at {} of the tensor {}, which has {}", length,
                                                 offset, in_quotes(from.name), from.bytes));
  // Whole stored elements around what is wanted.
  const std::uint64_t first = offset / from.item_bytes;
  const std::uint64_t skipped = offset % from.item_bytes;
  const std::uint64_t end = (offset + length + from.item_bytes - 1) / from.item_bytes;
  std::vector<std::byte> bytes(length == 0 ? 0 : (end - first) * from.item_bytes);
  if (from.layout == hdf5::StorageLayout::chunked) {
    read_chunked(contents_->file, from, tensor, first, bytes, contents_->cache);
  } else if (from.layout == hdf5::StorageLayout::compact) {
    std::copy_n(from.compact.begin() + static_cast<std::ptrdiff_t>(first * from.item_bytes), bytes.size(),
                bytes.begin());
  } else if (from.offset == 0) {
    fill_elements(from, bytes);
  } else {
    contents_->file.read_at(from.offset + first * from.item_bytes, bytes);
  }
  if (from.is_big_endian) swap_bytes(bytes, from.dtype == DType::complex64 ? sizeof(float) : from.item_bytes);
  if (skipped != 0 || bytes.size() != length) {
    bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(skipped));
    bytes.resize(length);
  }
  return std::make_unique<PieceBytes>(std::move(bytes));
}

std::map<std::string, std::string> ForeignHdf5::metadata() const {
  return contents_->texts;
}

const std::vector<ForeignIssue>& ForeignHdf5::issues() const noexcept {
  return contents_->issues;
}

std::uint64_t ForeignHdf5::stored_bytes(std::size_t tensor) const {
  const ForeignTensor& from = contents_->tensors.at(tensor);
  if (from.layout == hdf5::StorageLayout::compact) return from.bytes;
  if (from.layout == hdf5::StorageLayout::contiguous) return from.offset == 0 ? 0 : from.bytes;
  std::uint64_t bytes = 0;
  for (const StoredChunk& chunk : from.chunks) bytes += chunk.bytes;
  return bytes;
}

const ForeignListingCost& ForeignHdf5::cost() const noexcept {
  return contents_->cost;
}

bool is_hdf5_file(const std::string& path) {
  return has_signature(os::ReadableFile::open(path));
}

std::string hdf5_reader_program() {
  if (const std::optional<std::string> named = os::environment("MUSTER_HDF5_READER")) return *named;
  const std::string directory = os::own_directory();
  if (directory.empty()) return {};
  // An installed library's; that of a program with the library in it; the build folder's.
  const std::array<std::string, 3> places = {MUSTER_HDF5_READER_FROM_LIBRARY, "../libexec/muster", "hdf5"};
  for (const std::string& place : places) {
    std::string program = fmt::format("{}/{}/{}", directory, place, program_name);
    if (::access(program.c_str(), X_OK) == 0) return program;
  }
  return {};
}

}  // namespace muster::inspect
