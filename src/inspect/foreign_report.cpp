// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/foreign_report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>
#include <utility>

#include "muster/error.hpp"
#include "src/core/utf8.hpp"
#include "src/inspect/foreign_words.hpp"
#include "src/inspect/printable.hpp"
#include "src/inspect/report_cursor.hpp"

namespace muster::inspect {
namespace {

using hdf5::ForeignRecord;

// What a file may be as long as, and a tensor as large as.
constexpr std::uint64_t most_bytes = std::uint64_t{1} << 62;
// Smaller tensors need no justification by the file's length.
constexpr std::uint64_t least_suspicious = std::uint64_t{64} << 20;
// Decoding takes memory of two chunks at once. Larger ones are for files that are large themselves.
constexpr std::uint64_t least_suspicious_chunk = std::uint64_t{16} << 20;
constexpr std::uint64_t largest_chunk_expansion = 8;

std::vector<std::byte> bytes_of(std::string_view text) {
  std::vector<std::byte> bytes(text.size());
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

class Parser {
 public:
  explicit Parser(const ForeignReportLimits& limits) : limits_(limits) {}

  ForeignReport parse(std::span<const std::byte> bytes) {
    const std::string_view magic = hdf5::foreign_report_magic;
    if (bytes.size() < magic.size()) return std::move(report_);
    if (std::memcmp(bytes.data(), magic.data(), magic.size()) != 0)
      throw Error(ErrorKind::version,
                  "muster-hdf5-reader is of another build than this library: install both together");
    ReportCursor cursor(bytes.subspan(magic.size()));
    try {
      while (!cursor.is_at_end() && !is_over_) record(cursor);
    } catch (const ReportCursor::Cut&) {
      // The process ended in the middle of a record: what came before counts.
    }
    if (is_over_ && !cursor.is_at_end()) throw_report("more after its end");
    finish();
    return std::move(report_);
  }

 private:
  void record(ReportCursor& cursor) {
    const auto tag = static_cast<ForeignRecord>(cursor.byte());
    const bool is_text = tag == ForeignRecord::compact || tag == ForeignRecord::shape || tag == ForeignRecord::text ||
                         tag == ForeignRecord::end;
    if (is_text && !report_.is_listed) throw_report("text before the tensors");
    switch (tag) {
      case ForeignRecord::fence:
        report_.fence = cursor.byte();
        return;
      case ForeignRecord::tensor:
        if (report_.is_listed) throw_report("a tensor after the last");
        tensor(cursor);
        return;
      case ForeignRecord::listed:
        report_.is_listed = true;
        return;
      case ForeignRecord::compact:
        compact(cursor);
        return;
      case ForeignRecord::shape:
        shape(cursor);
        return;
      case ForeignRecord::text:
        text(cursor);
        return;
      case ForeignRecord::issue:
        issue(cursor);
        return;
      case ForeignRecord::fatal: {
        const std::uint64_t code = cursor.number();
        report_.fatal = {static_cast<hdf5::FatalCode>(code), printable(cursor.text(longest_words))};
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

  Shape extents(ReportCursor& cursor, std::uint64_t rank) {
    Shape shape;
    for (std::uint64_t i = 0; i < rank; ++i)
      shape.push_back(static_cast<std::int64_t>(cursor.number_below(most_bytes, "an extent of")));
    return shape;
  }

  /// Bytes of a shape's elements, none counted as one. More than a tensor can have is the report's fault: the
  /// reader has looked.
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
    if (!dtype || is_packed(*dtype)) throw_report("a dtype that is none");
    tensor.dtype = *dtype;
    tensor.item_bytes = itemsize(*dtype);
    tensor.is_big_endian = cursor.number_below(2, "a byte order of") == 1;
    tensor.stored_shape = extents(cursor, cursor.number_below(hdf5::most_rank + 1, "a rank of"));
    tensor.shape = tensor.stored_shape;
    const std::uint64_t claimed = product(tensor.shape, tensor.item_bytes);
    const bool is_empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
    tensor.bytes = is_empty ? 0 : claimed;
    tensor.fill = bytes_of(cursor.text(hdf5::most_fill_bytes));
    if (!tensor.fill.empty() && tensor.fill.size() != tensor.item_bytes) throw_report("a fill value of another size");
    tensor.layout = static_cast<hdf5::StorageLayout>(cursor.number_below(3, "a layout of"));
    if (tensor.layout == hdf5::StorageLayout::contiguous) {
      tensor.offset = cursor.number();
      const std::uint64_t stored = cursor.number();
      if (stored != (tensor.offset == 0 ? 0 : tensor.bytes)) throw_report("elements of another size than the shape");
      if (!is_inside(tensor.offset, stored)) outside(tensor);
    } else if (tensor.layout == hdf5::StorageLayout::chunked) {
      chunked(cursor, tensor);
    }
    // Numbers of later records count what was told, whatever becomes of it.
    report_.tensors.push_back(std::move(tensor));
  }

  void chunked(ReportCursor& cursor, ForeignTensor& tensor) {
    if (tensor.stored_shape.empty()) throw_report("a scalar in chunks");
    tensor.chunk_shape = extents(cursor, tensor.stored_shape.size());
    if (std::find(tensor.chunk_shape.begin(), tensor.chunk_shape.end(), 0) != tensor.chunk_shape.end())
      throw_report("chunks of no elements");
    tensor.chunk_bytes = product(tensor.chunk_shape, tensor.item_bytes);
    if (tensor.chunk_bytes > hdf5::most_chunk_bytes) throw_report("chunks that are too large");
    const std::uint64_t filters = cursor.number_below(hdf5::most_filters + 1, "a number of filters of");
    for (std::uint64_t i = 0; i < filters; ++i) {
      const std::uint64_t id = cursor.number();
      tensor.filters.push_back({id, cursor.number()});
    }
    if (tensor.chunk_bytes > least_suspicious_chunk &&
        tensor.chunk_bytes / largest_chunk_expansion > limits_.file_bytes)
      problem(tensor, fmt::format("its chunks have {} bytes, more than {} times the {} of the file: refused",
                                  tensor.chunk_bytes, largest_chunk_expansion, limits_.file_bytes));
    if (!can_decode(tensor.filters)) problem(tensor, "went through more than one compression");
    tensor.partial_chunks_unfiltered = (cursor.number() & hdf5::chunk_partial_unfiltered) != 0;
    const std::uint64_t count = cursor.number_below(hdf5::most_chunks + 1, "a number of chunks of");
    chunks_ += count;
    if (chunks_ > hdf5::most_chunks) throw_report("too many chunks");
    std::uint64_t places = 1;
    for (std::size_t i = 0; i < tensor.chunk_shape.size(); ++i) {
      const auto extent = static_cast<std::uint64_t>(tensor.stored_shape[i]);
      const auto size = static_cast<std::uint64_t>(tensor.chunk_shape[i]);
      const std::uint64_t here = extent / size + (extent % size != 0 ? 1 : 0);
      if (__builtin_mul_overflow(places, here, &places)) places = most_bytes;
    }
    if (count != 0 && (places > hdf5::most_chunks || count > places))
      throw_report("more chunks than there is room for");
    tensor.chunks.reserve(count);
    std::uint64_t index = ~std::uint64_t{0};
    std::uint64_t end = 0;
    // What a compressor may add to what it cannot compress, and some checksums.
    const std::uint64_t longest = tensor.chunk_bytes + tensor.chunk_bytes / 64 + 4096;
    bool is_outside = false;
    bool is_long = false;
    for (std::uint64_t i = 0; i < count; ++i) {
      index += cursor.number();
      const std::uint64_t offset = end + static_cast<std::uint64_t>(cursor.signed_number());
      const std::uint64_t bytes = cursor.number();
      const std::uint64_t mask = cursor.number();
      if (index >= places || (!tensor.chunks.empty() && index <= tensor.chunks.back().index))
        throw_report("chunks out of order");
      is_outside = is_outside || bytes == 0 || !is_inside(offset, bytes);
      is_long = is_long || bytes > longest || mask > 0xff;
      end = offset + bytes;
      tensor.chunks.push_back({offset, static_cast<std::uint32_t>(bytes), static_cast<std::uint32_t>(index & 0xffffffU),
                               static_cast<std::uint32_t>(mask & 0xffU)});
    }
    if (is_outside) outside(tensor);
    if (is_long) problem(tensor, "a damaged dataset: a chunk takes more bytes in the file than it can have");
  }

  void compact(ReportCursor& cursor) {
    ForeignTensor& tensor = tensor_of(cursor);
    tensor.compact = bytes_of(cursor.text(std::uint64_t{1} << 17));
    if (tensor.layout != hdf5::StorageLayout::compact || tensor.compact.size() != tensor.bytes)
      throw_report("compact elements of another size than the shape");
  }

  void shape(ReportCursor& cursor) {
    const std::size_t number = number_of_tensor(cursor);
    shapes_[number] = extents(cursor, cursor.number_below(hdf5::most_rank + 1, "a rank of"));
  }

  void text(ReportCursor& cursor) {
    const std::string path(cursor.text(hdf5::most_path_bytes));
    const std::string attribute(cursor.text(hdf5::most_path_bytes));
    const std::string value(cursor.text(2 * hdf5::most_texts_bytes));
    texts_ += path.size() + attribute.size() + value.size();
    if (texts_ > hdf5::most_report_bytes) throw_report("too many texts");
    const std::string key = attribute.empty() ? path : path + "@" + attribute;
    if (!core::is_utf8(key) || !core::is_utf8(value)) {
      issue(path, fmt::format("a text that is no UTF-8{}",
                              attribute.empty() ? "" : ", the attribute \"" + printable(attribute) + "\""));
      return;
    }
    report_.texts[key] = value;
  }

  void issue(ReportCursor& cursor) {
    const std::string path(cursor.text(hdf5::most_path_bytes));
    const std::uint64_t code = cursor.number_below(256, "an issue of the kind");
    const std::uint64_t number = cursor.number();
    const std::string_view words = cursor.text(longest_words);
    issue(path, issue_words(static_cast<hdf5::IssueCode>(code), number, words));
  }

  void issue(const std::string& path, std::string words) {
    report_.issues.push_back({core::is_utf8(path) ? path : printable(path), std::move(words)});
  }

  std::size_t number_of_tensor(ReportCursor& cursor) const {
    return cursor.number_below(report_.tensors.size(), "the tensor");
  }
  ForeignTensor& tensor_of(ReportCursor& cursor) { return report_.tensors[number_of_tensor(cursor)]; }

  [[nodiscard]] bool is_inside(std::uint64_t offset, std::uint64_t bytes) const noexcept {
    return offset <= limits_.file_bytes && bytes <= limits_.file_bytes - offset;
  }

  void outside(const ForeignTensor& tensor) {
    problem(tensor, fmt::format("a damaged dataset: elements past the file's end at {}", limits_.file_bytes));
  }

  /// The tensor that is being read will not be shown.
  void problem(const ForeignTensor& tensor, std::string words) {
    hide(report_.tensors.size(), tensor, std::move(words));
  }
  /// One word for each is enough.
  void hide(std::size_t number, const ForeignTensor& tensor, std::string words) {
    is_hidden_.resize(std::max(is_hidden_.size(), number + 1));
    if (is_hidden_[number]) return;
    is_hidden_[number] = true;
    issue(tensor.name, std::move(words));
  }

  void finish();
  void name_dtypes();
  void name_dtype(std::size_t number, ForeignTensor& tensor);
  void find_overlaps();

  static constexpr std::uint64_t longest_words = 300;
  ForeignReportLimits limits_;
  ForeignReport report_;
  bool is_over_ = false;
  std::uint64_t chunks_ = 0;
  std::uint64_t texts_ = 0;
  std::map<std::size_t, Shape> shapes_;  ///< that attributes tell
  std::vector<bool> is_hidden_;          ///< by a tensor's number
};

/// What this project's own files say of elements that HDF5 has no type for: a copy of such a file that another tool
/// made has the attributes still.
void Parser::name_dtypes() {
  for (std::size_t i = 0; i < report_.tensors.size(); ++i) name_dtype(i, report_.tensors[i]);
}

void Parser::name_dtype(std::size_t number, ForeignTensor& tensor) {
  const auto named = report_.texts.find(tensor.name + "@dtype");
  if (named == report_.texts.end()) return;
  const std::optional<DType> dtype = dtype_from_string(named->second);
  if (!dtype) return;
  if (*dtype == tensor.dtype) {
    report_.texts.erase(named);
    return;
  }
  // Only bytes may be something else than their type says.
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
  if (elements / 2 + elements % 2 != tensor.bytes) return;
  tensor.dtype = *dtype;
  tensor.shape = shape->second;
  report_.texts.erase(named);
  if (order != report_.texts.end()) report_.texts.erase(order);
}

/// A small file could claim to be large by having the same bytes in many places.
void Parser::find_overlaps() {
  struct Extent {
    std::uint64_t begin;
    std::uint64_t end;
    std::uint32_t tensor;
  };
  std::vector<Extent> extents;
  std::size_t count = 0;
  for (const ForeignTensor& tensor : report_.tensors) count += tensor.chunks.size() + (tensor.offset != 0 ? 1 : 0);
  extents.reserve(count);
  for (std::size_t i = 0; i < report_.tensors.size(); ++i) {
    if (is_hidden_[i]) continue;
    const ForeignTensor& tensor = report_.tensors[i];
    const auto number = static_cast<std::uint32_t>(i);
    if (tensor.offset != 0) extents.push_back({tensor.offset, tensor.offset + tensor.bytes, number});
    for (const StoredChunk& chunk : tensor.chunks)
      extents.push_back({chunk.offset, chunk.offset + chunk.bytes, number});
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  const Extent* before = nullptr;
  for (const Extent& extent : extents) {
    if (before != nullptr && extent.begin < before->end)
      hide(extent.tensor, report_.tensors[extent.tensor],
           fmt::format("a damaged dataset: some of its bytes are those of \"{}\" too",
                       printable(report_.tensors[before->tensor].name)));
    if (before == nullptr || extent.end > before->end) before = &extent;
  }
}

void Parser::finish() {
  is_hidden_.resize(report_.tensors.size());
  find_overlaps();
  name_dtypes();
  std::vector<std::size_t> order(report_.tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [this](std::size_t a, std::size_t b) { return report_.tensors[a].name < report_.tensors[b].name; });
  std::vector<ForeignTensor> shown;
  shown.reserve(order.size());
  for (const std::size_t i : order) {
    ForeignTensor& tensor = report_.tensors[i];
    if (!core::is_utf8(tensor.name))
      hide(i, tensor, "its name is no UTF-8");
    else if (tensor.bytes > least_suspicious && tensor.bytes / limits_.largest_expansion > limits_.file_bytes)
      hide(i, tensor,
           fmt::format("claims {} bytes, more than {} times the {} of the file: refused", tensor.bytes,
                       limits_.largest_expansion, limits_.file_bytes));
    else if (tensor.layout == hdf5::StorageLayout::compact && tensor.compact.size() != tensor.bytes)
      hide(i, tensor, "its elements, which stand in its header, could not be read");
    else if (!shown.empty() && shown.back().name == tensor.name)
      hide(i, tensor, "a damaged group: two datasets have this name");
    if (!is_hidden_[i]) shown.push_back(std::move(tensor));
  }
  report_.tensors = std::move(shown);
  std::stable_sort(report_.issues.begin(), report_.issues.end(),
                   [](const ForeignIssue& a, const ForeignIssue& b) { return a.path < b.path; });
}

}  // namespace

ForeignReport parse_foreign_report(std::span<const std::byte> bytes, const ForeignReportLimits& limits) {
  return Parser(limits).parse(bytes);
}

}  // namespace muster::inspect
