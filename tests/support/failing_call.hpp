// SPDX-License-Identifier: Apache-2.0
#pragma once
// A call of the kernel that fails, through the seam of src/os/fault.hpp.

#include <atomic>
#include <string>
#include <string_view>
#include <utility>

#include "src/os/fault.hpp"

namespace muster::test {

struct CallToFail {
  std::string call;
  std::string path = {};  ///< a part of it
  int error = 0;
  int after = 0;
  int times = 1 << 30;
};

/// While it lives, one call on paths with a part in them fails in this process, from the nth on for some times.
class FailingCall {
 public:
  explicit FailingCall(CallToFail which) {
    which_ = std::move(which);
    seen_ = 0;
    os::set_fault_hook(hook);
  }
  ~FailingCall() { os::set_fault_hook(nullptr); }
  FailingCall(const FailingCall&) = delete;
  FailingCall& operator=(const FailingCall&) = delete;

  /// Such calls up to now, whether they failed or not.
  [[nodiscard]] static int seen() { return seen_; }

 private:
  static int hook(std::string_view call, std::string_view path) {
    if (call != which_.call || path.find(which_.path) == std::string_view::npos) return 0;
    const int before = seen_++;
    return before >= which_.after && before - which_.after < which_.times ? which_.error : 0;
  }

  static inline CallToFail which_;
  static inline std::atomic<int> seen_ = 0;
};

}  // namespace muster::test
