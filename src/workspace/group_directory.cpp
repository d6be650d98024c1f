// SPDX-License-Identifier: Apache-2.0

#include "src/workspace/group_directory.hpp"
#include "src/base/escaped.hpp"

#include <fmt/core.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <string_view>

#include "muster/log.hpp"
#include "src/base/fixed_string.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {
namespace {

using Clock = os::Clock;
using std::chrono::milliseconds;

// The group fails if the directory cannot be listed for this long.
constexpr auto longest_trouble = std::chrono::seconds(5);
// The destructor waits at most this long for a thread that hangs in a call to a server that does not answer.
constexpr auto longest_end = std::chrono::seconds(3);

/// Blocks signals in the new thread: only the program's own threads handle them.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked& operator=(SignalsBlocked&&) = delete;

 private:
  sigset_t before_{};
};

constexpr std::chrono::milliseconds fresh_enough{20};
using WrittenFailure = WrittenError<3072>;

}  // namespace

Snapshot::Snapshot(std::vector<std::string> names) : names_(std::move(names)) {
  std::ranges::sort(names_);
}

bool Snapshot::has(std::string_view name) const {
  return std::ranges::binary_search(names_, name, {}, [](const std::string& own) { return std::string_view(own); });
}

std::string Snapshot::first(std::string_view prefix) const {
  const auto found = with_prefix(prefix);
  return found.empty() ? "" : found.front();
}

std::span<const std::string> Snapshot::with_prefix(std::string_view prefix) const {
  const auto begin =
      std::ranges::lower_bound(names_, prefix, {}, [](const auto& own) { return std::string_view(own); });
  const auto end = std::find_if_not(begin, names_.end(), [&](const auto& own) { return own.starts_with(prefix); });
  return {begin, end};
}

FilePeers::FilePeers(int self, std::span<const GroupMember> members, milliseconds heartbeat, milliseconds lost_after)
    : self_(self), heartbeat_(heartbeat), lost_after_(lost_after), heard_(members.size()) {
  std::vector<RankInfo> infos;
  for (const GroupMember& member : members) {
    infos.push_back(member.info);
    identities_.push_back(member.identity);
    const bool is_here = os::life_of(member.identity) != os::Life::unknown;
    is_here_.push_back(is_here);
    pidfds.push_back(is_here ? std::make_shared<const os::Fd>(os::open_pidfd(static_cast<pid_t>(member.identity.pid)))
                             : nullptr);
    // If the process ended before this point, another process may have its number.
    if (is_here && os::life_of(member.identity) == os::Life::dead) pidfds.back() = nullptr;
  }
  ranks = group::RankTable::make(std::move(infos));
}

bool FilePeers::is_dead_here(int rank) const {
  const auto at = static_cast<std::size_t>(rank);
  if (!is_here_[at] || rank == self_) return false;
  return pidfds[at] && *pidfds[at] ? os::has_exited(*pidfds[at]) : os::life_of(identities_[at]) == os::Life::dead;
}

std::optional<std::string> FilePeers::end_of(int rank) const {
  if (is_dead_here(rank)) return "died";
  if (is_here_[static_cast<std::size_t>(rank)]) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const milliseconds silent = heard_[static_cast<std::size_t>(rank)].silent;
  if (silent <= lost_after_) return std::nullopt;
  return fmt::format("has been silent for {:.1f} s", std::chrono::duration<double>(silent).count());
}

std::string FilePeers::state_of(int rank) const {
  if (is_here_[static_cast<std::size_t>(rank)]) return is_dead_here(rank) ? "dead" : Peers::state_of(rank);
  const std::lock_guard lock(mutex_);
  const milliseconds silent = heard_[static_cast<std::size_t>(rank)].silent;
  if (silent < 3 * heartbeat_) return "alive";
  return fmt::format("silent for {:.1f} s", std::chrono::duration<double>(silent).count());
}

