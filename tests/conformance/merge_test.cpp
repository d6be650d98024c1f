// SPDX-License-Identifier: Apache-2.0
// Requirements for every merge on gather, checked against a simple model that merges in one process.

#include "muster/merge_gather.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>

#include "doctest/doctest.h"
#include "muster/shared_arena.hpp"
#include "src/group/group.hpp"
#include "src/merge/reduce.hpp"
#include "src/shm/segment.hpp"
#include "src/shm/window_ring.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/hesitation.hpp"

using namespace muster;
using namespace muster::test;

namespace {

Make equal_patterns(DType dtype, const Shape& shape, int round) {
  return [=](int) { return pattern(dtype, shape, seed_of(0, round)); };
}

bool is_reducible(merge::Combine combine, DType dtype) {
  try {
    merge::check_reducible(combine, dtype);
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// Requires that every rank gets an error of this kind whose message contains all of `parts`. Returns the message.
std::string refused(Group& group, const TensorView& mine, const Merge& merge, const std::vector<int>& ranks,
                    ErrorKind kind, const std::vector<std::string>& parts) {
  return error_of(kind, parts, [&] { (void)merge_tensor_parallel(mine, merge, ranks, group); }).what();
}

}  // namespace

TEST_CASE("every kind of merge, each rank as root") {
  for (const int size : group_sizes) {
    CAPTURE(size);
    run_ranks(size, [&](Group& group) {
      int round = 0;
      for (int first = 0; first < size; ++first) {
        const std::vector<int> ranks = ranks_from(first, size);
        for (int again = 0; again < (size < 7 ? 3 : 1); ++again) {
          ++round;
          merge_and_check(group, ranks, merge::concat(0), patterns(DType::f32, {13, 40}, round));
          merge_and_check(group, ranks, merge::concat(1), patterns(DType::f32, {13, 40}, round));
          merge_and_check(group, ranks, merge::concat(-1), patterns(DType::bf16, {3, 5, 300}, round));
          merge_and_check(group, ranks, merge::concat_blocks(0, {2, 1, 1}), patterns(DType::bf16, {8, 33}, round));
          merge_and_check(group, ranks, merge::concat_blocks(1, {1, 1}), patterns(DType::u8, {5, 10}, round));
          merge_and_check(group, ranks, merge::stack(), patterns(DType::i32, {7, 9}, round));
          merge_and_check(group, ranks, merge::max(), patterns(DType::f32, {300, 33}, round));
          merge_and_check(group, ranks, merge::sum(), patterns(DType::bf16, {300, 33}, round));
          merge_and_check(group, ranks, first > 0 ? merge::first() : merge::same(),
                          equal_patterns(DType::f16, {9}, round));
          merge_and_check(group, ranks, merge::first(), patterns(DType::f16, {9}, round),
                          {.root_tensors = again == 0 ? RootTensors::copy : RootTensors::borrow});
        }
      }
    });
  }
}

TEST_CASE("all dtypes, empty and scalar tensors") {
  run_ranks(4, [](Group& group) {
    int round = 0;
    for (const DType dtype : all_dtypes()) {
      for (const Shape& shape : {Shape{}, Shape{0}, Shape{3, 0, 2}, Shape{6, 4}, Shape{100, 68}}) {
        const std::vector<int> ranks = ranks_from(++round % 4, 4);
        for (const Merge& merge :
             {merge::stack(), merge::same(), merge::first(), merge::concat(0), merge::concat(-1)}) {
          if (shape.empty() && std::holds_alternative<merge::Concat>(merge)) continue;
          // Four scalars of 4 bits would be two bytes, each shared by two ranks.
          if (shape.empty() && is_packed(dtype) && std::holds_alternative<merge::Stack>(merge)) continue;
          const bool is_same = std::holds_alternative<merge::Same>(merge);
          merge_and_check(group, ranks, merge,
                          is_same ? equal_patterns(dtype, shape, round) : patterns(dtype, shape, round));
        }
        if (is_reducible(merge::Combine::max, dtype))
          merge_and_check(group, ranks, merge::max(), patterns(dtype, shape, round));
        if (is_reducible(merge::Combine::sum, dtype))
          merge_and_check(group, ranks, merge::sum(), patterns(dtype, shape, round));
      }
    }
  });
}

TEST_CASE("sizes along the dimension differ, some are zero") {
  run_ranks(4, [](Group& group) {
    for (int round = 0; round < 6; ++round) {
      const std::vector<int> ranks = ranks_from(round % 4, 4);
      const auto size = [&](int rank) { return static_cast<std::int64_t>((rank * 7 + round * 5) % 11) * 100; };
      merge_and_check(group, ranks, merge::concat(0), [&](int rank) {
        return pattern(DType::f32, {size(rank), 17}, seed_of(rank, round));
      });
      merge_and_check(group, ranks, merge::concat(1), [&](int rank) {
        return pattern(DType::bf16, {30, size(rank), 3}, seed_of(rank, round));
      });
      merge_and_check(group, ranks, merge::concat_blocks(1, {3, 1}), [&](int rank) {
        return pattern(DType::u8, {30, size(rank)}, seed_of(rank, round));
      });
    }
  });
}

TEST_CASE("large tensors: many pieces, rows of every length, many chunks") {
  run_ranks(4, [](Group& group) {
    const std::vector<int> ranks = ranks_from(0, 4);
    for (const std::int64_t row : {1, 63, 129, 2048, 70001})
      merge_and_check(group, ranks, merge::concat(1), patterns(DType::bf16, {4000000 / row, row}, 0));
    for (int round = 0; round < 2; ++round) {
      merge_and_check(group, ranks, merge::concat(0), patterns(DType::bf16, {1500, 3001}, round));
      merge_and_check(group, ranks, merge::max(), patterns(DType::bf16, {1500, 3001}, round));
      merge_and_check(group, ranks, merge::sum(), patterns(DType::f32, {1500, 1001}, round));
    }
  });
}

TEST_CASE("lengths around each limit, odd and even, and partners that are stopped and continued at any moment") {
  run_ranks(3, [](Group& group) {
    const std::vector<int> ranks = ranks_from(0, 3);
    std::optional<Hesitation> hesitation;
    for (const int slow : {-1, 0, 2}) {
      if (group.rank() == 1 && slow >= 0) hesitation.emplace(group, slow);
      for (const std::int64_t limit : {1024, 65536, 1 << 20}) {
        for (const std::int64_t bytes : {limit - 1, limit, limit + 1}) {
          const auto round = static_cast<std::uint64_t>(bytes);
          merge_and_check(group, ranks, merge::concat(0), patterns(DType::u8, {bytes}, round));
          merge_and_check(group, ranks, merge::max(), patterns(DType::i16, {bytes}, round));
        }
      }
      hesitation.reset();
      group.barrier();
    }
  });
}

TEST_CASE("strided sources") {
  run_ranks(3, [](Group& group) {
    const std::vector<int> ranks = ranks_from(1, 3);
    const auto view_of = [](const Tensor& whole, int kind) {
      if (kind == 0) return whole.view().slice(1, 100, 900).transposed();
      if (kind == 1) return whole.view().slice(0, 3, 700);
      return TensorView(DType::f32, {500, 1000}, whole.data(), {1000, 0});  // each element a thousand times
    };
    for (int kind = 0; kind < 3; ++kind) {
      for (const Merge& merge : {merge::concat(0), merge::concat(1), merge::stack(), merge::max(), merge::sum(),
                                 merge::concat_blocks(0, {1, 1})}) {
        if (kind == 1 && std::holds_alternative<merge::Concat>(merge) && !std::get<merge::Concat>(merge).blocks.empty())
          continue;
        const Tensor whole = pattern(DType::f32, {1000, 1001}, seed_of(group.rank(), kind));
        const MergeResult merged = merge_tensor_parallel(view_of(whole, kind), merge, ranks, group);
        if (!merged.tensor()) continue;
        std::vector<Tensor> sources;
        for (const int rank : ranks)
          sources.push_back(Tensor::copy_of(view_of(pattern(DType::f32, {1000, 1001}, seed_of(rank, kind)), kind)));
        RANK_CHECK(bitwise_equal(*merged.tensor(), merge_model(merge, sources)));
      }
      const Tensor equal = pattern(DType::f32, {1000, 1001}, 5);
      const MergeResult agreed =
          merge_tensor_parallel(view_of(equal, kind), merge::same(), ranks, group, {.root_tensors = RootTensors::copy});
      if (agreed.tensor()) RANK_CHECK(bitwise_equal(*agreed.tensor(), Tensor::copy_of(view_of(equal, kind))));
    }
  });
}

TEST_CASE(
    "invalid combinations are refused on every rank, with the merge, dtype and shape of each, and the group remains "
    "usable") {
  run_ranks(4, [](Group& group) {
    const std::vector<int> all = ranks_from(0, 4);
    const int me = group.rank();
    const Tensor usual = pattern(DType::f32, {4, 8}, seed_of(me, 0));
    const Tensor odd = me == 2 ? pattern(DType::f16, {4, 8}, 1) : usual;
    const Tensor taller = me == 2 ? pattern(DType::f32, {5, 8}, 1) : usual;
    using Kind = ErrorKind;
    refused(group, odd, merge::concat(0), all, Kind::rank_mismatch,
            {"rank 0 concat(0) F32 [4, 8]", "rank 2 concat(0) F16 [4, 8]"});
    refused(group, taller, merge::concat(1), all, Kind::rank_mismatch,
            {"rank 1 concat(1) F32 [4, 8]", "rank 2 concat(1) F32 [5, 8]"});
    refused(group, taller, merge::max(), all, Kind::rank_mismatch, {"rank 2 max F32 [5, 8]"});
    refused(group, taller, merge::stack(), all, Kind::rank_mismatch, {"rank 2 stack F32 [5, 8]"});
    refused(group, taller, merge::same(), all, Kind::rank_mismatch, {"rank 2 same F32 [5, 8]"});
    refused(group, usual, me == 3 ? merge::sum() : merge::max(), all, Kind::rank_mismatch,
            {"rank 0 max", "rank 3 sum"});
    refused(group, usual, me == 3 ? merge::concat_blocks(1, {1, 1}) : merge::concat(1), all, Kind::rank_mismatch,
            {"rank 0 concat(1)", "rank 3 concat_blocks(1, [1, 1])"});
    refused(group, usual, merge::concat(2), all, Kind::invalid_argument, {"rank 0", "dimension 2 is out of range"});
    refused(group, usual, me == 1 ? merge::concat_blocks(1, {2, 1}) : merge::concat(1), all, Kind::invalid_argument,
            {"rank 1", "[2, 1]"});
    refused(group, pattern(DType::complex64, {3}, 1), merge::sum(), all, Kind::unsupported, {"C64", "sum"});
    refused(group, pattern(DType::boolean, {3}, 1), merge::sum(), all, Kind::unsupported, {"BOOL", "sum"});
    refused(group, pattern(DType::f4_e2m1, {5, 3}, 1), merge::concat(1), all, Kind::unsupported, {"packed"});
    refused(group, pattern(DType::u4, {}, 1), merge::stack(), all, Kind::unsupported, {"packed"});
    refused(group, usual, merge::concat(0), me == 1 ? std::vector<int>{1, 0, 2, 3} : all, Kind::rank_mismatch,
            {"lists"});
    refused(group, usual, merge::concat(0), {0, 1, 2, 9}, Kind::invalid_argument, {"rank 9"});
    // Both values name the same dimension, counted from either end.
    merge_and_check(group, all, me % 2 == 0 ? merge::concat(1) : merge::concat(-1), patterns(DType::f32, {4, 8}, 3));
  });
}

TEST_CASE("a merge into the caller's tensor, and one that does not fit into it") {
  run_ranks(4, [](Group& group) {
    const std::vector<int> ranks = ranks_from(1, 4);
    const Merge merges[] = {merge::concat(0), merge::max(), merge::first()};
    for (const Merge& merge : merges) {
      GatherOptions options;
      const std::int64_t rows = merge == Merge(merge::concat(0)) ? 28 : 7;
      if (group.rank() == ranks.front()) options.into = {Tensor::allocate(DType::f32, {rows, 300})};
      for (int round = 0; round < 3; ++round)
        merge_and_check(group, ranks, merge, patterns(DType::f32, {7, 300}, round), options);
      if (group.rank() == ranks.front()) options.into = {Tensor::allocate(DType::f32, {rows, 301})};
      const Tensor mine = pattern(DType::f32, {7, 300}, seed_of(group.rank(), 0));
      error_of(ErrorKind::invalid_argument, {"tensor 0 is F32", "301"},
               [&] { (void)merge_tensor_parallel(mine, merge, ranks, group, options); });
      merge_and_check(group, ranks, merge, patterns(DType::f32, {7, 300}, 9));
    }
  });
}

TEST_CASE("\"same\" names the ranks that differ in a bit") {
  run_ranks(4, [](Group& group) {
    const Tensor mine = pattern(DType::f32, {1000, 33}, 1);
    if (group.rank() == 1 || group.rank() == 3) mine.mutable_data()[131999 - group.rank()] ^= std::byte{1};
    const std::string words = refused(group, mine, merge::same(), ranks_from(2, 4), ErrorKind::rank_mismatch,
                                      {"same", "rank 1 (XXH3", "rank 3 (XXH3"});
    RANK_CHECK(words.find("rank 0") == std::string::npos && words.find("rank 2 ") == std::string::npos);
    // Zeros of different sign are different bits.
    const Tensor zero = Tensor::allocate(DType::f32, {1});
    const float value = group.rank() == 1 ? -0.0F : 0.0F;
    std::memcpy(zero.mutable_data(), &value, sizeof value);
    refused(group, zero, merge::same(), ranks_from(0, 4), ErrorKind::rank_mismatch, {"rank 1"});
    merge_and_check(group, ranks_from(0, 4), merge::same(), equal_patterns(DType::f32, {7}, 1));
  });
}

TEST_CASE("different merges and a gather at once, on disjoint lists, and ranks in no list") {
  run_ranks(7, [](Group& group) {
    const std::vector<std::vector<int>> lists = {{1, 0}, {5, 2}, {3}, {6, 4}};
    for (int round = 0; round < 4; ++round) {
      for (std::size_t i = 0; i < lists.size(); ++i) {
        // Each list in turn has no work.
        if (std::ranges::find(lists[i], group.rank()) == lists[i].end()) continue;
        if (i == static_cast<std::size_t>(round)) {
          const Tensor unused = pattern(DType::u8, {1}, 0);
          const MergeResult nothing = merge_tensor_parallel(unused, merge::sum(), std::vector<int>{}, group);
          RANK_CHECK(!nothing.tensor() && nothing.ranks().empty());
        } else if (i == 0) {
          merge_and_check(group, lists[i], merge::concat(1), patterns(DType::f32, {300, 400 + round}, round));
        } else if (i == 1) {
          merge_and_check(group, lists[i], merge::sum(), patterns(DType::bf16, {3000, 400}, round));
        } else if (i == 2) {
          merge_and_check(group, lists[i], merge::stack(), patterns(DType::bf16, {30, 40}, round));
        } else {
          gather_and_check(group, lists[i], DType::f32, {5000}, round);
        }
      }
    }
  });
}

TEST_CASE("a rank of the list in another call is an error on all ranks") {
  run_ranks(3, [](Group& group) {
    const Tensor mine = pattern(DType::f32, {10}, 1);
    error_of(ErrorKind::rank_mismatch, {"rank 2 merge_tensor_parallel"}, [&] {
      if (group.rank() == 1)
        (void)get_tensors_parallel(mine, ranks_from(0, 3), group);
      else
        (void)merge_tensor_parallel(mine, merge::concat(0), ranks_from(0, 3), group);
    });
    merge_and_check(group, ranks_from(1, 3), merge::concat(0), patterns(DType::f32, {10}, 1));
  });
}

TEST_CASE("a root that grants memory which is too small is an error on all ranks") {
  static std::uint64_t place = 0;
  run_ranks(4, [](Group& group) {
    const group::BaseGroup& inside = group::inside(group);
    const auto is_near = [&](int rank) { return inside.host_of(rank) == inside.host_of(0); };
    // The fault needs another rank on the root's host. A failed group of MPI ends MPI.
    if (group.kind() == "file" || group.kind() == "mpi" || !(is_near(1) || is_near(2) || is_near(3))) return;
    const bool is_one_host = is_near(1) && is_near(2) && is_near(3);
    const shm::OwnedSegment segment(4096);
    const shm::WindowRing ring(1, 64, 1);
    for (const Merge& merge : {merge::concat(0), merge::sum()}) {
      const auto copy = group.duplicate();
      place = is_one_host ? segment.place() : ring.place();
      if (group.rank() == 0)
        os::set_damage_hook([](std::span<std::byte> note) {
          if (note.size() == 16) std::memcpy(note.data() + 8, &place, sizeof place);
        });
      refused(*copy, pattern(DType::f32, {100, 100}, 1), merge, four, ErrorKind::corrupt,
              {"malformed message", "too small"});
      os::set_damage_hook(nullptr);
      if (is_one_host) merge_and_check(*copy, four, merge, patterns(DType::f32, {100, 100}, 1));
    }
    merge_and_check(group, four, merge::concat(0), patterns(DType::f32, {100, 100}, 2));
  });
}

TEST_CASE("results are unchanged while others are merged, and their memory is returned") {
  run_ranks(3, [](Group& group) {
    const std::vector<int> ranks = ranks_from(0, 3);
    std::vector<MergeResult> kept;
    for (int round = 0; round < 5; ++round) {
      const Tensor mine = pattern(DType::f32, {1000 + round, 70}, seed_of(group.rank(), round));
      kept.push_back(merge_tensor_parallel(mine, round % 2 == 0 ? merge::concat(0) : merge::max(), ranks, group));
    }
    for (int round = 0; round < 5 && group.rank() == 0; ++round) {
      std::vector<Tensor> sources;
      for (const int rank : ranks) sources.push_back(pattern(DType::f32, {1000 + round, 70}, seed_of(rank, round)));
      RANK_CHECK(bitwise_equal(*kept[static_cast<std::size_t>(round)].tensor(),
                               merge_model(round % 2 == 0 ? merge::concat(0) : merge::max(), sources)));
    }
    kept.clear();
    for (int round = 0; round < 5; ++round)
      merge_and_check(group, ranks, merge::concat(0), patterns(DType::f32, {1000, 70}, round));
    (void)trim(group);
    for (int round = 0; round < 3; ++round)
      merge_and_check(group, ranks, merge::concat(1), patterns(DType::f32, {1000, 71}, round));
  });
}

TEST_CASE("a merged tensor outlives its result, the group and the other ranks") {
  const GroupOf group(3);
  run_processes(3, [&](int rank) {
    auto mine = group.join(rank);
    std::optional<Tensor> kept;
    {
      MergeResult merged = merge_tensor_parallel(pattern(DType::u8, {300000}, seed_of(rank, 1)), merge::stack(),
                                                 ranks_from(0, 3), *mine);
      kept = merged.tensor();
      merged.release();
      RANK_CHECK(!merged.tensor());
    }
    for (int round = 2; round < 5; ++round)
      merge_and_check(*mine, ranks_from(0, 3), merge::stack(), patterns(DType::u8, {300000}, round));
    mine.reset();
    if (!kept) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (int source = 0; source < 3; ++source)
      RANK_CHECK(is_pattern(kept->view().slice(0, source, source + 1), DType::u8, {1, 300000}, seed_of(source, 1)));
    std::jthread([last = std::move(*kept)]() mutable { last = {}; });
  });
}

TEST_CASE("a forked child reads the result, and its exit changes nothing") {
  run_ranks(2, [](Group& group) {
    const std::vector<int> ranks = ranks_from(0, 2);
    const auto make = patterns(DType::u8, {500000}, 1);
    MergeResult merged = merge_tensor_parallel(make(group.rank()), merge::concat(0), ranks, group);
    if (group.rank() == 0) {
      const Tensor expected = merge_model(merge::concat(0), {make(0), make(1)});
      Ranks child(1, [&](int) {
        RANK_CHECK(bitwise_equal(*merged.tensor(), expected));
        merged.release();
      });
      RANK_CHECK(child.wait(std::chrono::seconds(10)).front().ok());
    }
    // If the slot were free, this merge would overwrite it.
    merge_and_check(group, ranks, merge::concat(0), patterns(DType::u8, {500000}, 2));
    if (group.rank() == 0)
      RANK_CHECK(bitwise_equal(*merged.tensor(), merge_model(merge::concat(0), {make(0), make(1)})));
  });
}

TEST_CASE("sources in an arena are merged like any others") {
  run_ranks(3, [](Group& group) {
    SharedArena arena(8 << 20);
    for (int round = 0; round < 3; ++round) {
      const auto make = [&](int rank) {
        const Tensor tensor =
            rank == group.rank() ? arena.allocate(DType::bf16, {300, 500}) : Tensor::allocate(DType::bf16, {300, 500});
        fill(tensor.mutable_data(), tensor.nbytes(), seed_of(rank, round));
        return tensor;
      };
      merge_and_check(group, ranks_from(round, 3), merge::concat(1), make);
      merge_and_check(group, ranks_from(round, 3), merge::sum(), make);
    }
    RANK_CHECK(arena.waiting_for_leases() == 0);
  });
}

TEST_CASE("the root's own tensor is borrowed or copied when no data is moved") {
  run_ranks(2, [](Group& group) {
    const Tensor mine = pattern(DType::f32, {5, 6}, 1);
    for (const Merge& merge : {merge::same(), merge::first()}) {
      const MergeResult borrowed = merge_tensor_parallel(mine, merge, ranks_from(0, 2), group);
      const MergeResult copied =
          merge_tensor_parallel(mine, merge, ranks_from(0, 2), group, {.root_tensors = RootTensors::copy});
      RANK_CHECK(borrowed.report().rounds == 1);
      if (group.rank() != 0) continue;
      RANK_CHECK(borrowed.tensor()->data() == mine.data());
      RANK_CHECK(copied.tensor()->data() != mine.data());
    }
  });
}
