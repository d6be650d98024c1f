// SPDX-License-Identifier: Apache-2.0
// Publishes a version. All ranks take part in each step, and agree on failures before the next step begins.
//
//  1. Rank 0 finds the newest version, which is the old one. With a copy of the base, every host pulls it.
//  2. The ranks list their tensors, and rank 0 plans the result as for an export. It compares names, dtypes and shapes
//     with the old version, which decides between a full version and a delta.
//  3. Rank 0 gives each tensor to one rank, and creates weight_v00000N.partial-NONCE@WRITER.
//  4. Each rank writes its tensors to one file. If there is only one rank, each of its threads has a file. Piece by
//     piece, a rank reads the new bytes and the old ones, and appends their difference. Parts that other ranks have
//     pass through shared memory or messages (assembly.hpp). The files are synced.
//  5. Each rank sends its tensors and digests to rank 0. Rank 0 gives the files their names, writes the index, and
//     renames the directory. The version appears in this moment.
//  6. Only now does the new version become the old one: each rank applies the delta to the tensors that it keeps in
//     memory. Rank 0 deletes versions that are no longer needed.
//
// A kill before the rename leaves no version, and a directory whose name identifies its dead writer.

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <set>
#include <utility>

#include "muster/error.hpp"
#include "muster/live_export.hpp"
#include "muster/log.hpp"
#include "muster/publish.hpp"
#include "src/base/byte_archive.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/agreement.hpp"
#include "src/checkpoint/assembly/export_run.hpp"
#include "src/checkpoint/assembly/live_tensors.hpp"
#include "src/checkpoint/assembly/rank_messages.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/core/thread_pool.hpp"
#include "src/group/error_propagation.hpp"
#include "src/os/directory.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"
#include "src/trace/span.hpp"
#include "src/versions/pull.hpp"
#include "src/versions/version_file.hpp"

namespace muster {
namespace versions {

/// The calls of one publisher so far, on one rank.
struct History {
  std::optional<std::uint64_t> last = {};  ///< the version that it has published last
  bool is_kept = false;                    ///< all ranks keep that version in memory
  bool may_be_ahead = false;               ///< a later call has failed, perhaps after its version had appeared
};

namespace {

constexpr std::size_t stream_bytes = 16;

/// Rank 0's decisions, which it sends to all ranks.
struct VersionPlan {
  std::uint64_t version = 0;
  VersionKind kind = VersionKind::full;
  DeltaEncoding encoding = DeltaEncoding::exclusive_or;
  std::uint8_t digests_old = 0;  ///< the digest of the old version is unknown or unverified
  std::string directory = {};    ///< the unfinished version
};

/// The tensors of one file of a rank, with their places in the file that the assembly imagines.
using RankFile = std::vector<TensorEntry>;

/// A file that a rank has written.
struct WrittenFile {
  std::string path = {};  ///< empty: there is none, because no tensor has changed
  FileFacts facts = {};
  std::vector<NewTensor> tensors = {};
};

template <class Archive, class Spec>
void describe_spec(Archive& archive, Spec& spec) {
  archive.values(spec.dtype);
  archive.all(spec.shape);
}

template <class Archive, class Plan, class File>
void describe(Archive& archive, Plan& plan, File& file) {
  archive.values(plan.version, plan.kind, plan.encoding, plan.digests_old);
  archive.all(plan.directory);
  archive.count(file);
  for (auto& entry : file) {
    archive.all(entry.name);
    describe_spec(archive, entry);
    archive.values(entry.offset, entry.bytes);
  }
}

template <class Archive, class Files>
void describe(Archive& archive, Files& files) {
  archive.count(files);
  for (auto& file : files) {
    archive.all(file.path);
    archive.values(file.facts);
    archive.count(file.tensors);
    for (auto& tensor : file.tensors) {
      archive.all(tensor.name);
      describe_spec(archive, tensor.spec);
      archive.values(tensor.digest, tensor.old_digest, tensor.is_changed, tensor.changed_elements);
    }
  }
}

std::string words_of(std::uint64_t version) {
  return version == 0 ? "the base" : fmt::format("version {}", version);
}

/// Creates SOURCE if it does not exist.
void make_source(const std::string& source) {
  if (os::make_directory(source)) os::sync_directory(os::directory_of(source));
  if (const auto status = os::file_status(source, os::Links::followed); !status || !status->is_directory)
    throw file_error(ErrorKind::invalid_argument, "publishing", source, "it is not a directory");
}

class Publishing {
 public:
  /// A call that succeeds updates `history`.
  Publishing(Group& group, std::string source, const PublisherOptions& options, const PublishOptions& publish,
             OldVersion& old, History& history)
      : group_(group::inside(group)),
        source_(std::move(source)),
        options_(options),
        publish_(publish),
        old_(old),
        history_(history) {}

