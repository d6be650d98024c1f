// SPDX-License-Identifier: Apache-2.0

#include "muster/verify.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <numeric>
#include <system_error>
#include <utility>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "muster/state_file.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/checksums.hpp"
#include "src/checkpoint/export_job.hpp"
#include "src/checkpoint/foreign/checkpoint.hpp"
#include "src/checkpoint/foreign_hdf5.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/model_parts.hpp"
#include "src/checkpoint/shard_set.hpp"
#include "src/checkpoint/verification.hpp"
#include "src/core/checksum.hpp"
#include "src/core/parallel.hpp"
#include "src/os/process.hpp"
#include "src/workspace/survey.hpp"

namespace muster {
namespace {

namespace fs = std::filesystem;

void verify_checksums(const Places& places, Verification& verification) {
  VerifyReport& report = verification.report;
  const std::string file(checksums_file_name);
  std::optional<Checksums> checksums;
  try {
    checksums = read_checksums(verification.directory);
  } catch (const Error& error) {
    report.has_checksums = true;
    return verification.add(Defect::checksum, file, "", "{}", error.what());
  }
  report.has_checksums = checksums.has_value();
  if (!checksums) return;
  for (const auto& [name, checksum] : *checksums) {
    if (!places.contains(name))
      verification.add(Defect::checksum, file, name, "{} has a checksum of the tensor {}, which is not there",
                       in_quotes(file), in_quotes(name));
  }
  std::vector<ReadTensor> tensors;
  std::vector<std::uint64_t> sums;  // expected, one per tensor
  for (const auto& [name, place] : places) {
    if (const auto sum = checksums->find(name); sum != checksums->end()) {
      tensors.push_back({place.first, place.second});
      sums.push_back(sum->second);
    } else {
      verification.add(Defect::checksum, file, name, "{} has no checksum of the tensor {}", in_quotes(file),
                       in_quotes(name));
    }
  }
  if (!verification.options.checksums) return;
  std::vector<std::uint64_t> found(tensors.size());
  read_all(tensors, verification.options.progress, [&](std::size_t i, const ReadProgress& add) {
    found[i] = checksum_of(tensors[i].file->file, tensors[i].index, add);
  });
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string& in = tensors[i].file->name;
    const std::string& name = tensors[i].entry().name;
    if (!tensors[i].failure.empty()) {
      verification.add(Defect::file, in, name, "{}", tensors[i].failure);
      continue;
    }
    ++report.checked;
    if (found[i] == sums[i]) continue;
    verification.add(Defect::checksum, in, name,
                     "the tensor {} in {} has the checksum {}, not {}: its bytes have changed", in_quotes(name),
                     in_quotes(in), checksum_text(found[i]), checksum_text(sums[i]));
  }
}

// Verifies state files: a single one, or those of a workspace.

/// Opens and checks one file of the directory.
void verify_state(const std::string& name, const ProgressCallback& progress, Verification& verification) {
  try {
    const StateFile file = StateFile::open(join_path(verification.directory, name));
    verification.count(file.tensors());
    if (!verification.options.checksums) return;
    for (const StateProblem& problem : file.check(progress))
      verification.add(Defect::checksum, name, problem.tensor, "{}{}: {}",
                       problem.tensor.empty() ? "" : fmt::format("the tensor {} in ", in_quotes(problem.tensor)),
                       in_quotes(name), problem.words);
    verification.report.checked += file.tensors().size();
  } catch (const Error& error) {
    // A missing file, or one of another version, was not verified.
    if (error.kind() == ErrorKind::version || error.kind() == ErrorKind::not_found) throw;
    verification.add(Defect::file, name, "", "{}", error.what());
  }
}

void verify_workspace(Verification& verification) {
  verification.report.kind = VerifiedKind::workspace;
  verification.report.has_checksums = true;
  const workspace::Survey survey = workspace::survey(verification.directory);
  std::uint64_t total = 0;
  for (const workspace::SurveyJob& job : survey.jobs)
    for (const auto* states : {&job.states, &job.kept})
      for (const workspace::SurveyState& state : *states) total += state.complete ? state.tensor_bytes : 0;
  ProgressCounter counter(verification.options.progress, total);
  const auto verify_if_complete = [&](const workspace::SurveyState& state) {
    const std::string& name = state.entry.file;
    if (!state.complete)
      return verification.add(Defect::file, name, "", "the state is not complete: {}", state.problem);
    std::uint64_t before = 0;
    const auto progress = [&](const Progress& now) { counter.add(now.bytes - std::exchange(before, now.bytes)); };
    try {
      verify_state(name, progress, verification);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::not_found) throw;
      // A running job replaces its older states.
    }
  };
  for (const workspace::SurveyJob& job : survey.jobs) {
    for (const auto* states : {&job.states, &job.kept})
      for (const workspace::SurveyState& state : *states) verify_if_complete(state);
    if (job.states.empty()) continue;
    for (const int rank : job.missing_ranks)
      verification.add(Defect::missing, "", "", "the job {} has no complete state of rank {}", job.nonce, rank);
  }
  const auto find_left = [&](const workspace::SurveyEntry& entry) {
    if (entry.writer == os::Life::dead)
      verification.add(Defect::left, entry.file, "", "{} was left by a process that is gone; muster gc --yes {}",
                       in_quotes(entry.file),
                       entry.foreign.empty() ? "removes it" : "removes it when what is not Muster's is out of it");
  };
  for (const workspace::SurveyEntry& entry : survey.foreign)
    if (const auto name = workspace::parse_name(entry.file))
      verification.add(Defect::file, entry.file, "", "{} has the name of a {}, and is none", in_quotes(entry.file),
                       workspace::to_string(name->kind));
  for (const workspace::SurveyEntry& entry : survey.temporary) find_left(entry);
  for (const workspace::SurveyJob& job : survey.jobs)
    for (const workspace::SurveyEntry& entry : job.passing) find_left(entry);
}

