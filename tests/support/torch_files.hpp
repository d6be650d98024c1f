// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files as torch.save writes them, and invalid ones: hand-made pickles and zip archives.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/formats/zip.hpp"

namespace muster::test {

/// Opcodes of protocol 2. Each function returns the opcodes that leave one object on the stack.
namespace pickled {

template <class Number>
std::string bytes_of(Number value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
inline std::string text(std::string_view value) {
  return "X" + bytes_of(static_cast<std::uint32_t>(value.size())) + std::string(value);
}
inline std::string number(std::int32_t value) {
  return "J" + bytes_of(value);
}
template <class... Items>
std::string tuple(const Items&... items) {
  return "(" + (std::string() + ... + items) + "t";
}
inline std::string numbers(const std::vector<std::int32_t>& values) {
  std::string out = "(";
  for (const std::int32_t value : values) out += number(value);
  return out + "t";
}
inline std::string global(std::string_view module, std::string_view name) {
  return "c" + std::string(module) + "\n" + std::string(name) + "\n";
}
inline std::string call(const std::string& callee, const std::string& arguments) {
  return callee + arguments + "R";
}
inline std::string dict(const std::vector<std::pair<std::string, std::string>>& pairs) {
  std::string out = "}(";
  for (const auto& [key, value] : pairs) out += text(key) + value;
  return out + "u";
}
inline std::string whole(const std::string& body) {
  return "\x80\x02" + body + ".";
}
inline std::string storage(std::string_view key, std::string_view type, std::int32_t count) {
  return tuple(text("storage"), global("torch", type), text(key), text("cpu"), number(count)) + "Q";
}
inline std::string tensor(std::string_view key, std::string_view type, std::int32_t count, std::int32_t offset,
                          const std::vector<std::int32_t>& shape, const std::vector<std::int32_t>& strides) {
  return call(global("torch._utils", "_rebuild_tensor_v2"),
              tuple(storage(key, type, count), number(offset), numbers(shape), numbers(strides), std::string("\x89"),
                    call(global("collections", "OrderedDict"), ")")));
}

}  // namespace pickled

/// An entry of a zip archive and its headers. Fields without a value get the correct one.
struct ZipPart {
  std::string name;
  std::string bytes;
  std::uint16_t method = 0;
  std::uint16_t flags = 0x0808;
  std::optional<std::uint32_t> crc = {};
  std::optional<std::string> local_name = {};
  std::optional<std::uint16_t> local_flags = {};
  std::optional<std::uint32_t> place = {};  ///< the offset in the central directory
  std::optional<std::uint32_t> size = {};   ///< the size in the central directory
  std::string extra = {};                   ///< the extra fields after its name there
};

inline std::string make_zip(const std::vector<ZipPart>& parts, bool is_zip64 = true) {
  using pickled::bytes_of;
  const auto u16 = [](std::size_t value) { return bytes_of(static_cast<std::uint16_t>(value)); };
  const auto u32 = [](std::size_t value) { return bytes_of(static_cast<std::uint32_t>(value)); };
  const auto u64 = [](std::size_t value) { return bytes_of(static_cast<std::uint64_t>(value)); };
  std::string out;
  std::string directory;
  for (const ZipPart& part : parts) {
    const std::size_t place = part.place.value_or(static_cast<std::uint32_t>(out.size()));
    const std::size_t size = part.size.value_or(static_cast<std::uint32_t>(part.bytes.size()));
    const std::string name = part.local_name.value_or(part.name);
    const std::uint32_t crc = part.crc.value_or(formats::crc32(std::as_bytes(std::span(part.bytes))));
    out += u32(0x04034b50) + u16(0) + u16(part.local_flags.value_or(part.flags)) + u16(part.method) + u32(0) + u32(0) +
           u32(0) + u32(0) + u16(name.size()) + u16(0) + name + part.bytes;
    directory += u32(0x02014b50) + u16(0) + u16(0) + u16(part.flags) + u16(part.method) + u32(0) + u32(crc) +
                 u32(size) + u32(size) + u16(part.name.size()) + u16(part.extra.size()) + u16(0) + u16(0) + u16(0) +
                 u32(0) + u32(place) + part.name + part.extra;
  }
  const std::size_t begin = out.size();
  out += directory;
  if (is_zip64) {
    const std::size_t place = out.size();
    out += u32(0x06064b50) + u64(44) + u16(0) + u16(0) + u32(0) + u32(0) + u64(parts.size()) + u64(parts.size()) +
           u64(directory.size()) + u64(begin);
    out += u32(0x07064b50) + u32(0) + u64(place) + u32(1);
  }
  return out + u32(0x06054b50) + u16(0) + u16(0) + u16(parts.size()) + u16(parts.size()) + u32(directory.size()) +
         u32(begin) + u16(0);
}

/// Returns the entries that torch.save writes for a pickle and its storages.
inline std::vector<ZipPart> torch_parts(const std::string& pickle,
                                        const std::vector<std::pair<std::string, std::string>>& storages) {
  std::vector<ZipPart> parts = {{"archive/data.pkl", pickle}, {"archive/byteorder", "little"}};
  for (const auto& [key, bytes] : storages) parts.push_back({"archive/data/" + key, bytes});
  parts.push_back({"archive/version", "3\n"});
  return parts;
}

}  // namespace muster::test
