// SPDX-License-Identifier: Apache-2.0
#pragma once
// Random access to the bytes of a zstd stream. Such a stream can only be decoded from its beginning. The bytes that
// were decoded last are kept; to read before them, the stream is decoded again from its beginning.

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
  /// The minimum number of recently decoded bytes that are kept.
  static constexpr std::uint64_t most_kept = 16 << 20;

  /// `read` reads the compressed stream of `bytes` bytes. A stream that decodes to more than `most` bytes is refused.
  ZstdStream(ReadAt read, std::uint64_t bytes, std::uint64_t most);
  /// Returns the decoded size. Throws Error(corrupt), and exceptions of `read`.
  std::uint64_t size();
  /// Reads decoded bytes. Throws as size(), and if the stream is too short.
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
  std::vector<std::byte> recent_;  // the bytes that were decoded last
  std::uint64_t decoded_ = 0;
  bool is_whole_ = true;  // no frame is open
};

}  // namespace muster::formats
