// SPDX-License-Identifier: Apache-2.0
// Live exports: random models in the memory of ranks, cut at random, become the model bit by bit. Each mistake is one
// error on all ranks that leaves nothing behind. Asynchronous exports write the tensors as they were at the call.

#include "muster/live_export.hpp"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "muster/fingerprint.hpp"
#include "muster/gather.hpp"
#include "muster/log.hpp"
#include "src/core/crc64.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/kills.hpp"
#include "tests/support/live_models.hpp"
#include "tests/support/models.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

void check_output(const std::string& out, const std::map<std::string, Tensor>& wholes) {
  const auto found = tensors_of(out);
  RANK_CHECK(found.size() == wholes.size());
  for (const auto& [name, tensor] : wholes) {
    if (!found.contains(name) || !bitwise_equal(found.at(name), tensor))
      throw RankFailure("tensor " + name + " " + to_string(TensorSpec{tensor.dtype(), tensor.shape()}) + " differs");
  }
}

/// A tensor of one byte per element, whose rows are spread evenly over the ranks.
std::vector<TensorPart> rows_of_rank(const Group& group, const std::string& name, const Tensor& whole) {
  const std::int64_t rows = whole.shape()[0];
  const std::int64_t begin = rows * group.rank() / group.size();
  const std::int64_t end = rows * (group.rank() + 1) / group.size();
  return {{name, Tensor(whole.view().slice(0, begin, end), whole.owner()), whole.shape(), {begin, 0}}};
}

}  // namespace

TEST_CASE("random models that are cut at random over ranks are exported bit by bit") {
  int seed = 0;
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    const TemporaryDirectory work(Medium::memory);
    const int models = ranks == 1 ? 150 : ranks == 8 ? 120 : 200;
    ++seed;
    CAPTURE(ranks);
    const auto ended = try_ranks(ranks, [&](Group& group) {
      LiveModels random(static_cast<unsigned>(seed), ranks);
      std::optional<Work<ExportReport>> running;
      for (int i = 0; i < models; ++i) {
        const LiveModel model = random.next();
        const auto& parts = model.parts[static_cast<std::size_t>(group.rank())];
        ExportOptions options{.force = true,
                              .max_shard_size = random.below(3) == 0 ? std::uint64_t{3000} : 5'000'000'000,
                              .memory_budget = std::uint64_t{random.below(2) == 0 ? 4U : 64U} << 20,
                              .writers = random.below(2) == 0 ? Writers::all : Writers::rank0,
                              .checksums = random.below(8) == 0};
        // The tensors are taken from the call, so the next model can be made while files are written.
        if (random.below(4) == 0)
          export_model_async(parts, work / "out", "", group, options).get();
        else
          export_model(parts, work / "out", "", group, options);
        if (group.rank() == 0) check_output(work / "out", model.wholes);
        group.barrier();
      }
    });
    test::check_ended(ended);
    for (const Ended& rank : ended) {
      CAPTURE(rank.words);
      CHECK(rank.ok());
    }
    CHECK(names_in(work.path()) == std::vector<std::string>{"out"});
  }
}

