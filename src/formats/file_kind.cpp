// SPDX-License-Identifier: Apache-2.0
#include "src/formats/file_kind.hpp"

#include <algorithm>
#include <array>

namespace muster::formats {
namespace {

/// A safetensors file begins with the length of its header (at most 100 MB) and the header's first character. In any
/// other format whose first bytes are such a length, bytes 4 to 8 have other values.
bool is_safetensors(std::string_view head) noexcept {
  constexpr std::size_t prefix = 8;
  constexpr std::uint64_t longest_header = 100'000'000;
  if (head.size() <= prefix || head[prefix] != '{') return false;
  std::uint64_t length = 0;
  for (std::size_t i = prefix; i-- > 0;) length = (length << 8U) | static_cast<unsigned char>(head[i]);
  return length <= longest_header;
}

bool is_pickle(std::string_view head) noexcept {
  return head.size() > 2 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5;
}

/// The older format begins with a pickle of one integer of ten bytes. Protocols 4 and 5 precede it by a frame header.
bool is_torch_legacy(std::string_view head) noexcept {
  constexpr std::string_view magic("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 13);
  constexpr std::size_t frame = 9;
  if (!is_pickle(head)) return false;
  head.remove_prefix(2);
  if (head[0] == '\x95') head.remove_prefix(std::min(head.size(), frame));
  return head.starts_with(magic);
}

bool is_tar(std::string_view head) noexcept {
  constexpr std::size_t place = 257;
  return head.size() > place && head.substr(place).starts_with("ustar");
}

bool is_html(std::string_view head) noexcept {
  const std::size_t begin = head.find_first_not_of(" \t\r\n\xef\xbb\xbf");
  if (begin == std::string_view::npos) return false;
  const auto starts = [text = head.substr(begin)](std::string_view wanted) {
    const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
    return text.size() >= wanted.size() && std::ranges::equal(text.substr(0, wanted.size()), wanted, {}, lower);
  };
  return starts("<!doctype html") || starts("<html");
}

bool is_json_text(std::string_view head) noexcept {
  const std::size_t begin = head.find_first_not_of(" \t\r\n");
  return begin != std::string_view::npos && head[begin] == '{';
}

}  // namespace

FileKind kind_of_file(std::span<const std::byte> bytes) noexcept {
  const std::string_view head(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (is_safetensors(head)) return FileKind::safetensors;
  if (head.starts_with("PK\x03\x04")) return FileKind::zip;
  if (is_torch_legacy(head)) return FileKind::torch_legacy;
  if (head.starts_with("\x89HDF\r\n\x1a\n")) return FileKind::hdf5;
  if (head.starts_with("GGUF")) return FileKind::gguf;
  if (head.starts_with("\x93NUMPY")) return FileKind::numpy;
  if (head.starts_with("\x1f\x8b")) return FileKind::gzip;
  if (head.starts_with("version https://git-lfs")) return FileKind::lfs_pointer;
  if (is_tar(head)) return FileKind::tar;
  if (is_pickle(head)) return FileKind::pickle;
  if (is_html(head)) return FileKind::html;
  return is_json_text(head) ? FileKind::json : FileKind::unknown;
}

FileKind kind_of_file(const os::ReadableFile& file, std::uint64_t begin) {
  std::array<std::byte, kind_bytes> memory{};
  const std::uint64_t rest = file.bytes() - std::min(begin, file.bytes());
  const std::span<std::byte> head = std::span(memory).first(std::min<std::uint64_t>(kind_bytes, rest));
  file.read_at(begin, head);
  return kind_of_file(head);
}

std::string_view advice_about(FileKind kind) noexcept {
  constexpr std::array<std::string_view, 13> words = {
      "",
      "",
      "a zip archive, as torch.save writes: rename it with the extension .pt",
      "a pickle, as torch.save writes: rename it with the extension .pt",
      "an HDF5 file: rename it with the extension .h5, and convert it with muster convert",
      "a pickle that torch.save did not write: save its tensors with torch.save or safetensors",
      "a GGUF file, which Muster does not read: use the original model, or convert it with llama.cpp",
      "a tar archive: unpack it, or save it again with torch.save if PyTorch 0.1 wrote it",
      "a file compressed with gzip: unpack it first",
      "a NumPy array: save it with safetensors.numpy.save_file",
      "a Git LFS pointer, not the file itself: fetch the file with \"git lfs pull\"",
      "a web page, perhaps from a failed download: download the file again",
      "a JSON text, not a file of tensors",
  };
  return words[static_cast<std::size_t>(kind)];
}

}  // namespace muster::formats
