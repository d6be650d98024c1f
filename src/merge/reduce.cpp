// SPDX-License-Identifier: Apache-2.0
// Elements are processed in blocks: all sources of a block are combined in registers or the first-level cache before
// the target is written. Each source is read once, and the target is written once. The loops over a block have a fixed
// length and no branches, so that compilers vectorise them.

#include "src/merge/reduce.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/core/tensor.hpp"
#include "src/core/thread_pool.hpp"
#include "src/merge/half_sums.hpp"
#include "src/merge/layout.hpp"
#include "src/merge/numbers.hpp"

namespace muster::merge {
namespace {

// Elements per block, and per small block of the remainder.
constexpr std::size_t at_once = 512;
constexpr std::size_t at_last = 32;

/// For operations without a final step.
struct NoFinalStep {
  template <class T>
  MUSTER_INLINE static T finish(T value, std::size_t) {
    return value;
  }
};

/// Returns the value that `is_better`; a NaN beats all other values.
template <class T, class IsBetter>
MUSTER_INLINE T better(T so_far, T next, const IsBetter& is_better) {
  const T taken = is_better(next, so_far) ? next : so_far;
  if constexpr (std::is_floating_point_v<T>)
    // An existing NaN is kept, and a new one is taken.
    return next != next ? (so_far != so_far ? so_far : next) : taken;
  else
    return taken;
}

struct TakeMax : NoFinalStep {
  template <class T>
  MUSTER_INLINE static T combine(T so_far, T next) {
    return better(so_far, next, [](T a, T b) { return a > b; });
  }
};

struct TakeMin : NoFinalStep {
  template <class T>
  MUSTER_INLINE static T combine(T so_far, T next) {
    return better(so_far, next, [](T a, T b) { return a < b; });
  }
};

/// The compiler's order of operands determines which of two NaNs a sum returns. This replaces every NaN by the same
/// one.
template <class T>
MUSTER_INLINE T with_one_nan(T value) {
  if constexpr (std::is_floating_point_v<T>)
    return value != value ? std::numeric_limits<T>::quiet_NaN() : value;
  else
    return value;
}

struct Add {
  template <class T>
  MUSTER_INLINE static T combine(T so_far, T next) {
    return static_cast<T>(so_far + next);
  }
  template <class T>
  MUSTER_INLINE static T finish(T value, std::size_t) {
    return with_one_nan(value);
  }
};

struct Average : Add {
  template <class T>
  MUSTER_INLINE static T finish(T value, std::size_t sources) {
    return with_one_nan(static_cast<T>(value / static_cast<T>(sources)));
  }
};

struct Multiply : Add {
  template <class T>
  MUSTER_INLINE static T combine(T so_far, T next) {
    // Short integers would be promoted to int, whose multiplication may overflow.
    if constexpr (std::is_integral_v<T> && sizeof(T) < sizeof(int))
      return static_cast<T>(std::uint32_t{so_far} * std::uint32_t{next});
    else
      return so_far * next;
  }
};

/// Reduces one block. at(source) returns the block of a source.
template <class Element, class Operation, std::size_t N, class At>
MUSTER_INLINE void reduce_block(std::byte* target, std::size_t sources, const At& at) {
  typename Element::Value values[N];
  typename Element::Value next[N];
  Element::template widen<N>(at(0), values);
  for (std::size_t source = 1; source < sources; ++source) {
    Element::template widen<N>(at(source), next);
    for (std::size_t i = 0; i < N; ++i) values[i] = Operation::combine(values[i], next[i]);
  }
  for (std::size_t i = 0; i < N; ++i) values[i] = Operation::finish(values[i], sources);
  Element::template narrow<N>(values, target);
}

/// Reduces all whole blocks from `done` on.
template <class Element, class Operation, std::size_t N>
MUSTER_INLINE void reduce_blocks(std::span<std::byte> target, std::span<const std::byte* const> sources,
                                 std::size_t& done) {
  constexpr std::size_t bytes = N * sizeof(typename Element::Stored);
  for (; done + bytes <= target.size(); done += bytes)
    reduce_block<Element, Operation, N>(target.data() + done, sources.size(),
                                        [&](std::size_t source) { return sources[source] + done; });
}

/// Sums have a faster path for types that are added as they are stored, and for bf16 as f32. All sources go through
/// vector registers of `Width` bytes.
template <class Element, int Width>
struct Register;
template <class T, int Width>
struct Register<Plain<T>, Width> {
  typedef T Lanes [[gnu::vector_size(Width)]];
  Lanes lanes;
  MUSTER_INLINE void load(const std::byte* from) { std::memcpy(&lanes, from, Width); }
  MUSTER_INLINE void add(const std::byte* from) {
    Lanes next;
    std::memcpy(&next, from, Width);
    lanes += next;
  }
  MUSTER_INLINE void store(std::byte* to) {
    if constexpr (std::is_floating_point_v<T>)
      lanes = lanes == lanes ? lanes : Lanes{} + std::numeric_limits<T>::quiet_NaN();
    std::memcpy(to, &lanes, Width);
  }
};
/// A 32-bit word holds two bf16 numbers. With the lower half cleared, it is the upper number as f32. Shifted left by 16
/// bits, it is the lower number as f32.
template <int Width>
struct Register<Bf16, Width> {
  typedef float Lanes [[gnu::vector_size(Width)]];
  typedef std::uint32_t Words [[gnu::vector_size(Width)]];
  Lanes lower;
  Lanes upper;
  MUSTER_INLINE void load(const std::byte* from) {
    Words words;
    std::memcpy(&words, from, Width);
    lower = reinterpret_cast<Lanes>(words << 16);
    upper = reinterpret_cast<Lanes>(words & 0xffff0000U);
  }
  MUSTER_INLINE void add(const std::byte* from) {
    Register next;
    next.load(from);
    lower += next.lower;
    upper += next.upper;
  }
  MUSTER_INLINE void store(std::byte* to) {
    Words words[2];
    for (const bool is_upper : {false, true}) {
      const Lanes& lanes = is_upper ? upper : lower;
      const Words bits = reinterpret_cast<Words>(lanes);
      const Words rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
      words[is_upper] = lanes == lanes ? rounded : Words{} + 0x7fc00000U;
    }
    const Words both = (words[0] >> 16) | (words[1] & 0xffff0000U);
    std::memcpy(to, &both, Width);
  }
};
template <class Element>
concept HasRegisters = requires {
  sizeof(Register<Element, 16>);
};

/// Pads the remainder, which is shorter than a block of `Bytes` bytes, to a whole block. reduce(to, at) reduces it.
template <std::size_t Bytes, class Reduce>
MUSTER_INLINE void reduce_rest(std::span<std::byte> target, std::span<const std::byte* const> sources, std::size_t done,
                               const Reduce& reduce) {
  const std::size_t left = target.size() - done;
  if (left == 0) return;
  std::byte whole[Bytes] = {};
  std::byte result[Bytes];
  reduce(result, [&](std::size_t source) {
    std::memcpy(whole, sources[source] + done, left);
    return static_cast<const std::byte*>(whole);
  });
  std::memcpy(target.data() + done, result, left);
}

template <class Element, int Width>
MUSTER_INLINE void add_in_registers(std::span<std::byte> target, std::span<const std::byte* const> sources) {
  std::size_t done = 0;
  for (; done + 4 * Width <= target.size(); done += 4 * Width) {
    Register<Element, Width> sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[i].load(sources[0] + done + i * Width);
    for (std::size_t source = 1; source < sources.size(); ++source) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[i].add(sources[source] + done + i * Width);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[i].store(target.data() + done + i * Width);
  }
  const auto add_one = [&](std::byte* to, const auto& at) {
    Register<Element, Width> sum;
    sum.load(at(0));
    for (std::size_t source = 1; source < sources.size(); ++source) sum.add(at(source));
    sum.store(to);
  };
  for (; done + Width <= target.size(); done += Width)
    add_one(target.data() + done, [&](std::size_t source) { return sources[source] + done; });
  reduce_rest<Width>(target, sources, done, add_one);
}

template <class Element, class Operation, int Width>
MUSTER_INLINE void reduce_all(std::span<std::byte> target, std::span<const std::byte* const> sources) {
  if constexpr (std::is_same_v<Operation, Add> && HasRegisters<Element>) {
    add_in_registers<Element, Width>(target, sources);
  } else {
    std::size_t done = 0;
    reduce_blocks<Element, Operation, at_once>(target, sources, done);
    reduce_blocks<Element, Operation, at_last>(target, sources, done);
    reduce_rest<at_last * sizeof(typename Element::Stored)>(target, sources, done, [&](std::byte* to, const auto& at) {
      reduce_block<Element, Operation, at_last>(to, sources.size(), at);
    });
  }
}

template <class Element, class Operation>
void reduce_baseline(std::span<std::byte> target, std::span<const std::byte* const> sources) {
  reduce_all<Element, Operation, 16>(target, sources);
}

#if defined(__x86_64__)
template <class Element, class Operation>
[[gnu::target("avx2")]] void reduce_avx2(std::span<std::byte> target, std::span<const std::byte* const> sources) {
  reduce_all<Element, Operation, 32>(target, sources);
}
template <class Element, class Operation>
[[gnu::target("avx512f,avx512bw")]] void reduce_avx512(std::span<std::byte> target,
                                                       std::span<const std::byte* const> sources) {
  reduce_all<Element, Operation, 64>(target, sources);
}
#endif

void add_halves(AddHalves add, std::span<std::byte> target, std::span<const std::byte* const> sources) {
  const std::size_t done = add(target, sources);
  reduce_rest<at_last * sizeof(F16::Stored)>(target, sources, done, [&](std::byte* to, const auto& at) {
    reduce_block<F16, Add, at_last>(to, sources.size(), at);
  });
}

template <class Element, class Operation>
void dispatch(std::span<std::byte> target, std::span<const std::byte* const> sources) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  static const bool has_avx512 = __builtin_cpu_supports("avx512bw") != 0;
  if constexpr (std::is_same_v<Operation, Add> && HasRegisters<Element>)
    if (has_avx512) return reduce_avx512<Element, Operation>(target, sources);
  if (has_avx2) return reduce_avx2<Element, Operation>(target, sources);
#endif
  reduce_baseline<Element, Operation>(target, sources);
}

template <class Operation>
void reduce_reals(DType dtype, std::span<std::byte> target, std::span<const std::byte* const> sources) {
  // Sums and products of integers have the same bits with and without sign. They are computed without sign, where
  // overflow is defined.
  constexpr bool is_arithmetic = std::is_base_of_v<Add, Operation>;
  const auto run = [&]<class Signed>(Signed) {
    using T = std::conditional_t<is_arithmetic, std::make_unsigned_t<Signed>, Signed>;
    dispatch<Plain<T>, Operation>(target, sources);
  };
  switch (dtype) {
    case DType::u8:
      return dispatch<Plain<std::uint8_t>, Operation>(target, sources);
    case DType::u16:
      return dispatch<Plain<std::uint16_t>, Operation>(target, sources);
    case DType::u32:
      return dispatch<Plain<std::uint32_t>, Operation>(target, sources);
    case DType::u64:
      return dispatch<Plain<std::uint64_t>, Operation>(target, sources);
    case DType::i8:
      return run(std::int8_t{});
    case DType::i16:
      return run(std::int16_t{});
    case DType::i32:
      return run(std::int32_t{});
    case DType::i64:
      return run(std::int64_t{});
    case DType::f16:
      if constexpr (std::is_same_v<Operation, Add>) {
        static const std::span<const AddHalves> variants = half_sum_variants();
        if (!variants.empty()) return add_halves(variants.front(), target, sources);
      }
      return dispatch<F16, Operation>(target, sources);
    case DType::bf16:
      return dispatch<Bf16, Operation>(target, sources);
    case DType::f8_e4m3fn:
      return dispatch<E4M3, Operation>(target, sources);
    case DType::f8_e5m2:
      return dispatch<E5M2, Operation>(target, sources);
    case DType::f32:
      return dispatch<Plain<float>, Operation>(target, sources);
    default:
      return dispatch<Plain<double>, Operation>(target, sources);
  }
}

constexpr std::uint64_t piece_bytes = 4 << 20;  // for one thread, between two progress reports

void copy_window(const Rows& rows, std::uint64_t begin, std::uint64_t end, std::span<const TensorView> sources,
                 std::byte* target) {
  for (const Rectangle& part : rectangles(rows, begin, end)) {
    const std::byte* from = sources[static_cast<std::size_t>(part.source)].bytes().data() + part.from;
    std::byte* to = target + begin + part.to;
    for (std::uint64_t row = 0; row < part.rows; ++row)
      std::memcpy(to + row * part.to_stride, from + row * part.from_stride, part.bytes);
  }
}

}  // namespace