  /// `request` and `open` are those of an export. `keeps`: step 6 keeps the tensors in memory.
  PublishReport run(Request request, ExportRun::Open open, bool keeps) {
    trace::Span span(trace::SpanKind::export_model, "publish", group_.operations().next());
    const FailOnStop on_stop = fail_on_stop(group_, publish_.stop, &is_published_);
    find_old();
    request.base_model = options_.base;
    request.is_version = true;
    request.is_balanced = true;
    request.max_shard_size = UINT64_MAX;
    ExportOptions options;
    options.writers = Writers::all;
    options.progress = publish_.progress;
    options.check_replicas = options_.check_replicas;
    ExportRun run(group_, std::move(request), {}, std::move(options), std::move(open));
    run.prepare_delivery(span, [&](ExportJob& job) { plan(job, run.source()); });
    hand_out_plan();
    write(run);
    gather_files();
    // From here on, a stop request of a rank other than 0 is too late: rank 0 may be about to rename.
    agree_on(group_, "publish: collecting digests", [] {});
    if (!is_first()) is_published_ = true;
    history_.may_be_ahead = true;
    agree_on(group_, "publish: finishing", [&] {
      if (is_first()) finish();
    });
    settle(keeps);
    report_.version = plan_.version;
    report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    return std::move(report_);
  }

 private:
  [[nodiscard]] bool is_first() const { return group_.rank() == 0; }

  [[nodiscard]] std::chrono::milliseconds patience() const {
    if (!is_spread(group_)) return std::chrono::milliseconds(0);
    return std::min<std::chrono::milliseconds>(group_.timeout(), workspace::longest_lateness);
  }

  // Step 1.
  void find_old() {
    std::uint64_t newest = 0;
    agree_on(group_, "publish: finding the newest version", [&] {
      if (options_.base.empty())
        throw Error(ErrorKind::invalid_argument,
                    "publish: the base is missing. Pass the model that is version 0 (--base)");
      if (!is_first()) return;
      make_source(source_);
      newest = newest_version();
    });
    // A full version does not need the old one, so it also ends a chain that is damaged.
    std::uint8_t is_full = is_first() && !reason_by_choice(newest + 1).empty() ? 1 : 0;
    group::or_fail(group_, [&] {
      ByteWriter out;
      out.values(newest, is_full);
      const std::vector<std::byte> bytes =
          spread_message(group_, out.take(), {.phase = "publish: finding the newest version"});
      ByteReader in(bytes, "the number of the newest version");
      in.values(newest, is_full);
      in.end();
    });
    plan_.version = newest + 1;
    agree_on(group_, "publish: opening the previous version", [&] {
      const auto check = [this] { go_on(group_); };
      OldPlace place{source_, options_.base, {}, patience(), check};
      if (is_full == 0 && !options_.base_copy.empty()) {
        (void)pull_for(source_, options_.base_copy,
                       {.base = options_.base, .version = newest, .wait = place.wait, .stop = publish_.stop}, check);
        place.copy = options_.base_copy;
      }
      old_.select(std::move(place), newest);
      if (!is_first()) return;
      if (is_full != 0)
        old_.load_facts();
      else
        (void)old_.specs();
    });
  }

  // The reason why version `version` is full, if that does not depend on its tensors; otherwise empty.
  [[nodiscard]] std::string reason_by_choice(std::uint64_t version) const {
    if (publish_.full) return "it was requested";
    if (options_.full_every != 0 && version % options_.full_every == 0)
      return fmt::format("every {} versions, one is full", options_.full_every);
    return {};
  }

  static std::string own_name() {
    const os::ProcessIdentity self = os::own_identity();
    return fmt::format("{} {}", self.host, self.pid);
  }

  // Whether this process has published a version, although the call seemed to fail.
  [[nodiscard]] bool is_own(std::uint64_t version) const {
    const std::optional<OwnFacts> own = open_version(source_, version).index.own;
    return own && own->publisher == own_name();
  }

