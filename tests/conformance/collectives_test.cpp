// SPDX-License-Identifier: Apache-2.0
// Requirements for every collective, over every kind of group. Results are compared with a model that has the tensors
// of all ranks.
//
// MUSTER_TEST_OPERATIONS: number of operations of the random program (100).
// MUSTER_TEST_ALL=1: run every call with every root, dtype, reduction, shape and dimension. Without it, the cases cover
// each pair of these.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "doctest/doctest.h"
#include "muster/process_group.hpp"
#include "muster/shared_arena.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/hesitation.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/random_config.hpp"

using namespace muster;
using namespace muster::test;

namespace {

constexpr int sizes[] = {1, 2, 3, 4, 7};

// Elements are small integers, so that every dtype represents them and their sums exactly.

/// Returns the bits of a float with the given numbers of exponent and mantissa bits.
std::uint32_t float_bits(double value, int exponent_bits, int mantissa_bits) {
  if (value == 0) return 0;
  int exponent = 0;
  const double fraction = std::frexp(std::abs(value), &exponent);  // [0.5, 1)
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const auto mantissa = static_cast<std::uint32_t>((fraction * 2 - 1) * (1 << mantissa_bits));
  const auto biased = static_cast<std::uint32_t>(exponent - 1 + bias);
  const std::uint32_t sign = value < 0 ? 1U << (exponent_bits + mantissa_bits) : 0;
  return sign | biased << mantissa_bits | mantissa;
}

template <class T>
void put(std::byte* to, std::int64_t at, T value) {
  std::memcpy(to + at * static_cast<std::int64_t>(sizeof value), &value, sizeof value);
}

void encode(DType dtype, std::byte* to, std::int64_t at, double value) {
  switch (dtype) {
    case DType::f64:
      return put(to, at, value);
    case DType::f32:
      return put(to, at, static_cast<float>(value));
    case DType::f16:
      return put(to, at, static_cast<std::uint16_t>(float_bits(value, 5, 10)));
    case DType::bf16:
      return put(to, at, static_cast<std::uint16_t>(float_bits(value, 8, 7)));
    case DType::f8_e5m2:
      return put(to, at, static_cast<std::uint8_t>(float_bits(value, 5, 2)));
    case DType::f8_e4m3fn:
      return put(to, at, static_cast<std::uint8_t>(float_bits(value, 4, 3)));
    default:
      break;
  }
  // Integers whose lower bytes are equal in all elements.
  const auto whole = static_cast<std::int64_t>(value);
  std::memcpy(to + at * static_cast<std::int64_t>(itemsize(dtype)), &whole, itemsize(dtype));
}

/// The value is 0 or 1, or sometimes -1, for element `at` of a rank in an operation.
double value_of(int rank, std::uint64_t operation, std::int64_t at, bool has_sign) {
  std::uint64_t state = (operation * 31 + static_cast<std::uint64_t>(rank)) * 0x9e3779b97f4a7c15ULL;
  state = (state ^ static_cast<std::uint64_t>(at)) * 6364136223846793005ULL;
  const auto value = static_cast<int>((state >> 60) % 3);
  return value == 2 ? (has_sign ? -1 : 1) : value;
}

bool has_sign(DType dtype) {
  return dtype != DType::boolean && dtype != DType::u8 && dtype != DType::u16 && dtype != DType::u32 &&
         dtype != DType::u64;
}

const std::vector<DType> reducible = {DType::u8,  DType::i8,  DType::u16,       DType::i16,    DType::u32,
                                      DType::i32, DType::u64, DType::i64,       DType::f16,    DType::bf16,
                                      DType::f32, DType::f64, DType::f8_e4m3fn, DType::f8_e5m2};

Tensor tensor_of(int rank, std::uint64_t operation, DType dtype, const Shape& shape, SharedArena* arena = nullptr) {
  const Tensor tensor = arena != nullptr ? arena->allocate(dtype, shape) : Tensor::allocate(dtype, shape);
  const std::int64_t count = element_count(shape);
  for (std::int64_t i = 0; i < count; ++i)
    encode(dtype, tensor.mutable_data(), i, value_of(rank, operation, i, has_sign(dtype)));
  return tensor;
}

/// Reduces the tensors of all ranks in an operation, in the order of the ranks.
Tensor reduced(int ranks, std::uint64_t operation, DType dtype, const Shape& shape, ReduceOp op) {
  Tensor tensor = Tensor::allocate(dtype, shape);
  const std::int64_t count = element_count(shape);
  for (std::int64_t i = 0; i < count; ++i) {
    double all = value_of(0, operation, i, has_sign(dtype));
    for (int rank = 1; rank < ranks; ++rank) {
      const double next = value_of(rank, operation, i, has_sign(dtype));
      if (op == ReduceOp::sum || op == ReduceOp::average) all += next;
      if (op == ReduceOp::product) all *= next;
      if (op == ReduceOp::min) all = std::min(all, next);
      if (op == ReduceOp::max) all = std::max(all, next);
    }
    // Products can yield -0.0.
    if (op == ReduceOp::product && all == 0) {
      double sign = 1;
      for (int rank = 0; rank < ranks; ++rank)
        if (value_of(rank, operation, i, has_sign(dtype)) < 0) sign = -sign;
      if (sign < 0 && dtype >= DType::f16) {
        std::memset(tensor.mutable_data() + i * static_cast<std::int64_t>(itemsize(dtype)), 0, itemsize(dtype));
        tensor.mutable_data()[(i + 1) * static_cast<std::int64_t>(itemsize(dtype)) - 1] = std::byte{0x80};
        continue;
      }
    }
    if (op == ReduceOp::average)
      all = dtype == DType::f32 ? static_cast<float>(all) / static_cast<float>(ranks) : all / ranks;
    encode(dtype, tensor.mutable_data(), i, all);
  }
  return tensor;
}

/// Returns the same elements as a strided view of memory that `keep` owns.
TensorView strided(const Tensor& tensor, Tensor& keep) {
  if (tensor.shape().size() != 2 || is_packed(tensor.dtype())) return tensor.view();
  keep = Tensor::copy_of(tensor.view().transposed());
  return keep.view().transposed();
}

Tensor joined(const std::vector<Tensor>& parts, std::size_t dim) {
  Shape shape = parts[0].shape();
  shape[dim] = 0;
  for (const Tensor& part : parts) shape[dim] += part.shape()[dim];
  const Tensor whole = Tensor::allocate(parts[0].dtype(), shape);
  std::int64_t rows = 1;
  for (std::size_t i = 0; i < dim; ++i) rows *= shape[i];
  std::byte* to = whole.nbytes() == 0 ? nullptr : whole.mutable_data();
  for (std::int64_t row = 0; row < rows; ++row)
    for (const Tensor& part : parts) {
      const std::size_t bytes = part.nbytes() / static_cast<std::size_t>(rows);
      if (bytes != 0) std::memcpy(to, part.data() + static_cast<std::size_t>(row) * bytes, bytes);
      to += bytes;
    }
  return whole;
}

#define SAME(got, wanted) RANK_CHECK(bitwise_equal(got, wanted))

/// Parameters of one operation. `call` is a number below `calls`.
struct Choice {
  int call;
  int root;
  DType dtype;
  ReduceOp op;
  Shape shape;
  int dim;
  bool from_end;  // the dimension is counted from the end
};
constexpr int calls = 16;
constexpr bool is_reduction(int call) {
  return call <= 2 || call == 4 || call == 5 || call == 13;
}
constexpr bool has_root(int call) {
  return call == 2 || call == 3 || (call >= 8 && call <= 10) || call == 15;
}

/// All ranks run the same operations, because each draws the same numbers.
class Program {
 public:
  Program(ProcessGroup& group, std::uint64_t seed) : group_(group), random_(seed) {}

