// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/ending.hpp"

#include <algorithm>
#include <utility>

#include "src/os/process.hpp"

namespace muster::mpi {
namespace {

using Clock = std::chrono::steady_clock;

struct Families {
  std::mutex mutex;
  std::vector<std::shared_ptr<Family>> all;
  std::chrono::milliseconds rest{0};  // the longest of those that have closed
  bool has_callback = false;
  std::int64_t process = 0;
};

/// Never destroyed: MPI may end after this library's statics.
Families& families() {
  static auto* const the_families = new Families;
  return *the_families;
}

std::vector<std::shared_ptr<Family>> list() {
  Families& them = families();
  const std::lock_guard lock(them.mutex);
  // A forked child has copies of what its parent will end.
  if (them.process != os::process_id()) return {};
  return them.all;
}

void forget_ended() {
  Families& them = families();
  const std::lock_guard lock(them.mutex);
  std::erase_if(them.all, [&them](const std::shared_ptr<Family>& family) {
    if (!family->is_closed()) return false;
    // Also before MPI_Finalize: the others may hear of it late.
    them.rest = std::max(them.rest, family->rest());
    return true;
  });
}

/// Once: MPI_Finalize calls end_all() again where world() has.
std::chrono::milliseconds take_rest() {
  Families& them = families();
  const std::lock_guard lock(them.mutex);
  return std::exchange(them.rest, std::chrono::milliseconds(0));
}

int on_finalize(MPI_Comm, int, void*, void*) {
  end_all();
  return MPI_SUCCESS;
}

}  // namespace

void keep(std::shared_ptr<Family> family) {
  Families& them = families();
  const std::lock_guard lock(them.mutex);
  if (!them.has_callback) {
    int key = MPI_KEYVAL_INVALID;
    check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_finalize, &key, nullptr), "making an attribute");
    check(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "setting an attribute");
    them.has_callback = true;
    them.process = os::process_id();
  }
  them.all.push_back(std::move(family));
}

void advance_endings() noexcept {
  try {
    bool has_some = false;
    for (const std::shared_ptr<Family>& family : list()) {
      if (!family->is_retired()) continue;
      family->take_over();
      family->advance();
      has_some = has_some || family->is_closed();
    }
    if (has_some) forget_ended();
  } catch (const std::bad_alloc&) {
    // Later, then.
  }
}

bool end_all() noexcept {
  try {
    const std::vector<std::shared_ptr<Family>> all = list();
    for (const std::shared_ptr<Family>& family : all) {
      family->take_over();
      family->end_groups();
    }
    const Clock::time_point begin = Clock::now();
    const auto has_ended = [](const std::shared_ptr<Family>& family) { return family->has_ended(); };
    while (!std::ranges::all_of(all, has_ended)) {
      for (const std::shared_ptr<Family>& family : all) {
        if (family->has_ended()) continue;
        family->advance();
        family->give_up_after(Clock::now() - begin);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    forget_ended();
    std::chrono::milliseconds rest = take_rest();
    for (const std::shared_ptr<Family>& family : all) rest = std::max(rest, family->rest());
    std::this_thread::sleep_for(rest);
    return std::ranges::all_of(all, [](const std::shared_ptr<Family>& family) { return family->is_closed(); });
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace muster::mpi
