// SPDX-License-Identifier: Apache-2.0
// pull_version(): a copy on this host that is the old version or the new one at any moment.
//
//  1. Everything that can be refused without work is refused: places, mount points, files of other programs.
//  2. The locks are taken. Their holder deletes the leftovers next to LOCAL: no other process can be using them.
//  3. The chain of versions is found and checked. It begins at LOCAL, if its record is valid, or at a full version or
//     the base.
//  4. The successor grows next to LOCAL. Files without changes are hard links of LOCAL's files. In the others, the
//     unchanged tensors of LOCAL are copied. All other tensors are read, changed, hashed and written piece by piece.
//  5. The checksums are compared. Marker and record are written.
//  6. The directories exchange their names, and the old one is deleted.
//
// A failure before step 6 leaves LOCAL as it was. If checksums do not match, although the files of the chain are what
// their publisher wrote, LOCAL itself is damaged. It is then seeded again from the full version or the base.

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/log.hpp"
#include "muster/model_dir.hpp"
#include "muster/publish.hpp"
#include "src/base/escaped.hpp"
#include "src/base/message.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/model_survey.hpp"
#include "src/checkpoint/model/output_directory.hpp"
#include "src/core/thread_pool.hpp"
#include "src/formats/json_text.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"
#include "src/versions/chain.hpp"
#include "src/versions/local_copy.hpp"
#include "src/versions/pull.hpp"

