// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/foreign/torch_model.hpp"

#include <fmt/core.h>

#include <filesystem>
#include <unordered_set>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/model_survey.hpp"
#include "src/formats/file_kind.hpp"
#include "src/os/process.hpp"

namespace muster::foreign {
TorchArchive open_torch_file(const os::ReadableFile& file) {
  return with_file("reading", file.path(), [&] { return TorchArchive::open(file); });
}

void add_torch_tensor(PartedTensors& tensors, std::uint32_t file, const TorchArchive& archive, const std::string& name,
                      Pickle::Ref ref) {
  try {
    const TorchTensor tensor = archive.tensor(ref);
    tensors.add_tensor(name, tensor.dtype, tensor.shape);
    const Shape extents = box_extents(tensor.shape);
    tensors.add_box(Shape(extents.size(), 0), extents, tensor.place_in(file));
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("tensor {}: {}", in_quotes(name), error.what()));
  }
}

bool is_torch_file(const std::string& path) {
  const formats::FileKind kind = formats::kind_of_file(os::ReadableFile::open(path));
  return kind == formats::FileKind::zip || kind == formats::FileKind::torch_legacy;
}

void add_torch_file(PartedTensors& tensors, const std::string& path, const Choice& choice,
                    const std::function<void(const std::string&)>& work,
                    const std::function<void(const TorchArchive&)>& check) {
  with_file("reading", path, [&] {
    const std::uint32_t file = tensors.add_file(path);
    const TorchArchive archive = open_torch_file(tensors.file(file));
    if (check) check(archive);
    const TensorWork add = [&](const std::string& name, Pickle::Ref ref) {
      work(name);
      add_torch_tensor(tensors, file, archive, name, ref);
    };
    Omissions left_out;
    for_each_tensor(archive, find_weights(archive, choice.at), add, &left_out);
    for (Omission& left : left_out) tensors.add_omission(std::move(left));
  });
}

std::shared_ptr<const PartedTensors> open_torch(const Found& found, const Choice& choice) {
  auto tensors = std::make_shared<PartedTensors>();
  std::unordered_set<std::string> names;
  add_torch_file(*tensors, found.path, choice, [&](const std::string& name) {
    // A key with a dot may have the same name as a key in a nested dict.
    if (!names.insert(name).second)
      throw Error(ErrorKind::corrupt, fmt::format("two tensors have the name {}", in_quotes(name)));
  });
  tensors->finish();
  return tensors;
}

std::shared_ptr<const PartedTensors> open_torch_model(const Found& found, const Choice& choice,
                                                      std::vector<std::string>& notes) {
  auto tensors = std::make_shared<PartedTensors>();
  ModelSurvey survey = choose_files(found.path, found.files, torch_naming);
  refuse_findings(survey.findings, found.path);
  os::allow_open_files(survey.names.size() + 256);
  TensorPlaces places;
  for (const std::string& name : survey.names) {
    places.files.insert(name);
    add_torch_file(*tensors, join_path(found.path, name), choice,
                   [&](const std::string& tensor) { places.add(survey, tensor, name, 0); });
    refuse_findings(survey.findings, found.path);
  }
  check_tensors(survey, places);
  refuse_findings(survey.findings, found.path);
  for (Omission& left : survey.left_out) tensors->add_omission(std::move(left));
  for (std::string& note : notes_of(survey.findings)) notes.push_back(std::move(note));
  tensors->finish();
  return tensors;
}

}  // namespace muster::foreign
