// SPDX-License-Identifier: Apache-2.0
// The reader starts at the end of the archive:
//
//  1. The end record: the last 22 bytes of the archive (no comment). If there is a zip64 end record, a locator of 20
//     bytes precedes the end record. It gives the position of the zip64 end record, which ends directly before the
//     locator.
//  2. The directory: one record per entry. It ends where the end records begin.
//  3. locate(): a header precedes the bytes of each entry. Only its length and its name are used.

#include "src/formats/zip.hpp"

#include <fmt/core.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"

namespace muster::formats {
namespace {

constexpr std::uint64_t end_bytes = 22;
constexpr std::uint64_t locator_bytes = 20;
constexpr std::uint64_t end64_bytes = 56;
constexpr std::uint64_t record_bytes = 46;
constexpr std::uint64_t header_bytes = 30;
constexpr std::uint64_t longest_directory = std::uint64_t{1} << 28;
constexpr std::uint32_t in_zip64 = 0xffffffff;
constexpr std::uint16_t encrypted = 1U | (1U << 6U) | (1U << 13U);
constexpr std::uint16_t known_flags = (1U << 3U) | (1U << 11U);  // sizes follow the bytes; names are UTF-8

[[noreturn]] void refuse_zip(const std::string& what) {
  throw Error(ErrorKind::corrupt, what);
}
[[noreturn]] void refuse_zip_entry(const ZipEntry& entry, std::string_view what, ErrorKind kind = ErrorKind::corrupt) {
  throw Error(kind, fmt::format("entry {}: {}", in_quotes(entry.name), what));
}

/// Reads consecutive little-endian numbers.
class Fields {
 public:
  explicit Fields(std::span<const std::byte> bytes) : rest_(bytes) {}
  template <class Number>
  Number take() {
    Number value{};
    std::memcpy(&value, take_bytes(sizeof value).data(), sizeof value);
    return value;
  }
  std::span<const std::byte> take_bytes(std::uint64_t count) {
    if (count > rest_.size()) refuse_zip("the zip directory is truncated within an entry");
    const std::span<const std::byte> part = rest_.first(count);
    rest_ = rest_.subspan(count);
    return part;
  }
  void skip(std::uint64_t count) { take_bytes(count); }
  [[nodiscard]] bool is_empty() const noexcept { return rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
};

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Reads the numbers of an entry that are too large for its record. They are in an extra field, in this order.
void read_zip64_field(std::span<const std::byte> extra, ZipEntry& entry, std::uint64_t& compressed) {
  for (Fields fields(extra); !fields.is_empty();) {
    const auto id = fields.take<std::uint16_t>();
    Fields body(fields.take_bytes(fields.take<std::uint16_t>()));
    if (id != 1) continue;
    for (std::uint64_t* number : {&entry.bytes, &compressed, &entry.header})
      if (*number == in_zip64) *number = body.take<std::uint64_t>();
    return;
  }
}

}  // namespace

std::vector<std::byte> ZipArchive::read_directory(std::uint64_t& count) {
  if (bytes_ < end_bytes) refuse_zip("truncated zip archive: it is too short");
  std::vector<std::byte> end(std::min(bytes_, end_bytes + locator_bytes));
  read_(bytes_ - end.size(), end);
  Fields fields{std::span<const std::byte>(end).last(end_bytes)};
  if (fields.take<std::uint32_t>() != 0x06054b50)
    refuse_zip("truncated zip archive, or bytes were appended to it: the end record is missing");
  const auto disk = fields.take<std::uint16_t>();
  const auto disk_of_directory = fields.take<std::uint16_t>();
  fields.skip(2);
  count = fields.take<std::uint16_t>();
  std::uint64_t bytes = fields.take<std::uint32_t>();
  directory_begin_ = fields.take<std::uint32_t>();
  if (fields.take<std::uint16_t>() != 0) refuse_zip("malformed zip archive: the end record has a comment");
  if ((disk != 0 && disk != UINT16_MAX) || (disk_of_directory != 0 && disk_of_directory != UINT16_MAX))
    refuse_zip("the zip archive is one of several parts");
  std::uint64_t ends = bytes_ - end_bytes;  // start of the end records
  if (end.size() == end_bytes + locator_bytes) {
    Fields locator{std::span<const std::byte>(end)};
    if (locator.take<std::uint32_t>() == 0x07064b50) {
      locator.skip(4);
      const auto place = locator.take<std::uint64_t>();
      ends -= locator_bytes;
      if (ends < end64_bytes || place != ends - end64_bytes)
        refuse_zip("malformed zip archive: the zip64 end record is not at the end");
      ends = place;
      std::vector<std::byte> large(end64_bytes);
      read_(place, large);
      Fields end64(large);
      if (end64.take<std::uint32_t>() != 0x06064b50 || end64.take<std::uint64_t>() != end64_bytes - 12)
        refuse_zip("malformed zip archive: the zip64 end record is missing");
      end64.skip(2 + 2 + 4 + 4 + 8);
      const auto count64 = end64.take<std::uint64_t>();
      const auto bytes64 = end64.take<std::uint64_t>();
      const auto begin64 = end64.take<std::uint64_t>();
      const auto is_other = [](std::uint64_t small, std::uint64_t large_one, std::uint64_t unset) {
        return small != unset && small != large_one;
      };
      if (is_other(count, count64, UINT16_MAX) || is_other(bytes, bytes64, in_zip64) ||
          is_other(directory_begin_, begin64, in_zip64))
        refuse_zip("malformed zip archive: the two end records differ");
      count = count64;
      bytes = bytes64;
      directory_begin_ = begin64;
    }
  }
  if (bytes > longest_directory)
    refuse_zip(fmt::format("malformed zip archive: the directory would have {} bytes", bytes));
  if (directory_begin_ > ends || bytes != ends - directory_begin_)
    refuse_zip(
        "truncated zip archive, or bytes were inserted into it: the directory is not where the end record places it");
  if (count > bytes / record_bytes)
    refuse_zip(fmt::format("malformed zip archive: the directory would have {} entries", count));
  std::vector<std::byte> directory(bytes);
  read_(directory_begin_, directory);
  return directory;
}

ZipArchive::ZipArchive(ReadAt read, std::uint64_t bytes) : read_(std::move(read)), bytes_(bytes) {
  std::uint64_t count = 0;
  const std::vector<std::byte> directory = read_directory(count);
  Fields fields(directory);
  entries_.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    if (fields.take<std::uint32_t>() != 0x02014b50)
      refuse_zip("malformed zip archive: the directory has records that are not entries");
    ZipEntry entry;
    fields.skip(4);
    entry.flags = fields.take<std::uint16_t>();
    entry.method = fields.take<std::uint16_t>();
    fields.skip(4);
    entry.crc = fields.take<std::uint32_t>();
    std::uint64_t compressed = fields.take<std::uint32_t>();
    entry.bytes = fields.take<std::uint32_t>();
    const auto name = fields.take<std::uint16_t>();
    const auto extra = fields.take<std::uint16_t>();
    const auto comment = fields.take<std::uint16_t>();
    const auto disk = fields.take<std::uint16_t>();
    fields.skip(6);
    entry.header = fields.take<std::uint32_t>();
    entry.name = text_of(fields.take_bytes(name));
    read_zip64_field(fields.take_bytes(extra), entry, compressed);
    fields.skip(comment);
    if (disk != 0 && disk != UINT16_MAX) refuse_zip_entry(entry, "it is in another part of the archive");
    if (entry.method == 0 && compressed != entry.bytes) refuse_zip_entry(entry, "it has two sizes");
    if (entry.header > directory_begin_ || directory_begin_ - entry.header < header_bytes ||
        compressed > directory_begin_ - entry.header - header_bytes)
      refuse_zip_entry(entry, "it is out of range of the archive");
    entries_.push_back(std::move(entry));
  }
  if (!fields.is_empty()) refuse_zip("malformed zip archive: bytes follow the entries of the directory");
  std::ranges::sort(entries_, {}, &ZipEntry::header);
  std::unordered_set<std::string_view> names;
  for (const ZipEntry& entry : entries_)
    if (!names.insert(entry.name).second) refuse_zip_entry(entry, "it is duplicated");
}

const ZipEntry* ZipArchive::find(std::string_view name) const noexcept {
  const auto found = std::ranges::find(entries_, name, &ZipEntry::name);
  return found == entries_.end() ? nullptr : &*found;
}

void ZipArchive::locate() {
  std::vector<std::byte> header;
  const ZipEntry* before = nullptr;
  for (ZipEntry& entry : entries_) {
    if ((entry.flags & encrypted) != 0)
      refuse_zip_entry(entry, "it is encrypted, which Muster cannot read. Save it without encryption",
                       ErrorKind::unsupported);
    if (entry.method != 0)
      refuse_zip_entry(entry, "it is compressed, which Muster cannot read. Save it with torch.save",
                       ErrorKind::unsupported);
    if ((entry.flags & ~known_flags) != 0)
      refuse_zip_entry(entry, "it has unknown flags. Save it with torch.save", ErrorKind::unsupported);
    if (before != nullptr && entry.header < before->begin + before->bytes)
      refuse_zip_entry(entry, fmt::format("it overlaps {}", in_quotes(before->name)));
    header.resize(header_bytes + entry.name.size());
    // The header may have a name of another length: read no further than the end of the archive.
    header.resize(std::min<std::uint64_t>(header.size(), bytes_ - entry.header));
    read_(entry.header, header);
    Fields fields(header);
    if (fields.take<std::uint32_t>() != 0x04034b50)
      refuse_zip_entry(entry, "it is not where the zip directory places it");
    fields.skip(2);
    const auto flags = fields.take<std::uint16_t>();
    const auto method = fields.take<std::uint16_t>();
    fields.skip(4 + 4 + 4 + 4);
    const auto name = fields.take<std::uint16_t>();
    const auto extra = fields.take<std::uint16_t>();
    if (flags != entry.flags || method != entry.method)
      refuse_zip_entry(entry, "it has different flags in its header and in the zip directory");
    if (name != entry.name.size() || text_of(fields.take_bytes(name)) != entry.name)
      refuse_zip_entry(entry, "it has a different name in its header");
    entry.begin = entry.header + header_bytes + name + extra;
    if (entry.begin > directory_begin_ || entry.bytes > directory_begin_ - entry.begin)
      refuse_zip_entry(entry, "it overlaps the zip directory");
    before = &entry;
  }
}

std::vector<std::byte> ZipArchive::read(const ZipEntry& entry, std::uint64_t most) const {
  if (entry.bytes > most)
    refuse_zip_entry(entry, fmt::format("it has {} bytes, and the limit is {}", entry.bytes, most));
  std::vector<std::byte> bytes(entry.bytes);
  read_(entry.begin, bytes);
  if (entry.crc != 0 && crc32(bytes) != entry.crc)
    refuse_zip_entry(entry, "checksum mismatch (CRC-32): data is corrupted");
  return bytes;
}

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  // For a null pointer zlib returns the initial checksum.
  if (bytes.empty()) return before;
  return static_cast<std::uint32_t>(::crc32_z(before, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace muster::formats
