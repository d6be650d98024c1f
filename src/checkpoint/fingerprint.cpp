// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/fingerprint.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/export.hpp"
#include "src/core/checksum.hpp"
#include "src/core/crc64.hpp"

namespace muster {
namespace {

constexpr std::string_view hash_prefix = "model ";
constexpr std::size_t crc_digits = 16;
constexpr std::string_view gap = "  ";
constexpr std::string_view digits = "0123456789abcdef";

/// Writes a backslash, and each byte of a character that could break a line or control a terminal, as \xHH.
std::string name_text(std::string_view name) {
  std::string text;
  while (!name.empty()) {
    const Character character = first_character(name);
    if (character.is_valid && !is_dangerous(character.code) && character.code != '\\') {
      text += name.substr(0, character.bytes);
    } else {
      for (const char byte : name.substr(0, character.bytes))
        text += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    }
    name.remove_prefix(character.bytes);
  }
  return text;
}

/// Returns the number that all of the text represents.
template <class Number>
std::optional<Number> number_of(std::string_view text, int base) {
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

/// The inverse of name_text(); nullopt if the text is not in the form that it writes.
std::optional<std::string> name_of_text(std::string_view text) {
  std::string name;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] != '\\') {
      name += text[at];
      continue;
    }
    const auto byte = text.substr(at, 2) == "\\x" ? number_of<std::uint8_t>(text.substr(at + 2, 2), 16) : std::nullopt;
    if (!byte) return std::nullopt;
    name += static_cast<char>(*byte);
    at += 3;
  }
  return name_text(name) == text ? std::optional(name) : std::nullopt;
}

std::string line_of(const TensorFingerprint& tensor) {
  return fmt::format("{}{}{}{}{}\n", checksum_text(tensor.crc), gap, to_string(tensor.spec), gap,
                     name_text(tensor.name));
}

std::string lines_of(const Fingerprint& fingerprint) {
  std::string lines;
  for (const TensorFingerprint& tensor : fingerprint.tensors) lines += line_of(tensor);
  return lines;
}

