// SPDX-License-Identifier: Apache-2.0

#include "muster/verify.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <system_error>
#include <utility>
#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/model_dir.hpp"
#include "muster/state_file.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/checksums.hpp"
#include "src/checkpoint/assembly/export_job.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/model_parts.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"
#include "src/checkpoint/thirdparty/hdf5/file.hpp"
#include "src/checkpoint/verify.hpp"
#include "src/core/checksum.hpp"
#include "src/core/thread_pool.hpp"
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
  for (const auto& [name, checksum] : checksums->tensors) {
    if (!places.contains(name))
      verification.add(Defect::checksum, file, name, "{} has a checksum of the tensor {}, which does not exist",
                       in_quotes(file), in_quotes(name));
  }
  std::vector<ReadTensor> tensors;
  std::vector<std::uint64_t> sums;  // expected, one per tensor
  for (const auto& [name, place] : places) {
    if (!verification.selection.has(name)) continue;
    if (const auto sum = checksums->tensors.find(name); sum != checksums->tensors.end()) {
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
    found[i] = checksum_of(tensors[i].file->file, tensors[i].index, checksums->algorithm, add);
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
                     "{} in {}: checksum mismatch: data is corrupted (expected {}, found {})", in_quotes(name),
                     in_quotes(in), checksum_text(sums[i]), checksum_text(found[i]));
  }
}

// Verifies state files: a single one, or those of a workspace.

/// Opens and checks one file of the directory.
void verify_state(const std::string& name, const ProgressCallback& progress, Verification& verification) {
  try {
    const StateFile file = StateFile::open(join_path(verification.directory, name));
    verification.count(file.tensors());
    if (!verification.options.checksums) return;
    const auto selects = [&](std::string_view tensor) { return verification.selection.has(tensor); };
    for (const StateProblem& problem : file.check(progress, selects))
      verification.add(Defect::checksum, name, problem.tensor, "{}{}: {}",
                       problem.tensor.empty() ? "" : fmt::format("{} in ", in_quotes(problem.tensor)), in_quotes(name),
                       problem.words);
    verification.report.checked +=
        static_cast<std::uint64_t>(std::ranges::count_if(file.tensors(), selects, &StateTensor::name));
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
    if (!state.complete) return verification.add(Defect::file, name, "", "{}", state.problem);
    std::uint64_t before = 0;
    const auto progress = [&](const Progress& now) { counter.add(now.bytes - std::exchange(before, now.bytes)); };
    try {
      verify_state(name, progress, verification);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::not_found) throw;
      // A running job replaces its older states.
    }
    counter.add(state.tensor_bytes - std::min(before, state.tensor_bytes));  // of tensors that are not selected
  };
  for (const workspace::SurveyJob& job : survey.jobs) {
    for (const auto* states : {&job.states, &job.kept})
      for (const workspace::SurveyState& state : *states) verify_if_complete(state);
    if (job.states.empty()) continue;
    for (const int rank : job.missing_ranks)
      verification.add(Defect::missing, "", "", "job {} has no complete state of rank {}", job.nonce, rank);
  }
  const auto find_left = [&](const workspace::SurveyEntry& entry) {
    if (entry.writer == os::Life::dead)
      verification.add(
          Defect::leftover, entry.file, "", "{} is a leftover of a process that has ended. {}", in_quotes(entry.file),
          entry.foreign.empty() ? "Run muster gc --yes to delete it"
                                : "Move the files that Muster did not write out of it, and run muster gc --yes");
  };
  for (const workspace::SurveyEntry& entry : survey.foreign)
    if (const auto name = workspace::parse_name(entry.file))
      verification.add(Defect::file, entry.file, "", "{} has the name of a {}, but is not one", in_quotes(entry.file),
                       workspace::to_string(name->kind));
  for (const workspace::SurveyEntry& entry : survey.temporary) find_left(entry);
  for (const workspace::SurveyJob& job : survey.jobs)
    for (const workspace::SurveyEntry& entry : job.passing) find_left(entry);
}

