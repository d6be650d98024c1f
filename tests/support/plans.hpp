// SPDX-License-Identifier: Apache-2.0
#pragma once
// Plans of tests, of the rules alone.

#include <string>

#include "muster/plan.hpp"

namespace muster::test {

/// `more`: members before the rules, each with a comma behind it.
inline MergePlan plan_of(const std::string& rules, const std::string& more = "") {
  return MergePlan::parse(R"({"muster_plan": 1, )" + more + R"("rules": [)" + rules + "]}", "p.json");
}

}  // namespace muster::test
