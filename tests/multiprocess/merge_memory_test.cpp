// SPDX-License-Identifier: Apache-2.0
// A merge that does not fit is an error on all ranks before the first byte moves, with needed and available bytes.

#include <sys/resource.h>

#include "doctest/doctest.h"
#include "muster/merge_gather.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/merge_model.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;

namespace {

const std::vector<int> four = {0, 1, 2, 3};

void merge_small(SyncGroup& group) {
  const Merged merged = merge_tensor_parallel(pattern(DType::u8, {5000}, static_cast<std::uint64_t>(group.rank())),
                                              merge::stack(), four, group);
  if (!merged.tensor()) return;
  for (int rank = 0; rank < 4; ++rank)
    RANK_CHECK(is_pattern(merged.tensor()->view().slice(0, rank, rank + 1), DType::u8, {1, 5000},
                          static_cast<std::uint64_t>(rank)));
}

void expect_no_space(SyncGroup& group, const TensorView& mine, const Merge& merge, const std::vector<int>& ranks,
                     const char* limited_by) {
  const Error error = error_of([&] { (void)merge_tensor_parallel(mine, merge, ranks, group); });
  if (error.kind() != ErrorKind::no_space || !says(error, "needed") || !says(error, limited_by))
    throw RankFailure(error.what());
}

}  // namespace

TEST_CASE("more than the machine has, by tensors that repeat one byte") {
  run_ranks(4, [](SyncGroup& group) {
    const std::byte byte{7};
    const TensorView huge(DType::u8, {std::int64_t{1} << 40}, &byte, {0});
    for (const Merge& merge : {merge::concat(0), merge::stack(), merge::sum()}) {
      expect_no_space(group, huge, merge, four, "available");
      merge_small(group);
    }
    // Neither list is too much alone where the machine has 1 TiB, nobody's is where it has not: the sum is what counts.
    const std::vector<int> mine = group.rank() < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
    expect_no_space(group, huge, merge::sum(), mine, "by 2 ranks");
    // One list too large is everybody's error: an exchange is collective over the group.
    if (group.rank() < 2)
      expect_no_space(group, huge, merge::concat(0), {0, 1}, "available");
    else
      expect_no_space(group, pattern(DType::u8, {10}, 1), merge::concat(0), {2, 3}, "available");
    merge_small(group);
  });
}

TEST_CASE("sizes that add up to more than 63 bits are refused, not wrapped") {
  run_ranks(4, [](SyncGroup& group) {
    const std::byte byte{7};
    const TensorView huge(DType::u8, {std::int64_t{1} << 59}, &byte, {0});
    const Error error = error_of([&] { (void)merge_tensor_parallel(huge, merge::concat(0), four, group); });
    RANK_CHECK(error.kind() == ErrorKind::no_space || error.kind() == ErrorKind::argument);
    merge_small(group);
  });
}

TEST_CASE("a file size limit (RLIMIT_FSIZE) on the first rank is an error on all, not SIGXFSZ") {
  Ranks child(1, [](int) {
    const rlimit small{8 << 20, 8 << 20};
    RANK_CHECK(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    for (const Ended& ended : try_ranks(4, [](SyncGroup& group) {
           const Tensor mine = pattern(DType::u8, {4 << 20}, 1);
           for (const Merge& merge : {merge::concat(0), merge::stack()})
             expect_no_space(group, mine, merge, four, "RLIMIT_FSIZE");
           merge_small(group);
         }))
      if (!ended.ok()) throw RankFailure(ended.words);
  });
  const Ended ended = child.wait().front();
  CHECK_MESSAGE(ended.ok(), ended.signal, ended.words);
}

TEST_CASE("a file size limit (RLIMIT_FSIZE) on a sender does not keep it from writing into the first rank's memory") {
  run_ranks(4, [](SyncGroup& group) {
    if (group.rank() == 2) {
      const rlimit small{1 << 20, RLIM_INFINITY};
      RANK_CHECK(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    }
    const Tensor mine = pattern(DType::u8, {4 << 20}, 1);
    const Merged merged = merge_tensor_parallel(mine, merge::concat(0), four, group);
    if (merged.tensor())
      RANK_CHECK(bitwise_equal(*merged.tensor(), merge_model(merge::concat(0), {mine, mine, mine, mine})));
    merge_small(group);
  });
}

TEST_CASE("a rank without room in its address space is an error on all, whatever is merged, and the group goes on") {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  MESSAGE("skipped: sanitizers need the address space");
#else
  for (const int victim : {0, 2}) {
    for (const Merge& merge : {merge::concat(0), merge::sum()}) {
      CAPTURE(victim);
      run_ranks(4, [&](SyncGroup& group) {
        // Untouched: the others' memory is not needed for it.
        const Tensor mine = Tensor::allocate(DType::u8, {300 << 20});
        if (group.rank() == victim) {
          const rlimit small{700 << 20, 700 << 20};
          RANK_CHECK(::setrlimit(RLIMIT_AS, &small) == 0);
        }
        const Error error = error_of([&] { (void)merge_tensor_parallel(mine, merge, four, group); });
        if (error.kind() != ErrorKind::no_space || error.rank() != victim) throw RankFailure(error.what());
        merge_small(group);
      });
    }
  }
#endif
}