/// Verifies a model in safetensors files: the survey, then all tensors against the checksums next to them.
void verify_model(const std::vector<std::string>& listing, Verification& verification) {
  const ModelSurvey survey = survey_model(verification.directory, listing);
  for (const Finding& finding : survey.findings) verification.add(finding);
  verification.add_omissions(survey.left_out, "");
  Places places;
  for (const SurveyedFile& file : survey.files) {
    verification.count(file.file.tensors());
    for (std::size_t i = 0; i < file.file.tensors().size(); ++i)
      places.try_emplace(file.file.tensors()[i].name, &file, i);
  }
  verify_checksums(places, verification);
}

/// Verifies a third-party checkpoint: opening it checks the headers, and then everything is read once.
void verify_foreign(const thirdparty::FoundCheckpoint& found, const std::string& name, Verification& verification) {
  VerifyReport& report = verification.report;
  report.kind = VerifiedKind::foreign;
  for (int rank = 0; rank < std::max(found.ranks, 1); ++rank) {
    try {
      std::vector<std::string> notes;
      const auto tensors = open_checkpoint(found, rank, verification.request(found.path).thirdparty, notes);
      verification.count(tensors->tensors());
      report.files += tensors->paths().size() - 1;
      verification.add_omissions(tensors->omissions(), name);
      report.notes.insert(report.notes.end(), notes.begin(), notes.end());
      if (!verification.options.checksums) continue;
      const auto add = [&](std::size_t tensor, Defect defect, const std::string& words) {
        verification.add(defect, name, tensors->tensors()[tensor].name, "{}", words);
      };
      report.checked += tensors->verify(verification.options.progress, add,
                                        [&](std::string_view tensor) { return verification.selection.has(tensor); });
      report.has_checksums = report.checked != 0;
    } catch (const Error& error) {
      // The request is wrong, and not the file: its key does not exist.
      const bool has_key = !verification.options.key.empty();
      if (error.kind() == ErrorKind::invalid_argument || (error.kind() == ErrorKind::not_found && has_key)) throw;
      verification.add(Defect::file, name, "", "{}", error.what());
    }
  }
}