TEST_CASE("random models that come unit by unit are exported bit by bit") {
  for (const int ranks : {1, 2, 4, 7}) {
    const TemporaryDirectory work(Medium::memory);
    const auto ended = try_ranks(ranks, [&](Group& group) {
      LiveModels random(static_cast<unsigned>(100 + ranks), ranks);
      for (int i = 0; i < 60; ++i) {
        const LiveModel model = random.next();
        std::map<std::string, std::size_t> unit_of;
        const auto count = 1 + static_cast<std::size_t>(random.below(5));
        for (const auto& [name, whole] : model.wholes) unit_of[name] = static_cast<std::size_t>(random.below(count));
        std::vector<std::vector<TensorPart>> units(count);
        for (const TensorPart& part : model.parts[static_cast<std::size_t>(group.rank())]) {
          units[unit_of.at(part.name)].push_back(part);
          units[unit_of.at(part.name)].back().tensor = Tensor::copy_of(part.tensor);
        }
        std::size_t next = 0;
        const PartSource source = [&]() -> std::optional<std::vector<TensorPart>> {
          // The parts of the last unit belong to the caller again, and to nobody else.
          if (next > 0)
            for (const TensorPart& part : units[next - 1]) {
              RANK_CHECK(part.tensor.owner().use_count() <= 1);
              if (part.tensor.is_writable()) fill(part.tensor.mutable_data(), part.tensor.nbytes(), 1);
            }
          if (next == count) return std::nullopt;
          return units[next++];
        };
        const ExportReport report =
            export_model(source, work / "out", "", group,
                         {.force = true,
                          .max_shard_size = random.below(2) == 0 ? std::uint64_t{5000} : 5'000'000'000,
                          .memory_budget = 8 << 20,
                          .writers = random.below(2) == 0 ? Writers::all : Writers::rank0,
                          .checksums = random.below(8) == 0});
        if (group.rank() == 0) {
          check_output(work / "out", model.wholes);
          RANK_CHECK(report.manifest.tensors_out == model.wholes.size());
          for (const TensorMapping& tensor : report.manifest.tensors)
            RANK_CHECK(fs::exists(fs::path(work / "out") / tensor.file));
        }
        group.barrier();
      }
    });
    for (const Ended& rank : ended) {
      CAPTURE(ranks);
      CAPTURE(rank.words);
      CHECK(rank.ok());
    }
    CHECK(names_in(work.path()) == std::vector<std::string>{"out"});
  }
}

