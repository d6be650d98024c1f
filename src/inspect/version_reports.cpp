// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/version_reports.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "src/inspect/reports.hpp"

namespace muster::inspect {
namespace {

using SystemTime = std::chrono::system_clock::time_point;

// Enough to tell the versions of a directory apart; --json has all of them.
constexpr std::size_t shown_digits = 12;

template <class Value>
Config value_or_null(const std::optional<Value>& value) {
  return value ? Config(*value) : Config();
}

template <class Items>
ConfigArray plain_list(const Items& items) {
  return ConfigArray(items.begin(), items.end());
}

std::string share_text(std::uint64_t part, std::uint64_t whole) {
  if (whole == 0) return "0 %";
  const double share = 100.0 * static_cast<double>(part) / static_cast<double>(whole);
  return part != 0 && share < 0.01 ? "< 0.01 %" : fmt::format("{:.2f} %", share);
}

std::string numbers_text(const std::vector<std::uint64_t>& numbers) {
  std::string text;
  for (const std::uint64_t number : numbers) text += fmt::format("{}{}", text.empty() ? "" : ", ", number);
  return text;
}

std::chrono::seconds age_since(SystemTime published, SystemTime now) {
  return std::max(std::chrono::seconds(0), std::chrono::duration_cast<std::chrono::seconds>(now - published));
}

std::string kind_text(const VersionInfo& info) {
  if (!info.kind) return "unreadable";
  std::string text(to_string(*info.kind));
  if (info.encoding) text += fmt::format(" {}", to_string(*info.encoding));
  return text;
}

Config version_tree(const VersionInfo& info, SystemTime now) {
  return Config::object({{"version", info.version},
                         {"path", info.path},
                         {"kind", info.kind ? Config(to_string(*info.kind)) : Config()},
                         {"base_version", value_or_null(info.base_version)},
                         {"begins_at", value_or_null(info.begins_at)},
                         {"encoding", info.encoding ? Config(to_string(*info.encoding)) : Config()},
                         {"checksum_format", or_null(info.checksum_format)},
                         {"tensors", info.tensors},
                         {"files", info.files},
                         {"bytes", info.bytes},
                         {"elements", value_or_null(info.elements)},
                         {"changed_elements", value_or_null(info.changed_elements)},
                         {"stream", or_null(info.stream)},
                         {"publisher", or_null(info.publisher)},
                         {"ranks", value_or_null(info.ranks)},
                         {"digest", or_null(info.digest)},
                         {"published", std::chrono::duration<double>(info.published.time_since_epoch()).count()},
                         {"age_seconds", age_since(info.published, now).count()},
                         {"problems", plain_list(info.problems)}});
}

std::string local_text(const LocalVersion& local) {
  const std::string path = printable(local.path);
  if (!local.version)
    return fmt::format("{}: no version{}\n", path, local.reason.empty() ? "" : ": " + escaped(local.reason));
  return fmt::format("{}: version {}, {}\n", path, *local.version,
                     local.has_record ? "from which a pull continues"
                                      : "which a pull checks or copies again: " + escaped(local.reason));
}

}  // namespace

std::string publish_text(const PublishReport& report) {
  std::string text = notes_lines(report.notes);
  text += fmt::format("{}: {}, ", printable(report.path), to_string(report.kind));
  text += report.kind == VersionKind::full
              ? counted(report.tensors, "tensor")
              : fmt::format("{} of {} changed", report.changed_tensors, counted(report.tensors, "tensor"));
  text += fmt::format(", {} of {} in {}: {:.2f} s\n", human_bytes(report.bytes_written), human_bytes(report.bytes),
                      counted(report.files, "file"), report.seconds);
  if (!report.reason.empty()) text += fmt::format("full because {}\n", escaped(report.reason));
  if (!report.removed.empty()) text += fmt::format("old versions deleted: {}\n", numbers_text(report.removed));
  return text + skipped_line(report.skipped);
}

Config publish_tree(const PublishReport& report) {
  return Config::object({{"version", report.version},
                         {"kind", to_string(report.kind)},
                         {"path", report.path},
                         {"tensors", report.tensors},
                         {"bytes", report.bytes},
                         {"changed_tensors", report.changed_tensors},
                         {"changed_elements", report.changed_elements},
                         {"bytes_written", report.bytes_written},
                         {"files", report.files},
                         {"reason", or_null(report.reason)},
                         {"removed", plain_list(report.removed)},
                         {"skipped", skipped_tree(report.skipped)},
                         {"notes", plain_list(report.notes)},
                         {"seconds", report.seconds}});
}

std::string pull_text(const PullReport& report, const std::string& local) {
  std::string text = notes_lines(report.notes);
  if (!report.is_changed)
    return text + fmt::format("{}: version {} is already present\n", printable(local), report.version);
  text += fmt::format("{}: version {}", printable(local), report.version);
  if (report.previous) text += fmt::format(" (previously {})", *report.previous);
  text += report.begun_at == "local" ? ", " : fmt::format(", copied from {}, ", printable(report.begun_at));
  text += fmt::format("{} applied to {}; {} read, {} written, {} linked: {:.2f} s\n",
                      counted(report.applied.size(), "delta"), counted(report.changed_tensors, "tensor"),
                      human_bytes(report.bytes_read), human_bytes(report.bytes_written),
                      human_bytes(report.bytes_linked), report.seconds);
  return text + skipped_line(report.skipped);
}

Config pull_tree(const PullReport& report, const std::string& local) {
  return Config::object({{"version", report.version},
                         {"previous", value_or_null(report.previous)},
                         {"changed", report.is_changed},
                         {"local", local},
                         {"begun_at", or_null(report.begun_at)},
                         {"applied", plain_list(report.applied)},
                         {"changed_tensors", report.changed_tensors},
                         {"bytes_read", report.bytes_read},
                         {"bytes_written", report.bytes_written},
                         {"bytes_linked", report.bytes_linked},
                         {"skipped", skipped_tree(report.skipped)},
                         {"notes", plain_list(report.notes)},
                         {"seconds", report.seconds}});
}

std::string log_text(const VersionLog& log, bool verified, SystemTime now, const OutputStyle& style) {
  std::string out;
  TextTable table({{"VERSION", Align::right},
                   {"KIND"},
                   {"TENSORS", Align::right},
                   {"FILES", Align::right},
                   {"SIZE", Align::right},
                   {"CHANGED", Align::right},
                   {"AGE", Align::right},
                   {"DIGEST"},
                   {"PUBLISHER"}},
                  {8});
  std::uint64_t problems = log.problems.size();
  for (const VersionInfo& info : log.versions) {
    const bool has_share = info.elements && info.changed_elements;
    table.add({std::to_string(info.version), kind_text(info), std::to_string(info.tensors), std::to_string(info.files),
               human_bytes(info.bytes), has_share ? share_text(*info.changed_elements, *info.elements) : "-",
               workspace::age_text(age_since(info.published, now)),
               info.digest.empty() ? "-" : printable(info.digest.substr(0, shown_digits)),
               info.publisher.empty() ? "-" : printable(info.publisher)});
    problems += info.problems.size();
  }
  if (!table.empty()) {
    table.append_to(out, style);
    out += '\n';
  }
  const auto add_problem = [&](const std::string& problem) {
    out += coloured(style, Colour::bad, "problem") + ": " + escaped(problem) + "\n";
  };
  for (const VersionInfo& info : log.versions)
    for (const std::string& problem : info.problems) add_problem(problem);
  for (const std::string& problem : log.problems) add_problem(problem);
  for (const std::string& name : log.unfinished) out += fmt::format("unfinished: {}\n", printable(name));
  for (const std::string& name : log.other_names) out += fmt::format("not a version: {}\n", printable(name));
  if (log.local) out += local_text(*log.local);
  out += counted(log.versions.size(), "version");
  if (!log.versions.empty()) out += fmt::format(", the newest is {}", log.versions.back().version);
  out += problems != 0 ? "; " + coloured(style, Colour::bad, counted(problems, "problem"))
                       : std::string(verified && !log.versions.empty() ? "; all bytes verified" : "");
  return out + "\n";
}

Config log_tree(const VersionLog& log, bool verified, SystemTime now) {
  Config local;
  if (log.local)
    local = Config::object({{"path", log.local->path},
                            {"version", value_or_null(log.local->version)},
                            {"has_record", log.local->has_record},
                            {"reason", or_null(log.local->reason)}});
  return Config::object(
      {{"sound", log.is_sound()},
       {"verified", verified},
       {"source", log.source},
       {"versions", list_of(log.versions, [&](const VersionInfo& info) { return version_tree(info, now); })},
       {"unfinished", plain_list(log.unfinished)},
       {"other_names", plain_list(log.other_names)},
       {"local", std::move(local)},
       {"problems", plain_list(log.problems)}});
}

}  // namespace muster::inspect
