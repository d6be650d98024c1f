// SPDX-License-Identifier: Apache-2.0
#include "src/versions/delta_codec.hpp"

#include <fmt/core.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <new>
#include <utility>

#include "muster/error.hpp"

namespace muster::versions {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr int level = 1;
// Changes are noise: a larger window does not compress them better, and the windows of all deltas of a chain would not
// fit into the caches of the puller.
constexpr int window_log = 17;
constexpr std::size_t input_bytes = 128 << 10;
constexpr std::size_t zero_bytes = 64 << 10;
// Positions and values of a tensor are in memory until its number of changes is known.
constexpr std::size_t most_overwrites = std::size_t{64} << 20;
constexpr std::uint64_t position_bytes = sizeof(std::uint32_t);

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::corrupt, words);
}

void check(std::size_t result, const char* doing) {
  if (ZSTD_isError(result) == 0) return;
  if (ZSTD_getErrorCode(result) == ZSTD_error_memory_allocation) throw std::bad_alloc();
  throw Error(ErrorKind::io, fmt::format("{}: {}", doing, ZSTD_getErrorName(result)));
}

constexpr std::size_t word_bytes = sizeof(std::uint64_t);

/// Returns the word at a position; bytes after the end are zero.
std::uint64_t word_at(std::span<const std::byte> bytes, std::size_t at) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes.data() + at, std::min(word_bytes, bytes.size() - at));
  return word;
}

/// Replaces `old_bytes` by the XOR of both. Returns the number of elements of `Bits` bits that are not zero then. A
/// word has several elements. The highest bit of each tells whether it is not zero, and the counts of all of them are
/// added at once.
template <unsigned Bits>
std::uint64_t exclusive_or(std::span<const std::byte> new_bytes, std::span<std::byte> old_bytes) noexcept {
  constexpr std::uint64_t ones = Bits == 64 ? 1 : ~std::uint64_t{0} / ((std::uint64_t{1} << (Bits % 64)) - 1);
  constexpr std::uint64_t highest = ones << (Bits - 1);
  const auto not_zero = [](std::uint64_t word) {
    return ((((word & ~highest) + ~highest) | word) & highest) >> (Bits - 1);
  };
  constexpr std::size_t words_at_once = 255;  // the largest count that fits each element
  std::uint64_t count = 0;
  for (std::size_t at = 0; at < old_bytes.size();) {
    std::uint64_t counts = 0;
    const std::size_t end = std::min(old_bytes.size(), at + words_at_once * word_bytes);
    for (; at + word_bytes <= end; at += word_bytes) {
      std::uint64_t word = 0;
      std::uint64_t other = 0;
      std::memcpy(&word, new_bytes.data() + at, word_bytes);
      std::memcpy(&other, old_bytes.data() + at, word_bytes);
      word ^= other;
      std::memcpy(old_bytes.data() + at, &word, word_bytes);
      counts += not_zero(word);
    }
    if (at < end) {
      const std::uint64_t word = word_at(new_bytes, at) ^ word_at(old_bytes, at);
      std::memcpy(old_bytes.data() + at, &word, end - at);
      counts += not_zero(word);
      at = end;
    }
    constexpr std::uint64_t element = ~std::uint64_t{0} >> (64 - Bits);
    for (unsigned shift = 0; shift < 64; shift += Bits) count += (counts >> shift) & element;
  }
  return count;
}

/// Changes the bytes, without counting.
void change(std::span<const std::byte> changes, std::span<std::byte> bytes) noexcept {
  using Words [[gnu::vector_size(32)]] = std::uint64_t;
  std::size_t at = 0;
  for (; at + sizeof(Words) <= bytes.size(); at += sizeof(Words)) {
    Words words;
    Words others;
    std::memcpy(&words, bytes.data() + at, sizeof words);
    std::memcpy(&others, changes.data() + at, sizeof others);
    words ^= others;
    std::memcpy(bytes.data() + at, &words, sizeof words);
  }
  for (; at < bytes.size(); ++at) bytes[at] ^= changes[at];
}

