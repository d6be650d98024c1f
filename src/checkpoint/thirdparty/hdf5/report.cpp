// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/thirdparty/hdf5/file.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"

namespace muster {
namespace {

using hdf5::ForeignRecord;

// The limit of a file's length and of a tensor's size.
constexpr std::uint64_t most_bytes = std::uint64_t{1} << 62;
// Tensors up to this size may exceed the file's length by any factor.
constexpr std::uint64_t least_suspicious = std::uint64_t{64} << 20;
constexpr std::uint64_t largest_expansion = 1024;

/// Throws Error(corrupt).
[[noreturn]] void throw_report(const std::string& what) {
  throw Error(ErrorKind::corrupt, "the report of muster-hdf5-reader contradicts its format (" + what + ")");
}

/// Reads the numbers and texts of a report in sequence. Throws Error(corrupt) on values that no writer produces, and
/// Cut if the report ends inside a record. The report must outlive it.
class ReportCursor {
 public:
  explicit ReportCursor(std::span<const std::byte> bytes) : bytes_(bytes) {}
  [[nodiscard]] bool is_at_end() const noexcept { return bytes_.empty(); }
  std::uint8_t byte() {
    if (bytes_.empty()) throw TruncatedReport{};
    const auto value = std::to_integer<std::uint8_t>(bytes_.front());
    bytes_ = bytes_.subspan(1);
    return value;
  }
  std::uint64_t number() {
    std::uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
      const std::uint64_t next = byte();
      if (shift == 63 && next > 1) throw_report("a number of more than 64 bits");
      value |= (next & 0x7fU) << shift;
      if (next < 0x80) return value;
    }
  }
  std::uint64_t number_below(std::uint64_t limit, const char* what) {
    const std::uint64_t value = number();
    if (value >= limit) throw_report(fmt::format("{} {}", what, value));
    return value;
  }
  std::string_view text(std::uint64_t most) {
    const std::uint64_t length = number();
    if (length > most) throw_report(fmt::format("a text of {} bytes", length));
    if (length > bytes_.size()) throw TruncatedReport{};
    const std::string_view value(reinterpret_cast<const char*>(bytes_.data()), length);
    bytes_ = bytes_.subspan(length);
    return value;
  }

  /// The report ends inside a record.
  struct TruncatedReport {};

 private:
  std::span<const std::byte> bytes_;
};

class ReportParser {
 public:
  explicit ReportParser(std::uint64_t file_bytes) : file_bytes_(file_bytes) {}

  ForeignReport parse(std::span<const std::byte> bytes) {
    const std::string_view magic = hdf5::foreign_report_magic;
    if (bytes.size() < magic.size()) return std::move(report_);
    if (std::memcmp(bytes.data(), magic.data(), magic.size()) != 0)
      throw Error(ErrorKind::version,
                  "muster-hdf5-reader and this library are of different builds. Install both together");
    ReportCursor cursor(bytes.subspan(magic.size()));
    try {
      while (!cursor.is_at_end() && !is_over_) record(cursor);
    } catch (const ReportCursor::TruncatedReport&) {
      // The process ended in the middle of a record: the records before it are valid.
    }
    if (is_over_ && !cursor.is_at_end()) throw_report("more after its end");
    finish();
    return std::move(report_);
  }

 private:
  void record(ReportCursor& cursor) {
    const auto tag = static_cast<ForeignRecord>(cursor.byte());
    const bool is_text = tag == ForeignRecord::shape || tag == ForeignRecord::text || tag == ForeignRecord::end;
    if (is_text && !report_.is_listed) throw_report("text before the tensors");
    switch (tag) {
      case ForeignRecord::fence:
        report_.fence = cursor.number();
        return;
      case ForeignRecord::tensor:
        if (report_.is_listed) throw_report("a tensor after the last");
        tensor(cursor);
        return;
      case ForeignRecord::listed:
        report_.is_listed = true;
        return;
      case ForeignRecord::shape: {
        const std::uint64_t number = cursor.number_below(report_.tensors.size(), "the tensor");
        shapes_[number] = extents(cursor);
        return;
      }
      case ForeignRecord::text:
        text(cursor);
        return;
      case ForeignRecord::issue: {
        const std::string path(cursor.text(hdf5::most_path_bytes));
        std::string words = escaped(cursor.text(hdf5::longest_words), "\\");
        issue(path, std::move(words), cursor.number_below(2, "a loss of") != 0);
        return;
      }
      case ForeignRecord::fatal: {
        const std::uint64_t code = cursor.number();
        report_.fatal = {static_cast<hdf5::FatalCode>(code), escaped(cursor.text(hdf5::longest_words), "\\")};
        is_over_ = true;
        return;
      }
      case ForeignRecord::end:
        report_.is_whole = true;
        is_over_ = true;
        return;
    }
    throw_report(fmt::format("a record of the unknown kind {}", static_cast<unsigned>(tag)));
  }

