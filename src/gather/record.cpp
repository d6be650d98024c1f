// SPDX-License-Identifier: Apache-2.0
#include "src/gather/record.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <map>

#include "src/base/message.hpp"
#include "src/gather/merge_record.hpp"
#include "src/gather/policy.hpp"
#include "src/group/error_propagation.hpp"

namespace muster::gather {
namespace {

/// Returns a text of the first few ranks, such as "rank 0 [0, 1]; rank 1 [1, 0]".
std::string each_rank(const Group& group, const std::vector<int>& ranks, std::span<const Words> words) {
  return each_words(group, ranks, words, " ", 16);
}

/// The members of each list, in any order.
using Lists = std::map<std::uint64_t, std::vector<int>>;

Lists lists_of(const Records& records) {
  Lists lists;
  for (std::size_t i = 0; const ExchangeRecord& record : records) {
    const int rank = records.rank_at(i++);
    if (record.list_length != 0) lists[record.list_hash].push_back(rank);
  }
  return lists;
}

bool is_whole(const std::vector<int>& members, const Records& records) {
  // Every member of a list passes that list and has its own position. Then no two lists differ or overlap.
  const std::uint32_t length = records[static_cast<std::size_t>(members.front())].list_length;
  if (members.size() != length) return false;
  std::vector<bool> taken(length);
  for (const int rank : members) {
    const ExchangeRecord& record = records[static_cast<std::size_t>(rank)];
    if (record.list_length != length || record.position >= length || taken[record.position]) return false;
    taken[record.position] = true;
  }
  return true;
}

template <class Property>
bool differs(const std::vector<int>& members, const Records& records, Property property) {
  return std::ranges::any_of(members, [&](int rank) {
    return records[static_cast<std::size_t>(rank)].*property !=
           records[static_cast<std::size_t>(members.front())].*property;
  });
}

std::vector<int> ranks_where(const Records& records, const auto& condition) {
  std::vector<int> ranks;
  for (std::size_t i = 0; const ExchangeRecord& record : records) {
    const int rank = records.rank_at(i++);
    if (condition(record)) ranks.push_back(rank);
  }
  return ranks;
}

/// Memory is shared by the ranks of a host. This compares the sum that the ranks of a host need with the smallest
/// amount that one of them sees as available.
std::optional<Problem> find_memory_problem(const Lists& lists, const Records& records, const Group& group) {
  using Reason = Problem::Reason;
  struct HostNeed {
    std::uint64_t needed = 0;
    std::uint64_t available = UINT64_MAX;
    std::vector<int> takers;
  };
  std::map<int, HostNeed> hosts;
  for (const auto& [hash, members] : lists) {
    for (const int rank : members) {
      const std::uint64_t fresh = fresh_bytes_of(rank, members, records, group);
      if (fresh == 0) continue;
      const ExchangeRecord& record = records[static_cast<std::size_t>(rank)];
      if (record.receives && fresh > record.room) return Problem{Reason::budget, {rank}};
      HostNeed& host = hosts[group.host_of(rank)];
      if (__builtin_add_overflow(host.needed, fresh, &host.needed)) host.needed = UINT64_MAX;
      host.available = std::min(host.available, record.available_bytes);
      host.takers.push_back(rank);
    }
  }
  for (auto& [number, host] : hosts)
    if (host.needed > host.available) {
      std::ranges::sort(host.takers);
      return Problem{Reason::memory, std::move(host.takers)};
    }
  return std::nullopt;
}

}  // namespace

const char* to_string(GatherKind operation) noexcept {
  // In the order of the operations.
  constexpr std::array names = {"another call", "get_configs_parallel", "get_tensors_parallel", "merge_tensor_parallel",
                                "gather_each"};
  const auto number = static_cast<std::size_t>(operation);
  return number < names.size() ? names[number] : names.front();
}

Records Records::of(std::vector<std::pair<int, ExchangeRecord>> some) {
  const auto rank_of = [](const auto& entry) { return entry.first; };
  std::ranges::stable_sort(some, {}, rank_of);
  const auto repeated = std::ranges::unique(some, {}, rank_of);
  some.erase(repeated.begin(), repeated.end());
  Records records;
  for (auto& [rank, record] : some) {
    records.ranks_.push_back(rank);
    records.records_.push_back(record);
  }
  return records;
}

std::size_t Records::position_of(std::size_t rank) const noexcept {
  if (ranks_.empty()) return rank;
  const auto found = std::ranges::lower_bound(ranks_, static_cast<int>(rank));
  const bool is_known = found != ranks_.end() && *found == static_cast<int>(rank);
  return is_known ? static_cast<std::size_t>(found - ranks_.begin()) : records_.size();
}

const ExchangeRecord& Records::found(std::size_t rank) const noexcept {
  static const ExchangeRecord nothing;
  const std::size_t position = position_of(rank);
  return position < records_.size() ? records_[position] : nothing;
}

void Records::drop_value(int rank) noexcept {
  const std::size_t position = position_of(static_cast<std::size_t>(rank));
  if (position < records_.size()) records_[position].has_value = false;
}

bool needs_closing(const ExchangeRecord& record) noexcept {
  return record.closes || (record.moving_bytes != 0 && !record.complete);
}

bool needs_closing(const Records& records) noexcept {
  return std::ranges::any_of(records, [](const ExchangeRecord& record) { return needs_closing(record); });
}

std::uint64_t hash_list(std::span<const int> ranks) noexcept {
  return XXH3_64bits(ranks.data(), ranks.size_bytes());
}

std::vector<int> list_of(int member, const Records& records) {
  const ExchangeRecord& any = records[static_cast<std::size_t>(member)];
  std::vector<int> list(any.list_length);
  for (std::size_t i = 0; const ExchangeRecord& record : records) {
    const int rank = records.rank_at(i++);
    if (record.list_length != 0 && record.list_hash == any.list_hash) list[record.position] = rank;
  }
  return list;
}

std::optional<Problem> find_problem(const Records& records, const Group& group) {
  using Reason = Problem::Reason;
  const auto all = ranks_where(records, [](const ExchangeRecord&) { return true; });
  if (differs(all, records, &ExchangeRecord::version)) return Problem{Reason::versions, all};
  if (auto failed = ranks_where(records, [](const ExchangeRecord& record) { return record.status != 0; });
      !failed.empty())
    return Problem{Reason::failed_ranks, std::move(failed)};
  // The later rounds of a stream differ from those of an exchange, whatever the lists are.
  const auto streams = [](const ExchangeRecord& record) { return record.operation == GatherKind::stream; };
  if (const auto ranks = ranks_where(records, streams); !ranks.empty() && ranks.size() != records.size())
    return Problem{Reason::operations, all};
  const Lists lists = lists_of(records);
  for (const auto& [hash, members] : lists) {
    if (!is_whole(members, records))
      return Problem{Reason::lists,
                     ranks_where(records, [](const ExchangeRecord& record) { return record.list_length != 0; })};
    if (differs(members, records, &ExchangeRecord::operation)) return Problem{Reason::operations, members};
    if (differs(members, records, &ExchangeRecord::kind_hash)) return Problem{Reason::kinds, members};
    if (auto others = differing_contents(members, records); !others.empty())
      return Problem{Reason::contents, std::move(others)};
    if (differs(members, records, &ExchangeRecord::forced)) return Problem{Reason::forced, members};
    if (const Decision decision = decide(members, records); decision.is_refused())
      return Problem{Reason::refused, ranks_of(decision, members, records), decision};
  }
  return find_memory_problem(lists, records, group);
}

Error make_error(const Problem& problem, const Records& records, std::span<const Words> words, const Group& group) {
  using Reason = Problem::Reason;
  const int first = problem.ranks.front();
  const auto blame_first = [&](ErrorKind kind, const std::string& text) {
    return group::error_of(group.info(first), kind, text);
  };
  switch (problem.reason) {
    case Reason::failed_ranks:
      return failure_of(problem.ranks, words, group);
    case Reason::versions:
      return Error(ErrorKind::version,
                   "the ranks run different versions of Muster. Start all of them with one version");
    case Reason::lists:
      return Error(
          ErrorKind::rank_mismatch,
          fmt::format(
              "the lists of ranks differ or overlap: {}. Pass the same list on all its members, and disjoint lists",
              each_rank(group, problem.ranks, words)));
    case Reason::operations: {
      std::string text;
      for (const int rank : problem.ranks)
        text += fmt::format("{}rank {} {}", text.empty() ? "" : ", ", group.info(rank).global_rank,
                            to_string(records[static_cast<std::size_t>(rank)].operation));
      return Error(ErrorKind::rank_mismatch, "the ranks are in different calls: " + text +
                                                 ". Make the same calls in the same order on all ranks");
    }
    case Reason::kinds:
      return Error(ErrorKind::rank_mismatch,
                   (records[static_cast<std::size_t>(first)].operation == GatherKind::merge
                        ? "the ranks of a list must request one merge, of tensors that fit together: "
                    : records[static_cast<std::size_t>(first)].operation == GatherKind::stream
                        ? "the options must be the same on all ranks of a list: "
                        : "the tensors of a list must have one dtype and shape: ") +
                       each_rank(group, problem.ranks, words));
    case Reason::contents:
      return blame_first(
          ErrorKind::rank_mismatch,
          "\"same\" requires every rank's tensor to equal the root's tensor, bit for bit, but these differ: " +
              each_rank(group, problem.ranks, words));
    case Reason::refused:
      return blame_first(kind_of(problem.refused.refusal),
                         refusal_text(group, problem.refused, problem.ranks, records, words));
    case Reason::forced:
      return Error(
          ErrorKind::rank_mismatch,
          "the ranks of one list force different routes (GatherOptions::route and workspace.path, MUSTER_ROUTE): " +
              each_rank(group, problem.ranks, words));
    case Reason::budget:
      return blame_first(ErrorKind::out_of_space,
                         fmt::format("{} needs {} of memory more to receive the tensors, and its memory budget leaves "
                                     "{}. Gather less at a time, release earlier results, or raise memory_budget",
                                     group::name_of(group.info(first)),
                                     byte_text(fresh_bytes_of(first, list_of(first, records), records, group)),
                                     byte_text(records[static_cast<std::size_t>(first)].room)));
    case Reason::memory: {
      std::uint64_t needed = 0;
      const ExchangeRecord* tightest = nullptr;
      for (const int rank : problem.ranks) {
        const ExchangeRecord& record = records[static_cast<std::size_t>(rank)];
        if (__builtin_add_overflow(needed, fresh_bytes_of(rank, list_of(rank, records), records, group), &needed))
          needed = UINT64_MAX;
        if (tightest == nullptr || record.available_bytes < tightest->available_bytes) tightest = &record;
      }
      const auto holder = std::ranges::max_element(records, {}, &ExchangeRecord::held);
      const std::string held = holder->held == 0 ? "" : fmt::format("; the root holds {} results", holder->held);
      const std::string text = fmt::format(
          "too little memory on host {}: needed {} by {} ranks, available {} ({}){}. Gather less at a time, release "
          "earlier results, or give the job more memory",
          group.info(first).host, byte_text(needed), problem.ranks.size(), byte_text(tightest->available_bytes),
          os::to_string(tightest->limit), held);
      return blame_first(ErrorKind::out_of_space, text);
    }
  }
  return Error(ErrorKind::rank_mismatch, "the ranks disagree");
}

Error failure_of(std::span<const int> failed, std::span<const Words> words, const Group& group) {
  const int origin = failed.front();
  Error cause = group::in_name_of(group.info(origin), words[static_cast<std::size_t>(origin)].get());
  if (failed.size() == 1) return cause;
  return Error(cause.kind(), fmt::format("{} (and {} failed)", cause.what(), counted(failed.size() - 1, "more rank")),
               cause.details());
}

std::string each_words(const Group& group, std::span<const int> ranks, std::span<const Words> words,
                       std::string_view between, std::size_t shown) {
  std::string text;
  for (std::size_t i = 0; i < std::min(ranks.size(), shown); ++i)
    text += fmt::format("{}rank {}{}{}", i == 0 ? "" : "; ", group.info(ranks[i]).global_rank, between,
                        get_text(words[static_cast<std::size_t>(ranks[i])].text));
  if (ranks.size() > shown) text += fmt::format("; and {} more", ranks.size() - shown);
  return text;
}

Words words_of(const Error& error) {
  Words words;
  words.put(error);
  return words;
}

Words words_of(const std::string& text) {
  Words words;
  put_text(words.text, text);
  return words;
}

}  // namespace muster::gather