std::uint64_t exclusive_or(std::span<const std::byte> new_bytes, std::span<std::byte> old_bytes,
                           std::uint64_t element_bytes) noexcept {
  switch (element_bytes) {
    case 2:
      return exclusive_or<16>(new_bytes, old_bytes);
    case 4:
      return exclusive_or<32>(new_bytes, old_bytes);
    case 8:
      return exclusive_or<64>(new_bytes, old_bytes);
    default:
      return exclusive_or<8>(new_bytes, old_bytes);
  }
}

}  // namespace

void DeltaEncoder::Free::operator()(ZSTD_CCtx_s* context) const noexcept {
  ZSTD_freeCCtx(context);
}

DeltaEncoder::DeltaEncoder(DeltaEncoding encoding, Append append)
    : encoding_(encoding), append_(std::move(append)), context_(ZSTD_createCCtx()), output_(ZSTD_CStreamOutSize()) {
  if (!context_) throw std::bad_alloc();
  check(ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_compressionLevel, level), "setting up zstd");
  check(ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_windowLog, window_log), "setting up zstd");
  check(ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_contentSizeFlag, 1), "setting up zstd");
}
DeltaEncoder::~DeltaEncoder() = default;

void DeltaEncoder::begin(std::uint64_t bytes, std::uint64_t element_bytes) {
  if (encoding_ == DeltaEncoding::overwrite && bytes >= most_overwritten_bytes)
    throw Error(ErrorKind::unsupported,
                fmt::format("the tensor has {} bytes, and the encoding \"overwrite\" can address less than {}. Use the "
                            "encoding \"xor\"",
                            bytes, most_overwritten_bytes));
  bytes_ = bytes;
  element_bytes_ = element_bytes;
  done_ = 0;
  changed_ = 0;
  is_open_ = false;
  positions_.clear();
  values_.clear();
}

void DeltaEncoder::open(std::uint64_t content_bytes) {
  check(ZSTD_CCtx_reset(context_.get(), ZSTD_reset_session_only), "compressing a delta");
  check(ZSTD_CCtx_setPledgedSrcSize(context_.get(), content_bytes), "compressing a delta");
  is_open_ = true;
}

void DeltaEncoder::compress(std::span<const std::byte> bytes, bool is_last) {
  ZSTD_inBuffer in{bytes.data(), bytes.size(), 0};
  for (;;) {
    ZSTD_outBuffer out{output_.data(), output_.size(), 0};
    const std::size_t left = ZSTD_compressStream2(context_.get(), &out, &in, is_last ? ZSTD_e_end : ZSTD_e_continue);
    check(left, "compressing a delta");
    if (out.pos != 0) append_(std::span(output_).first(out.pos));
    if (is_last ? left == 0 : in.pos == in.size) return;
  }
}

void DeltaEncoder::compress_zeros(std::uint64_t bytes) {
  static constexpr std::array<std::byte, zero_bytes> zeros{};
  for (std::uint64_t left = bytes; left != 0;) {
    const std::uint64_t now = std::min<std::uint64_t>(left, zeros.size());
    compress(std::span(zeros).first(now), false);
    left -= now;
  }
}

void DeltaEncoder::add(std::span<const std::byte> new_bytes, std::span<std::byte> old_bytes) {
  const std::uint64_t changed = exclusive_or(new_bytes, old_bytes, element_bytes_);
  const bool differs = changed != 0;
  changed_ += changed;
  if (encoding_ == DeltaEncoding::overwrite) {
    if (positions_.size() + old_bytes.size() > most_overwrites)
      throw Error(ErrorKind::unsupported,
                  fmt::format("more than {} of its bytes have changed, which is too much for the encoding "
                              "\"overwrite\". Use the encoding \"xor\", or publish a full version",
                              positions_.size()));
    for (std::size_t at = 0; differs && at < old_bytes.size(); ++at) {
      if (old_bytes[at] == std::byte{0}) continue;
      positions_.push_back(static_cast<std::uint32_t>(done_ + at));
      values_.push_back(new_bytes[at]);
    }
  } else if (differs || is_open_) {
    if (!is_open_) {
      open(bytes_);
      compress_zeros(done_);
    }
    compress(old_bytes, false);
  }
  done_ += new_bytes.size();
}

