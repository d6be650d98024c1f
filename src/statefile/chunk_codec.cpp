// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/chunk_codec.hpp"

#include <zstd.h>

#include <algorithm>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cstring>

#include "muster/error.hpp"

namespace muster::statefile {

void FreeZstd::operator()(ZSTD_CCtx_s* context) const noexcept {
  ZSTD_freeCCtx(context);
}

void FreeZstd::operator()(ZSTD_DCtx_s* context) const noexcept {
  ZSTD_freeDCtx(context);
}

namespace {

[[noreturn]] void throw_no_memory() {
  throw Error(ErrorKind::out_of_space,
              "compressing a tensor: too little memory for zstd. Free memory, or write the state without compression");
}

std::uint64_t item_bytes(DType dtype) noexcept {
  return is_packed(dtype) ? 1 : itemsize(dtype);
}

}  // namespace

bool is_zstd_level(int level) noexcept {
  return level >= 1 && level <= ZSTD_maxCLevel();
}

ChunkEncoder::ChunkEncoder(int level) : context_(ZSTD_createCCtx()) {
  if (!context_) throw_no_memory();
  ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_compressionLevel, level);
}

ChunkEncoder::Encoded ChunkEncoder::encode(std::span<const std::byte> elements, std::size_t chunk_bytes,
                                           std::size_t item) {
  std::span<const std::byte> whole = elements;
  if (elements.size() != chunk_bytes) {
    whole_.resize(chunk_bytes);
    std::ranges::copy(elements, whole_.begin());
    std::fill(whole_.begin() + static_cast<std::ptrdiff_t>(elements.size()), whole_.end(), std::byte{0});
    whole = whole_;
  }
  std::span<const std::byte> source = whole;
  if (item > 1) {
    shuffled_.resize(chunk_bytes);
    shuffle(whole, item, shuffled_.data());
    source = shuffled_;
  }
  // Compression stops once the result is not smaller than the chunk.
  if (encoded_.size() < chunk_bytes) encoded_.resize(chunk_bytes);
  const std::size_t size = ZSTD_compress2(context_.get(), encoded_.data(), chunk_bytes - 1, source.data(), chunk_bytes);
  if (!ZSTD_isError(size)) return {std::span(encoded_).first(size), false};
  return {whole, true};
}

ChunkDecoder::ChunkDecoder() : context_(ZSTD_createDCtx()) {
  if (!context_) throw_no_memory();
}

bool ChunkDecoder::decode(std::span<const std::byte> stored, bool is_raw, std::size_t chunk_bytes, std::size_t item,
                          std::span<std::byte> target) {
  if (target.size() > chunk_bytes) return false;
  if (is_raw) {
    if (stored.size() != chunk_bytes) return false;
    std::ranges::copy(stored.first(target.size()), target.begin());
    return true;
  }
  if (item > 1 && chunk_bytes % item != 0) return false;
  const bool is_direct = item <= 1 && target.size() == chunk_bytes;
  std::span<std::byte> whole = target;
  if (!is_direct) {
    if (whole_.size() < chunk_bytes) whole_.resize(chunk_bytes);
    whole = std::span(whole_).first(chunk_bytes);
  }
  // The size in the frame is checked first, so that a frame without a size is refused, as HDF5's tools do.
  if (ZSTD_getFrameContentSize(stored.data(), stored.size()) != chunk_bytes) return false;
  const std::size_t size =
      ZSTD_decompressDCtx(context_.get(), whole.data(), whole.size(), stored.data(), stored.size());
  if (ZSTD_isError(size) != 0 || size != chunk_bytes) return false;
  if (is_direct) return true;
  if (item > 1) {
    const std::size_t elements = target.size() / item;
    unshuffle(whole, item, elements, target.data());
    // The rest is part of one element: its bytes come from as many columns.
    for (std::size_t byte = elements * item; byte < target.size(); ++byte)
      target[byte] = whole[byte % item * (chunk_bytes / item) + elements];
  } else {
    std::ranges::copy(whole.first(target.size()), target.begin());
  }
  return true;
}

