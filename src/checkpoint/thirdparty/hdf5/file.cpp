// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/thirdparty/hdf5/file.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <csignal>
#include <cstring>
#include <limits>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/reader_place.hpp"
#include "src/formats/file_kind.hpp"
#include "src/os/library.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace {

constexpr std::string_view signature("\x89HDF\r\n\x1a\n", 8);
constexpr std::uint64_t first_user_block = 512;
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
    if (result.status == SIGSYS) return "it made a forbidden system call (SIGSYS)";
    if (result.status == SIGXCPU) return "it exceeded its CPU time (SIGXCPU)";
    const char* name = ::sigabbrev_np(result.status);
    return fmt::format("it crashed (SIG{})", name == nullptr ? std::to_string(result.status) : name);
  }
  if (result.end == os::SubprocessEnd::timed_out)
    return fmt::format("it was killed after {} ms", result.wall.count() / 1000);
  if (result.end == os::SubprocessEnd::too_much) return "its output exceeded the limit";
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
    throw Error(ErrorKind::invalid_argument,
                fmt::format("MUSTER_HDF5_TIMEOUT is {}: it must be a number of seconds above 0", in_quotes(*text)));
  return std::chrono::milliseconds(std::max<std::int64_t>(static_cast<std::int64_t>(seconds * 1000), 1));
}

}  // namespace

ForeignHdf5::ForeignHdf5(const std::string& path, const ForeignHdf5Options& options)
    : file_(os::ReadableFile::open(path)),
      program_(options.reader.empty() ? hdf5_reader_program() : options.reader),
      deadline_(options.deadline.value_or(usual_deadline())) {
  if (!has_signature(file_)) fail(ErrorKind::corrupt, "not an HDF5 file: the signature is missing");
  if (program_.empty())
    fail(ErrorKind::unsupported,
         "the program muster-hdf5-reader, which reads third-party HDF5 files, does not exist. Install it (it is part "
         "of the HDF5 package of Muster), or set MUSTER_HDF5_READER to its path");
  list();
  for (const ForeignTensor& tensor : report_.tensors)
    entries_.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.bytes});
}

void ForeignHdf5::fail(ErrorKind kind, const std::string& words) const {
  throw file_error(kind, "listing", file_.path(), words);
}

std::vector<std::string> ForeignHdf5::command(const char* wanted) const {
  const auto seconds = std::chrono::ceil<std::chrono::seconds>(deadline_).count() + 1;
  return {program_, std::to_string(seconds), wanted};
}

