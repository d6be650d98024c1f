// SPDX-License-Identifier: Apache-2.0
// FileGroup: a group of processes that communicate through files in a directory.
//
// A round (barrier, all-gather) needs at most two small files per rank, and each rank opens one:
//  1. Each rank except rank 0 publishes its record under a name with the round, the rank and the length.
//  2. Rank 0 lists until all records exist, reads those that are not empty, and publishes all of them as one file.
//  3. The other ranks list until that file exists, and read it.
//  4. Rank 0 removes the records of the round and its file of the previous round, because all ranks have passed it.
// A packet is a file that its receiver removes. A waiting rank lists the directory with growing pauses. Between
// listings it checks for dead ranks, cancellation and the deadline (watchdog.hpp).

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "muster/workspace.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/progress.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/clock.hpp"
#include "src/os/process.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/group_directory.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {
namespace {

using Clock = os::Clock;
using group::or_fail;
using group::timeout_of;
using group::Watchdog;
using std::chrono::milliseconds;

/// Only groups of this class are of this kind.
constexpr std::string_view file_group_kind = "file";
// On a network file system, a rank's last files may become visible this long after its end, even with probes.
constexpr milliseconds longest_delay{500};
// The longest sleep between two listings.
constexpr milliseconds glance{20};

/// The job's ranks that belong to a group, indexed by their rank in the group.
class Members final : public group::Peers {
 public:
  Members(std::shared_ptr<const GroupDirectory> directory, std::vector<int> members)
      : directory_(std::move(directory)), members_(std::move(members)) {
    ranks = group::RankTable::part(directory_->peers().ranks, members_);
  }
  /// The rank's number in the job.
  [[nodiscard]] int operator[](int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] std::optional<std::string> end_of(int rank) const override {
    return directory_->peers().end_of((*this)[rank]);
  }
  [[nodiscard]] std::string state_of(int rank) const override { return directory_->peers().state_of((*this)[rank]); }

 private:
  std::shared_ptr<const GroupDirectory> directory_;
  std::vector<int> members_;
};

class FileGroup final : public group::BaseGroup {
 public:
  /// `members`: the job's ranks in this group, in the order of the group. `rank`: this process's index among them.
  /// `parent`: the parent of an auxiliary group, otherwise null.
  FileGroup(std::shared_ptr<Heart> heart, const std::shared_ptr<const Members>& members, int rank,
            std::shared_ptr<GroupPulse> parent, int number, Nonce nonce, milliseconds timeout)
      : group::BaseGroup(rank, members->ranks, nonce, timeout, members),
        heart_(std::move(heart)),
        directory_(heart_->directory()),
        members_(members),
        parent_(std::move(parent)),
        pulse_(GroupPulse::create(directory_, number, rank)),
        number_(number) {
    begin_progress();
  }
  ~FileGroup() override;

  [[nodiscard]] std::string_view kind() const noexcept override { return file_group_kind; }
  [[nodiscard]] bool has_failure() const noexcept override {
    return pulse_->has_failure() || (parent_ && parent_->has_failure());
  }
  /// Each packet is one file.
  [[nodiscard]] std::size_t longest_packet() const noexcept override { return 4 << 20; }
  void progress() noexcept override { (parent_ ? parent_ : pulse_)->progress(); }
  [[nodiscard]] const std::string& workspace() const noexcept { return directory_->options().workspace; }