  static Shape extents(ReportCursor& cursor) {
    Shape shape(cursor.number_below(hdf5::most_rank + 1, "a rank of"));
    for (std::int64_t& extent : shape)
      extent = static_cast<std::int64_t>(cursor.number_below(most_bytes, "an extent of"));
    return shape;
  }

  /// Returns the bytes of a shape's elements; an extent of 0 counts as 1. A product beyond a tensor's limit means that
  /// the report is corrupt, because the reader has checked it.
  static std::uint64_t product(const Shape& shape, std::uint64_t bytes) {
    for (const std::int64_t extent : shape) {
      const auto factor = static_cast<std::uint64_t>(std::max<std::int64_t>(extent, 1));
      if (__builtin_mul_overflow(bytes, factor, &bytes) || bytes > most_bytes) throw_report("a shape that overflows");
    }
    return bytes;
  }

  void tensor(ReportCursor& cursor) {
    if (report_.tensors.size() >= hdf5::most_objects) throw_report("too many tensors");
    ForeignTensor tensor;
    tensor.name = cursor.text(hdf5::most_path_bytes);
    const auto dtype = dtype_from_number(static_cast<std::uint8_t>(cursor.number_below(256, "a dtype of")));
    if (!dtype || is_packed(*dtype)) throw_report("an invalid dtype");
    tensor.dtype = *dtype;
    tensor.item_bytes = itemsize(*dtype);
    tensor.shape = extents(cursor);
    const std::uint64_t claimed = product(tensor.shape, tensor.item_bytes);
    const bool is_empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
    tensor.bytes = is_empty ? 0 : claimed;
    tensor.address = cursor.number();
    tensor.stored_bytes = cursor.number();
    tensor.offset = cursor.number();
    if (tensor.offset != 0 && tensor.stored_bytes != tensor.bytes)
      throw_report("elements of another size than the shape");
    if (tensor.stored_bytes > file_bytes_ || tensor.offset > file_bytes_ - tensor.stored_bytes)
      hide(report_.tensors.size(), tensor,
           fmt::format("a corrupted dataset: its elements extend past the end of the file at {}", file_bytes_));
    // Numbers in later records count all reported tensors, including hidden ones.
    report_.tensors.push_back(std::move(tensor));
  }

  void text(ReportCursor& cursor) {
    const std::string path(cursor.text(hdf5::most_path_bytes));
    const std::string attribute(cursor.text(hdf5::most_path_bytes));
    const std::string value(cursor.text(2 * hdf5::most_texts_bytes));
    texts_ += path.size() + attribute.size() + value.size();
    if (texts_ > hdf5::most_report_bytes) throw_report("too many texts");
    const std::string key = attribute.empty() ? path : path + "@" + attribute;
    if (!is_utf8(key) || !is_utf8(value)) {
      issue(path, fmt::format("a text that is not UTF-8{}",
                              attribute.empty() ? "" : ", the attribute \"" + escaped(attribute, "\\") + "\""));
      return;
    }
    report_.texts[key] = value;
  }

  void issue(const std::string& path, std::string words, bool is_lost = false) {
    report_.omissions.push_back({is_utf8(path) ? path : escaped(path, "\\"), std::move(words), is_lost});
  }

  /// Hides a tensor, and adds one omission for it.
  void hide(std::size_t number, const ForeignTensor& tensor, std::string words) {
    is_hidden_.resize(std::max(is_hidden_.size(), number + 1));
    if (is_hidden_[number]) return;
    is_hidden_[number] = true;
    issue(tensor.name, std::move(words), true);
  }

