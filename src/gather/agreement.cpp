// SPDX-License-Identifier: Apache-2.0
#include "src/gather/agreement.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "src/gather/policy.hpp"
#include "src/group/error_propagation.hpp"

namespace muster::gather {
namespace {

template <class Value>
void append_value(group::HostFold::Bytes& out, const Value& value) {
  static_assert(std::is_trivially_copyable_v<Value>);
  const auto bytes = std::as_bytes(std::span(&value, 1));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

std::uint32_t count_of(std::size_t count) {
  return static_cast<std::uint32_t>(count);
}

}  // namespace

/// Reads a message of another rank.
class AgreementFold::Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <class Value>
  Value take() {
    static_assert(std::is_trivially_copyable_v<Value>);
    if (bytes_.size() < sizeof(Value)) refuse();
    Value value;
    std::memcpy(static_cast<void*>(&value), bytes_.data(), sizeof value);
    bytes_ = bytes_.subspan(sizeof value);
    return value;
  }
  RoundFacts take_facts() {
    const auto packed = take<std::array<std::uint32_t, 2>>();
    RoundFacts facts;
    facts.version = packed[0];
    const auto flag = [&](unsigned bit) { return (packed[1] >> bit & 1U) != 0; };
    facts.has_problem = flag(0);
    facts.has_streams = flag(1);
    facts.has_exchanges = flag(2);
    facts.closes = flag(3);
    facts.needs_preflight = flag(4);
    facts.needs_companion = flag(5);
    return facts;
  }
  static void put_facts(const RoundFacts& facts, Bytes& out) {
    const std::uint32_t flags = (facts.has_problem ? 1U : 0U) | (facts.has_streams ? 2U : 0U) |
                                (facts.has_exchanges ? 4U : 0U) | (facts.closes ? 8U : 0U) |
                                (facts.needs_preflight ? 16U : 0U) | (facts.needs_companion ? 32U : 0U);
    append_value(out, std::array<std::uint32_t, 2>{facts.version, flags});
  }
  /// Calls take(rank, record) for each record of a table.
  template <class Take>
  void each_record(int ranks, const Take& take_record) {
    for (auto left = take<std::uint32_t>(); left != 0; --left) {
      const auto rank = take<std::int32_t>();
      if (rank < 0 || rank >= ranks) refuse();
      take_record(rank, take<ExchangeRecord>());
    }
  }
  /// Must be called at the end of the message.
  void end() const {
    if (!bytes_.empty()) refuse();
  }
  [[noreturn]] static void refuse() { throw group::malformed_round("the agreement of a gather"); }