namespace muster {
namespace versions {
namespace {

namespace fs = std::filesystem;

// Unchanged bytes are copied in steps of this size, so that a stop request and the progress do not wait long.
constexpr std::uint64_t copy_step = std::uint64_t{16} << 20;
// Small enough for the pieces of all deltas of a chain to stay in the caches, and one block of zstd.
constexpr std::uint64_t fold_bytes = std::uint64_t{128} << 10;
constexpr std::size_t most_threads = 8;
// Marker, record and directories need some space, too.
constexpr std::uint64_t space_beside_files = std::uint64_t{1} << 20;
// A network file system may show files of a version that is being deleted.
constexpr int most_attempts = 3;
constexpr std::string_view doing = "pulling";

std::string words_of_space(std::uint64_t needed, std::uint64_t available) {
  return fmt::format("it needs {}, and {} are available. Free space, or choose another directory", byte_text(needed),
                     byte_text(available));
}

/// LOCAL without a trailing slash, with links resolved: siblings are named after it, and a link must not be replaced.
std::string local_place(const std::string& path) {
  const auto refuse = [&](ErrorKind kind, const std::string& words) { throw file_error(kind, doing, path, words); };
  if (path.empty()) refuse(ErrorKind::invalid_argument, "the directory for the copy has no name. Pass one");
  std::error_code error;
  fs::path clean = fs::weakly_canonical(fs::absolute(path, error), error);
  if (error) refuse(ErrorKind::io, error.message());
  if (!clean.has_filename()) clean = clean.parent_path();
  if (!clean.has_filename()) refuse(ErrorKind::invalid_argument, "the root cannot be the copy. Pass a new directory");
  const std::string parent = clean.parent_path().string();
  const auto above = os::file_status(parent, os::Links::followed);
  if (!above || !above->is_directory)
    refuse(ErrorKind::not_found, fmt::format("the directory {} does not exist. Make it first", in_quotes(parent)));
  const auto status = os::file_status(clean.string());
  if (status && !status->is_directory)
    refuse(ErrorKind::invalid_argument, status->is_link ? "it is a link to a path that does not exist. Remove the link"
                                                        : "it is not a directory. Pass a directory");
  return clean.string();
}

void check_apart(const std::string& local, const std::string& other, std::string_view what) {
  if (other.empty()) return;
  const auto refuse = [&](std::string_view words) {
    throw file_error(ErrorKind::invalid_argument, doing, local,
                     fmt::format("it {} {} {}. Pass another directory for the copy", words, what, in_quotes(other)));
  };
  const auto ours = os::file_status(local);
  const auto theirs = os::file_status(other, os::Links::followed);
  if (ours && theirs && ours->identity == theirs->identity) refuse("is");
  if (is_inside(local, other)) refuse("is inside");
  if (is_inside(other, local)) refuse("contains");
}

void check_mount(const std::string& local) {
  if (os::file_status(local) && os::is_mount_point(local))
    throw file_error(ErrorKind::invalid_argument, doing, local,
                     "it is a mount point, which cannot be exchanged with its successor. Pass a directory below it",
                     EBUSY);
}

/// A directory that is not empty must be a copy: other directories, such as a trainer's checkpoint, are not replaced.
void check_contents(const std::string& local) {
  if (!os::file_status(local)) return;
  const DirectoryNames names = names_in(local);
  if (names.files.empty() && names.folders.empty()) return;
  const bool is_copy = std::ranges::find(names.folders, sync_folder) != names.folders.end();
  if (is_copy) return;
  throw file_error(
      ErrorKind::invalid_argument, doing, local,
      fmt::format("it is not a copy of a version, because it has {}, but no marker ({}/{}). Pass an empty or "
                  "a new directory",
                  in_quotes(names.files.empty() ? names.folders.front() : names.files.front()), sync_folder,
                  marker_name));
}

/// Deletes leftovers of killed pulls. If one was killed between two renames, the old copy gets its name again. The
/// caller has the lock.
void repair(const std::string& local) {
  std::vector<os::Unfinished> others = os::unfinished_of(local);
  for (os::Unfinished& one : others) {
    if (!one.is_replaced || os::file_status(local)) continue;
    os::rename_to_new(one.path, local);
    log(LogLevel::warning,
        fmt::format("{} is restored: the process that was replacing it was killed", in_quotes(local)));
    one.path.clear();
  }
  for (const os::Unfinished& one : others) {
    if (one.path.empty()) continue;
    // A living process may write another kind of output to this name; a pull has its marker directory from the
    // beginning on.
    const bool is_pull = os::file_status(join_path(one.path, std::string(sync_folder))).has_value();
    if (is_pull || os::life_of(one.writer) != os::Life::alive) remove_quietly(one.path);
  }
}

/// A checkpoint with which a chain begins.
struct Beginning {
  std::string directory;
  std::string index = {};  ///< name of its index; empty: none
  std::vector<SafetensorsFile> files = {};
  ExtraFiles extras = {};
  std::string more_extras = {};              ///< another directory with files
  std::vector<std::string> more_names = {};  ///< those that come from there
  bool is_local = false;
};

std::string name_of(const SafetensorsFile& file) {
  return fs::path(file.path()).filename().string();
}

/// Opens the model of a directory. The text of its index, if there is one, must not be that of a delta.
Beginning open_model(const std::string& directory) {
  Beginning begin{.directory = directory};
  const ModelDir model = ModelDir::open(directory);
  begin.files = model.files();
  begin.index = choose_files(directory, files_in(directory)).index;
  begin.extras = extra_files_of(directory);
  begin.extras.skipped.insert(begin.extras.skipped.end(), model.omissions().begin(), model.omissions().end());
  return begin;
}

Beginning open_base(const std::string& base) {
  const auto status = os::file_status(base, os::Links::followed);
  if (!status || !status->is_directory)
    throw file_error(status ? ErrorKind::invalid_argument : ErrorKind::not_found, "opening the base", base,
                     status ? "it is not a directory. Pass the directory of the model"
                            : "it does not exist. Pass a directory with the model (names of a hub are not accepted)");
  Beginning begin = open_model(base);
  if (begin.index.empty()) return begin;
  const std::string path = join_path(base, begin.index);
  const Config index =
      with_file("reading", path, [&] { return core::parse_tolerantly(read_text(path, longest_index)); });
  const Config* const metadata = index.find("metadata");
  if (metadata != nullptr && metadata->contains("delta_encoding"))
    throw file_error(ErrorKind::invalid_argument, "opening the base", base,
                     "it is a delta, not a model. Pass the directory of the model");
  return begin;
}

Beginning open_full(const OpenVersion& full, const std::string& base) {
  Beginning begin{.directory = full.path, .files = full.files};
  const std::vector<std::string> names = files_in(full.path);
  if (std::ranges::find(names, model_index_name) != names.end()) begin.index = model_index_name;
  begin.extras = extra_files_of(full.path);
  const std::set<std::string> own(begin.extras.names.begin(), begin.extras.names.end());
  if (base.empty() || own.contains("config.json")) return begin;
  begin.more_extras = base;
  for (std::string& name : extra_files_of(base).names)
    if (!own.contains(name)) begin.more_names.push_back(std::move(name));
  return begin;
}

/// Identifies a base by the names, sizes and times of its weights.
std::string digest_of_base(const std::string& base) {
  std::error_code error;
  if (base.empty() || !fs::is_directory(base, error)) return {};
  Digesting digesting;
  for (const std::string& name : files_in(base)) {
    if (belongs_to_checkpoint(name) != Belongs::weights && !is_weight_name(name)) continue;
    const auto status = os::file_status(join_path(base, name), os::Links::followed);
    const std::string line = fmt::format("{} {} {}\n", in_quotes(name), status ? status->bytes : 0,
                                         status ? status->changed.time_since_epoch().count() : 0);
    digesting.add(std::as_bytes(std::span(line)));
  }
  return digest_text(digesting.value());
}

/// A directory that is deleted unless it has got its name.
class Successor {
 public:
  explicit Successor(const std::string& local)
      : path_(os::partial_name(local)), owner_pid_(os::process_id()), rights_(os::rights_of(local)) {
    if (!os::make_directory(path_)) throw os::errno_error("making the directory", EEXIST, path_);
    try {
      if (rights_) {
        // Never accessible to more users than the directory that it replaces.
        os::Rights growing = *rights_;
        growing.mode |= 0700U;
        os::set_rights(path_, growing);
      }
      os::make_directory(join_path(path_, std::string(sync_folder)));
    } catch (...) {
      remove_quietly(path_);
      throw;
    }
  }
  Successor& operator=(Successor&&) = delete;
  ~Successor() {
    if (!path_.empty() && owner_pid_ == os::process_id()) remove_quietly(path_);
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::string place(const std::string& name) const { return join_path(path_, name); }

  /// Gives it its name, and deletes the old directory. Returns a note if only the last sync has failed.
  std::string take_name(const std::string& local, bool is_synced) {
    if (rights_) os::set_rights(path_, *rights_);
    if (is_synced) sync_all();
    if (os::file_status(local)) {
      path_ = os::replace_directory(path_, local);
    } else {
      os::rename_to_new(path_, local);
      path_.clear();
    }
    try {
      if (is_synced) os::sync_directory(os::directory_of(local));
    } catch (const Error& error) {
      return fmt::format("the copy is complete, but a power failure may undo it: {}", error.what());
    }
    return {};
  }

 private:
  void sync_all() const {
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(path_)) {
      if (entry.is_symlink()) continue;
      if (entry.is_directory()) os::sync_directory(entry.path().string());
      if (entry.is_regular_file()) os::sync_file(entry.path().string());
    }
    os::sync_directory(path_);
    os::sync_directory(os::directory_of(path_));
  }

