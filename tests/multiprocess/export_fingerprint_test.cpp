// SPDX-License-Identifier: Apache-2.0
// The fingerprint that an export computes from the bytes that it writes is that of its output, for each kind of source,
// writer and number of ranks. Its CRCs find one changed bit in the files.

#include <doctest/doctest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "muster/export.hpp"
#include "muster/fingerprint.hpp"
#include "muster/live_export.hpp"
#include "muster/verify.hpp"
#include "src/checkpoint/assembly/checksums.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/live_models.hpp"
#include "tests/support/models.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
namespace fs = std::filesystem;

namespace {

/// Checks the result of an export with the option. Only rank 0 has a fingerprint.
void check_fingerprint(const ExportReport& report, const std::string& out, const Group& group) {
  RANK_CHECK(report.fingerprint.has_value() == (group.rank() == 0));
  if (group.rank() == 0) RANK_CHECK(*report.fingerprint == fingerprint_of(out));
}

/// Returns the parts in up to three units.
PartSource in_units(const std::vector<TensorPart>& parts) {
  return [&parts, next = 0]() mutable -> std::optional<std::vector<TensorPart>> {
    if (next == 3) return std::nullopt;
    std::vector<TensorPart> unit;
    for (const TensorPart& part : parts)
      if (std::hash<std::string>()(part.name) % 3 == static_cast<std::size_t>(next)) unit.push_back(part);
    ++next;
    return unit;
  };
}

/// The shards of a small model with tensors of many sizes.
class Shards : public TemporaryDirectory {
 public:
  explicit Shards(int ranks) : TemporaryDirectory(Medium::memory) {
    inspect::write_demo_model(inspect::llama_model({.hidden = 48,
                                                    .intermediate = 1000,
                                                    .layers = 2,
                                                    .heads = 12,
                                                    .key_value_heads = 4,
                                                    .vocabulary = 5001,
                                                    .biases = true}),
                              *this / "model", 1 << 30);
    shard_model(*this / "model", *this / "shards", {.tensor = ranks}, "llama");
  }
};

}  // namespace

TEST_CASE("the fingerprint of a live export is that of its output and of the parts") {
  for (const int ranks : {1, 2, 3, 4}) {
    const TemporaryDirectory work(Medium::memory);
    CAPTURE(ranks);
    run_ranks(ranks, [&](Group& group) {
      LiveModels random(static_cast<unsigned>(200 + ranks), ranks);
      for (int i = 0; i < 40; ++i) {
        const LiveModel model = random.next();
        const auto& parts = model.parts[static_cast<std::size_t>(group.rank())];
        const auto form = random.below(3);
        const bool has_checksums = random.below(3) == 0;
        const ExportOptions options{.force = true,
                                    .max_shard_size = random.below(2) == 0 ? std::uint64_t{3000} : 5'000'000'000,
                                    .memory_budget = std::uint64_t{random.below(2) == 0 ? 4U : 64U} << 20,
                                    .writers = random.below(2) == 0 ? Writers::all : Writers::rank0,
                                    .checksums = has_checksums,
                                    .fingerprint = true};
        const ExportReport report = form == 0   ? export_model(parts, work / "out", "", group, options)
                                    : form == 1 ? export_model_async(parts, work / "out", "", group, options).get()
                                                : export_model(in_units(parts), work / "out", "", group, options);
        check_fingerprint(report, work / "out", group);
        const Fingerprint in_memory = fingerprint(parts, group);
        if (group.rank() != 0) continue;
        RANK_CHECK(*report.fingerprint == in_memory);
        if (!has_checksums) continue;
        RANK_CHECK(read_checksums(work / "out") == checksums_of(in_memory));
        RANK_CHECK(verify(work / "out").is_good());
      }
    });
  }
}

TEST_CASE("the fingerprint of an export of shards is that of its output") {
  const Shards work(4);
  const std::string whole = fingerprint_of(work / "model").hash();
  for (const int ranks : {1, 3, 4}) {
    for (const Writers writers : {Writers::rank0, Writers::all}) {
      run_ranks(ranks, [&](Group& group) {
        ExportOptions options{.force = true,
                              .max_shard_size = 300'000,
                              .memory_budget = 4 << 20,
                              .writers = writers,
                              .fingerprint = true};
        const ExportReport report = export_model(work / "shards", work / "out", "", group, options);
        check_fingerprint(report, work / "out", group);
        if (group.rank() == 0) RANK_CHECK(report.manifest.files > 3 && report.fingerprint->hash() == whole);
        options.dtype = DType::bf16;
        options.select = "*proj*";
        check_fingerprint(export_model(work / "shards", work / "out", "", group, options), work / "out", group);
        options.fingerprint = false;
        RANK_CHECK(!export_model(work / "shards", work / "out", "", group, options).fingerprint);
        options.fingerprint = true;
        options.target_layout = ParallelLayout{.tensor = 2};
        error_of(ErrorKind::invalid_argument, {"fingerprint: shards have parts of tensors"},
                 [&] { export_model(work / "shards", work / "no", "", group, options); });
      });
    }
  }
}

