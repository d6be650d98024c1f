// SPDX-License-Identifier: Apache-2.0

#include "src/checkpoint/assembly/assembly.hpp"
#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <unordered_map>
#include "muster/error.hpp"
#include "src/checkpoint/assembly/agreement.hpp"
#include "src/checkpoint/assembly/rank_messages.hpp"
#include "src/core/crc64.hpp"
#include "src/core/thread_pool.hpp"
#include "src/group/error_propagation.hpp"
#include "src/merge/reduce.hpp"
#include "src/os/file.hpp"
#include "src/os/publish.hpp"
#include "src/os/thread.hpp"
#include "src/shm/window_ring.hpp"

namespace muster {
namespace {

constexpr auto progress_interval = std::chrono::milliseconds(100);
// Hosts report a file when they reach the one that is this many files later: by then it is on the disk.
constexpr std::uint32_t files_behind = 2;

constexpr std::uint64_t hashed_at_once = 1 << 20;

/// Returns the bytes of a step if they are contiguous in one tensor that is in memory; otherwise empty.
std::span<const std::byte> bytes_in_memory(const Step& step, const TensorSource& source) {
  if (step.copies.size() != 1 || step.has_gaps != 0 || !step.reductions.empty()) return {};
  const merge::Rectangle& copy = step.copies.front();
  const bool is_contiguous = copy.rows == 1 || (copy.from_stride == copy.bytes && copy.to_stride == copy.bytes);
  if (!is_contiguous || copy.to != 0 || copy.rows * copy.bytes != step.bytes) return {};
  const auto tensor = static_cast<std::size_t>(copy.source);
  if (tensor >= source.tensors().size()) return {};
  const std::span<const std::byte> memory = source.memory(tensor);
  if (copy.from > memory.size() || step.bytes > memory.size() - copy.from) return {};
  return memory.subspan(copy.from, step.bytes);
}

/// The files as one process uses them: opened at its first write, synced and closed after its last. Thread-safe.
class AssemblyFiles {
 public:
  /// `on_stage` receives the number of files, from the first on, that this process has completed, whenever it grows.
  AssemblyFiles(Group& group, const ProcessWork& work, const WrittenCallback& on_written, const ItemSink& sink,
                std::function<void(std::uint32_t)> on_stage)
      : group_(group),
        targets_(work.targets),
        on_written_(on_written),
        sink_(sink),
        on_stage_(std::move(on_stage)),
        files_(work.targets.size()) {
    for (const FileTarget& target : targets_) remainders_.emplace_back(target.ends.size());
    for (const Step& step : work.steps) {
      if (step.kind == StepKind::hash || static_cast<int>(step.writer) != group.rank()) continue;
      ++files_.at(step.file).steps_left;
      if (sink_) turns_.emplace(&step, turns_.size());
    }
    raise_stage();
  }

  /// Writes an item's bytes. Throws Error(out_of_space | io).
  void write(const Step& step, std::span<const std::byte> bytes) {
    if (sink_) return deliver(step, bytes);
    if (const auto target = file(step.file)) {
      target->write_at(step.offset, bytes);
      // Starts writeback, so that the disk is busy while the next bytes are copied, and the sync at the end is short.
      target->start_writeback(step.offset, bytes.size());
    }
    add_remainders(step, bytes);
    if (!on_written_) return;
    const std::uint64_t hash = XXH3_64bits(bytes.data(), bytes.size());
    const std::lock_guard lock(mutex_);
    files_[step.file].parts.push_back({step.offset, bytes.size(), hash});
  }

  /// Must be called after write() of a step. Throws Error(out_of_space | io) if the file's last bytes do not reach the
  /// disk.
  void done_with(const Step& step) {
    FileProgress last;
    {
      const std::lock_guard lock(mutex_);
      FileProgress& file = files_[step.file];
      if (file.steps_left > 1) {
        --file.steps_left;
        return;
      }
      std::swap(last.file, file.file);
      std::swap(last.parts, file.parts);
    }
    if (last.file) {
      last.file->sync();
      last.file->close();
    }
    if (on_written_) on_written_(step.file, last.parts);
    const std::lock_guard lock(mutex_);
    files_[step.file].steps_left = 0;
    raise_stage();
  }

  [[nodiscard]] std::vector<std::vector<std::uint64_t>> take_remainders() { return std::move(remainders_); }

