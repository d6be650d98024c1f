// SPDX-License-Identifier: Apache-2.0
// Reads a header:
//
//  1. Length and first byte.
//  2. JSON text, with one member at a time in memory. Each is an entry, which is checked by itself.
//  3. Entries, sorted by offset, must cover the rest of the file exactly.

#include "src/checkpoint/model_files.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <unordered_set>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/core/json_text.hpp"
#include "src/formats/file_kind.hpp"

namespace muster {
namespace {

[[noreturn]] void refuse_header(const std::string& what) {
  throw Error(ErrorKind::corrupt, what);
}

[[noreturn]] void refuse_entry(const TensorEntry& entry, const std::string& what) {
  refuse_header(fmt::format("tensor {}: {}", in_quotes(entry.name), what));
}

std::string_view kind_of(const Config& value) noexcept {
  if (value.is_null()) return "null";
  if (value.type() == Config::Type::boolean) return "a boolean";
  return value.is_string() ? "a string" : value.is_array() ? "a list" : value.is_object() ? "an object" : "a number";
}

void read_metadata(const Config& said, std::map<std::string, std::string>& metadata) {
  if (said.is_null()) return;  // treated as missing
  if (!said.is_object())
    refuse_header(fmt::format("{} is {}, not an object of strings", safetensors_metadata_key, kind_of(said)));
  for (const auto& [key, value] : said.as_object()) {
    if (value.is_string()) {
      metadata.emplace(key, value.as_string());
      continue;
    }
    if (key == "shape" || key == "data_offsets")
      refuse_header(fmt::format("{}: this name is kept for metadata, no tensor can have it", safetensors_metadata_key));
    refuse_header(fmt::format("{}: the value of {} is {}, not a string", safetensors_metadata_key, in_quotes(key),
                              kind_of(value)));
  }
}

std::vector<std::uint64_t> read_numbers(const TensorEntry& entry, std::string_view key, const Config& list) {
  if (!list.is_array()) refuse_entry(entry, fmt::format("its {} is {}, which it cannot be", key, kind_of(list)));
  std::vector<std::uint64_t> numbers;
  for (const Config& item : list.as_array()) {
    if (item.type() == Config::Type::integer && item.as_int() < 0)
      refuse_entry(entry, fmt::format("its {} has the negative number {}", key, item.as_int()));
    if (item.type() == Config::Type::real)
      refuse_entry(entry, fmt::format("its {} has {}, which is no whole number", key, to_json(item)));
    if (item.type() != Config::Type::integer && item.type() != Config::Type::unsigned_integer)
      refuse_entry(entry, fmt::format("its {} has {} among its numbers", key, kind_of(item)));
    numbers.push_back(item.as_uint());
  }
  return numbers;
}

/// Members that the format does not define are ignored, as in its reference reader.
TensorEntry read_entry(std::string name, const Config& said) {
  if (!said.is_object()) refuse_header(fmt::format("tensor {} is {}, not an object", in_quotes(name), kind_of(said)));
  TensorEntry entry{.name = std::move(name)};
  const auto member = [&](std::string_view key) -> const Config& {
    const Config* found = said.find(key);
    if (found == nullptr) refuse_entry(entry, fmt::format("it has no {}", key));
    return *found;
  };
  const Config& dtype = member("dtype");
  if (!dtype.is_string()) refuse_entry(entry, fmt::format("its dtype is {}, which it cannot be", kind_of(dtype)));
  const std::optional<DType> known = dtype_from_string(dtype.as_string());
  // Dtypes of Muster alone: in the format itself they are not valid.
  if (!known || *known == DType::u4 || *known == DType::i4)
    refuse_entry(entry, fmt::format("its dtype {} is not known", in_quotes(dtype.as_string())));
  entry.dtype = *known;
  for (const std::uint64_t extent : read_numbers(entry, "shape", member("shape"))) {
    if (!std::in_range<std::int64_t>(extent))
      refuse_entry(entry, fmt::format("its shape overflows: the extent {} is beyond 63 bits", extent));
    entry.shape.push_back(static_cast<std::int64_t>(extent));
  }
  const std::vector<std::uint64_t> offsets = read_numbers(entry, "data_offsets", member("data_offsets"));
  if (offsets.size() != 2)
    refuse_entry(entry, fmt::format("its data_offsets have {} numbers instead of 2", offsets.size()));
  if (offsets[0] > offsets[1])
    refuse_entry(entry, fmt::format("its data_offsets [{}, {}] end before they begin", offsets[0], offsets[1]));
  entry.offset = offsets[0];
  entry.bytes = offsets[1] - offsets[0];
  return entry;
}

void check_size(const TensorEntry& entry) {
  std::uint64_t needed = 0;
  try {
    needed = byte_size(entry.dtype, entry.shape);
  } catch (const Error&) {
    refuse_entry(entry, fmt::format("its shape overflows: {} has too many elements", to_string(entry.shape)));
  }
  if (element_count(entry.shape) % elements_in_group(entry.dtype) != 0)
    refuse_entry(entry, fmt::format("{} elements of {} end in the middle of a byte", element_count(entry.shape),
                                    to_string(entry.dtype)));
  if (needed != entry.bytes)
    refuse_entry(entry,
                 fmt::format("{} {} takes {} bytes, its data_offsets [{}, {}] give it {}", to_string(entry.dtype),
                             to_string(entry.shape), needed, entry.offset, entry.offset + entry.bytes, entry.bytes));
}

// Checks that entries, sorted by offset, begin at 0, follow each other without gaps, and end with the file.
void check_cover(std::vector<TensorEntry>& entries, std::uint64_t data_bytes) {
  const auto by_place = [](const TensorEntry& a, const TensorEntry& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.bytes < b.bytes;
  };
  // Files of common writers are sorted already.
  if (!std::is_sorted(entries.begin(), entries.end(), by_place))
    std::stable_sort(entries.begin(), entries.end(), by_place);
  std::uint64_t covered = 0;
  const TensorEntry* before = nullptr;
  for (const TensorEntry& entry : entries) {
    const std::uint64_t end = entry.offset + entry.bytes;
    if (end > data_bytes)
      refuse_entry(entry, fmt::format("its data_offsets [{}, {}] are outside the file, which has {} bytes of tensors",
                                      entry.offset, end, data_bytes));
    if (entry.offset < covered)
      refuse_entry(entry, fmt::format("its bytes [{}, {}] overlap those of tensor {}, which end at {}", entry.offset,
                                      end, in_quotes(before->name), covered));
    if (entry.offset > covered)
      refuse_entry(entry,
                   fmt::format("before it is a hole: bytes [{}, {}] belong to no tensor", covered, entry.offset));
    covered = end;
    before = &entry;
  }
  if (covered != data_bytes)
    refuse_header(fmt::format("{} bytes at the end belong to no tensor", data_bytes - covered));
}

/// Returns the JSON text of the header of a file of this size.
std::string_view header_text(std::span<const std::byte> head, std::uint64_t file_size) {
  if (file_size < safetensors_prefix || head.size() < safetensors_prefix)
    refuse_header(
        fmt::format("it has {} bytes, too few for the length of a header; it is no safetensors file, or cut "
                    "off",
                    file_size));
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < safetensors_prefix; ++i) length |= std::to_integer<std::uint64_t>(head[i]) << (8 * i);
  if (length > max_safetensors_header) {
    const std::string_view advice = formats::advice_about(formats::kind_of_file(head));
    refuse_header(advice.empty()
                      ? fmt::format("it is no safetensors file: its header would have {} bytes, more than the {} that "
                                    "are allowed",
                                    length, max_safetensors_header)
                      : fmt::format("it is no safetensors file but {}", advice));
  }
  if (length > file_size - safetensors_prefix || length > head.size() - safetensors_prefix)
    refuse_header(
        fmt::format("its header would have {} bytes, but the file ends after {}; it is cut off", length, file_size));
  const char* begin = reinterpret_cast<const char*>(head.data()) + safetensors_prefix;
  if (length == 0 || *begin != '{') refuse_header("its header does not begin with '{'; it is no safetensors file");

  return {begin, length};
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_size,
                                           const std::string& path) {
  SafetensorsHeader header;
  with_file("reading", path, [&] {
    const std::string_view text = header_text(head, file_size);
    std::unordered_set<std::string> names;
    core::visit_members(text, [&](std::string& name, Config& said) {
      if (!names.insert(name).second) refuse_header(fmt::format("the name {} is there twice", in_quotes(name)));
      if (name == safetensors_metadata_key)
        read_metadata(said, header.metadata);
      else
        header.tensors.push_back(read_entry(std::move(name), said));
    });
    for (const TensorEntry& entry : header.tensors) check_size(entry);
    header.data_begin = safetensors_prefix + text.size();
    check_cover(header.tensors, file_size - header.data_begin);
  });
  for (TensorEntry& entry : header.tensors) entry.offset += header.data_begin;
  apply_own_dtypes(header, path);
  return header;
}

}  // namespace muster