const char* name_of(Combine combine) noexcept {
  constexpr std::array<const char*, 6> names = {"copy", "max", "sum", "min", "product", "average"};
  return names.at(static_cast<std::size_t>(combine));
}

void check_reducible(Combine combine, DType dtype) {
  const bool is_float = dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64 ||
                        dtype == DType::f8_e4m3fn || dtype == DType::f8_e5m2;
  const bool is_kept_only = dtype == DType::f8_e8m0 || dtype == DType::f8_e4m3fnuz || dtype == DType::f8_e5m2fnuz;
  if (is_packed(dtype) || is_kept_only || dtype == DType::complex64 ||
      (combine == Combine::sum && dtype == DType::boolean) || (combine == Combine::average && !is_float))
    throw Error(ErrorKind::unsupported, fmt::format("merge {}: not supported for tensors of dtype {}",
                                                    in_quotes(name_of(combine)), to_string(dtype)));
}

void reduce(Combine combine, DType dtype, std::span<std::byte> target, std::span<const std::byte* const> sources) {
  check_reducible(combine, dtype);
  if (target.empty()) return;
  if (sources.size() == 1) {
    // Nothing is computed, so even the bits of a NaN are unchanged.
    if (sources.front() != target.data()) std::memcpy(target.data(), sources.front(), target.size());
    return;
  }
  // For bools, a maximum is a logical or; a minimum and a product are a logical and.
  if (dtype == DType::boolean && combine == Combine::max) return dispatch<Truth, TakeMax>(target, sources);
  if (dtype == DType::boolean) return dispatch<Truth, TakeMin>(target, sources);
  switch (combine) {
    case Combine::max:
      return reduce_reals<TakeMax>(dtype, target, sources);
    case Combine::min:
      return reduce_reals<TakeMin>(dtype, target, sources);
    case Combine::product:
      return reduce_reals<Multiply>(dtype, target, sources);
    case Combine::average:
      return reduce_reals<Average>(dtype, target, sources);
    default:
      return reduce_reals<Add>(dtype, target, sources);
  }
}

