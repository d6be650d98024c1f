// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of a verification. Each adds what it finds and goes on; nothing here throws for what a file says.

#include <fmt/core.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/safetensors.hpp"
#include "muster/verify.hpp"
#include "src/checkpoint/model_survey.hpp"
#include "src/checkpoint/request.hpp"

namespace muster {

/// What is verified, and what has been found of it.
struct Verification {
  const std::string directory;  ///< of all files
  const VerifyOptions& options;
  VerifyReport& report;

  /// As all commands that read the path make it.
  [[nodiscard]] Request request(const std::string& path) const {
    return {.path = path,
            .plan = options.plan,
            .from = options.layout,
            .base = options.base,
            .foreign = {options.at, options.shards}};
  }
  /// Whether there is a request beyond the path.
  [[nodiscard]] bool has_request() const {
    return !options.plan.empty() || !options.base.empty() || options.layout.has_value();
  }

  template <class... Values>
  void add(Defect defect, std::string_view file, std::string_view tensor, fmt::format_string<Values...> words,
           Values&&... values) {
    constexpr std::size_t most_problems = 10'000;
    if (report.problems.size() < most_problems)
      report.problems.push_back(
          {defect, std::string(file), std::string(tensor), fmt::format(words, std::forward<Values>(values)...)});
    else
      ++report.problems_left_out;
  }
  void add(const Finding& finding) {
    const VerifyProblem& problem = finding.problem;
    add(problem.defect, problem.file, problem.tensor, "{}", problem.words);
  }
  /// Lost data is a problem; other omissions are listed.
  void add_omissions(const Omissions& omissions, std::string_view file);
  /// A file that could be opened, and its tensors.
  template <class Tensor>
  void count(const std::vector<Tensor>& tensors) {
    ++report.files;
    report.tensors += tensors.size();
    for (const Tensor& tensor : tensors) report.bytes += tensor.bytes;
  }
  /// Opens what it can of these names, in their order.
  std::vector<OpenedFile> open_all(const std::vector<std::string>& names);
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

/// rank-00002-of-00004.safetensors and nothing else.
void verify_shards(const std::vector<std::string>& names, Verification& verification);

/// Plans an export of `path`: tensors that do not fit are problems. A request that cannot be met is thrown if the
/// options have a plan, a base or a layout; else the shards may have been cut by a plan that is not there.
void verify_request(const std::string& path, Verification& verification);

}  // namespace muster