/// Requests elements from an idle process or a new one.
void ForeignHdf5::ask(const ForeignTensor& tensor, std::uint64_t first, std::span<std::byte> target) const {
  const hdf5::ElementsQuestion question{tensor.address, tensor.item_bytes, first, target.size() / tensor.item_bytes};
  const auto refuse = [&](ErrorKind kind, const std::string& words) {
    throw file_error(kind, "reading", file_.path(), fmt::format("tensor {}: {}", in_quotes(tensor.name), words));
  };
  for (;;) {
    std::unique_ptr<os::Subprocess> reader;
    {
      const std::scoped_lock lock(mutex_);
      if (!idle_.empty()) {
        reader = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    const bool is_new = !reader;
    if (is_new) reader = std::make_unique<os::Subprocess>(command("read"), file_.descriptor());
    reader->begin({deadline_, slower_by * deadline_});
    reader->send(std::as_bytes(std::span(&question, 1)));
    std::uint64_t length = 0;
    bool is_answered = reader->receive(std::as_writable_bytes(std::span(&length, 1))) == sizeof length;
    std::string refusal(std::min(length, hdf5::longest_words), '\0');
    is_answered = is_answered && length <= hdf5::longest_words;
    const std::span<std::byte> rest = length == 0 ? target : std::as_writable_bytes(std::span(refusal));
    is_answered = is_answered && reader->receive(rest) == rest.size();
    if (!is_answered) {
      const os::SubprocessResult result = reader->finish();
      // An old process may have used up its CPU time for earlier requests, so a new one is tried.
      if (!is_new && result.end == os::SubprocessEnd::signalled && result.status == SIGXCPU) continue;
      if (result.end == os::SubprocessEnd::timed_out)
        refuse(
            ErrorKind::timeout,
            fmt::format(
                "libhdf5 did not read {} bytes within {} ms of CPU time. Set MUSTER_HDF5_TIMEOUT=SECONDS for more time",
                target.size(), deadline_.count()));
      refuse(ErrorKind::corrupt, fmt::format("libhdf5 cannot process the file: {}", how_it_ended(result)));
    }
    {
      const std::scoped_lock lock(mutex_);
      idle_.push_back(std::move(reader));
    }
    if (length != 0) refuse(ErrorKind::corrupt, escaped(refusal, "\\"));
    return;
  }
}

void ForeignHdf5::list() {
  const os::SubprocessResult result = os::run_subprocess(command("list"), file_.descriptor(),
                                                         {deadline_, slower_by * deadline_, hdf5::most_report_bytes});
  cost_ = {result.wall, result.output.size(), result.peak_bytes, false};
  try {
    report_ = parse_foreign_report(result.output, file_.bytes());
  } catch (const Error& error) {
    fail(error.kind(), error.what());
  }
  cost_.seccomp = (report_.fence & hdf5::fence_seccomp) != 0;
  if (report_.fatal) {
    const auto& [code, words] = *report_.fatal;
    if (code == hdf5::FatalCode::not_opened) fail(ErrorKind::corrupt, "libhdf5 cannot open the file: " + words);
    if (code == hdf5::FatalCode::no_memory)
      fail(ErrorKind::out_of_space,
           "listing needs more memory than the limit of muster-hdf5-reader. Split the file into smaller ones");
    if (code != hdf5::FatalCode::too_large) fail(ErrorKind::io, "muster-hdf5-reader failed: " + words);
    // Texts may be incomplete; tensors may not.
    if (!report_.is_listed)
      fail(ErrorKind::out_of_space, fmt::format("the listing has more than {} bytes. Split the file into smaller ones",
                                                hdf5::most_report_bytes));
    report_.omissions.push_back({"", "the file has more text than is shown"});
  } else if (!report_.is_listed) {
    if (result.end == os::SubprocessEnd::timed_out)
      fail(ErrorKind::timeout,
           fmt::format("libhdf5 did not finish within {} ms of CPU time and {} of elapsed time: the file is very "
                       "large, or was made to keep its reader busy. Set MUSTER_HDF5_TIMEOUT=SECONDS for more time",
                       deadline_.count(), result.wall.count() / 1000));
    // 127: the program loader could not start it. Without any output, it failed before it read the file.
    if (result.end == os::SubprocessEnd::exited && report_.fence == 0 && result.output.empty())
      fail(ErrorKind::unsupported,
           fmt::format("{} does not start ({}). Check that its libhdf5 is installed", program_, how_it_ended(result)));
    fail(ErrorKind::corrupt,
         fmt::format("libhdf5 cannot process the file: {}. The file is corrupted, or was made to crash its reader",
                     how_it_ended(result)));
  } else if (!report_.is_whole) {
    report_.omissions.push_back(
        {"", fmt::format("some texts are not shown, because libhdf5 cannot process them: {}", how_it_ended(result))});
  }
  if (!cost_.seccomp)
    report_.omissions.push_back({"",
                                 "listed without a seccomp filter, which this kernel or sandbox does not offer: only "
                                 "resource limits protected the machine from libhdf5"});
}

void ForeignHdf5::read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const {
  const ForeignTensor& from = report_.tensors.at(tensor);
  if (offset > from.bytes || target.size() > from.bytes - offset)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("tensor {2}: {0} bytes at offset {1} are out of range for its {3} bytes", target.size(),
                            offset, in_quotes(from.name), from.bytes));
  if (target.empty()) return;
  if (from.offset != 0) return file_.read_at(from.offset + offset, target);
  // The range is extended to whole stored elements.
  const std::uint64_t first = offset / from.item_bytes;
  const std::uint64_t end = (offset + target.size() + from.item_bytes - 1) / from.item_bytes;
  std::vector<std::byte> elements((end - first) * from.item_bytes);
  const std::uint64_t most = hdf5::most_question_bytes / from.item_bytes * from.item_bytes;
  for (std::uint64_t at = 0; at < elements.size(); at += most)
    ask(from, first + at / from.item_bytes, std::span(elements).subspan(at, std::min(most, elements.size() - at)));
  std::memcpy(target.data(), elements.data() + (offset - first * from.item_bytes), target.size());
}

TensorDetail ForeignHdf5::detail(std::size_t tensor) const {
  const ForeignTensor& from = report_.tensors.at(tensor);
  return {.stored_bytes = from.stored_bytes, .is_compressed = from.stored_bytes != from.bytes};
}

bool is_hdf5_file(const std::string& path) {
  const os::ReadableFile file = os::ReadableFile::open(path);
  // Tensors of a safetensors file may contain the signature at an offset where HDF5 allows it.
  return formats::kind_of_file(file) != formats::FileKind::safetensors && has_signature(file);
}

std::string hdf5_reader_program() {
  if (const std::optional<std::string> named = os::environment("MUSTER_HDF5_READER")) return *named;
  const std::string directory = os::own_folder();
  if (directory.empty()) return {};
  // For an installed library; for a program with the library in it; for the build folder.
  const std::array<std::string, 3> places = {MUSTER_HDF5_READER_FROM_LIBRARY, "../libexec/muster", "hdf5"};
  for (const std::string& place : places) {
    std::string program = fmt::format("{}/{}/{}", directory, place, program_name);
    if (::access(program.c_str(), X_OK) == 0) return program;
  }
  return {};
}

}  // namespace muster
