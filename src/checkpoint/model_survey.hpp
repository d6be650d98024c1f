// SPDX-License-Identifier: Apache-2.0
#pragma once
// The one survey of a model's directory: which files are the model, which tensors they have, which files are left out,
// and everything that is wrong. It depends on nothing but the names in the directory, the index and the headers.
// `muster verify` lists the findings; every reader throws the first one that has Severity::refused, and reports the
// others as notes. So all commands agree about a directory.
//
//  1. choose_files(): the index, if there is one, names the files. Without an index it is model.safetensors, or the one
//     numbered set, or the one file. A numbered set must be complete. No other file may claim to be the same model.
//  2. survey_model() reads the headers of these files, and no others.
//  3. check_tensors(): index and headers must agree about every tensor, and no name may be in two files.

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/omission.hpp"
#include "muster/safetensors.hpp"
#include "muster/verify.hpp"
#include "src/checkpoint/model_files.hpp"

namespace muster {

enum class Severity : std::uint8_t {
  refused,  ///< a part of the model is missing or ambiguous: no reader takes it
  flaw,     ///< all tensors can be read, and other programs may fail: readers report it
};

struct Finding {
  Severity severity = Severity::refused;
  ErrorKind kind = ErrorKind::corrupt;  ///< that a reader throws
  VerifyProblem problem;                ///< `words` name the object, the failure and the remedy
};
using Findings = std::vector<Finding>;

/// Throws the first finding that is refused, with the number of the others.
void refuse_findings(const Findings& findings, const std::string& directory);
/// Returns the messages of the other findings, for the notes of a report.
std::vector<std::string> notes_of(const Findings& findings);

/// The names of a model's files in one format.
struct ModelNaming {
  std::string_view single;  ///< "model.safetensors"
  std::string_view ending;  ///< ".safetensors"; an index has ".index.json" behind it
  std::string_view format;  ///< for messages
};
inline constexpr ModelNaming safetensors_naming{"model.safetensors", ".safetensors", "safetensors"};
inline constexpr ModelNaming torch_naming{"pytorch_model.bin", ".bin", "torch"};

/// A safetensors file that could be opened.
struct OpenedFile {
  std::string name;  ///< in the directory
  SafetensorsFile file;
};

/// The weight_map of an index: names of tensors, and of files beside it.
using WeightMap = std::vector<std::pair<std::string, std::string>>;

struct ModelSurvey {
  std::string directory;
  std::string index = {};                 ///< its name; empty if there is none
  WeightMap weights = {};                 ///< of the index
  std::optional<double> total_size = {};  ///< likewise
  std::vector<std::string> names = {};    ///< names of the files that are the model, sorted
  std::vector<OpenedFile> files = {};     ///< those of them that could be opened
  Omissions left_out = {};                ///< weights in the directory that belong to other models
  Findings findings = {};

  void add(Severity severity, ErrorKind kind, Defect defect, std::string_view file, std::string_view tensor,
           std::string words);
  [[nodiscard]] bool is_refused() const noexcept;
};

/// Step 1. `listing`: the names of all files of the directory (files_in).
ModelSurvey choose_files(const std::string& directory, const std::vector<std::string>& listing,
                         const ModelNaming& naming = safetensors_naming);

/// The tensors of the files that could be read.
struct TensorPlaces {
  std::set<std::string, std::less<>> files = {};                     ///< that were read
  std::unordered_map<std::string, std::string> file_of_tensor = {};  ///< names
  std::uint64_t bytes = 0;               ///< the size of all tensors together; 0 if it is not known
  std::vector<std::uint64_t> tied = {};  ///< bytes of those that models tie

  /// Adds a finding if another file has the name, too.
  void add(ModelSurvey& survey, const std::string& tensor, const std::string& file, std::uint64_t size);
};

/// Step 3.
void check_tensors(ModelSurvey& survey, const TensorPlaces& places);

/// All steps. Throws Error(io) if this process may not open so many files; every defect of the files is a finding.
ModelSurvey survey_model(const std::string& directory, const std::vector<std::string>& listing);

/// Descriptors of a process beside those of a model's files.
inline constexpr std::uint64_t descriptors_beside_files = 256;
/// Throws Error(io) with the remedy if `failure` is a lack of descriptors, which is not a defect of the file.
void refuse_lack_of_descriptors(const Error& failure, const std::string& directory, std::size_t files);

/// The survey of a directory with rank-00000-of-0000N.safetensors.
struct ShardSurvey {
  int ranks = 0;                        ///< 0: it has no shards
  std::vector<std::string> names = {};  ///< the files of the shards
  Findings findings = {};
};
ShardSurvey survey_shards(const std::vector<std::string>& listing);

}  // namespace muster
