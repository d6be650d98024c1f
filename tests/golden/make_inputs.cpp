// SPDX-License-Identifier: Apache-2.0
// Makes the inputs of the golden outputs, with the same bytes every time: a model, state files, and workspaces.

#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "muster/model_dir.hpp"
#include "muster/safetensors.hpp"
#include "muster/state.hpp"
#include "muster/state_file.hpp"
#include "src/os/process.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/names.hpp"
#include "tests/support/checkpoints.hpp"

namespace {

using namespace muster;
using test::read_text;
using test::write_tensors;
using test::write_text;

template <class T>
Tensor tensor_of(DType dtype, Shape shape, const std::vector<T>& values) {
  Tensor tensor = Tensor::allocate(dtype, std::move(shape));
  if (!values.empty()) std::memcpy(tensor.mutable_data(), values.data(), tensor.nbytes());
  return tensor;
}

/// Returns multiples of one half between -8 and 8, in a scattered order. Every float from bf16 on represents them
/// exactly.
float value_at(std::uint32_t index) {
  std::uint32_t word = index * 2654435761U;
  word ^= word >> 15;
  return static_cast<float>(static_cast<int>(word % 33) - 16) / 2;
}

Tensor floats(Shape shape, std::uint32_t seed = 0) {
  std::vector<float> values(static_cast<std::size_t>(element_count(shape)));
  for (std::uint32_t i = 0; i < values.size(); ++i) values[i] = value_at(i + seed);
  return tensor_of(DType::f32, std::move(shape), values);
}

Tensor bfloats(Shape shape, std::uint32_t seed = 0) {
  std::vector<std::uint16_t> values(static_cast<std::size_t>(element_count(shape)));
  for (std::uint32_t i = 0; i < values.size(); ++i) {
    const float value = value_at(i + seed);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    values[i] = static_cast<std::uint16_t>(bits >> 16);
  }
  return tensor_of(DType::bf16, std::move(shape), values);
}

std::vector<NamedTensor> layers(std::uint32_t seed) {
  std::vector<NamedTensor> tensors;
  tensors.emplace_back("embed.weight", bfloats({32, 16}, seed));
  for (int layer = 0; layer < 3; ++layer) {
    const std::string before = "layers." + std::to_string(layer) + ".";
    const auto own = seed + static_cast<std::uint32_t>(layer) * 1000;
    tensors.emplace_back(before + "attention.query.weight", bfloats({16, 16}, own));
    tensors.emplace_back(before + "attention.output.weight", bfloats({16, 16}, own + 300));
    tensors.emplace_back(before + "norm.weight", floats({16}, own + 600));
  }
  return tensors;
}

std::vector<NamedTensor> all_kinds() {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float infinity = std::numeric_limits<float>::infinity();
  std::vector<NamedTensor> tensors = layers(0);
  tensors.emplace_back("amax", tensor_of<float>(DType::f32, {}, {2.5F}));
  tensors.emplace_back("bits", tensor_of<std::uint8_t>(DType::boolean, {3}, {1, 0, 1}));
  tensors.emplace_back("codes", tensor_of<std::uint8_t>(DType::u4, {5}, {0x10, 0x32, 0x0f}));
  tensors.emplace_back("counts", tensor_of<std::int64_t>(DType::i64, {2, 2}, {-1, 0, 1, std::int64_t{1} << 62}));
  tensors.emplace_back("empty", tensor_of<float>(DType::f32, {0, 4}, {}));
  tensors.emplace_back("odd", tensor_of<float>(DType::f32, {6}, {nan, infinity, -infinity, 0, -0.0F, 1e-7F}));
  tensors.emplace_back("rotation", tensor_of<float>(DType::complex64, {2}, {0.5F, -1, 2, 0.25F}));
  return tensors;
}

Config config(int hidden) {
  return Config::object({{"quantization", Config::object({{"algorithm", "FP8"}, {"group_size", 16}})},
                         {"layers", Config::array({Config::object({{"hidden_size", hidden}, {"bias", false}}),
                                                   Config::object({{"hidden_size", 16}, {"bias", true}})})},
                         {"scale", 0.125}});
}

Group::Nonce nonce_of(unsigned char first) {
  Group::Nonce nonce{};
  for (std::size_t i = 0; i < nonce.size(); ++i) nonce[i] = static_cast<std::byte>(first + i);
  return nonce;
}

void write_state(const std::string& workspace, const StateFileInfo& info, const std::vector<NamedTensor>& tensors) {
  const std::string name = workspace::file_name({.kind = workspace::NameKind::state,
                                                 .job = workspace::job_text(info.job),
                                                 .rank = info.rank,
                                                 .world_size = info.world_size,
                                                 .step = info.step});
  write_state_file(workspace + "/" + name, config(16), tensors, {.info = info});
}

void make(const std::string& work) {
  namespace fs = std::filesystem;
  fs::create_directories(work + "/model");
  const std::vector<NamedTensor> tensors = layers(0);
  write_tensors(work + "/model/model.safetensors", tensors, {{"format", "pt"}});
  write_text(work + "/model/config.json", to_json(Config::object({{"hidden_size", 16}, {"layers", 3}}), 2) + "\n");

  write_text(work + "/plan.json", R"({
  "muster_plan": 1,
  "rules": [
    {"match": "{embed,layers.*.query}.weight", "action": "concat", "dim": 0, "trim": "hidden_size"},
    {"match": "layers.*.norm.*", "action": "same"},
    {"match": "layers.*.mlp.*", "action": "same"}
  ]
}
)");

