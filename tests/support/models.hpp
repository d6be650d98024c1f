// SPDX-License-Identifier: Apache-2.0
#pragma once
// Small models of each architecture with a built-in plan, with the tensor names of transformers. Their sizes are chosen
// so that 2, 3, 4 and 7 ranks do not divide all of them evenly.

#include <cstdint>

#include "src/inspect/demo_model.hpp"

namespace muster::test {

/// Llama with biases, and with scales for two of its weights like a quantised model.
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
/// Mixtral with `layers` layers of `experts` experts.
inspect::DemoModel mixtral(int layers = 4, int experts = 4);

}  // namespace muster::test
