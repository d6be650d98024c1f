// SPDX-License-Identifier: Apache-2.0
#include "src/versions/chain.hpp"

#include <fmt/core.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/formats/safetensors.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"
#include "src/versions/delta_codec.hpp"

namespace muster::versions {
namespace {

// The longest header of a zstd frame.
constexpr std::size_t frame_head_bytes = 18;
constexpr std::uint64_t overwrite_head = 4;
constexpr std::uint64_t overwrite_item = 5;
// For the decoders of all threads of a pull; the rest of its memory is for pieces and headers.
constexpr std::uint64_t decoders_budget = std::uint64_t{128} << 20;

std::string doing_of(std::uint64_t version) {
  return fmt::format("reading version {}", version);
}

[[noreturn]] void refuse(std::uint64_t version, const std::string& path, const std::string& words) {
  throw file_error(ErrorKind::corrupt, doing_of(version), path, words);
}

std::string digest_of_text(std::string_view text) {
  Digesting digesting;
  digesting.add(std::as_bytes(std::span(text)));
  return digest_text(digesting.value());
}

/// The files of a version as its directory lists them.
struct VersionFiles {
  std::vector<std::string> names;
  [[nodiscard]] bool has(std::string_view name) const { return std::ranges::find(names, name) != names.end(); }
  [[nodiscard]] bool has_index() const { return has(model_index_name); }
  /// Whether its only weights are model.safetensors, which no delta can be.
  [[nodiscard]] bool is_single_file() const {
    return has(model_file_name) && std::ranges::count_if(names, is_weight_name) == 1;
  }
};

VersionFiles files_of(const std::string& path) {
  return {files_in(path)};
}

/// Returns OpenVersion::index_digest. The index of Muster has the digests of the files. The indexes of other programs
/// may be equal in two runs, so their files identify the version: sizes, times, and headers, which have the checksums.
std::string index_digest_of(const std::string& path, const VersionFiles& files, const std::string& text, bool is_own) {
  std::string all = text;
  for (const std::string& name : files.names) {
    if (is_own || !is_weight_name(name)) continue;
    const std::string file = join_path(path, name);
    const auto status = os::file_status(file, os::Links::followed);
    if (!status) continue;
    all += fmt::format("{} {} {}\n", in_quotes(name), status->bytes, status->changed.time_since_epoch().count());
    const os::ReadableFile opened = os::ReadableFile::open(file);
    std::uint64_t length = 0;
    if (opened.bytes() < sizeof length) continue;
    opened.read_at(0, std::as_writable_bytes(std::span(&length, 1)));
    std::string head(std::min({length, max_safetensors_header, opened.bytes() - sizeof length}), '\0');
    opened.read_at(sizeof length, std::as_writable_bytes(std::span(head)));
    all += head;
  }
  return digest_of_text(all);
}

std::string index_digest_of(const std::string& path, std::uint64_t version) {
  const VersionFiles files = files_of(path);
  if (!files.has_index()) return index_digest_of(path, files, {}, false);
  const std::string name = join_path(path, std::string(model_index_name));
  const std::string text = read_text(name, longest_index);
  return index_digest_of(path, files, text, parse_version_index(text, name, version).own.has_value());
}

class Opening {
 public:
  Opening(const std::string& source, std::uint64_t version)
      : files_(files_of(join_path(source, version_name(version)))),
        version_{join_path(source, version_name(version)), {}} {
    if (files_.has_index()) {
      read_index(version);
    } else {
      if (!files_.is_single_file())
        throw file_error(ErrorKind::not_found, doing_of(version), version_.path,
                         fmt::format("it has no {}, so its publisher has not completed it", model_index_name));
      version_.index.version = version;
      version_.index_digest = index_digest_of(version_.path, files_, {}, false);
    }
  }

  OpenVersion run() {
    std::set<std::string> names;
    for (const auto& [tensor, file] : version_.index.weights) names.insert(file);
    if (!files_.has_index()) names.insert(std::string(model_file_name));
    os::allow_more_open_files(names.size());
    for (const std::string& name : names) open_file(name);
    if (version_.index.own)
      for (const auto& [name, facts] : version_.index.own->files)
        if (!names.contains(name))
          refuse(number(), version_.path,
                 fmt::format("no tensor of the index is in the file {}, which its publisher "
                             "recorded",
                             in_quotes(name)));
    for (const auto& [tensor, file] : version_.index.weights)
      if (!version_.tensors.contains(tensor))
        refuse(number(), join_path(version_.path, file),
               fmt::format("tensor {}: the index names this file, which does not have it", in_quotes(tensor)));
    if (version_.index.kind == VersionKind::full && version_.tensors.empty())
      refuse(number(), version_.path, "it is a full version without tensors");
    return std::move(version_);
  }

