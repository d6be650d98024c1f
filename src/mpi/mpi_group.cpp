// SPDX-License-Identifier: Apache-2.0
// Rounds and duplicates; the numbers are those of mpi_group.hpp.

#include "src/mpi/mpi_group.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "src/mpi/mpi_waits.hpp"
#include "src/os/process.hpp"
#include "src/sync/local_group.hpp"

namespace muster::mpi {
namespace {

using std::chrono::milliseconds;

constexpr int tags_a_group = 8;
// What waits within a host sleep at most while data of a route comes from another.
constexpr std::chrono::microseconds busy_slice{200};

// Who waits for somebody who waits for others gives up somewhat later than he, so that the first cause is his: first
// the ranks of a host for each other, then leaders for those below them in the tree, from the leaves to the root, then
// for the one above, from the root to the leaves, last followers for their leader.
constexpr milliseconds wait_step{400};

/// Stands before the records of a host, and before all of them.
struct RoundHead {
  std::uint32_t round = 0;
  std::uint32_t record_bytes = 0;
};

/// Of another host: whether it lives is seen in waits, by whether it answers.
class Elsewhere final : public PeerLiveness {
 public:
  [[nodiscard]] bool is_dead() const noexcept override { return false; }
};

std::vector<std::byte> with_head(const RoundHead& head, std::span<const std::byte> records) {
  std::vector<std::byte> bytes(sizeof head + records.size());
  std::memcpy(bytes.data(), &head, sizeof head);
  if (!records.empty()) std::memcpy(bytes.data() + sizeof head, records.data(), records.size());
  return bytes;
}

}  // namespace

MpiGroup::MpiGroup(std::shared_ptr<Family> family, int number, Met met, std::chrono::milliseconds timeout,
                   std::shared_ptr<Standing> parent)
    : SyncGroup(family->rank(), std::move(met.ranks), met.nonce, timeout),
      family_(std::move(family)),
      number_(number),
      hosts_(std::move(met.hosts)),
      parent_(std::move(parent)),
      standing_(std::make_shared<Standing>(hosts_.local, parent_)),
      views_(static_cast<std::size_t>(size())) {
  family_->enroll(number_, *this);
  if (!has_other_hosts()) return;
  if (auto* group = dynamic_cast<sync::LocalGroup*>(hosts_.local.get()))
    group->while_waiting([this, kin = family_]() -> std::chrono::nanoseconds {
      try {
        kin->pump();
      } catch (const Error&) {
        // The next call of MPI tells.
      }
      if (settles() && is_settled()) decide();
      return kin->is_under_way() ? busy_slice : std::chrono::nanoseconds(sync::Watchdog::slice);
    });
}

int MpiGroup::tag(Tag kind) const noexcept {
  return (number_ + 1) * tags_a_group + static_cast<int>(kind);
}
int MpiGroup::data_tag() const noexcept {
  return tag(Tag::data);
}

bool MpiGroup::shares_memory(int rank) const {
  (void)info(rank);
  return hosts_.is_here(rank);
}

int MpiGroup::host_of(int rank) const {
  (void)info(rank);
  return hosts_.host_of[static_cast<std::size_t>(rank)];
}

std::shared_ptr<sync::Region> MpiGroup::region_of(int rank) const {
  return shares_memory(rank) ? local().region_of(place_of(rank)) : nullptr;
}

std::shared_ptr<const PeerLiveness> MpiGroup::liveness(int rank) const {
  if (!shares_memory(rank)) return std::make_shared<Elsewhere>();
  return local().liveness(place_of(rank));
}

void MpiGroup::do_barrier(const WaitOptions& options) {
  round({}, {}, options);
}

void MpiGroup::do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) {
  round(mine, all, options);
}

void MpiGroup::round(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) {
  const Phase phase(*this, options.phase);
  ++round_;
  progress();
  if (!has_other_hosts()) {
    locally(-1, [&] { local().all_gather(mine, all, later(options)); });
    return;
  }
  const std::size_t here = hosts_.members[static_cast<std::size_t>(hosts_.mine)].size();
  std::vector<std::byte> records(mine.begin(), mine.end());
  records.resize(mine.size() * here);
  if (!is_alone_here()) locally(-1, [&] { local().all_gather(mine, records, later(options)); });
  const int leader = hosts_.leader(hosts_.mine);
  const int levels = host_tree().height(0);
  if (rank() != leader) {
    // Step 4.
    const WaitOptions wait = later(options, (2 * levels + 1) * wait_step);
    const std::uint64_t most = sizeof(RoundHead) + max_record * static_cast<std::size_t>(size());
    const std::vector<std::byte> answer =
        locally(leader, [&] { return local().receive(place_of(leader), most, wait, Subject::round); });
    check_round(leader, answer, static_cast<std::size_t>(size()), mine.size(), options);
    if (!all.empty()) std::memcpy(all.data(), answer.data() + sizeof(RoundHead), all.size());
    return;
  }
  const auto answer = gather_hosts(records, all, options);
  const WaitOptions wait = later(options, 2 * levels * wait_step);
  for (const int mate : hosts_.members[static_cast<std::size_t>(hosts_.mine)])
    if (mate != leader) locally(mate, [&] { local().send(place_of(mate), *answer, wait, Subject::round); });
}

