// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/format.hpp"

#define XXH_INLINE_ALL
#include <fmt/core.h>
#include <xxhash.h>
#include <algorithm>
#include <cerrno>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/core/checksum.hpp"
#include "src/os/process.hpp"

namespace muster::statefile {

namespace {

constexpr std::size_t summed_bytes = offsetof(UserBlock, own_checksum);

[[noreturn]] void refuse_opening(const std::string& path, const std::string& words, int os_error = 0) {
  throw file_error(ErrorKind::corrupt, "opening the state file", path, words, os_error);
}

[[noreturn]] void refuse_truncated(const std::string& path, std::uint64_t present, const std::string& needed) {
  throw file_error(
      ErrorKind::corrupt, "", path,
      fmt::format("truncated state file: {} of {} bytes present. The writer was interrupted, or the copy is "
                  "incomplete. Copy it again, or use an earlier step (muster ls)",
                  present, needed),
      ENODATA);
}

bool is_inside(const Extent& extent, std::uint64_t file_bytes) noexcept {
  return extent.offset >= head_bytes && extent.offset <= file_bytes && extent.bytes <= file_bytes - extent.offset;
}

}  // namespace

bool is_zero(std::span<const std::byte> bytes) noexcept {
  return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

std::array<std::byte, user_block_bytes> encode_user_block(const UserBlock& block) {
  std::array<std::byte, user_block_bytes> bytes{};
  store(bytes, 0, block);
  store(bytes, summed_bytes, tensor_checksum(std::span(bytes).first(summed_bytes)));
  return bytes;
}

bool has_magic(std::span<const std::byte> head) noexcept {
  const auto& magic = user_block_magic;
  return head.size() >= magic.size() && std::memcmp(head.data(), magic.data(), magic.size()) == 0;
}

UserBlock decode_user_block(std::span<const std::byte> head, std::uint64_t file_bytes, const std::string& path) {
  if (!head.empty() && is_zero(head.first(std::min(head.size(), user_block_bytes))))
    refuse_opening(path, "the commit mark is empty: the writer has not finished, or was interrupted", ENODATA);
  if (!has_magic(head)) {
    if (head.size() < user_block_magic.size())
      refuse_truncated(path, file_bytes, fmt::format("at least {}", head_bytes));
    refuse_opening(path, "not a state file: the magic number is missing");
  }
  if (head.size() < head_bytes) refuse_truncated(path, file_bytes, fmt::format("at least {}", head_bytes));
  const auto block = load<UserBlock>(head, 0);
  if (block.own_checksum != tensor_checksum(head.first(summed_bytes)))
    refuse_opening(path, "commit mark: checksum mismatch: data is corrupted");
  if (block.version != format_version)
    throw file_error(ErrorKind::version, "opening the state file", path,
                     fmt::format("the file has version {} of the format, and this Muster supports version {}. Read it "
                                 "with the Muster that wrote it or a newer one",
                                 block.version, format_version));
  if (block.block_bytes != user_block_bytes) refuse_opening(path, "malformed commit mark: the length is not 4096");
  if (!is_zero(block.zeros)) refuse_opening(path, "malformed commit mark: it has unknown bits");
  if (block.info.rank < 0 || block.info.rank >= block.info.world_size)
    refuse_opening(path, fmt::format("malformed commit mark: rank {} is out of range for size {}", block.info.rank,
                                     block.info.world_size));
  if (file_bytes < block.file_bytes) refuse_truncated(path, file_bytes, std::to_string(block.file_bytes));
  if (file_bytes > block.file_bytes)
    refuse_opening(path, fmt::format("the file has {} bytes, and its commit mark records {}: another program has "
                                     "written to it, or has copied it into another layout (h5repack)",
                                     file_bytes, block.file_bytes));
  if (!is_inside(block.catalogue, file_bytes) || !is_inside(block.config, file_bytes))
    refuse_opening(path, "malformed commit mark: the catalogue or the config is out of range");
  if (block.superblock_checksum != tensor_checksum(head.subspan(user_block_bytes, superblock_bytes)))
    refuse_opening(
        path,
        "HDF5 superblock: checksum mismatch: another program has written to the file, or has copied it (h5repack)");
  return block;
}

namespace {

constexpr std::uint64_t magic = 0x31474c54434d534dULL;  // "MSMCTLG1"

/// The catalogue, byte for byte: a header, the entries, extents, chunks, names.
struct CatalogueHeader {
  std::uint64_t magic = 0;
  std::uint64_t tensors = 0;
  std::uint64_t extents = 0;
  std::uint64_t chunks = 0;
  std::uint64_t name_bytes = 0;
  std::array<std::byte, 24> zeros = {};
};
struct CatalogueEntry {
  std::uint64_t offset = 0;
  std::uint64_t stored_bytes = 0;
  std::uint64_t checksum = 0;
  std::uint64_t bytes = 0;
  std::uint64_t chunk_rows = 0;
  std::uint64_t first_chunk = 0;
  std::uint32_t name_length = 0;
  std::uint8_t dtype = 0;
  std::uint8_t rank = 0;
  std::uint8_t chunk_dim = 0;
  std::array<std::byte, 9> zeros = {};
};
static_assert(sizeof(CatalogueHeader) == 64 && sizeof(CatalogueEntry) == 64 && sizeof(StoredChunk) == 24);
constexpr std::size_t extent_bytes = 8;

/// Returns the size of the whole catalogue; nullopt if it exceeds the size of any file.
std::optional<std::uint64_t> bytes_of(const CatalogueHeader& header) noexcept {
  constexpr std::uint64_t most = std::uint64_t{1} << 54;
  if (std::max({header.tensors, header.extents, header.chunks, header.name_bytes}) > most) return std::nullopt;
  return sizeof(CatalogueHeader) + header.tensors * sizeof(CatalogueEntry) + header.extents * extent_bytes +
         header.chunks * sizeof(StoredChunk) + header.name_bytes;
}

CatalogueHeader header_of(std::span<const StateTensor> tensors, std::uint64_t chunks) noexcept {
  CatalogueHeader header{.magic = magic, .tensors = tensors.size(), .chunks = chunks};
  for (const StateTensor& tensor : tensors) {
    header.extents += tensor.shape.size();
    header.name_bytes += tensor.name.size();
  }
  return header;
}

class CatalogueDecoder {
 public:
  CatalogueDecoder(std::span<const std::byte> bytes, const UserBlock& block, const std::string& path)
      : bytes_(bytes), block_(block), path_(path) {}

  Catalogue decode() {
    read_header();
    result_.tensors.reserve(header_.tensors);
    result_.chunking.reserve(header_.tensors);
    for (std::uint64_t i = 0; i < header_.tensors; ++i)
      read_entry(load<CatalogueEntry>(entries_, i * sizeof(CatalogueEntry)));
    if (extents_used_ != header_.extents || names_used_ != header_.name_bytes ||
        result_.chunks.size() != header_.chunks)
      refuse("malformed catalogue: it has more than its tensors use");
    check_places();
    return std::move(result_);
  }

 private:
  [[noreturn]] void refuse(const std::string& words) const { refuse_opening(path_, words); }
  [[noreturn]] void refuse(const StateTensor& tensor, const std::string& words) const {
    refuse(fmt::format("tensor {}: {}", in_quotes(tensor.name), words));
  }

  void read_header() {
    if (bytes_.size() >= sizeof(CatalogueHeader)) header_ = load<CatalogueHeader>(bytes_, 0);
    if (header_.magic != magic) refuse("malformed catalogue: the magic number is missing");
    if (!is_zero(header_.zeros) || bytes_of(header_) != bytes_.size())
      refuse("malformed catalogue: its length contradicts its counts");
    if (header_.tensors != block_.tensors)
      refuse(fmt::format("malformed catalogue: it has {} tensors, and the commit mark records {}", header_.tensors,
                         block_.tensors));
    entries_ = bytes_.subspan(sizeof(CatalogueHeader), header_.tensors * sizeof(CatalogueEntry));
    extents_ = bytes_.subspan(sizeof(CatalogueHeader) + entries_.size(), header_.extents * extent_bytes);
    chunks_ = bytes_.subspan(sizeof(CatalogueHeader) + entries_.size() + extents_.size(),
                             header_.chunks * sizeof(StoredChunk));
    names_ = bytes_.last(header_.name_bytes);
    result_.chunks.reserve(header_.chunks);
  }

  void read_entry(const CatalogueEntry& entry) {
    StateTensor& tensor = result_.tensors.emplace_back();
    tensor.name = take_name(entry.name_length);
    const std::optional<DType> dtype = dtype_from_number(entry.dtype);
    if (!dtype) refuse(tensor, fmt::format("unknown dtype {}", entry.dtype));
    tensor.dtype = *dtype;
    tensor.shape = take_shape(tensor, entry.rank);
    tensor.bytes = entry.bytes;
    if (tensor.bytes != shape_bytes(tensor)) refuse(tensor, "its length contradicts its shape");
    tensor.offset = entry.offset;
    tensor.stored_bytes = entry.stored_bytes;
    tensor.checksum = entry.checksum;
    const Chunking& chunking =
        result_.chunking.emplace_back(Chunking{entry.chunk_rows, entry.first_chunk, entry.chunk_dim});
    if (!is_zero(entry.zeros)) refuse(tensor, "its entry has unknown bits");
    if (chunking.rows != 0) {
      read_chunks(tensor, chunking);
    } else {
      check_contiguous(tensor, chunking);
    }
  }

  std::string take_name(std::uint32_t length) {
    if (length == 0 || length > longest_name || length > names_.size() - names_used_)
      refuse("malformed catalogue: the length of a name is out of range");
    std::string name(reinterpret_cast<const char*>(names_.data()) + names_used_, length);
    names_used_ += length;
    if (!is_utf8(name) || name.find('\0') != std::string::npos)
      refuse(fmt::format("malformed catalogue: the name {} is not text", in_quotes(name)));
    return name;
  }

  Shape take_shape(const StateTensor& tensor, std::size_t rank) {
    if (rank > largest_rank || rank > header_.extents - extents_used_) refuse(tensor, "it has too many dimensions");
    Shape shape(rank);
    for (std::int64_t& extent : shape) {
      extent = load<std::int64_t>(extents_, extents_used_++ * extent_bytes);
      if (extent < 0) refuse(tensor, "it has a negative extent");
    }
    return shape;
  }

  std::uint64_t shape_bytes(const StateTensor& tensor) const {
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
      refuse(tensor, fmt::format("its elements cannot begin at offset {}", tensor.offset));
  }

  void read_chunks(StateTensor& tensor, const Chunking& chunking) {
    tensor.compressed = true;
    const std::optional<ChunkGrid> grid = ChunkGrid::of(tensor.dtype, tensor.shape, chunking.dim, chunking.rows);
    if (!grid || tensor.offset != 0) refuse(tensor, "its shape cannot have such chunks");
    if (chunking.first_chunk != result_.chunks.size() || grid->count() > header_.chunks - result_.chunks.size())
      refuse(tensor, "its chunks contradict its shape");
    std::uint64_t stored = 0;
    for (std::uint64_t i = 0; i < grid->count(); ++i) {
      const auto chunk = load<StoredChunk>(chunks_, result_.chunks.size() * sizeof(StoredChunk));
      const bool is_raw = chunk.filter_mask == raw_filter_mask(tensor.dtype);
      if ((!is_raw && chunk.filter_mask != 0) || chunk.bytes == 0 ||
          (is_raw ? chunk.bytes != grid->chunk_bytes() : chunk.bytes >= grid->chunk_bytes()))
        refuse(tensor, fmt::format("chunk {}: {} bytes and the filter mask {} are not possible", i, chunk.bytes,
                                   chunk.filter_mask));
      stored += chunk.bytes;
      result_.chunks.push_back(chunk);
    }
    if (stored != tensor.stored_bytes) refuse(tensor, "its stored length contradicts its chunks");
  }

  void check_places() const {
    std::vector<Extent> places = stored_extents(result_);
    for (const Extent& own : {block_.catalogue, block_.config})
      places.insert(std::ranges::upper_bound(places, own.offset, {}, &Extent::offset), own);
    std::uint64_t end = head_bytes;
    for (const Extent& place : places) {
      if (place.offset < end) refuse(fmt::format("malformed catalogue: two parts overlap at byte {}", place.offset));
      if (place.offset > block_.file_bytes || place.bytes > block_.file_bytes - place.offset)
        refuse(fmt::format("malformed catalogue: {} bytes at offset {} are out of range", place.bytes, place.offset));
      end = place.end();
    }
  }

  std::span<const std::byte> bytes_;
  const UserBlock& block_;
  const std::string& path_;
  CatalogueHeader header_;
  std::span<const std::byte> entries_;
  std::span<const std::byte> extents_;
  std::span<const std::byte> chunks_;
  std::span<const std::byte> names_;
  std::uint64_t extents_used_ = 0;
  std::uint64_t names_used_ = 0;
  Catalogue result_;
};

// A random seed: a crafted file cannot predict which names share a slot.
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
  // Bit 0: shuffle, bit 1: zstd. Elements of one byte are not shuffled.
  return itemsize(dtype) > 1 ? 3 : 1;
}

std::uint64_t catalogue_bytes(std::span<const StateTensor> tensors, std::uint64_t chunks) noexcept {
  return bytes_of(header_of(tensors, chunks)).value_or(UINT64_MAX);
}

std::vector<std::byte> encode_catalogue(const Catalogue& catalogue) {
  std::vector<std::byte> bytes(catalogue_bytes(catalogue.tensors, catalogue.chunks.size()));
  std::size_t end = 0;
  const auto append = [&](std::span<const std::byte> part) {
    std::ranges::copy(part, bytes.begin() + static_cast<std::ptrdiff_t>(end));
    end += part.size();
  };
  const CatalogueHeader header = header_of(catalogue.tensors, catalogue.chunks.size());
  append(std::as_bytes(std::span(&header, 1)));
  for (std::size_t i = 0; i < catalogue.tensors.size(); ++i) {
    const StateTensor& tensor = catalogue.tensors[i];
    const Chunking& chunking = catalogue.chunking[i];
    const CatalogueEntry entry{.offset = tensor.offset,
                               .stored_bytes = tensor.stored_bytes,
                               .checksum = tensor.checksum,
                               .bytes = tensor.bytes,
                               .chunk_rows = chunking.rows,
                               .first_chunk = chunking.first_chunk,
                               .name_length = static_cast<std::uint32_t>(tensor.name.size()),
                               .dtype = static_cast<std::uint8_t>(tensor.dtype),
                               .rank = static_cast<std::uint8_t>(tensor.shape.size()),
                               .chunk_dim = chunking.dim};
    append(std::as_bytes(std::span(&entry, 1)));
  }
  for (const StateTensor& tensor : catalogue.tensors) append(std::as_bytes(std::span(tensor.shape)));
  append(std::as_bytes(std::span(catalogue.chunks)));
  for (const StateTensor& tensor : catalogue.tensors) append(std::as_bytes(std::span(tensor.name)));
  return bytes;
}

Catalogue decode_catalogue(std::span<const std::byte> bytes, const UserBlock& block, const std::string& path) {
  return CatalogueDecoder(bytes, block, path).decode();
}

std::vector<Extent> stored_extents(const Catalogue& catalogue) {
  std::vector<Extent> places;
  places.reserve(catalogue.tensors.size() + catalogue.chunks.size() + 2);
  for (const StateTensor& tensor : catalogue.tensors)
    if (!tensor.compressed && tensor.bytes != 0) places.push_back({tensor.offset, tensor.stored_bytes});
  for (const StoredChunk& chunk : catalogue.chunks) places.push_back({chunk.offset, chunk.bytes});
  // Writers place tensors in their order; chunks are appended as they are finished.
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