void FilePeers::hear(const Snapshot& snapshot) {
  const std::lock_guard lock(mutex_);
  // This process lists at least once per heartbeat. If it has not, it was stopped, and the others may have been
  // stopped, too.
  const auto now = std::chrono::steady_clock::now();
  const auto passed = std::min(std::chrono::duration_cast<milliseconds>(now - listened_), heartbeat_);
  if (passed == milliseconds::zero()) return;
  listened_ = passed == heartbeat_ ? now : listened_ + passed;
  for (int rank = 0; rank < static_cast<int>(heard_.size()); ++rank) {
    Heard& heard = heard_[static_cast<std::size_t>(rank)];
    const auto beats = snapshot.with_prefix(beat_prefix(rank));
    // During a rename a listing may show both names, or neither.
    const bool is_new = !beats.empty() && beats.back() != heard.beat;
    if (is_new) heard.beat = beats.back();
    heard.silent = is_new ? milliseconds::zero() : heard.silent + passed;
  }
}

GroupDirectory::GroupDirectory(Options options, std::vector<GroupMember> members)
    : options_(std::move(options)),
      members_(std::move(members)),
      peers_(options_.rank, members_, options_.heartbeat, options_.lost_after),
      reserve_(os::open_directory(options_.path)) {}

template <class Work>
auto GroupDirectory::with_reserve(const Work& work) const {
  try {
    return work();
  } catch (const Error& error) {
    if (error.os_error() != EMFILE && error.os_error() != ENFILE) throw;
  }
  const std::lock_guard lock(reserve_mutex_);
  reserve_.reset();
  struct Refill {
    const GroupDirectory& directory;
    ~Refill() {
      try {
        directory.reserve_ = os::open_directory(directory.options_.path);
      } catch (const std::exception&) {
        // Another thread has taken the released descriptor. The next shortage is an error.
      }
    }
  } const refill{*this};
  return work();
}

std::shared_ptr<const Snapshot> GroupDirectory::look(bool with_probe, bool is_heartbeat) {
  std::shared_ptr<const Snapshot> fresh;
  try {
    std::vector<std::string> names;
    with_reserve([&] {
      if (with_probe) refresh(options_.path);
      for (os::DirectoryEntry& entry : os::list_directory(options_.path)) names.push_back(std::move(entry.name));
    });
    fresh = std::make_shared<const Snapshot>(std::move(names));
  } catch (const Error& error) {
    const std::lock_guard lock(mutex_);
    if (!trouble_since_) trouble_since_ = Clock::now();
    if (Clock::now() - *trouble_since_ > longest_trouble)
      throw error.with_context("listing the directory of the file group");
    return snapshot_;
  }
  peers_.hear(*fresh);
  std::vector<std::shared_ptr<Watcher>> watchers;
  {
    const std::lock_guard lock(mutex_);
    trouble_since_.reset();
    snapshot_ = fresh;
    looked_ = std::chrono::steady_clock::now();
    std::erase_if(watchers_, [](const auto& watcher) { return watcher.expired(); });
    for (const auto& watcher : watchers_)
      if (auto owned = watcher.lock()) watchers.push_back(std::move(owned));
  }
  for (const auto& watcher : watchers) watcher->notice(*fresh, is_heartbeat);
  return fresh;
}

std::shared_ptr<const Snapshot> GroupDirectory::recent(milliseconds longest_ago) {
  {
    const std::lock_guard lock(mutex_);
    if (std::chrono::steady_clock::now() - looked_ <= longest_ago) return snapshot_;
  }
  return look();
}

void GroupDirectory::watch(std::weak_ptr<Watcher> watcher) {
  const std::lock_guard lock(mutex_);
  watchers_.push_back(std::move(watcher));
}

void GroupDirectory::beat() {
  renew(numbered(beat_prefix(options_.rank), beats_), numbered(beat_prefix(options_.rank), beats_ + 1));
  ++beats_;
  look(false, true);
}

void GroupDirectory::publish(const std::string& name, std::span<const std::byte> bytes) {
  if (!bytes.empty()) return with_reserve([&] { os::publish(path_of(name), bytes, growing_name()); });
  // An empty file is complete as soon as it exists.
  try {
    with_reserve([&] { os::write_new_file(path_of(name), {}); });
  } catch (const Error& error) {
    // No other process makes this file, so a lost reply made the client repeat the request.
    if (error.os_error() != EEXIST) throw;
  }
}

