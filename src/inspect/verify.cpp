// SPDX-License-Identifier: Apache-2.0
#include "muster/verify.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

#include "muster/error.hpp"
#include "muster/state_file.hpp"
#include "src/checkpoint/checksums.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/shard_files.hpp"
#include "src/core/checksum.hpp"
#include "src/core/parallel.hpp"
#include "src/core/progress_counter.hpp"
#include "src/core/quoted.hpp"
#include "src/inspect/foreign_hdf5.hpp"
#include "src/inspect/verification.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace inspect {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t most_problems = 10'000;

struct Summed {
  std::string_view name;
  const OpenedFile* file = nullptr;
  std::size_t index = 0;
  std::uint64_t checksum = 0;
  std::string failure;  ///< why its bytes could not be read
};

// Each tensor is read once, by one thread.
std::vector<Summed> sum_all(const Places& places, const ProgressCallback& progress) {
  std::vector<Summed> all;
  std::uint64_t total = 0;
  all.reserve(places.size());
  for (const auto& [name, place] : places) {
    all.push_back({name, place.first, place.second, 0, {}});
    total += place.first->file.tensors()[place.second].bytes;
  }
  // The largest first: the last thread to finish has a small one.
  std::vector<std::size_t> order(all.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto bytes = [&](std::size_t i) { return all[i].file->file.tensors()[all[i].index].bytes; };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return bytes(a) > bytes(b); });

  ProgressCounter reading(progress, total);
  parallel_for(order.size(), copy_workers(), [&](std::size_t place, std::size_t) {
    Summed& summed = all[order[place]];
    try {
      summed.checksum = checksum_of(summed.file->file, summed.index, [&](std::uint64_t count) { reading.add(count); });
    } catch (const Error& error) {
      summed.failure = error.what();
    }
  });
  return all;
}

void verify_checksums(const std::string& directory, const Places& places, const VerifyOptions& options,
                      VerifyReport& report, Verification& verification) {
  const std::string file(checksums_file_name);
  std::optional<Checksums> checksums;
  try {
    checksums = read_checksums(directory);
  } catch (const Error& error) {
    report.has_checksums = true;
    return verification.add(Defect::checksum, file, "", error.what());
  }
  report.has_checksums = checksums.has_value();
  if (!checksums) return;
  for (const auto& [name, checksum] : *checksums) {
    if (!places.contains(name))
      verification.add(
          Defect::checksum, file, name,
          fmt::format("{} has a checksum of the tensor {}, which is not there", in_quotes(file), in_quotes(name)));
  }
  Places with;
  for (const auto& [name, place] : places) {
    if (checksums->contains(name))
      with.emplace(name, place);
    else
      verification.add(Defect::checksum, file, std::string(name),
                       fmt::format("{} has no checksum of the tensor {}", in_quotes(file), in_quotes(name)));
  }
  if (!options.checksums) return;
  for (const Summed& summed : sum_all(with, options.progress)) {
    if (!summed.failure.empty()) {
      verification.add(Defect::file, summed.file->name, std::string(summed.name), summed.failure);
      continue;
    }
    ++report.checked;
    const std::uint64_t expected = checksums->find(summed.name)->second;
    if (summed.checksum == expected) continue;
    verification.add(
        Defect::checksum, summed.file->name, std::string(summed.name),
        fmt::format("the tensor {} in {} has the checksum {}, not {}: its bytes have changed", in_quotes(summed.name),
                    in_quotes(summed.file->name), checksum_text(summed.checksum), checksum_text(expected)));
  }
}

// Throws nothing but for a directory that cannot be read; all else is a problem. The files live as long as the result.
std::vector<OpenedFile> verify_checkpoint(const std::string& directory, const std::vector<std::string>& weights,
                                          const std::vector<std::string>& indexes, Verification& verification) {
  std::vector<OpenedFile> files = verification.open_all(directory, weights);
  const Places places = find_places(files, verification);
  const bool is_numbered = verify_numbering(weights, verification);
  if (indexes.empty()) {
    if (is_numbered)
      verification.add(Defect::missing, std::string(model_index_name), "",
                       fmt::format("there is no {}, so loaders do not find the numbered files", model_index_name));
    else if (weights.size() > 1)
      verification.add(
          Defect::unindexed, weights[1], "",
          fmt::format("{} safetensors files and no index: it cannot be told which are the model", weights.size()));
    return files;
  }
  const bool has_usual = std::find(indexes.begin(), indexes.end(), model_index_name) != indexes.end();
  const std::string& index = has_usual ? std::string(model_index_name) : indexes.front();
  for (const std::string& other : indexes) {
    if (other != index)
      verification.add(
          Defect::twice, other, "",
          fmt::format("{} and {} are both an index; the former was verified", in_quotes(index), in_quotes(other)));
  }
  verify_index(directory, index, weights, files, places, verification);
  return files;
}