 private:
  // Passes the bytes on when all earlier items of this process were passed on. One thread handles direct items, and
  // another one those of windows. They cannot deadlock: all earlier items come before this one in the common order.
  void deliver(const Step& step, std::span<const std::byte> bytes) {
    const auto has_come = [&, turn = turns_.at(&step)] { return turn_.load() == turn; };
    const auto sleep = [&](std::chrono::nanoseconds longest) {
      std::unique_lock lock(mutex_);
      turn_changed_.wait_for(lock, longest, has_come);
    };
    // A wait of the group, because the process may have packets to forward.
    group_.wait_until(has_come, sleep, {}, {.phase = "export: waiting for an earlier item"});
    sink_(step.file, step.offset, bytes);
    const std::lock_guard lock(mutex_);
    ++turn_;
    turn_changed_.notify_all();
  }

  struct FileProgress {
    std::uint64_t steps_left = 0;
    std::shared_ptr<os::WritableFile> file;
    std::vector<WrittenPart> parts;
  };

  // An item may have bytes of several tensors.
  void add_remainders(const Step& step, std::span<const std::byte> bytes) {
    const std::vector<std::uint64_t>& ends = targets_[step.file].ends;
    std::uint64_t at = step.offset;
    for (auto end = std::ranges::upper_bound(ends, at); end != ends.end() && !bytes.empty(); ++end) {
      const auto part = bytes.first(std::min<std::uint64_t>(bytes.size(), *end - at));
      at += part.size();
      bytes = bytes.subspan(part.size());
      const std::uint64_t remainder = crc64_shifted(crc64_remainder(part), *end - at);
      const std::lock_guard lock(mutex_);
      remainders_[step.file][static_cast<std::size_t>(end - ends.begin())] ^= remainder;
    }
  }

  // Returns null if the target has no place.
  std::shared_ptr<os::WritableFile> file(std::uint32_t number) {
    const std::lock_guard lock(mutex_);
    const FileTarget& target = targets_[number];
    std::shared_ptr<os::WritableFile>& file = files_.at(number).file;
    if (!file && !target.place.empty())
      file = std::make_shared<os::WritableFile>(os::WritableFile::open(target.place, target.name));
    return file;
  }

  void raise_stage() {
    const std::uint32_t before = stage_;
    while (stage_ < files_.size() && files_[stage_].steps_left == 0) ++stage_;
    if (stage_ != before) on_stage_(stage_);
  }

  Group& group_;
  std::span<const FileTarget> targets_;
  WrittenCallback on_written_;
  ItemSink sink_;
  std::unordered_map<const Step*, std::size_t> turns_;  // with a sink: the order of the items of this process
  std::atomic<std::size_t> turn_{0};
  std::condition_variable turn_changed_;
  std::function<void(std::uint32_t)> on_stage_;
  std::mutex mutex_;
  std::vector<FileProgress> files_;
  std::vector<std::vector<std::uint64_t>> remainders_;
  std::uint32_t stage_ = 0;
};

class Assembling {
 public:
  Assembling(Group& group, const ProcessWork& work, const TensorSource& source, const WrittenCallback& on_written,
             const FinishFile& finish, const ItemSink& sink)
      : group_(group::inside(group)),
        work_(work),
        source_(source),
        mail_(group, source, work.window_bytes),
        finish_(finish),
        others_(shm::near_ranks(group)),
        ring_(work.turns == 0 ? 0 : work.depth, work.window_bytes, others_.size()),
        files_(group, work, on_written, sink, [this](std::uint32_t stage) { ring_.set_stage(stage); }) {
    const RankNeighbours neighbours(group_);
    const bool is_first_here = neighbours.above < 0 || !group_.shares_memory(neighbours.above);
    if (is_first_here) above_ = neighbours.above;
    for (const auto& [rank, ranks] : neighbours.below)
      if (!group_.shares_memory(rank)) below_.emplace(rank, WindowMail::StageReport{});
    file_count_ = static_cast<std::uint32_t>(work.targets.size());
    for (const Step& step : work.steps)
      if (step.kind == StepKind::window && static_cast<int>(step.writer) == group.rank()) own_.push_back(&step);
  }

  Assembled run(const std::function<void(std::uint64_t)>& progress) {
    group_.forward_packets();
    if (group_.size() > 1) rings_ = shm::find_rings(group_, others_, ring_, {.phase = "export: finding windows"});
    os::Thread reporter;
    if (progress && group_.rank() == 0)
      attempt([&] {
        reporter =
            os::Thread("the progress of an export", [&](const std::stop_token& stop) { report(stop, progress); });
      });
    if (group_.size() == 1)
      run_alone();
    else
      run_together();
    reporter = {};
    if (progress && group_.rank() == 0) progress(bytes_written());
    return {std::move(hashes_), files_.take_remainders()};
  }