std::string hash_of(std::string_view lines) {
  const XXH128_hash_t hash = XXH3_128bits(lines.data(), lines.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::optional<TensorSpec> spec_of_text(std::string_view text) {
  const std::size_t space = text.find(' ');
  if (space == std::string_view::npos || !text.ends_with(']')) return std::nullopt;
  const std::optional<DType> dtype = dtype_from_string(text.substr(0, space));
  if (!dtype) return std::nullopt;
  TensorSpec spec{*dtype, {}};
  for (std::string_view list = text.substr(space + 2); list.size() > 1;) {
    const std::size_t end = list.find_first_of(",]");
    const auto extent = number_of<std::int64_t>(list.substr(0, end), 10);
    if (!extent || *extent < 0) return std::nullopt;
    spec.shape.push_back(*extent);
    list.remove_prefix(std::min(end + 2, list.size()));
  }
  return spec;
}

/// Returns nullopt if the line is not one that line_of() writes.
std::optional<TensorFingerprint> parse_line(std::string_view line) {
  const std::size_t spec = crc_digits + gap.size();
  const std::size_t bracket = line.find(']');
  if (bracket == std::string_view::npos || bracket < spec) return std::nullopt;
  const auto crc = number_of<std::uint64_t>(line.substr(0, crc_digits), 16);
  auto parsed = spec_of_text(line.substr(spec, bracket + 1 - spec));
  auto name = name_of_text(line.substr(std::min(bracket + 1 + gap.size(), line.size())));
  if (!crc || !parsed || !name) return std::nullopt;
  TensorFingerprint tensor{std::move(*name), std::move(*parsed), *crc};
  const std::string again = line_of(tensor);
  if (std::string_view(again).substr(0, again.size() - 1) != line) return std::nullopt;
  return tensor;
}

FingerprintDefect defect_of(const TensorFingerprint& expected, const TensorFingerprint& found) {
  if (expected.spec.dtype != found.spec.dtype) return FingerprintDefect::dtype;
  return expected.spec.shape != found.spec.shape ? FingerprintDefect::shape : FingerprintDefect::content;
}

}  // namespace

std::string Fingerprint::hash() const {
  return hash_of(lines_of(*this));
}

std::string Fingerprint::text() const {
  std::string lines = lines_of(*this);
  const std::string last = fmt::format("{}{}\n", hash_prefix, hash_of(lines));
  return std::move(lines) + last;
}

Fingerprint parse_fingerprint(std::string_view text) {
  Fingerprint fingerprint;
  std::size_t number = 1;
  const auto refuse = [&](std::string_view words) {
    throw Error(ErrorKind::corrupt, fmt::format("malformed fingerprint: line {}: {}", number, words));
  };
  for (std::size_t at = 0;; ++number) {
    const std::size_t end = text.find('\n', at);
    if (end == std::string_view::npos) refuse("the text ends before the line \"model HASH\". Make the file again");
    const std::string_view line = text.substr(at, end - at);
    if (line.starts_with(hash_prefix)) {
      if (end + 1 != text.size()) refuse("more lines follow the line \"model HASH\"");
      if (line.substr(hash_prefix.size()) != hash_of(text.substr(0, at)))
        refuse("the lines before it have another hash: the file was changed. Make the file again");
      return fingerprint;
    }
    std::optional<TensorFingerprint> tensor = parse_line(line);
    if (!tensor) refuse("it is not of the form \"CRC  DTYPE SHAPE  NAME\"");
    if (!fingerprint.tensors.empty() && fingerprint.tensors.back().name >= tensor->name)
      refuse("the names are not in ascending order");
    fingerprint.tensors.push_back(std::move(*tensor));
    at = end + 1;
  }
}

std::string_view to_string(FingerprintDefect defect) noexcept {
  constexpr std::array<std::string_view, 5> names = {"missing", "extra", "dtype", "shape", "content"};
  return names[static_cast<std::size_t>(defect)];
}

std::string to_string(const FingerprintDifference& difference) {
  const std::string name = in_quotes(difference.name());
  const auto& [defect, expected, found] = difference;
  if (!found) return fmt::format("{}: missing (expected {})", name, to_string(expected->spec));
  if (!expected) return fmt::format("{}: not expected ({})", name, to_string(found->spec));
  if (defect != FingerprintDefect::content)
    return fmt::format("{}: {} differs (expected {}, found {})", name, to_string(defect), to_string(expected->spec),
                       to_string(found->spec));
  return fmt::format("{}: content differs (expected {}, found {})", name, checksum_text(expected->crc),
                     checksum_text(found->crc));
}

std::vector<FingerprintDifference> differences(const Fingerprint& expected, const Fingerprint& found) {
  std::vector<FingerprintDifference> all;
  auto a = expected.tensors.begin();
  auto b = found.tensors.begin();
  while (a != expected.tensors.end() || b != found.tensors.end()) {
    if (b == found.tensors.end() || (a != expected.tensors.end() && a->name < b->name)) {
      all.push_back({FingerprintDefect::missing, *a++, {}});
    } else if (a == expected.tensors.end() || b->name < a->name) {
      all.push_back({FingerprintDefect::extra, {}, *b++});
    } else {
      if (*a != *b) all.push_back({defect_of(*a, *b), *a, *b});
      ++a;
      ++b;
    }
  }
  return all;
}

Fingerprint fingerprint_of(const SourceOptions& request, const ProgressCallback& progress,
                           const std::stop_token& stop) {
  const TensorFilter filter{.select = request.select, .exclude = request.exclude};
  SourceOptions all = request;
  all.select.clear();
  all.exclude.clear();
  Source source = open_source(request.path, all);
  narrow(source, filter);
  refuse_lost(source.tensors->omissions(), "fingerprinting", request.path,
              "Convert the other items to another file, and use that file");
  const std::vector<TensorEntry>& entries = source.entries();
  std::uint64_t total = 0;
  for (const TensorEntry& entry : entries) total += entry.bytes;
  ProgressCounter counter(progress, total, stop);
  std::vector<std::atomic<std::uint64_t>> remainders(entries.size());
  for_each_piece(*source.tensors, false, counter,
                 [&](std::size_t tensor, std::uint64_t offset, std::span<const std::byte> bytes) {
                   const std::uint64_t behind = entries[tensor].bytes - offset - bytes.size();
                   remainders[tensor] ^= crc64_shifted(crc64_remainder(bytes), behind);
                 });
  Fingerprint fingerprint;
  for (std::size_t i = 0; i < entries.size(); ++i)
    fingerprint.tensors.push_back(
        {entries[i].name, {entries[i].dtype, entries[i].shape}, crc64_of_remainder(remainders[i], entries[i].bytes)});
  std::ranges::sort(fingerprint.tensors, {}, &TensorFingerprint::name);
  return fingerprint;
}

Fingerprint fingerprint_of(const std::string& path, const FingerprintOptions& options) {
  const SourceOptions request{.path = path,
                              .plan = options.plan,
                              .source_layout = options.source_layout,
                              .base_model = options.base_model,
                              .states = {options.rank, options.step, options.job_id},
                              .thirdparty = {options.key, options.file_pattern},
                              .select = options.select,
                              .exclude = options.exclude,
                              .dtype = options.dtype,
                              .cast_all = options.cast_all};
  return fingerprint_of(request, options.progress, options.stop);
}

}  // namespace muster