namespace {

// Elements per block. The bytes of a block stay in the first-level cache while its columns are written one after the
// other.
constexpr std::size_t at_once = 512;

template <std::size_t Item>
void shuffle_from(std::size_t first, const std::byte* source, std::size_t count, std::byte* target) noexcept {
  for (std::size_t begin = first; begin < count; begin += at_once) {
    const std::size_t end = begin + at_once < count ? begin + at_once : count;
    for (std::size_t byte = 0; byte < Item; ++byte)
      for (std::size_t i = begin; i < end; ++i) target[byte * count + i] = source[i * Item + byte];
  }
}

template <std::size_t Item>
void unshuffle_from(std::size_t first, const std::byte* source, std::size_t count, std::size_t wanted,
                    std::byte* target) noexcept {
  for (std::size_t begin = first; begin < wanted; begin += at_once) {
    const std::size_t end = begin + at_once < wanted ? begin + at_once : wanted;
    for (std::size_t byte = 0; byte < Item; ++byte)
      for (std::size_t i = begin; i < end; ++i) target[i * Item + byte] = source[byte * count + i];
  }
}

#ifdef __SSE2__
__m128i read(const std::byte* from) noexcept {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
void write(std::byte* to, __m128i value) noexcept {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
}
// Returns the bytes at even (odd) positions of 32 bytes.
__m128i even(__m128i a, __m128i b) noexcept {
  const __m128i low = _mm_set1_epi16(0x00ff);
  return _mm_packus_epi16(_mm_and_si128(a, low), _mm_and_si128(b, low));
}
__m128i odd(__m128i a, __m128i b) noexcept {
  return _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
}

// These functions return the number of elements that they have processed, in steps of sixteen.
std::size_t shuffle_2(const std::byte* source, std::size_t count, std::byte* target) noexcept {
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m128i a = read(source + 2 * i);
    const __m128i b = read(source + 2 * i + 16);
    write(target + i, even(a, b));
    write(target + count + i, odd(a, b));
  }
  return i;
}

std::size_t shuffle_4(const std::byte* source, std::size_t count, std::byte* target) noexcept {
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const std::byte* from = source + 4 * i;
    const __m128i a = read(from);
    const __m128i b = read(from + 16);
    const __m128i c = read(from + 32);
    const __m128i d = read(from + 48);
    // Bytes 0 and 2 of each element, then 1 and 3.
    const __m128i even_ab = even(a, b);
    const __m128i even_cd = even(c, d);
    const __m128i odd_ab = odd(a, b);
    const __m128i odd_cd = odd(c, d);
    write(target + i, even(even_ab, even_cd));
    write(target + count + i, even(odd_ab, odd_cd));
    write(target + 2 * count + i, odd(even_ab, even_cd));
    write(target + 3 * count + i, odd(odd_ab, odd_cd));
  }
  return i;
}

std::size_t unshuffle_2(const std::byte* source, std::size_t count, std::size_t wanted, std::byte* target) noexcept {
  std::size_t i = 0;
  for (; i + 16 <= wanted; i += 16) {
    const __m128i a = read(source + i);
    const __m128i b = read(source + count + i);
    write(target + 2 * i, _mm_unpacklo_epi8(a, b));
    write(target + 2 * i + 16, _mm_unpackhi_epi8(a, b));
  }
  return i;
}

std::size_t unshuffle_4(const std::byte* source, std::size_t count, std::size_t wanted, std::byte* target) noexcept {
  std::size_t i = 0;
  for (; i + 16 <= wanted; i += 16) {
    const __m128i a = read(source + i);
    const __m128i b = read(source + count + i);
    const __m128i c = read(source + 2 * count + i);
    const __m128i d = read(source + 3 * count + i);
    const __m128i ab_low = _mm_unpacklo_epi8(a, b);
    const __m128i ab_high = _mm_unpackhi_epi8(a, b);
    const __m128i cd_low = _mm_unpacklo_epi8(c, d);
    const __m128i cd_high = _mm_unpackhi_epi8(c, d);
    std::byte* to = target + 4 * i;
    write(to, _mm_unpacklo_epi16(ab_low, cd_low));
    write(to + 16, _mm_unpackhi_epi16(ab_low, cd_low));
    write(to + 32, _mm_unpacklo_epi16(ab_high, cd_high));
    write(to + 48, _mm_unpackhi_epi16(ab_high, cd_high));
  }
  return i;
}
#endif

}  // namespace

void shuffle(std::span<const std::byte> source, std::size_t item, std::byte* target) noexcept {
  if (source.empty()) return;
  const std::size_t count = source.size() / item;
  std::size_t done = 0;
#ifdef __SSE2__
  if (item == 2) done = shuffle_2(source.data(), count, target);
  if (item == 4) done = shuffle_4(source.data(), count, target);
#endif
  switch (item) {
    case 2:
      return shuffle_from<2>(done, source.data(), count, target);
    case 4:
      return shuffle_from<4>(done, source.data(), count, target);
    case 8:
      return shuffle_from<8>(0, source.data(), count, target);
    default:
      std::memcpy(target, source.data(), source.size());
  }
}