bool DeltaEncoder::end() {
  if (encoding_ == DeltaEncoding::overwrite && !positions_.empty()) {
    const auto count = static_cast<std::uint32_t>(positions_.size());
    open(position_bytes + positions_.size() * (position_bytes + 1));
    compress(std::as_bytes(std::span(&count, 1)), false);
    compress(std::as_bytes(std::span(positions_)), false);
    compress(values_, false);
  }
  if (!is_open_) return false;
  compress({}, true);
  is_open_ = false;
  return true;
}

namespace {

/// The contexts that a thread uses again, because making one for each of many small tensors would take longer than
/// decoding them.
class SpareContexts {
 public:
  SpareContexts() { contexts_.reserve(most); }
  SpareContexts& operator=(SpareContexts&&) = delete;
  ~SpareContexts() {
    for (ZSTD_DCtx_s* context : contexts_) ZSTD_freeDCtx(context);
  }
  ZSTD_DCtx_s* take() noexcept {
    if (contexts_.empty()) return ZSTD_createDCtx();
    ZSTD_DCtx_s* const context = contexts_.back();
    contexts_.pop_back();
    return context;
  }
  void give_back(ZSTD_DCtx_s* context) noexcept {
    // A context keeps the memory of the largest window that it has seen.
    if (contexts_.size() < most && ZSTD_sizeof_DCtx(context) <= decoder_bytes &&
        ZSTD_isError(ZSTD_DCtx_reset(context, ZSTD_reset_session_and_parameters)) == 0)
      contexts_.push_back(context);
    else
      ZSTD_freeDCtx(context);
  }

 private:
  static constexpr std::size_t most = 32;
  std::vector<ZSTD_DCtx_s*> contexts_;
};

SpareContexts& spare_contexts() {
  static thread_local SpareContexts contexts;
  return contexts;
}

}  // namespace

void FrameReader::Free::operator()(ZSTD_DCtx_s* context) const noexcept {
  spare_contexts().give_back(context);
}

FrameReader::FrameReader(formats::ReadAt read, std::uint64_t bytes)
    : read_(std::move(read)), bytes_(bytes), context_(spare_contexts().take()) {
  if (!context_) throw std::bad_alloc();
  check(ZSTD_DCtx_setParameter(context_.get(), ZSTD_d_windowLogMax, largest_window_log), "setting up zstd");
}

std::size_t FrameReader::decode(std::span<std::byte> target) {
  ZSTD_outBuffer out{target.data(), target.size(), 0};
  for (;;) {
    if (used_ == input_.size() && taken_ != bytes_) {
      input_.resize(std::min<std::uint64_t>(input_bytes, bytes_ - taken_));
      read_(taken_, input_);
      taken_ += input_.size();
      used_ = 0;
    }
    ZSTD_inBuffer in{input_.data(), input_.size(), used_};
    const std::size_t before = out.pos;
    const std::size_t left = ZSTD_decompressStream(context_.get(), &out, &in);
    if (ZSTD_isError(left) != 0) {
      if (ZSTD_getErrorCode(left) == ZSTD_error_memory_allocation) throw std::bad_alloc();
      refuse(fmt::format("its zstd frame is damaged: {}", ZSTD_getErrorName(left)));
    }
    const bool has_moved = in.pos != used_ || out.pos != before;
    used_ = in.pos;
    if (left == 0) {
      has_ended_ = true;
      return out.pos;
    }
    if (out.pos == target.size() && !target.empty()) return out.pos;
    if (used_ == input_.size() && taken_ == bytes_ && !has_moved) refuse("its zstd frame is truncated");
  }
}

void FrameReader::read(std::span<std::byte> target) {
  while (!target.empty()) {
    const std::size_t count = has_ended_ ? 0 : decode(target);
    if (count == 0 && has_ended_) refuse(fmt::format("its changes are {} bytes too short", target.size()));
    target = target.subspan(count);
  }
}

