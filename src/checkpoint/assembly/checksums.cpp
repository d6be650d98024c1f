// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly/checksums.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/core/checksum.hpp"
#include "src/core/crc64.hpp"
#include "src/core/thread_pool.hpp"
#include "src/formats/safetensors.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace {

constexpr std::array algorithms = {ChecksumAlgorithm::xxh3_64, ChecksumAlgorithm::crc64_xz};
const std::string piece_algorithm(to_string(ChecksumAlgorithm::xxh3_64));
constexpr std::uint64_t longest_file = std::uint64_t{1} << 28;
constexpr std::size_t places = 16;

/// Parses sums of 16 lower-case hexadecimal digits each; returns an empty list if the text does not have exactly
/// `count` sums.
std::vector<std::uint64_t> parse_sums(std::string_view text, std::size_t count) {
  if (text.size() != count * places || text.find_first_not_of("0123456789abcdef") != std::string_view::npos) return {};
  std::vector<std::uint64_t> sums(count);
  for (std::size_t i = 0; i < count; ++i)
    std::from_chars(text.data() + i * places, text.data() + (i + 1) * places, sums[i], 16);
  return sums;
}

std::size_t pieces_of(std::uint64_t bytes) {
  return (bytes + checked_piece_bytes - 1) / checked_piece_bytes;
}

std::span<const std::byte> piece_of(std::span<const std::byte> tensor, std::size_t piece) {
  const std::size_t begin = piece * checked_piece_bytes;
  return tensor.subspan(begin, std::min<std::size_t>(checked_piece_bytes, tensor.size() - begin));
}

}  // namespace

std::string_view to_string(ChecksumAlgorithm algorithm) noexcept {
  return algorithm == ChecksumAlgorithm::xxh3_64 ? "xxh3-64" : "crc64-xz";
}

std::uint64_t checksum_of(const SafetensorsFile& file, std::size_t index, ChecksumAlgorithm algorithm,
                          const std::function<void(std::uint64_t)>& done) {
  constexpr std::uint64_t most = 1 << 20;
  const std::uint64_t bytes = file.tensors().at(index).bytes;
  std::vector<std::byte> memory(std::min(bytes, most));
  TensorChecksum xxh3;
  std::uint64_t crc = 0;
  for (std::uint64_t at = 0; at < bytes; at += most) {
    const std::span<std::byte> piece = std::span(memory).first(std::min(most, bytes - at));
    file.read(index, at, piece);
    if (algorithm == ChecksumAlgorithm::crc64_xz)
      crc = crc64_joined(crc, crc64(piece), piece.size());
    else
      xxh3.add(piece);
    done(piece.size());
  }
  return algorithm == ChecksumAlgorithm::crc64_xz ? crc : xxh3.value();
}

Checksums checksums_of(std::span<const SafetensorsFile> files, const std::function<void(std::uint64_t)>& done) {
  std::vector<std::pair<const SafetensorsFile*, std::size_t>> places;
  for (const SafetensorsFile& file : files)
    for (std::size_t i = 0; i < file.tensors().size(); ++i) places.emplace_back(&file, i);
  std::vector<std::uint64_t> sums(places.size());
  parallel_for(places.size(), copy_workers(), [&](std::size_t at, std::size_t) {
    sums[at] = checksum_of(*places[at].first, places[at].second, ChecksumAlgorithm::xxh3_64, done);
  });
  Checksums checksums;
  for (std::size_t at = 0; at < places.size(); ++at)
    checksums.tensors.emplace(places[at].first->tensors()[places[at].second].name, sums[at]);
  return checksums;
}

Checksums checksums_of(const std::string& directory, std::span<const OutputFile> files,
                       const std::function<void()>& between) {
  std::vector<SafetensorsFile> opened;
  os::allow_open_files(files.size());
  for (const OutputFile& file : files) opened.push_back(SafetensorsFile::open(join_path(directory, file.name)));
  return checksums_of(opened, [&](std::uint64_t) { between(); });
}

