// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/call_watch.hpp"

namespace muster::mpi {

CallWatch::CallWatch(std::function<void(std::chrono::milliseconds)> look)
    : thread_([this, look = std::move(look)] { run(look); }) {}

CallWatch::~CallWatch() {
  {
    const std::lock_guard lock(mutex_);
    has_returned_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void CallWatch::run(const std::function<void(std::chrono::milliseconds)>& look) {
  constexpr std::chrono::milliseconds between_looks{100};
  const auto begin = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, between_looks, [this] { return has_returned_; }))
    look(std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin));
}

}  // namespace muster::mpi