 private:
  [[nodiscard]] const shm::WindowRing& ring(std::uint32_t rank) const {
    return static_cast<int>(rank) == group_.rank() ? ring_ : *rings_.at(rank);
  }

  // If no other process takes part, steps are independent and run on several threads.
  void run_alone() {
    const std::size_t workers = copy_workers();
    std::vector<std::vector<std::byte>> buffers(workers);
    std::mutex finishing;
    parallel_for(work_.steps.size(), workers, [&](std::size_t index, std::size_t worker) {
      const Step& step = work_.steps[index];
      if (step.kind == StepKind::hash)
        hash(step);
      else
        write_directly(step, buffers[worker]);
      if (const std::unique_lock lock(finishing, std::try_to_lock); lock) finish_files(false);
    });
    finish_files(true);
  }

  void run_together() {
    os::Thread writer;
    if (work_.turns != 0)
      attempt([&] { writer = os::Thread("an export", [this] { attempt([this] { write_windows(); }); }); });
    attempt([this] {
      std::vector<std::byte> buffer;
      for (const Step& step : work_.steps) {
        if (step.kind != StepKind::hash) come_to(step.file);
        if (step.kind == StepKind::hash)
          hash(step);
        else if (step.kind == StepKind::direct)
          write_directly(step, buffer);
        else
          contribute(step);
        finish_files(false);
      }
      come_to(file_count_ + files_behind - 1);
      // While the other thread writes, this one must forward the packets of other processes.
      ring_.wait_stage(file_count_, {}, group_, {.phase = "export: writing"});
    });
    writer.join();
    attempt([this] { finish_files(true); });
    if (failure_) throw *failure_;
  }

  // The first failure of this process aborts the group.
  template <class Work>
  void attempt(const Work& work) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
    }
    try {
      const std::optional<Error> failure = group::attempt(group_, work);
      if (!failure) return;
      group_.abort(group::in_own_name(group_, *failure));
    } catch (const Error&) {
      // The failure is another rank's, or that of this process's other thread.
    }
    const std::lock_guard lock(mutex_);
    failure_ = group_.error();
    changed_.notify_all();
  }

  void write_directly(const Step& step, std::vector<std::byte>& buffer) {
    if (const auto bytes = bytes_in_memory(step, source_); !bytes.empty()) {
      files_.write(step, bytes);
      done_with(step);
      return;
    }
    buffer.resize(work_.window_bytes);
    if (step.has_gaps != 0) std::memset(buffer.data(), 0, step.bytes);
    for (const merge::Rectangle& copy : step.copies) read(copy, buffer);
    reduce(step, buffer);
    files_.write(step, std::span(buffer).first(step.bytes));
    done_with(step);
  }

  void contribute(const Step& step) {
    const auto writer = static_cast<int>(step.writer);
    const bool is_own = writer == group_.rank();
    if (!group_.shares_memory(writer)) {
      mail_.contribute(step);
      return;
    }
    const shm::WindowRing& ring = this->ring(step.writer);
    if (!step.copies.empty() || !step.senders.empty())
      ring.claim(step.turn, writer, group_, {.phase = "export: waiting for a window"});
    if (!step.copies.empty()) {
      const std::span<std::byte> window = ring.window(step.turn);
      for (const merge::Rectangle& copy : step.copies) read(copy, window);
      ring.arrive(step.turn);
      group_.progress();
    }
    if (!is_own) return;
    // This must happen before the thread waits for the other parts, because only this thread can receive messages.
    mail_.collect(step, ring.window(step.turn));
    const std::lock_guard lock(mutex_);
    queue_.push_back(&step);
    changed_.notify_all();
  }