  [[nodiscard]] std::uint64_t newest_version() {
    const VersionNames names = list_versions(source_);
    const std::uint64_t newest = names.versions.empty() ? 0 : names.versions.back();
    if (newest >= last_version)
      throw file_error(ErrorKind::invalid_argument, "publishing", join_path(source_, version_name(newest)),
                       "no version can follow it. If it is not a version of this model, delete it");
    if (newest != 0 && !is_complete(source_, newest))
      throw file_error(ErrorKind::invalid_argument, "publishing", join_path(source_, version_name(newest)),
                       fmt::format("it has no {}, so another program is writing it, or was killed. End that program, "
                                   "and delete the directory",
                                   model_index_name));
    if (history_.last && history_.may_be_ahead && newest == *history_.last + 1 && is_own(newest))
      history_ = {.last = newest};
    if (history_.last && newest != *history_.last)
      throw file_error(ErrorKind::invalid_argument, "publishing", source_,
                       fmt::format("another publisher has published version {} after {} of this one. Only one trainer "
                                   "may publish here. End it, and construct a new Publisher to continue",
                                   newest, words_of(*history_.last)));
    if (publish_.version && *publish_.version != newest + 1)
      throw file_error(
          ErrorKind::invalid_argument, "publishing", source_,
          fmt::format("the next version is {}, and version {} was requested", newest + 1, *publish_.version));
    return newest;
  }

  // Steps 2 and 3, on rank 0.
  void plan(ExportJob& job, const ExportSource& source) {
    std::vector<MergedTensor> tensors;
    for (OutputFile& file : job.outputs.files)
      for (MergedTensor& tensor : file.tensors) tensors.push_back(std::move(tensor));
    for (const MergedTensor& tensor : tensors) {
      new_specs_[tensor.name] = tensor.layout.target;
      report_.bytes += byte_size(tensor.layout.target.dtype, tensor.layout.target.shape);
      elements_ += static_cast<std::uint64_t>(element_count(tensor.layout.target.shape));
    }
    report_.tensors = tensors.size();
    report_.notes = job.account.notes;
    for (const TensorMapping& dropped : job.account.dropped)
      report_.skipped.push_back(
          {dropped.origin, dropped.reason.empty() ? "a rule of the plan drops it" : dropped.reason});
    report_.reason = reason_for_full();
    plan_.kind = report_.reason.empty() ? VersionKind::delta : VersionKind::full;
    plan_.encoding = options_.encoding;
    if (plan_.kind == VersionKind::delta) plan_.digests_old = history_.is_kept || has_verified_copy() ? 0 : 1;
    config_text_ = job.config_text;
    if (plan_.kind == VersionKind::full) {
      carried_ = extra_files_of(options_.base);
      for (Omission& omission : carried_.skipped) report_.skipped.push_back(std::move(omission));
    }
    divide(job, std::move(tensors), !source.whole().empty());
    const std::string path = join_path(source_, version_name(plan_.version));
    if (os::file_status(path))
      throw file_error(ErrorKind::invalid_argument, "publishing", path,
                       "it already exists. If another program publishes here, end it; else delete the directory");
    output_.emplace(path, OutputChoice{.stale_after = options_.stale_after});
    plan_.directory = output_->partial();
  }

  // Whether the old bytes come from a copy that pull_version() has verified.
  [[nodiscard]] bool has_verified_copy() const { return !options_.base_copy.empty() && old_.facts(); }

  /// Returns the reason why the version cannot be a delta; empty if it can.
  [[nodiscard]] std::string reason_for_full() {
    if (std::string reason = reason_by_choice(plan_.version); !reason.empty()) return reason;
    const std::map<std::string, TensorSpec>& before = old_.specs();
    for (const auto& [name, spec] : new_specs_) {
      const auto old = before.find(name);
      if (old == before.end()) return fmt::format("tensor {} was added", in_quotes(name));
      if (old->second != spec)
        return fmt::format("tensor {} is {}, and was {}", in_quotes(name), muster::to_string(spec),
                           muster::to_string(old->second));
    }
    for (const auto& [name, spec] : before)
      if (!new_specs_.contains(name)) return fmt::format("tensor {} was removed", in_quotes(name));
    return {};
  }

