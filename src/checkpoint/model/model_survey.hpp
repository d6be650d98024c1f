// SPDX-License-Identifier: Apache-2.0
#pragma once
// The survey of a model's directory determines which files form the model, which tensors they contain, which files are
// left out, and all defects. It reads only the names in the directory, the index and the headers. `muster verify` lists
// the findings. Every reader throws the first finding that has Severity::refused, and reports the findings with
// Severity::flaw as notes. So all commands agree about a directory.
//
//  1. choose_files(): the index, if it exists, names the files. Otherwise the model is model.safetensors, or the only
//     numbered set, or the only file. A numbered set must be complete. No other file may claim to be the same model.
//  2. survey_model() reads the headers of these files, and no others.
//  3. check_tensors(): the index and the headers must agree about every tensor. No two files may have a tensor of the
//     same name.

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
#include "src/checkpoint/model/model_files.hpp"

namespace muster {

enum class Severity : std::uint8_t {
  refused,  ///< a part of the model is missing or ambiguous: every reader throws
  flaw,     ///< all tensors can be read, but other programs may fail: readers report it
};

struct Finding {
  Severity severity = Severity::refused;
  ErrorKind kind = ErrorKind::corrupt;  ///< kind of the error that a reader throws
  VerifyProblem problem;                ///< `message` names the object, the failure and the remedy
};
using Findings = std::vector<Finding>;

/// Throws the first finding with Severity::refused. Its message has the number of the other ones.
void refuse_findings(const Findings& findings, const std::string& directory);
/// Returns the messages of the findings with Severity::flaw, for the notes of a report.
std::vector<std::string> notes_of(const Findings& findings);

/// The file names of one format.
struct ModelNaming {
  std::string_view single;  ///< "model.safetensors"
  std::string_view ending;  ///< ".safetensors"; the name of an index ends with ".safetensors.index.json"
  std::string_view format;  ///< for messages
};
inline constexpr ModelNaming safetensors_naming{"model.safetensors", ".safetensors", "safetensors"};
inline constexpr ModelNaming torch_naming{"pytorch_model.bin", ".bin", "torch"};

/// A safetensors file that is open.
struct SurveyedFile {
  std::string name;  ///< relative to the directory
  SafetensorsFile file;
};

/// The weight_map of an index: pairs of a tensor's name and the name of its file, which is in the same directory.
using WeightMap = std::vector<std::pair<std::string, std::string>>;

struct ModelSurvey {
  std::string directory;
  std::string index = {};                 ///< name of the index; empty: the directory has none
  WeightMap weights = {};                 ///< weight_map of the index
  std::optional<double> total_size = {};  ///< total_size of the index
  std::vector<std::string> names = {};    ///< names of the model's files, sorted
  std::vector<SurveyedFile> files = {};   ///< the model's files that could be opened
  Omissions left_out = {};                ///< weights in the directory that belong to other models
  Findings findings = {};

  void add(Severity severity, ErrorKind kind, Defect defect, std::string_view file, std::string_view tensor,
           std::string words);
  [[nodiscard]] bool is_refused() const noexcept;
};

/// Runs step 1. `listing` has the names of all files in the directory (files_in).
ModelSurvey choose_files(const std::string& directory, const std::vector<std::string>& listing,
                         const ModelNaming& naming = safetensors_naming);

/// The tensors in the headers of the model's files.
struct TensorPlaces {
  std::set<std::string, std::less<>> files = {};                     ///< files whose headers were read
  std::unordered_map<std::string, std::string> file_of_tensor = {};  ///< a tensor's name to its file's name
  std::uint64_t bytes = 0;                                           ///< total size of all tensors; 0 if unknown
  std::vector<std::uint64_t> tied = {};                              ///< sizes of tensors that models often tie

  /// Adds a tensor, and a finding if its name is already known.
  void add(ModelSurvey& survey, const std::string& tensor, const std::string& file, std::uint64_t size);
};

/// Runs step 3.
void check_tensors(ModelSurvey& survey, const TensorPlaces& places);

/// Runs all steps. Every defect of the files becomes a finding. Throws Error(io) if the limit of open files is too low
/// for the number of files.
ModelSurvey survey_model(const std::string& directory, const std::vector<std::string>& listing);

/// The number of descriptors that a process needs in addition to those of a model's files.
inline constexpr std::uint64_t descriptors_beside_files = 256;
/// Throws Error(io) with the remedy if `failure` is a lack of descriptors. That is not a defect of the file.
void refuse_lack_of_descriptors(const Error& failure, const std::string& directory, std::size_t files);

/// The survey of a directory with rank-00000-of-0000N.safetensors.
struct ShardSurvey {
  int ranks = 0;                        ///< 0: the directory has no shards
  std::vector<std::string> names = {};  ///< files of the shards
  Findings findings = {};
};
ShardSurvey survey_shards(const std::vector<std::string>& listing);

}  // namespace muster