  std::string path_;
  std::int64_t owner_pid_;
  std::optional<os::Rights> rights_;
};

/// Copies files next to the weights into the successor. From LOCAL they are hard links if possible.
class ExtraCopies {
 public:
  ExtraCopies(const Successor& successor, const std::function<void()>& check) : successor_(successor), check_(check) {}

  void add(const std::string& from, const std::vector<std::string>& names, bool is_linked) {
    for (const std::string& name : names) {
      check_();
      const std::string path = join_path(from, name);
      const std::string target = successor_.place(name);
      if (name.find('/') != std::string::npos) {
        std::error_code error;
        fs::create_directories(fs::path(target).parent_path(), error);
        if (error) throw os::errno_error("making the parent directory", error.value(), target);
      }
      const auto status = os::file_status(path);
      if (is_linked && status && status->is_regular && os::link_file(path, target)) continue;
      const os::ReadableFile source = os::ReadableFile::open(path);
      os::WritableFile copy = os::WritableFile::create(target, target);
      copy.reserve(source.bytes());
      for (std::uint64_t at = 0; at < source.bytes(); at += copy_step) {
        check_();
        copy.copy_from(source, at, at, std::min(copy_step, source.bytes() - at));
      }
      copy.close();
    }
  }

 private:
  const Successor& successor_;
  const std::function<void()>& check_;
};

/// The files with weights of the successor.
class WeightCopies {
 public:
  WeightCopies(const Beginning& begin, const Chain& chain, const CopyRecord* record, const Successor& successor,
               const std::string& local)
      : begin_(begin),
        chain_(chain),
        threads_(std::clamp<std::size_t>(static_cast<std::size_t>(os::usable_cores()), 1, most_threads)),
        successor_(successor),
        local_(local) {
    if (record != nullptr)
      for (const TensorState& tensor : record->tensors) recorded_.emplace(tensor.name, &tensor);
    for (const OpenVersion& delta : chain.deltas)
      for (const auto& [name, place] : delta.tensors) changed_.insert(name);
    tensors_ = FileTensors(begin.files);
  }

