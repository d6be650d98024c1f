// SPDX-License-Identifier: Apache-2.0
#pragma once
// TraceFile: the file that one process writes its records to. It is mapped, so that nothing is lost with the process,
// and grows by pieces whose space is taken before they are touched, so that a full disk is an error and no SIGBUS.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "src/os/file.hpp"
#include "src/trace/record.hpp"

namespace muster::trace {

/// The end of the name of a trace file.
inline constexpr const char* file_suffix = ".mtrace";

class TraceFile {
 public:
  /// A new one in the directory, which is made if it is not there. Throws Error.
  TraceFile(const std::string& directory, const Header& header);

  /// A record of zeros, with its number; null once the file cannot grow. Any thread.
  Record* claim(std::uint32_t& number) noexcept;
  [[nodiscard]] Header& header() noexcept { return *reinterpret_cast<Header*>(pieces_[0].load()); }
  [[nodiscard]] bool has_stopped() const noexcept { return has_stopped_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::uint64_t piece_records = 8192;
  static constexpr std::uint64_t first_record = sizeof(Header) / sizeof(Record);
  std::byte* grow(std::uint64_t piece) noexcept;

  os::GrowingFile file_;
  std::mutex mutex_;
  std::atomic<std::uint64_t> next_{first_record};
  std::atomic<bool> has_stopped_{false};
  std::array<std::atomic<std::byte*>, 4096> pieces_{};
};

}  // namespace muster::trace