 protected:
  [[nodiscard]] std::uint64_t rounds() const noexcept override { return round_; }
  void do_abort(const Error& cause) noexcept override { pulse_->abort(cause); }
  [[nodiscard]] std::optional<Error> do_failure() const override;
  void do_barrier(const WaitOptions& options) override { do_all_gather({}, {}, options); }
  void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) override;
  void do_wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                     std::span<const int> on, const WaitOptions& options) override;
  bool do_try_send(int to, const group::PacketHead& head, std::span<const std::byte> packet) override;
  bool do_try_receive(int from, const group::PacketPlace& place) override;
  void do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                           const WaitOptions& options) override;
  std::shared_ptr<group::BaseGroup> make_part(const SplitPart& part, Tie tie, const WaitOptions& options) override;

 private:
  [[nodiscard]] auto in_phase(const WaitOptions& options) {
    return group::PhaseScope([this](const char* words) { pulse_->set_phase(words); }, options.phase);
  }
  /// Returns the members of a part, which are those of this group if the part has all of its ranks.
  [[nodiscard]] std::shared_ptr<const Members> members_of(std::span<const int> ranks) const {
    if (this->ranks()->is_all(ranks)) return members_;
    std::vector<int> members;
    for (const int rank : ranks) members.push_back((*members_)[rank]);
    return std::make_shared<const Members>(directory_, std::move(members));
  }
  void collect(std::uint64_t number, std::span<const std::byte> record, std::span<std::byte> all,
               const WaitOptions& options);
  void wait_for_all(std::uint64_t number, std::uint64_t length, std::span<std::byte> all, const WaitOptions& options);
  template <class Done, class Needed, class Awaited>
  void wait(const WaitOptions& options, const Done& done, const Needed& needed, const Awaited& awaited);
  std::shared_ptr<const Snapshot> look(bool with_probe) {
    return or_fail(*this, [&] { return directory_->look(with_probe); });
  }
  [[nodiscard]] Watchdog watchdog(const WaitOptions& options) const {
    // Heartbeats report progress: a change is known here up to two heartbeats later.
    return {*pulse_, parent_.get(), *members_,
            rank(),  options,       timeout_of(options, *this) + 2 * directory_->options().heartbeat};
  }

  std::shared_ptr<Heart> heart_;
  std::shared_ptr<GroupDirectory> directory_;
  std::shared_ptr<const Members> members_;
  std::shared_ptr<GroupPulse> parent_;
  std::shared_ptr<GroupPulse> pulse_;
  int number_;
  std::uint64_t round_ = 0;
  std::string last_all_;  // on rank 0
  // Packets, by rank.
  std::map<int, std::uint64_t> sent_;
  std::map<int, std::uint64_t> received_;
};

FileGroup::~FileGroup() {
  end_progress();
  // A copy in a forked child changes nothing, because its parent is still in the group.
  if (!is_owner_process()) return;
  try {
    directory_->publish(left_name(number_, rank()), {});
    if (number_ == 0) return;
    // The last rank to leave removes the group's files; those of the first group are removed with the directory.
    const auto all = directory_->look(directory_->options().is_network);
    for (int rank = 0; rank < size(); ++rank)
      if (!all->has(left_name(number_, rank))) return;
    for (const std::string& name : all->with_prefix(group_prefix(number_))) directory_->remove(name);
  } catch (const std::exception&) {
    // The others notice that this process has ended.
  }
}

std::optional<Error> FileGroup::do_failure() const {
  try {
    // Checks for a failure that other ranks have published in the meantime.
    (void)directory_->recent(directory_->options().is_network ? milliseconds(500) : milliseconds(20));
  } catch (const Error& error) {
    pulse_->abort(error);
  }
  if (auto own = pulse_->error()) return own;
  return parent_ ? parent_->error() : std::nullopt;
}

template <class Done, class Needed, class Awaited>
void FileGroup::wait(const WaitOptions& options, const Done& done, const Needed& needed, const Awaited& awaited) {
  const bool is_network = directory_->options().is_network;
  Pauses pauses(is_network);
  group::RankProgress progress_of_all;
  Watchdog watchdog = this->watchdog(options);
  // Files that a rank wrote before it ended may become visible after its end.
  const auto is_done_after_all = [&] {
    const Clock::time_point end = Clock::now() + (is_network ? longest_delay : milliseconds(0));
    for (;;) {
      if (done(*look(is_network))) return true;
      if (Clock::now() >= end) return false;
      std::this_thread::sleep_for(glance);
    }
  };
  while (!done(*look(is_network && pauses.is_patient()))) {
    watchdog.check(is_done_after_all, needed, awaited);
    pauses.sleep(progress_of_all.step(Watchdog::slice));
  }
}

void FileGroup::do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) {
  const auto phase = in_phase(options);
  const std::uint64_t number = ++round_;
  if (rank() == 0) {
    collect(number, mine, all, options);
  } else {
    const std::string name = numbered(round_prefix(number_, number, rank()), mine.size());
    or_fail(*this, [&] { directory_->publish(name, mine); });
    wait_for_all(number, mine.size(), all, options);
  }
  progress();
}