bool GroupDirectory::publish_first(const std::string& name, std::span<const std::byte> bytes) {
  return with_reserve([&] { return os::publish_first(path_of(name), bytes, growing_name()); });
}

std::vector<std::byte> GroupDirectory::read(const std::string& name, std::uint64_t bytes, milliseconds timeout) const {
  std::vector<std::byte> whole;
  if (bytes == 0) return whole;
  const std::string path = path_of(name);
  patiently(path, {.deadline = Clock::now() + timeout}, [&] {
    whole = with_reserve([&] { return os::read_small_file(path, bytes); });
    if (whole.size() != bytes)
      throw file_error(ErrorKind::corrupt, "", path,
                       fmt::format("truncated message: {} of {} bytes present", whole.size(), bytes));
  });
  return whole;
}

void GroupDirectory::renew(const std::string& from, const std::string& to) const {
  try {
    os::rename_file(path_of(from), path_of(to));
  } catch (const Error& error) {
    if (error.os_error() != ENOENT) throw;
    // The file never existed, or a request whose reply was lost has renamed it.
    if (!os::file_status(path_of(to))) with_reserve([&] { os::write_new_file(path_of(to), {}); });
  }
}

void GroupDirectory::remove(const std::string& name) const noexcept {
  try {
    os::remove_file(path_of(name));
  } catch (const std::exception&) {
    // The file is removed with the directory.
  }
}

struct Heart::HeartState {
  std::mutex mutex;
  std::condition_variable changed;
  bool end_wanted = false;
  bool ended = false;
};

void Heart::run(GroupDirectory& directory, HeartState& shared) {
  bool is_well = true;
  std::unique_lock lock(shared.mutex);
  while (!shared.end_wanted) {
    lock.unlock();
    try {
      directory.beat();
      is_well = true;
    } catch (const std::exception& error) {
      // Other ranks notice the silence; this rank's own waits report the cause.
      if (is_well)
        log(LogLevel::warning, fmt::format("rank {}: heartbeat: {}", directory.options().rank, error.what()));
      is_well = false;
    }
    lock.lock();
    shared.changed.wait_for(lock, directory.options().heartbeat, [&] { return shared.end_wanted; });
  }
  shared.ended = true;
  shared.changed.notify_all();
}

Heart::Heart(std::shared_ptr<GroupDirectory> directory)
    : directory_(std::move(directory)), shared_(std::make_shared<HeartState>()) {
  directory_->beat();
  const SignalsBlocked blocked;
  thread_ = os::Thread("the heartbeat", [directory = directory_, shared = shared_] { run(*directory, *shared); });
}

Heart::~Heart() {
  if (!thread_.is_started() || thread_.is_of_other_process()) return;
  {
    std::unique_lock lock(shared_->mutex);
    shared_->end_wanted = true;
    shared_->changed.notify_all();
    if (!shared_->changed.wait_for(lock, longest_end, [&] { return shared_->ended; })) {
      thread_.detach();
      return;
    }
  }
  thread_.join();
  try {
    const GroupDirectory::Options& options = directory_->options();
    directory_->publish(gone_name(options.rank), {});
    const auto all = directory_->look(options.is_network);
    for (int rank = 0; rank < static_cast<int>(directory_->members().size()); ++rank)
      if (!all->has(gone_name(rank)) && !directory_->peers().is_dead_here(rank)) return;
    remove_group_directory(options.path);
  } catch (const std::exception&) {
    // The next clean-up removes it.
  }
}

void remove_group_directory(const std::string& path) noexcept {
  try {
    // Repeats the removal: a process that learns late of the end may have added a file in the meantime.
    for (int turn = 0; turn < 3; ++turn) {
      for (const os::DirectoryEntry& entry : os::list_directory(path))
        if (!entry.is_directory && is_group_file(entry.name)) os::remove_file(path + "/" + entry.name);
      if (os::remove_empty_directory(path)) return;
    }
  } catch (const std::exception&) {
    // The next clean-up removes it.
  }
}

GroupPulse::GroupPulse(std::shared_ptr<GroupDirectory> directory, int group, int self)
    : directory_(std::move(directory)), group_(group), self_(self) {}

