// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/catalogue.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <optional>

#include <bit>
#include <span>
#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/core/quoted.hpp"
#include "src/os/process.hpp"

namespace muster::statefile {
namespace {

constexpr std::uint64_t magic = 0x31474c54434d534dULL;  // "MSMCTLG1"

// Header: magic and four counts, zeros after them.
constexpr std::size_t header_bytes = 64;
constexpr std::size_t at_tensors = 8;
constexpr std::size_t at_extents = 16;
constexpr std::size_t at_chunks = 24;
constexpr std::size_t at_name_bytes = 32;
constexpr std::size_t at_header_zeros = 40;

// An entry.
constexpr std::size_t entry_bytes = 64;
constexpr std::size_t at_offset = 0;
constexpr std::size_t at_stored_bytes = 8;
constexpr std::size_t at_checksum = 16;
constexpr std::size_t at_bytes = 24;
constexpr std::size_t at_chunk_rows = 32;
constexpr std::size_t at_first_chunk = 40;
constexpr std::size_t at_name_length = 48;
constexpr std::size_t at_dtype = 52;
constexpr std::size_t at_rank = 53;
constexpr std::size_t at_chunk_dim = 54;
constexpr std::size_t at_entry_zeros = 55;

constexpr std::size_t extent_bytes = 8;

// A chunk.
constexpr std::size_t chunk_bytes = 24;
constexpr std::size_t at_chunk_stored = 8;
constexpr std::size_t at_filter_mask = 12;
constexpr std::size_t at_chunk_checksum = 16;

struct Counts {
  std::uint64_t tensors = 0;
  std::uint64_t extents = 0;
  std::uint64_t chunks = 0;
  std::uint64_t name_bytes = 0;

  /// None where it is more than any file has.
  [[nodiscard]] std::optional<std::uint64_t> bytes() const noexcept {
    constexpr std::uint64_t most = std::uint64_t{1} << 54;
    if (std::max({tensors, extents, chunks, name_bytes}) > most) return std::nullopt;
    return header_bytes + tensors * entry_bytes + extents * extent_bytes + chunks * chunk_bytes + name_bytes;
  }
};

Counts counts_of(std::span<const StateTensor> tensors, std::uint64_t chunks) noexcept {
  Counts counts{.tensors = tensors.size(), .chunks = chunks};
  for (const StateTensor& tensor : tensors) {
    counts.extents += tensor.shape.size();
    counts.name_bytes += tensor.name.size();
  }
  return counts;
}

class Decoder {
 public:
  Decoder(std::span<const std::byte> bytes, const UserBlock& block, const std::string& path)
      : bytes_(bytes), block_(block), path_(path) {}

  Catalogue decode() {
    read_header();
    result_.tensors.reserve(counts_.tensors);
    result_.chunking.reserve(counts_.tensors);
    for (std::uint64_t i = 0; i < counts_.tensors; ++i) read_entry(entries_.subspan(i * entry_bytes, entry_bytes));
    if (extents_used_ != counts_.extents || names_used_ != counts_.name_bytes ||
        result_.chunks.size() != counts_.chunks)
      refuse("its catalogue has more than its tensors use");
    check_places();
    return std::move(result_);
  }

 private:
  [[noreturn]] void refuse(const std::string& words) const {
    throw Error(ErrorKind::corrupt, fmt::format("opening the state file {}: {}", in_quotes(path_), words),
                {.path = path_});
  }
  [[noreturn]] void refuse(const StateTensor& tensor, const std::string& words) const {
    refuse(fmt::format("tensor {}: {}", in_quotes(tensor.name), words));
  }

