// SPDX-License-Identifier: Apache-2.0
#pragma once
// Random trees with all types of values that a config can contain. The same seed gives the same tree.

#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>

#include "muster/config.hpp"
#include "tests/support/patterns.hpp"

namespace muster::test {

class RandomConfig {
 public:
  explicit RandomConfig(std::uint64_t seed, bool with_tensors = true) : random_(seed), with_tensors_(with_tensors) {}

  /// Returns a tree with at most `levels` levels of containers.
  Config tree(int levels) {
    if (levels > 0 && below(3) != 0) return below(2) == 0 ? array(levels) : object(levels);
    return leaf();
  }

 private:
  std::uint64_t below(std::uint64_t end) { return random_() % end; }

  Config array(int levels) {
    ConfigArray items;
    for (std::uint64_t i = below(6); i > 0; --i) items.push_back(tree(levels - 1));
    return items;
  }

  Config object(int levels) {
    ConfigObject members;
    // Sometimes many members, because objects use a hash table above a certain size.
    for (std::uint64_t i = below(10) == 0 ? 30 : below(6); i > 0; --i) {
      std::string name = key();  // evaluated first, because the order of arguments depends on the compiler
      members.insert(std::move(name), tree(levels - 1));
    }
    return members;
  }

  std::string key() {
    // Keys that the formats use internally also occur as keys of users.
    static const std::array<const char*, 12> keys = {"a",       "b",        "a.b",    "",    "0",        "$tensor",
                                                     "$$float", "$$tensor", "$float", "a#2", "\xc3\xa9", "x\n\"\\"};
    return below(3) == 0 ? "key" + std::to_string(below(100)) : keys[below(keys.size())];
  }

  Config real() {
    static const std::array<double, 7> reals = {0.0,
                                                -0.0,
                                                1.5,
                                                std::numeric_limits<double>::infinity(),
                                                -std::numeric_limits<double>::infinity(),
                                                std::numeric_limits<double>::quiet_NaN(),
                                                std::numeric_limits<double>::denorm_min()};
    return below(2) == 0 ? reals[below(reals.size())] : std::bit_cast<double>(random_());
  }

  Config leaf() {
    switch (below(with_tensors_ ? 8 : 6)) {
      case 0:
        return {};
      case 1:
        return below(2) == 0;
      case 2:
        return static_cast<std::int64_t>(random_() >> below(64));
      case 3:
        return std::uint64_t{random_()};
      case 4:
        return real();
      case 5:
        return key();
      default: {
        const DType dtype = all_dtypes()[below(all_dtypes().size())];
        Shape shape(below(4));
        for (std::int64_t& extent : shape) extent = static_cast<std::int64_t>(below(5));
        return pattern(dtype, std::move(shape), random_());
      }
    }
  }

  std::mt19937_64 random_;
  bool with_tensors_;
};

}  // namespace muster::test
