// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/chunk_codec.hpp"

#include <zstd.h>

#include <algorithm>
#include <cstring>

#include "muster/error.hpp"
#include "src/statefile/shuffle.hpp"

namespace muster::statefile {

struct ChunkEncoder::Context {
  ZSTD_CCtx* zstd;
  explicit Context(ZSTD_CCtx* context) : zstd(context) {}
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() { ZSTD_freeCCtx(zstd); }
};

struct ChunkDecoder::Context {
  ZSTD_DCtx* zstd;
  explicit Context(ZSTD_DCtx* context) : zstd(context) {}
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() { ZSTD_freeDCtx(zstd); }
};

namespace {

[[noreturn]] void throw_no_memory() {
  throw Error(ErrorKind::no_space, "compressing a tensor: there is no memory for zstd");
}

}  // namespace

bool is_zstd_level(int level) noexcept {
  return level >= 1 && level <= ZSTD_maxCLevel();
}

ChunkEncoder::ChunkEncoder(int level) : context_(std::make_unique<Context>(ZSTD_createCCtx())) {
  if (context_->zstd == nullptr) throw_no_memory();
  ZSTD_CCtx_setParameter(context_->zstd, ZSTD_c_compressionLevel, level);
}
ChunkEncoder::ChunkEncoder(ChunkEncoder&&) noexcept = default;
ChunkEncoder& ChunkEncoder::operator=(ChunkEncoder&&) noexcept = default;
ChunkEncoder::~ChunkEncoder() = default;

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
  // What does not become smaller need not be finished.
  if (encoded_.size() < chunk_bytes) encoded_.resize(chunk_bytes);
  const std::size_t size = ZSTD_compress2(context_->zstd, encoded_.data(), chunk_bytes - 1, source.data(), chunk_bytes);
  if (!ZSTD_isError(size)) return {std::span(encoded_).first(size), false};
  return {whole, true};
}

ChunkDecoder::ChunkDecoder() : context_(std::make_unique<Context>(ZSTD_createDCtx())) {
  if (context_->zstd == nullptr) throw_no_memory();
}
ChunkDecoder::ChunkDecoder(ChunkDecoder&&) noexcept = default;
ChunkDecoder& ChunkDecoder::operator=(ChunkDecoder&&) noexcept = default;
ChunkDecoder::~ChunkDecoder() = default;

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
  // The frame says how much it is: asked before, so that a frame without a size is refused as HDF5's tools refuse it.
  if (ZSTD_getFrameContentSize(stored.data(), stored.size()) != chunk_bytes) return false;
  const std::size_t size =
      ZSTD_decompressDCtx(context_->zstd, whole.data(), whole.size(), stored.data(), stored.size());
  if (ZSTD_isError(size) != 0 || size != chunk_bytes) return false;
  if (is_direct) return true;
  if (item > 1) {
    const std::size_t elements = target.size() / item;
    unshuffle(whole, item, elements, target.data());
    // Of an element that is cut: its bytes stand in as many columns.
    for (std::size_t byte = elements * item; byte < target.size(); ++byte)
      target[byte] = whole[byte % item * (chunk_bytes / item) + elements];
  } else {
    std::ranges::copy(whole.first(target.size()), target.begin());
  }
  return true;
}

}  // namespace muster::statefile
