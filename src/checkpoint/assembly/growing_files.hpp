// SPDX-License-Identifier: Apache-2.0
#pragma once
// GrowingFiles: the files of a checkpoint whose tensors arrive unit by unit. Used on rank 0.
//
// 1. A file is created with space for a header, and grows with each unit. A new one begins when the next tensor would
//    make it too large, or its header might need more than the space.
// 2. At the end the number of files is known: each gets its header, padded with spaces, and its final name.

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/safetensors.hpp"
#include "src/checkpoint/assembly/assembly.hpp"

namespace muster {

class GrowingFiles {
 public:
  GrowingFiles(std::string directory, std::uint64_t max_shard_size)
      : directory_(std::move(directory)), max_shard_size_(max_shard_size) {}

  /// Assigns the tensors of a unit to files. `outputs` receives the parts of the files that the unit fills, in the
  /// order of the result. Creates files and allocates their space. Throws Error(invalid_argument) if a name occurred
  /// before, Error(out_of_space | io).
  std::vector<FileTarget> add(std::vector<MergedTensor> tensors, std::vector<OutputFile>& outputs);
  /// Notes the places that plan_assembly() gave to the tensors of the last add().
  void place(std::span<const FilePlan> plans);

  struct Finished {
    std::vector<OutputFile> files;                             ///< only names
    std::string index;                                         ///< empty if there is one file
    std::vector<std::pair<std::string, std::string>> weights;  ///< tensor and file, in the order in which they came
  };
  /// Runs step 2. Throws Error(invalid_argument) if there are no tensors, Error(out_of_space | io).
  Finished finish(std::string_view stem);

 private:
  struct File {
    FileTarget target;
    std::uint64_t end = 0;
    std::uint64_t header_bytes = 0;  // upper bound
    std::vector<TensorEntry> tensors = {};
  };
  File& begin_file();

  std::string directory_;
  std::uint64_t max_shard_size_;
  std::vector<File> files_;
  std::vector<std::size_t> last_;  // files of the last add()
  std::set<std::string, std::less<>> names_;
};

}  // namespace muster
