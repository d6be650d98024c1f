// SPDX-License-Identifier: Apache-2.0
#pragma once
// The steps of a verification. Each adds its findings and continues: defects of files never cause exceptions here.

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
#include "src/checkpoint/assembly/base_model.hpp"
#include "src/checkpoint/assembly/request.hpp"
#include "src/checkpoint/model/model_survey.hpp"

namespace muster {

/// The object of the verification, and the findings.
struct Verification {
  const std::string directory;  ///< of all files
  const VerifyOptions& options;
  VerifyReport& report;
  const TensorSelection selection{Request{.select = options.select, .exclude = options.exclude}};

  /// Returns the same request as all commands that read the path.
  [[nodiscard]] Request request(const std::string& path) const {
    return {.path = path,
            .plan = options.plan,
            .source_layout = options.source_layout,
            .base_model = options.base_model,
            .thirdparty = {options.key, options.file_pattern},
            .select = options.select,
            .exclude = options.exclude};
  }
  /// Whether the options specify more than the path.
  [[nodiscard]] bool has_request() const {
    return !options.plan.empty() || !options.base_model.empty() || options.source_layout.has_value();
  }

  template <class... Values>
  void add(Defect defect, std::string_view file, std::string_view tensor, fmt::format_string<Values...> words,
           Values&&... values) {
    constexpr std::size_t most_problems = 10'000;
    if (!tensor.empty() && !selection.has(tensor)) return;
    if (report.problems.size() < most_problems)
      report.problems.push_back(
          {defect, std::string(file), std::string(tensor), fmt::format(words, std::forward<Values>(values)...)});
    else
      ++report.problems_left_out;
  }
  void add(const Finding& finding) {
    const VerifyProblem& problem = finding.problem;
    add(problem.defect, problem.file, problem.tensor, "{}", problem.message);
  }
  /// Adds lost data as a problem, and lists other omissions.
  void add_omissions(const Omissions& omissions, std::string_view file);
  /// Counts a file that could be opened, and its selected tensors.
  template <class Tensor>
  void count(const std::vector<Tensor>& tensors) {
    ++report.files;
    for (const Tensor& tensor : tensors) {
      const bool is_selected = selection.has(tensor.name);
      ++(is_selected ? report.tensors : report.not_selected);
      if (is_selected) report.bytes += tensor.bytes;
    }
  }
  /// Opens each of these files that can be opened, in their order.
  std::vector<SurveyedFile> open_all(const std::vector<std::string>& names);
};

/// A tensor of an opened file whose bytes are verified.
struct ReadTensor {
  const SurveyedFile* file = nullptr;
  std::size_t index = 0;
  std::string failure = {};  ///< the reason why reading failed

  [[nodiscard]] const TensorEntry& entry() const { return file->file.tensors()[index]; }
};
/// Receives the number of additional bytes that were read.
using ReadProgress = std::function<void(std::uint64_t)>;
/// Calls read(place, progress) once for each tensor, by several threads, the largest first, and stores failures.
void read_all(std::vector<ReadTensor>& tensors, const ProgressCallback& progress,
              const std::function<void(std::size_t, const ReadProgress&)>& read);

/// The location of a checkpoint's tensors by name: a file and an index in it.
using Places = std::map<std::string_view, std::pair<const SurveyedFile*, std::size_t>>;

/// Verifies files named like rank-00002-of-00004.safetensors, and no others.
void verify_shards(const std::vector<std::string>& names, Verification& verification);

/// Plans an export of `path`: tensors that do not fit are problems. If the options have a plan, a base or a layout, a
/// request that cannot be met is thrown. Otherwise it is ignored, because the shards may have been cut by a plan that
/// is not available.
void verify_request(const std::string& path, Verification& verification);

}  // namespace muster
