// SPDX-License-Identifier: Apache-2.0
#pragma once
// Least squares: what a measured quantity costs for one more of each thing it depends on.

#include <string>
#include <vector>

namespace bench {

/// A value, and what it depends on: one number a term.
struct Observation {
  std::vector<double> terms;
  double value = 0;
};

struct Fit {
  std::vector<double> slopes;  ///< one a term
  double residual = 0;         ///< root of the mean square of (value - fit) / value
};

/// Each observation counts relative to its value, so that the small ones are fitted as well as the large ones. Throws
/// std::invalid_argument where there are fewer observations than terms, or terms that cannot be told apart.
Fit fit_lines(const std::vector<Observation>& observations);

}  // namespace bench
