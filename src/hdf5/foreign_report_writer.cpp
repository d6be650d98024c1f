// SPDX-License-Identifier: Apache-2.0
#include "src/hdf5/foreign_report_writer.hpp"

#include <unistd.h>

#include <cerrno>

namespace muster::hdf5 {
namespace {

constexpr std::size_t held_at_most = std::size_t{64} << 10;
// For the last record.
constexpr std::uint64_t spare = 1024;

}  // namespace

bool write_all(int descriptor, std::span<const std::byte> bytes) noexcept {
  while (!bytes.empty()) {
    const ssize_t done = ::write(descriptor, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
  return true;
}

RecordBytes& RecordBytes::number(std::uint64_t value) {
  while (value >= 0x80) {
    bytes_.push_back(static_cast<char>(static_cast<unsigned char>(value | 0x80U)));
    value >>= 7U;
  }
  bytes_.push_back(static_cast<char>(static_cast<unsigned char>(value)));
  return *this;
}

RecordBytes& RecordBytes::text(std::string_view value) {
  number(value.size());
  bytes_ += value;
  return *this;
}

ReportWriter::ReportWriter(int descriptor) : descriptor_(descriptor), held_(foreign_report_magic) {}

void ReportWriter::record(const RecordBytes& record) {
  if (is_broken_ || written_ + held_.size() + record.bytes().size() > most_report_bytes - spare) throw ReportFull{};
  held_ += record.bytes();
  if (held_.size() >= held_at_most) flush();
}

void ReportWriter::issue(std::string_view path, std::string_view words) {
  record(RecordBytes(ForeignRecord::issue).text(path).text(words.substr(0, longest_words)));
}

void ReportWriter::flush() {
  write_out();
  if (is_broken_) throw ReportFull{};
}

void ReportWriter::finish(const RecordBytes& last) noexcept {
  held_ += last.bytes();
  write_out();
}

void ReportWriter::write_out() noexcept {
  if (!is_broken_) is_broken_ = !write_all(descriptor_, std::as_bytes(std::span(held_)));
  written_ += held_.size();
  held_.clear();
}

}  // namespace muster::hdf5