  void random_step() {
    Choice choice{below(calls),
                  below(group_.size()),
                  reducible[static_cast<std::size_t>(below(static_cast<int>(reducible.size())))],
                  static_cast<ReduceOp>(below(5)),
                  {},
                  0,
                  below(2) == 0};
    static constexpr int extents[] = {0, 1, 2, 7, 64, 1021};
    for (int dims = 1 + below(3); dims > 0; --dims) choice.shape.push_back(extents[below(dims == 1 ? 6 : 4)]);
    if (below(8) == 0) choice.shape = {1 + below(2), 1021 * (1 + below(150))};  // sometimes more than a ring holds
    choice.dim = below(static_cast<int>(choice.shape.size()));
    step(choice);
    if (below(5) == 0) group_.barrier();
    if (below(40) == 0) in_parts();
  }

  void step(const Choice& choice) {
    ++operation_;
    const int n = group_.size();
    const int self = group_.rank();
    const auto& [call, root, dtype, asked, shape, dim, from_end] = choice;
    const bool is_float = dtype == DType::f32 || dtype == DType::f64;
    const ReduceOp op = asked == ReduceOp::average && !is_float ? ReduceOp::sum : asked;
    const auto along = static_cast<std::size_t>(dim);
    const int given = from_end ? dim - static_cast<int>(shape.size()) : dim;
    Tensor keep;
    // The inputs of some ranks are in an arena, those of others are not.
    const auto of = [&](int rank, const Shape& its) {
      return tensor_of(rank, operation_, dtype, its,
                       rank == self && (operation_ + static_cast<std::uint64_t>(rank)) % 3 == 0 ? &arena_ : nullptr);
    };
    const auto unequal = [&](int rank) {
      Shape its = shape;
      its[along] = (static_cast<std::int64_t>(operation_) + rank) % 3 * (shape[along] / 2);
      return its;
    };
    const auto all = [&](const auto& shape_of) {
      std::vector<Tensor> parts;
      for (int rank = 0; rank < n; ++rank) parts.push_back(of(rank, shape_of(rank)));
      return parts;
    };
    const auto equal = [&](int) { return shape; };
    switch (call) {
      case 0: {
        const Tensor mine = of(self, shape);
        group_.all_reduce(mine, op);
        SAME(mine, reduced(n, operation_, dtype, shape, op));
        break;
      }
      case 1: {
        const Tensor mine = of(self, shape);
        const Tensor out = Tensor::allocate(dtype, shape);
        group_.all_reduce_into(out, strided(mine, keep), op);
        SAME(out, reduced(n, operation_, dtype, shape, op));
        SAME(mine, of(self, shape));
        break;
      }
      case 2: {
        const Tensor mine = of(self, shape);
        group_.reduce(mine, root, op);
        SAME(mine, self == root ? reduced(n, operation_, dtype, shape, op) : of(self, shape));
        break;
      }
      case 3: {
        const Tensor mine = of(self, shape);
        group_.broadcast(mine, root);
        SAME(mine, of(root, shape));
        break;
      }
      case 4: {
        Shape whole = shape;
        whole[along] *= n;
        const Tensor mine = of(self, whole);
        const Tensor slice = group_.reduce_scatter(strided(mine, keep), given, op);
        SAME(slice, Tensor::copy_of(reduced(n, operation_, dtype, whole, op)
                                        .view()
                                        .slice(along, self * shape[along], (self + 1) * shape[along])));
        break;
      }
      case 5: {
        std::vector<std::int64_t> extents_of;
        Shape whole = shape;
        whole[along] = 0;
        std::int64_t begin = 0;
        for (int rank = 0; rank < n; ++rank) {
          if (rank == self) begin = whole[along];
          whole[along] += extents_of.emplace_back(unequal(rank)[along]);
        }
        const Tensor slice = group_.reduce_scatterv(of(self, whole), extents_of, given, op);
        SAME(slice, Tensor::copy_of(reduced(n, operation_, dtype, whole, op)
                                        .view()
                                        .slice(along, begin, begin + extents_of[static_cast<std::size_t>(self)])));
        break;
      }
      case 6:
        if (along == 0) {
          Shape whole = shape;
          whole[0] *= n;
          const Tensor out = Tensor::allocate(dtype, whole);
          group_.all_gather_into(out, strided(of(self, shape), keep));
          SAME(out, joined(all(equal), 0));
        }
        SAME(group_.all_gather(strided(of(self, shape), keep), given), joined(all(equal), along));
        break;
      case 7:
        SAME(group_.all_gatherv(strided(of(self, unequal(self)), keep), given), joined(all(unequal), along));
        break;
      case 8: {
        const auto got = group_.gather(of(self, shape), root, given);
        RANK_CHECK(got.has_value() == (self == root));
        if (got) SAME(*got, joined(all(equal), along));
        break;
      }
      case 9: {
        const auto got = group_.gatherv(of(self, unequal(self)), root, given);
        RANK_CHECK(got.has_value() == (self == root));
        if (got) SAME(*got, joined(all(unequal), along));
        break;
      }
      case 10: {
        const Tensor out = Tensor::allocate(dtype, shape);
        const std::vector<Tensor> parts = all(equal);
        const std::vector<TensorView> views(parts.begin(), parts.end());
        group_.scatter(out, self == root ? std::span(views) : std::span<const TensorView>(), root);
        SAME(out, of(self, shape));
        break;
      }
      case 11: {
        Shape whole = shape;
        whole[0] *= n;
        const Tensor got = group_.all_to_all(strided(of(self, whole), keep));
        std::vector<Tensor> parts;
        for (int rank = 0; rank < n; ++rank)
          parts.push_back(Tensor::copy_of(of(rank, whole).view().slice(0, self * shape[0], (self + 1) * shape[0])));
        SAME(got, joined(parts, 0));
        break;
      }
      case 12: {
        // Rank a has (a + b + operation) % 3 rows for rank b.
        const auto rows_for = [&](int from, int to) { return (from + to + static_cast<int>(operation_)) % 3; };
        const auto rows_of = [&](int from) {
          Shape its = shape;
          its[0] = 0;
          for (int to = 0; to < n; ++to) its[0] += rows_for(from, to);
          return its;
        };
        std::vector<std::int64_t> rows;
        std::vector<std::int64_t> wanted;
        std::vector<Tensor> parts;
        for (int rank = 0; rank < n; ++rank) {
          rows.push_back(rows_for(self, rank));
          wanted.push_back(rows_for(rank, self));
          std::int64_t begin = 0;
          for (int to = 0; to < self; ++to) begin += rows_for(rank, to);
          parts.push_back(Tensor::copy_of(of(rank, rows_of(rank)).view().slice(0, begin, begin + wanted.back())));
        }
        std::vector<std::int64_t> received;
        SAME(group_.all_to_allv(of(self, rows_of(self)), rows, &received), joined(parts, 0));
        RANK_CHECK(received == wanted);
        break;
      }
      case 13: {
        Tensor mine = of(self, shape);
        keep_shared(group_.all_reduce_shared(strided(mine, keep), op), reduced(n, operation_, dtype, shape, op));
        break;
      }
      case 14:
        keep_shared(group_.all_gather_shared(strided(of(self, shape), keep)), joined(all(equal), 0));
        break;
      default:
        configs(root);
    }
  }

