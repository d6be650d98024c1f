// SPDX-License-Identifier: Apache-2.0
#include "src/tcp/forks.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <vector>

namespace muster::tcp {
namespace {

struct Forkables {
  std::mutex mutex;
  std::vector<Forkable*> all;
};

/// Never destroyed: a process may fork at its end.
Forkables& forkables() {
  static auto* const the_forkables = [] {
    ::pthread_atfork(
        [] {
          forkables().mutex.lock();
          for (Forkable* const one : forkables().all) one->before_fork();
        },
        [] {
          for (Forkable* const one : forkables().all) one->after_fork();
          forkables().mutex.unlock();
        },
        [] {
          for (Forkable* const one : forkables().all) one->in_child();
          forkables().mutex.unlock();
        });
    return new Forkables;
  }();
  return *the_forkables;
}

}  // namespace

void Forkable::begin_forkable() {
  Forkables& them = forkables();
  const std::lock_guard lock(them.mutex);
  them.all.push_back(this);
}

void Forkable::end_forkable() noexcept {
  Forkables& them = forkables();
  const std::lock_guard lock(them.mutex);
  std::erase(them.all, this);
}

void give_up(int descriptor) noexcept {
  if (descriptor < 0) return;
  const int nowhere = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (nowhere < 0) return;
  ::dup3(nowhere, descriptor, O_CLOEXEC);
  ::close(nowhere);
}

}  // namespace muster::tcp
