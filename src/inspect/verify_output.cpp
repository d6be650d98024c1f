// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/verify_output.hpp"

#include <fmt/core.h>

#include <array>
#include <iterator>

#include "src/base/escaped.hpp"
#include "src/inspect/output.hpp"

namespace muster::inspect {
namespace {

std::string_view kind_name(VerifiedKind kind) noexcept {
  constexpr std::array<std::string_view, 5> names = {"checkpoint", "shards", "file", "state", "workspace"};
  return names[static_cast<std::size_t>(kind)];
}

}  // namespace

std::string verify_text(const VerifyReport& report) {
  std::string out;
  for (const VerifyProblem& problem : report.problems)
    fmt::format_to(std::back_inserter(out), "{}: {}\n", to_string(problem.defect), escaped(problem.words));
  if (report.problems_left_out != 0) fmt::format_to(std::back_inserter(out), "and {} more\n", report.problems_left_out);
  const std::string seen = fmt::format("{} of {}, {}", counted(report.tensors, "tensor"), counted(report.files, "file"),
                                       human_bytes(report.bytes));
  const std::string sums = report.checked != 0    ? fmt::format("; {} checked", counted(report.checked, "checksum"))
                           : report.has_checksums ? "; checksums not checked"
                           : report.kind == VerifiedKind::checkpoint ? "; no checksums"
                                                                     : "";
  if (report.is_good())
    out += fmt::format("good: {}{}\n", seen, sums);
  else
    out += fmt::format("bad: {} ({}{})\n", counted(report.problems.size() + report.problems_left_out, "problem"), seen,
                       sums);
  return out;
}

Config verify_tree(const VerifyReport& report) {
  ConfigArray problems;
  problems.reserve(report.problems.size());
  for (const VerifyProblem& problem : report.problems) {
    Config item = Config::object({{"defect", to_string(problem.defect)}});
    if (!problem.file.empty()) item["file"] = problem.file;
    if (!problem.tensor.empty()) item["tensor"] = problem.tensor;
    item["words"] = problem.words;
    problems.push_back(std::move(item));
  }
  return Config::object({{"good", report.is_good()},
                         {"path", report.path},
                         {"kind", kind_name(report.kind)},
                         {"files", report.files},
                         {"tensors", report.tensors},
                         {"bytes", report.bytes},
                         {"has_checksums", report.has_checksums},
                         {"checked", report.checked},
                         {"problems", std::move(problems)},
                         {"problems_left_out", report.problems_left_out}});
}

}  // namespace muster::inspect