TEST_CASE("each mistake in units is one error on all ranks, and leaves no output") {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(3, [&](Group& group) {
    const int rank = group.rank();
    const Tensor whole = pattern(DType::u8, {6, 8}, 1);
    const auto good = rows_of_rank(group, "w", whole);
    const auto fails = [&](ErrorKind kind, const std::string& words, const PartSource& source,
                           const ExportOptions& options = {}, const std::string& plan = {}) {
      error_of(kind, {words}, [&] { export_model(source, work / "out", plan, group, options); });
      group.barrier();
      RANK_CHECK(names_in(work.path()).empty());
      group.barrier();
    };
    using Units = std::vector<std::vector<TensorPart>>;
    const auto source_of = [](Units units) {
      return [units = std::move(units), next = std::size_t{0}]() mutable -> std::optional<std::vector<TensorPart>> {
        if (next == units.size()) return std::nullopt;
        return units[next++];
      };
    };
    fails(ErrorKind::rank_mismatch, "rank 0 has 1, and rank 2 has more",
          source_of(rank == 2 ? Units{good, {}} : Units{good}));
    fails(ErrorKind::rank_mismatch, "rank 1 has 1, and rank 0 has more",
          source_of(rank == 1 ? Units{good} : Units{good, {}}));
    fails(ErrorKind::invalid_argument, "tensor \"w\": it is in two units", source_of({good, good}));
    fails(ErrorKind::invalid_argument, "32 of 48 elements",
          source_of({good, rank == 2 ? Units::value_type() : rows_of_rank(group, "v", whole)}));
    fails(ErrorKind::invalid_argument, "no unit has a selected tensor", source_of({}));
    fails(ErrorKind::invalid_argument, "cast_all", source_of({good}), {.dtype = DType::bf16});
    fails(ErrorKind::invalid_argument, "resume", source_of({good}), {.resume = true});
    int calls = 0;
    fails(ErrorKind::io, "the layer is broken", [&]() -> std::optional<std::vector<TensorPart>> {
      if (++calls == 2 && rank == 1) throw std::runtime_error("the layer is broken");
      return calls == 1 ? good : std::vector<TensorPart>();
    });
    FailingCall failing(rank == 2 ? CallToFail{.call = "pwrite", .path = "/out.partial", .error = ENOSPC}
                                  : CallToFail{.call = "none"});
    // Each rank writes its own rows.
    const auto large = rows_of_rank(group, "w", pattern(DType::u8, {6, 200'000}, 1));
    fails(ErrorKind::out_of_space, "rank 2", source_of({large}), {.writers = Writers::all});
  });
}

TEST_CASE("units with the names of a plan give the model of the whole export, and its fingerprint") {
  const TemporaryDirectory work(Medium::memory);
  std::ofstream(work / "plan.json")
      << R"({"muster_plan": 1, "layers": {"match": "layers.#.*", "renumber": true}, "rules": [
    {"match": "embed.weight", "action": "concat", "dim": 0}, {"match": "head.weight", "action": "tie", "with": "embed.weight"},
    {"match": "*.q.weight", "action": "concat", "dim": 0}, {"match": "*.q.weight_scale", "action": "concat", "dim": 0},
    {"match": "norm", "action": "same"}, {"match": "unused", "action": "same"}]})";
  std::map<std::string, Tensor> wholes = {{"embed.weight", pattern(DType::bf16, {10, 4}, 1)},
                                          {"norm", pattern(DType::f32, {7}, 2)}};
  for (std::uint64_t layer = 0; layer < 4; ++layer) {
    wholes.emplace("layers." + std::to_string(layer) + ".q.weight", pattern(DType::f32, {6, 5}, 10 + layer));
    wholes.emplace("layers." + std::to_string(layer) + ".q.weight_scale", pattern(DType::f32, {6, 1}, 20 + layer));
  }
  const auto ended = try_ranks(4, [&](Group& group) {
    const ParallelLayout layout{.tensor = 2, .pipeline = 2};
    const auto at = layout.coordinates(group.rank());
    const auto half = [&](const std::string& name, const Tensor& whole) -> TensorPart {
      const std::int64_t rows = whole.shape()[0] / 2;
      return {name, Tensor(whole.view().slice(0, at.tensor * rows, (at.tensor + 1) * rows), whole.owner())};
    };
    const auto layer = [&](int number, int named) {
      std::vector<TensorPart> parts;
      for (const char* kind : {".q.weight", ".q.weight_scale"})
        parts.push_back(
            half("layers." + std::to_string(named) + kind, wholes.at("layers." + std::to_string(number) + kind)));
      return parts;
    };
    using Units = std::vector<std::vector<TensorPart>>;
    const auto source_of = [](Units units) {
      return [units = std::move(units), next = std::size_t{0}]() mutable -> std::optional<std::vector<TensorPart>> {
        if (next == units.size()) return std::nullopt;
        return units[next++];
      };
    };
    const int first = at.pipeline * 2;
    Units units = {layer(first, first), layer(first + 1, first + 1), {}};
    const Tensor embed = wholes.at("embed.weight");
    if (at.pipeline == 0) units[0].push_back(half("embed.weight", embed));
    if (at.pipeline == 1) units[0].push_back(half("head.weight", embed));
    if (at.pipeline == 1) units[2].push_back({"norm", wholes.at("norm")});
    ExportOptions options{.source_layout = layout, .fingerprint = true};
    const std::string plan = work / "plan.json";
    const ExportReport report = export_model(source_of(units), work / "out", plan, group, options);
    std::vector<TensorPart> all;
    for (const auto& unit : units) all.insert(all.end(), unit.begin(), unit.end());
    const FingerprintOptions as_exported{.plan = plan, .source_layout = layout};
    const Fingerprint print = fingerprint(all, group, as_exported);
    RANK_CHECK(print.tensors.size() == wholes.size());
    for (const TensorFingerprint& tensor : print.tensors)
      RANK_CHECK(tensor.crc == crc64(wholes.at(tensor.name).bytes()));
    if (group.rank() == 0) {
      check_output(work / "out", wholes);
      RANK_CHECK(*report.fingerprint == print);
      RANK_CHECK(report.manifest.notes == std::vector<std::string>{"plan \"" + plan + "\": no tensor has rule 6"});
      RANK_CHECK(report.manifest.dropped.size() == 1 && report.manifest.plan == plan);
    }
    // A dtype changes the elements, and a cast checkpoint has the same fingerprint.
    options.dtype = DType::bf16;
    options.cast_all = true;
    const ExportReport cast = export_model(source_of(units), work / "cast", plan, group, options);
    const Fingerprint of_cast =
        fingerprint(all, group, {.plan = plan, .dtype = DType::bf16, .cast_all = true, .source_layout = layout});
    if (group.rank() == 0) RANK_CHECK(*cast.fingerprint == of_cast && of_cast != print);
    const auto refused = [&](ErrorKind kind, const std::string& words, Units wrong) {
      error_of(kind, {words}, [&] {
        export_model(source_of(std::move(wrong)), work / "not", plan, group, {.source_layout = layout});
      });
    };
    // Only a fingerprint has no output.
    error_of(ErrorKind::invalid_argument, {"output"},
             [&] { export_model(all, "", plan, group, {.source_layout = layout}); });
    error_of(ErrorKind::invalid_argument, {"output"},
             [&] { export_model(source_of(units), "", plan, group, {.source_layout = layout}); });
    // The stages count their layers from 0.
    refused(ErrorKind::invalid_argument, "pipeline stages 0 and 1 have it", {layer(first, 0)});
    refused(ErrorKind::invalid_argument, "it is in two units",
            at.pipeline == 0 ? Units{layer(0, 0), {}} : Units{{}, layer(2, 0)});
    Units apart = {layer(first, first), {}};
    apart[1].push_back(apart[0].back());
    apart[0].pop_back();
    refused(ErrorKind::invalid_argument, "Pass a weight and its scales in one unit", apart);
    if (at.pipeline == 1) units[0].back() = half("head.weight", pattern(DType::bf16, {10, 4}, 5));
    refused(ErrorKind::rank_mismatch, "ties them", units);
    // The result has one of two tied tensors, so they are compared even if replicas are not.
    error_of(ErrorKind::rank_mismatch, {"ties them"}, [&] {
      export_model(source_of(units), work / "not", plan, group, {.source_layout = layout, .check_replicas = false});
    });
    group.barrier();
  });
  check_ended(ended);
  for (const Ended& rank : ended) {
    CAPTURE(rank.words);
    CHECK(rank.ok());
  }
  CHECK(names_in(work.path()) == std::vector<std::string>{"cast", "out", "plan.json"});
}

