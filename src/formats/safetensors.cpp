// SPDX-License-Identifier: Apache-2.0

#include "muster/safetensors.hpp"
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/formats/file_kind.hpp"
#include "src/formats/json_text.hpp"
#include "src/formats/safetensors.hpp"
#include "src/os/publish.hpp"

namespace muster {

struct SafetensorsFile::Contents {
  explicit Contents(os::ReadableFile opened) : file(std::move(opened)) {}
  os::ReadableFile file;
  std::shared_ptr<const os::MappedFile> mapping;  // null for files that other programs may truncate
  SafetensorsHeader header;
  std::unordered_map<std::string_view, std::size_t> index;  // keys are views of the entries' names
};

namespace {

[[noreturn]] void refuse_to_write(const std::string& path, const std::string& what) {
  throw file_error(ErrorKind::invalid_argument, "writing", path, what);
}

/// Returns the position in the reference writer's order, from last to first. No larger element follows a smaller one,
/// so every tensor is aligned if the data begins at a multiple of eight.
std::ptrdiff_t place_of(DType dtype) noexcept {
  constexpr std::array order = {
      DType::u64,         DType::i64,     DType::f64,       DType::complex64, DType::f32, DType::u32,
      DType::i32,         DType::bf16,    DType::f16,       DType::u16,       DType::i16, DType::f8_e5m2fnuz,
      DType::f8_e4m3fnuz, DType::f8_e8m0, DType::f8_e4m3fn, DType::f8_e5m2,   DType::i8,  DType::u8,
      DType::f6_e3m2,     DType::f6_e2m3, DType::f4_e2m1,   DType::boolean};
  if (dtype == DType::u4 || dtype == DType::i4) dtype = DType::u8;
  return std::ranges::find(order, dtype) - order.begin();
}

/// Whether the format has no such dtype: the tensor is then stored as flat U8.
bool is_own(const TensorEntry& entry) {
  return entry.dtype == DType::u4 || entry.dtype == DType::i4 ||
         element_count(entry.shape) % elements_in_group(entry.dtype) != 0;
}

/// Parses text such as "U4 [3, 5]".
std::optional<TensorSpec> parse_own_text(std::string_view text) {
  const std::size_t space = std::min(text.find(' '), text.size());
  const std::optional<DType> dtype = dtype_from_string(text.substr(0, space));
  if (!dtype || !is_packed(*dtype)) return std::nullopt;
  try {
    TensorSpec spec{*dtype, {}};
    const Config extents = parse_json(text.substr(space));
    for (const Config& extent : extents.as_array()) spec.shape.push_back(extent.as_int());
    return spec;
  } catch (const Error&) {
    return std::nullopt;
  }
}

void append_string(std::string& json, const std::string& text) {
  json += to_json(Config(text));
}

}  // namespace

SafetensorsHeader read_safetensors_header(const os::ReadableFile& file, std::uint64_t begin) {
  const std::uint64_t there = file.bytes() - std::min(begin, file.bytes());
  std::array<std::byte, safetensors_prefix> prefix{};
  file.read_at(begin, std::span(prefix).first(std::min(safetensors_prefix, there)));
  std::uint64_t length = 0;
  std::memcpy(&length, prefix.data(), prefix.size());
  const std::uint64_t head = std::min(there, safetensors_prefix + std::min(length, max_safetensors_header));
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(head);
  const std::span<std::byte> bytes(memory.get(), head);
  file.read_at(begin, bytes);
  return parse_safetensors_header(bytes, there, file.path());
}

SafetensorsFile::SafetensorsFile(std::shared_ptr<const Contents> contents) noexcept : contents_(std::move(contents)) {}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  auto contents = std::make_shared<Contents>(os::ReadableFile::open(path));
  contents->header = read_safetensors_header(contents->file);
  if (!contents->file.is_remote()) contents->mapping = contents->file.map();
  const std::vector<TensorEntry>& tensors = contents->header.tensors;
  contents->index.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) contents->index.emplace(tensors[i].name, i);
  return SafetensorsFile(std::move(contents));
}

const std::string& SafetensorsFile::path() const noexcept {
  return contents_->file.path();
}

const std::vector<TensorEntry>& SafetensorsFile::tensors() const noexcept {
  return contents_->header.tensors;
}