  /// Checks that the deltas fit. Makes hard links of files without changes, and plans the other files.
  void plan() {
    const std::uint64_t memory = check_deltas(chain_.deltas, tensors_.tensors());
    // Frames of other programs may need so much that few threads can decode at the same time.
    while (threads_ > 1 && deltas_at_once(threads_, memory) == 1) --threads_;
    at_once_ = deltas_at_once(threads_, memory);
    if (begin_.is_local) check_record();
    states_.resize(tensors_.tensors().size());
    std::size_t first = 0;
    for (const SafetensorsFile& file : begin_.files) {
      plan_file(file, first);
      first += file.tensors().size();
    }
    // A few large tensors at the end would keep one thread busy while the others wait.
    const std::uint64_t large = bytes_to_write_ / (threads_ * 4) + 1;
    std::ranges::stable_partition(steps_, [&](const Step& step) { return step.bytes >= large; });
  }

  [[nodiscard]] std::uint64_t bytes_to_write() const noexcept { return bytes_to_write_; }
  [[nodiscard]] std::uint64_t changed_tensors() const noexcept { return changed_.size(); }
  [[nodiscard]] std::size_t written_files() const noexcept { return outputs_.size(); }
  /// Whether write() failed because a checksum did not match.
  [[nodiscard]] bool has_mismatch() const noexcept { return has_mismatch_; }

  void write(ProgressCounter& progress, PullReport& report) {
    for (Output& output : outputs_) begin_file(output);
    if (chain_.deltas.size() > at_once_)
      for (const Output& output : outputs_) own_.add(SafetensorsFile::open(successor_.place(output.name)));
    parallel_for(steps_.size(), threads_, [&](std::size_t i, std::size_t) {
      const Step& step = steps_[i];
      if (step.tensor)
        fold(step, progress);
      else
        copy(step, progress);
    });
    for (Output& output : outputs_) output.file->close();
    report.bytes_read += bytes_read_.load();
    report.bytes_written += bytes_to_write_;
    report.bytes_linked += bytes_linked_;
  }

  /// Returns the tensors of the successor, after write().
  [[nodiscard]] std::vector<TensorState> states() && { return std::move(states_); }

 private:
  struct Output {
    const SafetensorsFile* from;
    std::string name;
    std::uint64_t bytes = 0;
    std::size_t first_own = 0;  ///< index of its first tensor in own_
    std::optional<os::ReadableFile> old = {};
    std::optional<os::WritableFile> file = {};
  };
  /// A tensor that is read and hashed, or a range of bytes that is copied.
  struct Step {
    std::size_t output = 0;
    std::uint64_t offset = 0;  ///< in the file
    std::uint64_t bytes = 0;
    std::optional<std::size_t> tensor = {};  ///< in tensors_
    std::size_t own = 0;                     ///< in own_
  };

  /// Compares the record with the headers of the files.
  void check_record() const {
    const auto refuse = [&](const std::string& words) {
      throw file_error(ErrorKind::corrupt, "comparing the copy with its record", local_, words);
    };
    for (const TensorEntry& entry : tensors_.tensors()) {
      const auto found = recorded_.find(entry.name);
      if (found == recorded_.end()) refuse(fmt::format("the record lacks tensor {}", in_quotes(entry.name)));
      if (found->second->spec != TensorSpec{entry.dtype, entry.shape})
        refuse(fmt::format("tensor {} has another dtype or shape in the record", in_quotes(entry.name)));
    }
    if (recorded_.size() != tensors_.tensors().size()) refuse("the record has more tensors than the files");
  }

