// SPDX-License-Identifier: Apache-2.0
#include "src/workspace/file_group.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

#include "muster/workspace.hpp"
#include "src/os/process.hpp"
#include "src/sync/failing.hpp"
#include "src/sync/registered.hpp"
#include "src/sync/settings.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using sync::fail;
using sync::or_fail;
using sync::Watchdog;

// How much later than a rank's end its last files may be seen on a network file system, with probes.
constexpr milliseconds longest_delay{500};

std::vector<RankInfo> infos_of(const GroupDirectory& directory, std::span<const int> members) {
  std::vector<RankInfo> infos;
  for (const int member : members) infos.push_back(directory.members()[static_cast<std::size_t>(member)].info);
  return infos;
}

}  // namespace

/// The job's ranks that a group has, by their numbers in the group.
class FileGroup::Members final : public sync::Peers {
 public:
  Members(std::shared_ptr<const GroupDirectory> directory, std::vector<int> members)
      : directory_(std::move(directory)), members_(std::move(members)) {
    ranks = infos_of(*directory_, members_);
  }
  /// Its number in the job.
  [[nodiscard]] int operator[](int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] std::optional<std::string> end_of(int rank) const override {
    return directory_->peers().end_of((*this)[rank]);
  }
  [[nodiscard]] std::string state_of(int rank) const override { return directory_->peers().state_of((*this)[rank]); }

 private:
  std::shared_ptr<const GroupDirectory> directory_;
  std::vector<int> members_;
};

namespace {

class FileLiveness final : public sync::PeerLiveness {
 public:
  FileLiveness(std::shared_ptr<const sync::Peers> members, int rank) : members_(std::move(members)), rank_(rank) {}
  [[nodiscard]] bool is_dead() const noexcept override {
    try {
      return members_->end_of(rank_).has_value();
    } catch (const std::exception&) {
      return false;
    }
  }

 private:
  std::shared_ptr<const sync::Peers> members_;
  int rank_;
};

}  // namespace

auto FileGroup::in_phase(const WaitOptions& options) {
  return sync::InPhase([this](const char* words) { pulse_->set_phase(words); }, options.phase);
}

FileGroup::FileGroup(std::shared_ptr<Heart> heart, std::vector<int> members, int rank,
                     std::shared_ptr<GroupPulse> parent, int number, Nonce nonce, milliseconds timeout)
    : sync::Group(rank, infos_of(*heart->directory(), members), nonce, timeout),
      heart_(std::move(heart)),
      directory_(heart_->directory()),
      members_(std::make_shared<const Members>(directory_, std::move(members))),
      parent_(std::move(parent)),
      pulse_(GroupPulse::create(directory_, number, rank)),
      number_(number) {}

FileGroup::~FileGroup() {
  // A forked child's copy goes silently: its parent is still in the group.
  if (!is_owner_process()) {
    heart_->abandon();
    return;
  }
  try {
    directory_->publish(left_name(number_, rank()), {});
    if (number_ == 0) return;
    // The last one out takes the group's files along; those of the first group go with the directory.
    const auto all = directory_->look(directory_->options().is_network);
    for (int rank = 0; rank < size(); ++rank)
      if (!all->has(left_name(number_, rank))) return;
    for (const std::string& name : all->with_prefix(group_prefix(number_))) directory_->remove(name);
  } catch (const std::exception&) {
    // The others see that this process ends.
  }
}

milliseconds FileGroup::timeout_of(const WaitOptions& options) const {
  return sync::timeout_of(options.timeout, timeout());
}

Watchdog FileGroup::watchdog(const WaitOptions& options) const {
  // Progress is told by heartbeats: what a rank did just now is known here two of them later.
  return {*pulse_, parent_.get(), *members_,
          rank(),  options,       timeout_of(options) + 2 * directory_->options().heartbeat};
}