const std::map<std::string, std::string>& SafetensorsFile::metadata() const noexcept {
  return contents_->header.metadata;
}

std::optional<std::size_t> SafetensorsFile::find(std::string_view name) const noexcept {
  const auto found = contents_->index.find(name);
  if (found == contents_->index.end()) return std::nullopt;
  return found->second;
}

bool SafetensorsFile::is_mapped() const noexcept {
  return contents_->mapping != nullptr;
}

Tensor SafetensorsFile::tensor(std::size_t index) const {
  if (index >= tensors().size())
    throw file_error(ErrorKind::not_found, "reading", path(),
                     fmt::format("tensor index {1} is out of range for {0} tensors", tensors().size(), index));
  const TensorEntry& entry = tensors()[index];
  if (contents_->mapping) {
    const std::byte* data = contents_->mapping->bytes().data() + entry.offset;
    return {TensorView(entry.dtype, entry.shape, data), contents_->mapping};
  }
  Tensor tensor = Tensor::allocate(entry.dtype, entry.shape);
  read(index, 0, {tensor.mutable_data(), tensor.nbytes()});
  return tensor;
}

void SafetensorsFile::read(std::size_t index, std::uint64_t offset, std::span<std::byte> target) const {
  if (index >= tensors().size() || offset > tensors()[index].bytes || target.size() > tensors()[index].bytes - offset)
    throw file_error(
        ErrorKind::invalid_argument, "reading", path(),
        fmt::format("{} bytes at offset {} of tensor index {} are out of range", target.size(), offset, index));
  contents_->file.read_at(tensors()[index].offset + offset, target);
}

Tensor SafetensorsFile::tensor(std::string_view name) const {
  const std::optional<std::size_t> index = find(name);
  if (!index)
    throw file_error(ErrorKind::not_found, "reading", path(), fmt::format("tensor {} does not exist", in_quotes(name)));
  return tensor(*index);
}

struct SafetensorsWriter::State {
  State(const std::string& path, std::vector<TensorEntry> announced, std::map<std::string, std::string> metadata)
      : tensors(std::move(announced)),
        header(make_safetensors_header(tensors, std::move(metadata), path)),
        written(tensors.size()),
        file(path) {
    index.reserve(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) index.emplace(tensors[i].name, i);
    file.reserve(tensors.empty() ? header.size() : tensors.back().offset + tensors.back().bytes);
  }

  std::size_t place(std::string_view name) const {
    const auto found = index.find(name);
    if (found != index.end()) return found->second;
    throw file_error(ErrorKind::not_found, "writing", file.path(),
                     fmt::format("tensor {}: it was not announced", in_quotes(name)));
  }

  [[noreturn]] void refuse(const TensorEntry& entry, const std::string& what) const {
    throw file_error(ErrorKind::invalid_argument, "writing", file.path(),
                     fmt::format("tensor {}: {}", in_quotes(entry.name), what));
  }

  std::vector<TensorEntry> tensors;
  std::string header;
  std::vector<std::atomic<std::uint64_t>> written;          // bytes of each tensor so far
  std::unordered_map<std::string_view, std::size_t> index;  // keys are views of the entries' names
  os::PublishedFile file;
  bool is_committed = false;
};

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorEntry> tensors,
                                     std::map<std::string, std::string> metadata)
    : state_(std::make_unique<State>(path, std::move(tensors), std::move(metadata))) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

const std::vector<TensorEntry>& SafetensorsWriter::tensors() const noexcept {
  return state_->tensors;
}

void SafetensorsWriter::write(std::string_view name, std::uint64_t offset, std::span<const std::byte> bytes) {
  const std::size_t place = state_->place(name);
  const TensorEntry& entry = state_->tensors[place];
  if (offset > entry.bytes || bytes.size() > entry.bytes - offset)
    state_->refuse(entry, fmt::format("{} bytes at offset {} are out of range for its {} bytes", bytes.size(), offset,
                                      entry.bytes));
  state_->file.write_at(entry.offset + offset, bytes);
  // Counted only after a successful write, so that failed writes are missing at the end.
  state_->written[place].fetch_add(bytes.size(), std::memory_order_relaxed);
}

