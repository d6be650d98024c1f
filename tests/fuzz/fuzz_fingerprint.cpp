// SPDX-License-Identifier: Apache-2.0
// Any text as a fingerprint. It is refused with Error(corrupt), or is exactly the text of the parsed fingerprint.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "muster/fingerprint.hpp"
#include "tests/fuzz/target.hpp"

using namespace muster;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  test::may_fail({ErrorKind::corrupt}, [&] {
    const Fingerprint fingerprint = parse_fingerprint(text);
    test::require(fingerprint.text() == text);
    test::require(differences(fingerprint, fingerprint).empty());
  });
  // The hash of random lines never matches: here they are given the right one.
  Fingerprint named{{{std::string(text), {DType::f32, {static_cast<std::int64_t>(size)}}, size}}};
  test::require(parse_fingerprint(named.text()) == named);
  return 0;
}