void FileGroup::collect(std::uint64_t number, std::span<const std::byte> record, std::span<std::byte> all,
                        const WaitOptions& options) {
  std::ranges::copy(record, all.begin());
  std::vector<std::string> names(static_cast<std::size_t>(size()));
  const auto is_missing = [&](int rank) { return rank != 0 && names[static_cast<std::size_t>(rank)].empty(); };
  const auto is_complete = [&](const Snapshot& snapshot) {
    bool complete = true;
    for (int rank = 1; rank < size(); ++rank) {
      std::string& name = names[static_cast<std::size_t>(rank)];
      if (name.empty()) name = snapshot.first(round_prefix(number_, number, rank));
      complete = complete && !name.empty();
    }
    return complete;
  };
  const std::string own_name = numbered(round_prefix(number_, number, 0), record.size());
  bool is_told = false;
  const auto is_awaited = [&](int rank) {
    // Waiting ranks report missing ranks by the file names that exist. Once a wait is long, rank 0 publishes its own
    // name, too.
    if (!is_told) {
      is_told = true;
      or_fail(*this, [&] { directory_->publish(own_name, {}); });
    }
    return is_missing(rank);
  };
  wait(
      options, is_complete, [](int) { return true; }, is_awaited);
  int other = 0;  // a rank that is in a different call
  for (int rank = 1; rank < size(); ++rank) {
    const std::string& name = names[static_cast<std::size_t>(rank)];
    const auto length = number_behind(name, round_prefix(number_, number, rank));
    if (length != record.size()) {
      other = rank;
      break;
    }
    const auto bytes =
        or_fail(*this, [&] { return directory_->read(name, record.size(), timeout_of(options, *this)); });
    std::ranges::copy(bytes, all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(rank) * record.size()));
  }
  const std::string name =
      numbered(all_prefix(number_, number), other == 0 ? record.size() : max_record + static_cast<std::size_t>(other));
  or_fail(*this, [&] { directory_->publish(name, other == 0 ? all : std::span<std::byte>()); });
  for (int rank = 1; rank < size(); ++rank) directory_->remove(names[static_cast<std::size_t>(rank)]);
  if (is_told) directory_->remove(own_name);
  if (!last_all_.empty()) directory_->remove(last_all_);
  last_all_ = name;
  if (other != 0) throw group::different_calls(info(0), info(other));
}

void FileGroup::wait_for_all(std::uint64_t number, std::uint64_t length, std::span<std::byte> all,
                             const WaitOptions& options) {
  const std::string prefix = all_prefix(number_, number);
  std::string name;
  std::vector<bool> has_come(static_cast<std::size_t>(size()));
  const auto is_there = [&](const Snapshot& snapshot) {
    if (name.empty()) name = snapshot.first(prefix);
    for (int rank = 0; name.empty() && rank < size(); ++rank)
      has_come[static_cast<std::size_t>(rank)] = !snapshot.first(round_prefix(number_, number, rank)).empty();
    return !name.empty();
  };
  const auto is_missing = [&](int rank) {
    const bool all_others = std::count(has_come.begin() + 1, has_come.end(), true) == size() - 1;
    return rank == 0 ? all_others : !has_come[static_cast<std::size_t>(rank)];
  };
  wait(
      options, is_there, [](int) { return true; }, is_missing);
  const std::uint64_t theirs = number_behind(name, prefix).value_or(0);
  // Rank 0 has found a rank that is in a different call: the length in the name is max_record plus that rank.
  if (theirs > max_record && theirs < max_record + static_cast<std::uint64_t>(size()))
    throw group::different_calls(info(0), info(static_cast<int>(theirs - max_record)));
  if (theirs != length) group::fail(*this, group::different_calls(info(0), info(rank())));
  const auto bytes = or_fail(*this, [&] { return directory_->read(name, all.size(), timeout_of(options, *this)); });
  std::ranges::copy(bytes, all.begin());
}

bool FileGroup::do_try_send(int to, const group::PacketHead& head, std::span<const std::byte> packet) {
  std::vector<std::byte> bytes(head.begin(), head.end());
  bytes.insert(bytes.end(), packet.begin(), packet.end());
  const std::string prefix = message_prefix(number_, rank(), to, ++sent_[to]);
  directory_->publish(numbered(prefix, bytes.size()), bytes);
  progress();
  return true;
}