void SafetensorsWriter::write(std::string_view name, const TensorView& tensor) {
  const TensorEntry& entry = state_->tensors[state_->place(name)];
  if (tensor.dtype() != entry.dtype || tensor.shape() != entry.shape)
    state_->refuse(entry, fmt::format("expected {} {} as announced, received {} {}", to_string(entry.dtype),
                                      to_string(entry.shape), to_string(tensor.dtype()), to_string(tensor.shape())));
  if (tensor.is_contiguous())
    write(name, 0, tensor.bytes());
  else
    write(name, 0, Tensor::copy_of(tensor).bytes());
}

void SafetensorsWriter::commit() {
  State& state = *state_;
  if (state.is_committed)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("{}: writing: the file is already finished", in_quotes(state.file.path())),
                {.path = state.file.path()});
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    const std::uint64_t written = state.written[i].load(std::memory_order_relaxed);
    if (written != state.tensors[i].bytes)
      state.refuse(state.tensors[i], fmt::format("{} of its {} bytes were written", written, state.tensors[i].bytes));
  }
  // Written last: until then the file begins with zeros, which no reader accepts as a header.
  state.file.write_at(0, std::as_bytes(std::span(state.header)));
  state.file.commit();
  state.is_committed = true;
}

// Writes headers, and converts tensors that the format has no dtype for: "muster.dtype.NAME" in both directions.

namespace {

/// Returns the JSON of a header, without padding. Offsets of the entries count from `data_begin` on.
std::string header_json(std::span<const TensorEntry> tensors, std::map<std::string, std::string> metadata,
                        const std::string& path, std::uint64_t data_begin) {
  for (const TensorEntry& entry : tensors)
    if (is_own(entry))
      metadata[std::string(safetensors_dtype_key) + entry.name] = to_string(TensorSpec{entry.dtype, entry.shape});
  std::string json = "{";
  if (!metadata.empty()) {
    append_string(json, std::string(safetensors_metadata_key));
    json += ':';
    char separator = '{';
    for (const auto& [key, value] : metadata) {
      if (!is_utf8(key) || !is_utf8(value))
        refuse_to_write(path, fmt::format("metadata {}: the text is not UTF-8", in_quotes(key)));
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
    const bool is_flat = is_own(entry);
    const Shape shape = is_flat ? Shape{static_cast<std::int64_t>(entry.bytes)} : entry.shape;
    fmt::format_to(std::back_inserter(json), R"(:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                   to_string(is_flat ? DType::u8 : entry.dtype), fmt::join(shape, ","), entry.offset - data_begin,
                   entry.offset - data_begin + entry.bytes);
  }
  return json += '}';
}

/// Puts the length field before the JSON.
std::string with_length(const std::string& json) {
  std::string whole;
  whole.reserve(safetensors_prefix + json.size());
  for (std::size_t i = 0; i < safetensors_prefix; ++i)
    whole.push_back(static_cast<char>(static_cast<unsigned char>(json.size() >> (8 * i))));
  return whole += json;
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
      refuse_to_write(path, fmt::format("tensor {}: the name is reserved for metadata", in_quotes(entry.name)));
    if (!is_utf8(entry.name))
      refuse_to_write(path, fmt::format("tensor {}: the name is not UTF-8", in_quotes(entry.name)));
    if (!names.insert(entry.name).second)
      refuse_to_write(path, fmt::format("tensor {}: the name is duplicated", in_quotes(entry.name)));
    try {
      entry.bytes = byte_size(entry.dtype, entry.shape);
    } catch (const Error& error) {
      throw error.with_context(fmt::format("{}: writing: tensor {}", in_quotes(path), in_quotes(entry.name)));
    }
    entry.offset = end;
    if (__builtin_add_overflow(end, entry.bytes, &end) || end > INT64_MAX)
      refuse_to_write(path, "the tensors need more bytes than a file can have");
  }
  std::string json = header_json(tensors, std::move(metadata), path, 0);
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (json.size() > max_safetensors_header)
    refuse_to_write(
        path, fmt::format("the header would have {} bytes for {} tensors, and the limit is {}. Divide the tensors "
                          "among more files: a smaller --max-shard-size, or more pipeline stages or expert ranks",
                          json.size(), tensors.size(), max_safetensors_header));
  for (TensorEntry& entry : tensors) entry.offset += safetensors_prefix + json.size();
  return with_length(json);
}

std::string make_safetensors_header(std::span<const TensorEntry> placed, std::map<std::string, std::string> metadata,
                                    const std::string& path, std::uint64_t size) {
  std::string json = header_json(placed, std::move(metadata), path, size);
  if (json.size() + safetensors_prefix > size)
    refuse_to_write(path, fmt::format("the header needs {} bytes for {} tensors, and {} are reserved", json.size(),
                                      placed.size(), size - safetensors_prefix));
  json.resize(size - safetensors_prefix, ' ');
  return with_length(json);
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
    // A program that removed some tensors from a file may have kept all of its metadata.
    const auto found = entries.find(std::string_view(member->first).substr(safetensors_dtype_key.size()));
    if (found == entries.end()) continue;
    TensorEntry& entry = *found->second;
    std::optional<TensorSpec> own = parse_own_text(member->second);
    bool fits = own && entry.dtype == DType::u8;
    try {
      fits = fits && byte_size(own->dtype, own->shape) == entry.bytes;
    } catch (const Error&) {
      fits = false;  // the shape's size overflows
    }
    if (!fits)
      throw file_error(
          ErrorKind::corrupt, "reading", path,
          fmt::format("tensor {}: the metadata records {}, which does not fit its {} bytes of {}",
                      in_quotes(entry.name), in_quotes(member->second), entry.bytes, to_string(entry.dtype)));
    entry.dtype = own->dtype;
    entry.shape = std::move(own->shape);
  }
  header.metadata.erase(begin, end);
}