TEST_CASE("reduced and padded tensors have the fingerprint of the result") {
  const TemporaryDirectory work(Medium::memory);
  std::ofstream(work / "plan.json") << R"({"muster_plan": 1, "rules": [
    {"match": "amax", "action": "max"}, {"match": "bias", "action": "sum"}, {"match": "*", "action": "same"}]})";
  fs::create_directory(work / "shards");
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<float> values(5000);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((i * 7 + 1000) % (rank + 5));
    const Tensor tensor = Tensor::take(values, {50, 100});
    write_tensors(work / ("shards/" + shard_file_name(rank, 3)),
                  {{"amax", tensor}, {"bias", tensor}, {"same", pattern(DType::u8, {3}, 1)}});
  }
  run_ranks(3, [&](Group& group) {
    for (const Writers writers : {Writers::rank0, Writers::all})
      check_fingerprint(export_model(work / "shards", work / "out", work / "plan.json", group,
                                     {.force = true, .writers = writers, .fingerprint = true}),
                        work / "out", group);
  });
}

TEST_CASE("files that an earlier export has finished are part of the fingerprint") {
  const Shards work(2);
  run_ranks(2, [&](Group& group) {
    const ExportOptions options{.max_shard_size = 300'000, .resume = true, .fingerprint = true};
    // The first file may be unfinished when the third one fails.
    const auto has_finished_file = [&] {
      for (const auto& entry : fs::recursive_directory_iterator(fs::path(work / "out").parent_path()))
        if (entry.path().parent_path().filename().string().starts_with("out.partial-") &&
            entry.path().filename().string().starts_with("model-0") && entry.path().extension() == ".safetensors")
          return true;
      return false;
    };
    for (int i = 0; i < 50 && !has_finished_file(); ++i) {
      group.barrier();
      const FailingCall failing({.call = "pwrite", .path = "model-00003-of", .error = EIO});
      error_of(ErrorKind::io, {}, [&] { export_model(work / "shards", work / "out", "", group, options); });
      group.barrier();
    }
    const ExportReport report = export_model(work / "shards", work / "out", "", group, options);
    if (group.rank() == 0) RANK_CHECK(report.files_resumed > 0 && report.files_resumed < report.manifest.files);
    check_fingerprint(report, work / "out", group);
  });
}

TEST_CASE("each flipped bit is found by the checksums and by a comparison, which name the tensor") {
  const TemporaryDirectory work(Medium::memory);
  std::mt19937_64 random(1);
  LiveModels models(7, 1);
  for (int i = 0; i < 20; ++i) {
    const LiveModel model = models.next();
    const auto group = single_group();
    const ExportReport report = export_model(model.parts.front(), work / "out", "", *group,
                                             {.force = true, .checksums = true, .fingerprint = true});
    const std::string path = work / "out/model.safetensors";
    const std::vector<TensorEntry> tensors = SafetensorsFile::open(path).tensors();
    for (const TensorEntry& tensor : tensors) {
      if (tensor.bytes == 0) continue;
      CAPTURE(tensor.name);
      const std::uint64_t at = tensor.offset + random() % tensor.bytes;
      const auto flip = [&, bit = 1 << random() % 8] {
        std::string text = read_text(path);
        text[at] = static_cast<char>(text[at] ^ bit);
        std::ofstream(path) << text;
      };
      flip();
      const auto found = differences(*report.fingerprint, fingerprint_of(work / "out"));
      CHECK(found.size() == 1);
      CHECK(found.at(0).name() == tensor.name);
      CHECK(found.at(0).defect == FingerprintDefect::content);
      const VerifyReport verified = verify(work / "out");
      CHECK(std::ranges::count(verified.problems, tensor.name, &VerifyProblem::tensor) == 1);
      flip();
      CHECK(differences(*report.fingerprint, fingerprint_of(work / "out")).empty());
    }
  }
}
