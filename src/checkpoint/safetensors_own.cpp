// SPDX-License-Identifier: Apache-2.0
// Writing a header, and the tensors that the format has no dtype for: both directions of "muster.dtype.NAME".

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <unordered_map>
#include <unordered_set>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/safetensors_header.hpp"
#include "src/core/quoted.hpp"
#include "src/core/utf8.hpp"

namespace muster {
namespace {

[[noreturn]] void refuse_to_write(const std::string& path, const std::string& what) {
  throw Error(ErrorKind::argument, fmt::format("writing {}: {}", in_quotes(path), what), {.path = path});
}

/// The reference writer's order, from the last to the first: never a larger element after a smaller one, so that every
/// tensor is aligned in a file whose data begins at a multiple of eight.
std::ptrdiff_t place_of(DType dtype) noexcept {
  constexpr std::array order = {DType::u64, DType::i64,     DType::f64,       DType::complex64, DType::f32,
                                DType::u32, DType::i32,     DType::bf16,      DType::f16,       DType::u16,
                                DType::i16, DType::f8_e8m0, DType::f8_e4m3fn, DType::f8_e5m2,   DType::i8,
                                DType::u8,  DType::f4_e2m1, DType::boolean};
  if (dtype == DType::u4 || dtype == DType::i4) dtype = DType::u8;
  return std::ranges::find(order, dtype) - order.begin();
}

/// What the format cannot say: it goes as flat U8.
bool is_own(const TensorEntry& entry) {
  return entry.dtype == DType::u4 || entry.dtype == DType::i4 ||
         (entry.dtype == DType::f4_e2m1 && element_count(entry.shape) % 2 != 0);
}

/// "U4 [3, 5]" and back.
std::string own_text(const TensorEntry& entry) {
  return fmt::format("{} {}", to_string(entry.dtype), to_string(entry.shape));
}

std::optional<TensorEntry> parse_own_text(std::string_view text) {
  TensorEntry entry;
  const std::size_t space = text.find(' ');
  const std::optional<DType> dtype = dtype_from_string(text.substr(0, space));
  if (space == std::string_view::npos || !dtype || !is_packed(*dtype)) return std::nullopt;
  entry.dtype = *dtype;
  text.remove_prefix(space + 1);
  if (text.size() < 2 || text.front() != '[' || text.back() != ']') return std::nullopt;
  text = text.substr(1, text.size() - 2);
  while (!text.empty()) {
    std::int64_t extent = 0;
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), extent);
    if (status != std::errc() || extent < 0) return std::nullopt;
    entry.shape.push_back(extent);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (text.empty()) break;
    if (!text.starts_with(", ") || text.size() == 2) return std::nullopt;
    text.remove_prefix(2);
  }
  return entry;
}

void append_string(std::string& json, const std::string& text) {
  json += to_json(Config(text));
}

void append_shape(std::string& json, const TensorEntry& entry) {
  json += '[';
  if (is_own(entry)) {
    json += std::to_string(entry.bytes);
  } else {
    for (std::size_t i = 0; i < entry.shape.size(); ++i) {
      if (i != 0) json += ',';
      json += std::to_string(entry.shape[i]);
    }
  }
  json += ']';
}

}  // namespace