  void plan_file(const SafetensorsFile& file, std::size_t first) {
    const std::vector<TensorEntry>& entries = file.tensors();
    for (std::size_t i = 0; i < entries.size(); ++i) {
      TensorState& state = states_[first + i];
      state.name = entries[i].name;
      state.spec = {entries[i].dtype, entries[i].shape};
      if (begin_.is_local) state.digest = recorded_.at(state.name)->digest;
    }
    const std::string name = name_of(file);
    const os::ReadableFile opened = os::ReadableFile::open(file.path());
    const bool is_changed =
        std::ranges::any_of(entries, [&](const TensorEntry& entry) { return changed_.contains(entry.name); });
    if (begin_.is_local && !is_changed && os::link_file(file.path(), successor_.place(name))) {
      bytes_linked_ += opened.bytes();
      return;
    }
    Output output{.from = &file, .name = name, .bytes = opened.bytes(), .first_own = own_tensors_};
    own_tensors_ += entries.size();
    bytes_to_write_ += output.bytes;
    const std::uint64_t header = entries.empty() ? output.bytes : entries.front().offset;
    add_copy(0, header);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const TensorEntry& entry = entries[i];
      if (begin_.is_local && !changed_.contains(entry.name))
        add_copy(entry.offset, entry.bytes);
      else
        steps_.push_back({outputs_.size(), entry.offset, entry.bytes, first + i, output.first_own + i});
    }
    outputs_.push_back(std::move(output));
  }

  void add_copy(std::uint64_t offset, std::uint64_t bytes) {
    while (bytes != 0) {
      const bool continues = !steps_.empty() && !steps_.back().tensor && steps_.back().output == outputs_.size() &&
                             steps_.back().offset + steps_.back().bytes == offset && steps_.back().bytes < copy_step;
      if (!continues) steps_.push_back({.output = outputs_.size(), .offset = offset});
      Step& step = steps_.back();
      const std::uint64_t now = std::min(bytes, copy_step - step.bytes);
      step.bytes += now;
      offset += now;
      bytes -= now;
    }
  }

  void begin_file(Output& output) {
    const std::string path = successor_.place(output.name);
    output.old.emplace(os::ReadableFile::open(output.from->path()));
    if (output.old->bytes() != output.bytes)
      throw file_error(ErrorKind::corrupt, doing, output.from->path(), "its length changed while it was read");
    output.file.emplace(os::WritableFile::create(path, path));
    // The new file has the rights of the one that it replaces.
    const std::string replaced = join_path(local_, output.name);
    if (const auto status = os::file_status(replaced); status && status->is_regular)
      if (const auto rights = os::rights_of(replaced)) os::set_rights(path, *rights);
    output.file->reserve(output.bytes);
    // The header comes first, because the groups of a long chain open the file.
    const std::vector<TensorEntry>& entries = output.from->tensors();
    output.file->copy_from(*output.old, 0, 0, entries.empty() ? output.bytes : entries.front().offset);
  }

  void copy(const Step& step, ProgressCounter& progress) {
    Output& output = outputs_[step.output];
    output.file->copy_from(*output.old, step.offset, step.offset, step.bytes);
    bytes_read_ += step.bytes;
    progress.add(step.bytes);
  }

  void fold(const Step& step, ProgressCounter& progress) {
    const std::span<const OpenVersion> deltas = chain_.deltas;
    const std::string& name = tensors_.tensors()[*step.tensor].name;
    std::vector<std::byte> piece(std::min(step.bytes, fold_bytes));
    for (std::size_t at = 0; at == 0 || at < deltas.size(); at += at_once_) {
      const std::span<const OpenVersion> group = deltas.subspan(at, std::min(at_once_, deltas.size() - at));
      const auto changes = [&](const OpenVersion& delta) { return delta.find(name) != nullptr; };
      if (at != 0 && std::ranges::none_of(group, changes)) continue;
      // A later group changes the bytes that the earlier one has written.
      FoldedReader reader = at == 0 ? FoldedReader(tensors_, *step.tensor, group) : FoldedReader(own_, step.own, group);
      for (std::uint64_t done = 0; done < step.bytes; done += piece.size()) {
        piece.resize(std::min<std::uint64_t>(fold_bytes, step.bytes - done));
        reader.next(piece);
        outputs_[step.output].file->write_at(step.offset + done, piece);
        progress.add(at == 0 ? piece.size() : 0);
      }
      try {
        reader.end();
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::corrupt) has_mismatch_ = true;
        throw;
      }
      states_[*step.tensor].digest = reader.digest();
      bytes_read_ += step.bytes + reader.delta_bytes();
      piece.resize(std::min(step.bytes, fold_bytes));
    }
  }