VerifyReport verify_directory(const std::string& directory, const VerifyOptions& options) {
  VerifyReport report{.path = directory};
  std::vector<std::string> weights;
  std::vector<std::string> indexes;
  for (std::string& name : files_in(directory)) {
    if (is_weight_name(name))
      weights.push_back(std::move(name));
    else if (is_index_name(name))
      indexes.push_back(std::move(name));
  }
  if (weights.empty() && indexes.empty() && is_workspace_directory(directory))
    return verify_workspace(directory, options);
  if (weights.empty() && indexes.empty())
    throw Error(ErrorKind::not_found,
                fmt::format("verifying {}: there is no *.safetensors in it", in_quotes(directory)),
                {.path = directory});
  Verification verification(report);
  const bool has_model = !indexes.empty() || std::binary_search(weights.begin(), weights.end(), model_file_name);
  const bool has_shards = std::any_of(weights.begin(), weights.end(),
                                      [](const std::string& name) { return parse_shard_file_name(name).has_value(); });
  if (has_shards && !has_model) {
    report.kind = VerifiedKind::shards;
    verify_shards(directory, weights, options, report, verification);
    return report;
  }
  const std::vector<OpenedFile> files = verify_checkpoint(directory, weights, indexes, verification);
  VerifyReport unused;
  Verification ignored(unused);
  verify_checksums(directory, find_places(files, ignored), options, report, verification);
  return report;
}

VerifyReport verify_file(const std::string& path, const VerifyOptions& options) {
  if (StateFile::is_state_file(path)) return verify_state_file(path, options);
  VerifyReport report{.path = path, .kind = VerifiedKind::file};
  Verification verification(report);
  if (is_hdf5_file(path)) {
    try {
      const std::unique_ptr<ForeignHdf5> file = ForeignHdf5::open(path);
      ++report.files;
      for (const TensorEntry& entry : file->tensors()) {
        ++report.tensors;
        report.bytes += entry.bytes;
      }
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::unsupported) throw;
      verification.add(Defect::file, fs::path(path).filename().string(), "", error.what());
    }
    return report;
  }
  const fs::path whole(path);
  verification.open_all(whole.parent_path().string(), {whole.filename().string()});
  return report;
}

}  // namespace

void Verification::add(Defect defect, std::string file, std::string tensor, std::string words) {
  if (report_.problems.size() >= most_problems) {
    ++report_.problems_left_out;
    return;
  }
  report_.problems.push_back({defect, std::move(file), std::move(tensor), std::move(words)});
}

std::vector<OpenedFile> Verification::open_all(const std::string& directory, const std::vector<std::string>& names) {
  std::vector<OpenedFile> files;
  files.reserve(names.size());
  os::allow_open_files(names.size());
  for (const std::string& name : names) {
    try {
      files.push_back({name, SafetensorsFile::open(join_path(directory, name))});
    } catch (const Error& error) {
      add(Defect::file, name, "", error.what());
      continue;
    }
    ++report_.files;
    for (const TensorEntry& entry : files.back().file.tensors()) {
      ++report_.tensors;
      report_.bytes += entry.bytes;
    }
  }
  return files;
}

Places find_places(const std::vector<OpenedFile>& files, Verification& verification) {
  Places places;
  for (const OpenedFile& file : files) {
    const std::vector<TensorEntry>& tensors = file.file.tensors();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto [place, is_new] = places.try_emplace(tensors[i].name, &file, i);
      if (!is_new)
        verification.add(Defect::twice, file.name, tensors[i].name,
                         fmt::format("the tensor {} is in {} and in {}", in_quotes(tensors[i].name),
                                     in_quotes(place->second.first->name), in_quotes(file.name)));
    }
  }
  return places;
}

}  // namespace inspect

std::string_view to_string(Defect defect) noexcept {
  switch (defect) {
    case Defect::file:
      return "file";
    case Defect::missing:
      return "missing";
    case Defect::unindexed:
      return "unindexed";
    case Defect::twice:
      return "twice";
    case Defect::index:
      return "index";
    case Defect::numbering:
      return "numbering";
    case Defect::disagree:
      return "disagree";
    case Defect::left:
      return "left";
    case Defect::checksum:
      break;
  }
  return "checksum";
}

VerifyReport verify(const std::string& path, const VerifyOptions& options) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status))
    throw Error(ErrorKind::not_found, fmt::format("verifying {}: it is not there", in_quotes(path)), {.path = path});
  return std::filesystem::is_directory(status) ? inspect::verify_directory(path, options)
                                               : inspect::verify_file(path, options);
}

std::uint64_t write_checksums(const std::string& path, const ProgressCallback& progress) {
  const auto refuse = [&](const std::string& words) {
    throw Error(ErrorKind::argument, fmt::format("writing checksums of {}: {}", in_quotes(path), words),
                {.path = path});
  };
  const VerifyReport report = verify(path, {.checksums = false});
  if (report.kind != VerifiedKind::checkpoint) refuse("it is no checkpoint's directory");
  // Older checksums may be of other tensors: they are replaced.
  for (const VerifyProblem& problem : report.problems)
    if (problem.defect != Defect::checksum) refuse(fmt::format("it is not whole: {}", problem.words));

  VerifyReport unused;
  inspect::Verification ignored(unused);
  std::vector<std::string> names;
  for (std::string& name : files_in(path))
    if (is_weight_name(name)) names.push_back(std::move(name));
  const std::vector<inspect::OpenedFile> files = ignored.open_all(path, names);
  Checksums checksums;
  for (const inspect::Summed& summed : inspect::sum_all(inspect::find_places(files, ignored), progress)) {
    if (!summed.failure.empty()) throw Error(ErrorKind::io, summed.failure, {.path = path});
    checksums.emplace(summed.name, summed.checksum);
  }
  write_checksums(path, checksums);
  return checksums.size();
}

}  // namespace muster