Checksums checksums_of(const Fingerprint& fingerprint) {
  Checksums checksums{{}, ChecksumAlgorithm::crc64_xz};
  for (const TensorFingerprint& tensor : fingerprint.tensors) checksums.tensors.emplace(tensor.name, tensor.crc);
  return checksums;
}

std::string checksums_text(const Checksums& checksums) {
  ConfigObject tensors;
  tensors.reserve(checksums.tensors.size());
  for (const auto& [name, checksum] : checksums.tensors) tensors.insert(name, Config(checksum_text(checksum)));
  return to_json(Config::object({{"muster_checksums", 1},
                                 {"algorithm", to_string(checksums.algorithm)},
                                 {"tensors", Config(std::move(tensors))}}),
                 2) +
         "\n";
}

Checksums parse_checksums(std::string_view text) {
  const auto refuse = [](const std::string& words) { throw Error(ErrorKind::corrupt, words); };
  const Config file = parse_json(text);
  if (!file.is_object()) refuse(fmt::format("it is {}, not a JSON object", to_string(file.type())));
  const Config* version = file.find("muster_checksums");
  if (version == nullptr) refuse("\"muster_checksums\" is missing");
  if (*version != Config(1))
    throw Error(ErrorKind::version, "unknown version: \"muster_checksums\" is not 1. Use a newer Muster");
  const Config* named = file.find("algorithm");
  if (named == nullptr || !named->is_string()) refuse("\"algorithm\" is missing");
  const auto* const algorithm = std::ranges::find(algorithms, std::string_view(named->as_string()),
                                                  [](ChecksumAlgorithm each) { return to_string(each); });
  if (algorithm == algorithms.end())
    throw Error(ErrorKind::unsupported,
                fmt::format("unknown algorithm {} (expected xxh3-64 or crc64-xz). Use a newer Muster",
                            in_quotes(named->as_string())));
  const Config* tensors = file.find("tensors");
  if (tensors == nullptr || !tensors->is_object()) refuse("the object \"tensors\" is missing");
  Checksums checksums{{}, *algorithm};
  for (const auto& [name, value] : tensors->as_object()) {
    const auto sums = parse_sums(value.is_string() ? std::string_view(value.as_string()) : "", 1);
    if (sums.empty())
      refuse(fmt::format("tensor {}: the checksum is not {} hexadecimal digits", in_quotes(name), places));
    checksums.tensors.emplace(name, sums.front());
  }
  return checksums;
}

std::optional<Checksums> read_checksums(const std::string& directory) {
  const std::string path = join_path(directory, std::string(checksums_file_name));
  std::error_code error;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, error))) return std::nullopt;
  const std::string text = read_text(path, longest_file);
  return with_file("reading the checksums", path, [&] { return std::optional(parse_checksums(text)); });
}

void write_checksums(const std::string& directory, const Checksums& checksums) {
  write_file(join_path(directory, std::string(checksums_file_name)), checksums_text(checksums));
}

PieceChecksums no_piece_checksums(std::span<const MergedTensor> tensors) {
  PieceChecksums sums;
  for (const MergedTensor& tensor : tensors)
    sums[tensor.name].resize(pieces_of(byte_size(tensor.layout.target.dtype, tensor.layout.target.shape)));
  return sums;
}

std::string piece_checksums_text(const PieceChecksums& sums) {
  ConfigObject tensors;
  for (const auto& [name, pieces] : sums) {
    std::string text;
    for (const std::uint64_t sum : pieces) text += checksum_text(sum);
    tensors.insert(name, Config(std::move(text)));
  }
  return to_json(Config::object({{"version", 1},
                                 {"algorithm", piece_algorithm},
                                 {"piece", static_cast<std::int64_t>(checked_piece_bytes)},
                                 {"tensors", Config(std::move(tensors))}}));
}