#undef MUSTER_INLINE

const std::byte* gapless(const TensorView& tensor, std::uint64_t begin, std::uint64_t end, std::byte* staging) {
  if (tensor.is_contiguous()) return tensor.host_data() + begin;
  const auto item = static_cast<std::uint64_t>(itemsize(tensor.dtype()));
  core::copy_elements(tensor, static_cast<std::int64_t>(begin / item), static_cast<std::int64_t>(end / item), staging);
  return staging;
}

Tensor merge_in_memory(const Merge& merge, std::span<const TensorView> sources, std::span<const int> ranks,
                       const std::function<void()>& progress) {
  std::vector<TensorSpec> specs;
  std::vector<Tensor> copies;  // contiguous copies of strided sources
  std::vector<TensorView> plain;
  for (const TensorView& source : sources) {
    specs.push_back({source.dtype(), source.shape()});
    if (!source.is_contiguous()) copies.push_back(Tensor::copy_of(source));
    plain.push_back(source.is_contiguous() ? source : copies.back().view());
  }
  const Layout layout = join(merge, specs, {}, ranks);
  if (layout.combine != Combine::copy) check_reducible(layout.combine, layout.target.dtype);
  const Rows rows = rows_of(layout);
  Tensor result = Tensor::allocate(layout.target.dtype, layout.target.shape);
  std::byte* target = result.mutable_data();
  const std::uint64_t bytes = result.nbytes();
  if (rows.has_gaps) std::memset(target, 0, bytes);
  const std::size_t pieces = (bytes + piece_bytes - 1) / piece_bytes;
  parallel_for(pieces, copy_workers(), [&](std::size_t piece, std::size_t) {
    const std::uint64_t begin = piece * piece_bytes;
    const std::uint64_t end = std::min(bytes, begin + piece_bytes);
    if (layout.combine == Combine::copy) {
      copy_window(rows, begin, end, plain, target);
    } else {
      std::vector<const std::byte*> parts;
      parts.reserve(plain.size());
      for (const TensorView& source : plain) parts.push_back(source.bytes().data() + begin);
      reduce(layout.combine, layout.target.dtype, {target + begin, end - begin}, parts);
    }
    progress();
  });
  return result;
}

}  // namespace muster::merge