  /// Applies attributes of Muster's own files for elements that HDF5 has no type for. A copy of such a file by another
  /// tool still has these attributes.
  void name_dtype(std::size_t number, ForeignTensor& tensor) {
    const auto named = report_.texts.find(tensor.name + "@dtype");
    if (named == report_.texts.end()) return;
    const std::optional<DType> dtype = dtype_from_string(named->second);
    if (!dtype) return;
    if (*dtype == tensor.dtype) {
      report_.texts.erase(named);
      return;
    }
    // Only bytes may represent another dtype than their HDF5 type.
    if (tensor.dtype != DType::u8) return;
    if (!is_packed(*dtype)) {
      if (itemsize(*dtype) != 1) return;
      tensor.dtype = *dtype;
      report_.texts.erase(named);
      return;
    }
    const auto shape = shapes_.find(number);
    const auto order = report_.texts.find(tensor.name + "@nibble_order");
    if (shape == shapes_.end() || (order != report_.texts.end() && order->second != "low_first")) return;
    std::uint64_t elements = 1;
    for (const std::int64_t extent : shape->second) {
      if (__builtin_mul_overflow(elements, static_cast<std::uint64_t>(extent), &elements) || elements > most_bytes)
        return;
    }
    if ((elements * static_cast<std::uint64_t>(bits(*dtype)) + 7) / 8 != tensor.bytes) return;
    tensor.dtype = *dtype;
    tensor.shape = shape->second;
    report_.texts.erase(named);
    if (order != report_.texts.end()) report_.texts.erase(order);
  }

  /// Detects overlaps, because a small file could claim to be large by using the same bytes many times.
  void find_overlaps() {
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < report_.tensors.size(); ++i)
      if (report_.tensors[i].offset != 0 && !is_hidden_[i]) order.push_back(i);
    std::sort(order.begin(), order.end(),
              [this](std::size_t a, std::size_t b) { return report_.tensors[a].offset < report_.tensors[b].offset; });
    const ForeignTensor* before = nullptr;
    for (const std::size_t i : order) {
      const ForeignTensor& tensor = report_.tensors[i];
      if (before != nullptr && tensor.offset < before->offset + before->bytes)
        hide(i, tensor,
             fmt::format("a corrupted dataset: its bytes overlap those of \"{}\"", escaped(before->name, "\\")));
      if (before == nullptr || tensor.offset + tensor.bytes > before->offset + before->bytes) before = &tensor;
    }
  }

  void finish() {
    is_hidden_.resize(report_.tensors.size());
    find_overlaps();
    for (std::size_t i = 0; i < report_.tensors.size(); ++i) name_dtype(i, report_.tensors[i]);
    std::vector<std::size_t> order(report_.tensors.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
      return report_.tensors[a].name < report_.tensors[b].name;
    });
    std::vector<ForeignTensor> shown;
    shown.reserve(order.size());
    for (const std::size_t i : order) {
      ForeignTensor& tensor = report_.tensors[i];
      if (!is_utf8(tensor.name))
        hide(i, tensor, "its name is not UTF-8");
      else if (tensor.bytes > least_suspicious && tensor.bytes / largest_expansion > file_bytes_)
        hide(i, tensor,
             fmt::format("it claims {} bytes, more than {} times the {} bytes of the file: refused", tensor.bytes,
                         largest_expansion, file_bytes_));
      else if (!shown.empty() && shown.back().name == tensor.name)
        hide(i, tensor, "a corrupted group: two datasets have this name");
      if (!is_hidden_[i]) shown.push_back(std::move(tensor));
    }
    report_.tensors = std::move(shown);
    std::ranges::stable_sort(report_.omissions, {}, &Omission::name);
  }

  std::uint64_t file_bytes_;
  ForeignReport report_;
  bool is_over_ = false;
  std::uint64_t texts_ = 0;
  std::map<std::size_t, Shape> shapes_;  ///< from attributes
  std::vector<bool> is_hidden_;          ///< by the tensor's number
};

}  // namespace

ForeignReport parse_foreign_report(std::span<const std::byte> bytes, std::uint64_t file_bytes) {
  return ReportParser(file_bytes).parse(bytes);
}

}  // namespace muster