  const Beginning& begin_;
  const Chain& chain_;
  std::size_t threads_;
  std::size_t at_once_ = 1;
  const Successor& successor_;
  const std::string& local_;
  std::unordered_map<std::string_view, const TensorState*> recorded_;
  std::unordered_set<std::string_view> changed_;
  FileTensors tensors_;  // tensors of the beginning
  FileTensors own_;      // tensors of the new files; only for long chains
  std::size_t own_tensors_ = 0;
  std::vector<TensorState> states_;
  std::vector<Output> outputs_;
  std::vector<Step> steps_;
  std::uint64_t bytes_to_write_ = 0;
  std::uint64_t bytes_linked_ = 0;
  std::atomic<std::uint64_t> bytes_read_{0};
  std::atomic<bool> has_mismatch_{false};
};

class Pull {
 public:
  Pull(const std::string& source, const std::string& local, const PullOptions& options,
       const std::function<void()>& check)
      : source_(source), local_(local_place(local)), options_(options), deadline_(os::Clock::now() + options.wait) {
    check_ = [this, check] {
      if (check) check();
      if (options_.stop.stop_requested())
        throw Error(ErrorKind::cancelled, fmt::format("{}: {}: cancelled by a stop request", in_quotes(local_), doing),
                    {.path = local_});
    };
  }

  PullReport run() {
    const auto begin = std::chrono::steady_clock::now();
    check_apart(local_, source_, "the directory of versions");
    check_apart(local_, options_.base, "the base");
    // A refused directory gets no lock. If there is a lock, another pull may be exchanging the directory right now.
    if (!os::file_status(lock_path(local_))) {
      check_mount(local_);
      check_contents(local_);
    }
    check_();
    // Before the locks are taken: other processes may pull other versions meanwhile.
    wait_for_target(source_, request());
    locks_.emplace(local_, options_.lock_timeout, check_);
    repair(local_);
    check_mount(local_);
    check_contents(local_);
    if (os::file_status(local_)) locks_->take_inner();
    PullReport report = pull();
    report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return report;
  }

 private:
  PullReport pull() {
    LocalCopy copy = read_local_copy(local_);
    std::vector<std::string> notes;
    std::optional<Error> damaged;  // the failure with which LOCAL was given up
    for (int attempt = 1;; ++attempt) {
      std::optional<Chain> chain;
      is_copy_in_doubt_ = false;
      try {
        chain.emplace(find(copy));
        PullReport report = apply(copy, *chain);
        // If the pull fails nevertheless, its error gives the reason.
        if (damaged)
          log(LogLevel::warning, fmt::format("{}: the copy was seeded again: {}", in_quotes(local_), damaged->what()));
        report.notes.insert(report.notes.begin(), notes.begin(), notes.end());
        return report;
      } catch (const Error& error) {
        if (!chain && damaged) throw *damaged;
        const bool is_begun = chain && chain->beginning == Chain::Beginning::local;
        // Other defects of the versions remain if the copy is seeded again.
        const bool is_in_doubt = is_copy_in_doubt_ || !is_inside(error.path(), source_);
        const std::optional<Error> file =
            error.kind() == ErrorKind::corrupt && chain ? damaged_file(*chain, error.what()) : std::nullopt;
        if (file && file->path() != error.path()) throw *file;
        if (error.kind() == ErrorKind::corrupt && is_begun && is_in_doubt && !file) {
          copy.record.reset();
          copy.reason = error.what();
          damaged = error;
        } else if ((error.os_error() == ESTALE || error.os_error() == ENOENT) && attempt < most_attempts &&
                   is_inside(error.path(), source_)) {
          log(LogLevel::info, fmt::format("{}: reading the versions again: {}", in_quotes(local_), error.what()));
        } else {
          throw;
        }
      }
    }
  }

