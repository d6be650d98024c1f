// SPDX-License-Identifier: Apache-2.0
// The second pass over a third-party file reads attributes and datasets of text.

#include <hdf5.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "src/checkpoint/thirdparty/hdf5/listing.hpp"
#include "src/hdf5/ids.hpp"

namespace muster::hdf5 {
namespace {

constexpr std::uint64_t most_attributes = 1000;  // of one object
constexpr std::uint64_t most_elements = 256;     // of one list of text

/// Returns arbitrary bytes as a JSON string.
std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      std::array<char, 8> escaped{};
      std::snprintf(escaped.data(), escaped.size(), "\\u%04x", byte);
      out += escaped.data();
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string text_damaged(const std::string& why) {
  return "an attribute or text that cannot be read: " + why;
}

std::string text_length(std::string_view attribute) {
  std::string words = "a text that is too long to be shown";
  if (!attribute.empty()) words.append(", the attribute \"").append(attribute).append("\"");
  return words;
}

class TextReader {
 public:
  TextReader(hid_t file, ReportWriter& report) : file_(file), report_(report) {}

  void texts(const ObjectToRead& object) {
    const Id id(H5Oopen_by_addr(file_, object.address));
    if (!id) {
      report_.issue(object.path, text_damaged(last_failure()));
      return;
    }
    if (object.is_text) dataset(id.get(), object.path);
    if (object.has_attributes) attributes(id.get(), object);
  }

 private:
  void tell(const std::string& path, std::string_view attribute, std::string_view value) {
    told_ += value.size();
    if (told_ > most_texts_bytes) {
      not_shown(path, attribute, text_length(attribute));
      return;
    }
    report_.record(RecordBytes(ForeignRecord::text).text(path).text(attribute).text(value));
  }

  /// `attribute` is empty for a dataset.
  void not_shown(const std::string& path, std::string_view attribute, const std::string& words) {
    attribute.empty() ? report_.loss(path, words) : report_.issue(path, words);
  }

  /// Returns the strings of a dataset or an attribute, which `read` copies into a buffer. Returns nullopt if they
  /// cannot be read, and reports the issue.
  template <class Read>
  std::optional<std::string> strings(hid_t type, hid_t space, const std::string& path, std::string_view attribute,
                                     Read read) {
    const hssize_t count = H5Sget_simple_extent_npoints(space);
    const bool is_scalar = H5Sget_simple_extent_type(space) == H5S_SCALAR;
    const auto damaged = [&] {
      not_shown(path, attribute, text_damaged(std::string(attribute) + ": " + last_failure()));
      return std::nullopt;
    };
    const auto too_long = [&] {
      not_shown(path, attribute, text_length(attribute));
      return std::nullopt;
    };
    if (count < 0) return damaged();
    const auto elements = static_cast<std::uint64_t>(count);
    if (elements > most_elements) return too_long();
    if (elements == 0) return is_scalar ? "" : "[]";
    const std::size_t bytes = H5Tget_size(type);
    const htri_t is_variable = H5Tis_variable_str(type);
    if (is_variable < 0 || bytes == 0) return damaged();
    std::vector<std::string> all;
    if (is_variable > 0) {
      const Id memory(H5Tcopy(type));
      std::vector<char*> made(elements, nullptr);
      const bool is_read = memory && read(memory.get(), made.data()) >= 0;
      std::uint64_t total = 0;
      for (char* text : made) {
        const std::unique_ptr<char, herr_t (*)(void*)> owner(text, H5free_memory);
        if (!is_read || text == nullptr) continue;
        const std::size_t length = std::strlen(text);
        total += length;
        if (total <= most_text_bytes) all.emplace_back(text, length);
      }
      if (!is_read) return damaged();
      if (total > most_text_bytes) return too_long();
      all.resize(elements);
    } else {
      if (bytes > most_text_bytes / elements) return too_long();
      std::string buffer(bytes * elements, '\0');
      if (read(type, buffer.data()) < 0) return damaged();
      const H5T_str_t padding = H5Tget_strpad(type);
      for (std::uint64_t i = 0; i < elements; ++i) {
        std::string text = buffer.substr(i * bytes, bytes);
        // A string ends at the first NUL if it is NUL-terminated; otherwise the padding at the end is removed.
        const char pad = padding == H5T_STR_SPACEPAD ? ' ' : '\0';
        if (padding == H5T_STR_NULLTERM)
          text.resize(std::min(text.size(), text.find('\0')));
        else
          text.resize(text.find_last_not_of(pad) + 1);
        all.push_back(std::move(text));
      }
    }
    if (is_scalar) return all[0];
    std::string list = "[";
    for (const std::string& text : all) list += (list.size() == 1 ? "" : ", ") + json_string(text);
    return list + "]";
  }

  void dataset(hid_t id, const std::string& path) {
    const Id type(H5Dget_type(id));
    const Id space(H5Dget_space(id));
    if (!type || !space) {
      report_.loss(path, text_damaged(last_failure()));
      return;
    }
    // Compressed or chunked text would pass through libhdf5's filters.
    const Id properties(H5Dget_create_plist(id));
    if (!properties || H5Pget_nfilters(properties.get()) != 0) {
      report_.loss(path, "not a tensor: its elements are text that is compressed");
      return;
    }
    const std::optional<std::string> value = strings(type.get(), space.get(), path, "", [&](hid_t as, void* to) {
      return H5Dread(id, as, H5S_ALL, H5S_ALL, H5P_DEFAULT, to);
    });
    if (value) tell(path, "", *value);
  }

