// SPDX-License-Identifier: Apache-2.0
#include "src/trace/trace_file.hpp"

#include <fmt/core.h>

#include "muster/log.hpp"
#include "src/os/directory.hpp"
#include "src/os/process.hpp"

namespace muster::trace {
namespace {

std::string new_path(const std::string& directory) {
  if (!os::file_status(directory, os::Links::followed)) os::make_directory(directory);
  const os::ProcessIdentity own = os::own_identity();
  return fmt::format("{}/{}-{}-{}{}", directory, own.host, own.pid, os::random_hex(4), file_suffix);
}

}  // namespace

TraceFile::TraceFile(const std::string& directory, const Header& header) : file_(new_path(directory)) {
  pieces_[0] = file_.grow(piece_records * sizeof(Record));
  this->header() = header;
}

Record* TraceFile::claim(std::uint32_t& number) noexcept {
  if (has_stopped()) return nullptr;
  const std::uint64_t at = next_.fetch_add(1, std::memory_order_relaxed);
  const std::uint64_t piece = at / piece_records;
  std::byte* begin = piece < pieces_.size() ? pieces_[piece].load(std::memory_order_acquire) : nullptr;
  if (begin == nullptr && (begin = grow(piece)) == nullptr) return nullptr;
  number = static_cast<std::uint32_t>(at - first_record + 1);
  return reinterpret_cast<Record*>(begin) + at % piece_records;
}

std::byte* TraceFile::grow(std::uint64_t piece) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (has_stopped()) return nullptr;
    if (piece >= pieces_.size())
      throw Error(ErrorKind::no_space, fmt::format("{} has the most records that it can have", file_.path()));
    for (std::uint64_t at = 0; at <= piece; ++at)
      if (pieces_[at] == nullptr) pieces_[at] = file_.grow(piece_records * sizeof(Record));
    return pieces_[piece];
  } catch (const std::exception& error) {
    has_stopped_ = true;
    log(LogLevel::warning, fmt::format("tracing stops here, and the job goes on: {}", error.what()));
    return nullptr;
  }
}

}  // namespace muster::trace
