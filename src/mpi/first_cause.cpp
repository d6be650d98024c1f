// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/first_cause.hpp"

namespace muster::mpi {

void FirstCause::propose(int host, const Error& cause) {
  const std::lock_guard lock(mutex_);
  if (!since_) since_ = Clock::now();
  proposals_.emplace(host, cause);
}

std::optional<Error> FirstCause::best() const {
  const std::lock_guard lock(mutex_);
  if (decided_ || proposals_.empty()) return std::nullopt;
  return proposals_.begin()->second;
}

std::optional<FirstCause::Clock::time_point> FirstCause::since() const {
  const std::lock_guard lock(mutex_);
  return since_;
}

void FirstCause::decide(const Error& cause) {
  const std::lock_guard lock(mutex_);
  if (!since_) since_ = Clock::now();
  if (!decided_) decided_ = cause;
}

std::optional<Error> FirstCause::decided() const {
  const std::lock_guard lock(mutex_);
  return decided_;
}

}  // namespace muster::mpi
