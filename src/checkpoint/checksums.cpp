// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/checksums.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/core/checksum.hpp"
#include "src/core/quoted.hpp"
#include "src/os/file.hpp"

namespace muster {
namespace {

constexpr std::string_view algorithm = "xxh3-64";
constexpr std::uint64_t longest_file = std::uint64_t{1} << 28;
constexpr std::size_t digits = 16;

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::corrupt, words);
}

std::optional<std::uint64_t> parse_digits(const Config& value) {
  if (!value.is_string() || value.as_string().size() != digits) return std::nullopt;
  const std::string& text = value.as_string();
  std::uint64_t number = 0;
  const char* end = text.data() + text.size();
  const bool is_plain = std::none_of(text.begin(), text.end(), [](char c) { return c >= 'A' && c <= 'F'; });
  if (!is_plain || std::from_chars(text.data(), end, number, 16).ptr != end) return std::nullopt;
  return number;
}

}  // namespace

std::uint64_t checksum_of(const SafetensorsFile& file, std::size_t index,
                          const std::function<void(std::uint64_t)>& done) {
  constexpr std::uint64_t most = 1 << 20;
  const std::uint64_t bytes = file.tensors().at(index).bytes;
  std::vector<std::byte> memory(std::min(bytes, most));
  TensorChecksum checksum;
  for (std::uint64_t at = 0; at < bytes; at += most) {
    const std::span<std::byte> piece = std::span(memory).first(std::min(most, bytes - at));
    file.read(index, at, piece);
    checksum.add(piece);
    done(piece.size());
  }
  return checksum.value();
}

std::string checksums_text(const Checksums& checksums) {
  ConfigObject tensors;
  tensors.reserve(checksums.size());
  for (const auto& [name, checksum] : checksums) tensors.insert(name, Config(checksum_text(checksum)));
  return to_json(
             Config::object(
                 {{"muster_checksums", 1}, {"algorithm", Config(algorithm)}, {"tensors", Config(std::move(tensors))}}),
             2) +
         "\n";
}

Checksums parse_checksums(std::string_view text) {
  const Config file = parse_json(text);
  if (!file.is_object()) refuse(fmt::format("checksums are a JSON object, this is {}", to_string(file.type())));
  const ConfigObject& members = file.as_object();
  const Config* version = members.find("muster_checksums");
  if (version == nullptr) refuse("it has no \"muster_checksums\": 1");
  if (version->type() != Config::Type::integer || version->as_int() != 1)
    throw Error(ErrorKind::version, "\"muster_checksums\" is not 1, the only version that this program knows");
  const Config* named = members.find("algorithm");
  if (named == nullptr || !named->is_string()) refuse("it has no \"algorithm\"");
  if (named->as_string() != algorithm)
    throw Error(ErrorKind::unsupported, fmt::format("its algorithm {} is not {}, the only one that this program knows",
                                                    in_quotes(named->as_string()), algorithm));
  const Config* tensors = members.find("tensors");
  if (tensors == nullptr || !tensors->is_object()) refuse("it has no object \"tensors\"");
  Checksums checksums;
  for (const auto& [name, value] : tensors->as_object()) {
    const std::optional<std::uint64_t> checksum = parse_digits(value);
    if (!checksum)
      refuse(fmt::format("the checksum of the tensor {} is not {} hexadecimal digits", in_quotes(name), digits));
    checksums.emplace(name, *checksum);
  }
  return checksums;
}

std::optional<Checksums> read_checksums(const std::string& directory) {
  const std::string path = join_path(directory, std::string(checksums_file_name));
  std::error_code error;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, error))) return std::nullopt;
  const auto file = os::MappedFile::open(path);
  const std::span<const std::byte> bytes = file->bytes();
  const std::string context = fmt::format("reading the checksums {}", in_quotes(path));
  if (bytes.size() > longest_file)
    throw Error(ErrorKind::corrupt, fmt::format("{}: {} bytes are too many for checksums", context, bytes.size()),
                {.path = path});
  try {
    return parse_checksums({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  } catch (const Error& cause) {
    throw Error(cause.kind(), fmt::format("{}: {}", context, cause.what()), {.path = path});
  }
}

void write_checksums(const std::string& directory, const Checksums& checksums) {
  write_file(join_path(directory, std::string(checksums_file_name)), checksums_text(checksums));
}

}  // namespace muster