/// Verifies a model in safetensors files: the survey, then all tensors against the checksums beside them.
void verify_model(const std::vector<std::string>& listing, Verification& verification) {
  const ModelSurvey survey = survey_model(verification.directory, listing);
  for (const Finding& finding : survey.findings) verification.add(finding);
  verification.add_omissions(survey.left_out, "");
  Places places;
  for (const OpenedFile& file : survey.files) {
    verification.count(file.file.tensors());
    for (std::size_t i = 0; i < file.file.tensors().size(); ++i)
      places.try_emplace(file.file.tensors()[i].name, &file, i);
  }
  verify_checksums(places, verification);
}

/// Verifies a foreign checkpoint: opening it checks the headers, and then everything is read once.
void verify_foreign(const foreign::Found& found, const std::string& name, Verification& verification) {
  VerifyReport& report = verification.report;
  report.kind = VerifiedKind::foreign;
  for (int rank = 0; rank < std::max(found.ranks, 1); ++rank) {
    try {
      std::vector<std::string> notes;
      const auto tensors = open_checkpoint(found, rank, verification.request(found.path).foreign, notes);
      verification.count(tensors->tensors());
      report.files += tensors->paths().size() - 1;
      verification.add_omissions(tensors->omissions(), name);
      for (const std::string& note : notes) report.left_out.push_back({name, note});
      if (!verification.options.checksums) continue;
      const auto add = [&](std::size_t tensor, Defect defect, const std::string& words) {
        verification.add(defect, name, tensors->tensors()[tensor].name, "{}", words);
      };
      report.checked += tensors->verify(verification.options.progress, add);
      report.has_checksums = report.checked != 0;
    } catch (const Error& error) {
      // The request is wrong, and not the file: its key does not exist.
      const bool has_key = !verification.options.at.empty();
      if (error.kind() == ErrorKind::argument || (error.kind() == ErrorKind::not_found && has_key)) throw;
      verification.add(Defect::file, name, "", "{}", error.what());
    }
  }
}

void verify_directory(Verification& verification) {
  const std::string& directory = verification.directory;
  const Contents contents = contents_of(directory, verification.request(directory).foreign);
  if (contents.kind == Contents::Kind::workspace) return verify_workspace(verification);
  if (contents.foreign) return verify_foreign(*contents.foreign, "", verification);
  const std::vector<std::string> listing = files_in(directory);
  if (contents.kind == Contents::Kind::other)
    throw file_error(ErrorKind::not_found, "verifying", directory,
                     fmt::format("there is no *.safetensors in it, and no other checkpoint{}", hint_below(directory)));
  if (contents.kind == Contents::Kind::model) return verify_model(listing, verification);
  verification.report.kind = VerifiedKind::shards;
  verify_shards(listing, verification);
}

void verify_file(const std::string& name, Verification& verification) {
  const std::string path = join_path(verification.directory, name);
  if (StateFile::is_state_file(path)) {
    verification.report.kind = VerifiedKind::state;
    verification.report.has_checksums = true;
    return verify_state(name, verification.options.progress, verification);
  }
  if (const auto found = foreign::find_checkpoint(path, verification.request(path).foreign))
    return verify_foreign(*found, name, verification);
  verification.report.kind = VerifiedKind::file;
  if (!is_hdf5_file(path)) {
    verification.open_all({name});
    return;
  }
  try {
    const ForeignHdf5 file(path);
    verification.count(file.tensors());
    verification.add_omissions(file.omissions(), name);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::unsupported) throw;
    verification.add(Defect::file, name, "", "{}", error.what());
  }
}

}  // namespace

