// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/verify_output.hpp"

#include <fmt/core.h>

#include <iterator>

#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/inspect/printable.hpp"
#include "src/inspect/text_table.hpp"

namespace muster::inspect {
namespace {

std::string_view kind_name(VerifiedKind kind) noexcept {
  switch (kind) {
    case VerifiedKind::checkpoint:
      return "checkpoint";
    case VerifiedKind::shards:
      return "shards";
    case VerifiedKind::state:
      return "state";
    case VerifiedKind::workspace:
      return "workspace";
    case VerifiedKind::file:
      break;
  }
  return "file";
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

namespace {

Config report_json(const VerifyReport& report) {
  ConfigArray problems;
  problems.reserve(report.problems.size());
  for (const VerifyProblem& problem : report.problems) {
    Config item = Config::object({{"defect", Config(to_string(problem.defect))}});
    if (!problem.file.empty()) item["file"] = json_text(problem.file);
    if (!problem.tensor.empty()) item["tensor"] = json_text(problem.tensor);
    item["words"] = json_text(problem.words);
    problems.push_back(std::move(item));
  }
  return Config::object({{"good", Config(report.is_good())},
                         {"path", Config(json_text(report.path))},
                         {"kind", Config(kind_name(report.kind))},
                         {"files", Config(report.files)},
                         {"tensors", Config(report.tensors)},
                         {"bytes", Config(report.bytes)},
                         {"has_checksums", Config(report.has_checksums)},
                         {"checked", Config(report.checked)},
                         {"problems", Config(std::move(problems))},
                         {"problems_left_out", Config(report.problems_left_out)}});
}

}  // namespace

std::string verify_json(const VerifyReport& report) {
  return printable_json(to_json(report_json(report), 2)) + "\n";
}

std::string verify_json(const std::vector<VerifyReport>& reports) {
  ConfigArray all;
  for (const VerifyReport& report : reports) all.push_back(report_json(report));
  return printable_json(to_json(Config::object({{"reports", Config(std::move(all))}}), 2)) + "\n";
}

}  // namespace muster::inspect