std::shared_ptr<GroupPulse> GroupPulse::create(std::shared_ptr<GroupDirectory> directory, int group, int self) {
  std::shared_ptr<GroupPulse> pulse(new GroupPulse(std::move(directory), group, self));
  pulse->directory_->watch(pulse);
  return pulse;
}

void GroupPulse::notice(const Snapshot& snapshot, bool is_heartbeat) {
  if (!has_failure() && snapshot.has(failed_name(group_))) load_failure();
  if (!is_heartbeat) return;
  publish_own();
  std::optional<Error> untold;
  {
    const std::lock_guard lock(failure_mutex_);
    if (is_untold_) untold = failure_;
  }
  if (untold) publish_failure(*untold);
}

void GroupPulse::publish_own() {
  const std::lock_guard lock(own_mutex_);
  PulseName now;
  now.progress = progress_.load(std::memory_order_relaxed);
  now.awaited = awaited_.load(std::memory_order_relaxed);
  now.phase = phase_.load(std::memory_order_relaxed);
  now.number = published_ ? published_->number + 1 : 0;
  if (published_ && published_->progress == now.progress && published_->awaited == now.awaited &&
      published_->phase == now.phase)
    return;
  const std::string name = pulse_name(group_, self_, now);
  directory_->renew(published_ ? pulse_name(group_, self_, *published_) : name, name);
  published_ = now;
}

PulseName GroupPulse::pulse_of(int rank) const {
  const std::string prefix = pulse_prefix(group_, rank);
  PulseName newest;
  // During a rename a listing may show both names, or neither.
  const auto all = directory_->recent(fresh_enough);
  for (const std::string& name : all->with_prefix(prefix))
    if (auto pulse = pulse_behind(name, prefix); pulse && pulse->number >= newest.number) newest = std::move(*pulse);
  return newest;
}

bool GroupPulse::has_left(int rank) const {
  return directory_->recent(fresh_enough)->has(left_name(group_, rank));
}

std::uint64_t GroupPulse::progress_of(int rank) const {
  return rank == self_ ? progress_.load(std::memory_order_relaxed) : pulse_of(rank).progress;
}

std::uint32_t GroupPulse::awaited_by(int rank) const {
  return rank == self_ ? awaited_.load(std::memory_order_relaxed) : pulse_of(rank).awaited;
}

void GroupPulse::tell_awaited(int self, std::uint32_t awaited) noexcept {
  if (self == self_) awaited_.store(awaited, std::memory_order_relaxed);
}

std::string GroupPulse::phase(int rank) const {
  if (rank == self_) return phase_.load(std::memory_order_relaxed);
  std::string phase = pulse_of(rank).phase;
  return phase.empty() ? group::between_calls : phase;
}

void GroupPulse::set_failure(const Error& cause) noexcept {
  const std::lock_guard lock(failure_mutex_);
  if (failure_) return;
  failure_ = cause;
  has_failure_.store(true, std::memory_order_release);
}

void GroupPulse::load_failure() {
  std::optional<Error> loaded;
  try {
    WrittenFailure written;
    const auto bytes = directory_->read(failed_name(group_), sizeof written, std::chrono::seconds(2));
    std::memcpy(&written, bytes.data(), sizeof written);
    loaded = written.get();
  } catch (const std::exception& error) {
    loaded =
        Error(ErrorKind::peer_lost, std::string("a rank has failed, and its error cannot be read: ") + error.what());
  }
  set_failure(*loaded);
}

void GroupPulse::publish_failure(const Error& cause) {
  WrittenFailure written;
  written.put(cause);
  // If another rank was first, its cause applies to all ranks.
  if (!directory_->publish_first(failed_name(group_), std::as_bytes(std::span(&written, 1))))
    load_failure();
  else
    set_failure(cause);
  const std::lock_guard lock(failure_mutex_);
  is_untold_ = false;
}

void GroupPulse::abort(const Error& cause) noexcept {
  if (has_failure()) return;
  try {
    publish_failure(cause);
  } catch (const std::exception&) {
    set_failure(cause);
    const std::lock_guard lock(failure_mutex_);
    is_untold_ = true;
  }
}

std::optional<Error> GroupPulse::error() const {
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

}  // namespace muster::workspace