  /// Returns one number as text; nullopt for anything else.
  static std::optional<std::string> number(hid_t attribute, hid_t type, hid_t space) {
    if (H5Sget_simple_extent_npoints(space) != 1) return std::nullopt;
    const ElementType element = element_type(type);
    if (!element.dtype) return std::nullopt;
    const H5T_class_t kind = H5Tget_class(type);
    if (*element.dtype == DType::boolean) {
      signed char value = 0;
      if (H5Aread(attribute, type, &value) < 0) return std::nullopt;
      return value == 0 ? "false" : "true";
    }
    if (kind == H5T_INTEGER && H5Tget_sign(type) == H5T_SGN_NONE) {
      unsigned long long value = 0;
      if (H5Aread(attribute, H5T_NATIVE_ULLONG, &value) < 0) return std::nullopt;
      return std::to_string(value);
    }
    if (kind == H5T_INTEGER) {
      long long value = 0;
      if (H5Aread(attribute, H5T_NATIVE_LLONG, &value) < 0) return std::nullopt;
      return std::to_string(value);
    }
    if (kind == H5T_FLOAT && *element.dtype != DType::f8_e4m3fn) {
      double value = 0;
      if (H5Aread(attribute, H5T_NATIVE_DOUBLE, &value) < 0) return std::nullopt;
      std::array<char, 40> text{};
      std::snprintf(text.data(), text.size(), "%.17g", value);
      return std::string(text.data());
    }
    return std::nullopt;
  }

  /// Reads a list of integers, which Muster's own files have as the logical shape of elements of 4 bits.
  bool logical_shape(hid_t attribute, hid_t type, hid_t space, const ObjectToRead& object) {
    const hssize_t count = H5Sget_simple_extent_npoints(space);
    if (H5Tget_class(type) != H5T_INTEGER || H5Sget_simple_extent_ndims(space) != 1 || count < 0 || count > most_rank)
      return false;
    std::array<long long, most_rank> extents{};
    if (count != 0 && H5Aread(attribute, H5T_NATIVE_LLONG, extents.data()) < 0) return false;
    RecordBytes record(ForeignRecord::shape);
    record.number(static_cast<std::uint64_t>(object.tensor)).number(static_cast<std::uint64_t>(count));
    for (hssize_t i = 0; i < count; ++i) {
      if (extents[static_cast<std::size_t>(i)] < 0) return false;
      record.number(static_cast<std::uint64_t>(extents[static_cast<std::size_t>(i)]));
    }
    report_.record(record);
    return true;
  }

  /// The context of a visit of an object's attributes. Exceptions must not unwind through libhdf5, so they are stored
  /// here.
  struct AttributeVisit {
    TextReader* reader;
    const ObjectToRead* object;
    std::uint64_t seen = 0;
    std::uint64_t skipped = 0;
    std::exception_ptr failure = {};
  };

  static herr_t visit_attribute(hid_t id, const char* name, const H5A_info_t* /*info*/, void* data) {
    auto& here = *static_cast<AttributeVisit*>(data);
    if (here.seen++ == most_attributes) return 1;
    try {
      if (!here.reader->attribute(id, name, *here.object)) ++here.skipped;
      return 0;
    } catch (...) {
      here.failure = std::current_exception();
      return 1;
    }
  }

  void attributes(hid_t id, const ObjectToRead& object) {
    AttributeVisit here{this, &object};
    hsize_t at = 0;
    // One iteration over all attributes: with single look-ups, libhdf5 would sort all of them each time.
    const herr_t result = H5Aiterate2(id, H5_INDEX_NAME, H5_ITER_NATIVE, &at, &visit_attribute, &here);
    if (here.failure) std::rethrow_exception(here.failure);
    if (result < 0) report_.issue(object.path, text_damaged(last_failure()));
    if (result > 0)
      report_.issue(object.path,
                    "more than " + std::to_string(most_attributes) + " attributes: the remaining ones are not shown");
    H5Eclear2(H5E_DEFAULT);
    if (here.skipped != 0)
      report_.issue(object.path,
                    std::to_string(here.skipped) + " of its attributes are neither text nor one number: not shown");
  }

  /// Returns false if the attribute is of a kind that is not shown.
  bool attribute(hid_t id, const char* name, const ObjectToRead& object) {
    const Id attribute(H5Aopen(id, name, H5P_DEFAULT));
    const Id type(attribute ? H5Aget_type(attribute.get()) : hid_t{-1});
    const Id space(attribute ? H5Aget_space(attribute.get()) : hid_t{-1});
    if (!type || !space) {
      report_.issue(object.path, text_damaged(std::string(name) + ": " + last_failure()));
      return true;
    }
    if (H5Tget_class(type.get()) == H5T_STRING) {
      const std::optional<std::string> value =
          strings(type.get(), space.get(), object.path, name,
                  [&](hid_t as, void* to) { return H5Aread(attribute.get(), as, to); });
      if (value) tell(object.path, name, *value);
      return true;
    }
    const std::optional<std::string> value = number(attribute.get(), type.get(), space.get());
    if (value) tell(object.path, name, *value);
    return value || (object.tensor >= 0 && std::string_view(name) == "shape" &&
                     logical_shape(attribute.get(), type.get(), space.get(), object));
  }

  hid_t file_;
  ReportWriter& report_;
  std::uint64_t told_ = 0;
};

}  // namespace

void report_texts(hid_t file, const std::vector<ObjectToRead>& objects, ReportWriter& report) {
  TextReader reader(file, report);
  for (const ObjectToRead& object : objects)
    if (object.is_text || object.has_attributes) reader.texts(object);
}

}  // namespace muster::hdf5
