// SPDX-License-Identifier: Apache-2.0
#include "src/versions/version_index.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "muster/config.hpp"
#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/formats/json_text.hpp"

namespace muster {

std::string_view to_string(VersionKind kind) noexcept {
  return kind == VersionKind::full ? "full" : "delta";
}

std::string_view to_string(DeltaEncoding encoding) noexcept {
  return encoding == DeltaEncoding::exclusive_or ? "xor" : "overwrite";
}

namespace versions {
namespace {

constexpr std::string_view name_prefix = "weight_v";
constexpr std::size_t least_digits = 6;
constexpr std::size_t most_digits = 12;
constexpr std::string_view compression = "zstd";
constexpr std::string_view own_key = "muster";
constexpr std::int64_t own_format = 1;

/// Errors about an index.
struct IndexWords {
  const std::string& path;
  std::uint64_t version;
  [[nodiscard]] Error error(ErrorKind kind, const std::string& words) const {
    return file_error(kind, fmt::format("reading the index of version {}", version), path, words);
  }
  [[noreturn]] void refuse(const std::string& words) const { throw error(ErrorKind::corrupt, words); }
};

const std::string& text_member(const Config& object, std::string_view key, const IndexWords& words) {
  const Config* const value = object.find(key);
  if (value == nullptr || !value->is_string())
    words.refuse(fmt::format("{} in the metadata is missing or not a string", in_quotes(key)));
  return value->as_string();
}

std::uint64_t version_member(const Config& object, std::string_view key, const IndexWords& words) {
  const std::string& text = text_member(object, key, words);
  const std::optional<std::uint64_t> version = parse_version_digits(text);
  if (!version)
    words.refuse(fmt::format("{} is {}, which is not the number of a version", in_quotes(key), in_quotes(text)));
  return *version;
}

Config own_tree(const OwnFacts& own) {
  Config files = Config::object({});
  for (const auto& [name, facts] : own.files)
    files[name] = Config::object({{"bytes", facts.bytes}, {"xxh3-128", digest_text(facts.digest)}});
  Config tree = Config::object({{"format", own_format},
                                {"stream", own.stream},
                                {"publisher", own.publisher},
                                {"ranks", own.ranks},
                                {"elements", own.elements},
                                {"changed_elements", own.changed_elements}});
  if (own.before) tree["state_before"] = digest_text(*own.before);
  tree["state_after"] = digest_text(own.after);
  tree["files"] = std::move(files);
  return tree;
}

Digest digest_member(const Config& tree, std::string_view key) {
  const std::optional<Digest> digest = parse_digest(tree.at(key).as_string());
  if (!digest) throw Error(ErrorKind::corrupt, fmt::format("{} is not an XXH3-128", in_quotes(key)));
  return *digest;
}

OwnFacts parse_own(std::string_view text) {
  const Config tree = parse_json(text);
  if (const std::int64_t format = tree.at("format").as_int(); format != own_format)
    throw Error(ErrorKind::version,
                fmt::format("format {} is not known, because a newer Muster wrote it. Update Muster", format));
  OwnFacts own;
  own.stream = tree.at("stream").as_string();
  own.publisher = tree.at("publisher").as_string();
  own.ranks = tree.at("ranks").as<int>();
  own.elements = tree.at("elements").as_uint();
  own.changed_elements = tree.at("changed_elements").as_uint();
  if (tree.contains("state_before")) own.before = digest_member(tree, "state_before");
  own.after = digest_member(tree, "state_after");
  for (const auto& [name, facts] : tree.at("files").as_object())
    own.files.emplace(name, FileFacts{facts.at("bytes").as_uint(), digest_member(facts, "xxh3-128")});
  return own;
}

void read_own(const Config& metadata, const IndexWords& words, VersionIndex& index) {
  const Config* const text = metadata.find(own_key);
  if (text == nullptr) return;
  if (!text->is_string()) words.refuse("\"muster\" in the metadata is not a string");
  try {
    index.own = parse_own(text->as_string());
  } catch (const Error& error) {
    const ErrorKind kind = error.kind() == ErrorKind::version ? ErrorKind::version : ErrorKind::corrupt;
    throw words.error(kind, fmt::format("\"muster\" in the metadata: {}", error.what()));
  }
  // The files that the publisher recorded are those of the weight_map.
  for (const auto& [tensor, file] : index.weights)
    if (!index.own->files.contains(file))
      words.refuse(fmt::format("tensor {} is in the file {}, which \"muster\" in the metadata does not list",
                               in_quotes(tensor), in_quotes(file)));
}

void read_delta(const Config& metadata, const IndexWords& words, VersionIndex& index) {
  const std::string& encoding = text_member(metadata, "delta_encoding", words);
  if (encoding == to_string(DeltaEncoding::exclusive_or))
    index.encoding = DeltaEncoding::exclusive_or;
  else if (encoding == to_string(DeltaEncoding::overwrite))
    index.encoding = DeltaEncoding::overwrite;
  else
    throw words.error(
        ErrorKind::corrupt,
        fmt::format("unknown \"delta_encoding\" {} (expected \"xor\" or \"overwrite\")", in_quotes(encoding)));
  index.kind = VersionKind::delta;
  const std::uint64_t version = version_member(metadata, "version", words);
  if (version != index.version)
    words.refuse(fmt::format("\"version\" is {}, and the directory is that of version {}", version, index.version));
  index.base_version = version_member(metadata, "base_version", words);
  if (index.base_version + 1 != index.version)
    words.refuse(fmt::format("\"base_version\" is {}, and a delta must change the version before it, {}",
                             index.base_version, index.version == 0 ? 0 : index.version - 1));
  if (const std::string& method = text_member(metadata, "compression_format", words); method != compression)
    throw words.error(
        ErrorKind::unsupported,
        fmt::format("unknown \"compression_format\" {} (expected \"zstd\"). Change the options of the publisher",
                    in_quotes(method)));
  const std::string& checksums = text_member(metadata, "checksum_format", words);
  const std::optional<ChecksumFormat> format = checksum_format(checksums);
  if (!format)
    words.refuse(fmt::format("unknown \"checksum_format\" {} (expected \"xxh3-128\", \"blake3\" or \"adler32\")",
                             in_quotes(checksums)));
  if (!is_supported(*format))
    throw words.error(ErrorKind::unsupported,
                      fmt::format("this build cannot compute the checksums {}. Use \"xxh3-128\" in the publisher",
                                  in_quotes(checksums)));
  index.checksums = *format;
}

}  // namespace

std::string version_digits(std::uint64_t version) {
  return fmt::format("{:06}", version);
}

std::optional<std::uint64_t> parse_version_digits(std::string_view text) noexcept {
  if (text.empty() || text.size() > most_digits) return std::nullopt;
  std::uint64_t version = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), version);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return version;
}