 private:
  /// Shared results are unchanged while others are made.
  void keep_shared(Tensor got, Tensor wanted) {
    RANK_CHECK(!got.is_writable() || got.nbytes() == 0);
    shared_.emplace_back(std::move(got), std::move(wanted));
    for (const auto& [kept, its] : shared_) SAME(kept, its);
    if (shared_.size() > 5) shared_.erase(shared_.begin() + below(5));
  }

  int below(int end) { return static_cast<int>(random_() % static_cast<std::uint64_t>(end)); }

  void configs(int root) {
    const auto of = [&](int rank) { return RandomConfig(operation_ * 100 + static_cast<std::uint64_t>(rank)).tree(3); };
    const auto is = [](const Config& a, const Config& b) { RANK_CHECK(a == b); };
    is(group_.broadcast_config(of(group_.rank()), root), of(root));
    const std::vector<Config> all = group_.all_gather_config(of(group_.rank()));
    RANK_CHECK(all.size() == static_cast<std::size_t>(group_.size()));
    for (int rank = 0; rank < group_.size(); ++rank) is(all[static_cast<std::size_t>(rank)], of(rank));
    const std::vector<Config> some = group_.gather_config(of(group_.rank()), root);
    RANK_CHECK(some.empty() == (group_.rank() != root));
    if (group_.size() == 1) return;
    // Messages sent around a ring, with two tags received in reverse order.
    const int next = (group_.rank() + 1) % group_.size();
    const int before = (group_.rank() + group_.size() - 1) % group_.size();
    const Tensor tensor = tensor_of(group_.rank(), operation_, DType::bf16, {33, 5});
    group_.send_config(of(group_.rank()), next, 7);
    group_.send(tensor, next, 3);
    const Tensor got = Tensor::allocate(DType::bf16, {33, 5});
    group_.recv(got, before, 3);
    SAME(got, tensor_of(before, operation_, DType::bf16, {33, 5}));
    is(group_.recv_config(before, 7), of(before));
  }