  [[nodiscard]] ChainRequest request() const {
    ChainRequest request;
    request.target = options_.version;
    request.has_base = !options_.base.empty();
    request.base_digest = digest_of_base(options_.base);
    request.wait = std::max(std::chrono::milliseconds(0),
                            std::chrono::ceil<std::chrono::milliseconds>(deadline_ - os::Clock::now()));
    request.check = check_;
    return request;
  }

  Chain find(const LocalCopy& copy) const {
    ChainRequest request = this->request();
    if (copy.record) request.local = {copy.record->version, copy.record->state, copy.record->index_digest};
    return open_chain(source_, request);
  }

  /// Looks for a file of the chain that is not what its publisher wrote, by the digests that Muster records. Returns
  /// the error that names it. After several deltas of a tensor, only the last checksum is compared, so that the error
  /// of a FoldedReader may name a later version.
  [[nodiscard]] std::optional<Error> damaged_file(const Chain& chain, std::string_view noticed) const {
    for (const OpenVersion& delta : chain.deltas) {
      if (!delta.index.own) continue;
      for (const SafetensorsFile& file : delta.files) {
        const auto facts = delta.index.own->files.find(name_of(file));
        if (facts == delta.index.own->files.end()) continue;
        const std::string reading = fmt::format("reading version {}", delta.number());
        try {
          if (digest_of_file(file.path(), [this](std::uint64_t) { check_(); }) == facts->second.digest) continue;
        } catch (const Error& error) {
          if (error.kind() == ErrorKind::cancelled) throw;
          return error.with_context(reading);
        }
        return file_error(ErrorKind::corrupt, reading, file.path(),
                          fmt::format("its bytes are not those that its publisher wrote. Publish a full version, or "
                                      "pull a version that does not need this one. ({})",
                                      noticed));
      }
    }
    return std::nullopt;
  }

  PullReport apply(const LocalCopy& copy, const Chain& chain) {
    PullReport report;
    report.version = chain.target;
    report.previous = copy.version;
    const bool is_local = chain.beginning == Chain::Beginning::local;
    const bool is_synced = options_.durability == PullDurability::synced;
    report.begun_at = is_local                                    ? "local"
                      : chain.beginning == Chain::Beginning::full ? version_name(chain.begin_version)
                                                                  : "base";
    const bool is_there = is_local && chain.deltas.empty();
    if (is_there && (!is_synced || copy.record->durability == PullDurability::synced)) return report;
    report.is_changed = !is_there;
    if (!is_local && copy.version)
      report.notes.push_back(fmt::format("{} was copied as a whole, because {}", report.begun_at, why_not_local(copy)));
    const Beginning begin = open_beginning(chain);
    Successor successor(local_);
    locks_->pass_on(successor.path());
    WeightCopies weights(begin, chain, is_local ? &*copy.record : nullptr, successor, local_);
    weights.plan();
    check_space(weights.bytes_to_write() + extra_bytes(begin));
    os::allow_more_open_files(2 * weights.written_files());
    const ProgressCallback callback = [this](const Progress& progress) {
      check_();
      if (options_.progress) options_.progress(progress);
    };
    ProgressCounter progress(callback, weights.bytes_to_write(), options_.stop);
    progress.add(0);
    copy_others(begin, successor);
    try {
      weights.write(progress, report);
    } catch (const Error&) {
      is_copy_in_doubt_ = weights.has_mismatch();
      throw;
    }
    report.changed_tensors = weights.changed_tensors();
    for (const OpenVersion& delta : chain.deltas) report.applied.push_back(delta.number());
    report.skipped = begin.extras.skipped;
    finish(chain, copy, std::move(weights).states(), begin, successor);
    check_();
    if (std::string note = successor.take_name(local_, is_synced); !note.empty())
      report.notes.push_back(std::move(note));
    return report;
  }

