// SPDX-License-Identifier: Apache-2.0
#pragma once
// Makes a base and a chain of versions, as a publisher writes them, and knows the bytes of each version.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "muster/model_dir.hpp"
#include "muster/publish.hpp"
#include "muster/safetensors.hpp"
#include "muster/state.hpp"
#include "src/os/file.hpp"
#include "src/versions/chain.hpp"
#include "src/versions/delta_codec.hpp"
#include "src/versions/digest.hpp"
#include "src/versions/version_index.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/temporary_directory.hpp"

namespace muster::test {

/// A tensor of the model and its place.
struct ChainTensor {
  std::string file;
  TensorSpec spec;
  std::vector<std::byte> bytes;
};
using ChainModel = std::map<std::string, ChainTensor>;

struct DeltaChoice {
  DeltaEncoding encoding = DeltaEncoding::exclusive_or;
  versions::ChecksumFormat checksums = versions::ChecksumFormat::xxh3_128;
  bool has_own_facts = true;
  int files = 1;
};

class VersionChain {
 public:
  /// `root` gets the directories "base" and "source". The base has two files of three tensors each.
  explicit VersionChain(const TemporaryDirectory& root, std::uint64_t seed = 1)
      : base_(root / "base"), source_(root / "source"), random_(seed), stream_("stream-" + std::to_string(seed)) {
    std::filesystem::create_directories(base_);
    std::filesystem::create_directories(source_);
    for (const int number : {1, 2}) {
      const std::string file = "model-0000" + std::to_string(number) + "-of-00002.safetensors";
      const std::string prefix = "layer" + std::to_string(number) + ".";
      add(prefix + "weight", file, {DType::bf16, {300, 1000}});
      add(prefix + "bias", file, {DType::f32, {77}});
      add(prefix + "scale", file, {DType::u8, {13}});
    }
    write_model(base_, model_, true);
    write_text(base_ + "/config.json", R"({"model_type": "llama"})");
    write_text(base_ + "/tokenizer.json", "{}");
    models_[0] = model_;
  }

  [[nodiscard]] const std::string& base() const { return base_; }
  [[nodiscard]] const std::string& source() const { return source_; }
  [[nodiscard]] std::uint64_t newest() const { return models_.rbegin()->first; }
  [[nodiscard]] std::string version(std::uint64_t number) const {
    return source_ + "/" + versions::version_name(number);
  }
  [[nodiscard]] const ChainModel& model(std::uint64_t number) const { return models_.at(number); }
  void set_stream(std::string stream) { stream_ = std::move(stream); }

  /// Changes about one of `of` bytes of the tensors.
  void change(const std::vector<std::string>& names, int of = 100) {
    for (const std::string& name : names) {
      std::vector<std::byte>& bytes = model_.at(name).bytes;
      for (std::size_t i = 0; i < bytes.size(); ++i)
        if (i == 0 || random_() % static_cast<unsigned>(of) == 0)
          bytes[i] ^= static_cast<std::byte>(1 + random_() % 255);
    }
  }

  /// Publishes the difference to the newest version.
  void publish_delta(const DeltaChoice& choice = {}) {
    const std::uint64_t number = newest() + 1;
    const std::string directory = version(number);
    std::filesystem::create_directories(directory);
    std::vector<std::vector<NamedTensor>> frames(static_cast<std::size_t>(choice.files));
    std::vector<std::map<std::string, std::string>> sums(frames.size());
    versions::VersionIndex index{.version = number,
                                 .kind = VersionKind::delta,
                                 .base_version = number - 1,
                                 .encoding = choice.encoding,
                                 .checksums = choice.checksums};
    std::size_t count = 0;
    for (const auto& [name, tensor] : model_) {
      std::vector<std::byte> old = models_.at(number - 1).at(name).bytes;
      if (old == tensor.bytes) continue;
      std::vector<std::byte> frame;
      versions::DeltaEncoder encoder(choice.encoding, [&](std::span<const std::byte> part) {
        frame.insert(frame.end(), part.begin(), part.end());
      });
      encoder.begin(tensor.bytes.size(), 1);
      encoder.add(tensor.bytes, old);
      REQUIRE(encoder.end());
      versions::TensorSum sum(choice.checksums);
      sum.add(tensor.bytes);
      const std::size_t file = count++ % frames.size();
      frames[file].push_back(
          {name, Tensor::copy_of(TensorView(DType::u8, {static_cast<std::int64_t>(frame.size())}, frame.data()))});
      sums[file][name] = sum.checksum();
    }
    for (std::size_t i = 0; i < frames.size(); ++i) {
      if (frames[i].empty()) continue;
      const std::string file =
          "model-0000" + std::to_string(i) + "-of-0000" + std::to_string(frames.size()) + ".safetensors";
      write_tensors(directory + "/" + file, frames[i], sums[i]);
      for (const NamedTensor& frame : frames[i]) index.weights.emplace_back(frame.first, file);
    }
    finish(directory, index, choice.has_own_facts);
  }