  void read_header() {
    if (bytes_.size() < header_bytes || load<std::uint64_t>(bytes_, 0) != magic)
      refuse("where its catalogue should be is something else");
    counts_ = {load<std::uint64_t>(bytes_, at_tensors), load<std::uint64_t>(bytes_, at_extents),
               load<std::uint64_t>(bytes_, at_chunks), load<std::uint64_t>(bytes_, at_name_bytes)};
    if (!is_zero(bytes_.subspan(at_header_zeros, header_bytes - at_header_zeros)) || counts_.bytes() != bytes_.size())
      refuse("its catalogue's length is not what its counts say");
    if (counts_.tensors != block_.tensors)
      refuse(fmt::format("its catalogue has {} tensors, and its commit mark says {}", counts_.tensors, block_.tensors));
    entries_ = bytes_.subspan(header_bytes, counts_.tensors * entry_bytes);
    extents_ = bytes_.subspan(header_bytes + entries_.size(), counts_.extents * extent_bytes);
    chunks_ = bytes_.subspan(header_bytes + entries_.size() + extents_.size(), counts_.chunks * chunk_bytes);
    names_ = bytes_.last(counts_.name_bytes);
    result_.chunks.reserve(counts_.chunks);
  }

  void read_entry(std::span<const std::byte> entry) {
    StateTensor& tensor = result_.tensors.emplace_back();
    tensor.name = take_name(load<std::uint32_t>(entry, at_name_length));
    const std::optional<DType> dtype = dtype_from_number(load<std::uint8_t>(entry, at_dtype));
    if (!dtype) refuse(tensor, fmt::format("no dtype has the number {}", load<std::uint8_t>(entry, at_dtype)));
    tensor.dtype = *dtype;
    tensor.shape = take_shape(tensor, load<std::uint8_t>(entry, at_rank));
    tensor.bytes = load<std::uint64_t>(entry, at_bytes);
    if (tensor.bytes != bytes_of(tensor)) refuse(tensor, "its length is not that of its shape");
    tensor.offset = load<std::uint64_t>(entry, at_offset);
    tensor.stored_bytes = load<std::uint64_t>(entry, at_stored_bytes);
    tensor.checksum = load<std::uint64_t>(entry, at_checksum);
    Chunking& chunking = result_.chunking.emplace_back();
    chunking = {load<std::uint64_t>(entry, at_chunk_rows), load<std::uint64_t>(entry, at_first_chunk),
                load<std::uint8_t>(entry, at_chunk_dim)};
    if (!is_zero(entry.subspan(at_entry_zeros))) refuse(tensor, "its entry has bits that this version does not know");
    if (chunking.rows != 0) {
      read_chunks(tensor, chunking);
    } else {
      check_contiguous(tensor, chunking);
    }
  }

  std::string take_name(std::uint32_t length) {
    if (length == 0 || length > longest_name || length > names_.size() - names_used_)
      refuse("its catalogue has a name of an impossible length");
    std::string name(reinterpret_cast<const char*>(names_.data()) + names_used_, length);
    names_used_ += length;
    if (!is_utf8(name) || name.find('\0') != std::string::npos)
      refuse(fmt::format("the name {} is no text", in_quotes(name)));
    return name;
  }

  Shape take_shape(const StateTensor& tensor, std::size_t rank) {
    if (rank > largest_rank || rank > counts_.extents - extents_used_) refuse(tensor, "it has too many dimensions");
    Shape shape(rank);
    for (std::int64_t& extent : shape) {
      extent = load<std::int64_t>(extents_, extents_used_++ * extent_bytes);
      if (extent < 0) refuse(tensor, "it has a negative extent");
    }
    return shape;
  }

  std::uint64_t bytes_of(const StateTensor& tensor) const {
    try {
      return byte_size(tensor.dtype, tensor.shape);
    } catch (const Error& error) {
      refuse(tensor, error.what());
    }
  }

  void check_contiguous(const StateTensor& tensor, const Chunking& chunking) const {
    if (chunking.first_chunk != 0 || chunking.dim != 0 || tensor.stored_bytes != tensor.bytes)
      refuse(tensor, "its entry contradicts itself");
    if (tensor.bytes == 0 ? tensor.offset != 0 : tensor.offset % element_alignment != 0)
      refuse(tensor, fmt::format("its elements cannot begin at {}", tensor.offset));
  }

