// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weights in files of torch.save: one file, or the files of a model.

#include <functional>
#include <memory>
#include <string>

#include "src/checkpoint/thirdparty/checkpoint.hpp"
#include "src/checkpoint/thirdparty/torch_archive.hpp"

namespace muster::thirdparty {

/// Opens a file of torch.save; errors name the file.
TorchArchive open_torch_file(const os::ReadableFile& file);
/// Adds a tensor that is stored in one file.
void add_torch_tensor(PartedTensors& tensors, std::uint32_t file, const TorchArchive& archive, const std::string& name,
                      Pickle::Ref ref);

/// Whether the first bytes of a file are those of torch.save.
bool is_torch_file(const std::string& path);
/// Adds all weights of a file, and the data that is left out as omissions. Each name is passed to `work` first, and the
/// file to `check`, if given.
void add_torch_file(PartedTensors& tensors, const std::string& path, const Choice& choice,
                    const std::function<void(const std::string&)>& work,
                    const std::function<void(const TorchArchive&)>& check = {});

std::shared_ptr<const PartedTensors> open_torch(const FoundCheckpoint& found, const Choice& choice);
/// `found.files` is empty if an index names the files.
std::shared_ptr<const PartedTensors> open_torch_model(const FoundCheckpoint& found, const Choice& choice,
                                                      std::vector<std::string>& notes);

}  // namespace muster::thirdparty