PieceChecksums piece_checksums_of(const SafetensorsFile& file) {
  const auto text = file.metadata().find(std::string(piece_checksums_key));
  if (text == file.metadata().end()) return {};
  PieceChecksums sums;
  try {
    const Config json = parse_json(text->second);
    if (json.at("version") != Config(1) || json.at("algorithm") != Config(piece_algorithm) ||
        json.at("piece") != Config(checked_piece_bytes))
      return {};
    for (const auto& [name, pieces] : json.at("tensors").as_object()) {
      const auto index = file.find(name);
      if (!index) continue;
      const std::size_t count = pieces_of(file.tensors()[*index].bytes);
      sums[name] = parse_sums(pieces.as_string(), count);
      if (sums[name].size() != count)
        throw Error(ErrorKind::corrupt, fmt::format("the checksums of the tensor {} are missing", in_quotes(name)));
    }
  } catch (const Error& error) {
    throw file_error(ErrorKind::corrupt, "reading the shard", file.path(),
                     fmt::format("malformed metadata {}: {}", in_quotes(piece_checksums_key), error.what()));
  }
  return sums;
}

void add_piece_checksums(FilePlan& file, const std::string& path, const std::function<void()>& between) {
  const auto text = file.metadata.find(std::string(piece_checksums_key));
  if (text == file.metadata.end()) return;
  const auto mapping = os::MappedFile::open(path);
  struct ChecksumSlot {
    std::span<const std::byte> bytes;
    std::uint64_t* sum = nullptr;
  };
  PieceChecksums sums;
  std::vector<ChecksumSlot> places;
  for (const TensorEntry& entry : file.tensors) {
    const auto tensor = mapping->bytes().subspan(entry.offset, entry.bytes);
    std::vector<std::uint64_t>& pieces = sums[entry.name];
    pieces.resize(pieces_of(entry.bytes));
    for (std::size_t piece = 0; piece < pieces.size(); ++piece)
      places.push_back({piece_of(tensor, piece), &pieces[piece]});
  }
  parallel_for(places.size(), copy_workers(), [&](std::size_t at, std::size_t) {
    *places[at].sum = mapped_checksum(places[at].bytes, path, [&](std::uint64_t) { between(); });
  });
  text->second = piece_checksums_text(sums);
  file.header = make_safetensors_header(file.tensors, file.metadata, file.name);
}

CheckedTensor::CheckedTensor(SafetensorsFile file, std::size_t index, std::vector<std::uint64_t> sums)
    : file_(std::move(file)), index_(index), sums_(std::move(sums)), seen_(sums_.size()) {}

void CheckedTensor::read(std::uint64_t offset, std::span<std::byte> target) const {
  file_.read(index_, offset, target);
  if (target.empty()) return;
  const std::uint64_t end = offset + target.size();
  const std::uint64_t size = file_.tensors()[index_].bytes;
  std::vector<std::byte> memory;
  for (std::size_t piece = offset / checked_piece_bytes; piece < pieces_of(end); ++piece) {
    if (seen_[piece]) continue;
    const std::uint64_t at = piece * checked_piece_bytes;
    const std::uint64_t bytes = std::min(checked_piece_bytes, size - at);
    if (at >= offset && at + bytes <= end) {
      check(piece, target.subspan(at - offset, bytes));
    } else {
      memory.resize(bytes);
      file_.read(index_, at, memory);
      check(piece, memory);
    }
    // Set only after the check, because other threads skip the check of a piece that is set.
    seen_[piece] = true;
  }
}

void CheckedTensor::check(std::size_t piece, std::span<const std::byte> bytes) const {
  const std::uint64_t sum = tensor_checksum(bytes);
  if (sum == sums_[piece]) return;
  const std::uint64_t at = piece * checked_piece_bytes;
  throw file_error(ErrorKind::corrupt, "reading the shard", file_.path(),
                   fmt::format("tensor {2}: checksum mismatch: data is corrupted: bytes {0} to {1} have the checksum "
                               "{3}, not {4}. Copy the file again, or shard the model again",
                               at, at + bytes.size() - 1, in_quotes(file_.tensors()[index_].name), checksum_text(sum),
                               checksum_text(sums_[piece])));
}

std::shared_ptr<const CheckedTensor> checked_tensor(const SafetensorsFile& file, std::size_t index,
                                                    const PieceChecksums& sums) {
  const auto found = sums.find(file.tensors()[index].name);
  if (found == sums.end()) return nullptr;
  return std::make_shared<const CheckedTensor>(file, index, found->second);
}

}  // namespace muster