TEST_CASE("ranks that pass their tensors under the names of a plan export the model") {
  const TemporaryDirectory work(Medium::memory);
  std::ofstream(work / "plan.json") << R"({"muster_plan": 1, "rules": [
    {"match": "*.q.weight", "action": "concat", "dim": 0}, {"match": "*.o.weight", "action": "concat", "dim": 1},
    {"match": "*", "action": "same"}]})";
  const std::map<std::string, Tensor> wholes = {{"a.q.weight", pattern(DType::bf16, {12, 8}, 1)},
                                                {"a.o.weight", pattern(DType::f32, {5, 12}, 2)},
                                                {"norm", pattern(DType::i64, {7}, 3)}};
  run_ranks(3, [&](Group& group) {
    const std::int64_t rank = group.rank();
    std::vector<TensorPart> parts;
    for (const auto& [name, whole] : wholes) {
      TensorView part = whole;
      if (name != "norm") part = part.slice(name == "a.q.weight" ? 0 : 1, rank * 4, rank * 4 + 4);
      parts.push_back({name, Tensor(part, whole.owner())});
    }
    const std::string plan = rank == 0 ? work / "plan.json" : "";
    ExportOptions options{.force = true, .source_layout = ParallelLayout{.tensor = 3}, .files = {{"note", "text"}}};
    for (const Writers writers : {Writers::all, Writers::rank0}) {
      options.writers = writers;
      export_model(parts, work / "out", plan, group, options);
      export_model_async(parts, work / "later", plan, group, options).get();
    }
    if (rank == 2) parts.back().tensor = pattern(DType::i64, {7}, 4);
    error_of(ErrorKind::rank_mismatch, {"\"norm\": rank 0 and rank 2 have different values"},
             [&] { export_model(parts, work / "not", plan, group, options); });
    parts.front().whole = {5, 12};
    parts.front().offset = {0, rank * 4};
    error_of(ErrorKind::invalid_argument, {"the plan describes the parts"},
             [&] { export_model(parts, work / "not", plan, group, options); });
    if (rank != 0) return;
    check_output(work / "out", wholes);
    check_output(work / "later", wholes);
  });
  CHECK(read_text(work / "out/note") == "text");
}

