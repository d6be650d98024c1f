// SPDX-License-Identifier: Apache-2.0
#include "src/formats/zstd_stream.hpp"

#include <fmt/core.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "muster/error.hpp"

namespace muster::formats {
namespace {

constexpr std::size_t input_bytes = 256 << 10;
constexpr std::size_t decoded_at_once = 1 << 20;

[[noreturn]] void refuse_stream(const std::string& words) {
  throw Error(ErrorKind::corrupt, words);
}

}  // namespace

void ZstdStream::Free::operator()(ZSTD_DCtx_s* context) const noexcept {
  ZSTD_freeDCtx(context);
}

ZstdStream::ZstdStream(ReadAt read, std::uint64_t bytes, std::uint64_t most)
    : read_(std::move(read)), bytes_(bytes), most_(most), context_(ZSTD_createDCtx()) {
  if (!context_) throw std::bad_alloc();
}

void ZstdStream::restart() {
  ZSTD_DCtx_reset(context_.get(), ZSTD_reset_session_only);
  input_.clear();
  recent_.clear();
  used_ = 0;
  taken_ = decoded_ = 0;
  is_whole_ = true;
}

/// Decodes more bytes and appends them; returns false at the end.
bool ZstdStream::decode() {
  if (recent_.size() >= 2 * most_kept)
    recent_.erase(recent_.begin(), recent_.end() - static_cast<std::ptrdiff_t>(most_kept));
  const std::size_t before = recent_.size();
  recent_.resize(before + decoded_at_once);
  ZSTD_outBuffer out{recent_.data(), recent_.size(), before};
  while (out.pos == before) {
    if (used_ == input_.size() && taken_ != bytes_) {
      input_.resize(std::min<std::uint64_t>(input_bytes, bytes_ - taken_));
      read_(taken_, input_);
      taken_ += input_.size();
      used_ = 0;
    }
    const bool is_last = used_ == input_.size();
    if (is_last && is_whole_) break;
    ZSTD_inBuffer in{input_.data(), input_.size(), used_};
    const std::size_t left = ZSTD_decompressStream(context_.get(), &out, &in);
    if (ZSTD_isError(left) != 0) refuse_stream(fmt::format("not a zstd stream: {}", ZSTD_getErrorName(left)));
    used_ = in.pos;
    is_whole_ = left == 0;
    if (is_last && out.pos == before) refuse_stream("truncated zstd stream");
  }
  recent_.resize(out.pos);
  decoded_ += out.pos - before;
  if (decoded_ > most_) refuse_stream(fmt::format("the zstd stream has more than the expected {} bytes", most_));
  return out.pos != before;
}

std::uint64_t ZstdStream::size() {
  while (decode()) {
  }
  return decoded_;
}

void ZstdStream::read(std::uint64_t at, std::span<std::byte> target) {
  if (at < decoded_ - recent_.size()) restart();
  while (!target.empty()) {
    if (at >= decoded_) {
      if (!decode()) refuse_stream(fmt::format("truncated zstd stream: it ends at byte {}", decoded_));
      continue;
    }
    const std::uint64_t place = at - (decoded_ - recent_.size());
    const std::size_t now = std::min<std::uint64_t>(target.size(), recent_.size() - place);
    std::memcpy(target.data(), recent_.data() + place, now);
    target = target.subspan(now);
    at += now;
  }
}

}  // namespace muster::formats
