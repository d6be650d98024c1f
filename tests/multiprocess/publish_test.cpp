// SPDX-License-Identifier: Apache-2.0
// Publisher: random models in the memory of ranks, cut at random, are published version after version. Each host
// pulls the model bit by bit. A failure is one error on all ranks, and no version appears.

#include "muster/publish.hpp"

#include <doctest/doctest.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/checkpoints.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/live_models.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
namespace fs = std::filesystem;

namespace {

using Tensors = std::map<std::string, Tensor>;

void write_base(const std::string& directory, const Tensors& wholes, const std::string& config = "{}") {
  fs::create_directories(directory);
  write_tensors(directory + "/model.safetensors", {wholes.begin(), wholes.end()});
  write_text(directory + "/config.json", config);
}

/// Returns a copy whose bytes are all XORed with `mask`.
Tensor masked(const Tensor& tensor, std::uint8_t mask) {
  Tensor copy = Tensor::copy_of(tensor);
  for (std::size_t i = 0; i < copy.nbytes(); ++i) copy.mutable_data()[i] ^= std::byte{mask};
  return copy;
}

/// Returns a copy with one more in some of its bytes.
Tensor nudged(const Tensor& tensor, std::size_t step) {
  Tensor copy = Tensor::copy_of(tensor);
  for (std::size_t i = 0; i < copy.nbytes(); i += step)
    copy.mutable_data()[i] = static_cast<std::byte>(static_cast<unsigned>(copy.mutable_data()[i]) + 1);
  return copy;
}

void check_same(const std::string& directory, const Tensors& wholes) {
  const Tensors found = tensors_of(directory);
  RANK_CHECK(found.size() == wholes.size());
  for (const auto& [name, tensor] : wholes)
    if (!found.contains(name) || !bitwise_equal(found.at(name), tensor))
      throw RankFailure("tensor " + name + " " + to_string(TensorSpec{tensor.dtype(), tensor.shape()}) + " differs");
}

/// Two tensors of which each rank has some rows, and one that every rank has.
struct SmallModel {
  SmallModel()
      : wholes{{"a", pattern(DType::bf16, {12, 50}, 1)},
               {"b", pattern(DType::f32, {7, 3}, 2)},
               {"norm", pattern(DType::f32, {9}, 3)}} {}

  [[nodiscard]] std::vector<TensorPart> parts(const Group& group) const {
    std::vector<TensorPart> parts;
    for (const auto& [name, whole] : wholes) {
      if (name == "norm") {
        parts.push_back({name, whole});
        continue;
      }
      const std::int64_t rows = whole.shape()[0];
      const std::int64_t begin = rows * group.rank() / group.size();
      const std::int64_t end = rows * (group.rank() + 1) / group.size();
      Shape offset(whole.shape().size(), 0);
      offset[0] = begin;
      parts.push_back({name, Tensor(whole.view().slice(0, begin, end), whole.owner()), whole.shape(), offset});
    }
    return parts;
  }
  void change(std::uint8_t mask) {
    for (auto& [name, whole] : wholes)
      if (name != "b") whole = masked(whole, mask);
  }

  Tensors wholes;
};

/// Rank 0 pulls the version, which must be the model.
void check_pulled(const TemporaryDirectory& work, std::uint64_t version, const Tensors& wholes) {
  const PullReport report = pull_version(work / "source", work / "local", {.base = work / "base"});
  RANK_CHECK(report.version == version);
  check_same(work / "local", wholes);
}

/// Requires an error of this kind and with this text on every rank. The group remains usable.
void check_refused(Group& group, ErrorKind kind, const std::string& words, const std::function<void()>& call) {
  std::string found = "no error";
  try {
    call();
  } catch (const Error& error) {
    found = std::string(to_string(error.kind())) + ": " + error.what();
    if (error.kind() == kind && found.find(words) != std::string::npos) found.clear();
  }
  if (!found.empty()) throw RankFailure("expected \"" + words + "\", and found " + found);
  group.barrier();
}

}  // namespace