  void in_parts() {
    std::vector<int> list;
    for (int rank = group_.rank() % 2; rank < group_.size(); rank += 2) list.insert(list.begin(), rank);
    const auto part = group_.split(list);
    RANK_CHECK(part->size() == static_cast<int>(list.size()));
    RANK_CHECK(part->global_rank(0) == group_.global_rank(list[0]));
    RANK_CHECK(*part->group_rank(group_.global_rank(list.back())) == part->size() - 1);
    const Tensor ranks = part->all_gather(Tensor::take(std::vector<std::int32_t>{group_.rank()}));
    RANK_CHECK(std::ranges::equal(ranks.values<std::int32_t>(), list));
  }

  ProcessGroup& group_;
  std::mt19937_64 random_;
  std::uint64_t operation_ = 0;
  SharedArena arena_{64 << 20};
  std::vector<std::pair<Tensor, Tensor>> shared_;
};

int operations() {
  const char* text = std::getenv("MUSTER_TEST_OPERATIONS");
  return text == nullptr ? (under_sanitizer ? 40 : 100) : std::atoi(text);
}

}  // namespace

TEST_CASE("calls with each root, dtype, reduction, shape and dimension match the model") {
  const std::vector<Shape> shapes = {{0}, {1}, {1021}, {35003}, {3, 0}, {7, 13}, {2, 9001}, {2, 7, 5}, {0, 2, 3}};
  const bool is_long = std::getenv("MUSTER_TEST_ALL") != nullptr;
  for (const int size : sizes) {
    CAPTURE(size);
    if (under_sanitizer && size != 4) continue;
    const auto pairs = [&](Program& program) {
      // Column k has (a, b) -> a + k b modulo a prime, so any two columns contain all pairs.
      constexpr int prime = 17;
      static_assert(calls <= prime);
      for (int a = 0; a < prime; ++a)
        for (int b = 0; b < prime; ++b) {
          const auto column = [&](int k, std::size_t count) {
            return static_cast<std::size_t>((a + k * b) % prime) % count;
          };
          const Shape& shape = shapes[column(4, shapes.size())];
          program.step({static_cast<int>(column(0, calls)), static_cast<int>(column(1, static_cast<std::size_t>(size))),
                        reducible[column(2, reducible.size())], static_cast<ReduceOp>(column(3, 5)), shape,
                        static_cast<int>(column(5, shape.size())), column(6, 2) == 0});
        }
    };
    const auto all = [&](Program& program) {
      for (int call = 0; call < calls; ++call)
        for (int root = 0; root < (has_root(call) ? size : 1); ++root)
          for (const DType dtype : reducible)
            for (int op = 0; op < (is_reduction(call) ? 5 : 1); ++op)
              for (const Shape& shape : shapes)
                for (int dim = 0; dim < static_cast<int>(shape.size()); ++dim)
                  program.step({call, root, dtype, static_cast<ReduceOp>(op), shape, dim, op % 2 == 0});
    };
    const auto body = [&](Group& group) {
      ProcessGroup ranks(group);
      Program program(ranks, 0);
      is_long ? all(program) : pairs(program);
    };
    check_ended(try_ranks(size, body, std::chrono::minutes(is_long ? 60 : 2)));
  }
}