std::optional<Error> FileGroup::failure() const {
  try {
    // Looks for a failure that others have told since.
    (void)directory_->recent(directory_->options().is_network ? milliseconds(500) : milliseconds(20));
  } catch (const Error& error) {
    pulse_->poison(error);
  }
  if (auto own = pulse_->failure()) return own;
  return parent_ ? parent_->failure() : std::nullopt;
}

std::shared_ptr<const sync::PeerLiveness> FileGroup::liveness(int rank) const {
  (void)info(rank);
  return std::make_shared<FileLiveness>(members_, rank);
}

std::shared_ptr<const Snapshot> FileGroup::look(bool with_probe) {
  return or_fail(*this, [&] { return directory_->look(with_probe); });
}

template <class Done, class Needed, class Awaited>
void FileGroup::wait(const WaitOptions& options, const Done& done, const Needed& needed, const Awaited& awaited) {
  const bool is_network = directory_->options().is_network;
  Pauses pauses(is_network);
  Watchdog watchdog = this->watchdog(options);
  // What a rank did before it ended may come to be seen after its end.
  const auto is_done_after_all = [&] {
    const Clock::time_point end = Clock::now() + (is_network ? longest_delay : milliseconds(0));
    for (;;) {
      if (done(*look(is_network))) return true;
      if (Clock::now() >= end) return false;
      std::this_thread::sleep_for(Watchdog::slice);
    }
  };
  while (!done(*look(is_network && pauses.is_patient()))) {
    watchdog.check(is_done_after_all, needed, awaited);
    pauses.sleep();
  }
}

std::vector<std::byte> FileGroup::round(std::span<const std::byte> record, const WaitOptions& options) {
  const auto phase = in_phase(options);
  const std::uint64_t number = ++round_;
  std::vector<std::byte> all;
  if (rank() == 0) {
    all = collect(number, record, options);
  } else {
    or_fail(*this, [&] { directory_->publish(round_name(number_, number, rank(), record.size()), record); });
    all = wait_for_all(number, record.size(), options);
  }
  progress();
  return all;
}

std::vector<std::byte> FileGroup::collect(std::uint64_t number, std::span<const std::byte> record,
                                          const WaitOptions& options) {
  std::vector<std::byte> all(record.size() * static_cast<std::size_t>(size()));
  if (!record.empty()) std::memcpy(all.data(), record.data(), record.size());
  std::vector<std::string> names(static_cast<std::size_t>(size()));
  const auto is_missing = [&](int rank) { return rank != 0 && names[static_cast<std::size_t>(rank)].empty(); };
  const auto is_complete = [&](const Snapshot& snapshot) {
    bool complete = true;
    for (int rank = 1; rank < size(); ++rank) {
      std::string& name = names[static_cast<std::size_t>(rank)];
      if (const auto found = snapshot.with_prefix(round_prefix(number_, number, rank)); !found.empty())
        name = found.front();
      complete = complete && !name.empty();
    }
    return complete;
  };
  bool is_told = false;
  const auto is_awaited = [&](int rank) {
    // The others name whom they miss by the names that are there: once a wait is long, this rank's as well.
    if (!is_told) {
      is_told = true;
      or_fail(*this, [&] { directory_->publish(round_name(number_, number, 0, record.size()), {}); });
    }
    return is_missing(rank);
  };
  wait(
      options, is_complete, [](int) { return true; }, is_awaited);
  for (int rank = 1; rank < size(); ++rank) {
    const std::string& name = names[static_cast<std::size_t>(rank)];
    const auto length = number_behind(name, round_prefix(number_, number, rank));
    if (length != record.size())
      fail(*this,
           Error(ErrorKind::rank_mismatch,
                 fmt::format("in '{}' rank {} gave {} bytes and rank {} gave {}: the ranks are in different calls",
                             options.phase, info(0).rank, record.size(), info(rank).rank, length.value_or(0)),
                 {.rank = info(rank).rank}));
    const auto bytes = or_fail(*this, [&] { return directory_->read(name, record.size(), timeout_of(options)); });
    std::ranges::copy(bytes, all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(rank) * record.size()));
  }
  const std::string name = all_name(number_, number, record.size());
  or_fail(*this, [&] { directory_->publish(name, all); });
  for (int rank = 1; rank < size(); ++rank) directory_->remove(names[static_cast<std::size_t>(rank)]);
  if (is_told) directory_->remove(round_name(number_, number, 0, record.size()));
  if (!last_all_.empty()) directory_->remove(last_all_);
  last_all_ = name;
  return all;
}