void Verification::add_omissions(const Omissions& omissions, std::string_view file) {
  for (const Omission& omission : omissions) {
    if (omission.is_lost)
      add(Defect::unreadable, file, omission.name, "{} cannot be read: {}", in_quotes(omission.name), omission.reason);
    else
      report.left_out.push_back(omission);
  }
}

std::vector<OpenedFile> Verification::open_all(const std::vector<std::string>& names) {
  std::vector<OpenedFile> files;
  files.reserve(names.size());
  os::allow_open_files(names.size() + descriptors_beside_files);
  for (const std::string& name : names) {
    try {
      files.push_back({name, SafetensorsFile::open(join_path(directory, name))});
    } catch (const Error& error) {
      refuse_lack_of_descriptors(error, directory, names.size());
      add(Defect::file, name, "", "{}", error.what());
      continue;
    }
    count(files.back().file.tensors());
  }
  return files;
}

void read_all(std::vector<ReadTensor>& tensors, const ProgressCallback& progress,
              const std::function<void(std::size_t, const ReadProgress&)>& read) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto bytes = [&](std::size_t place) { return tensors[place].entry().bytes; };
  std::uint64_t total = 0;
  for (const std::size_t place : order) total += bytes(place);
  // The largest first, so that the last thread to finish has a small one.
  std::ranges::stable_sort(order, std::greater(), bytes);
  ProgressCounter reading(progress, total);
  parallel_for(order.size(), copy_workers(), [&](std::size_t i, std::size_t) {
    try {
      read(order[i], [&](std::uint64_t count) { reading.add(count); });
    } catch (const Error& error) {
      tensors[order[i]].failure = error.what();
    }
  });
}

void verify_request(const std::string& path, Verification& verification) {
  const Request request = verification.request(path);
  bool has_plan = request.plan.empty();  // or the plan can be read
  try {
    const ShardSet shards(path, 0, 1, request.states, request.foreign);
    if (!has_plan) {
      std::vector<std::string> notes;
      const std::optional<Config> config = shards.facts(request, notes).config;
      (void)MergePlan::load(request.plan, config ? &*config : nullptr);
      has_plan = true;
    }
    (void)plan_job(request, shards, shards.listings());
  } catch (const Error& error) {
    if (has_plan && (error.kind() == ErrorKind::rank_mismatch || error.kind() == ErrorKind::corrupt))
      verification.add(Defect::disagree, "", "", "{}", error.what());
    else if (verification.has_request())
      throw;
  }
}

std::string_view to_string(Defect defect) noexcept {
  constexpr std::array<std::string_view, 10> names = {"file",      "missing",  "unindexed", "twice",    "index",
                                                      "numbering", "disagree", "left",      "checksum", "unreadable"};
  return names[static_cast<std::size_t>(defect)];
}

VerifyReport verify(const std::string& path, const VerifyOptions& options) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (!fs::exists(status)) throw file_error(ErrorKind::not_found, "verifying", path, "it is not there");
  VerifyReport report{.path = path};
  const bool is_directory = fs::is_directory(status);
  const fs::path whole(path);
  Verification verification{is_directory ? path : whole.parent_path().string(), options, report};
  if (is_directory)
    verify_directory(verification);
  else
    verify_file(whole.filename().string(), verification);
  if (verification.has_request() && report.is_good()) verify_request(path, verification);
  return report;
}

std::uint64_t write_checksums(const std::string& path, const ProgressCallback& progress) {
  const auto refuse = [&](const std::string& words) {
    throw file_error(ErrorKind::argument, "writing checksums of", path, words);
  };
  const VerifyReport report = verify(path, {.checksums = false});
  if (report.kind != VerifiedKind::checkpoint) refuse("it is no checkpoint's directory");
  // Older checksums may be for other tensors: they are replaced.
  for (const VerifyProblem& problem : report.problems)
    if (problem.defect != Defect::checksum) refuse(fmt::format("it is not whole: {}", problem.words));

  std::uint64_t bytes = 0;
  const ModelDir model = ModelDir::open(path);
  for (const TensorEntry& entry : model.tensors()) bytes += entry.bytes;
  ProgressCounter counter(progress, bytes);
  const Checksums checksums = checksums_of(model.files(), [&](std::uint64_t count) { counter.add(count); });
  write_checksums(path, checksums);
  return checksums.size();
}

}  // namespace muster
