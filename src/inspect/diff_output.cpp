// SPDX-License-Identifier: Apache-2.0
// A comparison as lines for people and as JSON for programs.

#include <fmt/core.h>

#include <iterator>

#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/inspect/diff.hpp"
#include "src/inspect/elements.hpp"
#include "src/inspect/printable.hpp"
#include "src/inspect/text_table.hpp"

namespace muster::inspect {
namespace {

std::string type_of(const TensorEntry& entry) {
  return fmt::format("{} {}", to_string(entry.dtype), to_string(entry.shape));
}

std::string values_text(const TensorDiff& diff) {
  const ValueDifference& values = diff.values;
  std::string text = fmt::format("{}: {} of {} values differ", type_of(diff.a), values.elements,
                                 element_count(diff.a.shape) * (diff.a.dtype == DType::complex64 ? 2 : 1));
  text += fmt::format(", by at most {:.6g} ({:.3g} relative)", values.absolute, values.relative);
  if (values.nans != 0) text += fmt::format(", {} NaN on one side", values.nans);
  return text;
}

std::string_view kind_name(DiffKind kind) noexcept {
  switch (kind) {
    case DiffKind::only_in_a:
      return "only in A";
    case DiffKind::only_in_b:
      return "only in B";
    case DiffKind::type:
      return "type";
    case DiffKind::values:
      break;
  }
  return "values";
}

}  // namespace

std::string diff_text(const DiffReport& report) {
  std::string out;
  for (const TensorDiff& diff : report.tensor_diffs) {
    std::string what;
    switch (diff.kind) {
      case DiffKind::only_in_a:
        what = "only in A: " + type_of(diff.a);
        break;
      case DiffKind::only_in_b:
        what = "only in B: " + type_of(diff.b);
        break;
      case DiffKind::type:
        what = fmt::format("{} / {}", type_of(diff.a), type_of(diff.b));
        break;
      case DiffKind::values:
        what = values_text(diff);
        break;
    }
    fmt::format_to(std::back_inserter(out), "tensor {}: {}\n", printable(diff.name), what);
  }
  for (const FileDiff& diff : report.file_diffs) {
    fmt::format_to(std::back_inserter(out), "file {}: {}\n", printable(diff.name),
                   diff.kind == DiffKind::values ? escaped(diff.detail) : kind_name(diff.kind));
  }
  for (const ConfigDiff& diff : report.config_diffs)
    fmt::format_to(std::back_inserter(out), "config {}\n", escaped(words_of(diff)));
  if (report.config_differences > report.config_diffs.size())
    fmt::format_to(std::back_inserter(out), "and {} more places of the config\n",
                   report.config_differences - report.config_diffs.size());
  if (report.metadata_differs)
    out += "note: the headers have different metadata (muster show), which is no difference\n";
  const std::string compared =
      fmt::format("{} tensor{}, {}{}{}", report.tensors, plural(report.tensors), human_bytes(report.bytes),
                  report.has_configs ? ", the config" : "",
                  report.files == 0 ? "" : fmt::format(", {} other file{}", report.files, plural(report.files)));
  if (report.is_same()) {
    out += fmt::format("same: {}\n", compared);
  } else {
    out += fmt::format("different: {} tensor{} and {} other file{}{} (compared: {})\n", report.tensor_diffs.size(),
                       plural(report.tensor_diffs.size()), report.file_diffs.size(), plural(report.file_diffs.size()),
                       report.config_differences == 0
                           ? ""
                           : fmt::format(", {} of the config", counted(report.config_differences, "place")),
                       compared);
  }
  return out;
}

std::string diff_json(const DiffReport& report) {
  ConfigArray tensors;
  tensors.reserve(report.tensor_diffs.size());
  for (const TensorDiff& diff : report.tensor_diffs) {
    Config item = Config::object({{"name", Config(json_text(diff.name))}, {"kind", Config(kind_name(diff.kind))}});
    if (diff.kind != DiffKind::only_in_b) item["a"] = Config(type_of(diff.a));
    if (diff.kind != DiffKind::only_in_a) item["b"] = Config(type_of(diff.b));
    if (diff.kind == DiffKind::values) {
      item["elements"] = Config(diff.values.elements);
      item["nans"] = Config(diff.values.nans);
      item["absolute"] = json_number(diff.values.absolute);
      item["relative"] = json_number(diff.values.relative);
    }
    tensors.push_back(std::move(item));
  }
  ConfigArray files;
  for (const FileDiff& diff : report.file_diffs) {
    files.push_back(Config::object({{"name", Config(json_text(diff.name))},
                                    {"kind", Config(kind_name(diff.kind))},
                                    {"detail", Config(diff.detail)}}));
  }
  ConfigArray places;
  for (const ConfigDiff& diff : report.config_diffs)
    places.push_back(Config::object({{"place", Config(json_text(diff.place))},
                                     {"a", diff.a.empty() ? Config() : Config(diff.a)},
                                     {"b", diff.b.empty() ? Config() : Config(diff.b)}}));
  return printable_json(to_json(Config::object({{"same", Config(report.is_same())},
                                                {"a", Config(json_text(report.a))},
                                                {"b", Config(json_text(report.b))},
                                                {"tensors", Config(report.tensors)},
                                                {"bytes", Config(report.bytes)},
                                                {"files", Config(report.files)},
                                                {"config", Config(report.has_configs)},
                                                {"metadata_differs", Config(report.metadata_differs)},
                                                {"tensor_differences", Config(std::move(tensors))},
                                                {"file_differences", Config(std::move(files))},
                                                {"config_differences", Config(std::move(places))},
                                                {"config_differences_in_all", Config(report.config_differences)}}),
                                2)) +
         "\n";
}

}  // namespace muster::inspect