TEST_CASE("random models are published and pulled bit by bit") {
  for (const int ranks : {1, 2, 3, 5}) {
    const TemporaryDirectory work(Medium::memory);
    CAPTURE(ranks);
    run_ranks(ranks, [&](Group& group) {
      LiveModels random(static_cast<unsigned>(ranks), ranks);
      for (int i = 0; i < (under_sanitizer ? 4 : 12); ++i) {
        LiveModel model = random.next();
        const std::string here = work / std::to_string(i);
        if (group.rank() == 0) {
          fs::create_directories(here);
          write_base(here + "/base", model.wholes);
        }
        group.barrier();
        // All ranks draw the same numbers.
        const bool has_copy = random.below(4) == 0;
        PublisherOptions options;
        options.base = here + "/base";
        options.encoding = random.below(2) == 0 ? DeltaEncoding::overwrite : DeltaEncoding::exclusive_or;
        if (has_copy) options.base_copy = here + "/copy";
        std::optional<Publisher> publisher;
        for (std::uint64_t version = 1; version <= 4; ++version) {
          for (auto& [name, whole] : model.wholes) {
            const auto mask = static_cast<std::uint8_t>(random.below(3) * 0x11);
            whole = masked(whole, mask);
            for (TensorPart& part : model.parts[static_cast<std::size_t>(group.rank())])
              if (part.name == name) part.tensor = masked(part.tensor, mask);
          }
          // Sometimes the trainer restarts.
          if (!publisher || random.below(3) == 0) publisher.emplace(here + "/source", options, group);
          const bool is_full = random.below(4) == 0;
          const PublishReport report =
              publisher->publish(model.parts[static_cast<std::size_t>(group.rank())], {.full = is_full});
          RANK_CHECK(report.version == version);
          if (group.rank() != 0) continue;
          RANK_CHECK((report.kind == VersionKind::full) == is_full);
        }
        if (group.rank() == 0) {
          (void)pull_version(here + "/source", here + "/local", {.base = here + "/base"});
          check_same(here + "/local", model.wholes);
          const VersionLog log = read_versions(here + "/source", {.base = here + "/base", .verify = true});
          RANK_CHECK(log.is_sound());
          RANK_CHECK(log.unfinished.empty() && log.other_names.empty());
        }
        group.barrier();
      }
    });
  }
}

TEST_CASE("a delta has only the changed tensors, and counts their changed elements") {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(3, [&](Group& group) {
    SmallModel model;
    if (group.rank() == 0) write_base(work / "base", model.wholes);
    group.barrier();
    Publisher publisher(work / "source", {.base = work / "base"}, group);
    PublishReport report = publisher.publish(model.parts(group));
    if (group.rank() == 0) {
      RANK_CHECK(report.kind == VersionKind::delta && report.files == 0 && report.changed_tensors == 0);
      check_pulled(work, 1, model.wholes);
    }
    // Every fifth byte: whole elements of "a" have two bytes.
    model.wholes.at("a") = nudged(model.wholes.at("a"), 10);
    report = publisher.publish(model.parts(group));
    if (group.rank() == 0) {
      RANK_CHECK(report.changed_tensors == 1 && report.changed_elements == 12 * 50 / 5);
      RANK_CHECK(report.tensors == 3 && report.files == 1);
      check_pulled(work, 2, model.wholes);
      const VersionLog log = read_versions(work / "source", {.base = work / "base", .verify = true});
      RANK_CHECK(log.is_sound() && log.versions.size() == 2);
      RANK_CHECK(log.versions.back().changed_elements == report.changed_elements);
      RANK_CHECK(log.versions.back().elements == 12 * 50 + 7 * 3 + 9);
      RANK_CHECK(log.versions.front().stream == log.versions.back().stream);
      RANK_CHECK(log.versions.back().ranks == 3);
    }
  });
}

