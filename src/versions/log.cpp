// SPDX-License-Identifier: Apache-2.0
// The list of the versions in a SOURCE directory, and its verification.
//
//  1. Each version is opened alone. A version that cannot be opened is an entry with a problem.
//  2. The chain is followed from the oldest version to the newest one: numbers, streams, digests, names and sizes.
//  3. If requested, the bytes of all files are compared with the index.
//  4. Then the tensors of each beginning (the base, or a full version) are read, and the deltas up to the next full
//     version are applied to them. The checksum of each delta is compared, and the digest of each version.
//  5. Clean-up may delete versions meanwhile. A version that has lost its name is removed from the list.

#include <fmt/core.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "muster/publish.hpp"
#include "src/base/escaped.hpp"
#include "src/base/message.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/core/thread_pool.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/versions/chain.hpp"
#include "src/versions/delta_codec.hpp"
#include "src/versions/local_copy.hpp"

namespace muster {

bool VersionLog::is_sound() const noexcept {
  return problems.empty() &&
         std::ranges::all_of(versions, [](const VersionInfo& info) { return info.problems.empty(); });
}

namespace versions {
namespace {

std::string file_name_of(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

/// A defect of a version is a finding, a stop request is not.
bool is_finding(const Error& error) noexcept {
  return error.kind() != ErrorKind::cancelled;
}

/// A version while the log is made.
struct LoggedVersion {
  VersionInfo info;
  std::optional<OpenVersion> open = {};
};

/// Reads the versions of one directory.
class LogReading {
 public:
  LogReading(const std::string& source, const LogOptions& options) : source_(source), options_(options) {}

  VersionLog operator()() {
    log_.source = source_;
    const VersionNames names = list_versions(source_);
    log_.unfinished = names.unfinished;
    log_.other_names = names.others;
    if (!options_.base.empty()) base_ = ModelDir::open(options_.base);
    for (const std::uint64_t number : names.versions) add(number);
    follow();
    if (options_.verify) verify();
    remove_deleted();
    if (!options_.local.empty()) {
      const LocalCopy copy = read_local_copy(options_.local);
      log_.local = {options_.local, copy.version, copy.record.has_value(), copy.reason};
    }
    for (LoggedVersion& version : versions_) log_.versions.push_back(std::move(version.info));
    return std::move(log_);
  }

 private:
  void add(std::uint64_t number) {
    if (options_.stop.stop_requested())
      throw Error(ErrorKind::cancelled, "reading the versions: cancelled by a stop request");
    LoggedVersion version{.info = {.version = number, .path = source_ + "/" + version_name(number)}};
    VersionInfo& info = version.info;
    try {
      if (const auto status = os::file_status(info.path)) info.published = status->changed;
      version.open = open_version(source_, number);
      describe(*version.open, info);
    } catch (const Error& error) {
      if (!is_finding(error)) throw;
      // A program that makes the directory first has not completed the version yet.
      if (error.kind() == ErrorKind::not_found && !os::file_status(info.path + "/" + std::string(model_index_name))) {
        if (os::file_status(info.path)) log_.unfinished.push_back(version_name(number));
        return;
      }
      version.open.reset();
      info.problems.emplace_back(error.what());
    }
    versions_.push_back(std::move(version));
  }

  static void describe(const OpenVersion& open, VersionInfo& info) {
    const VersionIndex& index = open.index;
    info.kind = index.kind;
    if (index.kind == VersionKind::delta) {
      info.base_version = index.base_version;
      info.encoding = index.encoding;
      info.checksum_format = to_string(index.checksums);
    }
    info.tensors = open.tensors.size();
    info.files = open.files.size();
    for (const SafetensorsFile& file : open.files)
      if (const auto status = os::file_status(file.path(), os::Links::followed)) info.bytes += status->bytes;
    if (!index.own) return;
    const OwnFacts& own = *index.own;
    info.elements = own.elements;
    if (index.kind == VersionKind::delta) info.changed_elements = own.changed_elements;
    info.stream = own.stream;
    info.publisher = own.publisher;
    info.ranks = own.ranks;
    info.digest = digest_text(own.after);
  }

  /// Step 2. Clean-up deletes the oldest versions, if a newer full version exists. The deltas that are left before it
  /// serve copies that already have the version before them, so they are no defects.
  void follow() {
    std::optional<std::vector<TensorEntry>> tensors;  // of the previous version, if they are known
    if (base_) tensors = base_->tensors();
    std::string cause;  // why no chain reaches the current version; empty: one does, or the oldest versions are deleted
    const LoggedVersion* previous = nullptr;
    for (LoggedVersion& version : versions_) {
      VersionInfo& info = version.info;
      if (previous != nullptr && previous->info.version + 1 != info.version) {
        cause = missing_text(previous->info.version + 1, info.version - 1);
        log_.problems.push_back(cause);
      }
      if (!version.open) {
        cause = fmt::format("version {} cannot be read", info.version);
      } else if (info.kind == VersionKind::full) {
        cause.clear();
        info.begins_at = info.version;
        tensors = FileTensors(version.open->files).tensors();
      } else {
        if (info.version == 1) info.begins_at = 0;
        if (!cause.empty()) {
          defect(version, "no chain reaches it: " + cause);
        } else if (previous != nullptr) {
          info.begins_at = previous->info.begins_at;
          compare_facts(version, *previous);
        }
        if (info.begins_at && tensors) check_frames(version, *tensors);
      }
      previous = &version;
    }
    const bool has_full = std::ranges::any_of(
        versions_, [](const LoggedVersion& version) { return version.info.kind == VersionKind::full; });
    if (!versions_.empty() && versions_.front().info.version > 1 && !has_full)
      log_.problems.push_back(missing_text(1, versions_.front().info.version - 1) + ", and no version is full");
  }

  /// The facts of a delta and of the version that it changes.
  void compare_facts(LoggedVersion& version, const LoggedVersion& previous) {
    const auto& own = version.open->index.own;
    const auto& before = previous.open->index.own;
    if (!own || !before) return;
    if (own->stream != before->stream)
      defect(version, fmt::format("it belongs to another stream ({}) than version {} ({}), which it changes",
                                  escaped(own->stream), previous.info.version, escaped(before->stream)));
    else if (own->before && *own->before != before->after)
      defect(version, fmt::format("it was computed from tensors with the digest {}, but those of version {} have {}",
                                  digest_text(*own->before), previous.info.version, digest_text(before->after)));
  }

  static void check_frames(LoggedVersion& version, const std::vector<TensorEntry>& tensors) {
    try {
      (void)check_deltas(std::span(&*version.open, 1), tensors);
    } catch (const Error& error) {
      if (!is_finding(error)) throw;
      version.info.problems.emplace_back(error.what());
    }
  }

  static std::string missing_text(std::uint64_t first, std::uint64_t last) {
    return first == last ? fmt::format("version {} is missing", first)
                         : fmt::format("versions {} to {} are missing", first, last);
  }

  void defect(LoggedVersion& version, std::string_view cause) {
    const std::lock_guard lock(mutex_);
    version.info.problems.push_back(
        fmt::format("{}: version {}: {}", in_quotes(version.info.path), version.info.version, cause));
  }

  // Steps 3 and 4.

  /// A beginning, and the deltas that are applied to it.
  struct Segment {
    LoggedVersion* full = nullptr;  // null: the base
    std::vector<LoggedVersion*> deltas = {};
    /// The number of deltas before the first one that does not fit. A delta whose file has other bytes is applied, too,
    /// so that the tensor is found.
    std::size_t usable = 0;
  };

  void verify() {
    std::vector<Segment> segments;
    for (LoggedVersion& version : versions_) {
      if (!version.open || !version.info.begins_at) continue;
      if (version.info.kind == VersionKind::full) {
        segments.push_back({.full = &version});
        continue;
      }
      if (version.info.begins_at == 0 && segments.empty()) {
        if (!base_)
          throw Error(ErrorKind::invalid_argument,
                      fmt::format("{}: verifying version {}: its chain begins at the base, and no base is given. Pass "
                                  "--base DIR (LogOptions::base)",
                                  in_quotes(source_), version.info.version));
        segments.push_back({});
      }
      Segment& segment = segments.back();
      if (segment.usable == segment.deltas.size() && version.info.problems.empty()) ++segment.usable;
      segment.deltas.push_back(&version);
    }
    std::uint64_t total = 0;
    for (const LoggedVersion& version : versions_)
      if (version.open && version.open->index.own) total += version.info.bytes;
    for (const Segment& segment : segments) {
      const FileTensors begin = begin_of(segment);
      for (const TensorEntry& tensor : begin.tensors()) total += tensor.bytes;
    }
    ProgressCounter progress(options_.progress, total, options_.stop);
    hash_files(progress);
    for (Segment& segment : segments) verify(segment, progress);
  }

  [[nodiscard]] FileTensors begin_of(const Segment& segment) const {
    return FileTensors(segment.full != nullptr ? std::span<const SafetensorsFile>(segment.full->open->files)
                                               : std::span<const SafetensorsFile>(base_->files()));
  }

  /// Step 3.
  void hash_files(ProgressCounter& progress) {
    std::vector<std::pair<LoggedVersion*, const SafetensorsFile*>> files;
    for (LoggedVersion& version : versions_) {
      if (!version.open || !version.open->index.own) continue;
      for (const SafetensorsFile& file : version.open->files) files.emplace_back(&version, &file);
    }
    parallel_for(files.size(), copy_workers(), [&](std::size_t at, std::size_t) {
      const auto& [version, file] = files[at];
      try {
        hash_file(*version, file->path(), progress);
      } catch (const Error& error) {
        if (!is_finding(error)) throw;
        defect(*version, error.what());
      }
    });
  }

  void hash_file(LoggedVersion& version, const std::string& path, ProgressCounter& progress) {
    const std::string name = file_name_of(path);
    const auto facts = version.open->index.own->files.find(name);
    if (facts == version.open->index.own->files.end())
      return defect(version, fmt::format("file {}: the index records no digest of it", in_quotes(name)));
    if (const std::uint64_t bytes = os::ReadableFile::open(path).bytes(); bytes != facts->second.bytes)
      return defect(version,
                    fmt::format("file {}: {} bytes present, {} recorded", in_quotes(name), bytes, facts->second.bytes));
    const Digest found = digest_of_file(path, [&](std::uint64_t bytes) { progress.add(bytes); });
    if (found != facts->second.digest)
      defect(version, fmt::format("file {}: digest {}, recorded {}: data is corrupted", in_quotes(name),
                                  digest_text(found), digest_text(facts->second.digest)));
  }

  /// The digests of the tensors of a segment. The first list is that of the beginning; the others have values for the
  /// tensors that their delta changes.
  struct SegmentDigests {
    std::vector<std::vector<std::optional<Digest>>> tensors;
    std::size_t known = 0;  ///< number of versions, from the beginning on, whose tensors all have been computed
  };

  /// Step 4.
  void verify(Segment& segment, ProgressCounter& progress) {
    const FileTensors begin = begin_of(segment);
    const std::size_t usable = segment.usable;
    SegmentDigests digests{.tensors = {}, .known = usable + 1};
    digests.tensors.assign(usable + 1, std::vector<std::optional<Digest>>(begin.tensors().size()));
    const std::size_t workers = std::max<std::size_t>(1, copy_workers());
    std::vector<std::vector<std::byte>> memory(workers);
    std::vector<std::size_t> order(begin.tensors().size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::stable_sort(order, std::greater(), [&](std::size_t i) { return begin.tensors()[i].bytes; });
    parallel_for(order.size(), workers, [&](std::size_t at, std::size_t worker) {
      fold(segment, begin, order[at], usable, deltas_at_once(workers, decoder_bytes), memory[worker], digests,
           &progress);
    });
    compare_states(segment, begin, digests);
    for (std::size_t at = digests.known; at < segment.deltas.size(); ++at)
      defect(*segment.deltas[at], fmt::format("not verified: it changes version {}, which has problems",
                                              segment.deltas[at]->info.version - 1));
  }

  /// A delta that is being applied to a tensor.
  struct AppliedDelta {
    std::size_t at;  // in the deltas of the segment
    const TensorPlace* place;
    DeltaDecoder decoder;
    TensorSum sum;
  };

  /// Reads a tensor of the beginning and applies all deltas to it. If there are more deltas than can be open at a time,
  /// the tensor is held in memory, and they are applied in groups. After a failure, only the deltas before it are
  /// applied.
  void fold(Segment& segment, const TensorSource& begin, std::size_t tensor, std::size_t usable, std::size_t at_once,
            std::vector<std::byte>& memory, SegmentDigests& digests, ProgressCounter* progress) {
    const TensorEntry& entry = begin.tensors()[tensor];
    std::vector<std::size_t> changing;
    for (std::size_t at = 0; at < usable; ++at)
      if (segment.deltas[at]->open->find(entry.name) != nullptr) changing.push_back(at);
    at_once = std::max<std::size_t>(at_once, 1);
    const bool is_held = changing.size() > at_once;
    memory.resize(is_held ? entry.bytes : std::min(piece_bytes, entry.bytes));
    Digesting first_sum;
    bool is_first = true;
    for (std::size_t from = 0; is_first || from < changing.size(); from += at_once) {
      std::vector<AppliedDelta> group;
      LoggedVersion* current = segment.full;
      std::size_t known = 0;  // the number of versions that remain known if `current` fails
      try {
        for (std::size_t i = from; i < std::min(changing.size(), from + at_once); ++i) {
          current = segment.deltas[changing[i]];
          known = changing[i] + 1;
          group.push_back(opened(*current->open, changing[i], entry));
        }
        for (std::uint64_t at = 0; at < entry.bytes; at += piece_bytes) {
          const std::uint64_t length = std::min(piece_bytes, entry.bytes - at);
          const std::span piece = std::span(memory).subspan(is_held ? at : 0, length);
          if (is_first) {
            current = segment.full;
            known = 0;
            begin.read(tensor, at, piece);
            first_sum.add(piece);
            if (progress != nullptr) progress->add(length);
          }
          for (AppliedDelta& delta : group) {
            current = segment.deltas[delta.at];
            known = delta.at + 1;
            delta.decoder.apply(piece);
            delta.sum.add(piece);
          }
        }
        if (is_first) digests.tensors[0][tensor] = first_sum.value();
        for (AppliedDelta& delta : group) {
          current = segment.deltas[delta.at];
          known = delta.at + 1;
          delta.decoder.end();
          if (const std::string sum = delta.sum.checksum(); sum != delta.place->checksum)
            throw Error(ErrorKind::corrupt,
                        fmt::format("checksum {}, recorded {}: data is corrupted", sum, delta.place->checksum));
          digests.tensors[delta.at + 1][tensor] = delta.sum.digest();
        }
      } catch (const Error& error) {
        // An unreadable base is an error of the call.
        if (!is_finding(error) || current == nullptr) throw;
        defect(*current, fmt::format("tensor {}: {}", in_quotes(entry.name), error.what()));
        {
          const std::lock_guard lock(mutex_);
          digests.known = std::min(digests.known, known);
        }
        // The deltas before the damaged one have not all been applied to the end.
        if (known != 0) fold(segment, begin, tensor, known - 1, at_once, memory, digests, nullptr);
        return;
      }
      is_first = false;
    }
  }
  [[nodiscard]] static AppliedDelta opened(const OpenVersion& open, std::size_t at, const TensorEntry& entry) {
    const TensorPlace* place = open.find(entry.name);
    const SafetensorsFile& file = open.files[place->file];
    const formats::ReadAt read = [&file, index = place->index](std::uint64_t offset, std::span<std::byte> target) {
      file.read(index, offset, target);
    };
    return {at, place, DeltaDecoder(open.index.encoding, read, file.tensors()[place->index].bytes, entry.bytes),
            TensorSum(open.index.checksums)};
  }

  /// Compares the digest of each version of a segment.
  void compare_states(Segment& segment, const TensorSource& begin, const SegmentDigests& digests) {
    std::vector<std::optional<Digest>> current(begin.tensors().size());
    for (std::size_t at = 0; at < digests.known; ++at) {
      for (std::size_t tensor = 0; tensor < current.size(); ++tensor)
        if (digests.tensors[at][tensor]) current[tensor] = digests.tensors[at][tensor];
      LoggedVersion* version = at == 0 ? segment.full : segment.deltas[at - 1];
      // The digest of the base is recorded by the delta that follows it.
      const bool is_base = version == nullptr;
      if (is_base && segment.deltas.empty()) continue;
      if (is_base) version = segment.deltas.front();
      const auto& own = version->open->index.own;
      if (!own || (is_base && !own->before)) continue;
      std::vector<TensorState> tensors;
      for (std::size_t tensor = 0; tensor < current.size(); ++tensor) {
        const TensorEntry& entry = begin.tensors()[tensor];
        tensors.push_back({entry.name, {entry.dtype, entry.shape}, current[tensor].value_or(Digest())});
      }
      const Digest found = state_digest(tensors);
      if (is_base && found != *own->before)
        defect(*version, fmt::format("it was computed from a base with the digest {}, but {} has {}. Pass the base of "
                                     "the trainer",
                                     digest_text(*own->before), in_quotes(options_.base), digest_text(found)));
      if (!is_base && found != own->after)
        defect(*version,
               fmt::format("its tensors have the digest {}, recorded {}", digest_text(found), digest_text(own->after)));
    }
  }

  /// Step 5.
  void remove_deleted() {
    std::erase_if(versions_, [](const LoggedVersion& version) {
      return !version.info.problems.empty() && !os::file_status(version.info.path);
    });
  }

  const std::string& source_;
  const LogOptions& options_;
  VersionLog log_;
  std::optional<ModelDir> base_;
  std::vector<LoggedVersion> versions_;
  std::mutex mutex_;  // protects the problems while threads verify
};

}  // namespace
}  // namespace versions

VersionLog read_versions(const std::string& source, const LogOptions& options) {
  return versions::LogReading(source, options)();
}

}  // namespace muster