  void write_windows() {
    for (std::uint32_t turn = 0; turn < work_.turns; ++turn) {
      const Step* step = nullptr;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return failure_ || !queue_.empty(); });
        if (failure_) return;
        step = queue_.front();
        queue_.pop_front();
      }
      const auto near = step->contributors - static_cast<std::uint32_t>(step->senders.size());
      ring_.wait_full(turn, near, others_, group_, {.phase = "export: waiting for parts of a window"});
      const std::span<std::byte> window = ring_.window(turn);
      reduce(*step, window);
      files_.write(*step, window.first(step->bytes));
      // Zeroes the bytes that no process will copy; a window that was never used is zero already.
      if (turn + work_.depth < work_.turns && own_[turn + work_.depth]->has_gaps != 0)
        std::memset(window.data(), 0, own_[turn + work_.depth]->bytes);
      ring_.release(turn);
      done_with(*step);
    }
  }

  void read(const merge::Rectangle& copy, std::span<std::byte> window) const {
    read_rows(source_, static_cast<std::size_t>(copy.source), 0, copy, window);
  }

  static void reduce(const Step& step, std::span<std::byte> window) {
    for (const ReduceStep& reduction : step.reductions) {
      std::vector<const std::byte*> from;
      for (const std::uint64_t at : reduction.from) from.push_back(window.data() + at);
      merge::reduce(reduction.combine, reduction.dtype, window.subspan(reduction.to, reduction.bytes), from);
    }
  }

  void hash(const Step& step) {
    const TensorHash hash = hash_for(step, source_);
    go_on(group_);
    const std::lock_guard lock(mutex_);
    hashes_.push_back(hash);
  }

  void done_with(const Step& step) {
    ring_.add_progress(step.bytes);
    go_on(group_);
    files_.done_with(step);
  }

  // Step 4, between hosts: the first process of a host reaches a file. It waits until its host and the hosts below have
  // completed all files up to `files_behind` earlier. Then it reports them.
  void come_to(std::uint32_t file) {
    for (; file >= files_behind && settled_ <= file - files_behind && settled_ < file_count_; ++settled_) {
      for (auto& [rank, stage] : below_) take_stage(rank, stage);
      if (above_ < 0) continue;
      // The writer thread of each process completes the file, and enforces the deadlines.
      const WaitOptions wait{.phase = "export: completing a file"};
      ring_.wait_stage(settled_ + 1, {}, group_, wait);
      for (const int other : others_)
        ring(static_cast<std::uint32_t>(other)).wait_stage(settled_ + 1, std::span(&other, 1), group_, wait);
      mail_.tell_stage(above_, {settled_ + 1, bytes_written()});
    }
  }

  void take_stage(int rank, WindowMail::StageReport& stage) {
    const WindowMail::StageReport told = mail_.hear_stage(rank);
    if (told.files != settled_ + 1)
      throw Error(ErrorKind::corrupt, fmt::format("rank {} is at a different file than expected", rank),
                  {.rank = rank});
    bytes_below_ += told.bytes - stage.bytes;
    stage = told;
  }

  // Step 5, on process 0. `all`: also waits for files that are not complete yet.
  void finish_files(bool all) {
    if (group_.rank() != 0) return;
    const WaitOptions wait{.phase = "export: waiting for a file to be complete"};
    for (; finished_ < file_count_; ++finished_) {
      if (!below_.empty() && settled_ <= finished_) return;
      if (ring_.stage() <= finished_) {
        if (!all) return;
        ring_.wait_stage(finished_ + 1, {}, group_, wait);
      }
      for (const int other : others_) {
        const shm::WindowRing& ring = this->ring(static_cast<std::uint32_t>(other));
        if (ring.stage() > finished_) continue;
        if (!all) return;
        ring.wait_stage(finished_ + 1, std::span(&other, 1), group_, wait);
      }
      finish_(finished_);
      group_.progress();
    }
  }

  // Of this host and the hosts below.
  [[nodiscard]] std::uint64_t bytes_written() const {
    std::uint64_t sum = ring_.progress() + bytes_below_.load();
    for (const int rank : others_) sum += ring(static_cast<std::uint32_t>(rank)).progress();
    return sum;
  }

  void report(const std::stop_token& stop, const std::function<void(std::uint64_t)>& progress) {
    std::mutex mutex;
    std::condition_variable_any bell;
    std::unique_lock lock(mutex);
    while (!bell.wait_for(lock, stop, progress_interval, [&] { return stop.stop_requested(); }))
      progress(bytes_written());
  }

  group::BaseGroup& group_;
  const ProcessWork& work_;
  const TensorSource& source_;
  WindowMail mail_;
  const FinishFile& finish_;
  std::vector<int> others_;  // processes that share memory with this one
  shm::WindowRing ring_;
  AssemblyFiles files_;
  // The first process of the host above in the tree of hosts, and those of the hosts below with their last reports. Set
  // on the first process of a host.
  int above_ = -1;
  std::map<int, WindowMail::StageReport> below_;
  std::atomic<std::uint64_t> bytes_below_{0};
  std::uint32_t settled_ = 0;     // number of files that are known to be complete on all hosts below
  std::vector<const Step*> own_;  // items of its own windows, by turn
  std::uint32_t file_count_ = 0;
  std::vector<std::unique_ptr<shm::WindowRing>> rings_;
  std::vector<TensorHash> hashes_;
  std::uint32_t finished_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<const Step*> queue_;  // own windows whose turn has come
  std::optional<Error> failure_;
};

}  // namespace