  const StateFileInfo info{nonce_of(0x10), 3, 1, 2};
  write_state_file(work + "/state.h5", config(16), all_kinds(), {.info = info});
  std::vector<NamedTensor> other = all_kinds();
  other.front().second = bfloats({32, 16}, 7);
  other.pop_back();
  write_state_file(work + "/other.h5", config(32), other, {.info = info});
  write_state_file(work + "/compressed.h5", config(16), {{{"zeros", Tensor::copy_of(floats({4096}))}}},
                   {.info = info, .zstd_level = 1});
  write_state_file(work + "/hostile.h5", Config(),
                   {{{"red\x1b[31m", floats({2})},
                     {"a/../b", floats({2}, 5)},
                     {"line\nbreak", floats({2}, 9)},
                     {"\u202etfel", floats({2})}}},
                   {.info = info});
  std::string bytes = read_text(work + "/state.h5");
  write_text(work + "/torn.h5", bytes.substr(0, bytes.size() / 2));
  // Flips one bit of one tensor.
  bytes[StateFile::open(work + "/state.h5").tensors().front().offset + 20] ^= 1;
  write_text(work + "/changed.h5", bytes);

  const std::string shared = work + "/shared";
  workspace::prepare_workspace(shared);
  for (const std::uint64_t generation : {1U, 2U})
    for (const int rank : {0, 1})
      write_state(shared, {nonce_of(0x10), generation, rank, 2}, layers(static_cast<std::uint32_t>(rank)));
  write_state(shared, {nonce_of(0x10), 3, 0, 2}, layers(9));
  const std::string torn = workspace::file_name({.kind = workspace::NameKind::state,
                                                 .job = workspace::job_text(nonce_of(0x10)),
                                                 .rank = 1,
                                                 .world_size = 2,
                                                 .step = 3});
  fs::copy_file(work + "/torn.h5", shared + "/" + torn);
  const std::string growing =
      workspace::file_name({.kind = workspace::NameKind::growing,
                            .random = "0123456789abcdef",
                            .writer = os::ProcessIdentity{"elsewhere", "0123456789abcdef", 77, 12345, 4026531836}});
  write_text(shared + "/" + growing, "unfinished");
  write_text(shared + "/notes.txt", "not ours\n");

  const std::string jobs = work + "/jobs";
  workspace::prepare_workspace(jobs);
  write_state(jobs, {nonce_of(0x10), 1, 0, 1}, layers(0));
  write_state(jobs, {nonce_of(0x30), 1, 0, 1}, layers(4));

  const std::string newer = work + "/newer";
  workspace::prepare_workspace(newer);
  for (const fs::directory_entry& entry : fs::directory_iterator(newer)) {
    std::string text = read_text(entry.path());
    const std::size_t version = text.find_first_of("123456789", text.find(':'));
    text.replace(version, 1, "999");
    write_text(entry.path().string(), text);
  }
  fs::create_directories(work + "/plain");
  write_text(work + "/plain/readme.txt", "nothing here\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_inputs DIRECTORY\n");
    return 2;
  }
  try {
    make(argv[1]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "make_inputs: %s\n", error.what());
    return 1;
  }
}