TEST_CASE("a model with other tensors becomes a full version, which names the reason") {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(2, [&](Group& group) {
    SmallModel model;
    if (group.rank() == 0) write_base(work / "base", model.wholes);
    group.barrier();
    Publisher publisher(work / "source", {.base = work / "base", .full_every = 5}, group);
    const auto publish = [&](std::uint64_t version, VersionKind kind, const std::string& reason) {
      const PublishReport report = publisher.publish(model.parts(group));
      if (group.rank() != 0) return;
      RANK_CHECK(report.kind == kind);
      if (report.reason.find(reason) == std::string::npos) throw RankFailure("reason: " + report.reason);
      check_pulled(work, version, model.wholes);
      RANK_CHECK(read_text(work / "local/config.json") == "{}");
    };
    model.wholes.emplace("more", pattern(DType::f16, {4}, 9));
    publish(1, VersionKind::full, "\"more\" was added");
    model.wholes.at("b") = pattern(DType::f32, {8, 3}, 4);
    publish(2, VersionKind::full, "\"b\" is F32 [8, 3], and was F32 [7, 3]");
    model.change(7);
    publish(3, VersionKind::delta, "");
    model.wholes.erase("more");
    publish(4, VersionKind::full, "\"more\" was removed");
    publish(5, VersionKind::full, "every 5 versions");
    publish(6, VersionKind::delta, "");
  });
}

TEST_CASE("ranks that exchange their tensors between versions publish the same model, and report all bytes") {
  for (const int size : {1, 2}) {
    const TemporaryDirectory work(Medium::memory);
    run_ranks(size, [&](Group& group) {
      SmallModel model;
      if (group.rank() == 0) write_base(work / "base", model.wholes);
      group.barrier();
      Publisher publisher(work / "source", {.base = work / "base"}, group);
      for (int version = 1; version < 6; ++version) {
        model.change(static_cast<std::uint8_t>(version));
        std::vector<TensorPart> parts;
        int number = version;
        for (const auto& [name, whole] : model.wholes)
          if (number++ % size == group.rank()) parts.push_back({name, whole});
        Progress last;
        publisher.publish(parts, {.full = version == 3, .progress = [&](const Progress& now) { last = now; }});
        if (group.rank() != 0) continue;
        RANK_CHECK(last.bytes == last.total_bytes && last.bytes != 0);
        check_pulled(work, static_cast<std::uint64_t>(version), model.wholes);
      }
    });
  }
}

TEST_CASE("a failure is one error on all ranks, leaves no version, and the next call succeeds") {
  for (const auto& [call, path] : std::vector<std::pair<std::string, std::string>>{
           {"pwrite", "rank-0000"}, {"fsync", "rank-0000"}, {"pwrite", "index.json"}, {"rename", "weight_v"}}) {
    CAPTURE(call);
    const TemporaryDirectory work(Medium::memory);
    run_ranks(3, [&](Group& group) {
      SmallModel model;
      if (group.rank() == 0) write_base(work / "base", model.wholes);
      group.barrier();
      Publisher publisher(work / "source", {.base = work / "base"}, group);
      (void)publisher.publish(model.parts(group));
      model.change(3);
      {
        const FailingCall failing({.call = call, .path = path, .error = ENOSPC});
        check_refused(group, ErrorKind::out_of_space, "", [&] { (void)publisher.publish(model.parts(group)); });
      }
      if (group.rank() == 0) RANK_CHECK(test::names_in(work / "source") == std::vector<std::string>{"weight_v000001"});
      group.barrier();
      RANK_CHECK(publisher.publish(model.parts(group)).version == 2);
      if (group.rank() == 0) check_pulled(work, 2, model.wholes);
    });
  }
}

