// SPDX-License-Identifier: Apache-2.0
// Checkpoints written by other software (tests/interop/foreign_samples.py). Each tensor must equal, bit for bit, the
// whole tensor of that software. MUSTER_TEST_SAMPLES names further ones.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "muster/safetensors.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"
#include "tests/support/torch_files.hpp"

using namespace muster;
using namespace muster::test;

namespace {

namespace fs = std::filesystem;

std::vector<std::byte> read(const TensorSource& source, std::size_t tensor, std::uint64_t piece) {
  const std::uint64_t bytes = source.tensors()[tensor].bytes;
  std::vector<std::byte> out(bytes);
  for (std::uint64_t at = 0; at < bytes; at += piece)
    source.read(tensor, at, std::span(out).subspan(at, std::min(piece, bytes - at)));
  return out;
}

void check_sample(const fs::path& sample) {
  CAPTURE(sample.string());
  std::vector<std::string> notes;
  const auto found = thirdparty::find_checkpoint((sample / "in").string());
  REQUIRE(found.has_value());
  const auto tensors = open_checkpoint(*found, 0, {}, notes);
  const SafetensorsFile expected = SafetensorsFile::open((sample / "expected.safetensors").string());
  CHECK(tensors->tensors().size() == expected.tensors().size());
  for (std::size_t i = 0; i < expected.tensors().size(); ++i) {
    const TensorEntry& entry = expected.tensors()[i];
    CAPTURE(entry.name);
    const auto place = tensors->find(entry.name);
    REQUIRE(place.has_value());
    CHECK(tensors->tensors()[*place].dtype == entry.dtype);
    CHECK(tensors->tensors()[*place].shape == entry.shape);
    std::vector<std::byte> bytes(entry.bytes);
    expected.read(i, 0, bytes);
    // Reads the tensor whole, and in pieces with arbitrary ends.
    for (const std::uint64_t piece : {std::uint64_t{1} << 30, std::uint64_t{13}, std::uint64_t{8}})
      CHECK(read(*tensors, *place, piece) == bytes);
  }
}

using Change = std::function<void(std::string& pickle)>;

/// Replaces every occurrence by a text of the same length.
Change replaced(const std::string& from, const std::string& to) {
  return [=](std::string& pickle) {
    REQUIRE(from.size() == to.size());
    REQUIRE(pickle.find(from) != std::string::npos);
    for (std::size_t at = 0; (at = pickle.find(from, at)) != std::string::npos; at += to.size())
      pickle.replace(at, to.size(), to);
  };
}

/// Exchanges the two placements of the first tensor.
void turn_placements(std::string& pickle) {
  const std::size_t first = pickle.find(pickled::global("torch.distributed.tensor.placement_types", "_StridedShard"));
  const std::size_t second = pickle.find(pickled::global("torch.distributed.tensor.placement_types", "Shard"));
  const std::size_t end = pickle.find("b\x86", second);
  REQUIRE((first < second && end != std::string::npos));
  const auto at = [&](std::size_t place) { return pickle.begin() + static_cast<std::ptrdiff_t>(place); };
  std::rotate(at(first), at(second), at(end + 1));
}

/// In a file of torch.save the pickle is the first entry, with a checksum; a .metadata file is only the pickle.
void change_file(const fs::path& path, const Change& change) {
  std::string bytes = read_text(path);
  const auto number = [&](std::size_t at, std::size_t size) {
    std::uint32_t value = 0;
    std::memcpy(&value, bytes.data() + at, size);
    return value;
  };
  if (!bytes.starts_with("PK")) {
    change(bytes);
  } else {
    const std::size_t entry = bytes.find("PK\x01\x02");
    const std::size_t begin = 30 + number(26, 2) + number(28, 2);
    std::string pickle = bytes.substr(begin, number(entry + 20, 4));
    change(pickle);
    bytes.replace(begin, pickle.size(), pickle);
    bytes.replace(entry + 16, 4, pickled::bytes_of(formats::crc32(std::as_bytes(std::span(pickle)))));
  }
  write_text(path, bytes);
}

struct ChangedSample {
  std::string name;
  std::string sample;
  Change change;
  std::string words;
  ErrorKind kind = ErrorKind::unsupported;
};

std::vector<ChangedSample> changed_samples() {
  using pickled::text;
  const std::string axis("K\x02\x85q1");           // a tuple with the size 2
  const std::string in_order("K\0K\1K\2K\3t", 9);  // all ranks in order
  const std::string factor("split_factorqdK\2");   // split_factor of the first tensor
  const std::string dim = std::string("K\0", 2) + text("split_factor");
  const std::string older = "which Muster cannot read from this older PyTorch";
  const std::string other_order = "along 2 dimensions of a mesh, which do not have all ranks in ascending order";
  const std::string other_factor =
      "the split_factor of its _StridedShard contradicts the mesh, which Muster cannot read";
  return {
      {"a mesh without a layout", "fsdp_hsdp", replaced(text("_layout"), text("_l_yout")), older},
      {"a layout without axes", "fsdp_tp", replaced(text("axes"), text("ax_s")), older},
      {"no map of ranks", "fsdp_tp", replaced(text("_flatten_rank_map"), text("_flatten_r_nk_map")), older},
      {"ranks in another order", "fsdp_tp", replaced(in_order, std::string("K\0K\2K\1K\3t", 9)), other_order},
      {"ranks of another job", "fsdp_hsdp", replaced(in_order, "K\4K\5K\6K\7t"), other_order},
      {"a mesh of more ranks", "fsdp_tp", replaced(axis, "K\x04\x85q1"), other_order},
      {"a mesh of no ranks", "fsdp_tp", replaced(axis, std::string("K\0\x85q1", 5)), other_order},
      {"an axis of several", "fsdp_tp", replaced(axis, "K\x02K\x01\x86"),
       "some of which are nested, which Muster cannot read"},
      {"an odd split factor", "fsdp_tp", replaced(factor, "split_factorqdK\3"), other_factor},
      {"a split factor too large", "fsdp_tp", replaced(factor, "split_factorqdK\4"), other_factor},
      {"no split factor", "fsdp_tp", replaced("split_factor", "split_f_ctor"), "key \"split_factor\" does not exist",
       ErrorKind::corrupt},
      {"a dimension that is not there", "fsdp_tp", replaced(dim, "K\7" + text("split_factor")),
       "the dimension of its shards is out of range", ErrorKind::corrupt},
      {"_StridedShard after Shard", "fsdp_tp", turn_placements, "by Shard and then by _StridedShard"},
      {"another placement", "fsdp_hsdp", replaced("Replicate\n", "Scattered\n"),
       "unsupported placement \"torch.distributed.tensor.placement_types.Scattered\""},
      {"flattened_range in the model", "torch_dist", replaced("optimizer.state", "embedding.state"),
       "tensor \"embedding.state.exp_avg.output_layer.weight\": Megatron split it with flattened_range, which Muster "
       "cannot read"},
  };
}

}  // namespace

