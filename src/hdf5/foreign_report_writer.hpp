// SPDX-License-Identifier: Apache-2.0
#pragma once
// Writes the records of foreign_report.hpp to a descriptor.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "src/hdf5/foreign_report.hpp"

namespace muster::hdf5 {

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
  /// `words` may have the file's own in them: they are escaped when they are printed.
  void issue(std::string_view path, std::string_view words);
  /// What is held back goes out; the last word, whatever room is left.
  void finish(const RecordBytes& last) noexcept;
  void flush();

 private:
  void write_out() noexcept;
  int descriptor_;
  std::uint64_t written_ = 0;
  std::string held_;
  bool is_broken_ = false;
};

}  // namespace muster::hdf5
