// SPDX-License-Identifier: Apache-2.0
#pragma once
// ParallelLayout: which part of a model each rank of a job has, by tensor, pipeline and expert parallelism.
// The order is Megatron's: tensor-parallel ranks lie side by side, then expert, then pipeline:
// rank = t + tensor * (e + expert * p).

#include <string>
#include <string_view>

namespace muster {

struct ParallelLayout {
  int tensor = 1;    ///< ranks that share the matrices of a layer
  int pipeline = 1;  ///< stages that share the layers
  int expert = 1;    ///< ranks that share the experts of a layer; what is no expert is on all of them

  struct Place {
    int tensor = 0;
    int pipeline = 0;
    int expert = 0;
  };

  /// "4" (tensor parallelism alone) or "tp=2,pp=2,ep=2", each at most once. Throws Error(argument) if it is neither,
  /// or if there are more than 4096 ranks.
  static ParallelLayout parse(std::string_view text);

  [[nodiscard]] int ranks() const noexcept { return tensor * pipeline * expert; }
  [[nodiscard]] Place place(int rank) const noexcept {
    return {rank % tensor, rank / (tensor * expert), rank / tensor % expert};
  }
  [[nodiscard]] int rank(const Place& place) const noexcept {
    return place.tensor + tensor * (place.expert + expert * place.pipeline);
  }
  friend bool operator==(const ParallelLayout&, const ParallelLayout&) = default;
};

/// "tp=2,pp=2,ep=2"; "4" for tensor parallelism alone.
std::string to_string(const ParallelLayout& layout);

}  // namespace muster