TEST_CASE("random programs of all calls match the model") {
  for (const int size : sizes) {
    CAPTURE(size);
    const auto body = [&](Group& group) {
      ProcessGroup ranks(group);
      Program program(ranks, 2026 + static_cast<std::uint64_t>(size));
      for (int i = 0; i < operations() / (size == 4 ? 1 : 4); ++i) program.random_step();
    };
    check_ended(try_ranks(size, body, std::chrono::seconds(60 + operations() / 10)));
  }
}

TEST_CASE("sums of floats equal those of a loop over the ranks in order, bit for bit, for every length") {
  run_ranks(4, [](Group& group) {
    ProcessGroup ranks(group);
    for (const std::int64_t count : {0,    1,    2,    15,   16,    17,    255,   256,    257,    513,    1024,
                                     2048, 2049, 4096, 4097, 32767, 32768, 32769, 262144, 262147, 1000003}) {
      std::vector<float> mine(static_cast<std::size_t>(count));
      // If several hosts have two ranks or more, the ranks of each host are summed first.
      const bool is_by_host = ranks.backend() == "shared memory, and messages between hosts";
      std::map<int, std::vector<float>> sums;
      for (int rank = 0; rank < 4; ++rank) {
        std::mt19937 random(static_cast<unsigned>(rank * 1000003 + count));
        const auto [sum, is_first] = sums.try_emplace(is_by_host ? group.host_of(rank) : 0, mine.size());
        for (std::size_t i = 0; i < mine.size(); ++i) {
          const auto value = static_cast<float>(static_cast<std::int32_t>(random())) * 1e-5F;
          sum->second[i] = is_first ? value : sum->second[i] + value;
          if (rank == group.rank()) mine[i] = value;
        }
      }
      std::vector<float> sum = sums.begin()->second;
      for (auto host = std::next(sums.begin()); host != sums.end(); ++host)
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += host->second[i];
      const Tensor tensor = Tensor::take(std::move(mine));
      ranks.all_reduce(tensor);
      SAME(tensor, view_of(sum));
    }
  });
}

