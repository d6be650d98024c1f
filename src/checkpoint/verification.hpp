// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of a verification. Each adds what it finds and goes on; nothing here throws for what a file says.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/safetensors.hpp"
#include "muster/verify.hpp"

namespace muster {

/// A safetensors file that could be opened.
struct OpenedFile {
  std::string name;  ///< in the directory
  SafetensorsFile file;
};

/// A directory under verification.
class Verification {
 public:
  explicit Verification(VerifyReport& report) : report_(report) {}

  void add(Defect defect, std::string file, std::string tensor, std::string words);
  /// A file that could be opened, and its tensors.
  template <class Tensor>
  void count(const std::vector<Tensor>& tensors) {
    ++report_.files;
    report_.tensors += tensors.size();
    for (const Tensor& tensor : tensors) report_.bytes += tensor.bytes;
  }
  /// Opens what it can of these names, in their order.
  std::vector<OpenedFile> open_all(const std::string& directory, const std::vector<std::string>& names);
  /// Tells each run of numbers from `first` to `last` that is not there; a count from a name is only believed as far as
  /// there are files.
  void find_holes(const std::set<std::uint64_t>& there, std::uint64_t first, std::uint64_t last, std::string_view what,
                  const std::function<std::string(std::uint64_t)>& name_of);

 private:
  VerifyReport& report_;
};

/// A tensor of an opened file whose bytes are looked at.
struct ReadTensor {
  const OpenedFile* file = nullptr;
  std::size_t index = 0;
  std::string failure = {};  ///< why that failed

  [[nodiscard]] const TensorEntry& entry() const { return file->file.tensors()[index]; }
};
/// To be told how many bytes more were read.
using ReadProgress = std::function<void(std::uint64_t)>;
/// Calls read(place, progress) for each, once, by several threads, the largest first, and notes what it throws.
void read_all(std::vector<ReadTensor>& tensors, const ProgressCallback& progress,
              const std::function<void(std::size_t, const ReadProgress&)>& read);

/// Where a name of a checkpoint is: file and place in it.
using Places = std::map<std::string_view, std::pair<const OpenedFile*, std::size_t>>;

/// Every name of the files once; a second place of one is told. The files must outlive the result.
Places find_places(const std::vector<OpenedFile>& files, Verification& verification);

/// The index against the files. `names`: of all *.safetensors in the directory, sorted; those that cannot be opened
/// too.
void verify_index(const std::string& directory, const std::string& index_name, const std::vector<std::string>& names,
                  const std::vector<OpenedFile>& files, const Places& places, Verification& verification);

/// PREFIX-00002-of-00003.safetensors: all of one prefix are of one count, and all numbers from 1 on are there. True
/// if there are such files.
bool verify_numbering(const std::vector<std::string>& names, Verification& verification);

/// rank-00002-of-00004.safetensors and nothing else.
void verify_shards(const std::string& directory, const std::vector<std::string>& names, const VerifyOptions& options,
                   VerifyReport& report, Verification& verification);

}  // namespace muster