TEST_CASE("each mistake is one error on all ranks, leaves no output, and the group stays usable") {
  const TemporaryDirectory work(Medium::memory);
  fs::create_directory(work / "there");
  run_ranks(3, [&](Group& group) {
    const int rank = group.rank();
    const Tensor whole = pattern(DType::u8, {6, 8}, 1);
    const Tensor other = pattern(DType::u8, {6, 8}, 2);
    const auto good = rows_of_rank(group, "w", whole);
    const auto box = [&](const Tensor& of, std::int64_t begin, std::int64_t end) {
      return TensorPart{"w", Tensor(of.view().slice(0, begin, end), of.owner()), {6, 8}, {begin, 0}};
    };
    struct Mistake {
      const char* words;
      ErrorKind kind;
      std::vector<TensorPart> parts;
      ExportOptions options = {};
      std::string out = {};
      std::string plan = {};
    };
    const std::vector<TensorPart> none;
    const std::vector<Mistake> mistakes = {
        {"\"w\": rank 0 and rank 2 have different values",
         ErrorKind::rank_mismatch,
         {box(rank == 2 ? other : whole, 0, 6)}},
        {"\"w\": rank 0 and rank 1 have different values",
         ErrorKind::rank_mismatch,
         {rank == 0   ? box(whole, 0, 4)
          : rank == 1 ? box(other, 2, 6)
                      : box(whole, 5, 6)}},
        {"32 of 48 elements of [6, 8]; parts come from rank 0, 1", ErrorKind::invalid_argument,
         rank == 2 ? none : good},
        {"tensor \"w\": it is U8 [6, 8] on rank 0, and U8 [7, 8] on rank 1",
         ErrorKind::rank_mismatch,
         {rank == 1 ? TensorPart{"w", whole, {7, 8}} : TensorPart{"w", whole}}},
        {"tensor \"w\": it is U8 [6, 8] on rank 0, and I8 [6, 8] on rank 2",
         ErrorKind::rank_mismatch,
         {{"w", rank == 2 ? pattern(DType::i8, {6, 8}, 1) : whole}}},
        {"out of range for the whole shape [6, 8]",
         ErrorKind::invalid_argument,
         {rank == 1 ? TensorPart{"w", whole, {6, 8}, {1, 0}} : box(whole, 0, 6)}},
        {"it has an offset, but no whole shape",
         ErrorKind::invalid_argument,
         {rank == 2 ? TensorPart{"w", whole, {}, {1, 0}} : box(whole, 0, 6)}},
        {"a tensor has no name", ErrorKind::invalid_argument, {{rank == 1 ? "" : "w", whole}}},
        {"not UTF-8", ErrorKind::invalid_argument, {{rank == 1 ? "\xff" : "w", whole}}},
        {"there", ErrorKind::invalid_argument, good, {}, work / "there"},
        {"resume", ErrorKind::invalid_argument, good, {.resume = true}},
        {"target_layout", ErrorKind::invalid_argument, good, {.target_layout = ParallelLayout{.tensor = 2}}},
        {"to_plan", ErrorKind::invalid_argument, good, {.to_plan = "llama"}},
        {"job_id", ErrorKind::invalid_argument, good, {.job_id = "a"}},
        {"step", ErrorKind::invalid_argument, good, {.step = 1}},
        {"key", ErrorKind::invalid_argument, good, {.key = "model"}},
        {"file_pattern", ErrorKind::invalid_argument, good, {.file_pattern = "{rank}.pt"}},
        {"source_layout", ErrorKind::invalid_argument, good, {.source_layout = ParallelLayout{.tensor = 3}}},
        {"not a name of a file next to the weights", ErrorKind::invalid_argument, good, {.files = {{"a/b", ""}}}},
        {"files: parsing", ErrorKind::corrupt, good, {.files = {{"config.json", "{"}}}},
        {"no tensor matches", ErrorKind::invalid_argument, good, {.select = "v"}},
        {"memory budget", ErrorKind::invalid_argument, good, {.memory_budget = 1000}},
    };
    for (const bool is_async : {false, true}) {
      for (const Mistake& mistake : mistakes) {
        const std::string out = mistake.out.empty() ? work / "out" : mistake.out;
        const FailingCall writes({.call = "pwrite", .path = "/out.partial"});
        const Error error = error_of(mistake.kind, {mistake.words}, [&] {
          if (is_async)
            (void)export_model_async(mistake.parts, out, mistake.plan, group, mistake.options);
          else
            export_model(mistake.parts, out, mistake.plan, group, mistake.options);
        });
        RANK_CHECK(std::string(error.what()).find('\n') == std::string::npos);
        RANK_CHECK(FailingCall::seen() == 0);
        group.barrier();
        RANK_CHECK(names_in(work.path()) == std::vector<std::string>{"there"});
        group.barrier();
      }
    }
    // Without the check, the values of the lowest rank are used.
    const std::vector<TensorPart> unequal = {box(rank == 0 ? whole : other, 0, 6)};
    export_model(unequal, work / "unchecked", "", group, {.writers = Writers::rank0, .check_replicas = false});
    if (rank == 0) check_output(work / "unchecked", {{"w", whole}});
    group.barrier();
    if (rank == 0) fs::remove_all(work / "unchecked");
    group.barrier();
  });
}

