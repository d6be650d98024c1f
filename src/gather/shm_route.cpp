// SPDX-License-Identifier: Apache-2.0
// The shared memory route as the exchange sees it. Its two sides are in shm_sending.cpp and shm_receiving.cpp.

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "src/gather/route.hpp"
#include "src/gather/shm_protocol.hpp"
#include "src/os/process.hpp"

namespace muster::gather {
namespace {

/// More than a failed exchange can have left in front of a note.
constexpr std::uint64_t most_passed_over = 64 << 20;

struct Note {
  std::uint64_t exchange = 0;
  std::uint64_t segment = 0;
};

}  // namespace

std::shared_ptr<ShmState> shm_state_of(SyncGroup& group) {
  return sync::inside(group).extension<ShmState>();
}

bool is_eager() {
  return os::environment("MUSTER_EAGER") != "0";
}

void tell(const Call& call, int to, std::uint64_t segment, const char* phase) {
  const Note note{call.number, segment};
  call.group->send(to, std::as_bytes(std::span(&note, 1)), call.wait(phase), sync::Subject::exchange);
}

std::uint64_t hear(const Call& call, int from, const char* phase) {
  Note note;
  const std::vector<std::byte> message = receive_of(call, from, most_passed_over, phase);
  if (message.size() != sizeof note) throw Error(ErrorKind::corrupt, "a note of a rank has a wrong length");
  std::memcpy(&note, message.data(), sizeof note);
  return note.segment;
}

namespace {

class ShmRoute final : public RouteDriver {
 public:
  [[nodiscard]] Route route() const noexcept override { return Route::shm; }
  [[nodiscard]] bool is_usable(const Call& call) const override {
    return std::ranges::all_of(call.list, [&](int rank) { return call.group->region_of(rank) != nullptr; });
  }
  [[nodiscard]] std::string obstacle(const Call& call) const override {
    if (call.group->region_of(call.group->rank()) == nullptr)
      return fmt::format("ranks of a '{}' group share no memory", call.group->kind());
    const auto apart = std::ranges::find_if(call.list, [&](int rank) { return !call.group->shares_memory(rank); });
    return fmt::format("shares no memory with rank {} (host {})", *apart, call.group->info(*apart).host);
  }
  [[nodiscard]] std::string reason(const Call&) const override { return "all ranks of the list share memory"; }
  std::unique_ptr<Transfer> begin(const Call& call) const override {
    if (call.operation == Operation::merge) return make_shm_merge(call);
    if (call.is_first()) return std::make_unique<ShmReceiving>(call);
    return std::make_unique<ShmSending>(call);
  }
  std::uint64_t settle(SyncGroup& group, Keep keep) const override {
    return shm_state_of(group)->pool.settle(keep == Keep::free_memory);
  }
  std::uint64_t trim(SyncGroup& group) const override { return shm_state_of(group)->pool.trim(); }
  void clean_up(SyncGroup& failed) const noexcept override {
    sync::Group& group = sync::inside(failed);
    const auto state = shm_state_of(group);
    const std::lock_guard lock(state->cleaning);
    for (int rank = 0; rank < group.size(); ++rank) {
      if (rank == group.rank() || !group.liveness(rank)->is_dead()) continue;
      state->pool.drop(rank);
      // Its memory is freed when the last result that uses it is released.
      if (const auto region = group.region_of(rank)) region->let_go();
      state->remotes.forget(rank);
    }
  }
};

}  // namespace

std::unique_ptr<RouteDriver> make_shm_route() {
  return std::make_unique<ShmRoute>();
}

}  // namespace muster::gather