  // Gives each tensor to the rank that has most of it; among those, to the one that has least to write. The result
  // depends only on names and shapes, so that the ranks keep their tensors from version to version.
  void divide(ExportJob& job, std::vector<MergedTensor> tensors, bool all_have_all) {
    const int ranks = group_.size();
    std::vector<OutputFile> files(static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      files[static_cast<std::size_t>(rank)].name = fmt::format("rank-{:05}", rank);
      files[static_cast<std::size_t>(rank)].writer = rank;
    }
    std::vector<std::uint64_t> load(files.size());
    std::ranges::stable_sort(tensors, std::greater(), [](const MergedTensor& tensor) {
      return byte_size(tensor.layout.target.dtype, tensor.layout.target.shape);
    });
    for (MergedTensor& tensor : tensors) {
      std::vector<std::uint64_t> has(files.size());
      if (!all_have_all && tensor.layout.combine == merge::Combine::copy)
        for (const merge::Band& band : merge::bands_of(tensor.layout))
          for (const merge::Run& run : band.rows.runs) {
            const int rank = tensor.sources[static_cast<std::size_t>(run.source)].rank;
            has[static_cast<std::size_t>(rank % ranks)] += run.bytes * band.rows.count;
          }
      const std::uint64_t most = *std::ranges::max_element(has);
      std::size_t best = files.size();
      for (std::size_t rank = 0; rank < files.size(); ++rank)
        if (has[rank] == most && (best == files.size() || load[rank] < load[best])) best = rank;
      load[best] += byte_size(tensor.layout.target.dtype, tensor.layout.target.shape);
      files[best].tensors.push_back(std::move(tensor));
    }
    for (const FilePlan& file : plan_files(files)) rank_files_.push_back(file.tensors);
    job.outputs.files = std::move(files);
    job.outputs.index.clear();
  }

  void hand_out_plan() {
    const WaitOptions wait{.phase = "publish: distributing the plan"};
    std::vector<std::vector<std::byte>> of_ranks;
    for (auto& file : rank_files_) {
      ByteWriter out;
      describe(out, plan_, file);
      of_ranks.push_back(out.take());
    }
    rank_files_.clear();
    const std::vector<std::byte> bytes = scatter_messages(group_, std::move(of_ranks), wait);
    ByteReader in(bytes, "the plan of a version");
    describe(in, plan_, file_);
    in.end();
    for (const TensorEntry& entry : file_) names_.push_back(entry.name);
    agree_on(group_, "publish: opening the previous version", [&] {
      if (plan_.kind == VersionKind::delta) old_.require(names_);
      if (is_spread(group_)) look_for_output(group_, plan_.directory);
    });
  }

  [[nodiscard]] std::unique_ptr<VersionWriter> writer(std::size_t number, std::span<const TensorEntry> tensors) const {
    const std::string name = fmt::format("rank-{:05}-{:03}.writing", group_.rank(), number);
    return std::make_unique<VersionWriter>(join_path(plan_.directory, name), tensors, plan_.kind, plan_.encoding, &old_,
                                           plan_.digests_old != 0);
  }

  // Step 4.
  void write(ExportRun& run) {
    std::vector<std::unique_ptr<VersionWriter>> writers;
    if (group_.size() == 1)
      agree_on(group_, "publish: writing", [&] { write_alone(run, writers); });
    else
      write_together(run, writers);
    agree_on(group_, "publish: syncing", [&] {
      written_.resize(writers.size());
      parallel_for(writers.size(), writers.size(), [&](std::size_t i, std::size_t) {
        written_[i].tensors = writers[i]->tensors();
        if (const std::optional<FileFacts> facts = writers[i]->finish([this] { go_on(group_); })) {
          written_[i].path = writers[i]->path();
          written_[i].facts = *facts;
        }
      });
    });
  }