 private:
  std::span<const std::byte> bytes_;
};

void RoundFacts::add(const ExchangeRecord& record) noexcept {
  const bool is_stream = record.operation == GatherKind::stream;
  has_problem = has_problem || record.status != 0 || record.version != version;
  has_streams = has_streams || is_stream;
  has_exchanges = has_exchanges || !is_stream;
  has_problem = has_problem || (has_streams && has_exchanges);
  closes = closes || gather::needs_closing(record);
  needs_preflight = needs_preflight || record.needs_preflight;
  needs_companion = needs_companion || record.needs_companion;
}

void RoundFacts::add(const RoundFacts& facts) noexcept {
  has_problem = has_problem || facts.has_problem || facts.version != version;
  has_streams = has_streams || facts.has_streams;
  has_exchanges = has_exchanges || facts.has_exchanges;
  has_problem = has_problem || (has_streams && has_exchanges);
  closes = closes || facts.closes;
  needs_preflight = needs_preflight || facts.needs_preflight;
  needs_companion = needs_companion || facts.needs_companion;
}

void AgreementFold::open(int rank, const ExchangeRecord& record, Lists& lists) {
  if (record.list_length == 0) return;
  lists.members.insert(record.list_hash);
  if (record.position == 0) lists.roots.insert(record.list_hash);
  if (!records_.emplace(rank, record).second) Reader::refuse();
}

bool AgreementFold::is_closed() const {
  std::map<std::uint64_t, std::uint32_t> counts;
  for (const auto& [rank, record] : records_) ++counts[record.list_hash];
  return std::ranges::all_of(
      records_, [&](const auto& entry) { return counts[entry.second.list_hash] == entry.second.list_length; });
}

void AgreementFold::judge() {
  std::vector<std::pair<int, ExchangeRecord>> open(records_.begin(), records_.end());
  const Records records = Records::of(std::move(open));
  facts_.has_problem = facts_.has_problem || find_problem(records, group_).has_value();
  if (facts_.has_problem) return;
  if (facts_.has_streams) {
    const auto share = attempt(group_, [&] {
      (void)agree_on_share(ExchangeRecord{}, records, [this](int rank) { return group_.host_of(rank); });
    });
    facts_.has_problem = share.has_value();
  }
  std::map<std::uint64_t, std::vector<int>> lists;
  for (const auto& [rank, record] : records_) lists[record.list_hash].push_back(rank);
  for (const auto& [hash, members] : lists) {
    ListAnswer answer{.hash = hash, .route = decide(members, records).route};
    for (const int rank : members) {
      const ExchangeRecord& record = records_.at(rank);
      answer.payload_bytes += record.payload_bytes;
      if (record.position != 0) continue;
      answer.first_rank = rank;
      answer.first = record;
    }
    answers_.push_back(answer);
  }
}

void AgreementFold::begin(std::span<const int> ranks, std::span<const std::byte> here) {
  Reader own(here);
  for (const int rank : ranks) {
    const auto record = own.take<ExchangeRecord>();
    facts_.add(record);
    open(rank, record, here_);
  }
  own.end();
}

void AgreementFold::take_below(std::span<const std::byte> message) {
  Reader reader(message);
  facts_.add(reader.take_facts());
  Lists& lists = below_.emplace_back();
  reader.each_record(group_.size(), [&](int rank, const ExchangeRecord& record) { open(rank, record, lists); });
  reader.end();
}

void AgreementFold::up(Bytes& out) {
  const bool is_top = group_.host_of(group_.rank()) == 0;
  if (!facts_.has_problem && (is_top || is_closed())) judge();
  // The problem is found again from all records.
  const bool is_open = !facts_.has_problem && answers_.empty();
  Reader::put_facts(facts_, out);
  append_value(out, count_of(is_open ? records_.size() : 0));
  if (!is_open) return;
  for (const auto& [rank, record] : records_) {
    append_value(out, std::int32_t{rank});
    append_value(out, record);
  }
}

void AgreementFold::take_above(std::span<const std::byte> message) {
  Reader reader(message);
  facts_ = reader.take_facts();
  auto left = reader.take<std::uint32_t>();
  // The hosts above answer for the lists that this host has not judged.
  if (left != 0) records_.clear();
  for (; left != 0; --left) answers_.push_back(reader.take<ListAnswer>());
  reader.each_record(group_.size(), [&](int rank, const ExchangeRecord& record) { records_.emplace(rank, record); });
  reader.end();
}

void AgreementFold::down(std::size_t child, Bytes& out) const {
  const Lists& there = child == own_host ? here_ : below_.at(child);
  Reader::put_facts(facts_, out);
  std::vector<const ListAnswer*> answers;
  std::set<std::uint64_t> whole;  // the lists whose records are needed there
  if (!facts_.has_problem)
    for (const ListAnswer& answer : answers_) {
      if (!there.members.contains(answer.hash)) continue;
      answers.push_back(&answer);
      if (all_need_records(answer.first.operation, answer.route) || there.roots.contains(answer.hash))
        whole.insert(answer.hash);
    }
  append_value(out, count_of(answers.size()));
  for (const ListAnswer* answer : answers) append_value(out, *answer);
  // The memory for a stream depends on the other lists of its hosts.
  const auto is_needed = [&](const auto& entry) {
    return !answers.empty() && (facts_.has_streams || whole.contains(entry.second.list_hash));
  };
  append_value(out, count_of(static_cast<std::size_t>(std::ranges::count_if(records_, is_needed))));
  for (const auto& entry : records_) {
    if (!is_needed(entry)) continue;
    append_value(out, std::int32_t{entry.first});
    append_value(out, entry.second);
  }
}

std::optional<Opening> AgreementFold::opening(std::span<const std::byte> answer, const GatherCall& call,
                                              const ExchangeRecord& mine) {
  Reader reader(answer);
  const RoundFacts facts = reader.take_facts();
  if (facts.has_problem) return std::nullopt;
  Opening opening{
      .closes = facts.closes, .needs_preflight = facts.needs_preflight, .needs_companion = facts.needs_companion};
  if (!call.is_member()) return opening;
  std::optional<ListAnswer> own;
  for (auto left = reader.take<std::uint32_t>(); left != 0; --left) {
    const auto next = reader.take<ListAnswer>();
    if (next.hash == mine.list_hash) own = next;
  }
  if (!own) Reader::refuse();
  opening.decision = {own->route, NoRouteReason::none};
  opening.payload_bytes = own->payload_bytes;
  std::vector<std::pair<int, ExchangeRecord>> records;
  if (call.is_first() || all_need_records(mine.operation, own->route)) {
    const bool is_stream = mine.operation == GatherKind::stream;
    std::set<std::uint32_t> positions;
    reader.each_record(call.group->size(), [&](int rank, const ExchangeRecord& record) {
      if (is_stream || record.list_hash == mine.list_hash) records.emplace_back(rank, record);
      if (record.list_length != 0 && record.list_hash == mine.list_hash) positions.insert(record.position);
    });
    reader.end();
    // A member without a record would look like a member without a value.
    if (positions.size() != mine.list_length || *positions.rbegin() >= mine.list_length) Reader::refuse();
  } else {
    records.emplace_back(call.group->rank(), mine);
    records.emplace_back(own->first_rank, own->first);
  }
  opening.records = Records::of(std::move(records));
  return opening;
}

}  // namespace muster::gather