TEST_CASE("options keep their meaning: casts, selection, texts of files") {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(2, [&](Group& group) {
    std::vector<float> values(64 * 16);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    const Tensor whole = Tensor::take(values, {64, 16});
    auto parts = rows_of_rank(group, "a.weight", whole);
    // Columns on two ranks, which overlap.
    const std::int64_t begin = group.rank() == 0 ? 0 : 6;
    const std::int64_t end = group.rank() == 0 ? 10 : 16;
    parts.push_back({"b.weight", Tensor(whole.view().slice(1, begin, end), whole.owner()), {64, 16}, {0, begin}});
    parts.push_back({"c.weight", whole});
    for (const Writers writers : {Writers::all, Writers::rank0})
      export_model(parts, work / "out", "", group,
                   {.force = true,
                    .writers = writers,
                    .dtype = DType::bf16,
                    .exclude = "c.*",
                    .files = {{"config.json", "{\"model_type\": \"mine\"}"}}});
    if (group.rank() != 0) return;
    const auto found = tensors_of(work / "out");
    RANK_CHECK(found.size() == 2);
    for (const auto& [name, tensor] : found) {
      RANK_CHECK(tensor.dtype() == DType::bf16);
      const auto* const bits = reinterpret_cast<const std::uint16_t*>(tensor.data());
      for (std::size_t i = 0; i < 256; ++i)
        RANK_CHECK(bits[i] == static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(values[i]) >> 16));
    }
    RANK_CHECK(read_text(work / "out/config.json") == "{\"model_type\": \"mine\"}");
  });
}