TEST_CASE("a rank that is stopped and continued at any moment: no ring is overwritten before its reader has read it") {
  run_ranks(3, [](Group& group) {
    ProcessGroup ranks(group);
    std::optional<Hesitation> hesitation;
    if (group.rank() == 1) hesitation.emplace(group, 2);
    // The collectives run back to back without checks in between, and have more chunks than a ring has. Over files each
    // takes a second.
    const int rounds = group.kind() == "file" ? 1 : 12;
    const auto of = [](int rank, int call) { return pattern(DType::i32, {300'001}, seed_of(rank, call)); };
    for (int round = 0; round < rounds; ++round) {
      std::vector<Tensor> mine;
      for (int call = 0; call < 6; ++call) mine.push_back(of(group.rank(), call));
      std::vector<Tensor> all;
      for (int call = 0; call < 3; ++call) all.push_back(ranks.all_gather(mine[static_cast<std::size_t>(call)]));
      ranks.broadcast(mine[3], 0);
      ranks.broadcast(mine[4], 1);
      ranks.all_reduce(mine[4], ReduceOp::max);
      ranks.all_reduce(mine[3], ReduceOp::min);
      for (int call = 0; call < 3; ++call)
        SAME(all[static_cast<std::size_t>(call)], joined({of(0, call), of(1, call), of(2, call)}, 0));
      SAME(mine[3], of(0, 3));
      SAME(mine[4], of(1, 4));
    }
    hesitation.reset();
    group.barrier();
  });
}

TEST_CASE("any dtype is moved, packed dtypes by whole bytes") {
  run_ranks(3, [](Group& group) {
    ProcessGroup ranks(group);
    for (const DType dtype : all_dtypes()) {
      const auto of = [&](int rank) { return pattern(dtype, {6, 12}, seed_of(rank, 1)); };
      for (const std::size_t dim : {std::size_t{0}, std::size_t{1}})
        SAME(ranks.all_gather(of(group.rank()), static_cast<int>(dim)), joined({of(0), of(1), of(2)}, dim));
      const Tensor mine = of(group.rank());
      ranks.broadcast(mine, 2);
      SAME(mine, of(2));
    }
    error_of(ErrorKind::invalid_argument, {"within a byte"}, [&] {
      (void)ranks.all_gather(pattern(DType::u4, {3, 3}, 1), 1);
    });
  });
}

TEST_CASE("an invalid or differing argument on one rank is an error on all ranks, and the group remains usable") {
  run_ranks(4, [](Group& group) {
    ProcessGroup ranks(group);
    const bool is_odd = group.rank() == 2;
    const Tensor good = tensor_of(group.rank(), 1, DType::f32, {8, 4});
    const Tensor other = tensor_of(group.rank(), 1, DType::f32, {8, 5});
    const Tensor flags = Tensor::allocate(DType::boolean, {4});
    const std::vector<std::int64_t> short_list = {4, 4};
    const std::vector<std::int64_t> negative = {9, -1, 0, 0};
    struct Bad {
      ErrorKind kind;
      std::vector<std::string> words;
      std::function<void()> call;
    };
    std::vector<Bad> all = {
        {ErrorKind::invalid_argument, {"rank 2", "root 4"}, [&] { ranks.broadcast(good, is_odd ? 4 : 1); }},
        {ErrorKind::invalid_argument, {"root -1"}, [&] { ranks.reduce(good, -1); }},
        {ErrorKind::invalid_argument,
         {"rank 2", "dimension 2 is out of range"},
         [&] { (void)ranks.all_gather(good, is_odd ? 2 : 1); }},
        {ErrorKind::invalid_argument, {"dimension -3 is out of range"}, [&] { (void)ranks.reduce_scatter(good, -3); }},
        {ErrorKind::invalid_argument, {"not a multiple"}, [&] { (void)ranks.reduce_scatter(other, 1); }},
        {ErrorKind::invalid_argument, {"2 slices"}, [&] { (void)ranks.reduce_scatterv(good, short_list); }},
        {ErrorKind::invalid_argument, {"none negative"}, [&] { (void)ranks.reduce_scatterv(good, negative); }},
        {ErrorKind::invalid_argument, {"this rank must pass 4 tensors"}, [&] { ranks.scatter(good, {}, 2); }},
        {ErrorKind::invalid_argument,
         {"rank 2", "the result is F32 [8, 5], and the tensor is F32 [8, 4]"},
         [&] {
           ranks.all_reduce_into(Tensor::allocate(DType::f32, {8, is_odd ? 5 : 4}), good);
         }},
        {ErrorKind::invalid_argument,
         {"rank 2"},
         [&] { ranks.all_reduce(is_odd ? Tensor::borrow(good.view()) : good); }},
        {ErrorKind::unsupported, {"BOOL", "sum"}, [&] { ranks.all_reduce(flags); }},
        {ErrorKind::unsupported,
         {"I32", "average"},
         [&] { ranks.all_reduce(Tensor::allocate(DType::i32, {4}), ReduceOp::average); }},
        {ErrorKind::rank_mismatch,
         {"rank 0", "all_reduce(sum) of F32 [8, 4]", "rank 2", "F32 [8, 5]"},
         [&] { ranks.all_reduce(is_odd ? other : good); }},
        {ErrorKind::rank_mismatch,
         {"all_reduce(sum)", "all_reduce(max)"},
         [&] { ranks.all_reduce(good, is_odd ? ReduceOp::max : ReduceOp::sum); }},
        {ErrorKind::rank_mismatch, {"root 1", "root 3"}, [&] { ranks.broadcast(good, is_odd ? 3 : 1); }},
        {ErrorKind::rank_mismatch,
         {"rank 0", "all_reduce", "rank 2", "broadcast"},
         [&] { is_odd ? ranks.broadcast(good, 1) : ranks.all_reduce(good); }},
        {ErrorKind::rank_mismatch,
         {"barrier", "all_gather"},
         [&] { is_odd ? (void)ranks.all_gather(good) : ranks.barrier(); }},
        {ErrorKind::rank_mismatch, {"all_gather"}, [&] { (void)ranks.all_gather(is_odd ? other : good); }},
        {ErrorKind::rank_mismatch,
         {"along dimension 1", "along dimension 0"},
         [&] { (void)ranks.all_gatherv(good, is_odd ? 0 : 1); }},
    };
    // Another shape of as many bytes.
    const Tensor turned = tensor_of(group.rank(), 1, DType::f32, {4, 8});
    for (const std::function<void(const Tensor&)>& call : std::vector<std::function<void(const Tensor&)>>{
             [&](const Tensor& t) { ranks.all_reduce(t); }, [&](const Tensor& t) { (void)ranks.all_reduce_shared(t); },
             [&](const Tensor& t) { (void)ranks.all_gather(t); },
             [&](const Tensor& t) { (void)ranks.all_gather_shared(t); },
             [&](const Tensor& t) { ranks.broadcast(t, 1); }, [&](const Tensor& t) { ranks.reduce(t, 1); },
             [&](const Tensor& t) { (void)ranks.gather(t, 1); },
             [&](const Tensor& t) { (void)ranks.reduce_scatter(t); },
             [&](const Tensor& t) { (void)ranks.all_to_all(t); }})
      all.push_back({ErrorKind::rank_mismatch, {"rank 0", "F32 [8, 4]", "rank 2", "F32 [4, 8]"}, [&, call] {
                       call(is_odd ? turned : good);
                     }});
    int round = 0;
    for (const Bad& bad : all) {
      try {
        (void)error_of(bad.kind, bad.words, bad.call);
      } catch (const RankFailure& failure) {
        throw RankFailure("case " + std::to_string(round) + ": " + failure.what());
      }
      // The group remains usable, for small and for large tensors.
      for (const std::int64_t count : {3, 300000}) {
        const Tensor tensor = Tensor::take(std::vector<std::int32_t>(static_cast<std::size_t>(count), round));
        ranks.all_reduce(tensor);
        for (const std::int32_t value : tensor.values<std::int32_t>()) RANK_CHECK(value == 4 * round);
      }
      ++round;
    }
    error_of(ErrorKind::invalid_argument, {"longer than 0"}, [&] { group.set_timeout(std::chrono::milliseconds(0)); });
    error_of(ErrorKind::invalid_argument, {"tag"}, [&] { ranks.send_config({}, (group.rank() + 1) % 4, -1); });
    error_of(ErrorKind::invalid_argument, {"itself"}, [&] { ranks.send_config({}, group.rank()); });
    error_of(ErrorKind::invalid_argument, {"rank 4"}, [&] { (void)ranks.recv_config(4); });
    // A received message that does not fit is discarded; the next one is received normally.
    if (group.rank() == 0) {
      ranks.send(good, 1);
      ranks.send(good, 1);
    } else if (group.rank() == 1) {
      error_of(ErrorKind::rank_mismatch, {"F32 [8, 4]", "F32 [8, 5]"}, [&] { ranks.recv(other, 0); });
      ranks.recv(good, 0);
      SAME(good, tensor_of(0, 1, DType::f32, {8, 4}));
    }
  });
}

TEST_CASE("messages cross before a receive is posted, short and long, from any source") {
  run_ranks(4, [](Group& group) {
    ProcessGroup ranks(group);
    const int self = group.rank();
    const auto of = [](int from, int to, int tag) {
      const std::int64_t rows = tag == 0 ? 3 : 70000;
      return pattern(DType::f32, {rows, 5}, seed_of(from, static_cast<std::uint64_t>(4 * to + tag)));
    };
    const auto others = [&](const auto& call) {
      for (int rank = 0; rank < 4; ++rank)
        if (rank != self) call(rank);
    };
    std::vector<Work<void>> sends;
    others([&](int to) {
      for (int tag = 0; tag < 2; ++tag) sends.push_back(ranks.isend(of(self, to, tag), to, tag));
    });
    // The collectives of a group continue beside its messages.
    const Tensor sum = Tensor::take(std::vector<std::int32_t>(100000, self));
    ranks.all_reduce(sum);
    RANK_CHECK(sum.values<std::int32_t>()[99999] == 6);
    struct Coming {
      int from;
      int tag;
      Tensor out;
      Work<int> work;
    };
    std::vector<Coming> receives;
    others([&](int from) {
      for (int tag = 1; tag >= 0; --tag) {
        Tensor out = Tensor::allocate(DType::f32, of(from, self, tag).shape());
        receives.push_back({from, tag, out, ranks.irecv(out, from, tag)});
      }
    });
    for (auto each = receives.rbegin(); each != receives.rend(); ++each) {
      RANK_CHECK(each->work.get() == each->from);
      SAME(each->out, of(each->from, self, each->tag));
    }
    for (Work<void>& each : sends) each.get();

    // Receives from any rank and tag: the values of a strided tensor, a Config, and an empty tensor.
    const Tensor square = pattern(DType::i64, {7, 7}, seed_of(self, 9));
    if (self == 0) {
      std::vector<int> from;
      for (int i = 0; i < 6; ++i) {
        ReceivedConfig got = ranks.recv_message(any_rank);
        from.push_back(got.from);
        if (got.tag == 5)
          SAME(got.config["square"].as_tensor(),
               Tensor::copy_of(pattern(DType::i64, {7, 7}, seed_of(got.from, 9)).view().transposed()));
        else
          RANK_CHECK(got.config.as_tensor().shape() == Shape({0, 4}));
      }
      std::ranges::sort(from);
      RANK_CHECK(from == std::vector<int>({1, 1, 2, 2, 3, 3}));
      RANK_CHECK(!ranks.probe(any_rank));
    } else {
      Config config;
      config["square"] = Tensor::copy_of(square.view().transposed());
      ranks.send_config(config, 0, 5);
      ranks.send(Tensor::allocate(DType::u8, {0, 4}), 0, 6);
    }
    group.barrier();
    // The message is probed before it is received.
    if (self == 1) ranks.send(of(1, 2, 1), 2, 8);
    if (self == 2) {
      std::optional<MessageInfo> seen;
      while (!(seen = ranks.probe(1, 8))) continue;
      RANK_CHECK((seen->from == 1 && seen->tag == 8 && seen->bytes == 70000 * 20));
      const Tensor out = Tensor::allocate(DType::f32, {70000, 5});
      Work<int> work = ranks.irecv(out, any_rank, any_tag);
      while (!work.is_done()) continue;
      RANK_CHECK(work.get() == 1);
      SAME(out, of(1, 2, 1));
      error_of(ErrorKind::invalid_argument, {"has already been taken"}, [&] { (void)work.get(); });
    }
    // A message that cannot be received is discarded, and both ranks continue.
    if (self == 0) ranks.isend(of(0, 3, 1), 3).get();
    if (self == 3) {
      const Tensor small = Tensor::allocate(DType::f32, {3, 5});
      auto work = ranks.irecv(small, 0);
      error_of(ErrorKind::rank_mismatch, {"F32 [70000, 5]", "F32 [3, 5]"}, [&] { (void)work.get(); });
    }
    group.barrier();
  });
}

TEST_CASE("groups are created and destroyed beside gather messages and each other") {
  run_ranks(3, [](Group& group) {
    for (int i = 0; i < 20; ++i) {
      ProcessGroup a(group);
      ProcessGroup b(group);
      const Tensor tensor = Tensor::take(std::vector<std::int32_t>(50000, i));
      a.all_reduce(tensor);
      b.all_reduce(tensor);
      if (group.rank() == 0) a = std::move(b);
      group.barrier();
      for (const std::int32_t value : tensor.values<std::int32_t>()) RANK_CHECK(value == 9 * i);
    }
  });
}