void unshuffle(std::span<const std::byte> source, std::size_t item, std::size_t elements, std::byte* target) noexcept {
  if (elements == 0) return;
  const std::size_t count = source.size() / item;
  std::size_t done = 0;
#ifdef __SSE2__
  if (item == 2) done = unshuffle_2(source.data(), count, elements, target);
  if (item == 4) done = unshuffle_4(source.data(), count, elements, target);
#endif
  switch (item) {
    case 2:
      return unshuffle_from<2>(done, source.data(), count, elements, target);
    case 4:
      return unshuffle_from<4>(done, source.data(), count, elements, target);
    case 8:
      return unshuffle_from<8>(0, source.data(), count, elements, target);
    default:
      std::memcpy(target, source.data(), elements * item);
  }
}

std::vector<std::uint64_t> dataset_shape(DType dtype, const Shape& shape) {
  if (is_packed(dtype)) return {byte_size(dtype, shape)};
  return {shape.begin(), shape.end()};
}

ChunkGrid::ChunkGrid(std::vector<std::uint64_t> shape, std::size_t dim, std::uint64_t rows, std::uint64_t item)
    : shape_(std::move(shape)), dim_(dim), rows_(rows), row_bytes_(item) {
  // The size of the whole tensor fits 63 bits, so none of these products overflows.
  for (std::size_t d = dim + 1; d < shape_.size(); ++d) row_bytes_ *= shape_[d];
  for (std::size_t d = 0; d < dim; ++d) outer_ *= shape_[d];
  per_outer_ = (shape_[dim] - 1) / rows + 1;
}

ChunkGrid ChunkGrid::make(DType dtype, const Shape& shape, std::uint64_t chunk_bytes) {
  std::vector<std::uint64_t> extents = dataset_shape(dtype, shape);
  const std::uint64_t item = item_bytes(dtype);
  // Cut the innermost dimension at first, and move outward while a row still fits into a chunk.
  std::size_t dim = extents.size() - 1;
  std::uint64_t row = item;
  while (dim > 0 && row * extents[dim] <= chunk_bytes) row *= extents[dim--];
  std::uint64_t rows = std::clamp<std::uint64_t>(chunk_bytes / row, 1, extents[dim]);
  // Chunks of about the same size, so that the last one is not mostly padding.
  const std::uint64_t count = (extents[dim] - 1) / rows + 1;
  rows = (extents[dim] - 1) / count + 1;
  return {std::move(extents), dim, rows, item};
}

std::optional<ChunkGrid> ChunkGrid::of(DType dtype, const Shape& shape, std::size_t dim, std::uint64_t rows) {
  std::vector<std::uint64_t> extents = dataset_shape(dtype, shape);
  if (dim >= extents.size() || rows == 0 || rows > extents[dim]) return std::nullopt;
  if (std::ranges::find(extents, 0U) != extents.end()) return std::nullopt;
  ChunkGrid grid(std::move(extents), dim, rows, item_bytes(dtype));
  if (grid.row_bytes_ > largest_chunk || rows > largest_chunk / grid.row_bytes_) return std::nullopt;
  return grid;
}

std::uint64_t ChunkGrid::begin(std::uint64_t chunk) const noexcept {
  return ((chunk / per_outer_) * shape_[dim_] + (chunk % per_outer_) * rows_) * row_bytes_;
}

std::uint64_t ChunkGrid::bytes(std::uint64_t chunk) const noexcept {
  return std::min(rows_, shape_[dim_] - (chunk % per_outer_) * rows_) * row_bytes_;
}

std::uint64_t ChunkGrid::chunk_at(std::uint64_t offset) const noexcept {
  const std::uint64_t row = offset / row_bytes_;
  return row / shape_[dim_] * per_outer_ + row % shape_[dim_] / rows_;
}

std::vector<std::uint64_t> ChunkGrid::chunk_shape() const {
  std::vector<std::uint64_t> extents = shape_;
  std::fill(extents.begin(), extents.begin() + static_cast<std::ptrdiff_t>(dim_), 1);
  extents[dim_] = rows_;
  return extents;
}

}  // namespace muster::statefile
