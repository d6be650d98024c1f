// SPDX-License-Identifier: Apache-2.0
// Reading a header. nlohmann's parser does the syntax and gives events; what may follow what is decided here, so that
// nothing is built but the entries, however large or deep the text is.
//
//  1. Length and first byte. 2. Events become entries; each is checked by itself as it ends. 3. Entries in the order of
//  their bytes must cover the rest of the file exactly.

#include "src/checkpoint/model_files.hpp"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_set>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

/// The receiver of the parser's events.
class HeaderReader {
 public:
  explicit HeaderReader(const std::string& path) : path_(path) {}

  [[nodiscard]] SafetensorsHeader take() { return std::move(header_); }

  [[noreturn]] void defect(const std::string& what) const {
    const std::string where = place_ == Place::top || place_ == Place::start ? "" : describe() + ": ";
    throw file_error(ErrorKind::corrupt, "reading", path_, fmt::format("{}{}", where, what));
  }

  // What the parser calls; each returns whether to go on.
  bool null() { return other_value("null"); }
  bool boolean(bool) { return other_value("a boolean"); }
  bool number_integer(std::int64_t value) {
    if (place_ == Place::shape) defect(fmt::format("its shape has the negative extent {}", value));
    if (place_ == Place::offsets) defect(fmt::format("its data_offsets have the negative number {}", value));
    return other_value("a number");
  }
  bool number_unsigned(std::uint64_t value) {
    if (place_ == Place::shape) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        defect(fmt::format("its shape overflows: the extent {} is beyond 63 bits", value));
      entry_.shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (place_ == Place::offsets) {
      if (offset_count_ < 2) offsets_[offset_count_] = value;
      ++offset_count_;
      return true;
    }
    return other_value("a number");
  }
  bool number_float(double, const std::string& text) {
    if (place_ == Place::shape || place_ == Place::offsets)
      defect(fmt::format("{} has {}, which is no whole number of 64 bits",
                         place_ == Place::shape ? "its shape" : "data_offsets", in_quotes(text)));
    return other_value("a number");
  }
  bool string(std::string& value) {
    if (place_ == Place::metadata) {
      header_.metadata.insert_or_assign(key_, std::move(value));
      return true;
    }
    if (place_ == Place::tensor && key_ == "dtype") {
      const std::optional<DType> dtype = dtype_from_string(value);
      // Ours alone: a file that says so itself was made by something else.
      if (!dtype || *dtype == DType::u4 || *dtype == DType::i4)
        defect(fmt::format("its dtype {} is not known", in_quotes(value)));
      entry_.dtype = *dtype;
      return true;
    }
    return other_value("a string");
  }
  bool binary(const nlohmann::json::binary_t&) { return other_value("binary data"); }

  bool start_object(std::size_t) {
    if (place_ == Place::start) {
      place_ = Place::top;
      return true;
    }
    if (place_ == Place::top) {
      place_ = is_metadata_ ? Place::metadata : Place::tensor;
      entry_ = {.name = is_metadata_ ? std::string() : std::move(key_)};
      seen_ = 0;
      members_.clear();
      return true;
    }
    if (skips()) return skip(1);
    return other_value("an object");
  }
  bool key(std::string& name) {
    if (skipped_ != 0) return true;
    if (place_ == Place::top) {
      if (!names_.insert(name).second) defect(fmt::format("the name {} is there twice", in_quotes(name)));
      is_metadata_ = name == safetensors_metadata_key;
    } else if (place_ == Place::metadata) {
      if (header_.metadata.contains(name)) defect(fmt::format("the key {} is there twice", in_quotes(name)));
    } else {
      note_member(name);
    }
    key_ = std::move(name);
    return true;
  }
  bool end_object() {
    if (skipped_ != 0) return skip(-1);
    if (place_ == Place::tensor) finish_tensor();
    place_ = place_ == Place::top ? Place::start : Place::top;
    return true;
  }
  bool start_array(std::size_t) {
    if (place_ == Place::tensor && key_ == "shape") {
      place_ = Place::shape;
      return true;
    }
    if (place_ == Place::tensor && key_ == "data_offsets") {
      place_ = Place::offsets;
      offset_count_ = 0;
      return true;
    }
    if (skips()) return skip(1);
    return other_value("a list");
  }
  bool end_array() {
    if (skipped_ != 0) return skip(-1);
    if (place_ == Place::offsets && offset_count_ != 2)
      defect(fmt::format("its data_offsets have {} numbers instead of 2", offset_count_));
    place_ = Place::tensor;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) {
    std::string_view words = error.what();
    // "[json.exception.parse_error.101] parse error at line 1, column 2: what; last read: '...'", of any length.
    if (const std::size_t at = words.find("column"); at != std::string_view::npos) {
      const std::size_t colon = words.find(": ", at);
      if (colon != std::string_view::npos) words.remove_prefix(colon + 2);
    }
    words = words.substr(0, std::min<std::size_t>(words.find("; last read"), 120));
    const bool is_text =
        words.find("UTF-8") == std::string_view::npos && words.find("surrogate") == std::string_view::npos;
    place_ = Place::top;
    defect(fmt::format("the header is not valid {} at its byte {}: {}", is_text ? "JSON" : "UTF-8", position, words));
  }