TEST_CASE("tensors may be overwritten and freed after an asynchronous call, and exports queue") {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(4, [&](Group& group) {
    std::vector<Work<ExportReport>> works;
    for (int turn = 0; turn < 5; ++turn) {
      Tensor mine = pattern(DType::u8, {64, 5000}, seed_of(group.rank(), static_cast<std::uint64_t>(turn)));
      std::vector<TensorPart> parts = {{"w", mine, {256, 5000}, {group.rank() * 64, 0}}};
      ExportOptions options{.memory_budget = 4 << 20, .writers = turn % 2 == 0 ? Writers::all : Writers::rank0};
      works.push_back(export_model_async(parts, work / ("out" + std::to_string(turn)), "", group, options));
      fill(mine.mutable_data(), mine.nbytes(), 99);
      parts.clear();
      mine = {};
      group.barrier();
    }
    for (auto& one : works) {
      const ExportReport report = one.get();
      RANK_CHECK(report.bytes_written.empty() == (group.rank() != 0));
    }
    RANK_CHECK(trim(group) >= 64 * 5000);
    RANK_CHECK(trim(group) == 0);
    // A group that is destroyed waits for its exports.
    const auto own = group.duplicate();
    const Tensor last = pattern(DType::u8, {64, 5000}, 7);
    const std::vector<TensorPart> parts = {{"w", last}};
    (void)export_model_async(parts, work / "last", "", *own);
  });
  for (int turn = 0; turn < 5; ++turn) {
    const Tensor found = tensors_of(work / ("out" + std::to_string(turn))).at("w");
    for (int rank = 0; rank < 4; ++rank)
      CHECK(bitwise_equal(found.view().slice(0, rank * 64, rank * 64 + 64),
                          pattern(DType::u8, {64, 5000}, seed_of(rank, static_cast<std::uint64_t>(turn)))));
  }
  CHECK(bitwise_equal(tensors_of(work / "last").at("w"), pattern(DType::u8, {64, 5000}, 7)));
}

TEST_CASE("an asynchronous export that fails or is stopped leaves the output as it was, and the group usable") {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(3, [&](Group& group) {
    const Tensor old = pattern(DType::u8, {300, 4000}, 1);
    const Tensor now = pattern(DType::u8, {300, 4000}, 2);
    const ExportOptions options{.force = true, .memory_budget = 4 << 20, .writers = Writers::all};
    export_model(rows_of_rank(group, "w", old), work / "out", "", group, options);
    const auto check_old = [&] {
      group.barrier();
      if (group.rank() == 0) check_output(work / "out", {{"w", old}});
      RANK_CHECK(names_in(work.path()) == std::vector<std::string>{"out"});
      group.barrier();
    };
    for (const char* call : {"pwrite", "fsync", "rename"}) {
      std::optional<FailingCall> failing;
      const int victim = std::string_view(call) == "rename" ? 0 : 2;
      if (group.rank() == victim)
        failing.emplace(CallToFail{.call = call, .path = "/out.partial", .error = ENOSPC, .times = 1});
      auto save = export_model_async(rows_of_rank(group, "w", now), work / "out", "", group, options);
      const Error error = error_of(ErrorKind::out_of_space, {}, [&] { save.get(); });
      RANK_CHECK(error.rank() == victim);
      check_old();
    }
    // Of the error of a Work that is dropped there is a line in the log.
    static std::string logged;
    set_log_hook([](LogLevel, std::string_view line) { logged += line; });
    {
      std::optional<FailingCall> failing;
      if (group.rank() == 1) failing.emplace(CallToFail{.call = "pwrite", .path = "/out.partial", .error = EIO});
      { const auto dropped = export_model_async(rows_of_rank(group, "w", now), work / "out", "", group, options); }
      // The next call waits for the end of that export.
      error_of(ErrorKind::invalid_argument, {},
               [&] { (void)export_model_async(std::vector<TensorPart>{}, work / "out", "", group, {.resume = true}); });
    }
    RANK_CHECK(logged.find("/out\" failed: ") != std::string::npos);
    set_log_hook({});
    check_old();
    for (const int stopping : {0, 1}) {
      std::stop_source stop;
      ExportOptions stopped = options;
      stopped.stop = stop.get_token();
      std::optional<FailingCall> slow;
      if (group.rank() == stopping)
        slow.emplace(
            CallToFail{.call = "pwrite", .path = "/out.partial", .times = 1, .then = [&] { stop.request_stop(); }});
      auto save = export_model_async(rows_of_rank(group, "w", now), work / "out", "", group, stopped);
      error_of(ErrorKind::cancelled, {}, [&] { save.get(); });
      check_old();
    }
    export_model_async(rows_of_rank(group, "w", now), work / "out", "", group, options).get();
    if (group.rank() == 0) check_output(work / "out", {{"w", now}});
    group.barrier();
  });
}