FileTarget grow_file(const std::string& directory, const FilePlan& file) {
  FileTarget target{directory + "/" + file.name, {}};
  target.place = os::partial_name(target.name);
  os::WritableFile growing = os::WritableFile::create(target.place, target.name);
  growing.reserve(file.bytes);
  growing.close();
  return target;
}

void finish_file(const FilePlan& file, const FileTarget& target) {
  os::WritableFile growing = os::WritableFile::open(target.place, target.name);
  growing.write_at(0, std::as_bytes(std::span(file.header)));
  growing.sync();
  growing.close();
  os::rename_to_new(target.place, target.name);
}

TensorHash hash_for(const Step& step, const TensorSource& source) {
  merge::Rectangle part = step.copies.at(0);
  const auto tensor = static_cast<std::size_t>(part.source);
  const std::uint64_t size = source.tensors()[tensor].bytes;
  if (part.bytes == 0) part.bytes = size - part.from;
  if (size != 0) check_extent(part.from, part.from_stride, part, size);
  const std::span<const std::byte> whole = source.memory(tensor);
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  std::vector<std::byte> memory;
  for (std::uint64_t row = 0; row < part.rows; ++row) {
    const std::uint64_t begin = part.from + row * part.from_stride;
    for (std::uint64_t at = begin; at < begin + part.bytes; at += hashed_at_once) {
      const std::uint64_t length = std::min(begin + part.bytes - at, hashed_at_once);
      const std::span<const std::byte> piece =
          whole.empty() ? source.read_piece(tensor, at, length, memory) : whole.subspan(at, length);
      XXH3_128bits_update(&state, piece.data(), piece.size());
    }
  }
  const XXH128_hash_t digest = XXH3_128bits_digest(&state);
  return {step.file, static_cast<std::uint32_t>(tensor), digest.low64, digest.high64};
}

Assembled assemble(Group& group, const ProcessWork& work, const TensorSource& source, const WrittenCallback& on_written,
                   const FinishFile& finish, const std::function<void(std::uint64_t)>& progress, const ItemSink& sink) {
  return Assembling(group, work, source, on_written, finish, sink).run(progress);
}

namespace {

enum class MailKind : std::uint32_t { word = 1, rows = 2, stage = 3 };

/// The header of every message.
struct MailHead {
  MailKind kind = MailKind::word;
  std::uint32_t turn = 0;   // index of the writer's window; for a stage: number of files
  std::uint64_t bytes = 0;  // for a stage
  std::uint32_t is_last = 0;
  std::uint32_t reserved = 0;
};

template <class T>
T head_of(std::span<const std::byte> bytes) {
  T head;
  if (bytes.size() < sizeof head) throw Error(ErrorKind::corrupt, "malformed message about windows: it is too short");
  std::memcpy(&head, bytes.data(), sizeof head);
  return head;
}

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

[[noreturn]] void refuse_mail(int from) {
  throw Error(ErrorKind::corrupt, fmt::format("rank {} sent a message other than the expected part of a window", from),
              {.rank = from});
}

MailHead take_head(std::span<const std::byte> message, MailKind kind, int from) {
  const auto head = head_of<MailHead>(message);
  if (head.kind != kind) refuse_mail(from);
  return head;
}

/// Copies the rows of a message into a window. Each rectangle is followed by its rows.
void place_rows(std::span<const std::byte> message, std::span<std::byte> window) {
  while (!message.empty()) {
    const auto rows = head_of<merge::Rectangle>(message);
    message = message.subspan(sizeof rows);
    check_extent(0, rows.bytes, rows, message.size());
    check_extent(rows.to, rows.to_stride, rows, window.size());
    for (std::uint64_t row = 0; row < rows.rows; ++row)
      std::memcpy(window.data() + rows.to + row * rows.to_stride, message.data() + row * rows.bytes, rows.bytes);
    message = message.subspan(rows.rows * rows.bytes);
  }
}

}  // namespace

