// SPDX-License-Identifier: Apache-2.0
// The contexts of this process, and how they end together.

#include <algorithm>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "src/base/fork_mutex.hpp"
#include "src/hosts/context.hpp"
#include "src/os/clock.hpp"

namespace muster::hosts {
namespace {

using Clock = os::Clock;

struct Contexts {
  ForkMutex mutex;
  std::vector<std::shared_ptr<Context>> all;
  std::map<std::string_view, std::chrono::milliseconds> rests;  // by kind: the maximum of the contexts that have closed
};

/// A forked child has no contexts: its copies belong to the parent.
Contexts& contexts() {
  static constinit PerProcess<Contexts> the_contexts;
  return *the_contexts;
}

std::vector<std::shared_ptr<Context>> list(std::string_view kind) {
  Contexts& them = contexts();
  const std::lock_guard lock(them.mutex);
  std::vector<std::shared_ptr<Context>> found;
  for (const std::shared_ptr<Context>& context : them.all)
    if (context->transport().kind() == kind) found.push_back(context);
  return found;
}

void forget_ended() {
  Contexts& them = contexts();
  const std::lock_guard lock(them.mutex);
  std::erase_if(them.all, [&them](const std::shared_ptr<Context>& context) {
    if (!context->is_closed()) return context->has_ended() && context->transport().can_be_dropped();
    // This also applies if the context ends long before the transport: the other ranks may notice its end late.
    std::chrono::milliseconds& rest = them.rests[context->transport().kind()];
    rest = std::max(rest, context->rest());
    return true;
  });
}

/// Returns the rest only once, because the end of a transport may call end_all() again.
std::chrono::milliseconds take_rest(std::string_view kind) {
  Contexts& them = contexts();
  const std::lock_guard lock(them.mutex);
  return std::exchange(them.rests[kind], std::chrono::milliseconds(0));
}

}  // namespace

void keep(std::shared_ptr<Context> context) {
  Contexts& them = contexts();
  const std::lock_guard lock(them.mutex);
  them.all.push_back(std::move(context));
}

void advance_endings(std::string_view kind) noexcept {
  try {
    bool has_some = false;
    for (const std::shared_ptr<Context>& context : list(kind)) {
      if (!context->is_retired()) continue;
      context->take_over();
      context->advance();
      context->give_up_if_late();
      has_some = has_some || context->has_ended();
    }
    if (has_some) forget_ended();
  } catch (const std::bad_alloc&) {
    // The next call removes them.
  }
}

bool end_all(std::string_view kind) noexcept {
  try {
    const std::vector<std::shared_ptr<Context>> all = list(kind);
    for (const std::shared_ptr<Context>& context : all) {
      context->take_over();
      context->end_groups();
    }
    const Clock::time_point begin = Clock::now();
    const auto has_ended = [](const std::shared_ptr<Context>& context) { return context->has_ended(); };
    while (!std::ranges::all_of(all, has_ended)) {
      for (const std::shared_ptr<Context>& context : all) {
        if (context->has_ended()) continue;
        context->advance();
        context->give_up_after(Clock::now() - begin);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    forget_ended();
    std::chrono::milliseconds rest = take_rest(kind);
    for (const std::shared_ptr<Context>& context : all) rest = std::max(rest, context->rest());
    std::this_thread::sleep_for(rest);
    return std::ranges::all_of(all, [](const std::shared_ptr<Context>& context) { return context->is_closed(); });
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace muster::hosts
