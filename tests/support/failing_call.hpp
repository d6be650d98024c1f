// SPDX-License-Identifier: Apache-2.0
#pragma once
// Makes a system call fail, with the fault-injection hook of src/os/fault.hpp.

#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/os/fault.hpp"

namespace muster::test {

struct CallToFail {
  std::string call = {};  ///< empty for any call
  std::string path = {};  ///< a part of the path
  int error = 0;          ///< 0 if the call succeeds
  int after = 0;
  int times = 1 << 30;
  std::function<void()> then = {};  ///< called when the call is reached, in addition to the failure
};

/// While this object exists, one kind of call on paths that contain `path` fails in this process: `times` times after
/// the first `after` calls.
class FailingCall {
 public:
  explicit FailingCall(CallToFail which) {
    {
      const std::lock_guard lock(mutex_);
      which_ = std::move(which);
      seen_.clear();
    }
    os::set_fault_hook(hook);
  }
  ~FailingCall() { os::set_fault_hook(nullptr); }
  FailingCall(const FailingCall&) = delete;
  FailingCall& operator=(const FailingCall&) = delete;

  /// Returns all matching calls so far, failed or not. After the object is destroyed, returns those of the last object.
  [[nodiscard]] static std::vector<std::string> calls() {
    const std::lock_guard lock(mutex_);
    return seen_;
  }
  [[nodiscard]] static int seen() { return static_cast<int>(calls().size()); }

 private:
  static int hook(std::string_view call, std::string_view path) {
    CallToFail failing;
    {
      const std::lock_guard lock(mutex_);
      if (!which_.call.empty() && call != which_.call) return 0;
      if (path.find(which_.path) == std::string_view::npos) return 0;
      const int before = static_cast<int>(seen_.size());
      seen_.emplace_back(call);
      if (before < which_.after || before - which_.after >= which_.times) return 0;
      failing = which_;
    }
    if (failing.then) failing.then();
    return failing.error;
  }

  static inline CallToFail which_;
  static inline std::mutex mutex_;
  static inline std::vector<std::string> seen_;
};

}  // namespace muster::test