void FrameReader::skip(std::uint64_t bytes) {
  std::vector<std::byte> ignored(std::min<std::uint64_t>(bytes, input_bytes));
  for (std::uint64_t left = bytes; left != 0;) {
    const std::uint64_t now = std::min<std::uint64_t>(left, ignored.size());
    read(std::span(ignored).first(now));
    left -= now;
  }
}

void FrameReader::end() {
  std::byte more{};
  if (!has_ended_ && decode(std::span(&more, 1)) != 0) refuse("its changes are longer than the tensor");
  if (!has_ended_) refuse("its zstd frame does not end");
  if (used_ != input_.size() || taken_ != bytes_) refuse("it has bytes after its zstd frame");
}

/// The changes of an overwrite: two readers of one frame, for positions and for values.
class DeltaDecoder::Overwrites {
 public:
  Overwrites(const formats::ReadAt& read, std::uint64_t frame_bytes, std::uint64_t bytes)
      : positions_(read, frame_bytes), values_(read, frame_bytes), bytes_(bytes) {
    positions_.read(std::as_writable_bytes(std::span(&left_, 1)));
    if (left_ > bytes) refuse(fmt::format("its changes list {} positions for {} bytes", left_, bytes));
    values_.skip(position_bytes * (std::uint64_t{left_} + 1));
  }

  /// Changes the piece of the tensor from the byte `begin` on.
  void apply(std::uint64_t begin, std::span<std::byte> piece) {
    for (; has_next(); ++at_) {
      const std::uint64_t position = next_[at_];
      if (position >= begin + piece.size()) return;
      piece[position - begin] = new_bytes_[at_];
    }
  }

  void end() {
    if (has_next())
      refuse(fmt::format("its changes have the position {}, and the tensor has {} bytes", next_[at_], bytes_));
    values_.end();
  }

 private:
  static constexpr std::size_t at_once = 16 << 10;

  /// Returns whether a change is left, and reads the next ones if needed.
  bool has_next() {
    if (at_ < next_.size()) return true;
    if (left_ == 0) return false;
    const std::size_t count = std::min<std::size_t>(left_, at_once);
    const std::uint64_t last = next_.empty() ? 0 : next_.back();
    const bool is_first = next_.empty();
    next_.resize(count);
    new_bytes_.resize(count);
    positions_.read(std::as_writable_bytes(std::span(next_)));
    values_.read(new_bytes_);
    left_ -= static_cast<std::uint32_t>(count);
    at_ = 0;
    std::uint64_t before = last;
    for (std::size_t i = 0; i < count; ++i) {
      if ((i != 0 || !is_first) && next_[i] <= before)
        refuse(fmt::format("the positions of its changes do not ascend: {} follows {}", next_[i], before));
      before = next_[i];
      if (before >= bytes_)
        refuse(fmt::format("its changes have the position {}, and the tensor has {} bytes", before, bytes_));
    }
    return true;
  }

  FrameReader positions_;
  FrameReader values_;
  std::uint64_t bytes_;
  std::uint32_t left_ = 0;  // changes that were not read yet
  std::vector<std::uint32_t> next_;
  std::vector<std::byte> new_bytes_;
  std::size_t at_ = 0;
};

DeltaDecoder::DeltaDecoder(DeltaEncoding encoding, const formats::ReadAt& read, std::uint64_t frame_bytes,
                           std::uint64_t bytes) {
  if (encoding == DeltaEncoding::overwrite)
    overwrites_ = std::make_unique<Overwrites>(read, frame_bytes, bytes);
  else
    changes_ = std::make_unique<FrameReader>(read, frame_bytes);
}
DeltaDecoder::DeltaDecoder(DeltaDecoder&&) noexcept = default;
DeltaDecoder& DeltaDecoder::operator=(DeltaDecoder&&) noexcept = default;
DeltaDecoder::~DeltaDecoder() = default;

void DeltaDecoder::apply(std::span<std::byte> piece) {
  if (overwrites_) {
    overwrites_->apply(done_, piece);
  } else {
    memory_.resize(piece.size());
    changes_->read(memory_);
    change(memory_, piece);
  }
  done_ += piece.size();
}

void DeltaDecoder::end() {
  if (overwrites_)
    overwrites_->end();
  else
    changes_->end();
}

}  // namespace muster::versions
