// SPDX-License-Identifier: Apache-2.0
#pragma once
// MPI_Init and MPI_Finalize wait for all ranks, have no deadline and cannot be cancelled: where they do not return, the
// process ends without.

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace muster::mpi {

/// Beside one call of MPI: made before it, destroyed when it has returned.
class CallWatch {
 public:
  /// `look` is called in a thread of its own several times a second with the time that the call has taken; it ends the
  /// process where that is too long.
  explicit CallWatch(std::function<void(std::chrono::milliseconds)> look);
  ~CallWatch();
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

 private:
  void run(const std::function<void(std::chrono::milliseconds)>& look);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_returned_ = false;
  std::thread thread_;
};

}  // namespace muster::mpi