TEST_CASE("without memory for a snapshot all ranks get the error before anything is copied" *
          doctest::skip(under_sanitizer)) {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(2, [&](Group& group) {
    const Tensor whole = pattern(DType::u8, {64, 1 << 20}, 1);
    if (group.rank() == 1) {
      const rlimit limit{1 << 20, RLIM_INFINITY};
      RANK_CHECK(::setrlimit(RLIMIT_AS, &limit) == 0);
    }
    error_of(ErrorKind::out_of_space, {}, [&] {
      (void)export_model_async(rows_of_rank(group, "w", whole), work / "out", "", group, {.writers = Writers::rank0});
    });
  });
  CHECK(names_in(work.path()).empty());
}

TEST_CASE("a killed or stopped rank is named by the others, and the output is the old model or the new one") {
  // Rank 2 is not stopped: over MPI it writes nothing, and the short timeout is for the end of the groups, too.
  for (int number = 0; number < 8; ++number) {
    const TemporaryDirectory work(Medium::memory);
    const int nth = number % 6;
    const int victim = nth % 3;
    const int signal = number < 6 ? SIGKILL : SIGSTOP;
    CAPTURE(number);
    const auto ended = try_losing(victim, signal, 3, [&](Group& group) {
      const Tensor old = pattern(DType::u8, {300, 4000}, 1);
      const Tensor now = pattern(DType::u8, {300, 4000}, 2);
      const ExportOptions options{.force = true, .memory_budget = 4 << 20, .writers = Writers::all};
      export_model(rows_of_rank(group, "w", old), work / "out", "", group, options);
      std::optional<FailingCall> killing;
      if (group.rank() == victim)
        killing.emplace(CallToFail{.call = nth % 2 == 0 ? "pwrite" : "fsync",
                                   .path = "/out.partial",
                                   .after = nth / 3,
                                   .times = 1,
                                   .then = [&] { ::kill(::getpid(), signal); }});
      auto save = export_model_async(rows_of_rank(group, "w", now), work / "out", "", group, options);
      try {
        save.get();
        say("done");
      } catch (const Error& error) {
        RANK_CHECK(error.kind() == (signal == SIGKILL ? ErrorKind::peer_lost : ErrorKind::timeout));
        RANK_CHECK(error.rank() == victim);
        say("lost");
      }
    });
    bool is_done = false;
    for (int rank = 0; rank < 3; ++rank) {
      const Ended& end = ended[static_cast<std::size_t>(rank)];
      CAPTURE(end.words);
      CHECK((end.ok() || (rank == victim && end.signal == SIGKILL)));
      is_done = is_done || end.words == "done";
    }
    const Tensor found = tensors_of(work / "out").at("w");
    const bool is_old = bitwise_equal(found, pattern(DType::u8, {300, 4000}, 1));
    CHECK((is_old || bitwise_equal(found, pattern(DType::u8, {300, 4000}, 2))));
    // Rank 0 writes in every kind of group, so here it has stopped.
    const bool has_stopped = signal == SIGSTOP && victim == 0;
    CHECK(!((is_old || has_stopped) && is_done));
  }
}
