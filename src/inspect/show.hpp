// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster show` says of a safetensors file or a model directory. Only headers are read.

#include <cstddef>
#include <cstdint>
#include <string>

namespace muster::inspect {

enum class ShowOrder : std::uint8_t {
  offset,  ///< as they lie in the files
  name,
  size,  ///< largest first
};

struct ShowOptions {
  std::string pattern = {};  ///< only tensors whose names match (TensorPattern::glob); empty: all
  ShowOrder order = ShowOrder::offset;
  std::size_t width = 0;  ///< columns; longer names lose their middle; 0: as wide as it gets
};

/// A table, totals by dtype, metadata. Lines end with '\n'. Throws like ModelDir::open and TensorPattern::glob.
std::string show_text(const std::string& path, const ShowOptions& options = {});

/// {"path", "files": [{"path", "bytes", "tensors"}], "metadata": {}, "tensors": [{"name", "dtype", "shape", "bytes",
/// "file", "offset"}], "totals": {"tensors", "bytes", "dtypes": {DTYPE: {"tensors", "bytes"}}}}
std::string show_json(const std::string& path, const ShowOptions& options = {});

}  // namespace muster::inspect