 private:
  enum class Place : std::uint8_t { start, top, metadata, tensor, shape, offsets };
  enum Member : unsigned { has_dtype = 1, has_shape = 2, has_offsets = 4, has_all = 7 };

  [[nodiscard]] std::string describe() const {
    return place_ == Place::metadata ? std::string(safetensors_metadata_key) : "tensor " + in_quotes(entry_.name);
  }

  void note_member(const std::string& name) {
    const unsigned member = name == "dtype"          ? has_dtype
                            : name == "shape"        ? has_shape
                            : name == "data_offsets" ? has_offsets
                                                     : 0U;
    if ((seen_ & member) != 0 || (member == 0 && !members_.insert(name).second))
      defect(fmt::format("the key {} is there twice", in_quotes(name)));
    seen_ |= member;
  }

  // Members of a tensor that the format does not name are passed over, as its reference reader does.
  [[nodiscard]] bool skips() const {
    return skipped_ != 0 || (place_ == Place::tensor && key_ != "dtype" && key_ != "shape" && key_ != "data_offsets");
  }
  bool skip(int step) {
    skipped_ = static_cast<std::uint32_t>(static_cast<int>(skipped_) + step);
    return true;
  }

  bool other_value(std::string_view type) {
    if (skips()) return true;
    switch (place_) {
      case Place::start:
        defect(fmt::format("the header is {}, not an object", type));
      case Place::top:
        defect(is_metadata_ ? fmt::format("{} is {}, not an object of strings", safetensors_metadata_key, type)
                            : fmt::format("tensor {} is {}, not an object", in_quotes(key_), type));
      case Place::metadata:
        if (key_ == "shape" || key_ == "data_offsets") defect("this name is kept for metadata, no tensor can have it");
        defect(fmt::format("the value of {} is {}, not a string", in_quotes(key_), type));
      default:
        defect(place_ == Place::tensor ? fmt::format("its {} is {}, which it cannot be", key_, type)
                                       : fmt::format("its {} has {} among its numbers", key_, type));
    }
  }

  void finish_tensor() {
    if (seen_ != has_all)
      defect(fmt::format("it has no {}", (seen_ & has_dtype) == 0   ? "dtype"
                                         : (seen_ & has_shape) == 0 ? "shape"
                                                                    : "data_offsets"));
    if (offsets_[0] > offsets_[1])
      defect(fmt::format("its data_offsets [{}, {}] end before they begin", offsets_[0], offsets_[1]));
    entry_.offset = offsets_[0];
    entry_.bytes = offsets_[1] - offsets_[0];
    header_.tensors.push_back(std::move(entry_));
  }

  const std::string& path_;
  SafetensorsHeader header_;
  std::unordered_set<std::string> names_;
  std::unordered_set<std::string> members_;  // of one tensor, beside the three of the format
  std::string key_;
  TensorEntry entry_;
  std::uint64_t offsets_[2] = {0, 0};
  std::size_t offset_count_ = 0;
  std::uint32_t skipped_ = 0;
  unsigned seen_ = 0;
  bool is_metadata_ = false;
  Place place_ = Place::start;
};

[[noreturn]] void refuse_file(const std::string& path, const std::string& what) {
  throw file_error(ErrorKind::corrupt, "reading", path, what);
}

[[noreturn]] void refuse_file(const std::string& path, const TensorEntry& entry, const std::string& what) {
  refuse_file(path, fmt::format("tensor {}: {}", in_quotes(entry.name), what));
}