  /// Publishes all tensors, in one file of another name.
  void publish_full(bool has_own_facts = true, bool has_config = true) {
    const std::uint64_t number = newest() + 1;
    const std::string directory = version(number);
    std::filesystem::create_directories(directory);
    ChainModel whole = model_;
    versions::VersionIndex index{.version = number, .kind = VersionKind::full};
    for (auto& [name, tensor] : whole) {
      tensor.file = "model-00001-of-00001.safetensors";
      index.weights.emplace_back(name, tensor.file);
      index.total_size += tensor.bytes.size();
    }
    write_model(directory, whole, false);
    if (has_config) write_text(directory + "/config.json", R"({"model_type": "full"})");
    finish(directory, index, has_own_facts);
  }

  /// Requires that a directory has the tensors of a version.
  void check(const std::string& directory, std::uint64_t number) const {
    const ModelDir found = ModelDir::open(directory);
    const ChainModel& wanted = model(number);
    REQUIRE(found.tensors().size() == wanted.size());
    for (std::size_t i = 0; i < found.tensors().size(); ++i) {
      const TensorEntry& entry = found.tensors()[i];
      INFO(directory, " version ", number, " ", entry.name);
      const ChainTensor& tensor = wanted.at(entry.name);
      CHECK(TensorSpec{entry.dtype, entry.shape} == tensor.spec);
      std::vector<std::byte> bytes(entry.bytes);
      found.read(i, 0, bytes);
      CHECK(bytes == tensor.bytes);
    }
    CHECK(read_text(directory + "/.weight_sync/state.json").find(versions::version_digits(number)) !=
          std::string::npos);
  }

 private:
  void add(const std::string& name, const std::string& file, TensorSpec spec) {
    std::vector<std::byte> bytes(byte_size(spec.dtype, spec.shape));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    model_[name] = {file, std::move(spec), std::move(bytes)};
  }

  static void write_model(const std::string& directory, const ChainModel& model, bool has_index) {
    std::map<std::string, std::vector<NamedTensor>> files;
    ConfigObject map;
    std::uint64_t total = 0;
    for (const auto& [name, tensor] : model) {
      files[tensor.file].push_back(
          {name, Tensor::copy_of(TensorView(tensor.spec.dtype, tensor.spec.shape, tensor.bytes.data()))});
      map.insert(name, Config(tensor.file));
      total += tensor.bytes.size();
    }
    for (const auto& [file, tensors] : files) write_tensors(directory + "/" + file, tensors, {{"format", "pt"}});
    if (has_index)
      write_text(directory + "/model.safetensors.index.json",
                 to_json(Config::object(
                     {{"metadata", Config::object({{"total_size", total}})}, {"weight_map", Config(std::move(map))}})));
  }

  static versions::Digest digest_of(const ChainModel& model) {
    std::vector<versions::TensorState> states;
    for (const auto& [name, tensor] : model) {
      versions::Digesting digesting;
      digesting.add(tensor.bytes);
      states.push_back({name, tensor.spec, digesting.value()});
    }
    return versions::state_digest(states);
  }

  void finish(const std::string& directory, versions::VersionIndex& index, bool has_own_facts) {
    if (has_own_facts) {
      versions::OwnFacts own;
      own.stream = stream_;
      own.publisher = "test";
      own.before = digest_of(models_.at(index.version - 1));
      own.after = digest_of(model_);
      for (const auto& [name, file] : index.weights) {
        const std::string text = read_text(directory + "/" + file);
        versions::Digesting digesting;
        digesting.add(std::as_bytes(std::span(text)));
        own.files[file] = {text.size(), digesting.value()};
      }
      index.own = std::move(own);
    }
    write_text(directory + "/model.safetensors.index.json", versions::version_index_text(index));
    models_[index.version] = model_;
  }

  std::string base_;
  std::string source_;
  std::mt19937_64 random_;
  std::string stream_;
  ChainModel model_;  // the next version
  std::map<std::uint64_t, ChainModel> models_;
};

}  // namespace muster::test
