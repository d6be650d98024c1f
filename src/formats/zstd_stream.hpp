// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bytes of a zstd stream by their places. Such a stream can only be decoded from its beginning: what was decoded last
// is kept, and whoever goes back farther has it decoded anew.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/formats/zip.hpp"

struct ZSTD_DCtx_s;

namespace muster::formats {

/// Not thread-safe.
class ZstdStream {
 public:
  /// As much is kept of what was decoded last, or somewhat more.
  static constexpr std::uint64_t most_kept = 16 << 20;

  /// `read` gives the stream, which has `bytes`; it is refused if it has more than `most` when it is decoded.
  ZstdStream(ReadAt read, std::uint64_t bytes, std::uint64_t most);
  /// How many there are when it is decoded. Throws Error(corrupt), and what `read` throws.
  std::uint64_t size();
  /// Throws likewise, and if it has not as many.
  void read(std::uint64_t at, std::span<std::byte> target);

 private:
  struct Free {
    void operator()(ZSTD_DCtx_s* context) const noexcept;
  };
  void restart();
  bool decode();

  ReadAt read_;
  std::uint64_t bytes_;
  std::uint64_t most_;
  std::unique_ptr<ZSTD_DCtx_s, Free> context_;
  std::vector<std::byte> input_;
  std::size_t used_ = 0;           // of the input
  std::uint64_t taken_ = 0;        // of the stream
  std::vector<std::byte> recent_;  // the last of what was decoded
  std::uint64_t decoded_ = 0;
  bool is_whole_ = true;  // no frame is open
};

}  // namespace muster::formats