void check_size(const TensorEntry& entry, const std::string& path) {
  std::uint64_t needed = 0;
  try {
    needed = byte_size(entry.dtype, entry.shape);
  } catch (const Error&) {
    refuse_file(path, entry, fmt::format("its shape overflows: {} has too many elements", to_string(entry.shape)));
  }
  if (is_packed(entry.dtype) && element_count(entry.shape) % 2 != 0)
    refuse_file(path, entry,
                fmt::format("{} elements of {} end in the middle of a byte", element_count(entry.shape),
                            to_string(entry.dtype)));
  if (needed != entry.bytes)
    refuse_file(path, entry,
                fmt::format("{} {} takes {} bytes, its data_offsets [{}, {}] give it {}", to_string(entry.dtype),
                            to_string(entry.shape), needed, entry.offset, entry.offset + entry.bytes, entry.bytes));
}

// Sorted by their bytes, entries must begin at 0, follow each other and end with the file.
void check_cover(std::vector<TensorEntry>& entries, std::uint64_t data_bytes, const std::string& path) {
  const auto by_place = [](const TensorEntry& a, const TensorEntry& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.bytes < b.bytes;
  };
  // Files of the field's writers are sorted already.
  if (!std::is_sorted(entries.begin(), entries.end(), by_place))
    std::stable_sort(entries.begin(), entries.end(), by_place);
  std::uint64_t covered = 0;
  const TensorEntry* before = nullptr;
  for (const TensorEntry& entry : entries) {
    const std::uint64_t end = entry.offset + entry.bytes;
    if (end > data_bytes)
      refuse_file(path, entry,
                  fmt::format("its data_offsets [{}, {}] are outside the file, which has {} bytes of tensors",
                              entry.offset, end, data_bytes));
    if (entry.offset < covered)
      refuse_file(path, entry,
                  fmt::format("its bytes [{}, {}] overlap those of tensor {}, which end at {}", entry.offset, end,
                              in_quotes(before->name), covered));
    if (entry.offset > covered)
      refuse_file(path, entry,
                  fmt::format("before it is a hole: bytes [{}, {}] belong to no tensor", covered, entry.offset));
    covered = end;
    before = &entry;
  }
  if (covered != data_bytes)
    refuse_file(path, fmt::format("{} bytes at the end belong to no tensor", data_bytes - covered));
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_size,
                                           const std::string& path) {
  if (file_size < safetensors_prefix || head.size() < safetensors_prefix)
    refuse_file(path,
                fmt::format("it has {} bytes, too few for the length of a header; it is no safetensors file, or cut "
                            "off",
                            file_size));
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < safetensors_prefix; ++i) length |= std::to_integer<std::uint64_t>(head[i]) << (8 * i);
  if (length > max_safetensors_header) {
    const std::string_view start(reinterpret_cast<const char*>(head.data()), safetensors_prefix);
    // A pickle's first opcode is its protocol, 2 to 5.
    const bool is_pickle = start[0] == '\x80' && start[1] >= 2 && start[1] <= 5;
    refuse_file(path,
                start.starts_with("PK\x03\x04") || is_pickle
                    ? "it is no safetensors file but a zip archive or a pickle, as PyTorch writes them, which is not "
                      "read: save the model as safetensors"
                    : fmt::format("it is no safetensors file: its header would have {} bytes, more than the {} that "
                                  "are allowed",
                                  length, max_safetensors_header));
  }
  if (length > file_size - safetensors_prefix || length > head.size() - safetensors_prefix)
    refuse_file(path, fmt::format("its header would have {} bytes, but the file ends after {}; it is cut off", length,
                                  file_size));
  const char* begin = reinterpret_cast<const char*>(head.data()) + safetensors_prefix;
  if (length == 0 || *begin != '{') refuse_file(path, "its header does not begin with '{'; it is no safetensors file");

  // The parser takes a NUL for the end of the text and would not look at what follows.
  if (const void* nul = std::memchr(begin, 0, length); nul != nullptr)
    refuse_file(path, fmt::format("the header is not valid JSON at its byte {}: it is a NUL",
                                  static_cast<const char*>(nul) - begin + 1));

  HeaderReader reader(path);
  nlohmann::json::sax_parse(begin, begin + length, &reader);
  SafetensorsHeader header = reader.take();
  for (const TensorEntry& entry : header.tensors) check_size(entry, path);
  header.data_begin = safetensors_prefix + length;
  check_cover(header.tensors, file_size - header.data_begin, path);
  for (TensorEntry& entry : header.tensors) entry.offset += header.data_begin;
  apply_own_dtypes(header, path);
  return header;
}

}  // namespace muster