TEST_CASE("mistakes are refused on all ranks") {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(2, [&](Group& group) {
    SmallModel model;
    SmallModel other;
    for (auto& [name, whole] : other.wholes) whole = masked(whole, 0x55);
    if (group.rank() == 0) {
      write_base(work / "base", model.wholes);
      write_base(work / "other", other.wholes);
    }
    group.barrier();
    check_refused(group, ErrorKind::invalid_argument, "base", [&] { Publisher(work / "source", {}, group); });
    check_refused(group, ErrorKind::not_found, "nowhere",
                  [&] { Publisher(work / "source", {.base = work / "nowhere"}, group); });
    Publisher first(work / "source", {.base = work / "base"}, group);
    model.change(1);
    (void)first.publish(model.parts(group));
    check_refused(group, ErrorKind::invalid_argument, "the next version is 2, and version 5 was requested",
                  [&] { (void)first.publish(model.parts(group), {.version = 5}); });
    // Another base: its unchanged tensors are not those that the first version had.
    Publisher wrong(work / "source", {.base = work / "other"}, group);
    check_refused(group, ErrorKind::corrupt, "the base is another model",
                  [&] { (void)wrong.publish(model.parts(group)); });
    // Another trainer has continued.
    Publisher second(work / "source", {.base = work / "base"}, group);
    model.change(2);
    RANK_CHECK(second.publish(model.parts(group)).version == 2);
    check_refused(group, ErrorKind::invalid_argument, "another publisher has published version 2",
                  [&] { (void)first.publish(model.parts(group)); });
    // Replicas that differ.
    std::vector<TensorPart> parts = model.parts(group);
    if (group.rank() == 1) parts.back().tensor = masked(parts.back().tensor, 1);
    check_refused(group, ErrorKind::rank_mismatch, "\"norm\"", [&] { (void)second.publish(parts); });
    RANK_CHECK(second.publish(model.parts(group)).version == 3);
    if (group.rank() == 0) check_pulled(work, 3, model.wholes);
  });
}

TEST_CASE("a base with an unchanged tensor of other values is noticed by the digest of the version") {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(2, [&](Group& group) {
    SmallModel model;
    SmallModel other;
    other.wholes.at("b") = masked(other.wholes.at("b"), 1);
    if (group.rank() == 0) {
      write_base(work / "base", model.wholes);
      write_base(work / "other", other.wholes);
    }
    group.barrier();
    Publisher first(work / "source", {.base = work / "base"}, group);
    model.change(1);
    (void)first.publish(model.parts(group));
    Publisher wrong(work / "source", {.base = work / "other"}, group);
    check_refused(group, ErrorKind::invalid_argument, "Pass the base with which the versions began",
                  [&] { (void)wrong.publish(model.parts(group)); });
  });
}

TEST_CASE("a tied head that the base lacks is left out, and one that it has remains") {
  for (const bool base_has_head : {false, true}) {
    CAPTURE(base_has_head);
    const TemporaryDirectory work(Medium::memory);
    run_ranks(2, [&](Group& group) {
      Tensors wholes{{"model.embed_tokens.weight", pattern(DType::bf16, {10, 4}, 1)},
                     {"model.norm.weight", pattern(DType::bf16, {4}, 2)}};
      const std::string head = "lm_head.weight";
      if (base_has_head) wholes.emplace(head, wholes.at("model.embed_tokens.weight"));
      if (group.rank() == 0)
        write_base(work / "base", wholes, R"({"tie_word_embeddings": true, "hidden_size": 4, "vocab_size": 10})");
      group.barrier();
      for (auto& [name, whole] : wholes) whole = masked(whole, 5);
      std::vector<TensorPart> parts;
      for (const auto& [name, whole] : wholes) parts.push_back({name, whole});
      if (!base_has_head) parts.push_back({head, wholes.at("model.embed_tokens.weight")});
      Publisher publisher(work / "source", {.base = work / "base"}, group);
      const PublishReport report = publisher.publish(parts);
      if (group.rank() != 0) return;
      RANK_CHECK(report.kind == VersionKind::delta);
      RANK_CHECK(report.skipped.size() == (base_has_head ? 0 : 1));
      check_pulled(work, 1, wholes);
    });
  }
}

