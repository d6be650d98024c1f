// SPDX-License-Identifier: Apache-2.0
#pragma once
// A mount of faulty_fs for as long as it lives.

#include <sys/types.h>

#include <string>
#include <vector>

#include "tests/support/temporary_directory.hpp"

namespace muster::test {

class FaultyMount {
 public:
  /// `rules`: those of faulty_fs.cpp. Throws std::runtime_error where it cannot be mounted.
  FaultyMount(const std::string& backing, const std::vector<std::string>& rules);
  FaultyMount(const FaultyMount&) = delete;
  FaultyMount& operator=(const FaultyMount&) = delete;
  ~FaultyMount();

  [[nodiscard]] std::string operator/(const std::string& name) const { return point_ / name; }
  /// Loses what was not fsynced.
  void cut_power() const;

  /// Why there can be no mount here; empty: there can.
  static std::string obstacle();

 private:
  TemporaryDirectory point_;
  pid_t server_ = -1;
};

}  // namespace muster::test