std::string make_safetensors_header(std::vector<TensorEntry>& tensors, std::map<std::string, std::string> metadata,
                                    const std::string& path) {
  std::erase_if(metadata, [](const auto& member) { return member.first.starts_with(safetensors_dtype_key); });
  std::sort(tensors.begin(), tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    const auto place_a = place_of(a.dtype);
    const auto place_b = place_of(b.dtype);
    return place_a != place_b ? place_a < place_b : a.name < b.name;
  });
  std::unordered_set<std::string_view> names;
  names.reserve(tensors.size());
  std::uint64_t end = 0;
  for (TensorEntry& entry : tensors) {
    if (entry.name == safetensors_metadata_key)
      refuse_to_write(path,
                      fmt::format("no tensor can have the name {}, which is kept for metadata", in_quotes(entry.name)));
    if (!core::is_utf8(entry.name))
      refuse_to_write(path, fmt::format("the name {} is not UTF-8", in_quotes(entry.name)));
    if (!names.insert(entry.name).second)
      refuse_to_write(path, fmt::format("two tensors have the name {}", in_quotes(entry.name)));
    try {
      entry.bytes = byte_size(entry.dtype, entry.shape);
    } catch (const Error& error) {
      throw error.with_context(fmt::format("writing {}: tensor {}", in_quotes(path), in_quotes(entry.name)));
    }
    entry.offset = end;
    if (__builtin_add_overflow(end, entry.bytes, &end) || end > INT64_MAX)
      refuse_to_write(path, "its tensors together are larger than a file can be");
    if (is_own(entry)) metadata[std::string(safetensors_dtype_key) + entry.name] = own_text(entry);
  }

  std::string json = "{";
  if (!metadata.empty()) {
    append_string(json, std::string(safetensors_metadata_key));
    json += ':';
    char separator = '{';
    for (const auto& [key, value] : metadata) {
      if (!core::is_utf8(key) || !core::is_utf8(value))
        refuse_to_write(path, fmt::format("the metadata {} is not UTF-8", in_quotes(key)));
      json += separator;
      append_string(json, key);
      json += ':';
      append_string(json, value);
      separator = ',';
    }
    json += '}';
  }
  for (const TensorEntry& entry : tensors) {
    if (json.size() > 1) json += ',';
    append_string(json, entry.name);
    json += R"(:{"dtype":")";
    json += to_string(is_own(entry) ? DType::u8 : entry.dtype);
    json += R"(","shape":)";
    append_shape(json, entry);
    fmt::format_to(std::back_inserter(json), R"(,"data_offsets":[{},{}]}})", entry.offset, entry.offset + entry.bytes);
  }
  json += '}';
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (json.size() > max_safetensors_header)
    refuse_to_write(
        path, fmt::format("its header would have {} bytes, more than the {} that are allowed; write several files",
                          json.size(), max_safetensors_header));
  const std::uint64_t data_begin = safetensors_prefix + json.size();
  for (TensorEntry& entry : tensors) entry.offset += data_begin;
  std::string whole;
  whole.reserve(data_begin);
  for (std::size_t i = 0; i < safetensors_prefix; ++i)
    whole.push_back(static_cast<char>(static_cast<unsigned char>(json.size() >> (8 * i))));
  return whole += json;
}

void apply_own_dtypes(SafetensorsHeader& header, const std::string& path) {
  const auto begin = header.metadata.lower_bound(std::string(safetensors_dtype_key));
  auto end = begin;
  while (end != header.metadata.end() && end->first.starts_with(safetensors_dtype_key)) ++end;
  if (begin == end) return;
  std::unordered_map<std::string_view, TensorEntry*> entries;
  entries.reserve(header.tensors.size());
  for (TensorEntry& entry : header.tensors) entries.emplace(entry.name, &entry);
  for (auto member = begin; member != end; ++member) {
    // Whoever took some tensors out of a file may have kept all of its metadata.
    const auto found = entries.find(std::string_view(member->first).substr(safetensors_dtype_key.size()));
    if (found == entries.end()) continue;
    TensorEntry& entry = *found->second;
    std::optional<TensorEntry> own = parse_own_text(member->second);
    bool fits = own && entry.dtype == DType::u8;
    try {
      fits = fits && byte_size(own->dtype, own->shape) == entry.bytes;
    } catch (const Error&) {
      fits = false;  // a shape that overflows
    }
    if (!fits)
      throw Error(ErrorKind::corrupt,
                  fmt::format("reading {}: tensor {}: the metadata calls it {}, which its {} bytes of {} are not",
                              in_quotes(path), in_quotes(entry.name), in_quotes(member->second), entry.bytes,
                              to_string(entry.dtype)),
                  {.path = path});
    entry.dtype = own->dtype;
    entry.shape = std::move(own->shape);
  }
  header.metadata.erase(begin, end);
}

}  // namespace muster