// Reads a header:
//
//  1. Length and first byte.
//  2. JSON text, with one member at a time in memory. Each is an entry, which is checked by itself.
//  3. Entries, sorted by offset, must cover the rest of the file exactly.
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

void read_metadata(const Config& json, std::map<std::string, std::string>& metadata) {
  if (json.is_null()) return;  // treated as missing
  if (!json.is_object())
    refuse_header(fmt::format("{} is {}, not an object of strings", safetensors_metadata_key, kind_of(json)));
  for (const auto& [key, value] : json.as_object()) {
    if (value.is_string()) {
      metadata.emplace(key, value.as_string());
      continue;
    }
    if (key == "shape" || key == "data_offsets")
      refuse_header(fmt::format("tensor {}: the name is reserved for metadata", in_quotes(safetensors_metadata_key)));
    refuse_header(fmt::format("{}: the value of {} is {}, not a string", safetensors_metadata_key, in_quotes(key),
                              kind_of(value)));
  }
}

std::vector<std::uint64_t> read_numbers(const TensorEntry& entry, std::string_view key, const Config& list) {
  if (!list.is_array()) refuse_entry(entry, fmt::format("{} is {}, not a list", key, kind_of(list)));
  std::vector<std::uint64_t> numbers;
  for (const Config& item : list.as_array()) {
    if (item.type() == Config::Type::integer && item.as_int() < 0)
      refuse_entry(entry, fmt::format("{} has the negative number {}", key, item.as_int()));
    if (item.type() == Config::Type::real)
      refuse_entry(entry, fmt::format("{} has {}: not an integer", key, to_json(item)));
    if (item.type() != Config::Type::integer && item.type() != Config::Type::unsigned_integer)
      refuse_entry(entry, fmt::format("{} has {}, expected an integer", key, kind_of(item)));
    numbers.push_back(item.as_uint());
  }
  return numbers;
}