std::string version_name(std::uint64_t version) {
  return std::string(name_prefix) + version_digits(version);
}

std::optional<std::uint64_t> parse_version_name(std::string_view name) noexcept {
  if (!name.starts_with(name_prefix)) return std::nullopt;
  const std::string_view digits = name.substr(name_prefix.size());
  if (digits.size() < least_digits || (digits.size() > least_digits && digits.front() == '0')) return std::nullopt;
  return parse_version_digits(digits);
}

std::string version_index_text(const VersionIndex& index) {
  Config metadata = Config::object({});
  if (index.kind == VersionKind::full) metadata["total_size"] = index.total_size;
  metadata["version"] = version_digits(index.version);
  if (index.kind == VersionKind::delta) {
    metadata["base_version"] = version_digits(index.base_version);
    metadata["delta_encoding"] = to_string(index.encoding);
    metadata["compression_format"] = compression;
    metadata["checksum_format"] = to_string(index.checksums);
  }
  if (index.own) metadata[own_key] = to_json(own_tree(*index.own));
  Config weights = Config::object({});
  weights.as_object().reserve(index.weights.size());
  for (const auto& [tensor, file] : index.weights) weights.as_object().insert(tensor, Config(file));
  return to_json(Config::object({{"metadata", std::move(metadata)}, {"weight_map", std::move(weights)}}), 2) + "\n";
}

VersionIndex parse_version_index(std::string_view text, const std::string& path, std::uint64_t version) {
  const IndexWords words{path, version};
  Config tree;
  try {
    // Strict: with two equal names, other readers may use either.
    tree = parse_json(text);
  } catch (const Error& error) {
    words.refuse(fmt::format("it is not valid JSON: {}", error.what()));
  }
  const Config* const weights = tree.find("weight_map");
  if (weights == nullptr || !weights->is_object()) words.refuse("it has no object \"weight_map\"");
  VersionIndex index;
  index.version = version;
  for (const auto& [tensor, file] : weights->as_object()) {
    if (!file.is_string() || !is_name_beside(file.as_string()) || !is_weight_name(file.as_string()))
      words.refuse(fmt::format("tensor {}: its file {} is not the name of a safetensors file in this directory",
                               in_quotes(tensor),
                               file.is_string() ? in_quotes(file.as_string()) : "in \"weight_map\""));
    index.weights.emplace_back(tensor, file.as_string());
  }
  const Config* const metadata = tree.find("metadata");
  if (metadata == nullptr || metadata->is_null()) return index;
  if (!metadata->is_object()) words.refuse("\"metadata\" is not an object");
  if (metadata->contains("delta_encoding")) read_delta(*metadata, words, index);
  if (const Config* const size = metadata->find("total_size");
      size != nullptr && size->type() == Config::Type::integer && size->as_int() >= 0)
    index.total_size = size->as_uint();
  read_own(*metadata, words, index);
  return index;
}

}  // namespace versions
}  // namespace muster