  void read_chunks(StateTensor& tensor, const Chunking& chunking) {
    tensor.compressed = true;
    const std::optional<ChunkGrid> grid = ChunkGrid::of(tensor.dtype, tensor.shape, chunking.dim, chunking.rows);
    if (!grid || tensor.offset != 0) refuse(tensor, "it cannot be cut into such chunks");
    if (chunking.first_chunk != result_.chunks.size() || grid->count() > counts_.chunks - result_.chunks.size())
      refuse(tensor, "its chunks are not those that its shape makes");
    std::uint64_t stored = 0;
    for (std::uint64_t i = 0; i < grid->count(); ++i) {
      const std::size_t at = result_.chunks.size() * chunk_bytes;
      const StoredChunk chunk{load<std::uint64_t>(chunks_, at), load<std::uint32_t>(chunks_, at + at_chunk_stored),
                              load<std::uint32_t>(chunks_, at + at_filter_mask),
                              load<std::uint64_t>(chunks_, at + at_chunk_checksum)};
      const bool is_raw = chunk.filter_mask == raw_filter_mask(tensor.dtype);
      if ((!is_raw && chunk.filter_mask != 0) || chunk.bytes == 0 ||
          (is_raw ? chunk.bytes != grid->chunk_bytes() : chunk.bytes >= grid->chunk_bytes()))
        refuse(tensor,
               fmt::format("chunk {} cannot have {} bytes and the filter mask {}", i, chunk.bytes, chunk.filter_mask));
      stored += chunk.bytes;
      result_.chunks.push_back(chunk);
    }
    if (stored != tensor.stored_bytes) refuse(tensor, "its stored length is not that of its chunks");
  }

  void check_places() const {
    std::vector<Extent> places = stored_extents(result_);
    for (const Extent& own : {block_.catalogue, block_.config})
      places.insert(std::ranges::upper_bound(places, own.offset, {}, &Extent::offset), own);
    std::uint64_t end = head_bytes;
    for (const Extent& place : places) {
      if (place.offset < end) refuse(fmt::format("two things lie at byte {} of it", place.offset));
      if (place.offset > block_.file_bytes || place.bytes > block_.file_bytes - place.offset)
        refuse(fmt::format("{} bytes at {} are outside of it", place.bytes, place.offset));
      end = place.end();
    }
  }