/// Members that the format does not define are ignored, as in its reference reader.
TensorEntry read_entry(std::string name, const Config& json) {
  if (!json.is_object())
    refuse_header(fmt::format("tensor {}: the entry is {}, not an object", in_quotes(name), kind_of(json)));
  TensorEntry entry{.name = std::move(name)};
  const auto member = [&](std::string_view key) -> const Config& {
    const Config* found = json.find(key);
    if (found == nullptr) refuse_entry(entry, fmt::format("{} is missing", key));
    return *found;
  };
  const Config& dtype = member("dtype");
  if (!dtype.is_string()) refuse_entry(entry, fmt::format("dtype is {}, not a string", kind_of(dtype)));
  const std::optional<DType> known = dtype_from_string(dtype.as_string());
  // Dtypes of Muster alone: in the format itself they are not valid.
  if (!known || *known == DType::u4 || *known == DType::i4)
    refuse_entry(entry, fmt::format("unknown dtype {}", in_quotes(dtype.as_string())));
  entry.dtype = *known;
  for (const std::uint64_t extent : read_numbers(entry, "shape", member("shape"))) {
    if (!std::in_range<std::int64_t>(extent))
      refuse_entry(entry, fmt::format("shape overflows: the extent {} does not fit into 63 bits", extent));
    entry.shape.push_back(static_cast<std::int64_t>(extent));
  }
  const std::vector<std::uint64_t> offsets = read_numbers(entry, "data_offsets", member("data_offsets"));
  if (offsets.size() != 2) refuse_entry(entry, fmt::format("data_offsets has {} numbers, expected 2", offsets.size()));
  if (offsets[0] > offsets[1])
    refuse_entry(entry, fmt::format("data_offsets [{}, {}] end before they begin", offsets[0], offsets[1]));
  entry.offset = offsets[0];
  entry.bytes = offsets[1] - offsets[0];
  return entry;
}

void check_size(const TensorEntry& entry) {
  std::uint64_t needed = 0;
  try {
    needed = byte_size(entry.dtype, entry.shape);
  } catch (const Error&) {
    refuse_entry(entry, fmt::format("shape overflows: {} has too many elements", to_string(entry.shape)));
  }
  if (element_count(entry.shape) % elements_in_group(entry.dtype) != 0)
    refuse_entry(entry, fmt::format("{} elements of {} end in the middle of a byte", element_count(entry.shape),
                                    to_string(entry.dtype)));
  if (needed != entry.bytes)
    refuse_entry(entry,
                 fmt::format("{} {} needs {} bytes, and data_offsets [{}, {}] have {}", to_string(entry.dtype),
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
      refuse_entry(entry, fmt::format("data_offsets [{}, {}] are out of range for the {} bytes of tensors in the file",
                                      entry.offset, end, data_bytes));
    if (entry.offset < covered)
      refuse_entry(entry, fmt::format("bytes [{}, {}] overlap those of tensor {}, which end at {}", entry.offset, end,
                                      in_quotes(before->name), covered));
    if (entry.offset > covered)
      refuse_entry(entry,
                   fmt::format("gap before the tensor: bytes [{}, {}] belong to no tensor", covered, entry.offset));
    covered = end;
    before = &entry;
  }
  if (covered != data_bytes)
    refuse_header(fmt::format("{} bytes at the end belong to no tensor", data_bytes - covered));
}

/// Returns the JSON text of the header of a file of this size.
std::string_view header_text(std::span<const std::byte> head, std::uint64_t file_size) {
  if (file_size < safetensors_prefix || head.size() < safetensors_prefix)
    refuse_header(fmt::format("not a safetensors file, or truncated: {} bytes are too few for the length of a header",
                              file_size));
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < safetensors_prefix; ++i) length |= std::to_integer<std::uint64_t>(head[i]) << (8 * i);
  if (length > max_safetensors_header) {
    const std::string_view advice = formats::advice_about(formats::kind_of_file(head));
    refuse_header(advice.empty()
                      ? fmt::format("not a safetensors file: the header would have {} bytes, and the limit is {}",
                                    length, max_safetensors_header)
                      : fmt::format("not a safetensors file but {}", advice));
  }
  if (length > file_size - safetensors_prefix || length > head.size() - safetensors_prefix)
    refuse_header(
        fmt::format("truncated safetensors file: the header needs {} bytes, and the file has {}", length, file_size));
  const char* begin = reinterpret_cast<const char*>(head.data()) + safetensors_prefix;
  if (length == 0 || *begin != '{') refuse_header("not a safetensors file: the header does not begin with '{'");

  return {begin, length};
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_size,
                                           const std::string& path) {
  SafetensorsHeader header;
  with_file("reading", path, [&] {
    const std::string_view text = header_text(head, file_size);
    std::unordered_set<std::string> names;
    core::visit_members(text, [&](std::string& name, Config& json) {
      if (!names.insert(name).second) refuse_header(fmt::format("tensor {}: the name is duplicated", in_quotes(name)));
      if (name == safetensors_metadata_key)
        read_metadata(json, header.metadata);
      else
        header.tensors.push_back(read_entry(std::move(name), json));
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
