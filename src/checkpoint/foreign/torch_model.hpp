// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weights as torch.save writes them: one file, or the files of a model.

#include <functional>
#include <memory>
#include <string>

#include "src/checkpoint/foreign/checkpoint.hpp"
#include "src/checkpoint/foreign/torch_archive.hpp"

namespace muster::foreign {

/// Runs work with what torch.save wrote; what it throws names the file.
TorchArchive open_torch_file(const os::ReadableFile& file);
/// Adds a tensor that lies in one file.
void add_torch_tensor(PartedTensors& tensors, std::uint32_t file, const TorchArchive& archive, const std::string& name,
                      Pickle::Ref ref);

/// Whether a file begins as those of torch.save do.
bool is_torch_file(const std::string& path);
/// Adds all weights of a file, and what is left out of it as omissions; each name is given to `work` before, and the
/// file to `check`, if there is one.
void add_torch_file(PartedTensors& tensors, const std::string& path, const Choice& choice,
                    const std::function<void(const std::string&)>& work,
                    const std::function<void(const TorchArchive&)>& check = {});

std::shared_ptr<const PartedTensors> open_torch(const Found& found, const Choice& choice);
/// `found.files`: empty if an index names them.
std::shared_ptr<const PartedTensors> open_torch_model(const Found& found, const Choice& choice,
                                                      std::vector<std::string>& notes);

}  // namespace muster::foreign