std::vector<std::byte> FileGroup::wait_for_all(std::uint64_t number, std::uint64_t length, const WaitOptions& options) {
  const std::string prefix = all_prefix(number_, number);
  std::string name;
  std::vector<bool> has_come(static_cast<std::size_t>(size()));
  const auto is_there = [&](const Snapshot& snapshot) {
    if (const auto found = snapshot.with_prefix(prefix); !found.empty()) name = found.front();
    for (int rank = 0; name.empty() && rank < size(); ++rank)
      has_come[static_cast<std::size_t>(rank)] = !snapshot.with_prefix(round_prefix(number_, number, rank)).empty();
    return !name.empty();
  };
  const auto is_missing = [&](int rank) {
    const bool all_others = std::count(has_come.begin() + 1, has_come.end(), true) == size() - 1;
    return rank == 0 ? all_others : !has_come[static_cast<std::size_t>(rank)];
  };
  wait(
      options, is_there, [](int) { return true; }, is_missing);
  const std::uint64_t theirs = number_behind(name, prefix).value_or(0);
  if (theirs != length)
    fail(*this, Error(ErrorKind::rank_mismatch,
                      fmt::format("in '{}' rank {} gave {} bytes and rank {} gave {}: the ranks are in different calls",
                                  options.phase, info(rank()).rank, length, info(0).rank, theirs),
                      {.rank = info(0).rank}));
  return or_fail(
      *this, [&] { return directory_->read(name, length * static_cast<std::uint64_t>(size()), timeout_of(options)); });
}

void FileGroup::do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) {
  const std::vector<std::byte> records = round(mine, options);
  if (!records.empty()) std::memcpy(all.data(), records.data(), records.size());
}

void FileGroup::do_send(int to, sync::Subject subject, std::span<const std::byte> message, const WaitOptions& options) {
  const auto phase = in_phase(options);
  const MessageNumber which{subject, ++sent_[{to, subject}]};
  or_fail(*this, [&] { directory_->publish(message_name(number_, rank(), to, which, message.size()), message); });
  progress();
}

std::vector<std::byte> FileGroup::do_receive(int from, sync::Subject subject, std::uint64_t most,
                                             const WaitOptions& options) {
  const auto phase = in_phase(options);
  const MessageNumber which{subject, ++received_[{from, subject}]};
  const std::string prefix = message_prefix(number_, from, rank(), which);
  std::string name;
  const auto is_there = [&](const Snapshot& snapshot) {
    if (const auto found = snapshot.with_prefix(prefix); !found.empty()) name = found.front();
    return !name.empty();
  };
  const auto is_sender = [from](int rank) { return rank == from; };
  wait(options, is_there, is_sender, is_sender);
  const std::uint64_t length = number_behind(name, prefix).value_or(most + 1);
  if (length > most)
    fail(*this, Error(ErrorKind::corrupt,
                      fmt::format("rank {} announces a message of {} bytes where at most {} can be", info(from).rank,
                                  length, most),
                      {.rank = info(from).rank}));
  std::vector<std::byte> message = or_fail(*this, [&] { return directory_->read(name, length, timeout_of(options)); });
  directory_->remove(name);
  progress();
  return message;
}