  // One rank: each of its threads has a file. The tensors are sorted by size, and each goes to the thread that has
  // least to write so far.
  void write_alone(ExportRun& run, std::vector<std::unique_ptr<VersionWriter>>& writers) {
    const std::unique_ptr<MergedTensors> tensors = run.take_merged();
    const std::vector<TensorEntry>& entries = tensors->tensors();
    const std::size_t workers = std::max<std::size_t>(1, std::min(copy_workers(), entries.size()));
    std::vector<std::vector<std::size_t>> shares(workers);
    std::vector<std::uint64_t> load(workers);
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const auto least = std::ranges::min_element(load) - load.begin();
      shares[static_cast<std::size_t>(least)].push_back(i);
      load[static_cast<std::size_t>(least)] += entries[i].bytes + piece_bytes / 16;  // a tensor has a cost of its own
      total += entries[i].bytes;
    }
    for (std::size_t worker = 0; worker < workers; ++worker) {
      RankFile file;
      // Large elements first: then every tensor begins at a multiple of its elements' size.
      std::ranges::stable_sort(shares[worker], std::greater(),
                               [&](std::size_t index) { return bits(entries[index].dtype); });
      for (const std::size_t index : shares[worker]) file.push_back(entries[index]);
      writers.push_back(writer(worker, file));
    }
    ProgressCounter progress(publish_.progress, total, publish_.stop);
    parallel_for(workers, workers, [&](std::size_t worker, std::size_t) {
      VersionWriter& out = *writers[worker];
      std::vector<std::byte> memory;
      for (const std::size_t index : shares[worker]) {
        const TensorEntry& entry = entries[index];
        out.begin(entry);
        for (std::uint64_t at = 0; at < entry.bytes;) {
          const std::uint64_t length = std::min(entry.bytes - at, piece_bytes);
          out.add(tensors->read_piece(index, at, length, memory));
          at += length;
          progress.add(length);
        }
        out.end();
      }
    });
  }

  // Several ranks: the assembly delivers the bytes of this rank's tensors in order.
  void write_together(ExportRun& run, std::vector<std::unique_ptr<VersionWriter>>& writers) {
    agree_on(group_, "publish: beginning", [&] { writers.push_back(writer(0, file_)); });
    VersionWriter& out = *writers.front();
    auto next = file_.begin();
    std::uint64_t at = 0;  // in the current tensor
    bool is_open = false;
    const auto add = [&](std::span<const std::byte> bytes) {
      while (next != file_.end() && (!bytes.empty() || next->bytes == at)) {
        if (!is_open) out.begin(*next);
        is_open = true;
        const auto now = bytes.first(std::min<std::uint64_t>(bytes.size(), next->bytes - at));
        out.add(now);
        bytes = bytes.subspan(now.size());
        at += now.size();
        if (at != next->bytes) return;
        out.end();
        is_open = false;
        at = 0;
        ++next;
      }
    };
    const std::vector<std::byte> zeros(piece_bytes);
    // Adds zeros up to an offset: bytes that no rank has.
    const auto add_zeros = [&](std::uint64_t offset) {
      for (;;) {
        const std::uint64_t here = next == file_.end() ? offset : next->offset + at;
        if (here >= offset) return;
        add(std::span(zeros).first(std::min<std::uint64_t>(offset - here, zeros.size())));
      }
    };
    run.deliver([&](std::uint32_t, std::uint64_t offset, std::span<const std::byte> bytes) {
      add_zeros(offset);
      add(bytes);
    });
    agree_on(group_, "publish: writing", [&] {
      if (!file_.empty()) add_zeros(file_.back().offset + file_.back().bytes);
      add({});
    });
  }

  // Step 5: rank 0 learns of all files.
  void gather_files() {
    const WaitOptions wait{.phase = "publish: collecting digests"};
    ByteWriter out;
    describe(out, written_);
    const std::vector<std::vector<std::byte>> all = gather_messages(group_, out.take(), wait);
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      ByteReader in(all[rank], fmt::format("the files of rank {}", rank));
      std::vector<WrittenFile> files;
      describe(in, files);
      in.end();
      std::ranges::move(files, std::back_inserter(written_));
    }
  }