void verify_directory(Verification& verification) {
  const std::string& directory = verification.directory;
  const PathContents contents = contents_of(directory, verification.request(directory).thirdparty);
  if (contents.kind == PathContents::Kind::workspace) return verify_workspace(verification);
  if (contents.foreign) return verify_foreign(*contents.foreign, "", verification);
  const std::vector<std::string> listing = files_in(directory);
  if (contents.kind == PathContents::Kind::other)
    throw file_error(ErrorKind::not_found, "verifying", directory,
                     fmt::format("no *.safetensors file and no other checkpoint found{}", hint_below(directory)));
  if (contents.kind == PathContents::Kind::model) return verify_model(listing, verification);
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
  if (const auto found = thirdparty::find_checkpoint(path, verification.request(path).thirdparty))
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

std::vector<SurveyedFile> Verification::open_all(const std::vector<std::string>& names) {
  std::vector<SurveyedFile> files;
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
    const ShardSet shards(path, 0, 1, request.states, request.thirdparty);
    if (!has_plan) {
      std::vector<std::string> notes;
      const std::optional<Config> config = shards.facts(request, notes).config;
      (void)MergePlan::load(request.plan, config ? &*config : nullptr);
      has_plan = true;
    }
    (void)plan_job(request, shards, shards.listings());
  } catch (const Error& error) {
    if (has_plan && (error.kind() == ErrorKind::rank_mismatch || error.kind() == ErrorKind::corrupt))
      verification.add(Defect::mismatch, "", "", "{}", error.what());
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
  if (!fs::exists(status)) throw file_error(ErrorKind::not_found, "verifying", path, "does not exist");
  VerifyReport report{.path = path};
  const bool is_directory = fs::is_directory(status);
  const fs::path whole(path);
  Verification verification{is_directory ? path : whole.parent_path().string(), options, report};
  if (is_directory)
    verify_directory(verification);
  else
    verify_file(whole.filename().string(), verification);
  if (report.is_good() && report.tensors == 0 && report.not_selected != 0) refuse_selection(verification.request(path));
  if (verification.has_request() && report.is_good()) verify_request(path, verification);
  return report;
}

std::uint64_t write_checksums(const std::string& path, const ProgressCallback& progress) {
  const auto refuse = [&](const std::string& words) {
    throw file_error(ErrorKind::invalid_argument, "writing checksums", path, words);
  };
  const VerifyReport report = verify(path, {.checksums = false});
  if (report.kind != VerifiedKind::checkpoint) refuse("not the directory of a checkpoint");
  // Older checksums may be for other tensors: they are replaced.
  for (const VerifyProblem& problem : report.problems)
    if (problem.defect != Defect::checksum) refuse(fmt::format("the checkpoint is not complete: {}", problem.message));

  std::uint64_t bytes = 0;
  const ModelDir model = ModelDir::open(path);
  for (const TensorEntry& entry : model.tensors()) bytes += entry.bytes;
  ProgressCounter counter(progress, bytes);
  const Checksums checksums = checksums_of(model.files(), [&](std::uint64_t count) { counter.add(count); });
  write_checksums(path, checksums);
  return checksums.tensors.size();
}

// Verifies a directory with one file per rank.
namespace {

struct Shard {
  int rank = 0;
  const SurveyedFile* opened = nullptr;
  std::optional<ShardFacts> facts;
};

// Checks the facts in a shard against its name and its tensors.
void verify_facts(Shard& shard, int ranks, Verification& verification) {
  const std::string& name = shard.opened->name;
  try {
    shard.facts = parse_shard_facts(shard.opened->file.metadata());
  } catch (const Error& error) {
    return verification.add(Defect::file, name, "", "{}: {}", in_quotes(name), error.what());
  }
  if (!shard.facts) return;
  if (shard.facts->rank != shard.rank || shard.facts->ranks != ranks)
    verification.add(Defect::mismatch, name, "", "{}: the metadata records rank {} of {}, which contradicts the name",
                     in_quotes(name), shard.facts->rank, shard.facts->ranks);
  if (shard.facts->layout && shard.facts->layout->ranks() != ranks) {
    verification.add(Defect::mismatch, name, "", "{}: the metadata records the layout {}, which does not have {} ranks",
                     in_quotes(name), to_string(*shard.facts->layout), ranks);
    shard.facts->layout.reset();
  }
  for (const auto& [tensor, place] : shard.facts->padded) {
    const auto index = shard.opened->file.find(tensor);
    if (!index) {
      verification.add(Defect::mismatch, name, tensor,
                       "{}: the metadata records padding of the tensor {}, which does not exist", in_quotes(name),
                       in_quotes(tensor));
      continue;
    }
    const Shape& shape = shard.opened->file.tensors()[*index].shape;
    if (place.first >= shape.size())
      verification.add(Defect::mismatch, name, tensor,
                       "{0}: tensor {1}: padding along dimension {3} is out of range for the shape {2}",
                       in_quotes(name), in_quotes(tensor), to_string(shape), place.first);
  }
}

// Compares two ranks that have parts of the same tensors.
void compare(const Shard& first, const Shard& other, Verification& verification) {
  const std::string& name = other.opened->name;
  const std::string one = in_quotes(first.opened->name);
  const std::string two = in_quotes(name);
  const auto lacks = [&](const TensorEntry& entry, const std::string& has, const std::string& has_not) {
    verification.add(Defect::mismatch, name, entry.name, "tensor {} exists in {}, but not in {}", in_quotes(entry.name),
                     has, has_not);
  };
  for (const TensorEntry& entry : first.opened->file.tensors()) {
    const auto index = other.opened->file.find(entry.name);
    if (!index) {
      lacks(entry, one, two);
      continue;
    }
    const TensorEntry& there = other.opened->file.tensors()[*index];
    if (there.dtype == entry.dtype && there.shape.size() == entry.shape.size()) continue;
    verification.add(Defect::mismatch, name, entry.name, "tensor {} is {} in {}, but {} in {}", in_quotes(entry.name),
                     to_string(TensorSpec{entry.dtype, entry.shape}), one,
                     to_string(TensorSpec{there.dtype, there.shape}), two);
  }
  for (const TensorEntry& entry : other.opened->file.tensors())
    if (!first.opened->file.find(entry.name)) lacks(entry, two, one);
  if (first.facts && other.facts && first.facts->padded != other.facts->padded)
    verification.add(Defect::mismatch, name, "", "{} and {} record different padding", one, two);
}

// Ranks of one group have parts of the same tensors: those of one pipeline stage and one expert rank.
int group_of(const Shard& shard) {
  return shard.facts && shard.facts->layout ? shard.rank / shard.facts->layout->tensor : 0;
}

// Compares two ranks of one set, whichever tensors they have.
void compare_facts(const Shard& first, const Shard& other, Verification& verification) {
  const std::string& name = other.opened->name;
  const auto words_of_layout = [](const Shard& shard) {
    return shard.facts->layout ? to_string(*shard.facts->layout) : std::string("(none)");
  };
  if (first.facts.has_value() != other.facts.has_value())
    verification.add(Defect::mismatch, name, "", "only one of {} and {} has the metadata of a shard",
                     in_quotes(first.opened->name), in_quotes(name));
  else if (first.facts && first.facts->layout != other.facts->layout)
    verification.add(Defect::mismatch, name, "", "{} has the layout {}, and {} has {}", in_quotes(first.opened->name),
                     words_of_layout(first), in_quotes(name), words_of_layout(other));
}

// Verifies shards against the checksums in their metadata.
void verify_pieces(const std::vector<SurveyedFile>& files, Verification& verification) {
  std::vector<ReadTensor> all;
  std::vector<std::shared_ptr<const CheckedTensor>> tensors;  // one per tensor
  for (const SurveyedFile& opened : files) {
    try {
      const PieceChecksums sums = piece_checksums_of(opened.file);
      for (std::size_t i = 0; i < opened.file.tensors().size(); ++i) {
        if (!verification.selection.has(opened.file.tensors()[i].name)) continue;
        auto tensor = checked_tensor(opened.file, i, sums);
        if (!tensor) continue;
        all.push_back({&opened, i});
        tensors.push_back(std::move(tensor));
      }
    } catch (const Error& error) {
      verification.add(Defect::file, opened.name, "", "{}", error.what());
    }
  }
  verification.report.has_checksums = !all.empty();
  if (!verification.options.checksums) return;
  read_all(all, verification.options.progress, [&](std::size_t place, const ReadProgress& progress) {
    const std::uint64_t bytes = all[place].entry().bytes;
    std::vector<std::byte> memory(std::min(bytes, checked_piece_bytes));
    for (std::uint64_t at = 0; at < bytes; at += memory.size()) {
      memory.resize(std::min(bytes - at, checked_piece_bytes));
      tensors[place]->read(at, memory);
      progress(memory.size());
    }
  });
  verification.report.checked += all.size();
  for (const ReadTensor& read : all)
    if (!read.failure.empty())
      verification.add(Defect::checksum, read.file->name, read.entry().name, "{}", read.failure);
}

}  // namespace

void verify_shards(const std::vector<std::string>& names, Verification& verification) {
  const ShardSurvey survey = survey_shards(names);
  for (const Finding& finding : survey.findings) verification.add(finding);
  const std::vector<SurveyedFile> files = verification.open_all(survey.names);
  std::map<int, Shard> first;                           // the first shard of each set
  std::map<std::pair<int, int>, Shard> first_of_group;  // the first shard of each set and group
  for (const SurveyedFile& file : files) {
    const auto parsed = parse_shard_file_name(file.name);
    Shard shard{parsed->rank, &file, {}};
    verify_facts(shard, parsed->ranks, verification);
    if (const auto [other, is_first] = first_of_group.try_emplace({parsed->ranks, group_of(shard)}, shard); !is_first)
      compare(other->second, shard, verification);
    if (const auto [other, is_first] = first.try_emplace(parsed->ranks, shard); !is_first)
      compare_facts(other->second, shard, verification);
  }
  if (verification.report.is_good() && !verification.has_request())
    verify_request(verification.directory, verification);
  verify_pieces(files, verification);
}

}  // namespace muster
