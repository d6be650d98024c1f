// SPDX-License-Identifier: Apache-2.0
// Round 1 as an agreement leads to the same conclusions as an all-gather of all records, for random lists and defects.
// Its messages are run through the tree of hosts in one process. The bytes of a gather of few ranks do not grow with
// the group.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "muster/error.hpp"
#include "src/gather/agreement.hpp"
#include "src/gather/merge_record.hpp"
#include "src/gather/policy.hpp"
#include "src/multihost/hosts.hpp"
#include "tests/support/idle_group.hpp"

using namespace muster;
using namespace muster::gather;

namespace {

/// Knows on which host each rank is.
class KnownHosts final : public test::IdleGroup {
 public:
  KnownHosts(int rank, std::shared_ptr<const group::RankTable> ranks, std::shared_ptr<const multihost::Hosts> hosts)
      : IdleGroup(rank, std::move(ranks)), hosts_(std::move(hosts)) {}
  [[nodiscard]] int host_of(int rank) const override { return hosts_->host_of[static_cast<std::size_t>(rank)]; }

 private:
  std::shared_ptr<const multihost::Hosts> hosts_;
};

/// The ranks of an imitated job.
struct Job {
  std::shared_ptr<const multihost::Hosts> hosts;
  std::vector<std::unique_ptr<KnownHosts>> groups;  // by rank
  std::uint64_t sent = 0;                           // bytes between hosts in the last agreement

  /// With `random`, the hosts of the ranks are drawn, so they need not have consecutive ranks.
  Job(int count, int per_host, std::mt19937* random = nullptr) {
    std::vector<int> keys;
    std::vector<RankInfo> ranks;
    for (int rank = 0; rank < count; ++rank) {
      const unsigned drawn =
          random == nullptr ? static_cast<unsigned>(rank) : (*random)() % static_cast<unsigned>(count);
      keys.push_back(static_cast<int>(drawn) / per_host);
      ranks.push_back({rank, "host", 1});
    }
    hosts = std::make_shared<const multihost::Hosts>(keys, 0);
    const auto table = group::RankTable::make(std::move(ranks));
    for (int rank = 0; rank < count; ++rank) groups.push_back(std::make_unique<KnownHosts>(rank, table, hosts));
  }
  [[nodiscard]] KnownHosts& group(int rank) const { return *groups[static_cast<std::size_t>(rank)]; }

  /// Returns the message to the ranks of each host.
  std::vector<std::vector<std::byte>> agree(const std::vector<ExchangeRecord>& records) {
    const int count = static_cast<int>(hosts->members.size());
    const multihost::HostTree tree{count};
    std::vector<AgreementFold> folds;
    for (int host = 0; host < count; ++host) folds.emplace_back(group(hosts->leader(host)));
    std::vector<std::vector<std::byte>> up(static_cast<std::size_t>(count));
    sent = 0;
    // The children of a host have higher numbers.
    for (int host = count - 1; host >= 0; --host) {
      std::vector<ExchangeRecord> here;
      for (const int rank : hosts->on(host)) here.push_back(records[static_cast<std::size_t>(rank)]);
      AgreementFold& fold = folds[static_cast<std::size_t>(host)];
      fold.begin(hosts->on(host), std::as_bytes(std::span(here)));
      for (const int child : tree.children(host)) fold.take_below(up[static_cast<std::size_t>(child)]);
      std::vector<std::byte>& out = up[static_cast<std::size_t>(host)];
      fold.up(out);
      if (host != 0) sent += out.size();
    }
    std::vector<std::vector<std::byte>> above(static_cast<std::size_t>(count));
    std::vector<std::vector<std::byte>> answers(static_cast<std::size_t>(count));
    for (int host = 0; host < count; ++host) {
      AgreementFold& fold = folds[static_cast<std::size_t>(host)];
      if (host != 0) fold.take_above(above[static_cast<std::size_t>(host)]);
      fold.down(group::HostFold::own_host, answers[static_cast<std::size_t>(host)]);
      const std::vector<int> children = tree.children(host);
      for (std::size_t child = 0; child < children.size(); ++child) {
        std::vector<std::byte>& out = above[static_cast<std::size_t>(children[child])];
        fold.down(child, out);
        sent += out.size();
      }
    }
    return answers;
  }

