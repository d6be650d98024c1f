// SPDX-License-Identifier: Apache-2.0
#include "src/report/report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <utility>

#include "muster/error.hpp"
#include "muster/publish.hpp"
#include "muster/version.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/reports.hpp"
#include "src/inspect/version_reports.hpp"
#include "src/os/directory.hpp"
#include "src/report/page.hpp"
#include "src/report/sections.hpp"
#include "src/trace/rings.hpp"
#include "src/versions/unfinished.hpp"
#include "src/workspace/survey.hpp"

namespace muster::report {
namespace {

bool has_traces(const std::string& directory) {
  return std::ranges::any_of(os::list_directory(directory),
                             [](const os::DirectoryEntry& entry) { return entry.name.ends_with(trace::file_suffix); });
}

/// Returns `tree` as a section: "section" comes first.
Config as_section(const char* kind, const Config& tree) {
  Config section = Config::object({{"section", kind}});
  for (const auto& [key, value] : tree.as_object()) section[key] = value;
  return section;
}

/// Adds the timeline of a workspace, and the tensors of its newest states if they belong to one job.
void add_workspace(ConfigArray& sections, const std::string& path, const ReportOptions& options) {
  Config section = workspace_section(path);
  section["model_error"] = Config();
  std::optional<Source> source;
  try {
    source = open_source(path, options.source);
  } catch (const Error& error) {
    section["model_error"] = error.what();
  }
  sections.push_back(std::move(section));
  if (source) sections.push_back(model_section(std::move(*source), options));
}

void add_sections(ConfigArray& sections, const std::string& path, const ReportOptions& options) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    if (has_traces(path)) return sections.push_back(trace_section(path));
    if (contents_of(path, options.source.thirdparty).kind == PathContents::Kind::workspace)
      return add_workspace(sections, path, options);
    if (versions::is_version_directory(path)) return sections.push_back(versions_section(path));
  }
  sections.push_back(model_section(open_source(path, options.source), options));
}

}  // namespace

Config workspace_section(const std::string& path) {
  return as_section("workspace", inspect::survey_tree(workspace::survey(path), std::chrono::system_clock::now()));
}

Config versions_section(const std::string& path) {
  return as_section("versions", inspect::log_tree(read_versions(path), false, std::chrono::system_clock::now()));
}

Config report_tree(const std::vector<std::string>& paths, const ReportOptions& options) {
  if (options.is_diff && paths.size() != 2)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("a diff compares two paths, but {} given. Name the two sides",
                            paths.size() == 1 ? "one is" : fmt::format("{} are", paths.size())));
  if (paths.empty()) throw Error(ErrorKind::invalid_argument, "report: no path is given. Name at least one");
  ConfigArray sections;
  if (options.is_diff)
    sections.push_back(diff_section(paths[0], paths[1], options));
  else
    for (const std::string& path : paths) add_sections(sections, path, options);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return Config::object({{"format", "muster-report"},
                         {"format_version", 1},
                         {"muster_version", version()},
                         {"created", std::chrono::duration<double>(now).count()},
                         {"sections", std::move(sections)}});
}

std::string report_page(const Config& tree) {
  const std::string json = inspect::json_report(tree, -1);
  std::string page(page_head);
  page.reserve(page_head.size() + json.size() + page_tail.size() + json.size() / 50);
  // These characters occur only within strings of JSON. Escaped, they cannot end the element of the data.
  for (const char c : json) {
    if (c == '<' || c == '>' || c == '&')
      fmt::format_to(std::back_inserter(page), "\\u{:04x}", static_cast<unsigned>(c));
    else
      page += c;
  }
  page += page_tail;
  return page;
}

}  // namespace muster::report
