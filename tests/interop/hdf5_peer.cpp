// SPDX-License-Identifier: Apache-2.0
// Muster's side of hdf5_peers.py and of the hostile gallery.
//   hdf5_peer list FILE                 JSON: tensors, metadata, issues, and the cost of the listing
//   hdf5_peer dump FILE FOLDER PIECE... all bytes of the N-th tensor in FOLDER/N.PIECE, read in pieces of PIECE bytes
//   hdf5_peer make FILE [LEVEL]         a state file: tensors of every dtype, compressed by zstd if LEVEL is given
//   hdf5_peer open FILE                 opens and checks a state file

#include <fmt/core.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "muster/state_file.hpp"
#include "src/checkpoint/thirdparty/hdf5/file.hpp"

using namespace muster;

namespace {

std::uint64_t peak_bytes() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  return static_cast<std::uint64_t>(used.ru_maxrss) * 1024;
}

void list(const std::string& path) {
  const auto file = ForeignHdf5::open(path);
  const std::uint64_t peak = peak_bytes();
  nlohmann::json tensors = nlohmann::json::array();
  for (std::size_t i = 0; i < file->tensors().size(); ++i) {
    const TensorEntry& tensor = file->tensors()[i];
    tensors.push_back({{"name", tensor.name},
                       {"dtype", std::string(to_string(tensor.dtype))},
                       {"shape", tensor.shape},
                       {"bytes", tensor.bytes},
                       {"stored", file->detail(i).stored_bytes}});
  }
  nlohmann::json issues = nlohmann::json::array();
  for (const Omission& issue : file->omissions()) issues.push_back({{"path", issue.name}, {"words", issue.reason}});
  const ForeignListingCost& cost = file->cost();
  const nlohmann::json all = {{"tensors", tensors},
                              {"metadata", file->metadata()},
                              {"issues", issues},
                              {"seconds", static_cast<double>(cost.wall.count()) / 1e6},
                              {"reader_peak", cost.reader_peak_bytes},
                              {"peak", peak},
                              {"seccomp", cost.seccomp}};
  std::puts(all.dump().c_str());
}

void dump(const ForeignHdf5& file, std::size_t tensor, const std::string& to, std::uint64_t piece) {
  std::FILE* out = std::fopen(to.c_str(), "wb");
  if (out == nullptr) throw Error(ErrorKind::io, "cannot write " + to);
  const std::uint64_t bytes = file.tensors()[tensor].bytes;
  std::vector<std::byte> memory;
  for (std::uint64_t at = 0; at < bytes; at += piece) {
    const auto part = file.read_piece(tensor, at, std::min(piece, bytes - at), memory);
    std::fwrite(part.data(), 1, part.size(), out);
  }
  std::fclose(out);
}

/// For each dtype, one tensor that has every byte value at every position, or every pattern of 16 bits; and special
/// cases. hdf5_peers.py uses the same names.
void make(const std::string& path, std::optional<int> level) {
  std::vector<NamedTensor> weights;
  const auto add = [&weights](const std::string& name, DType dtype, const Shape& shape) {
    Tensor tensor = Tensor::allocate(dtype, shape);
    for (std::size_t i = 0; i < tensor.nbytes(); ++i) {
      std::size_t value = itemsize(dtype) == 2 ? (i % 2 == 0 ? i / 2 : i / 512) : i + i / 256 * 7;
      if (dtype == DType::boolean) value %= 2;
      tensor.mutable_data()[i] = static_cast<std::byte>(value & 0xffU);
    }
    weights.push_back({name, std::move(tensor)});
  };
  for (const DType dtype : all_dtypes()) {
    const std::string name(to_string(dtype));
    add(name, dtype, itemsize(dtype) == 2 ? Shape{256, 256} : Shape{7, 11});
    add(name + ".scalar", dtype, {});
    add(name + ".empty", dtype, {0, 5});
  }
  add("model.layers.0.weight", DType::f32, {300, 1000});
  add("a/b", DType::u8, {3});
  add("100%", DType::u8, {3});
  add("..", DType::u8, {3});
  add("\u00fc \"quoted\"\n", DType::u8, {3});
  write_state_file(path, parse_json(R"({"hidden": 64, "name": "\u00fc"})"), weights, {.zstd_level = level});
}

void open_state(const std::string& path) {
  const StateFile file = StateFile::open(path);
  const std::vector<StateProblem> problems = file.check();
  for (const StateProblem& problem : problems)
    std::fprintf(stderr, "%s: %s\n", problem.tensor.c_str(), problem.words.c_str());
  if (!problems.empty()) throw Error(ErrorKind::corrupt, "the state file has problems");
  std::printf("%zu tensors\n", file.tensors().size());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view command = argc > 1 ? argv[1] : "";
  try {
    if (command == "list" && argc == 3) {
      list(argv[2]);
    } else if (command == "dump" && argc > 4) {
      for (int i = 4; i < argc; ++i) {
        const auto file = ForeignHdf5::open(argv[2]);
        for (std::size_t tensor = 0; tensor < file->tensors().size(); ++tensor)
          dump(*file, tensor, fmt::format("{}/{}.{}", argv[3], tensor, argv[i]), std::strtoull(argv[i], nullptr, 10));
      }
    } else if (command == "make" && (argc == 3 || argc == 4)) {
      make(argv[2], argc == 4 ? std::optional<int>(std::atoi(argv[3])) : std::nullopt);
    } else if (command == "open" && argc == 3) {
      open_state(argv[2]);
    } else {
      return 2;
    }
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s: %s [%.0f bytes]\n", std::string(to_string(error.kind())).c_str(), error.what(),
                 static_cast<double>(peak_bytes()));
    return 2;
  }
}
