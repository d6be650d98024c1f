// SPDX-License-Identifier: Apache-2.0
#pragma once
// Least squares: the cost of one more unit of each factor on which a measured quantity depends.

#include <string>
#include <vector>

namespace bench {

/// A value and the factors on which it depends, one number per term.
struct Observation {
  std::vector<double> terms;
  double value = 0;
};

struct Fit {
  std::vector<double> slopes;  ///< one per term
  double residual = 0;         ///< root mean square of (value - fit) / value
};

/// Weights each observation relative to its value, so that small values are fitted as well as large ones. Throws
/// std::invalid_argument if there are fewer observations than terms, or if terms are linearly dependent.
Fit fit_lines(const std::vector<Observation>& observations);

}  // namespace bench