TEST_CASE("changed samples are refused by name") {
  for (const ChangedSample& one : changed_samples()) {
    CAPTURE(one.name);
    const TemporaryDirectory folder(Medium::memory);
    const fs::path in = folder / "in";
    fs::copy(fs::path(MUSTER_TEST_DATA) / "foreign" / one.sample / "in", in);
    const bool is_fsdp = one.sample.starts_with("fsdp");
    for (const std::string& name : names_in(in))
      if (is_fsdp || name == ".metadata") change_file(in / name, one.change);
    const std::string words = words_of(one.kind, [&] {
      std::vector<std::string> notes;
      open_checkpoint(*thirdparty::find_checkpoint(in), 0, {}, notes);
    });
    CHECK(has(words, one.words));
    CHECK(has(words, in.string() +
                         (is_fsdp ? "/model_world_size_4_rank_0.pt\": reading: tensor \"embed.weight\": " : "\": ")));
  }
}

TEST_CASE("less than two elements of padding per rank follow the parameters of DeepSpeed's stage 2") {
  // Each of two ranks has 30 elements. The parameters besides a.weight have 29.
  for (const auto& [shape, is_valid] : {std::pair("K\4K\7\x86", true), std::pair("K\3K\x09\x86", false)}) {
    const TemporaryDirectory folder(Medium::memory);
    fs::copy(fs::path(MUSTER_TEST_DATA) / "foreign/zero2/in", folder / "in", fs::copy_options::recursive);
    const fs::path step = folder / "in/global_step1";
    for (const std::string& name : names_in(step))
      change_file(step / name, name.starts_with("mp") ? replaced("q\x79K\5K\7\x86", std::string("q\x79") + shape)
                                                      : replaced("K\x20\x85", "K\x1e\x85"));
    std::vector<std::string> notes;
    const auto open = [&] { open_checkpoint(*thirdparty::find_checkpoint(folder / "in"), 0, {}, notes); };
    if (is_valid)
      CHECK_NOTHROW(open());
    else
      CHECK(has(words_of(ErrorKind::corrupt, open), "reading: group 0 has 56 elements, and the ranks have 60"));
  }
}

TEST_CASE("each sample has the tensors of the software that wrote it") {
  std::vector<fs::path> folders = {fs::path(MUSTER_TEST_DATA) / "foreign"};
  if (const char* more = std::getenv("MUSTER_TEST_SAMPLES")) folders.emplace_back(more);
  std::size_t count = 0;
  for (const fs::path& folder : folders)
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      check_sample(entry.path());
      ++count;
    }
  CHECK(count > 0);
}