 private:
  [[nodiscard]] std::uint64_t number() const { return version_.index.version; }

  void read_index(std::uint64_t version) {
    const std::string path = join_path(version_.path, std::string(model_index_name));
    const std::string text = read_text(path, longest_index);
    version_.index = parse_version_index(text, path, version);
    version_.index_digest = index_digest_of(version_.path, files_, text, version_.index.own.has_value());
    for (const auto& [tensor, file] : version_.index.weights) file_of_.emplace(tensor, file);
  }

  void open_file(const std::string& name) {
    const std::string path = join_path(version_.path, name);
    if (!files_.has(name))
      throw file_error(ErrorKind::not_found, doing_of(number()), path,
                       "the index names this file, which does not exist");
    SafetensorsFile file = with_file(doing_of(number()), path, [&] { return SafetensorsFile::open(path); });
    check_size(name, path);
    const bool is_delta = version_.index.kind == VersionKind::delta;
    for (std::size_t i = 0; i < file.tensors().size(); ++i) {
      const TensorEntry& entry = file.tensors()[i];
      if (files_.has_index()) {
        const auto named = file_of_.find(entry.name);
        if (named == file_of_.end())
          refuse(number(), path, fmt::format("tensor {}: the index does not name it", in_quotes(entry.name)));
        if (named->second != name)
          refuse(number(), path,
                 fmt::format("tensor {}: the index names {} as its file", in_quotes(entry.name),
                             in_quotes(named->second)));
      }
      TensorPlace place{version_.files.size(), i, {}};
      if (is_delta) place.checksum = checksum_in(file, entry);
      version_.tensors.emplace(entry.name, std::move(place));
    }
    version_.files.push_back(std::move(file));
  }

  void check_size(const std::string& name, const std::string& path) const {
    if (!version_.index.own) return;
    const std::uint64_t recorded = version_.index.own->files.at(name).bytes;
    const auto status = os::file_status(path, os::Links::followed);
    const std::uint64_t bytes = status ? status->bytes : 0;
    if (bytes != recorded)
      refuse(number(), path, fmt::format("it has {} bytes, and its publisher wrote {}", bytes, recorded));
  }

  [[nodiscard]] std::string checksum_in(const SafetensorsFile& file, const TensorEntry& entry) const {
    if (entry.dtype != DType::u8 || entry.shape.size() != 1)
      refuse(number(), file.path(),
             fmt::format("tensor {}: the changes are {}, expected U8 with one extent", in_quotes(entry.name),
                         to_string(TensorSpec{entry.dtype, entry.shape})));
    const auto found = file.metadata().find(entry.name);
    if (found == file.metadata().end())
      refuse(number(), file.path(), fmt::format("tensor {}: its checksum is missing", in_quotes(entry.name)));
    if (!is_checksum(version_.index.checksums, found->second))
      refuse(number(), file.path(),
             fmt::format("tensor {}: its checksum {} is not an {}", in_quotes(entry.name), in_quotes(found->second),
                         to_string(version_.index.checksums)));
    return found->second;
  }

  VersionFiles files_;
  OpenVersion version_;
  std::unordered_map<std::string, std::string> file_of_;  // by the index
};

/// Finds the versions of a chain, with retries until the deadline.
class ChainSearch {
 public:
  ChainSearch(const std::string& source, const ChainRequest& request)
      : source_(source), request_(request), deadline_(os::Clock::now() + request.wait) {}

  /// Waits until the target exists.
  void wait() { (void)find_target(); }

  Chain run() {
    Chain chain;
    chain.target = find_target();
    for (std::uint64_t version = chain.target;; --version) {
      if (is_local(version, chain)) {
        chain.beginning = Chain::Beginning::local;
        chain.begin_version = version;
        break;
      }
      if (version == 0) {
        if (!request_.has_base)
          throw file_error(ErrorKind::invalid_argument, "reading versions", source_,
                           fmt::format("the chain to version {} begins at the base, because no full version is in "
                                       "between. Pass the base (--base)",
                                       chain.target));
        break;
      }
      OpenVersion opened = open(version, chain);
      if (opened.index.kind == VersionKind::full) {
        chain.beginning = Chain::Beginning::full;
        chain.begin_version = version;
        check_link(opened, chain);
        chain.full = std::move(opened);
        break;
      }
      check_link(opened, chain);
      chain.deltas.push_back(std::move(opened));
    }
    std::ranges::reverse(chain.deltas);
    return chain;
  }