WindowMail::WindowMail(Group& group, const TensorSource& source, std::uint64_t window_bytes)
    : group_(group::inside(group)), source_(source), piece_bytes_(piece_bytes(window_bytes)) {}

void WindowMail::contribute(const Step& step) {
  const auto writer = static_cast<int>(step.writer);
  const auto word =
      group_.receive(writer, sizeof(MailHead), {.phase = "export: waiting for a window"}, group::Subject::exchange);
  if (take_head(word, MailKind::word, writer).turn != step.turn) refuse_mail(writer);
  for (const merge::Rectangle& copy : step.copies) pack(copy, step.turn, writer);
  send_piece(step.turn, writer, true);
}

void WindowMail::collect(const Step& step, std::span<std::byte> window) {
  const MailHead word{.kind = MailKind::word, .turn = step.turn};
  for (const std::uint32_t sender : step.senders)
    group_.send(static_cast<int>(sender), bytes_of(word), {.phase = "export: requesting parts of a window"},
                group::Subject::exchange);
  for (const std::uint32_t sender : step.senders)
    while (!take_piece(static_cast<int>(sender), step.turn, window)) {
    }
}

void WindowMail::tell_stage(int above, const StageReport& stage) {
  const MailHead head{.kind = MailKind::stage, .turn = stage.files, .bytes = stage.bytes};
  group_.send(above, bytes_of(head), {.phase = "export: reporting complete files"}, group::Subject::exchange);
}

WindowMail::StageReport WindowMail::hear_stage(int from) {
  const auto message = group_.receive(from, sizeof(MailHead), {.phase = "export: waiting for a file to be complete"},
                                      group::Subject::exchange);
  const MailHead head = take_head(message, MailKind::stage, from);
  return {head.turn, head.bytes};
}

// Packs as many whole rows as fit; a row that is longer than a message is sent in parts.
void WindowMail::pack(const merge::Rectangle& copy, std::uint32_t turn, int writer) {
  const std::uint64_t longest = piece_bytes_;
  for (std::uint64_t row = 0; row < copy.rows;) {
    const std::uint64_t at_once =
        copy.bytes > longest ? 1 : std::min(copy.rows - row, longest / std::max<std::uint64_t>(copy.bytes, 1));
    for (std::uint64_t inside = 0; inside < copy.bytes; inside += longest) {
      merge::Rectangle part = copy;
      part.from += row * copy.from_stride + inside;
      part.to = 0;
      part.bytes = std::min(copy.bytes - inside, longest);
      part.to_stride = part.bytes;
      part.rows = at_once;
      merge::Rectangle head = part;
      head.to = copy.to + row * copy.to_stride + inside;
      head.to_stride = copy.to_stride;
      const std::uint64_t length = part.bytes * part.rows;
      if (piece_.size() > sizeof(MailHead) && piece_.size() + sizeof head + length > sizeof(MailHead) + longest)
        send_piece(turn, writer, false);
      if (piece_.empty()) piece_.resize(sizeof(MailHead));
      const auto opening = bytes_of(head);
      piece_.insert(piece_.end(), opening.begin(), opening.end());
      const std::size_t at = piece_.size();
      piece_.resize(at + length);
      read_rows(source_, static_cast<std::size_t>(part.source), 0, part, std::span(piece_).subspan(at));
    }
    row += at_once;
  }
}

void WindowMail::send_piece(std::uint32_t turn, int writer, bool is_last) {
  const MailHead head{.kind = MailKind::rows, .turn = turn, .is_last = is_last ? 1U : 0U};
  if (piece_.empty()) piece_.resize(sizeof head);
  std::memcpy(piece_.data(), &head, sizeof head);
  group_.send(writer, piece_, {.phase = "export: sending parts of a window"}, group::Subject::exchange);
  piece_.clear();
  group_.progress();
}

bool WindowMail::take_piece(int from, std::uint32_t turn, std::span<std::byte> window) {
  const std::uint64_t most = sizeof(MailHead) + sizeof(merge::Rectangle) + piece_bytes_;
  const auto message =
      group_.receive(from, most, {.phase = "export: waiting for parts of a window"}, group::Subject::exchange);
  const MailHead head = take_head(message, MailKind::rows, from);
  if (head.turn != turn) refuse_mail(from);
  place_rows(std::span(message).subspan(sizeof head), window);
  group_.progress();
  return head.is_last != 0;
}

}  // namespace muster