  // On rank 0.
  void finish() {
    VersionIndex index;
    index.version = plan_.version;
    index.kind = plan_.kind;
    index.base_version = plan_.version - 1;
    index.encoding = plan_.encoding;
    index.total_size = report_.bytes;
    name_files(index);
    index.own = own_facts();
    for (auto& [name, facts] : named_) index.own->files.emplace(name, facts);
    write_file(join_path(plan_.directory, std::string(model_index_name)), version_index_text(index));
    if (plan_.kind == VersionKind::full) {
      if (!config_text_.empty()) std::erase(carried_.names, "config.json");
      copy_extra_files(options_.base, plan_.directory, carried_.names, [&] { go_on(group_); });
      if (!config_text_.empty()) write_file(join_path(plan_.directory, "config.json"), config_text_);
    }
    facts_ = *index.own;
    report_.kind = plan_.kind;
    report_.path = join_path(source_, version_name(plan_.version));
    try {
      output_->commit([&] {
        go_on(group_);
        is_published_ = true;
      });
    } catch (const Error& error) {
      // The rename has succeeded, and only the last sync has failed.
      if (is_published_ && output_->partial().empty()) {
        report_.notes.push_back(
            fmt::format("the version is visible, but a power failure may undo it: {}", error.what()));
        log(LogLevel::warning, fmt::format("version {}: {}", plan_.version, report_.notes.back()));
        return;
      }
      // Another publisher may have taken the name since step 3.
      if (error.kind() != ErrorKind::invalid_argument || !os::file_status(report_.path)) throw;
      throw file_error(ErrorKind::invalid_argument, "publishing", report_.path,
                       "another publisher has just published this version. Only one trainer may publish here");
    }
  }

  // Gives the files with changes their names: from 0 on for a delta, and from 1 on for a full version.
  void name_files(VersionIndex& index) {
    const auto count = static_cast<std::uint64_t>(
        std::ranges::count_if(written_, [](const WrittenFile& file) { return !file.path.empty(); }));
    std::uint64_t number = plan_.kind == VersionKind::delta ? 0 : 1;
    for (const WrittenFile& file : written_) {
      if (file.path.empty()) continue;
      const std::string name = numbered_name("model", number++, count);
      os::rename_file(file.path, join_path(plan_.directory, name));
      named_.emplace_back(name, file.facts);
      report_.bytes_written += file.facts.bytes;
      for (const NewTensor& tensor : file.tensors)
        if (tensor.is_changed) index.weights.emplace_back(tensor.name, name);
    }
    std::ranges::sort(index.weights);
    report_.files = count;
    report_.changed_tensors = index.weights.size();
  }

  [[nodiscard]] OwnFacts own_facts() {
    OwnFacts own;
    const std::optional<OwnFacts>& last = old_.facts();
    own.stream = last ? last->stream : os::random_hex(stream_bytes);
    own.publisher = own_name();
    own.ranks = group_.size();
    own.elements = elements_;
    std::vector<TensorState> after;
    std::vector<TensorState> before;
    for (const WrittenFile& file : written_)
      for (const NewTensor& tensor : file.tensors) {
        after.push_back({tensor.name, tensor.spec, tensor.digest});
        if (tensor.old_digest) before.push_back({tensor.name, tensor.spec, *tensor.old_digest});
        if (plan_.kind == VersionKind::delta) report_.changed_elements += tensor.changed_elements;
      }
    own.changed_elements = report_.changed_elements;
    own.after = state_digest(after);
    if (plan_.kind == VersionKind::full) return own;
    if (plan_.digests_old != 0) own.before = state_digest(before);
    if (last && own.before && *own.before != last->after)
      throw file_error(
          ErrorKind::invalid_argument, "publishing", source_,
          fmt::format("the base {} and the versions here do not give {} as its publisher recorded it. Pass "
                      "the base with which the versions began, or publish a full version (--full)",
                      in_quotes(options_.base), words_of(plan_.version - 1)));
    if (last) own.before = last->after;
    return own;
  }

  // Step 6. The version is visible: failures are only logged.
  void settle(bool keeps) {
    const std::optional<std::uint64_t> full = plan_.kind == VersionKind::full ? plan_.version : old_.newest_full();
    bool has_kept = false;
    if (keeps && options_.base_copy.empty()) {
      try {
        old_.advance(names_, is_first() ? new_specs_ : std::map<std::string, TensorSpec>(), facts_);
        has_kept = true;
      } catch (const std::exception& error) {
        log(LogLevel::warning,
            fmt::format("version {} is published, and keeping it in memory failed: {}. The next version reads it again",
                        plan_.version, error.what()));
      }
    } else {
      old_.forget();
    }
    const bool has_lost = group::inside(group_).any(!has_kept, {.phase = "publish: finishing"});
    history_ = {.last = plan_.version, .is_kept = !has_lost};
    if (is_first()) remove_old_versions(full);
  }

