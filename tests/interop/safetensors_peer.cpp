// SPDX-License-Identifier: Apache-2.0
// Muster's side of safetensors_peers.py.
//   safetensors_peer copy IN OUT   reads a file and writes its tensors and metadata to another one
//   safetensors_peer make OUT      one tensor [2, 3] of each dtype, named after it, with bytes 0, 1, 2 ..., and special
//   cases

#include <cstdio>
#include <string_view>

#include "muster/error.hpp"
#include "muster/safetensors.hpp"

using namespace muster;

namespace {

void copy(const std::string& from, const std::string& to) {
  const SafetensorsFile file = SafetensorsFile::open(from);
  SafetensorsWriter writer(to, file.tensors(), file.metadata());
  for (std::size_t i = 0; i < file.tensors().size(); ++i) writer.write(file.tensors()[i].name, file.tensor(i));
  writer.commit();
}

void make(const std::string& to) {
  std::vector<TensorEntry> specs = {{.name = "scalar", .dtype = DType::f32, .shape = {}},
                                    {.name = "empty", .dtype = DType::f16, .shape = {0, 5}},
                                    {.name = "\u00fc \"quoted\"\n", .dtype = DType::u8, .shape = {1}}};
  for (const DType dtype : all_dtypes())
    specs.push_back({.name = std::string(to_string(dtype)), .dtype = dtype, .shape = {2, 3}});
  SafetensorsWriter writer(to, specs, {{"format", "pt"}});
  for (const TensorEntry& spec : specs) {
    Tensor tensor = Tensor::allocate(spec.dtype, spec.shape);
    for (std::size_t i = 0; i < tensor.nbytes(); ++i)
      tensor.mutable_data()[i] = static_cast<std::byte>(spec.dtype == DType::boolean ? i % 2 : i);
    writer.write(spec.name, tensor);
  }
  writer.commit();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view command = argc > 1 ? argv[1] : "";
  try {
    if (command == "copy" && argc == 4)
      copy(argv[2], argv[3]);
    else if (command == "make" && argc == 3)
      make(argv[2]);
    else
      return 2;
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
