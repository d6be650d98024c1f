// SPDX-License-Identifier: Apache-2.0
#pragma once
// Round 1 over several hosts: an agreement. An all-gather would bring the records of all ranks to every rank, although
// a gather of few ranks concerns few of them.
//
//  1. Each rank gives its record to the first rank of its host.
//  2. The hosts form a tree. The first rank of each host adds the facts of all records below: a few flags. It keeps the
//     records of members of lists open, until it has those of all members. Open records are sent up.
//  3. The first rank that has all members of all lists below it judges them (record.hpp). All lists that share memory
//     on a host are judged together, because records of one host are sent up together. A problem becomes a flag.
//  4. The facts of all ranks are sent down, and the answers for the lists to the hosts of their members: the route, the
//     sum of the payload and the record of the root. The records of the other members are sent to the host of the root
//     only. For merges, streams and gathers from devices they are sent to all members, which compute their transfers
//     from them.
//  5. If there is a problem, all ranks know it now. They exchange all records, and find the same problem (opening.hpp).

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "src/gather/opening.hpp"
#include "src/group/host_fold.hpp"

namespace muster::gather {

/// Facts about the records of some ranks.
struct RoundFacts {
  std::uint32_t version = record_version;
  bool has_problem = false;
  bool has_streams = false;
  bool has_exchanges = false;  ///< operations other than streams
  bool closes = false;
  bool needs_preflight = false;
  bool needs_companion = false;

  void add(const ExchangeRecord& record) noexcept;
  void add(const RoundFacts& facts) noexcept;
};

/// Returns whether all members of such a list need the records of all members.
constexpr bool all_need_records(GatherKind operation, Route route) noexcept {
  return operation == GatherKind::merge || operation == GatherKind::stream || route == Route::device;
}

/// The messages of the agreement. Each record is an ExchangeRecord.
class AgreementFold final : public group::HostFold {
 public:
  explicit AgreementFold(const Group& group) : group_(group) {}

  void begin(std::span<const int> ranks, std::span<const std::byte> here) override;
  void take_below(std::span<const std::byte> message) override;
  void up(Bytes& out) override;
  void take_above(std::span<const std::byte> message) override;
  void down(std::size_t child, Bytes& out) const override;

  /// Returns the conclusions of a rank from the message to its host; nullopt if there is a problem. Throws
  /// Error(corrupt).
  static std::optional<Opening> opening(std::span<const std::byte> answer, const GatherCall& call,
                                        const ExchangeRecord& mine);

 private:
  /// The answer for one list.
  struct ListAnswer {
    std::uint64_t hash = 0;
    std::uint64_t payload_bytes = 0;
    std::int32_t first_rank = 0;
    Route route = Route::auto_;
    std::array<std::uint8_t, 3> zero{};  // no padding is sent
    ExchangeRecord first{};
  };
  static_assert(sizeof(ListAnswer) == 24 + sizeof(ExchangeRecord));
  /// The lists that have members on a host, or on a host directly below and on those below that.
  struct Lists {
    std::set<std::uint64_t> members;
    std::set<std::uint64_t> roots;  // the lists whose root is on these hosts
  };
  class Reader;

  void open(int rank, const ExchangeRecord& record, Lists& lists);
  /// Returns whether all members of all open lists are below.
  [[nodiscard]] bool is_closed() const;
  /// Makes the answers from the open records.
  void judge();

  const Group& group_;
  RoundFacts facts_;
  Lists here_;
  std::vector<Lists> below_;
  std::map<int, ExchangeRecord> records_;  // by rank: first the open ones, later those that are sent down
  std::vector<ListAnswer> answers_;
};

}  // namespace muster::gather