  std::span<const std::byte> bytes_;
  const UserBlock& block_;
  const std::string& path_;
  Counts counts_;
  std::span<const std::byte> entries_;
  std::span<const std::byte> extents_;
  std::span<const std::byte> chunks_;
  std::span<const std::byte> names_;
  std::uint64_t extents_used_ = 0;
  std::uint64_t names_used_ = 0;
  Catalogue result_;
};

// A file made to have all names in one slot must not know which slot that is.
std::uint64_t seed() {
  static const std::uint64_t value = [] {
    std::uint64_t random = 0;
    os::random_bytes(std::as_writable_bytes(std::span(&random, 1)));
    return random;
  }();
  return value;
}

std::size_t hash(std::string_view name, std::uint64_t with) noexcept {
  return XXH3_64bits_withSeed(name.data(), name.size(), with);
}

}  // namespace

std::uint32_t raw_filter_mask(DType dtype) noexcept {
  // Shuffle and zstd; elements of one byte are not shuffled.
  return itemsize(dtype) > 1 ? 3 : 1;
}

std::uint64_t catalogue_bytes(std::span<const StateTensor> tensors, std::uint64_t chunks) noexcept {
  return counts_of(tensors, chunks).bytes().value_or(UINT64_MAX);
}

std::vector<std::byte> encode_catalogue(const Catalogue& catalogue) {
  const Counts counts = counts_of(catalogue.tensors, catalogue.chunks.size());
  std::vector<std::byte> bytes(catalogue_bytes(catalogue.tensors, catalogue.chunks.size()));
  store(bytes, 0, magic);
  store(bytes, at_tensors, counts.tensors);
  store(bytes, at_extents, counts.extents);
  store(bytes, at_chunks, counts.chunks);
  store(bytes, at_name_bytes, counts.name_bytes);
  std::size_t extent_at = header_bytes + counts.tensors * entry_bytes;
  std::size_t chunk_at = extent_at + counts.extents * extent_bytes;
  std::size_t name_at = chunk_at + counts.chunks * chunk_bytes;
  for (std::size_t i = 0; i < catalogue.tensors.size(); ++i) {
    const StateTensor& tensor = catalogue.tensors[i];
    const Chunking& chunking = catalogue.chunking[i];
    const std::span<std::byte> entry = std::span(bytes).subspan(header_bytes + i * entry_bytes, entry_bytes);
    store(entry, at_offset, tensor.offset);
    store(entry, at_stored_bytes, tensor.stored_bytes);
    store(entry, at_checksum, tensor.checksum);
    store(entry, at_bytes, tensor.bytes);
    store(entry, at_chunk_rows, chunking.rows);
    store(entry, at_first_chunk, chunking.first_chunk);
    store(entry, at_name_length, static_cast<std::uint32_t>(tensor.name.size()));
    store(entry, at_dtype, static_cast<std::uint8_t>(tensor.dtype));
    store(entry, at_rank, static_cast<std::uint8_t>(tensor.shape.size()));
    store(entry, at_chunk_dim, chunking.dim);
    for (const std::int64_t extent : tensor.shape) {
      store(bytes, extent_at, extent);
      extent_at += extent_bytes;
    }
    std::memcpy(bytes.data() + name_at, tensor.name.data(), tensor.name.size());
    name_at += tensor.name.size();
  }
  for (const StoredChunk& chunk : catalogue.chunks) {
    store(bytes, chunk_at, chunk.offset);
    store(bytes, chunk_at + at_chunk_stored, chunk.bytes);
    store(bytes, chunk_at + at_filter_mask, chunk.filter_mask);
    store(bytes, chunk_at + at_chunk_checksum, chunk.checksum);
    chunk_at += chunk_bytes;
  }
  return bytes;
}

Catalogue decode_catalogue(std::span<const std::byte> bytes, const UserBlock& block, const std::string& path) {
  return Decoder(bytes, block, path).decode();
}

std::vector<Extent> stored_extents(const Catalogue& catalogue) {
  std::vector<Extent> places;
  places.reserve(catalogue.tensors.size() + catalogue.chunks.size() + 2);
  for (const StateTensor& tensor : catalogue.tensors)
    if (!tensor.compressed && tensor.bytes != 0) places.push_back({tensor.offset, tensor.stored_bytes});
  for (const StoredChunk& chunk : catalogue.chunks) places.push_back({chunk.offset, chunk.bytes});
  // Writers place tensors in their order; chunks come as they are done.
  if (!std::ranges::is_sorted(places, {}, &Extent::offset)) std::ranges::sort(places, {}, &Extent::offset);
  return places;
}

std::optional<std::size_t> NameIndex::build(const std::vector<StateTensor>& tensors) {
  slots_.assign(std::bit_ceil(2 * tensors.size() + 1), 0);
  const std::size_t mask = slots_.size() - 1;
  const std::uint64_t with = seed();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::size_t slot = hash(tensors[i].name, with) & mask;
    for (; slots_[slot] != 0; slot = (slot + 1) & mask)
      if (tensors[slots_[slot] - 1].name == tensors[i].name) return i;
    slots_[slot] = static_cast<std::uint32_t>(i + 1);
  }
  return std::nullopt;
}

std::optional<std::size_t> NameIndex::find(const std::vector<StateTensor>& tensors,
                                           std::string_view name) const noexcept {
  if (slots_.empty()) return std::nullopt;
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t slot = hash(name, seed()) & mask; slots_[slot] != 0; slot = (slot + 1) & mask)
    if (tensors[slots_[slot] - 1].name == name) return slots_[slot] - 1;
  return std::nullopt;
}

}  // namespace muster::statefile
