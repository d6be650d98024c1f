// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly/agreement.hpp"

#include <fmt/core.h>

#include <array>
#include <string>
#include <vector>

#include "src/base/fixed_string.hpp"
#include "src/group/group.hpp"
#include "src/group/progress.hpp"

namespace muster {
namespace {

// Longer messages are truncated, so that a status fits one record of a round.
struct FailureRecord {
  std::int32_t failed = 0;   // the kind of the failure plus 1; 0: no failure
  std::int32_t origin = -1;  // -1: the rank that sends the record
  std::array<char, Group::max_record - 8> words{};
};
static_assert(sizeof(FailureRecord) == Group::max_record);

FailureRecord record_of(const std::optional<Error>& failure, FailureOrigin origin) {
  FailureRecord record;
  if (failure) {
    record.failed = static_cast<std::int32_t>(failure->kind()) + 1;
    if (origin == FailureOrigin::named) record.origin = failure->rank().value_or(-1);
    put_text(record.words, failure->what());
  }
  return record;
}

}  // namespace

void agree(Group& group, const std::optional<Error>& failure, const char* phase, FailureOrigin origin) {
  if (!group::inside(group).any(failure.has_value(), {.phase = phase})) return;
  const FailureRecord mine = record_of(failure, origin);
  std::vector<FailureRecord> all(static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), {.phase = phase});
  for (int rank = 0; rank < group.size(); ++rank) {
    const FailureRecord& record = all[static_cast<std::size_t>(rank)];
    if (record.failed == 0) continue;
    if (rank == group.rank()) {
      ErrorDetails details = failure->details();
      if (!details.rank) details.rank = rank;
      throw Error(failure->kind(), failure->what(), std::move(details));
    }
    const std::string words = get_text(record.words);
    const bool is_named = record.origin >= 0 && record.origin < group.size();
    const RankInfo& info = group.info(is_named ? record.origin : rank);
    throw group::error_of(info, static_cast<ErrorKind>(record.failed - 1),
                          is_named ? words : fmt::format("rank {}: {}", rank, words));
  }
}

void go_on(Group& group) {
  group.progress();
  // Other ranks may wait for packets that this one forwards.
  group::RankProgress::step_pending();
  if (const std::optional<Error> failure = group.error()) throw Error(*failure);
}

FailOnStop fail_on_stop(Group& group, const std::stop_token& stop, const std::atomic<bool>* too_late) {
  const auto fail = [&group, too_late] {
    if (too_late != nullptr && *too_late) return;
    const RankInfo& self = group.info(group.rank());
    const std::string words = group.size() == 1 ? "stopped by request"
                                                : fmt::format("rank {} (pid {} on host {}) received a stop request",
                                                              self.global_rank, self.pid, self.host);
    group.abort(group::error_of(self, ErrorKind::cancelled, words));
  };
  return FailOnStop(stop, fail);
}

}  // namespace muster