  static std::string why_not_local(const LocalCopy& copy) {
    return copy.record ? fmt::format("the chain cannot begin at the copy of version {}", copy.record->version)
                       : fmt::format("the copy cannot be continued: {}", copy.reason);
  }

  [[nodiscard]] Beginning open_beginning(const Chain& chain) const {
    if (chain.beginning == Chain::Beginning::full) return open_full(*chain.full, options_.base);
    if (chain.beginning == Chain::Beginning::base) return open_base(options_.base);
    Beginning begin = open_model(local_);
    begin.is_local = true;
    return begin;
  }

  [[nodiscard]] static std::uint64_t extra_bytes(const Beginning& begin) {
    std::uint64_t bytes = space_beside_files;
    const auto add = [&](const std::string& directory, const std::vector<std::string>& names) {
      for (const std::string& name : names)
        if (const auto status = os::file_status(join_path(directory, name), os::Links::followed))
          bytes += status->bytes;
    };
    if (!begin.is_local) add(begin.directory, begin.extras.names);
    add(begin.more_extras, begin.more_names);
    return bytes;
  }

  void check_space(std::uint64_t needed) const {
    const std::string parent = os::directory_of(local_);
    const std::optional<os::SpaceFacts> space = os::space_facts(parent);
    if (space && space->free_bytes < needed)
      throw file_error(ErrorKind::out_of_space, doing, local_, words_of_space(needed, space->free_bytes), ENOSPC);
  }

  void copy_others(const Beginning& begin, const Successor& successor) const {
    ExtraCopies extras(successor, check_);
    extras.add(begin.directory, begin.extras.names, begin.is_local);
    extras.add(begin.more_extras, begin.more_names, false);
    if (!begin.index.empty()) extras.add(begin.directory, {begin.index}, begin.is_local);
  }

  /// Compares the digest of all tensors, and writes marker and record.
  void finish(const Chain& chain, const LocalCopy& copy, std::vector<TensorState> tensors, const Beginning& begin,
              const Successor& successor) {
    const OpenVersion* const last = chain.last();
    CopyRecord record;
    record.version = chain.target;
    record.durability = options_.durability;
    record.boot = os::own_identity().boot;
    record.tensors = std::move(tensors);
    record.state = state_digest(record.tensors);
    if (last == nullptr) {
      record.stream = begin.is_local ? copy.record->stream : std::string();
      record.index_digest = begin.is_local ? copy.record->index_digest : digest_of_base(options_.base);
    } else {
      record.index_digest = last->index_digest;
      if (last->index.own) record.stream = last->index.own->stream;
    }
    is_copy_in_doubt_ = last != nullptr && last->index.own && record.state != last->index.own->after;
    if (is_copy_in_doubt_)
      throw file_error(ErrorKind::corrupt, fmt::format("checking version {}", last->number()), last->path,
                       fmt::format("the digest of all tensors is {}, and the version states {}. {}",
                                   digest_text(record.state), digest_text(last->index.own->after),
                                   chain.beginning == Chain::Beginning::full
                                       ? fmt::format("A file of {} is damaged", version_name(chain.begin_version))
                                       : "Pass the base with which the trainer began"));
    for (const SafetensorsFile& file : begin.files)
      record.files.emplace(name_of(file), copied_file(successor.place(name_of(file))));
    const std::string folder = successor.place(std::string(sync_folder));
    write_new(join_path(folder, std::string(marker_name)), marker_text(record.version));
    write_new(join_path(folder, std::string(record_name)), record_text(record));
  }

  static void write_new(const std::string& path, const std::string& text) {
    os::write_new_file(path, std::as_bytes(std::span(text)));
  }

  const std::string& source_;
  std::string local_;
  const PullOptions& options_;
  os::Clock::time_point deadline_;
  std::function<void()> check_;
  std::optional<CopyLocks> locks_;
  bool is_copy_in_doubt_ = false;  ///< checksums did not match
};

}  // namespace

PullReport pull_for(const std::string& source, const std::string& local, const PullOptions& options,
                    const std::function<void()>& check) {
  return Pull(source, local, options, check).run();
}

}  // namespace versions

PullReport pull_version(const std::string& source, const std::string& local, const PullOptions& options) {
  return versions::pull_for(source, local, options, {});
}

}  // namespace muster
