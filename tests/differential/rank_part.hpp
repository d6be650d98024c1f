// SPDX-License-Identifier: Apache-2.0
#pragma once
// One rank's part of a job of random exchanges. Everything that the exchanges use of the library is in rank_part.cpp.

#include <cstdint>
#include <memory>
#include <string>

#include "muster/sync_group.hpp"

namespace muster::test {

struct Job {
  std::uint64_t seed = 0;
  std::uint64_t number = 0;
  int ranks = 1;
  std::string directory;  ///< of its own, that all ranks see
  std::string program;    ///< `muster`
};

class RankPart {
 public:
  RankPart(const Job& job, std::shared_ptr<SyncGroup> group);
  ~RankPart();
  RankPart(const RankPart&) = delete;
  RankPart& operator=(const RankPart&) = delete;

  /// The next random exchange: appends a line to log(). Collective. False once the group has failed.
  bool step();
  /// Returns when all ranks have ended the exchanges before.
  void barrier();
  /// Calls step() until the group fails, and logs nothing but who is blamed for that.
  void step_until_failure();
  /// Cancels, or waits 300 ms for, a rank that does not come. Collective.
  void wait_for_absent(int absent, bool cancels);
  /// Looks at the results that are held once more, and ends them.
  void end();

  [[nodiscard]] const std::string& log() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace muster::test