void MpiGroup::check_round(int from, std::span<const std::byte> message, std::size_t ranks, std::size_t record_bytes,
                           const WaitOptions& options) {
  RoundHead theirs;
  if (message.size() >= sizeof theirs) std::memcpy(&theirs, message.data(), sizeof theirs);
  if (theirs.round == round_ && theirs.record_bytes == record_bytes &&
      message.size() == sizeof theirs + ranks * record_bytes)
    return;
  sync::fail(
      *this,
      Error(ErrorKind::rank_mismatch,
            fmt::format("in '{}' rank {} is in round {} with records of {} bytes and rank {} in round {} with {}: "
                        "the ranks are in different calls",
                        options.phase, rank(), round_, record_bytes, from, theirs.round, theirs.record_bytes),
            {.rank = from}));
}

std::shared_ptr<const std::vector<std::byte>> MpiGroup::gather_hosts(std::span<const std::byte> here,
                                                                     std::span<std::byte> all,
                                                                     const WaitOptions& options) {
  const auto record_bytes = static_cast<std::uint32_t>(all.size() / static_cast<std::size_t>(size()));
  const RoundHead head{round_, record_bytes};
  const HostTree tree = host_tree();
  // What another round's message would need at most: a longer one is an error of MPI's, and told as that.
  const auto take = [&](int from, Tag tag, std::size_t ranks, milliseconds grace) {
    std::vector<std::byte> bytes =
        take_message(from, this->tag(tag), sizeof head + SyncGroup::max_record * ranks, options, grace);
    check_round(from, bytes, ranks, record_bytes, options);
    return bytes;
  };
  const std::vector<int> children = tree.children(hosts_.mine);
  // Step 2.
  std::vector<std::byte> below = with_head(head, here);
  for (const int child : children) {
    std::size_t ranks = 0;
    for (const int host : tree.with_all_below(child)) ranks += hosts_.members[static_cast<std::size_t>(host)].size();
    const std::vector<std::byte> records =
        take(hosts_.leader(child), Tag::up, ranks, tree.height(hosts_.mine) * wait_step);
    below.insert(below.end(), records.begin() + sizeof head, records.end());
  }
  // Step 3.
  const auto answer = std::make_shared<std::vector<std::byte>>();
  if (hosts_.mine == 0) {
    const std::byte* next = below.data() + sizeof head;
    for (const int host : tree.with_all_below(0))
      for (const int member : hosts_.members[static_cast<std::size_t>(host)]) {
        if (record_bytes != 0)
          std::memcpy(all.data() + static_cast<std::size_t>(member) * record_bytes, next, record_bytes);
        next += record_bytes;
      }
    *answer = with_head(head, all);
  } else {
    const int parent = hosts_.leader(tree.parent(hosts_.mine));
    or_fail(parent, options, [&] { family_->adopt(parent, send_copy(comm(), parent, tag(Tag::up), below)); });
    *answer = take(parent, Tag::down, static_cast<std::size_t>(size()),
                   (tree.height(0) + tree.depth(hosts_.mine)) * wait_step);
    if (!all.empty()) std::memcpy(all.data(), answer->data() + sizeof head, all.size());
  }
  for (const int child : children)
    or_fail(hosts_.leader(child), options, [&] {
      family_->adopt(hosts_.leader(child), start_send(comm(), hosts_.leader(child), tag(Tag::down), *answer, answer));
    });
  return answer;
}

std::shared_ptr<SyncGroup> MpiGroup::do_duplicate(const WaitOptions& options, Tie tie) {
  // The numbers of groups have to be the same on all ranks, and new on each: rank 0 says them.
  struct Proposal {
    std::int32_t number;
    Nonce nonce;  // rank 0's is the new group's
  };
  const Phase phase(*this, options.phase);
  Proposal mine{};
  std::vector<Proposal> cards;
  together(options, [&] {
    mine.number = family_->next_number();
    os::random_bytes(mine.nonce);
    cards.resize(static_cast<std::size_t>(size()));
  });
  do_all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(cards)), options);
  const int number = cards.front().number;
  if ((number + 2) * tags_a_group > comm().most_tag())
    throw Error(ErrorKind::unsupported,
                fmt::format("{} groups of one communicator are more than MPI has tags for", number));
  std::shared_ptr<SyncGroup> copy;
  together(options, [&] {
    // Collective on each host: first of all, and not left out by a rank that lacks memory.
    const std::shared_ptr<SyncGroup> local_copy = locally(-1, [&] {
      return tie == Tie::companion ? local().companion(later(options)) : local().duplicate(later(options));
    });
    Met met;
    met.nonce = cards.front().nonce;
    for (int rank = 0; rank < size(); ++rank) met.ranks.push_back(info(rank));
    met.hosts = hosts_;
    met.hosts.local = local_copy;
    copy = std::make_shared<MpiGroup>(family_, number, std::move(met), timeout(),
                                      tie == Tie::companion ? standing_ : nullptr);
  });
  return copy;
}

}  // namespace muster::mpi