void FileGroup::do_wait_until(const std::function<bool()>& done,
                              const std::function<void(std::chrono::nanoseconds)>& sleep, std::span<const int> on,
                              const WaitOptions& options) {
  Watchdog watchdog = this->watchdog(options);
  const auto is_awaited = [on](int rank) { return std::ranges::find(on, rank) != on.end(); };
  while (!done()) {
    or_fail(*this, [&] { return directory_->recent(Watchdog::slice); });
    watchdog.check(done, is_awaited, is_awaited);
    sleep(Watchdog::slice);
  }
}

std::shared_ptr<sync::Group> FileGroup::make_part(const Part& part, Tie tie, const WaitOptions& options) {
  struct Card {
    Nonce nonce;
    std::int32_t count = 0;
  };
  Card mine{};
  std::vector<Card> cards;
  together(options, [&] {
    os::random_bytes(mine.nonce);
    if (part.position == 0) mine.count = directory_->next_count();
    cards.resize(static_cast<std::size_t>(size()));
  });
  do_all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(cards)), options);
  std::shared_ptr<sync::Group> made;
  together(options, [&] {
    if (part.members.empty()) return;
    std::vector<int> members;
    for (const int member : part.members) members.push_back((*members_)[member]);
    const Card& first = cards[static_cast<std::size_t>(part.members.front())];
    // No other group has the same first rank and count.
    const int number = first.count * static_cast<int>(directory_->members().size()) + members.front();
    made = std::make_shared<FileGroup>(heart_, std::move(members), part.position,
                                       tie == Tie::companion ? pulse_ : nullptr, number, first.nonce, timeout());
  });
  return made;
}

}  // namespace muster::workspace

// The public call that makes a file group, and world()'s way to it.

namespace muster {
namespace {

using std::chrono::milliseconds;

void check(const FileGroupOptions& options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    throw Error(ErrorKind::argument, fmt::format("a file group cannot have rank {} of {}", options.rank, options.size));
  if (options.heartbeat < milliseconds(1))
    throw Error(ErrorKind::argument, "a file group's heartbeat must be at least a millisecond");
  if (options.lost_after < 3 * options.heartbeat)
    throw Error(ErrorKind::argument, "a file group's lost_after must be three heartbeats at least: one may come late");
  if (options.timeout && *options.timeout <= milliseconds::zero())
    throw Error(ErrorKind::argument, "a file group's timeout must be longer than nothing");
}

// Made known when the library is loaded.
[[maybe_unused]] const bool is_registered = [] {
  sync::set_distant_world_maker([](const sync::DistantWorld& world) {
    return file_group(
        {.directory = world.directory, .key = world.key, .rank = world.rank, .size = world.size, .timeout = {}});
  });
  return true;
}();

}  // namespace

std::shared_ptr<SyncGroup> file_group(const FileGroupOptions& options) {
  check(options);
  const milliseconds timeout = sync::timeout_of(options.timeout, sync::default_timeout());
  const workspace::WorkspaceDirectory directory = workspace::prepare_workspace(options.directory);
  if (options.rank == 0) workspace::sweep_dead(directory.path);
  workspace::Job job = workspace::meet(directory, options, timeout);
  auto heart = std::make_shared<workspace::Heart>(std::make_shared<workspace::GroupDirectory>(
      workspace::GroupDirectory::Options{.workspace = directory.path,
                                         .path = job.directory,
                                         .rank = options.rank,
                                         .heartbeat = options.heartbeat,
                                         .lost_after = options.lost_after,
                                         .is_network = directory.is_network},
      std::move(job.members)));
  std::vector<int> members(static_cast<std::size_t>(options.size));
  std::iota(members.begin(), members.end(), 0);
  auto group = std::make_shared<workspace::FileGroup>(std::move(heart), std::move(members), options.rank, nullptr, 0,
                                                      job.nonce, timeout);
  // Rank 0's list of the ranks stays until all have read it.
  group->barrier({.timeout = timeout, .stop = {}, .phase = "meeting"});
  return group;
}

}  // namespace muster
