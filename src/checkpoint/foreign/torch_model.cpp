// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/foreign/torch_model.hpp"

#include <fmt/core.h>

#include <filesystem>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model_files.hpp"
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
                    std::vector<std::string>& notes, const std::function<void(const std::string&)>& work) {
  with_file("reading", path, [&] {
    const std::uint32_t file = tensors.add_file(path);
    const TorchArchive archive = open_torch_file(tensors.file(file));
    const TensorWork add = [&](const std::string& name, Pickle::Ref ref) {
      work(name);
      add_torch_tensor(tensors, file, archive, name, ref);
    };
    for_each_tensor(archive, find_weights(archive, choice.at), add, &notes);
  });
}

std::shared_ptr<const PartedTensors> open_torch(const Found& found, const Choice& choice,
                                                std::vector<std::string>& notes) {
  auto tensors = std::make_shared<PartedTensors>();
  std::unordered_set<std::string> names;
  add_torch_file(*tensors, found.path, choice, notes, [&](const std::string& name) {
    // A key with a dot beside a dict in a dict.
    if (!names.insert(name).second)
      throw Error(ErrorKind::corrupt, fmt::format("two tensors have the name {}", in_quotes(name)));
  });
  tensors->finish();
  return tensors;
}

std::shared_ptr<const PartedTensors> open_torch_model(const Found& found, const Choice& choice,
                                                      std::vector<std::string>& notes) {
  auto tensors = std::make_shared<PartedTensors>();
  WeightMap weights;
  std::set<std::string> files(found.files.begin(), found.files.end());
  const std::string index = join_path(found.path, std::string(torch_index_name));
  if (found.files.empty()) {
    weights = read_weight_map(index);
    for (const auto& [tensor, file] : weights) files.insert(file);
  }
  os::allow_open_files(files.size() + 256);
  std::unordered_map<std::string, std::string> in_file;
  for (const std::string& name : files)
    add_torch_file(*tensors, join_path(found.path, name), choice, notes, [&](const std::string& tensor) {
      const auto [other, is_new] = in_file.try_emplace(tensor, name);
      if (!is_new)
        throw Error(ErrorKind::corrupt, fmt::format("tensor {} is there twice, in {} and in {}", in_quotes(tensor),
                                                    in_quotes(other->second), in_quotes(name)));
    });
  const auto refuse = [&](const std::string& words) {
    throw file_error(ErrorKind::corrupt, "reading the index", index, words);
  };
  for (const auto& [tensor, file] : weights)
    if (const auto there = in_file.find(tensor); there == in_file.end() || there->second != file)
      refuse(fmt::format("it puts tensor {} into {}, which does not have it", in_quotes(tensor), in_quotes(file)));
  if (found.files.empty() && in_file.size() != weights.size())
    refuse(fmt::format("it has {} tensors, and its files have {}", weights.size(), in_file.size()));
  tensors->finish();
  return tensors;
}

}  // namespace muster::foreign