  [[nodiscard]] std::optional<Opening> opening(int rank, const std::vector<ExchangeRecord>& records,
                                               const std::vector<std::vector<std::byte>>& answers) const {
    const ExchangeRecord& mine = records[static_cast<std::size_t>(rank)];
    GatherCall call;
    call.operation = mine.operation;
    call.group = &group(rank);
    call.position = mine.list_length == 0 ? no_position : mine.position;
    return AgreementFold::opening(answers[static_cast<std::size_t>(group(rank).host_of(rank))], call, mine);
  }
};

/// Writes one list into the records of its members.
void make_list(std::vector<ExchangeRecord>& records, const std::vector<int>& list, GatherKind operation,
               std::mt19937& random) {
  const bool is_gather = operation == GatherKind::configs || operation == GatherKind::tensors;
  const bool on_devices = is_gather && random() % 4 == 0;
  const bool receives = is_gather && random() % 4 == 0;
  for (std::size_t position = 0; position < list.size(); ++position) {
    ExchangeRecord& record = records[static_cast<std::size_t>(list[position])];
    record.operation = operation;
    record.list_hash = hash_list(list);
    record.list_length = static_cast<std::uint32_t>(list.size());
    record.position = static_cast<std::uint32_t>(position);
    record.routes = static_cast<std::uint8_t>(route_bit(list.size() == 1 ? Route::local : Route::tcp) |
                                              route_bit(Route::workspace));
    record.residency = on_devices ? Residency::device : Residency::host;
    if (on_devices) record.routes |= route_bit(Route::device);
    record.receives = receives;
    record.has_value = true;
    record.payload_bytes = random() % 1000;
    record.moving_bytes = record.payload_bytes;
    record.fresh_bytes = random() % 100;
    record.available_bytes = 1 << 20;
    if (operation == GatherKind::merge) record.merge = merge_number(merge::concat(0));
    if (operation == GatherKind::stream) {
      record.budget = 8 << 20;
      record.depth = 2;
      record.fresh_bytes = 0;
    }
    record.complete = random() % 2 == 0;
    record.needs_preflight = random() % 50 == 0;
  }
}

/// Returns the records of random disjoint lists.
std::vector<ExchangeRecord> random_records(int count, bool are_streams, std::mt19937& random) {
  std::vector<ExchangeRecord> records(static_cast<std::size_t>(count));
  for (ExchangeRecord& record : records)
    record.operation = are_streams ? GatherKind::stream : GatherKind::configs;  // of ranks in no list
  std::vector<int> ranks(records.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  if (random() % 2 == 0) std::ranges::shuffle(ranks, random);
  constexpr std::array kinds = {GatherKind::configs, GatherKind::tensors, GatherKind::merge};
  std::size_t begin = 0;
  while (begin < ranks.size()) {
    const std::size_t length = std::min<std::size_t>(1 + random() % ranks.size(), ranks.size() - begin);
    const std::vector<int> list(ranks.begin() + static_cast<std::ptrdiff_t>(begin),
                                ranks.begin() + static_cast<std::ptrdiff_t>(begin + length));
    begin += length;
    if (random() % 4 != 0) make_list(records, list, are_streams ? GatherKind::stream : kinds[random() % 3], random);
  }
  return records;
}

/// Damages one record, so that the ranks disagree in most cases.
void damage(std::vector<ExchangeRecord>& records, std::mt19937& random) {
  ExchangeRecord& record = records[random() % records.size()];
  switch (random() % 9) {
    case 0:
      record.status = 3;
      break;
    case 1:
      record.version += 1;
      break;
    case 2:
      record.list_hash += 1;
      break;
    case 3:
      record.list_length = 0;
      break;
    case 4:
      record.position = 0;
      break;
    case 5:
      record.operation = record.operation == GatherKind::stream ? GatherKind::configs : GatherKind::stream;
      break;
    case 6:
      record.kind_hash = 7;
      break;
    case 7:
      record.available_bytes = 1;
      break;
    default:
      record.forced = Route::workspace;
      break;
  }
}

bool are_equal(const ExchangeRecord& a, const ExchangeRecord& b) {
  return std::memcmp(static_cast<const void*>(&a), static_cast<const void*>(&b), sizeof a) == 0;
}

/// Returns whether the ranks agree.
bool compare(Job& job, const std::vector<ExchangeRecord>& records) {
  const auto host_of = [&](int rank) { return job.group(0).host_of(rank); };
  const Records all(records);
  bool has_problem = find_problem(all, job.group(0)).has_value();
  if (!has_problem && records.front().operation == GatherKind::stream) try {
      (void)agree_on_share(ExchangeRecord{}, all, host_of);
    } catch (const Error&) {
      has_problem = true;
    }
  const auto answers = job.agree(records);
  for (int rank = 0; rank < job.group(0).size(); ++rank) {
    const ExchangeRecord& mine = records[static_cast<std::size_t>(rank)];
    const auto opening = job.opening(rank, records, answers);
    REQUIRE(opening.has_value() != has_problem);
    if (has_problem) continue;
    CHECK(opening->closes == needs_closing(all));
    CHECK(opening->needs_preflight == std::ranges::any_of(all, &ExchangeRecord::needs_preflight));
    if (mine.list_length == 0) continue;
    const std::vector<int> list = list_of(rank, all);
    CHECK(opening->decision == decide(list, all));
    std::uint64_t payload = 0;
    const bool needs_all = mine.position == 0 || all_need_records(mine.operation, opening->decision.route);
    for (const int member : list) {
      const ExchangeRecord& record = all[static_cast<std::size_t>(member)];
      payload += record.payload_bytes;
      if (needs_all || member == rank || member == list.front())
        CHECK(are_equal(opening->records[static_cast<std::size_t>(member)], record));
      else
        CHECK(opening->records[static_cast<std::size_t>(member)].list_length == 0);
    }
    CHECK(opening->payload_bytes == payload);
    if (mine.operation == GatherKind::stream) {
      const StreamShare expected = agree_on_share(mine, all, host_of);
      const StreamShare share = agree_on_share(mine, opening->records, host_of);
      CHECK(share.budget == expected.budget);
      CHECK(share.part_bytes == expected.part_bytes);
      CHECK(share.is_cut == expected.is_cut);
    }
  }
  return !has_problem;
}

/// Returns the bytes between hosts for a gather of this list.
std::uint64_t sent_for(int count, const std::vector<int>& list, GatherKind operation = GatherKind::configs) {
  std::mt19937 random(1);
  Job job(count, 8);
  std::vector<ExchangeRecord> records(static_cast<std::size_t>(count));
  make_list(records, list, operation, random);
  for (ExchangeRecord& record : records) record.available_bytes = UINT64_MAX;
  REQUIRE(job.opening(0, records, job.agree(records)));
  return job.sent;
}

std::vector<int> every(int step, int count) {
  std::vector<int> list;
  for (int rank = 0; rank < count; rank += step) list.push_back(rank);
  return list;
}

}  // namespace

TEST_CASE("an agreement leads to the conclusions of an all-gather, for random lists and defects") {
  std::mt19937 random(20);
  int agreed = 0;
  int refused = 0;
  for (const auto& [count, per_host] : std::vector<std::pair<int, int>>{{2, 1}, {4, 2}, {13, 1}, {24, 2}, {96, 1}}) {
    for (int turn = 0; turn < 150; ++turn) {
      Job job(count, per_host, turn % 4 == 0 ? nullptr : &random);
      std::vector<ExchangeRecord> records = random_records(count, turn % 3 == 0, random);
      agreed += compare(job, records) ? 1 : 0;
      damage(records, random);
      refused += compare(job, records) ? 0 : 1;
    }
  }
  // Both happen often.
  CHECK(agreed > 500);
  CHECK(refused > 300);
}

TEST_CASE("a stream whose hosts have too little memory for one list is refused on all ranks") {
  std::mt19937 random(3);
  Job job(8, 2);
  std::vector<ExchangeRecord> records(8);
  make_list(records, {0, 2}, GatherKind::stream, random);
  make_list(records, {1, 3}, GatherKind::stream, random);
  make_list(records, {4, 5, 6, 7}, GatherKind::stream, random);
  (void)compare(job, records);
  CHECK(job.opening(0, records, job.agree(records)));
  records[0].available_bytes = 4096;
  (void)compare(job, records);
  CHECK_FALSE(job.opening(7, records, job.agree(records)));
}

TEST_CASE("the bytes of an agreement grow with the members of lists and with hosts, but not with their product") {
  const auto growth = [](const std::function<std::uint64_t(int)>& sent) {
    return std::log2(static_cast<double>(sent(4096)) / static_cast<double>(sent(512))) / 3;
  };
  // Per host, the messages of a gather of few ranks do not grow at all.
  CHECK(growth([](int count) { return sent_for(count, every(count / 8, count)); }) < 1.05);
  CHECK(growth([](int count) { return sent_for(count, {8, 9, 10, 11}); }) < 1.05);
  // All ranks: each record is sent once per level of the tree.
  CHECK(growth([](int count) { return sent_for(count, every(1, count)); }) < 1.25);
  // Each member of a merge needs all records.
  CHECK(growth([](int count) { return sent_for(count, every(1, count), GatherKind::merge); }) > 1.9);
  // The flags and counts of both directions.
  CHECK(sent_for(4096, {8, 9, 10, 11}) <= 511 * 28);
}

TEST_CASE("malformed messages are refused") {
  std::mt19937 random(5);
  Job job(4, 2);
  std::vector<ExchangeRecord> records(4);
  make_list(records, {0, 1, 2, 3}, GatherKind::configs, random);
  const auto answers = job.agree(records);
  for (int rank = 0; rank < 4; ++rank) {
    std::vector<std::vector<std::byte>> cut = answers;
    // A sender does not read the records at the end of the message.
    for (auto& answer : cut) answer.resize(rank == 0 ? answer.size() - 1 : 100);
    CHECK_THROWS_WITH_AS(job.opening(rank, records, cut), doctest::Contains("malformed message"), Error);
  }
  // The root refuses an answer that lacks a member: the table of records ends with it.
  {
    std::vector<std::vector<std::byte>> shorter = answers;
    std::vector<std::byte>& answer = shorter.front();
    constexpr std::size_t entry = sizeof(std::int32_t) + sizeof(ExchangeRecord);
    const std::uint32_t three = 3;
    std::memcpy(answer.data() + answer.size() - 4 * entry - sizeof three, &three, sizeof three);
    answer.resize(answer.size() - entry);
    CHECK_THROWS_WITH_AS(job.opening(0, records, shorter), doctest::Contains("malformed message"), Error);
  }
  // An own record of another list has no answer.
  ExchangeRecord other = records[1];
  records[1].list_hash += 1;
  CHECK_THROWS_WITH_AS(job.opening(1, records, answers), doctest::Contains("malformed message"), Error);
  records[1] = other;
  const auto here = std::as_bytes(std::span(records)).first(2 * sizeof(ExchangeRecord));
  const std::vector<int> ranks = {0, 1};
  for (const std::size_t length : {std::size_t{0}, std::size_t{7}, std::size_t{13}}) {
    AgreementFold fold(job.group(0));
    fold.begin(ranks, here);
    const std::vector<std::byte> message(length, std::byte{1});
    CHECK_THROWS_WITH_AS(fold.take_below(message), doctest::Contains("malformed message"), Error);
  }
}
