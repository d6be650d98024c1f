// SPDX-License-Identifier: Apache-2.0
#pragma once
// A listing of muster-hdf5-reader (src/hdf5/foreign_report.hpp), read by somebody who believes none of it: every number
// is held against the limits of both sides and against the file's length.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/dtype.hpp"
#include "muster/tensor.hpp"
#include "src/checkpoint/foreign_hdf5.hpp"
#include "src/hdf5/foreign_report.hpp"

namespace muster {

/// One tensor and where its elements are.
struct ForeignTensor {
  std::string name;
  DType dtype = DType::u8;
  Shape shape;
  std::uint64_t bytes = 0;
  std::uint64_t item_bytes = 1;    ///< of an element as it is stored; two elements where these are packed
  std::uint64_t address = 0;       ///< what the reader is asked by
  std::uint64_t stored_bytes = 0;  ///< what it takes in the file
  std::uint64_t offset = 0;        ///< of its elements, as they are, in the file; 0: the reader is asked
};

struct ForeignFatal {
  hdf5::FatalCode code = hdf5::FatalCode::io;
  std::string words;
};

struct ForeignReport {
  std::uint64_t fence = 0;  ///< hdf5::FenceFlag
  std::vector<ForeignTensor> tensors;
  std::map<std::string, std::string> texts;
  std::vector<ForeignIssue> issues;
  std::optional<ForeignFatal> fatal;
  bool is_listed = false;  ///< all tensors are told
  bool is_whole = false;   ///< and all texts
};

struct ForeignReportLimits {
  std::uint64_t file_bytes = 0;
  std::uint64_t largest_expansion = 1024;
};

/// A listing may end anywhere: is_listed and is_whole say how far it came. Tensors come sorted by name, none with bytes
/// outside the file or with those of another; such are issues. Throws Error(corrupt) on a listing that no reader of
/// this build makes.
ForeignReport parse_foreign_report(std::span<const std::byte> bytes, const ForeignReportLimits& limits);

}  // namespace muster
