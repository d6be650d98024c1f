// SPDX-License-Identifier: Apache-2.0
#pragma once
// Small models of each architecture that a built-in plan is for, with the names that transformers gives them. Sizes are
// odd enough that 2, 3, 4 and 7 ranks do not divide all of them.

#include <cstdint>

#include "src/inspect/demo_model.hpp"

namespace muster::test {

/// Llama with biases and, like a quantised one, with scales beside two of its weights.
inspect::DemoModel llama(bool tied = false);
inspect::DemoModel gpt_neox();

struct BertSizes {
  std::int64_t hidden = 48;
  std::int64_t intermediate = 96;
  std::int64_t layers = 2;
  std::int64_t heads = 12;
  std::int64_t vocabulary = 101;
  std::int64_t positions = 32;
  bool prefix = false;  ///< names begin with "bert."
};
inspect::DemoModel bert(const BertSizes& sizes = {.layers = 3, .prefix = true});
/// Mixtral: `experts` of `layers` layers.
inspect::DemoModel mixtral(int layers = 4, int experts = 4);

}  // namespace muster::test
