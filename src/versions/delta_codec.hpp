// SPDX-License-Identifier: Apache-2.0
#pragma once
// The changes of one tensor as one zstd frame of level 1. Both directions work piece by piece, in the order of the
// tensor, with memory for pieces only. The encoder of overwrites is an exception: it keeps five bytes for each changed
// byte of a tensor.
//
//  xor        the new bytes XOR the old ones, as long as the tensor
//  overwrite  u32 count, ascending u32 positions of changed bytes, one new byte per position; little-endian

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "muster/publish.hpp"
#include "src/formats/zip.hpp"

struct ZSTD_CCtx_s;
struct ZSTD_DCtx_s;

namespace muster::versions {

/// Overwrite positions have 32 bits.
inline constexpr std::uint64_t most_overwritten_bytes = std::uint64_t{1} << 32;
/// The largest window of a frame that readers accept, as a power of two.
inline constexpr int largest_window_log = 27;

/// Compresses the changes of one tensor after another. Not thread-safe.
class DeltaEncoder {
 public:
  /// Receives the compressed bytes in order.
  using Append = std::function<void(std::span<const std::byte>)>;

  DeltaEncoder(DeltaEncoding encoding, Append append);
  DeltaEncoder& operator=(DeltaEncoder&&) = delete;
  ~DeltaEncoder();

  /// Begins a tensor of `bytes` bytes whose elements have `element_bytes` bytes. Throws Error(unsupported) if overwrite
  /// cannot address it.
  void begin(std::uint64_t bytes, std::uint64_t element_bytes);
  /// Adds the next piece; both spans have the same length. The pieces begin and end at elements. Overwrites
  /// `old_bytes`.
  void add(std::span<const std::byte> new_bytes, std::span<std::byte> old_bytes);
  /// Ends the tensor. Returns whether anything changed; if not, nothing was appended.
  bool end();
  /// Returns the number of elements of the tensor that changed so far.
  [[nodiscard]] std::uint64_t changed_elements() const noexcept { return changed_; }

 private:
  void open(std::uint64_t content_bytes);
  void compress(std::span<const std::byte> bytes, bool is_last);
  void compress_zeros(std::uint64_t bytes);

  DeltaEncoding encoding_;
  Append append_;
  struct Free {
    void operator()(ZSTD_CCtx_s* context) const noexcept;
  };
  std::unique_ptr<ZSTD_CCtx_s, Free> context_;
  std::vector<std::byte> output_;
  std::uint64_t bytes_ = 0;
  std::uint64_t element_bytes_ = 1;
  std::uint64_t done_ = 0;     // bytes of the tensor that were added
  std::uint64_t changed_ = 0;  // elements
  bool is_open_ = false;       // a frame has begun
  // Overwrite only: the changed bytes of the tensor.
  std::vector<std::uint32_t> positions_;
  std::vector<std::byte> values_;
};

/// The memory that a decoder needs for a frame that Muster wrote.
inline constexpr std::uint64_t decoder_bytes = std::uint64_t{1} << 20;

/// Reads one zstd frame forwards. Not thread-safe.
class FrameReader {
 public:
  /// `read` reads the frame, which has `bytes` bytes.
  FrameReader(formats::ReadAt read, std::uint64_t bytes);
  /// Fills `target` with the next bytes. Throws Error(corrupt) if the frame is damaged or ends.
  void read(std::span<std::byte> target);
  /// Skips bytes. Throws as read().
  void skip(std::uint64_t bytes);
  /// Throws Error(corrupt) unless the frame ends here, with its last byte.
  void end();

 private:
  /// Gives the context back for the next frame that this thread reads.
  struct Free {
    void operator()(ZSTD_DCtx_s* context) const noexcept;
  };
  std::size_t decode(std::span<std::byte> target);

  formats::ReadAt read_;
  std::uint64_t bytes_;
  std::unique_ptr<ZSTD_DCtx_s, Free> context_;
  std::vector<std::byte> input_;
  std::size_t used_ = 0;     // of the input
  std::uint64_t taken_ = 0;  // of the frame
  bool has_ended_ = false;
};

/// Applies the changes of one tensor to its old bytes. Not thread-safe.
class DeltaDecoder {
 public:
  /// `read` reads the frame of `frame_bytes` bytes; the tensor has `bytes` bytes.
  DeltaDecoder(DeltaEncoding encoding, const formats::ReadAt& read, std::uint64_t frame_bytes, std::uint64_t bytes);
  DeltaDecoder(DeltaDecoder&&) noexcept;
  DeltaDecoder& operator=(DeltaDecoder&&) noexcept;
  ~DeltaDecoder();
  /// Changes the next piece of the tensor. Throws Error(corrupt) if the frame is damaged, too short, or has a position
  /// that is not ascending or is past the end.
  void apply(std::span<std::byte> piece);
  /// Ends the tensor. Throws Error(corrupt) if the frame has more bytes.
  void end();

 private:
  class Overwrites;
  std::uint64_t done_ = 0;
  std::unique_ptr<FrameReader> changes_;    // xor
  std::unique_ptr<Overwrites> overwrites_;  // overwrite
  std::vector<std::byte> memory_;           // for the changes of a piece
};

}  // namespace muster::versions