 private:
  [[nodiscard]] bool is_listed(std::uint64_t version) const {
    return std::ranges::binary_search(names_.versions, version);
  }

  // The first publisher makes the directory. The parent is listed, because a wait must not rely on failed lookups.
  void wait_for_source() const {
    const std::string path = source_.substr(0, source_.find_last_not_of('/') + 1);
    const std::string parent = os::directory_of(path);
    const std::string name = path.substr(path.rfind('/') + 1);
    if (name.empty() || os::Clock::now() >= deadline_ || os::file_status(path, os::Links::followed)) return;
    const bool is_network = os::file_system_of(parent).is_network;
    workspace::Pauses pauses(is_network);
    const auto is_listed = [&] {
      const std::vector<os::DirectoryEntry> entries = workspace::fresh_listing(parent, is_network);
      return std::ranges::any_of(entries, [&](const os::DirectoryEntry& entry) { return entry.name == name; });
    };
    while (!is_listed() && os::Clock::now() < deadline_) {
      if (request_.check) request_.check();
      pauses.sleep(os::Clock::next_sleep(deadline_));
    }
  }

  // Waits until the target exists, and returns its number.
  std::uint64_t find_target() {
    if (request_.target == 0) return 0;
    wait_for_source();
    if (!os::file_status(source_, os::Links::followed))
      throw file_error(ErrorKind::not_found, "reading versions", source_,
                       "the directory does not exist. Check the path, or wait for the first version (--wait)");
    const bool is_network = os::file_system_of(source_).is_network;
    workspace::Pauses pauses(is_network);
    for (;;) {
      if (is_network) workspace::refresh(source_);
      names_ = list_versions(source_);
      if (const auto found = target_in_listing()) return *found;
      if (os::Clock::now() >= deadline_) break;
      if (request_.check) request_.check();
      pauses.sleep(os::Clock::next_sleep(deadline_));
    }
    // A copy of a version is not replaced by the base: its trainer may be restarting.
    if (!request_.target && request_.has_base && request_.wait.count() == 0 &&
        (!request_.local || request_.local->version == 0))
      return 0;
    const std::string words =
        request_.target
            ? fmt::format("version {} does not exist, or its publisher has not completed it", *request_.target)
            : std::string("it has no version");
    const auto newest = newest_complete();
    throw file_error(ErrorKind::not_found, "reading versions", source_,
                     fmt::format("{}{}. Wait for it (--wait), or pass another version", words,
                                 newest ? fmt::format("; the newest is version {}", *newest) : std::string()));
  }

  [[nodiscard]] std::optional<std::uint64_t> target_in_listing() const {
    if (!request_.target) return newest_complete();
    if (is_listed(*request_.target) && is_complete(*request_.target)) return request_.target;
    return std::nullopt;
  }

  [[nodiscard]] std::optional<std::uint64_t> newest_complete() const {
    for (auto version = names_.versions.rbegin(); version != names_.versions.rend(); ++version)
      if (is_complete(*version)) return *version;
    return std::nullopt;
  }

  [[nodiscard]] bool is_complete(std::uint64_t version) const {
    try {
      return versions::is_complete(source_, version);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::not_found) return false;  // it was deleted a moment ago
      throw;
    }
  }

  // Whether the chain, from the version after this one on, may begin at the local copy.
  [[nodiscard]] bool is_local(std::uint64_t version, const Chain& chain) const {
    if (!request_.local || request_.local->version != version) return false;
    if (!chain.deltas.empty() && chain.deltas.back().index.own && chain.deltas.back().index.own->before)
      return *chain.deltas.back().index.own->before == request_.local->state;
    if (version == 0) return !request_.base_digest.empty() && request_.base_digest == request_.local->index_digest;
    if (request_.local->index_digest.empty() || !is_listed(version)) return false;
    try {
      return index_digest_of(join_path(source_, version_name(version)), version) == request_.local->index_digest;
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::not_found || error.kind() == ErrorKind::corrupt) return false;
      throw;
    }
  }

  OpenVersion open(std::uint64_t version, const Chain& chain) const {
    if (!is_listed(version))
      throw file_error(
          ErrorKind::not_found, "reading versions", source_,
          fmt::format("version {} is missing, and version {} changes it. Publish a full version, or pull a "
                      "version that has a complete chain (muster log lists them)",
                      version, chain.deltas.empty() ? version : chain.deltas.back().number()));
    std::optional<OpenVersion> opened;
    workspace::patiently(join_path(source_, version_name(version)), {.deadline = deadline_, .check = request_.check},
                         [&] { opened.emplace(open_version(source_, version)); });
    return std::move(*opened);
  }