  // On rank 0. Deletes versions that no reader needs, oldest first, and leftovers of killed publishers.
  void remove_old_versions(std::optional<std::uint64_t> full) noexcept {
    try {
      const VersionNames names = list_versions(source_);
      remove_leftovers(names.unfinished);
      if (!full) return;
      const auto now = workspace::probe(source_);
      for (const std::uint64_t version : names.versions) {
        if (version >= *full || plan_.version - version < options_.keep) break;
        const std::string path = join_path(source_, version_name(version));
        const auto status = os::file_status(path);
        if (!now || !status || now->changed - status->changed < options_.keep_for) break;
        const std::string leaving = os::partial_name(path);
        os::rename_to_new(path, leaving);
        std::filesystem::remove_all(leaving);
        report_.removed.push_back(version);
      }
    } catch (const std::exception& error) {
      log(LogLevel::warning, fmt::format("{}: deleting old versions: {}", in_quotes(source_), error.what()));
    }
  }

  void remove_leftovers(const std::vector<std::string>& unfinished) const {
    std::set<std::string> paths;
    for (const std::string& name : unfinished) paths.insert(join_path(source_, name.substr(0, name.find('.'))));
    for (const std::string& path : paths) remove_dead_outputs(path, {.stale_after = options_.stale_after});
  }

  group::BaseGroup& group_;
  const std::string source_;
  const PublisherOptions& options_;
  const PublishOptions& publish_;
  OldVersion& old_;
  History& history_;
  std::atomic<bool> is_published_ = false;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  VersionPlan plan_;
  RankFile file_;                   // the tensors that this rank writes
  std::vector<std::string> names_;  // their names
  std::vector<WrittenFile> written_;
  OwnFacts facts_;
  PublishReport report_;
  // Used on rank 0.
  std::map<std::string, TensorSpec> new_specs_;
  std::uint64_t elements_ = 0;
  std::vector<RankFile> rank_files_;
  std::string config_text_;
  ExtraFiles carried_;
  std::optional<OutputDirectory> output_;
  std::vector<std::pair<std::string, FileFacts>> named_;
};

Request request_for(const std::string& path, const PublisherOptions& options, bool by_boxes) {
  Request request;
  request.path = path;
  request.plan = options.plan;
  request.source_layout = options.source_layout;
  request.check_replicas = options.check_replicas;
  request.by_boxes = by_boxes;
  return request;
}

}  // namespace
}  // namespace versions

class Publisher::State {
 public:
  State(std::string source, PublisherOptions options, Group& group)
      : source_(std::move(source)), options_(std::move(options)), group_(group) {}

  PublishReport publish(std::span<const TensorPart> parts, const PublishOptions& options) {
    const group::GroupLock use(group_);
    versions::Publishing publishing(group_, source_, options_, options, old_, history_);
    return publishing.run(
        versions::request_for({}, options_, options_.plan.empty()),
        [&](Group& ranks) { return std::make_unique<LiveTensors>(parts, ranks); }, true);
  }

 private:
  std::string source_;
  PublisherOptions options_;
  Group& group_;
  versions::OldVersion old_;
  versions::History history_;
};

Publisher::Publisher(std::string source, PublisherOptions options, Group& group) {
  const group::GroupLock use(group);
  agree_on(group::inside(group), "publish: opening the base", [&] {
    if (options.base.empty())
      throw Error(ErrorKind::invalid_argument, "publisher: the base is empty. Pass the model that is version 0");
    (void)ModelDir::open(options.base);
  });
  state_ = std::make_unique<State>(std::move(source), std::move(options), group);
}
Publisher::Publisher(Publisher&&) noexcept = default;
Publisher& Publisher::operator=(Publisher&&) noexcept = default;
Publisher::~Publisher() = default;

PublishReport Publisher::publish(std::span<const TensorPart> parts, const PublishOptions& options) {
  return state_->publish(parts, options);
}

PublishReport publish_version(const std::string& model_or_shards, const std::string& source,
                              const PublisherOptions& options, Group& group, const PublishOptions& publish) {
  const group::GroupLock use(group);
  versions::OldVersion old;
  versions::History history;
  versions::Publishing publishing(group, source, options, publish, old, history);
  const Request request = versions::request_for(model_or_shards, options, false);
  return publishing.run(
      request,
      [&](Group& ranks) {
        return std::make_unique<ShardSet>(request.path, ranks.rank(), ranks.size(), request.states, request.thirdparty,
                                          ModelReaders::all);
      },
      false);
}

}  // namespace muster
