// SPDX-License-Identifier: Apache-2.0
#include "bench/harness/linear_fit.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace bench {

Fit fit_lines(const std::vector<Observation>& observations) {
  if (observations.empty()) {
    throw std::invalid_argument("nothing to fit");
  }
  const std::size_t terms = observations.front().terms.size();
  if (observations.size() < terms) {
    throw std::invalid_argument("fewer observations than terms");
  }
  // Normal equations. Each term is scaled to its maximum, because ranks and squares of ranks have different magnitudes.
  std::vector<double> scale(terms, 0);
  for (const Observation& one : observations) {
    for (std::size_t i = 0; i < terms; ++i) {
      scale[i] = std::max(scale[i], std::abs(one.terms[i]));
    }
  }
  std::vector<std::vector<double>> rows(terms, std::vector<double>(terms + 1, 0));
  for (const Observation& one : observations) {
    const double weight = 1 / std::max(std::abs(one.value), 1e-12);
    for (std::size_t i = 0; i < terms; ++i) {
      const double left = one.terms[i] / scale[i] * weight;
      for (std::size_t j = 0; j < terms; ++j) {
        rows[i][j] += left * (one.terms[j] / scale[j]) * weight;
      }
      rows[i][terms] += left * one.value * weight;
    }
  }
  for (std::size_t i = 0; i < terms; ++i) {
    std::size_t pivot = i;
    for (std::size_t j = i + 1; j < terms; ++j) {
      pivot = std::abs(rows[j][i]) > std::abs(rows[pivot][i]) ? j : pivot;
    }
    std::swap(rows[i], rows[pivot]);
    if (std::abs(rows[i][i]) < 1e-300) {
      throw std::invalid_argument("terms that cannot be told apart");
    }
    for (std::size_t j = 0; j < terms; ++j) {
      if (j == i) {
        continue;
      }
      const double factor = rows[j][i] / rows[i][i];
      for (std::size_t k = i; k <= terms; ++k) {
        rows[j][k] -= factor * rows[i][k];
      }
    }
  }
  Fit fit;
  for (std::size_t i = 0; i < terms; ++i) {
    fit.slopes.push_back(rows[i][terms] / rows[i][i] / scale[i]);
  }
  double squares = 0;
  for (const Observation& one : observations) {
    double value = 0;
    for (std::size_t i = 0; i < terms; ++i) {
      value += fit.slopes[i] * one.terms[i];
    }
    const double off = (value - one.value) / std::max(std::abs(one.value), 1e-12);
    squares += off * off;
  }
  fit.residual = std::sqrt(squares / static_cast<double>(observations.size()));
  return fit;
}

}  // namespace bench
