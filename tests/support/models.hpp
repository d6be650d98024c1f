// SPDX-License-Identifier: Apache-2.0
#pragma once
// Small models of each architecture that a built-in plan is for, with the names that transformers gives them. Sizes are
// odd enough that 2, 3, 4 and 7 ranks do not divide all of them.

#include "src/inspect/demo_model.hpp"

namespace muster::test {

/// Llama with biases and, like a quantised one, with scales beside two of its weights.
inspect::DemoModel llama(bool tied = false);
inspect::DemoModel gpt_neox();
inspect::DemoModel bert();
/// Mixtral: `experts` of `layers` layers.
inspect::DemoModel mixtral(int layers = 4, int experts = 4);

}  // namespace muster::test