  // The version after `before` must continue it, if Muster published both.
  static void check_link(const OpenVersion& before, const Chain& chain) {
    if (chain.deltas.empty()) return;
    const OpenVersion& after = chain.deltas.back();
    if (!before.index.own || !after.index.own || !after.index.own->before) return;
    if (before.index.own->stream != after.index.own->stream || before.index.own->after != *after.index.own->before)
      refuse(after.number(), after.path,
             fmt::format("it does not continue version {}, because another run published it. Publish a full version",
                         before.number()));
  }

  const std::string& source_;
  const ChainRequest& request_;
  os::Clock::time_point deadline_;
  VersionNames names_;
};

/// Returns the size of the window that a frame states in its header, which has at least 6 bytes (RFC 8878, 3.1.1.1).
std::uint64_t window_of(std::span<const std::byte> head, std::uint64_t content) {
  constexpr std::byte is_single_segment{0x20};
  if ((head[4] & is_single_segment) != std::byte{0}) return content;
  const auto window = std::to_integer<std::uint64_t>(head[5]);
  const std::uint64_t base = std::uint64_t{1024} << (window >> 3U);
  return base + base / 8 * (window & 7U);
}

/// Returns the memory that decoding needs.
std::uint64_t check_frame(const OpenVersion& delta, const TensorEntry& target, const TensorPlace& place) {
  const SafetensorsFile& file = delta.files[place.file];
  const TensorEntry& frame = file.tensors()[place.index];
  std::array<std::byte, frame_head_bytes> head{};
  const std::span<std::byte> bytes = std::span(head).first(std::min<std::uint64_t>(frame.bytes, head.size()));
  file.read(place.index, 0, bytes);
  const auto size = ZSTD_getFrameContentSize(bytes.data(), bytes.size());
  const auto wrong = [&](const std::string& words) {
    refuse(delta.number(), file.path(), fmt::format("tensor {}: {}", in_quotes(target.name), words));
  };
  if (size == ZSTD_CONTENTSIZE_ERROR) wrong("its changes are not a zstd frame");
  const bool is_overwrite = delta.index.encoding == DeltaEncoding::overwrite;
  if (is_overwrite && target.bytes >= most_overwritten_bytes)
    wrong(fmt::format("it has {} bytes, and the encoding \"overwrite\" can address less than {}", target.bytes,
                      most_overwritten_bytes));
  const std::uint64_t window = window_of(head, size);
  if (window > std::uint64_t{1} << largest_window_log)
    wrong(fmt::format("its zstd frame needs a window of {} bytes, and at most {} are accepted", window,
                      std::uint64_t{1} << largest_window_log));
  const std::uint64_t memory = (window + decoder_bytes) * (is_overwrite ? 2 : 1);
  if (size == ZSTD_CONTENTSIZE_UNKNOWN) return memory;
  const bool fits = is_overwrite ? size >= overwrite_head && (size - overwrite_head) % overwrite_item == 0 &&
                                       (size - overwrite_head) / overwrite_item <= target.bytes
                                 : size == target.bytes;
  if (!fits) wrong(fmt::format("its changes have {} bytes, which does not fit its {} bytes", size, target.bytes));
  return memory;
}

}  // namespace

const TensorPlace* OpenVersion::find(const std::string& name) const noexcept {
  const auto found = tensors.find(name);
  return found == tensors.end() ? nullptr : &found->second;
}

VersionNames list_versions(const std::string& source) {
  VersionNames names;
  for (const os::DirectoryEntry& entry : os::list_directory(source)) {
    const std::optional<std::uint64_t> version = parse_version_name(entry.name);
    if (version && *version != 0 && entry.is_directory)
      names.versions.push_back(*version);
    else if (entry.name.starts_with(version_name(0).substr(0, version_name(0).size() - version_digits(0).size())) &&
             os::is_partial_name(entry.name))
      names.unfinished.push_back(entry.name);
    else
      names.others.push_back(entry.name);
  }
  std::ranges::sort(names.versions);
  std::ranges::sort(names.unfinished);
  std::ranges::sort(names.others);
  return names;
}

OpenVersion open_version(const std::string& source, std::uint64_t version) {
  return Opening(source, version).run();
}

