// SPDX-License-Identifier: Apache-2.0
// Pickles: one is refused, or read into a tree that can be traversed.

#include <cstdint>
#include <cstdlib>
#include <span>

#include "muster/error.hpp"
#include "src/formats/pickle.hpp"
#include "tests/fuzz/target.hpp"

using namespace muster;
using formats::Pickle;
using formats::PickleKind;
using muster::test::may_fail;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::size_t used = 0;
  may_fail({ErrorKind::corrupt, ErrorKind::unsupported}, [&] {
    const Pickle pickle = Pickle::parse(std::as_bytes(std::span(data, size)), &used);
    if (used > size || pickle.root() >= pickle.size()) std::abort();
    std::size_t sum = 0;
    for (Pickle::Ref ref = 0; ref < pickle.size(); ++ref) {
      for (const Pickle::Ref item : pickle.items(ref))
        if (item >= pickle.size()) std::abort();
      for (const Pickle::Ref item : pickle.arguments(ref))
        if (item >= pickle.size()) std::abort();
      for (const char c : pickle.text(ref)) sum += static_cast<unsigned char>(c);
      sum += pickle.name(ref).size() + pickle.count(ref).value_or(0) + pickle.find(ref, "key").value_or(0);
      if (const auto state = pickle.state(ref); state && *state >= pickle.size()) std::abort();
    }
    if (sum == SIZE_MAX) std::abort();
  });
  return 0;
}