TEST_CASE("the ranks share the work of publishing a model's files") {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(2, [&](Group& group) {
    SmallModel model;
    if (group.rank() == 0) write_base(work / "base", model.wholes);
    for (auto& [name, whole] : model.wholes) whole = masked(whole, 1);
    if (group.rank() == 0) write_base(work / "new", model.wholes);
    group.barrier();
    const PublishReport report = publish_version(work / "new", work / "source", {.base = work / "base"}, group);
    if (group.rank() != 0) return;
    RANK_CHECK(report.kind == VersionKind::delta && report.changed_tensors == 3 && report.files == 2);
    check_pulled(work, 1, model.wholes);
  });
}

TEST_CASE("a full version ends a chain that is damaged") {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(2, [&](Group& group) {
    SmallModel model;
    if (group.rank() == 0) write_base(work / "base", model.wholes);
    group.barrier();
    {
      Publisher publisher(work / "source", {.base = work / "base"}, group);
      for (const std::uint8_t mask : {1, 2, 3}) {
        model.change(mask);
        (void)publisher.publish(model.parts(group));
      }
    }
    if (group.rank() == 0) fs::remove_all(work / "source/weight_v000002");
    group.barrier();
    Publisher publisher(work / "source", {.base = work / "base"}, group);
    check_refused(group, ErrorKind::not_found, "version 2 is missing",
                  [&] { (void)publisher.publish(model.parts(group)); });
    RANK_CHECK(publisher.publish(model.parts(group), {.full = true}).version == 4);
    model.change(9);
    RANK_CHECK(publisher.publish(model.parts(group)).version == 5);
    if (group.rank() == 0) check_pulled(work, 5, model.wholes);
  });
}

TEST_CASE("a publisher continues after a sync that failed when the version was visible") {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(2, [&](Group& group) {
    SmallModel model;
    if (group.rank() == 0) write_base(work / "base", model.wholes);
    group.barrier();
    Publisher publisher(work / "source", {.base = work / "base"}, group);
    int syncs = 0;
    for (std::uint64_t version = 1; version <= 3; ++version) {
      model.change(static_cast<std::uint8_t>(version));
      // The last directory that is synced is SOURCE.
      const FailingCall failing({.call = "fsync-directory",
                                 .path = "source",
                                 .error = version == 2 ? EIO : 0,
                                 .after = version == 2 ? syncs - 1 : 0});
      const PublishReport report = publisher.publish(model.parts(group));
      RANK_CHECK(report.version == version);
      syncs = FailingCall::seen();
      if (group.rank() == 0) RANK_CHECK(report.notes.size() == (version == 2 ? 1 : 0));
    }
    if (group.rank() == 0) check_pulled(work, 3, model.wholes);
  });
}

TEST_CASE("old versions are deleted behind a full one") {
  const TemporaryDirectory work(Medium::memory);
  run_ranks(1, [&](Group& group) {
    SmallModel model;
    write_base(work / "base", model.wholes);
    Publisher publisher(work / "source", {.base = work / "base", .keep = 3, .keep_for = std::chrono::seconds(0)},
                        group);
    for (std::uint64_t version = 1; version <= 9; ++version) {
      model.change(static_cast<std::uint8_t>(version));
      const PublishReport report = publisher.publish(model.parts(group), {.full = version == 5});
      std::vector<std::uint64_t> removed;
      if (version == 5) removed = {1, 2};
      if (version == 6) removed = {3};
      if (version == 7) removed = {4};
      if (report.removed != removed) throw RankFailure("other versions were removed after " + std::to_string(version));
    }
    check_pulled(work, 9, model.wholes);
  });
}