std::uint64_t check_deltas(std::span<const OpenVersion> deltas, const std::vector<TensorEntry>& tensors) {
  std::uint64_t memory = decoder_bytes;
  std::unordered_map<std::string_view, const TensorEntry*> targets;
  targets.reserve(tensors.size());
  for (const TensorEntry& entry : tensors) targets.emplace(entry.name, &entry);
  for (const OpenVersion& delta : deltas)
    for (const auto& [name, place] : delta.tensors) {
      const auto target = targets.find(name);
      if (target == targets.end())
        refuse(delta.number(), delta.files[place.file].path(),
               fmt::format("tensor {}: the version before it does not have this tensor. Is the base the right model?",
                           in_quotes(name)));
      memory = std::max(memory, check_frame(delta, *target->second, place));
    }
  return memory;
}

void wait_for_target(const std::string& source, const ChainRequest& request) {
  ChainSearch(source, request).wait();
}

bool is_complete(const std::string& source, std::uint64_t version) {
  const VersionFiles files = files_of(join_path(source, version_name(version)));
  return files.has_index() || files.is_single_file();
}

Chain open_chain(const std::string& source, const ChainRequest& request) {
  return ChainSearch(source, request).run();
}

struct FoldedReader::State {
  State(const TensorSource& from, std::size_t tensor, ChecksumFormat format)
      : begin(from), index(tensor), sum(format) {}

  struct Change {
    const OpenVersion* version;
    const TensorPlace* place;
    DeltaDecoder decoder;
  };

  /// Runs work on a delta, and adds version, file and tensor to its errors.
  template <class Work>
  void with_change(const Change& change, const Work& work) const {
    try {
      work();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::corrupt || !error.path().empty()) throw;
      refuse(change.version->number(), change.version->files[change.place->file].path(),
             fmt::format("tensor {}: {}", in_quotes(begin.tensors()[index].name), error.what()));
    }
  }

  const TensorSource& begin;
  std::size_t index;
  TensorSum sum;
  std::vector<Change> changes = {};
  std::uint64_t at = 0;
  std::uint64_t delta_bytes = 0;
  bool is_summed = true;
};

FoldedReader::FoldedReader(const TensorSource& begin, std::size_t index, std::span<const OpenVersion> deltas,
                           bool is_summed) {
  const TensorEntry& entry = begin.tensors()[index];
  ChecksumFormat format = ChecksumFormat::xxh3_128;
  for (const OpenVersion& delta : deltas)
    if (delta.find(entry.name) != nullptr) format = delta.index.checksums;
  state_ = std::make_unique<State>(begin, index, format);
  for (const OpenVersion& delta : deltas) {
    const TensorPlace* const place = delta.find(entry.name);
    if (place == nullptr) continue;
    const SafetensorsFile& file = delta.files[place->file];
    const std::uint64_t bytes = file.tensors()[place->index].bytes;
    const auto read = [&file, tensor = place->index](std::uint64_t offset, std::span<std::byte> target) {
      file.read(tensor, offset, target);
    };
    try {
      state_->changes.push_back({&delta, place, DeltaDecoder(delta.index.encoding, read, bytes, entry.bytes)});
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::corrupt || !error.path().empty()) throw;
      refuse(delta.number(), file.path(), fmt::format("tensor {}: {}", in_quotes(entry.name), error.what()));
    }
    state_->delta_bytes += bytes;
  }
  state_->is_summed = is_summed || is_changed();
}

FoldedReader::~FoldedReader() = default;

bool FoldedReader::is_changed() const noexcept {
  return !state_->changes.empty();
}

void FoldedReader::next(std::span<std::byte> piece) {
  State& state = *state_;
  state.begin.read(state.index, state.at, piece);
  for (State::Change& change : state.changes) state.with_change(change, [&] { change.decoder.apply(piece); });
  if (state.is_summed) state.sum.add(piece);
  state.at += piece.size();
}

void FoldedReader::end() {
  State& state = *state_;
  for (State::Change& change : state.changes) state.with_change(change, [&] { change.decoder.end(); });
  if (state.changes.empty()) return;
  const State::Change& last = state.changes.back();
  if (const std::string found = state.sum.checksum(); found != last.place->checksum)
    refuse(last.version->number(), last.version->files[last.place->file].path(),
           fmt::format("tensor {}: after the changes its {} is {}, and the version states {}. The delta is damaged, or "
                       "the base is another model",
                       in_quotes(state.begin.tensors()[state.index].name), to_string(last.version->index.checksums),
                       found, last.place->checksum));
}

Digest FoldedReader::digest() const {
  return state_->sum.digest();
}

std::uint64_t FoldedReader::delta_bytes() const noexcept {
  return state_->delta_bytes;
}

std::size_t deltas_at_once(std::size_t threads, std::uint64_t memory) noexcept {
  return std::max<std::uint64_t>(1, decoders_budget / memory / std::max<std::size_t>(threads, 1));
}

}  // namespace muster::versions