bool FileGroup::do_try_receive(int from, const group::PacketPlace& place) {
  std::uint64_t& received = received_[from];
  const std::string prefix = message_prefix(number_, from, rank(), received + 1);
  const auto seen = directory_->recent(directory_->options().is_network ? milliseconds(500) : milliseconds(20));
  const std::string name = seen->first(prefix);
  if (name.empty()) return false;
  const std::uint64_t most = sizeof(group::PacketHead) + longest_packet();
  const std::uint64_t length = number_behind(name, prefix).value_or(0);
  if (length < sizeof(group::PacketHead) || length > most) group::fail_on_message(*this, from, length, most);
  const std::vector<std::byte> bytes = directory_->read(name, length, timeout());
  ++received;
  group::PacketHead head;
  std::copy_n(bytes.begin(), head.size(), head.begin());
  const std::span<const std::byte> packet = std::span(bytes).subspan(head.size());
  std::ranges::copy(packet, place(head, packet.size()).begin());
  directory_->remove(name);
  progress();
  return true;
}

void FileGroup::do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                                    const WaitOptions& options) {
  const auto phase = in_phase(options);
  const group::RankSet awaited(on);
  const auto is_awaited = [&](int rank) { return awaited.contains(rank); };
  wait(
      options, [&](const Snapshot&) { return done(); }, is_awaited, is_awaited);
}

void FileGroup::do_wait_until(const std::function<bool()>& done,
                              const std::function<void(std::chrono::nanoseconds)>& sleep, std::span<const int> on,
                              const WaitOptions& options) {
  Watchdog watchdog = this->watchdog(options);
  group::RankProgress progress_of_all;
  const group::RankSet awaited(on);
  const auto is_awaited = [&](int rank) { return awaited.contains(rank); };
  while (!done()) {
    or_fail(*this, [&] { return directory_->recent(glance); });
    watchdog.check(done, is_awaited, is_awaited);
    sleep(progress_of_all.step(glance));
  }
}

std::shared_ptr<group::BaseGroup> FileGroup::make_part(const SplitPart& part, Tie tie, const WaitOptions& options) {
  struct ArrivalRecord {
    Nonce nonce;
    std::int32_t count = 0;
  };
  ArrivalRecord mine{};
  std::vector<ArrivalRecord> cards;
  together(options, [&] {
    os::random_bytes(mine.nonce);
    if (part.position == 0) mine.count = directory_->next_count();
    cards.resize(static_cast<std::size_t>(size()));
  });
  do_all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(cards)), options);
  std::shared_ptr<group::BaseGroup> made;
  together(options, [&] {
    if (part.members.empty()) return;
    const auto members = members_of(part.members);
    const ArrivalRecord& first = cards[static_cast<std::size_t>(part.members.front())];
    // No other group has the same first rank and count.
    const int number = first.count * static_cast<int>(directory_->members().size()) + (*members)[0];
    made = std::make_shared<FileGroup>(heart_, members, part.position, tie == Tie::companion ? pulse_ : nullptr, number,
                                       first.nonce, timeout());
  });
  return made;
}

}  // namespace

std::string workspace_of(const Group& group) {
  return group.kind() == file_group_kind ? static_cast<const FileGroup&>(group).workspace() : "";
}

}  // namespace muster::workspace

// The public function that makes a file group.

namespace muster {
namespace {

using std::chrono::milliseconds;

void check(const FileGroupOptions& options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("file_group: rank {} is out of range for size {}", options.rank, options.size));
  if (options.heartbeat < milliseconds(1))
    throw Error(ErrorKind::invalid_argument, "file_group: heartbeat must be at least 1 ms");
  if (options.lost_after < 3 * options.heartbeat)
    throw Error(ErrorKind::invalid_argument, "file_group: lost_after must be at least three heartbeats");
  if (options.timeout && *options.timeout <= milliseconds::zero())
    throw Error(ErrorKind::invalid_argument, "file_group: timeout must be longer than 0");
}

}  // namespace

std::shared_ptr<Group> file_group(const FileGroupOptions& options) {
  check(options);
  const milliseconds timeout = group::timeout_of(options.timeout, group::default_timeout());
  const workspace::WorkspaceDirectory directory = workspace::prepare_workspace(options.directory);
  if (options.rank == 0) workspace::sweep_dead(directory.path);
  workspace::FileGroupFacts job = workspace::meet(directory, options, timeout);
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
  const auto all = std::make_shared<const workspace::Members>(heart->directory(), std::move(members));
  auto group =
      std::make_shared<workspace::FileGroup>(std::move(heart), all, options.rank, nullptr, 0, job.nonce, timeout);
  // Rank 0 keeps the list of ranks until all ranks have read it.
  group->barrier({.timeout = timeout, .stop = {}, .phase = "meeting"});
  return group;
}

}  // namespace muster
