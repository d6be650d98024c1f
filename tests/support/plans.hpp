// SPDX-License-Identifier: Apache-2.0
#pragma once
// Plans for tests, made from their rules.

#include <string>

#include "muster/plan.hpp"

namespace muster::test {

/// `more` contains members before the rules, each followed by a comma.
inline MergePlan plan_of(const std::string& rules, const std::string& more = "") {
  return MergePlan::parse(R"({"muster_plan": 1, )" + more + R"("rules": [)" + rules + "]}", "p.json");
}

}  // namespace muster::test
