// SPDX-License-Identifier: Apache-2.0
#pragma once
// ParallelLayout: the part of a model that each rank of a job holds, with tensor, pipeline and expert parallelism. The
// order is that of Megatron: tensor-parallel ranks are consecutive, then expert-parallel, then pipeline stages: rank =
// t + tensor * (e + expert * p).

#include <string>
#include <string_view>

namespace muster {

/// The numbers of tensor-parallel ranks, pipeline stages and expert-parallel ranks.
struct ParallelLayout {
  int tensor = 1;    ///< number of ranks that share the matrices of a layer
  int pipeline = 1;  ///< number of stages that share the layers
  int expert = 1;    ///< number of ranks that share the experts of a layer; each of them holds all other tensors

  /// The coordinates of a rank.
  struct Coordinates {
    /// Index among the tensor-parallel ranks.
    int tensor = 0;
    /// Index of the pipeline stage.
    int pipeline = 0;
    /// Index among the expert-parallel ranks.
    int expert = 0;
  };

  /// Parses "4" (tensor parallelism only) or "tp=2,pp=2,ep=2", with each key at most once. Throws
  /// Error(invalid_argument) if the text is neither, or describes more than 4096 ranks.
  static ParallelLayout parse(std::string_view text);

  /// Returns the number of ranks.
  [[nodiscard]] int ranks() const noexcept { return tensor * pipeline * expert; }
  /// Returns the coordinates of a rank.
  [[nodiscard]] Coordinates coordinates(int rank) const noexcept {
    return {rank % tensor, rank / (tensor * expert), rank / tensor % expert};
  }
  /// Returns the rank at the coordinates.
  [[nodiscard]] int rank(const Coordinates& place) const noexcept {
    return place.tensor + tensor * (place.expert + expert * place.pipeline);
  }
  friend bool operator==(const ParallelLayout&, const ParallelLayout&) = default;
};

/// Returns "tp=2,pp=2,ep=2", or "4" for tensor parallelism only.
std::string to_string(const ParallelLayout& layout);

}  // namespace muster
